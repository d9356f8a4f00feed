//! What a program does to call its node, step by step: as `bowline-host-client` does it, with the
//! real code of the rings. Between any two steps others go on, or the program is killed.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use bowline_host::core::{Caller, Credentials, HeapMemory};
use bowline_host_wire::{
    Area, Call, FILL_MAX, Features, Frame, HEAD_LEN, LockOwner, Pushed, Reply, Request, SendCall,
    SocketHandle, VERSION, WAKE_TOKEN_LEN, name,
};

use super::judge::payload;
use super::kernel::{self, EAGAIN, EPIPE, End, Fd, Kind};
use super::process::{Asked, Process};
use super::push;
use super::shared::Shared;
use super::world::Hosts;
use crate::engine::queue::MS;

use bowline_wire::rds::uapi::{MSG_DONTWAIT, SO_RCVBUF, SO_SNDTIMEO, SOCK_SEQPACKET, SOL_SOCKET};

/// The node is gone.
pub(super) const ENETDOWN: i32 = 100;
const EBADF: i32 = 9;
const ENOBUFS: i32 = 105;
const EPROTO: i32 = 71;
const EIO: i32 = 5;
const EMFILE: i32 = 24;

/// A channel of a process.
pub(super) struct Channel {
    pub(super) stream: Rc<End>,
    owner: LockOwner,
    /// What came and is not read.
    input: Vec<u8>,
    given: Vec<Fd>,
}

/// A socket of a process.
#[derive(Clone)]
pub(super) struct Socket {
    pub(super) number: u32,
    pub(super) end: Rc<End>,
    pub(super) memory: Rc<HeapMemory>,
    handle: SocketHandle,
    pub(super) addr: SocketAddr,
    /// Where it is connected to; not changed any more once several processes have it.
    pub(super) connected: Rc<Cell<Option<(u32, SocketAddr)>>>,
}

impl Socket {
    pub(super) fn area(&self) -> Area {
        self.memory.area()
    }
}

/// A reply with what comes along.
struct Whole {
    reply: Reply,
    name: Vec<u8>,
    payload: Vec<u8>,
    given: Vec<Fd>,
}

/// A message to send.
#[derive(Clone, Copy)]
pub(super) struct Outgoing {
    pub(super) to: u32,
    pub(super) addr: SocketAddr,
    pub(super) len: usize,
    pub(super) may_wait: bool,
    /// Asks the node in any case.
    pub(super) by_request: bool,
    /// Names no destination: the socket is connected to it.
    pub(super) is_unnamed: bool,
}

/// A program's view of the world.
pub(super) struct Client {
    pub(super) process: Rc<Process>,
    pub(super) shared: Rc<Shared>,
    pub(super) hosts: Rc<Hosts>,
    /// Channels that have no request under way.
    idle: RefCell<Vec<Channel>>,
    /// Pushes word by word.
    pub(super) is_slow: bool,
    /// Nanoseconds after which a send gives up; 0: never.
    send_timeout: Cell<u64>,
}

impl Client {
    pub(super) fn new(
        process: Rc<Process>,
        shared: Rc<Shared>,
        hosts: Rc<Hosts>,
        is_slow: bool,
    ) -> Self {
        let (idle, send_timeout) = (RefCell::default(), Cell::new(0));
        Self { process, shared, hosts, idle, is_slow, send_timeout }
    }

    /// A channel that has no request under way.
    pub(super) async fn channel(&self) -> Result<Channel, i32> {
        let idle = self.idle.borrow_mut().pop();
        match idle {
            Some(channel) => Ok(channel),
            None => self.connect().await,
        }
    }

    pub(super) fn keep(&self, channel: Channel) {
        self.idle.borrow_mut().push(channel);
    }

    /// Forgets a node that is gone.
    pub(super) fn forget(&self) {
        self.idle.borrow_mut().clear();
    }

