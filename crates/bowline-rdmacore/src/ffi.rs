//! What is used of the C interface of libibverbs and librdmacm: declarations of our own, whose
//! layout the tests compare with the headers where those are installed.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

use bowline_verbs::Sge;

use crate::load::Unavailable;

#[cfg(test)]
mod tests;

/// `struct ibv_device`, seen only through functions.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IbvDevice {
    hidden: [u8; 0],
}

/// `struct ibv_context_ops`: the calls that are inline functions in C [VERBS-1].
#[repr(C)]
pub(crate) struct ContextOps {
    unused_before: [*const c_void; 7],
    pub(crate) alloc_mw: Option<unsafe extern "C" fn(*mut IbvPd, c_uint) -> *mut IbvMw>,
    pub(crate) bind_mw:
        Option<unsafe extern "C" fn(*mut IbvQp, *mut IbvMw, *mut IbvMwBind) -> c_int>,
    pub(crate) dealloc_mw: Option<unsafe extern "C" fn(*mut IbvMw) -> c_int>,
    unused_create: *const c_void,
    pub(crate) poll_cq: unsafe extern "C" fn(*mut IbvCq, c_int, *mut Wc) -> c_int,
    pub(crate) req_notify_cq: unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int,
    unused_between: [*const c_void; 12],
    pub(crate) post_send:
        unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int,
    pub(crate) post_recv:
        unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int,
    unused_after: [*const c_void; 5],
}

/// `struct ibv_context`, up to what is used of it.
#[repr(C)]
pub(crate) struct IbvContext {
    pub(crate) device: *mut IbvDevice,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(crate) struct IbvDeviceAttr {
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
    pub(crate) unused: [c_int; 4],
    pub(crate) max_mw: c_int,
    pub(crate) unused_after: [c_int; 11],
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// `IBV_DEVICE_MEM_WINDOW`, `IBV_DEVICE_MEM_WINDOW_TYPE_2A` and `IBV_DEVICE_MEM_WINDOW_TYPE_2B`.
pub(crate) const CAP_WINDOWS: [c_uint; 3] = [1 << 17, 1 << 23, 1 << 24];

/// `struct ibv_port_attr`.
#[repr(C)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) unused: [u32; 7],
}

/// `IBV_PORT_ACTIVE`.
pub(crate) const PORT_ACTIVE: c_uint = 4;

/// `struct ibv_gid_entry`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub(crate) struct GidEntry {
    pub(crate) gid: [u8; 16],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

/// `IBV_GID_TYPE_ROCE_V2`.
pub(crate) const GID_ROCE_V2: u32 = 2;

/// `struct ibv_pd`.
#[repr(C)]
pub(crate) struct IbvPd {
    pub(crate) context: *mut IbvContext,
    pub(crate) handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct IbvMr {
    pub(crate) context: *mut IbvContext,
    pub(crate) pd: *mut IbvPd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_mw`.
#[repr(C)]
pub(crate) struct IbvMw {
    pub(crate) context: *mut IbvContext,
    pub(crate) pd: *mut IbvPd,
    pub(crate) rkey: u32,
    pub(crate) handle: u32,
    pub(crate) kind: c_uint,
}

/// `struct ibv_mw_bind_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MwBindInfo {
    pub(crate) mr: *mut IbvMr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: c_uint,
}

/// `struct ibv_mw_bind`.
#[repr(C)]
pub(crate) struct IbvMwBind {
    pub(crate) wr_id: u64,
    pub(crate) send_flags: c_uint,
    pub(crate) bind_info: MwBindInfo,
}

/// `struct ibv_ah`, seen only through functions.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct IbvAh {
    hidden: [u8; 0],
}

/// `struct ibv_comp_channel`, up to what is used of it.
#[repr(C)]
pub(crate) struct CompChannel {
    pub(crate) context: *mut IbvContext,
    pub(crate) fd: c_int,
}

/// `struct ibv_cq`, up to what is used of it.
#[repr(C)]
pub(crate) struct IbvCq {
    pub(crate) context: *mut IbvContext,
    pub(crate) channel: *mut CompChannel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
}

/// `struct ibv_qp`, up to what is used of it.
#[repr(C)]
pub(crate) struct IbvQp {
    pub(crate) context: *mut IbvContext,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut IbvPd,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) qp_num: u32,
}

/// `struct ibv_qp_cap`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct IbvQpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: IbvQpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `IBV_QPT_RC`.
pub(crate) const QPT_RC: c_uint = 2;
/// `IBV_QPT_UC`.
pub(crate) const QPT_UC: c_uint = 3;
/// `IBV_QPT_UD`.
pub(crate) const QPT_UD: c_uint = 4;

/// `struct ibv_ah_attr` with its `struct ibv_global_route`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub(crate) struct AhAttr {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) pad: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct IbvQpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: IbvQpCap,
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

/// `enum ibv_qp_attr_mask`.
pub(crate) mod mask {
    use core::ffi::c_int;

