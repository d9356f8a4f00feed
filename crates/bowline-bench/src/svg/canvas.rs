//! Shapes and text.

use std::fmt::Write as _;

/// Colour of text that is read first.
pub(super) const INK: &str = "#1f2328";
/// Colour of text that explains.
pub(super) const MUTED: &str = "#656d76";
/// Colour of helping lines.
pub(super) const GRID: &str = "#e6eaee";

/// Where the given point is in a text.
#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Shapes drawn so far.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    // Writing to a String cannot fail, here and below.

    pub(super) fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, fill: &str) {
        let (w, h) = (w.max(0.0), h.max(0.0));
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" rx="1.5" fill="{fill}"/>"#
        );
    }

    pub(super) fn line(&mut self, a: (f64, f64), b: (f64, f64), colour: &str, width: f64) {
        let _ = writeln!(
            self.body,
            r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="{colour}" stroke-width="{width}"/>"#,
            a.0, a.1, b.0, b.1
        );
    }

    pub(super) fn polyline(&mut self, points: &[(f64, f64)], colour: &str, width: f64) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            self.body,
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>"#,
            points.join(" ")
        );
    }

    pub(super) fn dot(&mut self, (x, y): (f64, f64), r: f64, colour: &str) {
        let _ = writeln!(self.body, r#"<circle cx="{x:.1}" cy="{y:.1}" r="{r}" fill="{colour}"/>"#);
    }

    pub(super) fn diamond(&mut self, (x, y): (f64, f64), r: f64, colour: &str) {
        let points = [(x, y - r), (x + r, y), (x, y + r), (x - r, y)]
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .join(" ");
        let _ = writeln!(
            self.body,
            r#"<polygon points="{points}" fill="white" stroke="{colour}" stroke-width="1.4"/>"#
        );
    }

    #[expect(clippy::too_many_arguments, reason = "a text has that many properties")]
    pub(super) fn text(
        &mut self,
        x: f64,
        y: f64,
        size: f64,
        colour: &str,
        anchor: Anchor,
        bold: bool,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let weight = if bold { r#" font-weight="600""# } else { "" };
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>{}</text>"#,
            escape(text)
        );
    }

    /// Wraps the shapes up into a file.
    pub(super) fn finish(self, width: f64, height: f64) -> String {
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" viewBox="0 0 {width:.0} {height:.0}" font-family="Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif">
<rect width="100%" height="100%" fill="white"/>
{}</svg>
"#,
            self.body
        )
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The colour of a subject, by its label.
pub(super) fn colour(label: &str) -> &'static str {
    match label {
        "bowline" | "8-paths" | "one-asleep" | "write" | "read" | "send" | "write-imm" | "rtrs"
        | "rnbd" | "door-nbd" => "#1f6feb",
        label
            if ["rtrs-", "rnbd-", "door-", "2-paths-"].iter().any(|own| label.starts_with(own)) =>
        {
            "#79b1f7"
        }
        "bowline-batch" | "bowline-adaptive" | "1-path" | "all-awake" | "send-16" | "send-1"
        | "send-adaptive" | "lossless" | "loss-0.1%" | "loss-1%" => "#79b1f7",
        "tcpb" | "tcp1" | "tcpz" | "tcpk" | "tcpz-1" | "tcpz-8" | "rr-tcp" => "#8c959f",
        "udp" | "udp-gso" | "rr-udp" | "seqp" => "#c4cbd2",
        _ => "#d4952b",
    }
}

/// Numbers 1, 2 and 5 times powers of ten between two bounds.
pub(super) fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut decade = 10f64.powf(low.log10().floor());
    while decade <= high {
        ticks.extend(
            [1.0, 2.0, 5.0].map(|m| m * decade).into_iter().filter(|t| *t >= low && *t <= high),
        );
        decade *= 10.0;
    }
    ticks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_break_the_file() {
        let mut c = Canvas::default();
        c.text(0.0, 0.0, 1.0, INK, Anchor::Start, false, "a<b>&c");
        assert!(c.finish(1.0, 1.0).contains("a&lt;b&gt;&amp;c"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(log_ticks(3.0, 60.0), [5.0, 10.0, 20.0, 50.0]);
    }
}
