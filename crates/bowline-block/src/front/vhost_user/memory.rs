//! The memory of a machine: files that its process shares, and where the guest sees them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bowline_verbs::Buffer;

use super::log::DirtyLog;
use super::ring::used_len;
use super::wire::{RegionSpec, RingAddresses};
use crate::device::{BlockDevice, DeviceMem};

/// Most bytes of memory of one machine; all machines together must leave addresses to the process.
const BYTES_MAX: usize = 4 << 40;

/// A file of memory, mapped whole.
pub(super) struct MappedFile {
    /// Device and number, by which the file is known when it comes again.
    id: (u64, u64),
    pub(super) buffer: Arc<Buffer>,
    /// Its registration; without one, data is copied.
    pub(super) registered: Option<DeviceMem>,
}

struct Region {
    spec: RegionSpec,
    /// Index of its file.
    file: usize,
}

/// All memory of a machine, as of one message.
#[derive(Default)]
pub(super) struct GuestMemory {
    pub(super) files: Vec<Arc<MappedFile>>,
    regions: Vec<Region>,
}

/// Bytes in one file of memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    /// Index of the file.
    pub(super) file: usize,
    pub(super) at: usize,
    pub(super) len: usize,
}

/// A part of a ring.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) buffer: Arc<Buffer>,
    pub(super) at: usize,
}

impl GuestMemory {
    /// Maps files that `before` does not have, and registers them with the disk.
    pub(super) fn new(
        disk: &dyn BlockDevice,
        before: &Self,
        regions: &[RegionSpec],
        fds: Vec<OwnedFd>,
    ) -> Result<Self, String> {
        if fds.len() != regions.len() {
            return Err(format!("{} regions of memory with {} files", regions.len(), fds.len()));
        }
        let mut memory = Self::default();
        for (spec, fd) in regions.iter().zip(fds) {
            let file = memory.add_file(disk, before, &fd).map_err(|error| no_memory(&error))?;
            let inside = spec.offset.checked_add(spec.len).is_some_and(|end| {
                usize::try_from(end).is_ok_and(|end| end <= memory.files[file].buffer.len())
            });
            let fits = spec.guest.checked_add(spec.len).is_some()
                && spec.user.checked_add(spec.len).is_some();
            if !inside || !fits {
                return Err("a region of memory lies outside of its file".to_owned());
            }
            memory.regions.push(Region { spec: *spec, file });
        }
        Ok(memory)
    }

    /// Returns the index of a file, which is mapped unless it is already.
    fn add_file(
        &mut self,
        disk: &dyn BlockDevice,
        before: &Self,
        fd: &OwnedFd,
    ) -> io::Result<usize> {
        let stat = rustix::fs::fstat(fd)?;
        let id = (stat.st_dev, stat.st_ino);
        if let Some(at) = self.files.iter().position(|file| file.id == id) {
            return Ok(at);
        }
        let known = before.files.iter().find(|file| {
            file.id == id && usize::try_from(stat.st_size).is_ok_and(|len| len == file.buffer.len())
        });
        let file = match known {
            Some(known) => Arc::clone(known),
            None => {
                let room =
                    BYTES_MAX - self.files.iter().map(|file| file.buffer.len()).sum::<usize>();
                if usize::try_from(stat.st_size).is_ok_and(|len| len > room) {
                    return Err(io::ErrorKind::OutOfMemory.into());
                }
                let buffer = Arc::new(Buffer::from_memfd(fd)?);
                let registered = disk.register(Arc::clone(&buffer)).ok();
                Arc::new(MappedFile { id, buffer, registered })
            }
        };
        self.files.push(file);
        Ok(self.files.len() - 1)
    }

