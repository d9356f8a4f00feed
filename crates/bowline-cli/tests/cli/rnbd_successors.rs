//! Processes that serve disks and are replaced, while one of both dies or hangs at each step: the
//! test is the other one.

use std::{
    fs,
    io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::disk_clients::{
    BLOCK, Nbd, PATIENCE, READ, Shared, end, export, header, map, while_written, with_fuse,
};
use crate::support::{Folder, Running, start_as};

/// Version of what the two processes say.
const FORMAT: u32 = 5;

/// What a process hands over.
struct Parcel {
    state: Vec<u8>,
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// A process that wants to replace another one, played by the test.
pub(crate) struct Successor(UnixStream);

impl Successor {
    /// Connects to a process, and says nothing.
    pub(crate) fn connect(folder: &Folder, process: &Running) -> Self {
        Self::connect_to("map", folder, process)
    }

    fn connect_to(word: &str, folder: &Folder, process: &Running) -> Self {
        let place = format!("bowline/rnbd/{word}-{}.sock", process.id());
        let stream = UnixStream::connect(folder.path().join(place)).expect("a control socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        Self(stream)
    }

    /// Asks for the place of a process, which agrees.
    pub(crate) fn ask(
        &mut self,
        host: u8,
        nbd: Option<&Path>,
        fuse: Option<&Path>,
        ready_within: Duration,
    ) {
        self.ask_with(host, nbd, fuse, None, ready_within);
    }

    /// As [`ask`](Self::ask), of a process that serves machines, too.
    fn ask_with(
        &mut self,
        host: u8,
        nbd: Option<&Path>,
        fuse: Option<&Path>,
        machines: Option<&Path>,
        ready_within: Duration,
    ) {
        let service = serde_json::json!({ "map": {
            "device": "disk0", "session": "s1", "servers": [format!("127.75.{host}.1")],
            "front_ends": { "nbd": nbd, "fuse": fuse, "ublk": false, "vhost-user": machines },
        }});
        self.ask_for(&service, ready_within);
    }

    fn ask_for(&mut self, service: &serde_json::Value, ready_within: Duration) {
        let wants = serde_json::json!({
            "format": FORMAT, "service": service, "has_manager": false,
            "ready_within_ms": ready_within.as_millis() as u64,
        });
        let ask = serde_json::json!({
            "version": 1, "op": "replace", "path": "/", "value": wants.to_string(),
        });
        writeln!(self.0, "{ask}").expect("asked");
        let mut answer = [0; 12];
        self.0.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"{\"ok\":null}\n");
    }

    fn begin(&mut self) {
        self.0.write_all(b"B").expect("begun");
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.0.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    fn bytes(&mut self) -> Vec<u8> {
        let mut len = [0; 8];
        self.0.read_exact(&mut len).expect("a length");
        let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
        self.0.read_exact(&mut bytes).expect("bytes");
        bytes
    }

    /// Takes everything.
    fn take(&mut self) -> Parcel {
        self.begin();
        assert_eq!(self.byte().expect("an answer"), b'T');
        let (state, bytes) = (self.bytes(), self.bytes());
        let mut count = [0; 4];
        self.0.read_exact(&mut count).expect("a count");
        let count = u32::from_le_bytes(count);
        let descriptors = (0..count).map(|_| receive_descriptor(&self.0)).collect();
        assert_eq!(self.byte().expect("an answer"), b'F');
        Parcel { state, bytes, descriptors }
    }

    /// Takes everything, and is not ready yet.
    pub(crate) fn take_all(&mut self) {
        drop(self.take());
    }

    /// Is ready, and returns what the other one says to that.
    pub(crate) fn ready(&mut self) -> u8 {
        self.0.write_all(b"R").expect("ready");
        self.byte().expect("an answer")
    }
}

fn receive_descriptor(from: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut pieces = [IoSliceMut::new(&mut byte)];
    recvmsg(from, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC).expect("a descriptor");
    let found = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    found.expect("a descriptor")
}

/// A process that is replaced, played by the test.
struct Predecessor {
    stream: UnixStream,
}

impl Predecessor {
    /// Waits to be asked, and hands a parcel over.
    fn hand_over(
        folder: &Folder,
        parcel: &Parcel,
        start: impl FnOnce() -> Running,
    ) -> (Self, Running) {
        // The number of no other process here.
        let place = folder.path().join("bowline/rnbd/map-1.sock");
        let listener = UnixListener::bind(&place).expect("a control socket");
        let next = start();
        let (mut stream, _) = listener.accept().expect("asked");
        fs::remove_file(&place).expect("removed");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).expect("a line");
        assert!(line.contains("\"replace\""), "{line}");
        stream.write_all(b"{\"ok\":null}\n").expect("agreed");
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("begun");
        assert_eq!(&byte, b"B");
        stream.write_all(b"T").expect("sent");
        for bytes in [&parcel.state, &parcel.bytes] {
            stream.write_all(&(bytes.len() as u64).to_le_bytes()).expect("sent");
            stream.write_all(bytes).expect("sent");
        }
        stream.write_all(&(parcel.descriptors.len() as u32).to_le_bytes()).expect("sent");
        for one in &parcel.descriptors {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [one.as_fd()];
            control.push(SendAncillaryMessage::ScmRights(&fds));
            let sent = sendmsg(&stream, &[IoSlice::new(b"T")], &mut control, SendFlags::NOSIGNAL);
            sent.expect("sent");
        }
        stream.write_all(b"F").expect("sent");
        (Self { stream }, next)
    }

    fn until_ready(&mut self) {
        let mut byte = [0];
        self.stream.read_exact(&mut byte).expect("a word");
        assert_eq!(&byte, b"R");
    }

    fn says(&mut self, word: &[u8]) {
        self.stream.write_all(word).expect("said");
    }

    fn until_it_is_gone(mut self) {
        assert_eq!(self.stream.read(&mut [0]).unwrap_or(0), 0, "the other end is closed");
    }
}

/// Sends a request to read a block.
fn ask(nbd: &mut Nbd, cookie: u64) {
    nbd.0.write_all(&header(READ, cookie, 0, BLOCK)).expect("asked");
}

/// Takes the answer to it, and checks that there is one only.
fn answered(nbd: &mut Nbd, cookie: u64) {
    assert_eq!(nbd.reply(), cookie);
    nbd.0.read_exact(&mut vec![0; BLOCK]).expect("data");
    is_silent(nbd);
}

fn is_silent(nbd: &mut Nbd) {
    nbd.0.set_read_timeout(Some(Duration::from_millis(20))).expect("a limit");
    let nothing = nbd.0.read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(nothing, Err(io::ErrorKind::WouldBlock));
    nbd.0.set_read_timeout(Some(PATIENCE)).expect("a limit");
}

/// A disk at a socket.
fn mapped(folder: &Folder, host: u8) -> (Running, Running, PathBuf, PathBuf) {
    let (server, image) = export(folder, host, &[]);
    let place = folder.path().join("nbd.sock");
    let mut client = map(folder, host, &["--nbd", place.to_str().expect("a plain path")]);
    client.expect("mapped disk0 ");
    (server, client, place, image)
}

/// When a successor dies, or hangs.
#[derive(Clone, Copy, Debug)]
enum Step {
    Agreed,
    Begun,
    HalfTaken,
    Taken,
    /// It is not ready in time.
    Late,
}

#[test]
fn a_process_continues_when_its_successor_dies_at_any_step() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, client, place, image) = mapped(&folder, 20);
    let mut count = 0;
    for step in [Step::Agreed, Step::Begun, Step::HalfTaken, Step::Taken, Step::Late] {
        while_written(&place, &image, |shared| {
            let mut next = Successor::connect(&folder, &client);
            let limit = if matches!(step, Step::Late) { 200 } else { 60_000 };
            next.ask(20, Some(&place), None, Duration::from_millis(limit));
            match step {
                Step::Agreed => {}
                Step::Begun => next.begin(),
                Step::HalfTaken => {
                    next.begin();
                    next.0.read_exact(&mut [0; 20]).expect("what it has");
                }
                Step::Taken => next.take_all(),
                Step::Late => {
                    next.take_all();
                    assert_eq!(next.byte().expect("an answer"), b'N', "nobody may begin now");
                }
            }
            drop(next);
            if !matches!(step, Step::Agreed) {
                count += 1;
                let until = Instant::now() + PATIENCE;
                while client.log().matches("this one does").count() < count {
                    assert!(Instant::now() < until, "{step:?}: {}", client.log());
                    thread::sleep(Duration::from_millis(5));
                }
            }
            shared.advance();
        });
    }
    end(client);
    end(server);
    assert!(!place.exists());
}

