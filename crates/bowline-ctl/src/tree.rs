//! The tree: directories of attributes, directories and links.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{Errno, Json, Value};

/// Most links followed while resolving one path.
const HOPS_MAX: usize = 16;
/// Deepest directory that a dump looks into.
const DEPTH_MAX: usize = 32;

/// An attribute of a directory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct AttrDef {
    /// Its name, without a slash.
    pub name: &'static str,
    /// Its permission bits: 0o444 to read, 0o644 to read and write, 0o200 to write.
    pub mode: u16,
}

impl AttrDef {
    /// Reports whether the attribute has a value.
    pub fn is_readable(&self) -> bool {
        self.mode & 0o444 != 0
    }

    /// Reports whether the attribute accepts commands.
    pub fn is_writable(&self) -> bool {
        self.mode & 0o222 != 0
    }
}

/// Who waits for the result of a command.
#[derive(Debug, Default)]
pub struct Caller {
    gone: AtomicBool,
    /// Why its last command has failed, where there is more to say than an errno.
    why: Mutex<Option<String>>,
}

impl Caller {
    /// Reports whether the caller has left, so that nobody takes the result. A command that changes
    /// nothing may end then; any other goes on.
    pub fn is_gone(&self) -> bool {
        // Relaxed, as below: the flag publishes nothing but itself.
        self.gone.load(Ordering::Relaxed)
    }

    /// Tells the caller why its command fails, for people, in one line. Through files the errno
    /// alone comes back.
    pub fn explain(&self, why: String) {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    /// Takes the explanation of a command, if there is one.
    pub(crate) fn take_explanation(&self) -> Option<String> {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Notes that the caller has left.
    pub(crate) fn leave(&self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

/// Why a command has failed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Refused {
    /// The error.
    pub errno: Errno,
    /// What there is to say beyond it, in one line.
    pub why: Option<String>,
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self { errno, why: None }
    }
}

/// An object of the tree. It is found for as long as the object that it shows exists.
pub trait Node: Send + Sync {
    /// Returns the attributes of this kind of object.
    fn attrs(&self) -> &'static [AttrDef] {
        &[]
    }

    /// Returns the value of an attribute. Must not wait for long.
    ///
    /// # Errors
    ///
    /// `ENOENT` when there is no such attribute, and errors of the object.
    fn read(&self, name: &str) -> Result<Value, Errno> {
        let _ = name;
        Err(Errno::ENOENT)
    }

    /// Carries out the command that is written to an attribute: one write is one command. May take
    /// long. The value has no trailing newline.
    ///
    /// # Errors
    ///
    /// `ENOENT` when there is no such attribute, and the result of the command.
    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let _ = (name, value);
        Err(Errno::ENOENT)
    }

    /// Carries out the command that is written to an attribute, as [`write`](Self::write), and
    /// returns what it has found out. Objects whose commands answer, or end when their caller has
    /// left, override it instead of `write`; through files the result is an errno only.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    fn call(&self, name: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
        let _ = caller;
        self.write(name, value).map(|()| None)
    }

    /// Returns the directories below, by name.
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        Vec::new()
    }

    /// Returns one directory below. Objects with many override it.
    fn dir(&self, name: &str) -> Option<Arc<dyn Node>> {
        self.dirs().into_iter().find(|(known, _)| known == name).map(|(_, node)| node)
    }

    /// Returns the links here: name and target, relative to this directory.
    fn links(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A directory that only holds others.
#[derive(Default)]
pub struct Dir {
    children: Vec<(String, Arc<dyn Node>)>,
}

impl Dir {
    /// Returns an empty directory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory below.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, node: Arc<dyn Node>) -> Self {
        self.children.push((name.into(), node));
        self
    }

    /// Reports whether nothing is below.
    pub fn is_empty(&self) -> bool {
        self.children.is_empty()
    }
}

impl Node for Dir {
    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        self.children.clone()
    }

    fn dir(&self, name: &str) -> Option<Arc<dyn Node>> {
        self.children.iter().find(|(known, _)| known == name).map(|(_, node)| Arc::clone(node))
    }
}

impl fmt::Debug for Dir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.children.iter().map(|(name, _)| name)).finish()
    }
}

/// The object at a path.
#[derive(Clone)]
pub enum Found {
    /// A directory.
    Dir(Arc<dyn Node>),
    /// An attribute of a directory.
    Attr(Arc<dyn Node>, AttrDef),
    /// A link and its target.
    Link(String),
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(_) => f.write_str("Dir"),
            Self::Attr(_, def) => f.debug_tuple("Attr").field(def).finish(),
            Self::Link(target) => f.debug_tuple("Link").field(target).finish(),
        }
    }
}

