//! What RDS over RDMA adds to the header: private data of connecting, extensions, frames. The byte
//! vectors written in the specification, and random values.

use crate::checks;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bowline_wire::rds::{
    BowlineConnect, CONNECT_LEN, ConnectData, EXT_AREA_LEN, Extension, Extensions, FRAGMENT_LEN,
    Flags, HEADER_LEN, Handshake, Header, MAP_LEN, RDMA_PORT_V4, RDMA_PORT_V6, RdmaDest, RdmaExt,
    Version, checksum, checksum_ok,
};
use bowline_wire::roce::cm::{REP_PRIVATE_LEN, REQ_PRIVATE_LEN};
use bowline_wire::roce::{CMA_HEADER_LEN, CmaHeader, service_id};
use proptest::prelude::*;
use proptest::{array, collection};

const V4_LEN: usize = 32;
const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const A6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1));
const B6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2));

/// Bytes of hexadecimal numbers, zeroes behind them.
fn hex<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [0; N];
    let words = text.split_whitespace().map(|word| u8::from_str_radix(word, 16).unwrap());
    assert!(words.clone().count() <= N);
    out.iter_mut().zip(words).for_each(|(to, byte)| *to = byte);
    out
}

/// `header` with the checksum that every frame over RDMA has.
fn summed(header: Header) -> Header {
    Header { csum: checksum(&header.to_bytes()), ..header }
}

/// Checks that `text` is `header`, checksum included, and is read back as it.
fn assert_frame(text: &str, header: Header) {
    let bytes: [u8; HEADER_LEN] = hex(text);
    let header = summed(header);
    assert_eq!(header.to_bytes(), bytes);
    assert_eq!(Header::parse(&bytes), Ok(header));
    assert!(header.csum != 0 && checksum_ok(&bytes));
    checks::header(&bytes);
}

/// A header of one message of the vectors.
fn message(sequence: u64, ack: u64, len: u32, sport: u16, dport: u16) -> Header {
    Header { sequence, ack, len, sport, dport, ..Header::default() }
}

// tests [IB-50] [IB-59]
#[test]
fn acknowledgements_have_neither_ports_nor_payload() {
    let ack = Header { ack: 5, ..Header::default() };
    assert_frame(
        "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 05 \
         00 00 00 00 00 00 00 00 00 00 00 00 00 00 ff fa",
        ack,
    );
    assert_frame(
        "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 05 \
         00 00 00 00 00 00 00 00 00 10 00 00 00 00 ff ea",
        Header { credit: 16, ..ack },
    );
}

// tests [IB-60]: the length is that of the whole map, and the flag stands alone
#[test]
fn both_frames_of_a_map_have_one_header() {
    let text = "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 \
                00 00 20 00 00 00 00 00 01 00 00 00 00 00 de ff";
    assert_frame(text, Header::map());
    assert_eq!(MAP_LEN, 2 * FRAGMENT_LEN);
    let late = summed(Header { ack: 0x0102_0304_0506_0708, ..Header::map() });
    assert!(late.is_map() && checksum_ok(&late.to_bytes()));
    assert!(!Header { flags: Flags::CONG_BITMAP.with(Flags::ACK_REQUIRED), ..late }.is_map());
}

// tests [IB-50]: the length is that of the message, not that of the frame
#[test]
fn both_frames_of_a_long_message_have_one_header() {
    let header = Header { flags: Flags::ACK_REQUIRED, ..message(1, 0, 5000, 4000, 4001) };
    assert_frame(
        "00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 00 \
         00 00 13 88 0f a0 0f a1 02 00 00 00 00 00 cb 35",
        header,
    );
}

// tests [IB-51]
#[test]
fn memory_is_handed_over_in_extension_3() {
    let dest = RdmaDest { rkey: 0x1122_3344, offset: 0x1f8 };
    let header = Header { ext: RdmaExt::Dest(dest).emit(), ..message(7, 3, 16, 4000, 4001) };
    assert_frame(
        "00 00 00 00 00 00 00 07 00 00 00 00 00 00 00 03 \
         00 00 00 10 0f a0 0f a1 00 00 00 00 00 00 7f 5e \
         03 11 22 33 44 00 00 01 f8 00 00 00 00 00 00 00",
        header,
    );
    assert_eq!(Extensions::new(&header.ext).collect::<Vec<_>>(), [Extension::RdmaDest(dest)]);
    assert_eq!(dest.cookie(), 0x0000_01f8_1122_3344);
}

