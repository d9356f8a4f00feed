//! Chunks are the session's: a request repeated over another path [RS-8], [RS-9].

use std::time::Duration;

use bowline_rtrs::server::{CloseReason, Request};
use bowline_rtrs::{ConnId, Input, PortAttr, Tag, WrKind};

use super::rig::{PORT, Path, Rig, config};

const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";
const C: &str = "10.0.0.4";

fn rig() -> (Rig, Path, Path) {
    let mut rig = Rig::new();
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    rig.sent.clear();
    (rig, a, b)
}

fn usr(requests: &[Request]) -> Vec<u8> {
    requests.iter().flat_map(|request| request.usr.to_vec()).collect()
}

/// Returns the paths on which answers were sent.
fn answered(rig: &mut Rig) -> Vec<ConnId> {
    let sent = std::mem::take(&mut rig.sent);
    sent.iter().filter(|sent| sent.tag.kind() == Tag::REPLY).map(|sent| sent.conn).collect()
}

/// The second copy of a request, with user message "2", is the one that begins now, and is answered
/// over its own path.
fn serve_second(rig: &mut Rig, over: &Path) {
    let second = rig.one();
    assert_eq!(*second.usr, b"2"[..]);
    rig.respond(second.op, 0, None);
    assert_eq!(answered(rig), [over.conn(1)]);
}

// tests [RT-7]: every path has its own keys for the same memory
#[test]
fn paths_of_a_session_share_its_chunks() {
    let (mut rig, mut a, b) = rig();
    let request = rig.begin(a.io(4).usr(b"a").data(b"from a"));
    rig.respond(request.op, 0, None);
    rig.take_sent(&mut a);
    // Only the key of the path that the request came by was invalidated and renewed.
    assert_ne!(a.chunks[4].1, b.chunks[4].1);
    rig.serve(b.io(4).usr(b"b").reads(6).to(6), 0);
    assert_eq!(rig.sent[0].bytes, b"from a");
}

// tests [RS-9]
#[test]
fn a_repeated_request_waits_for_the_first_one() {
    let (mut rig, a, b) = rig();
    let first = rig.begin(a.io(4).usr(b"1").data(b"data"));
    rig.disconnect(a.conn(0));
    rig.receive(b.io(4).usr(b"2").data(b"data"));
    assert!(rig.requests.is_empty(), "the first one is not answered yet");
    assert!(rig.server.has_waiting());
    assert_eq!(rig.server.sessions().next().unwrap().operations, 2);
    rig.respond(first.op, 0, None);
    assert!(answered(&mut rig).is_empty(), "nobody is left to hear it");
    assert!(!rig.server.has_waiting());
    serve_second(&mut rig, &b);
}

// tests [RS-9]: the server has not noticed yet that the client has given up the first path
#[test]
fn the_path_a_client_has_given_up_is_closed() {
    let (mut rig, a, b) = rig();
    let first = rig.begin(a.io(4).usr(b"1").data(b"data"));
    rig.hold_drain = true;
    rig.receive(b.io(4).usr(b"2").data(b"data"));
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::Overtaken)]);
    assert!(rig.requests.is_empty());
    // Answered, but writes of the client may still arrive as long as the queue pairs exist.
    rig.respond(first.op, 0, None);
    assert!(rig.requests.is_empty());
    rig.drain_all();
    serve_second(&mut rig, &b);
}

// tests [RT-100]: a device that does not drain its queues does not keep the chunks of its path
#[test]
fn chunks_of_a_device_that_empties_no_queue_are_free_after_a_while() {
    let (mut rig, a, b) = rig();
    let first = rig.begin(a.io(4).usr(b"1").data(b"data"));
    (rig.hold_drain, rig.silent) = (true, true);
    rig.receive(b.io(4).usr(b"2").data(b"data"));
    rig.respond(first.op, 0, None);
    rig.pass(Duration::from_millis(2_999));
    assert!(rig.requests.is_empty(), "the client may reach the chunk still");
    rig.now = rig.now + Duration::from_millis(1);
    rig.server.handle_timeout(rig.now);
    rig.server.take_requests(&mut rig.requests);
    assert!(rig.requests.is_empty(), "the queue pairs are there still");
    rig.settle();
    assert_eq!(rig.forgotten, [a.conn(0), a.conn(1)]);
    serve_second(&mut rig, &b);
    assert!(rig.server.path(a.id).is_none(), "nothing is left to be told");
}

