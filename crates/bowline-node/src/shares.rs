//! Shares of one socket's send buffer: no receiver can use up what all have in common.
//!
//! Sent messages are counted here. Only the node knows which were acknowledged since: it is asked
//! at intervals, and when a share seems full.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use bowline::rds::{Error, OutstandingMessages, Socket};

/// Least time between two queries of the node, each of which walks all queued messages. The
/// interval grows with the time the last query took.
const LOOK_PAUSE: Duration = Duration::from_millis(2);
const LOOK_PART: u32 = 10;

/// Approximate memory of a message besides its payload, in bytes.
const MESSAGE_WEIGHT: usize = 128;

/// Messages and their payload bytes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Amount {
    /// How many messages.
    pub messages: usize,
    /// Bytes of all their payloads.
    pub bytes: usize,
}

impl Amount {
    fn add(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
    }

    /// Memory besides the payload counts, too.
    fn weight(self) -> usize {
        self.bytes.saturating_add(self.messages.saturating_mul(MESSAGE_WEIGHT))
    }

    /// Tells whether a message fits. The first one may have any length.
    fn has_room(self, bytes: usize, bound: Self) -> bool {
        let fits = self.messages < bound.messages && self.bytes + bytes <= bound.bytes;
        fits || self.messages == 0
    }
}

/// Limits for one receiver, for all receivers of one host, and for all receivers.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of one receiver.
    pub receiver: Amount,
    /// Of all receivers of one host.
    pub host: Amount,
    /// Of all receivers.
    pub total: Amount,
}

/// The limit that is reached.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Lack {
    /// That of the receiver.
    Receiver,
    /// That of its host.
    Host,
    /// That of all.
    Total,
}

/// What is kept for one receiver.
#[derive(Debug)]
struct Share {
    /// What its node has not acknowledged, by the last query.
    sent: Amount,
    /// What the caller keeps because the node refused it.
    waiting: Amount,
    /// When it last took a message, or its first message was sent.
    since: Instant,
    /// All of its messages were given up, but are still queued in the node.
    cut: bool,
}

impl Share {
    fn all(&self) -> Amount {
        let mut all = self.sent;
        all.add(self.waiting);
        all
    }
}

/// What is kept for all receivers of a socket.
#[derive(Debug)]
pub struct Shares {
    bounds: Bounds,
    receivers: BTreeMap<SocketAddr, Share>,
    hosts: HashMap<IpAddr, Amount>,
    total: Amount,
    /// When the node may be asked again.
    next_look: Option<Instant>,
}

impl Shares {
    /// Returns the shares of a socket that has sent nothing.
    pub fn new(bounds: Bounds) -> Self {
        let (receivers, hosts) = (BTreeMap::new(), HashMap::new());
        Self { bounds, receivers, hosts, total: Amount::default(), next_look: None }
    }

    /// Tells whether nothing is kept for anybody.
    pub fn is_empty(&self) -> bool {
        self.receivers.is_empty()
    }

    /// Tells whether one more message for this receiver is within all bounds.
    pub fn has_room(&self, to: SocketAddr, bytes: usize) -> bool {
        self.lacks(to, bytes).is_none()
    }

    /// Returns the smallest limit that leaves no room for one more message.
    pub fn lacks(&self, to: SocketAddr, bytes: usize) -> Option<Lack> {
        let share = self.receivers.get(&to).map(Share::all).unwrap_or_default();
        let host = self.hosts.get(&to.ip()).copied().unwrap_or_default();
        if !share.has_room(bytes, self.bounds.receiver) {
            Some(Lack::Receiver)
        } else if !host.has_room(bytes, self.bounds.host) {
            Some(Lack::Host)
        } else if !self.total.has_room(bytes, self.bounds.total) {
            Some(Lack::Total)
        } else {
            None
        }
    }

    /// Returns the host with the most kept for it.
    pub fn largest_host(&self) -> Option<IpAddr> {
        let (host, _) = self.hosts.iter().max_by_key(|(_, amount)| amount.weight())?;
        Some(*host)
    }