    async fn connect(&self) -> Result<Channel, i32> {
        self.process.turn().await;
        let host = &self.hosts.all[self.process.node];
        if !host.is_up.get() {
            return Err(ENETDOWN);
        }
        let cookies = [self.shared.number(), self.shared.number()];
        let [own, theirs] = kernel::pair(Kind::Stream, host.room, cookies);
        let who = Credentials {
            process: self.process.id.cast_signed(),
            user: self.process.user,
            group: self.process.user,
        };
        theirs.set_peer(who);
        let caller = Caller { process: who.process, user: who.user, groups: vec![who.group] };
        host.backlog.borrow_mut().push_back((theirs, caller));
        let mut channel =
            Channel { stream: own, owner: LockOwner(0), input: Vec::new(), given: Vec::new() };
        let hello = Request::Hello { version: VERSION, features: Features::OWN };
        match self.send_request(&channel, &hello, &[], None).await {
            Ok(()) | Err(ENETDOWN) => {}
            Err(errno) => return Err(errno),
        }
        match self.reply(&mut channel, "greeting").await?.reply {
            Reply::Welcome { owner, .. } => {
                channel.owner = owner;
                Ok(channel)
            }
            Reply::Failed { errno, .. } => {
                self.quota(errno);
                Err(errno)
            }
            _ => Err(EPROTO),
        }
    }

    fn quota(&self, errno: i32) {
        if errno == EMFILE || errno == ENOBUFS {
            self.shared.count(|stats| stats.quotas += 1);
        }
    }

    /// Sends a request, and a message behind it.
    async fn send_request(
        &self,
        channel: &Channel,
        request: &Request<'_>,
        message: &[u8],
        descriptor: Option<Fd>,
    ) -> Result<(), i32> {
        let Some(emitted) = request.emit(message.len()) else { return Err(EPROTO) };
        let mut bytes = emitted.parts().concat();
        bytes.extend_from_slice(message);
        self.write(channel, &bytes, descriptor.into_iter().collect()).await
    }

