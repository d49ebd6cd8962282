//! Client connections: streams, frames, and what each frame is handed to.
//!
//! [`StreamSession`] decides what a stream is owed and how it ends; this file reads frames into it
//! and carries out what it says. What a request means is in the files beside.
//!
//! Bounds: frames of 64 KiB before a stream has authenticated and 16 MiB after; requests owed of
//! one stream ([`StreamLimits`]); request bytes in work of one connection
//! ([`Settings::client_in_flight_bytes`](super::Settings)). Past any of them the stream is not
//! read, and the transport's window holds the client back. Frames that have not come whole are
//! bounded by connection and by core ([`Core::bound_unfinished`]): what comes past that is refused.

mod auth;
mod cache;
mod connection;
mod events;
mod group;
mod publish;
mod requests;
mod subscribe;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;

use crate::ids::NodeId;
use crate::metrics::FrameFault;
use crate::proto::client_session::{
    classify, classify_error, classify_oversize, ConnectionSession, DeclaredWidths, Incoming,
    Reply, Requested, StreamAction, StreamDirection, StreamSession, Verdict,
};
use crate::proto::MonoTime;
use crate::wire::client::{
    Answer, FatalReason, FrameError, FrameReader, HeaderError, ReadEvent, ReadLimits, Refusal,
    ToBroker,
};

use super::timers::Timer;
use super::{Core, MAX_UNTAKEN_ANSWER_BYTES};
use crate::driver::quic::{ConnId, ReadEnd, StreamId, StreamMap};
use auth::Identity;

pub(super) use auth::server_offer;
pub(super) use cache::ClientCache;
pub(super) use events::WaitingForRoom;
pub(super) use group::ClientGroup;
pub(super) use publish::ClientPublish;
pub(super) use subscribe::EventStream;

/// Stream bytes read in one go before other streams get their turn.
const READ_QUANTUM_BYTES: usize = 1 << 20;

/// One client connection.
pub(super) struct ClientConn {
    remote: SocketAddr,
    session: ConnectionSession,
    /// Boxed: the table of a client's dozens of streams is half empty.
    streams: StreamMap<Box<ClientStream>>,
    /// Of the stream that authenticated last: the others mostly show the same token.
    last_identity: Option<Rc<Identity>>,
    /// Bytes of publishes and cache operations taken and not answered.
    in_flight_bytes: usize,
    /// Bytes of frames that have not come whole, on all its streams.
    buffered_bytes: usize,
    /// Streams not read because of a bound.
    paused: Vec<StreamId>,
    /// Subscriptions by the event stream that carries them.
    subscriptions: HashMap<StreamId, u64>,
    next_subscription_id: u64,
    /// Unlike any other connection's of this broker, on any core.
    session_number: u64,
    /// Polls that may be waiting, by the stream they came on.
    polls: HashMap<StreamId, u64>,
}

struct ClientStream {
    reader: FrameReader,
    session: StreamSession,
    /// Bytes of its last frame that came without the rest, when last looked at.
    buffered_bytes: usize,
    /// The client's end was read; frames before it may still wait for a bound.
    end_seen: bool,
    /// Set once the stream has authenticated.
    identity: Option<Rc<Identity>>,
    /// When the timer heap looks at this stream next.
    timer_at: Option<MonoTime>,
    /// The last request of this stream that was forwarded to each broker; keeps the order among
    /// forwards. As many entries as there are brokers at most.
    last_forwards: Vec<(NodeId, u64)>,
    /// The widths declared on the stream, for what is published after them.
    widths: Option<Box<DeclaredWidths>>,
}

impl ClientConn {
    /// Forgets a stream; the bytes it had buffered.
    fn forget_stream(&mut self, stream: StreamId) -> usize {
        let gone = self.streams.remove(&stream);
        let held = gone.map_or(0, |gone| gone.buffered_bytes);
        self.buffered_bytes -= held;
        held
    }

    /// The widths declared on one of its streams, if any were.
    fn widths_of(&self, stream: StreamId) -> Option<&DeclaredWidths> {
        self.streams.get(&stream)?.widths.as_deref()
    }
}

impl Core {
    pub(super) fn on_client_stream_opened(&mut self, conn: ConnId, stream: StreamId, bi: bool) {
        let limits = self.settings.stream_limits;
        let is_draining = self.is_draining;
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let direction = match bi {
            true => StreamDirection::Bidirectional,
            false => StreamDirection::FromClient,
        };
        let mut session = StreamSession::new(direction, limits);
        if is_draining {
            session.begin_drain();
        }
        let state = ClientStream {
            reader: FrameReader::new(ReadLimits::UNAUTHENTICATED),
            session,
            buffered_bytes: 0,
            end_seen: false,
            identity: None,
            timer_at: None,
            last_forwards: Vec::new(),
            widths: None,
        };
        client.streams.insert(stream, Box::new(state));
    }

