//! A connection: the relation of a local and a remote address, with up to eight paths.

use std::collections::VecDeque;
use std::net::Ipv6Addr;

use bowline_base::Instant;

use crate::cong::CongMap;
use crate::dedup::Dedup;
use crate::ids::LinkId;
use crate::path::{Path, TxMsg, mark};

/// What is known of the peer's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// No probe or pong of it has come.
    Unknown,
    /// Acknowledges by TCP alone: a kernel, or something like it.
    Kernel,
    /// Acknowledges end to end and takes messages of up to so many bytes.
    Bowline { max_message: u32 },
}

impl Peer {
    pub(crate) const fn is_bowline(self) -> bool {
        matches!(self, Self::Bowline { .. })
    }
}

/// Paths from `first` on wait until everything queued earlier on the others is through, so that
/// messages between two sockets are not overtaken by later ones.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    pub(crate) first: u8,
    /// For each path below `first`, the sequence number that must have been released.
    pub(crate) until: Vec<u64>,
    /// Paths, a bit each, whose connection ended with a cancelled message that was begun. The peer
    /// may have all of it, and take it until it greets on the next connection.
    pub(crate) left: u8,
}

/// An earlier process of a peer: the number awaited from it next, by path.
#[derive(Clone, Debug)]
pub(crate) struct Past {
    generation: u32,
    rx_expected: Vec<u64>,
}

/// Earlier processes that are remembered.
const PAST_MAX: usize = 4;

/// One relation of two addresses over TCP.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) local: Ipv6Addr,
    pub(crate) remote: Ipv6Addr,
    pub(crate) scope: u32,
    /// Index of the local address.
    pub(crate) home: usize,
    /// This side opens the TCP connections.
    pub(crate) smaller: bool,
    /// Agreed number of paths; 0: not known.
    pub(crate) npaths: u8,
    /// It was agreed on with an earlier process of the peer.
    pub(crate) npaths_past: bool,
    /// When the peer last said how many it has.
    pub(crate) npaths_told: Instant,
    /// A timer runs that asks whether the peer still has them.
    pub(crate) count_timer: bool,
    /// The only connection it had, on which it was asked, and when.
    pub(crate) count_asked: Option<(LinkId, Instant)>,
    pub(crate) peer: Peer,
    /// Generation of the peer; 0: not known.
    pub(crate) peer_generation: u32,
    /// Earlier generations, latest first, and what was next from each.
    pub(crate) past: Vec<Past>,
    /// Serial of the latest link that told it.
    pub(crate) generation_serial: u64,
    /// An earlier generation that came again, and the serial of the latest link when its own was
    /// closed.
    pub(crate) returning: Option<(u32, u64)>,
    pub(crate) peer_sport_idx: bool,
    /// When a message was refused last because it is not known yet whether the peer takes its
    /// length.
    pub(crate) long_refused: Option<Instant>,
    /// A timer runs that ends not knowing what the peer is.
    pub(crate) unknown_timer: bool,
    /// A whole frame has come from this peer at some time.
    pub(crate) proven: bool,
    /// Attempts to connect since the peer last asked for one, or had one that lasted.
    pub(crate) dials: u32,
    /// The peer has asked to be connected to, and was not dialled since.
    pub(crate) asked: bool,
    /// The path whose attempt to connect was put off since many peers are away.
    pub(crate) postponed: Option<u8>,
    pub(crate) paths: Vec<Path>,
    pub(crate) gate: Option<Gate>,
    pub(crate) map: CongMap,
    /// Link and time of the latest map.
    pub(crate) map_from: Option<(LinkId, Instant)>,
    /// The link on which our map went out last, and when.
    pub(crate) map_sent: Option<(LinkId, Instant)>,
    /// When our map went out on another link than shortly before: it is sent once more later.
    pub(crate) map_moved: Option<Instant>,
    /// When the latest map came that did not come on that link.
    pub(crate) map_elsewhere: Option<Instant>,
    /// A timer runs that has a fresh map sent: an older one may have come last.
    pub(crate) map_doubt: bool,
    /// Path whose connection was ended to get a fresh map, and when.
    pub(crate) map_renewal: Option<(u8, Instant)>,
    /// Our map is to be sent.
    pub(crate) map_due: bool,
    /// Link that knocks at the smaller side.
    pub(crate) knock: Option<LinkId>,
    /// Accepted links without a path, oldest first.
    pub(crate) extra: VecDeque<LinkId>,
    pub(crate) dedup: Option<Box<Dedup>>,
    /// Links there have been.
    pub(crate) links_made: u64,
    /// Bytes of its messages that wait for readers, as limits count them.
    pub(crate) recv_held: usize,
    pub(crate) last_used: Instant,
    /// When the latest whole frame came.
    pub(crate) heard_at: Instant,
}

