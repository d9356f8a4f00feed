//! `bowline rnbd top`: what it prints, elsewhere than on a terminal.

use serde_json::Value;

use crate::{
    nbd::{Nbd, WRITE},
    support::{Folder, run, start},
};

#[test]
fn disks_and_paths_are_shown_with_rates_and_latencies() {
    let folder = Folder::new();
    run(&folder, &["rnbd", "top", "-n", "1"]).exits(256 - 2).complains(&["nothing runs here"]);
    let words = ["rnbd", "export", "--memory", "disk0=1MiB"];
    let words = [&words[..], &["-I", "127.60.4.1", "-I", "127.60.4.2"]].concat();
    let mut server = start(&folder, &words);
    server.expect("listening on 127.60.4.1:1234");
    let socket = folder.path().join("nbd");
    let place = socket.to_str().expect("a plain path");
    let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.60.4.11@127.60.4.1"];
    let words = [&words[..], &["--path", "127.60.4.12@127.60.4.2", "--nbd", place]].concat();
    let mut client = start(&folder, &words);
    client.expect("mapped disk0");

    let done = run(&folder, &["rnbd", "top", "-n", "2", "-d", "0.1"]).exits(0);
    assert_eq!(done.out.matches("1 mapped: reads ").count(), 2, "{done:?}");
    assert!(!done.out.contains('\x1b') && done.out.contains("FAILOVER"), "{done:?}");

    let mut top = start(&folder, &["rnbd", "top", "--json", "-n", "1000", "-d", "0.1"]);
    let view = |top: &mut crate::support::Running| -> Value {
        top.expect("\"seconds\"");
        let last = top.said().lines().last().expect("a view");
        serde_json::from_str(last).expect("JSON")
    };
    let first = view(&mut top);
    assert!(first["seconds"].is_null() && first["disks"][0]["writes"].is_null(), "{first}");
    let mut nbd = Nbd::connect(&socket);
    (0..64).for_each(|n| assert_eq!(nbd.ask(WRITE, n * 4096, 4096), 0));
    let of = |view: &Value, side: &str| {
        let disks = view["disks"].as_array().expect("disks").clone();
        disks.into_iter().find(|disk| disk["side"] == side).expect("one of that side")
    };
    // The writes are in one view or in several.
    let mut seen = 0.0;
    while seen < 63.5 {
        let view = view(&mut top);
        let disk = of(&view, "import");
        let rate = disk["writes"].as_f64().expect("a rate");
        seen += rate * view["seconds"].as_f64().expect("a time");
        if rate > 0.0 {
            let percentile = |name: &str| disk[name].as_u64().expect("a time");
            assert!(percentile("write_p50_ns") <= percentile("write_p99_ns"), "{disk}");
            assert!(disk["read_p50_ns"].is_null() && disk["storage"] == "ok", "{disk}");
        }
        assert_eq!(of(&view, "export")["state"], "1 open");
        let paths = view["paths"].as_array().expect("paths");
        let client_paths = paths.iter().filter(|path| path["side"] == "client");
        let client_paths: Vec<_> = client_paths.collect();
        assert_eq!(client_paths.len(), 2, "{view}");
        assert!(client_paths.iter().all(|path| path["state"] == "connected"), "{view}");
        assert!(client_paths.iter().all(|path| path["failovers"] == 0), "{view}");
    }
    drop((top, nbd));
    for part in [client, server] {
        part.signal("-TERM");
        part.finish().exits(0);
    }
}
