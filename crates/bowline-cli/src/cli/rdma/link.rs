//! One connection of a command: protection domain, completion queue, queue pair and memory, all
//! given back at the end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_node::signals::Stop;
use bowline_verbs::{
    Access, AddressVector, Buffer, CmId, Completion, CqId, Device, MrKeys, Mtu, PdId, QpAttr,
    QpCap, QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};

use super::arrivals::Arrivals;
use super::{Ended, SLICE};

/// Time between probes of a silent peer.
pub(super) const PROBE_PAUSE: Duration = Duration::from_secs(1);
/// Work request id of probes; no other request has it.
const PROBE: u64 = u64::MAX;
/// Most completions taken at once.
const BATCH: usize = 64;

/// Registered memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) buffer: Arc<Buffer>,
    keys: MrKeys,
}

impl Memory {
    /// Returns a range of it as an element of a gather or scatter list.
    pub(super) fn part(&self, offset: usize, len: usize) -> Sge {
        let addr = self.buffer.addr() + offset as u64;
        Sge { addr, len: len as u32, lkey: self.keys.lkey }
    }

    /// Returns its remote address and key, for the peer.
    pub(super) fn remote(&self) -> Remote {
        Remote { addr: self.buffer.addr(), rkey: self.keys.rkey }
    }
}

/// Settings of a command's queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuePairOptions {
    /// Rights of the peer to the memory.
    pub(super) access: Access,
    /// Sends outstanding.
    pub(super) sends: usize,
    /// Receives posted.
    pub(super) receives: usize,
    /// How many queue pairs the link gets, each of which has as many sends and receives.
    pub(super) queue_pairs: usize,
    /// Poll for completions instead of sleeping.
    pub(super) poll: bool,
    /// Longest wait for the peer.
    pub(super) timeout: Duration,
}

/// Address and PSNs of the peer, for a queue pair that is set up without a connection manager.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) av: AddressVector,
    pub(super) mtu: Mtu,
    /// The peer's queue pair.
    pub(super) dest: Qpn,
    /// The peer's first PSN.
    pub(super) rq_psn: u32,
    /// The first one of this side.
    pub(super) sq_psn: u32,
}

/// The connection.
pub(super) struct Link<'a> {
    device: &'a dyn Device,
    stop: &'a Stop,
    options: QueuePairOptions,
    pd: PdId,
    cq: Option<CqId>,
    qpn: Option<Qpn>,
    id: Option<CmId>,
    /// Further queue pairs, with their connections.
    more: Vec<(Qpn, Option<CmId>)>,
    keys: Vec<u32>,
    batch: Vec<Completion>,
    done: VecDeque<Completion>,
    /// On a server: memory of the peer that probes of its silence write to, and the requests of
    /// other clients to look after.
    probed: Option<(Remote, &'a Arrivals<'a>)>,
    /// When the peer was last probed and requests were looked after.
    last_probe: Instant,
    /// A probe is in flight.
    probing: bool,
}

impl<'a> Link<'a> {
    /// Makes a queue pair to which receives can be posted.
    pub(super) fn new(
        device: &'a dyn Device,
        stop: &'a Stop,
        options: QueuePairOptions,
    ) -> Result<Self, Ended> {
        let pd = device.alloc_pd()?;
        let (keys, batch, done) = (Vec::new(), Vec::with_capacity(BATCH), VecDeque::new());
        let (cq, qpn, id, more) = (None, None, None, Vec::new());
        let (probed, last_probe, probing) = (None, Instant::now(), false);
        // From here on a drop releases everything.
        let mut link = Self {
            device,
            stop,
            options,
            pd,
            cq,
            qpn,
            id,
            more,
            keys,
            batch,
            done,
            probed,
            last_probe,
            probing,
        };
        let entries = options.queue_pairs * (options.sends + options.receives) + 16;
        let cq = device.create_cq(entries)?;
        link.cq = Some(cq);
        link.qpn = Some(link.create(cq)?);
        for _ in 1..options.queue_pairs {
            let qpn = link.create(cq)?;
            link.more.push((qpn, None));
        }
        for qpn in link.qpns() {
            let (state, access) = (Some(QpState::Init), Some(options.access));
            device.modify_qp(qpn, &QpAttr { state, access, ..QpAttr::default() })?;
        }
        Ok(link)
    }

