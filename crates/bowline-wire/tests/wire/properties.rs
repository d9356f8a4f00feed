//! Properties of random values and bytes.

use crate::checks;

use std::collections::BTreeSet;

use bowline_wire::rds::{
    BowlineExt, EXT_AREA_LEN, Extension, Flags, HEADER_LEN, Handshake, Header, MAP_LEN, MapView,
    RdmaDest,
};
use proptest::prelude::*;
use proptest::{array, collection};

fn bowline_ext() -> impl Strategy<Value = BowlineExt> {
    (1..=15u8, 0..=15u8, any::<u32>()).prop_map(|(version, path, max_message)| BowlineExt {
        version,
        path,
        max_message,
    })
}

fn extension() -> impl Strategy<Value = Extension> {
    prop_oneof![
        any::<u32>().prop_map(Extension::Version),
        any::<u32>().prop_map(Extension::Rdma),
        any::<[u32; 2]>().prop_map(|[rkey, offset]| Extension::RdmaDest(RdmaDest { rkey, offset })),
        any::<(u32, u8)>().prop_map(|(bytes, direction)| Extension::RdmaBytes { bytes, direction }),
        any::<u16>().prop_map(Extension::NPaths),
        any::<u32>().prop_map(Extension::GenNum),
        any::<u8>().prop_map(Extension::SportIdx),
        bowline_ext().prop_map(Extension::Bowline),
    ]
}

/// As many of `list` as fit, and their bytes.
fn fit(list: Vec<Extension>) -> (Vec<Extension>, [u8; EXT_AREA_LEN]) {
    let mut area = [0; EXT_AREA_LEN];
    let (mut kept, mut at) = (Vec::new(), 0);
    for extension in list {
        let (bytes, padding) = checks::encode(extension);
        if let Some(free) = area.get_mut(at..at + bytes.len() + padding) {
            free[..bytes.len()].copy_from_slice(&bytes);
            at += free.len();
            kept.push(extension);
        }
    }
    (kept, area)
}

/// Areas with entries, cut and changed as by a hostile peer.
fn area() -> impl Strategy<Value = [u8; EXT_AREA_LEN]> {
    let entries = collection::vec(extension(), 0..6).prop_map(|list| fit(list).1);
    let stained = (entries, 0..EXT_AREA_LEN, 0..=20u8).prop_map(|(mut area, at, byte)| {
        area[at] = byte;
        area
    });
    prop_oneof![stained, array::uniform16(0..=9u8), any::<[u8; EXT_AREA_LEN]>()]
}

fn header() -> impl Strategy<Value = Header> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u32>());
    let port = || prop_oneof![0..=2u16, any::<u16>()];
    (numbers, port(), port(), 0..=u8::MAX, any::<(u8, u16)>(), area()).prop_map(
        |((sequence, ack, len), sport, dport, flags, (credit, csum), ext)| Header {
            sequence,
            ack,
            len,
            sport,
            dport,
            flags: Flags::from_bits(flags),
            credit,
            csum,
            ext,
        },
    )
}

proptest! {
    #[test]
    fn header_is_read_as_written(header in header()) {
        let bytes = header.to_bytes();
        prop_assert_eq!(Header::parse(&bytes), Ok(header));
        prop_assert_eq!(Header::from_bytes(&bytes), header);
        checks::header(&bytes);
    }

    #[test]
    fn any_bytes_hold_the_checks(bytes in collection::vec(any::<u8>(), 0..HEADER_LEN + 4)) {
        checks::header(&bytes);
    }

    #[test]
    fn any_header_sized_bytes_hold_the_checks(bytes in collection::vec(any::<u8>(), HEADER_LEN)) {
        checks::header(&bytes);
    }

    #[test]
    fn extensions_are_read_as_written(list in collection::vec(extension(), 0..6)) {
        let (kept, ext) = fit(list);
        let read: Vec<_> = bowline_wire::rds::Extensions::new(&ext).collect();
        prop_assert_eq!(read, kept);
    }

    // Every subset for every set of values.
    #[test]
    fn handshake_is_read_as_written(
        npaths: u16,
        generation: u32,
        bowline in bowline_ext(),
    ) {
        for subset in 0..16 {
            let part = |bit: u8| subset & bit != 0;
            let handshake = Handshake {
                npaths: part(1).then_some(npaths),
                generation: part(2).then_some(generation),
                sport_idx: part(4),
                bowline: part(8).then_some(bowline),
            };
            checks::handshake(&handshake);
            let used = 3 * usize::from(part(1)) + 5 * usize::from(part(2))
                + 2 * usize::from(part(4)) + 6 * usize::from(part(8));
            prop_assert!(handshake.emit()[used..].iter().all(|byte| *byte == 0));
        }
    }

    // tests
    #[test]
    fn map_bits_are_where_the_ports_say(ports in collection::btree_set(any::<u16>(), 0..40)) {
        let mut payload = vec![0; MAP_LEN];
        for port in &ports {
            payload[usize::from(*port / 8)] |= 1 << (port % 8);
        }
        let map = MapView::new(&payload).unwrap();
        prop_assert_eq!(&map.congested_ports().collect::<BTreeSet<_>>(), &ports);
        let by_words: BTreeSet<u16> = map
            .words()
            .enumerate()
            .flat_map(|(w, word)| (0..64).filter(move |k| word >> k & 1 == 1).map(move |k| (w, k)))
            .map(|(w, k)| u16::try_from(64 * w + k).unwrap())
            .collect();
        prop_assert_eq!(&by_words, &ports);
        prop_assert!(ports.iter().all(|port| map.is_congested(*port)));
    }
}
