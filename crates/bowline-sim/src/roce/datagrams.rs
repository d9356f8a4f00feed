//! Datagrams of programs (UD). They may be lost, and may come more than once when the network
//! repeats them, but are never changed, never reach another receiver, and never arrive without the
//! right key.

use std::collections::VecDeque;
use std::net::IpAddr;

use bowline_verbs::{
    Access, Completion, CqId, Error, MrKeys, PdId, QpAttr, QpCap, QpInit, QpState, QpType, Qpn,
    RecvWr, Resource, SendFlags, SendOp, SendWr, Status, UdDest, WcOpcode,
};

use super::memory::{AreaId, Memory, Purpose, fill, part, sges};
use super::side::Receive;
use super::world::{Event, World};
use crate::engine::queue::MS;
use crate::engine::rng::Rng;

/// Bytes before the payload of a receive [RX-12].
const HEADER: usize = 40;
/// Maximum number of outstanding requests of one port, in each direction.
const DEPTH: usize = 4;
/// Maximum number of elements of a scatter/gather list.
const SGES: usize = 3;

/// The datagram queue pair of a host.
#[derive(Debug)]
pub(crate) struct Port {
    pd: PdId,
    cq: CqId,
    qpn: Qpn,
    key: u32,
    memory: Memory,
    iova: u64,
    local: MrKeys,
    sends: VecDeque<(u64, AreaId)>,
    receives: VecDeque<Receive>,
    next: u64,
    left: u32,
}

/// A datagram that was sent.
#[derive(Debug)]
pub(crate) struct UdDatagram {
    from: (IpAddr, Qpn),
    to: Qpn,
    bytes: Vec<u8>,
    imm: Option<u32>,
    right_key: bool,
    came: u32,
}

impl Port {
    fn new(device: &mut bowline_roce::Device, rng: &mut Rng, at: Place) -> Result<Self, Error> {
        let Place { now, mtu, left } = at;
        let areas: Vec<_> = (0..DEPTH)
            .flat_map(|_| [(Purpose::Source, mtu), (Purpose::Receive, mtu + HEADER)])
            .collect();
        let memory = Memory::new(rng, &areas).ok_or(Error::Limit(Resource::Memory))?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(2 * DEPTH)?;
        let cap = QpCap {
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_send_sge: SGES,
            max_recv_sge: SGES,
            max_inline: 0,
        };
        let (qp_type, sq_sig_all) = (QpType::Ud, true);
        let qpn = device.create_qp(&QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type,
            cap,
            sq_sig_all,
        })?;
        let key = rng.next() as u32 & 0x7fff_ffff;
        let none = QpAttr::default();
        for attr in [
            QpAttr { state: Some(QpState::Init), qkey: Some(key), ..none },
            QpAttr { state: Some(QpState::Rtr), ..none },
            QpAttr { state: Some(QpState::Rts), sq_psn: Some(key & 0xff_ffff), ..none },
        ] {
            device.modify_qp(now, qpn, &attr)?;
        }
        let iova = (rng.next() >> 1) & !0xfff;
        let (start, len) = memory.span(&[Purpose::Source, Purpose::Receive]);
        let first = Some(iova + start as u64);
        let local = device.reg_mr(pd, &memory.buffer, start, len, first, Access::LOCAL_WRITE)?;
        let (sends, receives) = (VecDeque::new(), VecDeque::new());
        Ok(Self { pd, cq, qpn, key, memory, iova, local, sends, receives, next: 0, left })
    }
}

struct Place {
    now: bowline_roce::Instant,
    mtu: usize,
    left: u32,
}

impl World {
    /// Starts a program that sends and receives datagrams on a host.
    pub(crate) fn open_port(&mut self, host: usize) {
        self.ports[host] = None;
        let left = std::mem::take(&mut self.ud_sends_left[host]);
        if left == 0 {
            return;
        }
        let at = Place { now: self.instant(), mtu: self.plan.hosts[host].mtu.bytes(), left };
        let Some(device) = &mut self.hosts[host].device else { return };
        let port = Port::new(device, &mut self.base.rng, at);
        self.ports[host] = self.judge(port.map_err(|e| format!("host {host}: a UD port: {e}")));
        for _ in 0..DEPTH {
            self.post_ud_receive(host);
        }
        self.poll_port(host);
        self.schedule_within(MS, Event::UdSend(host));
    }

