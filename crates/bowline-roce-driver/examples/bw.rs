//! Measures the soft provider between two processes of this machine, over loopback: writes and
//! reads of 1 MiB, and round trips of 64 byte sends. For looking at, and for a profiler; the
//! figures of record come from the bench.
//!
//! `bw [write|read|lat|wait|one] [seconds] [bytes] [depth]`; without arguments all, half a second
//! each. `one` has one thread do the work of both sides, so that a profiler sees all work and no
//! waiting.

use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bowline_base::Errno;
use bowline_roce_driver::{PollMode, SoftConfig, SoftDevice};
use bowline_verbs::{
    Access, Buffer, CmEvent, Completion, ConnParam, CqId, Device, Error, MrKeys, QpAttr, QpCap,
    QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge, Status,
};

const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 79, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 79, 0, 2));
const PORT: u16 = 7471;
const LEN: usize = 64 << 20;
const WAIT: Duration = Duration::from_secs(5);

struct End {
    dev: SoftDevice,
    cq: CqId,
    qp: Qpn,
    buffer: Arc<Buffer>,
    keys: MrKeys,
}

fn end(addr: IpAddr, spin: bool) -> Result<End, Error> {
    let poll = if spin { PollMode::Spin } else { PollMode::Adaptive };
    let dev = SoftDevice::open(SoftConfig { addrs: vec![addr], poll, ..SoftConfig::default() })?;
    let pd = dev.alloc_pd()?;
    let cq = dev.create_cq(1024)?;
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type: QpType::Rc,
        cap: QpCap::default(),
        sq_sig_all: false,
    };
    let qp = dev.create_qp(&init)?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let state = Some(QpState::Init);
    dev.modify_qp(qp, &QpAttr { state, access: Some(access), ..QpAttr::default() })?;
    let buffer = Arc::new(Buffer::new(LEN).map_err(|_| Error::QueueFull)?);
    for at in (0..LEN).step_by(4096) {
        buffer.write(at, &[1]);
    }
    let keys = dev.reg_mr(pd, &buffer, 0, LEN, None, access)?;
    Ok(End { dev, cq, qp, buffer, keys })
}

impl End {
    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.buffer.addr() + at as u64, len: len as u32, lkey: self.keys.lkey }
    }

    fn post(&self, op: SendOp, at: usize, len: usize) -> Result<(), Error> {
        let sges = [self.sge(at, len)];
        let wr = SendWr { id: 1, op, sges: &sges, inline: &[], flags: SendFlags::SIGNALED };
        self.dev.post_send(self.qp, &[wr]).map_err(|(_, error)| error)
    }

    fn post_recv(&self) -> Result<(), Error> {
        let sges = [self.sge(0, 4096)];
        self.dev.post_recv(self.qp, &[RecvWr { id: 2, sges: &sges }]).map_err(|(_, error)| error)
    }

    /// Polls, or waits, until something has completed.
    fn take(&self, out: &mut Vec<Completion>, wait: bool) -> Result<usize, Error> {
        out.clear();
        let start = Instant::now();
        while start.elapsed() < WAIT {
            let count = self.dev.poll_cq(self.cq, out, 16)?;
            if count > 0 {
                return Ok(count);
            }
            if wait {
                self.dev.wait_cq(self.cq, false, Some(WAIT))?;
            }
        }
        Err(Error::TimedOut)
    }
}

/// Accepts one connection and does what its private data says until it ends.
fn serve() -> Result<(), Error> {
    let end = end(SERVER, false)?;
    end.dev.listen(SocketAddr::new(SERVER, PORT))?;
    println!("ready");
    let CmEvent::ConnectRequest { id, request } = end.dev.cm_event(WAIT)? else {
        return Err(Error::TimedOut);
    };
    let what = request.private_data.first().copied().unwrap_or(0);
    for _ in 0..16 {
        end.post_recv()?;
    }
    let mut place = end.buffer.addr().to_be_bytes().to_vec();
    place.extend(end.keys.rkey.to_be_bytes());
    end.dev.accept(id, &ConnParam { qpn: end.qp, private_data: place, ..ConnParam::default() })?;
    let mut out = Vec::new();
    loop {
        if what == b'l' || what == b's' {
            end.take(&mut out, what == b's')?;
            for completion in &out {
                if completion.status != Status::Success {
                    report("server", &end);
                    return Ok(());
                }
                if completion.is_recv() {
                    end.post_recv()?;
                    end.post(SendOp::Send, 0, 64)?;
                }
            }
        } else if !end.dev.wait_cq(end.cq, false, Some(WAIT * 6))? {
            return Err(Error::TimedOut);
        } else {
            end.dev.poll_cq(end.cq, &mut out, 16)?;
            if out.iter().any(|completion| completion.status != Status::Success) {
                report("server", &end);
                return Ok(());
            }
        }
    }
}

fn report(who: &str, end: &End) {
    if std::env::var_os("BW_STATS").is_some() {
        eprintln!("{who}: {:?}\n{:?}", end.dev.stats(), end.dev.counters());
    }
}

fn itself(error: &std::io::Error) -> Error {
    Error::System { what: "running itself".to_owned(), errno: Errno::of(error) }
}

