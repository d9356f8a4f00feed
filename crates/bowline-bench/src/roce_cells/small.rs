//! Streams of small sends, and round trips of sends and of writes with immediate.

use bowline_verbs::{Completion, RecvWr, SendFlags, SendOp, SendWr, Sge};

use super::end::{End, Shape};
use crate::cell::Kind;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, stopping};

/// Receives a receiver keeps posted: more than are ever on their way.
const RECEIVES: usize = 512;
/// Sends given to the device in one call, at most.
const BATCH: usize = 32;
/// Receives either side of a round trip keeps posted.
const PING_RECEIVES: usize = 16;
/// One send of a round trip in this many completes with an entry; all before it are done then.
const SIGNAL_EVERY: u64 = 16;

pub(super) fn receive(mut role: Role) -> Result<(), String> {
    let (size, flows) = (role.cell.size, role.cell.flows);
    let with_imm = role.cell.kind == Kind::SendImm;
    let shape = Shape { memory: flows * RECEIVES * size, sends: 1, receives: RECEIVES };
    let mut end = End::open(&role, shape)?;
    // Those of a queue pair follow each other.
    let slots: Vec<[Sge; 1]> = (0..flows * RECEIVES).map(|i| [end.sge(i * size, size)]).collect();
    let receive = |id: usize| RecvWr { id: id as u64, sges: &slots[id] };
    let mut wrs: Vec<Vec<RecvWr<'_>>> = (0..flows)
        .map(|flow| (flow * RECEIVES..(flow + 1) * RECEIVES).map(receive).collect())
        .collect();
    for (flow, wrs) in wrs.iter().enumerate() {
        end.post_recv(flow, wrs)?;
    }
    end.connect(&mut role)?;
    let mut checker = Checker::new(flows, size, Loss::Forbidden);
    let mut received = vec![0u64; flows];
    let mut meter = role.meter();
    meter.set_probe(end.probe());
    let mut message = vec![0; size];
    let mut out = Vec::new();
    while !stopping() {
        end.take(&mut out)?;
        wrs.iter_mut().for_each(Vec::clear);
        for completion in &out {
            let id = completion.wr_id as usize;
            end.buffer.read(id * size, &mut message);
            let flow = checker.check(&message[..size.min(completion.byte_len as usize)])?;
            let due = with_imm.then_some(received[flow] as u32);
            if completion.imm != due || flow != end.flow(completion) {
                return Err(format!("immediate {:?} where {due:?} was due", completion.imm));
            }
            received[flow] += 1;
            wrs[flow].push(receive(id));
        }
        if out.is_empty() {
            meter.look_if_started();
            continue;
        }
        for (flow, wrs) in wrs.iter().enumerate().filter(|(_, wrs)| !wrs.is_empty()) {
            end.post_recv(flow, wrs)?;
        }
        meter.add(out.len() as u64);
    }
    Ok(())
}

/// What one queue pair sends.
struct Sender {
    maker: Maker,
    messages: Vec<Vec<u8>>,
    posted: u64,
    complete: u64,
}

impl Sender {
    fn new(flow: usize, size: usize, batch: usize) -> Self {
        let maker = Maker::new(flow, size);
        let messages = (0..batch).map(|_| maker.buffer()).collect();
        Self { maker, messages, posted: 0, complete: 0 }
    }

    /// Posts a batch, if that many may be on their way.
    fn post(&mut self, end: &End, flow: usize, depth: u64, with_imm: bool) -> Result<bool, String> {
        let batch = self.messages.len() as u64;
        if self.posted + batch > self.complete + depth {
            return Ok(false);
        }
        for message in &mut self.messages {
            self.maker.next_in(message);
        }
        let first = self.posted;
        self.posted += batch;
        let wrs: Vec<SendWr<'_>> = (first..self.posted)
            .zip(&self.messages)
            .map(|(seq, inline)| {
                // The last one's entry tells that all before it are done.
                let last = seq + 1 == self.posted;
                let signal = if last { SendFlags::SIGNALED } else { SendFlags::empty() };
                let flags = SendFlags::INLINE | signal;
                let op = if with_imm { SendOp::SendImm(seq as u32) } else { SendOp::Send };
                SendWr { id: self.posted, op, sges: &[], inline, flags }
            })
            .collect();
        end.post(flow, &wrs)?;
        Ok(true)
    }
}

