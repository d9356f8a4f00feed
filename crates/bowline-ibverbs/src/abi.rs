//! The C interface of libibverbs: structures as programs have them that were compiled with the
//! headers of rdma-core. `tests/layout.rs` compares them with these headers.
//!
//! Numbers that a program and this library both change while they have the object are atomic here;
//! in C they are plain. What this library keeps for an object stands at its end, as `own`: programs
//! never make objects of these types, and do not know how long they are.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use bowline_verbs::Sge;

use crate::{address, completion, device, memory, queue_pair, shared_receives};

#[cfg(test)]
mod tests;

/// Room of a mutex of C, which this library does not use.
pub(crate) type Mutex = libc::pthread_mutex_t;
/// Room of a condition of C, which this library does not use.
pub(crate) type Cond = libc::pthread_cond_t;
/// A call that this library leaves out.
pub(crate) type Unused = *const c_void;
/// `ibv_post_send`, by which the header calls it.
pub(crate) type PostSend = for<'a> extern "C" fn(
    Option<&Qp>,
    Option<&'a SendWr<'a>>,
    Option<&mut *const SendWr<'a>>,
) -> c_int;
/// `ibv_post_recv`, by which the header calls it.
pub(crate) type PostRecv = for<'a> extern "C" fn(
    Option<&Qp>,
    Option<&'a RecvWr<'a>>,
    Option<&mut *const RecvWr<'a>>,
) -> c_int;

/// `ibv_post_srq_recv`, by which the header calls it.
pub(crate) type PostSrqRecv = for<'a> extern "C" fn(
    Option<&Srq>,
    Option<&'a RecvWr<'a>>,
    Option<&mut *const RecvWr<'a>>,
) -> c_int;

/// `union ibv_gid`. The header's has two numbers of 64 bits in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// `struct ibv_device`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Device {
    /// Never used.
    pub(crate) ops: [Unused; 2],
    /// `enum ibv_node_type`.
    pub(crate) node_type: c_int,
    /// `enum ibv_transport_type`.
    pub(crate) transport_type: c_int,
    /// Name of the device.
    pub(crate) name: [c_char; 64],
    /// Name of the file for programs.
    pub(crate) dev_name: [c_char; 64],
    /// Its folder in sysfs.
    pub(crate) dev_path: [c_char; 256],
    /// The device's folder in sysfs.
    pub(crate) ibdev_path: [c_char; 256],
}

/// `struct ibv_context_ops`: what inline functions of the header call.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ContextOps {
    pub(crate) query_to_dereg: [Unused; 7],
    pub(crate) alloc_mw: Option<extern "C" fn(Option<&Pd>, c_uint) -> *mut Mw>,
    pub(crate) bind_mw:
        Option<extern "C" fn(Option<&Qp>, Option<&Mw>, Option<&MwBind<'_>>) -> c_int>,
    pub(crate) dealloc_mw: Option<extern "C" fn(*mut Mw) -> c_int>,
    pub(crate) create_cq: Unused,
    pub(crate) poll_cq: Option<extern "C" fn(Option<&Cq>, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<extern "C" fn(Option<&Cq>, c_int) -> c_int>,
    pub(crate) cq_event_to_destroy_srq: [Unused; 7],
    pub(crate) post_srq_recv: Option<PostSrqRecv>,
    pub(crate) create_to_destroy_qp: [Unused; 4],
    pub(crate) post_send: Option<PostSend>,
    pub(crate) post_recv: Option<PostRecv>,
    pub(crate) create_ah_to_async_event: [Unused; 5],
}

/// `struct ibv_context`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *const Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
    pub(crate) mutex: Mutex,
    /// All bits set: it is in a [`VerbsContext`].
    pub(crate) abi_compat: usize,
    pub(crate) own: device::Own,
}

