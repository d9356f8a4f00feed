//! The server's side of the tree.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Dir, Errno, Node, Value};
use bowline_wire::rnbd::Access;

use super::health::Health;
use super::{
    Block, DynamicDir, ExportCommands, ExportInfo, Exports, OpenInfo, UEVENT, command, dir_name,
    show, text,
};

const EXPORT_DEVICE: &str = "Usage: echo \"name=<name of the export> [<option>=<value>] ..\" > \
                             export_device";
const UNEXPORT_DEVICE: &str = "Usage: echo \"<name of the export> <normal|force>\" > \
                               unexport_device";

/// Returns the class of the server: one device, `ctl` [NB-40]. With `commands`, it has files by
/// which exports are added and taken away [NB-64].
pub fn server_node(
    exports: Arc<dyn Exports>,
    commands: Option<Arc<dyn ExportCommands>>,
) -> Arc<dyn Node> {
    Arc::new(Dir::new().with("ctl", Arc::new(Control { exports, commands })))
}

/// Returns the exports as block devices: the targets of the links `block_dev`.
pub fn exports_node(exports: Arc<dyn Exports>) -> Arc<dyn Node> {
    Arc::new(DynamicDir(move || {
        let all = exports.exports().into_iter();
        all.map(|export| {
            let name = dir_name(&export.name);
            let node: Arc<dyn Node> = Arc::new(BlockNode { export });
            (name, node)
        })
        .collect()
    }))
}

struct BlockNode {
    export: ExportInfo,
}

impl Node for BlockNode {
    fn attrs(&self) -> &'static [AttrDef] {
        &Block::ATTRS
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let ExportInfo { bytes, read_only, traffic, .. } = self.export;
        Block { bytes, read_only, traffic }.read(name)
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        vec![Health { failures: self.export.failures, disk: None }.folder()]
    }
}

struct Control {
    exports: Arc<dyn Exports>,
    commands: Option<Arc<dyn ExportCommands>>,
}

impl Node for Control {
    fn attrs(&self) -> &'static [AttrDef] {
        if self.commands.is_some() {
            const { &[command("export_device"), command("unexport_device"), UEVENT] }
        } else {
            &[UEVENT]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "export_device" => Ok(Value::Usage(EXPORT_DEVICE)),
            "unexport_device" => Ok(Value::Usage(UNEXPORT_DEVICE)),
            "uevent" => Ok(Value::Empty),
            _ => Err(Errno::ENOENT),
        }
    }

    /// A uevent is refused: no device here has a listener, as on the client's side.
    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let commands = self.commands.as_ref().ok_or(Errno::EINVAL)?;
        match name {
            "export_device" => commands.export(value.trim()),
            "unexport_device" => match value.trim().rsplit_once(' ') {
                Some((export, "normal")) => commands.unexport(export, false),
                Some((export, "force")) => commands.unexport(export, true),
                _ => Err(Errno::EINVAL),
            },
            _ => Err(Errno::EINVAL),
        }
    }

    /// Exports that a session has open, as the kernel shows them.
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let exports = Arc::clone(&self.exports);
        let devices = DynamicDir(move || {
            let open = exports.exports().into_iter().filter(|export| !export.opens.is_empty());
            open.map(|export| {
                let name = dir_name(&export.name);
                let node = DeviceNode { exports: Arc::clone(&exports), export };
                let node: Arc<dyn Node> = Arc::new(node);
                (name, node)
            })
            .collect()
        });
        vec![("devices".to_owned(), Arc::new(devices))]
    }
}

struct DeviceNode {
    exports: Arc<dyn Exports>,
    export: ExportInfo,
}

impl Node for DeviceNode {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let opens = self.export.opens.iter().map(|open| {
            let node: Arc<dyn Node> = Arc::new(OpenNode {
                exports: Arc::clone(&self.exports),
                export: self.export.name.clone(),
                open: open.clone(),
            });
            (open.session.clone(), node)
        });
        let opens: Vec<_> = opens.collect();
        vec![("sessions".to_owned(), Arc::new(DynamicDir(move || opens.clone())))]
    }

    fn links(&self) -> Vec<(String, String)> {
        let target = format!("../../../../block/{}", dir_name(&self.export.name));
        vec![("block_dev".to_owned(), target)]
    }
}

struct OpenNode {
    exports: Arc<dyn Exports>,
    export: String,
    open: OpenInfo,
}

impl Node for OpenNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const { &[show("access_mode"), show("read_only"), show("mapping_path"), command("force_close")] }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "access_mode" => text(self.open.access.name()),
            "read_only" => Ok(Value::Uint((self.open.access == Access::Ro).into())),
            "mapping_path" => text(self.open.mapping_path.clone()),
            "force_close" => Ok(Value::Usage("Usage: echo 1 > force_close")),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        match (name, value) {
            ("force_close", "1") => self.exports.force_close(&self.export, &self.open.session),
            ("force_close", _) => Err(Errno::EINVAL),
            _ => Err(Errno::ENOENT),
        }
    }
}

/// Parameters that are fixed when a server starts, as those of module rnbd_server [NB-39].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Parameters {
    /// Directory of the files that clients may open; empty when there are only named exports.
    pub dev_search_path: String,
    /// Port of the server.
    pub port_nr: u16,
}

impl Node for Parameters {
    fn attrs(&self) -> &'static [AttrDef] {
        const { &[show("dev_search_path"), show("port_nr")] }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "dev_search_path" => text(self.dev_search_path.clone()),
            "port_nr" => Ok(Value::Uint(self.port_nr.into())),
            _ => Err(Errno::ENOENT),
        }
    }
}
