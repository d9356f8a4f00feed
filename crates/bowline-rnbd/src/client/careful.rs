//! Opening a device again while nothing is under way [NB-16].
//!
//! The server may have lost its table of ids, and an id of before must not reach another device
//! after.

use std::time::Duration;

use bowline_base::Instant;

use super::{Core, DevId};
use crate::Errno;

/// Longest time in which no disk sends anything so that one can be opened carefully.
const STOP_MAX: Duration = Duration::from_secs(2);
/// After a stop there is none for so many times as long as it was.
const STOP_REST: u32 = 5;

/// Whether devices keep still for careful opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// None is to be opened so.
    No,
    /// Nothing is sent, until then at the longest.
    Until(Instant),
    /// All send again; the next stop is not before this time, nor before the blockers were
    /// answered.
    Rest(Instant),
}

impl<D> Core<D> {
    /// Opens a device once nothing is under way. That nothing is, is brought about by a [`Stop`] of
    /// all devices; since requests of one may take any time, it is short, and not repeated as long
    /// as they do [NB-16].
    pub(super) fn open_carefully(&mut self, now: Instant, dev: DevId) {
        if let Some(device) = self.device_mut(dev) {
            device.reopen_at = None;
        }
        if !self.careful.contains(&dev) {
            self.careful.push_back(dev);
        }
        self.go_on_opening(now);
    }

    /// Tells whether a careful OPEN was sent and not answered.
    pub(super) fn opens_carefully(&self) -> bool {
        self.devices.iter().flatten().any(|device| device.careful)
    }

    /// Tells whether what the last stop waited for in vain is still under way.
    pub(super) fn blocked(&self) -> bool {
        let rests = matches!(self.stop, Stop::Rest(_));
        rests && (!self.blockers.is_empty() || self.opens_carefully())
    }

    /// Takes the next step of careful opens, if it can be taken.
    pub(super) fn go_on_opening(&mut self, now: Instant) {
        let wanted = !self.careful.is_empty() || self.opens_carefully();
        if let Stop::Until(at) = self.stop
            && (at <= now || !wanted)
        {
            let took = STOP_MAX.saturating_sub(at.saturating_since(now));
            self.stop = Stop::Rest(now + took * STOP_REST);
            if wanted {
                self.blockers.extend(self.queue.flying());
            }
            for dev in self.careful.clone() {
                if self.device(dev).is_some_and(|device| device.remapping) {
                    self.careful.retain(|waiting| *waiting != dev);
                    self.remapped(dev, Err(Errno::EBUSY));
                    self.reopen_later(now, dev);
                }
            }
        }
        let flies = self.queue.in_flight() > 0;
        let rests = matches!(self.stop, Stop::Rest(at) if now < at);
        if self.careful.is_empty() || self.blocked() || rests && flies {
            return;
        }
        if !matches!(self.stop, Stop::Until(_)) {
            self.stop = Stop::Until(now + STOP_MAX);
        }
        if flies {
            return;
        }
        while let Some(dev) = self.careful.pop_front() {
            if let Some(device) = self.device_mut(dev) {
                device.careful = true;
            }
            self.ask_open(dev);
        }
    }

    /// A device is not to be opened any more. If that was all they kept still for, the others go
    /// on.
    pub(super) fn leave_careful(&mut self, dev: DevId) {
        self.careful.retain(|waiting| *waiting != dev);
        let idle = self.careful.is_empty() && !self.opens_carefully();
        if idle && matches!(self.stop, Stop::Until(_)) {
            self.stop = Stop::No;
        }
    }

    /// The session is another: what was under way is not, or does not come to the server any more.
    pub(super) fn forget_careful(&mut self) {
        self.careful.clear();
        self.blockers.clear();
        self.stop = Stop::No;
        for device in self.devices.iter_mut().flatten() {
            device.careful = false;
        }
    }
}
