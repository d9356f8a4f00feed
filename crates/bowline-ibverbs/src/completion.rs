//! Completion queues, and the channels that report completions.

use core::cell::RefCell;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::Relaxed};
use core::{mem, ptr};
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use bowline_base::clock;
use bowline_verbs::{Completion, CqId, Device as _, Error};

use crate::abi::{CompChannel, Context, Cq, CqInitAttrEx, Wc};
use crate::device::{Handle, Opened, end_events};
use crate::events::{Events, Unacknowledged, lock};
use crate::{ended, failed, fails, made, none, outcome};

/// `enum ibv_wc_flags`.
const WC_GRH: c_uint = 1;
const WC_WITH_IMM: c_uint = 2;
const WC_WITH_INV: c_uint = 8;
/// `enum ibv_create_cq_wc_flags`: what completions can be asked for.
const EX_FLAGS: u64 = 0x7f | EX_TIMESTAMP | EX_WALLCLOCK;
const EX_TIMESTAMP: u64 = 1 << 7;
const EX_WALLCLOCK: u64 = 1 << 11;

/// What is kept for a channel.
pub(crate) type Channel = Events<Handle<Cq>>;

/// What is kept for a queue.
#[derive(Debug)]
pub(crate) struct Own {
    pub(crate) id: CqId,
    opened: Arc<Opened>,
    pub(crate) unacknowledged: Unacknowledged,
    /// Completion events, which are acknowledged apart.
    completion_events: Unacknowledged,
    /// The completion that an extended poll looks at.
    current: Mutex<(Completion, u64)>,
}

thread_local! {
    /// Completions on their way to the program.
    static POLLED: RefCell<Vec<Completion>> = const { RefCell::new(Vec::new()) };
}

/// Gives room for completions: the thread's own, which a thread that ends has no more.
fn polled<T>(with: impl FnOnce(&mut Vec<Completion>) -> T) -> T {
    let mut with = Some(with);
    let mut call = |room: &mut Vec<Completion>| {
        room.clear();
        with.take().map(|with| with(room))
    };
    let done =
        POLLED.try_with(|room| room.try_borrow_mut().ok().and_then(|mut room| call(&mut room)));
    match done.ok().flatten() {
        Some(done) => done,
        None => match call(&mut Vec::new()) {
            Some(done) => done,
            None => unreachable!("called once"),
        },
    }
}

