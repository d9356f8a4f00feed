//! The process that owns the addresses.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use bowline_base::Errno;
use bowline_verbs::Error;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{RecvFlags, Shutdown, recv, shutdown};

use super::message::{ADDRS_MAX, FORMAT, Message, Seen, Welcome};
use super::{Among, Others, Owner, PortSpace, owner, ring};
use crate::connection_files::ConnectionFiles;
use crate::udp::Endpoint;
use crate::{EarlySockets, Impairments, SoftConfig, SoftDevice, sys};

/// Part of the host's own device.
const OWN_PART: u8 = 0;
/// Most rings: 1 GiB of memory. Others send by their sockets.
const RINGS_MAX: usize = 512;
/// Most listeners of a part.
const LISTENERS_MAX: usize = 1024;
/// How long a process that has connected may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long copies of a socket that is closed may be there, and how often that is tried.
const COPIES_GO: Duration = Duration::from_millis(200);
const COPIES_PAUSE: Duration = Duration::from_millis(1);
/// Datagrams of a former guest that are removed from a socket before another one gets it.
const LEFT_MAX: usize = 1 << 16;

/// The sockets of one address, by part.
#[derive(Debug)]
struct Group {
    addr: IpAddr,
    link: u32,
    sockets: Vec<OwnedFd>,
}

/// A guest.
#[derive(Debug)]
struct Member {
    socket: Arc<OwnedFd>,
    /// Wakes it for what comes by a ring.
    bell: OwnedFd,
    /// It is leaving: there are no more rings for it.
    is_leaving: bool,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<Group>,
    /// Guests, by part.
    guests: HashMap<u8, Member>,
    /// Rings: from which part to which.
    rings: HashSet<(u8, u8)>,
    /// Parts that have listeners.
    listeners: HashMap<(PortSpace, SocketAddr), u8>,
    /// Part that the next guest gets if it is free: a number is used again as late as can be.
    next: u8,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    buffer: usize,
    /// Folder in which guests list their connections.
    folder: Option<PathBuf>,
    impairments: Impairments,
    device: OnceLock<Weak<SoftDevice>>,
}

/// A host of guests' devices.
#[derive(Clone, Debug)]
pub struct Host(Arc<Inner>);

impl State {
    /// Returns the guest that a datagram is for.
    fn guest_for(&self, of: Owner, to: IpAddr) -> Option<&Arc<OwnedFd>> {
        let part = match of {
            Owner::Part(part) => part,
            Owner::Listener(space, port) => {
                // As the connection manager finds its own [CMA-6].
                let (any_v4, any) = (IpAddr::from([0; 4]), IpAddr::from([0; 16]));
                let all = if to.is_ipv4() { [to, any_v4, any] } else { [to, any, any] };
                let at = |ip| (space, SocketAddr::new(ip, port));
                *all.iter().find_map(|ip| self.listeners.get(&at(*ip)))?
            }
        };
        self.guests.get(&part).map(|guest| &guest.socket)
    }

