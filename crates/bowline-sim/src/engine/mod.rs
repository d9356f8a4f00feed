//! Parts that the four simulators share: seeds and random numbers, virtual time, traces, kept
//! plans, coverage, and the search over many seeds.

pub(crate) mod base;
pub(crate) mod coverage;
pub(crate) mod kept;
pub(crate) mod numbers;
pub(crate) mod queue;
pub(crate) mod rng;
pub(crate) mod run;
pub(crate) mod simulator;
pub(crate) mod trace;
