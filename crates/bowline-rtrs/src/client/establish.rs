//! Connecting an incarnation of a path: connection after connection, then the exchange of INFO_REQ
//! and INFO_RSP [RT-18] to [RT-25], [RT-30] to [RT-35].

use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Status};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, PathLife, READ_HDR_MAX, info_rsp_len, parse_info_rsp,
};

use super::incarnation::{Conn, ConnState, Incarnation, Phase, RECV_SLOT};
use super::path::{FirstConnect, Goal, ManualReconnect};
use super::permits::Permits;
use super::request::Request;
use super::session::{Agreed, Event, Headers, SessionState};
use super::{PathState, ReadKeys, Refusal, Session};
use crate::{
    ConnId, Done, Errno, Heartbeat, Instant, MemRef, Order, PathId, PortAttr, QpShape, RecvSlot,
    RegionPorts, Tag, WrKind,
};

/// Work requests of each queue of a service connection [RT-22].
const SERVICE_WR: usize = 1026;
/// Receives on a service connection, beside that for INFO_RSP [RT-25].
const SERVICE_RECVS: u32 = 1024;
/// Receives of an IO connection beyond one for each permit, and send entries beyond two for each.
const IO_SPARE: usize = 16;
/// Queue entries not available to requests: one for INFO_RSP's receive, one for the drain marker.
const QUEUE_SPARE: usize = 2;
/// At most this many work requests go unsignalled in a row [RT-52].
const SIGNAL_MAX: u16 = 512;

impl Session {
    /// Begins an attempt to connect a path.
    pub(super) fn start_incarnation(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.recon_cnt = path.recon_cnt.wrapping_add(1);
        let (port, generation) = (path.addr.port, PathLife::new(&path.uuid, path.recon_cnt));
        let Some(incarnation) = self.incarnations.add(Incarnation::new(id, port, generation))
        else {
            // Incarnations that end in the background will make room.
            self.change(id, PathState::ConnectingErr);
            return self.attempt_failed(now, id, Errno::ENOMEM, false);
        };
        if let Some(path) = self.paths.get_mut(id) {
            path.incarnation = Some(incarnation);
        }
        self.connect(now, incarnation, 0);
    }

    /// Orders the connection of this number.
    fn connect(&mut self, now: Instant, inc_id: PathId, cid: u16) {
        self.refusal = None;
        let (io, polled) = (self.config.io_connections, self.config.poll_connections);
        let cid_num = io + polled + 1;
        let retry_count = if self.list.len() > 1 || self.config.bridges_outages { 6 } else { 7 };
        let deadline = now + self.config.connect_timeout;
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        let Some(path) = incarnation.path.and_then(|id| self.paths.get(id)) else { return };
        let Some(attr) = self.ports.get(usize::from(incarnation.port.0)) else {
            return self.fail(now, inc_id, Errno::ENODEV);
        };
        let depth = incarnation.geometry.map(|geometry| geometry.queue_depth());
        let per_request = self.config.read_keys == ReadKeys::PerRequest;
        let queue = cid.saturating_sub(io);
        let shape = shape((cid, queue), depth.unwrap_or(0), per_request, attr);
        let send_max = shape.send_wr.saturating_sub(QUEUE_SPARE) as u32;
        let recvs = shape.recv_wr.saturating_sub(QUEUE_SPARE) as u32;
        let mut conn = Conn::new(send_max, recvs);
        conn.recv_base = incarnation.conns.iter().map(|conn| conn.recvs).sum();
        incarnation.conns.push(conn);
        incarnation.phase = Phase::Connecting(cid);
        incarnation.deadline = Some(deadline);
        let private = ConReq {
            cid,
            cid_num,
            recon_cnt: path.recon_cnt,
            path: path.uuid,
            session: self.uuid,
            first: path.first,
            counts_keys: self.config.counts_keys,
            gives_notice: true,
        };
        let mut remote = path.addr.dst;
        if remote.port() == 0 {
            remote.set_port(self.config.port);
        }
        self.orders.push_back(Order::Connect {
            conn: ConnId { path: inc_id, cid },
            port: incarnation.port,
            local: path.addr.src,
            remote,
            shape,
            private: private.emit(),
            retry_count,
        });
    }

    /// Handles that a connection is made.
    pub(super) fn on_established(&mut self, now: Instant, conn: ConnId, private: &[u8]) {
        let Some(incarnation) = self.incarnation_of(conn) else { return };
        if incarnation.phase != Phase::Connecting(conn.cid) {
            return;
        }
        incarnation.conns[usize::from(conn.cid)].state = ConnState::Established;
        let next = conn.cid + 1;
        let step = match ConAnswer::parse(private) {
            Ok(ConAnswer::Accepted(rsp)) if conn.cid == 0 => self.take_answer(conn.path, rsp),
            Ok(ConAnswer::Accepted(_)) => Ok(()),
            Ok(ConAnswer::Refused(_)) => Err(Errno::ECONNRESET),
            Err(error) => {
                self.refusal = Some(Refusal::Answer(error));
                Err(Errno::ECONNRESET)
            }
        };
        match step {
            Err(errno) => self.fail(now, conn.path, errno),
            Ok(()) if next <= self.config.io_connections + self.config.poll_connections => {
                self.connect(now, conn.path, next);
            }
            Ok(()) => self.exchange_info(now, conn.path),
        }
    }

