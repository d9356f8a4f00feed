//! A client that breaks the rules loses its path, and no other session is affected [RT-67],
//! [RT-68].

use bowline_rtrs::server::{CloseReason, PathInfo, ServerConfig, SessionInfo};
use bowline_rtrs::{Done, Tag};
use bowline_verbs::WcOpcode;
use bowline_wire::rtrs::{Desc, Imm, emit_info_req, read_hdr, write_hdr};

use super::rig::{Path, Rig, config, desc};

const A: &str = "10.0.0.2";
const B: &str = "10.0.0.3";

/// The misbehaviour of a client.
type Act = dyn Fn(&mut Rig, &Path) -> Vec<Done>;

/// Another session with a request in flight is not affected.
fn attack(act: &Act, expected: Option<CloseReason>) {
    for always_invalidate in [false, true] {
        let mut rig = Rig::with(ServerConfig { always_invalidate, ..config() });
        let mut victim = rig.path(1, 1, A, 2);
        rig.sent.clear();
        let request = rig.begin(victim.io(3).usr(b"victim").data(&[5; 1000]));
        let path = rig.path(2, 2, B, 2);
        rig.sent.clear();
        let before = state(&rig, &request);
        let dones = act(&mut rig, &path);
        rig.deliver(&dones);
        let closed = rig.take_closed();
        assert_eq!(closed, Vec::from_iter(expected.map(|reason| (path.id, reason))));
        if let Some(reason) = expected {
            assert!(rig.requests.is_empty(), "not carried out");
            assert!(rig.take_sent(&mut path.clone()).is_empty(), "not answered");
            assert!(reason.is_violation());
            assert_eq!(rig.server.counters().paths_violated, 1);
        }
        assert_eq!(state(&rig, &request), before, "of the victim");
        rig.respond(request.op, 0, None);
        assert!(!rig.take_sent(&mut victim).is_empty());
    }
}

fn state(
    rig: &Rig,
    request: &bowline_rtrs::server::Request,
) -> (SessionInfo, Vec<PathInfo>, Vec<u8>) {
    let info = rig.server.sessions().find(|info| info.session == request.session).unwrap();
    let mut bytes = Vec::new();
    let memory = rig.server.memory(request.session).unwrap();
    memory.append_to(0, memory.len(), &mut bytes);
    let paths = info.paths.clone();
    (info, paths, bytes)
}

fn refused(act: impl Fn(&mut Rig, &Path) -> Vec<Done> + 'static, reason: CloseReason) {
    attack(&act, Some(reason));
}

/// A header at an offset of chunk 0.
fn header(off: u32, bytes: &[u8]) -> impl Fn(&mut Rig, &Path) -> Vec<Done> + use<> {
    let bytes = bytes.to_vec();
    move |rig, path| {
        let room = (rig.geometry().chunk() - off) as usize;
        assert!(rig.put(path, 0, off.into(), &bytes[..room.min(bytes.len())]));
        vec![rig.request(path, 1, 0, off, 0)]
    }
}

fn read_header(usr_len: u16, inval: bool, desc: Option<Desc>) -> Vec<u8> {
    let mut out = [0; 24];
    let len = read_hdr(usr_len, inval, desc, &mut out);
    out[..len].to_vec()
}

/// Returns the header with 16 bits of it changed.
fn changed(mut header: Vec<u8>, at: usize, to: u16) -> Vec<u8> {
    header[at..at + 2].copy_from_slice(&to.to_le_bytes());
    header
}

// tests [RT-67] 2: as a kernel does
#[test]
fn answers_of_a_client_are_ignored_and_counted() {
    let mut rig = Rig::new();
    let path = rig.path(1, 2, "10.0.0.2", 2);
    for (ignored, (cid, invalidated)) in (1..).zip([(1, false), (0, true)]) {
        let imm = Imm::Done { id: 0, errno: 0, invalidated }.to_u32();
        let done = rig.imm(path.conn(cid), imm, 8);
        rig.deliver(&[done]);
        assert_eq!(rig.server.counters().immediates_ignored, ignored);
    }
    assert!(rig.take_closed().is_empty());
    rig.begin(path.io(0).data(b"d"));
}

// tests [RT-67] 1, 2
#[test]
fn messages_that_are_none_for_a_server() {
    refused(|rig, path| vec![rig.message(path.conn(1), b"")], CloseReason::Message);
    // A request sent instead of written.
    let sent = |rig: &mut Rig, path: &Path| {
        let done = rig.request(path, 1, 0, 0, 0);
        vec![Done { opcode: WcOpcode::Recv, ..done }]
    };
    refused(sent, CloseReason::Message);
    // A second INFO_REQ goes into an empty receive.
    let name = "again".parse_name();
    refused(
        move |rig, path| {
            let done = rig.message(path.conn(0), &emit_info_req(&name));
            vec![done]
        },
        CloseReason::Message,
    );
}

trait ParseName {
    fn parse_name(&self) -> bowline_wire::rtrs::SessionName;
}

