//! The RTRS protocol as state machines: client and server sessions of several paths, without I/O.
