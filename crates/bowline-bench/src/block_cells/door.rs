//! One write after the other through what a disk looks like to other programs: the NBD socket of a
//! mapped disk, its file, or the unix socket of nbdkit.
//!
//! The receiver exports the store, maps it, and has the front end: its processor time is that of
//! all of these. The sender is what uses the disk: a process that waits for a file which it serves
//! itself could not be killed. Nobody has written to the store before.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bowline_block::front::{fuse, nbd};
use bowline_rnbd_driver::{Client, MapOptions};

use super::nbd::Client as NbdClient;
use super::rnbd::export;
use super::{Gauge, Load, NAP, addresses, engine, engine_at};
use crate::cell::Subject;
use crate::role::{Role, Side, done, stopping};
use crate::sys;

/// Alignment of the memory of a file that is written without the page cache.
const ALIGN: usize = 4096;
/// Name of the socket, or of the file.
const NAME: &str = "disk";

/// What a disk looks like.
trait Door {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String>;
    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), String>;
}

impl Door for NbdClient {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.write_one(offset, data)
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), String> {
        self.read_one(offset, data)
    }
}

impl Door for File {
    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), String> {
        self.write_all_at(data, offset).map_err(|e| format!("writing to the file: {e}"))
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> Result<(), String> {
        self.read_exact_at(data, offset).map_err(|e| format!("reading from the file: {e}"))
    }
}

/// Makes a folder for the socket or file. The sender removes it as soon as it has that open, since
/// the receiver ends at once when it is asked to.
fn folder() -> Result<PathBuf, String> {
    let path = std::env::temp_dir().join(format!("bowline-bench-{}", std::process::id()));
    std::fs::create_dir(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// Exports the store, and shows it.
pub(super) fn serve(role: Role) -> Result<(), String> {
    if role.cell.subject == Subject::DoorFuse {
        // If this process is killed, root's mount goes with it; others' is one that does not
        // answer.
        let _ = sys::own_mounts();
    }
    let (_near, near) = engine(&role)?;
    let _server = export(&role, &near)?;
    let addrs = addresses(&role.cell, Side::Tx);
    let (_far, far) = engine_at(&role, addrs.clone())?;
    let options =
        MapOptions::new("bench").paths(addrs.into_iter().zip(addresses(&role.cell, Side::Rx)));
    let client = Client::new(far, options.clone());
    let disk = client.map_with("store", &options).map_err(|e| e.to_string())?;
    let folder = folder()?;
    let failed = |e: std::io::Error| format!("showing the disk: {e}");
    if role.cell.subject == Subject::DoorFuse {
        let options = fuse::FuseOptions::default();
        let _mount = fuse::mount(disk, &folder, NAME, options).map_err(failed)?;
        stay(role, &folder)
    } else {
        let options = nbd::NbdOptions::default();
        let _socket = nbd::serve(disk, &folder.join(NAME), options).map_err(failed)?;
        stay(role, &folder)
    }
}

/// Tells where the disk is, and serves it until the end.
fn stay(mut role: Role, folder: &Path) -> Result<(), String> {
    role.ready(&format!("folder={}", folder.display()))?;
    while !stopping() {
        std::thread::sleep(NAP);
    }
    Ok(())
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    let folder = Path::new(role.peer("folder"));
    let answers = match role.cell.subject {
        Subject::DoorNbd => {
            let mut client = NbdClient::connect_at(&folder.join(NAME))?;
            // What is left behind does no harm, here and below.
            let _ = std::fs::remove_dir_all(folder);
            write_one_by_one(&role, &mut client)
        }
        Subject::DoorFuse => {
            // Mounts of a process are seen through its root.
            let at = format!("/proc/{}/root{}/{NAME}", role.peer("pid"), folder.display());
            let mut open = OpenOptions::new();
            open.read(true).write(true).custom_flags(libc::O_DIRECT);
            let mut file = open.open(at).map_err(|e| format!("opening the file: {e}"))?;
            let _ = std::fs::remove_dir(folder);
            write_one_by_one(&role, &mut file)
        }
        _ => write_one_by_one(&role, &mut NbdClient::connect_near(&role)?),
    };
    done(answers?, 0);
    // The server serves until its parent ends.
    std::process::exit(0);
}

fn write_one_by_one(role: &Role, door: &mut dyn Door) -> Result<u64, String> {
    let mut memory = vec![0; role.cell.size + ALIGN];
    let begin = memory.as_ptr().align_offset(ALIGN);
    let data = &mut memory[begin..begin + role.cell.size];
    let mut load = Load::new(&role.cell);
    // What is written is there afterwards; once, since that is not what is measured.
    let first = load.next();
    data[..8].copy_from_slice(&first.to_le_bytes());
    door.write(first, data)?;
    data.fill(0);
    door.read(first, data)?;
    if data.first_chunk() != Some(&first.to_le_bytes()) {
        return Err(format!("what was written to {first} is not there"));
    }
    let mut gauge = Gauge::new(role, None);
    let mut answers = 0;
    while !stopping() {
        let offset = load.next();
        data[..8].copy_from_slice(&offset.to_le_bytes());
        door.write(offset, data)?;
        answers += 1;
        if gauge.add(1) {
            break;
        }
    }
    Ok(answers)
}
