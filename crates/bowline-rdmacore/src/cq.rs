//! Completion queues.
//!
//! Each consists of two queues of the device, one for sends and one for receives, on one completion
//! channel. Otherwise a program could not tell failed sends from failed receives, since only id,
//! status and queue pair of a failed completion are valid. The order within each queue of a queue
//! pair is kept, which is all that verbs promise.

use core::ffi::c_int;
use core::ptr::NonNull;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bowline_verbs::{Completion, CqId, Error, Qpn, Resource, Status, WcOpcode};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::time::Timespec;

use crate::context::Context;
use crate::error::{freed, last_errno, limit, system};
use crate::ffi::{CompChannel, IbvCq, WC_GRH, WC_WITH_IMM, WC_WITH_INV, Wc};

/// Completions taken from the device at once.
const BATCH: usize = 32;

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) id: CqId,
    context: Arc<Context>,
    channel: NonNull<CompChannel>,
    sends: NonNull<IbvCq>,
    receives: NonNull<IbvCq>,
    state: Mutex<State>,
    changed: Condvar,
}

// SAFETY: libibverbs allows every call on it from any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

#[derive(Debug, Default)]
struct State {
    /// Completions that a waiting thread took from the device, and the program has not taken yet.
    taken: VecDeque<Completion>,
    /// The device will notify of the next completion; true: only of a solicited one.
    armed: Option<bool>,
    /// A thread sleeps on the channel.
    led: bool,
    /// The next poll takes receives first.
    receives_first: bool,
}

impl Cq {
    pub(crate) fn new(context: &Arc<Context>, id: CqId, depth: usize) -> Result<Self, Error> {
        let verbs = &context.libs.verbs;
        let depth = c_int::try_from(depth.max(1)).unwrap_or(c_int::MAX);
        // SAFETY: the context is open.
        let channel = unsafe { (verbs.create_comp_channel)(context.raw()) };
        let channel =
            NonNull::new(channel).ok_or_else(|| limit(Resource::CompletionQueues, last_errno()))?;
        let create = || {
            let none = core::ptr::null_mut();
            // SAFETY: the context is open and the channel is of it.
            let cq = unsafe { (verbs.create_cq)(context.raw(), depth, none, channel.as_ptr(), 0) };
            NonNull::new(cq).ok_or_else(|| match last_errno() {
                libc::EINVAL => Error::Limit(Resource::CqEntries),
                errno => limit(Resource::CompletionQueues, errno),
            })
        };
        let sends = create().inspect_err(|_| {
            // SAFETY: nothing uses the channel.
            unsafe { (verbs.destroy_comp_channel)(channel.as_ptr()) };
        })?;
        let receives = create().inspect_err(|_| {
            // SAFETY: nothing uses the queue.
            unsafe { (verbs.destroy_cq)(sends.as_ptr()) };
            // SAFETY: nothing uses the channel.
            unsafe { (verbs.destroy_comp_channel)(channel.as_ptr()) };
        })?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        let cq =
            Self { id, context: Arc::clone(context), channel, sends, receives, state, changed };
        let flags =
            fcntl_getfl(cq.fd()).map_err(|e| system("a completion channel", e.raw_os_error()))?;
        fcntl_setfl(cq.fd(), flags | OFlags::NONBLOCK)
            .map_err(|e| system("a completion channel", e.raw_os_error()))?;
        Ok(cq)
    }

    /// Returns the device's queue for sends.
    pub(crate) fn sends(&self) -> *mut IbvCq {
        self.sends.as_ptr()
    }

