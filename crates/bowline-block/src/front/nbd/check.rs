//! Requests of clients, checked before they reach the disk.

use bowline_rnbd::{IoOp, Limits};

use super::reply::Failure;
use super::wire::{self, Format, Request, Session};

/// What a valid request asks for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Action {
    /// An operation of the disk.
    Io(IoOp),
    /// How a range is stored.
    Status,
    /// A hint that a range will be read. There is no cache to read it into: the disk's own, if it
    /// has one, may be on another machine, and reading for it would double the traffic.
    Cache,
}

/// Checks a request other than NBD_CMD_DISC against the disk and what was negotiated.
///
/// # Errors
/// The error that answers a request which is invalid in NBD.
pub(super) fn check(
    limits: &Limits,
    session: Session,
    request: &Request,
) -> Result<Action, Failure<'static>> {
    let action = match request.command {
        wire::CMD_READ => Action::Io(IoOp::Read),
        wire::CMD_WRITE => Action::Io(IoOp::Write),
        wire::CMD_FLUSH => Action::Io(IoOp::Flush),
        wire::CMD_TRIM => Action::Io(IoOp::Discard),
        wire::CMD_WRITE_ZEROES => Action::Io(IoOp::WriteZeroes),
        wire::CMD_CACHE => Action::Cache,
        wire::CMD_BLOCK_STATUS if session.has_allocation => Action::Status,
        wire::CMD_BLOCK_STATUS => return Err(invalid("no metadata context was selected")),
        _ => return Err(invalid("unknown command")),
    };
    if request.flags & !known_flags(limits, session, action) != 0 {
        return Err(invalid("the command does not have this flag"));
    }
    if action == Action::Io(IoOp::Flush) {
        return Ok(action);
    }
    if limits.read_only && matches!(action, Action::Io(op) if op.changes()) {
        return Err(Failure { error: wire::EPERM, text: "the disk is read-only", at: None });
    }
    let (offset, len, block) = (request.offset, request.len, u64::from(limits.logical));
    if !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
        return Err(invalid("not a multiple of the minimum block size"));
    }
    if action == Action::Io(IoOp::Read) && len > u64::from(wire::MAX_PAYLOAD) {
        return Err(invalid("longer than the maximum block size"));
    }
    if !limits.holds(offset, len) {
        // As NBD demands: ENOSPC for writes, EINVAL for others.
        let writes = matches!(action, Action::Io(IoOp::Write | IoOp::WriteZeroes));
        let at = limits.bytes.max(offset);
        return Err(Failure {
            error: if writes { wire::ENOSPC } else { wire::EINVAL },
            text: "beyond the end of the disk",
            at: (at - offset < len).then_some(at),
        });
    }
    if action == Action::Status && len == 0 {
        return Err(invalid("an empty range has no status"));
    }
    if request.flags & wire::CMD_FLAG_FAST_ZERO != 0 && !zeroes_fast(limits, request) {
        return Err(Failure { error: wire::ENOTSUP, text: "not faster than a write", at: None });
    }
    Ok(action)
}

/// Tells whether a write of zeroes is known to be faster than a write of data: where the disk can
/// discard, it zeroes by discarding. Else it may write the zeroes itself, and nothing tells
/// whether it does.
fn zeroes_fast(limits: &Limits, request: &Request) -> bool {
    limits.discard.is_some() && request.flags & wire::CMD_FLAG_NO_HOLE == 0
}

/// Returns the flags that a command may have.
fn known_flags(limits: &Limits, session: Session, action: Action) -> u16 {
    // NBD allows FUA for every command.
    wire::CMD_FLAG_FUA
        | match action {
            Action::Io(IoOp::Read) if session.format != Format::Simple => wire::CMD_FLAG_DF,
            Action::Io(IoOp::Write) if session.format == Format::Extended => {
                wire::CMD_FLAG_PAYLOAD_LEN
            }
            Action::Io(IoOp::WriteZeroes) if limits.max_write_zeroes > 0 => {
                wire::CMD_FLAG_NO_HOLE | wire::CMD_FLAG_FAST_ZERO
            }
            Action::Io(IoOp::WriteZeroes) => wire::CMD_FLAG_NO_HOLE,
            Action::Io(_) | Action::Cache => 0,
            Action::Status => wire::CMD_FLAG_REQ_ONE,
        }
}

