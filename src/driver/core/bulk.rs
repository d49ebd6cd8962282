//! Batches that are too large to be appended in one turn.
//!
//! Copying 15 MiB into commit groups takes a turn of many milliseconds, and what comes behind it waits for all of
//! it to be written. So a large batch is appended in pieces, one a turn and only while little is queued for
//! the disk: small appends of other shards take their place between the pieces.
//!
//! Invariants:
//! * BULK-1: the records of a batch are consecutive: while pieces of one are missing nothing else is
//!   appended to its shard. What comes for the shard meanwhile waits behind it, whatever its size.
//! * BULK-2: shards with large batches take turns, a piece each.
//! * BULK-3: a batch of which a piece was appended is never answered as refused.
//! * INV-3 holds for each piece: ownership is checked when it is appended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage_uring::{AppendError, LogRef};

use crate::ids::{Generation, Offset, ShardId};
use crate::wire::internal::Payloads;

use super::append::AppendWaiter;
use super::message::{AppendRefusal, AppendResult, UnknownWrite};
use super::Core;

/// Payload bytes of a piece, give or take a record; a batch of no more is no large one.
const PIECE_BYTES: usize = 1 << 20;
/// A piece is appended after this long even if much is queued for the disk, so that many small appends cannot
/// keep a large one waiting for ever.
const LONGEST_WAIT: Duration = Duration::from_millis(5);

/// A batch that waits for its turn, or for its next piece.
pub(super) struct BulkAppend<W> {
    /// Tells it from others of its shard, before and behind it.
    id: u64,
    pub generation: Generation,
    pub payloads: Payloads,
    /// Records appended already.
    appended: usize,
    /// Where the first of them lies.
    first: Option<Offset>,
    /// A piece of it came to nothing.
    has_failed: bool,
    pub waiter: W,
}

/// The large batches of a core, by shard.
pub(super) struct BulkQueue<W> {
    queues: HashMap<Arc<ShardId>, VecDeque<BulkAppend<W>>>,
    /// Shards with something waiting; the next piece is of the first.
    turns: VecDeque<Arc<ShardId>>,
    next_id: u64,
    last_piece_at: Option<Instant>,
}

impl<W> Default for BulkQueue<W> {
    fn default() -> Self {
        Self {
            queues: HashMap::new(),
            turns: VecDeque::new(),
            next_id: 0,
            last_piece_at: None,
        }
    }
}

/// What to append next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    /// Records of the batch: from, and how many.
    from: usize,
    count: usize,
    is_last: bool,
}

impl<W> BulkQueue<W> {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Batches that wait, or of which pieces are missing.
    pub fn len(&self) -> usize {
        self.queues.values().map(VecDeque::len).sum()
    }

    /// Whether a batch for the shard has to wait here: it is large, or others of its shard wait.
    pub fn must_wait(&self, shard: &ShardId, payloads: &Payloads) -> bool {
        let is_large = payloads.total_payload_bytes() > PIECE_BYTES && payloads.len() > 1;
        is_large || (!self.turns.is_empty() && self.queues.contains_key(shard))
    }

    /// Puts a batch behind those of its shard.
    pub fn push(
        &mut self,
        shard: &Arc<ShardId>,
        generation: Generation,
        payloads: Payloads,
        waiter: W,
    ) {
        let id = self.next_id;
        self.next_id += 1;
        let queue = self.queues.entry(Arc::clone(shard)).or_insert_with(|| {
            self.turns.push_back(Arc::clone(shard));
            VecDeque::new()
        });
        queue.push_back(BulkAppend {
            id,
            generation,
            payloads,
            appended: 0,
            first: None,
            has_failed: false,
            waiter,
        });
    }

    /// The shard whose turn it is.
    fn next_shard(&self) -> Option<Arc<ShardId>> {
        self.turns.front().cloned()
    }

    /// The batch of a shard that is appended next.
    fn front(&mut self, shard: &ShardId) -> Option<&mut BulkAppend<W>> {
        self.queues.get_mut(shard)?.front_mut()
    }

