//! RDMA of programs: memory of theirs that peers may use, and operations on that of peers. Spec:
//! `docs/spec/rds-rdma.md`, sections 9 and 10.
//!
//! The node reaches the memory of a program through a descriptor of `/proc/self/mem` that the
//! program has opened and sent [RMR-10].

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bowline_attach::{NAME_MAX, name};
use bowline_base::Errno;
use bowline_rds::{
    RDMA_MAX, RDMA_PIECES_MAX, RdmaAccess, RdmaOp, RdmaPiece, SendControl, SocketId, Transport,
};
use bowline_rds_driver::{Driver, RdmaMemory};
use rustix::fs::OFlags;

use crate::control::Given;
use crate::requests::Answer;
use crate::service::{Service, errno};

/// Bytes of `rds_rdma_args`.
pub(crate) const RDMA_ARGS_LEN: usize = 56;
const ATOMIC_ARGS_LEN: usize = 72;
const MR_ARGS_LEN: usize = 32;
const MR_FOR_DEST_ARGS_LEN: usize = 160;
const FREE_MR_ARGS_LEN: usize = 16;
/// Most pieces of local memory of an operation [RDMA-32].
const PIECES_MAX: u64 = RDMA_PIECES_MAX as u64;
const PAGE: u64 = 4096;
/// What `fstatfs` says of a file of procfs.
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

const WRITE: u64 = 0x01;
const FENCE: u64 = 0x02;
const USE_ONCE: u64 = 0x08;
const NOTIFY_ME: u64 = 0x20;
const SILENT: u64 = 0x40;

const ATOMIC_FADD: i32 = 6;
const ATOMIC_CSWP: i32 = 7;
const MASKED_ATOMIC_FADD: i32 = 8;

/// Options at level SOL_RDS.
pub(crate) const GET_MR: i32 = 2;
pub(crate) const FREE_MR: i32 = 3;
pub(crate) const GET_MR_FOR_DEST: i32 = 7;

/// The memory of a process.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    file: Arc<File>,
    /// The same, for devices.
    whole: Arc<RdmaMemory>,
}

impl ProcessMemory {
    /// Takes a descriptor that a program has sent, if it is what it should be: reading another file
    /// could wait for ever.
    fn new(descriptor: OwnedFd) -> Result<Self, Errno> {
        let system = |error: rustix::io::Errno| Errno(error.raw_os_error());
        let kind = rustix::fs::fstatfs(&descriptor).map_err(system)?.f_type;
        let flags = rustix::fs::fcntl_getfl(&descriptor).map_err(system)?;
        let link = format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd());
        let name = std::fs::read_link(link).map_err(|error| Errno::of(&error))?;
        if kind as i64 != PROC_SUPER_MAGIC
            || name.file_name().is_none_or(|name| name != "mem")
            || flags & OFlags::RWMODE != OFlags::RDWR
        {
            return Err(Errno::EBADF);
        }
        let file = Arc::new(File::from(descriptor));
        let whole = RdmaMemory::of_process(Arc::clone(&file));
        Ok(Self { file, whole })
    }

    /// Its descriptor, if nobody else uses it.
    pub(crate) fn into_descriptor(self) -> Option<OwnedFd> {
        drop(self.whole);
        Arc::into_inner(self.file).map(OwnedFd::from)
    }

    fn read<const N: usize>(&self, at: u64) -> Result<[u8; N], Errno> {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at).map_err(|_| Errno::EFAULT)?;
        Ok(bytes)
    }

    /// Checks that a program has memory, page by page. Whether it may write there, it has said.
    fn check(&self, at: u64, len: u64) -> Result<(), Errno> {
        let end = at.checked_add(len).ok_or(Errno::EINVAL)?;
        let mut page = at;
        while page < end {
            self.read::<1>(page)?;
            page = (page | (PAGE - 1)).checked_add(1).ok_or(Errno::EFAULT)?;
        }
        Ok(())
    }

    /// A piece of the memory for an operation.
    fn piece(&self, at: u64, len: u64) -> Result<RdmaPiece, Errno> {
        self.check(at, len)?;
        let range = usize::try_from(at).ok().zip(usize::try_from(at + len).ok());
        range.and_then(|(start, end)| self.whole.piece(start..end)).ok_or(Errno::EFAULT)
    }
}

/// Why an operation was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    Errno(Errno),
    /// The process has not shown its memory yet.
    MemoryNeeded,
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Errno(errno) => Self::error(errno),
            Refusal::MemoryNeeded => Self::error(Errno::EOPNOTSUPP),
        }
    }
}

/// What the control messages of a message ask for.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    pub(crate) control: Vec<SendControl>,
    pub(crate) ops: Vec<RdmaOp>,
    /// Key of the memory that was registered for the message [RDMA-13].
    pub(crate) mapped: Option<u64>,
}

