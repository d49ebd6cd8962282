//! What the logs with a state say: caches, counters, and what consumer groups keep.
//!
//! The judge keeps each replicated log whole, its given-up head included, as its leader of one
//! generation has it. What a compacted log says must be what the whole one says.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use bytes::Bytes;

use super::Judge;
use crate::proto::cache::record::{CounterRecord, ValueRecord};
use crate::sim::disk::{Journal, LogImage, LogKey, SimLog};

/// A log from `base` on: from 0, but for one that was read from a copy not made whole yet.
#[derive(Debug, Clone, Default)]
pub(super) struct Whole {
    base: u64,
    records: Vec<Bytes>,
}

/// How often the readings of logs did what they are for, by name.
pub type ReadingCounts = BTreeMap<&'static str, u64>;

/// What the judge knows of the logs with a state.
#[derive(Debug, Default)]
pub struct ReadingWatch {
    whole: BTreeMap<(LogKey, u64), Whole>,
    /// Where compacted logs begin, and how far one must reach to say everything.
    given_up: BTreeMap<(LogKey, u64), u64>,
    /// Copies made anew, and how far each must reach to be what was discarded for it.
    made_anew: BTreeMap<(usize, LogKey), u64>,
    /// Records that leaders wrote of their own accord, and where.
    pub(super) own: BTreeSet<(LogKey, u64, Bytes)>,
    pub counts: ReadingCounts,
}

/// What a log says of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    Value { bytes: Bytes, expires_at_ms: u64 },
    Sum(i64),
}

type Fold = BTreeMap<String, Said>;

impl Whole {
    /// Whether a log is the end of a part of this one.
    fn ends_in(&self, image: &LogImage) -> bool {
        let Some(from) = image.base.checked_sub(self.base) else {
            return false;
        };
        let from = from as usize;
        let to = from + image.records.len();
        self.records.get(from..to) == Some(&image.records[..])
    }
}

impl ReadingWatch {
    /// How far a log that begins at `base` must reach to say what it said before it was compacted.
    pub(super) fn stands_for_the_head(&self, key: LogKey, base: u64) -> Option<u64> {
        self.given_up.get(&(key, base)).copied()
    }
}

impl Judge {
    pub fn count(&mut self, what: &'static str, more: u64) {
        *self.readings.counts.entry(what).or_default() += more;
    }

    /// A broker begins to lead with this log: finds what it was before its head was given up.
    pub(super) fn begin_whole(&mut self, key: LogKey, generation: u64, image: &LogImage) {
        if key.log == SimLog::Stream {
            return;
        }
        let mut whole = Whole {
            base: image.base,
            records: image.records.clone(),
        };
        if image.base > 0 && !self.is_partial(key, image) {
            let known = self.readings.whole.range((key, 0)..=(key, generation));
            let before = known.rev().find(|(_, whole)| whole.ends_in(image));
            let Some((_, before)) = before else {
                let seen = format!("{key:?} at {generation} begins with what no leader wrote");
                return self.fail(32, seen);
            };
            let keep = (image.tail() - before.base) as usize;
            whole = Whole {
                base: before.base,
                records: before.records[..keep].to_vec(),
            };
        }
        self.readings.whole.insert((key, generation), whole);
    }

    pub(super) fn extend_whole(&mut self, key: LogKey, generation: u64, records: &[Bytes]) {
        if let Some(whole) = self.readings.whole.get_mut(&(key, generation)) {
            whole.records.extend_from_slice(records);
        }
    }

    pub(super) fn take_back_whole(&mut self, key: LogKey, generation: u64, count: usize) {
        if let Some(whole) = self.readings.whole.get_mut(&(key, generation)) {
            let keep = whole.records.len() - count;
            whole.records.truncate(keep);
        }
    }

    /// A companion begins at a cut and does not reach as far as what was written for it anew: a
    /// follower that was given a new copy and has not got all of it. The main log must never be
    /// led so; of a companion the protocol promises no more.
    pub(super) fn is_partial(&self, key: LogKey, image: &LogImage) -> bool {
        let held = self.readings.stands_for_the_head(key, image.base);
        !key.log.is_main() && held.is_some_and(|held| held > image.tail())
    }

    /// A follower's copy is placed anew.
    pub(super) fn on_placed(&mut self, node: usize, key: LogKey, generation: u64) {
        let leader = self.replication.leaders.get(&(key, generation));
        let tail = leader.map_or(0, super::replication::LeaderLog::tail);
        self.readings.made_anew.insert((node, key), tail);
    }

    /// Whether a copy is one that was made anew and has not got as far as its leader's log was.
    pub(super) fn is_being_copied(
        &self,
        node: usize,
        key: LogKey,
        image: Option<&LogImage>,
    ) -> bool {
        let must = self.readings.made_anew.get(&(node, key));
        let tail = image.map_or(0, LogImage::tail);
        must.is_some_and(|must| *must > tail) || image.is_some_and(|i| self.is_partial(key, i))
    }

    /// A broker opens a shard: what its logs say is what they said before anything was given up.
    pub(super) fn on_opened_reading(
        &mut self,
        node: usize,
        key: LogKey,
        generation: u64,
        journal: &Journal,
    ) {
        let Some(image) = journal.on_disk(key) else {
            return;
        };
        if key.log == SimLog::Stream {
            return;
        }
        if self.is_partial(key, image) {
            self.count("openings_of_partial_companions", 1);
            return;
        }
        let Some(whole) = self.readings.whole.get(&(key, generation)) else {
            return;
        };
        let (says, must) = (fold(key.log, &image.records), fold(key.log, &whole.records));
        self.count("openings_of_compacted_logs", u64::from(image.base > 0));
        if says != must {
            let seen = format!(
                "n{node} opens {key:?} ({}..{}) at {generation}: {}",
                image.base,
                image.tail(),
                difference(&says, &must)
            );
            self.fail(44, seen);
        }
    }

