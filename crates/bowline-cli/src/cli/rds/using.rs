//! The node of a command: that of the host where it serves the address, as for any program; else
//! one in this process, which ends with the command.

use std::{
    env, io,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::OwnedFd,
    path::PathBuf,
    time::Duration,
};

use bowline::rds::{ErrorKind, Node, Socket, Transport};
use bowline_base::Errno;
use bowline_node::{
    Failure, Outcome,
    control::{
        Client,
        snapshot::{ConnectionRow, PathRow},
    },
    holder,
    programs::{self, Reached, Unreachable},
    values::Address,
};
use bowline_wire::rds::TCP_PORT;

use super::over_rdma::RdmaOption;

/// Variable with the place of the host's node, for the library.
const PLACE: &str = "BOWLINE_RDS_SOCKET";

/// Longest wait for the answer of a peer's RDS.
const PATIENCE: Duration = Duration::from_millis(500);

/// The node of a command.
#[derive(Debug)]
pub(crate) struct Used {
    node: Node,
    local: Address,
    /// What its sockets are to use, at the host's node.
    transport: Option<Transport>,
    /// Keeps a host's node that ends without programs.
    _lease: Option<OwnedFd>,
}

/// What is known of the connection to a peer.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// One that acknowledges by TCP alone.
    pub(crate) is_kernel: bool,
    pub(crate) is_connected: bool,
    /// Why the last one ended, or was not made.
    pub(crate) last_end: Option<String>,
}

/// What the host's node is to a command that wants an address.
enum HostNode {
    /// No node serves it.
    Nobody,
    Serves(Node, Option<OwnedFd>),
    /// A node that does not do so for this process: why.
    Refuses(String),
}

impl Used {
    /// Finds the host's node at an address, or starts one in this process.
    pub(crate) fn at(local: Address, rdma: &RdmaOption) -> Outcome<Self> {
        let why = match host_node(local) {
            HostNode::Serves(node, lease) => {
                let transport = rdma.is_wanted().then_some(Transport::Ib);
                let used = Self { node, local, transport, _lease: lease };
                return used.has_transport().map(|()| used);
            }
            HostNode::Nobody => None,
            HostNode::Refuses(why) => Some(why),
        };
        match (rdma.start_node(local), why) {
            (Ok(node), _) => Ok(Self { node, local, transport: None, _lease: None }),
            (Err(_), Some(why)) if is_taken(local) => Err(Failure::Failed(why)),
            (Err(Failure::Failed(text)), None) if is_taken(local) => Err(Failure::Failed(format!(
                "{text}; commands share an address where `bowline node` serves it"
            ))),
            (Err(failure), _) => Err(failure),
        }
    }

