//! Clients that break the rules lose their path, and no other session is affected [RT-64] to
//! [RT-70].

use bowline_rtrs_driver::server::{AllowRule, ServerConfig};
use bowline_verbs::{Remote, SendOp, Status, next_key};
use bowline_wire::rtrs::{Desc, Imm, Uuid, emit_info_req, read_hdr, write_hdr};

use crate::common::{at, eventually, ip};
use crate::raw::{Conn, Ids, Outcome, Path, Raw, raw};
use crate::scene::{CHUNK, DEPTH, ELSEWHERE, End, Scene, config};

const ENXIO: u16 = 6;
const EEXIST: u16 = 17;
const EPERM: u16 = 1;
const ECONNRESET: u16 = 104;

// tests [RT-28], [RT-29], [RT-68]
#[test]
fn connection_requests_that_make_no_sense_are_refused() {
    let mut scene = Scene::new(70, config(true));
    let to = scene.to();
    let good = Ids::new();
    let with = |at: usize, bytes: &[u8]| {
        let mut request = good.request(0, 2).emit();
        request[at..at + bytes.len()].copy_from_slice(bytes);
        request
    };
    let cids = |cid: u16, cid_num: u16| {
        let mut request = good.request(0, 2).emit();
        request[6..8].copy_from_slice(&cid.to_le_bytes());
        request[8..10].copy_from_slice(&cid_num.to_le_bytes());
        request
    };
    let unknown = Ids { first: false, ..good };
    let refused: [(&str, [u8; 56], u16); 9] = [
        ("nothing at all", [0; 56], ECONNRESET),
        ("noise", [0xa5; 56], ECONNRESET),
        ("another magic", with(2, &[0xbe]), ECONNRESET),
        ("another version", with(5, &[3]), ECONNRESET),
        ("too many connections", cids(0, 4097), ECONNRESET),
        ("a connection beyond them", cids(2, 2), ECONNRESET),
        ("none of none", cids(0, 0), ECONNRESET),
        ("the last of all numbers", cids(u16::MAX, u16::MAX), ECONNRESET),
        ("into a session there is not", unknown.request(0, 2).emit(), ENXIO),
    ];
    for (what, request, expected) in refused {
        let before = scene.counters();
        match scene.raw.connect(to, good.port, &request) {
            Outcome::Refused(errno) => assert_eq!(errno, expected, "{what}"),
            other @ Outcome::Accepted(..) => panic!("{what}: {other:?}"),
        }
        let after = scene.counters();
        assert_eq!(after.refused - before.refused, 1, "{what}");
        assert_eq!(after.accepted, before.accepted, "{what}");
        scene.settles(what);
    }
    // The server ignores the minor version and reserved bits.
    let mut ids = Ids::new();
    let mut request = ids.request(0, 1).emit();
    request[4] = 7;
    request[44] |= 0xfe;
    request[45..].fill(0xff);
    let Outcome::Accepted(conn, _) = scene.raw.connect(to, ids.port, &request) else {
        panic!("refused")
    };
    scene.raw.leave(&[conn]);
    scene.alone("it has left");

    // A path whose connection requests contradict each other.
    ids = Ids::new();
    let (conn, _) = scene.raw.conn(to, &ids, 0, 3);
    for (what, cid, cid_num) in
        [("the same again", 0, 3), ("fewer connections", 1, 2), ("more of them", 1, 4)]
    {
        match scene.raw.connect(to, ids.port, &ids.request(cid, cid_num).emit()) {
            Outcome::Refused(errno) => assert_eq!(errno, ECONNRESET, "{what}"),
            other @ Outcome::Accepted(..) => panic!("{what}: {other:?}"),
        }
    }
    // Another path between the same addresses.
    let twice = Ids { path: Uuid([9; 16]), ..ids };
    match scene.raw.connect(to, ids.port, &twice.request(0, 3).emit()) {
        Outcome::Refused(errno) => assert_eq!(errno, EEXIST),
        other @ Outcome::Accepted(..) => panic!("{other:?}"),
    }
    scene.raw.leave(&[conn]);
    scene.ends("paths that contradict themselves");
}

