//! System calls without a safe wrapper: segmented datagrams, batches of datagrams, socket options
//! and interfaces.

use std::ffi::CStr;
use std::mem::{offset_of, size_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use bowline_roce::{DirectPlacement, PLACEMENT_GAP, PLACEMENT_HEAD, PLACEMENT_PACKETS_MAX};
use rustix::io::Errno;

/// Size of a receive buffer: no datagram, and no run of merged datagrams, is longer.
pub(crate) const BUFFER_LEN: usize = 1 << 16;
/// Buffers of a batch.
pub(crate) const BUFFERS_MAX: usize = 16;
/// Most sends of one call.
pub(crate) const SENDS_MAX: usize = 16;
/// Bytes for control messages: at most three, of one number each.
const CONTROL_LEN: usize = 96;
/// Bytes before the data of a control message.
const CONTROL_HEAD: usize = size_of::<libc::cmsghdr>();
/// Length of a socket address of either family.
const SOCKADDR_LEN: usize = size_of::<libc::sockaddr_in6>();

/// Options of a socket, each a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opt {
    /// Path MTU discovery of IPv4; the value is one of `IP_PMTUDISC_*`.
    MtuDiscover4,
    /// Path MTU discovery of IPv6; the same values.
    MtuDiscover6,
    /// Only IPv6.
    V6Only,
    /// Receive IPv6 datagrams without checksum.
    NoCheck6Rx,
    /// Receive runs of datagrams merged.
    Gro,
    /// Tell the type of service of received IPv4 datagrams.
    RecvTos4,
    /// Tell the traffic class of received IPv6 datagrams.
    RecvTos6,
    /// Tell with received datagrams how many the socket has lost before them.
    Overflows,
    /// Type of service of IPv4 datagrams sent without one of their own.
    Tos4,
    /// Traffic class of IPv6 datagrams sent without one of their own.
    Tos6,
    /// Send in datagrams of this many bytes; 0: as given.
    Segment,
    /// Receive buffer beyond the system's limit; needs a privilege.
    RecvBufForce,
    /// Receive buffer.
    RecvBuf,
    /// Send buffer beyond the system's limit; needs a privilege.
    SendBufForce,
    /// Send buffer.
    SendBuf,
    /// Several sockets of one address and port.
    ReusePort,
    /// Several sockets of one multicast group and port.
    ReuseAddr,
    /// Receive what others have joined IPv4 groups for.
    MulticastAll4,
    /// Receive what others have joined IPv6 groups for.
    MulticastAll6,
}

