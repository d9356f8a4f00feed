//! Writes outgoing data to connections, in the thread of the sender.
//!
//! A push through TCP costs as much as copying some 25 KiB, so small messages are gathered; a
//! message that is probably a question or an answer is written at once. No data are left unsent: a
//! thread that is about to wait flushes first, and the background thread takes care of the rest.

use std::sync::Arc;

use bowline_base::clock;
use bowline_rds::{LinkId, Sent};
use bowline_wait::Leader;

use crate::link::WriteEnd;
use crate::shared::{Shared, State};
use crate::todo::Scratch;

/// Number of bytes waiting on a link that are written at once.
pub(crate) const FLUSH_BYTES: usize = 256 << 10;
/// Most bytes of one write.
const WRITE_MAX: usize = (1 << 20) + (64 << 10);
/// Number of unacknowledged bytes kept for a path that makes a sender read acknowledgements, if no
/// thread polls.
const HELD_BYTES: u64 = 512 << 10;
/// A link that was not written for this time, in nanoseconds, is idle: a message is written at
/// once.
const IDLE_GAP_NS: u64 = 30_000;
/// Unflushed data older than this, in nanoseconds, are written by the next sender that checks the
/// clock.
const AGE_MAX_NS: u64 = 400_000;
/// After how many messages a sender that gathers checks the clock.
const CLOCK_EVERY: u32 = 16;
/// Unflushed data older than this, in nanoseconds, are written by the background thread.
pub(crate) const HELPER_AGE_NS: u64 = 500_000;

impl Shared {
    /// Decides how to send a message that was just accepted; returns a link to flush now.
    #[inline]
    pub(crate) fn gather(&self, st: &mut State, sent: &Sent) -> Option<LinkId> {
        let id = sent.link?;
        let known = st.now.as_nanos();
        let slot = st.slot(id)?;
        if slot.writing || slot.blocked {
            // The thread that writes checks again when it is done; the system reports when a full
            // link can be written.
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
        if slot.received_since_write {
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
                slot.transmit_pending = true;
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
            slot.received_since_write = false;
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
            // The system may have reported room before this thread could note that there was none.
            let room = slot.writable_events != events;
            let blocked = written.end != WriteEnd::All;
            slot.blocked = blocked && !room;
            st.core.transmitted(now, id, written.bytes, blocked);
            if st.core.wants_tcp_ack(id) {
                if st.tcp_acks {
                    // Earlier writes may have been acknowledged by now.
                    self.check_tcp_ack(&mut st, id, now);
                } else {
                    st.tcp_acks = true;
                    st.next_tcp_ack = now.as_nanos();
                }
                if st.senders > 0 {
                    st.check_tcp_acks_soon();
                }
            }
            if !sc.reads_acks
                && st.lead.leader() != Leader::Application
                && st.core.held_bytes(id) >= HELD_BYTES
            {
                // Acknowledgements have probably come, and no other thread reads them. The memory
                // they release is still in the cache and is written next.
                sc.reads_acks = true;
                sc.todo.read.push(Arc::clone(&link));
            }
            if written.end == WriteEnd::Failed {
                // Reading finds the reason of the failure, and the bytes that came before it.
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

    /// Puts all links with unflushed data older than `age_ns` nanoseconds on the to-do list.
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

    /// Tells whether the background thread has to be informed of unflushed data.
    #[inline]
    pub(crate) fn arm_flush(st: &mut State) -> bool {
        if st.flush_armed || st.dirty.is_empty() {
            return false;
        }
        st.flush_armed = true;
        true
    }
}
