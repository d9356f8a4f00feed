//! The commands of the tool.

mod exports;
mod refused;
mod stats;

use std::io::{self, IsTerminal};

use bowline_ctl::{Errno, address_text};
use bowline_node::{
    disks::{map_options, no_address, session_name},
    log,
    values::route_to,
};
use bowline_rnbd_driver::tree::MapSpec;
use serde_json::{Map, Value, json};

use super::{
    Refusal, RunOptions,
    arguments::{address, addresses, path_order, path_text, sectors},
    columns::{Mode, STORAGE, Target, all, chosen},
    format::{Cell, Format, Group, Look, csv, json, sheet, table, xml},
    grammar::{Request, Verb},
    inventory::{Inventory, Row},
};
use refused::not_mapped;

/// Carries out a parsed command.
pub(super) fn run(
    request: &Request,
    inventory: &mut Inventory,
    run_options: RunOptions<'_>,
) -> Result<(), Refusal> {
    // The requirements of map are reported where they are missing.
    if request.verb != Verb::Map
        && let Some(text) = inventory.nothing()
    {
        return Err(Refusal::missing(match request.names.first() {
            Some(name) => format!("there is no {name}: {text}"),
            None => text,
        }));
    }
    let mut run = Run { request, inventory, run_options };
    let name = |index: usize| request.names.get(index).map(String::as_str).unwrap_or_default();
    match request.verb {
        Verb::List => run.list(),
        Verb::Dump => run.dump(),
        Verb::Show => run.show(name(0)),
        Verb::Map => run.map(),
        Verb::Export => run.export(name(0)),
        Verb::Unexport => run.unexport(name(0)),
        Verb::Resize => run.resize(name(0), name(1), name(2)),
        Verb::Unmap => run.unmap(name(0)),
        Verb::Remap => run.remap(name(0)),
        Verb::Recover => run.recover(name(0)),
        Verb::Reconnect => run.reconnect(name(0)),
        Verb::Disconnect => run.disconnect(name(0)),
        Verb::Add => run.add(name(0), name(1)),
        Verb::Delete | Verb::Readd => run.delete(),
        Verb::Close => run.close(name(0), request.names.get(1).map(String::as_str)),
        Verb::Policy => run.policy(name(0), request.names.get(1).map(String::as_str)),
        Verb::Stats => run.stats(name(0)),
        Verb::Reset => run.reset(name(0)),
        Verb::Tree => run.tree(name(0)),
        Verb::Get => run.get(name(0)),
        Verb::Set => run.set(name(0), name(1)),
    }
}

struct Run<'a> {
    request: &'a Request,
    inventory: &'a mut Inventory,
    run_options: RunOptions<'a>,
}

