//! RDS over RDMA, on devices of this process.
#![cfg(feature = "rdma")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::{Builder, Control, Node, RdmaStatus, SendControl, Socket, Transfer, Transport};
use bowline::verbs::{
    CmEvent, ConnParam, Device, QpCap, QpInit, QpType, Remote, SendFlags, SendOp, SendWr,
    SoftConfig, SoftDevice, Status,
};
use bowline_host::{Host, Policy, Quota};
use bowline_wire::rds::{ConnectData, RDMA_PORT_V4, Version};

mod common;
use common::{Pair, ip};

fn with_device(test: u16, node: u8) -> Builder {
    let config = SoftConfig { addrs: vec![ip(test, node)], ..SoftConfig::default() };
    let device = SoftDevice::open(config).expect("an address of this machine");
    Node::builder().rdma(Arc::new(device))
}

fn pair(test: u16) -> Pair {
    let node = |n| with_device(test, n).build().unwrap();
    Pair { test, left: node(1), right: node(2) }
}

/// Bytes that differ from message to message and within one.
fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(97)) as u8).collect()
}

#[test]
fn messages_of_all_lengths_arrive() {
    let pair = pair(90);
    let (a, b) = pair.sockets(4000);
    a.set_send_buffer(4 << 20).unwrap();
    b.set_recv_buffer(4 << 20).unwrap();
    for (seed, len) in [0, 1, 4095, 4096, 4097, 8192, 100_000, 1 << 20].into_iter().enumerate() {
        a.send_to(&pattern(seed, len), pair.b(4000)).unwrap();
        let message = b.recv_message().unwrap();
        assert!(message.to_vec() == pattern(seed, len), "{len} bytes");
        assert_eq!(message.source(), pair.a(4000));
        b.send_to(&pattern(seed, 10), pair.a(4000)).unwrap();
        assert_eq!(a.recv_message().unwrap().to_vec(), pattern(seed, 10));
    }
    let frames = pair.right.counters().into_iter().find(|(name, _)| *name == "ib_rx_total_frags");
    // The longest message has 65 frames of 16 KiB.
    assert!((65..256).contains(&frames.expect("a counter of RDMA").1));
}

#[test]
fn two_nodes_that_connect_to_each_other_at_once_are_connected() {
    // Which of the attempts is given up when depends on nanoseconds.
    for round in 0..25_u32 {
        let pair = pair(93);
        let (a, b) = pair.sockets(4000);
        let together = Barrier::new(2);
        let exchange = |socket: &Socket, to, late: u32| {
            socket.set_recv_timeout(Some(common::LIMIT));
            together.wait();
            (0..late).for_each(|_| std::hint::spin_loop());
            for number in 0..3 {
                socket.send_to(&[number], to).unwrap();
                assert_eq!(socket.recv_message().unwrap().to_vec(), [number], "round {round}");
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| exchange(&a, pair.b(4000), 0));
            exchange(&b, pair.a(4000), round % 20 * 3000);
        });
    }
}

#[test]
fn nothing_is_lost_repeated_or_overtaken_while_connections_are_cut() {
    const COUNT: usize = 3000;
    let pair = pair(91);
    let (a, b) = pair.sockets(4000);
    let to = pair.b(4000);
    thread::scope(|scope| {
        scope.spawn(move || {
            for seed in 0..COUNT {
                a.send_to(&pattern(seed, seed % 9000), to).unwrap();
            }
            a.flush(Some(common::LIMIT)).unwrap();
        });
        scope.spawn(|| {
            for _ in 0..5 {
                thread::sleep(Duration::from_millis(30));
                pair.left.drop_connections(None);
                thread::sleep(Duration::from_millis(30));
                pair.right.drop_connections(None);
            }
        });
        for seed in 0..COUNT {
            let message = b.recv_message().unwrap();
            assert!(message.to_vec() == pattern(seed, seed % 9000), "message {seed}");
        }
    });
}

/// The next end of a transfer.
fn completion(socket: &Socket) -> (u64, RdmaStatus) {
    let message = socket.recv_message().unwrap();
    assert!(message.is_notification());
    match message.control() {
        [Control::RdmaStatus { token, status }] => (*token, *status),
        other => panic!("{other:?}"),
    }
}

