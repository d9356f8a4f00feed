//! What node and programs do with the rings of a socket, step by step, beside two queues: what goes
//! in comes out, once and in order, until somebody else writes into the memory. From then on
//! neither side may leave the memory. The fuzz target `attach_rings` runs it too.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use bowline_host_wire::{
    AREA_LEN, Area, Broken, DESTINATIONS, LockOwner, Piece, Pushed, RING_MESSAGE_MAX,
    RING_NAME_MAX, Receives, Sends,
};

/// What is done, and two numbers for it.
pub(crate) type Step = (u8, u32, u64);

/// Words at the front of the area, where positions, credit and names are.
const FRONT_WORDS: usize = 4096 / 8;
/// Words before and behind the area.
const BORDER: usize = FRONT_WORDS;
const UNTOUCHED: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Memory with a border that nobody may touch.
struct Memory(Vec<AtomicU64>);

impl Memory {
    fn new() -> Self {
        let border = || (0..BORDER).map(|_| AtomicU64::new(UNTOUCHED));
        let area = (0..AREA_LEN / 8).map(|_| AtomicU64::new(0));
        Self(border().chain(area).chain(border()).collect())
    }

    fn area(&self) -> Area {
        let words = &self.0[BORDER..self.0.len() - BORDER];
        // SAFETY: the words outlive it, have its length, and are atomic.
        unsafe { Area::new(NonNull::from(words).cast()) }
    }

    /// Somebody writes anything, mostly where it matters.
    fn write(&self, at: u32, value: u64) {
        let all = if at.is_multiple_of(4) { AREA_LEN / 8 } else { FRONT_WORDS };
        self.0[BORDER + at as usize % all].store(value, Ordering::Relaxed);
    }

    fn check(&self) {
        let (front, rest) = self.0.split_at(BORDER);
        let back = &rest[AREA_LEN / 8..];
        let mut border = front.iter().chain(back);
        assert!(
            border.all(|word| word.load(Ordering::Relaxed) == UNTOUCHED),
            "what is outside of the area stays as it was"
        );
    }
}

/// A place for a destination, as it should be. It counts from 1.
#[derive(Clone, Default)]
struct Destination {
    name: Option<Vec<u8>>,
    sent: u64,
    popped: u64,
    limit: u64,
}

/// What was pushed and not popped, as it should be.
#[derive(Default)]
struct Expected {
    destinations: [Destination; DESTINATIONS],
    sends: VecDeque<(usize, Vec<u8>)>,
    sent: u64,
    popped: u64,
    credit: u64,
    asleep: bool,
    /// With the position behind each.
    receives: VecDeque<(Vec<u8>, Vec<u8>, u64)>,
    /// The position up to which everything was taken.
    taken: u64,
    notice: Option<u64>,
    more: bool,
    token: u32,
    token_taken: u32,
}

struct World {
    memory: Memory,
    sends: Sends,
    receives: Receives,
    expected: Expected,
    /// Nobody else has written into the memory.
    is_honest: bool,
    /// A number for the contents of the next message.
    next: u8,
}

/// Runs steps, and then takes what is left.
pub(crate) fn run(steps: &[Step]) {
    let memory = Memory::new();
    let (sends, receives) = (Sends::new(memory.area()), Receives::new(memory.area()));
    let expected = Expected::default();
    let mut world = World { memory, sends, receives, expected, is_honest: true, next: 0 };
    let done = steps.iter().try_for_each(|step| world.step(*step));
    if world.is_honest {
        assert_eq!(done, Ok(()), "honest memory is not refused");
        world.take_all();
    }
    world.memory.check();
}

