//! Protect: whether more VMs fit, at whose expense, and what is left when nothing
//! helps any more.
//!
//! [`admit`] answers `ebb plan`: what the host has beyond its reserve, what it has promised
//! to VMs that still start and what its other processes used lately; then what other VMs could
//! give without harm (idle memory beyond working set, full buffer and recent peaks; what guests
//! have freed and the host still holds). [`last_resort`] ranks what an operator could
//! pause when a critical host finds nothing more to take. Ebb itself never pauses or
//! ends a VM.

use serde::{Deserialize, Serialize};

use crate::model::{Model, Pressure, Standing, VmModel};
use crate::plan::LastResort;
use crate::policy::allot::{Level, want};
use crate::policy::balloon::CALM_MS;
use crate::policy::limits::View;
use crate::policy::recycle::to_come_in;
use crate::policy::take::{base, brings_nothing, idle, priced};
use crate::state::{Memory, VmMemory};
use crate::units::Bytes;

/// What a VM needs beyond its RAM: QEMU, page tables, devices.
const OVERHEAD: Bytes = Bytes::mib(64);
/// And this share of it.
const OVERHEAD_SHARE: f64 = 0.02;
/// The assumed speed of a balloon that was not seen to move, bytes a second: a quarter of what
/// virtio-balloon reaches.
const USUAL_RATE: f64 = (256 << 20) as f64;
/// Steps and holds do not let a guest give more than this share of RAM a second.
const MOST_RATE: f64 = 0.10;
/// The time that a decision and the first step take, seconds.
const FIRST_S: f64 = 1.0;
/// Most VMs that the last resort names.
const NAMED: usize = 5;

/// What is to be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmissionRequest {
    pub memory: Bytes,
    pub count: u32,
}

/// What there is to answer with: a tick's model, boiled down.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Supply {
    /// Whether the host could be read.
    pub known: bool,
    /// What is left under the tightest limit.
    pub headroom: Bytes,
    pub reserve: Bytes,
    /// Promised to VMs that still start.
    pub promised: Bytes,
    /// What others than VMs used in the last half hour beyond what they use now.
    pub others: Bytes,
    /// What VMs needed in the last minute beyond what the host holds for them.
    pub needed: Bytes,
    /// Free swap.
    pub swap: Bytes,
    pub vms: Vec<VmSupply>,
}

impl Supply {
    /// What of its headroom is not for VMs to come.
    fn spoken_for(&self) -> Bytes {
        self.promised + self.others + self.needed + self.reserve
    }
}

/// What a VM could give without harm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VmSupply {
    pub name: String,
    /// Freed in the guest and still held: there in a second.
    pub free: Bytes,
    /// Idle: ballooned.
    pub idle: Bytes,
    /// How fast it follows, bytes a second.
    pub rate: f64,
    /// What it may still take: its ceiling less what the host holds for it.
    pub may_take: Bytes,
    /// Its price; those that pay most are asked first.
    pub price: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Admission {
    pub yes: bool,
    pub why: String,
    /// What they need, overhead included.
    pub need: Bytes,
    /// Of that, what the host has beyond its reserve.
    pub from_headroom: Bytes,
    /// Of that, what others give.
    pub from: Vec<Contribution>,
    /// What neither headroom nor other VMs can give.
    pub missing: Bytes,
    /// When all of it would be there, seconds.
    pub seconds: f64,
    pub worst_case: WorstCase,
}

/// What one VM would give.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Contribution {
    pub name: String,
    pub bytes: Bytes,
    /// Of that, freed already.
    pub free: Bytes,
    /// How long it takes, seconds.
    pub seconds: f64,
}

/// Every guest grows to its ceiling and uses all of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorstCase {
    /// What would not fit into DRAM.
    pub over: Bytes,
    /// What of it swap could hold.
    pub swap: Bytes,
    /// Whether nothing would be killed.
    pub survives: bool,
    pub why: String,
}

