//! Properties of any bytes. Used by the property tests and by the fuzz target, so this file depends
//! on the crate only.

use bowline_wire::rds::{
    DecodeError, EXT_AREA_LEN, Extension, Extensions, HEADER_LEN, Handshake, Header, checksum,
    checksum_ok,
};

/// Checks everything about one header; `bytes` may have any length.
pub(crate) fn header(bytes: &[u8]) {
    let Some(raw) = bytes.first_chunk::<HEADER_LEN>() else {
        let short = DecodeError::Short { needed: HEADER_LEN, got: bytes.len() };
        assert_eq!(Header::parse(bytes), Err(short));
        return;
    };
    let header = Header::parse(bytes).expect("48 bytes are a header");
    // tests: padding is not looked at, and written as zero
    let mut canonical = *raw;
    canonical[26..30].fill(0);
    assert_eq!(header.to_bytes(), canonical);
    assert_eq!(Header::from_bytes(&canonical), header);

    let kinds = [header.is_map(), header.is_probe_ping(), header.is_probe_pong()];
    assert!(kinds.iter().filter(|kind| **kind).count() <= 1, "{kinds:?}");

    let line = header.to_string();
    assert!(line.starts_with("seq ") && line.len() < 300 && line.is_ascii(), "{line}");
    assert!(!line.contains('\n'), "{line}");

    checksums(raw);
    extensions(&header.ext);
    handshake(&Handshake::parse(&header.ext));
}

/// tests
fn checksums(raw: &[u8; HEADER_LEN]) {
    let sum = checksum(raw);
    let mut sent = *raw;
    sent[30..32].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(checksum(&sent), sum, "the field counts as zero");
    assert!(checksum_ok(&sent));
    for bit in 0..HEADER_LEN * 8 {
        let mut damaged = sent;
        damaged[bit / 8] ^= 1 << (bit % 8);
        let absent = damaged[30..32] == [0, 0];
        assert_eq!(checksum_ok(&damaged), absent, "bit {bit} of {sent:02x?}");
    }
}

/// The extensions and the remaining bytes together must be the area.
fn extensions(area: &[u8; EXT_AREA_LEN]) {
    let mut walk = Extensions::new(area);
    let mut at = 0;
    while let Some(extension) = walk.next() {
        let (bytes, padding) = encode(extension);
        let end = at + bytes.len();
        assert_eq!(area.get(at..end), Some(&bytes[..]), "{extension:?}");
        at = end + padding;
        assert_eq!(walk.rest(), &area[at..]);
    }
    assert_eq!(walk.next(), None, "the end stays the end");
    // tests: only a type not known, the end mark, or a lack of room ends the list
    if let Some((kind, rest)) = walk.rest().split_first() {
        let room = match kind {
            1 | 2 | 6 => 4,
            3 | 4 => 8,
            5 => 2,
            8 => 1,
            0x42 => 5,
            _ => usize::MAX,
        };
        assert!(rest.len() < room, "type {kind} with {} bytes", rest.len());
    }
}

/// Checks that every handshake is read back by this crate and by a kernel.
pub(crate) fn handshake(handshake: &Handshake) {
    let area = handshake.emit();
    assert_eq!(Handshake::parse(&area), *handshake);
    // tests: bytes after the handshake do not change what a 6.12 kernel reads
    assert_eq!(kernel_walk(&area), (handshake.npaths, handshake.generation));
}

/// Encodes one extension; also returns how many bytes of padding follow.
pub(crate) fn encode(extension: Extension) -> (Vec<u8>, usize) {
    let (kind, body, padding) = match extension {
        Extension::Version(version) => (1, version.to_be_bytes().to_vec(), 0),
        Extension::Rdma(rkey) => (2, rkey.to_be_bytes().to_vec(), 0),
        Extension::RdmaDest(dest) => {
            (3, [dest.rkey.to_be_bytes(), dest.offset.to_be_bytes()].concat(), 0)
        }
        Extension::RdmaBytes { bytes, direction } => {
            (4, [&bytes.to_be_bytes()[..], &[direction]].concat(), 3)
        }
        Extension::NPaths(n) => (5, n.to_be_bytes().to_vec(), 0),
        Extension::GenNum(generation) => (6, generation.to_be_bytes().to_vec(), 0),
        Extension::SportIdx(payload) => (8, vec![payload], 0),
        Extension::Bowline(b) => {
            (0x42, [&[b.version << 4 | b.path][..], &b.max_message.to_be_bytes()].concat(), 0)
        }
        other => panic!("no encoding for {other:?}"),
    };
    ([&[kind], &body[..]].concat(), padding)
}

/// Reads a handshake as Linux 6.12 does, by the rules to, [R-404]: path count and
/// generation.
pub(crate) fn kernel_walk(area: &[u8; EXT_AREA_LEN]) -> (Option<u16>, Option<u32>) {
    let (mut npaths, mut generation) = (None, None);
    let mut at = 0;
    while let Some(&kind) = area.get(at) {
        let len = match kind {
            0 | 16.. => break,
            1 | 2 | 6 => 4,
            3 => 8,
            5 => 2,
            _ => 0,
        };
        let Some(body) = area.get(at + 1..at + 1 + len) else { break };
        match kind {
            5 => npaths = Some(u16::from_be_bytes(body.try_into().unwrap())),
            6 => generation = Some(u32::from_be_bytes(body.try_into().unwrap())),
            _ => {}
        }
        at += 1 + len;
    }
    (npaths, generation)
}
