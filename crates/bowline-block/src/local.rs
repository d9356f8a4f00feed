//! A store as a disk of the same process, without a network.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bowline_rnbd::{Errno, IoOp, Limits};
use bowline_verbs::{Buffer, Mem, catch_callback_panic};

use crate::backend::{Backend, BackendDone, BackendIo, BackendResult};
use crate::device::{BlockDevice, DeviceMem, DiskDone, DiskEvent, DiskIo, Extent};

/// A disk that is a [`Backend`] of this process: front ends can be tested, and stores be served by
/// NBD or as files, without a network.
pub struct LocalDevice {
    name: String,
    shared: Arc<Shared>,
    as_done: Arc<dyn BackendDone>,
}

type Listener = Box<dyn Fn(DiskEvent) + Send + Sync>;

struct Shared {
    backend: Arc<dyn Backend>,
    region_ids: AtomicU32,
    regions: Mutex<HashMap<u32, Arc<Buffer>>>,
    requests: Mutex<Requests>,
    listeners: Mutex<Vec<Listener>>,
}

/// Requests in flight, by the lower half of the token of their pieces.
#[derive(Default)]
struct Requests {
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
}

struct Request {
    tag: u64,
    done: Arc<dyn DiskDone>,
    /// Memory of the data. The upper half of a piece's token is the number of the piece.
    mem: Option<Mem>,
    len: u32,
    max_piece: u32,
    pieces: u32,
    errno: i32,
}

impl LocalDevice {
    /// Makes a disk of this name on a store.
    pub fn new(name: &str, backend: Arc<dyn Backend>) -> Arc<Self> {
        let shared = Arc::new(Shared {
            backend,
            region_ids: AtomicU32::new(1),
            regions: Mutex::default(),
            requests: Mutex::default(),
            listeners: Mutex::default(),
        });
        let as_done: Arc<dyn BackendDone> = shared.clone();
        Arc::new(Self { name: name.to_owned(), shared, as_done })
    }

    /// Reads the size of the store again, and reports a change to listeners.
    ///
    /// # Errors
    /// Errors of reading the size.
    pub fn resize(&self) -> std::io::Result<u64> {
        let before = self.shared.backend.limits().bytes;
        let now = self.shared.backend.resize()?;
        if now != before {
            for listener in lock(&self.shared.listeners).iter() {
                catch_callback_panic(|| listener(DiskEvent::Resized(now)));
            }
        }
        Ok(now)
    }
}

impl fmt::Debug for LocalDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalDevice").field("name", &self.name).finish_non_exhaustive()
    }
}

impl BlockDevice for LocalDevice {
    fn limits(&self) -> Limits {
        self.shared.backend.limits()
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn memory(&self, len: usize) -> Result<DeviceMem, Errno> {
        self.register(Arc::new(Buffer::new(len).map_err(|_| Errno::ENOMEM)?))
    }

    fn register(&self, buffer: Arc<Buffer>) -> Result<DeviceMem, Errno> {
        let region = self.shared.region_ids.fetch_add(1, Ordering::Relaxed);
        lock(&self.shared.regions).insert(region, buffer.clone());
        let keep = Registration { shared: Arc::downgrade(&self.shared), region };
        let len = buffer.len();
        Ok(DeviceMem::new(Mem { buffer, offset: 0, len }, region, keep))
    }

    fn submit(&self, reqs: &mut Vec<DiskIo>) {
        let limits = self.limits();
        let mut pieces = Vec::new();
        for io in reqs.drain(..) {
            match self.shared.begin(&limits, &io, &mut pieces) {
                Ok(()) => {}
                Err(errno) => _ = catch_callback_panic(|| io.done.done(&[(io.tag, errno.neg())])),
            }
        }
        self.shared.backend.submit(&mut pieces, &self.as_done);
        self.shared.backend.kick();
    }

    fn extent(&self, offset: u64, len: u64) -> Extent {
        self.shared.backend.extent(offset, len)
    }

    fn on_change(&self, f: Listener) {
        lock(&self.shared.listeners).push(f);
    }
}

/// Ends the registration of a region when dropped.
struct Registration {
    shared: Weak<Shared>,
    region: u32,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            lock(&shared.regions).remove(&self.region);
        }
    }
}

