//! Batches: keys, receives and sends, with as few calls as possible.

use bowline_verbs::{Access, Error, Piece, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge};

use super::pack::{Bursts, Packer, Part};
use super::regions::Regions;
use super::verbs::{Ports, Verbs};
use super::{Binding, wr_id};
use crate::{Batch, Input, MemRef, PortId, RecvSlot, Wr, WrKind};

/// Most keys handed to a device at once.
const KEYS: usize = 64;
/// Marks the last send of a connection in the batch.
const LAST: u32 = u32::MAX;

/// Memory reused for every batch.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    sges: Vec<Sge>,
    sends: Vec<SendWr<'static>>,
    recvs: Vec<RecvWr<'static>>,
    /// For each send of the batch, the next one of its connection.
    next: Vec<u32>,
    packer: Packer,
    /// Length of the gather list of each part.
    counts: Vec<usize>,
    /// The first send of each connection in the batch.
    firsts: Vec<u32>,
    turn: u64,
}

/// Changes the lifetime of an empty list; it keeps its allocation, since the element's layout stays
/// the same.
fn recycle<'a>(mut list: Vec<SendWr<'_>>) -> Vec<SendWr<'a>> {
    list.clear();
    list.into_iter().map(|_| -> SendWr<'a> { unreachable!("the list is empty") }).collect()
}

fn recycle_recvs<'a>(mut list: Vec<RecvWr<'_>>) -> Vec<RecvWr<'a>> {
    list.clear();
    list.into_iter().map(|_| -> RecvWr<'a> { unreachable!("the list is empty") }).collect()
}

impl Scratch {
    /// Posts the receive that must exist before a connection is accepted.
    pub(super) fn post_first(
        &mut self,
        verbs: &mut dyn Verbs,
        regions: &Regions,
        (port, qpn): (PortId, Qpn),
        slot: &RecvSlot,
    ) -> Result<(), Error> {
        self.post_recvs(verbs, regions, (port, qpn), std::slice::from_ref(slot))
    }

    fn post_recvs(
        &mut self,
        verbs: &mut dyn Verbs,
        regions: &Regions,
        (port, qpn): (PortId, Qpn),
        slots: &[RecvSlot],
    ) -> Result<(), Error> {
        self.sges.clear();
        self.sges.extend(
            slots.iter().filter_map(|slot| Some(regions.sge(port, slot.conn.path, &slot.mem?))),
        );
        let mut wrs = recycle_recvs(std::mem::take(&mut self.recvs));
        let mut rest = self.sges.as_slice();
        for slot in slots {
            let (sges, others) = rest.split_at(usize::from(slot.mem.is_some()));
            rest = others;
            wrs.push(RecvWr { id: wr_id(slot.conn, slot.tag), sges });
        }
        let posted = verbs.post_recv(qpn, &wrs).map_err(|(_, error)| error);
        self.recvs = recycle_recvs(wrs);
        posted
    }

    /// Posts the sends of one connection, from `first` on.
    fn post_sends(
        &mut self,
        verbs: &mut dyn Verbs,
        regions: &Regions,
        (port, qpn): (PortId, Qpn),
        (batch, bursts): (&Batch, Bursts),
        first: u32,
    ) -> Result<(), Error> {
        let next = &self.next;
        let sends = std::iter::successors((first != LAST).then_some(first), |at| {
            next.get(*at as usize).copied().filter(|at| *at != LAST)
        });
        self.packer.pack(batch, sends, bursts);
        let parts = || {
            self.packer
                .parts
                .iter()
                .filter_map(|part| Some((part, batch.wrs.get(part.wr as usize)?)))
        };
        self.sges.clear();
        self.counts.clear();
        for (part, wr) in parts() {
            let before = self.sges.len();
            let rest = part.rest.and_then(|(of, skip)| Some((batch.wrs.get(of as usize)?, skip)));
            let rest = rest.into_iter().flat_map(|(of, skip)| gathered(batch, of, skip, u64::MAX));
            let mems = rest.chain(gathered(batch, wr, part.skip, part.len));
            self.sges.extend(mems.map(|mem| regions.sge(port, wr.conn.path, &mem)));
            self.counts.push(self.sges.len() - before);
        }
        let mut wrs = recycle(std::mem::take(&mut self.sends));
        let mut rest = self.sges.as_slice();
        for ((part, wr), count) in parts().zip(&self.counts) {
            let (sges, others) = rest.split_at(*count);
            rest = others;
            let remote = remote(batch, wr, part);
            wrs.push(send_wr(wr, remote, sges, || regions.pieces(batch.mems_of(wr))));
        }
        let posted = verbs.post_send(qpn, &wrs).map_err(|(_, error)| error);
        self.sends = recycle(wrs);
        posted
    }
}

