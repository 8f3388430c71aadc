//! What a clear host has to spare goes back to VMs that have less than they are owed.

use crate::model::{Model, VmModel};
use crate::plan::Reason;
use crate::policy::Verdict;
use crate::policy::take::{LEAST_STEP, STEP_MOST_MS, priced, round_up};
use crate::state::{Memory, VmMemory};
use crate::units::{Bytes, Stamp};

/// A VM that was shrunk is not grown for the host's sake for this time.
pub(super) const GROW_HOLD_MS: u64 = 60_000;
/// A paused VM that did not follow its last order to grow is told again after this.
const PAUSED_AGAIN_MS: u64 = 600_000;
/// What of its surplus a clear host gives back, a second.
const SURPLUS_RATE: f64 = 0.1;

/// Gives back what there is to spare under all limits above a VM: first to those that are tight,
/// then where the price of memory is lowest.
pub(super) fn grow(
    model: &Model,
    memory: &Memory,
    surplus: &[(usize, Bytes)],
    verdicts: &mut [Option<Verdict>],
) {
    let seconds = model.dt_ms.min(STEP_MOST_MS) as f64 / 1000.0;
    let given = |s: &Bytes| (*s).min(s.share(SURPLUS_RATE * seconds).max(LEAST_STEP));
    let mut left: Vec<Bytes> = surplus.iter().map(|(_, s)| given(s)).collect();
    if !model.host.known {
        return;
    }
    let limits = &model.host.limits;
    let is_above = |n: usize, vm: &VmModel| limits.get(surplus[n].0).is_none_or(|l| vm.is_below(l));
    let open = |i: &usize| verdicts[*i].is_none();
    let tight = |vm: &VmModel| vm.guest.is_some_and(|g| g.available < g.buffer);
    // As memory is taken where the price is highest, it is given where it is lowest.
    let price = |vm: &VmModel| match (vm.guest.as_ref(), vm.actual) {
        (Some(g), Some(actual)) => {
            let idle = actual - g.working_set;
            priced(vm, g, 0, (actual, idle, idle)).price
        }
        _ => f64::INFINITY,
    };
    let key = |i: usize| (!tight(&model.vms[i]), price(&model.vms[i]), model.vms[i].id, i);
    let mut order: Vec<_> = (0..model.vms.len()).filter(open).map(key).collect();
    order.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
    for (.., i) in order {
        let vm = &model.vms[i];
        let m = memory.of(vm.id);
        let Some(actual) = vm.actual else { continue };
        let set_by_others = m.ledger.left_ms(model.at).is_some();
        if set_by_others || vm.hands_off.is_some() {
            continue;
        }
        // One above its ceiling, since its guest needs that, is owed what it cannot be given.
        let room = vm.owed.min(vm.ceiling - actual);
        if room == Bytes::ZERO {
            continue;
        }
        let above = || (0..left.len()).filter(|n| is_above(*n, vm));
        let least = above().map(|n| left[n]).min().unwrap_or_default();
        let nothing = || limits.get(surplus[above().find(|n| surplus[*n].1 < LEAST_STEP)?].0);
        let lacks = || match nothing() {
            Some(l) => format!("{} has nothing to spare beside its reserve and a margin", l.name),
            None => "the host gives back slowly, others first".into(),
        };
        let hold = m.last_take.and_then(|t| GROW_HOLD_MS.checked_sub(model.at.since(t)));
        let owed = vm.owed;
        let why = if least < LEAST_STEP {
            Some(format!("{owed} ballooned; {}", lacks()))
        } else if m.order.is_some_and(|o| o.to > actual) {
            Some("it is still growing".into())
        } else if waits_to_run(model.at, vm, m) {
            Some(format!("{owed} ballooned; it grows when it runs again"))
        } else {
            hold.map(|hold| {
                let s = hold.div_ceil(1000);
                format!("{owed} ballooned; given back in {s} s at the earliest, unless it needs it")
            })
        };
        if let Some(why) = why {
            verdicts[i] = Some(Verdict::Hold(why));
            continue;
        }
        let given = room.min(least);
        let surplus = above().map(|n| surplus[n].1).min().unwrap_or_default();
        for n in above().collect::<Vec<_>>() {
            left[n] = left[n] - given;
        }
        let to = round_up(actual + given).min(vm.whole).min(vm.ceiling);
        verdicts[i] = Some(Verdict::Set { to, reason: Reason::HostClear { surplus } });
    }
}

/// Whether it is paused, and was told to grow not long ago.
fn waits_to_run(at: Stamp, vm: &VmModel, m: &VmMemory) -> bool {
    m.unmoved && vm.paused && m.last_give.is_some_and(|t| at.since(t) < PAUSED_AGAIN_MS)
}
