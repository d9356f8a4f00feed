//! Datagrams handed in as one batch, compared with the same datagrams handed in one by one.

use std::net::SocketAddr;

use crate::common::{Pair, Setup};
use bowline_roce::{Burst, Event, IdentHint};
use bowline_verbs::{AsyncEvent, Completion, QpState, Remote, SendOp};

/// Pseudorandom numbers.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Returns what one side sends now, all from the same port.
fn datagrams(pair: &mut Pair, side: usize) -> (u16, Vec<Vec<u8>>) {
    let (mut burst, mut all) = (Burst::new(), Vec::new());
    while pair.nodes[side].dev.poll_transmit(pair.now, &mut burst) {
        all.extend(burst.segments().map(<[u8]>::to_vec));
    }
    (burst.source_port, all)
}

/// Hands datagrams to a side, all together or one by one.
fn hand_in(pair: &mut Pair, side: usize, port: u16, datagrams: &[Vec<u8>], together: bool) {
    let (from, to) = (SocketAddr::new(pair.nodes[1 - side].addr, port), pair.nodes[side].addr);
    let (now, node) = (pair.now, &mut pair.nodes[side]);
    for cq in [node.send_cq, node.recv_cq] {
        assert_eq!(node.dev.arm_cq(cq, datagrams.len().is_multiple_of(2)), Ok(true));
    }
    let dev = &mut node.dev;
    let payloads = || datagrams.iter().map(Vec::as_slice);
    if together {
        dev.expect(payloads());
        dev.handle_datagrams(now, from, to, payloads().map(|bytes| (IdentHint::Unknown, bytes)));
    } else {
        payloads().for_each(|bytes| dev.handle_datagram(now, from, to, IdentHint::Unknown, bytes));
    }
}

/// Receives and sends of the same kinds on both pairs.
fn post(pairs: &mut [Pair; 2], dice: &mut Dice, id: &mut u64) {
    for _ in 0..dice.below(40) {
        let kind = dice.below(4);
        let (at, len) = (dice.below(60_000) as usize, dice.below(3000) as usize);
        for pair in &mut *pairs {
            let place = pair.nodes[1].remote(at);
            let op = match kind {
                0 => SendOp::Send,
                1 => SendOp::WriteImm(place, *id as u32),
                2 => SendOp::Read(place),
                _ => SendOp::Write(place),
            };
            let sges = [pair.nodes[1].sge(100_000 + at, 3000)];
            pair.post_recv(1, *id, &sges);
            let sges = [pair.nodes[0].sge(at, len)];
            pair.post(0, *id, op, &sges);
        }
        *id += 1;
    }
}

#[test]
fn together_they_lead_to_the_same() {
    let (mut messages, mut told) = (0, 0);
    for seed in 0..60 {
        let mut dice = Dice(seed);
        let mut pairs = [0, 1].map(|_| Pair::new(&Setup::default()));
        for pair in &pairs {
            pair.nodes[0].fill(0, 70_000, seed as u8);
        }
        let mut id = 0;
        for _ in 0..8 {
            post(&mut pairs, &mut dice, &mut id);
            for (from, to) in [(0, 1), (1, 0)] {
                // The memory of the two pairs has different addresses, so their packets differ in
                // these bytes.
                let sent = [0, 1].map(|k| datagrams(&mut pairs[k], from));
                assert_eq!(sent[0].1.len(), sent[1].1.len());
                let mut order: Vec<usize> = (0..sent[0].1.len()).collect();
                // One datagram is lost, repeated or early.
                if order.len() > 3 && dice.below(4) == 0 {
                    let at = dice.below(order.len() as u64 - 1) as usize;
                    match dice.below(3) {
                        0 => drop(order.remove(at)),
                        1 => order.insert(at, order[at]),
                        _ => order.swap(at, at + 1),
                    }
                }
                let mut rest = order.as_slice();
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(1 + dice.below(rest.len() as u64) as usize);
                    rest = later;
                    for ((pair, together), (port, sent)) in
                        pairs.iter_mut().zip([false, true]).zip(&sent)
                    {
                        let now: Vec<_> = now.iter().map(|at| sent[*at].clone()).collect();
                        hand_in(pair, to, *port, &now, together);
                    }
                    let seen = pairs.each_mut().map(|pair| {
                        let node = &mut pair.nodes[to];
                        node.take();
                        assert_eq!(node.dev.counters().drop_icrc, 0);
                        let counters = format!("{:?}", node.dev.counters());
                        let events = std::mem::take(&mut node.events);
                        (node.sent.clone(), node.received.clone(), events, counters)
                    });
                    assert_eq!(seen[0], seen[1], "seed {seed}");
                    told += seen[0].2.len();
                }
            }
        }
        // The lost datagram is sent again.
        for pair in &mut pairs {
            pair.finish(0, id as usize);
        }
        let seen = pairs.each_ref().map(|pair| pair.nodes[1].bytes(0, 200_000));
        assert!(seen[0] == seen[1], "seed {seed}");
        messages += id;
    }
    assert!(messages > 5000 && told > 500, "{messages} messages, {told} events");
}

