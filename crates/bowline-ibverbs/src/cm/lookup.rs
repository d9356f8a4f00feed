//! Names to addresses, and ids made from them.

use core::ffi::{c_char, c_int, c_uint};
use core::{mem, ptr};

use super::abi::{AddrInfo, CmId};
use super::ids::{
    rdma_bind_addr, rdma_create_id, rdma_destroy_id, rdma_resolve_addr, rdma_resolve_route, refuse,
};
use super::queue_pairs::{ListenerQp, rdma_create_qp};
use crate::abi::{Pd, QpInitAttr};
use crate::device::Handle;
use crate::events::lock;
use crate::{fails, made};

/// Flags of lookups.
const PASSIVE: c_int = 1;
const NUMERICHOST: c_int = 2;
const FAMILY: c_int = 8;
const KNOWN: c_int = PASSIVE | NUMERICHOST | 4 | FAMILY;
/// `RDMA_PS_TCP`, and the types of queue pairs.
const PS_TCP: c_int = 0x0106;
const PS_UDP: c_int = 0x0111;
const QPT_RC: c_int = 2;
const QPT_UD: c_int = 4;
/// How long calls of `rdma_create_ep` wait, in milliseconds.
const PATIENCE: c_int = 2000;

/// Room of an address that was found.
type Room = [u8; 28];

/// An address of an answer, and its length.
type Copied = (*mut libc::sockaddr, libc::socklen_t);

const NOTHING: Copied = (ptr::null_mut(), 0);

/// Copies as much of an address as one has at most: programs may say how much room it has.
fn copy(from: *const libc::sockaddr, len: libc::socklen_t) -> Copied {
    let mut room: Room = [0; 28];
    let len = (len as usize).min(room.len());
    if from.is_null() || len == 0 {
        return NOTHING;
    }
    // SAFETY: the address has as many bytes as its length says.
    unsafe { ptr::copy_nonoverlapping(from.cast::<u8>(), room.as_mut_ptr(), len) };
    (made(room).cast(), len as libc::socklen_t)
}

fn free(at: *mut libc::sockaddr) {
    if !at.is_null() {
        // SAFETY: made by `copy`.
        drop(unsafe { Box::from_raw(at.cast::<Room>()) });
    }
}

