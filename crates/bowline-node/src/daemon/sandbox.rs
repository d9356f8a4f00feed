//! What a node gives up before it serves anybody, and what it makes before, since it cannot later.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
};

use bowline_ctl::Place;
use bowline_wire::rds::TCP_PORT;
use rustix::{
    net::{AddressFamily, SocketType, socket, sockopt::set_tcp_congestion},
    thread::CapabilitySet,
};

use super::{hand_over::InheritedState, settings::Settings};
use crate::{
    Failure, Outcome,
    confine::{Confinement, Needs, confine},
    control,
    leases::Leases,
    programs,
    verbs::{self, VerbsPlace},
};

/// Files that a node reads: its own memory and descriptors, addresses and interfaces of its network
/// namespace, and how many processors there are. Beside them, how large buffers may be.
const READ: [&str; 2] = ["/proc/self", "/sys/devices/system/cpu"];
/// Those that the soft RDMA device reads: by what a machine is known, and what holds its port.
const READ_FOR_RDMA: [&str; 3] = ["/etc/machine-id", "/proc/sys/kernel/hostname", "/proc/modules"];
/// First TCP port that everybody may listen at.
const UNPRIVILEGED: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
const UNPRIVILEGED_DEFAULT: u16 = 1024;
/// Congestion controls that everybody may choose; it exists in each network namespace.
const CONGESTION_CONTROLS: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";

/// Sockets that a node serves. They listen before it is confined, after which it makes no unix
/// sockets, so that it connects to none of others, and removes and renames no files, since in the
/// same folders are those of others. So its own stay when it ends, and whoever listens there next
/// replaces them.
#[derive(Default)]
pub(super) struct Places {
    pub(super) control: Option<Place>,
    /// Disk commands look for a socket in this folder; a node without disks answers there with the
    /// reason.
    pub(super) disks: Option<Place>,
    pub(super) programs: Option<programs::Place>,
    /// Where programs ask for RDMA.
    pub(super) verbs: Option<VerbsPlace>,
    /// Where programs ask the node to stay.
    pub(super) leases: Option<Leases>,
}

impl Places {
    /// Listens where the settings say, but where the former node has: there this one goes on. It
    /// may have been passed a socket for programs.
    pub(super) fn listen(
        settings: &Settings,
        is_passed: bool,
        mut inherited: Option<&mut InheritedState>,
    ) -> Outcome<Self> {
        let mut places = Self::default();
        let is_inherited = inherited.is_some();
        if let Some(given) = &settings.control {
            let paths = given.as_ref().map_or_else(
                || control::default_paths(&settings.addresses),
                |path| vec![path.clone()],
            );
            let former = inherited.as_mut().and_then(|inherited| {
                let place = |path: &PathBuf| {
                    let listener = inherited.host.take_other(&full(path))?;
                    Some(Place::resume(path, listener))
                };
                paths.iter().find_map(place)
            });
            places.control = Some(former.map_or_else(|| control::listen(&paths), Ok)?);
            places.disks = settings.disks.listen(&settings.addresses);
        }
        if let (Some(path), false) = (&settings.programs, is_passed || inherited.is_some()) {
            places.programs = programs::Place::listen(path.as_deref(), &settings.policy)?;
            let of = places.programs.as_ref().filter(|_| settings.until_unused);
            places.leases = of.map(leases_at).transpose()?;
        }
        if let Some(path) = &settings.programs {
            // Where another node has the place for programs, its programs have its RDMA.
            let is_ours = places.programs.is_some() || is_passed || is_inherited;
            let place = path.clone().unwrap_or_else(programs::default_path);
            places.verbs = is_ours.then(|| verbs_at(&place, settings)).flatten();
        }
        Ok(places)
    }

    /// Returns the control socket for the next process, by the name of its path.
    pub(super) fn for_successor(&self) -> io::Result<Vec<(PathBuf, UnixListener)>> {
        let named = |place: &Place| {
            let listener = place.listener().transpose()?;
            Some(listener.map(|listener| (full(place.path()), listener)))
        };
        self.control.iter().filter_map(named).collect()
    }

