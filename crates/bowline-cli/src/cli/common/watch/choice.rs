//! What the user has chosen by options and keys: an order, a filter, the help.

use super::Size;

/// What Ctrl-C and Ctrl-D send while they are keys like others.
const CTRL_C: u8 = 3;
const CTRL_D: u8 = 4;
const ESCAPE: u8 = 27;
const BACKSPACE: [u8; 2] = [8, 127];
/// Longest filter, in characters.
const FILTER_MAX: usize = 64;

/// The choice, which begins with what the options say, or with the first order and all rows.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    orders: &'static [&'static str],
    order: usize,
    is_reversed: bool,
    filter: String,
    /// Keys are text of the filter.
    is_typing: bool,
    shows_help: bool,
}

impl Choice {
    pub(crate) fn new(
        orders: &'static [&'static str],
        order: Option<&str>,
        filter: Option<&str>,
    ) -> Self {
        let place = |name: &str| orders.iter().position(|order| *order == name);
        Self {
            orders,
            order: order.and_then(place).unwrap_or(0),
            is_reversed: false,
            filter: filter.unwrap_or_default().to_owned(),
            is_typing: false,
            shows_help: false,
        }
    }

    /// The order in which rows are shown.
    pub(crate) fn order(&self) -> &'static str {
        self.orders.get(self.order).copied().unwrap_or_default()
    }

    pub(crate) const fn is_reversed(&self) -> bool {
        self.is_reversed
    }

    /// Tells whether a row with this text is shown.
    pub(crate) fn shows(&self, text: &str) -> bool {
        text.to_lowercase().contains(&self.filter.to_lowercase())
    }

    pub(super) const fn shows_help(&self) -> bool {
        self.shows_help
    }

    /// Does what a key says; returns whether that is the end.
    pub(super) fn is_to_quit(&mut self, key: u8) -> bool {
        if matches!(key, CTRL_C | CTRL_D) {
            return true;
        }
        if self.is_typing {
            match key {
                b'\r' | b'\n' => self.is_typing = false,
                ESCAPE => (self.is_typing, self.filter) = (false, String::new()),
                _ if BACKSPACE.contains(&key) => _ = self.filter.pop(),
                b' '..=b'~' if self.filter.len() < FILTER_MAX => self.filter.push(key.into()),
                _ => {}
            }
            return false;
        }
        if self.shows_help {
            self.shows_help = false;
            return matches!(key, b'q' | b'Q');
        }
        match key {
            b'q' | b'Q' => return true,
            b'?' | b'h' => self.shows_help = true,
            b'/' => self.is_typing = true,
            ESCAPE => self.filter.clear(),
            b's' => self.order = (self.order + 1) % self.orders.len().max(1),
            b'r' => self.is_reversed = !self.is_reversed,
            _ => {}
        }
        false
    }

    /// Presses keys that do not end it.
    #[cfg(test)]
    pub(crate) fn press(&mut self, keys: &str) {
        assert!(!keys.bytes().any(|key| self.is_to_quit(key)));
    }

    /// The last line of the screen.
    pub(super) fn state(&self) -> String {
        if self.is_typing {
            return format!("show rows with: {}_", self.filter);
        }
        let reversed = if self.is_reversed { " (reversed)" } else { "" };
        let mut text = format!("? help  s order: {}{reversed}", self.order());
        if !self.filter.is_empty() {
            text += &format!("  / rows with: {}", self.filter);
        }
        text
    }

    /// What the keys do.
    pub(super) fn help(&self, size: Size) -> String {
        let orders = format!("s      the next order of: {}", self.orders.join(", "));
        let lines = [
            "Keys",
            "",
            &orders,
            "r      the order reversed",
            "/      show only rows with a text: type it, then Enter",
            "Esc    show all rows",
            "?, h   this help; any key leaves it",
            "q      end, as Ctrl-C",
            "",
            "--help says what the columns are; a narrow terminal has fewer of them.",
        ];
        let cut = |line: &str| line.chars().take(size.columns).collect::<String>() + "\n";
        lines.into_iter().take(size.rows).map(cut).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_choose_an_order_and_a_filter() {
        let mut choice = Choice::new(&["state", "queued"], None, None);
        let mut press = |keys: &str| keys.bytes().any(|key| choice.is_to_quit(key));
        assert!(!press("s/10.q"), "q is text of the filter");
        assert!(!press("\x7f\n"));
        assert!(press("q"));
        assert_eq!((choice.order(), choice.is_reversed()), ("queued", false));
        assert!(choice.shows("a 10.0.0.1") && !choice.shows("a 11.0.0.1"));
        assert_eq!(choice.state(), "? help  s order: queued  / rows with: 10.");
        assert!(!choice.is_to_quit(ESCAPE) && choice.shows("anything"));
        assert!(!choice.is_to_quit(b's') && choice.order() == "state");
    }

    #[test]
    fn options_choose_what_keys_change() {
        let mut choice = Choice::new(&["state", "queued"], Some("queued"), Some("Up"));
        assert!(choice.order() == "queued" && choice.shows("UP") && !choice.shows("down"));
        choice.press("s\x1b");
        assert!(choice.order() == "state" && choice.shows("down"));
    }

    #[test]
    fn help_is_left_by_any_key() {
        let mut choice = Choice::new(&["state"], None, None);
        assert!(!choice.is_to_quit(b'?') && choice.shows_help());
        let help = choice.help(Size { rows: 4, columns: 20 });
        assert!(help.lines().count() <= 4 && help.lines().all(|line| line.len() <= 20), "{help}");
        assert!(!choice.is_to_quit(b'x') && !choice.shows_help());
        for end in [CTRL_C, CTRL_D] {
            assert!(choice.is_to_quit(end));
        }
    }
}
