//! Starting and stopping a local cluster of broker processes.
