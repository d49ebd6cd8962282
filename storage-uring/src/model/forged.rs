//! Groups whose checksums all match and that no build of this program wrote: what cannot be read is damage,
//! and no number in them stops a recovery or a machine.

use super::{payload, recover, write_id, Images, Rng, Sim, SimOptions, UUID};
use crate::format::body;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::ALIGN;
use crate::machine::{Control, ControlEvent, LogSeed};

/// Changes every extent of one kind with its header and body, and seals its group anew.
fn forge(
    images: &mut Images,
    kind: ExtentKind,
    change: impl Fn(&mut ExtentHeader, &mut [u8]),
) -> usize {
    let mut forged = 0;
    for image in images.values_mut() {
        let mut at = ALIGN;
        while let Ok(header) = GroupHeader::decode(&UUID, &image[at.min(image.len())..]) {
            let group = &mut image[at..at + header.total_len as usize];
            let mut extent_at = GROUP_HEADER_BYTES;
            for _ in 0..header.extents {
                let mut extent = ExtentHeader::decode(&group[extent_at..]).expect("an extent");
                let (from, to) = (
                    extent_at + extent.records_at(),
                    extent_at + extent.total_len(),
                );
                if extent.kind == kind {
                    change(&mut extent, &mut group[from..to]);
                    extent.encode(&mut group[extent_at..]);
                    forged += 1;
                }
                extent_at = to;
            }
            header.seal(&UUID, group);
            at += header.total_len as usize;
        }
    }
    forged
}

#[test]
fn an_event_that_cannot_be_read_in_a_good_group_is_damage() {
    let mut rng = Rng(61);
    let mut sim = Sim::new(SimOptions::default());
    let log = sim.log(0);
    sim.append(0, &[payload(&mut rng, 100)]);
    sim.append(1, &[payload(&mut rng, 100)]);
    let begin = ControlEvent::Begin {
        generation: 4,
        leader: "broker-1",
    };
    assert_eq!(sim.machine.push_control(log, begin, 7, 0, 99), Ok(()));
    sim.settle();
    sim.append(0, &[payload(&mut rng, 100)]);
    sim.append(1, &[payload(&mut rng, 100)]);
    sim.settle();
    let mut images = sim.durable.clone();
    let not_text = |header: &mut ExtentHeader, bytes: &mut [u8]| {
        bytes[0] = 0xff;
        body::seal(bytes, header.log, header.first_offset);
    };
    assert_eq!(forge(&mut images, ExtentKind::Begin, not_text), 1);
    for _ in 0..2 {
        let recovered = recover(images.clone());
        assert_eq!(
            (recovered.damages, recovered.cuts),
            (1, 0),
            "{}",
            recovered.notes
        );
        assert!(
            recovered.notes.contains("t/n/s"),
            "its log is named: {}",
            recovered.notes
        );
        assert!(recovered.logs[&0].0.damage.is_some());
        let (seed, records) = &recovered.logs[&1];
        assert_eq!((&seed.damage, records.len()), (&None, 2));
        images = recovered.images;
    }
}

#[test]
fn the_last_number_an_event_can_have_is_no_end() {
    let mut sim = Sim::new(SimOptions::default());
    let seed = LogSeed {
        control: Control {
            changes: u32::MAX,
            ..Control::default()
        },
        ..LogSeed::default()
    };
    let log = sim
        .machine
        .add_log(&super::name(0), seed)
        .expect("a new log");
    sim.logs.insert(0, log);
    let accept = |sim: &mut Sim, generation| {
        let event = ControlEvent::Accept(generation);
        assert_eq!(sim.machine.push_control(log, event, 7, 0, 99), Ok(()));
    };
    // Undone, it leaves the number as it was.
    accept(&mut sim, 3);
    sim.pump();
    let action = sim.pending.remove(0).action;
    let id = write_id(&action);
    sim.machine.on_write_done(id, &action, Err(libc::ENOSPC), 0);
    assert_eq!(sim.machine.log_state(log).changes, u32::MAX);
    for generation in [4, 5] {
        accept(&mut sim, generation);
        sim.settle();
    }
    assert_eq!(sim.machine.log_state(log).changes, 2);
}

#[test]
fn numbers_at_their_limits_are_refused_and_stop_nothing() {
    let mut rng = Rng(62);
    let mut sim = Sim::new(SimOptions::default());
    for shard in [0, 1, 0, 1] {
        sim.append(shard, &[payload(&mut rng, 100)]);
        sim.settle();
    }
    let far = |header: &mut ExtentHeader, _: &mut [u8]| {
        header.changes = u32::MAX;
        header.generation = u64::MAX;
        header.time_us = u64::MAX;
    };
    let mut images = sim.durable.clone();
    assert_eq!(forge(&mut images, ExtentKind::Records, far), 4);
    let recovered = recover(images);
    assert!(recovered
        .logs
        .values()
        .all(|(seed, _)| seed.damage.is_some()));
    let mut images = sim.durable.clone();
    let group = &mut images.get_mut(&1).expect("exists")[ALIGN..];
    let header = GroupHeader::decode(&UUID, group).expect("a group");
    let last = GroupHeader {
        group: u64::MAX,
        ..header
    };
    last.seal(&UUID, group);
    assert!(
        GroupHeader::decode(&UUID, group).is_err(),
        "no number follows it"
    );
    recover(images);
}
