//! Write access to one backing device, arbitrated over all sessions.

use bowline_wire::rnbd::Access;

use crate::Errno;

/// Number of opens of one backing device for writing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Writers(u32);

impl Writers {
    /// Admits an open, or refuses it [NB-19].
    pub(crate) fn admit(&mut self, access: Access) -> Result<(), Errno> {
        let most_before = match access {
            Access::Ro => return Ok(()),
            Access::Rw => 0,
            Access::Migration => 1,
        };
        if self.0 > most_before {
            return Err(Errno::EPERM);
        }
        self.0 += 1;
        Ok(())
    }

    /// Gives back an admitted open.
    pub(crate) fn release(&mut self, access: Access) {
        if access != Access::Ro {
            assert!(self.0 > 0, "left more often than admitted");
            self.0 -= 1;
        }
    }

    pub(crate) const fn count(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_and_one_more_to_migrate_to() {
        // tests [NB-19]: the order measured between two machines
        let mut disk = Writers::default();
        assert_eq!(disk.admit(Access::Rw), Ok(()));
        assert_eq!(disk.admit(Access::Rw), Err(Errno::EPERM));
        assert_eq!(disk.admit(Access::Migration), Ok(()));
        assert_eq!(disk.admit(Access::Migration), Err(Errno::EPERM));
        assert_eq!(disk.admit(Access::Ro), Ok(()));
        disk.release(Access::Ro);
        disk.release(Access::Migration);
        assert_eq!(disk.admit(Access::Rw), Err(Errno::EPERM), "the first still writes");
        disk.release(Access::Rw);
        assert_eq!(disk.admit(Access::Migration), Ok(()));
        assert_eq!(disk.admit(Access::Migration), Ok(()), "two that migrate");
        assert_eq!(disk.count(), 2);
    }
}
