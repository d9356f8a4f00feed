//! Checks one IO message before storage sees it.

use bowline_wire::rnbd::{self, Access, Io, IoFlags};
use bowline_wire::rtrs::Dir;

use crate::{Errno, IoOp, Limits};

/// The IO that a valid message asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ValidIo {
    pub(super) op: IoOp,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) fua: bool,
    pub(super) preflush: bool,
    pub(super) nounmap: bool,
}

/// The device and request that a message is checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    pub(super) limits: &'a Limits,
    pub(super) access: Access,
    pub(super) dir: Dir,
    pub(super) data_len: u32,
}

/// Returns the IO to carry out, `None` when the message succeeds without IO [NB-23] [NB-24]
/// [NB-25].
pub(super) fn check(ctx: Context<'_>, io: &Io) -> Result<Option<ValidIo>, Errno> {
    let Context { limits, access, dir, data_len } = ctx;
    if data_len != 0 && data_len != io.len {
        return Err(Errno::EINVAL);
    }
    let op = match io.op {
        rnbd::OP_READ => IoOp::Read,
        rnbd::OP_WRITE => IoOp::Write,
        rnbd::OP_FLUSH => IoOp::Flush,
        rnbd::OP_DISCARD => IoOp::Discard,
        rnbd::OP_SECURE_ERASE => IoOp::SecureErase,
        rnbd::OP_WRITE_ZEROES => IoOp::WriteZeroes,
        _ => return Err(Errno::EOPNOTSUPP),
    };
    let wrong_data = if op.has_data() { data_len != io.len } else { data_len != 0 };
    // The direction means nothing for operations without data [NB-2].
    let wrong_way = matches!((op, dir), (IoOp::Read, Dir::Write) | (IoOp::Write, Dir::Read));
    if wrong_data || (wrong_way && data_len != 0) {
        return Err(Errno::EINVAL);
    }
    let (fua, preflush) = (io.flags.contains(IoFlags::FUA), io.flags.contains(IoFlags::PREFLUSH));
    let flush =
        ValidIo { op: IoOp::Flush, offset: 0, len: 0, fua: false, preflush: false, nounmap: false };
    // The sector of a flush is all ones from kernels, and its FUA says nothing more [NB-13].
    if op == IoOp::Flush {
        return Ok(limits.write_cache.then_some(flush));
    }
    if op.changes() && (access == Access::Ro || limits.read_only) {
        return Err(Errno::EPERM);
    }
    if (fua || preflush) && op != IoOp::Write {
        return Err(Errno::EIO);
    }
    if io.len == 0 {
        return Ok((preflush && limits.write_cache).then_some(flush));
    }
    let len = u64::from(io.len);
    let offset = io.sector.checked_mul(512).ok_or(Errno::EINVAL)?;
    offset.checked_add(len).ok_or(Errno::EINVAL)?;
    let unit = u64::from(limits.logical);
    if len % unit != 0 || offset % unit != 0 {
        return Err(Errno::EINVAL);
    }
    let most = match op {
        // Data of reads and writes lie in a chunk, whose size is the limit [RT-15].
        IoOp::Read | IoOp::Write | IoOp::Flush => u64::MAX,
        IoOp::Discard => limits.discard.map_or(0, |d| d.max_bytes),
        IoOp::SecureErase if !limits.secure_erase => 0,
        IoOp::SecureErase => limits.discard.map_or(0, |d| d.max_bytes),
        IoOp::WriteZeroes => u64::from(limits.max_write_zeroes),
    };
    if most == 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if len > most {
        return Err(Errno::EINVAL);
    }
    if !limits.holds(offset, len) {
        return Err(Errno::EIO);
    }
    Ok(Some(ValidIo {
        op,
        offset,
        len: io.len,
        fua: fua && limits.write_cache,
        preflush: preflush && limits.write_cache,
        nounmap: io.flags.contains(IoFlags::NOUNMAP),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Discard;

    fn disk() -> Limits {
        Limits {
            discard: Some(Discard { max_bytes: 1 << 20, granularity: 4096, alignment: 0 }),
            max_write_zeroes: 1 << 20,
            write_cache: true,
            fua: true,
            ..Limits::plain(1 << 20)
        }
    }

    fn io(op: u8, sector: u64, len: u32) -> Io {
        Io { device: 0, sector, op, flags: IoFlags::NONE, len, prio: 0 }
    }

    fn check_io(dir: Dir, data_len: u32, io: &Io) -> Result<Option<ValidIo>, Errno> {
        check(Context { limits: &disk(), access: Access::Rw, dir, data_len }, io)
    }

    #[test]
    fn good_reads_and_writes_pass_with_their_flags() {
        // tests [NB-23] [NB-57]
        let read = check_io(Dir::Read, 4096, &io(rnbd::OP_READ, 8, 4096)).unwrap().unwrap();
        assert_eq!((read.op, read.offset, read.len), (IoOp::Read, 4096, 4096));
        let flags = IoFlags::SYNC | IoFlags::FUA | IoFlags::PREFLUSH;
        let write = Io { flags, ..io(rnbd::OP_WRITE, 0, 512) };
        let write = check_io(Dir::Write, 512, &write).unwrap().unwrap();
        assert!(write.fua && write.preflush && !write.nounmap);
        let zeroes = Io { flags: IoFlags::NOUNMAP, ..io(rnbd::OP_WRITE_ZEROES, 0, 1 << 20) };
        assert!(check_io(Dir::Write, 0, &zeroes).unwrap().unwrap().nounmap);
    }

    #[test]
    fn the_gaps_of_the_kernel_are_closed() {
        // tests [NB-25] [NB-23]
        let inval = Err(Errno::EINVAL);
        assert_eq!(check_io(Dir::Read, 512, &io(9, 0, 512)), Err(Errno::EOPNOTSUPP));
        assert_eq!(check_io(Dir::Read, 0, &io(rnbd::OP_READ, 0, 512)), inval);
        assert_eq!(check_io(Dir::Write, 0, &io(rnbd::OP_WRITE, 0, 512)), inval);
        assert_eq!(check_io(Dir::Write, 512, &io(rnbd::OP_WRITE, 0, 1024)), inval);
        assert_eq!(check_io(Dir::Write, 512, &io(rnbd::OP_DISCARD, 0, 512)), inval);
        assert_eq!(check_io(Dir::Write, 512, &io(rnbd::OP_FLUSH, 0, 512)), inval);
        assert_eq!(check_io(Dir::Write, 512, &io(rnbd::OP_READ, 0, 512)), inval);
        assert_eq!(check_io(Dir::Read, 512, &io(rnbd::OP_WRITE, 0, 512)), inval);
        assert_eq!(check_io(Dir::Read, 100, &io(rnbd::OP_READ, 0, 100)), inval);
        assert_eq!(check_io(Dir::Read, 512, &io(rnbd::OP_READ, u64::MAX / 2, 512)), inval);
        assert_eq!(check_io(Dir::Read, 512, &io(rnbd::OP_READ, u64::MAX / 512, 512)), inval);
        assert_eq!(check_io(Dir::Write, 0, &io(rnbd::OP_DISCARD, 0, (1 << 20) + 512)), inval);
        let large = Limits { logical: 4096, ..disk() };
        let ctx = Context { limits: &large, access: Access::Rw, dir: Dir::Read, data_len: 4096 };
        assert_eq!(check(ctx, &io(rnbd::OP_READ, 1, 4096)), inval, "not at a block");
    }

    #[test]
    fn requests_the_block_layer_refuses_get_its_errors() {
        // tests [NB-24]
        assert_eq!(check_io(Dir::Read, 1024, &io(rnbd::OP_READ, 2047, 1024)), Err(Errno::EIO));
        assert_eq!(
            check_io(Dir::Write, 0, &io(rnbd::OP_SECURE_ERASE, 0, 512)),
            Err(Errno::EOPNOTSUPP)
        );
        let fua = Io { flags: IoFlags::FUA, ..io(rnbd::OP_READ, 0, 512) };
        assert_eq!(check_io(Dir::Read, 512, &fua), Err(Errno::EIO));
        let bare = Limits::plain(4096);
        let ctx = Context { limits: &bare, access: Access::Rw, dir: Dir::Read, data_len: 0 };
        assert_eq!(check(ctx, &io(rnbd::OP_FLUSH, u64::MAX, 0)), Ok(None), "no cache");
        assert_eq!(check(ctx, &io(rnbd::OP_DISCARD, 0, 512)), Err(Errno::EOPNOTSUPP));
        assert_eq!(check(ctx, &io(rnbd::OP_WRITE_ZEROES, 0, 512)), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn secure_erase_has_the_limits_of_discards() {
        // tests [NB-25] [NB-9]
        let erases = Limits { secure_erase: true, ..disk() };
        let judge = |limits: &Limits, len| {
            let ctx = Context { limits, access: Access::Rw, dir: Dir::Write, data_len: 0 };
            check(ctx, &io(rnbd::OP_SECURE_ERASE, 8, len))
        };
        let valid = judge(&erases, 4096).unwrap().unwrap();
        assert_eq!((valid.op, valid.offset, valid.len), (IoOp::SecureErase, 4096, 4096));
        assert_eq!(judge(&erases, 100), Err(Errno::EINVAL));
        assert_eq!(judge(&erases, (1 << 20) + 512), Err(Errno::EINVAL), "more than at once");
        assert_eq!(judge(&erases, 1 << 20), Err(Errno::EIO), "past the end");
        assert_eq!(judge(&Limits { discard: None, ..erases }, 512), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn a_flush_may_come_either_way_and_its_sector_is_ignored() {
        // tests [NB-2] [NB-13]
        let flags = IoFlags::SYNC | IoFlags::FUA;
        let flush = Io { flags, ..io(rnbd::OP_FLUSH, u64::MAX, 0) };
        for dir in [Dir::Read, Dir::Write] {
            assert_eq!(check_io(dir, 0, &flush).unwrap().unwrap().op, IoOp::Flush);
        }
        assert_eq!(
            check_io(Dir::Read, 0, &io(rnbd::OP_DISCARD, 0, 4096)).unwrap().unwrap().len,
            4096
        );
    }

    #[test]
    fn a_read_only_open_refuses_writes() {
        // tests [NB-25]
        let limits = disk();
        for (op, data_len) in [
            (rnbd::OP_WRITE, 512),
            (rnbd::OP_DISCARD, 0),
            (rnbd::OP_WRITE_ZEROES, 0),
            (rnbd::OP_SECURE_ERASE, 0),
        ] {
            let ctx = Context { limits: &limits, access: Access::Ro, dir: Dir::Write, data_len };
            assert_eq!(check(ctx, &io(op, 0, 512)), Err(Errno::EPERM));
        }
        let ctx = Context { limits: &limits, access: Access::Ro, dir: Dir::Read, data_len: 512 };
        assert!(check(ctx, &io(rnbd::OP_READ, 0, 512)).is_ok());
    }

    #[test]
    fn a_write_of_nothing_may_be_a_flush() {
        let flush = Io { flags: IoFlags::PREFLUSH, ..io(rnbd::OP_WRITE, u64::MAX, 0) };
        assert_eq!(check_io(Dir::Write, 0, &flush).unwrap().unwrap().op, IoOp::Flush);
        assert_eq!(check_io(Dir::Write, 0, &io(rnbd::OP_WRITE, 0, 0)), Ok(None));
    }
}
