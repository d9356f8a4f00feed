//! Listeners [CMA-15].

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bowline_verbs::{CmId, Error, Resource};

use super::Manager;

/// Listeners, by id and by address.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    by_id: BTreeMap<CmId, Listener>,
    by_addr: BTreeMap<(u16, IpAddr), CmId>,
}

#[derive(Debug)]
struct Listener {
    at: SocketAddr,
    /// Number of its requests that the program has not answered.
    pending: usize,
}

/// Result of the search for the listener of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The listener.
    Listener(CmId),
    /// There is no listener for this address, but one for another address and this port.
    OtherAddress,
    /// There is no listener for this port.
    Nobody,
}

impl Listeners {
    /// The address of a listener.
    pub(super) fn at(&self, id: CmId) -> Option<SocketAddr> {
        self.by_id.get(&id).map(|listener| listener.at)
    }

    /// Number of listeners.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn contains(&self, id: CmId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn remove(&mut self, id: CmId) -> bool {
        let Some(listener) = self.by_id.remove(&id) else { return false };
        self.by_addr.remove(&(listener.at.port(), listener.at.ip()));
        true
    }

    /// Finds the listener for an address. The most specific one wins: for the address, for all
    /// addresses of its family, for all addresses [CMA-6].
    pub(super) fn find(&self, at: SocketAddr) -> Found {
        let any_v4 = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        let candidates = if at.is_ipv4() { [at.ip(), any_v4, any] } else { [at.ip(), any, any] };
        let found = candidates.iter().find_map(|ip| self.by_addr.get(&(at.port(), *ip)));
        match found {
            Some(id) => Found::Listener(*id),
            None if self.any_at(at.port()) => Found::OtherAddress,
            None => Found::Nobody,
        }
    }

    fn any_at(&self, port: u16) -> bool {
        let least = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        self.by_addr.range((port, least)..).next().is_some_and(|((found, _), _)| *found == port)
    }

    pub(super) fn pending(&self, id: CmId) -> usize {
        self.by_id.get(&id).map_or(0, |listener| listener.pending)
    }

    pub(super) fn add_pending(&mut self, id: CmId) {
        if let Some(listener) = self.by_id.get_mut(&id) {
            listener.pending += 1;
        }
    }

    pub(super) fn remove_pending(&mut self, id: CmId) {
        if let Some(listener) = self.by_id.get_mut(&id) {
            listener.pending -= 1;
        }
    }
}

impl Manager {
    /// Listens to an address, or to all addresses with an unspecified one. Port 0 selects a free
    /// port.
    pub(crate) fn listen(&mut self, at: SocketAddr) -> Result<CmId, Error> {
        self.listen_among(|manager| &mut manager.listeners, at)
    }

    /// Adds a listener to those of connections or lookups.
    pub(super) fn listen_among(
        &mut self,
        listeners: impl Fn(&mut Self) -> &mut Listeners,
        mut at: SocketAddr,
    ) -> Result<CmId, Error> {
        if at.port() == 0 {
            let free = (0..1000).find_map(|_| {
                let port = self.ephemeral_port();
                (!listeners(self).by_addr.contains_key(&(port, at.ip()))).then_some(port)
            });
            at.set_port(free.ok_or(Error::Limit(Resource::Listeners))?);
        } else if listeners(self).by_addr.contains_key(&(at.port(), at.ip())) {
            return Err(Error::AddrInUse(format!("{at} has a listener already")));
        }
        let id = self.new_id();
        let listeners = listeners(self);
        listeners.by_addr.insert((at.port(), at.ip()), id);
        listeners.by_id.insert(id, Listener { at, pending: 0 });
        Ok(id)
    }

    /// Returns the address of a listener, or the local address of a connection or lookup.
    pub(crate) fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.listeners
            .at(id)
            .or_else(|| self.conns.get(&id).map(|conn| conn.local))
            .or_else(|| self.lookups.local_addr(id))
    }

    /// Chooses a random ephemeral port.
    pub(super) fn ephemeral_port(&mut self) -> u16 {
        0xc000 | (self.rng.next_u32() as u16 & 0x3fff)
    }
}
