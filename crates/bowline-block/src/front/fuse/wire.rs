//! The kernel's requests for a file system, and the answers, as bytes. Only what a directory with
//! one file has: everything else is refused by its number.

use std::time::SystemTime;

use bowline_rnbd::Errno;

/// Length of a request's header.
pub(super) const HEADER: usize = 40;
/// Length of a write's arguments, which its data follows.
pub(super) const WRITE_ARGS: usize = 40;
/// Length of an answer's header.
pub(super) const ANSWER_HEADER: usize = 16;

/// The header of a request, what of it matters here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) opcode: u32,
    /// Number of the request, which its answer repeats.
    pub(super) unique: u64,
    pub(super) node: u64,
}

/// A request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Call<'a> {
    Lookup(&'a [u8]),
    GetAttr,
    SetAttr {
        size: Option<u64>,
        /// By an open file, not by a path.
        by_handle: bool,
        /// The mode or the owner is set as well.
        access: bool,
    },
    Open {
        flags: u32,
    },
    OpenDir,
    Release,
    Read {
        offset: u64,
        size: u32,
    },
    ReadDir {
        offset: u64,
        size: u32,
    },
    /// Its data is where the channel has put it.
    Write {
        offset: u64,
        size: u32,
        flags: u32,
    },
    Fsync,
    Fallocate {
        offset: u64,
        len: u64,
        mode: u32,
    },
    StatFs,
    /// Is answered with success and changes nothing.
    Nothing,
    /// Gets no answer.
    Unanswered,
    /// Would make, rename or remove an entry.
    Change,
    /// One of these is an interrupt, since a request that was sent is not taken back.
    Unknown,
}

/// Numbers within a request's bytes; those that are missing end the parsing.
struct Args<'a>(&'a [u8]);

impl Args<'_> {
    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(self.0.get(at..at + 4)?.try_into().ok()?))
    }

    fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(self.0.get(at..at + 8)?.try_into().ok()?))
    }
}

impl Header {
    /// Takes the header from the first bytes of a request; `None` if it is not whole.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let args = Args(bytes.get(..HEADER)?);
        Some(Self { opcode: args.u32(4)?, unique: args.u64(8)?, node: args.u64(16)? })
    }
}

impl<'a> Call<'a> {
    /// Takes a request from what follows its header, as far as `args` reach: the data of a write
    /// may be elsewhere. `None` if it is not whole.
    pub(super) fn parse(header: &Header, args: &'a [u8]) -> Option<Self> {
        let a = Args(args);
        Some(match header.opcode {
            1 => Self::Lookup(&args[..args.iter().position(|byte| *byte == 0)?]),
            3 => Self::GetAttr,
            4 => {
                let valid = a.u32(0)?;
                let has = |bit: u32| valid & 1 << bit != 0;
                let size = a.u64(16)?;
                Self::SetAttr {
                    size: has(3).then_some(size),
                    by_handle: has(6),
                    access: has(0) || has(1) || has(2),
                }
            }
            14 => Self::Open { flags: a.u32(0)? },
            15 => Self::Read { offset: a.u64(8)?, size: a.u32(16)? },
            16 => {
                let flags = a.u32(32)?;
                Self::Write { offset: a.u64(8)?, size: a.u32(16)?, flags }
            }
            17 => Self::StatFs,
            18 => Self::Release,
            20 => Self::Fsync,
            27 => Self::OpenDir,
            28 => Self::ReadDir { offset: a.u64(8)?, size: a.u32(16)? },
            // The end of a directory's use, and that of the file system.
            29 | 38 => Self::Nothing,
            // Forgotten nodes.
            2 | 42 => Self::Unanswered,
            // Links, nodes, directories, removals, renames.
            6 | 8..=13 | 45 => Self::Change,
            43 => Self::Fallocate { offset: a.u64(8)?, len: a.u64(16)?, mode: a.u32(24)? },
            _ => Self::Unknown,
        })
    }
}

/// The header of an answer with `len` bytes behind it.
pub(super) fn answer_header(unique: u64, result: Result<usize, Errno>) -> [u8; ANSWER_HEADER] {
    let mut out = [0; ANSWER_HEADER];
    let len = ANSWER_HEADER + result.unwrap_or(0);
    out[..4].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_ne_bytes());
    out[4..8].copy_from_slice(&result.err().map_or(0, Errno::neg).to_ne_bytes());
    out[8..].copy_from_slice(&unique.to_ne_bytes());
    out
}

/// What a file or directory looks like.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attr {
    pub(super) node: u64,
    pub(super) size: u64,
    /// Kind and permissions.
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) owner: (u32, u32),
    pub(super) since: SystemTime,
}

/// Bytes of an answer.
#[derive(Debug, Default)]
struct Out(Vec<u8>);

impl Out {
    fn u32s(mut self, numbers: &[u32]) -> Self {
        numbers.iter().for_each(|number| self.0.extend(number.to_ne_bytes()));
        self
    }

