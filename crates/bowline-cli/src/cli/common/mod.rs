//! Modules that all commands share: histograms, manual pages and views.

pub(crate) mod histogram;
pub(crate) mod manual;
pub(crate) mod watch;
