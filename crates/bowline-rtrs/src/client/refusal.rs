//! How a server refuses a connection [RT-31].

use core::fmt;

use bowline_verbs::RejectReason;
use bowline_wire::rtrs::ConRspError;

use crate::Errno;

/// How a server has refused a connection. All the program's caller gets is a number, which is the
/// same for many of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its connection manager did, before anything of RTRS came into play.
    Manager(RejectReason),
    /// The server did, with this number.
    Server(Errno),
    /// What answers is no server of RTRS, or none of this version.
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
