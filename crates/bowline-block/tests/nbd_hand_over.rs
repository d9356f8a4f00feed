//! Servers of NBD that another one continues: whatever their clients have negotiated.

#[path = "common/nbd.rs"]
mod common;

use std::io::Write;
use std::sync::{Arc, Mutex};

use bowline_block::backend::{Backend, BackendDone, BackendIo, BackendResult};
use bowline_block::front::nbd::{self, NbdOptions};
use bowline_block::{IoOp, Limits, LocalDevice};

use common::{Client, Message, READ, Served, WRITE, WRITE_ZEROES, memory, serve, until};

/// NBD_CMD_FLAG_FUA and NBD_CMD_FLAG_PAYLOAD_LEN.
const FUA: u16 = 1;
const PAYLOAD_LEN: u16 = 1 << 5;

/// Lets another server continue with a disk of the same store.
fn replaced(served: Served, store: Arc<dyn Backend>) -> Served {
    let Served { server, path } = served;
    server.pause();
    until("it is paused", || server.is_paused());
    let handed = server.hand_over().expect("handed over");
    let disk = LocalDevice::new("disk", store);
    let server = nbd::resume(disk, &path, NbdOptions::default(), handed).expect("resumed");
    Served { server, path }
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
