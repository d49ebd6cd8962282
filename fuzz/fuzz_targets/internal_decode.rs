#![no_main]

#[path = "../bodies/internal_wire.rs"]
mod body;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    body::decode_one_frame(data);
    body::decode_as_every_kind(data);
});
