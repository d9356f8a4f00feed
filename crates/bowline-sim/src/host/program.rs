//! What the program of a process does: a loop of calls drawn from its plan.

use std::net::SocketAddr;
use std::rc::Rc;

use bowline_host_wire::RING_MESSAGE_MAX;

use super::client::{Client, ENETDOWN, Outgoing, Socket};
use super::kernel::EAGAIN;
use super::plan::ProcessPlan;
use super::process::Process;
use super::shared::Shared;
use super::world::Hosts;
use crate::engine::queue::{MS, SEC};

const EINTR: i32 = 4;
const ENOBUFS: i32 = 105;
const EMFILE: i32 = 24;
const ETIMEDOUT: i32 = 110;
const ENOTCONN: i32 = 107;
const EBADF: i32 = 9;
const EIO: i32 = 5;
/// Attempts to have a socket, where a quota is in the way.
const ATTEMPTS: u32 = 5;
/// How long a socket that was written to past the library stays open at most: the node leaves what
/// comes on a full one for 10 s.
const CLOSES: u64 = 11 * SEC;
/// Words of the shared memory in front of the rings.
const WORDS: [usize; 17] =
    [64, 72, 80, 128, 192, 200, 208, 256, 264, 272, 320, 328, 512, 520, 528, 536, 576];

/// A program, with what it has left to do.
struct Program {
    client: Client,
    plan: ProcessPlan,
    calls: u64,
    sockets: Vec<Socket>,
    /// It has told a lie: what others promise it does not count.
    lied: bool,
}

/// Starts a process; it may have sockets of another already.
pub(super) fn start(
    shared: &Rc<Shared>,
    hosts: &Rc<Hosts>,
    plan: ProcessPlan,
    sockets: Vec<Socket>,
) {
    let id = shared.processes.borrow().len() as u32;
    let who = (id, plan.node, if plan.user == 0 { 0 } else { 1000 + plan.user });
    let process = Rc::new(Process::new(who, plan.dies_at, Rc::clone(shared)));
    process.sockets.borrow_mut().extend(sockets.iter().map(|socket| socket.number));
    let client =
        Client::new(Rc::clone(&process), Rc::clone(shared), Rc::clone(hosts), plan.is_slow);
    let program = Program { client, calls: plan.calls, plan, sockets, lied: false };
    process.begin(program.run());
    shared.count(|stats| stats.processes += 1);
    shared.processes.borrow_mut().push(process);
}

impl Program {
    async fn run(mut self) {
        loop {
            match self.live().await {
                Ok(()) => return,
                Err(ENETDOWN) => self.shared().hit("a program has", "no node"),
                Err(errno) if self.lied || self.is_spoiled() => {
                    self.shared().note([40, errno as u64, 0], || {
                        format!("who has spoiled memory gets {errno}")
                    });
                    return;
                }
                Err(errno) => {
                    let id = self.client.process.id;
                    self.shared().fail(|| format!("process {id} gets error {errno}"));
                    return;
                }
            }
            for socket in std::mem::take(&mut self.sockets) {
                self.client.close(socket);
            }
            self.client.forget();
            if self.client.process.is_idle.get() {
                return;
            }
            let hosts = Rc::clone(&self.client.hosts);
            let node = self.client.process.node;
            let is_up = move || hosts.all[node].is_up.get();
            self.client.process.until("a node", None, is_up).await;
            self.calls = self.calls.saturating_sub(1);
        }
    }

    fn shared(&self) -> &Rc<Shared> {
        &self.client.shared
    }

    async fn pause(&self, longest: u64) {
        let until = Some(self.shared().now.get() + 1 + self.shared().below(longest));
        self.client.process.until("time", until, || false).await;
    }