    /// Checks and stores what the server announced on the service connection [RT-30], [RT-32].
    fn take_answer(&mut self, inc_id: PathId, rsp: ConRsp) -> Result<(), Errno> {
        let depth = rsp.geometry.queue_depth();
        let incarnation = self.incarnations.get_mut(inc_id).ok_or(Errno::ECONNRESET)?;
        let path =
            incarnation.path.and_then(|id| self.paths.get_mut(id)).ok_or(Errno::ECONNRESET)?;
        path.first = true;
        if depth > self.config.limits.queue_depth {
            return Err(Errno::ECONNRESET);
        }
        if *path.depth.get_or_insert(depth) != depth {
            path.changed = true;
            return Err(Errno::ECONNRESET);
        }
        if self.agreed.is_some_and(|agreed| agreed.depth != depth) {
            return Err(Errno::ECONNRESET);
        }
        incarnation.geometry = Some(rsp.geometry);
        if rsp.counted_keys && (rsp.new_rkey || !self.config.counts_keys) {
            return Err(Errno::ECONNRESET);
        }
        (incarnation.new_rkey, incarnation.counted_keys) = (rsp.new_rkey, rsp.counted_keys);
        incarnation.accepts_notice = rsp.accepts_notice;
        if self.headers.is_none() {
            self.make_headers(depth, rsp.geometry.max_hdr())?;
        }
        let (max_io, max_hdr) = (rsp.geometry.max_io(), rsp.geometry.max_hdr());
        let agreed = self.agreed.get_or_insert(Agreed { depth, max_io, max_hdr });
        agreed.max_io = agreed.max_io.min(max_io);
        agreed.max_hdr = agreed.max_hdr.min(max_hdr);
        Ok(())
    }

    /// Allocates the per-permit state, now that the queue depth is known.
    fn make_headers(&mut self, depth: u16, max_hdr: u32) -> Result<(), Errno> {
        let usr = max_hdr.min(self.config.max_usr.into());
        let slot = (usr + READ_HDR_MAX as u32).next_multiple_of(64);
        let buffer = Buffer::new(usize::from(depth) * slot as usize).map_err(|_| Errno::ENOMEM)?;
        let buffer = Arc::new(buffer);
        let region = self.add_region(Arc::clone(&buffer), Access::LOCAL_WRITE);
        self.headers = Some(Headers { region, buffer, slot });
        self.permits = Permits::new(depth);
        self.requests = (0..depth).map(|_| Request::new()).collect();
        Ok(())
    }

    /// Posts all receives, then sends INFO_REQ, so that no message can arrive without a receive
    /// [RT-74].
    fn exchange_info(&mut self, now: Instant, inc_id: PathId) {
        if self.make_memory(inc_id).is_none() {
            return self.fail(now, inc_id, Errno::ENOMEM);
        }
        let info_req = self.info_req(inc_id);
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        if self.config.read_keys == ReadKeys::PerRequest {
            let device = self.ports.get(usize::from(incarnation.port.0));
            // The device was checked when the path was added.
            let _ = incarnation.ensure_keys(inc_id, device, &mut self.orders);
        }
        let (Some((region, buffer)), Some(geometry)) = (&incarnation.memory, incarnation.geometry)
        else {
            return;
        };
        let region = *region;
        let service = ConnId { path: inc_id, cid: 0 };
        let len = info_rsp_len(geometry.queue_depth()) as u32;
        let mem = Some(MemRef { region, offset: 0, len });
        self.batch.recvs.push(RecvSlot { conn: service, tag: Tag::new(Tag::INFO, 0), mem });
        let signal_every = u32::from(geometry.queue_depth().min(SIGNAL_MAX) / 2).max(1);
        buffer.write(incarnation.info_req_at() as usize, &info_req);
        for cid in 0..incarnation.conns.len() as u16 {
            incarnation.conns[usize::from(cid)].signal_every = signal_every;
            let conn = ConnId { path: inc_id, cid };
            let slots = 0..incarnation.conns[usize::from(cid)].recvs;
            self.batch.recvs.extend(slots.filter_map(|index| incarnation.recv_slot(conn, index)));
        }
        let offset = incarnation.info_req_at();
        let start = self.batch.mems.len();
        self.batch.mems.push(MemRef { region, offset, len: info_req.len() as u32 });
        let tag = Tag::new(Tag::INFO, 1);
        let of = &mut incarnation.conns[0];
        of.post_signalled(&mut self.batch, service, tag, WrKind::Send, start, true);
        incarnation.phase = Phase::Info;
        incarnation.deadline = Some(now + self.config.connect_timeout);
    }