impl World {
    fn step(&mut self, (what, a, b): Step) -> Result<(), Broken> {
        let (place, len) = (a as usize, b as usize % (RING_MESSAGE_MAX + 2));
        let name = &b.to_le_bytes()[..place % 9];
        match what % 16 {
            0 => {
                self.memory.write(a, b);
                self.is_honest = false;
            }
            1 | 2 => self.pop()?,
            3 => self.set_credit(len),
            4 => self.set_credit_to(place % (DESTINATIONS + 1), (b != 0).then_some(len)),
            5 => self.set_destination(place % (DESTINATIONS + 1), name),
            6 => self
                .set_destination(place % DESTINATIONS, &[a as u8; RING_NAME_MAX + 1][..len % 30]),
            7 | 8 => {
                // Mostly to one that there is.
                let known = self.expected.destinations[place % DESTINATIONS].name.clone();
                self.push(a, &known.unwrap_or(name.to_vec()), len);
            }
            9 => {
                self.sends.set_asleep(a.is_multiple_of(2));
                self.expected.asleep = a.is_multiple_of(2);
            }
            10 | 11 => self.push_received(name, len, a),
            12 => self.reclaim()?,
            13 => self.pass_token(a.is_multiple_of(2)),
            14 => _ = self.take(true)?,
            _ => _ = self.take(false)?,
        }
        Ok(())
    }

    fn message(&mut self, len: usize) -> Vec<u8> {
        self.next = self.next.wrapping_add(1);
        (0..len.min(RING_MESSAGE_MAX)).map(|at| self.next ^ (at / 8) as u8).collect()
    }

    fn push(&mut self, owner: u32, name: &[u8], len: usize) {
        let owner = LockOwner(owner % 100 + 1);
        let bytes = self.message(len);
        let (front, back) = bytes.split_at(bytes.len() / 3);
        let pieces = [front, back].map(|piece| Piece { base: piece.as_ptr(), len: piece.len() });
        // SAFETY: slices are readable.
        let pushed = unsafe { self.memory.area().push(owner, name, &pieces) };
        if !self.is_honest {
            return;
        }
        let expected = &mut self.expected;
        let is_it = |one: &Destination| one.name.as_deref() == Some(name);
        let to = expected.destinations.iter().position(is_it);
        let sent = expected.sent + bytes.len() as u64;
        let has_credit = |to: &usize| {
            let to = &expected.destinations[*to];
            to.sent <= to.limit && sent < expected.credit
        };
        let Some(to) = to.filter(has_credit) else {
            return assert_eq!(pushed, Pushed::Ask, "nothing is pushed without credit");
        };
        if pushed == Pushed::Ask {
            return assert!(!expected.sends.is_empty(), "an empty ring has room");
        }
        assert_eq!(pushed == Pushed::Wake, expected.asleep, "one that sleeps is woken, once");
        expected.asleep = false;
        expected.sent = sent;
        expected.destinations[to].sent += bytes.len() as u64;
        expected.sends.push_back((to, bytes));
    }

    fn pop(&mut self) -> Result<(), Broken> {
        let first = self.sends.peek()?;
        let Some(queued) = first else {
            assert!(!self.is_honest || self.expected.sends.is_empty(), "what went in comes out");
            return Ok(());
        };
        let mut bytes = vec![0; queued.len];
        self.memory.area().copy_out(queued.payload, &mut bytes);
        self.sends.pop(&queued);
        if self.is_honest {
            let expected = self.expected.sends.pop_front();
            let to = &mut self.expected.destinations[queued.destination];
            self.expected.popped += queued.len as u64;
            to.popped += queued.len as u64;
            assert_eq!(Some((queued.destination, bytes)), expected, "once, in order and whole");
            assert!(queued.has_credit, "there was credit for it");
        }
        let is_empty = self.expected.sends.is_empty();
        assert!(!self.is_honest || self.sends.is_empty() == is_empty, "and nothing else");
        Ok(())
    }

    fn set_credit(&mut self, room: usize) {
        self.sends.set_credit(room);
        self.expected.credit = self.expected.popped + room as u64;
    }

    fn set_credit_to(&mut self, place: usize, room: Option<usize>) {
        self.sends.set_credit_to(place, room);
        if let Some(one) = self.expected.destinations.get_mut(place) {
            one.limit = match room {
                Some(room) => one.popped + room as u64,
                None => one.popped.saturating_sub(1),
            };
        }
    }

    fn set_destination(&mut self, place: usize, name: &[u8]) {
        let is_set = self.sends.set_destination(place, name);
        if self.is_honest {
            let may_be = place < DESTINATIONS && name.len() <= RING_NAME_MAX;
            let is_empty = self.expected.sends.is_empty();
            assert_eq!(is_set, may_be && is_empty, "only while nothing is under way");
            if is_set {
                let name = Some(name.to_vec());
                let one = Destination { name, sent: 1, popped: 1, limit: 0 };
                self.expected.destinations[place] = one;
            }
        }
    }

