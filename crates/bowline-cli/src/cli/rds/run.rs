//! `bowline run`: a program whose RDS sockets are those of the host's node.

use std::{
    env,
    ffi::{OsStr, OsString},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use bowline_host::{preload, preload_library, preload_library_of_musl};
use bowline_node::{Failure, Outcome, programs};
use rustix::fs::{Access, access};

use super::libc::{self, Libc};

/// Run a program whose RDS sockets (AF_RDS) are served by a node on this host.
///
/// The program runs unmodified, and the kernel needs no module: start a node with `bowline node`
/// first. Child processes use the node too, if they have the same C library (glibc or musl). Not
/// possible for programs that are linked statically, that gain privileges when they start (setuid),
/// or that make system calls without the C library.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Path of the node's socket for programs [default: that of the network namespace in which the
    /// program opens a socket, in bowline/rds in $XDG_RUNTIME_DIR or /run]
    #[arg(long, value_name = "PATH")]
    node: Option<PathBuf>,
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
    let library = library_for(&program)?;
    let node = args.node.as_deref();
    reachable(node)?;
    let mut command = Command::new(&program);
    preload(&mut command, &library, node);
    let error = command.arg0(name).args(words).exec();
    Err(Failure::failed(format!("cannot start {}: {error}", program.display())))
}

/// The library for a program, which has to be of the same C library.
fn library_for(program: &Path) -> Outcome<PathBuf> {
    let libc = libc::of(program);
    match libc.map_err(|e| Failure::failed(format!("cannot read {}: {e}", program.display())))? {
        Libc::Other => preload_library().map_err(Failure::failed),
        Libc::Musl => preload_library_of_musl().map_err(Failure::failed),
        Libc::None => Err(Failure::failed(format!(
            "{} is linked statically, so its calls cannot be intercepted: use one that is linked \
             dynamically",
            program.display()
        ))),
    }
}

/// Looks whether a node answers.
fn reachable(given: Option<&Path>) -> Outcome<()> {
    let found = match given {
        // What is told is not asked of which namespace it is.
        Some(place) => {
            let failed = |error| format!("{}: {error}", place.display());
            UnixStream::connect(place).map(drop).map_err(failed)
        }
        None => programs::reachable(&programs::places()).map(drop),
    };
    found.map_err(|why| {
        Failure::failed(format!(
            "no node serves programs here ({why}): start one with `bowline node`"
        ))
    })
}

/// The file of a program, as a shell finds it.
fn find(name: &OsStr) -> Outcome<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Ok(path.to_owned());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = first_program(env::split_paths(&folders).map(|folder| folder.join(path)));
    found.ok_or_else(|| Failure::failed(format!("{}: no such command", path.display())))
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
