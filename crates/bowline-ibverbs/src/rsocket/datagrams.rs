//! A socket of datagrams: a UD queue pair that peers find by the rdma_cm's lookup of a UDP port.
//!
//! ```text
//!   40 bytes of network header | version, 0, port of the sender | payload      [RSK-14]
//! ```
//! Whom a datagram has come from is known by its header, so that an answer needs no lookup.

use core::ffi::c_int;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::time::{Duration, Instant};

use bowline_roce_driver::PortSpace;
use bowline_verbs::{
    Access, CmEvent, CmId as Number, Completion, CqId, Device as _, Error, PdId, QpCap, QpInit,
    QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr, Sge, Status, UdDest,
};

use super::connection::{Memory, buffer, create_qp};
use super::options::Options;
use super::socket::{Socket, errno, listen};
use crate::cm::{UDP_QKEY, datagram_steps};
use crate::device::{GidAt, Opened};

/// Bytes in front of what is received.
const NETWORK_HEADER_LEN: usize = 40;
/// Bytes in front of the payload.
const HEADER_LEN: usize = 4;
const VERSION: u8 = 1;
/// Peers that are known, or known to be missing, at most; then all are looked up again.
const PEERS_MAX: usize = 4096;
/// How long a peer that is not heard of is sent to before it is looked up again: it may have ended,
/// and another program may have its port.
const REFRESH: Duration = Duration::from_secs(1);
/// Completions looked at in one go.
const POLL: usize = 64;
/// Ids of receives have this bit, the rest is the slot; those of sends are the slot.
const RECEIVE: u64 = 1 << 63;

/// Outcome of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sending {
    Done,
    /// The peer is being looked up, or no slot is free.
    NotNow,
    Failed(c_int),
}

/// A datagram that nobody has read.
#[derive(Clone, Copy, Debug)]
struct Received {
    slot: usize,
    len: usize,
    from: SocketAddr,
}

/// The queue pair with its memory.
#[derive(Debug)]
struct Queue {
    opened: &'static Opened,
    cq: CqId,
    qpn: Qpn,
    /// Slots of one size.
    receives: Memory,
    sends: Memory,
    slot: usize,
    free: Vec<usize>,
    number: Number,
    at: SocketAddr,
    polled: Vec<Completion>,
}

/// A socket of datagrams.
#[derive(Debug, Default)]
pub(super) struct Datagrams {
    queue: Option<Queue>,
    /// The peer that it is connected to: others are not received from.
    remote: Option<SocketAddr>,
    received: VecDeque<Received>,
    /// Queue pairs of peers, and when they were last heard of or looked up.
    peers: HashMap<SocketAddr, (Qpn, Instant)>,
    lookups: HashMap<Number, SocketAddr>,
    /// Peers that were not found, until somebody has been informed.
    missing: HashMap<SocketAddr, c_int>,
    /// Lookups that have begun, and those that are over, for the socket.
    pub(super) begun: Vec<Number>,
    pub(super) over: Vec<Number>,
}

/// Where a datagram has come from. An address that is valid on one link only is given with that of
/// the address that the datagram has come to.
fn sender(header: &[u8; NETWORK_HEADER_LEN], port: u16, gids: &[GidAt]) -> SocketAddr {
    // A header of IPv4 is at the end.
    if header[0] >> 4 != 6 {
        let source = Ipv4Addr::new(header[32], header[33], header[34], header[35]);
        return SocketAddr::new(source.into(), port);
    }
    let addr = |at: usize| {
        let mut octets = [0; 16];
        octets.copy_from_slice(&header[at..at + 16]);
        Ipv6Addr::from(octets)
    };
    let (source, to) = (addr(8), addr(24));
    if !source.is_unicast_link_local() {
        return SocketAddr::new(IpAddr::from(source).to_canonical(), port);
    }
    let link = gids.iter().find(|at| at.addr == to).map_or(0, |at| at.link);
    SocketAddrV6::new(source, port, 0, link).into()
}

/// An address by which a peer is known, whether its link is known or not: its datagrams come to an
/// address of the same link.
fn plain(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip(), at.port())
}

/// The sender's port; `None`: not of a socket.
fn parse(header: [u8; HEADER_LEN]) -> Option<u16> {
    let [version, zero, high, low] = header;
    let port = u16::from_be_bytes([high, low]);
    (version == VERSION && zero == 0 && port != 0).then_some(port)
}