    /// Returns the receiver of a host with the most kept for it, except those given up.
    pub fn largest_on(&self, host: IpAddr) -> Option<SocketAddr> {
        let (to, _) = self.on(host).max_by_key(|(_, share)| share.all().weight())?;
        Some(*to)
    }

    /// Returns the receivers on a host that are not given up yet.
    pub fn all_on(&self, host: IpAddr) -> Vec<SocketAddr> {
        self.on(host).map(|(to, _)| *to).collect()
    }

    fn on(&self, host: IpAddr) -> impl Iterator<Item = (&SocketAddr, &Share)> {
        let ports = SocketAddr::new(host, 0)..;
        let here = self.receivers.range(ports).take_while(move |(to, _)| to.ip() == host);
        here.filter(|(_, share)| !share.cut)
    }

    /// Counts a message that the node took.
    pub fn sent(&mut self, to: SocketAddr, bytes: usize, now: Instant) {
        let one = Amount { messages: 1, bytes };
        self.share(to, one, now).sent.add(one);
    }

    /// Counts a message that the caller keeps.
    pub fn waits(&mut self, to: SocketAddr, bytes: usize, now: Instant) {
        let one = Amount { messages: 1, bytes };
        self.share(to, one, now).waiting.add(one);
    }

    /// Notes that the node took a message that the caller kept.
    pub fn moved(&mut self, to: SocketAddr, bytes: usize, now: Instant) {
        let Some(share) = self.receivers.get_mut(&to) else { return };
        share.waiting.messages -= 1;
        share.waiting.bytes -= bytes;
        share.sent.add(Amount { messages: 1, bytes });
        share.since = now;
    }

    /// Notes that the caller has given up what it kept for a receiver and has cancelled the rest.
    /// Returns how many these are.
    pub fn cut(&mut self, to: SocketAddr, now: Instant) -> usize {
        let Some(share) = self.receivers.get_mut(&to) else { return 0 };
        let sent = if share.cut { 0 } else { share.sent.messages };
        let waiting = std::mem::take(&mut share.waiting);
        share.since = now;
        share.cut = true;
        waiting.messages + sent
    }

    /// Returns the receivers that have taken nothing for this long.
    pub fn silent_for(&self, time: Duration, now: Instant) -> Vec<SocketAddr> {
        let silent = |share: &Share| now.saturating_duration_since(share.since) >= time;
        self.receivers.iter().filter(|(_, share)| silent(share)).map(|(to, _)| *to).collect()
    }

    /// Queries what the node still keeps, unless it was queried a moment ago.
    ///
    /// # Errors
    ///
    /// Those of a socket that is closed.
    pub fn look(&mut self, socket: &Socket, now: Instant) -> Result<(), Error> {
        if self.next_look.is_some_and(|next| now < next) {
            return Ok(());
        }
        self.look_now(socket, now)
    }

    /// Queries what the node still keeps.
    ///
    /// # Errors
    ///
    /// Those of a socket that is closed.
    pub fn look_now(&mut self, socket: &Socket, now: Instant) -> Result<(), Error> {
        let begin = Instant::now();
        let held = socket.outstanding()?;
        self.next_look = Some(now + LOOK_PAUSE.max(LOOK_PART * begin.elapsed()));
        self.update(&held, now);
        Ok(())
    }

    fn update(&mut self, held: &[OutstandingMessages], now: Instant) {
        (self.hosts, self.total) = (HashMap::new(), Amount::default());
        let held: HashMap<SocketAddr, Amount> = held
            .iter()
            .map(|held| (held.to, Amount { messages: held.messages, bytes: held.bytes }))
            .collect();
        self.receivers.retain(|to, share| {
            let sent = held.get(to).copied().unwrap_or_default();
            if sent.messages < share.sent.messages {
                share.since = now;
            }
            share.sent = sent;
            let all = share.all();
            if all.messages == 0 {
                return false;
            }
            self.hosts.entry(to.ip()).or_default().add(all);
            self.total.add(all);
            true
        });
    }

