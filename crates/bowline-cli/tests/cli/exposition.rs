//! A strict reader of Prometheus' text format, version 0.0.4, and of its rules for names.

use std::{
    collections::{BTreeMap, HashSet},
    io::{Read, Write},
    net::TcpStream,
};

/// A sample: its name, its labels and its value.
type Sample = (String, Vec<(String, String)>, f64);

/// A family: its type, and its samples in their order.
#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) kind: String,
    pub(crate) samples: Vec<Sample>,
}

/// All families by their names.
pub(crate) type Families = BTreeMap<String, Family>;

/// Asks a server for a page; returns what stands before the body, and the body.
pub(crate) fn get(place: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(place).expect("metrics are served");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {place}\r\n\r\n").expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("head and body");
    (head.to_owned(), body.to_owned())
}

/// Returns the metrics at a place, checked.
pub(crate) fn metrics(place: &str) -> Families {
    let (head, body) = get(place, "/metrics");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    parse(&body)
}

/// Returns the value of the only sample of a family.
#[track_caller]
pub(crate) fn only(all: &Families, name: &str) -> f64 {
    let [(_, _, value)] = all[name].samples.as_slice() else { panic!("{:?}", all[name]) };
    *value
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(|c: char| c.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Parses a text; panics at whatever the format or the rules for names do not allow.
pub(crate) fn parse(text: &str) -> Families {
    assert!(text.ends_with('\n'), "the last line ends");
    let mut all = Families::new();
    let mut now = String::new();
    let mut seen = HashSet::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("a name and a meaning");
            assert!(is_name(name) && help.ends_with('.') && help.len() > 4, "{line}");
            let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
            let (same, kind) = kind.and_then(|line| line.split_once(' ')).expect("a type");
            assert_eq!(same, name);
            check_name(name, kind);
            let family = Family { kind: kind.to_owned(), samples: Vec::new() };
            assert!(all.insert(name.to_owned(), family).is_none(), "{name} comes twice");
            now = name.to_owned();
            continue;
        }
        let (name, labels, value) = sample(line);
        let family = all.get_mut(&now).expect("a family before its samples");
        let of = match family.kind.as_str() {
            "histogram" => ["_bucket", "_sum", "_count"]
                .into_iter()
                .find_map(|suffix| name.strip_suffix(suffix))
                .expect("a part of a histogram"),
            _ => &name,
        };
        assert_eq!(of, now, "samples stand with their family");
        assert!(seen.insert(line.rsplit_once(' ').expect("a value").0.to_owned()), "twice: {line}");
        assert!(value >= 0.0, "{line}");
        family.samples.push((name, labels, value));
    }
    all.iter().filter(|(_, family)| family.kind == "histogram").for_each(check_histogram);
    all
}

/// The rules: counters end in `_total`, what is measured has its base unit.
fn check_name(name: &str, kind: &str) {
    assert!(["counter", "gauge", "histogram"].contains(&kind), "{name} {kind}");
    assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
    let stem = name.strip_suffix("_total").unwrap_or(name);
    for word in ["ms", "us", "ns", "milliseconds", "kib", "kb", "mb", "kilobytes", "percent"] {
        assert!(!stem.ends_with(&format!("_{word}")), "{name}: no base unit");
    }
    for word in ["bytes", "seconds"] {
        let inside = stem.contains(&format!("_{word}_"));
        assert!(!inside, "{name}: the unit is not at its end");
    }
    for suffix in ["_bucket", "_sum", "_count"] {
        assert!(!name.ends_with(suffix), "{name}: for histograms only");
    }
}

fn check_histogram((name, family): (&String, &Family)) {
    let mut last = 0.0;
    for (part, labels, value) in &family.samples {
        if part.ends_with("_bucket") {
            assert!(*value >= last, "{name} falls");
            last = if labels.iter().any(|(_, bound)| bound == "+Inf") { 0.0 } else { *value };
        }
    }
}

fn sample(line: &str) -> Sample {
    let end = line.find(['{', ' ']).expect("a name and a value");
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line}");
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"").expect("a label");
            assert!(is_name(label) && !label.starts_with("__"), "{line}");
            let (value, after) = quoted(after);
            labels.push((label.to_owned(), value));
            match after.strip_prefix(',') {
                Some(more) => rest = more,
                None => {
                    rest = after.strip_prefix('}').expect("the end of the labels");
                    break;
                }
            }
        }
    }
    let value = rest.strip_prefix(' ').expect("a value");
    (name.to_owned(), labels, value.parse().expect("a number"))
}

/// Returns an unescaped value and what stands after its closing quote.
fn quoted(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut chars = text.char_indices();
    loop {
        match chars.next().expect("a closing quote") {
            (at, '"') => return (value, &text[at + 1..]),
            (_, '\\') => value.push(match chars.next().expect("an escaped character").1 {
                'n' => '\n',
                c @ ('"' | '\\') => c,
                c => panic!("\\{c} is not escaped so"),
            }),
            (_, c) => value.push(c),
        }
    }
}
