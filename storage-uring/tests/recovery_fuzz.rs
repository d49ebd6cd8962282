//! The body of the recovery fuzz target on seeded inputs.
//!
//! `FELIX_FUZZ_INPUTS=1000000` runs that many instead of the suite's share, `FELIX_FUZZ_SEED` names the
//! first.

#[path = "../../fuzz/src/recovery.rs"]
mod fuzzed;

fn number(variable: &str, otherwise: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(otherwise, |text| text.parse().expect("a number"))
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn seeded_damage_is_recovered_the_same_way_twice() {
    let first = number("FELIX_FUZZ_SEED", 1);
    let inputs = number("FELIX_FUZZ_INPUTS", 600);
    for seed in first..first + inputs {
        let mut state = mixed(seed);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed(state)
        };
        let script = 20 + next() % 200;
        let mut input: Vec<u8> = (0..script).map(|_| next() as u8 & 0xfe).collect();
        // The script ends, the damage begins; sometimes there is none.
        input.push(0xff);
        input.extend((0..next() % 60).map(|_| next() as u8));
        let ran = std::panic::catch_unwind(|| fuzzed::recover_damaged(&input));
        assert!(
            ran.is_ok(),
            "replay with FELIX_FUZZ_SEED={seed} FELIX_FUZZ_INPUTS=1"
        );
    }
}
