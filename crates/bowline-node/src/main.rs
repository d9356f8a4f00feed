//! The daemon of bowline, `bowline-node`: the node alone, without the commands.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    bowline_node::options::main()
}
