//! Properties of any bytes parsed as a RoCE packet. Used by the tests and by the fuzz target, so
//! this file depends on the crate only.

use std::net::IpAddr;

use bowline_wire::roce::cm::CmMad;
use bowline_wire::roce::{
    BTH_LEN, CNP_RESERVED_LEN, IcrcChecker, IcrcError, IcrcMatch, IcrcPolicy, MAD_HEADER_LEN,
    MadHeader, Opcode, Outer, Packet, PacketError, split_icrc,
};

/// Checks everything about the reading of `bytes` as a packet without ICRC.
pub(crate) fn packet(bytes: &[u8]) {
    let peeked = Packet::peek_rkey(bytes);
    let packet = match Packet::parse(bytes) {
        Ok(packet) => packet,
        Err(error) => return refused(bytes, error),
    };
    let of_reth = packet.reth.filter(|_| !packet.opcode.has_feth()).map(|reth| reth.rkey);
    assert_eq!(peeked, of_reth.or(packet.atomic.map(|atomic| atomic.rkey)));
    // tests [HDR-13] [HDR-3]: what is reserved is ignored, and zero when written
    let mut canonical = bytes.to_vec();
    canonical[1] &= 0xb0;
    canonical[4] &= 0xc0;
    canonical[8] &= 0x80;
    if packet.opcode.has_deth() {
        canonical[BTH_LEN + 4] = 0;
    }
    if packet.opcode == Opcode::Cnp {
        canonical[BTH_LEN..][..CNP_RESERVED_LEN].fill(0);
    }
    let pad = canonical.len() - BTH_LEN - packet.opcode.header_len() - packet.payload.len();
    let end = canonical.len();
    canonical[end - pad..].fill(0);
    assert_eq!(pad, usize::from(bytes[1] >> 4 & 3));

    let mut out = b"before".to_vec();
    assert_eq!(packet.emit(&mut out), canonical.len());
    assert_eq!(out, [b"before", &canonical[..]].concat());
    assert_eq!(Packet::parse(&canonical), Ok(packet));

    let line = packet.to_string();
    assert!(line.starts_with(&packet.opcode.to_string()), "{line}");
    assert!(line.len() < 200 && line.is_ascii() && !line.contains('\n'), "{line}");
}

/// Checks the reading of a management datagram of any bytes: `bytes` begin with what chooses the
/// attribute.
pub(crate) fn mad(bytes: &[u8]) {
    let _ = CmMad::parse(bytes).map(|mad| mad.to_string());
    let [choice, rest @ ..] = bytes else { return };
    let header =
        MadHeader { transaction: 1, attribute: 0x0f + u16::from(choice % 12), modifier: 0 };
    let mut mad = header.emit();
    for (to, from) in mad[MAD_HEADER_LEN..].iter_mut().zip(rest) {
        *to = *from;
    }
    let Ok(read) = CmMad::parse(&mad) else { return };
    assert_eq!(CmMad::parse(&read.emit()), Ok(read));
    let line = read.to_string();
    assert!(line.len() < 200 && line.is_ascii() && !line.contains('\n'), "{line}");
}

/// Checks that a packet is refused for its first error, in the order of RX-3 and RX-4.
fn refused(bytes: &[u8], error: PacketError) {
    assert!(!error.to_string().is_empty());
    let got = bytes.len();
    let [first, bits, _, _, _, q0, q1, q2, ..] = *bytes else {
        return assert_eq!(error, PacketError::Short { needed: BTH_LEN, got });
    };
    if got < BTH_LEN {
        return assert_eq!(error, PacketError::Short { needed: BTH_LEN, got });
    }
    let Some(opcode) = Opcode::from_u8(first) else {
        return assert_eq!(error, PacketError::UnknownOpcode(first));
    };
    let headers = BTH_LEN + opcode.header_len();
    let needed = headers + usize::from(bits >> 4 & 3);
    let expected = if got < needed {
        PacketError::Short { needed, got }
    } else if bits & 0x0f != 0 {
        PacketError::Version(bits & 0x0f)
    } else if [q0, q1, q2] == [0; 3] {
        PacketError::NoQueuePair
    } else if !got.is_multiple_of(4) {
        PacketError::Pad
    } else {
        PacketError::Payload { opcode, got: got - headers }
    };
    assert_eq!(error, expected);
}

/// Checks that the payload of a datagram with a right ICRC passes, and with a wrong one only for
/// another identification. `bytes` are taken as a packet, whether they are one or not.
pub(crate) fn icrc(from: IpAddr, to: IpAddr, source_port: u16, ident: u16, bytes: &[u8]) {
    let outer = Outer { from, to, source_port };
    let mut payload = bytes.to_vec();
    outer.append_icrc(ident, &mut payload, 0);
    let Some((packet, icrc)) = split_icrc(&payload) else {
        return assert!(bytes.len() < BTH_LEN);
    };
    assert_eq!((packet, icrc), (bytes, outer.icrc(ident, bytes)));
    let v6 = from.to_canonical().is_ipv6() || to.to_canonical().is_ipv6();

    let mut off = IcrcChecker::new(IcrcPolicy::Off);
    assert_eq!(off.check(&outer, packet, !icrc, &[]), Ok(IcrcMatch::Unchecked));

    // tests [ICRC-30] [ICRC-31]
    let mut solve = IcrcChecker::new(IcrcPolicy::Solve);
    let found = solve.check(&outer, packet, icrc, &[]);
    let expected = match ident {
        _ if v6 => IcrcMatch::Exact(0),
        0 => IcrcMatch::Exact(0),
        ident => IcrcMatch::Solved(ident),
    };
    assert_eq!(found, Ok(expected));
    // tests [ICRC-32]: one that was to be expected
    let exact = Ok(IcrcMatch::Exact(if v6 { 0 } else { ident }));
    let mut strict = IcrcChecker::new(IcrcPolicy::Strict);
    assert_eq!(strict.check(&outer, packet, icrc, &[7, ident]), exact);
    let mut strict = IcrcChecker::new(IcrcPolicy::Strict);
    if !v6 {
        let before = outer.icrc(ident.wrapping_sub(1), packet);
        let _ = strict.check(&outer, packet, before, &[]);
    }
    assert_eq!(strict.check(&outer, packet, icrc, &[]), exact);

    // The upper 16 bits of another ICRC must be those of some identification.
    for bit in 0..32 {
        let wrong = icrc ^ 1 << bit;
        match solve.check(&outer, packet, wrong, &[]) {
            Ok(IcrcMatch::Solved(other) | IcrcMatch::Exact(other)) if !v6 => {
                assert_eq!(outer.icrc(other, packet), wrong);
            }
            Err(IcrcError::Mismatch) => {}
            other => panic!("{other:?} for bit {bit}"),
        }
    }
}
