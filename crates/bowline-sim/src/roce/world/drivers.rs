//! The driver of each device: passes datagrams and time to the device, sends its datagrams, and
//! delivers its events.

use bowline_roce::Event as DeviceEvent;
use bowline_verbs::{AsyncEvent, CmEvent};

use super::{Event, Phase, World};
use crate::engine::queue::US;
use crate::roce::host::Host;
use crate::roce::net::Datagram;
use crate::roce::reach::{FaultRow, Head};
use crate::roce::sabotage::Sabotage;
use crate::roce::side::{Side, SideId, Stage};

/// Number of timers that a device may hold in addition to a few for every queue pair.
const TIMERS: usize = 100;
/// Operation of management datagrams [GSI-1].
const UD_SEND: u8 = 0x64;
/// Number of bursts of one turn after which a device is taken to make no progress.
const BURSTS_MAX: usize = 20_000;

impl World {
    /// Delivers a datagram to a host.
    pub(crate) fn deliver(&mut self, host: usize, datagram: &Datagram) {
        if self.hosts[host].deliver(self.base.now, &mut self.base.rng, datagram) {
            let here = self.sides.iter_mut().filter(|side| side.host == host);
            here.for_each(|side| side.memory.wiped = true);
        }
    }

    pub(super) fn arrive(&mut self, host: usize, datagram: &Datagram) {
        if self.hosts[host].device.is_none() {
            return;
        }
        self.stats.datagrams += 1;
        let len = datagram.bytes.len() as u64;
        let opcode = datagram.bytes.first().copied().unwrap_or(0);
        self.note([1, host as u64, len << 8 | u64::from(opcode)], || {
            let word = |at: usize| {
                let bytes = datagram.bytes.get(at..at + 4).unwrap_or(&[0; 4]);
                u32::from_be_bytes(bytes.try_into().unwrap_or_default())
            };
            let (from, qpn, psn) = (datagram.from, word(4) & 0xff_ffff, word(8));
            format!(
                "host {host} <- {from}: opcode {opcode:#04x} QPN {qpn:#x} PSN {:#x}{} {len} bytes, \
                 then {:08x}",
                psn & 0xff_ffff,
                if psn >> 31 == 1 { " ack" } else { "" },
                word(12)
            )
        });
        let deadly = opcode == UD_SEND
            && self.phase == Phase::Active
            && self.base.rng.chance(self.plan.deadly_mads);
        let which = if deadly { self.rng.below(3) } else { 3 };
        let length = self.plan.fault_max;
        if which == 0 {
            let length = self.rng.magnitude(US, length);
            return self.crash(host, length, FaultRow::ReceiverBefore);
        }
        if !self.sabotaged_arrival(host, datagram) {
            self.deliver(host, datagram);
        }
        self.schedule_turn(host);
        let sender = self.hosts.iter().position(|h| h.addr() == datagram.from.ip());
        if let (1 | 2, Some(sender)) = (which, sender) {
            let length = self.rng.magnitude(US, length);
            match which {
                1 => self.crash(host, length, FaultRow::ReceiverAfter),
                _ => self.crash(sender, length, FaultRow::Sender),
            }
        }
    }

    /// Lets the driver run, because its device was given work.
    pub(crate) fn schedule_turn(&mut self, host: usize) {
        self.set_timer(host);
        let Host { boot, turning, .. } = self.hosts[host];
        if !turning && self.hosts[host].device.is_some() {
            self.hosts[host].turning = true;
            self.base.schedule_within(self.hosts[host].plan.turn, Event::Turn { host, boot });
        }
    }

    pub(super) fn set_timer(&mut self, host: usize) {
        if let Some(due) = self.hosts[host].next_timer(self.base.now) {
            let (boot, late) = (self.hosts[host].boot, self.sabotaged_timer());
            self.base.schedule(due - self.base.now + late, Event::Timer { host, boot });
        }
    }

