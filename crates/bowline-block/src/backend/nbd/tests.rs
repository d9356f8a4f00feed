//! The store against the front end of this crate, and against servers that misbehave.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel, sync_channel};

use bowline_verbs::Buffer;

use super::*;
use crate::backend::{BackendSpec, open};
use crate::front::nbd::{self, NbdOptions, NbdServer};
use crate::sync::{self, Durable};
use crate::{BlockDevice, LocalDevice};

/// A folder of one test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("bowline-nbd-store-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn socket(&self) -> PathBuf {
        self.0.join("nbd")
    }

    fn uri(&self, export: &str) -> NbdUri {
        let socket = self.socket().display().to_string();
        format!("nbd+unix:///{export}?socket={socket}").parse().unwrap()
    }

    /// A store of 8 MiB with a cache.
    fn store(&self) -> Arc<dyn Backend> {
        let path = self.0.join("store");
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(8 << 20).unwrap();
        let fd = file.into();
        open(BackendSpec::File { fd, read_only: false, block: 512, direct: false }).unwrap()
    }

    fn serve(&self, backend: Arc<dyn Backend>) -> NbdServer {
        let disk = LocalDevice::new("disk", backend);
        nbd::serve(disk, &self.socket(), NbdOptions::default()).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const TIMES: Times = Times {
    connect: Duration::from_secs(10),
    patience: Duration::from_secs(30),
    silence: Duration::from_secs(30),
    answer: Duration::from_secs(30),
    close: Duration::from_secs(2),
};

fn disk(uri: NbdUri, times: Times) -> Arc<LocalDevice> {
    LocalDevice::new("disk", Arc::new(Nbd::with(uri, false, 512, times).unwrap()))
}

#[test]
fn a_disk_of_an_nbd_server_is_as_its_own() {
    let folder = Folder::new("whole");
    let server = folder.serve(folder.store());
    let disk = disk(folder.uri("disk"), TIMES);
    let limits = disk.limits();
    assert_eq!((limits.bytes, limits.logical, limits.max_io), (8 << 20, 512, 32 << 20));
    assert!(limits.write_cache && limits.fua && !limits.read_only);
    assert!(limits.discard.is_some() && limits.max_write_zeroes > 0);
    let data: Vec<u8> = (0..3 << 20).map(|n: u32| (n.wrapping_mul(31) ^ (n >> 8)) as u8).collect();
    sync::write_at(&*disk, 1 << 20, &data, Durable::Later).unwrap();
    sync::flush(&*disk).unwrap();
    sync::write_zeroes(&*disk, 2 << 20, 4096).unwrap();
    sync::discard(&*disk, 3 << 20, 4096).unwrap();
    sync::write_at(&*disk, 512, &[5; 512], Durable::Now).unwrap();
    let mut wanted = data;
    wanted[1 << 20..][..4096].fill(0);
    wanted[2 << 20..][..4096].fill(0);
    let mut out = vec![1; 3 << 20];
    sync::read_at(&*disk, 1 << 20, &mut out).unwrap();
    assert!(out == wanted);
    // Beyond the end nothing is asked of the server.
    let beyond = sync::write_at(&*disk, 8 << 20, &[0; 512], Durable::Later);
    assert_eq!(beyond, Err(Errno::EIO));
    drop(disk);
    drop(server);
}

/// A callback, and what it is called with.
fn answers() -> (Arc<dyn BackendDone>, Receiver<BackendResult>) {
    struct Answers(Mutex<mpsc::Sender<BackendResult>>);
    impl BackendDone for Answers {
        fn done(&self, results: &[BackendResult]) {
            let sender = self.0.lock().unwrap();
            results.iter().for_each(|result| sender.send(*result).unwrap());
        }
    }
    let (sender, results) = channel();
    (Arc::new(Answers(Mutex::new(sender))), results)
}

#[test]
fn many_requests_are_in_flight_and_long_ones_are_split() {
    let folder = Folder::new("many");
    let bytes = 48_u32 << 20;
    let memory = open(BackendSpec::Memory { bytes: bytes.into(), block: 512 }).unwrap();
    let _server = folder.serve(memory);
    let nbd = Nbd::with(folder.uri(""), false, 512, TIMES).unwrap();
    let (done, results) = answers();
    let buffer = Arc::new(Buffer::new(bytes as usize).unwrap());
    let io = |token: u64, op, offset: u32, len: u32| {
        let (buffer, at) = (Arc::clone(&buffer), offset as usize);
        let mem = Some(Mem { buffer, offset: at, len: len as usize });
        BackendIo { mem, ..BackendIo::new(token, op, offset.into(), len) }
    };
    let all = |requests: &mut Vec<BackendIo>| {
        let mut tokens: Vec<u64> = requests.iter().map(|io| io.token).collect();
        nbd.submit(requests, &done);
        let mut ended: Vec<u64> = tokens
            .iter()
            .map(|_| {
                let result = results.recv_timeout(Duration::from_secs(60)).unwrap();
                assert_eq!((result.errno, result.direct), (0, None));
                result.token
            })
            .collect();
        ended.sort_unstable();
        tokens.sort_unstable();
        assert_eq!(ended, tokens);
    };
    let places = || (0..bytes).step_by(96 << 10);
    for at in places() {
        buffer.write(at as usize, &at.to_le_bytes());
    }
    all(&mut places().map(|at| io(at.into(), IoOp::Write, at, 96 << 10)).collect());
    buffer.clear(0, bytes as usize);
    // More than the server takes at once.
    all(&mut vec![io(1, IoOp::Read, 0, bytes)]);
    for at in places() {
        let mut found = [0; 4];
        buffer.read(at as usize, &mut found);
        assert_eq!(found, at.to_le_bytes());
    }
}

#[test]
fn requests_wait_for_a_server_that_is_started_again() {
    // tests [NB-77]
    let folder = Folder::new("again");
    let server = folder.serve(folder.store());
    let disk = disk(folder.uri(""), TIMES);
    sync::write_at(&*disk, 0, &[1; 512], Durable::Later).unwrap();
    sync::flush(&*disk).unwrap();
    drop(server);
    let writer = Arc::clone(&disk);
    let written = thread::spawn(move || sync::write_at(&*writer, 512, &[2; 512], Durable::Now));
    thread::sleep(Duration::from_millis(300));
    assert!(!written.is_finished());
    let server = folder.serve(folder.store());
    assert_eq!(written.join().unwrap(), Ok(()));
    // All was durable when the server went, so nothing was lost.
    assert_eq!(sync::flush(&*disk), Ok(()));
    let mut out = [0; 1024];
    sync::read_at(&*disk, 0, &mut out).unwrap();
    assert_eq!((out[0], out[512]), (1, 2));

    // What was written since is perhaps lost with the server: that is said, once.
    sync::write_at(&*disk, 1024, &[3; 512], Durable::Later).unwrap();
    drop(server);
    let _server = folder.serve(folder.store());
    assert_eq!(sync::flush(&*disk), Err(Errno::EIO));
    assert_eq!(sync::flush(&*disk), Ok(()));
}

#[test]
fn a_server_that_stays_away_fails_requests_until_it_is_back() {
    // tests [NB-77]
    let folder = Folder::new("away");
    let server = folder.serve(folder.store());
    let disk = disk(folder.uri(""), Times { patience: Duration::from_millis(200), ..TIMES });
    drop(server);
    let mut out = [0; 512];
    assert_eq!(sync::read_at(&*disk, 0, &mut out), Err(Errno::ENOLINK));
    let began = Instant::now();
    assert_eq!(sync::read_at(&*disk, 0, &mut out), Err(Errno::ENOLINK));
    assert!(began.elapsed() < TIMES.patience);
    let _server = folder.serve(folder.store());
    let began = Instant::now();
    while sync::read_at(&*disk, 0, &mut out) != Ok(()) {
        assert!(began.elapsed() < Duration::from_secs(60), "it does not come back");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A server that is right up to the first request, of which it has simple replies; `serve` gets
/// each connection, and its number.
fn scripted(folder: &Folder, mut serve: impl FnMut(&mut UnixStream, usize) + Send + 'static) {
    let listener = UnixListener::bind(folder.socket()).unwrap();
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
            stream.read_exact(&mut [0; 4 + 16]).unwrap();
            let reply = |option: u32, kind: u32, data: &[u8]| {
                let len = data.len() as u32;
                let numbers = [option, kind, len].map(u32::to_be_bytes).concat();
                [&wire::OPTION_REPLY.to_be_bytes()[..], &numbers, data].concat()
            };
            stream.write_all(&reply(8, wire::REP_ERR_UNSUP, b"")).unwrap();
            // An option with a name of no bytes, and one wish.
            stream.read_exact(&mut [0; 16 + 8]).unwrap();
            let flags = wire::HAS_FLAGS | wire::SEND_FLUSH;
            let export = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat();
            stream.write_all(&reply(7, wire::REP_INFO, &export)).unwrap();
            stream.write_all(&reply(7, wire::REP_ACK, b"")).unwrap();
            serve(&mut stream, number);
        }
    });
}

