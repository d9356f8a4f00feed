//! What functions of the program do to a disk: panic, own things of it.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bowline_block::sync::{self, Durable};
use bowline_block::{BlockDevice, DiskDone, DiskEvent, DiskIo, IoOp};
use bowline_rnbd_driver::{Disk, Exports};
use common::Rig;

fn rig(net: u8) -> (Rig, Arc<Disk>) {
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512).unwrap();
    let rig = Rig::new(net, exports);
    let disk = rig.map("disk0", &rig.options("programs")).unwrap();
    (rig, disk)
}

/// Says that it was told, and panics.
struct Clumsy(Mutex<Sender<()>>);

impl DiskDone for Clumsy {
    fn done(&self, _: &[(u64, i32)]) {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).send(()).unwrap();
        panic!("a mistake of the program");
    }
}

/// Requests of others are told, and so is what happens to the disk.
#[test]
fn a_panic_of_who_is_told_ends_there() {
    let (rig, disk) = rig(72);
    let mem = disk.memory(4096).unwrap();
    let (send, told) = channel();
    let clumsy: Arc<dyn DiskDone> = Arc::new(Clumsy(Mutex::new(send)));
    for _ in 0..3 {
        let (op, mem, done) = (IoOp::Read, Some((mem.region, 0)), Arc::clone(&clumsy));
        let (offset, len, fua, nounmap, tag) = (0, 4096, false, false, 0);
        disk.submit(&mut vec![DiskIo { op, offset, len, fua, nounmap, mem, tag, done }]);
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
