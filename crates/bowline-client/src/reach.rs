//! Whether this process may write to the memory that an RDMA operation is about. The node, which
//! writes there in its place, would be let; a kernel is not.

use core::ffi::c_int;

use crate::system;

const SOL_RDS: c_int = 276;
const GET_MR: c_int = 2;
const GET_MR_FOR_DEST: c_int = 7;
/// Control messages: an operation, memory to register, and atomics.
const ARGS: c_int = 1;
const MAP: c_int = 3;
const ATOMICS: core::ops::RangeInclusive<c_int> = 6..=9;
/// Control messages of a socket that tell when a message came, with and without nanoseconds, in
/// both of their forms.
const TIMES: [c_int; 4] = [29, 35, 63, 64];
/// An operation that writes to the peer, and so reads here.
const WRITE: u64 = 1;

const HEAD: usize = 16;
/// Longest memory that is looked at, bytes; the node refuses more than 1 MiB.
const LEN_MAX: u64 = 2 << 20;
const PIECES_MAX: u64 = 1024;

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
    word.map_or(0, u64::from_ne_bytes)
}

/// Tells whether bytes may be written, or are none or so many that they are refused anyway.
fn is_writable(at: u64, len: u64) -> bool {
    len == 0 || len > LEN_MAX || at.checked_add(len).is_none() || system::populate(at, len, true)
}

/// `rds_get_mr_args`: address, bytes, where the key is stored.
fn reaches_region(args: &[u8]) -> bool {
    let (at, len, key_at) = (word(args, 0), word(args, 8), word(args, 16));
    is_writable(at, len) && (key_at == 0 || is_writable(key_at, 8))
}

/// `rds_rdma_args`, with a vector of pieces of memory.
fn reaches_pieces(args: &[u8]) -> bool {
    let (vector, count, flags) = (word(args, 24), word(args, 32), word(args, 40));
    if flags & WRITE != 0 || count > PIECES_MAX || !system::populate(vector, 16 * count, false) {
        return true; // what is only read, or wrong in another way, the node sees
    }
    (0..count).all(|n| {
        let [at, len] = system::read_words(vector + 16 * n);
        is_writable(at, len)
    })
}

/// Tells whether the memory may be written that an option is about.
pub(crate) fn option(level: c_int, name: c_int, value: &[u8]) -> bool {
    match (level, name, value.len()) {
        (SOL_RDS, GET_MR, 32) => reaches_region(value),
        (SOL_RDS, GET_MR_FOR_DEST, 160) => reaches_region(&value[128..]),
        _ => true,
    }
}

/// Tells whether the memory may be written that control messages are about.
pub(crate) fn control(bytes: &[u8]) -> bool {
    let mut reached = true;
    walk(bytes, |level, kind, data| {
        reached &= match kind {
            _ if !reached || level != SOL_RDS => true,
            MAP if data.len() >= 32 => reaches_region(data),
            ARGS if data.len() >= 56 => reaches_pieces(data),
            kind if ATOMICS.contains(&kind) && data.len() >= 72 => is_writable(word(data, 8), 8),
            _ => true,
        };
    });
    reached
}

/// Tells whether an option is about memory of this process.
pub(crate) fn option_is_about_memory(level: c_int, name: c_int) -> bool {
    level == SOL_RDS && matches!(name, GET_MR | GET_MR_FOR_DEST)
}

