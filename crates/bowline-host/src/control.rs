//! Control messages (`cmsghdr`) as programs give and take them, on 64-bit machines.

use std::time::SystemTime;

use bowline_base::Errno;
use bowline_rds::{Control, SendControl};

use crate::rdma::RDMA_ARGS_LEN;

const SOL_SOCKET: i32 = 1;
const SO_TIMESTAMP: i32 = 29;
const SOL_RDS: i32 = 276;
const HEAD: usize = 16;
const MSG_CTRUNC: i32 = 8;
const COOKIES_MAX: usize = 8;

/// Room in bytes that the end of one RDMA operation takes [RDMA-21].
pub(crate) const STATUS_ROOM: usize = 32;

/// Room in bytes that a record of finished zero-copy messages takes.
pub(crate) const COMPLETION_ROOM: usize = 56;

const fn aligned(len: usize) -> usize {
    (len + 7) & !7
}

/// A control message of a message to send, as a program gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Given<'a> {
    /// One that speaks of no memory.
    Plain(SendControl),
    /// Memory to register: `rds_get_mr_args`.
    Map(&'a [u8]),
    /// An RDMA operation: `rds_rdma_args`.
    Args(&'a [u8; RDMA_ARGS_LEN]),
    /// An atomic of this type: `rds_atomic_args`.
    Atomic(i32, &'a [u8]),
}

impl Given<'_> {
    /// What it asks for, without what is said of memory.
    pub(crate) const fn kind(&self) -> SendControl {
        match self {
            Self::Plain(control) => *control,
            Self::Map(_) => SendControl::RdmaMap,
            Self::Args(_) => SendControl::RdmaArgs,
            Self::Atomic(..) => SendControl::Atomic,
        }
    }
}

/// Reads the control messages of a message to send.
///
/// # Errors
/// EINVAL for a chain whose lengths are wrong and for arguments that are too short.
pub(crate) fn parse(mut bytes: &[u8]) -> Result<Vec<Given<'_>>, Errno> {
    let mut all = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEAD>() {
        let (len, rest) = head.split_at(8);
        let len = len.try_into().map_or(0, usize::from_ne_bytes);
        let word = |at: usize| rest[at..at + 4].try_into().map_or(0, i32::from_ne_bytes);
        let (level, kind) = (word(0), word(4));
        let data = bytes.get(HEAD..len).ok_or(Errno::EINVAL)?;
        if level == SOL_RDS {
            all.push(one(kind, data)?);
        }
        bytes = bytes.get(aligned(len)..).unwrap_or_default();
    }
    Ok(all)
}

fn one(kind: i32, data: &[u8]) -> Result<Given<'_>, Errno> {
    Ok(match kind {
        1 => Given::Args(data.first_chunk().ok_or(Errno::EINVAL)?),
        2 => {
            let key = data.first_chunk().ok_or(Errno::EINVAL)?;
            Given::Plain(SendControl::RdmaDest(u64::from_ne_bytes(*key)))
        }
        3 => Given::Map(data),
        6..=9 => Given::Atomic(kind, data),
        12 => {
            let cookie = data.first_chunk().ok_or(Errno::EINVAL)?;
            Given::Plain(SendControl::ZcopyCookie(u32::from_ne_bytes(*cookie)))
        }
        _ => Given::Plain(SendControl::Unknown(kind.cast_unsigned())),
    })
}

/// The control messages of a message that was received, in the room that the program has.
#[derive(Debug)]
pub(crate) struct Room {
    bytes: Vec<u8>,
    room: usize,
    truncated: bool,
}

impl Room {
    pub(crate) fn new(room: usize) -> Self {
        Self { bytes: Vec::new(), room, truncated: false }
    }

