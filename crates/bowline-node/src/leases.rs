//! Leases: what keeps a node that `bowline run` has started.
//!
//! Each `bowline run` connects to a socket beside that for programs, and leaves the connection open
//! to its program, whose children inherit it: a lease. With it comes the number of the process, as
//! a descriptor, since a program may close what it does not know. The node ends when no lease is
//! left, no such process runs, and no program has a socket.

use std::{
    collections::HashMap,
    io::{self, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use bowline_ctl::OwnedFile;
use bowline_host::connect_within;
use rustix::{
    event::{
        Timespec,
        epoll::{self, EventData, EventFlags},
    },
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
    process::{PidfdFlags, getpid, pidfd_open},
};

use crate::namespaces::numbered;

/// How long a node waits for its first lease, and a program for the answer that it has one.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most leases; one for each `bowline run` that has not ended.
const LEASES_MAX: usize = 4096;
/// Events that are taken at once.
const EVENTS: usize = 64;
/// What the node says to who has got a lease.
const GIVEN: u8 = 1;

/// Where leases are given by the node that serves programs at a place.
fn beside(place: &Path) -> PathBuf {
    let name = numbered("leases").unwrap_or_else(|| "leases".to_owned());
    place.with_file_name(name + ".sock")
}

/// Takes a lease of the node that serves programs at a place; `None`: nobody gives leases there,
/// because the node stays without programs, or because it has ended.
/// [`Reached::lease`](crate::programs::Reached::lease) tells one from the other.
///
/// # Errors
/// The node is about to end.
pub fn take(place: &Path) -> io::Result<Option<OwnedFd>> {
    let mut stream = match connect_within(&beside(place), PATIENCE) {
        Ok(stream) => stream,
        Err(error) => {
            let is_there = matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::PermissionDenied
            );
            return if is_there { Ok(None) } else { Err(error) };
        }
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.read_exact(&mut [0])?;
    // Where the system has no such descriptors, the connection alone is the lease.
    if let Ok(process) = pidfd_open(getpid(), PidfdFlags::empty()) {
        let descriptors = [process.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        sendmsg(&stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(Some(stream.into()))
}

/// What has a lease, until both have ended.
#[derive(Default)]
struct Lease {
    /// The connection, which a program and its children have open.
    stream: Option<UnixStream>,
    /// The process that has asked.
    process: Option<OwnedFd>,
}

/// The leases that a node has given.
pub(crate) struct Leases {
    listener: UnixListener,
    file: OwnedFile,
    epoll: OwnedFd,
    held: HashMap<u64, Lease>,
    /// Number of the next lease. None is used again.
    next: u64,
    started: Instant,
}

/// An event is that of the listener, or of one of the two descriptors of a lease.
const LISTENER: u64 = 0;

fn token(number: u64, is_process: bool) -> u64 {
    number << 1 | u64::from(is_process)
}

impl Leases {
    /// Listens beside the place where programs are served.
    pub(crate) fn listen(place: &Path) -> io::Result<Self> {
        let (listener, file) = bowline_ctl::listen(&beside(place))?;
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        Ok(Self { listener, file, epoll, held: HashMap::new(), next: 1, started: Instant::now() })
    }

    /// A descriptor that is readable when [`is_over`](Self::is_over) may say something else.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Tells whether nobody needs the node, which has sockets of programs or none.
    pub(crate) fn is_over(&mut self, has_sockets: bool) -> bool {
        while self.turn() == EVENTS {}
        let was_wanted = self.next > 1 || self.started.elapsed() > PATIENCE;
        was_wanted && self.held.is_empty() && !has_sockets
    }

    /// Looks at some of what has happened; returns how much.
    fn turn(&mut self) -> usize {
        let mut events = Vec::with_capacity(EVENTS);
        let space = rustix::buffer::spare_capacity(&mut events);
        if epoll::wait(&self.epoll, space, Some(&Timespec::default())).is_err() {
            return 0;
        }
        for event in &events {
            match event.data.u64() {
                LISTENER => self.give(),
                lease => self.look(lease >> 1, lease & 1 == 1),
            }
        }
        events.len()
    }

    /// Gives a lease to who has connected.
    fn give(&mut self) {
        let Ok((mut stream, _)) = self.listener.accept() else { return };
        let number = self.next;
        let event = EventData::new_u64(token(number, false));
        let is_held = self.held.len() < LEASES_MAX
            && stream.set_nonblocking(true).is_ok()
            && epoll::add(&self.epoll, &stream, event, EventFlags::IN).is_ok()
            && stream.write_all(&[GIVEN]).is_ok();
        if is_held {
            self.next += 1;
            self.held.insert(number, Lease { stream: Some(stream), process: None });
        }
    }

    /// Looks at the connection of a lease, or at its process.
    fn look(&mut self, number: u64, is_process: bool) {
        let Some(lease) = self.held.get_mut(&number) else { return };
        if is_process {
            lease.process = None;
        } else if let Some(stream) = &lease.stream {
            match received(stream) {
                Some(Some(process)) if lease.process.is_none() => {
                    let event = EventData::new_u64(token(number, true));
                    if epoll::add(&self.epoll, &process, event, EventFlags::IN).is_ok() {
                        lease.process = Some(process);
                    }
                }
                Some(_) => {}
                None => lease.stream = None,
            }
        }
        if lease.stream.is_none() && lease.process.is_none() {
            self.held.remove(&number);
        }
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        self.file.remove();
    }
}

/// Reads what comes on a connection: perhaps a descriptor. `None`: it has ended.
fn received(stream: &UnixStream) -> Option<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let pieces = &mut [IoSliceMut::new(&mut byte)];
    match recvmsg(stream, pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) if got.bytes > 0 => {}
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Some(None),
        _ => return None,
    }
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Some(descriptors.flatten().next())
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command, thread};

    use super::*;

    #[test]
    fn a_node_is_needed_while_a_lease_or_its_process_or_a_socket_is_left() {
        let name = format!("bowline-leases-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        let place = folder.join("host.sock");
        assert!(take(&place).unwrap().is_none(), "a node without leases");
        let mut leases = Leases::listen(&place).unwrap();
        assert!(!leases.is_over(false), "the first one is on its way");
        let taken = {
            let taking = thread::spawn({
                let place = place.clone();
                move || take(&place).unwrap().unwrap()
            });
            while leases.held.is_empty() {
                assert!(!leases.is_over(false));
            }
            taking.join().unwrap()
        };
        // A child has it open as well.
        let stdin = taken.try_clone().unwrap();
        let mut child = Command::new("sleep").arg("60").stdin(stdin).spawn().unwrap();
        drop(taken);
        assert!(!leases.is_over(false));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!leases.is_over(false), "the process that asked, this one, still runs");
        // As if it had ended.
        while leases.held.values().any(|lease| lease.process.is_none() || lease.stream.is_some()) {
            leases.turn();
        }
        leases.look(1, true);
        assert!(!leases.is_over(true), "a program has a socket");
        assert!(leases.is_over(false));
        drop(leases);
        assert!(take(&place).unwrap().is_none());
        fs::remove_dir_all(folder).unwrap();
    }
}
