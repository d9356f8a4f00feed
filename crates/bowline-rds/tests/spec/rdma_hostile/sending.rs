//! What a peer can see of the node: acknowledgements, maps, completions, full queues.

use super::*;

// tests [IB-68]
#[test]
fn every_ninth_message_asks_for_an_acknowledgement() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    lab.side.node.set_send_buffer(socket, 100 << 20).expect("open");
    let link = lab.connected(LOW);
    let asked = |lab: &mut Lab, link, count: usize| {
        for _ in 0..count {
            lab.send(socket, LOW, b"x");
        }
        let sent = headers(&lab.frames(link));
        let sent = sent.iter().filter(|header| header.sequence > 0);
        let asks = sent.filter(|header| header.flags == Flags::ACK_REQUIRED);
        asks.map(|header| header.sequence).collect::<Vec<_>>()
    };
    assert_eq!(asked(&mut lab, link, 28), [1, 10, 19, 28]);
    lab.feed(link, &[ack(28)]);
    // After a reconnect the counters start full.
    let link = lab.reconnected(link);
    assert_eq!(asked(&mut lab, link, 18), [37, 46]);
    // What is sent again asks, and says so.
    let link = lab.reconnected(link);
    let again = headers(&lab.frames(link));
    let both = Flags::ACK_REQUIRED.with(Flags::RETRANSMITTED);
    assert_eq!(again.len(), 2 + 18);
    assert!(again[2..].iter().all(|header| header.flags == both && header.ack == 0));
    lab.feed(link, &[ack(46)]);
    // Bytes count too, and half of the send buffer.
    lab.side.node.set_sysctl(lab.now, "max_unacked_bytes", 10_000).expect("a setting");
    let link = lab.reconnected(link);
    assert_eq!(lab.frames(link).len(), 2);
    for len in [4000, 4000, 2001, 4000] {
        lab.send(socket, LOW, &pattern(len));
    }
    let sent = headers(&lab.frames(link));
    let asks: Vec<_> = sent.iter().map(|header| header.flags == Flags::ACK_REQUIRED).collect();
    assert_eq!(asks, [false, false, true, false]);
    lab.side.node.set_send_buffer(socket, 40_000).expect("open");
    lab.send(socket, LOW, &pattern(4000));
    lab.send(socket, LOW, &pattern(4000));
    let sent = headers(&lab.frames(link));
    assert_eq!(sent.last().map(|header| header.flags), Some(Flags::ACK_REQUIRED));
}

// tests [IB-65], [IB-66], [IB-67], [IB-70]
#[test]
fn acknowledgements_merge_ride_along_and_are_outstanding_one_at_a_time() {
    let (mut lab, socket, link) = with_peer();
    // Not asked, not sent.
    lab.feed(link, &[message(1, b"x"), message(2, b"x")]);
    assert!(lab.posted(link).is_empty());
    // All that one sweep finds is acknowledged once.
    lab.feed(link, &[asking(message(3, b"x")), asking(message(4, b"x")), message(5, b"x")]);
    let first = lab.posted(link);
    assert!(first.len() == 1 && is_ack(&header(&first[0])) && header(&first[0]).ack == 5);
    assert!(first[0].signalled && first[0].solicited);
    assert_eq!(lab.counter("ib_ack_sent"), 1);
    // The next one waits for the completion of the first.
    lab.feed(link, &[asking(message(6, b"x"))]);
    assert!(lab.posted(link).is_empty());
    assert_eq!(lab.counter("ib_ack_send_delayed"), 1);
    lab.feed(link, &[asking(message(7, b"x"))]);
    assert!(lab.posted(link).is_empty());
    lab.side.ready.clear();
    lab.complete(link, &first);
    assert_eq!(lab.side.ready, [link], "served at that completion");
    let second = lab.posted(link);
    assert_eq!(headers(&second).iter().map(|header| header.ack).collect::<Vec<_>>(), [7]);
    // A message takes the request along, even while an acknowledgement is outstanding.
    lab.feed(link, &[asking(message(8, b"x"))]);
    lab.send(socket, LOW, &pattern(5000));
    let frames = headers(&lab.posted(link));
    assert!(frames.len() == 2 && frames.iter().all(|header| header.ack == 8 && header.len == 5000));
    assert_eq!(lab.counter("ib_ack_send_piggybacked"), 1);
    lab.complete(link, &second);
    assert!(lab.posted(link).is_empty(), "it is served");
    // Within a message all frames have the acknowledgement of the first [IB-54].
    lab.send(socket, LOW, &pattern(9000));
    let mut count = 0;
    let mut one = Vec::new();
    lab.side.node.poll_rdma_requests(lab.now, link, 1, |_, _| count += 1);
    lab.side.node.handle_rdma_posted(lab.now, link);
    lab.feed(link, &[message(9, b"x")]);
    one.extend(headers(&lab.posted(link)));
    assert_eq!(one.iter().map(|header| header.ack).collect::<Vec<_>>(), [8, 8]);
    // After a reconnect it begins from 0.
    let link = lab.reconnected(link);
    assert!(headers(&lab.frames(link)).iter().all(|header| header.ack == 0));
}

