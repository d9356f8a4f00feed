//! Counts of what a driver did.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A count that several threads add to.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds one.
    #[inline]
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        // Relaxed: nothing else is published by it.
        self.0.fetch_add(n, Relaxed);
    }

    /// Returns the count.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A count as operators see it: its name, what it counts, and how many there were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Name, such as `bytes_read`.
    pub name: &'static str,
    /// Meaning: a sentence, with the numbers of the rules that the count is about.
    pub meaning: &'static str,
    /// The count.
    pub value: u64,
}

/// Declares counters once: a struct with a field for each, and lists of them with their names and
/// meanings. A name that operators see and that is not the field's stands behind it.
#[macro_export]
macro_rules! counters {
    (
        $(#[$attribute:meta])*
        pub struct $Counters:ident {
            $($(#[doc = $doc:literal])+ $field:ident $(=> $name:literal)?,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $Counters { $($(#[doc = $doc])+ pub $field: u64,)* }

        impl $Counters {
            /// Returns every counter with its name, in the order of their declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                self.described().map(|count| (count.name, count.value))
            }

            /// Returns every counter with its name and its meaning, in the same order.
            pub fn described(&self) -> impl Iterator<Item = $crate::count::Described> {
                [$($crate::count::Described {
                    name: $crate::counters!(@name $field $($name)?),
                    meaning: concat!($($doc),+).trim_ascii(),
                    value: self.$field,
                },)*].into_iter()
            }
        }
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
}

/// Declares the counts of a driver once: `DriverStats`, which users see, and `Stats` of the crate,
/// which is counted in.
#[macro_export]
macro_rules! driver_stats {
    ($($(#[doc = $doc:literal])+ $name:ident,)*) => {
        $crate::counters! {
            /// Counts since the beginning.
            #[derive(Copy)]
            #[non_exhaustive]
            pub struct DriverStats { $($(#[doc = $doc])+ $name,)* }
        }

        #[derive(Debug, Default)]
        pub(crate) struct Stats { $(pub(crate) $name: $crate::count::Count,)* }

        impl Stats {
            pub(crate) fn snapshot(&self) -> DriverStats {
                DriverStats { $($name: self.$name.get(),)* }
            }
        }

        impl core::ops::Sub for DriverStats {
            type Output = Self;

            fn sub(self, earlier: Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }
    };
}

#[cfg(test)]
#[expect(unreachable_pub, reason = "drivers export what the macro makes")]
mod tests {
    driver_stats! {
        /// Calls.
        calls,
        /// Bytes.
        bytes,
    }

    #[test]
    fn what_is_counted_is_seen() {
        let stats = Stats::default();
        stats.calls.inc();
        let before = stats.snapshot();
        stats.calls.inc();
        stats.bytes.add(7);
        let since = stats.snapshot() - before;
        assert!(since.iter().eq([("calls", 1), ("bytes", 7)]));
        assert!(since.described().map(|count| count.meaning).eq(["Calls.", "Bytes."]));
        assert_eq!(stats.snapshot().calls, 2);
    }

    counters! {
        /// Of a kernel and of bowline.
        pub struct Both {
            /// As the kernel names it.
            conn_reset,
            /// With a name
            /// of its own.
            links_up => "bl_links_up",
        }
    }

    #[test]
    fn operators_see_another_name_where_one_is_given() {
        let both = Both { conn_reset: 1, links_up: 2 };
        assert!(both.iter().eq([("conn_reset", 1), ("bl_links_up", 2)]));
        let meanings = both.described().map(|count| count.meaning);
        assert!(meanings.eq(["As the kernel names it.", "With a name of its own."]));
    }
}
