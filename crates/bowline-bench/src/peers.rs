//! Other message libraries and servers of storage, run at their best; each is optional and found at
//! run time. The servers are run by [`crate::block_cells`].
//!
//! ZeroMQ and nanomsg have plain C interfaces and run inside the bench's own processes. libfabric
//! and UCX live in inline functions of their headers, so a small program is compiled for each when
//! the headers are there.

use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::block_cells;
use crate::cell::{Cell, Kind, Subject};
use crate::payload::{Checker, Loss, Maker};
use crate::role::{Laps, Role, Sides, done, stopping};
use crate::sys::{
    self, NanoKind, NanoSocket, ZmqContext, ZmqKind, ZmqSocket, nanomsg_version, zmq_version,
};

const COMMON_H: &str = include_str!("../peers/common.h");
const OFI_C: &str = include_str!("../peers/ofi.c");
const UCX_C: &str = include_str!("../peers/ucx.c");

/// Where a peer library stands on this machine.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    /// It runs inside the bench's own processes, or is started by them.
    Inside {
        /// What the library says it is.
        version: String,
    },
    /// It runs as a program that was compiled for this run.
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
pub(crate) const PEERS: [Subject; 8] = [
    Subject::Zmq,
    Subject::Nano,
    Subject::OfiNet,
    Subject::OfiRxm,
    Subject::Ucx,
    Subject::Nbdkit,
    Subject::QemuNbd,
    Subject::Tgt,
];

