//! Control-thread HTTP: liveness, readiness, status and metrics.
