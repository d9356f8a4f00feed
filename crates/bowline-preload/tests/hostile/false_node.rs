//! Somebody who says that he is a node.

use std::fs;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use bowline_host_wire::{
    AREA_LEN, Frame, Greeting, HEAD_LEN, Head, NAME_PREFIX, Op, offered_version,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg,
    sendmsg, socketpair,
};

use crate::program::as_user;

/// What a false node has got out of programs.
#[derive(Debug, Default)]
pub(crate) struct Loot {
    /// Connections and channels.
    pub(crate) channels: usize,
    pub(crate) requests: usize,
    /// What the descriptors were that came, as `/proc/self/fd` names them.
    pub(crate) descriptors: Vec<String>,
    /// What came as memory of a program, the last time.
    pub(crate) memory: Vec<OwnedFd>,
    /// Payload of the last request.
    pub(crate) payload: Vec<u8>,
}

/// The pause of a node that says something byte by byte.
const DRIP: Duration = Duration::from_millis(600);

/// How it answers: bytes and descriptors for a request; `None`: nothing at all, for ever.
pub(crate) type Answers =
    dyn Fn(&FalseNode, &Head) -> Option<(Vec<u8>, Vec<OwnedFd>)> + Send + Sync;

#[derive(Clone)]
pub(crate) struct FalseNode {
    pub(crate) loot: Arc<Mutex<Loot>>,
    /// It keeps a channel open on which it has answered by half.
    pub(crate) stays: bool,
    /// What it says byte by byte, with a pause after each.
    pub(crate) drips: Option<Op>,
    answers: Arc<Answers>,
}

/// A whole answer.
pub(crate) fn frame(head: Head, name: &[u8], control: &[u8], payload: &[u8]) -> Vec<u8> {
    let front = head.emit(name.len(), control.len(), payload.len()).unwrap();
    [&front, name, control, payload].concat()
}

/// What a node says to a new channel.
pub(crate) fn welcome() -> Vec<u8> {
    let head = Head { op: Op::Hello, value: 77, a: 5, b: 0 };
    frame(head, &[], &[], &Greeting { nonce: [7; 16], namespace: 0 }.emit())
}

/// Memory of a socket, as it should be but for its length.
pub(crate) fn memory(len: usize) -> OwnedFd {
    let memory = memfd_create("false", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, len as u64).unwrap();
    rustix::io::pwrite(&memory, b"bowline1", 0).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    memory
}

impl FalseNode {
    pub(crate) fn new(
        answers: impl Fn(&Self, &Head) -> Option<(Vec<u8>, Vec<OwnedFd>)> + Send + Sync + 'static,
    ) -> Self {
        Self { loot: Arc::default(), stays: false, drips: None, answers: Arc::new(answers) }
    }

