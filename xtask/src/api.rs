//! The public interface of the crate `bowline` as a text, which is kept in the repository: a change
//! of it is seen in review.
//!
//! It is read from the pages that rustdoc writes. Those show items of other crates where they are
//! re-exported, with their methods, and need nothing but the stable toolchain.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::repo;
use crate::run::{Outcome, cargo, status};

/// How the documentation is written, in CI before this: then nothing is built again.
pub(crate) const DOC: [&str; 5] = ["doc", "--workspace", "--no-deps", "--all-features", "--locked"];
pub(crate) const DOC_FLAGS: (&str, &str) = ("RUSTDOCFLAGS", "-D warnings");
/// Where the interface is kept.
const KEPT: &str = "docs/api/bowline.txt";
const ACCEPT: &str = "cargo xtask api --accept";
const ABOUT: &str = "\
# The public interface of the crate bowline with all its features, item by item. It is written by
# `cargo xtask api --accept`, and `cargo xtask api` compares it.
";
/// Types that are shown and cannot be named, as is meant: those of the crates bitflags and ipnet,
/// and the traits that keep other traits to this crate.
const UNNAMED: [&str; 4] = ["Iter", "IterNames", "Contains", "Sealed"];
/// What a link to the pages of a crate below this one has.
const BELOW: &str = "/bowline_";
/// Lines of a difference that are shown.
const SHOWN: usize = 60;

/// Compares the interface with the one that is kept, or keeps it.
pub(crate) fn run(rest: &[String]) -> Outcome {
    let accept = match rest {
        [] => false,
        [flag] if flag == "--accept" => true,
        _ => return Outcome::Usage("api takes only --accept".into()),
    };
    match status(cargo(&DOC).arg("--quiet").env(DOC_FLAGS.0, DOC_FLAGS.1)) {
        Outcome::Passed => {}
        outcome => return outcome,
    }
    let (text, unnamed) = match listing(&repo::target().join("doc/bowline")) {
        Ok(listing) => listing,
        Err(error) => return Outcome::Failed(error),
    };
    if !unnamed.is_empty() {
        let all = unnamed.into_iter().collect::<Vec<_>>().join("\n  ");
        return Outcome::Failed(format!(
            "types of the interface that have no name in it:\n  {all}"
        ));
    }
    let path = repo::root().join(KEPT);
    if accept {
        return match fs::write(&path, text) {
            Ok(()) => Outcome::Passed,
            Err(error) => Outcome::Failed(format!("{KEPT}: {error}")),
        };
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    let changes = difference(&kept, &text);
    if changes.is_empty() {
        println!("{} items", text.lines().filter(|line| !line.starts_with([' ', '#'])).count());
        return Outcome::Passed;
    }
    changes.iter().take(SHOWN).for_each(|line| println!("{line}"));
    if let Some(more) = changes.len().checked_sub(SHOWN).filter(|more| *more > 0) {
        println!("and {more} more");
    }
    Outcome::Failed(format!(
        "the interface of bowline is not as {KEPT} has it. If that is meant, `{ACCEPT}` and tell it \
         in CHANGELOG.md. If no item has changed, another Rust writes it in another way: accept it."
    ))
}

/// Returns all items, one after the other, and the types that they show and that have no page.
fn listing(doc: &Path) -> Result<(String, BTreeSet<String>), String> {
    let read =
        |page: &str| fs::read_to_string(doc.join(page)).map_err(|error| format!("{page}: {error}"));
    // Pages of items that are gone may still be there, so all pages are those of this list.
    let all = read("all.html")?;
    let pages = between(&all, "<li><a href=\"", "\"").filter(|page| page.ends_with(".html"));
    let pages: BTreeSet<&str> = pages.collect();
    let (mut text, mut unnamed) = (ABOUT.to_owned(), BTreeSet::new());
    for page in pages {
        let html = read(page)?;
        let (kind, path) = name(page).ok_or_else(|| format!("{page}: not an item's page"))?;
        text += &format!("\n{kind} bowline::{path}\n");
        for code in declaration(&html).into_iter().chain(methods(&html)) {
            for line in members(code) {
                text += &format!("  {line}\n");
            }
            for name in without_page(code) {
                unnamed.insert(format!("{name} in bowline::{path}"));
            }
        }
        let traits = traits(&html);
        if !traits.is_empty() {
            text += &format!("  impl {}\n", traits.join(", "));
        }
    }
    Ok((text, unnamed))
}

/// Returns the kind and path of an item: `rtrs/struct.Engine.html` is struct `rtrs::Engine`.
fn name(page: &str) -> Option<(&str, String)> {
    let (folder, file) = page.rsplit_once('/').unwrap_or(("", page));
    let (kind, name) = file.strip_suffix(".html")?.split_once('.')?;
    let path = if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
    Some((kind, path.replace('/', "::")))
}

/// Returns what stands between two marks, wherever it does.
fn between<'a>(text: &'a str, from: &'a str, to: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(from).skip(1).filter_map(move |rest| rest.split_once(to)).map(|(part, _)| part)
}

