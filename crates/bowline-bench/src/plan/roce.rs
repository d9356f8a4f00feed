//! The cells of RoCEv2.

use super::{Builder, Entry, Figure, bytes};
use crate::cell::{Kind, Subject, Wait};

/// Bytes of a large message.
const LARGE: usize = 1 << 20;
/// Large messages outstanding.
const DEPTH: usize = 4;
/// What a packet of the anchor has besides what a packet of the device carries.
const FRAMING: usize = 16;
/// Segments the anchor is measured with beside sends of 64 bytes: a header of RTRS or so.
const SMALL_SEGMENT: usize = 272;

/// Shortest window where packets are lost: pauses until they are missed are long.
const LOSS_WINDOW_MS: u64 = 500;

impl Builder<'_> {
    fn verb(&self, label: &str, kind: Kind, size: usize, mtu: usize, depth: usize) -> Entry {
        let mut entry = self.entry(Subject::Roce, kind, size, 1);
        entry.label = label.to_owned();
        entry.cell.mtu = mtu;
        entry.cell.depth = depth;
        entry
    }

    fn bare(&self, subject: Subject, kind: Kind, size: usize) -> Entry {
        Entry { anchor: true, ..self.entry(subject, kind, size, 1) }
    }

    fn bulk(&mut self, mtu: usize) {
        let mut entries = vec![self.bare(Subject::UdpGso, Kind::Stream, mtu + FRAMING)];
        if mtu == 4096 {
            entries.push(self.bare(Subject::Tcpz, Kind::Stream, LARGE));
        }
        entries.push(self.verb("write", Kind::Write, LARGE, mtu, DEPTH));
        entries.push(self.verb("read", Kind::Read, LARGE, mtu, DEPTH));
        let title = format!("1 MiB, MTU {mtu}, {DEPTH} outstanding");
        self.push(format!("bulk/{mtu}"), title, Figure::Rate, entries);
    }

    fn sends(&mut self) {
        let mut entries = vec![self.bare(Subject::UdpGso, Kind::Stream, SMALL_SEGMENT)];
        entries.push(self.verb("send", Kind::Send, 64, 4096, 128));
        if !self.options.quick {
            for depth in [16, 1] {
                let entry = self.verb(&format!("send-{depth}"), Kind::Send, 64, 4096, depth);
                entries.push(Entry { once: true, ..entry });
            }
        }
        let title = "SEND 64 B, 128, 16 and 1 outstanding".to_owned();
        self.push("send/64".into(), title, Figure::Rate, entries);
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
            let mut entry = self.verb(label, kind, 64, 4096, 1);
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
            let mut entry = self.verb(label, Kind::Write, LARGE, 4096, DEPTH);
            entry.cell.drop_one_in = drop_one_in;
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
            let mut entries = vec![
                self.verb("write", Kind::Write, size, 4096, 16),
                self.verb("read", Kind::Read, size, 4096, 16),
            ];
            entries.iter_mut().for_each(|entry| entry.once = true);
            let title = format!("{}, MTU 4096, 16 outstanding", bytes(size));
            self.push(format!("write/{size}"), title, Figure::Rate, entries);
        }
    }

    /// Lays out all of them.
    pub(super) fn roce(&mut self) {
        [4096, 1024].into_iter().for_each(|mtu| self.bulk(mtu));
        self.sends();
        self.pings();
        self.loss();
        if !self.options.quick {
            self.sizes();
        }
    }
}
