//! Requests that are added one by one, between `ibv_wr_start` and `ibv_wr_complete`.

use core::ffi::{c_int, c_void};
use core::sync::atomic::Ordering::Relaxed;
use core::{mem, slice};
use std::sync::{Condvar, PoisonError};

use bowline_verbs::{Remote, SendFlags, SendOp, Sge, UdDest};

use crate::abi::{Ah, DataBuf, Mw, MwBindInfo, Qp};
use crate::events::lock;
use crate::post::{destination, is_datagram};
use crate::{fails, memory, outcome};

/// A request without what it sends from.
#[derive(Debug)]
struct Request {
    id: u64,
    flags: SendFlags,
    /// `None` for a datagram that has no destination yet.
    op: Option<SendOp>,
    /// Immediate of a datagram.
    imm: Option<u32>,
    sges: Vec<Sge>,
    bytes: Vec<u8>,
}

/// The requests of one thread, which others wait for.
#[derive(Debug, Default)]
pub(crate) struct Building {
    is_begun: bool,
    requests: Vec<Request>,
    /// First errno of a call that returns none.
    failure: c_int,
}

/// Threads that wait until another one has completed its requests.
static DONE: Condvar = Condvar::new();

/// Adds a request.
fn add(qp: Option<&Qp>, op: Option<SendOp>, imm: Option<u32>) {
    let Some(qp) = qp else { return };
    let mut building = lock(&qp.own.building);
    let is_good = building.is_begun && (op.is_none() || !is_datagram(qp));
    if !is_good {
        building.failure = libc::EINVAL;
        return;
    }
    let id = qp.wr_id.load(Relaxed);
    let flags = SendFlags::from_bits_truncate(qp.wr_flags.load(Relaxed));
    let flags = flags.difference(SendFlags::INLINE);
    building.requests.push(Request { id, flags, op, imm, sges: Vec::new(), bytes: Vec::new() });
}

/// Changes the request that was added last.
fn set(qp: Option<&Qp>, change: impl FnOnce(&Qp, &mut Request) -> Option<()>) {
    let Some(qp) = qp else { return };
    let mut building = lock(&qp.own.building);
    let is_set = building.requests.last_mut().and_then(|last| change(qp, last)).is_some();
    if !is_set {
        building.failure = libc::EINVAL;
    }
}

fn datagram_or(qp: Option<&Qp>, op: SendOp) -> Option<SendOp> {
    if qp.is_some_and(is_datagram) { None } else { Some(op) }
}

pub(crate) extern "C" fn atomic_cmp_swp(
    qp: Option<&Qp>,
    rkey: u32,
    addr: u64,
    compare: u64,
    swap: u64,
) {
    add(qp, Some(SendOp::CompareSwap { remote: Remote { addr, rkey }, compare, swap }), None);
}

pub(crate) extern "C" fn atomic_fetch_add(qp: Option<&Qp>, rkey: u32, addr: u64, value: u64) {
    add(qp, Some(SendOp::FetchAdd { remote: Remote { addr, rkey }, add: value }), None);
}

pub(crate) extern "C" fn atomic_write(qp: Option<&Qp>, rkey: u32, addr: u64, from: *const c_void) {
    add(qp, Some(SendOp::AtomicWrite(Remote { addr, rkey })), None);
    set_inline_data(qp, from, size_of::<u64>());
}

pub(crate) extern "C" fn bind_mw(
    qp: Option<&Qp>,
    _mw: Option<&Mw>,
    key: u32,
    info: Option<&MwBindInfo<'_>>,
) {
    let to = info.and_then(memory::binding);
    match to {
        Some(to) => add(qp, Some(SendOp::BindMw { key, to }), None),
        None => invalid(qp),
    }
}

fn invalid(qp: Option<&Qp>) {
    if let Some(qp) = qp {
        lock(&qp.own.building).failure = libc::EINVAL;
    }
}

pub(crate) extern "C" fn local_inv(qp: Option<&Qp>, key: u32) {
    add(qp, Some(SendOp::LocalInv(key)), None);
}

pub(crate) extern "C" fn rdma_read(qp: Option<&Qp>, rkey: u32, addr: u64) {
    add(qp, Some(SendOp::Read(Remote { addr, rkey })), None);
}

pub(crate) extern "C" fn rdma_write(qp: Option<&Qp>, rkey: u32, addr: u64) {
    add(qp, Some(SendOp::Write(Remote { addr, rkey })), None);
}

