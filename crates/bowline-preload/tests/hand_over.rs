//! A node takes over from another: programs keep their sockets and lose nothing.

mod scene;

use std::time::Duration;

use scene::{Flows, Scene, finish};

#[test]
fn programs_notice_nothing_of_a_node_that_is_replaced() {
    let [mut here, there] = [Scene::new(), Scene::new()];
    let [one, other] = here.addresses.clone();
    let [far, _] = &there.addresses;
    let steady = here.start("steady.py", &["4"]);
    // Within the node, and to another one, both ways.
    let flows = Flows::begin(
        "4",
        &[
            (&here, &one, &other, "4900"),
            (&here, &other, &one, "4900"),
            (&here, &one, far, "4901"),
            (&there, far, &one, "4901"),
        ],
    );
    for _ in 0..12 {
        std::thread::sleep(Duration::from_millis(200));
        here.replace();
    }
    finish(steady, "steady.py");
    flows.finish();
    here.is_empty_again();
    here.runs("plain.py");
    there.is_empty_again();
}

#[test]
fn requests_that_wait_go_on_waiting() {
    let mut scene = Scene::new();
    let mut child = scene.start("hand_over.py", &[scene.folder.to_str().unwrap()]);
    for n in 0..3 {
        scene.wait_for(&format!("waits{n}"), &mut child);
        // The program is in its call soon after it has said so.
        std::thread::sleep(Duration::from_millis(50));
        scene.replace();
        scene.say(&format!("replaced{n}"));
    }
    finish(child, "hand_over.py");
    scene.is_empty_again();
}
