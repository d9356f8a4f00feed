//! The file front end again, by io_uring: the parameter of the kernel's module is set during these
//! tests.

#[path = "fuse.rs"]
mod fuse;
