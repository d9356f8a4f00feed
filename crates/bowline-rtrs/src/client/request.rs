//! Requests: submission, the choice of a path, and the end [RT-37] to [RT-43], [RS-20] to [RS-23].

use bowline_verbs::{Access, Remote};
use bowline_wire::rtrs::{
    Desc, Dir, Geometry, Imm, READ_HDR_MAX, WRITE_HDR_LEN, read_hdr, write_hdr,
};

use super::keys::{Grant, PIECES_MAX, join};
use super::link::{HEARTBEAT_RESERVE, Phase};
use super::session::{Completed, Life};
use super::{PathState, Permit, PermitKind, Session};
use crate::{ConnId, Errno, Instant, MemRef, PathId, Policy, PortAttr, Tag, WrKind};

/// Bytes of a READ header without a descriptor.
const READ_HDR_MIN: u32 = 8;
/// Most elements of a gather list, the header's included.
const GATHER_MAX: usize = 129;

/// What became of a request on a path.
enum Taken {
    /// It is in flight.
    Yes,
    /// The path is not connected.
    No,
    /// Another path may take it.
    Error(Errno),
    /// No path will.
    Nowhere(Errno),
}

/// What a permit is used for.
#[derive(Debug)]
pub(super) struct Request {
    /// It is in flight.
    pub(super) running: bool,
    /// Its permit was given back before it ended.
    pub(super) put: bool,
    /// The link and connection it is on.
    pub(super) link: PathId,
    pub(super) cid: u16,
    dir: Dir,
    kind: PermitKind,
    /// The processor its permit was taken on.
    pub(super) cpu: u16,
    usr_len: u16,
    data_len: u32,
    pub(super) data: Vec<MemRef>,
    /// It is a READ with a key of its own.
    pub(super) fast: bool,
    pub(super) grant: Grant,
    /// It was answered so, and its key is being invalidated.
    pub(super) answered: Option<i32>,
    /// It was on a link that is gone: the server may carry it out still.
    pub(super) moved: bool,
    tag: u64,
    at: Instant,
}

impl Request {
    pub(super) const fn new() -> Self {
        Self {
            running: false,
            put: false,
            link: PathId { slot: 0, life: 0 },
            cid: 0,
            dir: Dir::Read,
            kind: PermitKind::Io,
            cpu: 0,
            usr_len: 0,
            data_len: 0,
            data: Vec::new(),
            fast: false,
            grant: Grant::None,
            answered: None,
            moved: false,
            tag: 0,
            at: Instant::from_nanos(0),
        }
    }

    /// Bytes of the header behind the user message.
    const fn hdr_len(&self) -> u32 {
        match self.dir {
            Dir::Write => WRITE_HDR_LEN as u32,
            Dir::Read if self.data_len > 0 => READ_HDR_MAX as u32,
            Dir::Read => READ_HDR_MIN,
        }
    }

    /// Tells whether its data goes before its header, in a message of its own, on a device that
    /// likes that: if both do not fit one packet. As two, the data of many requests leaves with one
    /// call and their headers with another, or data and header as packets of one size, as
    /// [`bind`](crate::bind) knows best. The server sees the same chunk when the immediate arrives
    /// [RT-97].
    const fn is_split(&self, device: &PortAttr) -> bool {
        let all = self.data_len.saturating_add(self.usr_len as u32 + self.hdr_len());
        matches!(self.dir, Dir::Write) && self.data_len > 0 && device.takes_two(all)
    }

    /// Tells whether it fits a chunk. The descriptor of a READ counts [RT-40].
    fn fits(&self, geometry: &Geometry) -> bool {
        let all = u64::from(self.data_len) + u64::from(self.usr_len) + u64::from(self.hdr_len());
        all <= u64::from(geometry.chunk()) && self.data_len <= geometry.max_io()
    }
}

