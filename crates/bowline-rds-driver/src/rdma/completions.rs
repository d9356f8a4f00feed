//! Takes completions: received frames go to the core, and their receives are posted again.

use core::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};

use bowline_base::clock;
use bowline_rds::{Misbehaviour, RX_BUF_LEN, RdmaFrame, RdmaLinkId, RdmaStatus, RxBuf, RxBufMut};
use bowline_verbs::{Completion, Status, WcOpcode};

use super::Job;
use super::pair::{Pair, RECV};
use super::port::{Port, Taker};
use crate::shared::Shared;
use crate::todo::Scratch;

/// Number of completions taken at once.
const BATCH: usize = 64;
/// Most batches that are taken before a connection is forgotten: more than its requests make up.
const DRAIN_ROUNDS_MAX: usize = 64;
/// Number of batches taken in a row by a thread that has something else to do.
const ROUNDS_MAX: usize = 4;

/// Completions of one connection.
#[derive(Debug)]
pub(crate) struct Batch {
    pair: Arc<Pair>,
    frames: Vec<RdmaFrame>,
    /// Ids of the receives that the frames used.
    receives: Vec<u64>,
    sent: Option<u64>,
    failed: bool,
    /// The request that failed first, and how.
    fault: Option<(u64, RdmaStatus)>,
    /// The rule that the peer broke.
    broken: Option<Misbehaviour>,
    /// Receives may be posted again.
    repost: bool,
}

impl Batch {
    fn new(pair: Arc<Pair>) -> Self {
        Self {
            pair,
            frames: Vec::new(),
            receives: Vec::new(),
            sent: None,
            failed: false,
            fault: None,
            broken: None,
            repost: false,
        }
    }
}

/// Returns how an operation ended whose request failed in this way; `None` if it was only flushed.
fn rdma_status(status: Status) -> Option<RdmaStatus> {
    match status {
        Status::WrFlushErr => None,
        Status::RemAccessErr => Some(RdmaStatus::RemoteError),
        _ => Some(RdmaStatus::OtherError),
    }
}

/// Tells whether a plain SEND has come, without an immediate or a key to invalidate [IB-43].
fn is_plain_receive(done: &Completion) -> bool {
    done.opcode == WcOpcode::Recv && done.imm.is_none() && done.invalidated.is_none()
}

impl Shared {
    /// Takes the completions that are there, of all devices, in a thread of the program.
    pub(crate) fn take_completions(&self, sc: &mut Scratch) {
        for index in 0..self.rdma.len() {
            self.rdma_polls.fetch_add(1, Relaxed);
            let mut rounds = 0..ROUNDS_MAX;
            while rounds.next().is_some() && self.take_completions_of(sc, index) {}
        }
    }

