//! What each cell keeps: a floor below what is expected of it. With other seeds than 1 and 2, with
//! which tests run, one run in two hundred is below one, mostly in the fairness of many senders.

use super::cells::Cell;
use super::world::Report;

/// Nanoseconds that no request takes, although of a message that is lost whole nobody tells: far
/// below a queue pair's timeout, 537 ms.
const TAIL_MAX: u64 = 50_000_000;

/// Least share of the link, least fairness, least share of a host, and least and most of a foreign
/// flow.
struct Floor {
    used: f64,
    fairness: f64,
    host: f64,
    cubic: (f64, f64),
}

impl Floor {
    const fn used(used: f64) -> Self {
        Self { used, fairness: 0.0, host: 0.0, cubic: (0.0, 1.0) }
    }

    /// The floor of a cell.
    fn of(name: &str) -> Self {
        let incast = |fairness, host| Self { fairness, host, ..Self::used(0.9) };
        match name {
            // A port that holds no more than two packets.
            "one-400g-5us-quarter" => Self::used(0.35),
            "one-100g-50us-quarter" | "one-10g-500us-quarter" | "longer" | "halves" => {
                Self::used(0.8)
            }
            "loss-0.1" | "late-turns-50m" | "late-turns-200m" => Self::used(0.8),
            "late-turns-1g" => Self::used(0.7),
            "loss-1" => Self::used(0.6),
            "cubic-1g-5ms" => Self { cubic: (0.25, 0.9), ..Self::used(0.1) },
            _ if name.starts_with("cubic") => Self { cubic: (0.25, 0.75), ..Self::used(0.25) },
            _ if name.starts_with("small") => Self::used(0.0),
            // Fifteen and twenty packets fill the route of so many senders: one packet in ten is
            // lost, and who loses all of its first ones finds the queue full for long.
            "incast-10g-64" | "incast-1g-64" => incast(0.6, 0.0),
            "incast-10g-32" | "incast-1g-32" => incast(0.7, 0.0),
            "connections-1g-16" => incast(0.5, 0.05),
            _ if name.starts_with("incast") => incast(0.6, 0.02),
            _ => Self::used(0.9),
        }
    }
}

impl Cell {
    /// Returns what a report breaks: promises of the devices, and what the controller
    /// keeps.
    pub fn broken(&self, report: &Report) -> Vec<String> {
        let floor = Floor::of(&self.name);
        let Report { used, fairness, shares: (host, _), cubic, .. } = *report;
        let mut broken: Vec<String> = report.failure.iter().cloned().collect();
        if used < floor.used {
            broken.push(format!("{used:.3} of the link, never below {}", floor.used));
        }
        if fairness < floor.fairness {
            broken.push(format!("fairness {fairness:.3}, never below {}", floor.fairness));
        }
        if host < floor.host {
            broken.push(format!("a host has {host:.3} of its share, never below {}", floor.host));
        }
        let (least, most) = floor.cubic;
        if !(least..=most).contains(&cubic) {
            broken.push(format!("the TCP flow has {cubic:.3}, always {least} to {most}"));
        }
        let longest = report.bulk[2].max(report.small[2]);
        if self.name.starts_with("small-loss") && report.small[2] == 0 {
            broken.push("no request of 4 KiB has ended".to_owned());
        } else if self.name.starts_with("small-loss") && longest > TAIL_MAX {
            broken.push(format!(
                "a request took {} us, never over {}",
                longest / 1_000,
                TAIL_MAX / 1_000
            ));
        }
        broken
    }
}
