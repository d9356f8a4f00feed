//! Remote reads and writes of a task.
//!
//! ```text
//! requester                                    responder
//!   | -- request: operation, pattern, key -------> |
//!   | <======= reads or writes the memory ======== |
//!   | <---------------- acknowledgement, with it - |
//!   checks what was written          is told of the end; checks what it has read
//! ```
//!
//! Each slot of each task of the peer has memory of its own for either role. Spec:
//! `docs/spec/tools.md`, sections 4.3 and 4.4.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    net::IpAddr,
    ops::Range,
    sync::Arc,
};

use super::{
    block::{Block, Keys},
    message::{Access, Rdma},
};
use bowline::rds::{RdmaMemory, RdmaStatus, Socket, Transfer};

/// Most bytes of an operation, and most local buffers it may have.
pub(crate) const BYTES_MAX: u64 = 1 << 20;
pub(crate) const BUFFERS_MAX: u32 = 512;
/// Largest offset of a buffer; buffers are apart by a multiple of it.
pub(crate) const PAGE: u32 = 4096;
/// The first messages of a flow carry no operation.
const PLAIN: u32 = 11;
/// Most keys that the key-o-meter remembers.
const KEYS_MAX: usize = 1 << 16;

/// Memory that is offered with a request.
#[derive(Clone, Copy, Debug, Default)]
struct Offer {
    key: Option<u64>,
    /// What the peer is to do; none when it has done it.
    now: Option<(Access, u64)>,
    /// The key before, which the peer may still be using: without a fence a read may end after its
    /// acknowledgement, but not after that of the next request.
    late: Option<u64>,
}

/// Why an operation did not end well.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It did what it should not have done.
    Data(String),
    /// It was not carried out, as when the peer has ended.
    Failed(String),
}

/// What is under way with the acknowledgement of a slot.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Answer {
    Idle,
    /// Memory is filled; nothing is sent.
    Prepared,
    /// Until the socket is told of its end.
    UnderWay(Access, u64),
}

/// The remote reads and writes of a task, in both roles.
#[derive(Debug)]
pub(crate) struct Transfers {
    memory: Arc<RdmaMemory>,
    depth: usize,
    piece: usize,
    pieces: usize,
    alignment: usize,
    keys: Keys,
    verify: bool,
    mode: u8,
    offers: Vec<Offer>,
    answers: Vec<Answer>,
    /// Place in memory of the first slot of the role that answers.
    answers_at: usize,
    offered: u64,
    scratch: Vec<u8>,
    meter: Option<KeyMeter>,
}

/// Returns the bytes of memory that a task needs.
pub(crate) fn memory_of_task(block: &Block) -> u64 {
    let slots = u64::from(block.tasks) * u64::from(block.depth) * 2;
    slots.saturating_mul(stride(block))
}

fn stride(block: &Block) -> u64 {
    (block.rdma_total() + u64::from(block.rdma_alignment)).next_multiple_of(PAGE.into())
}

impl Transfers {
    /// Makes the memory of a task.
    ///
    /// # Errors
    ///
    /// A line that says what failed.
    pub(crate) fn new(socket: &Socket, block: &Block) -> Result<Self, String> {
        let slots = usize::from(block.tasks) * block.depth as usize;
        let len = memory_of_task(block) as usize;
        let memory = socket
            .rdma_memory(len)
            .map_err(|error| format!("{len} bytes of memory for RDMA: {error}"))?;
        Ok(Self {
            memory,
            depth: block.depth as usize,
            piece: block.rdma_bytes as usize,
            pieces: block.rdma_vector as usize,
            alignment: block.rdma_alignment as usize,
            keys: block.keys,
            verify: block.verify,
            mode: block.rdma_mode,
            offers: vec![Offer::default(); slots],
            answers: vec![Answer::Idle; slots],
            answers_at: slots * stride(block) as usize,
            offered: 0,
            scratch: vec![0; block.rdma_total() as usize],
            meter: block.keys.meter.then(KeyMeter::default),
        })
    }

    /// Returns what the key-o-meter says, if there is one.
    pub(crate) fn keys(&self) -> Option<String> {
        self.meter.as_ref().map(ToString::to_string)
    }

    fn slot(&self, peer: usize, slot: u16) -> usize {
        peer * self.depth + usize::from(slot)
    }

    /// Returns the bytes of an operation.
    pub(crate) fn len(&self) -> usize {
        self.piece * self.pieces
    }

    /// Returns the place of the memory of a slot.
    fn part(&self, first: usize, slot: usize) -> Range<usize> {
        let stride = (self.len() + self.alignment).next_multiple_of(PAGE as usize);
        let start = first + slot * stride + self.alignment;
        start..start + self.len()
    }

