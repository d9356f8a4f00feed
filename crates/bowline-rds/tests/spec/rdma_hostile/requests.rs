//! Requests to connect, and peers that never finish a connection.

use super::*;

// tests [IB-18], [IB-19], [IB-116]
#[test]
fn version_3_1_is_accepted_and_no_other() {
    let with = |major, minor, minors| {
        let version = Version { major, minor };
        let data = ConnectData { version, minors, ..Lab::data(LOW) };
        let mut lab = Lab::new();
        let answer = lab.request_with(ip(LOW), &data.to_bytes()).ok()?.shape.private_data;
        let answer = ConnectData::parse(&answer, false).expect("a block");
        assert_eq!((answer.source, answer.destination), (ip(NODE), ip(LOW)));
        assert_eq!(answer.minors, 3);
        Some((answer.version.major, answer.version.minor))
    };
    for minors in [0, 1, 2, 3, 0xffff] {
        assert_eq!(with(3, 1, minors), Some((3, 1)), "whatever the mask is");
        assert_eq!(with(3, 0, minors), None);
        assert_eq!(with(3, 2, minors), None);
        assert_eq!(with(0, 0, minors), None, "a kernel would accept it");
        assert_eq!(with(0, 1, minors), None);
        assert_eq!(with(2, 1, minors), None);
        assert_eq!(with(5, 0, minors), None);
    }
    for minor in [0, 1, 9] {
        for minors in [0, 1, 2, 3, 4, 0xfffd] {
            assert_eq!(with(4, minor, minors), None, "a kernel would accept some");
        }
    }
}

// tests [IB-116]
#[test]
fn a_peer_that_proposes_version_4_falls_back_to_3_1() {
    let mut lab = Lab::new();
    let proposal = |version| ConnectData { version, ..Lab::data(LOW) }.to_bytes();
    let refused = lab.request_with(ip(LOW), &proposal(Version { major: 4, minor: 1 }));
    assert_eq!(refused.err(), Some([1, 0, 0, 0]));
    let why = |event: &Event| matches!(event, Event::Refused { why: Refusal::LaterVersion, .. });
    assert!(lab.events.iter().any(why));
    assert!(lab.request_with(ip(LOW), &proposal(Version::V3_1)).is_ok());
}

// tests [SAFE-5], [IB-13], [IB-16], [IB-18], [IB-22], [IB-29]
#[test]
fn a_request_with_other_addresses_than_its_own_is_refused() {
    let good = Lab::data(LOW);
    let v6: IpAddr = "fd00::1".parse().expect("an address");
    let v6_here: IpAddr = "fd00::2".parse().expect("an address");
    let mapped = |text: &str| match ip(text) {
        IpAddr::V4(v4) => IpAddr::V6(v4.to_ipv6_mapped()),
        v6 @ IpAddr::V6(_) => v6,
    };
    let cases = [
        ("another source", ConnectData { source: ip(HIGH), ..good }.to_bytes().to_vec()),
        ("another destination", ConnectData { destination: ip(HIGH), ..good }.to_bytes().to_vec()),
        ("turned round", ConnectData::new(ip(NODE), ip(LOW), Version::V3_1).to_bytes().to_vec()),
        ("of the other family", ConnectData::new(v6, v6_here, Version::V3_1).to_bytes().to_vec()),
        (
            "written as IPv6",
            ConnectData::new(mapped(LOW), mapped(NODE), Version::V3_1).to_bytes().to_vec(),
        ),
        ("nothing", Vec::new()),
        ("too little", good.to_bytes()[..31].to_vec()),
        ("zeroes", vec![0; 56]),
        ("ones", vec![0xff; 56]),
    ];
    let mut lab = Lab::new();
    let victim = lab.connected(HIGH);
    for (at, (what, bytes)) in cases.iter().enumerate() {
        assert_eq!(lab.request_with(ip(LOW), bytes), Err(RDMA_REJECT), "{what}");
        assert_eq!(lab.counter("bl_peer_errors"), at as u64 + 1, "{what}");
        let told = Event::Refused { remote: ip(LOW), why: Refusal::PrivateData };
        assert_eq!(lab.events.last(), Some(&told), "{what}");
    }
    assert!(!lab.is_closed(victim), "nobody's place is taken");
    // An address that the node does not serve over RDMA, and a request over IPv6 for one of IPv4.
    let data = ConnectData { destination: ip("10.0.0.7"), ..good }.to_bytes();
    let (local, remote) = (addr("10.0.0.7:18634"), addr("10.0.0.1:50000"));
    assert!(lab.side.node.handle_rdma_request(lab.now, local, remote, &data).is_err());
    assert!(lab.request_with(v6, &good.to_bytes()).is_err());
    // Zeroes may follow, and a kernel's reserved bytes may say anything.
    let mut long = good.to_bytes().to_vec();
    long.resize(196, 0);
    long[8 + 5..8 + 8].fill(0xee);
    assert!(lab.request_with(ip(LOW), &long).is_ok());
    // The integer of a refusal reads as at most 1 in both byte orders, or as a kernel's 1 [IB-23].
    assert_eq!(i32::from_le_bytes(RDMA_REJECT), 1);
}

