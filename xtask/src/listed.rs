//! A crate, a note or a thread that no page lists is one that nobody finds.

use crate::repo;
use crate::run::Outcome;

/// Pages that name every crate.
const PAGES: [&str; 2] = ["README.md", "ARCHITECTURE.md"];
/// The page that links every note of measurements.
const BENCH: &str = "bench/README.md";
/// The page with the table of threads.
const THREADS: &str = "ARCHITECTURE.md";
/// The heading of its section.
const THREAD_TABLE: &str = "### Threads";
/// What stands before the name of a thread in the code, white space left out.
const NAMED: [&str; 4] =
    ["Builder::new().name(\"", "named(\"bowline-", ".spawn(\"bowline-", "Acceptor::open(\""];

/// Fails on a crate that README or ARCHITECTURE does not name, on a note that the bench's page does
/// not link, and on a thread that ARCHITECTURE does not have in its table.
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
    let text = page(THREADS);
    let text = first_cells(section(&text, THREAD_TABLE));
    for name in names.iter().filter(|name| is_production_code(name)) {
        let missing = threads(&page(name)).into_iter().filter(|thread| !text.contains(thread));
        problems
            .extend(missing.map(|thread| format!("{THREADS} has no thread {thread} of {name}")));
    }
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

fn is_production_code(name: &str) -> bool {
    name.starts_with("crates/") && name.ends_with(".rs") && !repo::is_test_file(name)
}

/// The threads to which code gives a name, as the page has them.
fn threads(code: &str) -> Vec<String> {
    let lines = code.lines().take(repo::code_lines(code));
    let lines = lines.filter(|line| !line.trim_start().starts_with("//"));
    let dense: String = lines.flat_map(str::split_whitespace).collect();
    let mut all = Vec::new();
    for before in NAMED {
        for (at, _) in dense.match_indices(before) {
            let name = &dense[at + before.find('"').map_or(0, |quote| quote + 1)..];
            all.extend(name.split_once('"').map(|(name, _)| format!("`{name}`")));
        }
    }
    all
}

/// The part of a page from a heading to the next one; nothing where the heading is missing.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let begin = page.find(&format!("\n{heading}\n")).map(|at| at + heading.len() + 1);
    let rest = begin.map_or("", |at| &page[at..]);
    rest.find("\n#").map_or(rest, |end| &rest[..end])
}

/// The first cells of the rows of tables, and what is in no table.
fn first_cells(text: &str) -> String {
    let first = |line: &str| match line.strip_prefix('|') {
        Some(row) => row.split('|').next().unwrap_or_default().to_owned(),
        None => line.to_owned(),
    };
    text.lines().map(first).collect::<Vec<_>>().join("\n")
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
    fn threads_are_found_where_they_get_their_names() {
        let code = "fn a() {
                // Builder::new().name(\"no\")
                thread::Builder::new()
                    .name(\"log\".into()).spawn(f);
                engine.spawn(\"bowline-rtrs\", f);
                Acceptor::open(\"bowline-nbd\", f);
                thread::Builder::new().name(given).spawn(f);
            }
            #[cfg(test)]
            mod tests {
                fn b() { Builder::new().name(\"test\"); }
            }";
        assert_eq!(threads(code), ["`log`", "`bowline-rtrs`", "`bowline-nbd`"]);
    }

    #[test]
    fn a_thread_is_named_by_the_first_cell_of_its_row() {
        assert_eq!(first_cells("| `a`, `b` | of `c` |\nalso `d`"), " `a`, `b` \nalso `d`");
    }

    #[test]
    fn a_section_ends_at_the_next_heading() {
        let page = "# a\n`log`\n### Threads\n`map`\n### b\n`top`\n";
        assert_eq!(section(page, "### Threads").trim(), "`map`");
        assert_eq!(section(page, "### Locks"), "");
    }

    #[test]
    fn crates_and_notes_are_found_among_the_files() {
        let files = ["crates/a/Cargo.toml", "crates/a/fuzz/Cargo.toml", "bench/notes/n.md", "x.md"];
        let files = files.map(str::to_owned);
        assert_eq!(crates(&files).collect::<Vec<_>>(), ["a"]);
        assert_eq!(notes(&files).collect::<Vec<_>>(), ["notes/n.md"]);
    }
}
