//! `bowline rtrs`: sessions and paths, with the commands of `bowline rnbd`.

use std::path::PathBuf;

use bowline_node::Outcome;

use super::disk;

/// Look at and change RTRS sessions and paths.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Words: [client|server] session|path COMMAND, with list, show, add, delete, readd, \
                  disconnect, reconnect, recover, policy, stats, reset. They are those of `bowline \
                  rnbd`, which explains them; here sessions are meant where neither is said, \
                  unless the name is that of a path, as ip:10.0.0.1@ip:10.0.0.2.\n\
                  [client|server] dump [csv|json|xml]: all devices, sessions and paths.\n\
                  [client|server] tree [--path FOLDER]: the control tree as JSON, or what is below a \
                  folder of it, of each process that runs here.\n\
                  get FILE, set FILE VALUE: one file of the tree, named from its root, as \
                  class/rtrs-client/s1/max_reconnect_attempts; its error is the exit status.\n\
                  --json anywhere after list, show, dump, policy, stats or get prints JSON.\n\
                  help, version.\n\
                  Exit status: 0 done, 2 usage, else the low 8 bits of -errno: 254 not found, 234 a value \
                  that is not accepted."
)]
pub(crate) struct Args {
    /// Control socket of the process to talk to; without it, all processes that run in this network
    /// namespace
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    manner: disk::Options,
    /// Print the arguments that may come next
    #[arg(short, long, hide = true)]
    complete: bool,
    /// The command
    #[arg(
        value_name = "WORD",
        required_unless_present = "complete",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    words: Vec<String>,
}

/// Runs the command; `definition` is that of the whole command line, for the help page.
pub(crate) fn run(args: Args, definition: fn() -> clap::Command) -> Outcome {
    if args.complete {
        disk::complete_sessions(&args.words);
        return Ok(());
    }
    disk::run_tool(disk::ToolTarget::Sessions, args.words, args.control, args.manner, definition)
}
