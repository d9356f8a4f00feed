//! No limit: something else decides, the window of the path or that of each queue pair.

use super::controller::Controller;

/// A controller that lets everything leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unlimited;

impl Controller for Unlimited {
    #[inline]
    fn window(&self) -> Option<u64> {
        None
    }

    #[inline]
    fn heeds_marks(&self) -> bool {
        false
    }
}
