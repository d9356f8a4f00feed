//! `--background`: a command starts itself once more, without that option, and ends when this other
//! process is ready.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
        unix::process::CommandExt,
    },
    process::{self, Command, Stdio},
    time::Duration,
};

use crate::{Failure, Outcome};

/// The option, which the other process does not get.
const OPTION: &str = "--background";
/// Name of the abstract socket at which the first process waits, for the other one.
const VARIABLE: &str = "BOWLINE_BACKGROUND";
/// How often the first process checks whether the other one has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Starts the command line of this process in another one, which has its output but neither its
/// input nor the signals of its terminal, and waits until it is ready. If that
/// process ends before, this one ends with its exit status.
///
/// # Errors
/// The process cannot be started.
pub fn start() -> Outcome {
    let cannot =
        |error: io::Error| Failure::failed(format!("cannot start in the background: {error}"));
    let name = format!("bowline-background-{}", process::id());
    let socket = SocketAddr::from_abstract_name(&name).and_then(|at| UnixDatagram::bind_addr(&at));
    let socket = socket.map_err(cannot)?;
    socket.set_read_timeout(Some(CHECK_INTERVAL)).map_err(cannot)?;
    let mut command = Command::new(env::current_exe().map_err(cannot)?);
    let mut words = env::args_os();
    // It may be called by another name, as `rnbd`.
    command.arg0(words.next().unwrap_or_default()).args(words.filter(|word| word != OPTION));
    command.env(VARIABLE, &name).stdin(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(cannot)?;
    loop {
        if socket.recv(&mut [0]).is_ok() {
            say!("process {0} runs in the background; `kill {0}` ends it", child.id());
            return Ok(());
        }
        if let Some(status) = child.try_wait().map_err(cannot)? {
            // It has said why.
            process::exit(status.code().filter(|code| *code != 0).unwrap_or(1));
        }
    }
}

/// The process that has started this one in the background, if one has.
///
/// It is connected from the start: a process that is confined connects to nobody.
#[derive(Debug)]
pub(crate) struct Starter(Option<UnixDatagram>);

impl Starter {
    /// Returns that of this process.
    pub(crate) fn own() -> Self {
        let connected = |name: &[u8]| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&SocketAddr::from_abstract_name(name)?)?;
            io::Result::Ok(socket)
        };
        Self(env::var(VARIABLE).ok().and_then(|name| connected(name.as_bytes()).ok()))
    }

    /// Says that this process is ready. Who waited no longer cannot be helped.
    pub(crate) fn ready(&self) {
        let _ = self.0.as_ref().map(|socket| socket.send(&[1]));
    }
}