impl Opt {
    const fn names(self) -> (libc::c_int, libc::c_int) {
        match self {
            Self::MtuDiscover4 => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
            Self::MtuDiscover6 => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
            Self::V6Only => (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
            Self::NoCheck6Rx => (libc::IPPROTO_UDP, libc::UDP_NO_CHECK6_RX),
            Self::Gro => (libc::IPPROTO_UDP, libc::UDP_GRO),
            Self::RecvTos4 => (libc::IPPROTO_IP, libc::IP_RECVTOS),
            Self::RecvTos6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
            Self::Overflows => (libc::SOL_SOCKET, libc::SO_RXQ_OVFL),
            Self::Tos4 => (libc::IPPROTO_IP, libc::IP_TOS),
            Self::Tos6 => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            Self::Segment => (libc::IPPROTO_UDP, libc::UDP_SEGMENT),
            Self::RecvBufForce => (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE),
            Self::RecvBuf => (libc::SOL_SOCKET, libc::SO_RCVBUF),
            Self::SendBufForce => (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE),
            Self::SendBuf => (libc::SOL_SOCKET, libc::SO_SNDBUF),
            Self::ReusePort => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
            Self::ReuseAddr => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            Self::MulticastAll4 => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
            Self::MulticastAll6 => (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL),
        }
    }
}

fn last_error() -> Errno {
    let errno = std::io::Error::last_os_error().raw_os_error();
    Errno::from_raw_os_error(errno.unwrap_or(libc::EIO))
}

/// Sets an option.
#[allow(unsafe_code)]
pub(crate) fn set(fd: BorrowedFd<'_>, option: Opt, value: i32) -> Result<(), Errno> {
    let (level, name) = option.names();
    let len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the option's value is one C int, which the system reads and does not keep.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Makes the system verify the checksum of a datagram before it queues the datagram. Otherwise it
/// does so while it copies the datagram to the receive buffer, and leaves bytes there even if it
/// then finds the checksum wrong. A socket filter, even one that accepts every datagram, forces the
/// check to come first.
pub(crate) fn verify_first(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut all = [libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: u32::MAX }];
    attach(fd, libc::SO_ATTACH_FILTER, &mut all)
}

/// Returns a number: `BPF_RET | BPF_K`, and `BPF_RET | BPF_A`.
const RETURN: u16 = 0x06;
const RETURN_LOADED: u16 = 0x16;

/// Has the system give each datagram for an address and port that `count` sockets share to the one
/// whose number, in the order in which they were bound, is the highest byte of the datagram's queue
/// pair number, and to the first where no socket has that number. For all of them.
pub(crate) fn steer(fd: BorrowedFd<'_>, count: u32) -> Result<(), Errno> {
    const LOAD_BYTE: u16 = 0x30; // BPF_LD | BPF_B | BPF_ABS
    const JUMP_IF_LESS_NOT: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
    const SO_ATTACH_REUSEPORT_CBPF: libc::c_int = 51;
    /// Of the queue pair number in the base transport header.
    const PART_AT: u32 = 5;
    let step = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let mut all = [
        step(LOAD_BYTE, 0, PART_AT),
        step(JUMP_IF_LESS_NOT, 1, count),
        step(RETURN_LOADED, 0, 0),
        step(RETURN, 0, 0),
    ];
    attach(fd, SO_ATTACH_REUSEPORT_CBPF, &mut all)
}

/// Attaches a program to a socket.
#[allow(unsafe_code)]
fn attach(
    fd: BorrowedFd<'_>,
    name: libc::c_int,
    all: &mut [libc::sock_filter],
) -> Result<(), Errno> {
    let program = libc::sock_fprog {
        len: all.len() as u16, // a few
        filter: all.as_mut_ptr(),
    };
    let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
    let level = libc::SOL_SOCKET;
    // SAFETY: the option's value points to a program of the length it gives, which the system
    // copies.
    let result =
        unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const program).cast(), len) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Reads an option.
#[allow(unsafe_code)]
pub(crate) fn get(fd: BorrowedFd<'_>, option: Opt) -> Result<i32, Errno> {
    let (level, name) = option.names();
    let mut value = 0_i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    let (at, size) = (&raw mut value, &raw mut len);
    // SAFETY: the system writes at most `len` bytes to `value`, and to `len` how many.
    let result = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, at.cast(), size) };
    if result == 0 { Ok(value) } else { Err(last_error()) }
}

/// Has a descriptor stand for what another one is of. What it was of is closed when calls of other
/// threads with it have returned.
#[allow(unsafe_code)]
pub(crate) fn replace(at: BorrowedFd<'_>, with: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: both are open, and `at` stays so: its owner closes something else in the end.
    let result = unsafe { libc::dup3(with.as_raw_fd(), at.as_raw_fd(), libc::O_CLOEXEC) };
    if result < 0 { Err(last_error()) } else { Ok(()) }
}

/// A socket address in the system's format.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct SockAddr([u8; SOCKADDR_LEN]);

impl SockAddr {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    /// Converts an address; returns it with its length in bytes.
    fn new(of: SocketAddr) -> (Self, usize) {
        let mut name = Self([0; SOCKADDR_LEN]);
        match of {
            SocketAddr::V4(at) => {
                name.put(0, &(libc::AF_INET as libc::sa_family_t).to_ne_bytes());
                name.put(offset_of!(libc::sockaddr_in, sin_port), &at.port().to_be_bytes());
                name.put(offset_of!(libc::sockaddr_in, sin_addr), &at.ip().octets());
                (name, size_of::<libc::sockaddr_in>())
            }
            SocketAddr::V6(at) => {
                name.put(0, &(libc::AF_INET6 as libc::sa_family_t).to_ne_bytes());
                name.put(offset_of!(libc::sockaddr_in6, sin6_port), &at.port().to_be_bytes());
                name.put(offset_of!(libc::sockaddr_in6, sin6_addr), &at.ip().octets());
                let scope = at.scope_id().to_ne_bytes();
                name.put(offset_of!(libc::sockaddr_in6, sin6_scope_id), &scope);
                (name, SOCKADDR_LEN)
            }
        }
    }

