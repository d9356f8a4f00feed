//! The server's side of RNBD: sessions, their open devices, and write access to exports.
//!
//! ```text
//!  message --> Act::Reply            answer it now
//!              Act::Io               storage works; io_done() when it has
//!              Act::Open --> the glue opens the export --> opened() --.
//!              Act::Later                                             +--> poll_answer()
//!              (CLOSE with IO running) --> last io_done() ------------'
//! ```
//!
//! After every call drain [`Core::poll_answer`] and [`Core::poll_release`]. Spec:
//! `docs/spec/rnbd.md`, rules `[NB-n]`.

mod check;
mod session;

use std::collections::{BTreeMap, VecDeque};

use bowline_wire::rnbd::{
    self as wire, Access, OPEN_RSP_LEN, Request, SESS_INFO_LEN, VERSION_MAJOR,
};
use bowline_wire::rtrs::Dir;

use crate::access::Writers;
use crate::limits::open_rsp;
use crate::{Errno, IoOp, Limits};
use check::{Context, check};
use session::{Device, Session};

/// Id of a session, chosen by the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessKey(pub u64);

/// Id of an open backing device, chosen by the caller. Two names of one backing device must give
/// the same id, since access is arbitrated by id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId(pub u32);

/// Id of a message whose answer comes later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

/// Id of an open device of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpenId {
    /// The session.
    pub session: SessKey,
    /// The device's id within the session.
    pub device: u32,
}

/// The data of an answer. Failed messages are answered without data [NB-3].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// Nothing.
    None,
    /// A SESS_INFO_RSP.
    SessInfo([u8; SESS_INFO_LEN]),
    /// An OPEN_RSP.
    Open([u8; OPEN_RSP_LEN]),
}

impl Reply {
    /// Returns the bytes to write into the data area of the request.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::SessInfo(bytes) => bytes,
            Self::Open(bytes) => bytes,
        }
    }
}

/// The action that a message calls for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// Answer it.
    Reply {
        /// 0 or a negative errno.
        errno: i32,
        /// The data of the answer.
        data: Reply,
    },
    /// Find and open the export, then call [`Core::opened`]; the answer comes by
    /// [`Core::poll_answer`].
    Open {
        /// Id of the message, given back with its answer.
        ticket: Ticket,
        /// Name of the export as sent; contains no `..` [NB-17].
        name: Vec<u8>,
        /// The access mode asked for.
        access: Access,
    },
    /// The answer comes by [`Core::poll_answer`].
    Later {
        /// Id of the message, given back with its answer.
        ticket: Ticket,
    },
    /// Do the IO, call [`Core::io_done`], and answer with [`bowline_wire::rnbd::status_of_errno`]
    /// of its error.
    Io {
        /// The export that the IO is for.
        export: ExportId,
        /// The operation.
        io: CheckedIo,
    },
}

/// An IO that passed all checks. It counts as in flight until [`Core::io_done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedIo {
    /// The operation.
    pub op: IoOp,
    /// Offset on the disk in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Tells whether a write must be durable before its answer.
    pub fua: bool,
    /// Tells whether a flush must be done before the write.
    pub preflush: bool,
    /// Tells whether zeroed bytes must stay allocated.
    pub nounmap: bool,
    /// Linux IO priority, 0 when none was given [NB-11].
    pub prio: u16,
    /// The open device that the IO came through.
    pub open: OpenId,
}

/// A deferred answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The message.
    pub ticket: Ticket,
    /// 0 or a negative errno.
    pub errno: i32,
    /// The data of the answer.
    pub data: Reply,
}

/// One open device, for the control tree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenInfo {
    /// Id of the open device.
    pub id: OpenId,
    /// Name of the session.
    pub session_name: String,
    /// The export that is open.
    pub export: ExportId,
    /// The name it was opened by.
    pub mapping_path: Vec<u8>,
    /// Access mode it was opened with.
    pub access: Access,
    /// Number of IOs that storage is working on.
    pub in_flight: u32,
}

/// Limits on what peers can make the server store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreLimits {
    /// Devices of one session at most [NB-50].
    pub devices_per_session: usize,
}

impl Default for CoreLimits {
    fn default() -> Self {
        Self { devices_per_session: 1024 }
    }
}

#[derive(Debug)]
struct PendingOpen {
    session: SessKey,
    name: Vec<u8>,
    access: Access,
    /// The first ticket started the open; later ones named the same export meanwhile.
    tickets: Vec<Ticket>,
}

#[derive(Debug, Default)]
struct Export {
    writers: Writers,
    opens: u32,
}

