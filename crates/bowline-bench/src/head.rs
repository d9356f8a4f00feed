//! What the machine is, as far as it bears on the figures.

use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

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
    /// Those the kernel has; a result file does not hold them.
    pub(crate) available_cc: Vec<String>,
    pub(crate) buffers: String,
    pub(crate) clock: String,
    pub(crate) load: String,
    /// Limit of open files; a result file does not hold it.
    pub(crate) open_files: Option<u64>,
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
            open_files: Some(sys::raise_open_files()),
        }
    }

    /// The lines of the head that concern the machine.
    pub(crate) fn lines(&self) -> Vec<String> {
        let place = if self.virtualised { "virtual machine" } else { "not virtualised" };
        let available = match self.available_cc[..] {
            [] => String::new(),
            _ => format!(", available {}", self.available_cc.join(" ")),
        };
        let open_files = self.open_files.map_or(String::new(), |n| format!("; open files {n}"));
        vec![
            format!("bowline {} ({}), {}", self.version, self.commit, self.date),
            format!("{}, {} cores, {place}; {}", self.cpu, self.cores, self.kernel),
            format!("mitigations: {}; clock {}; load {}", self.mitigations, self.clock, self.load),
            format!("congestion control: system {}{available}", self.system_cc),
            format!("buffers: {}{open_files}", self.buffers),
        ]
    }

    /// The head for a result file.
    pub(crate) fn json(&self) -> Value {
        json!({
            "version": self.version,
            "commit": self.commit,
            "date": self.date,
            "cpu": self.cpu,
            "cores": self.cores,
            "kernel": self.kernel,
            "virtualised": self.virtualised,
            "mitigations": self.mitigations,
            "congestion_control": self.system_cc,
            "buffers": self.buffers,
            "clock": self.clock,
            "load": self.load,
        })
    }
}

impl Head {
    /// Reads what [`json`](Self::json) wrote.
    ///
    /// # Errors
    ///
    /// Names the field that is missing.
    pub(crate) fn from_json(head: &Value) -> Result<Self, String> {
        let text = |key: &str| {
            let text = head[key].as_str().map(str::to_owned);
            text.ok_or_else(|| format!("the head has no {key}"))
        };
        Ok(Self {
            version: text("version")?,
            commit: text("commit")?,
            date: text("date")?,
            cpu: text("cpu")?,
            cores: head["cores"].as_u64().ok_or("the head has no cores")? as usize,
            kernel: text("kernel")?,
            virtualised: head["virtualised"].as_bool().unwrap_or(false),
            mitigations: text("mitigations")?,
            system_cc: text("congestion_control")?,
            available_cc: Vec::new(),
            buffers: text("buffers")?,
            clock: text("clock")?,
            load: text("load")?,
            open_files: None,
        })
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