/// Reads a request without data; returns its cookie.
fn request_of(stream: &mut UnixStream) -> Option<[u8; 8]> {
    let mut request = [0; 28];
    stream.read_exact(&mut request).ok()?;
    request[8..16].try_into().ok()
}

fn simple(error: u32, cookie: [u8; 8]) -> Vec<u8> {
    [&wire::SIMPLE_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie].concat()
}

fn count(numbers: &Receiver<usize>) -> usize {
    numbers.try_iter().count()
}

#[test]
fn a_server_that_answers_nothing_is_left_and_asked_nothing_twice() {
    // tests [NB-77]
    let folder = Folder::new("silent");
    let (sender, numbers) = channel();
    scripted(&folder, move |stream, number| {
        while let Some(cookie) = request_of(stream) {
            sender.send(number).unwrap();
            if number > 0 {
                stream.write_all(&simple(0, cookie)).unwrap();
            }
        }
    });
    let disk = disk(folder.uri(""), Times { silence: Duration::from_millis(100), ..TIMES });
    assert_eq!(sync::flush(&*disk), Err(Errno::ETIMEDOUT));
    assert_eq!(count(&numbers), 1);
    assert_eq!(sync::flush(&*disk), Ok(()));
}

/// What clients learned first stays true: also that nothing waits for a flush, of which they send
/// none.
// tests [NB-77]
#[test]
fn a_server_that_comes_back_has_what_the_former_one_had() {
    let export = |bytes, flags| Export {
        bytes,
        flags: wire::HAS_FLAGS | flags,
        min_block: 1,
        preferred_block: 4096,
        max_payload: 1 << 20,
        is_structured: false,
    };
    let keeps = |before, now| keeps_promises(&now, &limits(&before, false, 512).unwrap());
    let cached = export(1 << 20, wire::SEND_FLUSH);
    assert!(keeps(export(1 << 20, wire::SEND_FLUSH), cached));
    assert!(keeps(export(1 << 20, 0), export(2 << 20, wire::SEND_TRIM)));
    for (before, now) in [
        (export(1 << 20, 0), export((1 << 20) - 512, 0)),
        (export(1 << 20, 0), export(1 << 20, wire::SEND_FLUSH)),
        (export(1 << 20, wire::SEND_FLUSH), export(1 << 20, 0)),
        (export(1 << 20, wire::SEND_TRIM), export(1 << 20, 0)),
        (export(1 << 20, 0), export(1 << 20, wire::READ_ONLY)),
    ] {
        assert!(!keeps(before, now));
    }
}