/// `struct verbs_context`, which grows at its beginning.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct VerbsContext {
    pub(crate) query_port:
        Option<extern "C" fn(Option<&Context>, u8, *mut PortAttr, usize) -> c_int>,
    pub(crate) advise_mr: Option<extern "C" fn(Option<&Pd>, c_uint, u32, *const Sge, u32) -> c_int>,
    /// From `alloc_null_mr` to `create_flow_action_esp`.
    pub(crate) null_mr_to_flow_action: [Unused; 11],
    pub(crate) modify_qp_rate_limit: Unused,
    pub(crate) alloc_parent_domain:
        Option<extern "C" fn(Option<&Context>, Option<&ParentDomainInitAttr<'_>>) -> *mut Pd>,
    pub(crate) dealloc_td: Option<extern "C" fn(*mut Td) -> c_int>,
    pub(crate) alloc_td: Option<extern "C" fn(Option<&Context>, *const c_void) -> *mut Td>,
    pub(crate) modify_cq: Option<extern "C" fn(Option<&Cq>, *const c_void) -> c_int>,
    /// From `post_srq_ops` to `create_wq`.
    pub(crate) srq_ops_to_create_wq: [Unused; 6],
    pub(crate) query_rt_values:
        Option<extern "C" fn(Option<&Context>, Option<&mut ValuesEx>) -> c_int>,
    pub(crate) create_cq_ex:
        Option<extern "C" fn(Option<&Context>, Option<&CqInitAttrEx<'_>>) -> *mut Cq>,
    pub(crate) private: Unused,
    pub(crate) query_device_ex:
        Option<extern "C" fn(Option<&Context>, *const c_void, *mut DeviceAttrEx, usize) -> c_int>,
    /// From `ibv_destroy_flow` to `ABI_placeholder1`.
    pub(crate) flows: [Unused; 4],
    pub(crate) open_qp: Unused,
    pub(crate) create_qp_ex:
        Option<extern "C" fn(Option<&Context>, Option<&mut QpInitAttrEx<'_>>) -> *mut Qp>,
    pub(crate) get_srq_num: Unused,
    pub(crate) create_srq_ex: Unused,
    pub(crate) open_xrcd: Unused,
    pub(crate) close_xrcd: Unused,
    pub(crate) placeholder: u64,
    /// Size of all of this.
    pub(crate) size: usize,
    pub(crate) context: Context,
}

/// `struct ibv_device_attr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    /// Big-endian.
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) max_raw_ipv6_qp: c_int,
    pub(crate) max_raw_ethy_qp: c_int,
    pub(crate) max_mcast_grp: c_int,
    pub(crate) max_mcast_qp_attach: c_int,
    pub(crate) max_total_mcast_qp_attach: c_int,
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// `struct ibv_device_attr_ex`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DeviceAttrEx {
    pub(crate) orig_attr: DeviceAttr,
    pub(crate) comp_mask: u32,
    pub(crate) odp_general_caps: u64,
    pub(crate) odp_transport_caps: [u32; 3],
    pub(crate) completion_timestamp_mask: u64,
    /// In kHz.
    pub(crate) hca_core_clock: u64,
    pub(crate) device_cap_flags_ex: u64,
    pub(crate) tso_caps: [u32; 2],
    pub(crate) rss_caps: RssCaps,
    pub(crate) max_wq_type_rq: u32,
    pub(crate) packet_pacing_caps: [u32; 3],
    pub(crate) raw_packet_caps: u32,
    pub(crate) tm_caps: [u32; 5],
    pub(crate) cq_mod_caps: [u16; 2],
    pub(crate) max_dm_size: u64,
    pub(crate) pci_atomic_caps: [u16; 3],
    pub(crate) xrc_odp_caps: u32,
    pub(crate) phys_port_cnt_ex: u32,
}

/// `struct ibv_rss_caps`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct RssCaps {
    pub(crate) supported_qpts: u32,
    pub(crate) max_rwq_indirection_tables: u32,
    pub(crate) max_rwq_indirection_table_size: u32,
    pub(crate) rx_hash_fields_mask: u64,
    pub(crate) rx_hash_function: u8,
}

