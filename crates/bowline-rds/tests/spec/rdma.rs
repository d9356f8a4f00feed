//! RDS over RDMA. Spec: `docs/spec/rds-rdma.md`.

use std::io::IoSlice;

use bowline_wire::rds::{ConnectData, Version};

use bowline_rds::{
    CloseReason, Config, Control, Error, Event, Instant, Node, Output, RdmaAccess, RdmaFrame,
    RdmaOp, RdmaPiece, RdmaRequest, RdmaStatus, Received, RecvOpts, RxBuf, SendControl, SendMsg,
    SocketId, Transport,
};

use crate::support::rdma::{Pair, Side};
use crate::support::{addr, ip};

const PORT_A: &str = "10.0.0.1:4000";
const PORT_B: &str = "10.0.0.2:4001";

fn sockets(pair: &mut Pair) -> [SocketId; 2] {
    [(0, PORT_A), (1, PORT_B)].map(|(side, at)| {
        let node = &mut pair.sides[side].node;
        let socket = node.socket().expect("room");
        node.bind(socket, addr(at)).expect("a free port");
        assert_eq!(node.transport(socket), Ok(Some(Transport::Ib)));
        node.set_send_buffer(socket, 4 << 20).expect("open");
        node.set_recv_buffer(socket, 64 << 20).expect("open");
        socket
    })
}

/// Two nodes with a socket each, which have no connection.
fn unmet() -> (Pair, [SocketId; 2]) {
    let mut pair = Pair::new();
    let sockets = sockets(&mut pair);
    (pair, sockets)
}

/// Two nodes with a socket each and a connection, over which one message has gone.
fn met() -> (Pair, [SocketId; 2]) {
    let (mut pair, [from, to]) = unmet();
    send(&mut pair, 0, from, b"first");
    pair.run();
    (pair, [from, to])
}

fn send(pair: &mut Pair, side: usize, socket: SocketId, payload: &[u8]) {
    let name = Some(addr([PORT_B, PORT_A][side]));
    let payload = [IoSlice::new(payload)];
    let msg = SendMsg { name, payload: &payload, ..SendMsg::default() };
    let now = pair.now;
    pair.sides[side].node.send(now, socket, &msg).expect("room in the queue");
}

fn recv(pair: &mut Pair, side: usize, socket: SocketId) -> Option<Vec<u8>> {
    let now = pair.now;
    let got = pair.sides[side].node.recv(now, socket, RecvOpts::default()).ok()?;
    let Received { data, .. } = got;
    Some(data.expect("a message").slices().flatten().copied().collect())
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + seed) as u8).collect()
}

// tests [IB-53], [IB-55]
#[test]
fn messages_of_all_lengths_arrive_whole_and_in_order() {
    let (mut pair, [from, to]) = unmet();
    let lengths = [0, 1, 4095, 4096, 4097, 8192, 1 << 20];
    for (seed, len) in lengths.into_iter().enumerate() {
        send(&mut pair, 0, from, &pattern(len, seed));
    }
    pair.run();
    for (seed, len) in lengths.into_iter().enumerate() {
        assert!(recv(&mut pair, 1, to) == Some(pattern(len, seed)), "{len} bytes");
    }
    assert_eq!(recv(&mut pair, 1, to), None);
    send(&mut pair, 1, to, b"answer");
    pair.run();
    assert_eq!(recv(&mut pair, 0, from).as_deref(), Some(&b"answer"[..]));
}

// tests [IB-94], [IB-82]
#[test]
fn what_was_not_acknowledged_comes_again_over_the_next_connection_once() {
    let (mut pair, [from, to]) = unmet();
    for at in 0..20 {
        send(&mut pair, 0, from, &pattern(5000, at));
    }
    pair.run();
    for at in 20..40 {
        send(&mut pair, 0, from, &pattern(5000, at));
    }
    // They are posted, and all but the first few never arrive.
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    let frames = pair.sides[0].frames(pair.now, links[0]);
    assert_eq!(frames.len(), 40, "two each");
    pair.sides[1].take(pair.now, links[1], &frames[..7]);
    pair.cut();
    pair.pass(50);
    for at in 0..40 {
        assert!(recv(&mut pair, 1, to) == Some(pattern(5000, at)), "message {at}");
    }
    assert_eq!(recv(&mut pair, 1, to), None);
    assert_eq!(pair.sides[0].node.counters().conn_reset, 1);
    assert_eq!(pair.sides[0].node.counters().retransmits, 20);
    assert_eq!(pair.sides[1].node.counters().recv_drop_old_seq, 3);
}

