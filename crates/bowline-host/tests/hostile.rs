//! A process that does not keep to what the library does: nobody else notices.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bowline_attach::{
    AREA_LEN, CONTROL_MAX, FRAME_MAX, Frame, HEAD_LEN, Head, Op, RING_LEN, VERSION,
};
use bowline_host::{Host, Policy, Quota};
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

const LIMIT: Duration = Duration::from_secs(20);
const EBADF: i64 = -9;
const EAGAIN: i64 = -11;

struct Scene {
    driver: Driver,
    host: Option<Host>,
    folder: PathBuf,
    net: u8,
}

impl Scene {
    fn new(net: u8) -> Self {
        let addrs = [1, 2].map(|host| IpAddr::from([127, 79, net, host])).to_vec();
        let core = Config { addrs, generation: 79, ..Config::default() };
        let driver = Driver::start(DriverConfig { core, ..DriverConfig::default() }).unwrap();
        let folder =
            std::env::temp_dir().join(format!("bowline-host-{}-{net}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("host.sock")).unwrap();
        let host =
            Some(Host::start(driver.clone(), listener, Policy::default(), Quota::NONE).unwrap());
        Self { driver, host, folder, net }
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
        let mut bytes = Head::new(Op::Look, 0).emit(0, 0, 0).unwrap();
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
    let look = Head::new(Op::Look, handle).emit(0, 0, 0).unwrap();
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
    let look = Head::new(Op::Look, handle).emit(0, 0, 0).unwrap();
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
        put(channel, Head::new(Op::Look, handle), b"", b"");
        if ask(channel, Head::new(Op::LocalName, handle), b"", b"") == EBADF {
            scene.works();
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Where the numbers are that a program writes; see `bowline_attach::Area`.
const SENDS: u64 = 192;
const LOCK: u64 = 208;
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
        put(&mut channel, Head::new(Op::Look, *handle), b"", b"");
    }
    for (n, (handle, ..)) in sockets.iter().enumerate() {
        put(&mut channel, Head::new(Op::Look, *handle), b"", b"");
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
        put(&mut channel, Head::new(Op::Look, handle), b"", b"");
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
        put(&mut channel, Head::new(Op::Look, handle), b"", b"");
        let name = scene.name(7000 + (handle % 50_000) as u16);
        put(&mut channel, Head { a: 0x40, ..Head::new(Op::Send, handle) }, &name, b"two");
        memory.write_all_at(&noise[8..], 0).unwrap();
        answer(&mut channel);
        assert!(memory.set_len(0).is_err(), "nobody makes it shorter");
    }
    scene.works();
}
