//! Waits for a node in which a thread may be cancelled, as in any call of the C library that waits.
//! The channel is closed then: a node that finds it closed drops the call, and with it a message
//! that waits for room.

use core::ffi::{c_int, c_void};
use core::ptr;

use bowline_host_client::system;

use crate::real::{Hidden, errno, hidden};
use crate::{filters, table};

/// What the C library keeps of a function that is called when a thread ends: four words in glibc,
/// three in musl.
#[repr(C)]
struct Kept([usize; 4]);

type Push = unsafe extern "C" fn(*mut Kept, unsafe extern "C" fn(*mut c_void), *mut c_void);
type Pop = unsafe extern "C" fn(*mut Kept, c_int);

static PUSH: Hidden = Hidden::named("_pthread_cleanup_push\0");
static POP: Hidden = Hidden::named("_pthread_cleanup_pop\0");

unsafe extern "C" fn end(channel: *mut c_void) {
    let fd = channel.addr() as c_int;
    table::forget(fd);
    system::close(fd);
}

/// Waits until something comes on the descriptor of a channel.
///
/// # Errors
/// EINTR when a signal has come first.
pub(crate) fn wait(fd: c_int) -> Result<(), c_int> {
    let (push, pop) = (PUSH.address(), POP.address());
    if push.is_null() || pop.is_null() || filters::is_filtered() {
        return Ok(());
    }
    // SAFETY: the C library's function of this name has this signature.
    let push = unsafe { core::mem::transmute::<*mut c_void, Push>(push) };
    // SAFETY: as above.
    let pop = unsafe { core::mem::transmute::<*mut c_void, Pop>(pop) };
    let mut kept = Kept([0; 4]);
    // SAFETY: `kept` stays until `pop`, or until the thread ends, which calls `end` before its
    // stack is gone.
    unsafe { push(&raw mut kept, end, ptr::without_provenance_mut(fd as usize)) };
    let mut byte = 0_u8;
    let (to, len, flags) = ((&raw mut byte).cast::<c_void>(), 1, libc::MSG_PEEK);
    let got: isize = hidden!(recv(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> isize);
    let waited = if got < 0 { Err(errno()) } else { Ok(()) };
    // SAFETY: `kept` was pushed last.
    unsafe { pop(&raw mut kept, 0) };
    waited
}
