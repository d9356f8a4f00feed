//! Metrics of running commands, and the dashboard that shows them.

use std::{io::Write, net::TcpStream};

use crate::{
    exposition::{Families, get, metrics, only},
    support::{Folder, Running, run, start},
};

/// Returns where a command that has just said it serves metrics.
fn place_of(running: &mut Running) -> String {
    running.expect("metrics at http://");
    let line = running.said().lines().last().expect("the line");
    let place = line.strip_prefix("metrics at http://").and_then(|at| at.strip_suffix("/metrics"));
    place.expect("an address").to_owned()
}

/// Starts a node with metrics.
fn node(folder: &Folder, address: &str) -> (Running, String) {
    let words = ["node", "--address", address, "--no-programs", "--metrics", "127.0.0.1:0"];
    let mut node = start(folder, &words);
    let place = place_of(&mut node);
    node.expect("ready");
    (node, place)
}

#[test]
fn a_node_tells_its_counters_and_connections() {
    let folder = Folder::new();
    let (_one, place) = node(&folder, "127.48.1.1");
    let (_two, _) = node(&folder, "127.48.1.2");
    run(&folder, &["ping", "-c", "3", "-i", "0.01", "-I", "127.48.1.1", "127.48.1.2"]).exits(0);
    let all = metrics(&place);
    assert!(only(&all, "bowline_rds_send_queued_total") >= 3.0);
    assert_eq!(only(&all, "bowline_rds_connections"), 1.0);
    let (_, labels, paths) = &all["bowline_rds_connection_paths_up"].samples[0];
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let wanted = [("local", "127.48.1.1"), ("remote", "127.48.1.2"), ("transport", "tcp")];
    assert_eq!(*labels, wanted.map(|(name, value)| label(name, value)));
    assert!(*paths >= 1.0);
    assert!(only(&all, "bowline_rds_driver_written_bytes_total") > 0.0);
    // Every counter of `bowline info` is there.
    let socket = folder.path().join("bowline/127.48.1.1.sock");
    let socket = socket.to_str().expect("text");
    let info = run(&folder, &["info", "--json", "--control", socket]).exits(0);
    let info: serde_json::Value = serde_json::from_str(&info.out).expect("JSON");
    let counters = info["counters"].as_array().expect("counters").len();
    let shown = all.keys().filter(|name| {
        let name = name.strip_prefix("bowline_rds_").unwrap_or_default();
        name.ends_with("_total") && !name.starts_with("driver_") && !name.starts_with("connection_")
    });
    assert_eq!(shown.count(), counters);
}

#[test]
fn metrics_beyond_loopback_are_warned_of_and_names_are_checked() {
    let folder = Folder::new();
    let node = ["node", "--address", "127.48.8.1", "--no-programs"];
    let open = ["--metrics", "0.0.0.0:0", "--metrics-host", "node1.example"];
    let mut node = start(&folder, &[&node[..], &open].concat());
    let place = place_of(&mut node);
    node.until_told("no authentication");
    let port = place.rsplit(':').next().expect("a port");
    let place = format!("127.0.0.1:{port}");
    let ask = |host: &str| {
        let mut stream = TcpStream::connect(&place).expect("a connection");
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("a request");
        std::io::read_to_string(stream).expect("an answer")
    };
    for own in ["node1.example", "localhost", &place] {
        assert!(ask(own).starts_with("HTTP/1.1 200 OK\r\n"), "{own}");
    }
    assert!(ask("evil.example").starts_with("HTTP/1.1 421 Misdirected Request\r\n"));
    let done = run(&folder, &["node", "--metrics-host", "node1:9465"]);
    done.exits(2).complains(&["--metrics-host", "node1:9465"]);
    let config = folder.write("node.toml", "metrics-host = [\"http://node1\"]\n");
    let done = run(&folder, &["node", "--config", &config.to_string_lossy()]);
    done.exits(2).complains(&["http://node1"]);
}

