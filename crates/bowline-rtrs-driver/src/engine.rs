//! The engine: devices, and the threads that serve sessions and servers on them.
//!
//! ```text
//!   bowline-rtrs-cm    one for each device: events of its connection manager; the first has timers
//!   bowline-rtrs       one for each session and device: completions nobody else takes
//!   bowline-rtrs-srv   one for each server and device: completions, and so the handler
//!   bowline-rtrs-mem   one for each server: makes large pages of memory that is used
//! ```
//! All of them sleep when there is nothing to do.

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
/// The longest a background thread sleeps: as long may it take to notice that it is to end.
pub(crate) const TICK: Duration = Duration::from_millis(250);
/// How long the end of everything waits for peers, and for handlers that owe answers.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// How threads wait for completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Poll {
    /// As the device does it: the soft one looks for as long as waking up would cost, then sleeps.
    /// A thread sleeps on one device only: in an engine of several, background threads take the
    /// completions, one for each device, and wake those of the program that wait for requests.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency, one processor for each thread of a server, and for each thread
    /// of a program that waits for requests, which takes the completions of all devices.
    Spin,
}

/// Settings of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineConfig {
    /// How threads wait.
    pub poll: Poll,
}

/// A session or server, as the engine sees it.
pub(crate) trait Station: Send + Sync {
    /// An event of a device's connection manager; tells whether it was for this one.
    fn cm(&self, port: PortId, event: &CmEvent) -> bool;
    /// A queue pair of a device has failed.
    fn qp_failed(&self, port: PortId, qpn: Qpn);
    /// Looks at the clock; returns when to look again.
    fn tick(&self, now: Instant) -> Option<Instant>;
    /// A device is closed, or can no longer be used. May be told more than once.
    fn device_gone(&self, port: PortId);
    /// Closes it and waits, no longer than told, until it is closed.
    fn end(&self, patience: Duration);
    /// Its threads are to end.
    fn stop(&self);
}

/// What the threads and everything else share.
pub(crate) struct Inner {
    pub(crate) devices: Vec<Arc<dyn Device>>,
    /// Which of them are closed, or can no longer be used.
    gone: Vec<AtomicBool>,
    pub(crate) config: EngineConfig,
    pub(crate) stats: Arc<Stats>,
    pub(crate) names: Arc<Names>,
    stations: Mutex<Vec<Arc<dyn Station>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    stop: AtomicBool,
}

impl core::fmt::Debug for Inner {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Inner").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Devices and threads for sessions and servers. A device belongs to one engine, since the events
/// of its connection manager do.
///
/// Dropping an engine closes it.
#[derive(Debug)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
}

impl Engine {
    /// Starts an engine on some devices.
    ///
    /// # Errors
    /// `EINVAL` without a device, or with more than 256; the system's when there can be no threads.
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
            stations: Mutex::default(),
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

    /// The devices, in the order of their [`PortId`]s.
    pub fn devices(&self) -> &[Arc<dyn Device>] {
        &self.inner.devices
    }

    /// Returns what has kept packets from being sent on a path in the last seconds, where that is
    /// known.
    pub fn fault(&self, local: IpAddr, remote: IpAddr) -> Option<bowline_verbs::Error> {
        let has_it = |device: &&Arc<dyn Device>| device.attr().addrs.contains(&local);
        self.devices().iter().filter(has_it).find_map(|device| device.fault_to(remote))
    }

    /// Returns what has been done so far.
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
    /// Makes what a core needs of each device, with room for so many poll connections. Of devices
    /// that are gone, or refuse, there is a place only ([`Port::refusal`]): the station is to be
    /// told that they are gone.
    ///
    /// # Errors
    /// That the engine is closed; that no device is left, with the word of the first.
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

    /// Starts a thread, which ends by itself when the engine or its station stops.
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

    /// From now on a session or server gets events.
    ///
    /// # Errors
    /// That the engine is closed: nobody would look after it.
    pub(crate) fn add(&self, station: Arc<dyn Station>) -> Result<(), Error> {
        let mut stations = lock(&self.stations);
        // Looked at with the list locked: whoever closes the engine takes the list after saying so,
        // and finds all that were added before.
        if self.is_stopped() {
            drop(stations);
            return Err(Error::closed("using an engine"));
        }
        stations.push(Arc::clone(&station));
        drop(stations);
        // Those that have gone since its ports were made: whoever marks one takes the list after
        // it.
        for (index, gone) in self.gone.iter().enumerate() {
            if gone.load(SeqCst) {
                station.device_gone(port_id(index));
            }
        }
        Ok(())
    }

