//! A process that has a part of a host's addresses.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use bowline_base::Errno;
use bowline_verbs::Error;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown,
    socket_with,
};

use super::message::{FORMAT, Message, Seen, Welcome};
use super::rings::Rings;
use super::{Among, Others, Owner, PortSpace, owner};
use crate::{EarlySockets, FormerConnections, SoftConfig, SoftDevice};

/// How long a host may take to say what it shares.
const PATIENCE: Duration = Duration::from_secs(3);

/// More than a ring holds.
const CATCH_UPS_MAX: usize = 32;

/// What a process has been given, before its device is open.
#[derive(Debug)]
pub struct Joined {
    host: Arc<OwnedFd>,
    given: Welcome,
    sockets: Vec<OwnedFd>,
    bell: OwnedFd,
}

/// A device among those of other processes.
#[derive(Debug)]
pub struct Guest {
    host: Arc<OwnedFd>,
    /// Answers to requests, which are made one at a time.
    answers: Mutex<Receiver<i32>>,
}

#[derive(Debug)]
struct Strays {
    host: Arc<OwnedFd>,
    part: u8,
}

impl Others for Strays {
    /// The system merges packets of one peer for several processes now and then.
    fn take(&self, from: SocketAddr, to: IpAddr, payload: &[u8]) -> bool {
        let is_stray = owner(payload).is_some_and(|of| of != Owner::Part(self.part));
        if is_stray {
            // What is lost is sent again.
            let _ = Message::Stray(from, to, payload.to_vec()).send_now(&*self.host, &[]);
        }
        is_stray
    }
}

