//! Channels, and the events on them.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr;

use bowline_verbs::{CmEvent as Happened, CmId as Number, ConnRequest, Qpn};

use super::abi::{CmEvent, CmId, ConnParam, EventChannel, Param, UdParam};
use super::groups::{self, Joined};
use super::ids;
use super::queue_pairs::UDP_QKEY;
use crate::abi::AhAttr;
use crate::device::{Handle, Objects};
use crate::events::{Events, lock};
use crate::{fails, made, none};

/// `enum rdma_cm_event_type`.
pub(super) mod kind {
    use core::ffi::c_uint;

    pub(crate) const ADDR_RESOLVED: c_uint = 0;
    pub(crate) const ADDR_ERROR: c_uint = 1;
    pub(crate) const ROUTE_RESOLVED: c_uint = 2;
    pub(crate) const CONNECT_REQUEST: c_uint = 4;
    pub(crate) const CONNECT_RESPONSE: c_uint = 5;
    pub(crate) const UNREACHABLE: c_uint = 7;
    pub(crate) const REJECTED: c_uint = 8;
    pub(crate) const ESTABLISHED: c_uint = 9;
    pub(crate) const DISCONNECTED: c_uint = 10;
    pub(crate) const DEVICE_REMOVAL: c_uint = 11;
    pub(crate) const MULTICAST_JOIN: c_uint = 12;
    pub(crate) const MULTICAST_ERROR: c_uint = 13;
    pub(crate) const TIMEWAIT_EXIT: c_uint = 15;
}

/// An event that nobody has read.
#[derive(Debug)]
pub(crate) struct Pending {
    /// The id it is of; the listener of a request.
    pub(super) of: Handle<CmId>,
    pub(super) event: c_uint,
    pub(super) status: c_int,
    pub(super) request: Option<(Number, ConnRequest)>,
    /// What the peer has sent along.
    data: Vec<u8>,
    responder_resources: u8,
    initiator_depth: u8,
    /// The peer's queue pair.
    remote_qpn: u32,
    /// Queue key of a datagram service.
    qkey: u32,
    /// The group that was joined.
    pub(super) joined: Option<Joined>,
}

/// What is kept for a channel.
pub(crate) type ChannelOwn = Events<Pending>;

/// What is kept for an event that was read.
#[derive(Debug)]
pub(crate) struct EventOwn {
    /// The id that waits for its acknowledgement.
    of: Handle<CmId>,
    /// What the parameters point to.
    _data: Vec<u8>,
}

impl Pending {
    fn new(of: Handle<CmId>, event: c_uint, status: c_int) -> Self {
        Self {
            of,
            event,
            status,
            request: None,
            data: Vec::new(),
            responder_resources: 0,
            initiator_depth: 0,
            remote_qpn: 0,
            qkey: 0,
            joined: None,
        }
    }

    /// The number of the request, if it is one.
    pub(super) fn asks(&self) -> Option<Number> {
        self.request.as_ref().map(|(id, _)| *id)
    }
}

/// Adds an event to the channel of its id.
fn push(id: &CmId, event: Pending) {
    id.own.unacknowledged.add();
    // SAFETY: a channel is not destroyed before its ids.
    if let Some(channel) = unsafe { id.channel.get().as_ref() } {
        channel.own.push(event);
    }
}

/// Tells an id of what it did itself.
pub(super) fn push_own(id: &CmId, event: c_uint, status: c_int) {
    push(id, Pending::new(Handle(id), event, status));
}

/// Tells an id that it is a member of a group.
pub(super) fn push_joined(id: &CmId, joined: Joined) {
    let new = Pending::new(Handle(id), kind::MULTICAST_JOIN, 0);
    push(id, Pending { joined: Some(joined), ..new });
}

/// Takes what has happened to a connection to the channel of its id. What comes before the id is
/// known, which is while a connection is made, waits for it.
pub(crate) fn report(objects: &mut Objects, event: Happened) {
    let Some(event) = objects.sockets.report(event) else { return };
    let number = event.id();
    if let Happened::ConnectRequest { id, request } = event {
        let Some(listener) = objects.ids.get(&request.listener.0).copied() else {
            let early = objects.early.entry(request.listener.0).or_default();
            early.push(Happened::ConnectRequest { id, request });
            return;
        };
        objects.requests.insert(id.0, listener);
        let mut asks = Pending::new(listener, kind::CONNECT_REQUEST, 0);
        asks.request = Some((id, request));
        push(listener.get(objects), asks);
        return;
    }
    if let Some(listener) = objects.requests.get(&number.0).copied() {
        // The request has ended before the program has seen it.
        let listener = listener.get(objects);
        // SAFETY: a channel is not destroyed before its ids.
        if let Some(channel) = unsafe { listener.channel.get().as_ref() } {
            let gone = channel.own.take_back(|event| event.asks() == Some(number));
            listener.own.unacknowledged.acknowledge(gone);
            if gone > 0 {
                objects.requests.remove(&number.0);
                return;
            }
        }
    }
    match objects.ids.get(&number.0).copied() {
        Some(id) => push(id.get(objects), happened(id, event)),
        None => objects.early.entry(number.0).or_default().push(event),
    }
}

/// Tells all ids that the device is gone.
pub(crate) fn report_removal(objects: &Objects) {
    objects.sockets.report_removal();
    for id in objects.ids.values() {
        push(id.get(objects), Pending::new(*id, kind::DEVICE_REMOVAL, 0));
    }
}

