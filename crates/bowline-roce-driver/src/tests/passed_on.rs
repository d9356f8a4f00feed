//! Tests of datagrams that another process has received for this device.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::world::{ACK, LEN, World};
use crate::config::SoftConfig;
use crate::impair::Impairments;
use crate::udp::ROCE_PORT;

#[test]
fn what_came_before_one_that_is_lost_is_answered_at_once() {
    let other = IpAddr::from([127, 77, 45, 9]);
    let impairments = Impairments::parse(&format!("loss=100%,way=in,peer={other}"), 0).unwrap();
    let mut world = World::new(45, SoftConfig { impairments, ..SoftConfig::default() });
    let here = IpAddr::from([127, 77, 45, 1]);
    for answered in 1..=10 {
        world.poll(Duration::from_millis(5));
        world.peer_writes(LEN);
        world.send(None);
        world.device.take_in_one(SocketAddr::new(other, ROCE_PORT), here, &[0; 64]);
        world.receive();
        assert_eq!(world.count(ACK), answered, "{:?}", world.came);
    }
}
