//! Events of a node in the log of its program, by the feature `tracing`.

use bowline_base::{Instant, RateLimit};
use bowline_rds::{Event, Refusal};
use bowline_verbs::catch_callback_panic;

/// Limits of events in the log: peers can cause as many as they like.
#[derive(Debug)]
pub(crate) struct Limits {
    notable: RateLimit,
    /// So that eight paths of a few peers leave room for what has gone wrong.
    details: RateLimit,
}

impl Limits {
    pub(crate) const fn new() -> Self {
        Self { notable: RateLimit::per_second(20), details: RateLimit::per_second(200) }
    }

    /// Whether an event is logged, and how many were not since the last one that was.
    pub(crate) const fn admit(&mut self, event: &Event, now: Instant) -> Option<u64> {
        match event {
            Event::PathUp { path: 1.., .. } | Event::PathDown { path: 1.., why: None, .. } => {
                self.details.admit(now)
            }
            _ => self.notable.admit(now),
        }
    }
}

/// Tells an event. Called with no lock held, since what listens is the program's.
pub(crate) fn tell(event: &Event, left_out: u64) {
    catch_callback_panic(|| {
        if left_out > 0 {
            tracing::warn!(target: "bowline::rds", left_out, "events were left out");
        }
        match event {
            // The first of a peer's paths stands for them all where nothing is wrong.
            Event::PathUp { local, remote, path: 0 } => {
                tracing::info!(target: "bowline::rds", %local, %remote, "peer connected");
            }
            Event::PathUp { local, remote, path } => {
                tracing::debug!(target: "bowline::rds", %local, %remote, path, "path up");
            }
            Event::PathDown { local, remote, path, why: Some(why) } => {
                tracing::warn!(target: "bowline::rds", %local, %remote, path, %why, "path down");
            }
            Event::PathDown { local, remote, path: 0, why: None } => {
                tracing::info!(target: "bowline::rds", %local, %remote, "peer disconnected");
            }
            Event::PathDown { local, remote, path, why: None } => {
                tracing::debug!(target: "bowline::rds", %local, %remote, path, "path down");
            }
            Event::CannotConnect { local, remote, why } => {
                tracing::warn!(target: "bowline::rds", %local, %remote, %why, "cannot connect");
            }
            Event::Misbehaved { remote, what } => {
                tracing::warn!(target: "bowline::rds", %remote, %what, "peer broke a rule");
            }
            Event::PeerRestarted { remote } => {
                tracing::info!(target: "bowline::rds", %remote, "peer restarted");
            }
            Event::PeerEnded { local, remote } => {
                tracing::info!(target: "bowline::rds", %local, %remote, "peer ended");
            }
            Event::Refused { remote, why: why @ Refusal::Closing } => {
                tracing::debug!(target: "bowline::rds", %remote, %why, "connection refused");
            }
            Event::Refused { remote, why } => {
                tracing::warn!(target: "bowline::rds", %remote, %why, "connection refused");
            }
            other => tracing::info!(target: "bowline::rds", event = ?other, "event"),
        }
    });
}
