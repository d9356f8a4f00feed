//! The `bowline` command; `bowline help` lists what it can do.
//!
//! Everything lives in [`cli`]; this file only hands the exit status to the system.

#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
