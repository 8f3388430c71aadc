//! Several limits on memory: each is decided under as if it were the host, those inside of others
//! first. What is found there counts for the outer ones; what an inner one does not let a VM have,
//! no outer one keeps for it.

use std::borrow::Cow;

use super::allot::{Allotment, Part, allot};
use crate::model::{Model, VmModel};
use crate::state::Memory;
use crate::units::Bytes;

/// A model that shows one limit after another. Where there is only the machine's, it is the model
/// itself.
pub(super) struct View<'a> {
    model: Cow<'a, Model>,
    /// The limits in the order in which they are decided under.
    pub order: Vec<usize>,
}

impl<'a> View<'a> {
    pub fn new(model: &'a Model) -> View<'a> {
        let order = match model.host.limits.len() {
            0 | 1 => vec![0],
            _ => model.inner_first(),
        };
        View { model: Cow::Borrowed(model), order }
    }

    /// The model under this limit.
    pub fn under(&mut self, limit: usize) -> &Model {
        if self.order.len() > 1 {
            self.model.to_mut().aim(limit);
        }
        &self.model
    }

    /// Who is to have how much under each limit, in their order.
    pub fn allot(&mut self, memory: &Memory, least: &[Bytes]) -> Vec<Allotment> {
        let mut most = vec![Bytes(u64::MAX); least.len()];
        let order = self.order.clone();
        let one = |limit| {
            let allotment = allot(self.under(limit), memory, least, &most);
            for (most, part) in most.iter_mut().zip(&allotment.parts) {
                *most = part.map_or(*most, |p| p.keeps.min(*most));
            }
            allotment
        };
        order.into_iter().map(one).collect()
    }

    /// Counts what several limits lack once: an outer one lacks only what those inside of it do
    /// not. `amounts` are in the order of the limits.
    pub fn total(&self, amounts: &[Bytes]) -> Bytes {
        let limits = &self.model.host.limits;
        let is_inside = |inner: usize, outer: usize| limits[inner].is_inside(&limits[outer]);
        let mut own: Vec<Bytes> = Vec::new();
        for (n, amount) in amounts.iter().enumerate() {
            let inside =
                |i: &usize| own[*i] > Bytes::ZERO && is_inside(self.order[*i], self.order[n]);
            let covered: Bytes = (0..n).filter(inside).map(|i| own[i]).sum();
            own.push(*amount - covered);
        }
        own.into_iter().sum()
    }
}

/// The part of each VM by the limit that leaves it least.
pub(super) fn least_parts(allots: &[Allotment]) -> Vec<Option<Part>> {
    let vms = allots.first().map_or(0, |allotment| allotment.parts.len());
    let least = |vm: usize| allots.iter().filter_map(|a| a.parts[vm]).reduce(|a, b| a.least(&b));
    (0..vms).map(least).collect()
}

/// Of something of each VM, in the model's order, what those below the limit shown have.
pub(super) fn below(model: &Model, of: &[Bytes]) -> Bytes {
    let inside = |(vm, b): (&VmModel, &Bytes)| (!vm.outside).then_some(*b);
    model.vms.iter().zip(of).filter_map(inside).sum()
}