// tests [IB-65]
#[test]
fn the_last_messages_are_acknowledged_though_none_of_them_asks() {
    let (mut pair, [from, to]) = unmet();
    for count in [10, 5] {
        for _ in 0..count {
            send(&mut pair, 0, from, b"message");
        }
        pair.run();
    }
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(5), "the tenth has asked");
    pair.pass(20);
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(0));
    let acks = |pair: &Pair| pair.sides[1].node.counters().ib_ack_sent;
    let sent = acks(&pair);
    pair.pass(100);
    assert_eq!(acks(&pair), sent, "there is nothing more to ask for");
    for _ in 0..15 {
        assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"message"[..]));
    }
    assert_eq!(recv(&mut pair, 1, to), None);
}

const COOKIE: u64 = 0x64_0000_0300;

fn write(len: u64, token: u64) -> RdmaOp {
    let local = vec![RdmaPiece { addr: 4096, len: len as u32, lkey: 7 }];
    RdmaOp {
        access: RdmaAccess::Write,
        cookie: COOKIE,
        offset: 50,
        len,
        local,
        fence: false,
        silent: false,
        token,
        notify: true,
        hold: None,
    }
}

fn send_with(
    pair: &mut Pair,
    socket: SocketId,
    payload: &[u8],
    ops: &[RdmaOp],
) -> Result<(), Error> {
    let name = Some(addr(PORT_B));
    let payload = [IoSlice::new(payload)];
    let msg = SendMsg { name, payload: &payload, rdma: ops, ..SendMsg::default() };
    let now = pair.now;
    pair.sides[0].node.send(now, socket, &msg).map(drop)
}

/// The ends of operations that a socket of the first side is told.
fn told(pair: &mut Pair, socket: SocketId) -> Vec<(u64, RdmaStatus)> {
    let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
    let now = pair.now;
    let mut all = Vec::new();
    while let Ok(got) = pair.sides[0].node.recv(now, socket, opts) {
        assert!(got.source.is_none() && got.data.is_none(), "they come alone");
        assert!(got.control.len() <= 8);
        all.extend(got.control.into_iter().map(|control| match control {
            Control::RdmaStatus { token, status } => (token, status),
            other => panic!("{other:?}"),
        }));
    }
    all
}

// tests [RDMA-2], [RDMA-16], [RDMA-17], [IB-63], [IB-89]
#[test]
fn an_operation_goes_before_its_message_and_is_reported_once() {
    let (mut pair, [from, to]) = met();
    let mut op = write(20 << 10, 77);
    op.local = (0..20).map(|at| RdmaPiece { addr: at << 12, len: 1024, lkey: 7 }).collect();
    send_with(&mut pair, from, b"done", &[op]).expect("sent");
    assert_eq!(told(&mut pair, from), []);
    pair.run();
    let works = std::mem::take(&mut pair.sides[0].works);
    let requests: Vec<_> =
        works.iter().map(|w| (w.remote, w.rkey, w.local.len(), w.signalled)).collect();
    let at = 50 + 0x64;
    assert_eq!(
        requests,
        [(at, 0x300, 8, false), (at + 8192, 0x300, 8, false), (at + 16_384, 0x300, 4, true)]
    );
    assert_eq!(told(&mut pair, from), [(77, RdmaStatus::Success)]);
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"first"[..]));
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"done"[..]));
    let counters = pair.sides[0].node.counters();
    assert_eq!((counters.send_rdma, counters.send_rdma_bytes), (1, 20 << 10));
}