// tests [RT-20], [RT-68], [RS-48], [RT-70]
#[test]
fn requests_for_the_chunks_that_make_no_sense_end_the_path() {
    let mut scene = Scene::new(71, config(true));
    let to = scene.to();
    let good = emit_info_req(&bowline_wire::rtrs::SessionName::new("name").unwrap());
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.to_vec();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let mut bad: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("a byte too short", good[..271].to_vec()),
        ("a byte too long", [&good[..], &[0]].concat()),
        ("another type", with(0, &[4])),
        ("no name", with(2, &[0])),
        ("a name that does not end", with(2, &[b'x'; 255])),
        ("the name of the other session", with(2, b"victim\0")),
    ];
    for character in [b'/', b'.', b'\n', 0x7f, 0xff] {
        bad.push(("a name of what is none", with(3, &[character])));
    }
    for (what, bytes) in bad {
        let before = scene.counters();
        let (conns, _) = scene.raw.conns(to, &Ids::new(), 2);
        scene.raw.post_recv(conns[0], 1, 512 << 10, 8200);
        scene.raw.send(conns[0], 2, &bytes);
        assert!(scene.raw.is_dropped(conns[0]), "{what}");
        scene.raw.leave(&conns);
        scene.alone(what);
        assert_eq!(scene.counters().paths_closed - before.paths_closed, 1, "{what}");
        assert_eq!(scene.counters().paths_connected, before.paths_connected, "{what}");
        scene.check(what);
    }
    // Before all connections are there.
    let ids = Ids::new();
    let (conn, _) = scene.raw.conn(to, &ids, 0, 2);
    scene.raw.send(conn, 2, &good);
    assert!(scene.raw.is_dropped(conn), "too early");
    scene.raw.leave(&[conn]);
    scene.settles("too early");
    // A request before INFO_REQ finds no posted receive, and the client has no key.
    let (conns, _) = scene.raw.conns(to, &Ids::new(), 2);
    scene.raw.imm(conns[0], Imm::Request(0).to_u32());
    assert!(scene.raw.is_dropped(conns[0]), "no INFO_REQ");
    scene.raw.leave(&conns);
    scene.ends("no INFO_REQ");
}

/// Contents of the chunk from its beginning, with a header at `off`.
fn chunk(off: u32, header: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x77; off as usize];
    bytes.extend_from_slice(header);
    bytes
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

/// Headers, each with the offset it is at.
fn bad_headers(desc: impl Fn(u32) -> Desc) -> Vec<(&'static str, u32, Vec<u8>)> {
    let read = || read_header(8, false, Some(desc(100)));
    let end = CHUNK;
    vec![
        ("a message of no type", 108, changed(read(), 0, 0)),
        ("a message of a server's type", 108, changed(read(), 0, 4)),
        ("a message of an unknown type", 108, changed(read(), 0, 0xffff)),
        ("a header past the end", end - 3, write_hdr(0).to_vec()),
        ("its last byte past the end", end - 1, write_hdr(0).to_vec()),
        ("a read's header past the end", end - 7, read()),
        ("a descriptor past the end", end - 23, read()),
        ("a user message that begins before", 7, write_hdr(8).to_vec()),
        ("the longest user message", 0, write_hdr(0xffff).to_vec()),
        ("a user message too long", 4097, write_hdr(4097).to_vec()),
        ("too much data", CHUNK - 4096 + 9, write_hdr(8).to_vec()),
        ("two descriptors", 108, changed(read(), 6, 2)),
        ("65535 descriptors", 108, changed(read(), 6, 0xffff)),
        ("an unknown flag", 108, changed(read(), 4, 2)),
        ("an invalidation of nothing", 8, changed(read_header(8, false, None), 4, 1)),
        ("data that goes nowhere", 108, read_header(8, false, None)),
        ("a descriptor of nothing", 108, read_header(8, true, Some(desc(0)))),
        ("a descriptor of more than there is", 108, read_header(8, true, Some(desc(101)))),
        (
            "a descriptor that wraps",
            108,
            read_header(8, true, Some(Desc { addr: u64::MAX - 98, ..desc(100) })),
        ),
    ]
}

