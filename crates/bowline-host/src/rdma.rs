//! RDMA of programs: memory of theirs that peers may use, and operations on that of peers. Spec:
//! `docs/spec/rds-rdma.md`, sections 9 and 10.
//!
//! The node reaches the memory of a program through a descriptor that the program sends: of its
//! `/proc/self/mem` [RMR-10], or of a socket whose other end is the program's agent [RMR-12].

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use bowline_base::Errno;
use bowline_host_wire::{ChannelId, Features, NONCE_LEN, name};
use bowline_rds::{
    RDMA_MAX, RDMA_PIECES_MAX, RdmaAccess, RdmaHold, RdmaOp, RdmaPiece, SendControl, SocketId,
    Transport,
};
use bowline_rds_driver::{ForeignMemory, ProcessFile, RdmaMemory};
use bowline_wire::rds::uapi::*;
use rustix::fs::{FileType, OFlags};

use crate::agent::{Agent, Grant, Work};
use crate::arrivals::PROC_SUPER_MAGIC;
use crate::caller::Caller;
use crate::closer::Passed;
use crate::control::Given;
use crate::core::{Core, Outside, Rds};
use crate::requests::Answer;
use crate::watch::{Watch, Watched};

/// Most pieces of local memory of an operation [RDMA-32].
const PIECES_MAX: u64 = RDMA_PIECES_MAX as u64;
const PAGE: u64 = 4096;

/// Lowest address at which a program proves that a file is its memory. No other file of procfs has
/// anything so far from its beginning that a program can choose.
const PROOF_MIN: u64 = 1 << 32;

/// What a program says when it shows its memory.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// The process at the other end of the channel.
    pub(crate) caller: &'a Caller,
    /// The address at which the nonce of the channel stands, and the nonce.
    pub(crate) proof: (u64, [u8; NONCE_LEN]),
    /// What an agent calls the memory.
    pub(crate) grant: u64,
    /// The agent is asked for it by that name.
    pub(crate) names_grants: bool,
}

/// The memory of a process, or what it gives of it.
#[derive(Debug)]
pub struct ProcessMemory {
    memory: Arc<dyn ForeignMemory>,
    /// The same, for devices.
    whole: Arc<RdmaMemory>,
    /// The same, where it is watched.
    watched: Option<Watching>,
    /// The call that has given it, if it is an agent's to give.
    grant: Option<Arc<Grant>>,
}

/// Memory of a process as devices have it.
fn device_memory(memory: Arc<dyn ForeignMemory>) -> Arc<RdmaMemory> {
    RdmaMemory::of_process(memory)
}

/// What watches the memory of a process, and the memory for operations whose pieces are watched.
#[derive(Debug)]
struct Watching {
    watch: Arc<Watch>,
    whole: Arc<RdmaMemory>,
}

impl ProcessMemory {
    /// Takes a descriptor that a program has sent, if it is what it should be: reading another file
    /// could wait for ever.
    ///
    /// # Errors
    /// EBADF for another descriptor, which is closed where that keeps nobody waiting.
    pub(crate) fn new(descriptor: Passed, shown: &Shown<'_>) -> Result<Self, Errno> {
        let kind =
            rustix::fs::fstat(&descriptor).map(|found| FileType::from_raw_mode(found.st_mode));
        if kind == Ok(FileType::Socket) {
            let agent = Agent::of(descriptor, shown.caller)?;
            let grant = agent.grant(shown.grant, shown.names_grants);
            return Ok(Self {
                whole: grant.for_operations(),
                memory: Arc::clone(&grant) as _,
                watched: None,
                grant: Some(grant),
            });
        }
        if !Self::is_of_procfs(&descriptor) {
            return Err(Errno::EBADF);
        }
        let memory = ProcessFile::new(File::from(descriptor.into_inner()));
        let (at, nonce) = shown.proof;
        let mut found = [0; NONCE_LEN];
        if at < PROOF_MIN || memory.read(at, &mut found) < NONCE_LEN || found != nonce {
            return Err(Errno::EBADF);
        }
        let memory: Arc<dyn ForeignMemory> = Arc::new(memory);
        let whole = device_memory(Arc::clone(&memory));
        Ok(Self { memory, whole, watched: None, grant: None })
    }

