//! Memory windows [MR-9].

use core::ptr::NonNull;
use std::sync::Arc;

use bowline_verbs::{Error, Feature, MwBind, MwType, Resource, SendFlags};

use crate::context::{Mr, Pd};
use crate::error::{check, freed, last_errno, limit, post};
use crate::ffi::{IbvMw, IbvMwBind, IbvQp, MwBindInfo};

const NONE: Error = Error::NotSupported(Feature::MemoryWindow);

/// A memory window.
#[derive(Debug)]
pub(crate) struct Mw {
    pub(crate) pd: Arc<Pd>,
    raw: NonNull<IbvMw>,
    kind: MwType,
}

// SAFETY: libibverbs allows every call on it from any thread; its key is read and changed under the
// lock of the tables alone.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    pub(crate) fn new(pd: &Arc<Pd>, kind: MwType) -> Result<Self, Error> {
        // SAFETY: the context is open.
        let alloc = unsafe { &*pd.context.raw() }.ops.alloc_mw.ok_or(NONE)?;
        // SAFETY: the domain lives at least as long as the window, which holds it.
        let raw = unsafe { alloc(pd.raw(), kind as u32) };
        let raw = NonNull::new(raw).ok_or_else(|| match last_errno() {
            libc::EOPNOTSUPP | libc::ENOSYS => NONE,
            errno => limit(Resource::MemoryWindows, errno),
        })?;
        Ok(Self { pd: Arc::clone(pd), raw, kind })
    }

    pub(crate) const fn kind(&self) -> MwType {
        self.kind
    }

    pub(crate) const fn raw(&self) -> *mut IbvMw {
        self.raw.as_ptr()
    }

    /// Its present key.
    pub(crate) fn key(&self) -> u32 {
        // SAFETY: allocated as long as `self` lives.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// Posts the binding of a window of type 1 on a queue pair; returns the new key.
    pub(crate) fn bind(
        &mut self,
        qp: *mut IbvQp,
        id: u64,
        info: MwBindInfo,
        flags: SendFlags,
    ) -> Result<u32, Error> {
        // SAFETY: the context is open.
        let bind = unsafe { &*self.pd.context.raw() }.ops.bind_mw.ok_or(NONE)?;
        let mut request = IbvMwBind { wr_id: id, send_flags: flags.bits(), bind_info: info };
        // SAFETY: queue pair, window and region are there: the callers hold the tables.
        let result = unsafe { bind(qp, self.raw(), &raw mut request) };
        check(result).map_err(post)?;
        Ok(self.key())
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the context is open.
        if let Some(dealloc) = unsafe { &*self.pd.context.raw() }.ops.dealloc_mw {
            // SAFETY: allocated by `new`.
            freed(unsafe { dealloc(self.raw()) }, "a window");
        }
    }
}

/// What a window is to be bound to, in the terms of libibverbs; `region` is that of `to.lkey`. It
/// is given also where a binding ends, though the manual has none then: rxe's library looks into
/// it.
pub(crate) fn info(to: &MwBind, region: &Mr) -> MwBindInfo {
    MwBindInfo { mr: region.raw(), addr: to.addr, length: to.len, access: to.access.bits() }
}
