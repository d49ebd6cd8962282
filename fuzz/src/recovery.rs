//! What the fuzz target of recovery does with its input: writes logs as the input says, damages what was
//! written as it says, and recovers it. `storage-uring`'s integration test `recovery_fuzz` runs the same
//! function on seeded inputs.

use std::collections::{BTreeMap, HashMap};

use storage_uring::format::segment::SegmentHeader;
use storage_uring::machine::{
    Action, CommitMachine, ControlEvent, LogSeed, MachineConfig, ReadySegment,
};
use storage_uring::recovery::images::{
    recover_images, rewrite_image, ImageLog, ImageRecovery, Images,
};
use storage_uring::recovery::Damage;
use storage_uring::rewrite::RewriteFault;
use storage_uring::sim::name;
use storage_uring::LogRef;

const UUID: [u8; 16] = [0x5a; 16];
const SEGMENT_BYTES: u64 = 32 * 1024;
/// Bounds of one input's work.
const SEGMENTS_MAX: u64 = 8;
const SCRIPT_MAX: usize = 64;

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> u64 {
        let low = self.byte().unwrap_or(0);
        u64::from(self.byte().unwrap_or(0)) << 8 | u64::from(low)
    }
}

/// Every payload a log ever had at an offset.
type Written = HashMap<(u64, u64), Vec<Vec<u8>>>;

struct Writer {
    machine: CommitMachine,
    logs: Vec<(LogRef, u64)>,
    images: Images,
    core: u16,
    epoch: u64,
    next_segment: u64,
    serial: u8,
    written: Written,
}

impl Writer {
    fn new(core: u16, epoch: u64) -> Self {
        let mut machine = CommitMachine::new(MachineConfig {
            uuid: UUID,
            core,
            boot_epoch: epoch,
            segment_bytes: SEGMENT_BYTES,
            commit_max_bytes: 16 * 1024,
            early_commit_bytes: usize::MAX,
            commit_max_delay_us: 0,
            commits_in_flight: 2,
            max_transfer_bytes: 1 << 20,
            max_queued_bytes: 1 << 20,
            recent_bytes: 0,
            flush_after_write: false,
            next_group: 1,
            log_end: (0, 0),
        });
        // Cores share no log: within an epoch a log lives on one of them.
        let logs = (0..3)
            .map(|shard| {
                let name = name(u32::from(core) * 8 + shard);
                let log = machine.add_log(&name, LogSeed::default());
                (log.expect("a new log"), name.id().0)
            })
            .collect();
        Self {
            machine,
            logs,
            images: Images::new(),
            core,
            epoch,
            next_segment: 1,
            serial: 0,
            written: Written::new(),
        }
    }

    fn append(&mut self, pick: u8, count: u8, len: u64) {
        let (log, id) = self.logs[usize::from(pick) % self.logs.len()];
        let first = self.machine.tail(log);
        let payloads: Vec<Vec<u8>> = (0..count % 4)
            .map(|_| {
                self.serial = self.serial.wrapping_add(1);
                vec![self.serial; (len % 6000) as usize]
            })
            .collect();
        let taken = self
            .machine
            .append(log, 1, 5, 0, payloads.iter().map(Vec::as_slice), 0);
        if taken.is_ok() {
            for (offset, payload) in (first..).zip(payloads) {
                self.written.entry((id, offset)).or_default().push(payload);
            }
        }
    }

    fn control(&mut self, pick: u8, event: u8, number: u64) {
        let (log, _) = self.logs[usize::from(pick) % self.logs.len()];
        let (base, tail) = (self.machine.base(log), self.machine.tail(log));
        // The base counts once it is durable, the tail at once: a log being placed lower has it below.
        let inside = base + number % (tail.saturating_sub(base) + 1);
        let event = match event % 5 {
            0 => ControlEvent::Truncate(inside),
            1 => ControlEvent::Base(inside),
            2 => ControlEvent::Place(number),
            3 => ControlEvent::Accept(number % 9),
            _ => ControlEvent::Begin {
                generation: number % 9,
                leader: "leader-1",
            },
        };
        // A generation below the accepted one is refused; that is not what is looked at here.
        let _ = self.machine.push_control(log, event, 7, 0, 0);
    }

