//! RDMA operations and announced memory.

use super::*;

const COOKIE: u64 = 0x64_0000_0300;

fn op(access: RdmaAccess, token: u64) -> RdmaOp {
    let len = 8;
    RdmaOp {
        access,
        cookie: COOKIE,
        offset: 4,
        len,
        local: vec![RdmaPiece { addr: 4096, len: len as u32, lkey: 7 }],
        fence: false,
        silent: false,
        token,
        notify: true,
        hold: None,
    }
}

fn write(token: u64) -> RdmaOp {
    op(RdmaAccess::Write, token)
}

// tests [SAFE-10], [RDMA-2], [RDMA-11], [RDMA-32]
#[test]
fn lengths_and_addresses_that_overflow_are_refused() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let errno = |lab: &mut Lab, op: RdmaOp| {
        lab.send_with(socket, LOW, b"x", &[op]).map_or_else(|error| error.errno().0, |()| 0)
    };
    let good = write(1);
    let piece = RdmaPiece { addr: 0, len: u32::MAX, lkey: 7 };
    // Remote addresses: offset and the cookie's offset, and the length on top.
    for offset in [u64::MAX, u64::MAX - 0x64, u64::MAX - 0x64 - 7] {
        assert_eq!(errno(&mut lab, RdmaOp { offset, ..good.clone() }), 22, "{offset:#x}");
    }
    assert_eq!(errno(&mut lab, RdmaOp { offset: u64::MAX - 0x64 - 8, ..good.clone() }), 0);
    let cookie = u64::MAX;
    assert_eq!(errno(&mut lab, RdmaOp { cookie, offset: u64::MAX - 1, ..good.clone() }), 22);
    // Lengths: of one operation, of both, and of pieces that add up to more than 32 bits hold.
    assert_eq!(errno(&mut lab, RdmaOp { len: u64::MAX, ..good.clone() }), 90);
    assert_eq!(errno(&mut lab, RdmaOp { local: vec![piece; 1024], ..good.clone() }), 22);
    let ops = [RdmaOp { len: u64::MAX, ..good.clone() }, RdmaOp { len: 9, ..good.clone() }];
    let sent = lab.send_with(socket, LOW, b"x", &ops);
    assert_eq!(sent.map_err(|error| error.errno().0), Err(90), "their sum does not wrap");
    // Memory for peers.
    let node = &mut lab.side.node;
    for len in [(1 << 20) + 1, u64::from(u32::MAX) + 1, u64::MAX] {
        assert_eq!(node.check_region(socket, len).map_err(|error| error.errno().0), Err(90));
    }
    assert_eq!(node.check_region(socket, 0), Err(Error::BadValue));
}

// tests [SAFE-15], [RDMA-3], [RDMA-12]
#[test]
fn operations_need_a_socket_that_is_bound_to_an_address_on_rdma() {
    let mut lab = Lab::new();
    let node = &mut lab.side.node;
    let unbound = node.socket().expect("room");
    assert_eq!(node.check_region(unbound, 8), Err(Error::NotConnected));
    assert_eq!(node.add_region(unbound, 1, 8, None, false, 1), Err(Error::NotConnected));
    assert_eq!(node.free_region(unbound, 1), Err(Error::NotConnected));
    assert_eq!(node.free_region(unbound, 0), Err(Error::NotConnected));
    assert_eq!(lab.send_with(unbound, LOW, b"", &[write(1)]), Err(Error::NotConnected));
    let node = &mut lab.side.node;
    let tcp = node.socket().expect("room");
    node.set_transport(tcp, 2).expect("before bind");
    node.bind(tcp, SocketAddr::new(ip(NODE), 77)).expect("a free port");
    assert_eq!(node.check_region(tcp, 8), Err(Error::NotSupported));
    assert_eq!(node.add_region(tcp, 1, 8, None, false, 1), Err(Error::NotSupported));
    let gone = node.socket().expect("room");
    node.close(lab.now, gone);
    assert_eq!(node.check_region(gone, 8), Err(Error::BadSocket));
    assert_eq!(node.free_region(gone, 0), Err(Error::BadSocket));
}