    fn take<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        for (to, from) in bytes.iter_mut().zip(self.0.iter().skip(at)) {
            *to = *from;
        }
        bytes
    }

    /// Returns the address; `None` for another family.
    fn addr(&self) -> Option<SocketAddr> {
        match i32::from(libc::sa_family_t::from_ne_bytes(self.take(0))) {
            libc::AF_INET => {
                let port = self.take(offset_of!(libc::sockaddr_in, sin_port));
                let ip: [u8; 4] = self.take(offset_of!(libc::sockaddr_in, sin_addr));
                Some((Ipv4Addr::from(ip), u16::from_be_bytes(port)).into())
            }
            libc::AF_INET6 => {
                let port = self.take(offset_of!(libc::sockaddr_in6, sin6_port));
                let ip: [u8; 16] = self.take(offset_of!(libc::sockaddr_in6, sin6_addr));
                let scope = self.take(offset_of!(libc::sockaddr_in6, sin6_scope_id));
                let (port, scope) = (u16::from_be_bytes(port), u32::from_ne_bytes(scope));
                Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
            }
            _ => None,
        }
    }
}

/// Control messages, in the kernel's layout: length (as wide as a pointer), level, type, data; each
/// begins at a multiple of a pointer's size.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

impl Control {
    const fn new() -> Self {
        Self([0; CONTROL_LEN])
    }

    /// Appends a message after `used` bytes; returns the new number of used bytes.
    fn push(&mut self, used: usize, level: i32, name: i32, data: &[u8]) -> usize {
        let len = CONTROL_HEAD + data.len();
        let width = size_of::<usize>();
        let parts: [(usize, &[u8]); 4] = [
            (0, &len.to_ne_bytes()),
            (width, &level.to_ne_bytes()),
            (width + 4, &name.to_ne_bytes()),
            (CONTROL_HEAD, data),
        ];
        for (at, bytes) in parts {
            for (to, from) in self.0.iter_mut().skip(used + at).zip(bytes) {
                *to = *from;
            }
        }
        used + len.next_multiple_of(width)
    }

    /// Builds the control messages of one send, and returns them with their length in bytes.
    fn of_send(to: SocketAddr, tos: Option<u8>, segment: Option<u16>) -> (Self, usize) {
        let mut control = Self::new();
        let mut used = 0;
        if let Some(segment) = segment {
            let data = segment.to_ne_bytes();
            used = control.push(used, libc::IPPROTO_UDP, libc::UDP_SEGMENT, &data);
        }
        if let Some(tos) = tos {
            let (level, kind) = match to {
                SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            used = control.push(used, level, kind, &i32::from(tos).to_ne_bytes());
        }
        (control, used)
    }

    fn number<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    /// Returns the number in the message of this kind among the first `used` bytes.
    fn find(&self, used: usize, level: i32, name: i32) -> Option<i32> {
        let width = size_of::<usize>();
        let mut at = 0;
        while at + CONTROL_HEAD <= used {
            let len = usize::from_ne_bytes(self.number(at)?);
            let kind = (
                i32::from_ne_bytes(self.number(at + width)?),
                i32::from_ne_bytes(self.number(at + width + 4)?),
            );
            if kind == (level, name) && len >= CONTROL_HEAD + 4 {
                return self.number(at + CONTROL_HEAD).map(i32::from_ne_bytes);
            }
            // The type of service of IPv4 is one byte.
            if kind == (level, name) && len > CONTROL_HEAD {
                return self.number(at + CONTROL_HEAD).map(|[byte]: [u8; 1]| i32::from(byte));
            }
            if len < CONTROL_HEAD {
                return None;
            }
            at += len.next_multiple_of(width);
        }
        None
    }
}

/// Sends bytes as one datagram, or, with `segment`, as datagrams of that many bytes each, the last
/// perhaps shorter [ICRC-21], [ICRC-22]. Without a type of service they have the socket's.
#[allow(unsafe_code)]
pub(crate) fn send(
    fd: BorrowedFd<'_>,
    to: SocketAddr,
    tos: Option<u8>,
    segment: Option<u16>,
    bytes: &[u8],
) -> Result<(), Errno> {
    let (mut name, name_len) = SockAddr::new(to);
    let (mut control, used) = Control::of_send(to, tos, segment);
    let mut piece =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the structure is numbers and pointers, for which all zeroes are a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = name_len as libc::socklen_t;
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    if used > 0 {
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = used as _;
    }
    // SAFETY: all that the message points to, with the lengths given, lives until the call returns,
    // and the system only reads it.
    let sent = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(last_error()) } else { Ok(()) }
}