    pub(super) fn on_client_readable(&mut self, conn: ConnId, stream: StreamId) {
        let limit = self.settings.client_in_flight_bytes;
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let Some(state) = client.streams.get_mut(&stream) else {
            return;
        };
        if client.in_flight_bytes >= limit || !state.session.may_read() {
            if !client.paused.contains(&stream) {
                client.paused.push(stream);
            }
            return;
        }
        // Read on when the client has taken its answers: `Drained` says so.
        if self.pump.queued_bytes(conn, stream) > MAX_UNTAKEN_ANSWER_BYTES {
            return;
        }
        let mut given_up = None;
        if !state.end_seen {
            let mut read_bytes = 0;
            let end = self
                .pump
                .read_each(conn, stream, READ_QUANTUM_BYTES, |chunk: Bytes| {
                    read_bytes += chunk.len() as u64;
                    state.reader.push(chunk);
                });
            match end {
                ReadEnd::Blocked => {}
                ReadEnd::Limit => self.read_again.push((conn, stream)),
                ReadEnd::Finished => state.end_seen = true,
                ReadEnd::Reset(_) | ReadEnd::Closed => {
                    state.session.on_lost();
                    given_up = client.polls.remove(&stream);
                }
            }
            self.metrics.client_bytes_in.add(read_bytes);
        }
        if let Some(ask) = given_up {
            self.give_up_poll(ask);
        }
        let is_drained = self.take_client_frames(conn, stream);
        if is_drained {
            self.on_client_stream_end(conn, stream);
            self.bound_unfinished(conn, stream);
        }
        self.run_stream(conn, stream);
    }

    /// The client has finished its side and every frame before that was taken.
    fn on_client_stream_end(&mut self, conn: ConnId, stream: StreamId) {
        let Some(state) = self
            .client_stream(conn, stream)
            .filter(|state| state.end_seen)
        else {
            return;
        };
        let is_torn = state.reader.finish().is_err();
        state.session.on_client_finished();
        if is_torn {
            self.metrics.frames_refused.inc(FrameFault::ClientTruncated);
        }
    }

    /// Takes whole frames until there is none or a bound is reached. True when none is left.
    fn take_client_frames(&mut self, conn: ConnId, stream: StreamId) -> bool {
        let limit = self.settings.client_in_flight_bytes;
        loop {
            let Some(client) = self.clients.get_mut(&conn) else {
                return true;
            };
            let Some(state) = client.streams.get_mut(&stream) else {
                return true;
            };
            if client.in_flight_bytes >= limit || !state.session.may_read() {
                if state.session.is_ended() {
                    return true;
                }
                if !client.paused.contains(&stream) {
                    client.paused.push(stream);
                }
                return false;
            }
            let Some(event) = state.reader.next() else {
                return true;
            };
            self.on_client_event(conn, stream, event);
            self.run_stream(conn, stream);
        }
    }

    fn on_client_event(&mut self, conn: ConnId, stream: StreamId, event: ReadEvent) {
        let decoded = match event {
            ReadEvent::Frame(frame) => {
                self.metrics.client_frames_in.inc();
                match ToBroker::decode(frame) {
                    Ok(message) => Ok(message),
                    Err(error) => {
                        self.metrics.frames_refused.inc(frame_fault(&error));
                        Err(classify_error(&error))
                    }
                }
            }
            ReadEvent::Oversize(oversize) => {
                self.metrics.frames_refused.inc(FrameFault::ClientTooLarge);
                Err(classify_oversize(&oversize))
            }
            ReadEvent::Fatal(reason) => {
                self.metrics.frames_refused.inc(fatal_fault(&reason));
                Err(Incoming::Unreadable {
                    why: reason.to_string(),
                })
            }
        };
        let (message, incoming) = match decoded {
            Ok(message) => {
                let incoming = classify(&message);
                (Some(message), incoming)
            }
            Err(incoming) => (None, incoming),
        };
        let (mono, class) = (self.mono, requested(&incoming));
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        let verdict = state.session.on_frame(mono, incoming);
        let identity = state.identity.clone();
        match (verdict, message, identity) {
            (Verdict::Dropped, _, _) => {}
            (Verdict::Refused(what, code), _, _) => self.count_refused_frame(what, code),
            (Verdict::Authenticate, Some(ToBroker::Request(request)), _) => {
                self.authenticate(conn, stream, &request);
            }
            (Verdict::Publish(owed), Some(message), Some(identity)) => {
                self.on_publish(conn, stream, &identity, owed, message);
            }
            (Verdict::Serve, Some(ToBroker::Request(request)), Some(identity)) => {
                self.on_request(conn, stream, &identity, class, request);
            }
            (Verdict::Declare, Some(ToBroker::Request(request)), Some(identity)) => {
                self.declare_width(conn, stream, &identity, request);
            }
            (
                Verdict::Authenticate | Verdict::Publish(_) | Verdict::Serve | Verdict::Declare,
                _,
                _,
            ) => self.metrics.internal_faults.inc(),
        }
    }