/// Boils a model down to what [`admit`] needs.
pub fn supply(model: &Model, memory: &Memory) -> Supply {
    let mut view = View::new(model);
    let model = view.under(model.common_limit());
    let (host, limit) = (&model.host, &model.host.shown);
    let of_vm = |vm: &VmModel| vm_supply(model, vm, memory.of(vm.id));
    let inside = || model.vms.iter().filter(|vm| !vm.outside);
    let needed = |vm: &VmModel| {
        let peak = memory.of(vm.id).recent.peak(model.at, CALM_MS);
        // What it was given lately and has not touched is promised to it.
        peak - vm.guest_held().unwrap_or(peak) - vm.outstanding
    };
    Supply {
        known: host.known,
        headroom: limit.headroom,
        reserve: limit.reserve,
        promised: limit.promised + limit.outstanding,
        others: memory.past(&limit.name).map_or(Bytes::ZERO, |past| past.others.highest())
            - model.others(),
        needed: inside().map(needed).sum(),
        swap: limit.swap_left,
        vms: inside().map(of_vm).collect(),
    }
}

fn vm_supply(model: &Model, vm: &VmModel, m: &VmMemory) -> VmSupply {
    let at = model.at;
    let host_side = match vm.in_pool {
        true => Bytes(u64::MAX),
        // Merged memory may have to be copied again.
        false => vm.unmerged().unwrap_or_default() + vm.swap.unwrap_or_default(),
    };
    let owed = vm.ceiling.max(vm.actual.unwrap_or_default());
    let mut supply = VmSupply {
        name: vm.name.clone(),
        rate: if m.rate >= 1.0 { m.rate } else { USUAL_RATE },
        may_take: owed - host_side,
        // What is to come if all must go.
        free: to_come_in(Pressure::Critical, vm, m),
        ..VmSupply::default()
    };
    // What its guest needed a moment ago and has freed it takes again.
    if let (Some(g), Some(held)) = (vm.guest.as_ref(), vm.guest_held()) {
        supply.free = supply.free.min(held - want(at, vm, g, m, Level::CALM));
    }
    let ready = vm.standing == Standing::Ready && vm.distress.is_empty();
    let gives = ready && brings_nothing(model, vm, m).is_none();
    if let (true, Some(actual), Some(g)) = (gives, vm.actual, vm.guest.as_ref()) {
        let base = base(m, actual);
        let idle = idle(at, base, want(at, vm, g, m, Level::CALM), g, m);
        let c = priced(vm, g, 0, (base, idle, idle));
        // Only what the host really holds brings it anything.
        supply.idle = idle.share(c.yields) - supply.free;
        supply.price = c.price;
        supply.rate = supply.rate.min(vm.ram.unwrap_or(base).0 as f64 * MOST_RATE).max(1.0);
    }
    supply
}

/// Whether these VMs fit as well, and what that would mean.
pub fn admit(supply: &Supply, request: &AdmissionRequest) -> Admission {
    let each = request.memory + OVERHEAD + request.memory.share(OVERHEAD_SHARE);
    let need = Bytes(each.0.saturating_mul(u64::from(request.count)));
    let free = supply.headroom - supply.spoken_for();
    let mut answer = Admission { need, from_headroom: need.min(free), ..Admission::default() };
    // What the host lacks itself, others give it first.
    let lacks =
        if request.count == 0 { Bytes::ZERO } else { supply.spoken_for() - supply.headroom };
    let mut left = need + lacks - answer.from_headroom;
    let mut vms: Vec<&VmSupply> = supply.vms.iter().collect();
    vms.sort_by(|a, b| b.price.total_cmp(&a.price).then_with(|| a.name.cmp(&b.name)));
    for vm in vms {
        let free = vm.free.min(left);
        let idle = vm.idle.min(left - free);
        let bytes = free + idle;
        if bytes < Bytes::mib(1) {
            continue;
        }
        left = left - bytes;
        let seconds = FIRST_S + idle.0 as f64 / vm.rate.max(1.0);
        answer.seconds = answer.seconds.max(seconds);
        answer.from.push(Contribution { name: vm.name.clone(), bytes, free, seconds });
    }
    // A rest of less than a MiB is the fault of rounding.
    answer.missing = if left < Bytes::mib(1) { Bytes::ZERO } else { left };
    answer.yes = supply.known && answer.missing == Bytes::ZERO;
    answer.why = why(supply, request, &answer);
    answer.worst_case = worst_case(supply, need);
    answer
}

