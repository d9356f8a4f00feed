//! Records, and in sabotaged runs modifies, everything that a client's core gives to its devices.

use bowline_rtrs::{Batch, Input, MemRef, Order, RegionId, Tag, Wr, WrKind};
use bowline_verbs::{Remote, next_key};
use bowline_wire::rtrs::{INFO_REQ_LEN, Imm};

use crate::rtrs::context::Base;
use crate::rtrs::fabric::Intercept;
use crate::rtrs::reach::{self, Misdeed};
use crate::rtrs::sabotage::Sabotage;

/// Records and modifies what a client's core gives to its devices.
pub(super) struct Interceptor<'a> {
    pub(super) base: &'a mut Base,
    pub(super) number: usize,
    pub(super) inputs: &'a mut u64,
    /// For a hostile client: memory with garbage, and the writes it will make later.
    pub(super) attack: Option<(RegionId, &'a mut Vec<Wr>)>,
    pub(super) later: Vec<Input>,
}

impl Intercept for Interceptor<'_> {
    fn order(&mut self, order: Order) -> Option<Order> {
        let number = self.number;
        self.base.note([20, number as u64, 0], || format!("client {number}: {order:?}"));
        match order {
            // The queue pair stays alive.
            Order::Close { conn } if self.base.sabotages(Sabotage::EarlyDrain, 1000) => {
                self.later.push(Input::Drained { conn });
                self.later.push(Input::Disconnected { conn });
                None
            }
            Order::Forget { .. } if self.base.sabotages(Sabotage::EarlyDrain, 1000) => None,
            Order::DropKeys { .. } if self.base.sabotages(Sabotage::LeakKeys, 1000) => None,
            order => Some(order),
        }
    }

    fn batch(&mut self, batch: &mut Batch) {
        let (number, sends) = (self.number as u64, batch.wrs.len() as u64);
        self.base.note([21, number, sends], || {
            format!("client {number}: {:?}, {} receives", batch.wrs, batch.recvs.len())
        });
        if self.base.sabotage == Some(Sabotage::KeepKey) {
            // The work request completes as usual, but invalidates nothing.
            for wr in &mut batch.wrs {
                if let WrKind::Invalidate(_) = wr.kind {
                    wr.kind = WrKind::Write(Remote::default());
                }
            }
        }
        if self.base.sabotage == Some(Sabotage::NoNotice) {
            keep_quiet(batch);
        }
        let Some((region, later)) = &mut self.attack else { return };
        if self.base.rng.chance(200)
            && let Some(write) = later.pop()
        {
            let offset = self.base.rng.below(16) * 8;
            let mem = MemRef { region: *region, offset, len: 1 + self.base.rng.below(300) as u32 };
            batch.send(write.conn, Tag::new(Tag::HEARTBEAT, 1), write.kind, &[mem], false);
            self.base.stats.attacks += 1;
        }
        for wr in &batch.wrs {
            if let (WrKind::Write(mut remote) | WrKind::WriteImm(mut remote, _), Tag::IO) =
                (wr.kind, wr.tag.kind())
                && self.base.rng.chance(200)
            {
                // The key of the request, or its successor, which becomes valid after the request.
                let next = self.base.rng.chance(500);
                let wrong = if next { Misdeed::AttackNext } else { Misdeed::Attack };
                reach::misdeed(&mut self.base.coverage, wrong);
                if next {
                    remote.rkey = next_key(remote.rkey);
                }
                later.push(Wr { kind: WrKind::Write(remote), ..*wr });
            }
        }
    }

    fn input(&mut self, input: &Input) {
        *self.inputs += 1;
        note_input(self.base, self.number, input);
    }
}

/// Makes notices unknown to the server, and removes the given-up paths from INFO_REQ.
fn keep_quiet(batch: &mut Batch) {
    let Batch { wrs, mems, .. } = batch;
    for wr in wrs {
        match &mut wr.kind {
            WrKind::WriteImm(_, imm) if matches!(Imm::from_u32(*imm), Imm::GivenUp(_)) => {
                *imm |= 4 << 28;
            }
            WrKind::Send if wr.tag.kind() == Tag::INFO => {
                mems[wr.mem.0 as usize].len = INFO_REQ_LEN as u32;
            }
            _ => {}
        }
    }
}

pub(super) fn note_input(base: &mut Base, number: usize, input: &Input) {
    base.note([11, number as u64, 0], || format!("client {number}: {input:?}"));
}