impl Conn {
    /// A whole frame came from the peer.
    #[inline]
    pub(crate) const fn heard(&mut self, now: Instant) {
        self.proven = true;
        self.last_used = now;
        self.heard_at = now;
    }

    /// Takes back that an attempt to connect was put off: there is need for it now.
    pub(crate) fn hurry(&mut self) {
        let postponed = self.postponed.take();
        if let Some(path) = postponed.and_then(|index| self.paths.get_mut(usize::from(index))) {
            path.reconnect_at = None;
        }
    }

    /// Tells whether a process of this generation has been met before another one.
    pub(crate) fn knows(&self, generation: u32) -> bool {
        generation != 0 && self.past.iter().any(|p| p.generation == generation)
    }

    /// Notes that the peer is another process from now on. One that was there before goes on where
    /// it was: connections of a dead process may be accepted later than those of its successor,
    /// and look like the newer ones for a moment.
    pub(crate) fn change_generation(&mut self, from: u32, to: u32) {
        let known =
            self.past.iter().position(|p| p.generation == to).map(|at| self.past.remove(at));
        if from != 0 {
            let rx_expected = self.paths.iter().map(|p| p.rx_expected).collect();
            self.past.insert(0, Past { generation: from, rx_expected });
            self.past.truncate(PAST_MAX);
        }
        let known = known.map(|p| p.rx_expected).unwrap_or_default();
        for (at, path) in self.paths.iter_mut().enumerate() {
            path.rx_expected = known.get(at).copied().unwrap_or(0);
        }
    }

    /// The path of an index below 8, made with those before it when it is new.
    #[inline]
    pub(crate) fn make_path(&mut self, index: u8) -> &mut Path {
        while self.paths.len() <= usize::from(index) {
            let next = self.unused_sequence();
            self.paths.push(Path::new(next));
        }
        &mut self.paths[usize::from(index)]
    }

    /// A number that no message has had on any path. Messages of two sockets that change over to
    /// another path must not come to the numbers they had on the first: the peer would take a
    /// repeated one for an equal one of before.
    pub(crate) fn unused_sequence(&self) -> u64 {
        self.paths.iter().map(|p| p.next_tx_seq).max().unwrap_or(1)
    }

    /// Tells whether a message of an application is queued or unacknowledged. Probes and pongs
    /// alone neither keep a peer in memory nor are worth a knock.
    pub(crate) fn has_messages(&self) -> bool {
        let live = |m: &TxMsg| m.socket.is_some() && !m.has(mark::CANCELLED);
        self.paths.iter().any(|p| p.queue.iter().any(live))
    }

    /// The only path that has a connection, and that.
    pub(crate) fn only_link(&self) -> Option<(usize, LinkId)> {
        let mut links = self.paths.iter().enumerate().filter_map(|(at, p)| Some((at, p.link?)));
        links.next().filter(|_| links.next().is_none())
    }

    /// Number of paths to choose among when sending.
    #[inline]
    pub(crate) fn fan(&self) -> u8 {
        match self.npaths {
            0 | 1 => 1, // not known: path 0
            2 | 3 => 2,
            4..=7 => 4,
            _ => 8,
        }
    }
}