#[test]
fn a_server_that_breaks_the_rules_again_and_again_fails_what_it_was_asked() {
    let folder = Folder::new("wrong");
    let (sender, numbers) = channel();
    scripted(&folder, move |stream, number| {
        if let Some(mut cookie) = request_of(stream) {
            sender.send(number).unwrap();
            cookie[0] ^= 1;
            stream.write_all(&simple(0, cookie)).unwrap();
            // Until the client leaves.
            let _ = stream.read(&mut [0]);
        }
    });
    let disk = disk(folder.uri(""), TIMES);
    assert_eq!(sync::flush(&*disk), Err(Errno::EIO));
    assert_eq!(count(&numbers), 4);
}

#[test]
fn a_server_that_shuts_down_leaves_requests_to_the_next_one() {
    let folder = Folder::new("shutdown");
    scripted(&folder, move |stream, number| {
        while let Some(cookie) = request_of(stream) {
            let error = if number == 0 { wire::ESHUTDOWN } else { 0 };
            stream.write_all(&simple(error, cookie)).unwrap();
        }
    });
    assert_eq!(sync::flush(&*disk(folder.uri(""), TIMES)), Ok(()));
}

#[test]
fn what_no_server_has_answered_fails_at_the_end() {
    let folder = Folder::new("end");
    let (sender, asked) = channel();
    scripted(&folder, move |stream, _| {
        while request_of(stream).is_some() {
            sender.send(()).unwrap();
        }
    });
    let nbd = Nbd::with(folder.uri(""), false, 512, TIMES).unwrap();
    let (done, results) = answers();
    nbd.submit(&mut vec![BackendIo::new(7, IoOp::Flush, 0, 0)], &done);
    asked.recv_timeout(Duration::from_secs(60)).unwrap();
    let began = Instant::now();
    drop(nbd);
    assert!(began.elapsed() < TIMES.silence);
    let result = results.try_recv().unwrap();
    assert_eq!((result.token, result.errno), (7, Errno::EIO.neg()));
}

