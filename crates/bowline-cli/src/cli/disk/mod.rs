//! `bowline rnbd`: disks over RTRS. `export` serves, `map` uses; the other commands show and change
//! running processes, as the tool that administers the kernel modules does.
//!
//! ```text
//! export, map, verify -> options (clap) -> bowline_node::disks
//!
//! trees of these -> control socket, files
//! list, show, .. -> tool -> control sockets of all of these, or trees of files
//! ```

mod command;
mod export;
pub(super) mod load;
mod map;
mod options;
mod serving;
mod top;
mod verify;

use std::path::PathBuf;

use bowline_node::{Failure, Outcome};

use super::tool::{self, Place, RunOptions};

/// Block devices over RTRS: export, map and inspect disks.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = false,
    version,
    subcommand_value_name = "WORD",
    subcommand_help_heading = "Words",
    after_help = "Other words: [client|server|both] [device|session|path] COMMAND [NAME..] [OPTION..]; what is \
clear may be left out. They work on the processes that run here, on a kernel's own tree and on one of --tree.\n  \
list [FIELDS] [csv|json|xml] [B|K|M|G|T|P|E] [notree] [noheaders] [nototals]\n  \
show NAME [FIELDS] [csv|json|xml] [UNIT]     one device, session or path\n  \
dump [csv|json|xml]                          everything\n  \
map DEVICE from SERVER [PATH..] [ro|rw|migration] [OPTION=VALUE..]     in the client that runs here\n  \
resize DEVICE SIZE [UNIT] [force], unmap DEVICE [force], remap DEVICE|SESSION [force]\n  \
recover DEVICE|SESSION|PATH|all [add-missing], reconnect SESSION|PATH\n  \
add SESSION PATH, delete [SESSION] PATH, readd [SESSION] PATH, disconnect PATH|SESSION\n  \
close DEVICE [SESSION] [force]               on the server\n  \
export NAME file=PATH|memory=BYTES|nbd-backend=URI [OPTION=VALUE..], unexport NAME [force]     of the server that runs here\n  \
policy SESSION [round-robin|min-inflight|min-latency], stats NAME, reset NAME\n  \
tree [--path FOLDER], get FILE, set FILE VALUE     the control tree: as JSON, or one file of it\n\
--json anywhere after list, show, dump, policy, stats or get prints JSON.\n\
OPTION of map is one of `rnbd map`, as nbd=/run/a.sock, outage=60 or ublk=true; of export: ro=true, \
buffered=true, block=4096, grant=rw@host*, filter=error=1%. FIELDS are keys with commas, +KEYS or -KEYS to change the default ones, or all. PATH is \
[SOURCE@]DESTINATION, as ip:10.0.0.1@ip:10.0.0.2. FILE and FOLDER are paths from the root of the tree, as \
class/rtrs-client/s1/max_reconnect_attempts.\n\
Exit status: 0 done, 2 usage, else the low 8 bits of -errno: 254 not found, 234 a value that is not accepted."
)]
pub(crate) struct Args {
    /// Control socket: of the process to ask, or of this process if it serves disks; without it,
    /// all processes of this network namespace
    #[arg(long, value_name = "SOCKET", global = true)]
    control: Option<PathBuf>,
    #[command(flatten)]
    manner: Options,
    /// Print the arguments that may come next
    #[arg(short, long, hide = true)]
    complete: bool,
    #[command(subcommand)]
    word: Option<Word>,
}

/// Options before the arguments of a command, or after them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Read a folder with files named as in /sys instead, such as one of --tree; may be repeated.
    /// Without it, /sys is read if no process answers
    #[arg(long, value_name = "FOLDER", conflicts_with = "control")]
    sysfs: Vec<PathBuf>,
    /// Print every write to a control file before it happens
    #[arg(short, long)]
    debug: bool,
    /// Print every write to a control file, but do not write
    #[arg(short, long)]
    simulate: bool,
    /// Print which sockets and trees are read
    #[arg(short, long)]
    verbose: bool,
}

impl Options {
    /// Refuses these options for `word`, which does not use a control tree: otherwise `--simulate`
    /// would be ignored silently.
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
                "{option} applies to words that use a control tree, which {word} does not"
            ))),
        }
    }
}

/// Print the exports of the servers of this machine: size, and the sessions that have them open.
#[derive(Debug, clap::Args)]
struct ExportsArgs {
    /// Print a JSON array
    #[arg(long)]
    json: bool,
    /// Print which sockets are read
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Debug, clap::Subcommand)]
enum Word {
    Export(export::Args),
    Map(map::Args),
    Verify(verify::Args),
    Exports(ExportsArgs),
    Top(top::Args),
    #[command(external_subcommand)]
    Others(Vec<String>),
}

