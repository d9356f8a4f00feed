//! What is tried on a machine of its own: namespaces of processes, mounts and network, with an
//! empty `/run`, loopback, and no process left at the end.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::repo;
use crate::run::Outcome;

/// Marks a block of commands, on the line before it, that this runs as it stands.
const MARK: &str = "<!-- cargo xtask readme runs this: -->";

/// Of the command's tests, those that look for nodes where all of a machine are; of those for disks
/// one part stands for all, as they look in the same way.
const COMMAND_TESTS: [&str; 5] =
    ["access::", "control::", "folders::", "own_node::a_node_is", "rnbd_export::"];

/// Runs the marked blocks of README in one shell, on its standard input: as somebody pastes them.
pub(crate) fn readme() -> Outcome {
    let path = repo::root().join("README.md");
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => return Outcome::Failed(format!("{}: {error}", path.display())),
    };
    let blocks = marked(&text);
    if blocks.is_empty() {
        return Outcome::Failed(format!("{} has no block after {MARK}", path.display()));
    }
    alone(&["bash", "-e", "-v"], &blocks.concat())
}

/// Runs tests beside a node in the place where that of a machine is.
pub(crate) fn beside() -> Outcome {
    // A node without an address of its choice serves those that are not of loopback.
    let script = format!(
        "ip address add 192.0.2.1/24 dev lo\n\
         target/debug/bowline node --rdma --background\n\
         cargo test --workspace --all-features --locked --test cli -- {}\n\
         test -S /run/bowline/192.0.2.1.sock\n",
        COMMAND_TESTS.join(" "),
    );
    alone(&["sh", "-ex"], &script)
}

/// Runs a shell on a machine of its own; `script` is its standard input.
fn alone(shell: &[&str], script: &str) -> Outcome {
    const NAMESPACES: [&str; 5] = ["--mount", "--net", "--pid", "--fork", "--kill-child"];
    const ENTER: &str = "mount -t proc proc /proc; mount -t tmpfs -o mode=755 tmpfs /run; \
                         ip link set lo up; unset XDG_RUNTIME_DIR; exec \"$@\"";
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(NAMESPACES).args(["sh", "-ec", ENTER, "sh"]);
        command
    };
    let mut attempt = unshare();
    attempt.arg("true").stdout(Stdio::null()).stderr(Stdio::null());
    if !attempt.status().is_ok_and(|status| status.success()) {
        return Outcome::Skipped("only root can make namespaces of mounts and networks".into());
    }
    let mut command = unshare();
    command.args(shell).current_dir(repo::root()).stdin(Stdio::piped());
    let done = command.spawn().and_then(|mut child| {
        // What does not read all of it has failed before, with a status that says so.
        let _ = child.stdin.take().map(|mut input| input.write_all(script.as_bytes()));
        child.wait()
    });
    match done {
        Ok(status) if status.success() => Outcome::Passed,
        Ok(status) => Outcome::Failed(format!("{}: {status}", shell[0])),
        Err(error) => Outcome::Failed(format!("unshare: {error}")),
    }
}

/// The marked blocks of commands of a text, each with its last line end.
fn marked(text: &str) -> Vec<&str> {
    let after = text.split(MARK).skip(1).map(str::trim_start);
    let inside = after.filter_map(|rest| rest.strip_prefix("```sh\n")?.split_once("```"));
    inside.map(|(block, _)| block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_blocks_are_found_and_others_left_out() {
        let text = format!(
            "```sh\nno\n```\n{MARK}\n```sh\na  # x\nb\n```\nc\n\n{MARK}\n\n```sh\nd\n```\n"
        );
        assert_eq!(marked(&text), ["a  # x\nb\n", "d\n"]);
    }
}
