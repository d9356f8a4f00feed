//! The server core against a client made by hand: what it orders, what it answers, what it refuses.

mod accept;
mod chunks;
mod close;
mod hostile;
mod io;
mod rig;