    /// Takes the first batch of a shard out; the shard keeps its turn if it has more.
    fn take(&mut self, shard: &ShardId) -> Option<BulkAppend<W>> {
        let queue = self.queues.get_mut(shard)?;
        let taken = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(shard);
            self.turns.retain(|waiting| **waiting != *shard);
        }
        taken
    }

    /// The shard had its piece; the next one is another's.
    fn end_turn(&mut self, shard: &ShardId) {
        if self.turns.front().is_some_and(|first| **first == *shard) {
            self.turns.rotate_left(1);
        }
    }

    /// A piece of this batch came to nothing after it was queued: no more of it is appended.
    pub fn note_failed(&mut self, shard: &ShardId, id: u64) {
        if let Some(batch) = self.front(shard).filter(|batch| batch.id == id) {
            batch.has_failed = true;
        }
    }
}

impl<W> BulkAppend<W> {
    fn next_piece(&self) -> Piece {
        let from = self.appended;
        let (mut count, mut bytes) = (0, 0);
        for record in self.payloads.iter().skip(from) {
            // One record, whatever its size.
            if count > 0 && bytes + record.len() > PIECE_BYTES {
                break;
            }
            count += 1;
            bytes += record.len();
        }
        Piece {
            from,
            count,
            is_last: from + count == self.payloads.len(),
        }
    }

    fn records(&self, piece: Piece) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        self.payloads.iter().skip(piece.from).take(piece.count)
    }

    /// What a refusal of its next piece means for all of it.
    fn refused(&self, refusal: AppendRefusal) -> AppendResult {
        match self.first {
            None => AppendResult::Refused(refusal),
            Some(_) if refusal == AppendRefusal::Moved => {
                AppendResult::Unknown(UnknownWrite::LeadershipLost)
            }
            // A part of it lies in the log.
            Some(_) => AppendResult::StorageFailed,
        }
    }
}

/// Bytes on their way to the disk that let no further piece be appended: as many groups as are written at
/// once. A piece that waits behind them would make what is small wait for it as well.
pub(in crate::driver) fn bulk_queued_bytes(
    commits_in_flight: usize,
    commit_max_bytes: usize,
) -> usize {
    commits_in_flight * commit_max_bytes
}

/// Whether the next piece is appended: little is on its way to the disk, or none was for long.
fn piece_is_due(queued_bytes: usize, bound_bytes: usize, since_last: Option<Duration>) -> bool {
    queued_bytes < bound_bytes || since_last.is_none_or(|waited| waited >= LONGEST_WAIT)
}

impl Core {
    /// Appends the next piece of a large batch, while little is queued for the disk. True when another could be
    /// appended at once.
    pub(super) fn run_bulk(&mut self) -> bool {
        if !self.may_append_piece() {
            return false;
        }
        if let Some(shard) = self.bulk.next_shard() {
            self.bulk.last_piece_at = Some(self.now);
            self.append_piece(&shard);
            self.bulk.end_turn(&shard);
        }
        self.may_append_piece()
    }

    fn may_append_piece(&self) -> bool {
        if self.bulk.is_empty() {
            return false;
        }
        let last_piece = self.bulk.last_piece_at;
        let waited = last_piece.map(|at| self.now.saturating_duration_since(at));
        let queued_bytes = self.storage.queued_bytes();
        piece_is_due(queued_bytes, self.settings.bulk_queued_bytes, waited)
    }

