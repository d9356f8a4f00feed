//! The oracle of delivery: exactly once, in order per pair of sockets, no loss while both sockets
//! exist, every byte as sent.
//!
//! A *flow* consists of the messages that one incarnation of a socket sends to one address. They
//! wait in a list until they are received. Receiving a message drops the earlier ones from the
//! list. Each of those must be *excused*: cancelled, sent from or to a socket that was closed
//! meanwhile, or lost in a way that the rules allow. A message that is not in the list was
//! delivered twice, out of order, or without having been sent.
//!
//! Messages too short to carry their tag cannot always be told apart. Once a message of a flow is
//! excused, all its short messages are excused, and unexpected short messages are accepted.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use super::payload::{self, TAG_LEN};

/// Identifies a message by its flow and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MessageId {
    flow: u32,
    index: u32,
}

#[derive(Debug)]
struct Pending {
    index: u32,
    len: u32,
    excused: bool,
    /// TCP connection on which the message was last written.
    connection: u32,
}

/// `connection` of a message that was not written yet.
const NO_CONNECTION: u32 = u32::MAX;

#[derive(Debug)]
struct Flow {
    slot: usize,
    incarnation: u16,
    target: usize,
    next: u32,
    pending: VecDeque<Pending>,
    loose: bool,
    /// Messages with lower indices were sent to an earlier process of the target's host. A sender
    /// without an acknowledgement repeats them to the new process, which has another socket.
    repeats_below: u32,
    /// Index of the last message that the target's present process received.
    last: Option<u32>,
    /// Messages sent to an earlier process that the present process has received.
    repeated: HashSet<u32>,
    /// The address of one end belonged to another process for a while. Its peers forgot it then,
    /// and forget the other process when it returns, so repeated messages are new to them.
    moved: bool,
}

/// State of a socket of the workload.
#[derive(Debug)]
struct Slot {
    addr: SocketAddr,
    incarnation: u16,
    /// The socket is open, and its address is at its host.
    reachable: bool,
    pings: u64,
    pongs: u64,
    /// Pings may be answered twice: those to a restarted process, or by a kernel, may arrive twice.
    double_pongs_allowed: bool,
    /// The address belonged to another process for a while.
    moved: bool,
    /// The socket's kernel lets messages overtake each other.
    disorder: bool,
    /// The socket's node releases messages when they were processed, not when TCP has acknowledged
    /// them.
    end_to_end: bool,
    /// The socket sends over RDMA: its messages to one address come on one connection.
    over_rdma: bool,
    /// Type of service.
    tos: u8,
}

/// Reason why a received message was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It was the next message.
    InTurn,
    /// It came once more, in a new process of the receiver.
    Again,
    /// It may have come before: an address belonged to another process meanwhile.
    Moved,
    /// It came before others that are under way on other connections.
    Ahead,
    /// It came once more, on a connection that the receiver learned of after a later one.
    Overtaken,
    /// It came after later ones: the receiving kernel dropped it when it first came.
    Late,
}

/// All flows of a run.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    slots: Vec<Slot>,
    by_addr: HashMap<SocketAddr, usize>,
    flows: Vec<Flow>,
    by_pair: HashMap<(usize, usize), Vec<usize>>,
    /// Messages of kernels on connections that were overtaken by later ones; copies of them may
    /// have come.
    overtaken: HashSet<MessageId>,
    /// Messages that kernels have dropped on arrival; a sender may repeat them with success
    /// later.
    dropped: HashSet<MessageId>,
}

impl Oracle {
    /// Adds a socket, which is not open yet; slots are numbered from 0.
    pub(crate) fn add_slot(
        &mut self,
        addr: SocketAddr,
        end_to_end: bool,
        over_rdma: bool,
        tos: u8,
    ) {
        let slot = self.slots.len();
        self.by_addr.insert(addr, slot);
        self.slots.push(Slot {
            addr,
            incarnation: 0,
            reachable: false,
            pings: 0,
            pongs: 0,
            double_pongs_allowed: false,
            moved: false,
            disorder: false,
            end_to_end,
            over_rdma,
            tos,
        });
    }

