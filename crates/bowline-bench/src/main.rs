//! The bench as a small program of its own, for its tests and `cargo xtask bench`: it builds
//! without the rest of the command.

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::process::exit(bowline_bench::main(&args));
}
