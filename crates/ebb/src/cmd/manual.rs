//! `ebb man`: the manual's pages. Those of the commands are made from the definition of the flags,
//! the one of the configuration from the file that lists all settings.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap_mangen::Man;

/// Every setting, with its default and what it is for.
const SETTINGS: &str = include_str!("../../../../packaging/ebb.toml");
const SOURCE: &str = concat!("Ebb ", env!("CARGO_PKG_VERSION"));
const INTRODUCTION: &str = r"
.SH SYNOPSIS
/etc/ebb/ebb.toml
.SH DESCRIPTION
The file is TOML. Every line is optional, and so is the file. If it has a mistake, Ebb refuses the whole
file, and names the line, the field and what is allowed.
.PP
.B ebb check
tells whether the file is valid.
.B systemctl reload ebb
has the daemon read it; no balloon moves. A size is a number with a unit, such as
.BR 512MiB ,
or a share of a VM's RAM, such as
.BR 25% .
A time is a number with a unit, such as
.BR 100ms .
.PP
Below stands each setting with its default, or with an example where its text says so.
";
const END: &str = r"
.SH SEE ALSO
.BR ebb (8),
.BR ebb\-check (8),
/usr/share/doc/ebb/docs/operate.md,
/usr/share/doc/ebb/docs/managers.md,
/usr/share/doc/ebb/docs/failures.md
";

/// A page for `ebb` and one for each command (`man8/ebb.8`, `man8/ebb-run.8`, ...), and
/// `man5/ebb.toml.5`.
pub fn pages(ebb: Command, dir: &str) -> Result<()> {
    let mut ebb = ebb.disable_help_subcommand(true);
    // Gives every command its full name, and the flags that hold for all.
    ebb.build();
    write(&ebb, Path::new(dir)).with_context(|| format!("cannot write the manual to {dir}"))
}

fn write(ebb: &Command, dir: &Path) -> std::io::Result<()> {
    let (of_files, of_commands) = (dir.join("man5"), dir.join("man8"));
    std::fs::create_dir_all(&of_files)?;
    std::fs::create_dir_all(&of_commands)?;
    std::fs::write(of_files.join("ebb.toml.5"), of_configuration(SETTINGS))?;
    page(ebb, &of_commands)
}

fn page(command: &Command, dir: &Path) -> std::io::Result<()> {
    Man::new(command.clone()).section("8").source(SOURCE).generate_to(dir)?;
    let mut shown = command.get_subcommands().filter(|c| !c.is_hide_set());
    shown.try_for_each(|c| page(c, dir))
}

/// A setting is `# KEY = VALUE  # TEXT`, and lines that begin with blanks go on with its text.
/// What stands before the first section is left out.
fn of_configuration(settings: &str) -> String {
    let mut out = format!(
        ".TH ebb.toml 5 \"\" \"{SOURCE}\"\n.SH NAME\nebb.toml \\- configuration of the daemon ebb"
    );
    out += INTRODUCTION;
    out += ".SH SETTINGS";
    let from = settings.find("\n[").unwrap_or(0);
    for line in settings[from..].lines() {
        let goes_on = line.starts_with(' ');
        let line = line.trim_start().strip_prefix("# ").unwrap_or(line);
        let (what, text) = match goes_on {
            true => ("", line),
            false => line.split_once(" # ").unwrap_or((line, "")),
        };
        match what.trim_end() {
            "" => {}
            section if section.starts_with('[') => _ = write!(out, "\n.SS {}", roff(section)),
            setting => _ = write!(out, "\n.TP\n.B {}", roff(setting)),
        }
        if !text.is_empty() {
            let _ = write!(out, "\n{}", roff(text.trim()));
        }
    }
    out + END
}

/// Text in which nothing steers the formatter.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    // In a macro's arguments a quote would be a bracket.
    let text = text.replace('\'', "\\(aq").replace('"', "\\(dq");
    let steers = text.starts_with('.');
    if steers { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_core::config::Config;

    /// The file with every setting set.
    fn all_set() -> String {
        let line = |l: &str| match l.strip_prefix("# ") {
            Some(set) if set.starts_with('[') || set.contains(" = ") => format!("{set}\n"),
            _ => format!("{l}\n"),
        };
        SETTINGS.lines().skip(1).map(line).collect()
    }

    #[test]
    fn the_file_as_it_ships_sets_nothing_and_each_of_its_lines_is_valid() {
        let shipped = Config::parse("ebb.toml", SETTINGS).unwrap();
        assert_eq!(shipped, Config::default());
        let all = Config::parse("ebb.toml", &all_set()).unwrap();
        assert!(all.vms.contains_key("web1"), "{all:?}");
    }

    #[test]
    fn the_configuration_in_the_manifests_for_kubernetes_is_valid() {
        let config = |manifest: &str| {
            let (_, text) = manifest.split_once("ebb.toml: |\n").unwrap();
            let lines =
                text.lines().take_while(|l| *l != "---").map(|l| l.trim().to_owned() + "\n");
            Config::parse("ebb.yaml", &lines.collect::<String>()).unwrap()
        };
        let run = config(include_str!("../../../../packaging/kubernetes/ebb.yaml"));
        assert!(run.containers && run.libvirt && !run.users.is_empty());
        // What one has taken the other reaches.
        let release = config(include_str!("../../../../packaging/kubernetes/release.yaml"));
        let reach = |c: &Config| (c.containers, c.libvirt, c.users.clone(), c.state_file.clone());
        assert_eq!(reach(&run), reach(&release));
    }

    #[test]
    fn the_page_of_the_configuration_has_every_setting_with_its_text() {
        let page = of_configuration(SETTINGS);
        let settings = all_set().lines().filter(|l| l.contains(" = ")).count();
        assert_eq!(page.matches("\n.TP\n.B ").count(), settings, "{page}");
        assert_eq!(page.matches("\n.SS [").count(), 5, "{page}");
        assert!(page.contains("\n.B tick = \\(dq1s\\(dq\n100ms to 60s\n"), "{page}");
        assert!(page.contains(
            "oneadmin, incus and lxd; the program must be a file that only root can change\n"
        ));
        assert!(
            page.contains("\n.B listen = \\(dq127.0.0.1:19177\\(dq\nexample: /metrics on loopback"),
            "{page}"
        );
        assert!(!page.lines().any(|l| l.starts_with('#')), "{page}");
    }
}
