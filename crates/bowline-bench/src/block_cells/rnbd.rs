//! RNBD: an export of memory, and a mapped disk.

use std::net::SocketAddr;
use std::sync::Arc;

use bowline_block::backend::{Backend, BackendSpec, open};
use bowline_block::{BlockDevice, DiskDone, DiskIo, IoOp};
use bowline_rnbd_driver::{Client, ExportServer, Exports, MapOptions, ServerConfig};
use bowline_rtrs_driver::{Engine, PORT};

use super::rtrs::geometry;
use super::{Ended, Gauge, Load, NAP, addresses, engine, fill, probe, succeeded};
use crate::cell::{Kind, Wait};
use crate::role::{Role, Side, done, stopping};

/// Exports a store of memory; whether it is filled, the cell says.
pub(super) fn export(role: &Role, engine: &Arc<Engine>) -> Result<Arc<ExportServer>, String> {
    let spec = BackendSpec::Memory { bytes: role.cell.store() as u64, block: 512 };
    let store: Arc<dyn Backend> = open(spec).map_err(|e| format!("memory: {e}"))?;
    if let Some(memory) = store.region().filter(|_| role.cell.kind != Kind::DoorWrite) {
        fill(&memory);
        // As it is some time after others have filled it.
        memory.enlarge_pages(0, memory.len());
    }
    let mut exports = Exports::new();
    exports.backend("store", store).map_err(|e| e.to_string())?;
    let at: Vec<SocketAddr> =
        addresses(&role.cell, Side::Rx).into_iter().map(|ip| SocketAddr::new(ip, PORT)).collect();
    let mut config = ServerConfig::default();
    config.rtrs.geometry = geometry(role.cell.size)?;
    ExportServer::open(engine, &at, config, exports).map_err(|e| e.to_string())
}

pub(super) fn serve(mut role: Role) -> Result<(), String> {
    let (_device, engine) = engine(&role)?;
    let _server = export(&role, &engine)?;
    role.ready("")?;
    while !stopping() {
        std::thread::sleep(NAP);
    }
    Ok(())
}

impl DiskDone for Ended {
    fn done(&self, results: &[(u64, i32)]) {
        self.extend(results.iter().copied());
    }
}

pub(super) fn ask(mut role: Role) -> Result<(), String> {
    let (device, engine) = engine(&role)?;
    role.ready("")?;
    let (size, depth) = (role.cell.size, role.cell.depth);
    let (near, far) = (addresses(&role.cell, Side::Tx), addresses(&role.cell, Side::Rx));
    let options = MapOptions::new("bench");
    let options = near
        .into_iter()
        .zip(far)
        .fold(options, |options, (near, far)| options.path(Some(near), far));
    let client = Client::new(Arc::clone(&engine), options.clone());
    let disk = client.map_with("store", &options).map_err(|e| e.to_string())?;
    let memory = disk.memory(depth * size).map_err(|e| e.to_string())?;
    let mut load = Load::new(&role.cell);
    let op = if load.write { IoOp::Write } else { IoOp::Read };
    let ended = Arc::new(Ended::default());
    let mut gauge = Gauge::new(&role, Some(probe(&device)));
    let mut offsets = vec![0; depth];
    let mut requests = Vec::with_capacity(depth);
    let mut free: Vec<(u64, i32)> = (0..depth as u64).map(|slot| (slot, 0)).collect();
    let mut answers = 0;
    while !stopping() {
        for (slot, _) in &free {
            let (offset, at) = (load.next(), *slot as usize * size);
            gauge.asked(*slot as usize);
            offsets[*slot as usize] = offset;
            if load.write {
                memory.write(at, &offset.to_le_bytes());
            }
            let done = Arc::clone(&ended) as Arc<dyn DiskDone>;
            let mut io = DiskIo::new(op, offset, size as u32, done).tag(*slot);
            io.mem = Some((memory.region, at));
            requests.push(io);
        }
        disk.submit(&mut requests);
        loop {
            let seen = disk.ended();
            ended.take(&mut free);
            if !free.is_empty() || stopping() {
                break;
            }
            if role.cell.wait == Wait::Spin {
                disk.poll();
            } else {
                disk.wait(seen, Some(NAP));
            }
        }
        succeeded(&free)?;
        free.iter().for_each(|(slot, _)| gauge.answered(*slot as usize));
        for (slot, _) in free.iter().filter(|_| !load.write) {
            let mut first = [0; 8];
            memory.read(*slot as usize * size, &mut first);
            load.check(offsets[*slot as usize], first)?;
        }
        answers += free.len() as u64;
        if gauge.add(free.len()) {
            break;
        }
    }
    done(answers, device.stats().udp_syscalls());
    std::process::exit(0); // what is on its way matters to nobody any more
}
