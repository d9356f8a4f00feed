//! Runs as result files hold them: the names of the files, and a run read back.
//!
//! Verdicts are not read back but formed again, so that all runs are judged by today's targets.

use std::path::Path;

use serde_json::Value;

use crate::args::{Options, Suite};
use crate::cell::{Subject, Words};
use crate::head::Head;
use crate::nodes;
use crate::plan::{self, Block, Setting};
use crate::results::{Record, Results};
use crate::run::Sample;
use crate::targets::{self, Outcome};

/// Name of the file that holds a run.
pub(crate) fn file_name(suite: Suite, date: &str, commit: &str) -> String {
    let commit = commit.replace(' ', "-");
    match suite {
        Suite::Rds => format!("{date}-{commit}.json"),
        suite => format!("{date}-{commit}-{}.json", suite.name()),
    }
}

/// The suite that a file of this name holds.
fn suite_of(stem: &str) -> Suite {
    let last = stem.rsplit('-').next().unwrap_or_default();
    Suite::parse(last).unwrap_or(Suite::Rds)
}

/// A run that was read back.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) suite: Suite,
    /// Name of its file, without folders.
    pub(crate) file: String,
    pub(crate) head: Head,
    pub(crate) notes: Vec<String>,
    pub(crate) results: Results,
    /// Whether targets are about its settings.
    judged: bool,
}

impl Recorded {
    /// Reads a result file.
    ///
    /// # Errors
    ///
    /// Names the file, and what about it is wrong.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let bad = |why: String| format!("{}: {why}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| bad(e.to_string()))?;
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self::parse(file, &text).map_err(bad)
    }

    fn parse(file: String, text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let list = |key: &str| value[key].as_array().ok_or_else(|| format!("no list of {key}"));
        let records = list("measurements")?.iter().map(record).collect::<Result<_, _>>()?;
        Ok(Self {
            suite: suite_of(file.strip_suffix(".json").unwrap_or(&file)),
            head: Head::from_json(&value["head"])?,
            notes: list("notes")?.iter().filter_map(|n| Some(n.as_str()?.to_owned())).collect(),
            results: Results { records },
            judged: !list("targets")?.is_empty(),
            file,
        })
    }

    /// Judges the targets of the suite, unless the run was about other settings.
    pub(crate) fn outcomes(&self) -> Vec<Outcome> {
        if !self.judged {
            return Vec::new();
        }
        let missing = |label: &str| {
            let peer = Subject::from_label(label)?.name();
            let skipped = format!("peer {peer}: skipped, ");
            self.notes.iter().find_map(|note| Some(note.strip_prefix(&skipped)?.to_owned()))
        };
        targets::judge(targets::of(self.suite), &self.results, &missing)
    }

    /// The cells that were measured, as far as this program still has them.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let setting = Setting {
            // Unlike the system's, so that cells of the system's are planned.
            anchor_cc: String::new(),
            bowline_cc: String::new(),
            system_cc: self.head.system_cc.clone(),
            peers: Subject::ALL.into_iter().filter(|s| s.is_peer() || s.is_door()).collect(),
            nodes: nodes::free(),
        };
        let mut blocks = plan::plan(self.suite, &Options::defaults(), &setting);
        let records = &self.results.records;
        for block in &mut blocks {
            let of = |label: &str| records.iter().any(|r| r.block == block.id && r.label == label);
            block.entries.retain(|entry| of(&entry.label));
        }
        blocks.retain(|block| !block.entries.is_empty());
        blocks
    }
}

