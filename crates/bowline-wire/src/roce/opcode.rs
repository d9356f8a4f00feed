//! Opcodes, and the headers and payload of each [HDR-5].

use core::fmt;

use super::header::{
    AETH_LEN, ATOMIC_ACK_ETH_LEN, ATOMIC_ETH_LEN, CNP_RESERVED_LEN, DETH_LEN, FETH_LEN, IETH_LEN,
    IMM_LEN, RETH_LEN,
};

/// Opcode: the first byte of a packet. The values are those on the wire; names without a service
/// are those of RC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Opcode {
    /// First packet of a SEND of several.
    SendFirst = 0x00,
    /// Middle packet of a SEND.
    SendMiddle = 0x01,
    /// Last packet of a SEND.
    SendLast = 0x02,
    /// Last packet of a SEND, with an immediate.
    SendLastImm = 0x03,
    /// A SEND of one packet.
    SendOnly = 0x04,
    /// A SEND of one packet, with an immediate.
    SendOnlyImm = 0x05,
    /// First packet of an RDMA WRITE of several.
    WriteFirst = 0x06,
    /// Middle packet of an RDMA WRITE.
    WriteMiddle = 0x07,
    /// Last packet of an RDMA WRITE.
    WriteLast = 0x08,
    /// Last packet of an RDMA WRITE, with an immediate.
    WriteLastImm = 0x09,
    /// An RDMA WRITE of one packet.
    WriteOnly = 0x0a,
    /// An RDMA WRITE of one packet, with an immediate.
    WriteOnlyImm = 0x0b,
    /// An RDMA READ.
    ReadRequest = 0x0c,
    /// First packet of the answer to a READ.
    ReadResponseFirst = 0x0d,
    /// Middle packet of the answer to a READ; the only response without AETH.
    ReadResponseMiddle = 0x0e,
    /// Last packet of the answer to a READ.
    ReadResponseLast = 0x0f,
    /// An answer of one packet.
    ReadResponseOnly = 0x10,
    /// Acknowledgement of SENDs and WRITEs, and every NAK.
    Acknowledge = 0x11,
    /// Answer to an atomic operation.
    AtomicAcknowledge = 0x12,
    /// Atomic compare and swap.
    CompareSwap = 0x13,
    /// Atomic fetch and add.
    FetchAdd = 0x14,
    /// Last packet of a SEND, with a key to invalidate.
    SendLastInvalidate = 0x16,
    /// A SEND of one packet, with a key to invalidate.
    SendOnlyInvalidate = 0x17,
    /// Flush to a placement domain; optional.
    Flush = 0x1c,
    /// Atomic write of eight bytes; optional.
    AtomicWrite = 0x1d,
    /// First packet of a SEND of several, over UC.
    UcSendFirst = 0x20,
    /// Middle packet of a SEND, over UC.
    UcSendMiddle = 0x21,
    /// Last packet of a SEND, over UC.
    UcSendLast = 0x22,
    /// Last packet of a SEND, with an immediate, over UC.
    UcSendLastImm = 0x23,
    /// A SEND of one packet, over UC.
    UcSendOnly = 0x24,
    /// A SEND of one packet, with an immediate, over UC.
    UcSendOnlyImm = 0x25,
    /// First packet of an RDMA WRITE of several, over UC.
    UcWriteFirst = 0x26,
    /// Middle packet of an RDMA WRITE, over UC.
    UcWriteMiddle = 0x27,
    /// Last packet of an RDMA WRITE, over UC.
    UcWriteLast = 0x28,
    /// Last packet of an RDMA WRITE, with an immediate, over UC.
    UcWriteLastImm = 0x29,
    /// An RDMA WRITE of one packet, over UC.
    UcWriteOnly = 0x2a,
    /// An RDMA WRITE of one packet, with an immediate, over UC.
    UcWriteOnlyImm = 0x2b,
    /// A datagram.
    UdSendOnly = 0x64,
    /// A datagram with an immediate.
    UdSendOnlyImm = 0x65,
    /// Congestion notification of a NIC; never an error [HDR-14].
    Cnp = 0x81,
}

