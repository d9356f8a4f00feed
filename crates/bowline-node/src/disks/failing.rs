//! Reports storage that fails, and storage that works again: of exports at the server, of mapped
//! disks at the client.

use std::{collections::BTreeMap, time::Duration};

use bowline_base::{Instant, clock};
use bowline_ctl::Errno;
use bowline_rnbd::{Failures, IoOp};
use bowline_rnbd_driver::client::Client;

use crate::log::stamp;

/// Shortest time between two lines about a trouble that lasts.
const PAUSE: Duration = Duration::from_secs(60);
/// Shortest time between two reported troubles of one disk.
const PAUSE_BETWEEN: Duration = Duration::from_secs(10);
/// How often disks of a client are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What was reported of each disk that has failed requests.
#[derive(Debug, Default)]
pub(super) struct Failing {
    reported: BTreeMap<String, Reported>,
}

#[derive(Debug)]
struct Reported {
    /// When a failure was last reported, and how many there were then.
    at: Instant,
    count: u64,
    is_failing: bool,
}

impl Failing {
    /// Returns lines about these disks, each with a text that no other one has; `about` makes of
    /// that and an errno the beginning of a line, and the end, which says what to do.
    pub(super) fn lines<'a>(
        &mut self,
        now: Instant,
        disks: impl Iterator<Item = (&'a str, Failures)>,
        about: impl Fn(&str, Errno) -> (String, String),
    ) -> Vec<String> {
        let disks: Vec<_> = disks.collect();
        self.reported.retain(|name, _| disks.iter().any(|(disk, _)| disk == name));
        let line = |(name, failures): (&str, Failures)| {
            let last = failures.last?;
            let reported = self.reported.get(name);
            let (count, since) =
                reported.map_or((0, None), |reported| (reported.count, Some(reported.at)));
            let was_failing = reported.is_some_and(|reported| reported.is_failing);
            let (begin, advice) = about(name, last.errno);
            // What was forgotten since counts from 0 again.
            let more = failures.count.checked_sub(count).unwrap_or(failures.count);
            if was_failing && !failures.is_failing(now) {
                let reported = self.reported.get_mut(name)?;
                (reported.count, reported.is_failing) = (failures.count, false);
                let what = if last.op == IoOp::Read { "reads" } else { "writes" };
                let after =
                    if more > 0 { format!(", after {more} more failed") } else { String::new() };
                return Some(format!("{begin}: works again: {what} succeed{after}"));
            }
            if more > 0 {
                let pause = if was_failing { PAUSE } else { PAUSE_BETWEEN };
                if since.is_some_and(|since| now.saturating_since(since) < pause) {
                    return None;
                }
                let reported = Reported { at: now, count: failures.count, is_failing: true };
                self.reported.insert(name.to_owned(), reported);
                let requests = if more == 1 { "request" } else { "requests" };
                return Some(format!(
                    "{begin}: {more} {requests} failed, the last to {}: {}: {advice}",
                    verb(last.op),
                    errno_text(last.errno)
                ));
            }
            None
        };
        disks.into_iter().filter_map(line).collect()
    }
}

/// Returns an error in the words of the system, with its name.
fn errno_text(errno: Errno) -> String {
    match errno.name() {
        Some(name) => format!("{} ({name})", errno.strerror()),
        None => format!("{} (errno {})", errno.strerror(), errno.0),
    }
}

const fn verb(op: IoOp) -> &'static str {
    match op {
        IoOp::Read => "read",
        IoOp::Write => "write",
        IoOp::Flush => "flush",
        IoOp::Discard => "discard",
        IoOp::WriteZeroes => "write zeroes",
        IoOp::SecureErase => "erase",
    }
}

/// Returns what the owner of storage can do about an error of it.
pub(super) const fn advice(errno: Errno) -> &'static str {
    const EROFS: i32 = 30;
    const EFBIG: i32 = 27;
    const EDQUOT: i32 = 122;
    match errno.0 {
        _ if errno.0 == Errno::ENOSPC.0 => {
            "its file system is full: remove something there or make it larger; writes to new parts of \
             the disk fail until then"
        }
        EDQUOT => "the quota of its owner is used up: raise it, or remove something there",
        EROFS => {
            "its file system is read-only, perhaps since an error of the drive: see the kernel's log, \
             check it and mount it again"
        }
        EFBIG => {
            "the file may not be that large: see the limit of the process (RLIMIT_FSIZE) and of its \
             file system"
        }
        _ => {
            "see the kernel's log (dmesg) and the state of the drive (smartctl), and save what can \
             still be read"
        }
    }
}

