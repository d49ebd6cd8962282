//! Writes and flushes that fail, store too little, or find no space.

use super::{
    blank_segment, payload, recover, scan, settle_step, store_bytes, write_id, Pending, Rng, Sim,
    SimOptions,
};
use crate::error::{AppendError, CommitError};
use crate::format::SECTOR;
use crate::machine::{Action, CommitMachine, ControlEvent};
use crate::recovery::settle;

fn outcomes(sim: &mut Sim) -> Vec<Result<(), CommitError>> {
    sim.collect();
    std::mem::take(&mut sim.completions)
        .into_iter()
        .map(|done| done.result)
        .collect()
}

/// Ten appends to shard 0 wait, one failure, and then everything works again, for the device.
fn a_failure_is_final(flush: bool) {
    let options = SimOptions {
        flush,
        ..SimOptions::default()
    };
    let mut rng = Rng(21);
    let mut sim = Sim::new(options);
    sim.append(0, &[payload(&mut rng, 10)]);
    sim.settle();
    assert_eq!(outcomes(&mut sim), vec![Ok(())]);
    let before = sim.shadows[&0].submitted.clone();
    for _ in 0..10 {
        sim.append(0, &[payload(&mut rng, 100)]);
    }
    sim.pump();
    if flush {
        sim.finish(0);
        sim.pump();
        let at = sim
            .pending
            .iter()
            .position(|pending| !pending.written)
            .expect("a flush");
        let id = write_id(&sim.pending[at].action);
        sim.machine.on_flush_done(id, Err(libc::EIO), 0);
    } else {
        let Pending { action, .. } = sim.pending.remove(0);
        sim.machine
            .on_write_done(write_id(&action), &action, Err(libc::EIO), 0);
    }
    let failed = outcomes(&mut sim);
    assert_eq!(failed, vec![Err(CommitError::StorageFailed); 10]);
    assert!(sim.machine.failure().is_some());
    assert_eq!(sim.machine.stats().flush_failures, 1);
    let log = sim.log(0);
    for _ in 0..5 {
        let refused = sim.machine.append(log, 1, 0, 0, [&b"x"[..]].into_iter(), 1);
        assert_eq!(refused, Err(AppendError::Failed));
    }
    assert_eq!(sim.machine.durable_tail(log), 1, "the durable mark stays");
    assert!(
        sim.machine.read_recent(log, 0, 100).is_some(),
        "reads go on"
    );
    sim.pump();
    assert!(
        sim.machine.poll_action(1_000_000).is_none(),
        "nothing is written any more"
    );
    let recovered = recover(sim.durable.clone());
    assert_eq!(recovered.logs[&0].1[..1], before[..]);
    let mut again = Sim::start(options, recovered, 2);
    again.append(0, &[b"works".to_vec()]);
    again.settle();
    assert_eq!(outcomes(&mut again), vec![Ok(())]);
}

#[test]
fn a_failed_synced_write_is_final() {
    a_failure_is_final(false);
}

#[test]
fn a_failed_flush_is_final() {
    a_failure_is_final(true);
}

#[test]
fn a_short_write_is_completed() {
    let mut rng = Rng(22);
    let mut sim = Sim::new(SimOptions {
        max_transfer_bytes: 1 << 20,
        ..SimOptions::default()
    });
    sim.append(0, &[payload(&mut rng, 11_000)]);
    sim.pump();
    let Pending { action, .. } = sim.pending.remove(0);
    let id = write_id(&action);
    // 4096 of 12288 bytes, then 5000 of the rest, then nothing at all, then everything.
    for stored in [4096usize, 5000, 0] {
        let at = sim
            .pending
            .pop()
            .map_or(action_copy(&action), |pending| pending.action);
        sim.store(&at);
        sim.machine.on_write_done(id, &at, Ok(stored), 0);
        assert!(
            outcomes(&mut sim).is_empty(),
            "an unfinished write is never success"
        );
        sim.pump();
        assert_eq!(sim.pending.len(), 1);
    }
    sim.settle();
    assert_eq!(outcomes(&mut sim), vec![Ok(())]);
    assert_eq!(sim.machine.stats().short_writes, 3);
    assert_eq!(
        recover(sim.durable.clone()).logs[&0].1,
        sim.shadows[&0].submitted
    );
}

