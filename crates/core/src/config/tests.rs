//! What may be written in a configuration, what it then means, and what is said of the rest.

use super::*;
use proptest::prelude::*;

#[test]
fn sections_inherit_from_defaults() {
    let c = Config::parse(
        "f",
        "[daemon]\ntick = \"2s\"\n[defaults]\nmin = \"10%\"\nweight = 2\n\
         [vm.a]\nmax = \"1GiB\"\n[vm.\"b c\"]\nmanage = false\nmin = 1048576\n",
    )
    .unwrap();
    assert_eq!(c.tick_ms, 2000);
    assert_eq!(c.settings("a", None).min, Amount::Share(0.1));
    assert_eq!(c.settings("a", None).max, Some(Amount::Bytes(Bytes::gib(1))));
    assert_eq!(c.settings("b c", None).min, Amount::Bytes(Bytes::mib(1)));
    assert!(!c.settings("b c", None).manage);
    assert_eq!(c.settings("unknown", None).weight, 2.0);
}

#[test]
fn a_name_that_toml_takes_only_in_quotes_is_explained() {
    for header in ["[vm.web.example.org]", "[vm.web 01]"] {
        let error = Config::parse("f", &format!("{header}\nmanage = false\n")).unwrap_err();
        assert!(error.to_string().contains("needs quotes"), "{error}");
    }
    let error = Config::parse("f", "[vm.\"a.b\"]\nx = 1\n").unwrap_err().to_string();
    assert!(!error.contains("needs quotes"), "{error}");
    let error = Config::parse("f", "\n[vm.a]\n[vm.a] # twice\n").unwrap_err().to_string();
    assert!(error.ends_with("here twice: it begins in line 2"), "{error}");
    assert!(Config::parse("f", "[vm.\"a.b\"]\nmanage = false\n").is_ok());
}