    fn append_piece(&mut self, shard: &Arc<ShardId>) {
        let Some(batch) = self.bulk.front(shard) else {
            return;
        };
        let (generation, id) = (batch.generation, batch.id);
        if batch.has_failed {
            return self.end_bulk(shard, AppendRefusal::DiskFull);
        }
        if let Err(refusal) = self.check_leads(shard, generation) {
            return self.end_bulk(shard, refusal);
        }
        let log = match self.open_log(shard) {
            Ok(log) => log,
            Err(refusal) => return self.end_bulk(shard, refusal),
        };
        if let Err(refusal) = self.begin_or_refuse(log, generation) {
            return self.end_bulk(shard, refusal);
        }
        let Some(batch) = self.bulk.front(shard) else {
            return;
        };
        let piece = batch.next_piece();
        if piece.is_last {
            return self.append_last_piece(shard, log);
        }
        let token = self.appends.insert(AppendWaiter::Piece {
            shard: Arc::clone(shard),
            batch: id,
        });
        let records = batch.records(piece);
        let appended = self
            .storage
            .append(log, generation.0, self.wall_us, records, token);
        match appended {
            Ok(range) => {
                batch.first.get_or_insert(Offset(range.start));
                batch.appended += piece.count;
            }
            Err(error) => {
                self.appends.remove(token);
                // Room comes back; a batch that is half appended is not given up for the lack of it.
                if error != AppendError::Overloaded || batch.first.is_none() {
                    let refusal = self.refusal_of(&error);
                    self.end_bulk(shard, refusal);
                }
            }
        }
    }

    fn append_last_piece(&mut self, shard: &Arc<ShardId>, log: LogRef) {
        let Some(batch) = self.bulk.take(shard) else {
            return;
        };
        let piece = batch.next_piece();
        let records = batch.payloads.iter().skip(piece.from).take(piece.count);
        let waiter = match batch.first {
            None => batch.waiter,
            Some(first) => AppendWaiter::Rest {
                first,
                waiter: Box::new(batch.waiter),
            },
        };
        self.append_records(log, batch.generation, records, waiter);
    }

