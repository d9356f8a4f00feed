//! Sending and receiving.

use core::ffi::c_int;
use std::net::SocketAddr;

use bowline_verbs::Access;

use super::connection::{Connection, Memory, WRITTEN};
use super::datagrams::Sending;
use super::maps::{self, Given};
use super::socket::{Inner, Socket, State, device, errno, take_error};
use super::stream::Stream;
use crate::cm::source;
use crate::memory;

/// Flags of what there is not. Others that have no meaning here are ignored, as the system does.
const UNSUPPORTED: c_int = libc::MSG_OOB | libc::MSG_ERRQUEUE;

/// What was received of a datagram, or of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Received {
    /// Bytes that are there.
    pub(super) len: usize,
    /// Bytes that there were.
    pub(super) whole: usize,
    pub(super) from: Option<SocketAddr>,
}

/// The connection of a stream, for sends or receives.
fn connected(inner: &mut Inner) -> Option<Result<&mut Connection, c_int>> {
    let Inner { state, error, .. } = inner;
    match state {
        State::Connected(connection) => Some(Ok(connection)),
        State::Connecting(_) => None,
        State::Ended => Some(Err(take_error(error))),
        _ => Some(Err(libc::ENOTCONN)),
    }
}

/// Sends some bytes now; `None`: none.
fn send_now(inner: &mut Inner, bytes: &[u8]) -> Option<Result<usize, c_int>> {
    let connection = match connected(inner)? {
        Ok(connection) => connection,
        Err(errno) => return Some(Err(errno)),
    };
    let mut done = 0;
    loop {
        if connection.is_broken {
            return Some(if done > 0 { Ok(done) } else { Err(libc::ECONNRESET) });
        }
        let Some(stream) = connection.stream.as_mut() else { return Some(Err(libc::ENOTCONN)) };
        if stream.is_closed_for_sends() {
            return Some(if done > 0 { Ok(done) } else { Err(libc::EPIPE) });
        }
        match stream.send(bytes.len() - done) {
            Some(write) => done += connection.write(&write, &bytes[done..]),
            None => break,
        }
    }
    (done > 0 || bytes.is_empty()).then_some(Ok(done))
}

/// Receives some bytes now; `None`: none.
fn receive_now(inner: &mut Inner, out: &mut [u8], peeks: bool) -> Option<Result<usize, c_int>> {
    if inner.is_read_shut {
        return Some(Ok(0));
    }
    let connection = match connected(inner)? {
        Ok(connection) => connection,
        Err(errno) => return Some(Err(errno)),
    };
    let len = connection.read(out);
    if len == 0 && !out.is_empty() {
        let is_at_end = connection.stream.as_ref().is_some_and(Stream::is_at_end);
        return match (is_at_end, connection.is_broken) {
            (true, _) => Some(Ok(0)),
            (false, true) => Some(Err(libc::ECONNRESET)),
            (false, false) => None,
        };
    }
    if !peeks {
        if let Some(stream) = connection.stream.as_mut() {
            stream.consume(len);
        }
        connection.send_updates();
    }
    Some(Ok(len))
}

