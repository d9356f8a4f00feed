//! Rules, and what came of asking them.

use crate::{Error, Options};

/// Whose behaviour is expected, where implementations differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Linux 6.12.
    Linux612,
    /// Linux 7.2.
    Linux72,
    /// This project.
    Bowline,
}

impl Profile {
    /// Its name on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Linux612 => "linux-6.12",
            Self::Linux72 => "linux-7.2",
            Self::Bowline => "bowline",
        }
    }
}

/// One rule of a table; `S` is what its function asks with.
pub(crate) struct Rule<S: 'static> {
    /// Its number in `docs/spec`.
    pub(crate) id: &'static str,
    /// What is asked.
    pub(crate) asked: &'static str,
    /// What is to be seen then.
    pub(crate) expected: fn(Profile) -> &'static str,
    /// Asks; returns what came if that is what is expected.
    pub(crate) ask: fn(&mut S) -> Answer,
}

/// What came, if it is what is expected; else why not.
pub type Answer = Result<String, Other>;

/// What came instead of what is expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Other {
    /// The peer does otherwise.
    Deviates(String),
    /// It could not be asked, for this reason.
    Skipped(String),
}

/// Fails with what came instead.
pub(crate) fn deviates<T>(came: impl Into<String>) -> Result<T, Other> {
    Err(Other::Deviates(came.into()))
}

/// What came of asking one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its number in `docs/spec`.
    pub id: &'static str,
    /// What was asked.
    pub asked: &'static str,
    /// What is to be seen then.
    pub expected: &'static str,
    /// What came.
    pub answer: Answer,
}

/// Asks the rules of a table in their order, or those that are named; `end` is called after each,
/// with its finding.
pub(crate) fn ask<S>(
    table: &[Rule<S>],
    options: &Options,
    scene: &mut S,
    profile: impl Fn(&S) -> Profile,
    mut end: impl FnMut(&mut S, &Finding) -> Result<(), Error>,
) -> Result<Vec<Finding>, Error> {
    let named = &options.rules;
    if let Some(unknown) = named.iter().find(|name| table.iter().all(|rule| rule.id != **name)) {
        let known = table.iter().map(|rule| rule.id).collect();
        return Err(Error::NoRule(unknown.clone(), known));
    }
    let wanted = |rule: &&Rule<S>| named.is_empty() || named.iter().any(|name| name == rule.id);
    table
        .iter()
        .filter(wanted)
        .map(|rule| {
            let answer = (rule.ask)(scene);
            let expected = (rule.expected)(profile(scene));
            let finding = Finding { id: rule.id, asked: rule.asked, expected, answer };
            end(scene, &finding)?;
            Ok(finding)
        })
        .collect()
}
