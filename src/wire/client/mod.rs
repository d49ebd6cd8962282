//! The client protocol's frames.
