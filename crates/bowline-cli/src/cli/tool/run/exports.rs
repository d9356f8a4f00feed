//! Exports that are added to a running server, and taken away.

use bowline_ctl::Errno;
use bowline_node::disks::Export;

use super::{Mode, Refusal, Run};

/// What a node says that takes no disks.
pub(super) const CONFINED: &str = "a restricted node cannot add disks: start it with a [disks] table in its configuration file, or \
     with --no-sandbox";

impl Run<'_> {
    /// `NAME file=PATH|memory=BYTES [OPTION=VALUE..]`.
    pub(super) fn export(&mut self, name: &str) -> Result<(), Refusal> {
        let text = export_text(name, &self.request.names[1..]).map_err(Refusal::usage)?;
        let servers = self.inventory.of(Mode::Server);
        let source = match self.changeable(servers).as_slice() {
            [one] => *one,
            [] => {
                let none = self.inventory.none_here("server that accepts exports");
                return Err(Refusal::missing(none.unwrap_or_else(|| {
                    "no server that accepts exports runs here; start one with `bowline node`, or `bowline rnbd export \
                     --file NAME=PATH -I ADDRESS`"
                        .to_owned()
                })));
            }
            several => return Err(self.several("servers run", several)),
        };
        self.write(source, "/class/rnbd-server/ctl/export_device", &text).map_err(|refusal| {
            match refusal.errno {
                Errno::EEXIST => refusal.with("it has an export of this name"),
                Errno::EPERM => refusal.with(CONFINED),
                _ => refusal.with("see the output of the server"),
            }
        })
    }

    /// `NAME [force]`.
    pub(super) fn unexport(&mut self, name: &str) -> Result<(), Refusal> {
        let servers = self.inventory.of(Mode::Server);
        let mut having = self.changeable(servers);
        having.retain(|source| self.inventory.has_export(*source, name));
        let source = match having.as_slice() {
            [one] => *one,
            [] => return Err(Refusal::missing(format!("no server here has an export {name}"))),
            several => return Err(self.several(&format!("servers have {name}"), several)),
        };
        let force = if self.request.options.force { "force" } else { "normal" };
        let text = format!("{name} {force}");
        self.write(source, "/class/rnbd-server/ctl/unexport_device", &text).map_err(|refusal| {
            match refusal.errno {
                Errno::EBUSY => refusal.with(&format!(
                    "it is open, see `rnbd exports`; unmap it there, or `unexport {name} force`"
                )),
                _ => refusal,
            }
        })
    }

    /// Returns those of these processes whose exports come and go by commands.
    fn changeable(&mut self, mut servers: Vec<usize>) -> Vec<usize> {
        let file = "/class/rnbd-server/ctl/export_device";
        servers.retain(|source| self.inventory.text(*source, file).is_ok());
        servers
    }

    /// Reports that one of several processes has to be chosen.
    pub(super) fn several(&self, what: &str, sources: &[usize]) -> Refusal {
        let places = sources.iter().map(|s| self.inventory.place(*s).display().to_string());
        let places: Vec<String> = places.collect();
        Refusal::usage(format!("several {what}; choose one with --control: {}", places.join(", ")))
    }
}

/// Returns the text that adds an export to a server, which may run in another folder.
fn export_text(name: &str, words: &[String]) -> Result<String, String> {
    let absolute = |word: &String| match word.split_once('=') {
        Some((key @ ("file" | "dir"), path)) => {
            let path = std::path::absolute(path).map_err(|error| format!("{word}: {error}"))?;
            Ok(format!("{key}={}", path.display()))
        }
        _ => Ok(word.clone()),
    };
    let words = words.iter().map(absolute).collect::<Result<Vec<String>, String>>()?;
    let all: Vec<String> = [format!("name={name}")].into_iter().chain(words).collect();
    if let Some(word) = all.iter().find(|word| word.contains(char::is_whitespace)) {
        return Err(format!(
            "\"{word}\" has a blank; only [[export]] in a node's configuration can have blanks"
        ));
    }
    let text = all.join(" ");
    Export::of_words(&text)?;
    Ok(text)
}
