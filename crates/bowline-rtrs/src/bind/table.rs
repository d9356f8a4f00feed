//! The queue pair and the connection-manager id of each connection.

use std::collections::BTreeMap;

use bowline_verbs::{CmId, Qpn};

use super::pack::Bursts;
use crate::{ConnId, PathId, PortId, RequestId};

/// The objects of a connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) port: PortId,
    pub(super) qpn: Qpn,
    pub(super) id: CmId,
    /// The connection was established.
    pub(super) established: bool,
    /// The connection is closed, or a work request could not be posted: nothing more is posted, so
    /// that there is no gap.
    pub(super) dead: bool,
    /// The first and last send of the current batch, and the batch's number.
    pub(super) sends: (u32, u32),
    pub(super) turn: u64,
    pub(super) bursts: Bursts,
}

impl Conn {
    pub(super) const fn new(port: PortId, qpn: Qpn, id: CmId, bursts: Bursts) -> Self {
        Self { port, qpn, id, established: false, dead: false, sends: (0, 0), turn: 0, bursts }
    }
}

/// The meaning of a connection-manager id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CmIdOwner {
    Listener,
    Request(RequestId),
    Conn(ConnId),
}

/// The connections of one path.
#[derive(Debug)]
struct Path {
    generation: u8,
    conns: Vec<Option<Conn>>,
}

/// All connections and requests of a core.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// By the path's slot.
    paths: Vec<Option<Path>>,
    names: BTreeMap<(PortId, CmId), CmIdOwner>,
    requests: BTreeMap<RequestId, (PortId, CmId)>,
}

impl Table {
    pub(super) fn is_empty(&self) -> bool {
        self.paths.iter().all(Option::is_none) && self.requests.is_empty()
    }

    pub(super) fn name(&mut self, port: PortId, id: CmId, whose: CmIdOwner) {
        self.names.insert((port, id), whose);
    }

    pub(super) fn forget_name(&mut self, port: PortId, id: CmId) {
        self.names.remove(&(port, id));
    }

    pub(super) fn cm_id_owner(&self, port: PortId, id: CmId) -> Option<CmIdOwner> {
        self.names.get(&(port, id)).copied()
    }

    pub(super) fn add_request(&mut self, request: RequestId, port: PortId, id: CmId) {
        self.requests.insert(request, (port, id));
        self.name(port, id, CmIdOwner::Request(request));
    }

    pub(super) fn take_request(&mut self, request: RequestId) -> Option<(PortId, CmId)> {
        let (port, id) = self.requests.remove(&request)?;
        self.forget_name(port, id);
        Some((port, id))
    }

    /// Adds a connection. Connections of an earlier generation in the slot must have been removed:
    /// a core reuses a slot only then.
    pub(super) fn insert(&mut self, conn: ConnId, made: Conn) {
        self.name(made.port, made.id, CmIdOwner::Conn(conn));
        let PathId { slot, generation } = conn.path;
        let (slot, cid) = (usize::from(slot), usize::from(conn.cid));
        if self.paths.len() <= slot {
            self.paths.resize_with(slot + 1, || None);
        }
        let path = self.paths[slot].get_or_insert_with(|| Path { generation, conns: Vec::new() });
        path.generation = generation;
        if path.conns.len() <= cid {
            path.conns.resize_with(cid + 1, || None);
        }
        path.conns[cid] = Some(made);
    }

    pub(super) fn get_mut(&mut self, conn: ConnId) -> Option<&mut Conn> {
        let path = self.paths.get_mut(usize::from(conn.path.slot))?.as_mut()?;
        let path = (path.generation == conn.path.generation).then_some(path)?;
        path.conns.get_mut(usize::from(conn.cid))?.as_mut()
    }

    pub(super) fn remove(&mut self, conn: ConnId) -> Option<Conn> {
        let place = self.paths.get_mut(usize::from(conn.path.slot))?;
        let path = place.as_mut().filter(|path| path.generation == conn.path.generation)?;
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
            let Some(Path { generation, conns }) = path else { continue };
            for (cid, conn) in (0..).zip(conns) {
                if conn.as_ref().is_some_and(|conn| conn.port == port) {
                    all.push(ConnId { path: PathId { slot, generation: *generation }, cid });
                }
            }
        }
        all
    }

    /// Finds the connection of a queue pair.
    pub(super) fn find(&self, port: PortId, qpn: Qpn) -> Option<ConnId> {
        let conns = self.names.values().filter_map(|whose| match whose {
            CmIdOwner::Conn(conn) => Some(*conn),
            CmIdOwner::Listener | CmIdOwner::Request(_) => None,
        });
        let is = |conn: &ConnId| {
            let path = self.paths.get(usize::from(conn.path.slot)).and_then(Option::as_ref);
            let found = path.and_then(|path| path.conns.get(usize::from(conn.cid))?.as_ref());
            found.is_some_and(|found| (found.port, found.qpn) == (port, qpn))
        };
        conns.into_iter().find(is)
    }
}