// tests [IB-97], [RDMA-22], [RDMA-28]
#[test]
fn an_operation_that_was_begun_is_never_repeated() {
    let (mut pair, [from, to]) = met();
    let quiet = RdmaOp { notify: false, ..write(100, 9) };
    send_with(&mut pair, from, b"begun", &[write(100, 1)]).expect("sent");
    send_with(&mut pair, from, b"unreported", std::slice::from_ref(&quiet)).expect("sent");
    pair.sides[0].node.set_recverr(from, true).expect("open");
    send_with(&mut pair, from, b"reported", &[quiet]).expect("sent");
    send(&mut pair, 0, from, b"plain");
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    assert_eq!(pair.sides[0].frames(pair.now, links[0]).len(), 4);
    assert_eq!(pair.sides[0].works.len(), 3);
    // Not posted before the connection ends: carried out over the next one.
    send_with(&mut pair, from, b"later", &[write(100, 2)]).expect("sent");
    pair.cut();
    let dropped = RdmaStatus::Dropped;
    assert_eq!(told(&mut pair, from), [(1, dropped), (9, dropped)]);
    pair.sides[0].works.clear();
    pair.pass(50);
    assert_eq!(pair.sides[0].works.len(), 1);
    assert_eq!(told(&mut pair, from), [(2, RdmaStatus::Success)]);
    for expected in [&b"first"[..], b"plain", b"later"] {
        assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(expected));
    }
    assert_eq!(recv(&mut pair, 1, to), None);
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(0));
}

// tests [RDMA-22], [SAFE-7]
#[test]
fn a_refused_operation_is_told_from_those_around_it() {
    let (mut pair, [from, to]) = met();
    for token in 1..=3 {
        send_with(&mut pair, from, b"x", &[write(100, token)]).expect("sent");
    }
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    pair.sides[0].frames(pair.now, links[0]);
    let ids: Vec<_> = pair.sides[0].works.iter().map(|work| work.id).collect();
    let now = pair.now;
    let node = &mut pair.sides[0].node;
    node.handle_rdma_sent(now, links[0], ids[0]);
    node.handle_rdma_failed(now, links[0], ids[1], RdmaStatus::RemoteError);
    assert_eq!(told(&mut pair, from), [(1, RdmaStatus::Success)]);
    pair.cut();
    assert_eq!(told(&mut pair, from), [(2, RdmaStatus::RemoteError), (3, RdmaStatus::Dropped)]);
    pair.pass(50);
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"first"[..]));
    assert_eq!(recv(&mut pair, 1, to), None);
}

// tests [IB-100], [RDMA-22]
#[test]
fn a_cancelled_operation_is_reported_when_it_touches_memory_no_more() {
    let (mut pair, [from, _]) = met();
    send_with(&mut pair, from, b"x", &[write(100, 1)]).expect("sent");
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    let frames = pair.sides[0].frames(pair.now, links[0]);
    send_with(&mut pair, from, b"x", &[write(100, 2)]).expect("sent");
    let now = pair.now;
    pair.sides[0].node.cancel_sent_to(now, from, addr(PORT_B)).expect("bound");
    assert_eq!(told(&mut pair, from), [(2, RdmaStatus::Cancelled)]);
    let id = frames[0].id;
    pair.sides[0].node.handle_rdma_sent(now, links[0], id);
    assert_eq!(told(&mut pair, from), [(1, RdmaStatus::Cancelled)]);
    pair.sides[0].node.check_invariants();
}

// tests [IB-112], [RDMA-22]: one completion stands for those before it, the operation's too
#[test]
fn an_operation_that_is_complete_with_the_farewell_was_carried_out() {
    let (mut pair, [from, _]) = met();
    send_with(&mut pair, from, b"x", &[write(100, 1)]).expect("sent");
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    let now = pair.now;
    pair.sides[0].frames(now, links[0]);
    pair.sides[0].node.end(now);
    pair.sides[0].collect();
    let farewell = pair.sides[0].frames(now, links[0]).pop().expect("a farewell");
    let node = &mut pair.sides[0].node;
    node.handle_rdma_sent(now, links[0], farewell.id);
    assert!(!node.wants_rdma_link(links[0]), "the peer has the farewell");
    node.handle_rdma_closed(now, links[0], CloseReason::Eof);
    assert_eq!(told(&mut pair, from), [(1, RdmaStatus::Success)]);
}

// tests [RDMA-24]
#[test]
fn a_silent_operation_sends_nothing_and_is_over_when_it_is_done() {
    let (mut pair, [from, to]) = met();
    let silent = RdmaOp { silent: true, ..write(100, 9) };
    send_with(&mut pair, from, b"", std::slice::from_ref(&silent)).expect("sent");
    pair.run();
    assert_eq!(told(&mut pair, from), [(9, RdmaStatus::Success)]);
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(0));
    send_with(&mut pair, from, b"with payload", &[silent]).expect("sent");
    pair.run();
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"first"[..]));
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"with payload"[..]));
    assert_eq!(recv(&mut pair, 1, to), None);
}

