//! Streams of messages over unreliable connections (UC): a program sends, another one receives.
//! Messages may be lost, but are never changed, and arrive whole, in order and once; all arrive by
//! a network that loses and reorders nothing [UC-3], [UC-4].

use std::net::IpAddr;
use std::sync::Arc;

use bowline_roce::{Device, Instant};
use bowline_verbs::{
    Access, AddressVector, Buffer, Completion, CqId, Error, MrKeys, Mtu, PdId, QpAttr, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, Remote, Resource, SendFlags, SendOp, SendWr, Sge, SrqId,
    SrqInit, Status, WcOpcode,
};
use serde::{Deserialize, Serialize};

use super::memory::fill;
use super::plan::Plan;
use super::reach::{self, StreamRow};
use super::remote;
use super::world::{Event, World};
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// Time in nanoseconds after which no message of a network without faults is on its way any more.
const ARRIVED: u64 = SEC;

/// Address of the first byte of each end's memory, the same in every run.
const IOVA: u64 = 0x10_0000;

/// A stream, drawn from a seed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StreamPlan {
    from: usize,
    to: usize,
    #[serde(with = "remote::MtuDef")]
    mtu: Mtu,
    pub(crate) start: u64,
    /// Number of messages, and bytes of the longest one.
    messages: usize,
    message_max: usize,
    /// Longest time in nanoseconds between two messages.
    gap: u64,
    /// First sequence number: often so high that it wraps soon.
    psn: u32,
    /// The receiver takes its receives from a shared receive queue.
    shared_receives: bool,
}

impl StreamPlan {
    pub(crate) fn draw(rng: &mut Rng, plan: &Plan) -> Self {
        let from = rng.index(plan.hosts.len());
        let to = (from + 1 + rng.index(plan.hosts.len() - 1)) % plan.hosts.len();
        let mtu = plan.hosts[from].mtu.min(plan.hosts[to].mtu);
        Self {
            from,
            to,
            mtu,
            start: rng.magnitude(1, MS),
            messages: rng.between(1, 40) as usize,
            message_max: rng.magnitude(1, 5 * mtu.bytes() as u64) as usize,
            gap: rng.pick(&[0, 5 * US, 100 * US, 2 * MS]),
            psn: 0xff_ffff - rng.below(100) as u32,
            shared_receives: rng.chance(300),
        }
    }
}

/// One end of a stream.
#[derive(Debug)]
struct End {
    host: usize,
    /// Generation of the device.
    boot: u32,
    pd: PdId,
    cq: CqId,
    qpn: Qpn,
    srq: Option<SrqId>,
    buffer: Arc<Buffer>,
    keys: MrKeys,
}

/// A message that was sent.
#[derive(Debug)]
struct Sent {
    bytes: Vec<u8>,
    is_write: bool,
}

/// A stream that has begun.
#[derive(Debug)]
pub(crate) struct Stream {
    ends: [End; 2],
    sent: Vec<Sent>,
    /// Sends that have completed.
    done: usize,
    /// Receives that have completed.
    received: usize,
    /// Number of the message that came last.
    last: Option<usize>,
    last_sent_at: u64,
}

