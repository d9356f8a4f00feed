//! System calls and foreign functions: the only module tree of this crate with `unsafe` in it.
//!
//! Everything here has a safe face; what can fail returns [`io::Result`] or an `Option`.

#![allow(unsafe_code)]

mod dl;
#[cfg(feature = "rivals")]
mod nanomsg;
mod network;
mod rds;
mod shared;
mod zmq;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr;
use std::sync::atomic::AtomicU32;

#[cfg(feature = "rivals")]
pub(crate) use nanomsg::{NanoKind, NanoSocket, nanomsg_version};
pub(crate) use network::Network;
pub(crate) use rds::RdsSocket;
pub(crate) use shared::{SharedWords, shared_wait, shared_wake};
pub(crate) use zmq::{ZmqContext, ZmqKind, ZmqSocket, zmq_version};

fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn check_len(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}

fn clock(id: libc::clockid_t) -> Option<u64> {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid timespec for the call to fill.
    let ret = unsafe { libc::clock_gettime(id, &mut ts) };
    (ret == 0).then(|| ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64)
}

/// Reads the monotonic clock, in nanoseconds.
#[inline]
pub(crate) fn now_ns() -> u64 {
    clock(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// Returns the CPU time this process has used, in nanoseconds.
pub(crate) fn own_cpu_ns() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or(0)
}

/// Returns the CPU time another process has used, in nanoseconds, or nothing when it is gone.
pub(crate) fn cpu_ns(pid: u32) -> Option<u64> {
    let mut id: libc::clockid_t = 0;
    // SAFETY: `id` is a valid place for the clock identifier.
    let ret = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut id) };
    if ret == 0 { clock(id) } else { None }
}

/// Returns the CPU time, in nanoseconds, of those children of this process that it has seen end.
pub(crate) fn children_cpu_ns() -> u64 {
    // SAFETY: all zero is a valid rusage.
    let mut used: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: `used` is valid for the call to fill.
    if unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &mut used) } != 0 {
        return 0;
    }
    let ns = |t: libc::timeval| t.tv_sec as u64 * 1_000_000_000 + t.tv_usec as u64 * 1000;
    ns(used.ru_utime) + ns(used.ru_stime)
}

