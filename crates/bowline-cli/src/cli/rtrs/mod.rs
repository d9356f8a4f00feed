//! `bowline rtrs`: sessions and paths, with the words of `bowline rnbd`.

use std::path::PathBuf;

use super::{Outcome, rnbd};

/// Look at and change RTRS sessions and paths.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Words: [client|server] session|path COMMAND, with list, show, add, delete, readd, \
                  disconnect, reconnect, recover, policy, stats, reset. They are those of `bowline \
                  rnbd`, which explains them; here sessions are meant where neither is said.\n\
                  Exit status: 0 done, else the low 8 bits of -errno: 254 not found, 234 bad argument."
)]
pub(crate) struct Args {
    /// Control socket of the process to talk to; without it, all that run here
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    manner: rnbd::Options,
    /// The command
    #[arg(
        value_name = "WORD",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    words: Vec<String>,
}

/// Runs the command.
pub(crate) fn run(args: Args) -> Outcome {
    rnbd::run_words(with_target(args.words), args.control, args.manner)
}

/// Says that sessions are meant, unless the words say what is.
fn with_target(mut words: Vec<String>) -> Vec<String> {
    const SIDES: [&str; 7] = ["client", "clt", "cli", "server", "serv", "srv", "both"];
    const THINGS: [&str; 8] =
        ["device", "devices", "dev", "session", "sessions", "sess", "path", "paths"];
    let is = |word: Option<&String>, list: &[&str]| {
        word.is_some_and(|word| list.contains(&word.to_ascii_lowercase().as_str()))
    };
    let at = usize::from(is(words.first(), &SIDES));
    // `add` and its like are about paths, and say so themselves.
    const OF_PATHS: [&str; 3] = ["add", "delete", "readd"];
    if !is(words.get(at), &THINGS) && !is(words.get(at), &OF_PATHS) {
        words.insert(at.min(words.len()), "session".to_owned());
    }
    words
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
            ("add s1 ip:1.2.3.4", "add s1 ip:1.2.3.4"),
            ("CLIENT policy s1 rr", "CLIENT session policy s1 rr"),
        ] {
            assert_eq!(with_target(words(text)), words(full));
        }
    }
}
