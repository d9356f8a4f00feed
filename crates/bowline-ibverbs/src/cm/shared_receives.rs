//! Shared receive queues of ids.

use core::ffi::{c_int, c_uint};
use core::ptr;

use super::abi::CmId;
use super::ids::refuse;
use crate::abi::{Pd, SrqInitAttr, SrqInitAttrEx};
use crate::shared_receives::{create, ibv_destroy_srq};

/// `enum ibv_srq_init_attr_mask`.
const TYPE: u32 = 1;
const PD: u32 = 1 << 1;
/// `IBV_SRQT_BASIC`.
const BASIC: c_uint = 0;

fn adopt(id: &CmId, pd: *const Pd, attr: &SrqInitAttr) -> c_int {
    let pd = if pd.is_null() { id.pd.get() } else { pd };
    if id.verbs.get().is_null() || !id.srq.get().is_null() {
        return refuse(libc::EINVAL);
    }
    // SAFETY: the program's, that of all ids, or null.
    let Some(of) = (unsafe { pd.as_ref() }) else { return refuse(libc::EINVAL) };
    let srq = create(of, attr.srq_context, attr.attr);
    if srq.is_null() {
        return -1;
    }
    id.srq.set(srq);
    id.pd.set(pd);
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_create_srq(
    id: Option<&CmId>,
    pd: *const Pd,
    attr: Option<&SrqInitAttr>,
) -> c_int {
    match (id, attr) {
        (Some(id), Some(attr)) => adopt(id, pd, attr),
        _ => refuse(libc::EINVAL),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_create_srq_ex(id: Option<&CmId>, attr: Option<&SrqInitAttrEx>) -> c_int {
    let (Some(id), Some(attr)) = (id, attr) else { return refuse(libc::EINVAL) };
    let is_basic = attr.comp_mask & TYPE == 0 || attr.srq_type == BASIC;
    if attr.comp_mask & !(TYPE | PD) != 0 || !is_basic {
        return refuse(libc::EOPNOTSUPP);
    }
    let pd = if attr.comp_mask & PD == 0 { ptr::null() } else { attr.pd };
    adopt(id, pd, &SrqInitAttr { srq_context: attr.srq_context, attr: attr.attr })
}

/// Destroys the shared receive queue of an id.
pub(super) fn destroy(id: &CmId) {
    let srq = id.srq.replace(ptr::null());
    if !srq.is_null() {
        ibv_destroy_srq(srq.cast_mut());
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_destroy_srq(id: Option<&CmId>) {
    if let Some(id) = id {
        destroy(id);
    }
}
