//! What holds for whatever a client sends: checked with random streams here, and by the fuzz target
//! `nbd_stream`.

use bowline_rnbd::{Discard, IoOp, Limits};

use super::check::{Action, check};
use super::handshake::{self, Outcome};
use super::reply::{self, Descriptor, Head, Origin};
use super::script::Script;
use super::wire::{self, Fields, Format, Request, Session};

/// Checks a connection: the first byte chooses the disk, a handshake and requests follow.
pub(super) fn check_stream(bytes: &[u8]) {
    let Some((&disk, input)) = bytes.split_first() else { return };
    let limits = limits(disk);
    let mut script = Script::new(input);
    let outcome = handshake::run(&mut script, "disk", || limits);
    check_option_replies(&script.output[18..]);
    let Ok(Outcome::Begin(session)) = outcome else { return };
    assert!(!session.has_allocation || session.format != Format::Simple);
    let mut rest = script.input;
    while let Some(request) = Request::parse(session.format, rest) {
        rest = &rest[session.format.request_len()..];
        let payload = request.payload(session.format);
        if request.command == wire::CMD_DISC || payload > wire::MAX_PAYLOAD.into() {
            return;
        }
        check_request(&limits, session, &request);
        rest = rest.get(payload as usize..).unwrap_or_default();
    }
}

fn limits(disk: u8) -> Limits {
    let discard = Discard { max_bytes: 1 << 20, granularity: 4096, alignment: 0 };
    let bytes = if disk & 1 == 0 { 1 << 20 } else { Limits::BYTES_MAX - 4095 };
    Limits {
        logical: if disk & 2 == 0 { 512 } else { 4096 },
        discard: (disk & 4 == 0).then_some(discard),
        max_write_zeroes: if disk & 8 == 0 { 1 << 20 } else { 0 },
        write_cache: disk & 16 == 0,
        fua: disk & 48 == 0,
        read_only: disk & 64 != 0,
        ..Limits::plain(bytes)
    }
}

/// Option replies are whole; the end of NBD_OPT_EXPORT_NAME may follow them.
fn check_option_replies(mut output: &[u8]) {
    let mut at = Fields(output);
    while at.u64() == Some(wire::OPTION_REPLY) {
        let (_, _, len) = (at.u32(), at.u32(), at.u32());
        let data = len.and_then(|len| at.bytes(len as usize));
        assert!(data.is_some_and(|data| data.len() <= 4096 + 4));
        output = at.0;
    }
    assert!(matches!(output.len(), 0 | 10 | 134));
}

fn check_request(limits: &Limits, session: Session, request: &Request) {
    let is_read = request.command == wire::CMD_READ;
    let origin = Origin { cookie: request.cookie, is_read, offset: request.offset };
    let format = session.format;
    let is_valid = || {
        let block = u64::from(limits.logical);
        let whole = request.offset.is_multiple_of(block) && request.len.is_multiple_of(block);
        whole && limits.holds(request.offset, request.len)
    };
    match check(limits, session, request) {
        Err(failure) => {
            assert!(failure.error != 0);
            let within = |at: u64| at >= request.offset && at - request.offset < request.len;
            assert!(failure.at.is_none_or(within));
            let (head, tail) = reply::failure(format, origin, &failure);
            check_reply(format, origin, &head, tail.len(), 0);
        }
        Ok(Action::Status) => {
            assert!(session.has_allocation && is_valid() && request.len > 0);
            let extents = [Descriptor { len: request.len, state: 3 }];
            let (head, tail) = reply::status(format, origin, &extents, limits.logical);
            check_reply(format, origin, &head, tail.len(), 0);
        }
        Ok(Action::Cache) => {
            assert!(is_valid());
            check_reply(format, origin, &reply::success(format, origin, 0), 0, 0);
        }
        Ok(Action::Io(op)) => {
            assert!(op == IoOp::Flush || is_valid());
            assert!(!limits.read_only || !op.changes());
            let has_data = matches!(op, IoOp::Read | IoOp::Write);
            assert!(!has_data || request.len <= wire::MAX_PAYLOAD.into());
            let data = if is_read { request.len as usize } else { 0 };
            check_reply(format, origin, &reply::success(format, origin, data as u32), 0, data);
        }
    }
}