fn client(what: &str, seconds: f64, len: usize, depth: usize) -> Result<(), Error> {
    let program = std::env::current_exe().map_err(|error| itself(&error))?;
    let mut command = match std::env::var("BW_SERVER_CPU") {
        Ok(cpu) => {
            let mut taskset = Command::new("taskset");
            taskset.args(["-c", &cpu]).arg(program);
            taskset
        }
        Err(_) => Command::new(program),
    };
    let mut server =
        command.arg("server").stdout(Stdio::piped()).spawn().map_err(|error| itself(&error))?;
    let mut line = String::new();
    if let Some(out) = server.stdout.take() {
        let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line);
    }
    if line.trim() != "ready" {
        print!("{line}");
        let what = "starting the other side".to_owned();
        return Err(Error::System { what, errno: Errno::ECONNREFUSED });
    }
    let end = end(CLIENT, what == "lat")?;
    let private_data = vec![match what {
        "lat" => b'l',
        "wait" => b's',
        _ => b'b',
    }];
    for _ in 0..16 {
        end.post_recv()?;
    }
    let param = ConnParam { qpn: end.qp, private_data, ..ConnParam::default() };
    let id = end.dev.connect(None, SocketAddr::new(SERVER, PORT), &param)?;
    let CmEvent::Established { private_data, .. } = end.dev.cm_event(WAIT)? else {
        return Err(Error::TimedOut);
    };
    let addr = private_data.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let rkey = private_data.get(8..12).and_then(|bytes| bytes.first_chunk());
    let remote = Remote { addr, rkey: rkey.map_or(0, |bytes| u32::from_be_bytes(*bytes)) };
    let start = Instant::now();
    if what == "lat" || what == "wait" {
        latency(&end, seconds, what)?;
    } else {
        let mut out = Vec::new();
        let (mut posted, mut done) = (0, 0);
        while start.elapsed().as_secs_f64() < seconds || done < posted {
            while posted < done + depth && start.elapsed().as_secs_f64() < seconds {
                let at = posted * len % LEN;
                let remote = Remote { addr: remote.addr + at as u64, ..remote };
                let read = what == "read";
                let op = if read { SendOp::Read(remote) } else { SendOp::Write(remote) };
                end.post(op, at, len)?;
                posted += 1;
            }
            done += end.take(&mut out, false)?;
            if let Some(bad) = out.iter().find(|completion| completion.status != Status::Success) {
                println!("{bad:?}");
                return Err(Error::Closed);
            }
        }
        let time = start.elapsed().as_secs_f64();
        println!("{what} {len} bytes: {:.2} GB/s", (done * len) as f64 / time / 1e9);
    }
    report("client", &end);
    end.dev.disconnect(id)?;
    end.dev.cm_event(WAIT)?;
    drop(end);
    let _ = server.wait();
    Ok(())
}

fn latency(end: &End, seconds: f64, what: &str) -> Result<(), Error> {
    let mut times = Vec::new();
    let mut out = Vec::new();
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        let begin = Instant::now();
        end.post(SendOp::Send, 0, 64)?;
        let mut got = false;
        let mut sent = false;
        while !got || !sent {
            end.take(&mut out, what == "wait")?;
            for completion in &out {
                got |= completion.is_recv();
                sent |= !completion.is_recv();
            }
        }
        times.push(begin.elapsed());
        end.post_recv()?;
    }
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
    println!(
        "{what} 64 bytes: p50 {:.2} us, p90 {:.2} us, min {:.2} us",
        at(0.5),
        at(0.9),
        at(0.0)
    );
    Ok(())
}

/// Writes with both ends in this thread.
fn one(seconds: f64, len: usize, depth: usize) -> Result<(), Error> {
    let (a, b) = (end(CLIENT, true)?, end(SERVER, true)?);
    b.dev.listen(SocketAddr::new(SERVER, PORT))?;
    let param = |end: &End| ConnParam { qpn: end.qp, ..ConnParam::default() };
    a.dev.connect(None, SocketAddr::new(SERVER, PORT), &param(&a))?;
    let CmEvent::ConnectRequest { id, .. } = b.dev.cm_event(WAIT)? else {
        return Err(Error::TimedOut);
    };
    b.dev.accept(id, &param(&b))?;
    a.dev.cm_event(WAIT)?;
    b.dev.cm_event(WAIT)?;
    let (mut out, mut none) = (Vec::new(), Vec::new());
    let (mut posted, mut done) = (0, 0);
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds || done < posted {
        while posted < done + depth && start.elapsed().as_secs_f64() < seconds {
            let at = posted * len % LEN;
            let remote = Remote { addr: b.buffer.addr() + at as u64, rkey: b.keys.rkey };
            a.post(SendOp::Write(remote), at, len)?;
            posted += 1;
        }
        b.dev.poll_cq(b.cq, &mut none, 16)?;
        done += a.dev.poll_cq(a.cq, &mut out, 16)?;
        out.clear();
    }
    let time = start.elapsed().as_secs_f64();
    println!("one {len} bytes: {:.2} GB/s", (done * len) as f64 / time / 1e9);
    report("sender", &a);
    report("target", &b);
    Ok(())
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| args.get(at).and_then(|text| text.parse::<f64>().ok());
    let seconds = number(1).unwrap_or(0.5);
    let (len, depth) = (number(2).unwrap_or(1048576.0), number(3).unwrap_or(4.0));
    let result = match args.first().map(String::as_str) {
        Some("server") => serve(),
        Some("one") => one(seconds, len as usize, depth as usize),
        Some(what) => client(what, seconds, len as usize, depth as usize),
        None => ["write", "read", "lat", "wait"]
            .into_iter()
            .try_for_each(|what| client(what, seconds, len as usize, depth as usize)),
    };
    if let Err(error) = result {
        println!("failed: {error}");
        std::process::exit(1);
    }
}
