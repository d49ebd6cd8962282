//! When a client connection must close.
//!
//! Invariants: a connection on which something has authenticated is never closed for being quiet;
//! a draining one closes only when nothing is owed or the time is up.

use std::time::Duration;

use crate::proto::MonoTime;

/// An application close.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConnectionClose {
    /// The broker is shutting down: code 0.
    ShuttingDown,
    /// Nothing on the connection authenticated in time: code 1.
    AuthenticationTimeout,
}

impl ConnectionClose {
    /// The application close code.
    pub const fn code(self) -> u32 {
        match self {
            Self::ShuttingDown => 0,
            Self::AuthenticationTimeout => 1,
        }
    }

    /// The reason in the close frame.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::ShuttingDown => "shutting down",
            Self::AuthenticationTimeout => "authentication timeout",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Anonymous { deadline: MonoTime },
    Authenticated,
    Draining { deadline: MonoTime },
    Closed,
}

/// One client connection.
#[derive(Debug)]
pub struct ConnectionSession {
    state: State,
}

impl ConnectionSession {
    /// A connection just accepted; something on it must authenticate within `timeout`.
    pub fn new(now: MonoTime, timeout: Duration) -> Self {
        Self {
            state: State::Anonymous {
                deadline: now + timeout,
            },
        }
    }

    /// Whether a stream of it has authenticated and it is not draining.
    pub fn is_authenticated(&self) -> bool {
        self.state == State::Authenticated
    }

    /// Whether nothing on it has authenticated yet.
    pub fn is_stranger(&self) -> bool {
        matches!(self.state, State::Anonymous { .. })
    }

    /// A stream's token was good.
    pub fn on_authenticated(&mut self) {
        match self.state {
            State::Anonymous { .. } => self.state = State::Authenticated,
            State::Authenticated | State::Draining { .. } | State::Closed => {}
        }
    }

    /// The broker is stopping. Streams must be told too.
    pub fn begin_drain(&mut self, now: MonoTime, patience: Duration) {
        match self.state {
            State::Anonymous { .. } | State::Authenticated => {
                self.state = State::Draining {
                    deadline: now + patience,
                };
            }
            State::Draining { .. } | State::Closed => {}
        }
    }

    /// When [`Self::poll_close`] must be asked again.
    pub fn deadline(&self) -> Option<MonoTime> {
        match self.state {
            State::Anonymous { deadline } | State::Draining { deadline } => Some(deadline),
            State::Authenticated | State::Closed => None,
        }
    }

    /// Whether to close now. `owed` is the number of answers outstanding or not yet delivered on
    /// all its streams. Says so once.
    pub fn poll_close(&mut self, now: MonoTime, owed: usize) -> Option<ConnectionClose> {
        let close = match self.state {
            State::Anonymous { deadline } if now >= deadline => {
                ConnectionClose::AuthenticationTimeout
            }
            State::Draining { deadline } if owed == 0 || now >= deadline => {
                ConnectionClose::ShuttingDown
            }
            State::Anonymous { .. }
            | State::Authenticated
            | State::Draining { .. }
            | State::Closed => return None,
        };
        self.state = State::Closed;
        Some(close)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Duration = Duration::from_secs(10);

    fn at(s: u64) -> MonoTime {
        MonoTime::ZERO + Duration::from_secs(s)
    }

    #[test]
    fn a_connection_that_never_authenticates_is_closed_once() {
        let mut session = ConnectionSession::new(at(0), TEN);
        assert_eq!(session.poll_close(at(9), 0), None);
        let close = session.poll_close(at(10), 3);
        assert_eq!(close, Some(ConnectionClose::AuthenticationTimeout));
        assert_eq!(session.poll_close(at(11), 0), None);
        let close = ConnectionClose::AuthenticationTimeout;
        assert_eq!(
            (close.code(), close.reason()),
            (1, "authentication timeout")
        );
    }

    #[test]
    fn a_quiet_authenticated_connection_stays() {
        let mut session = ConnectionSession::new(at(0), TEN);
        assert!(session.is_stranger());
        session.on_authenticated();
        assert!(!session.is_stranger());
        assert_eq!(session.deadline(), None);
        assert_eq!(session.poll_close(at(1_000_000), 0), None);
    }

    #[test]
    fn draining_waits_for_what_is_owed_but_not_for_ever() {
        for (now, owed, closes) in [(1, 0, true), (1, 1, false), (9, 1, false), (10, 1, true)] {
            let mut session = ConnectionSession::new(at(0), TEN);
            session.on_authenticated();
            session.begin_drain(at(0), TEN);
            session.on_authenticated();
            let close = session.poll_close(at(now), owed);
            assert_eq!(close.is_some(), closes, "{now} {owed}");
            assert!(close.is_none_or(|c| c.code() == 0));
        }
    }
}
