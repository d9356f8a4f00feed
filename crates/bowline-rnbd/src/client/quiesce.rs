//! Quiesced opens: opening a device again while no IO is in flight [NB-16].
//!
//! The server may have lost its table of ids. IO with an old id must not arrive after that id
//! belongs to another device.

use std::time::Duration;

use bowline_base::Instant;

use super::device::{Device, OpenKind, Reopen, ReopenFor};
use super::{Core, DevId};
use crate::Errno;

/// Longest time for which all devices stop sending so that one can be opened.
const QUIESCE_MAX: Duration = Duration::from_secs(2);
/// After a quiesce, devices send for at least this many times as long as it took.
const QUIESCE_REST_FACTOR: u32 = 5;

/// Whether devices stop sending for quiesced opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quiesce {
    /// No device waits for a quiesced open.
    Idle,
    /// No IO is sent until all IO in flight has ended, or until this time.
    Draining(Instant),
    /// All devices send again. The next quiesce begins after this time, and after all stragglers
    /// were answered.
    Resting(Instant),
}

impl<D> Core<D> {
    /// Opens a device once no IO is in flight. To get there, all devices stop sending
    /// ([`Quiesce`]). A request may take any time: so the quiesce is short, and is not repeated
    /// while a straggler of the last one is in flight [NB-16].
    pub(super) fn open_quiesced(&mut self, now: Instant, dev: DevId, waiting: ReopenFor) {
        let Some(closed) = self.closed_mut(dev) else { return };
        closed.reopen = Reopen::Queued(waiting);
        if !self.quiesced_opens.contains(&dev) {
            self.quiesced_opens.push_back(dev);
        }
        self.advance_quiesced_opens(now);
    }

    /// Tells whether a quiesced OPEN was sent and not answered yet.
    pub(super) fn quiesced_open_in_flight(&self) -> bool {
        self.devices.iter().flatten().any(Device::awaits_quiesced_open)
    }

    /// Tells whether stragglers of the last quiesce, or quiesced opens, are still in flight.
    pub(super) fn blocked(&self) -> bool {
        let resting = matches!(self.quiesce, Quiesce::Resting(_));
        resting && (!self.stragglers.is_empty() || self.quiesced_open_in_flight())
    }

    /// Takes the next step of quiesced opens, if it can be taken.
    pub(super) fn advance_quiesced_opens(&mut self, now: Instant) {
        let needed = !self.quiesced_opens.is_empty() || self.quiesced_open_in_flight();
        if let Quiesce::Draining(at) = self.quiesce
            && (at <= now || !needed)
        {
            let took = QUIESCE_MAX.saturating_sub(at.saturating_since(now));
            self.quiesce = Quiesce::Resting(now + took * QUIESCE_REST_FACTOR);
            if needed {
                self.stragglers.extend(self.queue.slots_in_flight());
            }
            for dev in self.quiesced_opens.clone() {
                if self.closed_mut(dev).is_some_and(|closed| closed.reopen.is_remap()) {
                    self.quiesced_opens.retain(|waiting| *waiting != dev);
                    self.cancel_reopen(dev, Errno::EBUSY);
                    self.schedule_reopen(now, dev);
                }
            }
        }
        let in_flight = self.queue.in_flight() > 0;
        let resting = matches!(self.quiesce, Quiesce::Resting(at) if now < at);
        if self.quiesced_opens.is_empty() || self.blocked() || resting && in_flight {
            return;
        }
        if !matches!(self.quiesce, Quiesce::Draining(_)) {
            self.quiesce = Quiesce::Draining(now + QUIESCE_MAX);
        }
        if in_flight {
            return;
        }
        while let Some(dev) = self.quiesced_opens.pop_front() {
            self.send_reopen(dev, OpenKind::Quiesced);
        }
    }

    /// Gives up the quiesced open of a device. If none is left, the other devices send again.
    pub(super) fn cancel_quiesced_open(&mut self, dev: DevId) {
        self.quiesced_opens.retain(|waiting| *waiting != dev);
        let idle = self.quiesced_opens.is_empty() && !self.quiesced_open_in_flight();
        if idle && matches!(self.quiesce, Quiesce::Draining(_)) {
            self.quiesce = Quiesce::Idle;
        }
    }

    /// Starts afresh for another session: IO in flight has ended, or cannot reach the server any
    /// more.
    pub(super) fn reset_quiesce(&mut self) {
        self.quiesced_opens.clear();
        self.stragglers.clear();
        self.quiesce = Quiesce::Idle;
        for device in self.devices.iter_mut().flatten() {
            device.end_quiesce();
        }
    }
}
