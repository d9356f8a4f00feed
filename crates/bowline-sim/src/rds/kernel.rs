//! A kernel peer, written from the rules of `docs/spec/rds.md` (sections 2 to 7) with its weak
//! points: it frees messages when TCP has acknowledged them, resets connections when no
//! path is free, throws unread bytes away when it closes, pairs paths by order of
//! acceptance and repeats a knock only when something is sent. At addresses that
//! are served over RDMA it uses RDMA (`ib`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use self::conn::Conn;
use self::ib::IbConn;
use self::sockets::Sock;
use super::ctx::{Ctx, HostEvent, HostId};
use super::net::{EndId, Notice};
use super::oracle::MessageId;
use crate::engine::queue::MS;

mod conn;
mod hash;
mod ib;
mod paths;
mod receive;
mod sockets;
mod transmit;

/// Properties of a kernel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Flavour {
    /// Paths announced; 1 with `multipath` off: a peer from before multipath.
    pub(crate) multipath: bool,
    /// Announces generation and source port rule as later kernels do [spec 4.6].
    pub(crate) later: bool,
    /// Answers pings.
    pub(crate) ping_enable: bool,
    /// It reads its TCP sockets with a delay, so that a close can discard bytes.
    pub(crate) slow_reader: bool,
    /// Its paths above 0 send nothing before path 0 has caught up, as those of later kernels
    ///
    #[serde(default)]
    pub(crate) catches_up: bool,
}

/// A kernel peer.
#[derive(Debug)]
pub(crate) struct KernelHost {
    id: HostId,
    flavour: Flavour,
    generation: u32,
    socks: BTreeMap<usize, Sock>,
    conns: Vec<Conn>,
    /// Connections over RDMA.
    ib: Vec<IbConn>,
    /// Connection and path that each end serves.
    ends: HashMap<EndId, (usize, usize)>,
    /// Messages of the workload queued on sockets, to recognise messages that the rules duplicate
    /// or lose.
    seen: HashSet<MessageId>,
}

impl KernelHost {
    pub(crate) fn new(id: HostId, flavour: Flavour, generation: u32) -> Self {
        Self {
            id,
            flavour,
            generation,
            socks: BTreeMap::new(),
            conns: Vec::new(),
            ib: Vec::new(),
            ends: HashMap::new(),
            seen: HashSet::new(),
        }
    }

    /// Returns the connection of two addresses, and makes it if there is none.
    fn conn(&mut self, local: IpAddr, remote: IpAddr) -> usize {
        let known = self.conns.iter().position(|c| c.local == local && c.remote == remote);
        known.unwrap_or_else(|| {
            self.conns.push(Conn::new(local, remote));
            self.conns.len() - 1
        })
    }

    pub(crate) fn event(&mut self, ctx: &mut Ctx, what: HostEvent) {
        match what {
            HostEvent::Connect { conn, path } if self.conns[conn].paths[path].reconnect_pending => {
                self.connect(ctx, conn, path);
            }
            HostEvent::Shutdown { conn, path } => self.shutdown(ctx, conn, path),
            HostEvent::TryPath { conn, path } => {
                self.conns[conn].paths[path].try_pending = false;
                self.transmit(ctx, conn, path);
            }
            HostEvent::IbConnect { conn } => self.ib_connect(ctx, conn),
            HostEvent::IbShutdown { conn } => self.ib_shutdown(ctx, conn),
            HostEvent::Read(end) => {
                if let Some(&(c, p)) = self.ends.get(&end) {
                    self.conns[c].paths[p].read_pending = false;
                    self.read(ctx, c, p);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn notice(&mut self, ctx: &mut Ctx, end: EndId, notice: Notice) {
        if notice == Notice::Incoming {
            self.accept(ctx, end);
            return;
        }
        let Some(&(c, p)) = self.ends.get(&end) else { return };
        match notice {
            Notice::Connected => self.connected(ctx, c, p),
            Notice::ConnectFailed(_) => self.connect_failed(ctx, end, c, p),
            Notice::Readable if self.flavour.slow_reader => {
                let path = &mut self.conns[c].paths[p];
                if !path.read_pending {
                    path.read_pending = true;
                    let delay = ctx.rng.below(2 * MS);
                    ctx.schedule_host(delay, self.id, HostEvent::Read(end));
                }
            }
            Notice::Readable => self.read(ctx, c, p),
            Notice::Writable => self.transmit(ctx, c, p),
            Notice::Acked => self.release(ctx, c, p),
            Notice::Incoming => {}
        }
    }
}
