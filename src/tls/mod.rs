//! Certificates and keys: loading, checking, making.