// tests [IB-37], [IB-42], [IB-87]
#[test]
fn a_map_is_the_first_thing_sent_on_each_connection() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    let mut link = lab.request(LOW).expect("accepted").link;
    for round in 0..3 {
        lab.send(socket, LOW, &pattern(5000));
        lab.feed(link, &[asking(message(1, b"x"))]);
        assert!(lab.frames(link).is_empty(), "nothing before it is established");
        lab.up(link);
        let frames = lab.frames(link);
        let all = headers(&frames);
        for map in &all[..2] {
            assert!(map.is_map() && map.len == 8192 && map.sequence == 0, "round {round}");
        }
        assert_eq!(all.len(), 2 + 2 * (round + 1));
        let solicited: Vec<_> = frames[..4].iter().map(|sent| sent.solicited).collect();
        assert_eq!(solicited, [false, true, false, true], "the last frame of each message");
        lab.closed(link);
        link = lab.request(LOW).expect("accepted").link;
    }
}

// tests [IB-71], [IB-85]
#[test]
fn the_last_frame_of_a_message_has_a_completion_and_others_in_between() {
    let mut lab = Lab::new();
    let socket = lab.socket(PORT);
    lab.side.node.set_send_buffer(socket, 4 << 20).expect("open");
    let link = lab.connected(LOW);
    lab.send(socket, LOW, &pattern(50 * 4096));
    lab.send(socket, LOW, b"short");
    let frames = lab.frames(link);
    let signalled: Vec<_> = (0..51).filter(|at| frames[*at].signalled).collect();
    assert_eq!(signalled, [16, 33, 49, 50]);
    let ids: Vec<_> = frames.iter().map(|sent| sent.id).collect();
    assert!(ids.windows(2).all(|pair| pair[1] == pair[0] + 1));
    // A completion of what was not posted means nothing.
    lab.side.node.handle_rdma_sent(lab.now, link, u64::MAX);
    lab.side.node.handle_rdma_sent(lab.now, link, ids[50] + 1);
    lab.side.node.handle_rdma_sent(lab.now, link, ids[0]);
    lab.collect();
}

// tests [IB-91]
#[test]
fn what_found_the_queue_full_is_sent_when_requests_complete() {
    let (mut lab, socket, link) = with_peer();
    for _ in 0..300 {
        lab.send(socket, LOW, b"x");
    }
    let first = lab.posted(link);
    assert_eq!(first.len(), 256);
    assert!(lab.posted(link).is_empty());
    assert!(lab.counter("ib_tx_ring_full") > 0);
    lab.side.ready.clear();
    lab.complete(link, &first[..1]);
    assert_eq!(lab.side.ready, [link], "there is room again");
    assert_eq!(lab.posted(link).len(), 1);
    lab.complete(link, &first);
    assert_eq!(lab.posted(link).len(), 43);
    // The same in the middle of a message.
    lab.side.node.set_send_buffer(socket, 4 << 20).expect("open");
    lab.send(socket, LOW, &pattern(1 << 20));
    lab.send(socket, LOW, b"x");
    let mut first = lab.posted(link);
    loop {
        let more = lab.posted(link);
        if more.is_empty() {
            break;
        }
        first.extend(more);
    }
    assert!(first.len() < 257, "the rest has no room");
    lab.side.ready.clear();
    lab.complete(link, &first[..100]);
    assert_eq!(lab.side.ready, [link]);
}

// tests [IB-91]
#[test]
fn room_that_comes_while_the_driver_posts_is_used() {
    let (mut lab, socket, link) = with_peer();
    for _ in 0..300 {
        lab.send(socket, LOW, b"x");
    }
    let mut last = 0;
    let count = lab.side.node.poll_rdma_requests(lab.now, link, usize::MAX, |request, _| {
        last = request_id(&request);
    });
    assert_eq!(count, 256);
    // The device is faster than the thread that posts.
    lab.side.node.handle_rdma_sent(lab.now, link, last);
    lab.collect();
    lab.side.ready.clear();
    lab.side.node.handle_rdma_posted(lab.now, link);
    lab.collect();
    assert_eq!(lab.side.ready, [link]);
    assert_eq!(lab.posted(link).len(), 44);
}