    /// Watches it by a descriptor that the program has sent. An agent watches by itself.
    ///
    /// # Errors
    /// EBADF for a descriptor that does not watch.
    pub(crate) fn watch_by(&mut self, descriptor: Passed, process: i32) -> Result<(), Errno> {
        let watch = Watch::of(descriptor, process)?;
        let memory = Watched::for_operations(&self.memory, &watch);
        let whole = device_memory(Arc::new(memory));
        self.watched = self.grant.is_none().then_some(Watching { watch, whole });
        Ok(())
    }

    /// A range for peers, for as long as it is what it is now.
    fn region(&self, range: (u64, u64)) -> Result<Arc<RdmaMemory>, Errno> {
        if let Some(grant) = &self.grant {
            return Ok(device_memory(Arc::clone(grant) as _));
        }
        let watched = match &self.watched {
            Some(own) => Watched::for_peers(&self.memory, &own.watch, range)?,
            None => None,
        };
        let whole = || Arc::clone(&self.whole);
        Ok(watched.map_or_else(whole, |memory| device_memory(Arc::new(memory))))
    }

    /// The memory for an operation with these pieces.
    fn operation_memory(&self, ranges: &[(u64, u64)]) -> Result<&Arc<RdmaMemory>, Errno> {
        let Some(own) = &self.watched else { return Ok(&self.whole) };
        for (at, len) in ranges {
            if !own.watch.begin(*at, *len)? {
                return Ok(&self.whole);
            }
        }
        Ok(&own.whole)
    }

