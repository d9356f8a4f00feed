//! Immediates: four bits of type, 28 bits of payload [RT-14].

use core::fmt;

use super::PathLife;

const TYPE_SHIFT: u32 = 28;
const PAYLOAD_MASK: u32 = (1 << TYPE_SHIFT) - 1;
const IO_REQ: u32 = 0;
const IO_RSP: u32 = 1;
const IO_RSP_W_INV: u32 = 2;
const GIVEN_UP: u32 = 3;
const HB_MSG: u32 = 8;
const HB_ACK: u32 = 9;
/// Bits of a message id in a reply [RT-17].
const ID_BITS: u32 = 19;
const ID_MASK: u32 = (1 << ID_BITS) - 1;
/// What is said instead of an error that does not fit.
const EIO: u16 = 5;

/// Largest magnitude of an errno in a reply [RT-17].
pub const ERRNO_MAX: u16 = 0x1ff;

/// The number beside a SEND or an RDMA WRITE: what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Imm {
    /// A request lies in a chunk; the payload is read by [`Geometry::split`].
    ///
    /// [`Geometry::split`]: super::Geometry::split
    #[doc(alias = "RTRS_IO_REQ_IMM")]
    Request(u32),
    /// A request is done [RT-17].
    #[doc(alias = "RTRS_IO_RSP_IMM")]
    Done {
        /// Index of its chunk, below 2^19.
        id: u32,
        /// Magnitude of the error, 0 for success.
        errno: u16,
        /// The key of the client's descriptor was invalidated before.
        #[doc(alias = "RTRS_IO_RSP_W_INV_IMM")]
        invalidated: bool,
    },
    /// The client has given up this path of the session. Only between those who have agreed on it;
    /// to others it is of a type nobody uses [RT-101].
    GivenUp(PathLife),
    /// Asks whether the peer is alive [RT-62].
    #[doc(alias = "RTRS_HB_MSG_IMM")]
    HbMsg,
    /// Answers [`Self::HbMsg`].
    #[doc(alias = "RTRS_HB_ACK_IMM")]
    HbAck,
    /// A number of a type nobody uses; a receiver ignores it [RT-14].
    Unknown(u32),
}

impl Imm {
    /// Reads an immediate. The payload of heartbeats is not looked at.
    pub const fn from_u32(imm: u32) -> Self {
        let payload = imm & PAYLOAD_MASK;
        match imm >> TYPE_SHIFT {
            IO_REQ => Self::Request(payload),
            kind @ (IO_RSP | IO_RSP_W_INV) => Self::Done {
                id: payload & ID_MASK,
                errno: (payload >> ID_BITS) as u16,
                invalidated: kind == IO_RSP_W_INV,
            },
            GIVEN_UP => Self::GivenUp(PathLife::from_u32(payload)),
            HB_MSG => Self::HbMsg,
            HB_ACK => Self::HbAck,
            _ => Self::Unknown(imm),
        }
    }

    /// Writes an immediate. An errno beyond [`ERRNO_MAX`] is sent as EIO: cut off, it could look
    /// like success.
    pub const fn to_u32(self) -> u32 {
        match self {
            Self::Request(payload) => IO_REQ << TYPE_SHIFT | payload & PAYLOAD_MASK,
            Self::Done { id, errno, invalidated } => {
                let kind = if invalidated { IO_RSP_W_INV } else { IO_RSP };
                let errno = if errno > ERRNO_MAX { EIO } else { errno };
                kind << TYPE_SHIFT | (errno as u32) << ID_BITS | id & ID_MASK
            }
            Self::GivenUp(life) => GIVEN_UP << TYPE_SHIFT | life.to_u32(),
            Self::HbMsg => HB_MSG << TYPE_SHIFT,
            Self::HbAck => HB_ACK << TYPE_SHIFT,
            Self::Unknown(imm) => imm,
        }
    }
}

impl fmt::Display for Imm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(payload) => write!(f, "request {payload:#09x}"),
            Self::Done { id, errno, invalidated } => {
                write!(f, "done {id} errno {errno}")?;
                f.write_str(if *invalidated { " invalidated" } else { "" })
            }
            Self::GivenUp(life) => write!(f, "given up {:#09x}", life.to_u32()),
            Self::HbMsg => f.write_str("heartbeat"),
            Self::HbAck => f.write_str("heartbeat ack"),
            Self::Unknown(imm) => write!(f, "unknown immediate {imm:#010x}"),
        }
    }
}