fn why(supply: &Supply, request: &AdmissionRequest, a: &Admission) -> String {
    if !supply.known {
        return "the host's memory cannot be read".into();
    }
    let what = format!("{} × {} need {} with overhead", request.count, request.memory, a.need);
    let (keeps, has) = (supply.spoken_for(), supply.headroom);
    let has = match has < keeps {
        true => format!("lacks {} of", keeps - has),
        false => format!("has {} beyond", has - keeps),
    };
    let promised = supply.promised.if_any(|p| format!(" and the {p} promised to VMs that start"));
    let used = |o| format!(" and the {o} more that its other processes used in the last half hour");
    let others = supply.others.if_any(used);
    let lately = |n| format!(" and the {n} that VMs needed within the last minute and do not hold");
    let needed = supply.needed.if_any(lately);
    let has = format!("the host {has} its reserve{promised}{needed}{others}");
    let others: Bytes = a.from.iter().map(|g| g.bytes).sum();
    match (a.yes, a.from.len()) {
        (true, 0) => format!("{what}; {has}"),
        (true, n) => format!("{what}; {has}, {n} others give {others}"),
        (false, n) => {
            format!("{what}; {has}, {n} others could give {others}: {} too little", a.missing)
        }
    }
}

fn worst_case(supply: &Supply, need: Bytes) -> WorstCase {
    let taken: Bytes = supply.vms.iter().map(|v| v.may_take).sum();
    let over = (taken + need) - supply.headroom;
    let swap = over.min(supply.swap);
    let survives = over <= supply.swap;
    let why = if over == Bytes::ZERO {
        "if every guest used all that it may have, all would fit".to_string()
    } else if survives {
        format!("if every guest used all that it may have, {over} would go to swap")
    } else {
        format!(
            "if every guest used all that it may have, {over} would not fit and swap holds {}: the \
             host's OOM killer would choose",
            supply.swap
        )
    };
    WorstCase { over, swap, survives, why }
}

/// What an operator could do when a critical host lacks `missing` and nothing more
/// is to be had: VMs to pause (nothing is lost, and a paused VM can be paged out),
/// the lightest first, among equals the largest.
pub fn last_resort(model: &Model, missing: Bytes) -> Vec<LastResort> {
    if model.host.shown.state < Pressure::Critical || missing < Bytes::mib(1) {
        return Vec::new();
    }
    let lives = |v: &&VmModel| matches!(v.standing, Standing::Ready | Standing::GiveOnly(_));
    let runs = |v: &&VmModel| !v.outside && !v.paused && v.pinned.is_none() && lives(v);
    let mut vms: Vec<&VmModel> = model.vms.iter().filter(runs).collect();
    let size = |v: &VmModel| v.resident.unwrap_or_default();
    vms.sort_by(|a, b| {
        a.weight.total_cmp(&b.weight).then(size(b).cmp(&size(a))).then(a.id.cmp(&b.id))
    });
    let one = |v: &VmModel| LastResort {
        vm: v.id,
        name: v.name.clone(),
        frees: size(v),
        what: format!("pause it: weight {}, holds {}", v.weight, size(v)),
    };
    vms.into_iter().take(NAMED).map(one).collect()
}