    /// Returns a part that no guest has.
    fn free_part(&mut self) -> Option<u8> {
        let all = (1..=u8::MAX).cycle().skip(usize::from(self.next.max(1)) - 1);
        let part = all.take(u8::MAX.into()).find(|part| !self.guests.contains_key(part))?;
        self.next = part.checked_add(1).unwrap_or(1);
        Some(part)
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the sockets of a part, and has the system give it its packets.
    fn prepare(&self, state: &mut State, part: u8) -> Result<(), Error> {
        let number = usize::from(part);
        let mut gone = Vec::new();
        for group in &mut state.groups {
            while group.sockets.len() <= number {
                match Endpoint::shared_socket(group.addr, group.link, self.buffer) {
                    Ok(new) => group.sockets.push(new),
                    Err(Error::AddrNotAvailable) => {
                        gone.push(group.addr);
                        break;
                    }
                    Err(error) => return Err(error),
                }
                // Of the whole group; its size grows by one at a time, as its sockets are numbered.
                let count = group.sockets.len() as u32; // at most 256
                let steered = group.sockets.first().map(|first| sys::steer(first.as_fd(), count));
                if let Some(Err(errno)) = steered {
                    group.sockets.pop();
                    return Err(unsteered(errno));
                }
            }
            if let Some(socket) = group.sockets.get(number) {
                drain(socket);
            }
        }
        // The machine has lost an address, which later processes do without.
        state.groups.retain(|group| !gone.contains(&group.addr));
        Ok(())
    }
}

fn unsteered(errno: rustix::io::Errno) -> Error {
    let errno = Errno(errno.raw_os_error());
    Error::System { what: "steering packets to processes".to_owned(), errno }
}

/// Removes what a former guest has not read.
fn drain(socket: &OwnedFd) {
    let mut byte = [0_u8; 1];
    for _ in 0..LEFT_MAX {
        if recv(socket, &mut byte, RecvFlags::DONTWAIT | RecvFlags::TRUNC).is_err() {
            break;
        }
    }
}

impl Others for Inner {
    fn take(&self, from: SocketAddr, to: IpAddr, payload: &[u8]) -> bool {
        let Some(owner) = owner(payload).filter(|owner| *owner != Owner::Part(OWN_PART)) else {
            return false;
        };
        let Some(guest) = self.lock().guest_for(owner, to).map(Arc::clone) else { return false };
        // One that does not read loses it, as in a network: peers send it again.
        let _ = Message::Packet(from, to, payload.to_vec()).send_now(&*guest, &[]);
        true
    }
}

/// Opens the first socket of an address that has just been found free. A child that another thread
/// starts has a copy of the socket that was bound for that, until it runs its program.
fn shared_socket(group: &Group, buffer: usize) -> Result<OwnedFd, Error> {
    let until = Instant::now() + COPIES_GO;
    loop {
        match Endpoint::shared_socket(group.addr, group.link, buffer) {
            Err(Error::AddrInUse(_)) if Instant::now() < until => std::thread::sleep(COPIES_PAUSE),
            opened => return opened,
        }
    }
}

impl Host {
    /// Most addresses that are shared.
    pub const ADDRS_MAX: usize = ADDRS_MAX;

    /// Opens the addresses of the settings for guests, and this process's own device on them. Those
    /// at which somebody else has the port are left out, and those after the first
    /// [`ADDRS_MAX`](Self::ADDRS_MAX) others.
    ///
    /// # Errors
    /// Those of [`SoftDevice::open`]; [`Error::AddrInUse`] when no address is left.
    pub fn open(config: SoftConfig) -> Result<(Self, Arc<SoftDevice>), Error> {
        let link = |addr| config.links.iter().find(|(of, _)| *of == addr).map_or(0, |(_, at)| *at);
        let groups: Vec<_> = config
            .addrs
            .iter()
            .map(|addr| Group { addr: *addr, link: link(*addr), sockets: Vec::new() })
            .collect();
        let inner = Arc::new(Inner {
            state: Mutex::new(State { groups, ..State::default() }),
            buffer: config.socket_buffer,
            folder: config.former_connections.clone().folder(),
            impairments: config.impairments.clone(),
            device: OnceLock::new(),
        });
        let mut state = inner.lock();
        let mut in_use = Error::AddrNotAvailable;
        let groups = std::mem::take(&mut state.groups);
        for group in groups {
            if state.groups.len() == ADDRS_MAX {
                break;
            }
            // The system would let in another process of this user that shares the port.
            let probe = Endpoint::open_on(
                &EarlySockets::default(),
                group.addr,
                (group.link != 0).then_some(group.link),
                0,
            );
            let opened = probe.and_then(|probe| {
                drop(probe);
                shared_socket(&group, inner.buffer)
            });
            match opened {
                Ok(socket) => {
                    sys::steer(socket.as_fd(), 1).map_err(unsteered)?;
                    state.groups.push(Group { sockets: vec![socket], ..group });
                }
                Err(error @ (Error::AddrInUse(_) | Error::AddrNotAvailable)) => in_use = error,
                Err(error) => return Err(error),
            }
        }
        if state.groups.is_empty() {
            return Err(in_use);
        }
        let addrs = state.groups.iter().map(|group| group.addr).collect();
        let sockets = part_sockets(&state, OWN_PART).map_err(|error| Error::System {
            what: "a socket".to_owned(),
            errno: Errno::of(&error),
        })?;
        drop(state);
        let core = bowline_roce::Config { part: Some(OWN_PART), ..config.core };
        let strays: Arc<dyn Others> = Arc::<Inner>::clone(&inner);
        let others = Among { strays: Some(strays), rings: None };
        let early_sockets = EarlySockets::bound(sockets);
        let config = SoftConfig { addrs, early_sockets, core, ..config };
        let device = Arc::new(SoftDevice::open_among(config, others)?);
        // The first one.
        let _ = inner.device.set(Arc::downgrade(&device));
        Ok((Self(inner), device))
    }