    /// Writes to a channel, with descriptors at the beginning.
    async fn write(&self, channel: &Channel, bytes: &[u8], mut given: Vec<Fd>) -> Result<(), i32> {
        let mut sent = 0;
        while sent < bytes.len() {
            self.process.turn().await;
            // A write may be cut anywhere.
            let rest = bytes.len() - sent;
            let n = if self.shared.chance(100) {
                1 + self.shared.below(rest as u64) as usize
            } else {
                rest
            };
            match channel.stream.send(&bytes[sent..sent + n], &given) {
                Ok(n) => {
                    sent += n;
                    given.clear();
                }
                Err(EAGAIN) => {
                    let stream = Rc::clone(&channel.stream);
                    self.process
                        .until("send on a channel", None, move || stream.is_writable())
                        .await;
                }
                Err(EPIPE) => return Err(ENETDOWN),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    async fn fill_input(&self, channel: &mut Channel, what: &'static str) -> Result<(), i32> {
        let stream = Rc::clone(&channel.stream);
        self.process.until(what, None, move || stream.is_readable()).await;
        let most =
            if self.shared.chance(200) { 1 + self.shared.below(64) as usize } else { 65_536 };
        match channel.stream.receive(most) {
            Ok(taken) if taken.bytes.is_empty() => Err(ENETDOWN),
            Ok(taken) => {
                // The rest may take longer, for who reads slowly.
                *self.process.asked.borrow_mut() = None;
                channel.input.extend(taken.bytes);
                channel.given.extend(taken.given);
                Ok(())
            }
            Err(errno) => Err(errno),
        }
    }

    async fn reply(&self, channel: &mut Channel, what: &'static str) -> Result<Whole, i32> {
        loop {
            let parsed = Frame::parse(&channel.input).map_err(|_| EPROTO)?;
            if let Some((frame, len)) = parsed {
                let reply = Reply::parse(&frame.head).map_err(|_| EPROTO)?;
                let (name, payload) = (frame.name.to_vec(), frame.payload.to_vec());
                channel.input.drain(..len);
                let given = std::mem::take(&mut channel.given);
                return Ok(Whole { reply, name, payload, given });
            }
            if channel.input.len() > HEAD_LEN + 128 + (1 << 20) {
                return Err(EPROTO);
            }
            self.fill_input(channel, what).await?;
        }
    }

    /// The request waits for nothing: it is answered soon.
    fn asks(&self, what: &'static str, channel: &Channel) {
        let rounds = self.hosts.all[self.process.node].rounds.get();
        let stream = Rc::clone(&channel.stream);
        *self.process.asked.borrow_mut() = Some(Asked { what, stream, rounds });
    }

    /// A socket, not bound.
    pub(super) async fn open(&self) -> Result<(SocketHandle, Rc<End>, Rc<HeapMemory>), i32> {
        let mut channel = self.channel().await?;
        let open = Request::Open { kind: SOCK_SEQPACKET, protocol: 0 };
        self.send_request(&channel, &open, &[], None).await?;
        self.asks("open", &channel);
        let whole = self.reply(&mut channel, "open").await;
        *self.process.asked.borrow_mut() = None;
        let mut whole = whole?;
        self.keep(channel);
        match (whole.reply, whole.given.pop(), whole.given.pop()) {
            (Reply::Socket(handle), Some(Fd::Memory(memory)), Some(Fd::End(end))) => {
                Ok((handle, end, memory))
            }
            (Reply::Failed { errno, .. }, ..) => {
                self.quota(errno);
                Err(errno)
            }
            _ => Err(EPROTO),
        }
    }

    /// A socket that is bound to an address of its own.
    pub(super) async fn open_bound(&self) -> Result<Socket, i32> {
        let (handle, end, memory) = self.open().await?;
        let host = &self.hosts.all[self.process.node];
        let addr = SocketAddr::new(host.addr, host.next_port());
        let number = {
            let mut judge = self.shared.judge.borrow_mut();
            judge.opened(addr, self.process.node, (host.send_buffer, host.recv_buffer))
        };
        // Until it is bound nobody sends to it.
        self.process.sockets.borrow_mut().insert(number);
        self.shared.memories.borrow_mut().insert(number, (handle, Rc::downgrade(&memory)));
        let connected = Rc::default();
        let socket = Socket { number, end, memory, handle, addr, connected };
        let (raw, len) = name::raw(addr);
        self.short(&socket, "bind", Call::Bind(&raw[..len])).await?;
        self.shared.count(|stats| stats.sockets += 1);
        self.hosts.open.borrow_mut().push((number, addr));
        self.shared.note([20, u64::from(self.process.id), u64::from(number)], || {
            format!("process {} has socket {number}, {addr}", self.process.id)
        });
        Ok(socket)
    }

    /// Closes a socket.
    pub(super) fn close(&self, socket: Socket) {
        drop(socket.end);
        if self.process.sockets.borrow_mut().remove(&socket.number) {
            let mut judge = self.shared.judge.borrow_mut();
            judge.socket(socket.number).holders -= 1;
        }
    }

    /// A call whose answer comes at once; makes the channel known to the socket if it is not.
    async fn short(
        &self,
        socket: &Socket,
        what: &'static str,
        call: Call<'_>,
    ) -> Result<Whole, i32> {
        self.call(socket, what, call, &[], false).await
    }

    async fn call(
        &self,
        socket: &Socket,
        what: &'static str,
        call: Call<'_>,
        message: &[u8],
        may_wait: bool,
    ) -> Result<Whole, i32> {
        let mut handle = socket.handle;
        let mut is_known = false;
        loop {
            let mut channel = self.channel().await?;
            if is_known {
                let given = Fd::End(Rc::clone(&socket.end));
                self.send_request(&channel, &Request::Attach, &[], Some(given)).await?;
                match self.reply(&mut channel, "attach").await?.reply {
                    Reply::Socket(known) => handle = known,
                    // Another node is there, which does not know the socket.
                    Reply::Failed { .. } if socket.end.is_over() => return Err(ENETDOWN),
                    Reply::Failed { errno, .. } => return Err(errno),
                    _ => return Err(EPROTO),
                }
            }
            self.send_request(&channel, &Request::Call(handle, call), message, None).await?;
            if !may_wait {
                self.asks(what, &channel);
            } else if self.shared.chance(150) {
                self.interrupt(&channel).await?;
            }
            let whole = self.reply(&mut channel, what).await;
            *self.process.asked.borrow_mut() = None;
            let whole = whole?;
            self.keep(channel);
            match whole.reply {
                Reply::Failed { errno: EBADF, .. } if !is_known => is_known = true,
                Reply::Failed { errno, fill, .. } => {
                    if fill {
                        self.fill(socket).await;
                    }
                    return Err(errno);
                }
                Reply::Sent { fill: true, .. } => {
                    self.fill(socket).await;
                    return Ok(whole);
                }
                _ => return Ok(whole),
            }
        }
    }

    /// A signal comes after a time, unless there is an answer.
    async fn interrupt(&self, channel: &Channel) -> Result<(), i32> {
        let limit = Some(self.shared.now.get() + 1 + self.shared.below(10 * MS));
        let stream = Rc::clone(&channel.stream);
        self.process.until("send", limit, move || stream.is_readable()).await;
        if channel.stream.is_readable() && self.shared.chance(500) {
            return Ok(());
        }
        self.shared.hit("a program does", "interrupt a call");
        self.send_request(channel, &Request::Interrupt, &[], None).await
    }

    /// Connects a socket to another.
    pub(super) async fn connect_to(
        &self,
        socket: &Socket,
        to: u32,
        addr: SocketAddr,
    ) -> Result<(), i32> {
        let (raw, len) = name::raw(addr);
        socket.connected.set(None);
        self.short(socket, "connect", Call::Connect(&raw[..len])).await?;
        socket.connected.set(Some((to, addr)));
        Ok(())
    }

    /// Gives a socket a receive buffer of another size.
    pub(super) async fn resize(&self, socket: &Socket, bytes: usize) -> Result<(), i32> {
        let value = (bytes as i32).to_ne_bytes();
        let (level, option) = (SOL_SOCKET, SO_RCVBUF);
        self.shared.judge.borrow_mut().resizes(socket.number, bytes);
        let call = Call::SetOption { level, option, value: &value, may_write: true };
        self.short(socket, "option", call).await.map(drop)
    }

    /// Asks for the name of a socket.
    pub(super) async fn local_name(&self, socket: &Socket) -> Result<(), i32> {
        let whole = self.short(socket, "name", Call::LocalName).await?;
        if name::parse(&whole.name) != Some(socket.addr) {
            self.shared.fail(|| format!("{} is called {:?}", socket.addr, whole.name));
        }
        Ok(())
    }

    /// Has sends on a socket give up after a time.
    pub(super) async fn limit_sends(&self, socket: &Socket, nanos: u64) -> Result<(), i32> {
        let (seconds, micros) = (nanos / 1_000_000_000, nanos % 1_000_000_000 / 1000);
        let value = [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat();
        let (level, option) = (SOL_SOCKET, SO_SNDTIMEO);
        let call = Call::SetOption { level, option, value: &value, may_write: true };
        self.short(socket, "option", call).await?;
        self.send_timeout.set(nanos);
        Ok(())
    }

    /// Waits until everything is acknowledged.
    pub(super) async fn flush(&self, socket: &Socket) -> Result<(), i32> {
        let limit = std::time::Duration::from_millis(1 + self.shared.below(20));
        self.call(socket, "flush", Call::Flush(Some(limit)), &[], true).await.map(drop)
    }

    /// Makes the socket unwritable, as the node asks.
    async fn fill(&self, socket: &Socket) {
        let token = socket.area().fill_token();
        for _ in 0..FILL_MAX {
            self.process.turn().await;
            if !socket.end.is_writable() || socket.end.send(&token, &[]).is_err() {
                return;
            }
        }
    }

    async fn wake(&self, socket: &Socket) -> Result<(), i32> {
        self.shared.count(|stats| stats.wakes += 1);
        let channel = self.channel().await.inspect_err(|_| {
            self.shared.judge.borrow_mut().socket(socket.number).is_unsure = true;
        })?;
        self.send_request(&channel, &Request::Wake(socket.handle), &[], None).await?;
        self.keep(channel);
        Ok(())
    }

    /// Sends many requests whose answers it reads later, if it reads them.
    pub(super) async fn flood(&self, socket: &Socket, count: u64) -> Result<(), i32> {
        let mut channel = self.channel().await?;
        let mut bytes = Vec::new();
        for _ in 0..count {
            let wake = Request::Wake(socket.handle).emit(0);
            bytes.extend(wake.iter().flat_map(|wake| wake.parts().concat()));
        }
        self.write(&channel, &bytes, Vec::new()).await?;
        let call = Request::Call(socket.handle, Call::LocalName);
        self.send_request(&channel, &call, &[], None).await?;
        self.reply(&mut channel, "name behind many requests").await?;
        self.keep(channel);
        Ok(())
    }

    /// Sends a message. EAGAIN or ENOBUFS: there is no room.
    pub(super) async fn send(&self, socket: &Socket, message: Outgoing) -> Result<(), i32> {
        let key = (self.process.id, socket.number, message.to);
        let seq = self.shared.judge.borrow().next(key);
        let bytes = payload(key, seq, message.len);
        let (raw, len) = name::raw(message.addr);
        let raw = &raw[..if message.is_unnamed { 0 } else { len }];
        if !message.by_request {
            let channel = self.channel().await?;
            self.process.turn().await;
            self.shared.judge.borrow_mut().offer(key);
            let pushed = if self.is_slow {
                push::slowly(&self.process, &socket.memory, channel.owner, raw, &bytes, || {
                    self.accepted(key, seq, &bytes, true);
                })
                .await
            } else {
                let pushed = socket.memory.push(channel.owner, raw, &bytes);
                if pushed != Pushed::Ask {
                    self.accepted(key, seq, &bytes, true);
                }
                pushed
            };
            let mut sent = Ok(());
            if pushed == Pushed::Wake {
                self.shared.count(|stats| stats.wakes += 1);
                sent = self.send_request(&channel, &Request::Wake(socket.handle), &[], None).await;
            }
            self.keep(channel);
            if pushed != Pushed::Ask {
                return sent;
            }
        }
        let flags = if message.may_wait { 0 } else { MSG_DONTWAIT };
        let call = SendCall { flags, may_write: true, name: raw, control: &[], payload: &[] };
        self.shared.judge.borrow_mut().offer(key);
        let what = if message.may_wait { "send" } else { "send at once" };
        self.process.sends.set(message.may_wait.then_some((socket.number, message.to)));
        let limit = self.send_timeout.get();
        let gives_up = (limit > 0 && message.may_wait).then(|| self.shared.now.get() + limit);
        self.process.gives_up.set(gives_up);
        let sent = self.call(socket, what, Call::Send(call), &bytes, message.may_wait).await;
        self.process.sends.set(None);
        self.process.gives_up.set(None);
        match sent {
            Ok(_) => {
                self.accepted(key, seq, &bytes, false);
                Ok(())
            }
            Err(errno) => {
                let is_full = errno == EAGAIN || errno == ENOBUFS;
                // What becomes of it when the node ends, nobody knows.
                if errno != ENETDOWN {
                    self.shared.count(|stats| stats.refused += u64::from(is_full));
                    let refused = self.shared.judge.borrow_mut().refuse(key, is_full);
                    if let Err(what) = refused {
                        self.shared.fail(|| what);
                    }
                }
                Err(errno)
            }
        }
    }

    fn accepted(&self, key: (u32, u32, u32), seq: u32, bytes: &[u8], pushed: bool) {
        self.shared.note([30, u64::from(key.1) << 32 | u64::from(key.2), u64::from(seq)], || {
            let how = if pushed { "pushes" } else { "has sent" };
            format!("process {} {how} message {seq} of {key:?}, {} bytes", key.0, bytes.len())
        });
        self.shared.count(|stats| if pushed { stats.pushed += 1 } else { stats.asked += 1 });
        let accepted = self.shared.judge.borrow_mut().accept(key, bytes.len());
        if let Err(what) = accepted {
            self.shared.fail(|| what);
        }
    }

    fn came(&self, socket: &Socket, from: &[u8], bytes: &[u8]) {
        self.shared.note([31, u64::from(socket.number), bytes.len() as u64], || {
            format!(
                "process {} has {} bytes on socket {} from {:?}",
                self.process.id,
                bytes.len(),
                socket.number,
                name::parse(from)
            )
        });
        self.shared.count(|stats| stats.bytes += bytes.len() as u64);
        let came = self.shared.judge.borrow_mut().came(socket.number, name::parse(from), bytes);
        if let Err(what) = came {
            self.shared.fail(|| what);
        }
    }

    /// Something was received: if it was the last, the socket is not readable any more.
    async fn received(&self, socket: &Socket) {
        let area = socket.area();
        loop {
            self.process.turn().await;
            if !area.has_wake_token() {
                return;
            }
            self.process.turn().await;
            if !area.has_nothing() {
                return;
            }
            self.process.turn().await;
            let Ok(Some(token)) = self.take_token(socket) else { return };
            self.process.turn().await;
            if self.needs_token(socket, Some(token)).await {
                let _ = self.wake(socket).await;
            }
        }
    }

    /// Takes a wake token that is there.
    fn take_token(&self, socket: &Socket) -> Result<Option<[u8; WAKE_TOKEN_LEN]>, i32> {
        let token = match socket.end.receive(64) {
            Ok(taken) => taken.bytes,
            Err(EAGAIN) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let Ok(token) = token.try_into() else { return Err(ENETDOWN) };
        self.shared.count(|stats| stats.tokens += 1);
        Ok(Some(token))
    }

    /// As [`Area::needs_wake_token`].
    async fn needs_token(&self, socket: &Socket, token: Option<[u8; WAKE_TOKEN_LEN]>) -> bool {
        let Some(token) = token else { return false };
        let area = socket.area();
        area.wake_token_taken(u32::from_ne_bytes(token));
        self.process.turn().await;
        !area.has_nothing()
    }

    /// Receives a message; waits for it until a time, or not at all.
    pub(super) async fn receive(&self, socket: &Socket, limit: Option<u64>) -> Result<(), i32> {
        let area = socket.area();
        let mut waited = false;
        let mut token = None;
        loop {
            self.process.turn().await;
            let mut bytes = Vec::new();
            let taken = area.take(false, |place, len| {
                bytes.resize(len, 0);
                area.copy_out(place, &mut bytes);
            });
            if let Ok(Some(taken)) = &taken {
                self.shared.count(|stats| stats.taken += 1);
                self.came(socket, &taken.name[..taken.name_len], &bytes);
            }
            if token.is_some() {
                self.process.turn().await;
            }
            let wants_token = self.needs_token(socket, token.take()).await;
            if wants_token || matches!(&taken, Ok(Some(taken)) if taken.notice) {
                let _ = self.wake(socket).await;
            }
            if taken.map_err(|_| EIO)?.is_some() {
                self.received(socket).await;
                return Ok(());
            }
            self.process.turn().await;
            if area.has_more() {
                match self.receive_from_node(socket).await {
                    Err(EAGAIN) if area.has_message() || !area.has_more() => continue,
                    Err(EAGAIN) if limit.is_none() => return Err(EAGAIN),
                    Err(EAGAIN) if waited => {
                        let until = Some(self.shared.now.get() + MS);
                        self.process.until("pause", until, || false).await;
                        // Spoiled memory says so for ever.
                        if limit.is_some_and(|limit| self.shared.now.get() >= limit) {
                            return Err(EAGAIN);
                        }
                    }
                    Err(EAGAIN) => {}
                    done => {
                        self.received(socket).await;
                        return done;
                    }
                }
            }
            self.process.turn().await;
            if let Some(until) = limit {
                let end = Rc::clone(&socket.end);
                let readable = move || end.is_readable();
                let on = vec![socket.number];
                self.process.until_readable("receive", on, Some(until), readable).await;
            }
            token = self.take_token(socket)?;
            if token.is_none() && !area.has_message() {
                return Err(EAGAIN);
            }
            waited = true;
        }
    }

    async fn receive_from_node(&self, socket: &Socket) -> Result<(), i32> {
        let call = Call::Receive { flags: MSG_DONTWAIT, control_room: 0, room: 1 << 20 };
        self.process.receives.set(Some(socket.number));
        let whole = self.call(socket, "receive from the node", call, &[], false).await;
        self.process.receives.set(None);
        let whole = match whole {
            Err(ENETDOWN) => {
                self.shared.judge.borrow_mut().socket(socket.number).may_lose = true;
                return Err(ENETDOWN);
            }
            whole => whole?,
        };
        self.shared.count(|stats| stats.received += 1);
        self.came(socket, &whole.name, &whole.payload);
        Ok(())
    }

    /// Waits until one of the sockets shows that there is something, and receives all of it.
    pub(super) async fn drain(&self, sockets: &[Socket]) -> Result<(), i32> {
        let ends: Vec<_> = sockets.iter().map(|socket| Rc::clone(&socket.end)).collect();
        let readable = move || ends.iter().any(|end| end.is_readable());
        let on = sockets.iter().map(|socket| socket.number).collect();
        self.process.until_readable("poll", on, None, readable).await;
        for socket in sockets {
            if socket.end.is_over() {
                return Err(ENETDOWN);
            }
            if !socket.end.is_readable() {
                continue;
            }
            loop {
                match self.receive(socket, None).await {
                    Ok(()) => {}
                    Err(EAGAIN) => break,
                    Err(errno) => return Err(errno),
                }
            }
        }
        Ok(())
    }

    /// Waits until a socket shows room to send, at most until a time.
    pub(super) async fn until_writable(&self, socket: &Socket, limit: u64) {
        let end = Rc::clone(&socket.end);
        self.process.writes_on.set(Some(socket.number));
        self.process.until("poll for room", Some(limit), move || end.is_writable()).await;
        self.process.writes_on.set(None);
    }
}
