//! Ids: made, bound to addresses, moved to other channels, destroyed.

use core::cell::Cell;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::process;
use std::sync::Mutex;

use bowline_roce_driver::PortSpace;
use bowline_verbs::{AddressVector, CmId as Number, ConnRequest, Device as _, PdId, Qpn};

use super::abi::{CmEvent, CmId, EventChannel, Route};
use super::addr;
use super::events::{
    kind, push_own, rdma_ack_cm_event, rdma_create_event_channel, rdma_destroy_event_channel,
    rdma_get_cm_event, replay,
};
use super::groups::{self, Joined};
use super::queue_pairs::{self, ListenerQp};
use super::shared_receives;
use crate::abi::{AhAttr, Context, Pd, Qp};
use crate::device::{self, Handle, Opened, first, ibv_open_device};
use crate::events::{Unacknowledged, lock};
use crate::memory::ibv_alloc_pd;
use crate::queue_pair::address;
use crate::{fails, made};

/// `enum rdma_port_space`.
const PS_TCP: c_uint = 0x0106;
const PS_UDP: c_uint = 0x0111;
const PS_IB: c_uint = 0x013f;
/// `IBV_QPT_RC` and `IBV_QPT_UD`.
const QPT_RC: c_uint = 2;
const QPT_UD: c_uint = 4;
/// `RDMA_OPTION_ID` and what is set there.
const OPTION_ID: c_int = 0;
const OPTION_TOS: c_int = 0;
const OPTION_REUSEADDR: c_int = 1;
const OPTION_AFONLY: c_int = 2;
const OPTION_ACK_TIMEOUT: c_int = 3;
/// Largest code of a timeout, of 5 bits.
const ACK_TIMEOUT_MAX: u8 = 31;
/// The default partition, big-endian.
const PKEY: u16 = 0xffff;
/// Ports that the system gives away.
const EPHEMERAL: std::ops::Range<u16> = 32768..61000;

/// What is kept for an id.
#[derive(Debug, Default)]
pub(crate) struct Own {
    pub(super) state: Mutex<State>,
    pub(super) unacknowledged: Unacknowledged,
    /// Its channel is its own, and its calls wait for their event.
    pub(super) is_sync: Cell<bool>,
}

/// What changes of an id.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Of the listener or connection.
    pub(super) number: Option<Number>,
    pub(super) tos: u8,
    /// Code of the acknowledgement timeout that the program wants.
    pub(super) ack_timeout: Option<u8>,
    /// Where requests come to this process of all that share the addresses.
    pub(super) listens: Option<SocketAddr>,
    /// Port that no other id may be bound to.
    port: Option<u16>,
    /// The program has heard that the connection has ended or was not made, after which no event
    /// about its end comes.
    pub(super) is_over: bool,
    /// What a peer asks for, until it is answered.
    pub(super) request: Option<ConnRequest>,
    /// Number of its queue pair, which a program may have destroyed without it.
    pub(super) qpn: Option<Qpn>,
    /// Multicast groups that it has joined.
    pub(super) groups: Vec<Joined>,
    /// Queue pairs for the requests of a listener.
    pub(super) request_qp: Option<ListenerQp>,
}

/// The context of all ids: as long as the process.
#[derive(Clone, Copy)]
pub(super) struct Verbs {
    pub(super) context: Handle<Context>,
    pub(super) pd: Handle<Pd>,
}

/// Returns the context that all ids share, which is opened when it is first asked for; in a child
/// of `fork` once more.
pub(super) fn verbs() -> Option<Verbs> {
    static VERBS: Mutex<(u32, Option<Verbs>)> = Mutex::new((0, None));
    let mut verbs = lock(&VERBS);
    if verbs.0 != process::id() {
        let context: *const Context = ibv_open_device(first());
        // SAFETY: null or just made.
        let pd = ibv_alloc_pd(unsafe { context.as_ref() });
        let new = (!pd.is_null()).then_some(Verbs { context: Handle(context), pd: Handle(pd) });
        *verbs = (process::id(), new);
    }
    verbs.1
}

pub(crate) fn opened() -> Option<&'static Opened> {
    // SAFETY: never closed.
    verbs().map(|verbs| &*unsafe { &*verbs.context.0 }.own.opened)
}