impl Shared {
    /// Stores a request and splits it into pieces that the store accepts.
    fn begin(&self, limits: &Limits, io: &DiskIo, into: &mut Vec<BackendIo>) -> Result<(), Errno> {
        let mem = match (io.op.has_data(), io.mem) {
            (false, _) => None,
            (true, None) => return Err(Errno::EINVAL),
            (true, Some((region, offset))) => {
                let regions = lock(&self.regions);
                let buffer = regions.get(&region).ok_or(Errno::EINVAL)?.clone();
                let len = io.len as usize;
                if offset.checked_add(len).is_none_or(|end| end > buffer.len()) {
                    return Err(Errno::EINVAL);
                }
                Some(Mem { buffer, offset, len })
            }
        };
        let max_piece = max_piece(limits, io.op);
        let pieces = io.len.div_ceil(max_piece).max(1);
        let slot = lock(&self.requests).add(Request {
            tag: io.tag,
            done: io.done.clone(),
            mem: mem.clone(),
            len: io.len,
            max_piece,
            pieces,
            errno: 0,
        });
        for piece in 0..pieces {
            let at = piece * max_piece;
            let len = max_piece.min(io.len - at);
            into.push(BackendIo {
                token: u64::from(piece) << 32 | u64::from(slot),
                op: io.op,
                offset: io.offset.saturating_add(at.into()),
                len,
                fua: io.fua,
                nounmap: io.nounmap,
                prio: 0,
                user: 0,
                mem: mem.as_ref().map(|mem| Mem {
                    buffer: mem.buffer.clone(),
                    offset: mem.offset + at as usize,
                    len: len as usize,
                }),
            });
        }
        Ok(())
    }
}

impl BackendDone for Shared {
    fn done(&self, results: &[BackendResult]) {
        for result in results {
            let (slot, piece) = (result.token as u32, (result.token >> 32) as u32);
            // Copied before the piece counts as answered, while the request still owns the memory.
            let direct = result.direct.and_then(|from| {
                let (mem, at, len) = lock(&self.requests).piece(slot, piece)?;
                Some((from, mem, at, len, self.backend.region()?))
            });
            if let Some((from, mem, at, len, store)) = direct {
                // The range lies within the store, so it fits a usize.
                store.copy_to(from as usize, &mem.buffer, mem.offset + at as usize, len as usize);
            }
            let finished = lock(&self.requests).finish(slot, result.errno);
            if let Some((done, tag, errno)) = finished {
                catch_callback_panic(move || done.done(&[(tag, errno)]));
            }
        }
    }
}

impl Requests {
    fn add(&mut self, request: Request) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() as u32 - 1
        });
        self.slots[slot as usize] = Some(request);
        slot
    }

    fn piece(&self, slot: u32, piece: u32) -> Option<(Mem, u32, u32)> {
        let request = self.slots.get(slot as usize)?.as_ref()?;
        let at = piece * request.max_piece;
        Some((request.mem.clone()?, at, request.max_piece.min(request.len - at)))
    }

    /// Counts a piece as answered; the first error becomes that of the request.
    fn finish(&mut self, slot: u32, errno: i32) -> Option<(Arc<dyn DiskDone>, u64, i32)> {
        let place = self.slots.get_mut(slot as usize)?;
        let request = place.as_mut()?;
        request.pieces -= 1;
        if request.errno == 0 {
            request.errno = errno;
        }
        if request.pieces > 0 {
            return None;
        }
        let request = place.take()?;
        self.free.push(slot);
        Some((request.done, request.tag, request.errno))
    }
}

