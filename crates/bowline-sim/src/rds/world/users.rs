//! The users of the run: their messages, their reading, and the opening and closing of sockets.

use std::net::SocketAddr;

use super::{Phase, World};
use crate::engine::queue::{MS, US};
use crate::rds::ctx::{AppEvent, Event};
use crate::rds::host::{Host, SendResult};
use crate::rds::ops::Extras;
use crate::rds::oracle::{MessageId, Verdict};
use crate::rds::payload::TAG_LEN;

/// State of a sender.
#[derive(Debug)]
pub(super) struct Sender {
    /// Number of messages still to be sent.
    pub(super) left: u32,
    /// A message was refused, and the node will wake the sender.
    pub(super) waiting: bool,
    /// An event for the sender is in the queue.
    scheduled: bool,
    /// Length of the next message in bytes plus one; 0 if it is not drawn yet.
    next_size: usize,
}

/// State of a reader.
#[derive(Debug, Default)]
pub(super) struct Reader {
    pub(super) stopped: bool,
    scheduled: bool,
}

impl Sender {
    pub(super) fn new(left: u32) -> Self {
        Self { left, waiting: false, scheduled: false, next_size: 0 }
    }

    /// Adds one message of `len` bytes to be sent.
    pub(super) fn add_message(&mut self, len: usize) {
        self.left = 1;
        self.next_size = len + 1;
    }
}

impl World {
    pub(super) fn open(&mut self, slot: usize) {
        let plan = self.plan.slots[slot].clone();
        let host = plan.host;
        if self.open[slot] || !self.alive(host) {
            return;
        }
        if !self.ctx.net.hosts[host].addrs.contains(&plan.addr) {
            // The address is away: its owner tries again.
            self.ctx.schedule(50 * MS, Event::App(AppEvent::Reopen(slot)));
            return;
        }
        let addr = self.addr(slot);
        self.open[slot] = true;
        self.ctx.oracle.opened(slot);
        self.ctx.note([40, slot as u64, 0], || format!("host {host} opens {addr}, socket {slot}"));
        self.hosts[host].open(&mut self.ctx, slot, addr, &plan);
        self.schedule_read(slot);
    }

    pub(super) fn close(&mut self, slot: usize) {
        if !self.open[slot] {
            return;
        }
        let host = self.host_of(slot);
        self.open[slot] = false;
        self.excuse_socket(slot);
        self.ctx.ops.closed(&mut self.ctx.base.rng, slot, false);
        self.ctx.note([41, slot as u64, 0], || format!("host {host} closes socket {slot}"));
        self.hosts[host].close(&mut self.ctx, slot);
        self.wake_senders_of(slot);
    }

    pub(super) fn schedule_send(&mut self, sender: usize, delay: u64) {
        let state = &mut self.senders[sender];
        if !state.scheduled {
            state.scheduled = true;
            self.ctx.schedule(delay, Event::App(AppEvent::Send(sender)));
        }
    }

    pub(super) fn schedule_read(&mut self, slot: usize) {
        let reader = &mut self.readers[slot];
        if !reader.scheduled && !reader.stopped {
            reader.scheduled = true;
            let delay = self.ctx.rng.below(self.plan.slots[slot].read_gap + 1);
            self.ctx.schedule(delay, Event::App(AppEvent::Read(slot)));
        }
    }

    /// A reader that had stopped goes on.
    pub(super) fn resume_reader(&mut self, slot: usize) {
        self.readers[slot].stopped = false;
        self.schedule_read(slot);
    }

    pub(super) fn wake_senders_of(&mut self, slot: usize) {
        for sender in 0..self.senders.len() {
            if self.plan.senders[sender].slot == slot && self.senders[sender].waiting {
                self.senders[sender].waiting = false;
                let delay = self.ctx.rng.below(20 * US);
                self.schedule_send(sender, delay);
            }
        }
    }

