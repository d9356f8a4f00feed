//! The memory orderings of a socket's rings, in all orders of a few steps of two or three threads
//! and in all that such orderings let each of them see.

#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/area.rs"]
mod area;
#[allow(dead_code)]
#[path = "../src/cells.rs"]
mod cells;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/ids.rs"]
mod ids;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/receives.rs"]
mod receives;
#[allow(dead_code)]
#[path = "../src/rings.rs"]
mod rings;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/sends.rs"]
mod sends;
#[path = "../../crates/bowline-host-wire/src/tokens.rs"]
mod tokens;
mod weak;

/// As in `bowline-host-wire`.
const WAKE_TOKEN_LEN: usize = 4;

/// A message; the third is longer than the others.
fn message(n: u8) -> Vec<u8> {
    vec![n; if n == 2 { 24 } else { 8 }]
}

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

    pub(crate) use crate::cells::{U8, U32, U64, fence, u8, u32, u64};

    /// Two messages to receive.
    pub(crate) const RING_LEN: usize = 128;
    pub(crate) const DESTINATIONS: usize = 1;

    pub(crate) fn spin_loop() {
        loom::hint::spin_loop();
    }
}

mod hook {
    pub(crate) use crate::weak::{fence, ordered};

    pub(crate) const LOOKS: bool = false;

    pub(crate) fn is_dead() -> bool {
        false
    }

    pub(crate) fn acts() -> bool {
        true
    }

    pub(crate) fn forgets(_at: usize) -> bool {
        false
    }
}

use std::sync::Arc;

use loom::thread;

use area::Area;
use cells::Cells;
use ids::LockOwner;
use receives::Receives;
use rings::{Mistake, Node, Socket};
use sends::{Piece, Pushed, Sends};
use weak::{Lines, Model, check, missed};

/// Most places of an order at which a thread is interrupted.
const SWITCHES: usize = 3;

/// The memory of a socket.
struct Memory {
    area: Area,
    _cells: Box<Cells>,
}

impl Memory {
    fn new() -> Arc<Self> {
        let cells = Cells::new();
        // SAFETY: they are dropped with the area.
        let area = unsafe { Area::new(cells.base()) };
        Arc::new(Self { area, _cells: cells })
    }

    fn push(&self, owner: u32, n: u8) -> Pushed {
        let payload = message(n);
        let piece = Piece { base: payload.as_ptr(), len: payload.len() };
        // SAFETY: a slice is readable.
        unsafe { self.area.push(LockOwner(owner), b"to", &[piece]) }
    }

    fn take(&self, peek: bool) -> Option<(u8, bool)> {
        let mut bytes = Vec::new();
        let copy = |place, len| {
            bytes.resize(len, 0);
            self.area.copy_out(place, &mut bytes);
        };
        let taken = self.area.take(peek, copy).expect("honest memory is not refused")?;
        assert_eq!(bytes, message(bytes[0]), "a message is whole");
        Some((bytes[0], taken.notice))
    }

    /// The node's side, with a destination for which there is credit.
    fn sends(&self) -> Sends {
        let mut sends = Sends::new(self.area);
        assert!(sends.set_destination(0, b"to"));
        sends.set_credit(100);
        sends.set_credit_to(0, Some(100));
        sends
    }

    fn pop(&self, sends: &mut Sends) -> Option<u8> {
        let queued = sends.peek().expect("honest memory is not refused")?;
        let mut bytes = vec![0; queued.len];
        self.area.copy_out(queued.payload, &mut bytes);
        assert_eq!(bytes, message(bytes[0]), "a message is whole");
        sends.pop(&queued);
        Some(bytes[0])
    }
}

/// Runs threads and returns what each returns. The first one runs here only until they are started.
fn run<A: 'static, B: 'static>(
    a: impl FnOnce() -> A + 'static,
    b: impl FnOnce() -> B + 'static,
) -> (A, B) {
    let (a, b) = (thread::spawn(a), thread::spawn(b));
    (a.join().unwrap(), b.join().unwrap())
}

fn push_received(receives: &mut Receives, n: u8) -> bool {
    let bytes = message(n);
    let pushed = receives.push(b"", bytes.len(), std::iter::once(&bytes[..])).is_some();
    receives.publish(false);
    pushed
}

