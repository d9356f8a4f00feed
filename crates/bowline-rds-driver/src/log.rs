//! Events of a node in the log of its program, by the feature `tracing`.

use bowline_base::RateLimit;
use bowline_rds::Event;
use bowline_verbs::catch_callback_panic;

/// Limit of events told: peers can cause as many as they like.
pub(crate) const LIMIT: RateLimit = RateLimit::per_second(20);

/// Tells an event. Called with no lock held, since what listens is the program's.
pub(crate) fn tell(event: &Event, left_out: u64) {
    catch_callback_panic(|| {
        if left_out > 0 {
            tracing::warn!(target: "bowline::rds", left_out, "events were left out");
        }
        match event {
            Event::PathUp { local, remote, path } => {
                tracing::info!(target: "bowline::rds", %local, %remote, path, "path up");
            }
            Event::PathDown { local, remote, path } => {
                tracing::warn!(target: "bowline::rds", %local, %remote, path, "path down");
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
            Event::Refused { remote, why } => {
                tracing::warn!(target: "bowline::rds", %remote, %why, "connection refused");
            }
            other => tracing::info!(target: "bowline::rds", event = ?other, "event"),
        }
    });
}
