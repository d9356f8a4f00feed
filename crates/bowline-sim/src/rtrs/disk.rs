//! The server's storage: contents, durable contents, and limits.

use std::sync::Arc;

use bowline_rnbd::{Discard, IoOp, Limits};
use bowline_verbs::Buffer;

use super::oracle::SECTOR;
use super::plan::DiskPlan;
use crate::engine::rng::Rng;

/// A disk.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) plan: DiskPlan,
    /// The contents that reads return.
    pub(crate) contents: Arc<Buffer>,
    /// The contents that survive the machine's death.
    platter: Vec<u8>,
}

impl Disk {
    pub(crate) fn new(plan: DiskPlan) -> Result<Self, String> {
        let bytes = plan.sectors as usize * SECTOR;
        let contents = Buffer::new(bytes).map_err(|e| format!("a disk: {e}"))?;
        Ok(Self { plan, contents: Arc::new(contents), platter: vec![0; bytes] })
    }

    pub(crate) fn limits(&self) -> Limits {
        let bytes = self.plan.sectors * SECTOR as u64;
        let logical = self.plan.logical;
        let discard = Discard { max_bytes: bytes, granularity: logical, alignment: 0 };
        Limits {
            logical,
            discard: Some(discard),
            max_write_zeroes: bytes as u32,
            write_cache: self.plan.cache,
            fua: self.plan.fua,
            ..Limits::plain(bytes)
        }
    }

    fn read_contents(&self) -> Vec<u8> {
        let mut all = vec![0; self.contents.len()];
        self.contents.read(0, &mut all);
        all
    }

    /// Carries out an operation without data.
    pub(crate) fn carry_out(&mut self, op: IoOp, offset: u64, len: u32, rng: &mut Rng) {
        let (at, len) = (offset as usize, len as usize);
        match op {
            IoOp::WriteZeroes => self.write(offset, &vec![0; len], false),
            // A discard may have no effect.
            IoOp::Discard if rng.chance(500) => self.write(offset, &vec![0; len], false),
            IoOp::Discard | IoOp::SecureErase | IoOp::Read | IoOp::Write => {}
            IoOp::Flush => self.platter = self.read_contents(),
        }
        debug_assert!(at + len <= self.platter.len(), "checked by the server");
    }

    /// Writes to the contents, and with `fua` to the durable contents.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8], fua: bool) {
        self.contents.write(offset as usize, bytes);
        if fua || !self.plan.cache {
            self.platter[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Simulates the machine's death: some sectors that were not flushed are lost.
    pub(crate) fn crash(&mut self, rng: &mut Rng) {
        let mut all = self.read_contents();
        for (new, old) in all.chunks_mut(SECTOR).zip(self.platter.chunks_mut(SECTOR)) {
            if new != old && rng.chance(500) {
                new.copy_from_slice(old);
            }
        }
        self.platter.clone_from(&all);
        // Other memory than before, as after a restart.
        if let Ok(contents) = Buffer::new(all.len()) {
            contents.write(0, &all);
            self.contents = Arc::new(contents);
        }
    }
}
