//! The node. Each file in this folder holds one concern, as an `impl Node` block.

mod congestion;
mod connect;
mod ends;
mod farewell;
mod handshake;
mod info;
mod info_tables;
mod invariants;
mod links;
mod plain;
mod rdma;
mod recv;
mod rx;
mod saved;
mod send;
mod sockets;
mod timers;
mod tx;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::net::{IpAddr, Ipv6Addr};

use crate::api::{Event, Output};
use crate::config::Config;
use crate::cong::CongMap;
use crate::conn::Conn;
use crate::dedup::Budget;
use crate::error::Error;
use crate::ids::{ConnId, LinkId, RdmaLinkId, SocketId};
use crate::link::Link;
use crate::rdma::RdmaLink;
use crate::rdma::op::Region;
use crate::socket::{Sock, is_loopback, mapped, needs_scope};
use crate::stats::Counters;
use crate::txlog::TxPool;
use bowline_base::Instant;
use bowline_base::SplitMix64;
use bowline_base::slab::Slab;
use serde::{Deserialize, Serialize};

pub use info::{ConnInfo, Info, InfoTable, LinkInfo, MessageInfo, PathInfo, RdmaInfo, SocketInfo};
pub(crate) use rdma::RdmaConn;
pub use saved::SAVED_FORMAT;
pub use sockets::poll;

use connect::IdleDials;
use timers::Timer;

/// A local address with its sockets.
#[derive(Debug, Default, Serialize, Deserialize)]
struct LocalAddr {
    /// The address may be bound and connected from.
    present: bool,
    map: CongMap,
    ports: HashMap<u16, SocketId, BuildHasherDefault<PortHasher>>,
    conns: Vec<ConnId>,
}

impl LocalAddr {
    fn is_unused(&self) -> bool {
        !self.present && self.ports.is_empty() && self.conns.is_empty()
    }
}

/// Hashes ports. The node itself chooses which ports a table holds, so no peer can force
/// collisions.
#[derive(Debug, Default)]
struct PortHasher(u64);

impl Hasher for PortHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u16(u16::from(*b) ^ (self.0 as u16));
        }
    }

    fn write_u16(&mut self, port: u16) {
        self.0 = u64::from(port).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(20);
    }
}

