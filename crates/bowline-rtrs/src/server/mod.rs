//! The server: all sessions of one listener as a state machine.