fn declaration(html: &str) -> Option<&str> {
    between(html, "<pre class=\"rust item-decl\"><code>", "</code></pre>").next()
}

/// Returns the headers of the item's own methods, without those of traits.
fn methods(html: &str) -> impl Iterator<Item = &str> {
    let own = html.split_once("id=\"implementations-list\"").map_or("", |(_, rest)| rest);
    let ends = ["trait-implementations-list", "synthetic-implementations", "deref-methods"];
    let end = ends.iter().filter_map(|id| own.find(&format!("id=\"{id}"))).min();
    between(&own[..end.unwrap_or(own.len())], "<h4 class=\"code-header\">", "</h4>")
}

/// Returns the traits that the item implements.
fn traits(html: &str) -> Vec<String> {
    let list = html.split_once("id=\"trait-implementations-list\"").map_or("", |(_, rest)| rest);
    let end = list.find("id=\"synthetic-implementations\"").unwrap_or(list.len());
    let headers = between(&list[..end], "<h3 class=\"code-header\">", "</h3>").map(plain);
    // The compiler's own mark of a derived comparison, which is not stable.
    let all = headers.map(|text| of_trait(&text)).filter(|name| name != "StructuralPartialEq");
    let mut all: Vec<String> = all.collect();
    all.sort();
    all.dedup();
    all
}

/// Shortens `impl From<Errno> for Error` to `From<Errno>`; the item is known.
fn of_trait(header: &str) -> String {
    let text = header.strip_prefix("impl ").unwrap_or(header);
    text.split_once(" for ").map_or(text, |(name, _)| name).to_owned()
}

/// Returns a declaration line by line where it has members, so that a difference shows the member,
/// and a method in one line.
fn members(html: &str) -> Vec<String> {
    if html.trim_start().starts_with("pub fn ") || !html.contains('{') {
        return vec![plain(html)];
    }
    let lines = html.replace("</div>", "\n");
    lines.lines().map(plain).filter(|line| !line.is_empty() && !line.starts_with("//")).collect()
}

/// Removes what is only for browsers: marks, summaries of folded parts, comments.
fn plain(html: &str) -> String {
    let html =
        without(&without(html, "<summary", "</summary>"), "<span class=\"comment\">", "</span>");
    let text = without(&html, "<", ">");
    let text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    let text = text.replace("&#39;", "'").replace("&nbsp;", " ").replace("&amp;", "&");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Removes each part from one mark to the next other one.
fn without(text: &str, from: &str, to: &str) -> String {
    let mut parts = text.split(from);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |kept, part| kept + part.split_once(to).map_or("", |(_, rest)| rest))
}

/// Returns the types of a header that have no link to a page of this crate. Names that are declared
/// here have none either: what is used stands behind one of these marks, or behind a comma between
/// angle brackets or parentheses.
///
/// A link to the pages of a crate below this one does not count: users cannot name the type by it,
/// and whether it is there depends on which crate's pages were written first.
fn without_page(html: &str) -> Vec<String> {
    const MARKS: [&str; 7] = [": ", "-> ", "&", "<", "(", "dyn ", "mut "];
    let text = plain(&without_links(html));
    let mut found = Vec::new();
    let mut end = 0;
    for word in text.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
        let start = end;
        end = start + word.len();
        let (before, behind) = (&text[..start], &text[end..]);
        // The mark between this word and the next.
        end += behind.chars().next().map_or(0, char::len_utf8);
        let is_type = word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase);
        let is_used = MARKS.iter().any(|mark| before.ends_with(mark))
            || before.ends_with(", ") && is_enclosed(before);
        let is_bound = behind.starts_with(" =");
        if is_type && is_used && !is_bound && word != "Self" && !UNNAMED.contains(&word) {
            found.push(word.to_owned());
        }
    }
    found
}