// tests [RDMA-11], [RDMA-12], [RDMA-14], [ATOM-4]
#[test]
fn operations_are_checked_before_anything_is_queued() {
    let (mut pair, [from, _]) = unmet();
    let good = write(100, 1);
    let atomic = |len, addr, offset| RdmaOp {
        access: RdmaAccess::FetchAdd(1),
        local: vec![RdmaPiece { addr, len, lkey: 7 }],
        cookie: 0x300,
        offset,
        ..write(8, 1)
    };
    let errno = |pair: &mut Pair, ops: &[RdmaOp]| {
        send_with(pair, from, b"x", ops).map_or_else(|error| error.errno().0, |()| 0)
    };
    assert_eq!(errno(&mut pair, &[write((1 << 20) + 1, 1)]), 90);
    assert_eq!(errno(&mut pair, &[RdmaOp { local: Vec::new(), ..good.clone() }]), 22);
    let piece = good.local[0];
    assert_eq!(errno(&mut pair, &[RdmaOp { local: vec![piece; 1025], ..good.clone() }]), 90);
    let empty = RdmaPiece { len: 0, ..piece };
    assert_eq!(errno(&mut pair, &[RdmaOp { local: vec![piece, empty], ..good.clone() }]), 22);
    assert_eq!(errno(&mut pair, &[good.clone(), good.clone()]), 22);
    assert_eq!(errno(&mut pair, &[RdmaOp { len: 99, ..good.clone() }]), 22, "more than remote");
    assert_eq!(errno(&mut pair, &[RdmaOp { len: 101, ..good.clone() }]), 0, "less than remote");
    assert_eq!(errno(&mut pair, &[RdmaOp { offset: u64::MAX, ..good.clone() }]), 22);
    assert_eq!(errno(&mut pair, &[atomic(8, 16, 8)]), 0);
    assert_eq!(errno(&mut pair, &[atomic(8, 16, 8), good.clone()]), 0, "one of each");
    assert_eq!(errno(&mut pair, &[atomic(4, 16, 8)]), 14);
    assert_eq!(errno(&mut pair, &[atomic(8, 17, 8)]), 14);
    assert_eq!(errno(&mut pair, &[atomic(8, 16, 9)]), 22);
    // Over TCP there are none.
    let node = &mut pair.sides[0].node;
    let tcp = node.socket().expect("room");
    node.set_transport(tcp, 2).expect("before bind");
    node.bind(tcp, addr("10.0.0.1:5000")).expect("a free port");
    assert_eq!(send_with(&mut pair, tcp, b"x", &[good]), Err(Error::NotSupported));
}

