//! A host of a cell: a real device, and programs that keep requests posted.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline_roce::{Burst, Config, Device, IdentHint, Instant};
use bowline_verbs::{
    Access, AddressVector, Buffer, Completion, CqId, MrKeys, QpAttr, QpCap, QpInit, QpState,
    QpType, Qpn, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};

use super::cells::{Cell, Operation};

/// Longest sleep of a program between two small requests, in nanoseconds.
const THINK: u64 = 20_000;
/// Code of the queue pairs' timeout: 537 ms, as with the connection manager of a kernel.
const TIMEOUT: u8 = 17;

/// A datagram between two hosts.
#[derive(Debug)]
pub(super) struct Datagram {
    pub(super) to: usize,
    pub(super) source: SocketAddr,
    pub(super) ident: u16,
    pub(super) tos: u8,
    pub(super) bytes: Vec<u8>,
}

/// What a program does on one queue pair.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) operation: Operation,
    pub(super) size: usize,
    pub(super) depth: usize,
    /// The program sleeps between two requests.
    pub(super) thinks: bool,
}

/// One queue pair of the side that posts.
#[derive(Debug)]
struct Lane {
    qpn: Qpn,
    work: Work,
    /// The peer's memory, and its key.
    remote: Remote,
    /// Bytes of this side's memory before that of the lane.
    offset: usize,
    posted: u64,
    completed: u64,
    /// When the requests that are not complete were posted.
    since: std::collections::VecDeque<u64>,
    /// The program sleeps until then.
    sleeps_until: u64,
}

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Done {
    pub(super) bytes: usize,
    pub(super) took: u64,
}

/// A host.
#[derive(Debug)]
pub(super) struct Station {
    pub(super) device: Device,
    addr: IpAddr,
    cq: CqId,
    init: QpInit,
    buffer: Arc<Buffer>,
    keys: MrKeys,
    lanes: Vec<Lane>,
    burst: Burst,
    entries: Vec<Completion>,
}

