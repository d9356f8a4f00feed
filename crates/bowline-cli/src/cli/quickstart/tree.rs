//! A tree of files that is written to a disk and read back: as a tar archive, because a file system
//! would need programs and rights that not every machine has.
//!
//! The result is compared with the tree as it was made, not with the archive or the folder: every
//! path and its kind, and for a file its size and its checksum.

use std::{
    collections::BTreeMap,
    fmt, fs,
    io::{self, BufReader, Read, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use bowline_block::{
    BlockDevice, Errno,
    sync::{self, Durable},
};

use super::message::Random;

/// Unit of requests in bytes: a multiple of every block size.
const BLOCK: usize = 4096;
/// Bytes of the requests to the disk.
const CHUNK: usize = 1 << 20;
/// Bytes of a file that are compared at a time.
const PIECE: usize = 64 << 10;
/// Number of files in a folder. The first is empty; the sizes of the others are below growing
/// powers of two.
const FILES: usize = 5;
const SMALLEST: usize = 8;
const POWERS: usize = 15;
/// Most differences whose texts are kept.
const PROBLEMS_MAX: usize = 5;

/// Folders and files get these names in turn, and a number. The last is too long for the oldest
/// kind of archive.
const NAMES: [&str; 6] = [
    "plain",
    "with some blanks",
    "größer",
    "文書",
    "имя",
    "so long that an archive has to keep it in a place of its own, which is what happens to names of \
     more than a hundred bytes",
];

/// The entries of a tree, by path.
#[derive(Debug, Default)]
pub(super) struct Tree(BTreeMap<PathBuf, Entry>);

/// The entry at a path.
#[derive(Debug, Eq, PartialEq)]
enum Entry {
    Folder,
    File { bytes: u64, checksum: u32 },
    Link(PathBuf),
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder => f.write_str("a folder"),
            Self::File { bytes, checksum } => {
                write!(f, "a file of {bytes} bytes with the checksum {checksum:08x}")
            }
            Self::Link(target) => write!(f, "a link to {target:?}"),
        }
    }
}

impl Tree {
    /// Makes a tree below `root`, which must not exist yet. The same seed makes the same tree.
    ///
    /// # Errors
    /// Errors of the file system.
    pub(super) fn make(root: &Path, seed: u64, folders: usize) -> io::Result<Self> {
        let mut tree = Self::default();
        let mut random = Random::new(seed);
        let mut paths = vec![PathBuf::new()];
        fs::create_dir(root)?;
        for folder in 0..=folders {
            if folder > 0 {
                let path = paths[folder / 3].join(name("folder", folder));
                fs::create_dir(root.join(&path))?;
                tree.0.insert(path.clone(), Entry::Folder);
                paths.push(path);
            }
            let mut last = PathBuf::new();
            for file in folder * FILES..(folder + 1) * FILES {
                let limit = 1_u64 << (SMALLEST + file % POWERS);
                let bytes = if file % FILES == 0 { 0 } else { random.next() >> 8 & (limit - 1) };
                last = name("file", file);
                let path = paths[folder].join(&last);
                let contents = contents(&mut random, bytes as usize);
                fs::write(root.join(&path), &contents)?;
                tree.0.insert(path, Entry::File { bytes, checksum: crc32fast::hash(&contents) });
            }
            let path = paths[folder].join(name("link", folder));
            std::os::unix::fs::symlink(&last, root.join(&path))?;
            tree.0.insert(path, Entry::Link(last));
        }
        Ok(tree)
    }

    /// Copies the tree below `root` to the disk; `go_on` is called with the number of bytes
    /// written.
    ///
    /// # Errors
    /// Errors of the file system or of the disk; `ENOSPC` without enough space.
    pub(super) fn copy(
        root: &Path,
        place: &Place<'_>,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> io::Result<()> {
        let writer = Writer { place: place.clone(), chunk: Vec::new(), copied: 0, go_on };
        let mut archive = tar::Builder::new(writer);
        archive.follow_symlinks(false);
        archive.sparse(false);
        archive.append_dir_all("", root)?;
        archive.into_inner()?.finish()
    }

    /// Reads the disk and returns the differences from the tree as it was made.
    pub(super) fn check(&self, place: &Place<'_>) -> Vec<String> {
        match Self::read(BufReader::with_capacity(CHUNK, place.clone())) {
            Ok(found) => self.differences(&found),
            Err(error) => vec![format!("the tree cannot be read: {error}")],
        }
    }

