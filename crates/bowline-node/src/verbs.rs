//! RDMA for programs that speak verbs: the node owns UDP port 4791 of the machine's addresses, and
//! each program has a part of the numbers of queue pairs, in its own process.
//!
//! Nothing is opened before the first program asks for a part (`bowline devices` and `bowline run`
//! only look). Addresses at which somebody else has the port are left out, among them those at
//! which this node speaks RDS over RDMA.

use std::{
    fs, io,
    net::IpAddr,
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use bowline_ctl::OwnedFile;
use bowline_roce_driver::{
    FormerConnections, Host, Impairments, SoftConfig, SoftDevice, machine_addrs,
};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

/// Most programs at a time: there are no more parts, and some end while others begin.
const PROGRAMS_MAX: usize = 300;
/// How long nobody is accepted where that has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// Programs that may wait to be welcomed.
const BACKLOG: i32 = 64;

/// Where programs of the node that serves at a place ask for RDMA.
pub fn beside(place: &Path) -> PathBuf {
    place.with_extension("verbs")
}

/// The folder in which programs list their connections, which the node ends when they are killed;
/// made if necessary. `None` where other users could change it.
pub(crate) fn folder() -> Option<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let folder = bowline_ctl::run_folder(&format!("roce-{user}"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    bowline_ctl::refuse_unsafe_folder(&folder).ok()?;
    Some(folder)
}

/// Where programs ask, before the node is confined.
#[derive(Debug)]
pub(crate) struct VerbsPlace {
    listener: OwnedFd,
    file: OwnedFile,
    /// A confined node cannot look for it.
    folder: Option<PathBuf>,
    impairments: Impairments,
}

impl VerbsPlace {
    /// Listens beside a place that is this node's, so that what is there is of a former one.
    pub(crate) fn listen(place: &Path, impairments: Impairments) -> io::Result<Self> {
        let path = beside(place);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        bind(&listener, &SocketAddrUnix::new(&path)?)?;
        // Users who may not have RDMA get the reason as an answer.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        listen(&listener, BACKLOG)?;
        Ok(Self { listener, file: OwnedFile::new(&path)?, folder: folder(), impairments })
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Serves programs as long as the process lives.
    pub(crate) fn serve(self) -> io::Result<()> {
        let body = move || serve(&self.listener, self.folder.as_deref(), &self.impairments);
        thread::Builder::new().name("verbs".to_owned()).spawn(body)?;
        Ok(())
    }
}

/// The addresses, which are opened for the first program.
type Opened = Mutex<Option<(Host, Arc<SoftDevice>)>>;

fn serve(listener: &OwnedFd, folder: Option<&Path>, impairments: &Impairments) {
    let opened: Arc<Opened> = Arc::default();
    let served = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok(program) = accept_with(listener, SocketFlags::CLOEXEC) else {
            // No descriptors, or no memory: until some are free again.
            thread::sleep(PAUSE);
            continue;
        };
        // Nothing is opened, and no thread started, for who may not have it: the answer tells why.
        if !is_admitted(&program) || served.load(Relaxed) >= PROGRAMS_MAX {
            Host::refuse(&program);
            continue;
        }
        served.fetch_add(1, Relaxed);
        let (opened, count) = (Arc::clone(&opened), Arc::clone(&served));
        let (folder, impairments) = (folder.map(Path::to_owned), impairments.clone());
        let started = thread::Builder::new().name("verbs-program".to_owned()).spawn(move || {
            let known = || lock(&opened).as_ref().map(|(host, _)| host.clone());
            let served = Host::answer_look(&program, known).and_then(|is_answered| {
                if is_answered {
                    Ok(())
                } else {
                    host(&opened, folder, impairments)?.serve(program)
                }
            });
            if let Err(error) = served {
                note!("a program gets no RDMA: {error}");
            }
            count.fetch_sub(1, Relaxed);
        });
        if started.is_err() {
            served.fetch_sub(1, Relaxed);
        }
    }
}

fn lock(opened: &Opened) -> MutexGuard<'_, Option<(Host, Arc<SoftDevice>)>> {
    opened.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_admitted(program: &OwnedFd) -> bool {
    let own = rustix::process::geteuid();
    socket_peercred(program).is_ok_and(|who| who.uid == own || who.uid.is_root())
}

fn host(opened: &Opened, folder: Option<PathBuf>, impairments: Impairments) -> io::Result<Host> {
    let mut opened = lock(opened);
    if let Some((host, _)) = &*opened {
        return Ok(host.clone());
    }
    let addrs: Vec<(IpAddr, u32)> = machine_addrs();
    let count = addrs.len();
    let is_link_local =
        |addr: &IpAddr| matches!(addr, IpAddr::V6(addr) if addr.is_unicast_link_local());
    let config = SoftConfig {
        addrs: addrs.iter().map(|(addr, _)| *addr).collect(),
        links: addrs.into_iter().filter(|(addr, _)| is_link_local(addr)).collect(),
        former_connections: folder.map_or(FormerConnections::Nowhere, FormerConnections::In),
        impairments,
        ..SoftConfig::default()
    };
    let (host, device) = Host::open(config)?;
    let shared = host.addrs();
    say!("RDMA for programs on {}", listed(&shared));
    if shared.len() == Host::ADDRS_MAX && count > shared.len() {
        note!(
            "programs have no RDMA on the other addresses of this machine: {} is the most",
            shared.len()
        );
    }
    *opened = Some((host.clone(), device));
    Ok(host)
}

fn listed(addrs: &[IpAddr]) -> String {
    addrs.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ")
}
