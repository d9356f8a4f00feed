//! Exports that are open: one entry for each backing store, however many opens there are.

use std::collections::BTreeMap;
use std::sync::Arc;

use bowline_block::backend::Backend;
use bowline_rnbd::server::ExportId;
use bowline_rnbd::{Errno, IoOp};
use bowline_rtrs::RegionId;

use super::exports::Identity;
use crate::tree::Traffic;

/// An open export.
#[derive(Clone)]
pub(super) struct OpenExport {
    pub(super) backend: Arc<dyn Backend>,
    /// The store as registered memory, if it is memory.
    pub(super) region: Option<RegionId>,
    pub(super) label: Arc<str>,
    pub(super) read_only: bool,
}

struct Entry {
    identity: Identity,
    export: OpenExport,
    opens: u32,
    traffic: Traffic,
}

/// Open exports by id.
#[derive(Default)]
pub(super) struct Table {
    entries: BTreeMap<ExportId, Entry>,
    ids: u32,
}

impl Table {
    /// Opens once more what is open already.
    pub(super) fn again(&mut self, identity: Identity) -> Option<(ExportId, OpenExport)> {
        let found = self.entries.iter_mut().find(|(_, entry)| entry.identity == identity);
        let (id, entry) = found?;
        entry.opens += 1;
        Some((*id, entry.export.clone()))
    }

    /// Takes a new open export in.
    pub(super) fn insert(
        &mut self,
        identity: Identity,
        export: OpenExport,
    ) -> Result<ExportId, Errno> {
        let id = ExportId(self.ids);
        self.ids = self.ids.checked_add(1).ok_or(Errno::ENOMEM)?;
        self.entries.insert(id, Entry { identity, export, opens: 1, traffic: Traffic::default() });
        Ok(id)
    }

    /// Takes one open back. Returns what is open no longer: to let go of storage may mean to wait for
    /// its threads, so that is done with no locks held.
    #[must_use]
    pub(super) fn release(&mut self, id: ExportId) -> Option<OpenExport> {
        let entry = self.entries.get_mut(&id)?;
        entry.opens = entry.opens.saturating_sub(1);
        if entry.opens > 0 {
            return None;
        }
        Some(self.entries.remove(&id)?.export)
    }

    pub(super) fn get(&self, id: ExportId) -> Option<&OpenExport> {
        self.entries.get(&id).map(|entry| &entry.export)
    }

    pub(super) fn by_identity(&self, identity: Identity) -> Option<(ExportId, OpenExport)> {
        let found = self.entries.iter().find(|(_, entry)| entry.identity == identity);
        found.map(|(id, entry)| (*id, entry.export.clone()))
    }

    /// Returns what is open, by what it is.
    pub(super) fn stores(&self) -> impl Iterator<Item = (Identity, &OpenExport)> {
        self.entries.values().map(|entry| (entry.identity, &entry.export))
    }

    /// Counts what went well.
    pub(super) fn count(&mut self, id: ExportId, op: IoOp, len: u32) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
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

    pub(super) fn iter(&self) -> impl Iterator<Item = (ExportId, &OpenExport, &Traffic)> {
        self.entries.iter().map(|(id, entry)| (*id, &entry.export, &entry.traffic))
    }
}
