#![no_main]

use felix_uring_fuzz::internal_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| internal_wire::read_stream(data));
