//! A segment that was rewritten without what nobody needs: frames of pieces instead of groups.
//!
//! Each extent that is kept lies in a *piece* together with the position it had in the segment as it was
//! written; places in indexes and back pointers go on naming that position. Pieces are packed into *frames*,
//! 4096-aligned, each with a header that tells everything about the segment, so that a damaged first block
//! does no harm.
//!
//! Invariants: positions ascend over the pieces of a file and lie in the segment as it was written; every
//! byte is covered by a checksum that is seeded with the directory's uuid, or is padding.

use super::segment::{MAX_SEGMENT_BYTES, SEGMENT_HEADER_BYTES};
use super::{
    align_up, get_u16, get_u32, get_u64, put_u16, put_u32, put_u64, DataUuid, HeaderFault, ALIGN,
};

/// Version in the header of a rewritten segment and its frames: builds that do not know it refuse the file.
pub const REWRITTEN_VERSION: u32 = 3;
/// First eight bytes of a frame.
pub const FRAME_MAGIC: u64 = u64::from_le_bytes(*b"FXFRAME1");
/// Bytes of a frame's header; pieces start right behind it.
pub const FRAME_HEADER_BYTES: usize = 128;
/// Bytes of a piece's header; the extent follows.
pub const PIECE_HEADER_BYTES: usize = 12;
/// Used bytes at which a frame takes no further piece: what one entry of a reader's table stands for.
pub const FRAME_BYTES: usize = 64 * 1024;
const CRC_AT: usize = FRAME_HEADER_BYTES - 4;
/// The frame is the last of its file.
const FLAG_LAST: u32 = 1;

/// What is known of a rewritten segment as a whole; in the file's header and in every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewritten {
    /// First group the segment had.
    pub first_group: u64,
    /// Last group it had.
    pub last_group: u64,
    /// Where the log ended before the first group: segment and position.
    pub link: (u64, u64),
    /// Position one past the last group.
    pub end: u64,
    /// Wall-clock microseconds of its newest group.
    pub newest_time_us: u64,
    /// Highest group of the core log that was durable when it was decided what goes: it vouches for every
    /// group up to that one, because without them what went may be needed.
    pub durable_group: u64,
}

impl Rewritten {
    #[cfg(test)]
    pub(super) const BYTES: usize = 56;

    /// Whether both are about the same segment, whenever it was rewritten.
    pub fn is_same_segment(&self, other: &Self) -> bool {
        let durable_group = other.durable_group;
        Self {
            durable_group,
            ..*self
        } == *other
    }

    pub(super) fn encode(&self, out: &mut [u8]) {
        let fields = [
            self.first_group,
            self.last_group,
            self.link.0,
            self.link.1,
            self.end,
            self.newest_time_us,
            self.durable_group,
        ];
        for (at, field) in fields.into_iter().enumerate() {
            put_u64(out, at * 8, field);
        }
    }

    /// None when its fields contradict each other or `seq`, the sequence of the segment.
    pub(super) fn decode(bytes: &[u8], seq: u64) -> Option<Self> {
        let found = Self {
            first_group: get_u64(bytes, 0),
            last_group: get_u64(bytes, 8),
            link: (get_u64(bytes, 16), get_u64(bytes, 24)),
            end: get_u64(bytes, 32),
            newest_time_us: get_u64(bytes, 40),
            durable_group: get_u64(bytes, 48),
        };
        let is_sane = found.first_group > 0
            && found.first_group <= found.last_group
            && found.last_group <= found.durable_group
            && found.durable_group < u64::MAX
            && found.link.0 < seq
            && (SEGMENT_HEADER_BYTES..=MAX_SEGMENT_BYTES).contains(&found.end);
        is_sane.then_some(found)
    }
}

/// Decoded header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Core directory.
    pub core: u16,
    /// Number of cores of the start that created the segment.
    pub core_count: u16,
    /// Sequence of the segment.
    pub seq: u64,
    /// Boot epoch that created it, and wrote every group in it.
    pub boot_epoch: u64,
    /// The segment as a whole.
    pub whole: Rewritten,
    /// Number of the frame in its file, from 0.
    pub index: u32,
    /// Whether it is the last one.
    pub is_last: bool,
    /// Bytes in use, header included; the rest up to the next block is zero.
    pub used_len: u32,
    /// Pieces in it.
    pub pieces: u32,
    /// Records in them.
    pub records: u32,
    /// Position of the first extent in it; 0 when it holds none.
    pub first_position: u32,
    /// CRC-32C of the used bytes behind the header.
    pub body_crc: u32,
}

