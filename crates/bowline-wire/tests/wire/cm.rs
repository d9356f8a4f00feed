//! Messages of the connection manager: the recorded ones, random ones and hostile ones.

use bowline_wire::roce::cm::{
    Answered, CmMad, CmMessage, Dreq, Ids, Mra, Rej, Rep, Req, SidrRep, SidrReq, SidrStatus,
    TRANSPORT_RC,
};
use bowline_wire::roce::{
    CMA_HEADER_LEN, CmaError, CmaHeader, Gid, MAD_LEN, MadError, datagram_service_id,
    datagram_service_port, flow_label, service_id, service_port,
};
use proptest::prelude::*;
use std::net::IpAddr;

/// The MAD of a vector: after its base and datagram headers; `[n x 00]` stands for n zero bytes.
fn vector(text: &str) -> [u8; MAD_LEN] {
    let mut out = Vec::new();
    for word in text.split_whitespace() {
        if let Some((times, byte)) = word.split_once('x') {
            assert_eq!(byte, "00");
            out.resize(out.len() + times.parse::<usize>().unwrap(), 0);
        } else {
            let digits = word.as_bytes().chunks(2);
            out.extend(digits.map(|d| u8::from_str_radix(str::from_utf8(d).unwrap(), 16).unwrap()));
        }
    }
    assert_eq!(out.len(), 12 + 8 + MAD_LEN, "BTH, DETH, MAD [GSI-1]");
    out[20..].try_into().unwrap()
}

const V5: &str = "6400ffff00000001800000008001000000000001010702030000000000000002
    2358edbf0010000000000000bfed5823000000000000000001061c06505400ff
    fe77000300000000000000000000110100000001000000a0715ee4a7ffff37f0
    ffffffff00000000000000000000ffff0a4d000300000000000000000000ffff
    0a4d0002c165b00000400088 45x00
    40e70b0000000000000000000000000a4d00030000000000000000000000000a 4d0002 56x00";
const V6: &str = "6400ffff00000001800000008001000000000001010702030000000000000002
    2358edbf0013000000000000126926a7bfed5823000000000000110000000000
    b298ce00010178e0505400fffe770002 196x00";
const V7: &str = "6400ffff00000001800000018001000000000001010702030000000000000002
    2358edbf0014000000000000bfed5823126926a7 224x00";
const V8: &str = "6400ffff00000001800000028001000000000001010702030000000000000002
    2358edbf0015000000000000bfed5823126926a7000011 221x00";
const V9: &str = "6400ffff00000001800000018001000000000001010702030000000000000002
    2358edbf0016000000000000126926a7bfed5823 224x00";
const V10: &str = "6400ffff00000001800000048001000000000001010702030000000000000002
    2358edb9001200000000000000000000b9ed582300000008 220x00";
const V11: &str = "6400ffff00000001800000038001000000000001010702030000000000000001
    7bd383f800110000000000000af819907bd383f800c0 222x00";

const ACTIVE: u32 = 0xbfed_5823;
const PASSIVE: u32 = 0x1269_26a7;
const TRANSACTION: u64 = 0x0000_0002_2358_edbf;

fn assert_both_ways(bytes: [u8; MAD_LEN], transaction: u64, message: CmMessage) {
    let mad = CmMad { transaction, message };
    assert_eq!(CmMad::parse(&bytes), Ok(mad));
    assert_eq!(mad.emit(), bytes);
}

