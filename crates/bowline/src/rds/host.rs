//! Sockets of the host's node: what this library's types are in the words of system calls.

use core::time::Duration;
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bowline_base::Errno;
use bowline_host_client::{Host, OwnedSocket};
use bowline_host_wire::{NODE_LEVEL, NODE_RECV_BUFFER, NODE_SEND_BUFFER, name};
use bowline_rds::{
    Counters, Info, Interest, LengthLimit, OutstandingMessages, Readiness, Rope, SendControl,
    TooLong, Transport,
};
use bowline_wire::rds::uapi::{
    MSG_DONTWAIT, MSG_PEEK, MSG_ZEROCOPY, RDS_CANCEL_SENT_TO, RDS_CONG_MONITOR,
    RDS_INFO_COUNTER_LEN, RDS_INFO_COUNTERS, RDS6_INFO_MESSAGE_LEN, RDS6_INFO_RETRANS_MESSAGES,
    RDS6_INFO_SEND_MESSAGES, SO_RCVBUF, SO_RCVTIMEO, SO_RDS_TRANSPORT, SO_SNDBUF, SO_SNDTIMEO,
    SO_TIMESTAMP, SO_ZEROCOPY, SOL_RDS, SOL_SOCKET,
};

use super::error::HostError;
use super::{Error, Message, control};

/// Room for a table, to begin with; that of counters is smaller.
const TABLE_ROOM: usize = 64 << 10;

const POLLIN: i16 = 1;
const POLLOUT: i16 = 4;
/// Room for the control messages of one message; fewer bytes do.
const CONTROL_ROOM: usize = 4096;

/// Whether a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    /// As long as the socket's time limit allows.
    Yes,
    No,
}

impl Waits {
    const fn flag(self) -> i32 {
        match self {
            Self::Yes => 0,
            Self::No => MSG_DONTWAIT,
        }
    }
}

/// A socket of the host's node.
#[derive(Debug)]
pub(super) struct HostSocket(OwnedSocket);

/// What went wrong while a socket was used.
fn failed(errno: i32) -> Error {
    use bowline_rds::Error as Core;
    match Errno(errno) {
        Errno::EBADF => Core::BadSocket.into(),
        Errno::EAGAIN => Core::Empty.into(),
        Errno::ETIMEDOUT => bowline_rds_driver::Error::TimedOut.into(),
        Errno::ENOTCONN => Core::NotConnected.into(),
        Errno::EADDRINUSE => Core::AddrInUse.into(),
        Errno::EADDRNOTAVAIL => Core::AddrNotAvailable.into(),
        Errno::EDESTADDRREQ => Core::DestinationRequired.into(),
        Errno::EPROTOTYPE => Core::WrongProtocolType.into(),
        Errno::EHOSTUNREACH => Core::PeerNotPermitted.into(),
        other => HostError::from_call(other).into(),
    }
}

fn failed_to_send(errno: i32) -> Error {
    use bowline_rds::Error as Core;
    match Errno(errno) {
        Errno::EAGAIN => Core::QueueFull.into(),
        Errno::ENOBUFS => Core::Congested.into(),
        _ => failed(errno),
    }
}

/// The host's node: at `place`, or where it serves by default.
pub(super) fn find(place: Option<&[u8]>) -> Result<Host, Error> {
    Host::find(place).map_err(|errno| HostError::from_search(Errno(errno)).into())
}

/// The counters of the node; none when it is gone.
pub(super) fn counters(host: &Host) -> Vec<(&'static str, u64)> {
    let table = host.open().and_then(|s| s.get_option(SOL_RDS, RDS_INFO_COUNTERS, TABLE_ROOM));
    let Ok((table, ..)) = table else { return Vec::new() };
    let row = |row: &[u8]| {
        let (text, value) = row.split_at_checked(RDS_INFO_COUNTER_LEN - 8)?;
        let len = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Some((text[..len].to_vec(), u64::from_ne_bytes(value.try_into().ok()?)))
    };
    let rows: Vec<_> = table.chunks_exact(RDS_INFO_COUNTER_LEN).filter_map(row).collect();
    // In the order of the names that this library knows.
    let value = |name: &str| rows.iter().find(|(text, _)| text == name.as_bytes());
    let names = Counters::default();
    names.iter().filter_map(|(name, _)| Some((name, value(name)?.1))).collect()
}

/// What the node's tables say; nothing when it is gone.
pub(super) fn info(host: &Host) -> Info {
    let tables = || {
        let socket = HostSocket::open(host)?;
        let mut info = Info::from_tables(|option| match socket.table(option as i32) {
            Err(error) if error.errno() == Errno::ENOPROTOOPT.0 => Ok(None),
            table => table.map(Some),
        })?;
        // The one that asks is no socket of the program's.
        info.sockets.retain(|socket| socket.bound.is_some());
        Ok::<_, Error>(info)
    };
    tables().unwrap_or_default()
}

