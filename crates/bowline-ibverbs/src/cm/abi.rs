//! Structures of rdma_cma.h. Those that this library changes while a program has them are cells.

use core::cell::Cell;
use core::ffi::{c_char, c_int, c_uint, c_void};

use super::events::{ChannelOwn, EventOwn};
use super::ids::Own;
use crate::abi::{AhAttr, CompChannel, Context, Cq, Gid, Pd, Qp, Srq};

#[cfg(test)]
mod tests;

/// `struct sockaddr_storage`.
pub(crate) type Storage = libc::sockaddr_storage;

/// `struct rdma_event_channel`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
    pub(crate) own: ChannelOwn,
}

/// `struct rdma_route`, with the `struct rdma_addr` and `struct rdma_ib_addr` in it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Route {
    pub(crate) src_addr: Storage,
    pub(crate) dst_addr: Storage,
    pub(crate) sgid: Gid,
    pub(crate) dgid: Gid,
    /// Big-endian.
    pub(crate) pkey: u16,
    pub(crate) path_rec: *const c_void,
    pub(crate) num_paths: c_int,
}

/// `struct rdma_cm_id`.
#[repr(C)]
pub(crate) struct CmId {
    pub(crate) verbs: Cell<*const Context>,
    pub(crate) channel: Cell<*const EventChannel>,
    pub(crate) context: Cell<*mut c_void>,
    pub(crate) qp: Cell<*mut Qp>,
    pub(crate) route: Cell<Route>,
    pub(crate) ps: c_uint,
    pub(crate) port_num: Cell<u8>,
    pub(crate) event: Cell<*mut CmEvent>,
    pub(crate) send_cq_channel: Cell<*mut CompChannel>,
    pub(crate) send_cq: Cell<*mut Cq>,
    pub(crate) recv_cq_channel: Cell<*mut CompChannel>,
    pub(crate) recv_cq: Cell<*mut Cq>,
    pub(crate) srq: Cell<*const Srq>,
    pub(crate) pd: Cell<*const Pd>,
    pub(crate) qp_type: Cell<c_uint>,
    pub(crate) own: Own,
}

/// `struct rdma_conn_param`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ConnParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

/// `struct rdma_ud_param`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct UdParam {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) ah_attr: AhAttr,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
}

/// What an event brings.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union Param {
    pub(crate) conn: ConnParam,
    pub(crate) ud: UdParam,
}

/// `struct rdma_cm_event`.
#[repr(C)]
pub(crate) struct CmEvent {
    pub(crate) id: *const CmId,
    pub(crate) listen_id: *const CmId,
    pub(crate) event: c_uint,
    pub(crate) status: c_int,
    pub(crate) param: Param,
    pub(crate) own: EventOwn,
}

/// `struct rdma_cm_join_mc_attr_ex`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct JoinAttr {
    pub(crate) comp_mask: u32,
    pub(crate) join_flags: u32,
    pub(crate) addr: *const libc::sockaddr,
}

/// `struct rdma_addrinfo`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct AddrInfo {
    pub(crate) ai_flags: c_int,
    pub(crate) ai_family: c_int,
    pub(crate) ai_qp_type: c_int,
    pub(crate) ai_port_space: c_int,
    pub(crate) ai_src_len: libc::socklen_t,
    pub(crate) ai_dst_len: libc::socklen_t,
    pub(crate) ai_src_addr: *mut libc::sockaddr,
    pub(crate) ai_dst_addr: *mut libc::sockaddr,
    pub(crate) ai_src_canonname: *mut c_char,
    pub(crate) ai_dst_canonname: *mut c_char,
    pub(crate) ai_route_len: usize,
    pub(crate) ai_route: *mut c_void,
    pub(crate) ai_connect_len: usize,
    pub(crate) ai_connect: *mut c_void,
    pub(crate) ai_next: *mut AddrInfo,
}
