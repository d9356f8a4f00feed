//! The soft device: the verbs over the core.

use core::sync::atomic::Ordering::Relaxed;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bowline_base::{clock, count::Described};
use bowline_roce::{
    Config, Counters, Device as Core, FormerConnection, InUse, Instant, burst_payload,
};
use bowline_verbs::{
    Access, AsyncEvent, Buffer, CmEvent, CmId, Completion, ConnParam, CqId, Device, DeviceAttr,
    Error, InvalidReason, MrKeys, Mtu, MwBind, MwType, PathStats, PdId, QpAttr, QpInit, QpState,
    Qpn, RecvWr, RejectReason, SendFlags, SendWr, SrqAttr, SrqChange, SrqId, SrqInit,
};

use crate::capture::Capture;
use crate::config::SoftConfig;
use crate::connection_files::ConnectionFiles;
use crate::groups::Groups;
use crate::identity;
use crate::line::{self, Line};
use crate::receive::PumpResult;
use crate::share::{Among, PortSpace};
use crate::shared::{Shared, State};
use crate::stats::DriverStats;
use crate::udp::{Endpoint, ROCE_PORT};
use crate::watch::Watch;

/// Path MTU if the interface is unknown; fits any Ethernet.
const MTU_UNKNOWN: Mtu = Mtu::M1024;

/// After this many empty polls, some 100 us, a program yields the processor now and then.
const EMPTY_POLLS_BEFORE_YIELD: u32 = 256;
const EMPTY_POLLS_PER_YIELD: u32 = 16;
/// Empty polls between two checks of the timers.
const EMPTY_POLLS_PER_TIMER_CHECK: u32 = 8;

/// What becomes of the list of connections when a device ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionList {
    Kept,
    Emptied,
}

/// An RDMA device in userspace: RoCEv2 over UDP sockets, no privilege needed.
///
/// All methods may be called from any thread, and do their work in the calling thread. One
/// background thread runs timers and answers peers while no other thread polls or waits. A process
/// must not `fork` and continue to use a device in the child.
#[derive(Debug)]
pub struct SoftDevice {
    shared: Arc<Shared>,
    helper: Mutex<Option<JoinHandle<()>>>,
    /// Delivers packets that are late; `None` where the network is as it is.
    line: Mutex<Option<JoinHandle<()>>>,
    attr: DeviceAttr,
    groups: Groups,
}

impl SoftDevice {
    /// Opens a device on addresses of this machine.
    ///
    /// # Errors
    /// [`Error::AddrInUse`], saying who may hold the port [OUT-10]; [`Error::AddrNotAvailable`];
    /// [`Error::Invalid`] when there is no address or the MTU does not fit the interface;
    /// [`Error::System`].
    pub fn open(config: SoftConfig) -> Result<Self, Error> {
        Self::open_among(config, Among::default())
    }

