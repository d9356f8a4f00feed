//! The ways in which a server refuses a connection [RT-31].

use core::fmt;

use bowline_verbs::RejectReason;
use bowline_wire::rtrs::ConRspError;

use crate::Errno;

/// How a server has refused a connection. Distinguishes cases for which the program gets the same
/// error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The server's connection manager refused, before RTRS was involved.
    Manager(RejectReason),
    /// The RTRS server refused, with this error.
    Server(Errno),
    /// The peer is not an RTRS server, or not one of this version.
    Answer(ConRspError),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manager(reason) => reason.fmt(f),
            Self::Server(errno) => write!(f, "the server says {errno}"),
            Self::Answer(error) => error.fmt(f),
        }
    }
}
