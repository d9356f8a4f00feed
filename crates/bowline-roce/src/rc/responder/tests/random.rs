//! Any packets in any order: nothing panics, nothing grows without bound, no byte outside of what
//! was granted is read or written.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const GRANTED: usize = 700;
const AROUND: usize = 300;
const BASE: u64 = 0x4000;
/// What lies around the memory granted.
const SECRET: u8 = 0xee;
const DEPTH: u8 = 3;
const SLOTS: usize = 4;

#[derive(Clone, Debug)]
enum Step {
    Packet { op: Opcode, psn: i32, key: usize, va: u64, len: u32, payload: usize, ack_req: bool },
    Post(u32),
    Reply,
    Sleep,
    Rebind,
}

fn lengths() -> impl Strategy<Value = u32> {
    let edges = [0, 1, 255, 256, 257, 512, 699, 700, 701, 1 << 31, u32::MAX];
    prop_oneof![0..800_u32, proptest::sample::select(edges.to_vec())]
}

fn addresses() -> impl Strategy<Value = u64> {
    let near = BASE - 20..BASE + GRANTED as u64 + 20;
    let aligned = (0..80_u64).prop_map(|n| BASE + n * 8);
    prop_oneof![8 => near, 1 => Just(BASE), 4 => aligned, 1 => any::<u64>()]
}

fn steps() -> impl Strategy<Value = Step> {
    let ops: Vec<_> = Opcode::ALL.into_iter().filter(|op| op.is_request()).collect();
    let psn = prop_oneof![6 => Just(0), 2 => -6..6_i32, 1 => any::<i32>()];
    let payload = prop_oneof![3 => Just(MTU), 3 => 0..MTU + 8];
    let fields = (proptest::sample::select(ops), psn, 0..5_usize, addresses(), lengths(), payload);
    let packet = (fields, any::<bool>()).prop_map(|((op, psn, key, va, len, payload), ack_req)| {
        Step::Packet { op, psn, key, va, len, payload, ack_req }
    });
    prop_oneof![
        20 => packet,
        4 => (0..600_u32).prop_map(Step::Post),
        4 => Just(Step::Reply),
        1 => Just(Step::Sleep),
        1 => Just(Step::Rebind),
    ]
}

/// Memory of which the middle is granted.
fn guarded(side: &mut Side, access: Access) -> Region {
    let buffer = Arc::new(Buffer::new(GRANTED + 2 * AROUND).unwrap());
    buffer.write(0, &[SECRET; AROUND]);
    buffer.write(AROUND + GRANTED, &[SECRET; AROUND]);
    let at = (&buffer, AROUND, GRANTED);
    let key = side.mrs.register(&mut side.rng, PD, at, Some(BASE), access).unwrap().rkey;
    Region { buffer, va: BASE, key }
}

fn run(steps: Vec<Step>) {
    let mut side = Side::with(MTU, DEPTH, FIRST);
    let all = guarded(&mut side, EVERY);
    let read_only = guarded(&mut side, Access::REMOTE_READ);
    read_only.buffer.write(AROUND, &[0x22; GRANTED]);
    let receive = guarded(&mut side, Access::LOCAL_WRITE);
    let slot = side.mrs.allocate(&mut side.rng, PD).unwrap().rkey;
    let scattered = Arc::new(Buffer::new(GRANTED + 2 * AROUND).unwrap());
    scattered.write(0, &[SECRET; GRANTED + 2 * AROUND]);
    let piece = |offset, len| Piece { buffer: Arc::clone(&scattered), offset, len };
    let pieces = vec![piece(500, 300), piece(AROUND, 100), piece(450, 1)];
    for piece in &pieces {
        scattered.write(piece.offset, &vec![0; piece.len]);
    }
    let mut ids = 0..;
    let mut posted = 0;
    for step in steps {
        match step {
            Step::Packet { op, psn, key, va, len, payload, ack_req } => {
                let key = [all.key, read_only.key, receive.key, slot, 0x1234][key];
                let psn = side.responder.expected + psn as u32;
                let bytes = vec![0x33; payload];
                let bth = Bth { dest_qpn: 0x42, psn, ack_req, ..Bth::default() };
                let mut packet = Packet::new(op, bth);
                if op.payload_rule() != bowline_wire::roce::PayloadRule::Nothing {
                    packet.payload = &bytes;
                }
                packet.reth = Some(Reth { va, rkey: key, len });
                // Not a value that looks like the secret when it is read back.
                packet.atomic = Some(AtomicEth { va, rkey: key, swap_or_add: 0, compare: 0 });
                packet.imm = Some(len);
                packet.ieth = Some(key);
                side.feed(&packet);
            }
            Step::Post(len) => {
                let id = ids.next().unwrap();
                side.post(id, &[receive.sge(u64::from(len), len / 2), receive.sge(0, len / 2)]);
                posted += 1;
            }
            Step::Reply => check_reply(side.reply()),
            Step::Sleep => side.sleep(60),
            Step::Rebind if side.mrs.check(PD, slot, BASE, 0, Access::empty()).is_ok() => {
                side.mrs.invalidate((PD, Qpn(0x42)), slot).unwrap();
            }
            Step::Rebind => side.mrs.bind(PD, slot, pieces.clone(), BASE, EVERY).unwrap(),
        }
        assert!(side.responder.replies.len() <= 5 * SLOTS + 3);
        if side.responder.failed() {
            while side.responder.has_reply() {
                check_reply(side.reply());
            }
            side.flush();
            assert!(side.responder.posted.is_empty());
            side.responder.start(side.rng.next_u32(), DEPTH, 1);
        }
    }
    while side.responder.has_reply() {
        check_reply(side.reply());
    }
    side.flush();
    // Every receive completes once, in order.
    let done: Vec<_> = side.done.iter().map(|done| done.completion.wr_id).collect();
    assert_eq!(done, (0..posted).collect::<Vec<u64>>());
    for region in [&all, &read_only, &receive] {
        let bytes = region.bytes();
        assert!(bytes[..AROUND].iter().all(|b| *b == SECRET));
        assert!(bytes[AROUND + GRANTED..].iter().all(|b| *b == SECRET));
    }
    assert!(read_only.bytes()[AROUND..AROUND + GRANTED].iter().all(|b| *b == 0x22));
    let mut bytes = Vec::new();
    scattered.append_to(0, scattered.len(), &mut bytes);
    for (i, byte) in bytes.iter().enumerate() {
        let inside = pieces.iter().any(|p| (p.offset..p.offset + p.len).contains(&i));
        assert!(inside || *byte == SECRET);
    }
}

