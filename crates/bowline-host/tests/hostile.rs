//! A process that does not keep to what the library does: nobody else notices.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use bowline_attach::{CONTROL_MAX, FRAME_MAX, Frame, HEAD_LEN, Head, Op, VERSION};
use bowline_host::Host;
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

const LIMIT: Duration = Duration::from_secs(20);
const EBADF: i64 = -9;
const EAGAIN: i64 = -11;

struct Scene {
    driver: Driver,
    host: Option<Host>,
    folder: PathBuf,
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
        let host = Some(Host::start(driver.clone(), listener).unwrap());
        Self { driver, host, folder }
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

/// A new socket: its handle, and the descriptor without which it is closed.
fn open(stream: &mut UnixStream) -> (i64, OwnedFd) {
    put(stream, Head { op: Op::Open, value: 0, a: 5, b: 0 }, b"", b"");
    let mut bytes = [0; HEAD_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(&*stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    assert_eq!(got.bytes, HEAD_LEN);
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let handle = Frame::parse(&bytes).unwrap().unwrap().0.head.value;
    assert!(handle > 0, "{handle}");
    (handle, descriptor.expect("a descriptor"))
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
        for op in [Op::Bind, Op::LocalName, Op::Send, Op::Receive, Op::SetOption, Op::Look] {
            assert_eq!(ask(&mut channel, Head::new(op, handle), b"", &[0; 8]), EBADF);
        }
    }
    assert_eq!(ask(&mut channel, Head::new(Op::Attach, 0), b"", b""), EBADF, "no descriptor");
    scene.works();
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
    put(&mut channel, Head::new(Op::Receive, handle), b"", &10u64.to_ne_bytes());
    put(&mut channel, Head::new(Op::Interrupt, 0), b"", b"");
    assert_eq!(answer(&mut channel), -4, "EINTR");
    // Gone in the middle of a wait.
    put(&mut channel, Head::new(Op::Receive, handle), b"", &10u64.to_ne_bytes());
    drop(channel);
    scene.works();
}
