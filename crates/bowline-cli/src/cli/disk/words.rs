//! Options that do not come from a command line: the keys of a table in a configuration file, and
//! the words of a control file. They are the options of the commands without the dashes, and are
//! parsed by the same definitions, so names, units, defaults and errors are the same.
//!
//! ```text
//! [[map]] outage = 60, ublk = true  --.
//!                                     +-> pairs -> --outage=60 --ublk -> clap -> MapEntry, How, ..
//! outage=60 ublk=true  ---------------'
//! ```

use clap::{Args, Command};

/// Names of options and their values; `true` and `false` for options without a value.
pub(super) type Pairs = Vec<(String, String)>;

/// Returns the pairs of a table; an array is an option that is given several times.
pub(super) fn of_table(table: &toml::Table) -> Result<Pairs, String> {
    let mut pairs = Pairs::new();
    for (key, value) in table {
        let all = match value {
            toml::Value::Array(all) => all.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in all {
            let text = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Float(number) => number.to_string(),
                toml::Value::Boolean(yes) => yes.to_string(),
                other => return Err(format!("{key} cannot be a {}", other.type_str())),
            };
            pairs.push((key.clone(), text));
        }
    }
    Ok(pairs)
}

/// Returns the pairs of words of the form `NAME=VALUE`.
pub(super) fn of_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Pairs, String> {
    let pair = |word: &str| {
        let (name, value) = word
            .split_once('=')
            .ok_or_else(|| format!("\"{word}\" is not NAME=VALUE, as ro=true or block=4096"))?;
        Ok((name.to_owned(), value.to_owned()))
    };
    words.into_iter().map(pair).collect()
}

/// Parses pairs as options of a command.
pub(super) fn parse<T: Args>(pairs: &Pairs) -> Result<T, String> {
    let empty = Command::new("entry").no_binary_name(true);
    let mut command = T::augment_args(empty.disable_help_flag(true).disable_version_flag(true));
    let mut words = Vec::new();
    for (name, value) in pairs {
        let option = command.get_arguments().find(|option| option.get_long() == Some(name));
        let Some(option) = option else {
            let known: Vec<&str> =
                command.get_arguments().filter_map(|option| option.get_long()).collect();
            return Err(format!("unknown key `{name}`; known keys: {}", known.join(", ")));
        };
        match (option.get_action().takes_values(), value.as_str()) {
            (true, value) => words.push(format!("--{name}={value}")),
            (false, "true") => words.push(format!("--{name}")),
            (false, "false") => {}
            (false, _) => return Err(format!("{name} must be true or false, not \"{value}\"")),
        }
    }
    let matches = command.try_get_matches_from_mut(words).map_err(|error| first_line(&error))?;
    T::from_arg_matches(&matches).map_err(|error| first_line(&error))
}

/// Returns what clap has to say before it shows how a command is used.
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let text = first.join(" ");
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Eq, PartialEq, clap::Args)]
    struct Some {
        #[arg(long)]
        ublk: bool,
        #[arg(long, default_value_t = 30)]
        outage: u8,
        #[arg(long)]
        path: Vec<String>,
    }

    fn of_toml(text: &str) -> Result<Some, String> {
        parse(&of_table(&text.parse().unwrap())?)
    }

    #[test]
    fn tables_and_words_are_options() {
        let usual = Some { ublk: false, outage: 30, path: Vec::new() };
        assert_eq!(of_toml(""), Ok(usual));
        let all = Some { ublk: true, outage: 5, path: vec!["a b".into(), "--x".into()] };
        assert_eq!(
            of_toml("ublk = true\noutage = 5\npath = [\"a b\", \"--x\"]").as_ref(),
            Ok(&all)
        );
        let words = ["outage=5", "ublk=true", "path=a b", "path=--x"];
        assert_eq!(parse(&of_words(words).unwrap()), Ok(all));
    }

    #[test]
    fn mistakes_name_the_option() {
        for (text, wanted) in [
            ("stay = false", "unknown key `stay`; known keys: ublk, outage, path"),
            ("ublk = 1", "ublk must be true or false, not \"1\""),
            ("outage = true", "invalid value 'true' for '--outage <OUTAGE>'"),
            ("outage = [1, 2]", "'--outage <OUTAGE>' cannot be used multiple times"),
            ("path = { a = 1 }", "path cannot be a table"),
        ] {
            let error = of_toml(text).unwrap_err();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        assert!(of_words(["ublk"]).is_err());
    }
}
