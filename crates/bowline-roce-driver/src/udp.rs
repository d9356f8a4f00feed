//! The sockets: one for each address of the device, bound to that address and port 4791, for
//! sending and receiving [OUT-1], [OUT-12].
//!
//! A socket is never connected. A connected socket would receive from one port only [OUT-11], and
//! its IPv4 identifications, which are covered by the ICRC, would not be predictable. On an
//! unconnected socket with path MTU discovery set to "do", a datagram has identification 0 and the
//! k-th segment of a burst has k [ICRC-12], [ICRC-20].

use core::sync::atomic::{AtomicU8, Ordering};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bowline_roce::{Burst, DirectPlacement};
use bowline_verbs::{Error, InvalidReason};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::bind;
use rustix::net::sockopt::{set_ip_multicast_if_with_ifindex, set_ipv6_multicast_if};

use crate::early::EarlySockets;
use crate::sys::{self, Arrival, Inbox, Interface, Opt, Outgoing};

/// UDP port of RoCEv2, as source and as destination [OUT-1].
pub const ROCE_PORT: u16 = 4791;

/// By how much sends of another type of service must outnumber those of the socket's own before the
/// socket gets another one.
const TOS_SENDS: u8 = 16;

/// The socket of one address.
#[derive(Debug)]
pub(crate) struct Endpoint {
    fd: OwnedFd,
    at: SocketAddr,
    /// Type of service of the socket: what is sent with another one costs a control message, 0.1 us
    /// a call.
    tos: AtomicU8,
    /// By how much sends of another type of service outnumber those of the socket's, lately.
    other_tos: AtomicU8,
    interface: Option<Interface>,
    receive_buffer: usize,
}

impl Endpoint {
    #[cfg(test)]
    pub(crate) fn open(ip: IpAddr, link: Option<u32>, buffer: usize) -> Result<Self, Error> {
        Self::open_on(&EarlySockets::default(), ip, link, buffer)
    }

    /// Opens the socket of an address, on the interface `link` if given, with buffers of `buffer`
    /// bytes if the system allows it; one that was made before, if there is one.
    pub(crate) fn open_on(
        early: &EarlySockets,
        ip: IpAddr,
        link: Option<u32>,
        buffer: usize,
    ) -> Result<Self, Error> {
        let bound = early.take_bound(ip);
        let is_bound = bound.is_some();
        let fd = match bound {
            Some(fd) => fd,
            None => early.take(ip).map_err(|errno| system("making a UDP socket", errno))?,
        };
        let mut interfaces = sys::interfaces_of(fd.as_fd(), ip);
        if let Some(link) = link {
            interfaces.retain(|interface| interface.scope == link);
            if interfaces.is_empty() {
                return Err(Error::AddrNotAvailable);
            }
        } else if interfaces.iter().any(|interface| interface.scope != interfaces[0].scope) {
            return Err(Error::Invalid(InvalidReason::SeveralInterfaces(ip)));
        }
        let interface = interfaces.into_iter().next();
        let scope = interface.as_ref().map_or(0, |interface| interface.scope);
        let at = with_scope(ip, scope);
        if !is_bound {
            prepare(fd.as_fd(), ip, buffer)?;
            bind(&fd, &at).map_err(|errno| refused(at, errno))?;
        }
        if let Some(interface) = &interface {
            // Where that fails, only what is sent to groups goes where the system likes.
            let _ = match ip {
                IpAddr::V4(v4) => {
                    let any = Ipv4Addr::UNSPECIFIED;
                    set_ip_multicast_if_with_ifindex(&fd, &any, &v4, interface.index)
                }
                IpAddr::V6(_) => set_ipv6_multicast_if(&fd, interface.index),
            };
        }
        let receive_buffer = sys::get(fd.as_fd(), Opt::RecvBuf).unwrap_or(0);
        let receive_buffer = usize::try_from(receive_buffer).unwrap_or(0);
        let (tos, other_tos) = (AtomicU8::new(0), AtomicU8::new(0));
        Ok(Self { fd, at, tos, other_tos, interface, receive_buffer })
    }

