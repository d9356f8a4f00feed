//! Words that docs/style.md lists may become fewer in the sources, never more.
//!
//! ```text
//! docs/style.md: words and what to say instead
//! sources       -> uses, by crate and word -- more than recorded? -> failure, with the new lines
//! xtask/words.txt: number of uses, as recorded
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use crate::repo;
use crate::run::Outcome;

/// The page with the list, and the title of its section.
const STYLE: &str = "docs/style.md";
const TITLE: &str = "### Words to avoid";
/// The recorded numbers of uses.
const RECORD: &str = "xtask/words.txt";
const ACCEPT: &str = "cargo xtask words --accept";
const ABOUT: &str = "\
# Uses of the words that docs/style.md lists, by crate: number, crate, word. The numbers may only
# fall. `cargo xtask words --accept` records lower ones, and uses that moved to another crate.
";
/// Most uses that a failure lists for one word of one crate.
const SHOWN: usize = 20;

/// An entry of the list.
#[derive(Debug)]
struct Entry {
    /// Spellings; the first one names the entry.
    forms: Vec<String>,
    advice: String,
}

/// A use of a listed word.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Use {
    file: String,
    line: usize,
}

/// A crate and the name of an entry.
type Key = (String, String);
type Uses = BTreeMap<Key, Vec<Use>>;
type Record = BTreeMap<Key, usize>;

/// Compares the sources with the record, or lowers the record.
pub(crate) fn run(rest: &[String]) -> Outcome {
    match rest {
        [] => check(),
        [flag] if flag == "--accept" => accept(),
        _ => Outcome::Usage("words takes only --accept".into()),
    }
}

/// Fails on a crate that uses a listed word more often than recorded.
pub(crate) fn check() -> Outcome {
    let (entries, uses) = match found() {
        Ok(found) => found,
        Err(error) => return Outcome::Failed(error),
    };
    let record = parse_record(&repo::text(RECORD).unwrap_or_default());
    let problems = problems(&entries, &uses, &record, &added());
    if !problems.is_empty() {
        return Outcome::Failed(problems.join("\n"));
    }
    let (now, then) = (uses.values().map(Vec::len).sum::<usize>(), record.values().sum::<usize>());
    println!("{now} uses of listed words");
    if now < then {
        println!("{} fewer than recorded: `{ACCEPT}` records that", then - now);
    }
    Outcome::Passed
}

fn accept() -> Outcome {
    let (entries, uses) = match found() {
        Ok(found) => found,
        Err(error) => return Outcome::Failed(error),
    };
    let record = parse_record(&repo::text(RECORD).unwrap_or_default());
    let risen = risen(&entries, &uses, &record);
    if !risen.is_empty() {
        return Outcome::Failed(risen.join("\n"));
    }
    match fs::write(repo::root().join(RECORD), record_text(&uses)) {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(format!("{RECORD}: {error}")),
    }
}

/// Returns the list and all uses in the sources.
fn found() -> Result<(Vec<Entry>, Uses), String> {
    let entries = parse_list(&repo::text(STYLE).unwrap_or_default());
    if entries.is_empty() {
        return Err(format!("{STYLE} has no table below {TITLE:?}"));
    }
    let mut uses = Uses::new();
    for file in repo::files()?.iter().filter(|file| file.ends_with(".rs")) {
        let text = repo::text(file).unwrap_or_default();
        for (line, name) in uses_in(&entries, &text) {
            let key = (crate_of(file).to_owned(), name.to_owned());
            uses.entry(key).or_default().push(Use { file: file.clone(), line });
        }
    }
    Ok((entries, uses))
}

/// Parses the table of the list: spellings in backticks, then the advice.
fn parse_list(page: &str) -> Vec<Entry> {
    let section = page.split_once(TITLE).map_or("", |(_, rest)| rest);
    let rows = section.lines().skip_while(|line| !line.starts_with('|'));
    let entry = |row: &str| {
        let (words, advice) = row.strip_prefix('|')?.trim_end_matches('|').split_once('|')?;
        let forms: Vec<_> = words.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        (!forms.is_empty()).then(|| Entry { forms, advice: advice.trim().to_owned() })
    };
    rows.take_while(|line| line.starts_with('|')).filter_map(entry).collect()
}

/// Returns the crate of a source file, or the folder of a program outside of `crates`.
fn crate_of(file: &str) -> &str {
    let path = file.strip_prefix("crates/").unwrap_or(file);
    path.split('/').next().unwrap_or(path)
}

/// A part of a line: a word of prose, or a word of an identifier.
struct Word {
    text: String,
    /// Characters between the previous word and this one.
    gap: String,
}

/// Splits a line at everything that is not a letter or digit, and at the humps of an identifier.
fn words(line: &str) -> Vec<Word> {
    let mut words: Vec<Word> = Vec::new();
    let (mut text, mut gap) = (String::new(), String::new());
    let mut is_after_lower = false;
    for c in line.chars() {
        let is_hump = c.is_ascii_uppercase() && is_after_lower;
        if (!c.is_ascii_alphanumeric() || is_hump) && !text.is_empty() {
            words.push(Word { text: std::mem::take(&mut text), gap: std::mem::take(&mut gap) });
        }
        if c.is_ascii_alphanumeric() {
            text.push(c.to_ascii_lowercase());
        } else {
            gap.push(c);
        }
        is_after_lower = c.is_ascii_lowercase();
    }
    if !text.is_empty() {
        words.push(Word { text, gap });
    }
    words
}

