//! Jobs about the implementation as a whole: info, sysctl, cut.

use super::{Ended, Job};
use crate::protocol::quote;

impl Job {
    /// Counters that are not 0, and the TCP connections.
    pub(super) fn info(&self) -> Ended {
        let info = self.backend.info()?;
        let tcp: Vec<String> = info
            .tcp
            .iter()
            .map(|(l, p)| {
                let (li, pi) = (quote(&l.ip().to_string()), quote(&p.ip().to_string()));
                format!("[{li}, {}, {pi}, {}]", l.port(), p.port())
            })
            .collect();
        let links: Vec<String> =
            info.links.iter().map(|(path, n, bytes)| format!("[{path}, {n}, {bytes}]")).collect();
        let detail: Vec<String> = info.detail.iter().map(|d| quote(d)).collect();
        Ok(self
            .event("done")
            .raw("links", &format!("[{}]", links.join(", ")))
            .raw("detail", &format!("[{}]", detail.join(", ")))
            .map("counters", info.counters.into_iter().filter(|(_, v)| *v != 0))
            .raw("tcp", &format!("[{}]", tcp.join(", ")))
            .num("queued", info.queued as u64)
            .map("driver", info.driver))
    }

    /// Reads a setting, or writes it when `value=` is given.
    pub(super) fn sysctl(&self) -> Ended {
        let name: String = self.args.need("name")?;
        let value = match self.args.text("value") {
            Some(_) => Some(self.args.need("value")?),
            None => None,
        };
        let now = self.backend.sysctl(&name, value)?;
        Ok(self.event("done").text("value", &now.to_string()))
    }

    /// Cuts all connections, or those with `peer=`, without a word.
    pub(super) fn cut(&self) -> Ended {
        let peer = match self.args.text("peer") {
            Some(_) => Some(self.args.need("peer")?),
            None => None,
        };
        Ok(self.event("done").num("connections", self.backend.cut(peer)? as u64))
    }
}
