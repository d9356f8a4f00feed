//! What a service manager keeps of the front ends of a disk, should their process be killed: the
//! next process of the service resumes them.
//!
//! ```text
//!   bowline-disk    a file in memory: how often the disk's file is open (8 bytes); a line feed if
//!                   changes may have been answered that no flush has made durable, else a space;
//!                   then whose disk this is, as JSON. To JSON both are white space: versions that
//!                   know of no such byte take it for a part of the text, and have none before it
//!   bowline-nbd     the socket at which the NBD server listens; clients connect again
//!   bowline-fuse    the kernel's end of the mount, with all requests that are not answered
//! ```

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{fs::FileExt, net::UnixListener},
    },
    sync::Arc,
};

use bowline_block::front::{fuse, nbd};
use bowline_ctl::{fusefs, is_socket};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::{HandedFrontEnds, replace::Service};
use crate::service_manager::Supervisor;

/// Names under which a service manager keeps them.
pub const STORED: [&str; 3] = [STATE, NBD, FUSE];
const STATE: &str = "bowline-disk";
const NBD: &str = "bowline-nbd";
const FUSE: &str = "bowline-fuse";

/// Where the JSON begins, with the byte before it, behind the number of opens.
const TEXT_AT: u64 = 8;
/// That byte, if all that was answered is durable, and if not.
const DURABLE: u8 = b' ';
const UNFLUSHED: u8 = b'\n';
/// Most bytes of the JSON: a few paths and addresses.
const TEXT_MAX: u64 = 1 << 20;

#[derive(Deserialize, Serialize)]
struct State {
    service: Service,
    /// Device number of the mount.
    device: Option<u64>,
}

/// Makes the file in memory, of a disk that may have changes which are not durable.
pub(super) fn state_of(service: &Service, device: Option<u64>) -> io::Result<OwnedFd> {
    let file = File::from(memfd_create(STATE, MemfdFlags::CLOEXEC)?);
    let state = State { service: service.clone(), device };
    file.write_all_at(&0_u64.to_ne_bytes(), 0)?;
    let mut text = vec![UNFLUSHED];
    text.extend(serde_json::to_vec(&state)?);
    file.write_all_at(&text, TEXT_AT)?;
    Ok(file.into())
}

/// Writes to the file whether changes may have been answered that are not durable.
pub(super) fn note_unflushed(file: &OwnedFd, may_be: bool) {
    let byte = if may_be { UNFLUSHED } else { DURABLE };
    // The byte is there already, in memory: there is nothing that could fail.
    let _ = rustix::io::pwrite(file, &[byte], TEXT_AT);
}

/// Tells what the file says of that.
pub(super) fn may_be_unflushed(file: &OwnedFd) -> bool {
    let mut byte = [UNFLUSHED];
    // Without an answer nothing is known.
    let _ = rustix::io::pread(file, &mut byte, TEXT_AT);
    byte != [DURABLE]
}

fn read(file: &OwnedFd) -> io::Result<(usize, State)> {
    let file = File::from(file.try_clone()?);
    let mut opens = [0; 8];
    file.read_exact_at(&mut opens, 0)?;
    let len = file.metadata()?.len().saturating_sub(TEXT_AT);
    if len > TEXT_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len as usize];
    file.read_exact_at(&mut text, TEXT_AT)?;
    Ok((u64::from_ne_bytes(opens) as usize, serde_json::from_slice(&text)?))
}

/// Leaves everything with a service manager; what it had under these names is gone.
pub(super) fn store(
    supervisor: &Supervisor,
    state: &OwnedFd,
    nbd: Option<&UnixListener>,
    fuse: Option<&OwnedFd>,
) -> io::Result<()> {
    forget(supervisor);
    let nbd = nbd.map(|listener| (NBD, listener.as_fd()));
    let fuse = fuse.map(|kernel| (FUSE, kernel.as_fd()));
    // The state comes first: what has none could not be unmounted.
    let all = [(STATE, state.as_fd())].into_iter().chain(nbd).chain(fuse);
    for (name, descriptor) in all {
        supervisor.store_unpolled(name, &[descriptor])?;
    }
    Ok(())
}

/// The service manager need not keep anything of the disk any more.
pub fn forget(supervisor: &Supervisor) {
    STORED.iter().rev().for_each(|name| supervisor.forget(name));
}

