//! What clients of the NBD front end negotiate beyond the baseline.

#[path = "common/nbd.rs"]
mod common;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendResult, BackendSpec};
use bowline_block::{Discard, Errno, IoOp, Limits};

use common::{
    BLOCK_STATUS, CACHE, Client, FLUSH, LIST_META_CONTEXT, Message, READ, SET_META_CONTEXT, TRIM,
    WRITE, WRITE_ZEROES, memory, serve, succeed, until,
};

/// NBD_CMD_FLAG_DF.
const DF: u16 = 1 << 2;
/// NBD_CMD_FLAG_FAST_ZERO.
const FAST_ZERO: u16 = 1 << 4;
/// NBD_CMD_FLAG_REQ_ONE.
const REQ_ONE: u16 = 1 << 3;
/// NBD_CMD_FLAG_PAYLOAD_LEN.
const PAYLOAD_LEN: u16 = 1 << 5;
/// NBD_REPLY_TYPE_NONE and NBD_REPLY_TYPE_OFFSET_DATA.
const NONE: u16 = 0;
const DATA: u16 = 1;

#[test]
fn reads_of_a_client_with_structured_replies_are_one_chunk() {
    // tests [NB-53]
    let served = serve("structured", memory(1 << 20));
    let mut client = Client::begin(&served.path);
    let wrong = client.option(8, b"data");
    assert_eq!(wrong[0].0, (1 << 31) + 3, "NBD_REP_ERR_INVALID");
    assert_eq!(client.option(8, b""), [(1, vec![])]);
    let send_df = 1 << 7;
    assert_ne!(client.go() & send_df, 0);

    client.ask(0, WRITE, 1, 4096, 512);
    client.0.write_all(&[7; 512]).expect("data");
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    for flags in [0, DF] {
        client.ask(flags, READ, 2, 3584, 1024);
        let payload = [&3584_u64.to_be_bytes()[..], &[0; 512], &[7; 512]].concat();
        assert_eq!(client.message(), Message::Chunk { cookie: 2, flags: 1, kind: DATA, payload });
    }
    client.ask(0, READ, 3, 0, 0);
    assert_eq!(client.error().1, 22, "nothing to read");
    // Longer than an eighth of the connection's memory, and than the socket's buffer.
    client.ask(0, WRITE, 4, 0, 1 << 20);
    client.0.write_all(&[9; 1 << 20]).expect("data");
    assert_eq!(client.message(), Message::Simple { cookie: 4, error: 0 });
    for cookie in 0..40 {
        client.ask(0, READ, cookie, 0, 1 << 20);
    }
    let mut seen: Vec<_> = (0..40)
        .map(|_| {
            let message = client.message();
            let Message::Chunk { cookie, flags: 1, kind: DATA, payload } = message else {
                panic!("no data");
            };
            assert!(payload[..8] == [0; 8] && payload[8..] == [9; 1 << 20]);
            cookie
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<_>>());

    // Without structured replies there are neither chunks nor DF.
    let mut client = Client::begin(&served.path);
    assert_eq!(client.go() & send_df, 0);
    client.ask(DF, READ, 5, 0, 512);
    assert_eq!(client.message(), Message::Simple { cookie: 5, error: 22 });
    client.ask(0, READ, 6, 0, 512);
    assert_eq!(client.message(), Message::Simple { cookie: 6, error: 0 });
    assert_eq!(client.get(512), [9; 512]);
}

/// A store whose requests fail.
struct Failing(Errno);

impl Backend for Failing {
    fn limits(&self) -> Limits {
        Limits { write_cache: true, ..Limits::plain(1 << 20) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            let result = if io.op == IoOp::Flush { Ok(()) } else { Err(self.0) };
            done.done(&[BackendResult::new(io.token, result)]);
        }
    }
}

#[test]
fn an_error_says_what_is_wrong_and_where() {
    // tests [NB-53]
    let served = serve("texts", memory(1 << 20));
    let mut client = Client::structured(&served);
    let end = Some(1 << 20);
    for (flags, command, offset, len, error, text, at) in [
        (0, READ, (1 << 20) - 512, 1024, 22, "beyond the end", end),
        (0, TRIM, 0, (1 << 20) + 512, 22, "beyond the end", end),
        (0, READ, u64::MAX - 511, 512, 22, "beyond the end", Some(u64::MAX - 511)),
        (0, READ, 0, 100, 22, "minimum block size", None),
        (0, READ, 0, (32 << 20) + 512, 22, "maximum block size", None),
        (1 << 9, READ, 0, 512, 22, "flag", None),
        (DF, TRIM, 0, 512, 22, "flag", None),
        (0, 99, 0, 512, 22, "unknown command", None),
    ] {
        client.ask(flags, command, 7, offset, len);
        let (cookie, got, said, whence) = client.error();
        assert_eq!((cookie, got, whence), (7, error, at), "{command} {offset} {len}");
        assert!(said.contains(text), "{said}");
    }
    client.ask(0, WRITE, 8, 1 << 20, 4096);
    client.0.write_all(&[1; 4096]).expect("data");
    let (_, error, text, at) = client.error();
    assert_eq!((error, &*text, at), (28, "beyond the end of the disk", end));

    // NBD knows few errors; the disk's own is in the text.
    let served = serve("failing", Arc::new(Failing(Errno(libc::EREMOTEIO))));
    let mut client = Client::structured(&served);
    client.ask(0, READ, 9, 0, 512);
    let (cookie, error, text, _) = client.error();
    assert_eq!((cookie, error), (9, 5));
    assert!(text.contains("Remote I/O error"), "{text}");
    client.ask(0, FLUSH, 10, 0, 0);
    assert_eq!(client.message(), Message::Simple { cookie: 10, error: 0 });
    // An operation that the disk does not have (any more) is no answer to a flag.
    let served = serve("lacking", Arc::new(Failing(Errno::EOPNOTSUPP)));
    let mut client = Client::structured(&served);
    client.ask(0, TRIM, 11, 0, 512);
    assert_eq!(client.error().1, 22);
}

#[test]
fn common_clients_negotiate_structured_replies() {
    let served = serve("clients", memory(64 << 20));
    if let Some(text) = succeed("nbdinfo", &["--can", "structured-reply", &served.uri()]) {
        assert_eq!(text, "");
    }
    if let Some(text) = succeed("nbdinfo", &["--can", "df", &served.uri()]) {
        assert_eq!(text, "");
    }
    let commands = ["write -P 0x5a 0 2M", "read -P 0x5a 0 2M", "read -P 0 2M 32M"];
    let uri = served.uri();
    let mut args = vec!["-f", "raw", &uri];
    args.extend(commands.iter().flat_map(|command| ["-c", command]));
    if let Some(text) = succeed("qemu-io", &args) {
        assert!(!text.contains("Pattern verification failed"), "{text}");
    }
}

#[test]
fn metadata_contexts_are_listed_and_selected() {
    // tests [NB-53]
    let served = serve("contexts", memory(1 << 20));
    let (ack, context) =
        (|| (1, vec![]), |id: u8| (4, [&[0, 0, 0, id], &b"base:allocation"[..]].concat()));
    let (invalid, unknown) = ((1 << 31) + 3, (1 << 31) + 6);
    let mut client = Client::begin(&served.path);
    let early = client.contexts(SET_META_CONTEXT, "disk", &["base:allocation"]);
    assert_eq!(early[0].0, invalid, "structured replies come first");
    assert_eq!(client.option(8, b""), [ack()]);
    for (queries, listed) in [
        (&[][..], true),
        (&["base:"][..], true),
        (&["qemu:", "base:allocation", "base:"][..], true),
        (&["base:other", "x-y:z"][..], false),
    ] {
        let replies = client.contexts(LIST_META_CONTEXT, "", queries);
        let wanted = if listed { vec![context(0), ack()] } else { vec![ack()] };
        assert_eq!(replies, wanted, "{queries:?}");
    }
    assert_eq!(client.contexts(LIST_META_CONTEXT, "other", &[])[0].0, unknown);
    // As many queries as an option holds, and as many as a number can say.
    let many = vec![""; 4000];
    assert_eq!(client.contexts(SET_META_CONTEXT, "disk", &many), [ack()]);
    assert_eq!(
        client.option(SET_META_CONTEXT, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff])[0].0,
        invalid
    );
    // A selection replaces the one before, even one that fails.
    let selected = client.contexts(SET_META_CONTEXT, "disk", &["base:allocation"]);
    assert_eq!(selected, [context(1), ack()]);
    assert_eq!(client.contexts(SET_META_CONTEXT, "other", &["base:allocation"])[0].0, unknown);
    client.go();
    client.ask(0, BLOCK_STATUS, 1, 0, 4096);
    let (_, error, text, _) = client.error();
    assert_eq!((error, &*text), (22, "no metadata context was selected"));
    client.ask(0, READ, 2, 0, 0);
    assert_eq!(client.error().0, 2, "the connection continues");
}

