//! A switch with slow ports and small buffers, out of network namespaces and the kernel's token
//! buckets (tbf).
//!
//! ```text
//!   client 1  10.90.1.2 ---- 10.90.1.1 .
//!   client 2  10.90.2.2 ---- 10.90.2.1  router  10.90.0.1 ---- 10.90.0.2, 10.90.0.3, ..  server
//!   ..                                 '
//! ```
//! Every port of the router sends at one rate, queues so many bytes and drops what comes beyond
//! that. One client meets the limit at the server's port, or at its own where data come back; the
//! data of several clients meet at the server's port.

use std::io::Write;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::plan::Link;
use crate::sys::Network;

/// Bytes that a port may send at once, as the token bucket needs them at these rates.
const BURST: &str = "32kb";

/// What the ports of a router sent and dropped, in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) sent: u64,
    pub(crate) dropped: u64,
}

impl Ports {
    /// What was added since an earlier look.
    pub(crate) const fn since(self, before: Self) -> Self {
        let sent = self.sent.saturating_sub(before.sent);
        Self { sent, dropped: self.dropped.saturating_sub(before.dropped) }
    }

    /// Dropped packets, of those sent.
    pub(crate) fn share(self) -> f64 {
        self.dropped as f64 / self.sent.max(1) as f64
    }
}

/// The networks of a server, a router and some clients. They go when this and every process in them
/// is gone.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) server: Network,
    router: Network,
    pub(crate) clients: Vec<Network>,
}

impl Scene {
    /// Builds one.
    ///
    /// # Errors
    /// Says what is missing on this machine.
    pub(crate) fn build(link: &Link, mtu: u32, clients: usize) -> Result<Self, String> {
        let network = || {
            Network::new()
                .map_err(|e| format!("network namespaces cannot be made ({e}): run it as root"))
        };
        let clients = (0..clients).map(|_| network()).collect::<Result<Vec<_>, _>>()?;
        let scene = Self { server: network()?, router: network()?, clients };
        scene.connect(link, mtu)?;
        let forward = || std::fs::write("/proc/sys/net/ipv4/ip_forward", "1");
        let forward = scene.router.inside(forward);
        forward.map_err(|e| format!("/proc/sys/net/ipv4/ip_forward: {e}"))?;
        Ok(scene)
    }

    fn connect(&self, link: &Link, mtu: u32) -> Result<(), String> {
        let ends = std::iter::once(&self.server).chain(&self.clients);
        let (mut of_router, mut queues) = (String::from("link set dev lo up\n"), String::new());
        for (n, end) in ends.clone().enumerate() {
            let path = end.path();
            of_router += &format!(
                "link add p{n} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {path}\n\
                 addr add 10.90.{n}.1/24 dev p{n}\n\
                 link set dev p{n} up\n"
            );
            let Link { rate, limit, .. } = link;
            queues += &format!(
                "qdisc replace dev p{n} root tbf rate {rate}bit burst {BURST} limit {limit}\n"
            );
        }
        batch(&self.router, "ip", &of_router)?;
        batch(&self.router, "tc", &queues)?;
        for (n, end) in ends.enumerate() {
            // The server has an address for each client, the client one.
            let addresses = if n == 0 { 2..2 + self.clients.len() } else { 2..3 };
            let addresses: String =
                addresses.map(|host| format!("addr add 10.90.{n}.{host}/24 dev eth0\n")).collect();
            // As behind a network card, packets are cut before they leave the machine: the router
            // queues, counts and drops single packets and not bursts of 64 KiB.
            let up = format!(
                "link set dev lo up\n{addresses}\
                 link set dev eth0 gso_max_segs 1 up\n\
                 route add default via 10.90.{n}.1\n"
            );
            batch(end, "ip", &up)?;
        }
        Ok(())
    }

    /// Addresses of the server and of a client, counted from 0, for each other.
    pub(crate) const fn addresses(client: usize) -> (Ipv4Addr, Ipv4Addr) {
        let n = client as u8;
        (Ipv4Addr::new(10, 90, 0, 2 + n), Ipv4Addr::new(10, 90, 1 + n, 2))
    }

    /// Has TCP of programs that choose no congestion control use this one.
    ///
    /// # Errors
    /// Says what the kernel has against it.
    pub(crate) fn choose(&self, cc: &str) -> Result<(), String> {
        // By the route, since a network of its own has no say in what all of them may use.
        for (n, end) in std::iter::once(&self.server).chain(&self.clients).enumerate() {
            let route = format!("route replace default via 10.90.{n}.1 congctl {cc}\n");
            batch(end, "ip", &route)?;
        }
        Ok(())
    }

    /// What the router's ports sent and dropped so far.
    pub(crate) fn ports(&self) -> Result<Ports, String> {
        let mut command = Command::new("tc");
        self.router.house(&mut command);
        let out = command.args(["-s", "-j", "qdisc", "show"]).stdin(Stdio::null()).output();
        let out = out.map_err(|e| missing("tc", &e))?;
        ports(&out.stdout).ok_or_else(|| "tc -s -j qdisc show: no numbers in its answer".into())
    }
}

/// Reads the counters of all token buckets out of what `tc` writes.
fn ports(json: &[u8]) -> Option<Ports> {
    let queues = serde_json::from_slice::<Value>(json).ok()?;
    let buckets = queues.as_array()?.iter().filter(|queue| queue["kind"] == "tbf");
    let add = |sum: Ports, queue: &Value| {
        let (sent, dropped) = (queue["packets"].as_u64()?, queue["drops"].as_u64()?);
        Some(Ports { sent: sum.sent + sent, dropped: sum.dropped + dropped })
    };
    buckets.into_iter().try_fold(Ports::default(), add)
}

fn missing(program: &str, e: &std::io::Error) -> String {
    format!("starting {program}: {e}; the package iproute2 has it")
}

/// Has `ip` or `tc` carry out lines of commands in a network.
fn batch(network: &Network, program: &str, lines: &str) -> Result<(), String> {
    let mut command = Command::new(program);
    network.house(&mut command);
    command.args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(|e| missing(program, &e))?;
    let written = child.stdin.take().map(|mut input| input.write_all(lines.as_bytes()));
    let out = child.wait_with_output().map_err(|e| format!("{program}: {e}"))?;
    match written {
        Some(Ok(())) if out.status.success() => Ok(()),
        _ => {
            let said = String::from_utf8_lossy(&out.stderr);
            Err(format!("{program} does not set up the network: {}", said.trim()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_all_ports_add_up() {
        let text = br#"[{"kind":"noqueue","dev":"lo","packets":9,"drops":9},
            {"kind":"tbf","dev":"p0","bytes":7,"packets":1000,"drops":3},
            {"kind":"tbf","dev":"p1","bytes":7,"packets":500,"drops":0}]"#;
        let now = ports(text).unwrap();
        assert_eq!(now, Ports { sent: 1500, dropped: 3 });
        assert!((now.share() - 0.002).abs() < 1e-9);
        assert_eq!(now.since(Ports { sent: 500, dropped: 1 }), Ports { sent: 1000, dropped: 2 });
        assert_eq!(ports(b"no json"), None);
    }
}
