//! Several nodes in one folder, one for each network namespace: whose each of them is.

use bowline_host::network_namespace;

/// Whose node listens at a place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Whose {
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
    pub(crate) fn of(namespace: u64) -> Self {
        let own = network_namespace();
        if own != 0 && namespace != 0 && own != namespace { Self::Others } else { Self::Ours }
    }
}

/// The name of what a node of this network namespace has, where one of another may have the usual
/// one; without it where the kernel does not number namespaces.
pub(crate) fn numbered(name: &str) -> Option<String> {
    let namespace = network_namespace();
    (namespace != 0).then(|| format!("{name}-{namespace}"))
}
