//! Disks of virtual machines, with the vhost-user front end of rust-vmm and with hostile ones.

#[path = "common/guest.rs"]
mod guest;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bowline_block::LocalDevice;
use bowline_block::backend::{self, Backend, BackendSpec};
use bowline_block::front::vhost_user::{self, VhostUserOptions, VhostUserServer};
use guest::{DATA, F_EVENT_IDX, FLUSH, GET_ID, Guest, IN, Memory, OUT};

/// A server at a socket of its own.
struct Served {
    server: VhostUserServer,
    path: PathBuf,
    /// What it told.
    told: Arc<Mutex<Vec<String>>>,
}

fn serve(name: &str, disk: Arc<LocalDevice>, options: VhostUserOptions) -> Served {
    let path = std::env::temp_dir().join(format!("bowline-{name}-{}.sock", std::process::id()));
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let tell = Arc::clone(&told);
    let trouble = move |why: &str| tell.lock().unwrap().push(why.to_owned());
    let server = vhost_user::serve(disk, &path, options, trouble).expect("served");
    Served { server, path, told }
}

fn memory(bytes: u64) -> Arc<dyn Backend> {
    backend::open(BackendSpec::Memory { bytes, block: 512 }).expect("memory")
}

fn plain(name: &str) -> Served {
    serve(name, LocalDevice::new("disk", memory(16 << 20)), VhostUserOptions::default())
}

#[test]
fn a_guest_reads_what_it_has_written() {
    // tests [NB-66]
    let served = plain("vhost-plain");
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let memory = Memory::new();
    for without in [0, F_EVENT_IDX] {
        let mut guest = Guest::start(&served.path, &memory, without);
        memory.put(DATA, &[7; 4096]);
        assert_eq!(guest.run(OUT, 8, &[(DATA, 4096)]), 0);
        assert_eq!(guest.run(FLUSH, 0, &[]), 0);
        assert_eq!(guest.run(IN, 8, &[(DATA + 8192, 4096)]), 0);
        assert_eq!(memory.get(DATA + 8192, 4096), [7; 4096]);
        assert_eq!(guest.run(GET_ID, 0, &[(DATA, 20)]), 0);
        assert_eq!(memory.get(DATA, 6), b"disk\0\0");
        assert_eq!(guest.run(99, 0, &[]), 2, "not supported");
        assert_eq!(guest.run(IN, (16 << 20) / 512, &[(DATA, 512)]), 1, "behind the end");
        memory.put(guest::GUEST, &[0; 128 << 10]);
    }
    assert_eq!(*served.told.lock().unwrap(), [""; 0]);
    drop(served.server);
    assert!(!served.path.exists(), "the socket is removed");
}