    /// Opens sockets, makes calls, and then receives what comes.
    async fn live(&mut self) -> Result<(), i32> {
        let mut attempts = 0;
        while self.sockets.len() < self.plan.sockets && attempts < ATTEMPTS {
            match self.client.open_bound().await {
                Ok(socket) => {
                    if self.plan.send_timeout > 0 {
                        self.client.limit_sends(&socket, self.plan.send_timeout).await?;
                    }
                    self.sockets.push(socket);
                }
                Err(EMFILE | ENOBUFS) if self.client.process.user != 0 => {
                    self.shared().hit("a program has", "its quota");
                    attempts += 1;
                    self.pause(MS).await;
                }
                Err(errno) => return Err(errno),
            }
        }
        if self.sockets.is_empty() {
            return Ok(());
        }
        while self.calls > 0 {
            self.calls -= 1;
            match self.one().await {
                // A quota of channels may be reached.
                Err(EMFILE) if self.client.process.user != 0 => self.pause(MS).await,
                done => done?,
            }
            if self.plan.pause > 0 && self.shared().chance(100) {
                self.pause(self.plan.pause).await;
            }
        }
        self.client.process.is_idle.set(true);
        if self.plan.ends || self.is_spoiled() {
            return Ok(());
        }
        let mut patience = MS;
        loop {
            // In spoiled memory there may seem to be something for ever.
            if self.is_spoiled() {
                return Ok(());
            }
            match self.client.drain(&self.sockets).await {
                // Processes that are idle may have all channels of their user until they end.
                Err(EMFILE) if self.client.process.user != 0 && patience < SEC => {
                    self.pause(patience).await;
                    patience *= 2;
                }
                Err(EMFILE) if self.client.process.user != 0 => return Ok(()),
                done => done?,
            }
        }
    }

    /// A program has written to the memory of one of its sockets what it must not.
    fn is_spoiled(&self) -> bool {
        let mut judge = self.shared().judge.borrow_mut();
        self.sockets.iter().any(|socket| judge.socket(socket.number).is_spoiled)
    }

    /// One call.
    async fn one(&mut self) -> Result<(), i32> {
        let shared = Rc::clone(self.shared());
        let at = shared.below(self.sockets.len() as u64) as usize;
        let socket = self.sockets[at].clone();
        if socket.end.is_over() {
            return Err(ENETDOWN);
        }
        if shared.chance(self.plan.lies) {
            self.lied = true;
            if shared.chance(200) {
                self.write_past(&socket).await;
            } else {
                self.lie(&socket);
            }
            return Ok(());
        }
        if shared.chance(self.plan.forks) {
            self.fork();
            return Ok(());
        }
        if shared.chance(self.plan.floods) {
            shared.hit("a program does", "send many requests at once");
            let count = shared.rng.borrow_mut().magnitude(1, 400);
            return self.client.flood(&socket, count).await;
        }
        match shared.below(1000) {
            0..20 => self.client.local_name(&socket).await,
            20..40 => match self.client.flush(&socket).await {
                Err(ETIMEDOUT | ENOTCONN | EINTR) => Ok(()),
                done => done,
            },
            40..50 if self.sockets.len() > 1 => {
                shared.hit("a program does", "close a socket");
                drop(socket);
                let socket = self.sockets.swap_remove(at);
                self.client.close(socket);
                Ok(())
            }
            50..70 if !shared.judge.borrow_mut().socket(socket.number).is_shared => {
                shared.hit("a program does", "connect a socket");
                let (to, addr) = self.destination();
                self.client.connect_to(&socket, to, addr).await
            }
            70..80 => {
                shared.hit("a program does", "change a buffer");
                let bytes = shared.rng.borrow_mut().magnitude(2304, 60_000) as usize;
                self.client.resize(&socket, bytes).await
            }
            _ if shared.chance(self.plan.receives) => {
                let waits = shared.chance(self.plan.waits);
                let limit = waits.then(|| shared.now.get() + 1 + shared.below(20 * MS));
                match self.client.receive(&socket, limit).await {
                    Err(EAGAIN) => Ok(()),
                    Err(EIO) if shared.judge.borrow_mut().socket(socket.number).is_spoiled => {
                        Err(ENETDOWN)
                    }
                    done => done,
                }
            }
            _ => self.send(&socket).await,
        }
    }

    /// A socket that was bound, one of those that came last.
    fn destination(&self) -> (u32, SocketAddr) {
        let open = self.client.hosts.open.borrow();
        let back = self.shared().below(open.len().min(8) as u64) as usize;
        open[open.len() - 1 - back]
    }

