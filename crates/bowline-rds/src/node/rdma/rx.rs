//! Receiving over RDMA: frames put together to messages. Spec: `docs/spec/rds-rdma.md`, section 6.

use bowline_base::Instant;
use bowline_wire::rds::{
    FRAGMENT_LEN, Flags, HEADER_LEN, Header, MAP_LEN, MapView, PROBE_PORT, checksum_ok,
};

use crate::api::Misbehaviour;
use crate::config::MAX_MESSAGE_KERNEL;
use crate::ids::{ConnId, RdmaLinkId};
use crate::link::Partial;
use crate::node::Node;
use crate::rdma::{RdmaFrame, RdmaState, Remembered};
use crate::rxbuf::{Rope, RxBuf};

impl Node {
    /// Takes received frames, in their order; `buf` holds their payloads. Afterwards the driver
    /// posts receives again, if [`wants_rdma_frames`](Self::wants_rdma_frames).
    pub fn handle_rdma_frames(
        &mut self,
        now: Instant,
        id: RdmaLinkId,
        buf: &RxBuf,
        frames: &[RdmaFrame],
    ) {
        self.now = now;
        self.stats.ib_evt_handler_call += 1;
        self.stats.ib_tasklet_call += 1;
        self.stats.ib_rx_cq_event += 1;
        let conn = self.rdma_links.get(id.0).map(|link| link.conn);
        if let Some(conn) = conn.and_then(|conn| self.conns.get_mut(conn.0)) {
            conn.past_read += frames.iter().map(|frame| frame.bytes as u64).sum::<u64>();
        }
        if !frames.is_empty() {
            self.rdma_request_proven(id);
            if let Some(link) = self.rdma_links.get_mut(id.0) {
                link.check = None; // the peer has the connection [IB-113]
            }
        }
        for frame in frames {
            let Some(link) = self.rdma_links.get(id.0) else { return };
            // Frames may be taken before the connection is known to be established [IB-39].
            if link.state == RdmaState::Closing {
                self.rdma_last_word(id, frame);
                continue;
            }
            // Each connection begins with receives posted: a peer must not get round its limit by
            // connecting again and again.
            if !self.may_take_frames(link.conn, link.receives) {
                return self.close_rdma(id);
            }
            if let Err(what) = self.rdma_frame(id, buf, frame) {
                return self.rdma_misbehaved(id, what);
            }
        }
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if link.rx.ack_due {
            self.signal_rdma(id);
        }
    }

    /// Notes that receives were posted in place of those that frames have used.
    pub fn handle_rdma_receives_posted(&mut self, id: RdmaLinkId, count: usize) {
        self.stats.ib_rx_refill_from_cq += 1;
        let Some(link) = self.rdma_links.get_mut(id.0) else { return };
        if link.credits.posted(u32::try_from(count).unwrap_or(u32::MAX)) {
            link.rx.ack_due = true; // [IB-78]
            self.signal_rdma(id);
        }
    }

    /// Tells whether receives may be posted again. If not, `Output::RdmaResume` tells when; the
    /// peer waits meanwhile [IB-84].
    pub fn wants_rdma_frames(&mut self, id: RdmaLinkId) -> bool {
        let Some(link) = self.rdma_links.get(id.0) else { return false };
        if self.may_receive(link.conn) {
            return true;
        }
        if let Some(link) = self.rdma_links.get_mut(id.0)
            && !std::mem::replace(&mut link.rx.paused, true)
        {
            self.rdma_paused.push(id);
            self.stats.read_pauses += 1;
            self.stats.ib_rx_alloc_limit += 1;
        }
        false
    }

    /// Handles a frame that has come on a connection which this node is ending. Its message is not
    /// acknowledged and comes again; but what it acknowledges may be told nowhere else: a peer that
    /// ends knows that its farewell has come, and not that nobody looks at it [IB-112].
    fn rdma_last_word(&mut self, id: RdmaLinkId, frame: &RdmaFrame) {
        if frame.bytes < HEADER_LEN || !checksum_ok(&frame.header) {
            return;
        }
        let header = Header::from_bytes(&frame.header);
        self.rdma_acked(id, header.ack);
        let conn = self.rdma_links.get(id.0).map(|link| link.conn);
        if let Some(conn) = conn.filter(|_| frame.bytes == HEADER_LEN) {
            self.rdma_farewell(conn, &header);
        }
    }

