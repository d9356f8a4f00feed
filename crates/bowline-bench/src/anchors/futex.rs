//! Two processes that wake each other by a word in memory that both have: what a round trip between
//! processes of one machine costs at least. There is no payload.

use std::sync::atomic::{AtomicU32, Ordering};

use super::at;
use crate::cell::Wait;
use crate::role::{Laps, Role, stopping};
use crate::sys::{SharedWords, shared_wait, shared_wake};

/// Sets a word, and wakes the other process where it may sleep.
fn tell(word: &AtomicU32, value: u32, wait: Wait) {
    // Pairs with the load in `await_change`.
    word.store(value, Ordering::Release);
    if wait == Wait::Sleep {
        shared_wake(word);
    }
}

/// Waits until a word holds something else than `value`, and returns that.
fn await_change(word: &AtomicU32, value: u32, wait: Wait) -> u32 {
    loop {
        // Pairs with the store in `tell`.
        match word.load(Ordering::Acquire) {
            now if now != value => return now,
            _ if wait == Wait::Sleep => shared_wait(word, value),
            _ => std::hint::spin_loop(),
        }
    }
}

pub(super) fn answer(mut role: Role) -> Result<(), String> {
    let shared = SharedWords::new().map_err(at("shared memory"))?;
    let [asked, answered] = shared.both();
    role.ready(&format!("shared={}", shared.name()))?;
    let mut last = 0;
    loop {
        last = await_change(asked, last, role.cell.wait);
        tell(answered, last, role.cell.wait);
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let shared = SharedWords::open(role.peer("shared")).map_err(at("shared memory"))?;
    let [asked, answered] = shared.both();
    let mut laps = Laps::new(&role);
    let mut number = 0u32;
    while !stopping() {
        let before = number;
        number = number.wrapping_add(1);
        tell(asked, number, role.cell.wait);
        await_change(answered, before, role.cell.wait);
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
