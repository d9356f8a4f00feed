//! Queue pairs: making, changing, posting.

use core::ffi::c_int;
use core::mem::{size_of, zeroed};
use core::ptr::NonNull;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use bowline_verbs::{
    Access, AddressVector, Error, Feature, InvalidReason, Mtu, MwBind, QpAttr, QpAttrName, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, Remote, RequestPart, Resource, SendFlags, SendOp, SendWr,
    Sge,
};

use crate::context::{Gid, Pd};
use crate::cq::Cq;
use crate::error::{check, freed, last_errno, limit, post, system};
use crate::ffi::{
    AhAttr, IbvQp, IbvQpAttr, IbvQpCap, IbvRecvWr, IbvSendWr, MwBindInfo, QPT_RC, QPT_UC, QPT_UD,
    QpInitAttr, WrAtomic, WrBind, WrRdma, WrUd, WrUnion, mask,
};

/// Requests handed to the device at once.
const BATCH: usize = 16;
/// Hop limit of packets.
pub(crate) const HOPS: u8 = 64;

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: Qpn,
    pub(crate) pd: Arc<Pd>,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    /// Bytes that can be sent inline.
    pub(crate) inline: usize,
    pub(crate) kind: QpType,
    /// Most bytes of a datagram.
    mtu: usize,
    raw: NonNull<IbvQp>,
}