/// Removes the links to pages of this crate and of crates from outside, with their names.
fn without_links(html: &str) -> String {
    let mut links = html.split("<a ");
    let first = links.next().unwrap_or_default().to_owned();
    links.fold(first, |kept, link| {
        let (attributes, behind) = link.split_once('>').unwrap_or((link, ""));
        let kept_from = if attributes.contains(BELOW) {
            behind
        } else {
            behind.split_once("</a>").map_or("", |(_, rest)| rest)
        };
        kept + kept_from
    })
}

/// Tells whether a bracket is open at the end of a text.
fn is_enclosed(text: &str) -> bool {
    let text = text.replace("->", "");
    let count = |marks: [char; 2]| text.matches(marks).count();
    count(['<', '(']) > count(['>', ')'])
}

/// Returns the lines that are in one text only, each with its item.
fn difference(kept: &str, now: &str) -> Vec<String> {
    let (kept, now) = (lines(kept), lines(now));
    let gone = kept.difference(&now).map(|(item, line)| (item, '-', line));
    let new = now.difference(&kept).map(|(item, line)| (item, '+', line));
    let mut all: Vec<_> = gone.chain(new).collect();
    all.sort();
    all.into_iter().map(|(item, sign, line)| format!("{sign} {item}: {line}")).collect()
}

/// Returns the lines of a text, with the item that each belongs to.
fn lines(text: &str) -> BTreeSet<(&str, &str)> {
    let mut item = "";
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            if !line.starts_with(' ') {
                item = line;
            }
            (item, line.trim_start())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "<pre class=\"rust item-decl\"><code>pub struct <a href=\"x\">Engine</a> { \
        <span class=\"comment\">/* private fields */</span> }</code></pre>\
        <div id=\"implementations-list\"><h4 class=\"code-header\">pub fn <a href=\"#new\">new</a>(\n\
        at: &amp;<a href=\"y\">Device</a>) -&gt; <a href=\"r\">Result</a>&lt;Self, Hidden&gt;</h4></div>\
        <div id=\"trait-implementations-list\"><h3 class=\"code-header\">impl <a>Drop</a> for \
        <a>Engine</a></h3><h4 class=\"code-header\">fn drop(&amp;mut self)</h4></div>\
        <div id=\"synthetic-implementations\"><h3 class=\"code-header\">impl Send for Engine</h3>";

    #[test]
    fn an_item_has_its_declaration_its_methods_and_its_traits() {
        let code: Vec<String> =
            declaration(PAGE).into_iter().chain(methods(PAGE)).map(plain).collect();
        assert_eq!(
            code,
            ["pub struct Engine { }", "pub fn new( at: &Device) -> Result<Self, Hidden>"]
        );
        assert_eq!(traits(PAGE), ["Drop"]);
        let path = name("rtrs/client/struct.Session.html");
        assert_eq!(path, Some(("struct", "rtrs::client::Session".to_owned())));
    }

    #[test]
    fn a_type_without_a_page_is_found() {
        let unnamed: Vec<String> = methods(PAGE).flat_map(without_page).collect();
        assert_eq!(unnamed, ["Hidden"]);
        assert_eq!(
            without_page("pub enum A { B(Secret), C, D { e: <a href=\"f\">F</a> }, }"),
            ["Secret"]
        );
        let below = "a(x: <a href=\"../bowline_block/struct.Handed.html\">Handed</a>)";
        assert_eq!(without_page(below), ["Handed"]);
    }

    #[test]
    fn a_difference_tells_the_item() {
        let (kept, now) = ("struct A\n  fn a()\n  fn b()\n", "struct A\n  fn a()\n\nstruct B\n");
        let changes = difference(kept, now);
        assert_eq!(changes, ["- struct A: fn b()", "+ struct B: struct B"]);
        assert!(difference(now, now).is_empty());
    }
}
