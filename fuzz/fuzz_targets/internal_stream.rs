#![no_main]

#[path = "../bodies/internal_wire.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| body::read_stream(data));
