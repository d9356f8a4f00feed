//! RNBD over RTRS: exports served to clients, and disks of other machines as block devices.

pub mod tree;
