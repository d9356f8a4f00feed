//! The `bowline` command: quickstart, node, ping, info, stress, bench and sim.
//!
//! Everything lives in [`cli`]; this file only hands the exit status to the system.

#![forbid(unsafe_code)]

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