/// A peer that speaks verbs asks for memory that nobody has announced. The node refuses, and ends
/// the connection a little later: with a disconnect that overtakes the NAK the peer's program would
/// learn that the operation was dropped.
// tests [RDMA-34]
#[test]
fn a_node_that_refuses_an_operation_does_not_end_the_connection_at_once() {
    let node = with_device(191, 1).build().unwrap();
    let config = SoftConfig { addrs: vec![ip(191, 2)], ..SoftConfig::default() };
    let device = SoftDevice::open(config).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let cap =
        QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline: 8 };
    let (qp_type, sq_sig_all) = (QpType::Rc, false);
    let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all };
    let qpn = device.create_qp(&init).unwrap();
    let said = ConnectData::new(ip(191, 2), ip(191, 1), Version::V3_1).to_bytes();
    let param = ConnParam { qpn, private_data: said.to_vec(), ..ConnParam::default() };
    let [from, to] = [(2, 0), (1, RDMA_PORT_V4)].map(|(n, port)| (ip(191, n), port).into());
    device.connect(Some(from), to, &param).unwrap();
    let event = device.cm_event(common::LIMIT).unwrap();
    assert!(matches!(event, CmEvent::Established { .. }), "{event:?}");
    let begun = Instant::now();
    let op = SendOp::Write(Remote { addr: 0, rkey: 0x1234 });
    let flags = SendFlags::INLINE | SendFlags::SIGNALED;
    device.post_send(qpn, &[SendWr { id: 1, op, sges: &[], inline: &[0; 8], flags }]).unwrap();
    let event = device.cm_event(common::LIMIT).unwrap();
    assert!(matches!(event, CmEvent::Disconnected { .. }), "{event:?}");
    assert!(begun.elapsed() >= Duration::from_millis(10), "{:?}", begun.elapsed());
    let mut done = Vec::new();
    device.poll_cq(cq, &mut done, 8).unwrap();
    let first = done.iter().find(|done| done.wr_id == 1).expect("it has ended");
    assert_eq!(first.status, Status::RemAccessErr);
    drop(node);
}

#[test]
fn memory_is_written_and_read_by_a_peer_that_was_told_of_it() {
    const LEN: usize = 1 << 20;
    let pair = pair(92);
    let (a, b) = pair.sockets(4000);
    let memory = a.rdma_memory(LEN + 8192).unwrap();
    // Exactly these bytes, which begin and end within pages.
    let key = a.rdma_register(&memory, 100..100 + LEN, Some(ip(92, 2)), false).unwrap();
    let announce = [SendControl::RdmaDest(key)];
    a.send_message(Some(pair.b(4000)), &[std::io::IoSlice::new(b"here")], &announce).unwrap();
    let message = b.recv_message().unwrap();
    let [Control::RdmaDest(told_key)] = message.control() else { panic!("{message:?}") };
    assert_eq!(*told_key, key);

    let local = b.rdma_memory(2 * LEN).unwrap();
    let bytes = pattern(5, LEN);
    local.write(0, &bytes);
    let write = Transfer::write(&local, 0..LEN, key).unwrap().notify(1);
    b.send_rdma(Some(pair.a(4000)), b"written", &[write]).unwrap();
    assert_eq!(a.recv_message().unwrap().to_vec(), b"written");
    let mut all = vec![0; LEN + 8192];
    memory.read(0, &mut all);
    assert!(all[100..100 + LEN] == bytes[..], "what was written is there before the message");
    assert!(all[..100].iter().chain(&all[100 + LEN..]).all(|byte| *byte == 0), "and nothing else");
    assert_eq!(completion(&b), (1, RdmaStatus::Success));

    let read = Transfer::read(&local, LEN..LEN + 3000, key).unwrap().at(777).fenced().notify(2);
    b.send_rdma(Some(pair.a(4000)), b"", &[read.silent()]).unwrap();
    assert_eq!(completion(&b), (2, RdmaStatus::Success));
    let mut part = vec![0; 3000];
    local.read(LEN, &mut part);
    assert!(part[..] == bytes[777..3777]);

    // Atomics: of 8 bytes at a multiple of 8 of what was announced.
    memory.write(100 + 16, &41_u64.to_ne_bytes());
    let key8 = a.rdma_register(&memory, 104..200, Some(ip(92, 2)), false).unwrap();
    let add = Transfer::fetch_add(&local, 0, key8, 1).unwrap().at(16).notify(3);
    b.send_rdma(Some(pair.a(4000)), b"added", &[add]).unwrap();
    assert_eq!(completion(&b), (3, RdmaStatus::Success));
    let swap = Transfer::compare_swap(&local, 8, key8, 0, 9).unwrap().at(16).notify(4);
    b.send_rdma(Some(pair.a(4000)), b"swapped", &[swap]).unwrap();
    assert_eq!(completion(&b), (4, RdmaStatus::Success));
    assert_eq!(a.recv_message().unwrap().to_vec(), b"added");

    // Taken back: the peer is refused, its message does not come, and others do.
    a.rdma_free(key).unwrap();
    assert_eq!(a.rdma_free(key).unwrap_err().errno().0, 22);
    let late = Transfer::write(&local, 0..100, key).unwrap().notify(5);
    b.send_rdma(Some(pair.a(4000)), b"never", &[late]).unwrap();
    b.send_to(b"after", pair.a(4000)).unwrap();
    assert_eq!(completion(&b), (5, RdmaStatus::RemoteError));
    assert_eq!(a.recv_message().unwrap().to_vec(), b"swapped");
    assert_eq!(a.recv_message().unwrap().to_vec(), b"after");
}