fn action_copy(action: &crate::machine::Action) -> crate::machine::Action {
    let crate::machine::Action::Write {
        id,
        segment,
        position,
        data,
    } = action
    else {
        panic!("a write")
    };
    crate::machine::Action::Write {
        id: *id,
        segment: *segment,
        position: *position,
        data: data.clone(),
    }
}

#[test]
fn a_write_without_space_is_undone_and_heals() {
    for errno in [libc::ENOSPC, libc::EDQUOT, 0] {
        let mut rng = Rng(23);
        let mut sim = Sim::new(SimOptions::default());
        sim.append(0, &[payload(&mut rng, 10)]);
        sim.settle();
        sim.append(0, &[payload(&mut rng, 100)]);
        sim.pump();
        sim.append(1, &[payload(&mut rng, 200)]);
        sim.append(0, &[payload(&mut rng, 300)]);
        sim.pump();
        assert_eq!(sim.pending.len(), 2);
        // The second group reaches the disk; the first finds no space.
        let later = sim.pending.remove(1);
        sim.store(&later.action);
        let mut first = sim.pending.remove(0).action;
        if errno == 0 {
            for _ in 0..3 {
                sim.machine
                    .on_write_done(write_id(&first), &first, Ok(0), 0);
                sim.pump();
                first = sim.pending.pop().expect("again").action;
            }
            sim.machine
                .on_write_done(write_id(&first), &first, Ok(0), 0);
        } else {
            sim.machine
                .on_write_done(write_id(&first), &first, Err(errno), 0);
        }
        // The answer of the undone second group comes late and means nothing.
        sim.machine
            .on_write_done(write_id(&later.action), &later.action, Ok(4096), 0);
        let answers = outcomes(&mut sim);
        assert_eq!(
            answers[1..],
            [Err(CommitError::DiskFull); 3],
            "after the one that worked"
        );
        let log = sim.log(0);
        assert_eq!(
            (sim.machine.tail(log), sim.machine.durable_tail(log)),
            (1, 1)
        );
        for shadow in sim.shadows.values_mut() {
            shadow.submitted.truncate(shadow.acknowledged as usize);
        }
        // A power cut now: the undone group behind the hole must not come back as more than submitted.
        assert_eq!(recover(sim.durable.clone()).damages, 0);
        sim.append(0, &[payload(&mut rng, 50)]);
        sim.append(1, &[payload(&mut rng, 60)]);
        sim.settle();
        let recovered = recover(sim.durable.clone());
        assert_eq!((recovered.damages, recovered.cuts), (0, 0));
        for (shard, shadow) in &sim.shadows {
            assert_eq!(recovered.logs[shard].1, shadow.submitted);
            assert_eq!(shadow.acknowledged, shadow.submitted.len() as u64);
        }
    }
}

/// No segment can be had, and nothing can be given back.
fn no_space(sim: &mut Sim) {
    sim.machine.on_no_space();
    for _ in 0..2 {
        assert!(sim.machine.reclaim(0, 0, usize::MAX));
    }
}

#[test]
fn without_segments_appends_are_refused_reads_go_on_and_it_heals() {
    let mut rng = Rng(24);
    let mut sim = Sim::new(SimOptions::default());
    sim.append(0, &[payload(&mut rng, 10)]);
    sim.settle();
    sim.give_segments = false;
    no_space(&mut sim);
    let log = sim.log(0);
    let mut taken = 0;
    let refused = loop {
        let record = payload(&mut rng, 8000);
        match sim
            .machine
            .append(log, 1, 0, 0, [record.as_slice()].into_iter(), 0)
        {
            Ok(_) => {
                taken += 1;
                sim.shadows
                    .get_mut(&0)
                    .expect("exists")
                    .submitted
                    .push(record);
                sim.settle();
                no_space(&mut sim);
            }
            Err(error) => break error,
        }
        assert!(taken < 100, "the space is bounded");
    };
    assert_eq!(refused, AppendError::DiskFull);
    assert!(taken > 5, "what fits is taken: {taken}");
    assert_eq!(sim.shadows[&0].acknowledged, taken + 1, "and made durable");
    assert!(sim.machine.read_recent(log, taken, 100_000).is_some());
    let recovered = recover(sim.durable.clone());
    assert_eq!(
        recovered.logs[&0].1, sim.shadows[&0].submitted,
        "a start while full works"
    );
    sim.give_segments = true;
    sim.pump();
    sim.append(0, &[payload(&mut rng, 8000)]);
    sim.settle();
    assert_eq!(sim.shadows[&0].acknowledged, taken + 2);
}