impl FrameHeader {
    /// Bytes on disk.
    pub fn total_len(&self) -> u64 {
        align_up(u64::from(self.used_len))
    }

    /// Fills in length and checksum of the body from `frame`, pads it to whole blocks, and writes the header.
    pub fn seal(mut self, uuid: &DataUuid, frame: &mut Vec<u8>) -> Self {
        self.used_len = frame.len() as u32;
        self.body_crc = crc32c::crc32c(&frame[FRAME_HEADER_BYTES..]);
        frame.resize(frame.len().next_multiple_of(ALIGN), 0);
        frame[..FRAME_HEADER_BYTES].fill(0);
        put_u64(frame, 0, FRAME_MAGIC);
        put_u32(frame, 8, REWRITTEN_VERSION);
        put_u16(frame, 12, self.core);
        put_u16(frame, 14, self.core_count);
        put_u64(frame, 16, self.seq);
        put_u64(frame, 24, self.boot_epoch);
        self.whole.encode(&mut frame[32..]);
        put_u32(frame, 88, self.index);
        put_u32(frame, 92, if self.is_last { FLAG_LAST } else { 0 });
        put_u32(frame, 96, self.used_len);
        put_u32(frame, 100, self.pieces);
        put_u32(frame, 104, self.records);
        put_u32(frame, 108, self.first_position);
        put_u32(frame, 112, self.body_crc);
        let crc = header_crc(uuid, frame);
        put_u32(frame, CRC_AT, crc);
        self
    }

    /// Decodes a header. Whether the frame belongs here is the caller's question.
    pub fn decode(uuid: &DataUuid, bytes: &[u8]) -> Result<Self, HeaderFault> {
        if bytes.len() < FRAME_HEADER_BYTES {
            return Err(HeaderFault::Short);
        }
        if get_u64(bytes, 0) != FRAME_MAGIC {
            return Err(HeaderFault::Magic);
        }
        if header_crc(uuid, bytes) != get_u32(bytes, CRC_AT) {
            return Err(HeaderFault::Checksum);
        }
        let version = get_u32(bytes, 8);
        if version != REWRITTEN_VERSION {
            return Err(HeaderFault::Version(version));
        }
        let seq = get_u64(bytes, 16);
        let header = Self {
            core: get_u16(bytes, 12),
            core_count: get_u16(bytes, 14),
            seq,
            boot_epoch: get_u64(bytes, 24),
            whole: Rewritten::decode(&bytes[32..], seq).ok_or(HeaderFault::Field)?,
            index: get_u32(bytes, 88),
            is_last: get_u32(bytes, 92) & FLAG_LAST != 0,
            used_len: get_u32(bytes, 96),
            pieces: get_u32(bytes, 100),
            records: get_u32(bytes, 104),
            first_position: get_u32(bytes, 108),
            body_crc: get_u32(bytes, 112),
        };
        let is_sane = header.used_len as usize >= FRAME_HEADER_BYTES
            && u64::from(header.used_len) <= MAX_SEGMENT_BYTES
            && u64::from(header.first_position) < header.whole.end;
        is_sane.then_some(header).ok_or(HeaderFault::Field)
    }

    /// Whether the used bytes are the ones that were sealed.
    pub fn body_matches(&self, frame: &[u8]) -> bool {
        let body = frame.get(FRAME_HEADER_BYTES..self.used_len as usize);
        body.is_some_and(|body| crc32c::crc32c(body) == self.body_crc)
    }
}

fn header_crc(uuid: &DataUuid, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(uuid), &bytes[..CRC_AT])
}

/// What lies in a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Position of the extent in the segment as it was written; 0: the piece is a log's name, whose own
    /// extent was dropped.
    pub position: u32,
    /// The extent as it was written, or the encoded name.
    pub bytes: &'a [u8],
}

