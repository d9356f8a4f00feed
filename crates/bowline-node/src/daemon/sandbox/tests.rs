//! What a node that was taken over can no longer do: each line of that table of SECURITY.md, tried
//! from inside a process that confines itself as a node does. What is tried succeeds before, in the
//! same process, or at least is a call that the kernel has.

use std::{
    cell::{Cell, RefCell},
    fs::{self, File, FileTimes, Permissions},
    io::{self, IoSlice},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::{
        fd::{AsFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::{
            fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink},
            net::{SocketAddr as UnixAddr, UnixDatagram, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use bowline_testkit::{
    processes::apart,
    skipped,
    system_calls::{self, Call, set_option},
};
use rustix::{
    fs::{CWD, FileType, MemfdFlags, Mode, OFlags, XattrFlags, memfd_create, mknodat, setxattr},
    io::Errno,
    net::{self, AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, netlink, sockopt},
    process::{Resource, getrlimit, setrlimit},
};

use super::*;
use crate::config::Config;

const NOBODY: u32 = 65_534;

/// A place in which a node is confined, and what is not its own beside it.
struct Scene {
    folder: PathBuf,
    settings: Settings,
    places: Places,
}

impl Scene {
    fn new(folder: PathBuf) -> Self {
        Self::with(folder, Config::default())
    }

    fn with(folder: PathBuf, mut config: Config) -> Self {
        config.address = vec!["127.0.0.1".parse().expect("an address")];
        let own = folder.join("own");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&own).expect("a folder");
        config.control = Some(own.join("control.sock"));
        config.programs = Some(own.join("host.sock"));
        let settings = Settings::new(config).expect("settings");
        let places = Places::listen(&settings, false, None).expect("sockets");
        Self { folder, settings, places }
    }

    fn own(&self, name: &str) -> PathBuf {
        self.folder.join("own").join(name)
    }

    /// Confines this process; `None` where something is missing here, and said to be.
    #[must_use]
    fn confined(&self) -> Option<Confinement> {
        let confinement = enter(&self.settings);
        if let Some(off) = confinement.off() {
            skipped::because(off);
            return None;
        }
        Some(confinement)
    }
}

/// Something that a node need not do.
struct Try<'a> {
    what: String,
    refused: Errno,
    /// A kernel may have been built without it.
    is_part: bool,
    attempt: Box<dyn Fn() -> io::Result<()> + 'a>,
}

fn attempt<'a, T>(
    what: impl Into<String>,
    refused: Errno,
    attempt: impl Fn() -> io::Result<T> + 'a,
) -> Try<'a> {
    let attempt = Box::new(move || attempt().map(drop));
    Try { what: what.into(), refused, is_part: false, attempt }
}

/// All that succeed before are refused once this process is confined.
fn all_are_refused(scene: &Scene, mut tries: Vec<Try<'_>>) {
    tries.retain(|Try { what, is_part, attempt, .. }| match attempt() {
        Ok(()) => true,
        Err(error) if *is_part => {
            skipped::because(format_args!("{what}: {error}"));
            false
        }
        Err(error) => panic!("{what}, before: {error}"),
    });
    if scene.confined().is_none() {
        return;
    }
    for Try { what, refused, attempt, .. } in &tries {
        let done = attempt().map_err(|error| error.raw_os_error());
        assert_eq!(done, Err(Some(refused.raw_os_error())), "{what}");
    }
}

