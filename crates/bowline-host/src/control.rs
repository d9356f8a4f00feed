//! Control messages (`cmsghdr`) as programs give and take them, on 64-bit machines.

use std::time::SystemTime;

use bowline_rds::{Control, SendControl};
use bowline_wire::rds::uapi::*;

/// Room in bytes that the end of one RDMA operation takes [RDMA-21].
pub(crate) const STATUS_ROOM: usize = cmsg_space(RDS_RDMA_NOTIFY_LEN);

/// Room in bytes that a record of finished zero-copy messages takes.
pub(crate) const COMPLETION_ROOM: usize = cmsg_space(RDS_ZCOPY_COOKIES_LEN);

/// A control message of a message to send, as a program gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Given<'a> {
    /// One that speaks of no memory.
    Plain(SendControl),
    /// Memory to register: [`GetMrArgs`], if they are whole.
    Map(&'a [u8]),
    /// An RDMA operation.
    Args(RdmaArgs),
    /// An atomic of this type: [`AtomicArgs`], if they are whole.
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

/// Control messages that are malformed, for which the send gets EINVAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// A kernel finds that out when the message has a connection to go by already.
    pub(crate) has_route: bool,
}

/// Reads the control messages of a message to send.
///
/// # Errors
/// A chain whose lengths are wrong, and arguments that are too short.
pub(crate) fn parse(bytes: &[u8]) -> Result<Vec<Given<'_>>, Malformed> {
    let mut all = Vec::new();
    let mut is_short = false;
    for cmsg in Cmsgs::new(bytes) {
        let cmsg = cmsg.map_err(|MalformedCmsg| Malformed { has_route: false })?;
        let Cmsg { level, kind, data } = cmsg;
        match one(kind, data) {
            _ if level != SOL_RDS => {}
            Some(given) => all.push(given),
            // Only the sizes of operations are needed before there is a connection.
            None if kind == RDS_CMSG_RDMA_ARGS => return Err(Malformed { has_route: false }),
            None => is_short = true,
        }
    }
    let is_unknown = |given: &Given<'_>| matches!(given, Given::Plain(SendControl::Unknown(_)));
    if is_short { Err(Malformed { has_route: !all.iter().any(is_unknown) }) } else { Ok(all) }
}

/// `None`: its arguments are too short.
fn one(kind: i32, data: &[u8]) -> Option<Given<'_>> {
    Some(match kind {
        RDS_CMSG_RDMA_ARGS => Given::Args(RdmaArgs::parse(data)?),
        RDS_CMSG_RDMA_DEST => {
            Given::Plain(SendControl::RdmaDest(u64::from_ne_bytes(*data.first_chunk()?)))
        }
        RDS_CMSG_RDMA_MAP if data.len() < RDS_GET_MR_ARGS_LEN => return None,
        RDS_CMSG_RDMA_MAP => Given::Map(data),
        RDS_CMSG_ATOMIC_FADD..=RDS_CMSG_MASKED_ATOMIC_CSWP => Given::Atomic(kind, data),
        RDS_CMSG_ZCOPY_COOKIE => {
            Given::Plain(SendControl::ZcopyCookie(u32::from_ne_bytes(*data.first_chunk()?)))
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

    /// What does not fit is cut, and the flag says so.
    fn put(&mut self, level: i32, kind: i32, data: &[u8]) {
        self.truncated |= !put_cmsg(&mut self.bytes, self.room, level, kind, data);
    }

    pub(crate) fn put_control(
        &mut self,
        control: &Control,
        wall_clock: impl Fn(bowline_base::Instant) -> SystemTime,
    ) {
        match control {
            Control::CongestionUpdate(mask) => {
                self.put(SOL_RDS, RDS_CMSG_CONG_UPDATE, &mask.to_ne_bytes());
            }
            Control::RdmaDest(key) => self.put(SOL_RDS, RDS_CMSG_RDMA_DEST, &key.to_ne_bytes()),
            Control::RdmaStatus { token, status } => {
                let mut data = [0; RDS_RDMA_NOTIFY_LEN];
                data[..8].copy_from_slice(&token.to_ne_bytes());
                data[8..12].copy_from_slice(&(*status as i32).to_ne_bytes());
                self.put(SOL_RDS, RDS_CMSG_RDMA_STATUS, &data);
            }
            Control::Timestamp(at) => {
                let at = wall_clock(*at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                let seconds = at.as_secs().cast_signed().to_ne_bytes();
                let micros = i64::from(at.subsec_micros()).to_ne_bytes();
                self.put(SOL_SOCKET, SO_TIMESTAMP, &[seconds, micros].concat());
            }
            Control::Latency { trace, nanos } => {
                let mut data = [0; RDS_CMSG_RX_TRACE_LEN];
                data[0] = trace.count;
                data[1..4].copy_from_slice(&trace.positions);
                for (at, nanos) in data[8..].chunks_exact_mut(8).zip(nanos) {
                    at.copy_from_slice(&nanos.to_ne_bytes());
                }
                self.put(SOL_RDS, RDS_CMSG_RXPATH_LATENCY, &data);
            }
            Control::ZcopyCompletion(cookies) => {
                let mut data = [0; RDS_ZCOPY_COOKIES_LEN];
                let count = cookies.len().min(RDS_MAX_ZCOOKIES);
                data[..4].copy_from_slice(&(count as u32).to_ne_bytes());
                for (at, cookie) in data[4..].chunks_exact_mut(4).zip(cookies) {
                    at.copy_from_slice(&cookie.to_ne_bytes());
                }
                self.put(SOL_RDS, RDS_CMSG_ZCOPY_COMPLETION, &data);
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
            cmsg(SOL_RDS, RDS_CMSG_ZCOPY_COOKIE, &7u32.to_ne_bytes()),
            cmsg(SOL_SOCKET, 1, b"of another level"),
            cmsg(SOL_RDS, RDS_CMSG_RDMA_DEST, &9u64.to_ne_bytes()),
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
            let mut bytes = cmsg(SOL_RDS, RDS_CMSG_ZCOPY_COOKIE, &7u32.to_ne_bytes());
            bytes.truncate(20);
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(parse(&bytes), Err(Malformed { has_route: false }), "{len}");
        }
        let short = cmsg(SOL_RDS, RDS_CMSG_ZCOPY_COOKIE, b"abc");
        assert_eq!(parse(&short), Err(Malformed { has_route: true }));
        for early in [cmsg(SOL_RDS, RDS_CMSG_RDMA_ARGS, &[0; 55]), cmsg(SOL_RDS, 10, b"")] {
            for both in [[&short[..], &early[..]], [&early, &short]] {
                assert_eq!(parse(&both.concat()), Err(Malformed { has_route: false }));
            }
        }
    }

    // tests
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
