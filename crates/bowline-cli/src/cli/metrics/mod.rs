//! Metrics for Prometheus over HTTP: what a running command has counted, at `--metrics`.
//!
//! ```text
//! counters, tables of a node, device, server -> Source -> Exposition (text) -> http -> Prometheus
//! ```
//!
//! Names follow Prometheus' rules: base units, `_total` for counters, one family per meaning. A
//! source takes what it shows under the locks of its objects, and lets them go before a byte is
//! sent.

mod disks;
mod exposition;
mod host;
mod http;
mod process;
mod rdma;
mod rds;

use std::net::SocketAddr;

use bowline_base::count::Described;
use bowline_node::{Failure, Outcome};

pub(crate) use disks::{disks_of, engine, exports, exports_of, mapped};
pub(crate) use exposition::Exposition;
pub(crate) use http::Server;
pub(crate) use rds::node;

use exposition::Kind;

/// Writes the metrics of one process.
pub(crate) type Source = Box<dyn Fn(&mut Exposition) + Send>;

/// The option of commands that serve metrics.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct MetricsOptions {
    /// Serve metrics for Prometheus over HTTP at this address and port, as 127.0.0.1:9465, below
    /// /metrics. There is no authentication: whoever reaches the address can read the names of
    /// peers, sessions and disks, so keep it on loopback or behind a proxy. Clients ask by an IP
    /// address, localhost, the name of this host, or one of --metrics-host
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,
    /// Serve metrics to clients that ask by this name of the host as well; may be repeated. Others
    /// are refused: a web page could have its own name lead here, and a browser would let it read
    #[arg(long, value_name = "NAME", value_parser = host::name)]
    metrics_host: Vec<String>,
}

impl MetricsOptions {
    /// Returns the options, or else what a configuration file says.
    pub(crate) fn or(self, place: Option<SocketAddr>, hosts: Vec<String>) -> Outcome<Self> {
        let hosts = hosts.iter().map(|host| host::name(host));
        let hosts = hosts.collect::<Result<_, _>>().map_err(Failure::usage)?;
        let metrics_host = if self.metrics_host.is_empty() { hosts } else { self.metrics_host };
        Ok(Self { metrics: self.metrics.or(place), metrics_host })
    }

    /// Returns the port, if metrics are served.
    pub(crate) fn port(&self) -> Option<u16> {
        self.metrics.map(|place| place.port())
    }

    /// Serves metrics until the result is dropped, if the user asked for it, and says where.
    pub(crate) fn serve(&self, source: Source) -> Outcome<Option<Server>> {
        let Some(place) = self.metrics else { return Ok(None) };
        let hosts = host::Hosts::new(self.metrics_host.clone());
        let server = Server::start(place, hosts, source).map_err(|error| {
            Failure::failed(format!(
                "cannot serve metrics at {place}: {error}; choose another place with --metrics \
                 ADDRESS:PORT"
            ))
        })?;
        say!("metrics at http://{}/metrics", server.place());
        if !place.ip().is_loopback() {
            note!(
                "bowline: metrics at {} have no authentication: whoever reaches the address can \
                 read the names of peers, sessions and disks",
                server.place()
            );
        }
        Ok(Some(server))
    }
}

/// Writes a family of one sample for each counter.
fn counters(
    out: &mut Exposition,
    prefix: &str,
    labels: &[(&str, &str)],
    all: impl IntoIterator<Item = Described>,
) {
    for Described { name, meaning, value } in all {
        let name = format!("{prefix}_{}", counter_name(name));
        out.family(&name, Kind::Counter, meaning).sample(labels, value);
    }
}

/// Returns a counter's name by Prometheus' rules: the unit last, then `_total`. A few of the
/// kernel's names have the unit elsewhere, or none.
fn counter_name(name: &str) -> String {
    let name = match name {
        "copy_to_user" => "copy_to_user_bytes",
        "copy_from_user" => "copy_from_user_bytes",
        "recv_bytes_added_to_sock" => "recv_added_to_sock_bytes",
        "recv_bytes_freed_fromsock" => "recv_freed_from_sock_bytes",
        name => name.strip_prefix("bl_").unwrap_or(name),
    };
    match name.strip_prefix("bytes_") {
        Some(rest) => format!("{rest}_bytes_total"),
        None => format!("{name}_total"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_of_a_counter_stands_before_total() {
        for (name, wanted) in [
            ("conn_reset", "conn_reset_total"),
            ("bl_links_up", "links_up_total"),
            ("bytes_copied_in", "copied_in_bytes_total"),
            ("recv_rdma_bytes", "recv_rdma_bytes_total"),
            ("copy_to_user", "copy_to_user_bytes_total"),
            ("recv_bytes_added_to_sock", "recv_added_to_sock_bytes_total"),
        ] {
            assert_eq!(counter_name(name), wanted);
        }
    }
}
