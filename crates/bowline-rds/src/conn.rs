//! A connection: the relation of a local and a remote address, with up to eight paths.

use std::collections::VecDeque;
use std::net::Ipv6Addr;

use bowline_base::Instant;
use serde::{Deserialize, Serialize};

use crate::api::CloseReason;
use crate::cong::CongMap;
use crate::dedup::Dedup;
use crate::ids::LinkId;
use crate::node::RdmaConn;
use crate::path::{Path, PathState, TxMsg, mark};

/// What kind of node a peer is, as far as this node knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Peer {
    /// The peer has sent neither a probe nor a pong.
    Unknown,
    /// The peer acknowledges by TCP alone: a kernel, or a node like it.
    Kernel,
    /// The peer acknowledges end to end and takes messages of up to `max_message` bytes.
    Bowline { max_message: u32 },
}

impl Peer {
    pub(crate) const fn is_bowline(self) -> bool {
        matches!(self, Self::Bowline { .. })
    }
}

/// Holds back the paths from `first` on until the peer has taken all messages that were queued
/// earlier on the lower paths. Without it a later message between two sockets could overtake an
/// earlier one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct PathBarrier {
    /// Index of the first path that is held back.
    pub(crate) first: u8,
    /// For each path below `first`: messages with lower sequence numbers must have been released.
    pub(crate) until: Vec<u64>,
    /// Bit mask of paths whose link ended in the middle of a cancelled message. The peer may have
    /// received all of that message, and may deliver it until it greets on the path's next link.
    pub(crate) unsettled: u8,
}

/// An earlier process at a peer's address, and for each path the sequence number that was expected
/// of it next.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct FormerProcess {
    generation: u32,
    rx_expected: Vec<u64>,
}

/// Number of earlier processes that are remembered for each peer.
const FORMER_PROCESSES_MAX: usize = 4;

