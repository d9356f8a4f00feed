//! What holds of the seeds of every simulator.

/// Tests of the simulator whose `run`, `run_many`, `Options` and `Scenario` are in scope. The
/// promises of so many seeds are checked, from the first on, and something must have happened in
/// them. They are few: `bowline sim`, which is optimized, runs many times as many in that time.
macro_rules! any_seeds {
    ($count:literal, $happened:ident) => {
        fn assert_kept(from: u64, count: u64, options: &Options) {
            let summary =
                run_many(from..from + count, 2, options, |_| std::ops::ControlFlow::Continue(()));
            let reports: Vec<String> = summary.failures.iter().map(|o| o.report()).collect();
            assert_eq!(summary.failed, 0, "{}", reports.join("\n"));
            assert_eq!(summary.runs, count);
            assert!(summary.stats.$happened > 0, "nothing happened at all");
        }

        #[test]
        fn seeds_keep_every_promise() {
            assert_kept(0, $count, &Options::default());
        }

        #[test]
        fn a_seed_is_a_run() {
            for seed in 0..12 {
                let first = run(seed, &Options::default());
                let second = run(seed, &Options::default().with_trace(TraceMode::All));
                assert_eq!(first.trace_hash, second.trace_hash, "seed {seed}");
                assert_eq!(first.stats, second.stats, "seed {seed}");
                assert!(!second.lines.is_empty());
            }
        }

        #[test]
        fn seeds_differ() {
            let hashes: std::collections::HashSet<u64> =
                (0..12).map(|seed| run(seed, &Options::default()).trace_hash).collect();
            assert_eq!(hashes.len(), 12);
        }

        #[test]
        fn scenarios_are_found_by_their_names() {
            for scenario in Scenario::ALL {
                assert_eq!(Scenario::from_name(scenario.name()), Some(scenario));
            }
            assert_eq!(Scenario::from_name("nothing"), None);
        }
    };
}
