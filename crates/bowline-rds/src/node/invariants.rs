//! Invariants of a node. The simulator and the tests check them after every step.

use super::Node;
use crate::conn::Conn;
use crate::ids::{ConnId, LinkId, RdmaLinkId, SocketId};
use crate::link::LinkState;
use crate::path::{CANCELLED_KEPT, PathState, TxMsg, mark};
use crate::rdma::RdmaState;
use crate::txlog::SEND_OVERHEAD;

impl Node {
    /// Checks that the parts of the node agree with each other. Costs time proportional to
    /// everything the node holds.
    ///
    /// # Panics
    /// When they do not agree.
    pub fn check_invariants(&self) {
        // Indexed by the slot of the socket or connection, since ids in messages may be of earlier
        // ones.
        let mut sent: Vec<(usize, usize)> = Vec::new();
        let mut held_total = 0;
        let mut held: Vec<usize> = Vec::new();
        let (mut accounted, mut logs) = (0, 0);
        for (id, c) in self.conns.iter() {
            let id = ConnId(id);
            let indexed = match &c.rdma {
                None => self.conn_index.get(&(c.local, c.remote, c.scope)),
                Some(rdma) => self.rdma_index.get(&(c.local, c.remote, c.scope, rdma.tos)),
            };
            assert_eq!(indexed, Some(&id));
            self.check_rdma(id, c);
            assert!(!c.paths.is_empty() && c.paths.len() <= 8, "1 to 8 paths");
            for (index, p) in c.paths.iter().enumerate() {
                let link = p.link.map(|l| self.link(l).expect("a path's link exists"));
                match p.state {
                    _ if c.rdma.is_some() => assert!(link.is_none(), "no TCP over RDMA"),
                    PathState::Down => assert!(link.is_none(), "a path that is down has no link"),
                    PathState::Connecting => {
                        let link = link.expect("a path that connects has a link");
                        assert_eq!(link.state, LinkState::Connecting);
                    }
                    PathState::Up => {
                        let link = link.expect("a path in service has a link");
                        assert_eq!(link.state, LinkState::Serving);
                        assert_eq!(link.path.map(usize::from), Some(index));
                    }
                    PathState::Disconnecting => {
                        assert!(link.is_some_and(|l| l.state.is_leaving()));
                    }
                    PathState::Resetting | PathState::Error => panic!("not a resting state"),
                }
                assert!(p.planned <= p.queue.len(), "planned messages are in the queue");
                let served = link.is_some() || self.rdma_link_of(id).is_some();
                assert!(served || p.planned == 0, "no plan without a link");
                let mut last = None;
                let mut bytes = 0;
                let mut pongs = 0;
                let (mut cancelled, mut dropped, mut unwritten) = (0, 0, 0);
                for (at, m) in p.queue.iter().enumerate() {
                    assert!(last.is_none_or(|l| l < m.seq), "numbers rise within a queue");
                    last = Some(m.seq);
                    assert!(m.seq < p.next_tx_seq);
                    assert!(m.log_start + m.frame_len() <= p.log.tail());
                    pongs += usize::from(m.has(mark::PONG));
                    if !m.has(mark::GONE) {
                        accounted += m.len as usize + SEND_OVERHEAD;
                    }
                    if m.has(mark::CANCELLED) {
                        let begun = at < p.planned || c.rdma.is_some() || m.has(mark::GONE);
                        assert!(begun, "bytes of what is cancelled stay only if it was begun");
                        cancelled += 1;
                        dropped += usize::from(m.is_dropped());
                        if !m.has(mark::GONE) {
                            assert!(p.unwritten.contains(&m.seq), "bytes that nobody forgets");
                            unwritten += 1;
                        }
                        continue;
                    }
                    assert!(!m.has(mark::GONE), "bytes of a message that may be sent again");
                    bytes += u64::from(m.len);
                    if let Some(s) = m.socket {
                        assert!(self.sockets.get(s.0).is_some(), "the sender of a message exists");
                        let entry = slot_mut(&mut sent, s.0.0);
                        entry.0 += m.len as usize;
                        entry.1 += 1;
                    }
                }
                assert_eq!(bytes, p.queued_bytes, "queued bytes of a path");
                assert_eq!(pongs, p.pongs, "pongs of a path");
                assert_eq!(cancelled, p.cancelled, "cancelled messages of a path");
                assert_eq!(unwritten, p.unwritten.len(), "numbers of those that are written");
                let next = p.queue.get(p.planned);
                assert!(!next.is_some_and(TxMsg::is_dropped), "what is dropped is not next");
                let few = dropped <= CANCELLED_KEPT + p.queue.len() / 4;
                assert!(few, "what is dropped takes little memory");
                assert!(!p.queue.is_empty() || p.log.memory() == 0, "an empty queue holds no log");
                logs += p.log.memory();
            }
            for l in &c.extra {
                assert_eq!(self.link(*l).map(|l| l.conn), Some(id), "extra links exist");
            }
        }
        assert_eq!(accounted, self.pool.accounted(), "messages that logs are for");
        assert_eq!(logs, self.pool.memory(), "memory of logs");
        for (_, s) in self.sockets.iter() {
            let queued = s.queue.iter().map(|(_, _, len, conn)| (conn, len));
            for (conn, len) in queued.chain(s.lent.iter().copied()) {
                let Some(conn) = conn else { continue };
                held_total += len + 128;
                if self.conn(conn).is_some() {
                    *slot_mut(&mut held, conn.0.0) += len + 128;
                }
            }
            assert_eq!(s.queue.iter().count(), s.queue.len(), "runs of a receive queue");
            assert!(s.lent_from.len() <= s.lent.len(), "senders of lent messages");
            let lent: usize = s.lent.iter().map(|(_, len)| len).sum();
            let bytes = s.queue.iter().map(|(_, _, len, _)| len).sum::<usize>() + lent;
            assert_eq!(bytes, s.rcv_bytes, "receive accounting of a socket");
            if let Some(b) = s.bound {
                assert_eq!(
                    self.local_addrs[b.local_addr].map.is_set(b.at.port),
                    s.congested,
                    "a port's bit follows its socket"
                );
            }
        }
        for (id, s) in self.sockets.iter() {
            let latest = s.latest.iter().map(|(to, last)| (self.conn(to.0), to, last));
            let found = latest.filter_map(|(conn, to, last)| {
                let path = conn?.paths.get(usize::from(to.2))?;
                Some(path.sent_by(SocketId(id), to.1, *last).count())
            });
            assert_eq!(found.sum::<usize>(), s.snd_msgs, "a socket knows where its messages are");
            assert!(!s.has_stale(), "and little of where they were");
            let (bytes, count) = sent.get(id.0 as usize).copied().unwrap_or_default();
            assert_eq!((s.snd_bytes, s.snd_msgs), (bytes, count), "send accounting of a socket");
        }
        assert_eq!(held_total, self.recv_held, "receive accounting of the node");
        for (id, c) in self.conns.iter() {
            let held = held.get(id.0 as usize).copied().unwrap_or(0);
            assert_eq!(held, c.recv_held, "receive accounting of a peer");
        }
        let asked = self.links.iter().filter(|(_, l)| l.rx.ack.listed).count();
        assert_eq!(self.ack_asked.len(), asked, "links that owe are listed once");
        let paused = self.links.iter().filter(|(_, l)| l.rx.paused).count();
        assert_eq!(self.paused.len(), paused, "links not read are listed once");
        let partial: usize = self.links.iter().map(|(_, l)| l.partial_bytes()).sum::<usize>()
            + self.rdma_links.iter().map(|(_, l)| l.partial_bytes()).sum::<usize>();
        let paused = self.rdma_links.iter().filter(|(_, l)| l.rx.paused).count();
        assert_eq!(self.rdma_paused.len(), paused, "connections not read are listed once");
        for (id, l) in self.rdma_links.iter() {
            assert_eq!(self.rdma_link_of(l.conn), Some(RdmaLinkId(id)), "one per peer");
            assert!(l.tx.next - l.tx.retired <= l.tx.slots as u64, "no more requests than fit");
        }
        assert_eq!(partial, self.partial_bytes, "bytes of unfinished messages");
        let regions: usize = self.sockets.iter().map(|(_, s)| s.regions.len()).sum();
        assert_eq!(regions, self.regions, "memory that peers may use");
        for (id, l) in self.links.iter() {
            let conn = self.conn(l.conn).expect("a link's connection exists");
            let id = LinkId(id);
            let known = conn.paths.iter().any(|p| p.link == Some(id))
                || conn.knock == Some(id)
                || conn.extra.contains(&id);
            assert!(known, "a link is known to its peer");
            let planned: u64 = l.tx.plan.iter().map(crate::link::Op::len).sum();
            assert_eq!(planned, l.tx.plan_bytes, "plan of a link");
            assert!(l.tx.in_flight <= l.tx.plan_bytes);
            if l.state == LinkState::Serving {
                let path = l.path.and_then(|p| self.conn(l.conn)?.paths.get(usize::from(p)));
                assert_eq!(path.and_then(|p| p.link), Some(id), "a serving link is its path's");
            }
        }
    }
}