// tests [RS-9]: two failures in a row
#[test]
fn only_the_last_path_of_a_client_is_answered() {
    let (mut rig, a, b) = rig();
    let c = rig.path(1, 4, C, 2);
    rig.sent.clear();
    let first = rig.begin(a.io(4).usr(b"1").data(b"data"));
    rig.receive(b.io(4).usr(b"2").data(b"data"));
    rig.receive(c.io(4).usr(b"3").data(b"data"));
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::Overtaken)]);
    // The second path is lost too, and the request that waited there with it.
    rig.disconnect(b.conn(1));
    assert_eq!(rig.server.counters().requests_dropped, 1);
    rig.respond(first.op, 0, None);
    let last = rig.one();
    assert_eq!(*last.usr, b"3"[..]);
    rig.respond(last.op, 0, None);
    assert_eq!(answered(&mut rig), [c.conn(1)]);
    assert_eq!(rig.server.sessions().next().unwrap().operations, 0);
}

// tests [RS-9]: the waiting request begins, another copy waits for it in turn, and so on
#[test]
fn those_that_wait_begin_in_order() {
    let (mut rig, a, b) = rig();
    let c = rig.path(1, 4, C, 2);
    rig.sent.clear();
    for (path, name) in [(&a, b"1"), (&b, b"2"), (&c, b"3")] {
        rig.receive(path.io(4).usr(name).data(b"data"));
    }
    let mut seen = Vec::new();
    while let Some(request) = rig.requests.pop() {
        seen.extend(request.usr.to_vec());
        rig.respond(request.op, 0, None);
    }
    assert_eq!(seen, b"123");
    assert_eq!(answered(&mut rig), [b.conn(1), c.conn(1)]);
}

// tests [RS-9]: an answer that waits for room in a failed queue delays no request
#[test]
fn a_request_does_not_wait_for_an_answer_nobody_takes() {
    let port = PortAttr { max_qp_wr: 16, ..PORT };
    let mut rig = Rig::on(config(), &[port]);
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    rig.sent.clear();
    rig.complete = false;
    let dones: Vec<_> = (0..8)
        .map(|chunk| rig.send(a.io(chunk).usr(&[chunk as u8]).reads(8).to(8).invalidate(true)))
        .collect();
    rig.deliver(&dones);
    for request in std::mem::take(&mut rig.requests) {
        rig.respond(request.op, 0, None);
    }
    let last = rig.sent.iter().any(|sent| sent.kind == WrKind::SendInv(0x1234));
    assert!(last && rig.server.counters().answers_waited > 0);
    rig.sent.clear();
    rig.receive(b.io(7).usr(&[70]).reads(8).to(8).invalidate(true));
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::Overtaken)]);
    assert_eq!(usr(&rig.requests), [70]);
    let request = rig.one();
    rig.respond(request.op, 0, None);
    assert_eq!(answered(&mut rig), [b.conn(1); 3]);
}

// tests [RT-66]
#[test]
fn no_more_wait_than_may() {
    let mut config = config();
    config.limits.waiting = 1;
    let mut rig = Rig::with(config);
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    for chunk in 0..3 {
        rig.receive(a.io(chunk));
    }
    rig.receive(b.io(0));
    assert_eq!(rig.take_closed(), [(a.id, CloseReason::Overtaken)]);
    rig.receive(b.io(1));
    assert_eq!(rig.take_closed(), [(b.id, CloseReason::TooMany)]);
    assert_eq!(rig.server.sessions().next().unwrap().operations, 3);
}

// tests [RS-19]: the session lives until everything is answered, and is known to be ending
#[test]
fn a_session_ends_with_its_last_operation() {
    let (mut rig, a, b) = rig();
    let request = rig.begin(a.io(4).usr(b"1").data(b"data"));
    rig.server.handle(rig.now, Input::Disconnected { conn: a.conn(0) });
    rig.disconnect(b.conn(0));
    assert!(rig.downs().is_empty());
    let info = rig.server.sessions().next().unwrap();
    assert_eq!((info.paths.len(), info.operations), (0, 1));
    assert!(rig.server.memory(request.session).is_some(), "what runs has its memory");
    let again = rig.ask(A, "10.0.0.1", &super::rig::con_req(1, 2, 0, 1).emit());
    assert_eq!(again, super::rig::Answer::Refused(104));
    rig.respond(request.op, 0, None);
    assert_eq!(rig.downs(), [request.session]);
    assert!(rig.server.memory(request.session).is_none());
    rig.assert_empty();
    let path = rig.path(1, 2, A, 1);
    assert_ne!(rig.server.sessions().next().unwrap().session, request.session);
    assert!(rig.server.path(path.id).is_some());
}