/// Completions for which there was room are delivered, the others are lost, and the queue pair
/// fails.
#[test]
fn a_queue_overruns_amid_them() {
    let setup = Setup { cq_depth: 5, ..Setup::default() };
    let ended = [false, true].map(|together| {
        let mut pair = Pair::new(&setup);
        let cq = pair.nodes[1].recv_cq;
        for id in 0..9 {
            let sges = [pair.nodes[1].sge(0, 10)];
            pair.post_recv(1, id, &sges);
            pair.post(0, id, SendOp::Send, &[]);
        }
        let (port, sent) = datagrams(&mut pair, 0);
        assert_eq!(sent.len(), 9);
        hand_in(&mut pair, 1, port, &sent, together);
        let node = &mut pair.nodes[1];
        node.take();
        assert_eq!(node.state(), QpState::Err);
        let [lost, fatal] = [AsyncEvent::CqError(cq), AsyncEvent::QpFatal(node.qp)];
        let expected = [Event::CqReady(cq), Event::Async(lost), Event::Async(fatal)];
        assert_eq!(node.events, expected);
        node.received.clone()
    });
    let ids = |completions: &[Completion]| -> Vec<u64> {
        completions.iter().map(|entry| entry.wr_id).collect()
    };
    assert_eq!(ids(&ended[0]), [0, 1, 2, 3, 4]);
    assert_eq!(ended[0], ended[1]);
}

/// A completion queue overrun leaves no room for the error that ends the queue pair; the program is
/// notified of it all the same.
#[test]
fn what_fails_where_a_queue_overruns_is_told() {
    for together in [false, true] {
        let mut pair = Pair::new(&Setup { cq_depth: 2, ..Setup::default() });
        let good = pair.nodes[1].remote(0);
        let (mut replies, mut replier) = (Vec::new(), 0);
        for id in 0..4 {
            let to = if id == 3 { Remote { rkey: !good.rkey, ..good } } else { good };
            let sges = [pair.nodes[0].sge(0, 10)];
            pair.post(0, id, SendOp::Write(to), &sges);
            let (port, sent) = datagrams(&mut pair, 0);
            hand_in(&mut pair, 1, port, &sent, together);
            let (port, answers) = datagrams(&mut pair, 1);
            replies.extend(answers);
            replier = port;
        }
        assert_eq!(replies.len(), 4);
        hand_in(&mut pair, 0, replier, &replies, together);
        let node = &mut pair.nodes[0];
        node.take();
        assert_eq!((node.state(), node.sent.len()), (QpState::Err, 2));
        let [lost, fatal] = [AsyncEvent::CqError(node.send_cq), AsyncEvent::QpFatal(node.qp)];
        assert_eq!(node.events[1..], [Event::Async(lost), Event::Async(fatal)], "{together}");
    }
}