impl ParseName for str {
    fn parse_name(&self) -> bowline_wire::rtrs::SessionName {
        bowline_wire::rtrs::SessionName::new(self).unwrap()
    }
}

// tests [RT-14], [RT-62]: unknown messages, and heartbeats on other connections, are no reason to
// close
#[test]
fn immediates_that_are_ignored() {
    for imm in [0x3000_0000, 0x7fff_ffff, 0xa000_0000, 0xf000_0001] {
        attack(&move |rig, path| vec![rig.imm(path.conn(1), imm, 0)], None);
    }
    for imm in [Imm::HbMsg, Imm::HbAck] {
        let act = move |rig: &mut Rig, path: &Path| vec![rig.imm(path.conn(1), imm.to_u32(), 0)];
        attack(&act, None);
    }
}

// tests [RT-67] 3
#[test]
fn chunks_and_offsets_that_do_not_exist() {
    // 8 chunks: 3 bits; 25 bits of offset.
    let imm = |payload: u32| Imm::Request(payload).to_u32();
    let off = imm(8192);
    refused(move |rig, path| vec![rig.imm(path.conn(1), off, 0)], CloseReason::Chunk);
    let off = imm((1 << 25) - 1);
    refused(move |rig, path| vec![rig.imm(path.conn(1), off, 0)], CloseReason::Chunk);
    // 5 chunks need 3 bits too, so that 5 to 7 can be named and are not there.
    let geometry = bowline_wire::rtrs::Geometry::of_chunk(5, 8192, 4096).unwrap();
    let mut rig = Rig::with(ServerConfig { geometry, ..config() });
    let path = rig.path(1, 1, A, 2);
    let done = rig.imm(path.conn(1), imm(5 << 25), 0);
    rig.deliver(&[done]);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Chunk)]);
}

// tests [RT-67] 3
#[test]
fn a_chunk_that_is_in_use() {
    let mut rig = Rig::new();
    let path = rig.path(1, 1, A, 2);
    let request = rig.begin(path.io(0));
    let done = rig.request(&path, 1, 0, 1, 5);
    rig.deliver(&[done]);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::ChunkBusy)]);
    assert!(rig.requests.is_empty());
    rig.respond(request.op, 0, None);
    rig.assert_empty();

    // Both at once, on two connections: only the first is examined, and neither is carried out.
    let mut rig = Rig::new();
    let path = rig.path(1, 1, A, 3);
    let dones = [rig.send(path.io(0)), rig.request(&path, 2, 0, 1, 5)];
    let withdrawn = rig.withdrawn.len();
    rig.deliver(&dones);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::ChunkBusy)]);
    assert!(rig.requests.is_empty());
    assert_eq!(rig.withdrawn.len(), withdrawn + 1);
}

// tests [RT-67] 4, 5, 6, 7, [RT-45], [RT-70]
#[test]
fn malformed_headers() {
    let bad = |off, bytes: &[u8]| refused(header(off, bytes), CloseReason::Header);
    let read = || read_header(8, false, Some(desc(100)));
    for kind in [0, 1, 4, 0xffff] {
        bad(108, &changed(read(), 0, kind));
    }
    bad(8189, &write_hdr(0));
    bad(8191, &write_hdr(0));
    bad(8192 - 7, &read());
    bad(8192 - 23, &read());
    bad(7, &write_hdr(8)); // longer than the bytes before the header
    bad(0, &write_hdr(0xffff));
    bad(4097, &write_hdr(4097)); // longer than may be
    bad(4097 + 8, &write_hdr(8)); // more data than may be
    bad(108, &changed(read(), 6, 2)); // two descriptors
    bad(108, &changed(read(), 6, 0xffff));
    bad(108, &changed(read(), 4, 2)); // an unknown flag
    bad(8, &changed(read_header(8, false, None), 4, 1)); // invalidate what?
    bad(108, &read_header(8, false, None)); // data without a destination
    bad(108, &read_header(8, true, Some(desc(0))));
    bad(108, &read_header(8, true, Some(desc(101)))); // more than there is
    bad(108, &read_header(8, true, Some(Desc { addr: u64::MAX - 98, ..desc(100) })));
}

// tests [RT-67] 5: what the upper layer looks at is there
#[test]
fn a_user_message_shorter_than_the_upper_layer_reads() {
    let mut rig = Rig::with(ServerConfig { usr_min: 2, ..config() });
    let path = rig.path(1, 1, A, 2);
    rig.begin(path.io(0).usr(b"ab"));
    rig.receive(path.io(1).usr(b"a"));
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Header)]);
}

