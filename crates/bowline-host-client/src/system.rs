//! Thin wrappers of system calls.

use core::ffi::{CStr, c_int, c_long, c_void};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;
use std::ffi::CString;

use crate::agent::own;
use crate::guarded;

/// Makes a system call without the C library, whose functions the preload library replaces.
macro_rules! system {
    ($number:ident $(, $arg:expr)*) => {{
        let args = [$($crate::system::Word::word($arg)),*];
        // SAFETY: the caller's pointers are valid for the lengths given, or the system says EFAULT.
        unsafe { $crate::system::call(libc::$number, &args) }
    }};
}
pub(crate) use system;

/// What a system call takes.
pub trait Word {
    /// As the register has it.
    fn word(self) -> usize;
}

macro_rules! words {
    ($($type:ty)*) => {$(
        impl Word for $type {
            fn word(self) -> usize {
                self as usize
            }
        }
    )*};
}

words! { c_int u32 i64 u64 usize isize }

impl<T> Word for *const T {
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

impl<T> Word for *mut T {
    fn word(self) -> usize {
        self.expose_provenance()
    }
}

/// Makes a system call.
///
/// # Safety
/// As the call wants of its arguments, of which there are six at most.
///
/// # Errors
/// What the system says.
pub unsafe fn call(number: c_long, args: &[usize]) -> Result<usize, c_int> {
    // SAFETY: as the caller promises.
    unsafe { call_by(enter, number, args) }
}

/// Makes a system call that is the program's own, which a function of the C library's name was
/// called for: at another instruction, so that a filter of the program's judges it as it would
/// without this library.
///
/// # Safety
/// As for [`call`].
///
/// # Errors
/// What the system says.
pub unsafe fn call_for_program(number: c_long, args: &[usize]) -> Result<usize, c_int> {
    // SAFETY: as the caller promises.
    unsafe { call_by(enter_for_program, number, args) }
}

/// What makes a system call: its number, and what it takes.
type Enter = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize, usize) -> usize;

/// # Safety
/// As for [`call`].
unsafe fn call_by(enter: Enter, number: c_long, args: &[usize]) -> Result<usize, c_int> {
    /// Numbers above are errors.
    const ERROR_MAX: usize = 4095;
    let mut all = [0; 6];
    all[..args.len()].copy_from_slice(args);
    let [a, b, c, d, e, f] = all;
    // SAFETY: as the caller promises.
    let value = unsafe { enter(number as usize, a, b, c, d, e, f) };
    if value > usize::MAX - ERROR_MAX { Err(value.wrapping_neg() as c_int) } else { Ok(value) }
}