/// `struct ibv_port_attr`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// `struct ibv_gid_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct GidEntry {
    pub(crate) gid: Gid,
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

/// `struct ibv_pd`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Pd {
    pub(crate) context: *const Context,
    pub(crate) handle: u32,
    pub(crate) own: memory::PdOwn,
}

/// `struct ibv_td`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Td {
    pub(crate) context: *const Context,
}

/// `struct ibv_parent_domain_init_attr`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ParentDomainInitAttr<'a> {
    pub(crate) pd: Option<&'a Pd>,
    pub(crate) td: *const Td,
    pub(crate) comp_mask: u32,
    pub(crate) alloc: Unused,
    pub(crate) free: Unused,
    pub(crate) pd_context: *mut c_void,
}

/// `struct ibv_mr`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Mr {
    pub(crate) context: *const Context,
    pub(crate) pd: *const Pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    pub(crate) own: memory::MrOwn,
}

/// `struct ibv_mw`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Mw {
    pub(crate) context: *const Context,
    pub(crate) pd: *const Pd,
    pub(crate) rkey: AtomicU32,
    pub(crate) handle: u32,
    pub(crate) kind: c_uint,
    pub(crate) own: memory::MwOwn,
}

/// `struct ibv_mw_bind_info`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct MwBindInfo<'a> {
    pub(crate) mr: Option<&'a Mr>,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: c_uint,
}

/// `struct ibv_mw_bind`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct MwBind<'a> {
    pub(crate) wr_id: u64,
    pub(crate) send_flags: c_uint,
    pub(crate) bind_info: MwBindInfo<'a>,
}

/// `struct ibv_ah`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Ah {
    pub(crate) context: *const Context,
    pub(crate) pd: *const Pd,
    pub(crate) handle: u32,
    pub(crate) own: address::Own,
}

/// `struct ibv_global_route`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_grh`: 40 bytes in front of a datagram.
#[derive(Debug)]
#[repr(C, align(8))]
pub(crate) struct Grh(pub(crate) [u8; 40]);

/// `struct ibv_comp_channel`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CompChannel {
    pub(crate) context: *const Context,
    pub(crate) fd: c_int,
    /// Queues that use it.
    pub(crate) refcnt: AtomicI32,
    pub(crate) own: completion::Channel,
}

/// `struct ibv_cq_ex`, which begins as `struct ibv_cq`, and what this library keeps for it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *const Context,
    pub(crate) channel: *const CompChannel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: AtomicI32,
    pub(crate) mutex: Mutex,
    pub(crate) cond: Cond,
    pub(crate) comp_events_completed: AtomicU32,
    pub(crate) async_events_completed: AtomicU32,
    pub(crate) comp_mask: u32,
    /// Of the completion that is looked at.
    pub(crate) status: AtomicU32,
    pub(crate) wr_id: AtomicU64,
    pub(crate) start_poll: Option<extern "C" fn(Option<&Cq>, *const c_void) -> c_int>,
    pub(crate) next_poll: Option<extern "C" fn(Option<&Cq>) -> c_int>,
    pub(crate) end_poll: Option<extern "C" fn(Option<&Cq>)>,
    pub(crate) read_opcode: Option<extern "C" fn(Option<&Cq>) -> c_uint>,
    pub(crate) read_vendor_err: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_byte_len: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_imm_data: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_qp_num: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_src_qp: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_wc_flags: Option<extern "C" fn(Option<&Cq>) -> c_uint>,
    pub(crate) read_slid: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_sl: Option<extern "C" fn(Option<&Cq>) -> u8>,
    pub(crate) read_dlid_path_bits: Option<extern "C" fn(Option<&Cq>) -> u8>,
    pub(crate) read_completion_ts: Option<extern "C" fn(Option<&Cq>) -> u64>,
    pub(crate) read_cvlan: Option<extern "C" fn(Option<&Cq>) -> u16>,
    pub(crate) read_flow_tag: Option<extern "C" fn(Option<&Cq>) -> u32>,
    pub(crate) read_tm_info: Unused,
    pub(crate) read_completion_wallclock_ns: Option<extern "C" fn(Option<&Cq>) -> u64>,
    pub(crate) own: completion::Own,
}

