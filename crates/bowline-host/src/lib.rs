//! The RDS node of a host, for programs that do not embed one: it gives them sockets that are real
//! descriptors, and carries out their calls.
//!
//! ```text
//!   program with the preload library            host's node
//!   descriptor 5  <------- pair of unix sockets: tokens -------> HostSocket
//!   channel       <------- requests and answers ---------------> Channel
//!                                                                   | Service, one thread
//!                                                                 Driver (bowline-rds-driver)
//! ```
//!
//! What travels on both is in [`bowline_attach`]. The other end of a descriptor says when the last
//! program has closed it; a channel that ends says that a process is gone.

#![deny(unsafe_code)]

mod accounts;
mod caller;
mod channel;
mod control;
mod library;
mod memory;
mod names;
mod options;
mod policy;
mod ready;
mod rights;
mod rings;
mod service;
mod socket;
mod turns;

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use bowline_attach::NAME_PREFIX;
use bowline_rds_driver::Driver;

use accounts::{Accounts, Refusals};
pub use accounts::{Refusal, Refused};
pub use library::{preload, preload_library};
pub use policy::{BindRule, Policy, Quota, Who};

/// Sockets of a node for the programs of its host, until it is dropped.
#[derive(Debug)]
pub struct Host {
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
    refusals: Arc<Refusals>,
}

impl Host {
    /// Serves programs that connect to `listener`: those of this user and of root, and those whom
    /// `policy` lets attach. Users whose quota the policy does not tell get `usual`.
    ///
    /// # Errors
    /// Errors of the system: no descriptors or threads left.
    pub fn start(
        driver: Driver,
        listener: UnixListener,
        policy: Policy,
        usual: Quota,
    ) -> io::Result<Self> {
        let number = bowline_base::entropy::random_u64() >> 1;
        // Programs that were handed a socket know its node by this name, not by a path.
        let name = [NAME_PREFIX, format!("{number:016x}").as_bytes()].concat();
        let known = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name[1..])?)?;
        let stop = Arc::new(AtomicBool::new(false));
        let listeners = vec![listener, known];
        let refusals = Arc::<Refusals>::default();
        let accounts = Accounts::new(policy, usual, Arc::clone(&refusals));
        let service =
            service::Service::new(driver, accounts, listeners, number, Arc::clone(&stop))?;
        let thread =
            std::thread::Builder::new().name("bowline-host".into()).spawn(move || service.run())?;
        Ok(Self { stop, thread: Mutex::new(Some(thread)), refusals })
    }

    /// Takes what programs were refused since the last call; few lines, however much it was.
    pub fn refusals(&self) -> Vec<Refusal> {
        self.refusals.take()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It does not panic; if it did, the node should not suffer for it.
        let _ = thread.map(JoinHandle::join);
    }
}
