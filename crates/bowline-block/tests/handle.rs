//! A disk through a handle: calls that a thread waits for, and futures.

use core::future::Future;
use core::pin::pin;
use core::task::{Context, Poll, Waker};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use bowline_block::backend::{BackendSpec, open};
use bowline_block::{
    BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskHandle, DiskIo, Durable, Errno, Limits,
    LocalDevice,
};

fn store() -> Arc<LocalDevice> {
    LocalDevice::new("disk0", open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).unwrap())
}

/// A disk that keeps requests until it is told to execute them.
struct Slow {
    disk: Arc<LocalDevice>,
    kept: Mutex<Vec<DiskIo>>,
    registrations: AtomicUsize,
}

impl Slow {
    fn new() -> Arc<Self> {
        Arc::new(Self { disk: store(), kept: Mutex::default(), registrations: AtomicUsize::new(0) })
    }

    fn resume(&self) {
        self.disk.submit(&mut self.kept.lock().unwrap());
    }
}

impl BlockDevice for Slow {
    fn limits(&self) -> Limits {
        self.disk.limits()
    }

    fn name(&self) -> &str {
        self.disk.name()
    }

    fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
        self.registrations.fetch_add(1, SeqCst);
        self.disk.memory(len)
    }

    fn submit(&self, reqs: &mut Vec<DiskIo>) {
        self.kept.lock().unwrap().append(reqs);
    }

    fn on_change(&self, f: Box<dyn Fn(DiskEvent) + Send + Sync>) {
        self.disk.on_change(f);
    }
}

fn poll<T>(future: core::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_thread_reads_what_it_has_written_and_sees_errors() {
    let disk = DiskHandle::new(store());
    disk.write_at(4096, &[7; 1024], Durable::Now).unwrap();
    disk.write_zeroes(4608, 512).unwrap();
    disk.flush().unwrap();
    let mut out = [1; 1024];
    disk.read_at(4096, &mut out).unwrap();
    assert_eq!(out, [[7; 512], [0; 512]].concat()[..]);
    assert!(disk.read_at(1 << 20, &mut out).is_err(), "beyond the end");
    assert_eq!(out[..512], [7; 512], "a failed read changes nothing");
}

/// A runtime of several threads moves tasks between them.
#[test]
fn futures_may_change_their_thread() {
    fn may<T: Send>(_: T) {}
    let disk = DiskHandle::new(store());
    may(disk.write_at_async(0, &[1; 512], Durable::Later));
    may(disk.read_at_async(0, &mut [0; 512]));
    may(disk.flush_async());
}

#[test]
fn registered_memory_is_used_again_as_far_as_it_is_long_enough() {
    let slow = Slow::new();
    let handle = DiskHandle::new(slow.clone());
    let write = |len: usize| {
        let bytes = vec![1; len];
        let mut write = pin!(handle.write_at_async(0, &bytes, Durable::Later));
        assert!(poll(write.as_mut()).is_pending());
        slow.resume();
        assert_eq!(poll(write), Poll::Ready(Ok(())));
        slow.registrations.load(SeqCst)
    };
    assert_eq!([write(512), write(4096), write(8192), write(512)], [1, 1, 2, 2]);
}

#[test]
fn a_dropped_write_is_executed_once_with_its_bytes() {
    let slow = Slow::new();
    let handle = DiskHandle::new(slow.clone());
    {
        let bytes = vec![7; 512];
        drop(handle.write_at_async(4096, &bytes, Durable::Later));
        assert_eq!(slow.kept.lock().unwrap().len(), 0, "nothing before it is polled");
        assert!(poll(pin!(handle.write_at_async(0, &bytes, Durable::Later))).is_pending());
    }
    // Its memory is not given to others while the disk may read it.
    let other = vec![8; 512];
    let mut next = pin!(handle.write_at_async(512, &other, Durable::Later));
    assert!(poll(next.as_mut()).is_pending());
    assert_eq!(slow.kept.lock().unwrap().len(), 2);
    slow.resume();
    assert_eq!(poll(next), Poll::Ready(Ok(())));
    let mut out = [1; 1024];
    let disk = DiskHandle::new(slow.disk.clone());
    disk.read_at(0, &mut out).unwrap();
    assert_eq!(out, [[7; 512], [8; 512]].concat()[..]);
    disk.read_at(4096, &mut out).unwrap();
    assert_eq!(out, [0; 1024]);
}

#[test]
fn a_dropped_read_leaves_the_buffer_and_its_memory_alone() {
    let slow = Slow::new();
    DiskHandle::new(slow.disk.clone()).write_at(0, &[7; 512], Durable::Later).unwrap();
    let handle = DiskHandle::new(slow.clone());
    let mut out = [1; 512];
    assert!(poll(pin!(handle.read_at_async(0, &mut out))).is_pending());
    let mut second = [2; 512];
    {
        let mut read = pin!(handle.read_at_async(512, &mut second));
        assert!(poll(read.as_mut()).is_pending());
        slow.resume();
        assert_eq!(poll(read), Poll::Ready(Ok(())));
    }
    assert_eq!((out, second), ([1; 512], [0; 512]));
}

/// Collects results.
#[derive(Default)]
struct Results(Mutex<Vec<(u64, i32)>>);

impl DiskDone for Results {
    fn done(&self, results: &[(u64, i32)]) {
        self.0.lock().unwrap().extend(results);
    }
}

#[test]
fn requests_are_made_from_parts_of_registered_memory() {
    let disk = store();
    let mem = disk.memory(4096).unwrap();
    assert_eq!(mem.len(), 4096);
    let results = Arc::new(Results::default());
    mem.write(1024, &[7; 512]);
    disk.submit(&mut vec![
        DiskIo::write(0, &mem, 1024..1536, results.clone()).tag(1).durable(Durable::Now),
    ]);
    disk.submit(&mut vec![DiskIo::read(0, &mem, 0..512, results.clone()).tag(2)]);
    disk.submit(&mut vec![DiskIo::flush(results.clone()).tag(3)]);
    disk.submit(&mut vec![DiskIo::read(0, &mem, 3584..4608, results.clone()).tag(4)]);
    let refused = (4, Errno::EINVAL.neg());
    assert_eq!(*results.0.lock().unwrap(), [(1, 0), (2, 0), (3, 0), refused]);
    let mut out = [0; 512];
    mem.read(0, &mut out);
    assert_eq!(out, [7; 512]);
}

#[test]
#[should_panic(expected = "512 bytes at 3840 of 4096 bytes of memory")]
fn bytes_beyond_registered_memory_are_a_mistake_of_the_program() {
    store().memory(4096).unwrap().read(3840, &mut [0; 512]);
}
