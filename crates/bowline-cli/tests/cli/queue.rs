//! Servers that serve one client after another, and the clients that wait for them.

use std::time::{Duration, Instant};

use crate::support::{Folder, Running, run, start};

/// A server that persists, and how many of its clients there are.
fn serve(folder: &Folder, word: &str, address: &str) -> Running {
    let mut server = start(folder, &[word, "-s", "-P", "-I", address]);
    server.expect("listening");
    server
}

#[test]
fn clients_that_were_killed_while_they_waited_hold_up_nobody() {
    let folder = Folder::new();
    for (word, net, short, long) in
        [("perf", 10, ["-n", "100"], ["-D", "600"]), ("rping", 11, ["-C", "3"], ["-C", "0"])]
    {
        let ip = |n: usize| format!("127.44.{net}.{n}");
        let server = serve(&folder, word, &ip(1));
        let client = |n, more: [&str; 2]| {
            start(&folder, &[&[word, "-c", &ip(1), "-I", &ip(n)], &more[..]].concat())
        };
        let first = client(2, long);
        crate::restarts::until_noted(&folder, &ip(2));
        let gone: Vec<Running> = (0..12).map(|n| client(10 + n, short)).collect();
        for client in &gone {
            client.until_it_heeds(15);
        }
        std::thread::sleep(Duration::from_secs(1));
        for client in gone {
            client.signal("-KILL");
            assert_eq!(client.finish().code, None, "it waits still");
        }
        first.signal("-INT");
        first.finish();
        // Waiting 3 s or more for each killed client, one after the other, would exceed its
        // timeout.
        let (at, own) = (ip(1), ip(3));
        let words = [&[word, "-c", &at, "-I", &own, "-W", "20"], &short[..]].concat();
        run(&folder, &words).exits(0);
        server.signal("-INT");
        let done = server.finish().exits(0);
        let told = |n: usize| done.err.lines().any(|line| line.contains(&format!("{}:", ip(n))));
        assert!(told(2) && told(3), "{done:?}");
        let measured =
            done.err.lines().filter(|line| line.contains(" from ") || line.contains("pings of"));
        assert_eq!(measured.count(), 2, "{done:?}");
    }
}

#[test]
fn a_client_that_was_killed_is_missed_soon() {
    let folder = Folder::new();
    let all = [
        ("perf", &["-o", "send", "-n", "1g"][..]),
        ("perf", &["-n", "1g"]),
        ("rping", &["-i", "60"]),
    ];
    for (n, (word, more)) in all.into_iter().enumerate() {
        let ip = |k: usize| format!("127.44.{}.{k}", 12 + n);
        let server = serve(&folder, word, &ip(1));
        let first = start(&folder, &[&[word, "-c", &ip(1), "-I", &ip(2)], more].concat());
        crate::restarts::until_noted(&folder, &ip(2));
        std::thread::sleep(Duration::from_millis(500));
        first.signal("-KILL");
        first.finish();
        let short: &[&str] = if word == "perf" { &["-n", "100"] } else { &["-C", "3"] };
        // The server's own wait for a silent client, which is the default, is longer than this.
        let (at, own) = (ip(1), ip(3));
        let words = [&[word, "-c", &at, "-I", &own, "-W", "25"], short].concat();
        run(&folder, &words).exits(0);
        server.signal("-INT");
        server.finish().exits(0);
    }
}

#[test]
fn many_clients_at_once_are_all_served() {
    let folder = Folder::new();
    let server = serve(&folder, "rping", "127.44.16.1");
    let begin = Instant::now();
    let clients: Vec<Running> = (0..80)
        .map(|n| {
            let own = format!("127.44.16.{}", n + 10);
            start(&folder, &["rping", "-c", "127.44.16.1", "-I", &own, "-C", "2", "-W", "50"])
        })
        .collect();
    for client in clients {
        client.finish().exits(0);
    }
    assert!(begin.elapsed() < Duration::from_secs(60));
    server.signal("-INT");
    server.finish().exits(0);
}

#[test]
fn a_client_waits_as_long_as_it_is_told() {
    let folder = Folder::new();
    let server = serve(&folder, "perf", "127.44.17.1");
    let first = start(&folder, &["perf", "-c", "127.44.17.1", "-I", "127.44.17.2", "-D", "600"]);
    crate::restarts::until_noted(&folder, "127.44.17.2");
    let words = ["perf", "-c", "127.44.17.1", "-I", "127.44.17.3", "-W", "4"];
    let done = run(&folder, &words).exits(1);
    let (waits, fails) = done.err.split_once('\n').expect("two lines");
    assert!(waits.starts_with("waiting for 127.44.17.1:7174, up to 4 s"), "{done:?}");
    let parts = ["busy with other clients for 4 s", "--timeout"];
    assert!(parts.iter().all(|part| fails.contains(part)), "{done:?}");
    first.signal("-INT");
    first.finish();
    server.signal("-INT");
    server.finish().exits(0);
}
