//! `rnbd exports`: what the servers of this machine serve, one line for each export with its size
//! and everybody who has it open; in the tables of the other commands each open has a row.

use bowline_ctl::Json;
use bowline_node::log::shown;
use serde_json::{Value, json};

use super::{Place, Refusal, columns::Mode, inventory::Inventory};

/// Bytes of the unit of sizes in the tree.
const SECTOR: u64 = 512;

/// Prints a line for each export: size, whether it is read-only, who has it open; or an array of
/// JSON. With `verbose` it says where it looks.
pub(super) fn run(place: Place<'_>, json: bool, verbose: bool) -> Result<(), Refusal> {
    let inventory = Inventory::collect(place)?;
    if let Some(nothing) = inventory.nothing() {
        return Err(Refusal::missing(nothing));
    }
    if verbose {
        inventory.places().for_each(|place| note!("reading {}", place.display()));
    }
    let mut all = Vec::new();
    for source in inventory.of(Mode::Server) {
        for (name, export) in inventory.exports(source) {
            let at = format!("/class/rnbd-server/ctl/devices/{name}/sessions");
            let sessions = inventory.part(source, &at);
            if json {
                all.push(object(name, export, sessions));
            } else {
                say!("{}", line(name, export, sessions));
                all.push(Value::Null);
            }
        }
    }
    if json {
        say!("{}", Value::Array(all));
    } else if all.is_empty() {
        let places = inventory.places().map(|place| place.display().to_string());
        note!("nothing is exported at {}", places.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

/// What is known of an export.
fn object(name: &str, export: &Json, sessions: Option<&Json>) -> Value {
    let number = |name| export.member(name).and_then(Json::as_u64).unwrap_or(0);
    let sessions = sessions.map_or(&[][..], Json::members).iter();
    let opens: Vec<Value> = sessions
        .map(|(session, open)| {
            let access = open.member("access_mode").and_then(Json::as_str);
            json!({ "session": session, "access_mode": access })
        })
        .collect();
    let health = export.member("bowline");
    let failed = health.and_then(|health| health.member("failed_requests")).and_then(Json::as_u64);
    let last = health.and_then(|health| health.member("last_failure")).and_then(Json::as_str);
    let last = last.and_then(failure);
    json!({
        "name": name.replace('!', "/"),
        "bytes": number("size") * SECTOR,
        "read_only": number("ro") != 0,
        "open_by": opens,
        "failed_requests": failed,
        "last_failure": last,
    })
}

/// The last failure of storage from its text in the tree; `None` if there was none.
fn failure(text: &str) -> Option<Value> {
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let [operation, errno, at, state] = words[..] else { return None };
    Some(json!({
        "operation": operation,
        "errno": errno,
        "unix_seconds": at.parse::<u64>().ok()?,
        "state": state,
    }))
}

fn line(name: &str, export: &Json, sessions: Option<&Json>) -> String {
    let number = |name| export.member(name).and_then(Json::as_u64).unwrap_or(0);
    let (bytes, mode) = (number("size") * SECTOR, if number("ro") == 0 { "" } else { " ro" });
    let sessions = sessions.map_or(&[][..], Json::members).iter();
    let opens = sessions.map(|(session, open)| {
        let access = open.member("access_mode").and_then(Json::as_str).unwrap_or("?");
        format!("{} ({access})", shown(session))
    });
    let opens: Vec<String> = opens.collect();
    let opens = if opens.is_empty() { "nobody".to_owned() } else { opens.join(", ") };
    // A directory cannot have a slash in its name.
    let name = name.replace('!', "/");
    let health = export.member("bowline");
    let last = health.and_then(|health| health.member("last_failure")).and_then(Json::as_str);
    let failing = last.filter(|last| last.ends_with(" failing")).map_or(String::new(), |last| {
        let errno = last.split(' ').nth(1).unwrap_or_default();
        let failed = health.and_then(|health| health.member("failed_requests"));
        let failed = failed.and_then(Json::as_u64).unwrap_or(0);
        format!(" failing: {errno}, {failed} requests")
    });
    format!("export {} bytes={bytes}{mode} open by {opens}{failing}", shown(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failure_is_an_object() {
        assert_eq!(failure("none"), None);
        assert_eq!(
            failure("write EIO 1700000000 failing"),
            Some(json!({
                "operation": "write",
                "errno": "EIO",
                "unix_seconds": 1_700_000_000,
                "state": "failing",
            }))
        );
    }
}