    /// As the kernel's `put_cmsg`: what does not fit is cut, and the flag says so.
    fn put(&mut self, level: i32, kind: i32, data: &[u8]) {
        let left = self.room.saturating_sub(self.bytes.len());
        if left < HEAD {
            self.truncated = true;
            return;
        }
        let len = (HEAD + data.len()).min(left);
        self.truncated |= len < HEAD + data.len();
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&level.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&data[..len - HEAD]);
        self.bytes.resize(self.room.min(aligned(self.bytes.len())), 0);
    }

    pub(crate) fn put_control(
        &mut self,
        control: &Control,
        wall_clock: impl Fn(bowline_base::Instant) -> SystemTime,
    ) {
        match control {
            Control::CongestionUpdate(mask) => self.put(SOL_RDS, 5, &mask.to_ne_bytes()),
            Control::RdmaDest(key) => self.put(SOL_RDS, 2, &key.to_ne_bytes()),
            Control::RdmaStatus { token, status } => {
                let mut data = [0; 16];
                data[..8].copy_from_slice(&token.to_ne_bytes());
                data[8..12].copy_from_slice(&(*status as i32).to_ne_bytes());
                self.put(SOL_RDS, 4, &data);
            }
            Control::Timestamp(at) => {
                let at = wall_clock(*at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                let seconds = at.as_secs().cast_signed().to_ne_bytes();
                let micros = i64::from(at.subsec_micros()).to_ne_bytes();
                self.put(SOL_SOCKET, SO_TIMESTAMP, &[seconds, micros].concat());
            }
            Control::Latency { trace, nanos } => {
                let mut data = [0; 32];
                data[0] = trace.count;
                data[1..4].copy_from_slice(&trace.positions);
                for (at, nanos) in data[8..].chunks_exact_mut(8).zip(nanos) {
                    at.copy_from_slice(&nanos.to_ne_bytes());
                }
                self.put(SOL_RDS, 11, &data);
            }
            Control::ZcopyCompletion(cookies) => {
                let mut data = [0; 4 + 4 * COOKIES_MAX];
                let count = cookies.len().min(COOKIES_MAX);
                data[..4].copy_from_slice(&(count as u32).to_ne_bytes());
                for (at, cookie) in data[4..].chunks_exact_mut(4).zip(cookies) {
                    at.copy_from_slice(&cookie.to_ne_bytes());
                }
                self.put(SOL_RDS, 13, &data);
            }
            _ => {}
        }
    }

    /// The bytes, and the flags of the message that they give cause for.
    pub(crate) fn finish(self) -> (Vec<u8>, i32) {
        (self.bytes, if self.truncated { MSG_CTRUNC } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmsg(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut room = Room::new(1000);
        room.put(level, kind, data);
        room.finish().0
    }

    #[test]
    fn control_messages_are_read_in_their_order() {
        let bytes = [
            cmsg(SOL_RDS, 12, &7u32.to_ne_bytes()),
            cmsg(SOL_SOCKET, 1, b"of another level"),
            cmsg(SOL_RDS, 2, &9u64.to_ne_bytes()),
            cmsg(SOL_RDS, 10, b""),
        ]
        .concat();
        let all = [SendControl::ZcopyCookie(7), SendControl::RdmaDest(9), SendControl::Unknown(10)];
        assert_eq!(parse(&bytes).as_deref(), Ok(all.map(Given::Plain).as_slice()));
        assert_eq!(parse(b"").as_deref(), Ok([].as_slice()));
    }

    #[test]
    fn chains_that_are_wrong_are_refused() {
        for len in [0, 15, 21, usize::MAX] {
            let mut bytes = cmsg(SOL_RDS, 12, &7u32.to_ne_bytes());
            bytes.truncate(20);
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(parse(&bytes), Err(Errno::EINVAL), "{len}");
        }
        assert_eq!(parse(&cmsg(SOL_RDS, 12, b"abc")), Err(Errno::EINVAL));
        assert_eq!(parse(&cmsg(SOL_RDS, 1, &[0; 55])), Err(Errno::EINVAL));
    }

    #[test]
    fn what_does_not_fit_is_cut_and_said() {
        let put = |room: usize| {
            let mut room = Room::new(room);
            room.put_control(&Control::CongestionUpdate(1), |_| SystemTime::UNIX_EPOCH);
            room.put_control(&Control::RdmaDest(2), |_| SystemTime::UNIX_EPOCH);
            let (bytes, flags) = room.finish();
            (bytes.len(), flags)
        };
        assert_eq!(put(48), (48, 0));
        assert_eq!(put(44), (44, MSG_CTRUNC));
        assert_eq!(put(24), (24, MSG_CTRUNC));
        assert_eq!(put(15), (0, MSG_CTRUNC));
        assert_eq!(put(0), (0, MSG_CTRUNC));
    }
}
