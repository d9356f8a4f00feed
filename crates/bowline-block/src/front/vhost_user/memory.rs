//! The memory of a machine: files that its process shares, and where the guest sees them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bowline_verbs::Buffer;

use super::log::DirtyLog;
use super::ring::used_len;
use super::wire::{RegionSpec, RingAddresses, SLOTS_MAX};
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

#[derive(Clone, Copy)]
struct Region {
    spec: RegionSpec,
    /// Index of its file.
    file: usize,
}

impl Region {
    fn end(&self) -> u64 {
        // Both are in the range of numbers, as `add` checked.
        self.spec.guest + self.spec.len
    }
}

/// All memory of a machine, as of one message.
#[derive(Clone, Default)]
pub(super) struct GuestMemory {
    pub(super) files: Vec<Arc<MappedFile>>,
    /// In the order of their addresses in the guest, none of which two of them have.
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

/// Memory that a machine had and has no longer.
pub(super) struct Removed {
    file: Arc<MappedFile>,
    at: usize,
    len: usize,
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
            memory.add(disk, before, spec, &fd)?;
        }
        Ok(memory)
    }

    /// Returns this memory and another region.
    pub(super) fn with(
        &self,
        disk: &dyn BlockDevice,
        spec: &RegionSpec,
        fd: &OwnedFd,
    ) -> Result<Self, String> {
        if self.regions.len() >= SLOTS_MAX {
            return Err(format!("more than {SLOTS_MAX} regions of memory"));
        }
        let mut memory = self.clone();
        memory.add(disk, self, spec, fd)?;
        Ok(memory)
    }

    /// Returns this memory without a region, and without its file if no other region is there.
    /// `None`: there is no such region.
    pub(super) fn without(&self, spec: &RegionSpec) -> Option<Self> {
        let place = |spec: &RegionSpec| (spec.guest, spec.len, spec.user);
        let is_it = |region: &Region| place(&region.spec) == place(spec);
        let removed = self.regions.iter().position(is_it)?;
        let mut memory = Self::default();
        for (_, region) in self.regions.iter().enumerate().filter(|(index, _)| *index != removed) {
            let file = &self.files[region.file];
            let known = memory.files.iter().position(|known| Arc::ptr_eq(known, file));
            let file = known.unwrap_or_else(|| {
                memory.files.push(Arc::clone(file));
                memory.files.len() - 1
            });
            memory.regions.push(Region { file, ..*region });
        }
        Some(memory)
    }

    /// Returns what `after` has no longer.
    pub(super) fn removed(&self, after: &Self) -> Vec<Removed> {
        let stays = |region: &&Region| {
            let file = &self.files[region.file];
            after.regions.iter().any(|other| {
                other.spec == region.spec && Arc::ptr_eq(file, &after.files[other.file])
            })
        };
        let removed = self.regions.iter().filter(|region| !stays(region));
        let removed = removed.map(|region| Removed {
            file: Arc::clone(&self.files[region.file]),
            // Within the file, as `add` checked, so it fits.
            at: region.spec.offset as usize,
            len: region.spec.len as usize,
        });
        removed.collect()
    }

    /// Tells whether a piece is in memory that was removed.
    pub(super) fn is_in(&self, piece: &Piece, removed: &Removed) -> bool {
        Arc::ptr_eq(&self.files[piece.file], &removed.file)
            && piece.at < removed.at + removed.len
            && removed.at < piece.at + piece.len
    }

    fn add(
        &mut self,
        disk: &dyn BlockDevice,
        before: &Self,
        spec: &RegionSpec,
        fd: &OwnedFd,
    ) -> Result<(), String> {
        let fits =
            spec.guest.checked_add(spec.len).is_some() && spec.user.checked_add(spec.len).is_some();
        if spec.len == 0 || !fits {
            return Err("a region of memory without bytes or addresses".to_owned());
        }
        let file = self.add_file(disk, before, fd).map_err(|error| no_memory(&error))?;
        let region = Region { spec: *spec, file };
        let inside = spec.offset.checked_add(spec.len).is_some_and(|end| {
            usize::try_from(end).is_ok_and(|end| end <= self.files[file].buffer.len())
        });
        if !inside {
            return Err("a region of memory lies outside of its file".to_owned());
        }
        let at = self.regions.partition_point(|other| other.spec.guest < spec.guest);
        let is_free =
            |other: &Region| other.end() <= region.spec.guest || region.end() <= other.spec.guest;
        if !self.regions[at.saturating_sub(1)..].iter().take(2).all(is_free) {
            return Err("regions of memory overlap".to_owned());
        }
        self.regions.insert(at, region);
        Ok(())
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
        let is_it = |file: &Arc<MappedFile>| {
            file.id == id && usize::try_from(stat.st_size).is_ok_and(|len| len == file.buffer.len())
        };
        if let Some(at) = self.files.iter().position(is_it) {
            return Ok(at);
        }
        let file = match before.files.iter().find(|file| is_it(file)) {
            Some(known) => Arc::clone(known),
            None => {
                let used = self.files.iter().map(|file| file.buffer.len()).sum::<usize>();
                let room = BYTES_MAX.saturating_sub(used);
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
            let behind = self.regions.partition_point(|region| region.spec.guest <= guest);
            let region = self.regions[..behind].last().filter(|region| guest < region.end())?;
            let at = guest - region.spec.guest;
            let n = len.min(region.spec.len - at);
            // Within the file, as `add` checked, so it fits.
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
        specs.all(|spec| log.holds(spec.guest, spec.len))
    }

    /// Marks a piece as written, at every place where the guest sees it.
    pub(super) fn mark(&self, log: &DirtyLog, piece: &Piece) {
        for Region { spec, .. } in self.regions.iter().filter(|region| region.file == piece.file) {
            // Within the file, as `add` checked, so it fits.
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