// tests [RT-67] 1, [RT-97]
#[test]
fn other_lengths_than_the_header_says() {
    let header = b"usr".len() as u32 + 4;
    for len in [header, header + 1, header + 99, header + 100] {
        let mut rig = Rig::new();
        let path = rig.path(1, 1, A, 2);
        let done = rig.send(path.io(0).usr(b"usr").data(&[1; 100]));
        assert_eq!(done.len, header + 100);
        rig.deliver(&[Done { len, ..done }]);
        assert_eq!(rig.one().data.len, 100, "data may come before, whole or in part");
    }
    for len in [1, header - 1, header + 101] {
        let write = move |rig: &mut Rig, path: &Path| {
            vec![Done { len, ..rig.send(path.io(0).usr(b"usr").data(&[1; 100])) }]
        };
        refused(write, CloseReason::Header);
    }
    for more in [u32::MAX, 1] {
        let read = move |rig: &mut Rig, path: &Path| {
            let done = rig.send(path.io(0).usr(b"usr").reads(100).to(100).invalidate(true));
            vec![Done { len: done.len.wrapping_add(more), ..done }]
        };
        refused(read, CloseReason::Header);
    }
}

// tests [RT-67] 9
#[test]
fn a_key_that_cannot_be_withdrawn() {
    let mut rig = Rig::new();
    let (path, other) = (rig.path(1, 1, A, 2), rig.path(2, 2, B, 2));
    rig.stuck = vec![path.chunks[0].1];
    let dones = [rig.send(path.io(0)), rig.send(other.io(0))];
    rig.deliver(&dones);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Withdraw)]);
    rig.one();
}

// tests [RT-65] b: changes after the header was read have no effect
#[test]
fn a_chunk_that_changes_while_it_is_used() {
    let mut rig = Rig::with(ServerConfig { always_invalidate: false, ..config() });
    let mut path = rig.path(1, 1, A, 2);
    rig.sent.clear();
    let request = rig.begin(path.io(0).usr(b"user").reads(100).to(100));
    assert!(rig.put(&path, 0, 100, &[0xff; 28]), "without refresh nothing hinders it");
    assert_eq!(*request.usr, b"user"[..]);
    rig.respond(request.op, 0, None);
    let sent = rig.take_sent(&mut path);
    assert_eq!(sent[0].bytes.len(), 100);
}

// tests [RT-62], [RT-66]: a client that requests heartbeat answers and does not receive them
#[test]
fn a_flood_of_heartbeats() {
    let mut rig = Rig::new();
    let path = rig.path(1, 1, A, 1);
    rig.sent.clear();
    rig.complete = false;
    for _ in 0..10_000 {
        rig.hear(path.conn(0), Imm::HbMsg);
    }
    assert!(rig.sent.len() < 2000, "{} unanswered", rig.sent.len());
    let counters = rig.server.counters();
    assert_eq!(counters.heartbeats_answered as usize, rig.sent.len());
    assert_eq!(counters.heartbeats_answered + counters.heartbeats_dropped, 10_000);
}

// tests [RT-68]
#[test]
fn wrong_info_requests() {
    let good = emit_info_req(&"name".parse_name());
    let mut bad: Vec<Vec<u8>> = vec![Vec::new(), vec![0; 271], good[..271].to_vec()];
    let mut with = |at: usize, bytes: &[u8]| {
        let mut changed = good.to_vec();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        bad.push(changed);
    };
    with(0, &[1]); // type
    with(2, &[0]); // no name
    with(2, &[b'x'; 255]); // no NUL
    for character in [b'/', b'.', b'\n', 0x7f, 0xff] {
        with(3, &[character]);
    }
    for bytes in bad {
        let mut rig = Rig::new();
        let path = rig.connect(1, 1, A, 1);
        let done = rig.message(path.conn(0), &bytes);
        rig.deliver(&[done]);
        assert_eq!(rig.take_closed(), [(path.id, CloseReason::Info)], "{bytes:?}");
        assert!(rig.events.is_empty());
        rig.assert_empty();
    }
    // An immediate in its place.
    let mut rig = Rig::new();
    let path = rig.connect(1, 1, A, 1);
    let done = rig.imm(path.conn(0), 0, 272);
    rig.deliver(&[done]);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Info)]);
}

// tests [RT-67] 1: requests before the path is connected
#[test]
fn requests_that_come_too_early() {
    let mut rig = Rig::new();
    rig.link = None;
    let mut path = rig.connect(1, 1, A, 2);
    assert!(rig.info(&mut path, "one").is_none());
    let done = rig.imm(path.conn(1), Imm::Request(0).to_u32(), 4);
    rig.deliver(&[done]);
    assert_eq!(rig.take_closed(), [(path.id, CloseReason::Message)]);
}

// A completion of the wrong kind or with a wrong number does nothing worse than close its path.
#[test]
fn completions_nobody_asked_for() {
    for kind in 0..16 {
        for index in [0, 1, 0x0fff_ffff] {
            let mut rig = Rig::new();
            let path = rig.path(1, 1, A, 2);
            for cid in [0, 1, 2, 4095] {
                let tag = Tag::new(kind, index);
                rig.deliver(&[Done { tag, ..super::rig::done(path.conn(cid)) }]);
            }
        }
    }
}
