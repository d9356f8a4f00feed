//! Libraries of verbs for a program: one file, under the names that programs are linked with, in a
//! folder that is searched before those of the system; and the files that they look for in /sys.

mod files;
mod outlook;

use std::{
    env,
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, symlink},
    path::{self, Path, PathBuf},
    process::Command,
};

use bowline_host::installed;
use bowline_node::{
    Failure, Outcome,
    impair::{self, ImpairOptions},
};
use bowline_roce_driver::Impairments;

use super::rpath;

pub(crate) use outlook::{At, Outlook, Trouble};

/// The file, as cargo builds it and as packages install it.
const LIBRARY: &str = "bowline-ibverbs";
/// Names by which programs ask for it: of the calls, of connections, and of vendors' libraries.
const NAMES: [&str; 6] = [
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libmlx5.so.1",
    "libefa.so.1",
    "libmlx4.so.1",
    "libmana.so.1",
];

/// Name of the device that programs get.
pub(crate) const DEVICE: &str = "bowline0";
/// Variable with the folder of the files that it has in /sys and /dev.
const FILES: &str = "BOWLINE_VERBS_FILES";
/// Where the system shows RDMA devices of its own. Written like this it is not redirected to the
/// files of ours, when this command runs below another `bowline run`.
const DEVICES: &str = "/sys/./class/infiniband";

/// Has a program find the library before the system's, and the node whose addresses it shares.
/// Without the library, without RDMA at the node, and where the machine has a device of its own,
/// the program keeps what it has. Tells whether it finds the library.
pub(super) fn put_first(command: &mut Command, program: &Path, node: &Path) -> bool {
    let Some(library) = library() else { return false };
    if !devices_of_machine().is_empty() || !bowline_ctl::is_socket(node) {
        return false;
    }
    if let Some(own) = rpath::library(program, &NAMES[..2]) {
        note!(
            "bowline run: {} has {} by its RPATH, before anything that is put first: if it speaks \
             verbs, it does so without bowline (remove the RPATH with patchelf or chrpath)",
            program.display(),
            own.display()
        );
    }
    let folder = match named(&library) {
        Ok(folder) => folder,
        Err(error) => {
            note!("bowline run: programs get no RDMA: {}: {error}", library.display());
            return false;
        }
    };
    let node = &path::absolute(node).unwrap_or_else(|_| node.to_owned());
    // Opening a device that the node refuses gives the program the reason.
    if let Some(outlook) = Outlook::of(Some(node)).ok().filter(|one| !one.gids.is_empty()) {
        match files::write(&folder, node, &outlook) {
            Ok(files) => _ = command.env(FILES, files),
            Err(error) => note!("bowline run: the RDMA device has no files in /sys: {error}"),
        }
    }
    let mut folders = vec![folder];
    if let Some(others) = env::var_os("LD_LIBRARY_PATH").filter(|others| !others.is_empty()) {
        folders.extend(env::split_paths(&others));
    }
    // No folder of these has a colon in its name but by the user's own doing.
    let all = env::join_paths(folders);
    all.is_ok_and(|all| {
        command.env("LD_LIBRARY_PATH", all).env("BOWLINE_VERBS_NODE", node);
        true
    })
}

/// What the network of the program does to its packets, and where these are written.
#[derive(Debug)]
pub(super) struct Network {
    impairments: Option<Impairments>,
    capture: Option<PathBuf>,
}

impl Network {
    pub(super) fn new(impair: &ImpairOptions, capture: Option<&Path>) -> Outcome<Self> {
        let whole = |path: &Path| {
            let failed = |error| Failure::failed(format!("{}: {error}", path.display()));
            // The program may change its folder. Its first process makes the file.
            let whole = path::absolute(path).map_err(failed)?;
            match fs::remove_file(&whole) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
                _ => Ok(whole),
            }
        };
        let capture = capture.map(whole).transpose()?;
        Ok(Self { impairments: impair.settings()?, capture })
    }

    /// Has the library of a program know it.
    pub(super) fn set(&self, command: &mut Command, has_verbs: bool) -> Outcome {
        if !has_verbs && (self.impairments.is_some() || self.capture.is_some()) {
            return Err(Failure::failed(
                "--impair and --capture are for RDMA of programs, which this one does not get \
                 here; see docs/rdma-without-a-card.md",
            ));
        }
        if let Some(impairments) = &self.impairments {
            note!("bowline run: {}", impair::line(impairments));
            command.env("BOWLINE_VERBS_IMPAIR", impairments.to_string());
            command.env("BOWLINE_VERBS_SEED", impairments.seed().to_string());
        }
        if let Some(capture) = &self.capture {
            command.env("BOWLINE_VERBS_CAPTURE", capture);
        }
        Ok(())
    }
}

/// The library, where it is installed.
pub(crate) fn library() -> Option<PathBuf> {
    installed(LIBRARY)
}

/// Names of the RDMA devices that the machine has itself.
pub(crate) fn devices_of_machine() -> Vec<String> {
    let all = fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        all.map(|device| device.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A folder of this user in which the file has its names: where its sockets are, or where that is
/// another's, among temporary files.
fn named(library: &Path) -> io::Result<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    named_in(bowline_ctl::run_folder("verbs"), library)
        .or_else(|_| named_in(env::temp_dir().join(format!("bowline-verbs-{user}")), library))
}

fn named_in(folder: PathBuf, library: &Path) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    bowline_ctl::refuse_unsafe_folder(&folder)?;
    for name in NAMES {
        let link = folder.join(name);
        if fs::read_link(&link).is_ok_and(|to| to == library) {
            continue;
        }
        // Another process may do the same now.
        let new = folder.join(format!("{name}.{}", std::process::id()));
        symlink(library, &new)?;
        fs::rename(&new, &link)?;
    }
    Ok(folder)
}