/// Calls that the kernel has, and that are gone once this process is confined.
fn all_are_gone<'a>(scene: &Scene, calls: impl IntoIterator<Item = &'a Call>) {
    let gone = |call: &&Call| {
        let error = call.carry_out().err().and_then(|error| error.raw_os_error());
        error == Some(Errno::NOSYS.raw_os_error())
    };
    let (missing, there): (Vec<&Call>, Vec<_>) = calls.into_iter().partition(gone);
    for call in missing {
        skipped::because(format_args!("this kernel has no {}", call.name()));
    }
    assert!(there.len() > 3, "the kernel has some");
    if scene.confined().is_some() {
        let left: Vec<_> = there.into_iter().filter(|call| !gone(call)).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Tells whether this process has rights of root that it would lose; a container's root may not.
fn is_root() -> bool {
    let [admin, raw, log, system, bounds] = [
        CapabilitySet::NET_ADMIN,
        CapabilitySet::NET_RAW,
        CapabilitySet::SYSLOG,
        CapabilitySet::SYS_ADMIN,
        CapabilitySet::SETPCAP,
    ];
    let wanted = admin | raw | log | system | bounds;
    let is_root = rustix::process::geteuid().is_root()
        && rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(wanted));
    if !is_root {
        skipped::because(
            "only root, with its capabilities, has what a confined process is to lose",
        );
    }
    is_root
}

/// Returns the sets of capabilities of this thread.
fn sets_of_capabilities() -> Vec<(&'static str, u64)> {
    let status = fs::read_to_string("/proc/thread-self/status").expect("a file");
    let sets = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].into_iter();
    sets.map(|set| {
        let line = status.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(":\t"));
        (set, u64::from_str_radix(line.expect("a line"), 16).expect("a number"))
    })
    .collect()
}

macro_rules! apart {
    ($name:ident, $body:expr) => {
        #[test]
        fn $name() {
            apart(module_path!(), stringify!($name), $body);
        }
    };
}

apart!(it_has_no_capabilities, |folder| {
    if !is_root() {
        return;
    }
    let scene = Scene::new(folder);
    let socket = &socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    let low = Ipv4Addr::LOCALHOST;
    let mut tries = vec![
        attempt("a port of root", Errno::ACCESS, || TcpListener::bind((low, 17))),
        attempt("a buffer beyond the limit", Errno::PERM, || {
            Ok(sockopt::set_socket_recv_buffer_size_force(socket, 1 << 20)?)
        }),
    ];
    for (name, level, option) in system_calls::OPTIONS {
        let set = move |value| set_option(socket.as_fd(), level, option, value);
        let refused = Errno::PERM;
        tries.push(attempt(name, refused, move || set(1).and_then(|()| set(0))));
    }
    all_are_refused(&scene, tries);
    assert!(
        sets_of_capabilities().iter().all(|(_, set)| *set == 0),
        "{:?}",
        sets_of_capabilities()
    );
    let status = fs::read_to_string("/proc/thread-self/status").expect("a file");
    assert!(status.contains("NoNewPrivs:\t1\n"), "{status}");
});

apart!(it_watches_memory_of_programs_and_reads_how_large_buffers_may_be, |folder| {
    let scene = Scene::new(folder);
    if scene.confined().is_none() {
        return;
    }
    for number in bowline_host::WATCH_REQUESTS {
        let error = system_calls::request(number);
        assert_eq!(error.raw_os_error(), Some(Errno::BADF.raw_os_error()), "{number:#x}");
    }
    for file in bowline_host::BUFFERS_MAX {
        let text = fs::read_to_string(file).expect("a setting");
        assert!(text.trim().parse::<usize>().is_ok_and(|bytes| bytes > 0), "{text}");
    }
});

apart!(capabilities_that_the_settings_need_are_kept_and_named, |folder| {
    if !is_root() {
        return;
    }
    // Root needs a capability to change the folder of another user, which a node need not.
    chown(&folder, Some(NOBODY), None).expect("an owner");
    fs::set_permissions(&folder, Permissions::from_mode(0o700)).expect("a mode");
    let place = SocketAddr::from(([127, 0, 0, 1], 17));
    let mut scene = Scene::with(folder, Config::default());
    scene.settings.metrics.place = Some(place);
    let Some(confinement) = scene.confined() else { return };
    let on = confinement.on().expect("it is confined");
    let kept = "no capabilities except NET_BIND_SERVICE for metrics at port 17,";
    assert!(on.contains(kept), "{on}");
    let bits = CapabilitySet::NET_BIND_SERVICE;
    let wanted = [("CapInh", 0), ("CapPrm", bits.bits()), ("CapEff", bits.bits())];
    let found = sets_of_capabilities();
    assert_eq!(found[..3], wanted);
    assert_eq!(found[3..], [("CapBnd", bits.bits()), ("CapAmb", 0)]);
    TcpListener::bind("127.0.0.1:17").expect("it serves metrics there");
});

