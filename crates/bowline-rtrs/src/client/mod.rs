//! The client: one session with its paths as a state machine.
