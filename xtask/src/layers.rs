//! Dependencies between crates go down only, and the cores do no I/O.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::repo;
use crate::run::{self, Outcome};

/// Crates and their layer: a crate may use crates of lower layers only. The command is the top
/// edge.
const LAYERS: [(&str, u8); 29] = [
    ("bowline-base", 0),
    ("bowline-crc", 0),
    ("bowline-wait", 0),
    ("bowline-host-wire", 0),
    ("bowline-wire", 1),
    ("bowline-verbs", 1),
    ("bowline-testkit", 2),
    ("bowline-rds", 2),
    ("bowline-roce", 2),
    ("bowline-rtrs", 2),
    ("bowline-rnbd", 2),
    ("bowline-ctl", 2),
    ("bowline-host-client", 2),
    ("bowline-rds-driver", 3),
    ("bowline-host", 4),
    ("bowline-ibverbs", 4),
    ("bowline-preload", 5),
    ("bowline-roce-driver", 3),
    ("bowline-rdmacore", 3),
    ("bowline-rtrs-driver", 4),
    ("bowline-block", 3),
    ("bowline-sim", 5),
    ("bowline-rnbd-driver", 5),
    ("bowline", 6),
    ("bowline-bench", 7),
    ("bowline-interop-peer", 7),
    ("bowline-probe", 7),
    ("bowline-node", 7),
    ("bowline-cli", 8),
];
/// Crates that use no other crate of the workspace and are used by none.
const APART: [&str; 1] = ["xtask"];
/// What tests of every crate may use, and nothing else.
const TESTKIT: &str = "bowline-testkit";
/// Crates that know neither sockets nor clocks nor threads.
const CORES: [&str; 5] =
    ["bowline-wire", "bowline-rds", "bowline-roce", "bowline-rtrs", "bowline-rnbd"];
/// What a core must not name outside tests.
const NOT_IN_CORES: [&str; 9] = [
    "bowline_base::clock",
    "bowline_base::entropy",
    "Instant::now",
    "SystemTime::now",
    "thread::",
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "std::fs",
];
/// Crates from elsewhere that a core must not depend on.
const NO_CORE_DEPENDENCY: [&str; 6] = ["libc", "mio", "nix", "rustix", "socket2", "tokio"];

/// What the daemon does not link: it is confined, and has what it needs only.
const NOT_IN_DAEMON: [&str; 5] =
    ["bowline-bench", "bowline-cli", "bowline-sim", "clap_complete", "clap_mangen"];
/// What the library of the daemon does without, since it parses no command line.
const NOT_IN_LIBRARY: [&str; 1] = ["clap"];

/// Reads `cargo metadata` and the sources of the cores, and reports every violation.
pub(crate) fn check() -> Outcome {
    let problems = metadata().and_then(|metadata| {
        let mut problems = edges(&metadata)?;
        problems.extend(core_sources()?);
        problems.extend(linked(
            "the daemon",
            &linked_by(&["--features", "options"])?,
            &NOT_IN_DAEMON,
        ));
        problems.extend(linked("its library", &linked_by(&[])?, &NOT_IN_LIBRARY));
        Ok(problems)
    });
    match problems {
        Err(error) => Outcome::Failed(error),
        Ok(problems) if problems.is_empty() => Outcome::Passed,
        Ok(problems) => Outcome::Failed(problems.join("\n")),
    }
}

fn metadata() -> Result<Value, String> {
    let args = ["metadata", "--format-version", "1", "--no-deps", "--locked"];
    let output = run::cargo(&args).output().map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))
}