#[test]
fn what_is_of_another_type_is_told_in_words_with_its_section() {
    for (text, said) in [
        (
            "[vm.a]\nweight = \"2\"",
            "f:2: vm.a.weight: invalid type: string \"2\", expected a number",
        ),
        (
            "[vm]\nmax = \"1GiB\"",
            "f:2: vm.max: invalid type: string \"1GiB\", expected a section, as in [vm.web]",
        ),
        ("vm = 3", "f:1: vm: invalid type: integer `3`, expected a section"),
        ("merge = \"on\"", "f:1: merge: invalid type: string \"on\", expected a section, [merge]"),
        ("[host]\nusers = 3", "f:2: host.users: invalid type: integer `3`, expected a list"),
        (
            "[daemon]\ntick = 1",
            "f:2: daemon.tick: invalid type: integer `1`, expected text in quotes",
        ),
        ("[[vm.web]]\n", "f:1: [[vm.web]]: a section has one bracket on each side"),
        ("[vm.a]\n[vm.b]\n[vm.a]", "f:3: [vm.a]: this section is here twice: it begins in line 1"),
        ("[vm.a]\n\nmaxx = 3", "f:3: vm.a.maxx: unknown field `maxx`"),
        ("[defaults]\nmax = \"99999999TiB\"", "“99999999TiB” is not a size: it is too large"),
    ] {
        let error = Config::parse("f", text).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    for (text, key) in [
        ("[vm.a]\nmaxx = 3", "max"),
        ("[vm.a]\nmx = 3", "max"),
        ("[vms.a]", "vm"),
        ("[default]", "defaults"),
    ] {
        let error = Config::parse("f", text).unwrap_err().to_string();
        assert!(error.ends_with(&format!("; did you mean {key}?")), "{error}");
    }
    let error = Config::parse("f", "[vm.a]\nnonsense = 3").unwrap_err().to_string();
    assert!(!error.contains("mean"), "{error}");
}

#[test]
fn a_socket_that_could_not_be_used_is_a_mistake_of_the_file() {
    let said = |lines: &str| {
        let text = format!("[daemon]\nstate_file = \"/run/x/state\"\n{lines}\n");
        Config::parse("f", &text).map_err(|e| e.to_string())
    };
    let long = format!("socket = \"/{}\"", "a".repeat(107));
    for (lines, words) in [
        (
            "socket = \"/run//x/state\"",
            "f:3: daemon.socket: /run//x/state is also daemon.state_file",
        ),
        ("socket = \"/run/x/ksm.json\"", "a file that Ebb makes beside daemon.state_file"),
        ("socket = \"/run/x/state.lock\"", "a file that Ebb makes beside daemon.state_file"),
        (
            "socket = \"/run/q\"\n[vm.a]\nqmp = \"/run/q\"",
            "f:3: daemon.socket: /run/q is also the qmp",
        ),
        (&long, "has 108 bytes: the path of a socket has at most 107"),
    ] {
        let error = said(lines).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    said(&long.replace("aa\"", "a\"")).unwrap();
    said("socket = \"/run/y/ksm.json\"").unwrap();
}

#[test]
fn of_listed_vms_only_those_with_a_section_are_managed() {
    let config = Config::parse("f", "[host]\nvms = \"listed\"\n[vm.a]\n").unwrap();
    let its = Metadata::Says(Overrides { manage: Some(true), ..Overrides::default() });
    let managed = |name| config.settings(name, None).with(&its, Bytes::ZERO).manage;
    assert!(managed("a") && !managed("b"));
    assert!(config.settings("a", None).manage && !config.settings("b", None).manage);
}

#[test]
fn a_section_by_uuid_counts_more_than_one_by_name() {
    let uuid = "11111111-2222-3333-4444-55555555AAAA";
    let text = format!("[vm.a]\nweight = 2\n[vm.\"uuid:{uuid}\"]\nweight = 3\n");
    let c = Config::parse("f", &text).unwrap();
    let weight = |name: &str, uuid: Option<&str>| c.settings(name, uuid).weight;
    assert_eq!((weight("a", None), weight("b", None)), (2.0, 1.0));
    for uuid in [uuid.to_owned(), uuid.to_lowercase()] {
        assert_eq!((weight("a", Some(&uuid)), weight("b", Some(&uuid))), (3.0, 3.0));
    }
    assert_eq!(weight("a", Some("another")), 2.0);
    assert_eq!(weight(&format!("uuid:{}", uuid.to_lowercase()), None), 1.0, "a -name");
    let twice = format!("{text}[vm.\"uuid:{}\"]\n", uuid.to_lowercase());
    let error = Config::parse("f", &twice).unwrap_err().to_string();
    assert!(error.contains("there is a section of this VM already"), "{error}");
}

#[test]
fn a_section_may_say_what_a_vm_must_be_to_have_it() {
    let c = Config::parse(
        "f",
        "[host]\nprograms = [\"/opt/q/qemu-system-x86_64\"]\n[vm.a]\nuser = \"al\"\n\
         uuid = \"11111111-2222-3333-4444-55555555AAAA\"\ncgroup = \"/t/a\"\n[vm.b]\n\
         uuid = \"11111111-2222-3333-4444-555555555555\"\n[vm.c]\nuser = 7\ngroup = \"x\"\n",
    )
    .unwrap();
    let identity = |name: &str| c.settings(name, None).identity.clone();
    let a = Identity {
        user: Some(User::Name("al".into())),
        uuid: Some("11111111-2222-3333-4444-55555555aaaa".into()),
        cgroup: Some("/t/a".into()),
    };
    assert_eq!(identity("a"), a);
    assert_eq!(identity("d"), Identity::default());
    assert!(!identity("b").is_proof() && identity("c").is_proof());
    assert!(!c.has_one_group() && Config::default().has_one_group());
    assert_eq!(c.programs, ["/opt/q/qemu-system-x86_64"]);
}

#[test]
fn users_sockets_and_containers_are_as_few_as_possible_unless_told() {
    let c = Config::default();
    assert_eq!((c.sockets, &c.users[..], c.containers), (SocketUse::Known, &[][..], false));
    let text = "[host]\nsockets = \"any\"\nusers = [\"alice\", 1001]\ncontainers = true\n";
    let c = Config::parse("f", text).unwrap();
    assert_eq!((c.sockets, c.containers), (SocketUse::Any, true));
    for (word, sockets) in [("own", SocketUse::Own), ("shared", SocketUse::Shared)] {
        let text = format!("[host]\nsockets = \"{word}\"\n");
        assert_eq!(Config::parse("f", &text).unwrap().sockets, sockets);
    }
    assert_eq!(c.users, [User::Name("alice".into()), User::Uid(1001)]);
    let json = serde_json::to_string(&c).unwrap();
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), c, "as a record keeps it");
}

