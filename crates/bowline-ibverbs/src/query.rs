//! What a program asks of the device and its port.

use core::ffi::{c_char, c_int, c_void};
use core::{mem, ptr};

use bowline_base::clock;
use bowline_verbs::DeviceAttr as Attr;

use crate::abi::{Context, DeviceAttr, DeviceAttrEx, Gid, GidEntry, PortAttr, RssCaps, ValuesEx};
use crate::device::{self, text};
use crate::fails;

/// `enum ibv_device_cap_flags`.
const CURR_QP_STATE_MOD: u32 = 1 << 7;
const RC_RNR_NAK_GEN: u32 = 1 << 12;
const SRQ_RESIZE: u32 = 1 << 13;
const MEM_WINDOW: u32 = 1 << 17;
const MEM_MGT_EXTENSIONS: u32 = 1 << 21;
const MEM_WINDOW_TYPE_2B: u32 = 1 << 24;
/// Nobody's number, which devices without a vendor have, and 0 is not.
const VENDOR: u32 = 0xff_ffff;
/// `IBV_PORT_ACTIVE`.
const PORT_ACTIVE: u32 = 4;
/// `IBV_PORT_CM_SUP` and `IBV_PORT_IP_BASED_GIDS`.
const PORT_CAPS: u32 = 1 << 16 | 1 << 26;
/// `IBV_LINK_LAYER_ETHERNET`.
const ETHERNET: u8 = 2;
/// 4 lanes.
const WIDTH_4X: u8 = 2;
/// 25 Gb/s a lane: a number that programs ask for and nothing depends on.
const SPEED_EDR: u8 = 32;
/// The link is up.
const LINK_UP: u8 = 5;
/// Longest message.
const MESSAGE_MAX: u32 = 1 << 31;
/// `IBV_GID_TYPE_ROCE_V2`.
const ROCE_V2: u32 = 2;
/// Multicast groups of the device, and attachments of queue pairs to them.
const GROUPS_MAX: c_int = 1024;
const ATTACHMENTS_MAX: c_int = 1 << 16;
/// The default partition.
const PKEY: u16 = 0xffff;
/// `IBV_ATOMIC_HCA`: atomics of this device among each other.
const ATOMIC_HCA: c_int = 1;
/// Kilohertz of a clock that counts nanoseconds.
const NANOSECONDS: u64 = 1_000_000;
/// `IBV_VALUES_MASK_RAW_CLOCK`.
const RAW_CLOCK: u32 = 1;

fn number(n: usize) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

fn attr(of: &Attr) -> DeviceAttr {
    let windows = if of.max_mw > 0 { MEM_WINDOW | MEM_WINDOW_TYPE_2B } else { 0 };
    let shared_receives = if of.max_srq > 0 { SRQ_RESIZE } else { 0 };
    let registration = if of.fast_registration { MEM_MGT_EXTENSIONS } else { 0 };
    DeviceAttr {
        fw_ver: text(env!("CARGO_PKG_VERSION")),
        node_guid: of.guid.to_be(),
        sys_image_guid: of.guid.to_be(),
        max_mr_size: isize::MAX as u64,
        page_size_cap: !0xfff,
        vendor_id: VENDOR,
        vendor_part_id: 0,
        hw_ver: 0,
        max_qp: number(of.max_qp),
        max_qp_wr: number(of.max_qp_wr),
        device_cap_flags: CURR_QP_STATE_MOD
            | RC_RNR_NAK_GEN
            | windows
            | shared_receives
            | registration,
        max_sge: number(of.max_sge),
        max_sge_rd: number(of.max_sge),
        max_cq: number(of.max_cq),
        max_cqe: number(of.max_cqe),
        max_mr: number(of.max_mr),
        max_pd: number(of.max_qp),
        max_qp_rd_atom: of.max_qp_rd_atom.into(),
        max_ee_rd_atom: 0,
        max_res_rd_atom: number(of.max_qp * usize::from(of.max_qp_rd_atom)),
        max_qp_init_rd_atom: of.max_qp_rd_atom.into(),
        max_ee_init_rd_atom: 0,
        atomic_cap: ATOMIC_HCA,
        max_ee: 0,
        max_rdd: 0,
        max_mw: number(of.max_mw),
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: GROUPS_MAX,
        max_mcast_qp_attach: ATTACHMENTS_MAX,
        max_total_mcast_qp_attach: ATTACHMENTS_MAX,
        max_ah: c_int::MAX,
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: number(of.max_srq),
        max_srq_wr: number(of.max_srq_wr),
        max_srq_sge: number(of.max_srq_sge),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    }
}

