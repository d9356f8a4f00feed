//! One mapped device.

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::rnbd::Access;

use super::queue::Work;
use super::{DevId, DevInfo, DiskRequest, DiskStats, Outage, State, Token};
use crate::{Errno, IoOp, Limits};

#[derive(Debug)]
pub(super) struct Device {
    pub(super) life: u32,
    pub(super) name: String,
    pub(super) access: Access,
    pub(super) state: State,
    /// The server's number for it, while it is open.
    pub(super) wire_id: u32,
    pub(super) limits: Option<Limits>,
    /// It was without a write cache once: who began to use it then may never flush.
    pub(super) write_through: bool,
    /// The OPEN under way.
    pub(super) opening: Option<Token>,
    /// That OPEN goes out while nothing else is under way.
    pub(super) careful: bool,
    /// Somebody waits for how that OPEN ends.
    pub(super) remapping: bool,
    /// A CLOSE was sent, or none is needed.
    pub(super) close_sent: bool,
    /// A CLOSE is under way.
    pub(super) closing: bool,
    /// What becomes of requests while the session is away.
    pub(super) outage: Outage,
    pub(super) reopen_at: Option<Instant>,
    pub(super) offline_since: Option<Instant>,
    /// It came back as another device.
    pub(super) gone: bool,
    pub(super) waiting: VecDeque<Work>,
    pub(super) in_flight: u32,
    pub(super) stats: DiskStats,
}

/// Tells whether a disk has the operation.
pub(super) fn supports(limits: &Limits, op: IoOp) -> bool {
    match op {
        IoOp::Read | IoOp::Write | IoOp::Flush => true,
        IoOp::Discard => limits.discard.is_some(),
        IoOp::SecureErase => limits.secure_erase && limits.discard.is_some(),
        IoOp::WriteZeroes => limits.max_write_zeroes > 0,
    }
}

impl Device {
    pub(super) fn new(name: &str, access: Access, life: u32, outage: Outage) -> Self {
        Self {
            life,
            name: name.to_owned(),
            access,
            state: State::Init,
            wire_id: 0,
            limits: None,
            write_through: false,
            opening: None,
            careful: false,
            remapping: false,
            close_sent: false,
            closing: false,
            outage,
            reopen_at: None,
            offline_since: None,
            gone: false,
            waiting: VecDeque::new(),
            in_flight: 0,
            stats: DiskStats::default(),
        }
    }

    /// Says whether a request is to be carried out, or is done by saying so.
    pub(super) fn judge<D>(&self, now: Instant, request: &DiskRequest<D>) -> Result<bool, Errno> {
        let limits = self.limits.as_ref().ok_or(Errno::EIO)?;
        let waits = match (self.state, self.outage) {
            (State::Open, _) => true,
            (State::Closed, Outage::Queue(limit)) => {
                let since = self.offline_since.unwrap_or(now);
                !self.gone && now.saturating_since(since) < limit
            }
            _ => false,
        };
        if !waits {
            return Err(Errno::EIO);
        }
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
            id: DevId { index, life: self.life },
            mapping_path: self.name.clone(),
            access: self.access,
            state: self.state,
            limits: self.limits,
            in_flight: self.in_flight,
            waiting: self.waiting.len(),
            stats: self.stats,
        }
    }
}
