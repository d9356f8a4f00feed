//! Servers of NBD that another one continues: whatever their clients have negotiated.

#[path = "common/nbd.rs"]
mod common;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_block::front::nbd::{self, Handed, HandedClient, NbdOptions, NbdServer};
use bowline_block::{IoOp, Limits, LocalDevice};

use common::{Client, DISC, Message, READ, Served, WRITE, WRITE_ZEROES, memory, serve, until};

/// NBD_CMD_FLAG_FUA and NBD_CMD_FLAG_PAYLOAD_LEN.
const FUA: u16 = 1;
const PAYLOAD_LEN: u16 = 1 << 5;
/// Number and length of reads that a connection has memory for. A socket does not hold the answers.
const FEW: (u64, u32) = (7, 4 << 20);
/// Reads that wait for memory while the client does not take the answers.
const MANY: (u64, u32) = (24, LONG);
const LONG: u32 = 1 << 20;
/// Longer than any pause may take because of a client.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Lets another server continue with a disk of the same store.
fn replaced(served: Served, store: Arc<dyn Backend>) -> Served {
    let Served { server, path } = served;
    server.pause();
    until("it is paused", || server.is_paused());
    let handed = server.hand_over();
    let server = resumed(&path, store, handed);
    server.unpause();
    Served { server, path }
}

fn resumed(path: &Path, store: Arc<dyn Backend>, handed: Handed) -> NbdServer {
    let disk = LocalDevice::new("disk", store);
    nbd::resume(disk, path, NbdOptions::default(), handed).expect("resumed")
}

/// Copies, as another process has them.
fn copied(handed: &Handed) -> Handed {
    let copy = |client: &HandedClient| HandedClient {
        socket: Arc::new(client.socket.try_clone().expect("a copy")),
        session: client.session,
        unread: client.unread.clone(),
        unsent: client.unsent.clone(),
    };
    let listener = Arc::new(handed.listener.try_clone().expect("a copy"));
    Handed { listener, clients: handed.clients.iter().map(copy).collect() }
}

