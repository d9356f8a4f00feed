//! The dissectors for Wireshark, over captures.

use std::process::{Command, Stdio};

use crate::run::{self, Outcome};

/// Has tshark show every capture of a folder, or those of the repository, and compares that with
/// what bowline-wire reads; skipped, with the reason, where there is no tshark.
pub(crate) fn run(args: &[String]) -> Outcome {
    let folder = match args {
        [] => None,
        [folder] => match std::fs::canonicalize(folder) {
            Ok(folder) => Some(folder),
            Err(error) => return Outcome::Failed(format!("{folder}: {error}")),
        },
        _ => return Outcome::Usage("dissect takes one folder".into()),
    };
    let mut tshark = Command::new("tshark");
    tshark.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    if !tshark.status().is_ok_and(|status| status.success()) {
        return Outcome::Skipped("tshark is not installed".into());
    }
    // The features and the workspace of the other steps, so that nothing is built again.
    let mut command =
        run::cargo(&["test", "--workspace", "--all-features", "--locked", "--test", "dissectors"]);
    command.args(["--", "--ignored", "--nocapture"]);
    if let Some(folder) = folder {
        command.env("BOWLINE_CAPTURES", folder);
    }
    run::status(&mut command)
}