fn attr_ex(of: &Attr) -> DeviceAttrEx {
    let orig_attr = attr(of);
    DeviceAttrEx {
        orig_attr,
        comp_mask: 0,
        odp_general_caps: 0,
        odp_transport_caps: [0; 3],
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: NANOSECONDS,
        device_cap_flags_ex: orig_attr.device_cap_flags.into(),
        tso_caps: [0; 2],
        rss_caps: RssCaps {
            supported_qpts: 0,
            max_rwq_indirection_tables: 0,
            max_rwq_indirection_table_size: 0,
            rx_hash_fields_mask: 0,
            rx_hash_function: 0,
        },
        max_wq_type_rq: 0,
        packet_pacing_caps: [0; 3],
        raw_packet_caps: 0,
        tm_caps: [0; 5],
        cq_mod_caps: [0; 2],
        max_dm_size: 0,
        pci_atomic_caps: [0; 3],
        xrc_odp_caps: 0,
        phys_port_cnt_ex: 1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_device(
    context: Option<&Context>,
    out: Option<&mut mem::MaybeUninit<DeviceAttr>>,
) -> c_int {
    let (Some(context), Some(out)) = (context, out) else { return fails(libc::EINVAL) };
    out.write(attr(&context.own.opened.attr));
    0
}

/// Writes as much of a structure as the program has room for, and zeroes behind it.
fn write_part<T>(value: &T, out: *mut T, room: usize) {
    let len = room.min(size_of::<T>());
    // SAFETY: the program has `room` bytes.
    unsafe { ptr::write_bytes(out.cast::<u8>(), 0, room) };
    // SAFETY: as above, and no more than there are.
    unsafe { ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), out.cast(), len) };
}

pub(crate) extern "C" fn query_device_ex(
    context: Option<&Context>,
    _input: *const c_void,
    out: *mut DeviceAttrEx,
    room: usize,
) -> c_int {
    match context {
        Some(context) if !out.is_null() && room >= size_of::<DeviceAttr>() => {
            write_part(&attr_ex(&context.own.opened.attr), out, room);
            0
        }
        _ => fails(libc::EINVAL),
    }
}

pub(crate) extern "C" fn query_port(
    context: Option<&Context>,
    port: u8,
    out: *mut PortAttr,
    room: usize,
) -> c_int {
    let Some(context) = context.filter(|_| port == 1 && !out.is_null()) else {
        return fails(libc::EINVAL);
    };
    let opened = &context.own.opened;
    let attr = PortAttr {
        state: PORT_ACTIVE,
        max_mtu: bowline_verbs::Mtu::M4096 as u32,
        active_mtu: opened.attr.mtu as u32,
        gid_tbl_len: number(opened.gids.len()),
        port_cap_flags: PORT_CAPS,
        max_msg_sz: MESSAGE_MAX,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        active_width: WIDTH_4X,
        active_speed: SPEED_EDR,
        phys_state: LINK_UP,
        link_layer: ETHERNET,
        ..PortAttr::default()
    };
    write_part(&attr, out, room);
    0
}

/// The call that programs of old have: without the newest members.
#[unsafe(no_mangle)]
extern "C" fn ibv_query_port(context: Option<&Context>, port: u8, out: *mut PortAttr) -> c_int {
    query_port(context, port, out, mem::offset_of!(PortAttr, port_cap_flags2))
}

