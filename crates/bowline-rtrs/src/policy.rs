//! Which path a request takes.

use core::fmt;

use crate::Errno;

/// How the path of a request is chosen among those that are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Policy {
    /// One after the other, for each processor [RS-21].
    RoundRobin = 0,
    /// The one with the fewest requests in flight [RS-22].
    #[default]
    MinInflight = 1,
    /// The one that answered its last heartbeat soonest [RS-23].
    MinLatency = 2,
}

impl Policy {
    /// All, by number.
    pub const ALL: [Self; 3] = [Self::RoundRobin, Self::MinInflight, Self::MinLatency];

    /// The number.
    pub const fn number(self) -> u8 {
        self as u8
    }

    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::RoundRobin => ("round-robin", "RR"),
            Self::MinInflight => ("min-inflight", "MI"),
            Self::MinLatency => ("min-latency", "ML"),
        }
    }
}

/// The text of the file `mpath_policy`, without the end of line.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, short) = self.names();
        write!(f, "{name} ({short}: {})", self.number())
    }
}

/// A number, a name with anything behind it, or two letters; case does not matter [RS-35].
impl core::str::FromStr for Policy {
    type Err = Errno;

    fn from_str(text: &str) -> Result<Self, Errno> {
        let text = text.strip_suffix('\n').unwrap_or(text).as_bytes();
        let is = |policy: &&Self| {
            let (name, short) = policy.names();
            let begins =
                text.get(..name.len()).is_some_and(|t| t.eq_ignore_ascii_case(name.as_bytes()));
            begins
                || text.eq_ignore_ascii_case(short.as_bytes())
                || text == [b'0' + policy.number()]
        };
        Self::ALL.iter().find(is).copied().ok_or(Errno::EINVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // tests [RS-35], [RS-33]
    #[test]
    fn names_numbers_and_letters_are_understood() {
        for (text, policy) in [
            ("0", Policy::RoundRobin),
            ("1\n", Policy::MinInflight),
            ("2", Policy::MinLatency),
            ("Round-Robin", Policy::RoundRobin),
            ("min-inflightly", Policy::MinInflight),
            ("ml", Policy::MinLatency),
            ("Mi", Policy::MinInflight),
        ] {
            assert_eq!(text.parse(), Ok(policy), "{text:?}");
        }
        for text in ["", "3", "01", "r", "rrr", "round", "min-", "é-latency"] {
            assert_eq!(text.parse::<Policy>(), Err(Errno::EINVAL), "{text:?}");
        }
        assert_eq!(Policy::default().to_string(), "min-inflight (MI: 1)");
    }
}