    fn post_ud_receive(&mut self, host: usize) {
        let now = self.instant();
        let Some(port) = &mut self.ports[host] else { return };
        let Some(device) = &mut self.hosts[host].device else { return };
        let Some(area) = port.memory.take(&mut self.base.rng, Purpose::Receive, HEADER) else {
            return;
        };
        let (_, room) = port.memory.range(area);
        // Some receives are too short for some datagrams.
        let len = if self.base.rng.chance(200) { self.base.rng.index(room + 1) } else { room };
        let pieces = port.memory.cut(&mut self.base.rng, area, len, SGES);
        port.next += 1;
        let number = port.next;
        let list = sges(&pieces, port.iova, port.local.lkey);
        port.receives.push_back(Receive { number, area, pieces, len });
        let posted = device.post_recv(now, port.qpn, &[RecvWr { id: number, sges: &list }]);
        self.judge(posted.map_err(|(_, e)| format!("host {host}: a UD receive: {e}")));
    }

    /// Sends a datagram of a program to another host, some with a wrong key.
    pub(crate) fn send_ud(&mut self, host: usize) {
        let to = self.base.rng.index(self.hosts.len());
        let there = self.ports[to].as_ref().map(|p| (p.qpn, p.key));
        let now = self.instant();
        let Some(port) = self.ports[host].as_mut().filter(|port| port.left > 0) else { return };
        port.left -= 1;
        self.schedule_within(MS, Event::UdSend(host));
        let Some(port) = &mut self.ports[host] else { return };
        let (Some((qpn, key)), true) = (there, port.sends.len() < DEPTH && to != host) else {
            return;
        };
        let mtu = self.plan.hosts[host].mtu.min(self.plan.hosts[to].mtu).bytes();
        let len = if self.base.rng.chance(200) { mtu } else { 8 + self.base.rng.index(mtu - 7) };
        let number = self.ud_datagrams.len() as u64;
        let mut bytes = number.to_le_bytes().to_vec();
        fill(number, len - 8, &mut bytes);
        let Some(area) = port.memory.take(&mut self.base.rng, Purpose::Source, len) else { return };
        let pieces = port.memory.cut(&mut self.base.rng, area, len, SGES);
        port.memory.write(&pieces, &bytes);
        port.next += 1;
        port.sends.push_back((port.next, area));
        let imm = self.base.rng.chance(300).then(|| self.base.rng.next() as u32);
        let right_key = !self.base.rng.chance(100);
        let qkey = if right_key { key } else { key ^ 1 << self.base.rng.below(31) };
        let dest = UdDest { addr: self.hosts[to].addr(), from: None, qpn, qkey };
        let from = (self.hosts[host].addr(), port.qpn);
        self.ud_datagrams.push(UdDatagram { from, to: qpn, bytes, imm, right_key, came: 0 });
        let list = sges(&pieces, port.iova, port.local.lkey);
        let (id, sender) = (port.next, port.qpn);
        self.note([30, host as u64, number], || format!("host {host} sends datagram {number}"));
        let Some(device) = &mut self.hosts[host].device else { return };
        let wr = SendWr {
            id,
            op: SendOp::Datagram(dest, imm),
            sges: &list,
            inline: &[],
            flags: SendFlags::SIGNALED,
        };
        let posted = device.post_send(now, sender, &[wr]);
        self.judge(posted.map_err(|(_, e)| format!("host {host}: a UD send: {e}")));
        self.schedule_turn(host);
    }

    /// Tells whether the completion queue belongs to the host's port; if so, polls it.
    pub(crate) fn port_ready(&mut self, host: usize, cq: CqId) -> bool {
        let mine = self.ports[host].as_ref().is_some_and(|port| port.cq == cq);
        if mine {
            self.poll_port(host);
        }
        mine
    }

    fn poll_port(&mut self, host: usize) {
        loop {
            let Some(port) = &self.ports[host] else { return };
            let Some(device) = &mut self.hosts[host].device else { return };
            let mut entries = Vec::new();
            let polled = device.poll_cq(port.cq, &mut entries, 16);
            if entries.is_empty() && polled.is_ok() {
                match device.arm_cq(port.cq, false) {
                    Ok(true) => return,
                    Ok(false) => continue,
                    Err(e) => return self.fail(|| format!("host {host}: arm: {e}")),
                }
            }
            self.judge(polled.map_err(|e| format!("host {host}: poll: {e}")));
            for entry in entries {
                let judged = self.ud_completed(host, &entry);
                self.judge(judged.map_err(|e| format!("host {host}: {entry:?}: {e}")));
            }
        }
    }