    /// Takes a batch of completions of one device, unless another thread does so now.
    pub(crate) fn take_completions_of(&self, sc: &mut Scratch, index: usize) -> bool {
        let port = &self.rdma[index];
        let taker = match port.taker.try_lock() {
            Ok(taker) => taker,
            Err(TryLockError::Poisoned(taker)) => taker.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        self.take_batch(sc, port, taker)
    }

    /// Takes all completions that are there, before a connection is forgotten whose last ones may
    /// tell what became of its operations.
    pub(crate) fn drain_completions(&self, index: usize) {
        let port = &self.rdma[index];
        self.with_scratch(|sc| {
            for _ in 0..DRAIN_ROUNDS_MAX {
                let taker = port.taker.lock().unwrap_or_else(PoisonError::into_inner);
                if !self.take_batch(sc, port, taker) {
                    return;
                }
            }
        });
    }

    fn take_batch(&self, sc: &mut Scratch, port: &Port, mut taker: MutexGuard<'_, Taker>) -> bool {
        let Taker { completions, batches, rx } = &mut *taker;
        completions.clear();
        self.stats.rdma_polls.inc();
        if port.device.poll_cq(port.cq, completions, BATCH).unwrap_or(0) == 0 {
            return false;
        }
        let mut rest = &completions[..];
        while !rest.is_empty() {
            // As many as fill a read buffer.
            let mut bytes = 0;
            let fits = |done: &&Completion| {
                bytes += done.byte_len as usize;
                bytes <= RX_BUF_LEN
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            let buf = self.gather_completions(port, now, batches, rx);
            self.handle_completions(sc, port, batches, buf);
        }
        drop(taker);
        self.run(sc);
        true
    }

    /// Sorts completions by connection, and copies the payloads of received frames.
    fn gather_completions(
        &self,
        port: &Port,
        completions: &[Completion],
        batches: &mut Vec<Batch>,
        rx: &mut Option<RxBufMut>,
    ) -> RxBuf {
        let pool = || self.rx.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buf = rx.take().unwrap_or_else(|| pool().get());
        let bytes = buf.vec();
        batches.clear();
        for done in completions {
            let at = match batches.iter().position(|batch| batch.pair.qpn == done.qpn) {
                Some(at) => at,
                None => {
                    // The completions of a connection that has ended mean nothing.
                    let Some(pair) = port.pair_of(done.qpn) else { continue };
                    batches.push(Batch::new(pair));
                    batches.len() - 1
                }
            };
            let batch = &mut batches[at];
            if done.status != Status::Success {
                batch.failed = true; // [IB-86]
                if done.wr_id & RECV == 0 {
                    if let Some(status) = rdma_status(done.status) {
                        batch.fault.get_or_insert((done.wr_id, status));
                    }
                } else if done.status == Status::LocLenErr {
                    batch.broken.get_or_insert(Misbehaviour::FrameLength);
                }
            } else if is_plain_receive(done) {
                let (start, len) = (bytes.len(), done.byte_len as usize);
                batch.pair.append_payload(done.wr_id, len, bytes);
                let header = batch.pair.header(done.wr_id);
                batch.frames.push(RdmaFrame { bytes: len, header, start });
                batch.receives.push(done.wr_id);
            } else if done.wr_id & RECV == 0 {
                batch.sent = Some(done.wr_id);
            } else {
                batch.failed = true;
                batch.broken.get_or_insert(Misbehaviour::Completion);
            }
        }
        if bytes.is_empty() {
            *rx = Some(buf);
            return RxBuf::from_vec(Vec::new());
        }
        pool().freeze(buf)
    }

    /// Hands completions to the core, and posts the receives again that they have used.
    fn handle_completions(
        &self,
        sc: &mut Scratch,
        port: &Port,
        batches: &mut Vec<Batch>,
        buf: RxBuf,
    ) {
        let mut st = self.lock();
        let now = st.at(clock::now());
        st.deliveries += 1;
        for batch in batches.iter_mut() {
            let link = batch.pair.link;
            if let Some(sent) = batch.sent {
                st.core.handle_rdma_sent(now, link, sent);
            }
            if let Some((request, status)) = batch.fault {
                st.core.handle_rdma_failed(now, link, request, status);
            }
            if !batch.frames.is_empty() {
                st.core.handle_rdma_frames(now, link, &buf, &batch.frames);
                batch.repost = st.core.wants_rdma_frames(link);
                if !batch.repost && st.rdma_pair(link).is_some() {
                    st.rdma_unposted.push((link, std::mem::take(&mut batch.receives)));
                }
            }
            if let Some(what) = batch.broken {
                st.core.handle_rdma_misbehaviour(now, link, what);
            }
        }
        drop(buf);
        self.collect(&mut st, sc, None);
        drop(st);
        for batch in batches.drain(..) {
            self.stats.rdma_frames_received.add(batch.frames.len() as u64);
            if batch.repost {
                self.repost(sc, &batch.pair, &batch.receives);
            }
            if batch.failed && !batch.pair.fail() {
                let link = batch.pair.link;
                let ours = batch.fault.is_some() || batch.broken.is_some();
                port.send_job(if ours { Job::Failed(link) } else { Job::Refused(link) });
            }
        }
    }

    /// Posts receives again in place of those that were used.
    fn repost(&self, sc: &mut Scratch, pair: &Pair, ids: &[u64]) {
        if pair.is_broken() {
            return;
        }
        if pair.post_receives(&mut ids.iter().copied()).is_err() {
            if !pair.fail() {
                self.rdma[pair.port].send_job(Job::Failed(pair.link));
            }
            return;
        }
        let mut st = self.lock();
        st.core.handle_rdma_receives_posted(pair.link, ids.len());
        self.collect(&mut st, sc, None);
    }

    /// Posts the receives that were held back while memory was short.
    pub(crate) fn resume_receives(&self, sc: &mut Scratch, id: RdmaLinkId) {
        let mut ids = Vec::new();
        let pair = {
            let mut st = self.lock();
            st.rdma_unposted.retain_mut(|(link, held)| {
                if *link == id {
                    ids.append(held);
                }
                *link != id
            });
            st.rdma_pair(id)
        };
        if let Some(pair) = pair {
            self.repost(sc, &pair, &ids);
        }
    }
}
