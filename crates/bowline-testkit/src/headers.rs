//! What a compiler of C says of installed headers, for tests of declarations.

use std::io::Write;
use std::process::{Command, Stdio};

/// Values of expressions of C with a header; `None`, and the test is reported as skipped, when the
/// compiler or the header is missing.
///
/// # Panics
/// When an expression is not one of the header's.
pub fn compiled(header: &str, package: &str, expressions: &[String]) -> Option<Vec<usize>> {
    let lines: String =
        expressions.iter().map(|e| format!("    printf(\"%zu\\n\", (size_t)({e}));\n")).collect();
    let program = format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include <{header}>\nint main(void) {{\n{lines}    return 0;\n}}\n"
    );
    let name = header.replace('/', "-");
    let out = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
    let gcc = Command::new("gcc")
        .args(["-x", "c", "-", "-o"])
        .arg(&out)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut gcc) = gcc else {
        crate::skipped::without("gcc");
        return None;
    };
    gcc.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
    let said = gcc.wait_with_output().unwrap();
    if !said.status.success() {
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains("No such file"), "{said}");
        crate::skipped::because(format!("no {header}; install {package}"));
        return None;
    }
    let output = Command::new(&out).output().unwrap();
    std::fs::remove_file(&out).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    Some(text.lines().map(|line| line.parse().unwrap()).collect())
}