// tests [SAFE-12], [RMR-8]
#[test]
fn a_key_is_of_use_to_the_peer_it_is_for_over_any_connection_and_to_no_other() {
    let pair = pair(97);
    let (a, b) = pair.sockets(4000);
    let stranger = with_device(97, 3).build().unwrap();
    let c = stranger.bind(common::addr(97, 3, 4000)).unwrap();
    c.set_recv_timeout(Some(common::LIMIT));
    let to = pair.a(4000);
    // Registered before there is a connection.
    let memory = a.rdma_memory(4096).unwrap();
    let key = a.rdma_register(&memory, 0..100, Some(ip(97, 2)), false).unwrap();
    let [of_b, of_c] = [&b, &c].map(|socket| socket.rdma_memory(100).unwrap());
    of_b.write(0, &[2; 100]);
    of_c.write(0, &[3; 100]);
    // The key may go to its peer only.
    let announce = |to| {
        let payload = [std::io::IoSlice::new(b"here")];
        a.send_message(Some(to), &payload, &[SendControl::RdmaDest(key)])
    };
    announce(pair.b(4000)).unwrap();
    assert_eq!(announce(common::addr(97, 3, 4000)).unwrap_err().errno().0, 22);
    assert_eq!(b.recv_message().unwrap().control(), [Control::RdmaDest(key)]);
    let writes = |socket: &Socket, memory, token| {
        let write = Transfer::write(memory, 0..100, key).unwrap().notify(token);
        socket.send_rdma(Some(to), b"written", &[write]).unwrap();
        completion(socket)
    };
    let arrives = |source| {
        let message = a.recv_message().unwrap();
        assert_eq!((message.to_vec(), message.source()), (b"written".to_vec(), source));
        let mut found = [0; 100];
        memory.read(0, &mut found);
        memory.write(0, &[0; 100]);
        found
    };
    let resets = |node: &Node| node.counters().into_iter().find(|(n, _)| *n == "conn_reset");
    let [of_left, of_right] = [&pair.left, &pair.right].map(resets);
    for token in 0..3 {
        assert_eq!(writes(&c, &of_c, token), (token, RdmaStatus::RemoteError));
        assert_eq!(writes(&b, &of_b, token), (token, RdmaStatus::Success));
        assert_eq!(arrives(pair.b(4000)), [2; 100]);
    }
    assert_eq!(resets(&pair.right), of_right, "the others' connection goes on");
    assert_ne!(resets(&pair.left), of_left, "that of the stranger ends");
    for node in [&pair.left, &pair.right] {
        node.drop_connections(None);
        // A message goes over the next connection. An operation that meets the end of the former
        // is lost.
        b.send_to(b"written", to).unwrap();
        arrives(pair.b(4000));
        assert_eq!(writes(&b, &of_b, 8), (8, RdmaStatus::Success));
        assert_eq!(arrives(pair.b(4000)), [2; 100]);
    }
    // Memory for all peers has another key.
    let shared = a.rdma_register(&memory, 0..100, None, false).unwrap();
    let write = Transfer::write(&of_c, 0..100, shared).unwrap().notify(9);
    c.send_rdma(Some(to), b"written", &[write]).unwrap();
    assert_eq!(completion(&c), (9, RdmaStatus::Success));
    assert_eq!(arrives(common::addr(97, 3, 4000)), [3; 100]);
    // Its end is the end for its peer too.
    a.rdma_free(key).unwrap();
    assert_eq!(writes(&b, &of_b, 10), (10, RdmaStatus::RemoteError));
}

