//! Queue pairs, regions and connections as tables; a message arrives when it is posted, unless its
//! path is cut or no receive is there.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use bowline_rtrs::bind::{Ports, Verbs};
use bowline_rtrs::{PortAttr, PortId, QpShape};
use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, Completion, ConnParam, ConnRequest, Error, Feature,
    InvalidReason, MrKeys, Object, PdId, Qpn, RecvWr, RejectReason, Resource, SendFlags, SendOp,
    SendWr, Sge, Status, WcOpcode,
};

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

#[derive(Debug)]
struct Region {
    side: Side,
    pd: Option<PdId>,
    buffer: Arc<Buffer>,
    offset: usize,
    len: usize,
    iova: u64,
    lkey: u32,
    rkey: u32,
    access: Access,
    shut: bool,
}

/// A side and one of its protection domains.
type Home = (Side, Option<PdId>);

impl Region {
    fn is(&self, side: Side, pd: Option<PdId>) -> bool {
        (self.side, self.pd) == (side, pd)
    }
}

#[derive(Debug)]
struct Pending {
    id: u64,
    op: SendOp,
    sges: Vec<Sge>,
    signalled: bool,
}

#[derive(Debug)]
struct Qp {
    side: Side,
    pd: Option<PdId>,
    peer: Option<Qpn>,
    /// The client's address.
    path: Option<IpAddr>,
    dead: bool,
    shape: QpShape,
    unsignalled: usize,
    sends: VecDeque<Pending>,
    recvs: VecDeque<(u64, Vec<Sge>)>,
}

/// A message held on a cut path after its sender gave it up.
#[derive(Debug)]
struct Late {
    path: IpAddr,
    to: Qpn,
    op: SendOp,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Conn {
    side: Side,
    peer: CmId,
    qpn: Option<Qpn>,
    path: IpAddr,
    stands: bool,
}

/// The network between client and server, and their devices.
#[derive(Debug, Default)]
pub(crate) struct Net {
    next: u32,
    pds: BTreeSet<PdId>,
    regions: Vec<Region>,
    qps: BTreeMap<Qpn, Qp>,
    conns: BTreeMap<CmId, Conn>,
    pub(crate) cut: BTreeSet<IpAddr>,
    pub(crate) done: [VecDeque<Completion>; 2],
    pub(crate) cm: [VecDeque<CmEvent>; 2],
    /// Messages on a cut path that their sender has given up arrive when the path is mended.
    pub(crate) holds: bool,
    late: Vec<Late>,
    /// Disconnects that were lost on a cut path: the ids at both ends, and the path.
    untold: Vec<(CmId, CmId, IpAddr)>,
    pub(crate) listener: CmId,
    /// The server can make no more queue pairs.
    pub(crate) no_qp: bool,
}

/// The device of a side.
#[derive(Clone, Debug)]
pub(crate) struct Dev(pub(crate) Rc<RefCell<Net>>, pub(crate) Side);

impl Ports for Dev {
    fn count(&self) -> usize {
        1
    }

    fn port(&mut self, _: PortId) -> &mut dyn Verbs {
        self
    }
}

pub(crate) const ATTR: PortAttr = PortAttr {
    max_qp_wr: 4096,
    max_sge: 8,
    fast_registration: true,
    key_refresh: true,
    burst: 15 * 4096,
    mtu: 4096,
};

impl Net {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    pub(crate) fn listen(&mut self) -> CmId {
        self.listener = CmId(self.number());
        self.listener
    }

    pub(crate) fn is_empty(&self) -> bool {
        let none = self.pds.is_empty() && self.regions.is_empty();
        none && self.qps.is_empty() && self.conns.is_empty()
    }

    fn complete(&mut self, side: Side, completion: Completion) {
        self.done[side as usize].push_back(completion);
    }

