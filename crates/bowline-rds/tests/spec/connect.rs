//! Sections 2.3, 3.2, 3.5 and 4.2: which side connects, how often, and the handshake with a kernel.

use std::time::Duration;

use bowline_rds::{
    AcceptError, CloseHow, CloseReason, Config, Error, Event, LinkId, PathState, PeerList, Refusal,
    Sysctl,
};
use bowline_wire::rds::{Handshake, Header};

use crate::support::*;

const FAR: &str = "10.0.0.2:5000";

fn npaths(lab: &Lab) -> u8 {
    lab.node.info().connections[0].npaths
}

pub(crate) fn up(lab: &Lab) -> Vec<u8> {
    let paths = lab.node.info().paths;
    paths.iter().filter(|p| p.state == PathState::Up).map(|p| p.index).collect()
}

// tests [R-201] [R-206], T-5 and T-6 from the smaller side
#[test]
fn the_smaller_side_connects_and_opens_with_map_probe_data() {
    let (mut lab, s) = at(A, 4000).sends(FAR, b"first");
    lab.send(s, FAR, b"second").expect("sent");
    assert_eq!(lab.connects.len(), 1, "one attempt for both");
    assert_eq!(lab.connects[0].1, addr("10.0.0.2:16385"));
    assert_eq!(lab.connects[0].2, 0, "source port of path 0 [R-440]");
    let link = lab.establish();
    let frames = lab.frames(link);
    assert!(frames[0].is_map());
    assert_eq!(frames[0].header, Header::map());
    let probes: Vec<_> = frames.iter().filter(|f| f.header.is_probe_ping()).collect();
    for probe in &probes {
        let hs = Handshake::parse(&probe.header.ext);
        assert_eq!((hs.npaths, hs.generation, hs.sport_idx), (Some(8), Some(0x1111), true));
        assert_eq!(&probe.header.ext[..3], [5, 0, 8], "NPATHS first [R-2002]");
        assert_eq!(hs.bowline.expect("our own part").path, 0);
    }
    let numbered: Vec<_> = frames.iter().filter(|f| f.header.sequence > 0).collect();
    assert_eq!(numbered[0].header.sequence, 1);
    assert!(numbered[0].header.is_probe_ping(), "before the sender's own message");
    assert_eq!(numbered[1].payload, b"first");
    assert_eq!(numbered[2].payload, b"second");
    assert_eq!(numbered[2].header.sequence, 3);
    for f in &frames {
        assert_eq!((f.header.ack, f.header.credit, f.header.csum), (0, 0, 0), "[R-102]");
    }
}

// tests [R-2010]: what greets a peer that may be a kernel is one that a kernel drops as old
#[test]
fn the_greeting_of_an_unknown_peer_is_flagged_and_unnumbered() {
    let (mut lab, _, link) = at(A, 4000).dials(FAR, b"x");
    let frames = lab.frames(link);
    assert!(frames[1].header.is_probe_ping());
    assert_eq!((frames[1].header.sequence, frames[1].retransmitted()), (0, true));
}

// tests, T-1: an accepted connection gets the map, then a probe
#[test]
fn the_larger_side_serves_an_accepted_connection() {
    let mut lab = Lab::larger();
    let link = lab.accept(A);
    assert_eq!(up(&lab), [0]);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1, "the map");
    assert!(frames[0].is_map());
    lab.deliver(link, &[map_of(&[])]);
    lab.ms(200);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1, "then the probe, at the latest after a moment");
    assert!(frames[0].header.is_probe_ping());
    assert_eq!(frames[0].header.sequence, 1);
    // A lost probe is repeated on the next connection; an answered one as well.
    lab.fail(link, CloseReason::Eof);
    let again = lab.accept(A);
    lab.ms(300);
    assert!(lab.frames(again).iter().any(|f| f.header.is_probe_ping()));
}

// tests, T-2 and T-3 as acceptor, T-4 as R-338 has it
#[test]
fn further_connections_take_the_lowest_free_path() {
    let mut lab = Lab::larger();
    let mut links = vec![lab.kernel(A, 8)];
    assert_eq!(npaths(&lab), 8);
    for n in 1..8 {
        links.push(lab.accept(A));
        assert_eq!(up(&lab).len(), n + 1);
    }
    lab.fail(links[5], CloseReason::Reset);
    lab.fail(links[2], CloseReason::Reset);
    assert_eq!(up(&lab), [0, 1, 3, 4, 6, 7]);
    lab.accept(A);
    assert_eq!(up(&lab), [0, 1, 2, 3, 4, 6, 7], "the lowest first [R-420]");
    lab.accept(A);
    // The ninth is not reset, but has no path until one of the others is gone.
    lab.checks.clear();
    let extra = lab.accept(A);
    assert_eq!(lab.checks.len(), 8, "TCP is made to look at the others");
    let s = lab.bound("10.0.0.2:5000");
    lab.deliver(extra, &[data(5, 9, 5000, b"taken on any connection")]);
    assert_eq!(lab.recv_all(s), [b"taken on any connection"]);
    assert!(lab.frames(extra).is_empty(), "nothing is sent on it yet");
    lab.frames(links[0]);
    lab.fail(links[3], CloseReason::Reset);
    assert_eq!(up(&lab).len(), 8);
    assert!(lab.frames(links[0])[0].is_map(), "on the lowest path, always [R-707]");
    let s = lab.bound("10.0.0.2:9993"); // path 3, with port 7
    lab.send(s, "10.0.0.1:7", b"x").expect("sent");
    assert_eq!(lab.data_frames(extra).len(), 1);
}

// tests: extra connections are bounded, and end
#[test]
fn extra_connections_are_few_and_end() {
    let mut config = config(B);
    config.limits.links_extra_per_peer = 2;
    let mut lab = Lab::new(config);
    lab.kernel(A, 1);
    let first = lab.accept(A);
    let second = lab.accept(A);
    lab.deliver(second, &[map_of(&[])]);
    let third = lab.accept(A);
    assert_eq!(lab.closes, [(first, CloseHow::Cut)], "the oldest that never spoke");
    lab.deliver(third, &[map_of(&[])]);
    let fourth = lab.accept(A);
    assert_eq!(lab.closes[1..], [(second, CloseHow::Cut)], "all have spoken: the oldest");
    lab.closes.clear();
    lab.advance(Duration::from_secs(35));
    lab.closes.sort_by_key(|c| c.0 != third);
    assert_eq!(lab.closes, [(third, CloseHow::Drain), (fourth, CloseHow::Drain)]);
}

