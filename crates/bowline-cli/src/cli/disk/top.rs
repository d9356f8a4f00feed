//! `bowline rnbd top`: what the disks of this machine do, again and again.

use std::path::PathBuf;

use bowline_node::Outcome;
use clap::builder::PossibleValuesParser;

use crate::cli::{
    common::watch::{self, View},
    tool::{Place, TopSample, TopView},
};

/// Watch the disks that are mapped and exported here: rates, latencies, paths, what waits.
///
/// On a terminal the view changes in place: s, r and / choose the order and the rows, ? shows all
/// keys, and q or Ctrl-C ends it. Elsewhere one view is printed after another. Rates and latencies
/// are those since the previous view, so the first view has none. Disks whose storage fails and
/// paths that are not connected come first.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Columns: SIDE import (mapped here) or export; R/s, W/s requests, RB/s, WB/s bytes, W also discards and zeroes; R50, R99, W50, \
W99 the time below which that percentage of reads, and of all other requests, took at a mapped disk, at most a quarter above the \
true one; BUSY requests that the server has (of an export: that storage has), WAIT those that wait for a slot or for the session; FAILED \
requests that storage has failed. Of paths: BUSY requests on it, FAILOVER requests that it took over from others, RECONN times that it \
came back.")]
pub(super) struct Args {
    #[command(flatten)]
    watch: watch::Options,
    /// Order of the disks, as the key s does: state has those first whose storage fails
    #[arg(long, value_name = "ORDER", value_parser = PossibleValuesParser::new(TopView::ORDERS), conflicts_with = "json")]
    sort: Option<String>,
}

/// Runs the command.
pub(super) fn run(args: &Args, control: Option<PathBuf>) -> Outcome {
    let look = move || {
        let place = control.as_deref().map_or(Place::Here, Place::Socket);
        TopSample::take(place)
    };
    watch::run::<TopView>(&args.watch, args.sort.as_deref(), look)
}