impl Session {
    /// Submits a request. `usr` is copied. Of a WRITE, `data` is what is sent; of a READ, where the
    /// answer goes: memory the peer may write, unless it is given a key for this request alone
    /// ([`ReadKeys`](super::ReadKeys)), as it always is for pieces that do not follow each other in
    /// memory. They may have any length and begin anywhere. After `Ok` exactly one [`Completed`]
    /// with `tag` follows; the server does not reach memory under a key of the request after it
    /// [RT-69].
    ///
    /// # Errors
    /// [`Errno::ECONNABORTED`] when no path is connected; [`Errno::EMSGSIZE`] when it is too long
    /// for the server, or the user message for the session
    /// ([`ClientConfig::max_usr`](super::ClientConfig::max_usr)); [`Errno::EINVAL`] when the memory
    /// is not good for it, when a READ has more pieces than
    /// [`Attrs::max_read_segments`](super::Attrs::max_read_segments), since it has one descriptor
    /// only [RT-12], or when the permit is not this session's; [`Errno::EBUSY`] when the permit's
    /// request is in flight still [RT-59].
    pub fn request(
        &mut self,
        now: Instant,
        dir: Dir,
        permit: &Permit,
        usr: &[u8],
        data: &[MemRef],
        tag: u64,
    ) -> Result<(), Errno> {
        if permit.owner != self.owner || !self.permits.is_out(permit.index) {
            return Err(Errno::EINVAL);
        }
        if !matches!(self.life, Life::Open) || self.up == 0 {
            return Err(Errno::ECONNABORTED);
        }
        let index = usize::from(permit.index);
        let request = self.requests.get_mut(index).ok_or(Errno::EINVAL)?;
        if request.running {
            return Err(Errno::EBUSY);
        }
        request.data.clear();
        request.data.extend(data.iter().filter(|piece| piece.len > 0));
        join(&mut request.data);
        let count = request.data.len();
        let fast = self.is_fast(dir, count);
        let access = match dir {
            Dir::Write => Access::empty(),
            Dir::Read if fast => Access::LOCAL_WRITE,
            Dir::Read => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        };
        let pieces = self.requests[index].data.iter();
        let data_len = pieces.into_iter().try_fold(0_u32, |sum, piece| {
            let allowed = self.regions.allows(piece, access);
            sum.checked_add(piece.len).filter(|_| allowed)
        });
        let data_len = data_len.ok_or(Errno::EINVAL)?;
        if dir == Dir::Read && count > PIECES_MAX {
            return Err(Errno::EINVAL);
        }
        let headers = self.headers.as_ref().ok_or(Errno::ECONNABORTED)?;
        let request = &mut self.requests[index];
        let usr_len = u16::try_from(usr.len()).map_err(|_| Errno::EMSGSIZE)?;
        if usr.len() + READ_HDR_MAX > headers.slot as usize {
            return Err(Errno::EMSGSIZE);
        }
        headers.buffer.write(index * headers.slot as usize, usr);
        request.dir = dir;
        request.kind = permit.kind;
        request.usr_len = usr_len;
        request.data_len = data_len;
        request.fast = fast;
        request.answered = None;
        request.moved = false;
        request.tag = tag;
        request.at = now;
        self.submit(permit.index)?;
        // Its memory stays registered until it ends, also when it moves to another path.
        let data = std::mem::take(&mut self.requests[index].data);
        self.use_regions(&data);
        self.requests[index].data = data;
        Ok(())
    }

    /// Puts a request on a path, the next one if one does not take it [RS-20].
    pub(super) fn submit(&mut self, index: u16) -> Result<PathId, Errno> {
        let mut tried = 0_u128;
        let mut result = Errno::ECONNABORTED;
        let cpu = self.requests[usize::from(index)].cpu;
        let mut attempts = 0;
        while let Some(at) = self.next_path(cpu, tried) {
            if attempts >= self.list.len() {
                break;
            }
            attempts += 1;
            tried |= 1 << at.min(127);
            let id = self.list[at];
            match self.submit_on(id, index) {
                Taken::Yes => return Ok(id),
                Taken::No => {}
                Taken::Error(errno) => result = errno,
                Taken::Nowhere(errno) => return Err(errno),
            }
        }
        Err(result)
    }

    /// Chooses a path: its place in the list. Those of `tried` are not taken again, where the
    /// policy remembers.
    fn next_path(&mut self, cpu: u16, tried: u128) -> Option<usize> {
        let policy = self.config.policy;
        if policy == Policy::RoundRobin {
            return self.round_robin(cpu);
        }
        let mut best: Option<(u64, usize)> = None;
        for (at, id) in self.list.iter().enumerate() {
            let Some(path) = self.paths.get(*id).filter(|p| p.state == PathState::Connected) else {
                continue;
            };
            let Some(link) = path.link.and_then(|link| self.links.get(link)) else { continue };
            let key = match policy {
                Policy::MinLatency => u64::try_from(path.latency.as_nanos()).unwrap_or(u64::MAX),
                Policy::MinInflight | Policy::RoundRobin => u64::from(link.inflight),
            };
            if tried >> at.min(127) & 1 == 0 && best.is_none_or(|(least, _)| key < least) {
                best = Some((key, at));
            }
        }
        best.map(|(_, at)| at)
    }

