//! Aligned columns of text.

/// The first column left, the rest right; the last one left again if `tail` is set.
pub fn table(head: &[&str], rows: &[Vec<String>], tail: bool) -> String {
    let columns = head.len();
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .chain([head[c].chars().count()])
            .max()
    };
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (c, cell) in cells.iter().enumerate().take(columns) {
            let w = widths[c];
            let last = c + 1 == columns;
            text += &match (c, last && tail) {
                (0, _) => format!("{cell:<w$}"),
                (_, true) => format!("  {cell}"),
                _ => format!("  {cell:>w$}"),
            };
        }
        text.trim_end().to_string() + "\n"
    };
    let head: Vec<String> = head.iter().map(|h| h.to_string()).collect();
    line(&head) + &rows.iter().map(|r| line(r)).collect::<String>()
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