// tests [RT-67] 1 to 7, [RT-45], [RT-70], with keys refreshed and without
#[test]
fn requests_that_make_no_sense_end_the_path() {
    for (net, always_invalidate) in [(72, true), (73, false)] {
        let mut scene = Scene::new(net, config(always_invalidate));
        let key = scene.raw.keys.rkey;
        let desc = |len| Desc { addr: 700_000, key, len };
        for (what, off, header) in bad_headers(desc) {
            scene.attack(what, End::Violated, |raw, path| {
                // At most the chunk's length; more is refused by the device.
                let mut bytes = chunk(off, &header);
                bytes.truncate(CHUNK as usize);
                raw.request(path, path.conns[1], 0, off, &bytes);
                path.conns[1]
            });
        }
        let short = |raw: &mut Raw, path: &Path| {
            let bytes = chunk(108, &write_hdr(8));
            // The header alone: its data are the chunk's former contents.
            let imm = Imm::Request(path.geometry.request_payload(0, 108)).to_u32();
            raw.put_imm(path.conns[1], path.chunks[0], 108, &bytes[108..], imm);
            path.conns[1]
        };
        scene.attack("fewer bytes than the header says", End::Violated, short);
        let long = |raw: &mut Raw, path: &Path| {
            let bytes = [chunk(108, &write_hdr(8)), vec![1]].concat();
            raw.request(path, path.conns[1], 0, 108, &bytes);
            path.conns[1]
        };
        scene.attack("more bytes than the header says", End::Violated, long);
        scene.finish();
    }
}

// tests [RT-67] 1 to 3
#[test]
fn immediates_that_make_no_sense_end_the_path() {
    let mut scene = Scene::new(74, config(true));
    let done = |invalidated| Imm::Done { id: 0, errno: 0, invalidated }.to_u32();
    let request = |id: u32, off: u32| Imm::Request(id << 24 | off).to_u32();
    let bad = [
        ("a chunk that does not exist", request(u32::from(DEPTH), 0)),
        ("the last number of a chunk", request(15, 0)),
        ("an offset at the end of the chunk", request(0, CHUNK)),
        ("the last of all offsets", request(0, (1 << 24) - 1)),
        ("a chunk with nothing new in it", request(0, 0)),
    ];
    for (what, imm) in bad {
        for cid in [0, 1] {
            scene.attack(what, End::Violated, |raw, path| {
                raw.imm(path.conns[cid], imm);
                path.conns[cid]
            });
        }
    }
    for (what, imm) in [
        ("an answer", done(false)),
        ("an answer that invalidates", done(true)),
        ("an unknown kind", 0x3000_0000),
        ("an unknown kind with everything", 0x7fff_ffff),
        ("the last kind", 0xf000_0001),
        ("a heartbeat that is no one's", Imm::HbMsg.to_u32()),
        ("an answer to a heartbeat that was not", Imm::HbAck.to_u32()),
    ] {
        scene.attack(what, End::Ignored, |raw, path| {
            raw.imm(path.conns[1], imm);
            assert_eq!(raw.sent(4), Status::Success);
            path.conns[1]
        });
    }
    scene.attack("an answer to no heartbeat", End::Ignored, |raw, path| {
        raw.imm(path.conns[0], Imm::HbAck.to_u32());
        assert_eq!(raw.sent(4), Status::Success);
        path.conns[0]
    });
    // Sent instead of written: the receives have no memory.
    for (what, bytes) in [("a message", &[0_u8; 272][..]), ("a small message", &[0])] {
        scene.attack(what, End::Closed, |raw, path| {
            raw.send(path.conns[1], 3, bytes);
            path.conns[1]
        });
    }
    scene.attack("an empty message", End::Violated, |raw, path| {
        raw.send(path.conns[1], 3, &[]);
        path.conns[1]
    });
    scene.attack("a request that was sent", End::Violated, |raw, path| {
        raw.post(path.conns[1], 3, SendOp::SendImm(request(0, 0)), &[]);
        path.conns[1]
    });
    scene.attack("a second INFO_REQ", End::Closed, |raw, path| {
        let name = bowline_wire::rtrs::SessionName::new("hostile").unwrap();
        raw.send(path.conns[0], 3, &emit_info_req(&name));
        path.conns[0]
    });
    scene.finish();
}

/// A request that is kept by the server: its chunk is in use.
fn keep(raw: &mut Raw, path: &Path, conn: Conn, id: u16) {
    let bytes = [b"hold it!".to_vec(), write_hdr(8).to_vec()].concat();
    raw.request(path, conn, id, 8, &bytes);
    assert_eq!(raw.sent(4), Status::Success);
}

