//! Servers of storage by others: started by the receiver, and gone with it.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use crate::cell::Subject;
use crate::role::{PROGRAM, Role};
use crate::sys;

/// Version that a peer's server prints, or why it is missing; and the packages that have it.
pub(crate) fn version(subject: Subject) -> (Result<String, String>, &'static str) {
    match subject {
        Subject::Nbdkit => (asked("nbdkit", "--version"), "nbdkit"),
        Subject::QemuNbd => (asked("qemu-nbd", "--version"), "qemu-utils"),
        Subject::Nbdfuse => (asked("nbdfuse", "--version"), "libnbd-bin"),
        // iscsi-perf has no option that tells its version.
        _ => (
            asked("tgtd", "--version")
                .map(|version| format!("tgtd {version}, iscsi-perf"))
                .and_then(|version| found("iscsi-perf").map(|()| version)),
            "tgt libiscsi-bin",
        ),
    }
}

/// The first line that a program says.
fn asked(program: &str, word: &str) -> Result<String, String> {
    let out = command(program).arg(word).stdin(Stdio::null()).output();
    let out = out.map_err(|_| format!("{program} is not installed"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().next().filter(|_| out.status.success());
    line.map(|line| line.trim().to_owned()).ok_or(format!("{program} does not print its version"))
}

fn found(program: &str) -> Result<(), String> {
    let out = command(program).stdin(Stdio::null()).output();
    out.map(drop).map_err(|_| format!("{program} is not installed"))
}

/// Looks for a program where daemons are, too.
pub(super) fn command(program: &str) -> Command {
    let sbin = std::path::Path::new("/usr/sbin").join(program);
    if sbin.exists() { Command::new(sbin) } else { Command::new(program) }
}

/// Starts a server with a socket that listens already, as systemd does, so that the socket's
/// congestion control is the anchors'. Returns the server and the port.
pub(super) fn start_with_socket(
    role: &Role,
    program: &str,
    args: &[&str],
) -> Result<(Child, u16), String> {
    let failed = |e: std::io::Error| format!("{program}: {e}");
    let socket = TcpListener::bind((role.plain_ip(), 0)).map_err(failed)?;
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc); // accepted sockets take it over
    }
    let port = socket.local_addr().map_err(failed)?.port();
    Ok((start_on(program, args, socket.into())?, port))
}

/// Starts a server with a socket that listens already.
pub(crate) fn start_on(program: &str, args: &[&str], socket: OwnedFd) -> Result<Child, String> {
    // A shell prints its process number and becomes the server: nothing else knows that number.
    const BECOME: &str = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", BECOME, program]).args(args).stdin(socket);
    start(&mut command).map_err(|e| format!("{program}: {e}"))
}

/// Starts a program that ends with this process.
pub(super) fn start(command: &mut Command) -> std::io::Result<Child> {
    sys::end_with_this_thread(command);
    command.stdout(Stdio::null()).spawn()
}

/// Serves until the parent has had enough: an end of the server before that is an error. `at` says
/// where it can be reached.
pub(super) fn serve(mut role: Role, mut server: Child, at: &str) -> Result<(), String> {
    role.ready(&format!("{at} {PROGRAM}={}", server.id()))?;
    let status = server.wait().map_err(|e| format!("waiting for the server: {e}"))?;
    Err(format!("the server ended: {status}"))
}
