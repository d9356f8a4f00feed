//! Opening devices: the first OPEN of a device, those after a loss, and what their answers change.

use bowline_base::Instant;
use bowline_wire::rnbd::{self as wire, Access, OPEN_RSP_LEN, OpenRsp};

use super::device::{Closed, Open, OpenInFlight, OpenKind, Phase, Reopen, ReopenFor, Unmapping};
use super::{Core, DevId, Event, Outage, Service, Token};
use crate::limits::of_open_rsp;
use crate::{Errno, Limits};

impl<D> Core<D> {
    /// Sends an OPEN. `None` for a name that does not fit, which `Core::map` refuses.
    pub(super) fn send_open(&mut self, dev: DevId, name: &str, access: Access) -> Option<Token> {
        let usr = wire::emit_open(access, name.as_bytes())?;
        Some(self.send_service(Service::Open(dev), usr.to_vec(), OPEN_RSP_LEN as u32))
    }

    /// Sends an OPEN for a device if it is closed. Whoever waits for a remap of it goes on waiting.
    pub(super) fn send_reopen(&mut self, dev: DevId, kind: OpenKind) {
        let Some(device) = self.device(dev) else { return };
        let Some(closed) = device.as_closed() else { return };
        let waiting = if closed.reopen.is_remap() { ReopenFor::Remap } else { ReopenFor::Requests };
        let (name, access) = (device.name.clone(), device.access);
        let Some(token) = self.send_open(dev, &name, access) else { return };
        if let Some(closed) = self.closed_mut(dev) {
            closed.reopen = Reopen::Sent(OpenInFlight { token, kind }, waiting);
        }
    }

    /// Begins to open a closed device again. [`Event::Remapped`] follows, with `EBUSY` when IO in
    /// flight did not end in time.
    ///
    /// # Errors
    /// `EALREADY` when it is open, `ENODEV` when it is being unmapped or does not exist, `EBUSY`
    /// during another remap or OPEN [NB-37] and while IO that did not end in time is still in
    /// flight, `ECONNABORTED` while the session is lost.
    pub fn remap(&mut self, now: Instant, dev: DevId) -> Result<(), Errno> {
        match self.device(dev).ok_or(Errno::ENODEV)?.phase {
            Phase::Open(_) => return Err(Errno::EALREADY),
            Phase::Unmapping { .. } => return Err(Errno::ENODEV),
            Phase::Opening(_) => return Err(Errno::EBUSY),
            Phase::Closed(Closed {
                reopen: Reopen::Sent(..) | Reopen::Queued(ReopenFor::Remap),
                ..
            }) => return Err(Errno::EBUSY),
            Phase::Closed(_) if !self.up => return Err(Errno::ECONNABORTED),
            Phase::Closed(_) if self.blocked() => return Err(Errno::EBUSY),
            Phase::Closed(_) => {}
        }
        self.open_quiesced(now, dev, ReopenFor::Remap);
        Ok(())
    }

    /// Ends what is under way to open a closed device again. Whoever waits for a remap of it gets
    /// `errno`.
    pub(super) fn cancel_reopen(&mut self, dev: DevId, errno: Errno) {
        let Some(closed) = self.closed_mut(dev) else { return };
        if std::mem::replace(&mut closed.reopen, Reopen::Idle).is_remap() {
            self.events.push_back(Event::Remapped { dev, result: Err(errno) });
        }
    }

    pub(super) fn open_answer(
        &mut self,
        now: Instant,
        token: Token,
        dev: DevId,
        rsp: Result<OpenRsp, Errno>,
    ) {
        match self.device(dev).map(|device| device.phase) {
            Some(Phase::Opening(of)) if of == token => self.first_open_answer(now, dev, rsp),
            Some(Phase::Closed(Closed { reopen: Reopen::Sent(open, waiting), limits, .. }))
                if open.token == token =>
            {
                self.reopen_answer(now, dev, (waiting, limits), rsp);
            }
            Some(Phase::Unmapping { step: Unmapping::AwaitsOpen(open), .. })
                if open.token == token =>
            {
                self.unmapped_open_answer(dev, rsp);
            }
            // An answer to an OPEN of an earlier session: the server has closed that device with
            // its session.
            _ => return,
        }
        self.advance_quiesced_opens(now);
    }

