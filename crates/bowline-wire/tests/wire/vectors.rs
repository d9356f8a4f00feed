//! The byte vectors written in the specification.

use crate::checks;

use bowline_wire::rds::{
    BowlineExt, DecodeError, EXT_AREA_LEN, Extension, Extensions, Flags, HEADER_LEN, Handshake,
    Header, MAP_LEN, MapView, PROBE_PATHS_MAX, PROBE_PORT, RdmaDest, checksum, checksum_ok,
};

/// Bytes of space-separated hexadecimal numbers; `00x8` stands for eight times `00`.
fn hex<const N: usize>(text: &str) -> [u8; N] {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        let (byte, times) = word.split_once('x').unwrap_or((word, "1"));
        let byte = u8::from_str_radix(byte, 16).unwrap();
        out.extend(std::iter::repeat_n(byte, times.parse().unwrap()));
    }
    out.try_into().expect("a vector of the right length")
}

fn area(text: &str) -> [u8; EXT_AREA_LEN] {
    let mut out = [0; EXT_AREA_LEN];
    for (to, word) in out.iter_mut().zip(text.split_whitespace()) {
        *to = u8::from_str_radix(word, 16).unwrap();
    }
    out
}

fn list(text: &str) -> Vec<Extension> {
    Extensions::new(&area(text)).collect()
}

fn assert_both_ways(bytes: [u8; HEADER_LEN], header: Header) {
    assert_eq!(Header::parse(&bytes), Ok(header));
    assert_eq!(header.to_bytes(), bytes);
    checks::header(&bytes);
}

// tests, and by distinct bytes everywhere the place of every field
#[test]
fn header_of_the_worked_checksum_example() {
    let bytes = hex("01 02 03 04 05 06 07 08 11 12 13 14 15 16 17 18 \
         00 00 10 00 0f a0 4e 20 06 05 00 00 00 00 4b 34 \
         03 de ad be ef 00 00 00 40 00 00 00 00 00 00 00");
    let header = Header {
        sequence: 0x0102_0304_0506_0708,
        ack: 0x1112_1314_1516_1718,
        len: 4096,
        sport: 4000,
        dport: 20000,
        flags: Flags::ACK_REQUIRED.with(Flags::RETRANSMITTED),
        credit: 5,
        csum: 0x4b34,
        ext: area("03 de ad be ef 00 00 00 40"),
    };
    assert_both_ways(bytes, header);
    assert_eq!(checksum(&bytes), 0x4b34);
    assert!(checksum_ok(&bytes));
    let dest = RdmaDest { rkey: 0xdead_beef, offset: 0x40 };
    assert_eq!(Extensions::new(&header.ext).collect::<Vec<_>>(), [Extension::RdmaDest(dest)]);
    assert_eq!(
        header.to_string(),
        "seq 72623859790382856 4000->20000 len 4096 flags ACK_REQUIRED|RETRANSMITTED \
         ack 1230066625199609624 credit 5 csum 0x4b34 ext rdma-dest 0xdeadbeef+0x40"
    );
}

// tests
#[test]
fn header_of_data() {
    let bytes = hex("00x7 07 00x8 00 00 00 40 27 10 4e 20 00x8 00x16");
    let header = Header { sequence: 7, len: 64, sport: 10000, dport: 20000, ..Header::default() };
    assert_both_ways(bytes, header);
    assert!(checksum_ok(&bytes), "0 is no checksum");
    assert_eq!(checksum(&bytes), 0x8a88);
    assert_eq!(header.to_string(), "seq 7 10000->20000 len 64 flags 0");

    let summed: [u8; HEADER_LEN] =
        hex("00x7 07 00x8 00 00 00 40 27 10 4e 20 00 00 00 00 00 00 8a 88 00x16");
    assert_both_ways(summed, Header { csum: 0x8a88, ..header });
    assert!(checksum_ok(&summed));
    let mut wrong = summed;
    wrong[31] = 0x89;
    assert!(!checksum_ok(&wrong));
}