    /// The path after the last one of this processor; the place is remembered also when the path is
    /// not connected [RS-21].
    fn round_robin(&mut self, cpu: u16) -> Option<usize> {
        if self.list.is_empty() {
            return None;
        }
        let cpu = usize::from(cpu % 1024);
        if self.last_path.len() <= cpu {
            self.last_path.resize(cpu + 1, None);
        }
        let last = self.last_path[cpu].and_then(|id| self.list.iter().position(|&at| at == id));
        let at = last.map_or(0, |last| (last + 1) % self.list.len());
        self.last_path[cpu] = Some(self.list[at]);
        Some(at)
    }

    /// Puts a request on this path, if it is connected [RS-2].
    fn submit_on(&mut self, id: PathId, index: u16) -> Taken {
        let path = self.paths.get_mut(id).filter(|path| path.state == PathState::Connected);
        let Some(path) = path else { return Taken::No };
        let link = path.link.and_then(|id| Some((id, self.links.get_mut(id)?)));
        let Some((lid, link)) = link.filter(|(_, link)| link.phase == Phase::Up) else {
            return Taken::No;
        };
        let Some(geometry) = link.geometry else { return Taken::No };
        let request = &mut self.requests[usize::from(index)];
        if u32::from(request.usr_len) + request.hdr_len() > geometry.max_hdr() {
            return Taken::Nowhere(Errno::EMSGSIZE);
        }
        if !request.fits(&geometry) {
            return Taken::Error(Errno::EMSGSIZE);
        }
        let device = self.ports.get(usize::from(link.port.0));
        let sges = device.map_or(0, |port| port.max_sge);
        if request.dir == Dir::Write && request.data.len() + 1 > sges.min(GATHER_MAX) {
            return Taken::Error(Errno::EINVAL);
        }
        if request.fast {
            if let Err(errno) = link.want_keys(lid, device, &mut self.orders) {
                return Taken::Error(errno);
            }
        } else if let (Dir::Read, Some(piece)) = (request.dir, request.data.first()) {
            let keys = self.regions.get(piece.region).map(|region| region.keys(link.port));
            if keys.is_none_or(|keys| keys.is_err()) {
                return Taken::Error(Errno::EINVAL);
            }
        }
        let (io, polled) = (self.config.io_connections, self.config.poll_connections);
        request.cid = match request.kind {
            PermitKind::Service => 0,
            PermitKind::Polled if polled > 0 => request.cpu % polled + io + 1,
            PermitKind::Io | PermitKind::Polled => {
                request.cpu.checked_rem(io).map_or(0, |cid| cid + 1)
            }
        };
        request.link = lid;
        request.running = true;
        path.stats.posted(request.dir, u64::from(request.usr_len) + u64::from(request.data_len));
        link.inflight += 1;
        let conn = &mut link.conns[usize::from(request.cid)];
        conn.inflight += 1;
        let extra = u32::from(request.fast);
        if conn.waiting.is_empty()
            && conn.has_room(HEARTBEAT_RESERVE + 1)
            && conn.inflight + conn.granted + extra <= conn.recvs
            && (!request.fast || link.keys.is_ready())
        {
            self.post(index);
        } else {
            conn.waiting.push_back(index);
        }
        Taken::Yes
    }