/// All sessions of one server.
#[derive(Debug)]
pub struct Core {
    limits: CoreLimits,
    sessions: BTreeMap<SessKey, Session>,
    exports: BTreeMap<ExportId, Export>,
    /// Keyed by the first ticket of each open.
    opening: BTreeMap<Ticket, PendingOpen>,
    tickets: u32,
    /// The id of the next device that is opened.
    next_id: u32,
    answers: VecDeque<Answer>,
    releases: VecDeque<ExportId>,
    events: Events,
}

/// What clients do, for a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientEv {
    /// Name of the session.
    pub session_name: String,
    /// What happened.
    pub change: ClientChange,
}

/// The kind of an event in [`ClientEv`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ClientChange {
    /// The session has come.
    Connected,
    /// The session is gone, and nothing of it is open.
    Disconnected,
    /// It has opened an export by this name.
    Opened(Vec<u8>, Access),
    /// It was refused to open this name.
    Refused(Vec<u8>, Access, Errno),
    /// What it had opened by this name is closed, by whomever.
    Closed(Vec<u8>),
}

/// Events that nobody has taken.
#[derive(Debug, Default)]
struct Events {
    kept: VecDeque<ClientEv>,
    /// Number of older events that were dropped.
    missed: u64,
}

impl Events {
    /// Most events that are kept: clients decide how many there are.
    const MAX: usize = 256;

    fn add(&mut self, session_name: &str, change: ClientChange) {
        if self.kept.len() == Self::MAX {
            self.kept.pop_front();
            self.missed += 1;
        }
        self.kept.push_back(ClientEv { session_name: session_name.to_owned(), change });
    }
}

const fn reply(errno: Errno) -> Act {
    Act::Reply { errno: errno.neg(), data: Reply::None }
}

const SUCCESS: Act = Act::Reply { errno: 0, data: Reply::None };