#[test]
fn what_waits_for_a_segment_that_never_comes_is_answered() {
    let mut rng = Rng(25);
    let mut sim = Sim::new(SimOptions::default());
    sim.append(0, &[payload(&mut rng, 10)]);
    sim.settle();
    sim.give_segments = false;
    // Not known to be full yet: the queue takes more than the segments hold.
    for _ in 0..30 {
        let record = payload(&mut rng, 8000);
        sim.append(0, &[record]);
    }
    sim.settle();
    assert!(sim.machine.waiting_for_segment_since_us().is_some());
    sim.completions.clear();
    sim.machine.on_no_space();
    sim.machine.give_up_waiting_for_space();
    let answers = outcomes(&mut sim);
    assert!(
        !answers.is_empty()
            && answers
                .iter()
                .all(|answer| *answer == Err(CommitError::DiskFull))
    );
    let log = sim.log(0);
    assert_eq!(sim.machine.tail(log), sim.machine.durable_tail(log));
    let durable = sim.machine.durable_tail(log);
    sim.shadows
        .get_mut(&0)
        .expect("exists")
        .submitted
        .truncate(durable as usize);
    sim.give_segments = true;
    sim.pump();
    sim.append(0, &[payload(&mut rng, 70)]);
    sim.settle();
    let recovered = recover(sim.durable.clone());
    assert_eq!((recovered.cuts, recovered.damages), (0, 0));
    assert_eq!(recovered.logs[&0].1, sim.shadows[&0].submitted);
}

#[test]
fn the_queue_is_bounded() {
    let mut sim = Sim::new(SimOptions::default());
    let log = sim.log(0);
    let record = vec![1u8; 30_000];
    let mut refused = false;
    for _ in 0..100 {
        match sim
            .machine
            .append(log, 1, 0, 0, [record.as_slice()].into_iter(), 0)
        {
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error, AppendError::Overloaded);
                refused = true;
                break;
            }
        }
    }
    assert!(refused);
    assert!(
        sim.machine.queued_bytes() <= (1 << 20) + 40_000,
        "{}",
        sim.machine.queued_bytes()
    );
    assert_eq!(sim.machine.stats().refused_overloaded, 1);
    let huge = vec![0u8; 64 * 1024];
    let refused = sim
        .machine
        .append(log, 1, 0, 0, [huge.as_slice()].into_iter(), 0);
    assert!(matches!(refused, Err(AppendError::TooLarge { .. })));
}

#[test]
fn an_idle_log_is_small() {
    let mut sim = Sim::new(SimOptions::default());
    sim.append(0, &[vec![1; 100]]);
    sim.settle();
    let state = std::mem::size_of::<crate::machine::logs::LogState>();
    assert!(state < 512, "{state} bytes");
}

#[test]
fn a_record_above_the_bound_of_a_read_comes_alone() {
    let mut sim = Sim::new(SimOptions::default());
    let log = sim.log(0);
    sim.append(0, &[b"a long one".to_vec(), Vec::new(), b"b".to_vec()]);
    sim.settle();
    let read = |bytes| sim.machine.read_recent(log, 0, bytes).expect("is there");
    assert_eq!(read(5).next_offset, 1, "as from the device");
    assert_eq!(read(10).next_offset, 2);
    assert_eq!(read(11).next_offset, 3);
}

