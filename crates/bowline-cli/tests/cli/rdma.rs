//! RDMA over loopback: rping, perf, devices.

use std::{thread, time::Duration};

use crate::restarts::until_noted;
use crate::support::{Folder, Running, run, start};

/// After this a client that is connected has long been measuring.
const UNDER_WAY: Duration = Duration::from_millis(2500);

/// Starts a server and waits until it listens.
fn serve(folder: &Folder, words: &[&str], address: &str) -> Running {
    serve_nobody(folder, &[words, &["--server"]].concat(), address)
}

/// Starts something that listens, and waits until it does.
fn serve_nobody(folder: &Folder, words: &[&str], address: &str) -> Running {
    let mut server = start(folder, &[words, &["--address", address]].concat());
    server.expect("listening");
    server
}

fn object(text: &str) -> serde_json::Value {
    serde_json::from_str(text.lines().last().unwrap_or_default()).expect("JSON")
}

#[test]
fn pings_come_back_byte_for_byte() {
    let folder = Folder::new();
    for (server, client) in [("127.41.20.1", "127.41.20.2"), ("127.41.20.3", "127.41.20.4")] {
        let waiting = serve(&folder, &["rping", "--verify", "--json"], server);
        let size = if server.ends_with('1') { "64" } else { "65535" };
        let words = ["rping", "-c", server, "-I", client, "-C", "5", "-V", "-v", "--size", size];
        let done = run(&folder, &words).exits(0);
        let pings =
            done.out.lines().filter(|line| line.starts_with("ping data: rdma-ping-")).count();
        assert_eq!(pings, 5, "{done:?}");
        assert!(done.out.contains("5 pings, every byte checked"), "{done:?}");
        let served = object(&waiting.finish().exits(0).out);
        assert_eq!((&served["pings"], &served["verified"]), (&5.into(), &true.into()));
    }
}

#[test]
fn a_server_that_persists_serves_several_and_stops_when_told() {
    let folder = Folder::new();
    let server = serve(&folder, &["rping", "--persistent"], "127.41.21.1");
    for client in ["127.41.21.2", "127.41.21.2", "127.41.21.3"] {
        let words = ["rping", "-c", "127.41.21.1", "-I", client, "-C", "3", "-V", "--json"];
        assert_eq!(object(&run(&folder, &words).exits(0).out)["pings"], 3);
    }
    // Pings longer than the server accepts fail at the client, and the server continues.
    server.signal("-INT");
    server.finish().exits(0);
}

#[test]
fn a_client_that_nobody_serves_says_so() {
    let folder = Folder::new();
    let _other = serve(&folder, &["rping", "--port", "7000"], "127.41.22.1");
    let words = ["rping", "-c", "127.41.22.1", "-I", "127.41.22.2", "-C", "1"];
    let done = run(&folder, &words).exits(1);
    assert!(done.err.contains("127.41.22.1:7174 refused: nobody listens there"), "{done:?}");
    let words = ["rping", "-s", "-I", "127.41.22.1"];
    run(&folder, &words).exits(1).complains(&["UDP port 4791 of 127.41.22.1 is in use"]);
}