#[test]
fn merging_is_off_unless_asked_for_and_a_vm_may_stay_out() {
    let none = Config::parse("f", "").unwrap();
    assert_eq!((none.merge.mode, &none), (MergeMode::Off, &Config::default()));
    let c = Config::parse(
        "f",
        "[merge]\nmode = \"on\"\ngroup = \"acme\"\ncpu = \"150%\"\ncpu_clear = \"2.5%\"\nfloor = \"8MiB\"\n\
         scan = \"2min\"\n[defaults]\nmerge = true\n[vm.a]\nmerge = false\n",
    )
    .unwrap();
    let settings = Settings { cores: 1.5, clear_cores: 0.025, floor: Bytes::mib(8) };
    assert_eq!((c.merge.mode, c.merge.settings), (MergeMode::On, settings));
    assert_eq!((c.merge.scan_ms, c.merge.across_groups), (120_000, false));
    let merge = |name| c.settings(name, None).merge;
    assert_eq!((merge("a"), merge("b")), (Some(false), Some(true)));
    assert!(!c.merge.zeros && !c.merge.hold_khugepaged);
    let text = "[merge]\nzeros = true\nhold_khugepaged = true\n[vm.a]\nzeros = false\n";
    let c = Config::parse("f", text).unwrap();
    assert!(c.merge.mode == MergeMode::Off && c.merge.zeros && c.merge.hold_khugepaged);
    assert_eq!((c.settings("a", None).zeros, c.settings("b", None).zeros), (false, true));
}

