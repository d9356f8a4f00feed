//! Calls for one path from several threads: each returns its own outcome.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use crate::common::{PATIENCE, Pair, eventually, ip};
use bowline_rtrs_driver::client::{PathState, Session};
use bowline_rtrs_driver::server::ServerConfig;
use bowline_rtrs_driver::tree::{ClientSession, PathCommand};
use bowline_rtrs_driver::{Errno, Error, PathId};

fn state(session: &Session, path: PathId) -> Option<PathState> {
    session.paths().iter().find(|view| view.id == path).map(|view| view.state)
}

/// The outcome of a call that runs in a separate thread.
struct Pending(Receiver<Result<(), Errno>>);

impl Pending {
    fn new(
        session: &Arc<Session>,
        call: impl FnOnce(&Session) -> Result<(), Error> + Send + 'static,
    ) -> Self {
        let session = Arc::clone(session);
        Self::told(move || call(&session).map_err(|error| error.errno()))
    }

    fn told(call: impl FnOnce() -> Result<(), Errno> + Send + 'static) -> Self {
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(call()));
        Self(told)
    }

    /// Not joined: a call that never returns is a failure, not a test that hangs.
    fn outcome(&self) -> Result<(), Errno> {
        self.0.recv_timeout(PATIENCE).expect("a call does not return")
    }
}

/// [RS-38]: both threads are told that the path is closed.
#[test]
fn two_threads_disconnect_a_path() {
    let pair = Pair::new(211, 1, ServerConfig::default());
    let session = pair.session(1);
    let path = session.paths()[0].id;
    for _ in 0..20 {
        let start = Arc::new(Barrier::new(2));
        let both = [(); 2].map(|()| {
            let start = Arc::clone(&start);
            Pending::new(&session, move |session| {
                start.wait();
                session.disconnect_path(path)
            })
        });
        assert_eq!(both.map(|call| call.outcome()), [Ok(()); 2]);
        session.reconnect_path(path).unwrap();
    }
}

/// [RS-38], [RS-39]: so are threads that remove the path meanwhile, in any order.
#[test]
fn a_path_is_disconnected_and_removed_at_once() {
    let pair = Pair::new(212, 1, ServerConfig::default());
    let session = pair.session(1);
    let path = session.paths()[0].id;
    // The server is not reached, so that the disconnect takes a second.
    pair.client_device.cut(ip(212, 1), None, true);
    let first = Pending::new(&session, move |session| session.disconnect_path(path));
    eventually("it closes", || state(&session, path) == Some(PathState::Closing));
    let removed = Pending::new(&session, move |session| session.remove_path(path));
    std::thread::sleep(Duration::from_millis(50));
    let second = Pending::new(&session, move |session| session.disconnect_path(path));
    let again = Pending::new(&session, move |session| session.remove_path(path));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(state(&session, path), Some(PathState::Closing), "all came in time");
    for call in [first, removed, second, again] {
        assert_eq!(call.outcome(), Ok(()));
    }
    assert_eq!(state(&session, path), None);
}

/// [RS-34], [RS-37]: a thread that connects a path that another thread closes meanwhile gets the
/// error of an unconnected path.
#[test]
fn a_path_is_closed_while_it_is_connected() {
    let pair = Pair::new(213, 2, ServerConfig::default());
    let session = pair.session(1);
    let path = session.paths()[0].id;
    pair.client_device.cut(ip(213, 1), None, true);
    let reconnected = Pending::new(&session, move |session| session.reconnect_path(path));
    eventually("it connects", || state(&session, path) == Some(PathState::Connecting));
    session.disconnect_path(path).unwrap();
    assert_eq!(reconnected.outcome(), Err(Errno::ENOTCONN));

    pair.client_device.cut(ip(213, 2), None, true);
    let (src, dst) = (Some(ip(213, 2)), ip(213, 102));
    let added = Pending::new(&session, move |session| session.add_path(src, dst).map(drop));
    eventually("it connects", || session.paths().len() == 2);
    session.remove_path(session.paths()[1].id).unwrap();
    assert_eq!(added.outcome(), Err(Errno::ECONNABORTED));
}

/// [RS-37] to [RS-39]: the tree distinguishes a removed path from an unconnected one.
#[test]
fn the_tree_tells_that_a_path_is_gone() {
    let pair = Pair::new(217, 1, ServerConfig::default());
    let session = pair.session(1);
    let path = session.paths()[0].id;
    pair.client_device.cut(ip(217, 1), None, true);
    let order = |order| {
        let session = Arc::clone(&session);
        Pending::told(move || ClientSession::command(&*session, path, order))
    };
    let reconnected = order(PathCommand::Reconnect);
    eventually("it connects", || state(&session, path) == Some(PathState::Connecting));
    assert_eq!(order(PathCommand::Disconnect).outcome(), Ok(()));
    assert_eq!(reconnected.outcome(), Err(Errno::ENOTCONN));
    assert_eq!(order(PathCommand::Remove).outcome(), Ok(()));
    for command in [PathCommand::Reconnect, PathCommand::Disconnect, PathCommand::Remove] {
        assert_eq!(order(command).outcome(), Err(Errno::ENODEV), "{command:?}");
    }
}
