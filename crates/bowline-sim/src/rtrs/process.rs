//! A running program: what its devices have told it and it has not looked at yet.

use std::collections::VecDeque;

use bowline_roce::Instant;
use bowline_rtrs::bind::{Binding, done_of};
use bowline_rtrs::{Done, Input, PortId};
use bowline_verbs::{CmEvent, CqId, Qpn};

use super::base::{Base, Event};
use super::fabric::{Bench, Own};

/// Something a device has told.
#[derive(Debug)]
pub(crate) enum Notice {
    Cq(CqId),
    Cm(CmEvent),
    Fatal(Qpn),
}

/// What programs of clients and of the server have in common.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) node: usize,
    /// Its life.
    pub(crate) boot: u32,
    pub(crate) alive: bool,
    pub(crate) inbox: VecDeque<(usize, Notice)>,
    /// An event to look is in the queue.
    looking: bool,
    /// It does nothing before this.
    stalled: u64,
    /// It does nothing at all before this.
    silent: u64,
    /// When the earliest timer event in the queue is due.
    wake_at: Option<u64>,
    /// Longest time until it looks.
    look: u64,
}

impl Process {
    pub(crate) fn new(node: usize, look: u64) -> Self {
        Self {
            node,
            boot: 0,
            alive: false,
            inbox: VecDeque::new(),
            looking: false,
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
        self.looking = false;
        self.stalled = 0;
        self.silent = 0;
        self.wake_at = None;
    }

    /// Does nothing for so long.
    pub(crate) fn stall(&mut self, now: u64, length: u64) {
        self.stalled = self.stalled.max(now + length);
    }

    /// Does nothing at all for so long, then everything it was asked for.
    pub(crate) fn fall_silent(&mut self, base: &mut Base, length: u64) {
        self.stall(base.now, length);
        self.silent = base.now + length;
        self.wake(base, Some(Instant::from_nanos(self.silent)));
    }

    /// Tells whether it does nothing at all.
    pub(crate) fn is_silent(&self, base: &Base) -> bool {
        self.silent > base.now
    }

    /// How long it will still do nothing.
    pub(crate) fn stalled_for(&self, now: u64) -> u64 {
        self.stalled.saturating_sub(now)
    }

    /// Tells whether it has stalled after this time.
    pub(crate) fn was_stalled(&self, since: u64) -> bool {
        self.stalled > since
    }

    /// A device has something to tell.
    pub(crate) fn tell(&mut self, base: &mut Base, port: usize, notice: Notice) {
        self.inbox.push_back((port, notice));
        self.wants_look(base);
    }

    fn wants_look(&mut self, base: &mut Base) {
        if !std::mem::replace(&mut self.looking, true) {
            let stall = self.stalled.saturating_sub(base.now);
            let delay = stall + base.rng.below(self.look + 1);
            base.schedule(delay, Event::Look { node: self.node, boot: self.boot });
        }
    }

    /// It is time to look; `false` when it is stalled, and looks later.
    pub(crate) fn looks(&mut self, base: &mut Base) -> bool {
        self.looking = false;
        if self.stalled > base.now {
            self.wants_look(base);
            return false;
        }
        true
    }

    /// A timer event: `false` when it is stalled, and wakes later.
    pub(crate) fn wakes(&mut self, base: &mut Base) -> bool {
        if self.wake_at.is_some_and(|at| at <= base.now) {
            self.wake_at = None;
        }
        if self.stalled > base.now {
            self.wake(base, Some(Instant::from_nanos(self.stalled)));
            return false;
        }
        true
    }

    /// Wants to be woken at this time at the latest.
    pub(crate) fn wake(&mut self, base: &mut Base, at: Option<Instant>) {
        let Some(due) = at.map(|at| at.as_nanos().max(base.now)) else { return };
        if self.wake_at.is_none_or(|at| at > due) {
            self.wake_at = Some(due);
            let event = Event::Wake { node: self.node, boot: self.boot };
            base.schedule(due - base.now, event);
        }
    }
}

/// What a notice means to a core.
pub(crate) enum Heard {
    Nothing,
    Input(Input),
    Dones(Vec<Done>),
}

/// Looks at one notice.
pub(crate) fn hear(
    base: &mut Base,
    binding: &mut Binding,
    bench: &mut Bench<'_>,
    own: &[Own],
    port: usize,
    notice: Notice,
) -> Heard {
    let id = PortId(port as u8);
    match notice {
        Notice::Cq(cq) => {
            if own.get(port).is_none_or(|own| own.cq != cq) {
                return Heard::Nothing;
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
            Heard::Dones(entries.iter().map(done_of).collect())
        }
        Notice::Cm(event) => binding.cm(id, event).map_or(Heard::Nothing, Heard::Input),
        Notice::Fatal(qpn) => binding.qp_failed(id, qpn).map_or(Heard::Nothing, Heard::Input),
    }
}
