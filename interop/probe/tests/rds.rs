//! RDS over TCP: bowline keeps every rule, and so does a scripted peer that behaves as a 6.12
//! kernel does; of each mistake of that peer the rule it breaks is found.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, Scope};
use std::time::Duration;

use bowline::rds::Node;
use bowline_probe::{Finding, Options, Other, Profile, ask_rds};
use bowline_wire::rds::{
    Extension, Extensions, Flags, HEADER_LEN, Handshake, Header, MAP_LEN, TCP_PORT, checksum_ok,
};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// Longest wait for an answer that comes, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for one that does not come.
const IMPATIENCE: Duration = Duration::from_millis(700);

/// Addresses of a test, which has its own; the peer's is number 2.
fn ip(test: u8, number: u8) -> IpAddr {
    Ipv4Addr::new(127, 91, test, number).into()
}

fn deviating(findings: &[Finding]) -> Vec<&Finding> {
    findings.iter().filter(|f| matches!(f.answer, Err(Other::Deviates(_)))).collect()
}

#[test]
fn a_bowline_node_keeps_every_rule() {
    let _node = Node::builder().address(ip(0, 2)).build().expect("a node");
    let options = Options { patience: PATIENCE, ..Options::default() };
    // R-210 waits for what does not come.
    let quick = Options { patience: IMPATIENCE, rules: vec!["R-210".into()], ..Options::default() };
    for locals in [&[ip(0, 1), ip(0, 3)][..], &[ip(0, 4)]] {
        let report = ask_rds(ip(0, 2), locals, &options).expect("it is asked");
        assert_eq!(report.profile, Profile::Bowline);
        assert!(deviating(&report.findings).is_empty(), "{:#?}", report.findings);
        let asked = report.findings.iter().filter(|finding| finding.answer.is_ok()).count();
        assert!(asked >= 23, "{:#?}", report.findings);
    }
    let report = ask_rds(ip(0, 2), &[ip(0, 5)], &quick).expect("it is asked");
    assert!(deviating(&report.findings).is_empty(), "{:#?}", report.findings);
}

#[test]
fn what_nobody_answers_is_an_error_and_no_finding() {
    let error = ask_rds(ip(1, 2), &[ip(1, 1)], &Options::default()).expect_err("nobody is there");
    assert!(error.to_string().contains("127.91.1.2 cannot be asked"), "{error}");
    let options = Options { rules: vec!["R-1".into()], ..Options::default() };
    let _node = Node::builder().address(ip(1, 4)).build().expect("a node");
    let error = ask_rds(ip(1, 4), &[ip(1, 1)], &options).expect_err("no such rule");
    assert!(error.to_string().starts_with("no rule R-1; there are R-313, "), "{error}");
}

/// A mistake that the scripted peer makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    None,
    NoMap,
    MapHasNumber,
    NoProbe,
    FourPaths,
    TwoExtensions,
    NoProbePong,
    EchoesPayload,
    SameNumber,
    ReadsWholeMessages,
    LooksAtChecksum,
    RefusesFlags,
    RefusesExtension,
    RefusesLongExtension,
    ReadsOneExtension,
    EndsAtUnboundPort,
    RefusesShortMap,
    RefusesFlaggedMap,
    RefusesGap,
    DropsLowerNumber,
    ServesSecond,
    LimitsLength,
    KeepsHalf,
    Acknowledges,
    ServesKnock,
}

/// Every mistake, and the rule that it breaks.
const MISTAKES: [(Mistake, &str); 24] = [
    (Mistake::NoMap, "R-313"),
    (Mistake::MapHasNumber, "R-702"),
    (Mistake::NoProbe, "R-402"),
    (Mistake::FourPaths, "R-417"),
    (Mistake::TwoExtensions, "R-111"),
    (Mistake::NoProbePong, "R-403"),
    (Mistake::EchoesPayload, "R-605"),
    (Mistake::SameNumber, "R-304"),
    (Mistake::ReadsWholeMessages, "R-220"),
    (Mistake::LooksAtChecksum, "R-103"),
    (Mistake::RefusesFlags, "R-119"),
    (Mistake::RefusesExtension, "R-114"),
    (Mistake::RefusesLongExtension, "R-113"),
    (Mistake::ReadsOneExtension, "R-112"),
    (Mistake::EndsAtUnboundPort, "R-604"),
    (Mistake::RefusesShortMap, "R-224"),
    (Mistake::RefusesFlaggedMap, "R-108"),
    (Mistake::RefusesGap, "R-603"),
    (Mistake::DropsLowerNumber, "R-602"),
    (Mistake::ServesSecond, "R-210"),
    (Mistake::LimitsLength, "R-223"),
    (Mistake::KeepsHalf, "R-230"),
    (Mistake::Acknowledges, "R-102"),
    (Mistake::ServesKnock, "R-209"),
];

