//! Python programs that know nothing of bowline, run on a node of this process: plain use of the
//! socket module, and what happens to descriptors.

mod scene;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use bowline_host::Refused;
use bowline_testkit::skipped;
use scene::{Scene, finish, library};

#[test]
fn a_program_sends_receives_and_waits_as_on_a_kernel() {
    Scene::new().runs("plain.py");
}

// tests section 8 of tools.md: results and error numbers that a kernel was seen to give
#[test]
fn calls_fail_as_on_a_kernel() {
    Scene::new().runs("errors.py");
}

#[test]
fn a_descriptor_survives_fork_exec_dup_and_passing() {
    Scene::new().runs("descriptors.py");
}

#[test]
fn poll_and_epoll_show_what_the_socket_is_ready_for() {
    Scene::new().runs("readiness.py");
}

#[test]
fn a_slow_reader_holds_back_those_who_send_to_it_and_loses_nothing() {
    Scene::new().runs("congestion.py");
}

// tests section 8 of tools.md: a pointer to nowhere
#[test]
fn memory_that_is_not_there_is_an_error() {
    Scene::new().runs("nowhere.py");
}

/// Handlers find the same with sockets as without the library, and so does who asks what they are.
// tests section 8 of tools.md: a pointer to nowhere
#[test]
fn a_program_handles_faults_of_its_own_and_none_of_copies() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("handled.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let said = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let plain = said(&mut Command::new(&program));
    assert!(plain.lines().count() > 100, "{plain}");
    for when in ["first", "later"] {
        let mut with = scene.command(program.to_str().unwrap());
        let with = said(with.args([&scene.addresses[0], when]));
        let differs = plain.lines().zip(with.lines()).find(|(plain, with)| plain != with);
        assert_eq!((differs, with.len()), (None, plain.len()), "{when}");
    }
    scene.is_empty_again();
}

#[test]
fn threads_children_and_visitors_come_first_at_the_same_time() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("first.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let mut first = scene.command(program.to_str().unwrap());
    finish(first.arg(&scene.addresses[0]).spawn().unwrap(), "first.c");
    scene.is_empty_again();
}

/// A thread sets a handler at the moment at which another makes the first socket.
#[test]
fn a_handler_that_is_set_during_the_first_call_stays() {
    let scene = Scene::new();
    let flags = ["-shared", "-fPIC"];
    let compiled = scene.compiles("between.c", &flags).zip(scene.compiles("between_main.c", &[]));
    let Some((between, program)) = compiled else {
        return skipped::because("there is no C compiler");
    };
    let mut command = scene.command(program.to_str().unwrap());
    command.env("LD_PRELOAD", format!("{}:{}", library().display(), between.display()));
    finish(command.arg(&scene.addresses[0]).spawn().unwrap(), "between_main.c");
    scene.is_empty_again();
}

#[test]
fn who_waits_to_send_holds_up_no_other() {
    Scene::new().runs("waiting.py");
}

#[test]
fn four_processes_share_an_address_and_lose_nothing() {
    Scene::new().runs("shared.py");
}

#[test]
fn memory_of_programs_is_written_and_read_by_programs_of_another_node() {
    let [own, peer] = Scene::rdma_pair();
    let place = peer.folder.join("host.sock");
    finish(own.start("rdma.py", &[place.to_str().unwrap()]), "rdma.py");
    own.is_empty_again();
    peer.is_empty_again();
}

// tests [RMR-13]
#[test]
fn what_replaces_memory_of_peers_is_not_theirs() {
    let [own, peer] = Scene::rdma_pair();
    let place = peer.folder.join("host.sock");
    finish(own.start("replaced.py", &[place.to_str().unwrap()]), "replaced.py");
}

// tests [RMR-12]
#[test]
fn nodes_of_another_user_use_the_memory_that_programs_name_as_any_node_does() {
    let Some([own, peer]) = Scene::rdma_pair_of_others() else {
        return skipped::because("only root may start a node as another user");
    };
    for script in ["rdma.py", "rdma_others.py", "replaced.py"] {
        let place = peer.folder.join("host.sock");
        let mut program = own.command("python3");
        program.arg(scene::script(script)).args(&own.addresses).arg(place);
        finish(program.env("BOWLINE_TEST_AGENT", "1").spawn().expect("python3 starts"), script);
        own.is_empty_again();
        peer.is_empty_again();
    }
}

