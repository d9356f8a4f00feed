//! Messages of the connection manager [CM-1] to [CM-7]. "Local" and "remote" are always from the
//! sender's point of view [CM-9].
//!
//! ```text
//!   active                         passive
//!     | ---------- REQ -----------> |      or <- REJ, or <- MRA: wait
//!     | <--------- REP ------------ |      or -> REJ, or -> MRA
//!     | ---------- RTU -----------> |
//!     |            ...              |
//!     | --- DREQ (either side) ---> |
//!     | <---------- DREP ---------- |
//! ```
//! A datagram service is looked up (SIDR): SIDR_REQ, answered by SIDR_REP [CM-8].
//!
//! Offsets in this file count from the beginning of the message, which follows the MAD's header.
//! Reserved fields, and fields without a meaning between RoCE ports (EE contexts, Q_Key, alternate
//! path [CM-38]), are sent as zero and ignored on receipt [HDR-13].

use core::fmt;

use super::cma::Gid;
use super::mad::{MAD_HEADER_LEN, MAD_LEN, MAD_MESSAGE_LEN, MadError, MadHeader};

/// Most bytes of private data of a REQ, the header of rdma_cm included.
pub const REQ_PRIVATE_LEN: usize = 92;
/// Most bytes of private data of a REP.
pub const REP_PRIVATE_LEN: usize = 196;
/// Most bytes of private data of a REJ.
pub const REJ_PRIVATE_LEN: usize = 148;
/// Most bytes of private data of a SIDR_REQ, the header of rdma_cm included.
pub const SIDR_REQ_PRIVATE_LEN: usize = 216;
/// Most bytes of private data of a SIDR_REP.
pub const SIDR_REP_PRIVATE_LEN: usize = 136;
/// Most bytes of additional information of a SIDR_REP.
pub const SIDR_INFO_LEN: usize = 72;
/// Most bytes of additional reject information (ARI).
pub const REJ_INFO_LEN: usize = 72;

const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;

/// Vendor ID in the REQ of a bowline, which takes reports of gaps [CC-12]. A locally administered
/// number, so nobody else's.
pub const VENDOR_BOWLINE: u32 = 0x42_574c;
/// Vendor ID in the REP of a bowline that got the other one. Not the same, since kernels return
/// the vendor ID of the REQ as it came.
pub const VENDOR_BOWLINE_REP: u32 = 0x4c_5742;

/// Transport service type of reliable connections.
pub const TRANSPORT_RC: u8 = 0;

// The last field of each layout ends where the message does.
const _: () = assert!(140 + REQ_PRIVATE_LEN == MAD_MESSAGE_LEN);
const _: () = assert!(36 + REP_PRIVATE_LEN == MAD_MESSAGE_LEN);
const _: () = assert!(12 + REJ_INFO_LEN + REJ_PRIVATE_LEN == MAD_MESSAGE_LEN);
const _: () = assert!(16 + SIDR_REQ_PRIVATE_LEN == MAD_MESSAGE_LEN);
const _: () = assert!(24 + SIDR_INFO_LEN + SIDR_REP_PRIVATE_LEN == MAD_MESSAGE_LEN);

/// Request for a connection [CM-1].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// Sender's communication ID of the connection, not 0.
    pub local_id: u32,
    /// Vendor ID of the sender's extensions, 24 bits; 0: none [CC-12].
    pub vendor: u32,
    /// Service to connect to [CMA-1].
    pub service_id: u64,
    /// Node GUID of the sender, stable and not 0 [CM-37].
    pub guid: u64,
    /// Sender's queue pair, 24 bits.
    pub qpn: u32,
    /// Most READs and atomics that the sender can answer concurrently.
    pub responder_resources: u8,
    /// Most READs and atomics that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// Code of the receiver's response time, 5 bits.
    pub remote_timeout: u8,
    /// Transport service type, 2 bits; [`TRANSPORT_RC`].
    pub transport: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// First PSN that the *receiver* sends, 24 bits [CM-31].
    pub starting_psn: u32,
    /// Code of the sender's response time, 5 bits [CM-41].
    pub local_timeout: u8,
    /// Retransmissions of both queue pairs, 3 bits [CM-35].
    pub retry_count: u8,
    /// Partition key.
    pub pkey: u16,
    /// Code of the path MTU, 4 bits [HDR-9].
    pub mtu: u8,
    /// RNR retransmissions of the receiver's queue pair, 3 bits [CM-35].
    pub rnr_retry_count: u8,
    /// Most times a message of the handshake is resent, 4 bits.
    pub max_retries: u8,
    /// The sender receives through a shared receive queue.
    pub srq: bool,
    /// Sender's LID.
    pub local_lid: u16,
    /// Receiver's LID.
    pub remote_lid: u16,
    /// Sender's address.
    pub local_gid: Gid,
    /// Receiver's address.
    pub remote_gid: Gid,
    /// Flow label, 20 bits [CMA-9].
    pub flow_label: u32,
    /// Code of the packet rate, 6 bits.
    pub packet_rate: u8,
    /// Traffic class, type of service.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// The path does not leave the subnet.
    pub subnet_local: bool,
    /// Code of the queue pair's acknowledgement timeout, 5 bits [CM-33].
    pub ack_timeout: u8,
    /// Header of rdma_cm and the program's data [CMA-4].
    pub private_data: [u8; REQ_PRIVATE_LEN],
}

