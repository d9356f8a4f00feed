//! One export, and the settings that all exports of a server share: of `rnbd export`, of the
//! configuration of a node, and of the command that adds one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bowline_block::backend::{self, Backend, BackendSpec, Filters, NbdUri};
use bowline_rnbd_driver::server::{Exports, FileOptions, Grant, ServerConfig};
use bowline_rtrs_driver::{
    Geometry, HbConfig,
    server::{AllowRule, ServerConfig as RtrsConfig, ServerLimits},
};
use serde::{Deserialize, Deserializer, de::Error as _};

use super::{
    Trouble,
    values::{allowed, block, filter, granted, positive},
};
use crate::{
    Failure, Outcome,
    config::entry::{Entry, field_parsers},
    values::{number, number32},
};

/// Default block size of exports in bytes.
const BLOCK: u32 = 512;
/// Largest block size in bytes.
const BLOCK_MAX: u64 = 4096;

/// An export, or all files below a folder.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct Export {
    /// Name by which clients open it.
    pub name: Option<String>,
    /// Size of an export of memory, zero at first and lost at the end.
    #[serde(deserialize_with = "bytes")]
    pub memory: Option<u64>,
    /// The file or block device that is exported.
    pub file: Option<PathBuf>,
    /// A folder of which every file is an export; it has no name.
    pub dir: Option<PathBuf>,
    /// The address of an export of an NBD server, which is exported.
    pub nbd_backend: Option<String>,
    /// No client may write.
    pub ro: bool,
    /// Go through the page cache of files.
    pub buffered: bool,
    /// Logical block size.
    #[serde(deserialize_with = "block_size")]
    pub block: u32,
    /// Who may open it: `MODE[@SESSION]`, of a folder's file `EXPORT=MODE[@SESSION]`.
    pub grant: Vec<String>,
    /// Faults and limits for tests, as `error=1%` and `delay-read=5ms`.
    pub filter: Vec<String>,
}

impl Default for Export {
    fn default() -> Self {
        Self {
            name: None,
            memory: None,
            file: None,
            dir: None,
            nbd_backend: None,
            ro: false,
            buffered: false,
            block: BLOCK,
            grant: Vec::new(),
            filter: Vec::new(),
        }
    }
}

field_parsers! {
    bytes: Option<u64> = |text| number(text).map(Some);
    block_size: u32 = block;
    depth: u16 = positive;
    chunk_bytes: u32 = number32;
    all_bytes: u64 = number;
}

impl Export {
    /// Parses the words that add an export, as `name=disk0 file=/srv/disk0`.
    pub fn of_words(text: &str) -> Result<Self, String> {
        Self::of_entry(Entry::of_words(text.split_ascii_whitespace())?)
    }

    /// Takes an export from an entry, and checks it.
    pub(super) fn of_entry(mut entry: Entry) -> Result<Self, String> {
        let export: Self = entry.group()?;
        entry.finish()?;
        export.grants().map(|_| export)
    }

    /// Checks what can be checked without the storage, and returns the export's grants.
    pub fn grants(&self) -> Result<Vec<Grant>, String> {
        let given = [
            (self.memory.is_some(), "memory"),
            (self.file.is_some(), "file"),
            (self.dir.is_some(), "dir"),
            (self.nbd_backend.is_some(), "nbd-backend"),
        ];
        let mut kinds = given.iter().filter(|(given, _)| *given).map(|(_, key)| *key);
        if let (Some(one), Some(other)) = (kinds.next(), kinds.next()) {
            return Err(format!("{other} cannot be used with {one}"));
        }
        let name = match (&self.name, &self.dir) {
            (Some(name), None) => Some(name),
            (None, Some(_)) => None,
            (Some(_), Some(_)) => return Err("dir cannot be used with name".to_owned()),
            (None, None) => return Err("a name is missing".to_owned()),
        };
        let block = self.block;
        match (self.memory, &self.file, &self.nbd_backend, name) {
            (Some(bytes), _, _, Some(name)) if bytes < u64::from(block) => {
                return Err(format!("{name} of {bytes} bytes is less than a block of {block}"));
            }
            (None, None, None, Some(_)) => {
                return Err("file, memory or nbd-backend is missing".to_owned());
            }
            _ => {}
        }
        self.uri()?;
        self.filters()?;
        let all = self.grant.iter().map(|text| match name {
            Some(name) => granted(&format!("{name}={text}")),
            None => granted(text),
        });
        all.collect()
    }

    fn uri(&self) -> Result<Option<NbdUri>, String> {
        self.nbd_backend.as_deref().map(str::parse).transpose()
    }

    fn filters(&self) -> Result<Filters, String> {
        let mut filters = Filters::default();
        self.filter.iter().try_for_each(|text| filter(text, &mut filters))?;
        Ok(filters)
    }

