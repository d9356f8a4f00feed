//! RTRS over any verbs: what runs the state machines of `bowline-rtrs`, and the library API on top.

pub mod tree;
