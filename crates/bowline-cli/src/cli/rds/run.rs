//! `bowline run`: a program whose RDS sockets are those of the host's node.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use bowline_host::{preload, preload_library};

use super::programs;
use crate::cli::{Failure, Outcome};

/// Run a program whose RDS sockets (AF_RDS) are those of a node on this host.
///
/// The program needs no change, and the kernel no module: start a node with `bowline node` before.
/// What the program starts runs so as well. Programs that are linked statically, that gain
/// privileges when they are started, or that make system calls past the C library cannot be run so.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Place at which the node serves programs [default: bowline/rds/host.sock in
    /// $XDG_RUNTIME_DIR or /run]
    #[arg(long, value_name = "PATH")]
    node: Option<PathBuf>,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Replaces this process by the program.
pub(crate) fn run(args: &Args) -> Outcome {
    let Some((name, words)) = args.program.split_first() else {
        return Err(Failure::usage("no program is named"));
    };
    let library = preload_library().map_err(Failure::failed)?;
    let node = reachable(args.node.as_deref())?;
    let program = find(name)?;
    refuse_static(&program)?;
    let mut command = Command::new(&program);
    preload(&mut command, &library, &node);
    let error = command.arg0(name).args(words).exec();
    Err(Failure::failed(format!("cannot start {}: {error}", program.display())))
}

/// Path of the socket of a node that answers.
fn reachable(given: Option<&Path>) -> Outcome<PathBuf> {
    let places = given.map_or_else(programs::places, |place| vec![place.to_owned()]);
    let mut why = String::new();
    for place in &places {
        match UnixStream::connect(place) {
            Ok(_) => return Ok(place.clone()),
            Err(error) if why.is_empty() => why = format!("{}: {error}", place.display()),
            Err(error) => why = format!("{why}; {}: {error}", place.display()),
        }
    }
    Err(Failure::failed(format!(
        "no node serves programs here ({why}): start one with `bowline node`"
    )))
}

/// The file of a program, as a shell finds it.
fn find(name: &OsStr) -> Outcome<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return Ok(path.to_owned());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders).map(|folder| folder.join(path)).find(|p| p.is_file());
    found.ok_or_else(|| Failure::failed(format!("{}: no such command", path.display())))
}

/// A program without an interpreter loads no libraries.
fn refuse_static(program: &Path) -> Outcome {
    let failed =
        |error: io::Error| Failure::failed(format!("cannot read {}: {error}", program.display()));
    let mut start = Vec::new();
    File::open(program).and_then(|file| file.take(4096).read_to_end(&mut start)).map_err(failed)?;
    if is_static(&start) {
        return Err(Failure::failed(format!(
            "{} is linked statically, so its calls cannot be reached: use one that is linked \
             dynamically",
            program.display()
        )));
    }
    Ok(())
}

/// Tells whether the beginning of a file is that of a 64-bit ELF program that names no interpreter.
fn is_static(start: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    if !start.starts_with(b"\x7fELF\x02") {
        return false;
    }
    let bytes = |at: usize, len: usize| start.get(at..at + len);
    let half = |at| bytes(at, 2).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
    let word = |at| bytes(at, 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    let long = |at| bytes(at, 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
    let (Some(offset), Some(size), Some(count)) = (long(32), half(54), half(56)) else {
        return false;
    };
    let Ok(offset) = usize::try_from(offset) else { return false };
    let mut kinds = (0..usize::from(count)).map(|n| word(offset + n * usize::from(size)));
    // A program header table outside the bytes read proves nothing.
    kinds.all(|kind| kind.is_some_and(|kind| kind != PT_INTERP))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(kinds: &[u32]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..5].copy_from_slice(b"\x7fELF\x02");
        file[32..40].copy_from_slice(&64u64.to_ne_bytes());
        file[54..56].copy_from_slice(&56u16.to_ne_bytes());
        file[56..58].copy_from_slice(&(kinds.len() as u16).to_ne_bytes());
        for kind in kinds {
            file.extend(kind.to_ne_bytes());
            file.extend([0; 52]);
        }
        file
    }

    #[test]
    fn programs_without_an_interpreter_are_static() {
        assert!(is_static(&elf(&[1, 2])));
        assert!(!is_static(&elf(&[6, 3, 1])));
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(&elf(&[1, 2])[..100]), "the table is not all there");
        assert!(!is_static(b""));
    }
}
