//! The binding against devices that note what they are asked.

use std::net::SocketAddr;
use std::sync::Arc;

use bowline_verbs::{
    Access, Buffer, CmEvent, CmId, ConnParam, Error, MrKeys, Object, PdId, Qpn, RecvWr, Remote,
    Resource, SendFlags, SendOp, SendWr,
};

use super::{Binding, Ports, Verbs, done_of, with_parts, withdraw};
use crate::{
    Batch, ConnId, Errno, Input, MemRef, Order, PathId, PortAttr, PortId, QpShape, RecvSlot,
    RegionId, RegionPorts, Tag, WrKind,
};

/// Notes calls, and refuses what it is told to.
#[derive(Debug, Default)]
struct Fake {
    calls: Vec<String>,
    next: u32,
    /// Sends to this queue pair fail.
    full: Option<Qpn>,
    /// It does not go to ERR.
    stuck: Option<Qpn>,
    /// Keys nobody has.
    unknown: Vec<u32>,
}

impl Fake {
    fn note(&mut self, call: String) -> u32 {
        self.calls.push(call);
        self.next += 1;
        self.next
    }

    fn known(&self, keys: impl Iterator<Item = u32>) -> Result<(), Error> {
        let mut keys = keys;
        match keys.any(|key| self.unknown.contains(&key)) {
            true => Err(Error::NoSuch(Object::MemoryRegion)),
            false => Ok(()),
        }
    }
}

fn within(pd: Option<PdId>) -> String {
    pd.map_or_else(String::new, |pd| format!(" in {}", pd.0))
}

impl Verbs for Fake {
    fn attr(&self) -> PortAttr {
        PortAttr {
            max_qp_wr: 64,
            max_sge: 4,
            fast_registration: true,
            key_refresh: true,
            burst: 3 * 4096,
            mtu: 4096,
        }
    }

    fn alloc_pd(&mut self) -> Result<PdId, Error> {
        Ok(PdId(self.note("pd".to_owned())))
    }

    fn dealloc_pd(&mut self, pd: PdId) {
        self.note(format!("free {}", pd.0));
    }

    fn create_qp(&mut self, pd: Option<PdId>, _: &QpShape) -> Result<Qpn, Error> {
        Ok(Qpn(self.note(format!("qp{}", within(pd)))))
    }

