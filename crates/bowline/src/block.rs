//! What blocks are stored in behind exports, and how programs and other software reach a disk.

pub use bowline_block::{
    Allocation, BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskHandle, DiskIo, Durable, Extent,
    LocalDevice,
};
pub use bowline_rnbd::{Discard, IoOp, Limits};

/// Storage behind exports: memory, files, block devices, and [stores](backend::Backend) of the
/// program.
pub mod backend {
    pub use bowline_block::backend::{
        Backend, BackendDone, BackendIo, BackendResult, BackendSpec, Filters, NbdUri, answer,
        filtered, open,
    };
}

/// Front ends of a disk, by which other software uses it.
pub mod front {
    /// A disk as a file in a directory, under FUSE.
    #[cfg(feature = "fuse")]
    pub mod fuse {
        pub use bowline_block::front::fuse::{FuseOptions, Handed, Mount, mount, resume};
    }

    /// A disk behind a unix socket that speaks NBD.
    pub mod nbd {
        pub use bowline_block::front::nbd::{
            Format, Handed, HandedClient, NbdOptions, NbdServer, Session, resume, serve,
        };
    }

    /// A disk as a block device of this machine (Linux 6.4 with `ublk_drv`, root).
    pub mod ublk {
        pub use bowline_block::front::ublk::{
            DeviceId, Ublk, UblkOptions, attach, attach_recoverable, remove, resume,
        };
    }

    /// A disk for virtual machines, by vhost-user.
    pub mod vhost_user {
        pub use bowline_block::front::vhost_user::{VhostUserOptions, VhostUserServer, serve};
    }
}
