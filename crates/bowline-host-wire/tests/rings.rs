//! The rings of an area, used by both sides at once, and with contents that are invalid.

#![allow(unsafe_code, reason = "an area is memory")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use bowline_host_wire::{
    AREA_LEN, Area, LockOwner, Piece, Pushed, RING_LEN, RING_MESSAGE_MAX, Receives, Sends,
};

mod checks;

/// Memory of an area.
struct Memory(NonNull<u64>);

impl Memory {
    fn new() -> Self {
        let words = vec![0u64; AREA_LEN / 8].into_boxed_slice();
        Self(NonNull::new(Box::into_raw(words).cast()).unwrap())
    }

    fn area(&self) -> Area {
        // SAFETY: as long as `self`; tests drop it last. A page's alignment is not needed here.
        unsafe { Area::new(self.0.cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let words = std::ptr::slice_from_raw_parts_mut(self.0.as_ptr(), AREA_LEN / 8);
        // SAFETY: it came from such a box.
        drop(unsafe { Box::from_raw(words) });
    }
}

fn push(area: &Area, name: &[u8], bytes: &[u8]) -> Pushed {
    let (front, back) = bytes.split_at(bytes.len() / 3);
    let pieces = [front, back].map(|piece| Piece { base: piece.as_ptr(), len: piece.len() });
    // SAFETY: slices are readable.
    unsafe { area.push(LockOwner(7), name, &pieces) }
}

fn take(area: &Area) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut payload = Vec::new();
    let taken = area.take(false, |place, len| {
        payload.resize(len, 0);
        area.copy_out(place, &mut payload);
    });
    let taken = taken.unwrap()?;
    assert_eq!(taken.len, payload.len());
    Some((taken.name[..taken.name_len].to_vec(), payload))
}

/// Bytes of message `n`, whose length and contents tell its number.
fn message(n: usize) -> Vec<u8> {
    let len = if n.is_multiple_of(97) { n * 13 % (RING_MESSAGE_MAX - 8) } else { n % 700 };
    let mut bytes = vec![n as u8; len + 8];
    bytes[..8].copy_from_slice(&n.to_ne_bytes());
    bytes
}

const MESSAGES: usize = if cfg!(miri) { 150 } else { 30_000 };

#[test]
fn two_senders_a_node_and_two_readers_lose_nothing() {
    let memory = Memory::new();
    let area = memory.area();
    let mut sends = Sends::new(area);
    let mut receives = Receives::new(area);
    assert!(sends.set_destination(3, b"name"));
    let done = AtomicBool::new(false);
    let got: Vec<Vec<usize>> = std::thread::scope(|scope| {
        for sender in 0..2 {
            scope.spawn(move || {
                for n in (sender..MESSAGES).step_by(2) {
                    while push(&area, b"name", &message(n)) == Pushed::Ask {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut got = Vec::new();
                    loop {
                        let last = done.load(Ordering::Acquire);
                        match take(&area) {
                            Some((name, bytes)) => {
                                assert_eq!(name, b"sender");
                                let n = usize::from_ne_bytes(bytes[..8].try_into().unwrap());
                                assert_eq!(bytes, message(n));
                                got.push(n);
                            }
                            None if last => return got,
                            None => std::thread::yield_now(),
                        }
                    }
                })
            })
            .collect();
        let mut buffer = vec![0; RING_MESSAGE_MAX];
        let mut carried_out = 0;
        while carried_out < MESSAGES {
            sends.set_credit(1 << 20);
            sends.set_credit_to(3, Some(1 << 20));
            receives.reclaim().unwrap();
            let Some(queued) = sends.peek().unwrap() else {
                std::thread::yield_now();
                continue;
            };
            assert!(queued.has_credit && queued.destination == 3);
            let payload = &mut buffer[..queued.len];
            area.copy_out(queued.payload, payload);
            let (front, back) = payload.split_at(queued.len / 2);
            if receives.push(b"sender", queued.len, [front, back].into_iter()).is_some() {
                sends.pop(&queued);
                carried_out += 1;
            }
            receives.publish(false);
        }
        done.store(true, Ordering::Release);
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    for one in &got {
        for parity in 0..2 {
            let of_one_sender = one.iter().filter(|n| **n % 2 == parity);
            assert!(of_one_sender.is_sorted(), "each reader sees a sender's messages in order");
        }
    }
    let mut all = got.concat();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..MESSAGES), "each once");
}

#[test]
fn nothing_is_pushed_without_credit() {
    let memory = Memory::new();
    let area = memory.area();
    let mut sends = Sends::new(area);
    assert_eq!(push(&area, b"name", b"x"), Pushed::Ask, "no destination");
    assert!(sends.set_destination(0, b"name"));
    assert_eq!(push(&area, b"name", b""), Pushed::Ask, "no credit");
    sends.set_credit(100);
    assert_eq!(push(&area, b"name", b""), Pushed::Ask, "not for this destination");
    sends.set_credit_to(0, Some(0));
    assert_eq!(push(&area, b"other", b"x"), Pushed::Ask, "of another name");
    assert_eq!(push(&area, b"name", &[0; 100]), Pushed::Ask, "not so much");
    assert_eq!(push(&area, b"name", &[0; 99]), Pushed::Done);
    assert_eq!(push(&area, b"name", b""), Pushed::Ask, "the destination has what it may have");
    assert!(!sends.set_destination(0, b"new"), "something is queued");
    let first = sends.peek().unwrap().unwrap();
    assert!(first.has_credit && first.len == 99);
    // What was pushed with credit is taken, although there is none any more.
    sends.set_credit_to(0, None);
    sends.set_credit(0);
    assert!(sends.peek().unwrap().unwrap().has_credit);
    sends.pop(&first);
    assert!(sends.peek().unwrap().is_none() && sends.is_empty());
    assert!(sends.set_destination(0, b"new"));
}

#[test]
fn a_sleeping_node_is_woken_once() {
    let memory = Memory::new();
    let area = memory.area();
    let mut sends = Sends::new(area);
    assert!(sends.set_destination(0, b""));
    sends.set_credit(1000);
    sends.set_credit_to(0, Some(1000));
    sends.set_asleep(true);
    assert_eq!(push(&area, b"", b"one"), Pushed::Wake);
    assert_eq!(push(&area, b"", b"two"), Pushed::Done);
    sends.set_asleep(true);
    sends.set_asleep(false);
    assert_eq!(push(&area, b"", b"three"), Pushed::Done);
}

#[test]
fn the_lock_of_a_dead_process_is_set_free() {
    const LOCK: usize = 208 / 4;
    let memory = Memory::new();
    let area = memory.area();
    let mut sends = Sends::new(area);
    assert!(sends.set_destination(0, b""));
    sends.set_credit(1000);
    sends.set_credit_to(0, Some(1000));
    // SAFETY: within the memory, which no other thread uses here.
    unsafe { memory.0.as_ptr().cast::<u32>().wrapping_add(LOCK).write(9) };
    assert_eq!(push(&area, b"", b"x"), Pushed::Ask, "somebody has the lock");
    assert!(!sends.set_destination(1, b"new"), "nor does the node get it");
    sends.owner_is_gone(LockOwner(8));
    assert_eq!(push(&area, b"", b"x"), Pushed::Ask);
    sends.owner_is_gone(LockOwner(9));
    assert_eq!(push(&area, b"", b"x"), Pushed::Done);
}

#[test]
fn tokens_are_counted_whoever_takes_them_first() {
    let memory = Memory::new();
    let area = memory.area();
    let mut receives = Receives::new(area);
    let one = receives.next_wake_token().unwrap();
    receives.wake_token_is_gone();
    let two = receives.next_wake_token().unwrap();
    assert!(area.has_wake_token() && receives.next_wake_token().is_none());
    area.wake_token_taken(two);
    area.wake_token_taken(one);
    assert!(!area.has_wake_token() && !receives.has_wake_token());
}

#[test]
fn who_was_woken_tells_the_node_only_of_what_else_there_is() {
    let memory = Memory::new();
    let area = memory.area();
    let mut receives = Receives::new(area);
    let mut come = |messages: u8| {
        (0..messages).for_each(|n| _ = receives.push(b"", 1, std::iter::once(&[n][..])).unwrap());
        receives.publish(false);
        receives.next_wake_token().expect("the last one is taken").to_ne_bytes()
    };
    let take = || assert!(area.take(false, |_, _| {}).unwrap().is_some());
    assert!(!area.needs_wake_token(None), "no token was taken");

    let token = come(1);
    take();
    assert!(!area.needs_wake_token(Some(token)), "that was all");
    assert!(!area.has_wake_token(), "and the node knows that the token is taken");

    let token = come(2);
    take();
    assert!(area.needs_wake_token(Some(token)), "others wait for the second message");
    take();

    let token = come(1);
    assert!(area.needs_wake_token(Some(token)), "nobody has taken the message");
}

/// Drawn steps, of which every fourth run has some of somebody who writes anything.
#[test]
fn what_goes_in_comes_out_whatever_is_done_when() {
    let mut random = 1u64;
    let mut draw = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for run in 0..if cfg!(miri) { 2 } else { 400 } {
        let lies = run % 4 == 3;
        let len = draw() % 400;
        let steps: Vec<checks::Step> = (0..len)
            .map(|_| {
                let what = (draw() >> 20) as u8;
                let short = draw().is_multiple_of(2) || cfg!(miri);
                let what = if what.is_multiple_of(16) && !lies { 15 } else { what };
                let b = draw() >> 8;
                (what, (draw() >> 30) as u32, if short { b % 400 } else { b })
            })
            .collect();
        checks::run(&steps);
    }
}

/// Whatever is in the memory: neither side goes beyond it, panics, or goes round without end.
#[test]
fn noise_is_refused_or_read_as_something() {
    let mut random = 1u64;
    let rounds = if cfg!(miri) { 3 } else { 1000 };
    let (mut refused, mut read) = (0, 0);
    for round in 0..rounds {
        let memory = Memory::new();
        let area = memory.area();
        let mut sends = Sends::new(area);
        let mut receives = Receives::new(area);
        assert!(sends.set_destination(0, b"name"));
        let words = if cfg!(miri) { 600 } else { AREA_LEN / 8 };
        for at in 0..words {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Mostly numbers that could be right.
            let value = match random % 4 {
                0 => random,
                1 => (random >> 20) & 0x3f0,
                _ => (random >> 20) & (RING_LEN as u64 - 16),
            };
            // SAFETY: within the memory, which no other thread uses here.
            unsafe { memory.0.as_ptr().wrapping_add(at).write(value) };
        }
        for _ in 0..round % 40 {
            match sends.peek() {
                Err(_) => refused += 1,
                Ok(None) => {}
                Ok(Some(queued)) => {
                    let mut payload = vec![0; queued.len];
                    area.copy_out(queued.payload, &mut payload);
                    sends.pop(&queued);
                    read += 1;
                }
            }
            refused += u32::from(receives.reclaim().is_err());
            receives.push(b"name", 100, std::iter::once(&[0; 100][..]));
            receives.publish(true);
            let mut payload = vec![0; RING_MESSAGE_MAX];
            let copy = |place, len: usize| area.copy_out(place, &mut payload[..len]);
            refused += u32::from(area.take(false, copy).is_err());
        }
    }
    assert!(cfg!(miri) || (refused > 0 && read > 0), "{refused} {read}");
}

/// Positions that no entry has, of which some lead to places behind the memory.
#[test]
fn positions_between_entries_are_refused_by_either_side() {
    const SENDS: usize = 192 / 8;
    const TAKEN: usize = 320 / 8;
    for position in [1, 4, 8, RING_LEN as u64 - 1, RING_LEN as u64 - 4, u64::MAX, u64::MAX - 3] {
        let memory = Memory::new();
        let area = memory.area();
        let word = |at: usize| {
            // SAFETY: a number of the area.
            let word = unsafe { memory.0.add(at) };
            // SAFETY: nobody else uses it meanwhile.
            unsafe { word.write(position) };
        };
        let mut sends = Sends::new(area);
        let mut receives = Receives::new(area);
        assert!(sends.set_destination(0, b"name"));
        sends.set_credit(1 << 20);
        sends.set_credit_to(0, Some(1 << 20));
        assert!(receives.push(b"name", 3, [b"one".as_slice()].into_iter()).is_some());
        receives.publish(false);
        word(SENDS);
        assert_eq!(push(&area, b"name", b"two"), Pushed::Ask, "{position}");
        assert!(sends.peek().is_err(), "{position}");
        word(TAKEN);
        assert!(area.take(false, |_, _| ()).is_err(), "{position}");
        assert!(receives.reclaim().is_err(), "{position}");
    }
}
