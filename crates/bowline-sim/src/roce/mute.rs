//! Queue pairs of a mute device: it accepts requests without carrying them out, and reports no
//! completion. Requests begun before go on until the queue pair is removed. Only a queue pair moved
//! to the error state takes no more packets of the peer: no protocol could reuse memory that a
//! device still changes after that.

use std::collections::{BTreeMap, BTreeSet};

use bowline_verbs::{CmId, Completion, Qpn};

/// The queue pairs of a device, and which of them are mute.
#[derive(Debug, Default)]
pub(crate) struct Mutes {
    all: BTreeSet<Qpn>,
    conns: BTreeMap<CmId, Qpn>,
    mute: BTreeSet<Qpn>,
    /// Mute queue pairs that were moved to the error state.
    failed: BTreeSet<Qpn>,
    /// Completions that were withheld.
    held: Vec<Completion>,
}

impl Mutes {
    pub(crate) fn made(&mut self, qpn: Qpn) {
        self.all.insert(qpn);
    }

    pub(crate) fn connected(&mut self, id: CmId, qpn: Qpn) {
        self.conns.insert(id, qpn);
    }

    pub(crate) fn removed(&mut self, qpn: Qpn) {
        self.all.remove(&qpn);
        self.mute.remove(&qpn);
        self.failed.remove(&qpn);
    }

    pub(crate) fn forgotten(&mut self, id: CmId) {
        self.conns.remove(&id);
    }

    /// Makes all present queue pairs mute; returns their number.
    pub(crate) fn fall_mute(&mut self) -> usize {
        self.mute = self.all.clone();
        self.mute.len()
    }

    pub(crate) fn is_mute(&self, qpn: Qpn) -> bool {
        self.mute.contains(&qpn)
    }

    /// Notes that a queue pair was moved to the error state; tells whether it is mute.
    pub(crate) fn moved_to_error(&mut self, qpn: Qpn) -> bool {
        let mute = self.is_mute(qpn);
        if mute {
            self.failed.insert(qpn);
        }
        mute
    }

    /// Tells whether a packet is for a queue pair that takes no more packets.
    pub(crate) fn ignores(&self, packet: &[u8]) -> bool {
        let to = packet.get(5..8).map_or(0, |b| u32::from_be_bytes([0, b[0], b[1], b[2]]));
        self.failed.contains(&Qpn(to))
    }

    pub(crate) fn is_mute_id(&self, id: CmId) -> bool {
        self.conns.get(&id).is_some_and(|qpn| self.is_mute(*qpn))
    }

    /// Removes completions of mute queue pairs. Completions withheld for a removed queue pair come
    /// late.
    pub(crate) fn withhold_completions(&mut self, completions: &mut Vec<Completion>) {
        let Self { mute, held, .. } = self;
        let is_mute = |one: &mut Completion| mute.contains(&one.qpn);
        let mut late: Vec<_> = held.extract_if(.., |one| !is_mute(one)).collect();
        held.extend(completions.extract_if(.., is_mute));
        late.append(completions);
        *completions = late;
    }
}
