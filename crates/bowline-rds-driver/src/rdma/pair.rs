//! A queue pair with the memory of its frames.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bowline_rds::{RDMA_PIECES, RdmaLinkId, RdmaShape};
use bowline_verbs::{
    Access, Buffer, CmId, CqId, Device, Error, QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr,
    Resource, Sge,
};

use super::domain::{Domain, Region};

/// Bytes of a header.
const HEADER_LEN: usize = 48;
/// Set in the ids of receives.
pub(crate) const RECV: u64 = 1 << 63;
/// Number of receives posted with one call.
const RECV_BATCH: usize = 64;

/// The queue pair of one connection.
pub(crate) struct Pair {
    pub(crate) link: RdmaLinkId,
    pub(crate) port: usize,
    device: Arc<dyn Device>,
    /// That of the peer.
    _domain: Arc<Domain>,
    pub(crate) qpn: Qpn,
    /// Connection at the CM, once there is one.
    pub(crate) cm: Mutex<Option<CmId>>,
    sends: Frames,
    receives: Frames,
    /// Something failed; nothing more is posted.
    pub(crate) broken: AtomicBool,
    /// A thread destroys it.
    ending: AtomicBool,
}

/// Registered memory for frames.
struct Frames {
    buffer: Arc<Buffer>,
    region: Region,
    count: usize,
    /// Bytes of each.
    frame: usize,
}

impl Frames {
    fn new(domain: &Arc<Domain>, count: usize, frame: usize) -> Result<Self, Error> {
        let memory = |_| Error::Limit(Resource::Memory);
        let len = count.checked_mul(frame).ok_or(Error::Limit(Resource::Memory))?;
        let buffer = Arc::new(Buffer::sparse(len).map_err(memory)?);
        let region = Region::new(domain, &buffer, (0, len), None, Access::LOCAL_WRITE)?;
        Ok(Self { buffer, region, count, frame })
    }

    fn sge(&self, slot: usize, len: usize) -> Sge {
        let addr = self.buffer.addr() + (slot * self.frame) as u64;
        Sge { addr, len: len as u32, lkey: self.region.keys.lkey }
    }
}

impl core::fmt::Debug for Pair {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pair").field("link", &self.link).field("qpn", &self.qpn).finish()
    }
}

impl Pair {
    /// Makes a queue pair and posts its receives.
    pub(crate) fn new(
        device: &Arc<dyn Device>,
        port: usize,
        (domain, cq): (&Arc<Domain>, CqId),
        link: RdmaLinkId,
        shape: &RdmaShape,
    ) -> Result<Self, Error> {
        let limit = device.attr().max_qp_wr;
        if shape.sends > limit || shape.receives > limit {
            return Err(Error::Limit(Resource::WorkRequests));
        }
        let sends = Frames::new(domain, shape.sends, shape.frame)?;
        let receives = Frames::new(domain, shape.receives, shape.frame)?;
        let cap = QpCap {
            max_send_wr: shape.sends,
            max_recv_wr: shape.receives,
            max_send_sge: RDMA_PIECES.min(device.attr().max_sge),
            max_recv_sge: 1,
            max_inline: 0, // [IB-58]
        };
        let (pd, qp_type) = (domain.pd, QpType::Rc);
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: false };
        let qpn = device.create_qp(&init)?;
        let (device, cm) = (Arc::clone(device), Mutex::new(None));
        let _domain = Arc::clone(domain);
        let (broken, ending) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { link, port, device, _domain, qpn, cm, sends, receives, broken, ending })
    }

    /// Posts all receives. The queue pair must be in INIT.
    pub(crate) fn post_all_receives(&self) -> Result<(), Error> {
        self.post_receives(&mut (0..self.receives.count).map(|slot| slot as u64))
    }

    /// Posts receives for the slots that these ids name.
    pub(crate) fn post_receives(&self, ids: &mut dyn Iterator<Item = u64>) -> Result<(), Error> {
        let mut sges = [Sge::default(); RECV_BATCH];
        let mut slots = [0; RECV_BATCH];
        loop {
            let mut count = 0;
            for id in ids.take(RECV_BATCH) {
                let slot = (id & !RECV) as usize;
                slots[count] = slot;
                sges[count] = self.receives.sge(slot, self.receives.frame);
                count += 1;
            }
            if count == 0 {
                return Ok(());
            }
            let empty = RecvWr { id: 0, sges: &[] };
            let mut wrs = [empty; RECV_BATCH];
            for at in 0..count {
                let sges = core::slice::from_ref(&sges[at]);
                wrs[at] = RecvWr { id: RECV | slots[at] as u64, sges };
            }
            self.device.post_recv(self.qpn, &wrs[..count]).map_err(|(_, error)| error)?;
        }
    }

    /// Copies the header of a received frame.
    pub(crate) fn header(&self, id: u64) -> [u8; HEADER_LEN] {
        let mut header = [0; HEADER_LEN];
        let at = (id & !RECV) as usize * self.receives.frame;
        self.receives.buffer.read(at, &mut header);
        header
    }

    /// Appends the payload of a received frame of `bytes` bytes.
    pub(crate) fn append_payload(&self, id: u64, bytes: usize, out: &mut Vec<u8>) {
        if let Some(len) = bytes.min(self.receives.frame).checked_sub(HEADER_LEN) {
            let at = (id & !RECV) as usize * self.receives.frame + HEADER_LEN;
            self.receives.buffer.append_to(at, len, out);
        }
    }

    /// Writes a frame to the memory of its request, and returns where it lies.
    pub(crate) fn write_frame(
        &self,
        id: u64,
        header: &[u8; HEADER_LEN],
        payload: &mut dyn Iterator<Item = &[u8]>,
    ) -> Sge {
        let slot = (id % self.sends.count as u64) as usize;
        let start = slot * self.sends.frame;
        let mut at = start;
        self.sends.buffer.write(at, header);
        at += header.len();
        for piece in payload {
            self.sends.buffer.write(at, piece);
            at += piece.len();
        }
        self.sends.sge(slot, at - start)
    }

    /// Tells whether the queue pair has failed, and makes it failed. The first caller is told
    /// `false`.
    pub(crate) fn fail(&self) -> bool {
        self.broken.swap(true, Ordering::AcqRel)
    }

    /// Notes that the caller destroys the queue pair. Returns whether another thread does so
    /// already.
    pub(crate) fn begin_to_end(&self) -> bool {
        self.fail();
        self.ending.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub(crate) fn set_cm(&self, id: CmId) {
        *self.cm.lock().unwrap_or_else(PoisonError::into_inner) = Some(id);
    }

    /// Has nothing more come: what the peer sends from now on is not complete for it, and what was
    /// complete waits to be taken.
    pub(crate) fn stop(&self) {
        let error = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
        // One that cannot be ordered has not been connected, or has failed.
        let _ = self.device.modify_qp(self.qpn, &error);
    }

    /// Ends the connection. Afterwards no request touches memory, which is given back with this.
    pub(crate) fn destroy(&self) {
        let cm = self.cm.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(cm) = cm {
            let _ = self.device.disconnect(cm);
            let _ = self.device.destroy_id(cm);
        }
        let _ = self.device.destroy_qp(self.qpn);
    }
}