// tests [IB-51]
#[test]
fn key_of_an_operation_is_in_extension_2() {
    let header = Header { ext: RdmaExt::Op(0x1122_3344).emit(), ..message(8, 4, 16, 4001, 4000) };
    assert_frame(
        "00 00 00 00 00 00 00 08 00 00 00 00 00 00 00 04 \
         00 00 00 10 0f a1 0f a0 00 00 00 00 00 00 78 5e \
         02 11 22 33 44 00 00 00 00 00 00 00 00 00 00 00",
        header,
    );
    assert_eq!(Extensions::new(&header.ext).collect::<Vec<_>>(), [Extension::Rdma(0x1122_3344)]);
}

// tests section 19.1: extension bytes of a kernel, of a buffer at offset 100 of a page
#[test]
fn extensions_observed_on_a_kernel() {
    let dest = RdmaDest { rkey: 0x300, offset: 0x64 };
    assert_eq!(RdmaExt::Dest(dest).emit(), hex("03 00 00 03 00 00 00 00 64 00"));
    assert_eq!(dest.cookie(), 0x0000_0064_0000_0300);
    assert_eq!(RdmaExt::Op(0x300).emit(), hex("02 00 00 03 00 00"));
}

// a probe's extensions are no RDMA extensions, nor the reverse
#[test]
fn rdma_extensions_are_no_handshake() {
    let dest = RdmaDest { rkey: 0x0500_0806, offset: 0x0500_0806 };
    for ext in [RdmaExt::Op(0x0500_0806), RdmaExt::Dest(dest)] {
        assert_eq!(Handshake::parse(&ext.emit()), Handshake::default());
    }
}

// tests [IB-10] [IB-11]
#[test]
fn service_ids_of_the_two_listeners() {
    assert_eq!(service_id(RDMA_PORT_V4).to_be_bytes(), hex("00 00 00 00 01 06 48 CA"));
    assert_eq!(service_id(RDMA_PORT_V6).to_be_bytes(), hex("00 00 00 00 01 06 40 01"));
}

// tests [IB-12] [IB-14] [IB-21]
#[test]
fn private_area_of_a_request() {
    let area: [u8; REQ_PRIVATE_LEN] = hex("00 40 c3 50 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 \
         0a 00 00 02 \
         0a 00 00 01 0a 00 00 02 03 01 00 03 00 00 00 00");
    let (cma, block) = area.split_first_chunk::<CMA_HEADER_LEN>().unwrap();
    let header = CmaHeader { source_port: 50000, source: A, destination: B };
    assert_eq!(CmaHeader::parse(cma), Ok(header));
    let data = ConnectData::new(A, B, Version::V3_1);
    assert_eq!(ConnectData::parse(block, false), Some(data));
    assert_eq!((data.minors, data.tos, data.ack, data.credit), (3, 0, 0, 0));

    assert_eq!(CMA_HEADER_LEN + CONNECT_LEN, REQ_PRIVATE_LEN);
    assert_eq!([&header.emit()[..], &data.to_bytes()].concat(), area);
}

// tests [IB-12] [IB-16]: the block begins the area, the responder's address begins the block
#[test]
fn private_area_of_a_reply() {
    let area: [u8; REP_PRIVATE_LEN] = hex("0a 00 00 02 0a 00 00 01 03 01 00 03");
    let data = ConnectData::parse(&area, false).unwrap();
    assert_eq!(data, ConnectData::new(B, A, Version::V3_1));
    assert_eq!(data.to_bytes(), area[..CONNECT_LEN]);
}

/// One value in every field of the common part.
fn full(source: IpAddr, destination: IpAddr) -> ConnectData {
    ConnectData {
        minors: 0x0102,
        tos: 0x28,
        ack: 0x1112_1314_1516_1718,
        credit: 0x2122_2324,
        ..ConnectData::new(source, destination, Version { major: 4, minor: 1 })
    }
}

