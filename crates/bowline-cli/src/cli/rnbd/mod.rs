//! `bowline rnbd`: disks over RTRS. `export` serves, `map` uses; the other words look at and
//! change what runs, as those of the tool that administers the kernel modules.
//!
//! ```text
//! export, map, verify -> side (devices, engine) -> rnbd-driver -> trees -> control socket, files
//! list, show, ..      -> tool -> control sockets of all of these
//! ```

mod doors;
mod export;
pub(super) mod load;
mod map;
mod serving;
mod side;
mod tool;
mod verify;

use std::path::PathBuf;

use super::{Failure, Outcome};

pub(crate) use tool::Manner;

/// Block devices over RTRS: export disks, map them, look at them.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = false,
    subcommand_value_name = "WORD",
    subcommand_help_heading = "Words",
    after_help = "Other words: [client|server|both] [device|session|path] COMMAND [NAME..] [OPTION..]; what is \
clear may be left out.\n\
  list [FIELDS] [csv|json|xml] [B|K|M|G|T|P|E] [notree] [noheaders] [nototals]\n\
  show NAME [FIELDS] [csv|json|xml] [UNIT]     one device, session or path\n\
  dump [csv|json|xml]                          everything\n\
  map DEVICE from SERVER [PATH..] [ro|rw|migration]     in the client that runs here\n\
  resize DEVICE SIZE [UNIT], unmap DEVICE [force], remap DEVICE|SESSION [force]\n\
  recover DEVICE|SESSION|PATH|all [add-missing], reconnect SESSION|PATH\n\
  add SESSION PATH, delete [SESSION] PATH, readd [SESSION] PATH, disconnect PATH|SESSION\n\
  close DEVICE [SESSION] [force]               on the server\n\
  policy SESSION [round-robin|min-inflight|min-latency], stats NAME, reset NAME\n\
FIELDS are keys with commas, +KEYS or -KEYS to change the usual ones, or all. PATH is \
[SOURCE@]DESTINATION, as ip:10.0.0.1@ip:10.0.0.2.\n\
Exit status: 0 done, else the low 8 bits of -errno: 254 not found, 234 bad argument."
)]
pub(crate) struct Args {
    /// Control socket: of the process to talk to, or of this one where it serves; without it, all
    /// that run here
    #[arg(long, value_name = "SOCKET", global = true)]
    control: Option<PathBuf>,
    /// Print every write to a control file before it is done
    #[arg(short, long)]
    debug: bool,
    /// Print every write to a control file, and do none
    #[arg(short, long)]
    simulate: bool,
    /// Print the words that may come next
    #[arg(short, long, hide = true)]
    complete: bool,
    #[command(subcommand)]
    word: Option<Word>,
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
    let Args { mut control, mut debug, mut simulate, complete, word } = args;
    let words = match word {
        None => Vec::new(),
        Some(Word::Export(_) | Word::Verify(_)) if complete => Vec::new(),
        Some(Word::Export(args)) => return export::run(&args, control),
        Some(Word::Verify(args)) => return verify::run(&args),
        Some(Word::Map(args)) => match args.words() {
            Some(words) => words,
            None if complete => vec!["map".to_owned()],
            None => return map::run(&args, control),
        },
        Some(Word::Others(words)) => options(words, &mut control, &mut debug, &mut simulate)?,
    };
    if complete {
        tool::complete(&words);
        return Ok(());
    }
    run_words(&words, Manner { control: control.as_deref(), debug, simulate })
}

/// Takes options out that stand behind the words.
fn options(
    words: Vec<String>,
    control: &mut Option<PathBuf>,
    debug: &mut bool,
    simulate: &mut bool,
) -> Outcome<Vec<String>> {
    let mut kept = Vec::new();
    let mut rest = words.into_iter();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "-d" | "--debug" => *debug = true,
            "-s" | "--simulate" => *simulate = true,
            "--control" => {
                let place =
                    rest.next().ok_or_else(|| Failure::usage("--control needs a socket"))?;
                *control = Some(place.into());
            }
            _ => kept.push(word),
        }
    }
    Ok(kept)
}

/// Carries out words of the tool.
pub(crate) fn run_words(words: &[String], manner: Manner<'_>) -> Outcome {
    tool::run(words, manner)
}
