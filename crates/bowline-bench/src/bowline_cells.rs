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
use crate::role::{Probe, Sides};

/// Port of the receiver's first socket; the others follow.
const RX_PORT: u16 = 4000;
/// Port of the sender's first socket; the others follow.
const TX_PORT: u16 = 20000;

/// The sides of a bowline cell.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match (cell.kind, cell.subject) {
        (Kind::Stream, Subject::BowlineBatch) => Sides(flows::batch_rx, flows::batch_tx),
        (Kind::Stream, Subject::BowlineShared) => Sides(flows::stream_rx, flows::shared_tx),
        (Kind::Stream, _) => Sides(flows::stream_rx, flows::stream_tx),
        (Kind::Rtt, _) => Sides(flows::answer, flows::ask),
        (Kind::AllAwake | Kind::OneAsleep, _) => Sides(extras::pairs_rx, extras::pairs_tx),
        (Kind::Sockets | Kind::Nodes, _) => Sides(extras::fan_rx, extras::fan_tx),
        (Kind::IdleSockets, _) => Sides(extras::idle_sockets, extras::nothing),
        (Kind::IdleConnections, _) => Sides(extras::idle_rx, extras::idle_tx),
        (Kind::Write, _) => Sides(rdma::written, rdma::write),
        _ => return None,
    })
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