// tests [RMR-9], [RDMA-17], [RDMA-31]
#[test]
fn a_read_ends_well_although_its_message_comes_first_and_releases_the_memory() {
    const LEN: usize = 1 << 20;
    let pair = pair(99);
    let (a, b) = pair.sockets(4000);
    let memory = a.rdma_memory(LEN).unwrap();
    let local = b.rdma_memory(LEN).unwrap();
    let mut found = vec![0; LEN];
    for round in 0..50 {
        let bytes = pattern(round, LEN);
        memory.write(0, &bytes);
        let key = a.rdma_register(&memory, 0..LEN, Some(ip(99, 2)), true).unwrap();
        let read = Transfer::read(&local, 0..LEN, key).unwrap().notify(1);
        b.send_rdma(Some(pair.a(4000)), b"reading", &[read]).unwrap();
        assert_eq!(a.recv_message().unwrap().to_vec(), b"reading");
        assert_eq!(a.rdma_free(key).unwrap_err().errno().0, 22, "it was for one use");
        assert_eq!(completion(&b), (1, RdmaStatus::Success), "round {round}");
        local.read(0, &mut found);
        assert!(found == bytes, "round {round}");
        // What comes after the message is refused.
        if round % 10 == 0 {
            let late = Transfer::read(&local, 0..8, key).unwrap().notify(2);
            b.send_rdma(Some(pair.a(4000)), b"never", &[late]).unwrap();
            assert_eq!(completion(&b), (2, RdmaStatus::RemoteError));
        }
    }
}

#[test]
fn nothing_is_left_on_a_device_by_a_node_that_has_ended() {
    let config = SoftConfig { addrs: vec![ip(98, 1)], ..SoftConfig::default() };
    let device = Arc::new(SoftDevice::open(config).expect("an address of this machine"));
    let left = Node::builder().rdma(Arc::clone(&device) as Arc<_>).build().unwrap();
    let pair = Pair { test: 98, left, right: with_device(98, 2).build().unwrap() };
    let (a, b) = pair.sockets(4000);
    let memory = a.rdma_memory(4096).unwrap();
    for peer in [Some(ip(98, 2)), Some(ip(98, 9)), None] {
        a.rdma_register(&memory, 0..100, peer, false).unwrap();
    }
    let of_b = b.rdma_memory(100).unwrap();
    let key = b.rdma_register(&of_b, 0..100, Some(ip(98, 1)), false).unwrap();
    let write = Transfer::write(&memory, 0..100, key).unwrap().notify(1);
    a.send_rdma(Some(pair.b(4000)), b"written", &[write]).unwrap();
    assert_eq!(completion(&a), (1, RdmaStatus::Success));
    // Frames, three keys, and what was written from; domains of two peers and of all.
    let found = device.in_use();
    assert_eq!((found.qps, found.mrs, found.pds), (1, 2 + 3 + 1, 3));
    drop((a, memory));
    pair.left.shutdown(common::LIMIT);
    let found = device.in_use();
    assert_eq!((found.qps, found.cqs, found.listeners), (0, 0, 0));
    assert_eq!((found.mrs, found.pds), (0, 1), "the domain of all goes with the node");
    drop(pair);
    assert_eq!(device.in_use().pds, 0);
}

#[test]
fn a_stream_of_the_longest_messages_does_not_stop() {
    const COUNT: usize = 100;
    let pair = pair(89);
    let (a, b) = pair.sockets(4000);
    a.set_send_buffer(8 << 20).unwrap();
    b.set_recv_buffer(8 << 20).unwrap();
    let to = pair.b(4000);
    thread::scope(|scope| {
        scope.spawn(move || {
            for seed in 0..COUNT {
                a.send_to(&pattern(seed, 1 << 20), to).unwrap();
            }
            a.flush(Some(common::LIMIT)).unwrap();
        });
        for seed in 0..COUNT {
            assert!(b.recv_message().unwrap().to_vec() == pattern(seed, 1 << 20), "message {seed}");
        }
    });
}

