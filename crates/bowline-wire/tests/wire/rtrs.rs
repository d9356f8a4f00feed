//! RTRS and RNBD: vectors of the specification, messages of real kernels, random bytes.

use crate::rtrs_checks as checks;

use bowline_wire::rnbd::{
    self, Access, Io, IoFlags, MsgError, OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES,
    OpenRsp, Request,
};
use bowline_wire::rtrs::{
    CON_LEN, ConAnswer, ConReq, ConReqError, ConRsp, ConRspError, Desc, Geometry, GeometryError,
    INFO_REQ_MAX, Imm, InfoError, IoError, IoHdr, IoReq, NameError, PORT, PathLife, RkeyRsp,
    RkeyRspError, SessionName, Uuid, emit_given_up, emit_info_req, emit_info_rsp, parse_given_up,
    parse_info_req, parse_info_rsp, parse_io, read_hdr, write_hdr,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// What a kernel announces unless told otherwise.
fn usual() -> Geometry {
    Geometry::of_chunk(512, 131_072, 4096).expect("the default fits")
}

/// Bytes of hexadecimal digits, blanks and `|` anywhere; `00x8` stands for eight times `00`.
fn hex(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for word in text.split([' ', '|', '\n']).filter(|word| !word.is_empty()) {
        let (digits, times) = word.split_once('x').unwrap_or((word, "1"));
        let bytes: Vec<u8> = (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal"))
            .collect();
        (0..times.parse().expect("a number")).for_each(|_| out.extend(&bytes));
    }
    out
}

fn con_req() -> ConReq {
    ConReq {
        cid: 0,
        cid_num: 3,
        recon_cnt: 1,
        path: Uuid(std::array::from_fn(|i| 0x10 + i as u8)),
        session: Uuid(std::array::from_fn(|i| 0x20 + i as u8)),
        first: true,
        counts_keys: false,
        gives_notice: false,
    }
}

// tests [RT-1] [RT-2] [RT-3]
#[test]
fn con_req_is_as_the_vector_says() {
    let vector = hex("00 00 bd 1b 00 02 00 00 03 00 01 00 \
         101112131415161718191a1b1c1d1e1f 202122232425262728292a2b2c2d2e2f 01 00x11");
    assert_eq!(con_req().emit()[..], vector);
    assert_eq!(ConReq::parse(&vector), Ok(con_req()));
    assert_eq!(bowline_wire::roce::service_id(PORT), 0x0106_04d2);
    // Over native InfiniBand the receiver sees 92 bytes.
    assert_eq!(ConReq::parse(&[&vector[..], &[0xff; 36]].concat()), Ok(con_req()));
}

// tests [RT-28] [RT-34] [RT-68]: rows 1 to 5 in their order; reserved bytes are ignored
#[test]
fn con_req_is_refused_in_the_order_of_the_rule() {
    use ConReqError as E;
    let good = con_req().emit();
    let with = |at: usize, bytes: &[u8]| {
        let mut out = good;
        out[at..at + bytes.len()].copy_from_slice(bytes);
        ConReq::parse(&out)
    };
    assert_eq!(ConReq::parse(&good[..CON_LEN - 1]), Err(E::Short(55)));
    assert_eq!(with(2, &[0xbe]), Err(E::Magic(0x1bbe)));
    assert_eq!(with(4, &[0, 3]), Err(E::Version(0x0300)));
    assert_eq!(with(8, &[0x01, 0x10]), Err(E::Connections(4097)));
    assert_eq!(with(6, &[3]), Err(E::Cid { cid: 3, cid_num: 3 }));
    assert_eq!(with(8, &[0]), Err(E::Cid { cid: 0, cid_num: 0 }));
    // With two errors, the first one counts.
    assert_eq!(with(2, &[0, 0, 0, 3]), Err(E::Magic(0)));
    assert_eq!(with(4, &[7]), Ok(con_req()), "the minor version");
    assert_eq!(with(44, &[0xff; 12]), Ok(con_req()));
    assert_eq!(with(44, &[0xfe]), Ok(ConReq { first: false, ..con_req() }));
    assert!(with(8, &[0x00, 0x10]).is_ok(), "4096 connections");
    assert_eq!(with(48, b"bowline1"), Ok(ConReq { counts_keys: true, ..con_req() }), "[RT-99]");
    assert_eq!(with(45, b"gu1"), Ok(ConReq { gives_notice: true, ..con_req() }), "[RT-101]");
    for part in [&b"gu2"[..], b"gu", b"\0gu1"] {
        assert_eq!(with(45, part), Ok(con_req()));
    }
}

// tests [RT-4] [RT-5] [RT-29]
#[test]
fn con_rsp_is_as_the_vectors_say() {
    let vector = hex("bd 1b 00 02 00 00 00 02 00 f0 01 00 00 10 00 00 02 00 00 00 00x36");
    let answer = ConAnswer::Accepted(ConRsp {
        geometry: usual(),
        new_rkey: true,
        counted_keys: false,
        accepts_notice: false,
    });
    assert_eq!(answer.emit()[..], vector);
    assert_eq!(ConAnswer::parse(&vector), Ok(answer));
    for (errno, bytes) in
        [(17, "ef ff"), (6, "fa ff"), (12, "f4 ff"), (22, "ea ff"), (104, "98 ff")]
    {
        let vector = hex(&format!("bd 1b 00 02 {bytes} 00x50"));
        assert_eq!(ConAnswer::Refused(errno).emit()[..], vector);
        assert_eq!(ConAnswer::parse(&vector), Ok(ConAnswer::Refused(errno)));
    }
}

// tests [RT-30] [RT-31] [RT-32]
#[test]
fn con_rsp_is_judged_before_it_is_believed() {
    use ConRspError as E;
    let good = ConAnswer::Accepted(ConRsp {
        geometry: usual(),
        new_rkey: false,
        counted_keys: false,
        accepts_notice: false,
    })
    .emit();
    let with = |at: usize, bytes: &[u8]| {
        let mut out = good;
        out[at..at + bytes.len()].copy_from_slice(bytes);
        ConAnswer::parse(&out)
    };
    assert_eq!(ConAnswer::parse(&good[..55]), Err(E::Short(55)));
    assert_eq!(with(0, &[0, 0]), Err(E::Magic(0)));
    assert_eq!(with(2, &[0, 1]), Err(E::Version(0x0100)));
    assert_eq!(with(4, &[0x00, 0x80]), Ok(ConAnswer::Refused(0x8000)), "the smallest number");
    assert_eq!(with(6, &[0, 0]), Err(E::Geometry(GeometryError::Depth)));
    assert_eq!(with(8, &[0xff; 4]), Err(E::Geometry(GeometryError::Chunk(0x1_0000_0fff))));
    assert!(matches!(with(12, &[0xff; 4]), Err(E::Geometry(GeometryError::MaxHdr(_)))));
    assert_eq!(with(16, &[0xfd, 0xff]), ConAnswer::parse(&good), "flags nobody knows");
    let accepting =
        ConRsp { geometry: usual(), new_rkey: false, counted_keys: false, accepts_notice: true };
    assert_eq!(with(45, b"gu1"), Ok(ConAnswer::Accepted(accepting)), "[RT-101]");
}

// tests [RT-6] [RT-68] [RS-24]
#[test]
fn names_of_sessions_are_judged() {
    let name = |text: &str| SessionName::new(text).map(|name| name.to_string());
    assert_eq!(name("client@server_1").as_deref(), Ok("client@server_1"));
    assert_eq!(name(""), Err(NameError::Empty));
    assert_eq!(name("a/b"), Err(NameError::Character('/')));
    assert_eq!(name("a.b"), Err(NameError::Character('.')));
    assert_eq!(name("a\nb"), Err(NameError::Character('\n')));
    assert_eq!(name("a\u{85}b"), Err(NameError::Character('\u{85}')));
    assert!(name(&"n".repeat(254)).is_ok());
    assert_eq!(name(&"n".repeat(255)), Err(NameError::Long));

    let longest = SessionName::new(&"n".repeat(254)).expect("254 bytes");
    let good = emit_info_req(&longest);
    assert_eq!(parse_info_req(&good).as_ref(), Ok(&longest));
    assert_eq!(good[256..], [0; 16]);
    let mut endless = good;
    endless[256] = b'n';
    assert_eq!(parse_info_req(&endless), Err(InfoError::Name(NameError::Long)));
    endless[2] = 0;
    assert_eq!(parse_info_req(&endless), Err(InfoError::Name(NameError::Empty)));
    endless[2..5].copy_from_slice(&[0xff, 0xff, 0]);
    assert_eq!(parse_info_req(&endless), Err(InfoError::Name(NameError::Encoding)));
    endless[0] = 1;
    assert_eq!(parse_info_req(&endless), Err(InfoError::Type(1)));
    assert_eq!(parse_info_req(&good[..271]), Err(InfoError::Short { needed: 272, got: 271 }));
}

// tests [RT-101]
#[test]
fn paths_that_are_given_up_have_a_name() {
    let path = Uuid(std::array::from_fn(|i| 0xa1 + i as u8));
    let life = PathLife::new(&path, 0x1207);
    assert_eq!(life.to_u32(), 0x03a2_a107);
    assert_eq!(Imm::GivenUp(life).to_u32(), 0x33a2_a107);
    assert_eq!(Imm::from_u32(0x33a2_a107), Imm::GivenUp(life));
    assert_ne!(PathLife::new(&path, 0x1208), life, "another life");
    assert_ne!(PathLife::new(&Uuid([0xa1; 16]), 0x1207), life, "another path");

    let mut message = emit_info_req(&SessionName::new("s").expect("a name")).to_vec();
    assert_eq!(parse_given_up(&message).count(), 0);
    assert_eq!(parse_given_up(&message[..5]).count(), 0);
    let lives: Vec<_> = (0..200).map(|n| PathLife::from_u32(n * 0x12_3457)).collect();
    emit_given_up(&lives[..2], &mut message);
    assert_eq!(message[272..], [0, 0, 0, 0, 0x57, 0x34, 0x12, 0]);
    assert!(parse_given_up(&message).eq(lives[..2].iter().copied()));
    // Bits above the 28, and incomplete names, are ignored.
    message[275] |= 0xf0;
    message.push(1);
    assert!(parse_given_up(&message).eq(lives[..2].iter().copied()));
    message.truncate(272);
    emit_given_up(&lives, &mut message);
    assert_eq!(message.len(), INFO_REQ_MAX);
    message.extend([0; 8]);
    assert!(parse_given_up(&message).eq(lives[..128].iter().copied()));
}

// tests [RT-7] [RT-8] [RT-9] [RT-10] [RT-69]: each check of the rule, with sums of 64 bits
#[test]
fn descriptors_must_cover_all_chunks() {
    let geometry = Geometry::of_chunk(4, 65536, 4096).expect("fits");
    let read = |descs: &[(u64, u32, u32)]| {
        let descs = descs.iter().map(|&(addr, key, len)| Desc { addr, key, len });
        let (mut message, mut out) = (Vec::new(), vec![(9, 9)]);
        emit_info_rsp(descs, &mut message);
        parse_info_rsp(&message, &geometry, &mut out).map(|()| out)
    };
    let chunk = 65536;
    let alone = |i: u64| (0x1000 + 0x10_0000 * i, 7 + i as u32, chunk);
    let each = read(&[alone(0), alone(1), alone(2), alone(3)]);
    assert_eq!(each, Ok(vec![(0x1000, 7), (0x10_1000, 8), (0x20_1000, 9), (0x30_1000, 10)]));
    let all = read(&[(0, 7, 4 * chunk)]);
    assert_eq!(all, Ok(vec![(0, 7), (0x1_0000, 7), (0x2_0000, 7), (0x3_0000, 7)]));
    assert_eq!(read(&[(0, 7, 3 * chunk), (0, 8, chunk)]).map(|out| out.len()), Ok(4));

    let refused = |addr, len| Err(InfoError::Desc(Desc { addr, key: 7, len }));
    assert_eq!(read(&[]), Err(InfoError::Count(0)));
    assert_eq!(read(&[alone(0), alone(1), alone(2)]), Err(InfoError::Count(3)));
    assert_eq!(read(&[alone(0); 8]), Err(InfoError::Count(8)));
    assert_eq!(read(&[(0, 7, 0)]), refused(0, 0));
    assert_eq!(read(&[(0, 7, 4 * chunk + 1)]), refused(0, 4 * chunk + 1));
    assert_eq!(read(&[(0, 7, 5 * chunk)]), refused(0, 5 * chunk));
    assert_eq!(read(&[(0, 7, chunk)]), Err(InfoError::Missing(1)));
    assert_eq!(read(&[(0, 6, 4 * chunk), (0, 7, chunk)]), refused(0, chunk));
    // Lengths whose sum is right in 32 bits only.
    assert_eq!(read(&[(0, 7, 0xffff_0000), (0, 8, 5 * chunk)]), refused(0, 0xffff_0000));
    assert_eq!(read(&[(u64::MAX - 3, 7, 4 * chunk)]), refused(u64::MAX - 3, 4 * chunk));

    let mut message = Vec::new();
    emit_info_rsp([Desc { addr: 0, key: 7, len: 4 * chunk }].into_iter(), &mut message);
    let mut out = Vec::new();
    let short = parse_info_rsp(&message[..23], &geometry, &mut out);
    assert_eq!(short, Err(InfoError::Short { needed: 24, got: 23 }));
    message[0] = 0;
    assert_eq!(parse_info_rsp(&message, &geometry, &mut out), Err(InfoError::Type(0)));
}

// tests [RT-14] [RT-15] [RT-17] [RT-62]
#[test]
fn immediates_are_as_the_vectors_say() {
    let geometry = usual();
    assert_eq!(Imm::Request(geometry.request_payload(5, 72)).to_u32(), 0x0028_0048);
    assert_eq!(geometry.split(0x0028_0048), Some((5, 72)));
    for (number, errno, invalidated) in
        [(0x1000_0005, 0, false), (0x1028_0005, 5, false), (0x2000_0005, 0, true)]
    {
        let done = Imm::Done { id: 5, errno, invalidated };
        assert_eq!(done.to_u32(), number);
        assert_eq!(Imm::from_u32(number), done);
    }
    assert_eq!((Imm::HbMsg.to_u32(), Imm::HbAck.to_u32()), (0x8000_0000, 0x9000_0000));
    for kind in [4, 5, 6, 7, 10, 11, 12, 13, 14, 15] {
        let number = kind << 28 | 5;
        assert_eq!(Imm::from_u32(number), Imm::Unknown(number));
    }
    // 512 would look like success if it were cut to nine bits.
    let done = |errno| Imm::Done { id: 0, errno, invalidated: false };
    assert_eq!(done(512).to_u32(), done(5).to_u32());
    assert_eq!(Imm::from_u32(done(511).to_u32()), done(511));
}

/// Returns a valid request, with its offset and its tail.
fn read_request(data_len: u32, usr_len: u16, desc: Option<Desc>) -> (u32, [u8; 24]) {
    let mut tail = [0xee; 24];
    read_hdr(usr_len, true, desc, &mut tail);
    (data_len + u32::from(usr_len), tail)
}

// tests [RT-11] [RT-12] [RT-38] [RT-77]
#[test]
fn headers_are_as_the_vectors_say() {
    let geometry = usual();
    let desc = Desc { addr: 0x1234_5678_9abc_def0, key: 0x3c7, len: 36 };
    let (off, tail) = read_request(36, 36, Some(desc));
    assert_eq!(off, 0x48);
    assert_eq!(tail[..], hex("0300240001000100 f0debc9a78563412 c7030000 24000000"));
    let hdr = IoHdr::Read { usr_len: 36, need_inval: true, desc: Some(desc) };
    let request = IoReq { hdr, data_len: 36, usr_at: 36, usr_len: 36 };
    assert_eq!(parse_io(&geometry, off, &tail), Ok(request));

    let tail = write_hdr(32);
    assert_eq!(tail[..], hex("02 00 20 00"));
    let hdr = IoHdr::Write { usr_len: 32 };
    let request = IoReq { hdr, data_len: 4096, usr_at: 4096, usr_len: 32 };
    assert_eq!(parse_io(&geometry, 4128, &tail), Ok(request));
}

// tests [RT-41] [RT-45] [RT-65] [RT-67]: the checks of items 4 to 7 at their limits
#[test]
fn malformed_requests_are_refused() {
    use IoError as E;
    let geometry = usual();
    let io = |off, tail: &[u8]| parse_io(&geometry, off, tail).map(|request| request.data_len);
    let header = |text: &str| hex(text);
    let (end, most) = (131_072, 126_976);
    // 4: the header lies in the chunk
    assert_eq!(io(end - 4, &write_hdr(4096)), Ok(most - 4));
    assert_eq!(io(end - 3, &write_hdr(4096)), Err(E::Header(end - 3)));
    assert_eq!(io(end, &write_hdr(4096)), Err(E::Header(end)));
    let read = header("0300 0010 0000 0000");
    assert_eq!(parse_io(&geometry, 4096, &read).map(|r| r.usr_len), Ok(4096));
    let desc = Desc { addr: 0, key: 1, len: 8 };
    let mut tail = [0; 24];
    read_hdr(4096, false, Some(desc), &mut tail);
    assert_eq!(io(end - 24, &tail), Ok(most - 24));
    assert_eq!(io(end - 23, &tail), Err(E::Header(end - 23)));
    assert_eq!(io(36, &tail[..23]), Err(E::UsrLen(4096)));
    assert_eq!(io(4100, &tail[..23]), Err(E::Header(4100)));
    assert_eq!(io(4100, &tail[..7]), Err(E::Header(4100)));
    assert_eq!(io(4100, &[]), Err(E::Header(4100)));
    // 5: the user message lies before it and is not too long
    assert_eq!(io(35, &write_hdr(36)), Err(E::UsrLen(36)));
    assert_eq!(io(36, &write_hdr(36)), Ok(0));
    assert_eq!(io(5000, &write_hdr(4097)), Err(E::UsrLen(4097)));
    // 6: flags and descriptors
    let (off, tail) = (40, header("0300 2000 0000 0200 00x16"));
    assert_eq!(io(off, &tail), Err(E::Count(2)));
    assert_eq!(io(32, &header("0300 2000 0100 0000")), Err(E::Flags(1)));
    assert_eq!(io(off, &header("0300 2000 0200 0100 00x16")), Err(E::Flags(2)));
    assert_eq!(io(off, &header("0300 2000 0000 0000")), Err(E::NoDesc(8)));
    for (len, good) in [(0, false), (1, true), (8, true), (9, false)] {
        let desc = Desc { addr: 0x1000, key: 1, len };
        let (off, tail) = read_request(8, 32, Some(desc));
        assert_eq!(io(off, &tail), if good { Ok(8) } else { Err(E::Desc(desc)) });
    }
    let desc = Desc { addr: u64::MAX - 3, key: 1, len: 4 };
    let (off, tail) = read_request(8, 32, Some(desc));
    assert_eq!(io(off, &tail), Err(E::Desc(desc)));
    // 7: the data
    assert_eq!(io(most + 32, &write_hdr(32)), Ok(most));
    assert_eq!(io(most + 33, &write_hdr(32)), Err(E::DataLen(most + 1)));
    for kind in [0, 1, 4, 5] {
        assert_eq!(io(off, &[kind, 0, 32, 0]), Err(E::Type(kind.into())));
    }
}

// tests [RT-13] [RT-56]
#[test]
fn new_keys_are_read() {
    let message = RkeyRsp { id: 0, key: 0x357 };
    assert_eq!(message.emit()[..], hex("04 00 00 00 57 03 00 00"));
    assert_eq!(RkeyRsp::parse(&message.emit()), Ok(message));
    assert_eq!(RkeyRsp::parse(&message.emit()[..7]), Err(RkeyRspError::Short(7)));
    assert_eq!(RkeyRsp::parse(&[3, 0, 0, 0, 0, 0, 0, 0]), Err(RkeyRspError::Type(3)));
}

// tests [NB-10] [NB-12] [NB-13]
#[test]
fn io_messages_are_as_the_vectors_say() {
    let geometry = usual();
    let write = Io { device: 0, sector: 8, op: OP_WRITE, flags: IoFlags::SYNC, len: 4096, prio: 0 };
    let vector = hex("04000000 00000000 0800000000000000 01010000 00100000 0000 00x6");
    assert_eq!(write.emit()[..], vector);
    assert_eq!(rnbd::parse(&vector), Ok(Request::Io(write)));
    assert_eq!(Imm::Request(geometry.request_payload(3, 4128)).to_u32(), 0x0018_1020);
    let flush =
        Io { sector: u64::MAX, op: OP_FLUSH, flags: IoFlags::SYNC | IoFlags::FUA, len: 0, ..write };
    let vector = hex("04000000 00000000 ffx8 02030000 00000000 0000 00x6");
    assert_eq!(flush.emit()[..], vector);
    assert_eq!(rnbd::parse(&vector), Ok(Request::Io(flush)));
    let mut header = [0; 24];
    assert_eq!(read_hdr(32, true, None, &mut header), 8);
    assert_eq!(header[..8], hex("03 00 20 00 00 00 00 00"));
    assert_eq!(Imm::Request(geometry.request_payload(3, 32)).to_u32(), 0x0018_0020);
}

/// Requests of a client of Linux 7.2.12: numbers 75, 108, 112 and 188 of the lab's capture
/// `rnbd-flush-7.2`, without the header of RTRS behind them.
// tests [NB-12] [NB-57] [NB-76]
#[test]
fn requests_of_linux_7_2() {
    let io = |sector, op, flags, len, prio| Io { device: 0, sector, op, flags, len, prio };
    let all = IoFlags::SYNC | IoFlags::FUA | IoFlags::PREFLUSH;
    let flush = io(u64::MAX, OP_FLUSH, all, 0, 0);
    let discard = io(0x80, OP_DISCARD, IoFlags::SYNC, 65_536, 0x4004);
    let keep = IoFlags::SYNC | IoFlags::NOUNMAP;
    let zeroes = io(0x100, OP_WRITE_ZEROES, keep, 65_536, 0x4004);
    let hole_zeroes = io(0x200, OP_WRITE_ZEROES, IoFlags::SYNC, 65_536, 0x4004);
    for (vector, request) in [
        ("04000000 00000000 ffx8 02070000 00000000 0000 00x6", flush),
        ("04000000 00000000 8000000000000000 03010000 00000100 0440 00x6", discard),
        ("04000000 00000000 0001000000000000 05090000 00000100 0440 00x6", zeroes),
        ("04000000 00000000 0002000000000000 05010000 00000100 0440 00x6", hole_zeroes),
    ] {
        let vector = hex(vector);
        assert_eq!(request.emit()[..], vector);
        assert_eq!(rnbd::parse(&vector), Ok(Request::Io(request)));
    }
}

// tests [NB-4] [NB-5] [NB-11] [NB-22]
#[test]
fn messages_too_short_are_refused() {
    let short = |needed, got| Err(MsgError::Short { needed, got });
    assert_eq!(rnbd::parse(&[]), short(4, 0));
    assert_eq!(rnbd::parse(&hex("00 00 ff")), short(4, 3));
    assert_eq!(rnbd::parse(&hex("00 00 ff ff")), short(5, 4));
    assert_eq!(rnbd::parse(&hex("00 00 ff ff 02")), Ok(Request::SessInfo { ver: 2 }));
    assert_eq!(rnbd::parse(&hex("05 00 ff ff 01 00 00")), short(8, 7));
    assert_eq!(rnbd::parse(&hex("05 00 ff ff 01 00 00 00")), Ok(Request::Close { id: 1 }));
    for kind in ["01", "03", "06", "ff"] {
        let number = u16::from(hex(kind)[0]);
        assert_eq!(rnbd::parse(&hex(&format!("{kind} 00x40"))), Err(MsgError::Type(number)));
    }
    let io = hex("04 00 ff ff 01 00 00 00 00x8 00 01 00 00 00 02 00 00 04 40 ffx6");
    let with = |prio| {
        let flags = IoFlags::SYNC;
        Ok(Request::Io(Io { device: 1, sector: 0, op: OP_READ, flags, len: 512, prio }))
    };
    assert_eq!(rnbd::parse(&io[..23]), short(24, 23));
    assert_eq!(rnbd::parse(&io[..24]), with(0), "a peer of version 1");
    assert_eq!(rnbd::parse(&io[..31]), with(0));
    assert_eq!(rnbd::parse(&io), with(0x4004));
}

// tests [NB-7] [NB-22]
#[test]
fn names_end_inside_their_field() {
    let open = |name: &[u8]| [&hex("02 00 00 00 01 00")[..], name].concat();
    let named = |name| Ok(Request::Open { access: 1, name });
    assert_eq!(rnbd::parse(&open(b"")), Err(MsgError::Short { needed: 7, got: 6 }));
    assert_eq!(rnbd::parse(&open(b"\0")), named(b""));
    assert_eq!(rnbd::parse(&open(b"disk0\0junk")), named(b"disk0"));
    assert_eq!(rnbd::parse(&open(b"disk0")), Err(MsgError::Name));
    let longest = [[b'n'; 254].as_slice(), &[0; 4]].concat();
    assert_eq!(rnbd::parse(&open(&longest)), named(&longest[..254]));
    let endless = [[b'n'; 255].as_slice(), &[0; 3]].concat();
    assert_eq!(rnbd::parse(&open(&endless)), Err(MsgError::Name));
    assert_eq!(rnbd::emit_open(Access::Rw, &endless[..255]), None);
    assert_eq!(rnbd::emit_open(Access::Rw, b"a\0b"), None);
    let written = rnbd::emit_open(Access::Migration, b"disk0").expect("short");
    assert_eq!(written[..], hex("020000000200 6469736b30 00x253"));
}

// tests [NB-6] [NB-8] [NB-9]: a place for every field
#[test]
fn answers_have_every_field_in_its_place() {
    let vector =
        hex("0300 0000 01020304 1112131415161718 21222324 31323334 41424344 51525354 61626364 \
         7172 8182 9192 a1a2 b1 c1 00x10");
    let opened = OpenRsp {
        device_id: 0x0403_0201,
        nsectors: 0x1817_1615_1413_1211,
        max_hw_sectors: 0x2423_2221,
        max_write_zeroes_sectors: 0x3433_3231,
        max_discard_sectors: 0x4443_4241,
        discard_granularity: 0x5453_5251,
        discard_alignment: 0x6463_6261,
        physical_block_size: 0x7271,
        logical_block_size: 0x8281,
        max_segments: 0x9291,
        secure_discard: 0xa2a1,
        obsolete_rotational: 0xb1,
        cache_policy: 0xc1,
    };
    assert_eq!(opened.emit()[..], vector);
    assert_eq!(OpenRsp::parse(&vector), Some(opened));
    assert_eq!(OpenRsp::parse(&vector[..55]), None);
    assert_eq!(OpenRsp::parse(&rnbd::emit_sess_info_rsp(2)), None);
    assert_eq!(rnbd::emit_sess_info(2)[..], hex("00 00 00 00 02 00x31"));
    assert_eq!(rnbd::emit_sess_info_rsp(2)[..], hex("01 00 00 00 02 00x31"));
    assert_eq!(rnbd::parse_sess_info_rsp(&rnbd::emit_sess_info(2)), None);
    assert_eq!(rnbd::emit_close(0x0403_0201)[..], hex("05000000 01020304"));
}

// tests [NB-19] [NB-34]
#[test]
fn access_modes_have_numbers_and_words() {
    let modes: Vec<_> = (0..=255).filter_map(Access::parse).collect();
    assert_eq!(modes, [Access::Ro, Access::Rw, Access::Migration]);
    assert_eq!(modes.iter().map(|mode| *mode as u8).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(modes.iter().map(Access::to_string).collect::<Vec<_>>(), ["ro", "rw", "migration"]);
}

/// One line about a message of a kernel.
fn read_line(kind: &str, bytes: &[u8], geometry: &mut Geometry) -> String {
    checks::messages(bytes, geometry);
    match kind.split_once('-') {
        Some(("con", "req")) => {
            let request = ConReq::parse(bytes).expect("a kernel's");
            assert_eq!(request.emit()[..], *bytes);
            format!("{request:?}")
        }
        Some(("con", _)) => {
            let answer = ConAnswer::parse(bytes).expect("a kernel's");
            assert_eq!(answer.emit()[..], *bytes);
            if let ConAnswer::Accepted(accepted) = answer {
                *geometry = accepted.geometry;
            }
            format!("{answer:?}")
        }
        Some(("info", "req")) => {
            let name = parse_info_req(bytes).expect("a kernel's");
            assert_eq!(emit_info_req(&name)[..], *bytes);
            format!("session {name}")
        }
        Some(("info", _)) => {
            let mut chunks = Vec::new();
            parse_info_rsp(bytes, geometry, &mut chunks).expect("a kernel's");
            format!("{} chunks from {:x?}", chunks.len(), chunks[0])
        }
        Some(("request", imm)) => {
            let imm = Imm::from_u32(u32::from_str_radix(imm, 16).expect("hexadecimal"));
            let Imm::Request(payload) = imm else { panic!("{imm} is no request") };
            let (id, off) = geometry.split(payload).expect("a kernel's");
            // The header follows the user message; which of the three lengths applies is not
            // stated.
            let request = [24, 8, 4].into_iter().find_map(|len| {
                let tail = &bytes[bytes.len().checked_sub(len)?..];
                let request = parse_io(geometry, off, tail).ok()?;
                (usize::from(request.usr_len) + len == bytes.len()).then_some(request)
            });
            let request = request.expect("a kernel's");
            let usr = &bytes[..request.usr_len.into()];
            checks::rnbd(usr);
            let message = rnbd::parse(usr).expect("a kernel's");
            let message = match message {
                Request::Open { access, name } => {
                    format!("open {} {}", access, String::from_utf8_lossy(name))
                }
                other => format!("{other:?}"),
            };
            format!("chunk {id}, {} bytes of data, {:?}: {message}", request.data_len, request.hdr)
        }
        Some(("done", imm)) => {
            let imm = Imm::from_u32(u32::from_str_radix(imm, 16).expect("hexadecimal"));
            let key = RkeyRsp::parse(bytes).map_or(String::new(), |new| {
                assert_eq!(new.emit()[..], *bytes);
                format!(", chunk {} has key {:#x}", new.id, new.key)
            });
            format!("{imm}{key}")
        }
        _ => {
            checks::rnbd(bytes);
            let version = rnbd::parse_sess_info_rsp(bytes).map(|v| format!("version {v}"));
            let opened = OpenRsp::parse(bytes).map(|opened| {
                assert_eq!(opened.emit()[..], *bytes);
                format!("{opened:?}")
            });
            version.or(opened).expect("a kernel's")
        }
    }
}

// tests [RT-76] [RT-77] [RT-78] [RT-79] [NB-2] [NB-14]: messages of 6.12 read as they are written
#[test]
fn reads_what_kernels_say() {
    let text = include_str!("../../testdata/rtrs-messages.txt");
    let (mut found, mut geometry) = (String::new(), usual());
    for line in text.lines().filter(|line| !line.starts_with("= ")) {
        found += &format!("{line}\n");
        if let Some((kind, bytes)) = line.split_once(' ').filter(|(kind, _)| *kind != "#") {
            found += &format!("= {}\n", read_line(kind, &hex(bytes), &mut geometry));
        }
    }
    let name = concat!(env!("CARGO_TARGET_TMPDIR"), "/rtrs-messages.txt");
    std::fs::write(name, &found).expect("the target folder is writable");
    assert!(found == text, "reads otherwise, see {name}");
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (1..=64u16, 13..=17u32, 288..=4096u32)
        .prop_map(|(depth, log, hdr)| Geometry::of_chunk(depth, 1 << log, hdr).expect("fits"))
}

/// Bytes like those of a message: mostly small numbers.
fn messageish(len: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(prop_oneof![8 => 0..=4u8, 1 => any::<u8>()], 0..len)
}

proptest! {
    #[test]
    fn any_bytes_can_be_read(bytes in messageish(300), tail in messageish(28), g in geometry(),
                             off in 0..140_000u32, imm in any::<u32>()) {
        checks::messages(&bytes, &g);
        checks::request(off, &tail, &g);
        checks::request(off % 64, &tail, &g);
        checks::imm(imm, &g);
        checks::rnbd(&bytes);
    }

    #[test]
    fn what_is_written_is_read(req in any::<(u16, u16, [u8; 16], [u8; 16], bool)>(),
                               cid_num in 1..=4096u16, g in geometry(), new_rkey: bool,
                               errno in 1..=4095u16, key in any::<(u16, u32)>()) {
        let (cid, recon_cnt, path, session, first) = req;
        let (path, session) = (Uuid(path), Uuid(session));
        let req = ConReq { cid: cid % cid_num, cid_num, recon_cnt, path, session, first, counts_keys: !first, gives_notice: new_rkey };
        prop_assert_eq!(ConReq::parse(&req.emit()), Ok(req));
        for answer in [ConAnswer::Accepted(ConRsp { geometry: g, new_rkey, counted_keys: !new_rkey, accepts_notice: first }), ConAnswer::Refused(errno)] {
            prop_assert_eq!(ConAnswer::parse(&answer.emit()), Ok(answer));
        }
        let key = RkeyRsp { id: key.0, key: key.1 };
        prop_assert_eq!(RkeyRsp::parse(&key.emit()), Ok(key));
    }

    #[test]
    fn requests_in_their_limits_are_read(g in geometry(), data in 0..=1_000_000u32,
                                         usr in 0..=64u16, write: bool, inval: bool,
                                         addr in any::<u64>(), key in any::<u32>(), id in any::<u16>()) {
        let data_len = data % (g.max_io() + 1 - 64);
        let len = data_len.max(1);
        let desc = (data_len > 0).then_some(Desc { addr: addr >> 1, key, len });
        let mut tail = [0; 24];
        let off = data_len + u32::from(usr);
        if write {
            tail[..4].copy_from_slice(&write_hdr(usr));
        } else {
            read_hdr(usr, inval, desc, &mut tail);
        }
        let need_inval = inval && desc.is_some();
        let hdr = if write { IoHdr::Write { usr_len: usr } } else { IoHdr::Read { usr_len: usr, need_inval, desc } };
        let request = IoReq { hdr, data_len, usr_at: data_len, usr_len: usr };
        prop_assert_eq!(parse_io(&g, off, &tail), Ok(request));
        checks::request(off, &tail, &g);
        let id = id % g.queue_depth();
        prop_assert_eq!(g.split(g.request_payload(id, off)), Some((id, off)));
    }
}
