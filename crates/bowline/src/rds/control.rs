//! Control messages (`cmsghdr`) as the host's node gives and takes them, on 64-bit machines.

use std::time::{Duration, SystemTime};

use bowline_rds::{LatencyTrace, SendControl};
use bowline_wire::rds::uapi::{
    Cmsg, Cmsgs, RDS_CMSG_ATOMIC_FADD, RDS_CMSG_CONG_UPDATE, RDS_CMSG_RDMA_ARGS,
    RDS_CMSG_RDMA_DEST, RDS_CMSG_RDMA_MAP, RDS_CMSG_RXPATH_LATENCY, RDS_CMSG_ZCOPY_COMPLETION,
    RDS_CMSG_ZCOPY_COOKIE, RDS_RDMA_ARGS_LEN, SO_TIMESTAMP, SOL_RDS, SOL_SOCKET, put_cmsg,
};

use super::Control;

/// Writes the control messages of a message to send. What a type takes as arguments, if this
/// library does not have it, is left out: the node refuses the type, as it does over TCP.
pub(super) fn emit(all: &[SendControl]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for one in all {
        let (kind, data): (i32, &[u8]) = match one {
            SendControl::ZcopyCookie(cookie) => (RDS_CMSG_ZCOPY_COOKIE, &cookie.to_ne_bytes()),
            SendControl::RdmaDest(key) => (RDS_CMSG_RDMA_DEST, &key.to_ne_bytes()),
            SendControl::RdmaMap => (RDS_CMSG_RDMA_MAP, &[]),
            SendControl::RdmaArgs => (RDS_CMSG_RDMA_ARGS, &[0; RDS_RDMA_ARGS_LEN]),
            SendControl::Atomic => (RDS_CMSG_ATOMIC_FADD, &[]),
            SendControl::Unknown(kind) => (kind.cast_signed(), &[]),
            // Users cannot name a control message that this library does not know.
            _ => continue,
        };
        put_cmsg(&mut bytes, usize::MAX, SOL_RDS, kind, data);
    }
    bytes
}

/// Reads the control messages of a message that was received, up to one that is malformed.
pub(super) fn parse(bytes: &[u8]) -> Vec<Control> {
    let good = Cmsgs::new(bytes).map_while(Result::ok);
    good.filter_map(|Cmsg { level, kind, data }| one(level, kind, data)).collect()
}

fn one(level: i32, kind: i32, data: &[u8]) -> Option<Control> {
    Some(match (level, kind) {
        (SOL_RDS, RDS_CMSG_RDMA_DEST) => Control::RdmaDest(long(data, 0)?),
        (SOL_RDS, RDS_CMSG_CONG_UPDATE) => Control::CongestionUpdate(long(data, 0)?),
        (SOL_RDS, RDS_CMSG_RXPATH_LATENCY) => {
            let [count, positions @ ..] = *data.first_chunk::<4>()?;
            let nanos = [long(data, 8)?, long(data, 16)?, long(data, 24)?];
            Control::Latency { trace: LatencyTrace { count, positions }, nanos }
        }
        (SOL_RDS, RDS_CMSG_ZCOPY_COMPLETION) => {
            let count = usize::try_from(word(data, 0)?).ok()?;
            let cookies = data.get(4..)?.chunks_exact(4).take(count);
            let cookie = |c: &[u8]| c.try_into().map_or(0, u32::from_ne_bytes);
            Control::ZcopyCompletion(cookies.map(cookie).collect())
        }
        (SOL_SOCKET, SO_TIMESTAMP) => {
            let micros = Duration::from_micros(long(data, 8)?);
            Control::Timestamp(
                SystemTime::UNIX_EPOCH
                    .checked_add(Duration::from_secs(long(data, 0)?))?
                    .checked_add(micros)?,
            )
        }
        _ => return None,
    })
}

fn word(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..at + 4)?.try_into().ok().map(i32::from_ne_bytes)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_are_read_in_their_order() {
        let sent = [SendControl::RdmaDest(9), SendControl::Unknown(5), SendControl::RdmaDest(7)];
        let read = parse(&emit(&sent));
        // The one of kind 5 is too short for what that kind is when it is received.
        assert_eq!(read, [Control::RdmaDest(9), Control::RdmaDest(7)]);
    }

    #[test]
    fn chains_that_are_wrong_end_there() {
        let good = emit(&[SendControl::RdmaDest(9)]);
        for len in [0, 15, 25, usize::MAX] {
            let bad = [&good[..], &len.to_ne_bytes(), &good[8..]].concat();
            assert_eq!(parse(&bad), [Control::RdmaDest(9)], "{len}");
        }
        assert_eq!(parse(&good[..good.len() - 1]), []);
    }
}