    /// Returns the device's queue for receives.
    pub(crate) fn receives(&self) -> *mut IbvCq {
        self.receives.as_ptr()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives as long as `self`; the field does not change.
        let fd = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends up to `max` completions to `out`.
    pub(crate) fn poll(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        let mut st = self.lock();
        let mut count = st.taken.len().min(max);
        out.extend(st.taken.drain(..count));
        if count < max {
            count += self.take(&mut st, max - count, out)?;
        }
        Ok(count)
    }

    /// Takes up to `max` completions from the device, when `st.taken` is empty. Further ones that
    /// came with them stay in `st.taken`.
    fn take(&self, st: &mut State, max: usize, out: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = out.len();
        // Neither starves the other.
        st.receives_first = !st.receives_first;
        for receives in [st.receives_first, !st.receives_first] {
            loop {
                let room = max - (out.len() - before);
                let start = out.len();
                let got = self.poll_one(receives, room, out)?;
                let mut new = out.iter().skip(start);
                if let Some(at) = new.position(|done| done.status == Status::WrFlushErr) {
                    // The error that led to it may be in the other queue, and comes first [QP-4].
                    let flushed = out.split_off(start + at);
                    let mut others = Vec::new();
                    while self.poll_one(!receives, BATCH, &mut others)? > 0 {}
                    st.taken = causes_first(flushed, others);
                    let more = st.taken.len().min(max - (out.len() - before));
                    out.extend(st.taken.drain(..more));
                    return Ok(out.len() - before);
                }
                if got < BATCH.min(room) || got == room {
                    break;
                }
            }
            if out.len() - before == max {
                break;
            }
        }
        Ok(out.len() - before)
    }

    /// Appends up to `room` completions of one of the two queues, at most a batch.
    fn poll_one(
        &self,
        receives: bool,
        room: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, Error> {
        let cq = if receives { self.receives() } else { self.sends() };
        let mut batch = [Wc::default(); BATCH];
        let room = c_int::try_from(room.min(BATCH)).unwrap_or(1);
        // SAFETY: the context is open.
        let poll_cq = unsafe { &*self.context.raw() }.ops.poll_cq;
        // SAFETY: the queue lives as long as `self`; there is room for `room` entries.
        let got = unsafe { poll_cq(cq, room, batch.as_mut_ptr()) };
        let got =
            usize::try_from(got).map_err(|_| system("polling a completion queue", libc::EIO))?;
        out.extend(batch.iter().take(got).map(|wc| completion(wc, receives)));
        Ok(got)
    }

    /// Requests a notification of the next completion.
    fn arm(&self, solicited: bool) -> Result<(), Error> {
        // SAFETY: the context is open.
        let arm = unsafe { &*self.context.raw() }.ops.req_notify_cq;
        // A completed send is never solicited; an error is reported by its own completion.
        for cq in [self.sends(), self.receives()] {
            // SAFETY: the queue lives as long as `self`.
            let result = unsafe { arm(cq, solicited.into()) };
            if result != 0 {
                return Err(system("arming a completion queue", result.saturating_abs()));
            }
        }
        Ok(())
    }

    /// Takes the notifications from the channel; an error means that the device is gone.
    fn drain(&self) -> Result<(), Error> {
        let verbs = &self.context.libs.verbs;
        loop {
            let (mut cq, mut of) = (core::ptr::null_mut(), core::ptr::null_mut());
            // SAFETY: the channel lives as long as `self`, and does not block.
            let result =
                unsafe { (verbs.get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut of) };
            if result != 0 {
                return match last_errno() {
                    libc::EAGAIN | libc::EINTR => Ok(()),
                    _ => Err(Error::Closed),
                };
            }
            // SAFETY: the queue that the event names is one of the two.
            unsafe { (verbs.ack_cq_events)(cq, 1) };
        }
    }

    /// Waits until there is a completion, at most `limit`; tells whether there is.
    ///
    /// One thread sleeps on the channel, and ends too when its `other` can be read; others that
    /// wait for the same queue sleep until that one has a completion, but for those with an `other`
    /// (`None`), which they would not notice.
    pub(crate) fn wait(
        &self,
        solicited: bool,
        other: Option<BorrowedFd<'_>>,
        limit: Option<Duration>,
    ) -> Result<Option<bool>, Error> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut leading = false;
        let mut st = self.lock();
        let outcome = loop {
            if st.taken.is_empty() {
                let mut found = Vec::new();
                if let Err(error) = self.take(&mut st, BATCH, &mut found) {
                    break Err(error);
                }
                found.into_iter().rev().for_each(|done| st.taken.push_front(done));
            }
            if !st.taken.is_empty() {
                break Ok(Some(true));
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break Ok(Some(false));
            }
            // What came before the arming must be looked for again.
            if st.armed.is_none() || (st.armed == Some(true) && !solicited) {
                match self.arm(solicited) {
                    Ok(()) => st.armed = Some(solicited),
                    Err(error) => break Err(error),
                }
                continue;
            }
            if st.led && !leading {
                if other.is_some() {
                    break Ok(None);
                }
                st = match left {
                    None => self.changed.wait(st).unwrap_or_else(PoisonError::into_inner),
                    Some(left) => {
                        let woken = self.changed.wait_timeout(st, left);
                        woken.unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                continue;
            }
            st.led = true;
            leading = true;
            drop(st);
            let watched = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
            let mut fds = [watched(self.fd()), watched(other.unwrap_or(self.fd()))];
            let timeout = left.map(timespec);
            // An interrupted sleep is one that ended early.
            let _ = poll(&mut fds, timeout.as_ref());
            let [revents, others] = [fds[0].revents(), fds[1].revents()];
            st = self.lock();
            if revents.is_empty() && !others.is_empty() {
                break Ok(Some(false));
            }
            if !revents.is_empty() {
                let drained = self.drain();
                st.armed = None;
                // Whoever waits for more than this thread arms it for.
                self.changed.notify_all();
                if revents.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL) {
                    break Err(Error::Closed);
                }
                if let Err(error) = drained {
                    break Err(error);
                }
            }
        };
        if leading {
            st.led = false;
        }
        drop(st);
        // Others may take what is there too, or the lead.
        if leading {
            self.changed.notify_all();
        }
        outcome
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let verbs = &self.context.libs.verbs;
        for cq in [self.sends(), self.receives()] {
            // SAFETY: made by `new`; queue pairs that use it hold it and are gone; every event is
            // acknowledged.
            freed(unsafe { (verbs.destroy_cq)(cq) }, "a completion queue");
        }
        // SAFETY: made by `new`; its queues are gone.
        freed(unsafe { (verbs.destroy_comp_channel)(self.channel.as_ptr()) }, "a channel");
    }
}

/// Converts a duration for the system.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Converts a completion; its numbers are the kernel's on both sides [QP-7], [QP-8].
fn completion(wc: &Wc, receive: bool) -> Completion {
    let opcode = match (wc.opcode, receive) {
        (0x81, true) => WcOpcode::RecvRdmaWithImm,
        (_, true) => WcOpcode::Recv,
        (1, false) => WcOpcode::RdmaWrite,
        (2, false) => WcOpcode::RdmaRead,
        (3, false) => WcOpcode::CompSwap,
        (4, false) => WcOpcode::FetchAdd,
        (5, false) => WcOpcode::BindMw,
        (6, false) => WcOpcode::LocalInv,
        (_, false) => WcOpcode::Send,
    };
    let status = status(wc.status);
    // Nothing else is valid of a failed one.
    let good = status == Status::Success;
    let flag = |flag| good && receive && wc.wc_flags & flag != 0;
    Completion {
        wr_id: wc.wr_id,
        status,
        opcode,
        byte_len: if good { wc.byte_len } else { 0 },
        imm: flag(WC_WITH_IMM).then(|| u32::from_be(wc.imm_or_key)),
        invalidated: flag(WC_WITH_INV).then_some(wc.imm_or_key),
        qpn: Qpn(wc.qp_num),
        src_qp: Qpn(if good { wc.src_qp } else { 0 }),
        grh: flag(WC_GRH),
    }
}

/// Merges the completions of the two queues, one of which begins with a flushed request: those of
/// the other that were not flushed come first. The order within each queue of a queue pair is kept.
fn causes_first(flushed: Vec<Completion>, others: Vec<Completion>) -> VecDeque<Completion> {
    let is_flush = |done: &Completion| done.status == Status::WrFlushErr;
    let (late, early): (Vec<_>, Vec<_>) = others.into_iter().partition(is_flush);
    early.into_iter().chain(flushed).chain(late).collect()
}

fn status(number: u32) -> Status {
    use Status::{
        BadRespErr, FatalErr, GeneralErr, LocAccessErr, LocLenErr, LocProtErr, LocQpOpErr,
        MwBindErr, RemAccessErr, RemInvReqErr, RemOpErr, RetryExcErr, RnrRetryExcErr, Success,
        WrFlushErr,
    };
    let all = [
        Success,
        LocLenErr,
        LocQpOpErr,
        LocProtErr,
        WrFlushErr,
        MwBindErr,
        BadRespErr,
        LocAccessErr,
        RemInvReqErr,
        RemAccessErr,
        RemOpErr,
        RetryExcErr,
        RnrRetryExcErr,
        FatalErr,
    ];
    all.into_iter().find(|status| *status as u32 == number).unwrap_or(GeneralErr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc() -> Wc {
        Wc {
            wr_id: 7,
            byte_len: 9,
            imm_or_key: 0x0102_0304_u32.to_be(),
            qp_num: 17,
            ..Wc::default()
        }
    }

    // tests [QP-7], [QP-8]
    #[test]
    fn completions_are_translated() {
        let done = completion(&Wc { opcode: 0x81, wc_flags: WC_WITH_IMM, ..wc() }, true);
        assert_eq!(done.opcode, WcOpcode::RecvRdmaWithImm);
        assert_eq!((done.imm, done.invalidated), (Some(0x0102_0304), None));
        assert_eq!((done.wr_id, done.byte_len, done.qpn), (7, 9, Qpn(17)));
        let done = completion(
            &Wc { opcode: 0x80, imm_or_key: 0x1234, wc_flags: WC_WITH_INV, ..wc() },
            true,
        );
        assert_eq!((done.imm, done.invalidated), (None, Some(0x1234)));
        let done = completion(&Wc { opcode: 4, ..wc() }, false);
        assert_eq!((done.opcode, done.imm), (WcOpcode::FetchAdd, None));
    }

    #[test]
    fn a_failed_completion_has_valid_fields_only() {
        // The opcode is whatever was there.
        let wrong = Wc { opcode: 0x77, status: 5, wc_flags: u32::MAX, ..wc() };
        let done = completion(&wrong, true);
        assert!(done.is_recv());
        assert_eq!((done.status, done.imm, done.invalidated), (Status::WrFlushErr, None, None));
        assert!(!completion(&wrong, false).is_recv());
    }

    // tests [QP-4]
    #[test]
    fn an_error_comes_before_what_it_flushed() {
        let made = |(wr_id, status)| Completion { wr_id, status, ..Completion::default() };
        let flush = Status::WrFlushErr;
        let flushed = [(1, flush), (2, Status::Success), (3, flush)].map(made).to_vec();
        let others = [(4, Status::Success), (5, Status::RemAccessErr), (6, flush)].map(made);
        let joined = causes_first(flushed, others.to_vec());
        let order: Vec<u64> = joined.iter().map(|done| done.wr_id).collect();
        assert_eq!(order, [4, 5, 1, 2, 3, 6]);
    }

    #[test]
    fn statuses_have_the_numbers_of_the_kernel() {
        assert_eq!(status(0), Status::Success);
        assert_eq!(status(12), Status::RetryExcErr);
        assert_eq!(status(13), Status::RnrRetryExcErr);
        for other in [3, 14, 20, 99] {
            assert_eq!(status(other), Status::GeneralErr);
        }
    }
}