// tests [RDMA-3], [RDMA-6], [RDMA-7], [RDMA-9], [RDMA-12], [RDMA-27], [RDMA-31]
#[test]
fn memory_is_announced_used_and_taken_back_once() {
    let (mut pair, [from, to]) = unmet();
    let now = pair.now;
    let node = &mut pair.sides[0].node;
    node.add_region(from, 0x300, 8192, None, false, 1).expect("bound");
    node.add_region(from, 0x301, 1 << 20, None, true, 2).expect("bound");
    node.add_region(from, 0x302, 100, None, false, 3).expect("bound");
    assert_eq!(node.check_region(from, 0), Err(Error::BadValue));
    assert_eq!(node.check_region(from, (1 << 20) + 1).map_err(|e| e.errno().0), Err(90));
    let unbound = node.socket().expect("room");
    assert_eq!(node.check_region(unbound, 8), Err(Error::NotConnected));
    let announce = |pair: &mut Pair, cookies: &[u64]| {
        let control: Vec<_> = cookies.iter().map(|c| SendControl::RdmaDest(*c)).collect();
        let name = Some(addr(PORT_B));
        let payload = [IoSlice::new(b"here")];
        let msg = SendMsg { name, payload: &payload, control: &control, ..SendMsg::default() };
        pair.sides[0].node.send(now, from, &msg).map(drop)
    };
    assert_eq!(announce(&mut pair, &[0x0777]), Err(Error::BadControl), "not of this socket");
    assert_eq!(announce(&mut pair, &[0x300, 0x301]), Err(Error::BadControl), "two");
    let cookie = 0x1f8_0000_0301;
    announce(&mut pair, &[cookie]).expect("sent");
    pair.run();
    let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
    let got = pair.sides[1].node.recv(now, to, opts).expect("a message");
    assert_eq!(got.control, [Control::RdmaDest(cookie)]);
    // The peer writes to it, and says so.
    let name = Some(addr(PORT_A));
    let ops = [RdmaOp { cookie, ..write(100, 5) }];
    let payload = [IoSlice::new(b"written")];
    let msg = SendMsg { name, payload: &payload, rdma: &ops, ..SendMsg::default() };
    pair.sides[1].node.send(now, to, &msg).expect("sent");
    pair.run();
    assert_eq!(recv(&mut pair, 0, from).as_deref(), Some(&b"written"[..]));
    assert_eq!(pair.sides[0].used, [2], "it was for one use");
    let node = &mut pair.sides[0].node;
    assert_eq!(node.free_region(from, cookie), Err(Error::BadValue));
    assert_eq!(node.free_region(from, 0x300), Ok(()));
    assert_eq!(node.free_region(from, 0x300), Err(Error::BadValue));
    assert_eq!(node.free_region(from, 0), Ok(()), "tools ask whether RDMA works like this");
    node.close(now, from);
    pair.sides[0].collect();
    assert_eq!(pair.sides[0].released, [1, 3, 2]);
}

#[test]
fn room_that_comes_while_the_driver_posts_is_used() {
    let (mut pair, [from, to]) = met();
    send(&mut pair, 0, from, &pattern(1 << 20, 1));
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    let now = pair.now;
    let mut frames = Vec::new();
    // The ring is full, and its requests complete before the driver says that they are posted.
    pair.sides[0].collect_frames(now, links[0], &mut frames);
    pair.sides[1].take(now, links[1], &frames);
    for sent in frames.iter().filter(|sent| sent.signalled) {
        pair.sides[0].node.handle_rdma_sent(now, links[0], sent.id);
    }
    pair.sides[0].node.handle_rdma_posted(now, links[0]);
    pair.run();
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"first"[..]));
    assert!(recv(&mut pair, 1, to) == Some(pattern(1 << 20, 1)));
}

#[test]
fn a_message_that_finds_the_ring_full_is_sent_when_there_is_room() {
    let (mut pair, [from, to]) = met();
    for at in 0..300 {
        send(&mut pair, 0, from, &pattern(10, at));
    }
    pair.sides[0].collect();
    let links = pair.links.expect("connected");
    let now = pair.now;
    // Each time as many are taken as fit, however the last one ends.
    let mut sent = 0;
    while sent < 300 {
        let frames = pair.sides[0].frames(now, links[0]);
        assert!(!frames.is_empty(), "after {sent}");
        sent += frames.len();
        pair.sides[1].take(now, links[1], &frames);
        pair.sides[0].ready.clear();
        let last = frames.last().map_or(0, |sent| sent.id);
        pair.sides[0].node.handle_rdma_sent(now, links[0], last);
        pair.sides[0].collect();
        assert_eq!(pair.sides[0].ready.is_empty(), sent == 300, "after {sent}");
    }
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"first"[..]));
}

/// A machine may fail between its NIC's acknowledgement and its node's.
#[test]
fn a_silent_peer_that_owes_an_acknowledgement_is_sent_a_frame_now_and_then() {
    let (mut pair, [from, _]) = unmet();
    send(&mut pair, 0, from, b"asks for an acknowledgement");
    pair.pass(30_000);
    let acks = |pair: &Pair| pair.sides[0].node.counters().ib_ack_sent;
    assert_eq!(acks(&pair), 0, "nothing is owed");
    pair.links = None;
    send(&mut pair, 0, from, b"does not");
    pair.pass(30_000);
    assert!((2..=3).contains(&acks(&pair)), "{}", acks(&pair));
}

