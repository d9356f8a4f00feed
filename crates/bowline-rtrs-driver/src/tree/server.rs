//! The server's side of the tree.

use std::sync::Arc;

use bowline_ctl::{AttrDef, Errno, Node, PathSpec, Value, address_text};
use bowline_rtrs::PathId;

use super::{
    Files, Listed, ServerPath, ServerSession, ServerSessions, Stats, UEVENT, command, must_be_one,
    network, show, text,
};

/// Returns the directory of server sessions, one device per session [RS-40].
pub fn server_node(server: Arc<dyn ServerSessions>, files: Files) -> Arc<dyn Node> {
    Arc::new(Listed(move || {
        let all = server.sessions().into_iter();
        all.map(|session| {
            let node = SessionNode { server: Arc::clone(&server), session: session.clone(), files };
            let node: Arc<dyn Node> = Arc::new(node);
            (session.name, node)
        })
        .collect()
    }))
}

struct SessionNode {
    server: Arc<dyn ServerSessions>,
    session: ServerSession,
    files: Files,
}

impl Node for SessionNode {
    fn attrs(&self) -> &'static [AttrDef] {
        &[UEVENT]
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        if name == UEVENT.name { Ok(Value::Empty) } else { Err(Errno::ENOENT) }
    }

    /// Accepts the write without effect: no device has a listener for uevents, as on the client's
    /// side.
    fn write(&self, _: &str, _: &str) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let paths = self.session.paths.iter().map(|path| {
            let (server, files) = (Arc::clone(&self.server), self.files);
            let node: Arc<dyn Node> = Arc::new(PathNode { server, id: path.id, files });
            (PathSpec::new(Some(path.client), path.server).to_string(), node)
        });
        let paths: Vec<_> = paths.collect();
        vec![("paths".to_owned(), Arc::new(Listed(move || paths.clone())))]
    }
}

struct PathNode {
    server: Arc<dyn ServerSessions>,
    id: PathId,
    files: Files,
}

fn find(server: &dyn ServerSessions, id: PathId) -> Result<ServerPath, Errno> {
    let mut paths = server.sessions().into_iter().flat_map(|session| session.paths);
    paths.find(|path| path.id == id).ok_or(Errno::ENODEV)
}

impl Node for PathNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const {
            &[
                show("hca_name"),
                show("hca_port"),
                show("src_addr"),
                show("dst_addr"),
                command("disconnect"),
            ]
        }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        let path = find(&*self.server, self.id)?;
        match name {
            "hca_name" => text(path.device),
            "hca_port" => Ok(Value::Uint(path.port.into())),
            "src_addr" => text(address_text(path.client)),
            "dst_addr" => text(address_text(path.server)),
            "disconnect" => Ok(Value::Usage("Usage: echo 1 > disconnect")),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        must_be_one(value)?;
        if name == "disconnect" { self.server.disconnect(self.id) } else { Err(Errno::ENOENT) }
    }

    fn dirs(&self) -> Vec<(String, Arc<dyn Node>)> {
        let node = StatsNode { server: Arc::clone(&self.server), id: self.id, files: self.files };
        vec![("stats".to_owned(), Arc::new(node))]
    }
}

struct StatsNode {
    server: Arc<dyn ServerSessions>,
    id: PathId,
    files: Files,
}

impl Node for StatsNode {
    fn attrs(&self) -> &'static [AttrDef] {
        const ALL: [AttrDef; 4] =
            [command("rdma"), command("reset_all"), command("wc_completion"), show("network")];
        match self.files {
            Files::All if find(&*self.server, self.id).is_ok_and(|path| path.network.is_some()) => {
                &ALL
            }
            Files::All => ALL.split_last().map_or(&[], |(_, others)| others),
            Files::Linux612 => ALL.split_at(1).0,
        }
    }

    /// Older kernels print the requests in flight as a fifth number; 6.12 does not [RS-43].
    fn read(&self, name: &str) -> Result<Value, Errno> {
        let path = find(&*self.server, self.id)?;
        match name {
            "rdma" => {
                let mut words = vec![
                    ("reads", path.io.reads),
                    ("read_bytes", path.io.read_bytes),
                    ("writes", path.io.writes),
                    ("write_bytes", path.io.write_bytes),
                ];
                if self.files == Files::All {
                    words.push(("inflight", path.io.inflight));
                }
                Ok(Value::Words(words))
            }
            "reset_all" => Ok(Value::Usage("echo 1 to reset all statistics")),
            "network" => path.network.as_ref().map(network).ok_or(Errno::ENOENT),
            "wc_completion" => Ok(Value::Words(vec![
                ("max", path.completions.max),
                ("total", path.completions.total),
                ("calls", path.completions.calls),
            ])),
            _ => Err(Errno::ENOENT),
        }
    }

    fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let what = match name {
            "reset_all" if value == "0" => Stats::All,
            _ => {
                must_be_one(value)?;
                match name {
                    "rdma" => Stats::Rdma,
                    "wc_completion" => Stats::Completions,
                    "reset_all" => Stats::All,
                    _ => return Err(Errno::ENOENT),
                }
            }
        };
        self.server.reset(self.id, what);
        Ok(())
    }
}

/// Settings fixed when a server starts: the parameters of module rtrs_server [RS-29].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ServerParameters {
    /// Keys are invalid while a request is being handled.
    pub always_invalidate: bool,
    /// Size of a chunk in bytes.
    pub max_chunk_size: u32,
    /// Number of chunks of a session.
    pub sess_queue_depth: u16,
}

impl Node for ServerParameters {
    fn attrs(&self) -> &'static [AttrDef] {
        const { &[show("always_invalidate"), show("max_chunk_size"), show("sess_queue_depth")] }
    }

    fn read(&self, name: &str) -> Result<Value, Errno> {
        match name {
            "always_invalidate" => text(if self.always_invalidate { "Y" } else { "N" }),
            "max_chunk_size" => Ok(Value::Uint(self.max_chunk_size.into())),
            "sess_queue_depth" => Ok(Value::Uint(self.sess_queue_depth.into())),
            _ => Err(Errno::ENOENT),
        }
    }
}
