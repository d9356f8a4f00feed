//! The device of this process: found, opened and closed.

use core::ffi::{c_char, c_int};
use core::{mem, ptr};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;
use std::{env, fs, io, process};

use bowline_base::Errno;
use bowline_roce_driver::{
    Guest, Impairments, Joined, Seen, SoftConfig, SoftDevice, Watch, machine_addrs, node_guid,
};
use bowline_verbs::{AsyncEvent, CmEvent, CqId, Device as _, DeviceAttr};

use crate::abi::{self, Context, ContextOps, Cq, Device, Gid, Qp, Srq, VerbsContext};
use crate::cm::{self, abi::CmId};
use crate::events::{Events, Unacknowledged, lock};
use crate::rsocket::Signals;
use crate::{completion, memory, post, query, queue_pair};
use crate::{failed, fails, made, none};

/// Variable with the addresses of the device, separated by commas.
const ADDRS: &str = "BOWLINE_VERBS_ADDRS";
/// Variables with what the network does to packets by choice, and with the number that chooses
/// them.
const IMPAIR: &str = "BOWLINE_VERBS_IMPAIR";
const SEED: &str = "BOWLINE_VERBS_SEED";
/// Variable with the file to which packets are written.
const CAPTURE: &str = "BOWLINE_VERBS_CAPTURE";
/// How long connecting waits for the other program to listen: it may have been started at the same
/// moment, and there is no network between that takes as long as its start.
const LISTENER_PATIENCE: Duration = Duration::from_millis(500);
/// Variable with the socket of the node whose addresses this process shares.
const NODE: &str = "BOWLINE_VERBS_NODE";
/// Variable with the folder of the files that programs find in /sys (`bowline run` makes it).
const FILES: &str = "BOWLINE_VERBS_FILES";
const NAME: &str = "bowline0";
/// `IBV_NODE_CA`.
const NODE_CA: c_int = 1;

/// `enum ibv_event_type`.
mod event {
    pub(super) const CQ_ERR: u32 = 0;
    pub(super) const QP_FATAL: u32 = 1;
    pub(super) const COMM_EST: u32 = 4;
    pub(super) const SQ_DRAINED: u32 = 5;
    pub(super) const DEVICE_FATAL: u32 = 8;
    pub(super) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(super) const QP_LAST_WQE_REACHED: u32 = 16;
}

/// An entry of the table of GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GidAt {
    pub(crate) addr: IpAddr,
    /// Index of the interface.
    pub(crate) link: u32,
}

/// An object of a program, by its address.
pub(crate) struct Handle<T>(pub(crate) *const T);

impl<T> core::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

// SAFETY: the objects may be used by all threads: what changes in them is atomic or locked.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// The object, which is alive: it takes itself out of [`Live`] before it is freed, and this is
    /// called with the lock of that held.
    pub(crate) fn get(self, _live: &Objects) -> &T {
        // SAFETY: see above.
        unsafe { &*self.0 }
    }
}

/// What the program has made, for events.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub(crate) qps: HashMap<u32, Handle<Qp>>,
    pub(crate) cqs: HashMap<u32, Handle<Cq>>,
    pub(crate) srqs: HashMap<u32, Handle<Srq>>,
    contexts: Vec<Handle<Context>>,
    /// Ids of connections and listeners.
    pub(crate) ids: HashMap<u32, Handle<CmId>>,
    /// Requests that no program has seen, and their listeners.
    pub(crate) requests: HashMap<u32, Handle<CmId>>,
    /// What has happened to connections that have no id yet.
    pub(crate) early: HashMap<u32, Vec<CmEvent>>,
    /// Sockets over RDMA.
    pub(crate) sockets: Signals,
}

/// The same, behind a lock: the watcher of the device.
#[derive(Debug, Default)]
pub(crate) struct Live(pub(crate) Mutex<Objects>);

impl Watch for Live {
    fn completion(&self, cq: CqId) {
        let objects = lock(&self.0);
        if let Some(cq) = objects.cqs.get(&cq.0) {
            completion::report(cq.get(&objects));
        } else {
            objects.sockets.report_completion(cq);
        }
    }

