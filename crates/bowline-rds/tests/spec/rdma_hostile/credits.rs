//! Flow control by credits.

use super::*;

/// Settings with flow control and these numbers of requests.
fn controlled(receives: u32) -> Config {
    let mut config = Config::default();
    config.sysctl.ib_flow_control = 1;
    config.sysctl.ib_max_recv_wr = receives;
    config
}

// tests [IB-72], [IB-73], [IB-74], [IB-75], [IB-77], [IB-78], [SAFE-9]
#[test]
fn with_flow_control_a_long_exchange_goes_on_and_no_receive_is_missing() {
    for receives in [8, 9, 16, 17, 1024] {
        let mut pair = Pair::with(controlled(receives));
        let sockets = [(0, "10.0.0.1:4000"), (1, "10.0.0.2:4001")].map(|(at, name)| {
            let node = &mut pair.sides[at].node;
            let socket = node.socket().expect("room");
            node.bind(socket, addr(name)).expect("a free port");
            node.set_send_buffer(socket, 8 << 20).expect("open");
            node.set_recv_buffer(socket, 64 << 20).expect("open");
            socket
        });
        let payload = pattern(100_000);
        for _ in 0..20 {
            for (at, to) in [(0, "10.0.0.2:4001"), (1, "10.0.0.1:4000")] {
                let slices = [IoSlice::new(&payload)];
                let msg = SendMsg { name: Some(addr(to)), payload: &slices, ..SendMsg::default() };
                pair.sides[at].node.send(pair.now, sockets[at], &msg).expect("room");
            }
        }
        pair.run();
        for (at, socket) in sockets.into_iter().enumerate() {
            for message in 0..20 {
                let got = pair.sides[at].node.recv(pair.now, socket, RecvOpts::default());
                let got = got.unwrap_or_else(|_| panic!("{receives}: side {at}, {message}"));
                assert_eq!(got.data.map(|data| data.len()), Some(100_000));
            }
            assert!(pair.most[at] <= receives as usize, "{} of {receives}", pair.most[at]);
        }
    }
}

// tests [IB-73], [IB-74]
#[test]
fn with_flow_control_on_one_side_the_other_is_not_limited() {
    for switch in [[1, 0], [0, 1], [1, 2]] {
        let sides = [0, 1].map(|at| {
            let mut config = Config::default();
            config.sysctl.ib_flow_control = switch[at];
            config.sysctl.ib_max_recv_wr = 16;
            Side::new(["10.0.0.1", "10.0.0.2"][at], config)
        });
        let mut pair = Pair::of(sides);
        for (at, names) in
            [["10.0.0.1:40", "10.0.0.2:40"], ["10.0.0.2:41", "10.0.0.1:41"]].into_iter().enumerate()
        {
            let node = &mut pair.sides[at].node;
            let socket = node.socket().expect("room");
            node.bind(socket, addr(names[0])).expect("a free port");
            let (payload, name) = (pattern(100_000), Some(addr(names[1])));
            let slices = [IoSlice::new(&payload)];
            let msg = SendMsg { name, payload: &slices, ..SendMsg::default() };
            node.send(pair.now, socket, &msg).expect("room");
        }
        pair.run();
        for at in 0..2 {
            assert_eq!(
                pair.sides[at].node.counters().recv_drop_no_sock,
                1,
                "{switch:?}, side {at}"
            );
        }
    }
}

