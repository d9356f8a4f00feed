//! A path with controllers that decide nothing: what it counts, whom it lets send, and what it
//! tells them.

use super::*;
use crate::congestion::{Call, Mock};

/// Payload of a full packet, and what the packet counts for.
const MTU: usize = 1024;
const PACKET: u64 = 1024 + 16 + 42;

const fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

fn at(us: u64) -> Instant {
    Instant::from_nanos(1_000_000_000 + us * 1000)
}

/// A path whose windows, for what is sent and for what READs ask for, are so many packets.
fn path(window: u64, reads: u64) -> Path {
    let mut path = Path::new(IpAddr::from([10, 0, 0, 2]), Congestion::Delay, at(0));
    path.control = Control::Mock(Box::new(Mock::new(window * PACKET)));
    path.reads = Control::Mock(Box::new(Mock::new(reads * PACKET)));
    path.set_mtu(MTU);
    path
}

/// A path with a window of this many bytes, which is paced; its round trip is 400 us.
fn paced(bytes: u64) -> Path {
    let mut path = path(0, 100);
    path.control = Control::Mock(Box::new(Mock { paced: true, ..Mock::new(bytes) }));
    let counted = path.sent(at(0), 1, MTU + 16);
    path.acknowledged(at(400), counted, Some(at(0)));
    path
}

fn calls(control: &Control) -> &[Call] {
    match control {
        Control::Mock(mock) => &mock.calls,
        other => panic!("no mock: {other:?}"),
    }
}

/// A path whose smoothed and least round trip is 1 ms.
fn measured() -> Path {
    let mut path = path(100, 100);
    let counted = path.sent(at(0), 1, MTU + 16);
    path.acknowledged(at(1000), counted, Some(at(0)));
    path
}

// tests [CC-1]
#[test]
fn a_full_window_closes_the_path_until_a_quarter_of_it_is_free() {
    let mut path = path(8, 100);
    assert_eq!(path.room(at(0), MTU + 16), 8);
    assert_eq!(path.sent(at(0), 8, 8 * (MTU + 16)), 8 * PACKET);
    assert!(!path.allows(at(0)) && path.room(at(0), MTU + 16) == 0);
    assert_eq!(calls(&path.control), [Call::Sent(8 * PACKET, Room::Full)]);
    path.acknowledged(at(10), PACKET, None);
    assert!(!path.allows(at(10)), "seven of eight");
    path.acknowledged(at(20), PACKET, None);
    assert!(path.allows(at(20)));
    assert_eq!(path.room(at(20), MTU + 16), 2);
}

// tests [CC-1]
#[test]
fn those_in_line_share_the_window() {
    let mut path = path(30, 100);
    assert_eq!(path.window_packets(), Some(30));
    path.waiting.extend([1, 2]);
    assert_eq!(path.window_packets(), Some(10));
    path.waiting.extend(3..100);
    assert_eq!(path.window_packets(), Some(1));
}

// tests [CC-4]
#[test]
fn bursts_are_shorter_for_ten_seconds_after_a_loss() {
    let mut path = Path::new(IpAddr::from([10, 0, 0, 2]), Congestion::Delay, at(0));
    path.set_mtu(MTU);
    let counted = path.sent(at(0), 1, MTU + 16);
    path.acknowledged(at(800), counted, Some(at(0)));
    // Twice 32 KiB in 800 us, of which the bucket holds 250 us.
    let whole = path.pacer.room(at(100_000));
    assert!((20_000..21_500).contains(&whole), "{whole}");
    path.lost_in_gap(at(100_000), at(99_000));
    let short = path.pacer.room(at(200_000));
    assert!(short < whole / 2, "an eighth of the round trip, 100 us: {short}");
    path.acknowledged(at(10_099_999), 0, None);
    assert_eq!(path.pacer.room(at(10_200_000)), short);
    path.acknowledged(at(10_100_000), 0, None);
    assert_eq!(path.pacer.room(at(10_200_000)), whole);
}

/// A link has held an answer back for 356 ms, which makes the smoothed round trip 45 ms long. With
/// a window of four packets that is a packet in 11 ms; but packets leave one after the other, and
/// after four round trips the rate is that of the route again.
// tests [CC-2, CC-4]
#[test]
fn an_answer_that_was_held_back_holds_nothing_back_itself() {
    let mut path = paced(4 * PACKET);
    let mut now = 1000;
    let mut send = |path: &mut Path, takes| {
        assert_eq!(path.resumes_at(at(now)), None);
        assert!(path.allows(at(now)) && path.room(at(now), MTU + 16) > 0);
        let counted = path.sent(at(now), 1, MTU + 16);
        let next = path.resumes_at(at(now));
        now += takes;
        path.acknowledged(at(now), counted, Some(at(now - takes)));
        next
    };
    assert_eq!(send(&mut path, 356_000), None);
    assert!(path.smoothed() > Some(us(44_000)));
    for _ in 0..4 {
        // A second one beside it has to wait, but not longer than it would in the first's place.
        let next = send(&mut path, 400).expect("a time");
        assert!((at(363_000)..at(373_000)).contains(&next), "{next:?}");
    }
    assert_eq!(path.smoothed(), Some(us(400)));
    assert!(path.resumes_at(at(now)) <= Some(at(now + 125)));
    assert_eq!(path.stats().rate, Some(4 * PACKET * 1_000_000 / 400));
}

