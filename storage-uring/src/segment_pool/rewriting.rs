//! Rewriting a segment: the new file is written beside the old one, synced, read back, and takes its name.
//!
//! A group is read at a time, and requests are served between them. Commits have half of the device, and a
//! segment that somebody waits for comes first. What is left of an attempt that failed is removed, by the next
//! start at the latest.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{free_bytes, NameFault, PoolEvent, RewrittenSegment, Worker, TICK};
use crate::error::StorageError;
use crate::faults::FaultOp;
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::recovery::{FileSource, Window};
use crate::rewrite::{read_back, RewriteFault, RewritePlan, RewriteTotals, Rewriter, RewrittenMap};
use crate::slab::SlabWriter;

/// Free space a rewriting leaves: it may use what is kept from segments, because it gives back more than it
/// takes, but not the last of the file system.
const FREE_BYTES_LEFT: u64 = 256 << 10;

/// Why an attempt came to nothing.
enum Fault {
    /// The segment, or what is needed of it.
    Segment(RewriteFault),
    /// Something else has to be done first, or the thread ends.
    Interrupted,
    Io(io::Error),
    /// It is not known which of the two files survives a power cut. Both are good, but what comes later may
    /// build on the new one.
    Directory(io::Error),
}

impl From<RewriteFault> for Fault {
    fn from(fault: RewriteFault) -> Self {
        Self::Segment(fault)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Worker {
    /// The segment to rewrite now. While spares are short they come first, one before each rewriting, unless
    /// there is no space for them.
    pub(super) fn next_rewrite(&mut self) -> Option<Box<RewritePlan>> {
        let is_short = self.has_to_make_spares() && self.can_make_spares();
        let is_its_turn = self.has_made_spare && self.pending == 0 && !self.spares.is_empty();
        let has_time = !self.stopped && (!is_short || is_its_turn);
        let plan = self.rewrite.take_if(|_| has_time)?;
        self.has_made_spare = false;
        Some(plan)
    }

    /// A file that was given back meanwhile is space, too.
    fn can_make_spares(&self) -> bool {
        !self.gauges.no_space.load(Ordering::Relaxed) || !self.used.is_empty()
    }

    fn is_waited_for(&self) -> bool {
        self.pending > 0 && self.spares.is_empty() && self.can_make_spares()
    }

    /// Whoever waits for a segment hears as often as ever that there is no space.
    fn tell_no_space(&mut self, told: &mut Option<Instant>) {
        if told.is_some_and(|told| told.elapsed() < TICK) {
            return;
        }
        *told = Some(Instant::now());
        self.look_at_space();
        if self.pending > 0 && self.spares.is_empty() {
            self.tell(PoolEvent::NoSpace);
        }
    }

    /// The core has turned to the new file: the old one is closed here, a moment later, because closing it for
    /// the last time gives its space back, which takes time.
    pub(super) fn close_replaced(&mut self) {
        let is_due = |due: &Instant| *due <= Instant::now();
        let (_, due) = &self.replaced;
        if due.as_ref().is_some_and(is_due) {
            self.replaced = (None, None);
        }
    }

    pub(super) fn rewrite(&mut self, plan: &RewritePlan) {
        let (core, seq) = (self.config.core, plan.segment);
        let layout = &self.config.data_dir.layout;
        let (old, new) = (layout.segment(core, seq), layout.rewriting(core, seq));
        let rewritten = self.write_and_replace(plan, &old, &new);
        let fault = match rewritten {
            Ok(rewritten) => return self.tell(PoolEvent::Rewritten(Box::new(rewritten))),
            Err(fault) => fault,
        };
        if !matches!(fault, Fault::Directory(_)) {
            // The next start removes it, too.
            drop(std::fs::remove_file(&new));
        }
        if !matches!(
            fault,
            Fault::Interrupted | Fault::Segment(RewriteFault::NotWorth | RewriteFault::NoRoom)
        ) {
            self.gauges.rewrite_failures.fetch_add(1, Ordering::Relaxed);
        }
        let fault = match fault {
            Fault::Segment(fault) => {
                if let RewriteFault::Source(reason) = fault {
                    tracing::error!(
                        core,
                        segment = seq,
                        reason,
                        "a segment is damaged and is not rewritten"
                    );
                }
                Some(fault)
            }
            Fault::Interrupted => None,
            Fault::Io(error) => {
                tracing::warn!(core, segment = seq, %error, "a segment cannot be rewritten yet");
                None
            }
            Fault::Directory(error) => {
                let reason = format!("the segment directory cannot be synced: {error}");
                self.stopped = true;
                return self.tell(PoolEvent::Failed(reason));
            }
        };
        self.tell(PoolEvent::NotRewritten { seq, fault });
    }

    fn write_and_replace(
        &mut self,
        plan: &RewritePlan,
        old: &Path,
        new: &Path,
    ) -> Result<RewrittenSegment, Fault> {
        // What an earlier attempt left.
        drop(std::fs::remove_file(new));
        self.check_room(plan.expected_bytes)?;
        let replaced = File::open(old)?;
        let file = self.open(new, true, false)?;
        let written = self.write_rewritten(plan, old, &file)?;
        self.check_fault(FaultOp::SyncRewritten)?;
        file.sync_all()?;
        let (map, totals) = self.read_back(plan, new)?;
        if totals != written {
            return Err(not_the_same());
        }
        std::fs::rename(new, old)?;
        self.replaced = (Some(replaced), None);
        self.sync_directory().map_err(|fault| match fault {
            NameFault::File(error) | NameFault::Taken(error) | NameFault::Directory(error) => {
                Fault::Directory(error)
            }
        })?;
        Ok(RewrittenSegment {
            seq: plan.segment,
            file,
            map,
            totals,
        })
    }

    fn write_rewritten(
        &mut self,
        plan: &RewritePlan,
        old: &Path,
        file: &File,
    ) -> Result<RewriteTotals, Fault> {
        let uuid = self.config.data_dir.meta.uuid;
        let mut source = Window::new(Box::new(FileSource::new(old)?));
        let rewriter = Rewriter::new(uuid, self.config.core, plan.clone(), &mut source);
        opened(&mut source, old)?;
        let mut rewriter = rewriter?;
        write_aligned(file, 0, &rewriter.first_block())?;
        let mut position = SEGMENT_HEADER_BYTES;
        // Whoever waited before hears of it with the first group.
        let mut told = None;
        loop {
            let started = Instant::now();
            let commits = self.gauges.commits.load(Ordering::Relaxed);
            let read = rewriter.step(&mut source);
            opened(&mut source, old)?;
            if read? == 0 {
                return Ok(rewriter.into_totals());
            }
            for frame in rewriter.take_frames() {
                self.check_room(frame.len() as u64)?;
                write_aligned(file, position, &frame)?;
                position += frame.len() as u64;
            }
            self.serve();
            self.tell_no_space(&mut told);
            if self.stopped || self.is_waited_for() {
                return Err(Fault::Interrupted);
            }
            let is_idle = commits == self.gauges.commits.load(Ordering::Relaxed);
            let is_urgent = self.gauges.no_space.load(Ordering::Relaxed);
            if !is_idle && !is_urgent {
                // Leave the device to the commits half of the time.
                std::thread::sleep(started.elapsed());
            }
        }
    }

    fn check_room(&self, bytes: u64) -> Result<(), Fault> {
        let free = free_bytes(self.config.data_dir.layout.dir())?;
        match free < bytes.saturating_add(FREE_BYTES_LEFT) {
            true => Err(Fault::Segment(RewriteFault::NoRoom)),
            false => Ok(()),
        }
    }

    fn read_back(
        &self,
        plan: &RewritePlan,
        new: &Path,
    ) -> Result<(RewrittenMap, RewriteTotals), Fault> {
        let mut window = Window::new(Box::new(FileSource::new(new)?));
        let found = read_back(self.config.data_dir.meta.uuid, plan, &mut window);
        opened(&mut window, new)?;
        found.ok_or_else(not_the_same)
    }
}

fn not_the_same() -> Fault {
    Fault::Io(io::Error::other(
        "the new file does not read back as it was written",
    ))
}

/// What could not be opened says nothing about its bytes.
fn opened(window: &mut Window, file: &Path) -> Result<(), Fault> {
    match window.check(file) {
        Ok(()) => Ok(()),
        Err(StorageError::Io { source, .. }) => Err(Fault::Io(source)),
        Err(error) => Err(Fault::Io(io::Error::other(error.to_string()))),
    }
}

/// Writes whole blocks from memory that O_DIRECT takes.
fn write_aligned(file: &File, position: u64, bytes: &[u8]) -> io::Result<()> {
    let mut writer = SlabWriter::new(bytes.len());
    let out = &mut writer.tail()[..bytes.len()];
    out.copy_from_slice(bytes);
    file.write_all_at(out, position)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{PoolEvent, Request, SegmentPoolConfig};
    use super::*;
    use crate::config::SegmentZeros;
    use crate::datadir::DataDir;
    use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
    use crate::format::rewritten::Rewritten;
    use crate::format::segment::SegmentHeader;

    /// A thread's worker without the thread, a segment with one group, and a plan to rewrite it.
    struct Bench {
        worker: Worker,
        events: crossbeam_channel::Receiver<PoolEvent>,
        plan: Box<RewritePlan>,
        _dir: tempfile::TempDir,
    }

    fn bench() -> Bench {
        let dir = tempfile::tempdir().expect("a directory");
        let data_dir = Arc::new(DataDir::open(dir.path()).expect("opens"));
        let meta = data_dir.meta;
        let header = SegmentHeader {
            uuid: meta.uuid,
            core: 0,
            core_count: 1,
            seq: 1,
            boot_epoch: meta.boot_epoch,
            segment_bytes: 1 << 20,
            rewritten: None,
        };
        let mut group = vec![0; 4096];
        let sealed = GroupHeader {
            total_len: 4096,
            used_len: GROUP_HEADER_BYTES as u64,
            segment: 1,
            boot_epoch: meta.boot_epoch,
            group: 1,
            ..GroupHeader::default()
        };
        sealed.seal(&meta.uuid, &mut group);
        let mut image = header.encode();
        image.extend(group);
        image.resize(1 << 20, 0);
        std::fs::create_dir_all(data_dir.layout.core(0)).expect("makes it");
        std::fs::write(data_dir.layout.segment(0, 1), image).expect("writes");
        let config = SegmentPoolConfig {
            data_dir,
            core: 0,
            core_count: 1,
            segment_bytes: 1 << 20,
            spares: 2,
            refill_below: 1,
            zeros: SegmentZeros::WhileTheyPay,
            reserve_bytes: 0,
            low_space_bytes: 0,
            direct_io: false,
            o_dsync: true,
            first_seq: 2,
            faults: None,
        };
        let (worker, _, events) = Worker::new(config, Box::new(|| {}));
        let plan = Box::new(RewritePlan {
            segment: 1,
            whole: Rewritten {
                first_group: 1,
                last_group: 1,
                link: (0, 0),
                end: 8192,
                newest_time_us: 0,
                durable_group: 1,
            },
            logs: Vec::new(),
            file_bytes: 1 << 20,
            expected_bytes: 8192,
            max_bytes: 1 << 19,
        });
        Bench {
            worker,
            events,
            plan,
            _dir: dir,
        }
    }

    #[test]
    fn whoever_waits_for_space_hears_of_it_during_a_rewriting() {
        let mut bench = bench();
        bench.worker.pending = 1;
        bench.worker.gauges.no_space.store(true, Ordering::Relaxed);
        bench.worker.rewrite(&bench.plan);
        let events: Vec<PoolEvent> = bench.events.try_iter().collect();
        let [PoolEvent::NoSpace, PoolEvent::Rewritten(done)] = &events[..] else {
            panic!("{events:?}");
        };
        assert_eq!((done.seq, done.totals.file_bytes), (1, 8192));
        // A file that was given back meanwhile is space: the segment that is waited for comes first.
        let bench = &mut self::bench();
        bench.worker.pending = 1;
        bench.worker.gauges.no_space.store(true, Ordering::Relaxed);
        bench.worker.used.push("somewhere".into());
        bench.worker.rewrite(&bench.plan);
        let events: Vec<PoolEvent> = bench.events.try_iter().collect();
        let not_now = |event: &PoolEvent| {
            matches!(
                event,
                PoolEvent::NotRewritten {
                    seq: 1,
                    fault: None
                }
            )
        };
        assert!(events.iter().any(not_now), "{events:?}");
    }

    #[test]
    fn spares_and_rewritings_take_turns() {
        let mut bench = bench();
        let mut is_next = |change: &dyn Fn(&mut Worker)| {
            change(&mut bench.worker);
            bench.worker.rewrite = Some(bench.plan.clone());
            bench.worker.next_rewrite().is_some()
        };
        assert!(!is_next(&|_| {}), "spares are short");
        let made = |worker: &mut Worker| {
            worker.spares.push("spare".into());
            worker.has_made_spare = true;
        };
        assert!(is_next(&made), "one was made");
        assert!(!is_next(&|_| {}), "and another comes before the next");
        assert!(is_next(&made), "all spares are there");
        assert!(is_next(&|_| {}), "none is wanted");
        assert!(!is_next(&|worker| {
            worker.spares.clear();
            worker.pending = 1;
        }));
        let no_space = |worker: &mut Worker| {
            worker.gauges.no_space.store(true, Ordering::Relaxed);
        };
        assert!(is_next(&no_space), "no spare can be made");
        assert!(!is_next(&|worker| worker.used.push("used".into())));
    }

    #[test]
    fn the_thread_holds_the_old_file_longer_than_readers_do() {
        let mut bench = bench();
        bench.worker.rewrite(&bench.plan);
        assert!(bench.worker.replaced.0.is_some(), "its own descriptor");
        bench.worker.close_replaced();
        assert!(bench.worker.replaced.0.is_some(), "readers may have it");
        bench.worker.take(Request::Replaced);
        bench.worker.close_replaced();
        assert!(bench.worker.replaced.0.is_some(), "and a moment longer");
        bench.worker.replaced.1 = Some(Instant::now());
        bench.worker.close_replaced();
        assert!(bench.worker.replaced.0.is_none());
    }
}
