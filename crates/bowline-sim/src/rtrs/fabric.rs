//! The devices of all machines as bindings use them, and the function that carries out a core's
//! orders.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;

use bowline_roce::{Device, Instant};
use bowline_rtrs::bind::{Binding, Ports, Verbs, withdraw};
use bowline_rtrs::{Batch, Input, Order, PortAttr, PortId, QpShape};
use bowline_verbs::{
    Access, Buffer, CmId, Completion, ConnParam, CqId, Error, MrKeys, PdId, QpAttr, QpCap, QpInit,
    QpState, QpType, Qpn, RecvWr, SendWr,
};

use crate::roce::host::Host;
use crate::roce::mute::Mutes;

/// Entries of a completion queue.
const CQ_ENTRIES: usize = 1 << 17;

/// The objects that a machine's program has on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) pd: PdId,
    pub(crate) cq: CqId,
    /// Burst size in bytes, as reported to the binding.
    burst: usize,
}

impl Own {
    /// `burst` overrides the device's burst size.
    pub(crate) fn new(device: &mut Device, burst: Option<usize>) -> Result<Self, Error> {
        let (pd, burst) = (device.alloc_pd()?, burst.unwrap_or(device.attr().burst));
        Ok(Self { pd, cq: device.create_cq(CQ_ENTRIES)?, burst })
    }
}

/// A device, borrowed for one call.
pub(crate) struct Port<'a> {
    device: &'a mut Device,
    mutes: &'a mut Mutes,
    now: Instant,
    own: Own,
}

/// The devices of a machine, borrowed for one call.
pub(crate) struct Bench<'a>(Vec<Port<'a>>);

/// Borrows the devices of a machine; `None` if it is dead.
pub(crate) fn bench<'a>(hosts: &'a mut [Host], own: &[Own], now: Instant) -> Option<Bench<'a>> {
    let devices = hosts.iter_mut().zip(own);
    let ports: Option<Vec<Port<'a>>> = devices
        .map(|(host, own)| {
            let Host { device, mutes, .. } = host;
            Some(Port { device: device.as_mut()?, mutes, now, own: *own })
        })
        .collect();
    ports.map(Bench)
}

impl Bench<'_> {
    pub(crate) fn attrs(&self) -> Vec<PortAttr> {
        self.0.iter().map(Verbs::attr).collect()
    }

    /// Takes all completions of a device, and arms the completion queue for the next one.
    pub(crate) fn poll(&mut self, port: usize, out: &mut Vec<Completion>) -> Result<bool, Error> {
        let Port { device, own, mutes, .. } = &mut self.0[port];
        let mut taken = Vec::new();
        device.poll_cq(own.cq, &mut taken, usize::MAX)?;
        mutes.withhold_completions(&mut taken);
        out.append(&mut taken);
        device.arm_cq(own.cq, false)
    }
}

impl Ports for Bench<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn port(&mut self, port: PortId) -> &mut dyn Verbs {
        &mut self.0[usize::from(port.0)]
    }
}