// tests [RT-44], [RT-65], [RT-67] 3, [RT-99]
#[test]
fn a_chunk_in_use_is_the_servers() {
    // With refresh, the key is invalid from the moment the server has received the request.
    let mut scene = Scene::new(75, config(true));
    let same: fn(u32) -> u32 = |key| key;
    for (what, key, imm) in [
        ("a write to a chunk in use", same, None),
        ("a write to it under the key that is to come", next_key, None),
        ("a request in a chunk in use", same, Some(Imm::Request(8).to_u32())),
    ] {
        let to = scene.to();
        let path = scene.raw.path(to, &Ids::new(), 2, "hostile");
        keep(&mut scene.raw, &path, path.conns[1], 0);
        eventually(what, || scene.guard.held.lock().unwrap().len() == 2);
        let held = scene.guard.held.lock().unwrap().pop().unwrap();
        let memory = scene.server.chunk(&held).unwrap();
        let chunk = (path.chunks[0].0, key(path.chunks[0].1));
        let status = match imm {
            None => scene.raw.put(path.conns[1], chunk, 0, &[0xff; 64]),
            Some(imm) => {
                scene.raw.put_imm(path.conns[1], chunk, 0, &[0xff; 64], imm);
                scene.raw.sent(4)
            }
        };
        assert_eq!(status, Status::RemAccessErr, "{what}");
        let mut bytes = [0; 12];
        memory.buffer.read(memory.offset, &mut bytes);
        assert_eq!(&bytes[..8], b"hold it!", "{what}");
        scene.server.respond(&mut std::iter::once((held.op, 0, None)));
        assert!(scene.raw.is_dropped(path.conns[0]), "{what}");
        scene.raw.leave(&path.conns);
        scene.settles(what);
    }
    // An invalidated key stays invalid: the next key differs.
    let to = scene.to();
    let path = scene.raw.path(to, &Ids::new(), 2, "hostile");
    scene.raw.post_recvs(path.conns[1], 8);
    scene.works(&path, path.conns[1], "a good request");
    assert_eq!(scene.raw.recv(1).unwrap().status, Status::Success);
    let status = scene.raw.put(path.conns[1], path.chunks[1], 0, &[0xff; 64]);
    assert_eq!(status, Status::RemAccessErr, "an old key");
    scene.raw.leave(&path.conns);
    scene.ends("an old key");

    // Without refresh the chunk can still be written, which is why refresh is the default. But the
    // header is read only once, and a second request there ends the path.
    let mut scene = Scene::new(76, config(false));
    let to = scene.to();
    let path = scene.raw.path(to, &Ids::new(), 2, "hostile");
    keep(&mut scene.raw, &path, path.conns[1], 0);
    eventually("kept", || scene.guard.held.lock().unwrap().len() == 2);
    let status = scene.raw.put(path.conns[1], path.chunks[0], 0, &[0xff; 64]);
    assert_eq!(status, Status::Success);
    let held = scene.guard.held.lock().unwrap().pop().unwrap();
    assert_eq!(*held.usr, b"hold it!"[..]);
    let violated = scene.counters().paths_violated;
    scene.raw.imm(path.conns[1], Imm::Request(8).to_u32());
    assert!(scene.raw.is_dropped(path.conns[0]));
    assert_eq!(scene.counters().paths_violated, violated + 1);
    scene.server.respond(&mut std::iter::once((held.op, 0, None)));
    scene.raw.leave(&path.conns);
    scene.ends("a chunk twice");
}

