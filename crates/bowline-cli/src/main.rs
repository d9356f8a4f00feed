//! The `bowline` command; `bowline help` lists what it can do.
//!
//! Everything lives in [`cli`]; this file only hands the exit status to the system.

#![forbid(unsafe_code)]

// Macros that print a line, for all modules.
#[macro_use(note, note_of_peer, say, say_of_peer)]
extern crate bowline_node;

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