/// Connections that are being cut stay until they have been read: a flood of them is refused.
// tests
#[test]
fn connections_that_are_being_cut_do_not_pile_up() {
    let mut config = config(B);
    config.limits.links_extra_per_peer = 2;
    let mut lab = Lab::new(config);
    lab.kernel(A, 1);
    lab.slow_cuts = true;
    for _ in 0..4 {
        lab.accept(A);
    }
    assert_eq!(lab.closes.len(), 2);
    assert_eq!(lab.try_accept(A), None);
    assert_eq!(lab.counter("bl_links_refused"), 1);
    assert!(lab.events.contains(&Event::Refused { remote: ip(A), why: Refusal::LinksOfPeer }));
}

// tests
#[test]
fn connections_from_an_own_address_are_refused() {
    let mut lab = Lab::new(Config { addrs: vec![ip(A), ip(B)], ..Config::default() });
    let local = addr("10.0.0.2:16385");
    assert_eq!(
        lab.node.handle_accepted(lab.now, local, addr("10.0.0.1:9")),
        Err(AcceptError::Refused)
    );
    lab.settle();
    assert_eq!(lab.events, [Event::Refused { remote: ip(A), why: Refusal::Local }]);
}

/// A list permits one of two peers: the other is neither taken nor dialled, and nothing is made for
/// it.
// tests
#[test]
fn peers_that_are_not_on_the_list_get_no_connection() {
    let allow = vec!["10.0.0.2/32".parse().expect("a network")];
    let peers = PeerList { allow, deny: Vec::new() };
    let mut lab = Lab::new(Config { addrs: vec![ip(A)], peers, ..Config::default() });
    let stranger = addr("10.0.0.3:40000");
    let refused = lab.node.handle_accepted(lab.now, addr("10.0.0.1:16385"), stranger);
    assert_eq!(refused, Err(AcceptError::Refused));
    let s = lab.bound("10.0.0.1:4000");
    for to in ["10.0.0.3:5000", "10.0.0.3:0"] {
        assert_eq!(lab.send(s, to, b"x"), Err(Error::PeerNotPermitted));
    }
    lab.settle();
    assert_eq!(lab.events, [Event::Refused { remote: stranger.ip(), why: Refusal::NotPermitted }]);
    assert!(lab.connects.is_empty() && lab.node.info().connections.is_empty());
    assert_eq!(lab.counter("bl_peers_not_permitted"), 1);
    lab.send(s, FAR, b"x").expect("sent");
    assert_eq!(lab.connects[0].1, addr("10.0.0.2:16385"));
}

/// A kernel accepts a connection, its TCP acknowledges a message, and it resets the connection.
/// This process is stopped meanwhile; when it goes on, its timers tell that the connection has been
/// open for long.
// tests
#[test]
fn a_process_that_was_stopped_trusts_no_connection_before_it_has_looked() {
    let mut lab = Lab::smaller();
    lab.slow_checks = true;
    let (s, link) = lab.dial("10.0.0.1:4000", FAR, b"x");
    // What tells that the peer goes by TCP came on another connection of another path.
    lab.node.handle_tcp_acked(lab.now, link, 0);
    lab.ms(5000);
    assert_eq!(lab.checks, [link], "it is to be looked at");
    assert_eq!(lab.node.send_messages(s), Ok(1), "nothing is released before");
    lab.fail(link, CloseReason::Reset);
    lab.ms(2000);
    let again = lab.establish();
    assert!(lab.data_frames(again)[0].retransmitted(), "it goes out again");
    // This one is looked at and found open.
    lab.checks.clear();
    lab.ms(250);
    assert_eq!(lab.checks, [again]);
    lab.node.handle_checked(lab.now, again);
    lab.deliver(again, &[map_of(&[]), pong_with(1, npaths_ext(1))]);
    assert_eq!(lab.node.send_messages(s), Ok(0));
}

/// Delays between attempts that all fail, in ms.
fn delays(lab: &mut Lab, attempts: usize) -> Vec<u64> {
    let mut out = Vec::new();
    for _ in 0..attempts {
        let (link, ..) = lab.connects[0];
        let before = lab.now;
        lab.fail(link, CloseReason::Refused);
        while lab.connects.is_empty() {
            let at = lab.node.poll_timeout().expect("an attempt is planned");
            lab.now = lab.now.max(at);
            lab.node.handle_timeout(lab.now);
            lab.settle();
        }
        out.push(lab.now.saturating_since(before).as_nanos() as u64);
    }
    out
}

// tests, T-26
#[test]
fn reconnect_delays_double_at_random_up_to_the_maximum() {
    let mut largest = [0; 16];
    for seed in 0..200 {
        let mut lab = Lab::new(Config { seed, ..config(A) });
        let s = lab.bound("10.0.0.1:4000");
        lab.send(s, FAR, b"x").expect("sent");
        let delays = delays(&mut lab, 16);
        assert_eq!(delays[0], 0, "the first is immediate");
        for (n, delay) in delays.iter().enumerate().skip(1) {
            let bound = (1_000_000_u64 << (n - 1)).min(1_000_000_000);
            assert!(*delay < bound, "attempt {n} waited {delay}");
            largest[n] = largest[n].max(*delay);
        }
    }
    for (n, largest) in largest.iter().enumerate().skip(1) {
        let bound = (1_000_000_u64 << (n - 1)).min(1_000_000_000);
        assert!(*largest > bound / 2, "delays spread up to the bound");
    }
}