/// An RDS node as a state machine.
///
/// After any input, drain [`poll_output`](Self::poll_output) until `None`, then arm one timer at
/// [`poll_timeout`](Self::poll_timeout) and call [`handle_timeout`](Self::handle_timeout) when it
/// is due. Time never goes back. The same inputs give the same outputs.
#[derive(Debug, Serialize, Deserialize)]
pub struct Node {
    #[serde(skip)]
    config: Config,
    rng: SplitMix64,
    now: Instant,
    sockets: Slab<Sock>,
    local_addrs: Vec<LocalAddr>,
    local_addr_index: HashMap<(Ipv6Addr, u32), usize>,
    /// Places in `local_addrs` that no address has.
    #[serde(default)]
    spare_local_addrs: Vec<usize>,
    conns: Slab<Conn>,
    conn_index: HashMap<(Ipv6Addr, Ipv6Addr, u32), ConnId>,
    /// Connections over RDMA, by local address, remote address, scope and type of service [IB-4].
    #[serde(default)]
    rdma_index: HashMap<(Ipv6Addr, Ipv6Addr, u32, u8), ConnId>,
    unproven: VecDeque<ConnId>,
    /// Limits on attempts to connect to idle peers: those that never sent a message, and the
    /// others.
    idle_dials: [IdleDials; 2],
    #[serde(skip)]
    links: Slab<Link>,
    #[serde(skip)]
    rdma_links: Slab<RdmaLink>,
    /// Addresses that are served over RDMA.
    #[serde(skip)]
    rdma_addrs: Vec<IpAddr>,
    /// Memory of a frame over RDMA, in bytes.
    #[serde(skip)]
    rdma_frame: usize,
    /// Links with bytes to parse; each stands here once.
    #[serde(skip)]
    ready: VecDeque<LinkId>,
    /// Links that owe an acknowledgement for which the peer asked.
    #[serde(skip)]
    ack_asked: Vec<LinkId>,
    #[serde(skip)]
    outputs: VecDeque<Output>,
    /// Number of regions of memory that peers may use.
    #[serde(skip)]
    regions: usize,
    /// Memory that a peer has used, oldest first: when it is released, and whose it was.
    #[serde(skip)]
    used_regions: VecDeque<(Instant, SocketId, Region)>,
    timers: BTreeSet<(Instant, Timer)>,
    #[serde(skip)]
    pool: TxPool,
    /// There are more queued messages than is good: each counts all that it takes.
    #[serde(skip)]
    many_sends: bool,
    #[serde(skip)]
    stats: Counters,
    /// Counts received maps; sockets see a difference in poll.
    cong_generation: u64,
    /// Sockets to wake at the next map.
    #[serde(skip)]
    cong_waiters: Vec<SocketId>,
    /// Sockets whose wait mask may be set.
    monitors: Vec<SocketId>,
    recv_held: usize,
    /// Bytes of incomplete messages.
    #[serde(skip)]
    partial_bytes: usize,
    #[serde(skip)]
    dedup_budget: Budget,
    #[serde(skip)]
    paused: Vec<LinkId>,
    #[serde(skip)]
    rdma_paused: Vec<RdmaLinkId>,
    next_inode: u64,
    /// Sequence number of the first message of a new path: higher than any number that a peer has
    /// seen.
    first_sequence: u64,
    #[serde(skip)]
    closing: bool,
    /// The node says farewell to its peers [R-2050]: until when it waits for connections that have
    /// broken.
    #[serde(skip)]
    ending: Option<Instant>,
    /// Number of peers that have ended and are gone.
    #[serde(default)]
    peers_gone: usize,
}

impl Node {
    /// Makes a node.
    pub fn new(config: Config) -> Self {
        let mut node = Self {
            rng: SplitMix64::new(config.seed),
            now: Instant::default(),
            sockets: Slab::new(),
            local_addrs: Vec::new(),
            local_addr_index: HashMap::new(),
            spare_local_addrs: Vec::new(),
            conns: Slab::new(),
            conn_index: HashMap::new(),
            rdma_index: HashMap::new(),
            unproven: VecDeque::new(),
            idle_dials: Default::default(),
            links: Slab::new(),
            rdma_links: Slab::new(),
            rdma_addrs: Vec::new(),
            rdma_frame: 0,
            ready: VecDeque::new(),
            ack_asked: Vec::new(),
            outputs: VecDeque::new(),
            regions: 0,
            used_regions: VecDeque::new(),
            timers: BTreeSet::new(),
            pool: TxPool::default(),
            many_sends: false,
            stats: Counters::default(),
            cong_generation: 0,
            cong_waiters: Vec::new(),
            monitors: Vec::new(),
            recv_held: 0,
            partial_bytes: 0,
            dedup_budget: Budget::new(config.limits.duplicate_records_total),
            paused: Vec::new(),
            rdma_paused: Vec::new(),
            next_inode: 1,
            first_sequence: config.first_sequence,
            closing: false,
            ending: None,
            peers_gone: 0,
            config,
        };
        for addr in node.config.addrs.clone() {
            node.add_local(addr);
        }
        node
    }

    /// Returns the next request to the driver; requests come in order.
    #[inline]
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns when [`handle_timeout`](Self::handle_timeout) is to be called next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Makes an address of this host bindable.
    pub fn add_local(&mut self, addr: IpAddr) {
        let local_addr = self.local_addr_of(mapped(addr), 0);
        if !self.local_addrs[local_addr].present {
            self.local_addrs[local_addr].present = true;
            self.sockets.iter_mut().for_each(|sock| sock.route = None);
        }
    }