    /// A queue pair fails: what it holds is flushed, the first send with `status`.
    pub(crate) fn fail(&mut self, qpn: Qpn, status: Status) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.dead = true;
        let side = qp.side;
        let sends = std::mem::take(&mut qp.sends);
        let recvs = std::mem::take(&mut qp.recvs);
        let mut status = status;
        for send in sends {
            self.complete(
                side,
                Completion { wr_id: send.id, status, qpn, ..Completion::default() },
            );
            status = Status::WrFlushErr;
        }
        for (wr_id, _) in recvs {
            let (status, opcode) = (Status::WrFlushErr, WcOpcode::Recv);
            self.complete(side, Completion { wr_id, status, opcode, qpn, ..Completion::default() });
        }
    }

    /// Queue pairs of a side on a path.
    pub(crate) fn qps_of(&self, side: Side, path: IpAddr) -> Vec<Qpn> {
        let of = |qp: &&Qp| qp.side == side && qp.path == Some(path) && !qp.dead;
        self.qps.iter().filter(|(_, qp)| of(qp)).map(|(qpn, _)| *qpn).collect()
    }

    /// Queue pairs with unacknowledged sends give up.
    pub(crate) fn give_up(&mut self) {
        let lives = |qpn: &Qpn| self.qps.get(qpn).is_some_and(|qp| !qp.dead);
        let stuck: Vec<Qpn> = (self.qps.iter())
            .filter(|(_, qp)| !qp.dead && !qp.sends.is_empty())
            .filter(|(_, qp)| {
                qp.path.is_some_and(|path| self.cut.contains(&path))
                    || qp.peer.is_some_and(|peer| !lives(&peer))
            })
            .map(|(qpn, _)| *qpn)
            .collect();
        for qpn in stuck {
            self.keep(qpn);
            self.fail(qpn, Status::RetryExcErr);
        }
    }

    /// Unacknowledged sends of a queue pair may still be on their way.
    fn keep(&mut self, qpn: Qpn) {
        let Some(qp) = self.qps.get(&qpn).filter(|_| self.holds) else { return };
        let (Some(path), Some(to)) = (qp.path, qp.peer) else { return };
        let late: Vec<Late> = (qp.sends.iter())
            .map_while(|send| {
                let bytes = self.gather((qp.side, qp.pd), &send.sges)?;
                Some(Late { path, to, op: send.op.clone(), bytes })
            })
            .collect();
        self.late.extend(late);
    }

    pub(crate) fn heal(&mut self, path: IpAddr) {
        self.cut.remove(&path);
        let late: Vec<Late> = self.late.extract_if(.., |late| late.path == path).collect();
        let any = !late.is_empty();
        for Late { to, op, bytes, .. } in late {
            if self.arrive(to, &op, bytes) == Some(false) {
                self.fail(to, Status::WrFlushErr);
            }
        }
        let all: Vec<Qpn> = self.qps.keys().copied().collect();
        all.into_iter().for_each(|qpn| self.pump(qpn));
        // The disconnect is delivered behind the message, at the next step.
        if any {
            return;
        }
        for (id, peer, path) in std::mem::take(&mut self.untold) {
            self.tell_both(id, peer, path);
        }
    }

    /// Tells both ends of a connection that it has ended.
    fn tell_end(&mut self, id: CmId) {
        if let Some(conn) = self.conns.get(&id) {
            self.tell_both(id, conn.peer, conn.path);
        }
    }

    fn tell_both(&mut self, id: CmId, peer: CmId, path: IpAddr) {
        if self.cut.contains(&path) {
            return self.untold.push((id, peer, path));
        }
        for id in [id, peer] {
            let Some(conn) = self.conns.get_mut(&id).filter(|conn| conn.stands) else { continue };
            conn.stands = false;
            let (side, qpn) = (conn.side, conn.qpn);
            self.cm[side as usize].push_back(CmEvent::Disconnected { id });
            if let Some(qpn) = qpn {
                self.fail(qpn, Status::WrFlushErr);
            }
        }
    }

