//! Verifying RDS endpoint: the node's side of the interop scenarios.
//!
//! Takes jobs from standard input and tells their events on standard output;
//! the protocol is in `interop/README.md`. With `--kernel` it uses the kernel's
//! own RDS sockets instead of bowline, for comparisons on equal terms.

mod backend;
mod generator;
mod jobs;
mod protocol;

use backend::Backend;
use backend::bowline::{Bowline, Rdma};
use backend::kernel::Kernel;
use jobs::Jobs;
use protocol::{Command, Event};
use std::io::BufRead as _;
use std::process::ExitCode;
use std::sync::Arc;

const USAGE: &str = "usage: bowline-interop-peer serve --kernel
       bowline-interop-peer serve [--address IP]... [--paths 8|1] [--rdma | --device NAME]";

fn main() -> ExitCode {
    match serve(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bowline-interop-peer: {e}");
            ExitCode::from(2)
        }
    }
}

fn serve(mut args: impl Iterator<Item = String>) -> Result<(), String> {
    if args.next().as_deref() != Some("serve") {
        return Err(USAGE.into());
    }
    let (mut addresses, mut paths, mut kernel, mut rdma) = (Vec::new(), 8, false, None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--kernel" => kernel = true,
            "--rdma" => rdma = Some(Rdma::Soft),
            "--device" => rdma = Some(Rdma::Core(value(&mut args)?)),
            "--address" => addresses.push(value(&mut args)?),
            "--paths" => paths = value(&mut args)?,
            _ => return Err(USAGE.into()),
        }
    }
    let backend: Arc<dyn Backend> = if kernel {
        Arc::new(Kernel)
    } else {
        Arc::new(Bowline::start(&addresses, paths, rdma.as_ref()).map_err(|e| e.to_string())?)
    };
    let hello = Event::new("", "hello").num("pid", u64::from(std::process::id()));
    hello.text("node", &backend.name()).emit();
    let mut jobs = Jobs::new(Arc::clone(&backend));
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| format!("standard input: {e}"))?;
        if let Some(command) = Command::parse(&line) {
            jobs.command(command);
        }
    }
    backend.shutdown();
    Ok(())
}

fn value<T: std::str::FromStr>(args: &mut impl Iterator<Item = String>) -> Result<T, String> {
    args.next().and_then(|v| v.parse().ok()).ok_or_else(|| USAGE.into())
}
