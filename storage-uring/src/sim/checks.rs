//! What must hold of the machine, the device and the plain logs together. Numbers are those of
//! `docs/simulation.md`.

use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;

use super::plain::{Op, PlainLog, Tracked};
use super::recovered::{interrupted, recover_since, Images, Recovered};
use super::rig::{found, Rig};
use super::synced::Synced;
use super::violation::holds;
use super::Rng;
use crate::format::group::GROUP_HEADER_BYTES;
use crate::machine::LogRef;
use crate::recovery::scan::Since;

/// What can be read of a log: its base, and the records from there on.
pub(super) type Contents = BTreeMap<u32, (u64, Vec<Bytes>)>;

/// The log with the durable first part of what is on its way, and the lowest offset a cut among that leaves.
fn readable(tracked: &Tracked, has_failed: bool) -> (PlainLog, Option<u64>) {
    // A part of a batch may be durable before the batch is acknowledged, and when the rest of it fails for good.
    let refused = tracked
        .refused
        .last()
        .filter(|ops| has_failed && !ops.is_empty());
    let begun: Vec<&Op> = match refused {
        Some(ops) => ops.iter().collect(),
        None => tracked.pending.iter().collect(),
    };
    let cuts = begun.iter().filter_map(|op| match op {
        Op::Truncate(to) => Some(*to),
        Op::Place(_) => Some(0),
        _ => None,
    });
    let lowest_cut = cuts.min();
    let begun = begun.iter().map_while(|op| match op {
        Op::Record(payload) => Some(Rc::clone(payload)),
        _ => None,
    });
    let mut log = tracked.acked.clone();
    log.records.extend(begun);
    (log, lowest_cut)
}

impl Rig {
    /// I1, I4, I8: every log begins and ends where what was asked of it says, after any step.
    pub fn check_bounds(&self) {
        if self.sim.machine.failure().is_some() {
            return;
        }
        for (shard, log) in &self.sim.logs {
            let view = self.sim.machine.view(*log);
            let Some(tracked) = self.logs.get(shard) else {
                continue;
            };
            let (tail, base) = (tracked.submitted.tail(), tracked.acked.base);
            holds!(
                4,
                view.tail >= tail,
                "shard {shard} fell from {tail} to {}",
                view.tail
            );
            holds!(
                1,
                view.tail == tail,
                "shard {shard} ends at {}, not {tail}",
                view.tail
            );
            holds!(
                4,
                view.base == base,
                "shard {shard} begins at {}, not {base}",
                view.base
            );
            let (accepted, is) = (tracked.acked.accepted, view.accepted);
            holds!(
                8,
                is == accepted,
                "shard {shard} accepted {accepted} and says {is}"
            );
        }
    }

    /// Checks one read against the plain model.
    pub fn check_read(&mut self, shard: u32, from: u64, max_bytes: usize) {
        let batch = self.read(shard, from, max_bytes);
        let tracked = &self.logs[&shard];
        let (readable, lowest_cut) = readable(tracked, self.sim.machine.failure().is_some());
        let acked = tracked.acked.tail().min(tracked.submitted.tail());
        let Some(batch) = batch else {
            let is_cut = lowest_cut.is_some();
            holds!(26, is_cut || from >= acked, "{from} of {acked} is not read");
            return;
        };
        let (count, next) = (batch.records.len(), batch.next_offset);
        let is_kept = lowest_cut.is_none_or(|cut| next <= cut);
        holds!(48, is_kept, "{from}..{next} is read and being cut");
        let is_next = count > 0 && batch.first_offset == from && next == from + count as u64;
        holds!(
            1,
            is_next,
            "{count} records from {} to {next} are read at {from}",
            batch.first_offset
        );
        let durable = self.sim.machine.durable_tail(self.sim.logs[&shard]);
        holds!(
            48,
            next <= durable,
            "{from}..{next} is read, {durable} is durable"
        );
        for (offset, record) in (from..).zip(&batch.records) {
            let is_it = readable.record(offset) == Some(&record[..]);
            holds!(
                5,
                is_it,
                "shard {shard}: another record is found at {offset}"
            );
        }
        let bytes: usize = batch.records.iter().map(Bytes::len).sum();
        assert!(
            count == 1 || bytes <= max_bytes,
            "{bytes} of {max_bytes} bytes"
        );
    }