    fn fail_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.note(format!("fail {}", qpn.0));
        if self.stuck == Some(qpn) { Err(Error::Busy(Object::QueuePair)) } else { Ok(()) }
    }

    fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), Error> {
        self.note(format!("destroy {}", qpn.0));
        Ok(())
    }

    fn reg_mr(
        &mut self,
        pd: Option<PdId>,
        _: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<MrKeys, Error> {
        assert_eq!(offset as u64, iova, "addresses tell nothing of this process");
        if access.contains(Access::REMOTE_ATOMIC) {
            return Err(Error::Limit(Resource::MemoryRegions));
        }
        let key = self.note(format!("reg {offset}+{len}{}", within(pd))) << 8;
        Ok(MrKeys { lkey: key, rkey: key })
    }

    fn alloc_mr(&mut self) -> Result<u32, Error> {
        if self.calls.len() > 40 {
            return Err(Error::Limit(Resource::MemoryRegions));
        }
        Ok(self.note("alloc".to_owned()) << 8)
    }

    fn dereg_mr(&mut self, lkey: u32) {
        self.note(format!("dereg {}", lkey >> 8));
    }

    fn withdraw_keys(&mut self, keys: &[u32]) -> Result<(), Error> {
        self.known(keys.iter().copied())?;
        self.note(format!("withdraw {keys:?}"));
        Ok(())
    }

    fn renew_keys(&mut self, keys: &[(u32, u32)]) -> Result<(), Error> {
        self.known(keys.iter().map(|(key, _)| *key))?;
        self.note(format!("renew {keys:?}"));
        Ok(())
    }

    fn post_send(&mut self, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, Error)> {
        if self.full == Some(qpn) {
            return Err((0, Error::QueueFull));
        }
        let each = wrs.iter().map(|wr| {
            let op = match wr.op {
                SendOp::Write(_) => "w",
                SendOp::WriteImm(..) => "wi",
                SendOp::SendImm(_) => "si",
                SendOp::RegMr { .. } => "reg",
                SendOp::LocalInv(_) => "inv",
                _ => "s",
            };
            let pieces = match &wr.op {
                SendOp::RegMr { key, pieces, .. } => {
                    let all = pieces.iter().map(|p| format!(" ({}, {})", p.offset, p.len));
                    format!("[{key}:{}]", all.collect::<String>())
                }
                SendOp::Write(to) | SendOp::WriteImm(to, _) if to.addr > 0 => {
                    format!("@{}", to.addr)
                }
                _ => String::new(),
            };
            let signal = if wr.flags.contains(SendFlags::SIGNALED) { "!" } else { "" };
            let sges: Vec<_> =
                wr.sges.iter().map(|sge| (sge.addr, sge.len, sge.lkey >> 8)).collect();
            format!(" {op}{}{signal}{pieces}{sges:?}", wr.id as u32 & 0xffff)
        });
        let call = format!("send {}:{}", qpn.0, each.collect::<String>());
        self.note(call);
        Ok(())
    }

    fn post_recv(&mut self, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        let sges: Vec<_> = wrs.iter().map(|wr| wr.sges.len()).collect();
        self.note(format!("recv {}: {sges:?}", qpn.0));
        Ok(())
    }

    fn connect(&mut self, _: SocketAddr, _: SocketAddr, p: &ConnParam) -> Result<CmId, Error> {
        assert_eq!((p.responder_resources, p.initiator_depth, p.rnr_retry_count), (0, 0, 7));
        Ok(CmId(self.note(format!("connect {}", p.qpn.0))))
    }

    fn accept(&mut self, _: CmId, _: &ConnParam) -> Result<(), Error> {
        Ok(())
    }

    fn reject(&mut self, id: CmId, _: &[u8]) -> Result<(), Error> {
        self.note(format!("reject {}", id.0));
        Ok(())
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        self.note(format!("disconnect {}", id.0));
        Ok(())
    }

    fn destroy_id(&mut self, id: CmId) -> Result<(), Error> {
        self.note(format!("forget {}", id.0));
        Ok(())
    }
}

impl Ports for Fake {
    fn count(&self) -> usize {
        1
    }

    fn port(&mut self, _: PortId) -> &mut dyn Verbs {
        self
    }
}

const PORT: PortId = PortId(0);

fn conn(slot: u16, generation: u8) -> ConnId {
    ConnId { path: PathId { slot, generation }, cid: 1 }
}

fn connect(to: ConnId) -> Order {
    let at = SocketAddr::from(([127, 0, 0, 1], 1234));
    let access = Access::REMOTE_WRITE;
    let shape = QpShape { send_wr: 8, recv_wr: 8, send_sge: 2, access, queue: 0, give_up: None };
    let (private, retry_count) = ([0; 56], 6);
    Order::Connect { conn: to, port: PORT, local: at, remote: at, shape, private, retry_count }
}

