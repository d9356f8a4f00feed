//! Settings of a driver.

use std::time::Duration;

use crate::rdma::RdmaDevices;

/// How a thread waits for the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Spins for about as long as a wake-up would take, then sleeps. On a machine with one
    /// processor the thread sleeps at once.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency, at the cost of one processor per waiting thread.
    Spin,
    /// Sleeps at once: fewest system calls.
    Sleep,
}

/// Settings of a driver and its core.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Settings of the core, including its addresses.
    pub core: bowline_rds::Config,
    /// How threads wait.
    pub poll: PollMode,
    /// How long [`PollMode::Adaptive`] spins before it sleeps.
    pub spin: Duration,
    /// TCP congestion control of every connection. `None` stands for `cubic` towards addresses of
    /// this machine, where pacing would halve the rate, and for the system's default otherwise.
    pub congestion_control: Option<String>,
    /// RDMA devices. Sockets that are bound to their addresses use RDMA, unless they chose TCP.
    pub rdma: RdmaDevices,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            core: bowline_rds::Config::default(),
            poll: PollMode::Adaptive,
            spin: Duration::from_micros(25),
            congestion_control: None,
            rdma: RdmaDevices::default(),
        }
    }
}
