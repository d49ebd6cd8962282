//! One pinned executor a core and the bounded lanes between them.