/// Reports which disks of a client fail, since the storage of their server does.
#[derive(Debug, Default)]
pub struct FailingDisks {
    failing: Failing,
    looked: Option<Instant>,
}

impl FailingDisks {
    /// Prints what has changed since the last look; looks once a second.
    pub fn report(&mut self, client: &Client) {
        let now = clock::now();
        if self.looked.is_some_and(|looked| now.saturating_since(looked) < LOOK) {
            return;
        }
        self.looked = Some(now);
        let disks = client.disks();
        let failed = disks.iter().filter_map(|disk| {
            let failures = disk.failures().filter(|failures| failures.count > 0)?;
            // A disk that was unmapped may have had its local name.
            let (session, id) = (disk.session_name(), disk.info()?.id);
            let begin = format!("{}: storage behind session {session}", disk.local_name());
            Some((format!("{begin} {id:?}"), begin, failures))
        });
        let failed: Vec<(String, String, Failures)> = failed.collect();
        let failures = failed.iter().map(|(one, _, failures)| (one.as_str(), *failures));
        let about = |one: &str, _: Errno| {
            let begin = failed.iter().find(|(known, ..)| known == one).map(|(_, begin, _)| begin);
            let advice = "the log of the server says which disk that is and why";
            (begin.cloned().unwrap_or_default(), advice.to_owned())
        };
        for line in self.failing.lines(now, failures, about) {
            note_of_peer!("{}{line}", stamp());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_trouble_is_logged_at_its_begin_once_a_minute_and_at_its_end() {
        let mut failing = Failing::default();
        let mut failures = Failures::default();
        let mut now = Instant::from_nanos(1_000_000_000_000);
        let mut reported = Vec::new();
        for second in 0..130 {
            let time = now + SECOND * second;
            failures.failed(time, IoOp::Write, Errno::ENOSPC);
            let about = |name: &str, errno| (format!("export {name}"), advice(errno).to_owned());
            reported.extend(failing.lines(time, [("a", failures)].into_iter(), about));
        }
        let failed = "to write: No space left on device (ENOSPC): its file system is full: ";
        let begins = [
            format!("export a: 1 request failed, the last {failed}"),
            format!("export a: 60 requests failed, the last {failed}"),
            format!("export a: 60 requests failed, the last {failed}"),
        ];
        assert_eq!(reported.len(), begins.len(), "{reported:?}");
        let is_begin = |(line, begin): (&String, &String)| line.starts_with(begin.as_str());
        assert!(reported.iter().zip(&begins).all(is_begin), "{reported:?}");
        now = now + SECOND * 200;
        let mut look = |now, failures| {
            failing
                .lines(now, [("a", failures)].into_iter(), |name, _| (name.to_owned(), "x".into()))
        };
        // What failed since the last line comes before the end.
        assert_eq!(look(now, failures).len(), 1);
        assert_eq!(look(now, failures).len(), 0, "nothing has succeeded");
        failures.succeeded(IoOp::Write);
        assert_eq!(look(now, failures), ["a: works again: writes succeed"]);
        assert_eq!(look(now, failures).len(), 0);
        // What failed without a line since the last one is counted at the end.
        for second in [20, 21] {
            failures.failed(now + SECOND * second, IoOp::Write, Errno::ENOSPC);
            assert_eq!(look(now + SECOND * second, failures).len(), usize::from(second == 20));
        }
        failures.succeeded(IoOp::Write);
        let end = look(now + SECOND * 26, failures);
        assert_eq!(end, ["a: works again: writes succeed, after 1 more failed"]);
        now = now + SECOND * 100;
        // One that fails at once again, and for ever, does not fill the log.
        let mut reported = 0;
        for second in 0..120 {
            let time = now + SECOND * second;
            failures.failed(time, IoOp::Read, Errno::EIO);
            failures.succeeded(IoOp::Read);
            reported += look(time, failures).len();
        }
        assert!(reported <= 3, "{reported}");
    }
}