/// Allowed payload length of a packet [HDR-5] [HDR-11].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadRule {
    /// No payload.
    Nothing,
    /// Exactly the path MTU.
    Full,
    /// 1 byte to the path MTU.
    Rest,
    /// 0 bytes to the path MTU.
    UpToMtu,
    /// Exactly 8 bytes.
    Eight,
}

impl PayloadRule {
    /// Tells whether `len` payload bytes are allowed with a path MTU of `mtu` bytes.
    pub const fn allows(self, len: usize, mtu: usize) -> bool {
        match self {
            Self::Nothing => len == 0,
            Self::Full => len == mtu,
            Self::Rest => len != 0 && len <= mtu,
            Self::UpToMtu => len <= mtu,
            Self::Eight => len == 8,
        }
    }
}

/// Transport service of a packet: the top three bits of the opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram, and the general services of queue pair 1.
    Ud,
    /// No queue pair: congestion notification.
    Congestion,
}

impl Opcode {
    /// All opcodes, in numerical order.
    pub const ALL: [Self; 40] = [
        Self::SendFirst,
        Self::SendMiddle,
        Self::SendLast,
        Self::SendLastImm,
        Self::SendOnly,
        Self::SendOnlyImm,
        Self::WriteFirst,
        Self::WriteMiddle,
        Self::WriteLast,
        Self::WriteLastImm,
        Self::WriteOnly,
        Self::WriteOnlyImm,
        Self::ReadRequest,
        Self::ReadResponseFirst,
        Self::ReadResponseMiddle,
        Self::ReadResponseLast,
        Self::ReadResponseOnly,
        Self::Acknowledge,
        Self::AtomicAcknowledge,
        Self::CompareSwap,
        Self::FetchAdd,
        Self::SendLastInvalidate,
        Self::SendOnlyInvalidate,
        Self::Flush,
        Self::AtomicWrite,
        Self::UcSendFirst,
        Self::UcSendMiddle,
        Self::UcSendLast,
        Self::UcSendLastImm,
        Self::UcSendOnly,
        Self::UcSendOnlyImm,
        Self::UcWriteFirst,
        Self::UcWriteMiddle,
        Self::UcWriteLast,
        Self::UcWriteLastImm,
        Self::UcWriteOnly,
        Self::UcWriteOnlyImm,
        Self::UdSendOnly,
        Self::UdSendOnlyImm,
        Self::Cnp,
    ];

    /// Decodes the byte on the wire; `None` for opcodes that HDR-5 and HDR-6 do not list, among
    /// them the reserved 0x15.
    pub const fn from_u8(byte: u8) -> Option<Self> {
        Some(match byte {
            0x00 => Self::SendFirst,
            0x01 => Self::SendMiddle,
            0x02 => Self::SendLast,
            0x03 => Self::SendLastImm,
            0x04 => Self::SendOnly,
            0x05 => Self::SendOnlyImm,
            0x06 => Self::WriteFirst,
            0x07 => Self::WriteMiddle,
            0x08 => Self::WriteLast,
            0x09 => Self::WriteLastImm,
            0x0a => Self::WriteOnly,
            0x0b => Self::WriteOnlyImm,
            0x0c => Self::ReadRequest,
            0x0d => Self::ReadResponseFirst,
            0x0e => Self::ReadResponseMiddle,
            0x0f => Self::ReadResponseLast,
            0x10 => Self::ReadResponseOnly,
            0x11 => Self::Acknowledge,
            0x12 => Self::AtomicAcknowledge,
            0x13 => Self::CompareSwap,
            0x14 => Self::FetchAdd,
            0x16 => Self::SendLastInvalidate,
            0x17 => Self::SendOnlyInvalidate,
            0x1c => Self::Flush,
            0x1d => Self::AtomicWrite,
            0x20 => Self::UcSendFirst,
            0x21 => Self::UcSendMiddle,
            0x22 => Self::UcSendLast,
            0x23 => Self::UcSendLastImm,
            0x24 => Self::UcSendOnly,
            0x25 => Self::UcSendOnlyImm,
            0x26 => Self::UcWriteFirst,
            0x27 => Self::UcWriteMiddle,
            0x28 => Self::UcWriteLast,
            0x29 => Self::UcWriteLastImm,
            0x2a => Self::UcWriteOnly,
            0x2b => Self::UcWriteOnlyImm,
            0x64 => Self::UdSendOnly,
            0x65 => Self::UdSendOnlyImm,
            0x81 => Self::Cnp,
            _ => return None,
        })
    }

