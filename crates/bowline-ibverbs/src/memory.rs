//! Protection domains, memory regions and memory windows.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use bowline_verbs::{Access, Buffer, Device as _, MrKeys, MwType, PdId, SendFlags, Sge};

use crate::abi::{Context, Mr, Mw, MwBind, MwBindInfo, ParentDomainInitAttr, Pd, Qp, Td};
use crate::device::Opened;
use crate::events::lock;
use crate::{ended, failed, fails, made, none};

/// `IBV_ACCESS_ON_DEMAND`.
const ON_DEMAND: u32 = 1 << 6;
/// `IBV_ACCESS_HUGETLB`, advice.
const HUGETLB: u32 = 1 << 7;
/// `IBV_ACCESS_OPTIONAL_RANGE`: rights that may be ignored.
const OPTIONAL: u32 = 0x3ff << 20;
/// Rights by which a region is written.
const WRITES: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);

/// `MADV_POPULATE_READ` and `MADV_POPULATE_WRITE` (Linux 5.14).
const POPULATE_READ: c_int = 22;
const POPULATE_WRITE: c_int = 23;
const PAGE: usize = 4096;

/// `enum ibv_rereg_mr_flags`.
const CHANGE_TRANSLATION: c_int = 1;
const CHANGE_PD: c_int = 2;
const CHANGE_ACCESS: c_int = 4;
/// `IBV_REREG_MR_ERR_INPUT`: the region is as it was.
const REREG_ERR_INPUT: c_int = -1;

/// What is kept for a protection domain.
#[derive(Debug)]
pub(crate) struct PdOwn {
    pub(crate) opened: Arc<Opened>,
    pub(crate) id: PdId,
    /// It stands for another one, whose id it has.
    is_parent: bool,
}

/// What is kept for a region.
#[derive(Debug)]
pub(crate) struct MrOwn {
    opened: Arc<Opened>,
    access: Access,
    iova: u64,
    pd: PdId,
}

/// What is kept for a window.
#[derive(Debug)]
pub(crate) struct MwOwn {
    opened: Arc<Opened>,
    /// The region it was bound to last.
    region: Mutex<u32>,
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_alloc_pd(context: Option<&Context>) -> *mut Pd {
    let Some(context) = context else { return none(libc::EINVAL) };
    let opened = &context.own.opened;
    match opened.soft.alloc_pd() {
        Ok(id) => {
            let own = PdOwn { opened: Arc::clone(opened), id, is_parent: false };
            made(Pd { context, handle: id.0, own })
        }
        Err(error) => none(error.errno().0),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: null or made here.
    let Some(at) = (unsafe { pd.as_ref() }) else { return fails(libc::EINVAL) };
    if !at.own.is_parent
        && let Err(error) = ended(at.own.opened.soft.dealloc_pd(at.own.id))
    {
        return failed(&error);
    }
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(pd) });
    0
}

pub(crate) extern "C" fn alloc_parent_domain(
    context: Option<&Context>,
    attr: Option<&ParentDomainInitAttr<'_>>,
) -> *mut Pd {
    let (Some(context), Some(attr)) = (context, attr) else { return none(libc::EINVAL) };
    let Some(pd) = attr.pd else { return none(libc::EINVAL) };
    // Allocators and their context are for memory that this library does not need.
    if attr.comp_mask & !3 != 0 {
        return none(libc::EINVAL);
    }
    let own = PdOwn { opened: Arc::clone(&pd.own.opened), id: pd.own.id, is_parent: true };
    made(Pd { context, handle: pd.handle, own })
}

pub(crate) extern "C" fn alloc_td(context: Option<&Context>, attr: *const c_void) -> *mut Td {
    match context {
        Some(context) if !attr.is_null() => made(Td { context }),
        _ => none(libc::EINVAL),
    }
}

pub(crate) extern "C" fn dealloc_td(td: *mut Td) -> c_int {
    if td.is_null() {
        return fails(libc::EINVAL);
    }
    // SAFETY: made by `alloc_td`, and given back once.
    drop(unsafe { Box::from_raw(td) });
    0
}

/// Rights as C has them.
fn rights(access: u32) -> Result<Access, c_int> {
    if access & ON_DEMAND != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let access = Access::from_bits(access & !OPTIONAL & !HUGETLB).ok_or(libc::EINVAL)?;
    let needs_local = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if needs_local && !access.contains(Access::LOCAL_WRITE) {
        return Err(libc::EINVAL);
    }
    Ok(access)
}