// tests [IB-114]
#[test]
fn a_peer_whose_old_map_refuses_a_message_is_asked_whether_it_is_there() {
    let (mut pair, [from, to]) = unmet();
    pair.sides[1].node.set_recv_buffer(to, 2000).expect("open");
    let try_to_send = |pair: &mut Pair| {
        let payload = [IoSlice::new(&[7; 1000])];
        let msg = SendMsg { name: Some(addr(PORT_B)), payload: &payload, ..SendMsg::default() };
        let sent = pair.sides[0].node.send(pair.now, from, &msg).map(drop);
        pair.run();
        sent
    };
    let is_refused = (0..10).any(|_| try_to_send(&mut pair) == Err(Error::Congested));
    assert!(is_refused, "nobody reads");
    // The machine fails. Its device may acknowledge for a while.
    pair.links = None;
    let asked = |pair: &Pair| pair.sides[0].node.counters().ib_ack_sent;
    let before = asked(&pair);
    for (passed, more) in [(9_000, 0), (1_500, 1), (0, 1), (9_000, 1), (1_500, 2)] {
        pair.pass(passed);
        assert_eq!(try_to_send(&mut pair), Err(Error::Congested));
        assert_eq!(asked(&pair), before + more);
    }
}

// tests [OBS-3], [OBS-4]
#[test]
fn the_tables_of_rdma_are_those_of_a_kernel() {
    let (mut pair, [from, _]) = unmet();
    let table = |pair: &Pair, option| pair.sides[0].node.info_option(option).expect("a table");
    assert_eq!(table(&pair, 10_008).item_size, 68, "the size is told without connections, too");
    send(&mut pair, 0, from, b"message");
    let down = table(&pair, 10_008).bytes;
    let mut wanted = vec![10, 0, 0, 1, 10, 0, 0, 2];
    wanted.resize(68, 0);
    assert_eq!(down, wanted, "it connects");
    pair.run();
    let mapped = |last| [&[0; 10][..], &[0xff, 0xff, 10, 0, 0, last]].concat();
    let rest = {
        let numbers = [256_u32, 1024, 8, 4096, 257].map(u32::to_ne_bytes).concat();
        [mapped(1), mapped(2), numbers, vec![0; 8]].concat()
    };
    let up = table(&pair, 10_008).bytes;
    assert_eq!(up, [&[10, 0, 0, 1, 10, 0, 0, 2][..], &rest].concat());
    let v6 = table(&pair, 10_017);
    assert_eq!((v6.item_size, v6.bytes), (92, [mapped(1), mapped(2), rest].concat()));
    let connections = table(&pair, 10_001).bytes;
    assert_eq!(connections[24..40], *b"infiniband\0\0\0\0\0\0");
    let info = pair.sides[0].node.info_without_messages();
    let [connection] = &info.connections[..] else { panic!("one connection") };
    assert_eq!((connection.flags, connection.tos), (4, 0));
    assert!(connection.sent_bytes >= 48 + 7, "{connection:?}");
    assert!(connection.received_bytes >= 48, "{connection:?}");
}

// tests [OBS-4], [R-1001]
#[test]
fn without_rdma_there_are_no_tables_of_it() {
    let node = Node::new(Config::default());
    for option in [10_008, 10_017] {
        assert_eq!(node.info_option(option), Err(Error::NoSuchOption));
    }
    assert!(node.info().rdma.is_none());
}

// tests [SAFE-18]
#[test]
fn connecting_again_does_not_get_round_the_limit() {
    let mut config = Config::default();
    config.sysctl.ib_max_recv_wr = 16;
    config.limits.recv_bytes_per_peer = 10_000;
    let mut pair = Pair::with(config);
    let [from, to] = sockets(&mut pair);
    for at in 0..200 {
        send(&mut pair, 0, from, &pattern(4096, at));
    }
    let limit = 10_000 + 17 * (4096 + 128);
    for _ in 0..50 {
        pair.pass(20);
        let held = pair.sides[1].node.memory_held();
        assert!(held <= limit, "{held} bytes");
        pair.cut();
    }
    for at in 0..200 {
        let came = (0..3000).find_map(|_| {
            pair.pass(1);
            recv(&mut pair, 1, to)
        });
        assert!(came == Some(pattern(4096, at)), "message {at}");
    }
}

