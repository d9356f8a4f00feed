//! The model of a disk: for each sector, the writes whose data a read may return.
//!
//! Stamps are unique across all disks, so that data written to another disk is recognized.
//!
//! A write can be visible from its begin on. Of two writes, if neither was acknowledged before the
//! other began, either may be the last. A write that failed, or whose writer died, may still be
//! carried out until the server dies. A write that was acknowledged, but not made durable by a
//! flush, may be lost when the server dies.

use std::collections::BTreeMap;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Number of stamps of a disk.
const STAMPS: u32 = 1 << 20;

/// The contents a write gives to a sector; zeroes for stamp 0.
pub(crate) fn fill(stamp: u32, sector: u64, out: &mut [u8]) {
    for (index, word) in out.chunks_exact_mut(8).enumerate() {
        let [low, high] = halves(stamp, sector, index);
        word.copy_from_slice(&(u64::from(high) << 32 | u64::from(low)).to_le_bytes());
    }
}

/// The two halves of a word that a write gives to a sector: the word's position, and the write's
/// stamp.
fn halves(stamp: u32, sector: u64, index: usize) -> [u32; 2] {
    match stamp {
        0 => [0, 0],
        _ => [((sector & 0xff_ffff) << 8) as u32 | index as u32, stamp],
    }
}

/// A write that may have given a sector its contents.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    stamp: u32,
    started: u64,
    /// When the write was acknowledged.
    done: Option<u64>,
    /// When a later write was acknowledged, so that this one is no longer visible, unless the
    /// server dies.
    superseded: Option<u64>,
}

/// An operation in progress.
#[derive(Clone, Debug)]
struct Running {
    what: DiskOp,
    started: u64,
    first: u64,
    count: u64,
    /// The server died meanwhile, and the client has not noticed: acknowledged data may be lost.
    server_died: bool,
}

/// An operation on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskOp {
    Read,
    /// A stamp, and whether the write is durable once it is acknowledged.
    Write(u32, bool),
    /// May have no effect.
    Discard,
    Flush,
}

/// A disk as its only writer knows it.
#[derive(Debug)]
pub(crate) struct Oracle {
    sectors: Vec<Vec<Candidate>>,
    running: BTreeMap<u64, Running>,
    /// For each read in progress: the sector and stamp pairs it may find.
    may_find: BTreeMap<u64, Vec<(u64, u32)>>,
    clock: u64,
    stamps: u32,
}

impl Oracle {
    /// A disk, by its number, to which nothing has been written.
    pub(crate) fn new(disk: usize, sectors: u64) -> Self {
        let zero = Candidate { stamp: 0, started: 0, done: Some(0), superseded: None };
        Self {
            sectors: vec![vec![zero]; sectors as usize],
            running: BTreeMap::new(),
            may_find: BTreeMap::new(),
            clock: 0,
            stamps: disk as u32 * STAMPS,
        }
    }