    fn event(&self, event: AsyncEvent) {
        let objects = lock(&self.0);
        let qp = |qpn: u32, event_type| {
            let qp = objects.qps.get(&qpn).map(|qp| (qp.0 as usize, qp.get(&objects).context));
            qp.map(|(element, context)| (context, abi::AsyncEvent { element, event_type }))
        };
        let for_one = match event {
            AsyncEvent::QpFatal(of) => qp(of.0, event::QP_FATAL),
            AsyncEvent::CommEstablished(of) => qp(of.0, event::COMM_EST),
            AsyncEvent::SqDrained(of) => qp(of.0, event::SQ_DRAINED),
            AsyncEvent::LastWqeReached(of) => qp(of.0, event::QP_LAST_WQE_REACHED),
            AsyncEvent::SrqLimitReached(of) => objects.srqs.get(&of.0).map(|srq| {
                let element = srq.0 as usize;
                let event = abi::AsyncEvent { element, event_type: event::SRQ_LIMIT_REACHED };
                (srq.get(&objects).context, event)
            }),
            AsyncEvent::CqError(of) => objects.cqs.get(&of.0).map(|cq| {
                let element = cq.0 as usize;
                let event = abi::AsyncEvent { element, event_type: event::CQ_ERR };
                (cq.get(&objects).context, event)
            }),
            _ => None,
        };
        if event == AsyncEvent::DeviceFatal {
            cm::report_removal(&objects);
            objects.cqs.values().for_each(|cq| completion::report(cq.get(&objects)));
        }
        for context in &objects.contexts {
            let events = &context.get(&objects).own.events;
            match for_one {
                Some((of, event)) if ptr::eq(of, context.0) => {
                    match element(&event) {
                        Element::Qp(qp) => qp.own.unacknowledged.add(),
                        Element::Cq(cq) => cq.own.unacknowledged.add(),
                        Element::Srq(srq) => srq.own.unacknowledged.add(),
                        Element::Device => {}
                    }
                    events.push(event);
                }
                None if event == AsyncEvent::DeviceFatal => {
                    events.push(abi::AsyncEvent { element: 1, event_type: event::DEVICE_FATAL });
                }
                _ => {}
            }
        }
    }

    fn connection(&self, event: CmEvent) {
        cm::report(&mut lock(&self.0), event);
    }
}

/// The open device, which all contexts of the process share.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) soft: Arc<SoftDevice>,
    /// Among other processes with the same addresses.
    pub(crate) guest: Option<Guest>,
    pub(crate) attr: DeviceAttr,
    pub(crate) gids: Vec<GidAt>,
    pub(crate) live: Arc<Live>,
    /// The process that has opened it.
    process: u32,
}

impl Drop for Opened {
    /// A child of `fork` has a copy without the threads, and its end is no matter of the parent's
    /// device, with which it shares the descriptors.
    fn drop(&mut self) {
        if self.process != process::id() {
            mem::forget(Arc::clone(&self.soft));
            mem::forget(self.guest.take());
        }
    }
}

/// What is kept for a context.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) opened: Arc<Opened>,
    pub(crate) events: Events<abi::AsyncEvent>,
}

static OPENED: Mutex<Weak<Opened>> = Mutex::new(Weak::new());

/// The GID of an address.
pub(crate) fn gid(addr: IpAddr) -> Gid {
    Gid(match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    })
}

/// The address of a GID.
pub(crate) fn addr(gid: &Gid) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid.0)).to_canonical()
}

/// The addresses of the device: those of the settings, or all of the machine, in an order in which
/// programs that take the first one reach others.
fn gids() -> Vec<GidAt> {
    let machine = machine_addrs();
    if let Ok(text) = env::var(ADDRS) {
        let addrs = text.split(',').filter_map(|word| word.trim().parse::<IpAddr>().ok());
        let link = |addr| machine.iter().find(|(of, _)| *of == addr).map_or(0, |(_, link)| *link);
        return addrs.map(|addr| GidAt { addr, link: link(addr) }).collect();
    }
    machine.into_iter().map(|(addr, link)| GidAt { addr, link }).collect()
}

/// Calls with all signals blocked, and so are those of threads that are started in it.
pub(crate) fn without_signals<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: numbers, for which zeroes are good.
    let (mut all, mut former) = unsafe { mem::zeroed::<(libc::sigset_t, libc::sigset_t)>() };
    // SAFETY: writes the set.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: reads one set and writes the other.
    let is_blocked =
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut former) } == 0;
    let done = call();
    if is_blocked {
        // SAFETY: reads the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const former, ptr::null_mut()) };
    }
    done
}

fn is_link_local(addr: IpAddr) -> bool {
    matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local())
}

/// Where the node is asked whose addresses this process shares.
fn node() -> Option<PathBuf> {
    env::var_os(NODE).filter(|path| !path.is_empty()).map(PathBuf::from)
}

