//! Refilling, and names that are taken.

use super::*;

#[test]
fn spares_are_made_from_few_left_until_all_are_there() {
    let mut refill = Refill::new(2, 4);
    let seen: Vec<bool> = [0, 3, 4, 3, 2, 1, 2, 3, 4, 3]
        .into_iter()
        .map(|have| refill.wants(have))
        .collect();
    assert_eq!(
        seen,
        [true, true, false, false, false, true, true, true, false, false]
    );
    let mut one = Refill::new(0, 1);
    assert!(one.wants(0) && !one.wants(1) && one.wants(0));
}

#[test]
fn a_name_that_is_taken_ends_the_core_log_and_keeps_what_has_it() {
    for first_seq in [1, SEQUENCE_MAX + 1] {
        let dir = tempfile::tempdir().expect("tempdir");
        let data_dir = Arc::new(DataDir::open(dir.path()).expect("opens"));
        let taken = data_dir.layout.segment(0, 1);
        std::fs::create_dir(data_dir.layout.core(0)).expect("mkdir");
        std::fs::write(&taken, b"records").expect("writes");
        let config = SegmentPoolConfig {
            data_dir: Arc::clone(&data_dir),
            core: 0,
            core_count: 1,
            segment_bytes: 1 << 20,
            spares: 1,
            refill_below: 1,
            zeros: SegmentZeros::WhileTheyPay,
            reserve_bytes: 0,
            low_space_bytes: 0,
            direct_io: false,
            o_dsync: false,
            first_seq,
            faults: None,
        };
        let (mut worker, _, events) = Worker::new(config, Box::new(|| {}));
        worker.add_spare();
        worker.pending = 1;
        worker.hand_over();
        assert!(matches!(events.try_recv(), Ok(PoolEvent::Failed(_))));
        assert!(worker.stopped);
        assert_eq!(std::fs::read(&taken).expect("reads"), b"records");
        let left = std::fs::read_dir(data_dir.layout.core(0)).expect("lists");
        assert_eq!(left.count(), 1);
    }
}