#[test]
fn a_bad_field_is_named_with_line_and_what_is_allowed() {
    for (text, expected) in [
        ("[daemon]\ntick = \"1h\"", "f:2: daemon.tick: “1h” is not allowed: a time from"),
        ("[daemon]\n\nlisten = \"0.0.0.0:80\"", "f:3: daemon.listen: “0.0.0.0:80” is not allowed"),
        ("[vm.a]\nweight = 0", "f:2: vm.a.weight: 0 is not a weight: a number from"),
        ("[vm.a]\nweight = nan", "f:2: vm.a.weight: NaN is not a weight"),
        ("[vm.a]\nmin = \"2GiB\"\nmax = \"1GiB\"", "f:2: vm.a.min: min 2 GiB is above max 1 GiB"),
        (
            "[defaults]\nmin = \"2GiB\"\n[vm.a]\nmax = \"1GiB\"",
            "f:4: vm.a.max: min 2 GiB (the default) is above max 1 GiB",
        ),
        (
            "[defaults]\nmax = \"1GiB\"\n[vm.a]\nmin = \"2GiB\"",
            "f:4: vm.a.min: min 2 GiB is above max 1 GiB (the default)",
        ),
        ("[vm.a]\nmax = \"0%\"", "f:2: vm.a.max: 0% is no memory: max must be above 0"),
        ("[defaults]\nmax = 0", "f:2: defaults.max: 0 B is no memory"),
        ("[vm.a]\nmin = \"120%\"", "f:2: vm.a.min: “120%” is not a share: 0% to 100%"),
        ("[vm.a]\nmin = true", "f:2: vm.a.min: expected a size such as"),
        ("[vm.a]\nqmp = \"x\"", "f:2: vm.a.qmp: “x” is not an absolute path"),
        (
            "[daemon]\nstate_file = \"/a.lock\"",
            "f:2: daemon.state_file: “/a.lock” is named like the files that Ebb makes \
             beside it",
        ),
        ("[host]\nreserve = -1", "f:2: host.reserve: a size cannot be negative"),
        ("[host]\nreserved = 1", "f:2: host.reserved: unknown field `reserved`, expected"),
        ("[daemon]\ntick = \"1s\"\nfast_tick = \"2s\"", "f:3: daemon.fast_tick: 2000 ms is longer"),
        ("[host]\nsockets = \"all\"", "f:2: host.sockets: “all” is not allowed: \"own\" ("),
        ("[host]\nusers = [1,\n \"a b\"]", "f:3: host.users: “a b” is not the name of a user"),
        ("[host]\nusers = [\"\"]", "f:2: host.users: “” is not the name of a user"),
        ("[host]\nusers = [-1]", "f:2: host.users: -1 is not a uid: 0 to 4294967294"),
        ("[host]\nusers = [4294967295]", "f:2: host.users: 4294967295 is not a uid"),
        ("[host]\nusers = [true]", "f:2: host.users: expected a user's name such as"),
        ("[host]\nusers = \"a\"", "f:2: host.users: invalid type: string \"a\", expected a list"),
        ("[host]\ncontainers = 1", "f:2: host.containers: invalid type: integer"),
        (
            "\n[vm.\"uuid:1\"]\nmin = 0",
            "f:2: vm.uuid:1: after “uuid:” comes the VM's -uuid: 8-4-4-4-12",
        ),
        ("[host]\nvms = \"some\"", "f:2: host.vms: “some” is not allowed: \"all\""),
        ("[merge]\nmode = \"yes\"", "f:2: merge.mode: “yes” is not allowed: \"off\""),
        ("[defaults]\nuser = 7", "f:2: defaults.user: this is of one VM only"),
        ("[defaults]\nqmp = \"/a\"", "f:2: defaults.qmp: this is of one VM only: write it in a"),
        ("[vm.a]\nmin = \"600\"", "f:2: vm.a.min: 600 B is below 1 MiB: write the unit"),
        ("[vm.a]\nmax = 600", "f:2: vm.a.max: 600 B is below 1 MiB: write the unit"),
        ("[merge]\nfloor = 32", "f:2: merge.floor: 32 B is below 1 MiB: write the unit"),
        ("[host]\nreserve = 8", "f:2: host.reserve: 8 B is below 1 MiB: write the unit"),
        ("[vm.a]\nuuid = \"7\"", "f:2: vm.a.uuid: 8-4-4-4-12 hexadecimal digits"),
        ("[vm.a]\ncgroup = \"b\"", "f:2: vm.a.cgroup: “b” is not an absolute path"),
        ("[vm.a]\nuser = -1", "f:2: vm.a.user: -1 is not a uid"),
        ("[host]\nprograms = [\"kvm\"]", "f:2: host.programs: “kvm” is not an absolute path"),
        ("[merge]\ncpu = \"0%\"", "f:2: merge.cpu: “0%” is not allowed: percent of a core"),
        ("[merge]\ncpu_clear = \"0%\"", "f:2: merge.cpu_clear: “0%” is not allowed"),
        ("[merge]\nscan = \"9ms\"", "f:2: merge.scan: “9ms” is not allowed: a time from \"1s\""),
        ("[daemon", "f:1: [daemon: "),
    ] {
        let e = Config::parse("f", text).unwrap_err().to_string();
        assert!(e.starts_with(expected), "{text}\n gave {e}\n not {expected}");
    }
}

proptest! {
    #[test]
    fn any_text_gives_a_config_or_an_error(text in "(\\[(daemon|host|merge|defaults|vm\\.a)\\]\n)?([a-z_]{0,9} ?= ?.{0,20}\n){0,4}") {
        let _ = Config::parse("f", &text);
    }
}