// tests [SAFE-4], [RDMA-7], [RDMA-31]
#[test]
fn a_peer_releases_only_memory_for_one_use_of_the_socket_it_writes_to() {
    let mut lab = Lab::new();
    let [socket, other] = [lab.socket(PORT), lab.socket(PORT + 1)];
    let link = lab.connected(LOW);
    let node = &mut lab.side.node;
    node.add_region(socket, 0x300, 64, None, true, 1).expect("bound");
    node.add_region(socket, 0x301, 64, None, false, 2).expect("bound");
    node.add_region(other, 0x302, 64, None, true, 3).expect("bound");
    let used = |sequence, rkey| {
        let mut frame = message(sequence, b"used");
        frame.header.ext = RdmaExt::Op(rkey).emit();
        frame
    };
    // Not for one use, of another socket, never given out, none.
    for (at, rkey) in [0x301, 0x302, 0x777, u32::MAX, 0].into_iter().enumerate() {
        lab.feed(link, &[used(at as u64 + 1, rkey)]);
        assert!(lab.side.used.is_empty(), "{rkey:#x}");
    }
    // What is repeated was used before.
    lab.feed(link, &[used(10, 0x300), used(11, 0x300), again(used(11, 0x300))]);
    assert_eq!((&lab.side.used[..], &lab.side.released[..]), (&[1][..], &[][..]));
    lab.pass(Duration::from_secs(6));
    assert_eq!(lab.side.released, [1]);
    assert_eq!(lab.side.node.free_region(socket, 0x300), Err(Error::BadValue), "stale");
    assert_eq!(lab.side.node.free_region(socket, 0x302), Err(Error::BadValue), "of another");
    assert_eq!(lab.side.node.free_region(other, 0x302), Ok(()));
    // A key that was freed may not be announced, nor one of another socket.
    for cookie in [0x300, 0x302] {
        let sent = announce(&mut lab, socket, LOW, cookie);
        assert_eq!(sent, Err(Error::BadControl), "{cookie:#x}");
    }
    // Extensions that reach past the area, of unknown types, twice.
    for ext in [
        [2; 16],
        [3; 16],
        [0xff; 16],
        [5; 16],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 2],
    ] {
        let mut frame = message(20, b"x");
        frame.header.ext = ext;
        lab.feed(link, &[frame]);
        assert!(!lab.is_closed(link));
    }
    lab.side.node.close(lab.now, socket);
    lab.collect();
    assert_eq!(lab.side.released, [1, 3, 2]);
}

fn announce(lab: &mut Lab, socket: SocketId, to: &str, cookie: u64) -> Result<(), Error> {
    let control = [SendControl::RdmaDest(cookie)];
    let payload = [IoSlice::new(b"x")];
    let name = Some(SocketAddr::new(ip(to), 9));
    let msg = SendMsg { name, payload: &payload, control: &control, ..SendMsg::default() };
    lab.side.node.send(lab.now, socket, &msg).map(drop)
}

// tests [SAFE-12], [RMR-8], [RDMA-31]
#[test]
fn memory_for_one_peer_is_announced_to_it_and_released_by_it_alone() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let [friend, other] = [lab.connected(LOW), lab.connected(HIGH)];
    lab.side.node.add_region(socket, 0x300, 64, Some(ip(LOW)), true, 1).expect("bound");
    assert_eq!(announce(&mut lab, socket, HIGH, 0x300), Err(Error::BadControl));
    assert_eq!(announce(&mut lab, socket, LOW, 0x300), Ok(()));
    let mut used = message(1, b"used");
    used.header.ext = RdmaExt::Op(0x300).emit();
    lab.feed(other, &[used.clone()]);
    assert!(lab.side.used.is_empty(), "another peer cannot have used it");
    lab.feed(friend, &[used]);
    assert_eq!(lab.side.used, [1]);
}

