//! `rnbd exports`: what the servers of this machine serve, one line for each export with its size
//! and everybody who has it open; in the tables of the other commands each open has a row.

use bowline_ctl::Json;
use bowline_node::log::shown;

use super::{Place, Refusal, columns::Mode, inventory::Inventory};

/// Prints a line for each export: size, whether it is read-only, who has it open.
pub(super) fn run(place: Place<'_>) -> Result<(), Refusal> {
    let inventory = Inventory::collect(place)?;
    if let Some(nothing) = inventory.nothing() {
        return Err(Refusal::missing(nothing));
    }
    for source in inventory.of(Mode::Server) {
        for (name, export) in inventory.exports(source) {
            let at = format!("/class/rnbd-server/ctl/devices/{name}/sessions");
            say!("{}", line(name, export, inventory.part(source, &at)));
        }
    }
    Ok(())
}

fn line(name: &str, export: &Json, sessions: Option<&Json>) -> String {
    const SECTOR: u64 = 512;
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
