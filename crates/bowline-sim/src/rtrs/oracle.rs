//! What may be read from a disk: for each sector the writes that may have been the last.
//!
//! No two disks have a write with the same stamp, so that what was written to another is found out.
//!
//! A write is *seen* from when it is begun; one that began before another was acknowledged may come
//! after it or before it. A write that failed, or whose writer died, may be carried out still,
//! until the server dies. What was acknowledged and not made durable by a flush may be gone after
//! the server's death.

use std::collections::BTreeMap;

/// Bytes of a sector.
pub(crate) const SECTOR: usize = 512;
/// Stamps of a disk.
const STAMPS: u32 = 1 << 20;

/// The contents a write gives to a sector; zeroes for stamp 0.
pub(crate) fn fill(stamp: u32, sector: u64, out: &mut [u8]) {
    for (index, word) in out.chunks_exact_mut(8).enumerate() {
        let [low, high] = halves(stamp, sector, index);
        word.copy_from_slice(&(u64::from(high) << 32 | u64::from(low)).to_le_bytes());
    }
}

/// The two halves of a word that a write gives to a sector: where it is, and which write it is of.
fn halves(stamp: u32, sector: u64, index: usize) -> [u32; 2] {
    match stamp {
        0 => [0, 0],
        _ => [((sector & 0xff_ffff) << 8) as u32 | index as u32, stamp],
    }
}

/// A write, as one sector sees it.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    stamp: u32,
    begun: u64,
    /// When it was acknowledged.
    done: Option<u64>,
    /// A later write was acknowledged then: it can be read no more, unless the server dies.
    hidden: Option<u64>,
}

/// Something the program does at the moment.
#[derive(Clone, Debug)]
struct Running {
    what: What,
    begun: u64,
    first: u64,
    count: u64,
    /// The server died meanwhile, and the client has not noticed: what was acknowledged may be
    /// gone.
    shaken: bool,
}

/// What a program does with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Read,
    /// With this stamp, and whether it is durable when it is acknowledged.
    Write(u32, bool),
    /// It may do nothing.
    Discard,
    Flush,
}

/// One disk as its only writer knows it.
#[derive(Debug)]
pub(crate) struct Oracle {
    sectors: Vec<Vec<Candidate>>,
    running: BTreeMap<u64, Running>,
    /// What reads that are under way may find besides: sector and stamp.
    also: BTreeMap<u64, Vec<(u64, u32)>>,
    clock: u64,
    stamps: u32,
}

impl Oracle {
    /// Nothing was written yet to the disk of this number.
    pub(crate) fn new(disk: usize, sectors: u64) -> Self {
        let zero = Candidate { stamp: 0, begun: 0, done: Some(0), hidden: None };
        Self {
            sectors: vec![vec![zero]; sectors as usize],
            running: BTreeMap::new(),
            also: BTreeMap::new(),
            clock: 0,
            stamps: disk as u32 * STAMPS,
        }
    }

