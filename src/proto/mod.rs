//! Decisions without I/O, clocks or randomness.
