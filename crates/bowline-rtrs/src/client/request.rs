//! Requests: submission, the choice of a path, and completion [RT-37] to [RT-43], [RS-20] to
//! [RS-23].

use bowline_verbs::{Access, Remote};
use bowline_wire::rtrs::{
    Desc, Dir, Geometry, Imm, READ_HDR_MAX, WRITE_HDR_LEN, read_hdr, write_hdr,
};

use super::incarnation::{HEARTBEAT_RESERVE, Phase};
use super::keys::{OwnKey, PIECES_MAX, join};
use super::session::{Completed, SessionState};
use super::{PathState, Permit, PermitKind, Session};
use crate::{ConnId, Errno, Instant, MemRef, PathId, Policy, PortAttr, Tag, WrKind};

/// Bytes of a READ header without a descriptor.
const READ_HDR_MIN: u32 = 8;
/// Most elements of a gather list, the header's included.
const GATHER_MAX: usize = 129;

/// The result of submitting a request on one path.
enum Submission {
    /// The request is in flight.
    InFlight,
    /// The path is not connected.
    NotConnected,
    /// Refused; another path may take it.
    TryNext(Errno),
    /// Refused; no path will take it.
    Refused(Errno),
}

/// The state of the request of a permit.
#[derive(Debug)]
pub(super) struct Request {
    /// It is in flight.
    pub(super) running: bool,
    /// The permit was given back before the request ended.
    pub(super) put: bool,
    /// The incarnation and connection it is on.
    pub(super) incarnation: PathId,
    pub(super) cid: u16,
    dir: Dir,
    pub(super) kind: PermitKind,
    /// The processor the permit was taken on.
    pub(super) cpu: u16,
    usr_len: u16,
    data_len: u32,
    pub(super) data: Vec<MemRef>,
    /// It is a READ with a key of its own.
    pub(super) own_key: bool,
    pub(super) key_state: OwnKey,
    /// The result of the request, while its key is being invalidated.
    pub(super) answered: Option<i32>,
    /// It was on an incarnation that has ended: the server may still carry it out there.
    pub(super) moved: bool,
    tag: u64,
    at: Instant,
}

impl Request {
    pub(super) const fn new() -> Self {
        Self {
            running: false,
            put: false,
            incarnation: PathId { slot: 0, generation: 0 },
            cid: 0,
            dir: Dir::Read,
            kind: PermitKind::Io,
            cpu: 0,
            usr_len: 0,
            data_len: 0,
            data: Vec::new(),
            own_key: false,
            key_state: OwnKey::None,
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

    /// Whether data is sent before the header as a separate message: if both do not fit one packet
    /// and the device prefers that. Then the data of many requests leaves with one call and the
    /// headers with another, or data and header leave as packets of equal size;
    /// [`bind`](crate::bind) decides. The server sees the same chunk contents when the immediate
    /// arrives [RT-97].
    const fn is_split(&self, device: &PortAttr) -> bool {
        let all = self.data_len.saturating_add(self.usr_len as u32 + self.hdr_len());
        matches!(self.dir, Dir::Write) && self.data_len > 0 && device.takes_two(all)
    }

    /// Whether the request fits a chunk. The descriptor of a READ counts [RT-40].
    fn fits(&self, geometry: &Geometry) -> bool {
        let all = u64::from(self.data_len) + u64::from(self.usr_len) + u64::from(self.hdr_len());
        all <= u64::from(geometry.chunk()) && self.data_len <= geometry.max_io()
    }
}

impl Session {
    /// Submits a request. `usr` is copied. For a WRITE, `data` is what is sent. For a READ it
    /// receives the data, under a key of the memory that allows the peer to write, or under a key
    /// for this request alone ([`ReadKeys`](super::ReadKeys)), as it always is if the pieces are
    /// not adjacent in memory. Pieces may have any length and begin anywhere. After `Ok` exactly
    /// one [`Completed`] with `tag` follows; after it the server cannot reach memory under a key of
    /// the request [RT-69].
    ///
    /// # Errors
    /// [`Errno::ECONNABORTED`] when no path is connected; [`Errno::EMSGSIZE`] when the request is
    /// too long for the server, or the user message too long for the session
    /// ([`ClientConfig::max_usr`](super::ClientConfig::max_usr)); [`Errno::EINVAL`] when the memory
    /// lacks the rights, when a READ has more pieces than
    /// [`Attrs::max_read_segments`](super::Attrs::max_read_segments), since it has only one
    /// descriptor [RT-12], or when the permit is not this session's; [`Errno::EBUSY`] when the
    /// permit's request is still in flight [RT-59].
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
        if !matches!(self.state, SessionState::Open) || self.up == 0 {
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
        let own_key = self.needs_own_key(dir, count);
        let access = match dir {
            Dir::Write => Access::empty(),
            Dir::Read if own_key => Access::LOCAL_WRITE,
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
        request.own_key = own_key;
        request.answered = None;
        request.moved = false;
        request.tag = tag;
        request.at = now;
        self.submit(permit.index)?;
        // The memory stays registered until the request ends, also when it moves to another path.
        let data = std::mem::take(&mut self.requests[index].data);
        self.use_regions(&data);
        self.requests[index].data = data;
        Ok(())
    }

    /// Submits a request on the path of the policy's choice, or on the next one if that refuses
    /// [RS-20].
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
                Submission::InFlight => return Ok(id),
                Submission::NotConnected => {}
                Submission::TryNext(errno) => result = errno,
                Submission::Refused(errno) => return Err(errno),
            }
        }
        Err(result)
    }

