//! A segment file open for reading, rewritten or not.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use crate::format::rewritten::{FrameHeader, FRAME_HEADER_BYTES};
use crate::format::segment::{SegmentHeader, SEGMENT_HEADER_BYTES};
use crate::format::{DataUuid, ALIGN};
use crate::recovery::{FileSource, SegmentSource};
use crate::rewrite::{FrameTable, RewrittenMap};
use crate::slab::{Region, SlabWriter};
use crate::walk::WantedRead;

/// A file is replaced seldom; one that is gone is not there the second time either.
const LOOK_UPS_MAX: u32 = 4;

pub(super) struct SegmentFile {
    source: FileSource,
    map: Option<Arc<RewrittenMap>>,
    is_newer: bool,
}

impl SegmentFile {
    /// Opens the file that has the name now; `scanned` is the map of the file that had it when the directory
    /// was scanned. A rewritten file is never as long as the one before.
    pub fn open(
        path: &Path,
        uuid: &DataUuid,
        seq: u64,
        scanned: Option<&Arc<RewrittenMap>>,
    ) -> std::io::Result<Self> {
        let source = opened(path)?;
        if let Some(map) = scanned.filter(|map| map.file_bytes() == source.len()) {
            return Ok(Self {
                source,
                map: Some(Arc::clone(map)),
                is_newer: false,
            });
        }
        let block = read(&source, 0, ALIGN as u64)?;
        let header = SegmentHeader::decode(block.as_ref()).ok();
        let whole = header.and_then(|header| header.rewritten);
        let map = match whole {
            Some(whole) => Some(Arc::new(map_of(&source, uuid, seq, whole.end)?)),
            None => None,
        };
        Ok(Self {
            source,
            map,
            is_newer: whole.is_some(),
        })
    }

    /// Whether the file took the place of the one that was scanned.
    pub fn is_newer_than_the_scan(&self) -> bool {
        self.is_newer
    }

    pub fn read(&self, wanted: WantedRead) -> std::io::Result<Bytes> {
        let Some(map) = &self.map else {
            return Ok(Bytes::from_owner(read(
                &self.source,
                wanted.position,
                wanted.len,
            )?));
        };
        let range = map.file_range(wanted.position, wanted.len);
        let bytes = read(&self.source, range.start, range.end - range.start)?;
        let bytes = map.gather(bytes.as_ref(), wanted.position, wanted.len);
        Ok(Bytes::from(bytes))
    }
}

/// The file that has the name; looked up again when another took it meanwhile.
fn opened(path: &Path) -> std::io::Result<FileSource> {
    let mut left = LOOK_UPS_MAX;
    loop {
        let source = FileSource::new(path)?;
        left -= 1;
        match source.open() {
            Err(error) if error.kind() == ErrorKind::NotFound && left > 0 => {}
            other => return other.map(|()| source),
        }
    }
}

fn read(source: &FileSource, position: u64, len: u64) -> std::io::Result<Region> {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let mut writer = SlabWriter::new(len);
    let done = source.read_at(position, &mut writer.tail()[..len])?;
    Ok(writer.split(done).freeze())
}

fn map_of(
    source: &FileSource,
    uuid: &DataUuid,
    seq: u64,
    end: u64,
) -> std::io::Result<RewrittenMap> {
    let mut table = FrameTable::default();
    let mut position = SEGMENT_HEADER_BYTES;
    while position < source.len() {
        let block = read(source, position, ALIGN as u64)?;
        let bytes = block.as_ref();
        let frame = FrameHeader::decode(uuid, &bytes[..bytes.len().min(FRAME_HEADER_BYTES)]);
        match frame.ok().filter(|frame| frame.seq == seq) {
            Some(frame) => {
                table.add(&frame, position);
                position += frame.total_len();
            }
            None => position += ALIGN as u64,
        }
    }
    Ok(RewrittenMap::new(*uuid, seq, end, table, source.len()))
}
