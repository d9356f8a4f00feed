//! The commands of the rnbd tool, over the control sockets of the processes that run here and over
//! trees of files: the kernel's own, or one that bowline has mounted.
//!
//! ```text
//! arguments -> grammar -> Request -> run: rows (inventory, columns) -> format -> standard output
//!                                     writes (inventory)        -> exit status
//! inventory: control sockets, files (sysfs)
//! ```
//!
//! The same arguments, fields, tables and exit statuses as the tool that administers the kernel
//! modules [NB-41..44] [NB-45], except that a wrong command line gives 2, as with every command
//! here; json and xml are valid here.

mod arguments;
mod columns;
mod exports;
mod format;
mod grammar;
mod inventory;
mod run;
mod sysfs;
mod top;

use std::{fmt, io};

use bowline_ctl::Errno;
use bowline_node::{Failure, Outcome, disks::Trouble, log::shown};
use columns::Target;

pub(super) use grammar::{has_target, is_mode, is_of_sessions, names_path};
pub(super) use inventory::Place;
pub(super) use top::{TopSample, TopView};

/// Why a command was not carried out: its exit status comes from the error number, or is 2 for a
/// wrong command line.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Refusal {
    errno: Errno,
    text: String,
    is_usage: bool,
}

impl Refusal {
    fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self { errno, text: text.into(), is_usage: false }
    }

    fn usage(text: impl Into<String>) -> Self {
        Self { is_usage: true, ..Self::new(Errno::EINVAL, text) }
    }

    fn missing(text: impl Into<String>) -> Self {
        Self::new(Errno::ENOENT, text)
    }

    /// An error of writing to or reading from an attribute.
    fn of(errno: Errno, path: &str) -> Self {
        Self::new(errno, format!("{path}: {}", errno.strerror()))
    }

    /// Adds advice on what to do.
    fn with(self, advice: &str) -> Self {
        Self { text: format!("{}: {advice}", self.text), ..self }
    }

    fn system(error: &io::Error, what: String) -> Self {
        Self::new(Errno::of(error), format!("{what}: {error}"))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Trouble> for Refusal {
    fn from(trouble: Trouble) -> Self {
        Self::new(trouble.errno, trouble.text)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        if refusal.is_usage {
            return Self::Usage(refusal.text);
        }
        Self::Errno(refusal.errno, refusal.text)
    }
}

/// Options of running a command, given before its arguments.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunOptions<'a> {
    /// Which sockets or trees to use.
    pub(super) place: Place<'a>,
    /// Print every write before it is carried out.
    pub(super) debug: bool,
    /// Print every write and carry out none.
    pub(super) simulate: bool,
    /// Print which sockets and trees are read.
    pub(super) verbose: bool,
}

/// Prints the exports of servers, also those that nobody has open.
pub(super) fn exports(place: Place<'_>, json: bool, verbose: bool) -> Outcome {
    Ok(exports::run(place, json, verbose)?)
}

/// Carries out a command.
pub(super) fn run(arguments: &[String], run_options: RunOptions<'_>) -> Outcome {
    let request = grammar::parse(arguments)?;
    let mut inventory = inventory::Inventory::collect(run_options.place)?;
    if run_options.verbose || request.options.verbose {
        for place in inventory.places() {
            note!("reading {}", place.display());
        }
    }
    run::run(&request, &mut inventory, run_options)?;
    Ok(())
}

/// Prints possible next arguments, one per line: keywords that `fits` accepts, and names of
/// existing objects. `full` are the arguments with the omitted target filled in.
pub(super) fn complete(arguments: &[String], full: &[String], fits: fn(&str) -> bool) {
    for word in grammar::next(arguments).into_iter().filter(|word| fits(word)) {
        say!("{word}");
    }
    let (modes, targets) = grammar::next_names(full);
    if targets.is_empty() {
        return;
    }
    // Without a socket or tree there are no names.
    let Ok(inventory) = inventory::Inventory::collect(Place::Here) else { return };
    let mut names: Vec<String> = Vec::new();
    for target in targets {
        let key = match target {
            Target::Device => "devname",
            Target::Session => "sessname",
            Target::Path => "pathname",
        };
        let rows = modes.iter().flat_map(|mode| inventory.rows(*mode, target));
        names.extend(rows.map(|row| row.item.text(key).to_owned()));
    }
    names.sort();
    names.dedup();
    for name in names {
        say!("{}", shown(&name));
    }
}