    /// Allocates and registers the memory of an incarnation.
    fn make_memory(&mut self, inc_id: PathId) -> Option<()> {
        let incarnation = self.incarnations.get(inc_id)?;
        let recvs: u32 = incarnation.conns.iter().map(|conn| conn.recvs).sum();
        let recvs = if incarnation.new_rkey { u64::from(recvs) * u64::from(RECV_SLOT) } else { 0 };
        let (port, len) = (incarnation.port, incarnation.recvs_at() + recvs);
        let buffer = Arc::new(Buffer::new(usize::try_from(len).ok()?).ok()?);
        let access = Access::LOCAL_WRITE;
        let region = self.regions.add(Arc::clone(&buffer), access, std::iter::once(port));
        self.orders.push_back(Order::AddRegion {
            region,
            buffer: Arc::clone(&buffer),
            access,
            granule: None,
            ports: RegionPorts::One(port),
            path: Some(inc_id),
        });
        self.incarnations.get_mut(inc_id)?.memory = Some((region, buffer));
        Some(())
    }

    /// Handles INFO_RSP, or the failure of its receive.
    pub(super) fn on_info_rsp(&mut self, now: Instant, done: &Done) {
        let inc_id = done.conn.path;
        let Some(incarnation) = self.incarnation_of(done.conn) else { return };
        if incarnation.phase != Phase::Info {
            return;
        }
        let (Some(geometry), Some((_, buffer))) = (incarnation.geometry, &incarnation.memory)
        else {
            return;
        };
        let mut bytes = Vec::new();
        if done.status == Status::Success && done.imm.is_none() {
            let len = (done.len as usize).min(info_rsp_len(geometry.queue_depth()));
            buffer.append_to(0, len, &mut bytes);
        }
        let mut chunks = std::mem::take(&mut incarnation.chunks);
        match parse_info_rsp(&bytes, &geometry, &mut chunks) {
            Ok(()) => {
                incarnation.chunks = chunks;
                self.incarnation_up(now, inc_id);
            }
            Err(_) => self.fail(now, inc_id, Errno::ECONNRESET),
        }
    }

    /// Handles that an incarnation is ready: its path carries IO [RS-11].
    fn incarnation_up(&mut self, now: Instant, inc_id: PathId) {
        let Some(incarnation) = self.incarnations.get_mut(inc_id) else { return };
        let Some(id) = incarnation.path else { return };
        incarnation.phase = Phase::Up;
        incarnation.deadline = None;
        incarnation.heartbeat = Some(Heartbeat::new(self.config.heartbeat, now));
        incarnation.counted = true;
        self.up += 1;
        self.end_named(inc_id);
        let Some(path) = self.paths.get_mut(id) else { return };
        path.attempts = 0;
        path.busy = 0;
        path.up_at = now;
        path.stats.reconnects += 1;
        let join = std::mem::replace(&mut path.first_connect, FirstConnect::Done);
        let manual = std::mem::take(&mut path.manual) != ManualReconnect::No;
        debug_assert_eq!(path.goal, Goal::Up, "a path that is closed is not connected");
        self.change(id, PathState::Connected);
        match join {
            FirstConnect::Opening => self.open_next(now),
            FirstConnect::Adding => {
                self.events.push_back(Event::PathAdded { path: id, result: Ok(()) });
            }
            FirstConnect::Done => {}
        }
        if manual {
            self.events.push_back(Event::PathReconnected { path: id, result: Ok(()) });
        }
        if self.up == 1 && self.state == SessionState::Open && join != FirstConnect::Opening {
            self.events.push_back(Event::Reconnected);
        }
    }
}

/// Sizes of a queue pair [RT-22]. A request takes one entry of each queue, or two of the send queue
/// where data goes before its header; a send entry is known to be free only when a later one was
/// signalled. A request with a key of its own takes two more entries of the send queue, and its
/// response a second receive.
fn shape((cid, queue): (u16, u16), depth: u16, per_request: bool, attr: &PortAttr) -> QpShape {
    let depth = usize::from(depth);
    let of_io = if attr.burst > 0 { 3 } else { 2 };
    let (send, recv) = match cid {
        0 => (SERVICE_WR, SERVICE_RECVS as usize + QUEUE_SPARE),
        _ if per_request => {
            (4 * depth + IO_SPARE + QUEUE_SPARE, 2 * depth + IO_SPARE + QUEUE_SPARE)
        }
        _ => (of_io * depth + IO_SPARE + QUEUE_SPARE, depth + IO_SPARE + QUEUE_SPARE),
    };
    QpShape {
        send_wr: send.min(attr.max_qp_wr),
        recv_wr: recv.min(attr.max_qp_wr),
        send_sge: attr.max_sge.clamp(1, 129),
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        queue,
        give_up: None,
    }
}
