//! The file front end again, by io_uring: the kernel's module is told to offer it meanwhile.

#[path = "fuse.rs"]
mod fuse;
