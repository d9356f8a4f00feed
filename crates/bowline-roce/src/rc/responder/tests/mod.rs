//! The responder by itself: packets in, replies, memory and completions out.

mod keys;
mod order;
mod random;
mod reads;
mod sends;
mod writes;

use std::sync::Arc;
use std::time::Duration;

use bowline_verbs::{Buffer, Piece, Sge};
use bowline_wire::roce::{Aeth, Bth, Reth};

use super::*;
use crate::rng::Rng;

const PD: PdId = PdId(3);
const PEER: Qpn = Qpn(0x77);
const FIRST: u32 = 1000;
const MTU: usize = 256;
/// All rights of memory that has an address.
const EVERY: Access =
    Access::all().difference(Access::ZERO_BASED).difference(Access::FLUSH_PERSISTENT);

/// A responder and what belongs to it.
struct Side {
    mrs: MrTable,
    rng: Rng,
    responder: Responder,
    counters: Counters,
    reorder_budget: ReorderBudget,
    done: Vec<PendingCompletion>,
    now: Instant,
    access: Access,
    mtu: usize,
    /// The number of the next packet of the peer.
    psn: Psn,
}

/// A reply, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Answer {
    op: Opcode,
    psn: u32,
    /// Syndrome and message number.
    aeth: Option<(u8, u32)>,
    original: Option<u64>,
    payload: Vec<u8>,
}

impl Answer {
    fn ack(psn: u32, msn: u32) -> Self {
        Self::syndrome(psn, 0x1f, msn)
    }

    fn syndrome(psn: u32, syndrome: u8, msn: u32) -> Self {
        let aeth = Some((syndrome, msn));
        Self { op: Opcode::Acknowledge, psn, aeth, original: None, payload: Vec::new() }
    }
}

/// Memory with a key.
#[derive(Clone, Debug)]
struct Region {
    buffer: Arc<Buffer>,
    va: u64,
    key: u32,
}

impl Region {
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { addr: self.va + offset, len, lkey: self.key }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.buffer.append_to(0, self.buffer.len(), &mut out);
        out
    }
}

/// Bytes that differ from each other.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 + 1) as u8).collect()
}

impl Side {
    fn new() -> Self {
        Self::with(MTU, 2, FIRST)
    }

    fn with(mtu: usize, depth: u8, first: u32) -> Self {
        let mut responder = Responder::new();
        responder.start(first, depth, 12);
        Self {
            mrs: MrTable::new(1000, 0),
            rng: Rng::new(&[5; 32]),
            responder,
            counters: Counters::default(),
            reorder_budget: ReorderBudget::new(1 << 20),
            done: Vec::new(),
            now: Instant::from_nanos(1_000_000_000),
            access: EVERY,
            mtu,
            psn: Psn::new(first),
        }
    }

