//! The kernel's own RDS sockets, for comparisons in a guest that has them.

#![allow(unsafe_code, reason = "system calls of an address family std does not know")]

use super::{Backend, Failure, Info, Mode, Outcome, Socket, Wish};
use std::io::{self, IoSlice};
use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const AF_RDS: i32 = 21;
const SOL_RDS: i32 = 276;
const RDS_CANCEL_SENT_TO: i32 = 1;

/// Sockets of the kernel. IPv4 only.
#[derive(Debug)]
pub(crate) struct Kernel;

#[derive(Debug)]
struct KernelSocket {
    fd: OwnedFd,
    nonblock: AtomicBool,
}

fn last(what: &str) -> Failure {
    let e = io::Error::last_os_error();
    Failure { errno: e.raw_os_error().unwrap_or(0), text: format!("{what}: {e}") }
}

fn unsupported(what: &str) -> Failure {
    Failure { errno: libc::EOPNOTSUPP, text: format!("the kernel backend has no {what}") }
}

fn check(rc: isize, what: &str) -> Outcome<usize> {
    usize::try_from(rc).map_err(|_| last(what))
}

fn sockaddr(a: SocketAddr) -> Outcome<libc::sockaddr_in> {
    let SocketAddr::V4(a) = a else {
        return Err(unsupported("IPv6"));
    };
    Ok(libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: a.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
        sin_zero: [0; 8],
    })
}

fn from_sockaddr(s: &libc::sockaddr_in) -> SocketAddr {
    let ip = Ipv4Addr::from(s.sin_addr.s_addr.to_ne_bytes());
    SocketAddrV4::new(ip, u16::from_be(s.sin_port)).into()
}

const ADDR_LEN: u32 = size_of::<libc::sockaddr_in>() as u32;

fn empty_addr() -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: 0,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: 0 },
        sin_zero: [0; 8],
    }
}

impl KernelSocket {
    fn set<T>(&self, level: i32, name: i32, value: &T, what: &str) -> Outcome<()> {
        // SAFETY: value points to size_of::<T>() readable bytes for the call.
        let rc = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                (&raw const *value).cast(),
                size_of::<T>() as u32,
            )
        };
        check(rc as isize, what).map(drop)
    }

    fn flags(&self) -> i32 {
        if self.nonblock.load(Ordering::Relaxed) { libc::MSG_DONTWAIT } else { 0 }
    }
}

impl Socket for KernelSocket {
    fn local(&self) -> Outcome<SocketAddr> {
        let (mut a, mut n) = (empty_addr(), ADDR_LEN);
        // SAFETY: a and n are writable and n holds the size of a.
        let rc = unsafe { libc::getsockname(self.fd.as_raw_fd(), (&raw mut a).cast(), &raw mut n) };
        check(rc as isize, "getsockname")?;
        Ok(from_sockaddr(&a))
    }

    fn set_mode(&self, mode: Mode) -> Outcome<()> {
        self.nonblock.store(mode == Mode::Nonblock, Ordering::Relaxed);
        let t = match mode {
            Mode::Timeout(t) => t,
            _ => Duration::ZERO,
        };
        let tv = libc::timeval {
            tv_sec: t.as_secs() as libc::time_t,
            tv_usec: libc::suseconds_t::from(t.subsec_micros()),
        };
        self.set(libc::SOL_SOCKET, libc::SO_SNDTIMEO, &tv, "SO_SNDTIMEO")?;
        self.set(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &tv, "SO_RCVTIMEO")
    }