/// An entry of a directory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Kind of the entry.
    pub kind: Kind,
}

/// Kind of a directory entry.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Kind {
    /// A directory.
    Dir,
    /// An attribute with these permission bits.
    Attr(u16),
    /// A link to this target.
    Link(String),
}

/// A whole tree, from its root.
///
/// Paths are names separated by slashes; `.`, `..` and repeated slashes mean the same as in a file
/// system, and no path leads out of the root.
#[derive(Clone)]
pub struct Tree {
    root: Arc<dyn Node>,
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree").finish_non_exhaustive()
    }
}

impl Tree {
    /// Returns the tree below this directory.
    pub fn new(root: Arc<dyn Node>) -> Self {
        Self { root }
    }

    /// Looks up a path; a link at its end is not followed.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`, `ELOOP`.
    pub fn lookup(&self, path: &str) -> Result<Found, Errno> {
        self.walk(path, false)
    }

    /// Looks up a path; links are followed.
    ///
    /// # Errors
    ///
    /// `ENOENT`, `ENOTDIR`, `ELOOP`.
    pub fn resolve(&self, path: &str) -> Result<Found, Errno> {
        self.walk(path, true)
    }

    fn walk(&self, path: &str, follow: bool) -> Result<Found, Errno> {
        let mut rest: VecDeque<String> = names(path).collect();
        let mut way = vec![Arc::clone(&self.root)];
        let mut hops = 0;
        while let Some(name) = rest.pop_front() {
            if name == ".." {
                if way.len() > 1 {
                    way.pop();
                }
                continue;
            }
            let here = Arc::clone(way.last().unwrap_or(&self.root));
            if let Some(node) = here.dir(&name) {
                way.push(node);
            } else if let Some(def) = here.attrs().iter().find(|def| def.name == name) {
                let found = Found::Attr(here, *def);
                return if rest.is_empty() { Ok(found) } else { Err(Errno::ENOTDIR) };
            } else if let Some((_, target)) =
                here.links().into_iter().find(|(known, _)| *known == name)
            {
                if rest.is_empty() && !follow {
                    return Ok(Found::Link(target));
                }
                hops += 1;
                if hops > HOPS_MAX {
                    return Err(Errno::ELOOP);
                }
                for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
                    rest.push_front(name);
                }
            } else {
                return Err(Errno::ENOENT);
            }
        }
        Ok(Found::Dir(way.pop().unwrap_or_else(|| Arc::clone(&self.root))))
    }

    /// Returns the entries of a directory: directories, then attributes, then links.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve); `ENOTDIR` for an attribute.
    pub fn list(&self, path: &str) -> Result<Vec<Entry>, Errno> {
        let Found::Dir(node) = self.resolve(path)? else { return Err(Errno::ENOTDIR) };
        Ok(entries(&*node))
    }

    /// Returns the value of an attribute.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve); `EISDIR` for a directory, `EACCES` for a write-only
    /// attribute, and errors of the object.
    pub fn read(&self, path: &str) -> Result<Value, Errno> {
        match self.resolve(path)? {
            Found::Attr(_, def) if !def.is_readable() => Err(Errno::EACCES),
            Found::Attr(node, def) => node.read(def.name),
            Found::Dir(_) | Found::Link(_) => Err(Errno::EISDIR),
        }
    }

    /// Carries out a command; one trailing newline of the value is removed [RS-33]. May wait for as
    /// long as the command takes.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read); `EACCES` for an attribute that cannot be written.
    pub fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        self.call(path, value, &Caller::default()).map(drop)
    }

    /// Carries out a command as [`write`](Self::write), for a caller that may leave meanwhile, and
    /// returns what it has found out; most commands find out nothing.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn call(&self, path: &str, value: &str, caller: &Caller) -> Result<Option<Value>, Errno> {
        match self.resolve(path)? {
            Found::Attr(_, def) if !def.is_writable() => Err(Errno::EACCES),
            Found::Attr(node, def) => {
                node.call(def.name, value.strip_suffix('\n').unwrap_or(value), caller)
            }
            Found::Dir(_) | Found::Link(_) => Err(Errno::EISDIR),
        }
    }

    /// Returns everything below a directory: an attribute is its value, a directory an object, a
    /// link an object with the member `link`. Attributes that only explain a command are left out,
    /// and so are documents; an attribute that cannot be read at present is an object with the
    /// member `errno`.
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub fn dump(&self, path: &str) -> Result<Json, Errno> {
        let Found::Dir(node) = self.resolve(path)? else { return Err(Errno::ENOTDIR) };
        Ok(dump(&*node, 0))
    }

    /// Returns everything below a directory as text: one line per attribute or link, sorted by
    /// path, and the lines of each attribute's value below it.
    ///
    /// ```text
    /// -rw-r--r-- /class/rtrs-client/s1/mpath_policy
    ///         | min-inflight (MI: 1)
    /// lrwxrwxrwx /class/rtrs-client/s1/subsystem -> ../../../../class/rtrs-client
    /// ```
    ///
    /// # Errors
    ///
    /// As [`list`](Self::list).
    pub fn listing(&self, path: &str) -> Result<String, Errno> {
        let Found::Dir(node) = self.resolve(path)? else { return Err(Errno::ENOTDIR) };
        let mut things = Vec::new();
        gather(&*node, path.trim_end_matches('/'), 0, &mut things);
        things.sort();
        Ok(things.into_iter().map(|(_, text)| text).collect())
    }
}

