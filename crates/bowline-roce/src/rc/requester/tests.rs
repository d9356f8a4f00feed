//! Recovery without a controller that decides anything, so that only recovery is looked at.

use std::collections::BTreeMap;
use std::time::Duration;

use bowline_verbs::{Mtu, SendOp};

use super::common::{Fate, Pair, Setup, pattern};
use crate::congestion::{Call, Control, Extent, Mock, Room, Unlimited};
use crate::{Config, Congestion};

/// Payload bytes of a packet, and what it counts for on a path: headers of WRITE MIDDLE, ICRC, and
/// what is outside of the datagram.
const MTU: usize = 256;
const COUNTS: u64 = 256 + 12 + 4 + 42;

/// A pair that reports gaps, whose side 0 has this controller for its path.
fn pair(control: Control) -> Pair {
    let config = Config { congestion: Congestion::Delay, ..Config::default() };
    let mut pair = Pair::new(&Setup { mtu: Mtu::M256, config, ..Setup::default() });
    for node in &mut pair.nodes {
        node.dev.report_gaps(node.qp).unwrap();
    }
    let node = &mut pair.nodes[0];
    node.dev.set_path_control(node.qp, control);
    pair
}

fn mock(window: u64) -> Control {
    Control::Mock(Box::new(Mock::new(window)))
}

/// The mock of side 0.
fn told(pair: &mut Pair) -> &mut Mock {
    let node = &mut pair.nodes[0];
    match node.dev.path_control(node.qp) {
        Control::Mock(mock) => mock,
        other => panic!("no mock: {other:?}"),
    }
}

/// Writes so many packets, and checks that they have arrived.
fn write(pair: &mut Pair, packets: usize) {
    pair.nodes[0].fill(0, MTU * packets, 9);
    let (to, from) = (pair.nodes[1].remote(0), [pair.nodes[0].sge(0, MTU * packets)]);
    let done = pair.nodes[0].sent.len() + 1;
    pair.post(0, done as u64, SendOp::Write(to), &from);
    pair.finish(0, done);
    assert_eq!(pair.nodes[1].bytes(0, MTU * packets), pattern(MTU * packets, 9));
}

/// How often each packet with payload was sent, those that were sent more than once.
fn repeated(pair: &Pair) -> BTreeMap<u32, usize> {
    let mut sent = BTreeMap::new();
    for seen in pair.log.iter().filter(|seen| seen.from == 0) {
        *sent.entry(seen.packet().bth.psn.get()).or_default() += 1;
    }
    sent.retain(|_, count| *count > 1);
    sent
}

/// Every seventh packet of the first 3000 is lost once, whole bursts among them. Nothing limits
/// what is in flight.
// tests [CC-11]
#[test]
fn without_any_window_each_lost_packet_is_sent_again_once_and_no_other() {
    let mut pair = pair(Control::Unlimited(Unlimited));
    let mut lost = 0;
    pair.fate = Box::new(move |_, seen| {
        let first = seen.from == 0 && lost < 3000;
        lost += u32::from(first);
        let drop = first && (lost % 7 == 3 || (500..620).contains(&lost));
        if drop { Fate::Drop } else { Fate::Pass }
    });
    write(&mut pair, 3001);
    let dropped = pair.log.iter().filter(|seen| seen.fate == Fate::Drop).count();
    let repeated = repeated(&pair);
    assert_eq!(repeated.len(), dropped);
    assert!(repeated.values().all(|count| *count == 2), "{repeated:?}");
    let counters = pair.nodes[0].dev.counters();
    assert_eq!((counters.go_backs, counters.timeouts), (0, 0));
    // The last packet of a gap asks for an acknowledgement.
    let copies: Vec<_> = pair.log.iter().rev().filter(|seen| seen.from == 0).take(1).collect();
    assert!(copies[0].packet().bth.ack_req);
}

// tests [CC-11]
#[test]
fn what_is_sent_is_acknowledged_in_the_end_and_each_loss_told_once() {
    let mut pair = pair(mock(40 * COUNTS));
    pair.fate =
        Box::new(|n, seen| if seen.from == 0 && n % 50 == 20 { Fate::Drop } else { Fate::Pass });
    write(&mut pair, 1000);
    let dropped = pair.log.iter().filter(|seen| seen.fate == Fate::Drop).count();
    let told = told(&mut pair);
    let (sent, acknowledged) = told.amounts();
    // A copy takes the place of the packet that was lost.
    assert_eq!(sent, acknowledged);
    assert_eq!(told.count(Call::Lost(Extent::Packet)), dropped);
    assert_eq!(told.count(Call::TimedOut(1)), 0);
    let full = |call: &&Call| matches!(call, Call::Sent(_, Room::Full));
    assert!(told.calls.iter().filter(full).count() > 10, "the window was what limits");
}

/// A window of one packet does not stop the repair of any loss.
#[test]
fn losses_are_repaired_in_the_smallest_window() {
    for part in [3, 5, 11] {
        let mut pair = pair(mock(1));
        pair.fate = Box::new(move |n, _| if n % part == 1 { Fate::Drop } else { Fate::Pass });
        write(&mut pair, 100);
        assert_eq!(pair.nodes[0].dev.paths().next().map(|path| path.in_flight), Some(0));
    }
}

/// The peer is gone for three seconds. Each time that the timer expires everything in flight leaves
/// the window; between bowlines the first time only asks.
// tests [CC-13]
#[test]
fn silence_is_a_timeout_but_for_the_first_one() {
    let mut pair = pair(mock(40 * COUNTS));
    write(&mut pair, 10);
    let until = pair.now + Duration::from_secs(3);
    pair.fate = Box::new(move |_, seen| if seen.at < until { Fate::Drop } else { Fate::Pass });
    write(&mut pair, 100);
    let told = told(&mut pair);
    let outs: Vec<u32> = told
        .calls
        .iter()
        .filter_map(|call| match call {
            Call::TimedOut(consecutive) => Some(*consecutive),
            _ => None,
        })
        .collect();
    assert!(outs.len() > 2, "{outs:?}");
    assert!(outs.iter().copied().eq(2..2 + outs.len() as u32), "{outs:?}");
    assert_eq!(told.count(Call::Spurious), 0);
    assert_eq!(pair.nodes[0].dev.paths().next().map(|path| path.in_flight), Some(0));
}
