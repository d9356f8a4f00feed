//! A hand-made client that gives notice of a path it has given up [RT-101]: the server closes that
//! path first.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bowline_rtrs_driver::server::{CloseReason, Handler, LinkEv, Request, Server};
use bowline_rtrs_driver::{Errno, PORT};
use bowline_verbs::{Device, Remote, SendFlags, SendOp, SendWr, Sge};
use bowline_wire::rtrs::{Imm, PathLife, write_hdr};

use crate::common::{at, device, engine, eventually, ip};
use crate::raw::{Conn, Ids, Raw, raw};
use crate::scene::{ELSEWHERE, Turn, config};

/// Looks, before it serves anything, whether a connection of somebody has ended.
struct Watcher {
    other: Mutex<Option<(Raw, Conn)>>,
    ended: Mutex<Vec<bool>>,
}

impl Handler for Watcher {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        if let Some((raw, conn)) = &mut *self.other.lock().unwrap() {
            self.ended.lock().unwrap().push(raw.is_dropped(*conn));
        }
        server.respond(&mut requests.drain(..).map(|request| (request.op, 0, None)));
    }

    fn link_ev(&self, _: &Server, _: LinkEv) -> Result<(), Errno> {
        Ok(())
    }
}

// tests [RT-101]: the path is closed on its device before messages that came after the notice are
// handed over
#[test]
fn a_path_that_is_given_up_is_dead_before_its_requests_begin_elsewhere() {
    let _turn = Turn::beside();
    let (to, net) = (ip(87, 101), 87);
    let server_device = device(&[to]);
    let engine = engine(&server_device);
    let watcher = Arc::new(Watcher { other: Mutex::default(), ended: Mutex::default() });
    let at_port = [SocketAddr::new(to, PORT)];
    let server = Server::open(&engine, &at_port, config(true), Arc::clone(&watcher) as _).unwrap();
    let (mut one, mut two) = (raw(ip(net, 66)), raw(ip(net, 67)));
    let ids = Ids { gives_notice: true, ..Ids::new() };
    let given_up = one.path(to, &ids, 2, "moves");
    let goes_on = Ids { gives_notice: true, ..Ids::into(ids.session) };
    let path = two.path(to, &goes_on, 2, "moves");
    path.conns.iter().for_each(|conn| two.post_recvs(*conn, 8));
    *watcher.other.lock().unwrap() = Some((one, given_up.conns[1]));
    // Both together, on one connection.
    let bytes = [at(ELSEWHERE).to_vec(), write_hdr(8).to_vec()].concat();
    two.buffer.write(0, &bytes);
    let sges = [Sge { addr: 0, len: bytes.len() as u32, lkey: two.keys.lkey }];
    let (addr, rkey) = path.chunks[1];
    let wr = |id, remote, imm: Imm, sges| {
        let op = SendOp::WriteImm(remote, imm.to_u32());
        SendWr { id, op, sges, inline: &[], flags: SendFlags::SIGNALED }
    };
    let notice = Imm::GivenUp(PathLife::new(&ids.path, 1));
    let request = Imm::Request(path.geometry.request_payload(1, 8));
    let both =
        [wr(5, Remote::default(), notice, &[]), wr(6, Remote { addr, rkey }, request, &sges[..])];
    two.dev.post_send(path.conns[1].qp, &both).unwrap();
    eventually("it is handed over", || !watcher.ended.lock().unwrap().is_empty());
    assert_eq!(*watcher.ended.lock().unwrap(), [true], "while the path that was given up lives");
    assert_eq!(server.counters().notices, 1);
    assert_eq!(server.counters().paths_violated, 0);
    assert!(!CloseReason::GivenUp.is_violation());
    let (mut one, _) = watcher.other.lock().unwrap().take().unwrap();
    one.leave(&given_up.conns);
    two.leave(&path.conns);
    engine.close();
}