/// A reply says how long it is, unless the client has to know.
fn check_reply(format: Format, origin: Origin, head: &Head, tail: usize, data: usize) {
    let bytes = head.bytes();
    let mut at = Fields(bytes);
    let (_, _) = (at.u32(), at.u32());
    assert_eq!(at.u64(), Some(origin.cookie));
    let (header, len) = match (format, bytes.len()) {
        (Format::Simple, 16) => return assert_eq!(tail, 0),
        (Format::Structured, 16) => return assert!(tail == 0 && data == 0 && !origin.is_read),
        (Format::Structured, _) => (20, at.u32().map(u64::from)),
        (Format::Extended, _) => {
            assert_eq!(at.u64(), Some(origin.offset));
            (32, at.u64())
        }
        (Format::Simple, _) => panic!("a chunk"),
    };
    assert_eq!(len, Some((bytes.len() - header + tail + data) as u64));
}

#[cfg(test)]
mod tests {
    use bowline_base::SplitMix64;

    use super::*;

    /// Streams that are right for the most part.
    struct Random(SplitMix64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0.below(n)
        }

        fn option(&mut self, out: &mut Vec<u8>) {
            let contexts = b"\0\0\0\x04disk\0\0\0\x01\0\0\0\x0fbase:allocation";
            let (number, data) = match self.below(8) {
                0 | 1 => (8, &b""[..]),
                2 => (11, &b""[..]),
                3 => (9 + self.below(2) as u32, &contexts[..]),
                4 => (6, &b"\0\0\0\x04disk\0\x01\0\x01"[..]),
                5 => (7, &[0; 6][..]),
                6 => (1, &b""[..]),
                _ => (self.below(14) as u32, &contexts[..self.below(30) as usize]),
            };
            out.extend(wire::OPTION.to_be_bytes());
            out.extend(number.to_be_bytes());
            out.extend((data.len() as u32).to_be_bytes());
            out.extend(data);
        }

        fn request(&mut self, out: &mut Vec<u8>) {
            let is_extended = self.below(2) == 0;
            let magic: u32 = if is_extended { 0x21e4_1c71 } else { 0x2560_9513 };
            let flags = if self.below(2) == 0 { 0 } else { 1_u16 << self.below(8) };
            out.extend(magic.to_be_bytes());
            out.extend(flags.to_be_bytes());
            out.extend((self.below(9) as u16).to_be_bytes());
            let shift = self.below(64);
            let offset = (1_u64 << shift).saturating_sub(self.below(2) * 512);
            out.extend([self.below(u64::MAX), offset].map(u64::to_be_bytes).concat());
            let len = self.below(9) * 512 + self.below(2);
            if is_extended {
                out.extend((len << self.below(60)).to_be_bytes());
            } else {
                out.extend((len as u32).to_be_bytes());
            }
        }
    }

    #[test]
    fn any_stream_is_answered_by_whole_replies_that_are_within_the_disk() {
        let mut random = Random(SplitMix64::new(0x1234_5678_9abc_def1));
        for _ in 0..20_000 {
            let mut stream = vec![random.below(256) as u8];
            stream.extend((random.below(5) as u32).to_be_bytes());
            for _ in 0..random.below(6) {
                random.option(&mut stream);
            }
            for _ in 0..random.below(12) {
                random.request(&mut stream);
            }
            if random.below(2) == 0 {
                let at = random.below(stream.len() as u64) as usize;
                stream[at] = random.below(256) as u8;
            }
            check_stream(&stream);
        }
    }
}