    /// The next process has the control socket.
    pub(super) fn leave(&mut self) {
        self.control.take().into_iter().for_each(Place::leave);
    }
}

/// A node without RDMA for programs serves all else.
fn verbs_at(place: &Path, settings: &Settings) -> Option<VerbsPlace> {
    let listening = VerbsPlace::listen(place, settings.impairments.clone());
    let report = |error: &io::Error| {
        note!("programs get no RDMA: {}: {error}", verbs::beside(place).display());
    };
    listening.inspect_err(report).ok()
}

fn leases_at(place: &programs::Place) -> Outcome<Leases> {
    Leases::listen(place.path()).map_err(|error| {
        let place = place.path().display();
        Failure::failed(format!("cannot listen for leases beside {place}: {error}"))
    })
}

/// A path by which all processes know a file.
fn full(path: &Path) -> PathBuf {
    let folder = fs::canonicalize(bowline_ctl::folder_of(path));
    match (folder, path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// Confines the process to what the settings need; to be called before other threads start.
///
/// A node may bind any TCP port, since the port that it dials from tells the path.
pub(super) fn enter(settings: &Settings) -> Confinement {
    if !settings.sandbox {
        return Confinement::none("disabled by --no-sandbox or by sandbox = false");
    }
    if settings.disks.are_named {
        return Confinement::none("the configuration has disks, whose files may be anywhere");
    }
    if settings.rdma.are_of_system() {
        return Confinement::none("devices of rdma-core need files of the system");
    }
    confine(&needs(settings))
}

/// What a node with these settings does after it is confined.
fn needs(settings: &Settings) -> Needs {
    let mut read =
        READ.iter().chain(&bowline_host::BUFFERS_MAX).map(PathBuf::from).collect::<Vec<_>>();
    let has_verbs = settings.programs.is_some();
    if has_verbs || !settings.rdma.soft().is_empty() {
        read.extend(READ_FOR_RDMA.map(PathBuf::from));
    }
    let verbs = has_verbs.then(verbs::folder).flatten();
    let files: BTreeSet<_> = settings.rdma.folder().into_iter().chain(verbs).collect();
    Needs {
        read,
        files: files.into_iter().collect(),
        connect: vec![TCP_PORT],
        mounts: settings.tree.is_some(),
        capabilities: capabilities(settings),
    }
}

/// Capabilities that the settings need, each with the reason.
fn capabilities(settings: &Settings) -> Vec<(CapabilitySet, String)> {
    let mut all = Vec::new();
    if settings.tree.is_some() {
        all.push((CapabilitySet::SYS_ADMIN, "to mount".to_owned()));
    }
    let start = fs::read_to_string(UNPRIVILEGED).ok();
    let start = start.and_then(|text| text.trim().parse().ok()).unwrap_or(UNPRIVILEGED_DEFAULT);
    if let Some(port) = settings.metrics.port().filter(|port| (1..start).contains(port)) {
        all.push((CapabilitySet::NET_BIND_SERVICE, format!("for metrics at port {port}")));
    }
    if let Some(name) = &settings.congestion_control
        && needs_privilege(name)
    {
        let why = format!("for {name}, not in net.ipv4.tcp_allowed_congestion_control");
        all.push((CapabilitySet::NET_ADMIN, why));
    }
    all
}

/// Tells whether this process may choose a congestion control that not everybody may.
fn needs_privilege(name: &str) -> bool {
    let allowed = fs::read_to_string(CONGESTION_CONTROLS).unwrap_or_default();
    let works = || {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None);
        socket.is_ok_and(|socket| set_tcp_congestion(&socket, name).is_ok())
    };
    !allowed.split_whitespace().any(|known| known == name) && works()
}

/// Tells whether a node with these settings is to be confined.
pub(super) fn is_wanted(settings: &Settings) -> bool {
    settings.sandbox && !settings.disks.are_named && !settings.rdma.are_of_system()
}

/// Tells what holds and what does not.
pub(super) fn announce(confinement: &Confinement) {
    if let Some(on) = confinement.on() {
        say!("confined: {on}");
    }
    if let Some(off) = confinement.off() {
        say!("not confined: {off}");
    }
}

#[cfg(test)]
mod tests;
