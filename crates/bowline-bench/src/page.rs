//! `bowline bench report`: the pages about recorded runs, and pictures of these.
//!
//! Nothing is measured here. The tables of a page stand between two marks; the rest of the page is
//! written by hand and left alone.

mod names;
mod runs;
mod tables;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use runs::Machine;

use crate::args::each_option;
use crate::recorded::Recorded;
use crate::svg;

const HELP: &str = "\
bowline bench report: writes the tables of bench/README.md and bench/TARGETS.md out of the recorded
runs in bench/results, or draws a recorded run

Usage: bowline bench report [OPTIONS]
       bowline bench report --svg FILE RUN

  --check     change nothing; fail when the pages and the recorded runs disagree
  --dir DIR   where README.md, TARGETS.md and the folder results are (default bench); results holds
              one run per suite and machine, the tables go between the lines
              <!-- report:begin --> and <!-- report:end --> of a page
  --svg FILE  draw the run in the file RUN as a page of plots (- for standard output)

Exit status: 0 done, 1 pages and runs disagree, 2 the command line or a file is not right.
";

/// A page, by its name, and what writes its tables.
type Page = (&'static str, fn(&[Machine]) -> String);

const PAGES: [Page; 2] = [("README.md", tables::summary), ("TARGETS.md", tables::by_target)];

const BEGIN: &str = "<!-- report:begin -->\n";
const END: &str = "<!-- report:end -->\n";

/// What the user asked for.
#[derive(Debug)]
struct Options {
    check: bool,
    dir: PathBuf,
    /// Where to draw which run.
    svg: Option<(PathBuf, PathBuf)>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self { check: false, dir: "bench".into(), svg: None };
        let (mut svg, mut run) = (None, None);
        each_option(args, |word, name, value| {
            match name {
                "--check" => options.check = true,
                "--dir" => options.dir = value()?.into(),
                "--svg" => svg = Some(PathBuf::from(value()?)),
                _ if !name.starts_with('-') && run.is_none() => run = Some(PathBuf::from(name)),
                _ => return Err(format!("unknown option {word}; see bowline bench report --help")),
            }
            Ok(())
        })?;
        options.svg = match (svg, run) {
            (Some(svg), Some(run)) => Some((svg, run)),
            (Some(_), None) => return Err("--svg needs a recorded run to draw".into()),
            (None, Some(run)) => {
                return Err(format!("{}: only --svg takes a run", run.display()));
            }
            (None, None) => None,
        };
        Ok(options)
    }
}

/// Runs `bowline bench report` and returns the exit status.
pub(crate) fn main(args: &[String]) -> i32 {
    if args.iter().any(|word| word == "--help" || word == "-h") {
        print!("{HELP}");
        return 0;
    }
    Options::parse(args).and_then(|options| run(&options)).unwrap_or_else(|why| {
        eprintln!("bowline bench report: {why}");
        2
    })
}

fn run(options: &Options) -> Result<i32, String> {
    if let Some((svg, run)) = &options.svg {
        draw(svg, run)?;
        return Ok(0);
    }
    let machines = runs::read(&options.dir.join("results"))?;
    let mut agree = true;
    for (name, tables) in PAGES {
        let path = options.dir.join(name);
        let page = path.display();
        let old = std::fs::read_to_string(&path).map_err(|e| format!("{page}: {e}"))?;
        let new = splice(&old, &tables(&machines)).map_err(|why| format!("{page}: {why}"))?;
        if new == old {
            println!("{page} is up to date");
        } else if options.check {
            agree = false;
            let alike = old.lines().zip(new.lines()).take_while(|(old, new)| old == new).count();
            println!(
                "{page}: out of date from line {} on; `bowline bench report` updates it",
                alike + 1
            );
        } else {
            crate::write(&path, &new)?;
        }
    }
    Ok(i32::from(!agree))
}

fn draw(svg: &Path, run: &Path) -> Result<(), String> {
    let run = Recorded::read(run)?;
    let blocks = run.blocks();
    let drawn = |block: &str, label: &str| {
        blocks.iter().any(|b| b.id == block && b.entries.iter().any(|e| e.label == label))
    };
    let unknown: BTreeSet<String> = run
        .results
        .records
        .iter()
        .filter(|r| !drawn(&r.block, &r.label))
        .map(|r| format!("{} {}", r.block, r.label))
        .collect();
    if !unknown.is_empty() {
        let list = unknown.into_iter().collect::<Vec<_>>().join(", ");
        eprintln!("not drawn, since this version measures no such thing: {list}");
    }
    let page = svg::page(&run.head, &run.notes, &blocks, &run.results, &run.outcomes());
    crate::write(svg, &page)
}

/// Puts the tables between the marks of a page.
fn splice(page: &str, tables: &str) -> Result<String, String> {
    let begin = page.find(BEGIN).ok_or("no line <!-- report:begin -->")? + BEGIN.len();
    let end =
        page[begin..].find(END).ok_or("no line <!-- report:end --> behind the other")? + begin;
    Ok(format!("{}\n{tables}\n{}", &page[..begin], &page[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn reads_every_option() {
        let options = parse("--check --dir=a").unwrap();
        assert!(options.check && options.svg.is_none() && options.dir == Path::new("a"));
        assert_eq!(parse("").unwrap().dir, Path::new("bench"));
        let drawn = parse("--svg - run.json").unwrap().svg;
        assert_eq!(drawn, Some(("-".into(), "run.json".into())));
        for wrong in ["--svg x", "run.json", "--svg x a b", "--dir", "--loud"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_what_is_between_the_marks_is_replaced() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");
        let new = splice(&page, "| new |\n").unwrap();
        assert_eq!(new, format!("before\n{BEGIN}\n| new |\n\n{END}after\n"));
        assert_eq!(splice(&new, "| new |\n").unwrap(), new);
        assert!(splice("before\n", "").unwrap_err().contains("report:begin"));
        assert!(splice(BEGIN, "").unwrap_err().contains("report:end"));
    }
}
