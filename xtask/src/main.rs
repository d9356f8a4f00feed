//! Everything that is not `cargo build`: checks of the repository, CI, interop, fuzzing, packaging.

mod api;
mod ci;
mod dissect;
mod dist;
mod features;
mod fuzz;
mod hostile;
mod layers;
mod links;
mod listed;
mod machine;
mod miri;
mod preload;
mod proofs;
mod publish;
mod release;
mod repo;
mod rules;
mod run;
mod search;
mod words;

use std::process::ExitCode;

use run::Outcome;

const HELP: &str = "\
usage: cargo xtask VERB [arguments]

checks of the repository
  check              layers, rules --summary, links, tests that SECURITY.md names, listed crates,
                     words to avoid, width of comments; warns about long files
  layers             dependencies between crates go down only; cores do no I/O
  rules [--summary]  every rule of docs/spec with the code and the tests that cite it
  links              links and file names in the documentation exist
  words [--accept]   no more uses than recorded of the words that docs/style.md lists; --accept
                     records fewer, and uses that moved to another crate
  api [--accept]     the public interface of the library is as docs/api has it, and every type of
                     it has a name; --accept keeps the present one
  features           the library, its tests and examples compile with each set of features
  publish            every published crate can be packaged; docs/release.md tells the rest
  musl               a program that serves disks links with musl by the oldest Rust that is promised
  dissect [FOLDER]   tshark shows the captures of the repository, or of FOLDER, with our dissectors, and
                     that is what bowline-wire reads; needs tshark
  deny               licences and sources of dependencies; needs cargo-deny
  semver             the library against its last release; needs cargo-semver-checks
  readme             commands of README as they stand, pasted into one shell; needs root
  beside             tests of the command pass beside a node of the machine; needs root

runs
  ci                 what .ci/run runs, step by step with timing
  sim [arguments]    the simulator, e.g. --seeds 20000; --help tells the others
  sim-fresh [--seconds N]
                     each simulator for N seconds (60) on seeds that the commit draws
  night [--seeds N]  each simulator on N seeds (1000000) from the time of day on, and whether
                     such seeds show what is done wrong on purpose; some two hours on 2 processors
  bench [arguments]  the benchmarks, e.g. rds --quick; --help tells the others
  fuzz [--seconds N] every fuzz target for N seconds (20); needs nightly and cargo-fuzz
  hostile [--seconds N] hostile programs, nodes and users against the others; N seconds each (20)
  model              what threads and processes hand to one another, in thousands of orders; a minute
  miri               what is unsafe and needs no system, under Miri; needs nightly and miri
  interop [args]     scenarios against a kernel in QEMU: interop/run, which tells of --list and
                     --only NAME with --help; needs root, a Debian host and /dev/net/tun

packaging
  release VERSION    sets the version of all crates, and says what is left: docs/release.md
  dist [--deb]       man pages and completions into target/dist; with --deb a Debian package
  preload-musl [FILE]
                     the library of `bowline run` for programs of musl, to FILE or beside the one
                     for glibc; needs musl-gcc and Rust for musl
  package-test       installs that package into an empty system, uses it there, and purges it;
                     needs root and debootstrap

Exit status: 0 done, 1 failed, 2 wrong usage, 77 skipped (the reason is printed).
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let rest = args.get(1..).unwrap_or_default();
    let own_help = ["sim", "bench", "interop"].iter().any(|v| args.first().is_some_and(|a| a == v));
    if !own_help && rest.iter().any(|arg| arg == "-h" || arg == "--help") {
        print!("{HELP}");
        return ExitCode::SUCCESS;
    }
    let outcome = match args.first().map(String::as_str) {
        None | Some("help" | "-h" | "--help") => {
            print!("{HELP}");
            return if args.is_empty() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
        Some("check") => no_args(rest, check),
        Some("layers") => no_args(rest, layers::check),
        Some("rules") => match rest {
            [] => rules::check(rules::Detail::All),
            [flag] if flag == "--summary" => rules::check(rules::Detail::Summary),
            _ => Outcome::Usage("rules takes only --summary".into()),
        },
        Some("links") => no_args(rest, links::check),
        Some("words") => words::run(rest),
        Some("api") => api::run(rest),
        Some("features") => no_args(rest, features::check),
        Some("publish") => no_args(rest, publish::check),
        Some("musl") => no_args(rest, run::musl),
        Some("readme") => no_args(rest, machine::readme),
        Some("beside") => no_args(rest, machine::beside),
        Some("semver") => no_args(rest, release::semver),
        Some("release") => release::prepare(rest),
        Some("dissect") => dissect::run(rest),
        Some("deny") => no_args(rest, run::deny),
        Some("ci") => no_args(rest, ci::run),
        Some("sim") => run::bowline("sim", rest),
        Some("sim-fresh") => search::fresh(rest),
        Some("night") => search::night(rest),
        Some("bench") => run::bench(rest),
        Some("fuzz") => fuzz::run(rest),
        Some("hostile") => hostile::run(rest),
        Some("model") => no_args(rest, run::model),
        Some("miri") => no_args(rest, miri::run),
        Some("interop") => run::interop(rest),
        Some("dist") => dist::run(rest),
        Some("preload-musl") => preload::musl(rest),
        Some("package-test") => no_args(rest, dist::test),
        Some(other) => Outcome::Usage(format!("unknown verb {other:?}")),
    };
    match outcome {
        Outcome::Passed => ExitCode::SUCCESS,
        Outcome::Skipped(reason) => {
            println!("SKIPPED: {reason}");
            ExitCode::from(run::SKIPPED)
        }
        Outcome::Failed(why) => {
            eprintln!("xtask: {why}");
            ExitCode::FAILURE
        }
        Outcome::Usage(why) => {
            eprintln!("xtask: {why}\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

fn no_args(rest: &[String], verb: fn() -> Outcome) -> Outcome {
    if rest.is_empty() { verb() } else { Outcome::Usage("this verb takes no arguments".into()) }
}

/// Runs every check, even after one failed, so that one run shows everything.
fn check() -> Outcome {
    let checks = [
        ("layers", layers::check as fn() -> Outcome),
        ("rules", || rules::check(rules::Detail::Summary)),
        ("links", links::check),
        ("listed", listed::check),
        ("proofs", proofs::check),
        ("words", words::check),
        ("comments", repo::check_comment_width),
        ("sizes", repo::warn_long_files),
    ];
    let mut failed = Vec::new();
    for (name, check) in checks {
        println!("== {name}");
        if let Outcome::Failed(why) = check() {
            eprintln!("xtask {name}: {why}");
            failed.push(name);
        }
    }
    if failed.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("failed: {}", failed.join(", ")))
    }
}