// A congestion control that not everybody may choose needs a capability, which is kept for it only.
apart!(a_congestion_control_of_root_is_root_s, |folder| {
    if !is_root() {
        return;
    }
    let read = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).expect("a setting");
        text.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    let allowed = read("tcp_allowed_congestion_control");
    let mut others = read("tcp_available_congestion_control").into_iter();
    let Some(other) = others.find(|name| !allowed.contains(name)) else {
        return skipped::because("everybody may choose all congestion controls");
    };
    let with = |name: &str| {
        let mut config = Config::default();
        config.congestion_control = Some(name.into());
        config
    };
    assert!(capabilities(&Scene::with(folder.clone(), with(&allowed[0])).settings).is_empty());
    let scene = Scene::with(folder, with(&other));
    let Some(confinement) = scene.confined() else { return };
    let on = confinement.on().expect("it is confined");
    assert!(on.contains(&format!("NET_ADMIN for {other}")), "{on}");
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    set_tcp_congestion(&socket, &other).expect("it may choose it");
});

/// What is tried in a folder.
type InFolder = Box<dyn Fn(&Path) -> io::Result<()>>;

/// Files and sockets in a folder, each for one attempt to do without it.
struct Victims {
    left: RefCell<Vec<PathBuf>>,
}

impl Victims {
    fn new(folder: &Path, name: &str, make: impl Fn(&Path)) -> Self {
        let paths = (0..2).map(|n| folder.join(format!("{name}{n}"))).collect::<Vec<_>>();
        paths.iter().for_each(|path| make(path));
        Self { left: RefCell::new(paths) }
    }

    fn files(folder: &Path, name: &str) -> Self {
        Self::new(folder, name, |path| fs::write(path, "text").expect("a file"))
    }

    /// Their listeners are closed, which does not matter here.
    fn sockets(folder: &Path, name: &str) -> Self {
        Self::new(folder, name, |path| drop(UnixListener::bind(path).expect("a socket")))
    }

    fn next(&self) -> PathBuf {
        self.left.borrow_mut().pop().expect("one")
    }
}

apart!(it_opens_changes_and_removes_no_files, |folder| {
    let scene = Scene::new(folder);
    let below = scene.own("below");
    fs::create_dir(&below).expect("a folder");
    let write = || File::options().write(true).clone();
    let count = Cell::new(0);
    let mut tries = vec![
        attempt("reading what all may read", Errno::ACCESS, || fs::read("/etc/passwd")),
        attempt("naming without opening", Errno::NOSYS, || {
            Ok(rustix::fs::open(&scene.folder, OFlags::PATH, Mode::empty())?)
        }),
        attempt("devices", Errno::ACCESS, || write().open("/dev/null")),
    ];
    // The folder of its sockets is that of others' as well: /run/bowline, or /run.
    for folder in [scene.folder.clone(), scene.own(""), below] {
        let mut add = |what: &str, refused, one: InFolder| {
            let (what, folder) = (format!("{what} in {}", folder.display()), folder.clone());
            tries.push(attempt(what, refused, move || one(&folder)));
        };
        let number = || {
            count.set(count.get() + 1);
            format!("new{}", count.get())
        };
        fs::write(folder.join("secret"), "text").expect("a file");
        let refused = Errno::ACCESS;
        add("reading", refused, Box::new(|at| fs::read(at.join("secret")).map(drop)));
        add("listing", refused, Box::new(|at| fs::read_dir(at).map(drop)));
        add("writing", refused, Box::new(move |at| write().open(at.join("secret")).map(drop)));
        add("truncating", refused, Box::new(|at| File::create(at.join("secret")).map(drop)));
        let names = [number(), number()];
        let names = RefCell::new(names.to_vec());
        let fresh = move || names.borrow_mut().pop().expect("a name");
        add("making", refused, Box::new(move |at| fs::write(at.join(fresh()), "text")));
        let names = RefCell::new(vec![number(), number()]);
        let fresh = move || names.borrow_mut().pop().expect("a name");
        let bind = move |at: &Path| UnixListener::bind(at.join(fresh())).map(drop);
        add("a socket", Errno::NOSYS, Box::new(bind));
        let files = Victims::files(&folder, "file");
        add("removing", refused, Box::new(move |_| fs::remove_file(files.next())));
        let sockets = Victims::sockets(&folder, "socket");
        add("removing a socket", refused, Box::new(move |_| fs::remove_file(sockets.next())));
        let files = Victims::files(&folder, "moved");
        let rename = move |_: &Path| {
            let file = files.next();
            fs::rename(&file, file.with_extension("renamed"))
        };
        add("renaming", refused, Box::new(rename));
        let (own, other) = (Victims::sockets(&folder, "own"), Victims::sockets(&folder, "other"));
        let replace = move |_: &Path| fs::rename(own.next(), other.next());
        add("replacing a socket", refused, Box::new(replace));
        // A socket without an address that it has from before.
        let pair = || UnixStream::pair().expect("sockets");
        let unbound = RefCell::new(vec![pair(), pair()]);
        let places = Victims::new(&folder, "late", |_| ());
        let bind = move |_: &Path| {
            let (one, _) = unbound.borrow_mut().pop().expect("a socket");
            Ok(net::bind(one, &net::SocketAddrUnix::new(places.next())?)?)
        };
        add("a place of a socket of before", refused, Box::new(bind));
    }
    all_are_refused(&scene, tries);
});