impl End {
    fn new(
        device: &mut Device,
        now: Instant,
        (host, boot): (usize, u32),
        plan: &StreamPlan,
        is_receiver: bool,
    ) -> Result<Self, Error> {
        let room = plan.message_max * plan.messages;
        let buffer = Buffer::new(2 * room).map_err(|_| Error::Limit(Resource::Memory))?;
        let buffer = Arc::new(buffer);
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(2 * plan.messages)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let keys = device.reg_mr(pd, &buffer, 0, 2 * room, Some(IOVA), access)?;
        let srq = match plan.shared_receives && is_receiver {
            true => {
                let init = SrqInit { pd, max_wr: plan.messages, max_sge: 1 };
                Some(device.create_srq(&init)?)
            }
            false => None,
        };
        let cap = QpCap {
            max_send_wr: plan.messages,
            max_recv_wr: plan.messages,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let (qp_type, sq_sig_all) = (QpType::Uc, true);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq, qp_type, cap, sq_sig_all };
        let qpn = device.create_qp(&init)?;
        let attr = QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() };
        device.modify_qp(now, qpn, &attr)?;
        let end = Self { host, boot, pd, cq, qpn, srq, buffer, keys };
        for id in 0..if is_receiver { plan.messages } else { 0 } {
            let sges = [end.sge(id * plan.message_max, plan.message_max)];
            let wr = RecvWr { id: id as u64, sges: &sges };
            let posted = match srq {
                Some(srq) => device.post_srq_recv(srq, &[wr]),
                None => device.post_recv(now, qpn, &[wr]),
            };
            posted.map_err(|(_, error)| error)?;
        }
        Ok(end)
    }

    fn connect(
        &self,
        device: &mut Device,
        now: Instant,
        [local, remote]: [IpAddr; 2],
        peer: Qpn,
        plan: &StreamPlan,
    ) -> Result<(), Error> {
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            av: Some(AddressVector { local, remote, flow_label: 0, tos: 0 }),
            path_mtu: Some(plan.mtu),
            dest_qpn: Some(peer),
            rq_psn: Some(plan.psn),
            ..QpAttr::default()
        };
        let rts = QpAttr { state: Some(QpState::Rts), sq_psn: Some(plan.psn), ..QpAttr::default() };
        device.modify_qp(now, self.qpn, &rtr)?;
        device.modify_qp(now, self.qpn, &rts)
    }

    fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: IOVA + offset as u64, len: len as u32, lkey: self.keys.lkey }
    }

    fn remove(&self, device: &mut Device) -> Result<(), Error> {
        device.destroy_qp(self.qpn)?;
        if let Some(srq) = self.srq {
            device.destroy_srq(srq)?;
        }
        device.destroy_cq(self.cq)?;
        device.dereg_mr(self.keys.lkey)?;
        device.dealloc_pd(self.pd)
    }
}

impl World {
    /// Begins a stream, if both devices are there.
    pub(crate) fn begin_stream(&mut self, n: usize) {
        let plan = self.plan.streams[n].clone();
        if [plan.from, plan.to].iter().any(|host| self.hosts[*host].device.is_none()) {
            return;
        }
        let now = self.instant();
        let mut make = |host: usize, is_receiver| {
            let boot = self.hosts[host].boot;
            let device = self.hosts[host].device.as_mut()?;
            Some(End::new(device, now, (host, boot), &plan, is_receiver))
        };
        let (Some(from), Some(to)) = (make(plan.from, false), make(plan.to, true)) else { return };
        let ends = self.judge(from.and_then(|from| Ok([from, to?])).map_err(|e| format!("{e}")));
        let Some(ends) = ends else { return };
        for (at, end) in ends.iter().enumerate() {
            let peer = &ends[1 - at];
            let addrs = [end, peer].map(|end| self.hosts[end.host].addr());
            let Some(device) = &mut self.hosts[end.host].device else { return };
            let connected = end.connect(device, now, addrs, peer.qpn, &plan);
            self.judge(connected.map_err(|e| format!("stream {n}: {e}")));
        }
        self.note([33, n as u64, 0], || format!("stream {n}: {plan:?}"));
        let (sent, last_sent_at) = (Vec::new(), self.now);
        let stream = Stream { ends, sent, done: 0, received: 0, last: None, last_sent_at };
        self.streams[n] = Some(stream);
        self.schedule(0, Event::StreamSend(n));
    }

    /// Sends the next message of a stream, and looks for those that have come.
    pub(crate) fn send_stream(&mut self, n: usize) {
        self.poll_stream(n);
        let plan = self.plan.streams[n].clone();
        let Some(stream) = &self.streams[n] else { return };
        let [from, to] = &stream.ends;
        if stream.sent.len() == plan.messages || !self.lives(from.host, from.boot) {
            return;
        }
        let (number, qpn, host) = (stream.sent.len(), from.qpn, from.host);
        let offset = number * plan.message_max;
        // Where the receiver has its receives, and its memory for writes behind them.
        let target = plan.message_max * plan.messages + offset;
        let remote = Remote { addr: IOVA + target as u64, rkey: to.keys.rkey };
        let len = self.base.rng.index(plan.message_max + 1);
        let is_write = self.base.rng.chance(300);
        let mut bytes = Vec::new();
        fill((n as u64) << 32 | number as u64, len, &mut bytes);
        from.buffer.write(offset, &bytes);
        let sges = [from.sge(offset, len)];
        let imm = number as u32;
        let op = if is_write { SendOp::WriteImm(remote, imm) } else { SendOp::SendImm(imm) };
        let now = self.instant();
        self.note([34, n as u64, number as u64], || format!("stream {n} sends {number}: {op:?}"));
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { id: number as u64, op, sges: &sges, inline: &[], flags };
        let Some(device) = &mut self.hosts[host].device else { return };
        let posted = device.post_send(now, qpn, &[wr]);
        self.judge(posted.map_err(|(_, e)| format!("stream {n}: message {number}: {e}")));
        self.schedule_turn(host);
        let now = self.now;
        if let Some(stream) = &mut self.streams[n] {
            stream.sent.push(Sent { bytes, is_write });
            stream.last_sent_at = now;
        }
        self.schedule_within(plan.gap, Event::StreamSend(n));
    }

