//! A session from its opening to its closing, and the check that nothing of it is left.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bowline_rnbd::client::Core;
use bowline_rtrs::bind::Binding;
use bowline_rtrs::client::{ClientConfig, ReadKeys, Session};
use bowline_verbs::{Access, Buffer};
use bowline_wire::rtrs::SessionName;

use super::disks::MapState;
use super::failover::Failover;
use super::paths::uuid;
use super::placement::Placements;
use super::{ActiveSession, Client, Common, Stage};
use crate::engine::queue::SEC;
use crate::roce::host::Host;
use crate::rtrs::context::{Base, Event};
use crate::rtrs::fabric::{Own, bench};
use crate::rtrs::sabotage::Sabotage;

/// Bytes for the response to a service message, and the number of such buffers.
const SERVICE_BYTES: usize = 64;
const SERVICE_SLOTS: usize = 8;
/// Nanoseconds until the client opens its next session.
const AGAIN: u64 = SEC;

impl Client {
    /// Opens a session.
    pub(crate) fn begin(&mut self, base: &mut Base, hosts: &mut [Host], common: &Common<'_>) {
        if self.active.is_some() || self.done {
            return;
        }
        let made = self.make(base, hosts, common);
        let Some(active) = base.judge(made) else { return };
        base.stats.sessions += 1;
        base.note([10, self.number as u64, 0], || format!("client {}: opens", self.number));
        self.active = Some(active);
        self.swap_later(base);
        self.pump(base, hosts, common);
    }

    fn make(
        &mut self,
        base: &mut Base,
        hosts: &mut [Host],
        common: &Common<'_>,
    ) -> Result<ActiveSession, String> {
        let wrong = |e: bowline_verbs::Error| format!("client {}: {e}", self.number);
        let own = hosts.iter_mut().map(|host| {
            let device = host.device.as_mut().ok_or("a device is missing")?;
            let own = Own::new(device, common.burst).map_err(wrong)?;
            device.arm_cq(own.cq, false).map_err(wrong)?;
            Ok(own)
        });
        let own = own.collect::<Result<Vec<Own>, String>>()?;
        let now = base.instant();
        let attrs = bench(hosts, &own, now).ok_or("a device is missing")?.attrs();
        let name = SessionName::new(&format!("client-{}", self.number))
            .map_err(|e| format!("a session's name: {e}"))?;
        let mut delay = self.plan.kernel_delay.map(Duration::from_nanos);
        if base.sabotages(Sabotage::StayAway, 1000) {
            delay = Some(Duration::from_secs(86_400));
        }
        let config = ClientConfig {
            io_connections: self.plan.io_connections,
            poll_connections: self.plan.poll_connections,
            policy: self.plan.policy,
            read_keys: self.plan.read_keys,
            counts_keys: self.plan.counts_keys,
            reconnect_delay: delay,
            max_reconnects: self.plan.max_reconnects,
            heartbeat: common.heartbeat,
            bridges_outages: self.plan.queues,
            ..ClientConfig::new(name, base.rng.next())
        };
        let mut session = Session::new(config, &attrs, uuid(base));
        let bytes = self.request_bytes();
        let count = self.plan.depth;
        let len = count * bytes + SERVICE_SLOTS * SERVICE_BYTES;
        let buffer = Arc::new(Buffer::new(len).map_err(|e| format!("memory: {e}"))?);
        let access = match self.plan.read_keys {
            ReadKeys::LongLived => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            ReadKeys::PerRequest => Access::LOCAL_WRITE,
        };
        let region = session.add_region(Arc::clone(&buffer), access);
        let placements = Placements::new(&mut session, len)?;
        let addrs: Vec<IpAddr> = hosts.iter().map(Host::addr).collect();
        let paths: Vec<_> = (self.plan.paths.clone().into_iter())
            .map(|(from, to)| (self.addr(&addrs, common, from, to), uuid(base)))
            .collect();
        session.open(now, &paths);
        Ok(ActiveSession {
            session,
            binding: Binding::new(own.len()),
            own,
            core: None,
            disks: vec![MapState::No; self.disks.len()],
            stage: Stage::Opening,
            region,
            buffer,
            placements,
            failover: Failover::default(),
            lost_since: None,
            refused: [false; 2],
            permits: Vec::new(),
            in_flight: BTreeMap::new(),
            tags: 0,
            messages: VecDeque::new(),
            sends: VecDeque::new(),
            service_slots: (0..SERVICE_SLOTS).map(|n| count * bytes + n * SERVICE_BYTES).collect(),
            requests: BTreeMap::new(),
            places: (0..count).map(|n| n * bytes).collect(),
            verified: (0, 0),
            unread: false,
            final_io: None,
            states: BTreeMap::new(),
        })
    }

    /// Handles the death of the client's machine.
    pub(crate) fn died(&mut self, base: &mut Base) {
        self.count(base);
        self.process.stop();
        self.done = false;
        self.active = None;
        self.disks.iter_mut().for_each(|disk| disk.oracle.program_died());
        self.going = false;
        self.swapping = false;
        self.attacks.clear();
    }

    /// Adds the session's counters to the run's statistics.
    pub(super) fn count(&self, base: &mut Base) {
        let Some(active) = &self.active else { return };
        base.stats.failovers +=
            active.session.paths().map(|path| path.stats.failovers).sum::<u64>();
    }

    /// Requests a wake-up for the next timer. Ends a closed session and checks that nothing of it
    /// is left.
    pub(super) fn settle(&mut self, base: &mut Base, hosts: &mut [Host]) {
        let Some(active) = &mut self.active else { return };
        let timers =
            [active.session.poll_timeout(), active.core.as_ref().and_then(Core::poll_timeout)];
        self.process.wake(base, timers.into_iter().flatten().min());
        if active.stage != Stage::Closed {
            return;
        }
        for path in active.session.paths() {
            let number = self.number;
            base.fail(|| format!("client {number}: {:?} is left of a closed session", path.id));
        }
        if !active.binding.is_empty() {
            base.fail(|| format!("client {}: its binding is not empty", self.number));
        }
        for (host, own) in hosts.iter_mut().zip(&active.own) {
            let Some(device) = &mut host.device else { continue };
            let ended = device.destroy_cq(own.cq).and_then(|()| device.dealloc_pd(own.pd));
            base.judge(ended.map_err(|e| format!("client {}: at its end: {e}", self.number)));
        }
        let finished = active.verified != (0, 0) || self.plan.hostile;
        self.active = None;
        if self.calm && self.left == 0 && finished {
            self.done = true;
        } else {
            let event = Event::Begin { client: self.number, boot: self.process.boot };
            base.schedule(AGAIN, event);
        }
    }
}
