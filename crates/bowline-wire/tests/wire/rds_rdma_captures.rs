//! Whole connections of RDS over RoCE between two kernels, from `testdata/`: each `.bin` with a
//! `.txt` that says what is in it, as `testdata/extract_rds_rdma.py` reads it.

use crate::checks;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use bowline_wire::rds::{
    CONNECT_LEN, ConnectData, EXT_AREA_LEN, Extension, Extensions, FRAGMENT_LEN, Flags, HEADER_LEN,
    Header, MAP_LEN, MapView, RDMA_PORT_V4, RdmaExt, Version, checksum, checksum_ok,
};
use bowline_wire::roce::cm::{CmMad, CmMessage, Rep, Req, TRANSPORT_RC};
use bowline_wire::roce::{
    CMA_HEADER_LEN, CmaHeader, GSI_QPN, Opcode, Outer, Packet, Psn, service_id, split_icrc,
};

/// The path MTU of all three captures.
const MTU: usize = 1024;
const IP_LEN: usize = 20;
const UDP_LEN: usize = 8;

/// A packet of a capture.
struct Datagram<'a> {
    /// Place in the capture, from 1.
    number: usize,
    from: Ipv4Addr,
    to: Ipv4Addr,
    packet: Packet<'a>,
}

/// One SEND: a header, and payload.
struct Frame {
    header: Header,
    raw: [u8; HEADER_LEN],
    payload: Vec<u8>,
    solicited: bool,
    /// Whether one packet holds all of the frame.
    only: bool,
}

impl Frame {
    /// Tells whether this is an acknowledgement alone [IB-59].
    fn is_ack_only(&self) -> bool {
        (self.header.sport, self.header.dport) == (0, 0) && self.payload.is_empty()
    }
}

enum What {
    Req(Req),
    Rep(Rep),
    Rtu,
    Frame(Frame),
    Write { rkey: u32, at: u64, len: u32 },
    Read { rkey: u32, at: u64, len: u32 },
}

/// What one side did.
struct Event {
    /// Place of the last packet of it in the capture.
    number: usize,
    from: Ipv4Addr,
    to: Ipv4Addr,
    what: What,
}

/// Splits a file into datagrams and checks the ICRC of each.
fn datagrams(mut bytes: &[u8]) -> Vec<Datagram<'_>> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let address = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap());
        let (ident, from, to, source_port) = (word(4), address(12), address(16), word(IP_LEN));
        let (datagram, rest) = bytes.split_at(word(2).into());
        let (packet, icrc) = split_icrc(&datagram[IP_LEN + UDP_LEN..]).unwrap();
        let outer = Outer { from: from.into(), to: to.into(), source_port };
        let number = out.len() + 1;
        assert_eq!(outer.icrc(ident, packet), icrc, "datagram {number}");
        out.push(Datagram { number, from, to, packet: Packet::parse(packet).unwrap() });
        bytes = rest;
    }
    out
}

/// One side of the queue pair, as its packets tell it.
struct Side {
    next: Psn,
    frame: Option<Vec<u8>>,
}

