//! Connections that come and go as fast as they can leave nothing behind.
//!
//! `BOWLINE_CHURN_SECONDS` makes it longer than the three seconds of an ordinary run.

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bowline_roce_driver::SoftDevice;
use bowline_verbs::{CmEvent, CmId, ConnParam, Device, Error, QpCap, QpInit, QpType, Qpn};
use common::{PATIENCE, PORT, ip, open};

/// Most connections in a second, so that both ends keep up on a slow machine.
const PER_SECOND: u32 = 1000;
/// Least number of connections, also on a slow machine.
const MANY: u32 = 100;

fn event(device: &SoftDevice, limit: Duration) -> Option<CmEvent> {
    match device.cm_event(limit) {
        Ok(event) => Some(event),
        Err(Error::TimedOut | Error::Closed) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A queue pair of an end that makes and removes one for each connection.
struct End {
    device: Arc<SoftDevice>,
    init: QpInit,
}

impl End {
    fn new(device: &Arc<SoftDevice>) -> Self {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(16).unwrap();
        let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
        let (qp_type, sq_sig_all) = (QpType::Rc, false);
        let init = QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all };
        Self { device: Arc::clone(device), init }
    }

    fn param(&self) -> ConnParam {
        ConnParam { qpn: self.device.create_qp(&self.init).unwrap(), ..ConnParam::default() }
    }
}

/// Accepts connections until no more are made and all have ended.
fn answer(end: &End, over: &AtomicBool) {
    let mut live: Vec<(CmId, Qpn)> = Vec::new();
    let mut last = Instant::now();
    while !over.load(Relaxed) || !live.is_empty() {
        let Some(event) = event(&end.device, Duration::from_millis(100)) else {
            assert!(last.elapsed() < PATIENCE, "{} connections never ended", live.len());
            continue;
        };
        last = Instant::now();
        match event {
            CmEvent::ConnectRequest { id, .. } => {
                let param = end.param();
                end.device.accept(id, &param).unwrap();
                live.push((id, param.qpn));
            }
            CmEvent::Disconnected { id } => {
                if let Some(at) = live.iter().position(|(known, _)| *known == id) {
                    end.device.destroy_qp(live.swap_remove(at).1).unwrap();
                }
            }
            _ => {}
        }
    }
}

fn connect_and_leave(end: &End, to: SocketAddr) {
    let param = end.param();
    let id = end.device.connect(None, to, &param).unwrap();
    let start = Instant::now();
    let wait = |what: &str, is: &dyn Fn(&CmEvent) -> bool| {
        while !event(&end.device, PATIENCE).is_some_and(|event| is(&event)) {
            assert!(start.elapsed() < PATIENCE, "not {what}");
        }
    };
    wait("established", &|e| matches!(e, CmEvent::Established { id: of, .. } if *of == id));
    end.device.disconnect(id).unwrap();
    wait("disconnected", &|e| matches!(e, CmEvent::Disconnected { id: of } if *of == id));
    end.device.destroy_qp(param.qpn).unwrap();
}

#[test]
fn connections_that_come_and_go_leave_nothing() {
    let seconds = std::env::var("BOWLINE_CHURN_SECONDS").ok().and_then(|s| s.parse().ok());
    let length = Duration::from_secs(seconds.unwrap_or(3));
    let (a, p) = (open(ip(9, 1)), open(ip(9, 2)));
    let (active, passive) = (End::new(&a), End::new(&p));
    let to = SocketAddr::new(ip(9, 2), PORT);
    let listener = p.listen(to).unwrap();
    let before = (a.in_use(), p.in_use());
    let (mut count, over) = (0, AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| answer(&passive, &over));
        let start = Instant::now();
        while start.elapsed() < length || count < MANY {
            connect_and_leave(&active, to);
            count += 1;
            let due = start + Duration::from_secs(1) * count / PER_SECOND;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        over.store(true, Relaxed);
    });
    println!("{count} connections");
    // Late packets of a connection may come for half a second [CM-45].
    let start = Instant::now();
    loop {
        while event(&a, Duration::ZERO).is_some() || event(&p, Duration::ZERO).is_some() {}
        if (a.in_use(), p.in_use()) == before {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "left behind: {:?} {:?}", a.in_use(), p.in_use());
        std::thread::sleep(Duration::from_millis(100));
    }
    p.destroy_id(listener).unwrap();
}