    /// Carries out up to `writes` writes, the newest of them first when `backwards`.
    fn turn(&mut self, writes: u8, backwards: bool) {
        for _ in 0..=writes % 4 {
            if self.machine.ready_segments() == 0 && self.next_segment <= SEGMENTS_MAX {
                self.add_segment();
            }
            let mut actions = Vec::new();
            while let Some(action) = self.machine.poll_action(0) {
                actions.push(action);
            }
            if backwards {
                actions.reverse();
            }
            for action in actions {
                if let Action::Rewrite { plan } = &action {
                    let image = self.images.get_mut(&(self.core, plan.segment));
                    let image = image.expect("it was made");
                    match rewrite_image(&UUID, self.core, image, plan) {
                        Ok((file, totals)) => {
                            *image = file;
                            self.machine.on_segment_rewritten(plan.segment, &totals);
                        }
                        Err(fault) => {
                            assert_eq!(fault, RewriteFault::NotWorth, "it is whole");
                            self.machine.on_rewrite_failed(plan.segment, Some(fault));
                        }
                    }
                }
                let Action::Write {
                    id,
                    segment,
                    position,
                    data,
                } = &action
                else {
                    continue;
                };
                let image = self.images.get_mut(&(self.core, *segment));
                let at = *position as usize;
                image.expect("it was made")[at..at + data.len()].copy_from_slice(data.as_ref());
                self.machine.on_write_done(*id, &action, Ok(data.len()), 0);
            }
            while self.machine.poll_completion().is_some() {}
        }
    }

    fn add_segment(&mut self) {
        let seq = self.next_segment;
        self.next_segment += 1;
        let header = SegmentHeader {
            uuid: UUID,
            core: self.core,
            core_count: 2,
            seq,
            boot_epoch: self.epoch,
            segment_bytes: SEGMENT_BYTES,
            rewritten: None,
        };
        let mut image = header.encode();
        image.resize(SEGMENT_BYTES as usize, 0);
        self.images.insert((self.core, seq), image);
        self.machine.on_segment_ready(ReadySegment { seq });
    }
}

/// A script of writes, then damage; see the module documentation.
pub fn recover_damaged(data: &[u8]) {
    let mut input = Input(data);
    let mut writers = [Writer::new(0, 1), Writer::new(1, 1)];
    let mut steps = 0;
    while let Some(op) = input.byte().filter(|op| *op != 0xff) {
        let writer = &mut writers[usize::from(op >> 7)];
        match op % 8 {
            0..=3 => {
                let (pick, count) = (input.byte().unwrap_or(0), op / 8);
                let len = input.number();
                writer.append(pick, count, len);
            }
            4 => {
                let (pick, number) = (input.byte().unwrap_or(0), input.number());
                writer.control(pick, op / 8, number);
            }
            5 | 6 => writer.turn(op / 8, op & 64 != 0),
            _ => {
                writer.turn(op / 8, op & 64 != 0);
                // Segments of which little is needed are rewritten at the next turn.
                writer.machine.reclaim(1, 0, 256);
            }
        }
        steps += 1;
        if steps == SCRIPT_MAX {
            break;
        }
    }
    let mut images = Images::new();
    let mut written = Written::new();
    for mut writer in writers {
        writer.turn(3, false);
        images.append(&mut writer.images);
        written.extend(writer.written);
    }
    let forged = damage(&mut input, &mut images);
    check(images, (!forged).then_some(&written));
}

/// Damages the images; true when checksums were made to match again, so that anything may come out.
fn damage(input: &mut Input<'_>, images: &mut Images) -> bool {
    let mut forged = false;
    for _ in 0..16 {
        let Some(kind) = input.byte() else { break };
        let count = images.len();
        if count == 0 {
            break;
        }
        let key = *images
            .keys()
            .nth(input.number() as usize % count)
            .expect("one of them");
        let at = input.number() as usize * 4 + usize::from(input.byte().unwrap_or(0));
        let len = input.number() as usize % 9000;
        let value = input.byte().unwrap_or(0);
        let image = images.get_mut(&key).expect("one of them");
        let at = at % image.len().max(1);
        let end = (at + len).min(image.len());
        match kind % 10 {
            0 if !image.is_empty() => image[at] ^= 1 << (value % 8),
            1 => image[at.min(end)..end].fill(0),
            2 => image[at.min(end)..end].fill(value),
            3 => image.truncate(at),
            4 => drop(images.remove(&key)),
            5 => {
                // A copy under another sequence, or in the other core's directory.
                let copy = image.clone();
                let (core, seq) = (u16::from(value % 2), u64::from(value / 2 % 12) + 1);
                images.insert((core, seq), copy);
            }
            6 => {
                let from = usize::from(value) * 4096 % image.len().max(1);
                let block = image[from..(from + 4096).min(image.len())].to_vec();
                let at = at / 4096 * 4096;
                let end = (at + block.len()).min(image.len());
                image[at..end].copy_from_slice(&block[..end - at]);
            }
            _ => forged |= forge(image, at, input),
        }
    }
    forged
}