impl Core {
    /// Makes a server without sessions. Device ids count up from `first_id` and are not reused, so
    /// late IO cannot reach another device. With a random `first_id` this holds for IO meant for a
    /// server before a restart, too [NB-9].
    pub const fn new(limits: CoreLimits, first_id: u32) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            exports: BTreeMap::new(),
            opening: BTreeMap::new(),
            tickets: 0,
            next_id: first_id,
            answers: VecDeque::new(),
            releases: VecDeque::new(),
            events: Events { kept: VecDeque::new(), missed: 0 },
        }
    }

    /// Takes what clients have done since the last call, oldest first. At most 256 events are kept;
    /// the number is that of older ones that were dropped.
    pub fn take_events(&mut self) -> (Vec<ClientEv>, u64) {
        let Events { kept, missed } = core::mem::take(&mut self.events);
        (kept.into(), missed)
    }

    /// Adds a new session [NB-15].
    pub fn link_up(&mut self, key: SessKey, name: &str) {
        self.events.add(name, ClientChange::Connected);
        let session = Session::new(name);
        if let Some(former) = self.sessions.insert(key, session) {
            self.release_all(&former);
        }
    }

    /// Removes a session and closes its devices [NB-15].
    pub fn link_down(&mut self, key: SessKey) {
        if let Some(session) = self.sessions.remove(&key) {
            self.release_all(&session);
            self.events.add(&session.name, ClientChange::Disconnected);
        }
        for opening in self.opening.values_mut().filter(|opening| opening.session == key) {
            let tickets = opening.tickets.drain(..);
            self.answers.extend(tickets.map(|ticket| Answer {
                ticket,
                errno: Errno::ENODEV.neg(),
                data: Reply::None,
            }));
        }
    }

    /// Handles the user message of one request. `room` is the number of bytes that the answer to a
    /// READ may have, `data_len` the number of data bytes in its chunk besides the message.
    pub fn message(&mut self, key: SessKey, dir: Dir, room: u32, data_len: u32, usr: &[u8]) -> Act {
        let Some(session) = self.sessions.get_mut(&key) else { return reply(Errno::ENODEV) };
        // Lengths are checked before any field is read [NB-22].
        let Ok(request) = wire::parse(usr) else { return reply(Errno::EINVAL) };
        let room_for =
            |len: usize| dir == Dir::Read && usize::try_from(room).is_ok_and(|r| r >= len);
        match request {
            Request::Io(io) => {
                let prio = if session.version >= VERSION_MAJOR { io.prio } else { 0 };
                let Some(device) = session.device(io.device) else {
                    return reply(Errno::ENOTCONN);
                };
                let ctx = Context { limits: &device.limits, access: device.access, dir, data_len };
                let valid = match check(ctx, &io) {
                    Ok(Some(valid)) => valid,
                    Ok(None) => return SUCCESS,
                    Err(errno) => return reply(errno),
                };
                device.in_flight += 1;
                let open = OpenId { session: key, device: io.device };
                Act::Io {
                    export: device.export,
                    io: CheckedIo {
                        op: valid.op,
                        offset: valid.offset,
                        len: valid.len,
                        fua: valid.fua,
                        preflush: valid.preflush,
                        nounmap: valid.nounmap,
                        prio,
                        open,
                    },
                }
            }
            Request::SessInfo { ver } => {
                if !room_for(SESS_INFO_LEN) {
                    return reply(Errno::EINVAL);
                }
                session.version = ver.min(VERSION_MAJOR);
                let data = Reply::SessInfo(wire::emit_sess_info_rsp(session.version));
                Act::Reply { errno: 0, data }
            }
            Request::Open { access, name } => {
                if !room_for(OPEN_RSP_LEN) {
                    return reply(Errno::EINVAL);
                }
                self.open(key, access, name)
            }
            Request::Close { id } => self.close(key, id),
        }
    }

    /// Handles an OPEN up to the point where the export is needed [NB-17].
    fn open(&mut self, key: SessKey, access: u8, name: &[u8]) -> Act {
        let Some(session) = self.sessions.get_mut(&key) else { return reply(Errno::ENODEV) };
        if let Some((id, device)) = session.by_name(name) {
            // A repeated OPEN gets the same id, whatever its access mode. Clients that lost their
            // state, and failovers that repeat the message, rely on it.
            let data = Reply::Open(open_rsp(id, &device.limits).emit());
            return Act::Reply { errno: 0, data };
        }
        let Some(access) = Access::parse(access) else { return reply(Errno::EINVAL) };
        if name.windows(2).any(|two| two == b"..") {
            return reply(Errno::EINVAL);
        }
        let ticket = Ticket(self.tickets);
        self.tickets = self.tickets.wrapping_add(1);
        let same = |opening: &&mut PendingOpen| opening.session == key && opening.name == name;
        if let Some(opening) = self.opening.values_mut().find(same) {
            opening.tickets.push(ticket);
            return Act::Later { ticket };
        }
        let name = name.to_vec();
        let opening =
            PendingOpen { session: key, name: name.clone(), access, tickets: vec![ticket] };
        self.opening.insert(ticket, opening);
        Act::Open { ticket, name, access }
    }

    /// Tells the result of opening an export. A success counts as one open of it, which
    /// [`Core::poll_release`] gives back when it is needed no longer.
    pub fn opened(&mut self, ticket: Ticket, result: Result<(ExportId, Limits), Errno>) {
        let Some(opening) = self.opening.remove(&ticket) else {
            self.releases.extend(result.ok().map(|(export, _)| export));
            return;
        };
        let answer = match result {
            Err(errno) => Err(errno),
            Ok((export, limits)) => {
                let admitted = self.admit(&opening, export, limits);
                if admitted.is_err() {
                    self.releases.push_back(export);
                }
                admitted.map(|id| Reply::Open(open_rsp(id, &limits).emit()))
            }
        };
        if let Some(session) = self.sessions.get(&opening.session) {
            let PendingOpen { name, access, .. } = &opening;
            let change = match answer {
                Ok(_) => ClientChange::Opened(name.clone(), *access),
                Err(errno) => ClientChange::Refused(name.clone(), *access, errno),
            };
            self.events.add(&session.name, change);
        }
        for ticket in opening.tickets {
            let (errno, data) = match answer {
                Ok(data) => (0, data),
                Err(errno) => (errno.neg(), Reply::None),
            };
            self.answers.push_back(Answer { ticket, errno, data });
        }
    }

    /// Steps 5 to 7 of an OPEN, once the export is open [NB-17] [NB-19] [NB-58].
    fn admit(
        &mut self,
        opening: &PendingOpen,
        export: ExportId,
        limits: Limits,
    ) -> Result<u32, Errno> {
        let session = self.sessions.get_mut(&opening.session).ok_or(Errno::ENODEV)?;
        if limits.read_only && opening.access != Access::Ro {
            return Err(Errno::EACCES);
        }
        let mut entry = self.exports.get(&export).map_or_else(Writers::default, |e| e.writers);
        entry.admit(opening.access)?;
        if session.devices.values().any(|device| device.export == export) {
            return Err(Errno::EEXIST);
        }
        if session.devices.len() >= self.limits.devices_per_session {
            return Err(Errno::ENOMEM);
        }
        let device = Device {
            export,
            limits,
            name: opening.name.clone(),
            access: opening.access,
            in_flight: 0,
            closing: None,
        };
        while session.devices.contains_key(&self.next_id) {
            self.next_id = self.next_id.wrapping_add(1);
        }
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        session.devices.insert(id, device);
        let kept = self.exports.entry(export).or_default();
        kept.writers = entry;
        kept.opens += 1;
        Ok(id)
    }

    /// Handles a CLOSE [NB-20].
    fn close(&mut self, key: SessKey, id: u32) -> Act {
        let Some(session) = self.sessions.get_mut(&key) else { return reply(Errno::ENODEV) };
        let Some(device) = session.devices.get_mut(&id) else { return SUCCESS };
        if device.in_flight == 0 && device.closing.is_none() {
            self.finish_close(key, id);
            return SUCCESS;
        }
        let ticket = Ticket(self.tickets);
        self.tickets = self.tickets.wrapping_add(1);
        device.closing.get_or_insert_default().push(ticket);
        Act::Later { ticket }
    }

    /// Closes a device whose peer has not asked for it. IO on it gets -ENOTCONN [NB-21].
    ///
    /// # Errors
    /// `ENODEV` when there is no such open device.
    pub fn force_close(&mut self, open: OpenId) -> Result<(), Errno> {
        let session = self.sessions.get_mut(&open.session).ok_or(Errno::ENODEV)?;
        let device = session.device(open.device).ok_or(Errno::ENODEV)?;
        device.closing = Some(Vec::new());
        if device.in_flight == 0 {
            self.finish_close(open.session, open.device);
        }
        Ok(())
    }

    /// Tells that storage has finished an IO. Ignored if the device is closed already.
    pub fn io_done(&mut self, open: OpenId) {
        let Some(session) = self.sessions.get_mut(&open.session) else { return };
        let Some(device) = session.devices.get_mut(&open.device) else { return };
        device.in_flight = device.in_flight.saturating_sub(1);
        if device.in_flight == 0 && device.closing.is_some() {
            self.finish_close(open.session, open.device);
        }
    }

    fn finish_close(&mut self, key: SessKey, id: u32) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        let Some(mut device) = session.devices.remove(&id) else { return };
        let answers = device.closing.take().into_iter().flatten();
        self.answers.extend(answers.map(|ticket| Answer { ticket, errno: 0, data: Reply::None }));
        self.events.add(&session.name, ClientChange::Closed(device.name.clone()));
        self.release(&device);
    }

    fn release_all(&mut self, session: &Session) {
        for device in session.devices.values() {
            let closing = device.closing.iter().flatten();
            let gone = closing.map(|&ticket| Answer { ticket, errno: 0, data: Reply::None });
            self.answers.extend(gone);
            self.events.add(&session.name, ClientChange::Closed(device.name.clone()));
            self.release(device);
        }
    }

    fn release(&mut self, device: &Device) {
        if let Some(export) = self.exports.get_mut(&device.export) {
            export.writers.release(device.access);
            export.opens -= 1;
            if export.opens == 0 {
                self.exports.remove(&device.export);
            }
        }
        self.releases.push_back(device.export);
    }

    /// Sets new limits of an export, by which IO of its open devices is checked from now on. Peers
    /// learn of them when they open it again.
    pub fn set_limits(&mut self, export: ExportId, limits: Limits) {
        for device in self.sessions.values_mut().flat_map(|s| s.devices.values_mut()) {
            if device.export == export {
                device.limits = limits;
            }
        }
    }

    /// Returns the next deferred answer.
    pub fn poll_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// Returns the next export of which one open is given back.
    pub fn poll_release(&mut self) -> Option<ExportId> {
        self.releases.pop_front()
    }

    /// Returns every open device, in the order of sessions and ids.
    pub fn opens(&self) -> Vec<OpenInfo> {
        let all = self.sessions.iter();
        all.flat_map(|(&key, session)| {
            session.devices.iter().map(move |(&id, device)| OpenInfo {
                id: OpenId { session: key, device: id },
                session_name: session.name.clone(),
                export: device.export,
                mapping_path: device.name.clone(),
                access: device.access,
                in_flight: device.in_flight,
            })
        })
        .collect()
    }

    /// Asserts the invariants that hold between calls; for tests and the simulator.
    ///
    /// # Panics
    /// When an invariant is broken.
    pub fn check_invariants(&self) {
        let mut seen: BTreeMap<ExportId, (u32, u32)> = BTreeMap::new();
        for session in self.sessions.values() {
            let mut names: Vec<_> = session.devices.values().map(|d| d.export).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), session.devices.len(), "one export opened twice");
            for device in session.devices.values() {
                let (opens, writers) = seen.entry(device.export).or_default();
                *opens += 1;
                *writers += u32::from(device.access != Access::Ro);
                assert!(device.closing.is_none() || device.in_flight > 0, "closed long ago");
            }
        }
        let kept = self.exports.iter().map(|(&id, e)| (id, (e.opens, e.writers.count())));
        assert!(seen.into_iter().eq(kept), "opens and exports disagree");
    }
}

#[cfg(test)]
mod tests;