    pub(super) fn send(&mut self, sender: usize) {
        self.senders[sender].scheduled = false;
        let plan = self.plan.senders[sender].clone();
        let host = self.host_of(plan.slot);
        if self.senders[sender].left == 0 || self.senders[sender].waiting {
            return;
        }
        if !self.open[plan.slot] || self.stalled[host] {
            self.schedule_send(sender, 20 * MS);
            return;
        }
        let mut target = self.addr(plan.target);
        if plan.pings {
            target.set_port(0);
        }
        for _ in 0..plan.burst {
            if self.senders[sender].left == 0 {
                return;
            }
            if self.senders[sender].next_size == 0 {
                self.senders[sender].next_size = 1 + self.draw_size(plan.size_max);
            }
            let len = self.senders[sender].next_size - 1;
            match self.send_one(plan.slot, plan.target, target, len, plan.pings) {
                SendResult::Sent => {
                    self.senders[sender].left -= 1;
                    self.senders[sender].next_size = 0;
                }
                SendResult::Wait => {
                    self.senders[sender].waiting = true;
                    return;
                }
                SendResult::Closed => break,
                SendResult::TooLong => {
                    let buffer = self.plan.slots[plan.slot].send_buffer;
                    self.ctx.fail(|| format!("{len} bytes are too long, buffer {buffer}"));
                    return;
                }
            }
        }
        let gap = self.ctx.rng.wait(plan.gap);
        self.schedule_send(sender, gap);
    }

    fn draw_size(&mut self, max: usize) -> usize {
        let rng = &mut self.ctx.rng;
        match rng.below(20) {
            0 => 0,
            1 => max.min(1),
            2 => max,
            _ => rng.magnitude(1, max as u64) as usize,
        }
    }

    fn send_one(
        &mut self,
        slot: usize,
        target: usize,
        to: SocketAddr,
        len: usize,
        ping: bool,
    ) -> SendResult {
        let mut payload = std::mem::take(&mut self.payload);
        let host = self.host_of(slot);
        let extras = if ping { Extras::default() } else { self.draw_extras(slot, target) };
        // Nothing but operations is sent.
        let silent = extras.silent && self.ctx.rng.chance(500);
        let len = if silent { 0 } else { len };
        self.ctx.oracle.next_payload(slot, target, len, &mut payload);
        // The oracle is told first, since the call may already affect the message.
        let mut message = None;
        if ping {
            self.ctx.oracle.ping_accepted(slot);
        } else if !(extras.silent && len == 0) {
            message = Some(self.ctx.oracle.send_accepted(slot, target, len));
        }
        if !extras.ops.is_empty() {
            self.prepare_ops(slot, &extras, message);
        }
        let result = self.hosts[host].send(&mut self.ctx, slot, to, &payload, &extras);
        if result == SendResult::Sent {
            self.ctx.stats.sent += 1;
            let size = match len {
                0 => "empty",
                1..TAG_LEN => "too short for its name",
                TAG_LEN..=0x1_0000 => "up to 64 KiB",
                0x1_0001..=0x10_0000 => "up to 1 MiB",
                _ => "above 1 MiB",
            };
            self.ctx.coverage.hit("send", size);
        } else {
            self.ctx.stats.refused += 1;
            self.ctx.ops.refused(extras.ops.len());
            if ping {
                self.ctx.oracle.ping_refused(slot);
            } else if message.is_some() {
                self.ctx.oracle.send_refused(slot, target);
            }
        }
        self.ctx.note([42, slot as u64, len as u64], || {
            format!("socket {slot} sends {len} bytes to {to}: {result:?}")
        });
        self.payload = payload;
        result
    }

