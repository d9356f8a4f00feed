//! Queue pairs.

use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use core::{mem, ptr};
use std::sync::{Arc, Mutex};

use bowline_verbs::{
    Access, AddressVector, Device as _, Error, Mtu, QpState, QpType, Qpn, Resource,
};

use crate::abi::{
    AhAttr, Context, Gid, GlobalRoute, Pd, Qp, QpAttr, QpCap, QpInitAttr, QpInitAttrEx,
};
use crate::cm;
use crate::device::{self, Handle, Opened, end_events};
use crate::events::{Unacknowledged, lock};
use crate::requests::{self, Building};
use crate::{ended, failed, fails, made, none, outcome};

/// `enum ibv_qp_type`.
const QPT_RC: c_uint = 2;
const QPT_UC: c_uint = 3;
const QPT_UD: c_uint = 4;
/// `enum ibv_qp_init_attr_mask`.
const INIT_PD: u32 = 1;
const INIT_CREATE_FLAGS: u32 = 1 << 2;
const INIT_SEND_OPS: u32 = 1 << 6;
/// `enum ibv_qp_create_send_ops_flags`: all but segmentation.
const SEND_OPS: u64 = 0x3ff | 1 << 12;
/// The only partition key has index 0.
const PKEY_INDEX: u16 = 0;
/// Least number of bytes sent inline.
const INLINE_MIN: u32 = 128;
/// Hops of packets that no program has asked for.
const HOPS: u8 = 64;

/// `enum ibv_qp_attr_mask`.
mod mask {
    use core::ffi::c_int;

    pub(super) const STATE: c_int = 1;
    pub(super) const CUR_STATE: c_int = 1 << 1;
    pub(super) const SQD_NOTIFY: c_int = 1 << 2;
    pub(super) const ACCESS: c_int = 1 << 3;
    pub(super) const PKEY_INDEX: c_int = 1 << 4;
    pub(super) const PORT: c_int = 1 << 5;
    pub(super) const QKEY: c_int = 1 << 6;
    pub(super) const AV: c_int = 1 << 7;
    pub(super) const PATH_MTU: c_int = 1 << 8;
    pub(super) const TIMEOUT: c_int = 1 << 9;
    pub(super) const RETRY_CNT: c_int = 1 << 10;
    pub(super) const RNR_RETRY: c_int = 1 << 11;
    pub(super) const RQ_PSN: c_int = 1 << 12;
    pub(super) const MAX_RD_ATOMIC: c_int = 1 << 13;
    pub(super) const ALT_PATH: c_int = 1 << 14;
    pub(super) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(super) const SQ_PSN: c_int = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(super) const PATH_MIG_STATE: c_int = 1 << 18;
    pub(super) const CAP: c_int = 1 << 19;
    pub(super) const DEST_QPN: c_int = 1 << 20;
    pub(super) const RATE_LIMIT: c_int = 1 << 25;
}

/// What is kept for a queue pair.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) qpn: Qpn,
    pub(crate) opened: Arc<Opened>,
    pub(crate) unacknowledged: Unacknowledged,
    cap: QpCap,
    sq_sig_all: bool,
    /// Requests that are added one by one.
    pub(crate) building: Mutex<Building>,
}

