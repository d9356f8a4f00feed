//! Statistics of paths: shown, and set to 0.

use bowline_ctl::{Errno, Json};
use bowline_node::log::shown;
use serde_json::{Value, json};

use super::{Mode, Refusal, Row, Run};
use crate::cli::tool::format::Format;

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
