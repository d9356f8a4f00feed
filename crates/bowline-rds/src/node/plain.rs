//! Fast path for most messages: consecutive plain messages of a bowline peer, each of them whole in
//! one buffer. Properties that the messages share are looked up once. A message with anything
//! special ends the run and takes the general way, [`frame`](Node::frame). Each rule is implemented
//! there; this file holds only the conditions under which no rule applies.

use bowline_wire::rds::{Flags, HEADER_LEN, Header};

use super::Node;
use super::congestion::MESSAGE_OVERHEAD;
use super::rx::{ACK_BYTES, ParseEnd};
use crate::ids::{LinkId, SocketId};
use crate::recvq::Origin;
use crate::rxbuf::RxBuf;
use crate::socket::{Sock, interest_bit};

impl Node {
    /// Queues plain messages of `buf` from offset `at` on, and moves `at` behind them. Returns why
    /// to stop parsing; `None` when the next frame is not plain, or the buffer is used up.
    pub(super) fn take_plain(
        &mut self,
        id: LinkId,
        buf: &RxBuf,
        at: &mut usize,
        until: Option<SocketId>,
        budget: &mut usize,
    ) -> Option<ParseEnd> {
        let limit = self.frame_limit();
        let messages_least = self.config.limits.recv_messages_per_socket;
        let link = self.links.get_mut(id.0)?;
        let settled = link.confirmed
            && !link.awaits_peer_kind
            && link.greeting.heard_frame
            && !link.deaf
            && link.numbering_path.is_none();
        if !settled || link.rx.partial.is_some() || link.rx.head_len > 0 || !link.rx.ack.timer_armed
        {
            return None;
        }
        let conn = self.conns.get_mut(link.conn.0).filter(|c| c.peer.is_bowline())?;
        let path = conn.paths.get_mut(usize::from(link.path?))?;
        let ports = &self.local_addrs[conn.local_addr].ports;
        let origin = Origin { addr: conn.remote, scope: conn.scope, conn: Some(link.conn) };
        let bytes = buf.bytes();
        // No socket changes during the run, so the last one is kept.
        let mut last: Option<(u16, SocketId, &mut Sock)> = None;
        let (mut messages, mut payload, mut asked) = (0, 0, 0);
        let mut stop = None;
        while let Some((head, rest)) = bytes[*at..].split_first_chunk::<HEADER_LEN>() {
            let header = Header::from_bytes(head);
            let len = header.len as usize;
            let asks = header.flags == Flags::ACK_REQUIRED;
            if !(asks || header.flags == Flags::NONE)
                || header.sport.min(header.dport) == 0
                || header.ext[0] != 0
                || header.sequence < path.rx_expected
                || len > rest.len().min(limit)
            {
                break;
            }
            let owed = link.rx.ack.bytes + (HEADER_LEN + len) as u64;
            let asked_already = link.rx.ack.asked && link.rx.ack.listed;
            if (asks && !asked_already) || (owed >= ACK_BYTES && !link.rx.ack.due) {
                break;
            }
            if last.as_ref().is_none_or(|(port, ..)| *port != header.dport) {
                let Some(to) = ports.get(&header.dport) else { break };
                let Some(sock) = self.sockets.get_mut(to.0) else { break };
                if sock.timestamp
                    || sock.latency.is_some()
                    || sock.interest & interest_bit::READ != 0
                {
                    break;
                }
                last = Some((header.dport, *to, sock));
            }
            let Some((_, to, sock)) = &mut last else { break };
            let is_plain = len == 0 || sock.congested_at(sock.rcv_bytes + len) == sock.congested;
            if !is_plain || sock.crowded_at(sock.waiting() + 1, messages_least) != sock.crowded {
                break;
            }
            let name = (header.sport, header.sequence);
            match buf.shared() {
                Some(shared) => {
                    let start = *at + HEADER_LEN;
                    sock.queue.push_single(&origin, name, shared, (start as u32, header.len));
                }
                None => {
                    sock.queue.push_copy(&origin, name, &rest[..len]);
                    self.stats.rx_copied_bytes += len as u64;
                }
            }
            sock.rcv_bytes += len;
            link.rx.ack.bytes = owed;
            path.rx_expected = header.sequence.saturating_add(1);
            *at += HEADER_LEN + len;
            messages += 1;
            payload += len;
            asked += usize::from(asks);
            *budget = budget.saturating_sub(1);
            if until == Some(*to) && sock.has_enough() {
                stop = Some(ParseEnd::Satisfied);
                break;
            }
            if *budget == 0 {
                stop = Some(ParseEnd::Budget);
                break;
            }
        }
        if messages > 0 {
            path.next_rx_seq = path.rx_expected;
            path.received += messages as u64;
            link.rx.messages += messages as u64;
            conn.touch(self.now);
            let held = payload + messages * MESSAGE_OVERHEAD;
            conn.recv_held += held;
            self.recv_held += held;
            self.stats.recv_queued += messages as u64;
            self.stats.recv_bytes_added_to_sock += payload as u64;
            self.stats.recv_ack_required += asked as u64;
        }
        stop
    }
}