    pub(crate) const STATE: c_int = 1;
    pub(crate) const CUR_STATE: c_int = 1 << 1;
    pub(crate) const SQD_NOTIFY: c_int = 1 << 2;
    pub(crate) const ACCESS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const QKEY: c_int = 1 << 6;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
}

/// `struct ibv_send_wr`. Of its last union only what is for windows is used.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IbvSendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut IbvSendWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    /// Immediate, big-endian, or key to invalidate.
    pub(crate) imm_or_key: u32,
    pub(crate) wr: WrUnion,
    pub(crate) remote_srqn: u32,
    pub(crate) bind: WrBind,
}

/// What an operation needs of its own.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union WrUnion {
    pub(crate) rdma: WrRdma,
    pub(crate) atomic: WrAtomic,
    pub(crate) ud: WrUd,
}

/// Datagrams.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct WrUd {
    pub(crate) ah: *mut IbvAh,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

/// The binding of a window.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct WrBind {
    pub(crate) mw: *mut IbvMw,
    pub(crate) rkey: u32,
    pub(crate) info: MwBindInfo,
}

/// Reads and writes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct WrRdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

/// Atomics.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct WrAtomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

/// `struct ibv_recv_wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IbvRecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut IbvRecvWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
}

// A list of `Sge` is handed over as it is.
const _: () = assert!(size_of::<Sge>() == 16);
const _: () = assert!(offset_of!(Sge, len) == 8);
const _: () = assert!(offset_of!(Sge, lkey) == 12);

/// `struct ibv_wc`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Immediate, big-endian, or key that was invalidated.
    pub(crate) imm_or_key: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `IBV_WC_GRH`.
pub(crate) const WC_GRH: c_uint = 1;
/// `IBV_WC_WITH_IMM`.
pub(crate) const WC_WITH_IMM: c_uint = 2;
/// `IBV_WC_WITH_INV`.
pub(crate) const WC_WITH_INV: c_uint = 8;