    /// Returns the byte on the wire.
    pub const fn to_u8(self) -> u8 {
        self as u8
    }

    /// Returns the opcode of the same operation over RC, where UC has it too [HDR-6]; any other one
    /// unchanged.
    const fn over_rc(self) -> Self {
        match self {
            Self::UcSendFirst => Self::SendFirst,
            Self::UcSendMiddle => Self::SendMiddle,
            Self::UcSendLast => Self::SendLast,
            Self::UcSendLastImm => Self::SendLastImm,
            Self::UcSendOnly => Self::SendOnly,
            Self::UcSendOnlyImm => Self::SendOnlyImm,
            Self::UcWriteFirst => Self::WriteFirst,
            Self::UcWriteMiddle => Self::WriteMiddle,
            Self::UcWriteLast => Self::WriteLast,
            Self::UcWriteLastImm => Self::WriteLastImm,
            Self::UcWriteOnly => Self::WriteOnly,
            Self::UcWriteOnlyImm => Self::WriteOnlyImm,
            _ => self,
        }
    }

    /// Returns the opcode of the same operation over UC [HDR-6]; `None` if UC does not have it.
    pub const fn over_uc(self) -> Option<Self> {
        Some(match self {
            Self::SendFirst | Self::UcSendFirst => Self::UcSendFirst,
            Self::SendMiddle | Self::UcSendMiddle => Self::UcSendMiddle,
            Self::SendLast | Self::UcSendLast => Self::UcSendLast,
            Self::SendLastImm | Self::UcSendLastImm => Self::UcSendLastImm,
            Self::SendOnly | Self::UcSendOnly => Self::UcSendOnly,
            Self::SendOnlyImm | Self::UcSendOnlyImm => Self::UcSendOnlyImm,
            Self::WriteFirst | Self::UcWriteFirst => Self::UcWriteFirst,
            Self::WriteMiddle | Self::UcWriteMiddle => Self::UcWriteMiddle,
            Self::WriteLast | Self::UcWriteLast => Self::UcWriteLast,
            Self::WriteLastImm | Self::UcWriteLastImm => Self::UcWriteLastImm,
            Self::WriteOnly | Self::UcWriteOnly => Self::UcWriteOnly,
            Self::WriteOnlyImm | Self::UcWriteOnlyImm => Self::UcWriteOnlyImm,
            _ => return None,
        })
    }

    /// Returns the transport service of the opcode [RX-5].
    pub const fn service(self) -> Service {
        match self {
            Self::UcSendFirst
            | Self::UcSendMiddle
            | Self::UcSendLast
            | Self::UcSendLastImm
            | Self::UcSendOnly
            | Self::UcSendOnlyImm
            | Self::UcWriteFirst
            | Self::UcWriteMiddle
            | Self::UcWriteLast
            | Self::UcWriteLastImm
            | Self::UcWriteOnly
            | Self::UcWriteOnlyImm => Service::Uc,
            Self::UdSendOnly | Self::UdSendOnlyImm => Service::Ud,
            Self::Cnp => Service::Congestion,
            _ => Service::Rc,
        }
    }

