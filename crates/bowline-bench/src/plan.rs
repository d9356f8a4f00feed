//! Which cells there are, and who is measured in each.

mod block;
mod doors;
mod host;
mod rdma;
mod roce;

use std::net::Ipv4Addr;

use bowline_rtrs_driver::Policy;

use crate::args::{Congestion, Options, Suite};
use crate::cell::{Cell, Kind, Subject, Wait};

/// Warm-up of every measurement, in milliseconds.
const WARM_MS: u64 = 150;
/// Send and receive buffer asked of bowline and of libraries that have them: enough not to block.
pub(crate) const BUFFER: usize = 8 << 20;

/// What a block's figures are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    /// Messages per second.
    Rate,
    /// Round trip times.
    Latency,
    /// CPU time per message against a number of sockets or nodes.
    Curve,
    /// Bytes of memory each.
    Memory,
    /// Pauses while a path is lost.
    Pauses,
    /// Requests per second and their times at the doors of a disk, by fio.
    Doors,
}

/// One thing measured in a block.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Name within the block.
    pub(crate) label: String,
    pub(crate) cell: Cell,
    /// Measured again at the end of the round, to see whether the machine changed.
    pub(crate) anchor: bool,
    /// Measured in the first round only: it belongs to no target.
    pub(crate) once: bool,
    /// Keeps its settings, though its subject may do better with others.
    pub(crate) as_is: bool,
}

/// Several things measured one after the other and compared with each other.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Name of the cell.
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) figure: Figure,
    pub(crate) entries: Vec<Entry>,
}

/// What the plan depends on besides the options.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// Congestion control for anchors and peers.
    pub(crate) anchor_cc: String,
    /// Congestion control to ask of bowline; empty lets it choose.
    pub(crate) bowline_cc: String,
    /// The system's default.
    pub(crate) system_cc: String,
    /// Peers that can be run, and doors of a disk that fio can use.
    pub(crate) peers: Vec<Subject>,
    /// Node addresses of receiver and sender.
    pub(crate) nodes: (Ipv4Addr, Ipv4Addr),
}

impl Setting {
    /// Decides who uses which congestion control.
    pub(crate) fn congestion(options: &Options, system: &str, available: &[String]) -> [String; 2] {
        match &options.cc {
            // bowline takes cubic for peers on this machine where the kernel has it.
            Congestion::Own if available.iter().any(|a| a == "cubic") => {
                ["cubic".into(), String::new()]
            }
            Congestion::Own => [system.to_owned(), String::new()],
            Congestion::System => [system.to_owned(), system.to_owned()],
            Congestion::Named(name) => [name.clone(), name.clone()],
        }
    }
}

struct Builder<'a> {
    options: &'a Options,
    setting: &'a Setting,
    blocks: Vec<Block>,
}