    /// Makes a socket of an address that several processes share: ready, and with all options.
    pub(crate) fn shared_socket(ip: IpAddr, link: u32, buffer: usize) -> Result<OwnedFd, Error> {
        let fd = EarlySockets::default();
        let fd = fd.take(ip).map_err(|errno| system("making a UDP socket", errno))?;
        let at = with_scope(ip, link);
        prepare(fd.as_fd(), ip, buffer)?;
        sys::set(fd.as_fd(), Opt::ReusePort, 1)
            .map_err(|errno| system("sharing a UDP port", errno))?;
        bind(&fd, &at).map_err(|errno| refused(at, errno))?;
        Ok(fd)
    }

    /// Address and port.
    pub(crate) fn at(&self) -> SocketAddr {
        self.at
    }

    /// Gives the port back, once nothing is sent or received any more: the descriptor is of no
    /// socket from now on.
    pub(crate) fn release(&self) {
        // Where the system refuses that, the port is free when the device is dropped.
        if let Ok(other) = eventfd(0, EventfdFlags::CLOEXEC) {
            let _ = sys::replace(self.fd.as_fd(), other.as_fd());
        }
    }

    /// Number of the interface of a link-local address, else 0.
    pub(crate) fn link(&self) -> u32 {
        match self.at {
            SocketAddr::V6(at) => at.scope_id(),
            SocketAddr::V4(_) => 0,
        }
    }

    /// The interface of the address, if known.
    pub(crate) fn interface(&self) -> Option<&Interface> {
        self.interface.as_ref()
    }

    /// Size of the socket's receive buffer in bytes, the system's bookkeeping included.
    pub(crate) fn receive_buffer(&self) -> usize {
        self.receive_buffer
    }

    /// Makes the system verify the checksums of datagrams that arrive from now on before it copies
    /// any of them; tells whether it will. Costs 0.1 us per buffer.
    pub(crate) fn verify_first(&self) -> bool {
        sys::verify_first(self.fd.as_fd()).is_ok()
    }

    /// Tells whether the system supports UDP_SEGMENT.
    pub(crate) fn can_segment(&self) -> bool {
        sys::set(self.fd.as_fd(), Opt::Segment, 1024).is_ok()
            && sys::set(self.fd.as_fd(), Opt::Segment, 0).is_ok()
    }

    /// Sends `bytes` to port 4791 of an address, in datagrams of `segment` bytes.
    pub(crate) fn send(
        &self,
        to: IpAddr,
        tos: u8,
        segment: usize,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        self.choose_tos(tos);
        let Outgoing { to, tos, segment, .. } = self.outgoing(to, tos, segment, bytes);
        loop {
            match sys::send(self.fd.as_fd(), to, tos, segment, bytes) {
                Err(Errno::INTR) => {}
                done => return done,
            }
        }
    }

    /// Sends bursts with one call; returns how many were sent, 0 when the first one could not be.
    pub(crate) fn send_many(&self, bursts: &[Burst]) -> usize {
        if let Some(first) = bursts.first() {
            self.choose_tos(first.tos);
        }
        let all = bursts.iter().map(|one| self.outgoing(one.to, one.tos, one.segment, &one.bytes));
        sys::send_many(self.fd.as_fd(), all).unwrap_or(0)
    }

