//! RTRS: a server that keeps a store in memory, and a client of its library API.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bowline_rtrs_driver::client::{
    Completed, Completer, Done, Permit, PermitKind, Req, Session, SessionBuilder, Wait as Permits,
};
use bowline_rtrs_driver::server::{Handler, LinkEv, OpId, Request, Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Errno, MemRef, PORT, RegionId};
use bowline_verbs::Buffer;

use super::{Ended, Gauge, Load, NAP, STORE, addresses, engine, fill, probe, succeeded};
use crate::cell::{Subject, Wait};
use crate::role::{Role, Side, done, stopping};

/// A request's answer.
type Answer = (OpId, i32, Option<MemRef>);

struct Store {
    memory: Arc<Buffer>,
    region: OnceLock<RegionId>,
    answers: Mutex<Vec<Answer>>,
}

impl Store {
    fn carry_out(&self, server: &Server, request: &Request) -> Result<Option<MemRef>, Errno> {
        let offset: [u8; 8] = request.usr[..].try_into().map_err(|_| Errno::EINVAL)?;
        let offset = u64::from_le_bytes(offset);
        let region = *self.region.get().ok_or(Errno::EIO)?;
        let len = if request.dir == Dir::Read { request.room } else { request.data.len };
        if offset.checked_add(len.into()).is_none_or(|end| end > STORE as u64) {
            return Err(Errno::EIO);
        }
        if request.dir == Dir::Read {
            return Ok(Some(MemRef { region, offset, len }));
        }
        let chunk = server.chunk(request).ok_or(Errno::EIO)?;
        chunk.buffer.copy_to(chunk.offset, &self.memory, offset as usize, len as usize);
        Ok(None)
    }
}

impl Handler for Store {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.extend(requests.drain(..).map(|request| match self.carry_out(server, &request) {
            Ok(from) => (request.op, 0, from),
            Err(errno) => (request.op, -errno.0, None),
        }));
        server.respond(&mut answers.drain(..));
    }

    fn link_ev(&self, _: &Server, _: LinkEv) -> Result<(), Errno> {
        Ok(())
    }
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let (_device, engine) = engine(&role)?;
    let memory = Arc::new(Buffer::new(STORE).map_err(|e| format!("memory: {e}"))?);
    fill(&memory);
    let store = Arc::new(Store { memory, region: OnceLock::new(), answers: Mutex::default() });
    let at: Vec<SocketAddr> =
        addresses(&role.cell, Side::Rx).into_iter().map(|ip| SocketAddr::new(ip, PORT)).collect();
    let always_invalidate = role.cell.subject != Subject::RtrsKept;
    let config = ServerConfig { always_invalidate, ..ServerConfig::default() };
    let server = Server::open(&engine, &at, config, Arc::clone(&store) as Arc<dyn Handler>);
    let server = server.map_err(|e| e.to_string())?;
    let region = server.add_region(Arc::clone(&store.memory)).map_err(|e| e.to_string())?;
    store.region.get_or_init(|| region);
    role.ready("")?;
    while !stopping() {
        std::thread::sleep(NAP);
    }
    Ok(())
}

impl Completer for Ended {
    fn completed(&self, done: &[Completed]) {
        self.extend(done.iter().map(|done| (done.tag, done.errno)));
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (device, engine) = engine(&role)?;
    role.ready("")?;
    let (size, depth) = (role.cell.size, role.cell.depth);
    let paths: Vec<_> = addresses(&role.cell, Side::Tx)
        .into_iter()
        .map(Some)
        .zip(addresses(&role.cell, Side::Rx))
        .collect();
    let builder = SessionBuilder::new("bench").map_err(|e| e.to_string())?.paths(&paths);
    let session = Session::open(&engine, builder).map_err(|e| e.to_string())?;
    let region = session.region(depth * size).map_err(|e| e.to_string())?;
    let permits: Vec<Permit> =
        (0..depth).map_while(|_| session.get_permit(PermitKind::Io, Permits::No)).collect();
    if permits.len() < depth {
        return Err(format!("{} permits instead of {depth}", permits.len()));
    }
    let mut load = Load::new(&role.cell);
    let dir = if load.write { Dir::Write } else { Dir::Read };
    let ended = Arc::new(Ended::default());
    let mut gauge = Gauge::new(&role, Some(probe(&device)));
    let mut offsets = vec![[0; 8]; depth];
    let mut free: Vec<(u64, i32)> = (0..depth as u64).map(|slot| (slot, 0)).collect();
    let mut answers = 0;
    while !stopping() {
        for (slot, _) in &free {
            let offset = load.next().to_le_bytes();
            offsets[*slot as usize] = offset;
            if load.write {
                region.buffer().write(*slot as usize * size, &offset);
            }
        }
        let pieces: Vec<MemRef> =
            free.iter().map(|(slot, _)| region.piece(*slot as usize * size, size as u32)).collect();
        let mut requests = free.iter().zip(&pieces).map(|((slot, _), piece)| Req {
            dir,
            permit: &permits[*slot as usize],
            usr: &offsets[*slot as usize],
            data: std::slice::from_ref(piece),
            done: Done { to: Arc::clone(&ended) as Arc<dyn Completer>, tag: *slot },
        });
        let sent = session.request_batch(&mut requests).map_err(|e| e.to_string())?;
        if sent < pieces.len() {
            return Err(format!("{sent} of {} requests could be sent", pieces.len()));
        }
        loop {
            ended.take(&mut free);
            if !free.is_empty() || stopping() {
                break;
            }
            if role.cell.wait == Wait::Spin {
                session.poll();
            } else {
                session.wait(Some(NAP));
            }
        }
        succeeded(&free)?;
        for (slot, _) in free.iter().filter(|_| !load.write) {
            let mut first = [0; 8];
            region.buffer().read(*slot as usize * size, &mut first);
            load.check(u64::from_le_bytes(offsets[*slot as usize]), first)?;
        }
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, device.stats().udp_syscalls());
    std::process::exit(0); // what is on its way matters to nobody any more
}
