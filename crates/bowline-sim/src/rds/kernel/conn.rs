//! State of a kernel for one peer: a connection, its paths, and their messages.

use std::collections::VecDeque;
use std::net::IpAddr;

use bowline_wire::rds::MapView;

use crate::rds::net::EndId;

/// Maximum number of paths of a connection, and the number that a kernel announces.
pub(super) const MAX_PATHS: usize = 8;

/// The relation of a local and a remote address.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) local: IpAddr,
    pub(super) remote: IpAddr,
    /// Number of paths that both ends have; 0 while it is not known.
    pub(super) npaths: usize,
    pub(super) probing: bool,
    /// The peer chooses source ports by path.
    pub(super) sport_idx: bool,
    pub(super) peer_generation: u32,
    pub(super) remote_map: Vec<u8>,
    pub(super) map_queued: bool,
    /// Path 0 has not sent yet what was queued on it before the others were used.
    pub(super) behind: bool,
    /// Since when senders wait for the handshake.
    pub(super) waiting_since: Option<u64>,
    pub(super) paths: Vec<Path>,
}

/// A path of a connection.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) state: State,
    pub(super) end: Option<EndId>,
    pub(super) next_tx: u64,
    pub(super) next_rx: u64,
    pub(super) queue: VecDeque<Message>,
    pub(super) retrans: VecDeque<Message>,
    /// The frame being written, and how many bytes of it are written.
    pub(super) out: Option<(Vec<u8>, usize)>,
    pub(super) rx: Vec<u8>,
    pub(super) delay: u64,
    pub(super) reconnect_pending: bool,
    pub(super) read_pending: bool,
    /// It tries again soon, for path 0 has not caught up.
    pub(super) try_pending: bool,
}

/// State of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Down,
    Connecting,
    Up,
    Error,
}

/// A message on a path.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) seq: u64,
    /// Slot of the sending socket; `None` for messages of the kernel itself.
    pub(super) owner: Option<usize>,
    pub(super) sport: u16,
    pub(super) dport: u16,
    pub(super) payload: Vec<u8>,
    pub(super) ext: [u8; 16],
    /// The message was sent before, on a connection that broke.
    pub(super) flagged: bool,
    /// It asks to be acknowledged, over RDMA.
    pub(super) ask: bool,
    /// The message is not sent again, because its peer was restarted.
    pub(super) flush: bool,
    /// Offset in the stream at which the message ends.
    pub(super) ack_end: u64,
}

impl Conn {
    pub(super) fn new(local: IpAddr, remote: IpAddr) -> Self {
        Self {
            local,
            remote,
            npaths: 0,
            probing: false,
            sport_idx: false,
            peer_generation: 0,
            remote_map: Vec::new(),
            map_queued: false,
            behind: false,
            waiting_since: None,
            paths: (0..MAX_PATHS).map(|_| Path::new()).collect(),
        }
    }

    /// Tells whether the local address is the smaller one: that side connects.
    pub(super) fn smaller(&self) -> bool {
        key(self.local) < key(self.remote)
    }

    /// Returns the number of paths in use, as far as it is known.
    pub(super) fn usable(&self) -> usize {
        self.npaths.max(1)
    }

    /// Tells whether the other paths wait for path 0, which has something unsent or unacknowledged.
    pub(super) fn waits_for_path_0(&mut self) -> bool {
        let first = &self.paths[0];
        self.behind &= !(first.queue.is_empty() && first.retrans.is_empty());
        self.behind
    }

    /// Returns messages on paths that the present peer does not have.
    pub(super) fn beyond(&self) -> impl Iterator<Item = &Message> {
        let paths = self.paths.iter().skip(self.usable());
        paths.flat_map(|p| p.queue.iter().chain(&p.retrans))
    }

    /// Tells whether the peer has marked a port congested.
    pub(super) fn is_congested(&self, port: u16) -> bool {
        MapView::new(&self.remote_map).is_some_and(|map| map.is_congested(port))
    }
}

impl Path {
    fn new() -> Self {
        Self {
            state: State::Down,
            end: None,
            next_tx: 1,
            next_rx: 0,
            queue: VecDeque::new(),
            retrans: VecDeque::new(),
            out: None,
            rx: Vec::new(),
            delay: 0,
            reconnect_pending: false,
            read_pending: false,
            try_pending: false,
        }
    }
}

/// Returns the number by which addresses are compared.
fn key(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}
