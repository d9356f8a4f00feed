//! Packets made together against the same made one by one, whatever happens.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bowline_verbs::{
    Access, MrKeys, Mtu, Piece, QpAttr, QpState, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge,
};

use crate::rc::requester::common::{BUFFER, Fate, Pair, Setup};
use crate::{Burst, Config, Congestion};

thread_local! {
    static ONE_BY_ONE: Cell<bool> = const { Cell::new(false) };
    static TOGETHER: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn one_by_one() -> bool {
    ONE_BY_ONE.get()
}

pub(super) fn note_together(count: usize) {
    TOGETHER.set(TOGETHER.get() + count);
}

/// Windows to choose from. With that of the path, times of packets differ by how the bytes before
/// them were rounded.
const WINDOWS: [Congestion; 6] = [
    Congestion::Fixed(16),
    Congestion::Fixed(20),
    Congestion::Fixed(33),
    Congestion::Fixed(240),
    Congestion::Fixed(240),
    Congestion::Fixed(1000),
];

const IOVA: u64 = 0x1000_0000;
const RECEIVE: u32 = 4_900_000;

#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % limit
    }

    fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}

/// Keys of a side: of the whole buffer, of a part of it that some elements leave, and of many short
/// pieces.
type Keys = [MrKeys; 3];

fn register(pair: &mut Pair, side: usize, dice: &mut Dice) -> Keys {
    let all =
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let (now, node) = (pair.now, &mut pair.nodes[side]);
    node.fill(0, BUFFER, side as u8 + 3);
    let buffer = Arc::clone(&node.buffer);
    let whole = node.dev.reg_mr(node.pd, &buffer, 0, BUFFER, Some(IOVA), all).unwrap();
    let part = node.dev.reg_mr(node.pd, &buffer, 1000, 70_001, Some(IOVA + 5), all).unwrap();
    let cut = node.dev.alloc_mr(node.pd).unwrap();
    let (mut pieces, mut at) = (Vec::new(), 0);
    while at < 1_500_000 {
        let len = 1 + dice.below(9000) as usize;
        pieces.push(Piece { buffer: Arc::clone(&buffer), offset: at, len });
        at += len + dice.below(50) as usize;
    }
    let op = SendOp::RegMr { key: cut.lkey, pieces, iova: IOVA, access: all };
    let wr = SendWr { id: 0, op, sges: &[], inline: &[], flags: SendFlags::empty() };
    node.dev.post_send(now, node.qp, &[wr]).unwrap();
    [whole, part, cut]
}

fn post(pair: &mut Pair, side: usize, id: u64, mtu: u64, keys: &[Keys], dice: &mut Dice) {
    let remote = Remote { addr: IOVA + dice.below(10_000), rkey: keys[1 - side][0].rkey };
    let op = match dice.below(6) {
        0 => SendOp::Send,
        1 => SendOp::SendImm(7),
        2 => SendOp::WriteImm(remote, 9),
        3 => SendOp::Read(remote),
        _ => SendOp::Write(remote),
    };
    let mut flags = SendFlags::empty();
    for (flag, share) in [(SendFlags::SIGNALED, 60), (SendFlags::FENCE, 10)] {
        flags.set(flag, dice.percent(share));
    }
    // One request in a hundred asks for what its key does not give.
    let key = if dice.percent(1) { 1 } else { 2 * dice.below(2) as usize };
    let sges: Vec<Sge> = (0..1 + dice.below(4))
        .map(|_| {
            let lens =
                [0, dice.below(2 * mtu), mtu * dice.below(90), dice.below(60 * mtu), 4 * mtu];
            let len = dice.one(&lens) as u32;
            Sge { addr: IOVA + 5 + dice.below(30_000), len, lkey: keys[side][key].lkey }
        })
        .collect();
    let inline = vec![7; dice.below(200) as usize];
    let is_inline = !matches!(op, SendOp::Read(_)) && dice.percent(8);
    flags.set(SendFlags::INLINE, is_inline);
    let (sges, inline) = if is_inline { (&[][..], &inline[..]) } else { (&sges[..], &[][..]) };
    let (now, node) = (pair.now, &mut pair.nodes[side]);
    // A full queue, and one in error, refuse it.
    let _ = node.dev.post_send(now, node.qp, &[SendWr { id, op, sges, inline, flags }]);
}