fn create(pd: &Pd, attr: &mut QpInitAttr<'_>) -> *mut Qp {
    let (Some(send_cq), Some(recv_cq)) = (attr.send_cq, attr.recv_cq) else {
        return none(libc::EINVAL);
    };
    let qp_type = match attr.qp_type {
        QPT_RC => QpType::Rc,
        QPT_UC => QpType::Uc,
        QPT_UD => QpType::Ud,
        _ => return none(libc::EOPNOTSUPP),
    };
    let opened = &pd.own.opened;
    let cap = &mut attr.cap;
    // Programs that ask for none use what they get.
    cap.max_inline_data = cap.max_inline_data.max(INLINE_MIN);
    if attr.srq.is_some() {
        // It has no receives of its own.
        (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
    }
    let cap = *cap;
    let size = |n: u32| n as usize;
    let init = bowline_verbs::QpInit {
        pd: pd.own.id,
        send_cq: send_cq.own.id,
        recv_cq: recv_cq.own.id,
        srq: attr.srq.map(|srq| srq.own.id),
        qp_type,
        cap: bowline_verbs::QpCap {
            max_send_wr: size(cap.max_send_wr),
            max_recv_wr: size(cap.max_recv_wr),
            max_send_sge: size(cap.max_send_sge),
            max_recv_sge: size(cap.max_recv_sge),
            max_inline: size(cap.max_inline_data),
        },
        sq_sig_all: attr.sq_sig_all != 0,
    };
    let qpn = match opened.soft.create_qp(&init) {
        Ok(qpn) => qpn,
        Err(error) => {
            // The manual page has EINVAL for sizes that the device does not have.
            let errno = match error {
                Error::Limit(Resource::QueuePairs | Resource::Memory) => libc::ENOMEM,
                Error::Limit(_) => libc::EINVAL,
                error => error.errno().0,
            };
            return none(errno);
        }
    };
    // SAFETY: numbers and pointers, for which zeroes are good.
    let (mutex, cond) = unsafe { mem::zeroed() };
    let qp = made(Qp {
        context: pd.context,
        qp_context: attr.qp_context,
        pd,
        send_cq,
        recv_cq,
        srq: attr.srq.map_or(ptr::null(), ptr::from_ref),
        handle: qpn.0,
        qp_num: qpn.0,
        state: AtomicU32::new(QpState::Reset as u32),
        qp_type: attr.qp_type,
        mutex,
        cond,
        events_completed: AtomicU32::new(0),
        comp_mask: 0,
        wr_id: AtomicU64::new(0),
        wr_flags: AtomicU32::new(0),
        wr_atomic_cmp_swp: Some(requests::atomic_cmp_swp),
        wr_atomic_fetch_add: Some(requests::atomic_fetch_add),
        wr_bind_mw: Some(requests::bind_mw),
        wr_local_inv: Some(requests::local_inv),
        wr_rdma_read: Some(requests::rdma_read),
        wr_rdma_write: Some(requests::rdma_write),
        wr_rdma_write_imm: Some(requests::rdma_write_imm),
        wr_send: Some(requests::send),
        wr_send_imm: Some(requests::send_imm),
        wr_send_inv: Some(requests::send_inv),
        wr_send_tso: Some(requests::send_tso),
        wr_set_ud_addr: Some(requests::set_ud_addr),
        wr_set_xrc_srqn: Some(requests::set_xrc_srqn),
        wr_set_inline_data: Some(requests::set_inline_data),
        wr_set_inline_data_list: Some(requests::set_inline_data_list),
        wr_set_sge: Some(requests::set_sge),
        wr_set_sge_list: Some(requests::set_sge_list),
        wr_start: Some(requests::start),
        wr_complete: Some(requests::complete),
        wr_abort: Some(requests::abort),
        wr_atomic_write: Some(requests::atomic_write),
        own: Own {
            qpn,
            opened: Arc::clone(opened),
            unacknowledged: Unacknowledged::default(),
            cap,
            sq_sig_all: init.sq_sig_all,
            building: Mutex::default(),
        },
    });
    lock(&opened.live.0).qps.insert(qpn.0, Handle(qp));
    qp
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_qp(
    pd: Option<&Pd>,
    attr: Option<&mut QpInitAttr<'_>>,
) -> *mut Qp {
    match (pd, attr) {
        (Some(pd), Some(attr)) => create(pd, attr),
        _ => none(libc::EINVAL),
    }
}

pub(crate) extern "C" fn create_qp_ex(
    context: Option<&Context>,
    attr: Option<&mut QpInitAttrEx<'_>>,
) -> *mut Qp {
    let (Some(_), Some(attr)) = (context, attr) else { return none(libc::EINVAL) };
    let known = INIT_PD | INIT_CREATE_FLAGS | INIT_SEND_OPS;
    let flags = if attr.comp_mask & INIT_CREATE_FLAGS == 0 { 0 } else { attr.create_flags };
    let ops = if attr.comp_mask & INIT_SEND_OPS == 0 { 0 } else { attr.send_ops_flags };
    if attr.comp_mask & !known != 0 || flags != 0 || ops & !SEND_OPS != 0 {
        return none(libc::EOPNOTSUPP);
    }
    match attr.pd.filter(|_| attr.comp_mask & INIT_PD != 0) {
        Some(pd) => {
            let mut plain = QpInitAttr {
                qp_context: attr.qp_context,
                send_cq: attr.send_cq,
                recv_cq: attr.recv_cq,
                srq: attr.srq,
                cap: attr.cap,
                qp_type: attr.qp_type,
                sq_sig_all: attr.sq_sig_all,
            };
            let qp = create(pd, &mut plain);
            attr.cap = plain.cap;
            qp
        }
        None => none(libc::EINVAL),
    }
}

/// All queue pairs have the extended calls.
#[unsafe(no_mangle)]
extern "C" fn ibv_qp_to_qp_ex(qp: Option<&Qp>) -> Option<&Qp> {
    qp
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: null or made by `create`.
    let Some(at) = (unsafe { qp.as_ref() }) else { return fails(libc::EINVAL) };
    let opened = &at.own.opened;
    let destroy = || opened.soft.destroy_qp(at.own.qpn);
    let destroyed = destroy().or_else(|error| match error {
        // Its connection ends with it.
        Error::Busy(_) if cm::release(opened, qp) => destroy(),
        error => Err(error),
    });
    if let Err(error) = ended(destroyed) {
        return failed(&error);
    }
    lock(&opened.live.0).qps.remove(&at.own.qpn.0);
    // SAFETY: a context is closed after its objects are destroyed.
    let context = unsafe { &*at.context };
    end_events(&context.own, qp as usize, &at.own.unacknowledged);
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(qp) });
    0
}

