//! Frames that break rules, and those that look as if they did.

use super::*;

/// Frames that end a connection, and why.
fn faults() -> Vec<(&'static str, Vec<Raw>, Misbehaviour)> {
    let long = |len| raw(Header { len, ..message(1, b"").header }, &[7; 4096]);
    let of = |len, payload: usize| raw(Header { len, ..message(1, b"").header }, &vec![7; payload]);
    let map_of = |len, payload: usize| raw(Header { len, ..Header::map() }, &vec![7; payload]);
    let second = |set: fn(&mut Header)| {
        let mut frames = fragments(1, &[7; 5000]);
        set(&mut frames[1].header);
        frames
    };
    let length = Misbehaviour::FrameLength;
    vec![
        ("a byte above the limit", vec![long((1 << 20) + 1)], Misbehaviour::MessageTooLong),
        ("the longest there can be", vec![long(u32::MAX)], Misbehaviour::MessageTooLong),
        ("a short frame", vec![of(4096, 4095)], length),
        ("a short frame of a longer message", vec![of(5000, 4095)], length),
        ("no payload", vec![of(1, 0)], length),
        ("a byte more than a frame has", vec![of(4097, 4097)], length),
        ("the same in the last frame", vec![of(4097, 4096), of(4097, 4097)], length),
        ("the last one is short", vec![of(4097, 4096), of(4097, 0)], length),
        ("another number", second(|h| h.sequence = 2), Misbehaviour::FrameOfOther),
        ("another length", second(|h| h.len = 5001), Misbehaviour::FrameOfOther),
        ("from another port", second(|h| h.sport = 10), Misbehaviour::FrameOfOther),
        ("to another port", second(|h| h.dport = 10), Misbehaviour::FrameOfOther),
        (
            "a map within a message",
            vec![of(5000, 4096), map_of(8192, 4096)],
            Misbehaviour::FrameOfOther,
        ),
        ("a short map", vec![map_of(8191, 4096), map_of(8191, 4095)], Misbehaviour::MapLength),
        ("a small map", vec![map_of(64, 64)], Misbehaviour::MapLength),
        ("a long map", [4096, 4096, 1].map(|n| map_of(8193, n)).to_vec(), Misbehaviour::MapLength),
        ("an endless map", vec![map_of(u32::MAX, 4096)], Misbehaviour::MessageTooLong),
    ]
}

// tests [SAFE-1], [SAFE-2], [SAFE-4], [IB-60], [IB-81]
#[test]
fn a_frame_that_lies_costs_its_sender_the_connection_and_delivers_nothing() {
    for (what, frames, why) in faults() {
        let (mut lab, socket, link) = with_peer();
        let other = lab.connected(HIGH);
        let before = raw(message(0, b"").header, b"");
        lab.feed(link, &[before]);
        assert_eq!(lab.recv(socket), Some(Vec::new()), "{what}");
        lab.feed(link, &frames);
        assert!(lab.is_closed(link), "{what}");
        assert_eq!(lab.recv(socket), None, "{what}");
        assert_eq!(lab.counter("bl_peer_errors"), 1, "{what}");
        let told = Event::Misbehaved { remote: ip(LOW), what: why };
        assert_eq!(lab.events.iter().filter(|event| **event == told).count(), 1, "{what}");
        // What it sends until its queue pair has ended means nothing.
        lab.feed(link, &[message(2, b"late")]);
        lab.closed(link);
        lab.feed(link, &[message(3, b"later")]);
        assert_eq!(lab.recv(socket), None, "{what}");
        lab.feed(other, &[message(1, b"honest")]);
        assert_eq!(lab.recv(socket).as_deref(), Some(&b"honest"[..]), "{what}");
        // It may come again, and is served as before.
        let again = lab.connected(LOW);
        lab.feed(again, &[message(1, b"begun anew")]);
        assert_eq!(lab.recv(socket).as_deref(), Some(&b"begun anew"[..]), "{what}");
    }
}

