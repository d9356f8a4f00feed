//! A device on real sockets, and a peer that is a core alone, whose datagrams the test sends.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_base::clock;
use bowline_roce::{Burst, Config, Device as Core, IdentHint};
use bowline_verbs::{
    Access, AddressVector, Buffer, CqId, Device, MrKeys, Mtu, QpAttr, QpCap, QpInit, QpState,
    QpType, Qpn, Remote, SendFlags, SendOp, SendWr, Sge,
};

use crate::config::SoftConfig;
use crate::device::SoftDevice;
use crate::sys::Inbox;
use crate::udp::{Endpoint, ROCE_PORT};

pub(super) const LEN: usize = 8 << 10;
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
pub(super) const ACK: u8 = 0x11;

/// A queue pair with memory, on either side.
#[derive(Clone, Debug)]
struct End {
    qp: Qpn,
    cq: CqId,
    buffer: Arc<Buffer>,
    keys: MrKeys,
}

impl End {
    fn remote(&self) -> Remote {
        Remote { addr: self.buffer.addr(), rkey: self.keys.rkey }
    }

    fn sge(&self, len: usize) -> Sge {
        Sge { addr: self.buffer.addr(), len: len as u32, lkey: self.keys.lkey }
    }
}

fn init(pd: bowline_verbs::PdId, cq: CqId) -> QpInit {
    let cap = QpCap { max_send_wr: 256, ..QpCap::default() };
    QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type: QpType::Rc, cap, sq_sig_all: false }
}

/// The steps that make a queue pair ready for a peer.
fn steps(local: IpAddr, remote: IpAddr, peer: Qpn) -> [QpAttr; 3] {
    let av = AddressVector { local, remote, flow_label: 0, tos: 0 };
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    [
        QpAttr { state: Some(QpState::Init), access: Some(access), ..QpAttr::default() },
        QpAttr {
            state: Some(QpState::Rtr),
            av: Some(av),
            path_mtu: Some(Mtu::M1024),
            dest_qpn: Some(peer),
            rq_psn: Some(7),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(1),
            ..QpAttr::default()
        },
        QpAttr {
            state: Some(QpState::Rts),
            timeout: Some(17),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            sq_psn: Some(7),
            max_rd_atomic: Some(1),
            ..QpAttr::default()
        },
    ]
}

/// A device, and a peer whose datagrams have the type of service that the test wants.
pub(super) struct World {
    pub(super) device: SoftDevice,
    end: End,
    pub(super) peer: Core,
    peer_end: End,
    pub(super) socket: Endpoint,
    inbox: Inbox,
    pub(super) burst: Burst,
    /// Opcode and type of service of what the device has sent.
    pub(super) came: Vec<(u8, u8)>,
    /// Writes of the device that are done.
    pub(super) device_done: usize,
}

impl World {
    /// Opens the device with these settings, but its address.
    pub(super) fn new(net: u8, config: SoftConfig) -> Self {
        let [here, there] = [1, 2].map(|host| IpAddr::from([127, 77, net, host]));
        let config = SoftConfig { addrs: vec![here], ..config };
        let device = SoftDevice::open(config).unwrap();
        // Each packet is a burst, so that its identification is 0.
        let (addrs, source_port) = (vec![there], Some(ROCE_PORT));
        let config =
            Config { addrs, source_port, gso: false, mtu: Mtu::M1024, ..Config::default() };
        let mut peer = Core::new(config, [9; 32]);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;

        let buffer = Arc::new(Buffer::new(LEN).unwrap());
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
        let keys = device.reg_mr(pd, &buffer, 0, LEN, None, access).unwrap();
        let end = End { qp: device.create_qp(&init(pd, cq)).unwrap(), cq, buffer, keys };

        let buffer = Arc::new(Buffer::new(LEN).unwrap());
        let (pd, cq) = (peer.alloc_pd().unwrap(), peer.create_cq(256).unwrap());
        let keys = peer.reg_mr(pd, &buffer, 0, LEN, None, access).unwrap();
        let peer_end = End { qp: peer.create_qp(&init(pd, cq)).unwrap(), cq, buffer, keys };

        for step in steps(here, there, peer_end.qp) {
            device.modify_qp(end.qp, &step).unwrap();
        }
        for step in steps(there, here, end.qp) {
            peer.modify_qp(clock::now(), peer_end.qp, &step).unwrap();
        }
        let socket = Endpoint::open(there, None, 4 << 20).unwrap();
        let (inbox, burst, came) = (Inbox::new(), Burst::new(), Vec::new());
        Self { device, end, peer, peer_end, socket, inbox, burst, came, device_done: 0 }
    }

    /// Posts a write of the peer.
    pub(super) fn peer_writes(&mut self, len: usize) {
        let (op, sges) = (SendOp::Write(self.end.remote()), [self.peer_end.sge(len)]);
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.peer.post_send(clock::now(), self.peer_end.qp, &[wr]).unwrap();
    }

    /// Posts a write of the device.
    pub(super) fn device_writes(&mut self, len: usize) {
        let (op, sges) = (SendOp::Write(self.peer_end.remote()), [self.end.sge(len)]);
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.device.post_send(self.end.qp, &[wr]).unwrap();
    }

    /// Sends what the peer has to send with this type of service; its own without.
    pub(super) fn send(&mut self, tos: Option<u8>) {
        let now = clock::now();
        if self.peer.poll_timeout().is_some_and(|at| at <= now) {
            self.peer.handle_timeout(now);
        }
        while self.peer.poll_transmit(now, &mut self.burst) {
            let Burst { to, segment, bytes, .. } = &self.burst;
            self.socket.send(*to, tos.unwrap_or(self.burst.tos), *segment, bytes).unwrap();
        }
    }

    /// Gives the peer what has come.
    pub(super) fn receive(&mut self) {
        let Ok(_) = self.socket.receive_one(&mut self.inbox) else { return };
        let to = self.socket.at().ip();
        for (arrival, bytes) in self.inbox.arrivals().flatten() {
            let segment = arrival.segment.unwrap_or(bytes.len());
            for (k, packet) in (0..).zip(bytes.chunks(segment)) {
                self.came.push((packet[0], arrival.tos));
                let ident = IdentHint::Exact(k);
                self.peer.handle_datagram(clock::now(), arrival.from, to, ident, packet);
            }
        }
    }

    /// Goes on until something is so.
    pub(super) fn until(&mut self, tos: Option<u8>, mut so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        let mut out = Vec::new();
        while !so(self) {
            self.send(tos);
            self.receive();
            self.device_done += self.device.poll_cq(self.end.cq, &mut out, 16).unwrap();
            assert!(start.elapsed() < PATIENCE, "{:?} {:?}", self.came, self.device.counters());
        }
    }

    /// Goes on until the peer's write is done.
    pub(super) fn peer_is_done(&mut self, tos: Option<u8>) {
        let mut out = Vec::new();
        self.until(tos, |world| {
            world.peer.poll_cq(world.peer_end.cq, &mut out, 16).unwrap();
            !out.is_empty()
        });
        // A notification leaves before the acknowledgement of the same datagram.
        self.receive();
    }

    pub(super) fn count(&self, opcode: u8) -> usize {
        self.came.iter().filter(|(of, _)| *of == opcode).count()
    }

    /// Polls the device for a while, so that its background thread leaves the network to this one.
    pub(super) fn poll(&mut self, time: Duration) {
        let (start, mut out) = (Instant::now(), Vec::new());
        while start.elapsed() < time {
            self.device_done += self.device.poll_cq(self.end.cq, &mut out, 16).unwrap();
        }
    }
}
