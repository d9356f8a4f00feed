//! Connecting, listening, accepting, rejecting and disconnecting.

use core::ffi::{c_int, c_uint, c_void};
use core::{mem, ptr, slice};

use bowline_roce_driver::PortSpace;
use bowline_verbs::{
    Access, ConnParam as Wanted, ConnRequest, Device as _, QpAttr as Attr, QpState, Qpn,
    RejectReason,
};

use super::abi::{CmEvent, CmId, ConnParam};
use super::addr;
use super::events::{kind, rdma_get_cm_event};
use super::ids::{
    complete, forget_event, is_datagram, learn, opened, rdma_destroy_ep, rdma_migrate_id, refuse,
    space,
};
use super::queue_pairs::{ListenerQp, UDP_QKEY, datagram_attr, rdma_create_qp};
use crate::abi::{QpAttr, QpInitAttr};
use crate::events::lock;
use crate::queue_pair::{state, transition_attr};

/// Retransmissions of calls that say nothing of them.
const RETRIES: u8 = 7;
/// Least time code of answers without a receive, about 0.6 ms.
const RNR_TIMER: u8 = 12;

/// Rights that a program may give a queue pair.
const RIGHTS: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// Bytes that a program sends along.
///
/// # Safety
/// There are `len` bytes.
unsafe fn data(at: *const c_void, len: u8) -> Vec<u8> {
    if at.is_null() || len == 0 {
        return Vec::new();
    }
    // SAFETY: see above.
    unsafe { slice::from_raw_parts(at.cast::<u8>(), len.into()) }.to_vec()
}

/// What a program sends along with its parameters.
fn data_of(param: Option<&ConnParam>) -> Vec<u8> {
    // SAFETY: as C has it.
    let given = |param: &ConnParam| unsafe { data(param.private_data, param.private_data_len) };
    param.map(given).unwrap_or_default()
}