    /// What is done with it until what is returned is dropped has one limit of time.
    fn begin(&self) -> Option<Work<'_>> {
        self.grant.as_ref().map(|grant| grant.begin())
    }

    fn is_of_procfs(descriptor: impl AsFd) -> bool {
        let kind = rustix::fs::fstatfs(&descriptor).map(|found| i128::from(found.f_type));
        let flags = rustix::fs::fcntl_getfl(descriptor);
        let access = flags.map(|flags| flags & (OFlags::RWMODE | OFlags::PATH));
        (kind, access) == (Ok(PROC_SUPER_MAGIC), Ok(OFlags::RDWR))
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Errno> {
        if self.memory.read(at, out) == out.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Checks that a program has memory. Whether it may write there, the program has checked itself
    /// (`bowline-host-client`, `reach.rs`).
    fn check(&self, ranges: &[(u64, u64)]) -> Result<(), Errno> {
        if self.memory.has(ranges) { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Stores a key where the program wants it.
    fn store(&self, at: u64, cookie: u64) -> Result<(), Errno> {
        let bytes = cookie.to_ne_bytes();
        if self.memory.write(at, &bytes) == bytes.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Pieces of the memory for an operation, and what keeps it until that has ended.
    fn pieces(&self, ranges: &[(u64, u64)]) -> Result<(Vec<RdmaPiece>, RdmaHold), Errno> {
        self.check(ranges)?;
        let whole = self.operation_memory(ranges)?;
        let piece = |&(at, len): &(u64, u64)| {
            let end = at.checked_add(len).and_then(|end| usize::try_from(end).ok());
            let range = usize::try_from(at).ok().zip(end);
            range.and_then(|(start, end)| whole.piece(start..end)).ok_or(Errno::EFAULT)
        };
        let pieces = ranges.iter().map(piece).collect::<Result<_, _>>()?;
        Ok((pieces, whole.hold()))
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

impl<G> From<Refusal> for Answer<G> {
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
    pub(crate) fn forget(&self, rds: &impl Rds, id: SocketId) {
        if let Some(cookie) = self.mapped {
            let _ = rds.rdma_free(id, cookie);
        }
    }
}

/// What an atomic does [ATOM-1].
fn atomic_access(kind: i32, operands: [u64; 4]) -> Result<RdmaAccess, Errno> {
    let [first, second, third, fourth] = operands;
    let access = match kind {
        RDS_CMSG_ATOMIC_FADD => Ok(RdmaAccess::FetchAdd(first)),
        RDS_CMSG_ATOMIC_CSWP => Ok(RdmaAccess::CompareSwap { compare: first, swap: second }),
        RDS_CMSG_MASKED_ATOMIC_FADD => RdmaAccess::masked_fetch_add(first, second),
        _ => RdmaAccess::masked_compare_swap(first, second, third, fourth),
    };
    access.map_err(|error| error.errno())
}

/// The peer that RDS_GET_MR_FOR_DEST names, or none: a kernel does not look at it [RDMA-4].
fn peer_of(name: &[u8]) -> Option<IpAddr> {
    name::parse(name).map(|name| name.ip()).filter(|ip| !ip.is_unspecified())
}

/// Bytes of a peer's memory that the operations of a message name.
fn remote_bytes(given: &[Given<'_>]) -> u64 {
    let bytes = given.iter().map(|given| match given {
        Given::Args(args) => args.remote_vec.bytes,
        _ => 0,
    });
    bytes.fold(0, u64::saturating_add)
}

/// Checks which control messages are there, before anything is registered for one of them
/// [RDMA-11], [RDMA-12].
pub(crate) fn check_together(given: &[Given<'_>]) -> Result<(), Errno> {
    let count = |of: fn(&Given<'_>) -> bool| given.iter().filter(|given| of(given)).count();
    let unknown = count(|given| matches!(given, Given::Plain(SendControl::Unknown(_))));
    let keys =
        count(|given| matches!(given, Given::Map(_) | Given::Plain(SendControl::RdmaDest(_))));
    let ops = count(|given| matches!(given, Given::Args(_) | Given::Atomic(..)));
    if unknown > 0 || keys > 1 || (keys > 0 && ops > 0) { Err(Errno::EINVAL) } else { Ok(()) }
}

impl<O: Outside> Core<O> {
    /// A process shows its memory, which an agent with these features calls `grant`.
    pub(crate) fn show_memory(
        &mut self,
        number: ChannelId,
        (grant, features): (u64, Features),
        nonce_at: u64,
        descriptor: Option<O::Descriptor>,
    ) -> Result<Answer<O::Given>, Errno> {
        let channel = self.channels.get_mut(&number).ok_or(Errno::EBADF)?;
        let descriptor = descriptor.ok_or(Errno::EBADF)?;
        self.accounts.check_rdma(&channel.caller)?;
        let proof = (nonce_at, channel.nonce);
        let names_grants = features.include(Features::GRANTS);
        let shown = Shown { caller: &channel.caller, proof, grant, names_grants };
        channel.memory = Some(self.outside.process_memory(descriptor, &shown)?);
        Ok(Answer::done())
    }

    /// A process gives what watches the memory that it has shown.
    pub(crate) fn show_watch(
        &mut self,
        number: ChannelId,
        descriptor: Option<O::Descriptor>,
    ) -> Result<Answer<O::Given>, Errno> {
        let channel = self.channels.get_mut(&number).ok_or(Errno::EBADF)?;
        let descriptor = descriptor.ok_or(Errno::EBADF)?;
        let process = channel.caller.process;
        let memory = channel.memory.as_mut().ok_or(Errno::EINVAL)?;
        self.outside.watch_memory(memory, descriptor, process)?;
        Ok(Answer::done())
    }

    /// The memory of the process that has a channel.
    fn memory(&self, number: ChannelId) -> Result<&ProcessMemory, Refusal> {
        let channel = self.channels.get(&number).ok_or(Errno::EBADF)?;
        self.accounts.check_rdma(&channel.caller)?;
        channel.memory.as_ref().ok_or(Refusal::MemoryNeeded)
    }

    /// A request about memory, for which the node waits as long as for one access.
    fn begin(&self, number: ChannelId) -> Option<Work<'_>> {
        self.channels.get(&number)?.memory.as_ref()?.begin()
    }

    /// Lets a peer, or every peer, use memory of a program; returns the key, which is also stored
    /// where the program wants it [RDMA-3], [RMR-8].
    fn register(
        &self,
        (number, id): (ChannelId, SocketId),
        args: GetMrArgs,
        peer: Option<IpAddr>,
        may_write: bool,
    ) -> Result<u64, Refusal> {
        let GetMrArgs { addr: at, bytes: len, cookie_addr: cookie_at, flags } = args;
        let end = at.checked_add(len).ok_or(Errno::EINVAL)?;
        end.checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        if len == 0 || u32::try_from(len).is_err() {
            return Err(Errno::EINVAL.into());
        }
        self.rds.with_core(|core, _| core.check_region(id, len)).map_err(|e| e.errno())?;
        let process = self.memory(number)?;
        process.check(&[(at, len)])?;
        if !may_write {
            return Err(Errno::EFAULT.into());
        }
        let range = usize::try_from(at).ok().zip(usize::try_from(end).ok());
        let (start, end) = range.ok_or(Errno::EFAULT)?;
        let use_once = flags & RDS_RDMA_USE_ONCE != 0;
        let memory = process.region((at, len))?;
        let cookie = self.rds.rdma_register(id, &memory, start..end, peer, use_once);
        let cookie = cookie.map_err(|error| error.errno())?;
        if cookie_at != 0 && process.store(cookie_at, cookie).is_err() {
            let _ = self.rds.rdma_free(id, cookie);
            return Err(Errno::EFAULT.into());
        }
        Ok(cookie)
    }

    /// Sets an option that is about memory; `None` for others, and for sockets that are not on
    /// RDMA.
    pub(crate) fn set_memory_option(
        &self,
        from: (ChannelId, SocketId),
        name: i32,
        value: &[u8],
        may_write: bool,
    ) -> Option<Result<Answer<O::Given>, Refusal>> {
        let (_, id) = from;
        let transport = self.rds.with_core(|core, _| core.transport(id));
        if transport != Ok(Some(Transport::Ib)) {
            return None;
        }
        let _work = self.begin(from.0);
        let args = |value: &[u8]| GetMrArgs::parse(value).ok_or(Errno::EINVAL.into());
        let registered = match name {
            RDS_GET_MR if value.len() == RDS_GET_MR_ARGS_LEN => {
                args(value).and_then(|args| self.register(from, args, None, may_write))
            }
            RDS_GET_MR_FOR_DEST if value.len() == RDS_GET_MR_FOR_DEST_ARGS_LEN => {
                let (name, value) = value.split_at(SOCKADDR_STORAGE_LEN);
                args(value).and_then(|args| self.register(from, args, peer_of(name), may_write))
            }
            RDS_FREE_MR => free_mr_cookie(value).ok_or(Errno::EINVAL.into()).and_then(|cookie| {
                let freed = self.rds.rdma_free(id, cookie).map(|()| cookie);
                freed.map_err(|error| error.errno().into())
            }),
            RDS_GET_MR | RDS_GET_MR_FOR_DEST => Err(Errno::EINVAL.into()),
            _ => return None,
        };
        Some(registered.map(|_| Answer::done()))
    }

    /// Translates the control messages of a message into operations. Over other transports than
    /// RDMA the core refuses them by itself.
    pub(crate) fn translate_control(
        &self,
        from: (ChannelId, SocketId),
        name: Option<SocketAddr>,
        given: &[Given<'_>],
        may_write: bool,
    ) -> Result<Asked, Refusal> {
        let (_, id) = from;
        let transport = self.rds.with_core(|core, _| core.transport(id));
        let to = name.or_else(|| self.rds.with_core(|core, _| core.peer_addr(id)).ok());
        // It is looked at before local memory and the transport, but after both names [RDMA-11].
        if to.is_some() && matches!(transport, Ok(Some(_))) && remote_bytes(given) > RDMA_MAX {
            return Err(Errno::EMSGSIZE.into());
        }
        let speaks_of_memory = given.iter().any(|given| !matches!(given, Given::Plain(_)));
        if !speaks_of_memory || transport != Ok(Some(Transport::Ib)) {
            let control = given.iter().map(Given::kind).collect();
            return Ok(Asked { control, ..Asked::default() });
        }
        check_together(given)?;
        let _work = self.begin(from.0);
        let mut asked = Asked::default();
        let one = |given| self.translate_one(from, to, given, may_write, &mut asked);
        let done = given.iter().try_for_each(one);
        if let Err(refusal) = done {
            asked.forget(&self.rds, id);
            return Err(refusal);
        }
        Ok(asked)
    }

    fn translate_one(
        &self,
        from: (ChannelId, SocketId),
        to: Option<SocketAddr>,
        given: &Given<'_>,
        may_write: bool,
        asked: &mut Asked,
    ) -> Result<(), Refusal> {
        match given {
            Given::Plain(control) => asked.control.push(*control),
            Given::Map(args) => {
                let args = GetMrArgs::parse(args).ok_or(Errno::EINVAL)?;
                // The key is for the one to whom it goes [SAFE-12].
                let to = to.ok_or(Errno::ENOTCONN)?.ip();
                let cookie = self.register(from, args, Some(to), may_write)?;
                asked.mapped = Some(cookie);
                asked.control.push(SendControl::RdmaDest(cookie));
            }
            Given::Args(args) => {
                asked.ops.push(self.operation(from.0, args, may_write)?);
            }
            Given::Atomic(kind, args) => {
                let args = AtomicArgs::parse(args).ok_or(Errno::EINVAL)?;
                asked.ops.push(self.atomic(from.0, *kind, &args, may_write)?);
            }
        }
        Ok(())
    }

    /// An RDMA operation, whose pieces of local memory are in the program's.
    fn operation(
        &self,
        number: ChannelId,
        args: &RdmaArgs,
        may_write: bool,
    ) -> Result<RdmaOp, Refusal> {
        let RdmaArgs { cookie, nr_local, flags, .. } = *args;
        let RdsIovec { addr: offset, bytes: len } = args.remote_vec;
        match nr_local {
            0 => return Err(Errno::EINVAL.into()),
            1..=PIECES_MAX => {}
            _ => return Err(Errno::EMSGSIZE.into()),
        }
        let process = self.memory(number)?;
        // All lengths are looked at before any of the memory is [RDMA-11], [RDMA-12].
        let mut bytes = vec![0; RDS_IOVEC_LEN * nr_local as usize];
        process.read(args.local_vec_addr, &mut bytes)?;
        let mut pieces = Vec::new();
        for RdsIovec { addr: at, bytes: len } in RdsIovec::parse_all(&bytes) {
            if len == 0 || u32::try_from(len).is_err() || at.checked_add(len).is_none() {
                return Err(Errno::EINVAL.into());
            }
            pieces.push((at, len));
        }
        if pieces.iter().map(|(_, len)| len).sum::<u64>() > len {
            return Err(Errno::EINVAL.into());
        }
        let (local, hold) = process.pieces(&pieces)?;
        if !may_write {
            return Err(Errno::EFAULT.into());
        }
        Ok(RdmaOp {
            access: if flags & RDS_RDMA_READWRITE != 0 {
                RdmaAccess::Write
            } else {
                RdmaAccess::Read
            },
            cookie,
            offset,
            len,
            local,
            fence: flags & RDS_RDMA_FENCE != 0,
            silent: flags & RDS_RDMA_SILENT != 0,
            token: args.user_token,
            notify: flags & RDS_RDMA_NOTIFY_ME != 0,
            hold: Some(hold),
        })
    }

    /// An atomic of a kind [ATOM-1].
    fn atomic(
        &self,
        number: ChannelId,
        kind: i32,
        args: &AtomicArgs,
        may_write: bool,
    ) -> Result<RdmaOp, Refusal> {
        let AtomicArgs { cookie, local_addr: at, remote_addr: offset, flags, .. } = *args;
        let access = atomic_access(kind, args.operands)?;
        let process = self.memory(number)?;
        if at % 8 != 0 || !may_write {
            return Err(Errno::EFAULT.into()); // [ATOM-4]
        }
        let (local, hold) = process.pieces(&[(at, 8)])?;
        Ok(RdmaOp {
            access,
            cookie,
            offset,
            len: 8,
            local,
            fence: false,
            silent: flags & RDS_RDMA_SILENT != 0,
            token: args.user_token,
            notify: flags & RDS_RDMA_NOTIFY_ME != 0,
            hold: Some(hold),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::fd::OwnedFd;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use bowline_testkit::skipped;

    use crate::agent::AGENTS_MAX;

    fn own() -> Caller {
        Caller::of(std::os::unix::net::UnixStream::pair().unwrap().0).unwrap()
    }

    fn opened(path: impl AsRef<Path>, write: bool) -> OwnedFd {
        File::options().read(true).write(write).open(path).unwrap().into()
    }

    fn passed(descriptor: OwnedFd) -> Passed {
        Passed::new(None, descriptor)
    }

    fn shown(descriptor: OwnedFd, proof: (u64, [u8; NONCE_LEN])) -> Result<ProcessMemory, Errno> {
        ProcessMemory::new(
            passed(descriptor),
            &Shown { caller: &own(), proof, grant: 0, names_grants: true },
        )
    }

    const NONCE: [u8; NONCE_LEN] = *b"sixteen of them.";

    /// Where the nonce stands in this process.
    fn at(nonce: &[u8; NONCE_LEN]) -> u64 {
        std::ptr::from_ref(nonce).expose_provenance() as u64
    }

    // tests [RMR-10]
    #[test]
    fn memory_is_what_has_the_nonce_of_its_channel() {
        let nonce = std::hint::black_box(NONCE);
        let proof = (at(&nonce), nonce);
        let own = shown(opened("/proc/self/mem", true), proof).expect("memory");
        let word = 0x1234_5678_9abc_def0_u64;
        let at = (&raw const word) as u64;
        let mut found = [0; 8];
        assert_eq!(own.read(at, &mut found), Ok(()));
        assert_eq!(found, word.to_ne_bytes());
        assert_eq!(own.check(&[(at, 8)]), Ok(()));
        assert_eq!(own.check(&[(at, 8), (0, 8)]), Err(Errno::EFAULT));
        assert_eq!(own.check(&[(u64::MAX - 7, 7)]), Err(Errno::EFAULT));
        assert_eq!(own.check(&[(u64::MAX - 7, 9)]), Err(Errno::EFAULT));
        let mut other = nonce;
        other[15] ^= 1;
        for (descriptor, proof) in [
            (opened("/proc/self/mem", false), proof),
            (opened("/proc/self/mem", true), (proof.0 + 1, nonce)),
            (opened("/proc/self/mem", true), (proof.0, other)),
            (opened("/proc/self/mem", true), (0, nonce)),
            (opened("/proc/self/comm", true), proof),
            (opened("/proc/self/oom_score_adj", true), proof),
            (opened("/dev/null", true), proof),
        ] {
            assert_eq!(shown(descriptor, proof).err(), Some(Errno::EBADF), "{proof:?}");
        }
    }

    /// A program chooses what a file of procfs says, and so may know the nonce to be there.
    // tests [RMR-10]
    #[test]
    fn a_file_of_procfs_with_the_nonce_in_it_is_no_memory() {
        std::thread::spawn(|| {
            let comm = opened("/proc/thread-self/comm", true);
            rustix::io::write(&comm, b"fifteen of them").unwrap();
            let nonce = *b"fifteen of them\n";
            let mut found = [0; NONCE_LEN];
            assert_eq!(rustix::io::pread(&comm, &mut found, 0), Ok(NONCE_LEN));
            assert_eq!(found, nonce);
            assert_eq!(shown(comm, (0, nonce)).err(), Some(Errno::EBADF));
        })
        .join()
        .unwrap();
    }

    /// Another process, which is ended.
    struct Other(Child);

    impl Other {
        fn runs(command: &mut Command) -> Option<Self> {
            let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().ok()?;
            let mut said = [0; 6];
            let out = child.stdout.as_mut()?;
            let is_ready = std::io::Read::read_exact(out, &mut said).is_ok();
            let other = Self(child);
            is_ready.then_some(other)
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    // tests [RMR-10]
    #[test]
    fn a_file_that_is_mounted_over_one_called_mem_is_no_memory() {
        let script = "d=$(mktemp -d) && mount -t tmpfs none $d && touch $d/mem \
            && mount --bind /proc/self/oom_score_adj $d/mem && exec 3<>$d/mem \
            && echo ready && exec sleep 100";
        let mut command = Command::new("unshare");
        let Some(other) = Other::runs(command.args(["-Urm", "sh", "-c", script])) else {
            return skipped::because("no user namespace can be made in which files are mounted");
        };
        let descriptor = opened(format!("/proc/{}/fd/3", other.0.id()), true);
        let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&descriptor));
        assert!(std::fs::read_link(link).unwrap().ends_with("mem"), "it is called so");
        assert!(ProcessMemory::is_of_procfs(&descriptor));
        let nonce = std::hint::black_box(NONCE);
        assert_eq!(shown(descriptor, (at(&nonce), nonce)).err(), Some(Errno::EBADF));
    }

    /// A process gives what it has opened: it could as well read it and give what it has read.
    // tests [RMR-10]
    #[test]
    fn memory_of_another_process_is_taken_only_with_the_nonce_in_it() {
        let nonce = std::hint::black_box(NONCE);
        let other = Other::runs(Command::new("sh").args(["-c", "echo ready; read line"]));
        let other = other.expect("a process");
        let memory = format!("/proc/{}/mem", other.0.id());
        assert_eq!(shown(opened(&memory, true), (at(&nonce), nonce)).err(), Some(Errno::EBADF));
        let place = std::fs::read_to_string(format!("/proc/{}/maps", other.0.id())).unwrap();
        let stack = place.lines().find(|line| line.ends_with("[stack]")).unwrap();
        let stack = u64::from_str_radix(stack.split('-').next().unwrap(), 16).unwrap();
        let file = File::options().write(true).open(&memory).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &nonce, stack).unwrap();
        assert!(shown(opened(&memory, true), (stack, nonce)).is_ok());
    }

    // tests [RMR-12]
    #[test]
    fn an_agent_is_one_end_of_a_pair_that_its_process_has_made() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let pair =
            |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let shown = |descriptor: OwnedFd, caller| {
            ProcessMemory::new(
                passed(descriptor),
                &Shown { caller: &caller, proof: (0, NONCE), grant: 0, names_grants: true },
            )
        };
        let (_kept, end) = pair(SocketType::SEQPACKET);
        let again = end.as_fd().try_clone_to_owned().unwrap();
        let first = Agent::of(passed(end), &own()).expect("an agent");
        let copy = || again.as_fd().try_clone_to_owned().unwrap();
        assert!(
            Arc::ptr_eq(&Agent::of(passed(copy()), &own()).unwrap(), &first),
            "the same socket"
        );
        // Programs send it with each call, also when the node has used it, or one before this.
        drop(first.grant(7, true));
        assert!(Arc::ptr_eq(&Agent::of(passed(copy()), &own()).unwrap(), &first));
        drop(first);
        let first = Agent::of(passed(again), &own()).expect("an agent");
        for kind in [SocketType::STREAM, SocketType::DGRAM] {
            let (_kept, end) = pair(kind);
            assert_eq!(shown(end, own()).err(), Some(Errno::EBADF));
        }
        let other_process = Caller { process: own().process + 1, ..own() };
        let other_user = Caller { user: own().user + 1, ..own() };
        for caller in [other_process, other_user] {
            let (_kept, end) = pair(SocketType::SEQPACKET);
            assert_eq!(shown(end, caller).err(), Some(Errno::EBADF));
        }
        let name = format!("bowline-rdma-test/{}", std::process::id());
        let name = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let (kept, end) = pair(SocketType::SEQPACKET);
        rustix::net::bind(&kept, &name).unwrap();
        assert_eq!(shown(end, own()).err(), Some(Errno::EBADF), "the other end has a name");
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(shown(tcp.into(), own()).err(), Some(Errno::EBADF));
        // So many of one user, as long as something uses their memory.
        let another = || shown(pair(SocketType::SEQPACKET).1, own());
        let all: Vec<_> = (1..AGENTS_MAX).map(|_| another().unwrap()).collect();
        assert_eq!(another().err(), Some(Errno::EMFILE));
        drop((all, first));
        assert!(another().is_ok());
    }

    // tests [RDMA-5] [RMR-8]
    #[test]
    fn memory_is_for_the_peer_that_the_program_names() {
        let mut name = [0; SOCKADDR_STORAGE_LEN];
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
