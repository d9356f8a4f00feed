//! Tests of the device that reach below it, to its sockets.

mod marks;
mod passed_on;
mod world;
