//! A bad network by choice: what happens to packets, from a seed.
//!
//! The fate of a packet follows from the seed, the two addresses, the direction, and how many
//! packets have gone that way before. So the n-th packet from one address to another meets the same
//! in every run, whatever other peers do.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use bowline_base::mix;

/// Odd, and with well spread bits: its multiples visit every number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// How much later than others a packet comes that is put out of order.
const REORDERED_BY: Duration = Duration::from_millis(1);
/// Longest delay, with its variation.
const DELAY_MAX: Duration = Duration::from_secs(10);
/// Most impairments of a network: a node tells them to each process that shares its addresses.
pub(crate) const IMPAIRMENTS_MAX: usize = 32;
/// Most pairs of addresses whose packets are counted apart.
const LINKS_MAX: usize = 4096;

/// Direction of packets, as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// They are received.
    In,
    /// They are sent.
    Out,
}

/// A share of all packets, as a number of a thousand million.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Share(u64);

impl Share {
    const ALL: u64 = 1_000_000_000;

    fn parse(text: &str) -> Option<Self> {
        let (number, all) = match text.strip_suffix('%') {
            Some(number) => (number, 100.0),
            None => (text, 1.0),
        };
        let share = number.trim().parse::<f64>().ok()? / all;
        // From 0 to 1, so that it fits.
        (0.0..=1.0).contains(&share).then_some(Self((share * Self::ALL as f64).round() as u64))
    }

    /// Tells whether a random number is within the share.
    const fn takes(self, random: u64) -> bool {
        (((random >> 32) * Self::ALL) >> 32) < self.0
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / (Self::ALL / 100), self.0 % (Self::ALL / 100));
        let rest = format!(".{rest:07}");
        write!(f, "{whole}{}%", rest.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// What a network does to packets: to those of one direction or one peer, or to all.
///
/// As text it is a list such as `loss=1%,reorder=0.1%,delay=2ms±1ms,peer=10.0.0.2,way=in`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Impairment {
    way: Option<Way>,
    peer: Option<IpAddr>,
    loss: Share,
    duplicate: Share,
    reorder: Share,
    corrupt: Share,
    ce: Share,
    delay: Duration,
    jitter: Duration,
}

/// Why a text is not an [`Impairment`], or a list of them is too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImpairmentError(String);

impl fmt::Display for ImpairmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for ImpairmentError {}

/// Units of times, the longest names first where one ends with another.
const UNITS: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];

fn time(text: &str) -> Option<Duration> {
    let (number, unit) =
        UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
    let seconds = number.trim().parse::<f64>().ok()? * unit;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| *time <= DELAY_MAX)
}

impl FromStr for Impairment {
    type Err = ImpairmentError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut new = Self::default();
        for word in text.split(',') {
            let (name, value) = word
                .split_once('=')
                .map(|(name, value)| (name.trim(), value.trim()))
                .ok_or_else(|| ImpairmentError(format!("{word:?} is not NAME=VALUE")))?;
            new.set(name, value).map_err(ImpairmentError)?;
        }
        Ok(new)
    }
}

impl Impairment {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let share = || {
            let share = Share::parse(value);
            share.ok_or_else(|| format!("{name}={value}: a share from 0% to 100% is wanted"))
        };
        match name {
            "loss" => self.loss = share()?,
            "duplicate" => self.duplicate = share()?,
            "reorder" => self.reorder = share()?,
            "corrupt" => self.corrupt = share()?,
            "ce" => self.ce = share()?,
            "delay" => {
                let (delay, jitter) = value
                    .split_once('±')
                    .or_else(|| value.split_once("+-"))
                    .unwrap_or((value, "0s"));
                let both = time(delay.trim()).zip(time(jitter.trim()));
                let both = both.filter(|(delay, jitter)| jitter <= delay);
                (self.delay, self.jitter) = both.ok_or_else(|| {
                    format!(
                        "{name}={value}: a time of at most {DELAY_MAX:?} is wanted, such as 2ms or \
                         2ms±1ms, which varies by no more than itself"
                    )
                })?;
            }
            "peer" => {
                let peer = value.parse::<IpAddr>();
                let peer = peer.map_err(|_| format!("peer={value}: an IP address is wanted"))?;
                self.peer = Some(peer.to_canonical());
            }
            "way" => {
                self.way = Some(match value {
                    "in" => Way::In,
                    "out" => Way::Out,
                    _ => return Err(format!("way={value}: in or out is wanted")),
                });
            }
            _ => {
                return Err(format!(
                    "{name}: there are loss, duplicate, reorder, corrupt, ce, delay, peer and way"
                ));
            }
        }
        Ok(())
    }

    fn is_for(&self, way: Way, peer: IpAddr) -> bool {
        self.way.is_none_or(|only| only == way) && self.peer.is_none_or(|only| only == peer)
    }
}