#[test]
fn a_peer_that_cannot_be_connected_to_is_told_once_for_each_cause() {
    // The node with the smaller address connects, the other one knocks.
    for (here, there) in [(A, B), (B, A)] {
        let mut lab = Lab::new(config(here));
        let s = lab.bound(&format!("{}:4000", ip(here)));
        lab.send(s, &format!("{}:4000", ip(there)), b"x").expect("sent");
        let mut fail = |why| {
            let (link, ..) = lab.connects[0];
            lab.fail(link, why);
            while lab.connects.is_empty() {
                lab.now = lab.now.max(lab.node.poll_timeout().expect("an attempt is planned"));
                lab.node.handle_timeout(lab.now);
                lab.settle();
            }
            core::mem::take(&mut lab.events)
        };
        let told = |why| [Event::CannotConnect { local: ip(here), remote: ip(there), why }];
        assert_eq!(fail(CloseReason::Refused), told(CloseReason::Refused));
        assert_eq!(fail(CloseReason::Refused), []);
        assert_eq!(fail(CloseReason::Unreachable), told(CloseReason::Unreachable));
        assert_eq!(fail(CloseReason::Unreachable), []);
    }
}

// tests with other settings
#[test]
fn reconnect_delays_follow_the_sysctls() {
    let sysctl =
        Sysctl { reconnect_min_delay_ms: 100, reconnect_max_delay_ms: 150, ..Sysctl::default() };
    let mut lab = Lab::new(Config { sysctl, ..config(A) });
    let s = lab.bound("10.0.0.1:4000");
    lab.send(s, FAR, b"x").expect("sent");
    let delays = delays(&mut lab, 100);
    assert!(delays.iter().all(|d| *d < 150_000_000));
    assert!(delays[2..].iter().any(|d| *d > 100_000_000));
}

// tests: accepted and reset at once does not count as success
#[test]
fn a_peer_that_accepts_and_resets_is_not_stormed() {
    let (mut lab, s) = at(A, 4000).sends(FAR, b"x");
    let mut attempts = 0;
    let end = lab.now + Duration::from_secs(10);
    while lab.now < end {
        if lab.connects.is_empty() {
            lab.ms(1);
            continue;
        }
        attempts += 1;
        let link = lab.establish();
        lab.fail(link, CloseReason::Reset);
    }
    assert!((10..60).contains(&attempts), "{attempts} in ten seconds");
    assert_eq!(lab.node.send_messages(s), Ok(1));
    // A peer that answers first does not fare better.
    let mut answered = 0;
    let end = lab.now + Duration::from_secs(10);
    while lab.now < end {
        if lab.connects.is_empty() {
            lab.ms(1);
            continue;
        }
        answered += 1;
        let link = lab.establish();
        lab.deliver(link, &[map_of(&[])]);
        lab.fail(link, CloseReason::Reset);
    }
    assert!(answered < 60, "{answered} in ten seconds");
    // Once a connection has lasted, the next reconnect is immediate.
    while lab.connects.is_empty() {
        lab.ms(1);
    }
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[])]);
    lab.ms(250);
    lab.fail(link, CloseReason::Reset);
    lab.ms(0);
    assert_eq!(lab.connects.len(), 1);
}

// tests
#[test]
fn a_connect_that_hangs_is_given_up() {
    let (mut lab, _) = at(A, 4000).sends(FAR, b"x");
    let (link, ..) = lab.connects[0];
    lab.advance(Duration::from_millis(9_999));
    assert!(lab.closes.is_empty());
    lab.ms(2);
    assert_eq!(lab.closes, [(link, CloseHow::Cut)]);
    assert_eq!(lab.connects.len(), 1, "and another one begins");
}

