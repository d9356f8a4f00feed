//! Reports which paths of its clients a server has lost, and which are back.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use bowline_rtrs_driver::server::{CloseReason, PathChange, PathEv};
use bowline_verbs::{Error, Status};

/// Time in which at most [`LINES`] lines are printed, since clients decide how many changes there
/// are.
const SPAN: Duration = Duration::from_secs(10);
/// See [`SPAN`].
const LINES: u64 = 16;
/// Most lost paths that are remembered, to report their return.
const LOST: usize = 4096;

/// A path across reconnects: session, client address and local address.
type Path = (String, IpAddr, IpAddr);

/// The state of reporting.
#[derive(Debug, Default)]
pub(super) struct Lost {
    paths: BTreeSet<Path>,
    /// When the present span began, and the number of lines in it.
    since: Option<Instant>,
    lines: u64,
    /// Number of changes not reported in it.
    left_out: u64,
}

impl Lost {
    /// Returns the lines to print for what has happened; `missed` is the number of changes that are
    /// not among them. `why` returns what keeps packets from going from a local address to a
    /// client, if known.
    pub(super) fn lines(
        &mut self,
        now: Instant,
        news: &[PathEv],
        missed: u64,
        why: impl Fn(IpAddr, IpAddr) -> Option<Error>,
    ) -> Vec<String> {
        let mut lines = Vec::new();
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= SPAN) {
            self.since = Some(now);
            self.lines = 0;
            let left_out = std::mem::take(&mut self.left_out);
            if left_out > 0 {
                lines.push(format!("paths: {left_out} more were lost or came back"));
            }
        }
        self.left_out += missed;
        for news in news {
            let Some(line) = self.line(news, &why) else { continue };
            if self.lines < LINES {
                self.lines += 1;
                lines.push(line);
            } else {
                self.left_out += 1;
            }
        }
        lines
    }

    /// Returns the line for a change. Clients that disconnect and paths closed by a command are not
    /// reported; clients that break rules are counted elsewhere.
    fn line(
        &mut self,
        news: &PathEv,
        why: impl Fn(IpAddr, IpAddr) -> Option<Error>,
    ) -> Option<String> {
        let PathEv { session, local, remote, change, .. } = news;
        let path = (session.as_str().to_owned(), remote.ip(), local.ip());
        let what = match *change {
            PathChange::Connected => self.paths.remove(&path).then(|| "back".to_owned()),
            // When a client disconnects, flushed queues are the first sign of it.
            PathChange::Closed(
                CloseReason::Local
                | CloseReason::Disconnected
                | CloseReason::Completion(Status::WrFlushErr),
            ) => None,
            PathChange::Closed(reason) if reason.is_violation() || reason.is_refusal() => None,
            PathChange::Closed(reason) => {
                if self.paths.len() < LOST {
                    self.paths.insert(path);
                }
                // A silent peer is explained by a fault at this end, if one is known.
                let is_silence = matches!(
                    reason,
                    CloseReason::Completion(Status::RetryExcErr)
                        | CloseReason::Heartbeat
                        | CloseReason::Silent
                );
                let fault = is_silence.then(|| why(local.ip(), remote.ip())).flatten();
                Some(match fault {
                    Some(fault) => format!("lost: {reason}: {fault}"),
                    None => format!("lost: {reason}"),
                })
            }
        }?;
        Some(format!("session {session}: path {} to {} {what}", remote.ip(), local.ip()))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use bowline_wire::rtrs::SessionName;

    use super::*;

    fn news(host: u8, change: PathChange) -> PathEv {
        let addr = |net| SocketAddr::from(([10, 0, net, host], 1234));
        let session = SessionName::new("disks").unwrap();
        PathEv::new(session, addr(2), addr(1), change)
    }

    #[test]
    fn a_path_is_told_of_when_it_is_lost_and_when_it_is_back() {
        let mut lost = Lost::default();
        let now = Instant::now();
        let mut tell = |change| lost.lines(now, &[news(7, change)], 0, |_, _| None);
        let nothing: [&str; 0] = [];
        assert_eq!(tell(PathChange::Connected), nothing);
        assert_eq!(
            tell(PathChange::Closed(CloseReason::Completion(Status::RetryExcErr))),
            ["session disks: path 10.0.1.7 to 10.0.2.7 lost: nothing is acknowledged"]
        );
        assert_eq!(tell(PathChange::Connected), ["session disks: path 10.0.1.7 to 10.0.2.7 back"]);
        assert_eq!(tell(PathChange::Connected), nothing);
        let flushed = CloseReason::Completion(Status::WrFlushErr);
        for reason in [CloseReason::Local, CloseReason::Disconnected, flushed, CloseReason::Chunk] {
            assert_eq!(tell(PathChange::Closed(reason)), nothing);
        }
        assert_eq!(
            tell(PathChange::Closed(CloseReason::Heartbeat)),
            ["session disks: path 10.0.1.7 to 10.0.2.7 lost: the client does not answer"]
        );
    }

    #[test]
    fn clients_do_not_decide_how_many_lines_there_are() {
        let mut lost = Lost::default();
        let now = Instant::now();
        let unknown = |_, _| None;
        let flood: Vec<PathEv> =
            (0..100).map(|n| news(n, PathChange::Closed(CloseReason::Heartbeat))).collect();
        assert_eq!(lost.lines(now, &flood, 5, unknown).len(), 16);
        assert_eq!(lost.lines(now + SPAN / 2, &flood, 0, unknown).len(), 0);
        let later = lost.lines(now + SPAN, &flood[..1], 0, unknown);
        assert_eq!(later[0], "paths: 189 more were lost or came back");
        assert_eq!(later.len(), 2);
        assert_eq!(
            lost.lines(now + 2 * SPAN, &[], 0, unknown).len(),
            0,
            "there is nothing more to tell"
        );
    }
    #[test]
    fn the_reason_at_this_end_is_told_of_silence() {
        let why = |local: IpAddr, remote: IpAddr| {
            assert_eq!(
                (local, remote),
                (news(7, PathChange::Connected).local.ip(), [10, 0, 1, 7].into())
            );
            Some(Error::System { what: "sending".to_owned(), errno: bowline_base::Errno(101) })
        };
        let told = |reason| {
            let news = news(7, PathChange::Closed(reason));
            Lost::default().lines(Instant::now(), &[news], 0, why).remove(0)
        };
        let silent = told(CloseReason::Completion(Status::RetryExcErr));
        let wanted =
            "lost: nothing is acknowledged: sending: Network is unreachable (os error 101)";
        assert!(silent.ends_with(wanted), "{silent}");
        let other = told(CloseReason::Completion(Status::RemOpErr));
        assert!(other.ends_with("lost: a work request failed: RemOpErr"), "{other}");
    }
}