    /// Chooses a path; returns its index in the list. Policies other than round-robin skip the
    /// paths in `tried`.
    fn next_path(&mut self, cpu: u16, tried: u128) -> Option<usize> {
        let policy = self.config.policy;
        if policy == Policy::RoundRobin {
            return self.round_robin(cpu);
        }
        let connected =
            |id: &PathId| self.paths.get(*id).filter(|path| path.state == PathState::Connected);
        // Before the first heartbeat of a path nothing is known about its latency.
        let by_latency = policy == Policy::MinLatency
            && self.list.iter().filter_map(connected).all(|path| !path.latency.is_zero());
        let mut best: Option<(u128, usize)> = None;
        for (at, id) in self.list.iter().enumerate() {
            let Some(path) = connected(id) else { continue };
            let Some(incarnation) =
                path.incarnation.and_then(|incarnation| self.incarnations.get(incarnation))
            else {
                continue;
            };
            // A request waits for those before it: with the latency alone all requests would take
            // one path until the next heartbeat, and leave the others idle [RS-23].
            let requests = u128::from(incarnation.inflight) + 1;
            let key = if by_latency { requests * path.latency.as_nanos() } else { requests };
            if tried >> at.min(127) & 1 == 0 && best.is_none_or(|(least, _)| key < least) {
                best = Some((key, at));
            }
        }
        best.map(|(_, at)| at)
    }

    /// Returns the path after the last one of this processor, and remembers it even if it is not
    /// connected [RS-21].
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

