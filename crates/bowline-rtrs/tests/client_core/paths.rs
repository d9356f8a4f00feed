//! Paths that are lost, reconnected, added and removed.

use std::time::Duration;

use bowline_rtrs::client::{Event, PathState, PermitKind};
use bowline_rtrs::{Batch, ConnId, Errno, Input, Instant, Tag};
use bowline_verbs::WcOpcode;
use bowline_wire::rtrs::{Geometry, Imm};

use crate::peer::{CHUNK, Connects, Rig, Written, addr, config, done};

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

// tests [RS-5], [RS-8], [RT-91]
#[test]
fn requests_of_a_dead_path_move_to_the_other() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 2);
        rig.write_many(8);
        let dead = rig.live(1)[1];
        let lost: Vec<_> = rig.ios.iter().filter(|io| io.conn == dead).cloned().collect();
        assert_eq!(lost.len(), 4);
        rig.ios.retain(|io| io.conn != dead);
        rig.lose(dead);
        // The same chunks and bytes, except for the key.
        let moved = &rig.ios[4..];
        assert_eq!(moved.len(), 4);
        for (moved, lost) in moved.iter().zip(&lost) {
            assert_eq!((moved.id, &moved.bytes), (lost.id, &lost.bytes));
            assert_ne!(moved.conn.path, lost.conn.path);
        }
        assert_eq!(rig.session.paths().nth(1).unwrap().stats.failovers, 4);
        rig.reply_all();
        let mut ended = rig.take_completed();
        ended.sort_unstable();
        assert_eq!(ended, (0..8).map(|tag| (tag, 0)).collect::<Vec<_>>());
        let events = rig.take_events();
        assert!(!events.contains(&Event::Disconnected));
        assert_eq!(rig.state(0), PathState::Connected, "back at once, the server had answered");
        assert_eq!(rig.session.paths().next().unwrap().stats.reconnects, 1);
    }
}

// tests [RS-8], [RS-9]: a request does not move before its old queue pair is empty.
#[test]
fn requests_move_when_the_queues_are_empty() {
    let mut rig = Rig::opened(true, 2);
    rig.write_one(1);
    rig.ios.clear();
    rig.drains = false;
    let conns = rig.live(1);
    rig.session.handle(rig.now, Input::Disconnected { conn: conns[0] });
    rig.pump();
    assert_eq!(rig.state(0), PathState::Reconnecting);
    assert!(rig.ios.is_empty());
    rig.drain(conns[0]);
    rig.pump();
    assert!(rig.ios.is_empty());
    rig.conns.get_mut(&conns[1]).unwrap().drained = true;
    rig.session.handle(rig.now, Input::Drained { conn: conns[1] });
    rig.pump();
    assert_eq!(rig.ios.len(), 1);
}

/// Loses the first path on a device that does not drain its queues; one of its connections is
/// drained nevertheless. Returns that connection and the other one.
fn stuck(rig: &mut Rig) -> [ConnId; 2] {
    let conns: [ConnId; 2] = rig.live(1).try_into().unwrap();
    (rig.drains, rig.parts) = (false, false);
    rig.session.handle(rig.now, Input::Failed { conn: conns[1], errno: Errno::EIO });
    rig.pump();
    rig.drain(conns[0]);
    conns
}

// tests [RT-100]: on a device that does not drain a queue, requests wait for three seconds, and
// move when their queue pair is destroyed.
#[test]
fn requests_of_a_device_that_empties_no_queue_move_after_a_while() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 2);
        rig.write_one(1);
        rig.ios.clear();
        let [other, stuck] = stuck(&mut rig);
        rig.pass(Duration::from_millis(2_999));
        assert!(rig.forgotten.is_empty() && rig.ios.is_empty());
        // The order to destroy it is given; nothing moves before that is carried out.
        rig.now = rig.now + Duration::from_millis(1);
        rig.session.handle_timeout(rig.now);
        let mut batch = Batch::default();
        rig.session.take_batch(&mut batch);
        assert!(batch.is_empty());
        rig.pump();
        assert_eq!(rig.forgotten, [stuck]);
        assert_eq!(rig.ios.len(), 1, "it has moved");
        assert!(rig.conns.contains_key(&other), "the server is told of its end still");
        // Late completions of that queue pair are ignored.
        rig.drain(stuck);
        let late = Tag::new(Tag::RECV, 0);
        rig.session.handle_done(rig.now, &[done(stuck, late, WcOpcode::RecvRdmaWithImm)]);
        rig.session.handle(rig.now, Input::Disconnected { conn: stuck });
        rig.pump();
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(1, 0)]);
        // The path is connected again in time.
        rig.pass(secs(40));
        assert_eq!(rig.state(0), PathState::Connected);
    }
}