/// A range of the memory of a send work request: `left` bytes after the first `skip`.
fn gathered<'a>(
    batch: &'a Batch,
    wr: &Wr,
    mut skip: u64,
    mut left: u64,
) -> impl Iterator<Item = MemRef> + use<'a> {
    let mems = match wr.kind {
        WrKind::Register(_) => &[],
        _ => batch.mems_of(wr),
    };
    mems.iter().filter_map(move |mem| {
        let before = skip.min(mem.len.into());
        let len = left.min(u64::from(mem.len) - before);
        (skip, left) = (skip - before, left - len);
        (len > 0).then(|| MemRef { offset: mem.offset + before, len: len as u32, ..*mem })
    })
}

/// The peer's address for a part.
fn remote(batch: &Batch, wr: &Wr, part: &Part) -> Remote {
    let (of, skip) = match part.rest {
        Some((of, skip)) => (batch.wrs.get(of as usize).unwrap_or(wr), skip),
        None => (wr, part.skip),
    };
    match of.kind {
        WrKind::Write(to) | WrKind::WriteImm(to, _) => {
            Remote { addr: to.addr.wrapping_add(skip), ..to }
        }
        _ => Remote::default(),
    }
}

fn send_wr<'a>(
    wr: &Wr,
    remote: Remote,
    sges: &'a [Sge],
    pieces: impl FnOnce() -> Vec<Piece>,
) -> SendWr<'a> {
    let op = match wr.kind {
        WrKind::Send => SendOp::Send,
        WrKind::SendImm(imm) => SendOp::SendImm(imm),
        WrKind::SendInv(key) => SendOp::SendInv(key),
        WrKind::Write(_) => SendOp::Write(remote),
        WrKind::WriteImm(_, imm) => SendOp::WriteImm(remote, imm),
        WrKind::Register(key) => {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            SendOp::RegMr { key, pieces: pieces(), iova: 0, access }
        }
        WrKind::Invalidate(key) => SendOp::LocalInv(key),
    };
    let flags = if wr.signal { SendFlags::SIGNALED } else { SendFlags::empty() };
    SendWr { id: wr_id(wr.conn, wr.tag), op, sges, inline: &[], flags }
}

impl Binding {
    /// Carries out a batch and clears it; its `withdraw` must be empty, see [`withdraw`]. If a work
    /// request cannot be posted, its connection fails [RT-59].
    pub fn run_batch(&mut self, ports: &mut dyn Ports, batch: &mut Batch, out: &mut Vec<Input>) {
        debug_assert!(batch.withdraw.is_empty(), "withdrawn before what was received is looked at");
        renew(ports, batch);
        let mut scratch = std::mem::take(&mut self.scratch);
        self.run_recvs(ports, batch, &mut scratch, out);
        self.run_sends(ports, batch, &mut scratch, out);
        self.scratch = scratch;
        batch.clear();
    }

