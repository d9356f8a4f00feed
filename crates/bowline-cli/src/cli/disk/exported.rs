//! One export, and the options that all exports of a server share: of `rnbd export`, of the
//! configuration of a node, and of the command that adds one.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use bowline_block::backend::{self, BackendSpec};
use bowline_node::{
    Failure, Outcome,
    values::{number, number32},
};
use bowline_rnbd_driver::server::{Exports, FileOptions, Grant, ServerConfig};
use bowline_rtrs_driver::{
    Geometry, HbConfig,
    server::{AllowRule, ServerConfig as RtrsConfig, ServerLimits},
};
use bowline_wire::rnbd::Access;

use super::trouble::Trouble;

/// Default block size of exports in bytes.
const BLOCK: &str = "512";
/// Largest block size in bytes.
const BLOCK_MAX: u64 = 4096;

/// Options of the storage behind an export.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Storage {
    /// No client may write
    #[arg(long)]
    ro: bool,
    /// Go through the page cache of files
    #[arg(long)]
    buffered: bool,
    /// Logical block size of exports
    #[arg(long, value_name = "BYTES", default_value = BLOCK, value_parser = block)]
    block: u32,
}

/// An export, or all files below a folder.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Export {
    /// Name by which clients open it
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Size of an export of memory, zero at first and lost at the end
    #[arg(long, value_name = "BYTES", value_parser = number)]
    pub(super) memory: Option<u64>,
    /// The file or block device that is exported
    #[arg(long, value_name = "PATH", conflicts_with = "memory")]
    pub(super) file: Option<PathBuf>,
    /// A folder of which every file is an export; it has no name
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["memory", "file", "name"])]
    pub(super) dir: Option<PathBuf>,
    #[command(flatten)]
    pub(super) storage: Storage,
    /// Who may open it: MODE[@SESSION], of a folder's file EXPORT=MODE[@SESSION]
    #[arg(long, value_name = "ro|rw|migration[@SESSION]")]
    pub(super) grant: Vec<String>,
}

impl Export {
    /// Checks what can be checked without the storage, and returns the export's grants.
    pub(super) fn grants(&self) -> Result<Vec<Grant>, String> {
        let name = match (&self.name, &self.dir) {
            (Some(name), None) => Some(name),
            (None, Some(_)) => None,
            _ => return Err("a name is missing".to_owned()),
        };
        let block = self.storage.block;
        match (self.memory, &self.file, name) {
            (Some(bytes), _, Some(name)) if bytes < u64::from(block) => {
                return Err(format!("{name} of {bytes} bytes is less than a block of {block}"));
            }
            (None, None, Some(_)) => return Err("file or memory is missing".to_owned()),
            _ => {}
        }
        let all = self.grant.iter().map(|text| match name {
            Some(name) => granted(&format!("{name}={text}")),
            None => granted(text),
        });
        all.collect()
    }

    /// Opens the storage, and adds the export with its grants.
    pub(super) fn add_to(&self, exports: &mut Exports) -> Result<(), Trouble> {
        let Storage { ro, buffered, block } = self.storage;
        let options = FileOptions { read_only: ro, block, direct: !buffered };
        let name = self.name.as_deref().unwrap_or_default();
        match (self.memory, &self.file, &self.dir) {
            (Some(bytes), ..) => {
                let backend = backend::open(BackendSpec::Memory { bytes, block })
                    .map_err(|error| Trouble::io(format!("memory for {name}: {error}"), &error))?;
                exports.backend(name, backend)?;
                if ro {
                    exports.set_read_only(name)?;
                }
            }
            (_, Some(path), _) => exports.file(name, path, options)?,
            (_, _, Some(dir)) => exports.directory(dir, options)?,
            _ => {}
        }
        let grants = self.grants().map_err(|text| Trouble::new(text, bowline_ctl::Errno::EINVAL));
        for grant in grants? {
            exports.grant(grant)?;
        }
        Ok(())
    }

    /// Returns the size of what is exported in bytes, incomplete blocks included, if known.
    pub(super) fn whole(&self) -> Option<u64> {
        let file = |path: &Path| fs::metadata(path).ok().filter(fs::Metadata::is_file);
        self.memory.or_else(|| self.file.as_deref().and_then(file).map(|meta| meta.len()))
    }
}

/// Returns a text about the remainder of `whole` bytes that is not exported, if there is one.
pub(super) fn left_out(whole: u64, bytes: u64) -> Option<String> {
    // More than a block is no remainder: the file has grown since.
    let left = whole.checked_sub(bytes).filter(|left| (1..BLOCK_MAX).contains(left))?;
    Some(format!(
        "the last {left} of its {whole} bytes are not exported, since disks consist of whole blocks (--block)"
    ))
}

/// Options of a server, which all its exports share.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Serving {
    /// Do not invalidate memory keys while a request is executed: faster, for trusted clients
    #[arg(long)]
    pub(super) no_invalidate: bool,
    /// Queue depth of a session
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(1..))]
    queue_depth: u16,
    /// Largest request in bytes, including its message
    #[arg(long, value_name = "BYTES", default_value = "128k", value_parser = number32)]
    chunk: u32,
    /// Memory for the requests of all sessions together. A session reserves its queue depth times
    /// its largest request, 64 MiB by default, which is allocated as it is used; a session that
    /// does not fit is refused
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = number)]
    session_memory: u64,
    /// Accept these clients only: an address or a network, with a pattern of session names; may be
    /// repeated. Without it, all clients
    #[arg(long, value_name = "ADDRESS[/BITS][=SESSION]", value_parser = allowed)]
    allow: Vec<AllowRule>,
}

