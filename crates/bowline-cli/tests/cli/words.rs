//! Commands that need no peer: usage, configuration, manual pages.

use crate::support::{Folder, run, start_as};

#[test]
fn a_wrong_command_line_is_one_line_that_says_where_to_look() {
    let folder = Folder::new();
    for (words, code, parts) in [
        (&["ping"][..], 2, &["<REMOTE>", "bowline ping --help"][..]),
        (&["ping", "-i", "soon", "127.0.0.1"], 2, &["soon", "20ms"]),
        (&["ping", "--never", "127.0.0.1"], 2, &["--never", "bowline ping --help"]),
        (&["ping", "-Q", "256", "127.0.0.1"], 2, &["256"]),
        (&["ping", "-n", "33", "127.0.0.1"], 2, &["33", "sockets", "--numeric"]),
        (&["recv", "-s", "127.0.0.1:7", "--from", "nobody"], 2, &["nobody", "ADDRESS:PORT"]),
        (&["ping", "-I", "127.0.0.1", "::1"], 2, &["different address families"]),
        // As rds-info does.
        (&["info", "-x"], 1, &["-x", "bowline info --help"]),
        (&["stress", "-q", "10"], 2, &["-q 10", "63"]),
        (&["stress", "-t", "0"], 2, &["-t"]),
        // Outliers may have 64 bits; only the address is wrong.
        (&["stress", "--show-outliers", "0xffffffffffffffff", "-s", "::1"], 1, &["IPv4"]),
        (&["node", "--paths", "3"], 2, &["paths must be 8 or 1"]),
        (&["node", "--echo", "4000"], 2, &["--address"]),
        (&["node", "--sysctl", "ping_enable"], 2, &["NAME=VALUE"]),
        (&["quickstart", "--local", "127.0.0.1"], 2, &["--remote"]),
        (&["send", "-s", "nowhere", "-d", "127.0.0.1:1"], 2, &["nowhere", "ADDRESS:PORT"]),
        (&["sim", "--scenario", "picnic"], 2, &["picnic", "calm"]),
        (&["sim", "--trace"], 2, &["--seed"]),
        (&["sim", "--cells"], 2, &["--roce"]),
        (&["sim", "--roce", "--cells", "picnic"], 2, &["picnic", "incast-10g-64"]),
        (&["sim", "--roce", "--congestion", "delay"], 2, &["--cells"]),
        (&["sim", "--roce", "--cells", "--congestion", "reno"], 2, &["reno", "cubic, swift"]),
        (&["perf", "-c", "127.0.0.1", "--congestion", "fixed:15"], 2, &["fixed:15", "16 to 4096"]),
        (&["rping", "-s", "--congestion", "Delay"], 2, &["Delay", "auto, delay, cubic, swift"]),
        (&["bench", "net", "--congestion", "reno"], 2, &["reno", "cubic, swift"]),
        (&["sysctl", "ping_enable=yes"], 2, &["NAME=VALUE"]),
        (&["rping"], 2, &["one of --server and --client"]),
        (&["perf"], 2, &["one of --server and --client"]),
        (&["png"], 2, &["similar", "'ping'", "bowline --help"]),
        (&["ping", "--adress", "127.0.0.1"], 2, &["similar", "'--address'"]),
        (&["send", "-s", "127.0.0.1:1", "-d", "nowhere"], 2, &["nowhere", "HOST:PORT"]),
        (&["rping", "-s", "-c", "127.0.0.1"], 2, &["--client"]),
        (&["rping", "-c", "127.0.0.1", "--size", "22"], 2, &["22", "65535"]),
        (&["rping", "-s", "--mtu", "1500"], 2, &["1500", "4096"]),
        (&["perf", "-c", "127.0.0.1", "--op", "atomic", "--size", "9"], 2, &["9", "8 bytes"]),
        (&["perf", "-c", "127.0.0.1", "--depth", "0"], 2, &["depth 0"]),
        (&["rnbd", "export"], 2, &["--memory", "--dir"]),
        (&["rnbd", "export", "--memory", "disk0"], 2, &["NAME=VALUE"]),
        (&["rnbd", "map", "disk0"], 2, &["--from"]),
        (&["rnbd", "eat"], 2, &["bowline rnbd: ", "\"eat\""]),
        (&["rnbd", "unmap"], 2, &["a name is missing"]),
        (&["info", "-w", "0"], 1, &["greater than 0"]),
        (&["ping", "0.0.0.0"], 2, &["0.0.0.0 is no address of a node"]),
        // As the tool does: the low 8 bits of -ENOENT.
        (&["rnbd", "unmap", "rnbd0"], 254, &["error: ", "rnbd0"]),
        (&["rtrs", "path", "map", "x", "from", "y"], 2, &["bowline rtrs: ", "map"]),
        (&["dance"], 2, &["dance", "bowline --help"]),
    ] {
        let done = run(&folder, words).exits(code);
        assert_eq!(done.out, "", "{words:?}");
        done.complains(parts);
    }
}

