//! Storage behind exports (memory, files, block devices), and doors in front of disks (NBD, FUSE, ublk).
