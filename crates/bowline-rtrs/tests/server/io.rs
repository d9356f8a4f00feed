//! Requests and their answers, byte by byte.

use std::sync::Arc;
use std::time::Duration;

use bowline_rtrs::server::{CloseReason, ServerConfig};
use bowline_rtrs::{HbConfig, MemRef, PortAttr, Tag, WrKind};
use bowline_verbs::{Access, Buffer, Remote, next_key};
use bowline_wire::rtrs::{Dir, Geometry, Imm};

use super::rig::{PORT, Path, Rig, Sent, config};

const A: &str = "10.0.0.2";
const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

fn rig(always_invalidate: bool) -> (Rig, Path) {
    let mut rig = Rig::with(ServerConfig { always_invalidate, ..config() });
    let path = rig.path(1, 2, A, 2);
    rig.sent.clear();
    (rig, path)
}

fn ok(id: u32, errno: u16, invalidated: bool) -> u32 {
    Imm::Done { id, errno, invalidated }.to_u32()
}

fn kinds(sent: &[Sent]) -> Vec<WrKind> {
    sent.iter().map(|sent| sent.kind).collect()
}

/// RKEY_RSP of a chunk.
fn key_msg(chunk: u16, key: u32) -> Vec<u8> {
    [&4_u16.to_le_bytes()[..], &chunk.to_le_bytes(), &key.to_le_bytes()].concat()
}

// tests [RT-11], [RT-38], [RT-44], [RT-48], [RT-50], [RT-51]
#[test]
fn a_write_comes_whole_and_is_answered_with_a_new_key() {
    let (mut rig, mut path) = rig(true);
    let old = path.chunks[5].1;
    rig.receive(path.io(5).usr(b"message").data(&[7; 4000]));
    assert_eq!(rig.withdrawn.last().unwrap().1, old);
    assert!(!rig.put(&path, 5, 0, b"late"), "the client cannot reach it any more");
    let request = rig.one();
    assert_eq!((request.dir, request.room, &*request.usr), (Dir::Write, 0, &b"message"[..]));
    assert_eq!((request.data.offset, request.data.len), (5 * 8192, 4000));
    let memory = rig.server.memory(request.session).unwrap();
    let mut data = vec![0; 4000];
    memory.read(request.data.offset as usize, &mut data);
    assert_eq!(data, [7; 4000]);
    assert_eq!(rig.recvs[&path.conn(1)].len(), 8, "posted again before the answer");
    rig.respond(request.op, 0, None);
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::SendImm(ok(5, 0, false))]);
    assert_eq!(sent[0].conn, path.conn(1), "on the connection it came by");
    assert_eq!(sent[0].bytes, key_msg(5, next_key(old)));
    assert!(rig.put(&path, 5, 0, b"next"));
    // Several times around, so that the low byte wraps.
    for _ in 0..300 {
        let key = path.chunks[5].1;
        rig.serve(path.io(5).usr(b"m").data(b"d"), -5);
        let sent = rig.take_sent(&mut path);
        assert_eq!(kinds(&sent), [WrKind::SendImm(ok(5, 5, false))]);
        assert_eq!(path.chunks[5].1, next_key(key));
        assert_eq!(path.chunks[5].1 >> 8, old >> 8);
    }
}

// tests [RT-99]
#[test]
fn a_client_that_counts_keys_is_not_told_them() {
    for always_invalidate in [true, false] {
        let mut rig = Rig::with(ServerConfig { always_invalidate, ..config() });
        rig.counts_keys = true;
        let mut path = rig.path(1, 2, A, 2);
        assert!(!path.new_rkey);
        rig.sent.clear();
        let to = Remote { addr: 0x7000, rkey: 0x1234 };
        for inval in [false, true, false] {
            let key = path.chunks[3].1;
            rig.receive(path.io(3).usr(b"usr").reads(4096).to(1000).invalidate(inval));
            assert_eq!(rig.put(&path, 3, 0, b"late"), !always_invalidate, "withdrawn");
            // A client that counts keys knows the next one already.
            path.chunks[3].1 = next_key(key);
            assert!(!rig.put(&path, 3, 0, b"early"), "good from the reply on");
            path.chunks[3].1 = key;
            let request = rig.one();
            rig.respond(request.op, 0, None);
            let expected = match inval {
                false => vec![WrKind::WriteImm(to, ok(3, 0, false))],
                true => vec![
                    WrKind::Write(to),
                    WrKind::SendInv(0x1234),
                    WrKind::WriteImm(Remote::default(), ok(3, 0, true)),
                ],
            };
            assert_eq!(kinds(&rig.take_sent(&mut path)), expected);
            if always_invalidate {
                assert!(!rig.put(&path, 3, 0, b"late"), "the former key stays dead");
                path.chunks[3].1 = next_key(key);
            }
            assert!(rig.put(&path, 3, 0, b"next"));
        }
        // Errors renew the key too.
        rig.serve(path.io(3).usr(b"m").data(b"d"), -5);
        let sent = rig.take_sent(&mut path);
        assert_eq!(kinds(&sent), [WrKind::WriteImm(Remote::default(), ok(3, 5, false))]);
        assert_eq!(rig.put(&path, 3, 0, b"late"), !always_invalidate);
    }
}

