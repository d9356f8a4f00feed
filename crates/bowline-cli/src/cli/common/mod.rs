//! Modules that all commands share: histograms, values of options, manual pages and views.

pub(crate) mod histogram;
pub(crate) mod known;
pub(crate) mod manual;
pub(crate) mod watch;
