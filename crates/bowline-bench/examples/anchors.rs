//! Runs the bench without the library: anchors and peers only.

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::process::exit(bowline_bench::main::<bowline_bench::NoStack>(&args, &[]));
}