// tests [IB-81]
#[test]
fn what_is_no_header_or_has_a_wrong_checksum_ends_the_connection() {
    for bytes in [0, 1, 47] {
        let mut lab = Lab::new();
        let link = lab.connected(LOW);
        let frame = RdmaFrame { bytes, header: [0; 48], start: 0 };
        lab.side.node.handle_rdma_frames(lab.now, link, &RxBuf::from_vec(Vec::new()), &[frame]);
        lab.collect();
        assert!(lab.is_closed(link), "{bytes} bytes");
    }
    let (mut lab, socket, link) = with_peer();
    let mut head = message(1, b"").header.to_bytes();
    let frame = |header| RdmaFrame { bytes: 48, header, start: 0 };
    let none = RxBuf::from_vec(Vec::new());
    lab.side.node.handle_rdma_frames(lab.now, link, &none, &[frame(head)]);
    assert_eq!(lab.recv(socket), Some(Vec::new()), "without a checksum it is not checked [IB-50]");
    head[31] = 1;
    lab.side.node.handle_rdma_frames(lab.now, link, &none, &[frame(head)]);
    lab.collect();
    assert!(lab.is_closed(link));
    assert_eq!(lab.counter("recv_drop_bad_checksum"), 1);
    // A length that was received, of which the buffer does not have the bytes.
    let link = lab.connected(HIGH);
    let head = Header { len: 100, ..message(1, b"").header }.to_bytes();
    let frame = RdmaFrame { bytes: 148, header: head, start: 0 };
    lab.side.node.handle_rdma_frames(lab.now, link, &none, &[frame]);
    lab.collect();
    assert!(lab.is_closed(link));
    assert_eq!(lab.recv(socket), None);
}

// tests [IB-81]
#[test]
fn surplus_payload_of_the_last_frame_is_cut_off() {
    let (mut lab, socket, link) = with_peer();
    let whole = |sequence, len| Header { len, ..message(sequence, b"").header };
    lab.feed(link, &[raw(whole(1, 5), &[7; 4096]), raw(whole(2, 0), &[7; 100])]);
    lab.feed(link, &[raw(whole(3, 4097), &[7; 4096]), raw(whole(3, 4097), &[8; 4096])]);
    assert_eq!(lab.recv(socket), Some(vec![7; 5]));
    assert_eq!(lab.recv(socket), Some(Vec::new()));
    let last = lab.recv(socket).expect("the third");
    assert_eq!((last.len(), last[4096]), (4097, 8));
    assert!(!lab.is_closed(link));
}

// tests [IB-56], [IB-59]
#[test]
fn acknowledgements_may_come_between_the_frames_of_a_message() {
    let (mut lab, socket, link) = with_peer();
    let payload = pattern(10_000);
    let mut frames = fragments(1, &payload);
    for at in [3, 2, 1, 0] {
        frames.insert(at, ack(0));
    }
    lab.feed(link, &frames);
    assert_eq!(lab.recv(socket), Some(payload));
    assert_eq!(lab.counter("ib_ack_received"), 4);
    // An acknowledgement has no number, and is not acknowledged.
    assert_eq!(lab.frames(link).len(), 0);
    lab.feed(link, &[asking(ack(0))]);
    assert_eq!(lab.frames(link).len(), 0);
}

// tests [IB-60]
#[test]
fn a_map_with_another_flag_is_no_map_and_is_acknowledged() {
    let (mut lab, socket, link) = with_peer();
    lab.feed(link, &[asking(message(7, b"first"))]);
    assert_eq!(headers(&lab.frames(link))[0].ack, 7);
    let flagged: Vec<_> = map(&[9]).into_iter().map(asking).collect();
    lab.feed(link, &flagged);
    assert!(!lab.is_closed(link));
    let acks = headers(&lab.frames(link));
    assert!(acks.len() == 1 && is_ack(&acks[0]) && acks[0].ack == 0, "{acks:?}");
    lab.send(socket, LOW, b"port 9 is not congested");
    // An exact map is one.
    lab.feed(link, &map(&[9]));
    assert_eq!(lab.counter("cong_update_received"), 1);
    let refused = lab.send_with(socket, LOW, b"it is now", &[]);
    assert_eq!(refused.map_err(|error| error.errno().0), Err(105));
}

// tests [SAFE-3], [IB-4], [IB-52], [IB-62]
#[test]
fn the_handshake_of_paths_has_no_place_here() {
    for paths in [1, 8] {
        let mut lab = Lab::with(Config { paths, ..Config::default() });
        let socket = lab.socket(PORT);
        let link = lab.connected(LOW);
        let probe = |sequence, (sport, dport), npaths| {
            let ext = npaths_ext(npaths);
            raw(Header { sequence, sport, dport, ext, ..Header::default() }, b"")
        };
        // Probes and answers to probes that were not sent, with counts of all sizes.
        for (at, npaths) in [1, 2, 7, 8, 9, 255, u16::MAX].into_iter().enumerate() {
            let sequence = at as u64 * 2 + 1;
            lab.feed(link, &[probe(sequence, (1, 0), npaths)]);
            lab.feed(link, &[probe(sequence + 1, (0, 1), npaths)]);
        }
        for at in 0..40 {
            lab.send(socket, LOW, &[at]);
        }
        let sent = headers(&lab.frames(link));
        assert!(sent.iter().all(|header| header.ext == [0; 16]), "no extensions");
        let pongs = sent.iter().filter(|header| (header.sport, header.dport) == (0, 1)).count();
        assert_eq!((pongs, sent.len()), (7, 47), "each ping is answered plainly");
        assert!(sent.iter().zip(1..).all(|(header, number)| header.sequence == number));
        assert_eq!(lab.counter("recv_ping"), 7);
        lab.pass(Duration::from_secs(300));
        let later = headers(&lab.frames(link));
        let control = |header: &Header| (header.sport, header.dport) == (0, 0) && header.len <= 1;
        assert!(later.iter().all(control), "and no ping is sent");
        assert!(lab.side.connects.is_empty(), "nor another connection made");
    }
}

