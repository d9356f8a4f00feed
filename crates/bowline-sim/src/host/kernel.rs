//! The system under a node and its programs: pairs of unix sockets, their descriptors, and what a
//! node is told of them. A descriptor is closed when the last holder of it is gone.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use bowline_host::core::{Credentials, HeapMemory};

/// No room, or nothing there.
pub(super) const EAGAIN: i32 = 11;
/// The other end is closed.
pub(super) const EPIPE: i32 = 32;

/// What a node is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Token {
    Channel(u64),
    Socket(u64),
}

/// What happened on what a node watches, each once; `true`: the other end is closed.
#[derive(Debug, Default)]
pub(super) struct Events {
    pending: RefCell<BTreeMap<Token, bool>>,
    /// Of so many events one is lost, for a node that makes mistakes.
    pub(super) lose: Cell<u64>,
    count: Cell<u64>,
}

impl Events {
    fn tell(&self, token: Token, has_ended: bool) {
        self.count.set(self.count.get() + 1);
        if self.lose.get() > 0 && self.count.get().is_multiple_of(self.lose.get()) {
            return;
        }
        *self.pending.borrow_mut().entry(token).or_default() |= has_ended;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.borrow().is_empty()
    }

    pub(super) fn take(&self) -> Vec<(Token, bool)> {
        std::mem::take(&mut *self.pending.borrow_mut()).into_iter().collect()
    }
}

/// A descriptor.
#[derive(Clone, Debug)]
pub(super) enum Fd {
    End(Rc<End>),
    Memory(Rc<HeapMemory>),
}

#[derive(Debug)]
struct Message {
    bytes: Vec<u8>,
    given: Vec<Fd>,
}

/// A kind of unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes.
    Stream,
    /// Messages.
    Packet,
}

/// Who is told of what happens on an end, and as what.
type Watch = (Rc<Events>, Token);

/// A connected pair of unix sockets.
#[derive(Debug)]
struct Pair {
    kind: Kind,
    /// Bytes, or messages, that wait for one end at most.
    room: usize,
    cookies: [u64; 2],
    /// What waits for each end.
    inboxes: [RefCell<VecDeque<Message>>; 2],
    gone: [Cell<bool>; 2],
    watches: [RefCell<Option<Watch>>; 2],
    /// Who is at the other end of each.
    peers: [Cell<Credentials>; 2],
}

/// One end of a pair.
#[derive(Debug)]
pub(super) struct End {
    pair: Rc<Pair>,
    side: usize,
}

/// What was received.
pub(super) struct Taken {
    pub(super) bytes: Vec<u8>,
    pub(super) given: Vec<Fd>,
}

/// Makes a pair; `room` is how many bytes or messages wait for one of its ends at most.
pub(super) fn pair(kind: Kind, room: usize, cookies: [u64; 2]) -> [Rc<End>; 2] {
    let nobody = Credentials { process: 0, user: 0, group: 0 };
    let pair = Rc::new(Pair {
        kind,
        room,
        cookies,
        inboxes: Default::default(),
        gone: Default::default(),
        watches: Default::default(),
        peers: [Cell::new(nobody), Cell::new(nobody)],
    });
    [0, 1].map(|side| Rc::new(End { pair: Rc::clone(&pair), side }))
}

impl End {
    const fn other(&self) -> usize {
        1 - self.side
    }

    pub(super) fn cookie(&self) -> u64 {
        self.pair.cookies[self.side]
    }

    /// Tells who sends what comes here.
    pub(super) fn set_peer(&self, peer: Credentials) {
        self.pair.peers[self.side].set(peer);
    }

    pub(super) fn peer(&self) -> Credentials {
        self.pair.peers[self.side].get()
    }

    pub(super) fn is_packet(&self) -> bool {
        self.pair.kind == Kind::Packet
    }

