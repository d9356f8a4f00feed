//! Callbacks of the program that panic, or own objects of the session.

mod common;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bowline_rtrs_driver::client::{
    Completed, Completer, Done, LinkEv, PermitKind, Region, Req, Session, Wait,
};
use bowline_rtrs_driver::server::{self, Handler, Request, Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Errno, HbConfig};
use common::{PATIENCE, Pair, Store, at, eventually, hasty, write_and_read};

/// Owns the memory of its request.
struct Owner {
    _region: Region,
}

impl Completer for Owner {
    fn completed(&self, _: &[Completed]) {
        panic!("a request that was refused is not told");
    }
}

/// A refused request may drop the last reference to its memory; it does so without the lock that
/// this needs.
#[test]
fn a_refused_request_drops_what_it_owns() {
    // Not closed on the way out if this fails: that would hang too.
    let pair = ManuallyDrop::new(Pair::new(126, 1, ServerConfig::default()));
    let session = ManuallyDrop::new(pair.session(1));
    let (done, ended) = channel();
    let theirs = Arc::clone(&session);
    std::thread::spawn(move || {
        let permit = theirs.get_permit(PermitKind::Io, Wait::No).unwrap();
        let long = [0; 65_536];
        for _ in 0..3 {
            let to = Arc::new(Owner { _region: theirs.region(4096).unwrap() });
            let refused = theirs.request(Dir::Write, &permit, &long, &[], Done { to, tag: 0 });
            assert_eq!(refused.unwrap_err().errno(), Errno::EMSGSIZE);
            let to = Arc::new(Owner { _region: theirs.region(4096).unwrap() });
            let done = Done { to, tag: 0 };
            let (dir, permit) = (Dir::Write, &permit);
            let mut batch = std::iter::once(Req { dir, permit, usr: &long, data: &[], done });
            let refused = theirs.request_batch(&mut batch);
            assert_eq!(refused.unwrap_err().errno(), Errno::EMSGSIZE);
        }
        theirs.put_permit(permit);
        done.send(()).unwrap();
    });
    ended.recv_timeout(PATIENCE).expect("the session is locked for ever");
    write_and_read(&session, 0, 4096);
    drop(ManuallyDrop::into_inner(session));
    drop(ManuallyDrop::into_inner(pair));
}

/// Panics the first time, then tells.
struct Clumsy {
    clumsy: AtomicBool,
    told: Mutex<Sender<u64>>,
}

impl Completer for Clumsy {
    fn completed(&self, done: &[Completed]) {
        if self.clumsy.swap(false, SeqCst) {
            panic!("a mistake of the program");
        }
        let told = self.told.lock().unwrap();
        done.iter().for_each(|done| told.send(done.tag).unwrap());
    }
}

/// A panic of one completer does not affect the others: the thread that takes completions
/// continues.
#[test]
fn a_panic_of_a_completer_ends_there() {
    let pair = Pair::new(127, 1, ServerConfig::default());
    let session = pair.session(1);
    let (sender, told) = channel();
    let clumsy = |clumsy| {
        let told = Mutex::new(sender.clone());
        Arc::new(Clumsy { clumsy: AtomicBool::new(clumsy), told })
    };
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let request = |to: &Arc<Clumsy>, tag| {
        let done = Done { to: Arc::clone(to) as _, tag };
        eventually("the permit is free", || session.inflight() == 0);
        session.request(Dir::Read, &permit, &at(0), &[], done).unwrap();
    };
    // The background thread calls the completers.
    request(&clumsy(true), 1);
    request(&clumsy(false), 2);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(2));
    // The program's own thread does.
    request(&clumsy(true), 3);
    eventually("it has ended", || {
        session.poll();
        session.inflight() == 0
    });
    request(&clumsy(false), 4);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(4));
    session.put_permit(permit);
    write_and_read(&session, 0, 4096);
}

/// Nor does a panic of the callback for losses keep the next loss from being reported.
#[test]
fn a_panic_about_a_loss_ends_there() {
    let pair = Pair::with(128, 1, ServerConfig::default(), hasty);
    let back = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&back);
    let heartbeat = HbConfig { probe_interval: Duration::from_millis(100), ..HbConfig::default() };
    let builder = pair.builder("loss", 1).heartbeat(heartbeat).on_link(move |event| match event {
        LinkEv::Disconnected => panic!("a mistake of the program"),
        LinkEv::Reconnected => _ = count.fetch_add(1, SeqCst),
    });
    let session = Session::open(&pair.client_engine, builder).unwrap();
    for round in 1..3 {
        pair.client_device.cut(common::ip(128, 1), None, true);
        eventually("it is lost", || session.attrs().is_err());
        pair.client_device.cut(common::ip(128, 1), None, false);
        eventually("its return is told", || back.load(SeqCst) == round);
    }
    write_and_read(&session, 0, 4096);
}

/// Panics over every third list of requests.
struct Shaky(Store, AtomicUsize);

impl Handler for Shaky {
    fn rdma_ev(&self, server: &Server, requests: &mut Vec<Request>) {
        assert!(self.1.fetch_add(1, SeqCst) % 3 != 1, "a mistake of the program");
        self.0.rdma_ev(server, requests);
    }

    fn link_ev(&self, server: &Server, event: server::LinkEv) -> Result<(), Errno> {
        self.0.link_ev(server, event)
    }
}

/// A server whose handler panics answers the requests it left, and continues to serve.
#[test]
fn a_panic_of_a_handler_is_an_error_of_its_requests() {
    let pair = Pair::new(129, 1, ServerConfig::default());
    pair.server.close();
    let handler = Arc::new(Shaky(Store::unshared(), AtomicUsize::new(0)));
    let at_address = [std::net::SocketAddr::new(common::ip(129, 101), bowline_rtrs_driver::PORT)];
    let config = ServerConfig::default();
    let _server = Server::open(&pair.server_engine, &at_address, config, handler as _).unwrap();
    let session = pair.session(1);
    let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
    let outcomes = [(); 6].map(|()| {
        let outcome = session.call(Dir::Read, &permit, &at(0), &[]);
        outcome.map_err(|error| error.errno())
    });
    let eio = Err(Errno::EIO);
    assert_eq!(outcomes, [Ok(()), eio, Ok(()), Ok(()), eio, Ok(())]);
    session.put_permit(permit);
}