    /// Notes that a socket is open; messages sent to it before do not count.
    pub(crate) fn opened(&mut self, slot: usize) {
        let s = &mut self.slots[slot];
        s.incarnation += 1;
        s.reachable = true;
    }

    /// Notes that a socket is closed or its process is gone: all messages from it and to it are
    /// excused. Returns their number.
    pub(crate) fn closed(&mut self, slot: usize) -> u64 {
        self.slots[slot].reachable = false;
        let hit = |f: &&mut Flow| f.slot == slot || f.target == slot;
        self.flows.iter_mut().filter(hit).map(Flow::excuse_all).sum()
    }

    /// Notes that a process is gone; its sockets were closed before.
    pub(crate) fn process_gone(&mut self, slots: &[usize]) {
        for flow in self.flows.iter_mut().filter(|f| slots.contains(&f.target)) {
            flow.repeats_below = flow.next;
            flow.last = None;
            flow.repeated.clear();
        }
        self.allow_double_pongs();
    }

    /// Notes that the address of these sockets belongs to another process for a while.
    pub(crate) fn address_moved(&mut self, slots: &[usize]) {
        let hit = |f: &&mut Flow| slots.contains(&f.target) || slots.contains(&f.slot);
        for flow in self.flows.iter_mut().filter(hit) {
            flow.moved = true;
            flow.loosen();
        }
        slots.iter().for_each(|s| self.slots[*s].moved = true);
        self.allow_double_pongs();
    }

    /// Notes that a kernel sends further messages on another path than earlier ones [B-13].
    pub(crate) fn allow_disorder(&mut self, slot: usize) {
        self.slots[slot].disorder = true;
        for flow in self.flows.iter_mut().filter(|f| f.slot == slot) {
            flow.loosen();
        }
    }

    /// Notes that some peers may answer a ping twice.
    pub(crate) fn allow_double_pongs(&mut self) {
        self.slots.iter_mut().for_each(|s| s.double_pongs_allowed = true);
    }

    /// Notes that a socket which was never closed can be reached again.
    pub(crate) fn reachable_again(&mut self, slot: usize) {
        self.slots[slot].reachable = true;
    }

    fn flow(&mut self, slot: usize, target: usize) -> usize {
        let incarnation = self.slots[slot].incarnation;
        let flows = self.by_pair.entry((slot, target)).or_default();
        if let Some(&last) = flows.last()
            && self.flows[last].incarnation == incarnation
        {
            return last;
        }
        // The messages of earlier incarnations are all excused.
        let moved = self.slots[slot].moved || self.slots[target].moved;
        let loose = !flows.is_empty() || self.slots[slot].disorder || moved;
        flows.push(self.flows.len());
        let pending = VecDeque::new();
        self.flows.push(Flow {
            slot,
            incarnation,
            target,
            next: 0,
            pending,
            loose,
            repeats_below: 0,
            last: None,
            repeated: HashSet::new(),
            moved,
        });
        self.flows.len() - 1
    }

    /// Makes the payload of the next message from `slot` to `target`.
    pub(crate) fn next_payload(
        &mut self,
        slot: usize,
        target: usize,
        len: usize,
        out: &mut Vec<u8>,
    ) {
        let flow = self.flow(slot, target);
        let Flow { incarnation, next, .. } = self.flows[flow];
        out.clear();
        payload::fill(out, slot, incarnation, target, next, len);
    }

    /// Notes that the message of [`next_payload`](Self::next_payload) was accepted.
    pub(crate) fn send_accepted(&mut self, slot: usize, target: usize, len: usize) -> MessageId {
        let reachable = self.slots[target].reachable && self.slots[slot].reachable;
        let number = self.flow(slot, target);
        let flow = &mut self.flows[number];
        let excused = !reachable || (flow.loose && len < TAG_LEN);
        flow.pending.push_back(Pending {
            index: flow.next,
            len: len as u32,
            excused,
            connection: NO_CONNECTION,
        });
        flow.next += 1;
        flow.loose |= !reachable;
        if flow.loose {
            flow.loosen();
        }
        MessageId { flow: number as u32, index: flow.next - 1 }
    }

    /// Notes that the message just announced was refused.
    pub(crate) fn send_refused(&mut self, slot: usize, target: usize) {
        let flow = self.flow(slot, target);
        let flow = &mut self.flows[flow];
        flow.pending.pop_back();
        flow.next -= 1;
    }