// tests [R-330]: all agreed paths, in ascending order, one by one
#[test]
fn the_connector_opens_all_paths_in_order_and_again_after_a_loss() {
    let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
    lab.deliver(first, &[map_of(&[]), pong_with(1, npaths_ext(8))]);
    let mut links = vec![first];
    for index in 1..8 {
        assert_eq!(lab.connects.len(), 1, "one at a time");
        assert_eq!(lab.connects[0].2, index);
        let link = lab.establish();
        assert!(lab.connects.is_empty(), "not before the acceptor serves it");
        lab.deliver(link, &[map_of(&[])]);
        links.push(link);
    }
    assert_eq!(up(&lab), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(lab.connects.is_empty());
    for n in [6, 2] {
        lab.fail(links[n], CloseReason::Reset);
    }
    lab.ms(0);
    assert_eq!(lab.connects.iter().map(|c| c.2).collect::<Vec<_>>(), [2], "ascending");
    let link = lab.establish();
    lab.deliver(link, &[map_of(&[])]);
    assert_eq!(lab.connects[0].2, 6);
}

/// Paths that a kernel of 8 paths at the larger address gets, each when it serves the one before.
fn rest_of_paths(lab: &mut Lab) -> Vec<LinkId> {
    (1..8)
        .map(|_| {
            let link = lab.establish();
            lab.deliver(link, &[map_of(&[])]);
            link
        })
        .collect()
}

/// Maps and probes among what was written on connections since the last look.
fn maps_and_probes(lab: &mut Lab, links: &[LinkId]) -> (usize, usize) {
    let frames: Vec<_> = links.iter().flat_map(|link| lab.frames(*link)).collect();
    let count = |which: fn(&Frame) -> bool| frames.iter().filter(|f| which(f)).count();
    (count(Frame::is_map), count(|f| f.header.is_probe_ping()))
}

/// A later kernel sends on a path above 0 only when path 0 has nothing left to send, and tries
/// without a pause until then. So it is asked nothing there.
// tests [R-2010]
#[test]
fn a_later_kernel_is_greeted_on_path_0_and_gets_one_map_when_its_paths_are_up() {
    let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
    lab.deliver(first, &[map_of(&[]), pong_with(1, later_ext(8))]);
    assert_eq!(maps_and_probes(&mut lab, &[first]), (1, 2), "greeting and probe");
    let others = rest_of_paths(&mut lab);
    assert_eq!(up(&lab), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(maps_and_probes(&mut lab, &others), (0, 0));
    assert_eq!(maps_and_probes(&mut lab, &[first]), (0, 0));
    lab.ms(1000);
    assert_eq!(maps_and_probes(&mut lab, &others), (0, 0));
    assert_eq!(maps_and_probes(&mut lab, &[first]), (1, 0), "one behind the last of them");
    lab.advance(Duration::from_secs(60));
    assert_eq!(maps_and_probes(&mut lab, &[first]), (0, 0));
}

// tests [R-2010]
#[test]
fn a_later_kernel_that_comes_back_is_greeted_on_path_0_alone() {
    let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
    lab.deliver(first, &[map_of(&[]), pong_with(1, later_ext(8))]);
    for link in [vec![first], rest_of_paths(&mut lab)].concat() {
        lab.fail(link, CloseReason::Eof);
    }
    lab.ms(1);
    let first = lab.establish();
    lab.deliver(first, &[map_of(&[])]);
    assert!(lab.connects.is_empty(), "a map does not say who it is");
    assert_eq!(maps_and_probes(&mut lab, &[first]), (1, 2));
    lab.deliver(first, &[pong_with(2, later_ext(8))]);
    let others = rest_of_paths(&mut lab);
    assert_eq!(maps_and_probes(&mut lab, &others), (0, 0));
    assert_eq!(maps_and_probes(&mut lab, &[first]), (0, 0));
}

/// A later kernel that answers no pings has no answer to a greeting to send, and a bowline node in
/// its place is to be met as one.
// tests [R-2010]
#[test]
fn a_later_kernel_that_says_nothing_on_path_0_is_greeted_on_all() {
    let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
    lab.deliver(first, &[map_of(&[]), pong_with(1, later_ext(8))]);
    for link in [vec![first], rest_of_paths(&mut lab)].concat() {
        lab.fail(link, CloseReason::Eof);
    }
    lab.ms(0);
    let first = lab.establish();
    lab.deliver(first, &[map_of(&[])]);
    lab.ms(199);
    assert!(lab.connects.is_empty());
    lab.ms(1);
    let others = rest_of_paths(&mut lab);
    assert_eq!(maps_and_probes(&mut lab, &others), (0, 7));
}

/// Its paths are numbered as their connections come, and it answers on each without waiting.
// tests [R-2010]
#[test]
fn an_earlier_kernel_is_greeted_on_all_paths_one_after_the_other() {
    let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
    lab.deliver(first, &[map_of(&[]), pong_with(1, npaths_ext(8))]);
    let second = lab.establish();
    assert!(lab.connects.is_empty(), "the peer has not shown that it serves it");
    assert_eq!(maps_and_probes(&mut lab, &[second]), (0, 1));
    lab.deliver(second, &[pong_with(0, npaths_ext(8))]);
    assert_eq!(lab.connects.len(), 1, "the third");
}

/// Path count after one probe pong with this extension area on a fresh connection.
fn count_after(area: &[u8]) -> u8 {
    let mut lab = Lab::larger();
    let link = lab.accept(A);
    let mut ext = [0; 16];
    ext[..area.len()].copy_from_slice(area);
    lab.deliver(link, &[pong_with(1, ext)]);
    npaths(&lab)
}

// tests, T-2 and T-24
#[test]
fn path_counts_are_read_as_the_kernel_does() {
    assert_eq!(count_after(&[]), 1, "no extension");
    assert_eq!(count_after(&[5, 0, 0]), 1);
    assert_eq!(count_after(&[5, 0, 1]), 1);
    assert_eq!(count_after(&[5, 0, 3]), 3);
    assert_eq!(count_after(&[5, 0, 8]), 8);
    assert_eq!(count_after(&[5, 0xff, 0xff]), 8);
    assert_eq!(count_after(&[5, 0, 2, 5, 0, 4]), 4, "the last counts");
    assert_eq!(count_after(&[6, 0, 0, 0, 0, 5, 0, 2]), 2);
    assert_eq!(count_after(&[0x10, 5, 0, 8]), 1, "unknown, 16 or more, ends the list");
    assert_eq!(count_after(&[3, 0, 0, 0, 0, 0, 0, 0, 0, 3, 5, 0, 8]), 1, "crosses the area");
    assert_eq!(count_after(&[7, 5, 0, 2]), 1, "unknown ends our list [R-117]");
}

/// A kernel with 8 paths says 3 in the middle of a session. Messages to come take two paths, and
/// one that waits on another goes where the next ones between its sockets go.
// tests
#[test]
fn a_lower_count_keeps_the_order() {
    let mut lab = Lab::larger();
    let links = lab.kernel_paths(A);
    let s = lab.bound("10.0.0.2:4000");
    // Messages to this port take path 5 of eight, and path 1 of two.
    let to = (5000..5400).map(|port| format!("10.0.0.1:{port}")).find(|to| {
        lab.send(s, to, b"which").expect("sent");
        links.iter().position(|l| !lab.data_frames(*l).is_empty()) == Some(5)
    });
    let to = to.expect("one of 400 ports");
    lab.fail(links[5], CloseReason::Reset);
    lab.send(s, &to, b"waits").expect("queued");
    lab.deliver(links[0], &[pong_with(2, npaths_ext(3))]);
    assert_eq!(npaths(&lab), 3);
    lab.send(s, &to, b"later").expect("sent");
    let got: Vec<_> = lab.data_frames(links[1]).into_iter().map(|f| f.payload).collect();
    assert_eq!(got, [b"waits", b"later"]);
}

/// A peer that said how many paths it has, and then says nothing of that, is another one from
/// before multipath, which will never open more than one.
// tests
#[test]
fn a_missing_count_is_one_path_whatever_was_known() {
    let (mut lab, s, link) = at(B, 4000).kernel(8);
    for port in 5000..5008 {
        lab.send(s, &format!("10.0.0.1:{port}"), b"x").expect("sent");
    }
    assert!(lab.data_frames(link).len() < 8, "others wait for paths of their own");
    lab.deliver(link, &[pong_with(2, [0; 16])]);
    assert_eq!(npaths(&lab), 1);
    assert!(!lab.data_frames(link).is_empty(), "they go on path 0 now");
    assert_eq!(lab.node.unsent_total(), 0);
    lab.deliver(link, &[ping_with(3, npaths_ext(2))]);
    assert_eq!(npaths(&lab), 2);
}

// tests: we announce 8 or 1, and use no more than that
#[test]
fn a_single_path_node_says_so() {
    let mut lab = Lab::new(Config { paths: 1, ..config(B) });
    let link = lab.accept(A);
    lab.deliver(link, &[ping_with(1, npaths_ext(8))]);
    let frames = lab.frames(link);
    let pong = frames.iter().find(|f| f.header.is_probe_pong()).expect("a pong");
    assert_eq!(Handshake::parse(&pong.header.ext).npaths, Some(1));
    assert_eq!(npaths(&lab), 1);
}

// tests, T-9
#[test]
fn pings_are_answered_with_a_bare_header() {
    let mut lab = Lab::larger();
    let link = lab.kernel(A, 1);
    lab.deliver(link, &[data(2, 77, 0, b"5 bts")]);
    let frames = lab.frames(link);
    assert_eq!(frames.len(), 1);
    let h = frames[0].header;
    assert_eq!((h.sport, h.dport, h.len, h.flags.bits()), (0, 77, 0, 0));
    assert_eq!(h.ext, [0; 16]);
    assert_eq!(lab.counter("recv_ping"), 1);
    lab.deliver(link, &[data(3, 0, 0, b"ignored")]);
    assert!(lab.frames(link).is_empty());
    assert_eq!(lab.counter("recv_ping"), 1);
}

// tests: the pong of a peer is an empty message from port 0
#[test]
fn a_pong_reaches_the_application() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    lab.send(s, "10.0.0.1:0", b"anything [R-514]").expect("sent");
    lab.deliver(link, &[data(2, 0, 5000, b"")]);
    let got = lab.recv(s).expect("a pong");
    assert_eq!((got.source, text(&got)), (Some(addr("10.0.0.1:0")), vec![]));
}

// tests, T-19
#[test]
fn switched_off_pings_get_no_answer_but_pongs_count() {
    let mut lab = Lab::larger();
    lab.node.set_sysctl(lab.now, "net.rds.ping_enable", 0).expect("set");
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), ping_with(1, npaths_ext(8)), data(2, 77, 0, b"")]);
    assert!(lab.frames(link).iter().all(|f| f.is_map() || f.header.is_probe_ping()));
    assert_eq!(npaths(&lab), 0, "not evaluated");
    lab.deliver(link, &[pong_with(3, npaths_ext(4))]);
    assert_eq!(npaths(&lab), 4);
}

