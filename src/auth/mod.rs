//! Verifying client tokens and their permissions.
