//! Additions to one number of the other side: many at a time, and one after the other.
//!
//! All of them are of 1, so that the n-th must find n. The side that is added to does nothing but
//! answer.

use bowline_verbs::{Remote, SendOp};

use super::end::{End, Shape};
use crate::role::{Laps, Role, stopping};

/// Bytes of the number.
const SIZE: usize = 8;

/// One side: where its answers go, and how many there were.
struct Adder {
    end: End,
    slots: u64,
    posted: u64,
    complete: u64,
}

impl Adder {
    fn open(role: &mut Role) -> Result<Self, String> {
        let slots = role.cell.depth;
        let mut end = End::open(role, Shape { memory: slots * SIZE, sends: slots, receives: 1 })?;
        end.connect(role)?;
        Ok(Self { end, slots: slots as u64, posted: 0, complete: 0 })
    }

    const fn offset(&self, seq: u64) -> usize {
        (seq % self.slots) as usize * SIZE
    }

    /// Posts as many as may be outstanding.
    fn post(&mut self) -> Result<(), String> {
        let remote: Remote = self.end.remote(0);
        while self.posted < self.complete + self.slots {
            let sge = self.end.sge(self.offset(self.posted), SIZE);
            self.end.post_one(0, self.posted, SendOp::FetchAdd { remote, add: 1 }, sge)?;
            self.posted += 1;
        }
        Ok(())
    }

    /// Takes what has completed, and checks it; returns how many.
    fn take(&mut self, out: &mut Vec<bowline_verbs::Completion>) -> Result<u64, String> {
        self.end.take(out)?;
        for completion in out.iter() {
            let mut found = [0; SIZE];
            self.end.buffer.read(self.offset(self.complete), &mut found);
            let found = u64::from_ne_bytes(found);
            if completion.wr_id != self.complete || found != self.complete {
                let (id, due) = (completion.wr_id, self.complete);
                return Err(format!("addition {id} found {found} where {due} was due"));
            }
            self.complete += 1;
        }
        Ok(out.len() as u64)
    }
}

/// Adds, as many at a time as the cell says.
pub(super) fn add(mut role: Role) -> Result<(), String> {
    let mut adder = Adder::open(&mut role)?;
    let mut meter = role.meter();
    meter.set_probe(adder.end.probe());
    let mut out = Vec::new();
    while !stopping() {
        adder.post()?;
        match adder.take(&mut out)? {
            0 => meter.look_if_started(),
            n => meter.add(n),
        }
    }
    Ok(())
}

/// Has the number that is added to, and nothing to do.
pub(super) fn be_added_to(mut role: Role) -> Result<(), String> {
    let adder = Adder::open(&mut role)?;
    let mut out = Vec::new();
    while !stopping() {
        adder.end.take(&mut out)?; // nothing completes here, but this thread answers meanwhile
    }
    let mut sum = [0; SIZE];
    adder.end.buffer.read(0, &mut sum);
    adder.end.finish(u64::from_ne_bytes(sum));
}

/// Adds, and waits for each answer.
pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let mut adder = Adder::open(&mut role)?;
    let mut laps = Laps::new(&role);
    laps.set_probe(adder.end.probe());
    let mut out = Vec::new();
    loop {
        adder.post()?;
        while adder.take(&mut out)? == 0 {
            if stopping() {
                std::process::exit(0);
            }
        }
        if laps.lap() {
            break;
        }
    }
    std::process::exit(0); // the answering side is told to end next: nothing is left to flush
}
