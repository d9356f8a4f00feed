//! fio: its command line, and what its answer says.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Load;
use crate::sys;

/// How often the end of fio is looked for.
const NAP: Duration = Duration::from_millis(5);
const PACKAGE: &str = "apt-get install fio";

/// How fio asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// It speaks NBD.
    Nbd,
    /// It reads and writes a file, past the page cache, and has several requests on their way.
    File,
}

impl Engine {
    const fn name(self) -> &'static str {
        match self {
            Self::Nbd => "nbd",
            Self::File => "libaio",
        }
    }
}

fn said(word: &str) -> Result<String, String> {
    let out = Command::new("fio").arg(word).stdin(Stdio::null()).output();
    let out = out.map_err(|_| format!("fio is not installed; {PACKAGE}"))?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// What fio calls itself.
///
/// # Errors
/// Says that it is missing, and which package has it.
fn version() -> Result<String, String> {
    said("--version")
}

/// Says whether fio is there, and was built with an engine. Returns its version and the engine.
pub(super) fn has(engine: Engine) -> Result<String, String> {
    let (version, name) = (version()?, engine.name());
    match lists(&said("--enghelp")?, name) {
        true => Ok(format!("{version}, engine {name}")),
        false => Err(format!("this {version} has no engine {name}; Debian's has: {PACKAGE}")),
    }
}

/// Says whether a list of engines has one of this name.
fn lists(engines: &str, name: &str) -> bool {
    engines.split_whitespace().any(|engine| engine == name)
}

/// Tells fio to ask at a door for something.
pub(super) fn command(load: &Load, engine: Engine, at: &str, disk: u64) -> Command {
    let mut command = Command::new("fio");
    let how = if load.write { "write" } else { "read" };
    let order = if load.window.is_some() { "rand" } else { "" };
    command.args(["--name=door", "--output-format=json", "--group_reporting"]);
    command.arg(format!("--size={disk}")).arg(format!("--rw={order}{how}"));
    command.arg(format!("--bs={}", load.size)).arg(format!("--iodepth={}", load.depth));
    let times = TIMES.map(|percent| percent.to_string()).join(":");
    command.arg(format!("--percentile_list={times}"));
    command.arg(format!("--numjobs={}", load.jobs)).arg(format!("--ioengine={}", engine.name()));
    if let Some(window) = load.window {
        command.args(["--time_based", "--norandommap"]);
        command.arg(format!("--runtime={}ms", window.as_millis()));
    }
    match engine {
        Engine::Nbd => command.arg(format!("--uri={at}")),
        Engine::File => command.arg("--direct=1").arg(format!("--filename={at}")),
    };
    command
}

/// What fio has counted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Asked {
    /// Requests in the window.
    pub(super) count: u64,
    /// The window.
    pub(super) seconds: f64,
    /// Percentiles of the time from asking to the answer, in nanoseconds, as sides of the bench
    /// report them.
    pub(super) times: Vec<u64>,
    /// Processors' time of fio itself, in nanoseconds.
    pub(super) cpu_ns: u64,
}

/// The percentiles that fio is asked for, and how many digits it writes behind the point. They are
/// those that sides of the bench report, but for the shortest and the longest time.
const TIMES: [f64; 9] = [10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99];
const DIGITS: usize = 6;

/// Reads fio's answer, before whose JSON may be lines of other kinds.
pub(super) fn parse(text: &str, write: bool) -> Result<Asked, String> {
    let json = text.find('{').map(|at| &text[at..]).ok_or("fio has answered nothing")?;
    // Behind it may be more as well.
    let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
    let answer = values.next().ok_or("fio has answered nothing")?;
    let answer = answer.map_err(|e| format!("fio's answer: {e}"))?;
    let job = &answer["jobs"][0];
    if job["error"].as_u64() != Some(0) {
        return Err(format!("fio's requests failed: error {}", job["error"]));
    }
    let side = &job[if write { "write" } else { "read" }];
    let number = |of: &Value, key: &str| {
        of[key].as_f64().ok_or_else(|| format!("fio's answer has no number {key}"))
    };
    let count = side["total_ios"].as_u64().filter(|n| *n > 0).ok_or("nothing was answered")?;
    // Its own quotient: it writes the window in whole milliseconds.
    let seconds = count as f64 / number(side, "iops")?.max(f64::MIN_POSITIVE);
    let spans = &side["clat_ns"];
    let mut times = vec![number(spans, "min")? as u64];
    for percent in TIMES {
        times.push(number(&spans["percentile"], &format!("{percent:.DIGITS$}"))? as u64);
    }
    times.push(number(spans, "max")? as u64);
    let percent = number(job, "usr_cpu")? + number(job, "sys_cpu")?;
    // Milliseconds of all its processes together.
    let cpu_ns = (percent / 100.0 * number(job, "job_runtime")? * 1e6) as u64;
    Ok(Asked { count, seconds, times, cpu_ns })
}

