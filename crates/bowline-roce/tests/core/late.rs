//! Delayed acknowledgements beside small answers: no answer waits for them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::VecDeque;
use std::time::Duration;

use crate::common::{Pair, Setup};
use bowline_roce::{Burst, Config, IdentHint};
use bowline_verbs::{SendFlags, SendOp};

/// Duration of a poll that finds nothing.
const LOOK: Duration = Duration::from_nanos(350);
/// Number of polls between a send and the arrival of its datagram.
const WAY: u64 = 6;

const DELAY: Duration = Duration::from_micros(50);

/// Two devices with delayed acknowledgements.
fn waiting() -> Pair {
    let config = Config { ack_delay: DELAY, ..Config::default() };
    Pair::new(&Setup { config, ..Setup::default() })
}

/// Two programs that poll all the time, as the driver does: each poll takes one datagram. What the
/// core then sends goes out with the program's answer, or else at once.
struct Looks {
    pair: Pair,
    inbox: [VecDeque<(u64, u16, Vec<u8>)>; 2],
    burst: Burst,
    look: u64,
    sent: [u64; 2],
    vain: [u64; 2],
    datagrams: u64,
}

impl Looks {
    fn new() -> Self {
        let mut pair = waiting();
        for side in 0..2 {
            for id in 0..4 {
                pair.post_recv(side, id, &[]);
            }
        }
        let inbox = Default::default();
        Self { pair, inbox, burst: Burst::new(), look: 0, sent: [0; 2], vain: [0; 2], datagrams: 0 }
    }

    fn flush(&mut self, side: usize) {
        while self.pair.nodes[side].dev.poll_transmit(self.pair.now, &mut self.burst) {
            for bytes in self.burst.segments() {
                self.datagrams += 1;
                let datagram = (self.look + WAY, self.burst.source_port, bytes.to_vec());
                self.inbox[1 - side].push_back(datagram);
            }
        }
    }

    fn post(&mut self, side: usize) {
        let nth = self.sent[side];
        self.sent[side] += 1;
        let flags = if nth % 8 == 7 { SendFlags::SIGNALED } else { SendFlags::empty() };
        let op = SendOp::WriteImm(self.pair.nodes[1 - side].remote(0), nth as u32);
        let sges = [self.pair.nodes[side].sge(0, 64)];
        self.pair.post_flags(side, nth, op, &sges, flags);
        self.flush(side);
        self.pair.post_recv(side, nth, &[]);
    }

    /// One poll of a side; returns whether a message arrived.
    fn look(&mut self, side: usize) -> bool {
        if self.inbox[side].front().is_some_and(|(at, ..)| *at <= self.look) {
            let (_, port, bytes) = self.inbox[side].pop_front().unwrap();
            let (from, to) = (self.pair.nodes[1 - side].addr, self.pair.nodes[side].addr);
            let from = (from, port).into();
            let node = &mut self.pair.nodes[side];
            let before = node.received.len();
            node.dev.handle_datagram(self.pair.now, from, to, IdentHint::Unknown, &bytes);
            node.take();
            let came = node.received.len() > before;
            if !came {
                self.flush(side);
            }
            self.vain[side] = 0;
            return came;
        }
        self.vain[side] += 1;
        if self.vain[side].is_multiple_of(8) {
            let dev = &mut self.pair.nodes[side].dev;
            if dev.poll_timeout().is_some_and(|at| at <= self.pair.now) {
                dev.handle_timeout(self.pair.now);
            }
        }
        self.flush(side);
        false
    }
}

/// Round trips of one small message, with `pause` polls between receiving and answering. Returns
/// the datagrams of each side per round trip.
fn ping_pong(pause: impl Fn(u64) -> u64, trips: u64) -> f64 {
    let mut looks = Looks::new();
    looks.post(0);
    for trip in 1..2 * trips {
        let side = (trip % 2) as usize;
        let start = looks.look;
        let mut came = false;
        let mut until = u64::MAX;
        while looks.look < until {
            looks.look += 1;
            looks.pair.now = looks.pair.now + LOOK;
            for each in 0..2 {
                if looks.look(each) {
                    assert_eq!(each, side);
                    came = true;
                    until = looks.look + pause(trip);
                }
            }
            assert!(came || looks.look - start < 20, "trip {trip} takes too long");
        }
        looks.post(side);
    }
    for node in &looks.pair.nodes {
        let counters = node.dev.counters();
        assert_eq!((counters.packets_resent, counters.timeouts), (0, 0), "{counters:?}");
    }
    looks.datagrams as f64 / (2 * trips) as f64
}

#[test]
fn quick_answers_share_an_acknowledgement() {
    let datagrams = ping_pong(|_| 0, 1000);
    assert!((1.2..1.3).contains(&datagrams), "{datagrams}");
}

#[test]
fn slow_answers_have_their_own() {
    let datagrams = ping_pong(|_| 3000, 50);
    assert!((1.9..2.1).contains(&datagrams), "{datagrams}");
}

#[test]
fn answers_of_any_pace_never_wait() {
    for step in [5, 7, 11, 13, 17] {
        ping_pong(|trip| trip * 1237 * step % 100, 2000);
    }
}
