//! Tests of congestion marks on real sockets: data leave as ECT(0), a mark is answered by a
//! notification, and so is an overflow of the receive buffer [CC-5], [CC-6], [CC-9].

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_base::clock;
use bowline_roce::{Burst, Config, Congestion, Device as Core, IdentHint};
use bowline_verbs::{
    Access, AddressVector, Buffer, CqId, Device, MrKeys, Mtu, QpAttr, QpCap, QpInit, QpState,
    QpType, Qpn, Remote, SendFlags, SendOp, SendWr, Sge,
};

use crate::config::SoftConfig;
use crate::device::SoftDevice;
use crate::sys::Inbox;
use crate::udp::{Endpoint, ROCE_PORT};

const LEN: usize = 8 << 10;
const PATIENCE: Duration = Duration::from_secs(10);
const CNP: u8 = 0x81;
const ACK: u8 = 0x11;
/// Types of service: marks are not taken, are taken, and one is set.
const NOT_ECT: u8 = 0;
const ECT: u8 = 2;
const CE: u8 = 3;

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
struct World {
    device: SoftDevice,
    end: End,
    peer: Core,
    peer_end: End,
    socket: Endpoint,
    inbox: Inbox,
    burst: Burst,
    /// Opcode and type of service of what the device has sent.
    came: Vec<(u8, u8)>,
    /// Writes of the device that are done.
    device_done: usize,
}

impl World {
    fn new(net: u8, congestion: Congestion, socket_buffer: usize) -> Self {
        let [here, there] = [1, 2].map(|host| IpAddr::from([127, 77, net, host]));
        let core = Config { congestion, ..Config::default() };
        let addrs = vec![here];
        let config = SoftConfig { addrs, core, socket_buffer, ..SoftConfig::default() };
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
    fn peer_writes(&mut self, len: usize) {
        let (op, sges) = (SendOp::Write(self.end.remote()), [self.peer_end.sge(len)]);
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.peer.post_send(clock::now(), self.peer_end.qp, &[wr]).unwrap();
    }

    /// Posts a write of the device.
    fn device_writes(&mut self, len: usize) {
        let (op, sges) = (SendOp::Write(self.peer_end.remote()), [self.end.sge(len)]);
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.device.post_send(self.end.qp, &[wr]).unwrap();
    }

    /// Sends what the peer has to send with this type of service; its own without.
    fn send(&mut self, tos: Option<u8>) {
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
    fn receive(&mut self) {
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
    fn until(&mut self, tos: Option<u8>, mut so: impl FnMut(&mut Self) -> bool) {
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
    fn peer_is_done(&mut self, tos: Option<u8>) {
        let mut out = Vec::new();
        self.until(tos, |world| {
            world.peer.poll_cq(world.peer_end.cq, &mut out, 16).unwrap();
            !out.is_empty()
        });
        // A notification leaves before the acknowledgement of the same datagram.
        self.receive();
    }

    fn count(&self, opcode: u8) -> usize {
        self.came.iter().filter(|(of, _)| *of == opcode).count()
    }
}

/// tests [CC-6] [HDR-14]
#[test]
fn a_mark_is_answered_by_a_notification_and_nothing_else_is() {
    let mut world = World::new(40, Congestion::Delay, 1 << 20);
    for tos in [NOT_ECT, ECT] {
        world.peer_writes(LEN);
        world.peer_is_done(Some(tos));
        assert_eq!((world.count(CNP), world.device.counters().rx_marked), (0, 0), "{tos}");
    }
    let start = Instant::now();
    for _ in 0..100 {
        world.peer_writes(LEN);
        world.peer_is_done(Some(CE));
    }
    let intervals = start.elapsed().as_micros() as usize / 50;
    let (marked, notified) = (world.device.counters().rx_marked, world.count(CNP));
    eprintln!("{marked} marked, {notified} notifications in {intervals} times 50 us");
    assert!(marked >= 100 && notified >= 1 && notified <= intervals + 1);
    assert_eq!(world.device.counters().tx_cnp, notified as u64);
    assert!(world.came.iter().all(|(opcode, tos)| *opcode != CNP || *tos == NOT_ECT));
    // What the notification is for.
    assert_eq!(world.peer.paths().next().map(|path| path.cnps_received), Some(notified as u64));
    assert_eq!(world.device.paths()[0].cnps_sent, notified as u64);
}

/// tests [CC-5]
#[test]
fn data_leave_with_room_for_a_mark_and_acknowledgements_do_not() {
    for (net, congestion, data) in
        [(41, Congestion::Delay, ECT), (42, Congestion::Fixed(64), NOT_ECT)]
    {
        let mut world = World::new(net, congestion, 1 << 20);
        for len in [1, 1024, LEN] {
            world.device_writes(len);
            let done = world.device_done + 1;
            world.until(None, |world| world.device_done == done);
        }
        assert!(world.came.len() >= 10, "{:?}", world.came);
        assert!(world.came.iter().all(|(_, tos)| *tos == data), "{:?}", world.came);
        world.came.clear();
        for _ in 0..50 {
            world.peer_writes(LEN);
            world.peer_is_done(None);
        }
        assert!(world.count(ACK) >= 50);
        assert!(world.came.iter().all(|(_, tos)| *tos == NOT_ECT), "{:?}", world.came);
    }
}

/// tests [CC-9]
#[test]
fn an_overflow_is_counted_and_told_to_peers_that_take_marks() {
    for (net, tos) in [(43, NOT_ECT), (44, ECT)] {
        let mut world = World::new(net, Congestion::Delay, 4096);
        world.peer_writes(1024);
        assert!(world.peer.poll_transmit(clock::now(), &mut world.burst));
        let (packet, to) = (world.burst.bytes.clone(), world.burst.to);
        let start = Instant::now();
        let told = |world: &World| {
            let lost = world.device.stats().receive_overflows > 0;
            lost && (tos == NOT_ECT || world.device.counters().tx_cnp > 0)
        };
        // The same datagram again and again is answered by acknowledgements.
        while !told(&world) {
            for _ in 0..100 {
                world.socket.send(to, tos, packet.len(), &packet).unwrap();
            }
            world.receive();
            assert!(start.elapsed() < PATIENCE, "{:?}", world.device.stats());
        }
        world.peer_is_done(Some(tos));
        world.until(Some(tos), |w| w.count(CNP) as u64 == w.device.counters().tx_cnp);
        let (marked, notified) = (world.device.counters().rx_marked, world.count(CNP));
        eprintln!("{:?}, {notified} notifications", world.device.stats());
        assert_eq!((marked > 0, notified > 0), (tos == ECT, tos == ECT), "type of service {tos}");
    }
}
