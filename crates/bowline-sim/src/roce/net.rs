//! The network: loss, delay, reordering, repetition, damage, short queues and partitions.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use bowline_wire::roce::{ICRC_LEN, Outer, split_icrc};
use serde::{Deserialize, Serialize};

use crate::engine::rng::Rng;

/// Properties of the network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NetPlan {
    /// Time from end to end in nanoseconds.
    pub(crate) delay: u64,
    /// Largest random addition to the delay in nanoseconds; it makes datagrams overtake each other.
    pub(crate) jitter: u64,
    /// Datagrams in a thousand that are lost.
    pub(crate) loss: u64,
    /// Datagrams in a thousand that arrive twice.
    pub(crate) repeat: u64,
    /// Datagrams in a thousand that arrive damaged.
    pub(crate) damage: u64,
    /// Datagrams in a thousand that are followed by a forged one from a third party's own address.
    pub(crate) forge: u64,
    /// Maximum number of bytes that wait for a line; more are dropped.
    pub(crate) queue: u64,
    /// Nanoseconds that a KiB takes on the line.
    pub(crate) per_kib: u64,
    /// Forged datagrams may have any operation.
    #[serde(default)]
    pub(crate) any_opcode: bool,
}

/// A datagram in the network.
#[derive(Clone, Debug)]
pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) to: IpAddr,
    /// IPv4 identification.
    pub(crate) ident: u16,
    pub(crate) bytes: Vec<u8>,
}

/// Reason why a datagram does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// Random loss.
    Chance,
    /// The line is cut.
    Cut,
    /// Too many bytes wait for the line.
    Full,
}

/// What the network does with a datagram.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    /// When the datagram arrives, once or several times.
    pub(crate) arrivals: Vec<(u64, Datagram)>,
    pub(crate) damaged: bool,
    pub(crate) lost: Option<Loss>,
    pub(crate) repeated: bool,
    /// A forged datagram follows.
    pub(crate) forged: bool,
}

/// The lines between all hosts.
#[derive(Debug)]
pub(crate) struct Net {
    plan: NetPlan,
    hosts: usize,
    /// When the line from one host to another has sent all its bytes.
    free_at: Vec<u64>,
    blocked: Vec<bool>,
    /// Faults are switched on.
    pub(crate) faulty: bool,
}

impl Net {
    pub(crate) fn new(plan: NetPlan, hosts: usize) -> Self {
        let lines = hosts * hosts;
        let (free_at, blocked) = (vec![0; lines], vec![false; lines]);
        Self { plan, hosts, free_at, blocked, faulty: true }
    }

    /// Cuts or heals the line from one host to another.
    pub(crate) fn block(&mut self, from: usize, to: usize, blocked: bool) {
        self.blocked[from * self.hosts + to] = blocked;
    }

    /// Stops the line from one host to another until `until`; later datagrams wait behind earlier
    /// ones.
    pub(crate) fn hold(&mut self, from: usize, to: usize, until: u64) {
        let free_at = &mut self.free_at[from * self.hosts + to];
        *free_at = until.max(*free_at);
    }

    /// Returns the longest time in nanoseconds until a line has sent all its bytes.
    pub(crate) fn backlog(&self, now: u64) -> u64 {
        self.free_at.iter().max().map_or(0, |at| at.saturating_sub(now))
    }

    /// Puts a datagram on the line.
    pub(crate) fn send(
        &mut self,
        now: u64,
        rng: &mut Rng,
        (from, to): (usize, usize),
        mut datagram: Datagram,
    ) -> Delivery {
        let plan = &self.plan;
        let line = from * self.hosts + to;
        let mut delivery = Delivery::default();
        let size = datagram.bytes.len() as u64 + 64;
        let start = self.free_at[line].max(now);
        let waiting = (start - now) * 1024 / plan.per_kib.max(1);
        if self.blocked[line] || (waiting > plan.queue && self.faulty) {
            delivery.lost = Some(if self.blocked[line] { Loss::Cut } else { Loss::Full });
            return delivery;
        }
        self.free_at[line] = start + size * plan.per_kib / 1024;
        if self.faulty && rng.chance(plan.loss) {
            delivery.lost = Some(Loss::Chance);
            return delivery;
        }
        if self.faulty && rng.chance(plan.damage) {
            delivery.damaged = damage(rng, &mut datagram);
        }
        let sent = self.free_at[line] + plan.delay;
        let first = sent + rng.below(plan.jitter + 1);
        let second = sent + rng.below(plan.jitter + 1);
        // Anyone who knows the key of a datagram queue pair may send to it.
        let open = |bytes: &[u8]| bytes[0] >= 0x60 && bytes[5..8] != [0, 0, 1];
        if self.faulty && !delivery.damaged && rng.chance(plan.forge) && !open(&datagram.bytes) {
            delivery.forged = true;
            delivery.arrivals.push((sent, forged(rng, &datagram, plan.any_opcode)));
        }
        if self.faulty && rng.chance(plan.repeat) {
            delivery.repeated = true;
            delivery.arrivals.push((second, datagram.clone()));
        }
        delivery.arrivals.push((first, datagram));
        delivery
    }
}

