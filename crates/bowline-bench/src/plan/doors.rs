//! The cells of fio on the doors of a disk.

use super::{Builder, Entry, Figure, bytes};
use crate::cell::{Kind, Wait};
use crate::doors::SUBJECTS;

/// Bytes of a request, and how many each fio has outstanding.
pub(crate) const SIZES: [(usize, usize); 3] = [(4096, 1), (4096, 32), (128 << 10, 16)];

/// Name of a cell: what is done, and what is unusual about it.
fn id(kind: Kind, (size, depth): (usize, usize), clients: usize, busy: usize) -> String {
    let how = if kind == Kind::FioWrite { "write" } else { "read" };
    let mut id = format!("doors/{how}/{size}x{depth}");
    if clients > 1 {
        id += &format!("-{clients}-clients");
    }
    if busy > 0 {
        id += &format!("+{busy}-busy");
    }
    id
}

impl Builder<'_> {
    /// Every door beside the others, for each number of clients and of busy loops.
    pub(super) fn doors_by_fio(&mut self) {
        let options = self.options;
        for (&busy, &clients) in
            options.busy.iter().flat_map(|busy| options.clients.iter().map(move |n| (busy, n)))
        {
            for size in SIZES {
                for kind in [Kind::FioRead, Kind::FioWrite] {
                    self.doors_of(kind, size, clients, busy);
                }
            }
        }
    }

    fn doors_of(&mut self, kind: Kind, (size, depth): (usize, usize), clients: usize, busy: usize) {
        let usable = |subject| self.setting.peers.contains(&subject);
        let entries = SUBJECTS.into_iter().filter(|subject| usable(*subject)).map(|subject| {
            let mut entry = self.entry(subject, kind, size, clients);
            entry.cell.depth = depth;
            entry.cell.busy = busy;
            entry.cell.wait = Wait::Adaptive;
            entry.cell.pin = None;
            Entry { as_is: true, ..entry }
        });
        let entries: Vec<Entry> = entries.collect();
        let how = if kind == Kind::FioWrite { "write" } else { "read" };
        let mut title = format!("fio: random {how} {}, {depth} outstanding", bytes(size));
        if clients > 1 {
            title += &format!(", of {clients} processes each");
        }
        if busy > 0 {
            title += &format!(", {busy} busy loops beside");
        }
        self.push(id(kind, (size, depth), clients, busy), title, Figure::Doors, entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_named_by_what_is_unusual_about_it() {
        assert_eq!(id(Kind::FioRead, (4096, 1), 1, 0), "doors/read/4096x1");
        assert_eq!(id(Kind::FioWrite, (4096, 32), 4, 2), "doors/write/4096x32-4-clients+2-busy");
    }
}