/// A function that makes system calls at an instruction of its own. What comes after its end tells
/// two of them apart, which a linker might else make one of.
macro_rules! entrance {
    ($(#[$doc:meta])* $name:ident, $after:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`call`].
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(
            number: usize,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> usize {
            core::arch::naked_asm!(
                "mov rax, rdi",
                "mov rdi, rsi",
                "mov rsi, rdx",
                "mov rdx, rcx",
                "mov r10, r8",
                "mov r8, r9",
                "mov r9, [rsp + 8]",
                "syscall",
                "ret",
                $after,
            )
        }

        $(#[$doc])*
        ///
        /// # Safety
        /// As for [`call`].
        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(
            number: usize,
            a: usize,
            b: usize,
            c: usize,
            d: usize,
            e: usize,
            f: usize,
        ) -> usize {
            core::arch::naked_asm!(
                "mov x8, x0",
                "mov x0, x1",
                "mov x1, x2",
                "mov x2, x3",
                "mov x3, x4",
                "mov x4, x5",
                "mov x5, x6",
                "svc 0",
                "ret",
                $after,
            )
        }
    };
}

entrance! {
    /// All system calls of this library itself are made here, at one instruction: see
    /// [`call_site`].
    enter, ""
}
entrance! {
    /// The same for calls of the program.
    enter_for_program, "nop"
}

/// Where the instruction of `enter` ends, in bytes from its beginning, and the instruction.
#[cfg(target_arch = "x86_64")]
const SITE: (usize, &[u8]) = (25, &[0x0f, 0x05]);
#[cfg(target_arch = "aarch64")]
const SITE: (usize, &[u8]) = (32, &[0x01, 0x00, 0x00, 0xd4]);

/// The address after the instruction that makes all system calls of this library itself, as the
/// kernel tells a filter of system calls where a call comes from; `None` if it is not there.
pub fn call_site() -> Option<usize> {
    let (end, instruction) = SITE;
    let begin = enter as *const u8;
    // SAFETY: the function is at least as long.
    let code = unsafe { core::slice::from_raw_parts(begin, end) };
    code.ends_with(instruction).then(|| begin.addr() + end)
}

/// `close(2)`.
pub fn close(fd: c_int) {
    let _ = system!(SYS_close, fd);
}

/// `getpid(2)`.
pub fn getpid() -> c_int {
    system!(SYS_getpid).map_or(0, |pid| pid as c_int)
}

/// Sends a signal to the calling thread, as one of those that the system itself sends.
///
/// # Errors
/// EAGAIN where the user has too many signals that wait.
pub fn queue_to_thread(signal: c_int, info: *const libc::siginfo_t) -> Result<(), c_int> {
    let thread = system!(SYS_gettid)?;
    system!(SYS_rt_tgsigqueueinfo, getpid(), thread, signal, info).map(drop)
}

/// Opens the memory of this process, to be read and written by whoever gets the descriptor.
///
/// # Errors
/// ENOENT without `/proc`; EACCES for a process that may not be looked at.
pub fn open_memory() -> Result<c_int, c_int> {
    let flags = libc::O_RDWR | libc::O_CLOEXEC;
    system!(SYS_openat, libc::AT_FDCWD, c"/proc/self/mem".as_ptr(), flags, 0).map(|fd| fd as c_int)
}

/// Reads a file to its end.
///
/// # Errors
/// Those of `open(2)` and `read(2)`.
pub fn read_file(path: &CStr) -> Result<Vec<u8>, c_int> {
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    let fd = system!(SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)? as c_int;
    let mut all = Vec::new();
    let mut part = [0_u8; 4096];
    let done = loop {
        match system!(SYS_read, fd, part.as_mut_ptr(), part.len()) {
            Ok(0) => break Ok(()),
            Ok(n) => all.extend_from_slice(&part[..n]),
            Err(libc::EINTR) => {}
            Err(errno) => break Err(errno),
        }
    };
    close(fd);
    done.map(|()| all)
}

/// Bytes of a page of memory.
pub fn page() -> usize {
    // SAFETY: it takes a number only.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(page).unwrap_or(4096)
}

/// The status flags of a descriptor.
///
/// # Errors
/// EBADF.
pub fn flags(fd: c_int) -> Result<c_int, c_int> {
    system!(SYS_fcntl, fd, libc::F_GETFL, 0).map(|flags| flags as c_int)
}

/// Sets the status flags of a descriptor.
pub fn set_flags(fd: c_int, flags: c_int) {
    let _ = system!(SYS_fcntl, fd, libc::F_SETFL, flags);
}

/// Lets a descriptor go through an `exec`.
pub fn clear_cloexec(fd: c_int) {
    let _ = system!(SYS_fcntl, fd, libc::F_SETFD, 0);
}

/// Moves a descriptor to a high number, out of the way of the program's, if the limit allows.
pub fn move_up(fd: c_int) -> c_int {
    const ABOVE: c_int = 900;
    match system!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, ABOVE) {
        Ok(moved) => {
            close(fd);
            moved as c_int
        }
        Err(_) => fd,
    }
}

/// Tells whether a memory file has `len` bytes in pages of the default size, and is sealed against
/// shrinking.
pub(crate) fn is_whole_memory(fd: c_int, len: usize) -> bool {
    // If a huge page is missing at an access, the program is killed.
    const USUAL_PAGE_MAX: i128 = 64 << 10;
    let wanted = libc::F_SEAL_SHRINK as usize;
    let is_sealed = system!(SYS_fcntl, fd, libc::F_GET_SEALS, 0).is_ok_and(|s| s & wanted != 0);
    let is_whole = |found: libc::stat| {
        usize::try_from(found.st_size).is_ok_and(|size| size >= len)
            && i128::from(found.st_blksize) <= USUAL_PAGE_MAX
    };
    is_sealed && stat(fd, c"", libc::AT_EMPTY_PATH).is_ok_and(is_whole)
}

fn stat(folder: c_int, path: &CStr, flags: c_int) -> Result<libc::stat, c_int> {
    // SAFETY: a structure of integers, for which all zeroes are a value.
    let mut found: libc::stat = unsafe { core::mem::zeroed() };
    system!(SYS_newfstatat, folder, path.as_ptr(), ptr::from_mut(&mut found), flags)?;
    Ok(found)
}

/// The user who owns a file.
///
/// # Errors
/// Those of `stat(2)`.
pub(crate) fn owner(path: &[u8]) -> Result<u32, c_int> {
    let path = CString::new(path).map_err(|_| libc::ENOENT)?;
    Ok(stat(libc::AT_FDCWD, &path, 0)?.st_uid)
}

/// Returns the owner and mode of a file, of a symbolic link itself.
pub(crate) fn owner_and_mode(path: &[u8]) -> Result<(u32, u32), c_int> {
    let path = CString::new(path).map_err(|_| libc::ENOENT)?;
    let found = stat(libc::AT_FDCWD, &path, libc::AT_SYMLINK_NOFOLLOW)?;
    Ok((found.st_uid, found.st_mode))
}

/// Tells whether a file, which is no symbolic link, has another name in its file system. `false` if
/// it was mounted by itself, or if the system does not say (before Linux 5.8).
pub(crate) fn has_second_name(path: &[u8]) -> bool {
    /// `STATX_NLINK`, and `STATX_ATTR_MOUNT_ROOT`.
    const LINKS: c_int = 4;
    const MOUNTED: u64 = 0x2000;
    let Ok(path) = CString::new(path) else { return false };
    // A `struct statx`: attributes in the second word, links in the third, what is said of
    // attributes in the eighth.
    let mut found = [0_u64; 32];
    let (flags, to) = (libc::AT_SYMLINK_NOFOLLOW, found.as_mut_ptr());
    let asked = system!(SYS_statx, libc::AT_FDCWD, path.as_ptr(), flags, LINKS, to);
    let [_, attributes, links, _, _, _, _, said, ..] = found;
    asked.is_ok() && said & MOUNTED != 0 && attributes & MOUNTED == 0 && links as u32 > 1
}

/// The effective user of this thread.
pub(crate) fn geteuid() -> u32 {
    system!(SYS_geteuid).map_or(u32::MAX, |user| user as u32)
}

fn getegid() -> u32 {
    system!(SYS_getegid).map_or(u32::MAX, |group| group as u32)
}

fn get_option<T>(fd: c_int, name: c_int, value: &mut T) -> Result<(), c_int> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let to = ptr::from_mut(value);
    system!(SYS_getsockopt, fd, libc::SOL_SOCKET, name, to, ptr::from_mut(&mut len))?;
    if len as usize == size_of::<T>() { Ok(()) } else { Err(libc::EINVAL) }
}

/// An option of a socket that is a number.
pub(crate) fn option(fd: c_int, name: c_int) -> Result<c_int, c_int> {
    let mut value = 0;
    get_option(fd, name, &mut value).map(|()| value)
}

/// A process and its user, as the kernel reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) user: u32,
    /// 0 where this process sees no number of it.
    pub(crate) number: u32,
}