// SAFETY: libibverbs allows every call on it from any thread.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    pub(crate) fn new(
        init: &QpInit,
        pd: Arc<Pd>,
        send_cq: Arc<Cq>,
        recv_cq: Arc<Cq>,
        mtu: Mtu,
    ) -> Result<Self, Error> {
        let QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline } = init.cap;
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let none = core::ptr::null_mut();
        let mut attr = QpInitAttr {
            qp_context: none,
            send_cq: send_cq.sends(),
            recv_cq: recv_cq.receives(),
            srq: none,
            cap: IbvQpCap {
                max_send_wr: size(max_send_wr),
                max_recv_wr: size(max_recv_wr),
                max_send_sge: size(max_send_sge),
                max_recv_sge: size(max_recv_sge),
                max_inline_data: size(max_inline),
            },
            qp_type: match init.qp_type {
                QpType::Rc => QPT_RC,
                QpType::Uc => QPT_UC,
                QpType::Ud => QPT_UD,
            },
            sq_sig_all: init.sq_sig_all.into(),
        };
        // SAFETY: the domain and the queues live at least as long as the queue pair, which holds
        // them.
        let raw = unsafe { (pd.context.libs.verbs.create_qp)(pd.raw(), &raw mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| match last_errno() {
            libc::EINVAL => Error::Limit(Resource::QpSize),
            errno => limit(Resource::QueuePairs, errno),
        })?;
        // SAFETY: just made; the number does not change.
        let qpn = Qpn(unsafe { raw.as_ref() }.qp_num);
        let inline = attr.cap.max_inline_data as usize;
        let (kind, mtu) = (init.qp_type, mtu.bytes());
        Ok(Self { qpn, pd, send_cq, recv_cq, inline, kind, mtu, raw })
    }

    pub(crate) const fn raw(&self) -> *mut IbvQp {
        self.raw.as_ptr()
    }

    /// Changes it as the connection manager or [`attributes`] say.
    pub(crate) fn modify(&self, attr: &IbvQpAttr, mask: c_int) -> Result<(), Error> {
        let mut attr = *attr;
        let modify = self.pd.context.libs.verbs.modify_qp;
        // SAFETY: the queue pair lives as long as `self`.
        let result = unsafe { modify(self.raw.as_ptr(), &raw mut attr, mask) };
        check(result).map_err(|errno| match errno {
            libc::EINVAL => Error::Invalid(InvalidReason::AttrRefused),
            errno => system("changing a queue pair", errno),
        })
    }

    /// Takes it to a state that needs nothing else.
    pub(crate) fn go(&self, state: QpState) -> Result<(), Error> {
        let attr = IbvQpAttr { qp_state: state as u32, ..IbvQpAttr::default() };
        self.modify(&attr, mask::STATE)
    }

    /// Its present attributes.
    pub(crate) fn query(&self) -> Result<IbvQpAttr, Error> {
        let mut attr = IbvQpAttr::default();
        // SAFETY: numbers and pointers that may be null.
        let mut init: QpInitAttr = unsafe { zeroed() };
        let query = self.pd.context.libs.verbs.query_qp;
        let all = mask::STATE
            | mask::ACCESS
            | mask::QKEY
            | mask::PORT
            | mask::PKEY_INDEX
            | mask::AV
            | mask::PATH_MTU
            | mask::TIMEOUT
            | mask::RETRY_CNT
            | mask::RNR_RETRY
            | mask::RQ_PSN
            | mask::SQ_PSN
            | mask::MAX_RD_ATOMIC
            | mask::MAX_DEST_RD_ATOMIC
            | mask::MIN_RNR_TIMER
            | mask::DEST_QPN;
        // SAFETY: the queue pair lives as long as `self`; both may be written to.
        let result = unsafe { query(self.raw.as_ptr(), &raw mut attr, all, &raw mut init) };
        check(result).map_err(|errno| system("asking about a queue pair", errno))?;
        Ok(attr)
    }

    /// Its state.
    pub(crate) fn state(&self) -> Result<QpState, Error> {
        self.query().map(|attr| state(attr.qp_state))
    }

    /// Posts send requests; on an error tells how many were accepted. `binds` knows windows and
    /// regions, which stay as long as the call takes and are this call's alone.
    pub(crate) fn send(&self, wrs: &[SendWr<'_>], binds: &Binds<'_>) -> Result<(), (usize, Error)> {
        let is_bind = |wr: &SendWr<'_>| matches!(wr.op, SendOp::BindMw { .. });
        let mut done = 0;
        // The library looks at the key a window has when the next one is posted: so a binding ends
        // a batch.
        for part in wrs.split_inclusive(is_bind).flat_map(|part| part.chunks(BATCH)) {
            self.send_batch(part, binds).map_err(|(at, error)| (done + at, error))?;
            done += part.len();
            if let Some(SendWr { op: SendOp::BindMw { key, to }, .. }) = part.last()
                && let Ok(bound) = binds(*key, to)
            {
                // SAFETY: the window is there as long as the call takes, and nobody else looks at
                // it.
                unsafe { (*bound.mw).rkey = *key };
            }
        }
        Ok(())
    }

    fn send_batch(&self, wrs: &[SendWr<'_>], binds: &Binds<'_>) -> Result<(), (usize, Error)> {
        let mut inlines = [Sge::default(); BATCH];
        let mut list = [EMPTY_SEND; BATCH];
        let mut good = 0;
        let mut bad = None;
        for ((wr, inline), to) in wrs.iter().zip(&mut inlines).zip(&mut list) {
            match self.translate(wr, inline, binds) {
                Ok(request) => *to = request,
                Err(error) => {
                    bad = Some(error);
                    break;
                }
            }
            good += 1;
        }
        // Requests before an invalid one are posted, as verbs specify.
        let first = list.as_mut_ptr();
        link(first, good, |at, next| {
            // SAFETY: `link` stays within the first `good` elements of `list`.
            unsafe { (*at).next = next };
        });
        if good > 0 {
            let mut refused = core::ptr::null_mut();
            // SAFETY: the context is open as long as `self` lives.
            let post_send = unsafe { &*self.pd.context.raw() }.ops.post_send;
            // SAFETY: the requests are linked and end with null; they, their gather lists and their
            // inline bytes are only read, before the call returns. Registered memory is the
            // device's matter.
            let result = unsafe { post_send(self.raw.as_ptr(), first, &raw mut refused) };
            accepted(result, refused as usize, first as usize, size_of::<IbvSendWr>(), good)?;
        }
        bad.map_or(Ok(()), |error| Err((good, error)))
    }

    fn translate(
        &self,
        wr: &SendWr<'_>,
        inline: &mut Sge,
        binds: &Binds<'_>,
    ) -> Result<IbvSendWr, Error> {
        self.check(wr)?;
        let mut out = IbvSendWr { wr_id: wr.id, send_flags: wr.flags.bits(), ..EMPTY_SEND };
        (out.sg_list, out.num_sge) = if wr.flags.contains(SendFlags::INLINE) {
            RequestPart::Inline.check(wr.inline.len() as u64, self.inline as u64)?;
            let len = u32::try_from(wr.inline.len()).unwrap_or(u32::MAX);
            *inline = Sge { addr: wr.inline.as_ptr() as u64, len, lkey: 0 };
            (core::ptr::from_ref(inline), c_int::from(len > 0))
        } else {
            (wr.sges.as_ptr(), c_int::try_from(wr.sges.len()).unwrap_or(c_int::MAX))
        };
        let rdma = |to: Remote| WrUnion { rdma: WrRdma { remote_addr: to.addr, rkey: to.rkey } };
        let atomic = |to: Remote, compare_add, swap| WrUnion {
            atomic: WrAtomic { remote_addr: to.addr, compare_add, swap, rkey: to.rkey },
        };
        match &wr.op {
            SendOp::Send => out.opcode = 2,
            SendOp::SendImm(imm) => (out.opcode, out.imm_or_key) = (3, imm.to_be()),
            SendOp::SendInv(key) => (out.opcode, out.imm_or_key) = (9, *key),
            SendOp::Write(to) => (out.opcode, out.wr) = (0, rdma(*to)),
            SendOp::WriteImm(to, imm) => {
                (out.opcode, out.wr, out.imm_or_key) = (1, rdma(*to), imm.to_be());
            }
            SendOp::Read(from) => (out.opcode, out.wr) = (4, rdma(*from)),
            SendOp::CompareSwap { remote, compare, swap } => {
                (out.opcode, out.wr) = (5, atomic(*remote, *compare, *swap));
            }
            SendOp::FetchAdd { remote, add } => {
                (out.opcode, out.wr) = (6, atomic(*remote, *add, 0));
            }
            SendOp::LocalInv(key) => (out.opcode, out.imm_or_key) = (7, *key),
            // [VERBS-1]
            SendOp::RegMr { .. } => return Err(Error::NotSupported(Feature::FastRegistration)),
            SendOp::Flush { .. } | SendOp::AtomicWrite(_) => {
                return Err(Error::NotSupported(Feature::Flush));
            }
            SendOp::BindMw { key, to } => {
                (out.opcode, out.bind) = (8, binds(*key, to)?);
                (out.sg_list, out.num_sge) = (core::ptr::null(), 0);
            }
            SendOp::Datagram(to, imm) => {
                out.opcode = 2;
                if let Some(imm) = imm {
                    (out.opcode, out.imm_or_key) = (3, imm.to_be());
                }
                let ah = self.pd.ah(to.addr, to.from)?;
                out.wr.ud = WrUd { ah, remote_qpn: to.qpn.0, remote_qkey: to.qkey };
            }
        }
        Ok(out)
    }

    /// What devices do not refuse, or not all in the same way.
    fn check(&self, wr: &SendWr<'_>) -> Result<(), Error> {
        let datagram = matches!(wr.op, SendOp::Datagram(..));
        match self.kind {
            QpType::Rc if datagram => {
                Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Rc)))
            }
            QpType::Uc if datagram => {
                Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Uc)))
            }
            QpType::Ud if !datagram => {
                Err(Error::Invalid(InvalidReason::RequestOfOtherType(QpType::Ud)))
            }
            QpType::Ud => {
                let len = match wr.flags.contains(SendFlags::INLINE) {
                    true => wr.inline.len(),
                    false => wr.sges.iter().map(|sge| sge.len as usize).sum(),
                };
                RequestPart::Datagram.check(len as u64, self.mtu as u64)
            }
            QpType::Rc | QpType::Uc => Ok(()),
        }
    }

    /// Posts receive requests; on an error tells how many were accepted.
    pub(crate) fn receive(&self, wrs: &[RecvWr<'_>]) -> Result<(), (usize, Error)> {
        for (n, part) in wrs.chunks(BATCH).enumerate() {
            let mut list = [EMPTY_RECV; BATCH];
            for (wr, to) in part.iter().zip(&mut list) {
                to.wr_id = wr.id;
                to.sg_list = wr.sges.as_ptr();
                to.num_sge = c_int::try_from(wr.sges.len()).unwrap_or(c_int::MAX);
            }
            let first = list.as_mut_ptr();
            link(first, part.len(), |at, next| {
                // SAFETY: `link` stays within the first `part.len()` elements of `list`.
                unsafe { (*at).next = next };
            });
            let mut refused = core::ptr::null_mut();
            // SAFETY: the context is open as long as `self` lives.
            let post_recv = unsafe { &*self.pd.context.raw() }.ops.post_recv;
            // SAFETY: the requests are linked and end with null; they and their scatter lists are
            // only read, before the call returns.
            let result = unsafe { post_recv(self.raw.as_ptr(), first, &raw mut refused) };
            let size = size_of::<IbvRecvWr>();
            accepted(result, refused as usize, first as usize, size, part.len())
                .map_err(|(at, error)| (n * BATCH + at, error))?;
        }
        Ok(())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: made by `new`; its asynchronous events are acknowledged at once by the thread
        // that takes them.
        freed(
            unsafe { (self.pd.context.libs.verbs.destroy_qp)(self.raw.as_ptr()) },
            "a queue pair",
        );
    }
}

