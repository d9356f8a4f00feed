//! One end of the connections of a cell: device, queue pairs, registered memory, and what it
//! counts.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bowline_roce_driver::{Impairments, PollMode, SoftConfig, SoftDevice};
use bowline_verbs::{
    Access, Buffer, CmEvent, Completion, ConnParam, CqId, Device, Error, MrKeys, Mtu, PathStats,
    QpAttr, QpCap, QpInit, QpState, QpType, Qpn, RecvWr, Remote, SendFlags, SendOp, SendWr, Sge,
    Status,
};

use crate::cell::Wait;
use crate::role::{Probe, Role, Side, say, stopping};

/// Port the receiver listens to.
const PORT: u16 = 7471;
/// How long a step of a connection may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a side waits for completions before it looks at the clock.
const NAP: Duration = Duration::from_millis(50);
/// Completions taken at once.
const TAKE: usize = 64;

/// Names the call that failed.
pub(super) fn failed(call: &'static str) -> impl Fn(Error) -> String {
    move |e| format!("{call}: {e}")
}

fn posting(call: &'static str) -> impl Fn((usize, Error)) -> String {
    move |(_, e)| format!("{call}: {e}")
}

/// What a cell needs: memory for all, and of each queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Bytes of registered memory.
    pub(super) memory: usize,
    /// Sends outstanding, at most.
    pub(super) sends: usize,
    /// Receives posted, at most.
    pub(super) receives: usize,
}

/// One end of as many connections as the cell has queue pairs.
pub(super) struct End {
    pub(super) device: Arc<SoftDevice>,
    cq: CqId,
    qps: Vec<Qpn>,
    pub(super) buffer: Arc<Buffer>,
    keys: MrKeys,
    remote: Remote,
    wait: Wait,
}

