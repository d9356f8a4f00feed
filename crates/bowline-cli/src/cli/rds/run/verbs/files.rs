//! Files of the RDMA device for programs that read /sys/class/infiniband and look at
//! /dev/infiniband, as the kernel has them for a card: a folder of this user, into which the
//! preloaded library leads such programs.

use std::{
    fs::{self, DirBuilder},
    io::{self, ErrorKind},
    net::IpAddr,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::{DEVICE, Outlook};

/// Below the folder of the libraries' names: those of each node.
const FOLDER: &str = "files";
/// Link to the socket of the node. Without it nobody needs the files.
const NODE: &str = "node";
/// Files of the verbs' devices, by which libibverbs finds what it may call.
const UVERBS: &str = "sys/class/infiniband_verbs";
/// The version of that interface.
const ABI_VERSION: &str = "6";

/// Writes the files of a node's device, or brings them up to date; returns their folder.
pub(super) fn write(folder: &Path, node: &Path, outlook: &Outlook) -> io::Result<PathBuf> {
    let all = folder.join(FOLDER);
    sweep(&all);
    let own = all.join(name(node));
    DirBuilder::new().recursive(true).mode(0o700).create(&own)?;
    let link = own.join(NODE);
    if fs::read_link(&link).ok().as_deref() != Some(node) {
        put(&link, |new| std::os::unix::fs::symlink(node, new))?;
    }
    for (path, text) in contents(outlook) {
        write_one(&own.join(path), &text)?;
    }
    let gids = own.join("sys/class/infiniband").join(DEVICE).join("ports/1");
    for table in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
        // Of a time when the machine had more addresses.
        for entry in fs::read_dir(gids.join(table))?.flatten() {
            let index = entry.file_name().to_str().and_then(|name| name.parse::<usize>().ok());
            if index.is_some_and(|index| index >= outlook.gids.len()) {
                remove(&entry.path())?;
            }
        }
    }
    Ok(own)
}

/// A name for the files of a node, whose socket may have any path.
fn name(node: &Path) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    node.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Removes the files of nodes that have ended.
fn sweep(all: &Path) {
    let has_ended = |folder: &Path| {
        fs::read_link(folder.join(NODE)).is_ok_and(|node| fs::symlink_metadata(node).is_err())
    };
    let folders = fs::read_dir(all).into_iter().flatten().flatten().map(|entry| entry.path());
    for folder in folders.filter(|folder| has_ended(folder)) {
        // Somebody else may do the same.
        let _ = fs::remove_dir_all(folder);
    }
}

/// Writes a file, unless it has this text. Who reads it sees one text or the other.
fn write_one(path: &Path, text: &str) -> io::Result<()> {
    if fs::read(path).is_ok_and(|found| found == text.as_bytes()) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    put(path, |new| fs::write(new, text))
}

/// Makes something in the place of what may be there.
fn put(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".{}", std::process::id()));
    let new = PathBuf::from(new);
    // What a process of this number has left that was killed.
    remove(&new)?;
    make(&new)?;
    fs::rename(&new, path)
}

fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)
        .or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