    fn gather(&self, (side, pd): Home, sges: &[Sge]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        for sge in sges {
            let region = self.regions.iter().find(|at| at.is(side, pd) && at.lkey == sge.lkey)?;
            let at = usize::try_from(sge.addr.checked_sub(region.iova)?).ok()?;
            (at + sge.len as usize <= region.len).then_some(())?;
            region.buffer.append_to(region.offset + at, sge.len as usize, &mut out);
        }
        Some(out)
    }

    fn place(&self, (side, pd): Home, rkey: u32, addr: u64, bytes: &[u8]) -> Option<()> {
        let region = self.regions.iter().find(|at| at.is(side, pd) && at.rkey == rkey)?;
        let at = usize::try_from(addr.checked_sub(region.iova)?).ok()?;
        let may = region.access.contains(Access::REMOTE_WRITE) && !region.shut;
        (may && at + bytes.len() <= region.len).then_some(())?;
        region.buffer.write(region.offset + at, bytes);
        Some(())
    }

    fn scatter(&self, (side, pd): Home, sges: &[Sge], bytes: &[u8]) -> Option<()> {
        if bytes.is_empty() {
            return Some(());
        }
        let sge = sges.first().filter(|sge| bytes.len() <= sge.len as usize)?;
        let region = self.regions.iter().find(|at| at.is(side, pd) && at.lkey == sge.lkey)?;
        region.buffer.write(region.offset + (sge.addr - region.iova) as usize, bytes);
        Some(())
    }

    /// A message arrives at a queue pair; `None` if that is dead or has no receive for it,
    /// `Some(false)` if it may not do what it does.
    fn arrive(&mut self, qpn: Qpn, op: &SendOp, bytes: Vec<u8>) -> Option<bool> {
        let qp = self.qps.get(&qpn).filter(|qp| !qp.dead)?;
        let home = (qp.side, qp.pd);
        let recv = qp.recvs.front().cloned();
        let (opcode, byte_len) = (WcOpcode::Recv, bytes.len() as u32);
        let told = Completion { byte_len, opcode, qpn, ..Completion::default() };
        if let SendOp::Write(to) = op {
            return Some(self.place(home, to.rkey, to.addr, &bytes).is_some());
        }
        let (wr_id, sges) = recv?;
        let done = match *op {
            SendOp::WriteImm(to, imm) => {
                let placed =
                    bytes.is_empty() || self.place(home, to.rkey, to.addr, &bytes).is_some();
                let opcode = WcOpcode::RecvRdmaWithImm;
                placed.then_some(Completion { imm: Some(imm), opcode, ..told })
            }
            SendOp::Send => self.scatter(home, &sges, &bytes).map(|()| told),
            SendOp::SendImm(imm) => {
                let scattered = self.scatter(home, &sges, &bytes);
                scattered.map(|()| Completion { imm: Some(imm), ..told })
            }
            SendOp::SendInv(key) => {
                let known = self.regions.iter().any(|at| at.is(home.0, home.1) && at.rkey == key);
                known.then_some(Completion { invalidated: Some(key), ..told })
            }
            _ => None,
        };
        let Some(told) = done else { return Some(false) };
        self.qps.get_mut(&qpn)?.recvs.pop_front();
        self.complete(home.0, Completion { wr_id, ..told });
        Some(true)
    }

    /// Carries out the sends of a queue pair, as far as possible.
    fn pump(&mut self, qpn: Qpn) {
        while let Some(qp) = self.qps.get(&qpn).filter(|qp| !qp.dead) {
            let (Some(peer), Some(path)) = (qp.peer, qp.path) else { return };
            let Some(send) = qp.sends.front().filter(|_| !self.cut.contains(&path)) else {
                return;
            };
            let (side, op) = (qp.side, send.op.clone());
            let bytes = self.gather((side, qp.pd), &send.sges);
            let arrived = bytes.map_or(Some(false), |bytes| self.arrive(peer, &op, bytes));
            match arrived {
                None => return,
                Some(false) => {
                    self.fail(qpn, Status::RemAccessErr);
                    return self.fail(peer, Status::WrFlushErr);
                }
                Some(true) => {}
            }
            let qp = self.qps.get_mut(&qpn).expect("the sender");
            let send = qp.sends.pop_front().expect("the send");
            if send.signalled {
                qp.unsignalled = 0;
                self.complete(side, Completion { wr_id: send.id, qpn, ..Completion::default() });
            } else {
                qp.unsignalled += 1;
            }
        }
    }
}

