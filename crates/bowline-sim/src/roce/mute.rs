//! Queue pairs of a device that no longer does what it is told, and says nothing: what is asked of
//! them is not done though it seems to be, and nothing of them completes. What they had begun goes
//! on, until they are removed. Only the peer gets nothing done any more by one that was told to
//! fail: memory that a device still changes after that no protocol could give to others.

use std::collections::{BTreeMap, BTreeSet};

use bowline_verbs::{CmId, Completion, Qpn};

/// The queue pairs of a device, and those that are mute.
#[derive(Debug, Default)]
pub(crate) struct Mutes {
    all: BTreeSet<Qpn>,
    conns: BTreeMap<CmId, Qpn>,
    mute: BTreeSet<Qpn>,
    /// Those of the mute that were told to fail.
    failed: BTreeSet<Qpn>,
    /// Completions that nobody was given.
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

    /// All that are there fall mute; returns how many there are.
    pub(crate) fn fall_mute(&mut self) -> usize {
        self.mute = self.all.clone();
        self.mute.len()
    }

    pub(crate) fn is_mute(&self, qpn: Qpn) -> bool {
        self.mute.contains(&qpn)
    }

    /// A queue pair is told to fail; tells whether it is mute.
    pub(crate) fn told_to_fail(&mut self, qpn: Qpn) -> bool {
        let mute = self.is_mute(qpn);
        if mute {
            self.failed.insert(qpn);
        }
        mute
    }

    /// Tells whether a packet is for a queue pair that takes none any more.
    pub(crate) fn ignores(&self, packet: &[u8]) -> bool {
        let to = packet.get(5..8).map_or(0, |b| u32::from_be_bytes([0, b[0], b[1], b[2]]));
        self.failed.contains(&Qpn(to))
    }

    pub(crate) fn is_mute_id(&self, id: CmId) -> bool {
        self.conns.get(&id).is_some_and(|qpn| self.is_mute(*qpn))
    }

    /// Takes away what nobody is to be given; what was held for one that is removed comes late.
    pub(crate) fn sift(&mut self, completions: &mut Vec<Completion>) {
        let Self { mute, held, .. } = self;
        let is_mute = |one: &mut Completion| mute.contains(&one.qpn);
        let mut late: Vec<_> = held.extract_if(.., |one| !is_mute(one)).collect();
        held.extend(completions.extract_if(.., is_mute));
        late.append(completions);
        *completions = late;
    }
}