/// Overwrites bytes of a group, extent or segment header and makes its checksums match again.
fn forge(image: &mut [u8], at: usize, input: &mut Input<'_>) -> bool {
    let block = at / 4096 * 4096;
    if image.len() < block + 4096 {
        return false;
    }
    let field = usize::from(input.byte().unwrap_or(0)) % 200;
    let with = [input.byte().unwrap_or(0), input.byte().unwrap_or(0)];
    let spread = input.byte().unwrap_or(0);
    for (i, byte) in image[block + field..block + field + 8]
        .iter_mut()
        .enumerate()
    {
        if spread & (1 << i) != 0 {
            *byte = with[i % 2];
        }
    }
    if block == 0 {
        let crc = crc32c::crc32c(&image[..4092]);
        image[4092..4096].copy_from_slice(&crc.to_le_bytes());
        return true;
    }
    // The first extent, then the body, then the header, each over what was changed before. In a frame of a
    // rewritten segment the extent lies in a piece.
    let u32_at = |bytes: &[u8], at: usize| {
        u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize
    };
    let is_frame = image[block..].starts_with(b"FXFRAME1");
    let (extent, used_at, crc_at) = match is_frame {
        true => (140, 96, 112),
        false => (128, 24, 104),
    };
    let extent = block + extent;
    if is_frame {
        let seed = crc32c::crc32c_append(crc32c::crc32c(&UUID), &image[block + 16..block + 24]);
        let crc = crc32c::crc32c_append(seed, &image[block + 128..block + 136]);
        image[block + 136..block + 140].copy_from_slice(&crc.to_le_bytes());
    }
    let name = usize::from(u16::from_le_bytes([image[extent + 60], image[extent + 61]]));
    if extent + 72 + name <= image.len() {
        let fixed = crc32c::crc32c(&image[extent..extent + 68]);
        let crc = crc32c::crc32c_append(fixed, &image[extent + 72..extent + 72 + name]);
        image[extent + 68..extent + 72].copy_from_slice(&crc.to_le_bytes());
    }
    let used = u32_at(image, block + used_at);
    if used >= 128 && block + used <= image.len() {
        let crc = crc32c::crc32c(&image[block + 128..block + used]);
        image[block + crc_at..block + crc_at + 4].copy_from_slice(&crc.to_le_bytes());
    }
    let crc = crc32c::crc32c_append(crc32c::crc32c(&UUID), &image[block..block + 124]);
    image[block + 124..block + 128].copy_from_slice(&crc.to_le_bytes());
    true
}

/// Recovers twice and reads everything. `written` is none when checksums were forged.
fn check(mut images: Images, written: Option<&Written>) {
    let before = images.clone();
    let Ok(first) = recover_images(&UUID, &mut images) else {
        // A version nobody knows stops the start and changes nothing.
        assert!(images == before);
        return;
    };
    let logs = first.logs();
    for log in &logs {
        assert!(log.base <= log.tail, "{log:?}");
    }
    let read = read_all(&first, &images, &logs);
    let settled = images.clone();
    let second = recover_images(&UUID, &mut images).expect("it was readable");
    // Beside damage nothing is cut; the same is said again.
    let nothing_left = second.report.cores.iter().all(|core| core.steps.is_empty());
    assert!(nothing_left, "{:?}, then {:?}", first.report, second.report);
    let places = |damages: &[Damage]| {
        damages
            .iter()
            .map(|d| (d.core, d.position))
            .collect::<Vec<_>>()
    };
    let (found, again) = (
        places(&first.report.damages),
        places(&second.report.damages),
    );
    assert_eq!(found, again, "{:?}, then {:?}", first.report, second.report);
    let reports = || format!("{:?}, then {:?}", first.report, second.report);
    assert!(
        images == settled,
        "a second start changes something: {}",
        reports()
    );
    let shape = |log: &ImageLog| (log.id, log.base, log.tail, log.damage.is_some());
    let again = second.logs();
    if !logs.iter().map(shape).eq(again.iter().map(shape)) {
        let changed = |log: &&ImageLog| !again.iter().any(|other| shape(other) == shape(log));
        let changed: Vec<_> = logs.iter().filter(changed).collect();
        let reports = (&first.report, &second.report);
        panic!("a second start finds other logs than {changed:?}: {again:?}, {reports:?}");
    }
    assert!(
        read_all(&second, &images, &again) == read,
        "and reads other bytes"
    );
    let Some(written) = written else { return };
    for ((id, offset), payload) in &read {
        let ever = written.get(&(*id, *offset));
        let known = ever.is_some_and(|payloads| payloads.contains(payload));
        assert!(known, "offset {offset} of log {id:x} was never that");
    }
}

/// Every record that can be read, by log and offset. A log that is not refused must be readable as far as
/// its checksums say, and no read may go on for ever.
fn read_all(
    recovery: &ImageRecovery,
    images: &Images,
    logs: &[ImageLog],
) -> BTreeMap<(u64, u64), Vec<u8>> {
    let mut all = BTreeMap::new();
    for log in logs {
        let mut from = log.base;
        // Forged counts may promise more than a lifetime of reading.
        while from < log.tail && all.len() < 100_000 {
            let Ok(batch) = recovery.read(images, log.id, from, 4000) else {
                break;
            };
            if batch.records.is_empty() {
                break;
            }
            assert_eq!(batch.first_offset, from);
            for (offset, record) in (from..).zip(&batch.records) {
                all.insert((log.id, offset), record.to_vec());
            }
            from = batch.next_offset;
        }
    }
    all
}
