//! Reading a range of one log through its sparse index, without doing the reads itself.
//!
//! Starts at the newest extent of an index interval, walks the back pointers until the wanted offset is
//! covered, then returns records forwards. The caller carries out the reads, synchronously or not.
//!
//! Invariants: every record returned passed its own checksum, which binds log and offset; memory is bounded
//! by one interval plus one extent.

use bytes::Bytes;

use crate::error::ReadError;
use crate::format::extent::{ExtentHeader, ExtentKind};
use crate::format::{align_up, record, HeaderFault, Place, ALIGN};
use crate::index::{Interval, Stretch};
use crate::machine::ReadBatch;
use crate::name::LogId;

/// Bytes read around an extent header: two blocks before its own, so that small neighbours come along. Where the
/// extent passed last lay further away than that, only the blocks of an extent of its size are read.
const BEHIND: u64 = 2 * ALIGN as u64;
const WINDOW: u64 = 4 * ALIGN as u64;
/// Extents one walk may pass; a longer chain means the index and the log contradict each other.
const HOPS_MAX: u32 = 1 << 20;

/// Bytes read behind the header of an extent whose length is not known yet, at most: as long as extents
/// are that hold more than one record.
pub(crate) const EXTENT_BYTES: u64 = 72 * 1024;

/// A read the walk needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedRead {
    /// Core directory.
    pub core: u16,
    /// Segment sequence.
    pub segment: u64,
    /// Position, a multiple of 4096.
    pub position: u64,
    /// Length, a multiple of 4096; the file may end earlier.
    pub len: u64,
}

/// What the walk needs or has.
#[derive(Debug)]
pub enum WalkStep {
    /// Carry this read out and call `step` with the bytes.
    Read(WantedRead),
    /// Finished.
    Done(ReadBatch),
}

struct Found {
    place: Place,
    header: ExtentHeader,
    /// Offsets from here on were replaced by a later extent.
    cap: u64,
    bytes: Option<Bytes>,
}

/// One read of one log.
pub struct ReadWalk {
    log: LogId,
    from: u64,
    max_bytes: usize,
    cursor: Place,
    cap: u64,
    hops: u32,
    found: Vec<Found>,
    window: Option<(WantedRead, Bytes)>,
    /// The extent passed last, and its length.
    passed: Option<(Place, u64)>,
    /// A read that probably has everything; the walk fetches what it lacks.
    at_once: Option<WantedRead>,
    forward: bool,
    batch: ReadBatch,
    payload_bytes: usize,
}

impl ReadWalk {
    /// A read of `[from, interval.end)`, ending early once `max_bytes` of payload are gathered.
    pub fn new(log: LogId, from: u64, max_bytes: usize, interval: Interval) -> Self {
        Self {
            log,
            from,
            max_bytes,
            cursor: interval.newest,
            cap: interval.end,
            hops: 0,
            found: Vec::new(),
            window: None,
            passed: None,
            at_once: None,
            forward: false,
            batch: ReadBatch {
                first_offset: from,
                records: Vec::new(),
                next_offset: from,
            },
            payload_bytes: 0,
        }
    }

    /// A read of extents that lie close together, in one read of the device.
    pub fn of_stretch(log: LogId, from: u64, max_bytes: usize, stretch: &Stretch) -> Self {
        let first = u64::from(stretch.first.position);
        let position = first / ALIGN as u64 * ALIGN as u64;
        let end = match stretch.next {
            Some(next) => u64::from(next.position),
            None => {
                let longest = EXTENT_BYTES.min(max_bytes as u64 + ALIGN as u64);
                u64::from(stretch.interval.newest.position) + longest
            }
        };
        Self {
            at_once: Some(WantedRead {
                core: stretch.first.core,
                segment: stretch.first.segment,
                position,
                len: align_up(end) - position,
            }),
            ..Self::new(log, from, max_bytes, stretch.interval)
        }
    }

    /// Goes on with the bytes of the read asked for last (none the first time).
    pub fn step(&mut self, input: Option<(WantedRead, Bytes)>) -> Result<WalkStep, ReadError> {
        if let Some(read) = self.at_once.take() {
            return Ok(WalkStep::Read(read));
        }
        if input.is_some() {
            self.window = input;
        }
        while !self.forward {
            if let Some(read) = self.walk_back()? {
                return Ok(WalkStep::Read(read));
            }
        }
        while let Some(found) = self.found.pop() {
            let Some(bytes) = self.extent_bytes(&found) else {
                let read = whole_extent(&found);
                if self.window.as_ref().is_some_and(|(last, _)| *last == read) {
                    return Err(damaged(
                        found.place,
                        "the extent ends before its records do",
                    ));
                }
                self.found.push(found);
                return Ok(WalkStep::Read(read));
            };
            if !self.take(&found, &bytes)? {
                break;
            }
        }
        Ok(WalkStep::Done(std::mem::take(&mut self.batch)))
    }

