//! The words of the rnbd tool, over the control sockets of the processes that run here and over
//! trees of files: the kernel's own, or one that bowline has mounted.
//!
//! ```text
//! words -> grammar -> Request -> run: rows (world, columns) -> format -> standard output
//!                                     writes (world)        -> exit status
//! world: control sockets, files (sysfs)
//! ```
//!
//! The same words, fields, tables and exit statuses as the tool that administers the kernel
//! modules [NB-41..44] [NB-45]; json and xml are valid here.

mod columns;
mod format;
mod grammar;
mod run;
mod sysfs;
mod words;
mod world;

use std::{fmt, io};

use bowline_ctl::Errno;
use columns::Target;

use crate::cli::{Failure, Outcome};

pub(super) use grammar::{is_mode, is_of_sessions, names_path, says_target};
pub(super) use words::session_name;
pub(super) use world::Place;

/// Why a command was not carried out: its exit status comes from the error number.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Refusal {
    errno: Errno,
    text: String,
}

impl Refusal {
    fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self { errno, text: text.into() }
    }

    fn usage(text: impl Into<String>) -> Self {
        Self::new(Errno::EINVAL, text)
    }

    fn missing(text: impl Into<String>) -> Self {
        Self::new(Errno::ENOENT, text)
    }

    /// What writing to or reading from an attribute came to.
    fn of(errno: Errno, path: &str) -> Self {
        Self::new(errno, format!("{path}: {}", errno.strerror()))
    }

    /// Adds what can be done about it.
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

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Errno(refusal.errno, refusal.text)
    }
}

/// What comes before the words.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manner<'a> {
    /// Where to look.
    pub(super) place: Place<'a>,
    /// Print every write before it is done.
    pub(super) debug: bool,
    /// Print every write and do none.
    pub(super) simulate: bool,
    /// Say what is looked at.
    pub(super) verbose: bool,
}

/// Carries out the words.
pub(super) fn run(words: &[String], manner: Manner<'_>) -> Outcome {
    let request = grammar::parse(words)?;
    let mut world = world::World::gather(manner.place)?;
    if manner.verbose || request.options.verbose {
        for place in world.places() {
            note!("looks at {}", place.display());
        }
    }
    run::run(&request, &mut world, manner)?;
    Ok(())
}

/// Prints what may come behind the words, one word per line: those words that `fits` takes, and
/// names of what is there. `full` are the words with what they mean and do not say.
pub(super) fn complete(words: &[String], full: &[String], fits: fn(&str) -> bool) {
    for word in grammar::next(words).into_iter().filter(|word| fits(word)) {
        say!("{word}");
    }
    let (modes, targets) = grammar::names_next(full);
    if targets.is_empty() {
        return;
    }
    // Where nothing can be looked at there are no names.
    let Ok(world) = world::World::gather(Place::Here) else { return };
    let mut names: Vec<String> = Vec::new();
    for target in targets {
        let key = match target {
            Target::Device => "devname",
            Target::Session => "sessname",
            Target::Path => "pathname",
        };
        let rows = modes.iter().flat_map(|mode| world.rows(*mode, target));
        names.extend(rows.map(|row| row.item.text(key).to_owned()));
    }
    names.sort();
    names.dedup();
    for name in names {
        say!("{name}");
    }
}

/// Parses a path such as `ip:10.0.0.1@ip:10.0.0.2`; a bare address gets its prefix.
pub(super) fn path_spec(text: &str) -> Outcome<bowline_ctl::PathSpec> {
    Ok(words::path_spec(text)?)
}

/// Refuses what cannot be the name of a session.
pub(super) fn no_address(name: &str) -> Outcome {
    Ok(words::no_address(name)?)
}
