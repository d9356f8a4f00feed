//! The RDS node of a host, for programs that do not embed one: it gives them sockets that are real
//! descriptors, and executes their calls.
//!
//! ```text
//!   program with the preload library            host's node
//!   descriptor 5  <------- pair of unix sockets: tokens -------> HostSocket
//!   channel       <------- requests and answers ---------------> Channel
//!                                                                   | Service, one thread
//!                                                                 Driver (bowline-rds-driver)
//! ```
//!
//! What travels on both is in [`bowline_host_wire`]. The other end of a descriptor says when the
//! last program has closed it; a channel that ends says that a process is gone.

#![deny(unsafe_code)]

mod accounts;
mod agent;
mod arrivals;
mod caller;
mod channel;
mod closer;
mod control;
#[doc(hidden)]
pub mod core;
mod descriptors;
mod hand_over;
mod heap;
mod library;
mod memory;
mod names;
mod namespace;
mod network;
mod options;
mod pipe_signal;
mod policy;
mod rdma;
mod ready;
mod requests;
mod rights;
mod rings;
mod service;
mod socket;
mod system;
mod turns;
mod watch;

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bowline_host_wire::NodeId;
use bowline_rds_driver::Driver;

use accounts::{Accounts, Refusals};
pub use accounts::{Refusal, Refused};
pub use descriptors::keep_standard_streams;
use hand_over::Successor;
pub use hand_over::{HandOver, HostState, Predecessor, Sent};
pub use library::{installed, preload, preload_library, preload_library_of_musl};
pub use namespace::{NodeConnection, connect_within, network_namespace};
pub use pipe_signal::keep_pipe_signal;
pub use policy::{BindRule, Policy, Principals, Quota};
use ready::Ready;
use service::Service;
pub use system::BUFFERS_MAX;
use system::Eventfd;

/// What a node asks of a `userfaultfd` of a program, with `ioctl`.
pub const WATCH_REQUESTS: [u32; 2] =
    [bowline_host_wire::watch::REGISTER, bowline_host_wire::watch::LOOK];

/// Sockets of a node for the programs of its host, until it is dropped.
#[derive(Debug)]
pub struct Host {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Service>>>,
    refusals: Arc<Refusals>,
    successor: Arc<Successor>,
    ready: Arc<Ready<Eventfd>>,
    address: SocketAddr,
}

impl Host {
    /// Serves programs that connect to `listener`: those of this user and of root, and those whom
    /// `policy` lets attach. Users whose quota the policy does not tell get `default_quota`.
    ///
    /// # Errors
    /// Errors of the system: no descriptors or threads left.
    pub fn start(
        driver: Driver,
        listener: UnixListener,
        policy: Policy,
        default_quota: Quota,
    ) -> io::Result<Self> {
        let number = NodeId(bowline_base::entropy::random_u64() >> 1);
        Self::run(driver, listener, number, policy, default_quota, None)
    }

    /// Serves the programs of another process that has handed them over, and others that connect
    /// where they do; or at `listener`, if there is one.
    ///
    /// # Errors
    /// `InvalidData` when not everything was handed over; those of [`start`](Self::start).
    pub fn resume(
        driver: Driver,
        mut state: HostState,
        listener: Option<UnixListener>,
        policy: Policy,
        default_quota: Quota,
    ) -> io::Result<Self> {
        let former = state.take_listener()?;
        let listener = listener.unwrap_or(former);
        Self::run(driver, listener, state.number(), policy, default_quota, Some(state))
    }

    fn run(
        driver: Driver,
        listener: UnixListener,
        number: NodeId,
        policy: Policy,
        default_quota: Quota,
        state: Option<HostState>,
    ) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let refusals = Arc::<Refusals>::default();
        let successor = Arc::new(Successor::new()?);
        let own = rustix::process::geteuid().as_raw();
        let accounts = Accounts::new(own, policy, default_quota, Arc::clone(&refusals));
        let (stopped, asked) = (Arc::clone(&stop), Arc::clone(&successor));
        let node = driver.clone();
        let mut service = Service::new(driver, accounts, listener, number, stopped, asked)?;
        if let Some(state) = state {
            service.resume(state);
        }
        let ready = service.ready();
        let lender = Arc::downgrade(&ready);
        node.set_lender(lender);
        let thread =
            std::thread::Builder::new().name("bowline-host".into()).spawn(move || service.run())?;
        let thread = Mutex::new(Some(thread));
        Ok(Self { stop, thread, refusals, successor, ready, address })
    }

    /// Where programs connect.
    pub fn address(&self) -> SocketAddr {
        self.address.clone()
    }

    /// A descriptor that is readable once another node has asked this one to hand over to it.
    pub fn successor_bell(&self) -> BorrowedFd<'_> {
        self.successor.bell()
    }

    /// Takes the connection to the node that has asked: [`HandOver::send`].
    pub fn take_successor(&self) -> Option<UnixStream> {
        self.successor.take()
    }

    /// Stops serving programs, which notice nothing until another process resumes. The node is to
    /// be handed over next, to [`HandOver::writer`].
    ///
    /// # Errors
    /// Errors of the system: no descriptors or memory left.
    pub fn hand_over(self) -> io::Result<HandOver> {
        self.hand_over_with(Vec::new())
    }

    /// The same, with other sockets at which this process listens, each by a name:
    /// [`HostState::take_other`].
    ///
    /// # Errors
    /// Those of [`hand_over`](Self::hand_over).
    pub fn hand_over_with(self, others: Vec<(PathBuf, UnixListener)>) -> io::Result<HandOver> {
        self.end().ok_or(io::ErrorKind::Other)?.hand_over(others)
    }

    fn end(&self) -> Option<Service> {
        // Relaxed: the lock in `ring` orders it before what the thread sees when it is awake.
        self.stop.store(true, Ordering::Relaxed);
        self.ready.ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It does not panic; if it did, the node should not suffer for it.
        let service = thread?.join().ok();
        self.ready.end();
        service
    }

    /// Takes what programs were refused since the last call; few lines, however much it was.
    pub fn refusals(&self) -> Vec<Refusal> {
        self.refusals.take()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(service) = self.end() {
            service.end();
        }
    }
}
