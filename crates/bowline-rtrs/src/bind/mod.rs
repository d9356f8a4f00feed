//! Carries out the orders of a core on any verbs, and translates the results.
//!
//! ```text
//!   core --- Order ---> run_order --> queue pairs, regions, connections   (one Binding each core)
//!        --- Batch ---> run_batch --> post_recv, post_send
//!        <-- Input ---- both of them, and cm() for events of the connection manager
//!        <-- Done ----- done_of() each completion
//! ```
//! Only this code knows which queue pair and which connection-manager id belongs to a [`ConnId`].
//! It is generic, so that the simulator runs the same code as the driver.

mod domains;
mod pack;
mod post;
mod regions;
mod table;
#[cfg(test)]
mod tests;
mod verbs;

use bowline_verbs::{
    CmEvent, CmId, Completion, ConnParam, Error, PdId, Qpn, RecvWr, SendFlags, SendOp, SendWr,
};

pub use post::withdraw;
pub use verbs::{Ports, Verbs};

use self::pack::Bursts;
use self::post::Scratch;
use self::regions::{Regions, Registration};
use self::table::{CmIdOwner, Conn, Table};
use crate::{ConnId, Done, Errno, Input, Order, PortAttr, PortId, QpShape, RequestId, Tag};

/// Translates the completion of a work request that a binding posted.
pub fn done_of(completion: &Completion) -> Done {
    Done {
        conn: ConnId::unpack((completion.wr_id >> 32) as u32),
        tag: Tag(completion.wr_id as u32),
        status: completion.status,
        opcode: completion.opcode,
        len: completion.byte_len,
        imm: completion.imm,
        invalidated: completion.invalidated,
    }
}

/// The work request id of a connection's tag; [`done_of`] reverses it.
const fn wr_id(conn: ConnId, tag: Tag) -> u64 {
    (conn.pack() as u64) << 32 | tag.0 as u64
}

/// The queue pairs, connections and regions of one core.
#[derive(Debug)]
pub struct Binding {
    ports: usize,
    table: Table,
    regions: Regions,
    requests: u32,
    scratch: Scratch,
}

impl Binding {
    /// Makes the binding of a client with this many ports.
    pub fn new(ports: usize) -> Self {
        Self {
            ports,
            table: Table::default(),
            regions: Regions::default(),
            requests: 0,
            scratch: Scratch::default(),
        }
    }

    /// Makes the binding of a server. Its clients do not trust each other: each path has a separate
    /// protection domain, which contains no memory of others [RT-64].
    pub fn of_server(ports: usize) -> Self {
        Self { regions: Regions::of_server(), ..Self::new(ports) }
    }