// tests [SAFE-3], [IB-82]
#[test]
fn pings_without_a_port_or_while_they_are_off_are_not_answered() {
    let mut lab = Lab::new();
    let link = lab.connected(LOW);
    let ping = |sequence, sport| raw(Header { sequence, sport, ..Header::default() }, b"");
    lab.feed(link, &[raw(Header { len: 3, ..ping(1, 0).header }, b"abc")]);
    lab.side.node.set_sysctl(lab.now, "ping_enable", 0).expect("a setting");
    lab.feed(link, &[asking(ping(2, 77))]);
    let sent = headers(&lab.frames(link));
    assert!(sent.len() == 1 && is_ack(&sent[0]) && sent[0].ack == 2, "only acknowledged");
    lab.side.node.set_sysctl(lab.now, "ping_enable", 1).expect("a setting");
    // A flood of pings is answered as far as a limit goes.
    let flood: Vec<_> = (3..1003).map(|sequence| ping(sequence, 77)).collect();
    lab.feed(link, &flood);
    assert_eq!(lab.frames(link).len(), 64);
    assert_eq!(lab.counter("bl_pongs_dropped"), 1000 - 64);
}

// tests [SAFE-4], [IB-64]
#[test]
fn an_acknowledgement_of_what_was_not_sent_frees_nothing_more() {
    let (mut lab, socket, link) = with_peer();
    lab.feed(link, &[ack(u64::MAX)]);
    for _ in 0..3 {
        lab.send(socket, LOW, &pattern(10_000));
    }
    assert_eq!(lab.side.node.send_messages(socket), Ok(3));
    // Seven of nine frames are posted: the third message is on its way.
    let mut frames = Vec::new();
    lab.side
        .node
        .poll_rdma_requests(lab.now, link, 7, |request, _| frames.push(request_id(&request)));
    lab.side.node.handle_rdma_posted(lab.now, link);
    lab.collect();
    lab.feed(link, &[ack(u64::MAX - 1)]);
    assert!(lab.side.node.send_messages(socket).expect("open") >= 1, "not what is on its way");
    let rest = headers(&lab.frames(link));
    assert_eq!(rest.iter().map(|header| header.sequence).collect::<Vec<_>>(), [3, 3]);
    // The next connection begins anew.
    lab.closed(link);
    let link = lab.connected(LOW);
    lab.feed(link, &[ack(3)]);
    assert_eq!(lab.side.node.send_messages(socket), Ok(0));
}

/// The acknowledgement counts when the peer has shown that the request was its own.
// tests [IB-64], [IB-95], [IB-96], [IB-111]
#[test]
fn an_acknowledgement_in_the_private_data_frees_only_what_was_sent_before() {
    for (ack, by_frame, left) in
        [(2, false, 1), (2, true, 1), (1, false, 2), (3, false, 3), (u64::MAX, true, 3)]
    {
        let (mut lab, socket, link) = with_peer();
        lab.send(socket, LOW, b"1");
        lab.send(socket, LOW, b"2");
        assert_eq!(lab.frames(link).len(), 2);
        lab.closed(link);
        lab.send(socket, LOW, b"3");
        let data = ConnectData { ack, ..Lab::data(LOW) };
        let link = lab.request_with(ip(LOW), &data.to_bytes()).expect("accepted").link;
        assert_eq!(lab.side.node.send_messages(socket), Ok(3), "anybody could have said so");
        if by_frame {
            lab.feed(link, &map(&[]));
            assert_eq!(lab.side.node.send_messages(socket), Ok(left), "{ack}");
        }
        lab.up(link);
        assert_eq!(lab.side.node.send_messages(socket), Ok(left), "{ack}: the third was not sent");
        let sent = headers(&lab.frames(link));
        assert_eq!(sent.len(), 2 + left);
        assert!(sent.last().is_some_and(|h| h.sequence == 3));
    }
}