impl Builder<'_> {
    fn cell(&self, subject: Subject, kind: Kind, size: usize, flows: usize) -> Cell {
        let bowline = subject.is_bowline() || subject.host_nodes() > 0;
        let setting = self.setting;
        let wait = match subject {
            Subject::Zmq | Subject::Nano => Wait::Sleep,
            Subject::OfiNet | Subject::OfiRxm | Subject::Ucx => Wait::Spin,
            subject if subject.is_bowline() => self.options.poll,
            Subject::BowlineRdma | Subject::Roce => self.options.poll,
            _ => Wait::Sleep,
        };
        Cell {
            subject,
            kind,
            size,
            flows,
            wait,
            paths: if bowline { self.options.paths } else { 0 },
            policy: Policy::default() as u8,
            path_dead_ms: 0,
            cc: if bowline { setting.bowline_cc.clone() } else { setting.anchor_cc.clone() },
            congestion: bowline_roce::Congestion::default(),
            pin: self.options.pin,
            warm_ms: WARM_MS,
            window_ms: self.options.window.as_millis() as u64,
            buffer: BUFFER,
            nodes: setting.nodes,
            mtu: 0,
            depth: 0,
            drop_one_in: 0,
            apart: false,
            busy: 0,
        }
    }

    fn entry(&self, subject: Subject, kind: Kind, size: usize, flows: usize) -> Entry {
        Entry {
            label: subject.name().to_owned(),
            cell: self.cell(subject, kind, size, flows),
            anchor: false,
            once: false,
            as_is: false,
        }
    }

    fn has(&self, subject: Subject) -> bool {
        match subject {
            s if s.is_peer() => self.setting.peers.contains(&s),
            _ => true,
        }
    }

    fn push(&mut self, id: String, title: String, figure: Figure, mut entries: Vec<Entry>) {
        entries.retain(|entry| self.has(entry.cell.subject));
        if self.options.wants(&id) && !entries.is_empty() {
            self.blocks.push(Block { id, title, figure, entries });
        }
    }

    fn stream(&mut self, size: usize) {
        let anchors: &[Subject] = match size {
            0..=65535 => &[Subject::Tcpb],
            65536..=1_000_000 => &[Subject::Tcpb, Subject::Tcpz],
            _ => &[Subject::Tcpb, Subject::Tcpz, Subject::Tcp1],
        };
        let mut entries = Vec::new();
        let elsewhere = |s: &Subject| {
            let only_rdma = matches!(s, Subject::BowlineRdma | Subject::BowlineShared);
            s.is_roce() || s.is_block() || s.is_of_host() || only_rdma
        };
        for subject in Subject::ALL.into_iter().filter(|s| !elsewhere(s)) {
            if subject == Subject::Udp && size > 60_000 {
                continue; // larger than a datagram
            }
            if subject == Subject::Tcpk && size < 1 << 20 {
                continue; // a copy of less costs less than noise
            }
            let mut entry = self.entry(subject, Kind::Stream, size, 1);
            entry.anchor = anchors.contains(&subject);
            let always = subject.is_peer() || matches!(subject, Subject::Bowline | Subject::Tcpk);
            entry.once = !entry.anchor && !always;
            if !(entry.once && self.options.quick) {
                entries.push(entry);
            }
        }
        // Anchors come first in a round.
        entries.sort_by_key(|entry| !entry.anchor);
        let title = format!("one way, {}", bytes(size));
        self.push(format!("stream/{size}"), title, Figure::Rate, entries);
    }

    fn many(&mut self, size: usize) {
        let flows = 16;
        let mut entries = Vec::new();
        for (subject, anchor) in [(Subject::Tcpb, true), (Subject::Tcp1, size == 1024)] {
            if anchor {
                let entry = self.entry(subject, Kind::Stream, size, flows);
                entries.push(Entry { anchor, ..entry });
            }
        }
        entries.push(self.entry(Subject::Bowline, Kind::Stream, size, flows));
        entries.push(self.entry(Subject::Zmq, Kind::Stream, size, flows));
        let title = format!("16 sockets to 1, {}", bytes(size));
        self.push(format!("many/{size}"), title, Figure::Rate, entries);
    }

    fn rtt(&mut self, wait: Wait, size: usize) {
        let subjects: &[(Subject, bool)] = match wait {
            Wait::Spin => &[
                (Subject::Tcp1, true),
                (Subject::Bowline, false),
                (Subject::OfiNet, false),
                (Subject::OfiRxm, false),
                (Subject::Ucx, false),
                (Subject::Udp, false),
            ],
            _ => &[
                (Subject::Tcp1, true),
                (Subject::Bowline, false),
                (Subject::Zmq, false),
                (Subject::Nano, false),
                (Subject::Udp, false),
            ],
        };
        let mut entries = Vec::new();
        for &(subject, anchor) in subjects {
            let mut entry = self.entry(subject, Kind::Rtt, size, 1);
            entry.cell.wait = wait;
            entry.anchor = anchor;
            entry.once = subject == Subject::Udp;
            entries.push(entry);
        }
        if self.options.poll == Wait::Adaptive {
            let mut entry = self.entry(Subject::Bowline, Kind::Rtt, size, 1);
            entry.label = "bowline-adaptive".into();
            entry.once = true;
            entries.insert(2, entry);
        }
        let how = if wait == Wait::Spin { "polling" } else { "sleeping" };
        let title = format!("round trip, {}, both {how}", bytes(size));
        self.push(format!("rtt-{}/{size}", wait.name()), title, Figure::Latency, entries);
    }

    fn paths(&mut self) {
        let mut entries = Vec::new();
        for paths in [1, 8] {
            let mut entry = self.entry(Subject::Bowline, Kind::Stream, 65536, 16);
            entry.label = if paths == 1 { "1-path".into() } else { format!("{paths}-paths") };
            entry.anchor = paths == 1;
            entry.cell.paths = paths;
            entries.push(entry);
        }
        for flows in [1, 8] {
            let entry = self.entry(Subject::Tcpz, Kind::Stream, 65536, flows);
            entries.push(Entry { label: format!("tcpz-{flows}"), ..entry });
        }
        let title = "16 sockets to 1, 64 KiB, 1 and 8 paths".to_owned();
        self.push("paths/65536".into(), title, Figure::Rate, entries);
    }

    fn slow(&mut self) {
        let mut entries = Vec::new();
        for (kind, label) in [(Kind::AllAwake, "all-awake"), (Kind::OneAsleep, "one-asleep")] {
            let mut entry = self.entry(Subject::Bowline, kind, 1024, 16);
            entry.label = label.into();
            entry.anchor = kind == Kind::AllAwake;
            // The sleeper's queue must fill within the warm-up.
            entry.cell.buffer = 256 * 1024;
            entries.push(entry);
        }
        let title = "15 of 16 pairs, 1 KiB, one receiver asleep".to_owned();
        self.push("slow/1024".into(), title, Figure::Rate, entries);
    }

    /// The same with the congestion control the system would have given.
    fn system_cc(&mut self, size: usize) {
        if self.setting.anchor_cc == self.setting.system_cc {
            return;
        }
        let mut entries = Vec::new();
        for subject in [Subject::Tcpb, Subject::Bowline] {
            let mut entry = self.entry(subject, Kind::Stream, size, 1);
            entry.cell.cc.clone_from(&self.setting.system_cc);
            entry.once = true;
            entries.push(entry);
        }
        let cc = &self.setting.system_cc;
        let title = format!("one way, {}, with the system's {cc}", bytes(size));
        self.push(format!("cc/{size}"), title, Figure::Rate, entries);
    }

    fn curve(&mut self, kind: Kind, counts: &[usize], what: &str) {
        let mut entries = Vec::new();
        for &count in counts {
            let mut entry = self.entry(Subject::Bowline, kind, 64, count);
            entry.label = count.to_string();
            entry.once = true;
            entries.push(entry);
        }
        let title = format!("1 socket to many {what} in turn, 64 B");
        self.push(kind.name().into(), title, Figure::Curve, entries);
    }

    fn idle(&mut self) {
        for (kind, count, what) in [
            (Kind::IdleSockets, 10_000, "memory of a bound socket that does nothing"),
            (Kind::IdleConnections, 1_000, "memory of a connection that does nothing"),
        ] {
            let mut entry = self.entry(Subject::Bowline, kind, 64, count);
            entry.once = true;
            self.push(kind.name().into(), what.into(), Figure::Memory, vec![entry]);
        }
    }
}