    /// Whether nothing that was ordered is left.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty() && self.regions.is_empty()
    }

    /// Assigns a listener to this core: it gets the connection requests that come there.
    pub fn listen(&mut self, port: PortId, listener: CmId) {
        self.table.name(port, listener, CmIdOwner::Listener);
    }

    /// Ends the assignment of a listener.
    pub fn forget_listener(&mut self, port: PortId, listener: CmId) {
        self.table.forget_name(port, listener);
    }

    /// Whether an event belongs to this core.
    pub fn is_for(&self, port: PortId, event: &CmEvent) -> bool {
        let id = match event {
            CmEvent::ConnectRequest { request, .. } => request.listener,
            event => event.id(),
        };
        self.table.cm_id_owner(port, id).is_some()
    }

    /// Carries out an order.
    pub fn run_order(&mut self, ports: &mut dyn Ports, order: Order, out: &mut Vec<Input>) {
        match order {
            Order::AddRegion { region, buffer, access, granule, ports: on, path } => {
                let what = Registration { buffer: &buffer, access, granule, on, path };
                self.regions.add(ports, self.ports, region, &what, out);
            }
            Order::DropRegion { region } => self.regions.drop_region(ports, region),
            Order::AddKeys { path, port, count } => {
                let keys = self.regions.add_keys(ports, path, port, count);
                let keys = keys.map_err(|error| error.errno());
                out.push(Input::Keys { path, keys });
            }
            Order::DropKeys { path } => self.regions.drop_keys(ports, path),
            Order::Connect { conn, port, local, remote, shape, private, retry_count } => {
                let param = ConnParam { retry_count, ..param(&private) };
                let connect = |verbs: &mut dyn Verbs, param: &ConnParam| {
                    verbs.connect(local, remote, param).map(|id| (id, Ok(())))
                };
                let pd = self.regions.enter(ports, port, conn.path);
                let what = (conn, port, pd, &shape);
                let made = open(ports, what, param, out, |_, _| Ok(()), connect);
                self.keep(ports, conn, made);
            }
            Order::Accept { conn, request, shape, private, first } => {
                let Some((port, id)) = self.table.take_request(request) else {
                    // The client has given up in the meantime.
                    out.push(Input::Failed { conn, errno: Errno::ECONNRESET });
                    return;
                };
                let pd = self.regions.enter(ports, port, conn.path);
                let regions = &self.regions;
                let mut scratch = std::mem::take(&mut self.scratch);
                let first = |verbs: &mut dyn Verbs, qpn| match &first {
                    None => Ok(()),
                    Some(slot) => scratch.post_first(verbs, regions, (port, qpn), slot),
                };
                // The request belongs to this connection even if accepting it fails: it ends with
                // the connection.
                let accept =
                    |verbs: &mut dyn Verbs, param: &ConnParam| Ok((id, verbs.accept(id, param)));
                let what = (conn, port, pd, &shape);
                let made = open(ports, what, param(&private), out, first, accept);
                self.scratch = scratch;
                if !self.keep(ports, conn, made) {
                    // The core gets the error and then refuses the request.
                    self.table.add_request(request, port, id);
                }
            }
            Order::Reject { request, private } => {
                if let Some((port, id)) = self.table.take_request(request) {
                    let verbs = ports.port(port);
                    // A client that has given up needs no answer.
                    let _ = verbs.reject(id, &private);
                    let _ = verbs.destroy_id(id);
                }
            }
            Order::Close { conn } => self.close(ports, conn, out),
            Order::Forget { conn } => {
                self.forget(ports, conn);
                out.push(Input::Drained { conn });
            }
        }
    }

    /// Registers a connection that was begun; returns whether there is one.
    fn keep(&mut self, ports: &mut dyn Ports, conn: ConnId, made: Begun) -> bool {
        match made {
            Begun::Conn(made) => {
                self.table.insert(conn, made);
                return true;
            }
            Begun::Nothing => self.regions.leave(ports, conn.path),
            Begun::NoDomain => {}
        }
        false
    }

    fn close(&mut self, ports: &mut dyn Ports, conn: ConnId, out: &mut Vec<Input>) {
        let Some(known) = self.table.get_mut(conn) else {
            out.push(Input::Drained { conn });
            return;
        };
        known.dead = true;
        let verbs = ports.port(known.port);
        if verbs.fail_qp(known.qpn).is_err() {
            // The device is gone, or does not execute commands any more, so its queues would never
            // be flushed [RT-100].
            self.forget(ports, conn);
            out.extend([Input::Drained { conn }, Input::Disconnected { conn }]);
            return;
        }
        let marker = |index| wr_id(conn, Tag::new(Tag::DRAIN, index));
        let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
        let send = SendWr { id: marker(0), op, sges: &[], inline: &[], flags };
        let posted = verbs.post_send(known.qpn, &[send]).is_ok()
            && verbs.post_recv(known.qpn, &[RecvWr { id: marker(1), sges: &[] }]).is_ok();
        if !posted {
            out.push(Input::Drained { conn });
        }
        // An established connection of which this side had not heard yet is closed with this input
        // too: the peer may already have sent its disconnect.
        if verbs.disconnect(known.id).is_err() && known.established {
            out.push(Input::Disconnected { conn });
        }
    }

    fn forget(&mut self, ports: &mut dyn Ports, conn: ConnId) {
        if let Some(known) = self.table.remove(conn) {
            let verbs = ports.port(known.port);
            // Fails only if the device is gone, and the objects with it.
            let _ = verbs.destroy_id(known.id);
            let _ = verbs.destroy_qp(known.qpn);
            self.regions.leave(ports, conn.path);
        }
    }

    /// Translates an event of a port's connection manager; `None` if it does not concern the core.
    pub fn cm(&mut self, port: PortId, event: CmEvent) -> Option<Input> {
        if let CmEvent::ConnectRequest { id, request } = event {
            self.table.cm_id_owner(port, request.listener)?;
            self.requests = self.requests.wrapping_add(1);
            let name = RequestId(self.requests);
            self.table.add_request(name, port, id);
            let (local, remote) = (request.local, request.remote);
            let private = request.private_data;
            return Some(Input::ConnectRequest { request: name, port, local, remote, private });
        }
        let conn = match self.table.cm_id_owner(port, event.id())? {
            CmIdOwner::Conn(conn) => conn,
            CmIdOwner::Request(request) => {
                // Ended before it was answered.
                self.table.take_request(request);
                return None;
            }
            CmIdOwner::Listener => return None,
        };
        match event {
            CmEvent::Established { private_data: private, .. } => {
                self.table.get_mut(conn)?.established = true;
                Some(Input::Established { conn, private })
            }
            CmEvent::Rejected { reason, private_data: private, .. } => {
                Some(Input::Refused { conn, reason, private })
            }
            CmEvent::Unreachable { .. } => Some(Input::Failed { conn, errno: Errno::EHOSTUNREACH }),
            CmEvent::Disconnected { .. } => Some(Input::Disconnected { conn }),
            _ => None,
        }
    }

    /// Translates the failure of a queue pair that the device has reported.
    pub fn qp_failed(&self, port: PortId, qpn: Qpn) -> Option<Input> {
        let conn = self.table.find(port, qpn)?;
        Some(Input::Failed { conn, errno: Errno::ECONNRESET })
    }

    /// Handles that a device is gone, or reports that it can do nothing more. Its connections fail
    /// and are destroyed, so that no work request accesses memory any more; their ends need not be
    /// awaited. From now on memory is registered without this device, and no connection is begun
    /// there.
    pub fn device_gone(&mut self, ports: &mut dyn Ports, port: PortId, out: &mut Vec<Input>) {
        self.regions.device_gone(port);
        let conns = self.table.all_on(port);
        conns.iter().for_each(|&conn| self.forget(ports, conn));
        out.extend(conns.iter().map(|&conn| Input::Failed { conn, errno: Errno::ENODEV }));
        for conn in conns {
            out.extend([Input::Drained { conn }, Input::Disconnected { conn }]);
        }
    }
}

