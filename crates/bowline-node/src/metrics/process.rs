//! What every program for Prometheus tells about its process, under the names that all use.

use std::{fs, process, sync::LazyLock, time::SystemTime};

use super::exposition::{Exposition, Kind};

/// When this was asked for the first time, seconds since 1970: the start, up to set-up.
static START: LazyLock<f64> = LazyLock::new(|| {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
});

/// Notes the start of the process.
pub(super) fn begin() {
    LazyLock::force(&START);
}

/// Writes version and process.
pub(super) fn write(out: &mut Exposition) {
    out.family("bowline_build_info", Kind::Gauge, "Version of the program; always 1.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    out.family("process_start_time_seconds", Kind::Gauge, "Start of the process since 1970.")
        .sample(&[], *START);
    out.family("process_cpu_seconds_total", Kind::Counter, "Time on processors.")
        .sample(&[], cpu_seconds());
    if let Some(bytes) = resident_bytes() {
        out.family("process_resident_memory_bytes", Kind::Gauge, "Memory in use.")
            .sample(&[], bytes);
    }
    if let Ok(all) = fs::read_dir(format!("/proc/{}/fd", process::id())) {
        out.family("process_open_fds", Kind::Gauge, "Open descriptors.").sample(&[], all.count());
    }
}

fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn resident_bytes() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}