    /// Tells whether the host's node has what its sockets are to use.
    fn has_transport(&self) -> Outcome {
        match self.bind(self.local.at(0)) {
            Err(error) if error.errno() == Errno::ENOPROTOOPT => Err(Failure::failed(format!(
                "{} has no RDMA at {}: start it with --rdma, or leave out --rdma here",
                name(self.local),
                self.local
            ))),
            Err(error) if error.errno() != Errno::EACCES => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// The node itself.
    pub(crate) fn node(&self) -> &Node {
        &self.node
    }

    /// Tells whether it is the host's.
    pub(crate) fn is_shared(&self) -> bool {
        self.node.is_of_host()
    }

    /// Names the host's node for a message.
    pub(crate) fn name(&self) -> String {
        name(self.local)
    }

    /// Makes a socket at an address.
    pub(crate) fn bind(&self, at: SocketAddr) -> Result<Socket, bowline::rds::Error> {
        let socket = self.node.socket()?;
        if let Some(transport) = self.transport {
            socket.set_transport(transport)?;
        }
        socket.bind(at)?;
        Ok(socket)
    }

    /// Looks at the connection to a peer. At the host's node only its owner may: `None`.
    pub(crate) fn peer(&self, remote: IpAddr) -> Option<Peer> {
        let (connections, paths) = self.connections()?;
        let is_between = |local, of| local == self.local.ip && of == remote;
        let is_path = |path: &&PathRow| is_between(path.local_addr, path.remote_addr);
        let paths = || paths.iter().filter(is_path);
        let mut connections = connections.iter();
        let is_kernel =
            connections.any(|c| is_between(c.local_addr, c.remote_addr) && c.peer == "kernel");
        let is_connected = paths().any(|path| path.flags.connected);
        let end = paths().find_map(|path| path.last_end.as_ref());
        Some(Peer { is_kernel, is_connected, last_end: end.map(|end| end.reason.clone()) })
    }

    /// Says why a peer cannot be reached; `None` if it can. A node has no connection to its own
    /// addresses, and not everybody may look: then the peer is asked.
    pub(crate) fn trouble(&self, remote: IpAddr) -> Option<String> {
        match self.peer(remote) {
            Some(Peer { is_connected: true, .. }) => None,
            Some(Peer { last_end: Some(end), .. }) => Some(end),
            _ if self.answers(remote) => None,
            _ => Some("no answer".to_owned()),
        }
    }

    /// Asks the RDS of a peer for an answer, as `ping` does.
    fn answers(&self, remote: IpAddr) -> bool {
        let ask = || {
            let socket = self.bind(self.local.at(0))?;
            socket.set_send_timeout(Some(PATIENCE));
            socket.set_recv_timeout(Some(PATIENCE));
            socket.send_to(&[], Address { ip: remote, link: self.local.link }.at(0))?;
            socket.recv_from(&mut [])
        };
        ask().is_ok()
    }

    fn connections(&self) -> Option<(Vec<ConnectionRow>, Vec<PathRow>)> {
        if self.is_shared() {
            let state = Client::serving(self.local)?.state().ok()?;
            return Some((state.connections, state.paths));
        }
        let info = self.node.info_without_messages();
        let connections = info.connections.iter().map(ConnectionRow::from).collect();
        Some((connections, info.paths.iter().map(PathRow::from).collect()))
    }
}

/// Looks for a node of this host at an address.
fn host_node(local: Address) -> HostNode {
    let given = env::var_os(PLACE).map(PathBuf::from);
    let places = given.map_or_else(programs::places, |place| vec![place]);
    let reached = match programs::reachable(&places) {
        Ok(reached) => reached,
        Err(Unreachable { why, is_closed: true }) => {
            return HostNode::Refuses(format!(
                "{} is in use, and a node of another user may run here, which gives this one no \
                 access ({why}): see `--allow-user` of `bowline node`",
                SocketAddr::new(local.ip, TCP_PORT)
            ));
        }
        Err(_) => return HostNode::Nobody,
    };
    let serves = || -> Result<HostNode, bowline::rds::Error> {
        let node = Node::at(&reached.place)?;
        let socket = node.socket()?;
        match socket.bind(local.at(0)) {
            Err(error) if error.kind() == ErrorKind::NotLocal => return Ok(HostNode::Nobody),
            // Rules may give this user other ports.
            Err(error) if error.errno() == Errno::EACCES => {}
            bound => bound?,
        }
        Ok(lease_of(&reached).map_or(HostNode::Nobody, |lease| HostNode::Serves(node, lease)))
    };
    serves().unwrap_or_else(|error| HostNode::Refuses(format!("{}: {error}", name(local))))
}

/// Takes what keeps the node, if it needs that; `None`: it ends.
fn lease_of(reached: &Reached) -> Option<Option<OwnedFd>> {
    reached.lease().ok()
}

/// Names the node that runs at an address, and its process where this user may see it.
pub(crate) fn name(local: Address) -> String {
    let process = holder::listener(local.ip, TCP_PORT);
    let process = process.map_or_else(String::new, |process| format!(", process {},", process.pid));
    format!("the node that runs at {local}{process}")
}

fn is_taken(local: Address) -> bool {
    TcpListener::bind((local.ip, TCP_PORT))
        .is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}