    /// A leader is about to delete an entry because its time is up: nothing younger may stand there,
    /// on disk or on its way.
    pub fn on_expire(
        &mut self,
        node: usize,
        key: LogKey,
        record: &Bytes,
        now_ms: u64,
        journal: &Journal,
    ) {
        let Ok(ValueRecord::Delete { key: of }) = ValueRecord::decode(record) else {
            return self.fail(43, format!("n{node} {key:?}: an expiry that is no delete"));
        };
        let records = journal
            .seen(key)
            .image()
            .map_or(&[][..], |image| &image.records);
        self.count("expiries", 1);
        let said = fold(key.log, records).remove(of);
        let is_due = matches!(
            said,
            Some(Said::Value { expires_at_ms, .. }) if expires_at_ms != 0 && expires_at_ms <= now_ms
        );
        if !is_due {
            self.fail(
                43,
                format!("n{node} {key:?} expires {of} at {now_ms}: {said:?}"),
            );
        }
    }

    /// A leader gives up the head of a log it has compacted.
    pub fn on_give_up(
        &mut self,
        node: usize,
        key: LogKey,
        (base, held): (u64, u64),
        journal: &Journal,
    ) {
        self.count("compactions", 1);
        self.readings.given_up.insert((key, base), held);
        let Some(image) = journal.seen(key).image() else {
            return self.fail(
                44,
                format!("n{node} gives up a part of {key:?}, which is empty"),
            );
        };
        let durable = journal.durable_tail(key);
        if !(image.base..=durable).contains(&base) || held > durable {
            let seen = format!("n{node} gives up {key:?} below {base}, held {held}: {durable}");
            return self.fail(44, seen);
        }
        self.says_the_same_from((node, key), image, base..durable);
    }

    /// A follower gives up what its leader has given up: its own copy must hold what says the same.
    pub fn on_shortened(&mut self, node: usize, key: LogKey, base: u64, journal: &Journal) {
        let held = self.readings.stands_for_the_head(key, base);
        let image = journal.seen(key).image();
        let reaches = |image: &&LogImage| held.is_some_and(|held| held <= image.tail());
        match (image.filter(reaches), held) {
            (Some(image), Some(held)) => {
                self.count("heads_given_up_by_followers", 1);
                self.says_the_same_from((node, key), image, base..held);
            }
            _ => {
                let tail = image.map_or(0, LogImage::tail);
                let seen = format!("n{node} begins {key:?} at {base}, held {held:?}, with {tail}");
                self.fail(44, seen);
            }
        }
    }

    fn says_the_same_from(
        &mut self,
        (node, key): (usize, LogKey),
        image: &LogImage,
        range: Range<u64>,
    ) {
        let from = |base: u64| {
            let (from, to) = (base - image.base, range.end - image.base);
            &image.records[from as usize..to as usize]
        };
        let (after, before) = (
            fold(key.log, from(range.start)),
            fold(key.log, from(image.base)),
        );
        if after != before {
            let seen = format!(
                "n{node} gives up {key:?} below {}: {}",
                range.start,
                difference(&after, &before)
            );
            self.fail(44, seen);
        }
    }
}

/// What records say, whether or not a value has expired: that is for readers to decide.
fn fold(log: SimLog, records: &[Bytes]) -> Fold {
    let mut fold = Fold::new();
    for record in records {
        match log {
            SimLog::Counters => fold_sum(&mut fold, record),
            SimLog::Cache | SimLog::GroupCursors | SimLog::GroupDeadLetters => {
                fold_value(&mut fold, record);
            }
            SimLog::Stream => {}
        }
    }
    fold
}

fn fold_value(fold: &mut Fold, record: &[u8]) {
    match ValueRecord::decode(record) {
        Ok(ValueRecord::Put {
            key,
            expires_at_ms,
            value,
        }) => {
            let bytes = Bytes::copy_from_slice(value);
            let said = Said::Value {
                bytes,
                expires_at_ms,
            };
            fold.insert(key.to_string(), said);
        }
        Ok(ValueRecord::Delete { key }) => drop(fold.remove(key)),
        Err(_) => {}
    }
}

fn fold_sum(fold: &mut Fold, record: &[u8]) {
    match CounterRecord::decode(record) {
        Ok(CounterRecord::Delta { key, delta }) => {
            let before = match fold.get(key) {
                Some(Said::Sum(sum)) => *sum,
                _ => 0,
            };
            fold.insert(key.to_string(), Said::Sum(before.wrapping_add(delta)));
        }
        Ok(CounterRecord::Checkpoint { key, sum }) => {
            fold.insert(key.to_string(), Said::Sum(sum));
        }
        Err(_) => {}
    }
}

/// The first key two folds say different things of.
fn difference(is: &Fold, must: &Fold) -> String {
    let keys: BTreeSet<&String> = is.keys().chain(must.keys()).collect();
    let differs = keys.into_iter().find(|key| is.get(*key) != must.get(*key));
    differs.map_or_else(String::new, |key| {
        format!("{key} is {:?}, was {:?}", is.get(key), must.get(key))
    })
}
