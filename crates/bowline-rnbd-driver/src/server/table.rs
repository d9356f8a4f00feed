//! Open exports: one entry for each backing store, with any number of opens.

use std::collections::BTreeMap;
use std::sync::Arc;

use bowline_base::clock;
use bowline_block::backend::Backend;
use bowline_rnbd::server::ExportId;
use bowline_rnbd::{Errno, Failures, IoOp};
use bowline_rtrs::RegionId;
use bowline_wire::rnbd::Access;

use super::exports::{Exports, Identity};
use crate::tree::{self, Traffic};

/// An open export.
#[derive(Clone)]
pub(super) struct OpenExport {
    pub(super) backend: Arc<dyn Backend>,
    /// The store as a registered region, if it is memory.
    pub(super) region: Option<RegionId>,
    /// Name in the control tree, unique there.
    pub(super) label: Arc<str>,
    /// The store was opened for reading only, whatever other names of it allow.
    pub(super) read_only: bool,
}

struct Entry {
    identity: Identity,
    export: OpenExport,
    /// An earlier read-only open of the same store, which may still have reads in flight.
    superseded: Option<OpenExport>,
    opens: u32,
    traffic: Traffic,
}

/// Open exports by id.
#[derive(Default)]
pub(super) struct Table {
    entries: BTreeMap<ExportId, Entry>,
    ids: u32,
    /// Stores that have failed requests. They stay when they are closed, so that the log learns of
    /// them.
    failed: BTreeMap<Identity, Failed>,
}

/// Most stores whose failures are remembered.
const FAILED_MAX: usize = 1024;

/// A store that has failed requests.
#[derive(Clone)]
pub(super) struct Failed {
    /// Its label when it did last.
    pub(super) label: Arc<str>,
    pub(super) failures: Failures,
}

impl Table {
    /// Counts one more open of a store that is open. `None` if it is not open, or if it is to be
    /// written and was opened read-only.
    pub(super) fn reopen(
        &mut self,
        identity: Identity,
        access: Access,
    ) -> Option<(ExportId, OpenExport)> {
        let found = self.entries.iter_mut().find(|(_, entry)| entry.identity == identity);
        let (id, entry) = found?;
        if entry.export.read_only && access != Access::Ro {
            return None;
        }
        entry.opens += 1;
        Some((*id, entry.export.clone()))
    }

    /// Inserts a new open export under a label that no other store has. An entry of the same
    /// identity, which was read-only, is replaced: its label passes to the new export, and its
    /// readers read from the new export from now on.
    ///
    /// # Errors
    /// `EACCES` when those readers could not, since the blocks of the new export are larger;
    /// `ENOMEM`. The export comes back, for the caller to drop it without locks.
    pub(super) fn insert(
        &mut self,
        identity: Identity,
        mut export: OpenExport,
        exports: &Exports,
    ) -> Result<ExportId, (Errno, OpenExport)> {
        let found = self.entries.iter_mut().find(|(_, entry)| entry.identity == identity);
        if let Some((id, entry)) = found {
            let block = |export: &OpenExport| export.backend.limits().logical;
            if block(&export) > block(&entry.export) {
                return Err((Errno::EACCES, export));
            }
            entry.opens += 1;
            export.label = Arc::clone(&entry.export.label);
            entry.superseded = Some(std::mem::replace(&mut entry.export, export));
            return Ok(*id);
        }
        let id = ExportId(self.ids);
        let Some(next) = self.ids.checked_add(1) else { return Err((Errno::ENOMEM, export)) };
        self.ids = next;
        let traffic = Traffic::default();
        export.label = self.label(identity, &export.label, exports);
        self.entries.insert(id, Entry { identity, export, superseded: None, opens: 1, traffic });
        Ok(id)
    }

    /// Returns the label for a store that is being opened: `wanted`, or `wanted` with a number.
    /// Another file may have taken the name of an open one; it must not take its place in the
    /// control tree.
    fn label(&self, identity: Identity, wanted: &Arc<str>, exports: &Exports) -> Arc<str> {
        let taken = |label: &str| {
            let place = tree::dir_name(label);
            let mut all = self.entries.values();
            exports.offers_another(&place, identity)
                || all.any(|entry| tree::dir_name(&entry.export.label) == place)
        };
        let (mut label, mut number) = (Arc::clone(wanted), 1_u64);
        while taken(&label) {
            number += 1;
            label = format!("{wanted}~{number}").into();
        }
        label
    }