#[test]
fn what_was_never_written_is_a_hole_where_the_store_knows() {
    // tests [NB-53]
    let served = serve("status", memory(1 << 20));
    let mut client = Client::with_status(&served);
    assert_eq!(client.status(0, 0, 4096), [(1 << 20, 3)], "up to the end of the disk");
    assert_eq!(client.status(REQ_ONE, 0, 4096), [(4096, 3)]);
    client.ask(0, WRITE, 1, 8192, 512);
    client.0.write_all(&[7; 512]).expect("data");
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    let rest = (1 << 20) - 12_288;
    assert_eq!(client.status(0, 0, 1 << 20), [(8192, 3), (4096, 0), (rest, 3)]);
    assert_eq!(client.status(REQ_ONE, 0, 1 << 20), [(8192, 3)]);
    assert_eq!(client.status(0, 8704, 512), [(3584, 0)]);
    for (flags, offset, len, error) in
        [(0, 0, 0, 22), (0, 512, 1 << 20, 22), (0, 100, 512, 22), (DF, 0, 512, 22)]
    {
        client.ask(flags, BLOCK_STATUS, 9, offset, len);
        assert_eq!(client.error().1, error, "{flags} {offset} {len}");
    }
    // A store that cannot know, as a disk of another machine.
    let served = serve("unknown", Arc::new(Failing(Errno::EIO)));
    let mut client = Client::with_status(&served);
    assert_eq!(client.status(0, 4096, 512), [((1 << 20) - 4096, 0)]);
    assert_eq!(client.status(REQ_ONE, 4096, 512), [(512, 0)]);
}

