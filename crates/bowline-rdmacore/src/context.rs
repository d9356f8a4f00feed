//! An open device, its addresses and limits, protection domains and memory regions.

use core::ffi::{CStr, c_int, c_void};
use core::mem::{size_of, zeroed};
use core::ptr::NonNull;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use bowline_verbs::{
    Access, Buffer, DeviceAttr, Error, InvalidReason, MrKeys, Mtu, Object, PdId, Resource,
};

use crate::error::{check, freed, last_errno, limit, system};
use crate::ffi::{
    AhAttr, CAP_WINDOWS, GID_ROCE_V2, GidEntry, IbvAh, IbvContext, IbvDevice, IbvDeviceAttr, IbvMr,
    IbvPd, PORT_ACTIVE, PortAttr,
};
use crate::load::{Libraries, Unavailable, no_device};
use crate::qp::{HOPS, gid};

/// Most addresses of a device that are read.
const GIDS: usize = 256;

/// An open device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) libs: &'static Libraries,
    raw: NonNull<IbvContext>,
    name: String,
}

// SAFETY: libibverbs allows every call on a context from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// An address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) addr: IpAddr,
    pub(crate) index: u8,
    pub(crate) port: u8,
}

/// The list of devices while names are looked at and one is opened.
struct List {
    libs: &'static Libraries,
    first: NonNull<*mut IbvDevice>,
    count: usize,
}

impl List {
    fn get(libs: &'static Libraries) -> Result<Self, Unavailable> {
        let mut count: c_int = 0;
        // SAFETY: `count` may be written to.
        let first = unsafe { (libs.verbs.get_device_list)(&raw mut count) };
        let Some(first) = NonNull::new(first) else {
            // No such file, no such device: the kernel's part is not there.
            return match last_errno() {
                libc::ENOENT | libc::ENODEV | libc::ENOSYS => Err(no_device()),
                errno => Err(system("listing RDMA devices", errno).into()),
            };
        };
        let count = usize::try_from(count).unwrap_or(0);
        Ok(Self { libs, first, count })
    }