    /// Carries out what a stream's machine decided.
    fn run_stream(&mut self, conn: ConnId, stream: StreamId) {
        loop {
            let Some(state) = self.client_stream(conn, stream) else {
                return;
            };
            let Some(action) = state.session.poll_action() else {
                break;
            };
            match action {
                StreamAction::Write(reply) => self.write_reply(conn, stream, &reply),
                StreamAction::RaiseFrameLimit => {
                    state.reader.set_limits(ReadLimits::AUTHENTICATED);
                }
                // An error means the stream or its connection is gone, which ends it as well.
                StreamAction::Finish => drop(self.pump.finish(conn, stream)),
                StreamAction::StopReading => drop(self.pump.stop_sending(conn, stream, 0)),
            }
        }
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let Some(state) = client.streams.get_mut(&stream) else {
            return;
        };
        if state.session.is_ended() {
            let held = client.forget_stream(stream);
            self.client_buffered_bytes -= held;
            return;
        }
        let Some(at) = state.session.next_deadline() else {
            return;
        };
        if state.timer_at.is_none() {
            state.timer_at = Some(at);
            self.timers.push(at, Timer::ClientStream { conn, stream });
        }
    }

    pub(super) fn on_client_stream_time(&mut self, conn: ConnId, stream: StreamId) {
        let mono = self.mono;
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        state.timer_at = None;
        state.session.on_time(mono);
        self.run_stream(conn, stream);
    }

    fn write_reply(&mut self, conn: ConnId, stream: StreamId, reply: &Reply) {
        let frame = match reply {
            Reply::Answer(answer) => answer.encode(),
            Reply::Ack(ack) => ack.encode(),
        };
        match frame {
            Ok(frame) => self.send_to_client(conn, stream, frame),
            Err(error) => {
                self.metrics.internal_faults.inc();
                tracing::error!(%error, "an answer to a client cannot be encoded");
            }
        }
    }

    fn send_to_client(&mut self, conn: ConnId, stream: StreamId, frame: Bytes) {
        self.metrics.client_frames_out.inc();
        self.metrics.client_bytes_out.add(frame.len() as u64);
        // A stream or connection that is gone takes its answers with it.
        let _ = self.pump.send(conn, stream, frame);
    }

    /// The last request of a client stream that was forwarded to `owner`, if there was one.
    fn last_forward(&mut self, conn: ConnId, stream: StreamId, owner: &NodeId) -> Option<u64> {
        let state = self.client_stream(conn, stream)?;
        let mut entries = state.last_forwards.iter();
        entries
            .find(|(node, _)| node == owner)
            .map(|(_, token)| *token)
    }

    fn remember_forward(&mut self, conn: ConnId, stream: StreamId, owner: NodeId, token: u64) {
        let Some(state) = self.client_stream(conn, stream) else {
            return;
        };
        match state
            .last_forwards
            .iter_mut()
            .find(|(node, _)| *node == owner)
        {
            Some((_, last)) => *last = token,
            None => state.last_forwards.push((owner, token)),
        }
    }

    fn client_stream(&mut self, conn: ConnId, stream: StreamId) -> Option<&mut ClientStream> {
        let client = self.clients.get_mut(&conn)?;
        client.streams.get_mut(&stream).map(Box::as_mut)
    }

    /// The answer of a request being served.
    fn answer(&mut self, conn: ConnId, stream: StreamId, answer: impl Into<Answer>) {
        if let Some(state) = self.client_stream(conn, stream) {
            state.session.answer(answer.into());
        }
        self.run_stream(conn, stream);
    }

    fn refuse(&mut self, conn: ConnId, stream: StreamId, class: Requested, refusal: Refusal) {
        if let Some(code) = publish::client_code(&refusal) {
            self.metrics.requests_refused.inc(code);
        }
        if let Some(state) = self.client_stream(conn, stream) {
            state.session.refuse(class, refusal);
        }
        self.run_stream(conn, stream);
    }
}

fn requested(incoming: &Incoming) -> Requested {
    match incoming {
        Incoming::Request(class) => *class,
        Incoming::Auth(_)
        | Incoming::Publish(_)
        | Incoming::Width
        | Incoming::Unserved { .. }
        | Incoming::BadPublish { .. }
        | Incoming::OversizePublish { .. }
        | Incoming::Unreadable { .. }
        | Incoming::Unframeable => Requested::Repeated,
    }
}

fn frame_fault(error: &FrameError) -> FrameFault {
    match error {
        FrameError::Flags(_) | FrameError::Direction(_) => FrameFault::ClientFlags,
        FrameError::Publish(_) | FrameError::Body(_) => FrameFault::ClientBody,
        FrameError::Json(_) => FrameFault::ClientJson,
    }
}

fn fatal_fault(reason: &FatalReason) -> FrameFault {
    match reason {
        FatalReason::Header(HeaderError::Magic { .. }) => FrameFault::ClientMagic,
        FatalReason::Header(HeaderError::Version { .. }) => FrameFault::ClientVersion,
        FatalReason::Header(HeaderError::Flags(_)) => FrameFault::ClientFlags,
        FatalReason::TooLarge { .. } => FrameFault::ClientTooLarge,
    }
}
