//! Manual pages and shell completions, generated from the definition of the command line.

use std::{fs, io, path::PathBuf};

use clap_complete::Shell;

use super::{Failure, Outcome, definition};

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

/// Writes `bowline.1` and one page per word.
pub(crate) fn run_man(args: &ManArgs) -> Outcome {
    let dir = &args.dir;
    let failed = |error: io::Error| {
        Failure::failed(format!("cannot write pages into {}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(failed)?;
    let mut all = definition();
    all.build();
    let mut pages: Vec<clap::Command> =
        all.get_subcommands().filter(|word| !word.is_hide_set()).cloned().collect();
    pages.retain(|word| word.get_name() != "help");
    for word in &mut pages {
        let name = format!("bowline-{}", word.get_name());
        *word = word.clone().display_name(name);
    }
    pages.push(all);
    for page in pages {
        let name = page.get_display_name().unwrap_or_else(|| page.get_name()).to_owned();
        let mut text = Vec::new();
        clap_mangen::Man::new(page).render(&mut text).map_err(failed)?;
        fs::write(dir.join(format!("{name}.1")), text).map_err(failed)?;
    }
    Ok(())
}

/// Prints the completion script.
pub(crate) fn run_completions(args: &CompletionArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut definition(), "bowline", &mut script);
    super::out::text(&String::from_utf8_lossy(&script));
    Ok(())
}
