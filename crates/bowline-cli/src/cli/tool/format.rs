//! Tables, csv, json and xml [NB-44].

use bowline_node::log::shown;
use serde_json::{Map, Value};

use super::columns::{Column, Mode, Target};

/// Format of a list.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum Format {
    #[default]
    Term,
    Csv,
    Json,
    Xml,
}

impl Format {
    pub(super) fn of(word: &str) -> Option<Self> {
        match word {
            "term" => Some(Self::Term),
            "csv" => Some(Self::Csv),
            "json" => Some(Self::Json),
            "xml" => Some(Self::Xml),
            _ => None,
        }
    }
}

/// A unit of sizes: a power of 1024.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Unit(u32);

const UNITS: &str = "bkmgtpe";

impl Unit {
    pub(super) fn of(word: &str) -> Option<Self> {
        let lower = word.to_ascii_lowercase();
        let power = UNITS.find(lower.as_str()).filter(|_| lower.len() == 1)?;
        u32::try_from(power).ok().map(Self)
    }

    /// Returns the unit in bytes.
    pub(super) const fn bytes(self) -> u64 {
        1 << (10 * self.0)
    }
}

/// A value of a field.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Cell {
    /// Unknown.
    Nothing,
    /// A text.
    Text(String),
    /// A plain number.
    Number(u64),
    /// A number of bytes.
    Bytes(u64),
    /// A number of sectors of 512 bytes.
    Sectors(u64),
}

impl Cell {
    /// Returns the text in a table.
    pub(super) fn shown(&self, unit: Option<Unit>) -> String {
        match self {
            Self::Nothing => String::new(),
            Self::Text(text) => shown(text).into_owned(),
            Self::Number(number) => number.to_string(),
            Self::Bytes(bytes) => size(*bytes, unit),
            Self::Sectors(sectors) => size(sectors.saturating_mul(512), unit),
        }
    }

    fn number(&self) -> Option<u64> {
        match self {
            Self::Number(number) | Self::Bytes(number) | Self::Sectors(number) => Some(*number),
            Self::Nothing | Self::Text(_) => None,
        }
    }

    /// Returns the JSON value: raw numbers, and null if unknown.
    fn json(&self) -> Value {
        match self {
            Self::Nothing => Value::Null,
            Self::Text(text) => Value::from(text.as_str()),
            Self::Number(number) | Self::Bytes(number) | Self::Sectors(number) => {
                Value::from(*number)
            }
        }
    }

    fn plus(&self, other: &Self) -> Self {
        match (self, other) {
            (Self::Number(a), Self::Number(b)) => Self::Number(a.saturating_add(*b)),
            (Self::Bytes(a), Self::Bytes(b)) => Self::Bytes(a.saturating_add(*b)),
            (Self::Sectors(a), Self::Sectors(b)) => Self::Sectors(a.saturating_add(*b)),
            _ => Self::Nothing,
        }
    }
}

/// Formats a size: in the requested unit without its letter, or in a fitting unit with its letter.
fn size(bytes: u64, unit: Option<Unit>) -> String {
    let scaled = |unit: Unit| bytes as f64 / unit.bytes() as f64;
    match unit {
        Some(Unit(0)) => bytes.to_string(),
        Some(unit) => format!("{:.3}", scaled(unit)),
        None if bytes < 1024 => format!("{bytes}B"),
        None => {
            let power = (63 - bytes.leading_zeros()) / 10;
            let letter = UNITS.as_bytes()[power as usize].to_ascii_uppercase();
            format!("{:.3}{}", scaled(Unit(power)), char::from(letter))
        }
    }
}

/// An object to print: its fields, and for a session its paths.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Item {
    pub(super) cells: Vec<(&'static str, Cell)>,
    /// Lines of the tree below a session: device, port and name of each path.
    pub(super) below: Vec<String>,
}

impl Item {
    pub(super) fn cell(&self, key: &str) -> &Cell {
        self.cells.iter().find(|(known, _)| *known == key).map_or(&Cell::Nothing, |(_, cell)| cell)
    }

