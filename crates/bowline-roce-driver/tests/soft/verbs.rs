//! All verbs between two devices of one process, over real sockets.

use crate::common;
use bowline_testkit::skipped;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, PORT, connect, ip, open};
use bowline_roce_driver::{FormerConnections, SoftConfig, SoftDevice};
use bowline_verbs::{
    CmEvent, Device, Error, Mtu, RejectReason, SendFlags, SendOp, SendWr, Status, WcOpcode,
};

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ salt).collect()
}

#[test]
fn messages_writes_reads_and_atomics_arrive() {
    let (a, b) = (open(ip(1, 1)), open(ip(1, 2)));
    let (a, b) = connect(&a, &b, 4 << 20);

    for (n, len) in [0, 1, 64, 4095, 4096, 4097, 70_000].into_iter().enumerate() {
        let bytes = pattern(len, n as u8);
        a.buffer.write(0, &bytes);
        b.post_recv(7, 0, 1 << 20);
        a.post(1, SendOp::SendImm(0x0102_0304), 0, len);
        let got = b.done(7);
        assert_eq!((got.opcode, got.byte_len), (WcOpcode::Recv, len as u32));
        assert_eq!(got.imm, Some(0x0102_0304));
        let mut read = vec![0; len];
        b.buffer.read(0, &mut read);
        assert!(read == bytes, "{len} bytes");
        assert_eq!(a.done(1).opcode, WcOpcode::Send);
    }

    let bytes = pattern(1 << 20, 77);
    a.buffer.write(0, &bytes);
    a.post(2, SendOp::Write(b.remote(1 << 20)), 0, 1 << 20);
    assert_eq!(a.done(2).opcode, WcOpcode::RdmaWrite);
    let mut read = vec![0; 1 << 20];
    b.buffer.read(1 << 20, &mut read);
    assert!(read == bytes, "written");

    a.post(3, SendOp::Read(b.remote(1 << 20)), 2 << 20, 1 << 20);
    assert_eq!(a.done(3).opcode, WcOpcode::RdmaRead);
    a.buffer.read(2 << 20, &mut read);
    assert!(read == bytes, "read back");

    b.buffer.write(64, &40_u64.to_ne_bytes());
    a.post(4, SendOp::FetchAdd { remote: b.remote(64), add: 2 }, 8, 8);
    assert_eq!(a.done(4).opcode, WcOpcode::FetchAdd);
    a.post(5, SendOp::CompareSwap { remote: b.remote(64), compare: 42, swap: 99 }, 16, 8);
    assert_eq!(a.done(5).opcode, WcOpcode::CompSwap);
    let mut words = [0; 16];
    a.buffer.read(8, &mut words);
    assert_eq!(words[..8], 40_u64.to_ne_bytes());
    assert_eq!(words[8..], 42_u64.to_ne_bytes());
    b.buffer.read(64, &mut words[..8]);
    assert_eq!(words[..8], 99_u64.to_ne_bytes());

    b.post_recv(8, 0, 64);
    let inline = SendWr {
        id: 6,
        op: SendOp::WriteImm(b.remote(128), 5),
        sges: &[],
        inline: b"inline",
        flags: SendFlags::INLINE | SendFlags::SIGNALED,
    };
    a.dev.post_send(a.qp, &[inline]).unwrap();
    assert_eq!(b.done(8).opcode, WcOpcode::RecvRdmaWithImm);
    assert_eq!(a.done(6).opcode, WcOpcode::RdmaWrite);
    b.buffer.read(128, &mut words[..6]);
    assert_eq!(&words[..6], b"inline");
    assert_eq!((a.dev.fault(), b.dev.fault()), (None, None));
}

#[test]
fn a_disconnect_reaches_both_sides_and_flushes() {
    let (a, b) = (open(ip(2, 1)), open(ip(2, 2)));
    let (a, b) = connect(&a, &b, 4096);
    b.post_recv(1, 0, 64);
    a.dev.disconnect(a.id).unwrap();
    for side in [&a, &b] {
        match side.dev.cm_event(PATIENCE).unwrap() {
            CmEvent::Disconnected { id } => assert_eq!(id, side.id),
            other => panic!("{other:?}"),
        }
    }
    b.dev.disconnect(b.id).ok();
    assert_eq!(b.completion().status, Status::WrFlushErr);
}