/// Returns the protection domain that all ids share.
pub(crate) fn pd() -> Option<PdId> {
    // SAFETY: never freed.
    verbs().map(|verbs| unsafe { &*verbs.pd.0 }.own.id)
}

/// Ports of ids that are bound or listen.
static PORTS: Mutex<Option<HashSet<u16>>> = Mutex::new(None);

/// Takes a port, or any that is free for 0.
fn take_port(port: u16) -> Option<u16> {
    let mut ports = lock(&PORTS);
    let ports = ports.get_or_insert_default();
    if port != 0 {
        return Some(port);
    }
    let random = bowline_base::entropy::random_bytes::<2>().unwrap_or_default();
    let begin = u16::from_ne_bytes(random) % (EPHEMERAL.end - EPHEMERAL.start);
    let mut all = EPHEMERAL.clone().cycle().skip(begin.into()).take(EPHEMERAL.len());
    let port = all.find(|port| !ports.contains(port))?;
    ports.insert(port);
    Some(port)
}

fn give_back(port: Option<u16>) {
    if let (Some(port), Some(ports)) = (port, lock(&PORTS).as_mut()) {
        ports.remove(&port);
    }
}

/// A port of a socket, until this is dropped.
#[derive(Debug)]
pub(crate) struct Port {
    number: u16,
    /// The program has not chosen it.
    is_any: bool,
}

impl Port {
    /// Takes a port, or any that is free for 0.
    pub(crate) fn take(port: u16) -> Option<Self> {
        Some(Self { number: take_port(port)?, is_any: port == 0 })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        give_back(self.is_any.then_some(self.number));
    }
}

fn new(channel: *const EventChannel, context: *mut c_void, ps: c_uint, is_sync: bool) -> *mut CmId {
    let route = Route {
        src_addr: addr::none(),
        dst_addr: addr::none(),
        sgid: Default::default(),
        dgid: Default::default(),
        pkey: 0,
        path_rec: ptr::null(),
        num_paths: 0,
    };
    made(CmId {
        verbs: Cell::new(ptr::null()),
        channel: Cell::new(channel),
        context: Cell::new(context),
        qp: Cell::new(ptr::null_mut()),
        route: Cell::new(route),
        ps,
        port_num: Cell::new(0),
        event: Cell::new(ptr::null_mut()),
        send_cq_channel: Cell::new(ptr::null_mut()),
        send_cq: Cell::new(ptr::null_mut()),
        recv_cq_channel: Cell::new(ptr::null_mut()),
        recv_cq: Cell::new(ptr::null_mut()),
        srq: Cell::new(ptr::null()),
        pd: Cell::new(ptr::null()),
        qp_type: Cell::new(if ps == PS_UDP { QPT_UD } else { QPT_RC }),
        own: Own { is_sync: Cell::new(is_sync), ..Own::default() },
    })
}

