//! Error numbers of Linux that attributes answer with.

/// A positive error number of Linux.
pub type Errno = i32;

/// Not permitted.
pub const EPERM: Errno = 1;
/// No such attribute or object.
pub const ENOENT: Errno = 2;
/// The thing behind a door broke.
pub const EIO: Errno = 5;
/// No such device or address.
pub const ENXIO: Errno = 6;
/// Too many commands at a time.
pub const EAGAIN: Errno = 11;
/// No memory.
pub const ENOMEM: Errno = 12;
/// The mode of the attribute forbids it.
pub const EACCES: Errno = 13;
/// In use.
pub const EBUSY: Errno = 16;
/// There is one already.
pub const EEXIST: Errno = 17;
/// No such device.
pub const ENODEV: Errno = 19;
/// Not a directory.
pub const ENOTDIR: Errno = 20;
/// A directory.
pub const EISDIR: Errno = 21;
/// Not a value this attribute takes.
pub const EINVAL: Errno = 22;
/// A number too large.
pub const ERANGE: Errno = 34;
/// Links that lead in circles.
pub const ELOOP: Errno = 40;
/// Not a kind of address that is known.
pub const EPROTONOSUPPORT: Errno = 93;
/// No path is connected.
pub const ENOTCONN: Errno = 107;
/// Nobody answered in time.
pub const ETIMEDOUT: Errno = 110;
/// It is being done already.
pub const EALREADY: Errno = 114;

/// Returns the text of the C library for an error number, without Rust's suffix.
///
/// ```
/// assert_eq!(bowline_ctl::errno::text(17), "File exists");
/// ```
pub fn text(errno: Errno) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}