// tests [RT-100]: without another path the requests end then, and no sooner.
#[test]
fn requests_end_when_the_server_can_reach_nothing_any_more() {
    let mut rig = Rig::opened(true, 1);
    rig.write_one(1);
    rig.connects = Connects::Ignore;
    stuck(&mut rig);
    rig.now = rig.now + secs(3);
    rig.session.handle_timeout(rig.now);
    let mut ended = Vec::new();
    rig.session.take_completed(&mut ended);
    assert_eq!(ended, [], "its queue pair is there still");
    rig.pump();
    assert_eq!(rig.take_completed(), [(1, Errno::ECONNABORTED.neg())]);
}

// tests [RT-100], [RS-25]
#[test]
fn a_close_does_not_wait_for_ever_for_a_device() {
    let mut rig = Rig::opened(true, 2);
    (rig.drains, rig.parts) = (false, false);
    rig.session.close(rig.now);
    rig.pump();
    rig.pass(secs(4));
    assert_eq!(rig.take_events().last(), Some(&Event::Closed));
    rig.assert_empty();
}

// tests [RS-8], [RS-16], [RS-17]
#[test]
fn the_last_path_takes_its_requests_with_it() {
    let mut rig = Rig::opened(true, 1);
    let Written { permit, memory } = rig.write_one(1);
    rig.connects = Connects::Ignore;
    rig.lose(rig.live(1)[0]);
    assert_eq!(rig.take_completed(), [(1, -103)]);
    assert!(rig.take_events().contains(&Event::Disconnected));
    assert!(rig.session.geometry().is_none());
    assert_eq!(rig.write(&permit, memory, 2), Err(Errno::ECONNABORTED));
    // The permit is good again on the next link.
    rig.connects = Connects::Accept;
    rig.pass(secs(40));
    assert!(rig.take_events().contains(&Event::Reconnected));
    rig.ios.clear();
    rig.write(&permit, memory, 3).unwrap();
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(3, 0)]);
    let last = rig.conns.values().last().unwrap();
    assert_eq!((last.req.recon_cnt, last.req.first), (3, true), "two attempts, all first");
}

/// Answers the heartbeats of connected paths.
fn answer_heartbeats(rig: &mut Rig) {
    for (conn, _) in std::mem::take(&mut rig.beats) {
        rig.give_imm(conn, Imm::HbAck);
    }
    rig.pump();
}

/// Lets time pass. Returns when the client began to connect a path.
fn attempts(rig: &mut Rig, time: Duration) -> Vec<Instant> {
    let (end, mut at) = (rig.now + time, Vec::new());
    while let Some(next) = rig.session.poll_timeout().filter(|next| *next <= end) {
        rig.pass(next.saturating_since(rig.now));
        answer_heartbeats(rig);
        let connecting =
            |e: &Event| matches!(e, Event::PathState { state: PathState::Connecting, .. });
        at.extend(rig.take_events().iter().filter(|e| connecting(e)).map(|_| rig.now));
    }
    rig.now = end;
    at
}

// tests [RT-91]: the distances end at 8 s while no path is connected, so that waiting requests
// outlive several attempts, and at 30 s while another path carries them.
#[test]
fn attempts_come_at_growing_distances() {
    for (paths, expected) in
        [(1, [1, 2, 4, 8, 8, 8, 8, 8].as_slice()), (2, &[1, 2, 4, 8, 16, 30, 30])]
    {
        let mut rig = Rig::opened(true, paths);
        rig.parts = false;
        rig.connects = Connects::Refuse(17);
        let start = rig.now;
        rig.lose(rig.live(1)[0]);
        let at = attempts(&mut rig, secs(200));
        assert_eq!(at[0], start + secs(1), "no answer to the disconnect for a second");
        assert!(at.len() > expected.len(), "{at:?}");
        for (pair, expected) in at.windows(2).zip(expected) {
            let ms = pair[1].saturating_since(pair[0]).as_millis() as u64;
            assert!((expected * 750..=expected * 1250).contains(&ms), "{ms} for {expected} s");
        }
        let stats = rig.session.paths().next().unwrap().stats.clone();
        assert_eq!(stats.reconnects_failed as usize, at.len());
        assert_eq!(rig.conns.len(), rig.live(2).len(), "links that were left are forgotten");
    }
}