// tests [IB-75], [IB-76], [IB-77], [IB-78]
#[test]
fn credits_are_spent_one_a_frame_and_the_last_one_is_kept() {
    let mut lab = Lab::with(controlled(1024));
    let socket = lab.socket(PORT);
    let data = ConnectData { credit: 5, ..Lab::data(LOW) };
    let accept = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted");
    let answer = ConnectData::parse(&accept.shape.private_data, false).expect("a block");
    assert_eq!(answer.credit, 1024);
    let link = accept.link;
    lab.up(link);
    lab.send(socket, LOW, &pattern(5 * 4096));
    // Two of the map, two of the message; nothing is to be announced, so the last credit stays.
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 4);
    assert!(frames[3].signalled && frames[3].solicited, "where it stops");
    assert!(headers(&frames).iter().all(|header| header.credit == 0));
    assert!(lab.counter("ib_tx_throttle") > 0);
    // Receives are posted again: they may be announced with the last credit.
    lab.side.node.handle_rdma_receives_posted(link, 300);
    lab.collect();
    let frames = headers(&lab.frames(link));
    assert_eq!(frames.iter().map(|header| header.credit).collect::<Vec<_>>(), [255]);
    assert_eq!(frames[0].len, 5 * 4096, "the message goes on");
    // Without credits an acknowledgement waits.
    lab.feed(link, &[asking(message(1, b"x"))]);
    assert!(lab.frames(link).is_empty());
    lab.side.ready.clear();
    lab.feed(link, &[credits(10)]);
    assert_eq!(lab.side.ready, [link], "credits wake the sender");
    let frames = headers(&lab.frames(link));
    let told: Vec<_> = frames.iter().map(|h| (h.sequence, h.ack, h.credit)).collect();
    assert_eq!(told, [(1, 0, 45), (1, 0, 0), (0, 1, 0)]);
    // Sixteen posted receives are announced without being asked.
    lab.side.node.handle_rdma_receives_posted(link, 15);
    assert!(lab.frames(link).is_empty());
    lab.side.node.handle_rdma_receives_posted(link, 1);
    let frames = headers(&lab.frames(link));
    assert!(frames.len() == 1 && is_ack(&frames[0]) && frames[0].credit == 16);
    assert_eq!(lab.counter("ib_rx_credit_updates"), 1);
}

// tests [IB-79], [SAFE-9]
#[test]
fn more_credits_than_there_can_be_end_the_connection() {
    let mut lab = Lab::with(controlled(1024));
    let with = |credit| ConnectData { credit, ..Lab::data(LOW) }.to_bytes();
    for credit in [65_536, 1 << 20, u32::MAX] {
        assert!(lab.request_with(ip(LOW), &with(credit)).is_err());
    }
    assert_eq!(lab.counter("bl_peer_errors"), 3);
    let link = lab.request_with(ip(LOW), &with(65_000)).expect("accepted").link;
    lab.up(link);
    lab.feed(link, &[credits(255), credits(255)]);
    assert!(!lab.is_closed(link));
    lab.feed(link, &[credits(255)]);
    assert!(lab.is_closed(link));
    let told = Event::Misbehaved { remote: ip(LOW), what: Misbehaviour::Credits };
    assert!(lab.events.contains(&told));
    // In the answer to a request of this node.
    let mut lab = Lab::with(controlled(1024));
    let socket = lab.socket(PORT);
    lab.send(socket, LOW, b"x");
    let (link, _, _, shape) = lab.side.connects[0].clone();
    assert_eq!(ConnectData::parse(&shape.private_data, false).map(|data| data.credit), Some(1024));
    lab.side.node.handle_rdma_established(lab.now, link, Some(&with(u32::MAX)));
    lab.collect();
    assert!(lab.is_closed(link));
    // Without flow control all numbers are ignored [IB-73].
    let mut lab = Lab::new();
    let link = lab.request_with(ip(LOW), &with(u32::MAX)).expect("accepted").link;
    lab.up(link);
    lab.feed(link, &vec![credits(255); 1000]);
    assert!(!lab.is_closed(link));
    assert!(headers(&lab.frames(link)).iter().all(|header| header.credit == 0));
}

// tests [IB-80]
#[test]
fn who_announced_credits_goes_on_whatever_the_answer_is() {
    let mut lab = Lab::with(controlled(64));
    let socket = lab.socket(PORT);
    lab.send(socket, LOW, b"x");
    let (link, ..) = lab.side.connects[0].clone();
    lab.side.node.handle_rdma_established(lab.now, link, Some(&Lab::data(LOW).to_bytes()));
    lab.collect();
    assert_eq!(lab.frames(link).len(), 3);
    let mut announced = 0;
    for sequence in 0..50 {
        lab.feed(link, &[message(sequence, b"x")]);
        lab.side.node.handle_rdma_receives_posted(link, 1);
        announced += headers(&lab.frames(link)).iter().map(|h| u32::from(h.credit)).sum::<u32>();
    }
    assert_eq!(announced, 48);
}
