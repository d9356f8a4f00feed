//! Memory windows: keys that grant a peer access to part of a region for a time [MR-9].
//!
//! ```text
//!   window   key, rights ──> region   key, memory          a window has no memory of its own
//!   type 1   bound anew at any time; for every queue pair of its protection domain
//!   type 2   free ── bind ──> valid ── invalidated by this side or the peer ──> free
//!            for the queue pair it was bound on alone
//! ```
//! A window is for peers only. It has no local key, so it cannot bypass the rights of its region.

use bowline_verbs::{Access, Error, MwBind, MwType, Object, PdId, Qpn, Resource, next_key};

use crate::mr::{KeyError, MrTable};
use crate::rng::Rng;

/// Rights that a window can grant.
const WINDOW_RIGHTS: Access =
    Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
/// What a bind request may name. This side's right to write means nothing here, and programs name
/// it, as with a region that peers may write; the kernel takes it too.
const NAMED: Access = WINDOW_RIGHTS.union(Access::ZERO_BASED).union(Access::LOCAL_WRITE);
/// Rights that require this side to have write access to the region.
const WRITE_RIGHTS: Access = Access::REMOTE_WRITE.union(Access::REMOTE_ATOMIC);

/// A window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pd: PdId,
    kind: MwType,
    /// The valid key, or the last valid one if the window is not bound.
    key: u32,
    /// The key of the newest bind request, executed or still in a send queue.
    newest_key: u32,
    bound: Option<Binding>,
}

/// The range and rights that a window grants.
#[derive(Clone, Copy, Debug)]
struct Binding {
    /// The region's key.
    region: u32,
    /// Offset of the window in the region, in bytes.
    start: u64,
    len: u64,
    /// Address of the first byte of the window.
    iova: u64,
    access: Access,
    /// The only queue pair whose peer may use the window; `None`: all of the protection domain.
    qpn: Option<Qpn>,
}

impl Window {
    pub(crate) const fn pd(&self) -> PdId {
        self.pd
    }

    /// Resolves a range that a peer names to a region key and an offset. Key, domain, queue pair,
    /// rights and range are checked in that order, as for regions [MR-2], [MR-3].
    pub(crate) fn find(
        &self,
        (pd, qpn): (PdId, Qpn),
        key: u32,
        va: u64,
        len: u64,
        need: Access,
    ) -> Result<(u32, u64), KeyError> {
        let bound = self.bound.as_ref().filter(|_| self.key == key).ok_or(KeyError::Unknown)?;
        if self.pd != pd || bound.qpn.is_some_and(|of| of != qpn) {
            return Err(KeyError::WrongPd);
        }
        if !bound.access.contains(need) {
            return Err(KeyError::NoAccess);
        }
        let start = va.checked_sub(bound.iova).ok_or(KeyError::OutOfRange)?;
        match start.checked_add(len) {
            Some(end) if end <= bound.len => Ok((bound.region, bound.start + start)),
            _ => Err(KeyError::OutOfRange),
        }
    }
}

impl MrTable {
    /// Creates an unbound window.
    pub(crate) fn allocate_window(
        &mut self,
        rng: &mut Rng,
        pd: PdId,
        kind: MwType,
    ) -> Result<u32, Error> {
        if self.windows.len() >= self.max_windows {
            return Err(Error::Limit(Resource::MemoryWindows));
        }
        let key = self.free_key(rng, |regions, index| regions.get(index).is_none());
        let window = Window { pd, kind, key, newest_key: key, bound: None };
        self.windows.insert(key >> 8, window);
        Ok(key)
    }

    /// Removes a window, named by any key it has had.
    pub(crate) fn deallocate_window(&mut self, key: u32) -> Result<(), Error> {
        let gone = self.windows.remove(&(key >> 8)).ok_or(Error::NoSuch(Object::MemoryWindow))?;
        self.unbind(gone.bound);
        Ok(())
    }

    /// Returns kind and protection domain of a window, and the key of its next binding if it is of
    /// type 1.
    pub(crate) fn window(&self, key: u32) -> Result<(MwType, PdId, u32), Error> {
        let window = self.windows.get(&(key >> 8)).ok_or(Error::NoSuch(Object::MemoryWindow))?;
        Ok((window.kind, window.pd, next_key(window.newest_key)))
    }

    /// Notes that a bind request with this key has been posted.
    pub(crate) fn note_window_key(&mut self, key: u32) {
        if let Some(window) = self.windows.get_mut(&(key >> 8)) {
            window.newest_key = key;
        }
    }

