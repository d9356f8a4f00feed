//! Management datagrams: 256 bytes, of which the first 24 are the header [GSI-2].
//!
//! ```text
//!        0       1       2       3       4       5       6       7
//!    +-------+-------+-------+-------+-------+-------+-------+-------+
//!  0 | base 1|class 7| vers 2|method | status 0      |class specific |
//!  8 |                       transaction id                          |
//! 16 | attribute id  | reserved 0    |      attribute modifier       |
//!    +-------+-------+-------+-------+-------+-------+-------+-------+
//! 24 |                 message, 232 bytes                            |
//! ```

use core::fmt;

/// Bytes of a management datagram (MAD), always [GSI-1].
pub const MAD_LEN: usize = 256;
/// Length of the header of a MAD.
pub const MAD_HEADER_LEN: usize = 24;
/// Length of the message after the header.
pub const MAD_MESSAGE_LEN: usize = MAD_LEN - MAD_HEADER_LEN;
/// Queue pair of the general services interface, which sends and receives MADs [GSI-1].
pub const GSI_QPN: u32 = 1;
/// Queue key of the general services interface [GSI-1].
pub const GSI_QKEY: u32 = 0x8001_0000;

const BASE_VERSION: u8 = 1;
const CLASS_CM: u8 = 7;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 3;

/// Why bytes are not a message of the connection manager. Such a datagram is dropped [GSI-1]
/// [GSI-2] [CM-52].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MadError {
    /// The length is this, not 256 bytes.
    Length(usize),
    /// Base version, class and class version are these, not 1, 7, 2.
    Class([u8; 3]),
    /// The method is this, not Send.
    Method(u8),
    /// The attribute is this, which is no known message.
    Attribute(u16),
}

impl fmt::Display for MadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(got) => write!(f, "a MAD of {got} bytes instead of {MAD_LEN}"),
            Self::Class([base, class, version]) => {
                write!(f, "a MAD of version {base}, class {class}, class version {version}")
            }
            Self::Method(method) => write!(f, "a MAD of method {method}"),
            Self::Attribute(attribute) => write!(f, "a MAD of attribute {attribute:#06x}"),
        }
    }
}

impl core::error::Error for MadError {}

/// The variable fields of the header of a connection manager's MAD. The others are fixed, or
/// ignored on receipt (status, class specific) [GSI-2] [HDR-13].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MadHeader {
    /// Transaction ID, which a reply repeats [GSI-4].
    pub transaction: u64,
    /// Attribute ID: the kind of message [GSI-3].
    pub attribute: u16,
    /// Attribute modifier; 0 unless enhanced connection establishment (ECE) is used.
    pub modifier: u32,
}

impl MadHeader {
    /// Parses a MAD into its header and its message.
    ///
    /// # Errors
    /// [`MadError`], except [`MadError::Attribute`]: any attribute is accepted.
    pub fn parse(bytes: &[u8]) -> Result<(Self, &[u8; MAD_MESSAGE_LEN]), MadError> {
        let length = MadError::Length(bytes.len());
        let mad: &[u8; MAD_LEN] = bytes.try_into().map_err(|_| length)?;
        #[rustfmt::skip]
        let [
            base, class, version, method, _, _, _, _,
            t0, t1, t2, t3, t4, t5, t6, t7,
            a0, a1, _, _, m0, m1, m2, m3,
            ..
        ] = *mad;
        if [base, class, version] != [BASE_VERSION, CLASS_CM, CLASS_VERSION] {
            return Err(MadError::Class([base, class, version]));
        }
        if method != METHOD_SEND {
            return Err(MadError::Method(method));
        }
        let header = Self {
            transaction: u64::from_be_bytes([t0, t1, t2, t3, t4, t5, t6, t7]),
            attribute: u16::from_be_bytes([a0, a1]),
            modifier: u32::from_be_bytes([m0, m1, m2, m3]),
        };
        Ok((header, mad.last_chunk().ok_or(length)?))
    }

    /// Encodes a MAD whose message is all zero.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut mad = [0; MAD_LEN];
        mad[..4].copy_from_slice(&[BASE_VERSION, CLASS_CM, CLASS_VERSION, METHOD_SEND]);
        mad[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&self.attribute.to_be_bytes());
        mad[20..24].copy_from_slice(&self.modifier.to_be_bytes());
        mad
    }
}
