//! `ebb completions`: what a shell offers after `ebb`, made from the definition of the flags, and
//! the names of running VMs where a command takes one.
//!
//! A name is what a QEMU says of itself, and shells expand what they are offered. So only names
//! of harmless characters are offered.

use std::collections::BTreeSet;
use std::fmt::Write;

use anyhow::Result;
use clap::Command;
use clap_complete::Shell;
use ebb_host::daemon_client;
use serde_json::Value;

use crate::table::emit;

/// Asks the daemon for the names; nothing is said where none answers.
const ASK: &str = "ebb completions --vms 2>/dev/null";

pub fn script(ebb: Command, shell: Shell) -> Result<()> {
    emit(&text(ebb, shell))
}

pub fn vms(socket: &str) -> Result<()> {
    let state: Value = daemon_client::get_json(socket, "/v1/state")?;
    let vms = state["vms"].as_array().into_iter().flatten();
    let names = vms.filter_map(|vm| vm["name"].as_str()).filter(|name| is_harmless(name));
    emit(&names.map(|name| format!("{name}\n")).collect::<String>())
}

fn is_harmless(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    !name.is_empty() && !name.starts_with('-') && name.chars().all(fits)
}

fn text(mut ebb: Command, shell: Shell) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut ebb, "ebb", &mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    let with_vm = with_vm(&ebb, "");
    match shell {
        Shell::Bash => text + &bash(&with_vm, &with_value(&ebb)),
        Shell::Zsh => zsh(&text),
        Shell::Fish => text + &fish(&with_vm),
        _ => text,
    }
}

/// The commands that take the name of a VM, such as `explain` and `merge on`.
fn with_vm(command: &Command, before: &str) -> Vec<String> {
    let mut found = Vec::new();
    for sub in command.get_subcommands() {
        let path = format!("{before}{}", sub.get_name());
        if sub.get_positionals().any(|arg| ["vm", "vms"].contains(&arg.get_id().as_str())) {
            found.push(path.clone());
        }
        found.extend(with_vm(sub, &format!("{path} ")));
    }
    found
}

/// The options after which a value comes, such as `--for`.
fn with_value(command: &Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter(|arg| arg.get_action().takes_values());
    let own = own.filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    own.chain(command.get_subcommands().flat_map(with_value)).collect()
}

/// Calls what was generated, and adds the names.
fn bash(with_vm: &[String], with_value: &BTreeSet<String>) -> String {
    let cases = Vec::from_iter(with_vm.iter().map(|path| format!("\"{path} \"*"))).join(" | ");
    let values = Vec::from_iter(with_value.iter().map(String::as_str)).join(" | ");
    format!(
        r#"
_ebb_with_vms() {{
    _ebb "$@"
    [[ $2 == -* ]] && return
    case $3 in
        {values}) return ;;
    esac
    local word words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $word == -* ]] || words+="$word "
    done
    case $words in
        {cases}) COMPREPLY+=( $(compgen -W "$({ASK})" -- "$2") ) ;;
    esac
}}
complete -F _ebb_with_vms -o nosort -o bashdefault -o default ebb
"#
    )
}

/// Where files were offered for a VM, names are.
fn zsh(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let vm = ["':vm -- ", "'::vm -- ", "'*::vm -- ", "'*:vm -- "];
        let line = match vm.iter().any(|head| line.starts_with(head)) {
            true => line.replace(":_default'", ":_ebb_vms'"),
            false => line.to_owned(),
        };
        out += &line;
        out.push('\n');
        if line.starts_with("autoload ") {
            let _ = write!(
                out,
                "\n_ebb_vms() {{\n    local -a vms\n    vms=(${{(f)\"$({ASK})\"}})\n    compadd -a vms\n}}\n"
            );
        }
    }
    out
}

fn fish(with_vm: &[String]) -> String {
    let mut out = String::new();
    for path in with_vm {
        let mut words = path.split(' ');
        let command = words.next().unwrap_or_default();
        let sub: String = words.map(|w| format!("; and __fish_seen_subcommand_from {w}")).collect();
        let when = format!("__fish_ebb_using_subcommand {command}{sub}");
        let _ = writeln!(out, "complete -c ebb -n \"{when}\" -f -a \"({ASK})\"");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn each_command_that_takes_a_vm_is_offered_their_names() {
        let with_vm = with_vm(&crate::Cli::command(), "");
        for path in ["explain", "reclaim", "hands-off", "hands-on", "merge on", "merge off"] {
            assert!(with_vm.iter().any(|p| p == path), "{path}: {with_vm:?}");
        }
        let zsh = text(crate::Cli::command(), Shell::Zsh);
        assert_eq!(zsh.matches(":_ebb_vms'").count(), with_vm.len(), "{zsh}");
        let fish = text(crate::Cli::command(), Shell::Fish);
        assert_eq!(fish.matches(ASK).count(), with_vm.len());
    }

    #[test]
    fn a_name_that_a_shell_would_expand_is_not_offered() {
        for good in ["web1", "vm-1.example_2+x"] {
            assert!(is_harmless(good), "{good}");
        }
        for bad in ["", "-rf", "a b", "$(reboot)", "`id`", "a;b", "*", "a\nb", "ä", "~", "a:b"] {
            assert!(!is_harmless(bad), "{bad}");
        }
    }

    /// With a stand-in for `ebb` that knows two VMs.
    #[test]
    fn bash_offers_vms_after_the_commands_that_take_one() {
        let script = text(crate::Cli::command(), Shell::Bash);
        let offered = |words: &str| {
            let ask = format!(
                r#"ebb() {{ printf 'web1\nweb2\ndb\n'; }}
                eval "$1"
                COMP_WORDS=({words} "$2"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
                $(complete -p ebb | sed 's/.*-F \([^ ]*\).*/\1/') ebb "$2" "${{COMP_WORDS[COMP_CWORD-1]}}"
                printf '%s\n' "${{COMPREPLY[@]}}""#
            );
            let out = std::process::Command::new("bash")
                .args(["-c", &ask, "bash", &script, "we"])
                .output()
                .unwrap();
            String::from_utf8(out.stdout).unwrap().trim().replace('\n', " ")
        };
        for words in ["ebb explain", "ebb reclaim --json", "ebb merge on", "ebb merge off db"] {
            assert_eq!(offered(words), "web1 web2", "{words}");
        }
        for words in ["ebb", "ebb status", "ebb merge", "ebb hands-off --for"] {
            assert!(!offered(words).contains("web1"), "{words}: {}", offered(words));
        }
    }
}
