//! Orderings as the code has them, but for those that are left out on purpose.

use std::cell::Cell;
use std::panic::Location;
use std::sync::atomic::Ordering;

/// Lines of the code by what they contain. The orderings there, and in the lines below them, are
/// left out.
pub(crate) type Lines = &'static [&'static str];

/// A model, and how often its threads are interrupted at most.
pub(crate) type Model = (fn(), usize);

thread_local! {
    static LEFT_OUT: Cell<Lines> = const { Cell::new(&[]) };
}

const FILES: [(&str, &str); 3] = [
    ("receives.rs", include_str!("../../../crates/bowline-host-wire/src/receives.rs")),
    ("sends.rs", include_str!("../../../crates/bowline-host-wire/src/sends.rs")),
    ("slot.rs", include_str!("../../../crates/bowline-preload/src/slot.rs")),
];

pub(crate) fn check((model, switches): Model) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Runs each model, which is right with all of them, without some of the orderings. Returns those
/// whose lack no model finds.
pub(crate) fn missed(needed: &[(Model, Lines)]) -> Vec<Lines> {
    // What each model says is of no interest.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let is_missed = |(model, lines): &&(Model, Lines)| {
        LEFT_OUT.set(lines);
        std::panic::catch_unwind(|| check(*model)).is_ok()
    };
    let missed = needed.iter().filter(is_missed).map(|(_, lines)| *lines).collect();
    std::panic::set_hook(hook);
    LEFT_OUT.set(&[]);
    missed
}

#[track_caller]
fn is_left_out() -> bool {
    let left_out = LEFT_OUT.get();
    let at = Location::caller();
    let Some((_, text)) = FILES.iter().find(|(name, _)| at.file().ends_with(name)) else {
        return false;
    };
    // Of a fence, the line before says which it is.
    let mut lines = text.lines().skip(at.line() as usize - 2).take(2);
    lines.any(|line| left_out.iter().any(|part| line.contains(part)))
}

#[track_caller]
pub(crate) fn ordered<T>(order: Ordering, step: impl FnOnce(Ordering) -> T) -> T {
    if is_left_out() {
        return step(Ordering::Relaxed);
    }
    // The checker knows one order of all such fences, but not of such steps. A fence before each is
    // how they are made where a processor has fences only.
    if order == Ordering::SeqCst {
        loom::sync::atomic::fence(order);
    }
    step(order)
}

#[allow(dead_code)]
#[track_caller]
pub(crate) fn fence(order: Ordering) {
    if !is_left_out() {
        loom::sync::atomic::fence(order);
    }
}