pub(crate) fn state(number: c_uint) -> Option<QpState> {
    Some(match number {
        0 => QpState::Reset,
        1 => QpState::Init,
        2 => QpState::Rtr,
        3 => QpState::Rts,
        4 => QpState::Sqd,
        5 => QpState::Sqe,
        6 => QpState::Err,
        _ => return None,
    })
}

pub(crate) fn mtu(number: c_uint) -> Option<Mtu> {
    Some(match number {
        1 => Mtu::M256,
        2 => Mtu::M512,
        3 => Mtu::M1024,
        4 => Mtu::M2048,
        5 => Mtu::M4096,
        _ => return None,
    })
}

/// The addresses that a route names, which on Ethernet must be a global one.
pub(crate) fn route(opened: &Opened, attr: &AhAttr) -> Option<AddressVector> {
    let GlobalRoute { dgid, flow_label, sgid_index, traffic_class, .. } = attr.grh;
    let local = opened.gid(sgid_index.into())?.addr;
    let is_good = attr.is_global != 0 && attr.port_num <= 1;
    is_good.then(|| AddressVector {
        local,
        remote: device::addr(&dgid),
        flow_label,
        tos: traffic_class,
    })
}

/// The attributes of a transition as programs have them, and which of them are given.
pub(crate) fn transition_attr(opened: &Opened, attr: &bowline_verbs::QpAttr) -> (QpAttr, c_int) {
    let mut given = 0;
    let mut mark = |is_given: bool, bit| given |= if is_given { bit } else { 0 };
    mark(attr.state.is_some(), mask::STATE);
    mark(attr.port.is_some(), mask::PORT);
    mark(attr.pkey_index.is_some(), mask::PKEY_INDEX);
    mark(attr.access.is_some(), mask::ACCESS);
    mark(attr.qkey.is_some(), mask::QKEY);
    mark(attr.av.is_some(), mask::AV);
    mark(attr.path_mtu.is_some(), mask::PATH_MTU);
    mark(attr.dest_qpn.is_some(), mask::DEST_QPN);
    mark(attr.rq_psn.is_some(), mask::RQ_PSN);
    mark(attr.sq_psn.is_some(), mask::SQ_PSN);
    mark(attr.max_rd_atomic.is_some(), mask::MAX_RD_ATOMIC);
    mark(attr.max_dest_rd_atomic.is_some(), mask::MAX_DEST_RD_ATOMIC);
    mark(attr.min_rnr_timer.is_some(), mask::MIN_RNR_TIMER);
    mark(attr.timeout.is_some(), mask::TIMEOUT);
    mark(attr.retry_cnt.is_some(), mask::RETRY_CNT);
    mark(attr.rnr_retry.is_some(), mask::RNR_RETRY);
    (shown(opened, attr), given)
}

