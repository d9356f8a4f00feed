//! The NBD front end, with common clients and with hostile ones.
//!
//! Clients that are not installed are reported as skipped.

use std::io::{ErrorKind::WouldBlock, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendResult, BackendSpec};
use bowline_block::front::nbd::{self, NbdOptions, NbdServer};
use bowline_block::{Discard, IoOp, Limits, LocalDevice};

use bowline_testkit::skipped;

/// A server at a socket of its own.
struct Served {
    server: NbdServer,
    path: PathBuf,
}

fn serve(name: &str, backend: Arc<dyn Backend>, options: NbdOptions) -> Served {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}.sock", std::process::id()));
    let server = nbd::serve(LocalDevice::new("disk", backend), &path, options).expect("served");
    Served { server, path }
}

impl Served {
    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path.display())
    }
}

fn memory(bytes: u64) -> Arc<dyn Backend> {
    backend::open(BackendSpec::Memory { bytes, block: 512 }).expect("memory")
}

/// Runs a client for at most a minute; `None` when it is not installed.
fn run(program: &str, args: &[&str]) -> Option<(bool, String)> {
    let out = Command::new("timeout").arg("60").arg(program).args(args).output().ok()?;
    if out.status.code() == Some(127) {
        skipped::without(program);
        return None;
    }
    let text = [out.stdout, out.stderr].concat();
    Some((out.status.success(), String::from_utf8_lossy(&text).into_owned()))
}

fn succeed(program: &str, args: &[&str]) -> Option<String> {
    let (ok, text) = run(program, args)?;
    assert!(ok, "{program} {args:?}: {text}");
    Some(text)
}

#[test]
fn nbdinfo_sees_what_the_disk_can_do() {
    // tests [NB-53]
    let served = serve("info", memory(5 << 20), NbdOptions::default());
    if let Some(text) = succeed("nbdinfo", &["--json", &served.uri()]) {
        for wanted in [
            "\"export-name\": \"disk\"",
            "\"export-size\": 5242880",
            "\"is_read_only\": false",
            "\"can_multi_conn\": true",
            "\"can_trim\": true",
            "\"can_zero\": true",
            "\"block_size_minimum\": 512",
        ] {
            assert!(text.contains(wanted), "{wanted}: {text}");
        }
    }
    let socket = format!("nbd+unix:///?socket={}", served.path.display());
    if let Some(text) = succeed("nbdinfo", &["--list", "--json", &socket]) {
        assert!(text.contains("\"export-name\": \"disk\""), "{text}");
    }
    let other = format!("nbd+unix:///other?socket={}", served.path.display());
    if let Some((ok, _)) = run("nbdinfo", &[&other]) {
        assert!(!ok, "there is no such export");
    }
    let read_only = serve("info-ro", memory(1 << 20), {
        let mut options = NbdOptions::default();
        options.read_only = true;
        options
    });
    if let Some(text) = succeed("nbdinfo", &["--json", &read_only.uri()]) {
        assert!(text.contains("\"is_read_only\": true"), "{text}");
    }
}

/// A disk of any size that stores nothing, with discards larger than any request.
struct Vast(u64);

