//! A device as a core's binding uses it: a protection domain and a completion queue of its own.

use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bowline_rtrs::bind::{Ports, Verbs};
use bowline_rtrs::{PortAttr, PortId, QpShape};
use bowline_verbs::{
    Access, Buffer, CmId, Completion, ConnParam, CqId, Device, Error, MrKeys, PdId, QpAttr, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, SendWr,
};

/// The name of an engine's device, which has at most 256.
pub(crate) fn port_id(index: usize) -> PortId {
    PortId(u8::try_from(index).unwrap_or(u8::MAX))
}

/// Entries of a completion queue, when the device has so many: room for 340 connections of default
/// depth. Where they take memory only when they are used, as many as there can be: the soft device
/// has room for 7690, more than a server lets one address have. A connection that finds no room is
/// refused.
const CQ_ENTRIES: usize = 1 << 20;

/// The same of one for a poll connection: room for 20 paths of default depth.
const POLLED_ENTRIES: usize = 1 << 16;

/// A completion queue, which can never overrun.
struct Queue {
    cq: CqId,
    entries: usize,
    /// Entries that the queue pairs may fill, those that are gone included until what they have
    /// left there is taken.
    promised: AtomicUsize,
    /// Entries of queue pairs that are gone.
    leaving: AtomicUsize,
}

impl Queue {
    fn new(device: &Arc<dyn Device>, most: usize) -> Result<Self, Error> {
        let limits = device.attr();
        let entries = if limits.lazy_cq { usize::MAX } else { most }.min(limits.max_cqe);
        let (promised, leaving) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Ok(Self { cq: device.create_cq(entries)?, entries, promised, leaving })
    }

    /// Reserves entries.
    fn promise(&self, entries: usize) -> Result<(), Error> {
        let fits = |promised: usize| {
            promised.checked_add(entries).filter(|promised| *promised <= self.entries)
        };
        let reserved = self.promised.fetch_update(Relaxed, Relaxed, fits);
        reserved.map(drop).map_err(|_| Error::Limit("completion queue entries"))
    }
}

/// One device, for one core.
pub(crate) struct Port {
    device: Arc<dyn Device>,
    attr: PortAttr,
    /// Or why the device cannot be used.
    pd: Result<PdId, Error>,
    /// The one all have in common, and those of poll connections.
    queues: Vec<Queue>,
    /// Which of them each queue pair uses, and how much of it.
    queue_pairs: Mutex<BTreeMap<Qpn, (u16, usize)>>,
}

impl core::fmt::Debug for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Port").field("pd", &self.pd).finish_non_exhaustive()
    }
}

impl Port {
    /// Makes what a core needs of a device, with room for so many poll connections.
    pub(crate) fn new(device: &Arc<dyn Device>, polled: u16) -> Result<Self, Error> {
        let mut port = Self::with(device, Ok(device.alloc_pd()?));
        for queue in 0..=polled {
            let most = if queue == 0 { CQ_ENTRIES } else { POLLED_ENTRIES };
            port.queues.push(Queue::new(&port.device, most)?);
        }
        Ok(port)
    }

    /// The place of a device that cannot be used: nothing can be made there.
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

    /// Why the device could not be used from the start.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.pd.as_ref().err()
    }

    /// The error of what needs this device, which cannot be used.
    pub(crate) fn unusable_for(&self, what: &'static str) -> crate::Error {
        let why = self.refusal().cloned().unwrap_or(Error::Closed);
        crate::Error::unusable(what, self.device.attr().name, why)
    }

    /// This protection domain, or the one of what has none of its own.
    fn domain(&self, pd: Option<PdId>) -> Result<PdId, Error> {
        pd.map_or_else(|| self.pd.clone(), Ok)
    }

    pub(crate) const fn attr(&self) -> PortAttr {
        self.attr
    }

    pub(crate) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Takes completions of a queue, 0 for the one all have in common.
    pub(crate) fn poll(
        &self,
        queue: u16,
        out: &mut Vec<Completion>,
        max: usize,
    ) -> Result<usize, Error> {
        let Some(queue) = self.queues.get(usize::from(queue)) else { return Ok(0) };
        let leaving = queue.leaving.load(Acquire);
        let count = self.device.poll_cq(queue.cq, out, max)?;
        if leaving > 0 && count < max {
            // It was empty after these had gone.
            queue.leaving.fetch_sub(leaving, Relaxed);
            queue.promised.fetch_sub(leaving, Relaxed);
        }
        Ok(count)
    }

    /// Waits for completions of the queue all have in common.
    pub(crate) fn wait(&self, limit: Duration) -> Result<bool, Error> {
        let Some(queue) = self.queues.first() else { return Ok(false) };
        self.device.wait_cq(queue.cq, false, Some(limit))
    }

    fn create_qp(&self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error> {
        // Room for the markers of its end.
        let max_send_wr = (shape.send_wr + 1).min(self.attr.max_qp_wr);
        let max_recv_wr = (shape.recv_wr + 1).min(self.attr.max_qp_wr);
        let entries = max_send_wr + max_recv_wr;
        let queue = self.queues.get(usize::from(shape.queue));
        let queue = queue.ok_or(Error::NoSuch("completion queue"))?;
        let (pd, cq) = (self.domain(pd)?, queue.cq);
        queue.promise(entries)?;
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
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        });
        let made = made.and_then(|qpn| {
            let (state, access, give_up) = (Some(QpState::Init), Some(shape.access), shape.give_up);
            let ready =
                self.device.modify_qp(qpn, &QpAttr { state, access, give_up, ..QpAttr::default() });
            if ready.is_err() {
                // Just made and not used.
                let _ = self.device.destroy_qp(qpn);
            }
            ready.map(|()| qpn)
        });
        match made {
            Ok(qpn) => _ = self.lock().insert(qpn, (shape.queue, entries)),
            Err(_) => _ = queue.promised.fetch_sub(entries, Relaxed),
        }
        made
    }

    fn destroy_qp(&self, qpn: Qpn) -> Result<(), Error> {
        self.device.destroy_qp(qpn)?;
        if let Some((queue, entries)) = self.lock().remove(&qpn)
            && let Some(queue) = self.queues.get(usize::from(queue))
        {
            queue.leaving.fetch_add(entries, Release);
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Qpn, (u16, usize)>> {
        self.queue_pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Port {
    /// The binding has removed everything that used them, unless it was given up with its device.
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

/// One of them.
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
        // Ours and empty: it fails only when the device is closed.
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
        // Ours, and without windows: it fails only when the device is closed.
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
