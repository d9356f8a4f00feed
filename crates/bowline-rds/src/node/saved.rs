//! A node that goes on in another process: everything but its TCP connections is written down and
//! read again.

use std::io::{self, Read, Write};

use bowline_base::Instant;
use serde::{Deserialize, Serialize};

use super::Node;
use super::timers::Timer;
use crate::api::CloseReason;
use crate::config::Config;
use crate::conn::Conn;
use crate::dedup::Budget;
use crate::ids::{ConnId, LinkId, RdmaLinkId};

/// Version of what is written. Fields may be added without another version: those that are missing
/// when it is read have to have a default.
pub const SAVED_FORMAT: u32 = 1;

/// What peers know a process by, which goes on as the same one.
#[derive(Serialize, Deserialize)]
struct Identity {
    format: u32,
    generation: u32,
    paths: u8,
    end_to_end: bool,
}

impl Node {
    /// Writes the node down, after its connections have ended: see
    /// [`close_links`](Self::close_links). Those that have not are given up.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn save(&mut self, now: Instant, mut out: impl Write) -> io::Result<()> {
        self.now = now;
        self.closing = true;
        let links: Vec<_> = self.links.iter().map(|(id, _)| LinkId(id)).collect();
        for id in links {
            self.handle_closed(now, id, CloseReason::TimedOut);
        }
        let over_rdma: Vec<_> = self.rdma_links.iter().map(|(id, _)| RdmaLinkId(id)).collect();
        for id in over_rdma {
            self.handle_rdma_closed(now, id, CloseReason::TimedOut);
        }
        self.drop_all_ops();
        for path in self.conns.iter_mut().flat_map(|conn| &mut conn.paths) {
            path.repack(&mut self.pool);
        }
        let of_process = |timer| {
            use Timer::{RdmaAsk, RdmaCheck, RdmaConnect, RdmaProbe, RdmaUsed};
            matches!(timer, RdmaConnect(_) | RdmaProbe(_) | RdmaCheck(_) | RdmaAsk(_) | RdmaUsed)
        };
        self.timers.retain(|(_, timer)| !of_process(*timer));
        let Config { generation, paths, end_to_end, .. } = self.config;
        let identity = Identity { format: SAVED_FORMAT, generation, paths, end_to_end };
        let keys = self.links.emptied::<()>();
        for part in [encode(&identity)?, encode(&keys)?, encode(&self)?] {
            out.write_all(&(part.len() as u64).to_le_bytes())?;
            out.write_all(&part)?;
        }
        Ok(())
    }

    /// Reads a node that was [saved](Self::save) on this machine since it was started, for times
    /// are those of its clock. Peers take it for the process that it was, so it keeps that one's
    /// generation, number of paths and way to acknowledge; all else is as `config` says.
    ///
    /// # Errors
    /// `InvalidData` for what another version has written; those of `from`.
    pub fn resume(config: Config, now: Instant, mut from: impl Read) -> io::Result<Self> {
        let identity: Identity = decode(&mut from)?;
        if identity.format != SAVED_FORMAT {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it is saved in format {}, this is {SAVED_FORMAT}", identity.format),
            ));
        }
        let Identity { generation, paths, end_to_end, .. } = identity;
        let keys: bowline_base::slab::Slab<()> = decode(&mut from)?;
        let mut node: Self = decode(&mut from)?;
        node.now = now;
        node.links = keys.emptied();
        node.config = Config { generation, paths, end_to_end, ..config };
        node.dedup_budget = Budget::new(node.config.limits.duplicate_records_total);
        for conn in node.conns.iter_mut() {
            if let Some(dedup) = &mut conn.dedup {
                dedup.charge(&node.dedup_budget);
            }
            if let Some(remembered) = conn.rdma.as_mut().and_then(|rdma| rdma.remembered.as_mut()) {
                remembered.charge(&node.dedup_budget);
            }
        }
        for path in node.conns.iter_mut().flat_map(|conn| &mut conn.paths) {
            path.adopt_into(&mut node.pool);
        }
        let paths = |(id, conn): (_, &Conn)| (ConnId(id), conn.paths.len() as u8);
        for (id, paths) in node.conns.iter().map(paths).collect::<Vec<_>>() {
            (0..paths).for_each(|index| node.note_senders(id, index));
        }
        if !node.config.addrs.is_empty() {
            node.local_addrs.iter_mut().for_each(|local| local.present = false);
        }
        for addr in node.config.addrs.clone() {
            node.add_local(addr);
        }
        node.reconnect_all();
        Ok(node)
    }

    /// Plans to connect to the peers that the process before was connected to.
    fn reconnect_all(&mut self) {
        for path in self.conns.iter_mut().flat_map(|conn| &mut conn.paths) {
            path.delay = 0;
        }
        let paths = |(id, conn): (_, &Conn)| (ConnId(id), conn.paths.len() as u8);
        for (id, paths) in self.conns.iter().map(paths).collect::<Vec<_>>() {
            (0..paths).for_each(|index| self.replace_link(id, index));
        }
    }
}

fn encode(part: &impl Serialize) -> io::Result<Vec<u8>> {
    rmp_serde::to_vec_named(part).map_err(io::Error::other)
}

fn decode<T: for<'de> Deserialize<'de>>(from: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 8];
    from.read_exact(&mut len)?;
    let mut bytes = Vec::new();
    from.take(u64::from_le_bytes(len)).read_to_end(&mut bytes)?;
    rmp_serde::from_slice(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    use super::*;
    use crate::api::SendMsg;

    /// What a version before `lent_from` knows of a socket's lent messages.
    #[derive(Deserialize)]
    struct Before {
        lent: VecDeque<(Option<ConnId>, usize)>,
    }

    #[test]
    fn an_earlier_version_reads_which_messages_are_lent() {
        let at = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), port);
        let mut node = Node::new(Config { addrs: vec![at(0).ip()], ..Config::default() });
        let now = Instant::default();
        let [from, to] = [4000, 5000].map(|port| {
            let id = node.socket().expect("a socket");
            node.bind(id, at(port)).expect("a free port");
            id
        });
        let msg = SendMsg { name: Some(at(5000)), ..SendMsg::default() };
        node.send(now, from, &msg).expect("room");
        assert_eq!(node.lend(now, to, |_, _, _| true), Ok(1));
        let mut bytes = &*encode(node.sockets.get(to.0).expect("it is open")).expect("bytes");
        let before: Before = rmp_serde::from_read(&mut bytes).expect("the same fields");
        assert_eq!(before.lent, [(None, 0)]);
    }
}
