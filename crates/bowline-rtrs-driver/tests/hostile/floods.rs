//! Floods: what a client can make the server hold and do is bounded [RT-66].

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use bowline_rtrs_driver::server::{ServerConfig, ServerLimits};
use bowline_rtrs_driver::{HbConfig, PORT};
use bowline_testkit::cm;
use bowline_verbs::{Device, Remote, SendFlags, SendOp, SendWr, Status};
use bowline_wire::roce::cm::{CmMad, CmMessage, Req};
use bowline_wire::roce::{Bth, Deth, GSI_QKEY, GSI_QPN, Opcode, Outer, Packet, UDP_PORT};
use bowline_wire::rtrs::{Imm, write_hdr};

use crate::common::{at, eventually, ip, write_and_read};
use crate::raw::{Conn, Ids, Outcome, Raw, raw};
use crate::scene::{DEPTH, ELSEWHERE, Scene, config};

const ENOMEM: u16 = 12;

/// Bytes of this process that are in memory: for scenes that are [measured](Scene::measured).
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

fn refused(raw: &mut Raw, scene: &Scene, cid_num: u16) -> Option<u16> {
    let ids = Ids::new();
    match raw.connect(scene.to(), ids.port, &ids.request(0, cid_num).emit()) {
        Outcome::Refused(errno) => Some(errno),
        Outcome::Accepted(..) => None,
    }
}

// tests [RT-66]: paths that are begun and never completed
#[test]
fn paths_half_made_are_few_and_end() {
    assert_eq!(ServerLimits::default().establish, Duration::from_secs(30));
    let limits = ServerLimits {
        sessions: 8,
        sessions_per_address: 4,
        connections: 40,
        connections_per_address: 20,
        establish: Duration::from_millis(1500),
        ..ServerLimits::default()
    };
    let mut scene = Scene::new(82, ServerConfig { limits, ..config(true) });
    let to = scene.to();
    let before = scene.counters();
    let mut raw = raw(ip(82, 67));
    assert_eq!(refused(&mut raw, &scene, 21), Some(ENOMEM), "connections of an address");
    let mut begun = Vec::new();
    for n in 0..10 {
        let ids = Ids::new();
        match raw.connect(to, ids.port, &ids.request(0, 4).emit()) {
            Outcome::Accepted(conn, _) => begun.push(conn),
            Outcome::Refused(errno) => assert_eq!((n >= 4, errno), (true, ENOMEM)),
        }
    }
    assert_eq!(begun.len(), 4, "sessions of an address");
    // Another client finds room meanwhile.
    let path = scene.raw.path(to, &Ids::new(), 2, "other");
    scene.works(&path, path.conns[1], "a request in the flood");
    scene.raw.leave(&path.conns);
    for conn in &begun {
        assert!(raw.is_dropped(*conn), "a path that is never finished");
    }
    raw.leave(&begun);
    scene.alone("they end");
    let after = scene.counters();
    assert_eq!(after.refused - before.refused, 7);
    assert_eq!(after.paths_closed - before.paths_closed, 5);
    assert_eq!(after.paths_violated, before.paths_violated);
    scene.check("a flood of paths half made");
    // Its share is free again.
    let path = raw.path(to, &Ids::new(), 2, "again");
    raw.leave(&path.conns);

    // Clients that send a connection request and nothing else: nothing confirms that they exist.
    for _ in 0..3 {
        let ids = Ids::new();
        raw.ask(to, ids.port, &ids.request(0, 4).emit());
    }
    raw.dev.cut(raw.ip, None, true);
    eventually("the silent ones are forgotten", || {
        scene.server.sessions().len() == 1 && scene.counters().paths_closed > after.paths_closed
    });
    scene.check("a flood of the silent");
    scene.finish();
}

/// Sends many immediates without data.
fn flood(raw: &mut Raw, conn: Conn, imm: u32, count: usize) {
    const TOGETHER: usize = 256;
    let op = || SendOp::WriteImm(Remote::default(), imm);
    for sent in (0..count).step_by(TOGETHER) {
        let some = TOGETHER.min(count - sent);
        let wr = |n| {
            let flags = if n + 1 == some { SendFlags::SIGNALED } else { SendFlags::empty() };
            SendWr { id: 9, op: op(), sges: &[], inline: &[], flags }
        };
        let wrs: Vec<_> = (0..some).map(wr).collect();
        raw.dev.post_send(conn.qp, &wrs).unwrap();
        assert_eq!(raw.sent(9), Status::Success);
    }
}