/// The checks of SO_RDS_TRANSPORT, with a node whose first address is on RDMA and whose second is
/// not; `socket` makes a socket of it.
fn choose_transports(test: u16, socket: impl Fn() -> Socket) {
    let errno = |result: Result<(), bowline::rds::Error>| result.map_err(|error| error.errno().0);
    let (rdma, tcp) = (common::addr(test, 1, 4000), common::addr(test, 3, 4000));
    for (at, wanted) in [(rdma, Transport::Ib), (tcp, Transport::Tcp)] {
        let socket = socket();
        assert_eq!(socket.transport().unwrap(), None);
        socket.bind(at).unwrap();
        assert_eq!(socket.transport().unwrap(), Some(wanted));
        assert_eq!(errno(socket.set_transport(wanted)), Err(95), "it has one");
    }
    let chosen = socket();
    assert_eq!(errno(chosen.set_transport(Transport::Loopback)), Err(22));
    chosen.set_transport(Transport::Ib).unwrap();
    assert_eq!(chosen.transport().unwrap(), Some(Transport::Ib));
    assert_eq!(errno(chosen.set_transport(Transport::Ib)), Err(95), "it is chosen once");
    assert_eq!(errno(chosen.bind(tcp)), Err(92), "this address is on TCP only");
    chosen.bind(rdma).unwrap();
    let over_tcp = socket();
    over_tcp.set_transport(Transport::Tcp).unwrap();
    over_tcp.bind(common::addr(test, 1, 4001)).unwrap();
    assert_eq!(over_tcp.transport().unwrap(), Some(Transport::Tcp));
}

// tests [IB-3], [R-805], [R-820]
#[test]
fn the_transport_is_that_of_the_address_or_the_one_chosen() {
    let node = with_device(192, 1).address(ip(192, 3)).build().unwrap();
    choose_transports(192, || node.socket().unwrap());
    let without = common::builder(192, 4).build().unwrap().socket().unwrap();
    assert_eq!(without.set_transport(Transport::Ib).unwrap_err().errno(), 92);
}

// tests [IB-3], [R-805], [R-820]
#[test]
fn programs_choose_among_the_transports_of_the_host_s_node() {
    let node = with_device(193, 1).address(ip(193, 3)).build().unwrap();
    let place = std::env::temp_dir().join(format!("bowline-rdma193-{}.sock", std::process::id()));
    let listener = std::os::unix::net::UnixListener::bind(&place).unwrap();
    let host = Host::start(node.driver().clone(), listener, Policy::default(), Quota::NONE);
    let program = Node::at(&place).unwrap();
    choose_transports(193, || program.socket().unwrap());
    drop(host.unwrap());
    std::fs::remove_file(&place).unwrap();
}

// tests [IB-3], [IB-4]
#[test]
fn sockets_of_both_transports_reach_each_other() {
    let pair = pair(194);
    let over = |node: &Node, at, transport| {
        let socket = node.socket().unwrap();
        socket.set_transport(transport).unwrap();
        socket.bind(at).unwrap();
        socket.set_recv_timeout(Some(common::LIMIT));
        socket
    };
    let by_rdma = over(&pair.left, pair.a(4000), Transport::Ib);
    let by_tcp = over(&pair.left, pair.a(4001), Transport::Tcp);
    let there = over(&pair.right, pair.b(4000), Transport::Ib);
    let mut buf = [0; 9];
    for (from, text) in [(&by_rdma, b"over RDMA"), (&by_tcp, b"and TCP..")] {
        from.send_to(text, pair.b(4000)).unwrap();
        let (len, at) = there.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..len], Some(at)), (&text[..], from.local_addr()));
    }
    let mut transports: Vec<_> =
        pair.left.info().connections.iter().map(|connection| connection.transport).collect();
    transports.sort_unstable();
    assert_eq!(transports, ["infiniband", "tcp"]);
    assert_eq!(pair.left.info().rdma.expect("it has RDMA").len(), 1);
}

