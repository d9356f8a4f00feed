//! What every process with mapped disks does: reports what happens to them, shows them in its
//! control tree, and unmaps them at its end.

use std::{
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use bowline_block::DiskEvent;
use bowline_ctl::Sys;
use bowline_rnbd_driver::{
    client::Client,
    tree::{Disks, client_node},
};
use bowline_rtrs_driver::tree::{ClientSession, Files, client_node as sessions_node};

use super::front_ends::{DiskFrontEnds, DiskNotice};
use crate::{log::shown, signals::Stop};

/// How often it checks whether the server has answered.
const ANSWER_POLL: Duration = Duration::from_millis(1);
/// How long the end of the process waits for a server that does not answer an unmap.
pub const UNMAP_PATIENCE: Duration = Duration::from_secs(3);

/// Runs `close`, which unmaps disks. After a stop signal, the wait for a server that does not
/// answer is short.
pub fn unmap_all(client: &Client, stop: &Stop, close: impl FnOnce() + Send) {
    let (ended, end) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            close();
            drop(ended);
        });
        while end.recv_timeout(ANSWER_POLL) == Err(RecvTimeoutError::Timeout) {
            if stop.asked() {
                return client.limit_unmap_wait(UNMAP_PATIENCE);
            }
        }
    });
}

/// Has a further stop signal, which cuts off the end of these disks, say what may be lost by that.
pub fn say_what_is_cut_off(disks: &Arc<DiskFrontEnds>, stop: &Stop) {
    let disks = Arc::downgrade(disks);
    stop.before_exit(move || {
        for line in disks.upgrade().iter().flat_map(|disks| disks.unflushed()) {
            note!("{line}");
        }
    });
}

/// Prints what has happened to disks since the last call.
pub fn report_all(notices: &mpsc::Receiver<(String, DiskNotice)>) {
    for (name, notice) in notices.try_iter() {
        report(&name, notice);
    }
}

fn report(name: &str, notice: DiskNotice) {
    match notice {
        DiskNotice::Mapped { device, bytes, places } => {
            let (device, places) = (shown(&device), places.join(", "));
            say!("mapped {device} bytes={bytes} at {}", shown(&places));
        }
        DiskNotice::Changed(DiskEvent::Resized(bytes)) => say_of_peer!("{name} bytes={bytes}"),
        DiskNotice::Changed(DiskEvent::Offline) => say_of_peer!("{name} offline"),
        DiskNotice::Changed(DiskEvent::Online) => say_of_peer!("{name} online"),
        DiskNotice::Changed(DiskEvent::Gone) => say_of_peer!("{name} gone"),
        DiskNotice::Changed(other) => say_of_peer!("{name} {other:?}"),
        DiskNotice::Trouble(why) => say_of_peer!("{name}: {why}"),
        DiskNotice::Unmapped => say!("{name} unmapped"),
    }
}

/// The disks of a process, and the sessions that carry them.
pub trait ClientObjects: Disks {
    /// Returns the sessions.
    fn sessions(&self) -> Vec<Arc<dyn ClientSession>>;
}

/// Adds the classes of a client to a tree.
pub fn client_classes<T>(sys: Sys, client: &Arc<T>, files: Files) -> Sys
where
    T: ClientObjects + 'static,
{
    let of = Arc::clone(client);
    let disks: Arc<dyn Disks> = Arc::<T>::clone(client);
    sys.class("rtrs-client", sessions_node(move || of.sessions(), files))
        .class("rnbd-client", client_node(disks))
}