    /// Executes a bind request [MR-8], [MR-9]: from now on the window has only this key [MR-13].
    /// The region must allow binding and contain the range, and must be writable by this side if
    /// peers are to write; region, window and queue pair must be of one protection domain. A window
    /// of type 2 must be free, and its key must be new.
    pub(crate) fn bind_window(
        &mut self,
        pd: PdId,
        qpn: Qpn,
        key: u32,
        to: &MwBind,
    ) -> Result<(), KeyError> {
        let window = self.windows.get(&(key >> 8)).ok_or(KeyError::Unknown)?;
        if window.pd != pd {
            return Err(KeyError::WrongPd);
        }
        let (kind, before) = (window.kind, window.bound);
        let free = before.is_none() && window.key != key && to.len > 0;
        if kind == MwType::Type2 && !free {
            return Err(KeyError::Unknown);
        }
        let bound = match to.len {
            0 => None,
            len => {
                if !NAMED.contains(to.access) {
                    return Err(KeyError::NoAccess);
                }
                let mut need = Access::MW_BIND;
                if to.access.intersects(WRITE_RIGHTS) {
                    need |= Access::LOCAL_WRITE;
                }
                let start = self.region_offset(pd, to.lkey, to.addr, len, need)?;
                let zero_based = to.access.contains(Access::ZERO_BASED);
                Some(Binding {
                    region: to.lkey,
                    start,
                    len,
                    iova: if zero_based { 0 } else { to.addr },
                    access: to.access & WINDOW_RIGHTS,
                    qpn: (kind == MwType::Type2).then_some(qpn),
                })
            }
        };
        if bound.is_some() {
            self.count_window(to.lkey, 1);
        }
        self.unbind(before);
        if let Some(window) = self.windows.get_mut(&(key >> 8)) {
            window.key = key;
            window.bound = bound;
        }
        Ok(())
    }

    /// Ends the binding of a window of type 2 [MR-7]. Unlike a region, the window must be bound.
    pub(crate) fn invalidate_window(
        &mut self,
        pd: PdId,
        qpn: Qpn,
        key: u32,
    ) -> Result<(), KeyError> {
        let window = self.windows.get_mut(&(key >> 8)).ok_or(KeyError::Unknown)?;
        if window.key != key || window.kind != MwType::Type2 {
            return Err(KeyError::Unknown);
        }
        let bound = window.bound.ok_or(KeyError::Unknown)?;
        if window.pd != pd || bound.qpn.is_some_and(|of| of != qpn) {
            return Err(KeyError::WrongPd);
        }
        window.bound = None;
        self.unbind(Some(bound));
        Ok(())
    }

    /// Frees the windows bound on a queue pair that was removed or reset.
    pub(crate) fn unbind_windows_of(&mut self, qpn: Qpn) {
        let mut gone = Vec::new();
        for window in self.windows.values_mut() {
            if window.bound.is_some_and(|bound| bound.qpn == Some(qpn)) {
                gone.push(window.bound.take());
            }
        }
        for bound in gone {
            self.unbind(bound);
        }
    }