    /// Opens a device whose addresses others share.
    pub(crate) fn open_among(config: SoftConfig, among: Among) -> Result<Self, Error> {
        if config.addrs.is_empty() {
            return Err(Error::Invalid(InvalidReason::NoAddr));
        }
        let endpoints: Vec<Endpoint> = config
            .addrs
            .iter()
            .map(|ip| {
                let link = config.links.iter().find(|(of, _)| of == ip).map(|(_, link)| *link);
                Endpoint::open_on(&config.early_sockets, *ip, link, config.socket_buffer)
            })
            .collect::<Result<_, _>>()?;
        let names: Vec<_> =
            endpoints.iter().map(|endpoint| (endpoint.at().ip(), endpoint.link())).collect();
        let mtu = mtu(&endpoints, config.mtu)?;
        let guid = config.guid.unwrap_or_else(|| identity::node_guid(&config.addrs));
        let seed = bowline_base::entropy::random_bytes()
            .map_err(|error| system("asking for random bytes", &error))?;
        let connection_files = config
            .former_connections
            .folder()
            .map(|dir| ConnectionFiles::new(&dir, config.core.part, &names));
        let line = Line::new(config.impairments);
        let core = Config {
            guid,
            addrs: config.addrs.clone(),
            mtu,
            icrc: config.icrc,
            source_port: Some(ROCE_PORT),
            // What happens to packets that are sent happens to each.
            gso: config.gso
                && endpoints.iter().all(Endpoint::can_segment)
                && !line.as_ref().is_some_and(Line::changes_sent),
            ..config.core
        };
        let capture = match &config.capture {
            None => None,
            Some(path) => Some(Capture::create(path).map_err(|error| {
                system(&format!("creating the capture file {}", path.display()), &error)
            })?),
        };
        let limits = core.limits;
        let attr = DeviceAttr {
            name: config.name,
            provider: "soft",
            guid,
            addrs: config.addrs,
            mtu,
            max_qp: limits.qps,
            max_qp_wr: limits.wrs,
            max_sge: limits.sges,
            max_cq: limits.cqs,
            max_cqe: limits.cqes,
            max_srq: limits.srqs,
            max_srq_wr: limits.wrs,
            max_srq_sge: limits.sges,
            max_mr: limits.mrs,
            max_mw: limits.mws,
            max_qp_rd_atom: limits.rd_atomic,
            max_inline: limits.inline,
            fast_registration: true,
            flush: true,
            key_refresh: true,
            inner_pds: true,
            burst: if core.gso { burst_payload(mtu) } else { 0 },
            lazy_cq: true,
        };
        let mut core = Core::new(core, seed);
        if let Some(connection_files) = &connection_files {
            let former = connection_files
                .read()
                .map_err(|error| system("reading the connections of an earlier process", &error))?;
            for connection in &former {
                // A connection of an address that this device no longer has cannot be ended.
                let _ = core.end_former_connection(clock::now(), connection);
            }
        }
        let (poll, spin) = (config.poll, config.spin);
        let mut shared = Shared::new(core, endpoints, capture, connection_files, line, poll, spin)
            .map_err(|errno| system("making an event descriptor", &errno.into()))?;
        shared.among = among;
        shared.flush(clock::now());
        shared.write_connection_files(&[]);
        let shared = Arc::new(shared);
        let of_helper = Arc::clone(&shared);
        let helper = std::thread::Builder::new()
            .name("bowline-roce".to_owned())
            .spawn(move || of_helper.help())
            .map_err(|error| system("starting a thread", &error))?;
        let device = Self {
            shared,
            helper: Mutex::new(Some(helper)),
            line: Mutex::default(),
            attr,
            groups: Groups::default(),
        };
        if device.shared.line.is_some() {
            let shared = Arc::clone(&device.shared);
            let line = std::thread::Builder::new()
                .name("bowline-line".to_owned())
                .spawn(move || line::deliver(&shared))
                .map_err(|error| system("starting a thread", &error))?;
            *device.line.lock().unwrap_or_else(PoisonError::into_inner) = Some(line);
        }
        Ok(device)
    }

    /// Returns the statistics of the driver.
    pub fn stats(&self) -> DriverStats {
        self.shared.stats.snapshot()
    }

    /// Returns the counters of the protocol.
    pub fn counters(&self) -> Counters {
        self.shared.lock().core.counters().clone()
    }

    /// Returns the number of objects the device holds.
    pub fn in_use(&self) -> InUse {
        self.shared.lock().core.in_use()
    }

    /// Returns the last fault that kept packets from being sent, such as a path that carries less
    /// than the MTU of the settings.
    pub fn fault(&self) -> Option<Error> {
        self.shared.lock().faults.last().cloned()
    }

    /// Tells whether the device is closed, or gone: every call fails.
    pub fn is_closed(&self) -> bool {
        self.shared.lock().stop
    }

    /// Has `watcher` notified of completions, events and connections; returns whether it is the
    /// first one. A device has one watcher.
    pub fn watch(&self, watcher: Arc<dyn Watch>) -> bool {
        self.shared.watcher.set(watcher).is_ok()
    }

