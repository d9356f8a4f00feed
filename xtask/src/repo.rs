//! The repository as files and lines.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::Outcome;

/// Lines of code above which a file should be looked at for a seam.
const LONG_FILE: usize = 800;

/// Root of the repository.
pub(crate) fn root() -> PathBuf {
    let xtask = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    xtask.parent().map_or(xtask.clone(), Path::to_path_buf)
}

/// Folder of what cargo builds.
pub(crate) fn target() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").filter(|folder| !folder.is_empty());
    root().join(given.unwrap_or_else(|| "target".into()))
}

/// Names of all files of the repository that are not ignored, relative to the root.
///
/// # Errors
///
/// When git cannot list them.
pub(crate) fn files() -> Result<Vec<String>, String> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .map_err(|error| format!("git ls-files: {error}"))?;
    if !output.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    let mut names: Vec<String> = output
        .stdout
        .split(|b| *b == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .filter(|name| root().join(name).is_file())
        .collect();
    names.sort();
    names.dedup();
    Ok(names)
}

/// Reads a file of the repository; `None` when it is not text.
pub(crate) fn text(name: &str) -> Option<String> {
    std::fs::read_to_string(root().join(name)).ok()
}

/// Tells whether the whole file is there for tests.
pub(crate) fn is_test_file(name: &str) -> bool {
    let stem = Path::new(name).file_stem().map(|s| s.to_string_lossy().into_owned());
    let stem = stem.unwrap_or_default();
    ["interop/", "fuzz/", "model/", "crates/bowline-sim/"].iter().any(|dir| name.starts_with(dir))
        || name.contains("/tests/")
        || name.contains("/benches/")
        || stem == "tests"
        || stem.ends_with("_tests")
}

/// Number of lines before the test module that ends a file; all lines without one.
pub(crate) fn code_lines(text: &str) -> usize {
    let mut previous_is_cfg = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if previous_is_cfg && line.starts_with("mod ") && line.ends_with('{') {
            return index - 1;
        }
        previous_is_cfg = line == "#[cfg(test)]";
    }
    text.lines().count()
}

/// Names files of more than 800 lines of code; a warning, never a failure.
pub(crate) fn warn_long_files() -> Outcome {
    let names = match files() {
        Ok(names) => names,
        Err(error) => return Outcome::Failed(error),
    };
    for name in names.iter().filter(|name| name.ends_with(".rs") && !is_test_file(name)) {
        let lines = text(name).map_or(0, |text| code_lines(&text));
        if lines > LONG_FILE {
            println!("warning: {name} has {lines} lines of code: is there a seam?");
        }
    }
    Outcome::Passed
}

/// Columns that a line of comments may have; code is held to the same by rustfmt.
const COMMENT_COLUMNS: usize = 100;

/// Finds lines of comments that are too long. Rows of tables cannot be broken and are let be.
pub(crate) fn check_comment_width() -> Outcome {
    let names = match files() {
        Ok(names) => names,
        Err(error) => return Outcome::Failed(error),
    };
    let sources = names.iter().filter(|name| name.ends_with(".rs"));
    let long = sources.flat_map(|name| {
        let lines = wide_comments(&text(name).unwrap_or_default());
        lines.into_iter().map(move |line| format!("{name}:{line}"))
    });
    let long: Vec<_> = long.collect();
    if long.is_empty() {
        Outcome::Passed
    } else {
        Outcome::Failed(format!(
            "comments of more than {COMMENT_COLUMNS} columns:\n{}",
            long.join("\n")
        ))
    }
}

/// Numbers of the lines that are comments and too long.
fn wide_comments(text: &str) -> Vec<usize> {
    let is_wide = |line: &str| {
        let comment = line.trim_start().strip_prefix("//");
        comment.is_some_and(|rest| !rest.trim_start_matches(['/', '!', ' ']).starts_with('|'))
            && line.chars().count() > COMMENT_COLUMNS
    };
    let lines = text.lines().enumerate();
    lines.filter(|(_, line)| is_wide(line)).map(|(at, _)| at + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_comments_are_found_and_tables_are_not() {
        let words = "word ".repeat(25);
        let text = format!("fn a() {{}}\n    /// {words}\n//! | {words} |\n// short\n");
        assert_eq!(wide_comments(&text), [2]);
    }

    #[test]
    fn code_ends_where_the_test_module_starts() {
        assert_eq!(code_lines("fn a() {}\n#[cfg(test)]\nmod tests {\n}\n"), 1);
        assert_eq!(code_lines("#[cfg(test)]\nmod tests;\nfn a() {}\n"), 3);
    }

    #[test]
    fn test_files_are_known_by_their_place() {
        assert!(is_test_file("crates/bowline/tests/loopback.rs"));
        assert!(is_test_file("crates/bowline-rds/src/path/tests.rs"));
        assert!(is_test_file("interop/run"));
        assert!(!is_test_file("crates/bowline-rds/src/path.rs"));
    }
}