impl Queue {
    fn new(
        opened: &'static Opened,
        pd: PdId,
        at: SocketAddr,
        options: &Options,
    ) -> Result<Self, c_int> {
        let made = Self::made(opened, pd, at, options);
        let mut queue = made.map_err(|error| errno(&error))?;
        queue.number = listen(opened, PortSpace::Udp, at)?;
        Ok(queue)
    }

    fn made(
        opened: &'static Opened,
        pd: PdId,
        at: SocketAddr,
        options: &Options,
    ) -> Result<Self, Error> {
        let slot = NETWORK_HEADER_LEN + opened.attr.mtu.bytes();
        // What is received has the room of the receive buffer, if that is more.
        let receives = options.receives.max(options.receive_ring / slot);
        let options = options.with_receives(receives).within(&opened.attr, 0);
        let receives = buffer(options.receives * slot)?;
        let receives = Memory::new(opened, pd, receives, Access::LOCAL_WRITE)?;
        let sends = Memory::new(opened, pd, buffer(options.sends * slot)?, Access::empty())?;
        let cq = opened.soft.create_cq(options.sends + options.receives)?;
        let init = QpInit {
            pd,
            send_cq: cq,
            recv_cq: cq,
            qp_type: QpType::Ud,
            srq: None,
            cap: QpCap {
                max_send_wr: options.sends,
                max_recv_wr: options.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline: 0,
            },
            sq_sig_all: true,
        };
        let qpn = create_qp(opened, &init)?;
        let free = (0..options.sends).collect();
        let new = Self {
            opened,
            cq,
            qpn,
            receives,
            sends,
            slot,
            free,
            number: Number(0),
            at,
            polled: Vec::new(),
        };
        for step in datagram_steps() {
            new.opened.soft.modify_qp(qpn, &step)?;
        }
        for slot in 0..options.receives {
            new.post_receive(slot)?;
        }
        Ok(new)
    }

    fn post_receive(&self, slot: usize) -> Result<(), Error> {
        let addr = self.receives.buffer.addr() + (slot * self.slot) as u64;
        let sge = Sge { addr, len: self.slot as u32, lkey: self.receives.keys.lkey };
        let wr = RecvWr { id: RECEIVE | slot as u64, sges: &[sge] };
        self.opened.soft.post_recv(self.qpn, &[wr]).map_err(|(_, error)| error)
    }

    fn header(&self, of: &Completion) -> Option<(usize, SocketAddr)> {
        let slot = (of.wr_id & !RECEIVE) as usize;
        let len = (of.byte_len as usize).checked_sub(NETWORK_HEADER_LEN + HEADER_LEN)?;
        let begin = slot * self.slot;
        let (mut network, mut header) = ([0; NETWORK_HEADER_LEN], [0; HEADER_LEN]);
        self.receives.buffer.read(begin, &mut network);
        self.receives.buffer.read(begin + NETWORK_HEADER_LEN, &mut header);
        let port = parse(header)?;
        Some((len, sender(&network, port, &self.opened.gids)))
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let soft = &self.opened.soft;
        // What is gone with the device needs no end.
        if self.number != Number(0) {
            if let Some(guest) = &self.opened.guest {
                guest.unlisten(PortSpace::Udp, self.at);
            }
            let _ = soft.destroy_id(self.number);
        }
        let _ = soft.destroy_qp(self.qpn);
        let _ = soft.destroy_cq(self.cq);
    }
}

impl Datagrams {
    pub(super) fn cq(&self) -> Option<CqId> {
        self.queue.as_ref().map(|queue| queue.cq)
    }

    pub(super) fn is_bound(&self) -> bool {
        self.queue.is_some()
    }

    /// Gets a queue pair that is found at an address; returns what events come by.
    ///
    /// # Errors
    /// `EADDRINUSE`, and those of the device.
    pub(super) fn bind(
        &mut self,
        opened: &'static Opened,
        pd: PdId,
        at: SocketAddr,
        options: &Options,
    ) -> Result<(CqId, Number), c_int> {
        let queue = Queue::new(opened, pd, at, options)?;
        let (cq, number) = (queue.cq, queue.number);
        self.queue = Some(queue);
        Ok((cq, number))
    }

