//! Faults: reasons why packets could not be sent, for diagnosis.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use bowline_roce::Instant;
use bowline_verbs::Error;

/// How long a fault counts as the reason for present trouble.
const FAULT_LIFETIME: Duration = Duration::from_secs(10);
/// Most peers whose faults are kept.
const PEERS_MAX: usize = 64;

#[derive(Debug)]
struct Fault {
    since: Instant,
    /// The peer, if the fault concerns only one.
    to: Option<IpAddr>,
    error: Error,
}

impl Fault {
    fn unexpired(&self, now: Instant) -> Option<&Error> {
        (now.saturating_since(self.since) < FAULT_LIFETIME).then_some(&self.error)
    }
}

/// The last fault with each peer; the newest comes last.
#[derive(Debug, Default)]
pub(crate) struct Faults(VecDeque<Fault>);

impl Faults {
    /// Records a fault.
    pub(crate) fn note(&mut self, now: Instant, to: Option<IpAddr>, error: Error) {
        self.0.retain(|fault| fault.to != to);
        if self.0.len() == PEERS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Fault { since: now, to, error });
    }

    /// Returns the newest fault, however old.
    pub(crate) fn last(&self) -> Option<&Error> {
        self.0.back().map(|fault| &fault.error)
    }

    /// Returns the newest fault, if it still counts.
    pub(crate) fn now(&self, now: Instant) -> Option<&Error> {
        self.0.back()?.unexpired(now)
    }

    /// Returns the fault of a peer, if it still counts.
    pub(crate) fn with(&self, now: Instant, peer: IpAddr) -> Option<&Error> {
        self.0.iter().find(|fault| fault.to == Some(peer))?.unexpired(now)
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
        let later = start + FAULT_LIFETIME;
        assert_eq!((faults.now(later), faults.with(later, peer(1).unwrap())), (None, None));
        assert_eq!(faults.last(), Some(&error(4)));
        for host in 0..1000 {
            faults.note(later, peer(host), error(5));
        }
        assert_eq!(faults.0.len(), PEERS_MAX);
    }
}