/// A request as a server gets it.
#[derive(Debug)]
struct Got {
    command: u16,
    cookie: [u8; 8],
    len: usize,
}

/// Reads the header of a request.
fn header_of(stream: &mut UnixStream) -> Option<Got> {
    let mut bytes = [0; 28];
    stream.read_exact(&mut bytes).ok()?;
    let number = |at: usize| bytes[at..at + 4].try_into().map(u32::from_be_bytes).unwrap();
    let cookie = bytes[8..16].try_into().unwrap();
    Some(Got { command: number(4) as u16, cookie, len: number(24) as usize })
}

/// Reads a request with its data.
fn whole_of(stream: &mut UnixStream) -> Option<Got> {
    let got = header_of(stream)?;
    if got.command == wire::CMD_WRITE {
        stream.read_exact(&mut vec![0; got.len]).ok()?;
    }
    Some(got)
}

/// Answers a request as one that has succeeded.
fn answer(stream: &mut UnixStream, got: &Got) {
    let data = if got.command == wire::CMD_READ { got.len } else { 0 };
    stream.write_all(&[simple(0, got.cookie), vec![7; data]].concat()).unwrap();
}

const LIMIT: Duration = Duration::from_secs(60);

/// A store, and what its requests are answered.
struct Asked {
    nbd: Nbd,
    done: Arc<dyn BackendDone>,
    results: Receiver<BackendResult>,
    buffer: Arc<Buffer>,
}

impl Asked {
    fn new(folder: &Folder, times: Times) -> Self {
        let nbd = Nbd::with(folder.uri(""), false, 512, times).unwrap();
        let (done, results) = answers();
        Self { nbd, done, results, buffer: Arc::new(Buffer::new(1 << 20).unwrap()) }
    }

    fn io(&self, token: u64, op: IoOp, len: u32) -> BackendIo {
        let mem = Mem { buffer: Arc::clone(&self.buffer), offset: 0, len: len as usize };
        BackendIo { mem: op.has_data().then_some(mem), ..BackendIo::new(token, op, 0, len) }
    }

    fn submit(&self, io: BackendIo) {
        self.nbd.submit(&mut vec![io], &self.done);
    }

    /// Returns token and errno of the next result.
    fn next(&self) -> (u64, i32) {
        let result = self.results.recv_timeout(LIMIT).unwrap();
        (result.token, result.errno)
    }

    fn call(&self, user: u64, op: IoOp, len: u32) -> i32 {
        self.submit(BackendIo { user, ..self.io(0, op, len) });
        self.next().1
    }
}