/// Reports to the channel of a queue that it has a completion.
pub(crate) fn report(cq: &Cq) {
    // SAFETY: a channel is not destroyed before the queues that it is of.
    if let Some(channel) = unsafe { cq.channel.as_ref() } {
        cq.own.completion_events.add();
        channel.own.push(Handle(cq));
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_comp_channel(context: Option<&Context>) -> *mut CompChannel {
    let Some(context) = context else { return none(libc::EINVAL) };
    match Events::new() {
        Ok(own) => made(CompChannel { context, fd: own.fd(), refcnt: AtomicI32::new(0), own }),
        Err(errno) => none(errno.raw_os_error()),
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    // SAFETY: null or made by `ibv_create_comp_channel`.
    let Some(at) = (unsafe { channel.as_ref() }) else { return fails(libc::EINVAL) };
    if at.refcnt.load(Relaxed) > 0 {
        return fails(libc::EBUSY);
    }
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(channel) });
    0
}

fn create(
    context: &Context,
    cqe: usize,
    cq_context: *mut c_void,
    channel: Option<&CompChannel>,
    comp_vector: i64,
) -> *mut Cq {
    let opened = &context.own.opened;
    if cqe == 0 || cqe > opened.attr.max_cqe || !(0..1).contains(&comp_vector) {
        return none(libc::EINVAL);
    }
    let id = match opened.soft.create_cq(cqe) {
        Ok(id) => id,
        Err(error) => {
            failed(&error);
            return ptr::null_mut();
        }
    };
    if let Some(channel) = channel {
        channel.refcnt.fetch_add(1, Relaxed);
    }
    // SAFETY: numbers and pointers, for which zeroes are good.
    let (mutex, cond) = unsafe { mem::zeroed() };
    let cq = made(Cq {
        context,
        channel: channel.map_or(ptr::null(), ptr::from_ref),
        cq_context,
        handle: id.0,
        cqe: AtomicI32::new(cqe as c_int), // below the device's limit
        mutex,
        cond,
        comp_events_completed: AtomicU32::new(0),
        async_events_completed: AtomicU32::new(0),
        comp_mask: 0,
        status: AtomicU32::new(0),
        wr_id: AtomicU64::new(0),
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_byte_len: Some(read_byte_len),
        read_imm_data: Some(read_imm_data),
        read_qp_num: Some(read_qp_num),
        read_src_qp: Some(read_src_qp),
        read_wc_flags: Some(read_wc_flags),
        read_slid: Some(read_slid),
        read_sl: Some(read_sl),
        read_dlid_path_bits: Some(read_dlid_path_bits),
        read_completion_ts: Some(read_completion_ts),
        read_cvlan: Some(read_cvlan),
        read_flow_tag: Some(read_flow_tag),
        read_tm_info: ptr::null(),
        read_completion_wallclock_ns: Some(read_completion_wallclock_ns),
        own: Own {
            id,
            opened: Arc::clone(opened),
            unacknowledged: Unacknowledged::default(),
            completion_events: Unacknowledged::default(),
            current: Mutex::default(),
        },
    });
    lock(&opened.live.0).cqs.insert(id.0, Handle(cq));
    cq
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_create_cq(
    context: Option<&Context>,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: Option<&CompChannel>,
    comp_vector: c_int,
) -> *mut Cq {
    let Some(context) = context else { return none(libc::EINVAL) };
    create(context, usize::try_from(cqe).unwrap_or(0), cq_context, channel, comp_vector.into())
}

pub(crate) extern "C" fn create_cq_ex(
    context: Option<&Context>,
    attr: Option<&CqInitAttrEx<'_>>,
) -> *mut Cq {
    let (Some(context), Some(attr)) = (context, attr) else { return none(libc::EINVAL) };
    // Known: flags (one thread only; overrun is no matter) and a domain.
    if attr.wc_flags & !EX_FLAGS != 0 || attr.comp_mask & !3 != 0 {
        return none(libc::EOPNOTSUPP);
    }
    create(context, attr.cqe as usize, attr.cq_context, attr.channel, attr.comp_vector.into())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_resize_cq(cq: Option<&Cq>, cqe: c_int) -> c_int {
    let (Some(cq), Ok(depth)) = (cq, usize::try_from(cqe)) else { return fails(libc::EINVAL) };
    match cq.own.opened.soft.resize_cq(cq.own.id, depth) {
        Ok(()) => {
            cq.cqe.store(cqe, Relaxed);
            0
        }
        Err(Error::Limit(_)) => fails(libc::EINVAL),
        Err(error) => failed(&error),
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: null or made by `create`.
    let Some(at) = (unsafe { cq.as_ref() }) else { return fails(libc::EINVAL) };
    let opened = Arc::clone(&at.own.opened);
    if let Err(error) = ended(opened.soft.destroy_cq(at.own.id)) {
        return failed(&error);
    }
    lock(&opened.live.0).cqs.remove(&at.own.id.0);
    // SAFETY: a channel is not destroyed before its queues.
    if let Some(channel) = unsafe { at.channel.as_ref() } {
        at.own.completion_events.acknowledge(channel.own.take_back(|of| ptr::eq(of.0, cq)));
        at.own.completion_events.wait_for_all();
        channel.refcnt.fetch_sub(1, Relaxed);
    }
    // SAFETY: a context is closed after its objects are destroyed.
    let context = unsafe { &*at.context };
    end_events(&context.own, cq as usize, &at.own.unacknowledged);
    // SAFETY: given back once.
    drop(unsafe { Box::from_raw(cq) });
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_get_cq_event(
    channel: Option<&CompChannel>,
    out: Option<&mut *const Cq>,
    out_context: Option<&mut *mut c_void>,
) -> c_int {
    let Some(channel) = channel else {
        fails(libc::EINVAL);
        return -1;
    };
    match channel.own.next() {
        Ok(cq) => {
            if let Some(out_context) = out_context {
                // SAFETY: a queue waits with its end until its events are acknowledged.
                *out_context = unsafe { &*cq.0 }.cq_context;
            }
            if let Some(out) = out {
                *out = cq.0;
            }
            0
        }
        Err(errno) => {
            fails(errno.raw_os_error());
            -1
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(cq: Option<&Cq>, number: c_uint) {
    if let Some(cq) = cq {
        cq.comp_events_completed.fetch_add(number, Relaxed);
        cq.own.completion_events.acknowledge(number);
    }
}

pub(crate) extern "C" fn req_notify_cq(cq: Option<&Cq>, solicited_only: c_int) -> c_int {
    let Some(cq) = cq else { return fails(libc::EINVAL) };
    outcome(cq.own.opened.soft.notify_cq(cq.own.id, solicited_only != 0))
}

fn flags(of: &Completion) -> c_uint {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    flag(of.grh, WC_GRH)
        | flag(of.imm.is_some(), WC_WITH_IMM)
        | flag(of.invalidated.is_some(), WC_WITH_INV)
}

fn imm_or_key(of: &Completion) -> u32 {
    of.imm.map_or_else(|| of.invalidated.unwrap_or(0), u32::to_be)
}

fn entry(of: &Completion) -> Wc {
    Wc {
        wr_id: of.wr_id,
        status: of.status as c_uint,
        opcode: of.opcode as c_uint,
        byte_len: of.byte_len,
        imm_or_key: imm_or_key(of),
        qp_num: of.qpn.0,
        src_qp: of.src_qp.0,
        wc_flags: flags(of),
        ..Wc::default()
    }
}

pub(crate) extern "C" fn poll_cq(cq: Option<&Cq>, number: c_int, out: *mut Wc) -> c_int {
    let (Some(cq), Ok(most)) = (cq, usize::try_from(number)) else { return -1 };
    polled(|polled| {
        if cq.own.opened.soft.poll_cq(cq.own.id, polled, most).is_err() {
            return -1;
        }
        for (at, completion) in polled.iter().enumerate() {
            // SAFETY: the program has room for `number` entries, and there are no more.
            unsafe { out.wrapping_add(at).write(entry(completion)) };
        }
        polled.len() as c_int // at most `number`
    })
}

/// Takes the next completion to look at.
fn next(cq: &Cq) -> c_int {
    polled(|polled| {
        if let Err(error) = cq.own.opened.soft.poll_cq(cq.own.id, polled, 1) {
            return failed(&error);
        }
        let Some(completion) = polled.first() else { return libc::ENOENT };
        cq.status.store(completion.status as u32, Relaxed);
        cq.wr_id.store(completion.wr_id, Relaxed);
        *lock(&cq.own.current) = (*completion, clock::now().as_nanos());
        0
    })
}

fn current<T: Default>(cq: Option<&Cq>, part: impl FnOnce(&Completion) -> T) -> T {
    cq.map_or_else(T::default, |cq| part(&lock(&cq.own.current).0))
}

extern "C" fn start_poll(cq: Option<&Cq>, _attr: *const c_void) -> c_int {
    cq.map_or_else(|| fails(libc::EINVAL), next)
}

extern "C" fn next_poll(cq: Option<&Cq>) -> c_int {
    cq.map_or_else(|| fails(libc::EINVAL), next)
}

extern "C" fn end_poll(_cq: Option<&Cq>) {}

extern "C" fn read_opcode(cq: Option<&Cq>) -> c_uint {
    current(cq, |of| of.opcode as c_uint)
}

extern "C" fn read_vendor_err(_cq: Option<&Cq>) -> u32 {
    0
}

extern "C" fn read_byte_len(cq: Option<&Cq>) -> u32 {
    current(cq, |of| of.byte_len)
}

extern "C" fn read_imm_data(cq: Option<&Cq>) -> u32 {
    current(cq, imm_or_key)
}

extern "C" fn read_qp_num(cq: Option<&Cq>) -> u32 {
    current(cq, |of| of.qpn.0)
}

extern "C" fn read_src_qp(cq: Option<&Cq>) -> u32 {
    current(cq, |of| of.src_qp.0)
}

extern "C" fn read_wc_flags(cq: Option<&Cq>) -> c_uint {
    current(cq, flags)
}

extern "C" fn read_slid(_cq: Option<&Cq>) -> u32 {
    0
}

extern "C" fn read_sl(_cq: Option<&Cq>) -> u8 {
    0
}

extern "C" fn read_dlid_path_bits(_cq: Option<&Cq>) -> u8 {
    0
}

/// In nanoseconds of the clock of `ibv_query_rt_values_ex`.
extern "C" fn read_completion_ts(cq: Option<&Cq>) -> u64 {
    cq.map_or(0, |cq| lock(&cq.own.current).1)
}

extern "C" fn read_cvlan(_cq: Option<&Cq>) -> u16 {
    0
}

extern "C" fn read_flow_tag(_cq: Option<&Cq>) -> u32 {
    0
}

extern "C" fn read_completion_wallclock_ns(cq: Option<&Cq>) -> u64 {
    let age = cq.map_or(0, |cq| clock::now().as_nanos() - lock(&cq.own.current).1);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_nanos() as u64).saturating_sub(age) // good for 500 years
}
