//! Two devices, each with one queue pair connected to the other's, and the wire.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_roce::{Burst, Config, Device, Event, IdentHint, Instant};
use bowline_verbs::{
    Access, AddressVector, Buffer, Completion, CqId, Mtu, PdId, Piece, QpAttr, QpCap, QpInit,
    QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};

/// Every right of memory that has an address.
pub(crate) const EVERY: Access = Access::all().difference(Access::ZERO_BASED);

/// What may differ between two runs.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) mtu: Mtu,
    pub(crate) psn: u32,
    pub(crate) reads: u8,
    pub(crate) rnr_timer: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) gso: bool,
    pub(crate) access: Access,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::M256,
            psn: 0xff_fff8,
            reads: 2,
            rnr_timer: 12,
            rnr_retry: 7,
            gso: true,
            access: Access::all(),
        }
    }
}

/// Memory with a key.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) va: u64,
    pub(crate) key: u32,
}

impl Region {
    pub(crate) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.va + offset as u64, len: len as u32, lkey: self.key }
    }

    pub(crate) fn remote(&self, offset: u64) -> Remote {
        Remote { addr: self.va + offset, rkey: self.key }
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        self.buffer.append_to(offset, len, &mut out);
        out
    }

    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }
}

/// One end.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) addr: IpAddr,
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    pub(crate) qp: Qpn,
    pub(crate) done: Vec<Completion>,
}

impl End {
    fn new(addr: IpAddr, seed: u8, setup: &Setup) -> Self {
        let mut device = Device::new(Config {
            guid: u64::from(seed),
            addrs: vec![addr],
            seed: [seed; 32],
            gso: setup.gso,
            ..Config::default()
        });
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(10_000).unwrap();
        let cap = QpCap { max_send_wr: 1000, max_recv_wr: 1000, ..QpCap::default() };
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, qp_type: QpType::Rc, cap, sq_sig_all: true };
        let qp = device.create_qp(&init).unwrap();
        Self { device, addr, pd, cq, qp, done: Vec::new() }
    }

    fn connect(&mut self, now: Instant, peer: IpAddr, dest: Qpn, setup: &Setup) {
        let state = |state| QpAttr { state: Some(state), ..QpAttr::default() };
        let init = QpAttr { access: Some(setup.access), ..state(QpState::Init) };
        let av = AddressVector { local: self.addr, remote: peer, flow_label: 0, tos: 0 };
        let rtr = QpAttr {
            av: Some(av),
            path_mtu: Some(setup.mtu),
            dest_qpn: Some(dest),
            rq_psn: Some(setup.psn),
            max_dest_rd_atomic: Some(setup.reads),
            min_rnr_timer: Some(setup.rnr_timer),
            ..state(QpState::Rtr)
        };
        let rts = QpAttr {
            sq_psn: Some(setup.psn),
            max_rd_atomic: Some(setup.reads),
            timeout: Some(17),
            retry_cnt: Some(7),
            rnr_retry: Some(setup.rnr_retry),
            ..state(QpState::Rts)
        };
        for attr in [init, rtr, rts] {
            self.device.modify_qp(now, self.qp, &attr).unwrap();
        }
    }

    pub(crate) fn state(&self) -> QpState {
        self.device.query_qp(self.qp).unwrap().0
    }

    /// Registers a buffer of its own.
    pub(crate) fn region(&mut self, len: usize, access: Access) -> Region {
        let buffer = Arc::new(Buffer::new(len.max(1)).unwrap());
        let va = 0x1_0000;
        let keys = self.device.reg_mr(self.pd, &buffer, 0, len.max(1), Some(va), access).unwrap();
        Region { buffer, va, key: keys.rkey }
    }

    /// The same with bytes in it.
    pub(crate) fn filled(&mut self, bytes: &[u8], access: Access) -> Region {
        let region = self.region(bytes.len(), access);
        region.buffer.write(0, bytes);
        region
    }

    /// Ids and statuses of completions since the last call; receives have their ids as posted.
    pub(crate) fn statuses(&mut self) -> Vec<(u64, Status)> {
        self.done.drain(..).map(|done| (done.wr_id, done.status)).collect()
    }
}

/// What the wire does to the n-th packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Deliver,
    Drop,
    Twice,
    /// Comes after so many others.
    Late(usize),
}

#[derive(Debug)]
struct Flying {
    from: SocketAddr,
    to: IpAddr,
    ident: u16,
    bytes: Vec<u8>,
}

