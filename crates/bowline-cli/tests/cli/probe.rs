//! `bowline probe`: a node and a server of the command keep every rule; `bowline-probe` has tests
//! with peers that do not.

use serde_json::Value;

use crate::support::{Folder, run, start};

#[test]
fn a_node_and_a_server_are_asked_rule_by_rule() {
    let folder = Folder::new();
    let control = folder.path().join("control");
    let control = control.to_str().expect("UTF-8");
    let mut node = start(&folder, &["node", "--address", "127.93.0.2", "--control", control]);
    node.expect("ready");
    let captures = folder.path().join("captures");
    let words = ["probe", "rds", "127.93.0.2", "-I", "127.93.0.1", "-I", "127.93.0.3", "-W", "10"];
    let words = [&words[..], &["--json", "--capture", captures.to_str().expect("UTF-8")]].concat();
    let found: Value = serde_json::from_str(&run(&folder, &words).exits(0).out).expect("JSON");
    assert_eq!((&found["profile"], &found["deviates"]), (&"bowline".into(), &0.into()), "{found}");
    let rules = found["rules"].as_array().expect("rules");
    assert!(rules.len() > 20 && rules.iter().all(|rule| rule["verdict"] == "agrees"), "{found}");
    assert_eq!(std::fs::read_dir(&captures).expect("the folder").count(), 0);

    // It does not keep what is expected of another.
    let words = ["probe", "rds", "127.93.0.2", "-I", "127.93.0.4", "--profile", "linux-6.12"];
    let words =
        [&words[..], &["--rule", "R-111", "--capture"], &[captures.to_str().expect("UTF-8")]]
            .concat();
    let done = run(&folder, &words).exits(1);
    let text = "R-111          DEVIATES  the extensions of that probe\n               expected  NPATHS alone\n";
    assert!(done.out.starts_with(text), "{done:?}");
    assert!(captures.join("rds-R-111.pcap").exists());

    let words = ["rnbd", "export", "--memory", "disk0=1m", "-I", "127.93.0.5"];
    let mut server = start(&folder, &words);
    server.expect("disk0");
    for (protocol, more) in [("cm", &[][..]), ("rtrs", &[]), ("rnbd", &["--disk", "disk0"])] {
        let words = ["probe", protocol, "127.93.0.5", "-I", "127.93.0.6", "-W", "10"];
        let words = [&words[..], more].concat();
        let done = run(&folder, &words).exits(0);
        assert!(done.out.ends_with(" rules kept, 0 not, 0 not asked\n"), "{done:?}");
    }

    // What the user has named wrongly is not the peer's fault.
    let words = ["probe", "rnbd", "127.93.0.5", "-I", "127.93.0.6", "-W", "10", "--disk", "none"];
    let done = run(&folder, &words).exits(0);
    assert!(done.out.contains("the server has no disk none"), "{done:?}");
}

#[test]
fn a_peer_that_is_not_there_and_a_rule_that_does_not_exist_are_one_line() {
    let folder = Folder::new();
    let done = run(&folder, &["probe", "rds", "127.93.1.2", "-I", "127.93.1.1"]).exits(1);
    done.complains(&["127.93.1.2", "cannot be asked"]);
    run(&folder, &["probe", "rds", "127.93.1.2", "-I", "127.93.1.2"]).exits(2).complains(&["-I"]);
    run(&folder, &["probe", "rds", "127.93.1.2", "-I", "::1"]).exits(2).complains(&["families"]);
}
