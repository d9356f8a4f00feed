//! Values of attributes: the exact text of sysfs, and JSON.

use std::fmt;

use crate::Json;

/// The value of an attribute.
///
/// `Display` is the exact text of the file, with one newline at its end; [`to_json`](Self::to_json)
/// is for programs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Value {
    /// Text of one or several lines.
    Text(String),
    /// A signed number.
    Int(i64),
    /// An unsigned number.
    Uint(u64),
    /// Several numbers in one line, one blank between them; the names appear in JSON only.
    Words(Vec<(&'static str, u64)>),
    /// The usage text of a command file; not part of a dump.
    Usage(&'static str),
    /// A document for programs, such as JSON in one line. It may be long, and other attributes may
    /// say the same, so it is not part of a dump.
    Document(String),
    /// An empty file.
    Empty,
}

impl Value {
    /// Returns the value for programs: a string, a number, or an object of numbers.
    pub fn to_json(&self) -> Json {
        match self {
            Self::Text(text) | Self::Document(text) => Json::Text(text.clone()),
            Self::Int(number) => Json::Int(*number),
            Self::Uint(number) => Json::Uint(*number),
            Self::Words(words) => Json::Object(
                words
                    .iter()
                    .map(|(name, number)| ((*name).to_owned(), Json::Uint(*number)))
                    .collect(),
            ),
            Self::Usage(text) => Json::Text((*text).to_owned()),
            Self::Empty => Json::Text(String::new()),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) | Self::Document(text) => writeln!(f, "{text}"),
            Self::Int(number) => writeln!(f, "{number}"),
            Self::Uint(number) => writeln!(f, "{number}"),
            Self::Words(words) => {
                for (index, (_, number)) in words.iter().enumerate() {
                    if index > 0 {
                        f.write_str(" ")?;
                    }
                    write!(f, "{number}")?;
                }
                f.write_str("\n")
            }
            Self::Usage(text) => writeln!(f, "{text}"),
            Self::Empty => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_ends_in_one_newline() {
        for (value, text) in [
            (Value::Text("open".to_owned()), "open\n"),
            (Value::Int(-1), "-1\n"),
            (Value::Uint(7), "7\n"),
            (Value::Words(vec![("reads", 1), ("bytes", 512)]), "1 512\n"),
            (Value::Words(Vec::new()), "\n"),
            (Value::Document("{}".to_owned()), "{}\n"),
            (Value::Usage("Usage: echo 1 > reconnect"), "Usage: echo 1 > reconnect\n"),
            (Value::Empty, ""),
        ] {
            assert_eq!(value.to_string(), text);
        }
    }

    #[test]
    fn words_are_an_object_for_programs() {
        let value = Value::Words(vec![("reads", 1), ("bytes", u64::MAX)]);
        assert_eq!(value.to_json().to_string(), r#"{"reads":1,"bytes":18446744073709551615}"#);
    }
}
