//! Parsers of values of disks, which the options of commands and the configuration share.

use std::{net::IpAddr, num::NonZeroU64};

use bowline_block::backend::Filters;
use bowline_rnbd::client::Outage;
use bowline_rnbd_driver::server::Grant;
use bowline_rtrs_driver::{Policy, client::ReadKeys, server::AllowRule};
use bowline_wire::rnbd::Access;

use crate::values::{interval, number, number32, some_time};

/// Parses an access mode.
pub fn access(text: &str) -> Result<Access, String> {
    let all = [Access::Ro, Access::Rw, Access::Migration];
    let found = all.into_iter().find(|access| access.name() == text);
    found.ok_or_else(|| format!("\"{text}\" is not ro, rw or migration"))
}

/// Parses what happens to requests while no path is connected.
pub fn outage(text: &str) -> Result<Outage, String> {
    if text == "fail" { Ok(Outage::FailFast) } else { some_time(text).map(Outage::Queue) }
}

/// Parses which memory the server can write to.
pub fn read_keys(text: &str) -> Result<ReadKeys, String> {
    match text {
        "request" => Ok(ReadKeys::PerRequest),
        "memory" => Ok(ReadKeys::LongLived),
        _ => Err(format!("\"{text}\" is not request or memory")),
    }
}

/// Parses how paths are chosen.
pub fn policy(text: &str) -> Result<Policy, String> {
    let bad = |_| format!("\"{text}\" is not round-robin, min-inflight or min-latency");
    text.parse().map_err(bad)
}

/// Parses the number of attempts to connect a lost path again, -1 for no limit.
pub fn reconnects(text: &str) -> Result<i16, String> {
    let found = text.parse().ok().filter(|number| (-1..=9999).contains(number));
    found.ok_or_else(|| format!("\"{text}\" is not a number from -1 to 9999"))
}

/// Parses the number of connections of a path.
pub fn connections(text: &str) -> Result<u16, String> {
    let found = text.parse().ok().filter(|number| *number < 4096);
    found.ok_or_else(|| format!("\"{text}\" is not a number from 0 to 4095"))
}

/// Parses a number above zero, such as a port.
pub fn positive(text: &str) -> Result<u16, String> {
    let found = text.parse().ok().filter(|number| *number > 0);
    found.ok_or_else(|| format!("\"{text}\" is not a number from 1 to 65535"))
}

/// Parses `EXPORT=MODE[@SESSION]`.
pub fn granted(text: &str) -> Result<Grant, String> {
    let bad =
        || format!("\"{text}\" is not EXPORT=ro|rw|migration[@SESSION] such as disk0=rw@host*");
    let (export, how) = text.split_once('=').ok_or_else(bad)?;
    // Names of sessions may contain @ too, as in client@server.
    let (mode, session) = match how.split_once('@') {
        Some((mode, session)) => (mode, Some(session.to_owned())),
        None => (how, None),
    };
    let all = [Access::Ro, Access::Rw, Access::Migration];
    let most = all.into_iter().find(|access| access.name() == mode).ok_or_else(bad)?;
    if export.is_empty() || session.as_ref().is_some_and(String::is_empty) {
        return Err(bad());
    }
    Ok(Grant { export: export.to_owned(), max_access: most, session })
}

/// Parts of a million.
const MILLION: f64 = 1e6;

/// Changes filters as a text says it, which is one or more of `error=RATE`, `seed=NUMBER`,
/// `delay-read=TIME`, `delay-write=TIME` and `rate=BYTES`, with commas in between.
pub fn filter(text: &str, filters: &mut Filters) -> Result<(), String> {
    for part in text.split(',') {
        let bad = || {
            format!(
                "\"{part}\" is not error=RATE, seed=NUMBER, delay-read=TIME, delay-write=TIME or \
                 rate=BYTES/s"
            )
        };
        let (key, value) = part.split_once('=').ok_or_else(bad)?;
        match key {
            "error" => filters.errors = rate(value)?,
            "seed" => filters.seed = number(value)?,
            "delay-read" => filters.delay_read = interval(value)?,
            "delay-write" => filters.delay_write = interval(value)?,
            "rate" => {
                let bytes = number(value.strip_suffix("/s").unwrap_or(value))?;
                filters.rate = Some(NonZeroU64::new(bytes).ok_or("a rate of 0: nothing passes")?);
            }
            _ => return Err(bad()),
        }
    }
    Ok(())
}