/// The first pending write finds no space, after all.
fn refuse_first_write(sim: &mut Sim) -> Action {
    let Pending { action, .. } = sim.pending.remove(0);
    let id = write_id(&action);
    let machine = &mut sim.machine;
    machine.on_write_done(id, &action, Err(libc::ENOSPC), 0);
    action
}

#[test]
fn a_batch_behind_an_undone_truncation_is_not_stored_in_part() {
    let mut sim = Sim::new(SimOptions::default());
    let log = sim.log(0);
    let records = |count: usize| vec![&b"record"[..]; count].into_iter();
    sim.append(0, &vec![b"record".to_vec(); 4]);
    sim.settle();
    assert_eq!(outcomes(&mut sim), [Ok(())]);
    let machine = &mut sim.machine;
    let cut = machine.push_control(log, ControlEvent::Truncate(1), 7, 0, 0);
    assert_eq!(cut, Ok(()));
    // These are undone with it, though the tail they leave, 4, lies among their offsets.
    assert_eq!(machine.append(log, 1, 7, 0, records(6), 0), Ok(1..7));
    sim.pump();
    refuse_first_write(&mut sim);
    assert_eq!(outcomes(&mut sim), [Err(CommitError::DiskFull); 2]);
    assert_eq!(sim.machine.tail(log), 4);
}

#[test]
fn what_a_cut_on_its_way_drops_counts_as_durable_no_more() {
    let mut sim = Sim::new(SimOptions::default());
    let log = sim.log(0);
    let records = |text: &'static str, count: usize| vec![text.as_bytes(); count].into_iter();
    sim.append(0, &vec![b"old".to_vec(); 20]);
    sim.settle();
    sim.keeps_shadows = false;
    let machine = &mut sim.machine;
    assert_eq!(
        (machine.durable_tail(log), machine.is_settled(log)),
        (20, true)
    );
    // Cut at 10; what is appended behind it has the offsets of what is cut.
    let cut = |machine: &mut CommitMachine, event, count| {
        assert_eq!(machine.push_control(log, event, 7, 0, 0), Ok(()));
        assert!(!machine.is_settled(log), "{event:?}");
        (machine.append(log, 1, 7, 0, records("new", count), 0)).expect("is taken");
    };
    cut(machine, ControlEvent::Truncate(10), 5);
    let seen =
        |machine: &CommitMachine| (machine.durable_tail(log), machine.view(log).durable_tail);
    assert_eq!((machine.tail(log), seen(machine)), (15, (10, 10)));
    assert_eq!(machine.read_recent(log, 10, 100), None, "an old one");
    let read = machine.read_recent(log, 8, 100).expect("is there");
    assert_eq!((read.next_offset, &read.records[1][..]), (10, &b"old"[..]));
    // A second cut and the start of a flight between them change nothing of that.
    sim.pump();
    cut(&mut sim.machine, ControlEvent::Truncate(12), 3);
    assert_eq!(seen(&sim.machine), (10, 10));
    sim.finish(0);
    let first_is_durable = sim.machine.read_recent(log, 10, 100);
    assert_eq!(
        first_is_durable, None,
        "never above a cut while one is on its way"
    );
    sim.settle();
    assert_eq!(
        (seen(&sim.machine), sim.machine.is_settled(log)),
        ((15, 15), true)
    );
    let read = sim.machine.read_recent(log, 9, 100).expect("is there");
    assert_eq!(&read.records[1][..], b"new");
    // A new start drops everything; undone, it has dropped nothing.
    cut(&mut sim.machine, ControlEvent::Place(5), 9);
    assert_eq!((sim.machine.tail(log), seen(&sim.machine)), (14, (0, 0)));
    sim.pump();
    refuse_first_write(&mut sim);
    assert_eq!((sim.machine.tail(log), seen(&sim.machine)), (15, (15, 15)));
    assert!(sim.machine.is_settled(log));
}