    /// I1: what the index finds on the device, walked from each base to the durable tail, has no hole.
    pub(super) fn contents(&self) -> Contents {
        let walk = |(shard, log): (&u32, &LogRef)| {
            let machine = &self.sim.machine;
            let (base, durable) = (machine.base(*log), machine.durable_tail(*log));
            let mut records = Vec::new();
            let mut from = base;
            while from < durable {
                let Some(batch) = self.read_device(*shard, from, 10_000) else {
                    holds!(
                        5,
                        false,
                        "shard {shard}: nothing leads to {from} of {durable}"
                    );
                    break;
                };
                let next = from + batch.records.len() as u64;
                let is_next =
                    batch.first_offset == from && next > from && batch.next_offset == next;
                holds!(1, is_next, "shard {shard}: a hole at {from} of {durable}");
                records.extend(batch.records);
                from = next;
            }
            (*shard, (base, records))
        };
        self.sim.logs.iter().map(walk).collect()
    }

    /// I5: at any moment the index leads to each durable record, and to no other.
    pub fn check_indexes(&self) {
        for (shard, (base, records)) in self.contents() {
            let Some(tracked) = self.logs.get(&shard) else {
                continue;
            };
            let (readable, lowest_cut) = readable(tracked, self.sim.machine.failure().is_some());
            for (offset, record) in (base..).zip(&records) {
                let is_it = readable.record(offset) == Some(&record[..]);
                holds!(
                    5,
                    is_it,
                    "shard {shard}: the index finds another record at {offset}"
                );
            }
            let acked = tracked.acked.tail().min(tracked.submitted.tail());
            let read = base + records.len() as u64;
            let is_all = lowest_cut.is_some() || read >= acked;
            holds!(
                26,
                is_all,
                "shard {shard}: {acked} are acknowledged, {read} are there"
            );
        }
    }

    /// I4: nothing changed a record or its offset since `before`.
    pub(super) fn check_same_contents(&self, before: &Contents, what: &dyn std::fmt::Display) {
        for (shard, (base, records)) in self.contents() {
            let (old_base, old) = &before[&shard];
            let is_same = (base, &records) == (*old_base, old);
            holds!(
                4,
                is_same,
                "{what}: shard {shard} held {old_base} and {} records, and {base} and {} after it",
                old.len(),
                records.len()
            );
        }
    }

    /// Checks one state a power cut left behind, that a second start changes nothing, and that a recovery
    /// which is itself cut short comes to the same end.
    pub fn check_cut(&self, images: Images, rng: &mut Rng) -> Recovered {
        let first = recover_since(images.clone(), Since::epoch(self.epoch));
        holds!(
            6,
            first.damages == 0,
            "a power cut is not damage: {}",
            first.notes
        );
        let synced = Synced::of(&self.sim.durable, self.sim.machine.durable_group());
        synced.check_steps(&images, &first.steps, &self.undone);
        for (shard, tracked) in &self.logs {
            let (seed, records) = found(&first, *shard);
            holds!(6, seed.damage.is_none(), "{:?}", seed.damage);
            if !tracked.allows(&seed, records) {
                holds!(
                    tracked.broken_by(&seed, records, first.cuts > 0),
                    false,
                    "shard {shard}: {}..{} with {} records is no state between acknowledged {}..{} and submitted {}..{}: {}",
                    seed.base, seed.tail, records.len(), tracked.acked.base, tracked.acked.tail(),
                    tracked.submitted.base, tracked.submitted.tail(), first.notes
                );
            }
        }
        // What a later start finds was touched by the one before.
        let second = recover_since(first.images.clone(), Since::epoch(self.epoch + 1));
        let detail = || format!("{}, then {}", first.notes, second.notes);
        let nothing = (second.cuts, second.damages) == (0, 0);
        holds!(
            7,
            nothing,
            "a second start finds something to do: {}",
            detail()
        );
        let unchanged = second.images == first.images;
        holds!(7, unchanged, "a second start changes bytes: {}", detail());
        self.check_same_recovery(&first, &second, &detail);
        let interrupted = interrupted(images, &first.steps, rng);
        let after = recover_since(interrupted, Since::epoch(self.epoch + 1));
        let detail = || format!("{}, interrupted, then {}", first.notes, after.notes);
        holds!(
            7,
            after.damages == 0,
            "damage after an interruption: {}",
            detail()
        );
        self.check_same_recovery(&first, &after, &detail);
        first
    }