    /// Returns the stamp of the next write.
    pub(crate) fn next_stamp(&mut self) -> u32 {
        self.stamps += 1;
        self.stamps
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Records that the program begins an operation.
    pub(crate) fn begin(&mut self, id: u64, what: DiskOp, first: u64, count: u64) {
        let started = self.tick();
        let sectors = first..first + count;
        let stamp = match what {
            DiskOp::Write(stamp, _) => Some(stamp),
            DiskOp::Discard => Some(0),
            DiskOp::Read | DiskOp::Flush => None,
        };
        if let Some(stamp) = stamp {
            for at in sectors.clone() {
                let candidate = Candidate { stamp, started, done: None, superseded: None };
                self.sectors[at as usize].push(candidate);
            }
            for (read, running) in &self.running {
                let range = running.first..running.first + running.count;
                let both = sectors.clone().filter(|at| range.contains(at));
                if let Some(may_find) = self.may_find.get_mut(read) {
                    may_find.extend(both.map(|at| (at, stamp)));
                }
            }
        }
        if what == DiskOp::Read {
            let seen = |at: u64| {
                let visible = self.sectors[at as usize].iter().filter(|c| c.superseded.is_none());
                visible.map(move |c| (at, c.stamp)).collect::<Vec<_>>()
            };
            self.may_find.insert(id, sectors.flat_map(seen).collect());
        }
        self.running.insert(id, Running { what, started, first, count, server_died: false });
    }

    /// Records the end of an operation; `data` is the result of a read.
    pub(crate) fn end(&mut self, id: u64, ok: bool, data: &[u8]) -> Result<(), String> {
        let now = self.tick();
        let run = self.running.remove(&id).ok_or_else(|| format!("request {id} ends twice"))?;
        let may_find = self.may_find.remove(&id).unwrap_or_default();
        match run.what {
            DiskOp::Read if ok => check(&run, data, &may_find),
            DiskOp::Write(stamp, durable) if ok => {
                for at in run.first..run.first + run.count {
                    self.written(at, stamp, run.started, (now, run.server_died), durable);
                }
                Ok(())
            }
            DiskOp::Flush if ok => {
                let old =
                    |c: &Candidate| c.superseded.is_some_and(|superseded| superseded < run.started);
                self.sectors.iter_mut().for_each(|sector| sector.retain(|c| !old(c)));
                Ok(())
            }
            DiskOp::Discard if ok => {
                for at in run.first..run.first + run.count {
                    let of = |c: &&mut Candidate| c.started == run.started;
                    let found = self.sectors[at as usize].iter_mut().find(of);
                    found.into_iter().for_each(|c| c.done = Some(now));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn written(
        &mut self,
        at: u64,
        stamp: u32,
        started: u64,
        (now, server_died): (u64, bool),
        durable: bool,
    ) {
        let sector = &mut self.sectors[at as usize];
        for candidate in sector.iter_mut() {
            if candidate.stamp == stamp && candidate.started == started {
                candidate.done = Some(now);
            } else if !server_died
                && candidate.done.is_some_and(|done| done < started)
                && candidate.superseded.is_none()
            {
                candidate.superseded = Some(now);
            }
        }
        if durable {
            sector.retain(|c| c.done.is_none_or(|done| done >= started) || c.superseded.is_none());
        }
    }

    /// Records the death of the server: its operations end, and data that is not durable may be
    /// lost.
    pub(crate) fn server_died(&mut self) {
        let now = self.tick();
        let running: Vec<u64> = self.running.values().map(|r| r.started).collect();
        self.running.values_mut().for_each(|run| run.server_died = true);
        for (at, sector) in self.sectors.iter_mut().enumerate() {
            for candidate in sector.iter_mut() {
                candidate.superseded = None;
                let is_current_boot = running.contains(&candidate.started);
                if candidate.done.is_none() && !is_current_boot {
                    candidate.done = Some(now);
                }
            }
            for (read, run) in &self.running {
                let within = (run.first..run.first + run.count).contains(&(at as u64));
                if let Some(may_find) = self.may_find.get_mut(read).filter(|_| within) {
                    may_find.extend(sector.iter().map(|c| (at as u64, c.stamp)));
                }
            }
        }
    }

    /// Records that the client has lost its session and regained it after any deaths of the server:
    /// what was acknowledged before no longer matters to operations in progress.
    pub(crate) fn resumed(&mut self) {
        self.running.values_mut().for_each(|run| run.server_died = false);
    }

    /// Records the death of the program: its operations may still be carried out, but no result
    /// comes.
    pub(crate) fn program_died(&mut self) {
        self.running.clear();
        self.may_find.clear();
    }

    /// Number of operations in progress.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }
}

/// Checks the result of a read.
///
/// A write in progress may be visible in part. If the device itself reads a memory disk, the
/// boundary is the end of a packet, at any multiple of 4 bytes. So each half of an 8-byte word is
/// checked separately. Where only one write may be visible, that checks the whole word.
fn check(run: &Running, data: &[u8], may_find: &[(u64, u32)]) -> Result<(), String> {
    if data.len() != run.count as usize * SECTOR {
        return Err(format!("a read of {} sectors gave {} bytes", run.count, data.len()));
    }
    for (at, sector) in (run.first..).zip(data.chunks_exact(SECTOR)) {
        let may: Vec<u32> = may_find.iter().filter(|(of, _)| *of == at).map(|(_, s)| *s).collect();
        for (index, halves_found) in sector.as_chunks::<4>().0.chunks_exact(2).enumerate() {
            for (half, found) in halves_found.iter().enumerate() {
                let found = u32::from_le_bytes(*found);
                if !may.iter().any(|&stamp| halves(stamp, at, index)[half] == found) {
                    return Err(format!(
                        "sector {at}, word {index}, half {half}: {found:#010x}; it may be of {may:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(oracle: &mut Oracle, stamp: u32) -> Result<(), String> {
        oracle.begin(999, DiskOp::Read, 3, 1);
        let mut data = [0; SECTOR];
        fill(stamp, 3, &mut data);
        oracle.end(999, true, &data)
    }

    fn write(oracle: &mut Oracle, durable: bool) -> u32 {
        let stamp = oracle.next_stamp();
        oracle.begin(stamp.into(), DiskOp::Write(stamp, durable), 2, 3);
        stamp
    }

    #[test]
    fn an_acknowledged_write_is_read() {
        let mut oracle = Oracle::new(0, 8);
        let one = write(&mut oracle, false);
        assert!(read(&mut oracle, 0).is_ok() && read(&mut oracle, one).is_ok(), "under way");
        oracle.end(one.into(), true, &[]).unwrap();
        assert!(read(&mut oracle, 0).is_err() && read(&mut oracle, one).is_ok());
        let (two, three) = (write(&mut oracle, false), write(&mut oracle, false));
        oracle.end(three.into(), true, &[]).unwrap();
        oracle.end(two.into(), false, &[]).unwrap();
        assert!(read(&mut oracle, two).is_ok(), "may be carried out still");
        assert!(read(&mut oracle, three).is_ok() && read(&mut oracle, one).is_err());
        assert!(oracle.end(two.into(), true, &[]).is_err(), "twice");
    }

    #[test]
    fn what_is_not_durable_may_go_with_the_server() {
        for (durable, flush) in [(false, false), (true, false), (false, true)] {
            let mut oracle = Oracle::new(0, 8);
            let one = write(&mut oracle, false);
            oracle.end(one.into(), true, &[]).unwrap();
            let two = write(&mut oracle, durable);
            oracle.end(two.into(), true, &[]).unwrap();
            if flush {
                oracle.begin(500, DiskOp::Flush, 0, 0);
                oracle.end(500, true, &[]).unwrap();
            }
            assert!(read(&mut oracle, one).is_err());
            oracle.server_died();
            assert_eq!(read(&mut oracle, one).is_ok(), !durable && !flush, "{durable} {flush}");
            assert!(read(&mut oracle, two).is_ok());
        }
    }

    #[test]
    fn a_torn_or_foreign_sector_is_noticed() {
        let mut oracle = Oracle::new(0, 8);
        oracle.begin(1, DiskOp::Read, 3, 1);
        let mut data = [0; SECTOR];
        fill(7, 4, &mut data);
        assert!(oracle.end(1, true, &data).is_err());
    }

    #[test]
    fn a_write_under_way_shows_in_part_and_one_that_is_done_does_not() {
        for under_way in [true, false] {
            let mut oracle = Oracle::new(0, 8);
            let one = write(&mut oracle, false);
            if !under_way {
                oracle.end(one.into(), true, &[]).unwrap();
            }
            oracle.begin(999, DiskOp::Read, 3, 1);
            let mut data = [0; SECTOR];
            fill(one, 3, &mut data);
            data[..260].fill(0);
            assert_eq!(oracle.end(999, true, &data).is_ok(), under_way);
        }
    }

    #[test]
    fn data_of_another_disk_is_noticed() {
        let mut oracles = [Oracle::new(0, 8), Oracle::new(1, 8)];
        let stamps = oracles.each_mut().map(|oracle| write(oracle, false));
        let [one, other] = &mut oracles;
        assert!(read(one, stamps[0]).is_ok() && read(one, stamps[1]).is_err());
        assert!(read(other, stamps[1]).is_ok() && read(other, stamps[0]).is_err());
    }
}