impl Run<'_> {
    /// Returns the sides that a command applies to: those named, or those that run here.
    fn modes(&self) -> Vec<Mode> {
        match self.request.mode {
            Some(mode) => vec![mode],
            None => {
                let both = [Mode::Client, Mode::Server];
                let found: Vec<Mode> =
                    both.into_iter().filter(|m| self.inventory.has(*m)).collect();
                if found.is_empty() { both.to_vec() } else { found }
            }
        }
    }

    /// Returns how tables are drawn, by the options of the command.
    fn look(&self) -> Look {
        let options = &self.request.options;
        Look {
            unit: options.unit,
            no_tree: options.no_tree,
            no_headers: options.no_headers,
            no_totals: options.no_totals,
            colour: io::stdout().is_terminal(),
        }
    }

    /// Makes a table of one kind of objects of one side.
    fn group(&self, mode: Mode, target: Target, rows: Vec<Row>) -> Group {
        let fields = self.request.options.fields.as_ref();
        let mut columns = chosen(mode, target, fields);
        let has_failed = |row: &Row| matches!(row.item.cell("errors"), Cell::Number(1..));
        if fields.is_none() && rows.iter().any(has_failed) {
            columns.extend(all(mode, target).into_iter().filter(|(key, _)| STORAGE.contains(key)));
        }
        Group { mode, target, columns, items: rows.into_iter().map(|row| row.item).collect() }
    }

    /// Prints the tables in the format that was asked for. A terminal gets no empty ones.
    fn print(&self, groups: &[Group]) {
        let options = &self.request.options;
        match options.format {
            Format::Csv => log::text(&csv(groups, options.no_headers)),
            Format::Json => log::text(&json(groups)),
            Format::Xml => log::text(&xml(groups)),
            Format::Term => {
                let shown: Vec<&Group> = groups.iter().filter(|g| !g.items.is_empty()).collect();
                for (index, group) in shown.iter().enumerate() {
                    if shown.len() > 1 && !options.no_headers {
                        let gap = if index > 0 { "\n" } else { "" };
                        log::text(&format!("{gap}{}:\n", titled(group.name())));
                    }
                    log::text(&table(group, self.look()));
                }
            }
        }
    }

    /// Prints the objects of one kind, one to a row: devices, unless the command names another
    /// kind.
    fn list(&self) -> Result<(), Refusal> {
        let target = self.request.target.unwrap_or(Target::Device);
        let modes = self.modes();
        let groups =
            modes.into_iter().map(|m| self.group(m, target, self.inventory.shown_rows(m, target)));
        let groups: Vec<Group> = groups.collect();
        self.print(&groups);
        if self.request.options.format == Format::Term && groups.iter().all(|g| g.items.is_empty())
        {
            note!("{}", nothing(target, self.inventory));
        }
        Ok(())
    }

    /// Prints the objects of all kinds.
    fn dump(&self) -> Result<(), Refusal> {
        let targets = [Target::Device, Target::Session, Target::Path];
        let modes = self.modes();
        let groups = targets.iter().flat_map(|target| {
            modes
                .iter()
                .map(|mode| self.group(*mode, *target, self.inventory.shown_rows(*mode, *target)))
        });
        self.print(&groups.collect::<Vec<_>>());
        Ok(())
    }

    fn show(&self, name: &str) -> Result<(), Refusal> {
        let targets = match self.request.target {
            Some(target) => vec![target],
            None => vec![Target::Device, Target::Session, Target::Path],
        };
        for target in targets {
            let rows: Vec<Row> = self
                .modes()
                .into_iter()
                .flat_map(|mode| self.inventory.shown_rows(mode, target))
                .collect();
            let found = matching(rows, target, name);
            if found.is_empty() {
                continue;
            }
            let groups: Vec<Group> = found
                .into_iter()
                .map(|row| {
                    let mode = row.mode;
                    let mut group = self.group(mode, target, vec![row]);
                    if self.request.options.fields.is_none() {
                        group.columns = all(mode, target);
                    }
                    group
                })
                .collect();
            if self.request.options.format != Format::Term {
                self.print(&groups);
                return Ok(());
            }
            for (index, group) in groups.iter().enumerate() {
                if index > 0 {
                    say!("");
                }
                for item in &group.items {
                    log::text(&sheet(group, item, self.look()));
                }
            }
            return Ok(());
        }
        Err(no_such(self.request.target, name))
    }

    /// Returns the only object of this name.
    fn unique(&self, target: Target, name: &str, modes: &[Mode]) -> Result<Row, Refusal> {
        let rows = modes.iter().flat_map(|mode| self.inventory.rows(*mode, target)).collect();
        let mut found = matching(rows, target, name);
        match (found.pop(), found.is_empty()) {
            (Some(row), true) => Ok(row),
            (Some(last), false) => {
                found.push(last);
                Err(self.ambiguous(target, name, &found))
            }
            (None, _) => Err(no_such(Some(target), name)),
        }
    }

    /// Reports which objects a name matches, and how to select one of them.
    fn ambiguous(&self, target: Target, name: &str, found: &[Row]) -> Refusal {
        let differ = |of: &dyn Fn(&Row) -> String| found.iter().any(|row| of(row) != of(&found[0]));
        // One machine may have both ends, and several processes.
        let sides = differ(&|row| row.mode.name().to_owned());
        let places = differ(&|row| row.source.to_string());
        let candidate = |row: &Row| {
            let session = row.item.text("sessname");
            let known = match target {
                Target::Device => {
                    format!("{} of session {session}", row.item.text(unique_key(row.mode)))
                }
                Target::Session => session.to_owned(),
                Target::Path => format!("{} of session {session}", row.item.text("pathname")),
            };
            let side = if sides { format!("{} ", row.mode.name()) } else { String::new() };
            let place = self.inventory.place(row.source).display();
            let place = if places { format!(" at {place}") } else { String::new() };
            format!("{side}{known}{place}")
        };
        let how = match (sides, places) {
            (true, _) => "put `client` or `server` first",
            (false, true) => "choose one with --control",
            (false, false) => "say which",
        };
        let all: Vec<String> = found.iter().map(candidate).collect();
        Refusal::usage(format!(
            "{name} is the name of several {}s; {how}: {}",
            target.name(),
            all.join(", ")
        ))
    }

    /// Returns the only object of the client side with this name.
    fn client(&self, target: Target, name: &str) -> Result<Row, Refusal> {
        self.unique(target, name, &[Mode::Client])
    }

    /// Writes to a file of the tree, which carries out a command. With `--debug` or `--simulate`
    /// prints the write as a line of shell; with the latter, that is all.
    fn write(&mut self, source: usize, path: &str, value: &str) -> Result<(), Refusal> {
        if self.run_options.debug || self.run_options.simulate {
            say!("echo '{value}' > {}", self.inventory.shown(source, path));
        }
        if self.run_options.simulate {
            return Ok(());
        }
        self.inventory.write(source, path, value)
    }

    /// Returns the paths of a session.
    fn paths_of(&self, session: &Row) -> Vec<Row> {
        let mut paths = self.inventory.rows(session.mode, Target::Path);
        let name = session.item.text("sessname");
        paths.retain(|path| path.source == session.source && path.item.text("sessname") == name);
        paths
    }

    /// `DEVICE from SERVER [PATH..] [ro|rw|migration] [OPTION=VALUE..]`.
    fn map(&mut self) -> Result<(), Refusal> {
        let names = &self.request.names;
        let (device, from, server) = (&names[0], &names[1], &names[2]);
        if !from.eq_ignore_ascii_case("from") {
            return Err(Refusal::usage(format!("\"{from}\" where \"from\" is expected")));
        }
        let (own, mut arguments): (Vec<String>, Vec<String>) =
            names[3..].iter().cloned().partition(|word| word.contains('='));
        // Mistakes are reported before anything is sent.
        map_options(&own).map_err(Refusal::usage)?;
        let own: String = own.iter().map(|word| format!(" {word}")).collect();
        let access = match arguments.last().map(|word| word.to_ascii_lowercase()).as_deref() {
            Some(word @ ("ro" | "rw" | "migration")) => {
                arguments.pop();
                format!(" access_mode={word}")
            }
            _ => String::new(),
        };
        let paths: Vec<String> =
            arguments.iter().map(|word| path_order(word)).collect::<Result<_, _>>()?;
        let known =
            matching(self.inventory.rows(Mode::Client, Target::Session), Target::Session, server);
        let (source, session, paths) = match known.first() {
            Some(row) => (row.source, row.item.text("sessname").to_owned(), paths),
            None => {
                let clients = self.inventory.of(Mode::Client);
                let source = self.only_client(&clients)?;
                if paths.is_empty() {
                    let address = address(server)?;
                    // Without a route, connecting reports the error.
                    let from = route_to(address).ok().map(|from| from.ip);
                    (source, session_name(server, from), vec![format!("ip:{address}")])
                } else {
                    no_address(server)?;
                    (source, server.clone(), paths)
                }
            }
        };
        let paths: String = paths.iter().map(|path| format!(" path={path}")).collect();
        let text = format!("sessname={session} device_path={device}{paths}{access}{own}");
        // Same rules as in the process: mistakes are reported before anything is sent. Only the
        // process knows whether it has InfiniBand.
        match text.parse::<MapSpec>() {
            Ok(_) | Err(Errno::ENODEV) => {}
            Err(errno) => return Err(Refusal::new(errno, format!("\"{text}\" cannot be mapped"))),
        }
        let rows = self.inventory.rows(Mode::Client, Target::Device);
        let done = self.write(source, "/class/rnbd-client/ctl/map_device", &text);
        done.map_err(|refusal| match refusal.errno {
            Errno::EPERM => refusal.with(exports::CONFINED),
            Errno::EEXIST => {
                let is_it = |row: &&Row| {
                    let of = |key| row.item.text(key);
                    row.source == source
                        && (of("sessname"), of("mapping_path")) == (&session, device)
                };
                let name =
                    rows.iter().find(is_it).map(|row| format!(" as {}", row.item.text("devname")));
                Refusal::new(
                    refusal.errno,
                    format!(
                        "{device} of session {session} is mapped already{}; see `rnbd list`",
                        name.unwrap_or_default()
                    ),
                )
            }
            _ => not_mapped(refusal, device, server),
        })
    }

    /// Returns the only process of these that maps devices; fails if there is none or several.
    fn only_client(&self, clients: &[usize]) -> Result<usize, Refusal> {
        match clients {
            [one] => Ok(*one),
            [] => Err(Refusal::missing(self.inventory.none_here("client").unwrap_or_else(|| {
                "no client runs here; start one with `bowline node`, or `bowline rnbd map DEVICE --from \
                 SERVER --path ADDRESS --nbd SOCKET`"
                    .to_owned()
            }))),
            several => Err(self.several("clients run", several)),
        }
    }

    fn resize(&mut self, device: &str, size: &str, unit: &str) -> Result<(), Refusal> {
        let sectors = sectors(size, unit)?;
        let row = self.client(Target::Device, device)?;
        let force = self.request.options.force;
        let value = if force { format!("{sectors} force") } else { sectors.to_string() };
        let done = self.write(row.source, &format!("{}/resize", row.at), &value);
        done.map_err(|refusal| match refusal.errno {
            Errno::EBUSY => {
                let (name, given) = (row.item.text("devname"), format!("{size} {unit}"));
                let given = given.trim_end();
                refusal.with(&format!(
                    "what is behind the new end would be out of reach; close its users, or `resize \
                     {name} {given} force`"
                ))
            }
            _ => refusal,
        })
    }

    fn unmap(&mut self, device: &str) -> Result<(), Refusal> {
        let row = self.client(Target::Device, device)?;
        let value = if self.request.options.force { "force" } else { "normal" };
        let done = self.write(row.source, &format!("{}/unmap_device", row.at), value);
        done.map_err(|refusal| match refusal.errno {
            Errno::EBUSY => {
                let name = row.item.text("devname");
                refusal.with(&format!("in use; close its users, or `unmap {name} force`"))
            }
            _ => refusal,
        })
    }

    fn remap(&mut self, name: &str) -> Result<(), Refusal> {
        let targets: &[Target] = match &self.request.target {
            Some(target) => std::slice::from_ref(target),
            None => &[Target::Device, Target::Session],
        };
        let (session, target) = self.first(name, &[Mode::Client], targets)?;
        if target == Target::Device {
            let done = self.write(session.source, &format!("{}/remap_device", session.at), "1");
            return done.map_err(|refusal| match refusal.errno {
                Errno::EALREADY => {
                    let session = session.item.text("sessname");
                    refusal.with(&format!(
                        "it is open, so there is nothing to do; `remap {session} force` unmaps all devices of \
                         its session and maps them again"
                    ))
                }
                _ => {
                    let of = |key| session.item.text(key);
                    not_mapped(refusal, of("mapping_path"), of("sessname"))
                }
            });
        }
        let session_name = session.item.text("sessname").to_owned();
        let mut devices = self.inventory.rows(Mode::Client, Target::Device);
        devices.retain(|row| {
            row.source == session.source && row.item.text("sessname") == session_name
        });
        if !self.request.options.force {
            devices.retain(|row| row.item.text("state") == "closed");
            return self.each(&devices, |row| (format!("{}/remap_device", row.at), "1".to_owned()));
        }
        self.remap_all(&session, devices)
    }

    /// Unmaps all these devices of a session, and maps them again. The session ends with its last
    /// device, so its paths are given again.
    fn remap_all(&mut self, session: &Row, devices: Vec<Row>) -> Result<(), Refusal> {
        let name = session.item.text("sessname");
        let paths = self.paths_of(session);
        let paths: Vec<&str> = paths.iter().map(|path| path.item.text("pathname")).collect();
        let options: String = paths.iter().map(|path| format!(" path={path}")).collect();
        let value = |row: &Row| {
            let (device, access) = (row.item.text("mapping_path"), row.item.text("access_mode"));
            format!("sessname={name} device_path={device}{options} access_mode={access}")
        };
        // A device that could not be mapped again is not unmapped.
        for row in &devices {
            value(row).parse::<MapSpec>().map_err(|errno| {
                let text = format!("{} paths cannot be given to map_device", paths.len());
                Refusal::new(errno, text)
            })?;
        }
        let mut result = Ok(());
        let mut unmapped = Vec::new();
        for row in devices {
            match self.write(row.source, &format!("{}/unmap_device", row.at), "force") {
                Ok(()) => unmapped.push(row),
                Err(refusal) => result = result.and(Err(refusal)),
            }
        }
        let mut lost = Vec::new();
        for row in &unmapped {
            let device = row.item.text("mapping_path");
            let access = row.item.text("access_mode");
            let mapped = self.write(row.source, "/class/rnbd-client/ctl/map_device", &value(row));
            if mapped.is_err() {
                lost.push(format!("`rnbd map {device} from {name} {} {access}`", paths.join(" ")));
            }
            result = result.and(mapped.map_err(|refusal| not_mapped(refusal, device, name)));
        }
        result.map_err(|refusal| match lost.as_slice() {
            [] => refusal,
            lost => {
                let arguments = lost.join(", ");
                let text = format!(
                    "{refusal}; disks that are unmapped now can be mapped with {arguments}, or, if the client has \
                     ended (as without --stay), with the command that started it"
                );
                Refusal::new(refusal.errno, text)
            }
        })
    }

    /// Writes to an attribute of each row; all are tried, and the first error is returned.
    fn each(
        &mut self,
        rows: &[Row],
        what: impl Fn(&Row) -> (String, String),
    ) -> Result<(), Refusal> {
        let mut result = Ok(());
        for row in rows {
            let (path, value) = what(row);
            let done = self.write(row.source, &path, &value);
            result = result.and(done);
        }
        result
    }

    fn recover(&mut self, name: &str) -> Result<(), Refusal> {
        let every = name.eq_ignore_ascii_case("all");
        let (target, rows) = match self.request.target {
            target if every => {
                let target = target.unwrap_or(Target::Session);
                (target, self.inventory.rows(Mode::Client, target))
            }
            Some(target) => (target, vec![self.client(target, name)?]),
            None => {
                let all = [Target::Session, Target::Device, Target::Path];
                let (row, target) = self.first(name, &[Mode::Client], &all)?;
                (target, vec![row])
            }
        };
        if target == Target::Device {
            let closed: Vec<Row> =
                rows.into_iter().filter(|row| row.item.text("state") == "closed").collect();
            return self.each(&closed, |row| (format!("{}/remap_device", row.at), "1".to_owned()));
        }
        let paths: Vec<Row> = match target {
            Target::Path => rows.clone(),
            _ => rows.iter().flat_map(|row| self.paths_of(row)).collect(),
        };
        let down: Vec<Row> =
            paths.iter().filter(|row| row.item.text("state") != "connected").cloned().collect();
        let mut result = self.each(&down, |row| (format!("{}/reconnect", row.at), "1".to_owned()));
        if !self.request.options.add_missing || target == Target::Path {
            return result;
        }
        for session in &rows {
            let added = self.add_missing(session);
            result = result.and(added);
        }
        result
    }

    /// Adds paths to the addresses of a session's server that have none.
    fn add_missing(&mut self, session: &Row) -> Result<(), Refusal> {
        let known: Vec<String> =
            self.paths_of(session).iter().map(|p| p.item.text("dst_addr").to_owned()).collect();
        let all = addresses(session.item.text("srvname")).map_err(|refusal| {
            let name = session.item.text("sessname");
            let text = format!(
                "no addresses for session {name}: they are looked up with the part after the @ of its name, as in \
                 {}: {refusal}",
                session_name("SERVER", None)
            );
            Refusal::new(refusal.errno, text)
        })?;
        let wanted = all.into_iter().map(address_text);
        for address in wanted.filter(|address| !known.contains(address)) {
            self.write(session.source, &format!("{}/add_path", session.at), &address)?;
        }
        Ok(())
    }

    /// Returns the only object of this name, of the first kind that has one.
    fn first(
        &self,
        name: &str,
        modes: &[Mode],
        targets: &[Target],
    ) -> Result<(Row, Target), Refusal> {
        for target in targets {
            match self.unique(*target, name, modes) {
                Err(refusal) if refusal.errno == Errno::ENOENT => {}
                found => return Ok((found?, *target)),
            }
        }
        Err(no_such(None, name))
    }

    fn session_or_path(&self, name: &str, modes: &[Mode]) -> Result<(Row, Target), Refusal> {
        match self.request.target {
            Some(target) => Ok((self.unique(target, name, modes)?, target)),
            None => self.first(name, modes, &[Target::Session, Target::Path]),
        }
    }

    fn reconnect(&mut self, name: &str) -> Result<(), Refusal> {
        let (row, target) = self.session_or_path(name, &[Mode::Client])?;
        let paths = if target == Target::Session { self.paths_of(&row) } else { vec![row] };
        if target == Target::Session {
            self.each(&paths, |row| (format!("{}/disconnect", row.at), "1".to_owned()))?;
        }
        self.each(&paths, |row| (format!("{}/reconnect", row.at), "1".to_owned()))
    }

    fn disconnect(&mut self, name: &str) -> Result<(), Refusal> {
        let modes = self.modes();
        let (row, target) = match self.request.target {
            Some(Target::Session) => {
                let of_server = self.unique(Target::Session, name, &[Mode::Server]);
                let row = of_server
                    .or_else(|missing| self.client(Target::Session, name).map_err(|_| missing))?;
                (row, Target::Session)
            }
            _ => self.session_or_path(name, &modes)?,
        };
        if target == Target::Session && row.mode == Mode::Client {
            return Err(Refusal::usage(format!(
                "{name} is a client session, which ends when its devices are unmapped; disconnect its paths one by \
                 one instead: {}",
                self.paths_of(&row)
                    .iter()
                    .map(|path| path.item.text("pathname"))
                    .collect::<Vec<_>>()
                    .join(", ")
            )));
        }
        let paths = if target == Target::Session { self.paths_of(&row) } else { vec![row] };
        self.each(&paths, |row| (format!("{}/disconnect", row.at), "1".to_owned()))
    }

    fn add(&mut self, session: &str, path: &str) -> Result<(), Refusal> {
        let row = self.client(Target::Session, session)?;
        self.write(row.source, &format!("{}/add_path", row.at), &path_order(path)?)
    }

    /// `delete [SESSION] PATH`, and `readd`.
    fn delete(&mut self) -> Result<(), Refusal> {
        let row = match self.request.names.as_slice() {
            [session, path] => {
                let session = self.client(Target::Session, session)?;
                let found = matching(self.paths_of(&session), Target::Path, path);
                match found.as_slice() {
                    [row] => row.clone(),
                    [] => return Err(no_such(Some(Target::Path), path)),
                    several => return Err(self.ambiguous(Target::Path, path, several)),
                }
            }
            [path] => self.client(Target::Path, path)?,
            _ => return Err(Refusal::usage("a path is missing")),
        };
        self.write(row.source, &format!("{}/remove_path", row.at), "1")?;
        if self.request.verb == Verb::Delete {
            return Ok(());
        }
        let session = row.at.split("/paths/").next().unwrap_or_default();
        self.write(row.source, &format!("{session}/add_path"), row.item.text("pathname"))
    }

    fn close(&mut self, device: &str, session: Option<&str>) -> Result<(), Refusal> {
        let mut rows = self.inventory.rows(Mode::Server, Target::Device);
        let found = match session {
            // The name is resolved among the session's open devices: other sessions may use it for
            // another device.
            Some(session) => {
                rows.retain(|row| row.item.text("sessname") == session);
                matching(rows, Target::Device, device)
            }
            None => {
                rows.retain(|row| DEVICE_KEYS.iter().any(|key| row.item.text(key) == device));
                rows
            }
        };
        match found.len() {
            0 => Err(Refusal::missing(format!("no session has {device} open"))),
            1 => self.each(&found, |row| (format!("{}/force_close", row.at), "1".to_owned())),
            _ if self.request.options.force => {
                self.each(&found, |row| (format!("{}/force_close", row.at), "1".to_owned()))
            }
            _ => {
                let sessions = found.iter().map(|row| row.item.text("sessname"));
                let sessions: Vec<&str> = sessions.collect();
                Err(Refusal::usage(format!(
                    "several sessions have {device} open; name one, or use force for all: {}",
                    sessions.join(", ")
                )))
            }
        }
    }

    fn policy(&mut self, session: &str, policy: Option<&str>) -> Result<(), Refusal> {
        let row = self.client(Target::Session, session)?;
        let path = format!("{}/mpath_policy", row.at);
        match policy {
            Some(policy) => {
                self.write(row.source, &path, policy).map_err(|refusal| match refusal.errno {
                    Errno::EINVAL => Refusal::usage(format!(
                        "\"{policy}\" is not a policy: choose {}",
                        expected(&path, None).unwrap_or_default()
                    )),
                    _ => refusal,
                })
            }
            None => {
                let text = self.inventory.text(row.source, &path)?;
                if self.request.options.format == Format::Json {
                    let session = row.item.text("sessname");
                    say!("{}", json!({ "session": session, "policy": text.trim_end() }));
                } else {
                    log::text(&text);
                }
                Ok(())
            }
        }
    }

    /// Returns the paths that a name matches on all sides of the command: both ends of a session
    /// may be on this machine.
    fn paths_named(&self, name: &str) -> Result<Vec<Row>, Refusal> {
        let mut paths = Vec::new();
        let mut result = Ok(());
        for mode in self.modes() {
            match self.session_or_path(name, &[mode]) {
                Ok((row, Target::Session)) => paths.extend(self.paths_of(&row)),
                Ok((row, _)) => paths.push(row),
                Err(refusal) => result = Err(refusal),
            }
        }
        if paths.is_empty() { result.map(|()| paths) } else { Ok(paths) }
    }

    /// Prints the trees of all processes, or a folder of them: an object with a member for each
    /// process, named after its socket.
    fn tree(&self, folder: &str) -> Result<(), Refusal> {
        let mut parts = Map::new();
        for source in self.inventory.all(self.request.mode) {
            let Some(part) = self.inventory.part(source, folder) else { continue };
            let value = serde_json::from_str(&part.to_string()).unwrap_or_default();
            parts.insert(self.inventory.place(source).display().to_string(), value);
        }
        if parts.is_empty() && !folder.is_empty() {
            return Err(Refusal::of(Errno::ENOENT, &absolute(folder)));
        }
        say!("{}", serde_json::to_string_pretty(&Value::Object(parts)).unwrap_or_default());
        Ok(())
    }

    /// Returns the process that has a file, with what reading the file gives.
    fn find_file(&mut self, path: &str) -> Result<(usize, Result<String, Refusal>), Refusal> {
        let mut missing = Refusal::missing(format!("nothing here has {path}"));
        let mut found = Vec::new();
        for source in self.inventory.all(self.request.mode) {
            match self.inventory.text(source, path) {
                Err(refusal) if matches!(refusal.errno, Errno::ENOENT | Errno::ENOTDIR) => {
                    missing = refusal;
                }
                text => found.push((source, text)),
            }
        }
        let last = found.pop().ok_or(missing)?;
        if found.is_empty() {
            return Ok(last);
        }
        found.push(last);
        let places = found.iter().map(|(s, _)| self.inventory.place(*s).display().to_string());
        let places: Vec<String> = places.collect();
        Err(Refusal::usage(format!(
            "several have {path}; choose one with --control: {}",
            places.join(", ")
        )))
    }

    fn get(&mut self, file: &str) -> Result<(), Refusal> {
        let (_, text) = self.find_file(&absolute(file))?;
        let text = text?;
        if self.request.options.format == Format::Json {
            let text = text.trim_end();
            let value = text.parse::<i64>().map_or_else(|_| Value::from(text), Value::from);
            say!("{}", json!({ "file": absolute(file), "value": value }));
        } else {
            log::content(&text);
        }
        Ok(())
    }

    fn set(&mut self, file: &str, value: &str) -> Result<(), Refusal> {
        let path = absolute(file);
        let (source, text) = self.find_file(&path)?;
        match text {
            // A write-only file exists although it cannot be read.
            Err(refusal) if refusal.errno != Errno::EACCES => return Err(refusal),
            _ => {}
        }
        let now = text.ok();
        self.write(source, &path, value).map_err(|refusal| match refusal.errno {
            Errno::EINVAL => match expected(&path, now.as_deref()) {
                Some(what) => refusal.with(&format!("\"{value}\" is not {what}")),
                None => refusal,
            },
            _ => refusal,
        })
    }
}