    fn create(&self, cq: CqId) -> Result<Qpn, Ended> {
        let cap = QpCap {
            max_send_wr: self.options.sends,
            max_recv_wr: self.options.receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpCap::default()
        };
        let (pd, qp_type, sq_sig_all) = (self.pd, QpType::Rc, true);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all };
        Ok(self.device.create_qp(&init)?)
    }

    /// All queue pairs, the first one first.
    pub(super) fn qpns(&self) -> Vec<Qpn> {
        self.qpn.into_iter().chain(self.more.iter().map(|(qpn, _)| *qpn)).collect()
    }

    /// Binds a further queue pair to a connection, which then ends with this value.
    pub(super) fn bind_further(&mut self, qpn: Qpn, id: CmId) {
        let found = self.more.iter_mut().find(|(known, _)| *known == qpn);
        found.into_iter().for_each(|(_, bound)| *bound = Some(id));
    }

    /// The queue pair.
    pub(super) fn qpn(&self) -> Qpn {
        self.qpn.unwrap_or_default()
    }

    /// Takes the queue pair to RTS by hand [QP-1].
    pub(super) fn go(&self, path: &Path) -> Result<(), Ended> {
        let attr = QpAttr {
            state: Some(QpState::Rtr),
            av: Some(path.av),
            path_mtu: Some(path.mtu),
            dest_qpn: Some(path.dest),
            rq_psn: Some(path.rq_psn),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        self.device.modify_qp(self.qpn(), &attr)?;
        let attr = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(path.sq_psn),
            max_rd_atomic: Some(1),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..QpAttr::default()
        };
        Ok(self.device.modify_qp(self.qpn(), &attr)?)
    }

    /// Binds the queue pair to a connection, which then ends with this value.
    pub(super) fn bind(&mut self, id: CmId) {
        self.id = Some(id);
    }

    /// Allocates and registers memory.
    pub(super) fn memory(&mut self, len: usize, access: Access) -> Result<Memory, Ended> {
        let failed = |error| Ended::Failed(format!("no memory for {len} bytes: {error}"));
        let buffer = Arc::new(Buffer::new(len.max(1)).map_err(failed)?);
        let keys = self.device.reg_mr(self.pd, &buffer, 0, len.max(1), None, access)?;
        self.keys.push(keys.lkey);
        Ok(Memory { buffer, keys })
    }

    /// Posts a receive.
    pub(super) fn receive(&self, id: u64, part: Option<Sge>) -> Result<(), Ended> {
        self.receive_on(self.qpn(), id, part)
    }

    /// Posts a receive to one of its queue pairs.
    pub(super) fn receive_on(&self, qpn: Qpn, id: u64, part: Option<Sge>) -> Result<(), Ended> {
        let wr = RecvWr { id, sges: part.as_slice() };
        self.device.post_recv(qpn, &[wr]).map_err(|(_, error)| error.into())
    }

    /// Posts one request with memory.
    pub(super) fn send(&self, id: u64, op: SendOp, part: Sge) -> Result<(), Ended> {
        let flags = SendFlags::SIGNALED;
        let sges = std::slice::from_ref(&part);
        self.post(&[SendWr { id, op, sges, inline: &[], flags }])
    }

    /// Posts a send of a few bytes.
    pub(super) fn send_inline(&self, id: u64, bytes: &[u8]) -> Result<(), Ended> {
        let flags = SendFlags::SIGNALED | SendFlags::INLINE;
        self.post(&[SendWr { id, op: SendOp::Send, sges: &[], inline: bytes, flags }])
    }

    /// Probes the peer by an RDMA WRITE of zero bytes: an error shows that it does not acknowledge
    /// any more.
    pub(super) fn probe(&mut self, remote: Remote) -> Result<(), Ended> {
        self.post_probe(remote)?;
        self.sent(PROBE).map(|_| ())
    }

    /// From now on probes the peer whenever nothing completes for a while, since nothing else shows
    /// that a peer that should send was killed, and looks after the requests of other clients.
    pub(super) fn watch(&mut self, remote: Remote, arrivals: &'a Arrivals<'a>) {
        self.probed = Some((remote, arrivals));
    }

    fn post_probe(&self, remote: Remote) -> Result<(), Ended> {
        let (op, flags) = (SendOp::Write(remote), SendFlags::SIGNALED);
        self.post(&[SendWr { id: PROBE, op, sges: &[], inline: &[], flags }])
    }

    /// Posts requests.
    pub(super) fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), Ended> {
        self.post_on(self.qpn(), wrs)
    }

    /// Posts requests to one of its queue pairs.
    pub(super) fn post_on(&self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), Ended> {
        self.device.post_send(qpn, wrs).map_err(|(_, error)| error.into())
    }

    /// The next completion; an error is one of the connection.
    pub(super) fn completion(&mut self) -> Result<Completion, Ended> {
        let Some(cq) = self.cq else { return Err(Ended::Left) };
        let mut since = None;
        let mut looked = 0;
        loop {
            if let Some(done) = self.done.pop_front() {
                if self.probing && done.wr_id == PROBE && !done.is_recv() {
                    self.probing = false;
                    self.checked(done)?;
                    continue;
                }
                return self.checked(done);
            }
            self.batch.clear();
            self.device.poll_cq(cq, &mut self.batch, BATCH)?;
            if !self.batch.is_empty() {
                self.done.extend(self.batch.drain(..));
                continue;
            }
            if self.stop.asked() {
                return Err(Ended::Stopped);
            }
            let now = Instant::now();
            let silence = now - *since.get_or_insert(now);
            let left = self.options.timeout.saturating_sub(silence);
            if left.is_zero() {
                let seconds = self.options.timeout.as_secs_f64();
                return Err(Ended::Failed(format!("no data from the peer for {seconds} s")));
            }
            if let Some((remote, arrivals)) = self.probed {
                if !self.probing && silence >= PROBE_PAUSE * (looked + 1) {
                    self.post_probe(remote)?;
                    self.probing = true;
                    looked += 1;
                }
                if now - self.last_probe >= SLICE {
                    self.last_probe = now;
                    arrivals.keep_requests()?;
                }
            }
            if self.options.poll {
                // The threads of the provider may need this processor.
                std::thread::yield_now();
            } else {
                self.device.wait_cq(cq, false, Some(left.min(SLICE)))?;
            }
        }
    }

    fn checked(&self, done: Completion) -> Result<Completion, Ended> {
        let text = match done.status {
            Status::Success => return Ok(done),
            Status::WrFlushErr => return Err(Ended::Left),
            // A fault of the local device explains the silence better than the peer does.
            Status::RetryExcErr => match self.device.fault() {
                Some(fault) => format!("packets do not reach the peer: {fault}"),
                None => "the peer does not answer any more".to_owned(),
            },
            Status::RnrRetryExcErr => "the peer has not posted a receive".to_owned(),
            Status::LocLenErr => "the peer sent more than expected".to_owned(),
            Status::RemAccessErr => "the peer's memory key does not allow it".to_owned(),
            Status::RemInvReqErr => "the peer says that the request is invalid".to_owned(),
            Status::RemOpErr => "the peer could not execute the request".to_owned(),
            status => format!("{status:?}"),
        };
        Err(Ended::Failed(format!("request failed with status {}: {text}", done.status as u8)))
    }

    /// Takes a further completion that is ready. A failed one, and that of a probe, is left for the
    /// next call of [`completion`](Self::completion).
    pub(super) fn ready(&mut self) -> Option<Completion> {
        let is_good = |done: &Completion| done.status == Status::Success && done.wr_id != PROBE;
        self.done.front().is_some_and(is_good).then(|| self.done.pop_front()).flatten()
    }

    /// Waits for the completion of a receive. Completions of sends are skipped.
    pub(super) fn received(&mut self) -> Result<Completion, Ended> {
        loop {
            let done = self.completion()?;
            if done.is_recv() {
                return Ok(done);
            }
        }
    }

    /// Waits for the completion of send request `id`. Completions of receives are kept for later.
    pub(super) fn sent(&mut self, id: u64) -> Result<Completion, Ended> {
        let mut kept = Vec::new();
        let found = loop {
            let done = self.completion()?;
            if done.is_recv() {
                kept.push(done);
            } else if done.wr_id == id {
                break done;
            }
        };
        for done in kept.into_iter().rev() {
            self.done.push_front(done);
        }
        Ok(found)
    }
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        // Errors are ignored: the object is gone already, or the device is closed.
        if let Some(id) = self.id {
            let _ = self.device.destroy_id(id);
        }
        for (_, id) in &self.more {
            let _ = id.map(|id| self.device.destroy_id(id));
        }
        for qpn in self.qpns() {
            let _ = self.device.destroy_qp(qpn);
        }
        for lkey in self.keys.drain(..) {
            let _ = self.device.dereg_mr(lkey);
        }
        if let Some(cq) = self.cq {
            let _ = self.device.destroy_cq(cq);
        }
        let _ = self.device.dealloc_pd(self.pd);
    }
}
