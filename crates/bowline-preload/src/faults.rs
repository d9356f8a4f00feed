//! Memory that a program points at and does not have: the signal that a copy gets there ends the
//! copy, and the call fails with EFAULT.
//!
//! The library's handler comes first, and jumps to the program's, if it has one: that finds the
//! registers and the stack that the system has made for it, and the signals blocked that it wants.
//! The system has the program's action but for the address of the handler and a few flags, which
//! are kept in [`PLACES`]; and the program gets its own action back when it asks for it. A signal
//! that it does not handle does what it does without the library; one that it ignores is left
//! alone.
//!
//! There is no lock. An action is set by one system call, as without the library: its handler is
//! the entrance of a place, which never changes once it is taken.

#![allow(
    clippy::missing_safety_doc,
    missing_docs,
    unreachable_pub,
    reason = "the C library documents them, with their conditions"
)]

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bowline_host_client::{guarded, system};
use libc::{sighandler_t, siginfo_t};

use crate::process;
use crate::real::{KeptErrno, hidden};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The signals are to be handled. In one order (SeqCst) with the system calls that set actions: who
/// sets one and then finds this unset has set it before [`handle`] looks.
static HANDLES: AtomicBool = AtomicBool::new(false);

/// Handlers that a program may have, of which each takes a place for ever. Further ones are the
/// system's to call: what the library copies then is as what the program copies.
const PLACES_MAX: usize = 16;

/// A place has the address of a handler, or SIG_DFL, and in the upper bits what is below; 0 where
/// nobody has taken it. Relaxed: a number that stands for itself.
static PLACES: [AtomicU64; PLACES_MAX] = [const { AtomicU64::new(0) }; PLACES_MAX];

const TAKEN: u64 = 1 << 63;
/// The program has never set an action.
const UNSET: u64 = 1 << 62;
const HANDLER: u64 = (1 << 57) - 1;
/// Flags of the program's action that the system does not get as they are; the last two of those
/// without a handler only.
const FLAGS: [(u64, c_int); 4] = [
    (1 << 61, libc::SA_SIGINFO),
    (1 << 60, libc::SA_RESETHAND),
    (1 << 59, libc::SA_ONSTACK),
    (1 << 58, libc::SA_NODEFER),
];

fn flags_of(handler: u64) -> &'static [(u64, c_int)] {
    if handler == libc::SIG_DFL as u64 { &FLAGS } else { &FLAGS[..2] }
}

/// A flag that the C library adds.
const SA_RESTORER: c_int = 0x0400_0000;

/// What the system calls, one for each place.
macro_rules! entrances {
    ($($name:ident $place:literal)*) => {
        $(
            mod $name {
                use super::{c_int, c_void, siginfo_t};

                #[unsafe(naked)]
                pub(super) unsafe extern "C" fn enter() {
                    crate::real::jump_or_fail!(handler)
                }

                extern "C" fn handler(
                    signal: c_int,
                    info: *mut siginfo_t,
                    context: *mut c_void,
                ) -> *const c_void {
                    super::on_signal($place, signal, info, context)
                }
            }
        )*

        const ENTRANCES: [unsafe extern "C" fn(); PLACES_MAX] = [$($name::enter),*];
    };
}

entrances! {
    p0 0 p1 1 p2 2 p3 3 p4 4 p5 5 p6 6 p7 7 p8 8 p9 9 p10 10 p11 11 p12 12 p13 13 p14 14 p15 15
}

fn address(place: usize) -> sighandler_t {
    ENTRANCES[place] as *const () as sighandler_t
}

/// What is kept of the action whose handler the system calls at an address.
fn kept(handler: sighandler_t) -> Option<(usize, u64)> {
    let place = (0..PLACES_MAX).find(|place| address(*place) == handler)?;
    Some((place, PLACES[place].load(Ordering::Relaxed)))
}

/// A place that keeps a word; `None` if all are taken.
fn place_of(word: u64) -> Option<usize> {
    PLACES.iter().position(|place| {
        let taken = place.compare_exchange(0, word, Ordering::Relaxed, Ordering::Relaxed);
        taken.map_or_else(|found| found == word, |_| true)
    })
}

fn real_sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    hidden!(
        sigaction(
            signal: c_int,
            action: *const libc::sigaction,
            old: *mut libc::sigaction,
        ) -> c_int
    )
}

/// What a signal does that nobody handles.
fn default() -> libc::sigaction {
    // SAFETY: a structure of integers, for which all zeroes are a value: SIG_DFL.
    unsafe { core::mem::zeroed() }
}

/// What is set for an action of the program; `None` where that is the action itself.
fn guarded_action(action: &libc::sigaction, is_unset: bool) -> Option<libc::sigaction> {
    let handler = action.sa_sigaction as u64;
    let is_default = action.sa_sigaction == libc::SIG_DFL;
    if action.sa_sigaction == libc::SIG_IGN
        || handler & !HANDLER != 0
        || kept(action.sa_sigaction).is_some()
    {
        return None;
    }
    let flags = flags_of(handler).iter().filter(|(_, flag)| action.sa_flags & flag != 0);
    let word = flags.fold(handler | TAKEN, |word, (bit, _)| word | bit);
    let mut own = *action;
    own.sa_sigaction = address(place_of(if is_unset { word | UNSET } else { word })?);
    own.sa_flags = action.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO;
    if is_default {
        own.sa_flags = own.sa_flags & !libc::SA_NODEFER | libc::SA_ONSTACK;
    }
    Some(own)
}