/// Arguments of one [`send`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing<'a> {
    pub(crate) to: SocketAddr,
    pub(crate) tos: Option<u8>,
    pub(crate) segment: Option<u16>,
    pub(crate) bytes: &'a [u8],
}

/// Does the work of up to [`SENDS_MAX`] calls of [`send`] with one system call; returns how many of
/// them were done.
#[allow(unsafe_code)]
pub(crate) fn send_many<'a>(
    fd: BorrowedFd<'_>,
    all: impl Iterator<Item = Outgoing<'a>>,
) -> Result<usize, Errno> {
    let mut names = [SockAddr([0; SOCKADDR_LEN]); SENDS_MAX];
    let mut controls = [Control::new(); SENDS_MAX];
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut pieces = [empty; SENDS_MAX];
    // SAFETY: the structures are numbers and pointers, for which all zeroes are a value.
    let mut messages: [libc::mmsghdr; SENDS_MAX] = unsafe { std::mem::zeroed() };
    let mut ready = 0;
    let parts = names.iter_mut().zip(&mut controls).zip(&mut pieces).zip(&mut messages);
    for ((((name, control), piece), message), out) in parts.zip(all) {
        ready += 1;
        let (of_name, name_len) = SockAddr::new(out.to);
        let (of_control, used) = Control::of_send(out.to, out.tos, out.segment);
        (*name, *control) = (of_name, of_control);
        let start = out.bytes.as_ptr().cast_mut().cast();
        *piece = libc::iovec { iov_base: start, iov_len: out.bytes.len() };
        let header = &mut message.msg_hdr;
        header.msg_name = (&raw mut *name).cast();
        header.msg_namelen = name_len as libc::socklen_t;
        header.msg_iov = &raw mut *piece;
        header.msg_iovlen = 1;
        if used > 0 {
            header.msg_control = (&raw mut *control).cast();
            header.msg_controllen = used as _;
        }
    }
    let (at, flags) = (messages.as_mut_ptr(), libc::MSG_NOSIGNAL as _);
    // SAFETY: each of the `ready` messages points to bytes, a name, an element and a control area
    // of its own, of the lengths given, all of which live until the call returns; the system only
    // reads them.
    let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), at, ready as libc::c_uint, flags) };
    usize::try_from(sent).map_err(|_| last_error())
}

/// Description of one received buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Sender.
    pub(crate) from: SocketAddr,
    /// Bytes.
    pub(crate) len: usize,
    /// Bytes of each merged datagram except the last; `None` for a single datagram.
    pub(crate) segment: Option<usize>,
    /// Type of service or traffic class; 0 if unknown.
    pub(crate) tos: u8,
    /// How many datagrams, or merged runs of them, the socket has lost before this one since it was
    /// opened, because its buffer was full; counts around.
    pub(crate) overflows: u32,
}

/// Buffers for datagrams.
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    arrivals: Vec<Option<Arrival>>,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox").field("arrivals", &self.arrivals).finish_non_exhaustive()
    }
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self {
            bytes: vec![0; BUFFER_LEN * BUFFERS_MAX].into_boxed_slice(),
            arrivals: Vec::with_capacity(BUFFERS_MAX),
        }
    }

    /// The framing that [`receive_in_place`] received; longer than what was written.
    pub(crate) fn framing(&self) -> &[u8] {
        self.bytes.get(..BUFFER_LEN).unwrap_or_default()
    }

    /// Forgets the buffers of earlier calls.
    pub(crate) fn clear(&mut self) {
        self.arrivals.clear();
    }

    /// Returns the buffers that the last calls of [`receive_one`] and [`receive_more`] received;
    /// `None` for one that was truncated or has no sender address.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = Option<(Arrival, &[u8])>> {
        self.arrivals.iter().zip(self.bytes.chunks(BUFFER_LEN)).map(|(arrival, buffer)| {
            let arrival = (*arrival)?;
            Some((arrival, buffer.get(..arrival.len)?))
        })
    }
}