    /// Excuses all messages of a socket to another, because they are cancelled. Returns their
    /// number.
    pub(crate) fn cancelled(&mut self, slot: usize, target: usize) -> u64 {
        let hit = |f: &&mut Flow| f.slot == slot && f.target == target;
        self.flows.iter_mut().filter(hit).map(Flow::excuse_all).sum()
    }

    /// Finds the message of a frame that begins with these bytes.
    pub(crate) fn identify(
        &self,
        source: SocketAddr,
        target: SocketAddr,
        tag: &[u8],
    ) -> Option<MessageId> {
        let slot = *self.by_addr.get(&source)?;
        let target = *self.by_addr.get(&target)?;
        let flows = self.by_pair.get(&(slot, target))?;
        let Some((index, _, incarnation)) = payload::tag(tag) else {
            // A payload too short for a tag stands for every short message of the newest flow.
            return Some(MessageId { flow: *flows.last()? as u32, index: u32::MAX });
        };
        let flow = flows.iter().find(|f| self.flows[**f].incarnation == incarnation)?;
        Some(MessageId { flow: *flow as u32, index })
    }

    /// Notes that a message was started on a TCP connection.
    pub(crate) fn started(&mut self, message: MessageId, connection: u32) {
        let flow = &mut self.flows[message.flow as usize];
        if let Ok(at) = flow.pending.binary_search_by_key(&message.index, |p| p.index) {
            flow.pending[at].connection = connection;
        }
    }

    /// Excuses a message, because the rules allow its loss.
    pub(crate) fn excuse(&mut self, message: MessageId) {
        let flow = &mut self.flows[message.flow as usize];
        if let Ok(at) = flow.pending.binary_search_by_key(&message.index, |p| p.index) {
            flow.pending[at].excused = true;
        }
        flow.loosen();
    }

    /// Excuses a message, unless it has come. One too short for a tag stands for all short ones.
    pub(crate) fn excuse_one(&mut self, message: MessageId) {
        let flow = &mut self.flows[message.flow as usize];
        if message.index == u32::MAX {
            flow.loosen();
        } else if let Ok(at) = flow.pending.binary_search_by_key(&message.index, |p| p.index)
            && !std::mem::replace(&mut flow.pending[at].excused, true)
        {
            flow.loosen();
        }
    }

    /// Notes that a kernel dropped this message as an old one by mistake.
    pub(crate) fn dropped(&mut self, message: MessageId) {
        self.excuse(message);
        self.dropped.insert(message);
    }

    /// Excuses the messages that were started next on connection `connection` between two
    /// addresses, of which at most the ports are known: the first message of each flow that was not
    /// started there before and is not excused. Earlier excused messages were lost before.
    pub(crate) fn excuse_started(
        &mut self,
        (local, remote): (IpAddr, IpAddr),
        ports: Option<(u16, u16)>,
        connection: u32,
    ) {
        for flow in &mut self.flows {
            let (from, to) = (self.slots[flow.slot].addr, self.slots[flow.target].addr);
            let between = from.ip() == local && to.ip() == remote;
            if !between || ports.is_some_and(|ports| ports != (from.port(), to.port())) {
                continue;
            }
            let first = flow
                .pending
                .iter()
                .rposition(|p| p.connection == connection)
                .map_or(0, |at| at + 1);
            let mut next = flow.pending.iter_mut().skip(first);
            // Short messages, which carry no tag, are all excused below.
            if let Some(next) = next.find(|p| p.len as usize >= TAG_LEN && !p.excused) {
                next.excused = true;
            }
            flow.loosen();
        }
    }

    /// Notes that a kernel wrote this message on a connection that its peer learned of after a
    /// later one, which brought the copy. Numbers that may have begun anew do not tell the two
    /// apart.
    pub(crate) fn overtaken(&mut self, message: MessageId) {
        self.overtaken.insert(message);
        if message.index == u32::MAX {
            self.flows[message.flow as usize].loosen();
        }
    }

    /// Notes that a ping was accepted.
    pub(crate) fn ping_accepted(&mut self, slot: usize) {
        self.slots[slot].pings += 1;
    }

