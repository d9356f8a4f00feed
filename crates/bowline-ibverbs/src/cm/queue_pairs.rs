//! Queue pairs of ids.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

use bowline_verbs::{Access, Device as _, QpAttr as Attr, QpState};

use super::abi::CmId;
use super::ids::refuse;
use crate::abi::{CompChannel, Cq, Pd, Qp, QpCap, QpInitAttr, QpInitAttrEx, Srq};
use crate::completion::{
    ibv_create_comp_channel, ibv_create_cq, ibv_destroy_comp_channel, ibv_destroy_cq,
};
use crate::device::Handle;
use crate::events::lock;
use crate::post::is_datagram;
use crate::queue_pair::{create_qp_ex, ibv_create_qp, ibv_destroy_qp};

/// What the queue pairs of a listener's requests are to be like.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenerQp {
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
    pub(super) srq: Option<Handle<Srq>>,
}

/// A queue for completions with a channel of its own.
fn queue(id: &CmId, depth: u32) -> Option<(*mut CompChannel, *mut Cq)> {
    // SAFETY: null, or the context of all ids.
    let context = unsafe { id.verbs.get().as_ref() };
    let channel = ibv_create_comp_channel(context);
    let depth = c_int::try_from(depth.max(1)).ok()?;
    let of = ptr::from_ref(id).cast_mut().cast::<c_void>();
    // SAFETY: null or just made.
    let cq = ibv_create_cq(context, depth, of, unsafe { channel.as_ref() }, 0);
    if cq.is_null() {
        ibv_destroy_comp_channel(channel);
        return None;
    }
    Some((channel, cq))
}

/// Makes the queues that a program does not give.
fn queues(id: &CmId, has_send: bool, has_recv: bool, cap: &QpCap, srq: Option<&Srq>) -> Option<()> {
    if !has_recv {
        // Of a shared receive queue all receives may be taken by this queue pair.
        let shared = srq.and_then(|srq| srq.own.opened.soft.query_srq(srq.own.id).ok());
        let shared = shared.map(|attr| u32::try_from(attr.max_wr).unwrap_or(u32::MAX));
        let (channel, cq) = queue(id, shared.unwrap_or(cap.max_recv_wr))?;
        id.recv_cq_channel.set(channel);
        id.recv_cq.set(cq);
    }
    if !has_send {
        let (channel, cq) = queue(id, cap.max_send_wr)?;
        id.send_cq_channel.set(channel);
        id.send_cq.set(cq);
    }
    Some(())
}

fn destroy_queues(id: &CmId) {
    for (channel, cq) in [(&id.send_cq_channel, &id.send_cq), (&id.recv_cq_channel, &id.recv_cq)] {
        // Only those that were made here have a channel.
        if !channel.get().is_null() {
            ibv_destroy_cq(cq.get());
            ibv_destroy_comp_channel(channel.replace(ptr::null_mut()));
        }
        cq.set(ptr::null_mut());
    }
}

/// `RDMA_UDP_QKEY`: the queue key of datagram services and of multicast groups.
pub(crate) const UDP_QKEY: u32 = 0x0123_4567;

/// The attributes of a transition of a datagram queue pair.
pub(super) fn datagram_attr(to: QpState) -> Option<Attr> {
    let state = Attr { state: Some(to), ..Attr::default() };
    Some(match to {
        QpState::Init => Attr { port: Some(1), pkey_index: Some(0), qkey: Some(UDP_QKEY), ..state },
        QpState::Rtr => state,
        QpState::Rts => Attr { sq_psn: Some(0), ..state },
        _ => return None,
    })
}

/// The steps that make a datagram queue pair ready.
pub(crate) fn datagram_steps() -> impl Iterator<Item = Attr> {
    [QpState::Init, QpState::Rtr, QpState::Rts].into_iter().filter_map(datagram_attr)
}

/// Makes the queue pair ready for receives, as far as one without a peer is, and for sends if it
/// needs no peer.
fn begin(qp: &Qp) -> bool {
    if is_datagram(qp) {
        let soft = &qp.own.opened.soft;
        return datagram_steps().all(|step| soft.modify_qp(qp.own.qpn, &step).is_ok());
    }
    let access =
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let init = Attr { state: Some(QpState::Init), access: Some(access), ..Attr::default() };
    qp.own.opened.soft.modify_qp(qp.own.qpn, &init).is_ok()
}

