//! Changes of paths in the log of a program, by the feature `tracing`. Everything is told with no
//! lock held, since what listens is the program's.

use bowline_base::{RateLimit, clock};
use bowline_verbs::catch_callback_panic;
use bowline_wire::rtrs::SessionName;

use crate::client;
use crate::server;

/// Limit of what clients can cause in the log.
pub(crate) const LIMIT: RateLimit = RateLimit::per_second(20);

/// Tells the new state of a client's path.
pub(crate) fn client_path(event: &client::PathEv) {
    use client::PathState;
    let client::PathEv { src, dst, state, .. } = event;
    catch_callback_panic(|| match state {
        PathState::Connected => {
            tracing::info!(target: "bowline::rtrs", %src, %dst, "path connected");
        }
        PathState::Reconnecting => {
            tracing::warn!(target: "bowline::rtrs", %src, %dst, "path lost");
        }
        state => tracing::debug!(target: "bowline::rtrs", %src, %dst, ?state, "path"),
    });
}

/// Tells that a client's session has lost its last path, or has one again.
pub(crate) fn client_link(event: client::LinkEv) {
    catch_callback_panic(|| match event {
        client::LinkEv::Reconnected => {
            tracing::info!(target: "bowline::rtrs", "session has a path again");
        }
        client::LinkEv::Disconnected => {
            tracing::warn!(target: "bowline::rtrs", "session has lost its last path");
        }
    });
}

/// What a server has to tell once it holds no lock.
#[derive(Default)]
pub(crate) struct Told {
    paths: Vec<server::PathEv>,
    offences: Vec<(server::Offence, u64)>,
}

impl Told {
    /// Keeps that a path has come or gone.
    pub(crate) fn path(
        &mut self,
        session: SessionName,
        path: &server::PathInfo,
        change: server::PathChange,
    ) {
        self.paths.push(server::PathEv::new(session, path.local, path.remote, change));
    }

    /// Keeps that a client was refused or cut off, unless there are too many of them.
    pub(crate) fn offence(&mut self, offence: server::Offence, limit: &mut RateLimit) {
        self.offences.extend(limit.admit(clock::now()).map(|left_out| (offence, left_out)));
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.offences.is_empty()
    }

    /// Tells all of it.
    pub(crate) fn tell(self) {
        catch_callback_panic(|| {
            self.paths.iter().for_each(server_path);
            for (server::Offence { remote, reason, .. }, left_out) in self.offences {
                tracing::warn!(
                    target: "bowline::rtrs", %remote, %reason, left_out, "client refused"
                );
            }
        });
    }
}

fn server_path(event: &server::PathEv) {
    let server::PathEv { session, local, remote, change } = event;
    let session = session.as_str();
    match change {
        server::PathChange::Connected => {
            tracing::info!(target: "bowline::rtrs", session, %local, %remote, "path connected");
        }
        server::PathChange::Closed(why) => {
            tracing::info!(target: "bowline::rtrs", session, %local, %remote, %why, "path closed");
        }
    }
}
