//! RDMA with and without hardware: `devices`, `rping`, `perf` and `cm-listen`, over the verbs of
//! `bowline-verbs`.
//!
//! ```text
//! rping, perf -> link (queue pair, memory, completions) -> dyn Device <- soft (RoCEv2 over UDP)
//!             -> arrivals (events of connections)       ->            <- rdma-core (rxe0, mlx5_0)
//! ```

mod arrivals;
mod cm_listen;
mod devices;
mod link;
mod local;
mod others;
mod perf;
mod rping;
mod serving;
mod verbs_programs;
mod wire;

use std::time::Duration;

use bowline_node::Failure;
use bowline_verbs::Error;

pub(crate) use cm_listen::{Args as CmListenArgs, run as run_cm_listen};
pub(crate) use devices::{Args as DevicesArgs, run as run_devices};
pub(crate) use others::{Args as OthersArgs, run as run_others};
pub(crate) use perf::{Args as PerfArgs, run as run_perf};
pub(crate) use rping::{Args as RpingArgs, run as run_rping};

/// Longest sleep between looks at signals.
const SLICE: Duration = Duration::from_millis(100);

/// Why a connection is over.
#[derive(Debug)]
enum Ended {
    /// The user asked to stop.
    Stopped,
    /// The peer has ended the connection.
    Left,
    /// Something went wrong.
    Failed(String),
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<Ended> for Failure {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::Stopped => Self::failed("stopped before the end"),
            Ended::Left => Self::failed("the peer has ended the connection"),
            Ended::Failed(text) => Self::Failed(text),
        }
    }
}
