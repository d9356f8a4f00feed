//! Trees of files with the names of /sys: the kernel's, or one that bowline has mounted.
//!
//! Reading gives the same structure as a dump of a control socket; a command is one write to one
//! file, and its error is the result [NB-41] [NB-42].

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use bowline_ctl::Json;

/// Mount point of the kernel's tree.
pub(super) const KERNEL: &str = "/sys";
/// The classes of RTRS and RNBD.
const CLASSES: [&str; 4] = ["rtrs-client", "rtrs-server", "rnbd-client", "rnbd-server"];
/// Deepest folder that is read below a device of a class.
const DEPTH_MAX: usize = 8;
/// Most bytes read of a file; files of sysfs have a page at most.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Reports whether a tree has anything of RTRS or RNBD.
pub(super) fn is_there(root: &Path) -> bool {
    CLASSES.iter().any(|class| root.join("class").join(class).is_dir())
}

/// Reads everything of RTRS and RNBD in a tree.
///
/// # Errors
///
/// `NotFound` where the tree has no classes at all.
pub(super) fn snapshot(root: &Path) -> io::Result<Json> {
    let classes = root.join("class");
    fs::metadata(&classes)?;
    let mut all = Vec::new();
    for class in CLASSES {
        // A missing class has no devices.
        let Ok(devices) = names(&classes.join(class)) else { continue };
        let devices = devices.into_iter().filter_map(|name| {
            let path = classes.join(class).join(&name);
            path.is_dir().then(|| (name, folder(&path, 0)))
        });
        all.push((class.to_owned(), Json::Object(devices.collect())));
    }
    all.push(("block".to_owned(), Json::Object(blocks(root))));
    Ok(object("devices", object("virtual", Json::Object(all))))
}

fn object(name: &str, value: Json) -> Json {
    Json::Object(vec![(name.to_owned(), value)])
}

/// Returns mapped disks, and the attributes of devices behind exports.
fn blocks(root: &Path) -> Vec<(String, Json)> {
    let dir = root.join("block");
    let mut disks: Vec<String> = names(&dir).unwrap_or_default();
    disks.retain(|name| dir.join(name).join("rnbd").is_dir());
    // rnbd9 before rnbd10.
    disks.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    let disks = disks.into_iter().map(|name| {
        let at = dir.join(&name);
        let mut members = stat(&at);
        members.push(("rnbd".to_owned(), folder(&at.join("rnbd"), 0)));
        // What only bowline shows [NB-67].
        if at.join("bowline").is_dir() {
            members.push(("bowline".to_owned(), folder(&at.join("bowline"), 0)));
        }
        (name, Json::Object(members))
    });
    let mut all: Vec<_> = disks.collect();
    let exports = root.join("class/rnbd-server/ctl/devices");
    for name in names(&exports).unwrap_or_default() {
        // A partition has no name of its own below `block`.
        let members = stat(&exports.join(&name).join("block_dev"));
        all.push((name, Json::Object(members)));
    }
    all
}

fn stat(device: &Path) -> Vec<(String, Json)> {
    let text = text(&device.join("stat"));
    text.map(|text| ("stat".to_owned(), Json::Text(text))).into_iter().collect()
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.flatten().map(|entry| entry.file_name().into_string());
    Ok(names.flatten().collect())
}

/// Reads a folder: files are their texts without the last newline; links are left out, because
/// they lead back up.
fn folder(dir: &Path, depth: usize) -> Json {
    let mut members = Vec::new();
    // A path that was removed meanwhile is empty.
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (Ok(kind), Ok(name)) = (entry.file_type(), entry.file_name().into_string()) else {
            continue;
        };
        if kind.is_dir() && depth < DEPTH_MAX {
            members.push((name, folder(&entry.path(), depth + 1)));
        } else if kind.is_file()
            && let Some(text) = text(&entry.path())
        {
            members.push((name, Json::Text(text)));
        }
    }
    Json::Object(members)
}

/// Returns the text of a file, or nothing when it cannot be read.
fn text(path: &Path) -> Option<String> {
    let text = read(path).ok()?;
    Some(text.strip_suffix('\n').map_or_else(|| text.clone(), str::to_owned))
}

/// Returns the exact text of a file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Carries out a command: opens the file for writing and writes once, without a newline.
pub(super) fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
    match file.write(value.as_bytes())? {
        length if length == value.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Returns the path of an attribute's file.
pub(super) fn place(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}