    /// Notes that the ping just announced was refused.
    pub(crate) fn ping_refused(&mut self, slot: usize) {
        self.slots[slot].pings -= 1;
    }

    /// Checks a message that socket `target` received.
    pub(crate) fn received(
        &mut self,
        target: usize,
        source: SocketAddr,
        payload: &[u8],
        scratch: &mut Vec<u8>,
    ) -> Result<Verdict, String> {
        if source.port() == 0 {
            return self.received_pong(target, payload.len());
        }
        let Some(&slot) = self.by_addr.get(&source) else {
            return Err(format!("{} got a message from {source}, no socket", self.addr(target)));
        };
        let name = || format!("{source} -> {}", self.slots[target].addr);
        let Some(flows) = self.by_pair.get(&(slot, target)) else {
            return Err(format!("{}: a message although none was sent", name()));
        };
        let end_to_end = self.slots[slot].end_to_end && self.slots[target].end_to_end;
        let by_tcp = !(end_to_end || self.slots[slot].over_rdma);
        let Some((index, tag_slot, incarnation)) = payload::tag(payload) else {
            if flows.iter().any(|f| self.flows[*f].loose) {
                return Ok(Verdict::InTurn); // short messages are not told apart any more
            }
            for &flow in flows {
                if self.flows[flow].take_short(payload, slot, target, by_tcp, scratch) {
                    return Ok(Verdict::InTurn);
                }
            }
            return Err(format!("{}: unexpected message of {} bytes", name(), payload.len()));
        };
        let found = flows.iter().find(|f| self.flows[**f].incarnation == incarnation);
        let (Some(&flow), true) = (found, tag_slot == slot) else {
            return Err(format!(
                "{}: message of another flow, tag {payload:02x?}",
                name(),
                payload = &payload[..TAG_LEN]
            ));
        };
        scratch.clear();
        payload::fill(scratch, slot, incarnation, target, index, payload.len());
        if scratch != payload {
            return Err(format!("{}: message {index} is not what was sent", name()));
        }
        let name = name();
        let id = MessageId { flow: flow as u32, index };
        self.received_in_flow(&name, id, payload.len(), by_tcp)
    }

    fn received_pong(&mut self, target: usize, len: usize) -> Result<Verdict, String> {
        let slot = &mut self.slots[target];
        slot.pongs += 1;
        match len {
            0 if slot.pongs <= slot.pings || slot.double_pongs_allowed => Ok(Verdict::InTurn),
            0 => Err(format!("{} got {} pongs for {} pings", slot.addr, slot.pongs, slot.pings)),
            n => Err(format!("{} got a pong with {n} bytes", slot.addr)),
        }
    }

    /// Checks whether it was the turn of a message of `len` bytes. `name` is that of its flow in
    /// texts. `by_tcp`: one of the two hosts goes by TCP's acknowledgements.
    fn received_in_flow(
        &mut self,
        name: &str,
        id: MessageId,
        len: usize,
        by_tcp: bool,
    ) -> Result<Verdict, String> {
        let index = id.index;
        let overtaken = self.overtaken.contains(&id);
        let dropped = self.dropped.remove(&id);
        let flow = &mut self.flows[id.flow as usize];
        // Messages of a sender that goes by TCP's acknowledgements may be under way on other
        // connections.
        let in_order = by_tcp || flow.last.is_none_or(|last| index > last);
        let again = index < flow.repeats_below && flow.repeated.insert(index);
        let found = flow.pending.binary_search_by_key(&index, |p| p.index);
        if found.is_err() && again && in_order {
            flow.last = Some(index);
            return Ok(Verdict::Again);
        }
        if found.is_err() && overtaken {
            return Ok(Verdict::Overtaken);
        }
        if found.is_err() && dropped {
            return Ok(Verdict::Late);
        }
        if found.is_err() && index < flow.next && flow.moved {
            return Ok(Verdict::Moved);
        }
        let Ok(at) = found else {
            let next = flow.pending.front().map(|p| p.index);
            return Err(format!(
                "{name}: message {index} twice or out of order, next awaited {next:?} of {}",
                flow.next
            ));
        };
        if flow.pending[at].len as usize != len {
            let sent = flow.pending[at].len;
            return Err(format!("{name}: message {index} has {len} of {sent} bytes"));
        }
        if self.slots[flow.slot].disorder {
            flow.pending.remove(at);
            return Ok(Verdict::InTurn);
        }
        // When paths are added, a sender that goes by TCP's acknowledgements uses the new ones once
        // TCP has acknowledged all bytes on the old ones. The receiver may still read the new ones
        // first.
        let connection = flow.pending[at].connection;
        let elsewhere = |p: &Pending| {
            let short = (p.len as usize) < TAG_LEN; // its connection is not known
            by_tcp && (short || (p.connection != connection && p.connection != NO_CONNECTION))
        };
        let mut skipped = flow.pending.iter().take(at).filter(|p| !p.excused);
        if let Some(first) = skipped.clone().next() {
            if skipped.all(elsewhere) {
                flow.pending.remove(at);
                return Ok(Verdict::Ahead);
            }
            return Err(format!("{name}: message {index} before {}", first.index));
        }
        // Earlier messages are lost, unless they are on their way on another connection.
        let kept = if by_tcp {
            flow.pending.iter().take(at).filter(|p| p.connection != connection).count()
        } else {
            0
        };
        if kept == 0 {
            flow.pending.drain(..=at);
        } else {
            flow.pending
                .retain(|p| p.index > index || (p.index < index && p.connection != connection));
        }
        flow.last = Some(index);
        Ok(Verdict::InTurn)
    }