#[test]
fn each_user_whose_changes_may_be_lost_learns_of_it() {
    // tests [NB-77]
    let folder = Folder::new("users");
    let server = folder.serve(folder.store());
    let asked = Asked::new(&folder, TIMES);
    for user in 1..=3 {
        assert_eq!(asked.call(user, IoOp::Write, 512), 0);
    }
    drop(server);
    let _server = folder.serve(folder.store());
    assert_eq!(asked.call(4, IoOp::Flush, 0), Errno::EIO.neg());
    for user in 1..=3 {
        assert_eq!(asked.call(user, IoOp::Flush, 0), Errno::EIO.neg(), "user {user}");
        assert_eq!(asked.call(user, IoOp::Flush, 0), 0, "user {user}");
    }
    assert_eq!(asked.call(4, IoOp::Flush, 0), 0);
    let notices = asked.nbd.take_notices();
    assert!(notices.iter().any(|text| text.contains("connected again")), "{notices:?}");
}

#[test]
fn a_store_that_is_closed_flushes_before_it_takes_leave() {
    // tests [NB-77]
    let folder = Folder::new("leave");
    let (sender, commands) = channel();
    scripted(&folder, move |stream, _| {
        while let Some(got) = whole_of(stream) {
            sender.send(got.command).unwrap();
            if got.command != wire::CMD_DISC {
                answer(stream, &got);
            }
        }
    });
    let asked = Asked::new(&folder, TIMES);
    assert_eq!(asked.call(0, IoOp::Write, 512), 0);
    asked.nbd.close().unwrap();
    let got = || commands.recv_timeout(LIMIT).unwrap();
    assert_eq!([got(), got(), got()], [wire::CMD_WRITE, wire::CMD_FLUSH, wire::CMD_DISC]);
    assert_eq!(asked.call(0, IoOp::Flush, 0), Errno::ENOLINK.neg());
    // What is durable needs no flush.
    let asked = Asked::new(&folder, TIMES);
    assert_eq!(asked.call(0, IoOp::Read, 512), 0);
    drop(asked);
    assert_eq!([got(), got()], [wire::CMD_READ, wire::CMD_DISC]);
}

#[test]
fn the_end_does_not_wait_for_a_server_that_does_not_answer() {
    // tests [NB-77]
    let folder = Folder::new("stuck");
    scripted(&folder, |stream, _| {
        while let Some(got) = whole_of(stream) {
            if got.command == wire::CMD_WRITE {
                answer(stream, &got);
            }
        }
    });
    let asked = Asked::new(&folder, Times { close: Duration::from_millis(700), ..TIMES });
    assert_eq!(asked.call(0, IoOp::Write, 512), 0);
    asked.submit(asked.io(1, IoOp::Read, 512));
    let began = Instant::now();
    asked.nbd.begin_close();
    assert_eq!(asked.next(), (1, Errno::ETIMEDOUT.neg()));
    let error = asked.nbd.close();
    assert!(began.elapsed() < TIMES.silence);
    // The change has been lost sight of.
    assert!(error.is_err() || asked.nbd.shared.lock().is_given_up, "{error:?}");
}

#[test]
fn one_request_that_is_never_answered_ends_whatever_else_is() {
    // tests [NB-77]
    let folder = Folder::new("never");
    scripted(&folder, |stream, number| {
        let mut is_first = number == 0;
        while let Some(got) = whole_of(stream) {
            if !std::mem::take(&mut is_first) {
                answer(stream, &got);
            }
        }
    });
    let asked = Asked::new(&folder, Times { answer: Duration::from_millis(600), ..TIMES });
    asked.submit(asked.io(1, IoOp::Write, 512));
    let began = Instant::now();
    loop {
        asked.submit(asked.io(2, IoOp::Read, 512));
        match asked.next() {
            (1, errno) => break assert_eq!(errno, Errno::ETIMEDOUT.neg()),
            (_, errno) => assert!(errno == 0 || errno == Errno::ETIMEDOUT.neg()),
        }
        assert!(began.elapsed() < LIMIT, "it waits for ever");
    }
}

/// Starts a server that breaks the protocol, or closes the connection, when it has a request of the
/// first connection; returns the commands it gets on each.
fn cuts(folder: &Folder, breaks: bool) -> Receiver<(usize, u16)> {
    let (sender, commands) = channel();
    scripted(folder, move |stream, number| {
        while let Some(got) = whole_of(stream) {
            sender.send((number, got.command)).unwrap();
            match (number, breaks) {
                (0, true) => stream.write_all(&simple(0, [9; 8])).unwrap(),
                (0, false) => return,
                _ => answer(stream, &got),
            }
        }
    });
    commands
}