/// What the successor has opened may be busy for longer than the successor lives.
#[test]
fn what_can_be_taken_back_is_served_and_the_rest_once_it_is_free() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 42, &[]);
    let [place, machines] = ["nbd.sock", "machines.sock"].map(|name| folder.path().join(name));
    let text = |path: &Path| path.to_str().expect("a plain path").to_owned();
    let doors = ["--nbd", &text(&place), "--vhost-user", &text(&machines)];
    let missing = format!("rnbd0: not taken back: vhost-user {}", machines.display());
    let take = |client: &Running| {
        let mut next = Successor::connect(&folder, client);
        next.ask_with(42, Some(&place), None, Some(&machines), PATIENCE);
        next.take_all();
        UnixListener::bind(&machines).expect("the former process listens no longer")
    };
    let mut client = map(&folder, 42, &doors);
    client.expect("mapped disk0 ");
    while_written(&place, &image, |shared| {
        let busy = take(&client);
        client.until_logged(&missing);
        shared.advance();
        let refused = map(&folder, 42, &[&doors[..], &["--replace"]].concat()).finish().exits(1);
        refused.complains(&["tries to take front ends back"]);
        drop(busy);
        client.until_logged("rnbd0: taken back: vhost-user ");
        shared.advance();
    });
    UnixStream::connect(&machines).expect("machines are served");
    // One that does not come back is named at the end.
    let busy = take(&client);
    while_written(&place, &image, Shared::advance);
    client.signal("-TERM");
    let done = client.finish().exits(1);
    assert!(done.err.contains("not everything was served"), "{done:?}");
    // After each of the two replacements, and at the end.
    assert_eq!(done.err.matches(&missing).count(), 3, "{done:?}");
    assert!(!place.exists());
    drop(busy);
    end(server);
}