impl Station {
    pub(super) fn new(cell: &Cell, config: &Config, number: usize, bytes: usize) -> Self {
        let addr = address(number);
        let config =
            Config { guid: 1 + number as u64, addrs: vec![addr], mtu: cell.mtu, ..config.clone() };
        let mut device = Device::new(config, [number as u8; 32]);
        let buffer = Arc::new(Buffer::new(bytes.max(1)).expect("memory"));
        for at in (0..bytes).step_by(64) {
            buffer.write(at, &[(at / 64) as u8 ^ number as u8]);
        }
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(1 << 16).expect("a queue");
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let keys = device.reg_mr(pd, &buffer, 0, bytes.max(1), Some(0), all).expect("a region");
        let cap = QpCap { max_send_wr: 1024, ..QpCap::default() };
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: true,
        };
        let (lanes, entries) = (Vec::new(), Vec::new());
        Self { device, addr, cq, init, buffer, keys, lanes, burst: Burst::new(), entries }
    }

    /// Connects a lane of `self` to the memory of `server` at `at`.
    pub(super) fn connect(&mut self, server: &mut Self, work: Work, at: usize, now: u64) {
        let offset = self.lanes.iter().map(|lane| lane.work.size).sum();
        let qpns = [&mut *self, &mut *server]
            .map(|side| side.device.create_qp(&side.init).expect("a queue pair"));
        let addrs = [self.addr, server.addr];
        for (n, side) in [&mut *self, &mut *server].into_iter().enumerate() {
            side.bring_up(qpns[n], qpns[1 - n], addrs[1 - n], now);
        }
        self.lanes.push(Lane {
            qpn: qpns[0],
            work,
            remote: Remote { addr: at as u64, rkey: server.keys.rkey },
            offset,
            posted: 0,
            completed: 0,
            since: std::collections::VecDeque::new(),
            sleeps_until: 0,
        });
    }

    fn bring_up(&mut self, own: Qpn, other: Qpn, to: IpAddr, now: u64) {
        let av = AddressVector { local: self.addr, remote: to, flow_label: 0, tos: 0 };
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        for attr in [
            QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() },
            QpAttr {
                state: Some(QpState::Rtr),
                av: Some(av),
                path_mtu: Some(self.device.config().mtu),
                dest_qpn: Some(other),
                rq_psn: Some(7),
                max_dest_rd_atomic: Some(16),
                min_rnr_timer: Some(1),
                ..QpAttr::default()
            },
            QpAttr {
                state: Some(QpState::Rts),
                timeout: Some(TIMEOUT),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                sq_psn: Some(7),
                max_rd_atomic: Some(16),
                ..QpAttr::default()
            },
        ] {
            self.device.modify_qp(Instant::from_nanos(now), own, &attr).expect("a transition");
        }
        self.device.report_gaps(own).expect("its queue pair");
    }

    /// Takes a datagram.
    pub(super) fn take(&mut self, now: u64, datagram: &Datagram) {
        let Datagram { source, ident, tos, ref bytes, .. } = *datagram;
        let now = Instant::from_nanos(now);
        self.device.note_tos(now, source, self.addr, tos, bytes);
        self.device.handle_datagram(now, source, self.addr, IdentHint::Exact(ident), bytes);
    }

    /// Runs timers and programs, and makes datagrams; returns when there is more to do.
    pub(super) fn turn(
        &mut self,
        now: u64,
        done: &mut Vec<Done>,
        mut send: impl FnMut(Datagram),
    ) -> Result<Option<u64>, String> {
        let at = Instant::from_nanos(now);
        if self.device.poll_timeout().is_some_and(|due| due <= at) {
            self.device.handle_timeout(at);
        }
        self.complete(now, done)?;
        let mut next = self.post(now);
        while self.device.poll_event().is_some() {}
        while self.device.poll_transmit(at, &mut self.burst) {
            let burst = &self.burst;
            let source = SocketAddr::new(burst.from, burst.source_port);
            for (ident, bytes) in burst.segments().enumerate() {
                send(Datagram {
                    to: number_of(burst.to),
                    source,
                    ident: ident as u16,
                    tos: burst.tos,
                    bytes: bytes.to_vec(),
                });
            }
        }
        if let Some(due) = self.device.poll_timeout() {
            let due = due.as_nanos().max(now + 1);
            next = Some(next.map_or(due, |next| next.min(due)));
        }
        Ok(next)
    }

    fn complete(&mut self, now: u64, done: &mut Vec<Done>) -> Result<(), String> {
        self.entries.clear();
        self.device.poll_cq(self.cq, &mut self.entries, 4096).expect("its queue");
        for entry in &self.entries {
            let lane = self.lanes.iter_mut().find(|lane| lane.qpn == entry.qpn);
            let Some(lane) = lane else { continue };
            if entry.status != Status::Success || entry.wr_id != lane.completed {
                let (wr, status) = (entry.wr_id, entry.status);
                return Err(format!("request {wr} of {:?}: {status:?}", lane.qpn));
            }
            lane.completed += 1;
            let since = lane.since.pop_front().unwrap_or(now);
            done.push(Done { bytes: lane.work.size, took: now - since });
            if lane.work.thinks {
                // Not in step with anything.
                lane.sleeps_until = now + mix(lane.completed) % THINK;
            }
        }
        Ok(())
    }

    fn post(&mut self, now: u64) -> Option<u64> {
        let mut next: Option<u64> = None;
        for lane in &mut self.lanes {
            if lane.sleeps_until > now {
                next = Some(next.map_or(lane.sleeps_until, |next| next.min(lane.sleeps_until)));
                continue;
            }
            while lane.since.len() < lane.work.depth {
                let sges = [Sge {
                    addr: lane.offset as u64,
                    len: lane.work.size as u32,
                    lkey: self.keys.lkey,
                }];
                let op = match lane.work.operation {
                    Operation::Write => SendOp::Write(lane.remote),
                    Operation::Read => SendOp::Read(lane.remote),
                };
                let wr = SendWr {
                    id: lane.posted,
                    op,
                    sges: &sges,
                    inline: &[],
                    flags: SendFlags::SIGNALED,
                };
                let at = Instant::from_nanos(now);
                self.device.post_send(at, lane.qpn, &[wr]).expect("room in the queue");
                lane.posted += 1;
                lane.since.push_back(now);
            }
        }
        next
    }

    /// Checks that what completed requests have moved is where it belongs.
    pub(super) fn check(&self, server: &Self) -> Result<(), String> {
        for lane in self.lanes.iter().filter(|lane| lane.completed > 0) {
            let (mut own, mut theirs) = (vec![0; lane.work.size], vec![0; lane.work.size]);
            self.buffer.read(lane.offset, &mut own);
            server.buffer.read(lane.remote.addr as usize, &mut theirs);
            if own != theirs {
                return Err(format!("the memory of {:?} is not what was moved", lane.qpn));
            }
        }
        Ok(())
    }
}

fn address(number: usize) -> IpAddr {
    IpAddr::from([10, 0, (number >> 8) as u8, number as u8])
}

fn number_of(addr: IpAddr) -> usize {
    match addr {
        IpAddr::V4(addr) => usize::from(addr.octets()[2]) << 8 | usize::from(addr.octets()[3]),
        IpAddr::V6(_) => 0,
    }
}

fn mix(x: u64) -> u64 {
    crate::engine::rng::mix(x)
}