#[test]
fn a_change_is_sent_again_only_if_its_connection_was_ended_by_the_server() {
    // tests [NB-77]
    let folder = Folder::new("closed");
    let commands = cuts(&folder, false);
    assert_eq!(Asked::new(&folder, TIMES).call(0, IoOp::Write, 512), 0);
    let got: Vec<_> = commands.iter().take(2).collect();
    assert_eq!(got, [(0, wire::CMD_WRITE), (1, wire::CMD_WRITE)]);

    // This server may execute it still.
    let folder = Folder::new("broken");
    let commands = cuts(&folder, true);
    let asked = Asked::new(&folder, TIMES);
    assert_eq!(asked.call(0, IoOp::Write, 512), Errno::EIO.neg());
    assert_eq!(asked.call(0, IoOp::Read, 512), 0);
    let got: Vec<_> = commands.iter().take(2).collect();
    assert_eq!(got, [(0, wire::CMD_WRITE), (1, wire::CMD_READ)]);
    let notices = asked.nbd.take_notices();
    assert!(notices[0].contains("protocol (1 times)"), "{notices:?}");

    let folder = Folder::new("broken-read");
    let commands = cuts(&folder, true);
    assert_eq!(Asked::new(&folder, TIMES).call(0, IoOp::Read, 512), 0);
    assert_eq!(commands.iter().take(2).count(), 2);
}

/// A machine that acknowledges nothing may be there still, behind a network that is cut.
#[test]
fn what_a_network_has_cut_may_have_arrived() {
    // tests [NB-77]
    let from_system = |errno: Errno| cut(&io::Error::from_raw_os_error(errno.0));
    assert_eq!(from_system(Errno::ETIMEDOUT), Cut::Unknown);
    assert_eq!(from_system(Errno(113)), Cut::Unknown, "EHOSTUNREACH");
    assert_eq!(from_system(Errno(104)), Cut::ByServer, "ECONNRESET");
    assert_eq!(cut(&ErrorKind::UnexpectedEof.into()), Cut::ByServer);
    assert_eq!(cut(&ErrorKind::TimedOut.into()), Cut::Silent);
}

#[test]
fn a_server_that_shuts_down_still_answers_what_it_has() {
    // tests [NB-77]
    let folder = Folder::new("answers");
    let (sender, commands) = channel();
    scripted(&folder, move |stream, number| {
        let mut held = Vec::new();
        while let Some(got) = whole_of(stream) {
            sender.send((number, got.command)).unwrap();
            if number > 0 {
                answer(stream, &got);
                continue;
            }
            held.push(got);
            if let [read, write] = &held[..] {
                stream.write_all(&simple(wire::ESHUTDOWN, read.cookie)).unwrap();
                // The other one is executed until then.
                answer(stream, write);
            }
        }
    });
    let asked = Asked::new(&folder, TIMES);
    let (read, write) = (asked.io(1, IoOp::Read, 512), asked.io(2, IoOp::Write, 512));
    asked.nbd.submit(&mut vec![read, write], &asked.done);
    assert_eq!([asked.next(), asked.next()], [(2, 0), (1, 0)]);
    let got: Vec<_> = commands.try_iter().collect();
    assert_eq!(got, [(0, wire::CMD_READ), (0, wire::CMD_WRITE), (1, wire::CMD_READ)]);
}

