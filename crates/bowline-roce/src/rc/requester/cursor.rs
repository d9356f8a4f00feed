//! What is sent next: a PSN, and the place in the send queue that it belongs to.
//!
//! ```text
//!   queue   [ head ][ .. ][ request: `sent` of its PSNs are behind `next` ][ waiting .. ]
//! ```
//! Only the place is kept here. Whether the packet may be sent is up to the
//! [window](super::window), and whether another one goes before it to the
//! [recovery](super::recovery).

use bowline_wire::roce::Psn;

use crate::sendq::{Request, SendQueue, Stage};

/// Position in the send queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    next: Psn,
    /// Index in the queue of the request that `next` belongs to.
    index: usize,
    /// Number of PSNs of that request that lie before `next`; 0 while it has not been started.
    sent: u32,
}

impl Cursor {
    /// A cursor at the head of an empty queue.
    pub(super) const fn new(next: Psn) -> Self {
        Self { next, index: 0, sent: 0 }
    }

    /// PSN of the next packet.
    #[inline]
    pub(super) const fn next(&self) -> Psn {
        self.next
    }

    /// Index in the queue of the request that the next packet belongs to.
    #[inline]
    pub(super) const fn index(&self) -> usize {
        self.index
    }

    /// Number of PSNs of that request that lie before the next packet.
    #[inline]
    pub(super) const fn sent(&self) -> u32 {
        self.sent
    }

    /// Returns the request that the next packet belongs to.
    #[inline]
    pub(super) fn request<'a>(&self, queue: &'a SendQueue) -> Option<&'a Request> {
        queue.get(self.index)
    }

    /// Moves over `psns` PSNs within the request.
    #[inline]
    pub(super) fn advance(&mut self, psns: u32) {
        self.next += psns;
        self.sent += psns;
    }

    /// Moves to the next request: the packets of this one have all been sent, or it has none.
    #[inline]
    pub(super) const fn advance_request(&mut self) {
        self.index += 1;
        self.sent = 0;
    }

    /// Notes that the request at the head has left the queue.
    #[inline]
    pub(super) const fn head_left(&mut self) {
        match self.index.checked_sub(1) {
            Some(index) => self.index = index,
            None => self.sent = 0,
        }
    }

    /// Moves to `una`, the oldest PSN that is not acknowledged.
    pub(super) fn seek_una(&mut self, queue: &SendQueue, una: Psn) {
        *self = Self::new(una);
        // A local operation at the head would have been completed.
        if let Some(head) = queue.front()
            && head.is_started()
            && !head.is_local()
        {
            self.sent = una.since(head.first);
        }
    }

    /// Moves to a packet of a request with data that was sent; tells whether there is one.
    pub(super) fn seek(&mut self, queue: &SendQueue, psn: Psn) -> bool {
        let found = queue.iter().take_while(|request| request.stage == Stage::Started).position(
            |request| !request.is_local() && psn.is_within(request.first, request.packets),
        );
        let Some((index, request)) = found.and_then(|at| Some((at, queue.get(at)?))) else {
            return false;
        };
        *self = Self { next: psn, index, sent: psn.since(request.first) };
        request.is_data()
    }

    /// Moves to `end`: the next packet is a new one.
    pub(super) fn seek_end(&mut self, queue: &SendQueue, end: Psn) {
        let started = |request: &&Request| {
            request.stage == Stage::Started
                && (request.is_local() || !end.is_before(request.first + request.packets))
        };
        self.next = end;
        self.index = queue.iter().take_while(started).count();
        self.sent = match queue.get(self.index) {
            Some(request) if request.is_started() => end.since(request.first),
            _ => 0,
        };
    }
}
