//! `bowline rnbd`: the words of the rnbd tool over control sockets.

mod tool;

use std::path::PathBuf;

use super::Outcome;

pub(crate) use tool::Manner;

/// Block devices over RTRS: export disks, map them, look at them.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 done, else the low 8 bits of -errno: 254 not found, 234 bad argument."
)]
pub(crate) struct Args {
    /// Control socket of the process to talk to; without it, all that run here
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Print every write before it is done
    #[arg(short, long)]
    debug: bool,
    /// Print every write, and do none
    #[arg(short, long)]
    simulate: bool,
    /// Print the words that may come next
    #[arg(short, long, hide = true)]
    complete: bool,
    /// The command
    #[arg(value_name = "WORD")]
    words: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    if args.complete {
        tool::complete(&args.words);
        return Ok(());
    }
    let manner =
        Manner { control: args.control.as_deref(), debug: args.debug, simulate: args.simulate };
    run_words(&args.words, manner)
}

/// Carries out words of the tool.
pub(crate) fn run_words(words: &[String], manner: Manner<'_>) -> Outcome {
    tool::run(words, manner)
}