// tests [RMR-12]
#[test]
fn the_child_of_a_vfork_gives_no_memory_and_learns_what_is_wrong() {
    let Some([own, _peer]) = Scene::rdma_pair_of_others() else {
        return skipped::because("only root may start a node as another user");
    };
    let Some(program) = own.compiles("visits_memory.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let mut visits = own.command(program.to_str().unwrap());
    finish(visits.arg(&own.addresses[0]).spawn().unwrap(), "visits_memory.c");
    own.is_empty_again();
}

#[test]
fn what_a_program_writes_comes_whole_or_not_at_all_when_it_ends() {
    let [own, peer] = Scene::rdma_pair();
    let place = peer.folder.join("host.sock");
    finish(own.start("rdma_exit.py", &[place.to_str().unwrap()]), "rdma_exit.py");
}

#[test]
fn programs_with_memory_that_is_written_are_killed() {
    let [own, peer] = Scene::rdma_pair();
    let place = peer.folder.join("host.sock");
    finish(own.start("rdma_killed.py", &[place.to_str().unwrap()]), "rdma_killed.py");
    own.is_empty_again();
    peer.is_empty_again();
}

#[test]
fn killed_processes_leave_nothing_and_hold_up_nobody() {
    let scene = Scene::new();
    let steady = scene.start("steady.py", &[]);
    for n in 0..20 {
        let mut victim = scene.start("victim.py", &[]);
        std::thread::sleep(Duration::from_millis(50 + 17 * n % 90));
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
    finish(steady, "steady.py");
    scene.is_empty_again();
}

/// Programs find a node that was restarted any number of times.
#[test]
fn sockets_are_made_after_each_start_of_a_node() {
    const TIMES: usize = 20;
    let mut scene = Scene::new();
    let folder = scene.folder.to_str().unwrap().to_owned();
    let mut program = scene.start("restarts.py", &[&folder, &TIMES.to_string()]);
    for n in 0..TIMES {
        scene.say(&format!("started{n}"));
        scene.wait_for(&format!("used{n}"), &mut program);
        scene.restart();
    }
    finish(program, "restarts.py");
}

/// The example of the header, linked with the library and not started by `bowline run`.
#[test]
fn a_c_program_links_with_the_library() {
    if Command::new("cc").arg("--version").output().is_err() {
        return skipped::because("there is no C compiler");
    }
    let scene = Scene::new();
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = scene.folder.join("exchange");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-I"]).arg(own.join("include"));
    compiler.arg(own.join("examples/exchange.c")).arg("-o").arg(&program);
    compiler.arg("-L").arg(library().parent().unwrap()).arg("-lbowline_preload");
    let output = compiler.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", library().parent().unwrap());
    command.env("BOWLINE_RDS_SOCKET", scene.folder.join("host.sock"));
    let output = command.args(&scene.addresses).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "hello from port 4600 over transport 2\n", "{output:?}");
    // Without a node it says so, as a kernel without the module does.
    command.env("BOWLINE_RDS_SOCKET", scene.folder.join("nobody.sock"));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Address family not supported"), "{said}");
}

// what no library sees is never taken for sent
#[test]
fn what_is_written_past_the_library_closes_the_socket_and_is_reported() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("past.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let past = scene.command(program.to_str().unwrap()).arg(&scene.addresses[0]).spawn().unwrap();
    let process = past.id().cast_signed();
    finish(past, "past.c");
    let refusals = scene.refusals();
    let its = refusals.iter().filter(|one| one.what == Refused::Writing { process });
    assert_eq!(its.map(|one| one.count).sum::<u64>(), 4, "{refusals:?}");
    scene.is_empty_again();
}

#[test]
fn what_the_child_of_a_vfork_does_is_its_own() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("visits.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let mut visits = scene.command(program.to_str().unwrap());
    finish(visits.arg(&scene.addresses[0]).spawn().unwrap(), "visits.c");
    scene.is_empty_again();
}

#[test]
fn a_user_s_program_locks_its_memory() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("locked.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    let mut locked = scene.command(program.to_str().unwrap());
    finish(locked.arg(&scene.addresses[0]).spawn().unwrap(), "locked.c");
}

#[test]
fn a_program_that_forbids_itself_all_calls_but_those_on_sockets_lives() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("filtered.c", &[]) else {
        return skipped::because("there is no C compiler");
    };
    for how in ["prctl", "syscall"] {
        let mut filtered = scene.command(program.to_str().unwrap());
        finish(filtered.args([&scene.addresses[0], how]).spawn().unwrap(), how);
    }
    scene.is_empty_again();
}