impl Backend for Vast {
    fn limits(&self) -> Limits {
        let discard = Discard { max_bytes: 4096, granularity: 1 << 31, alignment: 1 << 30 };
        Limits { discard: Some(discard), ..Limits::plain(self.0) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            let limits = self.limits();
            let whole = io.op != IoOp::Discard || io.len <= 4096;
            let errno = if whole && limits.holds(io.offset, io.len.into()) { 0 } else { -5 };
            done.done(&[BackendResult { token: io.token, errno, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(self.0)
    }
}

#[test]
fn the_largest_disk_is_served_to_its_end_and_an_empty_one_is_empty() {
    // tests [NB-30] [NB-53]
    let largest = Limits::BYTES_MAX - Limits::BYTES_MAX % 512;
    for (name, bytes) in [("vast", largest), ("empty", 0)] {
        let served = serve(name, Arc::new(Vast(bytes)), NbdOptions::default());
        if let Some(text) = succeed("nbdinfo", &["--json", &served.uri()]) {
            assert!(text.contains(&format!("\"export-size\": {bytes}")), "{text}");
        }
        let mut client = Client::connect(&served);
        let at = bytes.saturating_sub(16_384);
        let there = if bytes > 0 { 0 } else { 22 };
        for (command, offset, len, error) in [
            (0, at, 512, there),
            (4, at, 16_384, there),
            (4, at, 16_896, 22),
            (0, bytes, 512, 22),
            (0, u64::MAX - 511, 1024, 22),
        ] {
            client.ask(0, command, 7, offset, len);
            assert_eq!(client.reply(), (7, error), "{name}: {command} at {offset}");
            if command == 0 && error == 0 {
                client.get(len as usize);
            }
        }
    }
}

#[test]
fn qemu_io_writes_reads_and_is_refused() {
    let served = serve("qemu", memory(64 << 20), NbdOptions::default());
    let uri = served.uri();
    let qemu = |commands: &[&str]| {
        let mut args = vec!["-f", "raw", &uri];
        for command in commands {
            args.extend(["-c", command]);
        }
        run("qemu-io", &args)
    };
    let Some((ok, text)) = qemu(&[
        "write -P 0x5a 0 1M",
        "read -P 0x5a 0 1M",
        "write -f -P 0x11 1M 64k",
        "write -z 4k 8k",
        "read -P 0 4k 8k",
        "read -P 0x5a 12k 4k",
        "discard 1M 64k",
        "read -P 0 1M 64k",
        "write -P 0x77 31M 32M",
        "read -P 0x77 31M 32M",
        "aio_write -P 1 0 64k",
        "aio_write -P 2 64k 64k",
        "aio_write -P 3 128k 64k",
        "aio_flush",
        "read -P 2 64k 64k",
        "flush",
    ]) else {
        return;
    };
    assert!(ok && !text.contains("Pattern verification failed"), "{text}");
    let ro = serve("qemu-ro", memory(1 << 20), {
        let mut options = NbdOptions::default();
        options.read_only = true;
        options
    });
    let ro = ro.uri();
    let (ok, text) = run("qemu-io", &["-f", "raw", &ro, "-c", "write 0 512"]).expect("installed");
    assert!(!ok, "{text}");
}

#[test]
fn qemu_img_and_nbdcopy_carry_an_image_there_and_back() {
    let served = serve("copy", memory(32 << 20), NbdOptions::default());
    let dir = std::env::temp_dir();
    let file = |name: &str| dir.join(format!("bowline-copy-{name}-{}", std::process::id()));
    let (from, by_nbdcopy, by_qemu) = (file("from"), file("nbdcopy"), file("qemu"));
    let mut image = vec![0_u8; 32 << 20];
    for (i, word) in image.chunks_exact_mut(8).enumerate().filter(|(i, _)| i / 4096 % 3 != 1) {
        word.copy_from_slice(&(i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    std::fs::write(&from, &image).expect("image");
    let [text_from, text_nbdcopy, text_qemu] =
        [&from, &by_nbdcopy, &by_qemu].map(|path| path.display().to_string());
    if succeed("nbdcopy", &[&text_from, &served.uri()]).is_some() {
        succeed("nbdcopy", &["--connections=4", &served.uri(), &text_nbdcopy]);
        assert!(std::fs::read(&by_nbdcopy).expect("copy") == image, "the image came back");
    }
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw"];
    if succeed("qemu-img", &[&convert[..], &[&text_from, &served.uri()]].concat()).is_some() {
        let back = ["convert", "-f", "raw", "-O", "raw", &served.uri(), &text_qemu];
        succeed("qemu-img", &back);
        assert!(std::fs::read(&by_qemu).expect("copy") == image, "the image came back");
        let compare = ["compare", "-f", "raw", "-F", "raw", &text_from, &served.uri()];
        succeed("qemu-img", &compare);
    }
    for path in [from, by_nbdcopy, by_qemu] {
        let _ = std::fs::remove_file(path);
    }
    until("every client is gone", || served.server.connections() == 0);
}

#[test]
fn fio_verifies_random_io_over_several_connections() {
    // A file has a cache to flush; fio fails where there is none.
    let path = std::env::temp_dir().join(format!("bowline-fio-{}", std::process::id()));
    let file = std::fs::File::create_new(&path).expect("a file");
    file.set_len(64 << 20).expect("its size");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("again");
    std::fs::remove_file(&path).expect("unlinked");
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: true };
    let served = serve("fio", backend::open(spec).expect("opened"), NbdOptions::default());
    let Some((_, engines)) = run("fio", &["--enghelp"]) else { return };
    if !engines.contains("nbd") {
        return skipped::because("fio without its nbd engine");
    }
    let uri = format!("--uri={}", served.uri());
    let text = succeed(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randrw",
            "--bssplit=512/20:4k/50:64k/20:512k/10",
            "--size=16m",
            "--numjobs=2",
            "--offset_increment=32m",
            "--iodepth=32",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_state_save=0",
            "--fsync=16",
            "--group_reporting",
        ],
    );
    if let Some(text) = text {
        assert!(text.contains("err= 0"), "{text}");
    }
}

/// Waits until the condition holds.
fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A hand-made client.
struct Client(UnixStream);

impl Client {
    fn connect(served: &Served) -> Self {
        let mut client = Self(UnixStream::connect(&served.path).expect("connected"));
        client.0.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
        client.get(18);
        client.0.write_all(&3_u32.to_be_bytes()).expect("flags");
        // EXPORT_NAME with the empty name.
        client.0.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").expect("option");
        client.get(10);
        client
    }

    fn get(&mut self, n: usize) -> Vec<u8> {
        let mut out = vec![0; n];
        self.0.read_exact(&mut out).expect("an answer");
        out
    }

    fn ask(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(command.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        out.extend(offset.to_be_bytes());
        out.extend(len.to_be_bytes());
        self.0.write_all(&out).expect("asked");
    }

    /// Cookie and error of the next reply.
    fn reply(&mut self) -> (u64, u32) {
        let head = self.get(16);
        assert_eq!(head[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(head[4..8].try_into().expect("4 bytes"));
        (u64::from_be_bytes(head[8..].try_into().expect("8 bytes")), error)
    }

    fn sees_the_end(mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_))
    }
}

#[test]
fn wrong_requests_are_refused_and_the_connection_goes_on() {
    let served = serve("wrong", memory(1 << 20), NbdOptions::default());
    let mut client = Client::connect(&served);
    let (read, write, trim) = (0, 1, 4);
    for (flags, command, offset, len, error) in [
        (0, read, 1 << 20, 512, 22),
        (0, read, u64::MAX - 511, 512, 22),
        (0, read, 100, 512, 22),
        (0, read, 0, 100, 22),
        (0, read, 0, u32::MAX, 22),
        (0, trim, 1 << 20, 512, 22),
        (0, 6, 1 << 20, 512, 28),
        (0, 5, 1 << 20, 512, 22),
        (0, 99, 0, 0, 22),
        (1 << 2, read, 0, 512, 22),
    ] {
        client.ask(flags, command, offset ^ 77, offset, len);
        assert_eq!(client.reply(), (offset ^ 77, error), "{flags} {command} {offset} {len}");
    }
    // The data of a refused write are discarded, however long.
    client.ask(0, write, 1, 512, 1 << 20);
    client.0.write_all(&vec![9; 1 << 20]).expect("data");
    assert_eq!(client.reply(), (1, 28));
    client.ask(0, read, 2, 0, 512);
    assert_eq!(client.reply(), (2, 0));
    assert_eq!(client.get(512), vec![0; 512]);
}

#[test]
fn noise_ends_that_connection_only() {
    let served = serve("noise", memory(1 << 20), NbdOptions::default());
    let mut good = Client::connect(&served);
    let mut noisy = Client::connect(&served);
    noisy.0.write_all(&[0x5a; 28]).expect("noise");
    assert!(noisy.sees_the_end());
    let mut greedy = Client::connect(&served);
    greedy.ask(0, 1, 1, 0, u32::MAX);
    assert!(greedy.sees_the_end(), "4 GiB of data are not even thrown away");
    let mut leaving = Client::connect(&served);
    leaving.ask(0, 1, 1, 0, 4096);
    leaving.0.write_all(&[1; 100]).expect("a part of the data");
    drop(leaving);
    good.ask(0, 0, 5, 0, 4096);
    assert_eq!(good.reply(), (5, 0));
    assert_eq!(good.get(4096), vec![0; 4096], "half a write changes nothing");
    let mode = std::fs::metadata(&served.path).expect("socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_client_that_does_not_read_holds_up_nobody() {
    let served = serve("lazy", memory(16 << 20), NbdOptions::default());
    let mut lazy = Client::connect(&served);
    let mut good = Client::connect(&served);
    // Far more than the socket buffers and the server's memory of one connection hold.
    for i in 0..200 {
        lazy.ask(0, 0, i, 0, 256 << 10);
    }
    for i in 0..100 {
        good.ask(0, 0, i, 4096, 512);
        assert_eq!(good.reply(), (i, 0));
        good.get(512);
    }
    let mut seen: Vec<_> = (0..200)
        .map(|_| {
            let (cookie, error) = lazy.reply();
            assert_eq!(error, 0);
            lazy.get(256 << 10);
            cookie
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..200).collect::<Vec<_>>());
    // Requests sent before a disconnect are answered.
    good.ask(0, 0, 1, 0, 1 << 20);
    good.ask(0, 2, 2, 0, 0);
    assert_eq!(good.reply(), (1, 0));
    good.get(1 << 20);
    assert!(good.sees_the_end());
}

#[test]
fn a_socket_in_use_is_not_taken_and_an_abandoned_one_is() {
    let served = serve("taken", memory(1 << 20), NbdOptions::default());
    let disk = LocalDevice::new("disk", memory(1 << 20));
    let again = nbd::serve(disk.clone(), &served.path, NbdOptions::default());
    assert_eq!(again.err().and_then(|e| e.raw_os_error()), Some(libc::EADDRINUSE));
    let client = Client::connect(&served);
    let path = served.path.clone();
    drop(served);
    assert!(client.sees_the_end());
    assert!(!path.exists());
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bound and left behind"));
    assert!(path.exists());
    drop(nbd::serve(disk, &path, NbdOptions::default()).expect("replaced"));
}

#[test]
fn what_is_no_socket_of_its_own_is_left_alone() {
    let name = format!("bowline-precious-{}", std::process::id());
    let (path, aside) =
        (std::env::temp_dir().join(&name), std::env::temp_dir().join(name + ".old"));
    let disk = LocalDevice::new("disk", memory(1 << 20));
    let serve = || nbd::serve(disk.clone(), &path, NbdOptions::default());
    std::fs::write(&path, "precious").expect("a file");
    // Connecting to it is refused, as with a stale socket.
    assert_eq!(serve().err().and_then(|e| e.raw_os_error()), Some(libc::EADDRINUSE));
    assert_eq!(std::fs::read_to_string(&path).expect("it is there"), "precious");
    std::fs::remove_file(&path).expect("it is there");
    // A link is not followed, and its target is not removed either.
    std::fs::write(&aside, "precious").expect("a file");
    std::os::unix::fs::symlink(&aside, &path).expect("a link");
    assert_eq!(serve().err().and_then(|e| e.raw_os_error()), Some(libc::EADDRINUSE));
    std::fs::remove_file(&path).expect("it is there");

    // Another process has put its own socket in the place of this one.
    let server = serve().expect("served");
    std::fs::rename(&path, &aside).expect("moved");
    let theirs = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    drop(server);
    assert!(UnixStream::connect(&path).is_ok(), "theirs is there");
    drop(theirs);
    for path in [path, aside] {
        std::fs::remove_file(path).expect("it is there");
    }
}

/// A store whose answers the test controls.
struct Faulty {
    held: Mutex<Vec<(BackendIo, Arc<dyn BackendDone>)>>,
    seen: Mutex<Vec<(IoOp, bool)>>,
}

impl Backend for Faulty {
    fn limits(&self) -> Limits {
        let discard = Discard { max_bytes: 1 << 30, granularity: 512, alignment: 0 };
        Limits {
            discard: Some(discard),
            max_write_zeroes: 1 << 20,
            write_cache: true,
            fua: true,
            ..Limits::plain(1 << 20)
        }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            self.seen.lock().expect("whole").push((io.op, io.fua));
            let errno = match io.offset / 4096 {
                1 => -libc::EIO,
                2 => -libc::ENOSPC,
                3 => -libc::EREMOTEIO,
                4 => {
                    self.held.lock().expect("whole").push((io, done.clone()));
                    continue;
                }
                _ => 0,
            };
            done.done(&[BackendResult { token: io.token, errno, direct: None }]);
        }
    }

    fn resize(&self) -> std::io::Result<u64> {
        Ok(1 << 20)
    }
}

#[test]
fn errors_of_the_disk_reach_the_client_by_request() {
    let faulty = Faulty::new();
    let served = serve("faulty", faulty.clone(), NbdOptions::default());
    let mut client = Client::connect(&served);
    let (read, write, flush, trim) = (0, 1, 3, 4);
    for (command, block, error) in
        [(read, 1, 5), (write, 2, 28), (read, 3, 5), (trim, 1, 5), (write, 9, 0)]
    {
        client.ask(0, command, block, block * 4096, 512);
        if command == write {
            client.0.write_all(&[1; 512]).expect("data");
        }
        assert_eq!(client.reply(), (block, error));
    }
    faulty.seen.lock().expect("whole").clear();
    // Forced access: of a write by the disk itself, of a discard by a flush after it.
    client.ask(1, write, 1, 36864, 512);
    client.0.write_all(&[1; 512]).expect("data");
    assert_eq!(client.reply(), (1, 0));
    client.ask(1, trim, 2, 36864, 512);
    assert_eq!(client.reply(), (2, 0));
    client.ask(1, trim, 3, 4096, 512);
    assert_eq!(client.reply(), (3, 5));
    client.ask(0, flush, 4, 0, 0);
    assert_eq!(client.reply(), (4, 0));
    let (w, d, f) = (IoOp::Write, IoOp::Discard, IoOp::Flush);
    let seen = [(w, true), (d, false), (f, false), (d, false), (f, false)];
    assert_eq!(*faulty.seen.lock().expect("whole"), seen);
    // A slow request does not delay the others, and may outlive its client.
    client.ask(0, read, 7, 4 * 4096, 512);
    client.ask(0, read, 8, 36864, 512);
    assert_eq!(client.reply(), (8, 0));
    client.get(512);
    drop(client);
    let mut next = Client::connect(&served);
    faulty.let_go();
    next.ask(0, read, 9, 36864, 512);
    assert_eq!(next.reply(), (9, 0));
}

impl Faulty {
    fn new() -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), seen: Mutex::default() })
    }

    fn held(&self) -> usize {
        self.held.lock().expect("whole").len()
    }

    fn let_go(&self) {
        let held = std::mem::take(&mut *self.held.lock().expect("whole"));
        for (io, done) in held {
            done.done(&[BackendResult { token: io.token, errno: 0, direct: None }]);
        }
    }
}

fn places(max_connections: usize) -> NbdOptions {
    let mut options = NbdOptions::default();
    options.max_connections = max_connections;
    options
}

/// A client that has connected and said nothing yet.
fn knock(served: &Served) -> UnixStream {
    let client = UnixStream::connect(&served.path).expect("connected");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    client
}

/// Tells whether the server has greeted a client that connected.
fn is_greeted(mut client: &UnixStream) -> bool {
    client.read_exact(&mut [0; 18]).is_ok()
}

fn waits(client: &UnixStream) -> bool {
    client.set_nonblocking(true).expect("set");
    let waits = (&mut &*client).read(&mut [0; 1]).is_err_and(|e| e.kind() == WouldBlock);
    client.set_nonblocking(false).expect("set");
    waits
}

/// A client that reconnects again and again while the disk does not answer gets no more memory than
/// others.
#[test]
fn requests_that_outlive_their_clients_count() {
    let faulty = Faulty::new();
    let served = serve("outlive", faulty.clone(), places(2));
    for n in 0..9 {
        let mut client = Client::connect(&served);
        client.ask(0, 0, 7, 4 * 4096, 512);
        until("the disk has it", || faulty.held() == n + 1);
        drop(client);
        until("it has ended", || served.server.connections() == 0);
    }
    let another = knock(&served);
    std::thread::sleep(Duration::from_millis(500));
    assert!(waits(&another), "more than four have left for each of two places");
    faulty.let_go();
    assert!(is_greeted(&another), "their requests are over");
}

/// Queued requests of a client that has hung up are not executed, and its place goes to another
/// client.
#[test]
fn a_client_that_hangs_up_ends_with_what_it_asked_for() {
    let faulty = Faulty::new();
    let served = serve("hang-up", faulty.clone(), places(1));
    let mut client = Client::connect(&served);
    // More requests than may be in flight, and no more than the socket buffers.
    for n in 0..400 {
        client.ask(0, 0, n, 4 * 4096, 512);
    }
    until("as many are under way as may be", || faulty.held() == 256);
    drop(client);
    until("it has ended", || served.server.connections() == 0);
    let mut next = Client::connect(&served);
    faulty.let_go();
    next.ask(0, 0, 1, 36864, 512);
    assert_eq!(next.reply(), (1, 0));
    let reads = faulty.seen.lock().expect("whole").len();
    assert_eq!(reads, 256 + 1, "the others were not begun");
}

#[test]
fn changes_before_a_goodbye_are_made_though_nobody_waits_for_the_answer() {
    let faulty = Faulty::new();
    let served = serve("goodbye", faulty.clone(), places(1));
    let mut client = Client::connect(&served);
    let (write, disconnect) = (1, 2);
    let mut said = Vec::new();
    for (command, offset, data) in [(write, 4 * 4096, 512), (write, 36864, 512), (disconnect, 0, 0)]
    {
        said.extend(0x2560_9513_u32.to_be_bytes());
        said.extend([0, 0, 0, command]);
        said.extend(7_u64.to_be_bytes());
        said.extend(u64::to_be_bytes(offset));
        said.extend(u32::to_be_bytes(data));
        said.extend(std::iter::repeat_n(1, data as usize));
    }
    client.0.write_all(&said).expect("said");
    drop(client);
    until("both are made", || faulty.seen.lock().expect("whole").len() == 2);
    // Its place is free, although the disk still executes one of its requests.
    let next = Client::connect(&served);
    assert_eq!(served.server.connections(), 2);
    faulty.let_go();
    until("it has ended", || served.server.connections() == 1);
    drop(next);
}

#[test]
fn clients_wait_for_a_place_and_one_that_says_nothing_makes_way() {
    let served = serve("places", memory(1 << 20), places(2));
    let (first, second) = (Client::connect(&served), Client::connect(&served));
    let third = knock(&served);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(waits(&third), "both places are taken by clients that are served");
    drop(first);
    assert!(is_greeted(&third));
    // The third client sends nothing, and none disconnects.
    let mut fourth = Client::connect(&served);
    fourth.ask(0, 0, 1, 0, 512);
    assert_eq!(fourth.reply(), (1, 0));
    assert!(!is_greeted(&third), "it made way");
    drop(second);
}

/// Requests and noise in any order and cut anywhere: the server answers valid requests, ends
/// connections with invalid ones, and continues.
#[test]
fn random_streams_hurt_nobody() {
    let served = serve("random", memory(1 << 20), NbdOptions::default());
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut below = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    for _ in 0..300 {
        let mut stream = Vec::new();
        for _ in 0..below(20) {
            if below(12) == 0 {
                stream.extend((0..below(60)).map(|_| below(256) as u8));
                continue;
            }
            let (command, len) = (below(8) as u16, below(40_000) as u32);
            let len = if below(3) == 0 { len } else { len & !511 };
            stream.extend(0x2560_9513_u32.to_be_bytes());
            stream.extend((below(5) as u16).to_be_bytes());
            stream.extend(command.to_be_bytes());
            stream.extend(below(u64::MAX).to_be_bytes());
            stream.extend((below(1 << 21) & !511).to_be_bytes());
            stream.extend(len.to_be_bytes());
            if command == 1 {
                stream.extend(std::iter::repeat_n(7, len as usize));
            }
        }
        let cut = below(stream.len() as u64 + 1) as usize;
        let mut client = Client::connect(&served);
        // The server may have ended the connection by then.
        let _ = client.0.write_all(&stream[..cut]);
        if below(2) == 0 {
            let _ = client.0.shutdown(std::net::Shutdown::Write);
            let mut sink = Vec::new();
            let _ = client.0.read_to_end(&mut sink);
        }
    }
    let mut good = Client::connect(&served);
    good.ask(0, 0, 1, 0, 1 << 20);
    assert_eq!(good.reply(), (1, 0));
    good.get(1 << 20);
    drop(good);
    until("no connection stays", || served.server.connections() == 0);
}

#[test]
fn a_connection_is_a_use_and_a_shut_door_lets_nobody_in() {
    // tests [NB-37]
    let served = serve("use", memory(1 << 20), NbdOptions::default());
    let connect = || {
        let mut client = UnixStream::connect(&served.path).expect("connected");
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let mut greeting = [0; 18];
        let greeted = client.read_exact(&mut greeting).is_ok();
        greeted.then_some(client)
    };
    let client = connect().expect("greeted");
    assert_eq!(served.server.connections(), 1);
    assert!(!served.server.disable_if_unused());
    drop(client);
    until("the connection has ended", || served.server.disable_if_unused());
    assert!(connect().is_none(), "shut");
    served.server.enable();
    assert!(connect().is_some());
}