    /// Tells whether such a packet goes from responder to requester [RX-5].
    pub const fn is_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseMiddle
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Acknowledge
                | Self::AtomicAcknowledge
        )
    }

    /// Tells whether such a packet goes to a responder, datagrams included. A CNP is neither
    /// request nor response.
    pub const fn is_request(self) -> bool {
        !self.is_response() && !matches!(self, Self::Cnp)
    }

    /// Tells whether this is part of a SEND, over RC or UC.
    pub const fn is_send(self) -> bool {
        matches!(
            self.over_rc(),
            Self::SendFirst
                | Self::SendMiddle
                | Self::SendLast
                | Self::SendLastImm
                | Self::SendLastInvalidate
                | Self::SendOnly
                | Self::SendOnlyImm
                | Self::SendOnlyInvalidate
        )
    }

    /// Tells whether this is part of an RDMA WRITE.
    pub const fn is_write(self) -> bool {
        matches!(
            self.over_rc(),
            Self::WriteFirst
                | Self::WriteMiddle
                | Self::WriteLast
                | Self::WriteLastImm
                | Self::WriteOnly
                | Self::WriteOnlyImm
        )
    }

    /// Tells whether this is an atomic operation that an ATOMIC ACKNOWLEDGE answers.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Tells whether this is part of the answer to a READ.
    pub const fn is_read_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseMiddle
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
        )
    }

    /// Tells whether this starts a message or an answer to a READ.
    pub const fn starts(self) -> bool {
        !self.is_middle() && !self.is_last()
    }

    /// Tells whether this ends a message or an answer to a READ.
    pub const fn ends(self) -> bool {
        !self.is_middle() && !self.is_first()
    }

    /// Tells whether this is the first of several packets.
    pub const fn is_first(self) -> bool {
        matches!(self.over_rc(), Self::SendFirst | Self::WriteFirst | Self::ReadResponseFirst)
    }

    /// Tells whether this is a middle packet.
    pub const fn is_middle(self) -> bool {
        matches!(self.over_rc(), Self::SendMiddle | Self::WriteMiddle | Self::ReadResponseMiddle)
    }

    /// Tells whether this is the last of several packets.
    pub const fn is_last(self) -> bool {
        matches!(
            self.over_rc(),
            Self::SendLast
                | Self::SendLastImm
                | Self::SendLastInvalidate
                | Self::WriteLast
                | Self::WriteLastImm
                | Self::ReadResponseLast
        )
    }

    /// Tells whether such a packet consumes a posted receive: "recv" of HDR-5 [RSP-7].
    pub const fn takes_receive(self) -> bool {
        matches!(
            self.over_rc(),
            Self::SendFirst
                | Self::SendOnly
                | Self::SendOnlyImm
                | Self::SendOnlyInvalidate
                | Self::WriteLastImm
                | Self::WriteOnlyImm
                | Self::UdSendOnly
                | Self::UdSendOnlyImm
        )
    }

    /// Tells whether such a packet completes a receive: "cqe" of HDR-5.
    pub const fn completes_receive(self) -> bool {
        matches!(
            self.over_rc(),
            Self::SendLast
                | Self::SendLastImm
                | Self::SendLastInvalidate
                | Self::SendOnly
                | Self::SendOnlyImm
                | Self::SendOnlyInvalidate
                | Self::WriteLastImm
                | Self::WriteOnlyImm
                | Self::UdSendOnly
                | Self::UdSendOnlyImm
        )
    }

    /// Tells whether there is an RDMA extended header.
    pub const fn has_reth(self) -> bool {
        matches!(
            self.over_rc(),
            Self::WriteFirst
                | Self::WriteOnly
                | Self::WriteOnlyImm
                | Self::ReadRequest
                | Self::Flush
                | Self::AtomicWrite
        )
    }

    /// Tells whether there is an acknowledge header.
    pub const fn has_aeth(self) -> bool {
        self.is_response() && !matches!(self, Self::ReadResponseMiddle)
    }

    /// Tells whether there is an immediate.
    pub const fn has_imm(self) -> bool {
        matches!(
            self.over_rc(),
            Self::SendLastImm
                | Self::SendOnlyImm
                | Self::WriteLastImm
                | Self::WriteOnlyImm
                | Self::UdSendOnlyImm
        )
    }

    /// Tells whether there is a key to invalidate.
    pub const fn has_ieth(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }

    /// Tells whether there is the header of an atomic request.
    pub const fn has_atomic(self) -> bool {
        self.is_atomic()
    }

    /// Tells whether there is the original value of an atomic operation.
    pub const fn has_atomic_ack(self) -> bool {
        matches!(self, Self::AtomicAcknowledge)
    }

    /// Tells whether there is a datagram header.
    pub const fn has_deth(self) -> bool {
        matches!(self, Self::UdSendOnly | Self::UdSendOnlyImm)
    }

    /// Tells whether there is a flush header.
    pub const fn has_feth(self) -> bool {
        matches!(self, Self::Flush)
    }

    /// Returns the length of the headers between the base transport header and the payload.
    pub const fn header_len(self) -> usize {
        (if self.has_reth() { RETH_LEN } else { 0 })
            + (if self.has_aeth() { AETH_LEN } else { 0 })
            + (if self.has_imm() { IMM_LEN } else { 0 })
            + (if self.has_ieth() { IETH_LEN } else { 0 })
            + (if self.has_atomic() { ATOMIC_ETH_LEN } else { 0 })
            + (if self.has_atomic_ack() { ATOMIC_ACK_ETH_LEN } else { 0 })
            + (if self.has_deth() { DETH_LEN } else { 0 })
            + (if self.has_feth() { FETH_LEN } else { 0 })
            + (if matches!(self, Self::Cnp) { CNP_RESERVED_LEN } else { 0 })
    }

    /// Returns the allowed payload length.
    pub const fn payload_rule(self) -> PayloadRule {
        match self.over_rc() {
            Self::SendFirst
            | Self::SendMiddle
            | Self::WriteFirst
            | Self::WriteMiddle
            | Self::ReadResponseFirst
            | Self::ReadResponseMiddle => PayloadRule::Full,
            Self::SendLast
            | Self::SendLastImm
            | Self::SendLastInvalidate
            | Self::WriteLast
            | Self::WriteLastImm
            | Self::ReadResponseLast => PayloadRule::Rest,
            Self::SendOnly
            | Self::SendOnlyImm
            | Self::SendOnlyInvalidate
            | Self::WriteOnly
            | Self::WriteOnlyImm
            | Self::ReadResponseOnly
            | Self::UdSendOnly
            | Self::UdSendOnlyImm => PayloadRule::UpToMtu,
            Self::AtomicWrite => PayloadRule::Eight,
            _ => PayloadRule::Nothing,
        }
    }
}