/// The relation of a local and a remote address over one transport, with up to eight paths
///
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Conn {
    pub(crate) local: Ipv6Addr,
    pub(crate) remote: Ipv6Addr,
    /// Interface of link-local addresses; 0 for others.
    pub(crate) scope: u32,
    /// Index of the local address in `Node::local_addrs`.
    pub(crate) local_addr: usize,
    /// This node opens the TCP connections, since its address is the smaller one.
    pub(crate) we_dial: bool,
    /// Number of paths that both sides agreed on; 0: not known yet.
    pub(crate) npaths: u8,
    /// `npaths` was agreed on with an earlier process of the peer.
    pub(crate) npaths_outdated: bool,
    /// When the peer last said how many paths it has.
    pub(crate) npaths_heard_at: Instant,
    /// The timer is armed that asks the peer whether it still has `npaths` paths.
    pub(crate) npaths_timer: bool,
    /// The link on which the peer was asked that, the only one it had, and when.
    pub(crate) npaths_asked: Option<(LinkId, Instant)>,
    pub(crate) peer: Peer,
    /// Generation of the peer's process; 0: not known.
    pub(crate) peer_generation: u32,
    /// Earlier processes of the peer, latest first.
    pub(crate) former: Vec<FormerProcess>,
    /// Serial of the latest link on which the peer told `peer_generation`.
    pub(crate) generation_serial: u64,
    /// Another generation that greeted and was not believed, and the serial of the latest link at
    /// that time: a later link with that generation is believed.
    pub(crate) doubted: Option<(u32, u64)>,
    /// Generation of a bowline process in whose place something came that did not greet: another
    /// node, or the same process, which takes this node for a kernel because one had its address.
    /// What was begun for the process waits until that is known, or until this time, and so does
    /// everything behind it.
    pub(crate) missed: Option<(u32, Instant)>,
    /// The source ports of the peer tell which path a connection is for.
    pub(crate) peer_sport_idx: bool,
    /// When a send was last refused because the longest message of the peer was not known yet.
    pub(crate) long_message_refused_at: Option<Instant>,
    /// The timer is armed after which a silent peer is taken for a kernel.
    pub(crate) kind_timer: bool,
    /// The peer has sent a whole frame at some time, so it is no stranger that only connected.
    pub(crate) proven: bool,
    /// Attempts to connect since the peer last knocked or a connection lasted.
    pub(crate) dial_attempts: u32,
    /// The peer has knocked and was not dialled since.
    pub(crate) asked_to_dial: bool,
    /// The path whose attempt to connect was put off, since many peers that nobody needs are away.
    pub(crate) postponed_path: Option<u8>,
    pub(crate) paths: Vec<Path>,
    pub(crate) path_barrier: Option<PathBarrier>,
    /// Congested ports of the peer's address.
    pub(crate) map: CongMap,
    /// Link on which the peer's latest map came, and when.
    pub(crate) map_received_on: Option<(LinkId, Instant)>,
    /// Link on which this node last sent its map, and when.
    pub(crate) map_sent_on: Option<(LinkId, Instant)>,
    /// When this node's map went out on another link than the map shortly before it. The map is
    /// sent once more `MAP_REORDER_TIME` later.
    pub(crate) map_changed_link_at: Option<Instant>,
    /// When this node's map is sent once more for paths that came up after it was sent.
    #[serde(default)]
    pub(crate) map_settles_at: Option<Instant>,
    /// When the latest map came on a link other than that of `map_received_on`.
    pub(crate) map_other_link_at: Option<Instant>,
    /// The timer is armed that has the peer send a fresh map, since an older one may have been read
    /// last.
    pub(crate) map_refresh_armed: bool,
    /// Path whose link was ended to get a fresh map, and when.
    pub(crate) map_refresh: Option<(u8, Instant)>,
    /// This node's map is to be sent to the peer.
    pub(crate) map_due: bool,
    /// The link by which this node, with the larger address, knocks: it asks the peer to connect
    ///
    pub(crate) knock: Option<LinkId>,
    /// Accepted links that serve no path, oldest first.
    pub(crate) extra: VecDeque<LinkId>,
    /// Recognises repeated messages of a peer that acknowledges by TCP alone.
    pub(crate) dedup: Option<Box<Dedup>>,
    /// Number of links made so far; the serial of the latest.
    pub(crate) links_made: u64,
    /// Bytes that TCP took and brought on links that are gone; over RDMA, on all connections.
    pub(crate) past_written: u64,
    pub(crate) past_read: u64,
    /// Bytes of the peer's messages that wait for readers, with the overhead that limits count.
    pub(crate) recv_held: usize,
    /// When a frame last came or a message was last queued; idle peers are forgotten by it.
    pub(crate) last_used: Instant,
    /// When the latest whole frame came.
    pub(crate) last_frame_at: Instant,
    /// Why the peer could not be connected to, as the operator was told last.
    #[serde(skip)]
    pub(crate) told_cannot_connect: Option<CloseReason>,
    /// When the peer said that it ends [R-2051], if no other process has shown itself since.
    #[serde(default)]
    pub(crate) peer_ended_at: Option<Instant>,
    /// The peer has ended, and nobody has taken its place for a while [R-2053].
    #[serde(default)]
    pub(crate) peer_gone: bool,
    /// The connection is over RDMA, and has only one path.
    #[serde(default)]
    pub(crate) rdma: Option<RdmaConn>,
}

impl Conn {
    /// Tells whether RDMA operations of queued messages are not over.
    pub(crate) fn has_ops(&self) -> bool {
        self.rdma.as_ref().is_some_and(|rdma| !rdma.ops.is_empty())
    }

    /// Notes that a whole frame came from the peer.
    #[inline]
    pub(crate) const fn touch(&mut self, now: Instant) {
        self.proven = true;
        self.last_used = now;
        self.last_frame_at = now;
    }

    /// Notes that another process than the one that ended is at the peer's address; tells whether
    /// the peer was gone.
    pub(crate) const fn is_back(&mut self) -> bool {
        self.peer_ended_at = None;
        std::mem::replace(&mut self.peer_gone, false)
    }

    /// Lets a postponed attempt to connect go ahead, since the peer is needed now.
    pub(crate) fn cancel_postponement(&mut self) {
        let postponed = self.postponed_path.take();
        if let Some(path) = postponed.and_then(|index| self.paths.get_mut(usize::from(index))) {
            path.reconnect_at = None;
        }
    }