    /// Has the [watcher](Self::watch) notified of the next completion that a queue gets (with
    /// `solicited`, the next solicited one or error), once, whatever the queue has already. The
    /// background thread reads the network until a thread polls or waits again.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Closed`]; [`Error::Invalid`] when the queue has overrun.
    pub fn notify_cq(&self, cq: CqId, solicited: bool) -> Result<(), Error> {
        let now = clock::now();
        let mut st = self.shared.lock();
        if st.stop {
            return Err(Error::Closed);
        }
        st.core.notify_cq(cq, solicited)?;
        self.shared.hand_to_helper(&mut st, now);
        Ok(())
    }

    /// Refuses a connection request, or the answer to a connect whose queue pair the program leads,
    /// for this reason.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    pub fn reject_for(
        &self,
        id: CmId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.act(|st, now| st.core.reject_for(now, id, reason, private_data))
    }

    /// Listens for lookups of the datagram service of a port. They come as
    /// [`CmEvent::ConnectRequest`], and [`answer`](Self::answer) or [`Device::reject`] ends them.
    ///
    /// # Errors
    /// Those of [`Device::listen`].
    pub fn listen_datagrams(&self, at: SocketAddr) -> Result<CmId, Error> {
        self.set(|core| core.listen_datagrams(at))
    }

    /// Looks up the datagram service of a port, with at most 180 bytes of data. The outcome is an
    /// event: [`CmEvent::Found`], [`CmEvent::NotFound`] or [`CmEvent::Unreachable`].
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::AddrNotAvailable`], [`Error::Limit`].
    pub fn look_up(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        private_data: &[u8],
    ) -> Result<CmId, Error> {
        self.act(|st, now| st.core.look_up(now, local, remote, private_data))
    }

    /// Answers a lookup with a queue pair and its queue key, and at most 136 bytes of data.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::NoSuch`].
    pub fn answer(&self, id: CmId, qpn: Qpn, qkey: u32, private_data: &[u8]) -> Result<(), Error> {
        self.act(|st, now| st.core.answer(now, id, qpn, qkey, private_data))
    }

    /// Takes in a datagram that another process has received for this device, after what has come
    /// to its own sockets: a DREQ that overtook the last acknowledgements would have requests
    /// flushed that the peer has executed.
    pub(crate) fn take_in_one(&self, from: SocketAddr, to: IpAddr, payload: &[u8]) {
        self.shared.catch_up();
        self.shared.take_in_one(from, to, payload);
    }

    /// Handles what has arrived so far, and answers it.
    pub(crate) fn catch_up(&self) {
        self.shared.catch_up();
    }

    /// Gives a region of [`Device::reg_mr`] another protection domain, memory (a buffer, and offset
    /// and length in it) and rights. It keeps its keys.
    ///
    /// # Errors
    /// Those of [`Device::reg_mr`]; [`Error::Busy`] while a window is bound to it. Nothing has
    /// changed then.
    pub fn rereg_mr(
        &self,
        lkey: u32,
        pd: PdId,
        memory: (&Arc<Buffer>, usize, usize),
        iova: Option<u64>,
        access: Access,
    ) -> Result<(), Error> {
        self.set(|core| core.rereg_mr(lkey, pd, memory, iova, access))
    }

    /// Gives a completion queue room for this many entries.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Limit`]; [`Error::Invalid`] if it has more entries.
    pub fn resize_cq(&self, cq: CqId, depth: usize) -> Result<(), Error> {
        self.set(|core| core.resize_cq(cq, depth))
    }

    /// Removes the completions of a queue pair that nobody has polled, as cards do of one that is
    /// reset.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn forget_completions(&self, qp: Qpn) -> Result<(), Error> {
        self.set(|core| core.forget_completions(qp))
    }

    /// Joins a multicast group with a local address: what is sent to the group on that address's
    /// network comes to this device, for queue pairs that are [attached](Self::attach). As often as
    /// it was joined it is to be [left](Self::leave).
    ///
    /// # Errors
    /// [`Error::Invalid`] for an address that is not of a group or of the family of `local`;
    /// [`Error::AddrNotAvailable`]; [`Error::AddrInUse`] when another program has UDP port 4791 of
    /// all addresses; [`Error::System`].
    pub fn join(&self, group: IpAddr, local: IpAddr) -> Result<(), Error> {
        let endpoint = self.shared.endpoint(local).ok_or(Error::AddrNotAvailable)?;
        let index = endpoint.interface().ok_or(Error::AddrNotAvailable)?.index;
        if self.shared.lock().stop {
            return Err(Error::Closed);
        }
        self.groups.join(&self.shared, group, local, index)
    }

    /// Ends what [`join`](Self::join) has begun.
    ///
    /// # Errors
    /// [`Error::AddrNotAvailable`] for a group that was not joined with this address.
    pub fn leave(&self, group: IpAddr, local: IpAddr) -> Result<(), Error> {
        let endpoint = self.shared.endpoint(local).ok_or(Error::AddrNotAvailable)?;
        let index = endpoint.interface().ok_or(Error::AddrNotAvailable)?.index;
        self.groups.leave(group, index)
    }

    /// Delivers datagrams to a multicast group to a queue pair of type UD, which gets each once,
    /// and nothing that it has sent itself.
    ///
    /// # Errors
    /// [`Error::NoSuch`], [`Error::Invalid`], [`Error::Limit`].
    pub fn attach(&self, qp: Qpn, group: IpAddr) -> Result<(), Error> {
        self.set(|core| core.attach(qp, group))
    }

    /// Ends what [`attach`](Self::attach) has begun.
    ///
    /// # Errors
    /// [`Error::NoSuch`] for a queue pair that is not attached to the group.
    pub fn detach(&self, qp: Qpn, group: IpAddr) -> Result<(), Error> {
        self.set(|core| core.detach(qp, group))
    }

    /// Tells whether this device listens at a port of an address.
    pub(crate) fn listens(&self, space: PortSpace, at: SocketAddr) -> bool {
        let mut st = self.shared.lock();
        let tried = match space {
            PortSpace::Tcp => st.core.listen(at),
            PortSpace::Udp => st.core.listen_datagrams(at),
        };
        match tried {
            Ok(id) => {
                // Just made.
                let _ = st.core.destroy_id(clock::now(), id);
                false
            }
            Err(error) => matches!(error, Error::AddrInUse(_)),
        }
    }

    /// Ends connections of a process that is gone.
    pub(crate) fn end_former(&self, all: &[FormerConnection]) {
        let ended = self
            .act(|st, now| all.iter().try_for_each(|one| st.core.end_former_connection(now, one)));
        // A connection of an address that this device no longer has cannot be ended.
        drop(ended);
    }

    /// The device is gone, as a card that was pulled out: every call fails from now on.
    pub(crate) fn fail(&self) {
        if let Some(watcher) = self.shared.watcher.get() {
            watcher.event(AsyncEvent::DeviceFatal);
        }
        // Who has given the addresses tells the peers as well, from the list.
        self.end_with(ConnectionList::Kept);
        // Whoever shares the addresses next needs the port for itself.
        self.shared.endpoints.iter().for_each(Endpoint::release);
    }

    /// For tests of bad networks: with `on`, packets between a local address and one peer address,
    /// or all, are silently dropped in both directions; without `on`, no longer.
    pub fn cut(&self, local: IpAddr, remote: Option<IpAddr>, on: bool) {
        self.shared.cuts.set(local, remote, on);
    }

    /// Ends every wait and stops the background thread. Packets that are due are sent first, and
    /// peers are told once, without confirmation, that their connections have ended. Calls that
    /// need the network fail from now on. Dropping the device closes it too.
    pub fn close(&self) {
        self.end_with(ConnectionList::Emptied);
    }

    fn end_with(&self, list: ConnectionList) {
        let mut helper = self.helper.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(helper) = helper.take() else {
            return;
        };
        self.groups.close();
        // Packets that the background thread is handling now must be acknowledged as well.
        while self.shared.pump() == PumpResult::Busy {
            std::thread::yield_now();
        }
        let now = clock::now();
        self.shared.release_acks(now);
        let mut st = self.shared.lock();
        for connection in st.core.former_connections() {
            // The address of such a connection is one of this device's.
            let _ = st.core.end_former_connection(now, &connection);
        }
        drop(st);
        self.shared.flush(now);
        self.shared.stop();
        // A panic of that thread has been reported on standard error.
        let _ = helper.join();
        if let Some(line) = &self.shared.line {
            // What was sent arrives, as in a network.
            line.end();
        }
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = line.map(JoinHandle::join);
        if list == ConnectionList::Emptied {
            self.shared.write_connection_files(&[]);
        }
        self.shared.flush_capture();
    }

    /// Posts send requests as [`Device::post_send`], but none of them if one is refused.
    ///
    /// # Errors
    /// As [`Device::post_send`].
    pub fn post_all_or_none(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), Error> {
        self.shared.post(qp, Error::Closed, |core, now| core.post_all_or_none(now, qp, wrs))
    }

    /// Makes a change that may cause packets and events.
    fn act<T>(
        &self,
        change: impl FnOnce(&mut State, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let now = clock::now();
        let mut st = self.shared.lock();
        if st.stop {
            return Err(Error::Closed);
        }
        let done = change(&mut st, now);
        self.shared.settle(&mut st);
        drop(st);
        self.shared.flush(now);
        done
    }

    /// Makes a change that may remove a queue pair: sends its deferred acknowledgements first.
    fn end<T>(
        &self,
        change: impl FnOnce(&mut State, Instant) -> Result<T, Error>,
    ) -> Result<T, Error> {
        self.shared.release_acks(clock::now());
        self.act(change)
    }

    /// Makes a change that causes neither packets nor events.
    fn set<T>(&self, change: impl FnOnce(&mut Core) -> Result<T, Error>) -> Result<T, Error> {
        let mut st = self.shared.lock();
        if st.stop { Err(Error::Closed) } else { change(&mut st.core) }
    }
}

