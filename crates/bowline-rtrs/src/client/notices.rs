//! Paths that are given up with requests in flight: the server is told, before it gets these
//! requests in any other way, so that it ends the path and nothing of it that is late does harm
//! [RT-101].
//!
//! ```text
//!   link up          notice on each of its connections, then the requests that move there
//!   INFO_REQ sent    notice on each of its connections when it is up
//!   before that      INFO_REQ names the path; INFO_RSP tells that it is over
//! ```

use bowline_verbs::Remote;
use bowline_wire::rtrs::{INFO_REQ_LEN, Imm, MAX_PATHS, PathLife, emit_given_up, emit_info_req};

use super::Session;
use super::link::{HEARTBEAT_RESERVE, Phase};
use crate::{ConnId, PathId, Tag, WrKind};

impl Session {
    /// A link has ended with requests in flight, which move now.
    pub(super) fn give_notice(&mut self, lid: PathId) {
        let Some(link) = self.links.get(lid).filter(|link| link.inflight > 0) else { return };
        let life = link.life;
        self.given_up.push(life);
        for id in self.links.ids() {
            let Some(link) = self.links.get_mut(id).filter(|link| link.heeds_notice) else {
                continue;
            };
            if matches!(link.phase, Phase::Info | Phase::Up) {
                link.conns.iter_mut().for_each(|conn| conn.notices.push_back(life));
                self.post_all_notices(id);
            }
        }
    }

    /// Posts the notices of all connections of a link.
    pub(super) fn post_all_notices(&mut self, lid: PathId) {
        let conns = self.links.get(lid).map_or(0, |link| link.conns.len() as u16);
        for cid in 0..conns {
            self.post_notices(ConnId { path: lid, cid });
        }
    }

    /// Posts the notices for which there is room. A request needs more, so it does not go before
    /// those that are left, and when room comes they are first.
    pub(super) fn post_notices(&mut self, conn: ConnId) {
        let Some(link) = self.links.get_mut(conn.path) else { return };
        // Before that the server has no receives for them.
        if !matches!(link.phase, Phase::Up | Phase::Quiet) {
            return;
        }
        let Some(of) = link.conns.get_mut(usize::from(conn.cid)) else { return };
        while of.has_room(HEARTBEAT_RESERVE) {
            let Some(life) = of.notices.pop_front() else { return };
            let start = self.batch.mems.len();
            let kind = WrKind::WriteImm(Remote::default(), Imm::GivenUp(life).to_u32());
            of.post(&mut self.batch, conn, Tag::new(Tag::HEARTBEAT, 1), kind, start);
        }
    }

    /// INFO_REQ of a link, with the paths that are given up, if the server heeds it.
    pub(super) fn info_req(&mut self, lid: PathId) -> Vec<u8> {
        let mut info_req = Vec::with_capacity(INFO_REQ_LEN);
        info_req.extend(emit_info_req(&self.config.name));
        let Some(link) = self.links.get_mut(lid) else { return info_req };
        link.named = self.given_up.iter().take(MAX_PATHS).copied().collect();
        if link.heeds_notice {
            emit_given_up(&link.named, &mut info_req);
        }
        info_req
    }

    /// A link is up. Of the paths its INFO_REQ named the server has nothing any more; one that does
    /// not heed it need not be told again.
    pub(super) fn end_named(&mut self, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        let named: Vec<PathLife> = std::mem::take(&mut link.named);
        self.given_up.retain(|life| !named.contains(life));
        self.post_all_notices(lid);
    }
}