apart!(it_reads_and_writes_nothing_of_the_kernel_nor_of_other_processes, |folder| {
    if !is_root() {
        return;
    }
    let scene = Scene::new(folder);
    let parent = rustix::process::getppid().expect("a parent").as_raw_nonzero();
    let of_parent = |name: &str| PathBuf::from(format!("/proc/{parent}/{name}"));
    let refused = Errno::ACCESS;
    let mut tries = Vec::new();
    for name in ["environ", "maps", "mem", "root/etc/passwd", "cwd/.", "stat"] {
        let path = of_parent(name);
        let what = path.display().to_string();
        tries.push(attempt(what, refused, move || File::open(&path)));
    }
    for path in ["/proc/kmsg", "/proc/kallsyms", "/proc/self/root/etc/passwd", "/proc/cmdline"] {
        let open = move || {
            File::options()
                .read(true)
                .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
                .open(path)
        };
        tries.push(attempt(path, refused, open));
    }
    for path in ["/proc/kcore", "/proc/keys", "/dev/mem", "/dev/kmsg", "/sys/kernel/debug"] {
        let part = attempt(path, refused, move || File::open(path));
        tries.push(Try { is_part: true, ..part });
    }
    for path in ["/proc/self/mem", "/proc/self/oom_score_adj"] {
        let open = move || File::options().write(true).open(path);
        tries.push(attempt(format!("writing {path}"), refused, open));
    }
    // A container may have these for reading only.
    for path in ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"] {
        let part = attempt(path, refused, move || File::options().write(true).open(path));
        tries.push(Try { is_part: true, ..part });
    }
    all_are_refused(&scene, tries);
});

apart!(it_changes_no_modes_owners_times_attributes_and_makes_no_links, |folder| {
    if !is_root() {
        return;
    }
    let scene = Scene::new(folder);
    let at = |name: &str| scene.folder.join(name);
    fs::write(at("foreign"), "text").expect("a file");
    chown(at("foreign"), Some(NOBODY), None).expect("an owner");
    let (file, socket) = (File::open(at("foreign")).expect("it is there"), scene.own("host.sock"));
    let count = Cell::new(0);
    let fresh = |kind: &str| {
        count.set(count.get() + 1);
        at(&format!("{kind}{}", count.get()))
    };
    let mode = Permissions::from_mode;
    let mut tries = vec![
        attempt("more rights", Errno::NOSYS, || fs::set_permissions(at("foreign"), mode(0o666))),
        attempt("setuid", Errno::NOSYS, || fs::set_permissions(at("foreign"), mode(0o4755))),
        attempt("setuid by descriptor", Errno::NOSYS, || file.set_permissions(mode(0o4755))),
        attempt("modes of its sockets", Errno::NOSYS, || fs::set_permissions(&socket, mode(0o600))),
        attempt("owners", Errno::NOSYS, || chown(at("foreign"), Some(NOBODY), None)),
        attempt("times", Errno::NOSYS, || {
            file.set_times(FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH))
        }),
        attempt("symbolic links", Errno::NOSYS, || symlink("/etc", fresh("link"))),
        attempt("links", Errno::NOSYS, || fs::hard_link(at("foreign"), fresh("hard"))),
        attempt("folders", Errno::NOSYS, || fs::create_dir(fresh("folder"))),
        attempt("pipes and devices", Errno::NOSYS, || {
            Ok(mknodat(CWD, fresh("pipe"), FileType::Fifo, Mode::RUSR, 0)?)
        }),
    ];
    let attribute = attempt("attributes", Errno::NOSYS, || {
        Ok(setxattr(at("foreign"), "trusted.bowline", b"x", XattrFlags::empty())?)
    });
    tries.push(Try { is_part: true, ..attribute });
    all_are_refused(&scene, tries);
});

