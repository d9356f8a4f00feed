//! What a node gives up before it serves anybody.

use bowline_wire::rds::TCP_PORT;

use super::{
    super::{control, programs},
    Settings,
};
use crate::cli::{
    Outcome,
    confine::{Confinement, Needs, confine},
};

/// Files that a node reads: its own memory and descriptors, the interfaces of scopes, and how many
/// processors there are.
const READ: [&str; 2] = ["/proc", "/sys/devices/system/cpu"];

/// Confines the process to what the settings need; to be called before other threads start. The
/// folders of its sockets are created before, since a rule is for a folder that exists.
///
/// A node may bind any TCP port, since the port that it dials from tells the path.
pub(super) fn enter(settings: &Settings, has_passed_socket: bool) -> Outcome<Confinement> {
    let mut sockets = Vec::new();
    if let Some(path) = &settings.control {
        sockets.push(control::create_folder(path)?);
        // That of commands for disks, which hear there why the node has none; without it they hear
        // of no node.
        let of_disks = bowline_ctl::folder();
        if bowline_ctl::create_folder_of(&of_disks.join("any")).is_ok() {
            sockets.push(of_disks);
        }
    }
    if let (Some(place), false) = (&settings.programs, has_passed_socket) {
        sockets.push(programs::create_folder(place.as_deref(), &settings.policy)?);
    }
    if !settings.sandbox {
        return Ok(Confinement::none("the settings say so"));
    }
    if settings.disks.are_named {
        return Ok(Confinement::none("files and devices of disks may be anywhere"));
    }
    if settings.rdma.are_of_system() {
        return Ok(Confinement::none("devices of rdma-core need files of the system"));
    }
    let read = READ.map(Into::into).to_vec();
    let files = settings.rdma.folder().into_iter().collect();
    let mounts = settings.tree.is_some();
    Ok(confine(&Needs { read, sockets, files, connect: vec![TCP_PORT], mounts }))
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
