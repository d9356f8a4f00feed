//! Reports paths that are lost and come back.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::mpsc::{self, Receiver},
};

use bowline_rtrs_driver::{
    PathId,
    client::{PathEv, PathState},
};
use bowline_verbs::Error;

use crate::log::stamp;

/// The state of the paths of sessions.
#[derive(Debug)]
pub struct Watch {
    events: Receiver<(String, PathEv)>,
    /// Paths that have been connected: whether they still are.
    paths: BTreeMap<String, BTreeMap<PathId, bool>>,
}

/// Makes a watch, and the callback for events of paths, which does not block.
pub fn new() -> (impl Fn(&str, PathEv) + Send + Sync + 'static, Watch) {
    let (told, events) = mpsc::channel();
    let tell = move |session: &str, event| {
        // The receiver is gone when the command ends.
        let _ = told.send((session.to_owned(), event));
    };
    (tell, Watch { events, paths: BTreeMap::new() })
}

impl Watch {
    /// Prints changes of paths; `why` returns what keeps packets from going from one address to
    /// another, if known.
    pub fn report(&mut self, why: impl Fn(IpAddr, IpAddr) -> Option<Error>) {
        while let Ok((session, event)) = self.events.try_recv() {
            if let Some(line) = self.line(&session, &event, &why) {
                note_of_peer!("{}{line}", stamp());
            }
        }
    }

    /// Returns the line for an event. Paths closed by a command and failed attempts are not
    /// reported.
    fn line(
        &mut self,
        session: &str,
        event: &PathEv,
        why: impl Fn(IpAddr, IpAddr) -> Option<Error>,
    ) -> Option<String> {
        let paths = self.paths.entry(session.to_owned()).or_default();
        let was = paths.get(&event.id).copied();
        let what = match event.state {
            PathState::Connected => {
                paths.insert(event.id, true);
                (was == Some(false)).then_some("back")
            }
            PathState::Reconnecting => {
                was.and_then(|_| paths.insert(event.id, false));
                (was == Some(true)).then_some("lost")
            }
            PathState::Closed if was == Some(false) => Some("given up"),
            PathState::Closed | PathState::Dead => {
                paths.remove(&event.id);
                None
            }
            PathState::Connecting | PathState::ConnectingErr | PathState::Closing => None,
        }?;
        let (up, all) = (paths.values().filter(|up| **up).count(), paths.len());
        let (src, dst) = (event.src.ip(), event.dst.ip());
        let why = if what == "back" { None } else { why(src, dst) };
        let why = why.map_or(String::new(), |fault| format!(": {fault}"));
        Some(format!("session {session}: path {src} to {dst} {what}, {up} of {all} connected{why}"))
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn lost_paths_are_told_of_once_until_they_are_back() {
        use PathState::{
            Closed, Closing, Connected, Connecting, ConnectingErr, Dead, Reconnecting,
        };
        let (_, mut watch) = new();
        let mut tell = |slot, states: &[PathState]| -> Vec<String> {
            let id = PathId { slot, generation: 0 };
            let addr = |net| SocketAddr::from(([10, 0, net, slot as u8], 1234));
            let told = states.iter().filter_map(|state| {
                let event = PathEv::new(id, addr(1), addr(2), *state);
                watch.line("disks", &event, |_, _| None)
            });
            told.collect()
        };
        let nothing: [&str; 0] = [];
        assert_eq!(tell(1, &[Connected]), nothing);
        assert_eq!(tell(2, &[Connected]), nothing);
        let lost = tell(2, &[Reconnecting, Connecting, ConnectingErr, Reconnecting, Connecting]);
        assert_eq!(lost, ["session disks: path 10.0.1.2 to 10.0.2.2 lost, 1 of 2 connected"]);
        let back = tell(2, &[Connected]);
        assert_eq!(back, ["session disks: path 10.0.1.2 to 10.0.2.2 back, 2 of 2 connected"]);
        assert_eq!(tell(2, &[Closing, Closed, Dead]), nothing, "on order");
        let over = tell(1, &[Reconnecting, Closing, Closed]);
        assert_eq!(over[1], "session disks: path 10.0.1.1 to 10.0.2.1 given up, 0 of 1 connected");
        let again = tell(1, &[Reconnecting, Connected, Closing, Closed, Dead]);
        assert_eq!(again, ["session disks: path 10.0.1.1 to 10.0.2.1 back, 1 of 1 connected"]);
        assert_eq!(tell(3, &[Connecting, ConnectingErr, Reconnecting, Connected]), nothing);
    }
    #[test]
    fn the_reason_is_told_where_it_is_known() {
        let (_, mut watch) = new();
        let addr = |host| SocketAddr::from(([10, 0, 0, host], 1234));
        let (src, dst) = (addr(1), addr(2));
        let why = |from: IpAddr, to: IpAddr| {
            assert_eq!((from, to), (src.ip(), dst.ip()));
            Some(Error::System { what: "sending".to_owned(), errno: bowline_base::Errno(101) })
        };
        let mut tell = |state| {
            let event = PathEv::new(PathId { slot: 1, generation: 0 }, src, dst, state);
            watch.line("disks", &event, why)
        };
        assert_eq!(tell(PathState::Connected), None);
        let lost = tell(PathState::Reconnecting).unwrap();
        assert!(
            lost.ends_with(
                "lost, 0 of 1 connected: sending: Network is unreachable (os error 101)"
            )
        );
        assert!(tell(PathState::Connected).unwrap().ends_with("back, 1 of 1 connected"));
    }
}