impl Serving {
    /// Returns the settings of a server whose device gives a path up after `path_dead`.
    pub(super) fn config(&self, path_dead: Duration) -> Outcome<ServerConfig> {
        let defaults = ServerConfig::default();
        let header = defaults.rtrs.geometry.max_hdr();
        let max_io = self.chunk.saturating_sub(header);
        let geometry = Geometry::new(self.queue_depth, max_io, header).map_err(|error| {
            Failure::usage(format!(
                "--queue-depth {} with --chunk {}: {error}; a chunk has at least 8192 bytes, and \
                 those of a session at most 256 MiB",
                self.queue_depth, self.chunk
            ))
        })?;
        let memory = usize::try_from(self.session_memory).unwrap_or(usize::MAX);
        let rtrs = RtrsConfig {
            geometry,
            always_invalidate: !self.no_invalidate,
            allow: self.allow.clone(),
            heartbeat: HbConfig { path_dead, ..defaults.rtrs.heartbeat },
            limits: ServerLimits { memory, ..defaults.rtrs.limits },
            ..defaults.rtrs
        };
        if rtrs.sessions_max() == 0 {
            return Err(Failure::usage(format!(
                "--session-memory of {memory} bytes is less than the {} of one session: --queue-depth {} times \
                 --chunk {}",
                rtrs.session_bytes(),
                self.queue_depth,
                self.chunk
            )));
        }
        Ok(ServerConfig { rtrs, ..defaults })
    }
}

/// Parses `EXPORT=MODE[@SESSION]`.
pub(super) fn granted(text: &str) -> Result<Grant, String> {
    let bad =
        || format!("\"{text}\" is not EXPORT=ro|rw|migration[@SESSION] such as disk0=rw@host*");
    let (export, how) = text.split_once('=').ok_or_else(bad)?;
    // Names of sessions may contain @ too, as in client@server.
    let (mode, session) = match how.split_once('@') {
        Some((mode, session)) => (mode, Some(session.to_owned())),
        None => (how, None),
    };
    let all = [Access::Ro, Access::Rw, Access::Migration];
    let most = all.into_iter().find(|access| access.name() == mode).ok_or_else(bad)?;
    if export.is_empty() || session.as_ref().is_some_and(String::is_empty) {
        return Err(bad());
    }
    Ok(Grant { export: export.to_owned(), max_access: most, session })
}

/// Parses a block size.
fn block(text: &str) -> Result<u32, String> {
    match number32(text)? {
        size @ (512 | 1024 | 2048 | 4096) => Ok(size),
        size => Err(format!("{size} is not 512, 1024, 2048 or 4096")),
    }
}

/// Parses `ADDRESS[/BITS][=SESSION]`.
fn allowed(text: &str) -> Result<AllowRule, String> {
    let bad = || format!("\"{text}\" is not ADDRESS[/BITS][=SESSION] such as 10.1.0.0/16=host*");
    let (network, name) = match text.split_once('=') {
        Some((network, name)) => (network, Some(name.to_owned())),
        None => (text, None),
    };
    let (addr, bits) = match network.split_once('/') {
        Some((addr, bits)) => (addr, Some(bits)),
        None => (network, None),
    };
    let addr: IpAddr = addr.parse().map_err(|_| bad())?;
    let most = if addr.is_ipv4() { 32 } else { 128 };
    let prefix = match bits {
        Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(bad)?,
        None => most,
    };
    Ok(AllowRule { addr, prefix, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_networks_and_sessions() {
        // tests [RT-64]
        let rule = allowed("10.1.0.0/16=host*").unwrap();
        assert_eq!((rule.prefix, rule.name.as_deref()), (16, Some("host*")));
        assert_eq!(allowed("fd00::1").unwrap().prefix, 128);
        for text in ["", "host", "10.0.0.1/33", "10.0.0.1/x", "/8"] {
            assert!(allowed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn grants_name_exports_modes_and_sessions() {
        // tests [NB-50]
        let grant = granted("disk0=rw@vm*@host").unwrap();
        assert_eq!((grant.export.as_str(), grant.max_access), ("disk0", Access::Rw));
        assert_eq!(grant.session.as_deref(), Some("vm*@host"));
        assert_eq!(granted("a/b=migration").unwrap().session, None);
        for text in ["", "disk0", "=ro", "disk0=", "disk0=w", "disk0=ro@"] {
            assert!(granted(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_export_has_one_storage_and_a_name_unless_it_is_a_folder() {
        use super::super::words::{of_words, parse};
        let grants = |words: &str| {
            let export: Export = parse(&of_words(words.split_ascii_whitespace())?)?;
            export.grants()
        };
        let found = grants("name=a file=/srv/a grant=ro grant=rw@x").unwrap();
        assert_eq!((found.len(), found[1].export.as_str()), (2, "a"));
        assert_eq!(grants("dir=/srv grant=b=ro").unwrap()[0].export, "b");
        assert_eq!(grants("name=a memory=1MiB block=4k ro=true"), Ok(Vec::new()));
        for (words, wanted) in [
            ("", "a name is missing"),
            ("memory=4096", "a name is missing"),
            ("name=a", "file or memory is missing"),
            ("name=a memory=511", "a of 511 bytes is less than a block of 512"),
            ("name=a file=b memory=1", "cannot be used with"),
            ("name=a dir=b", "cannot be used with"),
            ("name=a file=b block=1000", "1000 is not 512, 1024, 2048 or 4096"),
            ("name=a file=b grant=w", "is not EXPORT=ro|rw"),
        ] {
            let error = grants(words).unwrap_err();
            assert!(error.contains(wanted), "{words}: {error}");
        }
    }
}