// tests: 0xffff is the sum of nothing; 0 means no checksum even where it is the sum
#[test]
fn checksum_at_its_ends() {
    let zero = [0; HEADER_LEN];
    assert_eq!(checksum(&zero), 0xffff);
    assert!(checksum_ok(&zero));
    let mut ones = zero;
    ones[0..2].fill(0xff);
    assert_eq!(checksum(&ones), 0);
    assert!(checksum_ok(&ones));
    // 0x1ffff folds to 0x10000, and that to 1.
    let mut carries_twice = zero;
    carries_twice[0..6].copy_from_slice(&[0xff, 0xff, 0xff, 0xff, 0, 1]);
    assert_eq!(checksum(&carries_twice), 0xfffe);
    assert_eq!(checksum(&[0xff; HEADER_LEN]), 0, "23 words of 0xffff fold to 0xffff");
}

// tests
#[test]
fn headers_of_the_probe() {
    let ext = Handshake { npaths: Some(PROBE_PATHS_MAX), ..Handshake::default() }.emit();
    let ping = Header { sequence: 1, sport: PROBE_PORT, ext, ..Header::default() };
    assert_both_ways(hex("00x7 01 00x8 00 00 00 00 00 01 00 00 00x8 05 00 08 00x13"), ping);
    assert!(ping.is_probe_ping() && !ping.is_probe_pong() && !ping.is_map());
    assert_eq!(ping.to_string(), "seq 1 1->0 len 0 flags 0 probe-ping ext npaths 8");

    let pong = Header { sequence: 1, dport: PROBE_PORT, ext, ..Header::default() };
    assert_both_ways(hex("00x7 01 00x8 00 00 00 00 00 00 00 01 00x8 05 00 08 00x13"), pong);
    assert!(pong.is_probe_pong() && !pong.is_probe_ping() && !pong.is_map());
    assert_eq!(pong.to_string(), "seq 1 0->1 len 0 flags 0 probe-pong ext npaths 8");
}

/// Probes of Linux 7.2.12: numbers 14 and 69 of the lab's capture `rds-tcp-mprds-7.2`, and 77, all
/// with three extensions; and number 69's second message, the program's ping, which went out on
/// path 0 behind the probe.
// tests [R-344]
#[test]
fn probes_of_linux_7_2() {
    let ext = |generation| {
        let said = Handshake {
            npaths: Some(PROBE_PATHS_MAX),
            generation: Some(generation),
            sport_idx: true,
            bowline: None,
        };
        said.emit()
    };
    let ping = |generation| {
        let ext = ext(generation);
        Header { sequence: 1, sport: PROBE_PORT, ext, ..Header::default() }
    };
    let from_b = ping(0x9c5b_b55d);
    assert_both_ways(
        hex("00x7 01 00x8 00 00 00 00 00 01 00 00 00x8 05 00 08 06 9c 5b b5 5d 08 00 00x6"),
        from_b,
    );
    assert_eq!(
        from_b.to_string(),
        "seq 1 1->0 len 0 flags 0 probe-ping ext npaths 8, gen 0x9c5bb55d, sport-idx 0"
    );
    assert_both_ways(
        hex("00x7 01 00x8 00 00 00 00 00 01 00 00 00x8 05 00 08 06 2d c4 c9 ca 08 00 00x6"),
        ping(0x2dc4_c9ca),
    );
    let pong =
        Header { sequence: 2, dport: PROBE_PORT, ext: ext(0x9c5b_b55d), ..Header::default() };
    assert_both_ways(
        hex("00x7 02 00x8 00 00 00 00 00 00 00 01 00x8 05 00 08 06 9c 5b b5 5d 08 00 00x6"),
        pong,
    );
    let program_ping = Header { sequence: 2, sport: 45940, ..Header::default() };
    assert_both_ways(hex("00x7 02 00x8 00 00 00 00 b3 74 00 00 00x8 00x16"), program_ping);
}

