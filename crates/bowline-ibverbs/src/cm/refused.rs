//! Calls for what there is not: sockets over RDMA.

use core::ffi::c_int;

use super::ids::refuse;

macro_rules! refused {
    ($($name:ident),+ $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> c_int {
                refuse(libc::EOPNOTSUPP)
            }
        )+
    };
}

refused! {
    rsocket,
    rbind,
    rlisten,
    raccept,
    rconnect,
    rshutdown,
    rclose,
    rpoll,
    rselect,
    rgetpeername,
    rgetsockname,
    rsetsockopt,
    rgetsockopt,
    rfcntl,
    riounmap,
}

macro_rules! refused_long {
    ($($name:ident),+ $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name() -> isize {
                refuse(libc::EOPNOTSUPP) as isize
            }
        )+
    };
}

refused_long! {
    rrecv,
    rrecvfrom,
    rrecvmsg,
    rsend,
    rsendto,
    rsendmsg,
    rread,
    rreadv,
    rwrite,
    rwritev,
    riomap,
    riowrite,
}