    fn outgoing<'a>(&self, to: IpAddr, tos: u8, segment: usize, bytes: &'a [u8]) -> Outgoing<'a> {
        let to = with_scope(to, self.link());
        let segment = (bytes.len() > segment).then(|| u16::try_from(segment).unwrap_or(u16::MAX));
        let tos = (!self.has_tos(tos)).then_some(tos);
        Outgoing { to, tos, segment, bytes }
    }

    /// Gives the socket this type of service if most of what was sent lately had another one than
    /// the socket's: data leave as ECT(0), acknowledgements do not [CC-5], and most sockets send
    /// many more of one kind than of the other. To be called between sends.
    fn choose_tos(&self, tos: u8) {
        let others = self.other_tos.load(Ordering::Relaxed);
        if others < TOS_SENDS || tos == self.tos.load(Ordering::Relaxed) {
            return;
        }
        let option = if self.at.is_ipv4() { Opt::Tos4 } else { Opt::Tos6 };
        if sys::set(self.fd.as_fd(), option, i32::from(tos)).is_ok() {
            self.tos.store(tos, Ordering::Relaxed);
        }
        self.other_tos.store(0, Ordering::Relaxed);
    }

    /// Tells whether what is sent without a type of service has this one.
    fn has_tos(&self, tos: u8) -> bool {
        let same = tos == self.tos.load(Ordering::Relaxed);
        let others = self.other_tos.load(Ordering::Relaxed);
        let others =
            if same { others.saturating_sub(1) } else { others.saturating_add(1).min(TOS_SENDS) };
        self.other_tos.store(others, Ordering::Relaxed);
        same
    }

    /// Receives the next buffer into `inbox`; returns its length in bytes.
    pub(crate) fn receive_one(&self, inbox: &mut Inbox) -> Result<usize, Errno> {
        sys::receive_one(self.fd.as_fd(), inbox)
    }

    /// Receives further buffers without waiting, until `most` buffers or all of them are full.
    pub(crate) fn receive_more(&self, inbox: &mut Inbox, most: usize) -> Result<(), Errno> {
        sys::receive_more(self.fd.as_fd(), inbox, most)
    }

    /// Receives the next buffer: payloads go to their destinations in `placement`, the framing into
    /// `inbox`. Returns the number of bytes, and `None` beside it if the buffer has no sender
    /// address.
    pub(crate) fn receive_in_place(
        &self,
        inbox: &mut Inbox,
        placement: &DirectPlacement,
    ) -> Result<(usize, Option<Arrival>), Errno> {
        sys::receive_in_place(self.fd.as_fd(), inbox, placement)
    }

    /// Receives a batch of buffers into `inbox` without waiting.
    pub(crate) fn receive_many(&self, inbox: &mut Inbox, most: usize) -> Result<(), Errno> {
        inbox.clear();
        self.receive_more(inbox, most)
    }
}

impl AsFd for Endpoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn system(what: &str, errno: Errno) -> Error {
    Error::System { what: what.to_owned(), errno: bowline_base::Errno(errno.raw_os_error()) }
}

/// Returns port 4791 of an address; link-local addresses need the zone of their interface.
fn with_scope(ip: IpAddr, scope: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast() => {
            SocketAddrV6::new(v6, ROCE_PORT, 0, scope).into()
        }
        ip => SocketAddr::new(ip, ROCE_PORT),
    }
}

/// Sets the options of a socket. Failing to receive merged datagrams or to get large buffers costs
/// only speed.
fn prepare(fd: BorrowedFd<'_>, ip: IpAddr, buffer: usize) -> Result<(), Error> {
    let required: &[(Opt, i32)] = if ip.is_ipv4() {
        &[(Opt::MtuDiscover4, libc::IP_PMTUDISC_DO)]
    } else {
        &[
            (Opt::MtuDiscover6, libc::IPV6_PMTUDISC_DO),
            (Opt::V6Only, 1),
            // rxe and NICs send no checksum [OUT-4].
            (Opt::NoCheck6Rx, 1),
        ]
    };
    for (option, value) in required {
        sys::set(fd, *option, *value)
            .map_err(|errno| system(&format!("setting socket option {option:?}"), errno))?;
    }
    let _ = sys::set(fd, Opt::Gro, 1);
    let _ = sys::set(fd, Opt::Overflows, 1);
    let _ = sys::set(fd, if ip.is_ipv4() { Opt::RecvTos4 } else { Opt::RecvTos6 }, 1);
    enlarge(fd, buffer);
    Ok(())
}

