//! Streams of writes and of reads.
//!
//! Both sides have a ring of slots, one message each. Every write that ends a group has an
//! immediate: by these the target counts, and checks the ends of every message and the body of
//! some. An immediate takes a receive, and the target posts one again only after it has checked a
//! group; with one receive fewer than there are groups of slots, no message is overwritten before.
//! A ring is not larger than that of the bare sockets, since memory that does not fit the caches
//! costs more. With several queue pairs each has a ring and a stream of its own.

use bowline_verbs::{RecvWr, SendOp, WcOpcode};

use super::end::{End, Shape};
use crate::anchors::RING;
use crate::payload::{Maker, SpotCheck};
use crate::role::{Role, stopping};

/// Groups a ring has. At most one fewer are outstanding.
const GROUPS: usize = 4;
/// Stream whose messages are read; not 0, so that no number of theirs is 0.
const READ_STREAM: usize = 1;

/// The rings of both sides, one for each queue pair.
#[derive(Clone, Copy, Debug)]
struct Ring {
    flows: usize,
    size: usize,
    /// Messages that are counted together.
    group: usize,
    /// Messages outstanding at most.
    depth: usize,
}

impl Ring {
    fn of(role: &Role) -> Self {
        let (flows, size) = (role.cell.flows, role.cell.size);
        let group = (RING / flows / size / GROUPS).clamp(1, role.cell.depth);
        let depth = role.cell.depth.min(group * (GROUPS - 1));
        Self { flows, size, group, depth }
    }

    const fn slots(self) -> usize {
        self.group * GROUPS
    }

    /// Where message `seq` of a queue pair lies.
    const fn offset(self, flow: usize, seq: u64) -> usize {
        (flow * self.slots() + (seq % self.slots() as u64) as usize) * self.size
    }

    const fn shape(self) -> Shape {
        Shape {
            memory: self.flows * self.slots() * self.size,
            sends: self.slots(),
            receives: GROUPS,
        }
    }
}

/// Fills every slot of a queue pair with the body of a stream.
fn fill(end: &End, ring: Ring, flow: usize, maker: &Maker) {
    for seq in 0..ring.slots() as u64 {
        end.buffer.write(ring.offset(flow, seq), &maker.buffer());
    }
}

/// The messages of one queue pair on their way.
struct Sender {
    maker: Maker,
    posted: u64,
    complete: u64,
}

/// The messages of one queue pair that have come.
struct Target {
    check: SpotCheck,
    seq: u64,
}

pub(super) fn write(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    let sender = |flow| Sender { maker: Maker::new(flow, ring.size), posted: 0, complete: 0 };
    let mut senders: Vec<Sender> = (0..ring.flows).map(sender).collect();
    for (flow, sender) in senders.iter().enumerate() {
        fill(&end, ring, flow, &sender.maker);
    }
    end.connect(&mut role)?;
    let (depth, group) = (ring.depth as u64, ring.group as u64);
    let mut out = Vec::new();
    while !stopping() {
        for (flow, Sender { maker, posted, complete }) in senders.iter_mut().enumerate() {
            while *posted < *complete + depth {
                let offset = ring.offset(flow, *posted);
                maker.next_at(|at, bytes| end.buffer.write(offset + at, bytes));
                let (to, nth) = (end.remote(offset), *posted / group);
                let op = match (*posted + 1) % group {
                    0 => SendOp::WriteImm(to, nth as u32),
                    _ => SendOp::Write(to),
                };
                end.post_one(flow, *posted, op, end.sge(offset, ring.size))?;
                *posted += 1;
            }
        }
        end.take(&mut out)?;
        for completion in &out {
            senders[end.flow(completion)].complete += 1;
        }
    }
    end.finish(senders.iter().map(|sender| sender.complete).sum());
}

pub(super) fn written(mut role: Role) -> Result<(), String> {
    let ring = Ring::of(&role);
    let mut end = End::open(&role, ring.shape())?;
    let receive = [RecvWr { id: 0, sges: &[] }];
    let mut targets = Vec::new();
    for flow in 0..ring.flows {
        fill(&end, ring, flow, &Maker::new(flow, ring.size)); // so that every page is there
        for _ in 1..GROUPS {
            end.post_recv(flow, &receive)?;
        }
        targets.push(Target { check: SpotCheck::new(flow, ring.size), seq: 0 });
    }
    end.connect(&mut role)?;
    let mut meter = role.meter();
    meter.set_probe(end.probe());
    let mut out = Vec::new();
    while !stopping() {
        end.take(&mut out)?;
        for completion in &out {
            let flow = end.flow(completion);
            let Target { check, seq } = &mut targets[flow];
            let due = (*seq / ring.group as u64) as u32;
            if completion.opcode != WcOpcode::RecvRdmaWithImm || completion.imm != Some(due) {
                return Err(format!("immediate {:?} where {due} was due", completion.imm));
            }
            for _ in 0..ring.group {
                let offset = ring.offset(flow, *seq);
                check.check(*seq, |at, bytes| end.buffer.read(offset + at, bytes))?;
                *seq += 1;
            }
            end.post_recv(flow, &receive)?;
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
    fill(&end, ring, 0, &Maker::new(0, ring.size)); // so that every page is there
    end.connect(&mut role)?;
    let mut check = SpotCheck::new(READ_STREAM, ring.size);
    let mut meter = role.meter();
    meter.set_probe(end.probe());
    let (mut posted, mut complete) = (0u64, 0u64);
    let mut out = Vec::new();
    while !stopping() {
        while posted < complete + ring.depth as u64 {
            let offset = ring.offset(0, posted);
            end.buffer.write(offset, &[0; 8]);
            end.buffer.write(offset + ring.size - 8, &[0; 8]);
            let op = SendOp::Read(end.remote(offset));
            end.post_one(0, posted, op, end.sge(offset, ring.size))?;
            posted += 1;
        }
        end.take(&mut out)?;
        for completion in &out {
            if completion.wr_id != complete {
                return Err(format!("read {} where {complete} was due", completion.wr_id));
            }
            let offset = ring.offset(0, complete);
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
    fill(&end, ring, 0, &maker);
    for seq in 0..ring.slots() as u64 {
        let offset = ring.offset(0, seq);
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
