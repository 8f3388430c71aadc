//! The numbers of VMs as bars in the terminal.

/// A bar for each arm, one block a VM where that fits 60 columns, and what it is of the first.
pub(super) fn picture(counts: &[(&str, u32)]) -> String {
    let most = counts.iter().map(|c| c.1).max().unwrap_or(1);
    let each = most.div_ceil(60).max(1);
    let bar = |n: u32| "█".repeat(n.div_ceil(each) as usize);
    let first = counts.first().map_or(1, |c| c.1.max(1));
    let of = |n: u32| format!("{:.1} times {}", f64::from(n) / f64::from(first), counts[0].0);
    let line = |(i, (arm, n)): (usize, &(&str, u32))| {
        let times = if i == 0 { String::new() } else { format!("  {}", of(*n)) };
        format!("  {arm:<10} {} {n}{times}\n", bar(*n))
    };
    counts.iter().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::picture;

    #[test]
    fn the_picture_has_a_block_for_each_vm_as_far_as_that_fits() {
        assert_eq!(
            picture(&[("plain", 3), ("ebb", 12)]),
            "  plain      ███ 3\n  ebb        ████████████ 12  4.0 times plain\n"
        );
        let wide = picture(&[("ebb", 96)]);
        assert_eq!(wide.matches('█').count(), 48, "{wide}");
        assert_eq!(picture(&[]), "");
    }
}