#[test]
fn nothing_is_served_unless_it_is_asked_for() {
    let folder = Folder::new();
    let mut node = start(&folder, &["node", "--address", "127.48.2.1", "--no-programs"]);
    node.expect("ready");
    assert!(!node.said().contains("metrics"));
    let done = run(&folder, &["node", "--address", "127.48.2.2", "--metrics", "9465"]);
    done.exits(2).complains(&["--metrics", "9465"]);
}

#[test]
fn a_place_that_is_taken_is_named() {
    let folder = Folder::new();
    let (_node, place) = node(&folder, "127.48.3.1");
    let words = ["node", "--address", "127.48.3.2", "--no-programs", "--metrics", &place];
    run(&folder, &words).exits(1).complains(&["cannot serve metrics at", &place, "--metrics"]);
}

#[test]
fn a_client_that_stops_in_the_middle_stops_nothing() {
    let folder = Folder::new();
    let (node, place) = node(&folder, "127.48.4.1");
    let mut slow = TcpStream::connect(&place).expect("a connection");
    slow.write_all(b"GET /metrics HTT").expect("half a request");
    assert!(get(&place, "/").1.contains("/metrics"));
    assert!(get(&place, "/x").0.starts_with("HTTP/1.1 404 "));
    metrics(&place);
    node.signal("-TERM");
    node.finish().exits(0);
}

/// Families of a server and a client of one disk that was written.
fn disk(folder: &Folder, net: u8) -> (Families, Families) {
    let (own, other) = (format!("127.48.{net}.1"), format!("127.48.{net}.2"));
    let path = format!("{other}@{own}");
    let mut server = start(
        folder,
        &["rnbd", "export", "--memory", "d0=4MiB", "-I", &own, "--metrics", "127.0.0.1:0"],
    );
    let served = place_of(&mut server);
    server.expect("export d0");
    let mut client = start(
        folder,
        &[
            "rnbd",
            "map",
            "d0",
            "--from",
            "s\"1",
            "--path",
            &path,
            "--stay",
            "--metrics",
            "127.0.0.1:0",
        ],
    );
    let used = place_of(&mut client);
    client.expect("mapped d0");
    (metrics(&served), metrics(&used))
}

#[test]
fn disks_sessions_and_devices_are_told_of_on_both_sides() {
    let folder = Folder::new();
    let (server, client) = disk(&folder, 5);
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(only(&server, "bowline_rnbd_export_size_bytes"), 4194304.0);
    assert_eq!(only(&server, "bowline_rnbd_export_open_sessions"), 1.0);
    assert_eq!(only(&server, "bowline_rtrs_server_paths_connected_total"), 1.0);
    assert_eq!(only(&client, "bowline_rnbd_disk_open"), 1.0);
    assert_eq!(only(&client, "bowline_rtrs_client_path_connected"), 1.0);
    let (_, labels, _) = &client["bowline_rtrs_client_path_connected"].samples[0];
    assert_eq!(labels[0], label("session", "s\"1"));
    // Names of Prometheus' node_exporter for devices of the system.
    for side in [&server, &client] {
        let (_, labels, bytes) = &side["node_infiniband_port_data_received_bytes_total"].samples[0];
        assert_eq!((labels[0].0.as_str(), &labels[1]), ("device", &label("port", "1")));
        assert!(*bytes > 0.0);
    }
}

#[test]
fn the_dashboard_names_only_metrics_that_exist() {
    let folder = Folder::new();
    let (_node, place) = node(&folder, "127.48.6.1");
    let (server, client) = disk(&folder, 7);
    let mut known = metrics(&place);
    known.extend(server);
    known.extend(client);
    let text = include_str!("../../../../docs/grafana.json");
    let dashboard: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let mut named = 0;
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().expect("a query");
            let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
            let all = words.filter(|word| {
                ["bowline_", "node_", "process_"].iter().any(|prefix| word.starts_with(prefix))
            });
            for name in all {
                let family = name.strip_suffix("_bucket").unwrap_or(name);
                assert!(known.contains_key(family), "{name} of {query}");
                named += 1;
            }
        }
    }
    assert!(named > 20, "the dashboard shows something");
}
