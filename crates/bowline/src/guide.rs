//! A page for each task, with a whole program: the examples of this crate, which its tests run.
//!
//! | task | page |
//! | --- | --- |
//! | ask, and wait for the answer | [`request_reply`] |
//! | a receiver that does not keep up | [`slow_receiver`] |
//! | end without a loss | [`graceful_end`] |
//! | an event loop: mio, epoll, poll | [`event_loop`] |
//! | tasks of tokio | `tokio_tasks` (feature `tokio`) |
//! | a disk at full speed, over two paths | `disk_two_paths` (feature `rnbd`) |
//! | serve a disk that the program makes up | `own_backend` (feature `rnbd`) |
//! | write into the memory of another machine | `rdma_write` (feature `rdma`) |
//!
//! They use addresses `127.77.x.y`, so that they run anywhere; a program on several machines has
//! their addresses instead. `cargo run --example request_reply` runs one in the repository.
//!
//! # Limits
//!
//! - **One address is for one process.** RDS takes TCP port 16385 of each address of its node, a
//!   soft RDMA device UDP port 4791. Programs of one machine share the node of `bowline node`
//!   ([`Node::of_host`](crate::rds::Node::of_host)), and a program that serves and uses disks has
//!   one `Engine` for both.
//! - **What is lost when**: of messages, [`rds`] says it at its beginning. A write to a disk is
//!   durable once it was answered, if it was made with `Durable::Now`, else once the next flush
//!   was. A write that was not answered may be there, whole or in part, or not.
//! - **What a peer can do**: nobody is authenticated and nothing encrypted. Who can send from an
//!   address is taken for its owner. A peer can neither end the process nor take more memory,
//!   connections or time than the limits allow:
//!   [SECURITY.md](https://github.com/bowline-rs/bowline/blob/main/SECURITY.md).
//!
//! [`rds`]: crate::rds#what-is-delivered-when-a-socket-process-or-machine-fails

/// Ask, and wait for the answer: RDS, with threads that block.
///
/// One socket on each side is enough for any number of peers: messages carry their sender's
/// address, and come whole. A program that expects long ones says so with
/// [`max_message_bytes`](crate::rds::Builder::max_message_bytes).
///
/// A request can get lost in one case that no error tells: nobody has bound the port yet ([what a
/// sender does not learn](crate::rds#what-a-sender-does-not-learn)). So it is asked again, and a
/// service should not mind to be asked twice.
///
/// ```
#[doc = include_str!("../examples/request_reply.rs")]
/// ```
pub mod request_reply {}

/// A receiver that does not keep up: nothing is lost, its senders wait.
///
/// By default a send waits as long as it takes. A time limit
/// ([`set_send_timeout`](crate::rds::Socket::set_send_timeout)) or a socket that does not wait
/// ([`set_nonblocking`](crate::rds::Socket::set_nonblocking)) gives the program a say, and the
/// [kind](crate::rds::ErrorKind) of the error tells who is slow:
/// [`QueueFull`](crate::rds::ErrorKind::QueueFull), this socket has sent more than its peers'
/// nodes have acknowledged, or [`Congested`](crate::rds::ErrorKind::Congested), that receiver has
/// more waiting than its buffer holds. A congested port does not hold up messages to others.
///
/// ```
#[doc = include_str!("../examples/slow_receiver.rs")]
/// ```
pub mod slow_receiver {}

/// End without losing what was sent, and without a thread that hangs.
///
/// What a socket has sent and its peer's node has not acknowledged is gone when the socket is
/// dropped or the process ends. [`Node::shutdown`](crate::rds::Node::shutdown) and
/// [`Socket::flush`](crate::rds::Socket::flush) wait for it. What is acknowledged is at the other
/// *node*; only an answer tells that the other *program* has it.
///
/// A program that only receives needs neither: when its node is dropped, what it has received is
/// acknowledged, and its peers learn that it has ended. A sender that waits for more than that is
/// reported as [`ErrorKind::PeerEnded`](crate::rds::ErrorKind::PeerEnded).
///
/// ```
#[doc = include_str!("../examples/graceful_end.rs")]
/// ```
pub mod graceful_end {}

/// RDS in an event loop that the program has already.
///
/// [`Socket::event_fd`](crate::rds::Socket::event_fd) is what mio, epoll and poll wait for. It is
/// an event's descriptor, of which only that it is readable means something, so `Socket` is no
/// [`AsFd`](std::os::fd::AsFd) itself.
///
/// ```
#[doc = include_str!("../examples/event_loop.rs")]
/// ```
pub mod event_loop {}

/// RDS and disks in tasks.
///
/// Calls of RDS for tasks need a runtime of tokio, for their time limits and, on the host's node,
/// for its descriptors. Those of disks and of
/// RTRS ([`call_async`](crate::rtrs::client::Session::call_async)) run in any. All are cancel safe,
/// in the sense that each one states.
///
/// ```
#[doc = include_str!("../examples/tokio_tasks.rs")]
/// ```
#[cfg(all(feature = "tokio", feature = "rnbd"))]
pub mod tokio_tasks {}

/// A disk with many requests in flight, over two paths of which one is lost.
///
/// [`DiskHandle`](crate::block::DiskHandle) has calls that wait, and futures; for full speed a
/// program submits requests itself, and gets their results by a callback
/// ([`DiskDone`](crate::block::DiskDone)). Requests of a lost path continue over another one, so
/// the program sees a delay and no error: at most the time after which a silent path counts as
/// lost. When all paths are lost, [`Outage`](crate::rnbd::Outage) decides.
///
/// ```
#[doc = include_str!("../examples/disk_two_paths.rs")]
/// ```
#[cfg(feature = "rnbd")]
pub mod disk_two_paths {}

/// Serve a disk that the program makes up, or changes on its way to another store.
///
/// [`Backend`](crate::block::backend::Backend) is the contract: what holds when requests come, and
/// what is expected of a store.
///
/// ```
#[doc = include_str!("../examples/own_backend.rs")]
/// ```
#[cfg(feature = "rnbd")]
pub mod own_backend {}

/// Write into the memory of another machine, which has allowed it.
///
/// The names are those of C's verbs (`ibv_*`, `rdma_*`), so what is written about these holds
/// here.
///
/// ```
#[doc = include_str!("../examples/rdma_write.rs")]
/// ```
#[cfg(feature = "rdma")]
pub mod rdma_write {}
