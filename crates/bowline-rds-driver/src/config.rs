//! Settings of a driver.

use std::time::Duration;

/// How a thread waits for the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Looks for about as long as waking up would cost, then sleeps; on a machine with one
    /// processor it sleeps at once.
    #[default]
    Adaptive,
    /// Never sleeps: lowest latency, one processor per waiting thread.
    Spin,
    /// Sleeps at once: fewest system calls.
    Sleep,
}

/// Everything a driver needs to know besides the core's own settings.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Settings of the core, its addresses among them.
    pub core: bowline_rds::Config,
    /// How threads wait.
    pub poll: PollMode,
    /// How long [`PollMode::Adaptive`] looks before it sleeps.
    pub spin: Duration,
    /// TCP congestion control of every connection; `None`: `cubic` towards addresses of this
    /// machine, where pacing would halve the rate, else the system's default.
    pub congestion_control: Option<String>,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            core: bowline_rds::Config::default(),
            poll: PollMode::Adaptive,
            spin: Duration::from_micros(25),
            congestion_control: None,
        }
    }
}
