//! The structures are those of the installed header.

use core::mem::{offset_of, size_of};

use bowline_testkit::headers::compiled;

use super::*;

#[test]
fn structures_of_connections_are_those_of_the_header() {
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
    fields! {
        EventChannel = "rdma_event_channel": fd;
        Route = "rdma_route": src_addr = "addr.src_storage", dst_addr = "addr.dst_storage",
            sgid = "addr.addr.ibaddr.sgid", dgid = "addr.addr.ibaddr.dgid",
            pkey = "addr.addr.ibaddr.pkey", path_rec, num_paths;
        CmId = "rdma_cm_id": verbs, channel, context, qp, route, ps, port_num, event,
            send_cq_channel, send_cq, recv_cq_channel, recv_cq, srq, pd, qp_type;
        ConnParam = "rdma_conn_param": private_data, private_data_len, responder_resources,
            initiator_depth, flow_control, retry_count, rnr_retry_count, srq, qp_num;
        UdParam = "rdma_ud_param": private_data, private_data_len, ah_attr, qp_num, qkey;
        CmEvent = "rdma_cm_event": id, listen_id, event, status, param;
        JoinAttr = "rdma_cm_join_mc_attr_ex": comp_mask, join_flags, addr;
        AddrInfo = "rdma_addrinfo": ai_flags, ai_family, ai_qp_type, ai_port_space, ai_src_len,
            ai_dst_len, ai_src_addr, ai_dst_addr, ai_src_canonname, ai_dst_canonname,
            ai_route_len, ai_route, ai_connect_len, ai_connect, ai_next;
    }
    for (theirs, ours) in [
        ("struct rdma_conn_param", size_of::<ConnParam>()),
        ("struct rdma_ud_param", size_of::<UdParam>()),
        ("struct rdma_addrinfo", size_of::<AddrInfo>()),
        ("struct rdma_cm_join_mc_attr_ex", size_of::<JoinAttr>()),
        ("struct rdma_route", size_of::<Route>()),
        ("struct rdma_cm_event", offset_of!(CmEvent, own)),
    ] {
        wanted.push((format!("sizeof({theirs})"), ours));
    }
    let expressions: Vec<String> = wanted.iter().map(|(of, _)| of.clone()).collect();
    let Some(theirs) = compiled("rdma/rdma_cma.h", "librdmacm-dev", &expressions) else { return };
    let both = wanted.iter().zip(theirs);
    let wrong: Vec<_> = both.filter(|((_, ours), theirs)| ours != theirs).collect();
    assert!(wrong.is_empty(), "expression, ours, theirs: {wrong:#?}");
}
