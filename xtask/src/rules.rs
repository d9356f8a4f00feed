//! Which rule of docs/spec is cited by which code and which test.
//!
//! A rule is a line `- **R-101** ...` or `- **IB-3** ...`, a row `| D-3 | ... |` or, with a word
//! instead of a letter, a paragraph that begins with `REQ-3 ` or `**RT-3** `. A citation is an id
//! in square brackets, `[R-101]` or `[R-101, R-102]` or `[R-101 to R-105]`, or a bare `R-101`.
//! Tests and interop scenarios may name rows of the checklist, and rules of RTRS and RNBD, as bare
//! words, `T-5`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::repo;
use crate::run::Outcome;

const EXCEPTIONS: &str = "docs/spec/exceptions.toml";
/// Names of the kinds of rules; those that begin like another come first.
const KINDS: [&str; 32] = [
    "REQ", "RSP", "RSK", "RDMA", "RMR", "RX", "RT", "RS", "R", "IB", "OBS", "SAFE", "ATOM", "ZC",
    "NB", "D", "B", "T", "UC", "U", "OUT", "HDR", "ICRC", "QP", "SRQ", "MR", "GSI", "CMA", "CM",
    "CC", "PERF", "VERBS",
];
/// Kinds whose rules are items of lists, the id in bold letters.
const LISTED: [&str; 8] = ["R", "IB", "OBS", "SAFE", "RDMA", "ATOM", "ZC", "RMR"];
/// Kinds whose rules are paragraphs that begin with the id in bold letters.
const BOLD: [&str; 4] = ["RT", "RS", "NB", "RSK"];
/// Ids that need not be cited or excepted: they only point to rules, to what is unknown, or to
/// other people's software.
const NEED_NO_CITATION: [&str; 4] = ["D", "U", "PERF", "VERBS"];

/// How much `check` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// A line per rule.
    All,
    /// Totals and problems.
    Summary,
}

/// Kind and number of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Id(&'static str, u32);

impl std::fmt::Display for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

#[derive(Debug, Default)]
struct Rule {
    code: Vec<String>,
    tests: Vec<String>,
}

/// Prints the coverage; fails on unknown ids, on uncited rules without an exception and on
/// exceptions that are no longer needed.
pub(crate) fn check(detail: Detail) -> Outcome {
    match survey() {
        Err(error) => Outcome::Failed(error),
        Ok(survey) => survey.report(detail),
    }
}

#[derive(Debug, Default)]
struct Survey {
    rules: BTreeMap<Id, Rule>,
    exceptions: BTreeMap<Id, String>,
    problems: Vec<String>,
}

fn survey() -> Result<Survey, String> {
    let mut out = Survey::default();
    let names = repo::files()?;
    for name in names.iter().filter(|name| is_spec(name)) {
        for (index, line) in repo::text(name).unwrap_or_default().lines().enumerate() {
            if let Some(id) = definition(line)
                && out.rules.insert(id, Rule::default()).is_some()
            {
                out.problems.push(format!("{name}:{}: {id} is defined twice", index + 1));
            }
        }
    }
    for name in &names {
        if !may_cite(name) {
            continue;
        }
        let Some(text) = repo::text(name) else { continue };
        let code_lines = repo::code_lines(&text);
        for (index, line) in text.lines().enumerate() {
            let place = format!("{name}:{}", index + 1);
            for id in citations(line, &out.rules, names_rows(name)) {
                let Some(rule) = out.rules.get_mut(&id) else {
                    out.problems.push(format!("{place}: {id} is not a rule of docs/spec"));
                    continue;
                };
                if name.ends_with(".md") {
                    continue;
                }
                if repo::is_test_file(name) || index >= code_lines {
                    rule.tests.push(place.clone());
                } else {
                    rule.code.push(place.clone());
                }
            }
        }
    }
    let text = repo::text(EXCEPTIONS).ok_or(format!("{EXCEPTIONS} is missing"))?;
    for (index, line) in text.lines().enumerate() {
        match exception(line) {
            Ok(None) => {}
            Ok(Some((id, _))) if !out.rules.contains_key(&id) => {
                let place = format!("{EXCEPTIONS}:{}", index + 1);
                out.problems.push(format!("{place}: {id} is not a rule of docs/spec"));
            }
            Ok(Some((id, reason))) => drop(out.exceptions.insert(id, reason)),
            Err(error) => out.problems.push(format!("{EXCEPTIONS}:{}: {error}", index + 1)),
        }
    }
    Ok(out)
}