/// Calls `each` with level, kind and data of control messages, up to one that is none. Returns
/// whether all are some.
fn walk(mut bytes: &[u8], mut each: impl FnMut(c_int, c_int, &[u8])) -> bool {
    while bytes.len() >= HEAD {
        let len = usize::try_from(word(bytes, 0)).unwrap_or(usize::MAX);
        let kinds = word(bytes, 8);
        let Some(data) = bytes.get(HEAD..len) else { return false };
        each(kinds as u32 as c_int, (kinds >> 32) as c_int, data);
        bytes = bytes.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    bytes.is_empty()
}

/// Tells whether control messages of a message to send are about memory of this process.
pub(crate) fn control_is_about_memory(bytes: &[u8]) -> bool {
    let mut found = false;
    walk(bytes, |level, kind, _| {
        found |= level == SOL_RDS && (matches!(kind, ARGS | MAP) || ATOMICS.contains(&kind));
    });
    found
}

/// Tells whether control messages that came with a message are some that RDS has: others, such as
/// descriptors, mean things to a program that no node may say.
pub(crate) fn is_control_of_rds(bytes: &[u8]) -> bool {
    let mut all = true;
    let are_whole = walk(bytes, |level, kind, _| {
        all &= level == SOL_RDS || (level == libc::SOL_SOCKET && TIMES.contains(&kind));
    });
    all && are_whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cmsg(kind: c_int, words: &[u64]) -> Vec<u8> {
        let mut bytes = (HEAD as u64 + 8 * words.len() as u64).to_ne_bytes().to_vec();
        bytes.extend(SOL_RDS.to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        words.iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        bytes
    }

    // tests [RDMA-3] [RDMA-12] [ATOM-4]
    #[test]
    fn memory_that_may_not_be_written_is_seen() {
        static CONSTANT: [u64; 64] = [7; 64];
        let mut own = [0_u64; 64];
        let (own, constant) = ((&raw mut own) as u64, (&raw const CONSTANT) as u64);
        let get = |at, key_at| {
            let args: Vec<u8> =
                [at, 64, key_at, 0].iter().flat_map(|w: &u64| w.to_ne_bytes()).collect();
            option(SOL_RDS, GET_MR, &args)
        };
        assert!(get(own, 0) && get(own, own) && get(own, own + 128));
        assert!(!get(constant, 0) && !get(own, constant) && !get(4096, 0));
        assert!(option(1, GET_MR, &[0; 32]) && option(SOL_RDS, GET_MR, &[0; 31]));
        assert!(control(&cmsg(MAP, &[own, 64, 0, 0])));
        assert!(!control(&[cmsg(12, &[7]), cmsg(MAP, &[constant, 64, 0, 0])].concat()));
        let pieces = [own, 64, constant, 64];
        let vector = (&raw const pieces) as u64;
        let args = |count, flags| cmsg(ARGS, &[0, 0, 128, vector, count, flags, 0]);
        assert!(control(&args(1, 0)) && !control(&args(2, 0)) && control(&args(2, WRITE)));
        assert!(control(&cmsg(ARGS, &[0, 0, 128, 4096, 1, 0, 0])), "the node finds no vector");
        assert!(!control(&cmsg(7, &[0, constant, 0, 0, 0, 0, 0, 0, 0])));
        assert!(control(&cmsg(7, &[0, own, 0, 0, 0, 0, 0, 0, 0])) && control(b"too short"));
    }

    #[test]
    fn a_program_gives_memory_for_what_is_about_memory_only() {
        assert!(option_is_about_memory(SOL_RDS, GET_MR));
        assert!(!option_is_about_memory(1, GET_MR) && !option_is_about_memory(SOL_RDS, 1));
        for kind in [ARGS, MAP, 6, 7, 8, 9] {
            let about = [cmsg(12, &[7]), cmsg(kind, &[0; 9])].concat();
            assert!(control_is_about_memory(&about), "{kind}");
        }
        let mut other = cmsg(MAP, &[0; 4]);
        other[8] = 1;
        assert!(!control_is_about_memory(&other) && !control_is_about_memory(&cmsg(2, &[7])));
        assert!(!control_is_about_memory(b"") && !control_is_about_memory(&[0xff; 64]));
    }

    #[test]
    fn a_node_gives_no_control_messages_but_those_of_rds() {
        let time = |kind: u8| {
            let mut bytes = cmsg(kind.into(), &[0; 2]);
            bytes[8..12].copy_from_slice(&1_u32.to_ne_bytes());
            bytes
        };
        assert!(is_control_of_rds(b"") && is_control_of_rds(&[cmsg(4, &[1]), time(29)].concat()));
        assert!(!is_control_of_rds(&time(1)), "SCM_RIGHTS");
        assert!(!is_control_of_rds(&[cmsg(4, &[1]), time(2)].concat()), "SCM_CREDENTIALS");
        for len in [0_u64, 15, 41, u64::MAX] {
            let mut lies = cmsg(4, &[1, 2, 3]);
            lies[..8].copy_from_slice(&len.to_ne_bytes());
            assert!(!is_control_of_rds(&lies), "{len}");
        }
        assert!(!is_control_of_rds(&[0; 8]));
    }
}