/// The message that a [`Mra`] or [`Rej`] answers, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Answered(pub u8);

impl Answered {
    /// A REQ.
    pub const REQ: Self = Self(0);
    /// A REP.
    pub const REP: Self = Self(1);
    /// In a REJ: no message, or another one.
    pub const OTHER: Self = Self(2);
}

/// Message Receipt Acknowledgement: the answer will take a while [CM-2].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// Sender's communication ID of the connection.
    pub local_id: u32,
    /// Receiver's communication ID of the connection.
    pub remote_id: u32,
    /// The message received.
    pub answered: Answered,
    /// Code of the time until the answer, 5 bits [CM-43].
    pub service_timeout: u8,
}

/// Refusal of a message or connection [CM-3].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// Sender's communication ID of the connection; may be 0 [CM-36].
    pub local_id: u32,
    /// Receiver's communication ID; 0 if the sender does not know it.
    pub remote_id: u32,
    /// The message refused.
    pub answered: Answered,
    /// Reason [CM-10].
    pub reason: u16,
    /// Length of the additional information, at most 72 bytes.
    pub info_len: u8,
    /// Additional information, by reason [CM-11].
    pub info: [u8; REJ_INFO_LEN],
    /// The program's data.
    pub private_data: [u8; REJ_PRIVATE_LEN],
}

impl Rej {
    /// Returns the additional information.
    pub fn info(&self) -> &[u8] {
        self.info.get(..usize::from(self.info_len)).unwrap_or(&self.info)
    }
}

/// Acceptance of a connection [CM-4].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// Sender's communication ID of the connection, not 0.
    pub local_id: u32,
    /// Receiver's communication ID of the connection.
    pub remote_id: u32,
    /// Vendor ID of the sender's extensions, 24 bits; 0: none [CC-12].
    pub vendor: u32,
    /// Sender's queue pair, 24 bits.
    pub qpn: u32,
    /// First PSN that the *receiver* sends, 24 bits [CM-31].
    pub starting_psn: u32,
    /// Most READs and atomics that the sender answers concurrently.
    pub responder_resources: u8,
    /// Most READs and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    /// Code of the sender's acknowledgement delay, 5 bits [CM-33].
    pub ack_delay: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// RNR retransmissions of the receiver's queue pair, 3 bits [CM-35].
    pub rnr_retry_count: u8,
    /// The sender receives through a shared receive queue.
    pub srq: bool,
    /// Node GUID of the sender [CM-37].
    pub guid: u64,
    /// The program's data.
    pub private_data: [u8; REP_PRIVATE_LEN],
}

/// The communication IDs of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ids {
    /// Communication ID of the sender.
    pub local: u32,
    /// Communication ID of the receiver.
    pub remote: u32,
}

/// End of a connection [CM-6].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// The connection.
    pub ids: Ids,
    /// The queue pair of the *receiver*, 24 bits.
    pub remote_qpn: u32,
}

/// Lookup of the queue pair of a datagram service [CM-8].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// Sender's number of the lookup.
    pub request_id: u32,
    /// Partition key.
    pub pkey: u16,
    /// Service that is looked up [CMA-20].
    pub service_id: u64,
    /// Header of rdma_cm and the program's data [CMA-22].
    pub private_data: [u8; SIDR_REQ_PRIVATE_LEN],
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The queue pair is in the answer.
    pub const FOUND: Self = Self(0);
    /// There is no such service.
    pub const UNSUPPORTED: Self = Self(1);
    /// Refused by the service.
    pub const REJECT: Self = Self(2);
}

