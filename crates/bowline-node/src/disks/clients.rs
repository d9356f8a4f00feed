//! What clients of a server do, as lines of its log.

use std::net::IpAddr;

use bowline_rnbd::server::{ClientChange, ClientEv};

/// Returns a line for each event, and one for `missed` events that are not among them. `from` tells
/// where a session comes from, if it is still there.
pub(super) fn lines(
    events: &[ClientEv],
    missed: u64,
    from: impl Fn(&str) -> Option<IpAddr>,
) -> Vec<String> {
    let left_out = (missed > 0).then(|| format!("clients: {missed} more events, not logged"));
    left_out.into_iter().chain(events.iter().map(|event| line(event, &from))).collect()
}

fn line(event: &ClientEv, from: impl Fn(&str) -> Option<IpAddr>) -> String {
    let session = &event.session_name;
    // Clients choose the bytes of names.
    let shown = |name: &[u8]| String::from_utf8_lossy(name).escape_debug().to_string();
    let what = match &event.change {
        ClientChange::Connected => {
            let from = from(session).map_or(String::new(), |address| format!(" from {address}"));
            format!("connected{from}")
        }
        ClientChange::Disconnected => "disconnected".to_owned(),
        ClientChange::Opened(name, access) => format!("opened {} {access}", shown(name)),
        ClientChange::Refused(name, access, errno) => {
            format!("may not open {} {access}: {}", shown(name), errno.strerror())
        }
        ClientChange::Closed(name) => format!("closed {}", shown(name)),
        other => format!("{other:?}"),
    };
    format!("session {session}: {what}")
}

#[cfg(test)]
mod tests {
    use bowline_rnbd::Errno;
    use bowline_wire::rnbd::Access;

    use super::*;

    #[test]
    fn a_client_cannot_forge_lines() {
        let name = b"a\nsession root: connected\xff".to_vec();
        let change = ClientChange::Refused(name, Access::Rw, Errno::ENOENT);
        let event = ClientEv { session_name: "s".to_owned(), change };
        let all = lines(&[event], 3, |_| None);
        assert_eq!(all[0], "clients: 3 more events, not logged");
        let told = "session s: may not open a\\nsession root: connected\u{fffd} rw: ";
        assert_eq!(all[1], format!("{told}No such file or directory"));
        assert_eq!(all.len(), 2);
    }
}
