//! The bench as a small program of its own, for its tests and `cargo xtask bench`: it builds
//! without the rest of the command.

use clap::Parser;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: bowline_bench::Args,
}

fn main() {
    let side = bowline_bench::side();
    std::process::exit(side.unwrap_or_else(|| bowline_bench::run(Cli::parse().args)));
}
