//! Nodes.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{Builder, Error, Event, Info, Socket};
use bowline_rds_driver::{Driver, DriverStats};

/// A node: addresses, listeners, connections, and one background thread.
///
/// Cloning gives another handle. Sockets keep their node alive. The node ends with the last handle,
/// without waiting for acknowledgements: see [`shutdown`](Self::shutdown) and [`Socket::flush`].
#[derive(Clone, Debug)]
pub struct Node {
    driver: Driver,
}

impl Node {
    /// Returns a builder with default settings.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(super) fn from_driver(driver: Driver) -> Self {
        Self { driver }
    }

    /// Makes a socket that is not bound yet.
    ///
    /// # Errors
    /// `ENFILE` (23) when the node has as many sockets as its limits allow.
    pub fn socket(&self) -> Result<Socket, Error> {
        let id = self.driver.with_core(|core, _| core.socket())?;
        Ok(Socket::new(self.driver.clone(), id))
    }

    /// Makes a socket and binds it; port 0 chooses one.
    ///
    /// # Errors
    /// Those of [`socket`](Self::socket) and [`Socket::bind`].
    pub fn bind(&self, addr: SocketAddr) -> Result<Socket, Error> {
        let socket = self.socket()?;
        socket.bind(addr)?;
        Ok(socket)
    }

    /// Returns the state of all sockets, connections, paths, messages and TCP connections, as
    /// `rds-info` shows it.
    pub fn info(&self) -> Info {
        self.driver.with_core(|core, _| core.info())
    }

    /// Returns the same without the messages, of which there may be very many.
    pub fn info_without_messages(&self) -> Info {
        self.driver.with_core(|core, _| core.info_without_messages())
    }

    /// Returns the counters: first the kernel's, in its order and with its names, then those of
    /// bowline, whose names begin with `bl_`.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        self.driver.with_core(|core, _| core.counters().iter().collect())
    }

    /// Reads one of the kernel's settings by its name, such as `net.rds.ping_enable`.
    ///
    /// # Errors
    /// `ENOPROTOOPT` (92) when there is none of that name.
    pub fn sysctl(&self, name: &str) -> Result<i64, Error> {
        let value = self.driver.with_core(|core, _| core.sysctl(name));
        value.ok_or_else(|| bowline_rds::Error::NoSuchOption.into())
    }

    /// Changes one of the kernel's settings. A change of a TCP buffer renews every connection.
    ///
    /// # Errors
    /// `ENOPROTOOPT` (92) when there is none of that name, `EINVAL` for a value out of its range.
    pub fn set_sysctl(&self, name: &str, value: i64) -> Result<(), Error> {
        Ok(self.driver.with_core(|core, now| core.set_sysctl(now, name, value))?)
    }

    /// Resets the TCP connections to `peer`, or all of them; returns their number. Unacknowledged
    /// messages are sent again on new connections, so nothing is lost between bowline nodes. A
    /// kernel has freed messages that this machine's TCP had acknowledged; those that the node had
    /// not read yet are lost.
    pub fn drop_connections(&self, peer: Option<IpAddr>) -> usize {
        self.driver.drop_connections(peer)
    }

    /// Waits until all sent messages are acknowledged, at most `limit`, then closes all sockets and
    /// connections; later calls fail with `ESHUTDOWN`. Tells whether everything was acknowledged in
    /// time.
    pub fn shutdown(&self, limit: Duration) -> bool {
        self.driver.shutdown(limit)
    }

    /// Ends all connections and writes down everything else, for a node that goes on in another
    /// process of this machine: see [`Builder::resume`]. Peers lose nothing and see a cut of less
    /// than a second; later calls fail with `ESHUTDOWN`.
    ///
    /// # Errors
    /// Those of `out`; the node is shut down all the same.
    pub fn hand_over(&self, out: impl Write) -> io::Result<()> {
        self.driver.hand_over(out)
    }

    /// Returns the counters of the driver: system calls, copies, thread hand-overs.
    pub fn driver_stats(&self) -> DriverStats {
        self.driver.stats()
    }

    /// Takes the events for the operator, oldest first: paths that went up or down, peers that
    /// broke a rule. Only the latest 256 are kept.
    pub fn events(&self) -> Vec<Event> {
        self.driver.events()
    }

    /// Returns the TCP congestion control of each connection, with its peer.
    pub fn congestion_controls(&self) -> Vec<(SocketAddr, String)> {
        self.driver.congestion_controls()
    }

    /// Returns the driver underneath, for operations that have no method here.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }
}
