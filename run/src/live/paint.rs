//! Paint: cells become the bytes that show them.
//!
//! A whole picture each time, and not its changes: the program may have written over the last one. A row is written
//! from its first column on and cleared behind its last cell; a cell's look is written where it differs from the cell
//! before.

use std::fmt::Write as _;

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Colours {
    /// The terminal's own sixteen colours, which suit its background.
    Some,
    None,
}

impl Colours {
    pub(super) fn wanted() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if refused { Self::None } else { Self::Some }
    }
}

/// Writes `buffer` with its first row at row `top` of the screen, and leaves the cursor as it was.
pub(super) fn painted(buffer: &Buffer, top: u16, colours: Colours) -> Vec<u8> {
    let mut out = String::from("\x1b7");
    let width = usize::from(buffer.area.width).max(1);
    for (row, cells) in buffer.content().chunks(width).enumerate() {
        write!(out, "\x1b[{};1H\x1b[0m", usize::from(top) + row).expect("a string takes it");
        paint_row(&mut out, cells, colours);
        out.push_str("\x1b[0m\x1b[K");
    }
    out.push_str("\x1b8");
    out.into_bytes()
}

fn paint_row(out: &mut String, cells: &[Cell], colours: Colours) {
    // Blank cells at the end are cleared and not written.
    let end = cells.iter().rposition(|cell| cell.symbol() != " ").map_or(0, |last| last + 1);
    let (mut style, mut skip) = (style_of(&Cell::EMPTY, colours), 0);
    for cell in &cells[..end] {
        if skip > 0 {
            skip -= 1; // the second half of a wide character
            continue;
        }
        let wanted = style_of(cell, colours);
        if wanted != style {
            write!(out, "\x1b[{wanted}m").expect("a string takes it");
            style = wanted;
        }
        out.push_str(cell.symbol());
        skip = ratatui::text::Span::raw(cell.symbol()).width().saturating_sub(1);
    }
}

/// The terminal's numbers for the look of a cell.
fn style_of(cell: &Cell, colours: Colours) -> String {
    let mut style = String::from("0");
    for (modifier, number) in [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2")] {
        if cell.modifier.contains(modifier) {
            style.push_str(number);
        }
    }
    if let Some(number) = colour(cell.fg).filter(|_| colours == Colours::Some) {
        write!(style, ";{number}").expect("a string takes it");
    }
    style
}

/// The colours that the panel uses.
fn colour(colour: Color) -> Option<u8> {
    match colour {
        Color::Red => Some(31),
        Color::Green => Some(32),
        Color::Yellow => Some(33),
        Color::Cyan => Some(36),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::layout::Rect;
    use ratatui::style::Style;

    #[test]
    fn each_row_is_placed_coloured_and_cleared_to_its_end() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 6, 2));
        buffer.set_string(0, 0, "ab", Style::new().green().bold());
        buffer.set_string(2, 0, "c", Style::new());
        let rows =
            "\x1b7\x1b[9;1H\x1b[0m\x1b[0;1;32mab\x1b[0mc\x1b[0m\x1b[K\x1b[10;1H\x1b[0m\x1b[0m\x1b[K\x1b8";
        assert_eq!(String::from_utf8(painted(&buffer, 9, Colours::Some)).unwrap(), rows);
        assert_eq!(
            String::from_utf8(painted(&buffer, 9, Colours::None)).unwrap(),
            rows.replace("\x1b[0;1;32m", "\x1b[0;1m")
        );
    }

    #[test]
    fn a_wide_character_is_written_once() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 4, 1));
        buffer.set_string(0, 0, "\u{732b}x", Style::new());
        let painted = String::from_utf8(painted(&buffer, 1, Colours::Some)).unwrap();
        assert!(painted.contains("\u{732b}x\x1b[0m"), "{painted:?}");
    }
}
