//! Reads and writes of 4 KiB between two devices in this process, and how many a second there are.
//!
//! ```text
//! cargo run --release -p bowline-rtrs-driver --example rtrs_io -- [DEPTH [SECONDS [PATHS]]]
//! ```

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::{
    Completed, Completer, Done, Permit, PermitKind, Region, Req, Session, SessionBuilder, Wait,
};
use bowline_rtrs_driver::server::{Handler, LinkEv, OpId, Request, Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Errno, MemRef, PORT, RegionId};
use bowline_verbs::{Buffer, Device};

const SIZE: usize = 4096;

/// Answers READs from memory of its own, and copies what WRITEs bring there.
struct Ram {
    memory: Arc<Buffer>,
    region: OnceLock<RegionId>,
    answers: Mutex<Vec<(OpId, i32, Option<MemRef>)>>,
}

impl Handler for Ram {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        for request in requests.drain(..) {
            let from = match request.dir {
                Dir::Read => {
                    self.region.get().map(|&region| MemRef { region, offset: 0, len: request.room })
                }
                Dir::Write => {
                    if let Some(chunk) = server.chunk(&request) {
                        let len = chunk.len.min(self.memory.len());
                        chunk.buffer.copy_to(chunk.offset, &self.memory, 0, len);
                    }
                    None
                }
            };
            answers.push((request.op, 0, from));
        }
        server.respond(&mut answers.drain(..));
    }

    fn link_ev(&self, _: &Server, _: LinkEv) -> Result<(), Errno> {
        Ok(())
    }
}

/// The end of a request begins the next one.
struct Load {
    session: Arc<Session>,
    region: Region,
    permits: Vec<Permit>,
    dir: Dir,
    me: OnceLock<Weak<Load>>,
    left: AtomicU64,
    done: AtomicU64,
}

impl Load {
    fn submit(&self, tags: impl Iterator<Item = u64>) {
        let Some(me) = self.me.get().and_then(Weak::upgrade) else { return };
        for tag in tags {
            if self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
                return;
            }
            let data = [self.region.piece(tag as usize * SIZE, SIZE as u32)];
            let done = Done { to: Arc::clone(&me) as _, tag };
            let permit = &self.permits[tag as usize];
            let request = Req { dir: self.dir, permit, usr: &[0; 32], data: &data, done };
            if let Err(error) = self.session.request_batch(&mut std::iter::once(request)) {
                eprintln!("{error}");
                self.left.store(0, Relaxed);
            }
        }
    }
}

impl Completer for Load {
    fn completed(&self, done: &[Completed]) {
        self.done.fetch_add(done.len() as u64, Relaxed);
        self.submit(done.iter().map(|done| done.tag));
    }
}

fn engine(device: &Arc<SoftDevice>) -> Result<Arc<Engine>, bowline_rtrs_driver::Error> {
    Engine::new(vec![Arc::clone(device) as Arc<dyn Device>], EngineConfig::default())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
    let (depth, seconds, paths) = (number(32)?, number(2)?, number(1)?.clamp(1, 9) as u8);
    let ip = |host: u8| IpAddr::from([127, 80, 0, host]);
    let open = |base: u8| {
        let addrs = (1..=paths).map(|n| ip(base + n)).collect();
        SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).map(Arc::new)
    };
    let (here, there) = (open(0)?, open(100)?);
    for refresh in [false, true] {
        let (client, serving) = (engine(&here)?, engine(&there)?);
        let memory = Arc::new(Buffer::new(1 << 20)?);
        let (region, answers) = (OnceLock::new(), Mutex::default());
        let ram = Arc::new(Ram { memory: Arc::clone(&memory), region, answers });
        let config = ServerConfig { always_invalidate: refresh, ..ServerConfig::default() };
        let at = [SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT)];
        let server = Server::open(&serving, &at, config, Arc::clone(&ram) as _)?;
        ram.region.get_or_init(|| server.add_region(memory).unwrap_or_default());
        let all: Vec<_> = (1..=paths).map(|n| (Some(ip(n)), ip(100 + n))).collect();
        let session = Session::open(&client, SessionBuilder::new("rtrs_io")?.paths(&all))?;
        for dir in [Dir::Read, Dir::Write] {
            let load = Arc::new(Load {
                session: Arc::clone(&session),
                region: session.region(depth as usize * SIZE)?,
                permits: (0..depth)
                    .map_while(|_| session.get_permit(PermitKind::Io, Wait::Forever))
                    .collect(),
                dir,
                me: OnceLock::new(),
                left: AtomicU64::new(u64::MAX),
                done: AtomicU64::new(0),
            });
            load.me.get_or_init(|| Arc::downgrade(&load));
            let start = Instant::now();
            load.submit(0..depth);
            while start.elapsed() < Duration::from_secs(seconds) {
                session.wait(session.ended(), Some(Duration::from_millis(10)));
            }
            let rate = load.done.load(Relaxed) as f64 / start.elapsed().as_secs_f64();
            load.left.store(0, Relaxed);
            while session.inflight() > 0 {
                session.wait(session.ended(), Some(Duration::from_millis(10)));
            }
            println!(
                "{dir:?} depth {depth}, {paths} paths, keys refreshed: {refresh}: {rate:.0} a second"
            );
            let Some(load) = Arc::into_inner(load) else { continue };
            load.permits.into_iter().for_each(|permit| session.put_permit(permit));
        }
        session.close();
        server.close();
    }
    Ok(())
}