impl Joined {
    /// Asks the host behind a socket for a part of its addresses.
    ///
    /// # Errors
    /// `NotFound` and `ConnectionRefused` when there is no host; why it refuses.
    pub fn at(path: &Path) -> io::Result<Self> {
        let host = connected(path)?;
        Message::Join(FORMAT).send(&host, &[])?;
        match Message::receive(&host)? {
            Some((Message::Welcome(given), mut fds)) if given.addrs.len() + 1 == fds.len() => {
                let bell = fds.pop().ok_or(io::ErrorKind::InvalidData)?;
                Ok(Self { host: Arc::new(host), given, sockets: fds, bell })
            }
            Some((Message::Welcome(given), sockets)) => {
                // The system leaves out those for which this process has no room.
                let what = format!(
                    "this process may not open the sockets of its {} addresses, only {}; see \
                     ulimit -n",
                    given.addrs.len(),
                    sockets.len()
                );
                Err(Error::System { what, errno: Errno::EMFILE }.into())
            }
            Some((Message::Refused(errno, what), _)) => {
                Err(Error::System { what, errno: Errno(errno) }.into())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// The addresses, with the interface of each that is link-local.
    pub fn addrs(&self) -> &[(IpAddr, u32)] {
        &self.given.addrs
    }

    /// Opens the device. `config` says all but its addresses, and without impairments the host's
    /// are in force.
    ///
    /// # Errors
    /// Those of [`SoftDevice::open`].
    pub fn open(self, config: SoftConfig) -> Result<(Guest, Arc<SoftDevice>), Error> {
        let Self { host, given, sockets, bell } = self;
        let Welcome { part, folder, addrs, impairments } = given;
        let former_connections = if folder.as_os_str().is_empty() {
            FormerConnections::Nowhere
        } else {
            FormerConnections::In(folder)
        };
        let bound = addrs.iter().map(|(addr, _)| *addr).zip(sockets).collect();
        let core = bowline_roce::Config { part: Some(part), ..config.core };
        let config = SoftConfig {
            links: addrs.iter().copied().filter(|(_, link)| *link != 0).collect(),
            addrs: addrs.iter().map(|(addr, _)| *addr).collect(),
            early_sockets: EarlySockets::bound(bound),
            former_connections,
            core,
            impairments: if config.impairments.is_empty() {
                impairments
            } else {
                config.impairments
            },
            ..config
        };
        let rings = Arc::new(Rings::new(part, Arc::clone(&host), bell));
        let others = Among {
            strays: Some(Arc::new(Strays { host: Arc::clone(&host), part })),
            rings: Some(Arc::clone(&rings)),
        };
        let device = Arc::new(SoftDevice::open_among(config, others)?);
        let (sender, answers) = channel();
        let reader = Reader {
            host: Arc::clone(&host),
            device: Arc::downgrade(&device),
            rings,
            answers: sender,
        };
        thread::Builder::new()
            .name("bowline-share".to_owned())
            .spawn(move || reader.run())
            .map_err(|error| Error::System {
                what: "starting a thread".to_owned(),
                errno: Errno::of(&error),
            })?;
        Ok((Guest { host, answers: Mutex::new(answers) }, device))
    }
}

/// Connects to a host of this user, or root's.
fn connected(path: &Path) -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let host = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    connect(&host, &SocketAddrUnix::new(path)?)?;
    // What it gives is believed, and what it names is written to.
    let (who, own) = (socket_peercred(&host)?, rustix::process::geteuid());
    if who.uid != own && !who.uid.is_root() {
        let what = "it belongs to another user".to_owned();
        return Err(Error::System { what, errno: Errno::EACCES }.into());
    }
    Ok(host)
}

impl Seen {
    /// Asks the host behind a socket what it shares. A host that shares nothing yet opens nothing
    /// for this.
    ///
    /// # Errors
    /// Those of [`Joined::at`]; `WouldBlock` when there is no answer for some seconds.
    pub fn at(path: &Path) -> io::Result<Self> {
        let host = connected(path)?;
        set_socket_timeout(&host, Timeout::Recv, Some(PATIENCE))?;
        Message::Look(FORMAT).send(&host, &[])?;
        match Message::receive(&host)? {
            Some((Message::Seen(seen), _)) => Ok(seen),
            Some((Message::Refused(errno, what), _)) => {
                Err(Error::System { what, errno: Errno(errno) }.into())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Takes what the host sends.
struct Reader {
    host: Arc<OwnedFd>,
    device: Weak<SoftDevice>,
    rings: Arc<Rings>,
    answers: Sender<i32>,
}

impl Reader {
    /// Runs until the host ends: with it, the device does.
    fn run(&self) {
        while let Ok(Some((message, fds))) = Message::receive(&*self.host) {
            if self.take(message, fds).is_none() {
                break;
            }
        }
        if let Some(device) = self.device.upgrade() {
            device.fail();
        }
    }

    /// Takes a message; `None`: nothing more is to be taken.
    fn take(&self, message: Message, fds: Vec<OwnedFd>) -> Option<()> {
        let mut fds = fds.into_iter();
        match message {
            Message::Packet(from, to, payload) => {
                self.device.upgrade()?.take_in_one(from, to, &payload);
            }
            Message::Answer(errno) => self.answers.send(errno).ok()?,
            // Where there is no ring, or no room for its descriptors, packets go by sockets.
            Message::RingTo(part) => {
                if let (Some(memory), Some(bell)) = (fds.next(), fds.next()) {
                    let _ = self.rings.add_writer(part, memory, bell);
                }
            }
            Message::RingFrom(part) => {
                if let Some(memory) = fds.next() {
                    let _ = self.rings.add_reader(part, memory);
                }
            }
            Message::Left(part) => {
                let device = self.device.upgrade()?;
                device.catch_up();
                // What it has sent arrives, as from a socket.
                for _ in 0..CATCH_UPS_MAX {
                    if !self.rings.has_some(part) {
                        break;
                    }
                    device.catch_up();
                }
                self.rings.remove(part);
            }
            _ => return None,
        }
        Some(())
    }
}

impl Drop for Guest {
    /// The host takes the part back.
    fn drop(&mut self) {
        // A host that is gone has taken it.
        let _ = shutdown(&self.host, Shutdown::Both);
    }
}

impl Guest {
    /// Has requests for a port come to this process.
    ///
    /// # Errors
    /// [`Error::AddrInUse`]; [`Error::Closed`] when the host is gone.
    pub fn listen(&self, space: PortSpace, at: SocketAddr) -> Result<(), Error> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        Message::Listen(space, at).send(&*self.host, &[]).map_err(|_| Error::Closed)?;
        match answers.recv() {
            Ok(0) => Ok(()),
            Ok(errno) if errno == Errno::EADDRINUSE.0 => {
                Err(Error::AddrInUse(format!("another process listens at RDMA port {at}")))
            }
            Ok(errno) => Err(Error::System { what: "listening".to_owned(), errno: Errno(errno) }),
            Err(_) => Err(Error::Closed),
        }
    }

    /// Lets another process have a port.
    pub fn unlisten(&self, space: PortSpace, at: SocketAddr) {
        // A host that is gone has no ports.
        let _ = Message::Unlisten(space, at).send(&*self.host, &[]);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::net::{accept_with, bind, listen};

    use super::*;
    use crate::Impairments;

    #[test]
    fn a_process_without_room_for_the_sockets_learns_it() {
        let path = std::env::temp_dir().join(format!("bowline-room-{}", std::process::id()));
        let kind = SocketType::SEQPACKET;
        let host = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        bind(&host, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&host, 1).unwrap();
        let host = thread::spawn(move || {
            let guest = accept_with(&host, SocketFlags::CLOEXEC).unwrap();
            assert_eq!(Message::receive(&guest).unwrap().unwrap().0, Message::Join(FORMAT));
            let welcome = Welcome {
                part: 1,
                folder: "".into(),
                addrs: vec![([127, 0, 0, 1].into(), 0), ([127, 0, 0, 2].into(), 0)],
                impairments: Impairments::default(),
            };
            // As if the system had left the other one out.
            Message::Welcome(welcome).send(&guest, &[host.as_fd()]).unwrap();
        });
        let error = Joined::at(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::QuotaExceeded);
        assert!(error.to_string().contains("its 2 addresses, only 1;"), "{error}");
        host.join().unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}
