//! Programs that run with the library, and somebody else who wants something of them: a stranger
//! who connects or passes a descriptor, and a node that is not what it should be.

#[path = "hostile/false_node.rs"]
mod false_node;
#[path = "hostile/memory.rs"]
mod memory_of_programs;
#[path = "hostile/program.rs"]
mod program;
mod scene;

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bowline_host_wire::{AREA_LEN, FRAME_MAX, HEAD_LEN, Head, NAME_PREFIX, Op};
use bowline_testkit::skipped;
use false_node::{FalseNode, frame, honest, memory, pair, send, welcome, whole_memory};
use program::{ANNA, Folder, Program, STRANGER, as_user, is_root};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with,
};
use scene::LIMIT;

/// A node that asks for everything in every way that there ever was.
fn greedy() -> FalseNode {
    FalseNode::new(|_, head| {
        Some(match head.op {
            Op::Hello => (welcome(), Vec::new()),
            Op::Attach => (frame(Head::new(Op::Attach, 1), &[], &[], &[]), vec![whole_memory()]),
            // An error, with what once asked for memory.
            op => (frame(Head { op, value: -95, a: 0, b: 2 }, &[], &[], &[]), Vec::new()),
        })
    })
}

/// Memory of a process among what was got.
fn got_memory(node: &FalseNode) -> bool {
    let loot = node.loot.lock().unwrap();
    loot.descriptors.iter().any(|name| name.ends_with("/mem"))
}

/// A socket of any kind, bound to a name as a node's, and connected to a server.
fn disguised(kind: SocketType, digits: usize, to: &Path) -> OwnedFd {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
    let digits: String =
        format!("{:064x}", bowline_base::entropy::random_u64())[64 - digits..].into();
    let name = [&NAME_PREFIX[1..], digits.as_bytes()].concat();
    bind(&socket, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    connect(&socket, &SocketAddrUnix::new(to).unwrap()).unwrap();
    socket
}

/// A client of a server gets back what it has sent, in time.
fn is_served(client: OwnedFd) {
    let mut client = UnixStream::from(client);
    client.set_read_timeout(Some(LIMIT)).unwrap();
    client.write_all(b"hello").unwrap();
    let mut back = [0; 5];
    client.read_exact(&mut back).expect("the server answers");
    assert_eq!(&back, b"hello");
}

/// Listens at the names that the number in a disguised name once led to.
fn listens_at(node: &FalseNode, number: &str) {
    let name = [&NAME_PREFIX[1..], number.as_bytes()].concat();
    let address = SocketAddr::from_abstract_name(name).unwrap();
    node.listen(UnixListener::bind_addr(&address).unwrap());
}

#[test]
fn who_connects_to_a_server_of_any_kind_is_taken_for_what_he_is() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("accept");
    let node = greedy();
    for (what, kind) in [("serve", SocketType::STREAM), ("serve-packets", SocketType::SEQPACKET)] {
        let place = folder.join(what);
        let mut server = Program::start(0, &[what, place.to_str().unwrap()], Stdio::null(), |_| {});
        assert_eq!(server.line(), "listening");
        for digits in [1, 16, 32] {
            let place = place.clone();
            let node = node.clone();
            let client = as_user(STRANGER, move || {
                if digits == 16 && kind == SocketType::STREAM {
                    listens_at(&node, &"0".repeat(16));
                }
                disguised(kind, digits, &place)
            });
            is_served(client);
        }
    }
    let loot = node.loot.lock().unwrap();
    assert_eq!((loot.channels, loot.descriptors.len()), (0, 0), "{loot:?}");
}

#[test]
fn a_descriptor_that_a_stranger_passes_is_taken_for_what_it_is() {
    if !is_root() {
        return;
    }
    let node = greedy();
    for kind in [SocketType::SEQPACKET, SocketType::STREAM, SocketType::DGRAM] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut program = Program::start(0, &["take"], Stdio::from(OwnedFd::from(theirs)), |_| {});
        assert_eq!(program.line(), "listening");
        // A pair whose other end sends before the program looks at it.
        let passed = node.clone();
        let (one, other) = as_user(STRANGER, move || {
            let theirs = passed.socket(kind);
            let pair =
                rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
            (theirs, pair.unwrap())
        });
        drop(one);
        let (theirs, end) = other;
        let name =
            [&NAME_PREFIX[1..], format!("{kind:?}-{}", std::process::id()).as_bytes()].concat();
        bind(&end, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
        rustix::net::send(&end, b"hello", rustix::net::SendFlags::empty()).unwrap();
        send(&ours, b"x", &[theirs]).unwrap();
        rustix::net::sockopt::set_socket_timeout(
            &end,
            rustix::net::sockopt::Timeout::Recv,
            Some(LIMIT),
        )
        .unwrap();
        let mut back = [0; 64];
        let (_, got) = rustix::net::recv(&end, &mut back, rustix::net::RecvFlags::empty())
            .expect("it comes back");
        assert_eq!(&back[..got], b"hello", "{kind:?}");
    }
    assert_eq!(node.loot.lock().unwrap().channels, 0);
}

