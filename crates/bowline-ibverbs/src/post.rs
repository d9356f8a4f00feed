//! Posting lists of requests.

use core::ffi::{c_int, c_uint};
use core::{ptr, slice};

use bowline_verbs::{Device as _, Error, Remote, SendFlags, SendOp, Sge, UdDest};

use crate::abi::{self, Ah, Qp, Srq};
use crate::memory;
use crate::{failed, fails};

/// A queue key with this bit stands for the queue pair's own.
const OWN_QKEY: u32 = 1 << 31;
/// Requests that are posted without allocating.
const FEW: usize = 1;

/// `enum ibv_wr_opcode`.
mod op {
    use core::ffi::c_uint;

    pub(super) const RDMA_WRITE: c_uint = 0;
    pub(super) const RDMA_WRITE_WITH_IMM: c_uint = 1;
    pub(super) const SEND: c_uint = 2;
    pub(super) const SEND_WITH_IMM: c_uint = 3;
    pub(super) const RDMA_READ: c_uint = 4;
    pub(super) const ATOMIC_CMP_AND_SWP: c_uint = 5;
    pub(super) const ATOMIC_FETCH_AND_ADD: c_uint = 6;
    pub(super) const LOCAL_INV: c_uint = 7;
    pub(super) const BIND_MW: c_uint = 8;
    pub(super) const SEND_WITH_INV: c_uint = 9;
    pub(super) const ATOMIC_WRITE: c_uint = 15;
}

/// Where a datagram goes.
pub(crate) fn destination(qp: &Qp, ah: Option<&Ah>, qpn: u32, qkey: u32) -> Option<UdDest> {
    let qkey = if qkey & OWN_QKEY == 0 {
        qkey
    } else {
        qp.own.opened.soft.query_qp(qp.own.qpn).ok()?.1.qkey?
    };
    let to = ah?.own.to;
    Some(UdDest { addr: to.remote, from: Some(to.local), qpn: bowline_verbs::Qpn(qpn), qkey })
}

/// The list of a request, as the program has it.
///
/// # Safety
/// The program's list has `count` elements.
unsafe fn list<'a>(at: *const Sge, count: c_int) -> Option<&'a [Sge]> {
    match usize::try_from(count) {
        Ok(0) => Some(&[]),
        // SAFETY: see above.
        Ok(count) if !at.is_null() => Some(unsafe { slice::from_raw_parts(at, count) }),
        _ => None,
    }
}

/// Appends the bytes of a list, which are the program's own: inline data need no region.
fn gather(sges: &[Sge], out: &mut Vec<u8>) {
    for sge in sges {
        let at = ptr::with_exposed_provenance(sge.addr as usize);
        if sge.len > 0 {
            // SAFETY: the program has these bytes.
            out.extend_from_slice(unsafe { slice::from_raw_parts(at, sge.len as usize) });
        }
    }
}

fn operation(qp: &Qp, wr: &abi::SendWr<'_>, is_datagram: bool) -> Option<SendOp> {
    let imm = u32::from_be(wr.imm_or_key);
    // SAFETY: which part is meant, the operation says; each bit pattern is good for numbers.
    let rdma = unsafe { wr.wr.rdma };
    // SAFETY: as above.
    let atomic = unsafe { wr.wr.atomic };
    let remote = Remote { addr: rdma.remote_addr, rkey: rdma.rkey };
    let atomic_remote = Remote { addr: atomic.remote_addr, rkey: atomic.rkey };
    if is_datagram {
        // SAFETY: a queue pair of this type has such requests only.
        let ud = unsafe { wr.wr.ud };
        let dest = destination(qp, ud.ah, ud.remote_qpn, ud.remote_qkey)?;
        return match wr.opcode {
            op::SEND => Some(SendOp::Datagram(dest, None)),
            op::SEND_WITH_IMM => Some(SendOp::Datagram(dest, Some(imm))),
            _ => None,
        };
    }
    Some(match wr.opcode {
        op::RDMA_WRITE => SendOp::Write(remote),
        op::RDMA_WRITE_WITH_IMM => SendOp::WriteImm(remote, imm),
        op::SEND => SendOp::Send,
        op::SEND_WITH_IMM => SendOp::SendImm(imm),
        op::RDMA_READ => SendOp::Read(remote),
        op::ATOMIC_CMP_AND_SWP => SendOp::CompareSwap {
            remote: atomic_remote,
            compare: atomic.compare_add,
            swap: atomic.swap,
        },
        op::ATOMIC_FETCH_AND_ADD => {
            SendOp::FetchAdd { remote: atomic_remote, add: atomic.compare_add }
        }
        op::LOCAL_INV => SendOp::LocalInv(wr.imm_or_key),
        op::BIND_MW => {
            SendOp::BindMw { key: wr.bind.rkey, to: memory::binding(&wr.bind.bind_info)? }
        }
        op::SEND_WITH_INV => SendOp::SendInv(wr.imm_or_key),
        op::ATOMIC_WRITE => SendOp::AtomicWrite(remote),
        _ => return None,
    })
}