// tests [IB-82], [IB-69]
#[test]
fn duplicates_are_dropped_and_a_peer_that_restarted_is_believed() {
    let (mut lab, socket, link) = with_peer();
    lab.feed(link, &[message(41, b"a"), message(42, b"b")]);
    lab.feed(link, &[again(asking(message(41, b"a")))]);
    assert_eq!(headers(&lab.frames(link))[0].ack, 41, "steps back");
    assert_eq!(lab.counter("recv_drop_old_seq"), 1);
    lab.closed(link);
    let link = lab.connected(LOW);
    lab.feed(link, &[again(message(42, b"b")), again(message(43, b"c"))]);
    lab.feed(link, &[message(1, b"anew"), again(message(2, b"two")), again(message(2, b"two"))]);
    lab.feed(link, &[message(u64::MAX, b"last"), message(0, b"zero")]);
    let got: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).collect();
    assert_eq!(got, [&b"a"[..], b"b", b"c", b"anew", b"two", b"last", b"zero"]);
}

/// A kernel boots and counts from 1 again. Its first message is begun on a connection that breaks,
/// and comes again. Its number was passed long ago; that it is news its contents tell.
// tests [IB-82]
#[test]
fn the_first_message_of_a_boot_is_known_by_its_contents() {
    let (mut lab, socket, link) = with_peer();
    let early: Vec<_> = (1..=20).map(|number| message(number, b"of the boot before")).collect();
    lab.feed(link, &early);
    assert_eq!(std::iter::from_fn(|| lab.recv(socket)).count(), 20);
    lab.closed(link);
    let link = lab.connected(LOW);
    let old = message(20, b"of the boot before");
    lab.feed(link, &[again(old.clone()), again(message(1, b"one"))]);
    lab.feed(link, &[again(message(2, b"of the boot before")), again(message(3, b"three"))]);
    let got: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).collect();
    assert_eq!(got, [&b"one"[..], b"of the boot before", b"three"], "the old one came before");
    lab.closed(link);
    let link = lab.connected(LOW);
    lab.feed(link, &[again(message(2, b"of the boot before")), again(message(3, b"three"))]);
    assert_eq!(lab.recv(socket), None, "what has come of this boot is known as well");
    assert_eq!(lab.counter("recv_drop_old_seq"), 3);
}

/// A kernel has sent more than is remembered when it boots.
// tests [IB-82]
#[test]
fn the_first_message_after_a_long_boot_is_taken() {
    let (mut lab, socket, link) = with_peer();
    lab.feed(link, &[message(1 << 20, b"a million later")]);
    lab.closed(link);
    let link = lab.connected(LOW);
    lab.feed(link, &[again(message(1 << 20, b"a million later")), again(message(1, b"one"))]);
    let got: Vec<_> = std::iter::from_fn(|| lab.recv(socket)).collect();
    assert_eq!(got, [&b"a million later"[..], b"one"]);
}

/// Another process goes on with the node: it knows what came before.
// tests [IB-82]
#[test]
fn what_came_over_rdma_is_known_to_the_process_that_goes_on() {
    let (mut lab, socket, link) = with_peer();
    lab.feed(link, &[message(1, b"one"), message(2, b"two"), message(3, b"three")]);
    assert_eq!(std::iter::from_fn(|| lab.recv(socket)).count(), 3);
    let mut bytes = Vec::new();
    lab.side.node.close_links(lab.now);
    lab.side.node.save(lab.now, &mut bytes).unwrap();
    let config = lab.side.node.config().clone();
    lab.side.node = Node::resume(config, lab.now, &*bytes).unwrap();
    lab.side.node.set_rdma_addrs([ip(NODE)]);
    lab.collect();
    let link = lab.connected(LOW);
    lab.feed(link, &[again(message(2, b"two")), again(message(1, b"of another boot"))]);
    assert_eq!(lab.recv(socket).as_deref(), Some(&b"of another boot"[..]));
    assert_eq!(lab.recv(socket), None);
}

// tests [IB-82]
#[test]
fn a_message_to_a_port_without_a_socket_is_acknowledged() {
    let mut lab = Lab::new();
    let link = lab.connected(LOW);
    lab.feed(link, &[asking(message(5, b"nobody"))]);
    let sent = headers(&lab.frames(link));
    assert!(sent.len() == 1 && is_ack(&sent[0]) && sent[0].ack == 5);
    assert_eq!(lab.counter("recv_drop_no_sock"), 1);
}