fn record(value: &Value) -> Result<Record, String> {
    let text = |key: &str| {
        let text = value[key].as_str().map(str::to_owned);
        text.ok_or_else(|| format!("a measurement has no {key}"))
    };
    let int = |key: &str| {
        value[key].as_u64().ok_or_else(|| format!("a measurement has no whole number {key}"))
    };
    let float =
        |key: &str| value[key].as_f64().ok_or_else(|| format!("a measurement has no number {key}"));
    let size = int("size")? as usize;
    let result = match value["error"].as_str() {
        Some(why) => Err(why.to_owned()),
        None => Ok(Sample {
            count: int("count")?,
            seconds: float("seconds")?,
            bytes: size,
            rx_cpu: float("receive_cpu_ns")?,
            tx_cpu: float("send_cpu_ns")?,
            rx_syscalls: value["receive_syscalls"].as_f64(),
            tx_syscalls: value["send_syscalls"].as_f64(),
            lat: value["lat_ns"]
                .as_array()
                .map(|list| list.iter().filter_map(Value::as_u64).collect()),
            words: Words::parse(text("said")?.split(' ')),
            // Files of before 21 November 2026 may lack it.
            other: Words::parse(value["other_said"].as_str().unwrap_or_default().split(' ')),
            foreign: float("foreign")?,
            tries: int("tries")? as u32,
        }),
    };
    Ok(Record {
        block: text("cell")?,
        label: text("label")?,
        size,
        flows: int("flows")? as usize,
        round: int("round")? as u32,
        pinned: value["pinned"].as_bool().unwrap_or(false),
        result,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{json, report};

    fn run() -> (Head, Results) {
        let head = Head {
            version: "0.1.0".into(),
            commit: "abc".into(),
            date: "2026-11-26".into(),
            cpu: "a \"CPU\"".into(),
            cores: 2,
            kernel: "Linux 6".into(),
            virtualised: true,
            mitigations: "none".into(),
            system_cc: "bbr".into(),
            available_cc: vec!["bbr".into()],
            buffers: "small".into(),
            clock: "tsc".into(),
            load: "0 0 0".into(),
            open_files: Some(7),
        };
        let sample = Sample {
            count: 1000,
            seconds: 0.25,
            bytes: 64,
            rx_cpu: 10.5,
            tx_cpu: 20.25,
            rx_syscalls: Some(0.5),
            tx_syscalls: None,
            lat: Some(vec![1, 2, 3]),
            words: Words::parse(["n=1000", "cc=cubic"]),
            other: Words::parse(["sent=1001"]),
            foreign: 0.01,
            tries: 2,
        };
        let record = |label: &str, round, result| Record {
            block: "stream/64".into(),
            label: label.into(),
            size: 64,
            flows: 1,
            round,
            pinned: true,
            result,
        };
        let mut records = Vec::new();
        for round in 0..3 {
            records.push(record("tcpb", round, Ok(sample.clone())));
            records.push(record("bowline", round, Ok(sample.clone())));
            records.push(record("seqp", round, Err("wrong tail".into())));
        }
        (head, Results { records })
    }

    #[test]
    fn a_run_is_read_as_it_was_written() {
        let (head, results) = run();
        let notes = ["peer zmq: skipped, libzmq5 is not installed".to_owned()];
        let verdicts = targets::judge(targets::of(Suite::Rds), &results, &|_| None);
        let json = |head, results, verdicts| {
            json::lines(&report::json(head, &[], &notes, results, verdicts), 2)
        };
        let text = json(&head, &results, &verdicts);
        let name = file_name(Suite::Rds, &head.date, &head.commit);
        let read = Recorded::parse(name, &text).unwrap();
        assert_eq!(read.suite, Suite::Rds);
        // Written again it is the same text, but for why a target was skipped, which only notes
        // tell.
        let outcomes = read.outcomes();
        assert_eq!(json(&read.head, &read.results, &verdicts), text);
        assert_eq!(outcomes[0].ratio.map(|ratio| ratio.mid), Some(1.0));
        assert_eq!(outcomes[1].verdict.why(), "libzmq5 is not installed");
        let blocks = read.blocks();
        assert_eq!(blocks.len(), 1);
        let mut labels: Vec<&str> = blocks[0].entries.iter().map(|e| e.label.as_str()).collect();
        labels.sort_unstable();
        assert_eq!(labels, ["bowline", "seqp", "tcpb"]);
    }

    #[test]
    fn a_run_without_verdicts_is_not_judged() {
        let (head, results) = run();
        let text = json::lines(&report::json(&head, &[], &[], &results, &[]), 2);
        assert!(Recorded::parse("x-roce.json".into(), &text).unwrap().outcomes().is_empty());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told() {
        let parse = |text: &str| Recorded::parse("x.json".into(), text).unwrap_err();
        assert!(parse("{").contains("EOF"), "{}", parse("{"));
        assert_eq!(parse("{}"), "no list of measurements");
        let headless = r#"{"measurements": [], "notes": [], "targets": [], "head": {}}"#;
        assert_eq!(parse(headless), "the head has no version");
        let empty = r#"{"measurements": [{"size": 1}]}"#;
        assert!(parse(empty).starts_with("a measurement has no"), "{}", parse(empty));
    }

    #[test]
    fn file_names_tell_the_suites_apart() {
        for suite in Suite::ALL {
            let name = file_name(suite, "2026-11-20", "no commit");
            assert_eq!(suite_of(name.strip_suffix(".json").unwrap()), suite, "{name}");
        }
        assert_eq!(file_name(Suite::Rds, "2026-11-20", "1a"), "2026-11-20-1a.json");
    }
}
