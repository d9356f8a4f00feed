//! The engine: devices, and the threads that serve sessions and servers on them.
//!
//! ```text
//!   bowline-rtrs-cm    one per device: events of its connection manager; the first runs timers
//!   bowline-rtrs       one per session and device: completions that no other thread takes
//!   bowline-rtrs-srv   one per server and device: takes completions and runs the handler
//!   bowline-rtrs-mem   one per server: moves memory in use to large pages
//! ```
//! All these threads sleep when there is nothing to do.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bowline_base::clock;
use bowline_rtrs::{Errno, Instant, PortId};
use bowline_verbs::{AsyncEvent, CmEvent, Device, Qpn};

use crate::Error;
use crate::client::Names;
use crate::port::{Port, port_id};
use crate::stats::{DriverStats, Stats};

/// Most devices of an engine.
const DEVICES_MAX: usize = 256;
/// The longest sleep of a background thread, and so the longest delay before it notices that it
/// must end.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How late timers may run, so that those of many paths run together: each member says its own
/// bound, and this bounds it.
const SLACK: Range<Duration> = Duration::from_millis(1)..Duration::from_millis(100);
/// How long closing an engine waits for peers, and for handlers that owe responses.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// How threads wait for completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Poll {
    /// As the device does it: the soft device polls for about as long as waking up would take, then
    /// sleeps. A thread sleeps on one device only. In an engine of several devices, one background
    /// thread for each device takes the completions and wakes the threads of the program that wait
    /// for requests.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency. Occupies one processor for each thread of a server, and for
    /// each thread of a program that waits for requests; such a thread takes the completions of all
    /// devices.
    Spin,
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineConfig {
    /// How threads wait for completions.
    pub poll: Poll,
}

/// A session or server, as the engine sees it.
pub(crate) trait Member: Send + Sync {
    /// Handles an event of a device's connection manager; returns whether it belongs to this
    /// member.
    fn cm(&self, port: PortId, event: &CmEvent) -> bool;
    /// Handles the failure of a queue pair.
    fn qp_failed(&self, port: PortId, qpn: Qpn);
    /// Runs timers that are due; returns when the next one is.
    fn tick(&self, now: Instant) -> Option<Instant>;
    /// How late its timers may run.
    fn slack(&self) -> Duration;
    /// Handles that a device is closed, or can no longer be used. May be called more than once.
    fn device_gone(&self, port: PortId);
    /// Closes the session or server and waits, at most for `timeout`, until it is closed.
    fn end(&self, timeout: Duration);
    /// Makes its threads end.
    fn stop(&self);
}

/// The part of an engine that its threads, sessions and servers share.
pub(crate) struct Inner {
    pub(crate) devices: Vec<Arc<dyn Device>>,
    /// For each device: whether it is closed, or can no longer be used.
    gone: Vec<AtomicBool>,
    pub(crate) config: EngineConfig,
    pub(crate) stats: Arc<Stats>,
    pub(crate) names: Arc<Names>,
    members: Mutex<Vec<Arc<dyn Member>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stop: AtomicBool,
}

impl core::fmt::Debug for Inner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Inner").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Devices and threads for sessions and servers. A device belongs to one engine, because its
/// connection manager has one queue of events.
///
/// Dropping the last reference to an engine closes it, and its sessions and servers with it: keep
/// it as long as they are used.
#[derive(Debug)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