pub(super) fn send(mut role: Role) -> Result<(), String> {
    let (size, depth) = (role.cell.size, role.cell.depth);
    let with_imm = role.cell.kind == Kind::SendImm;
    let mut end = End::open(&role, Shape { memory: size, sends: depth, receives: 1 })?;
    end.connect(&mut role)?;
    let batch = (depth / 4).clamp(1, BATCH);
    let mut senders: Vec<Sender> =
        (0..role.cell.flows).map(|flow| Sender::new(flow, size, batch)).collect();
    let mut out = Vec::new();
    while !stopping() {
        for (flow, sender) in senders.iter_mut().enumerate() {
            while sender.post(&end, flow, depth as u64, with_imm)? {}
        }
        end.take(&mut out)?;
        for completion in &out {
            senders[end.flow(completion)].complete = completion.wr_id;
        }
    }
    end.finish(senders.iter().map(|sender| sender.complete).sum());
}

/// One side of round trips: memory for what comes, and how to send.
struct Pinger {
    end: End,
    size: usize,
    write: bool,
    sent: u64,
    /// The slot of the message that came last; its receive is posted again once the answer is on
    /// its way, when that holds nobody up.
    taken: Option<u64>,
    out: Vec<Completion>,
}

impl Pinger {
    fn open(role: &mut Role) -> Result<Self, String> {
        let size = role.cell.size;
        let sends = 4 * SIGNAL_EVERY as usize;
        let shape = Shape { memory: PING_RECEIVES * size, sends, receives: PING_RECEIVES };
        let end = End::open(role, shape)?;
        let write = role.cell.kind == Kind::PingWrite;
        let mut pinger = Self { end, size, write, sent: 0, taken: None, out: Vec::new() };
        (0..PING_RECEIVES as u64).try_for_each(|slot| pinger.post_recv(slot))?;
        pinger.end.connect(role)?;
        Ok(pinger)
    }

    fn post_recv(&self, slot: u64) -> Result<(), String> {
        let sges = [self.end.sge(slot as usize * self.size, self.size)];
        let sges: &[Sge] = if self.write { &[] } else { &sges };
        self.end.post_recv(0, &[RecvWr { id: slot, sges }])
    }

    fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.sent += 1;
        let signal = self.sent.is_multiple_of(SIGNAL_EVERY);
        let signal = if signal { SendFlags::SIGNALED } else { SendFlags::empty() };
        let op = match self.write {
            true => SendOp::WriteImm(self.end.remote(0), self.sent as u32),
            false => SendOp::Send,
        };
        let flags = SendFlags::INLINE | signal;
        self.end.post(0, &[SendWr { id: self.sent, op, sges: &[], inline: message, flags }])?;
        self.taken.take().map_or(Ok(()), |slot| self.post_recv(slot))
    }

    /// Waits for the message of the other side and copies it out; false at the end.
    fn receive(&mut self, message: &mut [u8]) -> Result<bool, String> {
        while self.taken.is_none() && !stopping() {
            self.end.take(&mut self.out)?;
            if let Some(completion) = self.out.iter().find(|completion| completion.is_recv()) {
                let slot = if self.write { 0 } else { completion.wr_id as usize };
                self.end.buffer.read(slot * self.size, message);
                self.taken = Some(completion.wr_id);
            }
        }
        Ok(self.taken.is_some())
    }
}

pub(super) fn answer(mut role: Role) -> Result<(), String> {
    let mut pinger = Pinger::open(&mut role)?;
    let mut message = vec![0; pinger.size];
    while pinger.receive(&mut message)? {
        pinger.send(&message)?;
    }
    Ok(())
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let mut pinger = Pinger::open(&mut role)?;
    let mut maker = Maker::new(0, pinger.size);
    let mut checker = Checker::new(1, pinger.size, Loss::Forbidden);
    let mut message = vec![0; pinger.size];
    let mut laps = Laps::new(&role);
    laps.set_probe(pinger.end.probe());
    loop {
        pinger.send(maker.next())?;
        if !pinger.receive(&mut message)? {
            break;
        }
        checker.check(&message)?;
        if laps.lap() {
            break;
        }
    }
    std::process::exit(0); // the answering side is told to end next: nothing is left to flush
}
