//! A device as a core's binding uses it: with a protection domain and completion queues for that
//! core alone.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_rtrs::bind::{Ports, Verbs};
use bowline_rtrs::{PortAttr, PortId, QpShape};
use bowline_verbs::{
    Access, Buffer, CmId, Completion, ConnParam, CqId, Device, Error, MrKeys, Object, PdId, QpAttr,
    QpCap, QpInit, QpState, QpType, Qpn, RecvWr, Resource, SendWr,
};

/// The id of an engine's device. An engine has at most 256.
pub(crate) fn port_id(index: usize) -> PortId {
    PortId(u8::try_from(index).unwrap_or(u8::MAX))
}

/// Entries of a completion queue, if the device allows that many: enough for 340 connections of
/// default depth. Devices that allocate entries only when used get as many as they allow: the soft
/// device has room for 7690 connections, more than a server grants to one address. A connection
/// that finds no room is refused.
const CQ_ENTRIES: usize = 1 << 20;

/// Entries of a poll connection's completion queue: enough for 20 paths of default depth.
const POLLED_ENTRIES: usize = 1 << 16;

/// A completion queue that can never overrun, because queue pairs reserve entries in it.
struct Queue {
    cq: CqId,
    entries: usize,
    /// Entries reserved by queue pairs. Those of a destroyed queue pair count until its last
    /// completions have been taken.
    reserved: AtomicUsize,
    /// Reserved entries of queue pairs that have been destroyed.
    destroyed: AtomicUsize,
}

impl Queue {
    fn new(device: &Arc<dyn Device>, most: usize) -> Result<Self, Error> {
        let limits = device.attr();
        let entries = if limits.lazy_cq { usize::MAX } else { most }.min(limits.max_cqe);
        let (reserved, destroyed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(Self { cq: device.create_cq(entries)?, entries, reserved, destroyed })
    }

    /// Reserves entries.
    fn reserve(&self, entries: usize) -> Result<(), Error> {
        let fits = |reserved: usize| {
            reserved.checked_add(entries).filter(|reserved| *reserved <= self.entries)
        };
        let reserved = self.reserved.fetch_update(Relaxed, Relaxed, fits);
        reserved.map(drop).map_err(|_| Error::Limit(Resource::CqEntries))
    }
}

/// One device, for one core.
pub(crate) struct Port {
    device: Arc<dyn Device>,
    attr: PortAttr,
    /// The protection domain, or the error because of which the device cannot be used.
    pd: Result<PdId, Error>,
    /// The completion queue that all connections share, then those of the poll connections.
    queues: Vec<Queue>,
    /// For each queue pair: the index of its completion queue, and the entries reserved there.
    queue_pairs: Mutex<BTreeMap<Qpn, (u16, usize)>>,
}

impl core::fmt::Debug for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Port").field("pd", &self.pd).finish_non_exhaustive()
    }
}

impl Port {
    /// Makes the objects a core needs on a device, with completion queues for `polled` poll
    /// connections.
    pub(crate) fn new(device: &Arc<dyn Device>, polled: u16) -> Result<Self, Error> {
        let mut port = Self::with(device, Ok(device.alloc_pd()?));
        for queue in 0..=polled {
            let most = if queue == 0 { CQ_ENTRIES } else { POLLED_ENTRIES };
            port.queues.push(Queue::new(&port.device, most)?);
        }
        Ok(port)
    }

    /// Stands for a device that cannot be used: no object can be made there.
    pub(crate) fn unusable(device: &Arc<dyn Device>, why: Error) -> Self {
        Self::with(device, Err(why))
    }

    fn with(device: &Arc<dyn Device>, pd: Result<PdId, Error>) -> Self {
        let limits = device.attr();
        let attr = PortAttr {
            max_qp_wr: limits.max_qp_wr,
            max_sge: limits.max_sge,
            fast_registration: limits.fast_registration,
            key_refresh: limits.key_refresh,
            burst: limits.burst,
            mtu: limits.mtu.bytes(),
        };
        let (device, queues) = (Arc::clone(device), Vec::new());
        Self { device, attr, pd, queues, queue_pairs: Mutex::default() }
    }