// tests [RT-65], [RS-9]: a client can write to its own chunks by another path of its session.
#[test]
fn a_chunk_in_use_is_that_of_all_paths_of_its_session() {
    for (net, always_invalidate) in [(240, true), (241, false)] {
        let mut scene = Scene::new(net, config(always_invalidate));
        let to = scene.to();
        let mut other = raw(ip(net, 67));
        let ids = Ids::new();
        let path = scene.raw.path(to, &ids, 2, "hostile");
        let second = other.path(to, &Ids::into(ids.session), 2, "hostile");
        assert_eq!(path.chunks[0].0, second.chunks[0].0, "the same memory");
        keep(&mut scene.raw, &path, path.conns[1], 0);
        let held = || scene.guard.held.lock().unwrap().len();
        eventually("kept", || held() == 2);

        // The data of a write in progress can change this way, and nothing else.
        assert_eq!(other.put(second.conns[1], second.chunks[0], 0, &[0xff; 64]), Status::Success);
        assert_eq!(*scene.guard.held.lock().unwrap()[1].usr, b"hold it!"[..]);

        // A second request in a chunk, by another path, means that the first path was given up: it
        // is closed. Its request is carried out all the same, and the second one after it.
        let waited = scene.counters().requests_waited;
        let bytes = [b"hold it!".to_vec(), write_hdr(8).to_vec()].concat();
        other.request(&second, second.conns[1], 0, 8, &bytes);
        assert_eq!(other.sent(4), Status::Success);
        eventually("it waits", || scene.counters().requests_waited == waited + 1);
        assert!(scene.raw.is_dropped(path.conns[0]));
        assert_eq!(held(), 2);
        let first = scene.guard.held.lock().unwrap().pop().unwrap();
        scene.server.respond(&mut std::iter::once((first.op, 0, None)));
        eventually("it comes", || held() == 2);
        let next = scene.guard.held.lock().unwrap().pop().unwrap();
        other.post_recvs(second.conns[1], 8);
        scene.server.respond(&mut std::iter::once((next.op, 0, None)));
        assert_eq!(other.recv(1).unwrap().status, Status::Success);

        scene.raw.leave(&path.conns);
        other.leave(&second.conns);
        scene.ends("a chunk of two paths");
    }
}

// tests [RT-64]: a key is valid only on the path it was given to
#[test]
fn keys_of_others_open_nothing() {
    for (net, always_invalidate) in [(77, true), (78, false)] {
        let mut scene = Scene::new(net, config(always_invalidate));
        let to = scene.to();
        let mut other = raw(ip(net, 2));
        let theirs = other.path(to, &Ids::new(), 2, "other");
        keep(&mut other, &theirs, theirs.conns[1], 0);
        eventually("kept", || scene.guard.held.lock().unwrap().len() == 2);
        let memory = {
            let held = scene.guard.held.lock().unwrap();
            scene.server.chunk(&held[1]).unwrap().buffer
        };
        let look = || {
            let mut bytes = Vec::new();
            memory.append_to(0, memory.len(), &mut bytes);
            bytes
        };
        let before = look();
        let request = [at(ELSEWHERE).to_vec(), write_hdr(8).to_vec()].concat();
        for id in [0, 1, usize::from(DEPTH) - 1] {
            for with_imm in [false, true] {
                let what = format!("key {:#x} of another session", theirs.chunks[id].1);
                let violated = scene.counters().paths_violated;
                let path = scene.raw.path(to, &Ids::new(), 2, "hostile");
                let status = if with_imm {
                    let imm = Imm::Request(path.geometry.request_payload(1, 8)).to_u32();
                    scene.raw.put_imm(path.conns[1], theirs.chunks[id], 0, &request, imm);
                    scene.raw.sent(4)
                } else {
                    scene.raw.put(path.conns[1], theirs.chunks[id], 0, &[0xee; 100])
                };
                assert_eq!(status, Status::RemAccessErr, "{what}");
                assert!(scene.raw.is_dropped(path.conns[0]), "{what}");
                scene.raw.leave(&path.conns);
                eventually(&what, || scene.server.sessions().len() == 2);
                assert_eq!(scene.counters().paths_violated, violated, "{what}");
                assert!(look() == before, "{what}: written");
            }
        }
        // Formerly valid keys, and some that resemble a valid one.
        let own = scene.raw.path(to, &Ids::new(), 1, "hostile");
        scene.raw.leave(&own.conns);
        eventually("it leaves", || scene.server.sessions().len() == 2);
        let near = (1..16).map(|n| theirs.chunks[2].1 ^ n);
        let far = (0..16).map(|n| theirs.chunks[2].1.rotate_left(n) ^ 1 << (8 + n));
        for key in own.chunks.iter().map(|chunk| chunk.1).chain(near).chain(far) {
            let path = scene.raw.path(to, &Ids::new(), 1, "hostile");
            let status = scene.raw.put(path.conns[0], (0, key), 0, &[0xee; 8]);
            assert_eq!(status, Status::RemAccessErr, "key {key:#x}");
            scene.raw.leave(&path.conns);
            eventually("it leaves", || scene.server.sessions().len() == 2);
        }
        assert!(look() == before, "written by a guess");
        let held = scene.guard.held.lock().unwrap().pop().unwrap();
        scene.server.respond(&mut std::iter::once((held.op, 0, None)));
        other.post_recvs(theirs.conns[1], 8);
        assert_eq!(other.recv(1).unwrap().status, Status::Success, "the other session goes on");
        other.leave(&theirs.conns);
        scene.ends("keys of others");
    }
}