    /// A stamp for the next write.
    pub(crate) fn next_stamp(&mut self) -> u32 {
        self.stamps += 1;
        self.stamps
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The program begins something.
    pub(crate) fn begin(&mut self, id: u64, what: What, first: u64, count: u64) {
        let begun = self.tick();
        let sectors = first..first + count;
        let stamp = match what {
            What::Write(stamp, _) => Some(stamp),
            What::Discard => Some(0),
            What::Read | What::Flush => None,
        };
        if let Some(stamp) = stamp {
            for at in sectors.clone() {
                let candidate = Candidate { stamp, begun, done: None, hidden: None };
                self.sectors[at as usize].push(candidate);
            }
            for (read, running) in &self.running {
                let range = running.first..running.first + running.count;
                let both = sectors.clone().filter(|at| range.contains(at));
                if let Some(also) = self.also.get_mut(read) {
                    also.extend(both.map(|at| (at, stamp)));
                }
            }
        }
        if what == What::Read {
            let seen = |at: u64| {
                let visible = self.sectors[at as usize].iter().filter(|c| c.hidden.is_none());
                visible.map(move |c| (at, c.stamp)).collect::<Vec<_>>()
            };
            self.also.insert(id, sectors.flat_map(seen).collect());
        }
        self.running.insert(id, Running { what, begun, first, count, shaken: false });
    }

    /// It is over; `data` is what a read has found.
    pub(crate) fn end(&mut self, id: u64, ok: bool, data: &[u8]) -> Result<(), String> {
        let now = self.tick();
        let run = self.running.remove(&id).ok_or_else(|| format!("request {id} ends twice"))?;
        let also = self.also.remove(&id).unwrap_or_default();
        match run.what {
            What::Read if ok => check(&run, data, &also),
            What::Write(stamp, durable) if ok => {
                for at in run.first..run.first + run.count {
                    self.written(at, stamp, run.begun, (now, run.shaken), durable);
                }
                Ok(())
            }
            What::Flush if ok => {
                let old = |c: &Candidate| c.hidden.is_some_and(|hidden| hidden < run.begun);
                self.sectors.iter_mut().for_each(|sector| sector.retain(|c| !old(c)));
                Ok(())
            }
            What::Discard if ok => {
                for at in run.first..run.first + run.count {
                    let of = |c: &&mut Candidate| c.begun == run.begun;
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
        begun: u64,
        (now, shaken): (u64, bool),
        durable: bool,
    ) {
        let sector = &mut self.sectors[at as usize];
        for candidate in sector.iter_mut() {
            if candidate.stamp == stamp && candidate.begun == begun {
                candidate.done = Some(now);
            } else if !shaken
                && candidate.done.is_some_and(|done| done < begun)
                && candidate.hidden.is_none()
            {
                candidate.hidden = Some(now);
            }
        }
        if durable {
            sector.retain(|c| c.done.is_none_or(|done| done >= begun) || c.hidden.is_none());
        }
    }

    /// The server dies: what it was doing it does no more, and what was not durable may be gone.
    pub(crate) fn server_died(&mut self) {
        let now = self.tick();
        let running: Vec<u64> = self.running.values().map(|r| r.begun).collect();
        self.running.values_mut().for_each(|run| run.shaken = true);
        for (at, sector) in self.sectors.iter_mut().enumerate() {
            for candidate in sector.iter_mut() {
                candidate.hidden = None;
                let lives = running.contains(&candidate.begun);
                if candidate.done.is_none() && !lives {
                    candidate.done = Some(now);
                }
            }
            for (read, run) in &self.running {
                let within = (run.first..run.first + run.count).contains(&(at as u64));
                if let Some(also) = self.also.get_mut(read).filter(|_| within) {
                    also.extend(sector.iter().map(|c| (at as u64, c.stamp)));
                }
            }
        }
    }

    /// The client has lost its session and found it again, after whatever deaths there were: of
    /// what is under way nothing counts that was acknowledged before.
    pub(crate) fn resumed(&mut self) {
        self.running.values_mut().for_each(|run| run.shaken = false);
    }

    /// The program dies: what it was doing may be done still, and nobody will tell.
    pub(crate) fn program_died(&mut self) {
        self.running.clear();
        self.also.clear();
    }

    /// What the program is doing.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }
}

/// Judges what a read has found.
///
/// A write that is under way may show in part. Of a disk that is memory and read by the device
/// itself the boundary is where one packet ends, which is any multiple of 4 bytes: so each half of
/// a word is judged for itself. Where one write alone may be read, that is the whole word.
fn check(run: &Running, data: &[u8], also: &[(u64, u32)]) -> Result<(), String> {
    if data.len() != run.count as usize * SECTOR {
        return Err(format!("a read of {} sectors gave {} bytes", run.count, data.len()));
    }
    for (at, sector) in (run.first..).zip(data.chunks_exact(SECTOR)) {
        let may: Vec<u32> = also.iter().filter(|(of, _)| *of == at).map(|(_, s)| *s).collect();
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
        oracle.begin(999, What::Read, 3, 1);
        let mut data = [0; SECTOR];
        fill(stamp, 3, &mut data);
        oracle.end(999, true, &data)
    }

    fn write(oracle: &mut Oracle, durable: bool) -> u32 {
        let stamp = oracle.next_stamp();
        oracle.begin(stamp.into(), What::Write(stamp, durable), 2, 3);
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
                oracle.begin(500, What::Flush, 0, 0);
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
        oracle.begin(1, What::Read, 3, 1);
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
            oracle.begin(999, What::Read, 3, 1);
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
