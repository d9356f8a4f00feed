//! The judge: what was sent, by whom, and what became of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use crate::engine::queue::MS;
use crate::engine::rng::mix;

/// Bytes at the beginning of a message that say what it is.
pub(super) const HEAD: usize = 16;

/// How long who sleeps is not woken at most, after the end of a process that had the socket: the
/// server looks in that time.
const HEALS: u64 = 210 * MS;

/// A socket that some process opened and bound.
#[derive(Debug)]
pub(super) struct SocketRecord {
    pub(super) addr: SocketAddr,
    pub(super) node: usize,
    /// Processes that have it.
    pub(super) holders: usize,
    /// A program writes to its memory what it must not.
    pub(super) is_spoiled: bool,
    /// A process ended with a message in its hands, or the node did.
    pub(super) may_lose: bool,
    /// Its node was killed: what is sent to its address is for nobody.
    pub(super) is_gone: bool,
    /// Several processes have received on it.
    pub(super) is_shared: bool,
    /// A process that had it was killed, perhaps with a wake token in its hands or before it could
    /// say what it had pushed, or had no channel to say so: the server finds out when it looks.
    pub(super) is_unsure: bool,
    /// Since when there is something on it that nobody is woken for.
    wrong_since: Option<u64>,
    /// Bytes accepted for it that no process has.
    pub(super) unread: usize,
    /// Sockets that have sent to it.
    senders: BTreeSet<u32>,
    /// Something was taken since everything was last at rest.
    pub(super) was_taken: bool,
    /// Something was taken since the last rest at which its node was connected with all others: a
    /// node that has not heard of the room takes it for congested.
    pub(super) is_unheard: bool,
    /// Something was accepted from it for another node, and it was not at rest since with
    /// everything acknowledged: until then it fills the send buffer.
    pub(super) is_unacknowledged: bool,
    send_buffer: usize,
    recv_buffer: usize,
    longest: usize,
}

/// Messages of one process on one socket to another.
#[derive(Debug, Default)]
struct Flow {
    /// Messages accepted.
    accepted: u32,
    /// One more may be: the process does not know yet.
    is_open: bool,
    /// Messages that came.
    seen: BTreeSet<u32>,
}

/// A process, the socket it sends on, and the one it sends to.
type FlowKey = (u32, u32, u32);

/// What was sent, by whom, and what became of it.
#[derive(Debug, Default)]
pub(super) struct Judge {
    pub(super) sockets: Vec<SocketRecord>,
    flows: BTreeMap<FlowKey, Flow>,
}

/// The byte of a message at a place.
fn pattern(key: FlowKey, seq: u32, at: usize) -> u8 {
    let (process, from, to) = key;
    let seed =
        mix(u64::from(process) << 32 | u64::from(from)) ^ mix(u64::from(to) << 32 | u64::from(seq));
    (seed >> (at % 8 * 8)) as u8 ^ (at / 8) as u8
}

/// The bytes of a message.
pub(super) fn payload(key: FlowKey, seq: u32, len: usize) -> Vec<u8> {
    let (process, from, to) = key;
    let mut bytes: Vec<u8> = [from, process, to, seq].map(u32::to_le_bytes).concat();
    bytes.extend((HEAD..len).map(|at| pattern(key, seq, at)));
    bytes
}

impl Judge {
    /// A socket was opened, with buffers to send and to receive of so many bytes.
    pub(super) fn opened(
        &mut self,
        addr: SocketAddr,
        node: usize,
        (send_buffer, recv_buffer): (usize, usize),
    ) -> u32 {
        self.sockets.push(SocketRecord {
            addr,
            node,
            holders: 1,
            is_spoiled: false,
            may_lose: false,
            is_gone: false,
            is_shared: false,
            is_unsure: false,
            wrong_since: None,
            unread: 0,
            senders: BTreeSet::new(),
            was_taken: false,
            is_unheard: false,
            is_unacknowledged: false,
            send_buffer,
            recv_buffer,
            longest: 0,
        });
        (self.sockets.len() - 1) as u32
    }