impl fmt::Display for Impairment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("ce", self.ce),
        ];
        let shares = shares.into_iter().filter(|(_, share)| share.0 > 0);
        let mut words: Vec<String> =
            shares.map(|(name, share)| format!("{name}={share}")).collect();
        if self.delay > Duration::ZERO {
            words.push(format!("delay={:?}±{:?}", self.delay, self.jitter).replace('µ', "u"));
        }
        words.extend(self.peer.map(|peer| format!("peer={peer}")));
        words.extend(self.way.map(|way| match way {
            Way::In => "way=in".to_owned(),
            Way::Out => "way=out".to_owned(),
        }));
        if words.is_empty() {
            words.push("loss=0%".to_owned());
        }
        f.write_str(&words.join(","))
    }
}

/// A bad network. For each packet the first impairment counts that is for its direction and peer;
/// other packets pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Impairments {
    all: Vec<Impairment>,
    seed: u64,
}

impl Impairments {
    /// Makes a bad network of at most 32 impairments; `seed` chooses the packets.
    ///
    /// # Errors
    /// There are more.
    pub fn new(all: Vec<Impairment>, seed: u64) -> Result<Self, ImpairmentError> {
        if all.len() > IMPAIRMENTS_MAX {
            return Err(ImpairmentError(format!(
                "{} impairments are too many: at most {IMPAIRMENTS_MAX} describe a network. One \
                 may have several faults, and without peer= it is for all peers",
                all.len()
            )));
        }
        Ok(Self { all, seed })
    }

    /// Returns what happens.
    pub fn all(&self) -> &[Impairment] {
        &self.all
    }

    /// Returns what chooses the packets to which it does.
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Tells whether nothing happens.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Reads a list of impairments, separated by semicolons.
    ///
    /// # Errors
    /// Which part of it is no impairment, or that they are too many.
    pub fn parse(text: &str, seed: u64) -> Result<Self, ImpairmentError> {
        let all = text.split(';').filter(|one| !one.trim().is_empty());
        Self::new(all.map(str::parse).collect::<Result<_, _>>()?, seed)
    }
}

impl fmt::Display for Impairments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.all.iter().map(Impairment::to_string).collect();
        f.write_str(&all.join(";"))
    }
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fate {
    pub(crate) is_lost: bool,
    pub(crate) comes_twice: bool,
    /// A number by which to choose the bit that is wrong.
    pub(crate) damage: Option<u64>,
    /// It meets congestion.
    pub(crate) is_marked: bool,
    pub(crate) delay: Duration,
}

/// Packets of one direction between two addresses.
#[derive(Debug)]
struct Link {
    /// What happens to them; `None`: nothing.
    rule: Option<usize>,
    key: u64,
    count: u64,
}

/// Decides what becomes of packets.
#[derive(Debug)]
pub(crate) struct Fates {
    settings: Impairments,
    links: Mutex<HashMap<(Way, IpAddr, IpAddr), Link>>,
}

impl Fates {
    /// `None` where nothing happens.
    pub(crate) fn new(settings: Impairments) -> Option<Self> {
        (!settings.all.is_empty()).then(|| Self { settings, links: Mutex::default() })
    }

    /// Tells whether something may happen to packets that are sent.
    pub(crate) fn changes_sent(&self) -> bool {
        self.settings.all.iter().any(|one| one.way != Some(Way::In))
    }

    /// Decides on the next packet; `None`: nothing happens to it.
    pub(crate) fn next(&self, way: Way, own: IpAddr, peer: IpAddr) -> Option<Fate> {
        let link = (way, own.to_canonical(), peer.to_canonical());
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        // Addresses can be forged without end.
        if links.len() >= LINKS_MAX && !links.contains_key(&link) {
            links.clear();
        }
        let at = links.entry(link).or_insert_with(|| self.begin(link));
        let rule = self.settings.all.get(at.rule?)?;
        at.count += 1;
        let packet = mix(at.key.wrapping_add(at.count.wrapping_mul(STEP)));
        drop(links);
        let random = |of: u64| mix(packet.wrapping_add(of.wrapping_mul(STEP)));
        let spread = rule.jitter.as_nanos() as u64 * 2; // at most twice the longest delay
        let jitter = Duration::from_nanos(random(6) % (spread + 1));
        let late = if rule.reorder.takes(random(3)) { REORDERED_BY } else { Duration::ZERO };
        Some(Fate {
            is_lost: rule.loss.takes(random(1)),
            comes_twice: rule.duplicate.takes(random(2)),
            damage: rule.corrupt.takes(random(4)).then(|| random(7)),
            is_marked: rule.ce.takes(random(5)),
            delay: rule.delay - rule.jitter + jitter + late,
        })
    }

    fn begin(&self, link: (Way, IpAddr, IpAddr)) -> Link {
        let (way, own, peer) = link;
        let rule = self.settings.all.iter().position(|one| one.is_for(way, peer));
        let words = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => [0, u64::from(ip.to_bits())],
            IpAddr::V6(ip) => [(ip.to_bits() >> 64) as u64, ip.to_bits() as u64],
        };
        let words = [[0, u64::from(way == Way::In)], words(own), words(peer)];
        let next = |key: u64, word: &u64| mix(key.wrapping_add(STEP) ^ word);
        let key = words.as_flattened().iter().fold(self.settings.seed, next);
        Link { rule, key, count: 0 }
    }
}