/// Messages behind an RDMA write and an RDMA read of Linux 7.2.12: numbers 56 and 63 of the lab's
/// capture `rds-ib-rdma-7.2`.
// tests [IB-51] [IB-115]
#[test]
fn messages_behind_operations_of_linux_7_2() {
    for (bytes, rkey, direction) in [
        (
            hex("00x7 02 00x7 02 00 00 00 06 0f a0 8e 22 20 00 00x4 f1 0b \
                 02 00 00 03 00 04 00 00 4e 20 01 00 00 00 00 00"),
            0x300,
            1,
        ),
        (
            hex("00x7 03 00x7 03 00 00 00 06 0f a0 8e 22 20 00 00x4 ef 09 \
                 02 00 00 03 01 04 00 00 4e 20 02 00 00 00 00 00"),
            0x301,
            2,
        ),
    ] {
        let header = Header::parse(&bytes).expect("48 bytes");
        assert_eq!((header.sport, header.dport, header.len), (4000, 36386, 6));
        assert_eq!(header.flags.bits(), 0x20, "more than one extension");
        assert!(checksum_ok(&bytes));
        let bytes_moved = Extension::RdmaBytes { bytes: 20_000, direction };
        let all: Vec<_> = Extensions::new(&header.ext).collect();
        assert_eq!(all, [Extension::Rdma(rkey), bytes_moved]);
        assert_both_ways(bytes, header);
    }
}

// tests
#[test]
fn header_of_a_map() {
    assert_both_ways(hex("00x16 00 00 20 00 00 00 00 00 01 00x7 00x16"), Header::map());
    assert!(Header::map().is_map());
    assert_eq!(Header::map().to_string(), "seq 0 0->0 len 8192 flags CONG_BITMAP map");
    for bits in 0..=u8::MAX {
        let header = Header { flags: Flags::from_bits(bits), ..Header::map() };
        assert_eq!(header.is_map(), bits == 1, "flags {bits:#04x}");
    }
    let probe_like = Header { sport: PROBE_PORT, ..Header::map() };
    assert!(probe_like.is_map() && !probe_like.is_probe_ping());
}

#[test]
fn short_input_is_an_error_that_says_how_short() {
    let err = Header::parse(&[0; 47]).unwrap_err();
    assert_eq!(err, DecodeError::Short { needed: 48, got: 47 });
    assert_eq!(err.to_string(), "48 bytes needed, 47 there");
    assert_eq!(Header::parse(&[0; 49]), Ok(Header::default()), "what follows is not looked at");
}

// tests
#[test]
fn unknown_flags_are_kept_and_shown() {
    let shown = |bits| Flags::from_bits(bits).to_string();
    assert_eq!(shown(0), "0");
    assert_eq!(shown(0x05), "CONG_BITMAP|RETRANSMITTED");
    assert_eq!(shown(0x24), "RETRANSMITTED|0x20");
    assert_eq!(shown(0xf8), "0xf8");
    assert_eq!(Flags::from_bits(0xf8).bits(), 0xf8);
    assert_eq!(format!("{:?}", Flags::RETRANSMITTED), "Flags(0x04)");
}

// tests to, [R-117], test T-24: the pongs, as a kernel reads them and as this
// stricter reader does
#[test]
fn pongs_with_odd_extensions() {
    let cases = [
        // An unknown type below 16: a kernel skips its type byte alone, this node stops.
        ("07 05 00 02", Some(2), None, None),
        // Types of 16 and above end the list for both.
        ("10 05 00 08", None, None, None),
        // The second RDMA_DEST would cross the end of the area.
        ("03 00 00 00 00 00 00 00 00 03 05 00 08", None, None, None),
        ("06 00 00 00 00 05 00 02", Some(2), Some(2), Some(0)),
        ("05 ff ff", Some(65535), Some(65535), None),
        // Of two equal types the last counts.
        ("05 00 08 05 00 03", Some(3), Some(3), None),
    ];
    for (text, by_kernel, by_us, generation) in cases {
        assert_eq!(checks::kernel_walk(&area(text)).0, by_kernel, "{text}");
        let read = Handshake::parse(&area(text));
        assert_eq!((read.npaths, read.generation), (by_us, generation), "{text}");
    }
}

// tests: an entry may end where the area does, and not a byte later
#[test]
fn entries_at_the_end_of_the_area() {
    assert_eq!(
        list("08 00 08 00 08 00 08 00 08 00 08 00 08 00 08 07"),
        [[Extension::SportIdx(0); 7].as_slice(), &[Extension::SportIdx(7)]].concat()
    );
    let full = "06 00 00 00 01 06 00 00 00 02 06 00 00 00 03";
    assert_eq!(list(&format!("{full} 05")).len(), 3);
    assert_eq!(list(&format!("{full} 08")).len(), 3, "one byte short");
    let ends_with_npaths = list("06 00 00 00 01 06 00 00 00 02 05 00 03 05 00 04");
    assert_eq!(ends_with_npaths.last(), Some(&Extension::NPaths(4)));
}

