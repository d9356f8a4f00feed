//! Nodes.

use core::fmt;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use bowline_host_client::Host;
use bowline_rds_driver::{Driver, DriverStats};

use super::error::HostError;
use super::host::{self, HostSocket};
use super::{Builder, Error, Event, Info, Socket, ToAddr};

/// A node: addresses, listeners, connections, and one background thread; or the node of this host,
/// which is in another process.
///
/// Cloning gives another handle. Sockets keep their node alive. A node of this process ends with
/// the last handle, in good order: what its programs have received is acknowledged, what they sent
/// is handed to the system, and peers learn that it ends ([`Event::PeerEnded`]). That takes a
/// millisecond or two, and half a second at most when a peer does not answer. It does not wait for
/// acknowledgements of what was sent: see [`shutdown`](Self::shutdown) and [`Socket::flush`]. A
/// process that ends without dropping its node, as by [`std::process::exit`], leaves up to 10
/// milliseconds of what it received unacknowledged. The host's node continues, and belongs to
/// whoever runs it: what changes it, or shows all of it, is not for its users.
#[derive(Clone)]
pub struct Node {
    of: Of,
}

/// Whose node it is.
#[derive(Clone)]
enum Of {
    Process(Driver),
    Host(Host),
}

/// Whose it is, and nothing of what it has.
impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.owned().is_some() { "Node(process)" } else { "Node(host)" })
    }
}

impl Node {
    /// Returns a builder with default settings.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// Attaches to the node that serves the programs of this host (`bowline node`): at the place
    /// that the environment names in `BOWLINE_RDS_SOCKET`, else at `bowline/rds/host.sock` in
    /// `$XDG_RUNTIME_DIR` or `/run`. Its sockets are shared memory with that node, so programs that
    /// embed no node share one with others, with their addresses and connections.
    ///
    /// ```no_run
    /// use bowline::rds::Node;
    ///
    /// # fn main() -> Result<(), bowline::rds::Error> {
    /// let node = Node::of_host()?;
    /// let socket = node.bind("10.0.0.1:4000")?;
    /// socket.send_to(b"hello", "10.0.0.2:4000")?;
    /// let mut buf = [0; 1024];
    /// let (len, from) = socket.recv_from(&mut buf)?;
    /// println!("{from} says {:?}", &buf[..len]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `EAFNOSUPPORT` (97), as a kernel without RDS gives, when no node serves programs; `EACCES`
    /// (13) when the node does not serve this user; `ENFILE` or `EMFILE` when it has no room;
    /// `EPROTONOSUPPORT` (93) when it is of another version. Calls on a node that has ended fail
    /// with `ENETDOWN` (100): see [the host's node](crate::rds#the-hosts-node).
    pub fn of_host() -> Result<Self, Error> {
        Ok(Self { of: Of::Host(host::find(None)?) })
    }

    /// Attaches to the node that serves programs at a place, as [`of_host`](Self::of_host) does.
    ///
    /// # Errors
    /// As [`of_host`](Self::of_host).
    pub fn at(place: impl AsRef<Path>) -> Result<Self, Error> {
        let place = place.as_ref().as_os_str().as_bytes();
        Ok(Self { of: Of::Host(host::find(Some(place))?) })
    }

    pub(super) fn from_driver(driver: Driver) -> Self {
        Self { of: Of::Process(driver) }
    }

    pub(super) fn owned(&self) -> Option<&Driver> {
        match &self.of {
            Of::Process(driver) => Some(driver),
            Of::Host(_) => None,
        }
    }

    /// Tells whether this is the host's node, and not one of this process.
    pub fn is_of_host(&self) -> bool {
        self.owned().is_none()
    }

    /// Makes a socket that is not bound yet.
    ///
    /// # Errors
    /// `ENFILE` (23) when the node has as many sockets as its limits allow; `EMFILE` (24) when this
    /// process, or its user at the host's node, has as many descriptors or sockets as it may.
    pub fn socket(&self) -> Result<Socket, Error> {
        match &self.of {
            Of::Process(driver) => {
                let id = driver.with_core(|core, _| core.socket())?;
                Ok(Socket::new(driver.clone(), id))
            }
            Of::Host(host) => Ok(Socket::from_host(HostSocket::open(host)?)),
        }
    }

    /// Makes a socket and binds it; port 0 chooses one.
    ///
    /// # Errors
    /// Those of [`socket`](Self::socket) and [`Socket::bind`].
    pub fn bind(&self, addr: impl ToAddr) -> Result<Socket, Error> {
        let socket = self.socket()?;
        socket.bind(addr)?;
        Ok(socket)
    }

