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

use crate::{Failure, Outcome};
use bowline_base::count::Described;

pub use disks::{disks_of, engine, exports, exports_of, mapped};
pub use exposition::Exposition;
pub use host::name as host_name;
pub use http::Server;
pub use rds::node;

use exposition::Kind;

/// Writes the metrics of one process.
pub type Source = Box<dyn Fn(&mut Exposition) + Send>;

/// Where metrics are served, and to whom.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Address and port; `None`: metrics are not served.
    pub place: Option<SocketAddr>,
    /// Names of this host, beside its own, by which clients may ask; [`host_name`] checks them.
    pub hosts: Vec<String>,
}

impl Settings {
    /// Returns the settings of a place and of the names by which clients may ask.
    ///
    /// # Errors
    ///
    /// A name that no host has.
    pub fn of(place: Option<SocketAddr>, hosts: &[String]) -> Outcome<Self> {
        let hosts = hosts.iter().map(|host| host_name(host));
        let hosts = hosts.collect::<Result<_, _>>().map_err(Failure::usage)?;
        Ok(Self { place, hosts })
    }

    /// Returns the port, if metrics are served.
    pub fn port(&self) -> Option<u16> {
        self.place.map(|place| place.port())
    }

    /// Serves metrics until the result is dropped, if there is a place for them, and says where.
    ///
    /// # Errors
    ///
    /// The place cannot be listened at.
    pub fn serve(&self, source: Source) -> Outcome<Option<Server>> {
        let Some(place) = self.place else { return Ok(None) };
        let hosts = host::Hosts::new(self.hosts.clone());
        let server = Server::start(place, hosts, source).map_err(|error| {
            Failure::failed(format!(
                "cannot serve metrics at {place}: {error}; choose another address with --metrics \
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