/// Receives one buffer without waiting, the first of a batch; returns its length in bytes. This is
/// a separate call because most calls of a polling thread find nothing and should be cheap.
#[allow(unsafe_code)]
pub(crate) fn receive_one(fd: BorrowedFd<'_>, inbox: &mut Inbox) -> Result<usize, Errno> {
    inbox.arrivals.clear();
    let mut name = SockAddr([0; SOCKADDR_LEN]);
    let mut control = Control::new();
    let Some(buffer) = inbox.bytes.chunks_mut(BUFFER_LEN).next() else {
        return Err(Errno::NOBUFS);
    };
    let mut piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the structure is numbers and pointers, for which all zeroes are a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    let pieces = std::slice::from_mut(&mut piece);
    fill_header(&mut header, &mut name, &mut control, pieces);
    // SAFETY: the message points to a buffer, a name, an element and a control area, of the lengths
    // given, all of which live until the call returns.
    let len = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
    let Ok(len) = usize::try_from(len) else {
        return Err(last_error());
    };
    inbox.arrivals.push(arrival(&header, &name, &control, len));
    Ok(len)
}

/// Receives one buffer without waiting, the only one of a batch: payloads go to their destinations
/// in `placement`, the framing into the inbox. Returns the number of bytes, and `None` beside it if
/// the buffer has no sender address.
#[allow(unsafe_code)]
pub(crate) fn receive_in_place(
    fd: BorrowedFd<'_>,
    inbox: &mut Inbox,
    placement: &DirectPlacement,
) -> Result<(usize, Option<Arrival>), Errno> {
    inbox.arrivals.clear();
    let mut name = SockAddr([0; SOCKADDR_LEN]);
    let mut control = Control::new();
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut pieces = [empty; 2 * PLACEMENT_PACKETS_MAX + 1];
    let Some(mut framing) = inbox.bytes.get_mut(..BUFFER_LEN) else { return Err(Errno::NOBUFS) };
    let mut gap = PLACEMENT_HEAD;
    let mut used = 0;
    for k in 0..placement.packets().min(PLACEMENT_PACKETS_MAX) {
        let (now, rest) = framing.split_at_mut(gap);
        let at = placement.place.offset + k * placement.payload;
        let place = placement.place.buffer.raw(at, placement.payload);
        pieces[used] = libc::iovec { iov_base: now.as_mut_ptr().cast(), iov_len: gap };
        pieces[used + 1] = libc::iovec { iov_base: place.cast(), iov_len: placement.payload };
        used += 2;
        (framing, gap) = (rest, PLACEMENT_GAP);
    }
    pieces[used] = libc::iovec { iov_base: framing.as_mut_ptr().cast(), iov_len: framing.len() };
    // SAFETY: the structure is numbers and pointers, for which all zeroes are a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    fill_header(&mut header, &mut name, &mut control, &mut pieces[..=used]);
    // SAFETY: the message points to a name, a control area and elements, of the lengths given, all
    // of which live until the call returns. The elements are parts of the inbox, none twice, and of
    // a buffer, whose memory lives as long as `placement` and is reached by raw copies only, as if
    // a device wrote it.
    let len = unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
    let Ok(len) = usize::try_from(len) else {
        return Err(last_error());
    };
    Ok((len, arrival(&header, &name, &control, len)))
}

fn fill_header(
    header: &mut libc::msghdr,
    name: &mut SockAddr,
    control: &mut Control,
    pieces: &mut [libc::iovec],
) {
    header.msg_name = (&raw mut *name).cast();
    header.msg_namelen = SOCKADDR_LEN as libc::socklen_t;
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len() as _;
    header.msg_control = (&raw mut *control).cast();
    header.msg_controllen = CONTROL_LEN as _;
}