fn is_spec(name: &str) -> bool {
    name.starts_with("docs/spec/") && name.ends_with(".md")
}

/// Tells whether a file may name rows of the checklist as bare words.
fn names_rows(name: &str) -> bool {
    repo::is_test_file(name) && !name.ends_with(".md")
}

fn may_cite(name: &str) -> bool {
    let in_tree = ["crates/", "interop/", "fuzz/", "benches/"].iter().any(|d| name.starts_with(d));
    in_tree || name.ends_with(".md")
}

impl Survey {
    fn report(mut self, detail: Detail) -> Outcome {
        let (mut code, mut tests, mut uncited) = (0, 0, Vec::new());
        for (id, rule) in &self.rules {
            code += usize::from(!rule.code.is_empty());
            tests += usize::from(!rule.tests.is_empty());
            let cited = !rule.code.is_empty() || !rule.tests.is_empty();
            let reason = self.exceptions.get(id);
            match (cited, reason) {
                (false, None) if !NEED_NO_CITATION.contains(&id.0) => uncited.push(id.to_string()),
                (true, Some(_)) => {
                    self.problems.push(format!("{EXCEPTIONS}: {id} is cited, drop its line"));
                }
                _ => {}
            }
            if detail == Detail::All {
                println!("{}", row(*id, rule, reason.map_or("", String::as_str)));
            }
        }
        println!(
            "{} rules: {code} cited by code, {tests} by tests, {} excepted, {} uncited",
            self.rules.len(),
            self.exceptions.len(),
            uncited.len()
        );
        if !uncited.is_empty() {
            let list = uncited.join(" ");
            self.problems.push(format!("neither cited nor in {EXCEPTIONS}: {list}"));
        }
        if self.problems.is_empty() {
            Outcome::Passed
        } else {
            Outcome::Failed(self.problems.join("\n"))
        }
    }
}

fn row(id: Id, rule: &Rule, reason: &str) -> String {
    let mut text = format!("{:<7}", id.to_string());
    for (what, places) in [("code", &rule.code), ("tests", &rule.tests)] {
        if let Some(first) = places.first() {
            let _ = write!(text, " {what} {} ({first})", places.len());
        }
    }
    if !reason.is_empty() {
        let _ = write!(text, " excepted: {reason}");
    }
    text
}

/// The rule a line of a spec defines.
fn definition(line: &str) -> Option<Id> {
    if let Some((id, rest)) = leading_id(line) {
        return (id.0.len() > 1 && rest.starts_with(' ')).then_some(id);
    }
    if let Some((id, rest)) = line.strip_prefix("**").and_then(leading_id) {
        let text = rest.strip_prefix("**")?;
        let is_rule = text.is_empty() || text.starts_with(' ');
        return (BOLD.contains(&id.0) && is_rule).then_some(id);
    }
    let text = line.strip_prefix("- **").or_else(|| line.strip_prefix("| "))?;
    let (id, rest) = leading_id(text)?;
    let is_rule = line.starts_with("- **") && LISTED.contains(&id.0) && rest.starts_with("**");
    let is_row = line.starts_with("| ") && id.0.len() == 1 && id.0 != "R" && rest.starts_with(" |");
    (is_rule || is_row).then_some(id)
}

/// A line `R-106 = "reason"`; comments and empty lines are nothing.
fn exception(line: &str) -> Result<Option<(Id, String)>, String> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let wrong = || format!("expected ID = \"reason\", found {line}");
    let (id, rest) = leading_id(line).ok_or_else(wrong)?;
    let reason = rest.trim_start().strip_prefix('=').ok_or_else(wrong)?.trim();
    let reason = reason.strip_prefix('"').and_then(|r| r.strip_suffix('"')).ok_or_else(wrong)?;
    if reason.is_empty() {
        return Err(format!("{id} has no reason"));
    }
    Ok(Some((id, reason.to_owned())))
}

