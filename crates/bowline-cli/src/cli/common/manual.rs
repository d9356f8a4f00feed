//! Manual pages and shell completions, generated from the definition of the command line.

use std::{fs, io, path::PathBuf};

use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, roman},
};

use crate::cli::{Failure, Outcome, definition};

/// Write the manual pages into a folder.
#[derive(Debug, clap::Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages; made when it does not exist
    dir: PathBuf,
}

/// Print the completions of a shell.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// bash, zsh, fish, elvish or powershell
    shell: Shell,
}

/// Writes `bowline.1`, and one page per word and per word below a word.
pub(crate) fn run_man(args: &ManArgs) -> Outcome {
    let dir = &args.dir;
    let failed = |error: io::Error| {
        Failure::failed(format!("cannot write pages into {}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(failed)?;
    let mut all = without_help(definition());
    all.build();
    let mut pages = Vec::new();
    gather(&all, "bowline", &mut pages);
    pages.push(all);
    for page in pages {
        let name = page.get_display_name().unwrap_or_else(|| page.get_name()).to_owned();
        let text = rendered(page).map_err(failed)?;
        fs::write(dir.join(format!("{name}.1")), text).map_err(failed)?;
    }
    Ok(())
}

/// Leaves out the words `help`, which have no pages: what they print is what the others have.
fn without_help(command: clap::Command) -> clap::Command {
    command.disable_help_subcommand(true).mut_subcommands(without_help)
}

/// Returns a page. What stands behind the options is added line by line: as a paragraph, which
/// clap_mangen makes of it, lists of words run together.
fn rendered(page: clap::Command) -> io::Result<Vec<u8>> {
    let behind = page.get_after_help().map(ToString::to_string);
    let mut text = Vec::new();
    let source = format!("bowline {}", env!("CARGO_PKG_VERSION"));
    Man::new(page.after_help(None::<&str>)).source(source).render(&mut text)?;
    if let Some(behind) = behind {
        let mut notes = Roff::new();
        notes.control("SH", ["NOTES"]);
        // Columns are not stretched to fill a line.
        notes.control("ad", ["l"]);
        for (index, line) in behind.lines().enumerate() {
            if index > 0 {
                notes.control("br", []);
            }
            notes.text([roman(line)]);
        }
        notes.to_writer(&mut text)?;
    }
    Ok(text)
}

/// Adds a page per word, and per word below it.
fn gather(command: &clap::Command, prefix: &str, pages: &mut Vec<clap::Command>) {
    for word in command.get_subcommands() {
        if word.is_hide_set() {
            continue;
        }
        let name = format!("{prefix}-{}", word.get_name());
        gather(word, &name, pages);
        pages.push(word.clone().display_name(name));
    }
}

/// Prints the completion script.
pub(crate) fn run_completions(args: &CompletionArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut definition(), "bowline", &mut script);
    super::out::text(&String::from_utf8_lossy(&script));
    if args.shell == Shell::Bash {
        super::out::text(include_str!("rnbd.bash"));
    }
    Ok(())
}