/// A sparse file of 64 MiB with data at 1 MiB and at 40 MiB, and its path.
fn sparse_file(name: &str) -> (PathBuf, Arc<dyn Backend>) {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
    let file = std::fs::File::options();
    let file = file.clone().read(true).write(true).create(true).truncate(true).open(&path);
    let file = file.expect("a file");
    file.set_len(64 << 20).expect("its size");
    for at in [1 << 20, 40 << 20] {
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![0x5a; 1 << 20], at).expect("data");
    }
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: false };
    (path, backend::open(spec).expect("opened"))
}

#[test]
fn common_clients_see_the_holes_of_a_file() {
    // tests [NB-53]
    let (path, file) = sparse_file("holes");
    let served = serve("holes", file);
    let extents = [(0, 1, 3), (1, 1, 0), (2, 38, 3), (40, 1, 0), (41, 23, 3)];
    if let Some(text) = succeed("nbdinfo", &["--map", &served.uri()]) {
        let lines: Vec<Vec<u64>> = text
            .lines()
            .map(|line| line.split_whitespace().take(3).map(|n| n.parse().expect(line)).collect())
            .collect();
        let wanted = extents.map(|(at, len, state)| vec![at << 20, len << 20, state]);
        assert_eq!(lines, wanted);
    }
    let map = ["map", "--output=json", "-f", "raw", &served.uri()];
    if let Some(text) = succeed("qemu-img", &map) {
        for (at, len, state) in extents {
            let (at, len, zero) = (at << 20, len << 20, state == 3);
            let begin = format!("\"start\": {at}, \"length\": {len},");
            let line = text.lines().find(|line| line.contains(&begin)).expect(&text);
            assert!(line.contains(&format!("\"zero\": {zero}, \"data\": {}", !zero)), "{line}");
        }
    }
    // Copies skip the holes, and are right.
    let image = std::fs::read(&path).expect("the image");
    let copy = path.with_extension("copy");
    let to = copy.display().to_string();
    let convert = ["convert", "-f", "raw", "-O", "raw", &served.uri(), &to];
    for (program, args) in
        [("nbdcopy", &["--connections=4", &served.uri(), &to][..]), ("qemu-img", &convert[..])]
    {
        if succeed(program, args).is_some() {
            assert!(std::fs::read(&copy).expect("a copy") == image, "{program}");
            let _ = std::fs::remove_file(&copy);
        }
    }
    let _ = std::fs::remove_file(path);
}