/// Everything that can be seen of a history: each packet and when it was sent, how each request
/// ended, counters, and what the memory holds.
fn history(seed: u64) -> Vec<String> {
    let dice = &mut Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mtu = dice.one(&[Mtu::M256, Mtu::M1024, Mtu::M2048, Mtu::M4096, Mtu::M4096]);
    let mut config = Config { congestion: dice.one(&WINDOWS), ..Config::default() };
    if dice.percent(30) {
        config.limits.reorder_bytes = 0;
    }
    let psns = [0xff_fff0 - dice.below(600) as u32, dice.below(1 << 24) as u32];
    let mut pair = Pair::new(&Setup { mtu, config, psns, ..Setup::default() });
    let keys: Vec<Keys> = (0..2).map(|side| register(&mut pair, side, dice)).collect();
    let (loss, mut fates) = (dice.one(&[0, 0, 1, 3, 10]), dice.clone());
    pair.fate = Box::new(move |_, _| match fates.percent(loss) {
        true => fates.one(&[Fate::Drop, Fate::Drop, Fate::Twice, Fate::Late]),
        false => Fate::Pass,
    });
    let receive = |pair: &mut Pair, side: usize, count: u64| {
        let sges = [Sge { addr: IOVA, len: RECEIVE, lkey: keys[side][0].lkey }];
        for id in 0..count {
            let (now, node) = (pair.now, &mut pair.nodes[side]);
            let _ = node.dev.post_recv(now, node.qp, &[RecvWr { id, sges: &sges }]);
        }
    };
    let turn = |pair: &mut Pair, side: usize, state| {
        let (now, node) = (pair.now, &mut pair.nodes[side]);
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        node.dev.modify_qp(now, node.qp, &attr).is_ok()
    };
    for id in 0..10 + dice.below(30) {
        let side = usize::from(dice.percent(25));
        match dice.below(100) {
            0..60 => {
                for part in 0..1 + dice.below(4) {
                    post(&mut pair, side, 10 * id + part, mtu.bytes() as u64, &keys, dice);
                }
            }
            60..75 => receive(&mut pair, 1 - side, 8),
            75..83 => pair.nodes[side].dev.set_gso(dice.percent(60)),
            83..86 => {
                let to = if dice.percent(50) { QpState::Rts } else { QpState::Sqd };
                turn(&mut pair, side, to);
            }
            86..92 => {
                // Lost whole, and unseen.
                let now = pair.now;
                pair.nodes[side].dev.poll_transmit(now, &mut Burst::new());
            }
            _ => {
                pair.run(Duration::from_micros(dice.below(20_000)), |_| false);
            }
        }
        if dice.percent(30) {
            pair.settle();
        }
    }
    for side in 0..2 {
        turn(&mut pair, side, QpState::Rts);
        receive(&mut pair, side, 200);
    }
    pair.run(Duration::from_millis(300), |pair| pair.log.len() > 10_000);
    let sent = pair.log.iter().map(|seen| {
        let sum = fingerprint(&seen.bytes);
        format!("{} {:?} {} {} {sum:x}", seen.from, seen.at, seen.place, seen.packet())
    });
    let mut all: Vec<String> = sent.collect();
    for node in &pair.nodes {
        let counters: BTreeMap<_, _> = node.dev.counters().iter().collect();
        let memory = fingerprint(&node.bytes(0, BUFFER));
        all.push(format!("{:?} {:?} {:?}", node.sent, node.received, node.events));
        all.push(format!("{:?} {counters:?} {memory:x}", node.state()));
    }
    all
}

/// FNV.
fn fingerprint(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[test]
fn whatever_happens_packets_made_together_are_those_made_one_by_one() {
    let (mut packets, mut together) = (0, 0);
    for seed in 0..60 {
        ONE_BY_ONE.set(true);
        let single = history(seed);
        ONE_BY_ONE.set(false);
        TOGETHER.set(0);
        let alike = history(seed);
        together += TOGETHER.get();
        packets += alike.len();
        let differs = single.iter().zip(&alike).find(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(single.len(), alike.len(), "seed {seed}");
    }
    assert!(together > packets / 10, "{together} of {packets}");
}
