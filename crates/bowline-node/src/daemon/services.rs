//! Services of a node for those who try it: `--echo` and `--sink`.

mod echo;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use bowline::rds::{Node, Socket};
use bowline_rds::SocketId;

use crate::{Failure, Outcome};

pub(super) use echo::MESSAGES_TOTAL as ECHO_MESSAGES;

/// Messages taken at once.
const BATCH: usize = 256;

/// What is done with messages that come to a port.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Service {
    Echo,
    Sink,
}

impl Service {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Sink => "sink",
        }
    }
}

/// A service that runs in a thread of its own.
pub(super) struct Running {
    pub(super) place: SocketAddr,
    socket: SocketId,
    pub(super) service: Service,
    /// Answers dropped since the last report.
    pub(super) dropped: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Running {
    pub(super) fn start(
        node: &Node,
        place: SocketAddr,
        service: Service,
        send_buffer: Option<u64>,
        over: &Arc<AtomicBool>,
    ) -> Outcome<Self> {
        let open = || {
            let socket = node.bind(place)?;
            if service == Service::Echo && send_buffer.is_none() {
                socket.set_send_buffer(echo::SEND_BUFFER)?;
            }
            Ok(socket)
        };
        let socket = open().map_err(|error: bowline::rds::Error| {
            Failure::failed(format!("cannot start {} on {place}: {error}", service.name()))
        })?;
        // Port 0 stands for one that is free.
        let place = socket.local_addr().unwrap_or(place);
        let id = socket.id();
        let (node, over, dropped) = (node.clone(), Arc::clone(over), Arc::default());
        let counter = Arc::clone(&dropped);
        let body = move || {
            let result = match service {
                Service::Echo => echo::serve(&node, &socket, &over, &counter),
                Service::Sink => sink(&socket, &over),
            };
            if let Err(error) = result
                && !over.load(Ordering::Relaxed)
            {
                note!("bowline node: {} on {place} ended: {error}", service.name());
            }
        };
        let thread = thread::Builder::new()
            .name(service.name().into())
            .spawn(body)
            .map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
        Ok(Self { place, socket: id, service, dropped, thread })
    }

    /// Waits for the end of a service whose node has ended.
    pub(super) fn join(self) {
        // The panic of a service was printed on standard error.
        let _ = self.thread.join();
    }

    /// Ends the service while its node lives.
    pub(super) fn close(self, node: &Node) {
        node.driver().close(self.socket);
        self.join();
    }
}

/// Receives all messages and discards them.
fn sink(socket: &Socket, over: &AtomicBool) -> Result<(), bowline::rds::Error> {
    let mut inbox = Vec::with_capacity(BATCH);
    while !over.load(Ordering::Relaxed) {
        inbox.clear();
        socket.recv_batch(&mut inbox, BATCH)?;
    }
    Ok(())
}