/// A disk of a size that no request can name in 32 bits, answered inside of `submit`.
struct Large(Mutex<Vec<(IoOp, u64, u32)>>);

impl Backend for Large {
    fn limits(&self) -> Limits {
        let discard = Discard { max_bytes: 1 << 40, granularity: 512, alignment: 0 };
        Limits {
            discard: Some(discard),
            max_write_zeroes: u32::MAX - 511,
            write_cache: true,
            ..Limits::plain(1 << 50)
        }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        for io in io.drain(..) {
            self.0.lock().expect("whole").push((io.op, io.offset, io.len));
            let broken = io.op == IoOp::WriteZeroes && io.offset == 5 << 30;
            let result = if broken { Err(Errno::EIO) } else { Ok(()) };
            done.done(&[BackendResult::new(io.token, result)]);
        }
    }
}

#[test]
fn extended_headers_carry_lengths_of_64_bits() {
    // tests [NB-53]
    let served = serve("extended", memory(1 << 20));
    let mut client = Client::extended(&served);
    client.ask_extended(PAYLOAD_LEN, WRITE, 4096, 512);
    client.0.write_all(&[7; 512]).expect("data");
    assert_eq!(client.extended_reply(4096), (NONE, vec![]));
    // As QEMU has it.
    client.ask_extended(0, WRITE, 4608, 512);
    client.0.write_all(&[7; 512]).expect("data");
    assert_eq!(client.extended_reply(4608), (NONE, vec![]));
    client.ask_extended(0, READ, 3584, 1024);
    let data = [&3584_u64.to_be_bytes()[..], &[0; 512], &[7; 512]].concat();
    assert_eq!(client.extended_reply(3584), (DATA, data));
    client.ask_extended(0, BLOCK_STATUS, 0, 1 << 20);
    let status = [4096, 3, 4096, 0, (1 << 20) - 8192, 3].map(u64::to_be_bytes).concat();
    let payload = [&[0, 0, 0, 1, 0, 0, 0, 3], &status[..]].concat();
    assert_eq!(client.extended_reply(0), (6, payload));
    // A command whose data nobody wants: it is skipped.
    client.ask_extended(PAYLOAD_LEN, TRIM, 0, 5000);
    client.0.write_all(&[9; 5000]).expect("data");
    let (kind, _) = client.extended_reply(0);
    assert_eq!(kind, 0x8001);
    for (flags, command, offset, len) in [
        (0, READ, 0, 1 << 40),
        (0, READ, 0, u64::MAX - 511),
        (0, TRIM, 512, u64::MAX - 511),
        (0, BLOCK_STATUS, 0, 1 << 33),
    ] {
        client.ask_extended(flags, command, offset, len);
        let (kind, payload) = client.extended_reply(offset);
        assert!(kind & 0x8000 != 0 && payload[..4] == [0, 0, 0, 22], "{command} {len}");
    }
    client.ask_extended(PAYLOAD_LEN, WRITE, 0, (32 << 20) + 512);
    assert!(client.sees_the_end(), "so much is not even thrown away");
}

