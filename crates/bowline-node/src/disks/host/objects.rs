//! The disks of a node in its control tree. The objects are those of its server and its client,
//! which may not have been started: then there are none, and the first command starts them.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Errno, Node, Refused, Sys, Tree};
use bowline_rnbd_driver::tree::{
    DiskInfo, Disks, ExportCommands, ExportInfo, Exports, MapSpec, disks_node, exports_node,
};
use bowline_rtrs_driver::{
    PathId,
    tree::{Files, ServerSession, ServerSessions, Stats},
};

use super::{ClientSession, HostDisks};
use crate::{
    Failure,
    disks::{
        client::{ClientObjects, client_classes},
        served::{server_classes, server_modules},
    },
    namespaces,
};

/// Block devices of two kinds: what is mapped, and what is exported.
struct Blocks([Arc<dyn Node>; 2]);

impl Node for Blocks {
    fn attrs(&self) -> &'static [AttrDef] {
        &[]
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        self.0.iter().flat_map(|node| node.dirs()).collect()
    }
}

impl HostDisks {
    /// Adds the disks to a tree.
    pub(crate) fn objects(self: &Arc<Self>, sys: Sys) -> Sys {
        let shared = &self.settings.shared;
        let sys = client_classes(sys, self, Files::All);
        let sys = server_classes(sys, self, Files::All);
        let blocks = [disks_node(Arc::<Self>::clone(self)), exports_node(Arc::<Self>::clone(self))];
        let sys = sys.blocks(Arc::new(Blocks(blocks)));
        let config = self.settings.config.rtrs.clone();
        let invalidates = config.always_invalidate;
        let dir = self.settings.exports.iter().find_map(|export| export.dir.as_deref());
        server_modules(sys, config, invalidates, dir, shared.device.port)
    }

    /// Returns a tree of the disks alone.
    pub(crate) fn tree(self: &Arc<Self>) -> Tree {
        self.objects(Sys::new().proc(namespaces::proc())).tree()
    }
}

/// Tells the node's log why a command could not start what it needs.
fn unstarted(failure: &Failure) -> Errno {
    note!("bowline node: {failure}");
    match failure {
        Failure::Errno(errno, _) => *errno,
        _ => Errno::ENODEV,
    }
}

impl Exports for HostDisks {
    fn exports(&self) -> Vec<ExportInfo> {
        self.served().map_or_else(Vec::new, |served| Exports::exports(&*served))
    }

    fn force_close(&self, export: &str, session: &str) -> Result<(), Errno> {
        self.served().ok_or(Errno::ENOENT)?.force_close(export, session)
    }
}

impl ExportCommands for HostDisks {
    fn export(&self, text: &str) -> Result<(), Errno> {
        self.server().map_err(|failure| unstarted(&failure))?.export(text)
    }

    fn unexport(&self, export: &str, force: bool) -> Result<(), Errno> {
        self.served().ok_or(Errno::ENOENT)?.unexport(export, force)
    }
}

impl ServerSessions for HostDisks {
    fn sessions(&self) -> Vec<ServerSession> {
        self.served().map_or_else(Vec::new, |served| ServerSessions::sessions(&*served))
    }

    fn disconnect(&self, path: PathId) -> Result<(), Errno> {
        self.served().ok_or(Errno::ENODEV)?.disconnect(path)
    }

    fn reset(&self, path: PathId, what: Stats) {
        if let Some(served) = self.served() {
            served.reset(path, what);
        }
    }
}

impl ClientObjects for HostDisks {
    fn sessions(&self) -> Vec<Arc<dyn ClientSession>> {
        self.disks().map_or_else(Vec::new, |disks| ClientObjects::sessions(&*disks))
    }
}

impl Disks for HostDisks {
    fn map(&self, spec: &MapSpec) -> Result<(), Errno> {
        self.client().map_err(|failure| unstarted(&failure))?.map(spec)
    }

    fn disks(&self) -> Vec<DiskInfo> {
        Self::disks(self).map_or_else(Vec::new, |disks| Disks::disks(&*disks))
    }

    fn unmap(&self, disk: &str, force: bool) -> Result<(), Errno> {
        Self::disks(self).ok_or(Errno::ENODEV)?.unmap(disk, force)
    }

    fn resize(&self, disk: &str, sectors: u64, force: bool) -> Result<(), Refused> {
        Self::disks(self).ok_or(Errno::ENODEV)?.resize(disk, sectors, force)
    }

    fn remap(&self, disk: &str) -> Result<(), Errno> {
        Self::disks(self).ok_or(Errno::ENODEV)?.remap(disk)
    }
}
