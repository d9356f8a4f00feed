//! seccomp: which system calls a process has, and with which arguments.
//!
//! The filter lists what is permitted. Everything else fails with ENOSYS, as on a kernel that is
//! too old to have it, for which libc has an older call to fall back to. A process without `clone3`
//! and with `clone` for threads only starts no other process.
//!
//! A call with all arguments is one whose objects are the process's own, or Landlock's to permit:
//! it knows of opening, making and removing files, of TCP ports and of signals. What it does not
//! know of is missing here, or has a rule below: modes, owners, times and attributes of files,
//! links, raw and foreign sockets, limits and descriptors of others.

use std::{collections::BTreeMap, env::consts::ARCH};

use rustix::net::{AddressFamily, SocketType};
use seccompiler::{
    BackendError, BpfProgram, Error, SeccompAction, SeccompCmpArgLen::Dword, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// Calls by their names in libc.
macro_rules! calls {
    ($($(#[$of:meta])? $name:ident)*) => { &[$($(#[$of])? libc::$name),*] };
}

/// Calls that are permitted with all arguments.
const PERMITTED: &[&[libc::c_long]] = &[
    // Threads and what is known of the process.
    calls! {
        SYS_exit SYS_exit_group SYS_futex SYS_futex_waitv SYS_get_robust_list SYS_set_robust_list
        SYS_set_tid_address SYS_rseq SYS_membarrier SYS_getcpu SYS_sched_yield
        SYS_sched_getaffinity SYS_getpid SYS_getppid SYS_gettid
        SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getgroups SYS_getrusage
        SYS_sysinfo SYS_uname SYS_getrandom SYS_restart_syscall
    },
    // Memory; `mmap` and `mprotect` have rules of their own.
    calls! { SYS_brk SYS_munmap SYS_mremap SYS_madvise SYS_msync SYS_memfd_create },
    // Signals; those to threads have a rule of their own.
    calls! {
        SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigtimedwait
        SYS_rt_sigsuspend SYS_sigaltstack
    },
    // Time.
    calls! {
        SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday
        SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime
    },
    // Descriptors that are open; `fcntl` and `ioctl` have rules of their own.
    calls! {
        SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev
        SYS_preadv2 SYS_pwritev2 SYS_lseek SYS_close SYS_close_range SYS_dup SYS_dup3
        SYS_flock SYS_pipe2 SYS_eventfd2 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
        SYS_epoll_pwait2 SYS_ppoll SYS_pselect6 SYS_ftruncate SYS_fallocate SYS_fsync
        SYS_fdatasync SYS_fadvise64 SYS_copy_file_range SYS_sendfile SYS_splice
    },
    // Sockets; those that make one, send and have an address in the call have rules of their own.
    calls! {
        SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_connect SYS_shutdown SYS_getsockname
        SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_recvfrom SYS_recvmsg SYS_recvmmsg
    },
    // Paths; `openat` has a rule of its own.
    calls! {
        SYS_fstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs SYS_faccessat SYS_faccessat2
        SYS_getdents64 SYS_readlinkat SYS_getcwd SYS_unlinkat SYS_renameat
        SYS_renameat2
    },
];

/// Older forms of some of these, which libc uses where they exist.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = calls! {
    SYS_access SYS_arch_prctl SYS_dup2 SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_getdents
    SYS_getrlimit SYS_lstat SYS_pause SYS_pipe SYS_poll SYS_readlink SYS_rename SYS_select SYS_stat
    SYS_time SYS_unlink
};
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

/// Calls that mount and unmount, for processes that do, and that make the folder for it.
const MOUNTING: &[libc::c_long] = calls! {
    SYS_mount SYS_umount2 SYS_mkdirat
    #[cfg(target_arch = "x86_64")] SYS_mkdir
};

/// What `fcntl` is for: flags, copies and locks of a descriptor, sizes of pipes, seals. Not owners,
/// leases and notices, for which the kernel sends signals of any number to any process of the user.
const FCNTL: [i32; 16] = [
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_GETPIPE_SZ,
    libc::F_SETPIPE_SZ,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// What `ioctl` is for: bytes in a socket, flags of a descriptor, whether it is a terminal and how
/// large, interfaces and their MTU, watching memory that a program has shown. Not typing into a
/// terminal, nor owners of sockets.
const IOCTL: [u32; 14] = [
    libc::TIOCOUTQ as u32,
    libc::FIONREAD as u32,
    libc::FIONBIO as u32,
    libc::FIOCLEX as u32,
    libc::FIONCLEX as u32,
    libc::TCGETS as u32,
    libc::TCGETS2 as u32,
    libc::TIOCGWINSZ as u32,
    libc::SIOCGIFMTU as u32,
    libc::SIOCGIFNAME as u32,
    libc::SIOCGIFINDEX as u32,
    libc::SIOCGIFFLAGS as u32,
    bowline_host::WATCH_REQUESTS[0],
    bowline_host::WATCH_REQUESTS[1],
];

/// What `prctl` is for: names of threads and of memory.
const PRCTL: [i32; 3] = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// Flags of `clone` that make namespaces, which a thread can have too.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

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

/// A condition: which argument, how it is compared, with what.
type Condition = (u8, SeccompCmpOp, u64);

fn is(at: u8, value: impl Into<i64>) -> Condition {
    (at, SeccompCmpOp::Eq, value.into().cast_unsigned())
}

/// The argument has these of the bits in `mask`, and no other.
fn has(at: u8, mask: i32, bits: i32) -> Condition {
    let mask = SeccompCmpOp::MaskedEq(u64::from(mask.cast_unsigned()));
    (at, mask, u64::from(bits.cast_unsigned()))
}

fn lacks(at: u8, bits: i32) -> Condition {
    has(at, bits, 0)
}

/// Calls that are permitted with some arguments: where all conditions of a list hold.
fn with_arguments() -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let own = std::process::id();
    let any_of = |at, values: &[i64]| values.iter().map(|value| vec![is(at, *value)]).collect();
    let rules: Vec<(i64, Vec<Vec<Condition>>)> = vec![
        (libc::SYS_clone, vec![vec![has(0, libc::CLONE_THREAD | NAMESPACES, libc::CLONE_THREAD)]]),
        (libc::SYS_prctl, any_of(0, &PRCTL.map(i64::from))),
        // Limits of this process.
        (libc::SYS_prlimit64, vec![vec![is(0, 0)]]),
        // To threads of this process; a kernel without Landlock's rule for signals has this one.
        (libc::SYS_tgkill, vec![vec![is(0, own)]]),
        (libc::SYS_fcntl, any_of(1, &FCNTL.map(i64::from))),
        (libc::SYS_ioctl, any_of(1, &IOCTL.map(i64::from))),
        (libc::SYS_socket, sockets()),
        // Those that are connected for ever: one of datagrams could be connected to another.
        (libc::SYS_socketpair, pairs()),
        // TCP Fast Open connects without `connect`, which is what Landlock looks at.
        (libc::SYS_sendto, vec![vec![lacks(3, libc::MSG_FASTOPEN)]]),
        (libc::SYS_sendmsg, vec![vec![lacks(2, libc::MSG_FASTOPEN)]]),
        (libc::SYS_sendmmsg, vec![vec![lacks(3, libc::MSG_FASTOPEN)]]),
        // Nothing that is mapped becomes code.
        (libc::SYS_mmap, vec![vec![lacks(2, libc::PROT_EXEC)]]),
        (libc::SYS_mprotect, vec![vec![lacks(2, libc::PROT_EXEC)]]),
        // Landlock does not look at a descriptor that only names a file; given away, it leads past
        // the modes of the folders above.
        (libc::SYS_openat, vec![vec![lacks(2, libc::O_PATH)]]),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_open, vec![vec![lacks(1, libc::O_PATH)]]),
        // musl raises signals with it.
        #[cfg(target_env = "musl")]
        (libc::SYS_tkill, vec![vec![]]),
    ];
    let condition = |(at, how, value)| SeccompCondition::new(at, Dword, how, value);
    let all = |conditions: Vec<Condition>| {
        SeccompRule::new(conditions.into_iter().map(condition).collect::<Result<_, _>>()?)
    };
    rules
        .into_iter()
        .map(|(call, rules)| Ok((call, rules.into_iter().map(all).collect::<Result<_, _>>()?)))
        .collect()
}

/// The sockets that a process makes: TCP and UDP, and what tells the addresses of the machine.
/// Other protocols of the same families are connected where Landlock has no rule (MPTCP, SMC), or
/// are of the kernel's own (ICMP). It makes no unix sockets, so that it connects to none of others.
fn sockets() -> Vec<Vec<Condition>> {
    let ip = [AddressFamily::INET, AddressFamily::INET6];
    let kinds = [(SocketType::STREAM, libc::IPPROTO_TCP), (SocketType::DGRAM, libc::IPPROTO_UDP)];
    let mut rules = Vec::new();
    for (family, (kind, protocol)) in ip.iter().flat_map(|family| kinds.map(|kind| (family, kind)))
    {
        for protocol in [0, protocol] {
            rules.push(vec![is(0, family.as_raw()), of_kind(kind), is(2, protocol)]);
        }
    }
    rules.push(vec![is(0, libc::AF_NETLINK), is(2, libc::NETLINK_ROUTE)]);
    rules
}

fn pairs() -> Vec<Vec<Condition>> {
    let kinds = [SocketType::STREAM, SocketType::SEQPACKET];
    kinds.map(|kind| vec![is(0, libc::AF_UNIX), of_kind(kind)]).to_vec()
}

/// The second argument is this kind of socket, with any flags.
fn of_kind(kind: SocketType) -> Condition {
    const KIND: u32 = 0xf;
    (1, SeccompCmpOp::MaskedEq(KIND.into()), kind.as_raw().into())
}