    fn check_same_recovery(&self, one: &Recovered, other: &Recovered, detail: &dyn Fn() -> String) {
        let ends = (one.end, one.next_group) == (other.end, other.next_group);
        holds!(7, ends, "the core log ends elsewhere: {}", detail());
        for shard in self.logs.keys() {
            let ((a, a_records), (b, b_records)) = (found(one, *shard), found(other, *shard));
            let same = (a.base, a.tail, &a.control) == (b.base, b.tail, &b.control);
            holds!(7, same, "shard {shard} is another: {}", detail());
            holds!(
                7,
                a_records == b_records,
                "shard {shard} reads otherwise: {}",
                detail()
            );
            holds!(
                7,
                a.index == b.index,
                "shard {shard} has another index: {}",
                detail()
            );
        }
    }

    /// After an orderly end: a recovery had nothing to cut, each log is all it was (I4), and what the machine
    /// had in memory is what a fresh replay gives (I5).
    pub(super) fn check_whole(&self, recovered: &Recovered) {
        self.check_indexes();
        // What was undone for want of space may lie behind the end, or even count, until another group follows.
        if self.logs.values().any(|log| !log.refused.is_empty()) {
            return;
        }
        holds!(
            6,
            recovered.cuts == 0,
            "all was synced: {}",
            recovered.notes
        );
        let contents = self.contents();
        for (shard, tracked) in &self.logs {
            let (seed, records) = found(recovered, *shard);
            holds!(
                26,
                tracked.is_answered(),
                "shard {shard} waits for an answer"
            );
            let is_whole = tracked.submitted.is(&seed, records);
            holds!(4, is_whole, "shard {shard} is another: {}", recovered.notes);
            let Some(log) = self.sim.logs.get(shard) else {
                continue;
            };
            let live = self.sim.machine.log_state(*log);
            let is_same = (live.base, live.durable_tail, &live.control)
                == (seed.base, seed.tail, &seed.control);
            holds!(
                5,
                is_same,
                "shard {shard}: bounds, generation or leaders are no replay's"
            );
            let (_, live_records) = &contents[shard];
            let is_same = live_records.iter().eq(records.iter());
            holds!(
                5,
                is_same,
                "shard {shard}: its index finds other records than a replay's"
            );
        }
    }

    /// I6: a synced group in which one bit has flipped is damage, and is not cut off as if it had never been
    /// written. Changes nothing.
    pub fn check_rotten(&self, rng: &mut Rng) -> bool {
        let synced = Synced::of(&self.sim.durable, self.sim.machine.durable_group());
        let newest = synced.groups.len() as u64 - u64::from(!synced.groups.is_empty());
        let nth = match rng.below(2) {
            0 => newest,
            _ => rng.below(newest + 1),
        };
        let Some(group) = synced.groups.values().nth(nth as usize) else {
            return false;
        };
        let body = group.header.used_len - GROUP_HEADER_BYTES as u64;
        if body == 0 {
            return false;
        }
        let at = group.position + GROUP_HEADER_BYTES as u64 + rng.below(body);
        let mut images = self.sim.durable.clone();
        let image = images.get_mut(&group.segment).expect("was looked at");
        let byte = &mut image[at as usize];
        // A sector that becomes zero may never have been written.
        *byte = match *byte ^ (1 << rng.below(8)) {
            0 => 0xff,
            flipped => flipped,
        };
        let recovered = recover_since(images.clone(), Since::epoch(self.epoch));
        let number = group.header.group;
        let notes = &recovered.notes;
        synced.check_steps(&images, &recovered.steps, &self.undone);
        holds!(
            6,
            recovered.damages > 0,
            "group {number} is damaged and nobody says so: {notes}"
        );
        for (shard, tracked) in &self.logs {
            // Nobody knows a log all of whose records lie where nothing can be read: the damage is told.
            let Some((seed, records)) = recovered.logs.get(shard) else {
                continue;
            };
            // Nor is it known that a log had written before, of which nothing is left but events of later starts.
            let is_unknown = records.is_empty() && group.header.boot_epoch < self.epoch;
            let is_sound = seed.damage.is_some() || is_unknown || tracked.allows(seed, records);
            holds!(
                6,
                is_sound,
                "shard {shard} is served with {}..{} and not whole ({}..{} acknowledged), group {number} is damaged: {notes}", seed.base, seed.tail, tracked.acked.base, tracked.acked.tail()
            );
        }
        true
    }
}
