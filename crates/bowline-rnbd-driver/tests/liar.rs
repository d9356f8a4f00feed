//! A server whose answers are too short or describe no valid disk: the disk is not mapped, and
//! another disk of the session is not affected [NB-3] [NB-9] [NB-30].

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use bowline_block::sync;
use bowline_block::{BlockDevice, Errno};
use bowline_rnbd_driver::{Client, MapOptions};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig, PORT};
use bowline_testkit::rtrs_peer::{Conn, Raw};
use bowline_verbs::{Device, RecvWr, Remote, SendOp, Status};
use bowline_wire::rnbd::{OpenRsp, Request, emit_sess_info_rsp, parse};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, Desc, Geometry, Imm, IoHdr, emit_info_rsp, parse_io,
};

const DEPTH: u16 = 8;
const CHUNK: u32 = 8192;
/// Offsets of the chunks and of INFO_REQ in the raw peer's buffer.
const CHUNKS: usize = 700 << 10;
const INFO: usize = 512 << 10;

fn ip(host: u8) -> IpAddr {
    IpAddr::from([127, 80, 111, host])
}

fn device(addr: IpAddr) -> Arc<SoftDevice> {
    let config = SoftConfig { addrs: vec![addr], ..SoftConfig::default() };
    Arc::new(SoftDevice::open(config).unwrap())
}

fn geometry() -> Geometry {
    Geometry::of_chunk(DEPTH, CHUNK, 4096).unwrap()
}

/// Accepts all connections of a path, and sends the addresses of the chunks.
fn accept(raw: &mut Raw<SoftDevice>) -> Vec<Conn> {
    let rsp = ConRsp {
        geometry: geometry(),
        new_rkey: false,
        counted_keys: false,
        accepts_notice: false,
    };
    let answer = ConAnswer::Accepted(rsp).emit();
    let mut conns = Vec::new();
    loop {
        let (id, request) = raw.asked();
        let asked = ConReq::parse(&request.private_data).unwrap();
        let conn = Conn { qp: raw.queue_pair(), id };
        if asked.cid == 0 {
            raw.post_recv(conn, 1, INFO, 272);
        }
        raw.dev.accept(id, &raw.param(conn.qp, &answer)).unwrap();
        assert!(raw.established(conn));
        conns.push(conn);
        if asked.cid + 1 == asked.cid_num {
            break;
        }
    }
    assert_eq!(raw.recv(1).unwrap().status, Status::Success);
    for conn in &conns {
        let empty: Vec<_> = (0..64).map(|_| RecvWr { id: 1, sges: &[] }).collect();
        raw.dev.post_recv(conn.qp, &empty).unwrap();
    }
    let mut bytes = Vec::new();
    let chunk = |n: u16| Desc {
        addr: CHUNKS as u64 + u64::from(n) * u64::from(CHUNK),
        key: raw.keys.rkey,
        len: CHUNK,
    };
    emit_info_rsp((0..DEPTH).map(chunk), &mut bytes);
    raw.send(conns[0], 2, &bytes);
    assert_eq!(raw.sent(2), Status::Success);
    conns
}

/// The bytes written as answer to a message; `None`: no answer.
fn answer(request: &Request<'_>, deaf: bool) -> Option<Vec<u8>> {
    let rsp = OpenRsp { device_id: 1, nsectors: 8, logical_block_size: 512, ..OpenRsp::default() };
    Some(match request {
        Request::Close { .. } if deaf => return None,
        Request::SessInfo { .. } => emit_sess_info_rsp(2).to_vec(),
        Request::Open { name: b"sound", .. } => rsp.emit().to_vec(),
        Request::Open { name: b"short", .. } => rsp.emit()[..36].to_vec(),
        Request::Open { name: b"huge", .. } => OpenRsp { nsectors: 1 << 54, ..rsp }.emit().to_vec(),
        Request::Io(_) => vec![0x33; 512],
        _ => vec![],
    })
}

