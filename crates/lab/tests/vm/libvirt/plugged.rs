//! Memory that is plugged into a domain by virtio-mem.

use super::*;

const ROOM: &str = "<maxMemory slots='2' unit='MiB'>2048</maxMemory>";
const DEVICE: &str = "<memory model='virtio-mem'><target><size unit='MiB'>256</size><node>0</node>\
                      <block unit='MiB'>2</block><requested unit='MiB'>0</requested></target>\
                      </memory>";

#[test]
fn vm_virtio_mem_is_plugged_while_a_domain_is_owed_memory_and_it_is_given_back() {
    let (_arena, libvirtd) = host(Kind::Root);
    let domain = libvirtd.boot("grown", RAM, BALLOON, ROOM).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let daemon = start(&libvirtd, dir.path(), &["grown"]);
    wait_up(&daemon, "grown");
    daemon.squeeze("grown", Bytes::mib(300)).unwrap();

    // The device is there, and nothing of it is plugged yet.
    domain.tool.request("modprobe name=virtio_mem", PATIENCE).unwrap();
    let file = libvirtd.dir().join("device.xml");
    std::fs::write(&file, DEVICE).unwrap();
    libvirtd.virsh(&["attach-device", "grown", &file.display().to_string(), "--live"]).unwrap();
    let looked_at = |ram: Bytes, small: Bytes| {
        move |vm: &Value| {
            let actual = vm["actual"].as_u64().is_some_and(|size| size <= small.0);
            vm["ram"] == ram.0 && actual && vm["link"]["state"] == "up"
        }
    };
    std::thread::sleep(Duration::from_secs(3));
    let small = looked_at(RAM, Bytes::mib(330));
    wait_vm(&daemon, "grown", "the device", small);
    needs_memory(&domain, &daemon, "grown");
    daemon.squeeze("grown", Bytes::mib(300)).unwrap();

    let plugged = Bytes::mib(128);
    libvirtd
        .virsh(&["update-memory-device", "grown", "--requested-size", "128MiB", "--live"])
        .unwrap();
    // Plugging costs the guest memory: one that is out of it deflates its balloon, and is given more.
    let any = looked_at(RAM + plugged, RAM + plugged);
    wait_vm(&daemon, "grown", "plugged memory", any);
    squeeze_balloon(&libvirtd, &daemon, "grown", Bytes::mib(330));
    wait_whole(&libvirtd, daemon, &["grown"]);
}
