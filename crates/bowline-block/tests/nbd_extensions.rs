//! What clients of the NBD front end negotiate beyond the baseline.

#[path = "common/nbd.rs"]
mod common;

use std::io::Write;
use std::sync::Arc;

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_block::{Errno, IoOp, Limits};

use common::{Client, FLUSH, Message, READ, TRIM, WRITE, memory, serve, succeed};

/// NBD_CMD_FLAG_DF.
const DF: u16 = 1 << 2;
/// NBD_REPLY_TYPE_OFFSET_DATA.
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
