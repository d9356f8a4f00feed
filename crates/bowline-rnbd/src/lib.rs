//! The RNBD protocol as state machines: exports, devices, access and block IO, without I/O or transport.