    /// Notes that a peer has ended, if this frame without payload says so.
    fn rdma_farewell(&mut self, id: ConnId, header: &Header) {
        let is_bowline = self.conn(id).is_some_and(|conn| conn.peer.is_bowline());
        let is_plain = header.sport == 0 && header.dport == 0;
        if is_bowline && is_plain && crate::node::handshake::is_farewell(header) {
            self.conn_ends(id);
        }
    }

    /// Handles one frame, in the order of IB-81.
    fn rdma_frame(
        &mut self,
        id: RdmaLinkId,
        buf: &RxBuf,
        frame: &RdmaFrame,
    ) -> Result<(), Misbehaviour> {
        let Some(len) = frame.bytes.checked_sub(HEADER_LEN) else {
            return Err(Misbehaviour::FrameLength);
        };
        if !checksum_ok(&frame.header) {
            self.stats.recv_drop_bad_checksum += 1;
            return Err(Misbehaviour::Checksum);
        }
        let header = Header::from_bytes(&frame.header);
        self.stats.ib_rx_total_frags += 1;
        self.rdma_acked(id, header.ack);
        let (frame_limit, own_fragment) = (self.frame_limit(), self.rdma_fragment());
        let Some(link) = self.rdma_links.get_mut(id.0) else { return Ok(()) };
        let conn_id = link.conn;
        if header.credit > 0 {
            if !link.credits.granted(header.credit) {
                return Err(Misbehaviour::Credits);
            }
            self.stats.ib_rx_credit_updates += 1;
            if link.tx.blocked {
                self.signal_rdma(id);
            }
        }
        if let Some(conn) = self.conns.get_mut(conn_id.0) {
            conn.touch(self.now);
        }
        let Some(link) = self.rdma_links.get_mut(id.0) else { return Ok(()) };
        if header.sport == 0 && header.dport == 0 && len == 0 {
            self.stats.ib_ack_received += 1; // [IB-59]
            self.rdma_farewell(conn_id, &header);
            return Ok(());
        }
        if link.rx.deaf {
            return Ok(()); // it comes again, to the next process
        }
        let total = header.len as usize;
        // Longer messages come from bowline nodes only, whose REP may not be evaluated yet.
        let bowline = self.conns.get(conn_id.0).is_some_and(|conn| conn.peer.is_bowline());
        let unknown = link.state == RdmaState::Connecting;
        let limit = if bowline || unknown { frame_limit } else { MAX_MESSAGE_KERNEL as usize };
        let mut partial = match link.rx.partial.take() {
            Some(partial) => {
                self.partial_bytes -= partial.rope.len();
                let first = &partial.header;
                let same = (first.sequence, first.len, first.sport, first.dport)
                    == (header.sequence, header.len, header.sport, header.dport);
                if !same {
                    return Err(Misbehaviour::FrameOfOther);
                }
                partial
            }
            None => {
                if total > limit {
                    self.stats.peer_oversized += 1;
                    return Err(Misbehaviour::MessageTooLong); // [SAFE-1]
                }
                // Before the REP is evaluated, the peer's first frames show how long they are.
                if link.state == RdmaState::Connecting {
                    link.fragment = len.clamp(FRAGMENT_LEN, own_fragment);
                }
                Partial { header, rope: Rope::default(), need: total, first_seen: self.now }
            }
        };
        let expected = partial.need.min(link.fragment);
        // Payload that was not received must not be delivered [SAFE-2]. Surplus payload is ignored,
        // but no frame is longer than a full one [IB-57], even where there is memory for it.
        let within = expected..=link.fragment;
        if !within.contains(&len) || buf.bytes().len() < frame.start + expected {
            return Err(Misbehaviour::FrameLength);
        }
        let copied = partial.rope.push(buf, frame.start, expected);
        self.stats.rx_copied_bytes += copied as u64;
        partial.need -= expected;
        if partial.need > 0 {
            self.partial_bytes += partial.rope.len();
            if let Some(link) = self.rdma_links.get_mut(id.0) {
                link.rx.partial = Some(partial);
            }
            self.limit_partials();
            return Ok(());
        }
        self.stats.ib_rx_total_incs += 1;
        self.rdma_message(id, conn_id, partial)
    }

