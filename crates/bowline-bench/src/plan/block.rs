//! The cells of RTRS and RNBD.

use bowline_rtrs_driver::Policy;

use super::{Builder, Entry, Figure, bytes};
use crate::args::Suite;
use crate::cell::{Cell, Kind, Subject, Wait};

/// Bytes of the requests that most targets are about.
const PAGE: usize = 4096;
/// Bytes of a request and its header that fill no more than a packet.
const HALF_PAGE: usize = 2048;
/// Bytes of the larger requests, and how many are outstanding.
const LARGE: [(usize, usize); 2] = [(128 << 10, 16), (1 << 20, 4)];
/// Sizes, and how many are outstanding, that no target is about.
const OTHERS: [(usize, usize); 3] = [(512, 32), (16 << 10, 32), (64 << 10, 16)];
/// Requests outstanding, in most targets and in some.
const DEPTH: usize = 32;
const DEEP: usize = 128;

/// Time after which silent paths are given up, in milliseconds: the commands' own, and a short one.
const PATH_DEAD_MS: [(&str, u64); 2] = [("cut", 3000), ("cut, 0.5 s", 500)];
/// Window around the loss of a path, in milliseconds: the path is back within it.
const RESET_WINDOW_MS: u64 = 1500;

impl Entry {
    /// The same while threads wait in another way.
    fn waiting(self, wait: Wait) -> Self {
        Self { cell: Cell { wait, ..self.cell }, ..self }
    }

    /// The same as an anchor.
    fn anchored(self) -> Self {
        Self { anchor: true, ..self }
    }
}

