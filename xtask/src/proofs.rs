//! Each line of the tables of SECURITY.md names tests that prove it, and they exist.

use std::collections::BTreeSet;

use crate::repo;
use crate::run::Outcome;

const FILE: &str = "SECURITY.md";
/// Lines between `#[test]` and the function.
const NEAR: usize = 3;

/// Fails on a table without a column of tests, a line without a test, and a test that there is not.
pub(crate) fn check() -> Outcome {
    let names = match repo::files() {
        Ok(names) => names,
        Err(error) => return Outcome::Failed(error),
    };
    let mut known = BTreeSet::new();
    for name in names.iter().filter(|name| name.ends_with(".rs")) {
        if let Some(target) = name.strip_prefix("fuzz/fuzz_targets/") {
            known.insert(target.trim_end_matches(".rs").to_owned());
        }
        known.extend(tests(&repo::text(name).unwrap_or_default()));
    }
    let Some(text) = repo::text(FILE) else { return Outcome::Failed(format!("no {FILE}")) };
    let (count, problems) = unproven(&text, &known);
    println!("{count} lines of {FILE}");
    if problems.is_empty() { Outcome::Passed } else { Outcome::Failed(problems.join("\n")) }
}

/// How many lines the tables of a text have, and what is wrong with them.
fn unproven(text: &str, known: &BTreeSet<String>) -> (usize, Vec<String>) {
    let (mut count, mut problems) = (0, Vec::new());
    let mut lines = text.lines().enumerate().peekable();
    while let Some((at, head)) = lines.next() {
        let Some(title) = last_cell(head) else { continue };
        if title != "Test" {
            problems.push(format!("{FILE}:{}: a table without a column of tests", at + 1));
        }
        // The line between the head and the others.
        lines.next();
        while let Some((at, cell)) = lines.peek().and_then(|(at, row)| Some((*at, last_cell(row)?)))
        {
            lines.next();
            count += 1;
            let mut named = cell.split('`').skip(1).step_by(2).peekable();
            if named.peek().is_none() {
                problems.push(format!("{FILE}:{}: no test is named", at + 1));
            }
            for test in named.filter(|test| !known.contains(*test)) {
                problems.push(format!("{FILE}:{}: there is no test {test}", at + 1));
            }
        }
    }
    (count, problems)
}

/// The last cell of a row of a table.
fn last_cell(line: &str) -> Option<&str> {
    let row = line.strip_prefix('|')?.trim_end().strip_suffix('|')?;
    row.rsplit('|').next().map(str::trim)
}

/// Names of the tests of a source: functions, and what is given to a macro that makes them.
fn tests(text: &str) -> Vec<String> {
    let mut near = 0;
    let mut names = Vec::new();
    for line in text.lines() {
        let line = line.trim_start();
        if line == "#[test]" {
            near = NEAR + 1;
            continue;
        }
        let function = line.strip_prefix("fn ").filter(|_| near > 0);
        let made = || line.split_once("!(").filter(|(name, _)| is_name(name)).map(|(_, rest)| rest);
        if let Some(rest) = function.or_else(made) {
            let end = rest.find(|c: char| !is_part(c)).unwrap_or(rest.len());
            names.push(rest[..end].to_owned());
            near = 1;
        }
        near = near.saturating_sub(1);
    }
    names
}

fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_functions_and_what_macros_make() {
        let text = "#[test]\n#[ignore]\nfn one() {\n}\nfn helper() {}\napart!(two, |folder| {\n";
        assert_eq!(tests(text), ["one", "two"]);
    }

    #[test]
    fn lines_need_tests_that_there_are() {
        let known = BTreeSet::from(["one".to_owned(), "two".to_owned()]);
        let good = "text\n\n| What | Test |\n|---|---|\n| a `b` | `one`, `two` |\n| c | `two` |\n";
        assert_eq!(unproven(good, &known), (2, Vec::new()));
        for bad in [
            "| What | How |\n|---|---|\n| a | `one` |\n",
            "| What | Test |\n|---|---|\n| a `one` | |\n",
            "| What | Test |\n|---|---|\n| a | `one`, `three` |\n",
        ] {
            assert_eq!(unproven(bad, &known).1.len(), 1, "{bad}");
        }
    }
}