    /// Submits a request on this path, if it is connected [RS-2].
    fn submit_on(&mut self, id: PathId, index: u16) -> Submission {
        let path = self.paths.get_mut(id).filter(|path| path.state == PathState::Connected);
        let Some(path) = path else { return Submission::NotConnected };
        let incarnation =
            path.incarnation.and_then(|id| Some((id, self.incarnations.get_mut(id)?)));
        let Some((inc_id, incarnation)) =
            incarnation.filter(|(_, incarnation)| incarnation.phase == Phase::Up)
        else {
            return Submission::NotConnected;
        };
        let Some(geometry) = incarnation.geometry else { return Submission::NotConnected };
        let request = &mut self.requests[usize::from(index)];
        if u32::from(request.usr_len) + request.hdr_len() > geometry.max_hdr() {
            return Submission::Refused(Errno::EMSGSIZE);
        }
        if !request.fits(&geometry) {
            return Submission::TryNext(Errno::EMSGSIZE);
        }
        let device = self.ports.get(usize::from(incarnation.port.0));
        let sges = device.map_or(0, |port| port.max_sge);
        if request.dir == Dir::Write && request.data.len() + 1 > sges.min(GATHER_MAX) {
            return Submission::TryNext(Errno::EINVAL);
        }
        if request.own_key {
            if let Err(errno) = incarnation.ensure_keys(inc_id, device, &mut self.orders) {
                return Submission::TryNext(errno);
            }
        } else if let (Dir::Read, Some(piece)) = (request.dir, request.data.first()) {
            let keys = self.regions.get(piece.region).map(|region| region.keys(incarnation.port));
            if keys.is_none_or(|keys| keys.is_err()) {
                return Submission::TryNext(Errno::EINVAL);
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
        request.incarnation = inc_id;
        request.running = true;
        path.stats.posted(request.dir, u64::from(request.usr_len) + u64::from(request.data_len));
        incarnation.inflight += 1;
        let conn = &mut incarnation.conns[usize::from(request.cid)];
        conn.inflight += 1;
        let extra = u32::from(request.own_key);
        if conn.waiting.is_empty()
            && conn.has_room(HEARTBEAT_RESERVE + 1)
            && conn.inflight + conn.with_own_key + extra <= conn.recvs
            && (!request.own_key || incarnation.keys.is_ready())
        {
            self.post(index);
        } else {
            conn.waiting.push_back(index);
        }
        Submission::InFlight
    }

    /// Posts a request on the connection chosen for it: one write of data, user message and header,
    /// whose immediate gives the chunk and the header's offset [RT-38], [RT-39]. Data may go before
    /// it, see [`Request::is_split`].
    fn post(&mut self, index: u16) {
        let mut own_key = None;
        if self.requests[usize::from(index)].own_key {
            own_key = self.register_key(index);
            debug_assert!(own_key.is_some(), "posted without a key");
        }
        let request = &self.requests[usize::from(index)];
        let (Some(incarnation), Some(headers)) =
            (self.incarnations.get_mut(request.incarnation), &self.headers)
        else {
            return;
        };
        let (Some(geometry), Some(&(addr, rkey))) =
            (incarnation.geometry, incarnation.chunks.get(usize::from(index)))
        else {
            return;
        };
        let slot_at = u64::from(index) * u64::from(headers.slot);
        let hdr_at = slot_at as usize + usize::from(request.usr_len);
        let mut start = self.batch.mems.len();
        let mut addr = addr;
        let conn = ConnId { path: request.incarnation, cid: request.cid };
        let tag = Tag::new(Tag::IO, u32::from(index));
        let device = self.ports.get(usize::from(incarnation.port.0));
        let of = &mut incarnation.conns[usize::from(request.cid)];
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
                    let keys = self.regions.get(piece.region)?.keys(incarnation.port).ok()?;
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

    /// Posts requests that waited for room on a connection. Not on an incarnation that is ending:
    /// there they move with all others when the queues are flushed.
    pub(super) fn post_waiting(&mut self, conn: ConnId) {
        if self.incarnations.get(conn.path).is_none_or(|incarnation| !incarnation.is_live()) {
            return;
        }
        self.post_notices(conn);
        self.post_invalidations(conn);
        loop {
            let Some(incarnation) = self.incarnations.get_mut(conn.path) else { return };
            let Some(of) = incarnation.conns.get_mut(usize::from(conn.cid)) else { return };
            let Some(&index) = of.waiting.front() else { return };
            let own_key = self.requests[usize::from(index)].own_key;
            let posted = of.inflight - of.waiting.len() as u32 + of.with_own_key;
            if !of.has_room(HEARTBEAT_RESERVE + 1)
                || posted + u32::from(own_key) >= of.recvs
                || own_key && !incarnation.keys.is_ready()
            {
                return;
            }
            of.waiting.pop_front();
            self.post(index);
        }
    }

    /// Detaches a request from its incarnation, because it ends or moves.
    pub(super) fn leave_incarnation(&mut self, index: u16) {
        let request = &mut self.requests[usize::from(index)];
        request.running = false;
        if let Some(incarnation) = self.incarnations.get_mut(request.incarnation) {
            incarnation.inflight -= 1;
            self.check_quiet |= incarnation.phase == Phase::Quiescing && incarnation.inflight == 0;
            let conn = &mut incarnation.conns[usize::from(request.cid)];
            conn.inflight -= 1;
            conn.with_own_key -= u32::from(request.key_state != OwnKey::None);
        }
        request.key_state = OwnKey::None;
    }

    /// Completes a request that has left its incarnation.
    pub(super) fn end_request(&mut self, now: Instant, index: u16, errno: i32) {
        let request = &mut self.requests[usize::from(index)];
        let path =
            self.incarnations.get(request.incarnation).and_then(|incarnation| incarnation.path);
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
