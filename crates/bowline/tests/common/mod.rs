//! Helpers of the tests of this directory. Nodes listen on a fixed port, so every test has its own
//! addresses in 127/8.

#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bowline::rds::{Builder, Node, Socket};

/// Longest wait of a test.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn ip(test: u16, node: u8) -> IpAddr {
    let [high, low] = test.to_be_bytes();
    Ipv4Addr::new(127, 100 + high, low, node).into()
}

pub(crate) fn addr(test: u16, node: u8, port: u16) -> SocketAddr {
    SocketAddr::new(ip(test, node), port)
}

pub(crate) fn builder(test: u16, node: u8) -> Builder {
    Node::builder().address(ip(test, node))
}

/// Two nodes; `a` has the smaller address.
pub(crate) struct Pair {
    pub(crate) test: u16,
    pub(crate) left: Node,
    pub(crate) right: Node,
}

impl Pair {
    /// `test` is unique among all tests.
    pub(crate) fn new(test: u16) -> Self {
        Self::with(test, |builder| builder)
    }

    pub(crate) fn with(test: u16, set: impl Fn(Builder) -> Builder) -> Self {
        let node = |n| set(builder(test, n)).build().unwrap();
        Self { test, left: node(1), right: node(2) }
    }

    pub(crate) fn a(&self, port: u16) -> SocketAddr {
        addr(self.test, 1, port)
    }

    pub(crate) fn b(&self, port: u16) -> SocketAddr {
        addr(self.test, 2, port)
    }

    /// One socket on each node, with time limits.
    pub(crate) fn sockets(&self, port: u16) -> (Socket, Socket) {
        let a = self.left.bind(self.a(port)).unwrap();
        let b = self.right.bind(self.b(port)).unwrap();
        for socket in [&a, &b] {
            socket.set_recv_timeout(Some(LIMIT));
            socket.set_send_timeout(Some(LIMIT));
        }
        (a, b)
    }
}

/// Ends the threads that check this flag, also when the test fails, which would hang otherwise.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
