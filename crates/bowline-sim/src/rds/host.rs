//! A host of either kind behind one interface.

use std::net::SocketAddr;

use super::bowline::BowlineHost;
use super::ctx::{Ctx, HostEvent};
use super::kernel::KernelHost;
use super::net::{EndId, Notice};
use super::ops::Extras;
use super::plan::SlotPlan;
use super::rdma::{QpId, RdmaNotice};

/// Result of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendResult {
    /// Accepted.
    Sent,
    /// Refused for now; the sender is woken later.
    Wait,
    /// The socket is closed.
    Closed,
    /// The message is longer than the socket takes.
    TooLong,
}

/// One host.
pub(crate) enum Host {
    Bowline(Box<BowlineHost>),
    Kernel(Box<KernelHost>),
}

impl Host {
    pub(crate) fn open(&mut self, ctx: &mut Ctx, slot: usize, addr: SocketAddr, plan: &SlotPlan) {
        match self {
            Self::Bowline(host) => host.open(ctx, slot, addr, plan),
            Self::Kernel(host) => host.open(ctx, slot, addr, plan),
        }
    }

    pub(crate) fn close(&mut self, ctx: &mut Ctx, slot: usize) {
        match self {
            Self::Bowline(host) => host.close(ctx, slot),
            Self::Kernel(host) => host.close(ctx, slot),
        }
    }

    pub(crate) fn cancel(&mut self, ctx: &mut Ctx, slot: usize, target: SocketAddr) {
        match self {
            Self::Bowline(host) => host.cancel(ctx, slot, target),
            Self::Kernel(host) => host.cancel(slot, target),
        }
    }

    pub(crate) fn send(
        &mut self,
        ctx: &mut Ctx,
        slot: usize,
        target: SocketAddr,
        payload: &[u8],
        extras: &Extras,
    ) -> SendResult {
        match self {
            Self::Bowline(host) => host.send(ctx, slot, target, payload, extras),
            Self::Kernel(host) => {
                let result = host.send(ctx, slot, target, payload);
                if result == SendResult::Wait {
                    ctx.coverage.hit("send", "a kernel's sender waits");
                    host.want(slot, false, true);
                }
                result
            }
        }
    }

    /// Takes a message, or asks to be woken when there is one.
    pub(crate) fn recv(&mut self, ctx: &mut Ctx, slot: usize) -> Option<(SocketAddr, Vec<u8>)> {
        match self {
            Self::Bowline(host) => host.recv(ctx, slot),
            Self::Kernel(host) => {
                let message = host.recv(ctx, slot);
                if message.is_none() {
                    host.want(slot, true, false);
                }
                message
            }
        }
    }

    pub(crate) fn send_bytes(&self, slot: usize) -> usize {
        match self {
            Self::Bowline(host) => host.send_bytes(slot),
            Self::Kernel(host) => host.send_bytes(slot),
        }
    }

    pub(crate) fn notice(&mut self, ctx: &mut Ctx, end: EndId, notice: Notice) {
        match self {
            Self::Bowline(host) => host.notice(ctx, end, notice),
            Self::Kernel(host) => host.notice(ctx, end, notice),
        }
    }

    pub(crate) fn rdma_notice(&mut self, ctx: &mut Ctx, qp: QpId, notice: RdmaNotice) {
        match self {
            Self::Bowline(host) => host.rdma_notice(ctx, qp, notice),
            Self::Kernel(host) => host.rdma_notice(ctx, qp, notice),
        }
    }

    pub(crate) fn event(&mut self, ctx: &mut Ctx, what: HostEvent) {
        match self {
            Self::Bowline(host) => host.event(ctx, what),
            Self::Kernel(host) => host.event(ctx, what),
        }
    }
}