/// Interprets the message header of a received buffer of `len` bytes; `None` if the buffer is
/// unusable.
fn arrival(
    header: &libc::msghdr,
    name: &SockAddr,
    control: &Control,
    len: usize,
) -> Option<Arrival> {
    let cut = header.msg_flags & libc::MSG_TRUNC != 0;
    #[allow(clippy::unnecessary_cast, reason = "not the same type with every C library")]
    let used = header.msg_controllen as usize;
    let segment = control.find(used, libc::IPPROTO_UDP, libc::UDP_GRO);
    let segment = segment.and_then(|bytes| usize::try_from(bytes).ok()).filter(|n| *n > 0);
    let from = name.addr().filter(|_| !cut)?;
    let tos = match from {
        SocketAddr::V4(_) => control.find(used, libc::IPPROTO_IP, libc::IP_TOS),
        SocketAddr::V6(_) => control.find(used, libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    };
    // Nothing is told before the first loss.
    let overflows = control.find(used, libc::SOL_SOCKET, libc::SO_RXQ_OVFL).map_or(0, |n| n as u32);
    Some(Arrival { from, len, segment, tos: tos.map_or(0, |tos| tos as u8), overflows })
}

/// Receives further buffers without waiting, after those in the inbox, until `most` buffers or all
/// of them are full.
#[allow(unsafe_code)]
pub(crate) fn receive_more(
    fd: BorrowedFd<'_>,
    inbox: &mut Inbox,
    most: usize,
) -> Result<(), Errno> {
    let buffers = inbox.bytes.chunks_mut(BUFFER_LEN).take(most).skip(inbox.arrivals.len());
    let mut names = [SockAddr([0; SOCKADDR_LEN]); BUFFERS_MAX];
    let mut controls = [Control::new(); BUFFERS_MAX];
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut pieces = [empty; BUFFERS_MAX];
    // SAFETY: the structures are numbers and pointers, for which all zeroes are a value.
    let mut messages: [libc::mmsghdr; BUFFERS_MAX] = unsafe { std::mem::zeroed() };
    let mut ready = 0;
    let parts = names.iter_mut().zip(&mut controls).zip(&mut pieces).zip(&mut messages);
    for ((((name, control), piece), message), buffer) in parts.zip(buffers) {
        ready += 1;
        *piece = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        fill_header(&mut message.msg_hdr, name, control, std::slice::from_mut(piece));
    }
    let (at, flags) = (messages.as_mut_ptr(), libc::MSG_DONTWAIT as _);
    // SAFETY: each of the `ready` messages points to a buffer, a name, an element and a control
    // area of its own, of the lengths given, all of which live until the call returns.
    let count = unsafe {
        libc::recvmmsg(fd.as_raw_fd(), at, ready as libc::c_uint, flags, std::ptr::null_mut())
    };
    let Ok(count) = usize::try_from(count) else {
        return Err(last_error());
    };
    for ((message, name), control) in messages.iter().zip(&names).zip(&controls).take(count) {
        let len = message.msg_len as usize;
        inbox.arrivals.push(arrival(&message.msg_hdr, name, control, len));
    }
    Ok(())
}

/// The interface of a local address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    /// Name of the interface.
    pub(crate) name: String,
    /// Maximum transmission unit in bytes.
    pub(crate) mtu: usize,
    /// Zone of a link-local IPv6 address, else 0.
    pub(crate) scope: u32,
    /// Index of the interface.
    pub(crate) index: u32,
}

/// Addresses of this machine's interfaces.
struct Addresses(*mut libc::ifaddrs);

impl Drop for Addresses {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the list came from `getifaddrs` and is freed once.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

/// Finds the interfaces that have an address; there may be several only for a link-local one. A
/// loopback address belongs to the interface that has any loopback address.
#[allow(unsafe_code)]
pub(crate) fn interfaces_of(fd: BorrowedFd<'_>, ip: IpAddr) -> Vec<Interface> {
    let mut all = Vec::new();
    let mut first = std::ptr::null_mut();
    // SAFETY: the system stores the head of a list, to be freed by `freeifaddrs`.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return all;
    }
    let list = Addresses(first);
    let mut at = list.0;
    while !at.is_null() {
        // SAFETY: an element of the list, which lives until `list` is dropped.
        let element = unsafe { &*at };
        at = element.ifa_next;
        let Some(found) = sockaddr(element.ifa_addr) else {
            continue;
        };
        let loops = ip.is_loopback() && found.ip().is_loopback();
        if found.ip() != ip && !(loops && found.is_ipv4() == ip.is_ipv4()) {
            continue;
        }
        // SAFETY: the name ends with a zero and lives as long as the element.
        let name = unsafe { CStr::from_ptr(element.ifa_name) };
        let scope = match found {
            SocketAddr::V6(at) => at.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let Some(mtu) = mtu_of(fd, name) else { continue };
        // SAFETY: the name ends with a zero.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        all.push(Interface { name: name.to_string_lossy().into_owned(), mtu, scope, index });
    }
    all
}

/// Returns the addresses of this machine, in this thread's network namespace, each with the index
/// of its interface: those first by which others most likely reach it. Addresses of interfaces that
/// are down are not among them.
#[allow(unsafe_code)]
pub fn machine_addrs() -> Vec<(IpAddr, u32)> {
    let mut all = Vec::new();
    let mut first = std::ptr::null_mut();
    // SAFETY: the system stores the head of a list, to be freed by `freeifaddrs`.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return all;
    }
    let list = Addresses(first);
    let mut at = list.0;
    while !at.is_null() {
        // SAFETY: an element of the list, which lives until `list` is dropped.
        let element = unsafe { &*at };
        at = element.ifa_next;
        let is_up = element.ifa_flags & libc::IFF_UP.cast_unsigned() != 0;
        if let Some(found) = sockaddr(element.ifa_addr).filter(|_| is_up) {
            // SAFETY: the name ends with a zero and lives as long as the element.
            all.push((found.ip(), unsafe { libc::if_nametoindex(element.ifa_name) }));
        }
    }
    all.sort_by_key(|(addr, _)| match addr {
        addr if addr.is_loopback() => 3,
        IpAddr::V4(_) => 0,
        IpAddr::V6(addr) => 1 + u8::from(addr.is_unicast_link_local()),
    });
    all
}