// tests [B-20]
#[test]
fn queued_pongs_are_bounded() {
    let mut lab = Lab::larger();
    let link = lab.kernel(A, 1);
    lab.room = 0;
    let pings: Vec<_> = (0..100).map(|n| data(2 + n, 77, 0, b"")).collect();
    lab.deliver(link, &pings);
    assert_eq!(lab.counter("bl_pongs_dropped"), 36);
    lab.unblock(link, usize::MAX);
    assert_eq!(lab.frames(link).len(), 64);
    lab.deliver(link, &pings[..1]);
    assert_eq!(lab.frames(link).len(), 1, "released, there is room again");
}

/// Fresh smaller node with a message of a socket that hashes to path 1.
fn dialling() -> (Lab, bowline_rds::SocketId, LinkId) {
    let mut lab = Lab::smaller();
    lab.acks = false;
    let (s, link) = lab.dial("10.0.0.1:11000", FAR, b"early");
    (lab, s, link)
}

// tests, T-31: path 0 first, other paths when it has caught up
#[test]
fn other_paths_wait_until_path_0_has_caught_up() {
    let (mut lab, s, link) = dialling();
    assert_eq!(lab.data_frames(link).len(), 1, "no wait for the handshake");
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(8))]);
    let one = lab.establish();
    lab.deliver(one, &[map_of(&[])]);
    lab.send(s, FAR, b"late").expect("sent");
    assert!(lab.data_frames(one).is_empty(), "held back");
    assert!(lab.data_frames(link).is_empty());
    lab.node.handle_tcp_acked(lab.now, link, 0);
    lab.settle();
    assert_eq!(lab.data_frames(one)[0].payload, b"late");
}

// tests: a count that is no power of two is rounded down
#[test]
fn three_paths_are_used_as_two_but_all_are_opened() {
    let (mut lab, s, link) = at(A, 15000).dials(FAR, b"x"); // with 5000: hash & 7 = 5, & 1 = 1
    lab.deliver(link, &[map_of(&[]), pong_with(1, npaths_ext(3))]);
    let one = lab.establish();
    lab.deliver(one, &[map_of(&[])]);
    let two = lab.establish();
    lab.deliver(two, &[map_of(&[])]);
    assert!(lab.connects.is_empty());
    lab.written.clear();
    lab.send(s, FAR, b"y").expect("sent");
    assert_eq!(lab.data_frames(one).len(), 1);
}

// tests [R-410] [R-411] [R-2040], T-3 as sender
#[test]
fn pairs_of_sockets_spread_over_the_paths_by_the_sum_of_their_ports() {
    let mut lab = Lab::larger();
    let links = lab.kernel_paths(A);
    lab.written.clear();
    for (sum, path) in [(1000, 4), (4000, 1), (10000, 3), (20000, 5), (65535, 3)] {
        for (from, to) in [(9, sum - 9), (sum - 9, 9), (7, sum - 7), (sum - 7, 7)] {
            let s = lab.bound(&format!("10.0.0.2:{from}"));
            lab.send(s, &format!("10.0.0.1:{to}"), b"x").expect("sent");
            let on: Vec<_> = (0..8).filter(|n| !lab.data_frames(links[*n]).is_empty()).collect();
            assert_eq!(on, [path], "from port {from} to {to}");
            lab.node.close(lab.now, s);
            lab.written.clear();
        }
    }
}

