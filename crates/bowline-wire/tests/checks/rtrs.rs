//! Properties of any bytes parsed as a message of RTRS or RNBD. Used by the tests and by the fuzz
//! targets, so this file depends on the crate only.
#![allow(dead_code, reason = "each user needs a part of it")]

use bowline_wire::rnbd::{self, OpenRsp, Request};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, Desc, Geometry, INFO_REQ_LEN, Imm, IoError, IoHdr, MAX_PATHS, RkeyRsp,
    emit_given_up, emit_info_req, emit_info_rsp, info_rsp_len, parse_given_up, parse_info_req,
    parse_info_rsp, parse_io, read_hdr, write_hdr,
};

/// Messages outside of chunks.
pub(crate) fn messages(bytes: &[u8], geometry: &Geometry) {
    if let Ok(request) = ConReq::parse(bytes) {
        assert_eq!(ConReq::parse(&request.emit()), Ok(request));
        assert!(request.cid < request.cid_num && request.cid_num <= 4096);
    }
    if let Ok(answer) = ConAnswer::parse(bytes) {
        assert_eq!(ConAnswer::parse(&answer.emit()), Ok(answer));
        assert_ne!(answer, ConAnswer::Refused(0));
    }
    if let Ok(name) = parse_info_req(bytes) {
        assert_eq!(parse_info_req(&emit_info_req(&name)).as_ref(), Ok(&name));
        assert!((1..=254).contains(&name.len()) && !name.contains(['/', '.', '\0', '\n']));
    }
    let lives: Vec<_> = parse_given_up(bytes).collect();
    let mut message = bytes.get(..INFO_REQ_LEN).unwrap_or(&[0; INFO_REQ_LEN]).to_vec();
    emit_given_up(&lives, &mut message);
    assert!(lives.len() <= MAX_PATHS && parse_given_up(&message).eq(lives.iter().copied()));
    if let Ok(message) = RkeyRsp::parse(bytes) {
        assert_eq!(bytes[..8], message.emit());
    }
    let mut chunks = vec![(0, 0)];
    match parse_info_rsp(bytes, geometry, &mut chunks) {
        Err(_) => assert!(chunks.is_empty()),
        Ok(()) => {
            assert_eq!(chunks.len(), usize::from(geometry.queue_depth()));
            // The same message with one descriptor per chunk has the same meaning.
            let descs = chunks.iter().map(|&(addr, key)| Desc { addr, key, len: geometry.chunk() });
            let (mut out, mut again) = (Vec::new(), Vec::new());
            emit_info_rsp(descs, &mut out);
            assert_eq!(out.len(), info_rsp_len(geometry.queue_depth()));
            assert_eq!(parse_info_rsp(&out, geometry, &mut again), Ok(()));
            assert_eq!(again, chunks);
        }
    }
}

/// An immediate.
pub(crate) fn imm(number: u32, geometry: &Geometry) {
    let imm = Imm::from_u32(number);
    match imm {
        Imm::HbMsg | Imm::HbAck => assert_eq!(imm.to_u32() >> 28, number >> 28),
        _ => assert_eq!(imm.to_u32(), number),
    }
    assert_eq!(Imm::from_u32(imm.to_u32()), imm);
    if let Imm::Request(payload) = imm
        && let Some((id, off)) = geometry.split(payload)
    {
        assert!(id < geometry.queue_depth() && off < geometry.chunk());
        assert_eq!(geometry.request_payload(id, off), payload);
    }
}

/// A request whose header, and what follows it in the chunk, is `tail`. tests [RT-67]
pub(crate) fn request(off: u32, tail: &[u8], geometry: &Geometry) {
    let request = match parse_io(geometry, off, tail) {
        Ok(request) => request,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            if let IoError::Header(at) = error {
                assert!(at == off && (tail.len() < 24 || off > geometry.chunk() - 24));
            }
            return;
        }
    };
    assert_eq!(request.usr_at, request.data_len);
    assert_eq!(request.data_len + u32::from(request.usr_len), off);
    assert!(request.data_len <= geometry.max_io());
    assert!(u32::from(request.usr_len) <= geometry.max_hdr());
    let mut out = [0; 24];
    let len = match request.hdr {
        IoHdr::Write { usr_len } => {
            out[..4].copy_from_slice(&write_hdr(usr_len));
            4
        }
        IoHdr::Read { usr_len, need_inval, desc } => {
            match desc {
                None => assert!(request.data_len == 0 && !need_inval),
                Some(desc) => {
                    assert!(desc.len >= 1 && desc.len <= request.data_len);
                    assert!(desc.addr.checked_add(desc.len.into()).is_some());
                }
            }
            read_hdr(usr_len, need_inval, desc, &mut out)
        }
    };
    assert_eq!(tail[..len], out[..len]);
    assert!(off as usize + len <= geometry.chunk() as usize);
}

/// A user message of RNBD, and an answer of a server.
pub(crate) fn rnbd(bytes: &[u8]) {
    match rnbd::parse(bytes) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(request) => {
            let again: Vec<u8> = match request {
                Request::SessInfo { ver } => rnbd::emit_sess_info(ver).into(),
                Request::Open { access, name } => {
                    assert!(name.len() <= rnbd::NAME_MAX && !name.contains(&0));
                    let mode = rnbd::Access::parse(access).unwrap_or(rnbd::Access::Ro);
                    let mut out = rnbd::emit_open(mode, name).expect("what was read fits");
                    out[4] = access;
                    out.into()
                }
                Request::Close { id } => rnbd::emit_close(id).into(),
                Request::Io(io) => io.emit().into(),
            };
            assert_eq!(rnbd::parse(&again), Ok(request));
            // Written bytes equal the bytes read, except for reserved ones.
            assert_eq!(again[..2], bytes[..2]);
        }
    }
    if let Some(opened) = OpenRsp::parse(bytes) {
        let again = opened.emit();
        assert_eq!(OpenRsp::parse(&again), Some(opened));
        assert_eq!(again[4..46], bytes[4..46]);
    }
    if let Some(version) = rnbd::parse_sess_info_rsp(bytes) {
        assert_eq!(rnbd::parse_sess_info_rsp(&rnbd::emit_sess_info_rsp(version)), Some(version));
    }
}
