//! What a successor must hold to which a shard is moved while its leader lives (I36).

use std::collections::BTreeMap;

use super::Judge;
use crate::sim::disk::{Journal, LogImage, LogKey};

/// A planned move, as far as it concerns who leads next.
#[derive(Debug)]
struct Handover {
    /// What the leader held durably when it was first seen open with the successor as its one follower.
    noted: Vec<(LogKey, LogImage)>,
    /// The generation that was written for the successor, and the successor.
    switched: Option<(u64, usize)>,
}

/// The planned moves by their shards.
#[derive(Debug, Default)]
pub struct Handovers {
    by_shard: BTreeMap<usize, Handover>,
}

impl Judge {
    /// The operator sees the leader open, with its successor as its one follower, for the first time.
    pub fn on_narrowed(&mut self, shard: usize, keys: &[LogKey], journal: &Journal) {
        let noted = keys.iter().map(|key| (*key, durable_part(*key, journal)));
        let handover = Handover {
            noted: noted.collect(),
            switched: None,
        };
        self.handovers.by_shard.insert(shard, handover);
    }

    /// The operator names the successor: it must hold all that was noted, of the main log and of every companion.
    pub fn on_switch(&mut self, shard: usize, (generation, to): (u64, usize), journal: &Journal) {
        let Some(handover) = self.handovers.by_shard.get_mut(&shard) else {
            let seen = format!("shard {shard} goes to n{to}, and its leader was never seen open");
            return self.fail(36, seen);
        };
        handover.switched = Some((generation, to));
        let lacks = handover.noted.iter().find_map(|(key, noted)| {
            let lacks = first_lacked(noted, journal.on_disk(*key))?;
            Some((*key, lacks, noted.tail()))
        });
        self.count("handovers", 1);
        if let Some((key, offset, tail)) = lacks {
            let rank = journal.on_disk(key).map(LogImage::rank);
            let seen = format!(
                "{key:?} goes to n{to} at {generation}, which lacks {offset} of the {tail} noted; has {rank:?}"
            );
            self.fail(36, seen);
        }
    }

    /// Whether a broker opens a shard as the successor it was named in a planned move, and nothing else.
    pub(super) fn is_handed_over(&self, shard: usize, generation: u64, node: usize) -> bool {
        let handover = self.handovers.by_shard.get(&shard);
        handover.is_some_and(|handover| handover.switched == Some((generation, node)))
    }
}

/// A log on a disk, as far as its process may call it durable.
fn durable_part(key: LogKey, journal: &Journal) -> LogImage {
    let mut image = journal.on_disk(key).cloned().unwrap_or_default();
    let durable = journal.durable_tail(key).saturating_sub(image.base) as usize;
    image.records.truncate(durable);
    image
}

/// The first record of these that a copy does not have. What either of the two gave up is not missed.
fn first_lacked(noted: &LogImage, copy: Option<&LogImage>) -> Option<u64> {
    let base = copy.map_or(0, |copy| copy.base).max(noted.base);
    let mut offsets = base..noted.tail();
    offsets.find(|offset| copy.and_then(|copy| copy.record(*offset)) != noted.record(*offset))
}