/// Gives a socket buffers of this many bytes, or of as many as the system allows; those that are
/// larger already stay.
pub(crate) fn enlarge(fd: BorrowedFd<'_>, buffer: usize) {
    let bytes = i32::try_from(buffer).unwrap_or(i32::MAX);
    for (force, plain) in [(Opt::RecvBufForce, Opt::RecvBuf), (Opt::SendBufForce, Opt::SendBuf)] {
        // The system doubles what it is given, for its bookkeeping.
        let is_enough = sys::get(fd, plain).is_ok_and(|found| found / 2 >= bytes);
        if !is_enough && sys::set(fd, force, bytes).is_err() {
            let _ = sys::set(fd, plain, bytes);
        }
    }
}

/// Explains why an address could not be bound [OUT-10].
fn refused(at: SocketAddr, errno: Errno) -> Error {
    match errno {
        Errno::ADDRINUSE => {
            let modules = std::fs::read_to_string("/proc/modules").unwrap_or_default();
            let loaded = modules.lines().any(|line| line.starts_with("rdma_rxe "));
            let holder = if loaded {
                "the kernel module rdma_rxe is loaded and holds the port in the first network \
                 namespace: unload it (modprobe -r rdma_rxe)"
            } else {
                "another bowline or another program holds it: stop that one"
            };
            Error::AddrInUse(format!(
                "UDP port {ROCE_PORT} of {} is in use: {holder}, or run in a network namespace \
                 with an address of its own",
                at.ip()
            ))
        }
        Errno::ADDRNOTAVAIL => Error::AddrNotAvailable,
        errno => system(&format!("binding UDP port {ROCE_PORT} of {}", at.ip()), errno),
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};

    use super::*;

    /// A device of a process that has given up its capabilities has the buffers of before.
    #[test]
    fn sockets_of_before_keep_their_buffers() {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

        let (ip, large) = ("127.77.0.14".parse().unwrap(), 8 << 20);
        let before = EarlySockets::new(&[ip], large);
        let mut rights = capabilities(None).unwrap();
        if !rights.effective.contains(CapabilitySet::NET_ADMIN) {
            return bowline_testkit::skipped::because("large buffers need CAP_NET_ADMIN");
        }
        // Of this thread only.
        rights.effective.remove(CapabilitySet::NET_ADMIN);
        set_capabilities(None, rights).unwrap();
        let early = Endpoint::open_on(&before, ip, None, large).unwrap();
        let doubled = 2 * large;
        assert!(early.receive_buffer() >= doubled, "{}", early.receive_buffer());
        drop(early);
        let late = Endpoint::open_on(&before, ip, None, large).unwrap();
        let limit = std::fs::read_to_string("/proc/sys/net/core/rmem_max").unwrap();
        if limit.trim().parse::<usize>().unwrap() < large {
            assert!(late.receive_buffer() < doubled, "{}", late.receive_buffer());
        }
    }

    #[test]
    fn a_port_in_use_is_explained() {
        // tests [OUT-10]
        let ip = "127.77.0.1".parse().unwrap();
        let first = Endpoint::open(ip, None, 1 << 20).unwrap();
        let error = Endpoint::open(ip, None, 1 << 20).unwrap_err();
        let Error::AddrInUse(text) = &error else {
            panic!("{error:?}");
        };
        assert!(text.contains("UDP port 4791 of 127.77.0.1 is in use"), "{text}");
        assert!(text.contains("network namespace"), "{text}");
        assert_eq!(error.errno(), libc::EADDRINUSE);
        drop(first);
        Endpoint::open(ip, None, 1 << 20).unwrap();
        let elsewhere = Endpoint::open("192.0.2.77".parse().unwrap(), None, 1 << 20);
        assert_eq!(elsewhere.unwrap_err(), Error::AddrNotAvailable);
    }

    #[test]
    fn sockets_cannot_be_in_the_wrong_mode() {
        // tests [ICRC-20], [OUT-4]
        let four = Endpoint::open("127.77.0.2".parse().unwrap(), None, 1 << 20).unwrap();
        assert_eq!(sys::get(four.as_fd(), Opt::MtuDiscover4), Ok(libc::IP_PMTUDISC_DO));
        let Ok(six) = Endpoint::open("::1".parse().unwrap(), None, 1 << 20) else {
            return bowline_testkit::skipped::because("no IPv6");
        };
        assert_eq!(sys::get(six.as_fd(), Opt::MtuDiscover6), Ok(libc::IPV6_PMTUDISC_DO));
        assert_eq!(sys::get(six.as_fd(), Opt::NoCheck6Rx), Ok(1));
        assert!(rustix::net::getpeername(&four).is_err(), "never connected [OUT-11]");
    }

    #[test]
    fn bursts_arrive_whole_and_cut_at_the_segments() {
        let a = Endpoint::open("127.77.0.3".parse().unwrap(), None, 1 << 20).unwrap();
        let b = Endpoint::open("127.77.0.4".parse().unwrap(), None, 1 << 20).unwrap();
        assert!(a.can_segment());
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| i as u8).collect();
        a.send(b.at().ip(), 0, 4096, &bytes).unwrap();
        a.send(b.at().ip(), 4, 10_000, &bytes).unwrap();
        let mut inbox = Inbox::new();
        let mut got = Vec::new();
        while got.len() < 20_000 {
            if b.receive_one(&mut inbox).is_err() {
                continue;
            }
            let _ = b.receive_more(&mut inbox, usize::MAX);
            for (arrival, bytes) in inbox.arrivals().flatten() {
                assert_eq!(arrival.from, a.at());
                let whole = got.len() >= 10_000;
                assert!(arrival.segment.is_none_or(|segment| segment == 4096 && !whole));
                got.extend_from_slice(bytes);
            }
        }
        assert_eq!(got, [&bytes[..], &bytes].concat());
        assert_eq!(b.receive_one(&mut inbox), Err(Errno::AGAIN));
        let none = a.send(b.at().ip(), 0, 65_500, &bytes).is_ok();
        assert!(none, "one datagram that is shorter than a segment");
    }

    /// A datagram with a wrong checksum leaves no bytes in the receive buffer [RX-13].
    #[test]
    fn datagrams_are_verified_before_they_are_copied() {
        use rustix::net::{RecvFlags, SendFlags, recv, sendto};

        let end = Endpoint::open("127.77.0.6".parse().unwrap(), None, 1 << 20).unwrap();
        assert!(end.verify_first());
        let raw = socket_with(
            AddressFamily::INET,
            SocketType::RAW,
            SocketFlags::empty(),
            Some(ipproto::UDP),
        );
        let Ok(raw) = raw else {
            return bowline_testkit::skipped::because("no raw sockets: needs CAP_NET_RAW");
        };
        let plain =
            socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::NONBLOCK, None)
                .unwrap();
        let at: SocketAddr = "127.77.0.7:4791".parse().unwrap();
        bind(&plain, &at).unwrap();
        let mut left =
            [end.at(), at].into_iter().zip([end.as_fd(), plain.as_fd()]).map(|(to, fd)| {
                // Ports, length, a checksum that is wrong, and 1000 bytes.
                let mut datagram =
                    [[0x12, 0xb7, 0x12, 0xb7, 0x03, 0xf0, 0x12, 0x34].to_vec(), vec![0xaa; 1000]]
                        .concat();
                sendto(&raw, &datagram, SendFlags::empty(), &to).unwrap();
                datagram.fill(0);
                assert_eq!(recv(fd, &mut datagram, RecvFlags::empty()).unwrap_err(), Errno::AGAIN);
                datagram.iter().filter(|byte| **byte != 0).count()
            });
        assert_eq!(left.next(), Some(0));
        eprintln!("without a filter {} bytes are left", left.next().unwrap());
    }

    /// Each datagram has the type of service asked for, whether it is the socket's or not [CC-5].
    #[test]
    fn datagrams_have_their_type_of_service() {
        for (to, from) in [("127.77.0.8", "127.77.0.9"), ("::1", "::1")] {
            let to = if to == from { "[::1]:0".to_owned() } else { format!("{to}:{ROCE_PORT}") };
            let Ok(there) = std::net::UdpSocket::bind(&*to) else {
                return bowline_testkit::skipped::because("no IPv6");
            };
            let to = there.local_addr().unwrap();
            let option = if to.is_ipv4() { Opt::RecvTos4 } else { Opt::RecvTos6 };
            sys::set(there.as_fd(), option, 1).unwrap();
            let end = Endpoint::open(from.parse().unwrap(), None, 1 << 20).unwrap();
            let mut inbox = Inbox::new();
            let mut check = |tos: u8| {
                end.choose_tos(tos);
                let out = end.outgoing(to.ip(), tos, 100, b"data");
                sys::send(end.as_fd(), to, out.tos, out.segment, out.bytes).unwrap();
                sys::receive_one(there.as_fd(), &mut inbox).unwrap();
                let (arrival, bytes) = inbox.arrivals().flatten().next().unwrap();
                assert_eq!((arrival.tos, bytes), (tos, &b"data"[..]));
                out.tos.is_some()
            };
            let mut messages = 0;
            // First data with an acknowledgement now and then, then acknowledgements alone.
            for n in 0..200 {
                messages += u32::from(check(if n % 8 == 7 { 0 } else { 2 }));
            }
            assert!(messages < 50, "{messages} control messages");
            messages = (0..200).map(|_| u32::from(check(0))).sum();
            assert!(messages <= u32::from(TOS_SENDS) + 1, "{messages} control messages");
        }
    }

    /// A batch leaves with the types of service of its bursts.
    #[test]
    fn a_batch_is_not_all_of_one_type_of_service() {
        let there = std::net::UdpSocket::bind(("127.77.0.10", ROCE_PORT)).unwrap();
        sys::set(there.as_fd(), Opt::RecvTos4, 1).unwrap();
        let end = Endpoint::open("127.77.0.11".parse().unwrap(), None, 1 << 20).unwrap();
        let mut inbox = Inbox::new();
        for turn in 0..40_u8 {
            let burst = |n: u8| {
                let mut burst = Burst::new();
                burst.to = there.local_addr().unwrap().ip();
                burst.tos = if (n + turn / 8).is_multiple_of(4) { 0 } else { 2 };
                burst.bytes.extend_from_slice(&[n; 8]);
                (burst.segment, burst.count) = (8, 1);
                burst
            };
            let bursts: Vec<Burst> = (0..4).map(burst).collect();
            assert_eq!(end.send_many(&bursts), 4);
            for burst in &bursts {
                sys::receive_one(there.as_fd(), &mut inbox).unwrap();
                let (arrival, bytes) = inbox.arrivals().flatten().next().unwrap();
                assert_eq!((arrival.tos, bytes), (burst.tos, &*burst.bytes), "turn {turn}");
            }
        }
    }

    /// What a full receive buffer loses is told with what comes next.
    #[test]
    fn an_overflow_is_told() {
        let end = Endpoint::open("127.77.0.12".parse().unwrap(), None, 4096).unwrap();
        let peer = std::net::UdpSocket::bind("127.77.0.13:0").unwrap();
        for _ in 0..100 {
            peer.send_to(&[0; 1000], end.at()).unwrap();
        }
        let mut inbox = Inbox::new();
        let mut lost = Vec::new();
        while end.receive_one(&mut inbox).is_ok() {
            lost.extend(inbox.arrivals().flatten().map(|(arrival, _)| arrival.overflows));
        }
        assert!(lost.len() < 100 && lost.iter().all(|lost| *lost == 0), "{lost:?}");
        let missing = 100 - u32::try_from(lost.len()).unwrap();
        peer.send_to(&[0; 1000], end.at()).unwrap();
        end.receive_one(&mut inbox).unwrap();
        let (arrival, _) = inbox.arrivals().flatten().next().unwrap();
        assert_eq!(arrival.overflows, missing);
    }

    #[test]
    fn the_interface_tells_the_mtu() {
        let end = Endpoint::open("127.77.0.5".parse().unwrap(), None, 1 << 20).unwrap();
        assert!(end.interface().is_some_and(|interface| interface.mtu >= 1500));
        assert!(end.receive_buffer() >= 1 << 20, "{}", end.receive_buffer());
    }
}
