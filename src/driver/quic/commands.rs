//! What a caller can ask of a pump: connections, streams, bytes.
//!
//! Nothing here sends: packets leave in [`Pump::flush`], so that answers of one turn share them.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use quinn_proto::{ConnectError, Dir, ReadError, StreamId};

use super::close_gate;
use super::conn::{Conn, Phase};
use super::event::{CloseReason, ConnId, ConnStats, EndpointId, Read, ReadEnd, StreamError};
use super::pump::{mark_dirty, Pump};

impl Pump {
    /// Dials. `Connected` or `HandshakeFailed` follows.
    pub fn connect(
        &mut self,
        endpoint: EndpointId,
        remote: SocketAddr,
        server_name: &str,
        config: quinn_proto::ClientConfig,
        now: Instant,
    ) -> Result<ConnId, ConnectError> {
        let ep = self
            .endpoints
            .get_mut(endpoint.index())
            .ok_or(ConnectError::EndpointStopping)?;
        if ep.is_full() {
            return Err(ConnectError::EndpointStopping);
        }
        let (handle, proto) = ep.proto.connect(now, config, remote, server_name)?;
        Ok(self.adopt(endpoint, handle, proto, now))
    }

    /// Opens a stream with answers.
    pub fn open_bi(&mut self, conn: ConnId) -> Result<StreamId, StreamError> {
        self.open(conn, Dir::Bi)
    }

    /// Opens a stream without answers.
    pub fn open_uni(&mut self, conn: ConnId) -> Result<StreamId, StreamError> {
        self.open(conn, Dir::Uni)
    }

    fn open(&mut self, id: ConnId, dir: Dir) -> Result<StreamId, StreamError> {
        let conn = self.live(id).ok_or(StreamError::ConnectionClosed)?;
        match conn.proto.streams().open(dir) {
            Some(stream) => Ok(stream),
            None => {
                conn.wants_streams[dir as usize] = true;
                Err(StreamError::NoCredit)
            }
        }
    }

    /// The next bytes of a stream, at most `max_bytes`, not copied. After `Finished` or `Reset` the
    /// stream is forgotten and reads `Closed`.
    pub fn read(&mut self, id: ConnId, stream: StreamId, max_bytes: usize) -> Read {
        let mut chunk = None;
        let end = self.read_chunks(id, stream, max_bytes, 1, |c| chunk = Some(c));
        match (chunk, end) {
            (Some(chunk), _) => Read::Chunk(chunk),
            (None, ReadEnd::Blocked | ReadEnd::Limit) => Read::Blocked,
            (None, ReadEnd::Finished) => Read::Finished,
            (None, ReadEnd::Reset(code)) => Read::Reset(code),
            (None, ReadEnd::Closed) => Read::Closed,
        }
    }

    /// Gives `each` the next chunks of a stream, at most `max_bytes` together, and says why it stopped.
    /// Cheaper than [`read`](Self::read) chunk by chunk.
    pub fn read_each(
        &mut self,
        id: ConnId,
        stream: StreamId,
        max_bytes: usize,
        each: impl FnMut(Bytes),
    ) -> ReadEnd {
        self.read_chunks(id, stream, max_bytes, usize::MAX, each)
    }

    fn read_chunks(
        &mut self,
        id: ConnId,
        stream: StreamId,
        max_bytes: usize,
        max_chunks: usize,
        mut each: impl FnMut(Bytes),
    ) -> ReadEnd {
        // A closed connection may still hold bytes that came before its end.
        let Some(conn) = self.conns.get_mut(id).filter(|c| c.may_read(stream)) else {
            return ReadEnd::Closed;
        };
        let mut recv = conn.proto.recv_stream(stream);
        let Ok(mut chunks) = recv.read(true) else {
            return ReadEnd::Closed;
        };
        let (mut bytes_left, mut chunks_left) = (max_bytes, max_chunks);
        let end = loop {
            if bytes_left == 0 || chunks_left == 0 {
                break ReadEnd::Limit;
            }
            match chunks.next(bytes_left) {
                Ok(Some(chunk)) => {
                    bytes_left -= chunk.bytes.len();
                    chunks_left -= 1;
                    each(chunk.bytes);
                }
                Ok(None) => break ReadEnd::Finished,
                Err(ReadError::Blocked) => break ReadEnd::Blocked,
                Err(ReadError::Reset(code)) => break ReadEnd::Reset(code.into_inner()),
            }
        };
        if chunks.finalize().should_transmit() {
            mark_dirty(conn, &mut self.dirty);
        }
        end
    }

    /// Queues bytes on a stream; they leave as flow control allows. Large parts are not copied.
    pub fn send(&mut self, id: ConnId, stream: StreamId, bytes: Bytes) -> Result<(), StreamError> {
        self.send_parts(id, stream, [bytes])
    }