#[test]
fn a_process_that_let_its_successor_begin_leaves_all_to_it() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, client, place, _) = mapped(&folder, 21);
    let mut nbd = Nbd::connect(&place).expect("connected");
    let mut next = Successor::connect(&folder, &client);
    next.ask(21, Some(&place), None, PATIENCE);
    let parcel = next.take();
    ask(&mut nbd, 1);
    assert_eq!(next.ready(), b'G');
    // It dies only now.
    drop(next);
    let done = client.finish().exits(0);
    assert!(done.out.contains("handed over\n"), "{done:?}");
    assert!(!done.err.contains("this one does"), "{done:?}");
    assert!(place.exists());
    is_silent(&mut nbd);
    // The last process has it all.
    let doors = ["--nbd", place.to_str().expect("a plain path"), "--replace"];
    let (mut former, mut last) =
        Predecessor::hand_over(&folder, &parcel, || map(&folder, 21, &doors));
    drop(parcel);
    former.until_ready();
    former.says(b"G");
    last.expect("mapped disk0 ");
    answered(&mut nbd, 1);
    end(last);
    end(server);
    assert!(!place.exists());
}

#[test]
fn a_successor_begins_when_it_may_and_touches_nothing_before() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, client, place, _) = mapped(&folder, 22);
    let mut nbd = Nbd::connect(&place).expect("connected");
    let mut first = Successor::connect(&folder, &client);
    first.ask(22, Some(&place), None, PATIENCE);
    let mut parcel = first.take();
    assert_eq!(first.ready(), b'G');
    client.finish().exits(0);
    ask(&mut nbd, 1);
    let doors = ["--nbd", place.to_str().expect("a plain path"), "--replace"];
    let start = || map(&folder, 22, &doors);

    // The former one takes everything back, in order or since the next one is killed.
    let (mut former, next) = Predecessor::hand_over(&folder, &parcel, start);
    former.until_ready();
    is_silent(&mut nbd);
    former.says(b"N");
    next.finish().exits(1).complains(&["it continues, since this one was not ready in time"]);
    former.until_it_is_gone();
    let (mut former, next) = Predecessor::hand_over(&folder, &parcel, start);
    former.until_ready();
    next.signal("-KILL");
    former.until_it_is_gone();
    assert_eq!(next.finish().code, None);
    assert!(place.exists());
    is_silent(&mut nbd);

    // It is asked to stop before it may begin: then it ends what it has begun.
    let (mut former, next) = Predecessor::hand_over(&folder, &parcel, start);
    former.until_ready();
    next.signal("-TERM");
    is_silent(&mut nbd);
    former.says(b"N");
    next.finish().exits(1);
    former.until_it_is_gone();
    assert!(place.exists());

    // The former one is gone: this one is the last that has it all.
    let (mut former, mut next) = Predecessor::hand_over(&folder, &parcel, start);
    former.until_ready();
    is_silent(&mut nbd);
    drop(former);
    next.expect("mapped disk0 ");
    next.until_logged("has ended by itself");
    answered(&mut nbd, 1);
    let mut last = Successor::connect(&folder, &next);
    last.ask(22, Some(&place), None, PATIENCE);
    parcel = last.take();
    assert_eq!(last.ready(), b'G');
    next.finish().exits(0);

    // As before, but it may begin.
    let (mut former, next) = Predecessor::hand_over(&folder, &parcel, start);
    drop(parcel);
    former.until_ready();
    next.signal("-TERM");
    former.says(b"G");
    next.finish().exits(0);
    assert!(!place.exists());
    assert_eq!(nbd.0.read(&mut [0]).unwrap_or(0), 0, "its client is disconnected");
    end(server);
}

