//! The plan of a run, drawn from a seed: devices, their network, connections, requests and faults.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use bowline_roce::{Congestion, GiveUp};
use bowline_verbs::Mtu;
use bowline_wire::roce::IcrcPolicy;
use serde::{Deserialize, Serialize};

use super::host::PORT;
use super::net::NetPlan;
use super::remote;
use super::streams::StreamPlan;
use crate::engine::queue::{MS, SEC, US};
use crate::engine::rng::Rng;

/// A family of runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// All kinds of plans.
    Swarm,
    /// No faults: no request may fail, and all work ends soon.
    Calm,
    /// The network loses, repeats, damages and reorders.
    #[serde(rename = "weather")]
    NetworkFaults,
    /// Short queues and slow lines.
    Narrow,
    /// Devices die and start again, also while they connect.
    Crash,
    /// Lines are cut for a while.
    Cuts,
    /// Programs make requests that are not allowed.
    Misuse,
    /// Connections come and go; few requests are made.
    Churn,
}

impl Scenario {
    /// Every scenario.
    pub const ALL: [Self; 8] = [
        Self::Swarm,
        Self::Calm,
        Self::NetworkFaults,
        Self::Narrow,
        Self::Crash,
        Self::Cuts,
        Self::Misuse,
        Self::Churn,
    ];

    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Swarm => "swarm",
            Self::Calm => "calm",
            Self::NetworkFaults => "weather",
            Self::Narrow => "narrow",
            Self::Crash => "crash",
            Self::Cuts => "cuts",
            Self::Misuse => "misuse",
            Self::Churn => "churn",
        }
    }

    /// Finds a scenario by its name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// What the driver of a host tells the core about IPv4 identifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hints {
    /// The right identifications.
    Right,
    /// No identifications.
    None,
    /// Some right, some wrong and some missing identifications.
    Mixed,
}

/// A device and the driver around it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HostPlan {
    pub(crate) addr: IpAddr,
    #[serde(with = "remote::MtuDef")]
    pub(crate) mtu: Mtu,
    #[serde(with = "remote::IcrcPolicyDef")]
    pub(crate) icrc: IcrcPolicy,
    pub(crate) gso: bool,
    /// Packets of a fixed window; 0: the window of the path decides.
    pub(crate) window: u32,
    pub(crate) hints: Hints,
    /// How long acknowledgements may be delayed.
    pub(crate) ack_delay: Duration,
    /// Longest time in nanoseconds between a datagram and the datagrams sent because of it.
    pub(crate) turn: u64,
    /// Longest time in nanoseconds until a program polls its completions.
    pub(crate) look: u64,
    /// Number of UD datagrams that a program sends.
    #[serde(rename = "letters")]
    pub(crate) datagrams: u32,
    /// Service port on which the host listens.
    pub(crate) listens: Option<u16>,
    /// When a peer that does not answer is given up.
    #[serde(with = "remote::GiveUpDef")]
    pub(crate) give_up: GiveUp,
}

impl HostPlan {
    /// What limits the packets in flight.
    pub(crate) const fn congestion(&self) -> Congestion {
        match self.window {
            0 => Congestion::Delay,
            packets => Congestion::Fixed(packets),
        }
    }
}

