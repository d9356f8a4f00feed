//! What is known of the disks of a client: which have front ends, and how they were mapped.

use std::collections::{BTreeMap, BTreeSet};

use bowline_block::BlockDevice;
use bowline_rnbd_driver::client::{Disk, MapOptions};

use super::{FrontEndConfig, FrontEnds, FrontState};
use crate::disks::ending::Unserved;

/// Most disks whose front ends are remembered after they were unmapped.
const REMEMBERED_MAX: usize = 1024;

/// Identity of a disk, independent of its local name: its session, and its name on the server.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct DiskKey {
    pub(super) session: String,
    pub(super) device: String,
}

impl DiskKey {
    pub(super) fn of(disk: &Disk) -> Self {
        Self { session: disk.session_name().to_owned(), device: disk.name().to_owned() }
    }
}

#[derive(Default)]
pub(super) struct State {
    /// Disks that have had front ends, and those that they were given. A program that returns to
    /// such a path expects this disk, should it be unmapped and mapped again.
    pub(super) remembered: Vec<(DiskKey, Mapping)>,
    /// State of each disk's front ends, by its local name.
    pub(super) front_states: BTreeMap<String, FrontState>,
    /// Number of tree commands in progress that map or unmap disks.
    pub(super) commands: usize,
    /// There was such a command.
    pub(super) is_changed: bool,
    /// Disks that another process had before, which may have answered changes of them that no
    /// flush had made durable.
    pub(super) inherited: BTreeSet<DiskKey>,
    /// All disks are unmapped for good.
    pub(super) closed: bool,
    /// Number of disks whose missing front ends are tried again.
    pub(super) regaining: usize,
    /// What was not made durable of disks whose front ends were being opened then.
    pub(super) unserved: Unserved,
}

/// How a disk was mapped; a command that does not say more maps it so again.
#[derive(Clone, Debug)]
pub struct Mapping {
    /// Options but session and paths.
    pub options: MapOptions,
    /// Its front ends.
    pub front_ends: FrontEndConfig,
}

impl State {
    /// The front ends of a disk are not being opened any more, and not open either.
    pub(super) fn end_opening(&mut self, disk: &str) {
        if matches!(self.front_states.get(disk), Some(FrontState::Opening)) {
            self.front_states.remove(disk);
        }
    }

    /// Returns the front ends of a disk if they are open, and are to be.
    pub(super) fn open_of(&mut self, disk: &str) -> Option<&mut FrontEnds> {
        match self.front_states.get_mut(disk) {
            Some(FrontState::Open(front_ends)) if !self.closed => Some(front_ends),
            _ => None,
        }
    }

    pub(super) fn open(&self) -> impl Iterator<Item = (&String, &FrontEnds)> {
        self.front_states.iter().filter_map(|(name, front)| match front {
            FrontState::Open(front_ends) => Some((name, &**front_ends)),
            FrontState::Opening | FrontState::Closing => None,
        })
    }

    pub(super) fn remember(&mut self, disk: DiskKey, mapping: Mapping) {
        self.remembered.retain(|(known, _)| *known != disk);
        if self.remembered.len() == REMEMBERED_MAX {
            self.remembered.remove(0);
        }
        self.remembered.push((disk, mapping));
    }

    pub(super) fn recall(&self, disk: &DiskKey) -> Option<Mapping> {
        let known = self.remembered.iter().find(|(known, _)| known == disk);
        known.map(|(_, mapping)| mapping.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_comes_back_as_it_was_mapped() {
        let which = |session: &str, device: &str| DiskKey {
            session: session.into(),
            device: device.into(),
        };
        let at = |place: &str| Mapping {
            options: MapOptions::new("s"),
            front_ends: FrontEndConfig { nbd: Some(place.into()), ..FrontEndConfig::default() },
        };
        let mut state = State::default();
        state.remember(which("s1", "a"), at("/a"));
        state.remember(which("s1", "b"), at("/b"));
        state.remember(which("s1", "a"), at("/c"));
        let nbd = |state: &State, session, device| {
            state.recall(&which(session, device)).and_then(|mapping| mapping.front_ends.nbd)
        };
        assert_eq!(nbd(&state, "s1", "a"), Some("/c".into()));
        assert_eq!(nbd(&state, "s1", "b"), Some("/b".into()));
        assert_eq!(nbd(&state, "s2", "a"), None);
        for number in 0..REMEMBERED_MAX {
            state.remember(which("s3", &number.to_string()), at("/d"));
        }
        assert_eq!((state.remembered.len(), nbd(&state, "s1", "b")), (REMEMBERED_MAX, None));
    }
}
