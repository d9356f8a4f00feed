//! The folder of a node that `bowline run` starts, and the files in it: nobody but this user and
//! root can change them, or put others in their place.

use std::{
    fs::{self, DirBuilder, File, Metadata, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{self, Path},
};

use rustix::{
    fs::{Access, OFlags, access},
    process::geteuid,
};

/// Mode bits of those who may write, beside the owner.
const GROUP_AND_OTHERS: u32 = 0o022;
const OTHERS: u32 = 0o002;
/// In such a folder users cannot rename or remove what belongs to others.
const STICKY: u32 = 0o1000;

/// Creates a folder that only this user may write, where it is missing.
pub(super) fn create(folder: &Path) -> Result<(), String> {
    let in_words = |error: io::Error| format!("{}: {error}", folder.display());
    let folder = path::absolute(folder).map_err(in_words)?;
    // Nor is one created where others could rename it.
    refuse_unsafe_way(&folder)?;
    let created = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    created.map_err(in_words)?;
    refuse_unsafe_folder(&folder)?;
    access(&folder, Access::WRITE_OK).map_err(|error| in_words(error.into()))
}

/// Fails where others can change what is in a folder.
fn refuse_unsafe_folder(folder: &Path) -> Result<(), String> {
    let found = fs::symlink_metadata(folder);
    let found = found.map_err(|error| format!("{}: {error}", folder.display()))?;
    if !found.is_dir() || !is_own(&found) || found.mode() & GROUP_AND_OTHERS != 0 {
        return Err(refused(folder, &found));
    }
    refuse_unsafe_way(folder)
}

/// Fails where others can exchange one of the folders around a path, or a link on the way to it.
fn refuse_unsafe_way(path: &Path) -> Result<(), String> {
    let named = path.ancestors().skip(1);
    // Where links lead. What is missing is created where nobody else can do so.
    let real = named.clone().find_map(|around| fs::canonicalize(around).ok());
    for around in named.chain(real.iter().flat_map(|real| real.ancestors())) {
        match fs::symlink_metadata(around) {
            Ok(found) if can_be_exchanged(&found) => return Err(refused(around, &found)),
            _ => {}
        }
    }
    Ok(())
}

/// Tells whether others can exchange what is in a folder, or where a link leads. A group that may
/// write has that right from the owner. Who owns `/` can do everything: root, whose number is
/// another one in a user namespace.
fn can_be_exchanged(found: &Metadata) -> bool {
    let is_roots = || fs::metadata("/").is_ok_and(|root| root.uid() == found.uid());
    let is_open = found.is_dir() && found.mode() & (OTHERS | STICKY) == OTHERS;
    is_open || !(is_own(found) || found.uid() == 0 || is_roots())
}

fn is_own(found: &Metadata) -> bool {
    found.uid() == geteuid().as_raw()
}

fn refused(path: &Path, found: &Metadata) -> String {
    let path = path.display();
    if found.is_symlink() {
        return format!("{path} is a symbolic link of user {}", found.uid());
    }
    if !found.is_dir() {
        return format!("{path} is not a folder");
    }
    let mode = found.mode() & 0o7777;
    format!(
        "{path} belongs to user {} and has mode {mode:04o}, so that others could exchange files \
         there",
        found.uid()
    )
}

/// Opens a file of this user, which is created where it is missing, in a folder that [`create`] has
/// looked at. Others may have put links there before the folder was closed to them.
pub(super) fn open(path: &Path) -> Result<File, String> {
    let in_words = |error: io::Error| format!("{}: {error}", path.display());
    // A pipe is not waited for.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let opened = options.custom_flags(flags.bits() as i32).open(path);
    let is_link = |error: &io::Error| error.raw_os_error() == Some(LOOP);
    let file = match opened {
        Err(error) if is_link(&error) => None,
        opened => Some(opened.map_err(in_words)?),
    };
    let is_plain = |found: Metadata| found.is_file() && is_own(&found) && found.nlink() == 1;
    match file {
        Some(file) if is_plain(file.metadata().map_err(in_words)?) => Ok(file),
        _ => Err(format!(
            "{} is a link, or not a file of this user: remove it, if you do not know what it is for",
            path.display()
        )),
    }
}

/// What opening a symbolic link gives.
const LOOP: i32 = rustix::io::Errno::LOOP.raw_os_error();
