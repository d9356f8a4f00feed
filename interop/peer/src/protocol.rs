//! The job protocol: one command per line in, one JSON object per event out.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::str::FromStr;

/// A command: the job it is about, what to do, and its arguments.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) id: String,
    pub(crate) verb: String,
    pub(crate) args: Args,
}

/// `key=value` arguments.
#[derive(Debug, Default, Clone)]
pub(crate) struct Args(HashMap<String, String>);

impl Command {
    /// Reads a line; `None` when it has no verb.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (id, verb) = (words.next()?.to_owned(), words.next()?.to_owned());
        let args = words.filter_map(|w| w.split_once('='));
        let args = Args(args.map(|(k, v)| (k.to_owned(), v.to_owned())).collect());
        Some(Self { id, verb, args })
    }
}

impl Args {
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// An argument that has to be there.
    pub(crate) fn need<T: FromStr>(&self, key: &str) -> Result<T, String> {
        self.opt(key)?.ok_or_else(|| format!("{key}= is missing"))
    }

    pub(crate) fn or<T: FromStr>(&self, key: &str, default: T) -> Result<T, String> {
        Ok(self.opt(key)?.unwrap_or(default))
    }

    fn opt<T: FromStr>(&self, key: &str) -> Result<Option<T>, String> {
        let read = |v: &String| v.parse().map_err(|_| format!("{key}={v} cannot be read"));
        self.0.get(key).map(read).transpose()
    }
}

/// An event under construction.
#[derive(Debug)]
pub(crate) struct Event(String);

impl Event {
    pub(crate) fn new(id: &str, name: &str) -> Self {
        Self("{".into()).text("id", id).text("ev", name)
    }

    pub(crate) fn text(self, key: &str, value: &str) -> Self {
        let quoted = quote(value);
        self.raw(key, &quoted)
    }

    pub(crate) fn num(self, key: &str, value: u64) -> Self {
        self.raw(key, &value.to_string())
    }

    pub(crate) fn float(self, key: &str, value: f64) -> Self {
        self.raw(key, &format!("{value:.6}"))
    }

    /// A map of numbers.
    pub(crate) fn map<K: AsRef<str>>(
        self,
        key: &str,
        items: impl IntoIterator<Item = (K, u64)>,
    ) -> Self {
        let items: Vec<String> =
            items.into_iter().map(|(k, v)| format!("{}: {v}", quote(k.as_ref()))).collect();
        self.raw(key, &format!("{{{}}}", items.join(", ")))
    }

    /// A value that is JSON already.
    pub(crate) fn raw(mut self, key: &str, json: &str) -> Self {
        let comma = if self.0.len() > 1 { ", " } else { "" };
        let _ = write!(self.0, "{comma}{}: {json}", quote(key));
        self
    }

    /// Writes the event; a closed output ends the process, as nobody listens.
    pub(crate) fn emit(mut self) {
        self.0.push_str("}\n");
        let mut out = std::io::stdout().lock();
        if out.write_all(self.0.as_bytes()).and_then(|()| out.flush()).is_err() {
            std::process::exit(3);
        }
    }
}

/// A JSON string.
pub(crate) fn quote(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_an_id_a_verb_and_arguments() {
        let c = Command::parse("j1 send to=10.0.0.1:5 n=3").unwrap();
        assert_eq!((c.id.as_str(), c.verb.as_str()), ("j1", "send"));
        assert_eq!(c.args.need::<u64>("n"), Ok(3));
        assert_eq!(c.args.or("seed", 9u32), Ok(9));
        assert!(c.args.need::<u64>("to").is_err() && c.args.need::<u64>("x").is_err());
        assert!(Command::parse("alone").is_none());
    }

    #[test]
    fn events_are_json() {
        let e = Event::new("j", "done").text("a", "x\"\n\\").map("m", [("k", 1)]).float("f", 0.5);
        let json = r#"{"id": "j", "ev": "done", "a": "x\"\u000a\\", "m": {"k": 1}, "f": 0.500000"#;
        assert_eq!(e.0, json);
    }
}
