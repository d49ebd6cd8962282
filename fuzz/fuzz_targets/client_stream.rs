#![no_main]

use felix_uring_fuzz::client_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| client_wire::read_stream(data));