/// Returns the name of an interface, and its maximum transmission unit in bytes.
#[allow(unsafe_code)]
pub fn interface(index: u32) -> Option<(String, usize)> {
    let kind = rustix::net::SocketType::DGRAM;
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, kind, None).ok()?;
    let mut room = [0; libc::IF_NAMESIZE];
    // SAFETY: the room is what a name of an interface needs, and null or the room is returned.
    let found = unsafe { libc::if_indextoname(index, room.as_mut_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: a name that was found ends with a zero byte.
    let name = unsafe { CStr::from_ptr(room.as_ptr()) };
    Some((name.to_string_lossy().into_owned(), mtu_of(socket.as_fd(), name)?))
}

/// Reads a socket address; `None` for a null pointer and for other families.
#[allow(unsafe_code)]
fn sockaddr(at: *const libc::sockaddr) -> Option<SocketAddr> {
    if at.is_null() {
        return None;
    }
    // SAFETY: not null, and every socket address begins with its family.
    let family = i32::from(unsafe { (*at).sa_family });
    let len = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => SOCKADDR_LEN,
        _ => return None,
    };
    let mut name = SockAddr([0; SOCKADDR_LEN]);
    // SAFETY: an address of this family has at least `len` bytes, and `name` has as many.
    unsafe { std::ptr::copy_nonoverlapping(at.cast::<u8>(), name.0.as_mut_ptr(), len) };
    name.addr()
}

/// Reads the maximum transmission unit of an interface.
#[allow(unsafe_code)]
fn mtu_of(fd: BorrowedFd<'_>, name: &CStr) -> Option<usize> {
    // SAFETY: the structure is numbers and a union of them, for which all zeroes are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let at = &raw mut request;
    // SAFETY: SIOCGIFMTU reads the name and stores the MTU in the structure passed.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGIFMTU as _, at) };
    if result != 0 {
        return None;
    }
    // SAFETY: the system has just stored this member of the union.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    usize::try_from(mtu).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_system_s_form() {
        for text in ["127.0.0.1:4791", "[fe80::1%3]:49152", "[::1]:1"] {
            let addr: SocketAddr = text.parse().unwrap();
            let (name, len) = SockAddr::new(addr);
            assert_eq!(name.addr(), Some(addr));
            assert_eq!(len, if addr.is_ipv4() { 16 } else { 28 });
        }
    }

    #[test]
    fn control_messages_are_found_again() {
        let mut control = Control::new();
        let used = control.push(0, libc::IPPROTO_UDP, libc::UDP_SEGMENT, &7_u16.to_ne_bytes());
        let used = control.push(used, libc::IPPROTO_IP, libc::IP_TOS, &9_i32.to_ne_bytes());
        assert_eq!(control.find(used, libc::IPPROTO_IP, libc::IP_TOS), Some(9));
        assert_eq!(control.find(used, libc::IPPROTO_IP, libc::IP_TTL), None);
        assert_eq!(control.find(CONTROL_LEN, libc::IPPROTO_IP, libc::IP_TTL), None);
        assert_eq!(used % size_of::<usize>(), 0);
    }

    #[test]
    fn the_loopback_interface_is_known() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let fd = socket.as_fd();
        let all = interfaces_of(fd, "127.0.0.9".parse().unwrap());
        let lo = all.first().unwrap();
        assert!(lo.mtu >= 1500, "{lo:?}");
        assert_eq!(lo.scope, 0);
        assert_eq!(interfaces_of(fd, "192.0.2.77".parse().unwrap()), []);
    }
}