/// Runs the command; `definition` is that of the whole command line, for the help page.
pub(crate) fn run(args: Args, definition: fn() -> clap::Command) -> Outcome {
    let Args { control, manner, complete, word } = args;
    let words = match word {
        None => Vec::new(),
        Some(Word::Verify(_) | Word::Exports(_) | Word::Top(_)) if complete => Vec::new(),
        Some(Word::Export(args)) => match args.words() {
            Some(words) => words,
            None if complete => vec!["export".to_owned()],
            None => {
                manner.refuse_any("export")?;
                return export::run(&args, control);
            }
        },
        Some(Word::Verify(args)) => {
            manner.refuse_any("verify")?;
            if control.is_some() {
                return Err(Failure::usage("verify has no control socket: leave out --control"));
            }
            return verify::run(&args);
        }
        Some(Word::Exports(args)) => {
            let place = control.as_deref().map_or(Place::Here, Place::Socket);
            let verbose = args.verbose || manner.verbose;
            Options { verbose: false, ..manner }.refuse_any("exports")?;
            return tool::exports(place, args.json, verbose);
        }
        Some(Word::Top(args)) => {
            manner.refuse_any("top")?;
            return top::run(&args, control);
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
    run_tool(ToolTarget::Disks, words, control, manner, definition)
}

/// The object of commands that name none; also selects the command's help page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum ToolTarget {
    /// Commands of `bowline rnbd`.
    Disks,
    /// Commands of `bowline rtrs`.
    Sessions,
}

/// Carries out a command of the tool; options may follow its arguments.
pub(crate) fn run_tool(
    target: ToolTarget,
    arguments: Vec<String>,
    mut control: Option<PathBuf>,
    mut options: Options,
    definition: fn() -> clap::Command,
) -> Outcome {
    let mut kept: Vec<String> = Vec::new();
    let mut rest = arguments.into_iter();
    let place = |option: &str, place: Option<String>| {
        place.map(PathBuf::from).ok_or_else(|| Failure::usage(format!("{option} needs a path")))
    };
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-d" | "--debug" => options.debug = true,
            "-s" | "--simulate" => options.simulate = true,
            "-v" | "--verbose" => options.verbose = true,
            "-h" | "--help" => return help(target, definition),
            "help" if kept.is_empty() => return help(target, definition),
            "--control" => control = Some(place(&word, rest.next())?),
            "--sysfs" => options.sysfs.push(place(&word, rest.next())?),
            // As in the original tool: the word before all others.
            "verbose" if kept.is_empty() => options.verbose = true,
            "version" if kept.is_empty() => {
                say!("bowline {}", env!("CARGO_PKG_VERSION"));
                return Ok(());
            }
            _ => kept.push(word),
        }
    }
    if target == ToolTarget::Sessions {
        kept = with_target(kept);
    }
    let Options { sysfs, debug, simulate, verbose } = &options;
    let place = match &control {
        Some(_) if !sysfs.is_empty() => {
            return Err(Failure::usage("--control and --sysfs exclude each other"));
        }
        Some(socket) => Place::Socket(socket),
        None if sysfs.is_empty() => Place::Here,
        None => Place::Files(sysfs),
    };
    tool::run(&kept, RunOptions { place, debug: *debug, simulate: *simulate, verbose: *verbose })
}

/// Prints completions for `bowline rtrs`.
pub(crate) fn complete_sessions(arguments: &[String]) {
    tool::complete(arguments, &with_target(arguments.to_vec()), tool::is_of_sessions);
}

/// Inserts the target `session`, unless the arguments have a target or name a path.
fn with_target(mut arguments: Vec<String>) -> Vec<String> {
    let at = usize::from(arguments.first().is_some_and(|word| tool::is_mode(word)));
    if !tool::has_target(&arguments[at..]) {
        let target = if tool::names_path(&arguments[at..]) { "path" } else { "session" };
        arguments.insert(at, target.to_owned());
    }
    arguments
}

/// Prints the help page.
fn help(target: ToolTarget, definition: fn() -> clap::Command) -> Outcome {
    let name = match target {
        ToolTarget::Disks => "rnbd",
        ToolTarget::Sessions => "rtrs",
    };
    let mut definition = definition();
    definition.build();
    let page = definition.find_subcommand_mut(name).map(clap::Command::render_long_help);
    bowline_node::log::text(&page.map(|page| page.to_string()).unwrap_or_default());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_target_is_a_session() {
        let split = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
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
            // Names of sessions, and commands for sessions only.
            ("disconnect host@1-2-3-4", "session disconnect host@1-2-3-4"),
            ("policy ip:1.2.3.4@ip:1.2.3.5", "session policy ip:1.2.3.4@ip:1.2.3.5"),
            // Disks belong to `bowline rnbd`.
            ("unmap rnbd0", "session unmap rnbd0"),
        ] {
            assert_eq!(with_target(split(text)), split(full));
        }
    }
}