/// Says that there are no objects of a kind, and where that is so.
pub(super) fn nothing(target: Target, inventory: &Inventory) -> String {
    let places: Vec<String> = inventory.places().map(|place| place.display().to_string()).collect();
    let places = places.join(", ");
    match target {
        Target::Device => format!("no disks are mapped or exported at {places}"),
        _ => format!("no {}s at {places}", target.name()),
    }
}

/// Says what a file takes: by its name, else by what it says of itself when it is read.
fn expected(path: &str, now: Option<&str>) -> Option<String> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let known = match name {
        "max_reconnect_attempts" => Some("between -1, which is for ever, and 9999"),
        "mpath_policy" => Some("round-robin, min-inflight or min-latency"),
        // Their short names have other meanings elsewhere.
        _ if path.contains("/net/rds/") || name.starts_with("net.rds.") => {
            bowline_rds::sysctl_range(name)
        }
        _ => None,
    };
    if let Some(known) = known {
        return Some(known.to_owned());
    }
    let now = now?.trim();
    match now.strip_prefix("Usage: ") {
        Some(usage) => Some(format!("as in: {usage}")),
        None if now.parse::<i64>().is_ok() => Some(format!("a number that it takes; it is {now}")),
        None => None,
    }
}

/// Reports that no object has this name.
fn no_such(target: Option<Target>, name: &str) -> Refusal {
    let kind = target.map(|target| format!("{} ", target.name())).unwrap_or_default();
    let is_path = target == Some(Target::Session) && path_text(name).is_ok();
    let hint = if is_path { "; for a path, put `path` before the word" } else { "" };
    Refusal::missing(format!("there is no {kind}{name} here{hint}"))
}

