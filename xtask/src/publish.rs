//! What crates.io asks of a crate, and that all can be packaged.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::repo;
use crate::run::{Outcome, cargo, status};

/// What each published crate says about itself, for those who find it.
const FIELDS: [&str; 4] = ["description", "license", "repository", "readme"];
const LISTS: [&str; 2] = ["keywords", "categories"];
const TEXTS: [&str; 3] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// Packages every published crate, each after those it depends on, and uploads nothing. What is in
/// the packages is not built again: it has been, in the workspace.
pub(crate) fn check() -> Outcome {
    let incomplete = match incomplete() {
        Ok(incomplete) => incomplete,
        Err(error) => return Outcome::Failed(error),
    };
    if !incomplete.is_empty() {
        return Outcome::Failed(incomplete.join("\n"));
    }
    let mut publish = cargo(&["publish", "--workspace", "--dry-run", "--no-verify"]);
    // Whoever is at work has changed files.
    status(publish.args(["--locked", "--allow-dirty"]))
}

/// Returns what published crates lack.
fn incomplete() -> Result<Vec<String>, String> {
    let mut metadata = cargo(&["metadata", "--format-version", "1", "--no-deps", "--locked"]);
    let output = metadata.output().map_err(|error| format!("cargo metadata: {error}"))?;
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata: no packages")?;
    // `publish = false` is an empty list of registries.
    let published = packages.iter().filter(|package| package["publish"].is_null());
    Ok(published.flat_map(|package| lacks(package, |file| file.is_file())).collect())
}

/// Returns what one crate lacks.
fn lacks(package: &Value, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let name = package["name"].as_str().unwrap_or_default();
    let manifest = package["manifest_path"].as_str().unwrap_or_default();
    let folder = PathBuf::from(manifest).parent().map_or_else(repo::root, Path::to_path_buf);
    let fields = FIELDS.iter().filter(|field| package[**field].is_null());
    let lists =
        LISTS.iter().filter(|list| package[**list].as_array().is_none_or(|list| list.is_empty()));
    let texts = TEXTS.iter().filter(|text| !exists(&folder.join(text)));
    let all = fields.chain(lists).chain(texts);
    all.map(|what| format!("{name} is published (publish = false?), and lacks {what}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_crate_without_keywords_and_licence_is_told() {
        let package = json!({
            "name": "a", "manifest_path": "/a/Cargo.toml", "description": "d", "license": "MIT",
            "repository": "https://example.org", "readme": "README.md", "keywords": [],
            "categories": ["network-programming"],
        });
        let lacks = lacks(&package, |file| file != Path::new("/a/LICENSE-MIT"));
        let lacks: Vec<_> = lacks.iter().filter_map(|text| text.split(' ').next_back()).collect();
        assert_eq!(lacks, ["keywords", "LICENSE-MIT"]);
    }
}