/// `struct ibv_async_event`.
#[repr(C)]
pub(crate) struct IbvAsyncEvent {
    /// The queue pair or completion queue, or a port number.
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_uint,
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub(crate) struct EventChannel {
    pub(crate) fd: c_int,
}

/// `struct rdma_cm_id`, up to what is used of it.
#[repr(C)]
pub(crate) struct RdmaId {
    pub(crate) verbs: *mut IbvContext,
    pub(crate) channel: *mut EventChannel,
    pub(crate) context: *mut c_void,
    pub(crate) qp: *mut IbvQp,
    pub(crate) src_addr: libc::sockaddr_storage,
    pub(crate) dst_addr: libc::sockaddr_storage,
}

/// `struct rdma_conn_param`.
#[repr(C)]
pub(crate) struct RdmaConnParam {
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

/// `struct rdma_cm_event`, with the parameters of connections.
#[repr(C)]
pub(crate) struct RdmaEvent {
    pub(crate) id: *mut RdmaId,
    pub(crate) listen_id: *mut RdmaId,
    pub(crate) event: c_uint,
    pub(crate) status: c_int,
    pub(crate) conn: RdmaConnParam,
}

/// `RDMA_PS_TCP`.
pub(crate) const PS_TCP: c_uint = 0x0106;
/// `RDMA_OPTION_ID`.
pub(crate) const OPTION_ID: c_int = 0;
/// `RDMA_OPTION_ID_TOS`.
pub(crate) const OPTION_ID_TOS: c_int = 0;
/// `RDMA_OPTION_ID_REUSEADDR`.
pub(crate) const OPTION_ID_REUSEADDR: c_int = 1;

macro_rules! symbols {
    ($(#[$doc:meta])* $table:ident: $($name:ident = $symbol:literal ($($arg:ty),*) $(-> $ret:ty)?;)+) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)+
            /// Keeps the code loaded as long as it may be called.
            _library: libloading::Library,
        }

        impl $table {
            /// Finds all functions.
            ///
            /// # Errors
            /// [`Unavailable::Symbol`].
            pub(crate) fn new(library: libloading::Library, file: &'static str) -> Result<Self, Unavailable> {
                $(
                    let symbol = concat!($symbol, "\0").as_bytes();
                    // SAFETY: the type is the one that the library's header declares for this name.
                    let found = unsafe { library.get(symbol) };
                    let missing = |_| Unavailable::Symbol { file, symbol: $symbol };
                    let $name: libloading::Symbol<'_, unsafe extern "C" fn($($arg),*) $(-> $ret)?> =
                        found.map_err(missing)?;
                    let $name = *$name;
                )+
                Ok(Self { $($name,)+ _library: library })
            }
        }
    };
}

symbols! {
    /// Functions of libibverbs.
    Verbs:
    get_device_list = "ibv_get_device_list"(*mut c_int) -> *mut *mut IbvDevice;
    free_device_list = "ibv_free_device_list"(*mut *mut IbvDevice);
    get_device_name = "ibv_get_device_name"(*mut IbvDevice) -> *const c_char;
    open_device = "ibv_open_device"(*mut IbvDevice) -> *mut IbvContext;
    close_device = "ibv_close_device"(*mut IbvContext) -> c_int;
    query_device = "ibv_query_device"(*mut IbvContext, *mut IbvDeviceAttr) -> c_int;
    query_port = "ibv_query_port"(*mut IbvContext, u8, *mut PortAttr) -> c_int;
    query_gid_table = "_ibv_query_gid_table"(*mut IbvContext, *mut GidEntry, usize, u32, usize) -> isize;
    alloc_pd = "ibv_alloc_pd"(*mut IbvContext) -> *mut IbvPd;
    dealloc_pd = "ibv_dealloc_pd"(*mut IbvPd) -> c_int;
    reg_mr = "ibv_reg_mr_iova2"(*mut IbvPd, *mut c_void, usize, u64, c_uint) -> *mut IbvMr;
    dereg_mr = "ibv_dereg_mr"(*mut IbvMr) -> c_int;
    create_ah = "ibv_create_ah"(*mut IbvPd, *mut AhAttr) -> *mut IbvAh;
    destroy_ah = "ibv_destroy_ah"(*mut IbvAh) -> c_int;
    create_comp_channel = "ibv_create_comp_channel"(*mut IbvContext) -> *mut CompChannel;
    destroy_comp_channel = "ibv_destroy_comp_channel"(*mut CompChannel) -> c_int;
    create_cq = "ibv_create_cq"(*mut IbvContext, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut IbvCq;
    destroy_cq = "ibv_destroy_cq"(*mut IbvCq) -> c_int;
    get_cq_event = "ibv_get_cq_event"(*mut CompChannel, *mut *mut IbvCq, *mut *mut c_void) -> c_int;
    ack_cq_events = "ibv_ack_cq_events"(*mut IbvCq, c_uint);
    create_qp = "ibv_create_qp"(*mut IbvPd, *mut QpInitAttr) -> *mut IbvQp;
    modify_qp = "ibv_modify_qp"(*mut IbvQp, *mut IbvQpAttr, c_int) -> c_int;
    query_qp = "ibv_query_qp"(*mut IbvQp, *mut IbvQpAttr, c_int, *mut QpInitAttr) -> c_int;
    destroy_qp = "ibv_destroy_qp"(*mut IbvQp) -> c_int;
    get_async_event = "ibv_get_async_event"(*mut IbvContext, *mut IbvAsyncEvent) -> c_int;
    ack_async_event = "ibv_ack_async_event"(*mut IbvAsyncEvent);
}

symbols! {
    /// Functions of librdmacm.
    Rdma:
    create_event_channel = "rdma_create_event_channel"() -> *mut EventChannel;
    destroy_event_channel = "rdma_destroy_event_channel"(*mut EventChannel);
    create_id = "rdma_create_id"(*mut EventChannel, *mut *mut RdmaId, *mut c_void, c_uint) -> c_int;
    destroy_id = "rdma_destroy_id"(*mut RdmaId) -> c_int;
    bind_addr = "rdma_bind_addr"(*mut RdmaId, *mut libc::sockaddr) -> c_int;
    resolve_addr = "rdma_resolve_addr"(*mut RdmaId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    resolve_route = "rdma_resolve_route"(*mut RdmaId, c_int) -> c_int;
    set_option = "rdma_set_option"(*mut RdmaId, c_int, c_int, *mut c_void, usize) -> c_int;
    init_qp_attr = "rdma_init_qp_attr"(*mut RdmaId, *mut IbvQpAttr, *mut c_int) -> c_int;
    connect = "rdma_connect"(*mut RdmaId, *mut RdmaConnParam) -> c_int;
    establish = "rdma_establish"(*mut RdmaId) -> c_int;
    listen = "rdma_listen"(*mut RdmaId, c_int) -> c_int;
    accept = "rdma_accept"(*mut RdmaId, *mut RdmaConnParam) -> c_int;
    reject = "rdma_reject"(*mut RdmaId, *const c_void, u8) -> c_int;
    disconnect = "rdma_disconnect"(*mut RdmaId) -> c_int;
    get_cm_event = "rdma_get_cm_event"(*mut EventChannel, *mut *mut RdmaEvent) -> c_int;
    ack_cm_event = "rdma_ack_cm_event"(*mut RdmaEvent) -> c_int;
}
