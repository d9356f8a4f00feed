//! Several nodes in one folder, one for each network namespace: whose each of them is.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Dir, Errno, Json, Node, Value};
use bowline_host::network_namespace;

/// Whose node listens at a place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Whose {
    /// That of this process's network namespace, or one that does not tell: of an older version, or
    /// on a kernel that does not.
    Ours,
    /// That of another one.
    Others,
    /// It stands still, is being replaced, or is about to start.
    Unknown,
}

impl Whose {
    /// Whose a node is that says this of its namespace.
    pub fn of(namespace: u64) -> Self {
        let own = network_namespace();
        if own != 0 && namespace != 0 && own != namespace { Self::Others } else { Self::Ours }
    }

    /// Whose a process is that serves this tree, if [`proc`] is in it.
    pub fn of_tree(tree: &Json) -> Self {
        let found = PLACE.iter().try_fold(tree, |tree, name| tree.member(name));
        Self::of(found.and_then(Json::as_u64).unwrap_or_default())
    }
}

/// Where the tree of a process tells its network namespace.
const PLACE: [&str; 3] = ["proc", "self", NAME];
const NAME: &str = "network_namespace";

/// What a process that serves disks, or has mapped some, tells of itself in its tree.
pub fn proc() -> Arc<dyn Node> {
    let [_, of_process, _] = PLACE;
    Arc::new(Dir::new().with(of_process, Arc::new(Process(network_namespace()))))
}

struct Process(u64);

impl Node for Process {
    fn attrs(&self) -> &'static [AttrDef] {
        &[AttrDef { name: NAME, mode: 0o444 }]
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        if name == NAME { Ok(Value::Uint(self.0)) } else { Err(Errno::ENOENT) }
    }
}

/// The name of what a node of this network namespace has, where one of another may have the usual
/// one; without it where the kernel does not number namespaces.
pub fn numbered(name: &str) -> Option<String> {
    let namespace = network_namespace();
    (namespace != 0).then(|| format!("{name}-{namespace}"))
}
