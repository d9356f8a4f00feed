//! Calls for what there is not: multicast groups, and sockets over RDMA.

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
    rdma_join_multicast,
    rdma_join_multicast_ex,
    rdma_leave_multicast,
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