impl Drop for SoftDevice {
    fn drop(&mut self) {
        self.close();
    }
}

fn system(what: &str, error: &std::io::Error) -> Error {
    Error::System { what: what.to_owned(), errno: bowline_base::Errno::of(error) }
}

/// Chooses the path MTU: the requested one if every interface carries it; without a request, the
/// largest that all carry [HDR-8].
fn mtu(endpoints: &[Endpoint], wanted: Option<Mtu>) -> Result<Mtu, Error> {
    let mut most = Mtu::M4096;
    for endpoint in endpoints {
        let carried = match endpoint.interface() {
            None => wanted.unwrap_or(MTU_UNKNOWN),
            Some(interface) => Mtu::for_interface(interface.mtu)
                .ok_or(Error::Invalid(InvalidReason::InterfaceMtu(interface.mtu)))?,
        };
        most = most.min(carried);
    }
    match wanted {
        // An interface of 1500 bytes carries packets of 1024, not of 2048.
        Some(wanted) if wanted > most => {
            Err(Error::Invalid(InvalidReason::PathMtu { limit: most, given: wanted }))
        }
        Some(wanted) => Ok(wanted),
        None => Ok(most),
    }
}

impl Device for SoftDevice {
    fn attr(&self) -> DeviceAttr {
        self.attr.clone()
    }

