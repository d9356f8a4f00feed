//! Tables that leave out columns where a terminal is narrow.

/// A column: its cells are at least as wide as the width.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    pub(crate) width: usize,
    pub(crate) is_left: bool,
    pub(crate) cells: Vec<String>,
}

impl Column {
    fn len(&self) -> usize {
        let cells = self.cells.iter().map(|cell| cell.chars().count());
        cells.chain([self.width, self.title.len()]).max().unwrap_or_default()
    }

    fn cell(&self, text: &str) -> String {
        let len = self.len();
        if self.is_left { format!("{text:len$}") } else { format!("{text:>len$}") }
    }
}

/// Returns the heading and the rows of a table with those columns that have room. `ranks` has the
/// titles of the columns in the order in which they get it.
pub(crate) fn fitted(columns: &[Column], ranks: &[&str], room: usize) -> Vec<String> {
    let mut left = room + 1;
    let mut taken = Vec::new();
    for title in ranks {
        let Some(column) = columns.iter().find(|column| column.title == *title) else { continue };
        if column.len() < left {
            left -= column.len() + 1;
            taken.push(*title);
        }
    }
    let shown: Vec<&Column> =
        columns.iter().filter(|column| taken.contains(&column.title)).collect();
    let rows = columns.first().map_or(0, |column| column.cells.len());
    let line = |cell: &dyn Fn(&Column) -> String| {
        let cells: Vec<String> = shown.iter().map(|column| column.cell(&cell(column))).collect();
        cells.join(" ").trim_end().to_owned()
    };
    let heading = line(&|column| column.title.to_owned());
    let rows =
        (0..rows).map(|row| line(&|column| column.cells.get(row).cloned().unwrap_or_default()));
    [heading].into_iter().chain(rows).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_without_room_are_left_out_in_the_order_of_their_ranks() {
        let column = |title, width, cell: &str| Column {
            title,
            width,
            is_left: false,
            cells: vec![cell.to_owned()],
        };
        let all = [column("A", 3, "1"), column("B", 3, "22222"), column("C", 3, "3")];
        let ranks = ["C", "B", "A"];
        assert_eq!(fitted(&all, &ranks, 13), ["  A     B   C", "  1 22222   3"]);
        assert_eq!(fitted(&all, &ranks, 12), ["    B   C", "22222   3"]);
        assert_eq!(fitted(&all, &ranks, 8), ["  A   C", "  1   3"]);
        assert_eq!(fitted(&all, &ranks, 3), ["  C", "  3"]);
    }
}
