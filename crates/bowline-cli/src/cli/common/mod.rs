//! Modules that all commands share: histograms and manual pages.

pub(crate) mod histogram;
pub(crate) mod manual;
