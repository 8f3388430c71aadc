//! Aligned columns of text.

/// The first column left, the rest right; the last one left again if `tail` is set.
pub fn table(head: &[&str], rows: &[Vec<String>], tail: bool) -> String {
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    let all = || std::iter::once(&head).chain(rows);
    let width =
        |c: usize| all().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &Vec<String>| {
        let mut text = String::new();
        for (c, (cell, &w)) in cells.iter().zip(&widths).enumerate() {
            let last = c + 1 == widths.len();
            text += &match (c, last && tail) {
                (0, _) => format!("{cell:<w$}"),
                (_, true) => format!("  {cell}"),
                _ => format!("  {cell:>w$}"),
            };
        }
        text.trim_end().to_string() + "\n"
    };
    all().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_by_characters_not_bytes() {
        let rows = vec![vec!["ä".into(), "1".into(), "x y".into()], vec!["bc".into(), "22".into()]];
        assert_eq!(table(&["N", "V", "WHY"], &rows, true), "N    V  WHY\nä    1  x y\nbc  22\n");
    }
}
