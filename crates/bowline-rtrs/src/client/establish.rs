//! Making a link: connection after connection, then the exchange of INFO_REQ and INFO_RSP
//! [RT-18] to [RT-25], [RT-30] to [RT-35].

use std::sync::Arc;

use bowline_verbs::{Access, Buffer, Status};
use bowline_wire::rtrs::{
    ConAnswer, ConReq, ConRsp, PathLife, READ_HDR_MAX, info_rsp_len, parse_info_rsp,
};

use super::link::{Conn, ConnState, Link, Phase, RECV_SLOT};
use super::path::{Goal, Join, Manual};
use super::permits::Permits;
use super::request::Request;
use super::session::{Agreed, Event, Headers, Life};
use super::{PathState, ReadKeys, Refusal, Session};
use crate::{
    ConnId, Done, Errno, Heartbeat, Instant, MemRef, On, Order, PathId, PortAttr, QpShape,
    RecvSlot, Tag, WrKind,
};

/// Work requests of each queue of a service connection [RT-22].
const SERVICE_WR: usize = 1026;
/// Receives on a service connection, beside that for INFO_RSP [RT-25].
const SERVICE_RECVS: u32 = 1024;
/// Receives of an IO connection beyond one for each permit, and send entries beyond two.
const IO_SPARE: usize = 16;
/// Queue entries the core does not use: INFO_RSP's receive, the drain markers.
const QUEUE_SPARE: usize = 2;
/// A request in so many is signalled, at most [RT-52].
const SIGNAL_MAX: u16 = 512;

impl Session {
    /// Begins to connect a path.
    pub(super) fn start_link(&mut self, now: Instant, id: PathId) {
        let Some(path) = self.paths.get_mut(id) else { return };
        path.recon_cnt = path.recon_cnt.wrapping_add(1);
        let (port, life) = (path.addr.port, PathLife::new(&path.uuid, path.recon_cnt));
        let Some(link) = self.links.add(Link::new(id, port, life)) else {
            // The end of links that part in the background makes room.
            self.change(id, PathState::ConnectingErr);
            return self.attempt_failed(now, id, Errno::ENOMEM, false);
        };
        if let Some(path) = self.paths.get_mut(id) {
            path.link = Some(link);
        }
        self.connect(now, link, 0);
    }

