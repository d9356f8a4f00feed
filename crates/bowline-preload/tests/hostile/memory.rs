//! What a node of another user gets of memory that calls name, and keeps of it.

use std::io::Write;

use bowline_host_wire::agent::{ANSWER_HEAD, Answer, Kind, Request};
use rustix::net::{RecvFlags, SendFlags, recv};

use super::*;

const GET_MR: (i32, i32) = (276, 2);

/// The socket of an agent, as its node has it.
struct Agent(OwnedFd);

impl Agent {
    /// What the program answers: bytes, or an error number; `None` if it does not.
    fn ask(&self, kind: Kind, at: u64, len: u64, payload: &[u8]) -> Option<Result<Vec<u8>, u32>> {
        let request = Request { kind, grant: 0, sequence: at, at, len };
        let bytes = [&request.emit()[..], payload].concat();
        rustix::net::send(&self.0, &bytes, SendFlags::NOSIGNAL).ok()?;
        let mut answer = vec![0; ANSWER_HEAD + 4096];
        let (_, len) = recv(&self.0, &mut answer[..], RecvFlags::empty()).ok()?;
        let (head, bytes) = answer.get(..len)?.split_first_chunk()?;
        let errno = Answer::parse(head, &request, bytes.len(), bytes.len())?;
        Some(if errno == 0 { Ok(bytes.to_vec()) } else { Err(errno) })
    }

    /// Tells whether it lets the node read what is there.
    fn shows(&self, at: u64) -> bool {
        matches!(self.ask(Kind::Read, at, 8, &[]), Some(Ok(found)) if found == b"a secret")
    }
}

/// A node of another user, and a program that gives it memory.
struct Giving {
    node: FalseNode,
    program: Program,
    at: u64,
    errno: i32,
    _folder: Folder,
}

impl Giving {
    /// The node stores this key, and answers the call that is about memory so.
    fn new(way: &str, key: u64, answer: impl Fn(Head) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let node = FalseNode::new(move |node, head| {
            Some(match head.op {
                Op::Open => {
                    let theirs = node.socket(SocketType::SEQPACKET);
                    (frame(Head::new(Op::Open, 1), &[], &[], &[]), vec![theirs, whole_memory()])
                }
                // The same socket has another name each time.
                Op::Attach => {
                    let handle = 2 + node.loot.lock().unwrap().requests as i64;
                    (frame(Head::new(Op::Attach, handle), &[], &[], &[]), vec![whole_memory()])
                }
                Op::SetOption if (head.a, head.b) == GET_MR => {
                    store(node, key);
                    (answer(Head::new(head.op, 0)), Vec::new())
                }
                op => honest(node, op),
            })
        });
        let folder = Folder::new(&format!("gives-{way}-{key:x}-{}", node_number()));
        let place = folder.join("host.sock");
        node.listen_as(ANNA, &place);
        let mut program = Program::at(&place, &["give", way], Stdio::piped());
        let line = program.line();
        let mut words = line.split(' ');
        let at = words.next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
        let errno = words.next().unwrap().parse().unwrap();
        Self { node, program, at, errno, _folder: folder }
    }

    fn agent(&self) -> Agent {
        let memory = &self.node.loot.lock().unwrap().memory;
        Agent(memory.last().expect("memory was given").try_clone().unwrap())
    }

    fn resume(&mut self) {
        self.program.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert_eq!(self.program.line(), "done");
    }
}

/// Each folder has its own.
fn node_number() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Stores a key where the program wants it.
fn store(node: &FalseNode, key: u64) {
    let loot = node.loot.lock().unwrap();
    let key_at = u64::from_ne_bytes(loot.payload[16..24].try_into().unwrap());
    let agent = Agent(loot.memory.last().expect("memory").try_clone().unwrap());
    // Unless the socket was closed before.
    let _ = agent.ask(Kind::Write, key_at, 8, &key.to_ne_bytes());
}