/// An answer with these addresses and their lengths, and nothing else.
fn between(src: Copied, dst: Copied) -> AddrInfo {
    AddrInfo {
        ai_flags: 0,
        ai_family: 0,
        ai_qp_type: 0,
        ai_port_space: 0,
        ai_src_len: src.1,
        ai_dst_len: dst.1,
        ai_src_addr: src.0,
        ai_dst_addr: dst.0,
        ai_src_canonname: ptr::null_mut(),
        ai_dst_canonname: ptr::null_mut(),
        ai_route_len: 0,
        ai_route: ptr::null_mut(),
        ai_connect_len: 0,
        ai_connect: ptr::null_mut(),
        ai_next: ptr::null_mut(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&AddrInfo>,
    out: Option<&mut *mut AddrInfo>,
) -> c_int {
    let Some(out) = out else { return refuse(libc::EINVAL) };
    let flags = hints.map_or(0, |hints| hints.ai_flags);
    if node.is_null() && service.is_null() && hints.is_none() || flags & !KNOWN != 0 {
        return refuse(libc::EINVAL);
    }
    let is_passive = flags & PASSIVE != 0;
    let port_space = hints.map_or(0, |hints| hints.ai_port_space);
    let port_space = match (port_space, hints.map_or(0, |hints| hints.ai_qp_type)) {
        (0, QPT_UD) => PS_UDP,
        (0, _) => PS_TCP,
        (port_space, _) => port_space,
    };
    if let Some(hints) = hints.filter(|_| node.is_null() && service.is_null()) {
        // There is nothing to look up.
        *out = made(AddrInfo {
            ai_flags: flags,
            ai_family: hints.ai_family,
            ai_qp_type: hints.ai_qp_type,
            ai_port_space: hints.ai_port_space,
            ..between(
                copy(hints.ai_src_addr, hints.ai_src_len),
                copy(hints.ai_dst_addr, hints.ai_dst_len),
            )
        });
        return 0;
    }
    // SAFETY: numbers and pointers, for which zeroes are good.
    let mut wanted: libc::addrinfo = unsafe { mem::zeroed() };
    wanted.ai_flags = if is_passive { libc::AI_PASSIVE } else { 0 };
    if flags & NUMERICHOST != 0 {
        wanted.ai_flags |= libc::AI_NUMERICHOST;
    }
    if flags & FAMILY != 0 {
        wanted.ai_family = hints.map_or(0, |hints| hints.ai_family);
    }
    wanted.ai_socktype = if port_space == PS_UDP { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
    let mut found = ptr::null_mut();
    // SAFETY: text of C or null, as the call has it, and the head of a list to be freed.
    let failure = unsafe { libc::getaddrinfo(node, service, &raw const wanted, &raw mut found) };
    if failure != 0 {
        fails(libc::EADDRNOTAVAIL);
        return failure;
    }
    // SAFETY: a lookup that succeeds has one.
    let first = unsafe { &*found };
    let address = copy(first.ai_addr, first.ai_addrlen);
    let (src, dst) = if is_passive {
        (address, NOTHING)
    } else {
        (hints.map_or(NOTHING, |hints| copy(hints.ai_src_addr, hints.ai_src_len)), address)
    };
    *out = made(AddrInfo {
        ai_flags: flags,
        ai_family: first.ai_family,
        ai_qp_type: if port_space == PS_UDP { QPT_UD } else { QPT_RC },
        ai_port_space: port_space,
        ..between(src, dst)
    });
    // SAFETY: found above, and freed once.
    unsafe { libc::freeaddrinfo(found) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_freeaddrinfo(list: *mut AddrInfo) {
    if !list.is_null() {
        // SAFETY: made by `rdma_getaddrinfo`, and given back once.
        let list = unsafe { Box::from_raw(list) };
        free(list.ai_src_addr);
        free(list.ai_dst_addr);
    }
}

/// Makes an id whose calls wait, bound or on its way to where a lookup says, perhaps with a queue
/// pair.
#[unsafe(no_mangle)]
extern "C" fn rdma_create_ep(
    out: Option<&mut *mut CmId>,
    of: Option<&AddrInfo>,
    pd: *const Pd,
    attr: Option<&mut QpInitAttr<'_>>,
) -> c_int {
    let (Some(out), Some(of)) = (out, of) else { return refuse(libc::EINVAL) };
    let numbers = (c_uint::try_from(of.ai_port_space), c_uint::try_from(of.ai_qp_type));
    let (Ok(port_space), Ok(qp_type)) = numbers else { return refuse(libc::EINVAL) };
    let mut id = ptr::null_mut();
    if rdma_create_id(ptr::null(), Some(&mut id), ptr::null_mut(), port_space) != 0 {
        return -1;
    }
    // SAFETY: just made.
    let new = unsafe { &*id };
    let result = if of.ai_flags & PASSIVE != 0 {
        let bound = rdma_bind_addr(Some(new), of.ai_src_addr);
        if let Some(attr) = attr {
            let QpInitAttr { cap, sq_sig_all, srq, .. } = *attr;
            let srq = srq.map(|srq| Handle(ptr::from_ref(srq)));
            let wanted = ListenerQp { cap, qp_type, sq_sig_all, srq };
            lock(&new.own.state).request_qp = Some(wanted);
        }
        if !pd.is_null() {
            new.pd.set(pd);
        }
        bound
    } else {
        let resolved = rdma_resolve_addr(Some(new), of.ai_src_addr, of.ai_dst_addr, PATIENCE);
        match (resolved, attr) {
            (0, attr) if rdma_resolve_route(Some(new), PATIENCE) == 0 => attr.map_or(0, |attr| {
                attr.qp_type = qp_type;
                rdma_create_qp(Some(new), pd, Some(attr))
            }),
            _ => -1,
        }
    };
    if result != 0 {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        rdma_destroy_id(id);
        return refuse(errno);
    }
    *out = id;
    0
}