/// `struct ibv_cq_init_attr_ex`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct CqInitAttrEx<'a> {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: Option<&'a CompChannel>,
    pub(crate) comp_vector: u32,
    pub(crate) wc_flags: u64,
    pub(crate) comp_mask: u32,
    pub(crate) flags: u32,
    pub(crate) parent_domain: *const Pd,
}

/// `struct ibv_wc`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate, big-endian, or key that the peer has invalidated.
    pub(crate) imm_or_key: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `struct ibv_srq`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) context: *const Context,
    pub(crate) srq_context: *mut c_void,
    pub(crate) pd: *const Pd,
    pub(crate) handle: u32,
    pub(crate) mutex: Mutex,
    pub(crate) cond: Cond,
    pub(crate) events_completed: AtomicU32,
    pub(crate) own: shared_receives::Own,
}

/// `struct ibv_srq_attr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SrqAttr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
}

/// `struct ibv_srq_init_attr_ex`, which begins with what [`SrqInitAttr`] has.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SrqInitAttrEx {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
    pub(crate) comp_mask: u32,
    pub(crate) srq_type: c_uint,
    pub(crate) pd: *const Pd,
    pub(crate) xrcd: *const c_void,
    pub(crate) cq: *const Cq,
    pub(crate) tm_cap: [u32; 2],
}

/// `struct ibv_qp_ex`, which begins as `struct ibv_qp`, and what this library keeps for it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *const Context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *const Pd,
    pub(crate) send_cq: *const Cq,
    pub(crate) recv_cq: *const Cq,
    pub(crate) srq: *const Srq,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
    pub(crate) state: AtomicU32,
    pub(crate) qp_type: c_uint,
    pub(crate) mutex: Mutex,
    pub(crate) cond: Cond,
    pub(crate) events_completed: AtomicU32,
    pub(crate) comp_mask: u64,
    /// Set by the program before it adds a request.
    pub(crate) wr_id: AtomicU64,
    pub(crate) wr_flags: AtomicU32,
    pub(crate) wr_atomic_cmp_swp: Option<extern "C" fn(Option<&Qp>, u32, u64, u64, u64)>,
    pub(crate) wr_atomic_fetch_add: Option<extern "C" fn(Option<&Qp>, u32, u64, u64)>,
    pub(crate) wr_bind_mw:
        Option<extern "C" fn(Option<&Qp>, Option<&Mw>, u32, Option<&MwBindInfo<'_>>)>,
    pub(crate) wr_local_inv: Option<extern "C" fn(Option<&Qp>, u32)>,
    pub(crate) wr_rdma_read: Option<extern "C" fn(Option<&Qp>, u32, u64)>,
    pub(crate) wr_rdma_write: Option<extern "C" fn(Option<&Qp>, u32, u64)>,
    pub(crate) wr_rdma_write_imm: Option<extern "C" fn(Option<&Qp>, u32, u64, u32)>,
    pub(crate) wr_send: Option<extern "C" fn(Option<&Qp>)>,
    pub(crate) wr_send_imm: Option<extern "C" fn(Option<&Qp>, u32)>,
    pub(crate) wr_send_inv: Option<extern "C" fn(Option<&Qp>, u32)>,
    pub(crate) wr_send_tso: Option<extern "C" fn(Option<&Qp>, *const c_void, u16, u16)>,
    pub(crate) wr_set_ud_addr: Option<extern "C" fn(Option<&Qp>, Option<&Ah>, u32, u32)>,
    pub(crate) wr_set_xrc_srqn: Option<extern "C" fn(Option<&Qp>, u32)>,
    pub(crate) wr_set_inline_data: Option<extern "C" fn(Option<&Qp>, *const c_void, usize)>,
    pub(crate) wr_set_inline_data_list: Option<extern "C" fn(Option<&Qp>, usize, *const DataBuf)>,
    pub(crate) wr_set_sge: Option<extern "C" fn(Option<&Qp>, u32, u64, u32)>,
    pub(crate) wr_set_sge_list: Option<extern "C" fn(Option<&Qp>, usize, *const Sge)>,
    pub(crate) wr_start: Option<extern "C" fn(Option<&Qp>)>,
    pub(crate) wr_complete: Option<extern "C" fn(Option<&Qp>) -> c_int>,
    pub(crate) wr_abort: Option<extern "C" fn(Option<&Qp>)>,
    pub(crate) wr_atomic_write: Option<extern "C" fn(Option<&Qp>, u32, u64, *const c_void)>,
    pub(crate) own: queue_pair::Own,
}

