//! Paths of a session: their addresses, and random commands for them.

use std::net::{IpAddr, SocketAddr};

use bowline_rtrs::client::{PathAddr, PathState};
use bowline_rtrs::{PathId, PortId};
use bowline_wire::rtrs::{PORT, Uuid};

use super::{Client, Common, Stage};
use crate::roce::host::Host;
use crate::rtrs::context::Base;
use crate::rtrs::reach;

impl Client {
    pub(super) fn addr(
        &mut self,
        own: &[IpAddr],
        common: &Common<'_>,
        from: u8,
        to: u8,
    ) -> PathAddr {
        self.ports = (self.ports + 1) % 20_000;
        PathAddr {
            port: PortId(from),
            src: SocketAddr::new(own[usize::from(from)], 32_768 + self.ports),
            dst: SocketAddr::new(common.servers[usize::from(to)], PORT),
        }
    }

    /// Repairs what faults have left: closed paths, closed disks, disks that are not mapped.
    pub(crate) fn repair(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        let Some(active) = &mut self.active else { return };
        let closed: Vec<PathId> = (active.session.paths())
            .filter(|path| path.state == PathState::Closed)
            .map(|path| path.id)
            .collect();
        if active.stage < Stage::Closing {
            let none = active.session.paths().next().is_none();
            for path in closed {
                // A busy path will be tried again.
                let _ = active.session.reconnect_path(now, path);
            }
            if none {
                self.add_path(base, hosts, common, self.plan.paths[0]);
            }
        }
        self.repair_disks(base);
        self.pump(base, hosts, common);
    }

    fn add_path(
        &mut self,
        base: &mut Base,
        hosts: &[Host],
        common: &Common<'_>,
        (from, to): (u8, u8),
    ) {
        let own: Vec<IpAddr> = hosts.iter().map(Host::addr).collect();
        let addr = self.addr(&own, common, from, to);
        let uuid = uuid(base);
        let now = base.instant();
        if let Some(active) = &mut self.active {
            let added = active.session.add_path(now, addr, uuid);
            base.note([22, self.number as u64, 0], || format!("{addr:?}: {added:?}"));
        }
    }

    /// Gives a random command for a path.
    pub(crate) fn order_path(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        let now = base.instant();
        let Some(active) = &mut self.active else { return };
        if active.stage >= Stage::Closing {
            return;
        }
        let paths: Vec<PathId> = active.session.paths().map(|path| path.id).collect();
        let what = base.rng.below(5);
        let path = if paths.is_empty() { None } else { Some(base.rng.pick(&paths)) };
        base.note([18, self.number as u64, what], || {
            format!("client {}: order {what} about {path:?}", self.number)
        });
        // The last path is not removed, since then none would be left to come back. A path that is
        // being added does not count, since it may not become one.
        let stays = |state| {
            matches!(state, PathState::Connected | PathState::Reconnecting | PathState::Closed)
        };
        let staying = active.session.paths().filter(|path| stays(path.state)).count();
        let result = match (what, path) {
            (0, Some(path)) if staying > 1 => active.session.remove_path(now, path),
            (1, Some(path)) => active.session.disconnect_path(now, path),
            (2, Some(path)) => active.session.reconnect_path(now, path),
            _ => {
                let from = base.rng.index(hosts.len()) as u8;
                let to = base.rng.index(common.servers.len()) as u8;
                self.add_path(base, hosts, common, (from, to));
                Ok(())
            }
        };
        reach::ordered(&mut base.coverage, what, result.is_ok());
        base.note([19, self.number as u64, u64::from(result.is_ok())], || format!("{result:?}"));
        self.pump(base, hosts, common);
    }
}

/// A random id for a path or a session.
pub(super) fn uuid(base: &mut Base) -> Uuid {
    let mut bytes = [0; 16];
    for half in bytes.chunks_exact_mut(8) {
        half.copy_from_slice(&base.rng.next().to_le_bytes());
    }
    Uuid::from_random(bytes)
}
