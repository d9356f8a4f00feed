//! Makes and ends connections, in threads of their own.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use bowline_base::clock;
use bowline_rds::{CloseReason, RDMA_REJECT, RdmaLinkId, RdmaShape};
use bowline_verbs::{
    Access, AsyncEvent, CmEvent, CmId, ConnParam, ConnRequest, Error, QpAttr, QpState, RejectReason,
};
use bowline_wire::rds::{RDMA_PORT_V4, RDMA_PORT_V6};

use super::pair::Pair;
use super::port::Port;
use crate::shared::Shared;

/// How long a thread of a device waits before it checks whether the node has ended.
const PACE: Duration = Duration::from_millis(100);
/// How long the thread that takes completions naps before it checks whether others still do.
const NAP: Duration = Duration::from_millis(2);
/// Retransmissions of a packet: a lossy network is not to end connections [IB-26].
const RETRIES: u8 = 7;
/// How long a connection is kept whose queue pair failed for another's request, or that the peer
/// has ended while operations wait: the side whose operation was refused has to learn that before
/// it learns of the end [RDMA-34].
const REFUSAL_TIME: Duration = Duration::from_millis(10);
/// Delay that a peer keeps when no receive is posted: 0.32 ms [IB-24].
const RNR_TIMER: u8 = 10;

/// Work of the setup thread.
#[derive(Debug)]
pub(crate) enum Job {
    /// Connect.
    Connect(RdmaLinkId, SocketAddr, SocketAddr, RdmaShape),
    /// The core has ended a connection.
    Close(RdmaLinkId),
    /// A queue pair has failed.
    Failed(RdmaLinkId),
    /// A queue pair has failed, and no request of this side was the reason: one of the peer's may
    /// have been refused.
    Refused(RdmaLinkId),
    /// The peer has ended a connection while operations of this side wait.
    Left(RdmaLinkId),
    /// The node ends.
    Stop,
}

impl Shared {
    /// Listens on the addresses of the devices.
    pub(crate) fn listen_rdma(&self) -> Result<(), Error> {
        for port in &self.rdma {
            for addr in port.addrs() {
                let number = if addr.is_ipv4() { RDMA_PORT_V4 } else { RDMA_PORT_V6 };
                let mut at = SocketAddr::new(addr, number);
                if let SocketAddr::V6(at) = &mut at {
                    at.set_scope_id(port.device.link_of(addr));
                }
                let id = port.device.listen(at)?;
                port.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(id);
            }
        }
        Ok(())
    }

