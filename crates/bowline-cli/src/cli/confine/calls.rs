//! seccomp: which system calls a process has.
//!
//! The filter lists what is permitted. Everything else fails with ENOSYS, as on a kernel that is
//! too old to have it, for which libc has an older call to fall back to. A process without `clone3`
//! and with `clone` for threads only starts no other process.

use std::{collections::BTreeMap, env::consts::ARCH};

use rustix::net::AddressFamily;
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen::Dword, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// Families of sockets: programs, peers by either IP, addresses of the machine.
const FAMILIES: [AddressFamily; 4] =
    [AddressFamily::UNIX, AddressFamily::INET, AddressFamily::INET6, AddressFamily::NETLINK];

/// Calls by their names in libc.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// Calls that are permitted with all arguments. Which paths they reach is Landlock's to say.
const PERMITTED: &[&[libc::c_long]] = &[
    // Threads and what is known of the process.
    calls! {
        SYS_exit SYS_exit_group SYS_futex SYS_futex_waitv SYS_get_robust_list SYS_set_robust_list
        SYS_set_tid_address SYS_rseq SYS_membarrier SYS_getcpu SYS_sched_yield
        SYS_sched_getaffinity SYS_prctl SYS_getpid SYS_getppid SYS_gettid
        SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getgroups SYS_getrusage
        SYS_sysinfo SYS_uname SYS_getrandom SYS_prlimit64 SYS_restart_syscall
    },
    // Memory; `mmap` and `mprotect` have rules of their own.
    calls! {
        SYS_brk SYS_munmap SYS_mremap SYS_madvise SYS_mincore SYS_mlock SYS_mlock2 SYS_munlock
        SYS_msync SYS_memfd_create SYS_get_mempolicy
    },
    // Signals, of which Landlock lets none out.
    calls! {
        SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait
        SYS_rt_sigsuspend SYS_sigaltstack SYS_kill SYS_tkill SYS_tgkill
    },
    // Time.
    calls! {
        SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
        SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime
    },
    // Descriptors that are open.
    calls! {
        SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
        SYS_preadv2 SYS_pwritev2 SYS_lseek SYS_close SYS_close_range SYS_dup SYS_dup3 SYS_fcntl
        SYS_flock SYS_pipe2 SYS_eventfd2 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
        SYS_epoll_pwait2 SYS_ppoll SYS_pselect6 SYS_ftruncate SYS_fallocate SYS_fsync
        SYS_fdatasync SYS_fadvise64 SYS_copy_file_range SYS_sendfile SYS_splice
    },
    // Sockets; `socket` has a rule of its own.
    calls! {
        SYS_socketpair SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_shutdown
        SYS_getsockname SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_sendto SYS_recvfrom
        SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg
    },
    // Paths.
    calls! {
        SYS_openat SYS_openat2 SYS_fstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs
        SYS_faccessat SYS_faccessat2 SYS_getdents64 SYS_readlinkat SYS_getcwd SYS_umask
        SYS_mkdirat SYS_unlinkat SYS_renameat2 SYS_fchmod SYS_fchmodat
    },
];

/// Older forms of some of these, which libc uses where they exist.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = calls! {
    SYS_access SYS_arch_prctl SYS_chmod SYS_dup2 SYS_epoll_create SYS_epoll_wait SYS_eventfd
    SYS_getdents SYS_getrlimit SYS_lstat SYS_mkdir SYS_open SYS_pause SYS_pipe SYS_poll SYS_readlink
    SYS_rename SYS_rmdir SYS_select SYS_stat SYS_time SYS_unlink
};
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

/// Calls that mount and unmount, for processes that do.
const MOUNTING: &[libc::c_long] = calls! { SYS_mount SYS_umount2 };

/// Leaves the calling thread and those that it starts the permitted calls only.
pub(super) fn filter(mounts: bool) -> Result<(), Error> {
    apply_filter(&program(mounts)?)
}

fn program(mounts: bool) -> Result<BpfProgram, BackendError> {
    let mounting = if mounts { MOUNTING } else { &[] };
    let plain = PERMITTED.iter().copied().chain([OLDER, mounting]).flatten();
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        plain.map(|call| (*call, Vec::new())).collect();
    rules.extend(with_arguments()?);
    let refused = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let arch = TargetArch::try_from(ARCH)?;
    SeccompFilter::new(rules, refused, SeccompAction::Allow, arch)?.try_into()
}

/// Calls that are permitted with some arguments.
fn with_arguments() -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let is = |at, op, value| SeccompCondition::new(at, Dword, op, value);
    let only = |condition| SeccompRule::new(vec![condition]);
    let lacks = |at, bit: i32| {
        let bit = u64::from(bit.cast_unsigned());
        only(is(at, MaskedEq(bit), 0)?)
    };
    let family = |family: AddressFamily| only(is(0, Eq, family.as_raw().into())?);
    let thread = u64::from(libc::CLONE_THREAD.cast_unsigned());
    // These put words into a terminal as if its user had typed them.
    let typing = [libc::TIOCSTI, libc::TIOCLINUX].map(|request| is(1, Ne, request));
    Ok(vec![
        (libc::SYS_clone, vec![only(is(0, MaskedEq(thread), thread)?)?]),
        (libc::SYS_socket, FAMILIES.into_iter().map(family).collect::<Result<_, _>>()?),
        (libc::SYS_ioctl, vec![SeccompRule::new(typing.into_iter().collect::<Result<_, _>>()?)?]),
        // Memory that can be written does not become code.
        (libc::SYS_mmap, vec![lacks(2, libc::PROT_EXEC)?, lacks(2, libc::PROT_WRITE)?]),
        (libc::SYS_mprotect, vec![lacks(2, libc::PROT_EXEC)?]),
    ])
}
