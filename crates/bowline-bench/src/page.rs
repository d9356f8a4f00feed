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

use crate::recorded::Recorded;
use crate::svg;

/// Write the tables of bench/README.md and bench/TARGETS.md out of the recorded runs in
/// bench/results, or draw a recorded run. Measures nothing.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit status: 0 done, 1 pages and runs disagree, 2 the command line or a file is not right."
)]
pub(crate) struct Args {
    /// Change nothing; fail when the pages and the recorded runs disagree
    #[arg(long)]
    check: bool,
    /// Where README.md, TARGETS.md and the folder results are; results holds one run per suite and
    /// machine, the tables go between the lines <!-- report:begin --> and <!-- report:end --> of a
    /// page
    #[arg(long, value_name = "DIR", default_value = "bench")]
    dir: PathBuf,
    /// Draw RUN as a page of plots into FILE (- for standard output)
    #[arg(long, value_name = "FILE", requires = "run")]
    svg: Option<PathBuf>,
    /// A recorded run
    #[arg(value_name = "RUN", requires = "svg")]
    run: Option<PathBuf>,
}

/// A page, by its name, and what writes its tables.
type Page = (&'static str, fn(&[Machine]) -> String);

const PAGES: [Page; 2] = [("README.md", tables::summary), ("TARGETS.md", tables::by_target)];

const BEGIN: &str = "<!-- report:begin -->\n";
const END: &str = "<!-- report:end -->\n";

/// What the user asked for.
#[derive(Debug)]
pub(crate) struct Options {
    check: bool,
    dir: PathBuf,
    /// Where to draw which run.
    svg: Option<(PathBuf, PathBuf)>,
}

impl Args {
    /// Returns what is asked for.
    pub(crate) fn options(self) -> Options {
        Options { check: self.check, dir: self.dir, svg: self.svg.zip(self.run) }
    }
}

/// Runs `bowline bench report` and returns the exit status.
pub(crate) fn run(options: &Options) -> Result<i32, String> {
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
        match crate::args::parsed(&format!("report {line}"))? {
            crate::args::Job::Report(options) => Ok(options),
            other => Err(format!("{other:?}")),
        }
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
