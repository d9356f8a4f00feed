//! What host and guests say to each other: one datagram of a connected socket for each message.

use std::ffi::OsStr;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::PortSpace;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::Impairments;

/// Version of all messages.
pub(super) const FORMAT: u8 = 3;
/// Most addresses that are shared: a message carries their sockets.
pub(super) const ADDRS_MAX: usize = 64;
/// Most descriptors that come with a message: a welcome has the guest's bell as well.
const FDS_MAX: usize = ADDRS_MAX + 1;
/// Longest message: a welcome with the longest path and the most impairments.
const MESSAGE_MAX: usize = 12 << 10;

const JOIN: u8 = 1;
const LISTEN: u8 = 2;
const UNLISTEN: u8 = 3;
const STRAY: u8 = 4;
const WELCOME: u8 = 5;
const REFUSED: u8 = 6;
const ANSWER: u8 = 7;
const PACKET: u8 = 8;
const LOOK: u8 = 9;
const SEEN: u8 = 10;
const RING: u8 = 11;
const RING_TO: u8 = 12;
const RING_FROM: u8 = 13;
const LEFT: u8 = 14;

const TCP: u8 = 1;
const UDP: u8 = 2;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A guest wants a part.
    Join(u8),
    /// A guest wants to listen.
    Listen(PortSpace, SocketAddr),
    /// A guest listens no longer.
    Unlisten(PortSpace, SocketAddr),
    /// A guest has received what is not its own.
    Stray(SocketAddr, IpAddr, Vec<u8>),
    /// The guest has a part. The sockets of its addresses come along, and its bell.
    Welcome(Welcome),
    /// The guest gets nothing, and why.
    Refused(i32, String),
    /// Errno of the last request, or 0.
    Answer(i32),
    /// A datagram for this guest.
    Packet(SocketAddr, IpAddr, Vec<u8>),
    /// A guest wants to send to this part by memory.
    Ring(u8),
    /// The guest may send to this part by the memory that comes along, and ring the bell.
    RingTo(u8),
    /// This part sends to the guest by the memory that comes along.
    RingFrom(u8),
    /// This part, to or from which the guest has a ring, is gone.
    Left(u8),
    /// A process wants to know what there is, and no part of it.
    Look(u8),
    /// What there is.
    Seen(Seen),
}

/// What a host shares, and with how many processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Number of the host's process.
    pub host: u32,
    /// Processes that have a part.
    pub processes: u8,
    /// The addresses, each with its interface if it is link-local; none before the first process.
    pub addrs: Vec<(IpAddr, u32)>,
}

/// What a guest is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    pub(super) part: u8,
    /// Where it lists its connections, which its host ends when it is gone; empty: nowhere.
    pub(super) folder: PathBuf,
    /// The addresses, each with its link.
    pub(super) addrs: Vec<(IpAddr, u32)>,
    /// What the network does to packets of all processes.
    pub(super) impairments: Impairments,
}

fn put_ip(ip: IpAddr, out: &mut Vec<u8>) {
    out.extend(match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    });
}

fn put_at(at: SocketAddr, out: &mut Vec<u8>) {
    put_ip(at.ip(), out);
    out.extend(at.port().to_le_bytes());
}

fn put_text(text: &[u8], out: &mut Vec<u8>) {
    out.extend((text.len() as u16).to_le_bytes()); // a path, or a line of settings
    out.extend(text);
}

fn take_text<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = u16::from_le_bytes(*take(bytes)?);
    let (text, rest) = bytes.split_at_checked(len.into())?;
    *bytes = rest;
    Some(text)
}

fn put_addrs(addrs: &[(IpAddr, u32)], out: &mut Vec<u8>) {
    for (addr, link) in addrs {
        put_ip(*addr, out);
        out.extend(link.to_le_bytes());
    }
}

fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(first)
}

fn take_ip(bytes: &mut &[u8]) -> Option<IpAddr> {
    Some(IpAddr::V6(Ipv6Addr::from(*take::<16>(bytes)?)).to_canonical())
}

/// Takes the addresses at the end of a message.
fn take_addrs(bytes: &mut &[u8]) -> Option<Vec<(IpAddr, u32)>> {
    let mut addrs = Vec::new();
    while !bytes.is_empty() {
        addrs.push((take_ip(bytes)?, u32::from_le_bytes(*take(bytes)?)));
    }
    Some(addrs)
}