/// The program's action, of one that the system tells.
fn programs_action(found: &libc::sigaction) -> libc::sigaction {
    let Some((_, word)) = kept(found.sa_sigaction) else { return *found };
    if word & UNSET != 0 {
        return default();
    }
    let mut action = *found;
    action.sa_sigaction = (word & HANDLER) as sighandler_t;
    for (bit, flag) in flags_of(word & HANDLER) {
        action.sa_flags &= !flag;
        if word & bit != 0 {
            action.sa_flags |= flag;
        }
    }
    action
}

fn is_same(one: &libc::sigaction, other: &libc::sigaction) -> bool {
    let seen = |action: &libc::sigaction| {
        // The system has 64 signals; the C library's set has room for more.
        // SAFETY: a set is longer, and all integers.
        let mask = unsafe { ptr::from_ref(&action.sa_mask).cast::<u64>().read_unaligned() };
        (action.sa_sigaction, action.sa_flags & !SA_RESTORER, mask)
    };
    seen(one) == seen(other)
}

/// Sets an action in place of another. What a thread of the program sets in between stays, guarded.
/// Tells whether the system has let it.
fn replace(signal: c_int, mut before: libc::sigaction, mut action: libc::sigaction) -> bool {
    /// A thread that sets one action after the other has its last one at some time.
    const TRIES: usize = 100;
    for _ in 0..TRIES {
        let mut old = default();
        if real_sigaction(signal, &raw const action, &raw mut old) != 0 {
            return false;
        }
        if is_same(&old, &before) {
            break;
        }
        before = action;
        action = guarded_action(&old, false).unwrap_or(old);
    }
    true
}

/// Handles the signals from now on.
pub(crate) fn handle() {
    let _kept = KeptErrno::new();
    // The child of a `vfork` has actions of its own.
    if !process::is_visitor() {
        HANDLES.store(true, Ordering::SeqCst);
    }
    SIGNALS.into_iter().for_each(handle_one);
}

fn handle_one(signal: c_int) {
    let mut now = default();
    if real_sigaction(signal, ptr::null(), &raw mut now) != 0 {
        return;
    }
    let is_unset = now.sa_flags == 0 && is_same(&now, &default());
    if let Some(action) = guarded_action(&now, is_unset) {
        replace(signal, now, action);
    }
}

/// Returns the program's handler; null for none that is to be called.
extern "C" fn on_signal(
    place: usize,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) -> *const c_void {
    // SAFETY: the system has made it.
    let is_sent = unsafe { (*info).si_code } <= 0;
    // SAFETY: the system has made the context for this handler.
    if !is_sent && unsafe { guarded::escape(context) } {
        return ptr::null();
    }
    let word = PLACES[place].load(Ordering::Relaxed);
    let handler = (word & HANDLER) as sighandler_t;
    let is_once = FLAGS.iter().any(|(bit, flag)| *flag == libc::SA_RESETHAND && word & bit != 0);
    if handler == libc::SIG_DFL {
        do_default(signal, info, context);
    } else if is_once && !reset(signal, place) {
        block(signal, context);
    }
    ptr::with_exposed_provenance(handler)
}

/// It comes again when the handler has returned, as it came, and does what it does by default: not
/// every signal comes of an instruction that is then repeated.
fn do_default(signal: c_int, info: *const siginfo_t, context: *mut c_void) {
    let action = default();
    if real_sigaction(signal, &raw const action, ptr::null_mut()) != 0 {
        block(signal, context);
    }
    // Where the system has no room for it, an instruction's comes again by itself.
    let _ = system::queue_to_thread(signal, info);
}

/// Blocks a signal from when the handler has returned, where a filter lets nobody set actions: an
/// instruction that is repeated has the system end the program.
fn block(signal: c_int, context: *mut c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the system has made the context for this handler.
    let blocked = unsafe { &raw mut (*context).uc_sigmask };
    // SAFETY: as above.
    unsafe { libc::sigaddset(blocked, signal) };
}

/// The handler is called once: as in the system, all but the handler stays. Tells whether this was
/// done.
fn reset(signal: c_int, place: usize) -> bool {
    let mut now = default();
    if real_sigaction(signal, ptr::null(), &raw mut now) != 0 {
        return false;
    }
    if now.sa_sigaction != address(place) {
        return true;
    }
    let mut action = programs_action(&now);
    action.sa_sigaction = libc::SIG_DFL;
    replace(signal, now, guarded_action(&action, false).unwrap_or(action))
}

/// Called after the program has set an action by a function that does not go through ours.
fn has_set(signal: c_int) {
    if SIGNALS.contains(&signal) && HANDLES.load(Ordering::SeqCst) {
        let _kept = KeptErrno::new();
        handle_one(signal);
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !SIGNALS.contains(&signal) {
        return real_sigaction(signal, action, old);
    }
    // SAFETY: the caller's, readable if it is not null, as the C library's function has it.
    let set = unsafe { action.as_ref() }.copied();
    let is_guarded = HANDLES.load(Ordering::SeqCst);
    let own = set.filter(|_| is_guarded).and_then(|set| guarded_action(&set, false));
    let given = own.as_ref().map_or(action, ptr::from_ref);
    let done = real_sigaction(signal, given, old);
    if done == 0 {
        // SAFETY: the caller's, which the system has filled if it is not null.
        if let Some(old) = unsafe { old.as_mut() } {
            *old = programs_action(old);
        }
        if set.is_some() && !is_guarded {
            has_set(signal);
        }
    }
    done
}

/// Functions that set what a signal does, and return what it did.
macro_rules! setting {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(signal: c_int, action: sighandler_t) -> sighandler_t {
            let old = hidden!(
                $name(signal: c_int, action: sighandler_t) -> sighandler_t
            );
            if old == libc::SIG_ERR {
                return old;
            }
            has_set(signal);
            kept(old).map_or(old, |(_, word)| (word & HANDLER) as sighandler_t)
        }
    )*};
}

setting! { signal bsd_signal ssignal sysv_signal __sysv_signal sigset }
