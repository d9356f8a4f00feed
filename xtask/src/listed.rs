//! A crate or a note that no page lists is one that nobody finds.

use crate::repo;
use crate::run::Outcome;

/// Pages that name every crate.
const PAGES: [&str; 2] = ["README.md", "ARCHITECTURE.md"];
/// The page that links every note of measurements.
const BENCH: &str = "bench/README.md";

/// Fails on a crate that README or ARCHITECTURE does not name, and on a note that the bench's page
/// does not link.
pub(crate) fn check() -> Outcome {
    let names = match repo::files() {
        Ok(names) => names,
        Err(error) => return Outcome::Failed(error),
    };
    let page = |name: &str| repo::text(name).unwrap_or_default();
    let mut problems = Vec::new();
    for name in PAGES {
        let text = page(name);
        let missing = crates(&names).filter(|krate| !names_crate(&text, krate));
        problems.extend(missing.map(|krate| format!("{name} does not name {krate}")));
    }
    let text = page(BENCH);
    let missing = notes(&names).filter(|note| !text.contains(&format!("]({note})")));
    problems.extend(missing.map(|note| format!("{BENCH} does not link {note}")));
    if problems.is_empty() { Outcome::Passed } else { Outcome::Failed(problems.join("\n")) }
}

fn crates(files: &[String]) -> impl Iterator<Item = &str> {
    let names = files.iter().filter_map(|file| file.strip_prefix("crates/"));
    names.filter_map(|file| file.strip_suffix("/Cargo.toml")).filter(|name| !name.contains('/'))
}

/// Notes, as the bench's page links them.
fn notes(files: &[String]) -> impl Iterator<Item = &str> {
    let names = files.iter().filter_map(|file| file.strip_prefix("bench/"));
    names.filter(|file| file.starts_with("notes/") && file.ends_with(".md"))
}

/// Tells whether a text has the name of a crate, and not only a longer one that begins with it.
fn names_crate(text: &str, krate: &str) -> bool {
    let goes_on = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-');
    text.match_indices(krate).any(|(at, _)| !goes_on(&text[at + krate.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_name_is_another_crate() {
        assert!(names_crate("the crate `bowline-rds`", "bowline-rds"));
        assert!(!names_crate("the crate bowline-rds-driver", "bowline-rds"));
        assert!(names_crate("bowline-rds-driver, bowline-rds", "bowline-rds"));
    }

    #[test]
    fn crates_and_notes_are_found_among_the_files() {
        let files = ["crates/a/Cargo.toml", "crates/a/fuzz/Cargo.toml", "bench/notes/n.md", "x.md"];
        let files = files.map(str::to_owned);
        assert_eq!(crates(&files).collect::<Vec<_>>(), ["a"]);
        assert_eq!(notes(&files).collect::<Vec<_>>(), ["notes/n.md"]);
    }
}
