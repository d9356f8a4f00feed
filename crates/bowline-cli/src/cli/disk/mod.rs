//! `bowline rnbd`: disks over RTRS. `export` serves, `map` uses; the other words look at and
//! change what runs, as those of the tool that administers the kernel modules.
//!
//! ```text
//! export, map, verify -> side (devices, engine) -> rnbd-driver -> trees -> control socket, files
//! list, show, ..      -> tool -> control sockets of all of these, or trees of files
//! ```

mod export;
mod front_ends;
pub(super) mod load;
mod lost;
mod map;
mod serving;
mod side;
mod verify;
mod watch;

use std::path::PathBuf;

use super::tool::{self, Manner, Place};
use super::{Failure, Outcome};

/// Block devices over RTRS: export disks, map them, look at them.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = false,
    version,
    subcommand_value_name = "WORD",
    subcommand_help_heading = "Words",
    after_help = "Other words: [client|server|both] [device|session|path] COMMAND [NAME..] [OPTION..]; what is \
clear may be left out. They work on what runs here, on a kernel's own tree and on one of --tree.\n  \
list [FIELDS] [csv|json|xml] [B|K|M|G|T|P|E] [notree] [noheaders] [nototals]\n  \
show NAME [FIELDS] [csv|json|xml] [UNIT]     one device, session or path\n  \
dump [csv|json|xml]                          everything\n  \
map DEVICE from SERVER [PATH..] [ro|rw|migration]     in the client that runs here\n  \
resize DEVICE SIZE [UNIT], unmap DEVICE [force], remap DEVICE|SESSION [force]\n  \
recover DEVICE|SESSION|PATH|all [add-missing], reconnect SESSION|PATH\n  \
add SESSION PATH, delete [SESSION] PATH, readd [SESSION] PATH, disconnect PATH|SESSION\n  \
close DEVICE [SESSION] [force]               on the server\n  \
policy SESSION [round-robin|min-inflight|min-latency], stats NAME, reset NAME\n  \
tree [--path FOLDER], get FILE, set FILE VALUE     the control tree: as JSON, or one file of it\n\
FIELDS are keys with commas, +KEYS or -KEYS to change the usual ones, or all. PATH is \
[SOURCE@]DESTINATION, as ip:10.0.0.1@ip:10.0.0.2. FILE and FOLDER are paths from the root of the tree, as \
class/rtrs-client/s1/max_reconnect_attempts.\n\
Exit status: 0 done, else the low 8 bits of -errno: 254 not found, 234 bad argument."
)]
pub(crate) struct Args {
    /// Control socket: of the process to talk to, or of this one where it serves; without it, all
    /// that run here
    #[arg(long, value_name = "SOCKET", global = true)]
    control: Option<PathBuf>,
    #[command(flatten)]
    manner: Options,
    /// Print the words that may come next
    #[arg(short, long, hide = true)]
    complete: bool,
    #[command(subcommand)]
    word: Option<Word>,
}

/// What comes before the words, or behind them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Look into a tree of files with the names of /sys instead, such as one of --tree; repeat it
    /// for more; without it, /sys itself is looked into where no process answers
    #[arg(long, value_name = "FOLDER", conflicts_with = "control")]
    sysfs: Vec<PathBuf>,
    /// Print every write to a control file before it is done
    #[arg(short, long)]
    debug: bool,
    /// Print every write to a control file, and do none
    #[arg(short, long)]
    simulate: bool,
    /// Say which sockets and trees are looked at
    #[arg(short, long)]
    verbose: bool,
}

impl Options {
    /// `word` works itself, not on a control tree: whoever asks it to simulate must not find that
    /// it did not.
    fn refuse_any(&self, word: &str) -> Result<(), Failure> {
        let given = [
            (!self.sysfs.is_empty(), "--sysfs"),
            (self.debug, "--debug"),
            (self.simulate, "--simulate"),
            (self.verbose, "--verbose"),
        ];
        match given.iter().find(|(given, _)| *given) {
            None => Ok(()),
            Some((_, option)) => Err(Failure::usage(format!(
                "{option} is for words that work on a control tree: {word} does its work itself, and would not heed it"
            ))),
        }
    }
}