/// A process that is asked to stop while another one takes its place leaves nothing behind.
#[test]
fn a_process_that_is_to_stop_while_it_hands_over_ends_in_order() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 23, &[]);
    let place = folder.path().join("nbd.sock");
    let dir = folder.path().join("files");
    let fuse = ["--fuse", dir.to_str().expect("a plain path")];
    let doors = [&["--nbd", place.to_str().expect("a plain path")][..], &fuse].concat();
    for (is_ready, is_served) in [(true, true), (false, true), (false, false)] {
        let Some(client) = with_fuse(map(&folder, 23, &doors), "mapped disk0 ") else { return };
        let mut nbd = Nbd::connect(&place).expect("connected");
        nbd.send(3, 3).expect("asked");
        assert_eq!(nbd.reply(), 3);
        let mut next = Successor::connect(&folder, &client);
        next.ask(23, Some(&place), Some(&dir), PATIENCE);
        let parcel = next.take();
        client.signal("-TERM");
        if is_ready {
            assert_eq!(next.ready(), b'G');
            let done = client.finish().exits(0);
            assert!(done.out.contains("handed over\n"), "{done:?}");
            assert!(place.exists());
            is_silent(&mut nbd);
            // The last process ends it.
            let words = [&doors[..], &["--replace"]].concat();
            let (mut former, mut last) =
                Predecessor::hand_over(&folder, &parcel, || map(&folder, 23, &words));
            drop(parcel);
            former.until_ready();
            former.says(b"G");
            last.expect("mapped disk0 ");
            end(last);
        } else {
            if !is_served {
                server.signal("-KILL");
            }
            drop((parcel, next));
            let done = client.finish().exits(if is_served { 0 } else { 1 });
            assert!(done.err.contains("this one does"), "{done:?}");
            assert!(is_served || done.err.contains("may not be durable"), "{done:?}");
        }
        assert!(!place.exists(), "{is_ready} {is_served}");
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        assert!(!mounts.contains(dir.to_str().expect("a plain path")), "{is_ready} {is_served}");
        assert_eq!(nbd.0.read(&mut [0]).unwrap_or(0), 0, "its client is disconnected");
    }
    let mut stored = [0; 8];
    fs::File::open(image)
        .and_then(|file| {
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut stored, 3 * BLOCK as u64)
        })
        .expect("read");
    assert_eq!(u64::from_le_bytes(stored), 3 << 48 | 3 << 16);
    drop(server);
}