    /// Returns the text of a field, empty when it has none.
    pub(super) fn text(&self, key: &str) -> &str {
        match self.cell(key) {
            Cell::Text(text) => text,
            _ => "",
        }
    }
}

/// Objects of one kind on one side, with the fields to print.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) mode: Mode,
    pub(super) target: Target,
    pub(super) columns: Vec<Column>,
    pub(super) items: Vec<Item>,
}

impl Group {
    /// Returns the name of the group in json and xml.
    pub(super) const fn name(&self) -> &'static str {
        match (self.mode, self.target) {
            (Mode::Client, Target::Device) => "imports",
            (Mode::Server, Target::Device) => "exports",
            (Mode::Client, Target::Session) => "outgoing sessions",
            (Mode::Server, Target::Session) => "incoming sessions",
            (Mode::Client, Target::Path) => "outgoing paths",
            (Mode::Server, Target::Path) => "incoming paths",
        }
    }
}

/// Options of a table.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Look {
    pub(super) unit: Option<Unit>,
    pub(super) no_tree: bool,
    pub(super) no_headers: bool,
    pub(super) no_totals: bool,
    pub(super) colour: bool,
}

const BOLD: &str = "1";
const GREEN: &str = "32";
const RED: &str = "31";
const CYAN: &str = "36";

fn paint(look: Look, colour: Option<&str>, text: &str) -> String {
    match colour {
        Some(colour) if look.colour && !text.trim().is_empty() => {
            format!("\x1b[{colour}m{text}\x1b[0m")
        }
        _ => text.to_owned(),
    }
}

fn colour_of(key: &str, text: &str) -> Option<&'static str> {
    match (key, text) {
        ("state", "connected" | "open") => Some(GREEN),
        ("state", _) => Some(RED),
        ("sessname" | "devname", _) => Some(BOLD),
        _ => None,
    }
}

/// Returns a group as a table: columns two blanks apart, text to the left, numbers to the right,
/// totals under a line.
pub(super) fn table(group: &Group, look: Look) -> String {
    let shown: Vec<Vec<String>> = group
        .items
        .iter()
        .map(|item| group.columns.iter().map(|(key, _)| item.cell(key).shown(look.unit)).collect())
        .collect();
    let totals: Vec<Cell> = group.columns.iter().map(|(key, _)| total(group, key)).collect();
    let summed: Vec<bool> = totals.iter().map(|cell| cell.number().is_some()).collect();
    let numeric: Vec<bool> = group
        .columns
        .iter()
        .map(|(key, _)| group.items.iter().any(|item| item.cell(key).number().is_some()))
        .collect();
    let with_totals = !look.no_totals && group.items.len() > 1 || wants_totals(group, look);
    let widths: Vec<usize> = group
        .columns
        .iter()
        .enumerate()
        .map(|(index, (_, heading))| {
            let heading = if look.no_headers { 0 } else { heading.chars().count() };
            let total = if with_totals { totals[index].shown(look.unit).len() } else { 0 };
            let cells = shown.iter().map(|row| row[index].chars().count());
            cells.chain([heading, total]).max().unwrap_or(0)
        })
        .collect();
    let pad = |index: usize, text: &str| {
        let width = widths[index];
        if numeric[index] { format!("{text:>width$}") } else { format!("{text:<width$}") }
    };
    let line =
        |cells: Vec<String>| cells.into_iter().map(|cell| cell + "  ").collect::<String>() + "\n";
    let mut out = String::new();
    if !look.no_headers {
        let heads = group.columns.iter().enumerate();
        out += &line(heads.map(|(i, (_, h))| paint(look, Some(CYAN), &pad(i, h))).collect());
    }
    for (item, row) in group.items.iter().zip(&shown) {
        let cells = group.columns.iter().enumerate().map(|(index, (key, _))| {
            paint(look, colour_of(key, &row[index]), &pad(index, &row[index]))
        });
        out += &line(cells.collect());
        if !look.no_tree {
            out += &tree(&item.below);
        }
    }
    if with_totals && summed.contains(&true) {
        let rule =
            |index: usize| if numeric[index] { "─".repeat(widths[index]) } else { String::new() };
        out += &line((0..widths.len()).map(|index| pad(index, &rule(index))).collect());
        let sums = totals.iter().enumerate();
        out += &line(sums.map(|(index, cell)| pad(index, &cell.shown(look.unit))).collect());
    }
    out
}