/// Adds the path and the text of every attribute and link below a directory.
fn gather(node: &dyn Node, path: &str, depth: usize, into: &mut Vec<(String, String)>) {
    for def in node.attrs() {
        let mut text = format!("-{} {path}/{}\n", permissions(def.mode), def.name);
        let value = match node.read(def.name) {
            _ if !def.is_readable() => "(takes commands only)".to_owned(),
            Ok(value) => value.to_string(),
            Err(errno) => format!("(error {}: {})", errno.0, errno.strerror()),
        };
        for line in value.strip_suffix('\n').unwrap_or(&value).split('\n') {
            text.push_str(&format!("        | {line}\n"));
        }
        into.push((format!("{path}/{}", def.name), text));
    }
    for (name, target) in node.links() {
        let path = format!("{path}/{name}");
        into.push((path.clone(), format!("lrwxrwxrwx {path} -> {target}\n")));
    }
    if depth < DEPTH_MAX {
        for (name, below) in node.dirs() {
            gather(&*below, &format!("{path}/{name}"), depth + 1, into);
        }
    }
}

fn permissions(mode: u16) -> String {
    let bit =
        |index: u32| if mode & (0o400 >> index) != 0 { b"rwx"[index as usize % 3] } else { b'-' };
    (0..9).map(|index| char::from(bit(index))).collect()
}

fn names(path: &str) -> impl Iterator<Item = String> {
    path.split('/').filter(|name| !name.is_empty() && *name != ".").map(str::to_owned)
}

fn entries(node: &dyn Node) -> Vec<Entry> {
    let mut all: Vec<Entry> =
        node.dirs().into_iter().map(|(name, _)| Entry { name, kind: Kind::Dir }).collect();
    all.extend(
        node.attrs()
            .iter()
            .map(|def| Entry { name: def.name.to_owned(), kind: Kind::Attr(def.mode) }),
    );
    all.extend(
        node.links().into_iter().map(|(name, target)| Entry { name, kind: Kind::Link(target) }),
    );
    all
}