    fn fill(&mut self, part: &Range<usize>, pattern: u64) {
        if self.verify {
            fill(&mut self.scratch, pattern);
            self.memory.write(part.start, &self.scratch);
        }
    }

    /// Returns the place of the first byte that is not of the pattern.
    fn wrong(&mut self, part: &Range<usize>, pattern: u64) -> Option<usize> {
        if !self.verify {
            return None;
        }
        self.memory.read(part.start, &mut self.scratch);
        let chunks = self.scratch.chunks(8).zip(0..);
        chunks.map(|(chunk, i)| (chunk, i * 8)).find_map(|(chunk, at)| {
            let pattern = pattern.to_ne_bytes();
            (*chunk != pattern[..chunk.len()])
                .then(|| at + chunk.iter().zip(pattern).take_while(|(a, b)| **a == *b).count())
        })
    }

    /// Prepares the memory of a request; returns what its header says of it. A request
    /// that was refused is prepared once.
    pub(crate) fn offer(
        &mut self,
        socket: &Socket,
        (peer, addr): (usize, IpAddr),
        slot: u16,
        sequence: u32,
    ) -> Result<Option<Rdma>, String> {
        if sequence < PLAIN {
            return Ok(None);
        }
        let slot = self.slot(peer, slot);
        let part = self.part(0, slot);
        let (access, pattern) = match self.offers[slot].now {
            Some(now) => now,
            None => {
                self.offered += 1;
                let access = match self.mode {
                    1 => Access::Read,
                    2 => Access::Write,
                    _ if self.offered % 2 == 1 => Access::Read,
                    _ => Access::Write,
                };
                let pattern = pattern(slot as u64, self.offered);
                // What is to be written differs in every byte from what is there.
                let before = if access == Access::Read { pattern } else { !pattern };
                self.fill(&part, before);
                self.offers[slot].now = Some((access, pattern));
                (access, pattern)
            }
        };
        let key = match self.offers[slot].key {
            Some(key) => key,
            None => {
                let key = socket
                    .rdma_register(&self.memory, part.clone(), Some(addr), self.keys.use_once)
                    .map_err(|error| format!("registering memory: {error}"))?;
                if let Some(meter) = &mut self.meter {
                    meter.issued(key);
                }
                self.offers[slot].key = Some(key);
                key
            }
        };
        let (size, vector) = (self.piece as u32, self.pieces as u32);
        let rdma = Rdma { access, pattern, key, size, vector, ..Rdma::default() };
        Ok(Some(rdma))
    }

    /// Notes the acknowledgement of a request; returns what the peer did.
    pub(crate) fn acknowledged(
        &mut self,
        socket: &Socket,
        peer: usize,
        slot: u16,
    ) -> Result<Option<Access>, String> {
        let slot = self.slot(peer, slot);
        let Some((access, pattern)) = self.offers[slot].now.take() else { return Ok(None) };
        if !self.keys.cache {
            let offer = &mut self.offers[slot];
            let mut over = offer.key.take();
            if !self.keys.fence {
                over = std::mem::replace(&mut offer.late, over);
            }
            if let Some(key) = over
                && !self.keys.use_once
            {
                // Errors are ignored, as the original does: the peer may be gone.
                let _ = socket.rdma_free(key);
            }
        }
        let part = self.part(0, slot);
        if access == Access::Write
            && let Some(at) = self.wrong(&part, pattern)
        {
            return Err(format!("byte {at} of what the peer has written is wrong"));
        }
        Ok(Some(access))
    }

    /// Checks what a peer wants done.
    pub(crate) fn check(&self, wanted: &Rdma) -> Result<(), String> {
        let (size, vector) = (self.piece as u32, self.pieces as u32);
        if (wanted.size, wanted.vector) != (size, vector) {
            return Err(format!(
                "an operation of {} times {} bytes instead of {vector} times {size}",
                wanted.vector, wanted.size
            ));
        }
        Ok(())
    }

    /// Tells whether the operation of the former acknowledgement of this slot is not over.
    pub(crate) fn is_busy(&self, peer: usize, slot: u16) -> bool {
        matches!(self.answers[self.slot(peer, slot)], Answer::UnderWay(..))
    }

