//! An NBD client that negotiates, and servers for it.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_block::LocalDevice;
use bowline_block::backend::{self, Backend, BackendSpec};
use bowline_block::front::nbd::{self, NbdOptions, NbdServer};
use bowline_testkit::skipped;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISC: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const CACHE: u16 = 5;
pub(crate) const WRITE_ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

pub(crate) const LIST_META_CONTEXT: u32 = 9;
pub(crate) const SET_META_CONTEXT: u32 = 10;

/// A server at a socket of its own.
pub(crate) struct Served {
    pub(crate) server: NbdServer,
    pub(crate) path: PathBuf,
}

pub(crate) fn serve(name: &str, backend: Arc<dyn Backend>) -> Served {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}.sock", std::process::id()));
    let disk = LocalDevice::new("disk", backend);
    let server = nbd::serve(disk, &path, NbdOptions::default()).expect("served");
    Served { server, path }
}

impl Served {
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path.display())
    }
}

pub(crate) fn memory(bytes: u64) -> Arc<dyn Backend> {
    backend::open(BackendSpec::Memory { bytes, block: 512 }).expect("memory")
}

/// Runs a client for at most a minute and returns what it printed; `None` when it is not installed.
pub(crate) fn succeed(program: &str, args: &[&str]) -> Option<String> {
    let out = Command::new("timeout").arg("60").arg(program).args(args).output().ok()?;
    if out.status.code() == Some(127) {
        skipped::without(program);
        return None;
    }
    let text = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(out.status.success(), "{program} {args:?}: {text}");
    Some(text)
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, so: impl Fn() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A reply, or a chunk of one.
#[derive(Debug, Eq, PartialEq)]
pub(crate) enum Message {
    Extended { cookie: u64, flags: u16, kind: u16, offset: u64, payload: Vec<u8> },
    Simple { cookie: u64, error: u32 },
    Chunk { cookie: u64, flags: u16, kind: u16, payload: Vec<u8> },
}

/// A hand-made client.
pub(crate) struct Client(pub(crate) UnixStream);

impl Client {
    /// Connects and takes the greeting; options follow.
    pub(crate) fn begin(path: &Path) -> Self {
        let mut client = Self(UnixStream::connect(path).expect("connected"));
        client.0.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
        client.get(18);
        client.0.write_all(&3_u32.to_be_bytes()).expect("flags");
        client
    }

    /// Connects and negotiates structured replies.
    pub(crate) fn structured(served: &Served) -> Self {
        let mut client = Self::begin(&served.path);
        assert_eq!(client.option(8, b""), [(1, vec![])]);
        client.go();
        client
    }

    pub(crate) fn get(&mut self, n: usize) -> Vec<u8> {
        let mut out = vec![0; n];
        self.0.read_exact(&mut out).expect("an answer");
        out
    }

    pub(crate) fn sees_the_end(mut self) -> bool {
        matches!(self.0.read(&mut [0; 1]), Ok(0) | Err(_))
    }

    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.get(2).try_into().expect("2 bytes"))
    }

    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.get(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.get(8).try_into().expect("8 bytes"))
    }

    /// Sends an option; returns type and data of its replies.
    pub(crate) fn option(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut out = b"IHAVEOPT".to_vec();
        out.extend(number.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        self.0.write_all(&out).expect("an option");
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.u64(), 0x0003_e889_0455_65a9);
            assert_eq!(self.u32(), number);
            let (kind, len) = (self.u32(), self.u32());
            replies.push((kind, self.get(len as usize)));
            if kind == 1 || kind & 1 << 31 != 0 {
                return replies;
            }
        }
    }

    /// Ends the negotiation; returns the transmission flags.
    pub(crate) fn go(&mut self) -> u16 {
        let replies = self.option(7, &[0; 6]);
        assert_eq!(replies.last(), Some(&(1, vec![])));
        let export = replies.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]);
        let (_, export) = export.expect("NBD_INFO_EXPORT");
        u16::from_be_bytes(export[10..12].try_into().expect("2 bytes"))
    }

    /// NBD_OPT_LIST_META_CONTEXT or NBD_OPT_SET_META_CONTEXT, whose replies it returns.
    pub(crate) fn contexts(
        &mut self,
        number: u32,
        export: &str,
        queries: &[&str],
    ) -> Vec<(u32, Vec<u8>)> {
        let string = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
        let mut data = string(export);
        data.extend((queries.len() as u32).to_be_bytes());
        data.extend(queries.iter().flat_map(|query| string(query)));
        self.option(number, &data)
    }

    /// Connects, and selects `base:allocation`.
    pub(crate) fn with_status(served: &Served) -> Self {
        let mut client = Self::begin(&served.path);
        assert_eq!(client.option(8, b""), [(1, vec![])]);
        let selected = client.contexts(SET_META_CONTEXT, "disk", &["base:allocation"]);
        assert_eq!(selected, [(4, b"\0\0\0\x01base:allocation".to_vec()), (1, vec![])]);
        client.go();
        client
    }

    /// Asks for the status of a range; returns length and state of each extent.
    pub(crate) fn status(&mut self, flags: u16, offset: u64, len: u32) -> Vec<(u32, u32)> {
        self.ask(flags, BLOCK_STATUS, 5, offset, len);
        let message = self.message();
        let Message::Chunk { cookie: 5, flags: 1, kind: 5, payload } = message else {
            panic!("no status: {message:?}");
        };
        assert_eq!(payload[..4], [0, 0, 0, 1]);
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("4 bytes"));
        let pairs = payload[4..].chunks(8);
        pairs.map(|pair| (number(&pair[..4]), number(&pair[4..]))).collect()
    }

    pub(crate) fn ask(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        let mut out = 0x2560_9513_u32.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(command.to_be_bytes());
        out.extend(cookie.to_be_bytes());
        out.extend(offset.to_be_bytes());
        out.extend(len.to_be_bytes());
        self.0.write_all(&out).expect("asked");
    }

    /// Connects, and negotiates extended headers and `base:allocation`.
    pub(crate) fn extended(served: &Served) -> Self {
        let mut client = Self::begin(&served.path);
        assert_eq!(client.option(11, b""), [(1, vec![])]);
        let selected = client.contexts(SET_META_CONTEXT, "disk", &["base:allocation"]);
        assert_eq!(selected.len(), 2);
        client.go();
        client
    }

    pub(crate) fn ask_extended(&mut self, flags: u16, command: u16, offset: u64, len: u64) {
        let mut out = 0x21e4_1c71_u32.to_be_bytes().to_vec();
        out.extend(flags.to_be_bytes());
        out.extend(command.to_be_bytes());
        out.extend([7, offset, len].map(u64::to_be_bytes).concat());
        self.0.write_all(&out).expect("asked");
    }

    /// Type and payload of the next reply, which is an extended chunk for a request at `offset`.
    pub(crate) fn extended_reply(&mut self, offset: u64) -> (u16, Vec<u8>) {
        match self.message() {
            Message::Extended { cookie: 7, flags: 1, kind, offset: at, payload } => {
                assert_eq!(at, offset);
                (kind, payload)
            }
            message => panic!("no extended reply: {message:?}"),
        }
    }

    pub(crate) fn message(&mut self) -> Message {
        match self.u32() {
            0x6744_6698 => Message::Simple { error: self.u32(), cookie: self.u64() },
            0x668e_33ef => {
                let (flags, kind, cookie) = (self.u16(), self.u16(), self.u64());
                let len = self.u32();
                Message::Chunk { cookie, flags, kind, payload: self.get(len as usize) }
            }
            0x6e8a_278c => {
                let (flags, kind, cookie) = (self.u16(), self.u16(), self.u64());
                let (offset, len) = (self.u64(), self.u64());
                let payload = self.get(len as usize);
                Message::Extended { cookie, flags, kind, offset, payload }
            }
            magic => panic!("{magic:#x} begins no reply"),
        }
    }

    /// The next reply, which is an error chunk: its cookie, error, text and offset.
    pub(crate) fn error(&mut self) -> (u64, u32, String, Option<u64>) {
        let message = self.message();
        let Message::Chunk { cookie, flags: 1, kind, payload } = message else {
            panic!("no error chunk: {message:?}");
        };
        let error = u32::from_be_bytes(payload[..4].try_into().expect("4 bytes"));
        let len = usize::from(u16::from_be_bytes(payload[4..6].try_into().expect("2 bytes")));
        let (text, rest) = payload[6..].split_at(len);
        let at = match kind {
            0x8001 => None,
            0x8002 => Some(u64::from_be_bytes(rest.try_into().expect("8 bytes"))),
            kind => panic!("chunk of type {kind}"),
        };
        assert!(kind == 0x8002 || rest.is_empty());
        (cookie, error, String::from_utf8(text.to_vec()).expect("UTF-8"), at)
    }
}
