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
    pub(crate) fn listen(&mut self, mut at: SocketAddr) -> Result<CmId, Error> {
        if at.port() == 0 {
            at.set_port(self.free_port(at.ip())?);
        }
        let key = (at.port(), at.ip());
        if self.listeners.by_addr.contains_key(&key) {
            return Err(Error::AddrInUse(format!("{at} has a listener already")));
        }
        let id = self.new_id();
        self.listeners.by_addr.insert(key, id);
        self.listeners.by_id.insert(id, Listener { at, pending: 0 });
        Ok(id)
    }

    /// Returns the address of a listener, or the local address of a connection.
    pub(crate) fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        let of_listener = self.listeners.by_id.get(&id).map(|listener| listener.at);
        of_listener.or_else(|| self.conns.get(&id).map(|conn| conn.local))
    }

    fn free_port(&mut self, ip: IpAddr) -> Result<u16, Error> {
        for _ in 0..1000 {
            let port = self.ephemeral_port();
            if !self.listeners.by_addr.contains_key(&(port, ip)) {
                return Ok(port);
            }
        }
        Err(Error::Limit(Resource::Listeners))
    }

    /// Chooses a random ephemeral port.
    pub(super) fn ephemeral_port(&mut self) -> u16 {
        0xc000 | (self.rng.next_u32() as u16 & 0x3fff)
    }
}
