//! Settings of a session.

use core::time::Duration;
use std::net::SocketAddr;

use bowline_wire::rtrs::{MAX_PATHS, MAX_QUEUE_DEPTH, PORT, SessionName};

use crate::{HbConfig, Policy, PortId};

/// The keys under which a server writes the data of READs [RT-43].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReadKeys {
    /// The long-lived keys of the registered memory: no extra work for a request, but the server
    /// can write there at any time. A READ whose data goes to several places has a key of its own
    /// nevertheless, if the device can make one.
    #[default]
    LongLived,
    /// A key for each READ, as in kernels: the server can reach only the memory of requests in
    /// flight. Takes two more messages and a registration for each READ, and needs devices with
    /// own_key registration. Memory of the program needs no rights for the peer.
    PerRequest,
}

/// Settings of a client session.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Name of the session at the server.
    pub name: SessionName,
    /// Port of the server, for addresses whose port is 0.
    pub port: u16,
    /// Time from the loss of a path to the first attempt to reconnect it, and between attempts,
    /// fixed as in kernels [RS-10]. `None`: at once, then after 1, 2, 4 .. 30 s, about 8 s at most
    /// while no path is connected [RT-91].
    pub reconnect_delay: Option<Duration>,
    /// Attempts to reconnect a lost path; -1: no limit; 0: none [RS-13].
    pub max_reconnects: i16,
    /// IO connections of each path, in addition to the service connection. 0: requests go over the
    /// service connection [RT-24].
    pub io_connections: u16,
    /// Poll connections of each path, for requests whose completions the program polls itself
    /// [RS-31].
    pub poll_connections: u16,
    /// How the path of a request is chosen.
    pub policy: Policy,
    /// How a silent server is detected.
    pub heartbeat: HbConfig,
    /// Longest time of each step of connecting [RT-18].
    pub connect_timeout: Duration,
    /// Reserves one permit for service messages, so that IO cannot block them.
    pub reserve_service_permit: bool,
    /// The layer above keeps requests while no path is connected, so a server should drop a
    /// vanished client soon [RT-90].
    pub bridges_outages: bool,
    /// Longest user message in bytes that the session allocates memory for; the server has a limit
    /// too.
    pub max_usr: u16,
    /// The keys under which READs are answered.
    pub read_keys: ReadKeys,
    /// Servers that can do so may omit new keys of chunks [RT-99]. If false, they send them, as to
    /// kernels.
    pub counts_keys: bool,
    /// Seed of the random spread of reconnections.
    pub seed: u64,
    /// Limits on what the session accepts.
    pub limits: ClientLimits,
}

impl ClientConfig {
    /// The default settings for a session of this name.
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

/// Limits on what a session accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Paths, at most 128.
    pub paths: usize,
    /// Largest queue depth accepted from a server. A session takes up to 600 bytes for each chunk,
    /// more with a larger [`ClientConfig::max_usr`], and each connection up to 100 bytes.
    pub queue_depth: u16,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self { paths: MAX_PATHS, queue_depth: MAX_QUEUE_DEPTH as u16 }
    }
}

/// The addresses of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathAddr {
    /// The device.
    pub port: PortId,
    /// Local address. All connections of a path use this port, as long as the path exists [RT-35].
    pub src: SocketAddr,
    /// The server's address; port 0 stands for [`ClientConfig::port`].
    pub dst: SocketAddr,
}
