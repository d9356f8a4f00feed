//! The structures are those of the installed headers, and the names and versions those of the
//! installed library.

use core::mem::{align_of, offset_of, size_of};

use bowline_testkit::headers::compiled;

use super::*;

const HEADER: &str = "infiniband/verbs.h";
const PACKAGE: &str = "libibverbs-dev";

#[test]
fn structures_are_those_of_the_headers() {
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
        ($($ours:ty = $theirs:literal,)+) => {
            $({
                wanted.push((format!("sizeof(struct {})", $theirs), size_of::<$ours>()));
                wanted.push((format!("_Alignof(struct {})", $theirs), align_of::<$ours>()));
            })+
        };
    }
    // Objects, which end with what programs do not know.
    macro_rules! objects {
        ($($ours:ty = $theirs:literal,)+) => {
            $({
                let at = offset_of!($ours, own).next_multiple_of(align_of::<usize>());
                wanted.push((format!("(sizeof(struct {}) + 7) / 8 * 8", $theirs), at));
            })+
        };
    }
    sizes! {
        Device = "ibv_device",
        ContextOps = "ibv_context_ops",
        DeviceAttr = "ibv_device_attr",
        DeviceAttrEx = "ibv_device_attr_ex",
        RssCaps = "ibv_rss_caps",
        PortAttr = "ibv_port_attr",
        GidEntry = "ibv_gid_entry",
        Td = "ibv_td",
        ParentDomainInitAttr<'_> = "ibv_parent_domain_init_attr",
        MwBindInfo<'_> = "ibv_mw_bind_info",
        MwBind<'_> = "ibv_mw_bind",
        GlobalRoute = "ibv_global_route",
        AhAttr = "ibv_ah_attr",
        CqInitAttrEx<'_> = "ibv_cq_init_attr_ex",
        Wc = "ibv_wc",
        SrqAttr = "ibv_srq_attr",
        SrqInitAttr = "ibv_srq_init_attr",
        SrqInitAttrEx = "ibv_srq_init_attr_ex",
        DataBuf = "ibv_data_buf",
        QpCap = "ibv_qp_cap",
        QpInitAttr<'_> = "ibv_qp_init_attr",
        QpInitAttrEx<'_> = "ibv_qp_init_attr_ex",
        RxHashConf = "ibv_rx_hash_conf",
        QpAttr = "ibv_qp_attr",
        SendWr<'_> = "ibv_send_wr",
        RecvWr<'_> = "ibv_recv_wr",
        AsyncEvent = "ibv_async_event",
        ValuesEx = "ibv_values_ex",
    }
    objects! {
        Context = "ibv_context",
        Pd = "ibv_pd",
        Mr = "ibv_mr",
        Mw = "ibv_mw",
        Ah = "ibv_ah",
        CompChannel = "ibv_comp_channel",
        Cq = "ibv_cq_ex",
        Srq = "ibv_srq",
        Qp = "ibv_qp_ex",
    }
    fields! {
        Device = "ibv_device": ops = "_ops", node_type, transport_type, name, dev_name, dev_path,
            ibdev_path;
        ContextOps = "ibv_context_ops": query_to_dereg = "_compat_query_device", alloc_mw,
            bind_mw, dealloc_mw, create_cq = "_compat_create_cq", poll_cq, req_notify_cq,
            cq_event_to_destroy_srq = "_compat_cq_event", post_srq_recv,
            create_to_destroy_qp = "_compat_create_qp", post_send, post_recv,
            create_ah_to_async_event = "_compat_create_ah";
        Context = "ibv_context": device, ops, cmd_fd, async_fd, num_comp_vectors, mutex,
            abi_compat;
        VerbsContext = "verbs_context": query_port, advise_mr,
            null_mr_to_flow_action = "alloc_null_mr", modify_qp_rate_limit, alloc_parent_domain,
            dealloc_td, alloc_td, modify_cq, srq_ops_to_create_wq = "post_srq_ops",
            query_rt_values, create_cq_ex, private = "priv", query_device_ex,
            flows = "ibv_destroy_flow", open_qp, create_qp_ex, get_srq_num, create_srq_ex,
            open_xrcd, close_xrcd, placeholder = "_ABI_placeholder3", size = "sz", context;
        DeviceAttr = "ibv_device_attr": fw_ver, node_guid, sys_image_guid, max_mr_size,
            page_size_cap, vendor_id, vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags,
            max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom,
            max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee,
            max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr,
            max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt;
        DeviceAttrEx = "ibv_device_attr_ex": orig_attr, comp_mask,
            odp_general_caps = "odp_caps.general_caps",
            odp_transport_caps = "odp_caps.per_transport_caps", completion_timestamp_mask,
            hca_core_clock, device_cap_flags_ex, tso_caps, rss_caps, max_wq_type_rq,
            packet_pacing_caps, raw_packet_caps, tm_caps, cq_mod_caps, max_dm_size,
            pci_atomic_caps, xrc_odp_caps, phys_port_cnt_ex;
        RssCaps = "ibv_rss_caps": supported_qpts, max_rwq_indirection_tables,
            max_rwq_indirection_table_size, rx_hash_fields_mask, rx_hash_function;
        PortAttr = "ibv_port_attr": state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags,
            max_msg_sz, bad_pkey_cntr, qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num,
            sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state,
            link_layer, flags, port_cap_flags2;
        GidEntry = "ibv_gid_entry": gid, gid_index, port_num, gid_type, ndev_ifindex;
        Pd = "ibv_pd": context, handle;
        Td = "ibv_td": context;
        ParentDomainInitAttr<'_> = "ibv_parent_domain_init_attr": pd, td, comp_mask, alloc, free,
            pd_context;
        Mr = "ibv_mr": context, pd, addr, length, handle, lkey, rkey;
        Mw = "ibv_mw": context, pd, rkey, handle, kind = "type";
        MwBindInfo<'_> = "ibv_mw_bind_info": mr, addr, length, access = "mw_access_flags";
        MwBind<'_> = "ibv_mw_bind": wr_id, send_flags, bind_info;
        Ah = "ibv_ah": context, pd, handle;
        GlobalRoute = "ibv_global_route": dgid, flow_label, sgid_index, hop_limit, traffic_class;
        AhAttr = "ibv_ah_attr": grh, dlid, sl, src_path_bits, static_rate, is_global, port_num;
        CompChannel = "ibv_comp_channel": context, fd, refcnt;
        Cq = "ibv_cq_ex": context, channel, cq_context, handle, cqe, mutex, cond,
            comp_events_completed, async_events_completed, comp_mask, status, wr_id, start_poll,
            next_poll, end_poll, read_opcode, read_vendor_err, read_byte_len, read_imm_data,
            read_qp_num, read_src_qp, read_wc_flags, read_slid, read_sl, read_dlid_path_bits,
            read_completion_ts, read_cvlan, read_flow_tag, read_tm_info,
            read_completion_wallclock_ns;
        CqInitAttrEx<'_> = "ibv_cq_init_attr_ex": cqe, cq_context, channel, comp_vector, wc_flags,
            comp_mask, flags, parent_domain;
        Wc = "ibv_wc": wr_id, status, opcode, vendor_err, byte_len, imm_or_key = "imm_data",
            qp_num, src_qp, wc_flags, pkey_index, slid, sl, dlid_path_bits;
        Srq = "ibv_srq": context, srq_context, pd, handle, mutex, cond, events_completed;
        SrqAttr = "ibv_srq_attr": max_wr, max_sge, srq_limit;
        SrqInitAttr = "ibv_srq_init_attr": srq_context, attr;
        SrqInitAttrEx = "ibv_srq_init_attr_ex": srq_context, attr, comp_mask, srq_type, pd, xrcd,
            cq, tm_cap;
        Qp = "ibv_qp_ex": context = "qp_base.context", qp_context = "qp_base.qp_context",
            pd = "qp_base.pd", send_cq = "qp_base.send_cq", recv_cq = "qp_base.recv_cq",
            srq = "qp_base.srq", handle = "qp_base.handle", qp_num = "qp_base.qp_num",
            state = "qp_base.state", qp_type = "qp_base.qp_type", mutex = "qp_base.mutex",
            cond = "qp_base.cond", events_completed = "qp_base.events_completed", comp_mask,
            wr_id, wr_flags, wr_atomic_cmp_swp, wr_atomic_fetch_add, wr_bind_mw, wr_local_inv,
            wr_rdma_read, wr_rdma_write, wr_rdma_write_imm, wr_send, wr_send_imm, wr_send_inv,
            wr_send_tso, wr_set_ud_addr, wr_set_xrc_srqn, wr_set_inline_data,
            wr_set_inline_data_list, wr_set_sge, wr_set_sge_list, wr_start, wr_complete, wr_abort,
            wr_atomic_write;
        DataBuf = "ibv_data_buf": addr, length;
        QpCap = "ibv_qp_cap": max_send_wr, max_recv_wr, max_send_sge, max_recv_sge,
            max_inline_data;
        QpInitAttr<'_> = "ibv_qp_init_attr": qp_context, send_cq, recv_cq, srq, cap, qp_type,
            sq_sig_all;
        QpInitAttrEx<'_> = "ibv_qp_init_attr_ex": qp_context, send_cq, recv_cq, srq, cap, qp_type,
            sq_sig_all, comp_mask, pd, xrcd, create_flags, max_tso_header, rwq_ind_tbl,
            rx_hash_conf, source_qpn, send_ops_flags;
        RxHashConf = "ibv_rx_hash_conf": rx_hash_function, rx_hash_key_len, rx_hash_key,
            rx_hash_fields_mask;
        QpAttr = "ibv_qp_attr": qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn,
            sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index,
            alt_pkey_index, en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic,
            min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout,
            rate_limit;
        SendWr<'_> = "ibv_send_wr": wr_id, next, sg_list, num_sge, opcode, send_flags,
            imm_or_key = "imm_data", wr, remote_srqn = "qp_type.xrc.remote_srqn",
            bind = "bind_mw";
        RecvWr<'_> = "ibv_recv_wr": wr_id, next, sg_list, num_sge;
        AsyncEvent = "ibv_async_event": element, event_type;
        ValuesEx = "ibv_values_ex": comp_mask, raw_clock;
    }
    let (wr, bind) = (offset_of!(SendWr<'_>, wr), offset_of!(SendWr<'_>, bind));
    for (field, at) in [
        ("wr.rdma.remote_addr", wr + offset_of!(WrRdma, remote_addr)),
        ("wr.rdma.rkey", wr + offset_of!(WrRdma, rkey)),
        ("wr.atomic.remote_addr", wr + offset_of!(WrAtomic, remote_addr)),
        ("wr.atomic.compare_add", wr + offset_of!(WrAtomic, compare_add)),
        ("wr.atomic.swap", wr + offset_of!(WrAtomic, swap)),
        ("wr.atomic.rkey", wr + offset_of!(WrAtomic, rkey)),
        ("wr.ud.ah", wr + offset_of!(WrUd<'_>, ah)),
        ("wr.ud.remote_qpn", wr + offset_of!(WrUd<'_>, remote_qpn)),
        ("wr.ud.remote_qkey", wr + offset_of!(WrUd<'_>, remote_qkey)),
        ("bind_mw.mw", bind + offset_of!(WrBind<'_>, mw)),
        ("bind_mw.rkey", bind + offset_of!(WrBind<'_>, rkey)),
        ("bind_mw.bind_info", bind + offset_of!(WrBind<'_>, bind_info)),
    ] {
        wanted.push((format!("offsetof(struct ibv_send_wr, {field})"), at));
    }
    wanted.push(("sizeof(union ibv_gid)".to_owned(), size_of::<Gid>()));
    wanted.push(("sizeof(struct ibv_grh)".to_owned(), size_of::<Grh>()));
    let expressions: Vec<String> = wanted.iter().map(|(of, _)| of.clone()).collect();
    let Some(theirs) = compiled(HEADER, PACKAGE, &expressions) else { return };
    let both = wanted.iter().zip(theirs);
    let wrong: Vec<_> = both.filter(|((_, ours), theirs)| ours != theirs).collect();
    assert!(wrong.is_empty(), "expression, ours, theirs: {wrong:#?}");
}