    fn link_of(&self, addr: IpAddr) -> u32 {
        self.shared.endpoint(addr).map_or(0, Endpoint::link)
    }

    /// The counters of the protocol, then those of the driver.
    fn counts(&self) -> Vec<Described> {
        self.counters().described().chain(self.stats().described()).collect()
    }

    fn paths(&self) -> Vec<PathStats> {
        self.shared.lock().core.paths().collect()
    }

    fn fault(&self) -> Option<Error> {
        self.shared.lock().faults.now(clock::now()).cloned()
    }

    fn fault_to(&self, peer: IpAddr) -> Option<Error> {
        self.shared.lock().faults.with(clock::now(), peer).cloned()
    }

    fn alloc_pd(&self) -> Result<PdId, Error> {
        self.set(Core::alloc_pd)
    }

    fn dealloc_pd(&self, pd: PdId) -> Result<(), Error> {
        self.set(|core| core.dealloc_pd(pd))
    }

    fn alloc_inner_pd(&self, outer: PdId) -> Result<PdId, Error> {
        self.set(|core| core.alloc_inner_pd(outer))
    }

    fn reg_mr(
        &self,
        pd: PdId,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<MrKeys, Error> {
        self.set(|core| core.reg_mr(pd, buffer, offset, len, iova, access))
    }

    fn alloc_mr(&self, pd: PdId) -> Result<MrKeys, Error> {
        self.set(|core| core.alloc_mr(pd))
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), Error> {
        self.set(|core| core.dereg_mr(lkey))
    }

    fn withdraw_keys(&self, rkeys: &[u32]) -> Result<(), Error> {
        self.set(|core| core.withdraw_keys(rkeys))
    }

    fn renew_keys(&self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.set(|core| core.renew_keys(keys))
    }

    fn alloc_mw(&self, pd: PdId, kind: MwType) -> Result<u32, Error> {
        self.set(|core| core.alloc_mw(pd, kind))
    }

    fn bind_mw(
        &self,
        qp: Qpn,
        window: u32,
        id: u64,
        to: &MwBind,
        flags: SendFlags,
    ) -> Result<u32, Error> {
        self.act(|st, now| st.core.bind_mw(now, qp, window, id, to, flags))
    }

    fn dealloc_mw(&self, window: u32) -> Result<(), Error> {
        self.set(|core| core.dealloc_mw(window))
    }

    fn create_cq(&self, depth: usize) -> Result<CqId, Error> {
        self.set(|core| core.create_cq(depth))
    }

    fn destroy_cq(&self, cq: CqId) -> Result<(), Error> {
        self.set(|core| core.destroy_cq(cq))
    }

    fn poll_cq(&self, cq: CqId, out: &mut Vec<Completion>, max: usize) -> Result<usize, Error> {
        let shared = &*self.shared;
        let count = self.set(|core| core.poll_cq(cq, out, max))?;
        if count > 0 || max == 0 {
            return Ok(count);
        }
        shared.polls.fetch_add(1, Relaxed);
        let came = shared.pump_one_socket();
        if came == PumpResult::Rested {
            shared.flush_unsent();
            return Ok(0);
        }
        if came != PumpResult::Received {
            let empty_polls_before = shared.empty_polls.fetch_add(1, Relaxed);
            if empty_polls_before.is_multiple_of(EMPTY_POLLS_PER_TIMER_CHECK) {
                shared.run_timers();
            }
            shared.flush_unsent();
            // The peer may be a process that waits for this processor.
            if empty_polls_before > EMPTY_POLLS_BEFORE_YIELD
                && empty_polls_before.is_multiple_of(EMPTY_POLLS_PER_YIELD)
            {
                std::thread::yield_now();
            }
            return Ok(0);
        }
        shared.empty_polls.store(0, Relaxed);
        let count = self.set(|core| core.poll_cq(cq, out, max))?;
        // The acknowledgement joins the program's next send. If there is none, it is sent at the
        // program's next poll or, if that has its turn soon, by the background thread.
        let now = clock::now();
        if count == 0 || !shared.may_defer_acks(&shared.lock(), now) {
            shared.flush(now);
        }
        Ok(count)
    }

    fn wait_cq(&self, cq: CqId, solicited: bool, limit: Option<Duration>) -> Result<bool, Error> {
        // Only one that has another descriptor does not follow.
        let waited = self.shared.wait_cq(cq, None, solicited, limit)?;
        Ok(waited.unwrap_or(false))
    }

    fn wait_cq_or(
        &self,
        cq: CqId,
        other: BorrowedFd<'_>,
        limit: Duration,
    ) -> Result<Option<bool>, Error> {
        self.shared.wait_cq(cq, Some(other), false, Some(limit))
    }

    fn create_qp(&self, init: &QpInit) -> Result<Qpn, Error> {
        self.set(|core| core.create_qp(init))
    }

    fn modify_qp(&self, qp: Qpn, attr: &QpAttr) -> Result<(), Error> {
        let change = |st: &mut State, now| st.core.modify_qp(now, qp, attr);
        match attr.state {
            Some(QpState::Reset | QpState::Err) => self.end(change),
            _ => self.act(change),
        }
    }

    fn query_qp(&self, qp: Qpn) -> Result<(QpState, QpAttr), Error> {
        self.set(|core| core.query_qp(qp))
    }

    fn destroy_qp(&self, qp: Qpn) -> Result<(), Error> {
        self.end(|st, _| st.core.destroy_qp(qp))
    }

    fn post_send(&self, qp: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        self.shared.post(qp, (0, Error::Closed), |core, now| core.post_send(now, qp, wrs))
    }

    fn post_recv(&self, qp: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        // Causes no packet, so a deferred acknowledgement still waits for a send.
        let now = clock::now();
        let mut st = self.shared.lock();
        if st.stop {
            return Err((0, Error::Closed));
        }
        let done = st.core.post_recv(now, qp, wrs);
        self.shared.settle(&mut st);
        done
    }

    fn create_srq(&self, init: &SrqInit) -> Result<SrqId, Error> {
        self.set(|core| core.create_srq(init))
    }

    fn modify_srq(&self, srq: SrqId, change: &SrqChange) -> Result<(), Error> {
        self.act(|st, _| st.core.modify_srq(srq, change))
    }

    fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, Error> {
        self.set(|core| core.query_srq(srq))
    }

    fn destroy_srq(&self, srq: SrqId) -> Result<(), Error> {
        self.set(|core| core.destroy_srq(srq))
    }

    fn post_srq_recv(&self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        // Causes neither packets nor completions.
        let mut st = self.shared.lock();
        if st.stop { Err((0, Error::Closed)) } else { st.core.post_srq_recv(srq, wrs) }
    }

    fn async_event(&self, limit: Duration) -> Result<AsyncEvent, Error> {
        self.shared.wait_event(limit, |st| st.async_events.pop_front())
    }

    fn listen(&self, at: SocketAddr) -> Result<CmId, Error> {
        self.set(|core| core.listen(at))
    }

    fn connect(
        &self,
        local: Option<SocketAddr>,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        self.act(|st, now| st.core.connect(now, local, remote, param))
    }

    fn accept(&self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        self.act(|st, now| st.core.accept(now, id, param))
    }

    fn reject(&self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        self.act(|st, now| st.core.reject(now, id, private_data))
    }

    fn connection_attr(&self, id: CmId, to: QpState) -> Result<QpAttr, Error> {
        self.set(|core| core.connection_attr(id, to))
    }

    fn establish(&self, id: CmId) -> Result<(), Error> {
        self.act(|st, now| st.core.establish(now, id))
    }

    fn note_established(&self, id: CmId) -> Result<bool, Error> {
        self.act(|st, now| st.core.note_established(now, id))
    }

    fn disconnect(&self, id: CmId) -> Result<(), Error> {
        self.end(|st, now| st.core.disconnect(now, id))
    }

    fn destroy_id(&self, id: CmId) -> Result<(), Error> {
        self.end(|st, now| {
            st.cm_events.retain(|event| event.id() != id);
            st.core.destroy_id(now, id)
        })
    }

    fn cm_event(&self, limit: Duration) -> Result<CmEvent, Error> {
        self.shared.wait_event(limit, |st| st.cm_events.pop_front())
    }
}
