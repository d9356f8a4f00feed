//! bowline's RDMA verbs: two soft devices in two processes, connected by the connection manager,
//! with default settings except for what the cell itself asks for.

mod atomics;
mod bulk;
mod end;
mod small;

use crate::cell::Kind;
use crate::role::{Role, Side};

/// Runs one side of a cell of RoCEv2.
pub(crate) fn run(role: Role) -> Result<(), String> {
    match (role.cell.kind, role.side) {
        (Kind::Write, Side::Rx) => bulk::written(role),
        (Kind::Write, Side::Tx) => bulk::write(role),
        (Kind::Read, Side::Rx) => bulk::read(role),
        (Kind::Read, Side::Tx) => bulk::be_read(role),
        (Kind::Send | Kind::SendImm, Side::Rx) => small::receive(role),
        (Kind::Send | Kind::SendImm, Side::Tx) => small::send(role),
        (Kind::Atomic, Side::Rx) => atomics::add(role),
        (Kind::PingAtomic, Side::Tx) => atomics::ask(role),
        (Kind::Atomic, Side::Tx) | (Kind::PingAtomic, Side::Rx) => atomics::be_added_to(role),
        (Kind::PingSend | Kind::PingWrite, Side::Rx) => small::answer(role),
        (Kind::PingSend | Kind::PingWrite, Side::Tx) => small::ask(role),
        (kind, _) => Err(format!("RoCEv2 has no cell {}", kind.name())),
    }
}
