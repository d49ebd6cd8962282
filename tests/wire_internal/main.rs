//! The internal wire against its vectors, its bounds and arbitrary input.

mod allocation;
mod bounds;
mod properties;
mod sides;
mod vectors;

#[path = "../../fuzz/src/internal_wire.rs"]
mod fuzz_bodies;

#[global_allocator]
static ALLOCATOR: allocation::LargestAllocation = allocation::LargestAllocation;