    fn poll_stream(&mut self, n: usize) {
        for at in 0..2 {
            let Some(stream) = &self.streams[n] else { return };
            let End { host, boot, cq, .. } = stream.ends[at];
            if !self.lives(host, boot) {
                continue;
            }
            let Some(device) = &mut self.hosts[host].device else { continue };
            let mut entries = Vec::new();
            let polled = device.poll_cq(cq, &mut entries, usize::MAX);
            self.judge(polled.map_err(|e| format!("stream {n}: poll: {e}")));
            self.sabotaged_entries(&mut entries);
            for entry in &entries {
                self.note([35, n as u64, entry.wr_id], || format!("stream {n}: {entry:?}"));
                let plan = &self.plan.streams[n];
                let Some(stream) = &mut self.streams[n] else { return };
                let judged = match at {
                    0 => stream.send_completed(entry),
                    _ => stream.receive_completed(plan, entry),
                };
                self.judge(judged.map_err(|e| format!("stream {n}: it came as {entry:?}: {e}")));
            }
        }
    }

    /// Ends a stream: looks for the last time, and removes what is left.
    pub(crate) fn close_stream(&mut self, n: usize) {
        self.poll_stream(n);
        let Some(stream) = &self.streams[n] else { return };
        let live = stream.ends.each_ref().map(|end| self.lives(end.host, end.boot));
        let (sent, came) = (stream.sent.len(), stream.received);
        let over = self.now - stream.last_sent_at > ARRIVED;
        if !self.plan.leaves_behind() && over && live == [true; 2] && came < sent {
            self.fail(|| format!("stream {n}: of {sent} messages {came} came by a good network"));
            return;
        }
        let rows = [(came, StreamRow::Arrived), (sent - came, StreamRow::Lost)];
        for (_, row) in rows.into_iter().filter(|(count, _)| *count > 0) {
            reach::stream(&mut self.coverage, row);
        }
        let Some(stream) = self.streams[n].take() else { return };
        for (end, _) in stream.ends.iter().zip(live).filter(|(_, live)| *live) {
            let Some(device) = &mut self.hosts[end.host].device else { continue };
            let removed = end.remove(device);
            self.judge(removed.map_err(|e| format!("stream {n}: something is left: {e}")));
            self.schedule_turn(end.host);
        }
    }
}

impl Stream {
    fn send_completed(&mut self, entry: &Completion) -> Result<(), String> {
        let number = self.done;
        self.done += 1;
        let sent = self.sent.get(number).ok_or("nothing was sent")?;
        let opcode = if sent.is_write { WcOpcode::RdmaWrite } else { WcOpcode::Send };
        let is_right = (entry.wr_id, entry.status) == (number as u64, Status::Success)
            && (entry.opcode, entry.byte_len as usize) == (opcode, sent.bytes.len());
        if is_right { Ok(()) } else { Err(format!("message {number} was due")) }
    }

    fn receive_completed(&mut self, plan: &StreamPlan, entry: &Completion) -> Result<(), String> {
        let receive = self.received;
        self.received += 1;
        if (entry.wr_id, entry.status) != (receive as u64, Status::Success) {
            return Err(format!("receive {receive} was due"));
        }
        let number = entry.imm.ok_or("without an immediate")? as usize;
        let sent = self.sent.get(number).ok_or("a message nobody sent")?;
        if self.last.is_some_and(|last| number <= last) {
            return Err(format!("message {number} came after {:?}", self.last));
        }
        self.last = Some(number);
        let opcode = if sent.is_write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        let slot = match sent.is_write {
            true => plan.messages + number,
            false => receive,
        };
        let mut bytes = Vec::new();
        let at = slot * plan.message_max;
        self.ends[1].buffer.append_to(at, sent.bytes.len(), &mut bytes);
        let is_right = (entry.opcode, entry.byte_len as usize) == (opcode, sent.bytes.len());
        if !is_right || bytes != sent.bytes {
            return Err(format!("not message {number} as it was sent"));
        }
        Ok(())
    }
}
