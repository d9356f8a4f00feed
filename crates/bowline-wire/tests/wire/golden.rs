//! Frames of real peers, from `testdata/`: each `.bin` with a `.txt` that says where it comes from
//! and what is in it, as `testdata/extract.py` reads it.

use crate::checks;

use bowline_wire::rds::{
    Extension, Extensions, Flags, HEADER_LEN, Handshake, Header, MAP_LEN, MapView, checksum,
    checksum_ok,
};

/// A header, its bytes, and its payload.
struct Frame<'a> {
    at: usize,
    raw: &'a [u8; HEADER_LEN],
    header: Header,
    payload: &'a [u8],
}

/// Splits a byte stream into messages.
fn stream(mut bytes: &[u8]) -> Vec<Frame<'_>> {
    let len = bytes.len();
    let mut out = Vec::new();
    while let Some((raw, rest)) = bytes.split_first_chunk() {
        let header = Header::from_bytes(raw);
        let (payload, after) = rest.split_at(header.len as usize);
        out.push(Frame { at: len - bytes.len(), raw, header, payload });
        bytes = after;
    }
    assert!(bytes.is_empty(), "{} bytes left over", bytes.len());
    out
}

/// Splits a sequence of headers without payload.
fn headers(bytes: &[u8]) -> Vec<Frame<'_>> {
    let (rows, left) = bytes.as_chunks();
    assert!(left.is_empty());
    rows.iter()
        .enumerate()
        .map(|(i, raw)| {
            let header = Header::from_bytes(raw);
            Frame { at: i * HEADER_LEN, raw, header, payload: &[] }
        })
        .collect()
}

/// Checks the frames against the text, and properties of every frame.
fn assert_reads_as(frames: &[Frame<'_>], text: &str) {
    let mut read = Vec::new();
    for frame in frames {
        checks::header(frame.raw);
        assert_eq!(frame.header.to_bytes(), *frame.raw);
        let mut line = format!("{}: {}", frame.at, frame.header);
        if let (true, Some(map)) = (frame.header.is_map(), MapView::new(frame.payload)) {
            line += &format!(" | {map}");
        }
        read.push(line);
    }
    let expected: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(read, expected);
    assert!(!read.is_empty());
}

macro_rules! golden {
    ($take:ident $name:literal) => {{
        let bytes = include_bytes!(concat!("../../testdata/", $name, ".bin"));
        let frames = $take(bytes);
        assert_reads_as(&frames, include_str!(concat!("../../testdata/", $name, ".txt")));
        frames
    }};
}

/// tests: fields that a kernel leaves at zero over TCP
fn assert_tcp_kernel(frames: &[Frame<'_>]) {
    for Frame { header, .. } in frames {
        assert_eq!((header.ack, header.credit, header.csum), (0, 0, 0));
    }
}

// tests [R-402]
#[test]
fn handshake_of_the_smaller_side() {
    let frames = golden!(stream "stream-handshake-smaller");
    assert_tcp_kernel(&frames);
    let [map, probe, ping, pong] = &frames[..] else { panic!("four frames") };
    assert_eq!(map.header, Header::map());
    assert_eq!(map.payload.len(), MAP_LEN);
    assert!(probe.header.is_probe_ping() && probe.header.sequence == 1);
    assert_eq!((ping.header.sport, ping.header.dport), (61872, 0));
    assert!(pong.header.is_probe_pong() && pong.header.sequence == 3);
    let eight = Handshake { npaths: Some(8), ..Handshake::default() };
    for frame in [probe, pong] {
        assert_eq!(Handshake::parse(&frame.header.ext), eight);
        assert_eq!(frame.header.ext, eight.emit(), "byte for byte as this node writes it");
    }
}

// tests
#[test]
fn handshake_of_the_larger_side() {
    let frames = golden!(stream "stream-handshake-larger");
    assert_tcp_kernel(&frames);
    let [map, probe, pong, user] = &frames[..] else { panic!("four frames") };
    assert!(map.header.is_map() && probe.header.is_probe_ping() && pong.header.is_probe_pong());
    assert_eq!((user.header.sport, user.header.dport), (0, 61872));
    assert_eq!(user.header.ext, [0; 16], "a user's pong carries no handshake");
}

// tests
#[test]
fn data_of_a_kernel() {
    let frames = golden!(stream "stream-data");
    assert_tcp_kernel(&frames);
    let [_, first, second] = &frames[..] else { panic!("three frames") };
    let expected = Header { sequence: 2, len: 64, sport: 29735, dport: 4000, ..Header::default() };
    assert_eq!(first.header, expected);
    assert_eq!(second.header, Header { sequence: 3, ..expected });
}

// tests
#[test]
fn congestion_maps_of_a_kernel() {
    let frames = golden!(stream "stream-congestion");
    assert_tcp_kernel(&frames);
    let [set, clear] = &frames[..] else { panic!("two frames") };
    let set = MapView::new(set.payload).unwrap();
    assert_eq!(set.congested_ports().collect::<Vec<_>>(), [4000]);
    let clear = MapView::new(clear.payload).unwrap();
    assert!(clear.words().all(|word| word == 0));
}

// tests: same numbers, flag 0x04
#[test]
fn messages_a_kernel_sends_again() {
    let frames = golden!(stream "stream-retransmitted");
    assert_tcp_kernel(&frames);
    let sequences: Vec<u64> = frames.iter().map(|frame| frame.header.sequence).collect();
    assert_eq!(sequences, [2, 3, 4]);
    assert!(frames.iter().all(|frame| frame.header.flags == Flags::RETRANSMITTED));
    assert!(frames.iter().all(|frame| frame.payload.len() == 300));
}

// tests: a pong without extensions, checksums by another implementation
#[test]
fn peer_without_multipath() {
    let frames = golden!(stream "stream-legacy-peer");
    let pong = &frames[0].header;
    assert!(pong.is_probe_pong());
    assert_eq!(Handshake::parse(&pong.ext), Handshake::default());
    assert_checksums(&frames);
}

fn assert_checksums(frames: &[Frame<'_>]) {
    for Frame { raw, header, .. } in frames {
        assert_ne!(header.csum, 0);
        assert_eq!(checksum(raw), header.csum);
        assert!(checksum_ok(raw));
    }
}

// tests: checksums a kernel computed
#[test]
fn checksums_of_a_kernel() {
    assert_checksums(&golden!(headers "headers-ib"));
    assert_checksums(&golden!(headers "headers-ib-rdma-client"));
    assert_checksums(&golden!(headers "headers-ib-rdma-server"));
}

// tests section 1.4, types 2 and 3 as a kernel writes them
#[test]
fn rdma_extensions_of_a_kernel() {
    let all = |frames: Vec<Frame<'_>>| -> Vec<Extension> {
        frames.iter().flat_map(|frame| Extensions::new(&frame.header.ext)).collect()
    };
    let client = all(golden!(headers "headers-ib-rdma-client"));
    assert_eq!(client.len(), 3);
    assert!(client.iter().all(|ext| matches!(ext, Extension::RdmaDest(dest) if dest.offset == 0)));
    let server = all(golden!(headers "headers-ib-rdma-server"));
    assert_eq!(server, [Extension::Rdma(0x300), Extension::Rdma(0x301)]);
}
