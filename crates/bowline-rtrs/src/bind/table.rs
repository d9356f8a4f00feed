//! Which queue pair and which connection of the connection manager a connection of the core is.

use std::collections::BTreeMap;

use bowline_verbs::{CmId, Qpn};

use super::pack::Bursts;
use crate::{ConnId, PathId, PortId, RequestId};

/// A connection of the core.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) port: PortId,
    pub(super) qpn: Qpn,
    pub(super) id: CmId,
    /// It was established.
    pub(super) stands: bool,
    /// It is closed, or a request could not be posted: nothing is posted any more, so that there is
    /// no gap in what was.
    pub(super) dead: bool,
    /// Sends of the batch at hand: the first, the last, and which batch that is.
    pub(super) sends: (u32, u32),
    pub(super) turn: u64,
    pub(super) bursts: Bursts,
}

impl Conn {
    pub(super) const fn new(port: PortId, qpn: Qpn, id: CmId, bursts: Bursts) -> Self {
        Self { port, qpn, id, stands: false, dead: false, sends: (0, 0), turn: 0, bursts }
    }
}

/// What a name of the connection manager stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Listener,
    Request(RequestId),
    Conn(ConnId),
}

/// The connections of one path.
#[derive(Debug)]
struct Path {
    life: u8,
    conns: Vec<Option<Conn>>,
}

/// All of a core.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By the path's slot.
    paths: Vec<Option<Path>>,
    names: BTreeMap<(PortId, CmId), Whose>,
    requests: BTreeMap<RequestId, (PortId, CmId)>,
}

impl Table {
    pub(super) fn is_empty(&self) -> bool {
        self.paths.iter().all(Option::is_none) && self.requests.is_empty()
    }

    pub(super) fn name(&mut self, port: PortId, id: CmId, whose: Whose) {
        self.names.insert((port, id), whose);
    }

    pub(super) fn forget_name(&mut self, port: PortId, id: CmId) {
        self.names.remove(&(port, id));
    }

    pub(super) fn whose(&self, port: PortId, id: CmId) -> Option<Whose> {
        self.names.get(&(port, id)).copied()
    }

    pub(super) fn add_request(&mut self, request: RequestId, port: PortId, id: CmId) {
        self.requests.insert(request, (port, id));
        self.name(port, id, Whose::Request(request));
    }

    pub(super) fn take_request(&mut self, request: RequestId) -> Option<(PortId, CmId)> {
        let (port, id) = self.requests.remove(&request)?;
        self.forget_name(port, id);
        Some((port, id))
    }

    /// Adds a connection. One that is there in the same slot in another life has been forgotten: a
    /// core reuses a slot only then.
    pub(super) fn insert(&mut self, conn: ConnId, made: Conn) {
        self.name(made.port, made.id, Whose::Conn(conn));
        let PathId { slot, life } = conn.path;
        let (slot, cid) = (usize::from(slot), usize::from(conn.cid));
        if self.paths.len() <= slot {
            self.paths.resize_with(slot + 1, || None);
        }
        let path = self.paths[slot].get_or_insert_with(|| Path { life, conns: Vec::new() });
        path.life = life;
        if path.conns.len() <= cid {
            path.conns.resize_with(cid + 1, || None);
        }
        path.conns[cid] = Some(made);
    }

    pub(super) fn get_mut(&mut self, conn: ConnId) -> Option<&mut Conn> {
        let path = self.paths.get_mut(usize::from(conn.path.slot))?.as_mut()?;
        let path = (path.life == conn.path.life).then_some(path)?;
        path.conns.get_mut(usize::from(conn.cid))?.as_mut()
    }

    pub(super) fn remove(&mut self, conn: ConnId) -> Option<Conn> {
        let place = self.paths.get_mut(usize::from(conn.path.slot))?;
        let path = place.as_mut().filter(|path| path.life == conn.path.life)?;
        let gone = path.conns.get_mut(usize::from(conn.cid))?.take()?;
        if path.conns.iter().all(Option::is_none) {
            *place = None;
        }
        self.forget_name(gone.port, gone.id);
        Some(gone)
    }

    /// The connections of a port.
    pub(super) fn all_on(&self, port: PortId) -> Vec<ConnId> {
        let mut all = Vec::new();
        for (slot, path) in (0..).zip(&self.paths) {
            let Some(Path { life, conns }) = path else { continue };
            for (cid, conn) in (0..).zip(conns) {
                if conn.as_ref().is_some_and(|conn| conn.port == port) {
                    all.push(ConnId { path: PathId { slot, life: *life }, cid });
                }
            }
        }
        all
    }

    /// Finds the connection of a queue pair.
    pub(super) fn find(&self, port: PortId, qpn: Qpn) -> Option<ConnId> {
        let conns = self.names.values().filter_map(|whose| match whose {
            Whose::Conn(conn) => Some(*conn),
            Whose::Listener | Whose::Request(_) => None,
        });
        let is = |conn: &ConnId| {
            let path = self.paths.get(usize::from(conn.path.slot)).and_then(Option::as_ref);
            let found = path.and_then(|path| path.conns.get(usize::from(conn.cid))?.as_ref());
            found.is_some_and(|found| (found.port, found.qpn) == (port, qpn))
        };
        conns.into_iter().find(is)
    }
}