impl Engine {
    /// Starts an engine on these devices.
    ///
    /// # Errors
    /// `EINVAL` without a device, or with more than 256; the system's error when no thread can be
    /// started.
    pub fn new(devices: Vec<Arc<dyn Device>>, config: EngineConfig) -> Result<Arc<Self>, Error> {
        if !(1..=DEVICES_MAX).contains(&devices.len()) {
            return Err(Error::new("starting an engine with 1 to 256 devices", Errno::EINVAL));
        }
        let inner = Arc::new(Inner {
            gone: devices.iter().map(|_| AtomicBool::new(false)).collect(),
            devices,
            config,
            stats: Arc::default(),
            names: Arc::default(),
            members: Mutex::default(),
            threads: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let engine = Arc::new(Self { inner });
        for index in 0..engine.inner.devices.len() {
            let inner = Arc::clone(&engine.inner);
            engine.inner.spawn("bowline-rtrs-cm", move || inner.listen(index))?;
        }
        Ok(engine)
    }

    /// Starts an engine on a soft device at these addresses of this machine: RDMA over UDP sockets
    /// of this process, with default settings. [`new`](Self::new) takes devices with others.
    ///
    /// # Errors
    /// `EADDRINUSE` when another device has UDP port 4791 of an address, `EADDRNOTAVAIL` for an
    /// address that the machine does not have, `EINVAL` without an address; those of
    /// [`new`](Self::new).
    #[cfg(feature = "soft")]
    pub fn soft(addresses: impl IntoIterator<Item = IpAddr>) -> Result<Arc<Self>, Error> {
        use bowline_roce_driver::{SoftConfig, SoftDevice};
        let addrs = addresses.into_iter().collect();
        let device = SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() })
            .map_err(|error| Error::device("opening a soft device", error))?;
        Self::new(vec![Arc::new(device)], EngineConfig::default())
    }