#[test]
fn nobody_listening_is_a_refusal() {
    let (a, b) = (open(ip(3, 1)), open(ip(3, 2)));
    let side = common::unconnected(&a, 4096);
    let id = a.connect(None, (b.attr().addrs[0], PORT).into(), &side.param()).unwrap();
    match a.cm_event(PATIENCE).unwrap() {
        CmEvent::Rejected { id: of, reason, .. } => {
            assert_eq!((of, reason), (id, RejectReason::INVALID_SERVICE_ID));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_second_device_of_an_address_is_refused_with_advice() {
    // tests [OUT-10]
    let first = open(ip(4, 1));
    let config = || SoftConfig { addrs: vec![ip(4, 1)], ..SoftConfig::default() };
    let Err(Error::AddrInUse(text)) = SoftDevice::open(config()) else {
        panic!("two devices of one address");
    };
    assert!(text.contains("4791") && text.contains("network namespace"), "{text}");
    drop(first);
    SoftDevice::open(config()).unwrap();
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let none = SoftDevice::open(SoftConfig::default());
    assert!(matches!(none, Err(Error::Invalid(_))), "{none:?}");
    let lo = SoftConfig { addrs: vec![ip(5, 1)], mtu: Some(Mtu::M1024), ..SoftConfig::default() };
    let device = SoftDevice::open(lo).unwrap();
    assert_eq!(device.attr().mtu, Mtu::M1024);
    assert_eq!(device.attr().addrs, [ip(5, 1)]);
    assert_ne!(device.attr().guid, 0);
}

/// One thread serves the device and a descriptor of its own.
#[test]
fn waiting_ends_when_another_descriptor_can_be_read() {
    let (a, b) = (open(ip(47, 1)), open(ip(47, 2)));
    let (a, b) = connect(&a, &b, 4096);
    let (mut near, far) = UnixStream::pair().unwrap();
    let start = Instant::now();
    let short = Duration::from_millis(30);
    assert_eq!(b.dev.wait_cq_or(b.cq, far.as_fd(), short), Ok(Some(false)));
    assert!(start.elapsed() >= short);
    b.post_recv(1, 0, 64);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.dev.wait_cq_or(b.cq, far.as_fd(), PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        a.post(2, SendOp::Send, 0, 64);
        assert_eq!(waiter.join().unwrap(), Some(true), "a completion");
    });
    b.done(1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.dev.wait_cq_or(b.cq, far.as_fd(), PATIENCE).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        near.write_all(b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), Some(false), "the other descriptor");
    });
    // What is there already ends it, and a hang-up does; completions are looked for first.
    assert_eq!(b.dev.wait_cq_or(b.cq, far.as_fd(), PATIENCE), Ok(Some(false)));
    drop(near);
    assert_eq!(b.dev.wait_cq_or(b.cq, far.as_fd(), PATIENCE), Ok(Some(false)));
    assert!(start.elapsed() < PATIENCE);
    a.dev.wait_cq(a.cq, false, Some(PATIENCE)).unwrap();
    assert_eq!(a.dev.wait_cq_or(a.cq, far.as_fd(), PATIENCE), Ok(Some(true)));
    a.done(2);
    // Who would not notice the other descriptor, because another thread waits, does not wait.
    let long = Duration::from_secs(1);
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| a.dev.wait_cq(a.cq, false, Some(long)).unwrap());
        std::thread::sleep(Duration::from_millis(200));
        let start = Instant::now();
        assert_eq!(a.dev.wait_cq_or(a.cq, far.as_fd(), PATIENCE), Ok(None));
        assert!(start.elapsed() < long / 2);
        assert!(!leader.join().unwrap());
    });
}

/// A device of many sessions has a thread for each, which waits for that session's completions.
#[test]
fn a_completion_wakes_those_who_wait_for_its_queue_and_no_others() {
    const OTHERS: u64 = 16;
    const MESSAGES: u64 = 200;
    let (a, b) = (open(ip(49, 1)), open(ip(49, 2)));
    let (a, b) = connect(&a, &b, 4096);
    std::thread::scope(|scope| {
        for _ in 0..OTHERS {
            let queue = b.dev.create_cq(16).unwrap();
            let dev = &b.dev;
            scope.spawn(move || assert_eq!(dev.wait_cq(queue, false, None), Err(Error::Closed)));
        }
        let start = Instant::now();
        while b.dev.stats().sleeps < OTHERS {
            assert!(start.elapsed() < PATIENCE, "they wait");
            std::thread::yield_now();
        }
        let before = b.dev.stats().sleeps;
        for id in 0..MESSAGES {
            b.post_recv(id, 0, 64);
            a.post(id, SendOp::Send, 0, 64);
            assert!(b.dev.wait_cq(b.cq, false, Some(PATIENCE)).unwrap());
            b.done(id);
            a.done(id);
        }
        let sleeps = b.dev.stats().sleeps - before;
        b.dev.close();
        // Who leads sleeps once or twice for a message, and who waits for it once.
        assert!(sleeps < MESSAGES * OTHERS / 2, "{sleeps} sleeps for {MESSAGES} messages");
    });
}

