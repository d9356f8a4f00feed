//! The subset of JSON that the control protocol needs: integers, no fractions.

use std::fmt;

/// Deepest nesting that is parsed.
const DEPTH_MAX: usize = 32;

/// A JSON value. Members of objects keep their order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// An integer; parsing returns this for every number that fits.
    Int(i64),
    /// An integer above `i64::MAX`, or one made from an unsigned number.
    Uint(u64),
    /// A string.
    Text(String),
    /// An array.
    List(Vec<Json>),
    /// An object.
    Object(Vec<(String, Json)>),
}

/// Why a text is not JSON, or not in the supported subset.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct JsonError {
    /// Offset of the error in bytes.
    pub at: usize,
    /// The error.
    pub what: JsonFault,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.what, self.at)
    }
}

impl std::error::Error for JsonError {}

/// What is wrong with a text that is not JSON, or not in the supported subset.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum JsonFault {
    /// Something follows the value.
    SeveralValues,
    /// Something stands in the place of a value.
    NotAValue,
    /// The text ends where a value is expected.
    NoValue,
    /// Arrays and objects are nested more than 32 deep.
    TooDeep,
    /// An element is followed by neither a comma nor `]`.
    ArrayEnd,
    /// Something stands in the place of a member's name.
    NotAName,
    /// A member's name is not followed by a colon.
    NoColon,
    /// A member is followed by neither a comma nor `}`.
    ObjectEnd,
    /// A fraction or an exponent, which the subset does not have.
    Fraction,
    /// A number that fits neither `i64` nor `u64`.
    NumberTooLarge,
    /// The text ends within a string.
    OpenString,
    /// A string has a control character that is not escaped.
    ControlCharacter,
    /// A surrogate without its other half.
    HalfCharacter,
    /// A backslash before a character that makes no escape.
    UnknownEscape,
    /// `\u` without four hexadecimal digits.
    NotHex,
}

impl fmt::Display for JsonFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SeveralValues => "more than one value",
            Self::NotAValue => "not a value",
            Self::NoValue => "the end instead of a value",
            Self::TooDeep => "nested too deeply",
            Self::ArrayEnd => "neither a comma nor the end of the array",
            Self::NotAName => "not the name of a member",
            Self::NoColon => "no colon after the name of a member",
            Self::ObjectEnd => "neither a comma nor the end of the object",
            Self::Fraction => "a fraction, where only whole numbers are known",
            Self::NumberTooLarge => "a number that is too large",
            Self::OpenString => "a string without an end",
            Self::ControlCharacter => "a control character",
            Self::HalfCharacter => "half a character",
            Self::UnknownEscape => "an unknown escape",
            Self::NotHex => "not four hexadecimal digits",
        })
    }
}

impl Json {
    /// Parses a text that holds one value and nothing else.
    ///
    /// # Errors
    ///
    /// The error and its offset; fractions and exponents are refused too.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        let mut parser = Parser { text, at: 0 };
        let value = parser.value(0)?;
        parser.blanks();
        if parser.at == text.len() {
            Ok(value)
        } else {
            Err(parser.error(JsonFault::SeveralValues))
        }
    }

    /// Returns a member of an object, the first of that name.
    pub fn member(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => {
                members.iter().find(|(known, _)| known == name).map(|(_, value)| value)
            }
            _ => None,
        }
    }

    /// Returns a member as [`member`](Self::member), without a copy.
    pub(crate) fn into_member(self, name: &str) -> Option<Self> {
        match self {
            Self::Object(members) => {
                members.into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
            }
            _ => None,
        }
    }

    /// Returns the members of an object, none for anything else.
    pub fn members(&self) -> &[(String, Self)] {
        match self {
            Self::Object(members) => members,
            _ => &[],
        }
    }

    /// Returns the text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a number that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some(*number),
            Self::Uint(number) => i64::try_from(*number).ok(),
            _ => None,
        }
    }

    /// Returns a number without a sign.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(number) => u64::try_from(*number).ok(),
            Self::Uint(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns a number in decimal, or the text of a string.
    pub fn plain(&self) -> Option<String> {
        match self {
            Self::Text(text) => Some(text.clone()),
            Self::Int(number) => Some(number.to_string()),
            Self::Uint(number) => Some(number.to_string()),
            _ => None,
        }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(number) => write!(f, "{number}"),
            Self::Uint(number) => write!(f, "{number}"),
            Self::Text(text) => quoted(f, text),
            Self::List(values) => {
                f.write_str("[")?;
                for (index, value) in values.iter().enumerate() {
                    if index > 0 {
                        f.write_str(",")?;
                    }
                    write!(f, "{value}")?;
                }
                f.write_str("]")
            }
            Self::Object(members) => {
                f.write_str("{")?;
                for (index, (name, value)) in members.iter().enumerate() {
                    if index > 0 {
                        f.write_str(",")?;
                    }
                    quoted(f, name)?;
                    write!(f, ":{value}")?;
                }
                f.write_str("}")
            }
        }
    }
}