    fn unbind(&mut self, bound: Option<Binding>) {
        if let Some(bound) = bound {
            self.count_window(bound.region, -1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bowline_verbs::{Buffer, MrKeys};

    use super::*;
    use crate::burst::Burst;

    const PD: PdId = PdId(1);
    const QP: Qpn = Qpn(77);
    const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

    struct Side {
        table: MrTable,
        rng: Rng,
        buffer: Arc<Buffer>,
        keys: MrKeys,
    }

    fn side(access: Access) -> Side {
        let (mut table, mut rng) = (MrTable::new(10, 3), Rng::new(&[7; 32]));
        let buffer = Arc::new(Buffer::new(4096).unwrap());
        let region = (&buffer, 100, 200);
        let keys = table.register(&mut rng, PD, region, Some(5000), access).unwrap();
        Side { table, rng, buffer, keys }
    }

    impl Side {
        fn to(&self, addr: u64, len: u64, access: Access) -> MwBind {
            MwBind { lkey: self.keys.lkey, addr, len, access }
        }

        fn ask(&self, qpn: Qpn, key: u32, va: u64, len: u64, need: Access) -> Result<(), KeyError> {
            self.table.check((PD, qpn), key, va, len, need)
        }
    }

    /// [MR-9], [MR-2], [MR-3]: a window gives a part of its region, to one queue pair.
    #[test]
    fn a_window_grants_its_binding_and_nothing_else() {
        let mut s = side(Access::MW_BIND | Access::LOCAL_WRITE);
        let first = s.table.allocate_window(&mut s.rng, PD, MwType::Type2).unwrap();
        let key = next_key(first);
        let read = Access::REMOTE_READ;
        assert_eq!(s.ask(QP, first, 5010, 1, read), Err(KeyError::Unknown));
        s.table.bind_window(PD, QP, key, &s.to(5010, 50, BOTH | Access::LOCAL_WRITE)).unwrap();
        for (va, len) in [(5010, 50), (5059, 1), (5060, 0)] {
            assert_eq!(s.ask(QP, key, va, len, read), Ok(()));
        }
        for (va, len) in [(5009, 1), (5010, 51), (5060, 1), (u64::MAX, 2), (5010, u64::MAX)] {
            assert_eq!(s.ask(QP, key, va, len, read), Err(KeyError::OutOfRange));
        }
        assert_eq!(s.ask(QP, first, 5010, 1, read), Err(KeyError::Unknown));
        assert_eq!(s.ask(Qpn(78), key, 5010, 1, read), Err(KeyError::WrongPd));
        assert_eq!(s.ask(QP, key, 5010, 8, Access::REMOTE_ATOMIC), Err(KeyError::NoAccess));
        // The region's key grants the peer nothing, and the window's key is no local key.
        assert_eq!(s.ask(QP, s.keys.rkey, 5010, 1, read), Err(KeyError::NoAccess));
        let local = s.table.gather(PD, key, 5010, 1, &mut Burst::new());
        assert_eq!(local, Err(KeyError::Unknown));
        assert_eq!(s.table.scatter(PD, key, 5010, &[1]), Err(KeyError::Unknown));
        let span = s.table.resolve((PD, QP), key, 5012, 3, Access::REMOTE_WRITE).unwrap();
        span.write(0, b"xyz");
        let mut out = [0; 5];
        s.buffer.read(111, &mut out);
        assert_eq!(&out, b"\0xyz\0");
    }

    /// [MR-7], [MR-13].
    #[test]
    fn a_window_of_type_2_is_invalidated_once_and_bound_with_a_new_key() {
        let mut s = side(Access::MW_BIND);
        let key = next_key(s.table.allocate_window(&mut s.rng, PD, MwType::Type2).unwrap());
        let to = s.to(5000, 200, Access::REMOTE_READ | Access::ZERO_BASED);
        assert_eq!(s.table.invalidate((PD, QP), key), Err(KeyError::Unknown));
        s.table.bind_window(PD, QP, key, &to).unwrap();
        assert_eq!(s.ask(QP, key, 0, 200, Access::REMOTE_READ), Ok(()));
        assert_eq!(s.table.bind_window(PD, QP, next_key(key), &to), Err(KeyError::Unknown));
        // The region stays as long as it is used.
        assert_eq!(s.table.deregister(s.keys.lkey), Err(Error::Busy(Object::MemoryRegion)));
        assert_eq!(s.table.invalidate_remote((PD, QP), next_key(key)), Err(KeyError::Unknown));
        assert_eq!(s.table.invalidate_remote((PD, Qpn(9)), key), Err(KeyError::WrongPd));
        assert_eq!(s.table.invalidate_remote((PD, QP), key), Ok(()));
        assert_eq!(s.ask(QP, key, 0, 1, Access::REMOTE_READ), Err(KeyError::Unknown));
        assert_eq!(s.table.invalidate((PD, QP), key), Err(KeyError::Unknown));
        assert_eq!(s.table.bind_window(PD, QP, key, &to), Err(KeyError::Unknown), "same key");
        s.table.bind_window(PD, QP, next_key(key), &to).unwrap();
        s.table.unbind_windows_of(QP);
        assert_eq!(s.ask(QP, next_key(key), 0, 1, Access::REMOTE_READ), Err(KeyError::Unknown));
        s.table.deregister(s.keys.lkey).unwrap();
    }

    /// [MR-7]: also a fast-registration region stays while a window is bound to it.
    #[test]
    fn a_region_with_a_window_is_not_invalidated() {
        let mut s = side(Access::empty());
        let fast = s.table.allocate(&mut s.rng, PD).unwrap().rkey;
        let pieces =
            vec![bowline_verbs::Piece { buffer: Arc::clone(&s.buffer), offset: 0, len: 100 }];
        s.table.bind(PD, fast, pieces, 0, Access::MW_BIND | Access::REMOTE_READ).unwrap();
        let key = next_key(s.table.allocate_window(&mut s.rng, PD, MwType::Type1).unwrap());
        let to = MwBind { lkey: fast, addr: 0, len: 100, access: Access::REMOTE_READ };
        s.table.bind_window(PD, QP, key, &to).unwrap();
        assert_eq!(s.table.invalidate((PD, QP), fast), Err(KeyError::InUse));
        s.table.deallocate_window(key).unwrap();
        assert_eq!(s.table.invalidate((PD, QP), fast), Ok(()));
    }

    #[test]
    fn a_window_of_type_1_is_rebound_and_never_invalidated() {
        let mut s = side(Access::MW_BIND | Access::LOCAL_WRITE);
        let first = s.table.allocate_window(&mut s.rng, PD, MwType::Type1).unwrap();
        let (kind, pd, key) = s.table.window(first).unwrap();
        assert_eq!((kind, pd, key), (MwType::Type1, PD, next_key(first)));
        s.table.note_window_key(key);
        let (_, _, second) = s.table.window(first).unwrap();
        assert_eq!(second, next_key(key));
        s.table.bind_window(PD, QP, key, &s.to(5000, 10, BOTH)).unwrap();
        // Every queue pair of the domain may use it.
        assert_eq!(s.ask(Qpn(9), key, 5000, 10, BOTH), Ok(()));
        assert_eq!(s.table.invalidate((PD, QP), key), Err(KeyError::Unknown));
        assert_eq!(s.table.invalidate_remote((PD, QP), key), Err(KeyError::Unknown));
        s.table.bind_window(PD, QP, second, &s.to(5100, 10, BOTH)).unwrap();
        assert_eq!(s.ask(QP, key, 5000, 1, BOTH), Err(KeyError::Unknown));
        assert_eq!(s.ask(QP, second, 5100, 1, BOTH), Ok(()));
        let third = next_key(second);
        s.table.bind_window(PD, QP, third, &s.to(0, 0, Access::empty())).unwrap();
        assert_eq!(s.ask(QP, third, 5100, 1, BOTH), Err(KeyError::Unknown));
        s.table.deregister(s.keys.lkey).unwrap();
    }

    #[test]
    fn bindings_are_checked() {
        let mut s = side(Access::MW_BIND);
        let key = next_key(s.table.allocate_window(&mut s.rng, PD, MwType::Type2).unwrap());
        let read = Access::REMOTE_READ;
        let good = s.to(5000, 200, read);
        for (to, error) in [
            (s.to(5000, 0, read), KeyError::Unknown),
            (s.to(5000, 201, read), KeyError::OutOfRange),
            (s.to(4999, 2, read), KeyError::OutOfRange),
            (s.to(u64::MAX, 2, read), KeyError::OutOfRange),
            (s.to(5000, 1, BOTH), KeyError::NoAccess),
            (s.to(5000, 1, Access::MW_BIND), KeyError::NoAccess),
            (MwBind { lkey: good.lkey ^ 1, ..good }, KeyError::Unknown),
            (MwBind { lkey: key, ..good }, KeyError::Unknown),
        ] {
            assert_eq!(s.table.bind_window(PD, QP, key, &to), Err(error), "{to:?}");
        }
        assert_eq!(s.table.bind_window(PdId(2), QP, key, &good), Err(KeyError::WrongPd));
        assert_eq!(s.table.bind_window(PD, QP, key ^ 1 << 31, &good), Err(KeyError::Unknown));
        s.table.bind_window(PD, QP, key, &good).unwrap();
        let mut s = side(Access::LOCAL_WRITE);
        let key = next_key(s.table.allocate_window(&mut s.rng, PD, MwType::Type2).unwrap());
        let to = s.to(5000, 1, read);
        assert_eq!(s.table.bind_window(PD, QP, key, &to), Err(KeyError::NoAccess), "MW_BIND");
        for _ in 0..2 {
            s.table.allocate_window(&mut s.rng, PD, MwType::Type1).unwrap();
        }
        let one_more = s.table.allocate_window(&mut s.rng, PD, MwType::Type1);
        assert_eq!(one_more, Err(Error::Limit(Resource::MemoryWindows)));
    }
}