#[derive(Debug, clap::Subcommand)]
enum Word {
    Export(export::Args),
    Map(map::Args),
    Verify(verify::Args),
    #[command(external_subcommand)]
    Others(Vec<String>),
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    let Args { control, manner, complete, word } = args;
    let words = match word {
        None => Vec::new(),
        Some(Word::Export(_) | Word::Verify(_)) if complete => Vec::new(),
        Some(Word::Export(args)) => {
            manner.refuse_any("export")?;
            return export::run(&args, control);
        }
        Some(Word::Verify(args)) => {
            manner.refuse_any("verify")?;
            if control.is_some() {
                return Err(Failure::usage("verify has no control socket: leave --control out"));
            }
            return verify::run(&args);
        }
        Some(Word::Map(args)) => match args.words() {
            Some(words) => words,
            None if complete => vec!["map".to_owned()],
            None => {
                manner.refuse_any("map --from")?;
                return map::run(&args, control);
            }
        },
        Some(Word::Others(words)) => words,
    };
    if complete {
        tool::complete(&words, &words, |_| true);
        return Ok(());
    }
    run_words(About::Disks, words, control, manner)
}

/// What words are about that do not say it; also which command explains them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum About {
    /// Words of `bowline rnbd`.
    Disks,
    /// Words of `bowline rtrs`.
    Sessions,
}

/// Carries out words of the tool; options may stand behind them.
pub(crate) fn run_words(
    about: About,
    words: Vec<String>,
    mut control: Option<PathBuf>,
    mut manner: Options,
) -> Outcome {
    let mut kept: Vec<String> = Vec::new();
    let mut rest = words.into_iter();
    let place = |option: &str, place: Option<String>| {
        place.map(PathBuf::from).ok_or_else(|| Failure::usage(format!("{option} needs a place")))
    };
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-d" | "--debug" => manner.debug = true,
            "-s" | "--simulate" => manner.simulate = true,
            "-v" | "--verbose" => manner.verbose = true,
            "-h" | "--help" => return help(about),
            "help" if kept.is_empty() => return help(about),
            "--control" => control = Some(place(&word, rest.next())?),
            "--sysfs" => manner.sysfs.push(place(&word, rest.next())?),
            // As the original has it: the word before all others.
            "verbose" if kept.is_empty() => manner.verbose = true,
            "version" if kept.is_empty() => {
                say!("bowline {}", env!("CARGO_PKG_VERSION"));
                return Ok(());
            }
            _ => kept.push(word),
        }
    }
    if about == About::Sessions {
        kept = with_target(kept);
    }
    let Options { sysfs, debug, simulate, verbose } = &manner;
    let place = match &control {
        Some(_) if !sysfs.is_empty() => {
            return Err(Failure::usage("--control and --sysfs exclude each other"));
        }
        Some(socket) => Place::Socket(socket),
        None if sysfs.is_empty() => Place::Here,
        None => Place::Files(sysfs),
    };
    tool::run(&kept, Manner { place, debug: *debug, simulate: *simulate, verbose: *verbose })
}

/// Prints what may come behind words of `bowline rtrs`.
pub(crate) fn complete_sessions(words: &[String]) {
    tool::complete(words, &with_target(words.to_vec()), tool::is_of_sessions);
}

/// Says that sessions are meant, unless the words say what is or name a path.
fn with_target(mut words: Vec<String>) -> Vec<String> {
    let at = usize::from(words.first().is_some_and(|word| tool::is_mode(word)));
    if !tool::says_target(&words[at..]) {
        let target = if tool::names_path(&words[at..]) { "path" } else { "session" };
        words.insert(at, target.to_owned());
    }
    words
}

/// Prints what the words are.
fn help(about: About) -> Outcome {
    let name = match about {
        About::Disks => "rnbd",
        About::Sessions => "rtrs",
    };
    let mut definition = super::definition();
    definition.build();
    let page = definition.find_subcommand_mut(name).map(clap::Command::render_long_help);
    super::common::out::text(&page.map(|page| page.to_string()).unwrap_or_default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_meant_where_nothing_is_said() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for (text, full) in [
            ("list", "session list"),
            ("server list json", "server session list json"),
            ("path list", "path list"),
            ("devs list", "devs list"),
            ("add s1 ip:1.2.3.4", "add s1 ip:1.2.3.4"),
            ("CLIENT policy s1 rr", "CLIENT session policy s1 rr"),
            ("client dump", "client dump"),
            ("get class/x", "get class/x"),
            ("disconnect ip:1.2.3.4@ip:1.2.3.5", "path disconnect ip:1.2.3.4@ip:1.2.3.5"),
            ("srv stats 1.2.3.4,1.2.3.5", "srv path stats 1.2.3.4,1.2.3.5"),
            // Names of sessions, and what is for sessions only.
            ("disconnect host@1-2-3-4", "session disconnect host@1-2-3-4"),
            ("policy ip:1.2.3.4@ip:1.2.3.5", "session policy ip:1.2.3.4@ip:1.2.3.5"),
            // Disks are for `bowline rnbd`.
            ("unmap rnbd0", "session unmap rnbd0"),
        ] {
            assert_eq!(with_target(words(text)), words(full));
        }
    }
}
