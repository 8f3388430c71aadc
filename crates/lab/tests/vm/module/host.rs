//! What the host sees: it finds and believes the header, is hardly a burden to an idle guest,
//! and knows a dead one.

use super::*;

/// The host's side of the header: guest RAM is a file, guest-physical addresses
/// below 3 GiB are offsets in it.
struct Ram(File);

impl Ram {
    fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn u64(&self, at: u64) -> u64 {
        u64::from_le_bytes(self.bytes(at))
    }

    fn u32(&self, at: u64) -> u64 {
        u32::from_le_bytes(self.bytes(at)).into()
    }

    fn headers(&self) -> Vec<u64> {
        const MAGIC: [u8; 16] = [
            0xeb, 0xb1, 0x66, 0x72, 0x65, 0x65, 0x6d, 0x61, 0x70, 0x9d, 0x1c, 0x40, 0xd3, 0x7a,
            0x05, 0xf4,
        ];
        (0..4096).map(|p| p * 4096).filter(|p| self.bytes(*p) == MAGIC).collect()
    }

    fn checksum(&self, header: u64) -> u64 {
        let mut bytes: [u8; 128] = self.bytes(header);
        bytes[32..40].fill(0);
        let step = |sum: u64, b: &u8| (sum ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// Address and first pfn of every map page.
    fn map(&self, header: u64) -> Vec<(u64, u64)> {
        let mut pages = Vec::new();
        let mut list = self.u64(header + 264);
        while list != 0 {
            for i in 0..self.u32(list + 8).min(255) {
                let extent = list + 16 + i * 16;
                let (gpa, first) = (self.u64(extent), self.u32(extent + 8));
                let each = |k| (gpa + k * 4096, (first + k) * 32768);
                pages.extend((0..self.u32(extent + 12)).map(each));
            }
            list = self.u64(list);
        }
        pages
    }

    fn set_bits(&self, map: &[(u64, u64)]) -> u64 {
        let ones = |(at, _): &(u64, u64)| -> u64 {
            self.bytes::<4096>(*at).iter().map(|b| u64::from(b.count_ones())).sum()
        };
        map.iter().map(ones).sum()
    }
}

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn seen_from_outside(kernel: Kernel, faults: bool) -> (Guest, Ram, tempfile::NamedTempFile) {
    let shm = Path::new("/dev/shm");
    let dir = if shm.is_dir() { shm.to_path_buf() } else { std::env::temp_dir() };
    let file = tempfile::NamedTempFile::new_in(dir).unwrap();
    let guest = Guest::boot(kernel, faults, |c| {
        c.backing = Backing::File(file.path().into());
        c.memory = Bytes::mib(512);
        c.append.clear();
    });
    let ram = Ram(File::options().read(true).write(true).open(file.path()).unwrap());
    (guest, ram, file)
}

#[test]
fn vm_the_host_finds_believes_and_loses_the_header() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let (guest, ram, _file) = seen_from_outside(kernel, false);
        assert!(ram.headers().is_empty());
        guest.insmod("");
        let found = ram.headers();
        let [h] = found[..] else { panic!("{kernel}: {found:?}") };
        assert_eq!((ram.u32(h + 16), ram.u64(h + 24)), (1, h));
        assert_eq!(ram.u64(h + 32), ram.checksum(h));
        assert_eq!(ram.u32(h + 128), RUNNING);
        let key = ram.u64(h + 40);

        // It beats.
        let beat = ram.u64(h + 192);
        guest.vm.wait_for("beats", MINUTE, |_| ram.u64(h + 192) > beat + 3).unwrap();
        // Not more seldom than it says, as far as this machine's load allows to tell.
        let tick = Duration::from_millis(ram.u32(h + 136));
        let (begun, mut last) = (Instant::now(), (Instant::now(), ram.u64(h + 192)));
        let mut longest = Duration::ZERO;
        while begun.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(2));
            longest = longest.max(last.0.elapsed());
            if ram.u64(h + 192) != last.1 {
                last = (Instant::now(), ram.u64(h + 192));
            }
        }
        println!("{kernel}: idle for up to {longest:?} between beats, tick_ms {tick:?}");
        assert!(tick <= Duration::from_secs(1) && longest < tick * 3, "{kernel}: {longest:?}");
        let right = |_: &Vm| ram.u64(h + 200) == mix(ram.u64(h + 192).wrapping_add(key));
        guest.vm.wait_for("a right beat", MINUTE, right).unwrap();

        // It answers, and does so faster once it is asked often; not when paused.
        let mut slowest = Duration::ZERO;
        for challenge in 1..=10u64 {
            let challenge = challenge.wrapping_mul(0x1234_5678_9abc_def1);
            let begun = Instant::now();
            ram.0.write_all_at(&challenge.to_le_bytes(), h + 208).unwrap();
            let answer = mix(!challenge ^ key);
            guest.vm.wait_for("an answer", MINUTE, |_| ram.u64(h + 216) == answer).unwrap();
            if challenge > 0x1234_5678_9abc_def1 {
                slowest = slowest.max(begun.elapsed());
            }
        }
        println!("{kernel}: slowest answer but for the first {slowest:?}");
        guest.vm.pause().unwrap();
        let (beat, answer) = (ram.u64(h + 192), ram.u64(h + 216));
        ram.0.write_all_at(&7u64.to_le_bytes(), h + 208).unwrap();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!((ram.u64(h + 192), ram.u64(h + 216)), (beat, answer));
        guest.vm.resume().unwrap();

        // Map and facts say the same as the guest.
        let map = ram.map(h);
        assert_eq!((map.len() as u64, ram.u32(h + 276)), (4, 4));
        let (audit, bits) = (guest.numbers("audit"), ram.set_bits(&map));
        assert!(bits.abs_diff(audit["set"]) < 2000, "{bits} {audit:?}");
        let meminfo = guest.vm.request("meminfo", MINUTE).unwrap();
        let (total, free) = (ram.u64(h + 512 + 16) * 4096, ram.u64(h + 512 + 24) * 4096);
        assert_eq!(total, meminfo.u64("MemTotal"));
        assert!(free.abs_diff(meminfo.u64("MemFree")) < 16 << 20, "{free} {meminfo:?}");
        assert_eq!(ram.u32(h + 512) % 2, 0);

        // It follows what the guest does.
        let tool = guest.vm.tool();
        tool.start_ready("h", "hold", "size=104857600", MINUTE).unwrap();
        let full = ram.set_bits(&map);
        assert!(bits - full > 24_000, "{bits} {full}");
        tool.stop("h").unwrap();
        let begun = Instant::now();
        let back = |_: &Vm| ram.set_bits(&map) > full + 24_000;
        guest.vm.wait_for("the bits to come back", MINUTE, back).unwrap();
        println!("{kernel}: 100 MiB freed are in the map after {:?}", begun.elapsed());

        guest.sh("rmmod ebb");
        assert!(ram.headers().is_empty());
        assert_eq!(ram.bytes::<776>(h), [0; 776]);
    });
}