fn entry(context: &Context, port: u32, index: u32) -> Result<GidEntry, c_int> {
    if port != 1 {
        return Err(libc::EINVAL);
    }
    let at = context.own.opened.gid(index).ok_or(libc::EINVAL)?;
    Ok(GidEntry {
        gid: device::gid(at.addr),
        gid_index: index,
        port_num: port,
        gid_type: ROCE_V2,
        ndev_ifindex: at.link,
    })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_gid(
    context: Option<&Context>,
    port: u8,
    index: c_int,
    out: Option<&mut mem::MaybeUninit<Gid>>,
) -> c_int {
    let found = match (context, u32::try_from(index)) {
        (Some(context), Ok(index)) => entry(context, port.into(), index),
        _ => Err(libc::EINVAL),
    };
    match (found, out) {
        (Ok(entry), Some(out)) => {
            out.write(entry.gid);
            0
        }
        (found, _) => {
            fails(found.err().unwrap_or(libc::EINVAL));
            -1
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn _ibv_query_gid_ex(
    context: Option<&Context>,
    port: u32,
    index: u32,
    out: *mut GidEntry,
    flags: u32,
    room: usize,
) -> c_int {
    let Some(context) = context.filter(|_| flags == 0 && !out.is_null()) else {
        return fails(libc::EINVAL);
    };
    match entry(context, port, index) {
        Ok(entry) => {
            write_part(&entry, out, room);
            0
        }
        Err(errno) => fails(errno),
    }
}

/// Returns the number of entries, or an errno below zero: `EINVAL` where there is room for fewer.
#[unsafe(no_mangle)]
extern "C" fn _ibv_query_gid_table(
    context: Option<&Context>,
    out: *mut GidEntry,
    most: usize,
    flags: u32,
    room: usize,
) -> isize {
    let has_room = |context: &&Context| context.own.opened.gids.len() <= most;
    let Some(context) = context.filter(has_room).filter(|_| flags == 0 && !out.is_null()) else {
        return -(fails(libc::EINVAL) as isize);
    };
    let mut count = 0;
    for index in 0..context.own.opened.gids.len() {
        let Ok(entry) = entry(context, 1, index as u32) else { break };
        write_part(&entry, out.wrapping_byte_add(index * room), room);
        count += 1;
    }
    count
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_gid_type(
    context: Option<&Context>,
    port: u8,
    index: u32,
    out: Option<&mut u32>,
) -> c_int {
    // The numbers of this call are those of an interface of old: 1 is RoCEv2.
    const V2: u32 = 1;
    match (context.map(|context| entry(context, port.into(), index)), out) {
        (Some(Ok(_)), Some(out)) => {
            *out = V2;
            0
        }
        _ => {
            fails(libc::EINVAL);
            -1
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_query_pkey(
    context: Option<&Context>,
    port: u8,
    index: c_int,
    out: Option<&mut u16>,
) -> c_int {
    match out {
        Some(out) if context.is_some() && port == 1 && index == 0 => {
            *out = PKEY;
            0
        }
        _ => {
            fails(libc::EINVAL);
            -1
        }
    }
}

/// The highest bit, full membership, does not count.
#[unsafe(no_mangle)]
extern "C" fn ibv_get_pkey_index(context: Option<&Context>, port: u8, pkey: u16) -> c_int {
    if context.is_some() && port == 1 && u16::from_be(pkey) & 0x7fff == PKEY & 0x7fff {
        return 0;
    }
    fails(libc::EINVAL);
    -1
}

pub(crate) extern "C" fn query_rt_values(
    context: Option<&Context>,
    values: Option<&mut ValuesEx>,
) -> c_int {
    let Some(values) = values.filter(|_| context.is_some()) else { return fails(libc::EINVAL) };
    let now = clock::now().as_nanos();
    if values.comp_mask & RAW_CLOCK != 0 {
        values.raw_clock = libc::timespec {
            tv_sec: (now / 1_000_000_000) as i64,
            tv_nsec: (now % 1_000_000_000) as i64,
        };
    }
    values.comp_mask &= RAW_CLOCK;
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Writes no text and returns -1: the device has no folder in sysfs. Its arguments are as those of
/// `printf`, of which nothing is read.
#[unsafe(no_mangle)]
extern "C" fn ibv_read_ibdev_sysfs_file(
    out: *mut c_char,
    room: usize,
    _device: *const c_void,
    _format: *const c_char,
) -> c_int {
    if !out.is_null() && room > 0 {
        // SAFETY: the program has `room` bytes.
        unsafe { out.write(0) };
    }
    fails(libc::ENOENT);
    -1
}

/// Reads a file of sysfs, as much as there is room for; returns its length without the end of the
/// line, or -1.
#[unsafe(no_mangle)]
extern "C" fn ibv_read_sysfs_file(
    folder: *const c_char,
    name: *const c_char,
    out: *mut c_char,
    room: usize,
) -> c_int {
    if folder.is_null() || name.is_null() || out.is_null() || room == 0 {
        fails(libc::EINVAL);
        return -1;
    }
    // SAFETY: text of C, as the call has it.
    let parts = [folder, name].map(|part| unsafe { core::ffi::CStr::from_ptr(part) });
    let [Ok(folder), Ok(name)] = parts.map(core::ffi::CStr::to_str) else { return -1 };
    let Ok(mut bytes) = std::fs::read(std::path::Path::new(folder).join(name)) else { return -1 };
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    }
    let len = bytes.len().min(room - 1);
    bytes.truncate(len);
    bytes.push(0);
    // SAFETY: the program has `room` bytes, and these are no more.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len()) };
    number(len)
}
