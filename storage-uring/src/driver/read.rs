//! Reads of older data: drives a `ReadWalk` with reads through the ring.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use shard_executor::rt::spawn_local;

use super::ahead::{AheadSlot, Wanted};
use super::ring::{ReadOp, ReadSlot};
use super::Shared;
use crate::error::ReadError;
use crate::format::ALIGN;
use crate::machine::{LogRef, ReadBatch};
use crate::slab::Draft;
use crate::walk::{ReadWalk, WalkStep, WantedRead, EXTENT_BYTES as LONGEST_EXTENT_BYTES};

/// What a read of several extents may be longer than their distance: a block before and an extent behind.
const READ_AROUND_BYTES: u64 = 128 * 1024;

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
    let made = take_ahead(shared, log, from, max_bytes);
    // Before the wait, so that the disk has the next read while this one is looked through.
    let goes_on = shared.core.borrow_mut().ahead.goes_on(log, from);
    if goes_on {
        let first = start(shared, log, from, max_bytes)?;
        if let Some(next) = first.and_then(|first| first.next) {
            read_ahead(shared, log, next, max_bytes);
        }
    }
    let batch = match made {
        Some(made) => answer_of(shared, made).await,
        None => None,
    };
    let was_made = batch.is_some();
    let batch = match batch {
        Some(batch) => batch,
        // Chosen only now: the log may have changed while an answer was waited for.
        None => match start(shared, log, from, max_bytes)? {
            Some(start) => run(Permit::take(shared)?, start.walk).await?,
            None => return Ok(from_memory(shared, log, from, max_bytes)),
        },
    };
    let mut core = shared.core.borrow_mut();
    core.ahead.ended(log, batch.next_offset);
    core.reads_ahead += u64::from(was_made);
    drop(core);
    Ok(batch)
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

/// The question as it is put now.
fn question(shared: &Rc<Shared>, log: LogRef, from: u64, max_bytes: usize) -> Wanted {
    let changes = shared.core.borrow().machine.log_state(log).changes;
    Wanted {
        log,
        from,
        max_bytes,
        changes,
    }
}

/// The read made ahead for this question, if there is one.
fn take_ahead(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Option<(Wanted, Rc<RefCell<AheadSlot>>)> {
    let wanted = question(shared, log, from, max_bytes);
    let slot = shared.core.borrow_mut().ahead.take(&wanted)?;
    Some((wanted, slot))
}

/// What a read made ahead found; none when it failed: then the read is made anew, and its own error is told.
async fn answer_of(
    shared: &Rc<Shared>,
    (wanted, slot): (Wanted, Rc<RefCell<AheadSlot>>),
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
    let is_same = question(shared, wanted.log, wanted.from, wanted.max_bytes) == wanted;
    result
        .ok()
        .filter(|batch| is_same && batch.next_offset > wanted.from)
}

/// Makes the read that will probably be asked for next. Does nothing when memory has it, when there is
/// nothing to read, or when enough is under way.
fn read_ahead(shared: &Rc<Shared>, log: LogRef, from: u64, max_bytes: usize) {
    let Ok(Some(start)) = start(shared, log, from, max_bytes) else {
        return;
    };
    if shared.core.borrow().machine.log_state(log).is_in_flux() {
        // The answer would be about the log as it will not be for long.
        return;
    }
    let wanted = question(shared, log, from, max_bytes);
    let slot = {
        let mut core = shared.core.borrow_mut();
        let now_us = core.now_us();
        core.ahead.begin(wanted, now_us)
    };
    let Some(slot) = slot else { return };
    let permit = Permit::take(shared);
    let shared = Rc::clone(shared);
    spawn_local(async move {
        let result = match permit {
            Ok(permit) => run(permit, start.walk).await,
            Err(refused) => Err(refused),
        };
        shared.core.borrow_mut().ahead.end(&slot, result);
    })
    .detach();
}

/// Carries a walk out.
async fn run(permit: Permit, mut walk: ReadWalk) -> Result<ReadBatch, ReadError> {
    let shared = &permit.shared;
    let mut input = None;
    loop {
        match walk.step(input.take())? {
            WalkStep::Done(batch) => return Ok(batch),
            WalkStep::Read(wanted) => {
                let bytes = fetch(shared, wanted).await?;
                input = Some((wanted, bytes));
            }
        }
    }
}

/// A read of the disk that can begin.
struct Start {
    walk: ReadWalk,
    /// The offset it ends at, when that is sure, and there is more behind it.
    next: Option<u64>,
}

/// How a read begins; none when memory has it or there is nothing to read.
fn start(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Result<Option<Start>, ReadError> {
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
    let recent_from = state.recent.oldest_offset();
    if from >= tail || recent_from.is_some_and(|oldest| oldest <= from) {
        return Ok(None);
    }
    // Where the limit is not small, a stretch is chosen that stays below it: then where it ends is known
    // before it is read.
    let asked = max_bytes as u64;
    let within = match asked > 2 * LONGEST_EXTENT_BYTES {
        true => asked - LONGEST_EXTENT_BYTES,
        false => asked,
    };
    let reach = within.min((core.max_transfer_bytes() as u64).saturating_sub(READ_AROUND_BYTES));
    if let Some(stretch) = state.index.stretch(from, tail, reach) {
        let end = stretch.interval.end;
        let is_whole = stretch.span_bytes() + LONGEST_EXTENT_BYTES <= max_bytes as u64;
        return Ok(Some(Start {
            walk: ReadWalk::of_stretch(state.id, from, max_bytes, &stretch),
            next: Some(end).filter(|end| is_whole && *end < tail),
        }));
    }
    let Some(interval) = state.index.interval(from, tail) else {
        return Ok(None);
    };
    Ok(Some(Start {
        walk: ReadWalk::new(state.id, from, max_bytes, interval),
        next: None,
    }))
}

/// Reads a stretch of a segment, in transfers the device takes.
async fn fetch(shared: &Rc<Shared>, wanted: WantedRead) -> Result<Bytes, ReadError> {
    let io = |error: std::io::Error| ReadError::Io(error.to_string());
    let total = usize::try_from(wanted.len)
        .map_err(|_| ReadError::Io("a read too large for memory".to_owned()))?;
    let (file, step, mut draft) = {
        let mut core = shared.core.borrow_mut();
        (
            core.read_file(wanted.core, wanted.segment).map_err(io)?,
            core.max_transfer_bytes(),
            core.read_buffer(total),
        )
    };
    let mut done = 0;
    while done < total {
        let len = step.min(total - done);
        let slot = Rc::new(RefCell::new(ReadSlot::default()));
        shared.core.borrow_mut().start_read(ReadOp {
            file: Rc::clone(&file),
            position: wanted.position + done as u64,
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