#[test]
fn a_standard_input_that_a_stranger_has_made_is_what_it_is() {
    if !is_root() {
        return;
    }
    let node = greedy();
    let passed = node.clone();
    let theirs = as_user(STRANGER, move || passed.socket(SocketType::SEQPACKET));
    let program =
        Program::start(ANNA, &["stdin"], Stdio::from(theirs.try_clone().unwrap()), |_| {});
    // It reads what nobody sends, until the other end is gone.
    thread::sleep(Duration::from_millis(500));
    assert_eq!(node.loot.lock().unwrap().channels, 0);
    drop(program);
}

/// A runtime folder of another user, as after `sudo -E`, and one that others may write to.
#[test]
fn a_runtime_folder_of_another_user_has_no_node_for_this_one() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("runtime");
    let runtime = folder.join("user");
    let node = greedy();
    let (made, listening) = (runtime.clone(), node.clone());
    as_user(STRANGER, move || {
        fs::create_dir_all(made.join("bowline/rds")).unwrap();
        listening.listen(UnixListener::bind(made.join("bowline/rds/host.sock")).unwrap());
    });
    let mut program = Program::start(0, &["make"], Stdio::null(), |command| {
        command.env("XDG_RUNTIME_DIR", &runtime);
    });
    assert_eq!(program.line(), "errno 97", "no node");
    assert_eq!(node.loot.lock().unwrap().channels, 0);
    // Who owns it finds the node there.
    let mut program = Program::start(STRANGER, &["make"], Stdio::null(), |command| {
        command.env("XDG_RUNTIME_DIR", &runtime);
    });
    assert!(program.line().starts_with("errno"));
    assert_eq!(node.loot.lock().unwrap().channels, 1);
}

/// A runtime folder in which all may make something, as `/tmp`: what another user has made there is
/// no node for this one, and what this one has made is.
#[test]
fn a_runtime_folder_where_all_may_write_has_own_nodes_only() {
    if !is_root() {
        return;
    }
    for (maker, wanted) in [(STRANGER, 0), (0, 1)] {
        let folder = Folder::new(&format!("all-{maker}"));
        fs::set_permissions(&folder.0, Permissions::from_mode(0o1777)).unwrap();
        let node = greedy();
        let (made, listening) = (folder.join("bowline/rds"), node.clone());
        as_user(maker, move || {
            fs::create_dir_all(&made).unwrap();
            listening.listen(UnixListener::bind(made.join("host.sock")).unwrap());
        });
        let mut program = Program::start(0, &["make"], Stdio::null(), |command| {
            command.env("XDG_RUNTIME_DIR", &folder.0);
        });
        assert!(program.line().starts_with("errno"));
        assert_eq!(node.loot.lock().unwrap().channels, wanted, "of user {maker}");
    }
}

/// A runtime folder of root's in which a group may make something, as `/var/local`, and one to
/// which a stranger's link leads, who can have it lead elsewhere after the look at it. The folder
/// counts, but not who owns what is there.
#[test]
fn who_may_write_to_a_runtime_folder_is_no_node_for_others() {
    if !is_root() {
        return;
    }
    for (maker, wanted) in [(STRANGER, "errno 13"), (0, "errno 95")] {
        let folder = Folder::new(&format!("group-{maker}"));
        let node = greedy();
        let (made, listening) = (folder.join("bowline/rds"), node.clone());
        as_user(maker, move || {
            fs::create_dir_all(&made).unwrap();
            listening.listen(UnixListener::bind(made.join("host.sock")).unwrap());
        });
        fs::set_permissions(&folder.0, Permissions::from_mode(0o775)).unwrap();
        let mut program = Program::start(0, &["make"], Stdio::null(), |command| {
            command.env("XDG_RUNTIME_DIR", &folder.0);
        });
        assert_eq!(program.line(), wanted, "not asked, and asked in vain");
    }
}