    fn push_received(&mut self, name: &[u8], len: usize, a: u32) {
        let bytes = self.message(len);
        let (front, back) = bytes.split_at(bytes.len() / 2);
        let end = self.receives.push(name, bytes.len(), [front, back].into_iter());
        let notice = end.filter(|_| a.is_multiple_of(2));
        self.receives.notice_at(notice);
        self.receives.publish(a.is_multiple_of(3));
        self.expected.notice = notice;
        self.expected.more = a.is_multiple_of(3);
        match end {
            Some(end) => self.expected.receives.push_back((name.to_vec(), bytes, end)),
            // What was taken may not have been reclaimed.
            None => assert!(
                !self.is_honest || self.expected.taken > 0 || !self.expected.receives.is_empty()
            ),
        }
    }

    fn reclaim(&mut self) -> Result<(), Broken> {
        let position = self.receives.reclaim()?;
        // One that looks at a message may have passed what was left out before it.
        let next = self.expected.receives.front().map_or(self.expected.taken + 1, |(.., end)| *end);
        let is_right = (self.expected.taken..next).contains(&position);
        assert!(!self.is_honest || is_right, "all that was taken, and no more");
        Ok(())
    }

    /// The node sends a wake token, unless there is one; a program takes it, or an older one.
    fn pass_token(&mut self, is_older: bool) {
        let token = self.receives.next_wake_token();
        if self.is_honest {
            let expected = &mut self.expected;
            assert_eq!(token.is_some(), expected.token == expected.token_taken, "one at a time");
            expected.token = token.unwrap_or(expected.token);
        }
        if let Some(token) = token {
            let taken = token.wrapping_sub(u32::from(is_older));
            self.memory.area().wake_token_taken(taken);
            self.expected.token_taken = taken;
        } else if !is_older {
            self.receives.wake_token_is_gone();
            self.expected.token_taken = self.expected.token;
        }
        let is_shown = self.expected.token != self.expected.token_taken;
        assert!(!self.is_honest || self.memory.area().has_wake_token() == is_shown);
    }

    /// Returns whether there was a message.
    fn take(&mut self, peek: bool) -> Result<bool, Broken> {
        let area = self.memory.area();
        let mut bytes = Vec::new();
        let copy = |place, len| {
            bytes.resize(len, 0);
            area.copy_out(place, &mut bytes);
        };
        let (has_message, has_nothing) = (area.has_message(), area.has_nothing());
        let taken = area.take(peek, copy)?;
        assert!(bytes.len() <= RING_MESSAGE_MAX, "no message is longer than the longest");
        if !self.is_honest {
            return Ok(taken.is_some());
        }
        let expected = &mut self.expected;
        assert_eq!(has_message, !expected.receives.is_empty());
        assert_eq!(has_nothing, !has_message && !expected.more);
        let Some(taken) = taken else {
            assert!(expected.receives.is_empty(), "what went in comes out");
            return Ok(false);
        };
        let name = taken.name[..taken.name_len].to_vec();
        let (sender, message, end) = expected.receives.front().expect("it went in").clone();
        assert_eq!((name, bytes), (sender, message), "once, in order and whole");
        let is_awaited = expected.notice.is_some_and(|at| expected.taken < at && at <= end);
        assert_eq!(taken.notice, !peek && is_awaited, "the node is told what it has asked for");
        if !peek {
            expected.receives.pop_front();
            expected.taken = end;
        }
        Ok(true)
    }

    fn take_all(&mut self) {
        while !self.expected.sends.is_empty() {
            assert_eq!(self.pop(), Ok(()));
        }
        assert!(self.sends.is_empty(), "nothing else is in the ring");
        while !self.expected.receives.is_empty() {
            assert_eq!(self.take(false), Ok(true));
        }
        assert_eq!((self.take(false), self.reclaim()), (Ok(false), Ok(())));
        assert!(self.receives.is_empty(), "nothing else is in the ring");
    }
}
