//! Memory of a descriptor that some threads use while others take it away, in all orders of their
//! steps and in all that the orderings let each of them see.

#[path = "../../crates/bowline-preload/src/slot.rs"]
mod slot;
mod weak;

mod sync {
    use std::sync::atomic::Ordering;

    use crate::weak::ordered;

    pub(crate) struct AtomicU32(loom::sync::atomic::AtomicU32);

    impl AtomicU32 {
        pub(crate) fn new(value: u32) -> Self {
            Self(loom::sync::atomic::AtomicU32::new(value))
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> u32 {
            ordered(order, |order| self.0.load(order))
        }

        #[track_caller]
        pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
            ordered(order, |order| self.0.fetch_add(value, order))
        }

        #[track_caller]
        pub(crate) fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
            ordered(order, |order| self.0.fetch_sub(value, order))
        }
    }

    pub(crate) struct AtomicPtr<T>(loom::sync::atomic::AtomicPtr<T>);

    impl<T> AtomicPtr<T> {
        pub(crate) fn new(value: *mut T) -> Self {
            Self(loom::sync::atomic::AtomicPtr::new(value))
        }

        #[track_caller]
        pub(crate) fn load(&self, order: Ordering) -> *mut T {
            ordered(order, |order| self.0.load(order))
        }

        #[track_caller]
        pub(crate) fn swap(&self, value: *mut T, order: Ordering) -> *mut T {
            ordered(order, |order| self.0.swap(value, order))
        }

        #[track_caller]
        pub(crate) fn compare_exchange(
            &self,
            from: *mut T,
            to: *mut T,
            done: Ordering,
            failed: Ordering,
        ) -> Result<*mut T, *mut T> {
            ordered(done, |done| self.0.compare_exchange(from, to, done, failed))
        }
    }
}

use std::ptr::{self, NonNull};
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use slot::Slot;
use sync::{AtomicPtr, AtomicU32};
use weak::{Lines, Model, check, missed};

/// A mapping: the number of it that is there. The checker refuses an access that may come at the
/// same time as its end.
struct Mapping(UnsafeCell<bool>);

/// A descriptor with its memory, and mappings that it may have.
struct Descriptor {
    slot: Slot,
    mappings: [Mapping; 2],
}

impl Descriptor {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            slot: Slot {
                users: AtomicU32::new(0),
                mapped: AtomicPtr::new(ptr::null_mut()),
                retired: AtomicPtr::new(ptr::null_mut()),
            },
            mappings: [(); 2].map(|()| Mapping(UnsafeCell::new(false))),
        })
    }

    fn map(&self, n: usize) {
        let mapping = &self.mappings[n];
        mapping.set(true);
        assert!(self.slot.install(NonNull::from(mapping).cast()), "nothing else is mapped");
    }

    /// A call.
    fn use_it(&self) {
        if let Some(base) = self.slot.enter(unmap) {
            assert!(mapping(base).is_there(), "what is used is mapped");
            self.slot.leave(unmap);
        }
    }

    fn retire(&self) {
        self.slot.retire(unmap);
    }

    fn are_unmapped(&self) -> bool {
        self.mappings.iter().all(|mapping| !mapping.is_there())
    }
}

impl Mapping {
    fn is_there(&self) -> bool {
        // SAFETY: the checker sees to it that nobody writes meanwhile.
        self.0.with(|there| unsafe { *there })
    }

    fn set(&self, is_there: bool) {
        // SAFETY: as above.
        self.0.with_mut(|there| unsafe { *there = is_there });
    }
}

fn mapping<'a>(base: NonNull<u8>) -> &'a Mapping {
    // SAFETY: bases are those of mappings, whose descriptor outlives all threads.
    unsafe { base.cast().as_ref() }
}

fn unmap(base: NonNull<u8>) {
    assert!(mapping(base).is_there(), "it is unmapped once");
    mapping(base).set(false);
}

fn run(descriptor: &Arc<Descriptor>, works: &[fn(&Descriptor)]) {
    let start = |work: &fn(&Descriptor)| {
        let (descriptor, work) = (Arc::clone(descriptor), *work);
        thread::spawn(move || work(&descriptor))
    };
    let threads: Vec<_> = works.iter().map(start).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Two calls while the descriptor is closed.
fn closing_in_use() {
    let descriptor = Descriptor::new();
    descriptor.map(0);
    run(&descriptor, &[Descriptor::use_it, Descriptor::use_it, Descriptor::retire]);
    assert!(descriptor.are_unmapped(), "the last one unmaps it");
}

/// A call while the number of the descriptor gets another one.
fn a_new_descriptor_of_the_number() {
    let descriptor = Descriptor::new();
    let close_and_open = |descriptor: &Descriptor| {
        descriptor.retire();
        descriptor.map(1);
    };
    descriptor.map(0);
    run(&descriptor, &[Descriptor::use_it, close_and_open]);
    assert!(!descriptor.mappings[0].is_there() && descriptor.mappings[1].is_there());
}

/// A call while the number is opened and closed.
fn opening_and_closing() {
    let descriptor = Descriptor::new();
    let open_and_close = |descriptor: &Descriptor| {
        descriptor.map(0);
        descriptor.retire();
    };
    run(&descriptor, &[Descriptor::use_it, open_and_close]);
    assert!(descriptor.are_unmapped());
}

/// Two threads close the same number, while a third one has a call.
fn closing_twice() {
    let descriptor = Descriptor::new();
    descriptor.map(0);
    run(&descriptor, &[Descriptor::use_it, Descriptor::retire, Descriptor::retire]);
    assert!(descriptor.are_unmapped(), "one of them takes it away");
}

const CLOSING: Model = (closing_in_use, 2);
const ANOTHER: Model = (a_new_descriptor_of_the_number, 3);
const OPENING: Model = (opening_and_closing, 3);
const TWICE: Model = (closing_twice, 2);

#[test]
fn memory_is_there_while_it_is_used_and_no_longer() {
    [CLOSING, ANOTHER, OPENING, TWICE].into_iter().for_each(check);
}

/// Orderings whose lack is found, each with the model that finds it. Where two do the same, both
/// are left out.
const NEEDED: [(Model, Lines); 5] = [
    (CLOSING, &["self.users.fetch_add"]),
    (CLOSING, &["self.mapped.load(Ordering::SeqCst)"]),
    (CLOSING, &["self.users.fetch_sub"]),
    (OPENING, &["none,"]),
    (CLOSING, &["self.retired.swap(base", "self.users.load"]),
];

#[test]
fn an_ordering_that_is_left_out_is_found() {
    let missed = missed(&NEEDED);
    assert!(missed.is_empty(), "{missed:#?}");
}
