//! Datagrams as received and sent by queue pairs of type UD, and by queue pair 1.
//!
//! ```text
//!   sent       BTH | DETH key, source | immediate | payload
//!   received   40 bytes of network header | payload       in the posted receive [RX-12]
//! ```

use std::net::IpAddr;

use bowline_verbs::{Completion, Error, Qpn, RecvWr, Status, UdDest, WcOpcode};
use bowline_wire::roce::{Bth, Deth, Opcode, Packet, Psn};

use crate::cq::PendingCompletion;
use crate::rc::responder::{PacketOutcome, RxCtx};
use crate::recvq::{ActiveRecv, PlaceError, RecvQueue};

/// Bytes in front of the payload of a received datagram [RX-12].
pub(crate) const NETWORK_HEADER_LEN: usize = 40;

/// The receiving half of a datagram queue pair.
#[derive(Debug, Default)]
pub(crate) struct UdReceiver {
    posted: RecvQueue,
    recv: ActiveRecv,
}

impl UdReceiver {
    /// Posts a receive, if fewer than `max` are posted.
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>, max: usize) -> Result<(), Error> {
        self.posted.post(wr, max)
    }

    /// Completes all receives with [`Status::WrFlushErr`], in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut RxCtx<'_>) {
        while let Some(wr_id) = self.posted.take_id() {
            complete(ctx, Status::WrFlushErr, Completion { wr_id, ..Completion::default() }, true);
        }
    }

    /// Handles a datagram. PSN and AckReq bit are ignored [RX-12].
    pub(crate) fn handle(
        &mut self,
        ctx: &mut RxCtx<'_>,
        qkey: u32,
        network: &[u8; NETWORK_HEADER_LEN],
        packet: &Packet<'_>,
    ) -> PacketOutcome {
        let Some(deth) = packet.deth.filter(|deth| deth.qkey == qkey) else {
            ctx.counters.drop_qkey += 1; // [RX-8]
            return PacketOutcome::Continue;
        };
        let len = NETWORK_HEADER_LEN + packet.payload.len();
        let mtu = ctx.mtu;
        let receives = ctx.receives(&mut self.posted);
        let fits = receives.room().is_some_and(|room| len as u64 <= room);
        if !fits || packet.payload.len() > mtu || !receives.take(&mut self.recv) {
            ctx.counters.ud_dropped += 1;
            return PacketOutcome::Continue;
        }
        let placed = [network, packet.payload]
            .into_iter()
            .try_for_each(|bytes| self.recv.place(ctx.mrs, ctx.recv_pd, bytes));
        let completion = Completion {
            wr_id: self.recv.id(),
            byte_len: len as u32, // an MTU and a header
            imm: packet.imm,
            src_qp: Qpn(deth.source_qpn),
            grh: true,
            ..Completion::default()
        };
        match placed {
            Ok(()) => {
                complete(ctx, Status::Success, completion, packet.bth.solicited);
                ctx.counters.requests_executed += 1;
                PacketOutcome::Continue
            }
            Err(PlaceError::Key | PlaceError::TooLong) => {
                complete(ctx, Status::LocProtErr, completion, true);
                PacketOutcome::Fatal
            }
        }
    }
}

fn complete(ctx: &mut RxCtx<'_>, status: Status, completion: Completion, solicited: bool) {
    let completion = Completion { status, opcode: WcOpcode::Recv, qpn: ctx.qpn, ..completion };
    ctx.done.push(PendingCompletion { cq: ctx.cq, completion, wakes: solicited });
}

/// Headers of a datagram to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram {
    pub(crate) dest: UdDest,
    pub(crate) source: Qpn,
    pub(crate) psn: Psn,
    pub(crate) imm: Option<u32>,
    pub(crate) solicited: bool,
    /// Set by queue pair 1, as in other stacks; has no meaning.
    pub(crate) ack_req: bool,
}

impl Datagram {
    /// Returns the packet, without payload.
    pub(crate) fn packet(&self) -> Packet<'static> {
        let bth = Bth {
            dest_qpn: self.dest.qpn.0,
            psn: self.psn,
            solicited: self.solicited,
            ack_req: self.ack_req,
            ..Bth::default()
        };
        let opcode = match self.imm {
            None => Opcode::UdSendOnly,
            Some(_) => Opcode::UdSendOnlyImm,
        };
        let mut packet = Packet::new(opcode, bth);
        packet.deth = Some(Deth { qkey: self.dest.qkey, source_qpn: self.source.0 });
        packet.imm = self.imm;
        packet
    }
}