#[test]
fn waiting_wakes_up_and_ends() {
    let (a, b) = (open(ip(6, 1)), open(ip(6, 2)));
    let (a, b) = connect(&a, &b, 4096);
    let start = Instant::now();
    assert!(!b.dev.wait_cq(b.cq, false, Some(Duration::from_millis(30))).unwrap());
    assert!(start.elapsed() >= Duration::from_millis(30));
    b.post_recv(1, 0, 64);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.dev.wait_cq(b.cq, false, Some(PATIENCE)).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        a.post(2, SendOp::Send, 0, 64);
        assert!(waiter.join().unwrap());
    });
    b.done(1);
    assert!(a.dev.wait_cq(a.cq, false, Some(PATIENCE)).unwrap());
    a.done(2);

    std::thread::scope(|scope| {
        let forever = scope.spawn(|| b.dev.wait_cq(b.cq, false, None));
        let follower = scope.spawn(|| b.dev.wait_cq(b.cq, false, None));
        let events = scope.spawn(|| b.dev.cm_event(PATIENCE));
        std::thread::sleep(Duration::from_millis(20));
        b.dev.close();
        assert_eq!(forever.join().unwrap(), Err(Error::Closed));
        assert_eq!(follower.join().unwrap(), Err(Error::Closed));
        assert_eq!(events.join().unwrap(), Err(Error::Closed));
    });
    assert_eq!(b.dev.alloc_pd(), Err(Error::Closed));
}

#[test]
fn two_waiters_of_one_device_get_their_own() {
    let (a, b) = (open(ip(7, 1)), open(ip(7, 2)));
    let (a1, b1) = connect(&a, &b, 4096);
    let (a2, b2) = common::connect_to(&a, &b, 4096, PORT + 1);
    std::thread::scope(|scope| {
        for (near, far) in [(&a1, &b1), (&a2, &b2)] {
            scope.spawn(move || {
                for n in 0..50 {
                    near.post_recv(n, 64, 64);
                    near.post(100 + n, SendOp::Send, 0, 8);
                    for _ in 0..2 {
                        assert!(near.dev.wait_cq(near.cq, false, Some(PATIENCE)).unwrap());
                        let completion = near.completion();
                        assert_eq!(completion.status, Status::Success);
                    }
                }
            });
            for n in 0..50 {
                far.post_recv(n, 128, 64);
            }
            scope.spawn(move || {
                let (mut received, mut sent) = (0, 0);
                while received < 50 || sent < 50 {
                    assert!(far.dev.wait_cq(far.cq, false, Some(PATIENCE)).unwrap());
                    let completion = far.completion();
                    assert_eq!(completion.status, Status::Success);
                    if completion.is_recv() {
                        received += 1;
                        far.post(1, SendOp::Send, 0, 8);
                    } else {
                        sent += 1;
                    }
                }
            });
        }
    });
}

#[test]
fn a_device_nobody_polls_answers() {
    let (a, b) = (open(ip(8, 1)), open(ip(8, 2)));
    let (a, b) = connect(&a, &b, 1 << 16);
    for n in 0..20 {
        std::thread::sleep(Duration::from_millis(n));
        a.post(n, SendOp::Read(b.remote(0)), 0, 1 << 16);
        a.done(n);
    }
}

#[test]
fn an_acknowledgement_held_back_goes_out_all_the_same() {
    let (a, b) = (open(ip(9, 1)), open(ip(9, 2)));
    let (a, b) = connect(&a, &b, 4096);
    for n in 0..20 {
        b.post_recv(n, 0, 64);
        a.post(100 + n, SendOp::Send, 64, 64);
        // The program polls until the message has arrived, and stops then.
        b.done(n);
        a.done(100 + n);
    }
    // On a busy machine the background thread may be late, now and then.
    let resent = a.dev.counters().packets_resent;
    assert!(resent < 10, "{resent} of 20 sent twice");
}

#[test]
fn without_bursts_every_packet_is_a_datagram_of_its_own() {
    // tests [ICRC-23]
    let config = |host| SoftConfig { addrs: vec![ip(10, host)], gso: false, ..Default::default() };
    let (a, b) = (common::open_with(config(1)), common::open_with(config(2)));
    let (a, b) = connect(&a, &b, 1 << 20);
    let bytes = pattern(1 << 20, 3);
    a.buffer.write(0, &bytes);
    a.post(1, SendOp::Write(b.remote(0)), 0, 1 << 20);
    a.done(1);
    let mut read = vec![0; 1 << 20];
    b.buffer.read(0, &mut read);
    assert!(read == bytes);
    let stats = a.dev.stats();
    assert_eq!(stats.gso_sends, 0);
    assert!(stats.sends * 4 <= stats.packets_sent, "many with one call: {stats:?}");
}