// tests [IB-4]
#[test]
fn connections_of_another_type_of_service_are_others() {
    let (mut lab, socket, plain) = with_peer();
    let data = ConnectData { tos: 7, ..Lab::data(LOW) };
    let other = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted");
    assert_eq!(other.shape.tos, 7);
    lab.up(other.link);
    lab.feed(other.link, &[message(1, b"one")]);
    lab.feed(plain, &[message(1, b"two")]);
    lab.feed(other.link, &[raw(Header { len: u32::MAX, ..message(2, b"").header }, b"")]);
    assert!(lab.is_closed(other.link) && !lab.is_closed(plain));
    let got: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).collect();
    assert_eq!(got, [b"one", b"two"]);
}

/// The peer's machine was started anew, say.
// tests [IB-30], [IB-113], [SAFE-5]
#[test]
fn a_request_ends_a_connection_of_which_the_peer_knows_nothing_any_more() {
    let mut lab = Lab::new();
    let link = lab.connected(LOW);
    assert!(lab.request(LOW).is_err());
    lab.pass(Duration::from_millis(250));
    assert!(lab.posted(link).is_empty(), "the request may be older than the connection");
    assert!(lab.request(LOW).is_err());
    assert_eq!(lab.posted(link).len(), 1, "the peer is asked, and does not answer");
    lab.pass(Duration::from_millis(999));
    assert!(lab.request(LOW).is_err());
    assert!(!lab.is_closed(link));
    assert_eq!(lab.counter("ib_listen_closed_stale"), 0);
    lab.pass(Duration::from_millis(1));
    assert!(lab.is_closed(link));
    assert_eq!(lab.counter("ib_listen_closed_stale"), 1);
    assert!(lab.request(LOW).is_err(), "its requests are being flushed");
    assert_eq!(lab.counter("ib_connect_raced"), 1);
    assert_eq!(lab.side.closed.len(), 1, "it is ended once");
    lab.closed(link);
    assert!(lab.request(LOW).is_ok());
    assert!(lab.request(LOW).is_err(), "accepted, and not up yet");
}

/// Somebody sends requests in the name of a peer, which acknowledge all there is to acknowledge.
// tests [IB-111], [IB-113], [SAFE-5]
#[test]
fn forged_requests_neither_end_a_connection_nor_acknowledge() {
    for by_frame in [false, true] {
        let (mut lab, socket, link) = with_peer();
        lab.send(socket, LOW, b"on its way");
        assert_eq!(lab.frames(link).len(), 1);
        let forged = ConnectData { ack: u64::MAX, ..Lab::data(LOW) }.to_bytes();
        lab.pass(Duration::from_millis(250));
        for _ in 0..100 {
            assert!(lab.request_with(ip(LOW), &forged).is_err());
            lab.pass(Duration::from_millis(70));
            // The peer is there: its NIC answers, or something comes of it.
            let asked = lab.posted(link);
            if by_frame {
                lab.feed(link, &[ack(0)]);
            }
            lab.complete(link, &asked);
        }
        lab.pass(Duration::from_secs(3));
        assert!(!lab.is_closed(link));
        assert_eq!(lab.side.node.send_messages(socket), Ok(1));
        assert_eq!(lab.counter("ib_listen_closed_stale"), 0);
    }
}

/// What completes had been posted before the request came, and so may have been taken before the
/// peer lost the connection.
// tests [IB-113]
#[test]
fn only_what_was_posted_after_a_request_shows_that_the_peer_has_the_connection() {
    let (mut lab, socket, link) = with_peer();
    lab.pass(Duration::from_millis(250));
    lab.send(socket, LOW, b"before");
    let before = lab.posted(link);
    assert!(lab.request(LOW).is_err());
    assert_eq!(lab.posted(link).len(), 1);
    lab.complete(link, &before);
    lab.pass(Duration::from_secs(1));
    assert!(lab.is_closed(link));
}

