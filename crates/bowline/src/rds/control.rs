//! Control messages (`cmsghdr`) as the host's node gives and takes them, on 64-bit machines.

use std::time::{Duration, SystemTime};

use bowline_rds::{LatencyTrace, SendControl};

use super::Control;

const SOL_SOCKET: i32 = 1;
const SO_TIMESTAMP: i32 = 29;
const SOL_RDS: i32 = 276;
const HEAD: usize = 16;

/// Writes the control messages of a message to send. What a type takes as arguments, if this
/// library does not have it, is left out: the node refuses the type, as it does over TCP.
pub(super) fn emit(all: &[SendControl]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for one in all {
        match one {
            SendControl::ZcopyCookie(cookie) => put(&mut bytes, 12, &cookie.to_ne_bytes()),
            SendControl::RdmaDest(key) => put(&mut bytes, 2, &key.to_ne_bytes()),
            SendControl::RdmaMap => put(&mut bytes, 3, &[]),
            SendControl::RdmaArgs => put(&mut bytes, 1, &[0; 56]),
            SendControl::Atomic => put(&mut bytes, 6, &[]),
            SendControl::Unknown(kind) => put(&mut bytes, kind.cast_signed(), &[]),
            // Users cannot name a control message that this library does not know.
            _ => {}
        }
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, kind: i32, data: &[u8]) {
    bytes.extend_from_slice(&(HEAD + data.len()).to_ne_bytes());
    bytes.extend_from_slice(&SOL_RDS.to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
}

/// Reads the control messages of a message that was received.
pub(super) fn parse(mut bytes: &[u8]) -> Vec<Control> {
    let mut all = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk::<8>() {
        let len = usize::from_ne_bytes(*len);
        let (Some(level), Some(kind)) = (word(rest, 0), word(rest, 4)) else { break };
        let Some(data) = bytes.get(HEAD..len) else { break };
        all.extend(one(level, kind, data));
        bytes = bytes.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    all
}

fn one(level: i32, kind: i32, data: &[u8]) -> Option<Control> {
    Some(match (level, kind) {
        (SOL_RDS, 2) => Control::RdmaDest(long(data, 0)?),
        (SOL_RDS, 5) => Control::CongestionUpdate(long(data, 0)?),
        (SOL_RDS, 11) => {
            let [count, positions @ ..] = *data.first_chunk::<4>()?;
            let nanos = [long(data, 8)?, long(data, 16)?, long(data, 24)?];
            Control::Latency { trace: LatencyTrace { count, positions }, nanos }
        }
        (SOL_RDS, 13) => {
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
