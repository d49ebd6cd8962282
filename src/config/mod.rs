//! Flags, environment and file become one validated configuration.
