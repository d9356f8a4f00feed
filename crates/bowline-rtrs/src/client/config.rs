//! Settings of a session.

use core::time::Duration;
use std::net::SocketAddr;

use bowline_wire::rtrs::{MAX_PATHS, MAX_QUEUE_DEPTH, PORT, SessionName};

use crate::{HbConfig, Policy, PortId};

/// Under which keys a server writes the answers to READs [RT-43].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReadKeys {
    /// Those of the memory's registration, as long as it lasts: nothing is done for a request, and
    /// the server can write there whenever it wants to. A READ whose data goes to several places
    /// has a key of its own nevertheless, where the device can make one.
    #[default]
    LongLived,
    /// A key of its own for each READ, as kernels have it: the server can reach the memory of
    /// requests in flight and nothing else. Takes two more messages and a registration for each;
    /// needs devices with fast registration. Memory of the program needs no rights for the peer.
    PerRequest,
}

/// Settings of a client session.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Name of the session at the server.
    pub name: SessionName,
    /// Port of the server, for addresses whose port is 0.
    pub port: u16,
    /// Time from the loss of a path to the first attempt to connect it again, and between attempts,
    /// as the kernel has it [RS-10]. `None`: at once, then after 1, 2, 4 .. 30 s [RT-91].
    pub reconnect_delay: Option<Duration>,
    /// Attempts to connect a lost path again; -1: for ever; 0: none [RS-13].
    pub max_reconnects: i16,
    /// IO connections of each path, beside the service connection. 0: everything goes over that one
    /// [RT-24].
    pub io_connections: u16,
    /// Connections of each path beside those, for requests whose completions the program takes by
    /// itself [RS-31].
    pub poll_connections: u16,
    /// Which path a request takes.
    pub policy: Policy,
    /// How the server's silence is noticed.
    pub heartbeat: HbConfig,
    /// Longest time of each step of connecting [RT-18].
    pub connect_timeout: Duration,
    /// One permit is kept back for service messages, so that IO cannot shut them out.
    pub reserve_service_permit: bool,
    /// The layer above keeps requests while no path is connected, so a server should drop a
    /// vanished client soon [RT-90].
    pub bridges_outages: bool,
    /// Longest user message there is room for, beside what the server takes.
    pub max_usr: u16,
    /// Under which keys READs are answered.
    pub read_keys: ReadKeys,
    /// Servers that can need not tell each new key of a chunk [RT-99]. Without it they tell it, as
    /// to kernels.
    pub counts_keys: bool,
    /// Seed of the random spread of reconnection.
    pub seed: u64,
    /// Bounds.
    pub limits: ClientLimits,
}

impl ClientConfig {
    /// The usual settings for a session of this name.
    pub fn new(name: SessionName, seed: u64) -> Self {
        Self {
            name,
            port: PORT,
            reconnect_delay: None,
            max_reconnects: -1,
            io_connections: 1,
            poll_connections: 0,
            policy: Policy::default(),
            heartbeat: HbConfig::default(),
            connect_timeout: Duration::from_secs(30),
            reserve_service_permit: true,
            bridges_outages: false,
            max_usr: 512,
            read_keys: ReadKeys::default(),
            counts_keys: true,
            seed,
            limits: ClientLimits::default(),
        }
    }

    /// Connections of a path, the service connection included.
    pub(super) const fn connections(&self) -> u32 {
        1 + self.io_connections as u32 + self.poll_connections as u32
    }
}

/// Bounds of what a session takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Paths, at most 128.
    pub paths: usize,
    /// Largest queue depth that is taken from a server. A session has up to 600 bytes for each,
    /// more with a larger [`ClientConfig::max_usr`], and each connection up to 100.
    pub queue_depth: u16,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self { paths: MAX_PATHS, queue_depth: MAX_QUEUE_DEPTH as u16 }
    }
}

/// Where a path goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathAddr {
    /// The device.
    pub port: PortId,
    /// Own address. All connections of a path come from this port, for its whole life [RT-35].
    pub src: SocketAddr,
    /// The server's address; port 0 stands for [`ClientConfig::port`].
    pub dst: SocketAddr,
}
