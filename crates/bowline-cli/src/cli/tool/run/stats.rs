//! Statistics of paths: shown, and set to 0.

use bowline_ctl::{Errno, Json};
use bowline_node::log::shown;
use serde_json::{Value, json};

use super::{Mode, Refusal, Row, Run};
use crate::cli::tool::format::Format;

/// A text with numbers in it.
const LATENCY: &str = "rdma_lat";
/// The largest and the average number of completions taken at once, of which servers have the sums.
const COMPLETIONS: &str = "wc_completion";

/// The file of numbers too many to be told apart without their names [RS-50].
const NETWORK: &str = "network";

impl Run<'_> {
    pub(super) fn stats(&mut self, name: &str) -> Result<(), Refusal> {
        if self.request.options.format == Format::Json {
            return self.stats_as_json(name);
        }
        for path in self.paths_named(name)? {
            let [session, name] = ["sessname", "pathname"].map(|key| shown(path.item.text(key)));
            say!("{session} {name}");
            let names: &[&str] = match path.mode {
                Mode::Client => &[
                    "rdma",
                    "reconnects",
                    "cpu_migration_from",
                    "cpu_migration_to",
                    "wc_completion",
                    "rdma_lat",
                    NETWORK,
                ],
                Mode::Server => &["rdma", "wc_completion", NETWORK],
            };
            for name in names {
                let text =
                    match self.inventory.text(path.source, &format!("{}/stats/{name}", path.at)) {
                        // Newer kernels have fewer files than older ones [RS-46].
                        Err(refusal) if refusal.errno == Errno::ENOENT => continue,
                        text => text?,
                    };
                let text = if *name == NETWORK { self.with_names(&path, &text) } else { text };
                for (index, line) in text.lines().enumerate() {
                    say!("  {:<18} {line}", if index == 0 { name } else { "" });
                }
            }
        }
        Ok(())
    }

    /// The numbers of a path's file about the network with their names, one in a line; without them
    /// if the tree does not tell.
    fn with_names(&self, path: &Row, text: &str) -> String {
        let part = self.inventory.part(path.source, &format!("{}/stats/{NETWORK}", path.at));
        let members = part.map(Json::members).unwrap_or_default();
        let lines =
            members.iter().filter_map(|(name, n)| Some(format!("{name} {}\n", n.as_u64()?)));
        let lines: String = lines.collect();
        if lines.is_empty() { text.to_owned() } else { lines }
    }

    /// Prints a list of paths, each with its files of statistics.
    fn stats_as_json(&self, name: &str) -> Result<(), Refusal> {
        let paths = self.paths_named(name)?;
        let all = paths.iter().map(|path| {
            let part = self.inventory.part(path.source, &format!("{}/stats", path.at));
            let stats = part.and_then(|part| serde_json::from_str(&part.to_string()).ok());
            let stats = stats.map(numbers);
            json!({
                "session": path.item.text("sessname"),
                "path": path.item.text("pathname"),
                "side": path.mode.name(),
                "stats": stats.unwrap_or(Value::Null),
            })
        });
        say!("{}", Value::Array(all.collect()));
        Ok(())
    }

    pub(super) fn reset(&mut self, name: &str) -> Result<(), Refusal> {
        let mut result = Ok(());
        for path in self.paths_named(name)? {
            // A kernel's server has no `reset_all`, and one statistics file only [RS-43].
            let all = format!("{}/stats/reset_all", path.at);
            let file = match self.inventory.text(path.source, &all) {
                Err(refusal) if refusal.errno == Errno::ENOENT => format!("{}/stats/rdma", path.at),
                _ => all,
            };
            let done = self.write(path.source, &file, "1");
            result = result.and(done);
        }
        result
    }
}

/// The statistics of a path with the histogram of latencies as numbers, completions with the same
/// keys on both sides, and without the file that is there to be written only.
fn numbers(mut stats: Value) -> Value {
    let Some(files) = stats.as_object_mut() else { return stats };
    files.remove("reset_all");
    if let Some(file) = files.get_mut(LATENCY)
        && let Some(text) = file.as_str()
    {
        *file = histogram(text);
    }
    if let Some(file) = files.get_mut(COMPLETIONS) {
        let count = |key: &str| file.get(key).and_then(Value::as_u64);
        if let (Some(max), Some(total), Some(calls)) =
            (count("max"), count("total"), count("calls"))
        {
            *file = json!({ "max": max, "average": total.checked_div(calls).unwrap_or(0) });
        }
    }
    stats
}

/// The rows `LIMIT ms: READS WRITES` of a histogram, and its last line, the longest times.
fn histogram(text: &str) -> Value {
    let pair = |numbers: &str| {
        let mut numbers = numbers.split_ascii_whitespace().map(|word| word.parse::<u64>().ok());
        Some((numbers.next()??, numbers.next()??))
    };
    let (mut rows, mut longest) = (Vec::new(), Value::Null);
    for (name, numbers) in text.lines().filter_map(|line| line.split_once(':')) {
        let Some((reads, writes)) = pair(numbers) else { continue };
        if name == "maximum ms" {
            longest = json!({ "reads": reads, "writes": writes });
        } else {
            rows.push(json!({ "time": name, "reads": reads, "writes": writes }));
        }
    }
    json!({ "times": rows, "maximum_ms": longest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_numbers_in_json() {
        // tests [RS-46]
        let text = "1 ms: 3 4\n>= 65536 ms: 0 1\nmaximum ms: 7 9";
        let stats = numbers(json!({ "rdma_lat": text, "reset_all": "echo 1 to reset all" }));
        let rows = json!([
            { "time": "1 ms", "reads": 3, "writes": 4 },
            { "time": ">= 65536 ms", "reads": 0, "writes": 1 },
        ]);
        let server_side = json!({ "wc_completion": { "max": 9, "total": 12, "calls": 4 } });
        let same_keys = json!({ "wc_completion": { "max": 9, "average": 3 } });
        assert_eq!(numbers(server_side), same_keys);
        let longest = json!({ "reads": 7, "writes": 9 });
        assert_eq!(stats, json!({ "rdma_lat": { "times": rows, "maximum_ms": longest } }));
    }
}