fn check_reply(reply: Option<Vec<u8>>) {
    let Some(bytes) = reply else { return };
    let packet = Packet::parse(&bytes).unwrap();
    assert!(packet.opcode.is_response());
    assert!(packet.opcode.payload_rule().allows(packet.payload.len(), MTU));
    assert!(!packet.payload.contains(&SECRET));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Section 6 as a whole, [MR-2], [MR-3].
    #[test]
    fn a_hostile_peer_does_no_harm(steps in vec(steps(), 1..200)) {
        run(steps);
    }

    /// Checklist 7: packets of a peer that goes back come in any order, twice or not at all; each
    /// message is delivered once and in order, and additions are executed once.
    #[test]
    fn every_message_is_delivered_once(
        messages in vec(0..600_usize, 1..20),
        choices in vec(any::<u8>(), 50..400),
    ) {
        deliver(&messages, &choices);
    }
}

/// What the peer wants done: SENDs of these lengths, each followed by an addition and a READ.
fn requests(messages: &[usize], region: &Region) -> Vec<(u32, Vec<u8>)> {
    let mut side = Side::new();
    let mut packets = Vec::new();
    let mut push = |packet: &Packet<'_>| {
        let mut bytes = Vec::new();
        packet.emit(&mut bytes);
        packets.push((packet.bth.psn.get(), bytes));
    };
    for (i, len) in messages.iter().enumerate() {
        let bytes = vec![i as u8; *len];
        let chunks = len.div_ceil(MTU).max(1);
        for k in 0..chunks {
            let op = match (k == 0, k + 1 == chunks) {
                (true, true) => Opcode::SendOnly,
                (true, false) => Opcode::SendFirst,
                (false, false) => Opcode::SendMiddle,
                (false, true) => Opcode::SendLast,
            };
            push(&side.next(op, &bytes[k * MTU..(*len).min((k + 1) * MTU)]));
        }
        let mut add = side.next(Opcode::FetchAdd, &[]);
        let (va, rkey) = (region.va, region.key);
        add.atomic = Some(AtomicEth { va, rkey, swap_or_add: 1, compare: 0 });
        push(&add);
        let mut read = side.next(Opcode::ReadRequest, &[]);
        read.reth = Some(Reth { va, rkey, len: 2 * MTU as u32 });
        push(&read);
        side.psn = side.psn.next();
    }
    packets
}

fn deliver(messages: &[usize], choices: &[u8]) {
    let mut side = Side::with(MTU, 8, FIRST);
    let region = side.region(1024, EVERY);
    let receives: Vec<_> = (0..messages.len()).map(|i| side.post_len(i as u64, 600)).collect();
    let packets = requests(messages, &region);
    let feed = |side: &mut Side, index: usize| {
        let packet = Packet::parse(&packets[index].1).unwrap();
        let after = side.ctx(|responder, ctx| responder.handle(ctx, &packet));
        assert_eq!(after, PacketOutcome::Continue);
        side.replies();
    };
    // The peer goes on from where the responder is, and any earlier packet may come late.
    let at =
        |side: &Side| packets.iter().position(|(psn, _)| side.responder.expected == Psn::new(*psn));
    let mut turn = 0;
    while let Some(next) = at(&side) {
        let choice = choices[turn % choices.len()] as usize;
        turn += 1;
        match choice % 4 {
            0 => feed(&mut side, (next + choice / 4 % 5).min(packets.len() - 1)),
            1 => feed(&mut side, next.saturating_sub(choice / 4 % 9)),
            _ => feed(&mut side, next),
        }
        if turn % choices.len() == 0 {
            feed(&mut side, next);
        }
    }
    for index in 0..packets.len() {
        feed(&mut side, index);
    }
    let count = u64::from_ne_bytes(region.bytes()[..8].try_into().unwrap());
    assert_eq!(count, messages.len() as u64);
    let done: Vec<_> = side.completions().iter().map(|done| (done.wr_id, done.byte_len)).collect();
    let sent: Vec<_> =
        messages.iter().enumerate().map(|(i, len)| (i as u64, *len as u32)).collect();
    assert_eq!(done, sent);
    for (i, (receive, len)) in receives.iter().zip(messages).enumerate() {
        assert!(receive.bytes()[..*len].iter().all(|b| *b == i as u8));
    }
}