    /// Describes the first message that is not excused and has not come.
    pub(crate) fn missing(&self) -> Option<String> {
        self.flows.iter().find_map(|flow| {
            let owed = flow.pending.iter().filter(|p| !p.excused).count();
            let first = flow.pending.iter().find(|p| !p.excused)?;
            let (from, to) = (self.slots[flow.slot].addr, self.slots[flow.target].addr);
            Some(format!(
                "{from} -> {to}: message {} ({} bytes) did not come, {owed} missing of {} sent",
                first.index, first.len, flow.next
            ))
        })
    }

    /// Returns how many messages of a socket to another have not come.
    pub(crate) fn not_received(&self, slot: usize, target: usize) -> usize {
        let flows = self.by_pair.get(&(slot, target)).into_iter().flatten();
        flows.map(|flow| self.flows[*flow].pending.len()).sum()
    }

    /// Returns the socket of an address.
    pub(crate) fn slot_at(&self, addr: SocketAddr) -> Option<usize> {
        self.by_addr.get(&addr).copied()
    }

    /// Returns the type of service of a socket.
    pub(crate) fn tos(&self, slot: usize) -> u8 {
        self.slots[slot].tos
    }

    fn addr(&self, slot: usize) -> SocketAddr {
        self.slots[slot].addr
    }
}

impl Flow {
    fn excuse_all(&mut self) -> u64 {
        let mut owed = 0;
        for p in &mut self.pending {
            owed += u64::from(!p.excused);
            p.excused = true;
        }
        self.loose = true;
        owed
    }

    fn loosen(&mut self) {
        self.loose = true;
        for p in self.pending.iter_mut().filter(|p| (p.len as usize) < TAG_LEN) {
            p.excused = true;
        }
    }

    /// Takes the first message that looks like `payload` and may come now. With `by_tcp` it may
    /// have overtaken messages of other connections.
    fn take_short(
        &mut self,
        payload: &[u8],
        slot: usize,
        target: usize,
        by_tcp: bool,
        scratch: &mut Vec<u8>,
    ) -> bool {
        for at in 0..self.pending.len() {
            let p = &self.pending[at];
            if p.len as usize != payload.len() {
                continue;
            }
            scratch.clear();
            payload::fill(scratch, slot, self.incarnation, target, p.index, payload.len());
            if scratch != payload {
                continue;
            }
            let mut waiting = self.pending.iter().take(at).filter(|p| !p.excused);
            if waiting.clone().next().is_none() {
                self.pending.drain(..=at);
                return true;
            }
            let started = |q: &Pending| q.connection != NO_CONNECTION || (q.len as usize) < TAG_LEN;
            if by_tcp && waiting.all(started) {
                self.pending.remove(at);
                return true;
            }
        }
        false
    }
}