    /// Makes an address unusable. Sockets bound to it stay bound; their connections break
    /// by themselves.
    pub fn remove_local(&mut self, addr: IpAddr) {
        if let Some(local_addr) = self.local_addr_index.get(&(mapped(addr), 0)) {
            self.local_addrs[*local_addr].present = false;
        }
    }

    /// Tells whether an address is one of this node's.
    pub fn is_local(&self, addr: IpAddr) -> bool {
        self.is_local_at(mapped(addr), 0)
    }

    /// Tells whether an address of an interface is one of this node's. An equal link-local address
    /// on another interface belongs to a peer. Scope 0 stands for any interface.
    fn is_local_at(&self, addr: Ipv6Addr, scope: u32) -> bool {
        let elsewhere = scope != 0 && self.link_of(addr).is_some_and(|link| link != scope);
        !elsewhere
            && self
                .local_addr_index
                .get(&(addr, 0))
                .is_some_and(|local_addr| self.local_addrs[*local_addr].present)
            || (is_loopback(addr) && self.config.addrs.is_empty())
    }

    /// Returns the interface of one of this node's link-local addresses, if the node knows it.
    fn link_of(&self, addr: Ipv6Addr) -> Option<u32> {
        self.config.links.iter().find(|(of, _)| *of == addr).map(|(_, link)| *link)
    }

    /// Returns the index of a local address, and makes its entry if it is new. Only a link-local
    /// address has a scope, whatever the scope of the peer is.
    fn local_addr_of(&mut self, addr: Ipv6Addr, scope: u32) -> usize {
        let scope = if needs_scope(addr) { scope } else { 0 };
        if let Some(local_addr) = self.local_addr_index.get(&(addr, scope)) {
            return *local_addr;
        }
        if self.spare_local_addrs.is_empty()
            && self.local_addrs.len() == self.local_addrs.capacity()
        {
            self.forget_local_addrs();
        }
        let local_addr = self.spare_local_addrs.pop().unwrap_or(self.local_addrs.len());
        if local_addr == self.local_addrs.len() {
            self.local_addrs.push(LocalAddr::default());
        }
        self.local_addr_index.insert((addr, scope), local_addr);
        local_addr
    }

    /// Forgets local addresses that nobody uses, before the table of them grows: there are very
    /// many loopback addresses, and scopes, that programs may name.
    fn forget_local_addrs(&mut self) {
        let (addrs, spare) = (&mut self.local_addrs, &mut self.spare_local_addrs);
        self.local_addr_index.retain(|_, at| {
            let unused = addrs.get(*at).is_some_and(LocalAddr::is_unused);
            if unused {
                addrs[*at] = LocalAddr::default();
                spare.push(*at);
            }
            !unused
        });
    }

    /// Reads a setting by its sysctl name.
    pub fn sysctl(&self, name: &str) -> Option<i64> {
        self.config.sysctl.get(name)
    }

    /// Changes a setting. Changing a TCP buffer size drops every TCP connection, as the kernel
    /// does [spec section 9].
    ///
    /// # Errors
    /// [`Error::NoSuchOption`], or [`Error::BadValue`] when out of range.
    pub fn set_sysctl(&mut self, now: Instant, name: &str, value: i64) -> Result<(), Error> {
        self.now = now;
        if self.config.sysctl.set(name, value)? == crate::config::SysctlEffect::DropLinks {
            self.drain_links();
        }
        Ok(())
    }

    /// Returns all settings that can change while the node runs.
    pub const fn settings(&self) -> &crate::config::Sysctl {
        &self.config.sysctl
    }

    /// Returns the configuration that the node was made with.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Returns all counters.
    pub const fn counters(&self) -> &Counters {
        &self.stats
    }

    fn event(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }

    fn conn(&self, id: ConnId) -> Option<&Conn> {
        self.conns.get(id.0)
    }

    fn link(&self, id: LinkId) -> Option<&Link> {
        self.links.get(id.0)
    }

    fn link_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        self.links.get_mut(id.0)
    }
}