// tests [IB-4], [IB-27]
#[test]
fn each_type_of_service_has_a_connection_of_its_own() {
    let (mut pair, [from, to]) = unmet();
    let node = &mut pair.sides[0].node;
    let other = node.socket().expect("room");
    node.set_tos(other, 0x28).expect("not used yet");
    assert_eq!((node.tos(other), node.set_tos(other, 1)), (Ok(0x28), Err(Error::BadValue)));
    node.bind(other, addr("10.0.0.1:4010")).expect("a free port");
    send(&mut pair, 0, from, b"0");
    send(&mut pair, 0, other, b"0x28");
    let node = &mut pair.sides[0].node;
    assert_eq!(node.set_tos(from, 1), Err(Error::BadValue), "it was used");
    pair.sides[0].collect();
    let shapes = pair.sides[0].connects.iter().map(|(.., shape)| shape);
    let told: Vec<_> = shapes.map(|shape| (shape.tos, shape.private_data[12])).collect();
    assert_eq!(told, [(0, 0), (0x28, 0x28)]);
    // The peer answers on the connection of each.
    for _ in 0..2 {
        let Some((link, local, mut remote, shape)) = pair.sides[0].connects.pop_front() else {
            panic!("two connections")
        };
        remote.set_port(18_634);
        let now = pair.now;
        let data = shape.private_data;
        let accept = pair.sides[1].node.handle_rdma_request(now, remote, local, &data);
        let accept = accept.expect("accepted");
        assert_eq!((accept.shape.tos, accept.shape.private_data[12]), (shape.tos, shape.tos));
        let answer = accept.shape.private_data;
        pair.sides[1].node.handle_rdma_established(now, accept.link, None);
        pair.sides[0].node.handle_rdma_established(now, link, Some(&answer));
        let frames = pair.sides[0].frames(now, link);
        pair.sides[1].take(now, accept.link, &frames);
    }
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"0"[..]));
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"0x28"[..]));
}

#[test]
fn many_connections_share_the_memory_of_frames() {
    let mut config = Config::default();
    config.limits.recv_bytes_total = 64 << 20;
    let mut side = Side::new(crate::support::A, config);
    let mut memory = Vec::new();
    for peer in 2..=250 {
        let remote = addr(&format!("10.0.0.{peer}:1000"));
        let data = ConnectData::new(remote.ip(), ip(crate::support::A), Version::V3_1);
        let now = Instant::default();
        let local = addr("10.0.0.1:18634");
        let accept = side.node.handle_rdma_request(now, local, remote, &data.to_bytes());
        let shape = accept.expect("accepted").shape;
        memory.push((shape.sends, shape.receives, shape.frame));
    }
    assert_eq!(memory[0], (256, 1024, 4144));
    assert_eq!(memory[10], (256, 368, 4144));
    assert_eq!(memory.last(), Some(&(130, 64, 4144)));
}

// tests [OBS-2]
#[test]
fn what_happens_over_rdma_is_counted() {
    let mut config = Config::default();
    config.sysctl.ib_flow_control = 1;
    let mut pair = Pair::with(config);
    let [from, _] = sockets(&mut pair);
    for at in 0..40 {
        send(&mut pair, 0, from, &pattern(5000, at));
        pair.run();
    }
    let [sender, receiver] = [0, 1].map(|side| pair.sides[side].node.counters());
    assert!(sender.ib_tx_cq_event >= 40 && receiver.ib_rx_cq_event >= 40);
    assert_eq!(receiver.ib_rx_refill_from_cq, receiver.ib_rx_cq_event, "posted again each time");
    assert!(receiver.ib_tx_credit_updates > 0);
    assert_eq!(receiver.ib_tx_credit_updates, sender.ib_rx_credit_updates);
}

// tests: its account is given back at once, and its bytes as soon as nobody needs them
#[test]
fn what_is_cancelled_while_it_is_sent_takes_no_memory_afterwards() {
    let mut config = Config::default();
    config.sysctl.ib_flow_control = 0;
    let mut pair = Pair::with(config);
    let [a, _] = sockets(&mut pair);
    send(&mut pair, 0, a, b"first");
    pair.run();
    let now = pair.now;
    let link = pair.links.expect("they are connected")[0];
    let post = |node: &mut Node, max| {
        let mut last = None;
        node.poll_rdma_requests(now, link, max, |request, _| match request {
            RdmaRequest::Frame(frame) => last = Some(frame.id),
            RdmaRequest::Work(_) => {}
        });
        node.handle_rdma_posted(now, link);
        last
    };
    // The peer acknowledges none of them.
    for round in 0..20 {
        send(&mut pair, 0, a, &[1; 60_000]);
        let node = &mut pair.sides[0].node;
        assert!(post(node, 1).is_some(), "round {round}");
        node.cancel_all(now, a).expect("bound");
        assert_eq!(node.outstanding(a).expect("bound").len(), 1, "it is being sent");
        let last = post(node, usize::MAX).expect("the rest of it");
        node.handle_rdma_sent(now, link, last);
        node.check_invariants();
        assert_eq!(node.outstanding(a).expect("bound"), [], "round {round}");
        assert!(node.send_memory().accounted < 1000, "round {round}");
    }
}