const COMMON: &str = "04 01 01 02 28 00 00 00 11 12 13 14 15 16 17 18 21 22 23 24 00 00 00 00";

// tests [IB-14]: by distinct bytes the place of every field
#[test]
fn every_field_of_the_private_data_has_its_place() {
    let v4 = full(A, B);
    assert_eq!(v4.to_bytes(), hex(&format!("0a 00 00 01 0a 00 00 02 {COMMON}")));
    assert_eq!(ConnectData::parse(&v4.to_bytes(), false), Some(v4));

    let v6 = full(A6, B6);
    let zeroes = "00 ".repeat(13);
    let bytes = hex(&format!("fd 00 {zeroes} 01 fd 00 {zeroes} 02 {COMMON}"));
    assert_eq!(v6.to_bytes(), bytes);
    assert_eq!(ConnectData::parse(&bytes, true), Some(v6));
}

// tests [IB-15]: reserved bytes and padding are not looked at, and sent as zero
#[test]
fn reserved_bytes_are_ignored() {
    for (data, v6, common) in [(full(A, B), false, 8), (full(A6, B6), true, 32)] {
        let mut bytes = data.to_bytes();
        for at in [5, 6, 7, 20, 21, 22, 23] {
            bytes[common + at] = 0xff;
        }
        assert_eq!(ConnectData::parse(&bytes, v6), Some(data));
    }
}

// tests [IB-13] [IB-16]: more than the block is no error, less is one
#[test]
fn short_private_data_are_none() {
    for (data, v6, needed) in [(full(A, B), false, V4_LEN), (full(A6, B6), true, CONNECT_LEN)] {
        let bytes = [&data.to_bytes()[..], &[0xff; 140]].concat();
        assert_eq!(bytes.len(), REP_PRIVATE_LEN);
        for len in 0..bytes.len() {
            let read = ConnectData::parse(&bytes[..len], v6);
            assert_eq!(read, (len >= needed).then_some(data), "{len} bytes");
        }
    }
    // The block of the other family is nonsense, which a responder must not take [IB-13].
    let crossed = ConnectData::parse(&full(A, B).to_bytes(), true).unwrap();
    assert_eq!((crossed.version, crossed.negotiated()), (Version { major: 0, minor: 0 }, None));
}

/// What a responder makes of a proposal.
fn negotiated(major: u8, minor: u8, minors: u16) -> Option<(u8, u8)> {
    let data = ConnectData { minors, ..ConnectData::new(A, B, Version { major, minor }) };
    data.negotiated().map(|version| (version.major, version.minor))
}

// tests [IB-18] row 1: no private data; they are short, so that there is nothing to negotiate
#[test]
fn request_without_private_data_is_refused() {
    assert_eq!(ConnectData::parse(&[], false), None);
    assert_eq!(ConnectData::parse(&[], true), None);
}

// tests [IB-18] row 2, changed by [IB-19]: a kernel takes major 0 for 4.0
#[test]
fn request_with_major_0_is_refused() {
    for minor in 0..=u8::MAX {
        assert_eq!(negotiated(0, minor, 0), None);
        assert_eq!(negotiated(0, minor, u16::MAX), None);
    }
}

// tests [IB-18] row 3: the highest common bit counts, and the minor of the request does not
#[test]
fn major_4_agrees_on_the_highest_common_minor() {
    for minor in 0..=u8::MAX {
        for minors in 0..=u16::MAX {
            let expected = match minors & 3 {
                0 => None,
                1 => Some((4, 0)),
                _ => Some((4, 1)),
            };
            assert_eq!(negotiated(4, minor, minors), expected, "4.{minor} mask {minors:#x}");
        }
    }
}

// tests [IB-18] row 4
#[test]
fn version_3_1_is_taken_whatever_the_mask_says() {
    for minors in 0..=u16::MAX {
        assert_eq!(negotiated(3, 1, minors), Some((3, 1)));
    }
}

// tests [IB-18] row 5
#[test]
fn every_other_version_is_refused() {
    for major in 0..=u8::MAX {
        for minor in 0..=u8::MAX {
            if major != 4 && (major, minor) != (3, 1) {
                for minors in [0, 1, 2, 3, u16::MAX] {
                    assert_eq!(negotiated(major, minor, minors), None, "{major}.{minor}");
                }
            }
        }
    }
}