// tests [RT-62], [RT-66]: heartbeats whose answers the client does not receive
#[test]
fn a_flood_of_heartbeats_is_answered_as_far_as_it_is_taken() {
    const COUNT: usize = 60_000;
    let mut scene = Scene::measured(83, config(true));
    let path = scene.raw.path(scene.to(), &Ids::new(), 2, "hostile");
    let before = scene.counters();
    flood(&mut scene.raw, path.conns[0], Imm::HbMsg.to_u32(), COUNT / 3);
    let resident_then = resident();
    flood(&mut scene.raw, path.conns[0], Imm::HbMsg.to_u32(), COUNT / 3);
    // Others are served meanwhile.
    let mut other = raw(ip(83, 67));
    let theirs = other.path(scene.to(), &Ids::new(), 2, "other");
    scene.guard.serves(&mut other, &theirs, theirs.conns[1], "a request in the flood");
    other.leave(&theirs.conns);
    flood(&mut scene.raw, path.conns[0], Imm::HbMsg.to_u32(), COUNT / 3);
    let after = scene.counters();
    let answered = after.heartbeats_answered - before.heartbeats_answered;
    let dropped = after.heartbeats_dropped - before.heartbeats_dropped;
    assert_eq!(answered + dropped, COUNT as u64);
    assert!(answered < 2000, "{answered} answers are kept for it");
    let grown = resident().saturating_sub(resident_then);
    assert!(grown < 8 << 20, "{grown} bytes more");
    scene.raw.leave(&path.conns);
    scene.settles("a flood of heartbeats");

    // Immediates of unknown kinds have no effect, and are counted.
    let path = scene.raw.path(scene.to(), &Ids::new(), 2, "hostile");
    let before = scene.counters();
    flood(&mut scene.raw, path.conns[1], 0x3000_0000, COUNT / 3);
    let ignored = scene.counters().immediates_ignored - before.immediates_ignored;
    assert_eq!(ignored, COUNT as u64 / 3);
    scene.raw.leave(&path.conns);
    scene.ends("a flood of the unknown");
}

// tests [RT-53], [RT-67] 3: requests whose answers the client does not receive
#[test]
fn a_client_that_takes_no_answers_gets_no_more_of_them() {
    for (net, always_invalidate) in [(84, true), (85, false)] {
        let mut scene = Scene::measured(net, config(always_invalidate));
        let path = scene.raw.path(scene.to(), &Ids::new(), 2, "hostile");
        let (served, resident_then) = (scene.served(), resident());
        let before = scene.counters();
        let bytes = [at(ELSEWHERE).to_vec(), write_hdr(8).to_vec()].concat();
        let mut refused = false;
        for n in 0..400 {
            scene.raw.request(&path, path.conns[1], n % DEPTH, 8, &bytes);
            if scene.raw.sent(4) != Status::Success {
                refused = true;
                break;
            }
        }
        // With refresh each key is good once, and the next one is in an answer; without, answers
        // wait until the send queue is full, and from then on chunks are in use.
        assert!(refused, "it goes on for ever");
        assert!(scene.raw.is_dropped(path.conns[0]));
        let most = if always_invalidate { DEPTH } else { 5 * DEPTH };
        let served = scene.served() - served;
        assert!((u64::from(DEPTH)..=most.into()).contains(&served), "{served} served");
        let grown = resident().saturating_sub(resident_then);
        assert!(grown < 8 << 20, "{grown} bytes more");
        scene.raw.leave(&path.conns);
        scene.alone("it leaves");
        let violated = scene.counters().paths_violated - before.paths_violated;
        assert_eq!(violated, u64::from(!always_invalidate));
        scene.check("answers that are not taken");
        scene.finish();
    }
}