/// fio while it asks. It is killed if nobody waits for its answer.
pub(super) struct Fio {
    child: Child,
    write: bool,
}

impl Fio {
    /// Starts it.
    pub(super) fn start(mut command: Command, write: bool) -> Result<Self, String> {
        sys::end_with_this_thread(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|e| format!("starting fio: {e}; {PACKAGE}"))?;
        Ok(Self { child, write })
    }

    /// Waits for its answer, which is smaller than what a pipe holds.
    pub(super) fn result(mut self, end: Instant) -> Result<Asked, String> {
        let status = loop {
            match self.child.try_wait().map_err(|e| format!("waiting for fio: {e}"))? {
                Some(status) => break status,
                None if Instant::now() > end => return Err("fio did not end in time".into()),
                None => sleep(NAP),
            }
        };
        let text = |pipe: Option<&mut dyn Read>| {
            let mut bytes = Vec::new();
            pipe.map(|pipe| pipe.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let out = text(self.child.stdout.as_mut().map(|pipe| pipe as _));
        if status.success() {
            return parse(&out, self.write);
        }
        let err = text(self.child.stderr.as_mut().map(|pipe| pipe as _));
        let why = err.lines().chain(out.lines()).find(|line| !line.trim().is_empty());
        Err(format!("fio: {} ({status})", why.unwrap_or("no word").trim()))
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        // It has mostly ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What fio 3.33 said of two processes that wrote for 200 ms through an NBD socket.
    const RECORDED: &str = include_str!("fio.json");

    #[test]
    fn a_recorded_answer_is_read() {
        let asked = parse(RECORDED, true).unwrap();
        assert_eq!((asked.count, asked.times.len()), (9057, 11));
        assert!((asked.seconds - 0.202).abs() < 1e-6, "{}", asked.seconds);
        assert_eq!((asked.times[3], asked.times[7]), (634_880, 10_027_008));
        // 16.957606 % of 401 ms, which is the time of both processes together.
        assert_eq!(asked.cpu_ns / 1000, 68_000);
        assert_eq!(asked, parse(&format!("fio: a warning\n{RECORDED}\nmore"), true).unwrap());
        assert_eq!(parse(RECORDED, false), Err("nothing was answered".into()));
    }

    #[test]
    fn a_wrong_answer_is_an_error() {
        let failed = RECORDED.replacen("\"error\" : 0", "\"error\" : 5", 1);
        assert_eq!(parse(&failed, true), Err("fio's requests failed: error 5".into()));
        assert_eq!(parse("fio: no such engine", true), Err("fio has answered nothing".into()));
        let cut = parse(&RECORDED[..RECORDED.len() / 2], true).unwrap_err();
        assert!(cut.starts_with("fio's answer: EOF"), "{cut}");
        let renamed = parse(&RECORDED.replace("99.000000", "98.000000"), true).unwrap_err();
        assert_eq!(renamed, "fio's answer has no number 99.000000");
    }

    #[test]
    fn an_engine_is_found_by_its_whole_name() {
        let list = "Available IO engines:\n\tnbdx\n\tlibaio\n";
        assert!(lists(list, "libaio") && !lists(list, "nbd"));
    }

    #[test]
    fn a_door_is_named_as_its_engine_has_it() {
        let load = Load {
            write: false,
            size: 4096,
            depth: 32,
            jobs: 4,
            window: Some(Duration::from_millis(1500)),
        };
        let words = |load: &Load, engine, at| -> Vec<String> {
            let command = command(load, engine, at, 1 << 20);
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
        };
        let nbd = words(&load, Engine::Nbd, "nbd://a:1");
        for word in ["--rw=randread", "--uri=nbd://a:1", "--numjobs=4", "--runtime=1500ms"] {
            assert!(nbd.iter().any(|other| other == word), "{word}: {nbd:?}");
        }
        let fill = Load { write: true, window: None, ..load };
        let file = words(&fill, Engine::File, "/a/b");
        for word in ["--rw=write", "--filename=/a/b", "--direct=1", "--ioengine=libaio"] {
            assert!(file.iter().any(|other| other == word), "{word}: {file:?}");
        }
        assert!(!file.iter().any(|word| word.contains("time")), "{file:?}");
    }
}