/// Changes a bit of a packet.
pub(crate) fn damage(bytes: &mut [u8], number: u64) {
    let at = usize::try_from(number >> 3).unwrap_or_default() % bytes.len().max(1);
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << (number & 7);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    fn fates(texts: &[&str], seed: u64) -> Fates {
        let all = texts.iter().map(|text| text.parse().unwrap()).collect();
        Fates::new(Impairments::new(all, seed).unwrap()).unwrap()
    }

    #[test]
    fn what_is_read_is_written_again() {
        for text in [
            "loss=1%,reorder=0.1%,delay=2ms±1ms,ce=1%,corrupt=0.01%",
            "loss=0.01,way=in,peer=::1",
            "delay=300us,duplicate=100%",
            "delay=1.5ms +- 20us, way=out",
            "loss=0",
        ] {
            let read: Impairment = text.parse().unwrap();
            assert_eq!(read.to_string().parse(), Ok(read), "{text}");
        }
        let read: Impairment = "loss=0.02,duplicate=100%,corrupt=12.5%,delay=50us".parse().unwrap();
        assert_eq!(read.to_string(), "loss=2%,duplicate=100%,corrupt=12.5%,delay=50us±0ns");
        for (text, why) in [
            ("", "NAME=VALUE"),
            ("loss", "NAME=VALUE"),
            ("loss=2", "from 0% to 100%"),
            ("loss=-1%", "from 0% to 100%"),
            ("loss=nan", "from 0% to 100%"),
            ("delay=2", "such as 2ms"),
            ("delay=1ms±2ms", "no more than itself"),
            ("delay=11s", "at most 10s"),
            ("delay=-1s", "such as"),
            ("peer=ten", "IP address"),
            ("way=up", "in or out"),
            ("los=1%", "there are loss"),
        ] {
            let error = text.parse::<Impairment>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_network_has_only_so_many_impairments() {
        let parsed = |count| Impairments::parse(&["loss=1%"].repeat(count).join(";"), 0);
        assert_eq!(parsed(IMPAIRMENTS_MAX).unwrap().all().len(), IMPAIRMENTS_MAX);
        let error = parsed(IMPAIRMENTS_MAX + 1).unwrap_err().to_string();
        assert!(error.contains("33") && error.contains("at most 32"), "{error}");
    }

    #[test]
    fn a_seed_decides_for_each_packet_of_a_link() {
        let texts = ["loss=10%,duplicate=10%,reorder=10%,corrupt=10%,ce=10%,delay=2ms±1ms"];
        let run = |fates: &Fates, beside: usize| {
            let mut all = Vec::new();
            for _ in 0..500 {
                all.push(fates.next(Way::In, A, B).unwrap());
                // What others send is another matter.
                (0..beside).for_each(|_| _ = fates.next(Way::Out, A, B));
                (0..beside).for_each(|_| _ = fates.next(Way::In, A, A));
            }
            all
        };
        let first = run(&fates(&texts, 7), 0);
        assert_eq!(first, run(&fates(&texts, 7), 3));
        assert_ne!(first, run(&fates(&texts, 8), 0));
        let share = |wanted: fn(&Fate) -> bool| first.iter().filter(|one| wanted(one)).count();
        for count in [
            share(|one| one.is_lost),
            share(|one| one.comes_twice),
            share(|one| one.damage.is_some()),
            share(|one| one.is_marked),
            share(|one| one.delay > Duration::from_millis(3)),
        ] {
            assert!((20..100).contains(&count), "{count}");
        }
        let ms = Duration::from_millis;
        assert!(first.iter().all(|one| (ms(1)..=ms(4)).contains(&one.delay)));
    }

    #[test]
    fn the_first_that_fits_counts() {
        let fates = fates(&["peer=10.0.0.2,way=in,loss=100%", "peer=10.0.0.2,delay=1s"], 0);
        assert!(fates.changes_sent());
        assert!(fates.next(Way::In, A, B).unwrap().is_lost);
        let sent = fates.next(Way::Out, A, B).unwrap();
        assert_eq!((sent.is_lost, sent.delay), (false, Duration::from_secs(1)));
        assert_eq!(fates.next(Way::In, B, A), None);
    }

    #[test]
    fn as_many_are_lost_as_asked_for() {
        let count = |one_in: u32| {
            let fates = fates(&[&format!("loss={},way=in", 1.0 / f64::from(one_in))], 0);
            assert!(!fates.changes_sent());
            (0..100_000).filter(|_| fates.next(Way::In, A, B).unwrap().is_lost).count()
        };
        assert_eq!(count(1), 100_000);
        assert!((900..1100).contains(&count(100)), "{}", count(100));
        assert!((70..130).contains(&count(1000)), "{}", count(1000));
    }

    #[test]
    fn one_bit_is_wrong() {
        for number in [0, 7, 8, u64::MAX] {
            let mut bytes = [0_u8; 100];
            damage(&mut bytes, number);
            assert_eq!(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
        }
        damage(&mut [], 3);
    }
}