    fn run_recvs(
        &mut self,
        ports: &mut dyn Ports,
        batch: &Batch,
        scratch: &mut Scratch,
        out: &mut Vec<Input>,
    ) {
        for slots in batch.recvs.chunk_by(|a, b| a.conn == b.conn) {
            let Some(slot) = slots.first() else {
                continue;
            };
            let Some(conn) = self.table.get_mut(slot.conn).filter(|conn| !conn.dead) else {
                continue;
            };
            let whose = (conn.port, conn.qpn);
            let posted = scratch.post_recvs(ports.port(conn.port), &self.regions, whose, slots);
            if let Err(error) = posted {
                conn.dead = true;
                out.push(Input::Failed { conn: slot.conn, errno: error.errno() });
            }
        }
    }

    /// Posts the sends of each connection with one call, in the order of [`pack`](super::pack).
    fn run_sends(
        &mut self,
        ports: &mut dyn Ports,
        batch: &Batch,
        scratch: &mut Scratch,
        out: &mut Vec<Input>,
    ) {
        scratch.turn += 1;
        scratch.firsts.clear();
        scratch.next.clear();
        scratch.next.resize(batch.wrs.len(), LAST);
        for (at, wr) in (0..).zip(&batch.wrs) {
            let Some(conn) = self.table.get_mut(wr.conn).filter(|conn| !conn.dead) else {
                continue;
            };
            if conn.turn == scratch.turn {
                if let Some(next) = scratch.next.get_mut(conn.sends.1 as usize) {
                    *next = at;
                }
                conn.sends.1 = at;
            } else {
                conn.turn = scratch.turn;
                conn.sends = (at, at);
                scratch.firsts.push(at);
            }
        }
        let firsts = std::mem::take(&mut scratch.firsts);
        for first in &firsts {
            let Some(wr) = batch.wrs.get(*first as usize) else {
                continue;
            };
            let Some(conn) = self.table.get_mut(wr.conn) else {
                continue;
            };
            let (verbs, whose) = (ports.port(conn.port), (conn.port, conn.qpn));
            let what = (batch, conn.bursts);
            let posted = scratch.post_sends(verbs, &self.regions, whose, what, *first);
            if let Err(error) = posted {
                conn.dead = true;
                out.push(Input::Failed { conn: wr.conn, errno: error.errno() });
            }
        }
        scratch.firsts = firsts;
    }
}

/// Withdraws the keys in a batch: afterwards peers cannot change the data they have sent [RT-44].
/// Adds to `failed` the keys that could not be withdrawn.
pub fn withdraw(ports: &mut dyn Ports, batch: &mut Batch, failed: &mut Vec<(PortId, u32)>) {
    let mut keys = [0; KEYS];
    for of_port in batch.withdraw.chunk_by(|a, b| a.0 == b.0) {
        for some in of_port.chunks(KEYS) {
            let mut count = 0;
            for (place, (_, key)) in keys.iter_mut().zip(some) {
                *place = *key;
                count += 1;
            }
            let verbs = ports.port(some[0].0);
            if verbs.withdraw_keys(&keys[..count]).is_err() {
                // One by one, so that the other keys' owners are not affected.
                failed.extend(some.iter().filter(|(_, key)| verbs.withdraw_keys(&[*key]).is_err()));
            }
        }
    }
    batch.withdraw.clear();
}

/// Renews withdrawn keys. If a key cannot be renewed, its path is gone, or the peer's next write
/// fails and ends the path.
fn renew(ports: &mut dyn Ports, batch: &Batch) {
    let mut keys = [(0, 0); KEYS];
    for of_port in batch.renew.chunk_by(|a, b| a.0 == b.0) {
        for some in of_port.chunks(KEYS) {
            let mut count = 0;
            for (place, (_, old, new)) in keys.iter_mut().zip(some) {
                *place = (*old, *new);
                count += 1;
            }
            let verbs = ports.port(some[0].0);
            if verbs.renew_keys(&keys[..count]).is_err() {
                for (_, old, new) in some {
                    let _ = verbs.renew_keys(&[(*old, *new)]);
                }
            }
        }
    }
}