impl Asked {
    /// The message was not sent: what was registered for it is given back [RDMA-13].
    pub(crate) fn forget(&self, driver: &Driver, id: SocketId) {
        if let Some(cookie) = self.mapped {
            let _ = driver.rdma_free(id, cookie);
        }
    }
}

/// Numbers of 8 bytes, in the machine's order.
fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes.try_into().map_or(0, u64::from_ne_bytes);
    }
    words
}

/// What an atomic does [ATOM-1].
fn atomic_access(kind: i32, union: [u64; 4]) -> Result<RdmaAccess, Errno> {
    let [first, second, third, fourth] = union;
    let access = match kind {
        ATOMIC_FADD => Ok(RdmaAccess::FetchAdd(first)),
        ATOMIC_CSWP => Ok(RdmaAccess::CompareSwap { compare: first, swap: second }),
        MASKED_ATOMIC_FADD => RdmaAccess::masked_fetch_add(first, second),
        _ => RdmaAccess::masked_compare_swap(first, second, third, fourth),
    };
    access.map_err(|error| error.errno())
}

/// The peer that RDS_GET_MR_FOR_DEST names, or none: a kernel does not look at it [RDMA-4].
fn peer_of(name: &[u8]) -> Option<IpAddr> {
    name::parse(name).map(|name| name.ip()).filter(|ip| !ip.is_unspecified())
}