#[test]
fn all_that_is_measured_is_right() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf", "--verify", "--persistent"], "127.41.23.1");
    for (op, mode, size, field) in [
        ("send", "bw", "10001", "gigabytes_per_second"),
        ("send", "lat", "64", "round_trip_usec"),
        ("write", "bw", "70000", "gigabytes_per_second"),
        ("write", "lat", "5000", "round_trip_usec"),
        ("read", "bw", "70000", "gigabytes_per_second"),
        ("read", "lat", "0", "round_trip_usec"),
        ("atomic", "bw", "8", "gigabytes_per_second"),
        ("atomic", "lat", "8", "round_trip_usec"),
    ] {
        let words = [
            "perf",
            "-c",
            "127.41.23.1",
            "-I",
            "127.41.23.2",
            "--op",
            op,
            "--mode",
            mode,
            "--size",
            size,
            "--count",
            "200",
            "--verify",
            "--json",
            // Within a host it is not the default.
            "--congestion",
            "delay",
        ];
        let done = run(&folder, &words).exits(0);
        let result = object(&done.out);
        assert_eq!((&result["op"], &result["iterations"]), (&op.into(), &200.into()), "{done:?}");
        assert!(!result[field].is_null(), "{done:?}");
        let path = &result["peers"][0];
        assert_eq!(path["peer"], "127.41.23.1", "{result}");
        for name in ["round_trip_usec", "least_round_trip_usec", "window", "rate"] {
            assert!(path[name].as_f64() > Some(0.0), "{name}: {result}");
        }
        for name in ["lost_gaps", "lost_timeouts", "congestion_losses", "resent", "in_flight"] {
            assert!(path[name].is_u64(), "{name}: {result}");
        }
        for name in ["tx_packets", "receive_overflows", "rx_cnp", "tx_cnp", "rx_marked"] {
            assert!(result["counters"][name].is_u64(), "{name}: {result}");
        }
    }
    server.signal("-INT");
    let done = server.finish().exits(0);
    assert!(!done.err.contains("differs"), "{done:?}");
}

#[test]
fn each_controller_carries_what_it_is_chosen_for() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf", "--verify", "-P"], "127.41.38.1");
    // Within a host the default is a window of each queue pair, and the path has none.
    for (how, windows) in
        [("auto", false), ("fixed:16", false), ("delay", true), ("cubic", true), ("swift", true)]
    {
        let words = [
            "perf",
            "-c",
            "127.41.38.1",
            "-I",
            "127.41.38.2",
            "--size",
            "16k",
            "--count",
            "100",
            "--json",
            "--congestion",
            how,
        ];
        let result = object(&run(&folder, &words).exits(0).out);
        assert_eq!(result["iterations"], 100, "{how}: {result}");
        assert_eq!(result["peers"][0]["window"].is_u64(), windows, "{how}: {result}");
    }
    server.signal("-INT");
    let done = server.finish().exits(0);
    assert!(!done.err.contains("differs"), "{done:?}");
}

#[test]
fn all_can_be_measured_for_a_time() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf", "--verify", "-P", "-D", "200ms"], "127.41.29.1");
    for op in ["send", "write", "read", "atomic"] {
        for mode in ["bw", "lat"] {
            let words =
                ["perf", "-c", "127.41.29.1", "-I", "127.41.29.2", "--op", op, "--mode", mode];
            let words = [&words[..], &["--duration", "0.2", "-V", "--json"]].concat();
            let result = object(&run(&folder, &words).exits(0).out);
            assert!(result["iterations"].as_u64() > Some(0), "{result}");
            assert_eq!(result["mtu"], 4096, "{result}");
            if mode == "bw" {
                let seconds = result["seconds"].as_f64().expect("a number");
                assert!((0.2..10.0).contains(&seconds), "{result}");
            }
        }
    }
    server.signal("-INT");
    let done = server.finish().exits(0);
    let lines: Vec<&str> = done.err.lines().collect();
    assert_eq!(lines.len(), 8, "one for each client: {done:?}");
    assert!(lines.iter().all(|line| line.contains("for 0.2 s from 127.41.29.2")), "{done:?}");
}

