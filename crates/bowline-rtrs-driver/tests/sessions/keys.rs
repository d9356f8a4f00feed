//! READs whose data goes to several places, and keys that are good for one READ only.

use crate::common;
use std::sync::Arc;
use std::time::Duration;

use crate::common::load::Load;
use crate::common::{Pair, at, bytes, eventually, hasty, ip, write_and_read};
use bowline_rtrs_driver::client::{PathState, PermitKind, ReadKeys, Region, Session, Wait};
use bowline_rtrs_driver::server::ServerConfig;
use bowline_rtrs_driver::{Dir, Errno, MemRef, Policy};

fn config(always_invalidate: bool) -> ServerConfig {
    ServerConfig { always_invalidate, ..ServerConfig::default() }
}

fn open(pair: &Pair, paths: u8, keys: ReadKeys) -> Arc<Session> {
    let builder = pair.builder("keys", paths).read_keys(keys).policy(Policy::RoundRobin);
    Session::open(&pair.client_engine, builder).unwrap()
}

/// Many small pieces of two regions, none adjacent to the one before.
fn scatter(one: &Region, two: &Region, count: u32) -> (Vec<MemRef>, usize) {
    let piece = |n: u32| {
        let region = if n & 1 == 0 { one } else { two };
        region.piece((n * 700 + n % 7) as usize, 1 + n * 37 % 600)
    };
    let pieces: Vec<MemRef> = (0..count).map(piece).collect();
    let len = pieces.iter().map(|piece| piece.len as usize).sum();
    (pieces, len)
}

fn gather(one: &Region, two: &Region, pieces: &[MemRef]) -> Vec<u8> {
    let mut all = Vec::new();
    for piece in pieces {
        let region = if piece.region == one.id() { one } else { two };
        all.extend(bytes(region, piece.offset as usize, piece.len as usize));
    }
    all
}

/// [RT-12], [RT-42], [RT-47], [RT-48]: one descriptor for all pieces, in both modes of the server
/// and both of the client, on one path and two.
#[test]
fn a_read_may_go_to_many_places() {
    let all = [(70, 1, true), (71, 2, false)].into_iter().flat_map(|(net, paths, refresh)| {
        [ReadKeys::LongLived, ReadKeys::PerRequest].map(|keys| (net, paths, refresh, keys))
    });
    for (net, paths, refresh, keys) in all {
        let pair = Pair::new(net, paths, config(refresh));
        let session = open(&pair, paths, keys);
        assert_eq!(session.attrs().unwrap().max_read_segments, 128);
        write_and_read(&session, 100, 60_000);
        let (one, two) = (session.region(100_000).unwrap(), session.region(100_000).unwrap());
        let source = session.region(60_000).unwrap();
        let pattern: Vec<u8> = (0..60_000_u32).map(|n| (n % 251) as u8).collect();
        source.buffer().write(0, &pattern);
        let permit = session.get_permit(PermitKind::Io, Wait::No).unwrap();
        session.call(Dir::Write, &permit, &at(0), &[source.piece(0, 60_000)]).unwrap();
        // More often than a key has values.
        for round in 0..300 {
            let (pieces, len) = scatter(&one, &two, 2 + round % 127);
            let from = round as usize * 11;
            session.call(Dir::Read, &permit, &at(from), &pieces).unwrap();
            assert_eq!(gather(&one, &two, &pieces), pattern[from..from + len], "round {round}");
        }
        let (pieces, _) = scatter(&one, &two, 129);
        let refused = session.call(Dir::Read, &permit, &at(0), &pieces).unwrap_err();
        assert_eq!(refused.errno(), Errno::EINVAL);
        // An error withdraws the key all the same [RT-48].
        let failed = session.call(Dir::Read, &permit, &at(common::STORE), &pieces[..9]);
        assert_eq!(failed.unwrap_err().errno(), Errno::EIO);
        session.call(Dir::Read, &permit, &at(0), &pieces[..9]).unwrap();
        session.put_permit(permit);
        assert!(session.paths().iter().all(|path| path.stats.reconnects == 0), "no path was lost");
        session.close();
        drop((one, two, source));
        eventually("nothing is left", || pair.client_device.in_use().mrs == 0);
    }
}

/// [RS-8], [RT-69]: requests move with keys of the other path; remaining keys are released with
/// their path.
#[test]
fn reads_with_keys_of_their_own_move() {
    let pair = Pair::with(72, 2, config(true), hasty);
    let session = open(&pair, 2, ReadKeys::PerRequest);
    let registered = pair.client_device.in_use().mrs;
    let load = Load::new(&session, Dir::Read, 32, 4096);
    for cut in [1, 2] {
        load.start(u64::MAX);
        std::thread::sleep(Duration::from_millis(50));
        pair.client_device.cut(ip(72, cut), None, true);
        let path = usize::from(cut) - 1;
        let state = || session.paths()[path].state;
        eventually("the loss is noticed", || state() == PathState::Reconnecting);
        let before = load.done.load(std::sync::atomic::Ordering::SeqCst);
        eventually("it goes on", || {
            load.done.load(std::sync::atomic::Ordering::SeqCst) > before + 100
        });
        pair.client_device.cut(ip(72, cut), None, false);
        eventually("the path comes back", || state() == PathState::Connected);
        load.end();
    }
    assert_eq!(*load.errors.lock().unwrap(), Vec::<i32>::new());
    assert!(session.paths().iter().map(|path| path.stats.failovers).sum::<u64>() > 0);
    drop(load);
    // The load's memory stays registered until a later send shows that the last one from it has
    // completed.
    eventually("no more than before", || pair.client_device.in_use().mrs <= registered + 1);
    // Closed with requests in flight.
    let load = Load::new(&session, Dir::Read, 32, 4096);
    load.start(u64::MAX);
    std::thread::sleep(Duration::from_millis(20));
    load.stop();
    drop(load);
    session.close();
    eventually("nothing is left", || pair.client_device.in_use().mrs == 0);
}
