//! Tables of a configuration file that may also be the words of a command: `outage = 60` and
//! `outage=60` give the same.
//!
//! ```text
//! [[map]] outage = 60, ublk = true  --.
//!                                     +-> Entry -> MapConfig, FrontEndConfig, .. (serde)
//! outage=60 ublk=true  ---------------'
//! ```
//!
//! Values are texts until a field parses them, so that a size may be `4096` or `"4k"`, and one that
//! may be given several times is an array or a single value.

use std::{collections::BTreeMap, fmt::Display};

use serde::{
    Deserialize, Deserializer,
    de::{
        DeserializeOwned, DeserializeSeed, Error as _, IntoDeserializer, MapAccess, Visitor,
        value::{Error, SeqDeserializer},
    },
    forward_to_deserialize_any,
};
use toml::{Table, Value};

/// Keys and the texts of their values, which are taken out by groups of settings.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    values: BTreeMap<String, Vec<String>>,
    /// Keys of the groups that were taken.
    known: Vec<&'static str>,
}

impl Entry {
    /// Returns the keys of a table.
    pub(crate) fn of_table(table: &Table) -> Result<Self, String> {
        let mut values = BTreeMap::new();
        for (key, value) in table {
            let all = match value {
                Value::Array(all) => all.as_slice(),
                one => std::slice::from_ref(one),
            };
            let texts = all.iter().map(|value| text_of(key, value)).collect::<Result<_, _>>()?;
            values.insert(key.clone(), texts);
        }
        Ok(Self { values, known: Vec::new() })
    }

    /// Returns the keys of words of the form `NAME=VALUE`.
    pub(crate) fn of_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut values = BTreeMap::<String, Vec<String>>::new();
        for word in words {
            let (name, value) = word
                .split_once('=')
                .ok_or_else(|| format!("\"{word}\" is not NAME=VALUE, as ro=true or block=4096"))?;
            values.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        Ok(Self { values, known: Vec::new() })
    }

    /// Tells whether there is a value of such a key, which may be an empty array.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.get(key).is_some_and(|texts| !texts.is_empty())
    }

    /// Takes the keys that a group of settings has, which is a struct.
    pub(crate) fn group<T: DeserializeOwned>(&mut self) -> Result<T, String> {
        T::deserialize(Group(self)).map_err(|error| error.to_string())
    }

    /// Refuses the keys that no group has taken.
    pub(crate) fn finish(self) -> Result<(), String> {
        match self.values.keys().find(|key| !self.known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => Err(format!("unknown key `{key}`; known keys: {}", self.known.join(", "))),
        }
    }
}

fn text_of(key: &str, value: &Value) -> Result<String, String> {
    Ok(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(yes) => yes.to_string(),
        other => return Err(format!("{key} cannot be a {}", other.type_str())),
    })
}

/// Deserializes a field from its text.
pub(crate) fn parsed<'de, D: Deserializer<'de>, T, E: Display>(
    deserializer: D,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(D::Error::custom)
}

/// Makes functions of the field attribute `deserialize_with` of parsers.
macro_rules! field_parsers {
    ($($name:ident: $type:ty = $parse:expr;)*) => {
        $(fn $name<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
            $crate::config::entry::parsed(deserializer, $parse)
        })*
    };
}
pub(crate) use field_parsers;

/// The keys of one group in an entry.
struct Group<'a>(&'a mut Entry);

impl<'de> Deserializer<'de> for Group<'_> {
    type Error = Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.known.extend(fields);
        visitor.visit_map(Fields { entry: self.0, left: fields.iter(), key: "" })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom("a group of settings is a struct"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Fields of a group, of which those that the entry has are taken out.
struct Fields<'a> {
    entry: &'a mut Entry,
    left: std::slice::Iter<'static, &'static str>,
    /// The present one.
    key: &'static str,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let Some(key) = self.left.find(|key| self.entry.has(key)) else { return Ok(None) };
        self.key = key;
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let texts = self.entry.values.remove(self.key).unwrap_or_default();
        let named = |error| Error::custom(format!("{}: {error}", self.key));
        seed.deserialize(Texts(texts)).map_err(named)
    }
}

/// The value of a field.
struct Texts(Vec<String>);

impl Texts {
    /// Returns the text of a field that has one value.
    fn one(self) -> Result<String, Error> {
        let [text] = <[String; 1]>::try_from(self.0)
            .map_err(|texts| Error::custom(format!("give one value, not {}", texts.len())))?;
        Ok(text)
    }
}

impl<'de> Deserializer<'de> for Texts {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_string(self.one()?)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match &*self.one()? {
            "true" => visitor.visit_bool(true),
            "false" => visitor.visit_bool(false),
            other => Err(Error::custom(format!("\"{other}\" is not true or false"))),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(SeqDeserializer::new(self.0.into_iter()))
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct tuple tuple_struct map struct enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, Eq, PartialEq)]
    #[serde(default, rename_all = "kebab-case")]
    struct Some {
        ublk: bool,
        #[serde(deserialize_with = "outage")]
        max_outage: u8,
        path: Vec<String>,
    }

    impl Default for Some {
        fn default() -> Self {
            Self { ublk: false, max_outage: 30, path: Vec::new() }
        }
    }

    #[derive(Debug, Default, Deserialize, Eq, PartialEq)]
    #[serde(default)]
    struct Other {
        stay: bool,
        place: Option<String>,
    }

    field_parsers! {
        outage: u8 = |text| text.parse::<u8>().map_err(|_| format!("\"{text}\" is no time"));
    }

    fn both(mut entry: Entry) -> Result<(Some, Other), String> {
        let both = (entry.group()?, entry.group()?);
        entry.finish().map(|()| both)
    }

    fn of_toml(text: &str) -> Result<(Some, Other), String> {
        both(Entry::of_table(&text.parse().unwrap())?)
    }

    #[test]
    fn tables_and_words_are_settings() {
        assert_eq!(of_toml(""), Ok(Default::default()));
        let path = vec!["a b".into(), "--x".into()];
        let all = Some { ublk: true, max_outage: 5, path };
        let all = (all, Other { stay: false, place: Some("s".into()) });
        let text = "ublk = true\nmax-outage = 5\npath = [\"a b\", \"--x\"]\nplace = \"s\"";
        assert_eq!(of_toml(text).as_ref(), Ok(&all));
        let words = ["max-outage=5", "ublk=true", "path=a b", "path=--x", "place=s"];
        assert_eq!(both(Entry::of_words(words).unwrap()), Ok(all));
        assert_eq!(of_toml("path = \"a\"").unwrap().0.path, ["a"]);
        assert_eq!(of_toml("path = []\nmax-outage = []"), Ok(Default::default()));
    }

    #[test]
    fn mistakes_name_the_key() {
        let known = "known keys: ublk, max-outage, path, stay, place";
        for (text, wanted) in [
            ("stayy = false", &*format!("unknown key `stayy`; {known}")),
            ("ublk = 1", "ublk: \"1\" is not true or false"),
            ("max-outage = true", "max-outage: \"true\" is no time"),
            ("max-outage = [1, 2]", "max-outage: give one value, not 2"),
            ("path = { a = 1 }", "path cannot be a table"),
        ] {
            assert_eq!(of_toml(text).unwrap_err(), wanted, "{text}");
        }
        assert!(Entry::of_words(["ublk"]).is_err());
    }
}