/// Gives an id what has come before it was known.
pub(super) fn replay(objects: &mut Objects, number: Number) {
    for event in objects.early.remove(&number.0).unwrap_or_default() {
        report(objects, event);
    }
}

fn happened(of: Handle<CmId>, event: Happened) -> Pending {
    match event {
        Happened::Established { private_data, responder_resources, initiator_depth, .. } => {
            let new = Pending::new(of, kind::ESTABLISHED, 0);
            Pending { data: private_data, responder_resources, initiator_depth, ..new }
        }
        Happened::Responded {
            private_data,
            responder_resources,
            initiator_depth,
            remote_qpn,
            ..
        } => Pending {
            data: private_data,
            responder_resources,
            initiator_depth,
            remote_qpn: remote_qpn.0,
            ..Pending::new(of, kind::CONNECT_RESPONSE, 0)
        },
        Happened::Rejected { reason, private_data, .. } => {
            let new = Pending::new(of, kind::REJECTED, reason.0.into());
            Pending { data: private_data, ..new }
        }
        Happened::Found { private_data, qpn, qkey, .. } => {
            let new = Pending::new(of, kind::ESTABLISHED, 0);
            Pending { data: private_data, remote_qpn: qpn.0, qkey, ..new }
        }
        Happened::NotFound { status, private_data, .. } => {
            let new = Pending::new(of, kind::UNREACHABLE, status.into());
            Pending { data: private_data, ..new }
        }
        Happened::Unreachable { .. } => Pending::new(of, kind::UNREACHABLE, -libc::ETIMEDOUT),
        Happened::TimewaitExit { .. } => Pending::new(of, kind::TIMEWAIT_EXIT, 0),
        _ => Pending::new(of, kind::DISCONNECTED, 0),
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_create_event_channel() -> *mut EventChannel {
    match Events::new() {
        Ok(own) => made(EventChannel { fd: own.fd(), own }),
        Err(errno) => none(errno.raw_os_error()),
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_destroy_event_channel(channel: *mut EventChannel) {
    if !channel.is_null() {
        // SAFETY: made by `rdma_create_event_channel`, and given back once.
        drop(unsafe { Box::from_raw(channel) });
    }
}

fn read(pending: Pending) -> CmEvent {
    let Pending { of, mut event, mut status, request, mut data, remote_qpn, qkey, .. } = pending;
    let Pending { responder_resources, initiator_depth, .. } = pending;
    let mut conn = ConnParam {
        private_data: ptr::null(),
        private_data_len: 0,
        responder_resources,
        initiator_depth,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: remote_qpn,
    };
    let (mut id, mut listen_id) = (of.0, ptr::null());
    if let Some((number, request)) = request {
        conn.responder_resources = request.responder_resources;
        conn.initiator_depth = request.initiator_depth;
        conn.qp_num = request.remote_qpn.0;
        data.clone_from(&request.private_data);
        listen_id = of.0;
        // SAFETY: the listener waits with its end until the event is acknowledged.
        id = ids::requested(unsafe { &*of.0 }, number, &request);
    }
    if !data.is_empty() {
        conn.private_data = data.as_ptr().cast::<c_void>();
        conn.private_data_len = data.len() as u8; // at most 196
    }
    // The longer part first, so that all of it is written.
    let mut ud = UdParam {
        private_data: conn.private_data,
        private_data_len: conn.private_data_len,
        ah_attr: AhAttr::default(),
        qp_num: remote_qpn,
        qkey,
    };
    // SAFETY: the id waits with its end until the event is acknowledged.
    let about = unsafe { &*of.0 };
    let is_datagram = ids::is_datagram(about);
    if [kind::UNREACHABLE, kind::REJECTED, kind::DISCONNECTED].contains(&event) {
        lock(&about.own.state).is_over = true;
    }
    if is_datagram && event == kind::ESTABLISHED {
        ud.ah_attr = ids::way(about).unwrap_or_default();
    }
    if let Some(joined) = pending.joined {
        if !groups::begin(about, &joined) {
            (event, status) = (kind::MULTICAST_ERROR, -libc::EINVAL);
        }
        ud.private_data = ptr::with_exposed_provenance(joined.context);
        ud.ah_attr = groups::way(about, joined.group).unwrap_or_default();
        (ud.qp_num, ud.qkey) = (Qpn::MULTICAST.0, UDP_QKEY);
    }
    let mut param = Param { ud };
    if !is_datagram {
        param.conn = conn;
    }
    CmEvent { id, listen_id, event, status, param, own: EventOwn { of, _data: data } }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_get_cm_event(
    channel: Option<&EventChannel>,
    out: Option<&mut *mut CmEvent>,
) -> c_int {
    let (Some(channel), Some(out)) = (channel, out) else {
        fails(libc::EINVAL);
        return -1;
    };
    match channel.own.next() {
        Ok(pending) => {
            *out = made(read(pending));
            0
        }
        Err(errno) => {
            fails(errno.raw_os_error());
            -1
        }
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_ack_cm_event(event: *mut CmEvent) -> c_int {
    if event.is_null() {
        fails(libc::EINVAL);
        return -1;
    }
    // SAFETY: made by `rdma_get_cm_event`, and given back once.
    let event = unsafe { Box::from_raw(event) };
    // SAFETY: the id waits with its end for this.
    unsafe { &*event.own.of.0 }.own.unacknowledged.acknowledge(1);
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    const WORDS: [&CStr; 16] = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    ];
    WORDS.get(event as usize).copied().unwrap_or(c"UNKNOWN EVENT").as_ptr()
}
