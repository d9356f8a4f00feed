//! Nothing is left of a closed device. This test has a process of its own, since it counts that
//! process's threads and descriptors.

mod common;

use std::time::{Duration, Instant};

use bowline_verbs::SendOp;
use common::{PATIENCE, connect, ip, open};

fn count(of: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count()
}

#[test]
fn no_thread_and_no_descriptor_is_left() {
    let before = [count("fd"), count("task")];
    for _ in 0..3 {
        let (a, b) = (open(ip(30, 1)), open(ip(30, 2)));
        let (near, far) = connect(&a, &b, 1 << 16);
        near.post(1, SendOp::Write(far.remote(0)), 0, 1 << 16);
        near.done(1);
        assert_eq!(count("task"), before[1] + 2, "one thread for each device");
        drop((near, far, a, b));
        // A thread that has ended is listed for a moment.
        let start = Instant::now();
        while [count("fd"), count("task")] != before {
            assert!(start.elapsed() < PATIENCE, "{before:?} before");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
