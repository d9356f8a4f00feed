//! From the core onto connections, in the thread of whoever sends.
//!
//! A push through TCP costs as much as copying some 25 KiB, so small messages are gathered; a
//! message that is likely a question or an answer goes at once. Nothing stays behind: a thread
//! that is about to wait flushes first, and the background thread looks after the rest.

use std::sync::Arc;

use bowline_base::clock;
use bowline_rds::{LinkId, Sent};

use crate::link::WriteEnd;
use crate::shared::{Role, Shared, State};
use crate::todo::Scratch;

/// This much waiting on a link is written at once.
pub(crate) const FLUSH_BYTES: usize = 256 << 10;
/// Most bytes of one write.
const WRITE_MAX: usize = (1 << 20) + (64 << 10);
/// This much kept until it is acknowledged makes a sender read the acknowledgements, if nobody
/// polls.
const HELD_BYTES: u64 = 512 << 10;
/// A link not written for so long is idle: whoever sends now wants it sent now.
const IDLE_GAP_NS: u64 = 30_000;
/// Unflushed data older than this are written by the next sender that looks at the clock.
const AGE_MAX_NS: u64 = 400_000;
/// How often, in messages, a sender that gathers looks at the clock.
const CLOCK_EVERY: u32 = 16;
/// Unflushed data older than this are written by the background thread.
pub(crate) const HELPER_AGE_NS: u64 = 500_000;

impl Shared {
    /// Decides what becomes of a message just accepted; tells whether to flush its link now.
    #[inline]
    pub(crate) fn gather(&self, st: &mut State, sent: &Sent) -> Option<LinkId> {
        let id = sent.link?;
        let known = st.now.as_nanos();
        let slot = st.slot(id)?;
        if slot.writing || slot.blocked {
            // The writer looks again when it is done, the system tells when it can go on.
            return None;
        }
        if sent.queued_bytes >= FLUSH_BYTES {
            return Some(id);
        }
        if slot.dirty_since_ns != 0 {
            slot.dirty_messages += 1;
            if !slot.dirty_messages.is_multiple_of(CLOCK_EVERY) {
                return None;
            }
            let now = clock::now().as_nanos();
            return (now.saturating_sub(slot.dirty_since_ns) > AGE_MAX_NS).then_some(id);
        }
        if slot.answered {
            return Some(id);
        }
        let now = clock::now().as_nanos().max(known);
        if now.saturating_sub(slot.last_write_ns) > IDLE_GAP_NS {
            return Some(id);
        }
        slot.dirty_since_ns = now;
        slot.dirty_messages = 0;
        if !slot.listed {
            slot.listed = true;
            st.dirty.push(id);
        }
        None
    }

    /// Writes everything that waits on a link.
    pub(crate) fn flush(&self, sc: &mut Scratch, id: LinkId) {
        let mut st = self.lock();
        loop {
            let now = st.at(clock::now());
            let Some(slot) = st.slot(id) else { return };
            let Some(link) = slot.link.clone() else {
                slot.wanted = true;
                return;
            };
            if slot.writing {
                return;
            }
            let events = slot.writable_events;
            slot.dirty_since_ns = 0;
            if st.core.poll_transmit(now, id, &mut sc.batch, WRITE_MAX) == 0 {
                sc.batch.clear();
                self.collect(&mut st, sc, Some(id));
                return;
            }
            let Some(slot) = st.slot(id) else { return };
            slot.writing = true;
            slot.answered = false;
            slot.last_write_ns = now.as_nanos();
            drop(st);

            let written = link.write(&sc.batch);
            sc.batch.clear();
            self.stats.writes.add(written.calls);
            self.stats.bytes_written.add(written.bytes as u64);

            st = self.lock();
            let now = st.now;
            let Some(slot) = st.slot(id) else { return };
            slot.writing = false;
            // The system may have said that there is room again before this thread could note that
            // there was none.
            let room = slot.writable_events != events;
            let blocked = written.end != WriteEnd::All;
            slot.blocked = blocked && !room;
            st.core.transmitted(now, id, written.bytes, blocked);
            if st.core.wants_tcp_ack(id) {
                if st.tcp_acks {
                    // What was written before this may be acknowledged by now.
                    self.check_tcp_ack(&mut st, id, now);
                } else {
                    st.tcp_acks = true;
                    st.next_tcp_ack = now.as_nanos();
                }
                if st.senders > 0 {
                    st.hurry_tcp_acks();
                }
            }
            if !sc.reads_acks && st.role != Role::App && st.core.held_bytes(id) >= HELD_BYTES {
                // Acknowledgements have come, most likely, and nobody else reads them. What they
                // release is still in the cache and is written next.
                sc.reads_acks = true;
                sc.todo.read.push(Arc::clone(&link));
            }
            if written.end == WriteEnd::Failed {
                // Why it failed, and what came before, is found by reading.
                self.collect(&mut st, sc, Some(id));
                drop(st);
                link.set_ending();
                self.read(sc, &link);
                return;
            }
            if blocked {
                if room {
                    st.core.handle_writable(now, id);
                }
                self.collect(&mut st, sc, (!room).then_some(id));
                if !room {
                    return;
                }
            }
        }
    }

    /// Puts all links with unflushed data that is older than `age_ns` on the to-do list.
    pub(crate) fn collect_dirty(&self, st: &mut State, sc: &mut Scratch, age_ns: u64) {
        if st.dirty.is_empty() {
            return;
        }
        let now = clock::now().as_nanos();
        let mut dirty = core::mem::take(&mut st.dirty);
        dirty.retain(|id| {
            let Some(slot) = st.slot(*id) else { return false };
            if slot.dirty_since_ns == 0 {
                slot.listed = false;
                return false;
            }
            if now.saturating_sub(slot.dirty_since_ns) < age_ns {
                return true;
            }
            slot.listed = false;
            sc.todo.flush.push(*id);
            false
        });
        st.dirty = dirty;
    }

    /// Tells whether the background thread has to be told of unflushed data.
    #[inline]
    pub(crate) fn arm_flush(st: &mut State) -> bool {
        if st.flush_armed || st.dirty.is_empty() {
            return false;
        }
        st.flush_armed = true;
        true
    }
}
