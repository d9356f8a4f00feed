//! Where the data of READs with keys of their own go: in disorder through other memory, if at all
//! directly, and to stay as they were when the READ ended.

use std::ops::Range;
use std::sync::Arc;

use bowline_rtrs::client::{ReadKeys, Session};
use bowline_rtrs::{MemRef, RegionId};
use bowline_verbs::{Access, Buffer};

use crate::rtrs::base::Base;

/// Most pieces of a scattered READ but the last.
const PIECES: usize = 100;

/// What a session's READs with keys of their own have brought.
#[derive(Debug)]
pub(super) struct Landings {
    /// Memory where scattered READs put their parts in disorder.
    region: RegionId,
    scatter: Arc<Buffer>,
    settled: Vec<Settled>,
}

/// Where the data of a READ goes that has keys of its own.
#[derive(Debug)]
pub(super) struct Landing {
    /// Where the program wants it.
    to: usize,
    len: usize,
    /// Places of its parts in other memory, if it goes there first.
    pub(super) pieces: Vec<MemRef>,
}

/// Memory that nobody may change any more.
#[derive(Debug)]
struct Settled {
    at: usize,
    /// In the memory for scattered READs.
    scattered: bool,
    bytes: Vec<u8>,
}

impl Landings {
    /// Memory as long as the program's.
    pub(super) fn new(session: &mut Session, len: usize) -> Result<Self, String> {
        let scatter = Arc::new(Buffer::new(len).map_err(|e| format!("memory: {e}"))?);
        let region = session.add_region(Arc::clone(&scatter), Access::LOCAL_WRITE);
        Ok(Self { region, scatter, settled: Vec::new() })
    }

    /// Decides where the data of a READ into `data` go; so `often` of a thousand they are
    /// scattered. `None`: under the key of the program's memory.
    pub(super) fn choose(
        &self,
        base: &mut Base,
        often: u64,
        keys: ReadKeys,
        data: &MemRef,
    ) -> Option<Landing> {
        let pieces = self.scatter(base, often, data);
        let own_key = !pieces.is_empty() || keys == ReadKeys::PerRequest;
        let (to, len) = (data.offset as usize, data.len as usize);
        own_key.then_some(Landing { to, len, pieces })
    }

    /// Cuts a stretch into parts that lie in disorder at the same place of other memory; none: it
    /// is left whole.
    fn scatter(&self, base: &mut Base, often: u64, data: &MemRef) -> Vec<MemRef> {
        if often == 0 || !base.extra.chance(often) || data.len < 2 {
            return Vec::new();
        }
        base.stats.scattered += 1;
        let region = self.region;
        let mut pieces = Vec::new();
        let mut left = data.len;
        while left > 0 && pieces.len() < PIECES {
            // Two at least.
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

    /// Takes what a READ with keys of its own has brought to where the program wants it.
    pub(super) fn land(&mut self, buffer: &Buffer, landing: Landing) {
        let Landing { to, len, pieces } = landing;
        let mut at = to;
        for piece in &pieces {
            self.scatter.copy_to(piece.offset as usize, buffer, at, piece.len as usize);
            at += piece.len as usize;
        }
        let scattered = !pieces.is_empty();
        let mut bytes = Vec::new();
        if scattered { &self.scatter } else { buffer }.append_to(to, len, &mut bytes);
        self.settled.push(Settled { at: to, scattered, bytes });
    }

    /// The program uses a part of its memory again: what was read there was its own to the end.
    pub(super) fn reuse(&mut self, buffer: &Buffer, part: Range<usize>) -> Result<(), String> {
        for Settled { at, scattered, bytes } in
            self.settled.extract_if(.., |settled| part.contains(&settled.at))
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
