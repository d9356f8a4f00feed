//! Permits that are not put back: dropped, leaked, or kept for longer than their session.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Waker};

use crate::common::tasks::Woken;
use crate::common::{Pair, at, eventually, ip, write_and_read};
use bowline_rtrs_driver::client::{Permit, PermitKind, Session, Wait};
use bowline_rtrs_driver::server::ServerConfig;
use bowline_rtrs_driver::{Dir, Errno, Error, Geometry};

/// Permits for IO of the sessions here.
const COUNT: usize = 3;

/// A server with `COUNT` chunks, and one for service messages.
fn few(net: u8) -> Pair {
    let geometry = Geometry::new(COUNT as u16 + 1, 28_672, 4096).unwrap();
    Pair::new(net, 1, ServerConfig { geometry, ..ServerConfig::default() })
}

/// All permits.
fn take_all(session: &Session) -> Vec<Permit> {
    std::iter::from_fn(|| session.get_permit(PermitKind::Io, Wait::No)).collect()
}

/// However its owner ends, the permit returns for the next one.
#[test]
fn a_permit_that_is_dropped_goes_back() {
    let pair = few(201);
    let session = pair.session(1);
    let assert_all_back = |why| assert_eq!(take_all(&session).len(), COUNT, "{why}");
    assert_all_back("at first");
    assert_all_back("dropped");
    let early = || -> Result<(), Error> {
        let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
        session.call(Dir::Write, &permit, &[0; 5000], &[])?;
        session.put_permit(permit);
        Ok(())
    };
    assert_eq!(early().unwrap_err().errno(), Errno::EMSGSIZE);
    assert_all_back("an error in between");
    std::thread::scope(|scope| {
        let died = scope.spawn(|| {
            let _held = take_all(&session);
            panic!("planted: a thread that holds permits panics");
        });
        assert!(died.join().is_err());
    });
    assert_all_back("a panic");
    // A waiting thread gets it.
    let mut held = take_all(&session);
    let woken = Arc::new(Woken::default());
    let mut wait = session.get_permit_async(PermitKind::Io);
    assert_eq!(woken.poll(&mut wait), None);
    drop(held.pop());
    assert_eq!(woken.count(), 1);
    drop((held, woken.poll(&mut wait).unwrap().unwrap()));
    assert_all_back("somebody waited");
    write_and_read(&session, 0, 4096);
    session.close();
}

/// The permit of a task that is cancelled with its request in flight is free when the request has
/// ended, and not before.
#[test]
fn a_cancelled_request_keeps_its_permit_until_it_has_ended() {
    let pair = few(202);
    let session = pair.session(1);
    let cut = |on| pair.client_device.cut(ip(202, 1), None, on);
    cut(true);
    {
        let mut task = pin!(async {
            let permit = session.get_permit_async(PermitKind::Io).await.unwrap();
            session.call_async(Dir::Read, &permit, &at(0), &[]).await
        });
        assert!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(session.inflight(), 1);
    }
    assert_eq!(take_all(&session).len(), COUNT - 1);
    cut(false);
    eventually("it has ended", || session.inflight() == 0);
    assert_eq!(take_all(&session).len(), COUNT);
    session.close();
}

/// A permit of one session has no effect on another one, and returns to its own.
#[test]
fn a_permit_goes_back_to_its_own_session() {
    let pair = few(203);
    let session = pair.session(1);
    let other = Session::open(&pair.client_engine, pair.builder("other", 1)).unwrap();
    let held = take_all(&other);
    for permit in take_all(&session) {
        let refused = other.call(Dir::Read, &permit, &at(0), &[]).unwrap_err();
        assert_eq!(refused.errno(), Errno::EINVAL);
        other.put_permit(permit);
    }
    assert_eq!(take_all(&other).len(), 0, "those of the other one are out");
    assert_eq!(take_all(&session).len(), COUNT);
    drop(held);
    assert_eq!(take_all(&other).len(), COUNT);
    other.close();
    session.close();
}

/// [RS-25]: a close waits for the last permit, however that returns. Permits of closed sessions are
/// refused and do no harm.
#[test]
fn permits_may_be_kept_for_longer_than_their_session() {
    let pair = few(204);
    let session = pair.session(1);
    let held = take_all(&session);
    let closed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            Arc::clone(&session).close();
            closed.store(true, SeqCst);
        });
        eventually("its paths are gone", || session.paths().is_empty());
        assert!(!closed.load(SeqCst), "permits are out still");
        drop(held);
    });
    assert!(closed.load(SeqCst));

    let old = Session::open(&pair.client_engine, pair.builder("old", 1)).unwrap();
    let held = take_all(&old);
    drop(old);
    let new = pair.session(1);
    let refused = new.call(Dir::Read, &held[0], &at(0), &[]).unwrap_err();
    assert_eq!(refused.errno(), Errno::EINVAL);
    held.into_iter().for_each(|permit| new.put_permit(permit));
    assert_eq!(take_all(&new).len(), COUNT);
    let held = take_all(&new);
    pair.client_engine.close();
    assert_eq!(
        new.call(Dir::Read, &held[0], &at(0), &[]).unwrap_err().errno(),
        Errno::ECONNABORTED
    );
    drop((held, new));
}

/// The device objects of a session are released when it is dropped, even if its permits are never
/// put back.
#[test]
fn forgotten_permits_hold_nothing_of_a_device() {
    let pair = few(205);
    let before = pair.client_device.in_use();
    let mut kept = Vec::new();
    for _ in 0..3 {
        let session = pair.session(1);
        let region = session.region(1 << 20).unwrap();
        write_and_read(&session, 0, 4096);
        std::mem::forget(session.get_permit(PermitKind::Io, Wait::No));
        kept.push(session.get_permit(PermitKind::Io, Wait::No).unwrap());
        drop((region, session));
        eventually("all of it is gone", || pair.client_device.in_use() == before);
    }
    drop(kept);
}