#[test]
fn help_and_version_are_answers_and_not_mistakes() {
    let folder = Folder::new();
    let help = run(&folder, &["--help"]).exits(0).out;
    for word in [
        "quickstart",
        "node",
        "info",
        "ping",
        "stress",
        "bench",
        "sim",
        "send",
        "recv",
        "sysctl",
        "drop",
        "devices",
        "rping",
        "perf",
        "rnbd",
        "rtrs",
    ] {
        assert!(help.contains(&format!("\n  {word} ")), "{word} in {help}");
    }
    assert!(!help.contains("quickstart-peer"), "{help}");
    // Nothing is as wide as the paragraphs that it comes from.
    for words in [&["node"][..], &["send"], &["rnbd", "map"], &["stress"]] {
        let help = run(&folder, &[words, &["--help"]].concat()).exits(0).out;
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{words:?}: {help}");
    }
    let version = run(&folder, &["--version"]).exits(0).out;
    assert_eq!(version, format!("bowline {}\n", env!("CARGO_PKG_VERSION")));
    assert!(run(&folder, &["stress", "--help"]).exits(0).out.contains("--use-cong-monitor"));
    assert_eq!(run(&folder, &[]).exits(2).out, "");
}

#[test]
fn a_bad_configuration_names_the_file_and_the_line() {
    let folder = Folder::new();
    let path = folder.write("bad.toml", "# mine\naddress = [\"127.41.0.1\"]\nadress = []\n");
    let path = path.to_str().expect("a plain path");
    run(&folder, &["node", "--config", path]).exits(2).complains(&[
        "bad.toml:3:",
        "adress",
        "--example-config",
    ]);
    let path = folder.write("type.toml", "paths = \"many\"\n");
    let path = path.to_str().expect("a plain path");
    run(&folder, &["node", "--config", path]).exits(2).complains(&["type.toml:1:"]);
    run(&folder, &["node", "--config", "/nonexistent/x.toml"])
        .exits(2)
        .complains(&["/nonexistent/x.toml"]);
}

#[test]
fn the_example_configuration_is_accepted_up_to_its_address() {
    let folder = Folder::new();
    let text = run(&folder, &["node", "--example-config"]).exits(0).out;
    assert!(text.contains("address = [\"127.0.0.1\"]"));
    // No machine has an address of TEST-NET-1, so the node fails only at its listener.
    let path = folder.write("node.toml", &text.replace("127.0.0.1\"]", "192.0.2.77\"]"));
    let path = path.to_str().expect("a plain path");
    run(&folder, &["node", "--config", path]).exits(1).complains(&["192.0.2.77"]);
}

#[test]
fn without_a_node_info_says_how_to_start_one() {
    let folder = Folder::new();
    run(&folder, &["info"]).exits(1).complains(&["bowline node", "--control"]);
    run(&folder, &["info", "--control", "/nonexistent.sock"])
        .exits(1)
        .complains(&["/nonexistent.sock"]);
}

#[test]
fn a_seed_of_the_simulator_is_the_same_run_again() {
    let folder = Folder::new();
    let words = ["sim", "--seed", "17", "--scenario", "cuts", "--trace"];
    let first = run(&folder, &words);
    assert!(first.out.contains("seed 17 (cuts)"), "{first:?}");
    assert_eq!(run(&folder, &words).out, first.out);
    let done = run(&folder, &["sim", "--seeds", "3", "--from", "5", "--json"]);
    let object: serde_json::Value = serde_json::from_str(&done.out).expect("JSON");
    assert_eq!(object["runs"], 3);
    assert_eq!(done.code, Some(i32::from(object["failed"] != 0)));
}