#[test]
fn a_server_continues_when_its_successor_dies_at_any_step() {
    // tests [NB-71]
    let folder = Folder::new();
    let (mut server, client, place, image) = mapped(&folder, 28);
    let service = serde_json::json!({ "export": { "places": ["127.75.28.1:1234"] } });
    let ask = |server: &Running, limit| {
        let mut next = Successor::connect_to("export", &folder, server);
        next.ask_for(&service, Duration::from_millis(limit));
        next
    };
    for step in [Step::Agreed, Step::Begun, Step::Taken, Step::Late] {
        while_written(&place, &image, |shared| {
            let mut next = ask(&server, if matches!(step, Step::Late) { 200 } else { 60_000 });
            match step {
                Step::Agreed => {}
                Step::Begun => next.begin(),
                Step::HalfTaken | Step::Taken => next.take_all(),
                Step::Late => {
                    next.take_all();
                    assert_eq!(next.byte().expect("an answer"), b'N');
                }
            }
            drop(next);
            if !matches!(step, Step::Agreed) {
                server.expect("handing over").expect("listening on");
            }
            shared.advance();
        });
    }
    // One that is to stop lets the next one begin, or has ended in order.
    let mut next = ask(&server, 60_000);
    next.take_all();
    server.signal("-TERM");
    assert_eq!(next.ready(), b'G');
    let done = server.finish().exits(0);
    assert!(done.out.ends_with("handed over\n"), "{done:?}");
    let (server, _) = export(&folder, 28, &[]);
    let mut next = ask(&server, 60_000);
    next.take_all();
    server.signal("-TERM");
    drop(next);
    let done = server.finish().exits(0);
    assert!(done.out.ends_with("handing over to another process\n"), "{done:?}");
    client.signal("-KILL");
    client.finish();
}

/// Starts the command with a limit of its open files.
fn map_limited(folder: &Folder, host: u8, files: u32, more: &[&str]) -> Running {
    let path = format!("127.75.{host}.11@127.75.{host}.1");
    let limit = format!("ulimit -n {files}; exec \"$@\"");
    let words = ["-c", &limit, "sh", env!("CARGO_BIN_EXE_bowline")];
    let map = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path];
    start_as("sh".as_ref(), folder, &[&words[..], &map, more].concat())
}

#[test]
fn a_process_continues_when_the_next_one_may_open_too_few_files() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, client, place, image) = mapped(&folder, 24);
    let clients: Vec<_> = (0..40).map(|_| Nbd::connect(&place).expect("connected")).collect();
    while_written(&place, &image, |shared| {
        let doors = ["--nbd", place.to_str().expect("a plain path"), "--replace"];
        let done = map_limited(&folder, 24, 32, &doors).finish().exits(1);
        done.complains(&["the process to be replaced", "may not open all files", "ulimit -n"]);
        client.until_logged("this one does");
        shared.advance();
    });
    for mut nbd in clients {
        nbd.read(0);
    }
    end(client);
    end(server);
}

#[test]
fn a_process_needs_no_more_files_to_hand_over() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, _) = export(&folder, 25, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let mut client = map_limited(&folder, 25, 64, &doors);
    client.expect("mapped disk0 ");
    let mut next = Successor::connect(&folder, &client);
    let files = || fs::read_dir(format!("/proc/{}/fd", client.id())).expect("it runs").count();
    let mut clients = Vec::new();
    while files() < 64 {
        // The last ones wait to be accepted.
        let connected = UnixStream::connect(&place).expect("it listens");
        connected.set_read_timeout(Some(Duration::from_secs(1))).expect("a limit");
        clients.push(connected);
        thread::sleep(Duration::from_millis(2));
    }
    // Those that are accepted choose the export.
    let mut served: Vec<_> = clients.into_iter().filter_map(|one| Nbd::begin(one).ok()).collect();
    assert!(served.len() > 20, "{}", served.len());
    next.ask(25, Some(&place), None, PATIENCE);
    let parcel = next.take();
    // The listener, and each client.
    assert_eq!(parcel.descriptors.len(), 1 + served.len());
    drop((parcel, next));
    client.until_logged("this one does");
    for nbd in &mut served {
        nbd.0.set_read_timeout(Some(PATIENCE)).expect("a limit");
        nbd.read(0);
    }
    end(client);
    end(server);
}
