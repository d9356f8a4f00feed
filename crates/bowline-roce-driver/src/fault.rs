//! What keeps packets from being sent, for whoever asks why nothing gets through.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use bowline_roce::Instant;
use bowline_verbs::Error;

/// How long what kept packets from being sent counts as the reason for what goes wrong.
const LASTS: Duration = Duration::from_secs(10);
/// Peers of which it is remembered.
const PEERS: usize = 64;

#[derive(Debug)]
struct Fault {
    since: Instant,
    /// The peer, if it is with one only.
    to: Option<IpAddr>,
    error: Error,
}

impl Fault {
    fn lasting(&self, now: Instant) -> Option<&Error> {
        (now.saturating_since(self.since) < LASTS).then_some(&self.error)
    }
}

/// The last fault with each peer; the newest comes last.
#[derive(Debug, Default)]
pub(crate) struct Faults(VecDeque<Fault>);

impl Faults {
    /// Remembers a fault.
    pub(crate) fn note(&mut self, now: Instant, to: Option<IpAddr>, error: Error) {
        self.0.retain(|fault| fault.to != to);
        if self.0.len() == PEERS {
            self.0.pop_front();
        }
        self.0.push_back(Fault { since: now, to, error });
    }

    /// The newest, however old.
    pub(crate) fn last(&self) -> Option<&Error> {
        self.0.back().map(|fault| &fault.error)
    }

    /// The newest, if it counts still.
    pub(crate) fn now(&self, now: Instant) -> Option<&Error> {
        self.0.back()?.lasting(now)
    }

    /// That with a peer, if it counts still.
    pub(crate) fn with(&self, now: Instant, peer: IpAddr) -> Option<&Error> {
        self.0.iter().find(|fault| fault.to == Some(peer))?.lasting(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_its_own_reason_and_an_old_one_is_none() {
        let peer = |host: u16| Some(IpAddr::from([10, 0, (host >> 8) as u8, host as u8]));
        let error = |errno: i32| Error::System {
            what: "sending".to_owned(),
            errno: bowline_base::Errno(errno),
        };
        let (start, mut faults) = (Instant::from_nanos(1), Faults::default());
        faults.note(start, peer(1), error(1));
        faults.note(start, peer(2), error(2));
        faults.note(start, peer(1), error(3));
        faults.note(start, None, error(4));
        assert_eq!((faults.last(), faults.now(start)), (Some(&error(4)), Some(&error(4))));
        assert_eq!(faults.with(start, peer(1).unwrap()), Some(&error(3)));
        assert_eq!(faults.with(start, peer(2).unwrap()), Some(&error(2)));
        assert_eq!(faults.with(start, peer(3).unwrap()), None);
        let later = start + LASTS;
        assert_eq!((faults.now(later), faults.with(later, peer(1).unwrap())), (None, None));
        assert_eq!(faults.last(), Some(&error(4)));
        for host in 0..1000 {
            faults.note(later, peer(host), error(5));
        }
        assert_eq!(faults.0.len(), PEERS);
    }
}
