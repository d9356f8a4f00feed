//! Results of a measurement as text or JSON, and the names of orders.

use std::fmt;

use bowline_node::log::{bytes, count};
use bowline_verbs::{Device, Mtu, PathStats};
use serde_json::{Map, Value, json};

use super::Moved;
use crate::cli::common::histogram::Histogram;
use crate::cli::rdma::wire::{Length, Mode, Op, Order};

/// Prints the results.
pub(super) struct Found<'a> {
    pub(super) json: bool,
    pub(super) order: &'a Order,
    /// The path MTU of the connection.
    pub(super) mtu: Option<Mtu>,
    /// The device, which knows the path to the peer.
    pub(super) device: &'a dyn Device,
}

impl Found<'_> {
    /// Prints the bandwidth of what this side has moved, and of both directions the other one.
    pub(super) fn bandwidth(&self, out: Moved, back: Option<Moved>) {
        let order = self.order;
        let rate = |moved: &Moved| moved.done as f64 / moved.time.as_secs_f64();
        let gigabytes = |rate: f64| rate * f64::from(order.size) / 1e9;
        let all = rate(&out) + back.as_ref().map_or(0.0, rate);
        let done = out.done + back.map_or(0, |back| back.done);
        let pairs = order.pairs.count;
        if self.json {
            let direction = |moved: &Moved| {
                json!({
                    "iterations": moved.done,
                    "seconds": moved.time.as_secs_f64(),
                    "gigabytes_per_second": gigabytes(rate(moved)),
                })
            };
            let mut object = self.object(done);
            object["depth"] = order.depth.into();
            object["queue_pairs"] = pairs.into();
            object["seconds"] = out.time.as_secs_f64().into();
            object["gigabytes_per_second"] = gigabytes(all).into();
            object["messages_per_second"] = all.into();
            if let Some(back) = &back {
                object["outgoing"] = direction(&out);
                object["incoming"] = direction(back);
            }
            say!("{object}");
        } else {
            let pairs = if pairs > 1 { format!(", {pairs} queue pairs") } else { String::new() };
            let each = back.map_or(String::new(), |back| {
                let [out, back] = [out, back].map(|moved| gigabytes(rate(&moved)));
                format!(", out {out:.3} and back {back:.3} GB/s")
            });
            say!(
                "{}{pairs}, depth {}: {:.3} GB/s, {} messages/s{each}",
                self.head(done),
                order.depth,
                gigabytes(all),
                count(all as u64)
            );
        }
    }

    /// Prints round trip times.
    pub(super) fn latency(&self, times: &Histogram) {
        let usec = |nanos: u64| nanos as f64 / 1000.0;
        let at = |percent| usec(times.percentile(percent));
        let (min, max) = (usec(times.min()), usec(times.max()));
        if self.json {
            let mut object = self.object(times.count());
            object["round_trip_usec"] = json!({
                "min": min,
                "median": at(50.0),
                "p90": at(90.0),
                "p99": at(99.0),
                "p999": at(99.9),
                "max": max,
            });
            say!("{object}");
        } else {
            say!(
                "{}, round trip min/median/p90/p99/p99.9/max = \
                 {min:.1}/{:.1}/{:.1}/{:.1}/{:.1}/{max:.1} us",
                self.head(times.count()),
                at(50.0),
                at(90.0),
                at(99.0),
                at(99.9)
            );
        }
    }

    fn object(&self, done: u64) -> Value {
        json!({
            "op": self.order.op.name(),
            "mode": self.order.mode.name(),
            "size": self.order.size,
            "iterations": done,
            "mtu": self.mtu.map(|mtu| mtu.bytes()),
            "counters": counters(self.device),
            "peers": self.device.paths().iter().map(path).collect::<Vec<_>>(),
        })
    }

    fn head(&self, done: u64) -> String {
        let (op, size) = (self.order.op.name(), bytes(u64::from(self.order.size)));
        let mtu = self.mtu.map_or(String::new(), |mtu| format!(", path MTU {}", mtu.bytes()));
        format!("{op}: {} of {size}{mtu}", count(done))
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (op, size) = (self.op.name(), bytes(u64::from(self.size)));
        match self.length {
            Length::Count(n) => write!(f, "{} {op} of {size}", count(n)),
            Length::Time(time) => write!(f, "{op} of {size} for {} s", time.as_secs_f64()),
        }?;
        if self.pairs.count > 1 {
            write!(f, " on {} queue pairs", self.pairs.count)?;
        }
        f.write_str(if self.both { " in both directions" } else { "" })
    }
}

impl Op {
    /// Name on the command line.
    pub(super) fn text(self) -> String {
        format!("--op {}", self.name())
    }
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Bw => "bw",
            Self::Lat => "lat",
        }
    }

    /// Name on the command line.
    pub(super) fn text(self) -> String {
        format!("--mode {}", self.name())
    }
}

impl Length {
    /// Name on the command line.
    pub(super) fn text(self) -> String {
        match self {
            Self::Count(count) => format!("--count {count}"),
            Self::Time(time) => format!("--duration {}", time.as_secs_f64()),
        }
    }
}

/// What the device has counted since it was opened.
fn counters(device: &dyn Device) -> Value {
    let counts = device.counts().into_iter();
    counts
        .map(|count| (count.name.to_owned(), Value::from(count.value)))
        .collect::<Map<_, _>>()
        .into()
}

/// What is known about the path to a peer.
fn path(path: &PathStats) -> Value {
    json!({
        "peer": path.peer,
        "queue_pairs": path.queue_pairs,
        "round_trip_usec": path.round_trip.map(|time| time.as_secs_f64() * 1e6),
        "least_round_trip_usec": path.least_round_trip.as_secs_f64() * 1e6,
        "window": path.window,
        "in_flight": path.in_flight,
        "rate": path.rate,
        "lost_gaps": path.lost_gaps,
        "lost_timeouts": path.lost_timeouts,
        "congestion_losses": path.congestion_losses,
        "resent": path.resent,
        "cnps_received": path.cnps_received,
        "cnps_sent": path.cnps_sent,
    })
}
