//! The device that verbs programs of a node get, as far as it is known before they run.

use std::{io, net::IpAddr, path::Path};

use bowline_node::rdma_device::{Holder, holder, is_held};
use bowline_roce_driver::{Host, Seen, interface, machine_addrs, node_guid};
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

    /// Tells whether a process has RoCE's port there. It is not bound to find out: a node may be
    /// about to.
    fn is_taken(&self) -> bool {
        is_held(self.addr)
    }

    /// The process that has it, if this user may see that.
    pub(crate) fn holder(&self) -> Option<Holder> {
        holder(self.addr)
    }
}

/// Why programs do not get an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Another program has UDP port 4791 there.
    Taken,
    /// The node has had its first program before.
    CameLater,
    /// The node has as many as it shares.
    TooMany,
    /// The same address is on another interface, too.
    Twice,
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
        let look = || node.map(Seen::at).transpose();
        let outlook = Self::after(look()?);
        let finds_some_taken =
            outlook.left_out.iter().any(|(_, trouble)| *trouble == Trouble::Taken);
        if finds_some_taken && node.is_some() {
            // The node may have taken addresses since it was asked, which were found taken then.
            return Ok(Self::after(look()?));
        }
        Ok(outlook)
    }

    fn after(seen: Option<Seen>) -> Self {
        let machine = machine_addrs().into_iter().map(|(addr, link)| At::new(addr, link));
        let known = seen.as_ref().map_or(&[][..], |seen| &seen.addrs);
        let (gids, left_out) = sorted(machine.collect(), known);
        let addrs: Vec<IpAddr> = gids.iter().map(|at| at.addr).collect();
        let mtus = gids.iter().filter_map(|at| Mtu::for_interface(at.interface()?.1));
        Self {
            mtu: mtus.min(),
            guid: node_guid(&addrs),
            gids,
            left_out,
            node: seen.map(|seen| (seen.host, seen.processes)),
        }
    }
}

/// Separates the addresses that a node has, or where it has none yet, that it could have.
fn sorted(machine: Vec<At>, known: &[(IpAddr, u32)]) -> (Vec<At>, Vec<(At, Trouble)>) {
    let place = |addr| known.iter().position(|(of, _)| *of == addr);
    let (mut gids, mut left_out) = (Vec::<At>::new(), Vec::new());
    for at in machine {
        let trouble = if gids.iter().any(|other| other.addr == at.addr) {
            Some(Trouble::Twice)
        } else if place(at.addr).is_some() {
            None
        } else if at.is_taken() {
            Some(Trouble::Taken)
        } else if gids.len().max(known.len()) >= Host::ADDRS_MAX {
            Some(Trouble::TooMany)
        } else {
            (!known.is_empty()).then_some(Trouble::CameLater)
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
    use std::net::UdpSocket;

    use bowline_node::rdma_device::PORT;

    use super::*;

    fn at(last: u8) -> At {
        At::new([127, 41, 91, last].into(), 1)
    }

    #[test]
    fn addresses_that_others_have_are_left_out() {
        let socket = UdpSocket::bind((at(1).addr, PORT)).unwrap();
        let (gids, left_out) = sorted(vec![at(1), at(2), at(2)], &[]);
        assert_eq!(gids, [at(2)]);
        assert_eq!(left_out, [(at(1), Trouble::Taken), (at(2), Trouble::Twice)]);
        assert_eq!(at(1).holder().map(|by| by.pid), Some(std::process::id()));
        drop(socket);
    }

    #[test]
    fn a_node_shares_only_so_many() {
        let all: Vec<_> = (0..=64).map(at).collect();
        let too_many = [(at(64), Trouble::TooMany)];
        assert_eq!(sorted(all.clone(), &[]), (all[..64].to_vec(), too_many.to_vec()));
        let known: Vec<_> = (0..64).map(|last| (at(last).addr, 0)).collect();
        assert_eq!(sorted(all, &known).1, too_many);
    }

    #[test]
    fn a_node_keeps_what_it_has() {
        let known = [(at(2).addr, 0), (at(1).addr, 0), (at(9).addr, 0)];
        let (gids, left_out) = sorted(vec![at(1), at(2), at(3)], &known);
        assert_eq!(gids, [at(2), at(1)], "in its order");
        assert_eq!(left_out, [(at(3), Trouble::CameLater)]);
    }
}