impl Socket {
    /// Sends bytes; of a stream that may not wait, perhaps fewer than all.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for flags that there are not; `EAGAIN`, `EPIPE`, `ECONNRESET`, `ENOTCONN`; of
    /// datagrams `EMSGSIZE`, `EDESTADDRREQ`, and those of [`Socket::find_peer`].
    pub(super) fn send(
        &self,
        bytes: &[u8],
        flags: c_int,
        to: Option<SocketAddr>,
    ) -> Result<usize, c_int> {
        if flags & UNSUPPORTED != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let may_wait = flags & libc::MSG_DONTWAIT == 0;
        if self.is_datagram {
            return self.send_datagram(bytes, may_wait, to);
        }
        let mut done = 0;
        loop {
            match self.until(may_wait, |inner| send_now(inner, &bytes[done..])).and_then(|n| n) {
                Ok(number) => done += number,
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
            if done == bytes.len() {
                return Ok(done);
            }
        }
    }

    fn send_datagram(
        &self,
        bytes: &[u8],
        may_wait: bool,
        to: Option<SocketAddr>,
    ) -> Result<usize, c_int> {
        let to = to.or_else(|| self.lock().remote).ok_or(libc::EDESTADDRREQ)?;
        self.bind_datagrams()?;
        let local = self.lock().local.map(|local| local.ip());
        let from = source(local, to).ok_or(libc::ENETUNREACH)?;
        self.until(may_wait, |inner| {
            let State::Datagrams(datagrams) = &mut inner.state else {
                return Some(Err(take_error(&mut inner.error)));
            };
            let sending = datagrams.send(from, to, bytes);
            self.learn_lookups(datagrams);
            match sending {
                Sending::Done => Some(Ok(bytes.len())),
                Sending::NotNow => None,
                Sending::Failed(errno) => Some(Err(errno)),
            }
        })?
    }

    /// Finds the queue pair of a peer, before anything is sent to it.
    ///
    /// # Errors
    /// `ECONNREFUSED`: it has no such socket; `EHOSTUNREACH`: it does not answer; `ENETUNREACH`.
    pub(super) fn find_peer(&self, to: SocketAddr) -> Result<(), c_int> {
        self.bind_datagrams()?;
        let local = self.lock().local.map(|local| local.ip());
        let from = source(local, to).ok_or(libc::ENETUNREACH)?;
        let found = self.until(true, |inner| {
            let State::Datagrams(datagrams) = &mut inner.state else {
                return Some(Err(take_error(&mut inner.error)));
            };
            let finding = datagrams.find(from, to);
            self.learn_lookups(datagrams);
            match finding {
                Sending::Done => Some(Ok(())),
                Sending::NotNow => None,
                Sending::Failed(errno) => Some(Err(errno)),
            }
        });
        match found {
            // It is looked up by the time of the first send.
            Err(libc::EAGAIN) => Ok(()),
            other => other?,
        }?;
        let mut inner = self.lock();
        inner.remote = Some(to);
        if let State::Datagrams(datagrams) = &mut inner.state {
            datagrams.connect(to);
        }
        let port = inner.local.map_or(0, |local| local.port());
        inner.local = Some(SocketAddr::new(from, port));
        Ok(())
    }

    /// Bytes that a receive returns at most, but for one that waits for all; a datagram is no
    /// longer.
    pub(super) fn receive_ring(&self) -> usize {
        self.lock().options.receive_ring
    }

    /// Receives bytes, or a datagram.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for flags that there are not; `EAGAIN`, `ECONNRESET`, `ENOTCONN`.
    pub(super) fn receive(&self, out: &mut [u8], flags: c_int) -> Result<Received, c_int> {
        if flags & UNSUPPORTED != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let may_wait = flags & libc::MSG_DONTWAIT == 0;
        let peeks = flags & libc::MSG_PEEK != 0;
        if self.is_datagram {
            self.bind_datagrams()?;
            return self.until(may_wait, |inner| {
                let State::Datagrams(datagrams) = &mut inner.state else {
                    return Some(Err(take_error(&mut inner.error)));
                };
                let (whole, from) = datagrams.receive(out, !peeks)?;
                Some(Ok(Received { len: whole.min(out.len()), whole, from: Some(from) }))
            })?;
        }
        let wants_all = flags & libc::MSG_WAITALL != 0 && !peeks;
        let mut done = 0;
        loop {
            let received =
                self.until(may_wait, |inner| receive_now(inner, &mut out[done..], peeks));
            match received.and_then(|number| number) {
                Ok(0) => break,
                Ok(number) => done += number,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
            if !wants_all || done == out.len() {
                break;
            }
        }
        Ok(Received { len: done, whole: done, from: self.lock().remote })
    }

    /// Gives the peer memory of the program to write to; returns what the peer calls its first
    /// byte. `None` for the offset: the library chooses. Memory that is not `for_peer` is only
    /// noted.
    ///
    /// # Errors
    /// `EINVAL`, `ENOTCONN`; `ENOSPC`: the peer's table is full; those of registrations.
    ///
    /// # Safety
    /// The memory stays mapped until it is unmapped here or the socket ends.
    pub(super) unsafe fn map(
        &self,
        addr: *mut u8,
        len: usize,
        for_peer: bool,
        offset: Option<u64>,
    ) -> Result<u64, c_int> {
        let (opened, pd) = device()?;
        let start = addr.addr() as u64;
        let offset = offset.unwrap_or(start);
        let short = u32::try_from(len).ok().filter(|len| *len > 0).ok_or(libc::EINVAL)?;
        offset.checked_add(len as u64).ok_or(libc::EINVAL)?;
        let mut inner = self.lock();
        self.progress(&mut inner, None);
        let Inner { state, maps, .. } = &mut *inner;
        // An accepted socket knows its peer before the connection is established.
        let (State::Connecting(connection) | State::Connected(connection)) = state else {
            return Err(libc::ENOTCONN);
        };
        let Some(stream) = connection.stream.as_mut() else { return Err(libc::ENOTCONN) };
        if for_peer && maps.overlaps(offset, len as u64) {
            return Err(libc::EINVAL);
        }
        let entry = if for_peer {
            Some(maps.free_entry(stream.peer_has_maps()).ok_or(libc::ENOSPC)?)
        } else {
            None
        };
        let access = if for_peer { WRITTEN } else { Access::empty() };
        // SAFETY: as this function's.
        let buffer = unsafe { memory::given(addr.cast(), len, access) }?;
        let memory = Memory::new(opened, pd, buffer, access);
        let memory = memory.map_err(|error| errno(&error))?;
        let map = entry.map(|entry| (entry, maps::map(offset, &memory, short)));
        if let Some((entry, map)) = map {
            stream.give(entry, map);
        }
        maps.add(Given { addr: start, len, map, memory });
        self.progress(&mut inner, None);
        Ok(offset)
    }

    /// Takes memory back from the peer, whose writes to it fail from then on.
    ///
    /// # Errors
    /// `EINVAL`: there is no such mapping.
    pub(super) fn unmap(&self, addr: u64, len: usize) -> Result<(), c_int> {
        let mut inner = self.lock();
        let Inner { state, maps, .. } = &mut *inner;
        let given = maps.remove(addr, len).ok_or(libc::EINVAL)?;
        let (State::Connecting(connection) | State::Connected(connection)) = state else {
            return Ok(());
        };
        if let (Some((entry, _)), Some(stream)) = (given.map, connection.stream.as_mut()) {
            stream.take_back(entry);
        }
        drop(given.memory);
        Ok(())
    }

    /// Writes to memory that the peer has given; returns how much, up to the end of the mapping.
    ///
    /// # Errors
    /// As [`Socket::send`]; `EINVAL`: the peer has given nothing at this offset.
    pub(super) fn write_mapped(
        &self,
        bytes: &[u8],
        offset: u64,
        flags: c_int,
    ) -> Result<usize, c_int> {
        if flags & UNSUPPORTED != 0 || self.is_datagram {
            return Err(libc::EOPNOTSUPP);
        }
        let may_wait = flags & libc::MSG_DONTWAIT == 0;
        let mut done = 0;
        while done < bytes.len() {
            let wrote = self.until(may_wait, |inner| {
                let connection = match connected(inner)? {
                    Ok(connection) => connection,
                    Err(errno) => return Some(Err(errno)),
                };
                if connection.is_broken {
                    return Some(Err(libc::ECONNRESET));
                }
                let stream = connection.stream.as_mut()?;
                if stream.is_closed_for_sends() {
                    return Some(Err(libc::EPIPE));
                }
                let Some((to, left)) = stream.mapped(offset.wrapping_add(done as u64)) else {
                    return Some(Err(libc::EINVAL));
                };
                let write = stream.write_mapped(to, left.min(bytes.len() - done))?;
                Some(Ok(connection.write(&write, &bytes[done..])))
            });
            match wrote.and_then(|number| number) {
                Ok(number) => done += number,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }
}