// tests [RMR-9], [RDMA-31], [RDMA-6]
#[test]
fn memory_that_was_used_stays_until_no_read_of_it_can_be_under_way() {
    let mut lab = Lab::new();
    let [socket, other] = [lab.socket(PORT), lab.socket(PORT + 1)];
    let link = lab.connected(LOW);
    let mut sequence = 0;
    let mut used = |lab: &mut Lab, rkey: u32, dport| {
        let of = if dport == PORT { socket } else { other };
        lab.side.node.add_region(of, rkey, 64, None, true, rkey.into()).expect("room");
        sequence += 1;
        let mut frame = message(sequence, b"");
        frame.header.ext = RdmaExt::Op(rkey).emit();
        frame.header.dport = dport;
        lab.feed(link, &[frame]);
    };
    used(&mut lab, 1, PORT);
    lab.pass(Duration::from_secs(3));
    used(&mut lab, 2, PORT);
    used(&mut lab, 3, PORT + 1);
    assert_eq!((&lab.side.used[..], &lab.side.released[..]), (&[1, 2, 3][..], &[][..]));
    for cookie in [1, 2] {
        assert_eq!(lab.side.node.free_region(socket, cookie), Err(Error::BadValue));
    }
    lab.pass(Duration::from_secs(3));
    assert_eq!(lab.side.released, [1]);
    // Not longer than its socket.
    lab.side.node.close(lab.now, other);
    lab.collect();
    assert_eq!(lab.side.released, [1, 3]);
    lab.pass(Duration::from_secs(3));
    assert_eq!(lab.side.released, [1, 3, 2]);
    // Nor many at once.
    lab.side.released.clear();
    for rkey in 10..10 + 5000 {
        used(&mut lab, rkey, PORT);
        let _ = lab.recv(socket);
    }
    assert_eq!(lab.side.released, (10..10 + 5000 - 4096).collect::<Vec<_>>());
    lab.pass(Duration::from_secs(6));
    assert_eq!(lab.side.released.len(), 5000);
}

// tests [RMR-2]
#[test]
fn the_number_of_regions_is_limited() {
    let limits = Limits { rdma_regions: 3, ..Limits::default() };
    let mut lab = Lab::with(Config { limits, ..Config::default() });
    let [socket, other] = [lab.socket(PORT), lab.socket(PORT + 1)];
    let depleted = |lab: &Lab| {
        ["ib_rdma_mr_8k_pool_depleted", "ib_rdma_mr_1m_pool_depleted"].map(|name| {
            lab.side.node.counters().iter().find(|(n, _)| *n == name).expect("a counter").1
        })
    };
    for (at, socket) in [(1, socket), (2, other), (3, other)] {
        let node = &mut lab.side.node;
        node.add_region(socket, 0x300 + at, 64, None, true, at.into()).expect("room");
    }
    assert_eq!(depleted(&lab), [0, 0]);
    let node = &mut lab.side.node;
    assert_eq!(node.check_region(socket, 8192), Err(Error::TooManyRegions));
    assert_eq!(node.check_region(other, 8193), Err(Error::TooManyRegions));
    assert_eq!(node.add_region(socket, 0x304, 64, None, true, 4), Err(Error::TooManyRegions));
    assert_eq!(Error::TooManyRegions.errno().0, 11);
    assert_eq!(depleted(&lab), [2, 1]);
    // Each way of release makes room: by the program, by use, and by the end of a socket.
    let node = &mut lab.side.node;
    node.free_region(socket, 0x301).expect("registered");
    node.add_region(socket, 0x305, 64, None, true, 5).expect("room");
    node.check_region(socket, 64).expect_err("full again");
    let link = lab.connected(LOW);
    let mut used = message(1, b"used");
    used.header.ext = RdmaExt::Op(0x305).emit();
    lab.feed(link, &[used]);
    lab.side.node.add_region(socket, 0x306, 64, None, true, 6).expect("room");
    lab.side.node.check_region(socket, 64).expect_err("full again");
    lab.side.node.close(lab.now, other);
    lab.collect();
    assert_eq!((&lab.side.used[..], &lab.side.released[..]), (&[5][..], &[1, 2, 3][..]));
    lab.side.node.add_region(socket, 0x307, 64, None, true, 7).expect("room");
    lab.side.node.add_region(socket, 0x308, 64, None, true, 8).expect("room");
    lab.side.node.check_region(socket, 64).expect_err("full again");
}

// tests [RDMA-27], [RDMA-1]
#[test]
fn a_cookie_of_zero_is_not_told() {
    let (mut lab, socket, link) = with_peer();
    let dest = |sequence, rkey, offset| {
        let mut frame = message(sequence, b"x");
        frame.header.ext = RdmaExt::Dest(RdmaDest { rkey, offset }).emit();
        frame
    };
    lab.feed(link, &[dest(1, 0, 0), dest(2, 0x1122_3344, 0x1f8)]);
    let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
    let control =
        |lab: &mut Lab| lab.side.node.recv(lab.now, socket, opts).expect("a message").control;
    assert_eq!(control(&mut lab), []);
    assert_eq!(control(&mut lab), [Control::RdmaDest(0x0000_01f8_1122_3344)]);
}