/// Lists of sessions have totals even for one.
fn wants_totals(group: &Group, look: Look) -> bool {
    !look.no_totals && group.target == Target::Session && !group.items.is_empty()
}

fn total(group: &Group, key: &str) -> Cell {
    let mut cells = group.items.iter().map(|item| item.cell(key));
    // A port is a number but no quantity.
    if key == "hca_port" {
        return Cell::Nothing;
    }
    let first = cells.next().cloned().unwrap_or(Cell::Nothing);
    let sum = cells.fold(first, |sum, cell| sum.plus(cell));
    if sum.number().is_some() { sum } else { Cell::Nothing }
}

/// Returns the lines below a session.
pub(super) fn tree(below: &[String]) -> String {
    let last = below.len().saturating_sub(1);
    let lines = below.iter().enumerate();
    lines
        .map(|(index, name)| {
            format!("{} {}  \n", if index == last { "└─" } else { "├─" }, shown(name))
        })
        .collect()
}

/// Returns one object, a field per line.
pub(super) fn sheet(group: &Group, item: &Item, look: Look) -> String {
    let width = group.columns.iter().map(|(_, heading)| heading.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for (key, heading) in &group.columns {
        let text = item.cell(key).shown(look.unit);
        let heading = paint(look, Some(CYAN), &format!("{heading:<width$}"));
        out += &format!("{heading}  {}\n", paint(look, colour_of(key, &text), &text));
    }
    if !look.no_tree {
        out += &tree(&item.below);
    }
    out
}

/// Returns groups as csv: a line of keys, strings in quotation marks, numbers bare.
pub(super) fn csv(groups: &[Group], no_headers: bool) -> String {
    let mut out = String::new();
    for group in groups.iter().filter(|group| !group.items.is_empty() || groups.len() == 1) {
        if !no_headers {
            let keys: Vec<&str> = group.columns.iter().map(|(key, _)| *key).collect();
            out += &(keys.join(",") + "\n");
        }
        for item in &group.items {
            let cells = group.columns.iter().map(|(key, _)| match item.cell(key) {
                Cell::Nothing => String::new(),
                Cell::Text(text) => format!("\"{}\"", shown(text).replace('"', "\"\"")),
                cell => cell.json().to_string(),
            });
            out += &(cells.collect::<Vec<_>>().join(",") + "\n");
        }
    }
    out
}

/// Returns groups as one json object: arrays of flat objects.
pub(super) fn json(groups: &[Group]) -> String {
    let mut object = Map::new();
    for group in groups {
        let items = group.items.iter().map(|item| {
            let members =
                group.columns.iter().map(|(key, _)| ((*key).to_owned(), item.cell(key).json()));
            Value::Object(members.collect())
        });
        object.insert(group.name().to_owned(), Value::Array(items.collect()));
    }
    let text = serde_json::to_string_pretty(&Value::Object(object)).unwrap_or_default();
    text + "\n"
}

/// Returns groups as xml: an element per field.
pub(super) fn xml(groups: &[Group]) -> String {
    let mut out = String::from("<rnbd>\n");
    for group in groups {
        let name = group.name().replace(' ', "_");
        let one = match group.target {
            Target::Device => "device",
            Target::Session => "session",
            Target::Path => "path",
        };
        out += &format!("  <{name}>\n");
        for item in &group.items {
            out += &format!("    <{one}>\n");
            for (key, _) in &group.columns {
                let text = match item.cell(key) {
                    Cell::Nothing => String::new(),
                    Cell::Text(text) => escaped(text),
                    cell => cell.json().to_string(),
                };
                out += &format!("      <{key}>{text}</{key}>\n");
            }
            out += &format!("    </{one}>\n");
        }
        out += &format!("  </{name}>\n");
    }
    out + "</rnbd>\n"
}

fn escaped(text: &str) -> String {
    let kept = text.chars().filter(|c| !c.is_control());
    kept.map(|c| match c {
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '&' => "&amp;".to_owned(),
        c => c.to_string(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::tool::columns::chosen;

    fn session() -> Item {
        let text = |text: &str| Cell::Text(text.to_owned());
        Item {
            cells: vec![
                ("sessname", text("alpha@beta")),
                ("state", text("connected")),
                ("path_uu", text("U_")),
                ("mp_short", text("MI")),
                ("tx_bytes", Cell::Bytes(409_601)),
                ("rx_bytes", Cell::Bytes(819_200)),
                ("reconnects", Cell::Number(4)),
            ],
            below: vec![
                "bwl0 1 ip:10.1.0.1@ip:10.1.0.2".to_owned(),
                "bwl1 1 ip:10.2.0.1@ip:10.2.0.2".to_owned(),
            ],
        }
    }

    fn group(items: Vec<Item>) -> Group {
        let (mode, target) = (Mode::Client, Target::Session);
        Group { mode, target, columns: chosen(mode, target, None), items }
    }

    #[test]
    fn a_table_looks_as_that_of_the_original() {
        // tests [NB-43] [NB-44]
        let expected = "\
Session name  State      PS  MP        TX        RX  Reconnects  
alpha@beta    connected  U_  MI  400.001K  800.000K           4  
├─ bwl0 1 ip:10.1.0.1@ip:10.1.0.2  
└─ bwl1 1 ip:10.2.0.1@ip:10.2.0.2  
                                 ────────  ────────  ──────────  
                                 400.001K  800.000K           4  
";
        assert_eq!(table(&group(vec![session()]), Look::default()), expected);
    }

    #[test]
    fn parts_of_a_table_can_be_left_out() {
        let look = Look {
            no_tree: true,
            no_headers: true,
            no_totals: true,
            unit: Unit::of("B"),
            ..Look::default()
        };
        assert_eq!(
            table(&group(vec![session()]), look),
            "alpha@beta  connected  U_  MI  409601  819200  4  \n"
        );
    }

    #[test]
    fn sizes_have_three_decimals() {
        for (bytes, unit, text) in [
            (0, None, "0B"),
            (1023, None, "1023B"),
            (2 << 20, None, "2.000M"),
            (u64::MAX, None, "16.000E"),
            (1536, Some("k"), "1.500"),
            (1536, Some("B"), "1536"),
            (1 << 30, Some("T"), "0.001"),
        ] {
            assert_eq!(size(bytes, unit.and_then(Unit::of)), text);
        }
        assert_eq!(Unit::of("kb"), None);
        assert_eq!(Unit::of(""), None);
    }

    #[test]
    fn csv_json_and_xml_are_valid() {
        // tests [NB-44]
        let mut odd = session();
        odd.cells[0].1 = Cell::Text("a<\"b\"&c".to_owned());
        odd.cells.pop();
        let groups = [group(vec![session(), odd])];
        assert_eq!(
            csv(&groups, false),
            "sessname,state,path_uu,mp_short,tx_bytes,rx_bytes,reconnects\n\
             \"alpha@beta\",\"connected\",\"U_\",\"MI\",409601,819200,4\n\
             \"a<\"\"b\"\"&c\",\"connected\",\"U_\",\"MI\",409601,819200,\n"
        );
        let parsed: Value = serde_json::from_str(&json(&groups)).unwrap();
        assert_eq!(parsed["outgoing sessions"][0]["tx_bytes"], 409_601);
        assert_eq!(parsed["outgoing sessions"][1]["reconnects"], Value::Null);
        let text = xml(&groups);
        assert!(text.contains("<sessname>a&lt;\"b\"&amp;c</sessname>"));
        assert_eq!(text.matches("<session>").count(), text.matches("</session>").count());
    }

    #[test]
    fn a_sheet_has_a_line_per_field() {
        let text = sheet(&group(Vec::new()), &session(), Look::default());
        assert!(text.starts_with("Session name  alpha@beta\nState         connected\n"));
        assert!(text.ends_with("└─ bwl1 1 ip:10.2.0.1@ip:10.2.0.2  \n"));
    }
}
