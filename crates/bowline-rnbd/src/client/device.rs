//! One mapped device, and the phase it is in.
//!
//! ```text
//!  map --> Opening --OPEN ok--> Open ---lost---> Closed --OPEN ok--> Open
//!             |                  |                 |
//!           unmap              unmap             unmap
//!             |                  |                 |
//!             v                  v                 v
//!        AwaitsOpen           Draining         AwaitsOpen if an OPEN is in flight, else Ending
//!             |                  |
//!             | OPEN ok          | no IO in flight
//!             '-----> Closing <--'  --CLOSE answered--> Ending --no IO in flight--> removed
//! ```
//!
//! The phases of the lower row are the steps of an unmap. An OPEN that fails removes a device that
//! was never open, leaves a closed one closed, and ends the wait of `AwaitsOpen`.

use std::collections::VecDeque;
use std::time::Duration;

use bowline_base::Instant;
use bowline_wire::rnbd::Access;

use super::queue::Fragment;
use super::{DevId, DevInfo, DiskRequest, DiskStats, Outage, State, Token};
use crate::{Errno, Failures, IoOp, Latencies, Limits};

#[derive(Debug)]
pub(super) struct Device {
    pub(super) generation: u32,
    pub(super) name: String,
    pub(super) access: Access,
    pub(super) phase: Phase,
    /// The device once had no write cache: whoever began to use it then may never flush, so its
    /// writes are made durable one by one.
    pub(super) write_through: bool,
    /// What happens to requests while the session is lost.
    pub(super) outage: Outage,
    pub(super) waiting: VecDeque<Fragment>,
    pub(super) in_flight: u32,
    pub(super) seen: Seen,
}

/// What was seen of the requests of a device.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) stats: DiskStats,
    /// Requests that the server's storage has failed.
    pub(super) failures: Failures,
    pub(super) reads: Latencies,
    pub(super) writes: Latencies,
    /// Number of changes that were answered and may be in the server's cache, and how many of these
    /// a flush has made durable.
    pub(super) cached: u64,
    pub(super) flushed: u64,
}

impl Seen {
    /// Counts how long a request took that has succeeded.
    pub(super) fn took(&mut self, op: IoOp, time: Duration) {
        match op {
            IoOp::Read => self.reads.record(time),
            _ => self.writes.record(time),
        }
    }
}

/// Where a device is between its map and the end of its unmap. [`State`] is what callers see of it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// The first OPEN is in flight.
    Opening(Token),
    /// The server holds the device open.
    Open(Open),
    /// The server does not hold the device open: the session was lost, or the server has forgotten
    /// the device.
    Closed(Closed),
    /// The device is being unmapped. It takes no requests, and none wait.
    Unmapping {
        step: Unmapping,
        /// The last known limits, for those who look. `None`: the device was never open.
        limits: Option<Limits>,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    /// The server's id of the device.
    pub(super) wire_id: u32,
    pub(super) limits: Limits,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Closed {
    /// When the device was lost: its requests wait from then on.
    pub(super) since: Instant,
    /// The limits of the device when it was open last.
    pub(super) limits: Limits,
    /// The server offers another device under this name now: requests fail until it is remapped.
    pub(super) replaced: bool,
    pub(super) reopen: Reopen,
}

/// What is under way to open a closed device again.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reopen {
    /// Nothing, until the session is back or the device is remapped.
    Idle,
    /// A quiesced open begins at this time.
    At(Instant),
    /// The device waits in `Core::quiesced_opens` until no IO is in flight.
    Queued(ReopenFor),
    /// An OPEN is in flight.
    Sent(OpenInFlight, ReopenFor),
}

/// Who waits for a closed device to be open again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReopenFor {
    /// The requests of the device.
    Requests,
    /// A caller of `Core::remap`, who is told the result.
    Remap,
}

/// An OPEN whose answer is to come.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenInFlight {
    pub(super) token: Token,
    pub(super) kind: OpenKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenKind {
    /// IO of other devices goes on.
    Plain,
    /// No IO of any device is sent until the answer.
    Quiesced,
}

/// The steps of an unmap.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unmapping {
    /// IO is in flight. A CLOSE of this id follows.
    Draining { wire_id: u32 },
    /// An OPEN was in flight when the unmap began. A CLOSE follows if the server carries it out.
    AwaitsOpen(OpenInFlight),
    /// A CLOSE is in flight.
    Closing,
    /// Nothing is left to close. The device is removed once none of its IO is in flight.
    Ending,
}

impl Reopen {
    /// Tells whether a caller of `Core::remap` waits.
    pub(super) const fn is_remap(&self) -> bool {
        matches!(self, Self::Queued(ReopenFor::Remap) | Self::Sent(_, ReopenFor::Remap))
    }
}