// tests [SAFE-8], [SAFE-16]
#[test]
fn memory_that_an_application_keeps_does_not_hold_up_the_next_connection() {
    let (mut lab, socket, link) = with_peer();
    lab.side.node.add_region(socket, 0x300, 64, None, false, 1).expect("bound");
    lab.pass(Duration::from_secs(1));
    lab.closed(link);
    assert!(lab.side.released.is_empty(), "it belongs to the socket, not to the connection");
    lab.pass(Duration::from_millis(1));
    let (link, ..) = lab.side.connects.pop_front().expect("the next one is made at once");
    lab.side.node.handle_rdma_established(lab.now, link, None);
    lab.collect();
    let mut used = message(1, b"used");
    used.header.ext = RdmaExt::Op(0x300).emit();
    lab.feed(link, &[used]);
    assert_eq!(lab.recv(socket).as_deref(), Some(&b"used"[..]));
    assert_eq!(lab.side.node.free_region(socket, 0x300), Ok(()));
}

/// What may happen to an operation that is posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Acknowledged,
    Completed,
    Failed,
    Cancelled,
    Cut,
    Closed,
}

// tests [SAFE-7], [SAFE-11], [RDMA-21], [RDMA-22], [IB-97], [IB-98], [IB-100], [ATOM-8]
#[test]
fn the_end_of_an_operation_is_told_exactly_once_in_every_order() {
    use End::{Acknowledged, Cancelled, Closed, Completed, Cut, Failed};
    let ends = [Acknowledged, Completed, Failed, Cancelled, Cut, Closed];
    let kinds = [
        RdmaAccess::Write,
        RdmaAccess::Read,
        RdmaAccess::FetchAdd(1),
        RdmaAccess::CompareSwap { compare: 1, swap: 2 },
    ];
    let mut orders = vec![Vec::new()];
    for _ in 0..4 {
        let longer = orders.iter().flat_map(|order: &Vec<End>| {
            let next = ends.iter().filter(|end| !order.contains(end));
            next.map(|end| order.iter().copied().chain([*end]).collect())
        });
        orders = longer.collect::<Vec<Vec<End>>>();
    }
    for (order, access) in orders.iter().flat_map(|order| kinds.map(|kind| (order, kind))) {
        for silent in [false, true] {
            end_in_order(order, access, silent);
        }
    }
}

fn end_in_order(order: &[End], access: RdmaAccess, silent: bool) {
    let (mut lab, socket, link) = with_peer();
    let hold = std::sync::Arc::new(());
    let op = RdmaOp {
        silent,
        hold: Some(bowline_rds::RdmaHold(std::sync::Arc::clone(&hold) as _)),
        ..op(access, 5)
    };
    let payload: &[u8] = if silent { b"" } else { b"x" };
    lab.send_with(socket, LOW, payload, &[op]).expect("sent");
    lab.posted(link);
    let work = lab.side.works.pop().expect("posted").id;
    let (mut cut, mut closed) = (false, false);
    let mut told = Vec::new();
    for end in order {
        let now = lab.now;
        let node = &mut lab.side.node;
        match end {
            End::Acknowledged => lab.feed(link, &[ack(1)]),
            End::Completed => node.handle_rdma_sent(now, link, work),
            End::Failed => node.handle_rdma_failed(now, link, work, RdmaStatus::RemoteError),
            End::Cancelled if !closed => {
                node.cancel_sent_to(now, socket, SocketAddr::new(ip(LOW), 9)).expect("bound");
            }
            End::Cancelled => {}
            End::Cut => {
                cut = true;
                lab.closed(link);
            }
            End::Closed => {
                closed = true;
                node.close(now, socket);
            }
        }
        lab.collect();
        let at = format!("{order:?} at {end:?}, {access:?}, silent {silent}");
        if !closed {
            told.extend(lab.told(socket));
        }
        let over = cut
            || order.iter().take_while(|e| *e != end).chain([end]).any(|e| *e == End::Completed);
        assert_eq!(std::sync::Arc::strong_count(&hold) == 1, over, "memory is in use: {at}");
        assert!(told.len() <= 1, "{at}: {told:?}");
        if over && !closed {
            assert_eq!(told.len(), 1, "{at}: {told:?}");
        }
    }
    if !cut {
        lab.closed(link);
    }
    if !closed {
        told.extend(lab.told(socket));
        assert!(told.len() == 1 && told[0].0 == 5, "{order:?}: {told:?}");
        assert_eq!(lab.side.node.send_messages(socket), Ok(0), "{order:?}");
        lab.side.node.close(lab.now, socket);
    }
    lab.collect();
    assert_eq!(std::sync::Arc::strong_count(&hold), 1, "{order:?}");
    // It is never posted again.
    let next = lab.connected(LOW);
    lab.frames(next);
    assert!(lab.side.works.is_empty(), "{order:?}");
}