/// Returns the largest piece of a request of this kind in bytes, in whole blocks.
fn max_piece(limits: &Limits, op: IoOp) -> u32 {
    let most = match op {
        IoOp::Read | IoOp::Write => limits.max_io,
        IoOp::WriteZeroes => limits.max_write_zeroes,
        IoOp::Discard | IoOp::SecureErase => {
            limits.discard.map_or(0, |d| u32::try_from(d.max_bytes).unwrap_or(u32::MAX))
        }
        IoOp::Flush => 0,
    };
    // An unsupported operation is passed on in one piece, for the store to refuse.
    if most == 0 { u32::MAX } else { (most - most % limits.logical).max(limits.logical) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks leaves a value inconsistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::backend::{BackendSpec, open};
    use crate::sync::{self, Durable};

    /// Reports that it was called, and panics.
    struct Clumsy(Mutex<std::sync::mpsc::Sender<()>>);

    impl DiskDone for Clumsy {
        fn done(&self, _: &[(u64, i32)]) {
            lock(&self.0).send(()).unwrap();
            panic!("a mistake of the program");
        }
    }

    /// Records secure erases, and does nothing else.
    struct Eraser(Mutex<Vec<(u64, u32)>>);

    impl Backend for Eraser {
        fn limits(&self) -> Limits {
            let discard = bowline_rnbd::Discard { max_bytes: 8192, granularity: 512, alignment: 0 };
            Limits { discard: Some(discard), secure_erase: true, ..Limits::plain(1 << 20) }
        }

        fn submit(&self, io: &mut Vec<BackendIo>, done: &Arc<dyn BackendDone>) {
            for BackendIo { token, op, offset, len, .. } in io.drain(..) {
                assert_eq!(op, IoOp::SecureErase);
                lock(&self.0).push((offset, len));
                done.done(&[BackendResult { token, errno: 0, direct: None }]);
            }
        }

        fn resize(&self) -> std::io::Result<u64> {
            Ok(1 << 20)
        }
    }

    #[test]
    fn what_is_to_be_erased_for_good_is_cut_as_discards_are() {
        let eraser = Arc::new(Eraser(Mutex::default()));
        let disk = LocalDevice::new("disk", eraser.clone());
        let erased = sync::call(&*disk, IoOp::SecureErase, 4096, 20_480, None, Durable::Later);
        assert_eq!(erased, Ok(()));
        assert_eq!(*lock(&eraser.0), [(4096, 8192), (12_288, 8192), (20_480, 4096)]);
    }

    /// One thread delivers the results of all requests of a file.
    #[test]
    fn a_panic_of_who_is_told_ends_there() {
        let path = std::env::temp_dir().join(format!("bowline-local-{}", std::process::id()));
        std::fs::File::create_new(&path).unwrap().set_len(1 << 16).unwrap();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let fd = file.into();
        let spec = BackendSpec::File { fd, read_only: false, block: 4096, direct: false };
        let disk = LocalDevice::new("disk", open(spec).unwrap());
        let mem = disk.memory(4096).unwrap();
        let (send, reported) = channel();
        let clumsy: Arc<dyn DiskDone> = Arc::new(Clumsy(Mutex::new(send)));
        // The second request is unaligned and refused inside the call; the third is aligned.
        for offset in [0, 100, 4096] {
            let (op, mem, done) = (IoOp::Write, Some((mem.region, 0)), clumsy.clone());
            let (len, fua, nounmap, tag) = (4096, false, false, 0);
            disk.submit(&mut vec![DiskIo { op, offset, len, fua, nounmap, mem, tag, done }]);
            reported.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        }
        let (send, ended) = channel();
        let user = disk.clone();
        std::thread::spawn(move || {
            send.send(sync::write_at(&*user, 8192, &[1; 4096], Durable::Now)).unwrap();
        });
        let ended = ended.recv_timeout(std::time::Duration::from_secs(20));
        assert_eq!(ended.expect("nobody takes completions"), Ok(()));
    }
}