#[test]
fn a_client_that_wants_something_else_than_the_server_is_told_both() {
    let folder = Folder::new();
    let words = ["perf", "-P", "--op", "read", "--size", "1m", "--count", "50", "--depth", "4"];
    let server = serve(&folder, &words, "127.41.30.1");
    let client = ["perf", "-c", "127.41.30.1", "-I", "127.41.30.2", "--mtu", "1024"];
    let words = [&client[..], &["--size", "64", "-n", "20"]].concat();
    run(&folder, &words).exits(1).complains(&["127.41.30.1:7174 refused: use the same options: \
        the server has --op read --size 1048576 --count 50 --depth 4, the client --op write --size 64 \
        --count 20 --depth 64"]);
    let same = ["--op", "read", "--size", "1m", "--depth", "4"];
    let words = [&client[..], &same, &["--duration", "5"]].concat();
    run(&folder, &words).exits(1).complains(&["has --count 50, the client --duration 5"]);
    let words = [&client[..], &same, &["-n", "50", "--json"]].concat();
    let result = object(&run(&folder, &words).exits(0).out);
    assert_eq!((&result["iterations"], &result["mtu"]), (&50.into(), &1024.into()), "{result}");
    // Warm-up messages are not counted.
    let words = [&client[..], &same, &["-n", "50", "--mode", "lat", "--json"]].concat();
    assert_eq!(object(&run(&folder, &words).exits(0).out)["iterations"], 50);
    server.signal("-INT");
    server.finish().exits(0);
}

#[test]
fn several_queue_pairs_and_both_directions_are_measured() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf", "--persistent"], "127.41.34.1");
    for op in ["send", "write", "read", "atomic"] {
        for more in [&["--qps", "3"][..], &["--both"], &["--both", "-q", "2", "-D", "200ms"]] {
            let words = ["perf", "-c", "127.41.34.1", "-I", "127.41.34.2", "--op", op, "--json"];
            let size = if op == "atomic" { "8" } else { "5000" };
            let count = if more.contains(&"-D") { &[][..] } else { &["-n", "300"] };
            let words = [&words[..], more, count, &["--size", size, "--depth", "8"]].concat();
            let result = object(&run(&folder, &words).exits(0).out);
            let (is_both, is_timed) = (more[0] == "--both", more.contains(&"-D"));
            let pairs = if !is_both {
                3
            } else if is_timed {
                2
            } else {
                1
            };
            assert_eq!(result["queue_pairs"], pairs, "{result}");
            assert!(result["gigabytes_per_second"].as_f64() > Some(0.0), "{result}");
            if !is_timed {
                let all = 300 * pairs * if is_both { 2 } else { 1 };
                assert_eq!(result["iterations"], all, "{result}");
            }
            for way in ["outgoing", "incoming"] {
                let moved = &result[way]["iterations"];
                assert_eq!(moved.as_u64() > Some(0), is_both, "{result}");
            }
        }
    }
    server.signal("-INT");
    let done = server.finish().exits(0);
    assert_eq!(done.err.matches(" on 3 queue pairs from 127.41.34.2").count(), 4, "{done:?}");
    assert_eq!(done.err.matches(" in both directions from 127.41.34.2").count(), 8, "{done:?}");
}

#[test]
fn all_sizes_are_measured_by_one_server() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf"], "127.41.35.1");
    let words = ["perf", "-c", "127.41.35.1", "-I", "127.41.35.2", "-a", "-n", "8", "--json"];
    let done = run(&folder, &[&words[..], &["--op", "send", "--depth", "4"]].concat()).exits(0);
    let sizes = done.out.lines().map(|line| object(line)["size"].as_u64().expect("a size"));
    assert_eq!(sizes.collect::<Vec<_>>(), (1..=23).map(|power| 1 << power).collect::<Vec<_>>());
    // The last size ends the server, which serves one client.
    let done = server.finish().exits(0);
    assert_eq!(done.err.lines().count(), 23, "{done:?}");
    let words = ["perf", "-c", "127.41.35.1", "-I", "127.41.35.2", "-a", "--op", "atomic"];
    run(&folder, &words).exits(2).complains(&["atomics have 8 bytes"]);
}

