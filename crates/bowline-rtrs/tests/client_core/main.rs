//! The client core against a peer of a few lines that does what a script says.

mod hostile;
mod io;
mod keys;
mod notices;
mod open;
mod paths;
mod peer;
mod random;
