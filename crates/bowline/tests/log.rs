//! What the feature `tracing` tells a program's log.
#![cfg(feature = "tracing")]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

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
fn paths_and_peers_that_cannot_be_reached_are_told() {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let pair = Pair::new(37);
    let (a, b) = pair.sockets(4000);
    a.send_to(b"here", pair.b(4000)).unwrap();
    b.recv(&mut [0; 8]).unwrap();
    log.wait_for("INFO bowline::rds", &["message=path up", "local=", "remote="]);

    a.send_to(b"nobody", addr(37, 9, 4000)).unwrap();
    log.wait_for("WARN bowline::rds", &["message=cannot connect", "why=refused"]);
}
