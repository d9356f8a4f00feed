//! Threads that wait without sleeping.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::common::{Store, at, device, far, ip, write_and_read};
use bowline_rtrs_driver::client::{PermitKind, Session, SessionBuilder, Wait};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, Policy, Poll};
use bowline_verbs::Device;

const NET: u8 = 207;

/// A waiting thread takes the completions of all devices itself; several threads alternate, and
/// none is left waiting.
#[test]
fn a_thread_that_spins_serves_all_devices() {
    const CALLS: u64 = 2000;
    const THREADS: usize = 3;
    let _far = far(NET, Store::new());
    let devices = [1, 2].map(|host| device(&[ip(NET, host)]) as Arc<dyn Device>);
    let engine = Engine::new(devices.to_vec(), EngineConfig { poll: Poll::Spin }).unwrap();
    let paths = [1, 2].map(|host| (Some(ip(NET, host)), ip(NET, 100 + host)));
    let builder = SessionBuilder::new("spin").unwrap().paths(&paths).policy(Policy::RoundRobin);
    let session = Session::open(&engine, builder).unwrap();
    write_and_read(&session, 0, 4096);

    let before = engine.stats().hand_overs;
    let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
    for _ in 0..CALLS {
        session.call(Dir::Read, &permit, &at(0), &[]).unwrap();
    }
    let hand_overs = engine.stats().hand_overs - before;
    // Some, if this thread was kept from running.
    println!("{hand_overs} hand-overs");
    assert!(hand_overs < CALLS / 2, "{hand_overs} hand-overs for {CALLS} calls");
    let sent: Vec<u64> = session.paths().iter().map(|path| path.stats.reads).collect();
    assert!(sent.iter().all(|count| *count > CALLS / 3), "both paths are used: {sent:?}");

    let ended = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..200 {
                    let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
                    session.call(Dir::Read, &permit, &at(0), &[]).unwrap();
                }
                ended.fetch_add(1, SeqCst);
            });
        }
    });
    assert_eq!(ended.load(SeqCst), THREADS);
    drop(permit);
    session.close();
}
