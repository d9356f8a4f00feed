//! A running program, with an inbox of device events that it has not handled yet.

use std::collections::VecDeque;

use bowline_roce::Instant;
use bowline_rtrs::bind::{Binding, done_of};
use bowline_rtrs::{Done, Input, PortId};
use bowline_verbs::{CmEvent, CqId, Qpn};

use super::context::{Base, Event};
use super::fabric::{Bench, Own};

/// An event of a device.
#[derive(Debug)]
pub(crate) enum DeviceNotice {
    Cq(CqId),
    Cm(CmEvent),
    Fatal(Qpn),
}

/// State that programs of clients and of the server share.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) node: usize,
    /// Incremented whenever the program starts or stops, so that events for earlier runs are
    /// recognized.
    pub(crate) boot: u32,
    pub(crate) alive: bool,
    pub(crate) inbox: VecDeque<(usize, DeviceNotice)>,
    /// An event to handle the inbox is in the queue.
    poll_scheduled: bool,
    /// The program handles no events before this time.
    stalled: u64,
    /// The program does nothing at all before this time.
    silent: u64,
    /// When the earliest timer event in the queue is due.
    wake_at: Option<u64>,
    /// Longest delay before the program handles its inbox, in nanoseconds.
    look: u64,
}

impl Process {
    pub(crate) fn new(node: usize, look: u64) -> Self {
        Self {
            node,
            boot: 0,
            alive: false,
            inbox: VecDeque::new(),
            poll_scheduled: false,
            stalled: 0,
            silent: 0,
            wake_at: None,
            look,
        }
    }

    pub(crate) fn start(&mut self) {
        self.boot += 1;
        self.alive = true;
    }

    pub(crate) fn stop(&mut self) {
        self.boot += 1;
        self.alive = false;
        self.inbox.clear();
        self.poll_scheduled = false;
        self.stalled = 0;
        self.silent = 0;
        self.wake_at = None;
    }

    /// Makes the program handle no events for `length` nanoseconds.
    pub(crate) fn stall(&mut self, now: u64, length: u64) {
        self.stalled = self.stalled.max(now + length);
    }

    /// Makes the program do nothing at all for `length` nanoseconds, and then everything that is
    /// overdue.
    pub(crate) fn fall_silent(&mut self, base: &mut Base, length: u64) {
        self.stall(base.now, length);
        self.silent = base.now + length;
        self.wake(base, Some(Instant::from_nanos(self.silent)));
    }

    /// Returns whether the program does nothing at all now.
    pub(crate) fn is_silent(&self, base: &Base) -> bool {
        self.silent > base.now
    }

    /// The rest of the present stall, in nanoseconds.
    pub(crate) fn stalled_for(&self, now: u64) -> u64 {
        self.stalled.saturating_sub(now)
    }

    /// Returns whether the program was stalled at some time after `since`.
    pub(crate) fn was_stalled(&self, since: u64) -> bool {
        self.stalled > since
    }

    /// Adds an event of a device to the inbox.
    pub(crate) fn enqueue(&mut self, base: &mut Base, port: usize, notice: DeviceNotice) {
        self.inbox.push_back((port, notice));
        self.schedule_poll(base);
    }

    fn schedule_poll(&mut self, base: &mut Base) {
        if !std::mem::replace(&mut self.poll_scheduled, true) {
            let stall = self.stalled.saturating_sub(base.now);
            let delay = stall + base.rng.below(self.look + 1);
            base.schedule(delay, Event::Poll { node: self.node, boot: self.boot });
        }
    }

    /// The event to handle the inbox is due; `false` if the program is stalled and will do it
    /// later.
    pub(crate) fn poll_due(&mut self, base: &mut Base) -> bool {
        self.poll_scheduled = false;
        if self.stalled > base.now {
            self.schedule_poll(base);
            return false;
        }
        true
    }

    /// A timer event is due; `false` if the program is stalled and will handle it later.
    pub(crate) fn timer_due(&mut self, base: &mut Base) -> bool {
        if self.wake_at.is_some_and(|at| at <= base.now) {
            self.wake_at = None;
        }
        if self.stalled > base.now {
            self.wake(base, Some(Instant::from_nanos(self.stalled)));
            return false;
        }
        true
    }

    /// Schedules a timer event for this time at the latest.
    pub(crate) fn wake(&mut self, base: &mut Base, at: Option<Instant>) {
        let Some(due) = at.map(|at| at.as_nanos().max(base.now)) else { return };
        if self.wake_at.is_none_or(|at| at > due) {
            self.wake_at = Some(due);
            let event = Event::Wake { node: self.node, boot: self.boot };
            base.schedule_at(due, event);
        }
    }
}

/// The meaning of a device event for a core.
pub(crate) enum Translated {
    Nothing,
    Input(Input),
    Dones(Vec<Done>),
}

/// Translates one device event for the core.
pub(crate) fn translate(
    base: &mut Base,
    binding: &mut Binding,
    bench: &mut Bench<'_>,
    own: &[Own],
    port: usize,
    notice: DeviceNotice,
) -> Translated {
    let id = PortId(port as u8);
    match notice {
        DeviceNotice::Cq(cq) => {
            if own.get(port).is_none_or(|own| own.cq != cq) {
                return Translated::Nothing;
            }
            let mut entries = Vec::new();
            loop {
                match bench.poll(port, &mut entries) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(error) => {
                        base.fail(|| format!("polling: {error}"));
                        break;
                    }
                }
            }
            Translated::Dones(entries.iter().map(done_of).collect())
        }
        DeviceNotice::Cm(event) => {
            binding.cm(id, event).map_or(Translated::Nothing, Translated::Input)
        }
        DeviceNotice::Fatal(qpn) => {
            binding.qp_failed(id, qpn).map_or(Translated::Nothing, Translated::Input)
        }
    }
}
