//! Times to live, and what the index takes.

use super::*;

/// An owner with a wall clock of its own; the log is what survives it.
struct Owner {
    index: CacheIndex,
    clock: OwnerClock,
    log: Vec<Bytes>,
}

impl Owner {
    fn start(log: Vec<Bytes>) -> Self {
        let mut index = CacheIndex::new(0);
        for (offset, record) in (0..).zip(&log) {
            index.replay(offset, record).unwrap();
        }
        Self {
            index,
            clock: OwnerClock::default(),
            log,
        }
    }

    fn write(&mut self, write: StagedWrite, now_ms: u64) -> Applied {
        self.log.push(write.record().clone());
        let offset = self.log.len() as u64 - 1;
        self.index.applied(write, offset, now_ms)
    }

    fn put(&mut self, wall_ms: u64, key: &str, value: &'static [u8], ttl_ms: Option<u64>) {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        let ttl = ttl_ms.map(|ttl| NonZeroU64::new(ttl).unwrap());
        let write = self.index.stage_put(&Arc::from(key), value, ttl, now_ms);
        assert_eq!(self.write(write, now_ms), Applied::Stored);
    }

    fn get(&mut self, wall_ms: u64, key: &str) -> Option<Bytes> {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        match self.index.get(key, now_ms) {
            Lookup::Miss => None,
            Lookup::Value(value) => Some(value),
            Lookup::InLog { .. } => panic!("nothing was evicted"),
        }
    }

    fn sweep(&mut self, wall_ms: u64) -> usize {
        let now_ms = self.clock.at_wall_us(wall_ms.saturating_mul(1000));
        let writes = self.index.stage_expired(now_ms, usize::MAX);
        let count = writes.len();
        for write in writes {
            assert_eq!(self.write(write, now_ms), Applied::Expired);
        }
        count
    }
}

const T: u64 = 1_700_000_000_000;

/// The expiry is in the record: whoever leads the shard next applies the same absolute time,
/// whatever its clock was when the record arrived.
#[test]
fn a_time_to_live_is_decided_once() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"v", Some(2_000));
    assert_eq!(owner.get(T + 1_000, "k").as_deref(), Some(&b"v"[..]));
    let mut next = Owner::start(owner.log.clone());
    assert_eq!(next.get(T + 1_500, "k").as_deref(), Some(&b"v"[..]));
    assert_eq!(next.get(T + 1_999, "k").as_deref(), Some(&b"v"[..]));
    assert_eq!(next.get(T + 2_000, "k"), None);
    assert_eq!(next.get(T + 2_500, "k"), None);
    // A new leader whose clock is 30 s ahead expires early, by no more than that.
    let mut ahead = Owner::start(owner.log.clone());
    assert_eq!(ahead.get(T + 30_000, "k"), None);
    let mut restarted = Owner::start(next.log.clone());
    assert_eq!(restarted.get(T + 3_000, "k"), None);
}

#[test]
fn an_expired_value_stays_gone_when_the_clock_steps_back() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"v", Some(2_000));
    assert_eq!(owner.get(T + 2_500, "k"), None);
    assert_eq!(owner.get(T - 3_600_000, "k"), None, "within the process");
    // The sweep makes it last: after its delete no clock brings the value back.
    assert_eq!(owner.sweep(T - 3_600_000), 1);
    let mut restarted = Owner::start(owner.log.clone());
    assert_eq!(restarted.get(T - 3_600_000, "k"), None);
    assert_eq!(restarted.index.keys(), 0, "and its memory is free");
    // A live value is not dropped early by the step.
    owner.put(T - 3_600_000, "live", b"v", Some(1_000));
    assert!(owner.get(T - 3_600_000, "live").is_some());
    assert!(owner.get(T + 3_000, "live").is_some());
    assert_eq!(owner.get(T + 3_500, "live"), None);
}

#[test]
fn extreme_times_to_live_neither_panic_nor_wrap() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "one", b"1", Some(1));
    owner.put(T, "max", b"m", Some(u64::MAX));
    owner.put(T, "none", b"n", None);
    assert!(owner.get(T, "one").is_some());
    assert_eq!(owner.get(T + 1, "one"), None);
    let far = u64::MAX / 1_000;
    assert_eq!(owner.sweep(far), 1, "only the short one is over");
    let mut restarted = Owner::start(owner.log.clone());
    for owner in [&mut owner, &mut restarted] {
        assert_eq!(owner.get(far, "max").as_deref(), Some(&b"m"[..]));
        assert_eq!(owner.get(far, "none").as_deref(), Some(&b"n"[..]));
    }
}

#[test]
fn a_put_that_refreshes_an_expired_entry_wins_over_its_delete() {
    let mut owner = Owner::start(Vec::new());
    owner.put(T, "k", b"old", Some(10));
    let now = T + 20;
    let mut expired = owner.index.stage_expired(now, 10);
    let expire = expired.pop().unwrap();
    let key: Arc<str> = Arc::from("k");
    let refresh = owner.index.stage_put(&key, b"new", None, now);
    assert!(owner.index.stage_expired(now, 10).is_empty());
    assert_eq!(owner.write(expire, now), Applied::Expired);
    assert_eq!(owner.write(refresh, now), Applied::Stored);
    assert_eq!(owner.get(now, "k").as_deref(), Some(&b"new"[..]));
    let mut restarted = Owner::start(owner.log.clone());
    assert_eq!(restarted.get(now, "k").as_deref(), Some(&b"new"[..]));
}

/// A key written over and over must not grow the queues behind the index.
#[test]
fn memory_is_that_of_what_is_held() {
    let mut index = CacheIndex::new(0);
    let hot: Arc<str> = Arc::from("hot");
    for turn in 0..20_000 {
        let write = index.stage_put(&hot, b"value", NonZeroU64::new(1_000_000_000), T + turn);
        assert_eq!(index.applied(write, turn, T + turn), Applied::Stored);
    }
    assert_eq!(index.keys(), 1);
    assert!(index.queue_places() < 400, "{}", index.queue_places());
    assert!(index.index_bytes() < 200);
    assert!(index.resident_bytes() < 200);
}
