//! Datagrams: what queue pairs of type UD, and the one of the general services, receive and send.
//!
//! ```text
//!   sent       BTH | DETH key, source | immediate | payload
//!   received   40 bytes of network header | payload       in the posted receive [RX-12]
//! ```

use std::net::IpAddr;

use bowline_verbs::{Completion, Error, Qpn, RecvWr, Status, UdDest, WcOpcode};
use bowline_wire::roce::{Bth, Builder, Deth, Opcode, Packet, Psn};

use crate::rc::responder::{After, RxCtx};
use crate::recvq::{PlaceError, RecvQueue, Taken};

/// Bytes before the payload in a receive [RX-12].
pub(crate) const NETWORK_HEADER_LEN: usize = 40;

/// The receiving half of a datagram queue pair.
#[derive(Debug, Default)]
pub(crate) struct UdReceiver {
    posted: RecvQueue,
    taken: Taken,
}

impl UdReceiver {
    /// Posts a receive, if fewer than `max` wait.
    pub(crate) fn post_recv(&mut self, wr: &RecvWr<'_>, max: usize) -> Result<(), Error> {
        self.posted.post(wr, max)
    }

    /// Forgets all receives.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Completes all receives with [`Status::WrFlushErr`], in order [QP-4].
    pub(crate) fn flush(&mut self, ctx: &mut RxCtx<'_>) {
        while let Some(wr_id) = self.posted.take_id() {
            complete(ctx, Status::WrFlushErr, Completion { wr_id, ..Completion::default() }, true);
        }
    }

    /// Takes a datagram. Sequence number and wish for acknowledgement are not looked at [RX-12].
    pub(crate) fn handle(
        &mut self,
        ctx: &mut RxCtx<'_>,
        qkey: u32,
        network: &[u8; NETWORK_HEADER_LEN],
        packet: &Packet<'_>,
    ) -> After {
        let Some(deth) = packet.deth.filter(|deth| deth.qkey == qkey) else {
            ctx.counters.drop_qkey += 1; // [RX-8]
            return After::Fine;
        };
        let len = NETWORK_HEADER_LEN + packet.payload.len();
        let fits = self.posted.room().is_some_and(|room| len as u64 <= room);
        if !fits || packet.payload.len() > ctx.mtu || !self.posted.take(&mut self.taken) {
            ctx.counters.ud_dropped += 1;
            return After::Fine;
        }
        let placed = [network, packet.payload]
            .into_iter()
            .try_for_each(|bytes| self.taken.place(ctx.mrs, ctx.pd, bytes));
        let completion = Completion {
            wr_id: self.taken.id(),
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
                After::Fine
            }
            Err(PlaceError::Key | PlaceError::TooLong) => {
                complete(ctx, Status::LocProtErr, completion, true);
                After::Fatal
            }
        }
    }
}

fn complete(ctx: &mut RxCtx<'_>, status: Status, completion: Completion, solicited: bool) {
    let completion = Completion { status, opcode: WcOpcode::Recv, qpn: ctx.qpn, ..completion };
    ctx.done.push((completion, solicited));
}

/// A datagram to be sent, all but its payload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram {
    pub(crate) dest: UdDest,
    pub(crate) source: Qpn,
    pub(crate) psn: Psn,
    pub(crate) imm: Option<u32>,
    pub(crate) solicited: bool,
    /// Set on what queue pair 1 sends, as other stacks do; of no meaning.
    pub(crate) ack_req: bool,
}

impl Datagram {
    /// Appends the headers to `out`. The payload, at most an MTU, is appended to what this returns,
    /// and then finished.
    pub(crate) fn begin<'v>(&self, out: &'v mut Vec<u8>) -> Builder<'v> {
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
        Builder::new(out, &packet)
    }
}

/// The network header of a datagram with `len` bytes after the UDP header, as a receive of UD has
/// it [RX-12]. A socket does not show it, so what it does not tell has the usual value: time to
/// live 64, type of service 0.
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
