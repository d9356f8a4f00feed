//! Other message libraries and servers of storage, run at their best; each is optional and found at
//! run time. The servers are run by [`crate::block_cells`].
//!
//! ZeroMQ has a plain C interface and runs inside the bench's own processes. The rivals, whose
//! comparison is on record, are part of builds with the feature `rivals` only.

#[cfg(feature = "rivals")]
mod nanomsg;
#[cfg(feature = "rivals")]
mod rivals;

use std::path::{Path, PathBuf};
use std::time::Duration;

#[cfg(feature = "rivals")]
pub(crate) use rivals::private_dir;

use crate::block_cells;
use crate::cell::{Cell, Kind, Subject};
use crate::doors;
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, Sides, done, stopping};
use crate::sys::{self, ZmqContext, ZmqKind, ZmqSocket, zmq_version};

/// Where a peer library stands on this machine.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// It runs inside the bench's own processes, or is started by them.
    Inside {
        /// What the library says it is.
        version: String,
    },
    /// It runs as a program that was compiled for this run.
    #[cfg_attr(not(feature = "rivals"), expect(dead_code, reason = "only rivals are programs"))]
    Program {
        /// What the library says it is.
        version: String,
        /// The program.
        path: PathBuf,
    },
    /// It is not there.
    Missing {
        /// What is missing, and how to get it.
        why: String,
    },
}

/// The peers of one run.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    list: Vec<(Subject, Found)>,
    dir: Option<PathBuf>,
}

/// All libraries and servers that are looked for.
pub(crate) const PEERS: [Subject; 9] = [
    Subject::Zmq,
    Subject::Nano,
    Subject::OfiNet,
    Subject::OfiRxm,
    Subject::Ucx,
    Subject::Nbdkit,
    Subject::QemuNbd,
    Subject::Nbdfuse,
    Subject::Tgt,
];

impl Peers {
    /// Looks for every peer that `wanted` accepts, compiling what must be compiled.
    pub(crate) fn find(wanted: impl Fn(Subject) -> bool) -> Self {
        let mut peers = Self::default();
        for subject in PEERS.into_iter().filter(|s| wanted(*s)) {
            let found = match subject {
                Subject::Zmq => inside(zmq_version(), "libzmq5"),
                subject if subject.is_rival() => peers.rival(subject),
                _ => {
                    let (version, package) = block_cells::peer_version(subject);
                    inside(version, package)
                }
            };
            peers.list.push((subject, found));
        }
        peers
    }

    /// Adds the doors of a disk, which fio uses, and takes away peers that fio does not reach.
    pub(crate) fn add_doors(&mut self) {
        for (subject, found) in &mut self.list {
            if let Err(why) = doors::look(*subject) {
                *found = Found::Missing { why };
            }
        }
        for subject in doors::SUBJECTS.into_iter().filter(|subject| subject.is_door()) {
            let found = match doors::look(subject) {
                Ok(version) => Found::Inside { version },
                Err(why) => Found::Missing { why },
            };
            self.list.push((subject, found));
        }
    }

    /// This build leaves them out: each was compared and is on record.
    #[cfg(not(feature = "rivals"))]
    fn rival(&self, _: Subject) -> Found {
        let why = "this build leaves it out; cargo run -p bowline-bench --features rivals";
        Found::Missing { why: why.into() }
    }

    /// The peers that were looked for.
    pub(crate) fn list(&self) -> &[(Subject, Found)] {
        &self.list
    }

    /// Says whether a peer can be run.
    pub(crate) fn has(&self, subject: Subject) -> bool {
        self.list.iter().any(|(s, f)| *s == subject && !matches!(f, Found::Missing { .. }))
    }

    /// Why a peer cannot be run.
    pub(crate) fn missing(&self, subject: Subject) -> Option<&str> {
        self.list.iter().find_map(|(s, f)| match f {
            Found::Missing { why } if *s == subject => Some(why.as_str()),
            _ => None,
        })
    }

    /// The program of a peer that is one.
    pub(crate) fn path(&self, subject: Subject) -> Option<&Path> {
        self.list.iter().find_map(|(s, f)| match f {
            Found::Program { path, .. } if *s == subject => Some(path.as_path()),
            _ => None,
        })
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if let Some(dir) = &self.dir {
            // What cannot be removed is a few files in the directory for temporary ones.
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}

fn inside(version: Result<String, String>, package: &str) -> Found {
    match version {
        Ok(version) => Found::Inside { version },
        Err(why) => Found::Missing { why: format!("{why}; apt-get install {package}") },
    }
}

/// The sides of a peer that runs inside the bench's processes.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match (cell.subject, cell.kind) {
        (Subject::Zmq, Kind::Stream) => Sides(zmq_rx, zmq_tx),
        (Subject::Zmq, Kind::Rtt) => Sides(zmq_answer, zmq_ask),
        #[cfg(feature = "rivals")]
        (Subject::Nano, Kind::Stream) => Sides(nanomsg::rx, nanomsg::tx),
        #[cfg(feature = "rivals")]
        (Subject::Nano, Kind::Rtt) => Sides(nanomsg::answer, nanomsg::ask),
        _ => return None,
    })
}

/// Gives the library's I/O threads time to connect, then sets what they opened.
fn settle(role: &Role) {
    std::thread::sleep(Duration::from_millis(30));
    if !role.cell.cc.is_empty() {
        sys::set_all_congestion_control(&role.cell.cc);
    }
}

fn zmq_bind(role: &mut Role) -> Result<ZmqSocket, String> {
    let mut socket = ZmqContext::new()?.socket(ZmqKind::Router)?;
    let endpoint = socket.bind("tcp://127.0.0.1:*")?;
    settle(role); // accepted sockets take the listener's setting over
    role.ready(&format!("endpoint={endpoint}"))?;
    Ok(socket)
}

fn zmq_rx(mut role: Role) -> Result<(), String> {
    let mut socket = zmq_bind(&mut role)?;
    let mut checker = Checker::new(role.cell.flows, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    loop {
        socket.recv()?; // the sender's name
        checker.check(socket.recv()?)?;
        meter.add(1);
    }
}

fn zmq_tx(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let ctx = ZmqContext::new()?;
    let mut sockets = Vec::new();
    for _ in 0..role.cell.flows {
        let mut socket = ctx.socket(ZmqKind::Dealer)?;
        socket.connect(role.peer("endpoint"))?;
        sockets.push(socket);
    }
    settle(&role);
    let mut makers: Vec<Maker> =
        (0..role.cell.flows).map(|flow| Maker::new(flow, role.cell.size)).collect();
    let mut sent = 0;
    while !stopping() {
        for (socket, maker) in sockets.iter_mut().zip(&mut makers) {
            socket.send(maker.next(), false)?;
            sent += 1;
        }
    }
    done(sent, 0);
    Ok(())
}

fn zmq_answer(mut role: Role) -> Result<(), String> {
    let mut socket = zmq_bind(&mut role)?;
    let mut buf = Vec::new();
    loop {
        let name = socket.recv()?.to_vec();
        buf.clear();
        buf.extend_from_slice(socket.recv()?);
        socket.send(&name, true)?;
        socket.send(&buf, false)?;
    }
}

fn zmq_ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let mut socket = ZmqContext::new()?.socket(ZmqKind::Dealer)?;
    socket.connect(role.peer("endpoint"))?;
    settle(&role);
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send(maker.next(), false)?;
        checker.check(socket.recv()?)?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