/// Tells whether a spelling stands at the beginning of these words. Blanks in it match prose,
/// underscores identifiers; a last underscore matches what begins an identifier.
fn is_at(form: &str, words: &[Word]) -> bool {
    let (form, is_prefix) = form.strip_suffix('_').map_or((form, false), |form| (form, true));
    let separator = if form.contains('_') { "_" } else { " " };
    let mut rest = words.iter();
    for (at, part) in form.split(separator).enumerate() {
        let Some(word) = rest.next() else { return false };
        if word.text != part || at > 0 && word.gap != separator {
            return false;
        }
    }
    let begins = || words[0].gap.chars().next_back().is_none_or(|c| c != '_');
    !is_prefix || begins() && rest.next().is_some_and(|next| next.gap == "_")
}

/// Returns the uses in a text: the line, and the name of the entry.
fn uses_in<'a>(entries: &'a [Entry], text: &str) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let words = words(line);
        for start in 0..words.len() {
            let here = |entry: &&Entry| entry.forms.iter().any(|form| is_at(form, &words[start..]));
            let here = entries.iter().filter(here);
            found.extend(here.map(|entry| (at + 1, entry.forms[0].as_str())));
        }
    }
    found
}

/// Reads the record: number, crate and word of a line.
fn parse_record(text: &str) -> Record {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parsed = lines.filter_map(|line| {
        let (count, rest) = line.split_once(' ')?;
        let (krate, word) = rest.split_once(' ')?;
        Some(((krate.to_owned(), word.to_owned()), count.parse().ok()?))
    });
    parsed.collect()
}

fn record_text(uses: &Uses) -> String {
    let lines = uses.iter().map(|((krate, word), uses)| format!("{} {krate} {word}\n", uses.len()));
    ABOUT.to_owned() + &lines.collect::<String>()
}

/// Describes crates with more uses than recorded. Lines that were `added` since the record are the
/// likely ones; without any, all uses are shown.
fn problems(entries: &[Entry], uses: &Uses, record: &Record, added: &BTreeSet<Use>) -> Vec<String> {
    let mut problems = Vec::new();
    for (key, uses) in uses {
        let allowed = record.get(key).copied().unwrap_or(0);
        if uses.len() <= allowed {
            continue;
        }
        let (krate, word) = key;
        let advice = advice(entries, word);
        problems.push(format!(
            "{krate}: {} uses of `{word}`, {allowed} are recorded; say instead: {advice}",
            uses.len()
        ));
        let new: Vec<_> = uses.iter().filter(|one| added.contains(one)).collect();
        let shown = if new.is_empty() { uses.iter().collect() } else { new };
        let places = shown.iter().take(SHOWN).map(|one| format!("  {}:{}", one.file, one.line));
        problems.extend(places);
    }
    problems
}

/// Describes recorded words that have become more in all crates together.
fn risen(entries: &[Entry], uses: &Uses, record: &Record) -> Vec<String> {
    let mut risen = Vec::new();
    for entry in entries {
        let word = &entry.forms[0];
        let is_word = |key: &Key| key.1 == *word;
        let then = record.iter().filter(|(key, _)| is_word(key)).map(|(_, count)| count);
        let now = uses.iter().filter(|(key, _)| is_word(key)).map(|(_, uses)| uses.len());
        let (then, now) = (then.copied().reduce(|a, b| a + b), now.sum::<usize>());
        if let Some(then) = then.filter(|then| now > *then) {
            risen.push(format!(
                "`{word}`: {now} uses, {then} are recorded; see `cargo xtask words`"
            ));
        }
    }
    risen
}

fn advice<'a>(entries: &'a [Entry], word: &str) -> &'a str {
    entries.iter().find(|entry| entry.forms[0] == word).map_or("", |entry| &entry.advice)
}

/// Lines that were added since the record was last changed, as far as git knows.
fn added() -> BTreeSet<Use> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).current_dir(repo::root()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let changed = git(&["log", "-1", "--format=%H", "--", RECORD]).unwrap_or_default();
    let diff = match changed.trim() {
        "" => None,
        commit => git(&["diff", "--unified=0", "--no-color", commit, "--", "*.rs"]),
    };
    added_in(&diff.unwrap_or_default())
}