/// Returns the process at the other end of a unix socket when it was connected or listened.
pub(crate) fn peer(fd: c_int) -> Result<Process, c_int> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    get_option(fd, libc::SO_PEERCRED, &mut peer)?;
    Ok(Process { user: peer.uid, number: peer.pid.cast_unsigned() })
}

/// Returns the kernel's unique number of a socket (SO_COOKIE), the same for all its descriptors.
pub(crate) fn cookie(fd: c_int) -> Option<u64> {
    let mut cookie = 0_u64;
    get_option(fd, libc::SO_COOKIE, &mut cookie).ok().map(|()| cookie)
}

fn set_option<T>(fd: c_int, name: c_int, value: &T) {
    let len = size_of::<T>() as libc::socklen_t;
    let _ = system!(SYS_setsockopt, fd, libc::SOL_SOCKET, name, ptr::from_ref(value), len);
}

/// Sets whether a unix socket receives the credentials of senders.
pub(crate) fn ask_for_senders(fd: c_int, asks: bool) {
    set_option(fd, libc::SO_PASSCRED, &c_int::from(asks));
}

/// Sets whether a unix socket accepts descriptors (before Linux 6.16 it always does).
pub(crate) fn let_descriptors_come(fd: c_int, may_come: bool) {
    const SO_PASSRIGHTS: c_int = 83;
    set_option(fd, SO_PASSRIGHTS, &c_int::from(may_come));
}

