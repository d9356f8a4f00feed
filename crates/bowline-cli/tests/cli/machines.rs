//! Virtual machines whose disk `rnbd map --vhost-user` serves, and ends of that process. The
//! machine is a driver of this test.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::support::{Folder, Running, start};
use guest::{DATA, Guest, IN, Kept, Memory, OUT, Queue};
use vhost::VhostBackend;

#[path = "../../../bowline-block/tests/common/guest.rs"]
mod guest;

/// Longest wait.
const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptors of a ring.
const SIZE: u16 = 16;
const BLOCK: u64 = 4096;

/// A server of a file, and where a client of it serves a machine.
struct Place {
    folder: Folder,
    host: u8,
    image: PathBuf,
    socket: PathBuf,
    memory: Arc<Memory>,
}

impl Place {
    fn new(host: u8) -> Self {
        let folder = Folder::new();
        let [image, socket] = ["image", "machine"].map(|name| folder.path().join(name));
        File::create(&image).expect("a file").set_len(1 << 20).expect("its size");
        Self { folder, host, image, socket, memory: Memory::new() }
    }

    fn export(&self) -> Running {
        let address = format!("127.63.{}.1", self.host);
        let file = format!("disk0={}", self.image.display());
        let words = ["rnbd", "export", "--file", &file, "-I", &address, "--no-control"];
        let mut server = start(&self.folder, &words);
        server.expect(&format!("listening on {address}:"));
        server
    }

    fn map(&self) -> Running {
        let path = format!("127.63.{0}.11@127.63.{0}.1", self.host);
        let socket = self.socket.to_str().expect("a plain path");
        let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", &path, "--no-control"];
        let mut client = start(&self.folder, &[&words[..], &["--vhost-user", socket]].concat());
        client.expect("mapped disk0 ");
        client
    }

    /// Starts a machine with one ring, on which this number of requests was done.
    fn machine(&self, next: u16) -> (Guest, Kept) {
        let mut guest = Guest::connect(&self.socket, &self.memory, 0);
        guest.share();
        let kept = guest.keep(SIZE);
        guest.add_queue_at(SIZE, next);
        (guest, kept)
    }

    /// The machine connects again, with what it had.
    fn machine_again(&self, kept: &Kept, queue: Queue) -> Guest {
        let mut guest = Guest::connect(&self.socket, &self.memory, 0);
        guest.share();
        guest.continue_with(kept);
        guest.resume(queue);
        guest
    }

    fn block(&self, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        let file = File::open(&self.image).expect("the file");
        file.read_exact_at(&mut bytes, number * BLOCK).expect("read");
        bytes
    }
}

fn end(part: Running) {
    part.signal("-TERM");
    part.finish().exits(0);
}

fn kill(part: Running) {
    part.signal("-KILL");
    assert_eq!(part.finish().code, None);
}

/// Waits until the region says of this number of requests that they are in flight.
fn until_in_flight(kept: &Kept, count: usize) {
    let end = Instant::now() + PATIENCE;
    let marked = || {
        let mut region = vec![0; kept.0.mmap_size as usize];
        kept.1.read_exact_at(&mut region, kept.0.mmap_offset).expect("a region");
        (0..usize::from(SIZE)).filter(|head| region[16 + 16 * head] != 0).count()
    };
    while marked() != count {
        assert!(Instant::now() < end, "{count} are in flight");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_machine_sees_no_error_when_its_disk_is_stopped_while_the_server_is_lost() {
    // tests [NB-54] [NB-66]
    let place = Place::new(1);
    let server = place.export();
    let mut client = place.map();
    let (mut guest, kept) = place.machine(0);
    assert_eq!(guest.run(OUT, 0, &[(DATA, 512)]), 0);
    kill(server);
    client.expect("rnbd0 offline");
    place.memory.put(DATA, &[7; BLOCK as usize]);
    guest.queues[0].prepare(0, OUT, 8, &[(DATA, BLOCK as u32)]);
    guest.queues[0].give(&[0]);
    until_in_flight(&kept, 1);
    client.signal("-TERM");
    let done = client.finish().exits(0);
    let line = "rnbd0: what was written was not made durable: its server is not connected; its \
                machine has yet to flush it";
    assert!(done.err.contains(line), "{done:?}");
    assert_eq!((guest.queues[0].used_index(), guest.queues[0].status(0)), (1, 0xff));
    assert!(guest.front.get_features().is_err(), "the machine is disconnected");
    // What it asks for in the meantime waits, too.
    guest.queues[0].prepare(4, IN, 8, &[(DATA + BLOCK, BLOCK as u32)]);
    guest.queues[0].give(&[4]);
    let queue = guest.queues.remove(0);

    let (server, client) = (place.export(), place.map());
    let mut guest = place.machine_again(&kept, queue);
    let mut done = [guest.queues[0].wait().0, guest.queues[0].wait().0];
    done.sort_unstable();
    assert_eq!((done, guest.queues[0].used_index()), ([0, 4], 3));
    assert_eq!((guest.queues[0].status(0), guest.queues[0].status(4)), (0, 0));
    assert_eq!(place.block(1), [7; BLOCK as usize]);
    end(client);
    end(server);
}

#[test]
fn a_request_in_the_first_slot_is_done_once_when_its_server_is_killed() {
    // tests [NB-66]
    let place = Place::new(2);
    let server = place.export();
    let mut client = place.map();
    // The first request has the number 65535, the next 0, and so on.
    let (mut guest, kept) = place.machine(u16::MAX);
    for round in 0..3_u16 {
        // The server of the disk is stopped, so that the request stays in flight.
        server.signal("-STOP");
        let data = vec![round as u8 + 1; BLOCK as usize];
        place.memory.put(DATA, &data);
        guest.queues[0].prepare(0, OUT, u64::from(round) * 8, &[(DATA, BLOCK as u32)]);
        guest.queues[0].give(&[0]);
        until_in_flight(&kept, 1);
        kill(client);
        let used = u16::MAX.wrapping_add(round);
        assert_eq!((guest.queues[0].used_index(), guest.queues[0].status(0)), (used, 0xff));
        let queue = guest.queues.remove(0);
        server.signal("-CONT");

        client = place.map();
        guest = place.machine_again(&kept, queue);
        assert_eq!(guest.queues[0].wait().0, 0);
        assert_eq!(guest.queues[0].status(0), 0);
        assert_eq!(place.block(round.into()), data, "nothing is lost");
        until_in_flight(&kept, 0);
        // An answer shows that the rings were looked at: nothing is done twice.
        guest.config();
        assert_eq!(guest.queues[0].used_index(), used.wrapping_add(1));
        assert_eq!(guest.queues[0].take_used(), None);
    }
    end(client);
    end(server);
}