    fn share(&mut self, to: SocketAddr, one: Amount, now: Instant) -> &mut Share {
        self.hosts.entry(to.ip()).or_default().add(one);
        self.total.add(one);
        let none = Amount::default();
        let fresh = || Share { sent: none, waiting: none, since: now, cut: false };
        let share = self.receivers.entry(to).or_insert_with(fresh);
        share.cut = false;
        share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    fn shares() -> Shares {
        Shares::new(Bounds {
            receiver: Amount { messages: 2, bytes: 100 },
            host: Amount { messages: 3, bytes: 150 },
            total: Amount { messages: 5, bytes: 1000 },
        })
    }

    #[test]
    fn each_receiver_each_host_and_all_together_are_bounded() {
        let (mut shares, now) = (shares(), Instant::now());
        let (a1, a2, b1) = (to("10.0.0.1:1"), to("10.0.0.1:2"), to("10.0.0.2:1"));
        assert!(shares.has_room(a1, 5000), "one message of any length");
        shares.sent(a1, 60, now);
        assert!(!shares.has_room(a1, 60), "beyond the receiver's bytes");
        shares.waits(a1, 40, now);
        assert!(!shares.has_room(a1, 0), "beyond the receiver's messages");
        assert!(!shares.has_room(a2, 60), "beyond the host's bytes");
        assert!(shares.has_room(a2, 50));
        shares.sent(a2, 0, now);
        assert!(!shares.has_room(to("10.0.0.1:3"), 0), "beyond the host's messages");
        assert!(!shares.has_room(b1, 901), "beyond what all have");
        shares.sent(b1, 1, now);
        shares.sent(b1, 1, now);
        assert!(!shares.has_room(to("10.0.0.3:1"), 0), "beyond the messages of all");
    }

    #[test]
    fn whoever_keeps_most_is_found() {
        let (mut shares, now) = (shares(), Instant::now());
        let (a1, a2, b1) = (to("10.0.0.1:9"), to("10.0.0.1:2"), to("10.0.0.2:1"));
        for (to, bytes) in [(a1, 60), (a2, 70), (b1, 100)] {
            shares.sent(to, bytes, now);
        }
        assert_eq!(shares.largest_host(), Some(a1.ip()));
        assert_eq!(shares.lacks(a2, 40), Some(Lack::Receiver));
        assert_eq!(shares.lacks(a2, 30), Some(Lack::Host));
        assert_eq!(shares.lacks(to("10.0.0.3:1"), 900), Some(Lack::Total));
        assert_eq!(shares.largest_on(a1.ip()), Some(a2));
        shares.cut(a2, now);
        assert_eq!(shares.largest_on(a1.ip()), Some(a1), "the other was given up");
        assert_eq!(shares.all_on(a1.ip()), [a1]);
        shares.waits(a2, 1, now);
        assert_eq!(shares.all_on(a1.ip()), [a2, a1]);
    }

    #[test]
    fn what_the_node_does_not_keep_any_more_is_room_again() {
        let (mut shares, now) = (shares(), Instant::now());
        let (a, b) = (to("10.0.0.1:1"), to("10.0.0.2:1"));
        shares.sent(a, 60, now);
        shares.sent(a, 40, now);
        shares.sent(b, 60, now);
        let later = now + Duration::from_secs(1);
        shares.update(&[OutstandingMessages { to: a, messages: 1, bytes: 40 }], later);
        assert!(shares.has_room(a, 60));
        let second = Duration::from_secs(1);
        assert_eq!(shares.silent_for(second, later), [], "it took one, the other all");
        shares.update(&[OutstandingMessages { to: a, messages: 1, bytes: 40 }], later + second);
        assert_eq!(shares.silent_for(second, later + second), [a]);
        shares.waits(a, 1, later + second);
        shares.cut(a, later + second);
        shares.update(&[], later + second);
        assert!(shares.is_empty());
    }
}