impl Builder<'_> {
    fn io(&self, label: &str, subject: Subject, kind: Kind, size: usize, depth: usize) -> Entry {
        let mut entry = self.entry(subject, kind, size, 1);
        entry.label = label.to_owned();
        entry.cell.depth = depth;
        let theirs = subject.is_peer_of_storage();
        entry.cell.wait = if theirs { Wait::Sleep } else { Wait::Spin };
        if subject == Subject::Tgt {
            entry.cell.cc.clear(); // whatever it likes
        }
        entry
    }

    /// A peer with the congestion control that it gets when nobody chooses, bound to its CPU.
    fn with_systems_cc(&self, mut entry: Entry) -> Entry {
        entry.cell.cc.clone_from(&self.setting.system_cc);
        Entry { as_is: true, ..entry }
    }

    /// What is measured of RTRS for a size and depth.
    fn rtrs(&self, kind: Kind, size: usize, depth: usize) -> Vec<Entry> {
        let io = |label: &str, subject| self.io(label, subject, kind, size, depth);
        let mut entries = Vec::new();
        if kind == Kind::IoWrite || size <= PAGE {
            entries.push(io("rr-udp", Subject::RrUdp).anchored());
        }
        if size == PAGE {
            entries.push(io("rr-tcp", Subject::RrTcp));
        }
        if kind == Kind::IoWrite && size > PAGE {
            entries.push(io("rr-udp-crc", Subject::RrUdpCrc));
        }
        let nbdkit = io("nbdkit", Subject::Nbdkit);
        entries.push(Entry { anchor: entries.is_empty(), ..nbdkit });
        if LARGE.contains(&(size, depth)) {
            entries.push(self.with_systems_cc(io("nbdkit-as-is", Subject::Nbdkit)));
        }
        entries.push(io("rtrs", Subject::Rtrs));
        entries.push(io("rtrs-adaptive", Subject::Rtrs).waiting(Wait::Adaptive));
        if (size, depth) == (PAGE, DEPTH) {
            entries.push(io("rtrs-kept-keys", Subject::RtrsKept));
            let kept = io("rtrs-kept-keys-adaptive", Subject::RtrsKept);
            entries.push(kept.waiting(Wait::Adaptive));
        }
        if depth == DEEP {
            for (policy, name) in
                Policy::ALL.into_iter().zip(["round-robin", "min-inflight", "min-latency"])
            {
                let mut two = io(&format!("2-paths-{name}"), Subject::Rtrs);
                two.cell.paths = 2;
                two.cell.policy = policy as u8;
                entries.push(two);
            }
        }
        entries
    }

    /// What is measured of RNBD for a size and depth.
    fn rnbd(&self, kind: Kind, size: usize, depth: usize) -> Vec<Entry> {
        let io = |label: &str, subject| self.io(label, subject, kind, size, depth);
        let mut entries = vec![
            io("rtrs", Subject::Rtrs).anchored(),
            io("rtrs-adaptive", Subject::Rtrs).waiting(Wait::Adaptive),
            io("rnbd", Subject::Rnbd),
            io("rnbd-adaptive", Subject::Rnbd).waiting(Wait::Adaptive),
            io("nbdkit", Subject::Nbdkit),
            io("qemu-nbd", Subject::QemuNbd),
        ];
        if kind == Kind::IoRead && size == PAGE {
            entries.push(io("tgt", Subject::Tgt));
        }
        entries
    }

    /// Reads or writes with some outstanding.
    fn rate(&mut self, suite: Suite, kind: Kind, size: usize, depth: usize) {
        let mut entries = match suite {
            Suite::Rnbd => self.rnbd(kind, size, depth),
            _ => self.rtrs(kind, size, depth),
        };
        if OTHERS.contains(&(size, depth)) {
            entries.iter_mut().for_each(|entry| (entry.once, entry.anchor) = (true, false));
        }
        self.push_io(kind, size, depth, entries);
    }

    fn push_io(&mut self, kind: Kind, size: usize, depth: usize, entries: Vec<Entry>) {
        let word = if kind == Kind::IoWrite { "write" } else { "read" };
        let title = format!("{word} {}, {depth} outstanding", bytes(size));
        self.push(format!("{word}/{size}x{depth}"), title, Figure::Rate, entries);
    }

    /// Writes that fill no more than a packet, for what they cost in packets.
    fn small_writes(&mut self) {
        let mut entry = self.io("rtrs", Subject::Rtrs, Kind::IoWrite, HALF_PAGE, DEPTH);
        entry.once = true;
        self.push_io(Kind::IoWrite, HALF_PAGE, DEPTH, vec![entry]);
    }

    /// Reads one after the other.
    fn io_pings(&mut self, suite: Suite, wait: Wait) {
        let io =
            |label: &str, subject| self.io(label, subject, Kind::IoPing, PAGE, 1).waiting(wait);
        let mut entries = vec![io("rr-udp", Subject::RrUdp).anchored()];
        let own = if suite == Suite::Rtrs {
            entries.push(io("rr-tcp", Subject::RrTcp));
            io("rtrs", Subject::Rtrs)
        } else {
            io("rnbd", Subject::Rnbd)
        };
        entries.push(own.clone());
        if wait == Wait::Sleep {
            entries.push(io("nbdkit", Subject::Nbdkit));
            if suite == Suite::Rnbd {
                entries.push(io("qemu-nbd", Subject::QemuNbd));
            }
            // Threads that sleep in turns may meet on one CPU, where a wake costs little.
            for bound in [io("rr-udp", Subject::RrUdp), own, io("nbdkit", Subject::Nbdkit)] {
                let mut unbound = Entry { label: format!("{}-unbound", bound.label), ..bound };
                unbound.cell.pin = None;
                entries.push(unbound);
            }
        }
        let how = if wait == Wait::Spin { "polling" } else { "sleeping" };
        let title = format!("read {}, one after the other, both {how}", bytes(PAGE));
        self.push(format!("ping-{}/{PAGE}", wait.name()), title, Figure::Latency, entries);
    }

    /// Writes one after the other, through what other programs see of a disk.
    fn doors(&mut self) {
        let subjects = [Subject::Nbdkit, Subject::DoorNbd, Subject::DoorFuse];
        let one_cpu = self.options.pin.map(|(rx, _)| (rx, rx));
        let ways = [("-unbound", None), ("-one-cpu", one_cpu)];
        let mut entries = Vec::new();
        for (how, pin) in ways.into_iter().take(if one_cpu.is_some() { 2 } else { 1 }) {
            for subject in subjects {
                let label = format!("{}{how}", subject.name());
                let entry = self.io(&label, subject, Kind::DoorWrite, PAGE, 1);
                let mut entry = Entry { as_is: true, ..entry.waiting(Wait::Adaptive) };
                entry.cell.pin = pin;
                entries.push(entry);
            }
        }
        let title = format!("write {}, one after the other, to a new disk", bytes(PAGE));
        self.push(format!("door-write/{PAGE}"), title, Figure::Latency, entries);
    }

    /// One of two paths is lost under load.
    fn failover(&mut self) {
        let io = |label: &str, kind, path_dead_ms| {
            let entry = self.io(label, Subject::Rtrs, kind, PAGE, DEPTH);
            let mut entry = entry.waiting(Wait::Adaptive);
            entry.cell.paths = 2;
            entry.cell.path_dead_ms = path_dead_ms;
            entry.cell.window_ms = path_dead_ms + RESET_WINDOW_MS;
            entry
        };
        let mut entries = vec![io("reset", Kind::IoReset, 0)];
        if !self.options.quick {
            for (label, path_dead_ms) in PATH_DEAD_MS {
                entries.push(Entry { once: true, ..io(label, Kind::IoCut, path_dead_ms) });
            }
        }
        let title = format!(
            "read {}, {DEPTH} outstanding, two paths, min-inflight; one is reset by the server, or cut \
             and given up after 3 s or 0.5 s of silence",
            bytes(PAGE)
        );
        self.push(format!("failover/{PAGE}x{DEPTH}"), title, Figure::Pauses, entries);
    }

    /// All cells of a suite.
    pub(super) fn block(&mut self, suite: Suite) {
        let (rtrs, full) = (suite == Suite::Rtrs, !self.options.quick);
        for kind in [Kind::IoRead, Kind::IoWrite] {
            self.rate(suite, kind, PAGE, DEPTH);
            if rtrs && full {
                self.rate(suite, kind, PAGE, DEEP);
            }
            if rtrs {
                // Large writes of a MiB are no target.
                let some = if kind == Kind::IoRead && full { &LARGE[..] } else { &LARGE[..1] };
                some.iter().for_each(|&(size, depth)| self.rate(suite, kind, size, depth));
            }
            if full {
                OTHERS.iter().for_each(|&(size, depth)| self.rate(suite, kind, size, depth));
            }
        }
        if rtrs {
            self.small_writes();
        }
        for wait in [Wait::Spin, Wait::Sleep] {
            self.io_pings(suite, wait);
        }
        if rtrs {
            self.failover();
        } else {
            self.doors();
        }
    }
}