    /// Prepares the operation that a request asked for. For an acknowledgement that was refused
    /// memory is prepared once.
    pub(crate) fn answer(
        &mut self,
        peer: usize,
        slot: u16,
        wanted: &Rdma,
    ) -> Result<Transfer, String> {
        let slot = self.slot(peer, slot);
        let part = self.part(self.answers_at, slot);
        let Rdma { access, pattern, key, .. } = *wanted;
        if self.answers[slot] == Answer::Idle {
            let before = if access == Access::Write { pattern } else { !pattern };
            self.fill(&part, before);
            self.answers[slot] = Answer::Prepared;
        }
        let piece = |index: usize| {
            let start = part.start + index * self.piece;
            start..start + self.piece
        };
        let transfer = match access {
            Access::Write => Transfer::write(&self.memory, piece(0), key),
            Access::Read if self.keys.fence => {
                Transfer::read(&self.memory, piece(0), key).map(Transfer::fenced)
            }
            Access::Read => Transfer::read(&self.memory, piece(0), key),
        };
        (1..self.pieces)
            .fold(transfer, |all, index| all?.and(&self.memory, piece(index)))
            .map(|transfer| transfer.notify(slot as u64))
            .map_err(|error| format!("a remote {}: {error}", access.name()))
    }

    /// Notes that the acknowledgement with an operation was sent.
    pub(crate) fn answered(&mut self, peer: usize, slot: u16, wanted: &Rdma) {
        let slot = self.slot(peer, slot);
        self.answers[slot] = Answer::UnderWay(wanted.access, wanted.pattern);
    }

    /// Notes the end of an operation; returns what it was.
    pub(crate) fn told(&mut self, token: u64, status: RdmaStatus) -> Result<Access, Fault> {
        let slot = usize::try_from(token).unwrap_or(usize::MAX);
        let Some(Answer::UnderWay(access, pattern)) = self.answers.get(slot).copied() else {
            return Err(Fault::Data(format!("the end of an unknown operation, {token}")));
        };
        self.answers[slot] = Answer::Idle;
        let why = match status {
            RdmaStatus::Success => {
                let part = self.part(self.answers_at, slot);
                if access == Access::Read
                    && let Some(at) = self.wrong(&part, pattern)
                {
                    let text = format!("byte {at} of what was read from the peer is wrong");
                    return Err(Fault::Data(text));
                }
                return Ok(access);
            }
            RdmaStatus::RemoteError => "the peer's device refused it",
            RdmaStatus::Dropped => "the connection broke, and operations are not repeated",
            RdmaStatus::Cancelled => "it was cancelled",
            RdmaStatus::OtherError => "this side's device failed",
        };
        Err(Fault::Failed(format!("a remote {} failed: {why}", access.name())))
    }
}

/// Fills memory with a pattern.
fn fill(memory: &mut [u8], pattern: u64) {
    let pattern = pattern.to_ne_bytes();
    for chunk in memory.chunks_mut(8) {
        chunk.copy_from_slice(&pattern[..chunk.len()]);
    }
}

/// Returns a pattern that no slot and no operation shares with another.
fn pattern(slot: u64, operation: u64) -> u64 {
    // The finalizer of splitmix64: one to one.
    let mut x = (slot << 48) ^ operation;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Counts keys that are issued again (`--rdma-key-o-meter`).
#[derive(Debug, Default)]
pub(crate) struct KeyMeter {
    issued: u64,
    again: u64,
    /// Fewest other keys between two times that a key was issued.
    soonest: Option<u64>,
    /// When each of the last keys was issued.
    when: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
}

impl KeyMeter {
    fn issued(&mut self, key: u64) {
        self.issued += 1;
        if let Some(before) = self.when.insert(key, self.issued) {
            let between = self.issued - before - 1;
            self.again += 1;
            self.soonest = Some(self.soonest.map_or(between, |soonest| soonest.min(between)));
        }
        self.order.push_back((key, self.issued));
        if self.order.len() > KEYS_MAX
            && let Some((key, at)) = self.order.pop_front()
            && self.when.get(&key) == Some(&at)
        {
            self.when.remove(&key);
        }
    }
}

impl fmt::Display for KeyMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { issued, again, soonest, .. } = self;
        write!(f, "{issued} RDMA keys were issued, ")?;
        match soonest {
            None => write!(f, "none of them again within {KEYS_MAX}"),
            Some(between) => write!(f, "{again} of them again, after {between} others or more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meter_counts_keys_that_come_back() {
        let mut meter = KeyMeter::default();
        for key in [1, 2, 3] {
            meter.issued(key);
        }
        let told = meter.to_string();
        assert_eq!(told, "3 RDMA keys were issued, none of them again within 65536");
        for key in [1, 3, 4] {
            meter.issued(key);
        }
        let told = meter.to_string();
        assert_eq!(told, "6 RDMA keys were issued, 2 of them again, after 1 others or more");
        (10..10 + 2 * KEYS_MAX as u64).for_each(|key| meter.issued(key));
        assert_eq!((meter.when.len(), meter.order.len()), (KEYS_MAX, KEYS_MAX));
    }

    #[test]
    fn memory_of_any_length_is_filled() {
        let mut memory = [0; 11];
        fill(&mut memory, u64::from_ne_bytes(*b"abcdefgh"));
        assert_eq!(&memory, b"abcdefghabc");
    }
}