    /// Returns the state of all sockets, connections, paths, messages and TCP connections, as
    /// `rds-info` shows it. Of the host's node it has what a program may see, and what those tables
    /// have: this user's bound sockets and their messages, no paths, and counts of a connection are
    /// 0; `bowline info` shows all. Nothing is there once the host's node has ended.
    pub fn info(&self) -> Info {
        match &self.of {
            Of::Process(driver) => driver.inspect(|core| core.info()),
            Of::Host(host) => host::info(host),
        }
    }

    /// Returns the same without the messages, of which there may be very many.
    pub fn info_without_messages(&self) -> Info {
        match &self.of {
            Of::Process(driver) => driver.inspect(|core| core.info_without_messages()),
            Of::Host(host) => {
                let mut info = host::info(host);
                (info.send, info.retrans, info.recv) = Default::default();
                info
            }
        }
    }

    /// Returns the counters: first the kernel's, in its order and with its names, then those of
    /// bowline, whose names begin with `bl_`. None are there once the host's node has ended.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        match &self.of {
            Of::Process(driver) => driver.inspect(|core| core.listed_counters()),
            Of::Host(host) => host::counters(host),
        }
    }

    /// Reads one of the kernel's settings by its name, such as `net.rds.ping_enable`.
    ///
    /// # Errors
    /// `ENOPROTOOPT` (92) when there is none of that name; `EOPNOTSUPP` (95) for the host's node.
    pub fn sysctl(&self, name: &str) -> Result<i64, Error> {
        let driver = self.owned().ok_or(HostError::OwnersAffair)?;
        let value = driver.with_core(|core, _| core.sysctl(name));
        value.ok_or_else(|| bowline_rds::Error::NoSuchOption.into())
    }

    /// Changes one of the kernel's settings. A change of a TCP buffer renews every connection.
    ///
    /// # Errors
    /// `ENOPROTOOPT` (92) when there is none of that name, `EINVAL` for a value out of its range;
    /// `EOPNOTSUPP` (95) for the host's node.
    pub fn set_sysctl(&self, name: &str, value: i64) -> Result<(), Error> {
        let driver = self.owned().ok_or(HostError::OwnersAffair)?;
        Ok(driver.with_core(|core, now| core.set_sysctl(now, name, value))?)
    }

    /// Resets the TCP connections to `peer`, or all of them; returns their number. Unacknowledged
    /// messages are sent again on new connections, so nothing is lost between bowline nodes. A
    /// kernel has freed messages that this machine's TCP had acknowledged; those that the node had
    /// not read yet are lost. Of the host's node this resets none.
    pub fn drop_connections(&self, peer: Option<IpAddr>) -> usize {
        self.owned().map_or(0, |driver| driver.drop_connections(peer))
    }

    /// Waits until all sent messages are acknowledged, at most `limit`, then ends all connections
    /// in good order, which takes half a second at most; later calls fail with `ESHUTDOWN`. Tells
    /// whether everything was acknowledged in time. The host's node continues: for it, this does
    /// nothing and returns `false`; [`Socket::flush`] waits for one socket.
    pub fn shutdown(&self, limit: Duration) -> bool {
        self.owned().is_some_and(|driver| driver.shutdown(limit))
    }

    /// Ends all connections and saves everything else, for a node that resumes in another process
    /// of this machine: see [`Builder::resume`]. Peers lose nothing and see a cut of less than a
    /// second; later calls fail with `ESHUTDOWN`. Returns the listeners, at which connections wait
    /// meanwhile.
    ///
    /// # Errors
    /// Those of `out`; the node is shut down all the same. `EOPNOTSUPP` for the host's node.
    pub fn hand_over(&self, out: impl Write) -> io::Result<Vec<OwnedFd>> {
        let driver = self.owned().ok_or_else(|| Error::from(HostError::OwnersAffair))?;
        driver.hand_over(out)
    }

    /// Returns the counters of the driver: system calls, copies, thread hand-overs; all 0 for the
    /// host's node.
    pub fn driver_stats(&self) -> DriverStats {
        self.owned().map(Driver::stats).unwrap_or_default()
    }

    /// Takes the events for the operator, oldest first: paths that went up or down, peers that
    /// cannot be connected to or broke a rule. Only the latest 256 are kept. Those of the host's
    /// node are for its operator.
    pub fn events(&self) -> Vec<Event> {
        self.owned().map(Driver::events).unwrap_or_default()
    }

    /// Returns the TCP congestion control of each connection, with its peer; of none for the host's
    /// node.
    pub fn congestion_controls(&self) -> Vec<(SocketAddr, String)> {
        self.owned().map(Driver::congestion_controls).unwrap_or_default()
    }

    /// Returns the driver underneath, for the command `bowline`: its types are not part of this
    /// library.
    ///
    /// # Panics
    /// On the host's node, whose driver is in another process.
    #[doc(hidden)]
    pub fn driver(&self) -> &Driver {
        self.owned().expect("a node of this process")
    }
}
