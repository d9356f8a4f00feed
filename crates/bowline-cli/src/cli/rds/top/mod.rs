//! `bowline top`: what a running node does, again and again.

mod view;

use std::{path::PathBuf, time::Instant};

use bowline_node::{Outcome, control::Client};
use clap::builder::PossibleValuesParser;

use self::view::{NodeView, Sample};
use crate::cli::common::watch::{self, View};

/// Watch a running node: connections, rates, queues, sockets and their processes.
///
/// On a terminal the view changes in place: s, r and / choose the order and the rows, ? shows all
/// keys, and q or Ctrl-C ends it. A narrow terminal has fewer columns. Elsewhere one view is
/// printed after another. Rates are those since the previous view, so the first view has none.
/// Connections that are not established come first, with the time and the reason of their end.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Columns: OVER tcp or rdma; PATHS in service and agreed; TX/s, RX/s messages; TXB/s, RXB/s bytes with headers; QUEUED bytes of \
messages that the peer has not acknowledged, WAIT those of them not yet given to the transport, UNACK the others, \
both in messages; LOST times that a path lost its connection; LAST when and why one last ended or was not \
made. SENDQ, RECVQ bytes in the queues of a \
socket. A socket without PID is one of the node itself.")]
pub(crate) struct Args {
    #[command(flatten)]
    watch: watch::Options,
    /// Order of the connections, as the key s does: state has those first that are not established
    #[arg(long, value_name = "ORDER", value_parser = PossibleValuesParser::new(NodeView::ORDERS), conflicts_with = "json")]
    sort: Option<String>,
    /// Control socket of the node [default: that of the only node in this network
    /// namespace; a node in the folder of this user comes first]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    let mut client = Client::connect(args.control.as_deref())?;
    let look = move || client.state().map(|snapshot| Sample { at: Instant::now(), snapshot });
    watch::run::<NodeView>(&args.watch, args.sort.as_deref(), look)
}