    pub(super) fn socket(&mut self, socket: u32) -> &mut SocketRecord {
        &mut self.sockets[socket as usize]
    }

    /// Somebody sleeps although there is something on a socket, or not. Tells whether that is
    /// against what is promised.
    pub(super) fn sleeps(&mut self, socket: u32, wrongly: bool, now: u64) -> bool {
        let record = self.socket(socket);
        if !wrongly || record.is_spoiled {
            record.wrong_since = None;
            return false;
        }
        let since = *record.wrong_since.get_or_insert(now);
        !record.is_unsure || now - since > HEALS
    }

    /// A socket may have a receive buffer of so many bytes from now on.
    pub(super) fn resizes(&mut self, socket: u32, bytes: usize) {
        let record = self.socket(socket);
        record.recv_buffer = record.recv_buffer.max(bytes);
    }

    /// Number of the next message of a flow.
    pub(super) fn next(&self, key: FlowKey) -> u32 {
        self.flows.get(&key).map_or(0, |flow| flow.accepted)
    }

    /// A message may be accepted from now on.
    pub(super) fn offer(&mut self, key: FlowKey) {
        self.flows.entry(key).or_default().is_open = true;
    }

    /// The offered message was accepted, of so many bytes.
    ///
    /// # Errors
    /// More than a socket may have waiting.
    pub(super) fn accept(&mut self, key: FlowKey, len: usize) -> Result<(), String> {
        let flow = self.flows.entry(key).or_default();
        flow.is_open = false;
        let is_there = flow.seen.contains(&flow.accepted);
        flow.accepted += 1;
        let (_, from, to) = key;
        let is_remote = self.sockets[from as usize].node != self.sockets[to as usize].node;
        self.sockets[from as usize].is_unacknowledged |= is_remote;
        let to = &mut self.sockets[to as usize];
        to.senders.insert(from);
        to.longest = to.longest.max(len);
        if !is_there {
            to.unread += len;
        }
        // Each sender may have credit for what there is room for, one message more is always
        // accepted, and each process may be about to receive one.
        let local = (1 + to.senders.len()) * (to.recv_buffer + to.longest);
        let in_hands = to.holders * to.longest;
        // Between nodes what fills a sender's buffer is on its way.
        let to = &self.sockets[key.2 as usize];
        let senders = to.senders.iter().map(|from| &self.sockets[*from as usize]);
        // What a spoiled socket has sent may be lost with it, and stays counted.
        let may_be_lost = senders.clone().any(|from| from.is_spoiled);
        let remote = senders.filter(|from| from.node != to.node);
        let most = local + in_hands + remote.map(|from| from.send_buffer).sum::<usize>();
        let is_open = to.holders > 0 && !to.is_gone;
        if is_open && !to.is_spoiled && !may_be_lost && to.unread > most {
            return Err(format!("{} bytes wait for {}, of {most} at most", to.unread, to.addr));
        }
        Ok(())
    }

    /// The offered message was refused.
    ///
    /// # Errors
    /// It came, or there was no reason.
    pub(super) fn refuse(&mut self, key: FlowKey, congested: bool) -> Result<(), String> {
        let flow = self.flows.entry(key).or_default();
        flow.is_open = false;
        if flow.seen.contains(&flow.accepted) {
            return Err(format!("message {} of {key:?} was refused, and came", flow.accepted));
        }
        let (_, from, to) = key;
        let own: usize = self.outstanding(from);
        // A message whose process does not know yet what became of it may wait there.
        let mut others = self.flows.iter().filter(|(_, flow)| flow.is_open);
        let is_unsure = others.any(|((_, by, at), _)| *at == to || *by == from);
        let is_unsure = is_unsure || self.sockets[from as usize].is_unacknowledged;
        let record = &self.sockets[to as usize];
        let is_remote = record.node != self.sockets[from as usize].node;
        let is_unsure = is_unsure || is_remote && record.is_unheard;
        let is_idle = record.unread == 0 && !record.was_taken && own == 0 && !is_unsure;
        if congested && is_idle && !record.is_spoiled && record.holders > 0 && !record.may_lose {
            return Err(format!("a message to {} is refused, where nothing waits", record.addr));
        }
        Ok(())
    }