/// A pair of root's whose other end root has given to somebody else, as programs do that separate
/// their privileges: who greets there is no node, whatever he calls himself.
#[test]
fn the_other_end_of_a_pair_that_was_given_away_is_no_node() {
    if !is_root() {
        return;
    }
    let node = greedy();
    let (theirs, end) = pair();
    let name = [&NAME_PREFIX[1..], format!("given-{}", std::process::id()).as_bytes()].concat();
    bind(&end, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    let (passed, taken) = (node.clone(), end.try_clone().unwrap());
    as_user(STRANGER, move || passed.take_offers(taken));
    let program = Program::start(0, &["stdin"], Stdio::from(theirs), |_| {});
    // What the library offers is taken first.
    let begun = Instant::now();
    while node.loot.lock().unwrap().channels == 0 {
        assert!(begun.elapsed() < LIMIT, "nothing was offered");
        thread::sleep(Duration::from_millis(2));
    }
    rustix::net::send(&end, b"hello", rustix::net::SendFlags::empty()).unwrap();
    assert_eq!(program.ends(), Some(0), "it has its message");
    let loot = node.loot.lock().unwrap();
    assert_eq!((loot.requests, loot.descriptors.len()), (0, 0), "{loot:?}");
}

/// The two ends of a pair that a program makes itself are not looked at at all.
#[test]
fn a_pair_of_the_program_s_own_is_no_socket_of_a_node() {
    let mut program = Program::start(0, &["pair"], Stdio::null(), |_| {});
    assert_eq!(program.line(), "hello");
    assert_eq!(program.ends(), Some(0));
}

/// A file of a place that is one user's, where another one listens.
#[test]
fn who_listens_at_a_place_must_be_its_owner() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("place");
    let place = folder.join("host.sock");
    let node = greedy();
    node.listen_as(STRANGER, &place);
    fs::set_permissions(&place, Permissions::from_mode(0o666)).unwrap();
    std::os::unix::fs::chown(&place, Some(ANNA), Some(ANNA)).unwrap();
    let mut program = Program::makes(&place);
    assert_eq!(program.line(), "errno 13", "EACCES");
    assert_eq!(node.loot.lock().unwrap().requests, 0);
}

/// Nobody gets memory by asking for it, not even the node of root.
#[test]
fn a_node_that_asks_for_memory_gets_none() {
    let folder = Folder::new("asks");
    let place = folder.join("host.sock");
    let node = FalseNode::new(|node, head| {
        Some(match head.op {
            Op::Hello | Op::Open => honest(node, head.op),
            op => (frame(Head { op, value: -95, a: 0, b: 2 }, &[], &[], &[]), Vec::new()),
        })
    });
    node.listen(UnixListener::bind(&place).unwrap());
    let mut program = Program::makes(&place);
    assert_eq!(program.line(), "errno 95");
    let asked = node.loot.lock().unwrap().requests;
    assert!(asked >= 3, "{asked}");
    assert!(!got_memory(&node));
}

/// A believed node hands out, as a socket, what another user has made.
#[test]
fn a_socket_is_one_that_its_node_has_made() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("maker");
    for (maker, wanted) in [(ANNA, "made"), (0, "made"), (STRANGER, "errno 71")] {
        let place = folder.join(&format!("{maker}.sock"));
        let made = Mutex::new(Some(as_user(maker, pair)));
        let node = FalseNode::new(move |node, head| {
            Some(match head.op {
                Op::Open => {
                    let (fd, end) = made.lock().unwrap().take().unwrap();
                    std::mem::forget(end);
                    (frame(Head::new(Op::Open, 1), &[], &[], &[]), vec![fd, whole_memory()])
                }
                op => honest(node, op),
            })
        });
        node.listen_as(ANNA, &place);
        let mut program = Program::makes(&place);
        assert_eq!(program.line(), wanted, "of user {maker}");
    }
}

/// A node that answers everything well.
fn willing() -> FalseNode {
    FalseNode::new(|node, head| Some(honest(node, head.op)))
}