    /// Orders the connection of this number.
    fn connect(&mut self, now: Instant, lid: PathId, cid: u16) {
        self.refusal = None;
        let (io, polled) = (self.config.io_connections, self.config.poll_connections);
        let cid_num = io + polled + 1;
        let retry_count = if self.list.len() > 1 || self.config.bridges_outages { 6 } else { 7 };
        let deadline = now + self.config.connect_timeout;
        let Some(link) = self.links.get_mut(lid) else { return };
        let Some(path) = link.path.and_then(|id| self.paths.get(id)) else { return };
        let Some(attr) = self.ports.get(usize::from(link.port.0)) else {
            return self.fail(now, lid, Errno::ENODEV);
        };
        let depth = link.geometry.map(|geometry| geometry.queue_depth());
        let per_request = self.config.read_keys == ReadKeys::PerRequest;
        let queue = cid.saturating_sub(io);
        let shape = shape((cid, queue), depth.unwrap_or(0), per_request, attr);
        let send_max = shape.send_wr.saturating_sub(QUEUE_SPARE) as u32;
        let recvs = shape.recv_wr.saturating_sub(QUEUE_SPARE) as u32;
        let mut conn = Conn::new(send_max, recvs);
        conn.recv_base = link.conns.iter().map(|conn| conn.recvs).sum();
        link.conns.push(conn);
        link.phase = Phase::Connecting(cid);
        link.deadline = Some(deadline);
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
            conn: ConnId { path: lid, cid },
            port: link.port,
            local: path.addr.src,
            remote,
            shape,
            private: private.emit(),
            retry_count,
        });
    }

    /// A connection is made.
    pub(super) fn on_established(&mut self, now: Instant, conn: ConnId, private: &[u8]) {
        let Some(link) = self.link_of(conn) else { return };
        if link.phase != Phase::Connecting(conn.cid) {
            return;
        }
        link.conns[usize::from(conn.cid)].state = ConnState::Established;
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

    /// Takes what the server announced on the service connection [RT-30], [RT-32].
    fn take_answer(&mut self, lid: PathId, rsp: ConRsp) -> Result<(), Errno> {
        let depth = rsp.geometry.queue_depth();
        let link = self.links.get_mut(lid).ok_or(Errno::ECONNRESET)?;
        let path = link.path.and_then(|id| self.paths.get_mut(id)).ok_or(Errno::ECONNRESET)?;
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
        link.geometry = Some(rsp.geometry);
        if rsp.counted_keys && (rsp.new_rkey || !self.config.counts_keys) {
            return Err(Errno::ECONNRESET);
        }
        (link.new_rkey, link.counted_keys) = (rsp.new_rkey, rsp.counted_keys);
        link.heeds_notice = rsp.heeds_notice;
        if self.headers.is_none() {
            self.make_headers(depth, rsp.geometry.max_hdr())?;
        }
        let (max_io, max_hdr) = (rsp.geometry.max_io(), rsp.geometry.max_hdr());
        let agreed = self.agreed.get_or_insert(Agreed { depth, max_io, max_hdr });
        agreed.max_io = agreed.max_io.min(max_io);
        agreed.max_hdr = agreed.max_hdr.min(max_hdr);
        Ok(())
    }

    /// Makes what is kept for each permit, now that their number is known.
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

    /// Posts every receive, then sends INFO_REQ: nothing can come for which there is no receive
    /// [RT-74].
    fn exchange_info(&mut self, now: Instant, lid: PathId) {
        if self.make_memory(lid).is_none() {
            return self.fail(now, lid, Errno::ENOMEM);
        }
        let info_req = self.info_req(lid);
        let Some(link) = self.links.get_mut(lid) else { return };
        if self.config.read_keys == ReadKeys::PerRequest {
            let device = self.ports.get(usize::from(link.port.0));
            // Whether there are any is checked when a path is added.
            let _ = link.want_keys(lid, device, &mut self.orders);
        }
        let (Some((region, buffer)), Some(geometry)) = (&link.memory, link.geometry) else {
            return;
        };
        let region = *region;
        let service = ConnId { path: lid, cid: 0 };
        let len = info_rsp_len(geometry.queue_depth()) as u32;
        let mem = Some(MemRef { region, offset: 0, len });
        self.batch.recvs.push(RecvSlot { conn: service, tag: Tag::new(Tag::INFO, 0), mem });
        let signal_every = u32::from(geometry.queue_depth().min(SIGNAL_MAX) / 2).max(1);
        buffer.write(link.info_req_at() as usize, &info_req);
        for cid in 0..link.conns.len() as u16 {
            link.conns[usize::from(cid)].signal_every = signal_every;
            let conn = ConnId { path: lid, cid };
            let slots = 0..link.conns[usize::from(cid)].recvs;
            self.batch.recvs.extend(slots.filter_map(|index| link.recv_slot(conn, index)));
        }
        let offset = link.info_req_at();
        let start = self.batch.mems.len();
        self.batch.mems.push(MemRef { region, offset, len: info_req.len() as u32 });
        let tag = Tag::new(Tag::INFO, 1);
        let of = &mut link.conns[0];
        of.post_signalled(&mut self.batch, service, tag, WrKind::Send, start, true);
        link.phase = Phase::Info;
        link.deadline = Some(now + self.config.connect_timeout);
    }

    /// Makes and registers the memory of a link.
    fn make_memory(&mut self, lid: PathId) -> Option<()> {
        let link = self.links.get(lid)?;
        let recvs: u32 = link.conns.iter().map(|conn| conn.recvs).sum();
        let recvs = if link.new_rkey { u64::from(recvs) * u64::from(RECV_SLOT) } else { 0 };
        let (port, len) = (link.port, link.recvs_at() + recvs);
        let buffer = Arc::new(Buffer::new(usize::try_from(len).ok()?).ok()?);
        let access = Access::LOCAL_WRITE;
        let region = self.regions.add(Arc::clone(&buffer), access, std::iter::once(port));
        self.orders.push_back(Order::AddRegion {
            region,
            buffer: Arc::clone(&buffer),
            access,
            granule: None,
            ports: On::One(port),
            path: Some(lid),
        });
        self.links.get_mut(lid)?.memory = Some((region, buffer));
        Some(())
    }

    /// INFO_RSP, or the end of its receive.
    pub(super) fn on_info_rsp(&mut self, now: Instant, done: &Done) {
        let lid = done.conn.path;
        let Some(link) = self.link_of(done.conn) else { return };
        if link.phase != Phase::Info {
            return;
        }
        let (Some(geometry), Some((_, buffer))) = (link.geometry, &link.memory) else { return };
        let mut bytes = Vec::new();
        if done.status == Status::Success && done.imm.is_none() {
            let len = (done.len as usize).min(info_rsp_len(geometry.queue_depth()));
            buffer.append_to(0, len, &mut bytes);
        }
        let mut chunks = std::mem::take(&mut link.chunks);
        match parse_info_rsp(&bytes, &geometry, &mut chunks) {
            Ok(()) => {
                link.chunks = chunks;
                self.link_up(now, lid);
            }
            Err(_) => self.fail(now, lid, Errno::ECONNRESET),
        }
    }

    /// A link is made: its path carries IO [RS-11].
    fn link_up(&mut self, now: Instant, lid: PathId) {
        let Some(link) = self.links.get_mut(lid) else { return };
        let Some(id) = link.path else { return };
        link.phase = Phase::Up;
        link.deadline = None;
        link.heartbeat = Some(Heartbeat::new(self.config.heartbeat, now));
        link.counted = true;
        self.up += 1;
        self.end_named(lid);
        let Some(path) = self.paths.get_mut(id) else { return };
        path.attempts = 0;
        path.busy = 0;
        path.up_at = now;
        path.stats.reconnects += 1;
        let join = std::mem::replace(&mut path.join, Join::Member);
        let manual = std::mem::take(&mut path.manual) != Manual::No;
        debug_assert_eq!(path.goal, Goal::Up, "a path that is closed is not connected");
        self.change(id, PathState::Connected);
        match join {
            Join::Opening => self.open_next(now),
            Join::Adding => self.events.push_back(Event::PathAdded { path: id, result: Ok(()) }),
            Join::Member => {}
        }
        if manual {
            self.events.push_back(Event::PathReconnected { path: id, result: Ok(()) });
        }
        if self.up == 1 && self.life == Life::Open && join != Join::Opening {
            self.events.push_back(Event::Reconnected);
        }
    }
}

/// Sizes of a queue pair [RT-22]. An IO takes one entry of each queue, or two of the send queue
/// where data goes before its header; a send entry is known to be free only when a later one was
/// signalled. One whose memory is registered for it takes two more of the send queue, and its
/// answer a second receive.
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
