//! Values of options that have a few known ones, for completions.

use std::ffi::OsStr;

use clap::{
    Arg, Command, Error,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};

/// Path MTUs of InfiniBand.
pub(crate) const MTUS: &[&str] = &["256", "512", "1024", "2048", "4096"];

/// A parser with the values that a completion lists; others may parse as well.
#[derive(Clone, Debug)]
pub(crate) struct Known<F> {
    values: &'static [&'static str],
    parse: F,
}

/// Makes a parser of `parse` whose common values are these.
pub(crate) const fn known<F>(values: &'static [&'static str], parse: F) -> Known<F> {
    Known { values, parse }
}

impl<F, T, E> TypedValueParser for Known<F>
where
    F: Fn(&str) -> Result<T, E> + Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        let parse = self.parse.clone();
        StringValueParser::new().try_map(move |text| parse(&text)).parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values.iter().map(|value| PossibleValue::new(*value))))
    }
}
