//! Reads of older data: drives a `ReadWalk` with reads through the ring.

use std::cell::RefCell;
use std::fs::File;
use std::future::{poll_fn, Future};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use shard_executor::rt::spawn_local;

use super::ahead::{split_off, Ahead, AheadSlot, Version};
use super::ring::{ReadOp, ReadSlot};
use super::Shared;
use crate::error::ReadError;
use crate::format::ALIGN;
use crate::index::INDEX_EVERY_BYTES;
use crate::machine::logs::LogState;
use crate::machine::{LogRef, ReadBatch};
use crate::slab::Draft;
use crate::walk::{ReadWalk, WalkStep, WantedRead, EXTENT_BYTES as LONGEST_EXTENT_BYTES};

/// What a read of several extents may be longer than their distance: a block before and an extent behind.
const READ_AROUND_BYTES: u64 = 128 * 1024;
/// Stretches under way for one reader, the one it waits for included: as many as it takes to have this many
/// bytes on their way, at most.
const BYTES_OF_A_READER: u64 = 2 << 20;
const READS_OF_A_READER: usize = 8;
/// Who asks for little at a time is read ahead this much at least.
const REACH_MIN_BYTES: u64 = 256 * 1024;

/// Counts a read for as long as it lives, also when its future is dropped. Taken without a wait after its walk
/// is chosen: from then on no segment the walk may lead through is given back.
struct Permit {
    shared: Rc<Shared>,
    serial: u64,
}