    /// Tells whether `generation` is that of an earlier process of the peer.
    pub(crate) fn met_before(&self, generation: u32) -> bool {
        generation != 0 && self.former.iter().any(|p| p.generation == generation)
    }

    /// Notes that the peer's process changed. Sequence numbers of an earlier process that returns
    /// go on where they were, because a dead process's link may be accepted after its successor's
    /// and look like the newer one for a moment.
    pub(crate) fn change_generation(&mut self, from: u32, to: u32) {
        let known =
            self.former.iter().position(|p| p.generation == to).map(|at| self.former.remove(at));
        if from != 0 {
            let rx_expected = self.paths.iter().map(|p| p.rx_expected).collect();
            self.former.insert(0, FormerProcess { generation: from, rx_expected });
            self.former.truncate(FORMER_PROCESSES_MAX);
        }
        let known = known.map(|p| p.rx_expected).unwrap_or_default();
        for (at, path) in self.paths.iter_mut().enumerate() {
            path.rx_expected = known.get(at).copied().unwrap_or(0);
            path.untold_since = None;
        }
    }

    /// Returns the path of an index below 8; makes it, and those below it, when it is new.
    #[inline]
    pub(crate) fn make_path(&mut self, index: u8) -> &mut Path {
        while self.paths.len() <= usize::from(index) {
            let next = self.unused_sequence();
            self.paths.push(Path::new(next));
        }
        &mut self.paths[usize::from(index)]
    }

    /// Tells whether a message of a socket was begun on a connection to the process of this
    /// generation.
    pub(crate) fn has_begun(&self, generation: u32) -> bool {
        let begun =
            |m: &TxMsg| m.generation == generation && m.socket.is_some() && !m.has(mark::CANCELLED);
        generation != 0 && self.paths.iter().flat_map(|path| &path.queue).any(begun)
    }

    /// Returns a sequence number that no message has had on any path. Messages of two sockets that
    /// move to another path must not get numbers they had on the first: the peer would take one
    /// that is sent again for an earlier message.
    pub(crate) fn unused_sequence(&self) -> u64 {
        self.paths.iter().map(|p| p.next_tx_seq).max().unwrap_or(1)
    }

    /// Tells whether a message of an application is queued or unacknowledged. Probes and pongs
    /// alone neither keep a peer in memory nor are worth a knock.
    pub(crate) fn has_messages(&self) -> bool {
        let live = |m: &TxMsg| m.socket.is_some() && !m.has(mark::CANCELLED);
        self.paths.iter().any(|p| p.queue.iter().any(live))
    }

    /// Returns the index and link of the only path that has a link; `None` with several or none.
    pub(crate) fn only_link(&self) -> Option<(usize, LinkId)> {
        let mut links = self.paths.iter().enumerate().filter_map(|(at, p)| Some((at, p.link?)));
        links.next().filter(|_| links.next().is_none())
    }

    /// Tells whether the peer is a kernel whose paths are known by their ports: one of 7.x,
    /// whose paths above 0 wait until path 0 has nothing to send.
    pub(crate) fn is_later_kernel(&self) -> bool {
        self.peer == Peer::Kernel && self.peer_sport_idx
    }

    /// Returns the link that carries this node's maps: the link of the lowest path in service
    /// [B-9].
    pub(crate) fn map_link(&self) -> Option<LinkId> {
        self.paths.iter().find(|p| p.state == PathState::Up).and_then(|p| p.link)
    }

    /// Tells whether this node's map has gone out on the link that carries maps now, and after this
    /// time. If not, the peer may not have it; and a peer may have ended the connection of a path
    /// at that time in order to get it.
    pub(crate) fn has_sent_map_since(&self, since: Option<Instant>) -> bool {
        let present = self.map_link();
        self.map_sent_on
            .is_some_and(|(on, at)| Some(on) == present && since.is_none_or(|since| since < at))
    }

    /// Number of paths that messages are spread over: a power of two, up to `npaths`.
    #[inline]
    pub(crate) fn usable_paths(&self) -> u8 {
        match self.npaths {
            0 | 1 => 1, // not known: path 0
            2 | 3 => 2,
            4..=7 => 4,
            _ => 8,
        }
    }
}