    /// Handles a complete message.
    fn rdma_message(
        &mut self,
        id: RdmaLinkId,
        conn_id: ConnId,
        partial: Partial,
    ) -> Result<(), Misbehaviour> {
        let Partial { header, rope, first_seen, .. } = partial;
        if header.is_map() {
            return self.rdma_map(conn_id, &rope); // [IB-60]
        }
        let Some(link) = self.rdma_links.get_mut(id.0) else { return Ok(()) };
        // A message that is dropped is acknowledged as well [IB-69], [IB-82].
        link.rx.ack = header.sequence;
        link.rx.unacknowledged = true;
        if header.flags.contains(Flags::ACK_REQUIRED) {
            self.stats.recv_ack_required += 1;
            link.rx.ack_due = true;
        }
        let Some(path) = self.conns.get_mut(conn_id.0).and_then(|conn| conn.paths.first_mut())
        else {
            return Ok(());
        };
        let told =
            path.untold_since.is_some() && header.sequence >= path.next_rx_seq.saturating_sub(1);
        if told {
            path.untold_since = None; // the last one that was taken has come again [IB-112]
        }
        if !self.is_rdma_news(conn_id, &header, &rope) {
            self.stats.recv_drop_old_seq += 1;
            if told && self.ending.is_some() {
                self.finish_rdma(id);
            }
            return Ok(());
        }
        if header.dport == 0 {
            if header.sport != 0 && self.config.sysctl.ping_enable {
                self.stats.recv_ping += 1;
                self.pong(conn_id, 0, header.sport, [0; 16]);
            }
        } else if header.sport == 0 && header.dport == PROBE_PORT {
            // The answer to a multipath probe, which nobody sends over RDMA [SAFE-3].
        } else {
            self.deliver(conn_id, &header, rope, first_seen);
        }
        if told && self.ending.is_some() {
            self.finish_rdma(id);
        }
        Ok(())
    }

    /// Tells whether a message has not come before, and remembers it [IB-82]. A lower number
    /// without the flag comes from a peer that has restarted. With the flag it may be a message
    /// that came before; of a kernel, whose numbers begin again, the contents tell.
    fn is_rdma_news(&mut self, conn_id: ConnId, header: &Header, rope: &Rope) -> bool {
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return false };
        let counts = !conn.peer.is_bowline() && Remembered::counts(header.sequence);
        let (Some(path), Some(rdma)) = (conn.paths.first_mut(), &mut conn.rdma) else {
            return false;
        };
        let next = path.next_rx_seq;
        let lower = header.sequence < next;
        if lower && header.flags.contains(Flags::RETRANSMITTED) {
            let is_new = match &rdma.remembered {
                Some(remembered) => remembered.is_new(next, header, rope),
                None => Remembered::is_over(next, header.sequence),
            };
            if !(counts && is_new) {
                return false;
            }
        }
        path.next_rx_seq = header.sequence.wrapping_add(1);
        path.received += 1;
        if lower && let Some(remembered) = &mut rdma.remembered {
            remembered.clear();
        }
        if counts {
            let budget = &self.dedup_budget;
            let new = || Box::new(Remembered::new(budget));
            rdma.remembered.get_or_insert_with(new).note(header, rope);
        }
        true
    }

    fn rdma_map(&mut self, conn_id: ConnId, rope: &Rope) -> Result<(), Misbehaviour> {
        let mut bytes = vec![0; MAP_LEN];
        if rope.len() != MAP_LEN {
            self.stats.peer_nonsense += 1;
            return Err(Misbehaviour::MapLength); // [SAFE-1]
        }
        rope.copy_to(&mut bytes);
        let Some(map) = MapView::new(&bytes) else { return Ok(()) };
        self.stats.cong_update_received += 1;
        let Some(conn) = self.conns.get_mut(conn_id.0) else { return Ok(()) };
        let freed = conn.map.replace(&map);
        self.congestion_changed(freed); // [IB-61]
        Ok(())
    }
}
