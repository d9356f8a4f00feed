//! A page for each task, with whole programs: the examples of this crate, which its tests run.
//!
//! | task | page |
//! | --- | --- |
//! | ask, and wait for the answer | [`request_reply`] |
//! | send to many, of which some are slow | [`publish_subscribe`] |
//! | time limits, and what is known when one has passed | [`deadlines`] |
//! | end without a loss | [`graceful_end`] |
//! | an event loop: mio, epoll, poll | [`event_loop`] |
//! | tasks of tokio | `tokio_tasks` (feature `tokio`) |
//! | a disk at full speed, over two paths | `disk_two_paths` (feature `rnbd`) |
//! | serve a disk that the program makes up | `own_backend` (feature `rnbd`) |
//! | write into the memory of another machine | `rdma_write` (feature `rdma`) |
//!
//! The first four pages have a pair of programs each. In the repository, start one in each of two
//! terminals:
//!
//! ```sh
//! cargo run --example request_reply_server
//! cargo run --example request_reply_client
//! ```
//!
//! Their addresses are 127.0.0.1 and 127.0.0.2 by default, and arguments name others. Each has a
//! node of its own, which needs its address alone. Where programs share the node of `bowline node`,
//! with BOWLINE_RDS_SOCKET as the path of its socket, all else is the same:
//!
//! ```sh
//! bowline node --address 127.0.0.1 --address 127.0.0.2 --background
//! export BOWLINE_RDS_SOCKET=$XDG_RUNTIME_DIR/bowline/rds/host.sock     # of root: /run/bowline/..
//! ```
//!
//! The other pages have one program, with addresses `127.77.x.y`: `cargo run --example event_loop`.
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

/// Ask, and wait for the answer.
///
/// One socket on each side is enough for any number of peers: messages carry their sender's
/// address, and come whole. A message is as long as the send buffer at most, 104 KiB at first; a
/// program that expects longer ones says so with
/// [`max_message_bytes`](crate::rds::Builder::max_message_bytes).
///
/// # The client
///
/// Between two sockets nothing is lost and nothing comes twice. A request may get lost all the
/// same, in cases that no error reports: nobody has bound the port yet ([what a sender does not
/// learn](crate::rds#what-a-sender-does-not-learn)), or the server ends before it answers. Hence
/// two things in `ask`:
///
/// - Each attempt has a time limit, after which the request is sent again. The limit is a point in
///   time: what is left of it is set before each receive
///   ([`set_recv_timeout`](crate::rds::Socket::set_recv_timeout)), so that other messages do not
///   prolong it.
/// - Each request has a number, which the reply repeats. Without it, a reply that comes after its
///   time limit would be taken for that of the next request.
///
/// So a server may be asked twice, and does the work twice. Where that matters, it keeps the number
/// of the last request of each client, with its reply.
///
/// ```no_run
#[doc = include_str!("../examples/request_reply/client.rs")]
/// ```
///
/// # The server
///
/// By default a send waits until it succeeds. In a server that would let one client that has
/// stopped delay all others, so its socket does not wait
/// ([`set_nonblocking`](crate::rds::Socket::set_nonblocking)), and the
/// [kind](crate::rds::ErrorKind) of the error says who is slow:
///
/// - [`Congested`](crate::rds::ErrorKind::Congested) (`ENOBUFS`): that client has more waiting than
///   its receive buffer holds. Others are sent to as before.
/// - [`QueueFull`](crate::rds::ErrorKind::QueueFull) (`EAGAIN`): this socket has sent more than the
///   nodes of all its clients have acknowledged, and nobody can be sent anything.
///   [`outstanding`](crate::rds::Socket::outstanding) shows whose it is, and
///   [`cancel_sent_to`](crate::rds::Socket::cancel_sent_to) frees it.
///
/// Dropped replies are no loss here, since clients ask again. No error of a reply ends the server,
/// because a client may cause it: a request can be longer than the server's send buffer, and so can
/// its reply ([`TooLong`](crate::rds::ErrorKind::TooLong), `EMSGSIZE`).
///
/// ```no_run
#[doc = include_str!("../examples/request_reply/server.rs")]
/// ```
pub mod request_reply {}

/// Send to many, of which some are slow.
///
/// A receiver that does not keep up makes its senders wait: nothing is lost, and that is right for
/// a file. It is wrong for news: a publisher that waits for its slowest subscriber is late for all
/// others. So this one waits for none, and each subscriber that cannot take an update misses it.
///
/// # The publisher
///
/// - Its sockets do not wait, and a refused update is dropped and counted. What is sent next is
///   then the newest; a queue in the program would hold older ones.
/// - Congestion is that of one receiving port, and concerns nobody else. The send buffer is that of
///   the sending socket, and a machine that does not acknowledge fills it for all. So each
///   subscriber has a socket of its own, and closing it cancels what waits for that subscriber.
/// - The size of this buffer ([`set_send_buffer`](crate::rds::Socket::set_send_buffer), in bytes of
///   payload, 2304 at least) is how many updates a machine that has stopped will get when it
///   continues, old ones by then.
/// - RDS has no connections that end, so a subscription holds for some seconds and is repeated. The
///   number of subscribers has a limit, as everything has that others can fill.
///
/// ```no_run
#[doc = include_str!("../examples/publish_subscribe/publisher.rs")]
/// ```
///
/// # The subscriber
///
/// Its receive buffer ([`set_recv_buffer`](crate::rds::Socket::set_recv_buffer), in bytes of
/// payload, 104 KiB at first, 1152 at least) is how far it may be behind: its port is congested
/// when more than that waits, until less than half of it does. What was sent before the publisher
/// learned this arrives all the same. Updates have numbers, so that the subscriber knows how many
/// it has missed.
///
/// ```no_run
#[doc = include_str!("../examples/publish_subscribe/subscriber.rs")]
/// ```
pub mod publish_subscribe {}

