//! Tests that the declarations are those of the installed C headers.

use bowline_testkit::headers::compiled;
use core::mem::{align_of, offset_of, size_of};

use super::{
    AhAttr, CAP_WINDOWS, CompChannel, ContextOps, EventChannel, GID_ROCE_V2, GidEntry,
    IbvAsyncEvent, IbvContext, IbvCq, IbvDeviceAttr, IbvMr, IbvMw, IbvMwBind, IbvPd, IbvQp,
    IbvQpAttr, IbvQpCap, IbvRecvWr, IbvSendWr, MwBindInfo, OPTION_ID, OPTION_ID_TOS, PORT_ACTIVE,
    PS_TCP, PortAttr, QPT_RC, QPT_UD, QpInitAttr, RdmaConnParam, RdmaEvent, RdmaId, WC_GRH,
    WC_WITH_IMM, WC_WITH_INV, Wc, WrAtomic, WrBind, WrRdma, WrUd, mask,
};

// tests [VERBS-2]
#[test]
fn declarations_are_those_of_the_headers() {
    let mut wanted: Vec<(String, usize)> = Vec::new();
    macro_rules! fields {
        ($($ours:ty = $theirs:literal: $($field:ident $(= $name:literal)?),+;)+) => {
            $($({
                #[allow(unused_assignments, unused_mut)]
                let mut name = stringify!($field);
                $(name = $name;)?
                wanted.push((format!("offsetof(struct {}, {name})", $theirs), offset_of!($ours, $field)));
            })+)+
        };
    }
    macro_rules! sizes {
        ($($ours:ty = $theirs:literal),+) => {
            $({
                wanted.push((format!("sizeof(struct {})", $theirs), size_of::<$ours>()));
                wanted.push((format!("_Alignof(struct {})", $theirs), align_of::<$ours>()));
            })+
        };
    }
    macro_rules! numbers {
        ($($ours:expr => $theirs:literal),+) => {
            $(wanted.push(($theirs.to_owned(), usize::try_from($ours).unwrap()));)+
        };
    }
    sizes! {
        ContextOps = "ibv_context_ops", IbvDeviceAttr = "ibv_device_attr", PortAttr = "ibv_port_attr",
        GidEntry = "ibv_gid_entry", IbvPd = "ibv_pd", IbvMr = "ibv_mr", IbvMw = "ibv_mw",
        MwBindInfo = "ibv_mw_bind_info", IbvMwBind = "ibv_mw_bind", IbvQpCap = "ibv_qp_cap",
        QpInitAttr = "ibv_qp_init_attr", AhAttr = "ibv_ah_attr", IbvQpAttr = "ibv_qp_attr",
        IbvSendWr = "ibv_send_wr", IbvRecvWr = "ibv_recv_wr", Wc = "ibv_wc",
        bowline_verbs::Sge = "ibv_sge", IbvAsyncEvent = "ibv_async_event",
        EventChannel = "rdma_event_channel", RdmaConnParam = "rdma_conn_param"
    }
    fields! {
        ContextOps = "ibv_context_ops": alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq, post_send, post_recv;
        IbvContext = "ibv_context": device, ops, cmd_fd, async_fd;
        IbvDeviceAttr = "ibv_device_attr": node_guid, max_qp, max_qp_wr, max_sge, max_cq, max_cqe,
            max_mr, max_qp_rd_atom, max_qp_init_rd_atom, max_mw, max_pkeys, phys_port_cnt;
        PortAttr = "ibv_port_attr": state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz;
        GidEntry = "ibv_gid_entry": gid, gid_index, port_num, gid_type, ndev_ifindex;
        IbvMr = "ibv_mr": lkey, rkey;
        IbvMw = "ibv_mw": context, pd, rkey, handle, kind = "type";
        MwBindInfo = "ibv_mw_bind_info": mr, addr, length, access = "mw_access_flags";
        IbvMwBind = "ibv_mw_bind": wr_id, send_flags, bind_info;
        CompChannel = "ibv_comp_channel": fd;
        IbvCq = "ibv_cq": channel, cq_context, cqe;
        IbvQp = "ibv_qp": send_cq, recv_cq, handle, qp_num;
        IbvQpCap = "ibv_qp_cap": max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
        QpInitAttr = "ibv_qp_init_attr": send_cq, recv_cq, srq, cap, qp_type, sq_sig_all;
        AhAttr = "ibv_ah_attr": dgid = "grh.dgid", flow_label = "grh.flow_label",
            sgid_index = "grh.sgid_index", hop_limit = "grh.hop_limit",
            traffic_class = "grh.traffic_class", dlid, is_global, port_num;
        IbvQpAttr = "ibv_qp_attr": cur_qp_state, en_sqd_async_notify, sq_draining, qp_state, path_mtu, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit;
        IbvSendWr = "ibv_send_wr": wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_or_key = "imm_data", wr;
        IbvRecvWr = "ibv_recv_wr": wr_id, next, sg_list, num_sge;
        Wc = "ibv_wc": wr_id, status, opcode, byte_len, imm_or_key = "imm_data", qp_num, src_qp,
            wc_flags, pkey_index, dlid_path_bits;
        bowline_verbs::Sge = "ibv_sge": addr, len = "length", lkey;
        IbvAsyncEvent = "ibv_async_event": element, event_type;
        EventChannel = "rdma_event_channel": fd;
        RdmaId = "rdma_cm_id": verbs, channel, context, qp, src_addr = "route.addr.src_storage",
            dst_addr = "route.addr.dst_storage";
        RdmaConnParam = "rdma_conn_param": private_data, private_data_len, responder_resources,
            initiator_depth, flow_control, retry_count, rnr_retry_count, srq, qp_num;
        RdmaEvent = "rdma_cm_event": id, listen_id, event, status, conn = "param.conn";
    }
    let (wr, bind) = (offset_of!(IbvSendWr, wr), offset_of!(IbvSendWr, bind));
    let send = "struct ibv_send_wr";
    for (field, at) in [
        ("wr.rdma.remote_addr", offset_of!(WrRdma, remote_addr)),
        ("wr.rdma.rkey", offset_of!(WrRdma, rkey)),
        ("wr.atomic.compare_add", offset_of!(WrAtomic, compare_add)),
        ("wr.atomic.swap", offset_of!(WrAtomic, swap)),
        ("wr.atomic.rkey", offset_of!(WrAtomic, rkey)),
    ] {
        wanted.push((format!("offsetof({send}, {field})"), wr + at));
    }
    for (field, at) in [
        ("wr.ud.ah", wr + offset_of!(WrUd, ah)),
        ("wr.ud.remote_qpn", wr + offset_of!(WrUd, remote_qpn)),
        ("wr.ud.remote_qkey", wr + offset_of!(WrUd, remote_qkey)),
        ("bind_mw.mw", bind + offset_of!(WrBind, mw)),
        ("bind_mw.rkey", bind + offset_of!(WrBind, rkey)),
        ("bind_mw.bind_info", bind + offset_of!(WrBind, info)),
    ] {
        wanted.push((format!("offsetof({send}, {field})"), at));
    }
    numbers! {
        PORT_ACTIVE => "IBV_PORT_ACTIVE", GID_ROCE_V2 => "IBV_GID_TYPE_ROCE_V2", QPT_RC => "IBV_QPT_RC",
        QPT_UD => "IBV_QPT_UD", CAP_WINDOWS[0] => "IBV_DEVICE_MEM_WINDOW",
        CAP_WINDOWS[1] => "IBV_DEVICE_MEM_WINDOW_TYPE_2A",
        CAP_WINDOWS[2] => "IBV_DEVICE_MEM_WINDOW_TYPE_2B",
        mask::CUR_STATE => "IBV_QP_CUR_STATE", mask::SQD_NOTIFY => "IBV_QP_EN_SQD_ASYNC_NOTIFY",
        WC_GRH => "IBV_WC_GRH", WC_WITH_IMM => "IBV_WC_WITH_IMM", WC_WITH_INV => "IBV_WC_WITH_INV",
        PS_TCP => "RDMA_PS_TCP", OPTION_ID => "RDMA_OPTION_ID",
        OPTION_ID_TOS => "RDMA_OPTION_ID_TOS", mask::STATE => "IBV_QP_STATE",
        mask::ACCESS => "IBV_QP_ACCESS_FLAGS", mask::PKEY_INDEX => "IBV_QP_PKEY_INDEX",
        mask::PORT => "IBV_QP_PORT", mask::QKEY => "IBV_QP_QKEY", mask::AV => "IBV_QP_AV",
        mask::PATH_MTU => "IBV_QP_PATH_MTU", mask::TIMEOUT => "IBV_QP_TIMEOUT",
        mask::RETRY_CNT => "IBV_QP_RETRY_CNT", mask::RNR_RETRY => "IBV_QP_RNR_RETRY",
        mask::RQ_PSN => "IBV_QP_RQ_PSN", mask::MAX_RD_ATOMIC => "IBV_QP_MAX_QP_RD_ATOMIC",
        mask::MIN_RNR_TIMER => "IBV_QP_MIN_RNR_TIMER", mask::SQ_PSN => "IBV_QP_SQ_PSN",
        mask::MAX_DEST_RD_ATOMIC => "IBV_QP_MAX_DEST_RD_ATOMIC", mask::DEST_QPN => "IBV_QP_DEST_QPN",
        // Written as numbers in the modules.
        0 => "IBV_WR_RDMA_WRITE", 1 => "IBV_WR_RDMA_WRITE_WITH_IMM", 2 => "IBV_WR_SEND",
        3 => "IBV_WR_SEND_WITH_IMM", 4 => "IBV_WR_RDMA_READ", 5 => "IBV_WR_ATOMIC_CMP_AND_SWP",
        6 => "IBV_WR_ATOMIC_FETCH_AND_ADD", 7 => "IBV_WR_LOCAL_INV", 8 => "IBV_WR_BIND_MW", 9 => "IBV_WR_SEND_WITH_INV",
        0x80 => "IBV_WC_RECV", 0x81 => "IBV_WC_RECV_RDMA_WITH_IMM", 6 => "IBV_WC_LOCAL_INV", 5 => "IBV_WC_BIND_MW",
        0 => "IBV_EVENT_CQ_ERR", 1 => "IBV_EVENT_QP_FATAL", 3 => "IBV_EVENT_QP_ACCESS_ERR",
        4 => "IBV_EVENT_COMM_EST", 5 => "IBV_EVENT_SQ_DRAINED", 8 => "IBV_EVENT_DEVICE_FATAL",
        5 => "RDMA_CM_EVENT_CONNECT_RESPONSE", 15 => "RDMA_CM_EVENT_TIMEWAIT_EXIT",
        bowline_verbs::QpState::Err as u8 => "IBV_QPS_ERR",
        bowline_verbs::MwType::Type1 as u8 => "IBV_MW_TYPE_1",
        bowline_verbs::MwType::Type2 as u8 => "IBV_MW_TYPE_2",
        bowline_verbs::Access::MW_BIND.bits() => "IBV_ACCESS_MW_BIND",
        bowline_verbs::Access::ZERO_BASED.bits() => "IBV_ACCESS_ZERO_BASED",
        bowline_verbs::SendFlags::INLINE.bits() => "IBV_SEND_INLINE"
    }
    let expressions: Vec<String> =
        wanted.iter().map(|(expression, _)| expression.clone()).collect();
    let Some(theirs) = compiled("rdma/rdma_cma.h", "librdmacm-dev", &expressions) else {
        return;
    };
    assert_eq!(theirs.len(), wanted.len());
    let differ: Vec<String> = wanted
        .iter()
        .zip(theirs)
        .filter(|((_, ours), theirs)| ours != theirs)
        .map(|((expression, ours), theirs)| format!("{expression} is {theirs}, not {ours}"))
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}
