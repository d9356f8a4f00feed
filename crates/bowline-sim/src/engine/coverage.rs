//! States, transitions and faults that runs reach. A state that no seed reaches is not tested,
//! however many seeds run.

use std::collections::BTreeMap;

/// How often something was reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Number of runs that reached it.
    pub runs: u64,
    /// How often it was reached in all runs.
    pub times: u64,
}

/// What one run or many runs reached, by group and name. Everything that can be reached is
/// declared, so that unreached names are known too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    reached: BTreeMap<(&'static str, &'static str), Reach>,
}

impl Coverage {
    /// Declares names of a group.
    pub(crate) fn declare(&mut self, group: &'static str, names: &[&'static str]) {
        for name in names {
            self.reached.entry((group, name)).or_default();
        }
    }

    /// Counts a name as reached once more.
    pub(crate) fn hit(&mut self, group: &'static str, name: &'static str) {
        self.add(group, name, 1);
    }

    /// Counts a name as reached `times` more in this run.
    pub(crate) fn add(&mut self, group: &'static str, name: &'static str, times: u64) {
        let reach = self.reached.entry((group, name)).or_default();
        reach.runs |= u64::from(times > 0);
        reach.times += times;
    }

    /// Adds the counts of other runs.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (at, reach) in &other.reached {
            let sum = self.reached.entry(*at).or_default();
            sum.runs += reach.runs;
            sum.times += reach.times;
        }
    }

    /// Returns all entries: group, name, and how often it was reached.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, Reach)> {
        self.reached.iter().map(|((group, name), reach)| (*group, *name, *reach))
    }
}

/// Makes the names of all pairs of a row and a column. With an enum, its variants name the rows.
macro_rules! table {
    (
        $(#[$about:meta])* $vis:vis enum $row:ident { $($variant:ident = $name:literal,)+ }
        const $table:ident = $columns:tt;
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug)]
        $vis enum $row {
            $($variant),+
        }

        const $table: &[&[&str]] = &[$(&$crate::engine::coverage::table!(@row $name $columns)),+];
    };
    ([$($row:literal),+ $(,)?] $columns:tt) => {
        [$($crate::engine::coverage::table!(@row $row $columns)),+]
    };
    (@row $row:literal [$($column:literal),+ $(,)?]) => { [$(concat!($row, ", ", $column)),+] };
}
pub(crate) use table;

/// Names what happens: by an enum, or by a list of all names and a function from what happens to
/// its name, if it has one.
macro_rules! named {
    ($(#[$about:meta])* $vis:vis enum $what:ident { $($variant:ident = $name:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug)]
        $vis enum $what {
            $($variant),+
        }

        impl $what {
            const NAMES: &[&str] = &[$($name),+];

            const fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }
        }
    };
    ($(#[$about:meta])* const $names:ident = $of:ident($what:ty) {
        $($is:pat => $name:literal,)+
    }) => {
        $(#[$about])*
        const $names: &[&str] = &[$($name),+];

        $(#[$about])*
        const fn $of(what: $what) -> Option<&'static str> {
            #[allow(unreachable_patterns, reason = "not everything has a name")]
            Some(match what {
                $($is => $name,)+
                _ => return None,
            })
        }
    };
}
pub(crate) use named;

/// A choice that a plan can make: its name, and whether a plan, or a part of it, has made it.
pub(crate) type Choice<P> = (&'static str, fn(&P) -> bool);

/// Names for the fraction of a promised time that an operation needed.
pub(crate) const TIME_SHARES: [&str; 6] =
    ["1/64 of it", "1/16 of it", "1/8 of it", "1/4 of it", "1/2 of it", "nearly all of it"];

/// Returns the name for an operation that needed `took` of the promised time `bound` (both in the
/// same unit).
pub(crate) const fn time_share(took: u64, bound: u64) -> &'static str {
    match took.saturating_mul(64) / if bound == 0 { 1 } else { bound } {
        0 => TIME_SHARES[0],
        1..4 => TIME_SHARES[1],
        4..8 => TIME_SHARES[2],
        8..16 => TIME_SHARES[3],
        16..32 => TIME_SHARES[4],
        _ => TIME_SHARES[5],
    }
}