    fn devices(&self) -> impl Iterator<Item = (*mut IbvDevice, String)> {
        (0..self.count).map(|n| {
            // SAFETY: the list has `count` entries.
            let at = unsafe { self.first.add(n) };
            // SAFETY: as above, and they are set.
            let device = unsafe { at.read() };
            (device, name(self.libs, device))
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: it came from `get_device_list`, and no device is used that was not opened.
        unsafe { (self.libs.verbs.free_device_list)(self.first.as_ptr()) };
    }
}

/// The name of a device; empty without one.
fn name(libs: &Libraries, device: *mut IbvDevice) -> String {
    // SAFETY: the callers' devices are of a list that is still there or of an open context.
    let text = unsafe { (libs.verbs.get_device_name)(device) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: a C string, which lives as long as the device.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The names of all devices.
pub(crate) fn names(libs: &'static Libraries) -> Result<Vec<String>, Unavailable> {
    let names: Vec<String> = List::get(libs)?.devices().map(|(_, name)| name).collect();
    if names.is_empty() { Err(no_device()) } else { Ok(names) }
}

/// The name of the device of a context that is librdmacm's own.
pub(crate) fn name_of(libs: &Libraries, context: *mut IbvContext) -> Option<String> {
    let context = NonNull::new(context)?;
    // SAFETY: librdmacm keeps its contexts open for ever.
    let context = unsafe { context.as_ref() };
    Some(name(libs, context.device))
}

impl Context {
    /// Opens a device by its name.
    pub(crate) fn open(libs: &'static Libraries, wanted: &str) -> Result<Self, Unavailable> {
        let list = List::get(libs)?;
        let Some((device, name)) = list.devices().find(|(_, name)| name == wanted) else {
            let known: Vec<String> = list.devices().map(|(_, name)| name).collect();
            let name = wanted.to_owned();
            return Err(match known.is_empty() {
                true => no_device(),
                false => Unavailable::NoSuchDevice { name, known },
            });
        };
        // SAFETY: a device of the list, which is still there.
        let raw = unsafe { (libs.verbs.open_device)(device) };
        let Some(raw) = NonNull::new(raw) else {
            let what = format!("opening {wanted} (are /dev/infiniband/uverbs* there and allowed?)");
            return Err(system(what, last_errno()).into());
        };
        Ok(Self { libs, raw, name })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn raw(&self) -> *mut IbvContext {
        self.raw.as_ptr()
    }

    /// The descriptor of asynchronous events.
    pub(crate) fn async_fd(&self) -> RawFd {
        // SAFETY: open as long as `self` lives; the field does not change.
        unsafe { self.raw.as_ref() }.async_fd
    }

    /// The RoCEv2 addresses of all ports.
    pub(crate) fn gids(&self) -> Vec<Gid> {
        let empty =
            GidEntry { gid: [0; 16], gid_index: 0, port_num: 0, gid_type: 0, ndev_ifindex: 0 };
        let mut entries = vec![empty; GIDS];
        let query = self.libs.verbs.query_gid_table;
        // SAFETY: there is room for as many entries of this size.
        let count =
            unsafe { query(self.raw(), entries.as_mut_ptr(), GIDS, 0, size_of::<GidEntry>()) };
        entries.truncate(usize::try_from(count).unwrap_or(0));
        let gid = |entry: &GidEntry| {
            let index = u8::try_from(entry.gid_index).ok()?;
            let port = u8::try_from(entry.port_num).ok()?;
            Some(Gid { addr: Ipv6Addr::from(entry.gid).to_canonical(), index, port })
        };
        entries.iter().filter(|entry| entry.gid_type == GID_ROCE_V2).filter_map(gid).collect()
    }

    /// Name, addresses and limits; `max_inline` is left 0.
    pub(crate) fn attr(&self) -> Result<DeviceAttr, Error> {
        // SAFETY: numbers, for which zero is a value.
        let mut attr: IbvDeviceAttr = unsafe { zeroed() };
        // SAFETY: the context is open, `attr` may be written to.
        let result = unsafe { (self.libs.verbs.query_device)(self.raw(), &raw mut attr) };
        check(result)
            .map_err(|errno| system(format!("asking {} for its limits", self.name), errno))?;
        let mut mtu = None;
        for port in 1..=attr.phys_port_cnt {
            // SAFETY: as above.
            let mut state: PortAttr = unsafe { zeroed() };
            // SAFETY: as above.
            let result = unsafe { (self.libs.verbs.query_port)(self.raw(), port, &raw mut state) };
            if result == 0 && state.state == PORT_ACTIVE {
                mtu = u8::try_from(state.active_mtu).ok().and_then(Mtu::from_code);
                break;
            }
        }
        let gids = self.gids();
        let addrs = gids.iter().map(|gid| gid.addr).filter(|addr| match addr {
            IpAddr::V4(_) => true,
            IpAddr::V6(addr) => !addr.is_unicast_link_local(),
        });
        let size = |n: c_int| usize::try_from(n).unwrap_or(0);
        let rd_atomic = attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom).clamp(0, 255);
        Ok(DeviceAttr {
            name: self.name.clone(),
            provider: "rdma-core",
            guid: u64::from_be(attr.node_guid),
            addrs: addrs.collect(),
            mtu: mtu.unwrap_or(Mtu::M1024),
            max_qp: size(attr.max_qp),
            max_qp_wr: size(attr.max_qp_wr),
            max_sge: size(attr.max_sge),
            max_cq: size(attr.max_cq),
            max_cqe: size(attr.max_cqe),
            max_srq: 0,
            max_srq_wr: 0,
            max_srq_sge: 0,
            max_mr: size(attr.max_mr),
            max_mw: match CAP_WINDOWS.iter().any(|flag| attr.device_cap_flags & flag != 0) {
                true => size(attr.max_mw),
                false => 0,
            },
            max_qp_rd_atom: u8::try_from(rd_atomic).unwrap_or(u8::MAX),
            max_inline: 0,
            fast_registration: false,
            flush: false,
            key_refresh: false,
            inner_pds: false,
            burst: 0,
            lazy_cq: false,
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by `open`; everything made of it holds it and is gone.
        freed(unsafe { (self.libs.verbs.close_device)(self.raw()) }, "a device");
    }
}

/// Destination of datagrams, and the own address wanted as their source.
type Way = (IpAddr, Option<IpAddr>);

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) id: PdId,
    pub(crate) context: Arc<Context>,
    raw: NonNull<IbvPd>,
    /// Address handles: datagrams in flight need theirs, so they are kept.
    ahs: Mutex<HashMap<Way, NonNull<IbvAh>>>,
}

// SAFETY: libibverbs allows every call on it from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(crate) fn new(context: &Arc<Context>, id: PdId) -> Result<Self, Error> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.libs.verbs.alloc_pd)(context.raw()) };
        let raw =
            NonNull::new(raw).ok_or_else(|| limit(Resource::ProtectionDomains, last_errno()))?;
        Ok(Self { id, context: Arc::clone(context), raw, ahs: Mutex::default() })
    }

    pub(crate) fn raw(&self) -> *mut IbvPd {
        self.raw.as_ptr()
    }

    /// The handle of an address that datagrams go to, from this own address, or the first of its
    /// family.
    pub(crate) fn ah(&self, to: IpAddr, from: Option<IpAddr>) -> Result<*mut IbvAh, Error> {
        let mut ahs = self.ahs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = ahs.get(&(to, from)) {
            return Ok(known.as_ptr());
        }
        let gids = self.context.gids();
        let local = |own: &&Gid| matches!(own.addr, IpAddr::V6(a) if a.is_unicast_link_local());
        let wants_local = matches!(to, IpAddr::V6(a) if a.is_unicast_link_local());
        let mut own = gids.iter().filter(|own| own.addr.is_ipv4() == to.is_ipv4());
        let own = own.find(|own| match from {
            Some(from) => own.addr == from.to_canonical(),
            None => local(own) == wants_local,
        });
        let own = own.ok_or(Error::AddrNotAvailable)?;
        let mut attr = AhAttr {
            dgid: gid(to),
            sgid_index: own.index,
            hop_limit: HOPS,
            is_global: 1,
            port_num: own.port,
            ..AhAttr::default()
        };
        // SAFETY: the domain is there as long as `self`; `attr` is only read.
        let made = unsafe { (self.context.libs.verbs.create_ah)(self.raw(), &raw mut attr) };
        let made = NonNull::new(made).ok_or_else(|| match last_errno() {
            libc::ENOMEM | libc::ENOSPC => Error::Limit(Resource::AddressHandles),
            errno => system(format!("making a way to {to}"), errno),
        })?;
        ahs.insert((to, from), made);
        Ok(made.as_ptr())
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        let ahs = self.ahs.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, ah) in ahs.drain() {
            // SAFETY: made by `ah`; the queue pairs that sent by it hold the domain and are gone.
            freed(
                unsafe { (self.context.libs.verbs.destroy_ah)(ah.as_ptr()) },
                "an address handle",
            );
        }
        // SAFETY: allocated by `new`; what is in it holds it and is gone.
        freed(unsafe { (self.context.libs.verbs.dealloc_pd)(self.raw()) }, "a protection domain");
    }
}

/// A memory region.
#[derive(Debug)]
pub(crate) struct Mr {
    pub(crate) pd: Arc<Pd>,
    raw: NonNull<IbvMr>,
    /// It is deregistered.
    gone: bool,
    /// Keeps the memory.
    _buffer: Arc<Buffer>,
}

// SAFETY: libibverbs allows every call on it from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    pub(crate) fn new(
        pd: &Arc<Pd>,
        buffer: &Arc<Buffer>,
        offset: usize,
        len: usize,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Self, Error> {
        if offset.checked_add(len).is_none_or(|end| end > buffer.len()) {
            return Err(Error::Invalid(InvalidReason::OutsideBuffer));
        }
        let addr = buffer.addr() + offset as u64;
        let zero_based = access.contains(Access::ZERO_BASED);
        let iova = iova.unwrap_or(if zero_based { 0 } else { addr });
        // The address is given anyway, and most devices do not know the flag.
        let access = access.difference(Access::ZERO_BASED).bits();
        let reg_mr = pd.context.libs.verbs.reg_mr;
        // SAFETY: this memory stays mapped as long as the region, which holds the buffer; the
        // program reaches it through raw copies only, as `Buffer` says.
        let raw = unsafe { reg_mr(pd.raw(), addr as *mut c_void, len, iova, access) };
        let raw = NonNull::new(raw).ok_or_else(|| match last_errno() {
            libc::EINVAL => Error::Invalid(InvalidReason::RegionRefused),
            errno => {
                let what = format!(
                    "registering {len} bytes (is the limit of locked memory, ulimit -l, too low?)"
                );
                system(what, errno)
            }
        })?;
        Ok(Self { pd: Arc::clone(pd), raw, gone: false, _buffer: Arc::clone(buffer) })
    }

    pub(crate) fn keys(&self) -> MrKeys {
        // SAFETY: registered as long as `self` lives; the fields do not change.
        let mr = unsafe { self.raw.as_ref() };
        MrKeys { lkey: mr.lkey, rkey: mr.rkey }
    }

    pub(crate) fn raw(&self) -> *mut IbvMr {
        self.raw.as_ptr()
    }

    /// Deregisters it, unless a window is bound to it.
    pub(crate) fn deregister(&mut self) -> Result<(), Error> {
        // SAFETY: registered by `new`, and not deregistered: it is dropped after that.
        let result = unsafe { (self.pd.context.libs.verbs.dereg_mr)(self.raw()) };
        check(result).map_err(|errno| match errno {
            libc::EBUSY | libc::EINVAL => Error::Busy(Object::MemoryRegion),
            errno => system("deregistering memory", errno),
        })?;
        self.gone = true;
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        // SAFETY: registered by `new`; windows bound to it went before, or keep it until the device
        // is closed.
        freed(unsafe { (self.pd.context.libs.verbs.dereg_mr)(self.raw.as_ptr()) }, "a region");
    }
}