/// Checks which control messages are there, before anything is registered for one of them
/// [RDMA-11], [RDMA-12].
fn check_together(given: &[Given<'_>]) -> Result<(), Errno> {
    let count = |of: fn(&Given<'_>) -> bool| given.iter().filter(|given| of(given)).count();
    let unknown = count(|given| matches!(given, Given::Plain(SendControl::Unknown(_))));
    let keys =
        count(|given| matches!(given, Given::Map(_) | Given::Plain(SendControl::RdmaDest(_))));
    let ops = count(|given| matches!(given, Given::Args(_) | Given::Atomic(..)));
    if unknown > 0 || keys > 1 || (keys > 0 && ops > 0) { Err(Errno::EINVAL) } else { Ok(()) }
}

impl Service {
    /// A process shows its memory.
    pub(crate) fn show_memory(
        &mut self,
        number: u64,
        descriptor: Option<OwnedFd>,
        _payload: &[u8],
    ) -> Result<Answer, Errno> {
        let channel = self.channels.get_mut(&number).ok_or(Errno::EBADF)?;
        self.accounts.check_rdma(&channel.caller)?;
        channel.memory = Some(ProcessMemory::new(descriptor.ok_or(Errno::EBADF)?)?);
        Ok(Answer::of(0))
    }

    /// The memory of the process that has a channel.
    fn memory(&self, number: u64) -> Result<&ProcessMemory, Refusal> {
        let channel = self.channels.get(&number).ok_or(Errno::EBADF)?;
        self.accounts.check_rdma(&channel.caller)?;
        channel.memory.as_ref().ok_or(Refusal::MemoryNeeded)
    }

    /// Lets a peer, or every peer, use memory of a program; returns the key, which is also stored
    /// where the program wants it [RDMA-3], [RMR-8]. `args`: address, bytes, where to store the
    /// key, flags.
    fn register(
        &self,
        (number, id): (u64, SocketId),
        args: [u64; 4],
        peer: Option<IpAddr>,
        may_write: bool,
    ) -> Result<u64, Refusal> {
        let [at, len, cookie_at, flags] = args;
        let end = at.checked_add(len).ok_or(Errno::EINVAL)?;
        end.checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        if len == 0 || u32::try_from(len).is_err() {
            return Err(Errno::EINVAL.into());
        }
        self.driver.with_core(|core, _| core.check_region(id, len)).map_err(|e| e.errno())?;
        let process = self.memory(number)?;
        process.check(at, len)?;
        if !may_write {
            return Err(Errno::EFAULT.into());
        }
        let stores = |cookie: u64| process.file.write_all_at(&cookie.to_ne_bytes(), cookie_at);
        let range = usize::try_from(at).ok().zip(usize::try_from(end).ok());
        let (start, end) = range.ok_or(Errno::EFAULT)?;
        let use_once = flags & USE_ONCE != 0;
        let cookie = self.driver.rdma_register(id, &process.whole, start..end, peer, use_once);
        let cookie = cookie.map_err(|error| errno(&error))?;
        if cookie_at != 0 && stores(cookie).is_err() {
            let _ = self.driver.rdma_free(id, cookie);
            return Err(Errno::EFAULT.into());
        }
        Ok(cookie)
    }

    /// Sets an option that is about memory; `None` for others, and for sockets that are not on
    /// RDMA.
    pub(crate) fn set_memory_option(
        &self,
        from: (u64, SocketId),
        name: i32,
        value: &[u8],
        may_write: bool,
    ) -> Option<Result<Answer, Refusal>> {
        let (_, id) = from;
        let transport = self.driver.with_core(|core, _| core.transport(id));
        if transport != Ok(Some(Transport::Ib)) {
            return None;
        }
        let wrong = || Some(Err(Errno::EINVAL.into()));
        let registered = match name {
            GET_MR if value.len() != MR_ARGS_LEN => return wrong(),
            GET_MR => self.register(from, words(value), None, may_write),
            GET_MR_FOR_DEST if value.len() != MR_FOR_DEST_ARGS_LEN => return wrong(),
            GET_MR_FOR_DEST => {
                let (name, args) = value.split_at(NAME_MAX);
                self.register(from, words(args), peer_of(name), may_write)
            }
            FREE_MR if value.len() != FREE_MR_ARGS_LEN => return wrong(),
            FREE_MR => {
                let [cookie] = words(value);
                let freed = self.driver.rdma_free(id, cookie).map(|()| cookie);
                freed.map_err(|error| errno(&error).into())
            }
            _ => return None,
        };
        Some(registered.map(|_| Answer::of(0)))
    }

    /// Makes of the control messages of a message what the node is to do. Over other transports
    /// than RDMA it refuses operations by itself.
    pub(crate) fn ask_for(
        &self,
        from: (u64, SocketId),
        name: Option<SocketAddr>,
        given: &[Given<'_>],
        may_write: bool,
    ) -> Result<Asked, Refusal> {
        let (_, id) = from;
        let transport = self.driver.with_core(|core, _| core.transport(id));
        let speaks_of_memory = given.iter().any(|given| !matches!(given, Given::Plain(_)));
        if !speaks_of_memory || transport != Ok(Some(Transport::Ib)) {
            let control = given.iter().map(Given::kind).collect();
            return Ok(Asked { control, ..Asked::default() });
        }
        let to = name.or_else(|| self.driver.with_core(|core, _| core.peer_addr(id)).ok());
        check_together(given)?;
        let mut asked = Asked::default();
        let one = |given| self.ask_for_one(from, to, given, may_write, &mut asked);
        let done = given.iter().try_for_each(one);
        if let Err(refusal) = done {
            asked.forget(&self.driver, id);
            return Err(refusal);
        }
        Ok(asked)
    }

    fn ask_for_one(
        &self,
        from: (u64, SocketId),
        to: Option<SocketAddr>,
        given: &Given<'_>,
        may_write: bool,
        asked: &mut Asked,
    ) -> Result<(), Refusal> {
        match given {
            Given::Plain(control) => asked.control.push(*control),
            Given::Map(args) => {
                let args = args.first_chunk::<MR_ARGS_LEN>().ok_or(Errno::EINVAL)?;
                // The key is for the one to whom it goes [SAFE-12].
                let to = to.ok_or(Errno::ENOTCONN)?.ip();
                let cookie = self.register(from, words(args), Some(to), may_write)?;
                asked.mapped = Some(cookie);
                asked.control.push(SendControl::RdmaDest(cookie));
            }
            Given::Args(args) => {
                asked.ops.push(self.operation(from.0, words(*args), may_write)?);
            }
            Given::Atomic(kind, args) => {
                let args = args.first_chunk::<ATOMIC_ARGS_LEN>().ok_or(Errno::EINVAL)?;
                asked.ops.push(self.atomic(from.0, *kind, words(args), may_write)?);
            }
        }
        Ok(())
    }

    /// `rds_rdma_args`: cookie, address and bytes there, the vector of local memory and its length,
    /// flags, number of the program.
    fn operation(&self, number: u64, args: [u64; 7], may_write: bool) -> Result<RdmaOp, Refusal> {
        let [cookie, offset, len, vector, count, flags, token] = args;
        match count {
            0 => return Err(Errno::EINVAL.into()),
            1..=PIECES_MAX => {}
            _ => return Err(Errno::EMSGSIZE.into()),
        }
        let process = self.memory(number)?;
        // All lengths are looked at before any of the memory is [RDMA-11], [RDMA-12].
        let mut pieces = Vec::new();
        for n in 0..count {
            let at = vector.checked_add(16 * n).ok_or(Errno::EFAULT)?;
            let [at, len] = words(&process.read::<16>(at)?);
            if len == 0 || u32::try_from(len).is_err() || at.checked_add(len).is_none() {
                return Err(Errno::EINVAL.into());
            }
            pieces.push((at, len));
        }
        if len > RDMA_MAX {
            return Err(Errno::EMSGSIZE.into());
        }
        if pieces.iter().map(|(_, len)| len).sum::<u64>() > len {
            return Err(Errno::EINVAL.into());
        }
        let piece = |&(at, len): &(u64, u64)| process.piece(at, len);
        let local = pieces.iter().map(piece).collect::<Result<Vec<_>, _>>()?;
        if !may_write {
            return Err(Errno::EFAULT.into());
        }
        Ok(RdmaOp {
            access: if flags & WRITE != 0 { RdmaAccess::Write } else { RdmaAccess::Read },
            cookie,
            offset,
            len,
            local,
            fence: flags & FENCE != 0,
            silent: flags & SILENT != 0,
            notify: (flags & NOTIFY_ME != 0).then_some(token),
            hold: Some(process.whole.hold()),
        })
    }

    /// `rds_atomic_args`: cookie, local address, address there, four numbers that depend on the
    /// kind, flags, number of the program [ATOM-1].
    fn atomic(
        &self,
        number: u64,
        kind: i32,
        args: [u64; 9],
        may_write: bool,
    ) -> Result<RdmaOp, Refusal> {
        let [cookie, at, offset, first, second, third, fourth, flags, token] = args;
        let access = atomic_access(kind, [first, second, third, fourth])?;
        let process = self.memory(number)?;
        if at % 8 != 0 || !may_write {
            return Err(Errno::EFAULT.into()); // [ATOM-4]
        }
        let local = vec![process.piece(at, 8)?];
        Ok(RdmaOp {
            access,
            cookie,
            offset,
            len: 8,
            local,
            fence: false,
            silent: flags & SILENT != 0,
            notify: (flags & NOTIFY_ME != 0).then_some(token),
            hold: Some(process.whole.hold()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(path: &str, write: bool) -> Result<ProcessMemory, Errno> {
        ProcessMemory::new(File::options().read(true).write(write).open(path).unwrap().into())
    }

    // tests [RMR-10]
    #[test]
    fn only_the_memory_of_a_process_is_taken_for_it() {
        let own = shown("/proc/self/mem", true).expect("memory");
        let word = 0x1234_5678_9abc_def0_u64;
        let at = (&raw const word) as u64;
        assert_eq!(own.read::<8>(at), Ok(word.to_ne_bytes()));
        assert_eq!(own.check(at, 8), Ok(()));
        assert_eq!(own.check(0, 8), Err(Errno::EFAULT));
        assert_eq!(own.check(u64::MAX - 7, 7), Err(Errno::EFAULT));
        assert_eq!(own.check(u64::MAX - 7, 9), Err(Errno::EINVAL));
        assert_eq!(shown("/proc/self/mem", false).err(), Some(Errno::EBADF));
        assert_eq!(shown("/proc/self/comm", true).err(), Some(Errno::EBADF));
        let file = std::env::temp_dir().join(format!("bowline-{}", std::process::id())).join("mem");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, b"no process").unwrap();
        assert_eq!(shown(file.to_str().unwrap(), true).err(), Some(Errno::EBADF));
        std::fs::remove_dir_all(file.parent().unwrap()).unwrap();
    }

    // tests [RDMA-5] [RMR-8]
    #[test]
    fn memory_is_for_the_peer_that_the_program_names() {
        let mut name = [0; NAME_MAX];
        assert_eq!(peer_of(&name), None);
        name[..8].copy_from_slice(&[2, 0, 15, 160, 10, 0, 0, 9]);
        assert_eq!(peer_of(&name), Some(IpAddr::from([10, 0, 0, 9])));
        name[4..8].fill(0);
        assert_eq!(peer_of(&name), None, "unspecified");
        name[0] = 1;
        assert_eq!(peer_of(&name), None, "of another family");
    }

    // tests [ATOM-3] [ATOM-6]
    #[test]
    fn atomics_with_masks_are_those_without_where_the_masks_say_nothing() {
        let add = RdmaAccess::FetchAdd(5);
        let swap = RdmaAccess::CompareSwap { compare: 5, swap: 6 };
        assert_eq!(atomic_access(6, [5, 6, 7, 8]), Ok(add));
        assert_eq!(atomic_access(7, [5, 6, 7, 8]), Ok(swap));
        assert_eq!(atomic_access(8, [5, 0, 7, 8]), Ok(add));
        assert_eq!(atomic_access(9, [5, 6, u64::MAX, u64::MAX]), Ok(swap));
        assert_eq!(atomic_access(8, [5, 1, 0, 0]), Err(Errno::EOPNOTSUPP));
        let low_bit = RdmaAccess::CompareSwap { compare: 5, swap: 4 };
        assert_eq!(atomic_access(9, [5, 6, u64::MAX, 1]), Ok(low_bit));
        assert_eq!(atomic_access(9, [5, 6, 1, u64::MAX]), Err(Errno::EOPNOTSUPP));
    }
}
