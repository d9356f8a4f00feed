//! Streams of writes and of reads.
//!
//! Both sides have a ring of slots, one message each. Every write that ends a group has an
//! immediate: by these the target counts, and checks the ends of every message and the body of some.
//! An immediate takes a receive, and the target posts one again only after it has checked a group;
//! with one receive fewer than there are groups of slots, no message is overwritten before.

use bowline_verbs::{RecvWr, SendOp, WcOpcode};

use super::end::{End, Shape};
use crate::payload::{Maker, SpotCheck};
use crate::role::{Role, stopping};

/// Groups a ring has. A group is as many messages as are outstanding.
const GROUPS: usize = 3;
/// Stream whose messages are read; not 0, so that no number of theirs is 0.
const READ_STREAM: usize = 1;

/// The ring of both sides.
#[derive(Clone, Copy, Debug)]
struct Ring {
    size: usize,
    group: usize,
}

impl Ring {
    fn of(role: &Role) -> Self {
        Self { size: role.cell.size, group: role.cell.depth }
    }

    const fn slots(self) -> usize {
        self.group * GROUPS
    }

    /// Where message `seq` lies.
    const fn offset(self, seq: u64) -> usize {
        (seq % self.slots() as u64) as usize * self.size
    }

    const fn shape(self) -> Shape {
        Shape { memory: self.slots() * self.size, sends: self.slots(), receives: GROUPS }
    }
}

/// Fills every slot with the body of a stream.
fn fill(end: &End, ring: Ring, maker: &Maker) {
    for seq in 0..ring.slots() as u64 {
        end.buffer.write(ring.offset(seq), &maker.buffer());
    }
}

pub(super) fn write(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    let mut maker = Maker::new(0, ring.size);
    fill(&end, ring, &maker);
    end.connect(&mut role)?;
    let (mut posted, mut complete) = (0u64, 0u64);
    let (depth, group) = (role.cell.depth as u64, ring.group as u64);
    let mut out = Vec::new();
    while !stopping() {
        while posted < complete + depth {
            let offset = ring.offset(posted);
            maker.next_at(|at, bytes| end.buffer.write(offset + at, bytes));
            let (to, nth) = (end.remote(offset), posted / group);
            let op = match (posted + 1) % group {
                0 => SendOp::WriteImm(to, nth as u32),
                _ => SendOp::Write(to),
            };
            end.post_one(posted, op, end.sge(offset, ring.size))?;
            posted += 1;
        }
        end.take(&mut out)?;
        complete += out.len() as u64;
    }
    end.finish(complete);
}

pub(super) fn written(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    fill(&end, ring, &Maker::new(0, ring.size)); // so that every page is there
    let receive = [RecvWr { id: 0, sges: &[] }];
    for _ in 1..GROUPS {
        end.post_recv(&receive)?;
    }
    end.connect(&mut role)?;
    let mut check = SpotCheck::new(0, ring.size);
    let mut meter = role.meter();
    meter.set_probe(end.probe());
    let mut out = Vec::new();
    let mut seq = 0u64;
    while !stopping() {
        end.take(&mut out)?;
        for completion in &out {
            let due = (seq / ring.group as u64) as u32;
            if completion.opcode != WcOpcode::RecvRdmaWithImm || completion.imm != Some(due) {
                return Err(format!("immediate {:?} where {due} was due", completion.imm));
            }
            for _ in 0..ring.group {
                let offset = ring.offset(seq);
                check.check(seq, |at, bytes| end.buffer.read(offset + at, bytes))?;
                seq += 1;
            }
            end.post_recv(&receive)?;
            meter.add(ring.group as u64);
        }
        if out.is_empty() {
            meter.look_if_started();
        }
    }
    Ok(())
}

/// Reads into the slots in turn. The ends of a slot are wiped before, so that what is checked has
/// come by this read.
pub(super) fn read(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    fill(&end, ring, &Maker::new(0, ring.size)); // so that every page is there
    end.connect(&mut role)?;
    let mut check = SpotCheck::new(READ_STREAM, ring.size);
    let mut meter = role.meter();
    meter.set_probe(end.probe());
    let (mut posted, mut complete) = (0u64, 0u64);
    let mut out = Vec::new();
    while !stopping() {
        while posted < complete + role.cell.depth as u64 {
            let offset = ring.offset(posted);
            end.buffer.write(offset, &[0; 8]);
            end.buffer.write(offset + ring.size - 8, &[0; 8]);
            let op = SendOp::Read(end.remote(offset));
            end.post_one(posted, op, end.sge(offset, ring.size))?;
            posted += 1;
        }
        end.take(&mut out)?;
        for completion in &out {
            if completion.wr_id != complete {
                return Err(format!("read {} where {complete} was due", completion.wr_id));
            }
            let offset = ring.offset(complete);
            let message = complete % ring.slots() as u64;
            check.check(message, |at, bytes| end.buffer.read(offset + at, bytes))?;
            complete += 1;
            meter.add(1);
        }
        if out.is_empty() {
            meter.look_if_started();
        }
    }
    Ok(())
}

pub(super) fn be_read(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    let mut maker = Maker::new(READ_STREAM, ring.size);
    fill(&end, ring, &maker);
    for seq in 0..ring.slots() as u64 {
        let offset = ring.offset(seq);
        maker.next_at(|at, bytes| end.buffer.write(offset + at, bytes));
    }
    end.connect(&mut role)?;
    let mut out = Vec::new();
    while !stopping() {
        end.take(&mut out)?; // nothing completes here, but this thread answers meanwhile
    }
    // A message may be asked for in parts, so it is the answers that tell how many there were.
    let packets = ring.size.div_ceil(role.cell.mtu) as u64;
    end.finish(end.device.stats().packets_sent / packets);
}
