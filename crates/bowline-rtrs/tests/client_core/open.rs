//! Opening and closing.

use std::time::Duration;

use bowline_rtrs::client::{ClientConfig, Event, PathState, PermitKind};
use bowline_rtrs::{Errno, Input};
use bowline_verbs::RejectReason;
use bowline_wire::rtrs::{ConAnswer, Geometry};

use crate::peer::{CHUNK, Connects, Rig, Written, addr, config};

// tests [RT-18], [RT-33], [RT-34], [RT-35], [RS-24]
#[test]
fn connections_are_made_one_after_the_other() {
    for refresh in [false, true] {
        let mut rig = Rig::new(config(), refresh);
        assert!(rig.session.geometry().is_none());
        rig.session.open(rig.now, &[addr(1), addr(2)]);
        rig.pump();
        assert!(rig.take_events().contains(&Event::Opened(Ok(()))));
        let made: Vec<_> = rig.conns.values().map(|c| (c.req.cid, c.req.path.0[0])).collect();
        assert_eq!(made, [(0, 1), (1, 1), (0, 2), (1, 2)]);
        let first: Vec<_> = rig.conns.values().map(|c| c.req.first).collect();
        assert_eq!(first, [true, true, false, true], "bit of the first connection");
        for conn in rig.conns.values() {
            assert_eq!((conn.req.cid_num, conn.req.recon_cnt), (2, 1));
            assert_eq!(conn.local, addr(conn.req.path.0[0]).0.src, "one source port");
            assert_eq!(conn.remote.port(), 1234);
        }
        let attrs = rig.session.geometry().unwrap();
        assert_eq!((attrs.queue_depth, attrs.max_io), (63, CHUNK - 4096));
        assert_eq!(attrs.max_segments, 7);
        assert_eq!(rig.session.paths().filter(|p| p.state == PathState::Connected).count(), 2);
    }
}

// tests [RT-25], [RT-74]: no message can arrive without a posted receive.
#[test]
fn receives_are_posted_before_the_server_may_send() {
    for refresh in [false, true] {
        let mut rig = Rig::new(config(), refresh);
        rig.answers_info = false;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        let recvs: Vec<_> = rig.conns.values().map(|c| c.recvs.len()).collect();
        assert!(recvs[0] >= 1024 && recvs[1] >= 64, "{recvs:?}");
        let info = rig.conns.values().next().unwrap().recvs[0];
        assert_eq!(info.mem.unwrap().len, 8 + 16 * 64);
        for conn in rig.conns.values() {
            for recv in conn.recvs.iter().filter(|recv| **recv != info) {
                assert_eq!(recv.mem.map(|mem| mem.len), refresh.then_some(8));
            }
        }
    }
}

// tests [RS-3], [RT-31]
#[test]
fn a_refusal_of_the_second_path_fails_all() {
    for (connects, errno) in [
        (Connects::Refuse(17), Errno::EEXIST),
        (Connects::Fail(Errno::EHOSTUNREACH), Errno::EHOSTUNREACH),
        (Connects::Ignore, Errno::ETIMEDOUT),
    ] {
        let mut rig = Rig::new(config(), true);
        rig.answers_info = false;
        rig.session.open(rig.now, &[addr(1), addr(2)]);
        rig.pump();
        // The second path begins when the first one is up.
        rig.connects = connects;
        let service = rig.live(1)[0];
        let rsp = rig.info_rsp(service.path);
        rig.give_message(service, &rsp, None);
        rig.pump();
        rig.pass(Duration::from_secs(31));
        assert!(rig.take_events().contains(&Event::Opened(Err(errno))), "{connects:?}");
        rig.assert_empty();
    }
}

// tests [RT-18], [RT-31]
#[test]
fn every_step_has_its_time() {
    for until in [0, 1] {
        let mut rig = Rig::new(config(), true);
        rig.connects = Connects::Until(until);
        rig.answers_info = false;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        rig.pass(Duration::from_millis(29_999));
        assert_eq!(rig.take_events(), []);
        rig.pass(Duration::from_secs(2));
        assert!(rig.take_events().contains(&Event::Opened(Err(Errno::ETIMEDOUT))));
        rig.assert_empty();
    }
}

// tests [RS-24]
#[test]
fn senseless_lists_of_paths_are_refused() {
    let many: Vec<_> = (0..129).map(addr).collect();
    for (paths, errno) in
        [(vec![], Errno::EINVAL), (many, Errno::EINVAL), (vec![addr(1), addr(1)], Errno::EEXIST)]
    {
        let mut rig = Rig::new(config(), true);
        rig.session.open(rig.now, &paths);
        rig.pump();
        assert_eq!(rig.take_events(), [Event::Opened(Err(errno))]);
        rig.assert_empty();
    }
}

// tests [RT-32], [RT-30]
#[test]
fn another_depth_on_the_second_path_is_refused() {
    let mut rig = Rig::opened(false, 1);
    rig.geometry = Geometry::of_chunk(32, CHUNK, 4096).unwrap();
    rig.session.add_path(rig.now, addr(2).0, addr(2).1).unwrap();
    rig.pump();
    let failed = |e: &Event| matches!(e, Event::PathAdded { result: Err(Errno::ECONNRESET), .. });
    assert!(rig.take_events().iter().any(failed));
    assert_eq!(rig.session.paths().count(), 1);
}

