//! System calls for tests of what a confined process can do. Each does no harm to a process that
//! may carry it out: it changes nothing, or something to what it is already, or fails for its
//! arguments after the kernel has looked for the call.

#![allow(unsafe_code, reason = "most of these calls have no safe form anywhere")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
};

/// A system call with arguments.
#[derive(Debug)]
pub struct Call {
    name: &'static str,
    number: libc::c_long,
    arguments: [libc::c_long; 5],
}

impl Call {
    /// The name of the call.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Carries it out.
    ///
    /// # Errors
    /// The kernel's.
    pub fn carry_out(&self) -> io::Result<()> {
        let [a, b, c, d, e] = self.arguments;
        // SAFETY: the calls of this module have no pointer among their arguments but null and -1,
        // which the kernel does not use, and give or take no memory.
        let result = unsafe { libc::syscall(self.number, a, b, c, d, e) };
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

const fn of<const N: usize>(
    name: &'static str,
    number: libc::c_long,
    given: [libc::c_long; N],
) -> Call {
    let mut arguments = [0; 5];
    let mut at = 0;
    while at < N {
        arguments[at] = given[at];
        at += 1;
    }
    Call { name, number, arguments }
}

macro_rules! calls {
    ($($name:ident($($argument:expr),*);)*) => {
        &[$(of(stringify!($name), libc::$name, [$($argument as libc::c_long),*])),*]
    };
}

/// Processes, namespaces, users and what only root may do with the machine.
pub const POWERS: &[Call] = calls! {
    // A thread in another namespace; without memory of its own that is no thread.
    SYS_clone(libc::CLONE_THREAD | libc::CLONE_NEWNET);
    SYS_clone3(-1, -1);
    SYS_execve(0, 0, 0);
    SYS_execveat(-1, 0, 0, 0, 0);
    SYS_unshare(libc::CLONE_FS);
    SYS_setns(-1, 0);
    SYS_chroot(-1);
    SYS_pivot_root(-1, -1);
    SYS_mount(-1, -1, -1, 0, 0);
    SYS_umount2(-1, 0);
    SYS_open_tree(-1, -1, 0);
    SYS_move_mount(-1, -1, -1, -1, 0);
    SYS_fsopen(-1, 0);
    SYS_setuid(0);
    SYS_setgid(0);
    SYS_setresuid(-1, -1, -1);
    SYS_setresgid(-1, -1, -1);
    SYS_setgroups(-1, -1);
    SYS_setfsuid(-1);
    SYS_capset(0, 0);
    SYS_ptrace(-1, -1, 0, 0);
    SYS_process_vm_readv(1, 0, 0, 0, 0);
    SYS_process_vm_writev(1, 0, 0, 0, 0);
    SYS_process_madvise(-1, 0, 0, 0, 0);
    SYS_kcmp(1, 1, 0, 0, 0);
    SYS_pidfd_open(1, 0);
    SYS_pidfd_getfd(-1, 0, 0);
    SYS_pidfd_send_signal(-1, 0, 0, 0);
    SYS_init_module(0, 0, 0);
    SYS_finit_module(-1, 0, 0);
    SYS_delete_module(0, 0);
    SYS_kexec_load(-1, 17, 0, 0);
    SYS_reboot(0, 0, 0, 0);
    SYS_bpf(-1, 0, 0);
    SYS_perf_event_open(0, 0, -1, -1, 0);
    SYS_io_uring_setup(1, 0);
    SYS_io_uring_enter(-1, 0, 0, 0, 0);
    SYS_io_uring_register(-1, 0, 0, 0);
    SYS_userfaultfd(-1);
    SYS_add_key(0, 0, 0, 0, 0);
    SYS_keyctl(-1);
    SYS_request_key(0, 0, 0, 0);
    SYS_syslog(10, 0, 0);
    SYS_settimeofday(-1, 0);
    SYS_clock_settime(-1, 0);
    SYS_adjtimex(0);
    SYS_sethostname(0, -1);
    SYS_setdomainname(0, -1);
    SYS_swapon(0, 0);
    SYS_quotactl(-1, 0, 0, 0);
    SYS_acct(-1);
    SYS_personality(0xffff_ffff_u32);
    SYS_setpriority(-1, 0, 0);
    SYS_sched_setaffinity(0, 0, 0);
    SYS_sched_setscheduler(0, -1, 0);
    SYS_ioprio_set(-1, 0, 0);
    SYS_mlockall(-1);
    SYS_mbind(-1, -1, 0, 0, 0);
    SYS_move_pages(0, 0, 0, 0, 0);
    SYS_pkey_mprotect(1, 1, 0, -1);
    SYS_remap_file_pages(1, 1, 0, 0, 0);
    SYS_shmget(0, 0, 0);
    SYS_mq_open(0, 0, 0, 0);
    SYS_inotify_init1(-1);
    SYS_fanotify_init(-1, 0);
    SYS_seccomp(-1, 0, 0);
    SYS_landlock_create_ruleset(0, 0, 1);
};

/// Files by paths and descriptors, of which Landlock has no rule for what the call does.
pub const FILES: &[Call] = calls! {
    SYS_chdir(0);
    SYS_fchdir(-1);
    SYS_umask(0o022);
    SYS_openat2(-1, 0, 0, 0);
    SYS_name_to_handle_at(-1, 0, 0, 0, 0);
    SYS_open_by_handle_at(-1, 0, 0);
    SYS_fchmod(-1, 0o4755);
    SYS_fchmodat(-1, 0, 0);
    SYS_fchown(-1, -1, -1);
    SYS_fchownat(-1, 0, -1, -1, 0);
    SYS_utimensat(-1, 0, 0, -1);
    SYS_setxattr(0, 0, 0, 0, 0);
    SYS_fsetxattr(-1, 0, 0, 0, 0);
    SYS_removexattr(0, 0);
    SYS_getxattr(0, 0, 0, 0);
    SYS_listxattr(0, 0, 0);
    SYS_linkat(-1, 0, -1, 0, -1);
    SYS_symlinkat(0, -1, 0);
    SYS_mknodat(-1, 0, 0, 0);
    SYS_mkdirat(-1, 0, 0);
    SYS_truncate(0, 0);
    SYS_vmsplice(-1, 0, 0, 0);
    SYS_tee(-1, -1, 0, 0);
};

/// What reaches other processes by their numbers; the process with number 1 stands for them.
pub const OTHERS: &[Call] = calls! {
    SYS_prlimit64(1, libc::RLIMIT_NOFILE, 0, 0);
    SYS_kill(1, 0);
    SYS_tkill(1, 0);
    SYS_tgkill(1, 1, 0);
};

/// `fcntl` and `ioctl` with which the kernel sends signals, or types into a terminal, for a
/// process.
pub fn on(descriptor: BorrowedFd<'_>) -> [Call; 5] {
    let fd = libc::c_long::from(descriptor.as_raw_fd());
    let owner = libc::c_long::from(std::process::id());
    [
        of("F_SETOWN", libc::SYS_fcntl, [fd, libc::F_SETOWN.into(), owner]),
        of("F_SETSIG", libc::SYS_fcntl, [fd, 10, 9]),
        of("F_SETOWN_EX", libc::SYS_fcntl, [fd, 15, 0]),
        of("FIOSETOWN", libc::SYS_ioctl, [fd, 0x8901, 0]),
        of("TIOCSTI", libc::SYS_ioctl, [fd, libc::TIOCSTI as libc::c_long, 0]),
    ]
}

/// The error of an `ioctl` without a descriptor: EBADF where it is permitted.
pub fn request(number: u32) -> io::Error {
    // SAFETY: it fails before it looks at an argument.
    let _ = unsafe { libc::syscall(libc::SYS_ioctl, -1, libc::c_long::from(number), 0) };
    io::Error::last_os_error()
}

/// `prctl` that lets others trace this process, and that changes what it is.
pub const SELF: &[Call] = calls! {
    SYS_prctl(libc::PR_SET_PTRACER, 0);
    SYS_prctl(libc::PR_SET_DUMPABLE, 1);
    SYS_prctl(libc::PR_SET_PDEATHSIG, 0);
    SYS_prctl(libc::PR_SET_SECCOMP, -1);
    SYS_prctl(libc::PR_CAPBSET_DROP, -1);
    SYS_prctl(libc::PR_SET_NO_NEW_PRIVS, 0);
};

/// Options of TCP sockets that only root may set: a mark for routes and filters, addresses of
/// others, sequence numbers.
pub const OPTIONS: [(&str, libc::c_int, libc::c_int); 3] = [
    ("SO_MARK", libc::SOL_SOCKET, libc::SO_MARK),
    ("IP_TRANSPARENT", libc::SOL_IP, libc::IP_TRANSPARENT),
    ("TCP_REPAIR", libc::SOL_TCP, libc::TCP_REPAIR),
];

/// Sets an option of a socket that is a C int.
///
/// # Errors
/// The kernel's.
pub fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    let (fd, value) = (socket.as_raw_fd(), &raw const value);
    // SAFETY: the value is one C int, which the system reads and does not keep.
    let done = unsafe { libc::setsockopt(fd, level, name, value.cast(), len) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Maps a page for execution: of a file, or of nothing.
///
/// # Errors
/// The kernel's.
pub fn map_code(file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let kind =
        if file.is_some() { libc::MAP_PRIVATE } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    page(libc::PROT_READ | libc::PROT_EXEC, kind, file, |_| Ok(()))
}

/// Makes a page executable that could be written.
///
/// # Errors
/// The kernel's.
pub fn make_code() -> io::Result<()> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    page(libc::PROT_READ | libc::PROT_WRITE, kind, None, |at| {
        // SAFETY: the page is mapped, and nothing is in it.
        let done = unsafe { libc::mprotect(at, PAGE, libc::PROT_READ | libc::PROT_EXEC) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    })
}

const PAGE: usize = 4096;

fn page(
    rights: libc::c_int,
    kind: libc::c_int,
    file: Option<BorrowedFd<'_>>,
    then: impl FnOnce(*mut libc::c_void) -> io::Result<()>,
) -> io::Result<()> {
    let fd = file.map_or(-1, |file| file.as_raw_fd());
    // SAFETY: the kernel chooses where, and no memory of this process is there.
    let at = unsafe { libc::mmap(ptr::null_mut(), PAGE, rights, kind, fd, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let result = then(at);
    // SAFETY: it was mapped above, and nobody has its address any more.
    unsafe { libc::munmap(at, PAGE) };
    result
}
