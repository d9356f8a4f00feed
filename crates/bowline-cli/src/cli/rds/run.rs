//! `bowline run`: a program whose RDS sockets are those of the host's node.

mod folder;
mod rpath;
pub(crate) mod started;
pub(crate) mod verbs;

use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use bowline_host::{
    NodeConnection, keep_pipe_signal, preload, preload_library, preload_library_of_musl,
};
use bowline_node::{
    Failure, Outcome,
    control::is_control_socket,
    impair::ImpairOptions,
    programs::{self, Reached},
};
use rustix::{
    fs::{Access, access},
    io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd},
    process::{Resource, getrlimit},
};

use self::started::{Found, find_or_start};
use self::verbs::Network;
use super::libc::{self, Libc};

/// Instead of a path: a node has to run.
const REQUIRE: &str = "require";

/// Run a program whose RDS sockets (AF_RDS) are served by a node on this host.
///
/// The program runs unmodified, and the kernel needs no module. Where no node runs, one is started,
/// with all addresses of this machine that nobody else has at TCP port 16385; all programs of this
/// user share it, and it ends with the last of them. Peers reach it as any node: for rules, limits
/// and a node that stays, start one with `bowline node` first.
///
/// Child processes use the node too, if they have the same C library (glibc or musl). Not possible
/// for programs that are linked statically, that gain privileges when they start (setuid), or that
/// make system calls without the C library.
///
/// The exit status is that of the program, which gets all signals. Without it: 127 if there is no
/// such program, 126 if it cannot be run, 1 if there is no node, 2 for a wrong command line.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Path of the node's socket for programs, or `require`: fail where no node runs [default: that
    /// of the network namespace in which the program opens a socket, in bowline/rds in
    /// $XDG_RUNTIME_DIR or /run; where no node serves there, one is started]
    #[arg(long, value_name = "PATH|require")]
    node: Option<PathBuf>,
    #[command(flatten)]
    impair: ImpairOptions,
    /// Write the program's RDMA packets to this file, as pcapng for Wireshark; those of further
    /// processes go to FILE.PID. What was there is replaced
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Replaces this process by the program.
pub(crate) fn run(args: &Args) -> Outcome {
    let Some((name, words)) = args.program.split_first() else {
        return Err(Failure::usage("the program is missing"));
    };
    let program = find(name)?;
    let (libc, library) = library_for(&program)?;
    let Found { reached, place, lease } = node(args.node.as_deref())?;
    let _lease = lease.map(|lease| kept(&lease)).transpose()?;
    let mut command = Command::new(&program);
    preload(&mut command, &library, place.as_deref());
    let network = Network::new(&args.impair, args.capture.as_deref())?;
    let has_verbs = libc == Libc::Other
        && verbs::put_first(&mut command, &program, &bowline_node::verbs::beside(&reached));
    network.set(&mut command, has_verbs)?;
    keep_pipe_signal(&mut command);
    let error = command.arg0(name).args(words).exec();
    Err(not_run(&program, &error))
}

/// Exit statuses of a shell for a program that does not exist, and for one that it fails to run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

fn not_run(program: &Path, error: &io::Error) -> Failure {
    let status = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
    Failure::Program(status, format!("cannot run {}: {error}", program.display()))
}

/// The library for a program, which has to be of the same C library.
fn library_for(program: &Path) -> Outcome<(Libc, PathBuf)> {
    let libc = libc::of(program).map_err(|error| not_run(program, &error))?;
    let found = |library: Result<_, String>| {
        library.map(|library| (libc, library)).map_err(Failure::failed)
    };
    match libc {
        Libc::Other => found(preload_library()),
        Libc::Musl => found(preload_library_of_musl()),
        Libc::None => {
            let text = format!(
                "{} is linked statically, so its calls cannot be intercepted: use one that is \
                 linked dynamically",
                program.display()
            );
            Err(Failure::Program(NOT_RUN, text))
        }
    }
}