fn invalid(text: &'static str) -> Failure<'static> {
    Failure { error: wire::EINVAL, text, at: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRUCTURED: Session = Session { format: Format::Structured, has_allocation: true };

    fn refused(limits: &Limits, session: Session, request: Request) -> (u32, Option<u64>) {
        let failure = check(limits, session, &request).unwrap_err();
        (failure.error, failure.at)
    }

    #[test]
    fn errors_name_the_first_byte_beyond_the_end() {
        let limits = Limits::plain(1 << 20);
        let read = Request { flags: 0, command: wire::CMD_READ, cookie: 0, offset: 0, len: 8192 };
        for (offset, at) in [
            ((1 << 20) - 4096, Some(1 << 20)),
            (1 << 20, Some(1 << 20)),
            (1 << 40, Some(1 << 40)),
            (u64::MAX - 511, Some(u64::MAX - 511)),
        ] {
            let request = Request { offset, ..read };
            assert_eq!(refused(&limits, STRUCTURED, request), (wire::EINVAL, at));
        }
        let write = Request { command: wire::CMD_WRITE, offset: 1 << 20, ..read };
        assert_eq!(refused(&limits, STRUCTURED, write), (wire::ENOSPC, Some(1 << 20)));
    }

    #[test]
    fn extended_writes_have_data_and_others_have_none() {
        let limits = Limits::plain(1 << 20);
        let session = Session { format: Format::Extended, has_allocation: true };
        let with_data = wire::CMD_FLAG_PAYLOAD_LEN;
        for (command, flags, is_ok, payload) in [
            (wire::CMD_WRITE, with_data, true, 512),
            (wire::CMD_WRITE, with_data | wire::CMD_FLAG_FUA, true, 512),
            (wire::CMD_WRITE, 0, true, 512),
            (wire::CMD_READ, 0, true, 0),
            (wire::CMD_READ, with_data, false, 512),
            (wire::CMD_BLOCK_STATUS, with_data, false, 512),
        ] {
            let request = Request { flags, command, cookie: 0, offset: 0, len: 512 };
            assert_eq!(check(&limits, session, &request).is_ok(), is_ok, "{command} {flags}");
            assert_eq!(request.payload(session.format), payload, "{command} {flags}");
        }
    }

    #[test]
    fn zeroes_are_fast_where_the_disk_discards() {
        // tests [NB-53]
        let discard = bowline_rnbd::Discard { max_bytes: 1 << 20, granularity: 512, alignment: 0 };
        let zeroes = Limits { max_write_zeroes: 1 << 20, ..Limits::plain(1 << 20) };
        let discards = Limits { discard: Some(discard), ..zeroes };
        let (fast, no_hole) = (wire::CMD_FLAG_FAST_ZERO, wire::CMD_FLAG_NO_HOLE);
        for (limits, flags, error) in [
            (discards, fast, None),
            (discards, fast | no_hole, Some(wire::ENOTSUP)),
            (discards, no_hole, None),
            (zeroes, fast, Some(wire::ENOTSUP)),
            (zeroes, 0, None),
            (Limits { max_write_zeroes: 0, ..discards }, fast, Some(wire::EINVAL)),
        ] {
            let command = wire::CMD_WRITE_ZEROES;
            let request = Request { flags, command, cookie: 0, offset: 0, len: 512 };
            let found = check(&limits, STRUCTURED, &request).err().map(|failure| failure.error);
            assert_eq!(found, error, "{flags} {limits:?}");
        }
    }

    #[test]
    fn a_flag_belongs_to_its_command() {
        let limits = Limits::plain(1 << 20);
        let simple = Session::default();
        let request = |command, flags| Request { flags, command, cookie: 0, offset: 0, len: 512 };
        for (session, command, known) in [
            (simple, wire::CMD_READ, wire::CMD_FLAG_FUA),
            (STRUCTURED, wire::CMD_READ, wire::CMD_FLAG_FUA | wire::CMD_FLAG_DF),
            (STRUCTURED, wire::CMD_WRITE, wire::CMD_FLAG_FUA),
            (STRUCTURED, wire::CMD_FLUSH, wire::CMD_FLAG_FUA),
            (STRUCTURED, wire::CMD_TRIM, wire::CMD_FLAG_FUA),
            (STRUCTURED, wire::CMD_CACHE, wire::CMD_FLAG_FUA),
            (STRUCTURED, wire::CMD_BLOCK_STATUS, wire::CMD_FLAG_FUA | wire::CMD_FLAG_REQ_ONE),
            (simple, wire::CMD_WRITE_ZEROES, wire::CMD_FLAG_FUA | wire::CMD_FLAG_NO_HOLE),
        ] {
            for bit in 0..16 {
                let is_ok = check(&limits, session, &request(command, 1 << bit)).is_ok();
                assert_eq!(is_ok, known & 1 << bit != 0, "{command} {bit}");
            }
        }
    }
}
