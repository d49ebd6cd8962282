//! The internal protocol's frames.