/// Answer to a [`SidrReq`] [CM-8].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// Number of the lookup.
    pub request_id: u32,
    /// Result.
    pub status: SidrStatus,
    /// Length of the additional information, at most 72 bytes.
    pub info_len: u8,
    /// Queue pair of the service, 24 bits.
    pub qpn: u32,
    /// The service.
    pub service_id: u64,
    /// Queue key of the queue pair.
    pub qkey: u32,
    /// Additional information.
    pub info: [u8; SIDR_INFO_LEN],
    /// The program's data.
    pub private_data: [u8; SIDR_REP_PRIVATE_LEN],
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "none is larger than the MAD it comes from")]
pub enum CmMessage {
    /// Connect.
    Req(Req),
    /// The answer will take a while.
    Mra(Mra),
    /// Refused.
    Rej(Rej),
    /// Accepted.
    Rep(Rep),
    /// Ready to use: the connection is established [CM-5].
    Rtu(Ids),
    /// End of a connection.
    Dreq(Dreq),
    /// Answer to a DREQ [CM-7].
    Drep(Ids),
    /// Lookup of a datagram service.
    SidrReq(SidrReq),
    /// Answer to a lookup.
    SidrRep(SidrRep),
}

/// A message and its transaction ID [GSI-4]. Private data of MRA, RTU, DREQ and DREP is sent as
/// zero and ignored on receipt, as in rdma_cm [CMA-5].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmMad {
    /// Transaction.
    pub transaction: u64,
    /// Message.
    pub message: CmMessage,
}

impl CmMad {
    /// Parses a MAD. The values of its fields are not checked: an unknown MTU, reason or transport
    /// is for the connection manager to answer.
    ///
    /// # Errors
    /// [`MadError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, MadError> {
        let (header, message) = MadHeader::parse(bytes)?;
        let area = Area(message);
        let message = match header.attribute {
            REQ => CmMessage::Req(area.req()),
            MRA => CmMessage::Mra(Mra {
                local_id: area.u32(0),
                remote_id: area.u32(4),
                answered: Answered(area.u8(8) >> 6),
                service_timeout: area.u8(9) >> 3,
            }),
            REJ => CmMessage::Rej(Rej {
                local_id: area.u32(0),
                remote_id: area.u32(4),
                answered: Answered(area.u8(8) >> 6),
                reason: area.u16(10),
                info_len: (area.u8(9) >> 1).min(REJ_INFO_LEN as u8),
                info: area.bytes(12),
                private_data: area.bytes(84),
            }),
            REP => CmMessage::Rep(area.rep()),
            RTU => CmMessage::Rtu(area.ids()),
            DREQ => CmMessage::Dreq(Dreq { ids: area.ids(), remote_qpn: area.u24(8) }),
            DREP => CmMessage::Drep(area.ids()),
            SIDR_REQ => CmMessage::SidrReq(SidrReq {
                request_id: area.u32(0),
                pkey: area.u16(4),
                service_id: area.u64(8),
                private_data: area.bytes(16),
            }),
            SIDR_REP => CmMessage::SidrRep(SidrRep {
                request_id: area.u32(0),
                status: SidrStatus(area.u8(4)),
                info_len: area.u8(5).min(SIDR_INFO_LEN as u8),
                qpn: area.u24(8),
                service_id: area.u64(12),
                qkey: area.u32(20),
                info: area.bytes(24),
                private_data: area.bytes(96),
            }),
            other => return Err(MadError::Attribute(other)),
        };
        Ok(Self { transaction: header.transaction, message })
    }

    /// Encodes the MAD. A number whose field has fewer bits than its type is truncated to the low
    /// bits.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let attribute = match self.message {
            CmMessage::Req(_) => REQ,
            CmMessage::Mra(_) => MRA,
            CmMessage::Rej(_) => REJ,
            CmMessage::Rep(_) => REP,
            CmMessage::Rtu(_) => RTU,
            CmMessage::Dreq(_) => DREQ,
            CmMessage::Drep(_) => DREP,
            CmMessage::SidrReq(_) => SIDR_REQ,
            CmMessage::SidrRep(_) => SIDR_REP,
        };
        let mut mad = MadHeader { transaction: self.transaction, attribute, modifier: 0 }.emit();
        let mut out = Out(&mut mad);
        match &self.message {
            CmMessage::Req(req) => out.req(req),
            CmMessage::Mra(mra) => {
                out.ids(Ids { local: mra.local_id, remote: mra.remote_id });
                out.put(8, &[mra.answered.0 << 6, mra.service_timeout << 3]);
            }
            CmMessage::Rej(rej) => {
                out.ids(Ids { local: rej.local_id, remote: rej.remote_id });
                out.put(8, &[rej.answered.0 << 6, rej.info_len << 1]);
                out.put(10, &rej.reason.to_be_bytes());
                out.put(12, &rej.info);
                out.put(84, &rej.private_data);
            }
            CmMessage::Rep(rep) => out.rep(rep),
            CmMessage::Rtu(ids) | CmMessage::Drep(ids) => out.ids(*ids),
            CmMessage::Dreq(dreq) => {
                out.ids(dreq.ids);
                out.u24(8, dreq.remote_qpn);
            }
            CmMessage::SidrReq(req) => {
                out.put(0, &req.request_id.to_be_bytes());
                out.put(4, &req.pkey.to_be_bytes());
                out.put(8, &req.service_id.to_be_bytes());
                out.put(16, &req.private_data);
            }
            CmMessage::SidrRep(rep) => {
                out.put(0, &rep.request_id.to_be_bytes());
                out.put(4, &[rep.status.0, rep.info_len]);
                out.u24(8, rep.qpn);
                out.put(12, &rep.service_id.to_be_bytes());
                out.put(20, &rep.qkey.to_be_bytes());
                out.put(24, &rep.info);
                out.put(96, &rep.private_data);
            }
        }
        mad
    }
}