fn at_node(path: &Path) -> String {
    format!("the node at {}", path.display())
}

/// Why the node gives this process nothing.
fn refused(node: &Path, error: io::Error) -> bowline_verbs::Error {
    use bowline_verbs::Error;

    let at = at_node(node);
    match error.downcast::<Error>() {
        Ok(Error::System { what, errno }) => Error::System { what: format!("{at}: {what}"), errno },
        Ok(error) => error,
        Err(error) => Error::System { errno: Errno::of(&error), what: format!("{at}: {error}") },
    }
}

/// What the network does to this process's packets by the user's choice.
fn impairments() -> Result<Impairments, bowline_verbs::Error> {
    let of = |name| env::var(name).unwrap_or_default();
    let seed = of(SEED);
    let seed = if seed.is_empty() { Ok(0) } else { seed.parse() };
    let wrong = |why: String| bowline_verbs::Error::System { what: why, errno: Errno::EINVAL };
    let seed = seed.map_err(|_| wrong(format!("{SEED} is no number")))?;
    Impairments::parse(&of(IMPAIR), seed).map_err(|error| wrong(format!("{IMPAIR}: {error}")))
}

/// Where this process's packets are written. Another process may write to the file already.
fn capture() -> Option<PathBuf> {
    let path = env::var_os(CAPTURE).filter(|path| !path.is_empty()).map(PathBuf::from)?;
    let is_mine = fs::File::create_new(&path).is_ok();
    let mut own = path.clone().into_os_string();
    own.push(format!(".{}", process::id()));
    Some(if is_mine { path } else { own.into() })
}

impl Opened {
    fn new() -> Result<Self, bowline_verbs::Error> {
        let mut config = SoftConfig {
            name: NAME.to_owned(),
            guid: guid_in_files(),
            impairments: impairments()?,
            capture: capture(),
            ..SoftConfig::default()
        };
        config.core.cm.listener_patience = LISTENER_PATIENCE;
        let (soft, guest, gids) = match node() {
            None => {
                let gids = gids();
                let config = SoftConfig {
                    addrs: gids.iter().map(|at| at.addr).collect(),
                    links: gids
                        .iter()
                        .filter(|at| is_link_local(at.addr))
                        .map(|at| (at.addr, at.link))
                        .collect(),
                    ..config
                };
                (Arc::new(SoftDevice::open(config)?), None, gids)
            }
            Some(path) => {
                let joined = Joined::at(&path).map_err(|error| refused(&path, error))?;
                let link = |addr| machine_addrs().iter().find(|(of, _)| *of == addr).map(|at| at.1);
                let addrs = joined.addrs().iter().map(|(addr, _)| *addr);
                let gids =
                    addrs.map(|addr| GidAt { addr, link: link(addr).unwrap_or(0) }).collect();
                let (guest, soft) = joined.open(config)?;
                (soft, Some(guest), gids)
            }
        };
        let live = Arc::new(Live::default());
        soft.watch(Arc::<Live>::clone(&live));
        Ok(Self { attr: soft.attr(), soft, guest, gids, live, process: process::id() })
    }

    fn shared() -> Result<Arc<Self>, bowline_verbs::Error> {
        let mut opened = lock(&OPENED);
        // A child of `fork` opens a device of its own.
        let mine = opened.upgrade().filter(|opened| opened.process == process::id());
        if let Some(opened) = mine.filter(|opened| !opened.soft.is_closed()) {
            return Ok(opened);
        }
        // The device's threads leave signals to the program's.
        let new = without_signals(Self::new)?;
        let new = Arc::new(new);
        *opened = Arc::downgrade(&new);
        Ok(new)
    }

    /// The entry of a GID that a program chooses.
    pub(crate) fn gid(&self, index: u32) -> Option<GidAt> {
        self.gids.get(index as usize).copied()
    }
}

/// Writes a name as C has it; what does not fit is left out.
pub(crate) fn text<const N: usize>(name: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().take(N - 1).zip(name.bytes()) {
        *to = from.cast_signed();
    }
    out
}

/// The device, which is there if it has an address.
pub(crate) fn first() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Handle<Device>>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        if gids().is_empty() {
            return None;
        }
        let device = Device {
            ops: [ptr::null(); 2],
            node_type: NODE_CA,
            transport_type: 0,
            name: text(NAME),
            dev_name: text("uverbs0"),
            dev_path: text("/sys/class/infiniband_verbs/uverbs0"),
            ibdev_path: text("/sys/class/infiniband/bowline0"),
        };
        Some(Handle(Box::leak(Box::new(device))))
    });
    // SAFETY: never freed.
    device.map(|device| unsafe { &*device.0 })
}