// tests [RS-25]
#[test]
fn a_close_waits_for_permits_and_requests() {
    let mut rig = Rig::opened(true, 2);
    let memory = rig.memory();
    let (busy, mut idle) = (rig.permit(), rig.permit());
    rig.write(&busy, memory, 1).unwrap();
    assert!(!rig.session.is_gone());
    rig.session.close(rig.now);
    rig.pump();
    // The answer comes in time.
    assert_eq!(rig.take_completed(), []);
    assert_eq!(rig.write(&idle, memory, 2), Err(Errno::ECONNABORTED));
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0)]);
    assert!(rig.session.get_permit(PermitKind::Io, 0).is_none());
    assert!(rig.session.is_gone());
    rig.assert_empty();
    rig.session.put_permit(busy);
    rig.pump();
    assert!(!rig.take_events().contains(&Event::Closed));
    rig.session.put_permit(idle.take());
    // Permits of the closed session are refused.
    assert_eq!(rig.write(&idle, memory, 3), Err(Errno::EINVAL));
    rig.session.put_permit(idle);
    rig.pump();
    assert_eq!(rig.take_events().last(), Some(&Event::Closed));
    rig.assert_empty();
}

// tests [RS-25], [RT-92]
#[test]
fn a_close_ends_though_the_server_is_silent() {
    let mut rig = Rig::opened(false, 2);
    let Written { permit, .. } = rig.write_one(1);
    rig.parts = false;
    rig.session.put_permit(permit);
    rig.session.close(rig.now);
    rig.pump();
    rig.pass(Duration::from_millis(2_500));
    assert_eq!(rig.take_completed(), [(1, -103)]);
    assert_eq!(rig.take_events().last(), Some(&Event::Closed));
    rig.assert_empty();
}

// tests [RT-24], [RT-37], [RT-76], [RS-31]
#[test]
fn poll_connections_come_after_those_for_io() {
    let settings = ClientConfig { io_connections: 2, poll_connections: 2, ..config() };
    let mut rig = Rig::opened_with(settings, true, 1);
    let conns = rig.live(1);
    assert_eq!(conns.iter().map(|conn| conn.cid).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(conns.iter().all(|conn| rig.conns[conn].req.cid_num == 5));
    let memory = rig.memory();
    let cids = |rig: &mut Rig, kind| -> Vec<u16> {
        for cpu in 0..5 {
            let permit = rig.session.get_permit(kind, cpu).unwrap();
            rig.write(&permit, memory, 1).unwrap();
            rig.session.put_permit(permit);
        }
        let cids = rig.ios.iter().map(|io| io.conn.cid).collect();
        rig.reply_all();
        cids
    };
    assert_eq!(cids(&mut rig, PermitKind::Service), [0; 5]);
    assert_eq!(cids(&mut rig, PermitKind::Io), [1, 2, 1, 2, 1]);
    assert_eq!(cids(&mut rig, PermitKind::Polled), [3, 4, 3, 4, 3]);
    // Without poll connections, such permits use the other connections.
    let mut rig = Rig::opened_with(ClientConfig { io_connections: 2, ..config() }, true, 1);
    let memory = rig.memory();
    let permit = rig.session.get_permit(PermitKind::Polled, 1).unwrap();
    rig.write(&permit, memory, 1).unwrap();
    assert_eq!(rig.ios[0].conn.cid, 2);
}

// tests [RT-24], [RT-28]
#[test]
fn more_connections_than_a_path_may_have_are_refused() {
    for (io, polled, errno) in [
        (u16::MAX, u16::MAX, Some(Errno::EINVAL)),
        (4095, 1, Some(Errno::EINVAL)),
        (4000, 95, None),
    ] {
        let settings = ClientConfig { io_connections: io, poll_connections: polled, ..config() };
        let mut rig = Rig::new(settings, false);
        rig.connects = Connects::Ignore;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        let opened = rig.take_events().into_iter().find(|e| matches!(e, Event::Opened(_)));
        assert_eq!(opened, errno.map(|errno| Event::Opened(Err(errno))), "{io} and {polled}");
    }
}

// tests [RT-31]: the program gets one errno; the reason of the path tells them apart.
#[test]
fn refusals_are_told_apart() {
    let no_more = ConAnswer::Refused(104).emit().to_vec();
    let mut magic = no_more.clone();
    magic[1] ^= 1;
    let mut version = no_more.clone();
    version[3] = 9;
    let by_program = RejectReason::CONSUMER;
    for (reason, private, said) in [
        (RejectReason(3), vec![], "no resources (3)"),
        (RejectReason(8), vec![], "nobody listens at this port (8)"),
        (RejectReason(10), no_more.clone(), "stale connection"),
        (RejectReason(26), vec![], "invalid path MTU (26)"),
        (by_program, no_more, "the server says"),
        (by_program, magic, "with magic"),
        (by_program, version, "of version 0x09"),
        (by_program, vec![0; 20], "of 20 bytes"),
    ] {
        let mut rig = Rig::new(config(), true);
        rig.connects = Connects::Ignore;
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        assert_eq!(rig.session.refusal(), None);
        let conn = rig.live(1)[0];
        rig.session.handle(rig.now, Input::Refused { conn, reason, private });
        rig.pump();
        let failed = Event::Opened(Err(Errno::ECONNRESET));
        assert!(rig.take_events().contains(&failed), "{said}");
        let told = rig.session.refusal().unwrap().to_string();
        assert!(told.contains(said), "{told}");
    }
}