/// One line for logs.
///
/// ```text
/// REQ 1a2b3c4d service 0x1061c06 qp 0x11 psn 0x715ee4 10.77.0.3->10.77.0.2 mtu 3
/// REJ 0->1a2b3c4d reason 8
/// ```
impl fmt::Display for CmMad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            CmMessage::Req(req) => write!(
                f,
                "REQ {:x} service {:#x} qp {:#x} psn {:#x} {}->{} mtu {}",
                req.local_id,
                req.service_id,
                req.qpn,
                req.starting_psn,
                req.local_gid.ip(),
                req.remote_gid.ip(),
                req.mtu,
            ),
            CmMessage::Mra(mra) => write!(
                f,
                "MRA {:x}->{:x} of {} timeout {}",
                mra.local_id, mra.remote_id, mra.answered.0, mra.service_timeout
            ),
            CmMessage::Rej(rej) => {
                write!(f, "REJ {:x}->{:x} reason {}", rej.local_id, rej.remote_id, rej.reason)
            }
            CmMessage::Rep(rep) => write!(
                f,
                "REP {:x}->{:x} qp {:#x} psn {:#x}",
                rep.local_id, rep.remote_id, rep.qpn, rep.starting_psn
            ),
            CmMessage::Rtu(Ids { local, remote }) => write!(f, "RTU {local:x}->{remote:x}"),
            CmMessage::Dreq(Dreq { ids: Ids { local, remote }, remote_qpn }) => {
                write!(f, "DREQ {local:x}->{remote:x} qp {remote_qpn:#x}")
            }
            CmMessage::Drep(Ids { local, remote }) => write!(f, "DREP {local:x}->{remote:x}"),
            CmMessage::SidrReq(req) => {
                write!(f, "SIDR_REQ {:x} service {:#x}", req.request_id, req.service_id)
            }
            CmMessage::SidrRep(rep) => write!(
                f,
                "SIDR_REP {:x} status {} service {:#x} qp {:#x}",
                rep.request_id, rep.status.0, rep.service_id, rep.qpn
            ),
        }
    }
}

/// Reader of fields. All offsets are constants of this file and lie within the area.
#[derive(Clone, Copy)]
struct Area<'a>(&'a [u8; MAD_MESSAGE_LEN]);