// tests [RS-9]: a client that has lost all its paths reuses the chunks of requests it has given up,
// as soon as it has reconnected
#[test]
fn a_path_that_joins_waits_for_what_is_under_way() {
    let mut rig = Rig::new();
    let (a, b) = (rig.path(1, 2, A, 2), rig.path(1, 3, B, 2));
    rig.sent.clear();
    let dones = [rig.send(a.io(0).usr(b"0")), rig.send(a.io(1).usr(b"1"))];
    rig.deliver(&dones);
    let requests = std::mem::take(&mut rig.requests);
    rig.disconnect(a.conn(0));
    let mut c = rig.connect(1, 4, C, 2);
    assert!(rig.info(&mut c, "s1").is_none(), "not yet");
    // What begins later does not matter.
    let later = rig.begin(b.io(2).usr(b"2"));
    rig.respond(requests[0].op, 0, None);
    assert!(rig.learn(&mut c).is_none());
    rig.respond(requests[1].op, 0, None);
    rig.learn(&mut c).expect("now");
    rig.respond(later.op, 0, None);
    assert_eq!(answered(&mut rig), [b.conn(1)]);
}

// tests [RS-9]: the same when the request it waits for will never begin
#[test]
fn a_path_that_joins_does_not_wait_for_what_is_dropped() {
    let (mut rig, a, b) = rig();
    let first = rig.begin(a.io(0).usr(b"1"));
    rig.receive(b.io(0).usr(b"2"));
    let mut c = rig.connect(1, 4, C, 1);
    assert!(rig.info(&mut c, "s1").is_none());
    rig.respond(first.op, 0, None);
    let second = rig.one();
    assert!(rig.learn(&mut c).is_none(), "the second one began before it joined");
    rig.respond(second.op, 0, None);
    rig.learn(&mut c).expect("now");

    let (mut rig, a, b) = self::rig();
    let first = rig.begin(a.io(0).usr(b"1"));
    rig.receive(b.io(0).usr(b"2"));
    let mut c = rig.connect(1, 4, C, 1);
    assert!(rig.info(&mut c, "s1").is_none());
    rig.disconnect(b.conn(0));
    rig.respond(first.op, 0, None);
    assert!(rig.requests.is_empty());
    rig.learn(&mut c).expect("now");
}

/// Sends requests in all chunks of a session, one after the other, each answered; returns the
/// number of memory areas known to be used after each.
fn fill(rig: &mut Rig, path: &mut Path) -> Vec<usize> {
    let chunks = path.chunks.len() as u16;
    let request = |chunk| {
        let request = rig.begin(path.io(chunk).data(b"data"));
        rig.respond(request.op, 0, None);
        rig.take_sent(path);
        std::iter::from_fn(|| rig.server.take_filled()).count()
    };
    (0..chunks).map(request).collect()
}

// Slow memory work is left to the driver: no request waits for it.
#[test]
fn memory_that_is_used_as_a_whole_is_told_of_once() {
    let (mut rig, mut a, _b) = rig();
    assert_eq!(fill(&mut rig, &mut a), [0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(fill(&mut rig, &mut a), [0; 8]);
}

#[test]
fn memory_that_is_used_goes_with_its_session_all_the_same() {
    let (mut rig, mut a, b) = rig();
    for chunk in 0..8 {
        rig.serve(a.io(chunk).data(b"data"), 0);
        rig.take_sent(&mut a);
    }
    rig.server.handle(rig.now, Input::Disconnected { conn: a.conn(0) });
    rig.disconnect(b.conn(0));
    rig.assert_empty();
    assert!(rig.server.take_filled().is_none());
    // The next session has areas of its own.
    let mut a = rig.path(1, 2, A, 2);
    assert_eq!(fill(&mut rig, &mut a), [0, 0, 0, 0, 0, 0, 0, 1]);
}
