//! A disk over two paths with 32 requests in flight, while one of the paths is lost and comes back.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use bowline::block::{BlockDevice, DiskDone, DiskIo};
use bowline::rnbd::{Client, ExportServer, Exports, MapOptions, Outage, ServerConfig};
use bowline::rtrs::client::{PathEv, PathState};
use bowline::rtrs::{Engine, EngineConfig, PORT};
use bowline::verbs::{GiveUp, RoceConfig, SoftConfig, SoftDevice};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Bytes of a request.
const LEN: usize = 4096;
/// Requests in flight.
const DEPTH: usize = 32;
const DISK_LEN: u64 = 16 << 20;

/// Gives the results of requests to the thread that waits for them: the tag of each, and 0 or a
/// negative errno.
struct Results(Sender<(u64, i32)>);

impl DiskDone for Results {
    fn done(&self, results: &[(u64, i32)]) {
        for result in results {
            // The receiver may have ended after an error.
            let _ = self.0.send(*result);
        }
    }
}

/// Reads until `done` says that it is enough; returns how many requests were answered.
fn read(disk: &dyn BlockDevice, mut done: impl FnMut() -> bool) -> Result<u64> {
    // Registered once: each request in flight has a part of it, and the part's number as its tag.
    let mem = disk.memory(DEPTH * LEN)?;
    let (send, results) = channel();
    let to: Arc<dyn DiskDone> = Arc::new(Results(send));
    let mut next = 0;
    let mut request = |tag: usize| {
        let offset = (next * LEN as u64) % DISK_LEN;
        next += 1;
        DiskIo::read(offset, &mem, tag * LEN..(tag + 1) * LEN, to.clone()).tag(tag as u64)
    };
    let mut batch: Vec<DiskIo> = (0..DEPTH).map(&mut request).collect();
    disk.submit(&mut batch);
    let (mut in_flight, mut answered) = (DEPTH, 0);
    while in_flight > 0 {
        let (tag, errno) = results.recv_timeout(Duration::from_secs(10))?;
        if errno != 0 {
            return Err(format!("a read failed with error {}", -errno).into());
        }
        (in_flight, answered) = (in_flight - 1, answered + 1);
        if !done() {
            batch.push(request(tag as usize));
            disk.submit(&mut batch);
            in_flight += 1;
        }
    }
    Ok(answered)
}

fn main() -> Result<()> {
    // Two machines with two networks, usually; here all are this process.
    let here: [IpAddr; 2] = [[127, 77, 15, 1].into(), [127, 77, 15, 3].into()];
    let there: [IpAddr; 2] = [[127, 77, 15, 2].into(), [127, 77, 15, 4].into()];

    let mut exports = Exports::new();
    exports.memory("disk0", DISK_LEN, 512)?;
    let places = there.map(|address| (address, PORT).into());
    let far = Engine::soft(there)?;
    let server = ExportServer::open(&far, &places, ServerConfig::default(), exports)?;

    // `Engine::soft` would do. This one has the device at hand, to cut a path below, and takes a
    // path for lost after half a second of silence, where 3.8 seconds are the default.
    let core =
        RoceConfig { give_up: GiveUp::After(Duration::from_millis(500)), ..RoceConfig::default() };
    let config = SoftConfig { addrs: here.to_vec(), core, ..SoftConfig::default() };
    let device = Arc::new(SoftDevice::open(config)?);
    let near = Engine::new(vec![device.clone()], EngineConfig::default())?;

    let (sender, events) = channel();
    let options = MapOptions::new("example")
        .paths(here.into_iter().zip(there))
        // Where both paths are lost, requests wait for half a minute before they fail.
        .outage(Outage::Queue(Duration::from_secs(30)))
        .on_path(move |_session, event| {
            let _ = sender.send(event);
        });
    let client = Client::new(near, options);
    let disk = client.map("disk0")?;
    let session = client.session("example").ok_or("the disk has a session")?;
    let connected =
        || session.paths().iter().filter(|path| path.state == PathState::Connected).count();

    // What a pulled cable does.
    device.cut(here[0], None, true);
    let start = Instant::now();
    let answered = read(&*disk, || connected() == 1 || start.elapsed() > Duration::from_secs(8))?;
    println!("{answered} reads, without an error, until the path counted as lost");
    assert_eq!(connected(), 1);

    // It comes back by itself.
    device.cut(here[0], None, false);
    let start = Instant::now();
    let answered = read(&*disk, || connected() == 2 || start.elapsed() > Duration::from_secs(8))?;
    println!("{answered} reads until it was back");
    assert_eq!(connected(), 2);
    events.try_iter().for_each(|event: PathEv| println!("{event:?}"));

    client.close();
    server.close();
    Ok(())
}