impl HostSocket {
    pub(super) fn open(host: &Host) -> Result<Self, Error> {
        host.open().map(Self).map_err(failed)
    }

    pub(super) fn bind(&self, addr: SocketAddr) -> Result<(), Error> {
        self.0.bind(&name_of(Some(addr))).map_err(failed)
    }

    pub(super) fn connect(&self, addr: SocketAddr) -> Result<(), Error> {
        self.0.connect(&name_of(Some(addr))).map_err(failed)
    }

    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        name::parse(&self.0.local_name().ok()?)
    }

    pub(super) fn peer_addr(&self) -> Option<SocketAddr> {
        name::parse(&self.0.peer_name().ok()?)
    }

    // Not a part of the call on a node of this process, which it makes slower.
    #[inline(never)]
    pub(super) fn send(
        &self,
        to: Option<SocketAddr>,
        payload: &[IoSlice<'_>],
        control: &[SendControl],
        waits: Waits,
    ) -> Result<usize, Error> {
        let zerocopy = control.iter().any(|c| matches!(c, SendControl::ZcopyCookie(_)));
        let flags = waits.flag() | if zerocopy { MSG_ZEROCOPY } else { 0 };
        let control = control::emit(control);
        self.0.send(flags, &name_of(to), &control, payload).map_err(|errno| {
            let len = payload.iter().map(|part| part.len()).sum();
            self.too_long(errno, len).unwrap_or_else(|| failed_to_send(errno))
        })
    }

    /// Tells that a message was longer than the send buffer, which the number alone does not.
    fn too_long(&self, errno: i32, len: usize) -> Option<Error> {
        let limit = (Errno(errno) == Errno::EMSGSIZE).then(|| self.send_buffer().ok()).flatten()?;
        let too_long = TooLong::new(len, limit, LengthLimit::SendBuffer);
        (len > limit).then(|| bowline_rds::Error::MessageTooLong(too_long).into())
    }

    pub(super) fn send_batch(
        &self,
        messages: &[(SocketAddr, &[u8])],
        waits: Waits,
    ) -> Result<usize, Error> {
        for (sent, (to, payload)) in messages.iter().enumerate() {
            let waits = if sent == 0 { waits } else { Waits::No };
            match self.send(Some(*to), &[IoSlice::new(payload)], &[], waits) {
                Err(error) if sent == 0 => return Err(error),
                Err(_) => return Ok(sent),
                Ok(_) => {}
            }
        }
        Ok(messages.len())
    }

    // As above.
    #[inline(never)]
    pub(super) fn recv_from(
        &self,
        buf: &mut [u8],
        waits: Waits,
    ) -> Result<(usize, SocketAddr), Error> {
        let message = self.0.receive(waits.flag(), 0, buf).map_err(failed)?;
        let from = name::parse(&message.name).ok_or(bowline_rds::Error::Empty)?;
        Ok((message.len, from))
    }

    pub(super) fn recv_message(&self, waits: Waits) -> Result<Message, Error> {
        self.message(waits.flag(), CONTROL_ROOM)
    }

    pub(super) fn peek_message(&self, waits: Waits) -> Result<Message, Error> {
        self.message(waits.flag() | MSG_PEEK, 0)
    }

    fn message(&self, flags: i32, control_room: usize) -> Result<Message, Error> {
        let (message, payload) = self.0.receive_whole(flags, control_room).map_err(failed)?;
        let source = name::parse(&message.name);
        let data = source.is_some().then(|| Rope::from_vec(payload));
        Ok(Message::from_parts(source, data, control::parse(&message.control)))
    }

    pub(super) fn recv_batch(
        &self,
        messages: &mut Vec<Message>,
        max: usize,
        waits: Waits,
    ) -> Result<usize, Error> {
        for received in 0..max {
            let waits = if received == 0 { waits } else { Waits::No };
            match self.recv_message(waits) {
                Ok(message) => messages.push(message),
                Err(error) if received == 0 => return Err(error),
                Err(_) => return Ok(received),
            }
        }
        Ok(max)
    }

    pub(super) fn set_send_timeout(&self, limit: Option<Duration>) {
        self.set_timeout(SO_SNDTIMEO, limit);
    }

    pub(super) fn set_recv_timeout(&self, limit: Option<Duration>) {
        self.set_timeout(SO_RCVTIMEO, limit);
    }

    fn set_timeout(&self, option: i32, limit: Option<Duration>) {
        // A node that is gone says so in the call that would have waited.
        let _ = self.0.set_option(SOL_SOCKET, option, &timeval(limit));
    }

    pub(super) fn set_send_buffer(&self, bytes: usize) -> Result<(), Error> {
        self.set_buffer(NODE_SEND_BUFFER, SO_SNDBUF, bytes)
    }

    pub(super) fn set_recv_buffer(&self, bytes: usize) -> Result<(), Error> {
        self.set_buffer(NODE_RECV_BUFFER, SO_RCVBUF, bytes)
    }

    pub(super) fn send_buffer(&self) -> Result<usize, Error> {
        self.buffer(SO_SNDBUF)
    }

    pub(super) fn recv_buffer(&self) -> Result<usize, Error> {
        self.buffer(SO_RCVBUF)
    }

    /// Makes a buffer as large as it is to be, or says why not.
    fn set_buffer(&self, option: i32, kernel_option: i32, bytes: usize) -> Result<(), Error> {
        match self.0.set_option(NODE_LEVEL, option, &(bytes as u64).to_ne_bytes()) {
            Ok(_) => Ok(()),
            Err(errno) if Errno(errno) == Errno::ENOBUFS => Err(HostError::Buffer.into()),
            // A node of an earlier version has the option of a kernel only, and its limit.
            Err(errno) if Errno(errno) == Errno::ENOPROTOOPT => {
                let value = i32::try_from(bytes).unwrap_or(i32::MAX);
                let before = i32::try_from(self.buffer(kernel_option)?).unwrap_or(i32::MAX);
                self.set_int(SOL_SOCKET, kernel_option, value)?;
                if self.buffer(kernel_option)? < bytes {
                    self.set_int(SOL_SOCKET, kernel_option, before)?;
                    return Err(HostError::SmallBuffer.into());
                }
                Ok(())
            }
            Err(errno) => Err(failed(errno)),
        }
    }

    /// The size of a buffer, of which the option tells twice as much.
    fn buffer(&self, option: i32) -> Result<usize, Error> {
        let (value, ..) = self.0.get_option(SOL_SOCKET, option, 4).map_err(failed)?;
        let value = value.first_chunk().map_or(0, |v| u32::from_ne_bytes(*v));
        Ok(value as usize / 2)
    }

    fn set_int(&self, level: i32, option: i32, value: i32) -> Result<(), Error> {
        self.0.set_option(level, option, &value.to_ne_bytes()).map_err(failed)
    }

    pub(super) fn set_transport(&self, number: i32) -> Result<(), Error> {
        self.set_int(SOL_RDS, SO_RDS_TRANSPORT, number)
    }

    pub(super) fn transport(&self) -> Result<Option<Transport>, Error> {
        let (value, ..) = self.0.get_option(SOL_RDS, SO_RDS_TRANSPORT, 4).map_err(failed)?;
        let number = value.first_chunk().map_or(-1, |value| i32::from_ne_bytes(*value));
        let all = [Transport::Ib, Transport::Tcp, Transport::Loopback];
        Ok(all.into_iter().find(|transport| *transport as i32 == number))
    }

    pub(super) fn cancel_sent_to(&self, to: SocketAddr) -> Result<(), Error> {
        self.0.set_option(SOL_RDS, RDS_CANCEL_SENT_TO, &name_of(Some(to))).map_err(failed)
    }

    pub(super) fn cancel_all(&self) -> Result<(), Error> {
        self.0.cancel_all().map_err(failed)
    }

    pub(super) fn set_cong_monitor(&self, on: bool) -> Result<(), Error> {
        self.set_int(SOL_RDS, RDS_CONG_MONITOR, on.into())
    }

    pub(super) fn set_zerocopy(&self, on: bool) -> Result<(), Error> {
        self.set_int(SOL_SOCKET, SO_ZEROCOPY, on.into())
    }

    pub(super) fn set_timestamp(&self, on: bool) -> Result<(), Error> {
        self.set_int(SOL_SOCKET, SO_TIMESTAMP, on.into())
    }

    pub(super) fn poll(&self) -> Result<Readiness, Error> {
        let ready = match self.0.wait(POLLIN | POLLOUT, Some(Duration::ZERO)) {
            Err(errno) if Errno(errno) == Errno::ETIMEDOUT => 0,
            ready => ready.map_err(failed)?,
        };
        Ok(Readiness { readable: ready & POLLIN != 0, writable: ready & POLLOUT != 0 })
    }

    pub(super) fn wait(&self, interest: Interest, limit: Option<Duration>) -> Result<(), Error> {
        let read = if interest.contains(Interest::READ) { POLLIN } else { 0 };
        let write = if interest.contains(Interest::WRITE) { POLLOUT } else { 0 };
        self.0.wait(read | write, limit).map(drop).map_err(failed)
    }

    pub(super) fn flush(&self, limit: Option<Duration>) -> Result<(), Error> {
        self.0.flush(limit).map_err(failed)
    }

    /// The messages of this socket that the node keeps: of its tables, those that begin here.
    pub(super) fn outstanding(&self) -> Result<Vec<OutstandingMessages>, Error> {
        let own = self.local_addr().ok_or(bowline_rds::Error::NotConnected)?;
        let mut kept: BTreeMap<SocketAddr, (usize, usize)> = BTreeMap::new();
        // In this order: what is started between the two is found twice, and never not at all.
        for table in [RDS6_INFO_SEND_MESSAGES, RDS6_INFO_RETRANS_MESSAGES] {
            let rows = self.table(table)?;
            let rows = rows.chunks_exact(RDS6_INFO_MESSAGE_LEN);
            for (local, mut to, len) in rows.filter_map(message_row) {
                if (local.ip(), local.port()) == (own.ip(), own.port()) {
                    if let (SocketAddr::V6(to), SocketAddr::V6(own)) = (&mut to, own) {
                        to.set_scope_id(own.scope_id());
                    }
                    let (messages, bytes) = kept.entry(to).or_default();
                    *messages += 1;
                    *bytes += len;
                }
            }
        }
        let entry = |(to, (messages, bytes))| OutstandingMessages { to, messages, bytes };
        Ok(kept.into_iter().map(entry).collect())
    }

    /// Reads a table; it may grow while it is asked for.
    fn table(&self, option: i32) -> Result<Vec<u8>, Error> {
        let mut room = TABLE_ROOM;
        loop {
            let (table, needed, returned) =
                self.0.get_option(SOL_RDS, option, room).map_err(failed)?;
            match Errno(-returned) {
                Errno::ENOSPC => room = usize::try_from(needed).unwrap_or(0).max(room) * 2,
                errno if errno.0 > 0 => return Err(failed(errno.0)),
                _ => return Ok(table),
            }
        }
    }

    pub(super) fn descriptor(&self) -> Result<Arc<OwnedFd>, Error> {
        self.0.descriptor().map_err(failed)
    }

    pub(super) fn close(&self) {
        self.0.close();
    }
}

