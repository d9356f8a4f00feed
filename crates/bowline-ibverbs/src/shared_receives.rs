//! Shared receive queues.

use core::ffi::{c_int, c_void};
use core::mem;
use core::sync::atomic::AtomicU32;
use std::sync::Arc;

use bowline_verbs::{Device as _, Error, Resource, SrqChange, SrqId, SrqInit};

use crate::abi::{Pd, Srq, SrqAttr, SrqInitAttr};
use crate::device::{Handle, Opened, end_events};
use crate::events::{Unacknowledged, lock};
use crate::{ended, failed, fails, made, none, outcome};

/// `enum ibv_srq_attr_mask`.
const MAX_WR: c_int = 1;
const LIMIT: c_int = 1 << 1;

/// What is kept for a shared receive queue.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) id: SrqId,
    pub(crate) opened: Arc<Opened>,
    pub(crate) unacknowledged: Unacknowledged,
}

/// Makes a queue for receives of at least the sizes in `attr`.
pub(crate) fn create(pd: &Pd, srq_context: *mut c_void, attr: SrqAttr) -> *mut Srq {
    let opened = &pd.own.opened;
    let init =
        SrqInit { pd: pd.own.id, max_wr: attr.max_wr as usize, max_sge: attr.max_sge as usize };
    let id = match opened.soft.create_srq(&init) {
        Ok(id) => id,
        Err(error) => {
            // As of queue pairs, sizes that the device does not have are invalid.
            let errno = match error {
                Error::Limit(Resource::SharedReceiveQueues | Resource::Memory) => libc::ENOMEM,
                Error::Limit(_) => libc::EINVAL,
                error => error.errno().0,
            };
            return none(errno);
        }
    };
    // SAFETY: numbers and pointers, for which zeroes are good.
    let (mutex, cond) = unsafe { mem::zeroed() };
    let srq = made(Srq {
        context: pd.context,
        srq_context,
        pd,
        handle: id.0,
        mutex,
        cond,
        events_completed: AtomicU32::new(0),
        own: Own { id, opened: Arc::clone(opened), unacknowledged: Unacknowledged::default() },
    });
    lock(&opened.live.0).srqs.insert(id.0, Handle(srq));
    srq
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_srq(pd: Option<&Pd>, attr: Option<&mut SrqInitAttr>) -> *mut Srq {
    match (pd, attr) {
        (Some(pd), Some(attr)) => create(pd, attr.srq_context, attr.attr),
        _ => none(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_modify_srq(srq: Option<&Srq>, attr: Option<&SrqAttr>, given: c_int) -> c_int {
    let (Some(srq), Some(attr)) = (srq, attr) else { return fails(libc::EINVAL) };
    if given & !(MAX_WR | LIMIT) != 0 {
        return fails(libc::EINVAL);
    }
    let number = |bit, n: u32| (given & bit != 0).then_some(n as usize);
    let change =
        SrqChange { max_wr: number(MAX_WR, attr.max_wr), limit: number(LIMIT, attr.srq_limit) };
    match srq.own.opened.soft.modify_srq(srq.own.id, &change) {
        Err(Error::Limit(_)) => fails(libc::EINVAL),
        result => outcome(result),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_srq(
    srq: Option<&Srq>,
    out: Option<&mut mem::MaybeUninit<SrqAttr>>,
) -> c_int {
    let (Some(srq), Some(out)) = (srq, out) else { return fails(libc::EINVAL) };
    match srq.own.opened.soft.query_srq(srq.own.id) {
        Ok(attr) => {
            // They were given as numbers of 32 bits.
            let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            out.write(SrqAttr {
                max_wr: number(attr.max_wr),
                max_sge: number(attr.max_sge),
                srq_limit: number(attr.limit),
            });
            0
        }
        Err(error) => failed(&error),
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_destroy_srq(srq: *mut Srq) -> c_int {
    // SAFETY: null or made by `create`.
    let Some(at) = (unsafe { srq.as_ref() }) else { return fails(libc::EINVAL) };
    let opened = &at.own.opened;
    if let Err(error) = ended(opened.soft.destroy_srq(at.own.id)) {
        return failed(&error);
    }
    lock(&opened.live.0).srqs.remove(&at.own.id.0);
    // SAFETY: a context is closed after its objects are destroyed.
    let context = unsafe { &*at.context };
    end_events(&context.own, srq as usize, &at.own.unacknowledged);
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(srq) });
    0
}
