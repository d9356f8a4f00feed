//! RoCE headers, packets and checksums: the vectors of the specification, datagrams of real
//! kernels, random values and hostile bytes.

use crate::roce_checks as checks;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bowline_wire::roce::{
    Aeth, AtomicAckEth, AtomicEth, BTH_LEN, Bth, Deth, IcrcChecker, IcrcError, IcrcHeads,
    IcrcMatch, IcrcPolicy, MAX_HEADER_LEN, NakCode, Opcode, Outer, Packet, PacketError,
    PayloadRule, Psn, Reth, Service, Syndrome, UDP_PORT, pad, rnr_timer_ns, split_icrc,
};
use proptest::collection;
use proptest::prelude::*;

/// A datagram from the IP header to the ICRC.
struct Datagram {
    name: String,
    bytes: Vec<u8>,
}

impl Datagram {
    /// Offset of the UDP header.
    fn udp(&self) -> usize {
        if self.bytes[0] >> 4 == 4 { 20 } else { 40 }
    }

    /// Parses the headers, as a receiver that sees all of them could.
    fn take(&self) -> (Outer, u16, &[u8], u32) {
        let (b, udp) = (&self.bytes, self.udp());
        let word = |at: usize| u16::from_be_bytes([b[at], b[at + 1]]);
        assert_eq!(word(udp + 2), UDP_PORT, "tests [OUT-1]");
        assert_eq!(usize::from(word(udp + 4)), b.len() - udp, "tests [OUT-9]");
        let (from, to, ident) = if udp == 20 {
            let address = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&b[at..at + 4]).unwrap());
            assert_eq!((b[0], word(6), b[9]), (0x45, 0x4000, 17), "tests [OUT-5]");
            (address(12), address(16), word(4))
        } else {
            let address = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&b[at..at + 16]).unwrap());
            (address(8), address(24), 0)
        };
        let (packet, icrc) = split_icrc(&b[udp + 8..]).unwrap();
        (Outer { from, to, source_port: word(udp) }, ident, packet, icrc)
    }

    /// A mask for each byte before the ICRC: the bits that may change on the way [ICRC-3].
    fn masked(&self) -> Vec<u8> {
        let udp = self.udp();
        let mut mask = vec![0; self.bytes.len() - 4];
        let ip: &[usize] = if udp == 20 { &[1, 8, 10, 11] } else { &[1, 2, 3, 7] };
        for at in ip.iter().copied().chain([udp + 6, udp + 7, udp + 8 + 4]) {
            mask[at] = 0xff;
        }
        if udp == 40 {
            mask[0] = 0x0f;
        }
        mask
    }

    /// The ICRC by the letter of ICRC-1 to ICRC-4, bit by bit.
    fn reference(&self, masked: &[u8]) -> u32 {
        let covered = self.bytes.iter().zip(masked).map(|(byte, mask)| byte | mask);
        let mut register = u32::MAX;
        for byte in [0xff; 8].into_iter().chain(covered) {
            register ^= u32::from(byte);
            for _ in 0..8 {
                let low = register & 1;
                register = (register >> 1) ^ (low * 0xedb8_8320);
            }
        }
        !register
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits.map(|d| u8::from_str_radix(str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

/// The vectors of section 11.
fn vectors() -> Vec<Datagram> {
    let mut out: Vec<Datagram> = Vec::new();
    for line in include_str!("../../testdata/roce-vectors.txt").lines() {
        if line.starts_with(['#', ' ']) {
            let Some(datagram) = out.last_mut() else { continue };
            let mut fields = line.trim_matches([' ', '[', ']']).split(' ').map(str::trim);
            match (fields.next(), fields.next_back()) {
                (Some("outer" | "ib" | "icrc"), Some(digits)) => {
                    datagram.bytes.extend(hex(digits));
                }
                (Some(digits), None) => datagram.bytes.extend(hex(digits)),
                (Some(times), Some("00")) => {
                    let len = datagram.bytes.len() + times.parse::<usize>().unwrap();
                    datagram.bytes.resize(len, 0);
                }
                _ => panic!("{line}"),
            }
        } else if let Some(name) = line.split(' ').next() {
            out.push(Datagram { name: name.to_owned(), bytes: Vec::new() });
        }
    }
    out
}

fn vector(name: &str) -> Datagram {
    vectors().into_iter().find(|datagram| datagram.name == name).unwrap()
}

/// Datagrams of real kernels.
fn frames() -> Vec<Datagram> {
    let lines = include_str!("../../testdata/roce-frames.hex").lines().enumerate();
    let frames = lines.filter(|(_, line)| !line.starts_with('#'));
    frames.map(|(n, l)| Datagram { name: format!("line {}", n + 1), bytes: hex(l) }).collect()
}

/// Checks that a datagram is read and that its ICRC is the right one.
fn assert_good(datagram: &Datagram) {
    let name = &datagram.name;
    let (outer, ident, packet, icrc) = datagram.take();
    assert_eq!(datagram.reference(&datagram.masked()), icrc, "{name}");
    assert_eq!(outer.icrc(ident, packet), icrc, "{name}");
    let mut sent = packet.to_vec();
    outer.append_icrc(ident, &mut sent, 0);
    assert!(datagram.bytes.ends_with(&sent), "tests [ICRC-5]: {name}");

    let read = Packet::parse(packet).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(read.opcode.payload_rule().allows(read.payload.len(), 1024), "{name}");
    checks::packet(packet);
    checks::icrc(outer.from, outer.to, outer.source_port, ident, packet);
}

// tests [ICRC-1] [ICRC-2] [ICRC-3] [ICRC-4] [ICRC-5] [HDR-4]
#[test]
fn vectors_are_right_and_every_bit_counts() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 15 + 4);
    for datagram in vectors {
        let name = &datagram.name;
        assert_good(&datagram);
        let (outer, ident, packet, icrc) = datagram.take();
        let udp = datagram.udp();
        for (at, mask) in datagram.masked().into_iter().enumerate() {
            for bit in 0..8 {
                let masked = mask >> bit & 1 != 0;
                let mut changed = Datagram { name: name.clone(), bytes: datagram.bytes.clone() };
                changed.bytes[at] ^= 1 << bit;
                let same = changed.reference(&datagram.masked()) == icrc;
                assert_eq!(same, masked, "{name} byte {at} bit {bit}");
                // The same for this crate's ICRC, where the field is an input of it. It derives the
                // others: lengths, protocol, destination port and the rest of the IP header.
                let address = if udp == 20 { 12..20 } else { 8..40 };
                let taken = masked
                    || address.contains(&at)
                    || (udp..udp + 2).contains(&at)
                    || at >= udp + 8
                    || udp == 20 && (4..6).contains(&at);
                if taken {
                    let (other, number, bytes, _) = changed.take();
                    assert_eq!(other.icrc(number, bytes) == icrc, masked, "{name} {at}.{bit}");
                }
            }
        }
        assert_eq!(outer.icrc(ident ^ 0xffff, packet) == icrc, udp == 40, "{name}");
    }
}

// tests [ICRC-31]
#[test]
fn solver_finds_identifications_and_rejects_damage() {
    let mut checker = IcrcChecker::new(IcrcPolicy::Solve);
    for (name, ident) in [("V1", 0x853e), ("V2", 0x526a), ("V3", 0x853f)] {
        let datagram = vector(name);
        let (outer, _, packet, icrc) = datagram.take();
        let found = checker.check(&outer, packet, icrc, &[]);
        // V3 comes after V1, from the same source.
        let expected =
            if name == "V3" { IcrcMatch::Exact(ident) } else { IcrcMatch::Solved(ident) };
        assert_eq!(found, Ok(expected), "{name}");
        for bit in (0..packet.len() * 8).filter(|bit| bit / 8 != 4) {
            let mut damaged = packet.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let refused = Err(IcrcError::Mismatch);
            assert_eq!(checker.check(&outer, &damaged, icrc, &[]), refused, "{name} bit {bit}");
        }
    }
}

#[test]
fn a_packet_in_two_parts_is_checked_like_a_whole_one() {
    for name in ["V1", "V2", "V3"] {
        let datagram = vector(name);
        let (outer, _, packet, icrc) = datagram.take();
        let whole = IcrcChecker::new(IcrcPolicy::Solve).check(&outer, packet, icrc, &[]);
        assert!(whole.is_ok());
        for cut in 12..=packet.len() {
            let (start, rest) = packet.split_at(cut);
            let mut checker = IcrcChecker::new(IcrcPolicy::Solve);
            let sum = |crc| bowline_crc::update(crc, rest);
            let found = checker.check_parts(&outer, start, (rest.len(), sum), icrc, &[]);
            assert_eq!(found, whole, "{name} cut at {cut}");
            assert_eq!(checker.take_summed(), packet.len() as u64);
            let none = checker.check_parts(&outer, start, (rest.len(), |crc| !crc), icrc, &[]);
            assert_eq!(none, Err(IcrcError::Mismatch));
        }
    }
}

// tests [ICRC-31]: about one in 65536 of the damaged packets passes, not more
#[test]
fn solver_lets_little_damage_through() {
    let datagram = vector("V2");
    let (outer, _, packet, icrc) = datagram.take();
    let mut checker = IcrcChecker::new(IcrcPolicy::Solve);
    let passed = |n: &u32| checker.check(&outer, packet, icrc ^ n, &[]).is_ok();
    // A factor that is odd takes the numbers through all 32-bit ones.
    let passed = (1..=655_360_u32).map(|n| n.wrapping_mul(0x9e37_79b1)).filter(passed).count();
    assert!((1..=30).contains(&passed), "{passed} of 10 x 65536");
}

// tests [ICRC-32] [ICRC-33] [ICRC-34]
#[test]
fn strict_wants_an_expected_identification() {
    let datagram = vector("V2");
    let (outer, _, packet, _) = datagram.take();
    let mut checker = IcrcChecker::new(IcrcPolicy::Strict);
    let mut check =
        |ident, likely: &[u16]| checker.check(&outer, packet, outer.icrc(ident, packet), likely);
    assert_eq!(check(0, &[]), Ok(IcrcMatch::Exact(0)));
    // Identifications of a segmented burst count from 0 [ICRC-12].
    assert_eq!(check(1, &[]), Ok(IcrcMatch::Exact(1)));
    assert_eq!(check(2, &[]), Ok(IcrcMatch::Exact(2)));
    assert_eq!(check(0xfffe, &[]), Err(IcrcError::Unexpected(0xfffe)));
    // A kernel's counter jumps, then counts.
    assert_eq!(check(0xffff, &[]), Ok(IcrcMatch::Exact(0xffff)));
    assert_eq!(check(0, &[]), Ok(IcrcMatch::Exact(0)));
    assert_eq!(check(9, &[7, 8]), Err(IcrcError::Unexpected(9)));
    assert_eq!(check(8, &[7, 8]), Ok(IcrcMatch::Exact(8)));

    // The first identification of a source is never expected. Found by the fuzz target.
    let nobody = Outer { from: IpAddr::from([0; 4]), ..outer };
    let icrc = nobody.icrc(1, packet);
    assert_eq!(checker.check(&nobody, packet, icrc, &[]), Err(IcrcError::Unexpected(1)));

    // Another source has a count of its own.
    let other = Outer { from: IpAddr::from([10, 77, 0, 9]), ..outer };
    let icrc = other.icrc(9, packet);
    assert_eq!(checker.check(&other, packet, icrc, &[]), Err(IcrcError::Unexpected(9)));
}

// tests [ICRC-30]
#[test]
fn ipv6_is_checked_in_full() {
    let datagram = vector("V4");
    let (outer, _, packet, icrc) = datagram.take();
    let mut checker = IcrcChecker::new(IcrcPolicy::Solve);
    assert_eq!(checker.check(&outer, packet, icrc, &[]), Ok(IcrcMatch::Exact(0)));
    for bit in 0..32 {
        let wrong = icrc ^ 1 << bit;
        assert_eq!(checker.check(&outer, packet, wrong, &[]), Err(IcrcError::Mismatch));
    }
}

/// An IPv6 socket may show IPv4-mapped peers; the packets are IPv4.
#[test]
fn mapped_addresses_count_as_ipv4() {
    let datagram = vector("V1");
    let (outer, ident, packet, icrc) = datagram.take();
    let mapped = |address| match address {
        IpAddr::V4(v4) => IpAddr::V6(Ipv4Addr::to_ipv6_mapped(&v4)),
        v6 => v6,
    };
    let outer = Outer { from: mapped(outer.from), to: mapped(outer.to), ..outer };
    assert_eq!(outer.icrc(ident, packet), icrc);
}

// tests [ICRC-31]: every length has its own factor, places are shared
#[test]
fn solver_knows_every_length() {
    let mut checker = IcrcChecker::new(IcrcPolicy::Solve);
    let outer = Outer {
        from: IpAddr::from([192, 0, 2, 1]),
        to: IpAddr::from([192, 0, 2, 2]),
        source_port: 0xd66b,
    };
    let bytes: Vec<u8> = (0..65_472_u32).map(|i| (i * 7) as u8).collect();
    for len in (BTH_LEN..700).chain((700..bytes.len()).step_by(997)).chain([4112, 65_472]) {
        let ident = (len as u16).wrapping_mul(251) | 2;
        let icrc = outer.icrc(ident, &bytes[..len]);
        for _ in 0..2 {
            let found = checker.check(&outer, &bytes[..len], icrc, &[]);
            assert_eq!(found, Ok(IcrcMatch::Solved(ident)), "{len}");
        }
    }
}

// tests [HDR-1] [HDR-2] [HDR-3] [ICRC-1] [ICRC-6]
#[test]
fn datagrams_of_kernels_are_read_and_right() {
    let frames = frames();
    assert!(frames.len() >= 150);
    let mut opcodes: Vec<u8> = Vec::new();
    for datagram in &frames {
        assert_good(datagram);
        let (_, _, packet, _) = datagram.take();
        opcodes.push(packet[0]);
    }
    opcodes.sort_unstable();
    opcodes.dedup();
    let expected =
        [0, 1, 2, 4, 5, 6, 7, 8, 9, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x11, 0x17, 0x64];
    assert_eq!(opcodes, expected);
}

// tests [HDR-1] [HDR-2] [REQ-10]: the fields of recorded packets
#[test]
fn fields_of_the_vectors() {
    let line = |name: &str| {
        let datagram = vector(name);
        let (_, _, packet, _) = datagram.take();
        Packet::parse(packet).unwrap().to_string()
    };
    assert_eq!(line("V1"), "acknowledge qp 0x11 psn 0xb298ce Ack(31) msn 1");
    assert_eq!(line("V2"), "send-only qp 0x11 psn 0xb298ce ack-req len 16");
    assert_eq!(
        line("V3"),
        "read-request qp 0x11 psn 0x715ee4 ack-req va 0x55e3bff1e480 rkey 0x667 of 3001"
    );
    assert_eq!(
        line("V5"),
        "ud-send-only qp 0x1 psn 0x000000 ack-req from qp 0x1 qkey 0x80010000 len 256"
    );
    assert_eq!(line("V12"), "acknowledge qp 0x828724 psn 0xda47bf Nak(PsnSequence) msn 0");
    assert_eq!(line("V13"), "acknowledge qp 0x828724 psn 0xda47c3 Rnr(0) msn 4");
    assert_eq!(line("V14"), "acknowledge qp 0x91f25f psn 0xcf5f31 Nak(RemoteAccess) msn 0");
    assert_eq!(line("V15"), "read-response-only qp 0x2f27a4 psn 0x43bfa5 Ack(31) msn 2");
    assert_eq!(line("S2"), "send-only qp 0x123 psn 0x000043 solicited ack-req len 5");
}

/// The table of HDR-5: number, headers, payload, flags.
const OPCODES: &str = "
    0x00 - MTU S recv
    0x01 - MTU
    0x02 - 1..MTU E cqe
    0x03 ImmDt 1..MTU E cqe
    0x04 - 0..MTU S E recv cqe
    0x05 ImmDt 0..MTU S E recv cqe
    0x06 RETH MTU S
    0x07 - MTU
    0x08 - 1..MTU E
    0x09 ImmDt 1..MTU E recv cqe
    0x0A RETH 0..MTU S E
    0x0B RETH,ImmDt 0..MTU S E recv cqe
    0x0C RETH none S E
    0x0D AETH MTU S response
    0x0E - MTU response
    0x0F AETH 1..MTU E response
    0x10 AETH 0..MTU S E response
    0x11 AETH none S E response
    0x12 AETH,AtomicAckETH none S E response
    0x13 AtomicETH none S E
    0x14 AtomicETH none S E
    0x16 IETH 1..MTU E cqe
    0x17 IETH 0..MTU S E recv cqe
    0x1C FETH,RETH none S E
    0x1D RETH 8 S E
    0x20 - MTU S recv
    0x21 - MTU
    0x22 - 1..MTU E cqe
    0x23 ImmDt 1..MTU E cqe
    0x24 - 0..MTU S E recv cqe
    0x25 ImmDt 0..MTU S E recv cqe
    0x26 RETH MTU S
    0x27 - MTU
    0x28 - 1..MTU E
    0x29 ImmDt 1..MTU E recv cqe
    0x2A RETH 0..MTU S E
    0x2B RETH,ImmDt 0..MTU S E recv cqe
    0x64 DETH 0..MTU S E recv cqe
    0x65 DETH,ImmDt 0..MTU S E recv cqe
    0x81 reserved none S E
";

// tests [HDR-5] [HDR-6] [HDR-10] [HDR-11] [HDR-14]
#[test]
fn opcodes_are_those_of_the_table() {
    let mut seen = Vec::new();
    for row in OPCODES.trim().lines() {
        let fields: Vec<&str> = row.split_whitespace().collect();
        let [number, headers, payload, flags @ ..] = &fields[..] else { panic!("{row}") };
        let number = u8::from_str_radix(&number[2..], 16).unwrap();
        let opcode = Opcode::from_u8(number).unwrap();
        assert_eq!(opcode.to_u8(), number);
        seen.push(opcode);

        let headers: Vec<&str> = headers.split(',').filter(|name| *name != "-").collect();
        let sizes = headers.iter().map(|name| match *name {
            "RETH" | "reserved" => 16,
            "AtomicETH" => 28,
            "AtomicAckETH" | "DETH" => 8,
            "AETH" | "ImmDt" | "IETH" | "FETH" => 4,
            _ => panic!("{row}"),
        });
        assert_eq!(opcode.header_len(), sizes.sum(), "{row}");
        assert!(BTH_LEN + opcode.header_len() <= MAX_HEADER_LEN, "{row}");
        let has = |name| headers.contains(&name);
        assert_eq!(
            [
                opcode.has_reth(),
                opcode.has_aeth(),
                opcode.has_imm(),
                opcode.has_ieth(),
                opcode.has_atomic(),
                opcode.has_atomic_ack(),
                opcode.has_deth(),
                opcode.has_feth(),
            ],
            [
                has("RETH"),
                has("AETH"),
                has("ImmDt"),
                has("IETH"),
                has("AtomicETH"),
                has("AtomicAckETH"),
                has("DETH"),
                has("FETH"),
            ],
            "{row}"
        );

        let is = |flag| flags.contains(&flag);
        assert_eq!(opcode.starts(), is("S"), "{row}");
        assert_eq!(opcode.ends(), is("E"), "{row}");
        assert_eq!(opcode.takes_receive(), is("recv"), "{row}");
        assert_eq!(opcode.completes_receive(), is("cqe"), "{row}");
        assert_eq!(opcode.is_response(), is("response"), "{row}");
        assert_eq!(opcode.is_request(), !is("response") && opcode != Opcode::Cnp, "{row}");
        let positions = [opcode.is_first(), opcode.is_middle(), opcode.is_last()];
        let position = match (is("S"), is("E")) {
            (true, true) => [false; 3],
            (true, false) => [true, false, false],
            (false, false) => [false, true, false],
            (false, true) => [false, false, true],
        };
        assert_eq!(positions, position, "{row}");

        let rule = match *payload {
            "MTU" => PayloadRule::Full,
            "1..MTU" => PayloadRule::Rest,
            "0..MTU" => PayloadRule::UpToMtu,
            "none" => PayloadRule::Nothing,
            "8" => PayloadRule::Eight,
            _ => panic!("{row}"),
        };
        assert_eq!(opcode.payload_rule(), rule, "{row}");
        let service = match number >> 5 {
            0 => Service::Rc,
            1 => Service::Uc,
            3 => Service::Ud,
            _ => Service::Congestion,
        };
        assert_eq!(opcode.service(), service, "{row}");

        // The name of an opcode says what it is.
        let name = opcode.to_string();
        let (is_uc, rest) = match name.strip_prefix("uc-") {
            Some(rest) => (true, rest),
            None => (false, name.as_str()),
        };
        assert_eq!(is_uc, service == Service::Uc, "{name}");
        assert_eq!(opcode.over_uc().is_some_and(|over| over == opcode), is_uc, "{name}");
        let words: Vec<&str> = rest.split('-').collect();
        let says = |word| words.contains(&word);
        assert_eq!(opcode.is_send(), words[0] == "send", "{name}");
        assert_eq!(opcode.is_write(), words[0] == "write", "{name}");
        assert_eq!(opcode.is_read_response(), name.starts_with("read-response"), "{name}");
        assert_eq!(opcode.is_atomic(), says("swap") || says("add"), "{name}");
        assert_eq!(opcode.has_imm(), says("imm"), "{name}");
        assert_eq!(opcode.has_ieth(), says("inv"), "{name}");
        assert_eq!(positions, [says("first"), says("middle"), says("last")], "{name}");
    }
    assert_eq!(seen, Opcode::ALL);
    let known = (0..=u8::MAX).filter_map(Opcode::from_u8);
    assert_eq!(known.collect::<Vec<_>>(), Opcode::ALL);
}

// tests [HDR-11]
#[test]
fn payload_rules() {
    let allowed = |rule: PayloadRule| {
        [0, 1, 7, 8, 255, 256, 257].into_iter().filter(move |len| rule.allows(*len, 256))
    };
    assert!(allowed(PayloadRule::Nothing).eq([0]));
    assert!(allowed(PayloadRule::Full).eq([256]));
    assert!(allowed(PayloadRule::Rest).eq([1, 7, 8, 255, 256]));
    assert!(allowed(PayloadRule::UpToMtu).eq([0, 1, 7, 8, 255, 256]));
    assert!(allowed(PayloadRule::Eight).eq([8]));
    assert_eq!([0, 1, 2, 3, 4, 5, 4096].map(pad), [0, 3, 2, 1, 0, 3, 0], "tests [HDR-3]");
}

// tests [REQ-10]
#[test]
fn syndromes() {
    for byte in 0..=u8::MAX {
        let syndrome = Syndrome::from_u8(byte);
        assert_eq!(syndrome.to_u8(), byte);
        let expected = match byte {
            0..=0x1f => Syndrome::Ack(byte),
            0x20..=0x3f => Syndrome::Rnr(byte - 0x20),
            0x60 => Syndrome::Nak(NakCode::PsnSequence),
            0x61 => Syndrome::Nak(NakCode::InvalidRequest),
            0x62 => Syndrome::Nak(NakCode::RemoteAccess),
            0x63 => Syndrome::Nak(NakCode::RemoteOperational),
            0x64 => Syndrome::Nak(NakCode::InvalidRdRequest),
            0x65..=0x7f => Syndrome::Nak(NakCode::Other(byte - 0x60)),
            _ => Syndrome::Reserved(byte),
        };
        assert_eq!(syndrome, expected);
    }
    assert_eq!(Syndrome::ACK.to_u8(), 0x1f);
}

// tests [RSP-13]
#[test]
fn rnr_timers() {
    let rows = [
        [655_360, 160, 2560, 40_960],
        [10, 240, 3840, 61_440],
        [20, 320, 5120, 81_920],
        [30, 480, 7680, 122_880],
        [40, 640, 10_240, 163_840],
        [60, 960, 15_360, 245_760],
        [80, 1280, 20_480, 327_680],
        [120, 1920, 30_720, 491_520],
    ];
    for code in 0..32_u8 {
        let microseconds = rows[usize::from(code % 8)][usize::from(code / 8)];
        assert_eq!(rnr_timer_ns(code), microseconds * 1000, "{code}");
        assert_eq!(rnr_timer_ns(code | 0xe0), rnr_timer_ns(code), "five bits count");
    }
}

#[test]
fn sequence_numbers_wrap() {
    let [last, zero, one] = [0xff_ffff, 0, 1].map(Psn::new);
    assert_eq!((Psn::MAX, Psn::ZERO), (last, zero));
    assert_eq!((last.next(), zero.previous(), last + 2, one - 2), (zero, last, one, last));
    assert_eq!((one.since(last), last.since(one)), (2, 0xff_fffe));
    assert_eq!((one.diff(last), last.diff(one)), (2, -2));
    assert!(one.is_after(last) && last.is_before(one));
    assert!(!last.is_after(one) && !one.is_before(last));
    assert!(zero.is_within(last, 2) && last.is_within(last, 1) && !one.is_within(last, 2));
    assert!(!last.is_within(last, 0));
    assert_eq!(Psn::new(0x1234_5678).get(), 0x34_5678);
    assert_eq!(format!("{one} {last:?}"), "0x000001 Psn(0xffffff)");

    // Half a turn away counts as earlier, seen from either side.
    let far = Psn::new(0x80_0000);
    assert_eq!((far.diff(zero), zero.diff(far)), (-0x80_0000, -0x80_0000));
    assert!((zero + 0x7f_ffff).is_after(zero));
}

// tests [RX-3] [RX-4] [HDR-3]
#[test]
fn what_is_refused() {
    let bth = Bth { dest_qpn: 5, ..Bth::default() };
    let bytes = |opcode, payload| {
        let mut out = Vec::new();
        Packet { payload, ..Packet::new(opcode, bth) }.emit(&mut out);
        out
    };
    let good = bytes(Opcode::SendOnly, b"12345");
    assert_eq!(Packet::parse(&good).unwrap().payload, b"12345");
    let change = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    let refused = |bytes: &[u8]| Packet::parse(bytes).unwrap_err();
    assert_eq!(refused(&[]), PacketError::Short { needed: 12, got: 0 });
    assert_eq!(refused(&good[..11]), PacketError::Short { needed: 12, got: 11 });
    assert_eq!(refused(&good[..13]), PacketError::Short { needed: 15, got: 13 });
    assert_eq!(refused(&change(0, 0x15)), PacketError::UnknownOpcode(0x15));
    assert_eq!(refused(&change(0, 0x2c)), PacketError::UnknownOpcode(0x2c));
    assert_eq!(refused(&change(0, 0x14)), PacketError::Short { needed: 43, got: 20 });
    assert_eq!(refused(&change(1, 0x31)), PacketError::Version(1));
    assert_eq!(refused(&change(7, 0)), PacketError::NoQueuePair);
    assert_eq!(refused(&good[..19]), PacketError::Pad);
    let read = bytes(Opcode::ReadRequest, b"1234");
    assert_eq!(refused(&read), PacketError::Payload { opcode: Opcode::ReadRequest, got: 4 });
    // Only padding, which is no payload either.
    let mut ack = bytes(Opcode::Acknowledge, b"");
    ack[1] |= 0x10;
    assert_eq!(refused(&ack), PacketError::Short { needed: 17, got: 16 });
    for bytes in [&good, &read, &ack, &change(4, 0xff)] {
        (0..=bytes.len()).for_each(|len| checks::packet(&bytes[..len]));
    }
}

fn bth() -> impl Strategy<Value = Bth> {
    (any::<[bool; 4]>(), any::<u16>(), 1..1_u32 << 24, any::<u32>()).prop_map(
        |([solicited, fecn, becn, ack_req], pkey, dest_qpn, psn)| Bth {
            solicited,
            pkey,
            fecn,
            becn,
            dest_qpn,
            ack_req,
            psn: Psn::new(psn),
        },
    )
}

/// Makes a packet with the headers of its opcode, filled from the numbers.
fn with_headers<'a>(opcode: Opcode, bth: Bth, n: [u64; 3], payload: &'a [u8]) -> Packet<'a> {
    let [a, b, c] = n;
    let (low, high) = (a as u32, (a >> 32) as u32);
    Packet {
        opcode,
        bth,
        deth: opcode.has_deth().then_some(Deth { qkey: low, source_qpn: high >> 8 }),
        feth: opcode.has_feth().then_some(high),
        reth: opcode.has_reth().then_some(Reth { va: b, rkey: low, len: high }),
        aeth: opcode
            .has_aeth()
            .then_some(Aeth { syndrome: Syndrome::from_u8(low as u8), msn: high >> 8 }),
        atomic: opcode.has_atomic().then_some(AtomicEth {
            va: a,
            rkey: b as u32,
            swap_or_add: c,
            compare: !b,
        }),
        atomic_ack: opcode.has_atomic_ack().then_some(AtomicAckEth { original: b }),
        imm: opcode.has_imm().then_some(c as u32),
        ieth: opcode.has_ieth().then_some(c as u32),
        payload: if opcode.payload_rule() == PayloadRule::Nothing { &[] } else { payload },
    }
}

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from),
        any::<Ipv4Addr>().prop_map(|v4| IpAddr::V6(v4.to_ipv6_mapped())),
    ]
}