/// The addresses and the length in a row of a table of messages.
fn message_row(row: &[u8]) -> Option<(SocketAddr, SocketAddr, usize)> {
    let (&len, row) = row.get(8..)?.split_first_chunk()?;
    let (&local, row) = row.split_first_chunk::<16>()?;
    let (&remote, row) = row.split_first_chunk::<16>()?;
    let (&local_port, row) = row.split_first_chunk()?;
    let &remote_port = row.first_chunk()?;
    let at =
        |ip, port| SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_be_bytes(port));
    Some((at(local, local_port), at(remote, remote_port), u32::from_ne_bytes(len) as usize))
}

/// The bytes of a name; none for the connected destination.
fn name_of(addr: Option<SocketAddr>) -> Name {
    let (bytes, len) = addr.map_or(([0; name::IN6_LEN], 0), name::raw);
    Name { bytes, len }
}

struct Name {
    bytes: [u8; name::IN6_LEN],
    len: usize,
}

impl core::ops::Deref for Name {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// A time limit as a `timeval`, in which all zeroes stand for none.
fn timeval(limit: Option<Duration>) -> [u8; 16] {
    let [seconds, micros] = match limit {
        None => [0, 0],
        // The system takes a negative time for no wait at all.
        Some(Duration::ZERO) => [-1, 0],
        Some(limit) => {
            let micros = limit.as_nanos().div_ceil(1000);
            let whole = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
            [whole, (micros % 1_000_000) as i64]
        }
    };
    let mut value = [0; 16];
    value[..8].copy_from_slice(&seconds.to_ne_bytes());
    value[8..].copy_from_slice(&micros.to_ne_bytes());
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_limits_are_never_shorter_than_asked_for() {
        let words = |limit| {
            let value = timeval(limit);
            [0, 8].map(|at| i64::from_ne_bytes(value[at..at + 8].try_into().unwrap()))
        };
        assert_eq!(words(None), [0, 0]);
        assert_eq!(words(Some(Duration::ZERO)), [-1, 0]);
        assert_eq!(words(Some(Duration::from_nanos(1))), [0, 1]);
        assert_eq!(words(Some(Duration::from_nanos(1_999_999_001))), [2, 0]);
        assert_eq!(words(Some(Duration::from_millis(1500))), [1, 500_000]);
    }
}