    /// Connects to the NBD server behind the export, if it has one: that takes a while.
    pub fn connect(&self) -> Result<Option<Arc<dyn Backend>>, Trouble> {
        let mistake = |text| Trouble::new(text, bowline_ctl::Errno::EINVAL);
        let Some(uri) = self.uri().map_err(mistake)? else { return Ok(None) };
        let spec = BackendSpec::Nbd { uri, read_only: self.ro, block: self.block };
        let opened = backend::open(spec).map_err(|error| {
            let uri = self.nbd_backend.as_deref().unwrap_or_default();
            // A server of one client at a time accepts no other one.
            let busy = match error.kind() {
                io::ErrorKind::TimedOut => {
                    " (does it serve one client at a time, as qemu-nbd without --shared?)"
                }
                _ => "",
            };
            Trouble::io(format!("NBD server {uri}: {error}{busy}"), &error)
        });
        opened.map(Some)
    }

    /// Opens the storage, and adds the export with its grants.
    pub fn add_to(&self, exports: &mut Exports) -> Result<(), Trouble> {
        self.add_connected(self.connect()?, exports)
    }

    /// As [`add_to`](Self::add_to), after [`connect`](Self::connect).
    pub fn add_connected(
        &self,
        connected: Option<Arc<dyn Backend>>,
        exports: &mut Exports,
    ) -> Result<(), Trouble> {
        let mistake = |text| Trouble::new(text, bowline_ctl::Errno::EINVAL);
        exports.set_filters(self.filters().map_err(mistake)?);
        let (ro, block) = (self.ro, self.block);
        let options = FileOptions { read_only: ro, block, direct: !self.buffered };
        let name = self.name.as_deref().unwrap_or_default();
        if let Some(backend) = connected {
            exports.backend(name, backend)?;
        }
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
        for grant in self.grants().map_err(mistake)? {
            exports.grant(grant)?;
        }
        Ok(())
    }

    /// Returns the size of what is exported in bytes, incomplete blocks included, if known.
    pub fn whole(&self) -> Option<u64> {
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

/// Settings of a server, which all its exports share.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct ServingConfig {
    /// Do not withdraw keys while requests are carried out.
    pub no_invalidate: bool,
    /// Queue depth of a session.
    #[serde(deserialize_with = "depth")]
    pub queue_depth: u16,
    /// Largest request in bytes, its message included.
    #[serde(deserialize_with = "chunk_bytes")]
    pub chunk: u32,
    /// Memory for the requests of all sessions together.
    #[serde(deserialize_with = "all_bytes")]
    pub session_memory: u64,
    /// Clients that are admitted; none stands for all.
    #[serde(deserialize_with = "rules")]
    pub allow: Vec<AllowRule>,
}

impl Default for ServingConfig {
    fn default() -> Self {
        Self {
            no_invalidate: false,
            queue_depth: 512,
            chunk: 128 << 10,
            session_memory: 1 << 30,
            allow: Vec::new(),
        }
    }
}

fn rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<AllowRule>, D::Error> {
    let texts = Vec::<String>::deserialize(deserializer)?;
    texts.iter().map(|text| allowed(text)).collect::<Result<_, _>>().map_err(D::Error::custom)
}

impl ServingConfig {
    /// Returns the settings of a server whose device gives a path up after `path_dead`.
    pub fn config(&self, path_dead: Duration) -> Outcome<ServerConfig> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str) -> Result<Export, String> {
        Export::of_words(words)
    }

    #[test]
    fn filters_are_as_said() {
        let filters = |words: &str| parsed(words)?.filters();
        let words = "name=a memory=4k filter=error=0.5%,seed=7 filter=delay-write=20ms,rate=10m/s";
        let mut wanted = Filters::default();
        (wanted.errors, wanted.seed) = (5000, 7);
        wanted.delay_write = Duration::from_millis(20);
        wanted.rate = std::num::NonZeroU64::new(10 << 20);
        assert_eq!(filters(words), Ok(wanted));
        assert_eq!(filters("name=a memory=4k filter=error=0.25").map(|f| f.errors), Ok(250_000));
        assert_eq!(filters("name=a memory=4k"), Ok(Filters::default()));
    }

    #[test]
    fn an_export_has_one_storage_and_a_name_unless_it_is_a_folder() {
        let grants = |words: &str| parsed(words)?.grants();
        let found = grants("name=a file=/srv/a grant=ro grant=rw@x").unwrap();
        assert_eq!((found.len(), found[1].export.as_str()), (2, "a"));
        assert_eq!(grants("dir=/srv grant=b=ro").unwrap()[0].export, "b");
        assert_eq!(grants("name=a memory=1MiB block=4k ro=true"), Ok(Vec::new()));
        for (words, wanted) in [
            ("", "a name is missing"),
            ("memory=4096", "a name is missing"),
            ("name=a", "file, memory or nbd-backend is missing"),
            ("name=a nbd-backend=x", "is not nbd://"),
            ("name=a nbd-backend=nbd://host/x file=b", "cannot be used with"),
            ("name=a memory=4096 filter=error=2", "is not a rate from 0 to 1"),
            ("name=a memory=4096 filter=delay=1", "is not error=RATE"),
            ("name=a memory=4096 filter=rate=0", "nothing passes"),
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