fn dump(node: &dyn Node, depth: usize) -> Json {
    let mut members = Vec::new();
    for def in node.attrs().iter().filter(|def| def.is_readable()) {
        let value = match node.read(def.name) {
            Ok(Value::Usage(_) | Value::Document(_) | Value::Empty) => continue,
            Ok(value) => value.to_json(),
            Err(errno) => Json::Object(vec![("errno".to_owned(), Json::Int(errno.0.into()))]),
        };
        members.push((def.name.to_owned(), value));
    }
    if depth < DEPTH_MAX {
        let dirs = node.dirs().into_iter();
        members.extend(dirs.map(|(name, below)| (name, dump(&*below, depth + 1))));
    }
    let links = node.links().into_iter();
    members.extend(
        links.map(|(name, target)| {
            (name, Json::Object(vec![("link".to_owned(), Json::Text(target))]))
        }),
    );
    Json::Object(members)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::Errno;

    /// An object with a value, a command and a write-only attribute.
    #[derive(Debug, Default)]
    pub(crate) struct Toy {
        level: Mutex<i64>,
    }

    impl Node for Toy {
        fn attrs(&self) -> &'static [AttrDef] {
            &[
                AttrDef { name: "level", mode: 0o644 },
                AttrDef { name: "kind", mode: 0o444 },
                AttrDef { name: "reset", mode: 0o200 },
                AttrDef { name: "help", mode: 0o644 },
            ]
        }

        fn read(&self, name: &str) -> Result<Value, Errno> {
            match name {
                "level" => Ok(Value::Int(*self.level.lock().unwrap())),
                "kind" => Ok(Value::Text("toy".to_owned())),
                "help" => Ok(Value::Usage("Usage: echo 1 > help")),
                _ => Err(Errno::ENOENT),
            }
        }

        fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
            let mut level = self.level.lock().unwrap();
            match name {
                "level" => *level = value.parse().map_err(|_| Errno::EINVAL)?,
                "reset" if value == "1" => *level = 0,
                "reset" | "help" => return Err(Errno::EPERM),
                _ => return Err(Errno::ENOENT),
            }
            Ok(())
        }
    }

    #[derive(Debug)]
    struct Links;

    impl Node for Links {
        fn links(&self) -> Vec<(String, String)> {
            [("toy", "../devices/toy0"), ("loop", "loop"), ("out", "../../../..")]
                .map(|(name, target)| (name.to_owned(), target.to_owned()))
                .to_vec()
        }
    }

    pub(crate) fn toy_tree() -> Tree {
        let devices = Dir::new().with("toy0", Arc::new(Toy::default()));
        let root = Dir::new().with("devices", Arc::new(devices)).with("class", Arc::new(Links));
        Tree::new(Arc::new(root))
    }

    #[test]
    fn attributes_are_read_and_written_by_path() {
        let tree = toy_tree();
        assert_eq!(tree.write("/devices/toy0/level", "5\n"), Ok(()));
        assert_eq!(tree.read("devices//toy0/./level"), Ok(Value::Int(5)));
        assert_eq!(tree.write("/devices/toy0/level", "5\n\n"), Err(Errno::EINVAL));
        assert_eq!(tree.write("/devices/toy0/reset", "1"), Ok(()));
        assert_eq!(tree.read("/devices/toy0/level"), Ok(Value::Int(0)));
    }

    #[test]
    fn modes_and_kinds_are_respected() {
        let tree = toy_tree();
        assert_eq!(tree.write("/devices/toy0/kind", "x"), Err(Errno::EACCES));
        assert_eq!(tree.read("/devices/toy0/reset"), Err(Errno::EACCES));
        assert_eq!(tree.read("/devices/toy0"), Err(Errno::EISDIR));
        assert_eq!(tree.read("/devices/toy0/level/x"), Err(Errno::ENOTDIR));
        assert_eq!(tree.list("/devices/toy0/level"), Err(Errno::ENOTDIR));
        assert_eq!(tree.read("/devices/toy1/level"), Err(Errno::ENOENT));
    }

    #[test]
    fn links_are_followed_and_stay_inside() {
        let tree = toy_tree();
        assert_eq!(tree.read("/class/toy/kind"), Ok(Value::Text("toy".to_owned())));
        assert_eq!(tree.read("/class/out/devices/toy0/level"), Ok(Value::Int(0)));
        assert_eq!(tree.read("/class/loop/x"), Err(Errno::ELOOP));
        assert!(matches!(tree.lookup("/class/toy"), Ok(Found::Link(_))));
        assert!(matches!(tree.resolve("/class/toy"), Ok(Found::Dir(_))));
        assert!(matches!(tree.resolve("/../.."), Ok(Found::Dir(_))));
    }

    #[test]
    fn a_listing_shows_modes_texts_and_targets() {
        let tree = toy_tree();
        assert_eq!(
            tree.listing("/devices/toy0/").unwrap(),
            "-rw-r--r-- /devices/toy0/help\n        | Usage: echo 1 > help\n\
             -r--r--r-- /devices/toy0/kind\n        | toy\n\
             -rw-r--r-- /devices/toy0/level\n        | 0\n\
             --w------- /devices/toy0/reset\n        | (takes commands only)\n"
        );
        assert!(tree.listing("/class").unwrap().contains("lrwxrwxrwx /class/loop -> loop\n"));
    }

    #[test]
    fn a_dump_has_values_and_no_usage() {
        assert_eq!(
            toy_tree().dump("/").unwrap().to_string(),
            r#"{"devices":{"toy0":{"level":0,"kind":"toy"}},"class":{"toy":{"link":"../devices/toy0"},"loop":{"link":"loop"},"out":{"link":"../../../.."}}}"#
        );
    }
}