/// A request in the name of a peer that is away does not change what the node knows of it.
// tests [IB-110], [IB-111]
#[test]
fn the_kind_of_a_peer_is_believed_when_its_request_is_proven() {
    for by_frame in [false, true] {
        let mut lab = Lab::with(Config { max_message: 4 << 20, ..Config::default() });
        let socket = lab.socket(PORT);
        lab.side.node.set_send_buffer(socket, 64 << 20).expect("open");
        let said = BowlineConnect { frame_kib: 4, max_message: 64 };
        let data = ConnectData { bowline: Some(said), ..Lab::data(LOW) };
        let link = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted").link;
        let long = pattern(3 << 20);
        let refused = lab.send_with(socket, LOW, &long, &[]);
        assert!(refused.is_err(), "its kind is not known: {refused:?}");
        if by_frame {
            lab.feed(link, &map(&[]));
        } else {
            lab.up(link);
        }
        lab.send(socket, LOW, &long);
    }
}

// tests [IB-30], [IB-31]
#[test]
fn of_two_that_connect_at_once_the_smaller_address_keeps_its_request() {
    for (peer, wins) in [(LOW, true), (HIGH, false)] {
        let mut lab = Lab::new();
        let socket = lab.socket(PORT);
        lab.send(socket, peer, b"connect");
        lab.pass(Duration::from_millis(1));
        let (own, ..) = lab.side.connects[0].clone();
        let answer = lab.request(peer);
        assert_eq!(answer.is_ok(), wins, "{peer}");
        assert_eq!(lab.is_closed(own), wins, "an attempt is given up at once");
        let link = answer.map_or(own, |accept| accept.link);
        // A late answer to what was given up means nothing.
        if wins {
            lab.side.node.handle_rdma_established(lab.now, own, Some(&[0; 196]));
            lab.closed(own);
        }
        lab.side.node.handle_rdma_established(lab.now, link, None);
        lab.collect();
        let sent = headers(&lab.frames(link));
        assert_eq!(sent.last().map(|header| header.len), Some(7), "{peer}");
    }
}

/// A peer's process ended, and this node asked nobody for a new connection. The peer's next process
/// does not wait until the CM repeats that request, after seconds.
// tests [IB-31]
#[test]
fn a_request_that_nobody_has_answered_does_not_keep_a_new_peer_out() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    lab.send(socket, HIGH, b"connect");
    lab.pass(Duration::from_millis(499));
    let (own, ..) = lab.side.connects[0].clone();
    assert!(lab.request(HIGH).is_err(), "it may have crossed the node's own");
    assert!(!lab.is_closed(own));
    lab.pass(Duration::from_millis(1));
    let link = lab.request(HIGH).expect("accepted").link;
    assert!(lab.is_closed(own));
    lab.up(link);
    let sent = headers(&lab.frames(link));
    assert_eq!(sent.last().map(|header| header.len), Some(7));
}

// tests [IB-20], [IB-21]
#[test]
fn an_answer_of_an_old_version_ends_the_attempt() {
    let v = |major, minor| Version { major, minor };
    let cases =
        [(v(3, 1), true), (v(4, 0), true), (v(4, 1), true), (v(0, 7), true), (v(9, 9), true)];
    for (version, taken) in cases.into_iter().chain([(v(3, 0), false), (v(1, 9), false)]) {
        let mut lab = Lab::new();
        let socket = lab.socket(PORT);
        lab.send(socket, LOW, b"x");
        let (link, _, _, RdmaShape { private_data, .. }) = lab.side.connects[0].clone();
        let asked = ConnectData::parse(&private_data, false).expect("a block");
        assert_eq!((asked.version, asked.minors, asked.ack, asked.credit), (v(3, 1), 3, 0, 0));
        let data = ConnectData { version, ..Lab::data(LOW) }.to_bytes();
        lab.side.node.handle_rdma_established(lab.now, link, Some(&data));
        lab.collect();
        assert_eq!(!lab.is_closed(link), taken, "{version:?}");
        assert_eq!(lab.frames(link).len(), if taken { 3 } else { 0 });
    }
}