// tests [RT-12], [RT-47]
#[test]
fn a_read_is_answered_in_the_order_of_the_rule() {
    let (mut rig, mut path) = rig(true);
    let to = Remote { addr: 0x7000, rkey: 0x1234 };
    for inval in [false, true] {
        let key = path.chunks[3].1;
        let request = rig.begin(path.io(3).usr(b"usr").reads(4096).to(1000).invalidate(inval));
        assert_eq!((request.dir, request.room, request.data.len), (Dir::Read, 1000, 4096));
        assert_eq!(&*request.usr, b"usr");
        let memory = Arc::clone(rig.server.memory(request.session).unwrap());
        memory.write(request.data.offset as usize, &[9; 4096]);
        rig.respond(request.op, 0, None);
        let sent = rig.take_sent(&mut path);
        let mut expected = vec![WrKind::Write(to), WrKind::SendImm(ok(3, 0, inval))];
        if inval {
            expected.insert(1, WrKind::SendInv(0x1234));
        }
        assert_eq!(kinds(&sent), expected);
        assert_eq!(sent[0].bytes, [9; 1000]);
        assert_eq!(sent.last().unwrap().bytes, key_msg(3, next_key(key)));
        assert!(sent.iter().all(|sent| sent.conn == path.conn(1)));
    }
    // An error brings no data.
    rig.serve(path.io(3).usr(b"usr").reads(4096).to(1000).invalidate(true), -28);
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::SendInv(0x1234), WrKind::SendImm(ok(3, 28, true))]);
}

// tests [RT-47], [RT-48], [RT-49], [RT-79]
#[test]
fn without_refresh_a_read_is_one_message_unless_its_key_is_to_be_invalidated() {
    let (mut rig, mut path) = rig(false);
    let to = Remote { addr: 0x7000, rkey: 0x1234 };
    rig.receive(path.io(3).usr(b"usr").reads(4096).to(4096));
    assert!(rig.withdrawn.is_empty());
    let request = rig.one();
    rig.respond(request.op, 0, None);
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::WriteImm(to, ok(3, 0, false))]);
    assert_eq!(sent[0].bytes.len(), 4096);

    rig.serve(path.io(3).usr(b"usr").reads(4096).to(4096).invalidate(true), 0);
    let sent = rig.take_sent(&mut path);
    let expected =
        [WrKind::Write(to), WrKind::SendInv(0x1234), WrKind::WriteImm(NOWHERE, ok(3, 0, true))];
    assert_eq!(kinds(&sent), expected);

    rig.serve(path.io(3).usr(b"usr").data(b"data"), -5);
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::WriteImm(NOWHERE, ok(3, 5, false))]);
    assert!(sent[0].bytes.is_empty());
}

// tests [RT-47], [RT-48]
#[test]
fn more_data_than_fits_a_packet_is_told_of_by_a_write_behind_it_where_the_device_likes_that() {
    let to = Remote { addr: 0x7000, rkey: 0x1234 };
    let burst = 15 * 4096;
    for (burst, len, two) in
        [(burst, 8192, true), (burst, 4100, true), (burst, 4096, false), (0, 8192, false)]
    {
        let geometry = Geometry::of_chunk(8, 16_384, 4096).unwrap();
        let config = ServerConfig { always_invalidate: false, geometry, ..config() };
        let mut rig = Rig::on(config, &[PortAttr { burst, ..PORT }]);
        let mut path = rig.path(1, 2, A, 2);
        rig.sent.clear();
        rig.serve(path.io(3).usr(b"usr").reads(8192).to(len), 0);
        let sent = rig.take_sent(&mut path);
        let imm = ok(3, 0, false);
        let end = Remote { addr: to.addr + u64::from(len), ..to };
        let expected = match two {
            true => vec![WrKind::Write(to), WrKind::WriteImm(end, imm)],
            false => vec![WrKind::WriteImm(to, imm)],
        };
        assert_eq!(kinds(&sent), expected, "{len} bytes");
        assert_eq!(sent[0].bytes.len(), len as usize);
    }
}

