//! Programs of several users on one node: who may do what, and how much.
//!
//! A thread takes on another user for the time in which it connects, since the kernel tells the
//! node who that was. Only root can do so.

use std::fs::{self, Permissions};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bowline_host::{BindRule, HandOver, Host, Policy, Principals, Quota, Refused};
use bowline_host_wire::{FRAME_MAX, Frame, Greeting, HEAD_LEN, Head, Op, VERSION, offer};
use bowline_rds::Config;
use bowline_rds_driver::{Driver, DriverConfig};
use bowline_testkit::skipped;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, UCred, recvmsg, sendmsg,
};

mod users_of_tests;

use users_of_tests::{STRANGER, as_user};

const LIMIT: Duration = Duration::from_secs(20);
const ANNA: u32 = 77_001;
const BERT: u32 = 77_002;
const GROUP: u32 = 77_100;

const EPERM: i64 = -1;
const EBADF: i64 = -9;
const EACCES: i64 = -13;
const EMFILE: i64 = -24;
const EPROTONOSUPPORT: i64 = -93;
const ENOBUFS: i64 = -105;
const SOL_RDS: i32 = 276;
const COUNTERS_TABLE: i32 = 10_000;
const MESSAGES_TABLE: i32 = 10_003;
const SOCKETS_TABLE: i32 = 10_006;

struct Scene {
    driver: Driver,
    host: Option<Host>,
    folder: PathBuf,
    net: u8,
}

/// A node with a policy, or the reason why it cannot be tried.
fn scene(net: u8, policy: Policy) -> Option<Scene> {
    if !rustix::process::geteuid().is_root() {
        skipped::because("only root can take on other users");
        return None;
    }
    let folder = std::env::temp_dir().join(format!("bowline-users-{}-{net}", std::process::id()));
    Some(scene_at(folder, net, policy))
}

fn scene_at(folder: PathBuf, net: u8, policy: Policy) -> Scene {
    let addrs = [1, 2].map(|host| IpAddr::from([127, 80, net, host])).to_vec();
    let core = Config { addrs, generation: 80, ..Config::default() };
    let driver = Driver::start(DriverConfig { core, ..DriverConfig::default() }).unwrap();
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o711)).unwrap();
    let place = folder.join("host.sock");
    let listener = UnixListener::bind(&place).unwrap();
    fs::set_permissions(&place, Permissions::from_mode(0o666)).unwrap();
    let host = Some(Host::start(driver.clone(), listener, policy, Quota::NONE).unwrap());
    Scene { driver, host, folder, net }
}

impl Scene {
    fn name(&self, port: u16) -> [u8; 16] {
        let mut name = [0; 16];
        name[..2].copy_from_slice(&2u16.to_ne_bytes());
        name[2..4].copy_from_slice(&port.to_be_bytes());
        name[4..8].copy_from_slice(&[127, 80, self.net, 1]);
        name
    }

    /// A connection of a process of this user, whose supplementary groups these are.
    fn connect_silently(&self, user: u32, groups: &[u32]) -> UnixStream {
        let place = self.folder.join("host.sock");
        let stream = as_user(user, groups, move || UnixStream::connect(place).unwrap());
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// The same, and the value of the answer to its greeting.
    fn connect(&self, user: u32, groups: &[u32]) -> (UnixStream, i64) {
        let mut stream = self.connect_silently(user, groups);
        let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 };
        // Whoever is turned away may not be able to say so much.
        let _ = stream.write(&hello.emit(0, 0, 0).unwrap());
        let (value, _) = answer(&mut stream);
        (stream, value)
    }

    fn channel(&self, user: u32) -> UnixStream {
        let (stream, value) = self.connect(user, &[]);
        assert!(value > 0, "{user}: {value}");
        stream
    }

