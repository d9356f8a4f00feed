//! The verbs, with the meaning they have in [`bowline_verbs::Device`]. None of them waits.

use std::sync::Arc;

use bowline_base::Instant;
use bowline_verbs::{
    Access, Buffer, Completion, CqId, Error, Feature, InvalidReason, MrKeys, MwBind, MwType,
    Object, PdId, QpAttr, QpCap, QpInit, QpState, Qpn, RecvWr, RequestPart, Resource, SendFlags,
    SendOp, SendWr, SrqAttr, SrqChange, SrqId, SrqInit,
};

use super::Device;
use super::shared::Shared;
use crate::congestion::PathId;
use crate::delayed_ack::DelayedAck;
use crate::gso_loss::GsoLossDetector;
use crate::qp::{Halves, Qp};

const NO_PD: Error = Error::NoSuch(Object::ProtectionDomain);
const NO_QP: Error = Error::NoSuch(Object::QueuePair);

/// Most recently removed queue pairs whose numbers are not reused.
const RETIRED_MAX: usize = 4096;

/// Checks that a queue pair is in a state in which send requests are posted [QP-2].
fn check_sends(qp: &Qp) -> Result<(), Error> {
    match qp.state {
        state if state < QpState::Rts => Err(Error::Invalid(InvalidReason::StateToSend(state))),
        _ => Ok(()),
    }
}

impl Shared {
    /// Has requests that were posted sent, or flushed.
    fn posted(&mut self, now: Instant, qp: &mut Qp, wrs: &[SendWr<'_>]) {
        for wr in wrs {
            if let SendOp::BindMw { key, .. } = wr.op {
                self.mrs.note_window_key(key);
            }
        }
        match qp.state {
            QpState::Err => self.flush(now, qp),
            QpState::Sqe => self.flush_sends(now, qp),
            _ => self.settle(now, qp, true),
        }
    }
}

impl Device {
    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub fn alloc_pd(&mut self) -> Result<PdId, Error> {
        if self.pds.len() >= self.shared.config.limits.pds.min(1 << 19) {
            return Err(Error::Limit(Resource::ProtectionDomains));
        }
        Ok(PdId(self.pds.insert(0)))
    }

    /// Removes a protection domain.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a region, queue pair or domain is left in it.
    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), Error> {
        if *self.pds.get(pd.0).ok_or(NO_PD)? > 0 || self.shared.mrs.uses_pd(pd) {
            return Err(Error::Busy(Object::ProtectionDomain));
        }
        self.pds.remove(pd.0);
        let outer = self.shared.mrs.outer_pds.remove(&pd.0);
        if let Some(users) = outer.and_then(|outer| self.pds.get_mut(outer.0)) {
            *users -= 1;
        }
        Ok(())
    }

    /// Makes a protection domain within another, whose regions are for this one's queue pairs too.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`].
    pub fn alloc_inner_pd(&mut self, outer: PdId) -> Result<PdId, Error> {
        self.pds.get(outer.0).ok_or(NO_PD)?;
        let pd = self.alloc_pd()?;
        if let Some(users) = self.pds.get_mut(outer.0) {
            *users += 1;
        }
        self.shared.mrs.outer_pds.insert(pd.0, outer);
        Ok(pd)
    }

    /// Registers `len` bytes of a buffer from `offset` on.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    pub fn reg_mr(
        &mut self,
        pd: PdId,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error> {
        self.pds.get(pd.0).ok_or(NO_PD)?;
        if access.contains(Access::FLUSH_PERSISTENT) {
            return Err(Error::NotSupported(Feature::PersistentMemory));
        }
        let mrs = &mut self.shared.mrs;
        mrs.register(&mut self.rng, pd, (buffer, offset, len), iova, access)
    }