    fn ud_completed(&mut self, host: usize, entry: &Completion) -> Result<(), String> {
        self.note([31, host as u64, entry.wr_id], || format!("host {host}: {entry:?}"));
        let Some(port) = &mut self.ports[host] else { return Ok(()) };
        if !entry.is_recv() {
            let (number, area) = port.sends.pop_front().ok_or("nothing was sent")?;
            port.memory.release(area);
            let right = number == entry.wr_id && entry.opcode == WcOpcode::Send;
            let good = entry.status == Status::Success || port.left == 0;
            return if right && good { Ok(()) } else { Err(format!("{number} was due")) };
        }
        let receive = port.receives.pop_front().ok_or("nothing was to be received")?;
        if receive.number != entry.wr_id {
            return Err(format!("{} was due", receive.number));
        }
        match entry.status {
            Status::Success => {}
            Status::WrFlushErr if port.left == 0 => return port.memory.check_all(),
            _ => return Err("a receive failed".into()),
        }
        let len = entry.byte_len as usize;
        if len < HEADER + 8 || len > receive.len || !entry.grh {
            return Err("no datagram of ours".into());
        }
        let mut bytes = Vec::with_capacity(len);
        for (at, len) in part(&receive.pieces, 0, len) {
            port.memory.buffer.append_to(at, len, &mut bytes);
        }
        let payload = &bytes[HEADER..];
        let number = payload.first_chunk().map_or(u64::MAX, |b| u64::from_le_bytes(*b));
        let datagram =
            self.ud_datagrams.get_mut(number as usize).ok_or("a datagram nobody sent")?;
        datagram.came += 1;
        let header = header(datagram.from.0, self.hosts[host].addr());
        let right = datagram.bytes == payload
            && datagram.imm == entry.imm
            && datagram.from.1 == entry.src_qp
            && datagram.to == entry.qpn
            && datagram.right_key
            && header.iter().zip(&bytes).all(|(must, is)| must.is_none_or(|must| must == *is));
        // The network repeats a datagram once.
        if !right || datagram.came > 1 + u32::from(self.plan.net.repeat > 0) {
            return Err(format!("not datagram {number} as it was sent: {datagram:x?}, {bytes:x?}"));
        }
        port.memory.received(receive.area, &receive.pieces, &bytes)?;
        port.memory.release(receive.area);
        self.stats.letters += 1;
        self.post_ud_receive(host);
        Ok(())
    }

    /// Ends the programs.
    pub(crate) fn close_port(&mut self, host: usize) {
        let now = self.instant();
        let Some(port) = &mut self.ports[host] else { return };
        port.left = 0;
        let qpn = port.qpn;
        let Some(device) = &mut self.hosts[host].device else { return };
        let attr = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
        let ended = device.modify_qp(now, qpn, &attr);
        self.judge(ended.map_err(|e| format!("host {host}: the UD port: {e}")));
        self.poll_port(host);
        let Some(port) = self.ports[host].take() else { return };
        if !port.sends.is_empty() || !port.receives.is_empty() {
            self.fail(|| format!("host {host}: the UD port was not flushed: {port:?}"));
        }
        let Some(device) = &mut self.hosts[host].device else { return };
        let mut remove = || {
            device.destroy_qp(port.qpn)?;
            device.destroy_cq(port.cq)?;
            device.dereg_mr(port.local.lkey)?;
            device.dealloc_pd(port.pd)
        };
        let removed = remove();
        self.judge(removed.map_err(|e| format!("host {host}: the UD port stays: {e}")));
        self.schedule_turn(host);
    }
}

/// Returns the known bytes of the network header before a datagram [RX-12]: 20 zeroes and the
/// addresses of the IPv4 header, or the addresses of the IPv6 header.
fn header(from: IpAddr, to: IpAddr) -> [Option<u8>; HEADER] {
    let mut out = [None; HEADER];
    let mut put = |at: usize, bytes: &[u8]| {
        for (place, byte) in out[at..].iter_mut().zip(bytes) {
            *place = Some(*byte);
        }
    };
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            put(0, &[0; 20]);
            put(20, &[0x45]);
            put(32, &from.octets());
            put(36, &to.octets());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            put(8, &from.octets());
            put(24, &to.octets());
        }
        _ => {}
    }
    out
}