impl Area<'_> {
    fn bytes<const N: usize>(self, at: usize) -> [u8; N] {
        let field = self.0.get(at..).and_then(|rest| rest.first_chunk());
        debug_assert!(field.is_some(), "the layouts end where the area does");
        *field.unwrap_or(&[0; N])
    }

    fn u8(self, at: usize) -> u8 {
        let [byte] = self.bytes(at);
        byte
    }

    fn u16(self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }

    fn u24(self, at: usize) -> u32 {
        let [a, b, c] = self.bytes(at);
        u32::from_be_bytes([0, a, b, c])
    }

    fn u32(self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn u64(self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }

    fn ids(self) -> Ids {
        Ids { local: self.u32(0), remote: self.u32(4) }
    }

    fn req(self) -> Req {
        Req {
            local_id: self.u32(0),
            vendor: self.u24(5),
            service_id: self.u64(8),
            guid: self.u64(16),
            qpn: self.u24(32),
            responder_resources: self.u8(35),
            initiator_depth: self.u8(39),
            remote_timeout: self.u8(43) >> 3,
            transport: self.u8(43) >> 1 & 3,
            flow_control: self.u8(43) & 1 != 0,
            starting_psn: self.u24(44),
            local_timeout: self.u8(47) >> 3,
            retry_count: self.u8(47) & 7,
            pkey: self.u16(48),
            mtu: self.u8(50) >> 4,
            rnr_retry_count: self.u8(50) & 7,
            max_retries: self.u8(51) >> 4,
            srq: self.u8(51) & 8 != 0,
            local_lid: self.u16(52),
            remote_lid: self.u16(54),
            local_gid: Gid(self.bytes(56)),
            remote_gid: Gid(self.bytes(72)),
            flow_label: self.u24(88) >> 4,
            packet_rate: self.u8(91) & 0x3f,
            traffic_class: self.u8(92),
            hop_limit: self.u8(93),
            service_level: self.u8(94) >> 4,
            subnet_local: self.u8(94) & 8 != 0,
            ack_timeout: self.u8(95) >> 3,
            private_data: self.bytes(140),
        }
    }

    fn rep(self) -> Rep {
        Rep {
            local_id: self.u32(0),
            remote_id: self.u32(4),
            vendor: u32::from_be_bytes([0, self.u8(15), self.u8(19), self.u8(23)]),
            qpn: self.u24(12),
            starting_psn: self.u24(20),
            responder_resources: self.u8(24),
            initiator_depth: self.u8(25),
            ack_delay: self.u8(26) >> 3,
            flow_control: self.u8(26) & 1 != 0,
            rnr_retry_count: self.u8(27) >> 5,
            srq: self.u8(27) & 0x10 != 0,
            guid: self.u64(28),
            private_data: self.bytes(36),
        }
    }
}

/// Writer of fields to the message area of a MAD.
struct Out<'a>(&'a mut [u8; MAD_LEN]);

impl Out<'_> {
    fn put<const N: usize>(&mut self, at: usize, field: &[u8; N]) {
        let to = self.0.get_mut(MAD_HEADER_LEN + at..).and_then(|rest| rest.first_chunk_mut());
        debug_assert!(to.is_some(), "the layouts end where the area does");
        if let Some(to) = to {
            *to = *field;
        }
    }

    fn u24(&mut self, at: usize, value: u32) {
        let [_, field @ ..] = value.to_be_bytes();
        self.put::<3>(at, &field);
    }

    fn ids(&mut self, ids: Ids) {
        self.put(0, &ids.local.to_be_bytes());
        self.put(4, &ids.remote.to_be_bytes());
    }

    fn req(&mut self, req: &Req) {
        self.put(0, &req.local_id.to_be_bytes());
        self.u24(5, req.vendor);
        self.put(8, &req.service_id.to_be_bytes());
        self.put(16, &req.guid.to_be_bytes());
        self.u24(32, req.qpn);
        self.put(35, &[req.responder_resources]);
        self.put(39, &[req.initiator_depth]);
        let transport = (req.transport & 3) << 1;
        self.put(43, &[req.remote_timeout << 3 | transport | u8::from(req.flow_control)]);
        self.u24(44, req.starting_psn);
        self.put(47, &[req.local_timeout << 3 | req.retry_count & 7]);
        self.put(48, &req.pkey.to_be_bytes());
        self.put(50, &[req.mtu << 4 | req.rnr_retry_count & 7]);
        self.put(51, &[req.max_retries << 4 | u8::from(req.srq) << 3]);
        self.put(52, &req.local_lid.to_be_bytes());
        self.put(54, &req.remote_lid.to_be_bytes());
        self.put(56, &req.local_gid.0);
        self.put(72, &req.remote_gid.0);
        self.u24(88, req.flow_label << 4);
        self.put(91, &[req.packet_rate & 0x3f, req.traffic_class, req.hop_limit]);
        self.put(94, &[req.service_level << 4 | u8::from(req.subnet_local) << 3]);
        self.put(95, &[req.ack_timeout << 3]);
        self.put(140, &req.private_data);
    }

    fn rep(&mut self, rep: &Rep) {
        self.put(0, &rep.local_id.to_be_bytes());
        self.put(4, &rep.remote_id.to_be_bytes());
        self.u24(12, rep.qpn);
        self.u24(20, rep.starting_psn);
        let [_, high, middle, low] = rep.vendor.to_be_bytes();
        self.put(15, &[high]);
        self.put(19, &[middle]);
        self.put(23, &[low]);
        self.put(24, &[rep.responder_resources, rep.initiator_depth]);
        self.put(26, &[rep.ack_delay << 3 | u8::from(rep.flow_control)]);
        self.put(27, &[rep.rnr_retry_count << 5 | u8::from(rep.srq) << 4]);
        self.put(28, &rep.guid.to_be_bytes());
        self.put(36, &rep.private_data);
    }
}
