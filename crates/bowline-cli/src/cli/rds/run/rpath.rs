//! Libraries that a program has by a path of its own (DT_RPATH), which the loader searches before
//! `LD_LIBRARY_PATH`.

use std::{
    ffi::OsStr,
    fs::File,
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path, PathBuf},
};

/// Most program headers, and bytes of a table, that are read.
const HEADERS_MAX: usize = 64;
const TABLE_MAX: usize = 1 << 20;
const HEADER_LEN: usize = 56;

const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
const DT_RPATH: u64 = 15;
const DT_RUNPATH: u64 = 29;

/// The first of these libraries that a program has there; `None` for a file that is no such
/// program. With DT_RUNPATH, which is searched later, DT_RPATH does not count.
pub(super) fn library(program: &Path, names: &[&str]) -> Option<PathBuf> {
    let path = rpath(&File::open(program).ok()?)?;
    let origin = program.canonicalize().ok()?;
    let origin = origin.parent()?.to_str()?;
    let folders = path.split(':').filter(|folder| !folder.is_empty());
    let folders =
        folders.map(|folder| folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin));
    let places =
        folders.flat_map(|folder| names.iter().map(move |name| Path::new(&folder).join(name)));
    places.into_iter().find(|place| place.is_file())
}

/// DT_RPATH of a 64-bit ELF file.
fn rpath(file: &File) -> Option<String> {
    let head = read(file, 0, 64)?;
    if !head.starts_with(b"\x7fELF\x02") {
        return None;
    }
    let count = usize::from(u16::from_ne_bytes(head[56..58].try_into().ok()?));
    let headers = read(file, long(&head, 32)?, count.min(HEADERS_MAX) * HEADER_LEN)?;
    // Kind, place in the file, address, length in the file.
    let segments = headers.chunks_exact(HEADER_LEN).filter_map(|header| {
        let kind = u32::from_ne_bytes(header[..4].try_into().ok()?);
        Some([u64::from(kind), long(header, 8)?, long(header, 16)?, long(header, 32)?])
    });
    let segments: Vec<_> = segments.collect();
    let [_, offset, _, len] = *segments.iter().find(|segment| segment[0] == PT_DYNAMIC)?;
    let dynamic = read(file, offset, usize::try_from(len).ok()?.min(TABLE_MAX))?;
    let value = |tag| {
        let mut entries = dynamic.chunks_exact(16);
        entries.find(|entry| long(entry, 0) == Some(tag)).and_then(|entry| long(entry, 8))
    };
    if value(DT_RUNPATH).is_some() {
        return None;
    }
    let (at, names, len) = (value(DT_RPATH)?, value(DT_STRTAB)?, value(DT_STRSZ)?);
    let place = segments.iter().find_map(|[kind, offset, address, len]| {
        let within = names.checked_sub(*address).filter(|within| within < len)?;
        (*kind == PT_LOAD).then_some(offset.checked_add(within)?)
    })?;
    let names = read(file, place, usize::try_from(len).ok()?.min(TABLE_MAX))?;
    let text = names.get(usize::try_from(at).ok()?..)?.split(|byte| *byte == 0).next()?;
    OsStr::from_bytes(text).to_str().map(str::to_owned)
}

fn read(file: &File, at: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