/// Lines that a difference without context adds.
fn added_in(diff: &str) -> BTreeSet<Use> {
    let mut added = BTreeSet::new();
    let mut file = "";
    for line in diff.lines() {
        if let Some(name) = line.strip_prefix("+++ b/") {
            file = name;
        }
        let new = line.strip_prefix("@@ ").and_then(|rest| rest.split(' ').nth(1));
        if let Some(range) = new.and_then(|range| range.strip_prefix('+')) {
            let (first, count) = range.split_once(',').unwrap_or((range, "1"));
            let (first, count) = (first.parse().unwrap_or(0), count.parse().unwrap_or(0));
            added.extend((first..first + count).map(|line| Use { file: file.to_owned(), line }));
        }
    }
    added
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
### Words to avoid

Prose.

| not | but |
|---|---|
| `olde` | report |
| `ring up`, `ring_up` | call |
| `is none` | does not exist |
| `of_` | from_x |

| `later` | another table |
";

    fn names(line: &str) -> Vec<String> {
        let entries = parse_list(PAGE);
        uses_in(&entries, line).into_iter().map(|(_, name)| name.to_owned()).collect()
    }

    fn uses(counts: &[(&str, &str, usize)]) -> Uses {
        let entry = |(krate, word, count): &(&str, &str, usize)| {
            let file = format!("crates/{krate}/src/lib.rs");
            let uses = (1..=*count).map(|line| Use { file: file.clone(), line });
            (((*krate).to_owned(), (*word).to_owned()), uses.collect())
        };
        counts.iter().map(entry).collect()
    }

    #[test]
    fn the_list_is_one_table() {
        let entries = parse_list(PAGE);
        let first: Vec<_> = entries.iter().map(|entry| entry.forms[0].as_str()).collect();
        assert_eq!(first, ["olde", "ring up", "is none", "of_"]);
        assert_eq!(entries[1].advice, "call");
    }

    #[test]
    fn the_list_of_the_style_guide_has_advice_for_each_word() {
        let entries = parse_list(&repo::text(STYLE).expect("the page"));
        assert!(entries.len() > 5, "{entries:?}");
        assert!(entries.iter().all(|entry| !entry.advice.is_empty()), "{entries:?}");
    }

    #[test]
    fn words_are_whole_words_of_prose_and_identifiers() {
        assert_eq!(names("// It is olde. `unolde` and oldest are not."), ["olde"]);
        assert_eq!(names("let was_olde = RdmaOlde::Yes;"), ["olde", "olde"]);
    }

    #[test]
    fn blanks_are_prose_and_underscores_are_identifiers() {
        assert_eq!(names("// There is none: option.is_none()"), ["is none"]);
        assert_eq!(names("fn ring_up() {} // ring up, ringup"), ["ring up", "ring up"]);
    }

    #[test]
    fn a_last_underscore_is_the_beginning_of_an_identifier() {
        assert_eq!(names("fn of_disks(out_of_disks: u8, of: u8, kind_of: &str) {}"), ["of_"]);
    }

    #[test]
    fn a_new_use_fails_with_its_line_and_the_advice() {
        let (entries, record) = (parse_list(PAGE), parse_record("1 a olde\n5 b olde\n"));
        let new = Use { file: "crates/a/src/lib.rs".to_owned(), line: 2 };
        let found = uses(&[("a", "olde", 2), ("b", "olde", 5)]);
        let problems = problems(&entries, &found, &record, &BTreeSet::from([new]));
        assert_eq!(
            problems,
            ["a: 2 uses of `olde`, 1 are recorded; say instead: report", "  crates/a/src/lib.rs:2"]
        );
    }

    #[test]
    fn recorded_uses_and_fewer_pass() {
        let (entries, record) = (parse_list(PAGE), parse_record("3 a olde\n1 a is none\n"));
        let found = uses(&[("a", "olde", 2), ("a", "is none", 1)]);
        assert!(problems(&entries, &found, &record, &BTreeSet::new()).is_empty());
    }

    #[test]
    fn a_word_may_move_to_another_crate_and_not_become_more() {
        let (entries, record) = (parse_list(PAGE), parse_record("3 a olde\n"));
        assert!(risen(&entries, &uses(&[("b", "olde", 3)]), &record).is_empty());
        assert_eq!(risen(&entries, &uses(&[("a", "olde", 3), ("b", "olde", 1)]), &record).len(), 1);
        // A word that is new in the list is recorded as it is.
        assert!(risen(&entries, &uses(&[("a", "of_", 9)]), &record).is_empty());
    }

    #[test]
    fn the_record_is_read_as_it_was_written() {
        let found = uses(&[("a", "olde", 2), ("bowline-rds", "is none", 1)]);
        let record = parse_record(&record_text(&found));
        let counts: Vec<_> = record.into_values().collect();
        assert_eq!(counts, [2, 1]);
    }

    #[test]
    fn lines_of_a_difference_are_those_that_it_adds() {
        let diff = "--- a/x.rs\n+++ b/x.rs\n@@ -1,2 +4 @@ fn a() {\n+olde\n@@ -9 +8,0 @@\n\
                    @@ -3 +20,2 @@\n";
        let lines: Vec<_> = added_in(diff).into_iter().map(|one| one.line).collect();
        assert_eq!(lines, [4, 20, 21]);
    }

    #[test]
    fn programs_outside_of_crates_count_by_their_folder() {
        assert_eq!(crate_of("crates/bowline-rds/src/lib.rs"), "bowline-rds");
        assert_eq!(crate_of("xtask/src/main.rs"), "xtask");
    }
}