    pub(super) fn progress(&mut self) -> bool {
        let Some(queue) = &mut self.queue else { return false };
        let mut polled = core::mem::take(&mut queue.polled);
        let mut has_changed = false;
        loop {
            polled.clear();
            let number = queue.opened.soft.poll_cq(queue.cq, &mut polled, POLL);
            has_changed |= !polled.is_empty();
            for completion in &polled {
                if completion.wr_id & RECEIVE == 0 {
                    queue.free.push(completion.wr_id as usize);
                    continue;
                }
                let slot = (completion.wr_id & !RECEIVE) as usize;
                if completion.status != Status::Success {
                    continue;
                }
                match queue.header(completion) {
                    Some((len, from)) if self.remote.is_none_or(|at| at == plain(from)) => {
                        self.received.push_back(Received { slot, len, from });
                        let from = plain(from);
                        if self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&from) {
                            self.peers.clear();
                        }
                        self.peers.insert(from, (completion.src_qp, Instant::now()));
                    }
                    // Not of a socket, or of a stranger.
                    _ => drop(queue.post_receive(slot)),
                }
            }
            if !matches!(number, Ok(POLL)) {
                break;
            }
        }
        queue.polled = polled;
        has_changed
    }

    pub(super) fn happens(&mut self, event: CmEvent) {
        let number = event.id();
        match event {
            CmEvent::ConnectRequest { id, .. } => {
                if let Some(queue) = &self.queue {
                    // Who has given up is not answered.
                    let _ = queue.opened.soft.answer(id, queue.qpn, UDP_QKEY, &[]);
                }
            }
            CmEvent::Found { qpn, qkey, .. } if qkey == UDP_QKEY => {
                if let Some(at) = self.lookups.remove(&number) {
                    self.peers.insert(at, (qpn, Instant::now()));
                }
            }
            CmEvent::Unreachable { .. } => {
                // One that does not answer now may receive all the same.
                let at = self.lookups.remove(&number).filter(|at| !self.peers.contains_key(at));
                self.is_missing(at, libc::EHOSTUNREACH);
            }
            _ => {
                let at = self.lookups.remove(&number);
                at.map(|at| self.peers.remove(&at));
                self.is_missing(at, libc::ECONNREFUSED);
            }
        }
        self.over.push(number);
    }

    fn is_missing(&mut self, at: Option<SocketAddr>, errno: c_int) {
        if self.missing.len() >= PEERS_MAX {
            self.missing.clear();
        }
        self.missing.extend(at.map(|at| (at, errno)));
    }

    /// Finds the queue pair of a peer.
    pub(super) fn find(&mut self, from: IpAddr, to: SocketAddr) -> Sending {
        let to = plain(to);
        let Some(queue) = &self.queue else { return Sending::Failed(libc::EINVAL) };
        if let Some(errno) = self.missing.remove(&to) {
            return Sending::Failed(errno);
        }
        let is_known = match self.peers.get_mut(&to) {
            Some((_, heard)) if heard.elapsed() < REFRESH => return Sending::Done,
            Some((_, heard)) => {
                *heard = Instant::now();
                true
            }
            None => false,
        };
        if !self.lookups.values().any(|at| *at == to) {
            match queue.opened.soft.look_up(Some(SocketAddr::new(from, 0)), to, &[]) {
                Ok(number) => {
                    self.lookups.insert(number, to);
                    self.begun.push(number);
                }
                Err(error) if !is_known => return Sending::Failed(errno(&error)),
                // It is sent to as before.
                Err(_) => {}
            }
        }
        if is_known { Sending::Done } else { Sending::NotNow }
    }

    /// Sends a datagram.
    pub(super) fn send(&mut self, from: IpAddr, to: SocketAddr, bytes: &[u8]) -> Sending {
        match self.find(from, to) {
            Sending::Done => {}
            other => return other,
        }
        let Some(queue) = &mut self.queue else { return Sending::NotNow };
        if HEADER_LEN + bytes.len() > queue.slot - NETWORK_HEADER_LEN {
            return Sending::Failed(libc::EMSGSIZE);
        }
        let (Some((qpn, _)), Some(slot)) = (self.peers.get(&plain(to)), queue.free.pop()) else {
            return Sending::NotNow;
        };
        let [high, low] = queue.at.port().to_be_bytes();
        let begin = slot * queue.slot;
        queue.sends.buffer.write(begin, &[VERSION, 0, high, low]);
        queue.sends.buffer.write(begin + HEADER_LEN, bytes);
        let sge = Sge {
            addr: queue.sends.buffer.addr() + begin as u64,
            len: (HEADER_LEN + bytes.len()) as u32,
            lkey: queue.sends.keys.lkey,
        };
        let dest = UdDest { addr: to.ip(), from: Some(from), qpn: *qpn, qkey: UDP_QKEY };
        let op = SendOp::Datagram(dest, None);
        let flags = SendFlags::empty();
        let wr = SendWr { id: slot as u64, op, sges: &[sge], inline: &[], flags };
        match queue.opened.soft.post_send(queue.qpn, &[wr]) {
            Ok(()) => Sending::Done,
            Err((_, error)) => {
                queue.free.push(slot);
                // The path takes less than the device.
                let is_too_long = matches!(error, Error::Invalid(_));
                Sending::Failed(if is_too_long { libc::EMSGSIZE } else { errno(&error) })
            }
        }
    }

    /// Receives from one peer alone.
    pub(super) fn connect(&mut self, remote: SocketAddr) {
        let remote = plain(remote);
        self.remote = Some(remote);
        let Some(queue) = &self.queue else { return };
        self.received.retain(|received| {
            let is_meant = plain(received.from) == remote;
            if !is_meant {
                // A queue pair that takes none any more is gone with the device.
                let _ = queue.post_receive(received.slot);
            }
            is_meant
        });
    }

    pub(super) fn is_readable(&self) -> bool {
        !self.received.is_empty()
    }

    pub(super) fn is_writable(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| !queue.free.is_empty())
    }

    /// Copies the next datagram, and takes it if it is not only looked at; returns its whole length
    /// and where it comes from.
    pub(super) fn receive(&mut self, out: &mut [u8], takes: bool) -> Option<(usize, SocketAddr)> {
        let queue = self.queue.as_ref()?;
        let Received { slot, len, from } = self.received.front().copied()?;
        let begin = slot * queue.slot + NETWORK_HEADER_LEN + HEADER_LEN;
        let number = len.min(out.len());
        queue.receives.buffer.read(begin, &mut out[..number]);
        if takes {
            self.received.pop_front();
            // A queue pair that takes none any more is gone with the device.
            let _ = queue.post_receive(slot);
        }
        Some((len, from))
    }

    /// Ends; no more events come.
    pub(super) fn end(self, opened: &Opened) {
        let own = self.queue.as_ref().map(|queue| (queue.number, queue.cq));
        drop(self.queue);
        if let Some((number, cq)) = own {
            Socket::forget_listener(opened, number);
            Socket::forget(opened, None, Some(cq));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// [RSK-14]
    #[test]
    fn headers_without_sense_are_not_of_sockets() {
        assert_eq!(parse([1, 0, 0x1d, 0x2f]), Some(7471));
        for bad in [[0, 0, 1, 1], [2, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]] {
            assert_eq!(parse(bad), None);
        }
    }

    fn header(source: Ipv6Addr, to: Ipv6Addr) -> [u8; NETWORK_HEADER_LEN] {
        let mut header = [0; NETWORK_HEADER_LEN];
        header[0] = 0x60;
        header[8..24].copy_from_slice(&source.octets());
        header[24..].copy_from_slice(&to.octets());
        header
    }

    #[test]
    fn the_sender_is_in_the_network_header() {
        let mut v4 = [0; NETWORK_HEADER_LEN];
        v4[20] = 0x45;
        v4[32..36].copy_from_slice(&[10, 0, 0, 7]);
        assert_eq!(sender(&v4, 7, &[]), "10.0.0.7:7".parse().unwrap());
        let [own, mapped] = ["::1", "::ffff:10.0.0.7"].map(|at| at.parse().unwrap());
        assert_eq!(sender(&header(own, own), 9, &[]), "[::1]:9".parse().unwrap());
        assert_eq!(sender(&header(mapped, own), 9, &[]), "10.0.0.7:9".parse().unwrap());
    }

    /// A program names its peer with the link, which is not in the network header.
    #[test]
    fn a_peer_of_a_link_is_known_with_the_link() {
        let own: Ipv6Addr = "fe80::1".parse().unwrap();
        let gids = [("10.0.0.1", 3), ("fe80::2", 4), ("fe80::1", 5)]
            .map(|(at, link)| GidAt { addr: at.parse().unwrap(), link });
        let from = sender(&header("fe80::7".parse().unwrap(), own), 9, &gids);
        let named: SocketAddr = "[fe80::7%5]:9".parse().unwrap();
        assert_eq!(from, named);
        let without: SocketAddr = "[fe80::7]:9".parse().unwrap();
        assert_eq!((plain(named), plain(without)), (without, without));
        assert_ne!(plain(named), plain("[fe80::7%5]:8".parse().unwrap()));
    }
}
