//! Memory of the program that the peer may write to.

use super::connection::Memory;
use super::wire::{Map, Region};

/// A mapping.
#[derive(Debug)]
pub(super) struct Given {
    /// Address and length as the program has them.
    pub(super) addr: u64,
    pub(super) len: usize,
    /// What the peer calls its first byte; `None`: it is not for the peer.
    pub(super) map: Option<(u8, Map)>,
    pub(super) memory: Memory,
}

/// The mappings of a socket.
#[derive(Debug, Default)]
pub(super) struct Maps(Vec<Given>);

impl Maps {
    /// The next free entry of the peer's table.
    pub(super) fn free_entry(&self, entries: u8) -> Option<u8> {
        (0..entries)
            .find(|entry| !self.0.iter().any(|given| given.map.is_some_and(|(at, _)| at == *entry)))
    }

    /// Tells whether the peer knows some of these offsets already.
    pub(super) fn overlaps(&self, offset: u64, len: u64) -> bool {
        self.0.iter().filter_map(|given| given.map).any(|(_, map)| {
            offset < map.offset + u64::from(map.region.len) && map.offset < offset + len
        })
    }

    pub(super) fn add(&mut self, given: Given) {
        self.0.push(given);
    }

    /// Takes out a mapping.
    pub(super) fn remove(&mut self, addr: u64, len: usize) -> Option<Given> {
        let at = self.0.iter().position(|given| given.addr == addr && given.len == len)?;
        Some(self.0.remove(at))
    }
}

/// The entry of a mapping.
pub(super) fn map(offset: u64, memory: &Memory, len: u32) -> Map {
    Map { offset, region: Region { addr: memory.buffer.addr(), key: memory.keys.rkey, len } }
}