#[test]
fn cells_of_congestion_control_are_measured() {
    let folder = Folder::new();
    let words = ["sim", "--roce", "--cells", "one-100m-50us", "--seeds", "2", "--json"];
    let done = run(&folder, &words);
    let told: serde_json::Value = serde_json::from_str(&done.out).expect("JSON");
    assert_eq!((&told["runs"], &told["broken"]), (&2.into(), &0.into()), "{told}");
    let used = told["cells"][1]["used"].as_f64().expect("a share");
    assert!((0.9..1.1).contains(&used), "{told}");
    let fixed = ["sim", "--roce", "--cells", "loss-1", "--congestion", "fixed:240", "--seed", "3"];
    let done = run(&folder, &fixed).exits(0);
    assert!(done.out.contains("goal missed") && done.out.contains("0 broken"), "{}", done.out);
}

#[test]
fn the_controllers_for_comparison_run_in_the_cells_and_are_held_to_no_floor() {
    let folder = Folder::new();
    let cell = |cell: &str, how| {
        let words =
            ["sim", "--roce", "--cells", cell, "--congestion", how, "--seed", "1", "--json"];
        let told: serde_json::Value = serde_json::from_str(&run(&folder, &words).exits(0).out)
            .unwrap_or_else(|error| panic!("{how}: {error}"));
        assert_eq!(told["broken"], 0, "{told}");
        told["cells"][0].clone()
    };
    // CUBIC fills the queue until it overflows, Swift keeps it short, and neither is delay.
    let [cubic, swift] = ["cubic", "swift"].map(|how| cell("one-100m-50us", how));
    for told in [&cubic, &swift] {
        assert!(told["used"].as_f64() > Some(0.9), "{told}");
    }
    let queue = |told: &serde_json::Value| told["longest_queue_ns"].as_f64().expect("a queue");
    assert!(queue(&cubic) > 4.0 * queue(&swift), "{cubic} {swift}");
    // With 1 % of loss both are below the floor of delay.
    for how in ["cubic", "swift"] {
        let told = cell("loss-1", how);
        assert!(told["used"].as_f64() < Some(0.5), "{told}");
    }
}

#[test]
fn a_plan_of_the_simulator_is_kept_and_runs_again() {
    let folder = Folder::new();
    let kept = folder.path().join("kept");
    let dir = kept.to_str().expect("a plain path");
    for (kind, file) in [
        ("", "rds-9.json"),
        ("--roce", "roce-9.json"),
        ("--rtrs", "rtrs-9.json"),
        ("--host", "host-9.json"),
    ] {
        let words: Vec<&str> = ["sim", "--seed", "9", "--keep", dir, "--json", kind]
            .into_iter()
            .filter(|w| !w.is_empty())
            .collect();
        let drawn = run(&folder, &words);
        drawn.complains(&["kept: ", file]);
        let plan = kept.join(file);
        let again =
            run(&folder, &["sim", "--plan", plan.to_str().expect("a plain path"), "--json"]);
        let hash = |out: &str| {
            serde_json::from_str::<serde_json::Value>(out).expect("JSON")["hash"].clone()
        };
        assert_eq!(hash(&drawn.out), hash(&again.out), "{file}");
    }
    std::fs::write(kept.join("other.json"), "{}").expect("a file");
    let other = kept.join("other.json");
    run(&folder, &["sim", "--plan", other.to_str().expect("a plain path")])
        .exits(2)
        .complains(&["not a plan", "other.json"]);
    run(&folder, &["sim", "--plan", "/nonexistent.json"])
        .exits(2)
        .complains(&["/nonexistent.json"]);
    run(&folder, &["sim", "--plan", "x", "--seed", "1"]).exits(2).complains(&["--plan"]);
}

#[test]
fn a_search_tells_what_it_came_to_and_ends_in_time() {
    let folder = Folder::new();
    let done = run(&folder, &["sim", "--seconds", "1", "--from", "77", "--coverage"]);
    assert!(done.out.contains("seeds from 77 on"), "{}", done.out);
    assert!(done.out.contains("tcp: retransmission timeout"), "{}", done.out);
    assert!(done.out.contains("states, transitions and faults reached"), "{}", done.out);
}

#[test]
fn names_of_the_original_tools_work() {
    let folder = Folder::new();
    let alias = folder.path().join("rds-info");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_bowline"), &alias).expect("a link");
    start_as(alias.as_ref(), &folder, &["-x"]).finish().exits(1).complains(&["-x"]);
    let done = start_as(alias.as_ref(), &folder, &["-o"]).finish().exits(1);
    done.complains(&["-o", "rds-info of rds-tools 2.0.7"]);
}