fn opcode() -> impl Strategy<Value = Opcode> {
    proptest::sample::select(Opcode::ALL.to_vec())
}

proptest! {
    // tests [HDR-1] [HDR-2] [HDR-3] [HDR-5]
    #[test]
    fn packets_survive_the_wire(
        bth in bth(),
        n in any::<[u64; 3]>(),
        payload in collection::vec(any::<u8>(), 0..80),
    ) {
        for opcode in Opcode::ALL {
            let packet = with_headers(opcode, bth, n, &payload);
            let mut out = vec![1, 2, 3];
            let len = packet.emit(&mut out);
            prop_assert_eq!(len % 4, 0);
            prop_assert_eq!(out.len(), 3 + len);
            prop_assert_eq!(Packet::parse(&out[3..]), Ok(packet));
            checks::packet(&out[3..]);
            // Headers that the opcode does not have are not written.
            let full = Packet {
                deth: packet.deth.or(Some(Deth::default())),
                feth: packet.feth.or(Some(1)),
                reth: packet.reth.or(Some(Reth::default())),
                aeth: packet.aeth.or(Some(Aeth::default())),
                atomic: packet.atomic.or(Some(AtomicEth::default())),
                atomic_ack: packet.atomic_ack.or(Some(AtomicAckEth::default())),
                imm: packet.imm.or(Some(1)),
                ieth: packet.ieth.or(Some(1)),
                ..packet
            };
            let mut again = vec![1, 2, 3];
            full.emit(&mut again);
            prop_assert_eq!(again, out);
            // Headers of the opcode that are not given are written as zero.
            let bare = Packet { payload: packet.payload, ..Packet::new(opcode, bth) };
            let mut zeros = Vec::new();
            prop_assert_eq!(bare.emit(&mut zeros), len);
            prop_assert!(Packet::parse(&zeros).is_ok());
        }
    }

    #[test]
    fn bytes_are_read_or_refused(bytes in collection::vec(any::<u8>(), 0..300)) {
        checks::packet(&bytes);
        checks::mad(&bytes);
    }

    /// Random bytes rarely begin like a packet, so the first ones are set.
    #[test]
    fn bytes_behind_a_header_are_read_or_refused(
        opcode in opcode(),
        bits in 0..4_u8,
        qpn in 0..3_u8,
        rest in collection::vec(any::<u8>(), 0..60),
    ) {
        let bth = [opcode.to_u8(), bits << 4, 0xff, 0xff, 0, 0, 0, qpn, 0x80, 0, 0, 1];
        checks::packet(&[&bth[..], &rest].concat());
    }

    // tests [ICRC-1] [ICRC-2] [ICRC-30] [ICRC-31] [ICRC-32]
    #[test]
    fn icrcs_are_found_right(
        from in address(),
        to in address(),
        source_port in any::<u16>(),
        ident in any::<u16>(),
        bytes in collection::vec(any::<u8>(), 0..300),
    ) {
        checks::icrc(from, to, source_port, ident, &bytes);
    }

    // tests [ICRC-1] [ICRC-2] [ICRC-3]: against the definition, bit by bit
    #[test]
    fn icrcs_are_those_of_the_definition(
        source in any::<[u8; 16]>(),
        dest in any::<[u8; 16]>(),
        port in any::<u16>(),
        noise in any::<[u8; 8]>(),
        packet in collection::vec(any::<u8>(), 12..300),
    ) {
        let udp_len = (8 + packet.len() + 4) as u16;
        let udp = [
            &port.to_be_bytes()[..], &UDP_PORT.to_be_bytes(), &udp_len.to_be_bytes(), &noise[..2],
        ].concat();
        let ident = [noise[2], noise[3]];
        let v4 = [
            &[0x45, noise[4]], &(20 + udp_len).to_be_bytes()[..], &ident, &[0x40, 0],
            &[noise[5], 17, noise[6], noise[7]], &source[..4], &dest[..4],
        ].concat();
        let v6 = [
            &[0x60 | noise[2] & 0x0f, noise[3], noise[4], noise[5]], &udp_len.to_be_bytes()[..],
            &[17, noise[6]], &source[..], &dest[..],
        ].concat();
        // An IPv4-mapped address would count as IPv4.
        let mapped = |b| Ipv6Addr::from(b).to_ipv4_mapped().is_some();
        prop_assume!(!mapped(source) || !mapped(dest));
        let mut heads = IcrcHeads::new();
        for ip in [v4, v6] {
            let bytes = [&ip[..], &udp, &packet, &[0; 4]].concat();
            let datagram = Datagram { name: String::new(), bytes };
            let (outer, ident, taken, _) = datagram.take();
            let icrc = datagram.reference(&datagram.masked());
            prop_assert_eq!(outer.icrc(ident, taken), icrc);
            prop_assert_eq!(heads.icrc(&outer, ident, taken), icrc);
            // What is remembered now is of this packet, and right for others only where they agree.
            let longer = [taken, &noise].concat();
            let mut other = longer.clone();
            other[usize::from(noise[0]) % 12] ^= noise[1];
            let elsewhere = Outer { source_port: outer.source_port ^ 1, ..outer };
            for (outer, ident, packet) in [
                (&outer, !ident, taken),
                (&outer, ident, &longer[..]),
                (&outer, 0, &other[..]),
                (&elsewhere, ident, &other[..]),
                (&outer, ident, taken),
            ] {
                prop_assert_eq!(heads.icrc(outer, ident, packet), outer.icrc(ident, packet));
            }
        }
    }

    #[test]
    fn sequence_numbers_compare_by_the_half_turn(a in any::<u32>(), b in any::<u32>()) {
        let (x, y) = (Psn::new(a), Psn::new(b));
        let shifted = a.wrapping_sub(b).wrapping_shl(8) as i32;
        prop_assert_eq!(x.is_after(y), shifted > 0);
        prop_assert_eq!(x.is_before(y), shifted < 0);
        prop_assert_eq!(x == y, shifted == 0);
        prop_assert_eq!(x.diff(y), shifted >> 8);
        prop_assert_eq!(y + x.since(y), x);
        prop_assert_eq!((x + b) - b, x);
        let mut sum = x;
        sum += b;
        prop_assert_eq!(sum, x + b);
    }
}
