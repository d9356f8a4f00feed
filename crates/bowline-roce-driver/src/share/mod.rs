//! Several processes with the addresses of one machine: each has a device of its own.
//!
//! ```text
//!                     UDP port 4791 of an address, several sockets
//!   queue pair 0x00....        0x01....              0x02....
//!          |                      |                     |
//!   the host's device      a guest's device      a guest's device
//!          |                      ^                     ^
//!          +--- queue pair 1: connection messages ------+
//! ```
//! The highest byte of a queue pair number says whose it is, so the system gives each packet to the
//! right socket by itself, and nothing stands between a process and its packets. Only messages of
//! the connection manager, which all go to queue pair 1, come to the host first: [`Host`] finds
//! their owner by the listener, or by the communication id or the number of a lookup. Between two
//! guests packets go by memory, without the system (`ring.rs`).
//!
//! A guest has a socket of the shared port, by which it could take the packets of others, so guests
//! are of the host's user, or root.

mod guest;
mod host;
mod message;
mod ring;
mod rings;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bowline_wire::roce::cm::{CmMad, CmMessage};
use bowline_wire::roce::{Packet, datagram_service_port, service_port};

pub use guest::{Guest, Joined};
pub use host::Host;
pub use message::Seen;
pub(crate) use ring::Came;
pub(crate) use rings::{BurstBuffer, Rings, Sent, burst_buffer};

/// Number of the queue pair of connection messages.
const GSI_QPN: u32 = 1;

/// What a port is of: each has its own numbers, as with the ports of TCP and UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortSpace {
    /// Reliable connections.
    Tcp,
    /// Datagram services.
    Udp,
}

/// Whose a datagram is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// Of the part that has this listener, or of the host.
    Listener(PortSpace, u16),
    /// Of this part.
    Part(u8),
}

/// Returns whose a datagram is; `None` for an invalid one.
fn owner(payload: &[u8]) -> Option<Owner> {
    let packet = Packet::parse(payload.get(..payload.len().checked_sub(ICRC_LEN)?)?).ok()?;
    let qpn = packet.bth.dest_qpn;
    if qpn != GSI_QPN {
        return Some(Owner::Part((qpn >> 16) as u8));
    }
    let answered = match CmMad::parse(packet.payload).ok()?.message {
        CmMessage::Req(req) => {
            return Some(Owner::Listener(PortSpace::Tcp, service_port(req.service_id)?));
        }
        CmMessage::SidrReq(req) => {
            return Some(Owner::Listener(PortSpace::Udp, datagram_service_port(req.service_id)?));
        }
        CmMessage::SidrRep(rep) => rep.request_id,
        CmMessage::Mra(mra) => mra.remote_id,
        CmMessage::Rej(rej) => rej.remote_id,
        CmMessage::Rep(rep) => rep.remote_id,
        CmMessage::Rtu(ids) | CmMessage::Drep(ids) => ids.remote,
        CmMessage::Dreq(dreq) => dreq.ids.remote,
    };
    Some(Owner::Part((answered >> 24) as u8))
}

/// Length of the checksum at the end.
const ICRC_LEN: usize = 4;

/// Who takes datagrams of the shared port that are not this device's. Called under the lock of the
/// device: it does not wait.
pub(crate) trait Others: std::fmt::Debug + Send + Sync {
    /// Takes a datagram, or returns false: it is this device's.
    fn take(&self, from: SocketAddr, to: IpAddr, payload: &[u8]) -> bool;
}

/// What a device has of others with the same addresses; nothing where it is alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Among {
    pub(crate) strays: Option<Arc<dyn Others>>,
    /// Memory by which processes of one host send to each other.
    pub(crate) rings: Option<Arc<Rings>>,
}