// tests [IB-39]
#[test]
fn frames_that_come_before_the_connection_is_established_are_taken() {
    // The peer asked: its first frames overtake the RTU.
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let link = lab.request(HIGH).expect("accepted").link;
    lab.feed(link, &map(&[77]));
    lab.feed(link, &fragments(1, &pattern(5000))[..1]);
    lab.up(link);
    lab.feed(link, &fragments(1, &pattern(5000))[1..]);
    assert_eq!(lab.recv(socket), Some(pattern(5000)));
    // This node asked: the driver may take frames before the event that a REP has come.
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    lab.send(socket, HIGH, b"connect");
    let (link, ..) = lab.side.connects[0].clone();
    lab.feed(link, &map(&[77])[..1]);
    let data = Lab::data(HIGH).to_bytes();
    lab.side.node.handle_rdma_established(lab.now, link, Some(&data));
    lab.collect();
    lab.feed(link, &map(&[77])[1..]);
    lab.feed(link, &[asking(message(1, b"hello"))]);
    assert_eq!(lab.counter("cong_update_received"), 1);
    assert_eq!(lab.recv(socket).as_deref(), Some(&b"hello"[..]));
    assert!(!lab.is_closed(link));
}

// tests [IB-28], [IB-32]
#[test]
fn a_peer_that_never_finishes_a_connection_is_given_up() {
    let mut lab = Lab::new();
    let link = lab.request(LOW).expect("accepted").link;
    lab.pass(Duration::from_secs(9));
    assert!(!lab.is_closed(link));
    lab.pass(Duration::from_secs(2));
    assert!(lab.is_closed(link));
    lab.closed(link);
    assert!(lab.request(LOW).is_ok());
}

// tests [SAFE-18]
#[test]
fn thousands_of_strangers_take_a_bounded_number_of_places() {
    let mut config = Config::default();
    config.limits.peers_unproven = 50;
    config.limits.peers = 100;
    let mut lab = Lab::with(config);
    let socket = lab.socket(PORT);
    let friend = lab.connected(LOW);
    lab.feed(friend, &[message(1, b"first")]);
    for at in 0..3000_u32 {
        let from = IpAddr::from([10, 1, (at >> 8) as u8, at as u8]);
        let data = ConnectData::new(from, ip(NODE), Version::V3_1).to_bytes();
        let link = lab.request_with(from, &data).expect("the oldest stranger makes room").link;
        // Some finish the connection, some send a frame of a message that they never finish.
        if at % 3 != 0 {
            lab.up(link);
        }
        if at % 3 == 2 {
            lab.feed(link, &[raw(Header { len: 1 << 20, ..message(1, b"").header }, &[0])]);
        }
        if at % 256 == 0 {
            lab.pass(Duration::from_millis(1));
        }
    }
    assert!(lab.side.node.info().connections.len() <= 100);
    assert!(!lab.is_closed(friend));
    lab.feed(friend, &[message(2, b"second")]);
    let got: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).collect();
    assert_eq!(got, [&b"first"[..], b"second"]);
}

// tests [SAFE-14], [IB-6]
#[test]
fn a_node_does_not_connect_to_itself() {
    let mut lab = Lab::new();
    let [from, to] = [lab.socket(PORT), lab.socket(9)];
    lab.send(from, NODE, b"here");
    assert!(lab.side.connects.is_empty());
    assert_eq!(lab.recv(to).as_deref(), Some(&b"here"[..]));
    assert!(lab.request(NODE).is_err());
    assert_eq!(lab.events.last(), Some(&Event::Refused { remote: ip(NODE), why: Refusal::Local }));
}