// tests [RT-60], [RS-6]: clients that fall silent, with and without requests in flight
#[test]
fn clients_that_vanish_are_forgotten() {
    let heartbeat = HbConfig {
        interval: Duration::from_millis(200),
        missed_max: 3,
        fast_path_detection: true,
        probe_interval: Duration::from_millis(200),
        path_dead: Duration::from_secs(3),
    };
    let mut scene = Scene::new(86, ServerConfig { heartbeat, ..config(true) });
    let to = scene.to();
    // The client does not even receive the answer to its INFO_REQ.
    let (conns, _) = scene.raw.conns(to, &Ids::new(), 2);
    let name = bowline_wire::rtrs::SessionName::new("deaf").unwrap();
    scene.raw.send(conns[0], 2, &bowline_wire::rtrs::emit_info_req(&name));
    assert!(scene.raw.is_dropped(conns[0]), "a deaf client");
    scene.raw.leave(&conns);
    scene.alone("a deaf client");
    // The client answers no heartbeat, though its device works.
    let path = scene.raw.path(to, &Ids::new(), 2, "dumb");
    scene.raw.post_recvs(path.conns[0], 1000);
    assert!(scene.raw.is_dropped(path.conns[0]), "a client that answers no heartbeat");
    scene.raw.leave(&path.conns);
    scene.alone("a client that answers no heartbeat");
    // Its host has vanished.
    let path = scene.raw.path(to, &Ids::new(), 2, "gone");
    scene.works(&path, path.conns[1], "a request");
    scene.raw.dev.cut(scene.raw.ip, None, true);
    let start = Instant::now();
    scene.alone("a client whose host is gone");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    assert_eq!(scene.session().paths.len(), 1);
    write_and_read(&scene.victim, 0, 4096);
    scene.finish();
}

/// Returns a datagram with a connection request, as if a client at `from` wanted a session of its
/// own.
fn forged(from: SocketAddr, to: SocketAddr) -> Vec<u8> {
    let number = u32::from_be_bytes(match from.ip() {
        IpAddr::V4(ip) => ip.octets(),
        IpAddr::V6(_) => unreachable!("of IPv4"),
    });
    let asked = Ids::new().request(0, 4096).emit();
    let req = cm::request(from, to, &asked);
    let req = Req { local_id: number, guid: u64::from(number), qpn: 0x100, ..req };
    let mad = CmMad { transaction: 1, message: CmMessage::Req(req) }.emit();
    let bth = Bth { dest_qpn: GSI_QPN, ..Bth::default() };
    let deth = Some(Deth { qkey: GSI_QKEY, source_qpn: GSI_QPN });
    let mut bytes = Vec::new();
    Packet { deth, payload: &mad, ..Packet::new(Opcode::UdSendOnly, bth) }.emit(&mut bytes);
    let outer = Outer { from: from.ip(), to: to.ip(), source_port: from.port() };
    outer.append_icrc(0, &mut bytes, 0);
    bytes
}

// tests [RT-66] [CM-57]: requests from unused addresses, twice as many as there can be sessions
#[test]
fn forged_requests_keep_nobody_out() {
    let mut scene = Scene::measured(87, config(true));
    let (to, before) = (scene.to(), scene.counters());
    let resident_then = resident();
    let count = 2 * ServerLimits::default().sessions as u64;
    for n in 0..count {
        let [.., high, low] = n.to_be_bytes();
        let socket = UdpSocket::bind((IpAddr::from([127, 42, high, low]), 0)).unwrap();
        let datagram = forged(socket.local_addr().unwrap(), SocketAddr::new(to, PORT));
        let there = SocketAddr::new(to, UDP_PORT);
        socket.send_to(&datagram, there).unwrap();
        // No more at a time than a listener keeps.
        if n % 32 == 31 {
            eventually("all are taken in", || scene.counters().accepted - before.accepted == n + 1);
        }
    }
    let counters = scene.counters();
    assert_eq!(counters.refused, before.refused);
    let strangers = ServerLimits::default().strangers as u64;
    assert_eq!(counters.paths_pushed_out - before.paths_pushed_out, count - strangers);
    let grown = resident().saturating_sub(resident_then);
    assert!(grown < 64 << 20, "{grown} bytes for {strangers} paths that are half made");
    println!("{grown} bytes for {strangers} paths that are half made");
    // A real client is accepted at once.
    let path = scene.raw.path(to, &Ids::new(), 2, "honest");
    scene.works(&path, path.conns[1], "a request in the flood");
    scene.raw.leave(&path.conns);
    scene.ends("forged requests");
}
