//! Notices of paths given up with requests in flight. The server gets them before it gets these
//! requests over another path, so that it ends the path and late packets of it do no harm [RT-101].
//!
//! ```text
//!   incarnation up          notice on each of its connections, then the requests that move there
//!   INFO_REQ sent    notice on each of its connections when it is up
//!   before that      INFO_REQ names the path; INFO_RSP tells that it is over
//! ```

use bowline_verbs::Remote;
use bowline_wire::rtrs::{INFO_REQ_LEN, Imm, MAX_PATHS, PathLife, emit_given_up, emit_info_req};

use super::Session;
use super::incarnation::{HEARTBEAT_RESERVE, Phase};
use crate::{ConnId, PathId, Tag, WrKind};

impl Session {
    /// Gives notice of an incarnation that has ended with requests in flight, which move now.
    pub(super) fn give_notice(&mut self, inc_id: PathId) {
        let Some(incarnation) =
            self.incarnations.get(inc_id).filter(|incarnation| incarnation.inflight > 0)
        else {
            return;
        };
        let generation = incarnation.generation;
        self.given_up.push(generation);
        for id in self.incarnations.ids() {
            let Some(incarnation) =
                self.incarnations.get_mut(id).filter(|incarnation| incarnation.accepts_notice)
            else {
                continue;
            };
            if matches!(incarnation.phase, Phase::Info | Phase::Up) {
                incarnation.conns.iter_mut().for_each(|conn| conn.notices.push_back(generation));
                self.post_all_notices(id);
            }
        }
    }

    /// Posts the pending notices of all connections of an incarnation.
    pub(super) fn post_all_notices(&mut self, inc_id: PathId) {
        let conns =
            self.incarnations.get(inc_id).map_or(0, |incarnation| incarnation.conns.len() as u16);
        for cid in 0..conns {
            self.post_notices(ConnId { path: inc_id, cid });
        }
    }

    /// Posts notices as far as there is room. A request needs more room than a notice, so it cannot
    /// overtake pending notices; they are posted first when there is room.
    pub(super) fn post_notices(&mut self, conn: ConnId) {
        let Some(incarnation) = self.incarnations.get_mut(conn.path) else { return };
        // Earlier the server has no receives for notices.
        if !matches!(incarnation.phase, Phase::Up | Phase::Quiescing) {
            return;
        }
        let Some(of) = incarnation.conns.get_mut(usize::from(conn.cid)) else { return };
        while of.has_room(HEARTBEAT_RESERVE) {
            let Some(generation) = of.notices.pop_front() else { return };
            let start = self.batch.mems.len();
            let kind = WrKind::WriteImm(Remote::default(), Imm::GivenUp(generation).to_u32());
            of.post(&mut self.batch, conn, Tag::new(Tag::HEARTBEAT, 1), kind, start);
        }
    }

    /// Makes the INFO_REQ of an incarnation. It names the given-up incarnations, if the server
    /// accepts notices.
    pub(super) fn info_req(&mut self, inc_id: PathId) -> Vec<u8> {
        let mut info_req = Vec::with_capacity(INFO_REQ_LEN);
        info_req.extend(emit_info_req(&self.config.name));
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return info_req };
        incarnation.named = self.given_up.iter().take(MAX_PATHS).copied().collect();
        if incarnation.accepts_notice {
            emit_given_up(&incarnation.named, &mut info_req);
        }
        info_req
    }

    /// Forgets the given-up incarnations that INFO_REQ named: the server has dropped them before
    /// INFO_RSP. If the server does not accept notices, naming them again would be useless.
    pub(super) fn end_named(&mut self, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        let named: Vec<PathLife> = std::mem::take(&mut incarnation.named);
        self.given_up.retain(|generation| !named.contains(generation));
        self.post_all_notices(inc_id);
    }
}