/// Parses how much of everything fails: `1%`, or a part of one, as `0.01`.
fn rate(text: &str) -> Result<u32, String> {
    let (digits, scale) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 100.0));
    let part = digits.parse::<f64>().ok().map(|part| part / scale);
    let part = part.filter(|part| (0.0..=1.0).contains(part));
    let part =
        part.ok_or_else(|| format!("\"{text}\" is not a rate from 0 to 1, or 0% to 100%"))?;
    Ok((part * MILLION).round() as u32)
}

/// Parses a block size.
pub fn block(text: &str) -> Result<u32, String> {
    match number32(text)? {
        size @ (512 | 1024 | 2048 | 4096) => Ok(size),
        size => Err(format!("{size} is not 512, 1024, 2048 or 4096")),
    }
}

/// Parses `ADDRESS[/BITS][=SESSION]`.
pub fn allowed(text: &str) -> Result<AllowRule, String> {
    let bad = || format!("\"{text}\" is not ADDRESS[/BITS][=SESSION] such as 10.1.0.0/16=host*");
    let (network, name) = match text.split_once('=') {
        Some((network, name)) => (network, Some(name.to_owned())),
        None => (text, None),
    };
    let (addr, bits) = match network.split_once('/') {
        Some((addr, bits)) => (addr, Some(bits)),
        None => (network, None),
    };
    let addr: IpAddr = addr.parse().map_err(|_| bad())?;
    let most = if addr.is_ipv4() { 32 } else { 128 };
    let prefix = match bits {
        Some(bits) => bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(bad)?,
        None => most,
    };
    Ok(AllowRule { addr, prefix, name })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn outages_are_bridged_for_a_time_or_not() {
        assert_eq!(outage("fail"), Ok(Outage::FailFast));
        assert_eq!(outage("1.5"), Ok(Outage::Queue(Duration::from_millis(1500))));
        for text in ["", "0", "x", "-1"] {
            assert!(outage(text).is_err(), "{text}");
        }
        assert_eq!(access("migration"), Ok(Access::Migration));
        assert!(access("w").is_err() && policy("x").is_err());
        assert_eq!(policy("rr"), Ok(Policy::RoundRobin));
        assert_eq!(read_keys("request"), Ok(ReadKeys::PerRequest));
        assert_eq!(read_keys("memory"), Ok(ReadKeys::LongLived));
        assert!(read_keys("").is_err());
    }

    #[test]
    fn rules_name_networks_and_sessions() {
        // tests [RT-64]
        let rule = allowed("10.1.0.0/16=host*").unwrap();
        assert_eq!((rule.prefix, rule.name.as_deref()), (16, Some("host*")));
        assert_eq!(allowed("fd00::1").unwrap().prefix, 128);
        for text in ["", "host", "10.0.0.1/33", "10.0.0.1/x", "/8"] {
            assert!(allowed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn grants_name_exports_modes_and_sessions() {
        // tests [NB-50]
        let grant = granted("disk0=rw@vm*@host").unwrap();
        assert_eq!((grant.export.as_str(), grant.max_access), ("disk0", Access::Rw));
        assert_eq!(grant.session.as_deref(), Some("vm*@host"));
        assert_eq!(granted("a/b=migration").unwrap().session, None);
        for text in ["", "disk0", "=ro", "disk0=", "disk0=w", "disk0=ro@"] {
            assert!(granted(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_have_limits() {
        assert_eq!((reconnects("-1"), reconnects("9999")), (Ok(-1), Ok(9999)));
        assert_eq!((connections("0"), connections("4095")), (Ok(0), Ok(4095)));
        assert_eq!((positive("1"), positive("65535")), (Ok(1), Ok(65_535)));
        assert!(reconnects("-2").is_err() && reconnects("10000").is_err());
        assert!(connections("4096").is_err() && connections("x").is_err());
        assert!(positive("0").is_err() && positive("65536").is_err());
    }
}