/// As [`forget`], for what cannot be resumed: returns once the manager has closed it, so that
/// nobody waits for a mount that nobody serves.
pub fn give_up(supervisor: &Supervisor) {
    forget(supervisor);
    if let Err(error) = supervisor.barrier() {
        note!("the service manager does not answer: {error}");
    }
}

/// Takes what an earlier process of this service, which was killed, has left with the manager, if
/// it has done the same as this one. What it has left otherwise is unmounted and removed.
pub fn resumed(stored: Vec<(String, OwnedFd)>, service: &Service) -> Option<HandedFrontEnds> {
    let (mut state, mut listener, mut kernel) = (None, None, None);
    for (name, descriptor) in stored {
        match &*name {
            STATE => state = Some(descriptor),
            NBD => listener = Some(descriptor),
            FUSE => kernel = Some(descriptor),
            _ => {}
        }
    }
    let state = state?;
    let (opens, State { service: former, device }) = match read(&state) {
        Ok(read) => read,
        Err(error) => {
            note!("what the service manager has kept cannot be used: {error}");
            return None;
        }
    };
    let Service::Map { front_ends, .. } = &former else { return None };
    if former != *service {
        note!("what the service manager has kept is of another disk, and is given up");
        front_ends.clear(listener.map(UnixListener::from).as_ref());
        return None;
    }
    let path = front_ends.nbd.as_deref().filter(|path| is_socket(path));
    let nbd = path
        .and(listener)
        .map(|listener| nbd::Handed { listener: Arc::new(listener.into()), clients: Vec::new() });
    let there = front_ends.fuse.as_deref().zip(device);
    let there = there.filter(|(dir, device)| fusefs::is_mounted(dir, *device));
    let fuse = there.zip(kernel).map(|((_, device), kernel)| fuse::Handed {
        kernel: Arc::new(kernel),
        opens,
        device,
    });
    // What is opened again has to be stored again.
    let is_all =
        nbd.is_some() == front_ends.nbd.is_some() && fuse.is_some() == front_ends.fuse.is_some();
    let is_unflushed = Some(may_be_unflushed(&state));
    let kept = is_all.then(|| Arc::new(state));
    let handed = HandedFrontEnds { nbd, fuse, ublk: None, kept, is_unflushed };
    handed.is_any().then_some(handed)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::disks::FrontEndConfig;

    fn service(device: &str) -> Service {
        Service::Map {
            device: device.to_owned(),
            session: "s".to_owned(),
            servers: BTreeSet::new(),
            front_ends: FrontEndConfig::default(),
        }
    }

    #[test]
    fn what_was_kept_says_whose_it_is() {
        let kept = state_of(&service("a"), Some(57)).expect("a file");
        rustix::io::pwrite(&kept, &3_u64.to_ne_bytes(), 0).expect("written");
        let (opens, state) = read(&kept).expect("read");
        assert_eq!((opens, state.device, state.service), (3, Some(57), service("a")));
        let stored = |kept| vec![(STATE.to_owned(), kept)];
        assert!(resumed(stored(kept), &service("b")).is_none());
        let broken = memfd_create("broken", MemfdFlags::CLOEXEC).expect("a file");
        assert!(resumed(stored(broken), &service("a")).is_none());
    }

    #[test]
    fn what_was_kept_says_whether_all_is_durable_also_to_other_versions() {
        // tests [NB-72]
        let kept = state_of(&service("a"), None).expect("a file");
        let of = |kept: &OwnedFd| (may_be_unflushed(kept), read(kept).expect("read").1.service);
        assert_eq!(of(&kept), (true, service("a")), "until more is known");
        note_unflushed(&kept, false);
        assert_eq!(of(&kept), (false, service("a")));
        note_unflushed(&kept, true);
        assert_eq!(of(&kept), (true, service("a")));
        // A version that writes no such byte.
        let file = File::from(memfd_create("former", MemfdFlags::CLOEXEC).expect("a file"));
        let state = State { service: service("a"), device: None };
        file.write_all_at(&serde_json::to_vec(&state).expect("JSON"), TEXT_AT).expect("written");
        assert_eq!(of(&file.into()), (true, service("a")));
    }
}
