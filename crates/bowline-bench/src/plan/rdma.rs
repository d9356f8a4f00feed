//! Cells of RDS over RDMA, beside the same over TCP and bare verbs.

use super::{Builder, Entry, Figure, bytes};
use crate::cell::{Kind, Subject, Wait};

/// Bytes of a remote write.
const LARGE: usize = 1 << 20;
/// Writes outstanding.
const DEPTH: usize = 3;
/// Path MTU of the bare verbs.
const MTU: usize = 4096;

impl Builder<'_> {
    /// Adds them, where they were asked for.
    pub(super) fn rdma(&mut self) {
        if !self.options.rdma {
            return;
        }
        for size in [64, 8192, LARGE] {
            let mut subjects = vec![Subject::Bowline, Subject::BowlineRdma];
            if size == LARGE {
                subjects.insert(1, Subject::BowlineShared);
            }
            let entries =
                subjects.into_iter().map(|s| self.entry(s, Kind::Stream, size, 1)).collect();
            let title = format!("one way, {}, over TCP and over RDMA", bytes(size));
            self.push(format!("rdma-stream/{size}"), title, Figure::Rate, entries);
        }
        for wait in [Wait::Spin, Wait::Sleep] {
            let size = 64;
            let mut entries = [Subject::Bowline, Subject::BowlineRdma]
                .map(|subject| self.entry(subject, Kind::Rtt, size, 1));
            entries.iter_mut().for_each(|entry| entry.cell.wait = wait);
            let how = if wait == Wait::Spin { "polling" } else { "sleeping" };
            let title = format!("round trip, {}, over TCP and RDMA, both {how}", bytes(size));
            let id = format!("rdma-rtt-{}/{size}", wait.name());
            self.push(id, title, Figure::Latency, entries.into());
        }
        let mut bare = self.entry(Subject::Roce, Kind::Write, LARGE, 1);
        bare.cell.mtu = MTU;
        bare.cell.depth = DEPTH;
        let entries = vec![
            Entry { label: "write".to_owned(), ..bare },
            self.entry(Subject::BowlineRdma, Kind::Write, LARGE, 1),
        ];
        let title = format!("remote writes, {}, bare and announced by messages", bytes(LARGE));
        self.push(format!("rdma-write/{LARGE}"), title, Figure::Rate, entries);
    }
}
