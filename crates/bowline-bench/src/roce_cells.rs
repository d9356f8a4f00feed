//! bowline's RDMA verbs: two soft devices in two processes, connected by the connection manager,
//! with default settings except for what the cell itself asks for.

mod atomics;
mod bulk;
mod end;
mod small;

use crate::cell::{Cell, Kind};
use crate::role::Sides;

/// The sides of a cell of RoCEv2.
pub(crate) fn sides(cell: &Cell) -> Option<Sides> {
    Some(match cell.kind {
        Kind::Write => Sides(bulk::written, bulk::write),
        Kind::Read => Sides(bulk::read, bulk::be_read),
        Kind::Send | Kind::SendImm => Sides(small::receive, small::send),
        Kind::Atomic => Sides(atomics::add, atomics::be_added_to),
        Kind::PingAtomic => Sides(atomics::be_added_to, atomics::ask),
        Kind::PingSend | Kind::PingWrite => Sides(small::answer, small::ask),
        _ => return None,
    })
}