/// Both ends and the wire.
pub(crate) struct World {
    pub(crate) now: Instant,
    pub(crate) a: End,
    pub(crate) b: End,
    /// Packets sent so far.
    pub(crate) sent: usize,
    /// What happens to each of them.
    pub(crate) fault: Box<dyn FnMut(usize) -> Fault>,
    /// Key of the memory that B receives into, for whom it concerns.
    pub(crate) receive_key: u32,
    wire: VecDeque<Flying>,
    late: Vec<(usize, Flying)>,
}

impl World {
    pub(crate) fn new(setup: &Setup) -> Self {
        let (from, to) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let now = Instant::from_nanos(1_000_000_000);
        let (mut a, mut b) = (End::new(from, 1, setup), End::new(to, 2, setup));
        a.connect(now, to, b.qp, setup);
        b.connect(now, from, a.qp, setup);
        let fault = Box::new(|_| Fault::Deliver);
        let (wire, late) = (VecDeque::new(), Vec::new());
        Self { now, a, b, sent: 0, fault, receive_key: 0, wire, late }
    }

    pub(crate) fn send(&mut self, id: u64, op: SendOp, sges: &[Sge]) {
        self.send_flags(id, op, sges, SendFlags::empty());
    }

    pub(crate) fn send_flags(&mut self, id: u64, op: SendOp, sges: &[Sge], flags: SendFlags) {
        let wr = SendWr { id, op, sges, inline: &[], flags };
        self.a.device.post_send(self.now, self.a.qp, &[wr]).unwrap();
    }

    /// Posts a receive at B.
    pub(crate) fn recv(&mut self, id: u64, sges: &[Sge]) {
        self.b.device.post_recv(self.now, self.b.qp, &[RecvWr { id, sges }]).unwrap();
    }

    /// Makes a region of fast registration valid at A, in the order of its queue.
    pub(crate) fn bind(&mut self, id: u64, key: u32, region: &Region, len: usize) {
        let piece = Piece { buffer: Arc::clone(&region.buffer), offset: 0, len };
        let op = SendOp::RegMr { key, pieces: vec![piece], iova: 0, access: EVERY };
        self.send(id, op, &[]);
    }

    /// Sends everything that can be sent, and delivers it, until both ends are quiet.
    pub(crate) fn settle(&mut self) {
        let mut burst = Burst::new();
        loop {
            for end in [&mut self.a, &mut self.b] {
                while end.device.poll_transmit(self.now, &mut burst) {
                    for (ident, bytes) in burst.segments().enumerate() {
                        let from = SocketAddr::new(burst.from, burst.source_port);
                        let flying = || Flying {
                            from,
                            to: burst.to,
                            ident: ident as u16,
                            bytes: bytes.to_vec(),
                        };
                        match (self.fault)(self.sent) {
                            Fault::Deliver => self.wire.push_back(flying()),
                            Fault::Drop => {}
                            Fault::Twice => self.wire.extend([flying(), flying()]),
                            Fault::Late(by) => self.late.push((self.sent + by, flying())),
                        }
                        self.sent += 1;
                    }
                }
                while let Some(event) = end.device.poll_event() {
                    assert!(!matches!(event, Event::Cm(_)));
                }
                end.device.poll_cq(end.cq, &mut end.done, usize::MAX).unwrap();
            }
            let sent = self.sent;
            let due = self.late.extract_if(.., |(at, _)| *at <= sent);
            self.wire.extend(due.map(|(_, flying)| flying));
            if self.wire.is_empty() {
                return;
            }
            for Flying { from, to, ident, bytes } in self.wire.drain(..) {
                let end = if to == self.a.addr { &mut self.a } else { &mut self.b };
                let ident = IdentHint::Exact(ident);
                end.device.handle_datagram(self.now, from, to, ident, &bytes);
            }
        }
    }

    /// Lets time pass to the next timer, at most to `until`; tells whether there was one.
    fn step(&mut self, until: Instant) -> bool {
        let timers = [self.a.device.poll_timeout(), self.b.device.poll_timeout()];
        match timers.into_iter().flatten().min() {
            Some(at) if at <= until => {
                self.now = self.now.max(at);
                self.a.device.handle_timeout(self.now);
                self.b.device.handle_timeout(self.now);
                self.settle();
                true
            }
            _ => {
                self.now = until;
                false
            }
        }
    }

    /// Lets time pass.
    pub(crate) fn run(&mut self, time: Duration) {
        let until = self.now + time;
        self.settle();
        while self.step(until) {}
    }

    /// Lets time pass until A has as many completions as that, at most 30 s.
    pub(crate) fn run_until(&mut self, done: usize) {
        let until = self.now + Duration::from_secs(30);
        self.settle();
        while self.a.done.len() < done && self.step(until) {}
    }
}

/// Bytes that differ from each other, and for each `salt`.
pub(crate) fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + salt * 31 + 1) as u8).collect()
}