impl Permit {
    fn take(shared: &Rc<Shared>) -> Result<Self, ReadError> {
        let serial = shared.core.borrow_mut().begin_read();
        let serial = serial.ok_or(ReadError::Overloaded)?;
        Ok(Self {
            shared: Rc::clone(shared),
            serial,
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.core.borrow_mut().end_read(self.serial);
    }
}

pub(super) async fn read(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Result<ReadBatch, ReadError> {
    // Before the wait, so that the disk has the next reads while this one is looked through.
    let goes_on = shared.core.borrow_mut().ahead.goes_on(log, from);
    if goes_on {
        read_ahead(shared, log, from, max_bytes);
    }
    let now = version(shared, log);
    let made = shared.core.borrow_mut().ahead.take(now, from);
    let batch = match made {
        Some(made) => answer_of(shared, made, max_bytes).await,
        None => None,
    };
    let was_made = batch.is_some();
    let batch = match batch {
        Some(batch) => batch,
        // Chosen only now: the log may have changed while an answer was waited for.
        None => match from_disk(shared, log, from, max_bytes).await? {
            Some(batch) => batch,
            None => return Ok(from_memory(shared, log, from, max_bytes)),
        },
    };
    let mut core = shared.core.borrow_mut();
    core.ahead.ended(log, batch.next_offset);
    core.reads_ahead += u64::from(was_made);
    drop(core);
    Ok(batch)
}

/// Reads the disk; none when memory has it or there is nothing to read. When the log was cut meanwhile, what was
/// read may be what was cut, under offsets that are others' by now: then it is read anew.
async fn from_disk(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Result<Option<ReadBatch>, ReadError> {
    let cuts = || shared.core.borrow().machine.log_state(log).cuts;
    let mut many_at_once = true;
    loop {
        let cuts_before = cuts();
        let Some(walk) = start(shared, log, from, max_bytes, many_at_once)? else {
            return Ok(None);
        };
        let result = run(&Permit::take(shared)?, walk, |_| true).await;
        if cuts() != cuts_before {
            continue;
        }
        match result {
            // Between its intervals a stretch leads through extents that were cut off, and its one read takes in
            // others' blocks: none of these has to be readable.
            Err(ReadError::Damaged { .. } | ReadError::Io(_)) if many_at_once => {
                many_at_once = false;
            }
            result => return result.map(Some),
        }
    }
}

/// What memory has of a log; no record when it has none or there is none.
fn from_memory(shared: &Rc<Shared>, log: LogRef, from: u64, max_bytes: usize) -> ReadBatch {
    let core = shared.core.borrow();
    let batch = core.machine.read_recent(log, from, max_bytes);
    batch.unwrap_or(ReadBatch {
        first_offset: from,
        records: Vec::new(),
        next_offset: from,
    })
}

/// The log as it is now.
fn version(shared: &Rc<Shared>, log: LogRef) -> Version {
    let core = shared.core.borrow();
    let state = core.machine.log_state(log);
    Version {
        log,
        changes: state.changes,
        cuts: state.cuts,
    }
}

/// At most `max_bytes` of a stretch that was read ahead; the rest is kept. None when it failed: then the read is
/// made anew, and its own error is told.
async fn answer_of(
    shared: &Rc<Shared>,
    (ahead, slot): (Ahead, Rc<RefCell<AheadSlot>>),
    max_bytes: usize,
) -> Option<ReadBatch> {
    let result = poll_fn(|cx| {
        let mut slot = slot.borrow_mut();
        match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await;
    // An event may have cut the log while this waited.
    let is_same = version(shared, ahead.version.log) == ahead.version;
    let usable = |batch: &ReadBatch| is_same && batch.next_offset > ahead.from;
    let mut batch = result.ok().filter(usable)?;
    if let Some(rest) = split_off(&mut batch, max_bytes) {
        let kept = Ahead {
            from: rest.first_offset,
            end: rest.next_offset,
            ..ahead
        };
        let mut core = shared.core.borrow_mut();
        let now_us = core.now_us();
        core.ahead.keep(kept, rest, now_us);
    }
    Some(batch)
}

/// Reads the stretches that will be asked for, `from` the first one, as far as they are not being read already.
/// Stops where memory goes on, where there is nothing to read, and when enough is under way.
fn read_ahead(shared: &Rc<Shared>, log: LogRef, from: u64, max_bytes: usize) {
    if shared.core.borrow().machine.log_state(log).is_in_flux() {
        // It would be about the log as it will not be for long.
        return;
    }
    let version = version(shared, log);
    let (mut at, mut bytes) = (from, 0);
    for _ in 0..READS_OF_A_READER {
        let known = shared.core.borrow().ahead.find(version, at);
        let begun = known.or_else(|| begin_ahead(shared, version, at, max_bytes));
        let Some(ahead) = begun else { return };
        at = ahead.end;
        bytes += ahead.bytes;
        if bytes > BYTES_OF_A_READER {
            return;
        }
    }
}

/// Begins to read the stretch at `from`.
fn begin_ahead(
    shared: &Rc<Shared>,
    version: Version,
    from: u64,
    max_bytes: usize,
) -> Option<Ahead> {
    let (walk, ahead) = stretch_ahead(shared, version, from, max_bytes)?;
    let permit = Permit::take(shared).ok()?;
    let slot = {
        let mut core = shared.core.borrow_mut();
        let now_us = core.now_us();
        core.ahead.begin(ahead, now_us)?
    };
    let work = async move {
        let result = run_ahead(&permit, walk, ahead.bytes, &slot).await;
        let mut core = permit.shared.core.borrow_mut();
        core.ahead.end(&slot, result);
    };
    let mut work = Box::pin(work);
    // The device gets it at once, not only when whoever asked has to wait. Spawned, it is looked at again.
    let mut nobody = Context::from_waker(Waker::noop());
    if work.as_mut().poll(&mut nobody).is_pending() {
        spawn_local(work).detach();
    }
    Some(ahead)
}

/// Which stretch to read ahead, as a whole: where it ends is known before it is read.
fn stretch_ahead(
    shared: &Rc<Shared>,
    version: Version,
    from: u64,
    max_bytes: usize,
) -> Option<(ReadWalk, Ahead)> {
    let core = shared.core.borrow();
    let state = core.machine.log_state(version.log);
    let tail = core.machine.durable_tail(version.log);
    if state.damage.is_some() || from < state.base || is_in_memory(state, from, tail) {
        return None;
    }
    let of = |end, bytes| Ahead {
        version,
        from,
        end,
        bytes,
    };
    let longest = (core.max_transfer_bytes() as u64).saturating_sub(READ_AROUND_BYTES);
    let reach = (max_bytes as u64)
        .saturating_mul(4)
        .max(REACH_MIN_BYTES)
        .min(longest);
    if let Some(stretch) = state.index.stretch(from, tail, reach) {
        let bytes = stretch.span_bytes() + LONGEST_EXTENT_BYTES;
        let walk = ReadWalk::of_stretch(state.id, from, bytes as usize, &stretch);
        return Some((walk, of(stretch.interval.end, bytes)));
    }
    let interval = state.index.interval(from, tail)?;
    let walk = ReadWalk::new(state.id, from, usize::MAX, interval);
    let bytes = INDEX_EVERY_BYTES + LONGEST_EXTENT_BYTES;
    Some((walk, of(interval.end, bytes)))
}

/// Carries a walk out that nobody waits for yet. Given up when it takes more memory than there is room for.
async fn run_ahead(
    permit: &Permit,
    walk: ReadWalk,
    room: u64,
    slot: &Rc<RefCell<AheadSlot>>,
) -> Result<ReadBatch, ReadError> {
    run(permit, walk, |len| {
        let more = len.saturating_sub(room + READ_AROUND_BYTES);
        more == 0 || permit.shared.core.borrow_mut().ahead.grow(slot, more)
    })
    .await
}

/// Carries a walk out. `has_room` is asked before each read about its bytes; overloaded when it says no.
async fn run(
    permit: &Permit,
    mut walk: ReadWalk,
    has_room: impl Fn(u64) -> bool,
) -> Result<ReadBatch, ReadError> {
    let mut input = None;
    loop {
        match walk.step(input.take())? {
            WalkStep::Done(batch) => return Ok(batch),
            WalkStep::Read(wanted) => {
                if !has_room(wanted.len) {
                    return Err(ReadError::Overloaded);
                }
                let bytes = fetch(&permit.shared, wanted).await?;
                input = Some((wanted, bytes));
            }
        }
    }
}

/// Whether what is held in memory begins at or below `from`, or nothing durable is there.
fn is_in_memory(state: &LogState, from: u64, tail: u64) -> bool {
    let recent_from = state.recent.oldest_offset();
    from >= tail || recent_from.is_some_and(|oldest| oldest <= from)
}

/// How a read begins, through several intervals of the index if it may; none when memory has it or there is
/// nothing to read.
fn start(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
    many_at_once: bool,
) -> Result<Option<ReadWalk>, ReadError> {
    let core = shared.core.borrow();
    let state = core.machine.log_state(log);
    if state.damage.is_some() {
        return Err(ReadError::LogDamaged);
    }
    if from < state.base {
        return Err(ReadError::Trimmed {
            offset: from,
            base: state.base,
        });
    }
    let tail = core.machine.durable_tail(log);
    if is_in_memory(state, from, tail) {
        return Ok(None);
    }
    // Where the limit is not small, a stretch is chosen that stays below it: nothing is read in vain.
    let asked = max_bytes as u64;
    let within = match asked > 2 * LONGEST_EXTENT_BYTES {
        true => asked - LONGEST_EXTENT_BYTES,
        false => asked,
    };
    let reach = within.min((core.max_transfer_bytes() as u64).saturating_sub(READ_AROUND_BYTES));
    let stretch = state.index.stretch(from, tail, reach);
    if let Some(stretch) = stretch.filter(|_| many_at_once) {
        let walk = ReadWalk::of_stretch(state.id, from, max_bytes, &stretch);
        return Ok(Some(walk));
    }
    let interval = state.index.interval(from, tail);
    Ok(interval.map(|interval| ReadWalk::new(state.id, from, max_bytes, interval)))
}

/// Reads a stretch of a segment, wherever its bytes are.
async fn fetch(shared: &Rc<Shared>, wanted: WantedRead) -> Result<Bytes, ReadError> {
    let io = |error: std::io::Error| ReadError::Io(error.to_string());
    let segment = shared
        .core
        .borrow_mut()
        .read_segment(wanted.core, wanted.segment)
        .map_err(io)?;
    let Some(map) = &segment.map else {
        return transfer(shared, &segment.file, wanted.position, wanted.len).await;
    };
    let range = map.file_range(wanted.position, wanted.len);
    let len = range.end - range.start;
    let bytes = transfer(shared, &segment.file, range.start, len).await?;
    Ok(Bytes::from(map.gather(&bytes, wanted.position, wanted.len)))
}

/// Reads a stretch of a file, in transfers the device takes.
async fn transfer(
    shared: &Rc<Shared>,
    file: &Rc<File>,
    position: u64,
    len: u64,
) -> Result<Bytes, ReadError> {
    let io = |error: std::io::Error| ReadError::Io(error.to_string());
    let total = usize::try_from(len)
        .map_err(|_| ReadError::Io("a read too large for memory".to_owned()))?;
    let (step, mut draft) = {
        let mut core = shared.core.borrow_mut();
        (core.max_transfer_bytes(), core.read_buffer(total))
    };
    let mut done = 0;
    while done < total {
        let len = step.min(total - done);
        let slot = Rc::new(RefCell::new(ReadSlot::default()));
        shared.core.borrow_mut().start_read(ReadOp {
            file: Rc::clone(file),
            position: position + done as u64,
            draft,
            at: done,
            len,
            slot: Rc::clone(&slot),
        });
        let (back, result) = wait(&slot).await;
        draft = back;
        let read = result.map_err(io)?;
        done += read;
        if read == 0 || read % ALIGN != 0 {
            // The end of the file.
            break;
        }
    }
    Ok(Bytes::from_owner(draft.freeze().part(0, done)))
}

async fn wait(slot: &Rc<RefCell<ReadSlot>>) -> (Draft, std::io::Result<usize>) {
    poll_fn(|cx| {
        let mut slot = slot.borrow_mut();
        match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}
