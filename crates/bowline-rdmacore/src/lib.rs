//! The verbs of `bowline-verbs` on RDMA devices, through libibverbs and librdmacm opened at run time.