    /// Answers whoever connects to a listener.
    pub(crate) fn listen(&self, listener: UnixListener) {
        let node = self.clone();
        thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                node.serve(stream);
            }
        });
    }

    /// The same, at a place of a user, whose the node is.
    pub(crate) fn listen_as(&self, user: u32, place: &Path) {
        let (node, place) = (self.clone(), place.to_owned());
        as_user(user, move || node.listen(UnixListener::bind(place).unwrap()));
    }

    fn serve(&self, stream: UnixStream) {
        self.loot.lock().unwrap().channels += 1;
        let node = self.clone();
        thread::spawn(move || node.talk(stream));
    }

    fn take(&self, stream: impl AsFd, to: &mut [u8]) -> (usize, Vec<OwnedFd>) {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8), ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(to)];
        let Ok(got) = recvmsg(stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) else {
            return (0, Vec::new());
        };
        let came: Vec<OwnedFd> = control
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(came) => came.collect(),
                _ => Vec::new(),
            })
            .collect();
        (got.bytes, came)
    }

    /// Notes what came.
    fn note(&self, came: &[OwnedFd]) {
        let link = |one: &OwnedFd| {
            use std::os::fd::AsRawFd;
            fs::read_link(format!("/proc/self/fd/{}", one.as_raw_fd()))
        };
        let names = came.iter().filter_map(|one| Some(link(one).ok()?.display().to_string()));
        self.loot.lock().unwrap().descriptors.extend(names);
    }

    fn talk(&self, mut stream: UnixStream) {
        let mut head = [0; HEAD_LEN];
        loop {
            let (n, came) = self.take(&stream, &mut head);
            self.note(&came);
            if n == 0 || (n < HEAD_LEN && stream.read_exact(&mut head[n..]).is_err()) {
                return;
            }
            let len = u32::from_ne_bytes(head[..4].try_into().unwrap()) as usize;
            let mut rest = vec![0; len.saturating_sub(HEAD_LEN)];
            if stream.read_exact(&mut rest).is_err() {
                return;
            }
            let whole = [&head[..], &rest].concat();
            let Ok(Some((frame, _))) = Frame::parse(&whole) else { return };
            let mut loot = self.loot.lock().unwrap();
            loot.requests += 1;
            loot.payload = frame.payload.to_vec();
            if frame.head.op == Op::Memory {
                loot.memory = came;
            }
            drop(loot);
            if matches!(frame.head.op, Op::Wake | Op::Interrupt) {
                continue;
            }
            let Some((bytes, descriptors)) = (self.answers)(self, &frame.head) else {
                thread::park();
                return;
            };
            let is_slow = self.drips == Some(frame.head.op);
            let step = if is_slow { 1 } else { bytes.len().max(1) };
            for (n, bytes) in bytes.chunks(step).enumerate() {
                let descriptors = if n == 0 { &descriptors[..] } else { &[] };
                if send(&stream, bytes, descriptors).is_err() {
                    return;
                }
                if is_slow {
                    thread::sleep(DRIP);
                }
            }
            drop(descriptors);
            if !matches!(Frame::parse(&bytes), Ok(Some((_, len))) if len == bytes.len()) {
                // What is no answer is its last word.
                if self.stays {
                    thread::park();
                }
                return;
            }
        }
    }

    /// A socket as a node makes them, whose other end takes channels that are offered.
    pub(crate) fn socket(&self, kind: SocketType) -> OwnedFd {
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (theirs, end) = pair.unwrap();
        let unique = format!("{:016x}", bowline_base::entropy::random_u64());
        let name = [&NAME_PREFIX[1..], unique.as_bytes()].concat();
        bind(&end, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
        self.take_offers(end);
        theirs
    }

    /// Takes the channels that are offered on the other end of a socket.
    pub(crate) fn take_offers(&self, end: OwnedFd) {
        set_socket_passcred(&end, true).unwrap();
        let node = self.clone();
        thread::spawn(move || {
            let mut bytes = [0; 64];
            loop {
                let (n, came) = node.take(&end, &mut bytes);
                if n == 0 && came.is_empty() {
                    return;
                }
                if offered_version(&bytes[..n]).is_none() {
                    continue;
                }
                for one in came {
                    let stream = UnixStream::from(one);
                    let hello = Head::new(Op::Hello, 0);
                    let answer = (node.answers)(&node, &hello);
                    // Descriptors do not come along; then it has nothing to say.
                    if answer.is_none_or(|(bytes, came)| send(&stream, &bytes, &came).is_ok()) {
                        node.serve(stream);
                    }
                }
            }
        });
    }
}

pub(crate) fn send(
    stream: impl AsFd,
    bytes: &[u8],
    descriptors: &[OwnedFd],
) -> Result<(), rustix::io::Errno> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    let mut sent = 0;
    while sent < bytes.len() {
        let pieces = [IoSlice::new(&bytes[sent..])];
        sent += sendmsg(&stream, &pieces, &mut control, SendFlags::NOSIGNAL)?;
        control = SendAncillaryBuffer::default();
    }
    Ok(())
}

/// What a node answers that is what it should be.
pub(crate) fn honest(node: &FalseNode, op: Op) -> (Vec<u8>, Vec<OwnedFd>) {
    match op {
        Op::Hello => (welcome(), Vec::new()),
        Op::Open => {
            let (fd, end) = pair();
            node.take_offers(end);
            (frame(Head::new(op, 1), &[], &[], &[]), vec![fd, whole_memory()])
        }
        Op::Attach => (frame(Head::new(op, 1), &[], &[], &[]), vec![whole_memory()]),
        op => (frame(Head::new(op, 0), &[], &[], &[]), Vec::new()),
    }
}

/// The two ends of a socket, which have no names.
pub(crate) fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

/// Memory of the right length.
pub(crate) fn whole_memory() -> OwnedFd {
    memory(AREA_LEN)
}