// tests [CM-1] [CMA-1] [CMA-3] [CMA-4] [CMA-8] [CMA-9] [GSI-2]
#[test]
fn v5_req() {
    let source: IpAddr = "10.77.0.3".parse().unwrap();
    let destination: IpAddr = "10.77.0.2".parse().unwrap();
    let header = CmaHeader { source_port: 0xe70b, source, destination };
    let mut private_data = [0; 92];
    private_data[..CMA_HEADER_LEN].copy_from_slice(&header.emit());
    let req = Req {
        local_id: ACTIVE,
        vendor: 0,
        service_id: service_id(0x1c06),
        guid: 0x5054_00ff_fe77_0003,
        qpn: 0x11,
        responder_resources: 1,
        initiator_depth: 1,
        remote_timeout: 20,
        transport: TRANSPORT_RC,
        flow_control: false,
        starting_psn: 0x71_5ee4,
        local_timeout: 20,
        retry_count: 7,
        pkey: 0xffff,
        mtu: 3,
        rnr_retry_count: 7,
        max_retries: 15,
        srq: false,
        local_lid: 0xffff,
        remote_lid: 0xffff,
        local_gid: source.into(),
        remote_gid: destination.into(),
        flow_label: flow_label(0xe70b, 0x1c06),
        packet_rate: 0,
        traffic_class: 0,
        hop_limit: 64,
        service_level: 0,
        subnet_local: false,
        ack_timeout: 17,
        private_data,
    };
    assert_both_ways(vector(V5), TRANSACTION, CmMessage::Req(req));
    assert_eq!(req.flow_label, 0xc165b);
    assert_eq!(
        CmMad::parse(&vector(V5)).unwrap().to_string(),
        "REQ bfed5823 service 0x1061c06 qp 0x11 psn 0x715ee4 10.77.0.3->10.77.0.2 mtu 3"
    );
    let data = req.private_data.first_chunk().unwrap();
    assert_eq!(CmaHeader::parse(data), Ok(header));
}

// tests [CM-4]
#[test]
fn v6_rep() {
    let rep = Rep {
        local_id: PASSIVE,
        remote_id: ACTIVE,
        vendor: 0,
        qpn: 0x11,
        starting_psn: 0xb2_98ce,
        responder_resources: 1,
        initiator_depth: 1,
        ack_delay: 15,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        guid: 0x5054_00ff_fe77_0002,
        private_data: [0; 196],
    };
    assert_both_ways(vector(V6), TRANSACTION, CmMessage::Rep(rep));
}

// tests [CM-5] [CM-6] [CM-7] [GSI-3] [GSI-4]
#[test]
fn v7_rtu_v8_dreq_v9_drep() {
    let ids = Ids { local: ACTIVE, remote: PASSIVE };
    assert_both_ways(vector(V7), TRANSACTION, CmMessage::Rtu(ids));
    let dreq = Dreq { ids, remote_qpn: 0x11 };
    assert_both_ways(vector(V8), TRANSACTION, CmMessage::Dreq(dreq));
    let ids = Ids { local: PASSIVE, remote: ACTIVE };
    assert_both_ways(vector(V9), TRANSACTION, CmMessage::Drep(ids));
}

// tests [CM-3] [CM-2]
#[test]
fn v10_rej_v11_mra() {
    let rej = Rej {
        local_id: 0,
        remote_id: 0xb9ed_5823,
        answered: Answered::REQ,
        reason: 8,
        info_len: 0,
        info: [0; 72],
        private_data: [0; 148],
    };
    assert_both_ways(vector(V10), 0x0000_0002_2358_edb9, CmMessage::Rej(rej));
    let mra = Mra {
        local_id: 0x0af8_1990,
        remote_id: 0x7bd3_83f8,
        answered: Answered::REQ,
        service_timeout: 24,
    };
    assert_both_ways(vector(V11), 0x0000_0001_7bd3_83f8, CmMessage::Mra(mra));
}

// tests [GSI-1] [GSI-2]
#[test]
fn what_is_no_cm_mad_says_why() {
    let good = vector(V7);
    let with = |at: usize, byte: u8| {
        let mut bad = good;
        bad[at] = byte;
        CmMad::parse(&bad)
    };
    assert_eq!(CmMad::parse(&good[..255]), Err(MadError::Length(255)));
    assert_eq!(CmMad::parse(&[0; 257]), Err(MadError::Length(257)));
    assert_eq!(with(0, 2), Err(MadError::Class([2, 7, 2])));
    assert_eq!(with(1, 3), Err(MadError::Class([1, 3, 2])));
    assert_eq!(with(2, 1), Err(MadError::Class([1, 7, 1])));
    assert_eq!(with(3, 0x81), Err(MadError::Method(0x81)));
    assert_eq!(with(17, 0x19), Err(MadError::Attribute(0x19)));
    assert_eq!(with(4, 0xff), CmMad::parse(&good), "the status is not looked at");
    assert_eq!(MadError::Method(0x81).to_string(), "a MAD of method 129");
}