    fn used(&self, side: usize) -> usize {
        let inbox = self.pair.inboxes[side].borrow();
        match self.pair.kind {
            Kind::Stream => inbox.iter().map(|message| message.bytes.len()).sum(),
            Kind::Packet => inbox.len(),
        }
    }

    /// Tells whether `poll` shows room to send.
    pub(super) fn is_writable(&self) -> bool {
        4 * self.used(self.other()) <= self.pair.room || self.is_over()
    }

    /// Tells whether there is something to receive, or never will be.
    pub(super) fn is_readable(&self) -> bool {
        !self.pair.inboxes[self.side].borrow().is_empty() || self.is_over()
    }

    /// One of the two ends is closed.
    pub(super) fn is_over(&self) -> bool {
        self.pair.gone.iter().any(Cell::get)
    }

    /// Tells whether the other end has read everything.
    pub(super) fn is_all_read(&self) -> bool {
        self.pair.inboxes[self.other()].borrow().is_empty()
    }

    /// Bytes that wait for this end.
    pub(super) fn unread(&self) -> usize {
        self.pair.inboxes[self.side].borrow().iter().map(|message| message.bytes.len()).sum()
    }

    pub(super) fn send(&self, bytes: &[u8], given: &[Fd]) -> Result<usize, i32> {
        if self.is_over() {
            return Err(EPIPE);
        }
        let to = self.other();
        let free = self.pair.room.saturating_sub(self.used(to));
        let len = match self.pair.kind {
            Kind::Stream => bytes.len().min(free),
            Kind::Packet => bytes.len(),
        };
        if free == 0 {
            return Err(EAGAIN);
        }
        let message = Message { bytes: bytes[..len].to_vec(), given: given.to_vec() };
        self.pair.inboxes[to].borrow_mut().push_back(message);
        self.tell(to, false);
        Ok(len)
    }

    /// Receives up to `most` bytes. A stream gives what is there up to the first message that
    /// brought descriptors, and that one.
    pub(super) fn receive(&self, most: usize) -> Result<Taken, i32> {
        let mut taken = Taken { bytes: Vec::new(), given: Vec::new() };
        let mut inbox = self.pair.inboxes[self.side].borrow_mut();
        if inbox.is_empty() {
            return if self.is_over() { Ok(taken) } else { Err(EAGAIN) };
        }
        while let Some(first) = inbox.front_mut() {
            let n = first.bytes.len().min(most - taken.bytes.len());
            taken.bytes.extend(first.bytes.drain(..n));
            let had_descriptors = !first.given.is_empty();
            taken.given.append(&mut first.given);
            let is_done = first.bytes.is_empty() || self.pair.kind == Kind::Packet;
            if is_done {
                inbox.pop_front();
            }
            if !is_done || had_descriptors || self.pair.kind == Kind::Packet {
                break;
            }
        }
        drop(inbox);
        // Who watches for room, watches channels only.
        if self.pair.kind == Kind::Stream {
            self.tell(self.other(), false);
        }
        Ok(taken)
    }

    fn tell(&self, side: usize, has_ended: bool) {
        if let Some((events, token)) = &*self.pair.watches[side].borrow() {
            events.tell(*token, has_ended);
        }
    }

    /// Has what happens here told; what there is already is told at once.
    pub(super) fn watch(&self, events: &Rc<Events>, token: Token) {
        *self.pair.watches[self.side].borrow_mut() = Some((Rc::clone(events), token));
        if self.is_readable() || self.pair.kind == Kind::Stream {
            self.tell(self.side, self.is_over());
        }
    }

    pub(super) fn unwatch(&self) {
        *self.pair.watches[self.side].borrow_mut() = None;
    }

    /// Ends the connection, whoever else has this end.
    pub(super) fn shut(&self) {
        self.pair.gone[self.side].set(true);
        let unread = std::mem::take(&mut *self.pair.inboxes[self.side].borrow_mut());
        drop(unread);
        self.tell(self.other(), true);
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.unwatch();
        self.shut();
    }
}
