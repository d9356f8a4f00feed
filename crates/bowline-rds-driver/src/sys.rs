//! System calls that need more than one line.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::ioctl::{Getter, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with, sockopt};
use rustix::thread::{MembarrierCommand, membarrier};
use rustix::time::Timespec;

/// Linux's `SIOCOUTQ`, the same number as `TIOCOUTQ`.
const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;
/// Silence after which TCP asks whether the peer is there.
pub(crate) const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);

/// Returns the bytes written to a TCP connection and not acknowledged yet, including unsent ones
/// and a FIN.
#[allow(unsafe_code)]
pub(crate) fn unacked_bytes(fd: impl AsFd) -> Result<u64, Errno> {
    // SAFETY: SIOCOUTQ stores one C int through its argument and has no other effect.
    let getter = unsafe { Getter::<SIOCOUTQ, i32>::new() };
    // SAFETY: the getter above matches its opcode, for every kind of descriptor.
    let bytes = unsafe { ioctl(fd, getter) }?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Tells whether a TCP connection has bytes that were not read, or that the peer's TCP has not
/// acknowledged. One that has failed has neither.
pub(crate) fn has_unread_or_unacked(fd: impl AsFd) -> bool {
    unacked_bytes(&fd).unwrap_or(0) > 0 || rustix::io::ioctl_fionread(&fd).unwrap_or(0) > 0
}

/// Returns freed memory, which the allocator keeps, to the system.
#[allow(unsafe_code)]
pub(crate) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// What the system reports about a TCP connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpState {
    /// Number of consecutive retransmission timeouts.
    pub(crate) timeouts: u8,
    /// Segments sent and not acknowledged.
    pub(crate) unacked: u32,
    /// For how long the peer has acknowledged nothing, not even a probe.
    #[cfg_attr(not(test), allow(dead_code, reason = "tests see by it that probes are answered"))]
    pub(crate) silence: Duration,
}

/// Reads the state of a TCP connection.
#[allow(unsafe_code)]
pub(crate) fn tcp_state(fd: impl AsFd) -> Result<TcpState, Errno> {
    // SAFETY: the structure is integers only, for which all zeroes are a value.
    let mut info: libc::tcp_info = unsafe { core::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the system writes at most `len` bytes to `info`, and to `len` how many.
    let result = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(last_errno());
    }
    Ok(TcpState {
        timeouts: info.tcpi_retransmits,
        unacked: info.tcpi_unacked,
        silence: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Makes the system drop every segment for a TCP connection before TCP sees it: nothing more is
/// acknowledged or queued.
#[allow(unsafe_code)]
pub(crate) fn drop_all_input(fd: impl AsFd) -> Result<(), Errno> {
    let code = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut keep_nothing = libc::sock_filter { code, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &raw mut keep_nothing };
    // SAFETY: the system only reads `program` and the one instruction it points to, both of which
    // live until the call returns; it keeps a copy.
    let result = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Makes the system refuse to change the filter of a socket.
#[cfg(test)]
#[allow(unsafe_code)]
pub(crate) fn lock_filter(fd: impl AsFd) -> Result<(), Errno> {
    let on: libc::c_int = 1;
    // SAFETY: the system only reads the integer, which lives until the call returns.
    let result = unsafe {
        libc::setsockopt(
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LOCK_FILTER,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

/// Waits until every processor has finished its present work in the kernel, including the handling
/// of a segment; tells whether the system supports that. It takes some 10 ms.
pub(crate) fn wait_for_all_cpus() -> bool {
    membarrier(MembarrierCommand::Global).is_ok()
}

fn last_errno() -> Errno {
    Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

pub(crate) fn event_fd() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Adds one to an event descriptor. If the counter is full, the descriptor is readable anyway.
pub(crate) fn signal(fd: impl AsFd) {
    let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
}

/// Empties an event descriptor.
pub(crate) fn unsignal(fd: impl AsFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count[..]);
}

fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Makes a non-blocking TCP socket for addresses like `ip`.
pub(crate) fn tcp_socket(ip: IpAddr) -> Result<OwnedFd, Errno> {
    socket_with(
        family(ip),
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(ipproto::TCP),
    )
}

/// Tells whether this machine has the address, with its scope, in this network namespace.
pub(crate) fn is_local(mut at: SocketAddr) -> bool {
    if at.ip().is_loopback() {
        return true;
    }
    at.set_port(0);
    socket_with(family(at.ip()), SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .is_ok_and(|fd| bind(fd, &at).is_ok())
}

/// Sets the options of a connection [spec 2.2], as far as the system allows: none is needed for
/// correctness. The user timeout limits how long unacknowledged data hide a dead peer.
pub(crate) fn tune(fd: impl AsFd, peer: SocketAddr, control: Option<&str>, buffers: (u32, u32)) {
    let fd = fd.as_fd();
    let _ = sockopt::set_tcp_nodelay(fd, true);
    let _ = sockopt::set_socket_keepalive(fd, true);
    let _ = sockopt::set_tcp_keepidle(fd, KEEPALIVE_IDLE);
    let _ = sockopt::set_tcp_keepintvl(fd, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(fd, 5);
    let _ = sockopt::set_tcp_user_timeout(fd, 30_000);
    // The kernel's sysctls are effective sizes, and the system doubles the value of the option.
    let (send, recv) = buffers;
    if send > 0 {
        let _ = sockopt::set_socket_send_buffer_size(fd, send as usize / 2);
    }
    if recv > 0 {
        let _ = sockopt::set_socket_recv_buffer_size(fd, recv as usize / 2);
    }
    match control {
        Some(name) => {
            let _ = sockopt::set_tcp_congestion(fd, name);
        }
        None if is_local(peer) => {
            let _ = sockopt::set_tcp_congestion(fd, "cubic");
        }
        None => {}
    }
}
