//! The time in front of lines that tell what happened.

use std::{
    env, fs,
    os::unix::fs::MetadataExt,
    sync::OnceLock,
    time::{SystemTime, UNIX_EPOCH},
};

const DAY: u64 = 86_400;

/// Returns the time in UTC and a blank, to be put in front of a line; nothing where lines go to the
/// journal, which has times of its own.
pub fn stamp() -> String {
    static JOURNAL: OnceLock<bool> = OnceLock::new();
    if *JOURNAL.get_or_init(is_journal) {
        return String::new();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{} ", utc(now.as_secs()))
}

/// Tells whether standard error is the stream that systemd names; programs started by services
/// inherit the name, too.
fn is_journal() -> bool {
    let stream = env::var("JOURNAL_STREAM").ok();
    let own = fs::metadata("/proc/self/fd/2").ok();
    stream.zip(own).is_some_and(|(stream, own)| stream == format!("{}:{}", own.dev(), own.ino()))
}

/// Returns a time as in RFC 3339, given in seconds since 1970.
pub fn utc(seconds: u64) -> String {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let (mut day, mut year) = (seconds / DAY, 1970);
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_762_800, "2026-11-27T07:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
