//! Segments the device does not read, or that cannot be opened.

use std::io;

use super::{payload, Rng, Sim, SimOptions, UUID};
use crate::error::StorageError;
use crate::format::freed::FreedRuns;
use crate::format::ALIGN;
use crate::recovery::scan::{scan_core, CoreScan, ScanOptions, Since};
use crate::recovery::{ImageSource, RecoveryProgress, SegmentInput, SegmentSource};

/// An image with a block that cannot be read, or that cannot be opened at all.
struct Faulty {
    image: ImageSource,
    bad_block: Option<u64>,
    open_error: Option<i32>,
}

impl SegmentSource for Faulty {
    fn len(&self) -> u64 {
        self.image.len()
    }

    fn open(&self) -> io::Result<()> {
        self.open_error
            .map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    fn read_at(&self, position: u64, out: &mut [u8]) -> io::Result<usize> {
        let end = position + out.len() as u64;
        if self
            .bad_block
            .is_some_and(|bad| (position..end).contains(&bad))
        {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.image.read_at(position, out)
    }
}

fn scan(
    sim: &Sim,
    bad_block: Option<(u64, u64)>,
    open_error: Option<(u64, i32)>,
) -> Result<CoreScan, StorageError> {
    let inputs = sim.durable.iter().map(|(seq, image)| SegmentInput {
        seq: *seq,
        file: format!("seg-{seq}").into(),
        source: Box::new(Faulty {
            image: ImageSource(image.clone()),
            bad_block: bad_block.filter(|(at, _)| at == seq).map(|(_, bad)| bad),
            open_error: open_error
                .filter(|(at, _)| at == seq)
                .map(|(_, errno)| errno),
        }),
    });
    let options = ScanOptions {
        since: Since::epoch(super::UNKNOWN_EPOCH),
        in_use: false,
        progress: &RecoveryProgress::default(),
    };
    scan_core(&UUID, 0, inputs.collect(), FreedRuns::default(), options)
}

fn written() -> Sim {
    let mut rng = Rng(31);
    let mut sim = Sim::new(SimOptions::default());
    for shard in [0, 1, 0, 1, 2, 2, 2, 0, 1, 2, 1, 0] {
        sim.append(shard, &[payload(&mut rng, 9000)]);
        sim.settle();
    }
    sim
}

#[test]
fn a_block_that_cannot_be_read_is_damage_wherever_it_is() {
    let sim = written();
    let whole = scan(&sim, None, None).expect("scans");
    assert_eq!((whole.damages.len(), whole.cuts.len()), (0, 0));
    let (end_segment, end) = whole.end;
    for segment in 1..=end_segment {
        let until = if segment == end_segment {
            end
        } else {
            sim.durable[&segment].len() as u64
        };
        let used = sim.durable[&segment]
            .iter()
            .rposition(|byte| *byte != 0)
            .expect("some") as u64;
        for block in (ALIGN as u64..until.min(used)).step_by(ALIGN) {
            let found = scan(&sim, Some((segment, block)), None).expect("scans");
            assert!(
                !found.damages.is_empty(),
                "block {block} of segment {segment}"
            );
            assert!(
                found.cuts.is_empty(),
                "nothing is removed for it: {:?}",
                found.cuts
            );
        }
    }
    // A header block says nothing a group does not say.
    let found = scan(&sim, Some((1, 0)), None).expect("scans");
    assert!(found.damages.is_empty(), "{:?}", found.damages);
}

#[test]
fn a_segment_that_cannot_be_opened_stops_the_start_and_is_no_damage() {
    let sim = written();
    for segment in sim.durable.keys() {
        for errno in [libc::EMFILE, libc::EACCES, libc::ENOENT] {
            let refused = scan(&sim, None, Some((*segment, errno))).map(|_| ());
            let Err(StorageError::Io { path, source, .. }) = refused else {
                panic!("segment {segment} counts as read: {refused:?}");
            };
            assert_eq!(source.raw_os_error(), Some(errno));
            assert_eq!(path.to_string_lossy(), format!("seg-{segment}"));
        }
    }
}