    /// Posts a request on the connection chosen for it: one write of data, user message and header,
    /// whose immediate names the chunk and where the header begins [RT-38], [RT-39]. Data may go
    /// before it, see [`Request::is_split`].
    fn post(&mut self, index: u16) {
        let mut own_key = None;
        if self.requests[usize::from(index)].fast {
            own_key = self.grant(index);
            debug_assert!(own_key.is_some(), "posted without a key");
        }
        let request = &self.requests[usize::from(index)];
        let (Some(link), Some(headers)) = (self.links.get_mut(request.link), &self.headers) else {
            return;
        };
        let (Some(geometry), Some(&(addr, rkey))) =
            (link.geometry, link.chunks.get(usize::from(index)))
        else {
            return;
        };
        let slot_at = u64::from(index) * u64::from(headers.slot);
        let hdr_at = slot_at as usize + usize::from(request.usr_len);
        let mut start = self.batch.mems.len();
        let mut addr = addr;
        let conn = ConnId { path: request.link, cid: request.cid };
        let tag = Tag::new(Tag::IO, u32::from(index));
        let device = self.ports.get(usize::from(link.port.0));
        let of = &mut link.conns[usize::from(request.cid)];
        match request.dir {
            Dir::Write => {
                self.batch.mems.extend_from_slice(&request.data);
                headers.buffer.write(hdr_at, &write_hdr(request.usr_len));
                if device.is_some_and(|device| request.is_split(device)) {
                    let to = WrKind::Write(Remote { addr, rkey });
                    of.post_unsignalled(&mut self.batch, conn, tag, to, start);
                    start = self.batch.mems.len();
                    addr = addr.wrapping_add(u64::from(request.data_len));
                }
            }
            Dir::Read => {
                let own = own_key.map(|key| Desc { addr: 0, key, len: request.data_len });
                let desc = own.or_else(|| {
                    let piece = request.data.first()?;
                    let keys = self.regions.get(piece.region)?.keys(link.port).ok()?;
                    let addr = keys.addr.wrapping_add(piece.offset);
                    Some(Desc { addr, key: keys.rkey, len: piece.len })
                });
                let mut hdr = [0; READ_HDR_MAX];
                let len = read_hdr(request.usr_len, own.is_some(), desc, &mut hdr);
                headers.buffer.write(hdr_at, &hdr[..len]);
                addr = addr.wrapping_add(u64::from(request.data_len));
            }
        }
        let len = u32::from(request.usr_len) + request.hdr_len();
        self.batch.mems.push(MemRef { region: headers.region, offset: slot_at, len });
        let off = request.data_len + u32::from(request.usr_len);
        let imm = Imm::Request(geometry.request_payload(index, off)).to_u32();
        let kind = WrKind::WriteImm(Remote { addr, rkey }, imm);
        of.post(&mut self.batch, conn, tag, kind, start);
    }

    /// Posts what waited for room on a connection. On a link that ends nothing is posted any more:
    /// what waits moves with the rest when the queues are empty.
    pub(super) fn post_waiting(&mut self, conn: ConnId) {
        if self.links.get(conn.path).is_none_or(|link| !link.is_live()) {
            return;
        }
        self.post_notices(conn);
        self.post_revocations(conn);
        loop {
            let Some(link) = self.links.get_mut(conn.path) else { return };
            let Some(of) = link.conns.get_mut(usize::from(conn.cid)) else { return };
            let Some(&index) = of.waiting.front() else { return };
            let fast = self.requests[usize::from(index)].fast;
            let posted = of.inflight - of.waiting.len() as u32 + of.granted;
            if !of.has_room(HEARTBEAT_RESERVE + 1)
                || posted + u32::from(fast) >= of.recvs
                || fast && !link.keys.is_ready()
            {
                return;
            }
            of.waiting.pop_front();
            self.post(index);
        }
    }

    /// A request has left its link, to end or to move.
    pub(super) fn leave_link(&mut self, index: u16) {
        let request = &mut self.requests[usize::from(index)];
        request.running = false;
        if let Some(link) = self.links.get_mut(request.link) {
            link.inflight -= 1;
            self.look_quiet |= link.phase == Phase::Quiet && link.inflight == 0;
            let conn = &mut link.conns[usize::from(request.cid)];
            conn.inflight -= 1;
            conn.granted -= u32::from(request.grant != Grant::None);
        }
        request.grant = Grant::None;
    }

    /// Ends a request that has left its link: the program hears of it.
    pub(super) fn end_request(&mut self, now: Instant, index: u16, errno: i32) {
        let request = &mut self.requests[usize::from(index)];
        let path = self.links.get(request.link).and_then(|link| link.path);
        if let Some(path) = path.and_then(|path| self.paths.get_mut(path)) {
            let took = now.saturating_since(request.at);
            path.stats.completed(request.dir, took, request.cpu, self.cpu);
        }
        self.completed.push(Completed { tag: request.tag, errno });
        let put = std::mem::take(&mut request.put);
        let mut data = std::mem::take(&mut request.data);
        for piece in data.drain(..) {
            let gone = self.regions.release(piece.region);
            self.order_drop(gone);
        }
        self.requests[usize::from(index)].data = data;
        if put {
            self.free_permit(index);
        }
    }
}
