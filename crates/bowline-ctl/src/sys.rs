//! The shape of /sys around the trees of drivers.
//!
//! ```text
//! class/rtrs-client/s1   -> ../../devices/virtual/rtrs-client/s1
//! block/rnbd0            -> ../devices/virtual/block/rnbd0
//! devices/virtual/rtrs-client/s1/..     the objects themselves
//! devices/virtual/block/rnbd0/..
//! module/rtrs_server/parameters/..
//! proc/..                               what the kernel has in /proc
//! ```
//!
//! Links between objects have the same targets as in the kernel's tree, so they resolve when
//! `class`, `block` and `devices/virtual` are bind-mounted over those of /sys.

use std::{fmt, sync::Arc};

use crate::{AttrDef, Caller, Dir, Errno, Node, Tree, Value};

/// Builds a [`Tree`] in the shape of /sys.
#[derive(Default)]
pub struct Sys {
    classes: Vec<(&'static str, Arc<dyn Node>)>,
    blocks: Option<Arc<dyn Node>>,
    modules: Vec<(&'static str, Arc<dyn Node>)>,
    proc: Option<Arc<dyn Node>>,
}

impl fmt::Debug for Sys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let classes: Vec<_> = self.classes.iter().map(|(name, _)| name).collect();
        f.debug_struct("Sys").field("classes", &classes).finish_non_exhaustive()
    }
}

impl Sys {
    /// Returns an empty tree of that shape.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a class; the directories of the node are its devices.
    #[must_use]
    pub fn class(mut self, name: &'static str, devices: Arc<dyn Node>) -> Self {
        self.classes.push((name, devices));
        self
    }

    /// Adds block devices, the directories of the node. A later call replaces an earlier one.
    #[must_use]
    pub fn blocks(mut self, devices: Arc<dyn Node>) -> Self {
        self.blocks = Some(devices);
        self
    }

    /// Adds a module with the parameters that are the attributes of the node.
    #[must_use]
    pub fn module(mut self, name: &'static str, parameters: Arc<dyn Node>) -> Self {
        self.modules.push((name, parameters));
        self
    }

    /// Adds `proc`, whose directories have the names of those below /proc.
    #[must_use]
    pub fn proc(mut self, node: Arc<dyn Node>) -> Self {
        self.proc = Some(node);
        self
    }

    /// Returns the tree.
    pub fn tree(self) -> Tree {
        let (mut class, mut virt, mut module) = (Dir::new(), Dir::new(), Dir::new());
        for (name, devices) in self.classes {
            let prefix = format!("../../devices/virtual/{name}");
            class = class.with(name, Arc::new(LinksTo { prefix, devices: Arc::clone(&devices) }));
            let subsystem = format!("../../../../class/{name}");
            virt = virt.with(name, Arc::new(Devices { subsystem, devices }));
        }
        let mut root = Dir::new();
        if let Some(devices) = self.blocks {
            let prefix = "../devices/virtual/block".to_owned();
            let links = LinksTo { prefix, devices: Arc::clone(&devices) };
            root = root.with("block", Arc::new(links));
            virt = virt.with("block", devices);
        }
        for (name, parameters) in self.modules {
            module = module.with(name, Arc::new(Dir::new().with("parameters", parameters)));
        }
        root = root.with("class", Arc::new(class));
        root = root.with("devices", Arc::new(Dir::new().with("virtual", Arc::new(virt))));
        if !module.is_empty() {
            root = root.with("module", Arc::new(module));
        }
        if let Some(proc) = self.proc {
            root = root.with("proc", proc);
        }
        Tree::new(Arc::new(root))
    }
}

/// A directory of links to the devices of another.
struct LinksTo {
    prefix: String,
    devices: Arc<dyn Node>,
}

impl Node for LinksTo {
    fn links(&self) -> Vec<(String, String)> {
        let devices = self.devices.dirs().into_iter();
        devices.map(|(name, _)| (name.clone(), format!("{}/{name}", self.prefix))).collect()
    }
}

/// The devices of a class.
struct Devices {
    subsystem: String,
    devices: Arc<dyn Node>,
}

impl Devices {
    fn device(&self, inner: Arc<dyn Node>) -> Arc<dyn Node> {
        Arc::new(Device { subsystem: self.subsystem.clone(), inner })
    }
}

impl Node for Devices {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let devices = self.devices.dirs().into_iter();
        devices.map(|(name, inner)| (name, self.device(inner))).collect()
    }

    fn dir(&self, name: &str) -> Option<Arc<dyn Node>> {
        Some(self.device(self.devices.dir(name)?))
    }
}

/// A device with the link to its class.
struct Device {
    subsystem: String,
    inner: Arc<dyn Node>,
}

impl Node for Device {
    fn attrs(&self) -> &'static [AttrDef] {
        self.inner.attrs()
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        self.inner.read(name)
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        self.inner.write(name, value)
    }

    fn call(&self, name: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
        self.inner.call(name, value, caller)
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        self.inner.dirs()
    }

    fn dir(&self, name: &str) -> Option<Arc<dyn Node>> {
        self.inner.dir(name)
    }

    fn links(&self) -> Vec<(String, String)> {
        let mut links = self.inner.links();
        links.push(("subsystem".to_owned(), self.subsystem.clone()));
        links
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Found, tree::tests::Toy};

    fn tree() -> Tree {
        let devices = || Arc::new(Dir::new().with("toy0", Arc::new(Toy::default())));
        Sys::new()
            .class("toys", devices())
            .blocks(devices())
            .module("toy", Arc::new(Toy::default()))
            .tree()
    }

    #[test]
    fn objects_are_reached_by_class_and_by_block() {
        let tree = tree();
        assert!(tree.write("/class/toys/toy0/level", "3").is_ok());
        assert_eq!(tree.read("/devices/virtual/toys/toy0/level"), Ok(Value::Int(3)));
        assert_eq!(tree.read("/class/toys/toy0/subsystem/toy0/level"), Ok(Value::Int(3)));
        assert_eq!(tree.read("/block/toy0/level"), Ok(Value::Int(0)));
        assert_eq!(tree.read("/module/toy/parameters/kind"), Ok(Value::Text("toy".to_owned())));
    }

    #[test]
    fn links_have_the_texts_of_the_kernel() {
        // tests [RS-33] [NB-36]
        let tree = tree();
        for (path, target) in [
            ("/class/toys/toy0", "../../devices/virtual/toys/toy0"),
            ("/class/toys/toy0/subsystem", "../../../../class/toys"),
            ("/block/toy0", "../devices/virtual/block/toy0"),
        ] {
            match tree.lookup(path) {
                Ok(Found::Link(text)) => assert_eq!(text, target),
                other => panic!("{path}: {other:?}"),
            }
        }
    }
}