#[test]
fn long_requests_are_executed_piece_by_piece() {
    // tests [NB-53]
    let disk = Arc::new(Large(Mutex::default()));
    let served = serve("pieces", disk.clone());
    let mut client = Client::extended(&served);
    let gib = 1 << 30;
    client.ask_extended(1, TRIM, 512, 5 * gib);
    assert_eq!(client.extended_reply(512), (NONE, vec![]));
    let piece = |at: u64, len: u64| (IoOp::Discard, 512 + at, len as u32);
    let pieces = [piece(0, 2 * gib), piece(2 * gib, 2 * gib), piece(4 * gib, gib)];
    let flush = (IoOp::Flush, 0, 0);
    assert_eq!(*disk.0.lock().expect("whole"), [&pieces[..], &[flush]].concat());
    disk.0.lock().expect("whole").clear();
    // The first error ends a request.
    client.ask_extended(0, WRITE_ZEROES, gib, 1 << 40);
    let (kind, payload) = client.extended_reply(gib);
    assert_eq!((kind, &payload[..4]), (0x8001, &[0, 0, 0, 5][..]));
    assert_eq!(disk.0.lock().expect("whole").len(), 3);
    // 512 TiB are more pieces than calls fit a thread's stack.
    client.ask_extended(0, TRIM, 0, 1 << 49);
    assert_eq!(client.extended_reply(0), (NONE, vec![]));
    // And 4 GiB of a compact request are two.
    disk.0.lock().expect("whole").clear();
    let mut client = Client::structured(&served);
    client.ask(0, TRIM, 1, 0, u32::MAX - 511);
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    assert_eq!(disk.0.lock().expect("whole").len(), 2);
}

#[test]
fn zeroes_are_fast_or_refused_at_once() {
    // tests [NB-53]
    let served = serve("fast", memory(1 << 20));
    let mut client = Client::structured(&served);
    client.ask(FAST_ZERO, WRITE_ZEROES, 1, 0, 4096);
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    let no_hole = 1 << 1;
    client.ask(FAST_ZERO | no_hole, WRITE_ZEROES, 2, 0, 4096);
    assert_eq!(client.error(), (2, 95, "not faster than a write".to_owned(), None));
    client.ask(no_hole, WRITE_ZEROES, 3, 0, 4096);
    assert_eq!(client.message(), Message::Simple { cookie: 3, error: 0 });
    let uri = served.uri();
    for feature in ["fast-zero", "cache", "multi-conn"] {
        succeed("nbdinfo", &["--can", feature, &uri]);
    }
    // -n asks for zeroes that are fast, and unmap allows holes.
    let args = [
        "-f",
        "raw",
        &uri,
        "-c",
        "write -P 7 0 64k",
        "-c",
        "write -z -u -n 0 32k",
        "-c",
        "read -P 0 0 32k",
    ];
    if let Some(text) = succeed("qemu-io", &args) {
        assert!(!text.contains("failed"), "{text}");
    }
}

#[test]
fn a_cache_hint_is_checked_and_answered_without_the_disk() {
    // tests [NB-53]
    let served = serve("hint", Arc::new(Failing(Errno::EIO)));
    let mut client = Client::structured(&served);
    client.ask(0, CACHE, 1, 0, 1 << 20);
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    for (flags, offset, len) in [(0, 512, 1 << 20), (0, 1, 512), (FAST_ZERO, 0, 512)] {
        client.ask(flags, CACHE, 2, offset, len);
        assert_eq!(client.error().1, 22);
    }
}

