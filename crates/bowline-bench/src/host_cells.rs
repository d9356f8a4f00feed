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

use crate::cell::{Kind, Subject};
use crate::role::{Role, Side};

/// A side in Python; it speaks as [`crate::role`] says.
const PYTHON: &str = include_str!("host_cells/side.py");

/// Runs one side of a cell of this host.
pub(crate) fn run(role: Role) -> Result<(), String> {
    match (role.cell.kind, role.side, role.cell.subject) {
        (Kind::Stream, Side::Rx, Subject::Pipe | Subject::PipePreloaded) => {
            pipe::write_and_read(role)
        }
        (Kind::Stream, Side::Tx, Subject::Pipe | Subject::PipePreloaded) => pipe::nothing(role),
        (Kind::Stream, Side::Rx, _) => flows::stream_rx(role),
        (Kind::Stream, Side::Tx, _) => flows::stream_tx(role),
        (Kind::Rtt, Side::Rx, _) => flows::answer(role),
        (Kind::Rtt, Side::Tx, _) => flows::ask(role),
        (kind, _, subject) => Err(format!("{} has no cell {}", subject.name(), kind.name())),
    }
}

/// A command that starts a side in Python, without its arguments.
pub(crate) fn python() -> Command {
    let mut command = Command::new("python3");
    command.args(["-B", "-c", PYTHON]);
    command
}