/// Time limits, cancelling, and what is known of a message then.
///
/// | call | its limit | when it has passed |
/// | --- | --- | --- |
/// | [`send_to`](crate::rds::Socket::send_to) | [`set_send_timeout`](crate::rds::Socket::set_send_timeout) | nothing is sent, ever |
/// | [`recv_from`](crate::rds::Socket::recv_from) | [`set_recv_timeout`](crate::rds::Socket::set_recv_timeout) | nothing is taken |
/// | [`flush`](crate::rds::Socket::flush) | its argument | messages stay, and arrive later |
///
/// All fail with [`TimedOut`](crate::rds::ErrorKind::TimedOut) (`ETIMEDOUT`). By default sends and
/// receives wait without a limit. A send that has returned is not limited by anything: the node
/// sends the message as soon as its peer can be reached, in an hour perhaps. Who no longer wants
/// that calls [`cancel_sent_to`](crate::rds::Socket::cancel_sent_to) (`RDS_CANCEL_SENT_TO`), which
/// is for *all* messages of this socket to that destination.
///
/// # What is known
///
/// | seen | the message |
/// | --- | --- |
/// | the send failed | never arrives |
/// | an answer of the program | was received |
/// | not [`outstanding`](crate::rds::Socket::outstanding) any more | is at the other *node* (of a kernel: at its TCP), or was dropped there because no program had the port |
/// | outstanding | is on its way |
/// | cancelled while outstanding | may arrive or not |
///
/// The last row is no weakness of this library: whoever waits for an acknowledgement across a
/// network cannot know more. A program that has to, asks the other one, as the sender here learns
/// from late confirmations.
///
/// In tasks the same holds: the time limits of the socket, and `tokio::time::timeout`, which drops
/// a call. The page `tokio_tasks` (feature `tokio`) shows it.
///
/// # The sender
///
/// ```no_run
#[doc = include_str!("../examples/deadlines/sender.rs")]
/// ```
///
/// # The receiver
///
/// ```no_run
#[doc = include_str!("../examples/deadlines/receiver.rs")]
/// ```
pub mod deadlines {}

/// End without losing what was sent, and without leaving others in doubt.
///
/// Ctrl-C and SIGTERM end a process at once unless it says otherwise. What its sockets have sent
/// and other nodes have not acknowledged is lost then, and so are the messages that it has not
/// received, which were acknowledged to their senders.
///
/// # The worker
///
/// It ends in this order:
///
/// 1. The signal sets a flag. A signal does not interrupt a call that waits, so each wait has a
///    time limit, and the flag is checked after it. ([`close`](crate::rds::Socket::close) in
///    another thread ends a wait as well, but what has arrived is lost then.)
/// 2. The jobs that have arrived are done, and no later ones.
/// 3. A last message to each client. Messages of a socket arrive in order, so a client that has it
///    has all confirmations.
/// 4. [`flush`](crate::rds::Socket::flush) waits for acknowledgements, with a limit. It fails with
///    [`PeerEnded`](crate::rds::ErrorKind::PeerEnded) (`ECONNREFUSED`) where all that is left is
///    for nodes that have ended themselves. For all sockets of a node of this process at once, and
///    with an end to every call that waits,
///    [`Node::shutdown`](crate::rds::Node::shutdown) does the same. The host's node does not end
///    with its programs, so there only `flush` waits.
/// 5. The node is dropped. It acknowledges what it has received, and other nodes learn that it ends
///    ([`Event::PeerEnded`](crate::rds::Event::PeerEnded)).
///
/// A program that only receives needs neither 3 nor 4.
///
/// ```no_run
#[doc = include_str!("../examples/graceful_end/worker.rs")]
/// ```
///
/// # The client
///
/// What is acknowledged is at the other *node*; only an answer shows that the other *program* has
/// it. With the last message of its worker the client knows of each job whether it was done. When
/// there is silence instead, the worker is lost, and of the jobs without confirmation nobody knows.
/// The node's own word about this, [`Event::PeerEnded`](crate::rds::Event::PeerEnded), is about
/// nodes: on a machine whose programs share one, it does not say that a program has ended.
///
/// ```no_run
#[doc = include_str!("../examples/graceful_end/client.rs")]
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
/// in the sense that each one states: a send that a timeout drops has sent nothing, a receive has
/// taken nothing, and a flush changes nothing at all. What is known of a message after a timeout is
/// on the page [`deadlines`].
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