fn quoted(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str("\"")?;
    // In pieces up to what needs an escape: a document is long, and most of it needs none.
    for piece in text.split_inclusive(|c: char| u32::from(c) < 0x20 || matches!(c, '"' | '\\')) {
        let mut plain = piece.chars();
        let escape = match plain.next_back() {
            Some('"') => "\\\"",
            Some('\\') => "\\\\",
            Some('\n') => "\\n",
            Some('\t') => "\\t",
            Some('\r') => "\\r",
            Some(c) if u32::from(c) < 0x20 => {
                write!(f, "{}\\u{:04x}", plain.as_str(), u32::from(c))?;
                continue;
            }
            _ => {
                f.write_str(piece)?;
                continue;
            }
        };
        f.write_str(plain.as_str())?;
        f.write_str(escape)?;
    }
    f.write_str("\"")
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn error(&self, what: JsonFault) -> JsonError {
        JsonError { at: self.at, what }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn blanks(&mut self) {
        while self.peek().is_some_and(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8, what: JsonFault) -> Result<(), JsonError> {
        self.blanks();
        if self.peek() != Some(byte) {
            return Err(self.error(what));
        }
        self.at += 1;
        Ok(())
    }

    fn word(&mut self, word: &str, value: Json) -> Result<Json, JsonError> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.error(JsonFault::NotAValue));
        }
        self.at += word.len();
        Ok(value)
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        if depth > DEPTH_MAX {
            return Err(self.error(JsonFault::TooDeep));
        }
        self.blanks();
        match self.peek() {
            Some(b'n') => self.word("null", Json::Null),
            Some(b't') => self.word("true", Json::Bool(true)),
            Some(b'f') => self.word("false", Json::Bool(false)),
            Some(b'"') => Ok(Json::Text(self.string()?)),
            Some(b'[') => self.list(depth),
            Some(b'{') => self.object(depth),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(_) => Err(self.error(JsonFault::NotAValue)),
            None => Err(self.error(JsonFault::NoValue)),
        }
    }

    fn list(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut values = Vec::new();
        self.blanks();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Json::List(values));
        }
        loop {
            values.push(self.value(depth + 1)?);
            self.blanks();
            if self.peek() == Some(b',') {
                self.at += 1;
                continue;
            }
            self.eat(b']', JsonFault::ArrayEnd)?;
            return Ok(Json::List(values));
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut members = Vec::new();
        self.blanks();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Json::Object(members));
        }
        loop {
            self.blanks();
            if self.peek() != Some(b'"') {
                return Err(self.error(JsonFault::NotAName));
            }
            let name = self.string()?;
            self.eat(b':', JsonFault::NoColon)?;
            members.push((name, self.value(depth + 1)?));
            self.blanks();
            if self.peek() == Some(b',') {
                self.at += 1;
                continue;
            }
            self.eat(b'}', JsonFault::ObjectEnd)?;
            return Ok(Json::Object(members));
        }
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let start = self.at;
        self.at += 1;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        if matches!(self.peek(), Some(b'.' | b'e' | b'E')) {
            return Err(self.error(JsonFault::Fraction));
        }
        let digits = &self.text[start..self.at];
        if digits == "-" {
            return Err(self.error(JsonFault::NotAValue));
        }
        if let Ok(number) = digits.parse() {
            Ok(Json::Int(number))
        } else if let Ok(number) = digits.parse() {
            Ok(Json::Uint(number))
        } else {
            Err(self.error(JsonFault::NumberTooLarge))
        }
    }

    /// Parses a string; `at` is on its first quotation mark.
    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            let Some(c) = self.text[self.at..].chars().next() else {
                return Err(self.error(JsonFault::OpenString));
            };
            self.at += c.len_utf8();
            match c {
                '"' => return Ok(text),
                '\\' => text.push(self.escape()?),
                c if u32::from(c) < 0x20 => return Err(self.error(JsonFault::ControlCharacter)),
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let byte = self.peek().ok_or_else(|| self.error(JsonFault::OpenString))?;
        self.at += 1;
        match byte {
            b'"' | b'\\' | b'/' => Ok(char::from(byte)),
            b'n' => Ok('\n'),
            b't' => Ok('\t'),
            b'r' => Ok('\r'),
            b'b' => Ok('\u{8}'),
            b'f' => Ok('\u{c}'),
            b'u' => {
                let first = self.hex()?;
                let code = if (0xd800..0xdc00).contains(&first) {
                    let rest = self.text[self.at..].strip_prefix("\\u");
                    rest.ok_or_else(|| self.error(JsonFault::HalfCharacter))?;
                    self.at += 2;
                    let second = self.hex()?;
                    if !(0xdc00..0xe000).contains(&second) {
                        return Err(self.error(JsonFault::HalfCharacter));
                    }
                    0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
                } else {
                    first
                };
                char::from_u32(code).ok_or_else(|| self.error(JsonFault::HalfCharacter))
            }
            _ => {
                // Stays at a character boundary: slices must not split a character.
                self.at -= 1;
                Err(self.error(JsonFault::UnknownEscape))
            }
        }
    }

    fn hex(&mut self) -> Result<u32, JsonError> {
        let digits = self.text.get(self.at..self.at + 4);
        let code = digits
            .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
            .and_then(|digits| u32::from_str_radix(digits, 16).ok());
        let code = code.ok_or_else(|| self.error(JsonFault::NotHex))?;
        self.at += 4;
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_is_parsed() {
        let value = Json::Object(vec![
            ("a \"b\"\\".to_owned(), Json::List(vec![Json::Null, Json::Bool(true), Json::Int(-7)])),
            ("n".to_owned(), Json::Uint(u64::MAX)),
            ("t".to_owned(), Json::Text("ä\n\t\u{1}😀".to_owned())),
            ("e".to_owned(), Json::Object(Vec::new())),
            ("l".to_owned(), Json::List(Vec::new())),
        ]);
        assert_eq!(Json::parse(&value.to_string()), Ok(value));
    }

    #[test]
    fn escapes_are_understood() {
        let text = r#" { "a" : "\u00e4\ud83d\ude00\/\b\f" } "#;
        let value = Json::parse(text).unwrap();
        assert_eq!(value.member("a").and_then(Json::as_str), Some("ä😀/\u{8}\u{c}"));
    }

    #[test]
    fn everything_else_is_an_error_and_no_panic() {
        for (text, what) in [
            ("", JsonFault::NoValue),
            ("{", JsonFault::NotAName),
            ("[", JsonFault::NoValue),
            ("\"", JsonFault::OpenString),
            ("nul", JsonFault::NotAValue),
            ("{\"a\"}", JsonFault::NoColon),
            ("{\"a\":}", JsonFault::NotAValue),
            ("[1,]", JsonFault::NotAValue),
            ("1 2", JsonFault::SeveralValues),
            ("1.5", JsonFault::Fraction),
            ("1e3", JsonFault::Fraction),
            ("-", JsonFault::NotAValue),
            ("99999999999999999999", JsonFault::NumberTooLarge),
            ("\"\\x\"", JsonFault::UnknownEscape),
            ("\"\\ä\"", JsonFault::UnknownEscape),
            ("\"\\u12\"", JsonFault::NotHex),
            ("\"\\ud800\"", JsonFault::HalfCharacter),
            ("\"\\ud800\\u0041\"", JsonFault::HalfCharacter),
            ("\"\\u00ä\"", JsonFault::NotHex),
            ("{1:2}", JsonFault::NotAName),
            ("\u{1}", JsonFault::NotAValue),
            ("\"\u{1}\"", JsonFault::ControlCharacter),
            ("+1", JsonFault::NotAValue),
        ] {
            assert_eq!(Json::parse(text).map_err(|error| error.what), Err(what), "{text}");
        }
        let deep = Json::parse(&"[".repeat(100_000));
        assert_eq!(deep, Err(JsonError { at: 33, what: JsonFault::TooDeep }));
    }

    #[test]
    fn numbers_have_a_type_that_fits() {
        assert_eq!(Json::parse("9223372036854775808"), Ok(Json::Uint(1 << 63)));
        assert_eq!(Json::parse("-9223372036854775808"), Ok(Json::Int(i64::MIN)));
        assert_eq!(Json::Uint(7).as_i64(), Some(7));
        assert_eq!(Json::Int(-7).as_u64(), None);
    }
}