    pub(super) fn turn(&mut self, host: usize) {
        self.hosts[host].turning = false;
        self.events(host);
        for bursts in 0.. {
            if bursts == BURSTS_MAX {
                self.fail(|| format!("host {host} never stops sending"));
                return;
            }
            let Self { base, hosts, net, plan, reached, .. } = self;
            let (now, number) = (base.now, host);
            let sent = hosts[host].send(now, |datagram| {
                let Some(to) = plan.hosts.iter().position(|h| h.addr == datagram.to) else {
                    return;
                };
                base.stats.sent += 1;
                let head = Head::of(&datagram.bytes);
                let delivery = net.send(now, &mut base.rng, (number, to), datagram);
                reached.sent(&mut base.coverage, &head, &delivery);
                base.stats.damaged += u64::from(delivery.damaged);
                base.stats.lost += u64::from(delivery.arrivals.is_empty());
                for (at, datagram) in delivery.arrivals {
                    base.schedule_at(at, Event::Arrive { host: to, datagram });
                }
            });
            if self.judge(sent) != Some(true) {
                break;
            }
        }
        self.events(host);
        self.set_timer(host);
        self.check_bounds(host);
    }

    /// Checks that the device's own objects are limited by the number of objects that programs
    /// made.
    fn check_bounds(&mut self, host: usize) {
        let Some(device) = &self.hosts[host].device else { return };
        let held = device.in_use();
        if held.timers > TIMERS + 4 * held.qps || held.mads > 0 || held.events > 0 {
            self.fail(|| format!("host {host} holds too much: {held:?}"));
        }
    }

    /// Delivers the events of a device.
    fn events(&mut self, host: usize) {
        loop {
            let Some(device) = &mut self.hosts[host].device else { return };
            let Some(event) = device.poll_event() else { return };
            match event {
                DeviceEvent::CqReady(cq) => {
                    let boot = self.hosts[host].boot;
                    let mine = |s: &Side| s.host == host && s.boot == boot;
                    let side = self.sides.iter().position(|s| {
                        mine(s) && s.stage < Stage::Gone && (s.send_cq == cq || s.recv_cq == cq)
                    });
                    if side.is_none() && self.port_ready(host, cq) {
                        continue;
                    }
                    // The program may have removed the connection just now.
                    let Some(id) = side else { continue };
                    self.note([3, id as u64, cq.0.into()], || format!("side {id}: {cq:?} ready"));
                    let which = usize::from(self.sides[id].send_cq != cq);
                    if !std::mem::take(&mut self.sides[id].armed[which]) {
                        self.fail(|| format!("side {id}: {cq:?} was not armed and is reported"));
                    }
                    if self.sabotage != Some(Sabotage::LoseReady) || self.rng.chance(900) {
                        self.schedule_look(id);
                    }
                }
                DeviceEvent::Async(event) => {
                    self.note([4, host as u64, 0], || format!("host {host}: {event:?}"));
                    match event {
                        AsyncEvent::SrqLimitReached(srq) => self.limit_reached(host, srq),
                        AsyncEvent::LastWqeReached(qpn) => self.last_receive(host, qpn),
                        _ => {}
                    }
                }
                DeviceEvent::Cm(event) => self.connection_event(host, event),
                other => self.fail(|| format!("host {host}: {other:?}, of which nothing is known")),
            }
        }
    }

    pub(crate) fn schedule_look(&mut self, id: SideId) {
        if !std::mem::replace(&mut self.sides[id].looking, true) {
            let most = self.plan.hosts[self.sides[id].host].look;
            self.schedule_within(most, Event::Poll(id));
        }
    }

    fn connection_event(&mut self, host: usize, event: CmEvent) {
        self.note([13, host as u64, 0], || format!("host {host}: {event:?}"));
        let boot = self.hosts[host].boot;
        if let CmEvent::ConnectRequest { id, request } = event {
            let most =
                self.side_of(&request).map_or(0, |s| self.plan.conns[self.sides[s].conn].decide);
            let request = Box::new(request);
            self.deciding += 1;
            self.schedule_within(most, Event::Decide { host, boot, id, request });
        } else {
            self.handle_cm_event(host, event);
        }
    }
}
