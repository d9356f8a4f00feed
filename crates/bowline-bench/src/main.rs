//! The program `bowline bench` hands over to.

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::process::exit(bowline_bench::main(&args));
}
