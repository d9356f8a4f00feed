//! Peers whose comparison is on record: nanomsg and tgtd, and libfabric and UCX, which live in
//! inline functions of their headers, so a small program is compiled for each when the headers are
//! there.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Found, Peers, inside};
use crate::block_cells;
use crate::cell::Subject;
use crate::sys::nanomsg_version;

const COMMON_H: &str = include_str!("../../peers/common.h");
const OFI_C: &str = include_str!("../../peers/ofi.c");
const UCX_C: &str = include_str!("../../peers/ucx.c");

impl Peers {
    /// Looks for one of them, compiling what must be compiled.
    pub(super) fn rival(&mut self, subject: Subject) -> Found {
        match subject {
            Subject::Nano => inside(nanomsg_version(), "libnanomsg5"),
            Subject::Ucx => self.program("ucx", UCX_C, &["-lucp", "-lucs"], "libucx-dev"),
            Subject::OfiNet | Subject::OfiRxm => {
                let compiled = |(other, found): &(Subject, Found)| {
                    let is_ofi = matches!(other, Subject::OfiNet | Subject::OfiRxm);
                    is_ofi.then(|| found.clone())
                };
                let found = self.list.iter().find_map(compiled);
                found.unwrap_or_else(|| self.program("ofi", OFI_C, &["-lfabric"], "libfabric-dev"))
            }
            _ => {
                let (version, package) = block_cells::peer_version(subject);
                inside(version, package)
            }
        }
    }

    fn program(&mut self, name: &str, source: &str, libs: &[&str], package: &str) -> Found {
        match self.compile(name, source, libs) {
            Ok((path, version)) => Found::Program { version, path },
            Err(why) => Found::Missing { why: format!("{why}; apt-get install gcc {package}") },
        }
    }

    fn compile(
        &mut self,
        name: &str,
        src: &str,
        libs: &[&str],
    ) -> Result<(PathBuf, String), String> {
        let dir = match &self.dir {
            Some(dir) => dir.clone(),
            None => self.dir.insert(private_dir()?).clone(),
        };
        let write = |file: &str, text: &str| {
            std::fs::write(dir.join(file), text).map_err(|e| format!("writing {file}: {e}"))
        };
        write("common.h", COMMON_H)?;
        write(&format!("{name}.c"), src)?;
        let program = dir.join(name);
        let compiler = std::env::var_os("CC").unwrap_or_else(|| OsString::from("cc"));
        let out = Command::new(&compiler)
            .args(["-O2", "-std=gnu11", "-o"])
            .arg(&program)
            .arg(dir.join(format!("{name}.c")))
            .args(libs)
            .output()
            .map_err(|e| format!("no C compiler ({}: {e})", compiler.display()))?;
        if !out.status.success() {
            let text = String::from_utf8_lossy(&out.stderr);
            let line = text.lines().find(|l| l.contains("error")).unwrap_or("without a message");
            return Err(format!("{name}.c does not compile: {line}"));
        }
        let out = Command::new(&program).arg("version").output();
        let out = out.map_err(|e| format!("{name} does not run: {e}"))?;
        let version = String::from_utf8_lossy(&out.stdout).trim().to_owned();
        if version.is_empty() {
            return Err(format!("{name} does not print its version"));
        }
        Ok((program, version))
    }
}

const DIR_PREFIX: &str = "bowline-bench-";

/// Removes the directories of runs that were interrupted.
fn remove_left_behind(temp: &Path) {
    for entry in std::fs::read_dir(temp).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(DIR_PREFIX)?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Somebody else's cannot be removed, and need not be.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Makes a directory for this process, which later runs remove if it does not do so itself.
pub(crate) fn private_dir() -> Result<PathBuf, String> {
    use std::os::unix::fs::DirBuilderExt;
    let temp = std::env::temp_dir();
    remove_left_behind(&temp);
    let dir = temp.join(format!("{DIR_PREFIX}{}", std::process::id()));
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&dir)
        .map_err(|e| format!("creating {}: {e}", dir.display()))?;
    Ok(dir)
}