    fn send(&self, pieces: &[IoSlice<'_>], to: SocketAddr) -> Outcome<usize> {
        let mut a = sockaddr(to)?;
        // SAFETY: all-zero bytes are a valid msghdr (null pointers, zero lengths).
        let mut m: libc::msghdr = unsafe { mem::zeroed() };
        m.msg_name = (&raw mut a).cast();
        m.msg_namelen = ADDR_LEN;
        m.msg_iov = pieces.as_ptr().cast_mut().cast();
        m.msg_iovlen = pieces.len();
        // SAFETY: m names a live address and a live slice of IoSlice, which has
        // the layout of iovec and is only read.
        let rc = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const m, self.flags()) };
        check(rc, "sendmsg")
    }

    fn send_many(&self, message: &[u8], count: usize, to: SocketAddr) -> Outcome<usize> {
        for i in 0..count {
            match self.send(&[IoSlice::new(message)], to) {
                Ok(_) => {}
                Err(_) if i > 0 => return Ok(i),
                Err(e) => return Err(e),
            }
        }
        Ok(count)
    }

    fn recv(&self, buf: &mut [u8]) -> Outcome<(usize, SocketAddr)> {
        let (mut a, mut n) = (empty_addr(), ADDR_LEN);
        // SAFETY: buf, a and n are writable for the lengths given.
        let rc = unsafe {
            libc::recvfrom(
                self.fd.as_raw_fd(),
                buf.as_mut_ptr().cast(),
                buf.len(),
                self.flags(),
                (&raw mut a).cast(),
                &raw mut n,
            )
        };
        Ok((check(rc, "recvfrom")?, from_sockaddr(&a)))
    }

    fn recv_many(&self, buf: &mut [u8]) -> Outcome<(u64, u64)> {
        self.recv(buf).map(|(n, _)| (1, n as u64))
    }

    fn wait(&self, write: bool, timeout: Duration) -> Outcome<()> {
        let mut p = libc::pollfd {
            fd: self.fd.as_raw_fd(),
            events: if write { libc::POLLOUT } else { libc::POLLIN },
            revents: 0,
        };
        // SAFETY: p is one writable pollfd.
        let rc = unsafe { libc::poll(&raw mut p, 1, timeout.as_millis() as i32) };
        check(rc as isize, "poll").map(drop)
    }

    fn cancel(&self, to: SocketAddr) -> Outcome<()> {
        self.set(SOL_RDS, RDS_CANCEL_SENT_TO, &sockaddr(to)?, "RDS_CANCEL_SENT_TO")
    }

    fn unsent(&self, wait: Duration) -> Outcome<usize> {
        // the info interface is the Python endpoint's business; a comparison
        // run counts at the receiver
        std::thread::sleep(wait.min(Duration::from_millis(500)));
        Ok(0)
    }
}

impl Backend for Kernel {
    fn name(&self) -> String {
        "kernel".into()
    }

    fn bind(&self, wish: Wish) -> Outcome<Box<dyn Socket>> {
        // SAFETY: no memory is involved.
        let fd = unsafe { libc::socket(AF_RDS, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
        check(fd as isize, "socket")?;
        // SAFETY: fd was just opened and belongs to nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let s = KernelSocket { fd, nonblock: AtomicBool::new(false) };
        for (opt, n) in [(libc::SO_SNDBUFFORCE, wish.sndbuf), (libc::SO_RCVBUFFORCE, wish.rcvbuf)] {
            if n != 0 {
                s.set(libc::SOL_SOCKET, opt, &(n as i32), "setting a buffer size")?;
            }
        }
        let a = sockaddr(wish.bind)?;
        // SAFETY: a is a readable sockaddr_in of the length given.
        let rc = unsafe { libc::bind(s.fd.as_raw_fd(), (&raw const a).cast(), ADDR_LEN) };
        check(rc as isize, "bind")?;
        Ok(Box::new(s))
    }

    fn info(&self) -> Outcome<Info> {
        Ok(Info::default())
    }

    fn sysctl(&self, _: &str, _: Option<i64>) -> Outcome<i64> {
        Err(unsupported("sysctl"))
    }

    fn cut(&self, _: Option<IpAddr>) -> Outcome<usize> {
        Err(unsupported("cut"))
    }

    fn shutdown(&self) {}
}
