//! Metrics of an RDS node.
//!
//! Counters have the kernel's names; those of RDMA are there if the node has RDMA. A connection,
//! which is a pair of addresses over one transport, has one sample a family, over all its paths.

use std::{collections::BTreeMap, net::IpAddr};

use bowline::rds::{Info, Node};
use bowline_rds::{Counters, PathState};

use super::{
    Exposition, Source, counters,
    exposition::Kind::{self, Counter, Gauge},
    process,
};

/// Connections that have samples: peers cannot make the text longer than these need.
const CONNECTIONS_MAX: usize = 1000;

/// Returns the metrics of a node; `more` writes those of its other services.
pub fn node(node: Node, more: impl Fn(&mut Exposition) + Send + 'static) -> Source {
    process::begin();
    Box::new(move |out| {
        process::write(out);
        let (info, counts) =
            node.driver().inspect(|core| (core.info_without_messages(), core.counters().clone()));
        write(out, &info, &counts);
        counters(out, "bowline_rds_driver", &[], node.driver_stats().described());
        more(out);
    })
}

fn write(out: &mut Exposition, info: &Info, counts: &Counters) {
    let has_rdma = info.rdma.is_some();
    let counted = counts.described();
    let counted = counted.filter(|count| has_rdma || !count.name.starts_with("ib_"));
    counters(out, "bowline_rds", &[], counted);
    sockets(out, info);
    let all = connections(info);
    out.family(
        "bowline_rds_connections",
        Gauge,
        "Connections: pairs of addresses, of each transport.",
    )
    .sample(&[], info.connections.len());
    for (name, kind, help, value) in FAMILIES {
        let mut family = out.family(name, kind, help);
        for ((local, remote, transport), row) in &all {
            let (local, remote) = (local.to_string(), remote.to_string());
            let labels = [("local", &*local), ("remote", &*remote), ("transport", *transport)];
            family.sample(&labels, value(row));
        }
    }
}

fn sockets(out: &mut Exposition, info: &Info) {
    let all = &info.sockets;
    let congested = all.iter().filter(|socket| socket.congested).count();
    let sum = |of: fn(&bowline_rds::SocketInfo) -> usize| all.iter().map(of).sum::<usize>();
    for (name, help, value) in [
        ("bowline_rds_sockets", "Sockets.", all.len()),
        ("bowline_rds_congested_sockets", "Sockets whose senders are told to wait.", congested),
        (
            "bowline_rds_socket_send_queue_bytes",
            "Payload that sockets have sent and peers have not acknowledged.",
            sum(|socket| socket.send_bytes),
        ),
        (
            "bowline_rds_socket_receive_queue_bytes",
            "Payload in receive queues of sockets.",
            sum(|socket| socket.recv_bytes),
        ),
        (
            "bowline_rds_socket_receive_queue_messages",
            "Messages in receive queues of sockets.",
            sum(|socket| socket.recv_messages),
        ),
    ] {
        out.family(name, Gauge, help).sample(&[], value);
    }
}

/// A connection: sums over its paths.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    paths: u64,
    up: u64,
    queued_bytes: u64,
    waiting: u64,
    unacknowledged: u64,
    resets: u64,
    sent: u64,
    received: u64,
    sent_bytes: u64,
    received_bytes: u64,
    congested: bool,
}

type FamilyOf = (&'static str, Kind, &'static str, fn(&Row) -> u64);

const FAMILIES: [FamilyOf; 11] = [
    ("bowline_rds_connection_paths", Gauge, "Paths of the connection.", |row| row.paths),
    ("bowline_rds_connection_paths_up", Gauge, "Paths in service.", |row| row.up),
    (
        "bowline_rds_connection_queued_bytes",
        Gauge,
        "Payload of messages that the peer has not acknowledged.",
        |row| row.queued_bytes,
    ),
    (
        "bowline_rds_connection_send_queue_messages",
        Gauge,
        "Messages not yet given to the transport.",
        |row| row.waiting,
    ),
    (
        "bowline_rds_connection_unacknowledged_messages",
        Gauge,
        "Messages given to the transport and not acknowledged.",
        |row| row.unacknowledged,
    ),
    (
        "bowline_rds_connection_resets_total",
        Counter,
        "Times a path lost its TCP or RDMA connection.",
        |row| row.resets,
    ),
    (
        "bowline_rds_connection_sent_messages_total",
        Counter,
        "Messages queued for the peer, pings and pongs included.",
        |row| row.sent,
    ),
    (
        "bowline_rds_connection_received_messages_total",
        Counter,
        "Messages received, repeated ones not counted.",
        |row| row.received,
    ),
    (
        "bowline_rds_connection_sent_bytes_total",
        Counter,
        "Bytes given to TCP or RDMA for the peer.",
        |row| row.sent_bytes,
    ),
    (
        "bowline_rds_connection_received_bytes_total",
        Counter,
        "Bytes received from the peer over TCP or RDMA.",
        |row| row.received_bytes,
    ),
    (
        "bowline_rds_connection_congested",
        Gauge,
        "Whether the peer has marked at least one of its ports congested.",
        |row| row.congested.into(),
    ),
];

/// Addresses and transport of a connection.
type Key = (IpAddr, IpAddr, &'static str);

/// Returns the first connections. Over RDMA a pair has one for each type of service; they count as
/// one here.
fn connections(info: &Info) -> Vec<(Key, Row)> {
    let mut rows: BTreeMap<Key, Row> = BTreeMap::new();
    for connection in info.connections.iter().take(CONNECTIONS_MAX) {
        let key = (connection.local, connection.remote, connection.transport);
        let row = rows.entry(key).or_default();
        row.sent += connection.sent_messages;
        row.received += connection.received_messages;
        row.sent_bytes += connection.sent_bytes;
        row.received_bytes += connection.received_bytes;
        row.congested |= connection.congested;
    }
    for path in &info.paths {
        let Some(row) = rows.get_mut(&(path.local, path.remote, path.transport)) else { continue };
        row.paths += 1;
        row.up += u64::from(path.state == PathState::Up);
        row.queued_bytes += path.queued_bytes;
        row.waiting += path.send_messages as u64;
        row.unacknowledged += path.retrans_messages as u64;
        row.resets += path.resets;
    }
    rows.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use bowline_rds::{Config, Instant, SendMsg};

    use super::*;

    #[test]
    fn peers_cannot_make_the_text_as_long_as_they_like() {
        let own = IpAddr::from([10, 0, 0, 1]);
        let config = Config { addrs: vec![own], ..Config::default() };
        let mut node = bowline_rds::Node::new(config);
        let socket = node.socket().unwrap();
        let now = Instant::from_nanos(0);
        node.bind(socket, SocketAddr::new(own, 4000)).unwrap();
        let text = |node: &bowline_rds::Node| {
            let mut out = Exposition::default();
            write(&mut out, &node.info(), node.counters());
            out.finish()
        };
        for (peers, lines) in [(10, 10), (1000, CONNECTIONS_MAX), (1100, CONNECTIONS_MAX)] {
            for n in node.info().connections.len()..peers {
                let to = Ipv4Addr::from_bits(0x0a01_0000 + n as u32);
                let name = Some(SocketAddr::from((to, 4000)));
                node.send(now, socket, &SendMsg { name, ..SendMsg::default() }).unwrap();
            }
            let text = text(&node);
            assert_eq!(text.matches("\nbowline_rds_connection_paths{").count(), lines);
            assert!(text.contains(&format!("\nbowline_rds_connections {peers}\n")));
        }
    }
}
