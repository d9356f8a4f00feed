//! Multicast groups that were joined: a socket for each, bound to the group's address [CMA-23].
//!
//! A socket that is bound to an address of the machine gets nothing that is sent to a group,
//! whichever it has joined. Sockets bound to the group each get a copy, those of other processes
//! too, so that processes that share an address need not know of each other. A thread that is
//! started with the first group reads them all.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bowline_base::Errno as Number;
use bowline_verbs::{Error, InvalidReason, Resource};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_ip_add_membership_with_ifindex, set_ip_drop_membership_with_ifindex,
    set_ipv6_add_membership, set_ipv6_drop_membership,
};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

use crate::shared::Shared;
use crate::sys::{self, Opt};
use crate::udp::{ROCE_PORT, enlarge};

/// Most groups of a device.
const GROUPS_MAX: usize = 1024;
/// Receive buffer of a group's socket.
const BUFFER: usize = 1 << 20;
/// Longest datagram: a packet of the largest MTU.
const DATAGRAM_MAX: usize = 8 << 10;
/// Datagrams read from one socket before the others have their turn.
const TURN: usize = 64;

/// A group.
#[derive(Debug)]
struct Group {
    addr: IpAddr,
    /// Interface to which its socket is bound; 0: all.
    scope: u32,
    socket: Arc<OwnedFd>,
    /// Interfaces on which it was joined, and how often.
    joined: Vec<(u32, usize)>,
}

impl Group {
    fn is(&self, addr: IpAddr, scope: u32) -> bool {
        (self.addr, self.scope) == (addr, scope)
    }
}

/// The thread, and what wakes it.
#[derive(Debug)]
struct Reader {
    kick: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<Group>,
    reader: Option<Reader>,
    is_closed: bool,
}

/// The groups of a device.
#[derive(Debug, Default)]
pub(crate) struct Groups(Arc<Mutex<State>>);

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn system(what: String, errno: Errno) -> Error {
    Error::System { what, errno: Number(errno.raw_os_error()) }
}

/// Returns the interface of a group that is another one on each: one of a link, or of a machine
/// alone. 0 for others.
fn scope(group: IpAddr, index: u32) -> u32 {
    /// In the second byte of the address (RFC 4291, section 2.7).
    const INTERFACE_LOCAL: u8 = 1;
    const LINK_LOCAL: u8 = 2;
    match group {
        IpAddr::V6(group) if matches!(group.octets()[1] & 0xf, INTERFACE_LOCAL | LINK_LOCAL) => {
            index
        }
        _ => 0,
    }
}

/// Makes the socket of a group.
fn open(group: IpAddr, scope: u32) -> Result<OwnedFd, Error> {
    let failed = |errno: Errno| match errno {
        Errno::ADDRINUSE => Error::AddrInUse(format!(
            "UDP port {ROCE_PORT} of all addresses is another program's, and {group} with it"
        )),
        errno => system(format!("making a socket of {group}"), errno),
    };
    let (family, all) = match group {
        IpAddr::V4(_) => (AddressFamily::INET, Opt::MulticastAll4),
        IpAddr::V6(_) => (AddressFamily::INET6, Opt::MulticastAll6),
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::DGRAM, flags, None).map_err(failed)?;
    let set = |option, value| sys::set(socket.as_fd(), option, value).map_err(failed);
    set(Opt::ReuseAddr, 1)?;
    set(all, 0)?;
    if group.is_ipv6() {
        set(Opt::V6Only, 1)?;
        // rxe and NICs send no checksum [OUT-4].
        set(Opt::NoCheck6Rx, 1)?;
    }
    enlarge(socket.as_fd(), BUFFER);
    let at = match group {
        // The system binds the socket to that interface.
        IpAddr::V6(group) => SocketAddrV6::new(group, ROCE_PORT, 0, scope).into(),
        IpAddr::V4(_) => SocketAddr::new(group, ROCE_PORT),
    };
    bind(&socket, &at).map_err(failed)?;
    Ok(socket)
}

fn join_on(socket: &OwnedFd, group: IpAddr, local: IpAddr, index: u32) -> Result<(), Errno> {
    match (group, local) {
        (IpAddr::V4(group), IpAddr::V4(local)) => {
            set_ip_add_membership_with_ifindex(socket, &group, &local, index)
        }
        (IpAddr::V6(group), _) => set_ipv6_add_membership(socket, &group, index),
        _ => Err(Errno::AFNOSUPPORT),
    }
}

fn leave_on(socket: &OwnedFd, group: IpAddr, index: u32) -> Result<(), Errno> {
    match group {
        IpAddr::V4(group) => {
            let any = [0; 4].into();
            set_ip_drop_membership_with_ifindex(socket, &group, &any, index)
        }
        IpAddr::V6(group) => set_ipv6_drop_membership(socket, &group, index),
    }
}

