//! A client and a server in one process, each with a device and an engine of its own.
#![allow(dead_code, reason = "not every test uses all of it")]

/// Functions of a device that are another's, which is this field.
macro_rules! as_ever {
    ($field:tt: $(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($arg: $type),*) -> $result {
            self.$field.$name($($arg),*)
        })*
    };
}

pub(crate) mod drowsy;
pub(crate) mod frail;
pub(crate) mod load;
pub(crate) mod tasks;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bowline_roce::{Config, GiveUp};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::client::{PermitKind, Region, Session, SessionBuilder, Wait};
use bowline_rtrs_driver::server::{self, Handler, LinkEv, Request, Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Errno, PORT, RegionId};
use bowline_verbs::{Buffer, Device};

/// Longest wait of a test, on the slowest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of the store.
pub(crate) const STORE: usize = 4 << 20;

/// Opens a device with these addresses.
pub(crate) fn device(addrs: &[IpAddr]) -> Arc<SoftDevice> {
    device_with(SoftConfig { addrs: addrs.to_vec(), ..SoftConfig::default() })
}

pub(crate) fn device_with(config: SoftConfig) -> Arc<SoftDevice> {
    Arc::new(SoftDevice::open(config).unwrap())
}

/// Gives up a silent peer after a second. A machine that stalls this long loses all paths.
pub(crate) fn hasty(soft: SoftConfig) -> SoftConfig {
    let core = Config { give_up: GiveUp::After(Duration::from_secs(1)), ..Config::default() };
    SoftConfig { core, ..soft }
}

/// Addresses of a test, `127.79.net.*`, so that tests can run at once.
pub(crate) fn ip(net: u8, host: u8) -> IpAddr {
    IpAddr::from([127, 79, net, host])
}

/// The user message of the tests: an offset in the store, in 8 bytes.
pub(crate) fn at(offset: usize) -> [u8; 8] {
    (offset as u64).to_le_bytes()
}

/// A store: keeps written data, and answers reads from it.
pub(crate) struct Store {
    pub(crate) memory: Arc<Buffer>,
    /// The store as memory registered at the server, if it is: READs are then answered from here,
    /// not from the chunk.
    pub(crate) region: Mutex<Option<RegionId>>,
    pub(crate) links: Mutex<Vec<LinkEv>>,
    pub(crate) served: AtomicU64,
    /// Refuse sessions.
    pub(crate) refuse: bool,
    answers: Mutex<Vec<(server::OpId, i32, Option<bowline_rtrs_driver::MemRef>)>>,
}

impl Store {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self::unshared())
    }

    pub(crate) fn unshared() -> Self {
        Self {
            memory: Arc::new(Buffer::new(STORE).unwrap()),
            region: Mutex::default(),
            links: Mutex::default(),
            served: AtomicU64::new(0),
            refuse: false,
            answers: Mutex::default(),
        }
    }

    fn serve(&self, server: &Server, request: &Request) -> Result<Option<usize>, Errno> {
        let offset: [u8; 8] = (*request.usr).try_into().map_err(|_| Errno::EINVAL)?;
        let offset = u64::from_le_bytes(offset) as usize;
        let chunk = server.chunk(request).ok_or(Errno::EIO)?;
        let len = if request.dir == Dir::Read { request.room as usize } else { chunk.len };
        if offset.checked_add(len).is_none_or(|end| end > STORE) {
            return Err(Errno::EIO);
        }
        match request.dir {
            Dir::Write => chunk.buffer.copy_to(chunk.offset, &self.memory, offset, len),
            Dir::Read if self.region.lock().unwrap().is_some() => return Ok(Some(offset)),
            Dir::Read => self.memory.copy_to(offset, &chunk.buffer, chunk.offset, len),
        }
        Ok(None)
    }
}

impl Handler for Store {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        let region = *self.region.lock().unwrap();
        let mut answers = self.answers.lock().unwrap();
        for request in requests.drain(..) {
            self.served.fetch_add(1, SeqCst);
            let (errno, from) = match self.serve(server, &request) {
                Ok(from) => (0, from),
                Err(errno) => (errno.neg(), None),
            };
            let from = from.zip(region).map(|(offset, region)| bowline_rtrs_driver::MemRef {
                region,
                offset: offset as u64,
                len: request.room,
            });
            answers.push((request.op, errno, from));
        }
        server.respond(&mut answers.drain(..));
    }

    fn link_ev(&self, _: &Server, event: LinkEv) -> Result<(), Errno> {
        self.links.lock().unwrap().push(event);
        if self.refuse { Err(Errno::EPERM) } else { Ok(()) }
    }
}

/// Answers no request until it is told to; reads return bytes of 9.
#[derive(Default)]
pub(crate) struct Slow(pub(crate) Mutex<Vec<Request>>);