    /// Gives back one open. Returns the exports that are closed by it. The caller drops them
    /// without locks, since dropping storage may wait for its threads.
    #[must_use]
    pub(super) fn release(&mut self, id: ExportId) -> Vec<OpenExport> {
        let Some(entry) = self.entries.get_mut(&id) else { return Vec::new() };
        entry.opens = entry.opens.saturating_sub(1);
        if entry.opens > 0 {
            return Vec::new();
        }
        let gone = self.entries.remove(&id).into_iter();
        gone.flat_map(|entry| entry.superseded.into_iter().chain([entry.export])).collect()
    }

    pub(super) fn get(&self, id: ExportId) -> Option<&OpenExport> {
        self.entries.get(&id).map(|entry| &entry.export)
    }

    pub(super) fn by_identity(&self, identity: Identity) -> Option<(ExportId, OpenExport)> {
        let found = self.entries.iter().find(|(_, entry)| entry.identity == identity);
        found.map(|(id, entry)| (*id, entry.export.clone()))
    }

    /// Returns the open exports with their identities.
    pub(super) fn stores(&self) -> impl Iterator<Item = (Identity, &OpenExport)> {
        self.entries.values().map(|entry| (entry.identity, &entry.export))
    }

    /// Counts a successful request.
    pub(super) fn count(&mut self, id: ExportId, op: IoOp, len: u32) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if !self.failed.is_empty()
            && let Some(failed) = self.failed.get_mut(&entry.identity)
        {
            failed.failures.succeeded(op);
        }
        let traffic = &mut entry.traffic;
        let (requests, bytes) = match op {
            IoOp::Flush => {
                traffic.flushes += 1;
                return;
            }
            IoOp::Read => (&mut traffic.reads, &mut traffic.read_bytes),
            IoOp::Write => (&mut traffic.writes, &mut traffic.write_bytes),
            IoOp::Discard | IoOp::WriteZeroes | IoOp::SecureErase => {
                (&mut traffic.discards, &mut traffic.discard_bytes)
            }
        };
        *requests += 1;
        *bytes += u64::from(len);
    }

    /// Notes a request that storage has failed.
    pub(super) fn fail(&mut self, id: ExportId, op: IoOp, errno: Errno) {
        let Some(Entry { identity, export, .. }) = self.entries.get(&id) else { return };
        let now = clock::now();
        if self.failed.len() == FAILED_MAX && !self.failed.contains_key(identity) {
            let oldest = |failed: &Failed| failed.failures.last.map(|last| last.at);
            let oldest = self.failed.iter().min_by_key(|(_, failed)| oldest(failed));
            let oldest = oldest.map(|(identity, _)| *identity);
            oldest.and_then(|oldest| self.failed.remove(&oldest));
        }
        let new = || Failed { label: Arc::clone(&export.label), failures: Failures::default() };
        let failed = self.failed.entry(*identity).or_insert_with(new);
        failed.label = Arc::clone(&export.label);
        failed.failures.failed(now, op, errno);
    }

    /// Returns the failures of a store.
    pub(super) fn failures(&self, identity: Identity) -> Failures {
        self.failed.get(&identity).map(|failed| failed.failures).unwrap_or_default()
    }

    /// Returns the stores that have failed requests.
    pub(super) fn failed(&self) -> impl Iterator<Item = (Identity, &Failed)> {
        self.failed.iter().map(|(identity, failed)| (*identity, failed))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ExportId, &OpenExport, &Traffic, Failures)> {
        self.entries
            .iter()
            .map(|(id, entry)| (*id, &entry.export, &entry.traffic, self.failures(entry.identity)))
    }
}

#[cfg(test)]
mod tests {
    use bowline_block::backend::{BackendSpec, open};

    use super::*;

    fn memory(block: u32) -> OpenExport {
        let backend = open(BackendSpec::Memory { bytes: 1 << 20, block }).unwrap();
        OpenExport { backend, region: None, label: "disk".into(), read_only: true }
    }

    /// Dropping storage waits for its threads, so nothing may be dropped while the table is locked.
    #[test]
    fn an_export_that_is_refused_comes_back() {
        let (mut table, exports) = (Table::default(), Exports::new());
        let identity = Identity::Store(1);
        table.insert(identity, memory(512), &exports).map_err(|(errno, _)| errno).unwrap();
        let larger = memory(4096);
        let backend = Arc::downgrade(&larger.backend);
        let (errno, refused) = table.insert(identity, larger, &exports).err().unwrap();
        assert_eq!((errno, backend.strong_count()), (Errno::EACCES, 1));
        drop(refused);
        assert_eq!(backend.strong_count(), 0, "the table kept it");
    }
}
