//! Metadata contexts: what a client may ask about ranges of the disk. There is one,
//! `base:allocation`.

use super::wire::Fields;

/// Name of the only context.
pub(super) const ALLOCATION: &str = "base:allocation";
/// Its id in replies.
pub(super) const ALLOCATION_ID: u32 = 1;
/// Longest string in bytes that the protocol allows.
const STRING_MAX: usize = 4096;

/// NBD_OPT_LIST_META_CONTEXT or NBD_OPT_SET_META_CONTEXT.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Queries<'a> {
    pub(super) export: &'a [u8],
    /// A query names the context.
    pub(super) selects: bool,
    /// The context belongs to a list: a query names it or its namespace, or there is no query.
    pub(super) lists: bool,
}

impl<'a> Queries<'a> {
    /// Parses the data of an option. `None` if it is malformed.
    pub(super) fn parse(data: &'a [u8]) -> Option<Self> {
        let mut at = Fields(data);
        let export = string(&mut at)?;
        let count = at.u32()?;
        let (mut selects, mut lists) = (false, count == 0);
        // Each query takes four bytes at least, so the option's length bounds their number.
        for _ in 0..count {
            let query = string(&mut at)?;
            selects |= query == ALLOCATION.as_bytes();
            lists |= selects || query == b"base:";
        }
        at.0.is_empty().then_some(Self { export, selects, lists })
    }
}

fn string<'a>(at: &mut Fields<'a>) -> Option<&'a [u8]> {
    let len = usize::try_from(at.u32()?).ok()?;
    at.bytes(len).filter(|bytes| bytes.len() <= STRING_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn option(export: &str, queries: &[&str]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut string = |text: &str| {
            out.extend((text.len() as u32).to_be_bytes());
            out.extend(text.as_bytes());
        };
        string(export);
        let count = (queries.len() as u32).to_be_bytes();
        queries.iter().for_each(|query| string(query));
        let at = 4 + export.len();
        out.splice(at..at, count);
        out
    }

    fn parsed(queries: &[&str]) -> (bool, bool) {
        let data = option("disk", queries);
        let queries = Queries::parse(&data).unwrap();
        assert_eq!(queries.export, b"disk");
        (queries.selects, queries.lists)
    }

    #[test]
    fn the_context_is_selected_by_its_name_and_listed_by_its_namespace() {
        assert_eq!(parsed(&[]), (false, true));
        assert_eq!(parsed(&["base:allocation"]), (true, true));
        assert_eq!(parsed(&["base:"]), (false, true));
        for other in ["", "base", "base:other", "BASE:ALLOCATION", "qemu:dirty-bitmap:x", ":"] {
            assert_eq!(parsed(&[other]), (false, false), "{other}");
            assert_eq!(parsed(&[other, "base:allocation", other]), (true, true));
        }
    }

    #[test]
    fn lists_that_say_more_than_they_have_are_refused() {
        let good = option("disk", &["base:allocation", "x:"]);
        assert!(Queries::parse(&good).is_some());
        for cut in 0..good.len() {
            assert_eq!(Queries::parse(&good[..cut]), None, "{cut}");
        }
        assert_eq!(Queries::parse(&[&good[..], b"x"].concat()), None);
        let mut many = option("disk", &[]);
        many[8..].fill(0xff);
        assert_eq!(Queries::parse(&many), None, "four billion queries");
        assert_eq!(Queries::parse(&option("disk", &[&"x".repeat(STRING_MAX + 1)])), None);
    }
}