impl Slow {
    pub(crate) fn asked(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// The only request it has.
    pub(crate) fn one(&self) -> Request {
        eventually("a request comes", || self.asked() == 1);
        self.0.lock().unwrap().pop().unwrap()
    }

    pub(crate) fn answer(&self, server: &Server) {
        for request in std::mem::take(&mut *self.0.lock().unwrap()) {
            let chunk = server.chunk(&request).unwrap();
            chunk.buffer.write(chunk.offset, &vec![9; request.room as usize]);
            server.respond(&mut std::iter::once((request.op, 0, None)));
        }
    }
}

impl Handler for Slow {
    fn rdma_ev(&self, _: &Server, requests: &mut Vec<Request>) {
        self.0.lock().unwrap().append(requests);
    }

    fn link_ev(&self, _: &Server, _: LinkEv) -> Result<(), Errno> {
        Ok(())
    }
}

/// A server with what it runs on.
pub(crate) struct Far {
    pub(crate) server: Arc<Server>,
    _engine: Arc<Engine>,
    pub(crate) device: Arc<SoftDevice>,
}

/// Opens a server with default settings on hosts 101 and 102 of a net.
pub(crate) fn far(net: u8, handler: Arc<dyn Handler>) -> Far {
    let device = device(&[ip(net, 101), ip(net, 102)]);
    let engine = engine(&device);
    Far { server: serve(&engine, handler), _engine: engine, device }
}

/// Opens a server with default settings on all addresses of an engine.
pub(crate) fn serve(engine: &Arc<Engine>, handler: Arc<dyn Handler>) -> Arc<Server> {
    let anywhere = [SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT)];
    Server::open(engine, &anywhere, ServerConfig::default(), handler).unwrap()
}

/// Both sides.
pub(crate) struct Pair {
    pub(crate) client_device: Arc<SoftDevice>,
    pub(crate) server_device: Arc<SoftDevice>,
    pub(crate) client_engine: Arc<Engine>,
    pub(crate) server_engine: Arc<Engine>,
    pub(crate) server: Arc<Server>,
    pub(crate) store: Arc<Store>,
    pub(crate) net: u8,
}

pub(crate) fn engine(device: &Arc<SoftDevice>) -> Arc<Engine> {
    let device: Arc<dyn Device> = Arc::clone(device) as _;
    Engine::new(vec![device], EngineConfig::default()).unwrap()
}

impl Pair {
    /// Returns the client hosts 1, 2 .. and the server hosts 101, 102 .. of a net.
    pub(crate) fn new(net: u8, paths: u8, config: ServerConfig) -> Self {
        Self::with(net, paths, config, |config| config)
    }

    pub(crate) fn with(
        net: u8,
        paths: u8,
        config: ServerConfig,
        soft: impl Fn(SoftConfig) -> SoftConfig,
    ) -> Self {
        let open = |base: u8| {
            let addrs = (1..=paths).map(|n| ip(net, base + n)).collect();
            device_with(soft(SoftConfig { addrs, ..SoftConfig::default() }))
        };
        let (client_device, server_device) = (open(0), open(100));
        let (client_engine, server_engine) = (engine(&client_device), engine(&server_device));
        let store = Store::new();
        let handler = Arc::clone(&store) as _;
        let anywhere = SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT);
        let server = Server::open(&server_engine, &[anywhere], config, handler).unwrap();
        Self { client_device, server_device, client_engine, server_engine, server, store, net }
    }

    pub(crate) fn builder(&self, name: &str, paths: u8) -> SessionBuilder {
        let all = (1..=paths).map(|n| (Some(ip(self.net, n)), ip(self.net, 100 + n)));
        SessionBuilder::new(name).unwrap().paths(&all.collect::<Vec<_>>())
    }

    pub(crate) fn session(&self, paths: u8) -> Arc<Session> {
        Session::open(&self.client_engine, self.builder("test", paths)).unwrap()
    }
}

/// Writes a pattern and reads it back, with one permit.
pub(crate) fn write_and_read(session: &Session, offset: usize, len: usize) {
    let region = session.region(2 * len.max(1)).unwrap();
    let seed = offset as u8 ^ len as u8;
    let pattern: Vec<u8> = (0..len).map(|i| (i >> 6) as u8 ^ (i as u8) ^ seed).collect();
    region.buffer().write(0, &pattern);
    let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
    let usr = at(offset);
    session.call(Dir::Write, &permit, &usr, &[region.piece(0, len as u32)]).unwrap();
    session.call(Dir::Read, &permit, &usr, &[region.piece(len, len as u32)]).unwrap();
    session.put_permit(permit);
    assert_eq!(bytes(&region, len, len), pattern);
}

pub(crate) fn bytes(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.buffer().read(offset, &mut bytes);
    bytes
}

/// Waits until a condition holds, longer than anything takes on a machine that builds and emulates
/// meanwhile.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < 3 * PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