/// A connection and the requests made over it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ConnPlan {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// The connection manager makes the connection; otherwise the programs set the attributes.
    pub(crate) managed: bool,
    pub(crate) start: u64,
    #[serde(with = "remote::MtuDef")]
    pub(crate) mtu: Mtu,
    /// Length of the longest message in bytes.
    pub(crate) message_max: usize,
    /// Number of requests of each side.
    pub(crate) requests: [u32; 2],
    pub(crate) send_depth: usize,
    pub(crate) recv_depth: usize,
    pub(crate) depths: [u8; 2],
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr_timer: u8,
    /// First sequence numbers, if there is no connection manager: often so high that they wrap
    /// soon.
    pub(crate) psns: [u32; 2],
    /// Code of the acknowledgement timeout and number of retransmissions, if there is no connection
    /// manager.
    pub(crate) patience: (u8, u8),
    /// Longest time in nanoseconds until a receive is posted again.
    pub(crate) recv_delay: u64,
    /// Receives in a thousand that are too short for some messages.
    pub(crate) short_receives: u64,
    /// Requests in a thousand that are wrong.
    pub(crate) misuse: u64,
    /// Requests in a thousand that ask for a completion.
    pub(crate) signalled: u64,
    pub(crate) signal_all: bool,
    pub(crate) one_queue: bool,
    /// Memory lent to the peer is a memory window, not a fast-registration region.
    pub(crate) windows: bool,
    /// Time in nanoseconds between two rounds of requests.
    pub(crate) gap: u64,
    /// Maximum number of requests of a round.
    pub(crate) burst: u64,
    /// The passive side refuses the connection.
    pub(crate) reject: bool,
    /// The active side asks for a port on which no program listens.
    pub(crate) wrong_port: bool,
    /// Longest time in nanoseconds until the passive side decides.
    pub(crate) decide: u64,
    /// For each side the time after which it ends the connection, whatever its stage.
    pub(crate) end_after: [Option<u64>; 2],
    /// Sides that end the connection leave at once.
    pub(crate) abrupt: bool,
    /// Rounds in a thousand after which the send queue is stopped for a while.
    #[serde(default)]
    pub(crate) pauses: u64,
    /// How many of a thousand times a registered region that is no longer in use is registered
    /// again with its present key. Other mistakes are drawn from more kinds then.
    #[serde(default)]
    pub(crate) misregister: u64,
    /// Longest time in nanoseconds between RTR and RTS, if there is no connection manager.
    #[serde(default)]
    pub(crate) slowly: u64,
    /// Each side takes its receives from a shared receive queue.
    #[serde(default)]
    pub(crate) shared_receives: bool,
    /// Time in nanoseconds after which a region is removed although it is in use.
    pub(crate) deregister_after: Option<u64>,
}

/// Kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FaultKind {
    /// A device dies and starts again.
    Crash,
    /// A line is cut in one direction or both.
    Cut,
    /// A line holds datagrams back for a while, in one direction or both; none is lost.
    Hold,
}

/// Everything that a seed draws.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) scenario: Scenario,
    pub(crate) net: NetPlan,
    pub(crate) hosts: Vec<HostPlan>,
    pub(crate) conns: Vec<ConnPlan>,
    /// Streams of messages over unreliable connections.
    #[serde(default)]
    pub(crate) streams: Vec<StreamPlan>,
    /// Kinds of faults, and the mean time in nanoseconds between two of a kind.
    pub(crate) faults: Vec<(FaultKind, u64)>,
    /// Shortest and longest duration of a fault in nanoseconds.
    #[serde(default)]
    pub(crate) fault_min: u64,
    pub(crate) fault_max: u64,
    /// Management datagrams in a thousand at whose arrival a device dies: the sender's device, or
    /// the receiver's, before or after it has handled the datagram.
    pub(crate) deadly_mads: u64,
    /// Time in nanoseconds during which faults happen.
    pub(crate) active: u64,
    /// Number of requests of each side over healthy connections after the faults.
    #[serde(default)]
    pub(crate) fresh: u32,
}

/// Approximate limit on the payload bytes that the requests of a run change.
const VOLUME: u64 = 600_000;
/// Approximate limit on the packets that the requests of a run need.
const PACKETS: u64 = 1_800;
/// Runs with faults for longer than this are about peers that are unreachable for long.
const LONG: u64 = 10 * SEC;

impl Plan {
    pub(crate) fn draw(rng: &mut Rng, forced: Option<Scenario>) -> Self {
        use Scenario as S;
        let drawn = rng.pick(&[
            S::Swarm,
            S::Swarm,
            S::Swarm,
            S::Calm,
            S::NetworkFaults,
            S::NetworkFaults,
            S::Narrow,
            S::Crash,
            S::Cuts,
            S::Misuse,
            S::Churn,
        ]);
        let scenario = forced.unwrap_or(drawn);
        let any = |rng: &mut Rng, mine: S, permille: u64| {
            scenario == mine || scenario == S::Swarm && rng.chance(permille)
        };
        let network_faults = any(rng, S::NetworkFaults, 500);
        let mixed = scenario == S::Churn;
        let narrow = any(rng, S::Narrow, 250) || mixed && rng.chance(200);
        let crash = any(rng, S::Crash, 250) || mixed && rng.chance(300);
        let cuts = any(rng, S::Cuts, 200) || mixed && rng.chance(300);
        let misuse = any(rng, S::Misuse, 250);
        let churn = any(rng, S::Churn, 250);

        let hosts = draw_hosts(rng, network_faults, narrow);
        let net = draw_net(rng, network_faults, narrow);
        let mut plan = Self {
            scenario,
            net,
            hosts,
            conns: Vec::new(),
            streams: Vec::new(),
            faults: Vec::new(),
            fault_min: 0,
            fault_max: rng.magnitude(MS, 6 * SEC),
            deadly_mads: if crash && rng.chance(500) { rng.between(10, 200) } else { 0 },
            active: rng.magnitude(MS, 3 * SEC),
            fresh: 4,
        };
        let long = (crash || cuts) && rng.chance(60);
        if long {
            // Longer than a connection manager repeats a request [CM-40].
            plan.active = rng.between(90 * SEC, 150 * SEC);
            plan.fault_max = plan.active;
            plan.fault_min = rng.pick(&[0, 80 * SEC]);
        }
        let count = if churn { rng.between(3, 8) } else { rng.between(1, 3) };
        for _ in 0..count {
            let conn = plan.draw_conn(rng, count, misuse, churn);
            plan.conns.push(conn);
        }
        if crash {
            plan.faults.push((FaultKind::Crash, plan.active / rng.between(1, 4) + 1));
        }
        if cuts {
            plan.faults.push((FaultKind::Cut, plan.active / rng.between(1, 4) + 1));
        }
        if cuts && rng.chance(400) {
            plan.faults.push((FaultKind::Hold, plan.active / rng.between(1, 4) + 1));
        }
        plan
    }