    /// A device is closed, or can no longer be used.
    fn device_gone(&self, index: usize) {
        if let Some(gone) = self.gone.get(index) {
            gone.store(true, SeqCst);
        }
        self.stations().iter().for_each(|station| station.device_gone(port_id(index)));
    }

    /// From now on it gets none.
    pub(crate) fn remove(&self, station: &dyn Station) {
        let gone: Vec<_> = {
            let mut stations = lock(&self.stations);
            let is = |known: &mut Arc<dyn Station>| std::ptr::addr_eq(Arc::as_ptr(known), station);
            stations.extract_if(.., is).collect()
        };
        // Not while the list is locked: this may be the last of it.
        drop(gone);
    }

    fn stations(&self) -> Vec<Arc<dyn Station>> {
        lock(&self.stations).clone()
    }

    fn close(&self) {
        if self.stop.swap(true, SeqCst) {
            return;
        }
        for station in self.stations() {
            station.end(CLOSE_PATIENCE);
            station.stop();
        }
        let stations = std::mem::take(&mut *lock(&self.stations));
        // Not while the list is locked: these may be the last of them.
        drop(stations);
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // The last engine may be dropped by a function of the program that a thread of it runs.
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
            // Sessions that are being closed need events to the last.
            if self.is_stopped() {
                let end = *closing.get_or_insert_with(|| clock::now() + CLOSE_PATIENCE);
                if lock(&self.stations).is_empty() || clock::now() > end {
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
                    self.hand_out(&**device, port, &event);
                }
                Err(bowline_verbs::Error::TimedOut) => {}
                Err(_) => gone = true,
            }
            while !gone && let Ok(event) = device.async_event(Duration::ZERO) {
                match event {
                    AsyncEvent::QpFatal(qpn) => {
                        self.stations().iter().for_each(|station| station.qp_failed(port, qpn));
                    }
                    // Nothing need complete there any more [RT-31], [RS-19].
                    AsyncEvent::DeviceFatal => gone = true,
                    _ => {}
                }
            }
            if gone {
                self.device_gone(index);
                // The timers of the first are everybody's.
                if index > 0 {
                    return;
                }
            }
        }
    }

    fn hand_out(&self, device: &dyn Device, port: PortId, event: &CmEvent) {
        if self.stations().iter().any(|station| station.cm(port, event)) {
            return;
        }
        if let CmEvent::ConnectRequest { id, .. } = event {
            // Its listener has just gone.
            let _ = device.destroy_id(*id);
        }
    }

    /// Runs what is due; returns how long nothing else is.
    fn run_timers(&self) -> Duration {
        let now = clock::now();
        let next = self.stations().iter().filter_map(|station| station.tick(now)).min();
        next.map_or(TICK, |at| at.saturating_since(now).clamp(Duration::from_millis(1), TICK))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use bowline_roce_driver::{SoftConfig, SoftDevice};

    use super::*;

    /// Notes which devices it is told are gone.
    #[derive(Default)]
    struct Nobody(Mutex<Vec<PortId>>);

    impl Station for Nobody {
        fn cm(&self, _: PortId, _: &CmEvent) -> bool {
            false
        }

        fn qp_failed(&self, _: PortId, _: Qpn) {}

        fn tick(&self, _: Instant) -> Option<Instant> {
            None
        }

        fn device_gone(&self, port: PortId) {
            lock(&self.0).push(port);
        }

        fn end(&self, _: Duration) {}

        fn stop(&self) {}
    }

    /// A session that is being opened when the engine is closed would wait for events that nobody
    /// reads.
    #[test]
    fn a_closed_engine_takes_nobody_in() {
        let addrs = vec![IpAddr::from([127, 79, 130, 1])];
        let device = SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).unwrap();
        let engine = Engine::new(vec![Arc::new(device)], EngineConfig::default()).unwrap();
        engine.inner.add(Arc::new(Nobody::default())).unwrap();
        assert_eq!(engine.inner.stations().len(), 1);
        engine.close();
        let refused = engine.inner.add(Arc::new(Nobody::default())).unwrap_err();
        assert_eq!(refused.errno(), Errno::ENODEV);
        assert_eq!(engine.inner.stations().len(), 0);
    }

    /// A session that is being opened when a device goes would wait for it.
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
