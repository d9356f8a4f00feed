//! A disk whose blocks are neither in memory nor in a file: a store of the program, and one that
//! works on the data on its way to another store.

use std::net::IpAddr;
use std::sync::Arc;

use bowline::Errno;
use bowline::block::backend::{self, Backend, BackendDone, BackendIo, BackendSpec, answer};
use bowline::block::{DiskHandle, Durable, IoOp, Limits, LocalDevice};
use bowline::rnbd::{Access, Client, ErrorKind, ExportServer, Exports, MapOptions, ServerConfig};
use bowline::rtrs::{Engine, PORT};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Each block begins with its number.
struct Numbers;

impl Backend for Numbers {
    fn limits(&self) -> Limits {
        Limits { read_only: true, ..Limits::plain(1 << 30) }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        answer(io, done, |io| {
            io.check(&self.limits())?;
            let (IoOp::Read, Some(mem)) = (io.op, &io.mem) else {
                return Err(Errno::EOPNOTSUPP);
            };
            mem.buffer.clear(mem.offset, io.len as usize);
            for at in (0..io.len as usize).step_by(512) {
                let number = (io.offset + at as u64) / 512;
                mem.buffer.write(mem.offset + at, &number.to_le_bytes());
            }
            Ok(None)
        });
    }
}

/// Turns around the bits of what is written to another store. (An example: this hides nothing.)
struct Inverted(Arc<dyn Backend>);

/// Turns around the results of reads.
struct Reads {
    done: Arc<dyn BackendDone>,
    /// The reads of one batch.
    batch: Vec<BackendIo>,
}

fn invert(io: &BackendIo) {
    let Some(mem) = &io.mem else { return };
    let mut bytes = vec![0; io.len as usize];
    mem.buffer.read(mem.offset, &mut bytes);
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    mem.buffer.write(mem.offset, &bytes);
}

impl BackendDone for Reads {
    fn done(&self, results: &[backend::BackendResult]) {
        for result in results {
            let io = self.batch.iter().find(|io| io.token == result.token);
            io.filter(|_| result.errno == 0).into_iter().for_each(invert);
        }
        self.done.done(results);
    }
}

impl Backend for Inverted {
    fn limits(&self) -> Limits {
        // Zeroes and discarded blocks would not be inverted.
        Limits { discard: None, max_write_zeroes: 0, ..self.0.limits() }
    }

    fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
        let mut reads: Vec<BackendIo> = io.extract_if(.., |io| io.op == IoOp::Read).collect();
        // Behind a server the memory of a write is the server's own copy.
        io.iter().filter(|io| io.op == IoOp::Write).for_each(invert);
        self.0.submit(io, done);
        if !reads.is_empty() {
            let done = Reads { done: done.clone(), batch: reads.clone() };
            self.0.submit(&mut reads, &(Arc::new(done) as _));
        }
    }

    fn kick(&self) {
        self.0.kick();
    }

    fn resize(&self) -> std::io::Result<u64> {
        self.0.resize()
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("bowline-own-backend-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    file.set_len(1 << 20)?;
    let below = file.try_clone()?;
    let spec = BackendSpec::File { fd: file.into(), read_only: false, block: 512, direct: false };
    let inverted = Inverted(backend::open(spec)?);

    // Without a network, which is how a store is tested first.
    let mut block = [0; 512];
    DiskHandle::new(LocalDevice::new("numbers", Arc::new(Numbers))).read_at(1024, &mut block)?;
    assert_eq!(block[..8], 2_u64.to_le_bytes());

    let mut exports = Exports::new();
    exports.backend("numbers", Arc::new(Numbers))?;
    exports.backend("inverted", Arc::new(inverted))?;
    let (here, there): (IpAddr, IpAddr) = ([127, 77, 16, 1].into(), [127, 77, 16, 2].into());
    let at = [(there, PORT).into()];
    let server =
        ExportServer::open(&Engine::soft([there])?, &at, ServerConfig::default(), exports)?;

    let options = MapOptions::new("example").paths([(here, there)]);
    let client = Client::new(Engine::soft([here])?, options.clone());
    let refused = client.map("numbers").expect_err("for reading only, by its limits");
    assert_eq!(refused.kind(), ErrorKind::NotPermitted);
    let numbers = client.map_with("numbers", &options.access(Access::Ro))?;
    DiskHandle::new(numbers).read_at(99 * 512, &mut block)?;
    assert_eq!(block[..8], 99_u64.to_le_bytes());

    let disk = DiskHandle::new(client.map("inverted")?);
    disk.write_at(0, &[0x0f; 512], Durable::Now)?;
    disk.read_at(0, &mut block)?;
    assert_eq!(block, [0x0f; 512]);
    std::os::unix::fs::FileExt::read_exact_at(&below, &mut block, 0)?;
    assert_eq!(block, [0xf0; 512], "as it is stored");

    client.close();
    server.close();
    println!("both work");
    Ok(())
}