    /// Ends the first batch of a shard without its missing pieces.
    fn end_bulk(&mut self, shard: &ShardId, refusal: AppendRefusal) {
        if let Some(batch) = self.bulk.take(shard) {
            let result = batch.refused(refusal);
            self.finish_append(batch.waiter, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Namespace, ShardKind, StreamName, TenantId};

    fn shard(name: &str) -> Arc<ShardId> {
        Arc::new(ShardId {
            kind: ShardKind::Stream,
            tenant: TenantId::new("t").unwrap(),
            namespace: Namespace::new("n").unwrap(),
            name: StreamName::new(name).unwrap(),
            shard: 0,
        })
    }

    fn batch(records: usize, bytes: usize) -> Payloads {
        Payloads::from_slices(vec![vec![7; bytes]; records]).unwrap()
    }

    fn push(queue: &mut BulkQueue<u32>, shard: &Arc<ShardId>, payloads: Payloads, waiter: u32) {
        queue.push(shard, Generation(1), payloads, waiter);
    }

    /// Appends everything, as the core does; the order in which waiters' pieces came.
    fn drain(queue: &mut BulkQueue<u32>) -> Vec<(u32, usize, bool)> {
        let mut order = Vec::new();
        while let Some(shard) = queue.next_shard() {
            let front = queue.front(&shard).unwrap();
            let piece = front.next_piece();
            order.push((front.waiter, piece.count, piece.is_last));
            front.appended += piece.count;
            if piece.is_last {
                queue.take(&shard);
            }
            queue.end_turn(&shard);
        }
        order
    }

    #[test]
    fn only_what_is_large_or_follows_what_is_large_waits() {
        let mut queue = BulkQueue::default();
        let (a, b) = (shard("a"), shard("b"));
        assert!(!queue.must_wait(&a, &batch(4, 100)));
        // A single record cannot be divided.
        assert!(!queue.must_wait(&a, &batch(1, 3 << 20)));
        assert!(queue.must_wait(&a, &batch(3, 1 << 20)));
        push(&mut queue, &a, batch(3, 1 << 20), 1);
        assert!(queue.must_wait(&a, &batch(1, 1)));
        assert!(!queue.must_wait(&b, &batch(1, 1)));
        drain(&mut queue);
        assert!(!queue.must_wait(&a, &batch(1, 1)));
    }

    #[test]
    fn shards_take_turns_and_a_shard_keeps_its_order() {
        let mut queue = BulkQueue::default();
        let (a, b) = (shard("a"), shard("b"));
        push(&mut queue, &a, batch(3, 1 << 20), 1);
        push(&mut queue, &a, batch(2, 10), 2);
        push(&mut queue, &b, batch(2, 1 << 20), 3);
        assert_eq!(queue.len(), 3);
        assert_eq!(
            drain(&mut queue),
            [
                (1, 1, false),
                (3, 1, false),
                (1, 1, false),
                (3, 1, true),
                (1, 1, true),
                (2, 2, true),
            ]
        );
        assert!(queue.is_empty());
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn pieces_hold_as_many_records_as_fit_and_one_at_least() {
        let mut queue = BulkQueue::default();
        let a = shard("a");
        push(&mut queue, &a, batch(5, 400 << 10), 1);
        assert_eq!(
            drain(&mut queue),
            [(1, 2, false), (1, 2, false), (1, 1, true)]
        );
        push(&mut queue, &a, batch(2, 3 << 20), 2);
        assert_eq!(drain(&mut queue), [(2, 1, false), (2, 1, true)]);
    }

    #[test]
    fn a_batch_with_a_piece_in_the_log_is_never_refused() {
        let mut queue = BulkQueue::default();
        let a = shard("a");
        push(&mut queue, &a, batch(3, 1 << 20), 1);
        let refused = |queue: &mut BulkQueue<u32>, why| queue.front(&a).unwrap().refused(why);
        assert_eq!(
            refused(&mut queue, AppendRefusal::Moved),
            AppendResult::Refused(AppendRefusal::Moved)
        );
        queue.front(&a).unwrap().first = Some(Offset(7));
        assert_eq!(
            refused(&mut queue, AppendRefusal::Moved),
            AppendResult::Unknown(UnknownWrite::LeadershipLost)
        );
        for why in [AppendRefusal::DiskFull, AppendRefusal::Overloaded] {
            assert_eq!(refused(&mut queue, why), AppendResult::StorageFailed);
        }
    }

    /// What is small waits for the groups being written and never for a piece behind them; nor can many small
    /// ones keep a large one away.
    #[test]
    fn pieces_do_not_queue_up_behind_the_groups_being_written_nor_wait_for_ever() {
        const GROUP: usize = 1 << 20;
        for commits_in_flight in 1..=4 {
            let bound = bulk_queued_bytes(commits_in_flight, GROUP);
            let mut queued = 0;
            while piece_is_due(queued, bound, Some(Duration::ZERO)) {
                queued += GROUP;
            }
            // All that can be written is being written, and nothing waits.
            assert_eq!(queued, commits_in_flight * GROUP);
        }
        let almost = LONGEST_WAIT - Duration::from_micros(1);
        let bound = bulk_queued_bytes(2, GROUP);
        assert!(!piece_is_due(usize::MAX, bound, Some(almost)));
        assert!(piece_is_due(usize::MAX, bound, Some(LONGEST_WAIT)));
        assert!(piece_is_due(usize::MAX, bound, None));
    }

    #[test]
    fn a_failure_stops_the_batch_it_belongs_to_and_no_other() {
        let mut queue = BulkQueue::default();
        let a = shard("a");
        push(&mut queue, &a, batch(3, 1 << 20), 1);
        let id = queue.front(&a).unwrap().id;
        queue.note_failed(&a, id + 1);
        queue.note_failed(&shard("b"), id);
        assert!(!queue.front(&a).unwrap().has_failed);
        queue.note_failed(&a, id);
        assert!(queue.front(&a).unwrap().has_failed);
        push(&mut queue, &a, batch(1, 1), 2);
        queue.take(&a);
        queue.note_failed(&a, id);
        assert!(!queue.front(&a).unwrap().has_failed);
    }
}
