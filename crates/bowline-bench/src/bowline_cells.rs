//! bowline's own cells, through its public interface and with its default settings, except for what
//! the cell itself asks for.

mod extras;
mod flows;
mod rdma;

use std::net::IpAddr;
use std::sync::Arc;

use bowline::rds::{Error, Node, PollMode};
use bowline::verbs::{Device, SoftConfig, SoftDevice};

use crate::cell::{Cell, Kind, Subject, Wait};
use crate::role::{Probe, Role, Side};

/// Port of the receiver's first socket; the others follow.
const RX_PORT: u16 = 4000;
/// Port of the sender's first socket; the others follow.
const TX_PORT: u16 = 20000;

/// Runs one side of a bowline cell.
pub(crate) fn run(role: Role) -> Result<(), String> {
    let batch = role.cell.subject == Subject::BowlineBatch;
    match (role.cell.kind, role.side) {
        (Kind::Stream, Side::Rx) if batch => flows::batch_rx(role),
        (Kind::Stream, Side::Tx) if batch => flows::batch_tx(role),
        (Kind::Stream, Side::Rx) => flows::stream_rx(role),
        (Kind::Stream, Side::Tx) if role.cell.subject == Subject::BowlineShared => {
            flows::shared_tx(role)
        }
        (Kind::Stream, Side::Tx) => flows::stream_tx(role),
        (Kind::Rtt, Side::Rx) => flows::answer(role),
        (Kind::Rtt, Side::Tx) => flows::ask(role),
        (Kind::AllAwake | Kind::OneAsleep, Side::Rx) => extras::pairs_rx(role),
        (Kind::AllAwake | Kind::OneAsleep, Side::Tx) => extras::pairs_tx(role),
        (Kind::Sockets | Kind::Nodes, Side::Rx) => extras::fan_rx(role),
        (Kind::Sockets | Kind::Nodes, Side::Tx) => extras::fan_tx(role),
        (Kind::IdleSockets, Side::Rx) => extras::idle_sockets(role),
        (Kind::IdleSockets, Side::Tx) => extras::nothing(role),
        (Kind::IdleConnections, Side::Rx) => extras::idle_rx(role),
        (Kind::IdleConnections, Side::Tx) => extras::idle_tx(role),
        (Kind::Write, Side::Rx) => rdma::written(role),
        (Kind::Write, Side::Tx) => rdma::write(role),
        (kind, _) => Err(format!("RDS has no cell {}", kind.name())),
    }
}

/// Builds the node of one side.
fn node(cell: &Cell, addresses: &[IpAddr]) -> Result<Node, String> {
    let builder = Node::builder()
        .default_send_buffer(cell.buffer)
        .default_recv_buffer(cell.buffer)
        .congestion_control(Some(cell.cc.clone()).filter(|cc| !cc.is_empty()))
        .poll(match cell.wait {
            Wait::Adaptive => PollMode::Adaptive,
            Wait::Spin => PollMode::Spin,
            Wait::Sleep => PollMode::Sleep,
        });
    let builder = builder.paths(cell.rds_paths());
    let builder = addresses.iter().fold(builder, |builder, ip| builder.address(*ip));
    let builder = if cell.subject == Subject::BowlineRdma {
        builder.rdma(device(cell, addresses)?)
    } else {
        builder
    };
    builder.build().map_err(failed("build"))
}

/// Opens the soft device of one side.
fn device(cell: &Cell, addresses: &[IpAddr]) -> Result<Arc<dyn Device>, String> {
    use bowline::verbs::PollMode;
    let config = SoftConfig {
        addrs: addresses.to_vec(),
        poll: match cell.wait {
            Wait::Adaptive => PollMode::Adaptive,
            Wait::Spin => PollMode::Spin,
            Wait::Sleep => PollMode::Sleep,
        },
        ..SoftConfig::default()
    };
    let device = SoftDevice::open(config).map_err(|e| format!("opening a device: {e}"))?;
    Ok(Arc::new(device))
}

/// Reads what the driver counts.
fn probe(node: &Node) -> Probe {
    let node = node.clone();
    Box::new(move || {
        let stats = node.driver_stats();
        vec![
            ("syscalls", stats.busy_syscalls()),
            ("writes", stats.writes),
            ("reads", stats.reads),
            ("waits", stats.waits),
            ("ioctls", stats.ioctls),
            ("hand_overs", stats.hand_overs),
            ("copied_in", stats.bytes_copied_in),
            ("copied_out", stats.bytes_copied_out),
            ("rdma_doorbells", stats.rdma_doorbells),
            ("rdma_frames_sent", stats.rdma_frames_sent),
            ("rdma_frames_received", stats.rdma_frames_received),
            ("rdma_polls", stats.rdma_polls),
        ]
    })
}

fn failed(call: &'static str) -> impl Fn(Error) -> String {
    move |e| format!("{call}: {e}")
}

fn add_port(base: u16, n: usize) -> Result<u16, String> {
    u16::try_from(n)
        .ok()
        .and_then(|n| base.checked_add(n))
        .ok_or_else(|| format!("{n} sockets are more than there are ports"))
}