    /// Gives a region of [`reg_mr`](Self::reg_mr) another protection domain, memory (a buffer,
    /// and offset and length in it) and rights. It keeps its keys.
    ///
    /// # Errors
    /// Those of [`reg_mr`](Self::reg_mr); [`Error::Busy`] while a window is bound to it. Nothing
    /// has changed then.
    pub fn rereg_mr(
        &mut self,
        lkey: u32,
        pd: PdId,
        memory: (&Arc<Buffer>, usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<(), Error> {
        self.pds.get(pd.0).ok_or(NO_PD)?;
        if access.contains(Access::FLUSH_PERSISTENT) {
            return Err(Error::NotSupported(Feature::PersistentMemory));
        }
        self.shared.mrs.reregister(lkey, pd, memory, iova, access)
    }

    /// Creates a region for fast registration [MR-6], free at first: memory is bound to it and
    /// unbound again in the order of a send queue [MR-12].
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`].
    pub fn alloc_mr(&mut self, pd: PdId) -> Result<MrKeys, Error> {
        self.pds.get(pd.0).ok_or(NO_PD)?;
        self.shared.mrs.allocate(&mut self.rng, pd)
    }

    /// Removes a region by its present key, or the one it was registered or made with.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a window is bound to it.
    pub fn dereg_mr(&mut self, lkey: u32) -> Result<(), Error> {
        self.shared.mrs.deregister(lkey).map(drop)
    }

    /// Withdraws keys of regions of [`reg_mr`](Self::reg_mr) from peers; local use continues.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`]; [`Error::Busy`] while a window is bound to one.
    /// Nothing has changed then.
    pub fn withdraw_keys(&mut self, rkeys: &[u32]) -> Result<(), Error> {
        self.shared.mrs.withdraw_keys(rkeys)
    }

    /// Renews withdrawn keys, so that peers have access again: pairs of the present and the new
    /// key.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`]; nothing has changed then.
    pub fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.shared.mrs.renew_keys(keys)
    }