/// Tells whether a disk supports the operation.
pub(super) fn supports(limits: &Limits, op: IoOp) -> bool {
    match op {
        IoOp::Read | IoOp::Write | IoOp::Flush => true,
        IoOp::Discard => limits.discard.is_some(),
        IoOp::SecureErase => limits.secure_erase && limits.discard.is_some(),
        IoOp::WriteZeroes => limits.max_write_zeroes > 0,
    }
}

impl Device {
    /// Makes a device whose first OPEN is sent with `token`.
    pub(super) fn new(
        name: &str,
        access: Access,
        generation: u32,
        outage: Outage,
        token: Token,
    ) -> Self {
        Self {
            generation,
            name: name.to_owned(),
            access,
            phase: Phase::Opening(token),
            write_through: false,
            outage,
            waiting: VecDeque::new(),
            in_flight: 0,
            seen: Seen::default(),
        }
    }

    pub(super) const fn state(&self) -> State {
        match self.phase {
            Phase::Opening(_) => State::Init,
            Phase::Open(_) => State::Open,
            Phase::Closed(_) => State::Closed,
            Phase::Unmapping { .. } => State::Unmapped,
        }
    }

    pub(super) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(_))
    }

    pub(super) const fn as_closed(&self) -> Option<&Closed> {
        match &self.phase {
            Phase::Closed(closed) => Some(closed),
            _ => None,
        }
    }

    pub(super) const fn as_closed_mut(&mut self) -> Option<&mut Closed> {
        match &mut self.phase {
            Phase::Closed(closed) => Some(closed),
            _ => None,
        }
    }

    /// Returns the limits of the device; while it is not open, the last known.
    pub(super) const fn limits(&self) -> Option<Limits> {
        match self.phase {
            Phase::Opening(_) => None,
            Phase::Open(Open { limits, .. }) | Phase::Closed(Closed { limits, .. }) => Some(limits),
            Phase::Unmapping { limits, .. } => limits,
        }
    }

    /// Tells whether a quiesced OPEN of the device is in flight.
    pub(super) const fn awaits_quiesced_open(&self) -> bool {
        match self.phase {
            Phase::Closed(Closed { reopen: Reopen::Sent(open, _), .. })
            | Phase::Unmapping { step: Unmapping::AwaitsOpen(open), .. } => {
                matches!(open.kind, OpenKind::Quiesced)
            }
            _ => false,
        }
    }

    /// Makes a quiesced OPEN in flight a plain one: IO is no longer held back for it.
    pub(super) const fn end_quiesce(&mut self) {
        if let Phase::Closed(Closed { reopen: Reopen::Sent(open, _), .. })
        | Phase::Unmapping { step: Unmapping::AwaitsOpen(open), .. } = &mut self.phase
        {
            open.kind = OpenKind::Plain;
        }
    }

    /// Tells whether a piece that could not reach the server may be sent again.
    pub(super) const fn resends(&self) -> bool {
        match &self.phase {
            Phase::Open(_) => true,
            Phase::Closed(closed) => !closed.replaced,
            _ => false,
        }
    }

    /// Checks a request. Returns true if it has to be sent, false if it succeeds without being
    /// sent.
    pub(super) fn validate<D>(
        &self,
        now: Instant,
        request: &DiskRequest<D>,
    ) -> Result<bool, Errno> {
        let limits = match (&self.phase, self.outage) {
            (Phase::Open(open), _) => &open.limits,
            (Phase::Closed(closed), Outage::Queue(limit))
                if !closed.replaced && now.saturating_since(closed.since) < limit =>
            {
                &closed.limits
            }
            _ => return Err(Errno::EIO),
        };
        let op = request.op;
        if op == IoOp::Flush {
            return Ok(limits.write_cache);
        }
        if op.changes() && limits.read_only {
            return Err(Errno::EPERM);
        }
        if !supports(limits, op) {
            return Err(Errno::EOPNOTSUPP);
        }
        let unit = u64::from(limits.logical);
        let len = u64::from(request.len);
        let aligned = len.is_multiple_of(unit) && request.offset.is_multiple_of(unit);
        if !aligned || (op.has_data() && request.mem.is_none() && len > 0) {
            return Err(Errno::EINVAL);
        }
        if !limits.holds(request.offset, len) {
            return Err(Errno::EIO);
        }
        // A discard of nothing is not sent [NB-59].
        Ok(len > 0)
    }

    pub(super) fn info(&self, index: u32) -> DevInfo {
        DevInfo {
            id: DevId { index, generation: self.generation },
            mapping_path: self.name.clone(),
            access: self.access,
            state: self.state(),
            limits: self.limits(),
            in_flight: self.in_flight,
            waiting: self.waiting.len(),
            stats: self.seen.stats,
            is_unflushed: self.seen.cached > self.seen.flushed,
            failures: self.seen.failures,
            read_latencies: self.seen.reads.clone(),
            write_latencies: self.seen.writes.clone(),
        }
    }
}