    fn read(archive: impl Read) -> io::Result<Self> {
        let mut tree = Self::default();
        let mut piece = vec![0; PIECE];
        for entry in tar::Archive::new(archive).entries()? {
            let mut entry = entry?;
            let path = entry.path()?.into_owned();
            let what = match entry.header().entry_type() {
                tar::EntryType::Directory => Entry::Folder,
                tar::EntryType::Symlink => {
                    Entry::Link(entry.link_name()?.unwrap_or_default().into_owned())
                }
                tar::EntryType::Regular => file(&mut entry, &mut piece)?,
                other => return Err(io::Error::other(format!("{path:?} is a {other:?}"))),
            };
            if tree.0.insert(path.clone(), what).is_some() {
                return Err(io::Error::other(format!("{path:?} is there twice")));
            }
        }
        Ok(tree)
    }

    fn differences(&self, found: &Self) -> Vec<String> {
        let wrong = self.0.iter().filter_map(|(path, made)| match found.0.get(path) {
            None => Some(format!("{path:?} is missing")),
            Some(there) if there == made => None,
            Some(there) => Some(format!("{path:?} is {there}, not {made}")),
        });
        let more = found.0.keys().filter(|path| !self.0.contains_key(*path));
        let more = more.map(|path| format!("{path:?} should not be there"));
        wrong.chain(more).take(PROBLEMS_MAX).collect()
    }

    /// Returns how many folders there are.
    pub(super) fn folders(&self) -> u64 {
        self.0.values().filter(|entry| **entry == Entry::Folder).count() as u64
    }

    /// Returns how many files there are, links not counted.
    pub(super) fn files(&self) -> u64 {
        self.0.values().filter(|entry| matches!(entry, Entry::File { .. })).count() as u64
    }

    /// Returns the bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |entry: &Entry| if let Entry::File { bytes, .. } = entry { *bytes } else { 0 };
        self.0.values().map(bytes).sum()
    }
}

fn name(kind: &str, number: usize) -> PathBuf {
    PathBuf::from(format!("{} {kind} {number}", NAMES[number % NAMES.len()]))
}

fn contents(random: &mut Random, bytes: usize) -> Vec<u8> {
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    words.take(bytes).collect()
}

fn file(contents: &mut impl Read, piece: &mut [u8]) -> io::Result<Entry> {
    let mut hasher = crc32fast::Hasher::new();
    let mut bytes = 0;
    loop {
        let len = contents.read(piece)?;
        if len == 0 {
            return Ok(Entry::File { bytes, checksum: hasher.finalize() });
        }
        hasher.update(&piece[..len]);
        bytes += len as u64;
    }
}

/// A part of a disk, in whole blocks. Reads begin at its start, and remove what was read from it.
#[derive(Clone)]
pub(super) struct Place<'a> {
    pub(super) disk: &'a dyn BlockDevice,
    pub(super) range: Range<u64>,
}

impl Read for Place<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let room = (self.range.end - self.range.start) as usize;
        let len = out.len().min(CHUNK).min(room) / BLOCK * BLOCK;
        if len > 0 {
            sync::read_at(self.disk, self.range.start, &mut out[..len]).map_err(error)?;
            self.range.start += len as u64;
        }
        Ok(len)
    }
}

/// Collects written bytes until they fill a request.
struct Writer<'a> {
    place: Place<'a>,
    chunk: Vec<u8>,
    copied: u64,
    go_on: &'a mut dyn FnMut(u64) -> bool,
}

impl Writer<'_> {
    fn put(&mut self) -> io::Result<()> {
        self.chunk.resize(self.chunk.len().next_multiple_of(BLOCK), 0);
        let (at, len) = (self.place.range.start, self.chunk.len() as u64);
        if len > self.place.range.end - at {
            return Err(error(Errno::ENOSPC));
        }
        sync::write_at(self.place.disk, at, &self.chunk, Durable::Later).map_err(error)?;
        self.place.range.start += len;
        self.chunk.clear();
        self.copied += len;
        if (self.go_on)(self.copied) { Ok(()) } else { Err(io::Error::other("stopped")) }
    }

    fn finish(mut self) -> io::Result<()> {
        self.put()?;
        sync::flush(self.place.disk).map_err(error)
    }
}

