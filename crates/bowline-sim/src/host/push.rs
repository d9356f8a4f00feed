//! A push word by word, so that others go on between any two: the same steps as those of
//! [`bowline_host_wire::Area::push`], by the layout that it describes.

use bowline_host::core::HeapMemory;
use bowline_host_wire::{DESTINATIONS, LockOwner, Pushed, RING_LEN, RING_MESSAGE_MAX};

use super::process::Process;

const SENDS_POPPED: usize = 64;
const CREDIT: usize = 72;
const ASLEEP: usize = 128;
const SENDS: usize = 192;
const SENT_BYTES: usize = 200;
/// Who pushes, in a word of 32 bits.
pub(super) const LOCK: usize = 208;
const RING: usize = 4096;
const HEAD: usize = 16;
const ALIGN: usize = 16;
const PAD: u32 = u32::MAX;
const RESTART_ABOVE: usize = 64 << 10;

/// The word of 32 bits at a place.
pub(super) fn half(memory: &HeapMemory, at: usize) -> u32 {
    (memory.load(at) >> (at % 8 * 8)) as u32
}

/// Writes a word of 32 bits.
pub(super) fn set_half(memory: &HeapMemory, at: usize, value: u32) {
    let shift = at % 8 * 8;
    let kept = memory.load(at) & !(0xffff_ffff << shift);
    memory.store(at, kept | u64::from(value) << shift);
}

fn is_destination(memory: &HeapMemory, slot: usize, name: &[u8]) -> bool {
    let word = |bytes: &[u8]| {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        u64::from_ne_bytes(whole)
    };
    half(memory, slot + 16) as usize == name.len() + 1
        && name
            .chunks(8)
            .enumerate()
            .all(|(n, bytes)| memory.load(slot + 24 + 8 * n) == word(bytes))
}

/// Pushes a message; calls `accepted` when the node may see it.
pub(super) async fn slowly(
    process: &Process,
    memory: &HeapMemory,
    owner: LockOwner,
    name: &[u8],
    bytes: &[u8],
    accepted: impl FnOnce(),
) -> Pushed {
    let len = bytes.len();
    if len > RING_MESSAGE_MAX || half(memory, LOCK) != 0 {
        return Pushed::Ask;
    }
    set_half(memory, LOCK, owner.0);
    process.turn().await;
    let done = locked(process, memory, name, bytes, accepted).await;
    process.turn().await;
    set_half(memory, LOCK, 0);
    if !done {
        return Pushed::Ask;
    }
    process.turn().await;
    if half(memory, ASLEEP) == 0 {
        return Pushed::Done;
    }
    process.turn().await;
    let was_asleep = half(memory, ASLEEP) != 0;
    set_half(memory, ASLEEP, 0);
    if was_asleep { Pushed::Wake } else { Pushed::Done }
}

async fn locked(
    process: &Process,
    memory: &HeapMemory,
    name: &[u8],
    bytes: &[u8],
    accepted: impl FnOnce(),
) -> bool {
    let len = bytes.len() as u64;
    let found = (0..DESTINATIONS).find(|n| is_destination(memory, 512 + 64 * n, name));
    let Some(destination) = found else { return false };
    let slot = 512 + 64 * destination;
    process.turn().await;
    let to_it = memory.load(slot + 8);
    let sum = memory.load(SENT_BYTES).wrapping_add(len);
    if to_it > memory.load(slot) {
        return false;
    }
    process.turn().await;
    if sum >= memory.load(CREDIT) {
        return false;
    }
    process.turn().await;
    let tail = memory.load(SENDS);
    let head = memory.load(SENDS_POPPED);
    let whole = (HEAD + bytes.len()).next_multiple_of(ALIGN);
    let Some(free) = RING_LEN.checked_sub(tail.wrapping_sub(head) as usize) else { return false };
    let offset = tail as usize % RING_LEN;
    if !tail.is_multiple_of(ALIGN as u64) {
        return false;
    }
    let to_end = RING_LEN - offset;
    let may_restart = free == RING_LEN && offset > RESTART_ABOVE.max(whole);
    let (at, end) = if whole <= to_end && !may_restart {
        if whole > free {
            return false;
        }
        (offset, tail.wrapping_add(whole as u64))
    } else {
        if to_end + whole > free {
            return false;
        }
        set_half(memory, RING + offset, PAD);
        process.turn().await;
        (0, tail.wrapping_add((to_end + whole) as u64))
    };
    set_half(memory, RING + at, bytes.len() as u32);
    process.turn().await;
    set_half(memory, RING + at + 4, destination as u32);
    process.turn().await;
    for (n, chunk) in bytes.chunks(8).enumerate() {
        let place = RING + at + HEAD + 8 * n;
        let mut word = memory.load(place).to_ne_bytes();
        word[..chunk.len()].copy_from_slice(chunk);
        memory.store(place, u64::from_ne_bytes(word));
        if n.is_multiple_of(64) {
            process.turn().await;
        }
    }
    memory.store(slot + 8, to_it.wrapping_add(len));
    process.turn().await;
    memory.store(SENT_BYTES, sum);
    process.turn().await;
    memory.store(SENDS, end);
    accepted();
    true
}
