//! A device as one node uses it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use bowline_rds::RxBufMut;
use bowline_verbs::{CmId, Completion, CqId, Device, Error, Qpn};

use super::Job;
use super::completions::Batch;
use super::domain::{Domains, Region};
use super::pair::Pair;

/// Most entries of a completion queue on a device that takes memory for all of them.
const CQ_ENTRIES: usize = 1 << 16;

/// Memory of a frame of a kernel, bytes.
const SHORT_FRAME: usize = 48 + 4096;
/// Memory of a frame of the soft device, bytes: whole packets of every path MTU.
const LONG_FRAME: usize = 16 << 10;

/// Queue pairs of a device, by number and by connection.
#[derive(Debug, Default)]
pub(crate) struct Pairs {
    pub(crate) by_qpn: HashMap<Qpn, Arc<Pair>>,
    pub(crate) by_cm: HashMap<CmId, Arc<Pair>>,
}

/// What the thread that takes completions has for itself.
#[derive(Debug, Default)]
pub(crate) struct Taker {
    pub(crate) completions: Vec<Completion>,
    pub(crate) batches: Vec<Batch>,
    pub(crate) rx: Option<RxBufMut>,
}

/// A device, with the objects of one node on it.
pub(crate) struct Port {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) domains: Domains,
    /// Memory that peers may use, by its local key.
    pub(crate) regions: Mutex<HashMap<u32, Region>>,
    pub(crate) cq: CqId,
    pub(crate) listeners: Mutex<Vec<CmId>>,
    pub(crate) pairs: Mutex<Pairs>,
    /// Held while a connection is made, so that its events find it.
    pub(crate) connecting: Mutex<()>,
    /// Whoever holds this takes completions, so that frames stay in order.
    pub(crate) taker: Mutex<Taker>,
    pub(crate) jobs: Mutex<Sender<Job>>,
}

impl core::fmt::Debug for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Port").field("device", &self.device.attr().name).finish_non_exhaustive()
    }
}

impl Port {
    pub(crate) fn new(device: &Arc<dyn Device>, jobs: Sender<Job>) -> Result<Self, Error> {
        let attr = device.attr();
        let entries = if attr.lazy_cq { attr.max_cqe } else { attr.max_cqe.min(CQ_ENTRIES) };
        Ok(Self {
            device: Arc::clone(device),
            domains: Domains::new(device)?,
            regions: Mutex::default(),
            cq: device.create_cq(entries)?,
            listeners: Mutex::default(),
            pairs: Mutex::default(),
            connecting: Mutex::default(),
            taker: Mutex::default(),
            jobs: Mutex::new(jobs),
        })
    }

    /// Memory of a frame that is received, in bytes. In this process long frames fill more packets;
    /// memory of a device is pinned, and frames are a kernel's.
    pub(crate) fn frame(&self) -> usize {
        if self.device.attr().provider == "soft" { LONG_FRAME } else { SHORT_FRAME }
    }

    pub(crate) fn addrs(&self) -> Vec<IpAddr> {
        self.device.attr().addrs
    }

    pub(crate) fn pair_of(&self, qpn: Qpn) -> Option<Arc<Pair>> {
        self.pairs().by_qpn.get(&qpn).cloned()
    }

    pub(crate) fn pairs(&self) -> std::sync::MutexGuard<'_, Pairs> {
        self.pairs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn regions(&self) -> std::sync::MutexGuard<'_, HashMap<u32, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn send_job(&self, job: Job) {
        // Without the thread, the node has ended.
        let _ = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send(job);
    }

    /// Returns the pair of a connection; waits until it is made, if one is being made.
    pub(crate) fn pair_of_cm(&self, id: CmId) -> Option<Arc<Pair>> {
        let known = self.pairs().by_cm.get(&id).cloned();
        known.or_else(|| {
            let _made = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
            self.pairs().by_cm.get(&id).cloned()
        })
    }

    pub(crate) fn forget(&self, pair: &Pair) {
        let mut pairs = self.pairs();
        let is_other = |known: &Arc<Pair>| !core::ptr::eq(Arc::as_ptr(known), pair);
        pairs.by_qpn.retain(|_, known| is_other(known));
        pairs.by_cm.retain(|_, known| is_other(known));
    }
}