/// Tells whether a queue pair sends datagrams: `IBV_QPT_UD`.
pub(crate) fn is_datagram(qp: &Qp) -> bool {
    const QPT_UD: c_uint = 4;
    qp.qp_type == QPT_UD
}

fn request<'a>(
    qp: &Qp,
    wr: &abi::SendWr<'a>,
    bytes: &'a [u8],
) -> Option<bowline_verbs::SendWr<'a>> {
    let flags = SendFlags::from_bits_truncate(wr.send_flags);
    let op = operation(qp, wr, is_datagram(qp))?;
    // SAFETY: as C has it.
    let sges = unsafe { list(wr.sg_list, wr.num_sge) }?;
    let is_inline = flags.contains(SendFlags::INLINE);
    let sges = if is_inline { &[][..] } else { sges };
    Some(bowline_verbs::SendWr { id: wr.wr_id, op, sges, inline: bytes, flags })
}

/// The bytes of a request that are to be copied now.
fn inline(wr: &abi::SendWr<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if SendFlags::from_bits_truncate(wr.send_flags).contains(SendFlags::INLINE) {
        // SAFETY: as C has it.
        if let Some(sges) = unsafe { list(wr.sg_list, wr.num_sge) } {
            gather(sges, &mut bytes);
        }
    }
    bytes
}

pub(crate) extern "C" fn post_send<'a>(
    qp: Option<&Qp>,
    wr: Option<&'a abi::SendWr<'a>>,
    bad: Option<&mut *const abi::SendWr<'a>>,
) -> c_int {
    let Some(qp) = qp else { return fails(libc::EINVAL) };
    let refused = |at: Option<&abi::SendWr<'a>>, errno| {
        if let (Some(bad), Some(at)) = (bad, at) {
            *bad = at;
        }
        fails(errno)
    };
    let Some(first) = wr else { return 0 };
    if first.next.is_none() {
        let bytes = inline(first);
        let Some(one) = request(qp, first, &bytes) else {
            return refused(wr, libc::EINVAL);
        };
        return match qp.own.opened.soft.post_send(qp.own.qpn, slice::from_ref(&one)) {
            Ok(()) => 0,
            Err((_, error)) => refused(wr, error.errno().0),
        };
    }
    let list = || core::iter::successors(wr, |wr| wr.next);
    let bytes: Vec<Vec<u8>> = list().map(inline).collect();
    let all: Vec<_> = list().zip(&bytes).map_while(|(wr, bytes)| request(qp, wr, bytes)).collect();
    if let Err((done, error)) = qp.own.opened.soft.post_send(qp.own.qpn, &all) {
        return refused(list().nth(done), error.errno().0);
    }
    match list().nth(all.len()) {
        None => 0,
        invalid => refused(invalid, libc::EINVAL),
    }
}

/// Posts a list of receives, one by one.
fn post_receives<'a>(
    wr: Option<&'a abi::RecvWr<'a>>,
    bad: Option<&mut *const abi::RecvWr<'a>>,
    post: impl Fn(&[bowline_verbs::RecvWr<'_>; FEW]) -> Result<(), (usize, Error)>,
) -> c_int {
    for wr in core::iter::successors(wr, |wr| wr.next) {
        // SAFETY: as C has it.
        let sges = unsafe { list(wr.sg_list, wr.num_sge) };
        let posted = sges.map(|sges| post(&[bowline_verbs::RecvWr { id: wr.wr_id, sges }; FEW]));
        let errno = match posted {
            Some(Ok(())) => continue,
            Some(Err((_, error))) => failed(&error),
            None => fails(libc::EINVAL),
        };
        if let Some(bad) = bad {
            *bad = wr;
        }
        return errno;
    }
    0
}

pub(crate) extern "C" fn post_recv<'a>(
    qp: Option<&Qp>,
    wr: Option<&'a abi::RecvWr<'a>>,
    bad: Option<&mut *const abi::RecvWr<'a>>,
) -> c_int {
    let Some(qp) = qp else { return fails(libc::EINVAL) };
    post_receives(wr, bad, |one| qp.own.opened.soft.post_recv(qp.own.qpn, one))
}

pub(crate) extern "C" fn post_srq_recv<'a>(
    srq: Option<&Srq>,
    wr: Option<&'a abi::RecvWr<'a>>,
    bad: Option<&mut *const abi::RecvWr<'a>>,
) -> c_int {
    let Some(srq) = srq else { return fails(libc::EINVAL) };
    post_receives(wr, bad, |one| srq.own.opened.soft.post_srq_recv(srq.own.id, one))
}