    fn first_open_answer(&mut self, now: Instant, dev: DevId, rsp: Result<OpenRsp, Errno>) {
        let result = rsp.and_then(|rsp| {
            let limits = self.limits_of_answer(dev, &rsp)?;
            self.mark_open(now, dev, Open { wire_id: rsp.device_id, limits });
            Ok(())
        });
        if result.is_err() {
            self.devices[dev.index as usize] = None;
        }
        self.events.push_back(Event::Mapped { dev, result });
    }

    fn reopen_answer(
        &mut self,
        now: Instant,
        dev: DevId,
        (waiting, before): (ReopenFor, Limits),
        rsp: Result<OpenRsp, Errno>,
    ) {
        if let Some(closed) = self.closed_mut(dev) {
            closed.reopen = Reopen::Idle;
        }
        let result = rsp.and_then(|rsp| {
            let limits = self.limits_of_answer(dev, &rsp)?;
            if limits.logical != before.logical {
                self.close_unusable(rsp.device_id);
                self.mark_replaced(dev);
                return Err(Errno::EINVAL);
            }
            if limits.bytes != before.bytes {
                self.events.push_back(Event::Resized { dev, bytes: limits.bytes });
            }
            self.events.push_back(Event::Online { dev });
            self.mark_open(now, dev, Open { wire_id: rsp.device_id, limits });
            Ok(())
        });
        if waiting == ReopenFor::Remap {
            self.events.push_back(Event::Remapped { dev, result });
        }
        self.schedule_reopen(now, dev);
    }

    /// Handles the answer to an OPEN whose device was unmapped meanwhile [NB-32].
    fn unmapped_open_answer(&mut self, dev: DevId, rsp: Result<OpenRsp, Errno>) {
        match rsp {
            Ok(rsp) => {
                let usr = wire::emit_close(rsp.device_id).to_vec();
                self.send_service(Service::Close(Some(dev)), usr, 0);
                self.set_unmapping(dev, Unmapping::Closing);
            }
            Err(_) => self.set_unmapping(dev, Unmapping::Ending),
        }
        self.advance_unmap(dev);
    }

    /// Reads the limits of a device from the answer to an OPEN. When no disk can have them, the
    /// server is asked to close the device again [NB-30].
    fn limits_of_answer(&mut self, dev: DevId, rsp: &OpenRsp) -> Result<Limits, Errno> {
        let read_only = self.device(dev).is_some_and(|device| device.access == Access::Ro);
        match of_open_rsp(rsp, self.session, read_only) {
            Ok(mut limits) => {
                if !self.config.write_zeroes {
                    limits.max_write_zeroes = 0;
                }
                Ok(limits)
            }
            Err(errno) => {
                self.close_unusable(rsp.device_id);
                Err(errno)
            }
        }
    }

    /// Asks the server to close a device that it has just opened and that cannot be used.
    fn close_unusable(&mut self, wire_id: u32) {
        self.send_service(Service::Close(None), wire::emit_close(wire_id).to_vec(), 0);
    }

    fn mark_open(&mut self, now: Instant, dev: DevId, open: Open) {
        if let Some(device) = self.device_mut(dev) {
            device.write_through |= !open.limits.write_cache;
            device.phase = Phase::Open(open);
        }
        self.close_others_of(now, dev, open.wire_id);
    }

    /// Marks other devices with the id of `dev` closed. A server that gives one id to two devices
    /// has lost its table, and the earlier device with it.
    fn close_others_of(&mut self, now: Instant, dev: DevId, id: u32) {
        for other in self.device_ids() {
            let phase = self.device(other).map(|device| device.phase);
            let same = matches!(phase, Some(Phase::Open(Open { wire_id, .. })) if wire_id == id);
            if other != dev && same {
                self.mark_closed(now, other);
                self.schedule_reopen(now, other);
            }
        }
    }

    /// Schedules another OPEN of a closed device, if its requests may wait for it.
    pub(super) fn schedule_reopen(&mut self, now: Instant, dev: DevId) {
        let (up, delay) = (self.up, self.config.reopen_delay);
        let Some(device) = self.device_mut(dev).filter(|_| up) else { return };
        let waits = device.outage != Outage::FailFast;
        if let Some(closed) = device.as_closed_mut()
            && waits
            && !closed.replaced
            && matches!(closed.reopen, Reopen::Idle | Reopen::At(_))
        {
            closed.reopen = Reopen::At(now + delay);
        }
    }

    fn mark_replaced(&mut self, dev: DevId) {
        if let Some(closed) = self.closed_mut(dev) {
            closed.replaced = true;
        }
        self.events.push_back(Event::Gone { dev });
        self.fail_waiting(dev, Errno::EIO);
    }
}