    /// Draws which connections have shared receive queues, and streams. `rng` is not that of the
    /// rest, so that seeds without any run as they did before there were such.
    pub(crate) fn draw_apart(&mut self, rng: &mut Rng) {
        if rng.chance(300) {
            self.conns.iter_mut().for_each(|conn| conn.shared_receives = rng.chance(500));
        }
        if rng.chance(200) {
            let streams = (0..rng.between(1, 3)).map(|_| StreamPlan::draw(rng, self));
            self.streams = streams.collect();
        }
    }

    /// Tells whether a peer may be given up although it is alive.
    pub(crate) fn hard_network(&self) -> bool {
        self.net.loss >= 50
            || self.net.queue < 20_000
            || self.faults.iter().any(|(kind, _)| *kind != FaultKind::Crash)
    }

    /// Tells whether a message can be lost, or overtake another one. A connection request that
    /// comes after its withdrawal is unknown to its sender.
    pub(crate) fn leaves_behind(&self) -> bool {
        let net = &self.net;
        net.loss + net.damage + net.jitter > 0
            || net.queue < 1 << 40
            || !self.faults.is_empty()
            || self.deadly_mads > 0
    }

    fn draw_conn(&self, rng: &mut Rng, count: u64, misuse: bool, churn: bool) -> ConnPlan {
        let from = rng.index(self.hosts.len());
        let to = (from + 1 + rng.index(self.hosts.len() - 1)) % self.hosts.len();
        let most = self.hosts[from].mtu.min(self.hosts[to].mtu);
        let mtus: Vec<Mtu> = Mtu::ALL.into_iter().filter(|mtu| *mtu <= most).collect();
        let managed = churn || rng.chance(700);
        // The connection manager uses the active side's MTU, or the connection is never made.
        let mtu = if managed { self.hosts[from].mtu } else { rng.pick(&mtus) };
        let message_max = if churn { rng.magnitude(16, 3_000) } else { rng.magnitude(64, 100_000) };
        let average = message_max / 3 + 200;
        let packets = average / mtu.bytes() as u64 + 2;
        let share = (VOLUME / average).min(PACKETS / packets).max(12) / count;
        let requests = rng.magnitude(2, share.clamp(6, 120)) as u32;
        let small = |rng: &mut Rng| rng.pick(&[1, 1, 2, 4, 16]);
        let mut ends = [None, None];
        if churn || rng.chance(150) {
            for end in &mut ends {
                if rng.chance(500) {
                    *end = Some(rng.magnitude(US, 20 * MS));
                }
            }
        }
        let burst = rng.pick(&[1, 2, 4, 16]);
        ConnPlan {
            from,
            to,
            managed,
            start: match () {
                // Some connections begin while a peer is unreachable for long.
                () if self.active > LONG => rng.below(self.active),
                () if churn => rng.magnitude(1, 50 * MS),
                () => rng.magnitude(1, MS),
            },
            mtu,
            message_max: message_max as usize,
            requests: match rng.below(10) {
                0 | 1 => [0, requests],
                2 | 3 => [requests, 0],
                _ => [requests, requests],
            },
            send_depth: rng.pick(&[2, 4, 8, 16, 64]),
            recv_depth: rng.pick(&[1, 2, 4, 8]),
            depths: [small(rng), small(rng)],
            rnr_retry: if misuse && rng.chance(600) { rng.below(7) as u8 } else { 7 },
            min_rnr_timer: rng.between(1, 20) as u8,
            psns: [psn(rng), psn(rng)],
            patience: if rng.chance(200) {
                (rng.between(6, 16) as u8, rng.between(1, 7) as u8)
            } else {
                (17, 7)
            },
            recv_delay: rng.pick(&[0, 0, 50 * US, 3 * MS]),
            short_receives: if misuse && rng.chance(300) { 60 } else { 0 },
            misuse: if misuse { rng.pick(&[0, 10, 50, 300]) } else { 0 },
            signalled: rng.pick(&[1000, 1000, 500, 100]),
            signal_all: rng.chance(250),
            one_queue: rng.chance(500),
            windows: rng.chance(500),
            gap: rng.pick(&[0, 5 * US, 100 * US, 2 * MS]),
            burst,
            reject: managed && rng.chance(if churn { 250 } else { 30 }),
            wrong_port: managed && rng.chance(if churn { 50 } else { 5 }),
            // Long enough that a peer which repeats its request is told to wait.
            decide: if rng.chance(if churn || self.net.loss + self.net.damage > 0 {
                300
            } else {
                60
            }) {
                30 * SEC
            } else {
                rng.pick(&[0, 10 * US, MS])
            },
            end_after: ends,
            pauses: rng.pick(&[0, 0, 0, 100]),
            misregister: if misuse { rng.pick(&[0, 200, 1000]) } else { 0 },
            slowly: rng.pick(&[0, 0, 20 * US, 5 * MS]),
            abrupt: ends != [None, None] && rng.chance(300),
            shared_receives: false,
            deregister_after: (misuse && rng.chance(200)).then(|| rng.magnitude(US, 5 * MS)),
        }
    }
}