// tests [SAFE-6], [IB-97], [IB-98], [RDMA-18]
#[test]
fn operations_are_not_repeated_however_often_connections_end() {
    let (mut lab, socket, mut link) = with_peer();
    for (token, access) in [RdmaAccess::FetchAdd(1), RdmaAccess::Write].into_iter().enumerate() {
        lab.send_with(socket, LOW, b"with", &[op(access, token as u64)]).expect("sent");
        lab.send(socket, LOW, b"plain");
    }
    for round in 0..4 {
        let frames = headers(&lab.posted(link));
        assert_eq!(lab.side.works.len(), 2, "round {round}");
        let plain = frames.iter().filter(|header| header.sequence > 0 && header.len == 5).count();
        let with = frames.iter().filter(|header| header.len == 4).count();
        assert_eq!((plain, with), (2, if round == 0 { 2 } else { 0 }), "round {round}");
        lab.closed(link);
        link = lab.request(LOW).expect("accepted").link;
        lab.up(link);
    }
    let mut told = lab.told(socket);
    told.sort_by_key(|(token, _)| *token);
    assert_eq!(told, [(0, RdmaStatus::Dropped), (1, RdmaStatus::Dropped)]);
}

// tests [IB-97], [RDMA-18], [RDMA-22]
#[test]
fn operations_end_with_their_process_and_what_became_of_them_is_told_by_the_next() {
    let (mut lab, socket, link) = with_peer();
    lab.side.node.add_region(socket, 0x300, 64, None, false, 1).expect("bound");
    lab.send_with(socket, LOW, b"done", &[write(1)]).expect("sent");
    let done = lab.posted(link);
    let work = lab.side.works.pop().expect("posted").id;
    lab.side.node.handle_rdma_sent(lab.now, link, work);
    lab.complete(link, &done);
    lab.feed(link, &[ack(1)]);
    // One is under way, and one to a peer that is not there waits, before and after others.
    lab.send_with(socket, LOW, b"under way", &[write(2)]).expect("sent");
    lab.posted(link);
    lab.send(socket, LOW, b"plain");
    for (token, payload) in [(3, b"one"), (4, b"two")] {
        lab.send(socket, HIGH, b"plain");
        lab.send_with(socket, HIGH, payload, &[write(token)]).expect("queued");
    }
    let mut saved = Vec::new();
    lab.side.node.save(lab.now, &mut saved).expect("memory");
    let config = lab.side.node.config().clone();
    lab.side = Side::new(NODE, Config::default());
    lab.side.node = Node::resume(config, lab.now, &*saved).expect("what was saved");
    lab.side.node.set_rdma_addrs([ip(NODE)]);
    lab.collect();
    let [success, dropped] = [RdmaStatus::Success, RdmaStatus::Dropped];
    let told = lab.told(socket);
    assert_eq!(told, [(1, success), (2, dropped), (3, dropped), (4, dropped)]);
    for (peer, plain) in [(LOW, 1), (HIGH, 2)] {
        let next = lab.request(peer).expect("accepted").link;
        lab.up(next);
        let sent = headers(&lab.frames(next));
        let count = |len| sent.iter().filter(|header| header.len == len).count();
        assert_eq!(
            (count(5), count(3) + count(9)),
            (plain, 0),
            "{peer}: none without its operation"
        );
    }
    assert!(lab.side.works.is_empty());
    assert_eq!(lab.side.node.free_region(socket, 0x300), Err(Error::BadValue), "it has ended");
    lab.side.node.close(lab.now, socket);
    lab.collect();
}