fn absolute(path: &str) -> String {
    format!("/{}", path.trim_matches('/'))
}

/// Returns the name with a capital letter.
fn titled(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().collect::<String>() + letters.as_str()
    })
}

/// Returns the field that identifies a device within its session.
const fn unique_key(mode: Mode) -> &'static str {
    match mode {
        Mode::Client => "devname",
        Mode::Server => "mapping_path",
    }
}

/// Fields with names of a device: local, and on the server.
const DEVICE_KEYS: [&str; 3] = ["devname", "devpath", "mapping_path"];

/// Returns the objects that a name matches: for a device its local name or its name on the server,
/// for a session its name or its server, for a path its name or its server's address.
fn matching(rows: Vec<Row>, target: Target, name: &str) -> Vec<Row> {
    let keys: &[&str] = match target {
        Target::Device => &DEVICE_KEYS,
        Target::Session => &["sessname", "hostname", "srvname"],
        Target::Path => &["pathname", "dst_addr"],
    };
    // Addresses may be spelled in several ways.
    let spelled = |text: &str| match target {
        Target::Path => path_text(text).unwrap_or_else(|_| text.to_owned()),
        _ => text.to_owned(),
    };
    let name = spelled(name);
    for key in keys {
        let found: Vec<Row> =
            rows.iter().filter(|row| spelled(row.item.text(key)) == name).cloned().collect();
        if !found.is_empty() {
            return found;
        }
    }
    Vec::new()
}
