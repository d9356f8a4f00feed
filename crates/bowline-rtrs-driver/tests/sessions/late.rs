//! Requests that begin when others have ended, which no completion shows.

use crate::common;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::common::drowsy::Drowsy;
use crate::common::{Slow, at, device, eventually, ip};
use bowline_roce_driver::SoftDevice;
use bowline_rtrs_driver::client::{PermitKind, Session, SessionBuilder, Wait};
use bowline_rtrs_driver::server::{Server, ServerConfig};
use bowline_rtrs_driver::{Dir, Engine, EngineConfig, HbConfig, PORT};
use bowline_verbs::Device;

/// Wakes the threads that sleep on a device, at the end of a test.
struct Alarm(Arc<SoftDevice>);

impl Drop for Alarm {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// [RS-8], [RS-9]: a request that has moved to another path waits at the server until its first
/// copy has ended. It begins then, also at an idle server whose threads sleep.
#[test]
fn a_moved_request_begins_when_the_first_one_is_over() {
    const NET: u8 = 206;
    let theirs = device(&[ip(NET, 101), ip(NET, 102)]);
    let drowsy = Arc::new(Drowsy(Arc::clone(&theirs)));
    let server_engine = Engine::new(vec![drowsy], EngineConfig::default()).unwrap();
    let _alarm = Alarm(theirs);
    let slow = Arc::new(Slow::default());
    let anywhere = [SocketAddr::new(IpAddr::from([0, 0, 0, 0]), PORT)];
    // Nothing wakes the server's thread.
    let never = Duration::from_secs(3600);
    let heartbeat = HbConfig { interval: never, probe_interval: never, ..HbConfig::default() };
    let config = ServerConfig { heartbeat, ..ServerConfig::default() };
    let server = Server::open(&server_engine, &anywhere, config, Arc::clone(&slow) as _).unwrap();
    for round in 0..3 {
        let ours = [1, 2].map(|host| device(&[ip(NET, host)]));
        let devices = ours.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
        let engine = Engine::new(devices.collect(), EngineConfig::default()).unwrap();
        let builder = SessionBuilder::new(&format!("late{round}")).unwrap();
        let paths = [1, 2].map(|host| (Some(ip(NET, host)), ip(NET, 100 + host)));
        let session = Session::open(&engine, builder.paths(&paths).heartbeat(heartbeat)).unwrap();
        let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
        let call = session.call_async(Dir::Read, &permit, &at(0), &[]);
        let first = slow.one();
        let busy = session.paths().iter().position(|path| path.inflight == 1).unwrap();
        ours[busy].close();
        eventually("it has moved", || server.counters().requests_waited == round + 1);
        eventually("its path is gone", || server.sessions()[0].paths.len() == 1);
        server.respond(&mut std::iter::once((first.op, 0, None)));
        let second = slow.one();
        server.respond(&mut std::iter::once((second.op, 0, None)));
        common::tasks::block_on(call).unwrap();
        drop(permit);
        session.close();
        engine.close();
        eventually("the session is gone", || server.sessions().is_empty());
    }
}
