//! One device for two users: each has the events of its own connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::{PATIENCE, ip, open, unconnected};
use bowline_verbs::{CmEvent, Device, Error, SharedDevice};

const NONE: Duration = Duration::from_millis(50);

#[test]
fn each_user_has_the_events_of_its_listeners_and_connections() {
    let (near, far) = (open(ip(42, 1)), open(ip(42, 2)));
    let users: [SharedDevice; 2] = SharedDevice::split(Arc::clone(&near) as Arc<dyn Device>);
    for (user, port) in users.iter().zip([7000, 7001]) {
        user.listen(SocketAddr::new(ip(42, 1), port)).unwrap();
    }
    // The other user asks all the time, and gets nothing of this.
    for (mine, port) in [(0, 7000), (1, 7001), (0, 7000)] {
        thread::scope(|scope| {
            let other = &users[1 - mine];
            let idle = scope.spawn(move || other.cm_event(4 * NONE));
            let side = unconnected(&far, 4096);
            let to = SocketAddr::new(ip(42, 1), port);
            far.connect(None, to, &side.param()).unwrap();
            let event = users[mine].cm_event(PATIENCE).unwrap();
            let CmEvent::ConnectRequest { id, request } = event else { panic!("{event:?}") };
            assert_eq!(request.local.port(), port);
            let here = unconnected(&near, 4096);
            users[mine].accept(id, &here.param()).unwrap();
            assert!(matches!(far.cm_event(PATIENCE), Ok(CmEvent::Established { .. })));
            let event = users[mine].cm_event(PATIENCE).unwrap();
            assert!(matches!(event, CmEvent::Established { .. }) && event.id() == id, "{event:?}");
            assert_eq!(idle.join().unwrap(), Err(Error::TimedOut));
            users[mine].destroy_id(id).unwrap();
            let event = far.cm_event(PATIENCE);
            assert!(matches!(event, Ok(CmEvent::Disconnected { .. })), "{event:?}");
            while far.cm_event(NONE).is_ok() {}
        });
    }
    // One that connects has the answer.
    let side = unconnected(&near, 4096);
    let to = SocketAddr::new(ip(42, 2), 7002);
    let id = users[1].connect(None, to, &side.param()).unwrap();
    assert_eq!(users[0].cm_event(NONE), Err(Error::TimedOut));
    let event = users[1].cm_event(PATIENCE).unwrap();
    assert!(matches!(event, CmEvent::Rejected { .. }) && event.id() == id, "nobody listens");
}