// tests [RT-41], [RT-48]
#[test]
fn requests_without_data_are_answered_without() {
    for refresh in [false, true] {
        let (mut rig, mut path) = rig(refresh);
        let flush = rig.send(path.io(0).cid(0).usr(&[1; 32]).reads(0));
        let discard = rig.send(path.io(1).cid(0).usr(&[2; 32]));
        rig.deliver(&[flush, discard]);
        assert_eq!(rig.requests.len(), 2);
        for request in std::mem::take(&mut rig.requests) {
            assert_eq!((request.room, request.data.len, request.usr.len()), (0, 0, 32));
            rig.respond(request.op, 0, None);
        }
        let sent = rig.take_sent(&mut path);
        assert_eq!(sent.len(), 2);
        for (id, sent) in (0..).zip(&sent) {
            let imm = ok(id, 0, false);
            let kind = if refresh { WrKind::SendImm(imm) } else { WrKind::WriteImm(NOWHERE, imm) };
            assert_eq!((sent.kind, sent.conn), (kind, path.conn(0)));
        }
    }
}

// tests [RT-47]
#[test]
fn a_read_can_be_answered_from_other_memory() {
    let (mut rig, mut path) = rig(true);
    let buffer = Arc::new(Buffer::new(10_000).unwrap());
    buffer.write(500, &[6; 4000]);
    let region = rig.server.add_region(buffer, Access::LOCAL_WRITE);
    rig.settle();
    let request = rig.begin(path.io(3).usr(b"usr").reads(4096).to(3000));
    rig.respond(request.op, 0, Some(MemRef { region, offset: 500, len: 4000 }));
    let sent = rig.take_sent(&mut path);
    assert_eq!(sent[0].bytes, [6; 3000]);
    // Too few bytes are an error, and no other memory is sent.
    let request = rig.begin(path.io(3).usr(b"usr").reads(4096).to(3000));
    rig.respond(request.op, 0, Some(MemRef { region, offset: 500, len: 2999 }));
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::SendImm(ok(3, 5, false))]);
    rig.server.drop_region(region);
    rig.settle();
}

// tests [RT-17]
#[test]
fn an_error_the_immediate_cannot_hold_is_eio() {
    let (mut rig, mut path) = rig(true);
    for (errno, shown) in [(-511, 511), (-512, 5), (i32::MIN, 5), (-95, 95)] {
        rig.serve(path.io(2), errno);
        let sent = rig.take_sent(&mut path);
        assert_eq!(kinds(&sent), [WrKind::SendImm(ok(2, shown, false))]);
    }
}

// tests [RS-27]
#[test]
fn an_operation_is_answered_once() {
    let (mut rig, mut path) = rig(true);
    let request = rig.begin(path.io(2));
    rig.respond(request.op, 0, None);
    rig.respond(request.op, 0, None);
    assert_eq!(rig.take_sent(&mut path).len(), 1);
    rig.receive(path.io(2));
    rig.respond(request.op, 0, None);
    assert_eq!(rig.take_sent(&mut path).len(), 0, "the slot has another operation now");
    let request = rig.one();
    rig.respond(request.op, 0, None);
    assert_eq!(rig.take_sent(&mut path).len(), 1);
}

#[test]
fn user_messages_of_all_lengths_come_whole() {
    let (mut rig, mut path) = rig(true);
    for len in [0, 1, 47, 48, 49, 264, 4092] {
        let usr: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let request = rig.begin(path.io(2).usr(&usr).data(&[1; 100]));
        assert_eq!(*request.usr, usr[..]);
        rig.respond(request.op, 0, None);
        rig.take_sent(&mut path);
    }
}

// tests [RT-52], [RT-53]
#[test]
fn answers_wait_for_room_and_go_in_order() {
    // Room for two answers of three work requests.
    let port = PortAttr { max_qp_wr: 16, ..PORT };
    let mut rig = Rig::on(config(), &[port]);
    let mut path = rig.path(1, 2, A, 2);
    rig.sent.clear();
    rig.complete = false;
    let reads: Vec<_> =
        (0..8).map(|chunk| rig.send(path.io(chunk).reads(4096).to(100).invalidate(true))).collect();
    rig.deliver(&reads);
    for request in std::mem::take(&mut rig.requests) {
        rig.respond(request.op, 0, None);
    }
    assert!(rig.server.counters().answers_waited > 0);
    let mut order = Vec::new();
    let mut keys = Vec::new();
    loop {
        let sent = rig.take_sent(&mut path);
        if sent.is_empty() {
            break;
        }
        let imms = sent.iter().filter_map(|sent| match sent.kind {
            WrKind::SendImm(imm) => Some(imm),
            _ => None,
        });
        order.extend(imms);
        keys.extend(sent.iter().filter(|sent| sent.signal).map(|sent| sent.tag));
        // The signalled send completes, which shows that those posted before it have completed.
        let last = keys.pop().expect("a signal");
        let done = super::rig::done(path.conn(1));
        rig.deliver(&[bowline_rtrs::Done { tag: last, ..done }]);
    }
    let expected: Vec<u32> = (0..8).map(|id| ok(id, 0, true)).collect();
    assert_eq!(order, expected);
    // All chunks can be used again.
    rig.begin(path.io(0));
}