impl Groups {
    /// Joins a group on the interface of a local address.
    pub(crate) fn join(
        &self,
        shared: &Arc<Shared>,
        group: IpAddr,
        local: IpAddr,
        index: u32,
    ) -> Result<(), Error> {
        let group = group.to_canonical();
        if !group.is_multicast() {
            return Err(Error::Invalid(InvalidReason::NotMulticast(group)));
        }
        if group.is_ipv4() != local.is_ipv4() {
            return Err(Error::Invalid(InvalidReason::AddrFamilies));
        }
        let mut state = lock(&self.0);
        if state.is_closed {
            return Err(Error::Closed);
        }
        let failed = |errno| system(format!("joining {group} with {local}"), errno);
        let scope = scope(group, index);
        if let Some(known) = state.groups.iter_mut().find(|known| known.is(group, scope)) {
            if let Some((_, times)) = known.joined.iter_mut().find(|(at, _)| *at == index) {
                *times += 1;
            } else {
                join_on(&known.socket, group, local, index).map_err(failed)?;
                known.joined.push((index, 1));
            }
            return Ok(());
        }
        if state.groups.len() >= GROUPS_MAX {
            return Err(Error::Limit(Resource::MulticastGroups));
        }
        let socket = open(group, scope)?;
        join_on(&socket, group, local, index).map_err(failed)?;
        self.read_on(shared, &mut state)?;
        let socket = Arc::new(socket);
        state.groups.push(Group { addr: group, scope, socket, joined: vec![(index, 1)] });
        state.kick();
        Ok(())
    }

    /// Leaves a group on an interface.
    pub(crate) fn leave(&self, group: IpAddr, index: u32) -> Result<(), Error> {
        let group = group.to_canonical();
        let mut state = lock(&self.0);
        let scope = scope(group, index);
        let at = state.groups.iter().position(|known| known.is(group, scope));
        let at = at.ok_or(Error::AddrNotAvailable)?;
        let known = &mut state.groups[at];
        let of = known.joined.iter().position(|(joined, _)| *joined == index);
        let of = of.ok_or(Error::AddrNotAvailable)?;
        known.joined[of].1 -= 1;
        if known.joined[of].1 > 0 {
            return Ok(());
        }
        known.joined.remove(of);
        // Of the last one, too: the thread may have the socket a moment longer.
        let left = leave_on(&known.socket, group, index);
        if known.joined.is_empty() {
            // The end of the socket is the end of all, whatever the system said.
            state.groups.remove(at);
            state.kick();
            return Ok(());
        }
        left.map_err(|errno| system(format!("leaving {group}"), errno))
    }

    /// Starts the thread that reads the groups' sockets, if it does not run.
    fn read_on(&self, shared: &Arc<Shared>, state: &mut State) -> Result<(), Error> {
        if state.reader.is_some() {
            return Ok(());
        }
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| system("making an event descriptor".to_owned(), errno))?;
        let kick = Arc::new(kick);
        let (groups, wakes, shared) = (Arc::clone(&self.0), Arc::clone(&kick), Arc::clone(shared));
        let thread = std::thread::Builder::new()
            .name("bowline-groups".to_owned())
            .spawn(move || read(&groups, &wakes, &shared))
            .map_err(|error| Error::System {
                what: "starting a thread".to_owned(),
                errno: Number::of(&error),
            })?;
        state.reader = Some(Reader { kick, thread });
        Ok(())
    }

    /// Leaves all groups and ends the thread.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.0);
        state.is_closed = true;
        state.groups.clear();
        state.kick();
        let reader = state.reader.take();
        drop(state);
        if let Some(Reader { thread, .. }) = reader {
            // A panic of that thread has been reported on standard error.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Has the thread look at the groups again.
    fn kick(&self) {
        if let Some(Reader { kick, .. }) = &self.reader {
            // A full counter wakes as well.
            let _ = rustix::io::write(kick, &1_u64.to_ne_bytes());
        }
    }
}

/// Reads the sockets of all groups until the device is closed.
fn read(groups: &Mutex<State>, kick: &OwnedFd, shared: &Shared) {
    let mut bytes = vec![0; DATAGRAM_MAX];
    loop {
        let state = lock(groups);
        if state.is_closed {
            return;
        }
        let all: Vec<_> =
            state.groups.iter().map(|group| (group.addr, Arc::clone(&group.socket))).collect();
        drop(state);
        let sockets = all.iter().map(|(_, socket)| PollFd::new(&**socket, PollFlags::IN));
        let mut fds: Vec<_> =
            [PollFd::new(kick, PollFlags::IN)].into_iter().chain(sockets).collect();
        if poll(&mut fds, None).is_err() {
            continue; // a signal
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut count = [0; 8];
        // Without effect where nothing was written.
        let _ = rustix::io::read(kick, &mut count[..]);
        for ((group, socket), _) in all.iter().zip(&is_ready[1..]).filter(|(_, ready)| **ready) {
            for _ in 0..TURN {
                let Ok((len, whole, from)) = recvfrom(socket, &mut bytes[..], RecvFlags::TRUNC)
                else {
                    break;
                };
                let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                if let (Some(from), true) = (from, whole == len) {
                    shared.take_in_one(from, *group, &bytes[..len]);
                }
            }
        }
    }
}