impl Peers {
    /// Looks for every peer that `wanted` accepts, compiling what must be compiled.
    pub(crate) fn find(wanted: impl Fn(Subject) -> bool) -> Self {
        let mut peers = Self::default();
        let mut ofi = None;
        for subject in PEERS.into_iter().filter(|s| wanted(*s)) {
            let found = match subject {
                Subject::Zmq => inside(zmq_version(), "libzmq5"),
                Subject::Nano => inside(nanomsg_version(), "libnanomsg5"),
                subject if subject.is_peer_of_storage() => {
                    let (version, package) = block_cells::peer_version(subject);
                    inside(version, package)
                }
                Subject::Ucx => peers.program("ucx", UCX_C, &["-lucp", "-lucs"], "libucx-dev"),
                _ => ofi
                    .get_or_insert_with(|| {
                        peers.program("ofi", OFI_C, &["-lfabric"], "libfabric-dev")
                    })
                    .clone(),
            };
            peers.list.push((subject, found));
        }
        peers
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

    fn program(&mut self, name: &str, source: &str, libs: &[&str], package: &str) -> Found {
        match self.compile(name, source, libs) {
            Ok((path, version)) => Found::Program { version, path },
            Err(why) => Found::Missing { why: format!("{why}; apt-get install gcc {package}") },
        }
    }

    fn compile(
        &mut self,
        name: &str,
        src: &str,
        libs: &[&str],
    ) -> Result<(PathBuf, String), String> {
        let dir = match &self.dir {
            Some(dir) => dir.clone(),
            None => self.dir.insert(private_dir()?).clone(),
        };
        let write = |file: &str, text: &str| {
            std::fs::write(dir.join(file), text).map_err(|e| format!("writing {file}: {e}"))
        };
        write("common.h", COMMON_H)?;
        write(&format!("{name}.c"), src)?;
        let program = dir.join(name);
        let compiler = std::env::var_os("CC").unwrap_or_else(|| OsString::from("cc"));
        let out = Command::new(&compiler)
            .args(["-O2", "-std=gnu11", "-o"])
            .arg(&program)
            .arg(dir.join(format!("{name}.c")))
            .args(libs)
            .output()
            .map_err(|e| format!("no C compiler ({}: {e})", compiler.display()))?;
        if !out.status.success() {
            let text = String::from_utf8_lossy(&out.stderr);
            let line = text.lines().find(|l| l.contains("error")).unwrap_or("it says nothing");
            return Err(format!("{name}.c does not compile: {line}"));
        }
        let out = Command::new(&program).arg("version").output();
        let out = out.map_err(|e| format!("{name} does not run: {e}"))?;
        let version = String::from_utf8_lossy(&out.stdout).trim().to_owned();
        if version.is_empty() {
            return Err(format!("{name} does not tell its version"));
        }
        Ok((program, version))
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

const DIR_PREFIX: &str = "bowline-bench-";

/// Removes the directories of runs that were interrupted.
fn remove_left_behind(temp: &Path) {
    for entry in std::fs::read_dir(temp).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(DIR_PREFIX)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Somebody else's cannot be removed, and need not be.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Makes a directory for this process, which later runs remove if it does not do so itself.
pub(crate) fn private_dir() -> Result<PathBuf, String> {
    use std::os::unix::fs::DirBuilderExt;
    let temp = std::env::temp_dir();
    remove_left_behind(&temp);
    let dir = temp.join(format!("{DIR_PREFIX}{}", std::process::id()));
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&dir)
        .map_err(|e| format!("creating {}: {e}", dir.display()))?;
    Ok(dir)
}

/// The sides of a peer that runs inside the bench's processes.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match (cell.subject, cell.kind) {
        (Subject::Zmq, Kind::Stream) => Sides(zmq_rx, zmq_tx),
        (Subject::Zmq, Kind::Rtt) => Sides(zmq_answer, zmq_ask),
        (Subject::Nano, Kind::Stream) => Sides(nano_rx, nano_tx),
        (Subject::Nano, Kind::Rtt) => Sides(nano_answer, nano_ask),
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

/// nanomsg cannot bind to a port of the system's choice, so one is taken and given back.
fn free_port() -> Result<u16, String> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|l| l.local_addr())
        .map(|a| a.port())
        .map_err(|e| format!("finding a free port: {e}"))
}

fn nano_bind(role: &mut Role, kind: NanoKind) -> Result<NanoSocket, String> {
    let socket = NanoSocket::new(kind, role.cell.buffer)?;
    let endpoint = format!("tcp://127.0.0.1:{}", free_port()?);
    socket.bind(&endpoint)?;
    settle(role);
    role.ready(&format!("endpoint={endpoint}"))?;
    Ok(socket)
}

fn nano_connect(role: &mut Role, kind: NanoKind) -> Result<NanoSocket, String> {
    role.ready("")?;
    let socket = NanoSocket::new(kind, role.cell.buffer)?;
    socket.connect(role.peer("endpoint"))?;
    settle(role);
    Ok(socket)
}

fn nano_rx(mut role: Role) -> Result<(), String> {
    let socket = nano_bind(&mut role, NanoKind::Pull)?;
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut meter = role.meter();
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = socket.recv(&mut buf)?;
        checker.check(&buf[..n])?;
        meter.add(1);
    }
}

fn nano_tx(mut role: Role) -> Result<(), String> {
    let socket = nano_connect(&mut role, NanoKind::Push)?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut sent = 0;
    while !stopping() {
        socket.send(maker.next())?;
        sent += 1;
    }
    done(sent, 0);
    Ok(())
}

fn nano_answer(mut role: Role) -> Result<(), String> {
    let socket = nano_bind(&mut role, NanoKind::Pair)?;
    let mut buf = vec![0; role.cell.size + 1];
    loop {
        let n = socket.recv(&mut buf)?;
        socket.send(&buf[..n])?;
    }
}

fn nano_ask(mut role: Role) -> Result<(), String> {
    let socket = nano_connect(&mut role, NanoKind::Pair)?;
    let mut maker = Maker::new(0, role.cell.size);
    let mut checker = Checker::new(1, role.cell.size, Loss::Forbidden);
    let mut buf = vec![0; role.cell.size + 1];
    let mut laps = Laps::new(&role);
    while !stopping() {
        socket.send(maker.next())?;
        let n = socket.recv(&mut buf)?;
        checker.check(&buf[..n])?;
        if laps.lap() {
            break;
        }
    }
    Ok(())
}