    async fn send(&self, socket: &Socket) -> Result<(), i32> {
        let shared = self.shared();
        let connected = socket.connected.get().filter(|_| shared.chance(500));
        let (to, addr) = connected.unwrap_or_else(|| self.destination());
        let is_unnamed = connected.is_some();
        let buffer = self.client.hosts.all[self.plan.node].send_buffer;
        let most = buffer.min(self.plan.len_max) as u64;
        let is_long = buffer > RING_MESSAGE_MAX && shared.chance(self.plan.longs);
        let len = if is_long {
            shared.rng.borrow_mut().between(RING_MESSAGE_MAX as u64, buffer as u64)
        } else {
            shared.rng.borrow_mut().magnitude(16, most)
        } as usize;
        let may_wait = shared.chance(self.plan.waits);
        let by_request = shared.chance(self.plan.asks);
        let message = Outgoing { to, addr, len, may_wait, by_request, is_unnamed };
        match self.client.send(socket, message).await {
            Err(EAGAIN | ENOBUFS) => {
                shared.hit("a send is", "refused");
                let limit = shared.now.get() + 5 * MS;
                if socket.end.is_writable() {
                    self.pause(MS).await;
                } else {
                    self.client.until_writable(socket, limit).await;
                }
                Ok(())
            }
            Err(EINTR) if may_wait => {
                shared.hit("a send is", "interrupted");
                Ok(())
            }
            Err(ETIMEDOUT) if self.plan.send_timeout > 0 => {
                shared.hit("a send is", "given up");
                Ok(())
            }
            Err(EBADF) if shared.judge.borrow_mut().socket(socket.number).is_spoiled => {
                Err(ENETDOWN)
            }
            done => done,
        }
    }

    fn fork(&self) {
        let shared = self.shared();
        shared.count(|stats| stats.forks += 1);
        shared.hit("a program does", "fork");
        for socket in &self.sockets {
            let mut judge = shared.judge.borrow_mut();
            let record = judge.socket(socket.number);
            record.holders += 1;
            record.is_shared = true;
        }
        let calls = self.calls.min(shared.below(30));
        let dies_at = shared.chance(400).then(|| shared.rng.borrow_mut().magnitude(1, 400));
        let ends = shared.chance(500);
        let lies = if self.lied { self.plan.lies } else { 0 };
        let plan = ProcessPlan { calls, dies_at, ends, lies, forks: 0, ..self.plan.clone() };
        start(shared, &self.client.hosts, plan, self.sockets.clone());
    }

    /// Writes to the descriptor of a socket, as by a system call that no library sees: the node
    /// closes the socket, since these bytes are not sent.
    async fn write_past(&self, socket: &Socket) {
        let shared = self.shared();
        shared.judge.borrow_mut().socket(socket.number).is_spoiled = true;
        let len = 1 + shared.below(40) as usize;
        if socket.end.send(&vec![b'!'; len], &[]).is_err() {
            return;
        }
        shared.hit("a program does", "write past the library");
        let limit = shared.now.get() + CLOSES;
        let end = Rc::clone(&socket.end);
        self.client.process.until("the end of a socket", Some(limit), move || end.is_over()).await;
        if !socket.end.is_over() {
            shared.fail(|| format!("{} is written to and stays open", socket.addr));
        }
    }

    /// Writes to shared memory what must not be there.
    fn lie(&self, socket: &Socket) {
        let shared = self.shared();
        shared.judge.borrow_mut().socket(socket.number).is_spoiled = true;
        shared.count(|stats| stats.lies += 1);
        let at = match shared.below(3) {
            0 | 1 => WORDS[shared.below(WORDS.len() as u64) as usize],
            _ => 4096 + shared.below(4096) as usize,
        };
        let known = socket.memory.load(at);
        let value = match shared.below(5) {
            0 => 0,
            1 => shared.random(),
            2 => known.wrapping_add(16),
            3 => known.wrapping_sub(16),
            _ => shared.below(100_000),
        };
        shared.note([41, at as u64, value], || {
            format!("process {} writes {value:#x} at {at}", self.client.process.id)
        });
        socket.memory.store(at, value);
    }
}