pub fn words(plan: &[LastResort]) -> String {
    match plan.first() {
        None => "nothing is refused".into(),
        Some(l) => format!("no new VM fits; an operator could begin with {}: {}", l.name, l.what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::model::{GuestModel, MergeVm, Trust};
    use crate::sample::{AgentSample, HostSample, KsmStat, Meminfo, MergeSample, Sample, VmId};
    use crate::state::LimitMemory;
    use crate::units::{PAGE, Stamp};

    #[test]
    fn swap_counts_also_where_nothing_is_paged_out_on_purpose() {
        let (total, swap_total) = (Bytes::gib(64), Bytes::gib(10));
        let available = Bytes::gib(20);
        let swap_free = swap_total;
        let memory = Meminfo { total, available, swap_total, swap_free, ..Meminfo::default() };
        let host = HostSample { memory: Some(memory), ..HostSample::default() };
        let config = Config::parse("f", "[host]\noffload = false\n").unwrap();
        let model = Model::new(&config, &Sample { host, ..Sample::default() }, &Memory::default());
        assert_eq!(supply(&model, &Memory::default()).swap, Bytes::gib(9));
    }

    /// One that holds 6 GiB and needs 1.
    fn idle_vm() -> VmModel {
        let (need, available) = (Bytes::gib(1), Bytes::gib(7));
        let guest = GuestModel { need, working_set: need, available, ..GuestModel::default() };
        VmModel {
            ram: Some(Bytes::gib(8)),
            actual: Some(Bytes::gib(8)),
            ceiling: Bytes::gib(8),
            resident: Some(Bytes::gib(6)),
            weight: 1.0,
            trust: Trust { level: 1.0, ..Trust::default() },
            standing: Standing::Ready,
            guest: Some(guest),
            ..VmModel::default()
        }
    }

    fn supply_by(vm: &VmModel, m: &VmMemory) -> VmSupply {
        super::vm_supply(&Model { at: Stamp(100_000), ..Model::default() }, vm, m)
    }

    #[test]
    fn memory_that_no_balloon_brings_is_not_promised() {
        let (vm, m) = (idle_vm(), VmMemory::default());
        assert!(supply_by(&vm, &m).idle > Bytes::gib(3), "{:?}", supply_by(&vm, &m));
        let pinned = VmModel { pinned: Some("VFIO".into()), ..idle_vm() };
        assert_eq!(supply_by(&pinned, &m).idle, Bytes::ZERO);
        let mut nothing_came = VmMemory::default();
        nothing_came.yields.brings_nothing_until = Some(Stamp(200_000));
        assert_eq!(supply_by(&vm, &nothing_came).idle, Bytes::ZERO);
        let mut model = Model { vms: vec![pinned, idle_vm()], ..Model::default() };
        model.host.shown.state = Pressure::Critical;
        assert_eq!(last_resort(&model, Bytes::gib(1)).len(), 1, "to pause it frees nothing");
    }

    #[test]
    fn freed_pages_that_the_guest_needed_a_moment_ago_are_not_promised() {
        let agent = AgentSample::ready(5 << 10);
        let vm = VmModel { agent: Some(agent), ..idle_vm() };
        let mut m = VmMemory::default();
        let all = supply_by(&vm, &m).free;
        assert!(all > Bytes::gib(4), "{all}");
        m.recent.see(Stamp(90_000), Bytes::gib(5));
        let some = supply_by(&vm, &m).free;
        assert!(some <= Bytes::gib(1), "{some}: it takes 4 GiB of them again");
    }

    #[test]
    fn ram_in_a_pool_of_huge_pages_takes_nothing_of_the_host() {
        let vm = VmModel { in_pool: true, resident: Some(Bytes::mib(100)), ..idle_vm() };
        assert_eq!(supply_by(&vm, &VmMemory::default()).may_take, Bytes::ZERO);
        assert_eq!(vm.guest_held(), Some(Bytes::gib(8)));
    }

    #[test]
    fn merged_memory_may_have_to_be_copied_again() {
        let merging_pages = Some(Bytes::gib(5).0 / PAGE);
        // Zeros are in no count of resident memory.
        let stat = KsmStat { merging_pages, zero_pages: Some(1 << 18), ..KsmStat::default() };
        let sample = MergeSample { stat, ..MergeSample::default() };
        let merge = Some(MergeVm { sample, ..MergeVm::default() });
        let may_take =
            |merge| supply_by(&VmModel { merge, ..idle_vm() }, &VmMemory::default()).may_take;
        assert_eq!((may_take(None), may_take(merge)), (Bytes::gib(2), Bytes::gib(7)));
    }

    fn vm_supply(name: &str, free: u64, idle: u64, price: f64) -> VmSupply {
        VmSupply {
            name: name.into(),
            free: Bytes::mib(free),
            idle: Bytes::mib(idle),
            rate: (100 << 20) as f64,
            may_take: Bytes::gib(1),
            price,
        }
    }

    fn supply_of(headroom: u64, vms: Vec<VmSupply>) -> Supply {
        Supply {
            known: true,
            headroom: Bytes::mib(headroom),
            reserve: Bytes::mib(1000),
            swap: Bytes::gib(1),
            vms,
            ..Supply::default()
        }
    }

    fn ask(memory: u64, count: u32) -> AdmissionRequest {
        AdmissionRequest { memory: Bytes::mib(memory), count }
    }

    #[test]
    fn what_the_host_has_beyond_its_reserve_comes_first() {
        let a = admit(&supply_of(4000, vec![vm_supply("a", 0, 500, 1.0)]), &ask(1000, 2));
        assert!(a.yes && a.from.is_empty() && a.seconds == 0.0, "{a:?}");
        assert_eq!(a.need, Bytes::mib(2 * (1000 + 64 + 20)));
        assert_eq!(a.from_headroom, a.need);
    }

    #[test]
    fn then_those_that_pay_most_and_it_says_how_long() {
        let vms = vec![vm_supply("cheap", 0, 500, 1.0), vm_supply("dear", 100, 400, 2.0)];
        let a = admit(&supply_of(1500, vms), &ask(1000, 1));
        assert!(a.yes, "{}", a.why);
        assert_eq!(a.from_headroom, Bytes::mib(500));
        let from: Vec<_> = a.from.iter().map(|g| (g.name.as_str(), g.bytes.0 >> 20)).collect();
        assert_eq!(from, [("dear", 500), ("cheap", 84)]);
        assert_eq!(a.from[0].seconds, 5.0, "400 MiB at 100 MiB/s; what is free comes at once");
        assert_eq!(a.seconds, 5.0);
    }

    #[test]
    fn no_says_how_much_is_missing() {
        let a = admit(&supply_of(1500, vec![vm_supply("a", 0, 100, 1.0)]), &ask(1000, 3));
        assert!(!a.yes);
        assert_eq!(a.missing, Bytes::mib(3 * 1084 - 500 - 100));
        assert!(a.why.contains("2.6 GiB too little"), "{}", a.why);
        let unknown = Supply { known: false, ..supply_of(9000, vec![]) };
        assert!(!admit(&unknown, &ask(1, 1)).yes);
        assert!(admit(&supply_of(1500, vec![]), &ask(1000, 0)).yes, "none always fit");
    }

    #[test]
    fn vms_that_start_have_their_memory_promised() {
        let starting = Supply { promised: Bytes::mib(3000), ..supply_of(5000, vec![]) };
        assert!(!admit(&starting, &ask(1000, 1)).yes);
        assert!(admit(&supply_of(5000, vec![]), &ask(1000, 1)).yes);
    }

    #[test]
    fn what_other_processes_used_lately_is_theirs() {
        let supply = Supply { others: Bytes::mib(3000), ..supply_of(5000, vec![]) };
        let a = admit(&supply, &ask(1000, 1));
        assert!(!a.yes && a.why.contains("its other processes used"), "{}", a.why);
        let mut limit = LimitMemory::default();
        limit.others.see(Stamp(1_000), Bytes::gib(3));
        let memory = Memory { limits: vec![limit], ..Memory::default() };
        assert_eq!(super::supply(&Model::default(), &memory).others, Bytes::gib(3));
    }

    #[test]
    fn what_the_host_lacks_itself_is_not_promised_again() {
        let vms = || vec![vm_supply("a", 0, 1500, 1.0)];
        let a = admit(&supply_of(600, vms()), &ask(1000, 1));
        assert!(a.yes && a.why.contains("lacks 400 MiB of its reserve"), "{}", a.why);
        assert_eq!(a.from[0].bytes, Bytes::mib(1084 + 400));
        let a = admit(&supply_of(500, vms()), &ask(1000, 1));
        assert_eq!((a.yes, a.missing), (false, Bytes::mib(84)), "{}", a.why);
    }

    #[test]
    fn the_worst_case_is_that_every_guest_uses_its_all() {
        let vms = || vec![vm_supply("a", 0, 0, 1.0), vm_supply("b", 0, 0, 1.0)];
        let w = admit(&supply_of(9000, vms()), &ask(1000, 1)).worst_case;
        assert_eq!((w.over, w.survives), (Bytes::ZERO, true));
        let w = admit(&supply_of(3000, vms()), &ask(1000, 1)).worst_case;
        assert_eq!((w.over, w.survives), (Bytes::mib(132), true), "{}", w.why);
        let w = admit(&supply_of(3000, vms()), &ask(2000, 1)).worst_case;
        assert!(!w.survives && w.why.contains("OOM killer"), "{}", w.why);
    }

    #[test]
    fn the_last_resort_is_named_only_on_a_critical_host_lightest_first() {
        let vm = |pid, weight, mib| VmModel {
            id: VmId { pid, start: 1 },
            weight,
            resident: Some(Bytes::mib(mib)),
            standing: Standing::Ready,
            ..VmModel::default()
        };
        let mut model = Model {
            vms: vec![vm(1, 2.0, 900), vm(2, 1.0, 100), vm(3, 1.0, 300)],
            ..Model::default()
        };
        assert!(last_resort(&model, Bytes::gib(1)).is_empty());
        model.host.shown.state = Pressure::Critical;
        assert!(last_resort(&model, Bytes::ZERO).is_empty());
        let pids: Vec<u32> = last_resort(&model, Bytes::gib(1)).iter().map(|l| l.vm.pid).collect();
        assert_eq!(pids, [3, 2, 1]);
    }
}
