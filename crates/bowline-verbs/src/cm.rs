//! Connections in the terms of rdma_cm: reliable ones, port space TCP, and datagram services, port
//! space UDP, of which only the queue pair is looked up.

use core::fmt;
use std::net::SocketAddr;

use crate::Qpn;

/// Id of a listener or connection of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmId(pub u32);

/// Connection parameters of one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnParam {
    /// The queue pair of this side; it must be in RESET or INIT, and goes to RTS.
    pub qpn: Qpn,
    /// The program leads the queue pair through its states itself, by
    /// [`Device::connection_attr`](crate::Device::connection_attr): the device leaves it as it is,
    /// and the answer to a connect is [`CmEvent::Responded`].
    pub is_led: bool,
    /// Private data for the peer: at most 56 bytes with a connect, 196 with an accept [CMA-5].
    pub private_data: Vec<u8>,
    /// Most READs and atomics that this side answers concurrently.
    pub responder_resources: u8,
    /// Most READs and atomics that this side has outstanding.
    pub initiator_depth: u8,
    /// Retransmissions, at most 7.
    pub retry_count: u8,
    /// Retransmissions after RNR NAKs; 7: for ever.
    pub rnr_retry_count: u8,
    /// Code of the delay requested by RNR NAKs, when no receive is posted [RSP-13], [RSP-23].
    pub min_rnr_timer: u8,
    /// Type of service.
    pub tos: u8,
    /// Code of the queue pair's acknowledgement timeout; `None`: what the connection messages say
    /// [CM-33].
    pub ack_timeout: Option<u8>,
}

impl Default for ConnParam {
    fn default() -> Self {
        Self {
            qpn: Qpn(0),
            is_led: false,
            private_data: Vec::new(),
            responder_resources: 16,
            initiator_depth: 16,
            retry_count: 7,
            rnr_retry_count: 7,
            min_rnr_timer: 12,
            tos: 0,
            ack_timeout: None,
        }
    }
}

/// A connection request of a peer, or the lookup of a datagram service, which has no numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnRequest {
    /// The listener that received the request.
    pub listener: CmId,
    /// Local address and port.
    pub local: SocketAddr,
    /// Remote address and port.
    pub remote: SocketAddr,
    /// The peer's private data, padded with zeroes: 56 bytes [CMA-5], or 180 of a lookup [CMA-22].
    pub private_data: Vec<u8>,
    /// Most READs and atomics that the peer answers concurrently: an upper bound of a useful
    /// `initiator_depth`.
    pub responder_resources: u8,
    /// Most READs and atomics that the peer has outstanding: the `responder_resources` it asks for.
    pub initiator_depth: u8,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
}

/// Reason of a refusal [CM-10]; [`CONSUMER`](Self::CONSUMER) means that the program refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// There is no such queue pair.
    pub const NO_QP: Self = Self(1);
    /// The other side has given up.
    pub const TIMEOUT: Self = Self(4);
    /// There is no listener at this port.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// Not a reliable connection.
    pub const INVALID_TRANSPORT: Self = Self(9);
    /// The queue pair is known from a connection that has not ended.
    pub const STALE_CONNECTION: Self = Self(10);
    /// Addresses that do not match each other, or cannot be reached.
    pub const INVALID_GID: Self = Self(12);
    /// The path MTU cannot be carried.
    pub const INVALID_MTU: Self = Self(26);
    /// Refused by the program.
    pub const CONSUMER: Self = Self(28);
    /// Refused for its vendor's options.
    pub const VENDOR_OPTION: Self = Self(35);

    /// Returns the meaning of the number; `None` for an unassigned number.
    pub const fn text(self) -> Option<&'static str> {
        Some(match self.0 {
            1 => "no such queue pair",
            2 => "no such end-to-end context",
            3 => "no resources",
            4 => "timed out",
            5 => "request not supported",
            6 => "invalid communication id",
            7 => "invalid communication instance",
            8 => "nobody listens at this port",
            9 => "invalid transport service",
            10 => "stale connection: the peer still has an earlier one of this queue pair",
            11 => "the datagram channel does not exist",
            12 => "invalid address",
            13 => "invalid local identifier",
            14 => "invalid service level",
            15 => "invalid traffic class",
            16 => "invalid hop limit",
            17 => "invalid packet rate",
            18 => "invalid alternate address",
            19 => "invalid alternate local identifier",
            20 => "invalid alternate service level",
            21 => "invalid alternate traffic class",
            22 => "invalid alternate hop limit",
            23 => "invalid alternate packet rate",
            24 => "connect elsewhere",
            25 => "connect to another port",
            26 => "invalid path MTU",
            27 => "too few responder resources",
            28 => "refused by the program",
            29 => "invalid RNR retry count",
            30 => "duplicate communication id",
            31 => "invalid class version",
            32 => "invalid flow label",
            33 => "invalid alternate flow label",
            35 => "vendor option not supported",
            _ => return None,
        })
    }
}

