//! Requests over two paths, of which one is lost: how long nothing is answered, how long a request
//! takes at most, and how many fail.

use std::time::Duration;

use super::rtrs::{Client, slots, until_loss};
use super::{addresses, engine};
use crate::cell::{Cell, Kind};
use crate::role::{Role, Side, say, stopping};
use crate::sys;

/// Pauses between answers, and the times of requests.
struct Pauses {
    /// When the window begins and ends.
    start: u64,
    end: u64,
    /// When each slot's request was sent.
    sent: Vec<u64>,
    /// When the last answers came.
    last: u64,
    longest: u64,
    slowest: u64,
    answers: u64,
    failed: u64,
}

impl Pauses {
    /// Starts the warm-up.
    fn new(cell: &Cell) -> Self {
        let now = sys::now_ns();
        let start = now + cell.warm_ms * 1_000_000;
        Self {
            start,
            end: start + cell.window_ms * 1_000_000,
            sent: vec![now; cell.depth],
            last: now,
            longest: 0,
            slowest: 0,
            answers: 0,
            failed: 0,
        }
    }

    fn begin(&mut self, slots: &[(u64, i32)]) {
        let now = sys::now_ns();
        slots.iter().for_each(|(slot, _)| self.sent[*slot as usize] = now);
    }

    /// Notes requests that have ended; true when the window is over.
    fn end(&mut self, slots: &[(u64, i32)]) -> bool {
        let now = sys::now_ns();
        if now >= self.start && !slots.is_empty() {
            // A failure is no answer: it does not end a pause.
            let answered = slots.iter().filter(|(_, errno)| *errno == 0).count() as u64;
            if answered > 0 {
                self.longest = self.longest.max(now - self.last.max(self.start));
                self.last = now;
            }
            self.answers += answered;
            self.failed += slots.len() as u64 - answered;
            let times = slots.iter().map(|(slot, _)| now - self.sent[*slot as usize]);
            self.slowest = times.fold(self.slowest, u64::max);
        }
        now >= self.end
    }

    fn report(&self) {
        let lasted = self.last.max(self.start + 1) - self.start;
        // CPU time of a window in which so little stays the same would say nothing.
        say(&format!(
            "result n={} ns={lasted} own_cpu=0 peer_cpu=0 pause_ns={} slowest_ns={} \
             failed={}",
            self.answers, self.longest, self.slowest, self.failed,
        ));
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (device, engine) = engine(&role)?;
    role.ready("")?;
    let mut client = Client::open(&role.cell, &engine)?;
    let mut pauses = Pauses::new(&role.cell);
    let mut free = slots(&role.cell);
    std::thread::scope(|scope| {
        if role.cell.kind == Kind::IoCut {
            scope.spawn(|| {
                std::thread::sleep(until_loss(&role.cell));
                for addr in addresses(&role.cell, Side::Tx).into_iter().take(1) {
                    device.cut(addr, None, true);
                }
            });
        }
        loop {
            pauses.begin(&free);
            client.send(&free)?;
            client.take(&mut free);
            client.check(&free)?;
            if pauses.end(&free) || stopping() {
                return Ok::<(), String>(());
            }
        }
    })?;
    pauses.report();
    // What is on its way matters to nobody any more.
    while !stopping() {
        std::thread::sleep(Duration::from_millis(1));
    }
    crate::role::done(pauses.answers, device.stats().udp_syscalls());
    std::process::exit(0);
}