    /// One hop back; a read when the header is not at hand.
    fn walk_back(&mut self) -> Result<Option<WantedRead>, ReadError> {
        let place = self.cursor;
        if !place.is_some() {
            return Err(damaged(place, "the chain of extents ends too early"));
        }
        let (Some(at), Some((_, window))) = (self.in_window(place, 0), &self.window) else {
            if let Some(window) = self.next_window(place) {
                return Ok(Some(window));
            }
            return Err(damaged(place, "the segment ends before an extent"));
        };
        let bytes = window.slice(at..);
        let header = match ExtentHeader::decode(&bytes) {
            Ok(header) => header,
            Err(fault) => match self.next_window(place) {
                Some(window) if fault == HeaderFault::Short => return Ok(Some(window)),
                _ => return Err(damaged(place, "an extent header is not readable")),
            },
        };
        if header.log != self.log || header.kind != ExtentKind::Records {
            return Err(damaged(
                place,
                "an extent of another log is where this log's should be",
            ));
        }
        self.hops += 1;
        if self.hops > HOPS_MAX {
            return Err(damaged(place, "the chain of extents does not end"));
        }
        self.cursor = header.prev;
        self.passed = Some((place, header.total_len() as u64));
        if header.first_offset < self.cap {
            let total = header.total_len();
            // Small extents are copied out, so that a chain of them does not hold a window each.
            let kept = (bytes.len() >= total).then(|| {
                if total < ALIGN {
                    Bytes::copy_from_slice(&bytes[..total])
                } else {
                    bytes.slice(..total)
                }
            });
            self.found.push(Found {
                place,
                header,
                cap: self.cap,
                bytes: kept,
            });
            self.cap = header.first_offset;
            self.forward = header.first_offset <= self.from;
        }
        Ok(None)
    }

    /// The read of an extent's header; none when it was made and did not help.
    fn next_window(&self, place: Place) -> Option<WantedRead> {
        let last = self.window.as_ref().map(|(last, _)| *last);
        let wide = header_window(place);
        match self.narrow_window(place) {
            _ if last == Some(wide) => None,
            Some(narrow) if last != Some(narrow) => Some(narrow),
            _ => Some(wide),
        }
    }

    /// The blocks of an extent as long as the one passed last, when that one lay far from it: then nothing else
    /// of the log is likely to be near. Few bytes all the same: a long extent has an index entry of its own or
    /// the one behind it has, so that at most one is passed on a walk.
    fn narrow_window(&self, place: Place) -> Option<WantedRead> {
        let (passed, len) = self.passed?;
        let is_here = (passed.core, passed.segment) == (place.core, place.segment);
        let distance = u64::from(passed.position.saturating_sub(place.position));
        if is_here && distance <= BEHIND {
            return None;
        }
        let position = u64::from(place.position) / ALIGN as u64 * ALIGN as u64;
        let end = align_up(u64::from(place.position) + len.min(WINDOW));
        Some(WantedRead {
            core: place.core,
            segment: place.segment,
            position,
            len: end - position,
        })
    }

    /// Index into the window of a place, when at least `len` bytes follow it there.
    fn in_window(&self, place: Place, len: usize) -> Option<usize> {
        let (read, bytes) = self.window.as_ref()?;
        if read.core != place.core || read.segment != place.segment {
            return None;
        }
        let at = usize::try_from(u64::from(place.position).checked_sub(read.position)?).ok()?;
        (at + len <= bytes.len() && at < bytes.len()).then_some(at)
    }

    fn extent_bytes(&self, found: &Found) -> Option<Bytes> {
        if let Some(bytes) = &found.bytes {
            return Some(bytes.clone());
        }
        let total = found.header.total_len();
        let at = self.in_window(found.place, total)?;
        self.window
            .as_ref()
            .map(|(_, window)| window.slice(at..at + total))
    }

    /// Takes the wanted records of one extent; false when enough were gathered.
    fn take(&mut self, found: &Found, bytes: &Bytes) -> Result<bool, ReadError> {
        let mut at = found.header.records_at();
        let end = found.header.end_offset().min(found.cap);
        if found.header.first_offset > self.batch.next_offset {
            return Err(damaged(
                found.place,
                "records are missing before this extent",
            ));
        }
        let mut offset = found.header.first_offset;
        while offset < end {
            let wanted = offset >= self.batch.next_offset;
            let span = if wanted {
                record::decode(bytes, at, self.log, offset)
            } else {
                record::skip(bytes, at)
            };
            let span =
                span.map_err(|_| damaged(found.place, "a record does not match its checksum"))?;
            if wanted {
                let len = span.end - span.start;
                if self.payload_bytes + len > self.max_bytes && !self.batch.records.is_empty() {
                    return Ok(false);
                }
                self.payload_bytes += len;
                self.batch.records.push(bytes.slice(span.start..span.end));
                self.batch.next_offset = offset + 1;
            }
            at = span.end;
            offset += 1;
        }
        Ok(true)
    }
}

fn damaged(place: Place, detail: &'static str) -> ReadError {
    ReadError::Damaged {
        core: place.core,
        segment: place.segment,
        position: u64::from(place.position),
        detail,
    }
}

fn header_window(place: Place) -> WantedRead {
    let block = u64::from(place.position) / ALIGN as u64 * ALIGN as u64;
    WantedRead {
        core: place.core,
        segment: place.segment,
        position: block.saturating_sub(BEHIND),
        len: WINDOW,
    }
}

fn whole_extent(found: &Found) -> WantedRead {
    let position = u64::from(found.place.position) / ALIGN as u64 * ALIGN as u64;
    let end = align_up(u64::from(found.place.position) + found.header.total_len() as u64);
    WantedRead {
        core: found.place.core,
        segment: found.place.segment,
        position,
        len: end - position,
    }
}
