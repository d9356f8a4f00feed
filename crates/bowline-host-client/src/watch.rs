//! Watching memory of this process that calls have given to nodes:
//! [`bowline_host_wire::watch`].

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};

use bowline_host_wire::watch::{self as wire, API, FLAGS, LOOK, REGISTER, Room, api, insist, look};

use crate::channel::Descriptors;
use crate::system::{self, system};

/// What watches the memory of a process: the number of the process above 32 bits of the descriptor.
/// One for all, since a mapping has one only.
static OWN: AtomicU64 = AtomicU64::new(0);

/// The `userfaultfd` of this process, which is made when it is needed first; `None` if the system
/// refuses one.
pub(crate) fn own<D: Descriptors>() -> Option<c_int> {
    if !D::are_kept() {
        return None; // another process has this memory
    }
    let pid = system::getpid();
    // Pairs with the exchange below: who has the number has the descriptor.
    let known = OWN.load(Ordering::Acquire);
    if (known >> 32) as c_int == pid {
        return Some(known as u32 as c_int);
    }
    let made = D::opened(make().ok()?);
    let word = (pid as u64) << 32 | made as u64;
    // Release: as above. Acquire: the descriptor that another thread has made.
    match OWN.compare_exchange(known, word, Ordering::AcqRel, Ordering::Acquire) {
        Ok(before) => {
            // That of a parent is open in its child.
            if before != 0 {
                close::<D>(before as u32 as c_int);
            }
            Some(made)
        }
        Err(theirs) => {
            close::<D>(made);
            Some(theirs as u32 as c_int)
        }
    }
}

/// What [`own`] has made before.
pub(crate) fn known() -> Option<c_int> {
    // Pairs with the exchange in `own`.
    let known = OWN.load(Ordering::Acquire);
    ((known >> 32) as c_int == system::getpid()).then_some(known as u32 as c_int)
}

/// Forgets the descriptor if it is one of these numbers, which are about to be the program's.
pub(crate) fn make_way<D: Descriptors>(is_in: impl Fn(c_int) -> bool) {
    // Pairs as above.
    let known = OWN.load(Ordering::Acquire);
    if known != 0
        && is_in(known as u32 as c_int)
        && OWN.compare_exchange(known, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    {
        close::<D>(known as u32 as c_int);
    }
}

fn close<D: Descriptors>(fd: c_int) {
    D::closes(fd);
    system::close(fd);
}

fn make() -> Result<c_int, c_int> {
    let fd = system!(SYS_userfaultfd, FLAGS)? as c_int;
    let mut version = api();
    match system!(SYS_ioctl, fd, API, ptr::from_mut(&mut version)) {
        Ok(_) => Ok(fd),
        Err(errno) => {
            system::close(fd);
            Err(errno)
        }
    }
}

/// Watches a range from now on; `false` where the system refuses.
pub(crate) fn begin(watch: c_int, room: &Room) -> Result<bool, c_int> {
    wire::begin(room, |range| system!(SYS_ioctl, watch, REGISTER, ptr::from_mut(range)).map(drop))
}

/// Tells whether a range is what it was when it was first watched.
pub(crate) fn is_there(watch: c_int, at: u64, len: u64) -> bool {
    let look_at = |range: &mut [u64; 3]| {
        insist(|| system!(SYS_ioctl, watch, LOOK, ptr::from_mut(range)).map(drop)).is_ok()
    };
    look(at, len).is_some_and(|mut range| look_at(&mut range))
}