pub(crate) extern "C" fn rdma_write_imm(qp: Option<&Qp>, rkey: u32, addr: u64, imm: u32) {
    add(qp, Some(SendOp::WriteImm(Remote { addr, rkey }, u32::from_be(imm))), None);
}

pub(crate) extern "C" fn send(qp: Option<&Qp>) {
    add(qp, datagram_or(qp, SendOp::Send), None);
}

pub(crate) extern "C" fn send_imm(qp: Option<&Qp>, imm: u32) {
    let imm = u32::from_be(imm);
    add(qp, datagram_or(qp, SendOp::SendImm(imm)), Some(imm));
}

pub(crate) extern "C" fn send_inv(qp: Option<&Qp>, key: u32) {
    add(qp, Some(SendOp::SendInv(key)), None);
}

pub(crate) extern "C" fn send_tso(qp: Option<&Qp>, _: *const c_void, _: u16, _: u16) {
    invalid(qp);
}

pub(crate) extern "C" fn set_ud_addr(qp: Option<&Qp>, ah: Option<&Ah>, qpn: u32, qkey: u32) {
    set(qp, |qp, request| {
        let to: UdDest = destination(qp, ah, qpn, qkey)?;
        request.op = Some(SendOp::Datagram(to, request.imm));
        Some(())
    });
}

pub(crate) extern "C" fn set_xrc_srqn(qp: Option<&Qp>, _srqn: u32) {
    invalid(qp);
}

pub(crate) extern "C" fn set_inline_data(qp: Option<&Qp>, addr: *const c_void, length: usize) {
    set_inline_data_list(qp, 1, &DataBuf { addr, length });
}

pub(crate) extern "C" fn set_inline_data_list(qp: Option<&Qp>, count: usize, at: *const DataBuf) {
    // SAFETY: as C has it.
    let pieces = unsafe { given(at, count) };
    set(qp, |_, request| {
        request.flags |= SendFlags::INLINE;
        for piece in pieces? {
            // SAFETY: as above.
            request.bytes.extend_from_slice(unsafe { given(piece.addr.cast(), piece.length) }?);
        }
        Some(())
    });
}

pub(crate) extern "C" fn set_sge(qp: Option<&Qp>, lkey: u32, addr: u64, len: u32) {
    set(qp, |_, request| {
        request.sges.push(Sge { addr, len, lkey });
        Some(())
    });
}

pub(crate) extern "C" fn set_sge_list(qp: Option<&Qp>, count: usize, at: *const Sge) {
    // SAFETY: as C has it.
    let list = unsafe { given(at, count) };
    set(qp, |_, request| {
        request.sges.extend_from_slice(list?);
        Some(())
    });
}

/// What a program has given; `None` for null with a count.
///
/// # Safety
/// There are `count` elements.
unsafe fn given<'a, T>(at: *const T, count: usize) -> Option<&'a [T]> {
    match count {
        0 => Some(&[]),
        // SAFETY: see above.
        _ => (!at.is_null()).then(|| unsafe { slice::from_raw_parts(at, count) }),
    }
}

/// Waits until no other thread has requests for this queue pair that are not complete.
pub(crate) extern "C" fn start(qp: Option<&Qp>) {
    let Some(qp) = qp else { return };
    let mut building = lock(&qp.own.building);
    while building.is_begun {
        building = DONE.wait(building).unwrap_or_else(PoisonError::into_inner);
    }
    *building = Building { is_begun: true, ..Building::default() };
}

/// Posts all requests, or none if one is wrong.
pub(crate) extern "C" fn complete(qp: Option<&Qp>) -> c_int {
    let Some(qp) = qp else { return fails(libc::EINVAL) };
    let mut building = lock(&qp.own.building);
    let Building { is_begun, requests, failure } = mem::take(&mut *building);
    let is_whole = requests.iter().all(|request| request.op.is_some());
    let result = if !is_begun || !is_whole || failure != 0 {
        fails(libc::EINVAL)
    } else {
        let all: Vec<_> = requests
            .iter()
            .filter_map(|request| {
                let Request { id, flags, op, sges, bytes, .. } = request;
                let op = op.clone()?;
                Some(bowline_verbs::SendWr { id: *id, op, sges, inline: bytes, flags: *flags })
            })
            .collect();
        outcome(qp.own.opened.soft.post_all_or_none(qp.own.qpn, &all))
    };
    drop(building);
    DONE.notify_all();
    result
}

pub(crate) extern "C" fn abort(qp: Option<&Qp>) {
    if let Some(qp) = qp {
        *lock(&qp.own.building) = Building::default();
        DONE.notify_all();
    }
}