    /// The thread that takes completions.
    pub(crate) fn run_completions(&self, index: usize) {
        let port = &self.rdma[index];
        self.nappers().push(std::thread::current());
        let mut seen = (0, 0);
        while !self.lock().stop {
            let now = (self.rdma_polls.load(Relaxed), self.rdma_sleeps.load(Relaxed));
            let before = std::mem::replace(&mut seen, now);
            // A thread of the program takes completions without a break. If this thread waited for
            // them too, each would wake it for nothing.
            if now.0 != before.0 && now.1 == before.1 {
                self.rdma_napping.store(true, SeqCst);
                if self.rdma_sleeps.load(SeqCst) == now.1 {
                    std::thread::park_timeout(NAP);
                }
                continue;
            }
            match port.device.wait_cq(port.cq, false, Some(PACE)) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(_) => {
                    std::thread::sleep(PACE); // until the node ends, or the device is well
                    continue;
                }
            }
            if !self.with_scratch(|sc| self.take_completions_of(sc, index)) {
                // Another thread takes them.
                std::thread::yield_now();
            }
        }
    }

    fn nappers(&self) -> MutexGuard<'_, Vec<Thread>> {
        self.rdma_nappers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a thread of the program, which took completions, is about to sleep.
    pub(crate) fn leave_completions(&self) {
        self.rdma_sleeps.fetch_add(1, SeqCst);
        if self.rdma_napping.swap(false, SeqCst) {
            self.nappers().iter().for_each(Thread::unpark);
        }
    }

    /// The thread that handles events of connections.
    pub(crate) fn run_events(&self, index: usize) {
        let port = &self.rdma[index];
        while !self.lock().stop {
            match port.device.cm_event(PACE) {
                Ok(event) => self.handle_event(index, event),
                Err(Error::TimedOut) => {}
                Err(Error::Closed) => {
                    return self.handle_async_event(port, AsyncEvent::DeviceFatal);
                }
                Err(_) => std::thread::sleep(PACE),
            }
            while let Ok(event) = port.device.async_event(Duration::ZERO) {
                self.handle_async_event(port, event);
            }
        }
    }

    /// Ends the connections whose queue pairs have failed in a way that no completion shows.
    fn handle_async_event(&self, port: &Port, event: AsyncEvent) {
        let (failed, job): (Vec<_>, fn(_) -> _) = match event {
            AsyncEvent::QpFatal(qpn) => (port.pair_of(qpn).into_iter().collect(), Job::Refused),
            AsyncEvent::CqError(_) | AsyncEvent::DeviceFatal => {
                (port.pairs().by_qpn.values().cloned().collect(), Job::Failed)
            }
            _ => return,
        };
        for pair in failed.iter().filter(|pair| !pair.fail()) {
            port.send_job(job(pair.link));
        }
    }

    /// The thread that makes and ends queue pairs.
    pub(crate) fn run_setup(&self, index: usize, jobs: &Receiver<Job>) {
        // Connections that end when their time comes.
        let mut late: VecDeque<(Instant, RdmaLinkId, CloseReason)> = VecDeque::new();
        loop {
            let job = match late.front() {
                None => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                // Also while others ask without a pause.
                Some(&(at, link, why)) if at <= Instant::now() => {
                    late.pop_front();
                    self.end_rdma(link, why);
                    continue;
                }
                Some((at, ..)) => jobs.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            let job = match job {
                Ok(job) => job,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => continue,
            };
            match job {
                Job::Connect(link, local, remote, shape) => {
                    if let Err(error) = self.connect_rdma(index, link, local, remote, &shape) {
                        self.rdma_closed(link, reason_of(&error));
                    }
                }
                Job::Close(link) => self.end_rdma(link, CloseReason::Eof),
                Job::Failed(link) => self.end_rdma(link, CloseReason::Reset),
                Job::Refused(link) => {
                    late.push_back((Instant::now() + REFUSAL_TIME, link, CloseReason::Reset));
                }
                Job::Left(link) => {
                    late.push_back((Instant::now() + REFUSAL_TIME, link, CloseReason::Eof));
                }
                Job::Stop => return,
            }
        }
    }

    /// Makes the queue pair of a connection; `cm` is the request that it answers, if there is one.
    fn make_pair(
        &self,
        index: usize,
        (link, peer): (RdmaLinkId, IpAddr),
        shape: &RdmaShape,
        cm: Option<CmId>,
    ) -> Result<Arc<Pair>, Error> {
        let port = &self.rdma[index];
        let domain = port.domains.of_peer(peer)?;
        let pair = Pair::new(&port.device, index, (&domain, port.cq), link, shape)?;
        let init = QpAttr {
            state: Some(QpState::Init),
            // [IB-41]
            access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC),
            ..QpAttr::default()
        };
        // Receives are there before the peer learns of the queue pair [IB-38].
        let ready = port.device.modify_qp(pair.qpn, &init);
        if let Err(error) = ready.and_then(|()| pair.post_all_receives()) {
            pair.destroy();
            return Err(error);
        }
        let pair = Arc::new(pair);
        {
            let mut pairs = port.pairs();
            pairs.by_qpn.insert(pair.qpn, Arc::clone(&pair));
            if let Some(cm) = cm {
                pair.set_cm(cm);
                pairs.by_cm.insert(cm, Arc::clone(&pair));
            }
        }
        let mut st = self.lock();
        if st.core.wants_rdma_link(link) {
            st.put_rdma_pair(&pair);
            return Ok(pair);
        }
        // The core has ended the connection meanwhile, and nobody would end this queue pair.
        drop(st);
        port.forget(&pair);
        pair.destroy();
        Err(Error::Closed)
    }

    fn connect_rdma(
        &self,
        index: usize,
        link: RdmaLinkId,
        local: SocketAddr,
        remote: SocketAddr,
        shape: &RdmaShape,
    ) -> Result<(), Error> {
        let port = &self.rdma[index];
        let pair = self.make_pair(index, (link, remote.ip()), shape, None)?;
        let connecting = port.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        let made = port.device.connect(Some(local), remote, &param(port, &pair, shape));
        match made {
            Ok(cm) => {
                pair.set_cm(cm);
                port.pairs().by_cm.insert(cm, pair);
                drop(connecting);
                Ok(())
            }
            Err(error) => {
                drop(connecting);
                self.end_pair(&pair);
                Err(error)
            }
        }
    }

    fn handle_event(&self, index: usize, event: CmEvent) {
        let port = &self.rdma[index];
        match event {
            CmEvent::ConnectRequest { id, request } => self.requested(index, id, &request),
            CmEvent::Established { id, private_data, .. } => {
                let Some(pair) = port.pair_of_cm(id) else { return };
                let data = Some(&private_data[..]).filter(|data| !data.is_empty());
                self.with_scratch(|sc| {
                    let mut st = self.lock();
                    let now = st.at(clock::now());
                    st.core.handle_rdma_established(now, pair.link, data);
                    self.release_and_run(st, sc);
                });
            }
            CmEvent::Rejected { id, reason, .. } => {
                let refused = reason == RejectReason::INVALID_SERVICE_ID;
                let why = if refused { CloseReason::Refused } else { CloseReason::Reset };
                self.ended(port, id, why);
            }
            CmEvent::Unreachable { id } => self.ended(port, id, CloseReason::TimedOut),
            CmEvent::Disconnected { id } => {
                let pair = port.pair_of_cm(id).filter(|pair| !pair.is_broken());
                match pair.filter(|pair| self.lock().core.has_rdma_ops(pair.link)) {
                    // The completion that says why may be on its way.
                    Some(pair) => port.send_job(Job::Left(pair.link)),
                    None => self.ended(port, id, CloseReason::Eof),
                }
            }
            _ => {}
        }
    }

    fn ended(&self, port: &Port, id: CmId, why: CloseReason) {
        if let Some(pair) = port.pair_of_cm(id) {
            pair.fail();
            self.end_rdma(pair.link, why);
        }
    }

    fn requested(&self, index: usize, id: CmId, request: &ConnRequest) {
        let port = &self.rdma[index];
        let answer = self.with_scratch(|sc| {
            let mut st = self.lock();
            let now = st.at(clock::now());
            if st.closing {
                return Err(RDMA_REJECT);
            }
            if self.any_address {
                st.core.add_local(request.local.ip());
            }
            let (local, remote) = (request.local, request.remote);
            let answer = st.core.handle_rdma_request(now, local, remote, &request.private_data);
            self.release_and_run(st, sc);
            answer
        });
        let accept = match answer {
            Ok(accept) => accept,
            Err(data) => {
                let _ = port.device.reject(id, &data);
                let _ = port.device.destroy_id(id);
                return;
            }
        };
        let whose = (accept.link, request.remote.ip());
        let made = self.make_pair(index, whose, &accept.shape, Some(id));
        let accepted = made.and_then(|pair| {
            let mut param = param(port, &pair, &accept.shape);
            param.responder_resources = param.responder_resources.min(request.initiator_depth);
            param.initiator_depth = param.initiator_depth.min(request.responder_resources);
            port.device.accept(id, &param)
        });
        if accepted.is_err() {
            // [IB-35]
            let _ = port.device.reject(id, &RDMA_REJECT);
            self.end_rdma(accept.link, CloseReason::Reset);
            // Unless a queue pair had it, which is destroyed with it.
            let _ = port.device.destroy_id(id);
        }
    }

    /// Ends a connection, whatever the reason [IB-99], and tells the core when none of its requests
    /// touches memory any more.
    fn end_rdma(&self, link: RdmaLinkId, why: CloseReason) {
        let pair = self.lock().rdma_pair(link);
        // Without one it was never made, or is destroyed.
        if pair.is_none_or(|pair| self.end_pair(&pair)) {
            self.rdma_closed(link, why);
        }
    }

    /// Destroys a queue pair. Returns `false` if another thread does so, and tells the core.
    fn end_pair(&self, pair: &Pair) -> bool {
        let port = &self.rdma[pair.port];
        if pair.begin_to_end() {
            return false;
        }
        pair.stop();
        // Its last completions may tell what became of its operations, and be the peer's last word.
        self.drain_completions(pair.port);
        port.forget(pair);
        pair.destroy();
        self.lock().take_rdma_pair(pair.link);
        true
    }

    fn rdma_closed(&self, link: RdmaLinkId, why: CloseReason) {
        self.with_scratch(|sc| {
            let mut st = self.lock();
            st.rdma_unposted.retain(|(of, _)| *of != link);
            let now = st.at(clock::now());
            st.core.handle_rdma_closed(now, link, why);
            self.release_and_run(st, sc);
        });
    }

    /// Ends everything on the devices. The threads have ended.
    pub(crate) fn close_rdma(&self) {
        for port in &self.rdma {
            for id in port.listeners.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                let _ = port.device.destroy_id(id);
            }
            let pairs: Vec<_> = port.pairs().by_qpn.drain().map(|(_, pair)| pair).collect();
            port.pairs().by_cm.clear();
            pairs.iter().for_each(|pair| pair.destroy());
            let _ = port.device.destroy_cq(port.cq);
            port.regions().clear();
        }
        let pairs = self.lock().take_rdma_pairs();
        drop(pairs); // and their memory, not under the lock
    }
}

fn param(port: &Port, pair: &Pair, shape: &RdmaShape) -> ConnParam {
    let depth = port.device.attr().max_qp_rd_atom;
    ConnParam {
        qpn: pair.qpn,
        is_led: false,
        private_data: shape.private_data.to_vec(),
        responder_resources: depth,
        initiator_depth: depth,
        retry_count: RETRIES,
        rnr_retry_count: 7, // for ever [IB-25]
        min_rnr_timer: RNR_TIMER,
        tos: shape.tos, // of the packets [IB-27]
        ack_timeout: None,
    }
}

fn reason_of(error: &Error) -> CloseReason {
    match error {
        Error::AddrNotAvailable => CloseReason::AddrNotAvailable,
        error => CloseReason::Other(error.errno().0),
    }
}