/// A message for `recvmsg` or `sendmsg`: pieces of payload, and control messages or room for them.
pub(crate) fn message(pieces: &mut [libc::iovec], control: &mut [u64]) -> libc::msghdr {
    /// Most pieces that the system takes (`UIO_MAXIOV`).
    const PIECES_MAX: usize = 1024;
    // SAFETY: a structure of integers and pointers, for which all zeroes are a value.
    let mut msg: libc::msghdr = unsafe { core::mem::zeroed() };
    msg.msg_iov = pieces.as_mut_ptr();
    msg.msg_iovlen = pieces.len().min(PIECES_MAX) as _;
    if !control.is_empty() {
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = size_of_val(control) as _;
    }
    msg
}

/// Peeks at the first byte and receives the control messages that came with it, as far as they fit;
/// returns their bytes, or `None` at the end of the stream.
///
/// # Errors
/// EAGAIN when there is nothing; others of `recvmsg(2)`.
#[allow(clippy::unnecessary_cast, reason = "the length is another type in musl")]
pub(crate) fn look_at_first(fd: c_int, control: &mut [u64]) -> Result<Option<usize>, c_int> {
    let mut byte = [0_u8; 1];
    let mut piece = [libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 }];
    let mut msg = message(&mut piece, control);
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let got = recvmsg(fd, &mut msg, flags)?;
    Ok((got > 0).then_some(msg.msg_controllen as usize))
}

/// Returns the sender of the first byte on a unix socket that receives credentials; `None` at the
/// end of the stream.
///
/// # Errors
/// As [`look_at_first`].
pub(crate) fn first_sender(fd: c_int) -> Result<Option<Process>, c_int> {
    /// A head of 16 bytes, then process, user and group.
    const LEN: usize = 28;
    // Room for nothing else: descriptors would be this process's.
    let mut control = [0_u64; 4];
    let Some(len) = look_at_first(fd, &mut control)? else { return Ok(None) };
    let [_, kind, ids, _] = control;
    if len < LEN || kind != control_kind(libc::SCM_CREDENTIALS) {
        return Err(libc::EPROTO);
    }
    Ok(Some(Process { user: (ids >> 32) as u32, number: ids as u32 }))
}

/// Level and kind of a control message of unix sockets.
pub(crate) const fn control_kind(kind: c_int) -> u64 {
    (kind as u64) << 32 | libc::SOL_SOCKET as u64
}

