//! The cells of RoCEv2.

use super::{Builder, Entry, Figure, bytes};
use crate::cell::{Kind, Subject, Wait};

/// Bytes of a large message.
const LARGE: usize = 1 << 20;
/// Large messages outstanding: more than the window holds, less than the ring.
const DEPTH: usize = 3;
/// Queue pairs of the cells that have several.
const QUEUE_PAIRS: usize = 4;
/// Atomics outstanding.
const ATOMICS: usize = 16;
/// Path MTU of what is not measured at several.
const MTU: usize = 4096;
/// What a packet of the anchor has besides what a packet of the device carries.
const FRAMING: usize = 16;
/// Segments the anchor is measured with beside sends of 64 bytes: a header of RTRS or so.
const SMALL_SEGMENT: usize = 272;

/// Shortest window where packets are lost: pauses until they are missed are long.
const LOSS_WINDOW_MS: u64 = 500;

impl Builder<'_> {
    fn verb(&self, label: &str, kind: Kind, size: usize, depth: usize) -> Entry {
        let mut entry = self.entry(Subject::Roce, kind, size, 1);
        entry.label = label.to_owned();
        entry.cell.mtu = self.options.mtu.unwrap_or(MTU);
        entry.cell.depth = depth;
        entry.lossy(self.options.drop_one_in)
    }

    /// The same with several queue pairs.
    fn verb_many(&self, label: &str, kind: Kind, size: usize, depth: usize) -> Entry {
        let mut entry = self.verb(label, kind, size, depth);
        entry.cell.flows = QUEUE_PAIRS;
        Entry { once: true, ..entry }
    }

    fn bare(&self, subject: Subject, kind: Kind, size: usize) -> Entry {
        Entry { anchor: true, ..self.entry(subject, kind, size, 1) }
    }

    fn bulk(&mut self, mtu: usize) {
        let mut entries = vec![self.bare(Subject::UdpGso, Kind::Stream, mtu + FRAMING)];
        if mtu == 4096 {
            entries.push(self.bare(Subject::Tcpz, Kind::Stream, LARGE));
        }
        entries.push(self.verb("write", Kind::Write, LARGE, DEPTH));
        entries.push(self.verb("read", Kind::Read, LARGE, DEPTH));
        if !self.options.quick {
            // As many bytes outstanding, in as much memory.
            let size = LARGE / QUEUE_PAIRS;
            entries.push(self.verb_many("write-4qp", Kind::Write, size, DEPTH));
        }
        for entry in entries.iter_mut().filter(|entry| entry.cell.subject == Subject::Roce) {
            entry.cell.mtu = mtu;
        }
        let title = format!(
            "1 MiB, MTU {mtu}, {DEPTH} outstanding; 4qp: 256 KiB, as many on each of 4 queue pairs"
        );
        self.push(format!("bulk/{mtu}"), title, Figure::Rate, entries);
    }

    fn sends(&mut self) {
        let mut entries = vec![self.bare(Subject::UdpGso, Kind::Stream, SMALL_SEGMENT)];
        entries.push(self.verb("send", Kind::Send, 64, 128));
        if !self.options.quick {
            let others = [
                self.verb("send-16", Kind::Send, 64, 16),
                self.verb("send-1", Kind::Send, 64, 1),
                self.verb("send-imm", Kind::SendImm, 64, 128),
            ];
            entries.extend(others.map(|entry| Entry { once: true, ..entry }));
            entries.push(self.verb_many("send-4qp", Kind::Send, 64, 128 / QUEUE_PAIRS));
        }
        let title = "SEND 64 B, 128, 16 and 1 outstanding; imm: with immediate, 128; 4qp: 32 on \
                     each of 4 queue pairs";
        self.push("send/64".into(), title.into(), Figure::Rate, entries);
    }

    /// Fetch and add; no target has it.
    fn atomics(&mut self) {
        let entry = self.verb("fetch-add", Kind::Atomic, 8, ATOMICS);
        let title = format!("fetch and add, {ATOMICS} outstanding");
        self.push_once("atomic/8", title, Figure::Rate, vec![entry]);
        let mut entry = self.verb("fetch-add", Kind::PingAtomic, 8, 1);
        entry.cell.wait = Wait::Spin;
        let title = "fetch and add, one after the other, both polling".to_owned();
        self.push_once("atomic-ping/8", title, Figure::Latency, vec![entry]);
    }

    /// What is measured in the first round only.
    fn push_once(&mut self, id: &str, title: String, figure: Figure, mut entries: Vec<Entry>) {
        entries.iter_mut().for_each(|entry| entry.once = true);
        self.push(id.to_owned(), title, figure, entries);
    }

    fn pings(&mut self) {
        let mut udp = self.bare(Subject::Udp, Kind::Rtt, 64);
        udp.cell.wait = Wait::Spin;
        let mut entries = vec![udp];
        for (label, kind, wait) in [
            ("send", Kind::PingSend, Wait::Spin),
            ("write-imm", Kind::PingWrite, Wait::Spin),
            ("send-adaptive", Kind::PingSend, Wait::Adaptive),
        ] {
            let mut entry = self.verb(label, kind, 64, 1);
            entry.cell.wait = wait;
            entry.once = wait == Wait::Adaptive;
            if !(entry.once && self.options.quick) {
                entries.push(entry);
            }
        }
        let title = "round trip, 64 B, both polling".to_owned();
        self.push("ping/64".into(), title, Figure::Latency, entries);
    }

    fn loss(&mut self) {
        let mut entries = Vec::new();
        for (label, drop_one_in) in [("lossless", 0), ("loss-0.1%", 1000), ("loss-1%", 100)] {
            let mut entry = self.verb(label, Kind::Write, LARGE, DEPTH).lossy(drop_one_in);
            entry.cell.window_ms = entry.cell.window_ms.max(LOSS_WINDOW_MS);
            entry.anchor = drop_one_in == 0;
            entries.push(entry);
        }
        let title = "WRITE 1 MiB, received packets lost at random".to_owned();
        self.push(format!("loss/{LARGE}"), title, Figure::Rate, entries);
    }

    /// Smaller writes and reads; no target has them.
    fn sizes(&mut self) {
        for size in [4096, 65536] {
            let entries = vec![
                self.verb("write", Kind::Write, size, 16),
                self.verb("read", Kind::Read, size, 16),
            ];
            let title = format!("{}, 16 outstanding", bytes(size));
            self.push_once(&format!("write/{size}"), title, Figure::Rate, entries);
        }
    }

    /// Lays out all of them.
    pub(super) fn roce(&mut self) {
        match self.options.mtu {
            Some(mtu) => self.bulk(mtu),
            None => [4096, 1024].into_iter().for_each(|mtu| self.bulk(mtu)),
        }
        self.sends();
        self.pings();
        if self.options.drop_one_in == 0 {
            self.loss();
        }
        if !self.options.quick {
            self.sizes();
            self.atomics();
        }
    }
}

impl Entry {
    /// The same while one of this many packets is lost; 0: none.
    fn lossy(mut self, drop_one_in: u32) -> Self {
        self.cell.drop_one_in = drop_one_in;
        if drop_one_in > 0 {
            self.cell.window_ms = self.cell.window_ms.max(LOSS_WINDOW_MS);
        }
        self
    }
}
