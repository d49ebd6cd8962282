//! What lies in a segment file, for `inspect`.

use super::{GroupView, SegmentView};
use crate::datadir::Meta;
use crate::error::StorageError;
use crate::format::group::{GroupHeader, GROUP_HEADER_BYTES};
use crate::format::rewritten::{FrameHeader, FRAME_HEADER_BYTES};
use crate::format::segment::SEGMENT_HEADER_BYTES;
use crate::format::{HeaderFault, ALIGN};
use crate::recovery::Window;

/// Every group (or frame) with a readable header.
pub(super) fn each(
    meta: &Meta,
    view: &SegmentView,
    window: &mut Window,
    on_group: &mut impl FnMut(&SegmentView, &GroupView),
) -> Result<(), StorageError> {
    if view.rewritten_groups.is_some() {
        each_frame(meta, view, window, on_group);
        return Ok(());
    }
    let mut position = SEGMENT_HEADER_BYTES;
    while position < view.file_bytes {
        match GroupHeader::decode(&meta.uuid, window.get(position, GROUP_HEADER_BYTES)) {
            Ok(header) if header.segment == view.segment && header.core == view.core => {
                let group = GroupView {
                    position,
                    total_len: header.total_len,
                    used_len: header.used_len,
                    group: header.group,
                    durable_group: header.durable_group,
                    boot_epoch: header.boot_epoch,
                    extents: header.extents,
                    records: header.records,
                    closing: header.flags & crate::format::group::GROUP_FLAG_CLOSE != 0,
                    body_matches: header
                        .body_matches(window.get(position, header.total_len as usize)),
                };
                on_group(view, &group);
                position += header.total_len.max(ALIGN as u64);
            }
            Err(HeaderFault::Version(found)) => {
                let known = crate::format::FORMAT_VERSION;
                return Err(StorageError::UnknownVersion {
                    file: view.file.clone(),
                    found,
                    known,
                });
            }
            Ok(_) | Err(_) => position += ALIGN as u64,
        }
    }
    Ok(())
}

fn each_frame(
    meta: &Meta,
    view: &SegmentView,
    window: &mut Window,
    on_group: &mut impl FnMut(&SegmentView, &GroupView),
) {
    let mut position = SEGMENT_HEADER_BYTES;
    while position < view.file_bytes {
        let found = FrameHeader::decode(&meta.uuid, window.get(position, FRAME_HEADER_BYTES));
        let here = found
            .ok()
            .filter(|header| (header.seq, header.core) == (view.segment, view.core));
        let Some(header) = here else {
            position += ALIGN as u64;
            continue;
        };
        let used_len = u64::from(header.used_len);
        let frame = GroupView {
            position,
            total_len: header.total_len(),
            used_len,
            group: header.whole.last_group,
            durable_group: header.whole.last_group,
            boot_epoch: header.boot_epoch,
            extents: header.pieces,
            records: header.records,
            closing: false,
            body_matches: header.body_matches(window.get(position, used_len as usize)),
        };
        on_group(view, &frame);
        position += header.total_len();
    }
}