    /// Tells whether a socket may have a message waiting of a process that has ended before it knew
    /// whether it was accepted.
    pub(super) fn may_have_more(&self, at: u32, has_ended: impl Fn(u32) -> bool) -> bool {
        let mut flows = self.flows.iter();
        flows.any(|((by, _, to), flow)| *to == at && flow.is_open && has_ended(*by))
    }

    /// Messages that a socket has sent, and that did not come.
    pub(super) fn outstanding(&self, from: u32) -> usize {
        let of = self.flows.iter().filter(|((_, socket, _), _)| *socket == from);
        of.map(|(_, flow)| (flow.accepted as usize).saturating_sub(flow.seen.len())).sum()
    }

    /// A message came.
    ///
    /// # Errors
    /// It is not as it was sent, came before, or another should have come.
    pub(super) fn came(
        &mut self,
        at: u32,
        from: Option<SocketAddr>,
        bytes: &[u8],
    ) -> Result<(), String> {
        self.socket(at).was_taken = true;
        self.socket(at).is_unheard = true;
        if self.socket(at).is_spoiled {
            return Ok(());
        }
        let sender = self.sockets.iter().rposition(|socket| Some(socket.addr) == from);
        let Some(sender) = sender else { return Err(format!("a message came from {from:?}")) };
        if self.sockets[sender].is_spoiled {
            return Ok(());
        }
        let number = |n: usize| {
            let bytes = bytes.get(4 * n..4 * n + 4).and_then(|bytes| bytes.try_into().ok());
            bytes.map_or(u32::MAX, u32::from_le_bytes)
        };
        let [from, process, to, seq] = [0, 1, 2, 3].map(number);
        let key = (process, from, to);
        if from as usize != sender || to != at {
            return Err(format!("what socket {sender} sent to {at} came as {key:?}"));
        }
        if bytes != payload(key, seq, bytes.len()) {
            return Err(format!("message {seq} of {key:?} is not as it was sent"));
        }
        let lossy = self.sockets[at as usize].may_lose || self.sockets[sender].may_lose;
        let is_shared = self.sockets[at as usize].is_shared;
        let Some(flow) = self.flows.get_mut(&key) else {
            return Err(format!("nobody sent {seq} of {key:?}"));
        };
        let most = flow.accepted + u32::from(flow.is_open);
        if seq >= most {
            return Err(format!("message {seq} of {key:?} came, of {most} that were sent"));
        }
        let last = flow.seen.last().copied();
        let next = last.map_or(0, |last| last + 1);
        if !flow.seen.insert(seq) {
            return Err(format!("message {seq} of {key:?} came twice"));
        }
        if !is_shared && (seq < next || seq > next && !lossy) {
            return Err(format!("message {seq} of {key:?} came, {next} is next"));
        }
        if seq < flow.accepted {
            let unread = &mut self.sockets[at as usize].unread;
            *unread = unread.saturating_sub(bytes.len());
        }
        Ok(())
    }

    /// Everything is at rest: what has come is what there was, where somebody still has the socket.
    ///
    /// # Errors
    /// Something is missing.
    pub(super) fn end(&self) -> Result<(), String> {
        for (key, flow) in &self.flows {
            let (_, from, to) = *key;
            let is_sure = |socket: u32| {
                let socket = &self.sockets[socket as usize];
                socket.holders > 0 && !socket.is_spoiled && !socket.may_lose
            };
            if is_sure(from) && is_sure(to) && flow.seen.len() < flow.accepted as usize {
                let (came, of) = (flow.seen.len(), flow.accepted);
                return Err(format!("{came} of {of} messages of {key:?} came"));
            }
        }
        Ok(())
    }
}