#[test]
fn functions_that_are_looked_up_in_the_c_library_are_ours() {
    Scene::new().runs("looked_up.py");
}

#[test]
fn an_agent_reads_tables_through_the_c_library() {
    Scene::new().runs("agent.py");
}

#[test]
fn messages_in_a_programs_memory_are_unread_until_it_takes_them() {
    Scene::new().runs("unread.py");
}

/// Runs a compiler; `false` where it is missing, or lacks what the program needs.
fn compiles(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

#[test]
fn a_program_of_go_with_c_s_calls_runs() {
    let scene = Scene::new();
    let program = scene.folder.join("rds-go");
    let path = format!("{}:/usr/lib/go-1.19/bin", std::env::var("PATH").unwrap_or_default());
    let mut go = Command::new("sh");
    go.args(["-c", r#"exec go build -o "$0" "$1""#]).arg(&program).arg(scene::script("rds.go"));
    go.env("PATH", path).env("GO111MODULE", "off").env("GOCACHE", scene.folder.join("go"));
    if !compiles(&mut go) {
        return skipped::because("there is no Go with cgo");
    }
    let mut command = scene.command(program.to_str().unwrap());
    finish(command.arg(&scene.addresses[0]).spawn().unwrap(), "rds.go");
    scene.is_empty_again();
}

#[test]
fn a_program_of_java_with_jna_runs() {
    const JNA: &str = "/usr/share/java/jna.jar";
    let scene = Scene::new();
    let mut javac = Command::new("javac");
    javac.args(["-cp", JNA, "-d"]).arg(&scene.folder).arg(scene::script("Rds.java"));
    if !compiles(&mut javac) {
        return skipped::because("there is no Java with JNA");
    }
    let classes = format!("{JNA}:{}", scene.folder.display());
    let mut java = scene.command("java");
    java.arg(format!("-XX:ErrorFile={}", scene.folder.join("crash.log").display()));
    java.args(["-cp", &classes, "Rds", &scene.addresses[0]]);
    finish(java.spawn().unwrap(), "Rds.java");
    scene.is_empty_again();
}

#[test]
fn a_program_with_address_sanitizer_runs() {
    let scene = Scene::new();
    let Some(program) = scene.compiles("calls.c", &["-fsanitize=address"]) else {
        return skipped::because("there is no C compiler with AddressSanitizer");
    };
    let mut command = scene.command(program.to_str().unwrap());
    finish(command.args(&scene.addresses).spawn().unwrap(), "calls.c");
}

/// CPython's own tests of RDS sockets, which come with it or in a package of its tests.
#[test]
fn the_tests_of_cpython_pass() {
    if !Command::new("python3")
        .args(["-c", "import test.test_socket"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
    {
        return skipped::because("python3 has no module test.test_socket");
    }
    let scene = Scene::at(Scene::next(), ["127.0.0.1", "127.0.0.2"].map(str::to_owned));
    let mut command = scene.command("python3");
    let tests = ["test.test_socket.BasicRDSTest", "test.test_socket.RDSTest"];
    let output = command.args(["-m", "unittest", "-v"]).args(tests).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("skipped"), "{text}");
    scene.is_empty_again();
}
