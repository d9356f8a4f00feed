//! One of the two byte streams of a connection: the bytes written and not read yet, and how far
//! they have come.
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

/// First and longest time in nanoseconds until unacknowledged bytes are sent again.
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
    /// Offset up to which the sender may send, as far as it knows.
    pub(super) limit: u64,
    /// Offset up to which the receiver has allowed it to send.
    advertised: u64,
    /// The writer has ended it.
    pub(super) fin: bool,
    pub(super) fin_sent: bool,
    pub(super) fin_delivered: bool,
    pub(super) fin_acked: bool,
    /// Arrival time of the latest packet that must not be overtaken.
    pub(super) last_arrival: u64,
    rto_pending: bool,
    rto: u64,
    /// When the receiver last extended the limit or acknowledged bytes.
    pub(super) progress: u64,
    /// Offset at which the stream breaks, and how.
    pub(super) cut: Option<(u64, Cut)>,
    pub(super) tap: Tap,
    /// Bytes that the receiving TCP had acknowledged and no process will ever read.
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

    // Methods of the sender's side.

    /// Returns the number of bytes that the send buffer can take now.
    pub(super) fn room(&self) -> u64 {
        self.send_cap.saturating_sub(self.written - self.acked)
    }

    /// Tells whether a writer that found no room should try again.
    pub(super) fn has_room_again(&self) -> bool {
        self.room() * 3 >= self.send_cap
    }

    /// Tells whether written bytes are not acknowledged.
    pub(super) fn is_owed(&self) -> bool {
        self.acked < self.written || (self.fin && !self.fin_acked)
    }

    /// Returns the number of bytes written and not acknowledged; a FIN counts as one [SIOCOUTQ].
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

    /// Handles an acknowledgement and a limit of the receiver; returns true if either is new.
    pub(super) fn handle_ack(&mut self, now: u64, acked: u64, limit: u64, fin: bool) -> bool {
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

    /// Starts the retransmission timer. Returns its time; `None` if it runs already.
    pub(super) fn start_rto(&mut self) -> Option<u64> {
        if std::mem::replace(&mut self.rto_pending, true) {
            return None;
        }
        let rto = self.rto;
        self.rto = (rto * 2).min(RTO_MAX);
        Some(rto)
    }

    /// Notes that the retransmission timer has fired.
    pub(super) fn end_rto(&mut self) {
        self.rto_pending = false;
    }

    /// Resets the next retransmission timeout to the first one.
    pub(super) fn reset_rto(&mut self) {
        self.rto = RTO_MIN;
    }

    /// Goes back to the first unacknowledged byte.
    pub(super) fn rewind(&mut self) {
        self.sent = self.acked;
        self.fin_sent = false;
    }

    // Methods of the receiver's side.

    /// Tells whether bytes have arrived and were not read.
    pub(super) fn has_unread(&self) -> bool {
        self.delivered > self.read
    }

    /// Returns the range of these bytes.
    pub(super) fn unread(&self) -> (u64, u64) {
        (self.read, self.delivered)
    }

    /// Handles a segment; tells whether its bytes, and whether its end, are new.
    pub(super) fn deliver(&mut self, start: u64, end: u64, fin: bool) -> (bool, bool) {
        let fresh = start <= self.delivered && end > self.delivered;
        if fresh {
            self.delivered = end;
        }
        let ended = fin && start <= self.delivered && !self.fin_delivered;
        self.fin_delivered |= ended;
        (fresh, ended)
    }

    /// Reads up to `max` bytes that have arrived.
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

    /// Tells whether the sender should soon learn that there is room.
    pub(super) fn is_nearly_shut(&self) -> bool {
        self.advertised - self.delivered < self.recv_cap / 4
    }

    /// Returns the offset up to which the sender may be allowed to send.
    pub(super) fn advertise(&mut self) -> u64 {
        self.advertised = self.advertised.max(self.read + self.recv_cap);
        self.advertised
    }

    /// Takes the cut that is due after the bytes that have arrived.
    pub(super) fn due_cut(&mut self) -> Option<Cut> {
        let (_, cut) = self.cut.take_if(|(at, _)| self.delivered >= *at)?;
        Some(cut)
    }

    /// Frees the stream, which neither end uses any more.
    pub(super) fn clear(&mut self) {
        self.bytes = VecDeque::new();
        self.tap = Tap::default();
    }
}