/// Tells whether the device may be opened: as the system shows no device that is gone, there is
/// none without its node, or where the node refuses this process. The user learns why.
fn is_served() -> bool {
    let is_open = lock(&OPENED).upgrade().is_some_and(|opened| !opened.soft.is_closed());
    let Some(node) = node().filter(|_| !is_open) else { return true };
    let seen = Seen::at(&node);
    if let Err(error) = &seen {
        eprintln!("bowline: there is no RDMA device: {}: {error}", at_node(&node));
    }
    seen.is_ok()
}

/// A list of devices that ends with null.
#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_list(count: Option<&mut c_int>) -> *mut *const Device {
    let found = first().filter(|_| is_served());
    if let Some(count) = count {
        *count = c_int::from(found.is_some());
    }
    let list = [found.map_or(ptr::null(), ptr::from_ref), ptr::null()];
    made(list).cast()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_free_device_list(list: *mut *const Device) {
    if !list.is_null() {
        // SAFETY: made by `ibv_get_device_list`, and given back once.
        drop(unsafe { Box::from_raw(list.cast::<[*const Device; 2]>()) });
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_name(device: Option<&Device>) -> *const c_char {
    device.map_or(ptr::null(), |device| device.name.as_ptr())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_index(device: Option<&Device>) -> c_int {
    device.map_or(-1, |_| 0)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_device_guid(_device: Option<&Device>) -> u64 {
    let by_addrs = || node_guid(&gids().iter().map(|at| at.addr).collect::<Vec<_>>());
    guid_in_files().unwrap_or_else(by_addrs).to_be()
}

/// The GUID that programs read in the device's folder, which the calls have to agree with.
fn guid_in_files() -> Option<u64> {
    let folder = PathBuf::from(env::var_os(FILES)?);
    let file = folder.join("sys/class/infiniband").join(NAME).join("node_guid");
    let text = fs::read_to_string(file).ok()?;
    u64::from_str_radix(&text.trim().replace(':', ""), 16).ok()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_open_device(device: Option<&Device>) -> *mut Context {
    let Some(device) = device else { return none(libc::EINVAL) };
    let opened = match Opened::shared() {
        Ok(opened) => opened,
        Err(error) => {
            eprintln!("bowline: the RDMA device {NAME} cannot be opened: {error}");
            failed(&error);
            return ptr::null_mut();
        }
    };
    let Ok(events) = Events::new() else { return none(libc::EMFILE) };
    // SAFETY: numbers and pointers, for which zeroes are good.
    let mutex = unsafe { mem::zeroed() };
    let context = Context {
        device,
        ops: operations(),
        // Programs duplicate it for `ibv_import_device`, which is refused.
        cmd_fd: events.fd(),
        async_fd: events.fd(),
        num_comp_vectors: 1,
        mutex,
        abi_compat: usize::MAX,
        own: Own { opened: Arc::clone(&opened), events },
    };
    let whole = made(extended(context));
    // SAFETY: just made.
    let context = unsafe { &raw mut (*whole).context };
    lock(&opened.live.0).contexts.push(Handle(context));
    context
}

#[unsafe(no_mangle)]
extern "C" fn ibv_close_device(context: *mut Context) -> c_int {
    if context.is_null() {
        return fails(libc::EINVAL);
    }
    let whole = context.wrapping_byte_sub(mem::offset_of!(VerbsContext, context));
    // SAFETY: made by `ibv_open_device` as this, and given back once.
    let whole = unsafe { Box::from_raw(whole.cast::<VerbsContext>()) };
    let opened = Arc::clone(&whole.context.own.opened);
    lock(&opened.live.0).contexts.retain(|other| !ptr::eq(other.0, context));
    drop(whole);
    0
}

fn operations() -> ContextOps {
    let unused = ptr::null();
    ContextOps {
        query_to_dereg: [unused; 7],
        alloc_mw: Some(memory::alloc_mw),
        bind_mw: Some(memory::bind_mw),
        dealloc_mw: Some(memory::dealloc_mw),
        create_cq: unused,
        poll_cq: Some(completion::poll_cq),
        req_notify_cq: Some(completion::req_notify_cq),
        cq_event_to_destroy_srq: [unused; 7],
        post_srq_recv: Some(post::post_srq_recv),
        create_to_destroy_qp: [unused; 4],
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        create_ah_to_async_event: [unused; 5],
    }
}

fn extended(context: Context) -> VerbsContext {
    let unused = ptr::null();
    VerbsContext {
        query_port: Some(query::query_port),
        advise_mr: Some(memory::advise_mr),
        null_mr_to_flow_action: [unused; 11],
        modify_qp_rate_limit: unused,
        alloc_parent_domain: Some(memory::alloc_parent_domain),
        dealloc_td: Some(memory::dealloc_td),
        alloc_td: Some(memory::alloc_td),
        modify_cq: None,
        srq_ops_to_create_wq: [unused; 6],
        query_rt_values: Some(query::query_rt_values),
        create_cq_ex: Some(completion::create_cq_ex),
        private: unused,
        query_device_ex: Some(query::query_device_ex),
        flows: [unused; 4],
        open_qp: unused,
        create_qp_ex: Some(queue_pair::create_qp_ex),
        get_srq_num: unused,
        create_srq_ex: unused,
        open_xrcd: unused,
        close_xrcd: unused,
        placeholder: 0,
        size: mem::offset_of!(VerbsContext, context) + mem::offset_of!(Context, own),
        context,
    }
}

/// Ends an object's part in events: no more come, unread ones are taken back, and those that were
/// read are waited for.
pub(crate) fn end_events(context: &Own, element: usize, unacknowledged: &Unacknowledged) {
    let unread = context
        .events
        .take_back(|event| event.element == element && event.event_type != event::DEVICE_FATAL);
    unacknowledged.acknowledge(unread);
    unacknowledged.wait_for_all();
}

/// What an event is about.
enum Element<'a> {
    Qp(&'a Qp),
    Cq(&'a Cq),
    Srq(&'a Srq),
    /// The device or its port.
    Device,
}

/// Returns the object that an event is about.
fn element(event: &abi::AsyncEvent) -> Element<'_> {
    let element = event.element;
    match event.event_type {
        event::QP_FATAL | event::COMM_EST | event::SQ_DRAINED | event::QP_LAST_WQE_REACHED => {
            // SAFETY: it was put into the event as the address of a queue pair, which waits with
            // its end until the event is acknowledged.
            Element::Qp(unsafe { &*ptr::with_exposed_provenance(element) })
        }
        // SAFETY: as above, of a completion queue.
        event::CQ_ERR => Element::Cq(unsafe { &*ptr::with_exposed_provenance(element) }),
        event::SRQ_LIMIT_REACHED => {
            // SAFETY: as above, of a shared receive queue.
            Element::Srq(unsafe { &*ptr::with_exposed_provenance(element) })
        }
        _ => Element::Device,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_async_event(
    context: Option<&Context>,
    out: Option<&mut mem::MaybeUninit<abi::AsyncEvent>>,
) -> c_int {
    let (Some(context), Some(out)) = (context, out) else {
        fails(libc::EINVAL);
        return -1;
    };
    match context.own.events.next() {
        Ok(event) => {
            out.write(event);
            0
        }
        Err(errno) => {
            fails(errno.raw_os_error());
            -1
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(event: Option<&abi::AsyncEvent>) {
    use core::sync::atomic::Ordering::Relaxed;

    let Some(event) = event else { return };
    match element(event) {
        Element::Qp(qp) => {
            qp.events_completed.fetch_add(1, Relaxed);
            qp.own.unacknowledged.acknowledge(1);
        }
        Element::Cq(cq) => {
            cq.async_events_completed.fetch_add(1, Relaxed);
            cq.own.unacknowledged.acknowledge(1);
        }
        Element::Srq(srq) => {
            srq.events_completed.fetch_add(1, Relaxed);
            srq.own.unacknowledged.acknowledge(1);
        }
        Element::Device => {}
    }
}

#[cfg(test)]
mod tests {
    use bowline_verbs::Error;

    use super::*;

    #[test]
    fn a_refusal_keeps_its_errno() {
        let with = |what: &str, errno| Error::System { what: what.to_owned(), errno };
        let refused = |error| refused(Path::new("/x"), error);
        let another = with("it is another user's", Errno::EACCES).into();
        assert_eq!(refused(another), with("the node at /x: it is another user's", Errno::EACCES));
        assert_eq!(refused(io::Error::from_raw_os_error(2)).errno(), Errno::ENOENT);
    }
}