/// What is to change; `None` for an invalid value.
fn change(opened: &Opened, attr: &QpAttr, given: c_int) -> Option<bowline_verbs::QpAttr> {
    let known = mask::STATE
        | mask::CUR_STATE
        | mask::SQD_NOTIFY
        | mask::ACCESS
        | mask::PKEY_INDEX
        | mask::PORT
        | mask::QKEY
        | mask::AV
        | mask::PATH_MTU
        | mask::TIMEOUT
        | mask::RETRY_CNT
        | mask::RNR_RETRY
        | mask::RQ_PSN
        | mask::MAX_RD_ATOMIC
        | mask::MIN_RNR_TIMER
        | mask::SQ_PSN
        | mask::MAX_DEST_RD_ATOMIC
        | mask::PATH_MIG_STATE
        | mask::DEST_QPN;
    if given & !known != 0 {
        return None;
    }
    let has = |bit| given & bit != 0;
    macro_rules! number {
        ($bit:ident, $value:expr) => {
            has(mask::$bit).then_some($value)
        };
    }
    macro_rules! checked {
        ($bit:ident, $value:expr) => {
            if has(mask::$bit) { Some($value?) } else { None }
        };
    }
    Some(bowline_verbs::QpAttr {
        state: checked!(STATE, state(attr.qp_state)),
        cur_state: checked!(CUR_STATE, state(attr.cur_qp_state)),
        port: number!(PORT, attr.port_num),
        pkey_index: number!(PKEY_INDEX, attr.pkey_index),
        access: checked!(ACCESS, Access::from_bits(attr.qp_access_flags & 0xff)),
        qkey: number!(QKEY, attr.qkey),
        av: checked!(AV, route(opened, &attr.ah_attr)),
        path_mtu: checked!(PATH_MTU, mtu(attr.path_mtu)),
        dest_qpn: number!(DEST_QPN, Qpn(attr.dest_qp_num)),
        rq_psn: number!(RQ_PSN, attr.rq_psn & 0xff_ffff),
        sq_psn: number!(SQ_PSN, attr.sq_psn & 0xff_ffff),
        max_rd_atomic: number!(MAX_RD_ATOMIC, attr.max_rd_atomic),
        max_dest_rd_atomic: number!(MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic),
        min_rnr_timer: number!(MIN_RNR_TIMER, attr.min_rnr_timer),
        timeout: number!(TIMEOUT, attr.timeout),
        retry_cnt: number!(RETRY_CNT, attr.retry_cnt),
        rnr_retry: number!(RNR_RETRY, attr.rnr_retry),
        sqd_notify: number!(SQD_NOTIFY, attr.en_sqd_async_notify != 0),
        ..bowline_verbs::QpAttr::default()
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_modify_qp(qp: Option<&Qp>, attr: Option<&QpAttr>, given: c_int) -> c_int {
    let (Some(qp), Some(attr)) = (qp, attr) else { return fails(libc::EINVAL) };
    if given & (mask::ALT_PATH | mask::CAP | mask::RATE_LIMIT) != 0 {
        return fails(libc::EOPNOTSUPP);
    }
    let opened = &qp.own.opened;
    let Some(change) = change(opened, attr, given) else { return fails(libc::EINVAL) };
    let mut result = opened.soft.modify_qp(qp.own.qpn, &change);
    if result.is_ok() && change.state == Some(QpState::Reset) {
        // Cards do, and programs take what they poll next for what they have posted since.
        result = opened.soft.forget_completions(qp.own.qpn);
    }
    if let (Ok(()), Some(state)) = (&result, change.state) {
        qp.state.store(state as u32, Relaxed);
    }
    outcome(result)
}

pub(crate) fn address(opened: &Opened, of: &AddressVector) -> AhAttr {
    let index = opened.gids.iter().position(|at| at.addr == of.local).unwrap_or(0);
    AhAttr {
        grh: GlobalRoute {
            dgid: device::gid(of.remote),
            flow_label: of.flow_label,
            sgid_index: index as u8, // there are at most 256
            hop_limit: HOPS,
            traffic_class: of.tos,
        },
        is_global: 1,
        port_num: 1,
        ..AhAttr::default()
    }
}

/// Attributes as programs have them; those that are not there are 0.
fn shown(opened: &Opened, attr: &bowline_verbs::QpAttr) -> QpAttr {
    let state = attr.state.unwrap_or_default() as c_uint;
    QpAttr {
        qp_state: state,
        cur_qp_state: state,
        path_mtu: attr.path_mtu.map_or(0, |mtu| mtu as c_uint),
        qkey: attr.qkey.unwrap_or(0),
        rq_psn: attr.rq_psn.unwrap_or(0),
        sq_psn: attr.sq_psn.unwrap_or(0),
        dest_qp_num: attr.dest_qpn.map_or(0, |qpn| qpn.0),
        qp_access_flags: attr.access.map_or(0, |access| access.bits()),
        ah_attr: attr.av.map_or_else(AhAttr::default, |av| address(opened, &av)),
        pkey_index: PKEY_INDEX,
        en_sqd_async_notify: attr.sqd_notify.unwrap_or(false).into(),
        sq_draining: attr.sq_draining.unwrap_or(false).into(),
        max_rd_atomic: attr.max_rd_atomic.unwrap_or(0),
        max_dest_rd_atomic: attr.max_dest_rd_atomic.unwrap_or(0),
        min_rnr_timer: attr.min_rnr_timer.unwrap_or(0),
        port_num: attr.port.unwrap_or(0),
        timeout: attr.timeout.unwrap_or(0),
        retry_cnt: attr.retry_cnt.unwrap_or(0),
        rnr_retry: attr.rnr_retry.unwrap_or(0),
        ..QpAttr::default()
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp(
    qp: Option<&Qp>,
    out: Option<&mut mem::MaybeUninit<QpAttr>>,
    _wanted: c_int,
    init: Option<&mut mem::MaybeUninit<QpInitAttr<'_>>>,
) -> c_int {
    let (Some(qp), Some(out), Some(init)) = (qp, out, init) else { return fails(libc::EINVAL) };
    let opened = &qp.own.opened;
    let (state, attr) = match opened.soft.query_qp(qp.own.qpn) {
        Ok(found) => found,
        Err(error) => return failed(&error),
    };
    qp.state.store(state as u32, Relaxed);
    out.write(QpAttr { cap: qp.own.cap, ..shown(opened, &attr) });
    init.write(QpInitAttr {
        qp_context: qp.qp_context,
        // SAFETY: queues are not destroyed before the queue pair.
        send_cq: unsafe { qp.send_cq.as_ref() },
        // SAFETY: as above.
        recv_cq: unsafe { qp.recv_cq.as_ref() },
        // SAFETY: as above.
        srq: unsafe { qp.srq.as_ref() },
        cap: qp.own.cap,
        qp_type: qp.qp_type,
        sq_sig_all: qp.own.sq_sig_all.into(),
    });
    0
}

/// Data of a long message are written in order only by devices that say so.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_qp_data_in_order(_qp: Option<&Qp>, _op: c_uint, _flags: u32) -> c_int {
    0
}

/// Enhanced connection establishment is of vendors: there is nothing to agree on.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_ece(
    _qp: Option<&Qp>,
    out: Option<&mut mem::MaybeUninit<[u32; 3]>>,
) -> c_int {
    let Some(out) = out else { return fails(libc::EINVAL) };
    out.write([0; 3]);
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_set_ece(_qp: Option<&Qp>, ece: Option<&[u32; 3]>) -> c_int {
    match ece {
        Some([0, _, 0]) => 0,
        Some(_) => fails(libc::EOPNOTSUPP),
        None => fails(libc::EINVAL),
    }
}

/// Delivers what is sent to a group to a queue pair. The group is joined by the rdma_cm.
#[unsafe(no_mangle)]
extern "C" fn ibv_attach_mcast(qp: Option<&Qp>, group: Option<&Gid>, _lid: u16) -> c_int {
    let (Some(qp), Some(group)) = (qp, group) else { return fails(libc::EINVAL) };
    outcome(qp.own.opened.soft.attach(qp.own.qpn, device::addr(group)))
}

#[unsafe(no_mangle)]
extern "C" fn ibv_detach_mcast(qp: Option<&Qp>, group: Option<&Gid>, _lid: u16) -> c_int {
    let (Some(qp), Some(group)) = (qp, group) else { return fails(libc::EINVAL) };
    outcome(qp.own.opened.soft.detach(qp.own.qpn, device::addr(group)))
}