/// Looks for a node that answers.
fn node(given: Option<&Path>) -> Outcome<Found> {
    let (node, place, advice) = match given {
        None => return find_or_start(),
        Some(word) if word == REQUIRE => {
            let node = programs::reachable(&programs::places()).map_err(|none| none.why);
            (node, None, "or leave out --node=require")
        }
        // Its network namespace does not matter: the user has named it.
        Some(place) => {
            let failed = |error| format!("{}: {error}", place.display());
            // It has to accept a connection, at least.
            let node = NodeConnection::open(place).and_then(|_| Reached::at(place));
            if node.as_ref().is_ok_and(Reached::is_silent) && is_control_socket(place) {
                return Err(Failure::usage(format!(
                    "{} is a control socket; --node is the node's socket for programs, which it \
                     names in its line `programs of `bowline run` are served at ..`: give that, or leave \
                     out --node",
                    place.display()
                )));
            }
            (node.map_err(failed), Some(place.to_owned()), "with --programs and this path")
        }
    };
    let leased = node.and_then(|node| Ok((leased(&node)?, node.place)));
    leased.map(|(lease, reached)| Found { reached, place, lease }).map_err(|why| {
        Failure::failed(format!(
            "no node serves programs here ({why}): start one with `bowline node`, {advice}"
        ))
    })
}

/// Takes a lease of a node that needs it.
fn leased(node: &Reached) -> Result<Option<OwnedFd>, String> {
    node.lease().map_err(|error| format!("{}: it ends: {error}", node.place.display()))
}

/// A number that programs do not expect to be the next one.
const LEASE_NUMBER: u64 = 1000;

/// Makes a lease one that the program inherits.
fn kept(lease: &OwnedFd) -> Outcome<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let from = limit.saturating_sub(16).min(LEASE_NUMBER) as i32;
    let keep = || {
        let kept = fcntl_dupfd_cloexec(lease.as_fd(), from)?;
        fcntl_setfd(&kept, FdFlags::empty())?;
        Ok(kept)
    };
    keep().map_err(|error: rustix::io::Errno| {
        Failure::failed(format!("cannot keep a node for the program: {error}"))
    })
}

/// Where programs are if `PATH` is not set: as for `execvp`, not in the folder of this process.
const FOLDERS: &str = "/bin:/usr/bin";

/// The file of a program, as a shell finds it.
fn find(name: &OsStr) -> Outcome<PathBuf> {
    let path = Path::new(name);
    let places: Vec<_> = if path.components().count() > 1 {
        vec![path.to_owned()]
    } else {
        let folders = env::var_os("PATH").unwrap_or_else(|| FOLDERS.into());
        env::split_paths(&folders).map(|folder| folder.join(path)).collect()
    };
    if let Some(found) = first_program(places.iter().cloned()) {
        return Ok(found);
    }
    let no_such = || Failure::Program(NOT_FOUND, format!("{}: no such command", path.display()));
    Err(places.iter().find_map(|place| why_not(place)).unwrap_or_else(no_such))
}

/// Why this process may not start what is at a place; `None` where nothing is.
fn why_not(place: &Path) -> Option<Failure> {
    let error = match place.metadata() {
        Ok(found) if found.is_dir() => io::ErrorKind::IsADirectory.into(),
        Ok(_) => io::ErrorKind::PermissionDenied.into(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => error,
    };
    Some(not_run(place, &error))
}

/// The first that is a file which this process may start: `execvp`, too, tries the next folder.
fn first_program(mut places: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    places.find(|place| place.is_file() && access(place, Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_file_that_may_not_be_started_is_passed_over() {
        let folder = env::temp_dir().join(format!("bowline-find-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let places = ["text", "program"].map(|name| folder.join(name));
        for (place, mode) in places.iter().zip([0o644, 0o755]) {
            fs::write(place, "#!/bin/sh").unwrap();
            fs::set_permissions(place, fs::Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(first_program(places.clone().into_iter()), Some(places[1].clone()));
        assert_eq!(first_program(places[..1].iter().cloned()), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
