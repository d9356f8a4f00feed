//! Manual pages and shell completions, generated from the definition of the command line.

mod more;

use std::{fs, io, path::PathBuf};

use bowline_node::{Failure, Outcome, log, options};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use self::more::{Entry, more};
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
    /// The program: bowline, or bowline-node, which the service starts
    #[arg(long, value_name = "PROGRAM", default_value = "bowline", value_parser = ["bowline", "bowline-node"])]
    of: String,
}

/// Writes `bowline.1`, and one page per word and per word below a word.
pub(crate) fn run_man(args: &ManArgs, definition: clap::Command) -> Outcome {
    let dir = &args.dir;
    let failed = |error: io::Error| {
        Failure::failed(format!("cannot write pages into {}: {error}", dir.display()))
    };
    fs::create_dir_all(dir).map_err(failed)?;
    let mut all = without_help(definition);
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
/// clap_mangen makes of it, lists of words run together. Its synopsis names options without values.
fn rendered(mut page: clap::Command) -> io::Result<Vec<u8>> {
    let name = page.get_display_name().unwrap_or_else(|| page.get_name()).to_owned();
    let behind = page.get_after_help().map(ToString::to_string);
    let has_words = page.get_subcommands().any(|word| !word.is_hide_set());
    let usage = page.render_usage().to_string();
    let mut text = Vec::new();
    let source = format!("bowline {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(page.after_help(None::<&str>));
    let man = man.title(&name).date("").manual("bowline").source(source);
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    for line in usage.lines() {
        synopsis.text([roman(line.trim_start_matches("Usage:").trim())]).control("br", []);
    }
    synopsis.to_writer(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if has_words {
        man.render_subcommands_section(&mut text)?;
    }
    let mut rest = Roff::new();
    if let Some(behind) = behind {
        rest.control("SH", ["NOTES"]);
        // Columns are not stretched to fill a line.
        rest.control("ad", ["l"]);
        for (index, line) in behind.lines().enumerate() {
            if index > 0 {
                rest.control("br", []);
            }
            rest.text([roman(line)]);
        }
    }
    let more = more(name.strip_prefix("bowline-").unwrap_or(&name));
    entries(&mut rest, "EXAMPLES", more.examples);
    entries(&mut rest, "FILES", more.files);
    entries(&mut rest, "ENVIRONMENT", more.environment);
    let others = more.see_also.iter().map(|other| format!("bowline-{other}"));
    let others = others.filter(|other| *other != name);
    let others: Vec<String> = ["bowline".to_owned()].into_iter().chain(others).collect();
    let others = others.iter().filter(|other| **other != name).map(|other| format!("{other}(1)"));
    rest.control("SH", ["SEE ALSO"]);
    rest.text([roman(others.collect::<Vec<_>>().join(", "))]);
    rest.to_writer(&mut text)?;
    Ok(text)
}

/// Adds a section of terms and what they mean, if it has any.
fn entries(page: &mut Roff, title: &str, entries: &[Entry]) {
    if entries.is_empty() {
        return;
    }
    page.control("SH", [title]);
    for (term, meaning) in entries {
        page.control("TP", []).text([bold(*term)]).text([roman(*meaning)]);
    }
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

/// The command line without the words that help hides, which the generator of scripts does not.
fn shown(definition: &clap::Command) -> clap::Command {
    let words = definition.get_subcommands().filter(|word| !word.is_hide_set()).cloned();
    clap::Command::new("bowline").version(env!("CARGO_PKG_VERSION")).subcommands(words)
}

/// Prints the completion script.
pub(crate) fn run_completions(args: &CompletionArgs, definition: clap::Command) -> Outcome {
    let mut script = Vec::new();
    let is_daemon = args.of == "bowline-node";
    let mut program = if is_daemon { options::definition() } else { shown(&definition) };
    clap_complete::generate(args.shell, &mut program, &args.of, &mut script);
    log::text(&String::from_utf8_lossy(&script));
    if args.shell == Shell::Bash && !is_daemon {
        log::text(include_str!("rnbd.bash"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::definition;

    fn pages() -> Vec<clap::Command> {
        let mut all = without_help(definition());
        all.build();
        let mut pages = Vec::new();
        gather(&all, "bowline", &mut pages);
        pages.push(all);
        pages
    }

    fn name(page: &clap::Command) -> String {
        page.get_display_name().unwrap_or_else(|| page.get_name()).to_owned()
    }

    #[test]
    fn completions_offer_no_hidden_words() {
        let shown = shown(&definition());
        let words: Vec<&str> = shown.get_subcommands().map(clap::Command::get_name).collect();
        assert!(words.contains(&"ping") && words.contains(&"rnbd"), "{words:?}");
        assert!(!words.contains(&"quickstart-peer") && !words.contains(&"man"), "{words:?}");
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut shown.clone(), "bowline", &mut script);
            let script = String::from_utf8(script).unwrap();
            for hidden in definition().get_subcommands().filter(|word| word.is_hide_set()) {
                let name = hidden.get_name();
                // As the scripts have words: of bash, fish and zsh.
                let offers =
                    [format!("bowline,{name})"), format!("-a \"{name}\""), format!("'{name}:")];
                let offered = offers.iter().find(|offer| script.contains(*offer));
                assert_eq!(offered, None, "{shell}");
            }
        }
    }

    #[test]
    fn examples_are_command_lines_that_are_understood() {
        let mut count = 0;
        for page in pages() {
            let name = name(&page);
            for (line, _) in more(name.strip_prefix("bowline-").unwrap_or(&name)).examples {
                let parsed = definition().try_get_matches_from(line.split_ascii_whitespace());
                assert!(parsed.is_ok(), "{name}: {line}: {parsed:?}");
                count += 1;
            }
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn pages_that_are_referred_to_exist() {
        let names: Vec<String> = pages().iter().map(name).collect();
        for name in &names {
            for other in more(name.strip_prefix("bowline-").unwrap_or(name)).see_also {
                assert!(names.contains(&format!("bowline-{other}")), "{name}: {other}");
            }
        }
    }

    #[test]
    fn a_page_tells_of_examples_files_and_environment() {
        let node = pages().into_iter().find(|page| name(page) == "bowline-node").unwrap();
        let text = String::from_utf8(rendered(node).unwrap()).unwrap();
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("no {part} in {text}"));
        let parts = ["SH SYNOPSIS", "SH DESCRIPTION", "SH OPTIONS", "SH EXAMPLES", "SH FILES"];
        let parts = [&parts[..], &["SH ENVIRONMENT", "NOTIFY_SOCKET", "SH \"SEE ALSO\""]].concat();
        assert!(parts.iter().map(|part| at(part)).is_sorted(), "{text}");
        assert!(text.contains("[OPTIONS]"), "{text}");
    }
}
