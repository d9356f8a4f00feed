//! Plans of seeds that failed once, in `kept/`: each shows the mistake that its text tells of.

use std::path::Path;

use bowline_sim::{Numbers, Outcome, TraceMode, host, rds, roce, rtrs, simulator_of};

fn assert_kept<N: Numbers>(name: &str, outcome: &Outcome<N>) {
    assert!(outcome.failure.is_none(), "{name}:\n{}", outcome.report());
}

#[test]
fn kept_plans_keep_every_promise() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("kept");
    let files = std::fs::read_dir(&dir).expect("kept plans");
    let mut count = 0;
    for file in files {
        let file = file.expect("a file").path();
        let (text, name) =
            (std::fs::read_to_string(&file).expect("text"), file.display().to_string());
        let trace = TraceMode::Last(60);
        match simulator_of(&text).expect("a plan").as_str() {
            "rds" => assert_kept(&name, &rds::run_kept(&text, &name, trace).expect("a plan")),
            "roce" => assert_kept(&name, &roce::run_kept(&text, &name, trace).expect("a plan")),
            "host" => assert_kept(&name, &host::run_kept(&text, &name, trace).expect("a plan")),
            "rtrs" => assert_kept(&name, &rtrs::run_kept(&text, &name, trace).expect("a plan")),
            other => panic!("{name} is for {other}"),
        }
        count += 1;
    }
    assert!(count > 50, "{count} plans");
}

#[test]
fn a_kept_plan_runs_as_its_seed_did() {
    for seed in 0..20 {
        let text = rds::keep(seed, &rds::Options::default());
        let again = rds::run_kept(&text, "it", TraceMode::Hash).expect("a plan");
        assert_eq!(rds::run(seed, &rds::Options::default()).trace_hash, again.trace_hash);
        let text = roce::keep(seed, &roce::Options::default());
        let again = roce::run_kept(&text, "it", TraceMode::Hash).expect("a plan");
        assert_eq!(roce::run(seed, &roce::Options::default()).trace_hash, again.trace_hash);
        let text = host::keep(seed, &host::Options::default());
        let again = host::run_kept(&text, "it", TraceMode::Hash).expect("a plan");
        assert_eq!(host::run(seed, &host::Options::default()).trace_hash, again.trace_hash);
        let text = rtrs::keep(seed, &rtrs::Options::default());
        let again = rtrs::run_kept(&text, "it", TraceMode::Hash).expect("a plan");
        assert_eq!(rtrs::run(seed, &rtrs::Options::default()).trace_hash, again.trace_hash);
    }
}

#[test]
fn what_is_no_plan_is_refused() {
    let seven = rds::keep(7, &rds::Options::default());
    assert!(roce::run_kept(&seven, "it", TraceMode::Hash).is_err(), "of another simulator");
    assert!(simulator_of("{}").is_err());
    let no_chance = seven.replacen("\"chance\": [", "\"chance\": [], \"was\": [", 1);
    assert!(rds::run_kept(&no_chance, "it", TraceMode::Hash).map_or(true, |o| o.failure.is_some()));
}