impl End {
    /// Opens the device of this side, with memory and queue pairs that receives may be posted to.
    pub(super) fn open(role: &Role, shape: Shape) -> Result<Self, String> {
        let cell = &role.cell;
        let ip = if role.side == Side::Rx { cell.nodes.0 } else { cell.nodes.1 };
        let mtu = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == cell.mtu);
        let mut config = SoftConfig {
            addrs: vec![ip.into()],
            mtu: Some(mtu.ok_or_else(|| format!("no path MTU is {} bytes", cell.mtu))?),
            poll: match cell.wait {
                Wait::Adaptive => PollMode::Adaptive,
                Wait::Spin => PollMode::Spin,
                Wait::Sleep => PollMode::Sleep,
            },
            impairments: match cell.drop_one_in {
                0 => Impairments::default(),
                one_in => {
                    let loss = format!("loss={},way=in", 1.0 / f64::from(one_in));
                    Impairments::parse(&loss, 0).map_err(|error| error.to_string())?
                }
            },
            ..SoftConfig::default()
        };
        config.core.congestion = cell.congestion;
        let device = SoftDevice::open(config).map_err(failed("opening a device"))?;
        let pd = device.alloc_pd().map_err(failed("alloc_pd"))?;
        let depth = cell.flows * (shape.sends + shape.receives);
        let cq = device.create_cq(depth).map_err(failed("create_cq"))?;
        let cap =
            QpCap { max_send_wr: shape.sends, max_recv_wr: shape.receives, ..QpCap::default() };
        let qp_type = QpType::Rc;
        let init =
            QpInit { pd, send_cq: cq, recv_cq: cq, srq: None, qp_type, cap, sq_sig_all: false };
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let (state, rights) = (Some(QpState::Init), Some(access));
        let attr = QpAttr { state, access: rights, ..QpAttr::default() };
        let mut qps = Vec::new();
        for _ in 0..cell.flows {
            let qp = device.create_qp(&init).map_err(failed("create_qp"))?;
            device.modify_qp(qp, &attr).map_err(failed("modify_qp"))?;
            qps.push(qp);
        }
        let buffer = Arc::new(Buffer::new(shape.memory).map_err(|e| format!("memory: {e}"))?);
        let keys =
            device.reg_mr(pd, &buffer, 0, shape.memory, None, access).map_err(failed("reg_mr"))?;
        let (device, wait) = (Arc::new(device), cell.wait);
        Ok(Self { device, cq, qps, buffer, keys, remote: Remote::default(), wait })
    }

    /// Tells the parent that this side can be reached, and connects to the other: the sender to the
    /// receiver, one queue pair after the other. Each tells the other where its memory is.
    pub(super) fn connect(&mut self, role: &mut Role) -> Result<(), String> {
        let at = SocketAddr::new(IpAddr::V4(role.cell.nodes.0), PORT);
        let mut place = self.buffer.addr().to_be_bytes().to_vec();
        place.extend(self.keys.rkey.to_be_bytes());
        let param = |qpn| ConnParam { qpn, private_data: place.clone(), ..ConnParam::default() };
        if role.side == Side::Rx {
            self.device.listen(at).map_err(failed("listen"))?;
        }
        role.ready("")?;
        let mut theirs = Vec::new();
        for &qpn in &self.qps {
            theirs = if role.side == Side::Rx {
                let CmEvent::ConnectRequest { id, request } = self.event()? else {
                    return Err("something else than a connection came".into());
                };
                self.device.accept(id, &param(qpn)).map_err(failed("accept"))?;
                match self.event()? {
                    CmEvent::Established { .. } => request.private_data,
                    other => return Err(format!("no connection: {other:?}")),
                }
            } else {
                self.device.connect(None, at, &param(qpn)).map_err(failed("connect"))?;
                match self.event()? {
                    CmEvent::Established { private_data, .. } => private_data,
                    other => return Err(format!("no connection: {other:?}")),
                }
            };
        }
        let (addr, rkey) = (theirs.first_chunk(), theirs.get(8..).and_then(<[u8]>::first_chunk));
        let (Some(addr), Some(rkey)) = (addr, rkey) else {
            return Err("the other side did not say where its memory is".into());
        };
        self.remote = Remote { addr: u64::from_be_bytes(*addr), rkey: u32::from_be_bytes(*rkey) };
        Ok(())
    }

    fn event(&self) -> Result<CmEvent, String> {
        self.device.cm_event(PATIENCE).map_err(failed("connecting"))
    }

    /// Which of the cell's queue pairs a completion is of.
    pub(super) fn flow(&self, completion: &Completion) -> usize {
        self.qps.iter().position(|qp| *qp == completion.qpn).unwrap_or_default()
    }

    fn qp(&self, flow: usize) -> Qpn {
        self.qps.get(flow).copied().unwrap_or_default()
    }

    /// A place in the other side's memory.
    pub(super) fn remote(&self, offset: usize) -> Remote {
        Remote { addr: self.remote.addr + offset as u64, ..self.remote }
    }

    /// A piece of this side's memory.
    pub(super) fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: self.buffer.addr() + offset as u64, len: len as u32, lkey: self.keys.lkey }
    }

    /// Posts requests to one of the queue pairs.
    pub(super) fn post(&self, flow: usize, wrs: &[SendWr<'_>]) -> Result<(), String> {
        self.device.post_send(self.qp(flow), wrs).map_err(posting("post_send"))
    }

    /// Posts one request that completes with an entry.
    pub(super) fn post_one(
        &self,
        flow: usize,
        id: u64,
        op: SendOp,
        sge: Sge,
    ) -> Result<(), String> {
        let (sges, flags) = ([sge], SendFlags::SIGNALED);
        self.post(flow, &[SendWr { id, op, sges: &sges, inline: &[], flags }])
    }

    /// Posts receives to one of the queue pairs.
    pub(super) fn post_recv(&self, flow: usize, wrs: &[RecvWr<'_>]) -> Result<(), String> {
        self.device.post_recv(self.qp(flow), wrs).map_err(posting("post_recv"))
    }

    /// Takes completions, waiting as the cell says, but not for long; none are left in `out` when
    /// nothing came.
    ///
    /// # Errors
    /// A request failed.
    pub(super) fn take(&self, out: &mut Vec<Completion>) -> Result<(), String> {
        out.clear();
        loop {
            let count = self.device.poll_cq(self.cq, out, TAKE).map_err(failed("poll_cq"))?;
            if count > 0 {
                break;
            }
            if stopping() {
                return Ok(());
            }
            if self.wait != Wait::Spin
                && !self.device.wait_cq(self.cq, false, Some(NAP)).map_err(failed("wait_cq"))?
            {
                return Ok(());
            }
        }
        match out.iter().find(|completion| completion.status != Status::Success) {
            Some(bad) if !stopping() => {
                let fault = self.device.fault().map_or(String::new(), |fault| format!(", {fault}"));
                Err(format!("request {} ended with {:?}{fault}", bad.wr_id, bad.status))
            }
            _ => Ok(()),
        }
    }

    /// Reads what device and driver count.
    pub(super) fn probe(&self) -> Probe {
        let device = Arc::clone(&self.device);
        Box::new(move || counts(&device))
    }

    /// What the device knows of the way to the other side now.
    fn path(&self) -> String {
        let micros = |time: Duration| time.as_micros();
        let word = |p: PathStats| {
            format!(
                " round_trip_us={} least_us={} window={} rate={} lost_gaps={} lost_timeouts={} \
                 congestion_losses={}",
                p.round_trip.map_or(0, micros),
                micros(p.least_round_trip),
                p.window.unwrap_or(0),
                p.rate.unwrap_or(0),
                p.lost_gaps,
                p.lost_timeouts,
                p.congestion_losses,
            )
        };
        self.device.paths().into_iter().next().map_or_else(String::new, word)
    }

    /// Tells the parent what this side did in all, and ends the process: what is on its way matters
    /// to nobody any more.
    pub(super) fn finish(&self, messages: u64) -> ! {
        let counts = counts(&self.device);
        let words: String = counts.iter().map(|(name, n)| format!(" {name}={n}")).collect();
        say(&format!("done sent={messages}{words}{}", self.path()));
        std::process::exit(0);
    }
}

fn counts(device: &SoftDevice) -> Vec<(&'static str, u64)> {
    let (stats, core) = (device.stats(), device.counters());
    vec![
        ("syscalls", stats.udp_syscalls()),
        ("sends", stats.sends),
        ("receives", stats.receives),
        ("empty_looks", stats.empty_looks),
        ("packets_out", stats.packets_sent),
        ("packets_in", stats.packets_received),
        ("acks", core.acks_sent + core.acks_repeated),
        ("executed", core.requests_executed),
        ("resent", core.packets_resent),
        ("naks", core.naks_sequence_sent),
        ("rnr_naks", core.rnr_naks_sent),
        ("timeouts", core.timeouts),
        ("dropped", stats.packets_dropped),
        ("icrc_solved", core.icrc_solved),
        ("sleeps", stats.sleeps),
        ("hand_overs", stats.hand_overs),
    ]
}