/// Tells whether this process has a descriptor of a socket, by its [`cookie`].
pub(crate) fn has_descriptor(socket: u64) -> bool {
    /// Larger numbers exist only in processes that raise their limit on purpose.
    const NUMBERS_MAX: u64 = 1 << 16;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let none = ptr::null::<c_void>();
    let asked = system!(SYS_prlimit64, 0, libc::RLIMIT_NOFILE, none, ptr::from_mut(&mut limit));
    let end = if asked.is_ok() { limit.rlim_cur.min(NUMBERS_MAX) } else { NUMBERS_MAX };
    (0..end as c_int).any(|fd| cookie(fd) == Some(socket))
}

/// Returns the kernel's unique number of the calling thread's network namespace; 0 before Linux
/// 5.14.
pub(crate) fn network_namespace() -> u64 {
    const SO_NETNS_COOKIE: c_int = 71;
    let Ok(socket) = unix_stream() else { return 0 };
    let mut cookie = 0_u64;
    let result = get_option(socket, SO_NETNS_COOKIE, &mut cookie);
    close(socket);
    result.map_or(0, |()| cookie)
}

/// Maps the beginning of a memory file, readable and writable.
pub(crate) fn map_shared(fd: c_int, len: usize) -> Result<NonNull<u8>, c_int> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let none = ptr::null::<c_void>();
    let address = system!(SYS_mmap, none, len, access, libc::MAP_SHARED, fd, 0 as c_long)?;
    NonNull::new(ptr::with_exposed_provenance_mut(address)).ok_or(libc::ENOMEM)
}

/// Faults memory of this process in, for writing or reading; tells whether that is allowed. Before
/// Linux 5.14 the kernel cannot tell, and the result is true.
pub(crate) fn populate(at: u64, len: u64, write: bool) -> bool {
    const MADV_POPULATE_READ: c_int = 22;
    const MADV_POPULATE_WRITE: c_int = 23;
    const PAGE: u64 = 4096;
    let advice = if write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    let advise = |at: u64, len: u64| system!(SYS_madvise, at - at % PAGE, at % PAGE + len, advice);
    match advise(at, len) {
        Err(libc::ENOMEM | libc::EFAULT) => false,
        // EINVAL: the memory may not be written, or the kernel does not know the advice.
        Err(libc::EINVAL) => advise((&raw const advice) as u64, 1).is_err(),
        _ => true,
    }
}

/// Maps zeroed memory of this process alone, which takes room only where it is written.
pub fn map_zeroed(len: usize) -> Option<NonNull<u8>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let none = ptr::null::<c_void>();
    let address = system!(SYS_mmap, none, len, access, kind, -1, 0 as c_long).ok()?;
    NonNull::new(ptr::with_exposed_provenance_mut(address))
}

/// Maps a page that is zeroed in each process that gets a copy of this one's memory; `None` where
/// the system has no such pages (before Linux 4.14).
pub fn map_wiped_on_fork() -> Option<NonNull<u8>> {
    const PAGE: usize = 4096;
    const MADV_WIPEONFORK: c_int = 18;
    let page = map_zeroed(PAGE)?;
    if system!(SYS_madvise, page.as_ptr(), PAGE, MADV_WIPEONFORK).is_ok() {
        return Some(page);
    }
    // SAFETY: it was just mapped, with this length, and nobody else has it.
    unsafe { unmap(page, PAGE) };
    None
}

/// # Safety
/// Nothing uses the memory any more.
pub unsafe fn unmap(base: NonNull<u8>, len: usize) {
    let _ = system!(SYS_munmap, base.as_ptr(), len);
}

/// Sets the receive time-out of the descriptor itself, as on a kernel's socket.
pub(crate) fn set_receive_timeout(fd: c_int, name: c_int, value: &[u8]) {
    let len = value.len() as libc::socklen_t;
    let _ = system!(SYS_setsockopt, fd, libc::SOL_SOCKET, name, value.as_ptr(), len);
}

pub(crate) fn unix_stream() -> Result<c_int, c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    system!(SYS_socket, libc::AF_UNIX, kind, 0).map(|fd| fd as c_int)
}

