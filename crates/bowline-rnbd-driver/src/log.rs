//! Events of disks in the log of a program, by the feature `tracing`.

use bowline_block::DiskEvent;
use bowline_verbs::catch_callback_panic;

/// Tells an event of a disk. Called with no lock held, since what listens is the program's.
pub(crate) fn disk(name: &str, event: DiskEvent) {
    catch_callback_panic(|| match event {
        DiskEvent::Resized(bytes) => {
            tracing::info!(target: "bowline::rnbd", disk = name, bytes, "disk resized");
        }
        DiskEvent::Offline => tracing::warn!(target: "bowline::rnbd", disk = name, "disk offline"),
        DiskEvent::Online => tracing::info!(target: "bowline::rnbd", disk = name, "disk online"),
        DiskEvent::Gone => tracing::error!(target: "bowline::rnbd", disk = name, "disk gone"),
        other => tracing::info!(target: "bowline::rnbd", disk = name, event = ?other, "disk"),
    });
}