impl Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(CHUNK - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..len]);
        if self.chunk.len() == CHUNK {
            self.put()?;
        }
        Ok(len)
    }

    /// Nothing: only whole blocks can be written, and [`Self::finish`] fills the last.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn error(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno.0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bowline_block::{
        LocalDevice,
        backend::{BackendSpec, open},
    };

    use super::*;
    use crate::cli::quickstart::disk::Folder;

    const START: u64 = 64 << 10;
    const END: u64 = 16 << 20;

    fn disk() -> Arc<dyn BlockDevice> {
        let backend = open(BackendSpec::Memory { bytes: END, block: 4096 }).unwrap();
        LocalDevice::new("ram", backend)
    }

    fn place(disk: &dyn BlockDevice) -> Place<'_> {
        Place { disk, range: START..END }
    }

    /// A small tree, in a folder that is removed at the end.
    fn tree() -> (Folder, PathBuf, Tree) {
        let folder = Folder::new().unwrap();
        let root = folder.path("tree");
        let tree = Tree::make(&root, 7, 6).unwrap();
        (folder, root, tree)
    }

    fn copied(root: &Path) -> Arc<dyn BlockDevice> {
        let disk = disk();
        Tree::copy(root, &place(&*disk), &mut |_| true).unwrap();
        disk
    }

    #[test]
    fn a_tree_comes_back_as_it_was_made() {
        let (_folder, root, tree) = tree();
        assert_eq!((tree.folders(), tree.files()), (6, 35));
        assert!(tree.0.values().any(|entry| matches!(entry, Entry::File { bytes: 0, .. })));
        assert!(tree.0.keys().any(|path| path.to_str().is_some_and(|path| !path.is_ascii())));
        assert!(tree.0.keys().any(|path| path.as_os_str().len() > 100));
        let disk = copied(&root);
        assert_eq!(tree.check(&place(&*disk)), Vec::<String>::new());
        // Blocks before the place are not touched.
        let mut before = vec![1; START as usize];
        sync::read_at(&*disk, 0, &mut before).unwrap();
        assert!(before.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn the_seed_decides_what_is_in_the_tree() {
        let folder = Folder::new().unwrap();
        let made = |name, seed| Tree::make(&folder.path(name), seed, 6).unwrap();
        let first = made("first", 7);
        assert_eq!(made("again", 7).0, first.0);
        assert!(!made("other", 8).differences(&first).is_empty());
    }

    #[test]
    fn a_changed_lost_or_new_file_is_noticed() {
        let (_folder, root, tree) = tree();
        let (path, bytes) = tree
            .0
            .iter()
            .find_map(|(path, entry)| match entry {
                Entry::File { bytes, .. } if *bytes > 1000 => Some((path, *bytes)),
                _ => None,
            })
            .unwrap();
        let there = root.join(path);
        let good = fs::read(&there).unwrap();
        let mut changed = good.clone();
        changed[500] ^= 1;
        for (contents, what) in
            [(&changed[..], "with the checksum"), (&good[1..], &format!("not a file of {bytes}"))]
        {
            fs::write(&there, contents).unwrap();
            let wrong = tree.check(&place(&*copied(&root)));
            assert_eq!(wrong.len(), 1, "{wrong:?}");
            assert!(wrong[0].contains(&format!("{path:?}")) && wrong[0].contains(what));
        }
        fs::remove_file(&there).unwrap();
        assert_eq!(tree.check(&place(&*copied(&root))), [format!("{path:?} is missing")]);
        std::os::unix::fs::symlink("elsewhere", &there).unwrap();
        let wrong = tree.check(&place(&*copied(&root)));
        assert!(wrong.len() == 1 && wrong[0].contains("is a link to \"elsewhere\""), "{wrong:?}");
        fs::remove_file(&there).unwrap();
        fs::write(&there, &good).unwrap();
        fs::create_dir(root.join("more")).unwrap();
        let wrong = tree.check(&place(&*copied(&root)));
        assert_eq!(wrong, ["\"more\" should not be there"]);
    }

    #[test]
    fn a_damaged_archive_is_noticed() {
        let (_folder, root, tree) = tree();
        let disk = disk();
        let mut end = 0;
        let mut go_on = |copied| {
            end = START + copied;
            true
        };
        Tree::copy(&root, &place(&*disk), &mut go_on).unwrap();
        let blocks: Vec<u64> = (START..end).step_by(BLOCK).collect();
        // The last block may hold nothing but the end of the archive.
        for at in blocks[..blocks.len() - 1].iter().step_by(blocks.len() / 20) {
            let mut good = vec![0; BLOCK];
            sync::read_at(&*disk, *at, &mut good).unwrap();
            let bad: Vec<u8> = good.iter().map(|byte| !byte).collect();
            sync::write_at(&*disk, *at, &bad, Durable::Later).unwrap();
            assert!(!tree.check(&place(&*disk)).is_empty(), "block at {at}");
            sync::write_at(&*disk, *at, &vec![0; BLOCK], Durable::Later).unwrap();
            assert!(!tree.check(&place(&*disk)).is_empty(), "no block at {at}");
            sync::write_at(&*disk, *at, &good, Durable::Later).unwrap();
        }
        assert_eq!(tree.check(&place(&*disk)), Vec::<String>::new());
        assert!(!tree.check(&Place { disk: &*disk, range: START..START + 8192 }).is_empty());
    }

    #[test]
    fn a_place_that_is_too_small_and_a_wish_to_stop_end_the_copy() {
        let (_folder, root, _) = tree();
        let disk = disk();
        let small = Place { disk: &*disk, range: START..START + 8192 };
        let error = Tree::copy(&root, &small, &mut |_| true).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ENOSPC.0));
        let error = Tree::copy(&root, &place(&*disk), &mut |_| false).unwrap_err();
        assert_eq!(error.to_string(), "stopped");
    }
}