/// Makes two connected stream sockets.
pub(crate) fn stream_pair() -> Result<(c_int, c_int), c_int> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    system!(SYS_socketpair, libc::AF_UNIX, kind, 0, pair.as_mut_ptr())?;
    Ok((pair[0], pair[1]))
}

/// Sets the send and connect time-out of a socket; zero: no limit.
pub(crate) fn limit_sends(fd: c_int, limit: Duration) {
    let limit = libc::timeval {
        tv_sec: limit.as_secs().min(u64::from(u32::MAX)).cast_signed(),
        tv_usec: limit.subsec_micros().into(),
    };
    set_option(fd, libc::SO_SNDTIMEO, &limit);
}

/// Sends bytes on a socket, with a descriptor and the sender's credentials.
pub(crate) fn send_offer(fd: c_int, bytes: &[u8], descriptor: c_int) -> Result<(), c_int> {
    const RIGHTS: u64 = 16 + 4;
    const CREDENTIALS: u64 = 16 + 12;
    let [pid, uid, gid] = [getpid().cast_unsigned(), geteuid(), getegid()].map(u64::from);
    // Two heads of 16 bytes, each before what it is about.
    let mut control: [u64; 7] = [
        RIGHTS,
        control_kind(libc::SCM_RIGHTS),
        u64::from(descriptor.cast_unsigned()),
        CREDENTIALS,
        control_kind(libc::SCM_CREDENTIALS),
        pid | uid << 32,
        gid,
    ];
    let mut piece =
        [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    let msg = message(&mut piece, &mut control);
    sendmsg(fd, &msg, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT).map(drop)
}

pub(crate) fn connect(fd: c_int, name: &libc::sockaddr_un, len: usize) -> Result<(), c_int> {
    system!(SYS_connect, fd, ptr::from_ref(name), len).map(drop)
}

/// Gets the name of a socket's peer; returns its length.
///
/// # Errors
/// Those of `getpeername(2)`.
pub fn peer_name(fd: c_int, name: &mut libc::sockaddr_un) -> Result<usize, c_int> {
    let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    system!(SYS_getpeername, fd, ptr::from_mut(name), ptr::from_mut(&mut len))?;
    Ok(len as usize)
}

pub(crate) fn sendmsg(fd: c_int, msg: &libc::msghdr, flags: c_int) -> Result<usize, c_int> {
    system!(SYS_sendmsg, fd, ptr::from_ref(msg), flags)
}

pub(crate) fn recvmsg(fd: c_int, msg: &mut libc::msghdr, flags: c_int) -> Result<usize, c_int> {
    system!(SYS_recvmsg, fd, ptr::from_mut(msg), flags)
}

pub(crate) fn send(fd: c_int, bytes: &[u8], flags: c_int) -> Result<usize, c_int> {
    let none = ptr::null::<c_void>();
    system!(SYS_sendto, fd, bytes.as_ptr(), bytes.len(), flags, none, 0)
}

/// `recv(2)`.
///
/// # Errors
/// Those of the system.
pub fn recv(fd: c_int, bytes: &mut [u8], flags: c_int) -> Result<usize, c_int> {
    let none = ptr::null::<c_void>();
    system!(SYS_recvfrom, fd, bytes.as_mut_ptr(), bytes.len(), flags, none, none)
}

/// Shuts down both directions of a socket, for all its descriptors.
pub(crate) fn shutdown(fd: c_int) {
    let _ = system!(SYS_shutdown, fd, libc::SHUT_RDWR);
}

/// Waits a millisecond.
pub fn pause() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    let _ = system!(SYS_nanosleep, ptr::from_ref(&time), ptr::null::<c_void>());
}