/// The memory of a request is another one's when it has been answered, while the store still sends
/// it to this server.
#[test]
fn a_write_that_is_answered_early_ends_when_its_data_is_sent() {
    let folder = Folder::new("early");
    let (go, goes) = sync_channel::<()>(0);
    let (sender, data) = channel();
    scripted(&folder, move |stream, number| {
        let (Some(read), Some(write)) = (whole_of(stream), header_of(stream)) else { return };
        stream.write_all(&simple(0, write.cookie)).unwrap();
        if number == 0 {
            answer(stream, &read);
        }
        goes.recv().unwrap();
        let mut bytes = vec![0; write.len];
        stream.read_exact(&mut bytes).unwrap();
        sender.send(bytes).unwrap();
        // Until the client leaves.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let asked = Asked::new(&folder, TIMES);
    asked.buffer.write(0, &[3; 1 << 20]);
    let other = Arc::new(Buffer::new(512).unwrap());
    let mem = Some(Mem { buffer: other, offset: 0, len: 512 });
    let read = BackendIo { mem, ..BackendIo::new(1, IoOp::Read, 0, 512) };
    let write = asked.io(2, IoOp::Write, 1 << 20);
    asked.nbd.submit(&mut vec![read, write], &asked.done);
    assert_eq!(asked.next(), (1, 0));
    // The answer to the write came before that to the read.
    assert!(asked.results.try_recv().is_err(), "its memory is still read");
    go.send(()).unwrap();
    assert_eq!(asked.next(), (2, 0));
    asked.buffer.write(0, &[4; 1 << 20]);
    assert!(data.recv_timeout(LIMIT).unwrap().iter().all(|byte| *byte == 3));
}

/// The last user of a store may go when it is answered, by whichever thread.
#[test]
fn a_store_may_be_dropped_by_who_is_answered() {
    struct Last(Mutex<Option<Nbd>>, Mutex<mpsc::Sender<()>>);
    impl BackendDone for Last {
        fn done(&self, _: &[BackendResult]) {
            drop(lock(&self.0).take());
            lock(&self.1).send(()).unwrap();
        }
    }
    for is_early in [true, false] {
        let folder = Folder::new(if is_early { "drops-early" } else { "drops" });
        let (go, goes) = sync_channel::<()>(0);
        scripted(&folder, move |stream, _| {
            let (Some(read), Some(write)) = (whole_of(stream), header_of(stream)) else { return };
            if is_early {
                stream.write_all(&simple(0, write.cookie)).unwrap();
            }
            answer(stream, &read);
            goes.recv().unwrap();
            stream.read_exact(&mut vec![0; write.len]).unwrap();
            if !is_early {
                answer(stream, &write);
            }
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let asked = Asked::new(&folder, TIMES);
        let (sender, gone) = channel();
        let last = Arc::new(Last(Mutex::default(), Mutex::new(sender)));
        let done: Arc<dyn BackendDone> = last.clone();
        asked.submit(asked.io(1, IoOp::Read, 512));
        asked.nbd.submit(&mut vec![asked.io(2, IoOp::Write, 1 << 20)], &done);
        assert_eq!(asked.next(), (1, 0));
        // The early answer is there, and the write is still being sent.
        *lock(&last.0) = Some(asked.nbd);
        go.send(()).unwrap();
        gone.recv_timeout(LIMIT).unwrap();
    }
}

#[test]
fn a_write_that_is_answered_twice_costs_the_connection() {
    let folder = Folder::new("twice");
    let (_stays, ended) = channel::<()>();
    scripted(&folder, move |stream, _| {
        let Some(write) = header_of(stream) else { return };
        stream.write_all(&simple(0, write.cookie).repeat(2)).unwrap();
        // It takes no data, until the test ends.
        let _ = ended.recv();
    });
    let asked = Asked::new(&folder, TIMES);
    assert_eq!(asked.call(0, IoOp::Write, 1 << 20), Errno::EIO.neg());
    assert!(asked.nbd.take_notices()[0].contains("protocol (1 times)"));
}

#[test]
fn servers_that_have_no_such_export_or_are_not_there_say_so() {
    let folder = Folder::new("none");
    let failed = |uri: NbdUri| open(BackendSpec::Nbd { uri, read_only: false, block: 512 });
    let kind = |uri| failed(uri).err().map(|error| error.kind());
    assert_eq!(kind(folder.uri("")), Some(ErrorKind::NotFound));
    let _server = folder.serve(folder.store());
    let error = failed(folder.uri("other")).err().unwrap().to_string();
    assert!(error.contains("no export \"other\""), "{error}");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    drop(listener);
    let uri = format!("nbd://{place}/").parse().unwrap();
    assert_eq!(kind(uri), Some(ErrorKind::ConnectionRefused));
}