/// Two connections and a region, and nothing noted yet.
fn pair() -> (Binding, Fake, [ConnId; 2], RegionId) {
    let (mut binding, mut fake, mut out) = (Binding::new(1), Fake::default(), Vec::new());
    let (a, b) = (conn(0, 0), conn(1, 7));
    binding.run_order(&mut fake, connect(a), &mut out);
    binding.run_order(&mut fake, connect(b), &mut out);
    let region = RegionId(9);
    let buffer = Arc::new(Buffer::new(8192).unwrap());
    let (access, granule) = (Access::LOCAL_WRITE | Access::REMOTE_WRITE, Some(4096));
    let (ports, path) = (RegionPorts::All, None);
    let order = Order::AddRegion { region, buffer, access, granule, ports, path };
    binding.run_order(&mut fake, order, &mut out);
    let [Input::Region { keys: Ok(keys), .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!(keys.iter().map(|keys| keys.addr).collect::<Vec<_>>(), [0, 4096]);
    assert!(keys[0].lkey == keys[1].lkey && keys[0].rkey != keys[1].rkey);
    assert_ne!(keys[0].lkey, keys[0].rkey, "own requests do not depend on the peer's key");
    assert_eq!(
        fake.calls,
        ["qp", "connect 1", "qp", "connect 3", "reg 0+8192", "reg 0+4096", "reg 4096+4096"]
    );
    fake.calls.clear();
    (binding, fake, [a, b], region)
}

/// [RT-47]: one call for each connection, in order; small data first.
#[test]
fn sends_of_a_connection_go_with_one_call() {
    let (mut binding, mut fake, [a, b], region) = pair();
    let mem = |offset, len| [MemRef { region, offset, len }];
    let to = Remote { addr: 0, rkey: 1 };
    let mut batch = Batch::default();
    for n in 0..2 {
        batch.send(a, Tag(10 + n), WrKind::Write(to), &mem(0, 4096), false);
        batch.send(b, Tag(20 + n), WrKind::WriteImm(to, 1), &[mem(0, 3)[0], mem(8, 4)[0]], false);
        batch.send(a, Tag(30 + n), WrKind::SendImm(1), &mem(64, 8), n == 1);
        batch.send(conn(1, 6), Tag(40), WrKind::Send, &[], true);
    }
    batch.recvs.push(RecvSlot { conn: a, tag: Tag(1), mem: None });
    batch.recvs.push(RecvSlot { conn: a, tag: Tag(2), mem: Some(mem(0, 8)[0]) });
    batch.renew.push((PORT, 5, 6));
    let mut out = Vec::new();
    binding.run_batch(&mut fake, &mut batch, &mut out);
    assert!(batch.is_empty() && out.is_empty());
    assert_eq!(
        fake.calls,
        [
            "renew [(5, 6)]",
            "recv 1: [0, 1]",
            "send 1: w10[(0, 4096, 5)] w11[(0, 4096, 5)] si30[(64, 8, 5)] si31![(64, 8, 5)]",
            "send 3: wi20[(0, 3, 5), (8, 4, 5)] wi21[(0, 3, 5), (8, 4, 5)]",
        ]
    );
}

/// [RT-97]: data of several pieces in two parts, the message before it in between.
#[test]
fn long_data_is_split_where_a_burst_is_full() {
    let (mut binding, mut fake, [a, _], region) = pair();
    let mem = |offset, len| MemRef { region, offset, len };
    let to = |addr| WrKind::Write(Remote { addr, rkey: 1 });
    let mut batch = Batch::default();
    batch.send(a, Tag(10), to(0), &[mem(0, 8192)], false);
    batch.send(a, Tag(30), WrKind::SendImm(1), &[mem(64, 8)], false);
    let pieces = [mem(1, 1000), mem(2, 0), mem(3, 3096), mem(4, 5000), mem(5, 3192)];
    batch.send(a, Tag(11), to(100), &pieces, false);
    batch.send(a, Tag(31), WrKind::SendImm(1), &[mem(64, 8)], true);
    let mut out = Vec::new();
    binding.run_batch(&mut fake, &mut batch, &mut out);
    let parts =
        "w11@100[(1, 1000, 5), (3, 3096, 5)] si30[(64, 8, 5)] w11@4196[(4, 5000, 5), (5, 3192, 5)]";
    assert_eq!(fake.calls, [format!("send 1: w10[(0, 8192, 5)] {parts} si31![(64, 8, 5)]")]);
}

/// [RT-97]: data of a packet shares two packets of one size with the message behind it.
#[test]
fn short_data_and_its_message_are_cut_anew() {
    let (mut binding, mut fake, [a, _], region) = pair();
    let mem = |offset, len| MemRef { region, offset, len };
    let to = |addr| Remote { addr, rkey: 1 };
    let mut batch = Batch::default();
    let pieces = [mem(1, 1000), mem(2, 0), mem(3, 3000), mem(4, 96)];
    batch.send(a, Tag(10), WrKind::Write(to(100)), &pieces, false);
    batch.send(a, Tag(11), WrKind::WriteImm(to(4196), 1), &[mem(64, 40)], true);
    let mut out = Vec::new();
    binding.run_batch(&mut fake, &mut batch, &mut out);
    let parts =
        "w10@100[(1, 1000, 5), (3, 1070, 5)] wi11!@2170[(1073, 1930, 5), (4, 96, 5), (64, 40, 5)]";
    assert_eq!(fake.calls, [format!("send 1: {parts}")]);
}

/// A server's answer: what tells of the data has nothing of its own to say [RT-97].
#[test]
fn an_immediate_takes_along_what_fills_no_packet() {
    let (mut binding, mut fake, [a, _], region) = pair();
    let to = |addr| Remote { addr, rkey: 1 };
    let mut batch = Batch::default();
    for (k, len) in [(0, 10_240), (1, 8192)] {
        let mem = [MemRef { region, offset: 0, len }];
        batch.send(a, Tag(10 + 2 * k), WrKind::Write(to(100)), &mem, false);
        let end = to(100 + u64::from(len));
        batch.send(a, Tag(11 + 2 * k), WrKind::WriteImm(end, k), &[], false);
    }
    let mut out = Vec::new();
    binding.run_batch(&mut fake, &mut batch, &mut out);
    let parts =
        "w10@100[(0, 8192, 5)] wi11@8292[(8192, 2048, 5)] w12@100[(0, 8192, 5)] wi13@8292[]";
    assert_eq!(fake.calls, [format!("send 1: {parts}")]);
}

/// Queue pairs have room for the parts of what a core has outstanding, where the device has it.
#[test]
fn queue_pairs_have_room_for_parts() {
    let access = Access::REMOTE_WRITE;
    let shape = QpShape { send_wr: 8, recv_wr: 8, send_sge: 2, access, queue: 0, give_up: None };
    let with = |burst, max_qp_wr| {
        let attr = PortAttr { max_qp_wr, burst, ..Fake::default().attr() };
        let (bursts, shape) = with_parts(attr, &shape);
        (bursts.split, shape.send_wr)
    };
    assert_eq!(with(4096, 13), (true, 12));
    assert_eq!(with(4096, 12), (false, 8), "the marker of the end would not fit");
    assert_eq!(with(0, 100), (false, 8));
}

/// [RT-42]: keys for single requests, whose memory is no gather list.
#[test]
fn memory_is_registered_by_a_request() {
    let (mut binding, mut fake, [a, _], region) = pair();
    let mut out = Vec::new();
    let path = a.path;
    binding.run_order(&mut fake, Order::AddKeys { path, port: PORT, count: 2 }, &mut out);
    let [Input::Keys { keys: Ok(keys), .. }] = &out[..] else { panic!("{out:?}") };
    let keys = keys.clone();
    assert_eq!(fake.calls, ["alloc", "alloc"]);
    fake.calls.clear();
    let mem = |offset, len| MemRef { region, offset, len };
    let to = Remote { addr: 0, rkey: 1 };
    let mut batch = Batch::default();
    let data = [mem(100, 30), mem(4096, 1)];
    batch.send(a, Tag(1), WrKind::Register(keys[0]), &data, false);
    batch.send(a, Tag(2), WrKind::WriteImm(to, 1), &[mem(0, 8)], false);
    batch.send(a, Tag(3), WrKind::Invalidate(keys[0]), &[], true);
    out.clear();
    binding.run_batch(&mut fake, &mut batch, &mut out);
    let key = keys[0];
    let registers = format!("reg1[{key}: (100, 30) (4096, 1)][]");
    assert_eq!(fake.calls, [format!("send 1: {registers} wi2[(0, 8, 5)] inv3![]")]);
    fake.calls.clear();
    binding.run_order(&mut fake, Order::DropKeys { path }, &mut out);
    binding.run_order(&mut fake, Order::DropKeys { path }, &mut out);
    assert_eq!(
        fake.calls,
        keys.iter().map(|key| format!("dereg {}", key >> 8)).collect::<Vec<_>>()
    );
    // All or none.
    fake.calls.clear();
    binding.run_order(&mut fake, Order::AddKeys { path, port: PORT, count: 100 }, &mut out);
    assert_eq!(out, [Input::Keys { path, keys: Err(Errno::ENOMEM) }]);
    let count = |what: &str| fake.calls.iter().filter(|call| call.starts_with(what)).count();
    assert_eq!(count("alloc"), count("dereg"));
}

/// [RT-59]: what cannot be posted is its connection's end, and nothing follows it there.
#[test]
fn a_full_queue_is_one_connections_end() {
    let (mut binding, mut fake, [a, b], _) = pair();
    fake.full = Some(Qpn(1));
    let mut out = Vec::new();
    for turn in 0..2 {
        let mut batch = Batch::default();
        batch.send(a, Tag(1), WrKind::Send, &[], true);
        batch.send(b, Tag(2), WrKind::Send, &[], true);
        binding.run_batch(&mut fake, &mut batch, &mut out);
        assert_eq!(out, [Input::Failed { conn: a, errno: Errno::ENOMEM }]);
        fake.full = None;
        assert_eq!(fake.calls.len(), turn + 1, "{:?}", fake.calls);
    }
}

/// One region that cannot be withdrawn does not keep the others from it [RT-67].
#[test]
fn keys_are_withdrawn_together_or_one_by_one() {
    let mut fake = Fake { unknown: vec![70], ..Fake::default() };
    let (mut batch, mut failed) = (Batch::default(), Vec::new());
    batch.withdraw.extend((0..70).map(|key| (PORT, key)));
    withdraw(&mut fake, &mut batch, &mut failed);
    assert_eq!((fake.calls.len(), failed.len()), (2, 0), "64 at once");
    batch.withdraw.extend([(PORT, 69), (PORT, 70), (PORT, 71)]);
    fake.calls.clear();
    withdraw(&mut fake, &mut batch, &mut failed);
    assert_eq!(failed, [(PORT, 70)]);
    assert_eq!(fake.calls, ["withdraw [69]", "withdraw [71]"]);
}

/// The end of a connection: markers, then the goodbye, then nothing.
#[test]
fn connections_end_in_order() {
    let (mut binding, mut fake, [a, b], region) = pair();
    let mut out = Vec::new();
    let established = CmEvent::Established {
        id: CmId(2),
        private_data: vec![1],
        responder_resources: 0,
        initiator_depth: 0,
    };
    assert!(binding.is_for(PORT, &established));
    let told = binding.cm(PORT, established);
    assert_eq!(told, Some(Input::Established { conn: a, private: vec![1] }));
    binding.run_order(&mut fake, Order::Close { conn: a }, &mut out);
    binding.run_order(&mut fake, Order::Close { conn: b }, &mut out);
    assert_eq!(
        fake.calls,
        [
            "fail 1",
            "send 1: s0![]",
            "recv 1: [0]",
            "disconnect 2",
            "fail 3",
            "send 3: s0![]",
            "recv 3: [0]",
            // This one established perhaps, and its event is on its way.
            "disconnect 4"
        ]
    );
    let marker = bowline_verbs::Completion {
        wr_id: super::wr_id(a, Tag::new(Tag::DRAIN, 1)),
        ..Default::default()
    };
    let done = done_of(&marker);
    assert_eq!((done.conn, done.tag.kind(), done.tag.index()), (a, Tag::DRAIN, 1));
    fake.calls.clear();
    binding.run_order(&mut fake, Order::Forget { conn: a }, &mut out);
    binding.run_order(&mut fake, Order::Forget { conn: conn(1, 6) }, &mut out);
    assert_eq!(fake.calls, ["forget 2", "destroy 1"], "another generation is another connection");
    assert_eq!(out, [a, conn(1, 6)].map(|conn| Input::Drained { conn }));
    out.clear();
    assert_eq!(binding.cm(PORT, CmEvent::Disconnected { id: CmId(2) }), None);
    binding.run_order(&mut fake, Order::Close { conn: a }, &mut out);
    assert_eq!(out, [Input::Drained { conn: a }], "there is nothing left of it");
    binding.run_order(&mut fake, Order::Forget { conn: b }, &mut out);
    binding.run_order(&mut fake, Order::DropRegion { region }, &mut out);
    assert_eq!(fake.calls[4..], ["dereg 5", "dereg 6", "dereg 7"]);
    assert!(binding.is_empty());
}

/// [RT-100]: a queue pair that cannot be stopped is removed at once, and its end is told.
#[test]
fn a_queue_pair_that_does_not_fail_is_removed() {
    let (mut binding, mut fake, [a, b], region) = pair();
    fake.stuck = Some(Qpn(1));
    let mut out = Vec::new();
    binding.run_order(&mut fake, Order::Close { conn: a }, &mut out);
    assert_eq!(fake.calls, ["fail 1", "forget 2", "destroy 1"]);
    assert_eq!(out, [Input::Drained { conn: a }, Input::Disconnected { conn: a }]);
    fake.calls.clear();
    for end in [a, b] {
        binding.run_order(&mut fake, Order::Forget { conn: end }, &mut out);
    }
    assert_eq!(fake.calls, ["forget 4", "destroy 3"], "removed once");
    binding.run_order(&mut fake, Order::DropRegion { region }, &mut out);
    assert!(binding.is_empty());
}

/// [RT-100]: queue pairs of a device that is gone are removed before anybody is told.
#[test]
fn connections_of_a_device_that_is_gone_are_removed() {
    let (mut binding, mut fake, [a, b], region) = pair();
    let mut out = Vec::new();
    binding.device_gone(&mut fake, PORT, &mut out);
    assert_eq!(fake.calls, ["forget 2", "destroy 1", "forget 4", "destroy 3"]);
    let failed = [a, b].map(|conn| Input::Failed { conn, errno: Errno::ENODEV });
    assert_eq!(out[..2], failed);
    for (conn, inputs) in [a, b].iter().zip(out[2..].chunks(2)) {
        assert_eq!(inputs, [Input::Drained { conn: *conn }, Input::Disconnected { conn: *conn }]);
    }
    binding.run_order(&mut fake, Order::DropRegion { region }, &mut out);
    assert!(binding.is_empty());
}

/// Nothing is begun on a device that is gone.
#[test]
fn a_device_that_is_gone_is_not_used() {
    for mut binding in [Binding::new(1), Binding::of_server(1)] {
        let (mut fake, mut out, a) = (Fake::default(), Vec::new(), conn(0, 0));
        binding.device_gone(&mut fake, PORT, &mut out);
        binding.run_order(&mut fake, connect(a), &mut out);
        assert_eq!(out, [Input::Failed { conn: a, errno: Errno::ENODEV }]);
        assert!(fake.calls.is_empty(), "{:?}", fake.calls);
        assert!(binding.is_empty());
    }
}

/// A registration that fails leaves nothing.
#[test]
fn a_region_is_registered_whole_or_not() {
    let (mut binding, mut fake, ..) = pair();
    let buffer = Arc::new(Buffer::new(8192).unwrap());
    let (access, granule) = (Access::LOCAL_WRITE | Access::REMOTE_ATOMIC, None);
    let (region, ports, path) = (RegionId(1), RegionPorts::One(PORT), None);
    let order = Order::AddRegion { region, buffer, access, granule, ports, path };
    let mut out = Vec::new();
    binding.run_order(&mut fake, order, &mut out);
    assert_eq!(out, [Input::Region { region, port: PORT, keys: Err(Errno::ENOMEM) }]);
    assert_eq!(fake.calls, ["reg 0+8192", "dereg 8"]);
}

/// [RT-64]: what a server's path has is in a domain of its own, which goes with the last of it;
/// what all are answered from is in each.
#[test]
fn paths_of_a_server_have_domains_of_their_own() {
    let (mut binding, mut fake, mut out) =
        (Binding::of_server(1), Fake::default(), Vec::<Input>::new());
    let buffer = || Arc::new(Buffer::new(4096).unwrap());
    let add = |region: u32, path| Order::AddRegion {
        region: RegionId(region),
        buffer: buffer(),
        access: Access::LOCAL_WRITE,
        granule: None,
        ports: RegionPorts::All,
        path,
    };
    let (a, b) = (conn(0, 0), conn(1, 7));
    binding.run_order(&mut fake, add(1, None), &mut out);
    assert!(fake.calls.is_empty(), "nobody is answered from there");
    binding.run_order(&mut fake, add(2, Some(a.path)), &mut out);
    binding.run_order(&mut fake, connect(a), &mut out);
    binding.run_order(&mut fake, connect(b), &mut out);
    binding.run_order(&mut fake, add(3, None), &mut out);
    assert_eq!(
        std::mem::take(&mut fake.calls),
        [
            "pd",
            "reg 0+4096 in 1",
            "reg 0+4096 in 1",
            "qp in 1",
            "connect 4",
            "pd",
            "reg 0+4096 in 6",
            "qp in 6",
            "connect 8",
            "reg 0+4096 in 1",
            "reg 0+4096 in 6",
        ]
    );
    assert_eq!(out.len(), 3, "all registered: {out:?}");
    let mut batch = Batch::default();
    for (to, region) in [(a, 1), (a, 2), (a, 3), (b, 1), (b, 2), (b, 3)] {
        let mem = MemRef { region: RegionId(region), offset: 0, len: 8 };
        batch.send(to, Tag(region), WrKind::Send, &[mem], false);
    }
    binding.run_batch(&mut fake, &mut batch, &mut out);
    // The second path's send from the first one's own memory has a key that is nobody's, or
    // another's: its device refuses it.
    assert_eq!(
        std::mem::take(&mut fake.calls),
        [
            "send 4: s1[(0, 8, 2)] s2[(0, 8, 3)] s3[(0, 8, 10)]",
            "send 8: s1[(0, 8, 7)] s2[(0, 8, 3)] s3[(0, 8, 11)]",
        ]
    );
    binding.run_order(&mut fake, Order::DropRegion { region: RegionId(2) }, &mut out);
    binding.run_order(&mut fake, Order::Forget { conn: a }, &mut out);
    assert_eq!(fake.calls[..3], ["dereg 3", "forget 5", "destroy 4"]);
    let mut left = fake.calls.split_off(3);
    left.sort();
    assert_eq!(left, ["dereg 10", "dereg 2", "free 1"]);
    fake.calls.clear();
    binding.run_order(&mut fake, Order::DropRegion { region: RegionId(1) }, &mut out);
    binding.run_order(&mut fake, Order::DropRegion { region: RegionId(3) }, &mut out);
    binding.run_order(&mut fake, Order::Forget { conn: b }, &mut out);
    assert_eq!(fake.calls, ["dereg 7", "dereg 11", "forget 9", "destroy 8", "free 6"]);
    assert!(binding.is_empty());
}