/// Displays the name of HDR-5 in lower case.
impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SendFirst => "send-first",
            Self::SendMiddle => "send-middle",
            Self::SendLast => "send-last",
            Self::SendLastImm => "send-last-imm",
            Self::SendOnly => "send-only",
            Self::SendOnlyImm => "send-only-imm",
            Self::WriteFirst => "write-first",
            Self::WriteMiddle => "write-middle",
            Self::WriteLast => "write-last",
            Self::WriteLastImm => "write-last-imm",
            Self::WriteOnly => "write-only",
            Self::WriteOnlyImm => "write-only-imm",
            Self::ReadRequest => "read-request",
            Self::ReadResponseFirst => "read-response-first",
            Self::ReadResponseMiddle => "read-response-middle",
            Self::ReadResponseLast => "read-response-last",
            Self::ReadResponseOnly => "read-response-only",
            Self::Acknowledge => "acknowledge",
            Self::AtomicAcknowledge => "atomic-acknowledge",
            Self::CompareSwap => "compare-swap",
            Self::FetchAdd => "fetch-add",
            Self::SendLastInvalidate => "send-last-inv",
            Self::SendOnlyInvalidate => "send-only-inv",
            Self::Flush => "flush",
            Self::AtomicWrite => "atomic-write",
            Self::UcSendFirst => "uc-send-first",
            Self::UcSendMiddle => "uc-send-middle",
            Self::UcSendLast => "uc-send-last",
            Self::UcSendLastImm => "uc-send-last-imm",
            Self::UcSendOnly => "uc-send-only",
            Self::UcSendOnlyImm => "uc-send-only-imm",
            Self::UcWriteFirst => "uc-write-first",
            Self::UcWriteMiddle => "uc-write-middle",
            Self::UcWriteLast => "uc-write-last",
            Self::UcWriteLastImm => "uc-write-last-imm",
            Self::UcWriteOnly => "uc-write-only",
            Self::UcWriteOnlyImm => "uc-write-only-imm",
            Self::UdSendOnly => "ud-send-only",
            Self::UdSendOnlyImm => "ud-send-only-imm",
            Self::Cnp => "cnp",
        })
    }
}
