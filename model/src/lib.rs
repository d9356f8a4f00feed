//! The hand-over of `bowline-wait`, and the rings of `bowline-host-wire`, run by a scheduler that
//! chooses which thread goes on at each lock, counter, sleep and wake-up: the same source files,
//! with the scheduler's locks, atomics and threads.
//!
//! No sleep ends by time here, but for the short nap of RTRS's background thread, which is there to
//! end. A wake-up that is lost, or a lead that nobody takes, is therefore a deadlock; the scheduler
//! reports it with the order that led to it, and `shuttle::replay` repeats that.
//!
//! Orders are drawn from a seed, so each run tries the same ones. Half of them are drawn evenly; in
//! the others, threads are switched at few places, which finds what needs particular switches.
//! Memory is sequentially consistent: what is relaxed in the code only counts, or is checked in
//! `tests/`, where memory is weak.
//!
//! RTRS runs the loops of its driver, which are in `bowline-wait`. Those of RDS, RoCE and the host
//! are full of system calls and stay in their drivers; the models have short ones in their place,
//! whose steps carry the names of the driver's functions, around the driver's own types.
//!
//! Each model can make mistakes on purpose, and has a test that shows that they are found.

#![cfg(test)]

// `sync`, which these use, is the only module that differs. A model need not use all there is.
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/area.rs"]
mod area;
#[allow(dead_code)]
#[path = "../../crates/bowline-wait/src/device_leads.rs"]
mod device_leads;
#[allow(dead_code)]
#[path = "../../crates/bowline-wait/src/followers.rs"]
mod followers;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/ids.rs"]
mod ids;
#[path = "../../crates/bowline-wait/src/lead.rs"]
mod lead;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/receives.rs"]
mod receives;
#[allow(dead_code)]
#[path = "../../crates/bowline-host-wire/src/sends.rs"]
mod sends;
#[path = "../../crates/bowline-host-wire/src/tokens.rs"]
mod tokens;
#[path = "../../crates/bowline-wait/src/waiter.rs"]
mod waiter;

mod cells;
mod hook;
mod host;
mod net;
mod rds;
mod rings;
mod roce;
mod rtrs;

/// In place of the standard library's.
mod sync {
    pub(crate) use shuttle::sync::atomic::{
        AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize,
    };
    pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use shuttle::thread::{Thread, current, park};
    use std::time::Duration;

    pub(crate) use crate::cells::{U8, U32, U64, fence, u8, u32, u64};

    /// So short that a few messages go around.
    pub(crate) const RING_LEN: usize = 256;
    pub(crate) const DESTINATIONS: usize = 2;

    /// The one sleep that ends by itself.
    const SHORT: Duration = Duration::from_millis(2);

    pub(crate) fn park_timeout(limit: Duration) {
        if limit == SHORT { shuttle::thread::yield_now() } else { park() }
    }

    pub(crate) fn spin_loop() {
        shuttle::hint::spin_loop();
    }
}

/// As in `bowline-host-wire`.
const WAKE_TOKEN_LEN: usize = 4;

/// A message of a ring. Some are too long for it.
fn message(n: u8) -> Vec<u8> {
    vec![n; if n % 8 == 7 { sync::RING_LEN / 4 + 8 } else { 8 + 8 * usize::from(n % 3) }]
}

use std::sync::Arc;

use lead::{Lead, Leader, Others};
use net::Sleeper;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, Runner};

/// Orders of each kind.
const ORDERS: usize = 5_000;
/// Most particular switches of an order that has few.
const SWITCHES: usize = 4;
const SEED: u64 = 28;

/// Runs a model in many orders. A failure panics and prints the order.
fn check(model: fn()) {
    let pct = PctScheduler::new_from_seed(SEED, SWITCHES, ORDERS);
    Runner::new(pct, Config::new()).run(model);
    let random = RandomScheduler::new_from_seed(SEED, ORDERS);
    Runner::new(random, Config::new()).run(model);
}

/// Starts a thread that works on `of` under the number `me`.
fn spawn<T: Send + Sync + 'static>(of: &Arc<T>, work: fn(&T, usize), me: usize) -> JoinHandle<()> {
    let of = Arc::clone(of);
    thread::spawn(move || work(&of, me))
}

/// Begins a turn of the background thread, as the drivers of RDS and RoCE do. Returns as who it
/// sleeps. `epoch` is that of its last turn; where `is_needed`, it leads whatever other threads do.
fn begin_helper_turn(lead: &mut Lead, epoch: &mut u64, is_needed: bool) -> Sleeper {
    let active = core::mem::replace(epoch, lead.epoch()) != lead.epoch();
    let others = if active && !is_needed { Others::Active } else { Others::Silent };
    if lead.take_turn(others) != Leader::Helper {
        return Sleeper::Helper;
    }
    lead.fall_asleep(u64::MAX);
    Sleeper::HelperThatLeads
}