/// A program pushes while the node looks, and takes what it sees.
fn sending() {
    let memory = Memory::new();
    let mut sends = memory.sends();
    let (program, node) = (Arc::clone(&memory), Arc::clone(&memory));
    run(move || program.push(1, 1), move || node.pop(&mut sends));
}

/// Two programs push at the same time.
fn sending_at_once() {
    let memory = Memory::new();
    let mut sends = memory.sends();
    let [one, two] = [1, 2].map(|n| {
        let memory = Arc::clone(&memory);
        move || (memory.push(n, n as u8) != Pushed::Ask).then_some(n as u8)
    });
    let (one, two) = run(one, two);
    let mut sent: Vec<u8> = std::iter::from_fn(|| memory.pop(&mut sends)).collect();
    sent.sort_unstable();
    assert!(sent.into_iter().eq(one.into_iter().chain(two)), "each once");
}

/// A program pushes while the node falls asleep.
fn sending_to_one_that_falls_asleep() {
    let memory = Memory::new();
    let (sends, program) = (memory.sends(), Arc::clone(&memory));
    let node = move || {
        sends.set_asleep(true);
        !sends.is_empty()
    };
    let (pushed, seen) = run(move || program.push(1, 1), node);
    assert!(pushed == Pushed::Wake || seen, "the node is woken, or has seen it");
}

/// A program pushes to a destination whose place the node gives to another.
fn sending_to_one_that_goes() {
    let memory = Memory::new();
    let (mut sends, program) = (memory.sends(), Arc::clone(&memory));
    let node = move || sends.set_destination(0, b"new");
    let (pushed, is_gone) = run(move || program.push(1, 1), node);
    assert!(pushed == Pushed::Ask || !is_gone, "nothing is left for one that is gone");
}

/// The node pushes while a program takes what it sees.
fn receiving() {
    let memory = Memory::new();
    let (mut receives, program) = (Receives::new(memory.area), Arc::clone(&memory));
    run(move || program.take(false), move || push_received(&mut receives, 1));
}

/// A program takes two messages while the node uses their places for another, which is longer; and
/// another program does this.
fn receiving_beside(other: fn(&Memory) -> Option<(u8, bool)>) {
    let memory = Memory::new();
    let mut receives = Receives::new(memory.area);
    let before = [0, 1].map(|n| push_received(&mut receives, n));
    assert_eq!(before, [true; 2]);
    let second = Arc::clone(&memory);
    let second = thread::spawn(move || other(&second));
    let first = Arc::clone(&memory);
    let first = move || [first.take(false), first.take(false)];
    let node = move || {
        receives.reclaim().expect("honest memory is not refused");
        push_received(&mut receives, 2)
    };
    let (first, pushed) = run(first, node);
    let all = first.into_iter().chain([second.join().unwrap()]);
    let mut all: Vec<u8> = all.flatten().map(|(n, _)| n).collect();
    all.extend(std::iter::from_fn(|| memory.take(false)).map(|(n, _)| n));
    all.sort_unstable();
    assert!(all.into_iter().eq(0..2 + u8::from(pushed)), "each once");
}

fn receiving_at_once() {
    receiving_beside(|memory| memory.take(false));
}

fn receiving_beside_one_that_looks() {
    receiving_beside(|memory| {
        memory.take(true);
        None
    });
}

/// A program takes a message while the node asks to be told.
fn receiving_with_notice() {
    let memory = Memory::new();
    let mut receives = Receives::new(memory.area);
    push_received(&mut receives, 1);
    let node = move || {
        receives.notice_at(Some(64));
        receives.reclaim() == Ok(64)
    };
    let program = Arc::clone(&memory);
    let (taken, seen) = run(move || program.take(false), node);
    assert!(taken == Some((1, true)) || seen, "the node is told, or has seen it");
}

/// A program says that it has taken a wake token while the node pushes a message.
fn taking_a_token() {
    token(|receives| _ = push_received(receives, 1));
}

/// The same with a message that does not fit.
fn taking_a_token_before_more() {
    token(|receives| receives.publish(true));
}

fn token(push: fn(&mut Receives)) {
    let memory = Memory::new();
    let mut receives = Receives::new(memory.area);
    let token = receives.next_wake_token().expect("there was none");
    let area = memory.area;
    let program = move || {
        area.wake_token_taken(token);
        !area.has_nothing()
    };
    let node = move || {
        push(&mut receives);
        receives.next_wake_token().is_some()
    };
    let (asks, shows) = run(program, node);
    assert!(asks || shows, "the program asks for another token, or the node sends one");
}