// tests [RT-19], [RT-27]: peers may write to chunks, and have no other access to the server's
// memory
#[test]
fn chunks_are_not_read_by_peers() {
    let mut scene = Scene::new(79, config(false));
    for atomic in [false, true] {
        let to = scene.to();
        let path = scene.raw.path(to, &Ids::new(), 1, "hostile");
        let remote = Remote { addr: path.chunks[0].0, rkey: path.chunks[0].1 };
        let op = if atomic { SendOp::FetchAdd { remote, add: 1 } } else { SendOp::Read(remote) };
        let sge = bowline_verbs::Sge { addr: 0, len: 8, lkey: scene.raw.keys.lkey };
        let sges = [sge];
        let flags = bowline_verbs::SendFlags::SIGNALED;
        let wr = bowline_verbs::SendWr { id: 5, op, sges: &sges, inline: &[], flags };
        let dev = &scene.raw.dev;
        // The client's own device refuses it, since none was agreed on, or the server does.
        if bowline_verbs::Device::post_send(&**dev, path.conns[0].qp, &[wr]).is_ok() {
            assert_ne!(scene.raw.sent(5), Status::Success);
        }
        scene.raw.leave(&path.conns);
        scene.settles("a read of a chunk");
    }
    scene.finish();
}

fn pinned(net: u8) -> ServerConfig {
    let rule = |host: u8, name: &str| AllowRule {
        addr: ip(net, host),
        prefix: 32,
        name: Some(name.to_owned()),
    };
    ServerConfig { allow: vec![rule(1, "victim"), rule(66, "guest-*")], ..config(true) }
}

// tests [RT-64], [RS-48]: a client that knows a session's id can join it, unless names are bound to
// addresses
#[test]
fn a_session_is_joined_only_by_whom_the_list_admits() {
    let mut scene = Scene::new(80, pinned(80));
    let to = scene.to();
    let session = scene.session().uuid;
    for (what, name) in [
        ("by its own name", "victim"),
        ("by a name the list allows", "guest-1"),
        ("by any name", "other"),
    ] {
        let ids = Ids::into(session);
        let before = scene.counters();
        assert!(scene.raw.try_path(to, &ids, 2, name).is_none_or(|_| false), "{what}");
        eventually(what, || scene.session().paths.len() == 1);
        let after = scene.counters();
        assert_eq!(after.paths_closed - before.paths_closed, 1, "{what}");
        assert_eq!(after.paths_connected, before.paths_connected, "{what}");
        scene.check(what);
    }
    // A session of its own under a name of another client.
    assert!(scene.raw.try_path(to, &Ids::new(), 1, "victim").is_none());
    // And under its own name.
    let path = scene.raw.path(to, &Ids::new(), 1, "guest-1");
    scene.raw.leave(&path.conns);
    // From an address that is not listed.
    let mut stranger = raw(ip(80, 67));
    for ids in [Ids::into(session), Ids::new()] {
        match stranger.connect(to, ids.port, &ids.request(0, 1).emit()) {
            Outcome::Refused(errno) => assert_eq!(errno, EPERM),
            other @ Outcome::Accepted(..) => panic!("{other:?}"),
        }
    }
    scene.ends("a stranger");

    // Without a list knowing the id is all it takes, as between kernels; but not under another
    // name, nor as the path that is there.
    let mut scene = Scene::new(81, config(true));
    let to = scene.to();
    let session = scene.session().uuid;
    assert!(scene.raw.try_path(to, &Ids::into(session), 1, "other").is_none());
    eventually("another name", || scene.session().paths.len() == 1);
    scene.check("another name");
    scene.answer();
    let before = scene.session();
    let path = scene.raw.path(to, &Ids::into(session), 1, "victim");
    assert_eq!(scene.session().paths.len(), 2);
    scene.works(&path, path.conns[0], "a request of the second path");
    scene.raw.leave(&path.conns);
    eventually("it leaves", || scene.session().paths.len() == 1);
    assert_eq!(scene.session(), before);
    scene.finish();
}
