//! What the feature `tracing` tells a program's log.
#![cfg(feature = "tracing")]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bowline::rds::PathState;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

mod common;
use common::{LIMIT, Pair, addr};

/// Keeps all lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// Waits for a line of this level and target with all of these parts.
    fn wait_for(&self, begins: &str, parts: &[&str]) {
        let end = Instant::now() + LIMIT;
        loop {
            let lines = self.0.lock().unwrap().clone();
            let fits = |line: &&String| {
                line.starts_with(begins) && parts.iter().all(|part| line.contains(part))
            };
            if lines.iter().any(|line| fits(&line)) {
                return;
            }
            assert!(Instant::now() < end, "{begins} {parts:?} is not among {lines:#?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("bowline")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} {}", event.metadata().level(), event.metadata().target()));
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn peers_that_come_and_end_and_those_that_cannot_be_reached_are_logged() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let pair = Pair::new(37);
    let (a, b) = pair.sockets(4000);
    a.send_to(b"here", pair.b(4000)).unwrap();
    b.recv(&mut [0; 8]).unwrap();
    log.wait_for("INFO bowline::rds", &["message=peer connected", "local=", "remote="]);
    log.wait_for("DEBUG bowline::rds", &["message=path up", "path=7"]);

    a.send_to(b"nobody", addr(37, 9, 4000)).unwrap();
    log.wait_for("WARN bowline::rds", &["message=cannot connect", "why=refused"]);

    // Paths that are lost have their reason; an orderly end is one line, without a warning.
    pair.right.drop_connections(Some(common::ip(37, 1)));
    log.wait_for("WARN bowline::rds", &["message=path down", "why=", "path=0"]);
    let begun = Instant::now();
    let is_up = || pair.left.info().paths.iter().filter(|p| p.state == PathState::Up).count() == 8;
    while !is_up() {
        assert!(begun.elapsed() < LIMIT, "{:?}", pair.left.info().paths);
        thread::sleep(Duration::from_millis(5));
    }
    let before = log.0.lock().unwrap().len();
    assert!(pair.right.shutdown(LIMIT));
    log.wait_for("INFO bowline::rds", &["message=peer disconnected"]);
    log.wait_for("INFO bowline::rds", &["message=peer ended"]);
    log.wait_for("DEBUG bowline::rds", &["message=path down", "path=7"]);
    let lines = log.0.lock().unwrap()[before..].to_vec();
    let lines = lines.iter().filter(|line| !line.contains("remote=127.100.37.9"));
    // The other side may try to connect once more.
    let lines = lines.filter(|line| !line.contains("message=cannot connect"));
    let warnings: Vec<_> = lines.filter(|line| line.starts_with("WARN")).collect();
    assert!(warnings.is_empty(), "{warnings:#?}");
}
