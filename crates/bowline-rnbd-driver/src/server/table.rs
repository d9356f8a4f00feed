//! Exports that are open: one entry for each backing store, however many opens there are.

use std::collections::BTreeMap;
use std::sync::Arc;

use bowline_block::backend::Backend;
use bowline_rnbd::server::ExportId;
use bowline_rnbd::{Errno, IoOp};
use bowline_rtrs::RegionId;
use bowline_wire::rnbd::Access;

use super::exports::{Exports, Identity};
use crate::tree::{self, Traffic};

/// An open export.
#[derive(Clone)]
pub(super) struct OpenExport {
    pub(super) backend: Arc<dyn Backend>,
    /// The store as registered memory, if it is memory.
    pub(super) region: Option<RegionId>,
    /// What it is called in the control tree, where nothing else is called so.
    pub(super) label: Arc<str>,
    /// It was opened for reading only, whatever other names allow.
    pub(super) read_only: bool,
}

struct Entry {
    identity: Identity,
    export: OpenExport,
    /// What could only be read, and may still have something to read.
    former: Option<OpenExport>,
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
    /// Opens once more what is open already, unless it is to be written and cannot be.
    pub(super) fn again(
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

    /// Takes a new open export in, by a label that no other store has. One of the same identity
    /// gives its place and its label to it: that could only be read, and those who do so read from
    /// the new one now.
    ///
    /// # Errors
    /// `EACCES` when they could not, since its blocks are larger; `ENOMEM`.
    pub(super) fn insert(
        &mut self,
        identity: Identity,
        mut export: OpenExport,
        exports: &Exports,
    ) -> Result<ExportId, Errno> {
        let found = self.entries.iter_mut().find(|(_, entry)| entry.identity == identity);
        if let Some((id, entry)) = found {
            let block = |export: &OpenExport| export.backend.limits().logical;
            if block(&export) > block(&entry.export) {
                return Err(Errno::EACCES);
            }
            entry.opens += 1;
            export.label = Arc::clone(&entry.export.label);
            entry.former = Some(std::mem::replace(&mut entry.export, export));
            return Ok(*id);
        }
        let id = ExportId(self.ids);
        self.ids = self.ids.checked_add(1).ok_or(Errno::ENOMEM)?;
        let traffic = Traffic::default();
        export.label = self.label(identity, &export.label, exports);
        self.entries.insert(id, Entry { identity, export, former: None, opens: 1, traffic });
        Ok(id)
    }

    /// Returns the label for a store that is being opened: the one wanted, or that with a number.
    /// Another file may have been given the name of one that is open, and what a client opens must
    /// not take the place of what another has open.
    fn label(&self, identity: Identity, wanted: &Arc<str>, exports: &Exports) -> Arc<str> {
        let taken = |label: &str| {
            let place = tree::plain(label);
            let mut all = self.entries.values();
            exports.offers_another(&place, identity)
                || all.any(|entry| tree::plain(&entry.export.label) == place)
        };
        let (mut label, mut number) = (Arc::clone(wanted), 1_u64);
        while taken(&label) {
            number += 1;
            label = format!("{wanted}~{number}").into();
        }
        label
    }

    /// Takes one open back. Returns what is open no longer: to let go of storage may mean to wait
    /// for its threads, so that is done with no locks held.
    #[must_use]
    pub(super) fn release(&mut self, id: ExportId) -> Vec<OpenExport> {
        let Some(entry) = self.entries.get_mut(&id) else { return Vec::new() };
        entry.opens = entry.opens.saturating_sub(1);
        if entry.opens > 0 {
            return Vec::new();
        }
        let gone = self.entries.remove(&id).into_iter();
        gone.flat_map(|entry| entry.former.into_iter().chain([entry.export])).collect()
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