    /// Queues several parts in order, as if they were one.
    pub fn send_parts(
        &mut self,
        id: ConnId,
        stream: StreamId,
        parts: impl IntoIterator<Item = Bytes>,
    ) -> Result<(), StreamError> {
        let conn = self.writable(id, stream)?;
        let queued = conn.queued_bytes();
        conn.enqueue(stream, parts)?;
        let added = conn.queued_bytes() - queued;
        self.queued_bytes += added;
        self.mark(id);
        Ok(())
    }

    /// Ends a stream after what is queued on it. `StreamFinished` follows when the peer has it all.
    pub fn finish(&mut self, id: ConnId, stream: StreamId) -> Result<(), StreamError> {
        let conn = self.writable(id, stream)?;
        conn.request_finish(stream)?;
        self.mark(id);
        Ok(())
    }

    /// Abandons a stream; what is queued or not yet acknowledged on it is dropped. What is sent on it
    /// afterwards is dropped and counted.
    pub fn reset(&mut self, id: ConnId, stream: StreamId, code: u32) -> Result<(), StreamError> {
        let conn = self.writable(id, stream)?;
        let dropped = conn.drop_queue(stream);
        let reset = conn.proto.send_stream(stream).reset(code.into());
        self.queued_bytes -= dropped;
        reset.map_err(|_| StreamError::StreamClosed)?;
        self.mark(id);
        Ok(())
    }

    /// Tells the peer that no more of this stream is wanted; unread bytes are dropped.
    pub fn stop_sending(
        &mut self,
        id: ConnId,
        stream: StreamId,
        code: u32,
    ) -> Result<(), StreamError> {
        let conn = self.live(id).ok_or(StreamError::ConnectionClosed)?;
        if !conn.may_read(stream) {
            return Err(StreamError::StreamClosed);
        }
        conn.proto
            .recv_stream(stream)
            .stop(code.into())
            .map_err(|_| StreamError::StreamClosed)?;
        self.mark(id);
        Ok(())
    }

    /// Bytes queued on a stream that flow control has not let through.
    pub fn queued_bytes(&self, id: ConnId, stream: StreamId) -> usize {
        self.conns
            .get(id)
            .map_or(0, |c| c.stream_queued_bytes(stream))
    }

    /// Bytes queued on all streams of a connection that flow control has not let through.
    pub fn conn_queued_bytes(&self, id: ConnId) -> usize {
        self.conns.get(id).map_or(0, Conn::queued_bytes)
    }

    /// Bytes queued on all streams of all connections that flow control has not let through.
    pub fn all_queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Closes a connection at once; what is queued on it is dropped. `Closed`
    /// follows, or `HandshakeFailed` if it was not connected yet.
    pub fn close(&mut self, id: ConnId, code: u32, reason: &[u8], now: Instant) {
        if let Some(conn) = self.live(id) {
            conn.proto
                .close(now, code.into(), Bytes::copy_from_slice(reason));
            conn.close_unsent = true;
            close_gate::open(&conn.proto);
            self.report_end(id.index, CloseReason::LocallyClosed);
        }
    }

    /// Closes every connection. Keep turning until [`is_drained`](Self::is_drained), for a bounded time.
    pub fn close_all(&mut self, code: u32, reason: &[u8], now: Instant) {
        let ids: Vec<ConnId> = self.conns.iter().map(|c| c.id).collect();
        for id in ids {
            self.close(id, code, reason, now);
        }
    }

    /// Whether no connection is alive or closing.
    pub fn is_drained(&self) -> bool {
        self.conns.len() == 0
    }

    /// Whether every close has left and nothing but waiting for stray packets remains: a process may
    /// exit then without leaving a peer to its idle timeout.
    pub fn is_quiet(&self) -> bool {
        self.dirty.is_empty()
            && self
                .conns
                .iter()
                .all(|c| c.phase == Phase::Closed && !c.close_unsent)
            && self.endpoints.iter().all(|e| !e.outbox.is_blocked())
    }

    /// What the connection has seen so far; `None` for an id that names nothing.
    pub fn conn_stats(&self, id: ConnId) -> Option<ConnStats> {
        self.conns.get(id).map(|c| c.proto.stats().into())
    }

    /// The peer's current address.
    pub fn remote_addr(&self, id: ConnId) -> Option<SocketAddr> {
        self.conns.get(id).map(|c| c.proto.remote_address())
    }

    /// The endpoint a connection lives on.
    pub fn endpoint_of(&self, id: ConnId) -> Option<EndpointId> {
        self.conns.get(id).map(|c| c.endpoint)
    }

    /// Whether the id names a connection that is not over.
    pub fn is_live(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|c| c.phase != Phase::Closed)
    }

    fn live(&mut self, id: ConnId) -> Option<&mut Conn> {
        self.conns.get_mut(id).filter(|c| c.phase != Phase::Closed)
    }

    fn writable(&mut self, id: ConnId, stream: StreamId) -> Result<&mut Conn, StreamError> {
        let conn = self.live(id).ok_or(StreamError::ConnectionClosed)?;
        if conn.may_write(stream) {
            Ok(conn)
        } else {
            Err(StreamError::StreamClosed)
        }
    }

    fn mark(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            mark_dirty(conn, &mut self.dirty);
        }
    }
}
