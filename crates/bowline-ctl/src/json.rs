//! JSON as the control protocol has it: integers, no fractions. serde_json reads and writes it.

use std::fmt;

use serde::{
    Serialize, Serializer,
    de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor},
};

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

/// Why a text is not JSON, or not in the supported subset, and where.
#[derive(Debug)]
pub struct JsonError(serde_json::Error);

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for JsonError {}

impl Json {
    /// Parses a text that holds one value and nothing else.
    ///
    /// # Errors
    ///
    /// The error and its place; fractions and exponents are refused too.
    pub fn parse(text: &str) -> Result<Self, JsonError> {
        let mut reader = serde_json::Deserializer::from_str(text);
        let value = Nested(0).deserialize(&mut reader).map_err(JsonError)?;
        reader.end().map_err(JsonError)?;
        Ok(value)
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
        f.write_str(&serde_json::to_string(&Written(self)).map_err(|_| fmt::Error)?)
    }
}

/// A value as serde writes it. Not the value itself: it would promise a version of serde.
struct Written<'a>(&'a Json);

impl Serialize for Written<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Json::Null => to.serialize_unit(),
            Json::Bool(value) => to.serialize_bool(*value),
            Json::Int(number) => to.serialize_i64(*number),
            Json::Uint(number) => to.serialize_u64(*number),
            Json::Text(text) => to.serialize_str(text),
            Json::List(values) => to.collect_seq(values.iter().map(Written)),
            Json::Object(members) => {
                to.collect_map(members.iter().map(|(name, value)| (name, Written(value))))
            }
        }
    }
}

/// Reads a value that is within this number of others.
#[derive(Clone, Copy)]
struct Nested(usize);

impl Nested {
    fn below<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.0 == DEPTH_MAX { Err(E::custom("nested too deeply")) } else { Ok(Self(self.0 + 1)) }
    }
}

impl<'de> DeserializeSeed<'de> for Nested {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Json, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Nested {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value without fractions")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(i64::try_from(number).map_or(Json::Uint(number), Json::Int))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let below = self.below()?;
        let mut values = Vec::new();
        while let Some(value) = from.next_element_seed(below)? {
            values.push(value);
        }
        Ok(Json::List(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let below = self.below()?;
        let mut members = Vec::new();
        while let Some(name) = from.next_key()? {
            members.push((name, from.next_value_seed(below)?));
        }
        Ok(Json::Object(members))
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
        assert_eq!(Json::parse(&value.to_string()).unwrap(), value);
    }

    #[test]
    fn it_is_printed_without_blanks_and_members_keep_their_order() {
        let text = r#"{"b":[null,true,-7],"a":{"t":"\n\u0001\"ä"},"a":18446744073709551615}"#;
        let value = Json::parse(text).unwrap();
        assert_eq!(value.to_string(), text);
        assert!(matches!(value.member("a"), Some(Json::Object(_))), "the first of a name");
    }

    #[test]
    fn escapes_are_understood() {
        let text = r#" { "a" : "\u00e4\ud83d\ude00\/\b\f" } "#;
        let value = Json::parse(text).unwrap();
        assert_eq!(value.member("a").and_then(Json::as_str), Some("ä😀/\u{8}\u{c}"));
    }

    #[test]
    fn everything_else_is_an_error_and_no_panic() {
        for text in [
            "",
            "{",
            "[",
            "\"",
            "nul",
            "{\"a\"}",
            "{\"a\":}",
            "[1,]",
            "1 2",
            "-",
            "\"\\x\"",
            "\"\\ä\"",
            "\"\\u12\"",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "\"\\u00ä\"",
            "{1:2}",
            "\u{1}",
            "\"\u{1}\"",
            "+1",
        ] {
            assert!(Json::parse(text).is_err(), "{text}");
        }
        for text in ["1.5", "1e3", "99999999999999999999", "-9223372036854775809"] {
            let error = Json::parse(text).unwrap_err().to_string();
            assert!(error.contains("a value without fractions"), "{error}");
        }
        let deep = Json::parse(&"[".repeat(100_000)).unwrap_err().to_string();
        assert!(deep.contains("nested too deeply") && deep.contains("column 33"), "{deep}");
        assert!(Json::parse(&("[".repeat(32) + &"]".repeat(32))).is_ok());
    }

    #[test]
    fn numbers_have_a_type_that_fits() {
        assert_eq!(Json::parse("9223372036854775808").unwrap(), Json::Uint(1 << 63));
        assert_eq!(Json::parse("-9223372036854775808").unwrap(), Json::Int(i64::MIN));
        assert_eq!(Json::parse("7").unwrap(), Json::Int(7));
        assert_eq!(Json::Uint(7).as_i64(), Some(7));
        assert_eq!(Json::Int(-7).as_u64(), None);
    }
}
