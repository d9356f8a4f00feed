//! Tests of congestion marks on real sockets: data leave as ECT(0), a mark is answered by a
//! notification, and so is an overflow of the receive buffer [CC-5], [CC-6], [CC-9].

use std::time::Instant;

use bowline_base::clock;
use bowline_roce::{Config, Congestion};
use bowline_verbs::Device;

use super::world::{ACK, LEN, PATIENCE, World};
use crate::config::SoftConfig;

const CNP: u8 = 0x81;
/// Types of service: marks are not taken, are taken, and one is set.
const NOT_ECT: u8 = 0;
const ECT: u8 = 2;
const CE: u8 = 3;

fn world(net: u8, congestion: Congestion, socket_buffer: usize) -> World {
    let core = Config { congestion, ..Config::default() };
    World::new(net, SoftConfig { core, socket_buffer, ..SoftConfig::default() })
}

/// tests [CC-6] [HDR-14]
#[test]
fn a_mark_is_answered_by_a_notification_and_nothing_else_is() {
    let mut world = world(40, Congestion::Delay, 1 << 20);
    for tos in [NOT_ECT, ECT] {
        world.peer_writes(LEN);
        world.peer_is_done(Some(tos));
        assert_eq!((world.count(CNP), world.device.counters().rx_marked), (0, 0), "{tos}");
    }
    let start = Instant::now();
    for _ in 0..100 {
        world.peer_writes(LEN);
        world.peer_is_done(Some(CE));
    }
    let intervals = start.elapsed().as_micros() as usize / 50;
    let (marked, notified) = (world.device.counters().rx_marked, world.count(CNP));
    eprintln!("{marked} marked, {notified} notifications in {intervals} times 50 us");
    assert!(marked >= 100 && notified >= 1 && notified <= intervals + 1);
    assert_eq!(world.device.counters().tx_cnp, notified as u64);
    assert!(world.came.iter().all(|(opcode, tos)| *opcode != CNP || *tos == NOT_ECT));
    // What the notification is for.
    assert_eq!(world.peer.paths().next().map(|path| path.cnps_received), Some(notified as u64));
    assert_eq!(world.device.paths()[0].cnps_sent, notified as u64);
}

/// tests [CC-5]
#[test]
fn data_leave_with_room_for_a_mark_and_acknowledgements_do_not() {
    for (net, congestion, data) in
        [(41, Congestion::Delay, ECT), (42, Congestion::Fixed(64), NOT_ECT)]
    {
        let mut world = world(net, congestion, 1 << 20);
        for len in [1, 1024, LEN] {
            world.device_writes(len);
            let done = world.device_done + 1;
            world.until(None, |world| world.device_done == done);
        }
        assert!(world.came.len() >= 10, "{:?}", world.came);
        assert!(world.came.iter().all(|(_, tos)| *tos == data), "{:?}", world.came);
        world.came.clear();
        for _ in 0..50 {
            world.peer_writes(LEN);
            world.peer_is_done(None);
        }
        assert!(world.count(ACK) >= 50);
        assert!(world.came.iter().all(|(_, tos)| *tos == NOT_ECT), "{:?}", world.came);
    }
}

/// tests [CC-9]
#[test]
fn an_overflow_is_counted_and_told_to_peers_that_take_marks() {
    for (net, tos) in [(43, NOT_ECT), (44, ECT)] {
        let mut world = world(net, Congestion::Delay, 4096);
        world.peer_writes(1024);
        assert!(world.peer.poll_transmit(clock::now(), &mut world.burst));
        let (packet, to) = (world.burst.bytes.clone(), world.burst.to);
        let start = Instant::now();
        let told = |world: &World| {
            let lost = world.device.stats().receive_overflows > 0;
            lost && (tos == NOT_ECT || world.device.counters().tx_cnp > 0)
        };
        // The same datagram again and again is answered by acknowledgements.
        while !told(&world) {
            for _ in 0..100 {
                world.socket.send(to, tos, packet.len(), &packet).unwrap();
            }
            world.receive();
            assert!(start.elapsed() < PATIENCE, "{:?}", world.device.stats());
        }
        world.peer_is_done(Some(tos));
        world.until(Some(tos), |w| w.count(CNP) as u64 == w.device.counters().tx_cnp);
        let (marked, notified) = (world.device.counters().rx_marked, world.count(CNP));
        eprintln!("{:?}, {notified} notifications", world.device.stats());
        assert_eq!((marked > 0, notified > 0), (tos == ECT, tos == ECT), "type of service {tos}");
    }
}