/// Timer interrupts of all vCPUs in a second, over `seconds` in which the guest does nothing.
fn woken(guest: &Guest, seconds: u32) -> f64 {
    const COUNT: &str = "$(awk '/LOC:/ { print $2 + $3 }' /proc/interrupts)";
    let said = guest.sh(&format!("a={COUNT}; sleep {seconds}; echo $(({COUNT} - a))"));
    said.trim().parse::<f64>().unwrap() / f64::from(seconds)
}

#[test]
fn vm_an_idle_guest_is_hardly_woken() {
    let _arena = held();
    in_pairs(&Kernel::ALL, |&kernel| {
        let guest = Guest::boot(kernel, false, |_| ());
        guest.sh("sleep 10");
        let without = woken(&guest, 30);
        guest.insmod("");
        guest.sh("sleep 5");
        let with = woken(&guest, 30);
        println!("{kernel}: {without:.1} timer interrupts a second, with the module {with:.1}");
        assert!(with < without + 5.0, "{kernel}: {without} without the module, {with} with it");
        assert_eq!(guest.numbers("stats")["state"], RUNNING, "{kernel}");
    });
}

#[test]
fn vm_what_a_dying_guest_leaves_in_ram_is_marked_as_dead() {
    let _arena = held();
    for kernel in kernels(Kernel::V6_12) {
        // One of them while the module's thread waits for memory with its lock held.
        let ends = [("poweroff", 2, 0), ("reboot", 2, 0), ("sysrq c=c", 3, 0), ("reboot", 2, HELD)];
        in_pairs(&ends, |&(command, reason, fault)| {
            let (guest, ram, _file) = seen_from_outside(kernel, fault != 0);
            guest.insmod(&if fault == 0 { String::new() } else { format!("fault={fault}") });
            // Firmware would write over what the guest left.
            let pause = serde_json::json!({"reboot": "shutdown", "shutdown": "pause"});
            guest.vm.qmp("set-action", Some(pause)).unwrap();
            let h = ram.headers()[0];
            let map = ram.map(h);
            assert!(ram.set_bits(&map) > 10_000);
            guest.vm.request(command, MINUTE).unwrap();
            ebb_lab::poll(MINUTE, || ram.u32(h + 128) != RUNNING);
            // An atomic notifier clears a moment after the word.
            std::thread::sleep(Duration::from_millis(300));
            let end = (ram.u32(h + 128), ram.u32(h + 132), ram.set_bits(&map));
            assert_eq!(end, (STOPPED, reason, 0), "{kernel} {command}");
        });
    }
}