#[test]
fn what_makes_no_sense_is_not_measured() {
    let folder = Folder::new();
    for (words, complaint) in [
        (&["--count", "0"][..], "a count of 0"),
        (&["--duration", "0"], "at least 1 ms"),
        (&["--count", "5", "--duration", "1"], "cannot be used with"),
        (&["--size", "65m"], "above"),
        (&["--op", "atomic", "--size", "16"], "atomics have 8 bytes"),
        (&["--depth", "0"], "between 1 and 4096"),
        (&["--mtu", "1500"], "not 256, 512, 1024, 2048 or 4096"),
        (&["--persistent"], "cannot be used with"),
        (&["--all", "--size", "64"], "cannot be used with"),
        (&["--both", "--mode", "lat"], "one direction"),
        (&["--qps", "2", "--mode", "lat"], "one queue pair"),
        (&["--qps", "65"], "1..=64"),
    ] {
        let words = [&["perf", "-c", "127.41.31.1", "-I", "127.41.31.2"], words].concat();
        run(&folder, &words).exits(2).complains(&[complaint]);
    }
    // The sizes are the client's.
    run(&folder, &["perf", "--server", "--all"]).exits(2).complains(&["cannot be used with"]);
}

#[test]
fn requests_are_shown_and_refused() {
    let folder = Folder::new();
    let mut looker = serve_nobody(&folder, &["cm-listen", "--count", "2"], "127.41.32.1");
    for (word, data) in [("rping", "no data"), ("perf", "data 62777066")] {
        let done = run(&folder, &[word, "-c", "127.41.32.1", "-I", "127.41.32.2"]).exits(1);
        assert!(done.err.contains("refused: bowline cm-listen only listens"), "{done:?}");
        looker.expect(data);
    }
    assert!(looker.said().contains("127.41.32.2:"), "{}", looker.said());
    looker.finish().exits(0);
    let mut looker = serve_nobody(&folder, &["cm-listen", "--json"], "127.41.32.1");
    run(&folder, &["perf", "-c", "127.41.32.1", "-I", "127.41.32.2"]).exits(1);
    looker.expect("initiator_depth");
    looker.signal("-INT");
    let seen = object(&looker.finish().exits(0).out);
    let data = seen["private_data"].as_str().expect("text");
    assert!(data.starts_with("62777066"), "{seen}");
    assert_eq!(seen["to"], "127.41.32.1:7174");
}

#[test]
fn a_server_fails_when_its_client_leaves_half_way() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf"], "127.41.25.1");
    let words = ["perf", "-c", "127.41.25.1", "-I", "127.41.25.2", "-o", "send", "-n", "1g"];
    let client = start(&folder, &words);
    until_noted(&folder, "127.41.25.2");
    thread::sleep(UNDER_WAY);
    client.signal("-INT");
    client.finish().exits(1);
    let done = server.finish().exits(1);
    assert!(done.err.contains("the client left after "), "{done:?}");
    assert!(done.err.contains(" of 1073741824"), "{done:?}");
}

#[test]
fn a_server_misses_a_client_that_was_killed() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf", "--timeout", "1"], "127.41.26.1");
    let words = ["perf", "-c", "127.41.26.1", "-I", "127.41.26.2", "-o", "read", "-n", "1g"];
    let client = start(&folder, &words);
    until_noted(&folder, "127.41.26.2");
    // Longer than the server waits: as long as the client answers, it is served.
    thread::sleep(UNDER_WAY);
    client.signal("-KILL");
    assert_eq!(client.finish().code, None, "ended by the signal, so it was still being served");
    let done = server.finish().exits(1);
    assert!(done.err.contains("127.41.26.2"), "{done:?}");
}

#[test]
fn a_client_of_another_program_is_told_why_it_is_refused() {
    let folder = Folder::new();
    let server = serve(&folder, &["perf"], "127.41.27.1");
    let words = ["rping", "-c", "127.41.27.1", "-I", "127.41.27.2", "-C", "1"];
    let done = run(&folder, &words).exits(1);
    assert!(done.err.contains("refused: not a client of bowline perf"), "{done:?}");
    let done = server.finish().exits(1);
    assert!(done.err.contains("refused: not a client of bowline perf"), "{done:?}");
}