/// Lays out the cells of a suite that the options ask for.
pub(crate) fn plan(suite: Suite, options: &Options, setting: &Setting) -> Vec<Block> {
    let mut builder = Builder { options, setting, blocks: Vec::new() };
    match suite {
        Suite::Rds => {}
        Suite::Roce => {
            builder.roce();
            return builder.blocks;
        }
        Suite::Rtrs | Suite::Rnbd => {
            builder.block(suite);
            return builder.blocks;
        }
        Suite::Doors => {
            builder.doors_by_fio();
            return builder.blocks;
        }
    }
    if options.quick {
        [64, 8192, 1 << 20].into_iter().for_each(|size| builder.stream(size));
        builder.many(1024);
        builder.rtt(Wait::Spin, 64);
        builder.rtt(Wait::Sleep, 64);
        builder.slow();
        builder.host();
        builder.rdma();
        return builder.blocks;
    }
    [64, 1024, 8192, 65536, 1 << 20].into_iter().for_each(|size| builder.stream(size));
    [64, 1024, 8192].into_iter().for_each(|size| builder.many(size));
    for wait in [Wait::Spin, Wait::Sleep] {
        [64, 4096].into_iter().for_each(|size| builder.rtt(wait, size));
    }
    builder.paths();
    builder.slow();
    [65536, 1 << 20].into_iter().for_each(|size| builder.system_cc(size));
    builder.curve(Kind::Sockets, &[1, 10, 100, 1000, 10_000], "sockets of one node");
    builder.curve(Kind::Nodes, &[1, 10, 100, 1000], "nodes");
    builder.idle();
    builder.host();
    builder.rdma();
    builder.blocks
}