#[test]
fn a_handshake_goes_past_options_that_the_server_does_not_have() {
    // tests [NB-53]
    let served = serve("options", memory(1 << 20));
    let mut client = Client::begin(&served.path);
    let (unsup, invalid, big) = ((1 << 31) + 1, (1 << 31) + 3, (1 << 31) + 9);
    for (number, data, kind) in [
        (5, 0, unsup),
        (5, 1, invalid),
        (4, 0, unsup),
        (1000, 100, unsup),
        (9, 17_000, big),
        (7, 1 << 20, big),
        (11, 1, invalid),
        (7, 5, invalid),
    ] {
        let replies = client.option(number, &vec![0; data]);
        assert_eq!((replies.len(), replies[0].0), (1, kind), "{number} {data}");
        assert!(std::str::from_utf8(&replies[0].1).is_ok_and(|text| !text.is_empty()));
    }
    client.go();
    client.ask(0, READ, 1, 0, 512);
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    let mut endless = Client::begin(&served.path);
    endless.0.write_all(b"IHAVEOPT\0\0\0\x07\0\x10\0\x01").expect("said");
    assert!(endless.sees_the_end(), "more than a mebibyte is not even thrown away");
}

/// Ten thousand requests before the first reply is read: as many as fit are in flight, the others
/// wait in the socket, and each is answered once.
#[test]
fn ten_thousand_requests_are_each_answered_once() {
    let served = serve("flood", memory(1 << 20));
    let mut client = Client::with_status(&served);
    let mut writer = Client(client.0.try_clone().expect("the same socket"));
    let requests = 10_000;
    let sender = std::thread::spawn(move || {
        for cookie in 0..requests {
            let (flags, command, offset, len) = match cookie % 5 {
                0 => (0, READ, 4096, 4096),
                1 => (0, BLOCK_STATUS, 0, 1 << 20),
                2 => (0, READ, 1 << 20, 512),
                3 => (0, 77, 0, 0),
                _ => (FAST_ZERO, WRITE_ZEROES, 8192, 512),
            };
            writer.ask(flags, command, cookie, offset, len);
        }
    });
    // Until the server takes no more.
    until("the client waits for the server", || {
        let mut poll = [rustix::event::PollFd::new(&client.0, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut poll, None).is_ok_and(|ready| ready == 1)
    });
    let mut seen: Vec<u64> = (0..requests)
        .map(|_| match client.message() {
            Message::Simple { cookie, error: 0 } => {
                assert_eq!(cookie % 5, 4);
                cookie
            }
            Message::Chunk { cookie, flags: 1, kind, .. } => {
                let wanted = [DATA, 5, 0x8002, 0x8001][cookie as usize % 5];
                assert_eq!(kind, wanted, "{cookie}");
                cookie
            }
            message => panic!("{message:?}"),
        })
        .collect();
    sender.join().expect("sent");
    seen.sort_unstable();
    assert_eq!(seen, (0..requests).collect::<Vec<_>>());
}

/// A client that hangs up anywhere in a request ends alone: others and the disk continue, and half
/// a write changes nothing.
#[test]
fn a_hang_up_within_a_request_hurts_nobody() {
    let served = serve("half", memory(1 << 20));
    let mut good = Client::with_status(&served);
    let header = |flags: u16, command: u16, len: u64| {
        let mut out = 0x21e4_1c71_u32.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(command.to_be_bytes());
        out.extend([7, 0, len].map(u64::to_be_bytes).concat());
        out
    };
    let write = [header(PAYLOAD_LEN, WRITE, 4096), vec![9; 4096]].concat();
    let refused = [header(PAYLOAD_LEN, TRIM, 50_000), vec![9; 50_000]].concat();
    for whole in [write, refused] {
        for cut in (1..32).chain((32..whole.len()).step_by(997)) {
            let mut client = Client::extended(&served);
            client.0.write_all(&whole[..cut]).expect("said");
            client.0.shutdown(std::net::Shutdown::Write).expect("half closed");
            let mut rest = Vec::new();
            client.0.read_to_end(&mut rest).expect("the end");
            assert_eq!(rest, [0_u8; 0], "no answer to half a request");
        }
    }
    assert_eq!(good.status(0, 0, 1 << 20), [(1 << 20, 3)], "nothing was written");
    drop(good);
    until("no connection stays", || served.server.connections() == 0);
}

#[test]
fn half_a_refused_request_does_not_hold_up_the_end() {
    let mut served = serve("half-end", memory(1 << 20));
    let mut client = Client::structured(&served);
    client.ask(0, WRITE, 1, 1 << 30, 4096);
    client.0.write_all(&[9; 100]).expect("a part of its data");
    served.server.finish();
    until("its connection ends", || served.server.connections() == 0);
}

/// Overlapping writes of four connections at a time: each block has what one of them wrote, and a
/// flush of one connection covers all.
#[test]
fn connections_of_one_client_share_the_disk() {
    // tests [NB-53]
    let served = serve("shared", memory(1 << 20));
    std::thread::scope(|threads| {
        for byte in 1..=4_u8 {
            let served = &served;
            threads.spawn(move || {
                let mut client = Client::structured(served);
                for cookie in 0..200 {
                    let at = cookie % 16 * 512;
                    client.ask(0, WRITE, cookie, at, 4096);
                    client.0.write_all(&[byte; 4096]).expect("data");
                }
                for _ in 0..200 {
                    assert!(matches!(client.message(), Message::Simple { error: 0, .. }));
                }
            });
        }
    });
    let mut client = Client::structured(&served);
    client.ask(0, FLUSH, 1, 0, 0);
    assert_eq!(client.message(), Message::Simple { cookie: 1, error: 0 });
    client.ask(0, READ, 2, 0, 16_384);
    let Message::Chunk { payload, .. } = client.message() else { panic!("no data") };
    for (i, block) in payload[8..].chunks(512).enumerate() {
        let wanted = if i < 15 + 8 { 1..=4 } else { 0..=0 };
        assert!(wanted.contains(&block[0]) && block.iter().all(|b| *b == block[0]), "{i}");
    }
}

/// The client that breaks the protocol is disconnected, counted, and reported.
#[test]
fn a_client_that_breaks_the_protocol_is_counted_and_reported() {
    let served = serve("faults", memory(1 << 20));
    let (send, reasons) = std::sync::mpsc::channel();
    served.server.on_fault(move |why| _ = send.send(why.to_owned()));
    // Clients that leave, one of them in the middle of a request, are no fault.
    let mut leaving = Client::structured(&served);
    leaving.ask(0, WRITE, 1, 0, 4096);
    drop((leaving, Client::begin(&served.path)));
    let mut good = Client::structured(&served);
    good.ask(0, 99, 1, 0, 0);
    good.error();
    until("the others are gone", || served.server.connections() == 1);
    assert_eq!(served.server.faults(), 0);

    let mut noisy = Client::structured(&served);
    noisy.0.write_all(&[0x5a; 28]).expect("noise");
    assert!(noisy.sees_the_end());
    until("it is counted", || served.server.faults() == 1);
    let why = reasons.recv().expect("a reason");
    assert_eq!(why, "disconnected from an NBD client: no request where one should begin");
    let mut greedy = Client::structured(&served);
    greedy.ask(0, WRITE, 1, 0, u32::MAX);
    assert!(greedy.sees_the_end());
    let mut confused = Client::begin(&served.path);
    confused.0.write_all(&[7; 16]).expect("no option");
    assert!(confused.sees_the_end());
    until("both are counted", || served.server.faults() == 3);
    good.ask(0, READ, 2, 0, 512);
    assert!(matches!(good.message(), Message::Chunk { cookie: 2, kind: DATA, .. }));
}