    /// The devices, in the order of their [`PortId`]s.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.inner.devices
    }

    /// Returns the error that has kept packets from being sent on a path in the last seconds, if
    /// the device knows it.
    pub fn fault(&self, local: IpAddr, remote: IpAddr) -> Option<bowline_verbs::Error> {
        let has_it = |device: &&Arc<dyn Device>| device.attr().addrs.contains(&local);
        self.devices().iter().filter(has_it).find_map(|device| device.fault_to(remote))
    }

    /// Returns the engine's counters.
    pub fn stats(&self) -> DriverStats {
        self.inner.stats.snapshot()
    }

    /// Closes all sessions and servers, and ends all threads. Calls on them fail from now on.
    pub fn close(&self) {
        self.inner.close();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Makes the objects a core needs on each device, with completion queues for `polled` poll
    /// connections. A device that is gone, or refuses, gets an unusable [`Port`]
    /// ([`Port::refusal`]); the caller must report it to the member with [`Member::device_gone`].
    ///
    /// # Errors
    /// An error when the engine is closed, or when no device is left: then the first device's
    /// error.
    pub(crate) fn ports(&self, polled: u16) -> Result<Vec<Arc<Port>>, Error> {
        if self.is_stopped() {
            return Err(Error::closed("using an engine"));
        }
        let make = |(device, gone): (_, &AtomicBool)| {
            let made = if gone.load(SeqCst) {
                Err(bowline_verbs::Error::Closed)
            } else {
                Port::new(device, polled)
            };
            Arc::new(made.unwrap_or_else(|why| Port::unusable(device, why)))
        };
        let ports: Vec<_> = self.devices.iter().zip(&self.gone).map(make).collect();
        match ports.first() {
            Some(first) if ports.iter().all(|port| port.refusal().is_some()) => {
                Err(first.unusable_for("preparing a device"))
            }
            _ => Ok(ports),
        }
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(SeqCst)
    }

    /// Starts a thread, which ends by itself when the engine or its member stops.
    pub(crate) fn spawn(
        &self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<std::thread::Thread, Error> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map_err(|error| Error::system("starting a thread", &error))?;
        let handle = thread.thread().clone();
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(handle)
    }

    /// Registers a session or server: it gets events from now on.
    ///
    /// # Errors
    /// An error when the engine is closed: no thread would serve the member.
    pub(crate) fn add(&self, member: Arc<dyn Member>) -> Result<(), Error> {
        let mut members = lock(&self.members);
        // Checked with the list locked: closing sets `stop` before it takes the list, so it finds
        // every member added before.
        if self.is_stopped() {
            drop(members);
            return Err(Error::closed("using an engine"));
        }
        members.push(Arc::clone(&member));
        drop(members);
        // Reports devices that went after the member's ports were made: `device_gone` sets the flag
        // before it reads the list.
        for (index, gone) in self.gone.iter().enumerate() {
            if gone.load(SeqCst) {
                member.device_gone(port_id(index));
            }
        }
        Ok(())
    }

    /// Marks a device as closed or unusable and tells all members.
    fn device_gone(&self, index: usize) {
        if let Some(gone) = self.gone.get(index) {
            gone.store(true, SeqCst);
        }
        self.members().iter().for_each(|member| member.device_gone(port_id(index)));
    }

    /// Unregisters a session or server: it gets no more events.
    pub(crate) fn remove(&self, member: &dyn Member) {
        let gone: Vec<_> = {
            let mut members = lock(&self.members);
            let is = |known: &mut Arc<dyn Member>| std::ptr::addr_eq(Arc::as_ptr(known), member);
            members.extract_if(.., is).collect()
        };
        // Dropped without the list's lock: this may be the last reference.
        drop(gone);
    }

    fn members(&self) -> Vec<Arc<dyn Member>> {
        lock(&self.members).clone()
    }

    fn close(&self) {
        if self.stop.swap(true, SeqCst) {
            return;
        }
        for member in self.members() {
            member.end(CLOSE_TIMEOUT);
            member.stop();
        }
        let members = std::mem::take(&mut *lock(&self.members));
        // Dropped without the list's lock: these may be the last references.
        drop(members);
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A callback of the program may drop the last engine, so this can be one of its
            // threads.
            if thread.thread().id() != std::thread::current().id() {
                // A panic of that thread has been reported on standard error.
                let _ = thread.join();
            }
        }
    }

    /// The thread of a device's connection manager.
    fn listen(&self, index: usize) {
        let Some(device) = self.devices.get(index) else {
            return;
        };
        let port = port_id(index);
        let mut closing = None;
        let mut gone = false;
        loop {
            // Sessions that are being closed need events until they are closed.
            if self.is_stopped() {
                let end = *closing.get_or_insert_with(|| clock::now() + CLOSE_TIMEOUT);
                if lock(&self.members).is_empty() || clock::now() > end {
                    return;
                }
            }
            let limit = if index == 0 { self.run_timers() } else { TICK };
            if gone {
                std::thread::park_timeout(limit);
                continue;
            }
            match device.cm_event(limit) {
                Ok(event) => {
                    self.stats.cm_events.inc();
                    self.dispatch_cm_event(&**device, port, &event);
                }
                Err(bowline_verbs::Error::TimedOut) => {}
                Err(_) => gone = true,
            }
            while !gone && let Ok(event) = device.async_event(Duration::ZERO) {
                match event {
                    AsyncEvent::QpFatal(qpn) => {
                        self.members().iter().for_each(|member| member.qp_failed(port, qpn));
                    }
                    // No work request there need ever complete [RT-31], [RS-19].
                    AsyncEvent::DeviceFatal => gone = true,
                    _ => {}
                }
            }
            if gone {
                self.device_gone(index);
                // The first device's thread also runs the timers of all devices.
                if index > 0 {
                    return;
                }
            }
        }
    }

    fn dispatch_cm_event(&self, device: &dyn Device, port: PortId, event: &CmEvent) {
        if self.members().iter().any(|member| member.cm(port, event)) {
            return;
        }
        if let CmEvent::ConnectRequest { id, .. } = event {
            // The request's listener has just been closed.
            let _ = device.destroy_id(*id);
        }
    }

    /// Runs timers that are due; returns the time until the next one.
    fn run_timers(&self) -> Duration {
        let now = clock::now();
        let members = self.members();
        let next = members.iter().filter_map(|member| member.tick(now)).min();
        let slack = members.iter().map(|member| member.slack()).min();
        let slack = slack.unwrap_or(SLACK.end).clamp(SLACK.start, SLACK.end);
        next.map_or(TICK, |at| at.saturating_since(now).clamp(slack, TICK))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use bowline_roce_driver::{SoftConfig, SoftDevice};

    use super::*;

    /// Records which devices it was told are gone.
    #[derive(Default)]
    struct Nobody(Mutex<Vec<PortId>>);

    impl Member for Nobody {
        fn cm(&self, _: PortId, _: &CmEvent) -> bool {
            false
        }

        fn qp_failed(&self, _: PortId, _: Qpn) {}

        fn tick(&self, _: Instant) -> Option<Instant> {
            None
        }

        fn slack(&self) -> Duration {
            TICK
        }

        fn device_gone(&self, port: PortId) {
            lock(&self.0).push(port);
        }

        fn end(&self, _: Duration) {}

        fn stop(&self) {}
    }

    /// Has a timer every 200 ms, and counts how often it was looked at and how often it ran.
    struct Timed {
        due: Mutex<Instant>,
        looks: Mutex<usize>,
        runs: Mutex<usize>,
    }

    impl Member for Timed {
        fn cm(&self, _: PortId, _: &CmEvent) -> bool {
            false
        }

        fn qp_failed(&self, _: PortId, _: Qpn) {}

        fn tick(&self, now: Instant) -> Option<Instant> {
            let mut due = lock(&self.due);
            *lock(&self.looks) += 1;
            if *due <= now {
                *lock(&self.runs) += 1;
                *due = now + Duration::from_millis(200);
            }
            Some(*due)
        }

        fn slack(&self) -> Duration {
            Duration::from_millis(20)
        }

        fn device_gone(&self, _: PortId) {}

        fn end(&self, _: Duration) {}

        fn stop(&self) {}
    }

    /// A hundred sessions would wake a thread as often as all of them have timers.
    #[test]
    fn timers_of_many_members_run_together() {
        // tests [RT-88]
        let addrs = vec![IpAddr::from([127, 79, 131, 1])];
        let device = SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).unwrap();
        let engine = Engine::new(vec![Arc::new(device)], EngineConfig::default()).unwrap();
        let begun = clock::now();
        let all = (0..100).map(|n| {
            // Spread over all the time.
            let due = Mutex::new(begun + Duration::from_millis(2 * n));
            let timed = Arc::new(Timed { due, looks: Mutex::default(), runs: Mutex::default() });
            engine.inner.add(Arc::clone(&timed) as _).unwrap();
            timed
        });
        let all: Vec<Arc<Timed>> = all.collect();
        while all.iter().any(|timed| *lock(&timed.runs) < 6) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let looks = *lock(&all[0].looks);
        let slices = clock::now().saturating_since(begun).as_millis() / 20;
        assert!(looks as u128 <= slices + 3, "{looks} looks in {slices} times the slack");
        engine.close();
    }

    /// A session that is being opened when the engine is closed would wait for events that no
    /// thread reads.
    #[test]
    fn a_closed_engine_takes_nobody_in() {
        let addrs = vec![IpAddr::from([127, 79, 130, 1])];
        let device = SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).unwrap();
        let engine = Engine::new(vec![Arc::new(device)], EngineConfig::default()).unwrap();
        engine.inner.add(Arc::new(Nobody::default())).unwrap();
        assert_eq!(engine.inner.members().len(), 1);
        engine.close();
        let refused = engine.inner.add(Arc::new(Nobody::default())).unwrap_err();
        assert_eq!(refused.errno(), Errno::ENODEV);
        assert_eq!(engine.inner.members().len(), 0);
    }

    /// A session that is being opened when a device goes would wait for that device.
    #[test]
    fn who_comes_after_a_device_has_gone_is_told() {
        let devices = [1, 2].map(|host| {
            let addrs = vec![IpAddr::from([127, 79, 119, host])];
            Arc::new(SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).unwrap())
        });
        let all = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
        let engine = Engine::new(all, EngineConfig::default()).unwrap();
        let before = Arc::new(Nobody::default());
        engine.inner.add(Arc::clone(&before) as _).unwrap();
        devices[1].close();
        while lock(&before.0).is_empty() {
            std::thread::yield_now();
        }
        let after = Arc::new(Nobody::default());
        engine.inner.add(Arc::clone(&after) as _).unwrap();
        assert_eq!(*lock(&before.0), [port_id(1)]);
        assert_eq!(*lock(&after.0), [port_id(1)]);
    }
}