/// Has the pages of a range made, as a device that pins them would.
fn populate(addr: *mut c_void, len: usize, access: Access) -> Result<(), c_int> {
    let start = addr.map_addr(|at| at & !(PAGE - 1));
    let len = len + (addr.addr() - start.addr());
    let advice = if access.intersects(WRITES) { POPULATE_WRITE } else { POPULATE_READ };
    // SAFETY: pages are made or not; nothing in them changes.
    let advise = |len| unsafe { libc::madvise(start, len, advice) };
    if advise(len) == 0 {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error() {
        // A kernel that does not know the advice refuses it for no memory at all, too.
        Some(libc::EINVAL) if advise(0) != 0 => Ok(()),
        Some(libc::EINVAL | libc::ENOMEM | libc::EFAULT) => Err(libc::EFAULT),
        errno => Err(errno.unwrap_or(libc::EFAULT)),
    }
}

/// Memory of the program that is to be registered.
///
/// # Safety
/// It stays mapped until the buffer is dropped.
pub(crate) unsafe fn given(addr: *mut c_void, len: usize, access: Access) -> Result<Buffer, c_int> {
    if addr.addr().checked_add(len).is_none() {
        return Err(libc::EINVAL);
    }
    populate(addr, len, access)?;
    // SAFETY: as this function's.
    let buffer = unsafe { Buffer::from_program(addr.cast(), len) }.ok_or(libc::EINVAL)?;
    // A peer's payload that is placed before it is checked would be seen by a program that looks at
    // the memory instead of waiting for a completion.
    Ok(if access.contains(Access::REMOTE_WRITE) {
        buffer.without_direct_placement()
    } else {
        buffer
    })
}

/// The program's memory, as a device has it.
fn memory(addr: *mut c_void, len: usize, access: Access) -> Result<Arc<Buffer>, c_int> {
    // SAFETY: the program keeps what it has registered until it deregisters it.
    unsafe { given(addr, len, access) }.map(Arc::new)
}

fn new_region(
    pd: Option<&Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut Mr {
    let Some(pd) = pd else { return none(libc::EINVAL) };
    let registered = rights(access).and_then(|access| {
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        let buffer = memory(addr, length, access)?;
        let PdOwn { opened, id, .. } = &pd.own;
        let keys = opened.soft.reg_mr(*id, &buffer, 0, length, Some(iova), access);
        Ok((access, iova, keys.map_err(|error| error.errno().0)?))
    });
    match registered {
        Ok((access, iova, MrKeys { lkey, rkey })) => {
            let own = MrOwn { opened: Arc::clone(&pd.own.opened), access, iova, pd: pd.own.id };
            made(Mr { context: pd.context, pd, addr, length, handle: lkey, lkey, rkey, own })
        }
        Err(errno) => none(errno),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr(
    pd: Option<&Pd>,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut Mr {
    new_region(pd, addr, length, addr as u64, access.cast_unsigned())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr_iova(
    pd: Option<&Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut Mr {
    new_region(pd, addr, length, iova, access.cast_unsigned())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr_iova2(
    pd: Option<&Pd>,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    new_region(pd, addr, length, iova, access)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: null or made here.
    let Some(at) = (unsafe { mr.as_ref() }) else { return fails(libc::EINVAL) };
    if let Err(error) = ended(at.own.opened.soft.dereg_mr(at.lkey)) {
        return failed(&error);
    }
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(mr) });
    0
}

/// Registers the region again with what changes. It keeps its keys.
#[unsafe(no_mangle)]
extern "C" fn ibv_rereg_mr(
    mr: Option<&mut Mr>,
    flags: c_int,
    pd: Option<&Pd>,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let refuse = |errno| {
        fails(errno);
        REREG_ERR_INPUT
    };
    let Some(mr) = mr else { return refuse(libc::EINVAL) };
    if flags == 0 || flags & !(CHANGE_TRANSLATION | CHANGE_PD | CHANGE_ACCESS) != 0 {
        return refuse(libc::EINVAL);
    }
    let new_pd = if flags & CHANGE_PD == 0 {
        mr.own.pd
    } else {
        let Some(pd) = pd else { return refuse(libc::EINVAL) };
        pd.own.id
    };
    let new_access = if flags & CHANGE_ACCESS == 0 {
        mr.own.access
    } else {
        match rights(access.cast_unsigned()) {
            Ok(access) => access,
            Err(errno) => return refuse(errno),
        }
    };
    let (addr, length, iova) = if flags & CHANGE_TRANSLATION == 0 {
        (mr.addr, mr.length, mr.own.iova)
    } else {
        (addr, length, addr as u64)
    };
    let buffer = match memory(addr, length, new_access) {
        Ok(buffer) => buffer,
        Err(errno) => return refuse(errno),
    };
    let region = (&buffer, 0, length);
    let soft = &mr.own.opened.soft;
    if let Err(error) = soft.rereg_mr(mr.lkey, new_pd, region, Some(iova), new_access) {
        return refuse(error.errno().0);
    }
    (mr.addr, mr.length) = (addr, length);
    (mr.own.access, mr.own.iova, mr.own.pd) = (new_access, iova, new_pd);
    if let Some(pd) = pd.filter(|_| flags & CHANGE_PD != 0) {
        mr.pd = pd;
    }
    0
}

/// Advice on memory that is fetched on demand, which no region is.
pub(crate) extern "C" fn advise_mr(
    _pd: Option<&Pd>,
    _advice: c_uint,
    _flags: u32,
    _list: *const Sge,
    _count: u32,
) -> c_int {
    fails(libc::EOPNOTSUPP)
}

pub(crate) extern "C" fn alloc_mw(pd: Option<&Pd>, kind: c_uint) -> *mut Mw {
    let Some(pd) = pd else { return none(libc::EINVAL) };
    let of = match kind {
        1 => MwType::Type1,
        2 => MwType::Type2,
        _ => return none(libc::EINVAL),
    };
    let opened = &pd.own.opened;
    match opened.soft.alloc_mw(pd.own.id, of) {
        Ok(rkey) => {
            let own = MwOwn { opened: Arc::clone(opened), region: Mutex::default() };
            made(Mw {
                context: pd.context,
                pd,
                rkey: AtomicU32::new(rkey),
                handle: rkey,
                kind,
                own,
            })
        }
        Err(error) => none(error.errno().0),
    }
}

pub(crate) extern "C" fn dealloc_mw(mw: *mut Mw) -> c_int {
    // SAFETY: null or made by `alloc_mw`.
    let Some(at) = (unsafe { mw.as_ref() }) else { return fails(libc::EINVAL) };
    if let Err(error) = ended(at.own.opened.soft.dealloc_mw(at.rkey.load(Relaxed))) {
        return failed(&error);
    }
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(mw) });
    0
}

/// What a window is to be bound to; `None` for rights that there are not.
pub(crate) fn binding(info: &MwBindInfo<'_>) -> Option<bowline_verbs::MwBind> {
    let access = Access::from_bits(info.access)?;
    let lkey = info.mr.map_or(0, |mr| mr.lkey);
    Some(bowline_verbs::MwBind { lkey, addr: info.addr, len: info.length, access })
}

pub(crate) extern "C" fn bind_mw(
    qp: Option<&Qp>,
    mw: Option<&Mw>,
    bind: Option<&MwBind<'_>>,
) -> c_int {
    let (Some(qp), Some(mw), Some(bind)) = (qp, mw, bind) else { return fails(libc::EINVAL) };
    let Some(mut to) = binding(&bind.bind_info) else { return fails(libc::EINVAL) };
    let mut region = lock(&mw.own.region);
    if bind.bind_info.mr.is_none() {
        to.lkey = *region;
    }
    let flags = SendFlags::from_bits_truncate(bind.send_flags);
    let window = mw.rkey.load(Relaxed);
    match mw.own.opened.soft.bind_mw(qp.own.qpn, window, bind.wr_id, &to, flags) {
        Ok(key) => {
            *region = to.lkey;
            mw.rkey.store(key, Relaxed);
            0
        }
        Err(error) => failed(&error),
    }
}

/// Shared memory of another process is not given away here.
#[unsafe(no_mangle)]
extern "C" fn ibv_reg_dmabuf_mr(
    _pd: Option<&Pd>,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut Mr {
    none(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_pd(_context: Option<&Context>, _handle: u32) -> *mut Pd {
    none(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_pd(_pd: Option<&Pd>) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_mr(_pd: Option<&Pd>, _handle: u32) -> *mut Mr {
    none(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_mr(_mr: Option<&Mr>) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_import_dm(_context: Option<&Context>, _handle: u32) -> *mut c_void {
    none(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
extern "C" fn ibv_unimport_dm(_dm: *mut c_void) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_those_of_the_kernel() {
        assert_eq!(rights(1), Ok(Access::LOCAL_WRITE));
        assert_eq!(rights(2), Err(libc::EINVAL), "a peer may not write what this side may not");
        assert_eq!(rights(3 | 1 << 20 | 1 << 7), Ok(Access::LOCAL_WRITE | Access::REMOTE_WRITE));
        assert_eq!(rights(1 | 1 << 6), Err(libc::EOPNOTSUPP));
        assert_eq!(rights(1 << 19), Err(libc::EINVAL));
    }

    #[test]
    fn only_memory_that_is_there_is_registered() {
        let mut memory = vec![0_u8; 3 * PAGE];
        let at = memory.as_mut_ptr().cast::<c_void>();
        assert_eq!(populate(at, memory.len(), Access::LOCAL_WRITE), Ok(()));
        assert_eq!(
            populate(core::ptr::without_provenance_mut(PAGE), 1, Access::LOCAL_WRITE),
            Err(libc::EFAULT)
        );
        let text = populate as *mut c_void;
        assert_eq!(
            populate(text, 1, Access::LOCAL_WRITE),
            Err(libc::EFAULT),
            "it may not be written"
        );
        assert_eq!(populate(text, 1, Access::REMOTE_READ), Ok(()));
    }
}
