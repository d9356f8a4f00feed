//! Makes the linker write a shared library with the versions of `symbols.map`.

use std::{env, fs, path::Path};

const BIN: &str = "bowline-ibverbs";

fn main() {
    println!("cargo::rerun-if-changed=symbols.map");
    println!("cargo::rerun-if-changed=build.rs");
    let folder = env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let map = Path::new(&folder).join("symbols.map");
    let text = fs::read_to_string(&map).unwrap_or_default();
    let map = map.display();
    for arg in ["-shared", "-Wl,-soname,libibverbs.so.1", "-Wl,-z,nodelete"] {
        println!("cargo::rustc-link-arg-bin={BIN}={arg}");
    }
    println!("cargo::rustc-link-arg-bin={BIN}=-Wl,--version-script={map}");
    // The functions are in a library of Rust, of which the linker takes only what it is asked for.
    for symbol in text.lines().filter_map(|line| line.strip_suffix(';')).map(str::trim) {
        if symbol.starts_with("ibv_") || symbol.starts_with("_ibv_") || symbol.contains("ibv_rate")
        {
            println!("cargo::rustc-link-arg-bin={BIN}=-Wl,--undefined={symbol}");
        }
    }
}
