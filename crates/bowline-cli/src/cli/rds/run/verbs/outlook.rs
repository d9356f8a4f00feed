//! The device that verbs programs of a node get, as far as it is known before they run.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket},
    path::Path,
};

use bowline_node::rdma_device::{Holder, PORT, holder};
use bowline_roce_driver::{Seen, interface, machine_addrs, node_guid};
use bowline_verbs::Mtu;

/// An address of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) addr: IpAddr,
    /// Index of its interface.
    link: u32,
}

impl At {
    pub(crate) const fn new(addr: IpAddr, link: u32) -> Self {
        Self { addr, link }
    }

    /// The name of its interface, and the maximum transmission unit of that, bytes.
    fn interface(&self) -> Option<(String, usize)> {
        interface(self.link)
    }

    pub(crate) fn interface_name(&self) -> String {
        self.interface().map_or_else(String::new, |(name, _)| name)
    }

    /// Why no process can have RoCE's port there; `None`: it can.
    fn trouble(&self) -> Option<Trouble> {
        let at = match self.addr {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                SocketAddr::V6(SocketAddrV6::new(ip, PORT, 0, self.link))
            }
            ip => SocketAddr::new(ip, PORT),
        };
        match UdpSocket::bind(at).map_err(|error| error.kind()) {
            Ok(_) => None,
            Err(ErrorKind::AddrInUse) => Some(Trouble::Taken(holder(self.addr))),
            Err(ErrorKind::AddrNotAvailable) => Some(Trouble::NotReady),
            Err(kind) => Some(Trouble::Other(kind.to_string())),
        }
    }
}

/// Why programs do not get an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Another program has UDP port 4791 there: which, if this user may see it.
    Taken(Option<Holder>),
    /// The system has not finished to set it up.
    NotReady,
    /// The node has had its first program before.
    CameLater,
    /// The same address is on another interface, too.
    Twice,
    Other(String),
}

impl Trouble {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Taken(Some(Holder { pid, name })) => {
                format!("process {pid} ({name}) has UDP port {PORT} there")
            }
            Self::Taken(None) => format!("another program has UDP port {PORT} there"),
            Self::NotReady => "the system still checks whether another machine has it".to_owned(),
            Self::CameLater => "it was not free when the node's first verbs program came; a node \
                that starts again has it"
                .to_owned(),
            Self::Twice => "another interface has the same address".to_owned(),
            Self::Other(text) => text.clone(),
        }
    }
}

/// The device, in the order of its GIDs, and what it leaves out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outlook {
    pub(crate) gids: Vec<At>,
    pub(crate) left_out: Vec<(At, Trouble)>,
    pub(crate) guid: u64,
    /// That of the port, the smallest of all interfaces.
    pub(crate) mtu: Option<Mtu>,
    /// Process of the node, and how many programs have a part of its addresses.
    pub(crate) node: Option<(u32, u8)>,
}

impl Outlook {
    /// Asks the node whose socket for verbs programs this is. Without one, and where it has no
    /// addresses yet, they are those that it would find free now.
    ///
    /// # Errors
    /// The node refuses this user, or does not answer.
    pub(crate) fn of(node: Option<&Path>) -> io::Result<Self> {
        let seen = node.map(Seen::at).transpose()?;
        let machine = machine_addrs().into_iter().map(|(addr, link)| At::new(addr, link));
        let known = seen.as_ref().map_or(&[][..], |seen| &seen.addrs);
        let (gids, left_out) = sorted(machine.collect(), known);
        let addrs: Vec<IpAddr> = gids.iter().map(|at| at.addr).collect();
        let mtus = gids.iter().filter_map(|at| Mtu::for_interface(at.interface()?.1));
        Ok(Self {
            mtu: mtus.min(),
            guid: node_guid(&addrs),
            gids,
            left_out,
            node: seen.map(|seen| (seen.host, seen.processes)),
        })
    }
}

/// Separates the addresses that a node has, or where it has none yet, that it could have.
fn sorted(machine: Vec<At>, known: &[(IpAddr, u32)]) -> (Vec<At>, Vec<(At, Trouble)>) {
    let place = |addr| known.iter().position(|(of, _)| *of == addr);
    let (mut gids, mut left_out) = (Vec::<At>::new(), Vec::new());
    for at in machine {
        let trouble = if gids.iter().any(|other| other.addr == at.addr) {
            Some(Trouble::Twice)
        } else if known.is_empty() {
            at.trouble()
        } else if place(at.addr).is_none() {
            Some(at.trouble().unwrap_or(Trouble::CameLater))
        } else {
            None
        };
        match trouble {
            None => gids.push(at),
            Some(trouble) => left_out.push((at, trouble)),
        }
    }
    gids.sort_by_key(|at| place(at.addr));
    (gids, left_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> At {
        At::new([127, 41, 91, last].into(), 1)
    }

    #[test]
    fn addresses_that_others_have_are_left_out() {
        let socket = UdpSocket::bind((at(1).addr, PORT)).unwrap();
        let (gids, left_out) = sorted(vec![at(1), at(2), at(2)], &[]);
        assert_eq!(gids, [at(2)]);
        let own = std::process::id();
        assert!(
            matches!(&left_out[..], [(one, Trouble::Taken(Some(by))), (two, Trouble::Twice)]
                if *one == at(1) && by.pid == own && *two == at(2)),
            "{left_out:?}"
        );
        drop(socket);
    }

    #[test]
    fn a_node_keeps_what_it_has() {
        let known = [(at(2).addr, 0), (at(1).addr, 0), (at(9).addr, 0)];
        let (gids, left_out) = sorted(vec![at(1), at(2), at(3)], &known);
        assert_eq!(gids, [at(2), at(1)], "in its order");
        assert_eq!(left_out, [(at(3), Trouble::CameLater)]);
    }
}
