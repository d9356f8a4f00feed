//! Offers a file or a block device at a unix socket, by NBD, until it is asked to stop.
//!
//! ```text
//! cargo run -p bowline-block --example nbd_file -- disk.img /tmp/disk.sock
//! qemu-io -f raw 'nbd+unix:///disk?socket=/tmp/disk.sock' -c 'write 0 1M'
//! ```
//!
//! `memory:BYTES` in place of a file offers memory.

use std::error::Error;
use std::fs::OpenOptions;
use std::path::PathBuf;

use bowline_block::LocalDevice;
use bowline_block::backend::{self, BackendSpec};
use bowline_block::front::nbd::{self, NbdOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let (Some(store), Some(socket)) = (args.next(), args.next()) else {
        return Err("usage: nbd_file FILE|memory:BYTES SOCKET".into());
    };
    let spec = match store.to_str().and_then(|text| text.strip_prefix("memory:")) {
        Some(bytes) => BackendSpec::Memory { bytes: bytes.parse()?, block: 512 },
        None => {
            let file = OpenOptions::new().read(true).write(true).open(&store)?;
            BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: true }
        }
    };
    let disk = LocalDevice::new("disk", backend::open(spec)?);
    let server = nbd::serve(disk, &PathBuf::from(socket), NbdOptions::default())?;
    println!("listening on {}", server.path().display());
    loop {
        std::thread::park();
    }
}