/// The files, and what the kernel would say in them.
fn contents(outlook: &Outlook) -> Vec<(String, String)> {
    let device = format!("sys/class/infiniband/{DEVICE}");
    let line = |path: String, text: &str| (path, format!("{text}\n"));
    let guid = in_fours(&outlook.guid.to_be_bytes());
    let mut all = Vec::new();
    for (name, text) in [
        ("node_guid", guid.as_str()),
        ("sys_image_guid", &guid),
        ("node_type", "1: CA"),
        ("node_desc", DEVICE),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("hca_type", "bowline"),
        ("board_id", "bowline"),
        // No bus, and no node of memory that is nearer than another.
        ("device/numa_node", "-1"),
        ("device/vendor", "0x0000"),
        ("device/device", "0x0000"),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/phys_state", "5: LinkUp"),
        ("ports/1/rate", "100 Gb/sec (4X EDR)"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/lid", "0x0"),
        ("ports/1/sm_lid", "0x0"),
        ("ports/1/sm_sl", "0"),
        ("ports/1/lid_mask_count", "0"),
        ("ports/1/cap_mask", "0x04010000"),
        ("ports/1/pkeys/0", "0xffff"),
    ] {
        all.push(line(format!("{device}/{name}"), text));
    }
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    all.push(line(format!("{device}/device/local_cpulist"), online.trim()));
    all.push(line(format!("{device}/device/local_cpus"), &mask(online.trim())));
    for (index, at) in outlook.gids.iter().enumerate() {
        let gid = match at.addr {
            IpAddr::V4(addr) => addr.to_ipv6_mapped(),
            IpAddr::V6(addr) => addr,
        };
        let port = format!("{device}/ports/1");
        all.push(line(format!("{port}/gids/{index}"), &in_fours(&gid.octets())));
        all.push(line(format!("{port}/gid_attrs/types/{index}"), "RoCE v2"));
        all.push(line(format!("{port}/gid_attrs/ndevs/{index}"), &at.interface_name()));
    }
    for (name, text) in [
        ("abi_version", ABI_VERSION),
        ("uverbs0/ibdev", DEVICE),
        ("uverbs0/abi_version", "1"),
        ("uverbs0/dev", "231:192"),
    ] {
        all.push(line(format!("{UVERBS}/{name}"), text));
    }
    all.push(("dev/infiniband/uverbs0".to_owned(), String::new()));
    all
}

/// The mask of a list of processors, as `0-3,8`: words of 32 bits, the highest first.
fn mask(list: &str) -> String {
    let mut words = vec![0_u32];
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { continue };
        for cpu in usize::from(first)..=usize::from(last) {
            words.resize(words.len().max(cpu / 32 + 1), 0);
            words[cpu / 32] |= 1 << (cpu % 32);
        }
    }
    words.iter().rev().map(|word| format!("{word:08x}")).collect::<Vec<_>>().join(",")
}

/// Digits as the kernel groups them.
fn in_fours(bytes: &[u8]) -> String {
    let pairs = bytes.chunks(2);
    pairs.map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_become_masks() {
        assert_eq!(mask("0-1"), "00000003");
        assert_eq!(mask("0,2-3,33"), "00000002,0000000d");
        assert_eq!(mask(""), "00000000");
    }

    #[test]
    fn files_follow_the_addresses_and_go_with_the_node() {
        let folder = std::env::temp_dir().join(format!("bowline-files-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let socket = folder.join("host.verbs");
        fs::write(&socket, "").unwrap();
        let at = |last| super::super::At::new([10, 0, 0, last].into(), 1);
        let outlook = |gids| Outlook { gids, guid: 0x0212_3456_789a_bcde, ..Outlook::default() };
        let own = write(&folder, &socket, &outlook(vec![at(1), at(2)])).unwrap();
        let device = own.join("sys/class/infiniband/bowline0");
        let text = |name: &str| fs::read_to_string(device.join(name)).unwrap();
        assert_eq!(text("node_guid"), "0212:3456:789a:bcde\n");
        assert_eq!(text("ports/1/gids/1"), "0000:0000:0000:0000:0000:ffff:0a00:0002\n");
        assert_eq!(text("ports/1/gid_attrs/ndevs/0"), "lo\n");
        assert_eq!(write(&folder, &socket, &outlook(vec![at(3)])).unwrap(), own);
        assert_eq!(text("ports/1/gids/0"), "0000:0000:0000:0000:0000:ffff:0a00:0003\n");
        assert!(!device.join("ports/1/gids/1").exists());
        assert!(!device.join("ports/1/gid_attrs/types/1").exists());
        // Another node, after this one has ended.
        fs::remove_file(&socket).unwrap();
        let other = folder.join("other.verbs");
        write(&folder, &other, &outlook(vec![at(1)])).unwrap();
        assert!(!own.exists());
        fs::remove_dir_all(&folder).unwrap();
    }
}
