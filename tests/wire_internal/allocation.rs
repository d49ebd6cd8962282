//! A number in a frame must not size an allocation before the bytes behind it are there. Proven
//! with an allocator that remembers the largest request of each thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use bytes::Bytes;
use felix_uring::wire::internal::{decode_frame, FrameReader, Header, Kind, Payloads, ReadEvent};

use crate::vectors::{frame_of, lines};

pub struct LargestAllocation;

thread_local! {
    static LARGEST_BYTES: Cell<usize> = const { Cell::new(0) };
}

fn note(bytes: usize) {
    LARGEST_BYTES.with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: every request goes to `System` unchanged; noting a number in a const-initialised
// thread local neither allocates nor unwinds.
unsafe impl GlobalAlloc for LargestAllocation {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(new_size);
        // SAFETY: the caller's contract is the same, and `ptr` came from `System`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

/// The largest single allocation `work` asks for on this thread.
fn largest_allocation<T>(work: impl FnOnce() -> T) -> (usize, T) {
    LARGEST_BYTES.with(|largest| largest.set(0));
    let result = work();
    (LARGEST_BYTES.with(Cell::get), result)
}

#[test]
fn the_allocator_notices() {
    assert!(largest_allocation(|| vec![0u8; 100_000]).0 >= 100_000);
}

#[test]
fn decoding_never_allocates_by_a_number_it_read() {
    for file in ["internal-refused.jsonl", "internal-valid.jsonl"] {
        for vector in lines(file) {
            let frame = frame_of(&vector);
            let (bytes, _) = largest_allocation(|| decode_frame(frame));
            // The reference counts of the slices are all a decode needs.
            assert!(bytes <= 64, "{}: {bytes} bytes", vector["name"]);
        }
    }
    let (bytes, _) = largest_allocation(|| {
        Payloads::from_wire_section(Bytes::from_static(&[0, 1, 0, 0, 0, 0, 0, 1]))
    });
    assert!(bytes <= 64, "{bytes} bytes");
}

#[test]
fn the_reader_grows_only_with_the_bytes_that_arrived() {
    let header = Header {
        kind: Kind::ForwardPublish.code(),
        length_bytes: 64 << 20,
    };
    let mut reader = FrameReader::new();
    let mut arrived = 0;
    let chunk = Bytes::from(vec![7u8; 1200]);
    let (bytes, event) = largest_allocation(|| {
        reader.push(Bytes::copy_from_slice(&header.to_bytes()));
        reader.push(Bytes::from_static(b"12345678"));
        reader.next()
    });
    assert_eq!(event, None);
    assert!(bytes <= 16 << 10, "{bytes} bytes for a header and 8 bytes");
    for _ in 0..1000 {
        arrived += chunk.len();
        let (bytes, _) = largest_allocation(|| {
            reader.push(chunk.clone());
            reader.next()
        });
        assert!(
            bytes <= (2 * (arrived + 8)).max(16 << 10),
            "{bytes} bytes for {arrived}"
        );
    }
    assert_eq!(reader.buffered_bytes(), arrived + 8);
}

#[test]
fn the_body_of_an_unknown_kind_is_not_kept() {
    let length_bytes = 64 << 20;
    let header = Header {
        kind: 45,
        length_bytes,
    };
    let chunk = Bytes::from(vec![7u8; 1 << 20]);
    let mut reader = FrameReader::new();
    reader.push(Bytes::copy_from_slice(&header.to_bytes()));
    for pushed in 0..64 {
        reader.push(chunk.clone());
        let (bytes, event) = largest_allocation(|| reader.next());
        assert_eq!(bytes, 0);
        assert!(reader.buffered_bytes() <= 8);
        match event {
            None => assert!(pushed < 63),
            Some(event) => {
                assert_eq!(pushed, 63);
                assert!(matches!(event, ReadEvent::Unknown { kind: 45, correlation }
                    if correlation.0 == 0x0707_0707_0707_0707));
            }
        }
    }
    assert_eq!(reader.finish(), Ok(()));
}

#[test]
fn frames_within_one_chunk_are_slices_of_it() {
    let frames: Vec<Bytes> = lines("internal-valid.jsonl")
        .map(|v| frame_of(&v))
        .collect();
    let chunk = Bytes::from(frames.concat());
    let range = chunk.as_ptr_range();
    let mut reader = FrameReader::new();
    reader.push(chunk);
    let mut seen = 0;
    for event in reader.by_ref() {
        let ReadEvent::Frame { body, .. } = event else {
            panic!("{event:?}");
        };
        assert!(range.contains(&body.as_ptr()), "frame {seen} was copied");
        seen += 1;
    }
    assert_eq!(seen, frames.len());
}