// tests [RT-52]
#[test]
fn few_answers_are_signalled() {
    let mut rig = Rig::with(ServerConfig::default());
    let mut path = rig.path(1, 2, A, 2);
    rig.sent.clear();
    let mut signals = 0;
    for round in 0..1024_u16 {
        rig.serve(path.io(round % 512), 0);
        signals += rig.take_sent(&mut path).iter().filter(|sent| sent.signal).count();
    }
    assert_eq!(signals, 4);
}

// tests [RT-57], [RT-60], [RT-62]
#[test]
fn heartbeats_are_answered_at_once_and_sent_on_silence() {
    let (mut rig, mut path) = rig(true);
    rig.hear(path.conn(0), Imm::HbMsg);
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::WriteImm(NOWHERE, 0x9000_0000)]);
    assert_eq!(sent[0].conn, path.conn(0));

    rig.pass(Duration::from_millis(1100));
    let sent = rig.take_sent(&mut path);
    assert_eq!(kinds(&sent), [WrKind::WriteImm(NOWHERE, 0x8000_0000)]);
    assert!(sent[0].signal && sent[0].tag.kind() == Tag::HEARTBEAT);
    // After the answer, the server probes again at the next silence.
    rig.hear(path.conn(0), Imm::HbAck);
    rig.pass(Duration::from_millis(1100));
    assert_eq!(kinds(&rig.take_sent(&mut path)), [WrKind::WriteImm(NOWHERE, 0x8000_0000)]);
    // The client answers no more.
    rig.pass(Duration::from_secs(40));
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Heartbeat)]);
}

// tests [RT-60], [RT-63]
#[test]
fn a_silent_client_is_given_up_as_the_kernel_does() {
    let heartbeat = HbConfig { fast_path_detection: false, ..HbConfig::default() };
    let mut rig = Rig::with(ServerConfig { heartbeat, ..config() });
    let path = rig.path(1, 2, A, 1);
    rig.pass(Duration::from_millis(34_900));
    assert!(rig.take_closed().is_empty());
    rig.pass(Duration::from_millis(200));
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Heartbeat)]);
}

// tests [RS-43], [RS-46]
#[test]
fn what_a_path_does_is_counted() {
    let (mut rig, mut path) = rig(true);
    let write = rig.send(path.io(0).usr(b"user").data(&[0; 100]));
    let read = rig.send(path.io(1).usr(b"user").reads(200).to(200));
    rig.deliver(&[write, read]);
    let stats = rig.server.path(path.id).unwrap().stats;
    assert_eq!((stats.reads, stats.read_bytes), (1, 204));
    assert_eq!((stats.writes, stats.write_bytes), (1, 104));
    assert_eq!(stats.inflight, 2);
    assert_eq!(stats.wc_max, 2);
    assert!(stats.wc_total >= 3 && stats.wc_calls >= 2, "{stats:?}");
    rig.server.reset_rdma(path.id);
    let stats = rig.server.path(path.id).unwrap().stats;
    assert_eq!((stats.reads, stats.write_bytes, stats.inflight, stats.wc_max), (0, 0, 2, 2));
    rig.server.reset_completions(path.id);
    assert_eq!(rig.server.path(path.id).unwrap().stats.wc_total, 0);
    for request in std::mem::take(&mut rig.requests) {
        rig.respond(request.op, 0, None);
    }
    rig.take_sent(&mut path);
    assert_eq!(rig.server.path(path.id).unwrap().stats.inflight, 0);
    assert_eq!(rig.server.counters().requests, 2);
    assert!(rig.server.counters().iter().any(|(name, count)| (name, count) == ("answers", 2)));
}

// tests [RT-39]: a client with one connection has its requests on the service connection
#[test]
fn a_client_with_one_connection_is_served() {
    let mut rig = Rig::new();
    let mut path = rig.path(1, 2, A, 1);
    rig.sent.clear();
    let dones: Vec<_> = (0..8).map(|chunk| rig.send(path.io(chunk).cid(0).data(b"d"))).collect();
    rig.deliver(&dones);
    for request in std::mem::take(&mut rig.requests) {
        rig.respond(request.op, 0, None);
    }
    assert_eq!(rig.take_sent(&mut path).len(), 8);
}