fn take_at(bytes: &mut &[u8]) -> Option<SocketAddr> {
    Some(SocketAddr::new(take_ip(bytes)?, u16::from_le_bytes(*take(bytes)?)))
}

fn take_space(bytes: &mut &[u8]) -> Option<PortSpace> {
    match *take(bytes)? {
        [TCP] => Some(PortSpace::Tcp),
        [UDP] => Some(PortSpace::Udp),
        _ => None,
    }
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let datagram = |kind, from: SocketAddr, to, payload: &[u8], out: &mut Vec<u8>| {
            out.push(kind);
            put_at(from, out);
            put_ip(to, out);
            out.extend_from_slice(payload);
        };
        match self {
            Self::Join(format) => out.extend([JOIN, *format]),
            Self::Look(format) => out.extend([LOOK, *format]),
            Self::Ring(part) => out.extend([RING, *part]),
            Self::RingTo(part) => out.extend([RING_TO, *part]),
            Self::RingFrom(part) => out.extend([RING_FROM, *part]),
            Self::Left(part) => out.extend([LEFT, *part]),
            Self::Seen(Seen { host, processes, addrs }) => {
                out.push(SEEN);
                out.extend(host.to_le_bytes());
                out.push(*processes);
                put_addrs(addrs, &mut out);
            }
            Self::Listen(space, at) | Self::Unlisten(space, at) => {
                out.push(if matches!(self, Self::Listen(..)) { LISTEN } else { UNLISTEN });
                out.push(match space {
                    PortSpace::Tcp => TCP,
                    PortSpace::Udp => UDP,
                });
                put_at(*at, &mut out);
            }
            Self::Stray(from, to, payload) => datagram(STRAY, *from, *to, payload, &mut out),
            Self::Packet(from, to, payload) => datagram(PACKET, *from, *to, payload, &mut out),
            Self::Welcome(Welcome { part, folder, addrs, impairments }) => {
                out.extend([WELCOME, *part]);
                put_text(folder.as_os_str().as_bytes(), &mut out);
                out.extend(impairments.seed().to_le_bytes());
                put_text(impairments.to_string().as_bytes(), &mut out);
                put_addrs(addrs, &mut out);
            }
            Self::Refused(errno, why) => {
                out.push(REFUSED);
                out.extend(errno.to_le_bytes());
                out.extend(why.as_bytes());
            }
            Self::Answer(errno) => {
                out.push(ANSWER);
                out.extend(errno.to_le_bytes());
            }
        }
        out
    }

    /// Reads a message; `None` for bytes that are not a message.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let bytes = &mut bytes;
        let [kind] = *take(bytes)?;
        let message = match kind {
            JOIN => Self::Join(take::<1>(bytes)?[0]),
            LOOK => Self::Look(take::<1>(bytes)?[0]),
            RING => Self::Ring(take::<1>(bytes)?[0]),
            RING_TO => Self::RingTo(take::<1>(bytes)?[0]),
            RING_FROM => Self::RingFrom(take::<1>(bytes)?[0]),
            LEFT => Self::Left(take::<1>(bytes)?[0]),
            SEEN => {
                let host = u32::from_le_bytes(*take(bytes)?);
                let [processes] = *take(bytes)?;
                Self::Seen(Seen { host, processes, addrs: take_addrs(bytes)? })
            }
            LISTEN => Self::Listen(take_space(bytes)?, take_at(bytes)?),
            UNLISTEN => Self::Unlisten(take_space(bytes)?, take_at(bytes)?),
            STRAY | PACKET => {
                let (from, to) = (take_at(bytes)?, take_ip(bytes)?);
                let payload = std::mem::take(bytes).to_vec();
                if kind == STRAY {
                    Self::Stray(from, to, payload)
                } else {
                    Self::Packet(from, to, payload)
                }
            }
            WELCOME => {
                let part = take::<1>(bytes)?[0];
                let folder = PathBuf::from(OsStr::from_bytes(take_text(bytes)?));
                let seed = u64::from_le_bytes(*take(bytes)?);
                let impairments = str::from_utf8(take_text(bytes)?).ok()?;
                let impairments = Impairments::parse(impairments, seed).ok()?;
                let addrs = take_addrs(bytes)?;
                Self::Welcome(Welcome { part, folder, addrs, impairments })
            }
            REFUSED => {
                let errno = i32::from_le_bytes(*take(bytes)?);
                Self::Refused(errno, String::from_utf8_lossy(std::mem::take(bytes)).into_owned())
            }
            ANSWER => Self::Answer(i32::from_le_bytes(*take(bytes)?)),
            _ => return None,
        };
        bytes.is_empty().then_some(message)
    }

    /// Sends the message and descriptors.
    pub(super) fn send(&self, to: impl AsFd, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.send_with(to, fds, SendFlags::NOSIGNAL)
    }

    /// Sends the message if there is room for it at once.
    pub(super) fn send_now(&self, to: impl AsFd, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.send_with(to, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(
        &self,
        to: impl AsFd,
        fds: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = self.encode();
        loop {
            match sendmsg(&to, &[IoSlice::new(&bytes)], &mut control, flags) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }

    /// Receives the next message and the descriptors that come with it; `None` at the end.
    pub(super) fn receive(from: impl AsFd) -> Result<Option<(Self, Vec<OwnedFd>)>, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; MESSAGE_MAX];
        let received = loop {
            let mut pieces = [IoSliceMut::new(&mut bytes)];
            match recvmsg(&from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(None),
                received => break received?,
            }
        };
        if received.bytes == 0 {
            return Ok(None);
        }
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds = fds.flatten().collect();
        let message = Self::decode(&bytes[..received.bytes]).ok_or(Errno::PROTO)?;
        Ok(Some((message, fds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::impair::IMPAIRMENTS_MAX;

    #[test]
    fn the_longest_messages_are_read() {
        let (near, far) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let six: SocketAddr = "[1111:2222:3333:4444:5555:6666:7777:8888]:4791".parse().unwrap();
        let share = "12.3456789%";
        let impairment = format!(
            "loss={share},duplicate={share},reorder={share},corrupt={share},ce={share},\
             delay=9.123456789s±0.876543211s,peer={},way=out",
            six.ip()
        );
        let impairments = [&impairment[..]; IMPAIRMENTS_MAX].join(";");
        let impairments = Impairments::parse(&impairments, u64::MAX).unwrap();
        assert_eq!(impairments.to_string().len(), impairment.len() * 32 + 31, "the longest text");
        let welcome = Welcome {
            part: 255,
            folder: "/longest".repeat(libc::PATH_MAX as usize / 8).into(),
            addrs: vec![(six.ip(), u32::MAX); ADDRS_MAX],
            impairments,
        };
        let packet = vec![7; (8 << 10) - 1];
        for message in [
            Message::Welcome(welcome),
            Message::Stray(six, six.ip(), packet.clone()),
            Message::Packet(six, six.ip(), packet),
        ] {
            message.send(&near, &[]).unwrap();
            assert_eq!(Message::receive(&far).unwrap().map(|(read, _)| read), Some(message));
        }
    }

    #[test]
    fn messages_come_out_as_they_went_in() {
        let at: SocketAddr = "10.0.0.1:77".parse().unwrap();
        let six: SocketAddr = "[fe80::1]:9".parse().unwrap();
        for message in [
            Message::Join(3),
            Message::Listen(PortSpace::Tcp, at),
            Message::Listen(PortSpace::Udp, six),
            Message::Unlisten(PortSpace::Udp, six),
            Message::Stray(six, at.ip(), vec![1, 2]),
            Message::Welcome(Welcome {
                part: 7,
                folder: "/run/user".into(),
                addrs: vec![(at.ip(), 0), (six.ip(), 5)],
                impairments: Impairments::parse("loss=1%,peer=::1;delay=1ms±0ns", 9).unwrap(),
            }),
            Message::Refused(13, "why".to_owned()),
            Message::Answer(98),
            Message::Packet(at, six.ip(), Vec::new()),
            Message::Look(1),
            Message::Ring(7),
            Message::RingTo(255),
            Message::RingFrom(1),
            Message::Left(2),
            Message::Seen(Seen { host: 77, processes: 3, addrs: vec![(six.ip(), 5)] }),
        ] {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            for len in 0..bytes.len() {
                // A part of it is no message, unless what is cut off is data.
                if let Some(part) = Message::decode(&bytes[..len]) {
                    assert_ne!(part, message);
                }
            }
        }
        assert_eq!(Message::decode(&[0]), None);
        let mut unknown = Message::Listen(PortSpace::Udp, at).encode();
        unknown[1] = UDP + 1;
        assert_eq!(Message::decode(&unknown), None);
        assert_eq!(Message::decode(&[ANSWER, 0, 0, 0, 0, 0]), None, "it ends later");
    }
}
