//! The client's side of the tree.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Caller, Dir, Errno, Node, Value};

use super::health::Health;
use super::{Block, DiskInfo, Disks, DynamicDir, MapSpec, UEVENT, command, dir_name, show, text};

const MAP_DEVICE: &str = "Usage: echo \"[dest_port=server port number] sessname=<name of the rtrs \
                          session> path=<[srcaddr@]dstaddr> [path=<[srcaddr@]dstaddr>] \
                          device_path=<full path on remote side> [access_mode=<ro|rw|migration>] \
                          [nr_poll_queues=<number of queues>]\" > map_device\n\n\
                          addr ::= [ ip:<ipv4> | ip:<ipv6> | gid:<gid> ]";

/// Returns the class of the client: one device, `ctl` [NB-34].
pub fn client_node(disks: Arc<dyn Disks>) -> Arc<dyn Node> {
    Arc::new(Dir::new().with("ctl", Arc::new(Control { disks })))
}

/// Returns the block devices of the client [NB-37].
pub fn disks_node(disks: Arc<dyn Disks>) -> Arc<dyn Node> {
    Arc::new(DynamicDir(move || {
        let all = disks.disks().into_iter();
        all.map(|disk| {
            let (disks, name) = (Arc::clone(&disks), disk.name.clone());
            let node: Arc<dyn Node> = Arc::new(DiskNode { disks, disk });
            (name, node)
        })
        .collect()
    }))
}

struct Control {
    disks: Arc<dyn Disks>,
}

impl Node for Control {
    fn attrs(&self) -> &'static [AttrDef] {
        const { &[command("map_device"), UEVENT] }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "map_device" => Ok(Value::Usage(MAP_DEVICE)),
            "uevent" => Ok(Value::Empty),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        match name {
            "map_device" => self.disks.map(&value.parse::<MapSpec>()?),
            _ => Err(Errno::EINVAL),
        }
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        vec![("devices".to_owned(), Arc::new(Devices { disks: Arc::clone(&self.disks) }))]
    }
}

/// A link to each disk, under its name on the server [NB-36].
struct Devices {
    disks: Arc<dyn Disks>,
}

impl Node for Devices {
    fn links(&self) -> Vec<(String, String)> {
        let all = self.disks.disks().into_iter();
        all.map(|disk| {
            let name = format!("{}@{}", dir_name(&disk.mapping_path), disk.session);
            (name, format!("../../../block/{}", disk.name))
        })
        .collect()
    }
}

/// A disk as it was when the folder of disks was looked into: a look at many disks must not ask
/// for all of them at each file.
struct DiskNode {
    disks: Arc<dyn Disks>,
    disk: DiskInfo,
}

impl Node for DiskNode {
    fn attrs(&self) -> &'static [AttrDef] {
        &Block::ATTRS
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let DiskInfo { access, bytes, traffic, .. } = self.disk;
        let read_only = access == bowline_wire::rnbd::Access::Ro;
        Block { bytes, read_only, traffic }.read(name)
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let node = RnbdNode { disks: Arc::clone(&self.disks), disk: self.disk.clone() };
        let health = Health { failures: self.disk.failures, disk: Some(self.disk.clone()) };
        vec![("rnbd".to_owned(), Arc::new(node)), health.folder()]
    }
}

struct RnbdNode {
    disks: Arc<dyn Disks>,
    disk: DiskInfo,
}

impl Node for RnbdNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("state"),
                show("session"),
                show("mapping_path"),
                show("access_mode"),
                show("nr_poll_queues"),
                command("unmap_device"),
                command("resize"),
                command("remap_device"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let disk = &self.disk;
        match name {
            "state" => text(disk.state.name()),
            "session" => text(disk.session.clone()),
            "mapping_path" => text(disk.mapping_path.clone()),
            "access_mode" => text(disk.access.name()),
            "nr_poll_queues" => Ok(Value::Uint(disk.poll_queues.into())),
            "unmap_device" => Ok(Value::Usage("Usage: echo <normal|force> > unmap_device")),
            "resize" => Ok(Value::Usage("Usage: echo <new size in sectors> > resize")),
            "remap_device" => Ok(Value::Usage("Usage: echo <1> > remap_device")),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        match (name, value) {
            ("unmap_device", "normal") => self.disks.unmap(&self.disk.name, false),
            ("unmap_device", "force") => self.disks.unmap(&self.disk.name, true),
            ("remap_device", "1") => self.disks.remap(&self.disk.name),
            ("unmap_device" | "remap_device", _) => Err(Errno::EINVAL),
            _ => Err(Errno::ENOENT),
        }
    }

    fn call(&self, name: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
        if name != "resize" {
            return self.write(name, value).map(|()| None);
        }
        let (size, force) = match value.trim().rsplit_once(char::is_whitespace) {
            Some((size, "force")) => (size, true),
            _ => (value, false),
        };
        let sectors = sectors(size).ok_or(Errno::EINVAL)?;
        self.disks.resize(&self.disk.name, sectors, force).map_err(|refused| {
            if let Some(why) = refused.why {
                caller.explain(why);
            }
            refused.errno
        })?;
        Ok(None)
    }
}

/// Parses a number of sectors: decimal, or hexadecimal after `0x`, or octal after `0` [NB-37].
fn sectors(text: &str) -> Option<u64> {
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    match lower.strip_prefix("0x") {
        Some(digits) if digits.starts_with(|c: char| c.is_ascii_hexdigit()) => {
            u64::from_str_radix(digits, 16).ok()
        }
        Some(_) => None,
        None if !text.starts_with(|c: char| c.is_ascii_digit()) => None,
        None if text.len() > 1 && text.starts_with('0') => u64::from_str_radix(text, 8).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_have_the_bases_of_c() {
        // tests [NB-37]
        for (text, number) in [("0", 0), ("2048", 2048), ("0x800", 2048), ("04000", 2048)] {
            assert_eq!(sectors(text), Some(number), "{text}");
        }
        for text in ["", "x", "-1", "+1", "0x", "0x+1", "1k", "08"] {
            assert_eq!(sectors(text), None, "{text}");
        }
    }
}
