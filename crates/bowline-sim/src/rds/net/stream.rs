//! One of the two byte streams of a connection: what was written and not read yet, and how far it
//! has come.
//!
//! ```text
//!                         read      delivered    sent         written
//!   ----------------------|---------|------------|------------|-----> offset
//!     handed to process   | receive | on the way | send buffer|
//!                         | buffer  |            |            |
//!                     acked: what the sender knows of `delivered`
//! ```

use std::collections::VecDeque;

use super::Cut;
use super::tap::Tap;
use crate::engine::queue::{MS, SEC};

/// First and longest time until what is not acknowledged is sent again.
const RTO_MIN: u64 = 200 * MS;
const RTO_MAX: u64 = 4 * SEC;

/// A byte stream.
#[derive(Debug)]
pub(super) struct Stream {
    /// The bytes from `read` to `written`.
    bytes: VecDeque<u8>,
    read: u64,
    pub(super) delivered: u64,
    pub(super) sent: u64,
    pub(super) written: u64,
    pub(super) acked: u64,
    send_cap: u64,
    recv_cap: u64,
    /// How far the sender may send, as it knows.
    pub(super) limit: u64,
    /// How far the receiver has said that it may.
    advertised: u64,
    /// The writer has ended it.
    pub(super) fin: bool,
    pub(super) fin_sent: bool,
    pub(super) fin_delivered: bool,
    pub(super) fin_acked: bool,
    /// When the latest packet that keeps its place arrives.
    pub(super) last_arrival: u64,
    rto_pending: bool,
    rto: u64,
    /// When the receiver last let the sender go on.
    pub(super) progress: u64,
    /// Where it breaks, and how.
    pub(super) cut: Option<(u64, Cut)>,
    pub(super) tap: Tap,
    /// Bytes the receiving TCP had acknowledged and no process will ever read.
    pub(super) discarded: Option<(u64, u64)>,
}

impl Stream {
    pub(super) fn new(send_cap: u64, recv_cap: u64, cut: Option<(u64, Cut)>) -> Self {
        Self {
            bytes: VecDeque::new(),
            read: 0,
            delivered: 0,
            sent: 0,
            written: 0,
            acked: 0,
            send_cap,
            recv_cap,
            limit: recv_cap,
            advertised: recv_cap,
            fin: false,
            fin_sent: false,
            fin_delivered: false,
            fin_acked: false,
            last_arrival: 0,
            rto_pending: false,
            rto: RTO_MIN,
            progress: 0,
            cut,
            tap: Tap::default(),
            discarded: None,
        }
    }

    // The sender's side.

    /// Bytes the send buffer takes now.
    pub(super) fn room(&self) -> u64 {
        self.send_cap.saturating_sub(self.written - self.acked)
    }

    /// Whether a writer that found no room should try again.
    pub(super) fn has_room_again(&self) -> bool {
        self.room() * 3 >= self.send_cap
    }

    /// Whether something written is not acknowledged.
    pub(super) fn is_owed(&self) -> bool {
        self.acked < self.written || (self.fin && !self.fin_acked)
    }

    /// Bytes written and not acknowledged, a FIN counted as one [SIOCOUTQ].
    pub(super) fn unacked(&self) -> u64 {
        self.written - self.acked + u64::from(self.fin && !self.fin_acked)
    }

    /// Takes bytes for which there is room.
    pub(super) fn write(&mut self, now: u64, bytes: &[u8]) {
        if self.written == self.acked {
            self.progress = now;
        }
        self.bytes.extend(bytes);
        self.written += bytes.len() as u64;
    }

    /// Hears from the receiver how far it is and how far it may be sent; true if it is further.
    pub(super) fn hear_ack(&mut self, now: u64, acked: u64, limit: u64, fin: bool) -> bool {
        let further = acked > self.acked;
        if further || limit > self.limit || fin {
            self.progress = now;
            self.reset_rto();
        }
        self.acked = self.acked.max(acked);
        self.sent = self.sent.max(self.acked);
        self.limit = self.limit.max(limit);
        self.fin_acked |= fin && self.fin;
        further
    }

    /// The time after which to look whether something must be sent again; `None` if somebody will.
    pub(super) fn start_rto(&mut self) -> Option<u64> {
        if std::mem::replace(&mut self.rto_pending, true) {
            return None;
        }
        let rto = self.rto;
        self.rto = (rto * 2).min(RTO_MAX);
        Some(rto)
    }

    /// That time has passed.
    pub(super) fn end_rto(&mut self) {
        self.rto_pending = false;
    }

    /// The next such time is the first one again.
    pub(super) fn reset_rto(&mut self) {
        self.rto = RTO_MIN;
    }

    /// Goes back to what is not acknowledged.
    pub(super) fn rewind(&mut self) {
        self.sent = self.acked;
        self.fin_sent = false;
    }

    // The receiver's side.

    /// Whether something has come and was not read.
    pub(super) fn has_unread(&self) -> bool {
        self.delivered > self.read
    }

    /// From where to where that is.
    pub(super) fn unread(&self) -> (u64, u64) {
        (self.read, self.delivered)
    }

    /// A segment arrives; tells whether its bytes and whether its end are news.
    pub(super) fn deliver(&mut self, start: u64, end: u64, fin: bool) -> (bool, bool) {
        let fresh = start <= self.delivered && end > self.delivered;
        if fresh {
            self.delivered = end;
        }
        let ended = fin && start <= self.delivered && !self.fin_delivered;
        self.fin_delivered |= ended;
        (fresh, ended)
    }

    /// Hands out up to `max` bytes of what has come.
    pub(super) fn read(&mut self, out: &mut Vec<u8>, max: usize) -> usize {
        let n = ((self.delivered - self.read) as usize).min(max);
        let (front, back) = self.bytes.as_slices();
        let first = n.min(front.len());
        out.extend_from_slice(&front[..first]);
        out.extend_from_slice(&back[..n - first]);
        self.bytes.drain(..n);
        self.read += n as u64;
        self.tap.forget(self.read);
        n
    }

    /// Whether the sender should hear soon that there is room.
    pub(super) fn is_nearly_shut(&self) -> bool {
        self.advertised - self.delivered < self.recv_cap / 4
    }

    /// How far the sender may be told to send.
    pub(super) fn advertise(&mut self) -> u64 {
        self.advertised = self.advertised.max(self.read + self.recv_cap);
        self.advertised
    }

    /// Takes out the cut that is due with what has arrived.
    pub(super) fn due_cut(&mut self) -> Option<Cut> {
        let (_, cut) = self.cut.take_if(|(at, _)| self.delivered >= *at)?;
        Some(cut)
    }

    /// Nobody has anything to do with it any more.
    pub(super) fn clear(&mut self) {
        self.bytes = VecDeque::new();
        self.tap = Tap::default();
    }
}