/// Finds what a window is to be bound to, by the new key and the binding.
pub(crate) type Binds<'a> = dyn Fn(u32, &MwBind) -> Result<WrBind, Error> + 'a;

const EMPTY_SEND: IbvSendWr = IbvSendWr {
    wr_id: 0,
    next: core::ptr::null_mut(),
    sg_list: core::ptr::null(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_or_key: 0,
    wr: WrUnion { atomic: WrAtomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
    remote_srqn: 0,
    bind: WrBind {
        mw: core::ptr::null_mut(),
        rkey: 0,
        info: MwBindInfo { mr: core::ptr::null_mut(), addr: 0, length: 0, access: 0 },
    },
};

const EMPTY_RECV: IbvRecvWr =
    IbvRecvWr { wr_id: 0, next: core::ptr::null_mut(), sg_list: core::ptr::null(), num_sge: 0 };

/// Makes a list of the first `count` elements of an array: each but the last gets its next.
fn link<T>(first: *mut T, count: usize, mut set: impl FnMut(*mut T, *mut T)) {
    for n in 1..count {
        set(first.wrapping_add(n - 1), first.wrapping_add(n));
    }
}

/// How many requests of a list were accepted when posting said `result` and pointed at one.
fn accepted(
    result: i32,
    refused: usize,
    first: usize,
    size: usize,
    count: usize,
) -> Result<(), (usize, Error)> {
    check(result).map_err(|errno| {
        let at = refused.checked_sub(first).map_or(0, |bytes| bytes / size);
        (at.min(count.saturating_sub(1)), post(errno))
    })
}

/// A state of the kernel's number.
fn state(number: u32) -> QpState {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
    all.into_iter().find(|state| *state as u32 == number).unwrap_or(Err)
}

pub(crate) fn gid(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    }
}

/// Attributes in the terms of libibverbs, and which they are.
pub(crate) fn attributes(attr: &QpAttr, gids: &[Gid]) -> Result<(IbvQpAttr, c_int), Error> {
    let mut out = IbvQpAttr::default();
    let mut what = 0;
    macro_rules! copy {
        ($($field:ident => $to:ident, $mask:ident;)+) => {
            $(if let Some(value) = attr.$field {
                out.$to = value;
                what |= mask::$mask;
            })+
        };
    }
    copy! {
        qkey => qkey, QKEY;
        rq_psn => rq_psn, RQ_PSN;
        sq_psn => sq_psn, SQ_PSN;
        max_rd_atomic => max_rd_atomic, MAX_RD_ATOMIC;
        max_dest_rd_atomic => max_dest_rd_atomic, MAX_DEST_RD_ATOMIC;
        min_rnr_timer => min_rnr_timer, MIN_RNR_TIMER;
        timeout => timeout, TIMEOUT;
        retry_cnt => retry_cnt, RETRY_CNT;
        rnr_retry => rnr_retry, RNR_RETRY;
    }
    let port = gids.first().map_or(1, |gid| gid.port);
    if let Some(state) = attr.state {
        out.qp_state = state as u32;
        what |= mask::STATE;
        if state == QpState::Init {
            // Always the same here, so that programs are not asked [QP-1].
            out.port_num = port;
            what |= mask::PORT | mask::PKEY_INDEX;
        }
    }
    if let Some(state) = attr.cur_state {
        out.cur_qp_state = state as u32;
        what |= mask::CUR_STATE;
    }
    if let Some(port) = attr.port {
        out.port_num = port;
        what |= mask::PORT;
    }
    if let Some(index) = attr.pkey_index {
        out.pkey_index = index;
        what |= mask::PKEY_INDEX;
    }
    if let Some(notify) = attr.sqd_notify {
        out.en_sqd_async_notify = notify.into();
        what |= mask::SQD_NOTIFY;
    }
    if attr.sq_draining.is_some() {
        return Err(Error::Invalid(InvalidReason::AttrNotAllowed(QpAttrName::SqDraining)));
    }
    if let Some(access) = attr.access {
        out.qp_access_flags = access.bits();
        what |= mask::ACCESS;
    }
    if let Some(mtu) = attr.path_mtu {
        out.path_mtu = mtu.code().into();
        what |= mask::PATH_MTU;
    }
    if let Some(qpn) = attr.dest_qpn {
        out.dest_qp_num = qpn.0;
        what |= mask::DEST_QPN;
    }
    if let Some(AddressVector { local, remote, flow_label, tos }) = attr.av {
        let own = gids.iter().find(|gid| gid.addr == local).ok_or(Error::AddrNotAvailable)?;
        out.ah_attr = AhAttr {
            dgid: gid(remote),
            flow_label,
            sgid_index: own.index,
            hop_limit: HOPS,
            traffic_class: tos,
            is_global: 1,
            port_num: own.port,
            ..AhAttr::default()
        };
        what |= mask::AV;
    }
    Ok((out, what))
}

/// What libibverbs tells, in our terms.
pub(crate) fn present(attr: &IbvQpAttr, gids: &[Gid], kind: QpType) -> (QpState, QpAttr) {
    let state = state(attr.qp_state);
    let ah = &attr.ah_attr;
    let own = gids.iter().find(|gid| gid.index == ah.sgid_index && gid.port == ah.port_num);
    let av = own.filter(|_| ah.is_global != 0).map(|own| AddressVector {
        local: own.addr,
        remote: Ipv6Addr::from(ah.dgid).to_canonical(),
        flow_label: ah.flow_label,
        tos: ah.traffic_class,
    });
    let attr = QpAttr {
        state: Some(state),
        access: Some(Access::from_bits_truncate(attr.qp_access_flags)),
        qkey: (kind == QpType::Ud).then_some(attr.qkey),
        cur_state: None,
        port: Some(attr.port_num),
        pkey_index: Some(attr.pkey_index),
        give_up: None,
        sqd_notify: None,
        sq_draining: (state == QpState::Sqd).then_some(attr.sq_draining != 0),
        av,
        path_mtu: u8::try_from(attr.path_mtu).ok().and_then(Mtu::from_code),
        dest_qpn: Some(Qpn(attr.dest_qp_num)),
        rq_psn: Some(attr.rq_psn),
        sq_psn: Some(attr.sq_psn),
        max_rd_atomic: Some(attr.max_rd_atomic),
        max_dest_rd_atomic: Some(attr.max_dest_rd_atomic),
        min_rnr_timer: Some(attr.min_rnr_timer),
        timeout: Some(attr.timeout),
        retry_cnt: Some(attr.retry_cnt),
        rnr_retry: Some(attr.rnr_retry),
    };
    (state, attr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gids() -> [Gid; 2] {
        [
            Gid { addr: "fd99::b".parse().unwrap(), index: 1, port: 1 },
            Gid { addr: "10.99.0.11".parse().unwrap(), index: 3, port: 1 },
        ]
    }

    // tests [QP-1]
    #[test]
    fn attributes_come_back_as_they_were_given() {
        let attr = QpAttr {
            state: Some(QpState::Rtr),
            access: Some(Access::REMOTE_READ | Access::LOCAL_WRITE),
            av: Some(AddressVector {
                local: "10.99.0.11".parse().unwrap(),
                remote: "10.99.0.1".parse().unwrap(),
                flow_label: 77,
                tos: 5,
            }),
            path_mtu: Some(Mtu::M4096),
            dest_qpn: Some(Qpn(17)),
            rq_psn: Some(1),
            sq_psn: Some(2),
            max_rd_atomic: Some(3),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(5),
            timeout: Some(6),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            qkey: None,
            port: Some(1),
            pkey_index: Some(0),
            cur_state: None,
            give_up: None,
            sqd_notify: None,
            sq_draining: None,
        };
        let (out, what) = attributes(&attr, &gids()).unwrap();
        assert_eq!(out.ah_attr.sgid_index, 3);
        assert_eq!(what & mask::QKEY, 0);
        assert_eq!(present(&out, &gids(), QpType::Rc), (QpState::Rtr, attr));
        let other = QpAttr {
            state: Some(QpState::Sqd),
            cur_state: Some(QpState::Rts),
            sqd_notify: Some(true),
            qkey: Some(0x77),
            ..QpAttr::default()
        };
        let (mut out, what) = attributes(&other, &gids()).unwrap();
        let wanted = mask::STATE | mask::CUR_STATE | mask::SQD_NOTIFY | mask::QKEY;
        assert_eq!((what, out.cur_qp_state, out.en_sqd_async_notify), (wanted, 3, 1));
        out.sq_draining = 1;
        let (state, shown) = present(&out, &gids(), QpType::Ud);
        assert_eq!((state, shown.sq_draining, shown.qkey), (QpState::Sqd, Some(true), Some(0x77)));
        let shown = QpAttr { sq_draining: Some(true), ..QpAttr::default() };
        assert!(attributes(&shown, &gids()).is_err());
        let elsewhere = QpAttr {
            av: attr.av.map(|av| AddressVector { local: "10.0.0.9".parse().unwrap(), ..av }),
            ..attr
        };
        assert_eq!(attributes(&elsewhere, &gids()).unwrap_err(), Error::AddrNotAvailable);
    }

    #[test]
    fn only_what_is_given_is_changed() {
        let (_, what) = attributes(&QpAttr::default(), &gids()).unwrap();
        assert_eq!(what, 0);
        let init = QpAttr { state: Some(QpState::Init), ..QpAttr::default() };
        let (_, what) = attributes(&init, &gids()).unwrap();
        assert_eq!(what, mask::STATE | mask::PORT | mask::PKEY_INDEX);
    }

    #[test]
    fn the_refused_request_is_found() {
        let size = size_of::<IbvSendWr>();
        assert_eq!(accepted(0, 0, 1000, size, 4), Ok(()));
        let error = accepted(libc::ENOMEM, 1000 + 2 * size, 1000, size, 4);
        assert_eq!(error, Err((2, Error::QueueFull)));
        // A driver that says nothing has taken nothing.
        assert_eq!(accepted(libc::ENOMEM, 0, 1000, size, 4), Err((0, Error::QueueFull)));
    }
}
