//! Memory cgroups of fixture trees, and this machine's.

use super::*;
use crate::testing::tree;
use std::fs;

const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
    35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
    41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
const V2: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
const NONE_V1: &str = "9223372036854771712\n";

fn paths(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

/// The pool that is found first for VMs in these cgroups.
fn pool_of(root: &Root, h: &Hierarchy, list: &[&str]) -> Option<String> {
    let with_limit = |path: String| (path.clone(), read_limit(root, h, &path).unwrap());
    let held: Vec<_> = held_by_most(&paths(list)).into_iter().map(with_limit).collect();
    choose_pool(&held)
}

#[test]
fn v1_counts_in_a_hybrid_and_its_pool_is_read() {
    let m = "/sys/fs/cgroup/memory";
    let root = tree(&[
        ("/proc/self/mountinfo", HYBRID),
        ("/proc/7/cgroup", "4:cpu,memory:/vms/a:b\n1:name=systemd:/\n0::/other\n"),
        (&format!("{m}/memory.limit_in_bytes"), NONE_V1),
        (&format!("{m}/vms/memory.limit_in_bytes"), "4096000\n"),
        (&format!("{m}/vms/memory.usage_in_bytes"), "40960\n"),
        (
            &format!("{m}/vms/memory.stat"),
            "rss 1\ntotal_rss 100\ntotal_active_file 30\ntotal_inactive_file 20\n\
             total_dirty 5\ntotal_writeback 1\ntotal_swap 9\n",
        ),
        (&format!("{m}/vms/memory.oom_control"), "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        (&format!("{m}/vms/a:b/memory.limit_in_bytes"), NONE_V1),
    ]);
    let h = read_hierarchy(&root).unwrap().unwrap();
    assert_eq!(h.version, Version::V1);
    let group = read_process_cgroup(&root, h.version, 7).unwrap().unwrap();
    assert_eq!(group, "/vms/a:b");
    let path = pool_of(&root, &h, &[&group, "/vms/c"]).unwrap();
    let pool = read_pool(&root, &h, &path).unwrap().unwrap();
    let expected = LimitSample {
        path: "/vms".into(),
        nodes: Vec::new(),
        limit: Bytes(4096000),
        usage: Bytes(40960),
        file: Bytes(44),
        anon: Bytes(100),
        swap: Some(Bytes(9)),
        swap_left: None,
        oom_kills: Some(3),
        psi: None,
    };
    assert_eq!(pool, expected);
}

#[test]
fn v2_takes_the_tightest_limit_on_the_way_up() {
    let s = "/sys/fs/cgroup/machine.slice";
    let root = tree(&[
        ("/proc/self/mountinfo", V2),
        ("/sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
        (&format!("{s}/memory.max"), "2000\n"),
        (&format!("{s}/memory.current"), "1500\n"),
        (
            &format!("{s}/memory.stat"),
            "anon 700\nfile 600\nactive_file 300\ninactive_file 200\nfile_dirty 50\n",
        ),
        (&format!("{s}/memory.events"), "low 0\noom 1\noom_kill 1\noom_group_kill 0\n"),
        (&format!("{s}/memory.swap.current"), "64\n"),
        (&format!("{s}/memory.pressure"), "some avg10=1.00 avg60=0 avg300=0 total=5\n"),
        (&format!("{s}/web/memory.max"), "9000\n"),
        (&format!("{s}/web/a/memory.max"), "100\n"),
        (&format!("{s}/web/b/memory.max"), "max\n"),
    ]);
    let h = read_hierarchy(&root).unwrap().unwrap();
    let of = |list: &[&str]| pool_of(&root, &h, list);
    let web = ["/machine.slice/web/a", "/machine.slice/web/b"];
    assert_eq!(of(&web).as_deref(), Some("/machine.slice"));
    assert_eq!(of(&web[..1]).as_deref(), Some("/machine.slice/web/a"));
    assert_eq!(of(&["/machine.slice/web/a", "/elsewhere"]), None);
    assert_eq!(of(&[]), None);
    let pool = read_pool(&root, &h, "/machine.slice").unwrap().unwrap();
    assert_eq!((pool.file, pool.swap, pool.oom_kills), (Bytes(450), Some(Bytes(64)), Some(1)));
    assert_eq!(pool.psi.unwrap().some.total_us, 5);
}

#[test]
fn the_pool_holds_more_than_half_of_the_vms_and_not_all_of_them() {
    let a = ["/vm.slice/a", "/vm.slice/b", "/elsewhere"];
    assert_eq!(held_by_most(&paths(&a)), ["/", "/vm.slice"]);
    assert_eq!(held_by_most(&paths(&a[1..])), ["/"]);
    assert_eq!(held_by_most(&paths(&a[..1])), ["/", "/vm.slice", "/vm.slice/a"]);
    assert!(held_by_most(&[]).is_empty());
    let limits = |list: &[(&str, Option<u64>)]| -> Vec<(String, Option<Bytes>)> {
        list.iter().map(|(p, l)| (p.to_string(), l.map(Bytes))).collect()
    };
    for (held, expected) in [
        (limits(&[("/", None), ("/s", Some(9)), ("/s/a", Some(7))]), Some("/s/a")),
        (limits(&[("/", None), ("/s", Some(7)), ("/s/a", Some(9))]), Some("/s")),
        (limits(&[("/", None), ("/s", Some(7)), ("/s/a", Some(7))]), Some("/s/a")),
        (limits(&[("/", None), ("/s", None)]), None),
        (limits(&[]), None),
    ] {
        assert_eq!(choose_pool(&held).as_deref(), expected, "{held:?}");
    }
}

#[test]
fn the_limit_is_where_a_cgroup_is_throttled_or_where_it_is_killed() {
    let files =
        [("/m/a/memory.max", "900\n"), ("/m/a/memory.high", "700\n"), ("/m/b/memory.high", "5\n")];
    let more = [("/m/b/memory.max", "max\n"), ("/m/c/memory.max", "8\n")];
    let high = [("/m/c/memory.high", "max\n"), ("/m/d/memory.max", "max\n")];
    let root = tree(&[&files[..], &more[..], &high[..]].concat());
    let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
    let of = |cgroup| read_limit(&root, &h, cgroup).unwrap().map(|b| b.0);
    assert_eq!(["/a", "/b", "/c", "/d", "/e"].map(of), [Some(700), Some(5), Some(8), None, None]);
}

#[test]
fn swap_left_is_the_least_of_the_pool_and_of_all_above_it() {
    let root = tree(&[
        ("/m/s/memory.swap.max", "1000\n"),
        ("/m/s/memory.swap.current", "400\n"),
        ("/m/s/p/memory.swap.max", "max\n"),
        ("/m/s/p/memory.swap.current", "100\n"),
        ("/m/s/q/memory.swap.max", "0\n"),
        ("/m/s/q/memory.swap.current", "50\n"),
        ("/m/free/memory.swap.max", "max\n"),
        ("/m/free/memory.swap.current", "5\n"),
    ]);
    let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
    let of = |cgroup| read_swap_left(&root, &h, cgroup).unwrap().map(|b| b.0);
    assert_eq!(of("/s/p"), Some(600));
    assert_eq!(of("/s/q"), Some(0), "a limit that was lowered below what is used");
    assert_eq!((of("/free"), of("/none")), (None, None));
}

#[test]
fn v1_limits_memory_and_swap_together() {
    let group = |g: &str, files: &[(&str, u64)]| -> Vec<(String, String)> {
        let line = |(f, n): &(&str, u64)| (format!("/m/{g}/memory.{f}"), format!("{n}\n"));
        files.iter().map(line).collect()
    };
    let files = [
        group("a", &[("limit_in_bytes", 1000), ("usage_in_bytes", 900)]),
        group("a", &[("memsw.limit_in_bytes", 1500), ("memsw.usage_in_bytes", 1100)]),
        group("b", &[("limit_in_bytes", 1000), ("usage_in_bytes", 300)]),
        group("b", &[("memsw.limit_in_bytes", 1000), ("memsw.usage_in_bytes", 300)]),
        group("c", &[("limit_in_bytes", 1000), ("usage_in_bytes", 300)]),
    ];
    let files = files.concat();
    let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (&p[..], &t[..])).collect();
    let root = tree(&files);
    let h = Hierarchy { version: Version::V1, point: "/m".into(), root: "/".into() };
    let of = |cgroup| read_swap_left(&root, &h, cgroup).unwrap().map(|b| b.0);
    assert_eq!(of("/a"), Some(300), "400 more of both, 100 of them memory");
    assert_eq!(of("/b"), Some(0), "memory may take all that is left");
    assert_eq!(of("/c"), None, "swap is not accounted");
}

#[test]
fn names_that_only_begin_alike_are_not_ancestors() {
    assert_eq!(common_ancestor(&paths(&["/vm/a", "/vm1/b"])).as_deref(), Some("/"));
    assert_eq!(common_ancestor(&paths(&["/vm/a", "/vm/a/b"])).as_deref(), Some("/vm/a"));
}

#[test]
fn v2_without_the_memory_controller_is_none() {
    let root =
        tree(&[("/proc/self/mountinfo", V2), ("/sys/fs/cgroup/cgroup.controllers", "cpu pids\n")]);
    assert_eq!(read_hierarchy(&root).unwrap(), None);
}

#[test]
fn a_mounted_part_shows_only_what_is_below_it() {
    let h = Hierarchy { version: Version::V2, point: "/c".into(), root: "/docker/x".into() };
    assert_eq!(h.directory("/docker/x/vm"), Some("/c/vm".into()));
    assert_eq!(h.directory("/docker/x"), Some("/c".into()));
    assert_eq!(h.directory("/docker"), None);
    assert_eq!(h.directory("/docker/x/../../etc"), None);
}

#[test]
fn a_limit_that_is_no_number_is_an_error_with_its_path() {
    let root = tree(&[("/m/memory.max", "lots\n")]);
    let h = Hierarchy { version: Version::V2, point: "/m".into(), root: "/".into() };
    let error = read_limit(&root, &h, "/").unwrap_err().to_string();
    assert!(error.contains("/m/memory.max: line 1: “lots” is not a number"), "{error}");
}

/// Makes and removes a real child cgroup: needs root and a v1 or v2 hierarchy.
#[test]
fn this_machine_reads_and_a_child_cgroup_with_a_limit_is_a_pool() {
    let root = Root::default();
    let Some(h) = read_hierarchy(&root).unwrap() else { return };
    let me = std::process::id();
    let mine = read_process_cgroup(&root, h.version, me).unwrap().unwrap();
    pool_of(&root, &h, &[&mine]);
    if !rustix::process::geteuid().is_root() || h.version == Version::V2 {
        return;
    }
    struct Child(PathBuf);
    impl Drop for Child {
        fn drop(&mut self) {
            let _ = fs::remove_dir(&self.0);
        }
    }
    let name = format!("{}/ebb-test-{me}", mine.trim_end_matches('/'));
    let child = Child(h.directory(&name).unwrap());
    if fs::create_dir(&child.0).is_err() {
        return; // The hierarchy is read-only, as in most containers.
    }
    fs::write(child.0.join("memory.limit_in_bytes"), "1048576").unwrap();
    assert_eq!(pool_of(&root, &h, &[&name, &format!("{name}/vm")]).as_ref(), Some(&name));
    let pool = read_pool(&root, &h, &name).unwrap().unwrap();
    assert_eq!((pool.limit, pool.oom_kills), (Bytes::mib(1), Some(0)));
}
