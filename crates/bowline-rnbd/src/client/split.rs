//! The length of the next piece of a request.

use crate::{IoOp, Limits};

/// Returns the bytes of the first piece of a range, at least one block [NB-51] [NB-59].
pub(super) fn first_piece_len(limits: &Limits, op: IoOp, offset: u64, len: u32) -> u32 {
    let blocks = |bytes: u64| {
        let unit = u64::from(limits.logical);
        (bytes - bytes % unit).max(unit)
    };
    let most = match op {
        IoOp::Flush => return 0,
        IoOp::Read | IoOp::Write => blocks(u64::from(limits.max_io)),
        IoOp::WriteZeroes => blocks(u64::from(limits.max_write_zeroes)),
        IoOp::Discard | IoOp::SecureErase => {
            let Some(discard) = limits.discard else { return len };
            let most = blocks(discard.max_bytes);
            let granularity = u64::from(discard.granularity).max(1);
            // Pieces end at boundaries of the discard granularity, so that the storage can free
            // them.
            let end = offset.saturating_add(most);
            let past = end.saturating_sub(u64::from(discard.alignment)) % granularity;
            if past < most && (most - past) % u64::from(limits.logical) == 0 {
                most - past
            } else {
                most
            }
        }
    };
    len.min(u32::try_from(most).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Discard;

    fn pieces(limits: &Limits, op: IoOp, mut offset: u64, mut len: u32) -> Vec<u32> {
        let mut out = Vec::new();
        while len > 0 {
            let piece = first_piece_len(limits, op, offset, len);
            out.push(piece);
            offset += u64::from(piece);
            len -= piece;
        }
        out
    }

    #[test]
    fn reads_and_writes_are_cut_at_what_the_session_allows() {
        // tests [NB-51]
        let limits = Limits { max_io: 126_976, ..Limits::plain(1 << 30) };
        let cut = pieces(&limits, IoOp::Write, 4096, 1 << 18);
        assert_eq!(cut, [126_976, 126_976, 8192]);
        let tiny = Limits { max_io: 100, logical: 4096, ..limits };
        assert_eq!(pieces(&tiny, IoOp::Read, 0, 8192), [4096, 4096], "never less than a block");
    }

    #[test]
    fn discards_end_at_the_boundaries_of_the_storage() {
        // tests [NB-59]
        let discard = Discard { max_bytes: 65_536, granularity: 16_384, alignment: 4096 };
        let limits = Limits { discard: Some(discard), ..Limits::plain(1 << 40) };
        let cut = pieces(&limits, IoOp::Discard, 8192, 200_704);
        assert_eq!(cut.iter().sum::<u32>(), 200_704);
        assert_eq!(cut[..3], [61_440, 65_536, 65_536]);
        let all = pieces(&limits, IoOp::Discard, 0, u32::MAX - 511);
        assert!(all.iter().all(|piece| *piece <= 65_536));
    }

    #[test]
    fn zeroes_are_cut_too() {
        let limits = Limits { max_write_zeroes: 65_536, ..Limits::plain(1 << 30) };
        assert_eq!(pieces(&limits, IoOp::WriteZeroes, 0, 131_072 + 512), [65_536, 65_536, 512]);
    }
}