/// `struct ibv_data_buf`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DataBuf {
    pub(crate) addr: *const c_void,
    pub(crate) length: usize,
}

/// `struct ibv_qp_cap`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct QpInitAttr<'a> {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: Option<&'a Cq>,
    pub(crate) recv_cq: Option<&'a Cq>,
    pub(crate) srq: Option<&'a Srq>,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_qp_init_attr_ex`, which begins with what [`QpInitAttr`] has.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct QpInitAttrEx<'a> {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: Option<&'a Cq>,
    pub(crate) recv_cq: Option<&'a Cq>,
    pub(crate) srq: Option<&'a Srq>,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
    pub(crate) comp_mask: u32,
    pub(crate) pd: Option<&'a Pd>,
    pub(crate) xrcd: *const c_void,
    pub(crate) create_flags: u32,
    pub(crate) max_tso_header: u16,
    pub(crate) rwq_ind_tbl: *const c_void,
    pub(crate) rx_hash_conf: RxHashConf,
    pub(crate) source_qpn: u32,
    pub(crate) send_ops_flags: u64,
}

/// `struct ibv_rx_hash_conf`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct RxHashConf {
    pub(crate) rx_hash_function: u8,
    pub(crate) rx_hash_key_len: u8,
    pub(crate) rx_hash_key: *const u8,
    pub(crate) rx_hash_fields_mask: u64,
}

/// `struct ibv_qp_attr`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_send_wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SendWr<'a> {
    pub(crate) wr_id: u64,
    pub(crate) next: Option<&'a SendWr<'a>>,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    /// Immediate, big-endian, or key to invalidate.
    pub(crate) imm_or_key: u32,
    pub(crate) wr: WrOf<'a>,
    pub(crate) remote_srqn: u32,
    pub(crate) bind: WrBind<'a>,
}

/// What an operation needs of its own.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union WrOf<'a> {
    pub(crate) rdma: WrRdma,
    pub(crate) atomic: WrAtomic,
    pub(crate) ud: WrUd<'a>,
}

/// Of reads and writes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WrRdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

/// Of atomics.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WrAtomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

/// Of datagrams.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WrUd<'a> {
    pub(crate) ah: Option<&'a Ah>,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

/// Of bindings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WrBind<'a> {
    pub(crate) mw: Option<&'a Mw>,
    pub(crate) rkey: u32,
    pub(crate) bind_info: MwBindInfo<'a>,
}

/// `struct ibv_recv_wr`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct RecvWr<'a> {
    pub(crate) wr_id: u64,
    pub(crate) next: Option<&'a RecvWr<'a>>,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_async_event`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AsyncEvent {
    /// Address of the queue pair, completion queue or shared receive queue, or the number of the
    /// port.
    pub(crate) element: usize,
    /// `enum ibv_event_type`.
    pub(crate) event_type: c_uint,
}

/// `struct ibv_values_ex`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct ValuesEx {
    pub(crate) comp_mask: u32,
    pub(crate) raw_clock: libc::timespec,
}