/// Runs a program and a node on one socket.
fn serve(program: fn(&Socket), node: fn(&Socket)) {
    let socket = Arc::new(Socket::new(Mistake::None));
    let (theirs, ours) = (Arc::clone(&socket), socket);
    run(
        move || program(&theirs),
        move || {
            node(&ours);
            ours.close();
        },
    );
}

#[test]
fn a_node_gets_what_a_program_sends() {
    check((send_and_serve, SWITCHES));
}

fn send_and_serve() {
    serve(
        |socket| (0..2).for_each(|n| socket.send(1, n)),
        |socket| {
            let mut node = Node::new(socket, 400, true).knows_destination();
            node.run(|node| node.sent.len() == 2);
            assert_eq!(node.sent, [0, 1]);
        },
    );
}

#[test]
fn a_program_gets_what_comes_for_it() {
    check((receive_and_serve, 2));
}

fn receive_and_serve() {
    serve(
        |socket| socket.receive(1, 2, true),
        |socket| {
            let mut node = Node::new(socket, 400, true).receives(2, &[0, 1], 1);
            node.run(|node| node.is_done);
            assert_eq!(socket.received(1), [0, 1]);
        },
    );
}

const SENDING: Model = (sending, SWITCHES);
const SENDING_AT_ONCE: Model = (sending_at_once, SWITCHES);
const FALLING_ASLEEP: Model = (sending_to_one_that_falls_asleep, SWITCHES);
const GOING: Model = (sending_to_one_that_goes, SWITCHES);
const RECEIVING: Model = (receiving, SWITCHES);
const RECEIVING_AT_ONCE: Model = (receiving_at_once, 2);
const LOOKING: Model = (receiving_beside_one_that_looks, 2);
const NOTICE: Model = (receiving_with_notice, SWITCHES);
const TOKEN: Model = (taking_a_token, SWITCHES);
const MORE: Model = (taking_a_token_before_more, SWITCHES);

#[test]
fn orderings_are_enough() {
    let models = [
        SENDING,
        SENDING_AT_ONCE,
        FALLING_ASLEEP,
        GOING,
        RECEIVING,
        RECEIVING_AT_ONCE,
        LOOKING,
        NOTICE,
        TOKEN,
        MORE,
    ];
    models.into_iter().for_each(check);
}

/// Orderings whose lack is found, each with the model that finds it. Where two do the same, both
/// are left out.
const NEEDED: [(Model, Lines); 19] = [
    (SENDING, &["at::SENDS).store(room.end"]),
    (SENDING, &["let tail = self.area.u64(at::SENDS).load"]),
    (SENDING_AT_ONCE, &["lock.compare_exchange_weak(0, owner"]),
    (SENDING_AT_ONCE, &["at::LOCK).store(0"]),
    (FALLING_ASLEEP, &["the program sees that it sleeps"]),
    (FALLING_ASLEEP, &["at::ASLEEP).store(u32", "at::SENDS).load(Ordering::SeqCst)"]),
    (GOING, &["lock.compare_exchange(0, NODE"]),
    (GOING, &["at::LOCK).store(0"]),
    (RECEIVING, &["at::PUSHED).store(self.tail"]),
    (RECEIVING, &["let tail = self.u64(at::PUSHED).load"]),
    (RECEIVING_AT_ONCE, &["node have used its place again"]),
    (RECEIVING_AT_ONCE, &["self.head = head;"]),
    (LOOKING, &["behind all that was copied"]),
    (NOTICE, &["at::NOTICE).load"]),
    (NOTICE, &["let head = self.area.u64(at::TAKEN).load"]),
    (TOKEN, &["taken.fetch_update", "Behind `wake_token_taken`"]),
    (TOKEN, &["at::PUSHED).store(self.tail", "self.token != "]),
    (MORE, &["taken.fetch_update", "Behind `wake_token_taken`"]),
    (MORE, &["self.token != "]),
];

#[test]
fn an_ordering_that_is_left_out_is_found() {
    let missed = missed(&NEEDED);
    assert!(missed.is_empty(), "{missed:#?}");
}