/// Writes a size the way people say it.
pub(crate) fn bytes(size: usize) -> String {
    match size {
        s if s >= 1 << 20 && s.is_multiple_of(1 << 20) => format!("{} MiB", s >> 20),
        s if s >= 1 << 10 && s.is_multiple_of(1 << 10) => format!("{} KiB", s >> 10),
        s => format!("{s} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::parsed_suite;
    use crate::targets::{DOORS, RDS, RNBD, ROCE, RTRS};

    fn setting() -> Setting {
        Setting {
            anchor_cc: "cubic".into(),
            bowline_cc: String::new(),
            system_cc: "bbr".into(),
            peers: vec![Subject::Zmq],
            nodes: (Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::LOCALHOST),
        }
    }

    fn options(line: &str) -> Options {
        parsed_suite(&format!("rds {line}")).unwrap().1
    }

    #[test]
    fn every_target_finds_its_cell_and_its_anchors() {
        let all = Setting { peers: Subject::ALL.into_iter().collect(), ..setting() };
        let suites = [
            (Suite::Rds, RDS),
            (Suite::Roce, ROCE),
            (Suite::Rtrs, RTRS),
            (Suite::Rnbd, RNBD),
            (Suite::Doors, DOORS),
        ];
        for (suite, targets) in suites {
            for quick in ["", "--quick"] {
                let blocks = plan(suite, &options(quick), &all);
                for target in targets {
                    let block = blocks.iter().find(|b| b.id == target.block);
                    let Some(block) = block else {
                        let left_out =
                            matches!(suite, Suite::Rds | Suite::Rtrs) && !quick.is_empty();
                        assert!(left_out, "{} has no cell {}", target.id, target.block);
                        continue;
                    };
                    let has = |label| block.entries.iter().any(|e| e.label == label);
                    for label in target.labels() {
                        assert!(has(label), "{}: no {label} in {}", target.id, block.id);
                    }
                }
            }
        }
    }

    #[test]
    fn a_round_begins_with_its_anchors_and_leaves_missing_peers_out() {
        let blocks = plan(Suite::Rds, &options("--only stream/1048576"), &setting());
        let labels: Vec<&str> = blocks[0].entries.iter().map(|e| e.label.as_str()).collect();
        assert_eq!(labels[..3], ["tcpb", "tcpz", "tcp1"]);
        assert!(labels.contains(&"zmq") && !labels.contains(&"ucx") && !labels.contains(&"udp"));
        assert_eq!(blocks.len(), 1);
    }

    #[test]
    fn anchors_follow_the_choice_of_congestion_control() {
        let available = ["reno".to_owned(), "cubic".to_owned()];
        let choose = |line| Setting::congestion(&options(line), "bbr", &available);
        assert_eq!(choose(""), ["cubic", ""]);
        assert_eq!(choose("--cc default"), ["bbr", "bbr"]);
        assert_eq!(choose("--cc reno"), ["reno", "reno"]);
        assert_eq!(Setting::congestion(&options(""), "bbr", &[]), ["bbr", ""]);
    }
}
