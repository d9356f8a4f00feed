//! Links and file names in the documentation exist.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use crate::repo;
use crate::run::Outcome;

/// Follows every relative link of every Markdown file, anchors included, and every `docs/...md`
/// that a source names.
pub(crate) fn check() -> Outcome {
    let names = match repo::files() {
        Ok(names) => names,
        Err(error) => return Outcome::Failed(error),
    };
    let known: BTreeSet<PathBuf> = names.iter().map(PathBuf::from).collect();
    let (mut problems, mut count) = (Vec::new(), 0);
    for name in &names {
        let Some(text) = repo::text(name) else { continue };
        if name.ends_with(".md") {
            for (line, target) in targets(&text) {
                count += 1;
                if let Err(why) = resolve(name, &target, &known) {
                    problems.push(format!("{name}:{line}: {target}: {why}"));
                }
            }
        } else if name.ends_with(".rs") && !name.starts_with("xtask/") {
            for (line, file) in named_docs(&text) {
                count += 1;
                if !known.contains(Path::new(&file)) {
                    problems.push(format!("{name}:{line}: {file} does not exist"));
                }
            }
        }
    }
    println!("{count} links");
    if problems.is_empty() { Outcome::Passed } else { Outcome::Failed(problems.join("\n")) }
}

/// Targets of inline links outside code, with their line numbers.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for (number, line) in prose(text) {
        let mut rest = line.as_str();
        while let Some(at) = rest.find("](") {
            rest = &rest[at + 2..];
            let Some(end) = rest.find(')') else { break };
            out.push((number, rest[..end].to_owned()));
        }
    }
    out
}

/// Lines outside fenced blocks, without what stands between backticks.
fn prose(text: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut out = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            out.push((index + 1, line.split('`').step_by(2).collect()));
        }
    }
    out
}

fn named_docs(text: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for word in line.split(|c: char| c.is_whitespace() || "`'\"()[],;".contains(c)) {
            if word.starts_with("docs/") && word.ends_with(".md") {
                out.push((index + 1, word.to_owned()));
            }
        }
    }
    out
}

fn resolve(name: &str, target: &str, known: &BTreeSet<PathBuf>) -> Result<(), String> {
    if target.starts_with("https://") || target.starts_with("http://") {
        return Ok(());
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() {
        PathBuf::from(name)
    } else {
        normal(&Path::new(name).parent().unwrap_or(Path::new("")).join(file))
    };
    let is_dir = known.iter().any(|other| other.starts_with(&path));
    if !known.contains(&path) && !is_dir {
        return Err("no such file".into());
    }
    if anchor.is_empty() {
        return Ok(());
    }
    let text = repo::text(&path.to_string_lossy()).unwrap_or_default();
    if anchors(&text).contains(anchor) { Ok(()) } else { Err("no such heading".into()) }
}

fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// Anchors of the headings: lower case, punctuation dropped, blanks to dashes.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_')
                .map(|c| if c == ' ' { '-' } else { c })
                .collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_links_outside_code_only() {
        let text = "see [a](b.md#c) and `[x](y)`\n```\n[no](no.md)\n```\n[d](e)\n";
        assert_eq!(targets(text), [(1, "b.md#c".to_owned()), (5, "e".to_owned())]);
    }

    #[test]
    fn resolves_relative_names() {
        let known = BTreeSet::from([PathBuf::from("docs/spec/rds.md"), PathBuf::from("README.md")]);
        assert_eq!(resolve("docs/spec/rds.md", "../../README.md", &known), Ok(()));
        assert_eq!(resolve("README.md", "docs/spec", &known), Ok(()));
        assert!(resolve("README.md", "docs/none.md", &known).is_err());
    }

    /// The one of the crate is compiled.
    #[test]
    fn both_readmes_show_the_same_program() {
        let program = |name: &str| {
            let text = repo::text(name).expect("it is there");
            let (_, rest) = text.split_once("```rust").expect("a program");
            rest.split_once("```").expect("its end").0.to_owned()
        };
        assert_eq!(program("README.md"), program("crates/bowline/README.md"));
    }

    #[test]
    fn makes_anchors_as_forges_do() {
        assert!(anchors("## 2. TCP transport\n").contains("2-tcp-transport"));
    }
}
