//! The options of commands that serve metrics.

use std::net::SocketAddr;

use bowline_node::{
    Failure, Outcome,
    metrics::{Settings, host_name},
};

/// The option of commands that serve metrics.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct MetricsOptions {
    /// Serve metrics for Prometheus over HTTP at this address and port, as 127.0.0.1:9465, below
    /// /metrics. There is no authentication: whoever reaches the address can read the names of
    /// peers, sessions and disks, so keep it on loopback or behind a proxy. Requests must name an
    /// IP address, localhost, the name of this host, or a name given with --metrics-host
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Also accept requests for metrics with this host name; may be repeated. Requests with other
    /// names are refused, because a web page could point its own name here (DNS rebinding) and read
    /// the reply in a browser
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    metrics_host: Vec<String>,
}

impl MetricsOptions {
    /// Returns what these options say.
    pub(crate) fn settings(&self) -> Settings {
        Settings { place: self.metrics, hosts: self.metrics_host.clone() }
    }

    /// Returns what the options say, or else what a configuration file does.
    pub(crate) fn or(self, place: Option<SocketAddr>, hosts: Vec<String>) -> Outcome<Settings> {
        let hosts = hosts.iter().map(|host| host_name(host));
        let hosts = hosts.collect::<Result<_, _>>().map_err(Failure::usage)?;
        let hosts = if self.metrics_host.is_empty() { hosts } else { self.metrics_host };
        Ok(Settings { place: self.metrics.or(place), hosts })
    }
}