// tests [CM-38] [CM-9] [HDR-13]: an alternate path is ignored, and never offered
#[test]
fn the_alternate_path_is_ignored() {
    let good = vector(V5);
    let mut bytes = good;
    bytes[24 + 96..24 + 140].fill(0xff);
    let read = CmMad::parse(&bytes).unwrap();
    assert_eq!(read, CmMad::parse(&good).unwrap());
    assert_eq!(read.emit(), good);
}

// tests [CM-11]: a length beyond the field is cut to it
#[test]
fn reject_information_ends_with_its_field() {
    let mut bytes = vector(V10);
    bytes[24 + 9] = 0xff;
    bytes[24 + 12] = 7;
    let CmMessage::Rej(rej) = CmMad::parse(&bytes).unwrap().message else { panic!("a REJ") };
    assert_eq!(rej.info().len(), 72);
    assert_eq!(rej.info()[0], 7);
    assert_eq!(Rej { info_len: 8, ..rej }.info().len(), 8);
}

// tests [CMA-1]
#[test]
fn service_ids_of_ports() {
    assert_eq!(service_id(7174).to_be_bytes(), [0, 0, 0, 0, 1, 6, 0x1c, 6]);
    assert_eq!(service_port(service_id(65535)), Some(65535));
    assert_eq!(service_port(0x0111_1c06), None, "datagrams");
    assert_eq!(service_port(1 << 40 | 0x0106_1c06), None);
}