#[test]
fn no_time_to_wait_is_a_usage_error() {
    let folder = Folder::new();
    for word in ["perf", "rping"] {
        let done = run(&folder, &[word, "-s", "-I", "127.41.28.1", "-W", "0"]).exits(2);
        done.complains(&["must be greater than 0"]);
    }
}

#[test]
fn a_capture_has_the_packets() {
    let folder = Folder::new();
    let file = folder.path().join("ping.pcapng");
    let file = file.to_str().expect("a plain path");
    let server = serve(&folder, &["rping"], "127.41.24.1");
    let words = ["rping", "-c", "127.41.24.1", "-I", "127.41.24.2", "-C", "2", "--capture", file];
    run(&folder, &words).exits(0);
    server.finish().exits(0);
    let bytes = std::fs::read(file).expect("a capture");
    assert_eq!(bytes.get(..4), Some(&[0x0a, 0x0d, 0x0d, 0x0a][..]));
    let text = b"rdma-ping-1: ";
    let is_ping = |frame: &&[u8]| frame.windows(text.len()).any(|window| window == text);
    // The first byte behind the headers of IPv4 and UDP. Some packets may have been sent again.
    let mut opcodes: Vec<u8> = frames(&bytes).filter(is_ping).map(|frame| frame[28]).collect();
    opcodes.sort_unstable();
    opcodes.dedup();
    assert_eq!(opcodes, [0x0a, 0x10], "written and read");
}

/// The frames of a capture.
fn frames(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let number =
        |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")) as usize;
    let mut next = 0;
    let blocks = std::iter::from_fn(move || {
        let at = (next < bytes.len()).then_some(next)?;
        let len = number(at + 4);
        assert!(len >= 12, "a block of {len} bytes");
        next += len;
        Some(at)
    });
    // Enhanced packet blocks: 28 bytes, among them the length, and then the packet.
    blocks.filter(move |at| number(*at) == 6).map(move |at| &bytes[at + 28..][..number(at + 20)])
}

#[test]
fn devices_are_the_addresses_of_this_machine() {
    let folder = Folder::new();
    // The exit status is that of programs of `bowline run`, which are not looked at here.
    let text = run(&folder, &["devices"]).out;
    assert!(text.contains("provider soft"), "{text}");
    let devices = object(&run(&folder, &["devices", "--json"]).out);
    let devices = devices["providers"][0]["devices"].as_array().expect("a list").clone();
    assert!(devices.iter().any(|device| device["address"] == "127.0.0.1"), "{devices:?}");
    // Those in use by others have no buffer to tell of.
    for device in devices.iter().filter(|device| device["usable"] == true) {
        let [got, wanted] = ["receive_buffer", "receive_buffer_wanted"].map(|name| &device[name]);
        let (got, wanted) = (got.as_u64().expect("a number"), wanted.as_u64().expect("a number"));
        assert!(got > 0 && got <= wanted, "{device}");
        assert!(got == wanted || text.contains("sysctl -w net.core.rmem_max="), "{text}");
    }
}

#[test]
fn a_device_that_is_not_there_is_told_in_one_line() {
    let folder = Folder::new();
    let words = ["rping", "-s", "--device", "bowline-none"];
    let done = run(&folder, &words).exits(1);
    // Which depends on this machine: no libraries, no devices at all, or none of this name.
    let known = ["install the packages libibverbs1", "no RDMA device"];
    assert!(known.iter().any(|text| done.err.contains(text)), "{done:?}");
    assert_eq!(done.err.lines().count(), 1, "{done:?}");
    for words in [["--mtu", "1024"], ["--capture", "x.pcapng"]] {
        let words = [&["rping", "-s", "--device", "bowline-none"][..], &words[..]].concat();
        run(&folder, &words).exits(2).complains(&["need the soft device"]);
    }
}