/// Puts the packets of one connection together; none is lost or repeated in these captures.
fn events(datagrams: &[Datagram<'_>]) -> Vec<Event> {
    let mut sides: BTreeMap<Ipv4Addr, Side> = BTreeMap::new();
    let mut out = Vec::new();
    for Datagram { number, from, to, packet } in datagrams {
        let opcode = packet.opcode;
        let what = if packet.bth.dest_qpn == GSI_QPN {
            let mad: &[u8; 256] = packet.payload.try_into().unwrap();
            // The PSN in a REQ or REP is the one with which its *receiver* starts.
            let mut start = |psn| {
                let side = Side { next: Psn::new(psn), frame: None };
                assert!(sides.insert(*to, side).is_none(), "tests [CM-31]");
            };
            match CmMad::parse(mad).unwrap().message {
                CmMessage::Req(req) => {
                    start(req.starting_psn);
                    Some(What::Req(req))
                }
                CmMessage::Rep(rep) => {
                    start(rep.starting_psn);
                    Some(What::Rep(rep))
                }
                CmMessage::Rtu(_) => Some(What::Rtu),
                other => panic!("{other:?}"),
            }
        } else if opcode.is_response() {
            None
        } else {
            let side = sides.get_mut(from).expect("data follow the handshake");
            assert_eq!(packet.bth.psn, side.next, "datagram {number}");
            side.next = side.next.next();
            request(side, packet)
        };
        if let Some(what) = what {
            out.push(Event { number: *number, from: *from, to: *to, what });
        }
    }
    assert!(sides.values().all(|side| side.frame.is_none()));
    out
}

/// Takes the next request of one side; returns what it completes or starts.
fn request(side: &mut Side, packet: &Packet<'_>) -> Option<What> {
    let opcode = packet.opcode;
    if let Some(reth) = packet.reth {
        let (rkey, at, len) = (reth.rkey, reth.va, reth.len);
        if opcode == Opcode::ReadRequest {
            for _ in 1..(len as usize).div_ceil(MTU) {
                side.next = side.next.next();
            }
            return Some(What::Read { rkey, at, len });
        }
        return Some(What::Write { rkey, at, len });
    }
    if opcode.is_write() {
        return None;
    }
    // tests [IB-43]: neither an immediate nor a key to invalidate
    assert!(opcode.is_send() && packet.imm.is_none() && packet.ieth.is_none(), "{opcode:?}");
    assert_eq!(side.frame.is_none(), opcode.starts());
    let mut frame = side.frame.take().unwrap_or_default();
    frame.extend_from_slice(packet.payload);
    if !opcode.ends() {
        // tests [IB-42]: only the packet that ends a frame can be solicited
        assert!(!packet.bth.solicited && packet.payload.len() == MTU);
        side.frame = Some(frame);
        return None;
    }
    let (raw, payload) =
        frame.split_first_chunk().expect("tests [IB-53]: every frame has a header");
    Some(What::Frame(Frame {
        header: Header::from_bytes(raw),
        raw: *raw,
        payload: payload.to_vec(),
        solicited: packet.bth.solicited,
        only: opcode.starts(),
    }))
}

/// The private data of a REQ behind the header of rdma_cm.
fn connect_data(private: &[u8]) -> ConnectData {
    ConnectData::parse(private, false).unwrap()
}

/// The line of the text for an event.
fn line(Event { number, from, what, .. }: &Event) -> String {
    let data = |private| {
        let ConnectData { source, destination, version, minors, tos, ack, credit, bowline } =
            connect_data(private);
        assert_eq!(bowline, None, "they are of kernels");
        let Version { major, minor } = version;
        format!(
            "{source} to {destination} version {major}.{minor} minors {minors:#x} tos {tos} \
             ack {ack} credit {credit}"
        )
    };
    let text = match what {
        What::Req(req) => {
            let (cma, private) = req.private_data.split_first_chunk().unwrap();
            let port = CmaHeader::parse(cma).unwrap().source_port;
            let (psn, service) = (req.starting_psn, req.service_id);
            let data = data(private);
            format!("REQ psn {psn:#08x} service {service:#x} from port {port} | {data}")
        }
        What::Rep(rep) => {
            format!("REP psn {:#08x} | {}", rep.starting_psn, data(&rep.private_data))
        }
        What::Rtu => "RTU".to_owned(),
        What::Frame(Frame { header, payload, solicited, .. }) => {
            let len = HEADER_LEN + payload.len();
            let solicited = if *solicited { " solicited" } else { "" };
            format!("frame {len}{solicited}: {header}")
        }
        What::Write { rkey, at, len } => format!("write {rkey:#010x}+{at:#x} len {len}"),
        What::Read { rkey, at, len } => format!("read {rkey:#010x}+{at:#x} len {len}"),
    };
    format!("{number}: {from} {text}")
}

/// Reads a capture and checks it against its text.
macro_rules! capture {
    ($name:literal) => {{
        let datagrams = datagrams(include_bytes!(concat!("../../testdata/", $name, ".bin")));
        let events = events(&datagrams);
        let read: Vec<String> = events.iter().map(line).collect();
        let text = include_str!(concat!("../../testdata/", $name, ".txt"));
        let expected: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(read, expected);
        events
    }};
}

fn captures() -> [(&'static str, Vec<Event>); 3] {
    [
        ("rds-ib", capture!("rds-ib")),
        ("rds-ib-credits", capture!("rds-ib-credits")),
        ("rds-ib-rdma", capture!("rds-ib-rdma")),
    ]
}

/// The frames of one side in order.
fn frames(events: &[Event], of: Ipv4Addr) -> Vec<&Frame> {
    let frames = events.iter().filter(|event| event.from == of);
    frames.filter_map(|e| if let What::Frame(f) = &e.what { Some(f) } else { None }).collect()
}

/// Both sides: first the one that connected.
fn sides(events: &[Event]) -> [Ipv4Addr; 2] {
    [events[0].from, events[0].to]
}

// tests [IB-11] [IB-12] [IB-14] [IB-16] [IB-18] [IB-20] [IB-24] [IB-29] [IB-72]
#[test]
fn kernels_connect_as_the_specification_says() {
    for (name, events) in captures() {
        let [a, b] = sides(&events).map(IpAddr::from);
        let What::Req(req) = &events[0].what else { panic!("{name}") };
        let What::Rep(rep) = &events[1].what else { panic!("{name}") };
        assert!(matches!(events[2].what, What::Rtu), "{name}");

        let (cma, private) = req.private_data.split_first_chunk::<CMA_HEADER_LEN>().unwrap();
        let header = CmaHeader::parse(cma).unwrap();
        let data = connect_data(private);
        assert_eq!(data, ConnectData::new(a, b, Version::V3_1), "{name}");
        assert_eq!((header.source, header.destination), (a, b), "{name}");
        assert_eq!([&header.emit()[..], &data.to_bytes()].concat(), req.private_data, "{name}");
        assert_eq!(req.service_id, service_id(RDMA_PORT_V4));

        let answer = connect_data(&rep.private_data);
        let agreed = data.negotiated().unwrap();
        assert_eq!(answer, ConnectData::new(b, a, agreed), "{name}");
        let mut area = [0; 196];
        area[..CONNECT_LEN].copy_from_slice(&answer.to_bytes());
        assert_eq!(rep.private_data, area, "{name}");

        assert_eq!((req.transport, req.flow_control, req.srq), (TRANSPORT_RC, false, false));
        assert_eq!((req.retry_count, req.rnr_retry_count, req.pkey), (1, 7, 0xffff));
        assert_eq!((req.local_timeout, req.remote_timeout, req.max_retries), (20, 20, 15));
        assert_eq!((req.responder_resources, req.initiator_depth, req.ack_timeout), (128, 128, 17));
        assert_eq!((rep.responder_resources, rep.initiator_depth), (128, 128));
        assert_eq!((rep.rnr_retry_count, rep.flow_control, rep.srq), (7, false, false));
        assert_eq!(rep.ack_delay, 15, "tests section 19.1");
    }
}

// tests [IB-50] [IB-73]: the checksum is always there, the padding and the credit are zero
#[test]
fn headers_are_written_as_kernels_write_them() {
    for (name, events) in captures() {
        for frame in sides(&events).into_iter().flat_map(|side| frames(&events, side)) {
            let Frame { header, raw, .. } = frame;
            assert_eq!(header.to_bytes(), *raw, "{name}");
            assert_ne!(header.csum, 0, "{name}");
            assert_eq!(header.csum, checksum(raw), "{name}");
            assert!(checksum_ok(raw), "{name}");
            assert_eq!(header.credit, 0, "{name}");
            checks::header(raw);
        }
    }
}

// tests [IB-42] [IB-53] [IB-54] [IB-55] [IB-60]
#[test]
fn messages_are_cut_into_frames_with_one_header() {
    for (name, events) in captures() {
        for side in sides(&events) {
            let mut of_message = frames(&events, side).into_iter().filter(|f| !f.is_ack_only());
            while let Some(first) = of_message.next() {
                let len = first.header.len as usize;
                let mut rest = len;
                let mut frame = first;
                while rest > FRAGMENT_LEN {
                    assert_eq!(frame.payload.len(), FRAGMENT_LEN, "{name}");
                    assert!(!frame.solicited && !frame.only, "{name}");
                    rest -= FRAGMENT_LEN;
                    frame = of_message.next().expect("more frames");
                    assert_eq!(frame.raw, first.raw, "{name}: no credit tells them apart");
                }
                assert_eq!(frame.payload.len(), rest, "{name}");
                assert!(frame.solicited, "{name}");
            }
        }
    }
}

// tests [IB-42] [IB-59]
#[test]
fn acknowledgements_are_one_solicited_packet() {
    for (name, events) in captures() {
        for side in sides(&events) {
            let frames = frames(&events, side);
            let acks: Vec<_> = frames.iter().filter(|f| f.is_ack_only()).collect();
            assert!(!acks.is_empty(), "{name}");
            for Frame { header, solicited, only, .. } in acks {
                let Header { ack, csum, .. } = *header;
                assert_eq!(*header, Header { ack, csum, ..Header::default() }, "{name}");
                assert!(*solicited && *only, "{name}");
            }
        }
    }
}

// tests [IB-37] [IB-60] [IB-61]: acknowledgements may come before it
#[test]
fn map_is_the_first_message_of_each_side() {
    for (name, events) in captures() {
        for side in sides(&events) {
            let frames = frames(&events, side);
            let first = frames.iter().position(|f| !f.is_ack_only()).unwrap();
            let [one, two] = frames[first..first + 2] else { panic!("two frames") };
            for Frame { header, .. } in [one, two] {
                let Header { ack, csum, .. } = *header;
                assert_eq!(*header, Header { ack, csum, ..Header::map() }, "{name}");
            }
            let map = [&one.payload[..], &two.payload].concat();
            assert_eq!(map.len(), MAP_LEN);
            assert_eq!(MapView::new(&map).unwrap().to_string(), "no port congested");
            let maps = frames.iter().filter(|f| f.header.flags.contains(Flags::CONG_BITMAP));
            assert_eq!(maps.count(), 2, "{name}: no other map");
        }
    }
}

// tests [IB-62] [IB-64] [IB-65] [IB-68]: every ninth message asks, and nobody answers without that
#[test]
fn messages_are_numbered_and_acknowledged() {
    for (name, events) in captures() {
        // Of each side: the last number sent, the last number acknowledged to it, and whether it
        // waits for an acknowledgement.
        let mut sent: BTreeMap<Ipv4Addr, (u64, u64, bool)> = BTreeMap::new();
        let mut asked = 0;
        for Event { number, from, to, what } in &events {
            let What::Frame(frame) = what else { continue };
            let Header { sequence, ack, flags, .. } = frame.header;
            let (last, acked, waits) = sent.entry(*to).or_default();
            assert!((*acked..=*last).contains(&ack), "{name} {number}: acknowledges {ack}");
            *acked = ack;
            if frame.is_ack_only() {
                assert!(*waits && ack == *last, "{name} {number}");
                *waits = false;
                asked += 1;
            }
            if !frame.is_ack_only() && !frame.header.is_map() {
                let (last, _, waits) = sent.entry(*from).or_default();
                if sequence == *last {
                    continue;
                }
                assert_eq!(sequence, *last + 1, "{name} {number}");
                *last = sequence;
                let asks = sequence % 9 == 1;
                let expected = if asks { Flags::ACK_REQUIRED } else { Flags::NONE };
                assert_eq!(flags, expected, "{name} {number}");
                *waits |= asks;
            }
        }
        assert!(asked >= 2 && sent.values().all(|(.., waits)| !waits), "{name}");
    }
}

// tests [IB-51] [IB-63] and section 19: an operation is posted before the message that tells of it,
// and the extensions are byte for byte those that this crate writes
#[test]
fn operations_go_before_their_messages() {
    let events = capture!("rds-ib-rdma");
    let mut handed = Vec::new();
    let mut done = Vec::new();
    for Event { what, .. } in &events {
        match what {
            What::Write { rkey, at, len } | What::Read { rkey, at, len } => {
                assert!(handed.contains(rkey), "tests [R-115]: the key came in extension 3");
                assert_eq!((*at, *len), (0, 20000));
                done.push(*rkey);
            }
            What::Frame(Frame { header, .. }) => {
                let found: Vec<_> = Extensions::new(&header.ext).collect();
                let written: [u8; EXT_AREA_LEN] = match found[..] {
                    [] => [0; EXT_AREA_LEN],
                    [Extension::Rdma(rkey)] => {
                        assert_eq!(done.last(), Some(&rkey));
                        RdmaExt::Op(rkey).emit()
                    }
                    [Extension::RdmaDest(dest)] => {
                        handed.push(dest.rkey);
                        RdmaExt::Dest(dest).emit()
                    }
                    _ => panic!("{found:?}"),
                };
                assert_eq!(written, header.ext);
            }
            _ => {}
        }
    }
    assert_eq!((handed, done), (vec![0x300, 0x301, 0x302], vec![0x300, 0x301]));
}
