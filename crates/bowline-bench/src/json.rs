//! Just enough JSON to write results.

use std::fmt::Write as _;

/// A value to write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Int(u64),
    Float(f64),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(&'static str, Json)>),
}

impl Json {
    /// A text value.
    pub(crate) fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// Writes the value on lines of their own down to `depth`, and compactly below.
    pub(crate) fn write(&self, depth: usize) -> String {
        let mut out = String::new();
        self.emit(&mut out, depth, 0);
        out
    }

    fn emit(&self, out: &mut String, depth: usize, level: usize) {
        // Writing to a String cannot fail.
        match self {
            Self::Null => out.push_str("null"),
            Self::Bool(b) => drop(write!(out, "{b}")),
            Self::Int(n) => drop(write!(out, "{n}")),
            Self::Float(x) if x.is_finite() => drop(write!(out, "{x}")),
            Self::Float(_) => out.push_str("null"),
            Self::Text(text) => quote(out, text),
            Self::List(items) => {
                sequence(out, ['[', ']'], items, depth, level, |out, item| {
                    item.emit(out, depth, level + 1);
                });
            }
            Self::Object(items) => {
                sequence(out, ['{', '}'], items, depth, level, |out, (key, item)| {
                    quote(out, key);
                    out.push_str(": ");
                    item.emit(out, depth, level + 1);
                });
            }
        }
    }
}

fn sequence<T>(
    out: &mut String,
    [open, close]: [char; 2],
    items: &[T],
    depth: usize,
    level: usize,
    mut emit: impl FnMut(&mut String, &T),
) {
    let lines = level < depth && !items.is_empty();
    out.push(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            out.push_str(if lines { "," } else { ", " });
        }
        if lines {
            out.push('\n');
            out.push_str(&"  ".repeat(level + 1));
        }
        emit(out, item);
    }
    if lines {
        out.push('\n');
        out.push_str(&"  ".repeat(level));
    }
    out.push(close);
}

fn quote(out: &mut String, text: &str) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c < ' ' => drop(write!(out, "\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_every_kind_of_value() {
        let value = Json::Object(vec![
            ("a", Json::List(vec![Json::Int(1), Json::Float(2.5), Json::Float(f64::NAN)])),
            ("b", Json::text("say \"x\"\n\u{1}")),
            ("c", Json::List(Vec::new())),
            ("d", Json::Bool(true)),
        ]);
        assert_eq!(
            value.write(0),
            r#"{"a": [1, 2.5, null], "b": "say \"x\"\n\u0001", "c": [], "d": true}"#
        );
        assert!(value.write(1).starts_with("{\n  \"a\": [1, 2.5"));
    }
}