/// A kernel-like peer restarts. The first connection to its new process takes a message and breaks
/// before the process has said who it is; the next one brings the new generation. The message was
/// never begun for the old process, and both sockets have lived since before the send.
// tests
#[test]
fn messages_started_for_the_new_process_survive_its_greeting() {
    let probe =
        |g: u32| Handshake { npaths: Some(1), generation: Some(g), ..Handshake::default() }.emit();
    let mut lab = Lab::new(Config { paths: 1, ..config(A) });
    lab.acks = false;
    let (s, first) = lab.dial("10.0.0.1:4000", FAR, b"for the first");
    lab.deliver(first, &[map_of(&[]), pong_with(1, probe(0x10))]);
    lab.fail(first, CloseReason::Reset);
    lab.ms(0);
    lab.send(s, FAR, b"for the second").expect("queued");
    let silent = lab.establish();
    assert_eq!(lab.data_frames(silent).len(), 2, "both are begun before it has said anything");
    lab.fail(silent, CloseReason::TimedOut);
    lab.ms(100);
    let third = lab.establish();
    lab.frames(third);
    lab.deliver(third, &[map_of(&[]), pong_with(1, probe(0x20))]);
    assert_eq!(lab.counter("bl_peer_restarts"), 1);
    assert_eq!(lab.counter("bl_send_drop_restart"), 2, "the probe and the message of the first");
    lab.fail(third, CloseReason::Reset);
    lab.ms(100);
    let fourth = lab.establish();
    let data = lab.data_frames(fourth);
    assert_eq!(data.iter().map(|f| f.payload.clone()).collect::<Vec<_>>(), [b"for the second"]);
    assert!(data[0].retransmitted());
}

/// A kernel from before multipath takes the place of a bowline node with 8 paths. What waits on the
/// other paths for the node, which is gone, goes to the kernel on the only one it has.
// tests [R-430] [R-2003]
#[test]
fn an_old_kernel_in_the_place_of_a_node_with_8_paths_has_one() {
    let (mut lab, s, first) = at(B, 4000).bowline();
    lab.fail(first, CloseReason::TimedOut);
    for port in 5000..5008 {
        lab.send(s, &format!("10.0.0.1:{port}"), b"x").expect("queued");
    }
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[])]);
    assert_eq!(npaths(&lab), 8);
    lab.advance(Duration::from_secs(35));
    // It does not even answer pings.
    assert_eq!(npaths(&lab), 1);
    assert_eq!(lab.data_frames(link).len(), 8, "to every port");
}

/// An address moves from a kernel with 8 paths to one from before multipath that answers no pings.
/// It serves path 0 alone and says nothing of others; what waits on those goes to path 0 at last.
// tests
#[test]
fn a_kernel_that_answers_no_probe_and_opens_one_path_has_one() {
    let (mut lab, s, first) = at(B, 4000).kernel(8);
    lab.fail(first, CloseReason::TimedOut);
    lab.send(s, "10.0.0.1:5000", b"x").expect("queued");
    lab.ms(1);
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), data(1, 9, 4000, b"of the present one")]);
    lab.advance(Duration::from_secs(31));
    assert_eq!((npaths(&lab), lab.data_frames(link).len()), (8, 0));
    lab.advance(Duration::from_secs(2));
    assert_eq!((npaths(&lab), lab.data_frames(link).len()), (1, 1));
}

/// The same while all connections of the earlier kernel seem to be up still: the one of the present
/// kernel gets the path of whichever is found dead first.
// tests
#[test]
fn a_kernel_with_one_path_behind_eight_dead_connections_has_one() {
    let mut lab = Lab::larger();
    let old = lab.kernel_paths(A);
    lab.ms(1);
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[])]);
    for dead in [3, 0, 7, 1, 2, 4, 5, 6] {
        lab.advance(Duration::from_secs(4));
        lab.fail(old[dead], CloseReason::TimedOut);
    }
    for port in 4000..4020 {
        let s = lab.bound(&format!("10.0.0.2:{port}"));
        lab.send(s, "10.0.0.1:5000", b"x").expect("queued");
    }
    let sent = lab.data_frames(link).len();
    assert!(sent < 20, "most wait on the other paths");
    lab.advance(Duration::from_secs(35));
    assert_eq!(npaths(&lab), 1);
    assert_eq!(sent + lab.data_frames(link).len(), 20, "it served path 3, and is path 0 now");
}

/// One that has one connection for long, and answers when it is asked, keeps its count; so does one
/// that opens another path.
// tests
#[test]
fn a_kernel_that_answers_or_shows_another_path_keeps_its_count() {
    for answers in [true, false] {
        let mut lab = Lab::larger();
        let first = lab.kernel(A, 8);
        lab.fail(first, CloseReason::TimedOut);
        lab.ms(1);
        let link = lab.accept(A);
        lab.deliver(link, &[map_of(&[])]);
        lab.frames(link);
        let mut asked = 0;
        if !answers {
            lab.accept(A);
        }
        for _ in 0..60 {
            lab.advance(Duration::from_secs(1));
            for _ in lab.frames(link).iter().filter(|f| f.header.is_probe_ping()) {
                asked += 1;
                lab.deliver(link, &[pong_with(1 + asked, npaths_ext(8))]);
            }
        }
        assert_eq!((npaths(&lab), asked), (8, u64::from(answers)), "asked once, if at all");
        lab.node.check_invariants();
    }
}

/// The smaller side of it: path 0 is served, and every connection of another path is reset at once.
/// A kernel that answers the probe of path 0 keeps its count and gets all connections anew; one
/// that does not has one.
// tests
#[test]
fn a_kernel_that_rejects_the_other_paths_and_answers_no_probe_has_one() {
    for answers in [true, false] {
        let (mut lab, _, first) = at(A, 4000).dials(FAR, b"x");
        lab.deliver(first, &[map_of(&[]), pong_with(1, npaths_ext(8))]);
        lab.fail(first, CloseReason::TimedOut);
        for _ in 0..450 {
            lab.ms(100);
            let Some((link, _, lane)) = lab.connects.first().copied() else { continue };
            lab.establish_link(link);
            match (lane, answers) {
                (0, true) => lab.deliver(link, &[map_of(&[]), pong_with(2, npaths_ext(8))]),
                (0, false) => lab.deliver(link, &[map_of(&[])]),
                _ => lab.fail(link, CloseReason::Reset),
            }
        }
        assert_eq!(npaths(&lab), if answers { 8 } else { 1 });
    }
}