impl Verbs for Dev {
    fn attr(&self) -> PortAttr {
        ATTR
    }

    fn alloc_pd(&mut self) -> Result<PdId, Error> {
        let mut net = self.0.borrow_mut();
        let pd = PdId(net.number());
        net.pds.insert(pd);
        Ok(pd)
    }

    fn dealloc_pd(&mut self, pd: PdId) {
        let mut net = self.0.borrow_mut();
        let used = net.regions.iter().any(|region| region.pd == Some(pd));
        assert!(!used && net.qps.values().all(|qp| qp.pd != Some(pd)), "something is left there");
        assert!(net.pds.remove(&pd), "removed twice");
    }

    fn create_qp(&mut self, pd: Option<PdId>, shape: &QpShape) -> Result<Qpn, Error> {
        let mut net = self.0.borrow_mut();
        if net.no_qp && self.1 == Side::Server {
            return Err(Error::Limit(Resource::QueuePairs));
        }
        let qpn = Qpn(net.number());
        let (recvs, sends) = (VecDeque::new(), VecDeque::new());
        let shape = *shape;
        let (side, peer, path, dead, unsignalled) = (self.1, None, None, false, 0);
        net.qps.insert(qpn, Qp { side, pd, peer, path, dead, shape, unsignalled, sends, recvs });
        Ok(qpn)
    }

    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.0.borrow_mut().fail(qpn, Status::WrFlushErr);
        Ok(())
    }

    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.0.borrow_mut().qps.remove(&qpn).map(|_| ()).ok_or(Error::NoSuch(Object::QueuePair))
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
        let mut net = self.0.borrow_mut();
        let key = net.number() << 8;
        let (buffer, side, shut) = (Arc::clone(buffer), self.1, false);
        let (lkey, rkey) = (key, key);
        net.regions.push(Region { side, pd, buffer, offset, len, iova, lkey, rkey, access, shut });
        Ok(MrKeys { lkey, rkey })
    }

    fn alloc_mr(&mut self) -> Result<u32, Error> {
        Err(Error::NotSupported(Feature::FastRegistration))
    }

    fn dereg_mr(&mut self, lkey: u32) {
        let mut net = self.0.borrow_mut();
        let at = net.regions.iter().position(|region| region.lkey == lkey);
        net.regions.swap_remove(at.expect("a region that is there"));
    }

    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        let is = |region: &&Region| keys.contains(&region.rkey) && !region.shut;
        if net.regions.iter().filter(is).count() != keys.len() {
            return Err(Error::Invalid(InvalidReason::KeyWithdrawn));
        }
        net.regions
            .iter_mut()
            .filter(|region| keys.contains(&region.rkey))
            .for_each(|region| region.shut = true);
        Ok(())
    }

    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        for (old, new) in keys {
            let mut regions = net.regions.iter_mut();
            let region = regions.find(|region| region.rkey == *old && region.shut);
            let region = region.ok_or(Error::NoSuch(Object::MemoryRegion))?;
            (region.rkey, region.shut) = (*new, false);
        }
        Ok(())
    }

    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        let mut net = self.0.borrow_mut();
        let qp = net.qps.get_mut(&qpn).ok_or((0, Error::NoSuch(Object::QueuePair)))?;
        for wr in wrs {
            let full = qp.sends.len() + qp.unsignalled > qp.shape.send_wr;
            assert!(!full || qp.dead, "more sends than the shape says");
            let signalled = wr.flags.contains(SendFlags::SIGNALED);
            let (id, op, sges) = (wr.id, wr.op.clone(), wr.sges.to_vec());
            qp.sends.push_back(Pending { id, op, sges, signalled });
        }
        if qp.dead {
            net.fail(qpn, Status::WrFlushErr);
        }
        net.pump(qpn);
        Ok(())
    }

    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        let mut net = self.0.borrow_mut();
        let qp = net.qps.get_mut(&qpn).ok_or((0, Error::NoSuch(Object::QueuePair)))?;
        qp.recvs.extend(wrs.iter().map(|wr| (wr.id, wr.sges.to_vec())));
        assert!(qp.recvs.len() <= qp.shape.recv_wr + 1, "more receives than the shape says");
        let (dead, peer) = (qp.dead, qp.peer);
        if dead {
            net.fail(qpn, Status::WrFlushErr);
        }
        if let Some(peer) = peer {
            net.pump(peer);
        }
        Ok(())
    }

    fn connect(
        &mut self,
        local: SocketAddr,
        remote: SocketAddr,
        param: &ConnParam,
    ) -> Result<CmId, Error> {
        let mut net = self.0.borrow_mut();
        let (id, far) = (CmId(net.number()), CmId(net.number()));
        let path = local.ip();
        let mine = Conn { side: self.1, peer: far, qpn: Some(param.qpn), path, stands: false };
        net.conns.insert(id, mine);
        if net.cut.contains(&path) {
            net.cm[self.1 as usize].push_back(CmEvent::Unreachable { id });
            return Ok(id);
        }
        let theirs = Conn { side: Side::Server, peer: id, qpn: None, path, stands: false };
        net.conns.insert(far, theirs);
        let request = ConnRequest {
            listener: net.listener,
            local: remote,
            remote: local,
            private_data: param.private_data.clone(),
            responder_resources: 0,
            initiator_depth: 0,
            remote_qpn: param.qpn,
        };
        net.cm[Side::Server as usize].push_back(CmEvent::ConnectRequest { id: far, request });
        Ok(id)
    }

    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        let net = &mut *net;
        let conn = net.conns.get_mut(&id).ok_or(Error::NoSuch(Object::Connection))?;
        conn.qpn = Some(param.qpn);
        let (peer, path) = (conn.peer, conn.path);
        let Some(far) = net.conns.get(&peer).and_then(|far| far.qpn) else { return Ok(()) };
        for (qpn, other) in [(param.qpn, far), (far, param.qpn)] {
            if let Some(qp) = net.qps.get_mut(&qpn) {
                (qp.peer, qp.path) = (Some(other), Some(path));
            }
        }
        for (side, id) in [(Side::Client, peer), (Side::Server, id)] {
            net.conns.get_mut(&id).expect("an end").stands = true;
            let private_data =
                if side == Side::Client { param.private_data.clone() } else { Vec::new() };
            net.cm[side as usize].push_back(CmEvent::Established {
                id,
                private_data,
                responder_resources: 0,
                initiator_depth: 0,
            });
        }
        Ok(())
    }

    fn reject(&mut self, id: CmId, private: &[u8]) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        let peer = net.conns.get(&id).ok_or(Error::NoSuch(Object::Connection))?.peer;
        if net.conns.contains_key(&peer) {
            let (reason, private_data) = (RejectReason::CONSUMER, private.to_vec());
            let event = CmEvent::Rejected { id: peer, reason, private_data };
            net.cm[Side::Client as usize].push_back(event);
        }
        Ok(())
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        match net.conns.get(&id) {
            Some(conn) if conn.stands => net.tell_end(id),
            Some(_) => {}
            None => return Err(Error::NoSuch(Object::Connection)),
        }
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId) -> Result<(), Error> {
        let mut net = self.0.borrow_mut();
        // A connection that ends because it is forgotten is reported all the same.
        if net.conns.get(&id).is_some_and(|conn| conn.stands) {
            net.tell_end(id);
        }
        net.conns.remove(&id).map(|_| ()).ok_or(Error::NoSuch(Object::Connection))
    }
}
