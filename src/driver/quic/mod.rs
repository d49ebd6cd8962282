//! Everything QUIC of one core: a [`Pump`] drives quinn-proto over UDP sockets.
//!
//! The pump owns sockets, connections, timers and send queues. It knows nothing of frames, requests or
//! shards: it reports events and takes commands. It is single-threaded, takes time as an argument and does
//! I/O only through the [`DatagramIo`] seam, so that tests run two pumps on virtual time.
//!
//! Invariants: a connection id names its core and a datagram of another core never reaches the state
//! machine of this one; every send error is counted; work per turn, connections and handshakes are bounded.

mod buffers;
mod close_gate;
mod commands;
mod conn;
mod event;
mod hello;
mod keys;
mod outbox;
pub mod probe;
mod pump;
mod receive;
mod report;
mod send_queue;
mod settings;
mod socket;
mod wait;

pub use conn::StreamMap;
pub use event::{
    CloseReason, ConnId, ConnStats, EndpointId, PumpEvent, Read, ReadEnd, Refuser, Side,
    StrayDatagram, StreamError, StreamId,
};
pub use hello::MAX_HELLO_BYTES;
pub use keys::{SharedKeys, CID_BYTES};
pub use outbox::SendCounters;
pub use pump::{Pump, PumpCounters};
pub use settings::{
    client_config, EndpointSpec, PumpConfig, ServerSetup, ServerTls, SetupError, TransportSettings,
    ETHERNET_UDP_PAYLOAD_BYTES, LARGEST_PROBED_UDP_PAYLOAD_BYTES, MAX_UDP_PAYLOAD_BYTES,
};
pub use socket::{bind_reuseport, bind_udp, DatagramIo, UdpIo};
pub use wait::SPIN_BUDGET;