// tests section 1.4 type by type
#[test]
fn every_type_is_read_and_shown() {
    let cases = [
        ("01 00 00 03 01", Extension::Version(0x0301), "version 3.1"),
        ("02 00 00 03 00", Extension::Rdma(0x300), "rdma 0x00000300"),
        (
            "04 00 00 4e 20 02 00 00 00",
            Extension::RdmaBytes { bytes: 20000, direction: 2 },
            "rdma-bytes 20000 read",
        ),
        ("05 00 08", Extension::NPaths(8), "npaths 8"),
        ("06 5e ed 00 01", Extension::GenNum(0x5eed_0001), "gen 0x5eed0001"),
        ("08 00", Extension::SportIdx(0), "sport-idx 0"),
        (
            "42 13 00 10 00 00",
            Extension::Bowline(BowlineExt { version: 1, path: 3, max_message: 1 << 20 }),
            "bowline v1 path 3 max 1048576",
        ),
    ];
    for (text, extension, shown) in cases {
        assert_eq!(list(text), [extension]);
        assert_eq!(extension.to_string(), shown);
    }
    for unknown in [7, 9, 10, 15, 16, 0x41, 0x43, 0xff] {
        assert_eq!(list(&format!("{unknown:02x} 05 00 08")), [], "type {unknown}");
    }
    let header = Header { ext: area("05 00 02 07 05 00 08"), ..Header::default() };
    assert_eq!(
        header.to_string(),
        "seq 0 0->0 len 0 flags 0 ext npaths 2, ? 07050008",
        "what is not understood is shown, not hidden"
    );
}

// tests, section 4.6: the order, and that all of it is exactly 16 bytes
#[test]
fn handshake_in_full() {
    let mut handshake = Handshake {
        npaths: Some(8),
        generation: Some(0xdead_beef),
        sport_idx: true,
        bowline: Some(BowlineExt { version: 1, path: 2, max_message: 0x0010_0000 }),
    };
    let full = area("05 00 08 06 de ad be ef 08 00 42 12 00 10 00 00");
    assert_eq!(handshake.emit(), full);
    assert_eq!(Extensions::new(&full).count(), 4);
    assert_eq!(Handshake::parse(&full), handshake);

    handshake.bowline = None;
    let later_mainline = area("05 00 08 06 de ad be ef 08 00");
    assert_eq!(handshake.emit(), later_mainline);
}

// tests section 4.6: what other senders put into a probe
#[test]
fn handshakes_of_other_senders() {
    let oracle = Handshake::parse(&area("05 00 08 08 00"));
    let expected = Handshake { npaths: Some(8), sport_idx: true, ..Handshake::default() };
    assert_eq!(oracle, expected);
    assert_eq!(Handshake::parse(&area("")), Handshake::default());
    let with_capabilities = Handshake::parse(&area("05 00 08 08 00 07 00 00 00 01"));
    assert_eq!(with_capabilities, expected);
}

// tests: port 5000 is bit 0 of byte 625
#[test]
fn map_bit_of_port_5000() {
    let mut payload = vec![0; MAP_LEN];
    payload[625] = 1;
    let map = MapView::new(&payload).unwrap();
    assert!(map.is_congested(5000) && !map.is_congested(4999) && !map.is_congested(5001));
    assert_eq!(map.congested_ports().collect::<Vec<_>>(), [5000]);
    assert_eq!(map.words().position(|word| word == 1 << (5000 % 64)), Some(5000 / 64));
    assert_eq!(map.to_string(), "1 port congested: 5000");

    payload[1] = 0x7f;
    let map = MapView::new(&payload).unwrap();
    assert_eq!(map.to_string(), "8 ports congested: 8 9 10 11 12 13 14 5000");

    payload.fill(0xff);
    let map = MapView::new(&payload).unwrap();
    assert_eq!(map.to_string(), "65536 ports congested: 0 1 2 3 4 5 6 7 ...");
    assert!(map.is_congested(0) && map.is_congested(u16::MAX));
}

// tests
#[test]
fn map_of_another_length_is_none() {
    for len in [0, 100, MAP_LEN - 1, MAP_LEN + 1] {
        assert!(MapView::new(&vec![0; len]).is_none(), "{len}");
    }
}
