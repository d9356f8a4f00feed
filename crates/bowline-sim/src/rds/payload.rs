//! Payloads of messages: bytes that identify their message.
//!
//! ```text
//!   0        4        6             8
//!   +--------+--------+-------------+-----------------------------+
//!   | index  | socket | incarnation | bytes derived from all that |
//!   +--------+--------+-------------+-----------------------------+
//! ```
//! A message shorter than eight bytes carries the beginning of these.

use crate::engine::rng::mix;

/// Length in bytes of the tag that identifies the message.
pub(crate) const TAG_LEN: usize = 8;

/// Appends the payload of message `index` from a socket's incarnation to socket `target`.
pub(crate) fn fill(
    out: &mut Vec<u8>,
    slot: usize,
    incarnation: u16,
    target: usize,
    index: u32,
    len: usize,
) {
    let mut tag = [0; TAG_LEN];
    tag[..4].copy_from_slice(&index.to_le_bytes());
    tag[4..6].copy_from_slice(&(slot as u16).to_le_bytes());
    tag[6..].copy_from_slice(&incarnation.to_le_bytes());
    let mut word = mix(u64::from_le_bytes(tag) ^ ((target as u64) << 56) ^ 0x5eed);
    out.extend_from_slice(&tag[..len.min(TAG_LEN)]);
    let mut left = len.saturating_sub(TAG_LEN);
    while left > 0 {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let bytes = (word ^ (word >> 29)).to_le_bytes();
        let n = left.min(8);
        out.extend_from_slice(&bytes[..n]);
        left -= n;
    }
}

/// Reads index, socket and incarnation; `None` if the payload is too short to tell.
pub(crate) fn tag(payload: &[u8]) -> Option<(u32, usize, u16)> {
    let tag: &[u8; TAG_LEN] = payload.first_chunk()?;
    let [i0, i1, i2, i3, s0, s1, n0, n1] = *tag;
    let slot = usize::from(u16::from_le_bytes([s0, s1]));
    Some((u32::from_le_bytes([i0, i1, i2, i3]), slot, u16::from_le_bytes([n0, n1])))
}