/// A node as simple as can be: it maps nothing, binds nothing, and answers pings.
struct Peer {
    at: IpAddr,
    mistake: Mistake,
    stop: AtomicBool,
    /// Peers that have a connection in service.
    served: Mutex<Vec<IpAddr>>,
    /// Number of the next message.
    next: Mutex<u64>,
    /// What was left of a connection that ended within a message.
    half: Mutex<Vec<u8>>,
}

impl Peer {
    fn new(at: IpAddr, mistake: Mistake) -> Self {
        let stop = AtomicBool::new(false);
        let (served, half) = (Mutex::default(), Mutex::default());
        Self { at, mistake, stop, served, next: Mutex::new(1), half }
    }

    fn listen<'a>(&'a self, scope: &'a Scope<'a, '_>) {
        let listener = TcpListener::bind(SocketAddr::new(self.at, TCP_PORT)).expect("its address");
        listener.set_nonblocking(true).expect("a socket");
        scope.spawn(move || {
            while !self.stop.load(Relaxed) {
                match listener.accept() {
                    Ok((stream, from)) => {
                        scope.spawn(move || self.accepted(&stream, from.ip()));
                    }
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            }
        });
    }

    fn accepted(&self, stream: &TcpStream, from: IpAddr) {
        stream.set_nonblocking(false).expect("a socket");
        if from > self.at && self.mistake != Mistake::ServesKnock {
            stream.shutdown(Shutdown::Both).expect("it is open");
            let at = SocketAddr::new(from, TCP_PORT);
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
            bind(&socket, &SocketAddr::new(self.at, 0)).expect("its address");
            // The one who knocked may have gone.
            if connect(&socket, &at).is_ok() {
                self.serve(&socket.into());
            }
            return;
        }
        let is_first = {
            let mut served = self.served.lock().expect("whole");
            let is_first = !served.contains(&from);
            served.push(from);
            is_first
        };
        if is_first || self.mistake == Mistake::ServesSecond {
            self.serve(stream);
        }
        let mut served = self.served.lock().expect("whole");
        let at = served.iter().position(|ip| *ip == from).expect("it was put there");
        served.swap_remove(at);
    }

    fn send(&self, mut stream: &TcpStream, header: Header, payload: &[u8]) {
        let ack = if self.mistake == Mistake::Acknowledges { 1 } else { 0 };
        let header = Header { ack, ..header };
        // The other side may have ended the connection.
        let _ = stream.write_all(&[&header.to_bytes(), payload].concat());
    }

    fn number(&self) -> u64 {
        let mut next = self.next.lock().expect("whole");
        *next += u64::from(self.mistake != Mistake::SameNumber);
        *next
    }

    fn handshake(&self) -> [u8; 16] {
        let paths = if self.mistake == Mistake::FourPaths { 4 } else { 8 };
        let mut ext = Handshake { npaths: Some(paths), ..Handshake::default() }.emit();
        if self.mistake == Mistake::TwoExtensions {
            ext[3..8].copy_from_slice(&[1, 0, 0, 3, 1]);
        }
        ext
    }