// tests [CMA-3] [CMA-4] [CMA-6]
#[test]
fn rdma_cm_header() {
    let source: IpAddr = "2001:db8::1".parse().unwrap();
    let destination: IpAddr = "2001:db8::2".parse().unwrap();
    let header = CmaHeader { source_port: 1, source, destination };
    let bytes = header.emit();
    assert_eq!(CmaHeader::parse(&bytes), Ok(header));
    assert_eq!(bytes[..4], [0, 0x60, 0, 1]);
    let with = |at: usize, byte: u8| {
        let mut bad = bytes;
        bad[at] = byte;
        CmaHeader::parse(&bad)
    };
    assert_eq!(with(0, 1), Err(CmaError::Version(1)));
    assert_eq!(with(1, 0x50), Err(CmaError::IpVersion(5)));
    let v4: IpAddr = "192.0.2.1".parse().unwrap();
    let bytes = CmaHeader { source_port: 1, source: v4, destination: v4 }.emit();
    assert_eq!(bytes[4..20], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 192, 0, 2, 1], "not mapped");
    assert_eq!(Gid::from(v4).0[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    assert_eq!((Gid::from(v4).ip(), Gid::from(source).ip()), (v4, source));
}

prop_compose! {
    fn req()(
        ids in any::<(u32, u64, u64)>(),
        numbers in (0..1u32 << 24, 0..1u32 << 24, 0..1u32 << 20),
        depths in any::<(u8, u8)>(),
        fives in (0..32u8, 0..32u8, 0..32u8, 0..4u8, 0..8u8, 0..16u8, 0..8u8, 0..16u8),
        flags in any::<[bool; 3]>(),
        lids in any::<[u16; 3]>(),
        gids in any::<[[u8; 16]; 2]>(),
        path in (0..64u8, any::<u8>(), any::<u8>(), 0..16u8),
        data in any::<[[u8; 23]; 4]>(),
    ) -> Req {
        Req {
            local_id: ids.0,
            vendor: 0,
            service_id: ids.1,
            guid: ids.2,
            qpn: numbers.0,
            responder_resources: depths.0,
            initiator_depth: depths.1,
            remote_timeout: fives.0,
            transport: fives.3,
            flow_control: flags[0],
            starting_psn: numbers.1,
            local_timeout: fives.1,
            retry_count: fives.4,
            pkey: lids[2],
            mtu: fives.5,
            rnr_retry_count: fives.6,
            max_retries: fives.7,
            srq: flags[1],
            local_lid: lids[0],
            remote_lid: lids[1],
            local_gid: Gid(gids[0]),
            remote_gid: Gid(gids[1]),
            flow_label: numbers.2,
            packet_rate: path.0,
            traffic_class: path.1,
            hop_limit: path.2,
            service_level: path.3,
            subnet_local: flags[2],
            ack_timeout: fives.2,
            private_data: data.concat().try_into().unwrap(),
        }
    }
}

prop_compose! {
    fn rep()(
        ids in any::<(u32, u32, u64)>(),
        numbers in (0..1u32 << 24, 0..1u32 << 24),
        depths in any::<(u8, u8)>(),
        bits in (0..32u8, any::<bool>(), 0..8u8, any::<bool>()),
        data in any::<[[u8; 28]; 7]>(),
    ) -> Rep {
        Rep {
            local_id: ids.0,
            remote_id: ids.1,
            vendor: 0,
            qpn: numbers.0,
            starting_psn: numbers.1,
            responder_resources: depths.0,
            initiator_depth: depths.1,
            ack_delay: bits.0,
            flow_control: bits.1,
            rnr_retry_count: bits.2,
            srq: bits.3,
            guid: ids.2,
            private_data: data.concat().try_into().unwrap(),
        }
    }
}

prop_compose! {
    fn rej()(
        ids in any::<(u32, u32)>(),
        answered in 0..4u8,
        reason in any::<u16>(),
        info_len in 0..=72u8,
        info in any::<[[u8; 24]; 3]>(),
        data in any::<[[u8; 37]; 4]>(),
    ) -> Rej {
        Rej {
            local_id: ids.0,
            remote_id: ids.1,
            answered: Answered(answered),
            reason,
            info_len,
            info: info.concat().try_into().unwrap(),
            private_data: data.concat().try_into().unwrap(),
        }
    }
}

fn ids() -> impl Strategy<Value = Ids> {
    any::<(u32, u32)>().prop_map(|(local, remote)| Ids { local, remote })
}

prop_compose! {
    fn sidr_req()(
        numbers in any::<(u32, u16, u64)>(),
        data in any::<[[u8; 27]; 8]>(),
    ) -> SidrReq {
        let (request_id, pkey, service_id) = numbers;
        SidrReq { request_id, pkey, service_id, private_data: data.concat().try_into().unwrap() }
    }
}

prop_compose! {
    fn sidr_rep()(
        numbers in any::<(u32, u8, u64, u32)>(),
        qpn in 0..1u32 << 24,
        info_len in 0..=72u8,
        info in any::<[[u8; 24]; 3]>(),
        data in any::<[[u8; 17]; 8]>(),
    ) -> SidrRep {
        let (request_id, status, service_id, qkey) = numbers;
        SidrRep {
            request_id,
            status: SidrStatus(status),
            info_len,
            qpn,
            service_id,
            qkey,
            info: info.concat().try_into().unwrap(),
            private_data: data.concat().try_into().unwrap(),
        }
    }
}

/// The lookup of a service and its answer, byte by byte where a field begins and ends.
// tests [CM-8] [CMA-20]
#[test]
fn lookups_are_laid_out_as_the_specification_says() {
    assert_eq!(datagram_service_id(0x1c06), 0x0111_1c06);
    assert_eq!(datagram_service_port(0x0111_1c06), Some(0x1c06));
    for other in [service_id(7), 0x0112_1c06, 1 << 40 | 0x0111_1c06] {
        assert_eq!(datagram_service_port(other), None);
    }
    let request = SidrReq {
        request_id: 0x0102_0304,
        pkey: 0xffff,
        service_id: datagram_service_id(0x1c06),
        private_data: [7; 216],
    };
    let bytes = CmMad { transaction: 9, message: CmMessage::SidrReq(request) }.emit();
    assert_eq!(bytes[16..18], [0, 0x17]);
    assert_eq!(bytes[24..40], [1, 2, 3, 4, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 1, 0x11, 0x1c, 6]);
    assert_eq!(bytes[40..], [7; 216]);
    let answer = SidrRep {
        request_id: 0x0102_0304,
        status: SidrStatus::REJECT,
        info_len: 3,
        qpn: 0x0a_0b0c,
        service_id: datagram_service_id(0x1c06),
        qkey: 0x0123_4567,
        info: [8; 72],
        private_data: [9; 136],
    };
    let bytes = CmMad { transaction: 9, message: CmMessage::SidrRep(answer) }.emit();
    assert_eq!(bytes[16..18], [0, 0x18]);
    let head =
        [1, 2, 3, 4, 2, 3, 0, 0, 10, 11, 12, 0, 0, 0, 0, 0, 1, 0x11, 0x1c, 6, 1, 0x23, 0x45, 0x67];
    assert_eq!(bytes[24..48], head);
    assert_eq!((&bytes[48..120], &bytes[120..]), (&[8; 72][..], &[9; 136][..]));
}

fn message() -> impl Strategy<Value = CmMessage> {
    prop_oneof![
        req().prop_map(CmMessage::Req),
        rep().prop_map(CmMessage::Rep),
        rej().prop_map(CmMessage::Rej),
        (ids(), 0..4u8, 0..32u8).prop_map(|(ids, answered, service_timeout)| CmMessage::Mra(Mra {
            local_id: ids.local,
            remote_id: ids.remote,
            answered: Answered(answered),
            service_timeout,
        })),
        ids().prop_map(CmMessage::Rtu),
        (ids(), 0..1u32 << 24)
            .prop_map(|(ids, remote_qpn)| CmMessage::Dreq(Dreq { ids, remote_qpn })),
        ids().prop_map(CmMessage::Drep),
        sidr_req().prop_map(CmMessage::SidrReq),
        sidr_rep().prop_map(CmMessage::SidrRep),
    ]
}

proptest! {
    // tests [CM-1] to [CM-8]: every field has its own bits
    #[test]
    fn what_is_written_is_read(transaction: u64, message in message()) {
        let mad = CmMad { transaction, message };
        prop_assert_eq!(CmMad::parse(&mad.emit()), Ok(mad));
    }

    /// Any bytes after a valid header are a message, and writing it again gives all bytes read.
    #[test]
    fn any_message_bytes_are_read(attribute in 0x10..=0x18u16, bytes: [[u8; 29]; 8]) {
        let mut mad = [0; MAD_LEN];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[16..18].copy_from_slice(&attribute.to_be_bytes());
        mad[24..].copy_from_slice(&bytes.concat());
        let read = CmMad::parse(&mad).unwrap();
        prop_assert_eq!(CmMad::parse(&read.emit()), Ok(read));
        prop_assert!(read.to_string().len() < 200);
        if let CmMessage::Rej(rej) = read.message {
            prop_assert!(rej.info().len() <= 72);
        }
    }

    #[test]
    fn hostile_bytes_are_an_error_or_a_message(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = CmMad::parse(&bytes).map(|mad| mad.to_string());
    }

    #[test]
    fn rdma_cm_headers_are_read_or_refused(bytes: [[u8; 18]; 2], version in prop_oneof![Just(0x40u8), Just(0x60), any::<u8>()]) {
        let mut bytes: [u8; CMA_HEADER_LEN] = bytes.concat().try_into().unwrap();
        bytes[..2].copy_from_slice(&[0, version]);
        if let Ok(header) = CmaHeader::parse(&bytes) {
            prop_assert_eq!(CmaHeader::parse(&header.emit()), Ok(header));
        }
    }
}