/// Sets `errno` and returns what these calls return then.
pub(super) fn refuse(errno: c_int) -> c_int {
    fails(errno);
    -1
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_create_id(
    channel: *const EventChannel,
    out: Option<&mut *mut CmId>,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    let Some(out) = out else { return refuse(libc::EINVAL) };
    if ![PS_TCP, PS_UDP, PS_IB].contains(&ps) {
        return refuse(libc::EOPNOTSUPP);
    }
    if verbs().is_none() {
        return refuse(libc::ENODEV);
    }
    let (channel, is_sync) = if channel.is_null() {
        (rdma_create_event_channel().cast_const(), true)
    } else {
        (channel, false)
    };
    if channel.is_null() {
        return -1;
    }
    *out = new(channel, context, ps, is_sync);
    0
}

/// The ports that an id has one of.
pub(super) fn space(id: &CmId) -> PortSpace {
    if is_datagram(id) { PortSpace::Udp } else { PortSpace::Tcp }
}

/// Tells whether an id is of a datagram service, which is looked up where others connect.
pub(super) fn is_datagram(id: &CmId) -> bool {
    id.ps == PS_UDP
}

/// Makes the id of a request.
pub(super) fn requested(listener: &CmId, number: Number, request: &ConnRequest) -> *const CmId {
    let id = new(listener.channel.get(), listener.context.get(), listener.ps, false);
    // SAFETY: just made.
    let made = unsafe { &*id };
    bind(made, request.local);
    aim(made, request.remote);
    let mut state = lock(&made.own.state);
    state.number = Some(number);
    state.request = Some(request.clone());
    drop(state);
    learn(id, number);
    id
}

/// Has events of a connection come to an id.
pub(super) fn learn(id: *const CmId, number: Number) {
    if let Some(opened) = opened() {
        let mut objects = lock(&opened.live.0);
        objects.requests.remove(&number.0);
        objects.ids.insert(number.0, Handle(id));
        replay(&mut objects, number);
    }
}

/// Gives an id its own address, and the device with it.
pub(super) fn bind(id: &CmId, local: SocketAddr) {
    let mut route = id.route.get();
    route.src_addr = addr::storage(local);
    if !local.ip().is_unspecified() {
        route.sgid = device::gid(local.ip());
        route.pkey = PKEY;
        if let Some(verbs) = verbs() {
            id.verbs.set(verbs.context.0);
            id.pd.set(verbs.pd.0);
            id.port_num.set(1);
        }
    }
    id.route.set(route);
}

/// Gives an id its peer's address.
fn aim(id: &CmId, remote: SocketAddr) {
    let mut route = id.route.get();
    route.dst_addr = addr::storage(remote);
    route.dgid = device::gid(remote.ip());
    id.route.set(route);
}

/// The way to the peer of an id, for datagrams.
pub(super) fn way(id: &CmId) -> Option<AhAttr> {
    let route = id.route.get();
    let (local, remote) = (addr::of(&route.src_addr)?, addr::of(&route.dst_addr)?);
    let tos = lock(&id.own.state).tos;
    let way = AddressVector { local: local.ip(), remote: remote.ip(), flow_label: 0, tos };
    Some(address(opened()?, &way))
}

pub(crate) fn is_own(ip: IpAddr) -> bool {
    opened().is_some_and(|opened| opened.gids.iter().any(|at| at.addr == ip.to_canonical()))
}

/// An address of the device from which another one may be reached although the system would not
/// send from it: where the device has some of the machine's addresses only.
fn near(remote: IpAddr) -> Option<IpAddr> {
    let is_near = |ip: &IpAddr| {
        let is_reached = remote.is_multicast() || ip.is_loopback() == remote.is_loopback();
        ip.is_ipv4() == remote.is_ipv4() && is_reached
    };
    opened()?.gids.iter().map(|at| at.addr).find(is_near)
}

/// The address of the device from which a peer is reached: the given one, or that of the system.
pub(crate) fn source(given: Option<IpAddr>, remote: SocketAddr) -> Option<IpAddr> {
    let found = match given.filter(|ip| !ip.is_unspecified()) {
        Some(ip) => Some(ip),
        None => addr::source_for(remote).filter(|ip| is_own(*ip)).or_else(|| near(remote.ip())),
    };
    found.filter(|ip| is_own(*ip))
}

/// Binds to an address; 0, or an errno.
fn bind_to(id: &CmId, mut local: SocketAddr) -> c_int {
    if !local.ip().is_unspecified() && !is_own(local.ip()) {
        return libc::EADDRNOTAVAIL;
    }
    let mut state = lock(&id.own.state);
    if state.port.is_some() || state.number.is_some() {
        return libc::EINVAL;
    }
    let Some(port) = take_port(local.port()) else { return libc::EADDRNOTAVAIL };
    if local.port() == 0 {
        state.port = Some(port);
    }
    drop(state);
    local.set_port(port);
    bind(id, local);
    0
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_bind_addr(id: Option<&CmId>, local: *const libc::sockaddr) -> c_int {
    // SAFETY: as C has it.
    let (Some(id), Some(local)) = (id, unsafe { addr::given(local) }) else {
        return refuse(libc::EINVAL);
    };
    match bind_to(id, local) {
        0 => 0,
        errno => refuse(errno),
    }
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_resolve_addr(
    id: Option<&CmId>,
    source: *const libc::sockaddr,
    destination: *const libc::sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: as C has it.
    let source = unsafe { addr::given(source) };
    // SAFETY: as C has it.
    let destination = unsafe { addr::given(destination) };
    let (Some(id), Some(remote)) = (id, destination) else { return refuse(libc::EINVAL) };
    let bound = addr::of(&id.route.get().src_addr);
    let wanted = source.or(bound);
    let port = wanted.map_or(0, |at| at.port());
    match self::source(wanted.map(|at| at.ip()), remote) {
        Some(ip) => {
            let local = SocketAddr::new(ip, port);
            if bound.is_none() {
                let failure = bind_to(id, local);
                if failure != 0 {
                    return refuse(failure);
                }
            } else {
                bind(id, local);
            }
            aim(id, remote);
            push_own(id, kind::ADDR_RESOLVED, 0);
        }
        None => push_own(id, kind::ADDR_ERROR, -libc::ENODEV),
    }
    complete(id)
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_resolve_route(id: Option<&CmId>, _timeout_ms: c_int) -> c_int {
    let Some(id) = id else { return refuse(libc::EINVAL) };
    if id.verbs.get().is_null() || addr::of(&id.route.get().dst_addr).is_none() {
        return refuse(libc::EINVAL);
    }
    push_own(id, kind::ROUTE_RESOLVED, 0);
    complete(id)
}

/// Waits for the event of a call, where the calls of an id do that; it stays with the id until the
/// next one.
pub(super) fn complete(id: &CmId) -> c_int {
    if !id.own.is_sync.get() {
        return 0;
    }
    forget_event(id);
    let mut event = ptr::null_mut();
    // SAFETY: a channel is not destroyed before its ids.
    if rdma_get_cm_event(unsafe { id.channel.get().as_ref() }, Some(&mut event)) != 0 {
        return -1;
    }
    id.event.set(event);
    // SAFETY: just read.
    let CmEvent { event, status, .. } = unsafe { &*event };
    match (*event, *status) {
        (_, 0) => 0,
        (kind::REJECTED, _) => refuse(libc::ECONNREFUSED),
        (_, status) => refuse(status.saturating_abs()),
    }
}

/// Acknowledges the event that an id has.
pub(super) fn forget_event(id: &CmId) {
    let event = id.event.replace(ptr::null_mut());
    if !event.is_null() {
        rdma_ack_cm_event(event);
    }
}

/// Ends the connection or listener of an id: no more events of it come.
pub(super) fn end(id: &CmId) {
    let mut state = lock(&id.own.state);
    let (number, listens) = (state.number.take(), state.listens.take());
    drop(state);
    let Some(number) = number else { return };
    if let Some(opened) = opened() {
        if let (Some(guest), Some(at)) = (&opened.guest, listens) {
            guest.unlisten(space(id), at);
        }
        // A number that is not known has ended before.
        let _ = opened.soft.destroy_id(number);
        let mut objects = lock(&opened.live.0);
        objects.ids.remove(&number.0);
        objects.early.remove(&number.0);
        objects.requests.retain(|_, listener| !ptr::eq(listener.0, id));
    }
}

/// Ends the connection, if there is one, whose queue pair a program destroys; returns whether there
/// was.
pub(crate) fn release(opened: &Opened, qp: *const Qp) -> bool {
    let objects = lock(&opened.live.0);
    let has_qp = |id: &&Handle<CmId>| ptr::eq(id.get(&objects).qp.get(), qp);
    let found = objects.ids.values().find(has_qp).copied();
    drop(objects);
    // SAFETY: a program does not destroy an id while it destroys its queue pair.
    found.map(|id| end(unsafe { &*id.0 })).is_some()
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_destroy_id(id: *mut CmId) -> c_int {
    // SAFETY: null or made here.
    let Some(at) = (unsafe { id.as_ref() }) else { return refuse(libc::EINVAL) };
    end(at);
    groups::leave_all(at);
    forget_event(at);
    let channel = at.channel.get();
    // SAFETY: a channel is not destroyed before its ids.
    if let Some(channel) = unsafe { channel.as_ref() } {
        let unread = channel.own.take_back(|event| ptr::eq(event.of.0, at));
        at.own.unacknowledged.acknowledge(unread);
    }
    at.own.unacknowledged.wait_for_all();
    give_back(lock(&at.own.state).port.take());
    if at.own.is_sync.get() {
        rdma_destroy_event_channel(channel.cast_mut());
    }
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(id) });
    0
}

/// Moves an id, with the events that nobody has read, to another channel, or to one of its own.
#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_migrate_id(id: Option<&CmId>, channel: *const EventChannel) -> c_int {
    let Some(id) = id else { return refuse(libc::EINVAL) };
    let is_sync = channel.is_null();
    if is_sync && id.own.is_sync.get() {
        return refuse(libc::EINVAL);
    }
    let channel = if is_sync { rdma_create_event_channel().cast_const() } else { channel };
    if channel.is_null() {
        return -1;
    }
    let Some(opened) = opened() else { return refuse(libc::ENODEV) };
    // No event is added to either channel while this lock is held.
    let objects = lock(&opened.live.0);
    let former = id.channel.replace(channel);
    // SAFETY: a channel is not destroyed before its ids.
    let from = unsafe { former.as_ref() };
    // SAFETY: just given or made.
    let to = unsafe { channel.as_ref() };
    if let (Some(from), Some(to)) = (from, to) {
        from.own.move_to(&to.own, |event| ptr::eq(event.of.0, id));
    }
    drop(objects);
    if id.own.is_sync.replace(is_sync) {
        forget_event(id);
        rdma_destroy_event_channel(former.cast_mut());
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn rdma_set_option(
    id: Option<&CmId>,
    level: c_int,
    option: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    let Some(id) = id.filter(|_| !value.is_null() && len > 0) else { return refuse(libc::EINVAL) };
    match (level, option) {
        (OPTION_ID, OPTION_TOS) if len == 1 => {
            // SAFETY: the program gives one byte.
            lock(&id.own.state).tos = unsafe { value.cast::<u8>().read() };
            0
        }
        // Ports are of ids that listen, and each address family has its own.
        (OPTION_ID, OPTION_REUSEADDR | OPTION_AFONLY) if len == size_of::<c_int>() => 0,
        // The longest that a packet waits; the device measures its peers.
        (OPTION_ID, OPTION_ACK_TIMEOUT) if len == 1 => {
            // SAFETY: the program gives one byte.
            let code = unsafe { value.cast::<u8>().read() };
            if code > ACK_TIMEOUT_MAX {
                return refuse(libc::EINVAL);
            }
            lock(&id.own.state).ack_timeout = Some(code);
            0
        }
        (OPTION_ID, OPTION_TOS..=OPTION_ACK_TIMEOUT) => refuse(libc::EINVAL),
        _ => refuse(libc::ENOSYS),
    }
}

fn port(storage: &super::abi::Storage) -> u16 {
    addr::of(storage).map_or(0, |at| at.port().to_be())
}

#[unsafe(no_mangle)]
extern "C" fn rdma_get_src_port(id: Option<&CmId>) -> u16 {
    id.map_or(0, |id| port(&id.route.get().src_addr))
}

#[unsafe(no_mangle)]
extern "C" fn rdma_get_dst_port(id: Option<&CmId>) -> u16 {
    id.map_or(0, |id| port(&id.route.get().dst_addr))
}

/// A list of contexts that ends with null.
#[unsafe(no_mangle)]
extern "C" fn rdma_get_devices(count: Option<&mut c_int>) -> *mut *const Context {
    let found = verbs();
    if let Some(count) = count {
        *count = c_int::from(found.is_some());
    }
    made([found.map_or(ptr::null(), |verbs| verbs.context.0), ptr::null()]).cast()
}

#[unsafe(no_mangle)]
extern "C" fn rdma_free_devices(list: *mut *const Context) {
    if !list.is_null() {
        // SAFETY: made by `rdma_get_devices`, and given back once.
        drop(unsafe { Box::from_raw(list.cast::<[*const Context; 2]>()) });
    }
}

/// Destroys an id, its queue pair and its shared receive queue.
#[unsafe(no_mangle)]
pub(super) extern "C" fn rdma_destroy_ep(id: *mut CmId) {
    // SAFETY: null or made here.
    if let Some(at) = unsafe { id.as_ref() } {
        queue_pairs::destroy(at);
        shared_receives::destroy(at);
        rdma_destroy_id(id);
    }
}
