//! Calls for what connections here do not have: datagrams with their groups, queue pairs that a
//! program leads through its states, and sockets over RDMA.

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
    rdma_establish,
    rdma_init_qp_attr,
    rdma_get_remote_ece,
    rdma_set_local_ece,
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