apart!(it_has_no_calls_for_files_beyond_what_landlock_knows, |folder| {
    all_are_gone(&Scene::new(folder), system_calls::FILES);
});

apart!(it_runs_nothing_that_it_has_written, |folder| {
    let scene = Scene::new(folder);
    let memory = memfd_create("code", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, 1 << 16).expect("memory");
    let program = File::open("/proc/self/exe").expect("this program");
    let refused = Errno::NOSYS;
    let tries = vec![
        attempt("memory", refused, || system_calls::map_code(None)),
        attempt("memory that was written", refused, system_calls::make_code),
        attempt("a file in memory", refused, || system_calls::map_code(Some(memory.as_fd()))),
        attempt("a file", refused, || system_calls::map_code(Some(program.as_fd()))),
        attempt("a program", refused, || Command::new("/bin/true").status()),
        attempt("its own pages, whatever their rights", Errno::ACCESS, || {
            File::options().write(true).open("/proc/self/mem")
        }),
    ];
    all_are_refused(&scene, tries);
});

apart!(it_connects_to_no_other_tcp_port, |folder| {
    let scene = Scene::new(folder);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let other = listener.local_addr().expect("an address");
    let stream = || socket(AddressFamily::INET, SocketType::STREAM, None);
    let fast = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.cast_unsigned());
    let mut tries = vec![
        attempt("connecting", Errno::ACCESS, || TcpStream::connect(other)),
        attempt("sending at once", Errno::NOSYS, || {
            Ok(net::sendto(stream()?, b"hello", fast, &other)?)
        }),
        attempt("sending pieces at once", Errno::NOSYS, || {
            let mut none = net::SendAncillaryBuffer::default();
            let pieces = [IoSlice::new(b"hello")];
            Ok(net::sendmsg_addr(stream()?, &other, &pieces, &mut none, fast)?)
        }),
    ];
    for (name, protocol) in [("MPTCP", ipproto::MPTCP), ("SMC", ipproto_of(256))] {
        let socket = attempt(name, Errno::NOSYS, move || {
            Ok(socket(AddressFamily::INET, SocketType::STREAM, Some(protocol))?)
        });
        tries.push(Try { is_part: true, ..socket });
    }
    all_are_refused(&scene, tries);
    // Of a peer, which need not be there.
    if let Err(error) = TcpStream::connect(("127.0.0.1", TCP_PORT)) {
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
});

fn ipproto_of(number: u32) -> net::Protocol {
    net::Protocol::from_raw(number.try_into().expect("not zero"))
}