/// Gives an id a queue pair that was made for it; `null`: it was not, `errno` says why.
fn adopt(id: &CmId, qp: *mut Qp, pd: *const Pd, qp_type: c_uint) -> c_int {
    // SAFETY: null or just made.
    let Some(at) = (unsafe { qp.as_ref() }) else {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
        destroy_queues(id);
        return refuse(errno);
    };
    if !begin(at) {
        ibv_destroy_qp(qp);
        destroy_queues(id);
        return refuse(libc::EINVAL);
    }
    lock(&id.own.state).qpn = Some(at.own.qpn);
    id.qp.set(qp);
    id.pd.set(pd);
    id.qp_type.set(qp_type);
    0
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_create_qp(
    id: Option<&CmId>,
    pd: *const Pd,
    attr: Option<&mut QpInitAttr<'_>>,
) -> c_int {
    let (Some(id), Some(attr)) = (id, attr) else { return refuse(libc::EINVAL) };
    let pd = if pd.is_null() { id.pd.get() } else { pd };
    if id.verbs.get().is_null() || pd.is_null() || !id.qp.get().is_null() {
        return refuse(libc::EINVAL);
    }
    // SAFETY: null or made for this id.
    let srq = attr.srq.or(unsafe { id.srq.get().as_ref() });
    if queues(id, attr.send_cq.is_some(), attr.recv_cq.is_some(), &attr.cap, srq).is_none() {
        destroy_queues(id);
        return refuse(libc::ENOMEM);
    }
    // SAFETY: null or just made.
    let send_cq = unsafe { id.send_cq.get().as_ref() };
    // SAFETY: as above.
    let recv_cq = unsafe { id.recv_cq.get().as_ref() };
    let mut whole = QpInitAttr {
        send_cq: attr.send_cq.or(send_cq),
        recv_cq: attr.recv_cq.or(recv_cq),
        srq,
        ..*attr
    };
    id.send_cq.set(whole.send_cq.map_or(ptr::null_mut(), |cq| ptr::from_ref(cq).cast_mut()));
    id.recv_cq.set(whole.recv_cq.map_or(ptr::null_mut(), |cq| ptr::from_ref(cq).cast_mut()));
    // SAFETY: the program's, or that of all ids.
    let qp = ibv_create_qp(unsafe { pd.as_ref() }, Some(&mut whole));
    attr.cap = whole.cap;
    adopt(id, qp, pd, attr.qp_type)
}

#[unsafe(no_mangle)]
extern "C" fn rdma_create_qp_ex(id: Option<&CmId>, attr: Option<&mut QpInitAttrEx<'_>>) -> c_int {
    /// `IBV_QP_INIT_ATTR_PD`.
    const PD: u32 = 1;
    let (Some(id), Some(attr)) = (id, attr) else { return refuse(libc::EINVAL) };
    if id.verbs.get().is_null() || !id.qp.get().is_null() {
        return refuse(libc::EINVAL);
    }
    if attr.comp_mask & PD == 0 || attr.pd.is_none() {
        // SAFETY: null, or that of all ids.
        attr.pd = unsafe { id.pd.get().as_ref() };
        attr.comp_mask |= PD;
    }
    // SAFETY: null or made for this id.
    attr.srq = attr.srq.or(unsafe { id.srq.get().as_ref() });
    if queues(id, attr.send_cq.is_some(), attr.recv_cq.is_some(), &attr.cap, attr.srq).is_none() {
        destroy_queues(id);
        return refuse(libc::ENOMEM);
    }
    // SAFETY: null or just made.
    let send_cq = unsafe { id.send_cq.get().as_ref() };
    // SAFETY: as above.
    let recv_cq = unsafe { id.recv_cq.get().as_ref() };
    attr.send_cq = attr.send_cq.or(send_cq);
    attr.recv_cq = attr.recv_cq.or(recv_cq);
    // SAFETY: the context of all ids.
    let context = unsafe { id.verbs.get().as_ref() };
    let qp = create_qp_ex(context, Some(attr));
    adopt(id, qp, attr.pd.map_or(ptr::null(), ptr::from_ref), attr.qp_type)
}

/// Destroys the queue pair of an id, whose connection ends with it.
pub(super) fn destroy(id: &CmId) {
    let qp = id.qp.get();
    if qp.is_null() {
        return;
    }
    ibv_destroy_qp(qp);
    lock(&id.own.state).qpn = None;
    id.qp.set(ptr::null_mut());
    destroy_queues(id);
}

#[unsafe(no_mangle)]
extern "C" fn rdma_destroy_qp(id: Option<&CmId>) {
    if let Some(id) = id {
        destroy(id);
    }
}