    fn refusals(&self) -> Vec<(Option<u32>, Refused, u64)> {
        let all = self.host.as_ref().unwrap().refusals();
        all.into_iter().map(|one| (one.user, one.what, one.count)).collect()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.host = None;
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Those who are not root and may have sockets.
fn these(users: &[u32]) -> Principals {
    Principals { users: users.iter().copied().collect(), ..Principals::default() }
}

/// The value and the payload of an answer, with names and control messages before it.
fn answer(stream: &mut UnixStream) -> (i64, Vec<u8>) {
    let mut bytes = vec![0; HEAD_LEN];
    stream.read_exact(&mut bytes).unwrap();
    let len = u32::from_ne_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(len, 0);
    stream.read_exact(&mut bytes[HEAD_LEN..]).unwrap();
    let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
    (frame.head.value, [frame.name, frame.payload].concat())
}

fn ask(stream: &mut UnixStream, head: Head, name: &[u8], payload: &[u8]) -> (i64, Vec<u8>) {
    let front = head.emit(name.len(), 0, payload.len()).unwrap();
    stream.write_all(&[&front, name, payload].concat()).unwrap();
    answer(stream)
}

fn bind(stream: &mut UnixStream, handle: i64, name: &[u8]) -> i64 {
    ask(stream, Head::new(Op::Bind, handle), name, b"").0
}

/// A new socket: its handle, or an error; and its descriptor.
fn open(stream: &mut UnixStream) -> (i64, Option<OwnedFd>) {
    let head = Head { op: Op::Open, value: 0, a: 5, b: 0 };
    stream.write_all(&head.emit(0, 0, 0).unwrap()).unwrap();
    let mut bytes = [0; HEAD_LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [IoSliceMut::new(&mut bytes)];
    recvmsg(&*stream, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
    let mut descriptors = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
        _ => Vec::new(),
    });
    (Frame::parse(&bytes).unwrap().unwrap().0.head.value, descriptors.next())
}

/// Sends bytes and a descriptor along with them, in one piece.
fn send_along(stream: &UnixStream, bytes: &[u8], descriptor: BorrowedFd<'_>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(&descriptor)));
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    sent == Ok(bytes.len())
}

/// Shows a descriptor; returns the handle of its socket, or an error.
fn show(stream: &mut UnixStream, descriptor: BorrowedFd<'_>) -> i64 {
    let head = Head::new(Op::Attach, 0).emit(0, 0, 0).unwrap();
    assert!(send_along(stream, &head, descriptor));
    answer(stream).0
}

#[test]
fn only_those_who_are_listed_have_sockets() {
    let policy = Policy {
        attach: Principals { groups: [GROUP].into(), ..these(&[ANNA]) },
        ..Policy::default()
    };
    let Some(scene) = scene(1, policy) else { return };
    for (user, groups, may) in [
        (0, &[][..], true),
        (ANNA, &[], true),
        (BERT, &[GROUP], true),
        (GROUP, &[], true), // its own group
        (BERT, &[ANNA], false),
        (STRANGER, &[], false),
    ] {
        let (mut stream, value) = scene.connect(user, groups);
        if may {
            assert!(value > 0 && open(&mut stream).0 > 0, "{user} {groups:?}");
        } else {
            assert_eq!(value, EACCES, "{user} {groups:?}");
            assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the channel has ended");
        }
    }
    let refused = [(Some(BERT), Refused::Attach, 1), (Some(STRANGER), Refused::Attach, 1)];
    assert_eq!(scene.refusals(), refused);
    // More groups than there is room for at first.
    let many: Vec<u32> = (80_000..80_200).chain([GROUP]).collect();
    assert!(scene.connect(STRANGER, &many).1 > 0);
}

#[test]
fn nobody_else_has_sockets_unless_the_policy_says_so() {
    let Some(scene) = scene(2, Policy::default()) else { return };
    assert!(scene.connect(0, &[]).1 > 0);
    assert_eq!(scene.connect(ANNA, &[0]).1, EACCES, "root's group is not root");
}

/// Anna may have some ports, Bert none; root may have all.
#[test]
fn users_bind_where_the_rules_let_them() {
    let rule = BindRule {
        who: these(&[ANNA]),
        addresses: vec!["127.80.3.0/30".parse().unwrap()],
        ports: vec![500..=501, 4000..=4000],
    };
    let attach = these(&[ANNA, BERT]);
    let policy = Policy { attach, binds: vec![rule], ..Policy::default() };
    let Some(scene) = scene(3, policy) else { return };
    let (mut anna, mut bert, mut root) =
        (scene.channel(ANNA), scene.channel(BERT), scene.channel(0));
    let (handle, _kept) = open(&mut anna);
    assert_eq!(bind(&mut anna, handle, &scene.name(4001)), EACCES);
    assert_eq!(bind(&mut anna, handle, &scene.name(4000)), 0);
    // Any port: one of those that are left, as long as there are some.
    let mut got = Vec::new();
    let mut descriptors = Vec::new();
    for _ in 0..2 {
        let (handle, descriptor) = open(&mut anna);
        descriptors.push(descriptor);
        assert_eq!(bind(&mut anna, handle, &scene.name(0)), 0);
        let (_, name) = ask(&mut anna, Head::new(Op::LocalName, handle), b"", b"");
        got.push(u16::from_be_bytes([name[2], name[3]]));
    }
    got.sort_unstable();
    assert_eq!(got, [500, 501]);
    let (handle, _full) = open(&mut anna);
    assert_eq!(bind(&mut anna, handle, &scene.name(0)), -98, "EADDRINUSE");
    let (handle, _none) = open(&mut bert);
    assert_eq!(bind(&mut bert, handle, &scene.name(0)), EACCES);
    assert_eq!(bind(&mut bert, handle, &[0; 4]), -22, "the name is looked at first");
    let (handle, _all) = open(&mut root);
    assert_eq!(bind(&mut root, handle, &scene.name(23)), 0);
    assert_eq!(scene.refusals(), [(Some(ANNA), Refused::Bind, 1), (Some(BERT), Refused::Bind, 1)]);
}

/// Anna takes all that she may have. Bert notices nothing of it; and what she gives back she may
/// have again.
#[test]
fn a_user_at_its_quota_hinders_nobody_else() {
    let quota = Quota { sockets: 2, channels: 3, send_bytes: 300_000, recv_bytes: 300_000 };
    let attach = these(&[ANNA, BERT]);
    let policy = Policy { attach, quota: Some(quota), ..Policy::default() };
    let Some(scene) = scene(4, policy) else { return };
    let mut anna = scene.channel(ANNA);
    let (one, first) = open(&mut anna);
    let (two, second) = open(&mut anna);
    // The second gets what is left of the send buffers, as under the kernel's own cap.
    let send_buffer = |anna: &mut UnixStream| {
        let head = Head { op: Op::SetOption, value: two, a: 1, b: 7 };
        assert_eq!(ask(anna, head, b"", &212_992i32.to_ne_bytes()).0, 0);
        let head = Head { op: Op::GetOption, value: two, a: 1, b: 7 };
        let (_, bytes) = ask(anna, head, b"", &4u64.to_ne_bytes());
        i32::from_ne_bytes(bytes.try_into().unwrap()) / 2
    };
    assert_eq!(send_buffer(&mut anna), 300_000 - 106_496);
    assert_eq!(open(&mut anna).0, EMFILE);
    let more = [scene.channel(ANNA), scene.channel(ANNA)];
    assert_eq!(scene.connect(ANNA, &[]).1, EMFILE);
    // All that she may have is full of messages that nobody takes.
    assert_eq!(bind(&mut anna, one, &scene.name(4000)), 0);
    assert_eq!(bind(&mut anna, two, &scene.name(4001)), 0);
    let send = |handle| Head { a: 0x40, ..Head::new(Op::Send, handle) };
    for (from, to) in [(one, 4001), (two, 4000)] {
        while ask(&mut anna, send(from), &scene.name(to), &[0; 10_000]).0 > 0 {}
    }

    let mut bert = scene.channel(BERT);
    let (handle, _bert_fd) = open(&mut bert);
    assert_eq!(bind(&mut bert, handle, &scene.name(5000)), 0);
    assert_eq!(ask(&mut bert, send(handle), &scene.name(5000), b"hello").0, 5);
    let (other, _other_fd) = open(&mut bert);
    assert!(other > 0);

    drop((first, more));
    // The node closes it when it hears of the end of its descriptor.
    let begun = Instant::now();
    while send_buffer(&mut anna) != 212_992 && begun.elapsed() < LIMIT {}
    assert_eq!(open(&mut anna).0, ENOBUFS, "the other one has the buffers");
    drop(second);
    let mut again = open(&mut anna).0;
    while again < 0 && begun.elapsed() < LIMIT {
        again = open(&mut anna).0;
    }
    assert!(again > 0, "{again}");
    let refused = scene.refusals();
    assert!(refused.iter().all(|(user, ..)| *user == Some(ANNA)), "{refused:?}");
    for what in [Refused::Sockets, Refused::Channels, Refused::Buffers] {
        assert!(refused.iter().any(|one| one.1 == what), "{what:?} in {refused:?}");
    }
}

/// Anna begins long requests on many channels and ends none.
#[test]
fn unfinished_requests_of_a_user_are_bounded() {
    let Some(scene) = scene(7, Policy { attach: these(&[ANNA]), ..Policy::default() }) else {
        return;
    };
    let front = Head::new(Op::Send, 1).emit(0, 0, FRAME_MAX - HEAD_LEN).unwrap();
    let piece = vec![0; 15 << 20];
    let mut channels: Vec<UnixStream> = (0..6).map(|_| scene.channel(ANNA)).collect();
    let ended = channels.iter_mut().filter_map(|channel| {
        channel.write_all(&front).and_then(|()| channel.write_all(&piece)).err()
    });
    assert!(ended.count() >= 1, "six times 15 MiB are too much");
    assert!(scene.refusals().iter().all(|one| one.1 == Refused::Requests));
    // When they have ended, there is room again, for others there always is.
    drop(channels);
    assert!(open(&mut scene.channel(0)).0 > 0);
    let begun = Instant::now();
    loop {
        let mut channel = scene.channel(ANNA);
        if channel.write_all(&front).and_then(|()| channel.write_all(&piece)).is_ok() {
            break;
        }
        assert!(begun.elapsed() < LIMIT);
    }
}

#[test]
fn users_see_their_own_sockets_and_root_sees_all() {
    let inspect = these(&[STRANGER]);
    let attach = these(&[ANNA, BERT, STRANGER]);
    let Some(scene) = scene(5, Policy { attach, inspect, ..Policy::default() }) else { return };
    let ports = |stream: &mut UnixStream, handle| {
        let head = Head { op: Op::GetOption, value: handle, a: SOL_RDS, b: SOCKETS_TABLE };
        let (size, table) = ask(stream, head, b"", &4096u64.to_ne_bytes());
        assert_eq!(size, 28);
        let port = |row: &[u8]| u16::from_be_bytes([row[12], row[13]]);
        let mut all: Vec<u16> = table.chunks(28).map(port).collect();
        all.sort_unstable();
        all
    };
    let mut users = Vec::new();
    for (user, port) in [(0, 4000), (ANNA, 4001), (BERT, 4002), (STRANGER, 4003)] {
        let mut stream = scene.channel(user);
        let (handle, fd) = open(&mut stream);
        assert_eq!(bind(&mut stream, handle, &scene.name(port)), 0);
        users.push((stream, handle, fd));
    }
    // A message of Bert's to nobody, which waits.
    let (stream, handle, _) = &mut users[2];
    let send = Head { a: 0x40, ..Head::new(Op::Send, *handle) };
    let mut nobody = scene.name(4002);
    nobody[7] = 99;
    assert_eq!(ask(stream, send, &nobody, b"hello!").0, 6);
    let mut table = |place: usize, number| {
        let (stream, handle, _) = &mut users[place];
        let head = Head { op: Op::GetOption, value: *handle, a: SOL_RDS, b: number };
        ask(stream, head, b"", &65_536_u64.to_ne_bytes()).1
    };
    for (place, sees) in [(0, true), (1, false), (2, true), (3, true)] {
        assert_eq!(table(place, MESSAGES_TABLE).is_empty(), !sees, "{place}");
    }
    // Counters are nobody's.
    let counters = table(0, COUNTERS_TABLE);
    assert!(!counters.is_empty() && table(1, COUNTERS_TABLE) == counters);
    let all = [4000, 4001, 4002, 4003];
    for (place, expected) in [(0, &all[..]), (1, &[4001]), (2, &[4002]), (3, &all)] {
        let (stream, handle, _) = &mut users[place];
        assert_eq!(ports(stream, *handle), expected);
    }
    assert_eq!(scene.driver.with_core(|core, _| core.info()).sockets.len(), 4);
}

/// A descriptor goes from Anna to Bert: he uses her socket, which counts for her.
#[test]
fn a_descriptor_works_for_whoever_holds_it_and_may_have_sockets() {
    let attach = these(&[ANNA, BERT]);
    let quotas = [(BERT, Quota { sockets: 0, ..Quota::NONE })].into();
    let Some(scene) = scene(6, Policy { attach, quotas, ..Policy::default() }) else { return };
    let (mut anna, mut bert) = (scene.channel(ANNA), scene.channel(BERT));
    let (handle, descriptor) = open(&mut anna);
    let descriptor = descriptor.expect("a descriptor");
    assert_eq!(bind(&mut bert, handle, &scene.name(4000)), -9, "EBADF");
    assert_eq!(open(&mut bert).0, EMFILE);
    assert_eq!(show(&mut bert, descriptor.as_fd()), handle);
    assert_eq!(bind(&mut bert, handle, &scene.name(4000)), 0);
    assert_eq!(ask(&mut bert, Head::new(Op::Send, handle), &scene.name(4000), b"hello").0, 5);
    assert_eq!(scene.connect(STRANGER, &[]).1, EACCES);
}

/// Bert may use memory for RDMA, Anna may not; what she shows is not looked at.
#[test]
fn memory_is_used_for_those_who_are_listed_and_for_root() {
    let rdma = these(&[BERT]);
    let Some(scene) = scene(8, Policy { attach: these(&[ANNA, BERT]), rdma, ..Policy::default() })
    else {
        return;
    };
    // No memory of a process, which is told to those only whose memory would be taken.
    let other = fs::File::open("/proc/self/comm").unwrap();
    for (user, refused) in [(ANNA, EPERM), (BERT, EBADF), (0, EBADF)] {
        let mut stream = scene.channel(user);
        let head = Head::new(Op::Memory, 1).emit(0, 0, 8).unwrap();
        let shown = send_along(&stream, &[&head[..], &[0; 8]].concat(), other.as_fd());
        assert!(shown);
        assert_eq!(answer(&mut stream).0, refused, "{user}");
    }
    assert_eq!(scene.refusals(), [(Some(ANNA), Refused::Rdma, 1)]);
}

/// Whoever may have sockets may not have the node.
#[test]
fn a_node_is_handed_over_to_root_and_its_own_user_only() {
    let Some(scene) = scene(9, Policy { attach: these(&[ANNA]), ..Policy::default() }) else {
        return;
    };
    // Of no version that there is: who may ask is told so, and nothing is handed over.
    let head = Head { op: Op::HandOver, value: -1, a: -1, b: -1 };
    for (user, told) in [(ANNA, EACCES), (0, EPROTONOSUPPORT)] {
        let mut stream = scene.connect_silently(user, &[]);
        assert_eq!(ask(&mut stream, head, b"", b"").0, told, "{user}");
    }
    assert!(open(&mut scene.channel(ANNA)).0 > 0, "the node serves on");
}

/// A place where a stranger listens, and would hand something over.
#[test]
fn nothing_is_taken_over_from_a_stranger() {
    if !rustix::process::geteuid().is_root() {
        return skipped::because("only root can take on other users");
    }
    let place = std::env::temp_dir().join(format!("bowline-users-{}-s", std::process::id()));
    let listener = as_user(STRANGER, &[], {
        let place = place.clone();
        move || UnixListener::bind(place).unwrap()
    });
    let taken = HandOver::receive(&place).map(drop);
    fs::remove_file(&place).unwrap();
    assert_eq!(taken.unwrap_err().raw_os_error(), Some(-EACCES as i32));
    let (mut asked, _) = listener.accept().unwrap();
    assert_eq!(asked.read(&mut [0]).unwrap(), 0, "nothing is asked of him");
}

/// A node in a PID namespace of its own, at a place that the environment says, until nobody wants
/// it any more.
#[test]
#[ignore = "programs_that_a_node_cannot_see_have_sockets runs it"]
fn child_that_is_a_node() {
    let folder = PathBuf::from(std::env::var_os("BOWLINE_USERS_FOLDER").expect("a place"));
    let who = these(&[ANNA]);
    let scene =
        scene_at(folder, 10, Policy { attach: who.clone(), rdma: who, ..Policy::default() });
    println!("ready as {}", std::process::id());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(scene);
}

/// Runs it, if the system makes such namespaces.
fn node_that_does_not_see_this_process(folder: &std::path::Path) -> Option<Child> {
    let mut node = Command::new("unshare");
    node.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
    node.args(["--exact", "child_that_is_a_node", "--ignored", "--nocapture"]);
    node.env("BOWLINE_USERS_FOLDER", folder).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut node = node.spawn().ok()?;
    let mut said = std::io::BufReader::new(node.stdout.take()?);
    let is_ready = std::io::BufRead::lines(&mut said)
        .map_while(Result::ok)
        .any(|line| line.contains("ready as 1"));
    // What it says at its end has a place to go.
    std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
    if !is_ready {
        let _ = node.wait();
    }
    is_ready.then_some(node)
}

/// For the node such a process has the number 0. It can have all that others can: channels, those
/// that come through a socket, and its memory used, by itself and by its agent.
#[test]
fn programs_that_a_node_cannot_see_have_sockets() {
    if !rustix::process::geteuid().is_root() {
        return skipped::because("only root can take on other users");
    }
    let folder = std::env::temp_dir().join(format!("bowline-users-{}-pid", std::process::id()));
    let Some(mut node) = node_that_does_not_see_this_process(&folder) else {
        return skipped::because("no PID namespace can be made");
    };
    let place = folder.join("host.sock");
    as_user(ANNA, &[], move || {
        let mut stream = UnixStream::connect(place).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let hello = Head { op: Op::Hello, value: 0, a: VERSION, b: 0 };
        let (value, greeting) = ask(&mut stream, hello, b"", b"");
        assert!(value > 0, "{value}");
        let (handle, descriptor) = open(&mut stream);
        assert!(handle > 0, "{handle}");
        let descriptor = descriptor.expect("a descriptor");

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(offer_channel(&descriptor, &theirs));
        drop(theirs);
        assert!(answer(&mut ours).0 > 0, "the node greets");
        assert_eq!(ask(&mut ours, Head::new(Op::LocalName, handle), b"", b"").0, 0);

        let nonce = std::hint::black_box(Greeting::parse(&greeting).expect("a greeting").nonce);
        let at = nonce.as_ptr().expose_provenance() as u64;
        let show = |at: u64| {
            [&Head::new(Op::Memory, 1).emit(0, 0, 8).unwrap()[..], &at.to_ne_bytes()].concat()
        };
        // A thread that was root may not open the memory of its process as Anna.
        if let Ok(memory) = fs::File::options().read(true).write(true).open("/proc/self/mem") {
            assert!(send_along(&stream, &show(at), memory.as_fd()));
            assert_eq!(answer(&mut stream).0, 0);
        }
        let agent = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        );
        assert!(send_along(&stream, &show(0), agent.unwrap().0.as_fd()));
        assert_eq!(answer(&mut stream).0, 0);
    });
    drop(node.stdin.take());
    assert!(node.wait().unwrap().success());
}

/// Sends an end of a pair on a socket, for a channel, with who offers it.
fn offer_channel(socket: impl AsFd, end: impl AsFd) -> bool {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let sender = UCred { pid: rustix::process::getpid(), uid, gid };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let end = [end.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&end)));
    assert!(control.push(SendAncillaryMessage::ScmCredentials(sender)));
    sendmsg(socket, &[IoSlice::new(&offer(VERSION))], &mut control, SendFlags::NOSIGNAL).is_ok()
}
