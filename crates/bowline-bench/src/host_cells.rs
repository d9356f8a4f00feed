//! Programs that embed no node: their RDS sockets are those of nodes of this host.
//!
//! ```text
//!   bench (parent)                      sides: this program again, or Python
//!     node of the receiver  <-- rings --  plain sockets, library preloaded as by `bowline run`
//!     node of the sender    <-- rings --  plain sockets, the same
//! ```

mod flows;
mod nodes;
mod pipe;

use std::process::Command;

pub(crate) use nodes::HostNodes;

use crate::cell::{Cell, Kind, Subject};
use crate::role::Sides;

/// A side in Python; it speaks as [`crate::role`] says.
const PYTHON: &str = include_str!("host_cells/side.py");

/// The sides of a cell of this host.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match (cell.kind, cell.subject) {
        (Kind::Stream, Subject::Pipe | Subject::PipePreloaded) => {
            Sides(pipe::write_and_read, pipe::nothing)
        }
        (Kind::Stream, _) => Sides(flows::stream_rx, flows::stream_tx),
        (Kind::Rtt, _) => Sides(flows::answer, flows::ask),
        _ => return None,
    })
}

/// A command that starts a side in Python, without its arguments.
pub(crate) fn python() -> Command {
    let mut command = Command::new("python3");
    command.args(["-B", "-c", PYTHON]);
    command
}