    /// Draws what accompanies a message: memory that is announced, or operations.
    fn draw_extras(&mut self, slot: usize, target: usize) -> Extras {
        let (host, to) = (self.host_of(slot), self.addr(target).ip());
        let ctx = &mut self.ctx;
        let over_rdma = self.plan.over_rdma(slot) && self.plan.over_rdma(target);
        let Host::Bowline(node) = &mut self.hosts[host] else { return Extras::default() };
        // The last messages of a run have to arrive soon.
        let late = self.phase > Phase::Draining;
        if ctx.ops.plan.is_none() || !over_rdma || late || ctx.net.owner(to) == Some(host) {
            return Extras::default();
        }
        if let Some(cookie) = ctx.ops.draw_free(&mut ctx.base.rng, slot) {
            ctx.coverage.hit("ops", "region taken back");
            node.free_region(ctx, slot, cookie);
        }
        if let Some((cookie, new)) = ctx.ops.draw_announced(&mut ctx.base.rng, slot) {
            ctx.coverage.hit("ops", "region announced");
            if let Some(new) = new {
                node.add_region(ctx, slot, new);
            }
            return Extras { announced: Some(cookie), ..Extras::default() };
        }
        let faulty = ctx.net.faulty;
        ctx.ops.draw(&mut ctx.base.rng, (slot, target), faulty)
    }

    /// Notes operations that are about to be sent.
    fn prepare_ops(&mut self, slot: usize, extras: &Extras, message: Option<MessageId>) {
        if message.is_none() {
            self.ctx.coverage.hit("ops", "silent message");
        }
        let recverr = self.ctx.ops.plan.as_ref().map_or(0, |plan| plan.recverr);
        let recverr = self.ctx.rng.chance(recverr);
        self.ctx.ops.sending(extras.ops.len(), message, recverr);
        let host = self.host_of(slot);
        if let Host::Bowline(node) = &mut self.hosts[host] {
            node.set_recverr(slot, recverr);
        }
    }

    pub(super) fn read(&mut self, slot: usize) {
        self.readers[slot].scheduled = false;
        let host = self.host_of(slot);
        if !self.open[slot] || self.readers[slot].stopped {
            return;
        }
        if self.stalled[host] {
            self.readers[slot].scheduled = true;
            self.ctx.schedule(20 * MS, Event::App(AppEvent::Read(slot)));
            return;
        }
        for taken in 0..self.plan.slots[slot].read_burst {
            let Some((source, payload)) = self.hosts[host].recv(&mut self.ctx, slot) else {
                if taken > 0 {
                    self.end_after_receiving(host);
                }
                return;
            };
            self.ctx.stats.received += 1;
            self.ctx.stats.received_bytes += payload.len() as u64;
            let len = payload.len();
            self.ctx.note([43, slot as u64, len as u64], || {
                format!("socket {slot} gets {len} bytes from {source}")
            });
            let judged = self.ctx.oracle.received(slot, source, &payload, &mut self.scratch);
            match judged {
                Err(what) => self.ctx.fail(|| what),
                Ok(Verdict::InTurn) => {}
                Ok(Verdict::Again) => self.ctx.coverage.hit("receive", "again in a new process"),
                Ok(Verdict::Moved) => {
                    self.ctx.coverage.hit("receive", "after an address came back");
                }
                Ok(Verdict::Overtaken) => {
                    self.ctx.coverage.hit("receive", "again, on a kernel's overtaken connection");
                }
                Ok(Verdict::Late) => {
                    self.ctx.coverage.hit("receive", "late, as a kernel dropped it at first");
                }
                Ok(Verdict::Ahead) => {
                    self.ctx.coverage.hit("receive", "ahead of one on another connection");
                }
            }
            if self.ctx.ops.plan.is_some()
                && source.port() > 0
                && let Some(message) = self.ctx.oracle.identify(source, self.addr(slot), &payload)
                && let Err(what) = self.ctx.ops.delivered(slot, message)
            {
                self.ctx.fail(|| what);
            }
            let from = self.ctx.oracle.slot_at(source);
            if from.is_some_and(|from| self.plan.over_rdma(from)) {
                self.ctx.coverage.hit("receive", "over RDMA");
            } else if let Some(from) = from {
                self.pairs.count(self.kinds[self.host_of(from)], self.kinds[host]);
                if self.plan.serves_rdma(self.plan.slots[slot].addr) {
                    self.ctx.coverage.hit("receive", "over TCP where RDMA is served");
                }
            }
        }
        self.schedule_read(slot);
    }
}