/// Waits until a descriptor is ready for one of `events`, at most `limit`; returns what it is ready
/// for, which is 0 after `limit`.
pub(crate) fn poll(fd: c_int, events: i16, limit: Option<Duration>) -> Result<i16, c_int> {
    let mut one = libc::pollfd { fd, events, revents: 0 };
    let limit = limit.map(|limit| libc::timespec {
        // The limit is cut to what the call can take.
        tv_sec: limit.as_secs().min(u64::from(u32::MAX)).cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let limit = limit.as_ref().map_or(ptr::null(), ptr::from_ref);
    let none = ptr::null::<c_void>();
    system!(SYS_ppoll, ptr::from_mut(&mut one), 1, limit, none, 0)?;
    Ok(one.revents)
}

/// An option of a socket of the system, as a program asks for it; returns its length.
///
/// # Errors
/// Those of `getsockopt(2)`.
pub(crate) fn get_any_option(
    fd: c_int,
    (level, name): (c_int, c_int),
    value: &mut [u8],
) -> Result<usize, c_int> {
    let mut len = value.len() as libc::socklen_t;
    system!(SYS_getsockopt, fd, level, name, value.as_mut_ptr(), ptr::from_mut(&mut len))?;
    Ok((len as usize).min(value.len()))
}

/// Sets an option of a socket of the system, as a program asks.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub(crate) fn set_any_option(
    fd: c_int,
    (level, name): (c_int, c_int),
    value: &[u8],
) -> Result<(), c_int> {
    system!(SYS_setsockopt, fd, level, name, value.as_ptr(), value.len()).map(drop)
}

/// Tells whether this process may set an option of SOL_SOCKET, as the kernel judges with a socket
/// that is closed again.
pub(crate) fn may(name: c_int, value: &[u8]) -> Result<bool, c_int> {
    let fd = unix_stream()?;
    let done = set_any_option(fd, (libc::SOL_SOCKET, name), value);
    close(fd);
    Ok(done != Err(libc::EPERM))
}

/// The only process whose system makes copies for it, as far as a filter of system calls allows; 0
/// without one. Relaxed: children have what their parent had.
static COPIES_FOR: AtomicI32 = AtomicI32::new(0);

/// From now on the system makes copies of the memory of this process, which has the number `own`,
/// for it alone, not for its children.
pub fn copy_for_alone(own: c_int) {
    COPIES_FOR.store(own, Ordering::Relaxed);
}

/// This process, if the system may be asked for copies of its memory.
fn may_be_copied() -> Option<c_int> {
    let (only, own) = (COPIES_FOR.load(Ordering::Relaxed), getpid());
    (only == 0 || only == own).then_some(own)
}

/// Copies bytes that a program points at.
///
/// # Safety
/// The program promises that they are there; where the kernel checks, this fails if they are not.
///
/// # Errors
/// EFAULT where nothing is mapped.
pub unsafe fn read_of_program(at: *const c_void, to: &mut [u8]) -> Result<(), c_int> {
    let copy = |own| own::read(own, at.expose_provenance() as u64, to);
    match may_be_copied().map_or(Err(libc::EPERM), copy) {
        Ok(()) => Ok(()),
        Err(libc::EFAULT) => Err(libc::EFAULT),
        // The system makes no copies for this process, as under some filters of system calls.
        Err(_) => {
            // SAFETY: as the program promises.
            let is_there = unsafe { guarded::copy(to.as_mut_ptr(), at.cast(), to.len()) };
            if is_there { Ok(()) } else { Err(libc::EFAULT) }
        }
    }
}

/// Copies bytes to where a program points.
///
/// # Safety
/// As for [`read_of_program`].
///
/// # Errors
/// EFAULT where there is no room.
pub unsafe fn write_to_program(at: *mut c_void, from: &[u8]) -> Result<(), c_int> {
    let copy = |own| own::write(own, at.expose_provenance() as u64, from);
    match may_be_copied().map_or(Err(libc::EPERM), copy) {
        Ok(()) => Ok(()),
        Err(libc::EFAULT) => Err(libc::EFAULT),
        Err(_) => {
            // SAFETY: as the program promises.
            let is_there = unsafe { guarded::copy(at.cast(), from.as_ptr(), from.len()) };
            if is_there { Ok(()) } else { Err(libc::EFAULT) }
        }
    }
}

/// Bytes that a pipe holds.
///
/// # Errors
/// EINVAL for what is no pipe; EBADF.
pub fn pipe_room(fd: c_int) -> Result<usize, c_int> {
    match system!(SYS_fcntl, fd, libc::F_GETPIPE_SZ, 0) {
        Err(_) => Err(flags(fd).map_or(libc::EBADF, |_| libc::EINVAL)),
        room => room,
    }
}

/// Tells whether a descriptor is ready for an event, or waits until it is.
///
/// # Errors
/// EINTR when a signal has ended the wait.
pub fn wait_for(fd: c_int, event: i16, may_wait: bool) -> Result<bool, c_int> {
    let ready = poll(fd, event, (!may_wait).then_some(Duration::ZERO))?;
    Ok(ready & (event | libc::POLLHUP | libc::POLLERR) != 0)
}

/// `write(2)`.
///
/// # Errors
/// Those of the system.
pub fn write(fd: c_int, bytes: &[u8]) -> Result<usize, c_int> {
    system!(SYS_write, fd, bytes.as_ptr(), bytes.len())
}

/// Tells whether a descriptor is writable.
pub(crate) fn is_writable(fd: c_int) -> bool {
    let ready = poll(fd, libc::POLLOUT, Some(Duration::ZERO));
    ready.is_ok_and(|ready| ready & libc::POLLOUT != 0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write, pipe};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Sends a byte with a descriptor.
    fn send_with(socket: c_int, descriptor: c_int) {
        let mut bytes = *b"x";
        let mut piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 1 }];
        let mut rights = [20, control_kind(libc::SCM_RIGHTS), descriptor as u64];
        let msg = message(&mut piece, &mut rights);
        assert_eq!(sendmsg(socket, &msg, libc::MSG_NOSIGNAL), Ok(1));
    }

    #[test]
    fn who_looks_for_a_sender_gets_no_descriptors() {
        let (ours, theirs) = stream_pair().unwrap();
        // SAFETY: both were just made, for nobody else.
        let [mut ours, theirs] = [ours, theirs].map(|fd| unsafe { UnixStream::from_raw_fd(fd) });
        ask_for_senders(ours.as_raw_fd(), true);
        assert_eq!(first_sender(ours.as_raw_fd()), Err(libc::EAGAIN));
        let (mut end, passed) = pipe().unwrap();
        send_with(theirs.as_raw_fd(), passed.as_raw_fd());
        drop(passed);
        let own = Process { user: geteuid(), number: std::process::id() };
        for _ in 0..3 {
            assert_eq!(first_sender(ours.as_raw_fd()), Ok(Some(own)), "it stays");
        }
        assert_eq!(ours.read(&mut [0; 2]).unwrap(), 1);
        assert_eq!(end.read(&mut [0]).unwrap(), 0, "nobody has the other end");
        drop(theirs);
        assert_eq!(first_sender(ours.as_raw_fd()), Ok(None));
    }

    #[test]
    fn descriptors_come_only_where_they_may() {
        let (ours, theirs) = stream_pair().unwrap();
        // SAFETY: both were just made, for nobody else.
        let [ours, theirs] = [ours, theirs].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        let_descriptors_come(ours.as_raw_fd(), true);
        let (mut end, passed) = pipe().unwrap();
        send_with(theirs.as_raw_fd(), passed.as_raw_fd());
        drop(passed);
        let mut control = [0; 3];
        assert_eq!(look_at_first(ours.as_raw_fd(), &mut control), Ok(Some(24)));
        // SAFETY: it has just come.
        let came = unsafe { OwnedFd::from_raw_fd(control[2] as u32 as c_int) };
        std::fs::File::from(came).write_all(b"x").unwrap();
        assert_eq!(end.read(&mut [0]).unwrap(), 1);
    }
}