/// Every rule a line cites, ranges included; ids that do not exist too. With `rows`, bare rows of
/// the checklist count as well.
fn citations(line: &str, rules: &BTreeMap<Id, Rule>, rows: bool) -> Vec<Id> {
    let mut out = Vec::new();
    let mut previous = ' ';
    let mut in_brackets = false;
    // The end of the last id and the id, for ranges.
    let mut last: Option<(usize, Id)> = None;
    for (at, c) in line.char_indices() {
        match c {
            '[' => in_brackets = leading_id(&line[at + 1..]).is_some(),
            ']' => in_brackets = false,
            _ => {}
        }
        let starts = !(previous.is_alphanumeric() || previous == '-' || previous == '_');
        previous = c;
        let Some((id, rest)) = leading_id(&line[at..]).filter(|_| starts) else { continue };
        let bare = (id.0 == "R" && id.1 >= 100) || (rows && (id.0 == "T" || BOLD.contains(&id.0)));
        if !in_brackets && !bare {
            continue;
        }
        if let Some((end, from)) = last
            && line[end..at].trim() == "to"
            && from.0 == id.0
            && from < id
        {
            let inner = (std::ops::Bound::Excluded(from), std::ops::Bound::Excluded(id));
            out.extend(rules.range(inner).map(|(id, _)| *id));
        }
        out.push(id);
        last = Some((line.len() - rest.len(), id));
    }
    out
}

/// An id at the start of a text, and what follows it.
fn leading_id(text: &str) -> Option<(Id, &str)> {
    let (kind, digits) =
        KINDS.iter().find_map(|k| Some((*k, text.strip_prefix(k)?.strip_prefix('-')?)))?;
    let len = digits.bytes().take_while(u8::is_ascii_digit).count();
    let number = digits[..len].parse().ok()?;
    let rest = &digits[len..];
    if rest.starts_with(|c: char| c.is_alphanumeric()) {
        return None;
    }
    Some((Id(kind, number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cited(line: &str) -> Vec<String> {
        let rules = [1, 2, 3, 104].map(|n| (Id("R", n), Rule::default())).into_iter().collect();
        citations(line, &rules, false).iter().map(Id::to_string).collect()
    }

    #[test]
    fn scenarios_name_rows_as_bare_words() {
        let found = citations(r#"@scenario("ping", rows="T-1 NB-18")"#, &BTreeMap::new(), true);
        assert_eq!(found, [Id("T", 1), Id("NB", 18)]);
        assert!(names_rows("interop/suite/scenarios.py") && !names_rows("interop/README.md"));
    }

    #[test]
    fn finds_definitions_in_lists_and_tables() {
        assert_eq!(definition("- **R-101** The header"), Some(Id("R", 101)));
        assert_eq!(definition("- **IB-14** [WIRE] [V] Common"), Some(Id("IB", 14)));
        assert_eq!(definition("- **RMR-6** [LINUX] Rights"), Some(Id("RMR", 6)));
        assert_eq!(definition("- **RT-3** is a paragraph"), None);
        assert_eq!(definition("| B-3 | lost probe | R-416 |"), Some(Id("B", 3)));
        assert_eq!(definition("| R-101 | no definition |"), None);
        assert_eq!(definition("see **R-101**"), None);
        assert_eq!(definition("REQ-3  SEND and WRITE: each packet"), Some(Id("REQ", 3)));
        assert_eq!(definition("REQ-3, and more"), None);
        assert_eq!(definition("**RT-15** IO_REQ payload"), Some(Id("RT", 15)));
        assert_eq!(definition("**RS-45**"), Some(Id("RS", 45)));
        assert_eq!(definition("**RT-15**, and more"), None);
        assert_eq!(definition("**R-15** of another document"), None);
    }

    #[test]
    fn finds_citations_in_brackets_lists_and_ranges() {
        assert_eq!(cited("// so it is [R-1], and [R-2, D-3]"), ["R-1", "R-2", "D-3"]);
        assert_eq!(cited("[R-1 to R-104]"), ["R-1", "R-2", "R-3", "R-104"]);
        assert_eq!(cited("as R-104 says"), ["R-104"]);
        assert_eq!(cited("[IB-3, SAFE-9] IB-4, OBS-1"), ["IB-3", "SAFE-9"]);
        assert_eq!(cited("[REQ-3], [CMA-9]; REQ-4 is no citation"), ["REQ-3", "CMA-9"]);
        assert_eq!(cited("[RMR-6, ATOM-7], [MR-6]"), ["RMR-6", "ATOM-7", "MR-6"]);
    }

    #[test]
    fn leaves_other_words_alone() {
        assert!(cited("RDMA-3, B-17 without brackets, T-1, ABR-104, [x R-1]").is_empty());
    }

    #[test]
    fn an_exception_needs_a_reason() {
        assert_eq!(exception("# nothing"), Ok(None));
        let told = Ok(Some((Id("R", 106), "RDMA only".to_owned())));
        assert_eq!(exception("R-106 = \"RDMA only\""), told);
        assert!(exception("R-106 = \"\"").is_err());
        assert!(exception("R-106 RDMA").is_err());
    }
}