/// Makes a file that is memory and has no name.
pub(crate) fn memory_file(len: u64) -> io::Result<File> {
    // SAFETY: the name ends with a zero byte and lives through the call.
    let fd = check(unsafe { libc::memfd_create(c"store".as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: `fd` was just returned by memfd_create and nobody else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Lists the CPUs this process may run on.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    // SAFETY: a cpu_set_t is plain bits; all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: the size given is the size of the set pointed to.
    let ret = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    if ret != 0 {
        return vec![0];
    }
    (0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| {
            // SAFETY: `cpu` is below CPU_SETSIZE, so inside the set.
            unsafe { libc::CPU_ISSET(cpu, &set) }
        })
        .collect()
}

/// Binds the calling thread, and every thread it starts later, to one CPU.
pub(crate) fn pin(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: a cpu_set_t is plain bits; all zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    // SAFETY: `cpu` is below CPU_SETSIZE, so inside the set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the size given is the size of the set pointed to.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) }).map(drop)
}

/// Has mounts of the calling thread, and of every thread it starts later, go with them. Only root
/// can have that.
pub(crate) fn own_mounts() -> io::Result<()> {
    // SAFETY: unshare takes a plain integer, and concerns this thread alone.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let (none, root, private) = (ptr::null(), c"/".as_ptr(), libc::MS_REC | libc::MS_PRIVATE);
    // SAFETY: a path that ends in zero; the other pointers may be null for a change of kind.
    check(unsafe { libc::mount(none, root, none, private, none.cast()) }).map(drop)
}

/// Raises the soft limit of open files to the hard one and returns it.
pub(crate) fn raise_open_files() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit for the call to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return 0;
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` was filled above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    limit.rlim_cur
}

/// Has a program that will be started end when the thread that starts it does.
pub(crate) fn end_with_this_thread(command: &mut Command) {
    let ask = || {
        // SAFETY: prctl takes plain integers here.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }).map(drop)
    };
    // SAFETY: between fork and exec `ask` makes one system call and neither allocates nor locks.
    unsafe { command.pre_exec(ask) };
}

/// Asks a process to end, as the end of a terminal or a service manager does.
pub(crate) fn ask_to_end(child: &mut Child) {
    // The number of one that has ended, and was waited for, may be another's by now.
    let (Ok(None), Ok(pid)) = (child.try_wait(), libc::pid_t::try_from(child.id())) else { return };
    // SAFETY: plain integers. Nobody has waited for the child, so the number is still its own.
    unsafe { libc::kill(pid, libc::SIGTERM) };
}

/// Says whether this process is root's.
pub(crate) fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A process, and never another that has got its number later.
#[derive(Debug)]
pub(crate) struct Process(OwnedFd);

impl Process {
    /// Finds the process that has this number now.
    pub(crate) fn find(pid: u32) -> io::Result<Self> {
        // SAFETY: pidfd_open takes plain integers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::c_long::from(pid), 0) };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0);
        let fd = fd.ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Stops or continues the process. Its end shows elsewhere, as the end of its output.
    pub(crate) fn halt(&self, halted: bool) {
        let signal = if halted { libc::SIGSTOP } else { libc::SIGCONT };
        let info = ptr::null::<libc::siginfo_t>();
        // SAFETY: plain integers, and no information to be read.
        unsafe {
            libc::syscall(libc::SYS_pidfd_send_signal, self.0.as_raw_fd(), signal, info, 0);
        }
    }
}

/// Makes the cheapest system call there is.
#[inline]
pub(crate) fn empty_syscall() {
    // SAFETY: getppid takes nothing and cannot fail.
    unsafe { libc::syscall(libc::SYS_getppid) };
}

fn set_int(fd: RawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`.
    check(unsafe { libc::setsockopt(fd, level, name, ptr::from_ref(&value).cast(), len) }).map(drop)
}

fn get_int(fd: RawFd, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`, which outlives the call.
    check(unsafe {
        libc::getsockopt(fd, level, name, ptr::from_mut(&mut value).cast(), &mut len)
    })?;
    Ok(value)
}

/// Sets both kernel buffer sizes of a socket, in bytes; the kernel may grant less.
pub(crate) fn set_buffers(fd: &impl AsRawFd, bytes: usize) -> io::Result<()> {
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set_int(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)?;
    set_int(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)
}

/// Has a UDP socket send what it is given in datagrams of `segment` bytes, which the kernel cuts.
pub(crate) fn set_segment(fd: &impl AsRawFd, segment: usize) -> io::Result<()> {
    let segment = i32::try_from(segment).unwrap_or(i32::MAX);
    set_int(fd.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, segment)
}

/// Lets the kernel hand several datagrams of one size over at once.
pub(crate) fn set_merging(fd: &impl AsRawFd) -> io::Result<()> {
    set_int(fd.as_raw_fd(), libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Receives a datagram; without `wait` nothing there is [`io::ErrorKind::WouldBlock`].
#[inline]
pub(crate) fn receive(fd: &impl AsRawFd, buf: &mut [u8], wait: bool) -> io::Result<usize> {
    let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: pointer and length describe `buf`.
    check_len(unsafe { libc::recv(fd.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), flags) })
}

/// Lists the TCP sockets this process has open, whoever opened them.
fn tcp_sockets() -> Vec<RawFd> {
    let Ok(dir) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    dir.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok())
        .filter(|&fd| {
            let tcp = get_int(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL);
            matches!(tcp, Ok(libc::IPPROTO_TCP))
        })
        .collect()
}

/// Sets the congestion control of every TCP socket of this process, listeners included.
///
/// This is how a library that offers no such option is run at its best.
pub(crate) fn set_all_congestion_control(name: &str) {
    for fd in tcp_sockets() {
        let len = name.len() as libc::socklen_t;
        // SAFETY: pointer and length describe `name`; `fd` was a socket a moment ago, and a wrong
        // one only makes the call fail.
        unsafe {
            libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_ptr().cast(), len)
        };
    }
}

/// Names the congestion control in use on this process's connected TCP sockets.
pub(crate) fn congestion_controls() -> Vec<String> {
    let mut names: Vec<String> = tcp_sockets()
        .into_iter()
        .filter(|&fd| get_int(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN).unwrap_or(0) == 0)
        .filter_map(|fd| {
            let mut name = [0u8; 32];
            let mut len = name.len() as libc::socklen_t;
            // SAFETY: pointer and length describe `name`, which outlives the call.
            let ret = unsafe {
                libc::getsockopt(
                    fd,
                    libc::IPPROTO_TCP,
                    libc::TCP_CONGESTION,
                    name.as_mut_ptr().cast(),
                    &mut len,
                )
            };
            let name = CStr::from_bytes_until_nul(&name).ok()?;
            (ret == 0).then(|| name.to_string_lossy().into_owned())
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

/// A unix socket that keeps message boundaries, addressed by a name without a file.
#[derive(Debug)]
pub(crate) struct SeqPacket(OwnedFd);

impl SeqPacket {
    fn open(name: &str) -> io::Result<(Self, libc::sockaddr_un, libc::socklen_t)> {
        // SAFETY: socket takes plain integers.
        let fd = check(unsafe {
            libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0)
        })?;
        // SAFETY: `fd` was just returned by socket and nobody else owns it.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        // SAFETY: all zero is a valid, empty sockaddr_un.
        let mut addr: libc::sockaddr_un = unsafe { mem::zeroed() };
        addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
        if name.len() + 1 > addr.sun_path.len() {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        for (to, from) in addr.sun_path[1..].iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        let len = size_of::<libc::sa_family_t>() + 1 + name.len();
        Ok((socket, addr, len as libc::socklen_t))
    }

    /// Listens at `name`.
    pub(crate) fn listen(name: &str) -> io::Result<Self> {
        let (socket, addr, len) = Self::open(name)?;
        // SAFETY: `addr` and `len` describe a filled unix address.
        check(unsafe { libc::bind(socket.0.as_raw_fd(), ptr::from_ref(&addr).cast(), len) })?;
        // SAFETY: listen takes plain integers.
        check(unsafe { libc::listen(socket.0.as_raw_fd(), 64) })?;
        Ok(socket)
    }

    /// Takes one connection; its buffers are `bytes` large.
    pub(crate) fn accept(&self, bytes: usize) -> io::Result<Self> {
        // SAFETY: null address pointers are allowed when the address is not wanted.
        let fd =
            check(unsafe { libc::accept(self.0.as_raw_fd(), ptr::null_mut(), ptr::null_mut()) })?;
        // SAFETY: `fd` was just returned by accept and nobody else owns it.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        set_buffers(&socket.0, bytes)?;
        Ok(socket)
    }

    /// Connects to `name`; the buffers are `bytes` large.
    pub(crate) fn connect(name: &str, bytes: usize) -> io::Result<Self> {
        let (socket, addr, len) = Self::open(name)?;
        set_buffers(&socket.0, bytes)?;
        // SAFETY: `addr` and `len` describe a filled unix address.
        check(unsafe { libc::connect(socket.0.as_raw_fd(), ptr::from_ref(&addr).cast(), len) })?;
        Ok(socket)
    }

    /// Sends one message.
    pub(crate) fn send(&self, buf: &[u8]) -> io::Result<usize> {
        let (fd, flags) = (self.0.as_raw_fd(), libc::MSG_NOSIGNAL);
        // SAFETY: pointer and length describe `buf`.
        check_len(unsafe { libc::send(fd, buf.as_ptr().cast(), buf.len(), flags) })
    }

    /// Receives one message; zero means the other side is gone.
    pub(crate) fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        // SAFETY: pointer and length describe `buf`.
        check_len(unsafe { libc::recv(self.0.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), 0) })
    }
}

/// Waits for any of several descriptors to become readable.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    events: Vec<libc::epoll_event>,
}

impl Poller {
    /// Watches `fds`; each is named by its place in the list.
    pub(crate) fn new(fds: &[RawFd]) -> io::Result<Self> {
        // SAFETY: epoll_create1 takes a plain integer.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: `fd` was just returned by epoll_create1 and nobody else owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        for (at, &fd) in fds.iter().enumerate() {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: at as u64 };
            let ep = epoll.as_raw_fd();
            // SAFETY: `event` is valid for the call.
            check(unsafe { libc::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, &mut event) })?;
        }
        Ok(Self { epoll, events: vec![libc::epoll_event { events: 0, u64: 0 }; fds.len().max(1)] })
    }

    /// Blocks until something is readable and returns the places of what is.
    pub(crate) fn wait(&mut self) -> io::Result<impl Iterator<Item = usize> + '_> {
        let (fd, len) = (self.epoll.as_raw_fd(), self.events.len() as i32);
        // SAFETY: pointer and length describe `events`.
        let n = unsafe { libc::epoll_wait(fd, self.events.as_mut_ptr(), len, -1) };
        let n = check(n)? as usize;
        Ok(self.events[..n].iter().map(|event| event.u64 as usize))
    }
}

/// Sleeps while `word` holds `value`.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32) {
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let none = ptr::null::<libc::timespec>();
    // SAFETY: `word` lives through the call; a null timeout means none.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, none) };
}

/// Wakes one thread that sleeps on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: `word` lives through the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
}

/// Returns kernel name and release, or an empty string.
pub(crate) fn kernel() -> String {
    // SAFETY: all zero is a valid utsname.
    let mut name: libc::utsname = unsafe { mem::zeroed() };
    // SAFETY: `name` is valid for the call to fill.
    if unsafe { libc::uname(&mut name) } != 0 {
        return String::new();
    }
    let text = |field: &[libc::c_char]| -> String {
        field.iter().take_while(|c| **c != 0).map(|&c| c as u8 as char).collect()
    };
    format!("{} {} {}", text(&name.sysname), text(&name.release), text(&name.machine))
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("{text:?} has a zero byte in it"))
}
