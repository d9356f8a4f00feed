//! Why a command or the daemon did not do its work, by what its exit status is to say.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use bowline_base::Errno;
use bowline_wire::rds::TCP_PORT;

use crate::{
    holder::{self, Holder},
    log::shown,
    tentative,
    values::Address,
};

/// Why a command did not do its work.
#[derive(Debug)]
pub enum Failure {
    /// The command line or a configuration file is wrong: exit status 2.
    Usage(String),
    /// The work failed: exit status 1.
    Failed(String),
    /// A command on devices, sessions or paths failed: the low 8 bits of -errno [NB-41].
    Errno(Errno, String),
    /// A program could not be run: the exit status that a shell has then.
    Program(u8, String),
    /// The work failed and the command has already said so: exit status 1.
    Reported,
    /// A command that was run has ended with this exit status, and has said itself why.
    Ended(u8),
}

impl Failure {
    /// Returns a failure of the work with a text of one line.
    pub fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    /// Says why the program `name` failed, in one line; returns the exit status.
    pub fn report(&self, name: &str) -> u8 {
        match self {
            Self::Usage(text) => {
                note!("{name}: {}", shown(text));
                2
            }
            Self::Failed(text) => {
                note!("{name}: {}", shown(text));
                1
            }
            Self::Errno(errno, text) => {
                note!("error: {}", shown(text));
                errno.neg() as u8
            }
            Self::Program(status, text) => {
                note!("{name}: {}", shown(text));
                *status
            }
            Self::Reported => 1,
            Self::Ended(status) => *status,
        }
    }

    /// Returns a mistake of the user with a text of one line.
    pub fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text)
            | Self::Failed(text)
            | Self::Errno(_, text)
            | Self::Program(_, text) => f.write_str(text),
            Self::Reported => f.write_str("it has said why"),
            Self::Ended(status) => write!(f, "the command has ended with exit status {status}"),
        }
    }
}

impl From<bowline::rds::Error> for Failure {
    fn from(error: bowline::rds::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<bowline_verbs::Error> for Failure {
    fn from(error: bowline_verbs::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Starts a node with one address, or with those of its builder; an error names the place.
pub fn start_node(
    builder: bowline::rds::Builder,
    addresses: &[Address],
) -> Outcome<bowline::rds::Node> {
    node_on(builder, addresses, bowline::rds::Builder::build)
}

/// Has `start` start a node on these addresses; its errors say what to do.
pub fn node_on(
    builder: bowline::rds::Builder,
    addresses: &[Address],
    start: impl FnOnce(bowline::rds::Builder) -> Result<bowline::rds::Node, bowline::rds::Error>,
) -> Outcome<bowline::rds::Node> {
    let add = |builder: bowline::rds::Builder, address: &Address| match *address {
        Address { ip: IpAddr::V6(ip), link: Some(link) } => builder.address_on(ip, link),
        Address { ip, .. } => builder.address(ip),
    };
    let builder = addresses.iter().fold(builder, add);
    tentative::wait(addresses);
    start(builder).map_err(|error| {
        let names: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let place = if names.is_empty() { "every address".to_owned() } else { names.join(", ") };
        let why = match error.errno() {
            Errno::EADDRNOTAVAIL => Some(tentative::why(addresses).unwrap_or_else(|| {
                "this machine has no such address; see `ip address`".to_owned()
            })),
            Errno::EADDRINUSE => taken(addresses),
            _ => None,
        };
        Failure::Failed(format!("no node on {place}: {}", why.unwrap_or_else(|| error.to_string())))
    })
}

/// Says who has the port of RDS at one of these addresses, or at all, if this user may see it.
fn taken(addresses: &[Address]) -> Option<String> {
    let all = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let all: Vec<_> = if addresses.is_empty() { all.to_vec() } else { Vec::new() };
    let mut ips = addresses.iter().map(|address| address.ip).chain(all);
    let (ip, Holder { pid, name }) =
        ips.find_map(|ip| Some((ip, holder::listener(ip, TCP_PORT)?)))?;
    let at = SocketAddr::new(ip, TCP_PORT);
    Some(format!(
        "{at} is in use by process {pid}, {name}: stop it, give another address, or use another \
         network namespace"
    ))
}

/// Result of a command.
pub type Outcome<T = ()> = Result<T, Failure>;