apart!(it_makes_no_sockets_but_those_of_tcp_udp_and_routes, |folder| {
    if !is_root() {
        return;
    }
    let scene = Scene::new(folder);
    let mut tries = Vec::new();
    let mut add = |name: &str, family, kind, protocol, is_part| {
        let made = attempt(name, Errno::NOSYS, move || {
            Ok(net::socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?)
        });
        tries.push(Try { is_part, ..made });
    };
    let family = AddressFamily::from_raw;
    let (raw, datagrams, stream) = (SocketType::RAW, SocketType::DGRAM, SocketType::STREAM);
    add("raw IPv4", AddressFamily::INET, raw, Some(ipproto::ICMP), false);
    add("raw IPv6", AddressFamily::INET6, raw, Some(ipproto::ICMPV6), true);
    add("frames", AddressFamily::PACKET, raw, None, false);
    add("packets", AddressFamily::PACKET, datagrams, None, false);
    add("unix streams", AddressFamily::UNIX, stream, None, false);
    add("unix datagrams", AddressFamily::UNIX, datagrams, None, false);
    add("unix messages", AddressFamily::UNIX, SocketType::SEQPACKET, None, false);
    let netlink = AddressFamily::NETLINK;
    add("events of devices", netlink, raw, Some(netlink::KOBJECT_UEVENT), false);
    add("firewalls", netlink, raw, Some(netlink::NETFILTER), true);
    add("IPsec", netlink, raw, Some(netlink::XFRM), true);
    add("audit", netlink, raw, Some(netlink::AUDIT), true);
    add("generic", netlink, raw, Some(netlink::GENERIC), true);
    add("UDP-Lite", AddressFamily::INET, datagrams, Some(ipproto::UDPLITE), true);
    add("SCTP", AddressFamily::INET, stream, Some(ipproto::SCTP), true);
    for (name, number, kind) in [
        ("RDS", 21, SocketType::SEQPACKET),
        ("AF_KEY", 15, raw),
        ("CAN", 29, raw),
        ("TIPC", 30, SocketType::SEQPACKET),
        ("Bluetooth", 31, raw),
        ("AF_ALG", 38, SocketType::SEQPACKET),
        ("vsock", 40, stream),
        ("SMC", 43, stream),
        ("XDP", 44, raw),
    ] {
        add(name, family(number), kind, None, true);
    }
    all_are_refused(&scene, tries);
});

apart!(it_connects_to_no_unix_sockets_of_others, |folder| {
    let scene = Scene::new(folder);
    let path = scene.folder.join("other.sock");
    let _listener = UnixListener::bind(&path).expect("a listener");
    let others = [SocketType::STREAM, SocketType::SEQPACKET].map(|kind| {
        let other = socket(AddressFamily::UNIX, kind, None).expect("a socket");
        let path = scene.folder.join(format!("other{}.sock", kind.as_raw()));
        let address = net::SocketAddrUnix::new(&path).expect("an address");
        net::bind(&other, &address).expect("a place");
        net::listen(&other, 8).expect("a listener");
        (kind, other, address)
    });
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
    let place = net::SocketAddrUnix::new(scene.own("mine.sock")).expect("an address");
    net::bind(&listener, &place).expect("a place");
    net::listen(&listener, 8).expect("a listener");
    let name = format!("bowline-test-{}", std::process::id());
    let name = UnixAddr::from_abstract_name(name).expect("an address");
    let _abstract = UnixListener::bind_addr(&name).expect("a listener");
    let mail = UnixAddr::from_pathname(scene.folder.join("mail.sock")).expect("an address");
    let _mail = UnixDatagram::bind_addr(&mail).expect("a socket");
    let named_mail = format!("bowline-test-mail-{}", std::process::id());
    let named_mail = UnixAddr::from_abstract_name(named_mail).expect("an address");
    let _named_mail = UnixDatagram::bind_addr(&named_mail).expect("a socket");
    // Sockets that a process has from before, or from another, one for each attempt.
    let unconnected = || socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("one");
    let unconnected: RefCell<Vec<OwnedFd>> = RefCell::new(vec![unconnected(), unconnected()]);
    let datagrams = UnixDatagram::unbound().expect("a socket");
    let refused = Errno::NOSYS;
    let to_name = net::SocketAddrUnix::new_abstract_name(name.as_abstract_name().expect("one"));
    let to_name = to_name.expect("an address");
    let tries = vec![
        attempt("by path", refused, || UnixStream::connect(&path)),
        attempt("by abstract name", refused, || UnixStream::connect_addr(&name)),
        attempt("by a datagram", refused, || UnixDatagram::unbound()?.send_to_addr(b"x", &mail)),
        attempt("a pair that can be connected anew", refused, UnixDatagram::pair),
        attempt("by abstract name, from a socket of before", Errno::PERM, || {
            let socket = unconnected.borrow_mut().pop().expect("a socket");
            Ok(net::connect(socket, &to_name)?)
        }),
        attempt("by a datagram to an abstract name", Errno::PERM, || {
            datagrams.send_to_addr(b"x", &named_mail)
        }),
    ];
    all_are_refused(&scene, tries);
    // What it still has and makes is connected, or listens, for ever.
    let stays = |error: Errno| matches!(error, Errno::ISCONN | Errno::INVAL);
    for (kind, _, address) in &others {
        let (ours, theirs) =
            net::socketpair(AddressFamily::UNIX, *kind, SocketFlags::CLOEXEC, None).expect("one");
        assert!(net::connect(&ours, address).is_err_and(stays), "{kind:?}");
        drop(theirs);
        let _ = net::shutdown(&ours, net::Shutdown::Both);
        assert!(net::connect_unspec(&ours).is_err(), "{kind:?}");
        assert!(net::connect(&ours, address).is_err_and(stays), "{kind:?}, left alone");
    }
    let _ = net::shutdown(&listener, net::Shutdown::Both);
    assert!(net::connect(&listener, &others[0].2).is_err_and(stays), "a listener");
});

