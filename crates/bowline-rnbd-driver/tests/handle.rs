//! A mapped disk through a handle, whose futures are dropped while the disk is away.

mod common;

use core::future::Future;
use core::pin::pin;
use core::task::{Context, Poll, Waker};
use std::sync::Arc;
use std::task::Wake;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bowline_block::{DiskHandle, Durable};
use bowline_rnbd::client::Outage;
use common::{Rig, SOON, memory, pattern};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(20);

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future in this thread, without any runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut future, end) = (pin!(future), Instant::now() + LIMIT);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        assert!(Instant::now() < end, "not ready");
        thread::park_timeout(LIMIT);
    }
}

fn poll_once(future: impl Future) -> bool {
    pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

#[test]
fn tasks_write_flush_and_read_a_disk_of_another_machine() {
    let rig = Rig::new(120, memory(4 * MIB));
    let disk = DiskHandle::new(rig.map("disk0", &rig.options("tasks")).unwrap());
    block_on(async {
        // Longer than the largest request of the session.
        for (offset, len) in [(0, 512), (4096, 1 << 20)] {
            let bytes = pattern(len, offset);
            disk.write_at_async(offset, &bytes, Durable::Later).await.unwrap();
            disk.flush_async().await.unwrap();
            let mut out = vec![0; len];
            disk.read_at_async(offset, &mut out).await.unwrap();
            assert!(out == bytes, "at {offset}");
        }
        assert!(disk.read_at_async(4 * MIB, &mut [0; 512]).await.is_err());
    });
}

#[test]
fn a_write_that_is_dropped_while_the_disk_is_away_is_carried_out_once() {
    let rig = Rig::hasty(121, memory(MIB), 1, SOON);
    let options = rig.options("dropped").outage(Outage::Queue(LIMIT));
    let disk = rig.map("disk0", &options).unwrap();
    let io = DiskHandle::new(disk.clone());
    io.write_at(0, &[1; 512], Durable::Now).unwrap();
    let writes = || disk.info().unwrap().stats.writes;
    let before = writes();

    rig.cut(0, true);
    rig.until("it is away", || !rig.is_connected("dropped"));
    assert!(!poll_once(io.write_at_async(0, &[2; 512], Durable::Later)));
    let mut kept = [9; 512];
    assert!(!poll_once(io.read_at_async(512, &mut kept)));
    // Memory of the dropped requests is not used for this one.
    let mut third = pin!(io.write_at_async(1024, &[3; 512], Durable::Later));
    assert!(third.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    rig.cut(0, false);

    block_on(third).unwrap();
    rig.until("the dropped write is done", || writes() >= before + 2);
    let mut out = [0; 1536];
    io.read_at(0, &mut out).unwrap();
    assert_eq!(out, [[2; 512], [0; 512], [3; 512]].concat()[..]);
    assert_eq!(kept, [9; 512], "a dropped read changes nothing");
    assert_eq!(writes(), before + 2, "each once");
}
