//! The cells of RTRS and RNBD.

use super::{Builder, Entry, Figure, bytes};
use crate::args::Suite;
use crate::cell::{Kind, Subject, Wait};

/// Bytes of the requests that most targets are about.
const PAGE: usize = 4096;
/// Most bytes of one request of a session with default settings, whole pages.
const LARGE: usize = 126_976;

impl Builder<'_> {
    fn io(&self, label: &str, subject: Subject, kind: Kind, size: usize, depth: usize) -> Entry {
        let mut entry = self.entry(subject, kind, size, 1);
        entry.label = label.to_owned();
        entry.cell.depth = depth;
        entry.cell.wait = Wait::Spin;
        entry
    }

    fn waiting(entry: Entry, wait: Wait) -> Entry {
        Entry { cell: crate::cell::Cell { wait, ..entry.cell }, ..entry }
    }

    /// Reads or writes with some outstanding.
    fn rate(&mut self, suite: Suite, kind: Kind, size: usize, depth: usize) {
        let io = |label: &str, subject| self.io(label, subject, kind, size, depth);
        let mut entries = Vec::new();
        if size <= PAGE && suite == Suite::Rtrs {
            entries.push(Entry { anchor: true, ..io("rr-udp", Subject::RrUdp) });
        }
        let nbdkit = Self::waiting(io("nbdkit", Subject::Nbdkit), Wait::Sleep);
        let is_anchor = size > PAGE && suite == Suite::Rtrs;
        entries.push(Entry { anchor: is_anchor, ..nbdkit });
        let rtrs = io("rtrs", Subject::Rtrs);
        entries.push(Entry { anchor: suite == Suite::Rnbd, ..rtrs });
        if suite == Suite::Rnbd {
            entries.push(io("rnbd", Subject::Rnbd));
            entries.push(Self::waiting(io("rnbd-adaptive", Subject::Rnbd), Wait::Adaptive));
        } else {
            entries.push(Self::waiting(io("rtrs-adaptive", Subject::Rtrs), Wait::Adaptive));
            if size == PAGE {
                entries.push(io("rtrs-kept-keys", Subject::RtrsKept));
            }
            if depth == 128 {
                let mut two = io("rtrs-2-paths", Subject::Rtrs);
                two.cell.paths = 2;
                entries.push(two);
            }
        }
        // Anchors come first in a round.
        entries.sort_by_key(|entry| !entry.anchor);
        let word = if kind == Kind::IoWrite { "write" } else { "read" };
        let title = format!("{word} {}, {depth} outstanding", bytes(size));
        self.push(format!("{word}/{size}x{depth}"), title, Figure::Rate, entries);
    }

    /// Reads one after the other.
    fn io_pings(&mut self, suite: Suite, wait: Wait) {
        let io = |label: &str, subject| {
            Self::waiting(self.io(label, subject, Kind::IoPing, PAGE, 1), wait)
        };
        let mut entries = vec![Entry { anchor: true, ..io("rr-udp", Subject::RrUdp) }];
        if wait == Wait::Sleep {
            entries.push(io("nbdkit", Subject::Nbdkit));
        }
        let own =
            if suite == Suite::Rnbd { ("rnbd", Subject::Rnbd) } else { ("rtrs", Subject::Rtrs) };
        entries.push(io(own.0, own.1));
        let how = if wait == Wait::Spin { "polling" } else { "sleeping" };
        let title = format!("read {}, one after the other, both {how}", bytes(PAGE));
        self.push(format!("ping-{}/{PAGE}", wait.name()), title, Figure::Latency, entries);
    }

    /// All cells of a suite.
    pub(super) fn block(&mut self, suite: Suite) {
        for kind in [Kind::IoRead, Kind::IoWrite] {
            self.rate(suite, kind, PAGE, 32);
            if suite == Suite::Rtrs && !self.options.quick {
                self.rate(suite, kind, PAGE, 128);
            }
            if suite == Suite::Rtrs {
                self.rate(suite, kind, LARGE, 16);
            }
        }
        for wait in [Wait::Spin, Wait::Sleep] {
            self.io_pings(suite, wait);
        }
    }
}
