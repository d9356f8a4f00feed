//! One mapped device.

use std::collections::VecDeque;

use bowline_base::Instant;
use bowline_wire::rnbd::Access;

use super::queue::Fragment;
use super::{DevId, DevInfo, DiskRequest, DiskStats, Outage, State, Token};
use crate::{Errno, IoOp, Limits};

#[derive(Debug)]
pub(super) struct Device {
    pub(super) generation: u32,
    pub(super) name: String,
    pub(super) access: Access,
    pub(super) state: State,
    /// The server's id of the device, valid while it is open.
    pub(super) wire_id: u32,
    pub(super) limits: Option<Limits>,
    /// The device once had no write cache: whoever began to use it then may never flush, so its
    /// writes are made durable one by one.
    pub(super) write_through: bool,
    /// The token of the OPEN in flight.
    pub(super) opening: Option<Token>,
    /// That OPEN is a quiesced one: no IO is sent until it is answered.
    pub(super) opening_quiesced: bool,
    /// A caller of `Core::remap` waits for the result of that OPEN.
    pub(super) remapping: bool,
    /// A CLOSE was sent, or none is needed.
    pub(super) close_sent: bool,
    /// A CLOSE is in flight.
    pub(super) closing: bool,
    /// What happens to requests while the session is lost.
    pub(super) outage: Outage,
    pub(super) reopen_at: Option<Instant>,
    pub(super) offline_since: Option<Instant>,
    /// The server offers another device under this name now: requests fail until it is remapped.
    pub(super) replaced: bool,
    pub(super) waiting: VecDeque<Fragment>,
    pub(super) in_flight: u32,
    pub(super) stats: DiskStats,
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
    pub(super) fn new(name: &str, access: Access, generation: u32, outage: Outage) -> Self {
        Self {
            generation,
            name: name.to_owned(),
            access,
            state: State::Init,
            wire_id: 0,
            limits: None,
            write_through: false,
            opening: None,
            opening_quiesced: false,
            remapping: false,
            close_sent: false,
            closing: false,
            outage,
            reopen_at: None,
            offline_since: None,
            replaced: false,
            waiting: VecDeque::new(),
            in_flight: 0,
            stats: DiskStats::default(),
        }
    }

    /// Checks a request. Returns true if it has to be sent, false if it succeeds without being
    /// sent.
    pub(super) fn validate<D>(
        &self,
        now: Instant,
        request: &DiskRequest<D>,
    ) -> Result<bool, Errno> {
        let limits = self.limits.as_ref().ok_or(Errno::EIO)?;
        let admitted = match (self.state, self.outage) {
            (State::Open, _) => true,
            (State::Closed, Outage::Queue(limit)) => {
                let since = self.offline_since.unwrap_or(now);
                !self.replaced && now.saturating_since(since) < limit
            }
            _ => false,
        };
        if !admitted {
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
            id: DevId { index, generation: self.generation },
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