/// Returns the network header of a datagram with `len` bytes after the UDP header, in the form in
/// which a UD receive has it [RX-12]. A socket does not show the header, so unknown fields have the
/// usual values: time to live 64, type of service 0.
pub(crate) fn network_header(
    from: IpAddr,
    to: IpAddr,
    identification: u16,
    len: usize,
) -> [u8; NETWORK_HEADER_LEN] {
    const UDP: u8 = 17;
    const HOPS: u8 = 64;
    let udp = u16::try_from(len + 8).unwrap_or(u16::MAX);
    let mut header = [0; NETWORK_HEADER_LEN];
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let v4 = &mut header[20..];
            v4[0] = 0x45;
            v4[2..4].copy_from_slice(&udp.saturating_add(20).to_be_bytes());
            v4[4..6].copy_from_slice(&identification.to_be_bytes());
            v4[6] = 0x40; // not to be fragmented [OUT-5]
            v4[8] = HOPS;
            v4[9] = UDP;
            v4[12..16].copy_from_slice(&from.octets());
            v4[16..20].copy_from_slice(&to.octets());
            let sum: u32 =
                v4.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
            let sum = (sum & 0xffff) + (sum >> 16);
            let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
            v4[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        _ => {
            let v6 = |addr| match addr {
                IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
                IpAddr::V6(addr) => addr.octets(),
            };
            header[0] = 0x60;
            header[4..6].copy_from_slice(&udp.to_be_bytes());
            header[6] = UDP;
            header[7] = HOPS;
            header[8..24].copy_from_slice(&v6(from));
            header[24..].copy_from_slice(&v6(to));
        }
    }
    header
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bowline_verbs::{Access, Buffer, CqId, PdId, Sge};

    use super::*;
    use crate::counters::Counters;
    use crate::mr::MrTable;
    use crate::rc::responder::ReorderBudget;
    use crate::rng::Rng;
    use bowline_base::Instant;

    const PD: PdId = PdId(1);
    const QKEY: u32 = 0x8001_0000;
    const MTU: usize = 1024;

    /// A receiver with memory of 200 bytes.
    struct Side {
        receiver: UdReceiver,
        mrs: MrTable,
        counters: Counters,
        done: Vec<PendingCompletion>,
        buffer: Arc<Buffer>,
        key: u32,
    }

    impl Side {
        fn new() -> Self {
            let mut mrs = MrTable::new(10, 0);
            let buffer = Arc::new(Buffer::new(200).unwrap());
            let mut rng = Rng::new(&[1; 32]);
            let at = (&buffer, 0, 200);
            let keys = mrs.register(&mut rng, PD, at, Some(0), Access::LOCAL_WRITE).unwrap();
            Self {
                receiver: UdReceiver::default(),
                mrs,
                counters: Counters::default(),
                done: Vec::new(),
                buffer,
                key: keys.lkey,
            }
        }

        fn post(&mut self, id: u64, len: u32) {
            let sges = [Sge { addr: 0, len, lkey: self.key }];
            self.receiver.post_recv(&RecvWr { id, sges: &sges }, 10).unwrap();
        }

        fn ctx<R>(&mut self, run: impl FnOnce(&mut UdReceiver, &mut RxCtx<'_>) -> R) -> R {
            let mut ctx = RxCtx {
                now: Instant::default(),
                mrs: &mut self.mrs,
                pd: PD,
                access: Access::empty(),
                mtu: MTU,
                qpn: Qpn(1),
                counters: &mut self.counters,
                reorder_budget: &ReorderBudget::new(0),
                shared_receives: None,
                recv_pd: PD,
                cq: CqId(1),
                done: &mut self.done,
            };
            run(&mut self.receiver, &mut ctx)
        }

        fn feed(&mut self, qkey: u32, imm: Option<u32>, payload: &[u8]) -> PacketOutcome {
            let dest = UdDest { addr: IpAddr::from([0; 4]), from: None, qpn: Qpn(1), qkey };
            let bytes = datagram(dest, imm, payload);
            let packet = Packet::parse(&bytes).unwrap();
            let network = network_header([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 7, 60);
            self.ctx(|receiver, ctx| receiver.handle(ctx, QKEY, &network, &packet))
        }

        fn bytes(&self, len: usize) -> Vec<u8> {
            let mut out = Vec::new();
            self.buffer.append_to(0, len, &mut out);
            out
        }
    }

    fn datagram(dest: UdDest, imm: Option<u32>, payload: &[u8]) -> Vec<u8> {
        let (source, psn) = (Qpn(1), Psn::ZERO);
        let head = Datagram { dest, source, psn, imm, solicited: true, ack_req: true };
        let mut out = Vec::new();
        Packet { payload, ..head.packet() }.emit(&mut out);
        out
    }

    /// The first 20 bytes of the vectors V5 to V11, and their length without ICRC.
    #[test]
    fn datagrams_of_the_general_services_are_as_recorded() {
        let dest = UdDest { addr: IpAddr::from([0; 4]), from: None, qpn: Qpn(1), qkey: QKEY };
        let (source, psn) = (Qpn(1), Psn::ZERO);
        let head = Datagram { dest, source, psn, imm: None, solicited: false, ack_req: true };
        let mut out = Vec::new();
        Packet { payload: &[0; 256], ..head.packet() }.emit(&mut out);
        let expected: [u8; 20] =
            [0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0x80, 0, 0, 0, 0x80, 1, 0, 0, 0, 0, 0, 1];
        assert_eq!(out[..20], expected);
        assert_eq!(out.len(), 20 + 256);
    }

    /// [RX-12], [RSP-21].
    #[test]
    fn a_datagram_is_delivered_behind_its_network_header() {
        let mut side = Side::new();
        side.post(5, 200);
        assert_eq!(side.feed(QKEY, Some(9), b"hello"), PacketOutcome::Continue);
        let expected = Completion {
            wr_id: 5,
            opcode: WcOpcode::Recv,
            byte_len: 45,
            imm: Some(9),
            qpn: Qpn(1),
            src_qp: Qpn(1),
            grh: true,
            ..Completion::default()
        };
        assert_eq!(
            side.done,
            [PendingCompletion { cq: CqId(1), completion: expected, wakes: true }]
        );
        let bytes = side.bytes(46);
        assert_eq!(bytes[..20], [0; 20]);
        assert_eq!(bytes[20..24], [0x45, 0, 0, 88]);
        assert_eq!(bytes[32..40], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(bytes[40..], *b"hello\0");
    }

    /// [RX-8], [RX-12]: dropped, and the receive stays for the next one.
    #[test]
    fn datagrams_that_do_not_fit_are_dropped() {
        let mut side = Side::new();
        assert_eq!(side.feed(QKEY, None, b"early"), PacketOutcome::Continue);
        side.post(5, 45);
        side.feed(QKEY + 1, None, b"hello");
        side.feed(QKEY, None, b"longer");
        side.feed(QKEY, None, &[0; MTU + 1]);
        assert_eq!(side.done, []);
        assert_eq!((side.counters.drop_qkey, side.counters.ud_dropped), (1, 3));
        side.feed(QKEY, None, b"hello");
        assert_eq!(side.done[0].completion.status, Status::Success);
        assert_eq!(side.done[0].completion.imm, None);
    }

    /// [MR-4], [QP-4].
    #[test]
    fn a_useless_key_is_an_error_and_the_rest_is_flushed() {
        let mut side = Side::new();
        side.post(1, 201);
        side.post(2, 200);
        assert_eq!(side.feed(QKEY, None, &[7; 161]), PacketOutcome::Fatal);
        side.ctx(|receiver, ctx| receiver.flush(ctx));
        let completions = side.done.iter().map(|done| done.completion);
        let got: Vec<_> = completions.map(|entry| (entry.wr_id, entry.status)).collect();
        assert_eq!(got, [(1, Status::LocProtErr), (2, Status::WrFlushErr)]);
        assert!(side.done.iter().all(|done| done.wakes && done.completion.is_recv()));
    }

    /// The outer header of V2, whose identification is 0x526a and whose checksum is 0xd3a8.
    #[test]
    fn network_headers_are_those_of_the_network() {
        let header = network_header([10, 77, 0, 3].into(), [10, 77, 0, 2].into(), 0x526a, 32);
        let expected = [
            0x45, 0, 0, 0x3c, 0x52, 0x6a, 0x40, 0, 0x40, 0x11, 0xd3, 0xa8, 10, 77, 0, 3, 10, 77, 0,
            2,
        ];
        assert_eq!(header[..20], [0; 20]);
        assert_eq!(header[20..], expected);
        let from: IpAddr = "fd77::2".parse().unwrap();
        let to: IpAddr = "fd77::3".parse().unwrap();
        let header = network_header(from, to, 0, 20);
        assert_eq!(header[..8], [0x60, 0, 0, 0, 0, 28, 17, 64]); // V4
        assert_eq!(header[8..10], [0xfd, 0x77]);
        assert_eq!((header[23], header[39]), (2, 3));
    }
}
