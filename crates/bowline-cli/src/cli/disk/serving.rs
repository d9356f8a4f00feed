//! Control socket, tree of files and metrics of a process that serves until a stop signal.

use std::{
    path::{Path, PathBuf},
    sync::mpsc::Sender,
};

use bowline_ctl::{Server, Successor, Tree, folder, fusefs, sweep};
use bowline_node::{Failure, Outcome, metrics, mount::mounted, options::MetricsOptions};
use bowline_rtrs_driver::tree::Files;

use crate::cli::common::known::known;

/// Options of controlling the process.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Controls {
    /// Serve no control socket
    #[arg(long, conflicts_with = "control")]
    no_control: bool,
    /// Show sessions and disks as files below this folder, as under /sys; needs FUSE
    #[arg(long, value_name = "FOLDER")]
    tree: Option<PathBuf>,
    /// Files of sessions and paths: all, including those of older kernels, or exactly those of
    /// Linux 6.12
    #[arg(long, value_name = "all|6.12", default_value = "all", hide_possible_values = true,
          value_parser = known(&["all", "6.12"], files))]
    files: Files,
    #[command(flatten)]
    metrics: MetricsOptions,
}

/// What is served; dropping it ends that.
#[derive(Debug)]
pub(super) struct Controlled {
    _metrics: Option<metrics::Server>,
    _socket: Option<Server>,
    _files: Option<fusefs::Mount>,
}

impl Controls {
    /// Returns which files sessions and paths have in the tree.
    pub(super) const fn files(&self) -> Files {
        self.files
    }

    /// Serves tree and metrics; the socket is named after the process unless a place is given.
    /// Processes that ask there to continue in the place of this one are sent to `successors`.
    pub(super) fn serve(
        &self,
        tree: &Tree,
        control: Option<&Path>,
        word: &str,
        metrics: metrics::Source,
        successors: Sender<Successor>,
    ) -> Outcome<Controlled> {
        let socket = if self.no_control {
            None
        } else {
            let own = folder().join(format!("{word}-{}.sock", std::process::id()));
            let place = control.unwrap_or(&own);
            sweep(&folder());
            let served = Server::start_replaceable(place, tree.clone(), successors);
            Some(served.map_err(|error| {
                Failure::failed(format!(
                    "cannot listen on {}: {error}; choose another path with --control SOCKET, or \
                     --no-control",
                    place.display()
                ))
            })?)
        };
        let files = self.tree.as_deref().map(|dir| mounted(tree, dir)).transpose()?;
        let metrics = self.metrics.settings().serve(metrics)?;
        Ok(Controlled { _metrics: metrics, _socket: socket, _files: files })
    }
}

/// Parses a choice of files [RS-46].
fn files(text: &str) -> Result<Files, String> {
    match text {
        "all" => Ok(Files::All),
        "6.12" => Ok(Files::Linux612),
        _ => Err(format!("\"{text}\" is not all or 6.12")),
    }
}