/// The server drops the only path. Waits until it is back, and returns how long that took.
fn lose_and_wait(rig: &mut Rig) -> Duration {
    let start = rig.now;
    let conn = rig.live(1)[0];
    rig.session.handle(rig.now, Input::Disconnected { conn });
    rig.pump();
    while rig.state(0) != PathState::Connected {
        let next = rig.session.poll_timeout().unwrap();
        rig.pass(next.saturating_since(rig.now));
    }
    rig.now.saturating_since(start)
}

// tests [RT-91], [RT-82]: a kernel on a network that loses packets serves some IO and then ends the
// path, again and again. The client comes back after a second each time, not later and later.
#[test]
fn a_short_path_that_served_io_is_made_again_soon() {
    let mut rig = Rig::opened(true, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    lose_and_wait(&mut rig);
    for round in 0..10 {
        rig.write(&permit, memory, round).unwrap();
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(round, 0)]);
        let ms = lose_and_wait(&mut rig).as_millis();
        assert!((750..=1250).contains(&ms), "{ms} in round {round}");
    }
    // Answers to service messages alone prove nothing: they come before the IO that may be at
    // fault.
    let service = rig.session.get_permit(PermitKind::Service, 0).unwrap();
    let mut took = Vec::new();
    for round in 0..3 {
        rig.write(&service, memory, round).unwrap();
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(round, 0)]);
        took.push(lose_and_wait(&mut rig));
    }
    assert!(took[2] > secs(3), "{took:?}");
}

// tests [RT-91]: a server that accepts a path and drops it at once does not keep the client busy.
#[test]
fn a_path_that_does_not_last_is_given_time() {
    let mut rig = Rig::opened(true, 1);
    let start = rig.now;
    let mut lost = Vec::new();
    for _ in 0..6 {
        lose_and_wait(&mut rig);
        lost.push(rig.now.saturating_since(start).as_millis() as u64);
    }
    assert_eq!(lost[0], 0);
    for (pair, expected) in lost.windows(2).zip([1, 2, 4, 8, 8]) {
        let ms = pair[1] - pair[0];
        assert!((expected * 750..=expected * 1250).contains(&ms), "{ms} for {expected} s");
    }
    // After some connected seconds a loss counts as a new outage.
    for _ in 0..11 {
        rig.pass(secs(1));
        answer_heartbeats(&mut rig);
    }
    rig.lose(rig.live(1)[0]);
    assert_eq!(rig.state(0), PathState::Connected);
}

// tests [RT-91]: while another path is connected, a flapping path is retried slowly; once the other
// is lost, it is retried at once.
#[test]
fn the_loss_of_the_last_path_hurries_the_others() {
    let mut rig = Rig::opened(true, 2);
    // The first path has failed for long.
    rig.connects = Connects::Refuse(17);
    rig.lose(rig.live(1)[0]);
    for _ in 0..100 {
        rig.pass(secs(1));
        answer_heartbeats(&mut rig);
    }
    assert_eq!((rig.state(0), rig.state(1)), (PathState::Reconnecting, PathState::Connected));
    // Both servers answer again, but the first path is not retried for up to half a minute.
    rig.connects = Connects::Accept;
    rig.parts = false;
    let lost = rig.now;
    rig.lose(rig.live(2)[0]);
    while rig.state(0) != PathState::Connected {
        let next = rig.session.poll_timeout().unwrap();
        rig.pass(next.saturating_since(rig.now));
    }
    let took = rig.now.saturating_since(lost);
    assert!(took <= Duration::from_millis(1250), "{took:?}");
}

// tests [RT-91]
#[test]
fn a_server_that_still_has_the_path_is_asked_again_soon() {
    let mut settings = config();
    settings.max_reconnects = 2;
    let mut rig = Rig::opened_with(settings, true, 1);
    rig.connects = Connects::Refuse(104);
    rig.lose(rig.live(1)[0]);
    let at = attempts(&mut rig, secs(5));
    assert!(at.len() > 5, "{at:?}");
    assert_eq!(rig.session.paths().next().unwrap().stats.reconnects_failed, 0);
    rig.connects = Connects::Accept;
    rig.pass(secs(4));
    assert_eq!(rig.state(0), PathState::Connected);
}

