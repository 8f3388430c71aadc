//! What came back of a VM, by what took it.

use super::*;
use crate::wire::Counters;

/// Its balloon has 512 of 1024 MiB when a VFIO device is plugged in. Its VMM has 40 MiB.
#[test]
fn what_is_pinned_of_a_balloon_does_not_count_as_the_vmms_own() {
    let own = |pinned: bool, counted: bool| {
        let own = OwnMemory { resident: Bytes::mib(40), swap: Bytes::ZERO };
        let its = |held| {
            let mut its = vm(512, 200, held);
            its.process.as_mut().unwrap().own = counted.then_some(own);
            its
        };
        let mut memory = taken_to(512, &|| its(400), 20);
        let pinned = pinned.then(|| "VFIO".into());
        drop(look(&mut memory, 21_000, VmSample { pinned, ..its(1064) }));
        memory.vms[0].own().0 >> 20
    };
    assert_eq!((own(true, true), own(false, true), own(true, false)), (40, 552, 552));
}

/// Its counters are told when it has done, and residency is read in the middle of its work.
#[test]
fn what_an_agent_at_work_takes_is_put_down_to_it_at_the_end() {
    let mut memory = Memory::default();
    let mut see = |at, resident, (recycled, busy)| {
        let counters = Counters { recycled: Bytes::mib(recycled), ..Counters::default() };
        let agent = Some(AgentSample { counters, busy, ..AgentSample::ready(0) });
        look(&mut memory, at, VmSample { agent, ..vm(1024, 500, resident) });
        let returned = memory.vm(ID).unwrap().returned;
        [returned.recycled, returned.reporting, returned.other].map(|b| b.0 >> 20)
    };
    assert_eq!(see(1000, 900, (0, false)), [0, 0, 0]);
    assert_eq!(see(1100, 700, (0, true)), [0, 0, 0]);
    assert_eq!(see(1200, 600, (0, true)), [0, 0, 0]);
    assert_eq!(see(1300, 500, (380, false)), [380, 0, 20]);
    assert_eq!(see(1400, 490, (380, false)), [380, 0, 30]);
}

#[test]
fn plugged_memory_is_not_given_back_and_what_is_unplugged_is_not_taken() {
    let mut memory = Memory::default();
    let mut see = |at, ram, size, resident| {
        let ram = Some(Bytes::mib(ram));
        let one = VmSample { ram, ..vm(size, size / 2, resident) };
        look(&mut memory, at, one);
        let m = memory.vm(ID).unwrap();
        [m.returned.given_back, m.returned.balloon, m.inflated].map(|b| b.0 >> 20)
    };
    assert_eq!(see(1000, 1024, 900, 900), [0, 0, 0]);
    assert_eq!(see(2000, 1024, 800, 800), [0, 100, 100]);
    assert_eq!(see(3000, 2048, 1824, 800), [0, 100, 100], "1 GiB is plugged");
    assert_eq!(see(4000, 2048, 1924, 800), [100, 100, 100]);
    assert_eq!(see(5000, 1024, 900, 700), [100, 100, 100], "and unplugged");
}