/// The connection-manager id, and the error of beginning the connection, if any.
type Started = Result<(CmId, Result<(), Error>), Error>;

/// The connection parameters of RTRS [RT-26]; an accept ignores `retry_count`.
fn param(private: &[u8; 56]) -> ConnParam {
    ConnParam {
        private_data: private.to_vec(),
        responder_resources: 0,
        initiator_depth: 0,
        retry_count: 7,
        rnr_retry_count: 7,
        ..ConnParam::default()
    }
}

/// The result of an order to open a connection.
enum Begun {
    Conn(Conn),
    /// No object is left.
    Nothing,
    /// No protection domain could be made either.
    NoDomain,
}

/// Adds room for split requests to a queue pair, if its device batches and has room. Outstanding
/// work requests begin behind a signalled message, and each data request is followed by a message.
/// So at most half of them are data requests, each in two parts at most. The caller adds an entry
/// for the drain marker.
fn with_parts(attr: PortAttr, shape: &QpShape) -> (Bursts, QpShape) {
    let (bytes, send_wr) = (attr.burst as u64, shape.send_wr + shape.send_wr / 2);
    let split = bytes > 0 && send_wr < attr.max_qp_wr;
    let send_wr = if split { send_wr } else { shape.send_wr };
    (Bursts { bytes, split, packet: attr.mtu as u64 }, QpShape { send_wr, ..*shape })
}

/// Makes a queue pair and begins its connection. On failure says [`Input::Failed`]; then no object
/// is left, unless the connection has an id.
fn open(
    ports: &mut dyn Ports,
    (conn, port, pd, shape): (ConnId, PortId, Result<Option<PdId>, Error>, &QpShape),
    mut param: ConnParam,
    out: &mut Vec<Input>,
    first: impl FnOnce(&mut dyn Verbs, Qpn) -> Result<(), Error>,
    start: impl FnOnce(&mut dyn Verbs, &ConnParam) -> Started,
) -> Begun {
    let verbs = ports.port(port);
    let failed = |error: &Error| Input::Failed { conn, errno: error.errno() };
    let pd = match pd {
        Ok(pd) => pd,
        Err(error) => {
            out.push(failed(&error));
            return Begun::NoDomain;
        }
    };
    let (bursts, shape) = with_parts(verbs.attr(), shape);
    let begun = verbs.create_qp(pd, &shape).and_then(|qpn| {
        param.qpn = qpn;
        let begun = first(verbs, qpn).and_then(|()| start(verbs, &param));
        if begun.is_err() {
            let _ = verbs.destroy_qp(qpn);
        }
        begun
    });
    match begun {
        Ok((id, went)) => {
            if let Err(error) = &went {
                out.push(failed(error));
            }
            Begun::Conn(Conn::new(port, param.qpn, id, bursts))
        }
        Err(error) => {
            out.push(failed(&error));
            Begun::Nothing
        }
    }
}