/// Sends messages from a few buffers, each of which is overwritten as soon as it is given back,
/// while connections are cut. What was sent again from such a buffer would arrive changed.
fn shared_buffers_are_given_back_once(pair: &Pair) {
    const COUNT: u32 = 400;
    const LEN: usize = 40_000;
    let (a, b) = pair.sockets(4000);
    a.set_zerocopy(true).unwrap();
    let to = pair.b(4000);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                thread::sleep(Duration::from_millis(20));
                pair.left.drop_connections(None);
            }
        });
        scope.spawn(|| {
            let mut buffers: Vec<_> = (0..4).map(|_| Some(Arc::new(vec![0; LEN]))).collect();
            let mut returned = 0;
            let mut held: HashMap<u32, (usize, Arc<Vec<u8>>)> = HashMap::new();
            for cookie in 0..COUNT {
                let mut free = buffers.iter().position(Option::is_some);
                while free.is_none() {
                    let message = a.recv_message().unwrap();
                    let [Control::ZcopyCompletion(cookies)] = message.control() else {
                        panic!("{message:?}")
                    };
                    for cookie in cookies {
                        let (at, mut buffer) = held.remove(cookie).expect("given back once");
                        // Nobody shares it any more: it may be changed.
                        Arc::get_mut(&mut buffer).expect("unshared").fill(0xff);
                        buffers[at] = Some(buffer);
                        returned += 1;
                    }
                    free = buffers.iter().position(Option::is_some);
                }
                let at = free.unwrap();
                let mut buffer = buffers[at].take().unwrap();
                Arc::get_mut(&mut buffer).unwrap().copy_from_slice(&pattern(cookie as usize, LEN));
                a.send_shared(&buffer, Some(to), Some(cookie)).unwrap();
                held.insert(cookie, (at, buffer));
            }
            a.flush(Some(common::LIMIT)).unwrap();
            while returned < COUNT {
                let message = a.recv_message().unwrap();
                for control in message.control() {
                    let Control::ZcopyCompletion(cookies) = control else { continue };
                    returned += cookies.len() as u32;
                }
            }
        });
        for seed in 0..COUNT as usize {
            let message = b.recv_message().unwrap();
            assert!(message.to_vec() == pattern(seed, LEN), "message {seed}");
        }
        done.store(true, Relaxed);
    });
}

#[test]
fn pieces_of_local_memory_follow_one_another() {
    const LEN: usize = 3000;
    let pair = pair(96);
    let (a, b) = pair.sockets(4000);
    let memory = a.rdma_memory(21 * LEN).unwrap();
    let key = a.rdma_register(&memory, 0..21 * LEN, None, false).unwrap();
    let announce = [SendControl::RdmaDest(key)];
    a.send_message(Some(pair.b(4000)), &[std::io::IoSlice::new(b"here")], &announce).unwrap();
    b.recv_message().unwrap();
    let local = b.rdma_memory(2 * 21 * LEN).unwrap();
    let bytes = pattern(8, 21 * LEN);
    // More than one request has, last piece first.
    let place = |piece: usize| 2 * (20 - piece) * LEN..2 * (20 - piece) * LEN + LEN;
    for piece in 0..21 {
        local.write(place(piece).start, &bytes[piece * LEN..][..LEN]);
    }
    let more = |first: Transfer| {
        (1..21).fold(first, |all, piece| all.and(&local, place(piece)).unwrap()).notify(1)
    };
    let write = more(Transfer::write(&local, place(0), key).unwrap());
    b.send_rdma(Some(pair.a(4000)), b"written", &[write]).unwrap();
    assert_eq!(completion(&b), (1, RdmaStatus::Success));
    let mut found = vec![0; 21 * LEN];
    memory.read(0, &mut found);
    assert!(found == bytes);
    local.write(0, &vec![0; 2 * 21 * LEN]);
    let read = more(Transfer::read(&local, place(0), key).unwrap());
    b.send_rdma(Some(pair.a(4000)), b"read", &[read]).unwrap();
    assert_eq!(completion(&b), (1, RdmaStatus::Success));
    for piece in 0..21 {
        local.read(place(piece).start, &mut found[piece * LEN..][..LEN]);
    }
    assert!(found == bytes);
}

// tests [ZC-4], [ZC-5]
#[test]
fn what_is_sent_without_copying_is_never_sent_again_after_its_completion() {
    shared_buffers_are_given_back_once(&pair(94));
    shared_buffers_are_given_back_once(&Pair::new(95));
}