    /// The error because of which the device could never be used.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.pd.as_ref().err()
    }

    /// The error of an operation `what` that needs this unusable device.
    pub(crate) fn unusable_for(&self, what: &'static str) -> crate::Error {
        let why = self.refusal().cloned().unwrap_or(Error::Closed);
        crate::Error::unusable(what, self.device.attr().name, why)
    }

    /// The given protection domain, or by default this port's.
    fn domain(&self, pd: Option<PdId>) -> Result<PdId, Error> {
        pd.map_or_else(|| self.pd.clone(), Ok)
    }

    pub(crate) const fn attr(&self) -> PortAttr {
        self.attr
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Takes completions of a queue; queue 0 is the one all connections share.
    pub(crate) fn poll(
        &self,
        queue: u16,
        out: &mut Vec<Completion>,
        max: usize,
    ) -> Result<usize, Error> {
        let Some(queue) = self.queues.get(usize::from(queue)) else { return Ok(0) };
        let destroyed = queue.destroyed.load(Acquire);
        let count = self.device.poll_cq(queue.cq, out, max)?;
        if destroyed > 0 && count < max {
            // The queue was empty after these queue pairs were destroyed.
            queue.destroyed.fetch_sub(destroyed, Relaxed);
            queue.reserved.fetch_sub(destroyed, Relaxed);
        }
        Ok(count)
    }

    /// Waits for completions in the queue all connections share.
    pub(crate) fn wait(&self, limit: Duration) -> Result<bool, Error> {
        let Some(queue) = self.queues.first() else { return Ok(false) };
        self.device.wait_cq(queue.cq, false, Some(limit))
    }

    /// The same, or until `other` can be read; `None` if another thread waits.
    pub(crate) fn wait_or(
        &self,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error> {
        let Some(queue) = self.queues.first() else { return Ok(None) };
        self.device.wait_cq_or(queue.cq, other, limit)
    }

    fn create_qp(&self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error> {
        // One more entry for the marker that drains the queue pair.
        let max_send_wr = (shape.send_wr + 1).min(self.attr.max_qp_wr);
        let max_recv_wr = (shape.recv_wr + 1).min(self.attr.max_qp_wr);
        let entries = max_send_wr + max_recv_wr;
        let queue = self.queues.get(usize::from(shape.queue));
        let queue = queue.ok_or(Error::NoSuch(Object::CompletionQueue))?;
        let (pd, cq) = (self.domain(pd)?, queue.cq);
        queue.reserve(entries)?;
        let cap = QpCap {
            max_send_wr,
            max_recv_wr,
            max_send_sge: shape.send_sge,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let made = self.device.create_qp(&QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        });
        let made = made.and_then(|qpn| {
            let (state, access, give_up) = (Some(QpState::Init), Some(shape.access), shape.give_up);
            let ready =
                self.device.modify_qp(qpn, &QpAttr { state, access, give_up, ..QpAttr::default() });
            if ready.is_err() {
                // The queue pair was never used.
                let _ = self.device.destroy_qp(qpn);
            }
            ready.map(|()| qpn)
        });
        match made {
            Ok(qpn) => _ = self.lock().insert(qpn, (shape.queue, entries)),
            Err(_) => _ = queue.reserved.fetch_sub(entries, Relaxed),
        }
        made
    }

    fn destroy_qp(&self, qpn: Qpn) -> Result<(), Error> {
        self.device.destroy_qp(qpn)?;
        if let Some((queue, entries)) = self.lock().remove(&qpn)
            && let Some(queue) = self.queues.get(usize::from(queue))
        {
            queue.destroyed.fetch_add(entries, Release);
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Qpn, (u16, usize)>> {
        self.queue_pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Port {
    /// The binding has destroyed all objects that use these, unless it was abandoned with its
    /// device.
    fn drop(&mut self) {
        for queue in &self.queues {
            let _ = self.device.destroy_cq(queue.cq);
        }
        if let Ok(pd) = self.pd {
            let _ = self.device.dealloc_pd(pd);
        }
    }
}

/// The devices of a core; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct PortSet {
    ports: Vec<PortHandle>,
}

/// A shared reference to one device of a core.
#[derive(Clone, Debug)]
struct PortHandle(Arc<Port>);

impl PortSet {
    pub(crate) fn new(ports: &[Arc<Port>]) -> Self {
        Self { ports: ports.iter().map(|port| PortHandle(Arc::clone(port))).collect() }
    }
}

impl Ports for PortSet {
    fn count(&self) -> usize {
        self.ports.len()
    }

    fn port(&mut self, port: PortId) -> &mut dyn Verbs {
        &mut self.ports[usize::from(port.0)]
    }
}

impl Verbs for PortHandle {
    fn attr(&self) -> PortAttr {
        self.0.attr
    }

    fn alloc_pd(&mut self) -> Result<PdId, Error> {
        self.0.device.alloc_pd()
    }

    fn dealloc_pd(&mut self, pd: PdId) {
        // The domain is this core's and empty: the call fails only when the device is closed.
        let _ = self.0.device.dealloc_pd(pd);
    }

    fn create_qp(&mut self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error> {
        self.0.create_qp(pd, shape)
    }

    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        let state = Some(QpState::Err);
        self.0.device.modify_qp(qpn, &QpAttr { state, ..QpAttr::default() })
    }

    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.0.destroy_qp(qpn)
    }

    fn reg_mr(
        &mut self,
        pd: Option<PdId>,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, Error> {
        let pd = self.0.domain(pd)?;
        self.0.device.reg_mr(pd, buffer, offset, len, Some(iova), access)
    }

    fn alloc_mr(&mut self) -> Result<u32, Error> {
        self.0.device.alloc_mr(self.0.domain(None)?).map(|keys| keys.rkey)
    }

    fn dereg_mr(&mut self, lkey: u32) {
        // The memory region is this core's and has no windows: the call fails only when the device
        // is closed.
        let _ = self.0.device.dereg_mr(lkey);
    }

    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error> {
        self.0.device.withdraw_keys(keys)
    }

    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.0.device.renew_keys(keys)
    }

    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        self.0.device.post_send(qpn, wrs)
    }

    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        self.0.device.post_recv(qpn, wrs)
    }

    fn connect(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        self.0.device.connect(Some(local), remote, param)
    }

    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        self.0.device.accept(id, param)
    }

    fn reject(&mut self, id: CmId, private: &[u8]) -> Result<(), Error> {
        self.0.device.reject(id, private)
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        self.0.device.disconnect(id)
    }

    fn destroy_id(&mut self, id: CmId) -> Result<(), Error> {
        self.0.device.destroy_id(id)
    }
}