/// Asks the agent of a program, if it has given one, for anything, about here and there.
pub(crate) fn ask_for_anything(node: &FalseNode, random: &mut Random) {
    const KINDS: [Kind; 5] = [Kind::Read, Kind::Write, Kind::Has, Kind::Swap, Kind::Forget];
    let loot = node.loot.lock().unwrap();
    let Some(agent) = loot.memory.last() else { return };
    let named = loot.payload.first_chunk().map_or(0, |at| u64::from_ne_bytes(*at));
    for _ in 0..random.below(4) {
        let at = if random.below(4) == 0 { random.next() } else { named + random.below(10_000) };
        let len = if random.below(8) == 0 { random.next() } else { random.below(100) };
        let kind = KINDS[random.below(5) as usize];
        let grant = random.below(3) as u32;
        let request = Request { kind, grant, sequence: random.next(), at, len };
        let mut bytes = request.emit().to_vec();
        let along = random.below(200) as usize;
        bytes.extend(random.bytes(along));
        if random.below(8) == 0 {
            bytes.truncate(random.below(40) as usize);
        }
        let _ = rustix::net::send(agent, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
    // Answers that nobody takes are the program's to wait for, for a while.
    while random.below(8) > 0 && recv(agent, &mut [0; 4096][..], RecvFlags::DONTWAIT).is_ok() {}
}

fn well(head: Head) -> Vec<u8> {
    frame(head, &[], &[], &[])
}

// tests [RMR-12]
#[test]
fn a_region_ends_when_the_program_frees_it_by_whichever_descriptor() {
    if !is_root() {
        return;
    }
    for way in ["free", "free-by-copy"] {
        let mut giving = Giving::new(way, 0x1007, well);
        let agent = giving.agent();
        assert!(giving.errno == 0 && agent.shows(giving.at), "{way}");
        giving.resume();
        assert!(!agent.shows(giving.at), "{way}");
        assert!(!got_memory(&giving.node));
    }
}

// tests [RMR-12]
#[test]
fn what_was_given_ends_with_the_last_descriptor_however_it_is_closed() {
    if !is_root() {
        return;
    }
    let ways = ["close", "copies", "dup2", "close_range", "fclose", "freopen"];
    let stays = ways.into_iter().filter(|way| {
        let mut giving = Giving::new(way, 0x1007, well);
        let agent = giving.agent();
        assert!(giving.errno == 0 && agent.shows(giving.at), "{way}");
        giving.resume();
        agent.shows(giving.at)
    });
    assert_eq!(stays.collect::<Vec<_>>(), [""; 0]);
}

// tests [RMR-13]
#[test]
fn a_segment_of_shared_memory_that_is_detached_is_not_given_and_what_lies_behind_it_is() {
    if !is_root() {
        return;
    }
    for (way, stays) in [("detach", false), ("detach-other", true)] {
        let mut giving = Giving::new(way, 0x1007, well);
        let agent = giving.agent();
        assert!(giving.errno == 0 && agent.shows(giving.at), "{way}");
        giving.resume();
        assert_eq!(agent.shows(giving.at), stays, "{way}");
    }
}

// tests [RMR-12]
#[test]
fn nothing_stays_given_for_a_socket_that_another_thread_closes() {
    if !is_root() {
        return;
    }
    let mut giving = Giving::new("race", 0x1007, well);
    giving.resume();
    assert!(!giving.agent().shows(giving.at));
}

#[test]
fn calls_that_go_well_leave_errno_as_it_is() {
    if is_root() {
        Giving::new("errno", 0x1007, well).resume();
    }
}

/// A key that no program can free, and an invalid reply: the call has failed, or it should.
// tests [RMR-12]
#[test]
fn what_cannot_be_freed_or_was_not_granted_is_not_given() {
    if !is_root() {
        return;
    }
    let giving = Giving::new("keep", 0, well);
    assert!(!giving.agent().shows(giving.at), "a key of 0");
    let half = |head| {
        let mut bytes = frame(head, &[], &[], b"more to come");
        bytes.truncate(HEAD_LEN + 5);
        bytes
    };
    let giving = Giving::new("keep", 0x1007, half);
    assert_eq!(giving.errno, 100, "ENETDOWN");
    assert!(!giving.agent().shows(giving.at), "of a call that has failed");
}

/// Root has made the pair, and given the other end to a node of another user: that one greets.
// tests [RMR-12]
#[test]
fn memory_follows_who_greets_and_not_only_who_has_made_the_pair() {
    if !is_root() {
        return;
    }
    let folder = Folder::new("greeter");
    let place = folder.join("host.sock");
    let made = Mutex::new(Some(pair()));
    let node = FalseNode::new(move |node, head| {
        Some(match head.op {
            Op::Open => {
                let (theirs, end) = made.lock().unwrap().take().unwrap();
                node.take_offers(end);
                (frame(Head::new(Op::Open, 1), &[], &[], &[]), vec![theirs, whole_memory()])
            }
            op => honest(node, op),
        })
    });
    node.listen_as(ANNA, &place);
    let mut program = Program::at(&place, &["give", "keep"], Stdio::piped());
    assert!(program.line().ends_with(" 0"), "the call goes well");
    assert!(!got_memory(&node), "{:?}", node.loot.lock().unwrap());
    assert_eq!(node.loot.lock().unwrap().memory.len(), 1, "the agent");
}