    /// Appends the pieces of memory that the guest has at an address; `None`, with some of them
    /// appended, when it does not have all.
    pub(super) fn pieces(&self, mut guest: u64, mut len: u64, out: &mut Vec<Piece>) -> Option<()> {
        while len > 0 {
            let region = self.regions.iter().find(|region| {
                guest.checked_sub(region.spec.guest).is_some_and(|at| at < region.spec.len)
            })?;
            let at = guest - region.spec.guest;
            let n = len.min(region.spec.len - at);
            // Within the file, as `new` checked, so it fits.
            let (at, n_bytes) = ((region.spec.offset + at) as usize, n as usize);
            match out.last_mut() {
                Some(last) if last.file == region.file && last.at + last.len == at => {
                    last.len += n_bytes;
                }
                _ => out.push(Piece { file: region.file, at, len: n_bytes }),
            }
            (guest, len) = (guest.checked_add(n)?, len - n);
        }
        Some(())
    }

    /// Returns the place of guest memory that lies in one region.
    pub(super) fn whole(&self, guest: u64, len: u64) -> Option<Part> {
        let mut pieces = Vec::new();
        self.pieces(guest, len, &mut pieces)?;
        let [piece] = pieces[..] else { return None };
        Some(Part { buffer: Arc::clone(&self.files[piece.file].buffer), at: piece.at })
    }

    /// Returns the place of a ring's part, by its address in the machine's process.
    fn part(&self, user: u64, len: u64, alignment: usize) -> Option<Part> {
        let region = self.regions.iter().find(|region| {
            let at = user.checked_sub(region.spec.user);
            at.is_some_and(|at| at < region.spec.len && len <= region.spec.len - at)
        })?;
        let at = (region.spec.offset + (user - region.spec.user)) as usize;
        let buffer = Arc::clone(&self.files[region.file].buffer);
        at.is_multiple_of(alignment).then_some(Part { buffer, at })
    }

    /// Returns the places of a ring's descriptors, of what is available, and of what was used.
    pub(super) fn ring(&self, addresses: &RingAddresses, size: u16) -> Option<[Part; 3]> {
        let (used, size) = (used_len(size), u64::from(size));
        Some([
            self.part(addresses.descriptors, 16 * size, 8)?,
            self.part(addresses.available, 6 + 2 * size, 2)?,
            self.part(addresses.used, used, 2)?,
        ])
    }

    /// Tells whether a log has bits for all of it.
    pub(super) fn fits(&self, log: &DirtyLog) -> bool {
        let mut specs = self.regions.iter().map(|region| region.spec);
        specs.all(|spec| spec.len == 0 || log.holds(spec.guest, spec.len))
    }

    /// Marks a piece as written, at every place where the guest sees it.
    pub(super) fn mark(&self, log: &DirtyLog, piece: &Piece) {
        for Region { spec, .. } in self.regions.iter().filter(|region| region.file == piece.file) {
            // Within the file, as `new` checked, so it fits.
            let (offset, len) = (spec.offset as usize, spec.len as usize);
            let begin = piece.at.max(offset);
            let end = (piece.at + piece.len).min(offset + len);
            if begin < end {
                log.mark(spec.guest + (begin - offset) as u64, end - begin);
            }
        }
    }

    /// Appends the bytes of a piece.
    pub(super) fn append(&self, piece: &Piece, out: &mut Vec<u8>) {
        self.files[piece.file].buffer.append_to(piece.at, piece.len, out);
    }

    /// Writes bytes to the beginning of pieces, as many as there is room for; returns their number.
    pub(super) fn write(&self, pieces: &[Piece], mut bytes: &[u8]) -> usize {
        let before = bytes.len();
        for piece in pieces {
            let (now, later) = bytes.split_at(bytes.len().min(piece.len));
            self.files[piece.file].buffer.write(piece.at, now);
            bytes = later;
        }
        before - bytes.len()
    }
}

/// Says why a file of memory cannot be used, and what to do.
fn no_memory(error: &io::Error) -> String {
    const USE: &str = "give the machine memory-backend-memfd,share=on";
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("its memory cannot be mapped, or is a file that can become shorter: {USE}")
        }
        io::ErrorKind::InvalidInput => format!("its memory is not shared as a memfd: {USE}"),
        _ => format!("its memory cannot be mapped: {error}"),
    }
}