    /// Makes a memory window, bound to nothing [MR-9].
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`].
    pub fn alloc_mw(&mut self, pd: PdId, kind: MwType) -> Result<u32, Error> {
        self.pds.get(pd.0).ok_or(NO_PD)?;
        self.shared.mrs.allocate_window(&mut self.rng, pd, kind)
    }

    /// Posts the binding of a window of type 1; returns its new key.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send); [`Error::Invalid`] for a window of type 2.
    pub fn bind_mw(
        &mut self,
        now: Instant,
        qp: Qpn,
        window: u32,
        id: u64,
        to: &MwBind,
        flags: SendFlags,
    ) -> Result<u32, Error> {
        let (kind, pd, key) = self.shared.mrs.window(window)?;
        if kind != MwType::Type1 {
            return Err(Error::Invalid(InvalidReason::WindowType(MwType::Type2)));
        }
        if self.qps.get(&qp.0).ok_or(NO_QP)?.init.pd != pd {
            return Err(Error::Invalid(InvalidReason::WindowPd));
        }
        let op = SendOp::BindMw { key, to: *to };
        let wr = SendWr { id, op, sges: &[], inline: &[], flags };
        self.post(now, qp, std::slice::from_ref(&wr)).map_err(|(_, error)| error)?;
        Ok(key)
    }

    /// Removes a window, bound or not.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn dealloc_mw(&mut self, window: u32) -> Result<(), Error> {
        self.shared.mrs.deallocate_window(window)
    }

    /// Makes a completion queue.
    ///
    /// # Errors
    /// [`Error::Limit`], [`Error::Invalid`].
    pub fn create_cq(&mut self, depth: usize) -> Result<CqId, Error> {
        self.shared.cqs.create(depth)
    }

    /// Gives a completion queue room for this many entries.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`]; [`Error::Invalid`] if it has more entries.
    pub fn resize_cq(&mut self, cq: CqId, depth: usize) -> Result<(), Error> {
        self.shared.cqs.resize(cq, depth)
    }

    /// Removes the completions of a queue pair that nobody has polled.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn forget_completions(&mut self, qp: Qpn) -> Result<(), Error> {
        let init = &self.qps.get(&qp.0).ok_or(NO_QP)?.init;
        self.shared.cqs.forget(init.send_cq, qp);
        self.shared.cqs.forget(init.recv_cq, qp);
        Ok(())
    }

    /// Removes a completion queue.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a queue pair uses it.
    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), Error> {
        self.shared.cqs.destroy(cq)
    }

    /// Appends up to `max` completions to `out`; returns how many.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn poll_cq(
        &mut self,
        cq: CqId,
        out: &mut Vec<Completion>,
        max: usize,
    ) -> Result<usize, Error> {
        self.shared.cqs.poll(cq, out, max)
    }

    /// Requests one [`Event::CqReady`](crate::Event::CqReady) for the next completion (with
    /// `solicited`, for the next one that was sent solicited or is an error). Returns `false`,
    /// without requesting anything, if there is such a completion already.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] when the queue is empty and has overrun, so that no
    /// completion will ever come.
    pub fn arm_cq(&mut self, cq: CqId, solicited: bool) -> Result<bool, Error> {
        self.shared.cqs.arm(cq, solicited)
    }

    /// Requests one [`Event::CqReady`](crate::Event::CqReady) for the next completion that is added
    /// (with `solicited`, the next solicited one or error), whatever the queue has already.
    ///
    /// # Errors
    /// As [`arm_cq`](Self::arm_cq).
    pub fn notify_cq(&mut self, cq: CqId, solicited: bool) -> Result<(), Error> {
        self.shared.cqs.arm_next(cq, solicited)
    }

    /// Makes a queue pair, in RESET.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    pub fn create_qp(&mut self, init: &QpInit) -> Result<Qpn, Error> {
        let limits = self.shared.config.limits;
        // At most one in eight numbers is taken.
        let numbers = if self.shared.config.part.is_some() { 1 << 13 } else { 1 << 20 };
        if self.qps.len() >= limits.qps.min(numbers) {
            return Err(Error::Limit(Resource::QueuePairs));
        }
        let QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline } = init.cap;
        // Of a queue pair with a shared receive queue they do not count.
        let (max_recv_wr, max_recv_sge) = match init.srq {
            Some(_) => (0, 0),
            None => (max_recv_wr, max_recv_sge),
        };
        if max_send_wr > limits.wrs || max_recv_wr > limits.wrs {
            return Err(Error::Limit(Resource::WorkRequests));
        }
        if max_send_sge > limits.sges || max_recv_sge > limits.sges {
            return Err(Error::Limit(Resource::Sges));
        }
        if max_inline > limits.inline {
            return Err(Error::Limit(Resource::InlineBytes));
        }
        let users = self.pds.get_mut(init.pd.0).ok_or(NO_PD)?;
        let cqs = &mut self.shared.cqs;
        cqs.hold(init.send_cq)?;
        if let Err(error) = cqs.hold(init.recv_cq) {
            cqs.release(init.send_cq);
            return Err(error);
        }
        if let Some(Err(error)) = init.srq.map(|srq| self.shared.srqs.hold(srq)) {
            cqs.release(init.send_cq);
            cqs.release(init.recv_cq);
            return Err(error);
        }
        *users += 1;
        // Unpredictable, like keys [CM-53].
        let qpn = loop {
            let drawn = self.rng.next_u24();
            let qpn = match self.shared.config.part {
                None => Qpn(drawn),
                Some(part) => Qpn(u32::from(part) << 16 | drawn & 0xffff),
            };
            if self.is_free(qpn) {
                break qpn;
            }
        };
        let qp = Qp {
            qpn,
            init: *init,
            state: QpState::Reset,
            attr: QpAttr::default(),
            halves: Halves::new(init, self.shared.config.mtu.bytes()),
            answer_gso_loss: GsoLossDetector::for_answers(),
            in_urgent: false,
            ack_defers: 0,
            in_normal: false,
            in_line: false,
            path: PathId::default(),
            requests_next: false,
            replies_next: false,
            delayed_ack: DelayedAck::default(),
            timer_at: None,
            heard: false,
            draining: None,
        };
        self.qps.insert(qpn.0, Box::new(qp));
        Ok(qpn)
    }

    /// Changes a queue pair [QP-1].
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Invalid`] naming the attribute that is missing or not allowed;
    /// [`Error::AddrNotAvailable`].
    pub fn modify_qp(&mut self, now: Instant, qp: Qpn, attr: &QpAttr) -> Result<(), Error> {
        let qp = self.qps.get_mut(&qp.0).ok_or(NO_QP)?;
        let shared = &mut self.shared;
        let to = qp.check(attr, &shared.config)?;
        if to == QpState::Err {
            shared.enter_error(now, qp);
        } else {
            shared.choose_path(now, qp, attr, to);
            qp.apply(attr, to, &shared.config);
            shared.settle(now, qp, true);
        }
        if to == QpState::Reset {
            shared.mrs.unbind_windows_of(qp.qpn);
        }
        if to < QpState::Rtr && self.carry_qpn == Some(qp.qpn) {
            // The carried packet belongs to the connection before the reset.
            self.carry_qpn = None;
        }
        self.stop_overrun(now);
        Ok(())
    }

    /// Returns the state and attributes of a queue pair.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error> {
        let qp = self.qps.get(&qp.0).ok_or(NO_QP)?;
        let sq_draining = (qp.state == QpState::Sqd).then_some(qp.draining.is_some());
        Ok((qp.state, QpAttr { state: Some(qp.state), sq_draining, ..qp.attr }))
    }

    /// Lets a queue pair report gaps to its peer, and take the peer's reports: the peer must do so
    /// as well [CC-10]. The connection manager does this where both sides have told each other that
    /// they can; for connections that are made without it.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn report_gaps(&mut self, qp: Qpn) -> Result<(), Error> {
        let qp = self.qps.get_mut(&qp.0).ok_or(NO_QP)?;
        if let Halves::Rc { requester, responder } = &mut qp.halves {
            requester.take_gap_reports();
            responder.report_gaps();
        }
        Ok(())
    }

    /// Returns how many send requests of a queue pair are not complete.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn sends_pending(&self, qp: Qpn) -> Result<usize, Error> {
        Ok(self.qps.get(&qp.0).ok_or(NO_QP)?.sends())
    }

    /// Removes a queue pair; what is posted on it never completes.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a connection holds it.
    pub fn destroy_qp(&mut self, qp: Qpn) -> Result<(), Error> {
        if !self.qps.contains_key(&qp.0) {
            return Err(NO_QP);
        }
        if self.cm_holds(qp) {
            return Err(Error::Busy(Object::QueuePair));
        }
        self.groups.forget(qp);
        if let Some(gone) = self.qps.remove(&qp.0) {
            let now = self.shared.paths.get(gone.path).used_at();
            self.shared.paths.leave(now, gone.path, qp, gone.in_flight());
            self.shared.ready_paths.push(gone.path);
            self.shared.cqs.release(gone.init.send_cq);
            self.shared.cqs.release(gone.init.recv_cq);
            if let Some(srq) = gone.init.srq {
                self.shared.srqs.release(srq);
            }
            self.shared.mrs.unbind_windows_of(qp);
            if let Some(users) = self.pds.get_mut(gone.init.pd.0) {
                *users -= 1;
            }
        }
        if self.retired.len() >= RETIRED_MAX {
            self.retired.pop_front();
        }
        self.retired.push_back(qp.0);
        Ok(())
    }

    /// Posts send requests in order [REQ-19]; on an error tells how many were accepted.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::QueueFull`].
    pub fn post_send(
        &mut self,
        now: Instant,
        qp: Qpn,
        wrs: &[SendWr<'_>],
    ) -> Result<(), (usize, Error)> {
        let is_bad = |wr: &SendWr<'_>| match wr.op {
            SendOp::BindMw { key, .. } => self.check_bind(key).err(),
            _ => None,
        };
        let bad = wrs.iter().enumerate().find_map(|(n, wr)| Some((n, is_bad(wr)?)));
        match bad {
            None => self.post(now, qp, wrs),
            Some((n, error)) => {
                self.post(now, qp, &wrs[..n])?;
                Err((n, error))
            }
        }
    }

    /// Checks that a send request binds no window of type 1. Whether the window exists is checked
    /// when the request is executed.
    fn check_bind(&self, key: u32) -> Result<(), Error> {
        match self.shared.mrs.window(key) {
            Ok((MwType::Type1, ..)) => {
                Err(Error::Invalid(InvalidReason::WindowType(MwType::Type1)))
            }
            _ => Ok(()),
        }
    }

    /// Posts send requests as [`post_send`](Self::post_send), but none of them if one is refused.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_all_or_none(
        &mut self,
        now: Instant,
        qp: Qpn,
        wrs: &[SendWr<'_>],
    ) -> Result<(), Error> {
        for wr in wrs {
            if let SendOp::BindMw { key, .. } = wr.op {
                self.check_bind(key)?;
            }
        }
        let qp = self.qps.get_mut(&qp.0).ok_or(NO_QP)?;
        check_sends(qp)?;
        let former = qp.sends();
        if let Some(error) = wrs.iter().find_map(|wr| qp.halves.post(wr).err()) {
            qp.halves.take_back(former);
            return Err(error);
        }
        self.shared.posted(now, qp, wrs);
        self.stop_overrun(now);
        Ok(())
    }

    fn post(&mut self, now: Instant, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        let qp = self.qps.get_mut(&qp.0).ok_or((0, NO_QP))?;
        check_sends(qp).map_err(|error| (0, error))?;
        let post = |(count, wr)| Some((count, qp.halves.post(wr).err()?));
        let bad = wrs.iter().enumerate().find_map(post);
        let count = bad.as_ref().map_or(wrs.len(), |(count, _)| *count);
        self.shared.posted(now, qp, &wrs[..count]);
        self.stop_overrun(now);
        bad.map_or(Ok(()), Err)
    }

    /// Posts receive requests in order [REQ-19]; on an error tells how many were accepted.
    ///
    /// # Errors
    /// As [`post_send`](Self::post_send).
    pub fn post_recv(
        &mut self,
        now: Instant,
        qp: Qpn,
        wrs: &[RecvWr<'_>],
    ) -> Result<(), (usize, Error)> {
        let qp = self.qps.get_mut(&qp.0).ok_or((0, NO_QP))?;
        if qp.state < QpState::Init {
            return Err((0, Error::Invalid(InvalidReason::StateToReceive(qp.state))));
        }
        if qp.init.srq.is_some() {
            return Err((0, Error::Invalid(InvalidReason::SharedReceives))); // [SRQ-2]
        }
        let cap = qp.init.cap;
        let mut result = Ok(());
        for (count, wr) in wrs.iter().enumerate() {
            let fits =
                RequestPart::ScatterList.check(wr.sges.len() as u64, cap.max_recv_sge as u64);
            let posted = fits.and_then(|()| match &mut qp.halves {
                Halves::Rc { responder, .. } => responder.post_recv(wr, cap.max_recv_wr),
                Halves::Uc { receiver, .. } => receiver.post_recv(wr, cap.max_recv_wr),
                Halves::Ud { receiver, .. } => receiver.post_recv(wr, cap.max_recv_wr),
            });
            if let Err(error) = posted {
                result = Err((count, error));
                break;
            }
        }
        if qp.state == QpState::Err {
            self.shared.flush(now, qp);
        }
        self.stop_overrun(now);
        result
    }

    /// Makes a shared receive queue.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    pub fn create_srq(&mut self, init: &SrqInit) -> Result<SrqId, Error> {
        let users = self.pds.get_mut(init.pd.0).ok_or(NO_PD)?;
        let srq = self.shared.srqs.create(init)?;
        *users += 1;
        Ok(srq)
    }

    /// Changes the size of a shared receive queue, or arms its limit, which may be reached at once
    /// [SRQ-4].
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    pub fn modify_srq(&mut self, srq: SrqId, change: &SrqChange) -> Result<(), Error> {
        self.shared.srqs.modify(srq, change)?;
        self.shared.report_srq_limit(srq);
        Ok(())
    }

    /// Returns the attributes of a shared receive queue.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, Error> {
        self.shared.srqs.query(srq)
    }

    /// Removes a shared receive queue; what is posted on it never completes.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Busy`] while a queue pair uses it.
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), Error> {
        let pd = self.shared.srqs.destroy(srq)?;
        if let Some(users) = self.pds.get_mut(pd.0) {
            *users -= 1;
        }
        Ok(())
    }

    /// Posts receive requests to a shared receive queue, in order; on an error tells how many were
    /// accepted.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::QueueFull`].
    pub fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        let post = |(count, wr)| self.shared.srqs.post(srq, wr).map_err(|error| (count, error));
        wrs.iter().enumerate().try_for_each(post)
    }
}