// tests [RS-10], [RS-14], [RS-7], [RS-13]
#[test]
fn a_delay_that_was_set_is_kept_as_the_kernel_keeps_it() {
    let mut settings = config();
    settings.reconnect_delay = Some(secs(30));
    settings.max_reconnects = 2;
    let mut rig = Rig::opened_with(settings, true, 1);
    rig.connects = Connects::Fail(Errno::EHOSTUNREACH);
    let start = rig.now;
    rig.lose(rig.live(1)[0]);
    let at = attempts(&mut rig, secs(200));
    assert_eq!(at.len(), 2);
    for (at, before) in at.iter().zip([start, at[0]]) {
        let ms = at.saturating_since(before).as_millis();
        assert!((31_000..31_008).contains(&ms), "{ms}");
    }
    assert_eq!(rig.state(0), PathState::Closed, "attempts are used up, the path stays listed");
    // The peer never answers the disconnect: the delay begins 30 s later.
    let mut settings = config();
    settings.reconnect_delay = Some(secs(30));
    let mut rig = Rig::opened_with(settings, true, 1);
    rig.parts = false;
    let start = rig.now;
    rig.lose(rig.live(1)[0]);
    let at = attempts(&mut rig, secs(70));
    let ms = at[0].saturating_since(start).as_millis();
    assert!((61_000..61_008).contains(&ms), "{ms}");
}

// tests [RS-13]
#[test]
fn no_attempts_means_closed() {
    let mut settings = config();
    settings.max_reconnects = 0;
    let mut rig = Rig::opened_with(settings, false, 1);
    rig.lose(rig.live(1)[0]);
    assert_eq!(rig.state(0), PathState::Closed);
    let id = rig.path(0);
    assert!(rig.take_events().contains(&Event::PathClosed { path: id }));
    rig.session.reconnect_path(rig.now, id).unwrap();
    rig.pump();
    assert!(rig.take_events().contains(&Event::PathReconnected { path: id, result: Ok(()) }));
}

// tests [RS-15], [RT-30]
#[test]
fn a_server_of_another_depth_is_left_alone() {
    let mut rig = Rig::opened(false, 1);
    let before = rig.geometry;
    rig.geometry = Geometry::of_chunk(32, CHUNK, 4096).unwrap();
    rig.lose(rig.live(1)[0]);
    rig.pass(secs(60));
    assert_eq!(rig.state(0), PathState::Closed);
    let id = rig.path(0);
    for (geometry, result) in [(rig.geometry, Err(Errno::ENOTCONN)), (before, Ok(()))] {
        rig.take_events();
        rig.geometry = geometry;
        rig.session.reconnect_path(rig.now, id).unwrap();
        rig.pump();
        assert!(rig.take_events().contains(&Event::PathReconnected { path: id, result }));
        rig.pass(secs(60));
    }
    assert_eq!(rig.state(0), PathState::Connected);
}

// tests [RS-38], [RS-37], [RS-6], [RS-8]
#[test]
fn a_disconnect_on_order_moves_nothing() {
    let mut rig = Rig::opened(true, 2);
    rig.write_many(4);
    let id = rig.path(0);
    rig.session.disconnect_path(rig.now, id).unwrap();
    rig.pump();
    assert_eq!(rig.state(0), PathState::Closing);
    assert_eq!(rig.session.reconnect_path(rig.now, id), Err(Errno::EBUSY));
    rig.reply_all();
    assert_eq!(rig.state(0), PathState::Closed);
    assert!(rig.take_events().contains(&Event::PathClosed { path: id }));
    assert_eq!(rig.session.paths().map(|p| p.stats.failovers).sum::<u64>(), 0);
    assert_eq!(rig.take_completed().len(), 4);
    rig.pass(secs(100));
    assert_eq!(rig.state(0), PathState::Closed, "not connected again by itself");
    // A second call returns at once.
    rig.session.disconnect_path(rig.now, id).unwrap();
    rig.pump();
    assert!(rig.take_events().contains(&Event::PathClosed { path: id }));
    rig.session.reconnect_path(rig.now, id).unwrap();
    rig.pump();
    assert!(rig.take_events().contains(&Event::PathReconnected { path: id, result: Ok(()) }));
    let stats = rig.session.paths().next().unwrap().stats.clone();
    assert_eq!((stats.reconnects, stats.reconnects_failed), (1, 0));
}

