//! Both sides of the rings of a socket, whose memory anybody may write to at any time.
#![no_main]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use bowline_host_wire::{
    AREA_LEN, Area, DESTINATIONS, LockOwner, Piece, RING_MESSAGE_MAX, Receives, Sends,
};
use libfuzzer_sys::fuzz_target;

/// What is done, and two numbers for it.
type Step = (u8, u32, u64);

/// Words at the front of the area, where positions, promises and names are.
const FRONT_WORDS: u32 = 4096 / 8;

fn write_word(words: &[AtomicU64], at: u32, value: u64) {
    // Mostly where it matters.
    let all = words.len() as u32;
    let at = if at.is_multiple_of(4) { at % all } else { at % FRONT_WORDS };
    words[at as usize].store(value, Ordering::Relaxed);
}

fn run(words: &[AtomicU64], steps: &[Step]) {
    let base = NonNull::from(words).cast();
    // SAFETY: the words outlive it, have its length, and are atomic.
    let area = unsafe { Area::new(base) };
    let (mut sends, mut receives) = (Sends::new(area), Receives::new(area));
    let mut buffer = vec![0; RING_MESSAGE_MAX];
    for (what, a, b) in steps {
        let (place, len) = (*a as usize, (*b as usize) % (RING_MESSAGE_MAX + 2));
        let name = &b.to_le_bytes()[..place % 9];
        match what % 10 {
            0 | 1 => write_word(words, *a, *b),
            2 => {
                let Ok(first) = sends.peek() else { return };
                if let Some(post) = first {
                    area.copy_out(post.payload, &mut buffer[..post.len]);
                    sends.pop(&post);
                }
            }
            3 => sends.set_credit(len),
            4 => sends.set_credit_to(place % (DESTINATIONS + 1), (*b != 0).then_some(len)),
            5 => {
                sends.set_destination(place % (DESTINATIONS + 1), name);
            }
            6 => {
                let bytes = &buffer[..len.min(RING_MESSAGE_MAX)];
                let piece = Piece { base: bytes.as_ptr(), len: bytes.len() };
                // SAFETY: a slice is readable.
                let _ = unsafe { area.push(LockOwner(*a), name, &[piece]) };
            }
            7 => {
                let bytes = &buffer[..len.min(RING_MESSAGE_MAX)];
                let lent = receives.push(name, bytes.len(), std::iter::once(bytes));
                receives.notice_at(lent.filter(|_| a.is_multiple_of(2)));
                receives.publish(a.is_multiple_of(3));
            }
            8 => {
                if receives.reclaim().is_err() {
                    return;
                }
                if let Some(token) = receives.next_wake_token() {
                    area.wake_token_taken(token.wrapping_sub(u32::from(a.is_multiple_of(2))));
                }
            }
            _ => {
                let taken = area.take(a.is_multiple_of(2), |place, len| {
                    area.copy_out(place, &mut buffer[..len]);
                });
                let Ok(taken) = taken else { return };
                assert!(taken.is_none_or(|taken| taken.len <= RING_MESSAGE_MAX));
            }
        }
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let words: Vec<AtomicU64> = (0..AREA_LEN / 8).map(|_| AtomicU64::new(0)).collect();
    run(&words, &steps);
});