// tests [CC-4]
#[test]
fn while_round_trips_are_as_expected_the_pacer_decides() {
    let mut path = paced(4 * PACKET);
    let counted = path.sent(at(1000), 4, 4 * (MTU + 16));
    path.acknowledged(at(1210), counted, Some(at(1000)));
    assert!(path.in_flight == 0 && !path.allows(at(1210)) && !path.allows_replacement(at(1210)));
    assert!(path.resumes_at(at(1210)) > Some(at(1250)));
}

// tests [CC-4]
#[test]
fn a_window_of_less_than_a_packet_is_always_paced() {
    let mut path = paced(PACKET / 4);
    for (now, takes) in [(2000, 400), (4000, 400), (6000, 40)] {
        let counted = path.sent(at(now), 1, MTU + 16);
        path.acknowledged(at(now + takes), counted, Some(at(now)));
        assert!(!path.allows(at(now + 1300)), "a packet in four round trips");
        assert!(path.allows(at(now + 1800)));
    }
}

// tests [CC-6]
#[test]
fn a_peer_is_notified_of_congestion_every_50_us_at_most() {
    let mut path = path(8, 8);
    let notified: Vec<u64> = (0..200).filter(|us| path.may_notify(at(*us))).collect();
    assert_eq!(notified, [0, 50, 100, 150]);
}

// tests [CC-7]
#[test]
fn a_notification_concerns_what_is_sent_and_not_what_reads_ask_for() {
    let mut path = path(8, 8);
    path.marked(at(0));
    assert_eq!(calls(&path.control), [Call::Marked]);
    assert_eq!(calls(&path.reads), []);
}

// tests [CC-8]
#[test]
fn reads_ask_for_a_window_of_their_own() {
    let mut path = path(100, 16);
    assert_eq!(path.read_part(), 4, "a quarter of the window");
    for asked in 0..4 {
        assert!(path.allows_read(), "{asked} parts");
        assert_eq!(path.asked(4), 4 * PACKET);
    }
    assert!(!path.allows_read());
    let full = Call::Sent(4 * PACKET, Room::Full);
    assert_eq!(calls(&path.reads).iter().filter(|call| **call == full).count(), 1);
    // The round trip is that from a request to its first answer.
    path.answered(at(700), PACKET, Some(at(0)));
    assert!(path.allows_read());
    assert_eq!(path.read_round_trip.smoothed(), Some(us(700)));
    assert_eq!((path.smoothed(), path.in_flight), (None, 0), "nothing of it was sent");
    path.answer_lost(at(800), at(100));
    assert_eq!(calls(&path.reads).last(), Some(&Call::Lost(Extent::Packet)));
    assert_eq!(calls(&path.control), []);
}

// tests [CC-8]
#[test]
fn a_window_of_less_than_a_packet_lets_one_part_of_one_packet_be_asked_for() {
    let mut path = path(100, 0);
    assert_eq!(path.read_part(), 1);
    assert!(path.allows_read());
    path.asked(1);
    assert!(!path.allows_read());
    path.answered(at(700), PACKET, None);
    assert!(path.allows_read());
}

/// A lost answer counts once for what was asked for before the window was reduced.
// tests [CC-8]
#[test]
fn the_answers_of_one_overflow_count_once() {
    let mut path = Path::new(IpAddr::from([10, 0, 0, 2]), Congestion::Delay, at(0));
    path.set_mtu(MTU);
    // A queue of 4 ms shows, on a route of 1 ms.
    for (asked_at, now) in [(0, 1000), (2000, 7000), (2001, 7001), (2002, 7002), (2003, 7003)] {
        path.asked(4);
        path.answered(at(now), 4 * PACKET, Some(at(asked_at)));
    }
    let before = path.reads.window().unwrap();
    for asked_at in 7010..7040 {
        path.answer_lost(at(7100), at(asked_at));
    }
    let after = path.reads.window().unwrap();
    assert!(after < before && after >= before * 2 / 3, "{before} {after}");
}

// tests [CC-11]
#[test]
fn while_packets_are_late_and_not_lost_reports_wait() {
    let mut path = measured();
    assert_eq!(path.late_for(), Duration::ZERO);
    // The acknowledgement of a copy came when only the first packet could have been its reason.
    path.repaired(at(2000), at(2000 - 899));
    assert_eq!(path.late_for(), us(250), "a quarter of the round trip");
    path.repaired(at(3000), at(3000 - 900));
    assert_eq!(path.late_for(), us(250), "its own answer");
    for expected in [375, 562, 843, 1000, 1000] {
        path.repaired(at(4000), at(3900));
        assert_eq!(path.late_for().as_micros(), expected);
    }
}

// tests [CC-13]
#[test]
fn an_answer_to_the_first_copy_makes_a_timeout_spurious() {
    let mut path = measured();
    path.timed_out(at(50_000), 1);
    path.answered_late(at(50_899), at(50_000));
    assert!(!path.is_lossy(at(50_899)));
    path.timed_out(at(60_000), 1);
    path.answered_late(at(60_900), at(60_000));
    assert!(path.is_lossy(at(60_900)), "it was lost");
    let last = &calls(&path.control)[2..];
    assert_eq!(last, [Call::TimedOut(1), Call::Spurious, Call::TimedOut(1)]);
}