// tests [IB-110]
#[test]
fn what_a_bowline_peer_says_of_itself_is_bounded_by_what_this_node_does() {
    for frame_kib in [0, 1, 4, 5, 8, 16, 17, 255] {
        let mut lab = Lab::with(Config { max_message: 4 << 20, ..Config::default() });
        lab.side.node.set_rdma_frame(16 << 10);
        let socket = lab.socket(PORT);
        lab.side.node.set_send_buffer(socket, 64 << 20).expect("open");
        let said = BowlineConnect { frame_kib, max_message: u16::MAX };
        let data = ConnectData { bowline: Some(said), ..Lab::data(LOW) };
        let accept = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted");
        let answer = ConnectData::parse(&accept.shape.private_data, false).expect("a block");
        assert_eq!(answer.bowline, Some(BowlineConnect { frame_kib: 16, max_message: 64 }));
        let (link, fragment) = (accept.link, said.fragment().clamp(4096, 16_336));
        lab.up(link);
        let payload = pattern(3 << 20);
        lab.send(socket, LOW, &payload);
        let mut frames = lab.frames(link);
        while frames.last().is_some_and(|last| !last.solicited) {
            frames.extend(lab.frames(link));
        }
        let (map, frames) = frames.split_at(8192_usize.div_ceil(fragment));
        assert_eq!(map.iter().map(|sent| sent.payload.len()).sum::<usize>(), 8192);
        let (last, full) = frames.split_last().expect("frames");
        assert!(full.iter().all(|sent| sent.payload.len() == fragment), "{frame_kib} KiB");
        assert!(last.payload.len() <= fragment);
        let sent: Vec<_> = frames.iter().flat_map(|sent| sent.payload.clone()).collect();
        assert!(sent == payload, "{frame_kib} KiB");
        // What comes has frames of the same length, and a limit of its own.
        let whole = Header { len: 20_000, ..message(1, b"").header };
        let parts = pattern(20_000);
        let parts: Vec<_> = parts.chunks(fragment).map(|part| raw(whole, part)).collect();
        lab.feed(link, &parts);
        assert_eq!(lab.recv(socket), Some(pattern(20_000)), "{frame_kib} KiB");
        lab.feed(link, &[raw(whole, &[7; 4095])]);
        assert!(lab.is_closed(link));
        lab.closed(link);
        let link = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted").link;
        lab.up(link);
        let long = Header { len: (4 << 20) + 1, ..message(2, b"").header };
        lab.feed(link, &[raw(long, &vec![7; fragment])]);
        assert!(lab.is_closed(link));
    }
    // One that says nothing is a kernel, and is told nothing.
    let mut lab = Lab::new();
    lab.side.node.set_rdma_frame(16 << 10);
    let accept = lab.request(LOW).expect("accepted");
    assert_eq!(
        ConnectData::parse(&accept.shape.private_data, false).expect("a block").bowline,
        None
    );
    lab.up(accept.link);
    assert_eq!(lab.frames(accept.link).len(), 2, "the map in a kernel's frames");
    lab.feed(accept.link, &[raw(Header { len: 16_000, ..message(1, b"").header }, &[7; 16_000])]);
    assert!(lab.is_closed(accept.link), "there is memory for it, and it is no kernel's frame");
}

/// A request in the name of an address where nobody lives: whoever sends it must not have the node
/// send more there.
// tests [IB-111]
#[test]
fn a_peer_that_only_asked_is_not_dialled() {
    let mut lab = Lab::new();
    let link = lab.request(LOW).expect("accepted").link;
    lab.pass(Duration::from_secs(10));
    assert!(lab.is_closed(link), "its RTU does not come");
    lab.closed(link);
    assert_no_attempts(&mut lab, 600);

    // With something to send to it, it is a peer like others.
    let socket = lab.socket(PORT);
    lab.send(socket, LOW, b"wanted");
    assert_eq!(lab.side.connects.len(), 1);
}

/// A peer whose RTU or first frame has come is there, and both sides connect again.
// tests [IB-111] [IB-5]
#[test]
fn a_peer_that_is_there_is_dialled() {
    for by_frame in [false, true] {
        let mut lab = Lab::new();
        let link = lab.request(LOW).expect("accepted").link;
        if by_frame {
            lab.feed(link, &[ack(0)]);
        } else {
            lab.up(link);
        }
        lab.closed(link);
        lab.pass(Duration::from_secs(1));
        assert_eq!(lab.side.connects.len(), 1, "{by_frame}");
    }
}

/// Every one of a thousand addresses is asked for in vain, again and again.
// tests [IB-111]
#[test]
fn forged_requests_draw_no_attempts_to_connect() {
    let mut lab = Lab::new();
    for round in 0..3 {
        for n in 0..1000_u16 {
            let [high, low] = n.to_be_bytes();
            let from = format!("10.9.{high}.{low}");
            if let Ok(accept) = lab.request(&from) {
                lab.pass(Duration::from_millis(1));
                lab.closed(accept.link);
            }
        }
        println!("round {round}");
        assert_no_attempts(&mut lab, 60);
    }
}

/// Checks that the node connects to nobody for so many seconds. An attempt lasts for 10 s.
fn assert_no_attempts(lab: &mut Lab, seconds: u64) {
    for second in 0..seconds {
        lab.pass(Duration::from_secs(1));
        assert!(lab.side.connects.is_empty(), "after {second} s");
    }
}