/// Meaning and number, for logs: `nobody listens at this port (8)`.
impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} ({})", self.0),
            None => write!(f, "reason {}", self.0),
        }
    }
}

/// Kind of a connection manager message, for diagnostic tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
#[allow(missing_docs, reason = "the field's own names")]
pub enum CmMessage {
    Req = 0x10,
    Mra = 0x11,
    Rej = 0x12,
    Rep = 0x13,
    Rtu = 0x14,
    Dreq = 0x15,
    Drep = 0x16,
    SidrReq = 0x17,
    SidrRep = 0x18,
}

/// Event of a connection [CMA-14].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmEvent {
    /// A peer wants to connect, or looks up the datagram service of a listener: accept or reject
    /// `id`.
    ConnectRequest {
        /// The new connection.
        id: CmId,
        /// The peer and its proposal.
        request: ConnRequest,
    },
    /// The connection is established; its queue pair is in RTS.
    Established {
        /// The connection.
        id: CmId,
        /// 196 bytes on the connecting side [CMA-5], else empty.
        private_data: Vec<u8>,
        /// Agreed number of READs and atomics that this side answers concurrently.
        responder_resources: u8,
        /// Agreed number of READs and atomics that this side has outstanding.
        initiator_depth: u8,
    },
    /// The peer accepts a connect whose queue pair the program leads: make it ready, then call
    /// [`Device::establish`](crate::Device::establish).
    Responded {
        /// The connection.
        id: CmId,
        /// 196 bytes.
        private_data: Vec<u8>,
        /// Agreed number of READs and atomics that this side answers concurrently.
        responder_resources: u8,
        /// Agreed number of READs and atomics that this side has outstanding.
        initiator_depth: u8,
        /// The peer's queue pair.
        remote_qpn: Qpn,
    },
    /// A datagram service was found.
    Found {
        /// The lookup, which is over.
        id: CmId,
        /// 136 bytes.
        private_data: Vec<u8>,
        /// The service's queue pair.
        qpn: Qpn,
        /// Its queue key.
        qkey: u32,
    },
    /// A datagram service was not found; status as in the answer to the lookup [CM-60].
    NotFound {
        /// The lookup, which is over.
        id: CmId,
        /// Why.
        status: u8,
        /// 136 bytes.
        private_data: Vec<u8>,
    },
    /// The peer refused.
    Rejected {
        /// The connection.
        id: CmId,
        /// Why.
        reason: RejectReason,
        /// 148 bytes.
        private_data: Vec<u8>,
    },
    /// The peer did not answer.
    Unreachable {
        /// The connection.
        id: CmId,
    },
    /// The peer, or this side, has ended the connection; its queue pair is in error.
    Disconnected {
        /// The connection.
        id: CmId,
    },
    /// TIMEWAIT, in which late packets may arrive, is over; the queue pair's number is free.
    TimewaitExit {
        /// The connection.
        id: CmId,
    },
}

impl CmEvent {
    /// Returns the connection of the event.
    pub const fn id(&self) -> CmId {
        match self {
            Self::ConnectRequest { id, .. }
            | Self::Established { id, .. }
            | Self::Responded { id, .. }
            | Self::Found { id, .. }
            | Self::NotFound { id, .. }
            | Self::Rejected { id, .. }
            | Self::Unreachable { id }
            | Self::Disconnected { id }
            | Self::TimewaitExit { id } => *id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RejectReason;

    // tests [CM-10]
    #[test]
    fn reasons_are_told_in_words() {
        assert_eq!(RejectReason::INVALID_SERVICE_ID.to_string(), "nobody listens at this port (8)");
        assert_eq!(RejectReason::CONSUMER.to_string(), "refused by the program (28)");
        assert_eq!(RejectReason(34).to_string(), "reason 34");
        let known = (0..=u16::MAX).filter(|number| RejectReason(*number).text().is_some());
        assert!(known.eq((1..=33).chain([35])));
    }
}
