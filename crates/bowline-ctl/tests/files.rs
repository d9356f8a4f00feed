//! A tree served as files: what cat and echo see.

#![cfg(feature = "fuse")]

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU8, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use bowline_ctl::{AttrDef, Dir, Errno, Node, Sys, Tree, Value, fusefs};

use bowline_testkit::skipped;

/// A session whose `add_path` waits until the test releases it.
struct Session {
    added: Mutex<Vec<String>>,
    gate: Mutex<mpsc::Receiver<()>>,
}

impl Node for Session {
    fn attrs(&self) -> &'static [AttrDef] {
        &[
            AttrDef { name: "add_path", mode: 0o644 },
            AttrDef { name: "state", mode: 0o444 },
            AttrDef { name: "empty", mode: 0o444 },
        ]
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "add_path" => Ok(Value::Usage("Usage: echo <address> > add_path")),
            "state" => Ok(Value::Text(format!("{} paths", self.added.lock().unwrap().len()))),
            "empty" => Ok(Value::Empty),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, _: &str, value: &str) -> Result<(), Errno> {
        match value {
            "wait" => self.gate.lock().unwrap().recv().map_err(|_| Errno::EINVAL)?,
            "" => return Err(Errno::EINVAL),
            _ => {}
        }
        let mut added = self.added.lock().unwrap();
        if added.iter().any(|known| known == value) {
            return Err(Errno::EEXIST);
        }
        added.push(value.to_owned());
        Ok(())
    }
}

/// Mounts, or reports why the test is skipped (`None`).
fn mounted(name: &str, tree: Tree) -> Option<(fusefs::Mount, PathBuf)> {
    let dir = std::env::temp_dir().join(format!("bowline-files-{}-{name}", std::process::id()));
    match fusefs::mount(tree, &dir) {
        Ok(mount) => Some((mount, dir)),
        Err(error) => {
            skipped::without_fuse(error);
            let _ = fs::remove_dir(&dir);
            None
        }
    }
}

fn errno(result: io::Result<impl Sized>) -> Option<Errno> {
    result.err().and_then(|error| error.raw_os_error().map(Errno))
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    // As the shell's `echo text > path`: O_TRUNC, one write.
    fs::OpenOptions::new().write(true).truncate(true).open(path)?.write_all(text.as_bytes())
}

#[test]
fn cat_and_echo_work_and_errors_are_those_of_the_command() {
    let (open, gate) = mpsc::channel();
    let session = Arc::new(Session { added: Mutex::default(), gate: Mutex::new(gate) });
    let tree = Sys::new().class("rtrs-client", Arc::new(Dir::new().with("s1", session))).tree();
    let Some((mount, dir)) = mounted("echo", tree) else { return };
    let here = dir.join("class/rtrs-client/s1");

    assert_eq!(fs::read_link(&here).unwrap(), Path::new("../../devices/virtual/rtrs-client/s1"));
    let mut names: Vec<_> =
        fs::read_dir(&here).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["add_path", "empty", "state", "subsystem"]);
    assert_eq!(fs::read_to_string(here.join("state")).unwrap(), "0 paths\n");
    assert_eq!(fs::read_to_string(here.join("empty")).unwrap(), "");
    assert_eq!(
        fs::read_to_string(here.join("add_path")).unwrap(),
        "Usage: echo <address> > add_path\n"
    );

    write(&here.join("add_path"), "ip:10.0.0.1\n").unwrap();
    assert_eq!(fs::read_to_string(here.join("state")).unwrap(), "1 paths\n");
    assert_eq!(errno(write(&here.join("add_path"), "ip:10.0.0.1")), Some(Errno::EEXIST));
    assert_eq!(errno(write(&here.join("add_path"), "\n")), Some(Errno::EINVAL));
    assert_eq!(errno(write(&here.join("state"), "1")), Some(Errno::EACCES));
    assert_eq!(errno(write(&here.join("add_path"), &"x".repeat(5000))), Some(Errno::EINVAL));
    assert_eq!(errno(fs::read(here.join("nothing"))), Some(Errno::ENOENT));

    // As in sysfs: entries cannot be created, renamed or removed.
    let state = here.join("state");
    assert_eq!(errno(fs::create_dir(here.join("new"))), Some(Errno::EPERM));
    assert_eq!(errno(fs::rename(&state, here.join("new"))), Some(Errno::EPERM));
    assert_eq!(errno(fs::remove_file(&state)), Some(Errno::EPERM));

    // A command that waits blocks no other access.
    let waiting = {
        let path = here.join("add_path");
        thread::spawn(move || write(&path, "wait\n"))
    };
    thread::sleep(Duration::from_millis(50));
    assert_eq!(fs::read_to_string(here.join("state")).unwrap(), "1 paths\n");
    open.send(()).unwrap();
    waiting.join().unwrap().unwrap();
    assert_eq!(fs::read_to_string(here.join("state")).unwrap(), "2 paths\n");

    drop(mount);
    assert!(!here.exists());
    fs::remove_dir(&dir).unwrap();
}

#[test]
fn a_tree_with_somebody_in_it_goes_away_all_the_same() {
    let session = Session { added: Mutex::default(), gate: Mutex::new(mpsc::channel().1) };
    let tree = Tree::new(Arc::new(Dir::new().with("s1", Arc::new(session))));
    let Some((mount, dir)) = mounted("busy", tree) else { return };
    // A process with its working directory in the mount.
    let mut inside =
        Command::new("sleep").arg("60").current_dir(dir.join("s1")).spawn().expect("sleep runs");
    let file = fs::File::open(dir.join("s1/state")).unwrap();
    drop(mount);
    let left = fs::read_dir(&dir).map(Iterator::count);
    inside.kill().unwrap();
    inside.wait().unwrap();
    drop(file);
    // The folder is empty, and not a dead mount.
    assert_eq!(left.map_err(|error| error.to_string()), Ok(0));
    fs::remove_dir(&dir).unwrap();
}

/// A document longer than one read, of a different letter each time it is produced.
#[derive(Default)]
struct Long(AtomicU8);

const LONG: usize = 1_000_000;

impl Node for Long {
    fn attrs(&self) -> &'static [AttrDef] {
        &[AttrDef { name: "info", mode: 0o444 }]
    }

    fn read(&self, _: &str) -> Result<Value, Errno> {
        let letter = char::from(b'a' + self.0.fetch_add(1, Ordering::Relaxed) % 26);
        Ok(Value::Document(letter.to_string().repeat(LONG)))
    }
}

#[test]
fn a_long_document_is_of_one_moment() {
    let tree = Tree::new(Arc::new(Dir::new().with("node", Arc::new(Long::default()))));
    let Some((mount, dir)) = mounted("long", tree) else { return };
    let file = dir.join("node/info");
    let mut last = String::new();
    for _ in 0..3 {
        let text = fs::read_to_string(&file).unwrap();
        assert_eq!(text.len(), LONG + 1);
        let first = &text[..1];
        assert_eq!(text.trim_end().trim_matches(first.chars().next().unwrap()), "");
        assert_ne!(first, last, "each that opens it gets it anew");
        last = first.to_owned();
    }
    drop(mount);
    fs::remove_dir(&dir).unwrap();
}