fn psn(rng: &mut Rng) -> u32 {
    let any = rng.next() as u32 & 0xff_ffff;
    if rng.chance(500) { 0xff_ffff - any % 200 } else { any }
}

/// Acknowledgement delays in nanoseconds: those that drivers choose between, and others.
pub(crate) const ACK_DELAYS: [u64; 5] = [0, 20 * US, 50 * US, 50 * US, 5 * MS];

fn draw_hosts(rng: &mut Rng, network_faults: bool, narrow: bool) -> Vec<HostPlan> {
    let count = rng.pick(&[2, 2, 2, 3, 4]);
    let v6 = rng.chance(400);
    let mtus = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M1024, Mtu::M2048, Mtu::M4096, Mtu::M4096];
    let mtu = rng.pick(&mtus);
    let (differ, datagrams) = (rng.chance(100), rng.chance(if narrow { 500 } else { 250 }));
    (1..=count)
        .map(|n: u8| {
            let mtu = if differ { rng.pick(&mtus) } else { mtu };
            let gso = rng.chance(700);
            let hints = rng.pick(&[Hints::Right, Hints::Right, Hints::None, Hints::Mixed]);
            // Without right hints a strict receiver takes undamaged packets for damaged ones.
            let icrc = match rng.below(3) {
                0 if v6 || hints == Hints::Right => IcrcPolicy::Strict,
                1 if !network_faults => IcrcPolicy::Off,
                _ => IcrcPolicy::Solve,
            };
            HostPlan {
                addr: match v6 {
                    true => IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, n.into())),
                    false => IpAddr::V4(Ipv4Addr::new(10, 77, 0, n)),
                },
                mtu,
                icrc,
                gso,
                window: rng.pick(&[16, 64, 0, 240, 0]),
                hints,
                ack_delay: Duration::from_nanos(rng.pick(&ACK_DELAYS)),
                turn: rng.pick(&[0, 2 * US, 20 * US, 200 * US]),
                datagrams: if datagrams { rng.between(1, 40) as u32 } else { 0 },
                listens: Some(PORT),
                give_up: GiveUp::default(),
                look: rng.pick(&[0, 2 * US, 50 * US, 2 * MS]),
            }
        })
        .collect()
}

fn draw_net(rng: &mut Rng, network_faults: bool, narrow: bool) -> NetPlan {
    let delay = rng.magnitude(US, 5 * MS);
    let some = |rng: &mut Rng, most: u64| {
        if network_faults && rng.chance(600) { rng.magnitude(1, most) } else { 0 }
    };
    NetPlan {
        delay,
        jitter: if network_faults && rng.chance(600) { rng.magnitude(1, 4 * delay) } else { 0 },
        loss: some(rng, 200),
        repeat: some(rng, 300),
        damage: some(rng, 100),
        forge: some(rng, 50),
        any_opcode: true,
        queue: if narrow { rng.magnitude(4_000, 100_000) } else { u64::MAX / 4096 },
        per_kib: if narrow { rng.magnitude(100, 20_000) } else { 80 },
    }
}
