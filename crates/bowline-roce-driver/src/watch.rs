//! Notifications of what happens in a device, for libraries that have descriptors for that instead
//! of calls that wait.

use core::fmt;

use bowline_verbs::{AsyncEvent, CmEvent, CqId};

/// Notified when something has happened. It is called by whichever thread handles a packet or
/// request, under the lock of the device: it must not call the device and must not wait.
pub trait Watch: fmt::Debug + Send + Sync {
    /// The queue has a completion that [`SoftDevice::notify_cq`](crate::SoftDevice::notify_cq) has
    /// asked for.
    fn completion(&self, cq: CqId);

    /// Something has happened to a queue pair, a completion queue or the device.
    /// [`Device::async_event`](bowline_verbs::Device::async_event) does not return it any more.
    fn event(&self, event: AsyncEvent);

    /// Something has happened to a connection, which
    /// [`Device::cm_event`](bowline_verbs::Device::cm_event) does not return any more.
    fn connection(&self, event: CmEvent);
}