/// Returns the packages that the daemon links, a line each.
fn linked_by(features: &[&str]) -> Result<String, String> {
    let tree = ["tree", "--locked", "--package", "bowline-node", "--edges", "normal"];
    let format = ["--prefix", "none", "--format", "{p}"];
    let mut command = run::cargo(&tree);
    let output = command.args(format).args(features).output();
    let output = output.map_err(|error| format!("cargo tree: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns a problem for each package of `list` that must not be there.
fn linked(who: &str, list: &str, unwanted: &[&str]) -> Vec<String> {
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    let mut found: Vec<&str> = names.filter(|name| unwanted.contains(name)).collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().map(|name| format!("{who} links {name}")).collect()
}

fn edges(metadata: &Value) -> Result<Vec<String>, String> {
    let layers: BTreeMap<&str, u8> = LAYERS.into_iter().collect();
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    let mut problems = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let layer = layers.get(name);
        if layer.is_none() && !APART.contains(&name) {
            problems.push(format!("{name} has no layer: add it to xtask/src/layers.rs"));
        }
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let used = dependency["name"].as_str().unwrap_or_default();
            let kind = dependency["kind"].as_str().unwrap_or("normal");
            if CORES.contains(&name) && kind == "normal" && NO_CORE_DEPENDENCY.contains(&used) {
                problems.push(format!("{name} is a core and must not use {used}"));
            }
            if !names.contains(&used) {
                continue;
            }
            if used == TESTKIT && kind != "dev" {
                problems.push(format!("{name} -> {used} ({kind}): it is for tests only"));
            }
            let down = match (layer, layers.get(used)) {
                (Some(own), Some(other)) => other < own,
                _ => false,
            };
            let for_tests = used == TESTKIT && kind == "dev";
            if !down && !for_tests {
                problems.push(format!("{name} -> {used} ({kind}) does not go down"));
            }
            println!("{name} -> {used} ({kind})");
        }
    }
    Ok(problems)
}

fn core_sources() -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for name in repo::files()? {
        let in_core = CORES.iter().any(|core| name.starts_with(&format!("crates/{core}/src/")));
        if !in_core || !name.ends_with(".rs") || repo::is_test_file(&name) {
            continue;
        }
        let text = repo::text(&name).unwrap_or_default();
        for (index, line) in text.lines().take(repo::code_lines(&text)).enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            for word in NOT_IN_CORES {
                if line.contains(word) {
                    problems.push(format!("{name}:{}: {word} in a core", index + 1));
                }
            }
        }
    }
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(json: &str) -> Vec<String> {
        edges(&serde_json::from_str(json).unwrap()).unwrap()
    }

    #[test]
    fn what_the_daemon_must_not_link_is_found_once() {
        let list = "bowline-node v0.1.0 (/w)\nbowline-sim v0.1.0 (/w)\nclap v4.6.7\n\
                    bowline-sim v0.1.0 (/w) (*)\nclap_lex v1.1.1\n";
        assert_eq!(linked("it", list, &NOT_IN_DAEMON), ["it links bowline-sim"]);
        assert_eq!(linked("it", list, &NOT_IN_LIBRARY), ["it links clap"]);
        assert!(linked("it", "bowline-node v0.1.0 (/w)\n", &NOT_IN_DAEMON).is_empty());
    }

    #[test]
    fn accepts_an_edge_that_goes_down() {
        let json = r#"{"packages":[{"name":"bowline-wire","dependencies":[]},
            {"name":"bowline-rds","dependencies":[{"name":"bowline-wire","kind":null}]}]}"#;
        assert_eq!(problems(json), Vec::<String>::new());
    }

    #[test]
    fn rejects_an_edge_that_goes_up_or_sideways() {
        let json = r#"{"packages":[{"name":"bowline-rds-driver","dependencies":[]},
            {"name":"bowline-verbs","dependencies":[{"name":"bowline-rds-driver","kind":null}]},
            {"name":"bowline-sim","dependencies":[]},
            {"name":"bowline-wire","dependencies":[{"name":"bowline-sim","kind":"dev"}]}]}"#;
        assert_eq!(
            problems(json),
            [
                "bowline-verbs -> bowline-rds-driver (normal) does not go down",
                "bowline-wire -> bowline-sim (dev) does not go down"
            ]
        );
    }

    #[test]
    fn rejects_a_crate_without_a_layer_and_a_core_with_sockets() {
        let json = r#"{"packages":[{"name":"bowline-new","dependencies":[]},
            {"name":"bowline-rds","dependencies":[{"name":"mio","kind":null}]}]}"#;
        assert_eq!(problems(json).len(), 2);
    }
}
