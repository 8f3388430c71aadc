//! Which section of the configuration a VM is decided by.

use ebb_core::config::Config;
use ebb_core::model::{Model, Standing};
use ebb_core::sample::{BalloonSample, Link, RunState, Sample, VmId, VmSample};
use ebb_core::state::Memory;
use ebb_core::units::{Bytes, Stamp};

const UUID: &str = "11111111-2222-3333-4444-555555555555";

fn vm(pid: u32, name: &str, given: Option<&str>, uuid: Option<&str>) -> VmSample {
    VmSample {
        id: VmId { pid, start: 1 },
        name: name.into(),
        given: given.map(str::to_owned),
        uuid: uuid.map(str::to_owned),
        ram: Some(Bytes::gib(1)),
        link: Link::Up,
        run: Some(RunState::Running),
        balloon: Some(BalloonSample { actual: Bytes::gib(1), ..BalloonSample::default() }),
        ..VmSample::default()
    }
}

fn model(config: &str, vms: Vec<VmSample>) -> Model {
    let config = Config::parse("f", config).unwrap();
    let sample = Sample { at: Stamp(1_000), vms, ..Sample::default() };
    let mut memory = Memory::default();
    memory.observe(&sample);
    Model::new(&config, &sample, &memory)
}

/// A local migration overlaps two QEMUs of one name; one of them is shown by another.
#[test]
fn two_vms_of_one_name_are_both_decided_by_its_section() {
    let vms = vec![vm(1, "a", None, None), vm(2, "a-2", Some("a"), None), vm(3, "b", None, None)];
    let model = model("[vm.a]\nmanage = false\ngroup = \"g\"\n", vms);
    let off =
        |i: usize| matches!(&model.vms[i].standing, Standing::Off(why) if why.contains("manage"));
    assert_eq!([off(0), off(1), off(2)], [true, true, false], "{:?}", model.vms);
    assert_eq!([0, 1, 2].map(|i| model.vms[i].group.as_str()), ["g", "g", "default"]);
}

/// A name made unique may be another VM's section.
#[test]
fn a_name_that_was_made_unique_is_no_section() {
    let model = model("[vm.a-2]\nmanage = false\n", vec![vm(2, "a-2", Some("a"), None)]);
    assert!(!model.vms[0].standing.why().contains("manage"), "{:?}", model.vms[0].standing);
}

#[test]
fn a_section_by_uuid_holds_whatever_the_name() {
    let config = format!("[vm.a]\nmanage = true\n[vm.\"uuid:{UUID}\"]\nmanage = false\n");
    let vms =
        vec![vm(1, "a", None, Some(UUID)), vm(2, "z", None, Some(UUID)), vm(3, "c", None, None)];
    let model = model(&config, vms);
    let off = |i: usize| model.vms[i].standing.why().contains("manage");
    assert_eq!([off(0), off(1), off(2)], [true, true, false]);
}
