//! What the machine is, as far as it bears on the figures.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::json::Json;
use crate::sys;

/// The machine and the program, at the time of the run.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) version: String,
    pub(crate) commit: String,
    /// Day of the run, year first.
    pub(crate) date: String,
    pub(crate) cpu: String,
    pub(crate) cores: usize,
    pub(crate) kernel: String,
    pub(crate) virtualised: bool,
    pub(crate) mitigations: String,
    pub(crate) system_cc: String,
    pub(crate) available_cc: Vec<String>,
    pub(crate) buffers: String,
    pub(crate) clock: String,
    pub(crate) load: String,
    pub(crate) open_files: u64,
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

impl Head {
    /// Looks at the machine.
    pub(crate) fn look() -> Self {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|l| l.starts_with(name));
            line.and_then(|l| Some(l.split_once(':')?.1.trim().to_owned())).unwrap_or_default()
        };
        let sysctl = |name: &str| read(&format!("/proc/sys/net/{name}"));
        let limits = ["core/rmem_max", "core/wmem_max", "ipv4/tcp_rmem", "ipv4/tcp_wmem"];
        let buffers = limits.map(|name| {
            let value = sysctl(name).split_whitespace().collect::<Vec<_>>().join("/");
            format!("{} {value}", name.rsplit('/').next().unwrap_or(name))
        });
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: commit(),
            date: date(),
            cpu: field("model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: sys::kernel(),
            virtualised: field("flags").split(' ').any(|f| f == "hypervisor"),
            mitigations: mitigations(),
            system_cc: sysctl("ipv4/tcp_congestion_control"),
            available_cc: sysctl("ipv4/tcp_available_congestion_control")
                .split_whitespace()
                .map(str::to_owned)
                .collect(),
            buffers: buffers.join(", "),
            clock: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            load: read("/proc/loadavg").split(' ').take(3).collect::<Vec<_>>().join(" "),
            open_files: sys::raise_open_files(),
        }
    }

    /// The lines of the head that concern the machine.
    pub(crate) fn lines(&self) -> Vec<String> {
        let place = if self.virtualised { "virtual machine" } else { "not virtualised" };
        vec![
            format!("bowline {} ({}), {}", self.version, self.commit, self.date),
            format!("{}, {} cores, {place}; {}", self.cpu, self.cores, self.kernel),
            format!("mitigations: {}; clock {}; load {}", self.mitigations, self.clock, self.load),
            format!(
                "congestion control: system {}, available {}",
                self.system_cc,
                self.available_cc.join(" ")
            ),
            format!("buffers: {}; open files {}", self.buffers, self.open_files),
        ]
    }

    /// The head for a result file.
    pub(crate) fn json(&self) -> Json {
        Json::Object(vec![
            ("version", Json::text(&self.version)),
            ("commit", Json::text(&self.commit)),
            ("date", Json::text(&self.date)),
            ("cpu", Json::text(&self.cpu)),
            ("cores", Json::Int(self.cores as u64)),
            ("kernel", Json::text(&self.kernel)),
            ("virtualised", Json::Bool(self.virtualised)),
            ("mitigations", Json::text(&self.mitigations)),
            ("congestion_control", Json::text(&self.system_cc)),
            ("buffers", Json::text(&self.buffers)),
            ("clock", Json::text(&self.clock)),
            ("load", Json::text(&self.load)),
        ])
    }
}

/// The commit the working directory is at, when it is this project's.
fn commit() -> String {
    if fs::metadata("crates/bowline-bench").is_err() {
        return "no commit".into();
    }
    let git = |args: &[&str]| Command::new("git").args(args).output().ok();
    let Some(out) = git(&["rev-parse", "--short=9", "HEAD"]).filter(|o| o.status.success()) else {
        return "no commit".into();
    };
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

fn mitigations() -> String {
    let Ok(dir) = fs::read_dir("/sys/devices/system/cpu/vulnerabilities") else {
        return "unknown".into();
    };
    let states: Vec<String> =
        dir.flatten().map(|e| fs::read_to_string(e.path()).unwrap_or_default()).collect();
    let count = |word: &str| states.iter().filter(|s| s.starts_with(word)).count();
    format!(
        "{} active, {} open, {} not needed",
        count("Mitigation"),
        count("Vulnerable"),
        count("Not affected")
    )
}

fn date() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (year, month, day) = civil(seconds / 86400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Turns days since 1970 into a date of the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // Years begin in March here, so that the leap day is the last of its year.
    let days = days + 719_468;
    let (era, in_era) = (days / 146_097, days % 146_097);
    let year = (in_era - in_era / 1460 + in_era / 36_524 - in_era / 146_096) / 365;
    let in_year = in_era - (365 * year + year / 4 - year / 100);
    let month = (5 * in_year + 2) / 153;
    let day = in_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_777), (2026, 11, 20));
    }
}