/// Appends a piece to a frame that is being built.
pub fn push_piece(uuid: &DataUuid, seq: u64, frame: &mut Vec<u8>, piece: Piece<'_>) {
    let at = frame.len();
    frame.resize(at + PIECE_HEADER_BYTES, 0);
    put_u32(frame, at, piece.position);
    put_u32(frame, at + 4, piece.bytes.len() as u32);
    let crc = piece_crc(uuid, seq, &frame[at..at + 8]);
    put_u32(frame, at + 8, crc);
    frame.extend_from_slice(piece.bytes);
}

/// The piece at `at` of a frame's used bytes, and where the next one begins; none when it is not readable.
/// Its bytes are cut short where the frame is.
pub fn piece_at<'a>(
    uuid: &DataUuid,
    seq: u64,
    used: &'a [u8],
    at: usize,
) -> Option<(Piece<'a>, usize)> {
    let header = used.get(at..at.checked_add(PIECE_HEADER_BYTES)?)?;
    if piece_crc(uuid, seq, &header[..8]) != get_u32(header, 8) {
        return None;
    }
    let start = at + PIECE_HEADER_BYTES;
    let end = start.checked_add(get_u32(header, 4) as usize)?;
    let piece = Piece {
        position: get_u32(header, 0),
        bytes: &used[start..end.min(used.len())],
    };
    Some((piece, end))
}

fn piece_crc(uuid: &DataUuid, seq: u64, fields: &[u8]) -> u32 {
    let seed = crc32c::crc32c_append(crc32c::crc32c(uuid), &seq.to_le_bytes());
    crc32c::crc32c_append(seed, fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: DataUuid = [9; 16];

    fn sample() -> (FrameHeader, Vec<u8>) {
        let mut frame = vec![0; FRAME_HEADER_BYTES];
        for (position, len) in [(0, 20), (4224, 100), (9000, 5000)] {
            let bytes = vec![position as u8 | 1; len];
            let bytes = &bytes;
            push_piece(&UUID, 4, &mut frame, Piece { position, bytes });
        }
        let header = FrameHeader {
            core: 1,
            core_count: 2,
            seq: 4,
            boot_epoch: 6,
            whole: Rewritten {
                first_group: 10,
                last_group: 19,
                link: (3, 8192),
                end: 65_536,
                newest_time_us: 77,
                durable_group: 24,
            },
            index: 2,
            is_last: true,
            used_len: 0,
            pieces: 3,
            records: 5,
            first_position: 4224,
            body_crc: 0,
        };
        let header = header.seal(&UUID, &mut frame);
        (header, frame)
    }

    #[test]
    fn round_trip_and_every_flipped_bit() {
        let (header, frame) = sample();
        assert_eq!(FrameHeader::decode(&UUID, &frame), Ok(header));
        assert_eq!(frame.len() as u64, header.total_len());
        assert!(header.body_matches(&frame));
        assert!(FrameHeader::decode(&[1; 16], &frame).is_err());
        for bit in 0..FRAME_HEADER_BYTES * 8 {
            let mut bad = frame.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(FrameHeader::decode(&UUID, &bad).is_err(), "bit {bit}");
        }
        for byte in FRAME_HEADER_BYTES..header.used_len as usize {
            let mut bad = frame.clone();
            bad[byte] ^= 4;
            assert!(!header.body_matches(&bad), "byte {byte}");
        }
        assert!(!header.body_matches(&frame[..4096]));
    }

    #[test]
    fn pieces_are_bound_to_their_segment_and_end_with_the_frame() {
        let (header, frame) = sample();
        let used = &frame[..header.used_len as usize];
        let mut at = FRAME_HEADER_BYTES;
        let mut found = Vec::new();
        while let Some((piece, next)) = piece_at(&UUID, 4, used, at) {
            found.push((piece.position, piece.bytes.len()));
            at = next;
        }
        assert_eq!(found, [(0, 20), (4224, 100), (9000, 5000)]);
        assert_eq!(at, used.len());
        assert_eq!(piece_at(&UUID, 5, used, FRAME_HEADER_BYTES), None);
        let cut = piece_at(&UUID, 4, &used[..150], FRAME_HEADER_BYTES);
        assert_eq!(cut.map(|(piece, _)| piece.bytes.len()), Some(10));
        assert_eq!(piece_at(&UUID, 4, used, usize::MAX), None);
    }
}