#[test]
fn a_batch_whose_first_group_stays_is_stored_in_part() {
    let mut rng = Rng(27);
    let mut sim = Sim::new(SimOptions {
        max_transfer_bytes: 1 << 20,
        ..SimOptions::default()
    });
    let log = sim.log(0);
    let batch: Vec<_> = (0..4).map(|_| payload(&mut rng, 9000)).collect();
    sim.append(0, &batch);
    sim.pump();
    assert_eq!(sim.pending.len(), 2, "two groups are on their way");
    sim.pending.swap(0, 1);
    refuse_first_write(&mut sim);
    sim.settle();
    assert_eq!(outcomes(&mut sim), [Err(CommitError::StorageFailed)]);
    let kept = sim.machine.tail(log);
    assert!(0 < kept && kept < 4, "{kept}");
}

#[test]
fn an_interrupted_start_does_not_bring_back_what_was_undone() {
    let mut rng = Rng(28);
    let mut sim = Sim::new(SimOptions::default());
    sim.append(0, &[payload(&mut rng, 100)]);
    sim.settle();
    sim.append(0, &[payload(&mut rng, 200)]);
    sim.pump();
    // All of it is on the medium all the same.
    let undone = refuse_first_write(&mut sim);
    sim.store(&undone);
    if let Some(shadow) = sim.shadows.get_mut(&0) {
        shadow.submitted.pop();
    }
    sim.append(0, &[payload(&mut rng, 3000)]);
    sim.pump();
    // The next group goes to the next segment, and only its header gets there.
    let images = sim.cut_power(|_, sector| sector == 0);
    let whole = recover(images.clone());
    assert_eq!((whole.damages, whole.logs[&0].1.len()), (0, 1));
    let steps = settle::steps(&scan(&images));
    let mut left = images;
    for step in steps {
        settle_step(&mut left, step);
        let again = recover(left.clone());
        assert_eq!((again.end, again.next_group), (whole.end, whole.next_group));
        assert_eq!(again.logs[&0].1, whole.logs[&0].1, "after {step:?}");
    }
}

/// Two attempts at the same groups find no space for the first of them, of which all but the header is on the
/// medium; the others are whole. Then the power is cut during a third.
#[test]
fn groups_undone_twice_are_no_damage() {
    let mut rng = Rng(29);
    let mut sim = Sim::new(SimOptions {
        commits_in_flight: 4,
        max_transfer_bytes: 1 << 20,
        ..SimOptions::default()
    });
    sim.append(0, &[payload(&mut rng, 100)]);
    sim.settle();
    for _ in 0..2 {
        for _ in 0..4 {
            sim.append(0, &[payload(&mut rng, 3000)]);
            sim.pump();
        }
        assert_eq!(sim.pending.len(), 4);
        let undone = refuse_first_write(&mut sim);
        if let Action::Write {
            segment,
            position,
            data,
            ..
        } = &undone
        {
            let behind = position + SECTOR as u64;
            store_bytes(&mut sim.durable, *segment, behind, &data.as_ref()[SECTOR..]);
        }
        for Pending { action, .. } in std::mem::take(&mut sim.pending) {
            sim.store(&action);
        }
        sim.collect();
        let shadow = sim.shadows.get_mut(&0).expect("exists");
        shadow.submitted.truncate(1);
    }
    sim.append(0, &[payload(&mut rng, 3000)]);
    sim.pump();
    for keep in [false, true] {
        let recovered = recover(sim.cut_power(|_, _| keep));
        assert_eq!(recovered.damages, 0, "{}", recovered.notes);
        assert_eq!(recovered.logs[&0].1.len(), 1 + usize::from(keep));
    }
}

#[test]
fn a_segment_without_a_group_goes_with_the_garbage_behind_it() {
    let mut garbage = blank_segment(2, 1);
    garbage[4096..5000].fill(0x55);
    let mut short = blank_segment(1, 1);
    short.truncate(4096);
    for first in [short, blank_segment(1, 1)] {
        let images = [(1, first), (2, garbage.clone())].into();
        let once = recover(images);
        assert_eq!((once.damages, once.end, once.images.len()), (0, (0, 0), 0));
    }
}