#[test]
fn pages_and_completions_cover_the_words() {
    let folder = Folder::new();
    let dir = folder.path().join("man");
    run(&folder, &["man", dir.to_str().expect("a plain path")]).exits(0);
    let mut pages: Vec<String> = std::fs::read_dir(&dir)
        .expect("a folder")
        .map(|entry| entry.expect("a page").file_name().to_string_lossy().into_owned())
        .collect();
    pages.sort();
    assert_eq!(
        pages,
        [
            "bowline-bench-net.1",
            "bowline-bench-rds.1",
            "bowline-bench-report.1",
            "bowline-bench-rnbd.1",
            "bowline-bench-roce.1",
            "bowline-bench-rtrs.1",
            "bowline-bench.1",
            "bowline-cm-listen.1",
            "bowline-devices.1",
            "bowline-drop.1",
            "bowline-info.1",
            "bowline-node.1",
            "bowline-perf.1",
            "bowline-ping.1",
            "bowline-probe-cm.1",
            "bowline-probe-rds.1",
            "bowline-probe-rnbd.1",
            "bowline-probe-rtrs.1",
            "bowline-probe.1",
            "bowline-quickstart.1",
            "bowline-recv.1",
            "bowline-rnbd-export.1",
            "bowline-rnbd-exports.1",
            "bowline-rnbd-map.1",
            "bowline-rnbd-top.1",
            "bowline-rnbd-verify.1",
            "bowline-rnbd.1",
            "bowline-rping.1",
            "bowline-rtrs.1",
            "bowline-run.1",
            "bowline-send.1",
            "bowline-sim.1",
            "bowline-stress.1",
            "bowline-sysctl.1",
            "bowline-top.1",
            "bowline.1",
        ]
    );
    let page = std::fs::read_to_string(dir.join("bowline-ping.1")).expect("a page");
    assert!(page.contains(".TH bowline-ping 1"), "{page}");
    // Arguments that the help lists one to a line are listed so on the page, too.
    let page = std::fs::read_to_string(dir.join("bowline-rnbd.1")).expect("a page");
    let notes = page.split_once(".SH NOTES\n").expect("what stands behind the options").1;
    let notes = notes.split_once(".SH EXAMPLES\n").expect("the next section").0;
    let lines: Vec<&str> = notes.lines().filter(|line| !line.starts_with('.')).collect();
    assert!(lines.iter().any(|line| line.starts_with("  show NAME ")), "{notes}");
    assert!(lines.iter().any(|line| line.starts_with("  close DEVICE ")), "{notes}");
    assert_eq!(notes.trim_end(), format!(".ad l\n{}", lines.join("\n.br\n")));
    assert_eq!(page.matches("close DEVICE").count(), 1, "{page}");
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&folder, &["completions", shell]).exits(0).out;
        assert!(script.contains("quickstart"), "{shell}");
        assert!(
            ["min-latency", "migration", "240"].iter().all(|value| script.contains(value)),
            "{shell}"
        );
        assert!(script.contains("quiet-wait") && !script.contains("__role"), "{shell}");
    }
}

#[test]
fn every_page_that_a_page_refers_to_is_there() {
    let folder = Folder::new();
    let pages = folder.path().join("pages");
    run(&folder, &["man", pages.to_str().expect("a plain path")]).exits(0);
    let mut referred = 0;
    for page in std::fs::read_dir(&pages).expect("pages").flatten() {
        let text = std::fs::read_to_string(page.path()).expect("a page").replace('\\', "");
        let parts: Vec<&str> = text.split("(1)").collect();
        // The last one is behind the last reference.
        for part in &parts[..parts.len() - 1] {
            let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            let name = part.rsplit(|c| !is_of_name(c)).next().unwrap_or_default();
            let there = pages.join(format!("{name}.1")).exists();
            assert!(there, "{:?} refers to {name}(1)", page.file_name());
            referred += 1;
        }
        let head = text.lines().find(|line| line.starts_with(".TH")).expect("a head").to_owned();
        assert!(head.contains(&format!("bowline {}", env!("CARGO_PKG_VERSION"))), "{head}");
    }
    assert!(referred > 15, "{referred} references");
}