// tests [IB-88], [RDMA-32]
#[test]
fn an_operation_is_posted_with_all_its_requests_or_not_at_all() {
    let (mut lab, socket, link) = with_peer();
    let local = vec![RdmaPiece { addr: 0, len: 1024, lkey: 7 }; 1024];
    let largest = RdmaOp { local, len: 1 << 20, ..write(1) };
    for token in 1..=2 {
        let op = RdmaOp { token, ..largest.clone() };
        lab.send_with(socket, LOW, b"x", &[op, op_atomic(token + 10)]).expect("sent");
    }
    let frames = lab.posted(link);
    assert_eq!((lab.side.works.len(), frames.len()), (129, 1));
    assert!(lab.counter("ib_tx_ring_full") > 0);
    let works: Vec<_> = lab.side.works.drain(..).map(|work| work.id).collect();
    lab.side.ready.clear();
    lab.side.node.handle_rdma_sent(lab.now, link, works[128]);
    lab.collect();
    assert_eq!(lab.side.ready, [link]);
    let frames = lab.posted(link);
    assert_eq!((lab.side.works.len(), frames.len()), (129, 1));
}

fn op_atomic(token: u64) -> RdmaOp {
    op(RdmaAccess::FetchAdd(1), token)
}

// tests [ZC-2], [ZC-3], [ZC-5]
#[test]
fn the_cookie_of_a_zero_copy_send_comes_back_once_and_not_with_an_operation() {
    let (mut lab, socket, link) = with_peer();
    lab.side.node.set_zerocopy(socket, true).expect("open");
    let payload = [IoSlice::new(b"x")];
    let name = Some(SocketAddr::new(ip(LOW), 9));
    let control = [SendControl::ZcopyCookie(7)];
    let with = |control, rdma| SendMsg {
        name,
        payload: &payload,
        control,
        rdma,
        zerocopy: true,
        ..SendMsg::default()
    };
    let ops = [write(1)];
    let send = |lab: &mut Lab, control, rdma| {
        lab.side.node.send(lab.now, socket, &with(control, rdma)).map(drop)
    };
    assert_eq!(send(&mut lab, &control, &ops), Err(Error::BadControl));
    assert_eq!(send(&mut lab, &[], &[]), Err(Error::BadControl));
    assert_eq!(send(&mut lab, &control, &[]), Ok(()));
    assert_eq!(lab.frames(link).len(), 1);
    let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
    let told = |lab: &mut Lab| {
        let got = lab.side.node.recv(lab.now, socket, opts);
        got.map_or(Vec::new(), |got| got.control)
    };
    assert_eq!(told(&mut lab), []);
    lab.feed(link, &[ack(1), ack(1)]);
    assert_eq!(told(&mut lab), [Control::ZcopyCompletion(vec![7])]);
    assert_eq!(told(&mut lab), []);
}

// tests [RMR-11]
#[test]
fn operations_that_wait_and_ends_that_nobody_takes_are_bounded() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let untold = RdmaOp { notify: false, ..write(1) };
    let long = RdmaOp { local: vec![untold.local[0]; 1023], len: 1 << 20, ..untold.clone() };
    // Nobody is there to whom they could go. Messages without payload take no send buffer.
    let mut sent = 0;
    let refused = loop {
        match lab.send_with(socket, LOW, b"", std::slice::from_ref(&long)) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1_000, "no end");
    };
    assert_eq!((refused, sent), (Error::QueueFull, 64));
    lab.side.node.cancel_all(lab.now, socket).expect("a socket");
    lab.send_with(socket, LOW, b"", &[long]).expect("room again");
    // Each cancelled operation is told of.
    let told = write(7);
    for _ in 0..1 << 16 {
        lab.send_with(socket, LOW, b"", std::slice::from_ref(&told)).expect("room");
        lab.side.node.cancel_all(lab.now, socket).expect("a socket");
    }
    let sent = lab.send_with(socket, LOW, b"", std::slice::from_ref(&told));
    assert_eq!(sent.map_err(|error| (error, error.errno().0)), Err((Error::TooManyStatuses, 105)));
    lab.send_with(socket, LOW, b"", &[untold]).expect("nothing is told of this one");
    let opts = RecvOpts { want_control: true, ..RecvOpts::default() };
    lab.side.node.recv(lab.now, socket, opts).expect("ends");
    lab.send_with(socket, LOW, b"", &[told]).expect("room again");
}