#[test]
fn a_device_talks_with_itself_over_ipv6() {
    // tests [OUT-4], [OUT-12], [ICRC-30]
    let addr = "::1".parse().unwrap();
    let config = SoftConfig { addrs: vec![addr], mtu: Some(Mtu::M1024), ..Default::default() };
    let device = match SoftDevice::open(config) {
        Ok(device) => std::sync::Arc::new(device),
        Err(Error::AddrNotAvailable | Error::System { .. }) => {
            return skipped::because("no IPv6");
        }
        Err(error) => panic!("{error}"),
    };
    let mut near = common::unconnected(&device, 1 << 17);
    let mut far = common::unconnected(&device, 1 << 17);
    device.listen((addr, PORT).into()).unwrap();
    near.id = device.connect(None, (addr, PORT).into(), &near.param()).unwrap();
    let mut established = 0;
    while established < 2 {
        match device.cm_event(PATIENCE).unwrap() {
            CmEvent::ConnectRequest { id, .. } => {
                far.id = id;
                device.accept(id, &far.param()).unwrap();
            }
            CmEvent::Established { id, .. } => {
                assert!(id == near.id || id == far.id);
                established += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    let bytes = pattern(100_001, 9);
    near.buffer.write(0, &bytes);
    near.post(1, SendOp::Write(far.remote(0)), 0, bytes.len());
    near.done(1);
    let mut read = vec![0; bytes.len()];
    far.buffer.read(0, &mut read);
    assert!(read == bytes);
    assert_eq!(device.counters().drop_icrc, 0);
}

#[test]
fn waiting_for_solicited_passes_over_the_others() {
    let (a, b) = (open(ip(11, 1)), open(ip(11, 2)));
    let (a, b) = connect(&a, &b, 4096);
    b.post_recv(1, 0, 64);
    b.post_recv(2, 64, 64);
    a.post(3, SendOp::Send, 0, 64);
    a.done(3);
    assert!(!b.dev.wait_cq(b.cq, true, Some(Duration::from_millis(20))).unwrap());
    let sges = [a.sge(0, 64)];
    let flags = SendFlags::SOLICITED;
    let wr = SendWr { id: 4, op: SendOp::Send, sges: &sges, inline: &[], flags };
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.dev.wait_cq(b.cq, true, Some(PATIENCE)).unwrap());
        a.dev.post_send(a.qp, &[wr]).unwrap();
        assert!(waiter.join().unwrap());
    });
    assert_eq!((b.done(1).wr_id, b.done(2).wr_id), (1, 2));
}

#[test]
fn peers_hear_of_a_device_that_closes() {
    let (a, b) = (open(ip(12, 1)), open(ip(12, 2)));
    let (a, b) = connect(&a, &b, 4096);
    b.post_recv(1, 0, 64);
    a.dev.close();
    match b.dev.cm_event(PATIENCE).unwrap() {
        CmEvent::Disconnected { id } => assert_eq!(id, b.id),
        other => panic!("{other:?}"),
    }
    assert_eq!(b.completion().status, Status::WrFlushErr);
}

#[test]
fn the_next_life_ends_the_connections_of_the_former() {
    // tests [CM-53]
    const CHILD: &str = "BOWLINE_FORMER_LIFE";
    let config = |dir: &Path| SoftConfig {
        addrs: vec![ip(13, 1)],
        former_connections: FormerConnections::In(dir.to_owned()),
        ..SoftConfig::default()
    };
    if let Some(dir) = std::env::var_os(CHILD) {
        let device = common::open_with(config(dir.as_ref()));
        let side = common::unconnected(&device, 4096);
        device.connect(None, (ip(13, 2), PORT).into(), &side.param()).unwrap();
        std::thread::sleep(PATIENCE);
        return;
    }
    let dir = std::env::temp_dir().join(format!("bowline-former-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let written = || {
        std::fs::read_dir(&dir)
            .unwrap()
            .any(|file| file.unwrap().path().extension().is_some_and(|end| end == "connections"))
    };
    let peer = open(ip(13, 2));
    peer.listen((ip(13, 2), PORT).into()).unwrap();
    let side = common::unconnected(&peer, 4096);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["verbs::the_next_life_ends_the_connections_of_the_former", "--exact"])
        .env(CHILD, &dir)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let CmEvent::ConnectRequest { id, .. } = peer.cm_event(PATIENCE).unwrap() else {
        panic!("no request");
    };
    peer.accept(id, &side.param()).unwrap();
    assert!(matches!(peer.cm_event(PATIENCE), Ok(CmEvent::Established { .. })));
    let start = Instant::now();
    while !written() {
        assert!(start.elapsed() < PATIENCE, "the connection is not written down");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let next = SoftDevice::open(config(&dir)).unwrap();
    // Nothing was sent, so the peer has noticed nothing by itself.
    assert!(matches!(peer.cm_event(PATIENCE), Ok(CmEvent::Disconnected { .. })));
    assert!(!written(), "those connections are no more");
    drop(next);
    std::fs::remove_dir(&dir).unwrap();
}