    fn u64s(mut self, numbers: &[u64]) -> Self {
        numbers.iter().for_each(|number| self.0.extend(number.to_ne_bytes()));
        self
    }

    fn attr(self, attr: &Attr) -> Self {
        let since = attr.since.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanos) = (since.as_secs(), since.subsec_nanos());
        self.u64s(&[attr.node, attr.size, attr.size / 512, seconds, seconds, seconds])
            .u32s(&[nanos, nanos, nanos, attr.mode, attr.links, attr.owner.0, attr.owner.1])
            // No device; the size of a block; no flags.
            .u32s(&[0, 4096, 0])
    }
}

/// An entry of a directory, which the kernel asks for again at each use, since a disk's size can
/// change.
pub(super) fn entry(attr: &Attr) -> Vec<u8> {
    Out::default().u64s(&[attr.node, 0, 0, 0]).u32s(&[0, 0]).attr(attr).0
}

/// Attributes, which the kernel asks for again at each use.
pub(super) fn attributes(attr: &Attr) -> Vec<u8> {
    Out::default().u64s(&[0]).u32s(&[0, 0]).attr(attr).0
}

/// An open file or directory.
pub(super) fn opened(flags: u32) -> Vec<u8> {
    Out::default().u64s(&[0]).u32s(&[flags, 0]).0
}

/// The bytes that were written.
pub(super) fn written(bytes: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&bytes.to_ne_bytes());
    out
}

/// Sizes of the file system: `blocks` of 4 KiB, all of them used.
pub(super) fn statistics(blocks: u64) -> Vec<u8> {
    Out::default().u64s(&[blocks, 0, 0, 1, 0]).u32s(&[4096, 255, 4096, 0, 0, 0, 0, 0, 0, 0]).0
}

/// Entries of a directory from the one behind `offset` on, as many as fit in `size` bytes: node,
/// kind (as in a mode) and name.
pub(super) fn directory(entries: &[(u64, u32, &[u8])], offset: u64, size: u32) -> Vec<u8> {
    let mut out = Out::default();
    for (next, (node, kind, name)) in (1..).zip(entries).filter(|(next, _)| *next > offset) {
        let end = out.0.len() + (24 + name.len()).next_multiple_of(8);
        if end > size as usize {
            break;
        }
        out = out.u64s(&[*node, next]).u32s(&[name.len() as u32, kind >> 12]);
        out.0.extend_from_slice(name);
        out.0.resize(end, 0);
    }
    out.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(opcode: u32) -> Header {
        Header { opcode, unique: 7, node: 2 }
    }

    #[test]
    fn requests_that_are_cut_short_are_none() {
        let args: Vec<u8> = (1..=88).collect();
        for opcode in 0..60 {
            for len in 0..args.len() {
                // Never a panic; what is whole with fewer bytes is the same with more.
                if let Some(call) = Call::parse(&header(opcode), &args[..len]) {
                    assert_eq!(Some(call), Call::parse(&header(opcode), &args));
                }
            }
        }
        assert_eq!(Call::parse(&header(15), &args[..19]), None);
        let offset = u64::from_ne_bytes([9, 10, 11, 12, 13, 14, 15, 16]);
        let size = u32::from_ne_bytes([17, 18, 19, 20]);
        assert_eq!(Call::parse(&header(15), &args[..20]), Some(Call::Read { offset, size }));
        assert_eq!(Call::parse(&header(1), b"disk"), None, "a name ends with a zero");
        assert_eq!(Call::parse(&header(1), b"disk\0x"), Some(Call::Lookup(b"disk")));
        assert!(Header::parse(&args[..39]).is_none());
    }

    #[test]
    fn answers_have_the_lengths_that_the_kernel_expects() {
        let since = SystemTime::UNIX_EPOCH;
        let attr = Attr { node: 2, size: 4096, mode: 0o100_600, links: 1, owner: (1, 2), since };
        assert_eq!(entry(&attr).len(), 128);
        assert_eq!(attributes(&attr).len(), 104);
        assert_eq!(opened(1).len(), 16);
        assert_eq!(statistics(1).len(), 80);
        let entries: [(u64, u32, &[u8]); 2] = [(1, 0o040_000, b"."), (2, 0o100_000, b"disk.img")];
        assert_eq!(directory(&entries, 0, 4096).len(), 32 + 32);
        assert_eq!(directory(&entries, 0, 63).len(), 32);
        assert_eq!(directory(&entries, 1, 4096)[16..24], [8, 0, 0, 0, 8, 0, 0, 0]);
        assert_eq!(directory(&entries, 2, 4096), [0_u8; 0]);
        assert_eq!(answer_header(9, Err(Errno::EIO))[..8], [16, 0, 0, 0, 251, 255, 255, 255]);
        assert_eq!(answer_header(9, Ok(4))[..9], [20, 0, 0, 0, 0, 0, 0, 0, 9]);
    }
}