/// Operation of datagrams that belong to no connection.
const UD_SEND: u8 = 0x64;
const CNP: u8 = 0x81;

/// Forges a datagram from one that was seen: with the forger's own address, perhaps another
/// sequence number, another operation or another key, and a right ICRC.
fn forged(rng: &mut Rng, datagram: &Datagram, any_opcode: bool) -> Datagram {
    let stranger = match datagram.to {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(10, 77, 9, 9)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::new(0xfd77, 9, 9, 9, 0, 0, 0, 9)),
    };
    let mut bytes = datagram.bytes.clone();
    bytes.truncate(bytes.len() - ICRC_LEN);
    match rng.below(if any_opcode { 5 } else { 4 }) {
        // Byte 11 is the low byte of the sequence number, byte 0 the operation.
        0 => bytes[11] = bytes[11].wrapping_add(rng.below(5) as u8),
        1 => bytes[0] = (bytes[0] & 0xe0) | rng.below(0x18) as u8,
        2 => {
            let at = rng.index(bytes.len());
            bytes[at] ^= 1 << rng.below(8);
        }
        4 => {
            let any = rng.next() as u8;
            bytes[0] = rng.pick(&[UD_SEND, CNP, any]);
        }
        _ => {}
    }
    let from = SocketAddr::new(stranger, datagram.from.port());
    let outer = Outer { from: stranger, to: datagram.to, source_port: from.port() };
    outer.append_icrc(datagram.ident, &mut bytes, 0);
    Datagram { from, to: datagram.to, ident: datagram.ident, bytes }
}

/// Changes bits so that no receiver can accept the datagram; returns false if it is unchanged.
fn damage(rng: &mut Rng, datagram: &mut Datagram) -> bool {
    for _ in 0..4 {
        let mut bytes = datagram.bytes.clone();
        match rng.below(8) {
            0 => {
                let keep = rng.index(bytes.len());
                bytes.truncate(keep);
            }
            1 => bytes.extend((0..4 + rng.index(40)).map(|n| n as u8)),
            2 => {
                let at = rng.index(bytes.len());
                for byte in bytes.iter_mut().skip(at).take(4) {
                    *byte = rng.next() as u8;
                }
            }
            _ => {
                for _ in 0..1 + rng.below(3) {
                    let bit = rng.index(bytes.len() * 8);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
        let outer =
            Outer { from: datagram.from.ip(), to: datagram.to, source_port: datagram.from.port() };
        if bytes != datagram.bytes && !acceptable(&outer, &bytes) {
            datagram.bytes = bytes;
            return true;
        }
    }
    false
}

/// Tells whether the ICRC is right for any identification [ICRC-31]. Over IPv4 one damage in 65,536
/// cannot be noticed, and damage that cannot be noticed is no fault of the core.
///
/// The ICRC is linear, so the 16 bits of the identification span a space of 16 dimensions; the
/// difference of the two checksums must not lie in it. The core checks it in another way.
fn acceptable(outer: &Outer, bytes: &[u8]) -> bool {
    let Some((packet, received)) = split_icrc(bytes) else { return false };
    let base = outer.icrc(0, packet);
    let mut rest = base ^ received;
    if outer.from.is_ipv4() {
        let mut basis: Vec<u32> = Vec::with_capacity(16);
        for bit in 0..16 {
            let vector = reduce(&basis, outer.icrc(1 << bit, packet) ^ base);
            if vector != 0 {
                basis.push(vector);
                basis.sort_unstable_by(|a, b| b.cmp(a));
            }
        }
        rest = reduce(&basis, rest);
    }
    rest == 0
}

/// Reduces `vector` by `basis`, which begins with the highest bits.
fn reduce(basis: &[u32], vector: u32) -> u32 {
    basis.iter().fold(vector, |v, b| v.min(v ^ b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outer(from: &str, to: &str) -> Outer {
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        Outer { from, to, source_port: 0xd66b }
    }

    #[test]
    fn damage_that_no_receiver_can_notice_is_known() {
        let outer = outer("10.0.0.1", "10.0.0.2");
        let mut bytes = vec![7; 40];
        outer.append_icrc(0xabcd, &mut bytes, 0);
        assert!(acceptable(&outer, &bytes));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            // The byte of the congestion marks is not covered [ICRC-3].
            assert_eq!(acceptable(&outer, &bad), bit / 8 == 4, "bit {bit}");
        }
    }

    #[test]
    fn damage_is_never_acceptable() {
        let outer = outer("fd00::1", "fd00::2");
        let mut rng = Rng::new(3);
        for _ in 0..200 {
            let mut bytes = vec![9; 60];
            outer.append_icrc(0, &mut bytes, 0);
            let from = SocketAddr::new(outer.from, outer.source_port);
            let mut datagram = Datagram { from, to: outer.to, ident: 0, bytes };
            if damage(&mut rng, &mut datagram) {
                assert!(!acceptable(&outer, &datagram.bytes));
            }
        }
    }
}