/// Waits until the server has received all that the client has sent.
fn until_received(client: &Client) {
    let is_received = || {
        let mut left: libc::c_int = 0;
        // SAFETY: this command writes one number there.
        let done = unsafe { libc::ioctl(client.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
        assert_eq!(done, 0);
        left == 0
    };
    until("all is received", is_received);
}

/// Asks for more than the socket holds.
fn ask_much(client: &mut Client, (count, len): (u64, u32)) {
    for cookie in 0..count {
        client.ask(0, READ, cookie, 0, len);
    }
}

/// Reads the answers to these requests.
fn get_much(client: &mut Client, (count, len): (u64, u32)) {
    let mut seen = BTreeSet::new();
    for _ in 0..count {
        let Message::Simple { cookie, error: 0 } = client.message() else { panic!("an error") };
        assert!(seen.insert(cookie), "{cookie} is answered twice");
        client.get(len as usize);
    }
}

fn extended_header(flags: u16, command: u16, offset: u64, len: u64) -> Vec<u8> {
    let mut out = 0x21e4_1c71_u32.to_be_bytes().to_vec();
    out.extend(flags.to_be_bytes());
    out.extend(command.to_be_bytes());
    out.extend([7, offset, len].map(u64::to_be_bytes).concat());
    out
}

#[test]
fn what_a_client_has_negotiated_goes_along() {
    // tests [NB-70]
    let store = memory(1 << 20);
    let mut served = serve("handed", Arc::clone(&store));
    let mut simple = Client::begin(&served.path);
    simple.go();
    let mut structured = Client::structured(&served);
    let mut with_status = Client::with_status(&served);
    // Requests that are sent in pieces: one is cut in its header, behind the length of the shorter
    // headers, one in its data.
    let write = [extended_header(PAYLOAD_LEN, WRITE, 4096, 4096), vec![9; 4096]].concat();
    let mut pieces = [30, 32 + 1000].map(|cut| {
        let mut client = Client::extended(&served);
        client.0.write_all(&write[..cut]).expect("the first piece");
        (client, cut)
    });
    for _ in 0..2 {
        served = replaced(served, Arc::clone(&store));
        simple.ask(0, READ, 1, 0, 512);
        assert_eq!(simple.message(), Message::Simple { cookie: 1, error: 0 });
        assert_eq!(simple.get(512), [0; 512]);
        structured.ask(0, READ, 2, 512, 512);
        let payload = [&512_u64.to_be_bytes()[..], &[0; 512]].concat();
        assert_eq!(structured.message(), Message::Chunk { cookie: 2, flags: 1, kind: 1, payload });
        assert_eq!(with_status.status(0, 0, 1 << 20), [(1 << 20, 3)], "a hole");
    }
    for (client, cut) in &mut pieces {
        client.0.write_all(&write[*cut..]).expect("the rest");
        assert_eq!(client.extended_reply(4096), (0, vec![]));
        client.ask_extended(0, READ, 4096, 4096);
        let (kind, data) = client.extended_reply(4096);
        assert!(kind == 1 && data[8..] == [9; 4096]);
    }
    assert_eq!(served.server.connections(), 5);
    assert_eq!(served.server.faults(), 0);
}

type Asked = (BackendIo, Arc<dyn BackendDone>);

/// A large disk whose requests are answered by the test.
#[derive(Default)]
struct Slow(Mutex<Vec<Asked>>);

impl Backend for Slow {
    fn limits(&self) -> Limits {
        let bytes = 1 << 40;
        Limits { write_cache: true, max_write_zeroes: !511, ..Limits::plain(bytes) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        self.0.lock().unwrap().extend(io.drain(..).map(|io| (io, Arc::clone(done))));
    }
}

#[test]
fn a_request_of_several_pieces_is_ended_before() {
    // tests [NB-70]
    let slow = Arc::new(Slow::default());
    let served = serve("long", Arc::<Slow>::clone(&slow));
    let mut client = Client::extended(&served);
    client.ask_extended(FUA, WRITE_ZEROES, 0, 5 << 30);
    until("it has begun", || slow.0.lock().unwrap().len() == 1);
    served.server.pause();
    let mut done = Vec::new();
    while done.len() < 4 {
        until("the next piece is there", || slow.0.lock().unwrap().len() == 1);
        assert!(!served.server.is_paused(), "after {done:?}");
        let (io, to) = slow.0.lock().unwrap().remove(0);
        done.push((io.op, io.offset));
        to.done(&[BackendResult::new(io.token, Ok(()))]);
    }
    let zeroes = [0, 2 << 30, 4 << 30].map(|offset| (IoOp::WriteZeroes, offset));
    assert_eq!(done, [&zeroes[..], &[(IoOp::Flush, 0)]].concat());
    let _served = replaced(served, Arc::<Slow>::clone(&slow));
    assert_eq!(client.extended_reply(0), (0, vec![]));
    assert!(slow.0.lock().unwrap().is_empty(), "nothing is executed twice");
}

#[test]
fn a_server_that_is_resumed_touches_nothing_before_it_begins() {
    // tests [NB-70]
    let store = memory(4 << 20);
    let served = serve("unbegun", Arc::clone(&store));
    let mut slow = Client::begin(&served.path);
    slow.go();
    ask_much(&mut slow, MANY);
    let mut half = Client::extended(&served);
    let write = [extended_header(PAYLOAD_LEN, WRITE, 4096, 4096), vec![9; 4096]].concat();
    half.0.write_all(&write[..1000]).expect("half a request");
    let mut asks = Client::structured(&served);
    let Served { server, path } = served;
    server.pause();
    until("it is paused", || server.is_paused());
    let handed = server.hand_over();
    assert!(handed.clients.iter().any(|client| !client.unsent.is_empty()));
    half.0.write_all(&write[1000..]).expect("the rest");
    asks.ask(0, READ, 5, 0, 512);
    let mut comes = UnixStream::connect(&path).expect("it listens");
    // Processes that fail before they begin.
    for _ in 0..3 {
        let server = resumed(&path, Arc::clone(&store), copied(&handed));
        for silent in [&mut comes, &mut asks.0, &mut half.0] {
            silent.set_read_timeout(Some(Duration::from_millis(20))).expect("a limit");
            let nothing = silent.read(&mut [0; 1]).map_err(|error| error.kind());
            assert_eq!(nothing, Err(std::io::ErrorKind::WouldBlock));
        }
        drop(server);
        assert!(path.exists());
    }
    for client in [&comes, &asks.0, &half.0] {
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    }
    let server = resumed(&path, Arc::clone(&store), handed);
    server.unpause();
    get_much(&mut slow, MANY);
    assert_eq!(half.extended_reply(4096), (0, vec![]));
    assert!(matches!(asks.message(), Message::Chunk { cookie: 5, .. }));
    comes.read_exact(&mut [0; 18]).expect("a greeting");
    drop(server);
    assert!(!path.exists());
    assert!(asks.sees_the_end());
}

/// What was answered and not read before the hand-over is part of the requests that are answered
/// before the end.
#[test]
fn inherited_replies_are_sent_before_a_connection_ends() {
    // tests [NB-70]
    for by_client in [true, false] {
        let store = memory(4 << 20);
        let Served { server, path } = serve("goodbye", Arc::clone(&store));
        let mut client = Client::begin(&path);
        client.go();
        ask_much(&mut client, FEW);
        until_received(&client);
        server.pause();
        until("it is paused", || server.is_paused());
        let handed = server.hand_over();
        if by_client {
            client.ask(0, DISC, 0, 0, 0);
        }
        let mut server = resumed(&path, store, handed);
        server.unpause();
        if !by_client {
            server.finish();
        }
        get_much(&mut client, FEW);
        assert!(client.sees_the_end());
    }
}

/// Pauses a server while `client` does what it does, and resumes it.
fn paused_in_time(served: Served, store: Arc<dyn Backend>) -> Served {
    served.server.pause();
    let begun = Instant::now();
    until("it is paused", || served.server.is_paused());
    assert!(begun.elapsed() < PAUSE_MAX, "after {:?}", begun.elapsed());
    replaced(served, store)
}

/// Sends bytes one by one until it is stopped, or the other end is closed; then the rest.
fn drip(socket: &mut UnixStream, bytes: &[u8], stop: &AtomicBool) -> std::io::Result<()> {
    for (at, byte) in bytes.iter().enumerate() {
        if stop.load(Ordering::SeqCst) {
            return socket.write_all(&bytes[at..]);
        }
        socket.write_all(&[*byte])?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

#[test]
fn a_client_that_sends_its_data_bit_by_bit_delays_no_pause() {
    // tests [NB-70]
    let store = memory(4 << 20);
    let mut served = serve("drips", Arc::clone(&store));
    let mut client = Client::begin(&served.path);
    client.go();
    let data: Vec<u8> = (0..LONG).map(|n| n as u8).collect();
    client.ask(0, WRITE, 8, 0, LONG);
    let stop = AtomicBool::new(false);
    let mut socket = client.0.try_clone().expect("a copy");
    let _served = std::thread::scope(|threads| {
        let sends = threads.spawn(|| drip(&mut socket, &data, &stop));
        for _ in 0..3 {
            served = paused_in_time(served, Arc::clone(&store));
        }
        stop.store(true, Ordering::SeqCst);
        sends.join().unwrap().expect("sent");
        served
    });
    assert_eq!(client.message(), Message::Simple { cookie: 8, error: 0 });
    client.ask(0, READ, 9, 0, LONG);
    assert_eq!(client.message(), Message::Simple { cookie: 9, error: 0 });
    assert!(client.get(LONG as usize) == data);
}

#[test]
fn a_client_whose_refused_data_does_not_end_is_disconnected_alone() {
    // tests [NB-70]
    let store = memory(1 << 20);
    let served = serve("refused", Arc::clone(&store));
    let (reports, faults) = channel();
    let report_to = |served: &Served, reports: &Sender<String>| {
        let reports = reports.clone();
        served.server.on_fault(move |why| reports.send(why.to_owned()).expect("somebody listens"));
    };
    report_to(&served, &reports);
    let mut other = Client::structured(&served);
    let mut client = Client::begin(&served.path);
    client.go();
    client.ask(0, WRITE, 8, 1 << 30, LONG);
    let stop = AtomicBool::new(false);
    let mut socket = client.0.try_clone().expect("a copy");
    let _served = std::thread::scope(|threads| {
        let sends = threads.spawn(|| drip(&mut socket, &[0; 100_000], &stop));
        // The first pause may come before the request has begun.
        let mut served = served;
        while !sends.is_finished() {
            served = paused_in_time(served, Arc::clone(&store));
            report_to(&served, &reports);
        }
        sends.join().unwrap().expect_err("nobody reads it");
        served
    });
    assert!(client.sees_the_end());
    let why = faults.recv().expect("a reason");
    assert!(why.contains("the rest of a refused request"), "{why}");
    other.ask(0, READ, 5, 0, 512);
    assert!(matches!(other.message(), Message::Chunk { cookie: 5, .. }));
}

#[test]
fn a_client_that_has_said_goodbye_and_does_not_read_delays_no_pause() {
    // tests [NB-70]
    let store = memory(4 << 20);
    let mut served = serve("bye", Arc::clone(&store));
    let mut client = Client::begin(&served.path);
    client.go();
    ask_much(&mut client, FEW);
    client.ask(0, DISC, 0, 0, 0);
    until_received(&client);
    for _ in 0..2 {
        served = paused_in_time(served, Arc::clone(&store));
    }
    get_much(&mut client, FEW);
    assert!(client.sees_the_end());
}

/// The pause ends just when a request that waits for memory is to be taken back.
#[test]
fn a_request_that_waits_for_memory_survives_the_end_of_a_pause() {
    // tests [NB-70]
    let store = memory(4 << 20);
    let served = serve("full", Arc::clone(&store));
    let mut client = Client::begin(&served.path);
    client.go();
    ask_much(&mut client, MANY);
    for _ in 0..20_000 {
        served.server.pause();
        served.server.unpause();
    }
    get_much(&mut client, MANY);
    assert_eq!(served.server.faults(), 0);
}
