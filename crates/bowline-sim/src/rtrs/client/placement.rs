//! Placement of the data of READs with keys for single requests. Scattered READs go to other memory
//! in disorder first. The results must not change after the READ has ended.

use std::ops::Range;
use std::sync::Arc;

use bowline_rtrs::client::{ReadKeys, Session};
use bowline_rtrs::{MemRef, RegionId};
use bowline_verbs::{Access, Buffer};

use crate::rtrs::context::Base;

/// Most pieces of a scattered READ, not counting the last one.
const PIECES: usize = 100;

/// The scatter memory of a session, and results that must not change any more.
#[derive(Debug)]
pub(super) struct Placements {
    /// Memory where scattered READs put their parts in disorder.
    region: RegionId,
    scatter: Arc<Buffer>,
    finished: Vec<FinishedRead>,
}

/// The placement of one READ with a key for that request.
#[derive(Debug)]
pub(super) struct Placement {
    /// Offset of the data in the program's memory.
    to: usize,
    len: usize,
    /// Pieces in the scatter memory, in the order of the data; empty: the data goes to the
    /// program's memory directly.
    pub(super) pieces: Vec<MemRef>,
}

/// The result of a finished READ, which nobody may change any more.
#[derive(Debug)]
struct FinishedRead {
    at: usize,
    /// The result is in the scatter memory.
    scattered: bool,
    bytes: Vec<u8>,
}

impl Placements {
    /// Allocates scatter memory as long as the program's memory.
    pub(super) fn new(session: &mut Session, len: usize) -> Result<Self, String> {
        let scatter = Arc::new(Buffer::new(len).map_err(|e| format!("memory: {e}"))?);
        let region = session.add_region(Arc::clone(&scatter), Access::LOCAL_WRITE);
        Ok(Self { region, scatter, finished: Vec::new() })
    }

    /// Chooses the placement of a READ into `data`; `permille` of a thousand are scattered. `None`:
    /// the READ uses the key of the program's memory.
    pub(super) fn choose(
        &self,
        base: &mut Base,
        often: u64,
        keys: ReadKeys,
        data: &MemRef,
    ) -> Option<Placement> {
        let pieces = self.scatter(base, often, data);
        let own_key = !pieces.is_empty() || keys == ReadKeys::PerRequest;
        let (to, len) = (data.offset as usize, data.len as usize);
        own_key.then_some(Placement { to, len, pieces })
    }

    /// Cuts a range into pieces in disorder, at the same offsets in the scatter memory; empty if
    /// the range is not scattered.
    fn scatter(&self, base: &mut Base, often: u64, data: &MemRef) -> Vec<MemRef> {
        if often == 0 || !base.extra.chance(often) || data.len < 2 {
            return Vec::new();
        }
        base.stats.scattered += 1;
        let region = self.region;
        let mut pieces = Vec::new();
        let mut left = data.len;
        while left > 0 && pieces.len() < PIECES {
            // At least two pieces.
            let most = u64::from(left) - u64::from(pieces.is_empty());
            let len = 1 + base.extra.below(most) as u32;
            left -= len;
            pieces.push(MemRef { region, offset: data.offset + u64::from(left), len });
        }
        if left > 0 {
            pieces.push(MemRef { region, offset: data.offset, len: left });
        }
        pieces
    }

    /// Copies the data of a finished READ to the program's memory, and remembers the result.
    pub(super) fn finish(&mut self, buffer: &Buffer, placement: Placement) {
        let Placement { to, len, pieces } = placement;
        let mut at = to;
        for piece in &pieces {
            self.scatter.copy_to(piece.offset as usize, buffer, at, piece.len as usize);
            at += piece.len as usize;
        }
        let scattered = !pieces.is_empty();
        let mut bytes = Vec::new();
        if scattered { &self.scatter } else { buffer }.append_to(to, len, &mut bytes);
        self.finished.push(FinishedRead { at: to, scattered, bytes });
    }

    /// Checks, before the program reuses a part of its memory, that nobody has changed the results
    /// there.
    pub(super) fn reuse(&mut self, buffer: &Buffer, part: Range<usize>) -> Result<(), String> {
        for FinishedRead { at, scattered, bytes } in
            self.finished.extract_if(.., |finished| part.contains(&finished.at))
        {
            let mut now = vec![0; bytes.len()];
            if scattered { &self.scatter } else { buffer }.read(at, &mut now);
            if now != bytes {
                return Err(format!("memory at {at} has changed after the READ"));
            }
        }
        Ok(())
    }
}