// tests [IB-112]: the peer ends, and knows only that its farewell is complete
#[test]
fn a_farewell_counts_on_a_connection_that_is_being_dropped() {
    let (mut pair, [from, to]) = unmet();
    for payload in [b"first", b"taken"] {
        send(&mut pair, 0, from, payload);
        pair.run();
        assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&payload[..]));
    }
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(1), "not acknowledged yet");
    let links = pair.links.expect("a connection");
    let now = pair.now;
    pair.sides[1].node.end(now);
    pair.sides[1].collect();
    let farewell = pair.sides[1].frames(now, links[1]);
    // The program of the sender drops its connections; the queue pair ends a little later.
    let sender = &mut pair.sides[0].node;
    assert_eq!(sender.drop_links(now, None), 1);
    let mut comes = |header| {
        let frame = RdmaFrame { bytes: 48, header, start: 0 };
        sender.handle_rdma_frames(now, links[0], &RxBuf::from_vec(Vec::new()), &[frame]);
        let ended = |output: &Output| matches!(output, Output::Event(Event::PeerEnded { .. }));
        let told = std::iter::from_fn(|| sender.poll_output()).filter(ended).count();
        (sender.send_messages(from), told)
    };
    let mut torn = farewell[0].header;
    torn[9] ^= 1;
    assert_eq!(comes(torn), (Ok(1), 0), "a wrong checksum");
    assert_eq!(comes(farewell[0].header), (Ok(0), 1));
}

// tests [IB-112]: what comes then is neither taken nor acknowledged
#[test]
fn a_message_that_comes_on_a_connection_that_is_being_dropped_comes_again() {
    let (mut pair, [from, to]) = met();
    assert!(recv(&mut pair, 1, to).is_some());
    let links = pair.links.expect("a connection");
    let now = pair.now;
    send(&mut pair, 0, from, b"second");
    let frames = pair.sides[0].frames(now, links[0]);
    assert_eq!(pair.sides[1].node.drop_links(now, None), 1);
    pair.sides[1].take(now, links[1], &frames);
    assert_eq!(recv(&mut pair, 1, to), None);
    pair.run();
    pair.pass(2000);
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"second"[..]));
    assert_eq!(recv(&mut pair, 1, to), None);
}

// tests [IB-112] [IB-39]: frames are quicker than the event that tells of the connection
#[test]
fn what_was_taken_before_a_connection_was_established_is_told_on_the_next() {
    let (mut pair, [from, to]) = unmet();
    send(&mut pair, 0, from, b"taken");
    let now = pair.now;
    pair.sides.iter_mut().for_each(Side::collect);
    let (ours, local, remote, shape) = pair.sides[0].connects.pop_front().expect("it connects");
    let data = shape.private_data;
    let taker = &mut pair.sides[1].node;
    let accept = taker.handle_rdma_request(now, remote, local, &data).expect("accepted");
    let data = accept.shape.private_data;
    pair.sides[0].node.handle_rdma_established(now, ours, Some(&data));
    let frames = pair.sides[0].frames(now, ours);
    pair.sides[1].take(now, accept.link, &frames);
    assert_eq!(recv(&mut pair, 1, to).as_deref(), Some(&b"taken"[..]));
    // The peer drops it, and this node ends.
    pair.sides[1].node.handle_rdma_closed(now, accept.link, CloseReason::Eof);
    pair.sides[1].node.end(now);
    assert!(!pair.sides[1].node.is_told());
    pair.sides[0].node.drop_links(now, None);
    pair.run();
    pair.pass(100);
    assert_eq!(pair.sides[0].node.send_messages(from), Ok(0));
    assert!(pair.sides[1].node.is_told());
}