/// The parameters of a connection. What a program leaves open is what the device, or the peer that
/// asks, has.
fn wanted(id: &CmId, param: Option<&ConnParam>, request: Option<&ConnRequest>) -> Option<Wanted> {
    let opened = opened()?;
    // SAFETY: null, or the id's own.
    let qp = unsafe { id.qp.get().as_ref() };
    let most = opened.attr.max_qp_rd_atom;
    let (responder, initiator) = match (param, request) {
        (Some(param), _) => (param.responder_resources, param.initiator_depth),
        (None, Some(request)) => (request.initiator_depth, request.responder_resources),
        (None, None) => (most, most),
    };
    let (tos, ack_timeout) = {
        let state = lock(&id.own.state);
        (state.tos, state.ack_timeout)
    };
    Some(Wanted {
        qpn: qp.map(|qp| qp.own.qpn).or_else(|| param.map(|param| Qpn(param.qp_num)))?,
        is_led: qp.is_none(),
        private_data: data_of(param),
        responder_resources: responder.min(most),
        initiator_depth: initiator.min(most),
        retry_count: param.map_or(RETRIES, |param| param.retry_count),
        rnr_retry_count: param.map_or(RETRIES, |param| param.rnr_retry_count),
        min_rnr_timer: RNR_TIMER,
        tos,
        ack_timeout,
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdma_connect(id: Option<&CmId>, param: Option<&ConnParam>) -> c_int {
    let Some(id) = id else { return refuse(libc::EINVAL) };
    let route = id.route.get();
    let (local, remote) = (addr::of(&route.src_addr), addr::of(&route.dst_addr));
    let (Some(opened), Some(remote)) = (opened(), remote) else { return refuse(libc::EINVAL) };
    if lock(&id.own.state).number.is_some() {
        return refuse(libc::EINVAL);
    }
    let asked = if is_datagram(id) {
        opened.soft.look_up(local, remote, &data_of(param))
    } else {
        let Some(wanted) = wanted(id, param, None) else { return refuse(libc::EINVAL) };
        opened.soft.connect(local, remote, &wanted)
    };
    match asked {
        Ok(number) => {
            lock(&id.own.state).number = Some(number);
            learn(id, number);
            complete(id)
        }
        Err(error) => refuse(error.errno().0),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_listen(id: Option<&CmId>, _backlog: c_int) -> c_int {
    let Some(id) = id else { return refuse(libc::EINVAL) };
    let Some(opened) = opened() else { return refuse(libc::ENODEV) };
    let Some(local) = addr::of(&id.route.get().src_addr) else { return refuse(libc::EINVAL) };
    let mut state = lock(&id.own.state);
    if state.number.is_some() {
        return refuse(libc::EINVAL);
    }
    let space = space(id);
    let listen = || match space {
        PortSpace::Tcp => opened.soft.listen(local),
        PortSpace::Udp => opened.soft.listen_datagrams(local),
    };
    let listened = match &opened.guest {
        // Requests come to the host first, which has to know whose they are.
        Some(guest) => guest
            .listen(space, local)
            .and_then(|()| listen().inspect_err(|_| guest.unlisten(space, local))),
        None => listen(),
    };
    match listened {
        Ok(number) => {
            state.number = Some(number);
            state.listens = opened.guest.is_some().then_some(local);
            drop(state);
            learn(id, number);
            0
        }
        Err(error) => refuse(error.errno().0),
    }
}

/// Refuses the peer of a request that the program does not get, for the reason in `errno`, and
/// forgets the event with it.
fn give_up(listen: &CmId, request: *const CmId) -> c_int {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
    rdma_destroy_ep(request.cast_mut());
    forget_event(listen);
    refuse(errno)
}

/// Waits for the next request of an id whose calls wait.
#[unsafe(no_mangle)]
extern "C" fn rdma_get_request(listen: Option<&CmId>, out: Option<&mut *const CmId>) -> c_int {
    let (Some(listen), Some(out)) = (listen, out) else { return refuse(libc::EINVAL) };
    if !listen.own.is_sync.get() {
        return refuse(libc::EINVAL);
    }
    forget_event(listen);
    let mut event = ptr::null_mut();
    // SAFETY: a channel is not destroyed before its ids.
    if rdma_get_cm_event(unsafe { listen.channel.get().as_ref() }, Some(&mut event)) != 0 {
        return -1;
    }
    listen.event.set(event);
    // SAFETY: just read.
    let CmEvent { event, id, status, .. } = unsafe { &*event };
    if *event != kind::CONNECT_REQUEST {
        return refuse(if *status == 0 { libc::EINVAL } else { status.saturating_abs() });
    }
    // SAFETY: made for the request.
    let new = unsafe { &**id };
    if rdma_migrate_id(Some(new), ptr::null()) != 0 {
        return give_up(listen, *id);
    }
    let request_qp = lock(&listen.own.state).request_qp;
    if let Some(ListenerQp { cap, qp_type, sq_sig_all, srq }) = request_qp {
        let mut attr = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: None,
            recv_cq: None,
            // SAFETY: a shared receive queue is not destroyed before the endpoints made with it.
            srq: srq.map(|srq| unsafe { &*srq.0 }),
            cap,
            qp_type,
            sq_sig_all,
        };
        if rdma_create_qp(Some(new), listen.pd.get(), Some(&mut attr)) != 0 {
            return give_up(listen, *id);
        }
    }
    *out = *id;
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_accept(id: Option<&CmId>, param: Option<&ConnParam>) -> c_int {
    let Some(id) = id else { return refuse(libc::EINVAL) };
    let Some(opened) = opened() else { return refuse(libc::ENODEV) };
    let (number, request) = {
        let state = lock(&id.own.state);
        (state.number, state.request.clone())
    };
    let (Some(number), Some(request)) = (number, request) else { return refuse(libc::EINVAL) };
    let Some(wanted) = wanted(id, param, Some(&request)) else { return refuse(libc::EINVAL) };
    if is_datagram(id) {
        let answered = opened.soft.answer(number, wanted.qpn, UDP_QKEY, &wanted.private_data);
        // Nothing happens after an answer that is out.
        return answered.map_or_else(
            |error| refuse(error.errno().0),
            |()| {
                lock(&id.own.state).request = None;
                0
            },
        );
    }
    match opened.soft.accept(number, &wanted) {
        Ok(()) => {
            lock(&id.own.state).request = None;
            complete(id)
        }
        Err(error) => refuse(error.errno().0),
    }
}

fn reject(id: Option<&CmId>, reason: RejectReason, at: *const c_void, len: u8) -> c_int {
    let (Some(id), Some(opened)) = (id, opened()) else { return refuse(libc::EINVAL) };
    let Some(number) = lock(&id.own.state).number else { return refuse(libc::EINVAL) };
    // SAFETY: as C has it.
    match opened.soft.reject_for(number, reason, &unsafe { data(at, len) }) {
        Ok(()) => {
            lock(&id.own.state).request = None;
            0
        }
        Err(error) => refuse(error.errno().0),
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_reject(id: Option<&CmId>, at: *const c_void, len: u8) -> c_int {
    reject(id, RejectReason::CONSUMER, at, len)
}

#[unsafe(no_mangle)]
extern "C" fn rdma_reject_ece(id: Option<&CmId>, at: *const c_void, len: u8) -> c_int {
    reject(id, RejectReason::VENDOR_OPTION, at, len)
}

/// Enhanced connection establishment is of vendors: no peer offers any.
#[unsafe(no_mangle)]
extern "C" fn rdma_get_remote_ece(
    id: Option<&CmId>,
    out: Option<&mut mem::MaybeUninit<[u32; 3]>>,
) -> c_int {
    let (Some(_), Some(out)) = (id, out) else { return refuse(libc::EINVAL) };
    out.write([0; 3]);
    0
}

/// There is nothing to offer a peer, which is what the queue pairs of this device say.
#[unsafe(no_mangle)]
extern "C" fn rdma_set_local_ece(id: Option<&CmId>, ece: Option<&[u32; 3]>) -> c_int {
    match (id, ece) {
        (Some(_), Some([0, _, 0])) => 0,
        (Some(_), Some(_)) => refuse(libc::EOPNOTSUPP),
        _ => refuse(libc::EINVAL),
    }
}

/// Completes a connect, after the program has made its queue pair ready.
#[unsafe(no_mangle)]
extern "C" fn rdma_establish(id: Option<&CmId>) -> c_int {
    let (Some(id), Some(opened)) = (id, opened()) else { return refuse(libc::EINVAL) };
    let number = lock(&id.own.state).number;
    let Some(number) = number.filter(|_| id.qp.get().is_null()) else {
        return refuse(libc::EINVAL);
    };
    opened.soft.establish(number).map_or_else(|error| refuse(error.errno().0), |()| 0)
}

/// The attributes of the transition to the state in `out` of the queue pair that belongs to an id.
#[unsafe(no_mangle)]
extern "C" fn rdma_init_qp_attr(
    id: Option<&CmId>,
    out: Option<&mut QpAttr>,
    given: Option<&mut c_int>,
) -> c_int {
    let (Some(id), Some(out), Some(given)) = (id, out, given) else { return refuse(libc::EINVAL) };
    let Some(opened) = opened().filter(|_| !id.verbs.get().is_null()) else {
        return refuse(libc::EINVAL);
    };
    let Some(to) = state(out.qp_state) else { return refuse(libc::EINVAL) };
    let number = lock(&id.own.state).number;
    if is_datagram(id) {
        let attr = datagram_attr(to);
        return attr.map_or_else(
            || refuse(libc::EINVAL),
            |attr| {
                (*out, *given) = transition_attr(opened, &attr);
                0
            },
        );
    }
    let mut attr = match (number, to) {
        (Some(number), _) => match opened.soft.connection_attr(number, to) {
            Ok(attr) => attr,
            Err(error) => return refuse(error.errno().0),
        },
        (None, QpState::Init) => Attr { state: Some(to), access: Some(RIGHTS), ..Attr::default() },
        (None, _) => return refuse(libc::EINVAL),
    };
    if to == QpState::Init {
        (attr.port, attr.pkey_index) = (Some(id.port_num.get()), Some(0));
        attr.access = attr.access.map(|access| (access & RIGHTS) | Access::LOCAL_WRITE);
    }
    attr.min_rnr_timer = attr.min_rnr_timer.map(|_| RNR_TIMER);
    let wanted = lock(&id.own.state).ack_timeout;
    attr.timeout = attr.timeout.map(|timeout| wanted.unwrap_or(timeout));
    (*out, *given) = transition_attr(opened, &attr);
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_disconnect(id: Option<&CmId>) -> c_int {
    let (Some(id), Some(opened)) = (id, opened()) else { return refuse(libc::EINVAL) };
    let number = lock(&id.own.state).number;
    let Some(number) = number.filter(|_| !is_datagram(id)) else { return refuse(libc::EINVAL) };
    match opened.soft.disconnect(number) {
        Ok(()) if lock(&id.own.state).is_over => 0,
        Ok(()) => complete(id),
        Err(error) => refuse(error.errno().0),
    }
}

/// A message has come on the queue pair of an accepted request, whose connection is established.
/// The device notices this by itself too.
#[unsafe(no_mangle)]
extern "C" fn rdma_notify(id: Option<&CmId>, event: c_uint) -> c_int {
    /// `IBV_EVENT_COMM_EST`.
    const COMM_EST: c_uint = 4;
    let (Some(id), Some(opened)) = (id, opened()) else { return refuse(libc::EINVAL) };
    let number = lock(&id.own.state).number;
    let Some(number) = number.filter(|_| event == COMM_EST) else { return refuse(libc::EINVAL) };
    match opened.soft.note_established(number) {
        Ok(true) => 0,
        Ok(false) => refuse(libc::EISCONN),
        Err(error) => refuse(error.errno().0),
    }
}