    fn serve(&self, stream: &TcpStream) {
        stream.set_read_timeout(Some(Duration::from_millis(20))).expect("a socket");
        if self.mistake != Mistake::NoMap {
            let sequence = u64::from(self.mistake == Mistake::MapHasNumber);
            self.send(stream, Header { sequence, ..Header::map() }, &[0; MAP_LEN]);
        }
        if self.mistake != Mistake::NoProbe {
            let (sequence, ext) = (self.number(), self.handshake());
            self.send(stream, Header { sequence, sport: 1, ext, ..Header::default() }, &[]);
        }
        let mut unread = Vec::new();
        if self.mistake == Mistake::KeepsHalf {
            unread.append(&mut self.half.lock().expect("whole"));
        }
        let (mut reader, mut next) = (stream, 0);
        while !self.stop.load(Relaxed) {
            let mut buf = vec![0; 1 << 16];
            match reader.read(&mut buf) {
                Ok(0) => break,
                Ok(got) if got < HEADER_LEN && self.mistake == Mistake::ReadsWholeMessages => break,
                Ok(got) => unread.extend(&buf[..got]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
                Err(_) => {}
            }
            while let Some(raw) = unread.first_chunk::<HEADER_LEN>() {
                let (header, raw) = (Header::from_bytes(raw), *raw);
                if header.len > 1 << 20 && self.mistake == Mistake::LimitsLength {
                    return;
                }
                let whole = HEADER_LEN + header.len as usize;
                if unread.len() < whole {
                    break;
                }
                let payload = unread.drain(..whole).skip(HEADER_LEN).collect::<Vec<_>>();
                if !self.message(stream, &header, &raw, &payload, &mut next) {
                    return;
                }
            }
        }
        self.half.lock().expect("whole").append(&mut unread);
    }

    /// Processes one message; `false` ends the connection.
    fn message(
        &self,
        stream: &TcpStream,
        header: &Header,
        raw: &[u8; HEADER_LEN],
        payload: &[u8],
        next: &mut u64,
    ) -> bool {
        let is = |mistake| self.mistake == mistake;
        if header.is_map() {
            return payload.len() == MAP_LEN || !is(Mistake::RefusesShortMap);
        }
        if header.flags.contains(Flags::CONG_BITMAP) && is(Mistake::RefusesFlaggedMap) {
            return false;
        }
        let is_old = header.flags.contains(Flags::RETRANSMITTED) && header.flags.bits() != 0xf8;
        if header.sequence < *next && (is_old || is(Mistake::DropsLowerNumber)) {
            return true;
        }
        let has_gap = *next > 0 && header.sequence > *next;
        *next = header.sequence + 1;
        let refused = has_gap && is(Mistake::RefusesGap)
            || is(Mistake::LooksAtChecksum) && !checksum_ok(raw)
            || is(Mistake::RefusesFlags) && header.flags.bits() > 7
            || is(Mistake::RefusesExtension) && header.ext[0] == 7
            || is(Mistake::RefusesLongExtension) && header.ext[0] == 1 && header.sport > 1;
        if refused {
            return false;
        }
        match (header.sport, header.dport) {
            (0, 0) => {}
            (1, 0) => {
                let mut extensions = Extensions::new(&header.ext);
                let is_first = matches!(extensions.next(), Some(Extension::NPaths(_)));
                let answers =
                    !is(Mistake::NoProbePong) && (is_first || !is(Mistake::ReadsOneExtension));
                if answers {
                    let (sequence, ext) = (self.number(), self.handshake());
                    self.send(stream, Header { sequence, dport: 1, ext, ..Header::default() }, &[]);
                }
            }
            (port, 0) => {
                let payload = if is(Mistake::EchoesPayload) { payload } else { &[] };
                let (sequence, len) = (self.number(), payload.len() as u32);
                self.send(
                    stream,
                    Header { sequence, dport: port, len, ..Header::default() },
                    payload,
                );
            }
            (0, 1) => {}
            _ => return !is(Mistake::EndsAtUnboundPort),
        }
        true
    }
}

/// Asks a scripted peer with a mistake.
fn ask(test: u8, mistake: Mistake, options: &Options) -> Vec<Finding> {
    let peer = Peer::new(ip(test, 2), mistake);
    thread::scope(|scope| {
        peer.listen(scope);
        let report = ask_rds(ip(test, 2), &[ip(test, 1), ip(test, 3)], options);
        peer.stop.store(true, Relaxed);
        let report = report.expect("it is asked");
        assert_eq!(report.profile, options.profile.unwrap_or(Profile::Linux612));
        report.findings
    })
}

#[test]
fn a_peer_without_a_mistake_keeps_every_rule() {
    let options = Options { patience: PATIENCE, ..Options::default() };
    let findings = ask(2, Mistake::None, &options);
    assert!(deviating(&findings).is_empty(), "{findings:#?}");
    assert!(findings.iter().all(|finding| finding.answer.is_ok()), "{findings:#?}");
    let known: Vec<_> = findings.iter().map(|finding| finding.id).collect();
    let broken = MISTAKES.map(|(_, rule)| rule);
    assert!(
        known.iter().all(|rule| broken.contains(rule)),
        "a rule without its mistake: {known:?}"
    );
}

#[test]
fn each_mistake_is_found_and_captured() {
    let folder = std::env::temp_dir().join(format!("bowline-probe-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("a new folder");
    thread::scope(|scope| {
        for (test, (mistake, rule)) in (10..).zip(MISTAKES) {
            let capture = folder.join(rule);
            std::fs::create_dir(&capture).expect("a new folder");
            scope.spawn(move || {
                let options = Options {
                    patience: IMPATIENCE,
                    rules: vec![rule.to_owned()],
                    capture: Some(capture.clone()),
                    // A 6.12 kernel that knows an address does not ask it either.
                    profile: (mistake == Mistake::NoProbe).then_some(Profile::Linux72),
                };
                let findings = ask(test, mistake, &options);
                assert!(!deviating(&findings).is_empty(), "{mistake:?}: {findings:?}");
                let capture = std::fs::read(capture.join(format!("rds-{rule}.pcap")));
                let capture = capture.expect("a capture");
                assert_eq!(capture[..4], [0xd4, 0xc3, 0xb2, 0xa1], "{mistake:?}");
                assert!(capture.len() > 24 + 16 + 40, "{mistake:?}: {} bytes", capture.len());
            });
        }
    });
    std::fs::remove_dir_all(&folder).expect("the folder");
}
