//! Modules that all commands share: arguments, output, signals, histograms, manual pages.

#[macro_use]
pub(crate) mod out;
pub(crate) mod args;
pub(crate) mod histogram;
pub(crate) mod manual;
pub(crate) mod stop;
pub(crate) mod supervisor;