    /// The addresses that are shared.
    pub fn addrs(&self) -> Vec<IpAddr> {
        self.0.lock().groups.iter().map(|group| group.addr).collect()
    }

    /// Refuses a process that has connected: it is another user's, or there are too many.
    pub fn refuse(guest: &OwnedFd) {
        let is_own = socket_peercred(guest).is_ok_and(|who| who.uid == rustix::process::geteuid());
        if is_own {
            send_refusal(guest, Errno::EAGAIN, "too many processes share the RDMA addresses");
        } else {
            send_refusal(guest, Errno::EACCES, ANOTHER_USER);
        }
    }

    /// Answers a process that has connected and only asks what there is; returns whether it did.
    /// One that wants a part is to be served. `host` is `None` where nothing is shared yet.
    ///
    /// # Errors
    /// Those of the system, and of a process that says nothing.
    pub fn answer_look(guest: &OwnedFd, host: impl FnOnce() -> Option<Self>) -> io::Result<bool> {
        set_socket_timeout(guest, Timeout::Recv, Some(PATIENCE))?;
        let mut wish = [0; 2];
        recv(guest, &mut wish, RecvFlags::PEEK)?;
        match Message::decode(&wish) {
            Some(Message::Look(FORMAT)) => {}
            Some(Message::Join(_)) => return Ok(false),
            // Nothing is opened for one that asks for nothing, or has gone.
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        // What is not read when a socket is closed costs its peer what it has been sent.
        Message::receive(guest)?;
        let mut seen = Seen { host: std::process::id(), ..Seen::default() };
        if let Some(host) = host() {
            let state = host.0.lock();
            seen.processes = state.guests.len() as u8; // of the numbers of parts
            seen.addrs = state.groups.iter().map(|group| (group.addr, group.link)).collect();
        }
        Message::Seen(seen).send_now(guest, &[])?;
        Ok(true)
    }

    /// Serves a process that has connected, by a socket of type `SOCK_SEQPACKET`, until it ends.
    /// Returns why it was refused.
    ///
    /// # Errors
    /// Those of the system, and of a process that is not this user's or says what is not to be
    /// said.
    pub fn serve(&self, guest: OwnedFd) -> io::Result<()> {
        let guest = Arc::new(guest);
        let refuse = |errno: Errno, why: &str| {
            send_refusal(&*guest, errno, why);
            Err(Error::System { what: why.to_owned(), errno }.into())
        };
        let who = socket_peercred(&*guest)?;
        if who.uid != rustix::process::geteuid() && !who.uid.is_root() {
            return refuse(Errno::EACCES, ANOTHER_USER);
        }
        set_socket_timeout(&*guest, Timeout::Recv, Some(PATIENCE))?;
        match Message::receive(&*guest)? {
            Some((Message::Join(FORMAT), _)) => {}
            Some((Message::Join(_), _)) => {
                return refuse(Errno::EPROTONOSUPPORT, "the node is of another version");
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        let part = match self.join(&guest) {
            Ok(part) => part,
            Err(error) => return refuse(error.errno(), &error.to_string()),
        };
        set_socket_timeout(&*guest, Timeout::Recv, None)?;
        // One that reads nothing holds nobody else up for long.
        set_socket_timeout(&*guest, Timeout::Send, Some(PATIENCE))?;
        let ended = self.talk(part, &guest);
        self.leave(part);
        ended
    }

    /// Gives a guest a part.
    fn join(&self, guest: &Arc<OwnedFd>) -> Result<u8, Error> {
        let system = |errno: rustix::io::Errno| Error::System {
            what: "welcoming a process".to_owned(),
            errno: Errno(errno.raw_os_error()),
        };
        let mut state = self.0.lock();
        let Some(part) = state.free_part() else {
            return Err(Error::Limit(bowline_verbs::Resource::Processes));
        };
        self.0.prepare(&mut state, part)?;
        let addrs = state.groups.iter().map(|group| (group.addr, group.link)).collect();
        let folder = self.0.folder.clone().unwrap_or_default();
        let welcome = Welcome { part, folder, addrs, impairments: self.0.impairments.clone() };
        let sockets: Vec<_> =
            state.groups.iter().filter_map(|group| group.sockets.get(usize::from(part))).collect();
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(system)?;
        let fds: Vec<_> =
            sockets.iter().map(|socket| socket.as_fd()).chain([bell.as_fd()]).collect();
        Message::Welcome(welcome).send(&**guest, &fds).map_err(system)?;
        state.guests.insert(part, Member { socket: Arc::clone(guest), bell, is_leaving: false });
        Ok(part)
    }

    fn talk(&self, part: u8, guest: &OwnedFd) -> io::Result<()> {
        while let Some((message, _)) = Message::receive(guest)? {
            match message {
                Message::Listen(space, at) => {
                    let errno = self.listen(part, space, at);
                    Message::Answer(errno).send(guest, &[])?;
                }
                Message::Unlisten(space, at) => {
                    let mut state = self.0.lock();
                    if state.listeners.get(&(space, at)) == Some(&part) {
                        state.listeners.remove(&(space, at));
                    }
                }
                // Without a ring, packets go by sockets.
                Message::Ring(to) => drop(self.ring(part, to)),
                Message::Stray(from, to, payload) => {
                    if !self.0.take(from, to, &payload)
                        && let Some(device) = self.device()
                    {
                        device.take_in_one(from, to, &payload);
                    }
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        Ok(())
    }

    fn device(&self) -> Option<Arc<SoftDevice>> {
        self.0.device.get()?.upgrade()
    }

    /// Has requests for a port go to a guest; returns 0, or an errno.
    fn listen(&self, part: u8, space: PortSpace, at: SocketAddr) -> i32 {
        // The device's lock is taken first, as where it gives datagrams away.
        let is_own = self.device().is_some_and(|device| device.listens(space, at));
        let mut state = self.0.lock();
        let is_here = at.ip().is_unspecified() || state.groups.iter().any(|of| of.addr == at.ip());
        if !is_here {
            return Errno::EADDRNOTAVAIL.0;
        }
        if state.listeners.values().filter(|of| **of == part).count() >= LISTENERS_MAX {
            return Errno::ENOMEM.0;
        }
        let is_taken = state.listeners.keys().any(|(other_space, other)| {
            // An unspecified address of IPv6 stands for all of both families.
            let includes =
                |one: IpAddr, two: IpAddr| one.is_unspecified() && (one.is_ipv6() || two.is_ipv4());
            let (one, two) = (other.ip(), at.ip());
            *other_space == space
                && other.port() == at.port()
                && (one == two || includes(one, two) || includes(two, one))
        });
        if is_taken || is_own {
            return Errno::EADDRINUSE.0;
        }
        state.listeners.insert((space, at), part);
        0
    }

    /// Makes a ring from a guest to another one, which learns of it first.
    fn ring(&self, from: u8, to: u8) -> io::Result<()> {
        let mut state = self.0.lock();
        let State { guests, rings, .. } = &mut *state;
        let (Some(writer), Some(reader)) = (guests.get(&from), guests.get(&to)) else {
            return Ok(());
        };
        let is_full = rings.len() >= RINGS_MAX;
        if from == to || reader.is_leaving || is_full || rings.contains(&(from, to)) {
            return Ok(());
        }
        let memory = ring::memory()?;
        Message::RingFrom(from).send_now(&*reader.socket, &[memory.as_fd()])?;
        let fds = [memory.as_fd(), reader.bell.as_fd()];
        Message::RingTo(to).send_now(&*writer.socket, &fds)?;
        rings.insert((from, to));
        Ok(())
    }

    /// Has everybody with a ring to or from a part that is gone forget it, before another guest
    /// gets its number.
    fn end_rings(&self, part: u8) {
        let mut state = self.0.lock();
        let State { guests, rings, .. } = &mut *state;
        if let Some(guest) = guests.get_mut(&part) {
            guest.is_leaving = true;
        }
        let others = guests.iter().filter(|(other, _)| {
            rings.contains(&(part, **other)) || rings.contains(&(**other, part))
        });
        let others: Vec<_> = others.map(|(_, other)| Arc::clone(&other.socket)).collect();
        rings.retain(|(from, to)| *from != part && *to != part);
        drop(state);
        for other in others {
            // Without this it would send to nobody: one that takes nothing has its socket closed.
            if Message::Left(part).send(&*other, &[]).is_err() {
                let _ = shutdown(&*other, Shutdown::Both);
            }
        }
    }

    /// Ends what a guest that is gone has left: its rings, its listeners, and its connections, also
    /// at their peers.
    fn leave(&self, part: u8) {
        let mut state = self.0.lock();
        state.listeners.retain(|_, of| *of != part);
        let names: Vec<_> = state.groups.iter().map(|group| (group.addr, group.link)).collect();
        drop(state);
        if let Some(folder) = &self.0.folder {
            let files = ConnectionFiles::new(folder, Some(part), &names);
            let former = files.read().unwrap_or_default();
            if let Some(device) = self.device() {
                device.end_former(&former);
            }
            // It is written again by the next guest of this number.
            let _ = files.write(&[]);
        }
        // This may wait for others, and the number is free only after it.
        self.end_rings(part);
        self.0.lock().guests.remove(&part);
    }
}

const ANOTHER_USER: &str = "the RDMA addresses of this machine are shared among processes of one user, and the \
    node is another's: run `bowline run` as that user, or in a network namespace of your own";

/// Says why a process gets nothing.
fn send_refusal(guest: impl AsFd, errno: Errno, why: &str) {
    // One that is gone, or does not read, need not know.
    let _ = Message::Refused(errno.0, why.to_owned()).send_now(guest, &[]);
}

/// Copies of the sockets of a part.
fn part_sockets(state: &State, part: u8) -> io::Result<Vec<(IpAddr, OwnedFd)>> {
    let of = |group: &Group| {
        let socket = group.sockets.get(usize::from(part)).ok_or(io::ErrorKind::NotFound)?;
        Ok((group.addr, socket.try_clone()?))
    };
    state.groups.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind,
        listen, send, socket_with, socketpair,
    };

    use super::super::Joined;
    use super::*;
    use crate::SoftConfig;

    /// A host opens its addresses only for one that is to be served.
    #[test]
    fn who_asks_for_nothing_is_not_to_be_served() {
        let kind = SocketType::SEQPACKET;
        let pair = || socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let answered = |here| Host::answer_look(here, || panic!("nobody has looked"));
        let (guest, here) = pair();
        drop(guest);
        assert_eq!(answered(&here).unwrap_err().kind(), io::ErrorKind::InvalidData, "it has gone");
        let (guest, here) = pair();
        send(&guest, b"?!", SendFlags::empty()).unwrap();
        assert_eq!(answered(&here).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let (guest, here) = pair();
        Message::Join(FORMAT).send(&guest, &[]).unwrap();
        assert!(!answered(&here).unwrap());
    }

    #[test]
    fn who_looks_gets_no_part_and_sees_those_who_have_one() {
        let folder = std::env::temp_dir().join(format!("bowline-look-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = folder.join("verbs.sock");
        let kind = SocketType::SEQPACKET;
        let listener = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        let opened: Arc<Mutex<Option<Host>>> = Arc::default();
        let known = Arc::clone(&opened);
        std::thread::spawn(move || {
            while let Ok(guest) = accept_with(&listener, SocketFlags::CLOEXEC) {
                let known = Arc::clone(&known);
                std::thread::spawn(move || {
                    let host = known.lock().unwrap().clone();
                    if !Host::answer_look(&guest, || host.clone()).unwrap() {
                        host.unwrap().serve(guest).unwrap();
                    }
                });
            }
        });
        let own = std::process::id();
        let nothing = Seen { host: own, ..Seen::default() };
        assert_eq!(Seen::at(&path).unwrap(), nothing);
        let addr: IpAddr = [127, 82, 1, 1].into();
        let config = SoftConfig { addrs: vec![addr], ..SoftConfig::default() };
        let (host, _device) = Host::open(config).unwrap();
        *opened.lock().unwrap() = Some(host);
        let with = |processes| Seen { host: own, processes, addrs: vec![(addr, 0)] };
        assert_eq!(Seen::at(&path).unwrap(), with(0));
        let joined = Joined::at(&path).unwrap();
        assert_eq!(Seen::at(&path).unwrap(), with(1));
        drop(joined);
        let begun = Instant::now();
        while Seen::at(&path).unwrap() != with(0) {
            assert!(begun.elapsed() < PATIENCE, "it has left");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
