//! How results are written: a measurement on each line, for people and for `grep`.

use std::io;

use serde_json::{
    Value,
    ser::{CompactFormatter, Formatter, Serializer},
};

/// Writes the value on lines of their own down to `depth`, and on one line below.
pub(crate) fn lines(value: &Value, depth: usize) -> String {
    let mut out = Vec::new();
    let layout = Lines { depth, level: 0, is_empty: true };
    let mut to = Serializer::with_formatter(&mut out, layout);
    // Neither writing to memory nor a value with names that are texts can fail.
    let _ = serde::Serialize::serialize(value, &mut to);
    String::from_utf8_lossy(&out).into_owned()
}

/// Adds the members of one object to another.
pub(crate) fn extend(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

struct Lines {
    depth: usize,
    /// How many arrays and objects are open.
    level: usize,
    /// The innermost of them has nothing yet.
    is_empty: bool,
}

impl Lines {
    fn open(&mut self) {
        self.level += 1;
        self.is_empty = true;
    }

    /// Goes to where the next element is written.
    fn next<W: io::Write + ?Sized>(&mut self, to: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        match (first, self.level <= self.depth) {
            (true, false) => Ok(()),
            (false, false) => to.write_all(b", "),
            (first, true) => {
                to.write_all(if first { b"\n" } else { b",\n" })?;
                to.write_all("  ".repeat(self.level).as_bytes())
            }
        }
    }

    /// Goes to where the array or object is closed.
    fn close<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.level -= 1;
        if !std::mem::take(&mut self.is_empty) && self.level < self.depth {
            to.write_all(b"\n")?;
            to.write_all("  ".repeat(self.level).as_bytes())?;
        }
        Ok(())
    }
}

impl Formatter for Lines {
    fn begin_array<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open();
        CompactFormatter.begin_array(to)
    }

    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(to, first)
    }

    fn end_array<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to)?;
        CompactFormatter.end_array(to)
    }

    fn begin_object<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.open();
        CompactFormatter.begin_object(to)
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(to, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }

    fn end_object<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        self.close(to)?;
        CompactFormatter.end_object(to)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_are_broken_down_to_a_depth() {
        let value = json!({
            "b": [1, 2.5, f64::NAN],
            "a": "say \"x\"\n\u{1}",
            "c": [],
            "d": [{ "e": true }, {}],
        });
        let line =
            r#"{"b": [1, 2.5, null], "a": "say \"x\"\n\u0001", "c": [], "d": [{"e": true}, {}]}"#;
        assert_eq!(lines(&value, 0), line);
        let text = "{\n  \"b\": [\n    1,\n    2.5,\n    null\n  ],\n  \"a\": \"say \\\"x\\\"\\n\\u0001\",\n  \
                    \"c\": [],\n  \"d\": [\n    {\"e\": true},\n    {}\n  ]\n}";
        assert_eq!(lines(&value, 2), text);
    }
}
