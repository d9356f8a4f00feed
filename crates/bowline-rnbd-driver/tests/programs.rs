//! Callbacks of the program that panic, or own the disk they are called for.

mod common;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bowline_block::backend::{self, Backend, BackendDone, BackendIo, BackendSpec};
use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, DiskDone, DiskEvent, DiskIo, IoOp};
use bowline_rnbd::{Errno, Limits};
use bowline_rnbd_driver::{Disk, Exports};
use common::{Rig, SOON, SOON_ENOUGH};

fn rig(net: u8) -> (Rig, Arc<Disk>) {
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512).unwrap();
    let rig = Rig::hasty(net, exports, 1, SOON_ENOUGH);
    let disk = rig.map("disk0", &rig.options("programs")).unwrap();
    (rig, disk)
}

/// Reports that it was called, and panics.
struct Clumsy(Mutex<Sender<()>>);

impl DiskDone for Clumsy {
    fn done(&self, _: &[(u64, i32)]) {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).send(()).unwrap();
        panic!("a mistake of the program");
    }
}

/// Other requests are still completed, and events of the disk still delivered.
#[test]
fn a_panic_of_a_callback_is_contained() {
    let (rig, disk) = rig(72);
    let mem = disk.memory(4096).unwrap();
    let (send, told) = channel();
    let clumsy: Arc<dyn DiskDone> = Arc::new(Clumsy(Mutex::new(send)));
    for _ in 0..3 {
        disk.submit(&mut vec![DiskIo::read(0, &mem, 0..4096, Arc::clone(&clumsy))]);
        told.recv_timeout(Duration::from_secs(20)).unwrap();
    }
    let (send, ended) = channel();
    let user = Arc::clone(&disk);
    std::thread::spawn(move || {
        send.send(sync::write_at(&*user, 0, &[1; 4096], Durable::Later)).unwrap();
    });
    let ended = ended.recv_timeout(Duration::from_secs(20));
    assert_eq!(ended.expect("nobody tells"), Ok(()));

    let online = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&online);
    disk.on_change(Box::new(|_| panic!("a mistake of the program")));
    disk.on_change(Box::new(move |event| {
        count.fetch_add(usize::from(event == DiskEvent::Online), SeqCst);
    }));
    rig.client_device.cut(rig.client_ip(0), None, true);
    rig.until("it is lost", || disk.info().unwrap().state.to_string() != "open");
    rig.client_device.cut(rig.client_ip(0), None, false);
    rig.until("its return is told", || online.load(SeqCst) == 1);
    sync::write_at(&*disk, 0, &[2; 4096], Durable::Later).unwrap();
}

/// Calls another disk of the session when it is dropped.
struct Asks(Arc<Disk>, Sender<bool>);

impl Drop for Asks {
    fn drop(&mut self) {
        self.1.send(self.0.info().is_some()).unwrap();
    }
}

/// A listener is dropped without the lock of the session, also when the disk was unmapped
/// meanwhile.
#[test]
fn a_listener_may_call_the_session_when_dropped() {
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512).unwrap();
    exports.memory("disk1", 1 << 20, 512).unwrap();
    // Not closed on the way out if this fails: that would hang too.
    let rig = ManuallyDrop::new(Rig::hasty(73, exports, 1, SOON));
    let disk = rig.map("disk0", &rig.options("asks")).unwrap();
    let other = rig.map("disk1", &rig.options("asks")).unwrap();
    let (send, dropped) = channel();
    let asks = Asks(other, send);
    let (told, hears) = channel();
    let (go_on, waits) = channel::<()>();
    let once = Mutex::new(Some((told, waits)));
    disk.on_change(Box::new(move |_| {
        let _owned = &asks;
        if let Some((told, waits)) = once.lock().unwrap().take() {
            told.send(()).unwrap();
            waits.recv().unwrap();
        }
    }));
    rig.client_device.cut(rig.client_ip(0), None, true);
    hears.recv_timeout(Duration::from_secs(20)).expect("the loss is told");
    rig.client.unmap(&disk).unwrap();
    drop(disk);
    assert!(dropped.try_recv().is_err(), "the listener is at it");
    go_on.send(()).unwrap();
    let answer = dropped.recv_timeout(Duration::from_secs(20));
    assert!(answer.expect("the session is locked for ever"));
    rig.client_device.cut(rig.client_ip(0), None, false);
    drop(ManuallyDrop::into_inner(rig));
}

/// Storage of the program that panics on writes.
struct Shaky(Arc<dyn Backend>);

impl Backend for Shaky {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn submit(&self, ios: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        assert!(ios.iter().all(|io| io.op != IoOp::Write), "a mistake of the program");
        self.0.submit(ios, done);
    }

    fn resize(&self) -> std::io::Result<u64> {
        self.0.resize()
    }
}

/// Requests that storage panics on fail, and other requests are served.
#[test]
fn a_panic_of_storage_fails_its_requests() {
    let memory = backend::open(BackendSpec::Memory { bytes: 1 << 20, block: 512 }).unwrap();
    let mut exports = Exports::new();
    exports.backend("shaky", Arc::new(Shaky(memory))).unwrap();
    exports.memory("sound", 1 << 20, 512).unwrap();
    let rig = Rig::new(74, exports);
    let options = rig.options("storage");
    let (shaky, sound) = (rig.map("shaky", &options).unwrap(), rig.map("sound", &options).unwrap());
    for _ in 0..3 {
        assert_eq!(sync::write_at(&*shaky, 0, &[1; 4096], Durable::Later), Err(Errno::EIO));
        sync::write_at(&*sound, 0, &[1; 4096], Durable::Later).unwrap();
        sync::read_at(&*shaky, 0, &mut [0; 4096]).unwrap();
    }
}