/// Two nodes that say the same number of themselves, of which one has seen the other's.
#[test]
fn a_node_is_not_that_of_another_user_whatever_number_it_tells() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("number");
    let place = folder.join("host.sock");
    let (root_node, anna_node) = (willing(), willing());
    anna_node.listen_as(ANNA, &place);
    let input = Stdio::from(root_node.socket(SocketType::SEQPACKET));
    let mut program = Program::start(0, &["both"], input, |command| {
        command.env("BOWLINE_RDS_SOCKET", &place);
    });
    assert_eq!(program.line(), "used");
    let asked = root_node.loot.lock().unwrap().requests;
    assert_eq!(program.line(), "made");
    assert_eq!(root_node.loot.lock().unwrap().requests, asked, "about the socket of the other");
    // To make it, and to bind it.
    assert!(anna_node.loot.lock().unwrap().requests >= 2);
}

/// Descriptors that come with an invalid reply are closed.
#[test]
fn what_comes_along_with_a_broken_answer_is_closed() {
    let folder = Folder::new("along");
    for (n, len) in [1, HEAD_LEN, HEAD_LEN + 3].into_iter().enumerate() {
        let place = folder.join(&format!("{n}.sock"));
        let (end, passed) = std::io::pipe().unwrap();
        let passed = Mutex::new(Some(OwnedFd::from(passed)));
        let node = FalseNode::new(move |node, head| {
            Some(match head.op {
                Op::Open => {
                    let mut bytes = frame(Head::new(Op::Open, 1), &[], &[], b"more");
                    bytes.truncate(len);
                    // The first time: then the program tries again.
                    let passed = passed.lock().unwrap().take();
                    (bytes, passed.into_iter().chain([whole_memory()]).collect())
                }
                op => honest(node, op),
            })
        });
        node.listen(UnixListener::bind(&place).unwrap());
        let mut program = Program::start(0, &["stay"], Stdio::piped(), |command| {
            command.env("BOWLINE_RDS_SOCKET", &place);
        });
        assert_eq!(program.line(), "errno 100");
        let mut ready = [rustix::event::PollFd::new(&end, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut ready, Some(&now)).unwrap();
        let events = ready[0].revents();
        assert!(events.contains(rustix::event::PollFlags::HUP), "{len}: it is open: {events:?}");
        drop(program);
    }
}

/// A pair of which nobody greets on the other end is what it is, once that is known.
#[test]
fn a_pair_with_a_silent_end_is_waited_for_once() {
    let (theirs, end) = pair();
    let name = [&NAME_PREFIX[1..], format!("silent-{}", std::process::id()).as_bytes()].concat();
    bind(&end, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
    rustix::net::send(&end, b"hello", rustix::net::SendFlags::empty()).unwrap();
    let program = Program::start(0, &["stdin"], Stdio::from(theirs), |_| {});
    assert_eq!(program.ends(), Some(0), "it has its message");
}

/// A node at the default path whose other name is of another namespace is not asked.
#[test]
fn a_node_of_another_namespace_is_left_alone() {
    let namespace = bowline_host::network_namespace();
    if namespace == 0 {
        return skipped::because("this kernel does not number namespaces");
    }
    let folder = Folder::new("elsewhere");
    fs::set_permissions(&folder.0, Permissions::from_mode(0o755)).unwrap();
    let places = folder.join("bowline/rds");
    fs::create_dir_all(&places).unwrap();
    let node = willing();
    let own = places.join(format!("host-{}.sock", namespace + 1));
    node.listen(UnixListener::bind(&own).unwrap());
    fs::hard_link(&own, places.join("host.sock")).unwrap();
    let mut program = Program::start(0, &["make"], Stdio::null(), |command| {
        command.env("XDG_RUNTIME_DIR", &folder.0);
    });
    assert_eq!(program.line(), "errno 97");
    assert_eq!(node.loot.lock().unwrap().channels, 0);
    // Without another name it may serve any.
    fs::remove_file(&own).unwrap();
    let mut program = Program::start(0, &["make"], Stdio::null(), |command| {
        command.env("XDG_RUNTIME_DIR", &folder.0);
    });
    assert_eq!(program.line(), "made");
}

/// Memory that is not as long as it has to be, or may become shorter: no signal, an error.
#[test]
fn memory_that_ends_too_early_is_refused() {
    let folder = Folder::new("short");
    for (n, len) in [0, 8, 4096, AREA_LEN - 1, AREA_LEN].into_iter().enumerate() {
        let place = folder.join(&format!("{n}.sock"));
        let node = FalseNode::new(move |node, head| {
            let (bytes, mut came) = honest(node, head.op);
            if head.op == Op::Open {
                came[1] = memory(len);
            }
            Some((bytes, came))
        });
        node.listen(UnixListener::bind(&place).unwrap());
        let mut program = Program::makes(&place);
        let wanted = if len == AREA_LEN { "made" } else { "errno 71" };
        assert_eq!(program.line(), wanted, "{len}");
        assert_eq!(program.ends(), Some(0));
    }
}

/// A node that once says nothing, or half of what is due: a greeting, a socket, or whose a
/// descriptor is, which no node delays; or half of any other answer. One that says it byte by byte,
/// and one whose queue is full. The calls go on, by another channel where there is one.
#[test]
fn a_node_that_says_nothing_is_waited_for_a_while() {
    let folder = Folder::new("silent");
    let silent = move |of: Op, len: usize| {
        let was_silent = AtomicBool::new(false);
        let mut node = FalseNode::new(move |node, head| {
            let (mut bytes, descriptors) = honest(node, head.op);
            if head.op == of && !was_silent.swap(true, Ordering::Relaxed) {
                bytes.truncate(len);
            }
            (!bytes.is_empty()).then_some((bytes, descriptors))
        });
        node.stays = true;
        node
    };
    let dripping = |of| {
        let mut node = willing();
        node.drips = Some(of);
        node
    };
    let full = folder.join("full.sock");
    let listener =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(&full).unwrap()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&full).unwrap();
    let tries = [
        (Op::Hello, 0, "errno 97"),
        (Op::Hello, 20, "errno 97"),
        (Op::Hello, HEAD_LEN + 1, "errno 97"),
        (Op::Open, 0, "made"),
        (Op::Open, 1, "made"),
        (Op::Bind, HEAD_LEN - 1, "errno 100"),
    ];
    let mut programs = vec![(full, "errno 97")];
    for (n, (of, len, wanted)) in tries.into_iter().enumerate() {
        let place = folder.join(&format!("{n}.sock"));
        silent(of, len).listen(UnixListener::bind(&place).unwrap());
        programs.push((place, wanted));
    }
    for (of, wanted) in [(Op::Hello, "errno 97"), (Op::Bind, "errno 100")] {
        let place = folder.join(&format!("{of:?}.sock"));
        dripping(of).listen(UnixListener::bind(&place).unwrap());
        programs.push((place, wanted));
    }
    // All at once, since each takes as long as it waits.
    let programs: Vec<_> = programs
        .into_iter()
        .map(|(place, wanted)| (Program::makes(&place), place, wanted))
        .collect();
    let passed = [0, 1].map(|len| {
        let input = silent(Op::Attach, len).socket(SocketType::SEQPACKET);
        Program::start(0, &["stdin"], Stdio::from(input), |_| {})
    });
    for (mut program, place, wanted) in programs {
        assert_eq!(program.line(), wanted, "{}", place.display());
        assert_eq!(program.ends(), Some(0));
    }
    for program in passed {
        assert_eq!(program.ends(), Some(1), "its standard input is of no use");
    }
}

/// Seconds of random lies; `cargo xtask hostile --seconds` sets them.
fn seconds() -> f64 {
    let set = std::env::var("BOWLINE_HOSTILE_SECONDS").ok();
    set.and_then(|text| text.parse().ok()).unwrap_or(5.0)
}

/// A random number generator whose seed is printed, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// Answers of all kinds, of which most are almost right.
fn lie(random: &mut Random, op: Op) -> (Vec<u8>, Vec<OwnedFd>) {
    let values = [0, 1, -1, -9, -11, -95, 100, i64::MAX, i64::MIN, -(1 << 40), 1 << 40];
    let pick = |random: &mut Random| {
        let n = random.below(values.len() as u64 + 1) as usize;
        values.get(n).copied().unwrap_or_else(|| random.next().cast_signed())
    };
    let head = Head { op, value: pick(random), a: pick(random) as i32, b: pick(random) as i32 };
    let len = |random: &mut Random, most: u64| random.below(most) as usize;
    let (name, control, payload) = (
        {
            let n = len(random, 129);
            random.bytes(n)
        },
        {
            let n = 8 * len(random, 40);
            let mut control = random.bytes(n);
            if n >= 16 && random.below(2) == 0 {
                control[..8].copy_from_slice(&(n as u64).to_ne_bytes());
                let level = if random.below(2) == 0 { 1_u32 } else { 276 };
                control[8..12].copy_from_slice(&level.to_ne_bytes());
                control[12..16].copy_from_slice(&(random.below(13) as u32).to_ne_bytes());
            }
            control
        },
        {
            let n = len(random, 3000);
            random.bytes(n)
        },
    );
    let mut bytes = match random.below(6) {
        0 => frame(head, &[], &[], &[]),
        1 => frame(head, &name, &[], &payload),
        2 => frame(head, &name, &control, &payload),
        3 => frame(Head { value: 64, ..head }, &name, &control, &payload[..payload.len().min(64)]),
        4 => frame(Head { value: 64, a: 64, b: 0, ..head }, &[], &[], &payload),
        _ => random.bytes(HEAD_LEN),
    };
    if random.below(8) == 0 {
        let at = random.below(HEAD_LEN as u64) as usize;
        bytes[at] ^= 1 << random.below(8);
    }
    if random.below(16) == 0 {
        bytes[..4].copy_from_slice(&(FRAME_MAX as u32 + random.below(2) as u32).to_ne_bytes());
    }
    let descriptors = match random.below(4) {
        0 => vec![whole_memory()],
        1 => vec![pair().0, whole_memory()],
        _ => Vec::new(),
    };
    (bytes, descriptors)
}

/// A node of the own user, which is believed, and lies in every answer and in shared memory.
#[test]
fn a_node_that_lies_neither_ends_nor_stops_its_programs() {
    lies_of("lies", |node, place| node.listen(UnixListener::bind(place).unwrap()));
}

/// One of another user, whose place it is: it gets no more of memory by lies.
#[test]
fn a_node_of_another_user_that_lies_gets_no_memory_either() {
    if !is_root() {
        return;
    }
    let node = lies_of("lies-of-anna", |node, place| node.listen_as(ANNA, place));
    assert!(!got_memory(&node));
    assert!(!node.loot.lock().unwrap().memory.is_empty(), "it could ask an agent");
}

fn lies_of(name: &str, listen: impl FnOnce(&FalseNode, &Path)) -> FalseNode {
    let folder = Folder::new(name);
    let seed = bowline_base::entropy::random_u64() | 1;
    println!("seed {seed}");
    let place = folder.join("host.sock");
    let random = Arc::new(Mutex::new(Random(seed)));
    let node_random = Arc::clone(&random);
    let node = FalseNode::new(move |node, head| {
        let mut random = node_random.lock().unwrap();
        memory_of_programs::ask_for_anything(node, &mut random);
        Some(match head.op {
            Op::Hello if random.below(8) > 0 => (welcome(), Vec::new()),
            Op::Open if random.below(8) > 0 => {
                let (fd, end) = pair();
                let memory = whole_memory();
                let noise = random.bytes(4096);
                // Numbers of its own that may be right, and some that are not.
                if random.below(2) == 0 {
                    let _ = rustix::io::pwrite(&memory, &noise[8..1024], 8);
                }
                if random.below(2) == 0 {
                    let lent = random.below(1 << 18) & !15;
                    let _ = rustix::io::pwrite(&memory, &lent.to_ne_bytes(), 256);
                    let _ = rustix::io::pwrite(&memory, &noise, 4096 + (256 << 10));
                }
                let _ = rustix::net::send(&end, &noise[..4], rustix::net::SendFlags::NOSIGNAL);
                if random.below(4) > 0 {
                    node.take_offers(end);
                }
                (frame(Head::new(Op::Open, 1), &[], &[], &[]), vec![fd, memory])
            }
            op => lie(&mut random, op),
        })
    });
    listen(&node, &place);
    let mut program = Program::at(&place, &["use", &seconds().to_string()], Stdio::null());
    let line = program.line_within(LIMIT + Duration::from_secs_f64(seconds()));
    assert!(line.starts_with("used "), "seed {seed}: {line:?}, {:?}", program.ends());
    let counts: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    println!("{line}: calls that went well, and that failed");
    assert!(counts[1] > 100, "seed {seed}: {line}");
    assert!(!random.is_poisoned(), "seed {seed}: the node has not lied to the end");
    assert_eq!(program.ends(), Some(0), "seed {seed}");
    node
}