apart!(it_reaches_no_other_process, |folder| {
    let scene = Scene::new(folder);
    if is_root() {
        all_are_gone(&scene, system_calls::OTHERS);
    }
});

apart!(the_kernel_sends_no_signals_and_types_nothing_for_it, |folder| {
    let (reader, _writer) = io::pipe().expect("a pipe");
    all_are_gone(&Scene::new(folder), &system_calls::on(reader.as_fd()));
});

apart!(it_has_no_calls_for_processes_users_and_the_machine, |folder| {
    all_are_gone(&Scene::new(folder), system_calls::POWERS);
});

apart!(it_stays_what_it_is, |folder| {
    all_are_gone(&Scene::new(folder), system_calls::SELF);
});

apart!(what_a_node_needs_is_left, |folder| {
    let scene = Scene::new(folder);
    let passed = File::open("/proc/self/mem").expect("memory");
    let (inside, outside) = UnixStream::pair().expect("a pair");
    if scene.confined().is_none() {
        return;
    }
    // Threads, one of which closes what others have opened.
    thread::Builder::new().name("closer".into()).spawn(move || drop(passed)).expect("a thread");
    thread::spawn(|| ()).join().expect("a thread");
    TcpListener::bind("127.0.0.1:0").expect("it listens for peers");
    UdpSocket::bind("127.0.0.1:0").expect("it has RDMA");
    socket(AddressFamily::NETLINK, SocketType::RAW, None).expect("it watches addresses");
    let flags = SocketFlags::CLOEXEC;
    net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
    // Programs: who they are, their descriptors, memory that they share.
    let who = sockopt::socket_peercred(&inside).expect("credentials");
    assert_eq!(who.pid.as_raw_nonzero().get().cast_unsigned(), std::process::id());
    rustix::fs::fstat(&outside).expect("what it is");
    rustix::io::fcntl_dupfd_cloexec(&outside, 0).expect("another of it");
    let memory = memfd_create("memory", MemfdFlags::ALLOW_SEALING).expect("memory");
    rustix::fs::ftruncate(&memory, 4096).expect("memory");
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).expect("a seal");
    fs::metadata("/proc/1").map(|found| found.ino()).expect("what a file is");
    fs::read_link("/proc/self/fd/0").expect("what a descriptor is");
    // What it tells of itself.
    fs::read("/proc/self/statm").expect("its memory");
    fs::read_dir("/proc/self/fd").expect("its descriptors").count();
    fs::read("/proc/self/net/if_inet6").expect("addresses");
    fs::read("/sys/devices/system/cpu/online").expect("processors");
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, limit).expect("a limit of its own");
    // Its sockets, for itself and for who goes on.
    let all = scene.places.for_successor().expect("descriptors");
    let names: Vec<_> = all.iter().map(|(name, _)| name.file_name()).collect();
    assert_eq!(names, [Some("control.sock".as_ref())]);
    let own = ["control.sock", "host.sock"].map(|name| scene.own(name));
    drop((scene, all));
    assert!(own.iter().all(|socket| socket.exists()), "it removes nothing");
});