impl Node {
    fn check_rdma(&self, id: ConnId, c: &Conn) {
        let Some(rdma) = &c.rdma else { return };
        assert_eq!(c.paths.len(), 1, "over RDMA there is one path [IB-4]");
        let link = rdma.link.map(|link| self.rdma_links.get(link.0).expect("the link exists"));
        assert!(link.is_none_or(|link| link.conn == id));
        let state = link.map_or(PathState::Down, |link| match link.state {
            RdmaState::Connecting | RdmaState::Accepted => PathState::Connecting,
            RdmaState::Up => PathState::Up,
            RdmaState::Closing => PathState::Disconnecting,
        });
        assert_eq!(c.paths.first().map(|path| path.state), Some(state), "state of the path");
        let Some((id, link)) = rdma.link.zip(link) else { return };
        let idle = !link.tx.busy && !link.tx.signalled && !link.tx.blocked;
        let forgotten = link.state == RdmaState::Up && idle && self.has_rdma_frame(id);
        assert!(!forgotten, "what waits is sent when the driver or the peer goes on");
    }
}

/// Returns the sum of slot `at`; the table grows as needed.
fn slot_mut<T: Clone + Default>(sums: &mut Vec<T>, at: u32) -> &mut T {
    let at = at as usize;
    if sums.len() <= at {
        sums.resize(at + 1, T::default());
    }
    &mut sums[at]
}