/// A kernel restarts, and its new process sends before its probe tells that it is a new one. What
/// it sent comes again on the next connection, and is known.
// tests
#[test]
fn messages_of_a_new_process_from_before_its_greeting_are_remembered() {
    let ext =
        |g: u32| Handshake { npaths: Some(1), generation: Some(g), ..Handshake::default() }.emit();
    let mut lab = Lab::larger();
    let s = lab.bound("10.0.0.2:5000");
    let old = lab.accept(A);
    lab.deliver(old, &[map_of(&[]), pong_with(1, ext(5)), data(2, 9, 5000, b"one of the old")]);
    lab.fail(old, CloseReason::TimedOut);
    let new = lab.accept(A);
    let sent = [data(1, 9, 5000, b"one"), ping_with(2, ext(6)), data(3, 9, 5000, b"two")];
    lab.deliver(new, &sent);
    lab.fail(new, CloseReason::Reset);
    let next = lab.accept(A);
    lab.deliver(next, &sent.map(flagged));
    lab.deliver(next, &[flagged(data(2, 9, 5000, b"one of the old"))]);
    let got = lab.recv_all(s);
    assert_eq!(got, [&b"one of the old"[..], b"one", b"two", b"one of the old"]);
}

/// Each change of the generation costs a look at all that is remembered, so a connection has one.
// tests
#[test]
fn a_connection_has_one_generation() {
    let ext =
        |g: u32| Handshake { npaths: Some(1), generation: Some(g), ..Handshake::default() }.emit();
    let mut lab = Lab::larger();
    let link = lab.accept(A);
    lab.deliver(
        link,
        &[map_of(&[]), pong_with(1, ext(5)), ping_with(2, ext(0)), ping_with(3, ext(5))],
    );
    assert!(lab.closes.is_empty());
    let s = lab.bound("10.0.0.2:4000");
    lab.acks = false;
    lab.send(s, "10.0.0.1:5000", b"x").expect("sent");
    lab.deliver(link, &[ping_with(4, ext(6)), ping_with(5, ext(7))]);
    assert_eq!(lab.closes, [(link, CloseHow::Reset)]);
    assert_eq!(lab.counter("bl_peer_restarts"), 0);
    let again = lab.accept(A);
    lab.deliver(again, &[map_of(&[]), ping_with(1, ext(5))]);
    assert_eq!(lab.data_frames(again).len(), 1, "nothing of the first process is dropped");
}

// tests, T-17: a kernel-like peer that announces another generation
#[test]
fn a_changed_generation_drops_what_was_started_for_the_earlier_process() {
    let ext =
        |g: u32| Handshake { npaths: Some(1), generation: Some(g), ..Handshake::default() }.emit();
    let mut lab = Lab::larger();
    let link = lab.accept(A);
    lab.deliver(link, &[map_of(&[]), pong_with(1, ext(5))]);
    let s = lab.bound("10.0.0.2:4000");
    lab.acks = false;
    lab.room = 10;
    lab.send(s, "10.0.0.1:5000", b"started").expect("sent");
    lab.send(s, "10.0.0.1:5000", b"not started").expect("sent");
    lab.fail(link, CloseReason::Reset);
    lab.room = 0;
    let again = lab.accept(A);
    // Silence and 0 say nothing.
    lab.deliver(again, &[pong_with(2, ext(0)), pong_with(3, npaths_ext(1))]);
    assert_eq!(lab.node.send_messages(s), Ok(2));
    lab.deliver(again, &[pong_with(4, ext(6))]);
    assert_eq!(lab.node.send_messages(s), Ok(1), "the started one is gone");
    assert_eq!(lab.counter("bl_send_drop_restart"), 1);
    assert!(lab.events.contains(&Event::PeerRestarted { remote: ip(A) }));
    lab.unblock(again, usize::MAX);
    let sent = lab.data_frames(again);
    assert_eq!(sent.len(), 1);
    assert_eq!((&sent[0].payload[..], sent[0].retransmitted()), (&b"not started"[..], false));
}

// tests
#[test]
fn numbers_begin_where_they_are_told_to() {
    let mut lab = Lab::new(Config { first_sequence: 1 << 60, ..config(A) });
    let (_, link) = lab.dial("10.0.0.1:4000", FAR, b"x");
    let numbers: Vec<_> = lab.frames(link).iter().map(|f| f.header.sequence).collect();
    assert!(numbers.contains(&(1 << 60)) && numbers.contains(&((1 << 60) + 1)), "{numbers:?}");
}

// tests
#[test]
fn a_lost_local_address_only_delays() {
    let (mut lab, _) = at(A, 4000).sends(FAR, b"x");
    lab.node.remove_local(ip(A));
    for _ in 0..5 {
        let (link, ..) = lab.connects[0];
        lab.fail(link, CloseReason::AddrNotAvailable);
        lab.ms(1000);
        assert_eq!(lab.connects.len(), 1);
    }
    let t = lab.node.socket().expect("a socket");
    assert_eq!(lab.node.bind(t, addr("10.0.0.1:9")), Err(Error::AddrNotAvailable));
    lab.node.add_local(ip(A));
    let link = lab.establish();
    assert_eq!(lab.data_frames(link).len(), 1);
}

// tests the limit of unproven peers [B-18]
#[test]
fn strangers_push_out_strangers_only() {
    let mut config = config(B);
    config.limits.peers_unproven = 3;
    let mut lab = Lab::new(config);
    let friend = lab.kernel(A, 1);
    let strangers: Vec<_> = (0..10).map(|n| lab.accept(&format!("9.0.0.{n}"))).collect();
    let gone: Vec<_> = lab.closes.iter().map(|c| c.0).collect();
    assert_eq!(gone, strangers[..7], "the oldest first");
    assert!(!gone.contains(&friend));
    assert_eq!(lab.node.info().connections.len(), 4);
    assert_eq!(lab.counter("bl_strangers_forgotten"), 7, "they are told of");
    let why = Refusal::PeersUnproven;
    let told = |e: &&Event| matches!(e, Event::Refused { why: of, .. } if *of == why);
    let told = lab.events.iter().filter(told).count();
    assert_eq!(told, 7);
}