// tests [IB-20] [IB-21]: what an initiator may accept in a REP
#[test]
fn versions_are_in_order() {
    let accepted = [(3, 1), (4, 0), (4, 1)];
    assert!(accepted.iter().all(|&(major, minor)| Version { major, minor } >= Version::V3_1));
    for (major, minor) in [(0, 0), (0, 255), (3, 0), (2, 9)] {
        assert!(Version { major, minor } < Version::V3_1);
    }
}

fn v4() -> impl Strategy<Value = [IpAddr; 2]> {
    any::<[[u8; 4]; 2]>().prop_map(|pair| pair.map(IpAddr::from))
}

fn v6() -> impl Strategy<Value = [IpAddr; 2]> {
    any::<[[u8; 16]; 2]>().prop_map(|pair| pair.map(IpAddr::from))
}

fn connect_data() -> impl Strategy<Value = ConnectData> {
    let numbers = any::<(u8, u8, u16, u8, u64, u32, Option<(u8, u16)>)>();
    (prop_oneof![v4(), v6()], numbers).prop_map(
        |([source, destination], (major, minor, minors, tos, ack, credit, bowline))| ConnectData {
            source,
            destination,
            version: Version { major, minor },
            minors,
            tos,
            ack,
            credit,
            bowline: bowline
                .map(|(frame_kib, max_message)| BowlineConnect { frame_kib, max_message }),
        },
    )
}

proptest! {
    #[test]
    fn private_data_are_read_as_written(data in connect_data()) {
        let v6 = data.source.is_ipv6();
        prop_assert_eq!(ConnectData::parse(&data.to_bytes(), v6), Some(data));
    }

    #[test]
    fn any_private_data_are_written_as_read(bytes in array::uniform32(any::<u8>()),
                                            more in collection::vec(any::<u8>(), 0..164)) {
        let bytes = [&bytes[..], &more].concat();
        for (v6, len) in [(false, V4_LEN), (true, CONNECT_LEN)] {
            let read = ConnectData::parse(&bytes, v6);
            prop_assert_eq!(read.is_some(), bytes.len() >= len);
            let Some(data) = read else { continue };
            let mut canonical = [0; CONNECT_LEN];
            canonical[..len].copy_from_slice(&bytes[..len]);
            canonical[len - 19..len - 16].fill(0);
            // What bowline nodes say, and nothing else, is kept of the padding [IB-110].
            if canonical[len - 4] != 0x42 {
                canonical[len - 4..].fill(0);
            }
            prop_assert_eq!(data.to_bytes(), canonical);
            let agreed = data.negotiated();
            prop_assert!(agreed.is_none_or(|version| version >= Version::V3_1));
        }
    }

    #[test]
    fn rdma_extensions_are_read_as_written(rkey: u32, offset: u32) {
        let dest = RdmaDest { rkey, offset };
        for (ext, read) in [
            (RdmaExt::Op(rkey), Extension::Rdma(rkey)),
            (RdmaExt::Dest(dest), Extension::RdmaDest(dest)),
        ] {
            let area: [u8; EXT_AREA_LEN] = ext.emit();
            let mut walk = Extensions::new(&area);
            prop_assert_eq!(walk.next(), Some(read));
            prop_assert_eq!(walk.next(), None, "the only one");
            prop_assert!(walk.rest().iter().all(|byte| *byte == 0));
            checks::header(&summed(Header { ext: area, ..Header::default() }).to_bytes());
        }
        prop_assert_eq!(dest.cookie() as u32, rkey);
        prop_assert_eq!((dest.cookie() >> 32) as u32, offset);
    }
}

// tests [IB-110]
#[test]
fn frames_between_bowline_nodes_fill_their_memory_and_are_never_shorter_than_a_kernels() {
    let fragment = |frame_kib| BowlineConnect { frame_kib, max_message: 16 }.fragment();
    assert_eq!([0, 1, 4, 5, 16, 255].map(fragment), [4096, 4096, 4096, 5072, 16_336, 261_072]);
}