// tests [RS-8]: requests move even if the server does not answer the disconnect within a second.
#[test]
fn a_disconnect_on_order_waits_a_second() {
    let mut rig = Rig::opened(true, 2);
    rig.write_one(1);
    rig.ios.clear();
    let id = rig.path(0);
    rig.session.disconnect_path(rig.now, id).unwrap();
    rig.pump();
    rig.pass(Duration::from_millis(999));
    assert!(rig.ios.is_empty());
    rig.pass(Duration::from_millis(2));
    assert_eq!(rig.ios.len(), 1);
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0)]);
}

// tests [RS-37], [RT-91]: when the server has not noticed the end of the last link, the connect is
// repeated.
#[test]
fn a_reconnect_on_order_waits_for_the_server_to_notice() {
    for (heals, result) in [(true, Ok(())), (false, Err(Errno::ENOTCONN))] {
        let mut rig = Rig::opened(true, 1);
        let id = rig.path(0);
        rig.session.disconnect_path(rig.now, id).unwrap();
        rig.pump();
        rig.pass(secs(100));
        rig.take_events();
        rig.connects = Connects::Refuse(104);
        rig.session.reconnect_path(rig.now, id).unwrap();
        rig.pump();
        rig.pass(Duration::from_millis(500));
        let told = |e: &Event| matches!(e, Event::PathReconnected { .. });
        assert!(!rig.take_events().iter().any(told), "still at it");
        assert_eq!(rig.session.reconnect_path(rig.now, id), Err(Errno::EBUSY));
        if heals {
            rig.connects = Connects::Accept;
        }
        rig.pass(secs(4));
        let told = rig.take_events().into_iter().filter(told).collect::<Vec<_>>();
        assert_eq!(told, [Event::PathReconnected { path: id, result }]);
    }
}

// tests [RS-37]
#[test]
fn a_reconnect_on_order_reports_failure() {
    let mut rig = Rig::opened(true, 1);
    let id = rig.path(0);
    rig.connects = Connects::Fail(Errno::EHOSTUNREACH);
    rig.session.reconnect_path(rig.now, id).unwrap();
    rig.pump();
    let failed = Event::PathReconnected { path: id, result: Err(Errno::ENOTCONN) };
    assert!(rig.take_events().contains(&failed));
    assert_eq!(rig.state(0), PathState::Reconnecting);
    // The pending attempt is made at once.
    rig.connects = Connects::Accept;
    rig.session.reconnect_path(rig.now, id).unwrap();
    rig.pump();
    assert!(rig.take_events().contains(&Event::PathReconnected { path: id, result: Ok(()) }));
}

// tests [RS-38], [RS-39]
#[test]
fn a_path_may_be_closed_and_removed_while_it_closes() {
    let mut rig = Rig::opened(false, 1);
    let id = rig.path(0);
    rig.session.disconnect_path(rig.now, id).unwrap();
    for _ in 0..2 {
        rig.session.remove_path(rig.now, id).unwrap();
        rig.session.disconnect_path(rig.now, id).unwrap();
    }
    assert_eq!(rig.session.reconnect_path(rig.now, id), Err(Errno::EBUSY));
    rig.pump();
    let mut told = rig.take_events();
    told.retain(|e| matches!(e, Event::PathClosed { .. } | Event::PathRemoved { .. }));
    assert_eq!(told, [Event::PathClosed { path: id }, Event::PathRemoved { path: id }]);
    assert_eq!(rig.session.paths().count(), 0);
}

// tests [RS-39], [RS-34], [RT-34], [RS-16]
#[test]
fn the_last_path_may_go_and_another_revive_the_session() {
    let mut rig = Rig::opened(false, 1);
    let id = rig.path(0);
    rig.session.remove_path(rig.now, id).unwrap();
    rig.pump();
    let events = rig.take_events();
    assert!(events.contains(&Event::PathRemoved { path: id }));
    assert!(events.contains(&Event::Disconnected));
    assert_eq!(rig.session.paths().count(), 0);
    assert_eq!(rig.session.remove_path(rig.now, id), Err(Errno::EINVAL));
    assert!(rig.conns.is_empty());
    let id = rig.session.add_path(rig.now, addr(2).0, addr(2).1).unwrap();
    rig.pump();
    let events = rig.take_events();
    assert!(events.contains(&Event::PathAdded { path: id, result: Ok(()) }));
    assert!(events.contains(&Event::Reconnected));
    assert!(rig.conns.values().all(|conn| conn.req.first), "no path: may make a session");
    assert_eq!(rig.session.add_path(rig.now, addr(2).0, addr(9).1), Err(Errno::EEXIST));
    rig.write_one(1);
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0)]);
}