impl Verbs for Port<'_> {
    fn attr(&self) -> PortAttr {
        let attr = self.device.attr();
        PortAttr {
            max_qp_wr: attr.max_qp_wr,
            max_sge: attr.max_sge,
            fast_registration: attr.fast_registration,
            key_refresh: attr.key_refresh,
            burst: self.own.burst,
            mtu: attr.mtu.bytes(),
        }
    }

    fn alloc_pd(&mut self) -> Result<PdId, Error> {
        self.device.alloc_pd()
    }

    fn dealloc_pd(&mut self, pd: PdId) {
        // A domain that cannot be freed shows at the end, as an object that is left.
        let _ = self.device.dealloc_pd(pd);
    }

    fn create_qp(&mut self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error> {
        let most = self.attr().max_qp_wr;
        let cap = QpCap {
            max_send_wr: (shape.send_wr + 1).min(most),
            max_recv_wr: (shape.recv_wr + 1).min(most),
            max_send_sge: shape.send_sge,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let qpn = self.device.create_qp(&QpInit {
            pd: pd.unwrap_or(self.own.pd),
            send_cq: self.own.cq,
            recv_cq: self.own.cq,
            srq: None,
            qp_type: QpType::Rc,
            cap,
            sq_sig_all: false,
        })?;
        let (state, access, give_up) = (Some(QpState::Init), Some(shape.access), shape.give_up);
        let attr = QpAttr { state, access, give_up, ..QpAttr::default() };
        self.device.modify_qp(self.now, qpn, &attr)?;
        self.mutes.made(qpn);
        Ok(qpn)
    }

    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        if self.mutes.moved_to_error(qpn) {
            return Ok(());
        }
        let state = Some(QpState::Err);
        self.device.modify_qp(self.now, qpn, &QpAttr { state, ..QpAttr::default() })
    }

    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.device.destroy_qp(qpn)?;
        self.mutes.removed(qpn);
        Ok(())
    }

    fn reg_mr(
        &mut self,
        pd: Option<PdId>,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, Error> {
        self.device.reg_mr(pd.unwrap_or(self.own.pd), buffer, offset, len, Some(iova), access)
    }

    fn alloc_mr(&mut self) -> Result<u32, Error> {
        self.device.alloc_mr(self.own.pd).map(|keys| keys.rkey)
    }

    fn dereg_mr(&mut self, lkey: u32) {
        // A region that cannot be deregistered shows at the end, as an object that is left.
        let _ = self.device.dereg_mr(lkey);
    }

    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error> {
        self.device.withdraw_keys(keys)
    }

    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.device.renew_keys(keys)
    }

    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        if self.mutes.is_mute(qpn) {
            return Ok(());
        }
        let posted = self.device.post_send(self.now, qpn, wrs);
        // Cores count work requests, and bindings have reserved room for the parts they make of
        // one.
        assert!(!matches!(posted, Err((_, Error::QueueFull))), "a send queue is full");
        posted
    }

    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        if self.mutes.is_mute(qpn) {
            return Ok(());
        }
        self.device.post_recv(self.now, qpn, wrs)
    }

    fn connect(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        let id = self.device.connect(self.now, Some(local), remote, param)?;
        self.mutes.connected(id, param.qpn);
        Ok(id)
    }

    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        self.mutes.connected(id, param.qpn);
        self.device.accept(self.now, id, param)
    }

    fn reject(&mut self, id: CmId, private: &[u8]) -> Result<(), Error> {
        self.device.reject(self.now, id, private)
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        if self.mutes.is_mute_id(id) {
            return Ok(());
        }
        self.device.disconnect(self.now, id)
    }

    fn destroy_id(&mut self, id: CmId) -> Result<(), Error> {
        self.device.destroy_id(self.now, id)?;
        self.mutes.forgotten(id);
        Ok(())
    }
}

/// The interface that client and server core share.
pub(crate) trait Core {
    fn handle(&mut self, now: Instant, input: Input);
    fn poll_order(&mut self) -> Option<Order>;
    fn take_batch(&mut self, into: &mut Batch);
}

impl Core for bowline_rtrs::client::Session {
    fn handle(&mut self, now: Instant, input: Input) {
        self.handle(now, input);
    }

    fn poll_order(&mut self) -> Option<Order> {
        self.poll_order()
    }

    fn take_batch(&mut self, into: &mut Batch) {
        self.take_batch(into);
    }
}

impl Core for bowline_rtrs::server::Server {
    fn handle(&mut self, now: Instant, input: Input) {
        self.handle(now, input);
    }

    fn poll_order(&mut self) -> Option<Order> {
        self.poll_order()
    }

    fn take_batch(&mut self, into: &mut Batch) {
        self.take_batch(into);
    }
}

/// Observes, and in sabotaged runs modifies, everything that a core gives to its devices.
pub(crate) trait Intercept {
    fn order(&mut self, order: Order) -> Option<Order>;
    fn batch(&mut self, batch: &mut Batch);
    fn input(&mut self, input: &Input);
}

/// Carries out a core's orders until there are no more.
pub(crate) fn drain(
    core: &mut dyn Core,
    binding: &mut Binding,
    bench: &mut Bench<'_>,
    now: Instant,
    intercept: &mut dyn Intercept,
) {
    let (mut batch, mut inputs, mut failed) = (Batch::default(), Vec::new(), Vec::new());
    loop {
        // Orders come before the batch that was made together with them.
        let orders: Vec<Order> = std::iter::from_fn(|| core.poll_order()).collect();
        core.take_batch(&mut batch);
        if orders.is_empty() && batch.is_empty() {
            return;
        }
        for order in orders {
            if let Some(order) = intercept.order(order) {
                binding.run_order(bench, order, &mut inputs);
            }
        }
        intercept.batch(&mut batch);
        withdraw(bench, &mut batch, &mut failed);
        binding.run_batch(bench, &mut batch, &mut inputs);
        for input in inputs.drain(..) {
            intercept.input(&input);
            core.handle(now, input);
        }
    }
}

/// The range of hosts of each machine.
#[derive(Clone, Debug)]
pub(crate) struct Spans(pub(crate) Vec<Range<usize>>);

impl Spans {
    /// The machine and the port of a host.
    pub(crate) fn of(&self, host: usize) -> (usize, usize) {
        let node = self.0.iter().position(|span| span.contains(&host)).unwrap_or(0);
        (node, host - self.0[node].start)
    }
}