    fn ctx<R>(&mut self, run: impl FnOnce(&mut Responder, &mut RxCtx<'_>) -> R) -> R {
        let mut ctx = RxCtx {
            now: self.now,
            mrs: &mut self.mrs,
            pd: PD,
            access: self.access,
            mtu: self.mtu,
            qpn: Qpn(0x42),
            counters: &mut self.counters,
            reorder_budget: &self.reorder_budget,
            shared_receives: None,
            recv_pd: PD,
            cq: CqId(1),
            done: &mut self.done,
        };
        run(&mut self.responder, &mut ctx)
    }

    /// Registers a buffer whole, at an address of its own.
    fn region(&mut self, len: usize, access: Access) -> Region {
        let buffer = Arc::new(Buffer::new(len).unwrap());
        let va = 0x10_0000;
        let at = (&buffer, 0, len);
        let key = self.mrs.register(&mut self.rng, PD, at, Some(va), access).unwrap().rkey;
        Region { buffer, va, key }
    }

    fn post(&mut self, id: u64, sges: &[Sge]) {
        self.responder.post_recv(&RecvWr { id, sges }, 1000).unwrap();
    }

    /// Posts a receive of its own memory.
    fn post_len(&mut self, id: u64, len: usize) -> Region {
        let region = self.region(len.max(1), Access::LOCAL_WRITE);
        self.post(id, &[region.sge(0, len as u32)]);
        region
    }

    /// Hands in a packet as it would come from the network.
    fn feed(&mut self, packet: &Packet<'_>) -> PacketOutcome {
        let mut bytes = Vec::new();
        packet.emit(&mut bytes);
        let packet = Packet::parse(&bytes).unwrap();
        self.ctx(|responder, ctx| responder.handle(ctx, &packet))
    }

    /// A packet with the next number, which it takes.
    fn next<'p>(&mut self, op: Opcode, payload: &'p [u8]) -> Packet<'p> {
        let bth = Bth { dest_qpn: 0x42, psn: self.psn, ..Bth::default() };
        self.psn = self.psn.next();
        let mut packet = Packet::new(op, bth);
        packet.payload = payload;
        packet
    }

    /// Sends a packet with the next number.
    fn send(&mut self, op: Opcode, payload: &[u8]) -> PacketOutcome {
        let packet = self.next(op, payload);
        self.feed(&packet)
    }

    /// The same, to be acknowledged.
    fn send_ack(&mut self, op: Opcode, payload: &[u8]) -> PacketOutcome {
        let mut packet = self.next(op, payload);
        packet.bth.ack_req = true;
        self.feed(&packet)
    }

    /// Sends a whole message in packets, the last one to be acknowledged.
    fn message(&mut self, ops: [Opcode; 4], reth: Option<Reth>, bytes: &[u8]) -> PacketOutcome {
        let [first, middle, last, only] = ops;
        let chunks: Vec<&[u8]> = match bytes.len() {
            0 => vec![&[]],
            _ => bytes.chunks(self.mtu).collect(),
        };
        let mut after = PacketOutcome::Continue;
        for (i, chunk) in chunks.iter().enumerate() {
            let op = match (i == 0, i + 1 == chunks.len()) {
                (true, true) => only,
                (true, false) => first,
                (false, false) => middle,
                (false, true) => last,
            };
            let mut packet = self.next(op, chunk);
            packet.reth = reth.filter(|_| op.has_reth());
            packet.imm = op.has_imm().then_some(0xabcd);
            packet.bth.ack_req = i + 1 == chunks.len();
            after = self.feed(&packet);
            if after == PacketOutcome::Fatal {
                break;
            }
        }
        after
    }

    fn send_message(&mut self, bytes: &[u8]) -> PacketOutcome {
        use Opcode::{SendFirst, SendLast, SendMiddle, SendOnly};
        self.message([SendFirst, SendMiddle, SendLast, SendOnly], None, bytes)
    }

    fn write_message(&mut self, va: u64, rkey: u32, bytes: &[u8]) -> PacketOutcome {
        use Opcode::{WriteFirst, WriteLast, WriteMiddle, WriteOnly};
        let reth = Reth { va, rkey, len: bytes.len() as u32 };
        self.message([WriteFirst, WriteMiddle, WriteLast, WriteOnly], Some(reth), bytes)
    }

    fn write_imm_message(&mut self, va: u64, rkey: u32, bytes: &[u8]) -> PacketOutcome {
        use Opcode::{WriteFirst, WriteLastImm, WriteMiddle, WriteOnlyImm};
        let reth = Reth { va, rkey, len: bytes.len() as u32 };
        self.message([WriteFirst, WriteMiddle, WriteLastImm, WriteOnlyImm], Some(reth), bytes)
    }

    /// Sends a READ request and skips the numbers of its answers.
    fn read(&mut self, va: u64, rkey: u32, len: u32) -> PacketOutcome {
        let mut packet = self.next(Opcode::ReadRequest, &[]);
        packet.reth = Some(Reth { va, rkey, len });
        packet.bth.ack_req = true;
        self.psn = packet.bth.psn + len.div_ceil(self.mtu as u32).max(1);
        self.feed(&packet)
    }

    /// Sends a READ request with any number.
    fn read_at(&mut self, psn: u32, va: u64, rkey: u32, len: u32) -> PacketOutcome {
        let bth = Bth { dest_qpn: 0x42, psn: Psn::new(psn), ..Bth::default() };
        let mut packet = Packet::new(Opcode::ReadRequest, bth);
        packet.reth = Some(Reth { va, rkey, len });
        self.feed(&packet)
    }

    fn atomic(
        &mut self,
        op: Opcode,
        va: u64,
        rkey: u32,
        (swap, compare): (u64, u64),
    ) -> PacketOutcome {
        let mut packet = self.next(op, &[]);
        packet.atomic = Some(AtomicEth { va, rkey, swap_or_add: swap, compare });
        self.feed(&packet)
    }

    /// The next reply as it is on the wire.
    fn reply(&mut self) -> Option<Vec<u8>> {
        let mut out = Burst::new();
        let has = self.responder.has_reply();
        let some = self.ctx(|responder, ctx| responder.fill_reply(ctx, PEER, &mut out));
        assert!(has || !some);
        assert_eq!(some, !out.bytes.is_empty());
        some.then_some(out.bytes)
    }

    /// All replies there are. Each of them is well formed and to the peer [RSP-17].
    fn replies(&mut self) -> Vec<Answer> {
        let mut answers = Vec::new();
        while let Some(bytes) = self.reply() {
            let packet = Packet::parse(&bytes).unwrap();
            let bth = packet.bth;
            assert_eq!(bth, Bth { dest_qpn: PEER.0, psn: bth.psn, ..Bth::default() });
            assert!(packet.opcode.payload_rule().allows(packet.payload.len(), self.mtu));
            answers.push(Answer {
                op: packet.opcode,
                psn: bth.psn.get(),
                aeth: packet.aeth.map(|Aeth { syndrome, msn }| (syndrome.to_u8(), msn)),
                original: packet.atomic_ack.map(|ack| ack.original),
                payload: packet.payload.to_vec(),
            });
        }
        assert!(!self.responder.has_reply());
        answers
    }

    /// Completions since the last call.
    fn completions(&mut self) -> Vec<Completion> {
        self.done.drain(..).map(|done| done.completion).collect()
    }

    /// Ids and statuses of them.
    fn statuses(&mut self) -> Vec<(u64, Status)> {
        self.completions().iter().map(|done| (done.wr_id, done.status)).collect()
    }

    fn flush(&mut self) {
        self.ctx(|responder, ctx| responder.flush(ctx));
    }

    fn sleep(&mut self, millis: u64) {
        self.now = self.now + Duration::from_millis(millis);
        if self.responder.poll_timeout().is_some_and(|at| at <= self.now) {
            self.responder.handle_timeout(self.now);
        }
    }
}