// tests [RS-34], [RT-28]
#[test]
fn a_path_that_cannot_be_added_leaves_no_trace() {
    for (connects, errno) in [
        (Connects::Refuse(17), Errno::EEXIST),
        (Connects::Refuse(6), Errno::ENXIO),
        (Connects::Fail(Errno::EADDRNOTAVAIL), Errno::EADDRNOTAVAIL),
        (Connects::Ignore, Errno::ETIMEDOUT),
        (Connects::Until(0), Errno::ETIMEDOUT),
    ] {
        let mut rig = Rig::opened(false, 1);
        let (conns, buffers) = (rig.conns.len(), rig.buffers.len());
        rig.connects = connects;
        let id = rig.session.add_path(rig.now, addr(2).0, addr(2).1).unwrap();
        rig.pump();
        // The first path is unaffected.
        for _ in 0..62 {
            rig.pass(secs(1));
            for (conn, beat) in std::mem::take(&mut rig.beats) {
                assert_eq!(beat, Imm::HbMsg);
                rig.give_imm(conn, Imm::HbAck);
            }
            rig.pump();
        }
        assert!(rig.take_events().contains(&Event::PathAdded { path: id, result: Err(errno) }));
        assert_eq!(rig.session.paths().count(), 1);
        assert_eq!((rig.conns.len(), rig.buffers.len()), (conns, buffers));
        assert_eq!(rig.state(0), PathState::Connected);
    }
}

// tests [RT-60], [RT-61], [RT-62], [RT-88]
#[test]
fn a_silent_server_is_noticed() {
    let mut rig = Rig::opened(true, 1);
    rig.connects = Connects::Ignore;
    rig.pass(secs(1));
    let (conn, beat) = rig.beats[0];
    assert_eq!((conn.cid, beat, rig.beats.len()), (0, Imm::HbMsg, 1));
    rig.now = rig.now + Duration::from_millis(2);
    rig.give_imm(conn, Imm::HbAck);
    rig.pump();
    assert_eq!(rig.session.paths().next().unwrap().latency, Duration::from_millis(2));
    rig.pass(secs(25));
    assert_eq!(rig.state(0), PathState::Connected);
    assert_eq!(rig.beats.len(), 2, "one at a time");
    rig.pass(secs(11));
    assert_eq!(rig.state(0), PathState::Connecting);
}

// tests [RT-62]
#[test]
fn the_servers_heartbeat_is_answered() {
    let mut rig = Rig::opened(true, 1);
    let conns = rig.live(1);
    for _ in 0..3_000 {
        rig.give_imm(conns[0], Imm::HbMsg);
        rig.pump();
    }
    assert_eq!(rig.beats.len(), 3_000);
    assert!(rig.beats.iter().all(|beat| *beat == (conns[0], Imm::HbAck)));
    // On another connection it is no heartbeat.
    rig.give_imm(conns[1], Imm::HbMsg);
    rig.pump();
    assert_eq!((rig.beats.len(), rig.state(0)), (3_000, PathState::Connected));
}

// tests [RT-90]
#[test]
fn the_retry_count_depends_on_what_bridges_a_cut() {
    for (paths, bridges, expected) in [(1, false, 7), (1, true, 6), (2, false, 6)] {
        let mut settings = config();
        settings.bridges_outages = bridges;
        let rig = Rig::opened_with(settings, true, paths);
        assert!(rig.conns.values().all(|conn| conn.retry_count == expected));
    }
}

// tests [RS-4], [RS-12]: closing at any point of an attempt leaves nothing behind.
#[test]
fn a_path_can_be_closed_at_any_time() {
    for connects in [Connects::Ignore, Connects::Until(0), Connects::Until(1)] {
        for drains in [false, true] {
            let mut rig = Rig::opened(true, 1);
            rig.connects = connects;
            rig.answers_info = false;
            rig.lose(rig.live(1)[0]);
            assert_eq!(rig.state(0), PathState::Connecting);
            rig.drains = drains;
            rig.session.close(rig.now);
            rig.pump();
            if !drains {
                let closed: Vec<_> =
                    rig.conns.iter().filter(|(_, c)| c.closed).map(|(conn, _)| *conn).collect();
                closed.into_iter().for_each(|conn| rig.drain(conn));
                rig.pump();
            }
            rig.pass(secs(3));
            assert_eq!(rig.take_events().last(), Some(&Event::Closed), "{connects:?}");
            rig.assert_empty();
        }
    }
}
