//! Disks over an engine with several devices, some of which fail.

mod common;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use bowline_block::BlockDevice;
use bowline_block::sync::{self, Durable};
use bowline_rnbd::client::Outage;
use bowline_rnbd_driver::{Client, Exports, MapOptions};
use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_rtrs_driver::{Engine, EngineConfig};
use bowline_verbs::Device;
use common::{Rig, Stop};

const NET: u8 = 71;

/// A disk works while one device is left; the loss of the last is an outage like any other.
#[test]
fn a_disk_goes_on_while_one_device_is_left() {
    let mut exports = Exports::new();
    exports.memory("disk0", 1 << 20, 512).unwrap();
    let rig = Rig::with_paths(NET, exports, 2);
    let devices = [11, 12].map(|host| {
        let addrs = vec![IpAddr::from([127, 80, NET, host])];
        Arc::new(SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).unwrap())
    });
    let all = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
    let engine = Engine::new(all.collect(), EngineConfig::default()).unwrap();
    let client = Client::new(Arc::clone(&engine), MapOptions::new("default"));
    let options = (0..2).fold(MapOptions::new("several"), |options, path| {
        options.path(Some(IpAddr::from([127, 80, NET, 11 + path])), rig.server_ip(path))
    });
    let disk =
        client.map_with("disk0", &options.outage(Outage::Queue(Duration::from_secs(30)))).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = Stop(&stop);
        for thread in 0..4_u64 {
            let (disk, stop) = (&*disk, &stop);
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    sync::write_at(disk, thread * 4096, &[1; 4096], Durable::Later).unwrap();
                }
            });
        }
        std::thread::sleep(Duration::from_millis(50));
        devices[0].close();
        let before = disk.info().unwrap().stats.writes;
        rig.until("it goes on", || disk.info().unwrap().stats.writes > before + 100);
    });
    let mem = disk.memory(4096).unwrap();
    let reader = Arc::clone(&disk);
    devices[1].close();
    std::thread::scope(|scope| {
        let read = scope.spawn(move || {
            let mem = Some((mem.region, 0));
            sync::call(&*reader, bowline_block::IoOp::Read, 0, 4096, mem, Durable::Later)
        });
        std::thread::sleep(Duration::from_millis(300));
        assert!(!read.is_finished(), "requests wait in an outage");
        client.unmap(&disk).unwrap();
        assert!(read.join().unwrap().is_err());
    });
    engine.close();
}