/// A crowd has sent a whole message each, so that none is a stranger, and then half of another one.
/// Somebody else comes.
// tests [B-18]
#[test]
fn half_a_message_does_not_keep_others_out() {
    let mut small = config(B);
    small.limits.peers = 2;
    let mut lab = Lab::new(small);
    let half = data(7, 5000, 4000, &[0; 1000]).bytes();
    for peer in ["9.0.0.1", "9.0.0.2"] {
        let link = lab.kernel(peer, 1);
        lab.feed(link, &half[..500]);
    }
    lab.ms(9_000);
    assert_eq!(lab.try_accept(A), None, "a message may take a moment");
    assert_eq!(lab.counter("bl_peers_reclaimed"), 0);
    lab.ms(2_000);
    assert!(lab.try_accept(A).is_some(), "but not for ever");
    assert_eq!(lab.counter("bl_peers_reclaimed"), 1);
}

/// A crowd has sent a whole message each to a socket that nobody reads. Somebody else comes.
// tests [B-18]
#[test]
fn messages_that_nobody_reads_do_not_keep_others_out() {
    let mut small = config(B);
    small.limits.peers = 2;
    let mut lab = Lab::new(small);
    let socket = lab.bound("10.0.0.2:4000");
    for peer in ["9.0.0.1", "9.0.0.2"] {
        let link = lab.kernel(peer, 1);
        lab.deliver(link, &[data(7, 5000, 4000, b"unread")]);
    }
    lab.ms(59_000);
    assert_eq!(lab.try_accept(A), None, "the reader may be slow");
    lab.ms(2_000);
    assert!(lab.try_accept(A).is_some(), "but not for ever");
    lab.node.check_invariants();
    assert_eq!(lab.recv_all(socket), [b"unread", b"unread"], "nothing is lost");
    lab.node.check_invariants();
}

/// A long message that comes at a fair rate keeps its sender in memory, however long it takes.
// tests [B-18]
#[test]
fn a_long_message_on_its_way_protects_its_sender() {
    let mut small = config(B);
    small.limits.peers = 1;
    let mut lab = Lab::new(small);
    let link = lab.kernel("9.0.0.1", 1);
    let long = data(7, 5000, 4000, &vec![0; 1_000_000]).bytes();
    for piece in long[..900_000].chunks(9_000) {
        lab.feed(link, piece);
        lab.ms(1_000);
    }
    assert_eq!(lab.try_accept(A), None);
    assert_eq!(lab.counter("bl_peers_reclaimed"), 0);
}

/// A peer holds one more connection open than it has paths, time and again, and sends nothing on
/// any.
// tests [B-18]
#[test]
fn connections_without_a_path_do_not_keep_others_out() {
    let mut small = config(B);
    small.limits.peers = 1;
    let mut lab = Lab::new(small);
    lab.kernel("9.0.0.1", 1);
    for _ in 0..3 {
        lab.accept("9.0.0.1");
        lab.ms(15_000);
    }
    assert_eq!(lab.try_accept(A), None, "one of them may be waiting for its path");
    lab.accept("9.0.0.1");
    lab.ms(16_000);
    assert!(lab.try_accept(A).is_some());
}

// tests the cut that the vendor's reset and the tests of drivers use
#[test]
fn dropped_links_come_back() {
    let mut lab = Lab::larger();
    lab.kernel(A, 1);
    lab.kernel("10.0.0.0", 1);
    assert_eq!(lab.node.drop_links(lab.now, Some(ip(A))), 1);
    lab.settle();
    assert_eq!(lab.node.drop_links(lab.now, None), 1);
    lab.settle();
    assert!(lab.closes.iter().all(|c| c.1 == CloseHow::Cut));
    assert_eq!(up(&lab), [0_u8; 0]);
    lab.accept(A);
    assert_eq!(up(&lab), [0]);
}

/// A kernel's messages lie in the receive buffer of TCP, which has acknowledged them, when the
/// operator drops the connections. The kernel has released them, so nobody else has them any more.
// tests
#[test]
fn dropped_links_lose_nothing_that_tcp_has_acknowledged() {
    let (mut lab, s, link) = at(B, 5000).kernel(1);
    let out = lab.bound("10.0.0.2:4000");
    lab.slow_cuts = true;
    assert_eq!(lab.node.drop_links(lab.now, None), 1);
    lab.settle();
    assert_eq!(lab.closes, [(link, CloseHow::Cut)]);
    lab.send(out, "10.0.0.1:9", b"later").expect("queued");
    assert!(lab.data_frames(link).is_empty(), "nothing goes out any more");
    lab.deliver(link, &[data(2, 9, 5000, b"acknowledged"), data(3, 9, 5000, b"too")]);
    lab.fail(link, CloseReason::Reset);
    assert_eq!(lab.recv_all(s), [b"acknowledged".to_vec(), b"too".to_vec()]);
    let next = lab.accept(A);
    assert_eq!(lab.data_frames(next).len(), 1, "a new connection takes over");
}

/// What a peer sent on two connections is read in the order of their making, whichever is asked
/// for.
// tests
#[test]
fn dropped_links_are_read_oldest_first() {
    let mut lab = Lab::larger();
    lab.slow_cuts = true;
    let oldest = lab.kernel(A, 8);
    let newer: Vec<_> = (1..8).map(|_| lab.accept(A)).collect();
    lab.node.drop_links(lab.now, None);
    lab.settle();
    let order: Vec<_> = lab.closes.iter().map(|c| c.0).collect();
    assert_eq!(order[0], oldest);
    assert_eq!(order[1..], newer);
}

// tests the end of a node
#[test]
fn a_closing_node_neither_connects_nor_accepts() {
    let (mut lab, s, link) = at(A, 4000).dials_kernel();
    lab.node.close_links(lab.now);
    lab.settle();
    assert_eq!(lab.closes, [(link, CloseHow::Drain)]);
    lab.fail(link, CloseReason::Eof);
    lab.send(s, FAR, b"x").expect("queued");
    assert_eq!(lab.try_accept(B), None);
    lab.ms(5000);
    assert!(lab.connects.is_empty());
    assert!(lab.node.unsent_total() > 0);
}
