//! A process that does not keep to what the library does: nobody else notices.

use std::fs::{File, Permissions};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use bowline_host::{Host, Policy, Principals, Quota};
use bowline_host_wire::{
    AREA_LEN, CONTROL_MAX, FRAME_MAX, Frame, HEAD_LEN, Head, Op, RING_LEN, RING_MESSAGE_MAX,
    VERSION, offer,
};
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, UCred, recvmsg, sendmsg,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod users_of_tests;

use users_of_tests::{STRANGER, as_user};

const LIMIT: Duration = Duration::from_secs(20);
const EBADF: i64 = -9;
const EAGAIN: i64 = -11;

/// Tests that count descriptors of this process run alone.
static SHARED: RwLock<()> = RwLock::new(());

#[allow(dead_code, reason = "held until the end of a test")]
enum Turn {
    WithOthers(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

struct Scene {
    driver: Driver,
    host: Option<Host>,
    folder: PathBuf,
    net: u8,
    _turn: Turn,
}

impl Scene {
    fn new(net: u8) -> Self {
        // A test that fails says so itself.
        Self::start(net, Turn::WithOthers(SHARED.read().unwrap_or_else(PoisonError::into_inner)))
    }

    fn alone(net: u8) -> Self {
        Self::start(net, Turn::Alone(SHARED.write().unwrap_or_else(PoisonError::into_inner)))
    }

    fn start(net: u8, turn: Turn) -> Self {
        let addrs = [1, 2].map(|host| IpAddr::from([127, 79, net, host])).to_vec();
        let core = Config { addrs, generation: 79, ..Config::default() };
        let driver = Driver::start(DriverConfig { core, ..DriverConfig::default() }).unwrap();
        let folder =
            std::env::temp_dir().join(format!("bowline-host-{}-{net}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("host.sock")).unwrap();
        let host =
            Some(Host::start(driver.clone(), listener, Policy::default(), Quota::NONE).unwrap());
        Self { driver, host, folder, net, _turn: turn }
    }

    /// Has other users come, as far as this policy lets them.
    fn serve(&mut self, policy: Policy) {
        self.host = None;
        let place = self.folder.join("host.sock");
        std::fs::remove_file(&place).unwrap();
        let listener = UnixListener::bind(&place).unwrap();
        std::fs::set_permissions(&place, Permissions::from_mode(0o666)).unwrap();
        let host = Host::start(self.driver.clone(), listener, policy, Quota::NONE).unwrap();
        self.host = Some(host);
    }

    /// An address of the node as a `sockaddr_in`.
    fn name(&self, port: u16) -> [u8; 16] {
        let mut name = [0; 16];
        name[..2].copy_from_slice(&2u16.to_ne_bytes());
        name[2..4].copy_from_slice(&port.to_be_bytes());
        name[4..8].copy_from_slice(&[127, 79, self.net, 1]);
        name
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.join("host.sock")).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// A channel that has greeted.
    fn channel(&self) -> UnixStream {
        let mut stream = self.connect();
        let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 };
        assert!(ask(&mut stream, hello, b"", b"") > 0);
        stream
    }

    /// Somebody else's socket works.
    fn works(&self) {
        let mut other = self.channel();
        let (handle, _fd) = open(&mut other);
        assert_eq!(ask(&mut other, receive(handle), b"", &100u64.to_ne_bytes()), EAGAIN);
        let sockets = self.driver.with_core(|core, _| core.info()).sockets.len();
        assert!(sockets >= 1);
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.host = None;
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn receive(handle: i64) -> Head {
    const MSG_DONTWAIT: i32 = 0x40;
    Head { op: Op::Receive, value: handle, a: MSG_DONTWAIT, b: 0 }
}

/// A new socket: its handle, and its descriptor, without which it is closed.
fn open(stream: &mut UnixStream) -> (i64, OwnedFd) {
    let (handle, descriptor, _) = open_with_memory(stream);
    (handle, descriptor)
}

/// A new socket: its handle, its descriptor and its shared memory.
fn open_with_memory(stream: &mut UnixStream) -> (i64, OwnedFd, File) {
    put(stream, Head { op: Op::Open, value: 0, a: 5, b: 0 }, b"", b"");
    let mut bytes = [0; HEAD_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(&*stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(got.bytes, HEAD_LEN);
    let mut descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    let handle = Frame::parse(&bytes).unwrap().unwrap().0.head.value;
    assert!(handle > 0, "{handle}");
    let descriptor = descriptors.next().expect("a descriptor");
    (handle, descriptor, descriptors.next().expect("shared memory").into())
}

fn put(stream: &mut UnixStream, head: Head, name: &[u8], payload: &[u8]) {
    let front = head.emit(name.len(), 0, payload.len()).unwrap();
    stream.write_all(&[&front, name, payload].concat()).unwrap();
}

/// The value of an answer.
fn answer(stream: &mut UnixStream) -> i64 {
    let mut bytes = vec![0; HEAD_LEN];
    stream.read_exact(&mut bytes).unwrap();
    let len = u32::from_ne_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(len, 0);
    stream.read_exact(&mut bytes[HEAD_LEN..]).unwrap();
    Frame::parse(&bytes).unwrap().unwrap().0.head.value
}

fn ask(stream: &mut UnixStream, head: Head, name: &[u8], payload: &[u8]) -> i64 {
    put(stream, head, name, payload);
    answer(stream)
}

/// Tells whether a node has this thread's user as one of its own.
fn is_greeted(stream: &mut UnixStream) -> bool {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 }.emit(0, 0, 0).unwrap();
    let mut bytes = [0; 256];
    let told = stream.write_all(&hello).and_then(|()| stream.read(&mut bytes));
    let frame = told.ok().and_then(|len| Frame::parse(&bytes[..len]).ok()?);
    frame.is_some_and(|(frame, _)| frame.head.value > 0)
}

/// The node ends the channel.
fn ends(mut stream: UnixStream) {
    let mut rest = Vec::new();
    // A reset is an end as well.
    let _ = stream.read_to_end(&mut rest);
    assert!(stream.write(&[0; 64]).is_err() || stream.read(&mut [0]).is_ok_and(|n| n == 0));
}

#[test]
fn garbage_ends_the_channel() {
    let scene = Scene::new(1);
    let head = |len: u32, op: u8, name: u16, control: u32| {
        let mut bytes = Head::new(Op::Wake, 0).emit(0, 0, 0).unwrap();
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes[4] = op;
        bytes[6..8].copy_from_slice(&name.to_ne_bytes());
        bytes[24..28].copy_from_slice(&control.to_ne_bytes());
        bytes
    };
    for bad in [
        head(0, 14, 0, 0),
        head(31, 14, 0, 0),
        head(FRAME_MAX as u32 + 1, 8, 0, 0),
        head(u32::MAX, 8, 0, 0),
        head(32, 0, 0, 0),
        head(32, 255, 0, 0),
        head(32, 8, 1, 0),
        head(500, 8, 129, 0),
        head(FRAME_MAX as u32, 8, 0, CONTROL_MAX as u32 + 1),
        [0xff; HEAD_LEN],
    ] {
        let mut channel = scene.channel();
        channel.write_all(&bad).unwrap();
        ends(channel);
        scene.works();
    }
}

#[test]
fn a_channel_greets_once_and_first() {
    let scene = Scene::new(2);
    let mut silent = scene.connect();
    put(&mut silent, Head { op: Op::Open, value: 0, a: 5, b: 0 }, b"", b"");
    ends(silent);
    let mut twice = scene.channel();
    put(&mut twice, Head { op: Op::Hello, value: 0, a: VERSION, b: 0 }, b"", b"");
    ends(twice);
    let mut newer = scene.connect();
    let hello = Head { op: Op::Hello, value: 0, a: VERSION + 1, b: 0 };
    assert_eq!(ask(&mut newer, hello, b"", b""), -93, "EPROTONOSUPPORT");
    scene.works();
}

#[test]
fn a_channel_names_no_socket_of_others() {
    let scene = Scene::new(3);
    let mut other = scene.channel();
    let (theirs, _theirs_fd) = open(&mut other);
    let mut channel = scene.channel();
    let (own, _own_fd) = open(&mut channel);
    for handle in [theirs, 0, -1, own + 1, i64::MAX, i64::MIN] {
        for op in [Op::Bind, Op::LocalName, Op::Send, Op::Receive, Op::SetOption] {
            assert_eq!(ask(&mut channel, Head::new(op, handle), b"", &[0; 8]), EBADF);
        }
    }
    assert_eq!(ask(&mut channel, Head::new(Op::Attach, 0), b"", b""), EBADF, "no descriptor");
    scene.works();
}

/// A process with many threads uses one channel for a `Look`, which has no answer, and then for an
/// `Attach`: the node may read both at once.
#[test]
fn a_descriptor_belongs_to_its_request_and_not_to_the_one_before() {
    let scene = Scene::new(8);
    let mut other = scene.channel();
    let (handle, fd) = open(&mut other);
    let mut channel = scene.channel();
    let look = Head::new(Op::Wake, handle).emit(0, 0, 0).unwrap();
    let attach = Head::new(Op::Attach, 0).emit(0, 0, 0).unwrap();
    channel.write_all(&look[..10]).unwrap();
    let rest = [&look[10..], &attach].concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let pieces = [IoSlice::new(&rest)];
    sendmsg(&channel, &pieces, &mut control, SendFlags::empty()).unwrap();
    assert_eq!(answer(&mut channel), handle);
}

#[test]
fn requests_in_pieces_in_floods_and_without_end_hold_up_nobody() {
    let scene = Scene::new(4);
    // Half a request, and nothing more.
    let mut half = scene.channel();
    half.write_all(&Head::new(Op::Send, 1).emit(0, 0, 1000).unwrap()[..20]).unwrap();
    // A long one that never ends.
    let mut long = scene.channel();
    let front = Head::new(Op::Send, 1).emit(0, 0, FRAME_MAX - HEAD_LEN).unwrap();
    long.write_all(&front).unwrap();
    long.write_all(&vec![0; 1 << 20]).unwrap();
    // Requests by the thousand whose answers nobody reads.
    let mut deaf = scene.channel();
    deaf.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let (handle, _deaf_fd) = open(&mut deaf);
    let one = Head::new(Op::LocalName, handle).emit(0, 0, 0).unwrap();
    let many = one.repeat(1000);
    while deaf.write_all(&many).is_ok() {}
    scene.works();
    // One byte at a time.
    let mut slow = scene.channel();
    let (handle, _slow_fd) = open(&mut slow);
    for byte in Head::new(Op::LocalName, handle).emit(0, 0, 0).unwrap() {
        slow.write_all(&[byte]).unwrap();
    }
    assert_eq!(answer(&mut slow), 0);
    scene.works();
    drop((half, long, deaf));
    scene.works();
}

/// What waits is ended by whoever waits, and by nothing else.
#[test]
fn an_interrupt_ends_the_wait_and_only_that() {
    let scene = Scene::new(5);
    let mut channel = scene.channel();
    let (handle, _fd) = open(&mut channel);
    put(&mut channel, Head::new(Op::Interrupt, 0), b"", b"");
    assert_eq!(ask(&mut channel, Head::new(Op::LocalName, handle), b"", b""), 0);
    // To itself, until it would have to wait for room.
    let name = scene.name(7001);
    assert_eq!(ask(&mut channel, Head::new(Op::Bind, handle), &name, b""), 0);
    let send = Head { a: 0x40, ..Head::new(Op::Send, handle) };
    while ask(&mut channel, send, &name, &[0; 60_000]) == 60_000 {}
    put(&mut channel, Head::new(Op::Send, handle), &name, &[0; 60_000]);
    put(&mut channel, Head::new(Op::Interrupt, 0), b"", b"");
    assert_eq!(answer(&mut channel), -4, "EINTR");
    // Gone in the middle of a wait.
    put(&mut channel, Head::new(Op::Send, handle), &name, &[0; 60_000]);
    drop(channel);
    scene.works();
}

/// Requests by the hundred thousand behind one that waits, so that all are there when it ends.
#[test]
fn a_flood_behind_a_wait_holds_up_nobody() {
    let scene = Scene::new(9);
    let mut channel = scene.channel();
    let (handle, _fd) = open(&mut channel);
    let name = scene.name(7001);
    assert_eq!(ask(&mut channel, Head::new(Op::Bind, handle), &name, b""), 0);
    // SO_SNDTIMEO of 0.3 s.
    let limit = [0i64, 300_000].map(i64::to_ne_bytes).concat();
    let option = Head { a: 1, b: 21, ..Head::new(Op::SetOption, handle) };
    assert_eq!(ask(&mut channel, option, b"", &limit), 0);
    let send = Head { a: 0x40, ..Head::new(Op::Send, handle) };
    while ask(&mut channel, send, &name, &[0; 60_000]) == 60_000 {}
    put(&mut channel, Head::new(Op::Send, handle), &name, &[0; 60_000]);
    let look = Head::new(Op::Wake, handle).emit(0, 0, 0).unwrap();
    let many = look.repeat(1000);
    channel.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    while channel.write_all(&many).is_ok() {}
    assert_eq!(answer(&mut channel), -110, "ETIMEDOUT");
    scene.works();
    drop(channel);
    scene.works();
}

/// A socket of the node's with a destination to which sends may be posted.
fn open_with_destination(scene: &Scene) -> (UnixStream, i64, OwnedFd, File) {
    let mut channel = scene.channel();
    let (handle, descriptor, memory) = open_with_memory(&mut channel);
    let name = scene.name(7000 + (handle % 50_000) as u16);
    assert_eq!(ask(&mut channel, Head::new(Op::Bind, handle), &name, b""), 0);
    assert_eq!(ask(&mut channel, Head::new(Op::Send, handle), &name, b"one"), 3);
    (channel, handle, descriptor, memory)
}

fn is_closed(scene: &Scene, channel: &mut UnixStream, handle: i64) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < LIMIT {
        put(channel, Head::new(Op::Wake, handle), b"", b"");
        if ask(channel, Head::new(Op::LocalName, handle), b"", b"") == EBADF {
            scene.works();
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Where the numbers are that a program writes; see `bowline_host_wire::Area`.
const SENDS: u64 = 192;
const LOCK: u64 = 208;
const PUSHED: u64 = 256;
const TAKEN: u64 = 320;
const TOKEN_TAKEN: u64 = 328;
const RING: u64 = 4096;

/// What cannot be in shared memory closes the socket, and no other.
#[test]
fn memory_that_lies_closes_its_socket() {
    let scene = Scene::new(6);
    let entry = |len: u32, destination: u32| {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        bytes[4..8].copy_from_slice(&destination.to_ne_bytes());
        bytes
    };
    let position = |n: u64| n.to_ne_bytes();
    let lies: [(&str, [u8; 16], u64, [u8; 8]); 9] = [
        ("more than the ring has", entry(0, 0), SENDS, position(RING_LEN as u64 + 16)),
        ("before what was carried out", entry(0, 0), SENDS, position(u64::MAX - 15)),
        ("in the middle of an entry", entry(0, 0), SENDS, position(8)),
        ("longer than a message may be", entry(65_537, 0), SENDS, position(131_072)),
        ("longer than what is there", entry(100, 0), SENDS, position(32)),
        ("no such destination", entry(0, 8), SENDS, position(16)),
        ("a destination without a name", entry(0, 7), SENDS, position(16)),
        (
            "nothing up to the end, of which not all is there",
            entry(u32::MAX, 0),
            SENDS,
            position(16),
        ),
        ("taken what was not lent", entry(0, 0), TAKEN, position(1 << 20)),
    ];
    for (what, first, at, value) in lies {
        let (mut channel, handle, _descriptor, memory) = open_with_destination(&scene);
        memory.write_all_at(&first, RING).unwrap();
        memory.write_all_at(&value, at).unwrap();
        assert!(is_closed(&scene, &mut channel, handle), "{what}");
    }
}

/// Sockets that are closed in one round with others behind them.
#[test]
fn several_sockets_break_in_one_round() {
    let scene = Scene::new(10);
    let mut channel = scene.channel();
    let sockets: Vec<_> = (0..8).map(|_| open_with_memory(&mut channel)).collect();
    for (handle, _, memory) in sockets.iter().step_by(2) {
        memory.write_all_at(&(1u64 << 40).to_ne_bytes(), SENDS).unwrap();
        put(&mut channel, Head::new(Op::Wake, *handle), b"", b"");
    }
    for (n, (handle, ..)) in sockets.iter().enumerate() {
        put(&mut channel, Head::new(Op::Wake, *handle), b"", b"");
        let broken = n % 2 == 0;
        let name = ask(&mut channel, Head::new(Op::LocalName, *handle), b"", b"");
        assert!(name == if broken { EBADF } else { 0 }, "{n}: {name}");
    }
    let refused = scene.host.as_ref().unwrap().refusals();
    assert_eq!(refused.iter().map(|one| one.count).sum::<u64>(), 4, "{refused:?}");
    scene.works();
}

/// Numbers that may be anything, and memory full of noise that changes all the time: the node and
/// other sockets go on.
#[test]
fn noise_in_memory_is_harmless() {
    let scene = Scene::new(7);
    for at in [LOCK, TOKEN_TAKEN, 128, 64, 72, 80, 256, 264, 272, 512, 520, 528] {
        let (mut channel, handle, _descriptor, memory) = open_with_destination(&scene);
        memory.write_all_at(&[0xff; 4], at).unwrap();
        put(&mut channel, Head::new(Op::Wake, handle), b"", b"");
        let name = scene.name(7000 + (handle % 50_000) as u16);
        let sent = ask(&mut channel, Head::new(Op::Send, handle), &name, b"two");
        assert!(sent == 3 || sent == EBADF, "{sent}");
        scene.works();
    }
    let mut random = 1u64;
    let mut noise = vec![0; AREA_LEN];
    for _ in 0..200 {
        let (mut channel, handle, _descriptor, memory) = open_with_destination(&scene);
        for word in noise.chunks_mut(8) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // Mostly numbers that could be right.
            let small = random.is_multiple_of(4);
            let value = if small { random } else { random >> 24 & 0x1_fff0 };
            word.copy_from_slice(&value.to_ne_bytes());
        }
        memory.write_all_at(&noise, 0).unwrap();
        put(&mut channel, Head::new(Op::Wake, handle), b"", b"");
        let name = scene.name(7000 + (handle % 50_000) as u16);
        put(&mut channel, Head { a: 0x40, ..Head::new(Op::Send, handle) }, &name, b"two");
        memory.write_all_at(&noise[8..], 0).unwrap();
        answer(&mut channel);
        assert!(memory.set_len(0).is_err(), "nobody makes it shorter");
    }
    scene.works();
}

/// A process has taken a wake token and was killed before it said so; others have the socket. What
/// there is to receive is too long for the ring.
#[test]
fn a_wake_token_that_somebody_took_in_silence_comes_again() {
    let scene = Scene::new(37);
    let (mut channel, handle, socket, memory) = open_with_destination(&scene);
    let name = scene.name(7000 + (handle % 50_000) as u16);
    let long = vec![7; RING_MESSAGE_MAX + 1];
    let sent = ask(&mut channel, Head::new(Op::Send, handle), &name, &long);
    assert_eq!(sent, long.len() as i64);
    // What was sent first went through the ring.
    let mut position = [0; 8];
    memory.read_exact_at(&mut position, PUSHED).unwrap();
    memory.write_all_at(&position, TAKEN).unwrap();
    let mut others = vec![0; 4];
    for _ in 0..3 {
        let mut readable = [PollFd::new(&socket, PollFlags::IN)];
        let limit = Timespec::try_from(LIMIT).unwrap();
        assert_eq!(poll(&mut readable, Some(&limit)), Ok(1), "there is something to receive");
        assert!(rustix::net::recv(&socket, &mut others, RecvFlags::DONTWAIT).is_ok());
    }
}

/// A pair as a program makes it for a channel.
fn stream_pair() -> (UnixStream, OwnedFd) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(LIMIT)).unwrap();
    (ours, theirs.into())
}

/// Sends bytes on a socket, with descriptors, and with this process as the sender.
fn send_along(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
    let process = rustix::process::getpid();
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let sender = UCred { pid: process, uid, gid };
    const ROOM: usize = rustix::cmsg_space!(ScmRights(250), ScmCredentials(1));
    let mut space = [MaybeUninit::uninit(); ROOM];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    assert!(control.push(SendAncillaryMessage::ScmCredentials(sender)));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags).is_ok()
}

/// The connection ends, whether or not something comes before.
fn is_ended(mut stream: UnixStream) {
    let mut sink = [0; 4096];
    while stream.read(&mut sink).is_ok_and(|n| n > 0) {}
    let ended = stream.read(&mut sink);
    let reset = matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset);
    assert!(matches!(ended, Ok(0)) || reset, "{ended:?}");
}

#[test]
fn a_channel_may_come_through_its_socket() {
    let scene = Scene::new(11);
    let mut first = scene.channel();
    let (handle, fd) = open(&mut first);
    let (other, _other_fd) = open(&mut first);
    let (mut ours, theirs) = stream_pair();
    assert!(send_along(&fd, &offer(VERSION), &[theirs.as_fd()]));
    drop(theirs);
    assert!(answer(&mut ours) > 0, "the node greets by itself");
    assert_eq!(ask(&mut ours, Head::new(Op::LocalName, handle), b"", b""), 0);
    assert_eq!(ask(&mut ours, Head::new(Op::LocalName, other), b"", b""), EBADF);
    let (mut newer, theirs) = stream_pair();
    assert!(send_along(&fd, &offer(VERSION + 1), &[theirs.as_fd()]));
    assert_eq!(answer(&mut newer), -93, "EPROTONOSUPPORT");
    drop(theirs);
    is_ended(newer);
    scene.works();
}

/// What is sent on a socket and is no offer, and offers of what is no pair of the sender's.
#[test]
fn offers_that_are_none_are_dropped() {
    let scene = Scene::new(12);
    let mut channel = scene.channel();
    let (handle, fd) = open(&mut channel);
    let wait = |channel: &mut UnixStream| {
        assert_eq!(ask(channel, Head::new(Op::LocalName, handle), b"", b""), 0);
    };
    // Of other kinds, with other bytes, several at once, none.
    let (ours, theirs) = stream_pair();
    let file = File::open("/proc/self/comm").unwrap();
    let datagrams = std::os::unix::net::UnixDatagram::pair().unwrap();
    let tcp = std::net::TcpListener::bind("127.79.12.1:0").unwrap();
    for one in [file.as_fd(), datagrams.0.as_fd(), tcp.as_fd(), fd.as_fd()] {
        assert!(send_along(&fd, &offer(VERSION), &[one]));
        wait(&mut channel);
    }
    assert!(send_along(&fd, &[7; 60], &[theirs.as_fd()]));
    wait(&mut channel);
    assert!(send_along(&fd, &offer(VERSION), &[theirs.as_fd(), theirs.as_fd()]));
    assert!(send_along(&fd, &offer(VERSION), &[]));
    assert!(send_along(&fd, &offer(VERSION), &[theirs.as_fd(); 250]));
    wait(&mut channel);
    drop(theirs);
    is_ended(ours);
    // A connection to somebody else's server: what that one says is not the sender's.
    let server = UnixListener::bind(scene.folder.join("server.sock")).unwrap();
    let client = UnixStream::connect(scene.folder.join("server.sock")).unwrap();
    assert!(send_along(&fd, &offer(VERSION), &[client.as_fd()]));
    drop(client);
    is_ended(server.accept().unwrap().0);
    // The program's end of a channel, which the node has made itself.
    assert!(send_along(&fd, &offer(VERSION), &[channel.as_fd()]));
    wait(&mut channel);
    scene.works();
}

/// Both ends of a pair, so that the node talks to itself.
#[test]
fn a_node_does_not_talk_to_itself() {
    let scene = Scene::alone(13);
    let mut channel = scene.channel();
    let (handle, fd) = open(&mut channel);
    let before = descriptors();
    for round in 0..50 {
        let (ours, theirs) = stream_pair();
        for end in [ours.as_fd(), theirs.as_fd()] {
            assert!(send_along(&fd, &offer(VERSION), &[end]));
            if round % 2 == 0 {
                assert_eq!(ask(&mut channel, Head::new(Op::LocalName, handle), b"", b""), 0);
            }
        }
        assert_eq!(ask(&mut channel, Head::new(Op::LocalName, handle), b"", b""), 0);
    }
    come_back_to(before);
    scene.works();
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// What the node has kept of programs is gone.
fn come_back_to(before: usize) {
    let begun = Instant::now();
    while descriptors() > before {
        assert!(begun.elapsed() < LIMIT, "{} descriptors, not {before}", descriptors());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A channel that is given its own other end, with requests that want none, and with half of one
/// that does.
#[test]
fn a_channel_with_its_own_other_end_ends() {
    let scene = Scene::alone(14);
    let before = descriptors();
    for n in 0..100 {
        let channel = scene.channel();
        let op = [Op::Wake, Op::Attach, Op::Memory, Op::Open, Op::Watch][n % 5];
        let request = Head { op, value: 0, a: 5, b: 0 }.emit(0, 0, 0).unwrap();
        let len = if n % 3 == 0 { 20 } else { HEAD_LEN };
        assert!(send_along(&channel, &request[..len], &[channel.as_fd()]));
        drop(channel);
    }
    come_back_to(before);
    scene.works();
}

/// The same, with the other end in the queue of what comes along: of a socket that may be one of a
/// node's, and of one that may be an agent's.
#[test]
fn a_channel_whose_other_end_waits_in_what_came_along_ends() {
    let scene = Scene::alone(19);
    let before = descriptors();
    for n in 0..100 {
        let channel = scene.channel();
        let op = [Op::Wake, Op::Attach, Op::Memory, Op::Open][n % 4];
        let request = Head { op, value: 0, a: 5, b: 0 }.emit(0, 0, 8).unwrap();
        let request = [&request[..], &[0; 8]].concat();
        let len = [20, HEAD_LEN, HEAD_LEN + 8][n % 3];
        let (inner, outer) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        assert!(send_along(&inner, b"x", &[channel.as_fd()]));
        assert!(send_along(&channel, &request[..len], &[outer.as_fd()]));
        if n % 2 == 0 {
            drop(inner);
        } else {
            // The queue grows when the node has the socket already.
            assert!(send_along(&inner, b"", &[channel.as_fd()]));
        }
        drop((channel, outer));
    }
    come_back_to(before);
    scene.works();
}

/// The same, with so many requests before that a later round carries it out.
#[test]
fn what_came_with_a_late_request_is_not_kept_either() {
    let scene = Scene::alone(21);
    let before = descriptors();
    for _ in 0..30 {
        let channel = scene.channel();
        let look = Head::new(Op::Wake, 0).emit(0, 0, 0).unwrap().repeat(100);
        let attach = Head::new(Op::Attach, 0).emit(0, 0, 0).unwrap();
        let (inner, outer) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        assert!(send_along(&inner, b"x", &[channel.as_fd()]));
        assert!(send_along(&channel, &[&look[..], &attach].concat(), &[outer.as_fd()]));
    }
    come_back_to(before);
    scene.works();
}

/// A program shares the flags of the channel that it has offered: it lets writes wait, and reads no
/// answers.
#[test]
fn a_channel_that_lets_writes_wait_holds_up_nobody() {
    let scene = Scene::new(22);
    let mut first = scene.channel();
    let (handle, fd) = open(&mut first);
    let (mut ours, theirs) = stream_pair();
    assert!(send_along(&fd, &offer(VERSION), &[theirs.as_fd()]));
    assert!(answer(&mut ours) > 0);
    let request = Head::new(Op::LocalName, handle).emit(0, 0, 0).unwrap();
    ours.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    // The node may set the flag when it takes the channel, so it is cleared again and again.
    for _ in 0..100 {
        rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).unwrap();
        if ours.write_all(&request.repeat(1000)).is_err() {
            break;
        }
    }
    scene.works();
}

/// A program has the system add a descriptor of its process to whatever comes on a channel, by the
/// options that it shares with the node.
#[test]
fn descriptors_that_nobody_sends_are_closed() {
    const SO_PASSPIDFD: libc::c_int = 76;
    let scene = Scene::alone(23);
    let mut first = scene.channel();
    let (handle, fd) = open(&mut first);
    let (mut ours, theirs) = stream_pair();
    assert!(send_along(&fd, &offer(VERSION), &[theirs.as_fd()]));
    assert!(answer(&mut ours) > 0);
    let yes: libc::c_int = 1;
    let len = size_of_val(&yes) as libc::socklen_t;
    // SAFETY: the descriptor is open, and the value is there.
    let set = unsafe {
        let at = (&raw const yes).cast();
        libc::setsockopt(theirs.as_raw_fd(), libc::SOL_SOCKET, SO_PASSPIDFD, at, len)
    };
    if set != 0 {
        return bowline_testkit::skipped::because("this kernel has no SO_PASSPIDFD");
    }
    drop(theirs);
    let before = descriptors();
    // The node may take such a descriptor for one too many, and end the channel.
    for _ in 0..200 {
        put(&mut ours, Head::new(Op::LocalName, handle), b"", b"");
        if ours.read(&mut [0; 256]).is_ok_and(|n| n == 0) {
            break;
        }
    }
    come_back_to(before);
    scene.works();
}

/// Threads that close what programs have sent, or wait half a second for more of it.
fn closing() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
    threads.filter_map(|t| name(t).ok()).filter(|n| n.trim() == "bowline-close").count()
}

/// Descriptors by the ten thousand of a user whose last ones cannot be closed, by both ways.
#[test]
fn what_a_user_sends_is_bounded_while_it_cannot_be_closed() {
    const BOUND: usize = 1024 + 253 + 64;
    let scene = Scene::alone(20);
    let before = descriptors();
    let mut peers = Vec::new();
    let mut sockets = Vec::new();
    let mut channel = scene.channel();
    let begun = Instant::now();
    // Those of other tests do not stay.
    while closing() > 0 {
        assert!(begun.elapsed() < LIMIT, "{} threads close", closing());
        std::thread::sleep(Duration::from_millis(10));
    }
    while !all_are_stuck() {
        assert!(begun.elapsed() < LIMIT, "{} threads close", closing());
        let (_, fd) = open(&mut channel);
        let (stream, peer) = lingering(20);
        assert!(send_along(&fd, &offer(VERSION), &[stream.as_fd()]));
        // Whoever closes it last waits: the node, or this thread.
        std::thread::spawn(move || drop(stream));
        assert_eq!(ask(&mut channel, Head::new(Op::LocalName, 0), b"", b""), EBADF);
        peers.push(peer);
        sockets.push(fd);
    }
    let file = File::open("/proc/self/comm").unwrap();
    let own = descriptors();
    let mut most = 0;
    let connect = || UnixStream::connect(scene.folder.join("host.sock")).unwrap();
    let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 }.emit(0, 0, 0).unwrap();
    for _ in 0..60 {
        let mut other = connect();
        other.set_read_timeout(Some(LIMIT)).unwrap();
        let _ = other.write_all(&hello);
        let greeted = other.read(&mut [0; 256]).is_ok_and(|n| n > 0);
        for _ in 0..20 {
            let _ = greeted && send_along(&other, b"x", &[file.as_fd(); 250]);
        }
        for fd in &sockets {
            let _ = send_along(fd, b"x", &[file.as_fd(); 250]);
        }
        most = most.max(descriptors());
    }
    std::thread::sleep(Duration::from_millis(500));
    most = most.max(descriptors());
    assert!(most <= own + BOUND, "{most} descriptors, {own} before");
    assert!(most > own + 1024, "{most}: they cannot be closed");
    drop((channel, sockets, file));
    drop(peers);
    come_back_to(before);
    scene.works();
}

/// A user's other programs wait while what one has sent cannot be closed, and continue afterwards.
#[test]
fn a_program_waits_while_another_of_its_user_has_sent_too_much() {
    let scene = Scene::alone(28);
    let before = descriptors();
    let (mut innocent, mut hostile) = (scene.channel(), scene.channel());
    let (handle, _fd) = open(&mut innocent);
    let begun = Instant::now();
    let mut peers = Vec::new();
    while !all_are_stuck() {
        assert!(begun.elapsed() < LIMIT, "{} threads close", closing());
        for _ in 0..4 {
            let (_, fd) = open(&mut hostile);
            let (stream, peer) = lingering(28);
            assert!(send_along(&fd, &offer(VERSION), &[stream.as_fd()]));
            // Whoever closes it last waits: the node, or this thread.
            std::thread::spawn(move || drop(stream));
            assert_eq!(ask(&mut hostile, Head::new(Op::LocalName, 0), b"", b""), EBADF);
            peers.push(peer);
        }
    }
    let file = File::open("/proc/self/comm").unwrap();
    let own = descriptors();
    // Its own requests would wait as well.
    while descriptors() < own + 1024 {
        assert!(begun.elapsed() < LIMIT, "{} descriptors, {own} before", descriptors());
        let other = UnixStream::connect(scene.folder.join("host.sock")).unwrap();
        let _ = send_along(&other, b"x", &[file.as_fd(); 250]);
    }
    put(&mut innocent, Head::new(Op::LocalName, handle), b"", b"");
    innocent.set_nonblocking(true).unwrap();
    let early = innocent.read(&mut [0; 256]).map_err(|error| error.kind());
    assert_eq!(early, Err(std::io::ErrorKind::WouldBlock), "its user is behind");
    std::thread::sleep(Duration::from_millis(500));
    innocent.set_nonblocking(false).unwrap();
    drop(peers);
    assert_eq!(answer(&mut innocent), 0);
    drop((innocent, _fd, hostile, file));
    come_back_to(before);
    scene.works();
}

/// All threads that close for one user are stuck, and stay so.
fn all_are_stuck() -> bool {
    let all = || closing() >= 8;
    all() && {
        std::thread::sleep(Duration::from_millis(700));
        all()
    }
}

/// Sockets and a channel of root's that a child of another user has as well. What he sends, and
/// nobody can close, is his, also when the socket ends with it in its queue: root goes on, with
/// these and with new ones, and the node has no more of it than of any user.
#[test]
fn what_a_stranger_sends_on_sockets_of_others_locks_nobody_out() {
    if !rustix::process::geteuid().is_root() {
        return bowline_testkit::skipped::because("only root can take on other users");
    }
    const BOUND: usize = 1024 + 253 + 64;
    let scene = Scene::alone(25);
    let before = descriptors();
    let (mut peers, mut sockets) = (Vec::new(), Vec::new());
    let mut root = scene.channel();
    let begun = Instant::now();
    while !all_are_stuck() {
        assert!(begun.elapsed() < LIMIT, "{} threads close", closing());
        // Several for each look, which takes long: not all are the node's to wait for.
        for _ in 0..4 {
            let (_, fd) = open(&mut root);
            let (stream, peer) = lingering(25);
            let theirs = fd.try_clone().unwrap();
            as_user(STRANGER, &[], move || {
                assert!(send_along(&theirs, &offer(VERSION), &[stream.as_fd()]));
                // Whoever closes it last waits: the node, or this thread.
                std::thread::spawn(move || drop(stream));
            });
            assert_eq!(ask(&mut root, Head::new(Op::LocalName, 0), b"", b""), EBADF);
            peers.push(peer);
            // Every other one ends, the rest is for the flood.
            if peers.len() % 2 == 0 {
                sockets.push(fd);
            }
        }
    }
    let own = descriptors();
    let mut most = 0;
    for _ in 0..20 {
        let shared: Vec<OwnedFd> = sockets.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let passed = OwnedFd::from(scene.channel());
        as_user(STRANGER, &[], move || {
            let file = File::open("/proc/self/comm").unwrap();
            for socket in shared.iter().chain([&passed]) {
                let _ = send_along(socket, b"x", &[file.as_fd(); 250]);
            }
        });
        most = most.max(descriptors());
    }
    std::thread::sleep(Duration::from_millis(300));
    most = most.max(descriptors());
    assert!(most <= own + BOUND + 64, "{most} descriptors, {own} before");
    assert!(most > own + 1000, "{most}: they cannot be closed, {own} before");
    // Root's own sockets and channels end by the thousand, with and without his in their queues.
    for n in 0..1100 {
        let (mut channel, (_, fd)) = (scene.channel(), open(&mut root));
        if n % 10 == 0 {
            let (theirs, file) = (channel.try_clone().unwrap(), peers[0].try_clone().unwrap());
            as_user(STRANGER, &[], move || {
                for socket in [theirs.as_fd(), fd.as_fd()] {
                    let _ = send_along(socket, b"x", &[file.as_fd()]);
                }
            });
            let _ = channel.set_nonblocking(true);
            let _ = channel.write(b"no request");
        }
    }
    assert_eq!(
        ask(&mut root, Head::new(Op::LocalName, 0), b"", b""),
        EBADF,
        "the channel of before"
    );
    scene.works();
    drop((root, sockets));
    drop(peers);
    come_back_to(before);
    scene.works();
}

/// Who connects to a node that has no descriptors left is not left waiting, and others go on.
#[test]
fn a_newcomer_is_refused_at_once_where_there_are_no_descriptors() {
    let scene = Scene::alone(24);
    let mut channel = scene.channel();
    let (handle, _fd) = open(&mut channel);
    let place = rustix::net::SocketAddrUnix::new(scene.folder.join("host.sock")).unwrap();
    let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 }.emit(0, 0, 0).unwrap();
    // Threads of other tests may give some back meanwhile.
    let newcomers: Vec<OwnedFd> = (0..100)
        .map(|_| {
            let unix = rustix::net::AddressFamily::UNIX;
            rustix::net::socket(unix, rustix::net::SocketType::STREAM, None).unwrap()
        })
        .collect();
    let usual = getrlimit(Resource::Nofile);
    let highest = newcomers.iter().map(AsRawFd::as_raw_fd).max().unwrap();
    let most = Rlimit { current: Some(highest as u64 + 10), ..usual };
    setrlimit(Resource::Nofile, most).unwrap();
    let mut taken: Vec<OwnedFd> = Vec::new();
    let told = newcomers.into_iter().find_map(|newcomer| {
        taken.extend(std::iter::from_fn(|| rustix::io::dup(&newcomer).ok()));
        rustix::net::connect(&newcomer, &place).unwrap();
        let mut newcomer = UnixStream::from(newcomer);
        newcomer.set_read_timeout(Some(LIMIT)).unwrap();
        let _ = newcomer.write_all(&hello);
        Some(newcomer.read(&mut [0; 64])).filter(|told| !matches!(told, Ok(1..)))
    });
    let answered = ask(&mut channel, Head::new(Op::LocalName, handle), b"", b"");
    setrlimit(Resource::Nofile, usual).unwrap();
    drop(taken);
    let told = told.expect("one of them finds no descriptor").map_err(|error| error.kind());
    assert!(matches!(told, Ok(0) | Err(std::io::ErrorKind::ConnectionReset)), "{told:?}");
    assert_eq!(answered, 0);
    scene.works();
}

/// What stands behind a request with a descriptor is read as well.
#[test]
fn requests_behind_a_descriptor_are_answered() {
    let scene = Scene::new(18);
    let mut channel = scene.channel();
    let (handle, fd) = open(&mut channel);
    let attach = Head::new(Op::Attach, 0).emit(0, 0, 0).unwrap();
    let name = Head::new(Op::LocalName, handle).emit(0, 0, 0).unwrap();
    for _ in 0..100 {
        assert!(send_along(&channel, &attach, &[fd.as_fd()]));
        channel.write_all(&name).unwrap();
        assert_eq!(answer(&mut channel), handle);
        assert_eq!(answer(&mut channel), 0);
    }
}

/// A socket whose close waits: it lingers, and its peer reads nothing.
fn lingering(net: u8) -> (OwnedFd, std::net::TcpStream) {
    let listener =
        std::net::TcpListener::bind((std::net::Ipv4Addr::new(127, 79, net, 2), 0)).unwrap();
    let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    rustix::net::sockopt::set_socket_linger(&stream, Some(LIMIT * 3)).unwrap();
    stream.set_nonblocking(true).unwrap();
    while (&stream).write(&[0; 65_536]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    (stream.into(), peer)
}

/// Descriptors whose close waits, by all ways that lead into the node: others notice nothing, and
/// neither does its end.
#[test]
fn what_cannot_be_closed_stops_nobody() {
    let mut scene = Scene::new(15);
    let mut peers = Vec::new();
    let mut works = |scene: &Scene, sent: (OwnedFd, std::net::TcpStream)| {
        // Whoever closes it last waits: the node, or this thread.
        std::thread::spawn(move || drop(sent.0));
        peers.push(sent.1);
        let begun = Instant::now();
        scene.works();
        assert!(begun.elapsed() < LIMIT / 4, "{:?}", begun.elapsed());
    };
    // Before the greeting, where the system refuses it from Linux 6.16 on.
    for _ in 0..3 {
        let (stream, peer) = lingering(15);
        let channel = scene.connect();
        let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 }.emit(0, 0, 0).unwrap();
        let _ = send_along(&channel, &hello[..9], &[stream.as_fd()]);
        drop(channel);
        works(&scene, (stream, peer));
    }
    // With requests that want one, that do not, and with none.
    for op in [Op::Attach, Op::Memory, Op::Watch, Op::Open] {
        for len in [5, HEAD_LEN] {
            let (stream, peer) = lingering(15);
            let channel = scene.channel();
            let request = Head { op, value: 0, a: 5, b: 0 }.emit(0, 0, 0).unwrap();
            assert!(send_along(&channel, &request[..len], &[stream.as_fd()]));
            works(&scene, (stream, peer));
            drop(channel);
        }
    }
    // In the queue of a channel of which nobody reads, that ends.
    let (stream, peer) = lingering(15);
    let mut full = scene.channel();
    let (handle, _full_fd) = open(&mut full);
    let name = Head::new(Op::LocalName, handle).emit(0, 0, 0).unwrap();
    full.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    while full.write_all(&name.repeat(1000)).is_ok() {}
    let _ = send_along(&full, b"x", &[stream.as_fd()]);
    drop(full);
    works(&scene, (stream, peer));
    // On a socket, as an offer and not, and left in its queue at the end.
    let mut channel = scene.channel();
    for bytes in [&offer(VERSION)[..], b"x", &[1; 40]] {
        let (_, fd) = open(&mut channel);
        let (stream, peer) = lingering(15);
        assert!(send_along(&fd, bytes, &[stream.as_fd()]));
        drop(fd);
        works(&scene, (stream, peer));
    }
    let begun = Instant::now();
    scene.host = None;
    assert!(begun.elapsed() < LIMIT / 4, "{:?}", begun.elapsed());
}

/// A program's things are not the node's own for whoever goes on: sockets of UDP and of TCP at the
/// place of a listener, whatever they came with.
#[test]
fn a_hand_over_takes_for_a_listener_what_listens() {
    let mut scene = Scene::new(16);
    let place = (std::net::Ipv4Addr::new(127, 79, 16, 1), 16_385);
    let datagrams = std::net::UdpSocket::bind(place).unwrap();
    let mut channels = Vec::new();
    for op in [Op::Open, Op::Attach, Op::Memory, Op::Watch, Op::LocalName] {
        let mut channel = scene.channel();
        let (_, fd) = open(&mut channel);
        assert!(send_along(&fd, b"x", &[datagrams.as_fd()]));
        let request = Head { op, value: 1, a: 5, b: 0 }.emit(0, 0, 0).unwrap();
        assert!(send_along(&channel, &request[..30], &[datagrams.as_fd()]));
        channels.push((channel, fd));
    }
    scene.works();
    let all = scene.host.take().unwrap().hand_over().unwrap();
    let own = scene.driver.hand_over(all.writer().unwrap()).unwrap();
    let count = own.len();
    let mut all = all;
    all.programs.extend(own);
    // Even if something else were among them.
    all.programs.insert(0, datagrams.try_clone().unwrap().into());
    all.programs.push(datagrams.into());
    let opened = all.open();
    let (host, listeners, node) = opened.unwrap();
    assert_eq!(listeners.len(), count);
    let core = scene.driver.with_core(|core, _| core.config().clone());
    let config = DriverConfig { core, ..DriverConfig::default() };
    scene.driver = Driver::resume(config, node, listeners, || Ok(())).unwrap();
    let resumed =
        Host::resume(scene.driver.clone(), host, None, Policy::default(), Quota::NONE).unwrap();
    scene.host = Some(resumed);
    assert!(std::net::TcpStream::connect(place).is_ok(), "peers reach the node");
    scene.works();
}

/// Who goes on may have less room than there was: what it cannot take, with what programs have sent
/// meanwhile, keeps it as little as anything else.
#[test]
fn what_is_not_taken_over_is_waited_for_by_nobody() {
    let mut scene = Scene::new(26);
    let mut peers = Vec::new();
    let mut channel = scene.channel();
    let (_, fd) = open(&mut channel);
    let all = scene.host.take().unwrap().hand_over().unwrap();
    for to in [channel.as_fd(), fd.as_fd()] {
        let (stream, peer) = lingering(26);
        assert!(send_along(to, b"x", &[stream.as_fd()]));
        peers.push(peer);
    }
    let own = scene.driver.hand_over(all.writer().unwrap()).unwrap();
    let mut all = all;
    all.programs.extend(own);
    let (host, listeners, node) = all.open().unwrap();
    let core = scene.driver.with_core(|core, _| core.config().clone());
    let config = DriverConfig { core, ..DriverConfig::default() };
    scene.driver = Driver::resume(config, node, listeners, || Ok(())).unwrap();
    let nothing = Quota { channels: 0, sockets: 0, ..Quota::NONE };
    let policy = Policy { quotas: [(0, nothing)].into(), ..Policy::default() };
    let begun = Instant::now();
    let resumed = Host::resume(scene.driver.clone(), host, None, policy, Quota::NONE).unwrap();
    assert!(begun.elapsed() < LIMIT / 4, "{:?}", begun.elapsed());
    assert!(!resumed.refusals().is_empty());
    scene.host = Some(resumed);
}

/// A random number generator whose start is told, so that a failure comes again.
struct Random(u64);

impl Random {
    fn new() -> Self {
        let asked = std::env::var("BOWLINE_HOSTILE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = asked.unwrap_or_else(|| bowline_base::entropy::random_u64() | 1);
        println!("seed {seed}");
        Self(seed)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// How long random things go on; `cargo xtask hostile` sets it.
fn limit() -> Duration {
    let seconds = std::env::var("BOWLINE_HOSTILE_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or(3.0))
}

/// Random things on a channel and its sockets, and on others that somebody has passed, with
/// descriptors of all kinds.
fn send_anything(channel: &mut UnixStream, passed: &[OwnedFd], handle: i64, random: &mut Random) {
    let sockets: Vec<_> = (0..random.below(3)).map(|_| open(channel)).collect();
    let _ = channel.set_nonblocking(true);
    let file = File::open("/proc/self/comm").unwrap();
    let (one, two) = UnixStream::pair().unwrap();
    let udp = std::net::UdpSocket::bind("127.79.17.2:0").unwrap();
    for _ in 0..random.below(20) {
        let mut bytes = match random.below(4) {
            0 => offer(random.below(5) as i32).to_vec(),
            1 => (0..random.below(200)).map(|_| random.below(256) as u8).collect(),
            _ => {
                let ops = [
                    Op::Hello,
                    Op::Attach,
                    Op::Memory,
                    Op::Watch,
                    Op::Send,
                    Op::Wake,
                    Op::HandOver,
                ];
                let op = ops[random.below(7) as usize];
                let value = sockets.first().map_or(handle, |(handle, _)| *handle);
                let payload = random.below(50) as usize;
                let head = Head { op, value, a: VERSION, b: 2 };
                let front = head.emit(0, 0, payload).unwrap();
                [&front[..], &vec![1; payload][..]].concat()
            }
        };
        if random.below(4) == 0 {
            bytes.truncate(random.below(40) as usize);
        }
        if bytes.is_empty() {
            continue;
        }
        let all = [file.as_fd(), one.as_fd(), two.as_fd(), udp.as_fd(), channel.as_fd()];
        let mut along: Vec<_> =
            (0..random.below(4)).map(|_| all[random.below(5) as usize]).collect();
        along.extend(sockets.iter().map(|(_, fd)| fd.as_fd()).filter(|_| random.below(3) == 0));
        let own = sockets.get(random.below(3) as usize).map(|(_, fd)| fd);
        match own.or_else(|| passed.get(random.below(4) as usize)) {
            Some(fd) => send_along(fd, &bytes, &along),
            None => send_along(&*channel, &bytes, &along),
        };
    }
}

/// A process whose other program goes on beside it.
#[test]
fn a_program_that_sends_anything_harms_itself_only() {
    let scene = Scene::alone(17);
    let mut random = Random::new();
    let before = descriptors();
    let mut other = scene.channel();
    let (own, _own_fd) = open(&mut other);
    let begun = Instant::now();
    let mut rounds = 0;
    while begun.elapsed() < limit() {
        rounds += 1;
        send_anything(&mut scene.channel(), &[], own, &mut random);
        assert_eq!(ask(&mut other, Head::new(Op::LocalName, own), b"", b""), 0, "{}", random.0);
    }
    println!("{rounds} rounds");
    drop((other, _own_fd));
    come_back_to(before);
    scene.works();
}

/// A user who may have sockets, and one who may not, beside a program of root's: on their own
/// channels, on one and on sockets that root's program has passed to them.
#[test]
fn users_that_send_anything_harm_nobody_else() {
    if !rustix::process::geteuid().is_root() {
        return bowline_testkit::skipped::because("only root can take on other users");
    }
    const GUEST: u32 = 77_001;
    let attach = Principals { users: [GUEST].into(), ..Principals::default() };
    let mut scene = Scene::alone(26);
    scene.serve(Policy { attach, ..Policy::default() });
    let before = descriptors();
    let mut root = scene.channel();
    let (own, own_fd) = open(&mut root);
    let begun = Instant::now();
    let mut random = Random::new();
    let mut rounds = 0;
    while begun.elapsed() < limit() {
        rounds += 1;
        for user in [GUEST, STRANGER] {
            let place = scene.folder.join("host.sock");
            let mut others = Random(random.below(u64::MAX) | 1);
            let (_, passed) = open(&mut root);
            let mut theirs = scene.channel();
            as_user(user, &[], move || {
                let mut channel = UnixStream::connect(place).unwrap();
                assert_eq!(is_greeted(&mut channel), user == GUEST);
                let channel = if user == GUEST { &mut channel } else { &mut theirs };
                send_anything(channel, &[passed], own, &mut others);
            });
        }
        let answer = ask(&mut root, Head::new(Op::LocalName, own), b"", b"");
        assert_eq!(answer, 0, "{}", random.0);
    }
    println!("{rounds} rounds");
    drop((root, own_fd));
    come_back_to(before);
    scene.works();
}