/// Answers one message with success. A `deaf` server ignores CLOSE. Returns false when the
/// connection ended before a message came.
fn serve(raw: &mut Raw<SoftDevice>, conns: &[Conn], deaf: bool) -> bool {
    let Some(got) = raw.recv(1).filter(|got| got.status == Status::Success) else { return false };
    let Some(Imm::Request(payload)) = got.imm.map(Imm::from_u32) else { return true };
    let conn = *conns.iter().find(|conn| conn.qp == got.qpn).unwrap();
    let (id, off) = geometry().split(payload).unwrap();
    let mut chunk = [0; CHUNK as usize];
    raw.buffer.read(CHUNKS + usize::from(id) * chunk.len(), &mut chunk);
    let io = parse_io(&geometry(), off, &chunk[off as usize..]).unwrap();
    let message = &chunk[io.usr_at as usize..][..io.usr_len.into()];
    let Some(data) = answer(&parse(message).unwrap(), deaf) else { return true };
    let imm = Imm::Done { id: id.into(), errno: 0, invalidated: false }.to_u32();
    match io.hdr {
        IoHdr::Read { desc: Some(desc), .. } if !data.is_empty() => {
            let remote = Remote { addr: desc.addr, rkey: desc.key };
            raw.post(conn, 4, SendOp::WriteImm(remote, imm), &data);
        }
        _ => raw.imm(conn, imm),
    }
    true
}

/// Ends the server if the test fails; otherwise it ends with its connection.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// Runs a test with a client of a scripted server, at addresses of this test.
fn with_server(host: u8, deaf: bool, test: impl FnOnce(&Client, MapOptions)) {
    let (own, server) = (ip(host), ip(host + 1));
    let mut raw = Raw::on(device(server), server);
    raw.dev.listen((server, PORT).into()).unwrap();
    let engine = Engine::new(vec![device(own) as _], EngineConfig::default()).unwrap();
    let client = Client::new(Arc::clone(&engine), MapOptions::new("default"));
    let mut options = MapOptions::new("prey").path(Some(own), server);
    options.max_reconnects = 0;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let conns = accept(&mut raw);
            let mut goes_on = true;
            while goes_on && !over.load(SeqCst) {
                goes_on = serve(&mut raw, &conns, deaf);
            }
        });
        let _ends = Ends(&over);
        test(&client, options);
    });
    engine.close();
}

#[test]
fn unmap_does_not_wait_for_a_silent_server() {
    // tests [NB-38]
    with_server(10, true, |client, mut options| {
        options.io.io_timeout = Some(Duration::from_millis(300));
        let disk = client.map_with("sound", &options).unwrap();
        client.unmap(&disk).unwrap();
        assert!(client.disks().is_empty() && client.sessions().is_empty());
    });
    // Without an IO timeout, `limit_unmap_wait` ends the wait, called before or during it.
    for early in [false, true] {
        with_server(if early { 20 } else { 30 }, true, |client, options| {
            client.map_with("sound", &options).unwrap();
            std::thread::scope(|scope| {
                if early {
                    client.limit_unmap_wait(Duration::ZERO);
                }
                let closing = scope.spawn(|| client.close());
                if !early {
                    std::thread::sleep(Duration::from_millis(100));
                    assert!(!closing.is_finished(), "it waits");
                    client.limit_unmap_wait(Duration::from_millis(1));
                }
                closing.join().unwrap();
            });
            assert!(client.disks().is_empty() && client.sessions().is_empty());
        });
    }
}

#[test]
fn a_server_with_an_invalid_open_answer_has_no_disk() {
    with_server(66, false, |client, options| {
        let sound = client.map_with("sound", &options).unwrap();
        assert_eq!(sound.limits().bytes, 4096);
        for (name, errno) in
            [("nothing", Errno::EINVAL), ("huge", Errno::EOVERFLOW), ("short", Errno::EINVAL)]
        {
            let error = client.map_with(name, &options).unwrap_err();
            assert_eq!(error.errno(), errno, "{name}");
            let mut out = [0; 512];
            sync::read_at(&*sound, 0, &mut out).unwrap();
            assert_eq!(out, [0x33; 512], "{name}");
        }
        assert_eq!(client.disks().len(), 1);
        client.unmap(&sound).unwrap();
    });
}
