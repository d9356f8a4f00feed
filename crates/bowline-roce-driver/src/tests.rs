//! Tests of the device that reach below it, to its sockets.

mod marks;
