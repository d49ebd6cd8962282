//! What comes in: answers to tokens, to requests and to publishes, and events.

use std::time::Instant;

use bytes::Bytes;
use felix_uring::driver::quic::ReadEnd;
use felix_uring::wire::client::messages::Answer;
use felix_uring::wire::client::{FrameReader, ReadEvent, ToClient};

use super::fan::{End, Fan, Stage};
use super::listen::Told;
use crate::client::{Heard, LoadError};

impl Fan {
    pub(super) fn on_readable(&mut self, end: End, now: Instant) -> Result<(), LoadError> {
        let mut chunks = Vec::new();
        let read = self
            .pump
            .read_each(end.0, end.1, usize::MAX, |chunk| chunks.push(chunk));
        if let Some(answers) = self.greeting.get_mut(&end) {
            chunks.into_iter().for_each(|chunk| answers.push(chunk));
            return self.on_greeted(end);
        }
        if let Some(answers) = self.asked.get_mut(&end) {
            chunks.into_iter().for_each(|chunk| answers.push(chunk));
            return self.on_answers(end);
        }
        if self.listeners.contains_key(&end) {
            self.on_events(end, chunks, now)?;
            return match read {
                ReadEnd::Blocked | ReadEnd::Limit => Ok(()),
                ReadEnd::Finished | ReadEnd::Reset(_) | ReadEnd::Closed => {
                    Err(self.gone("a subscription has ended".into()))
                }
            };
        }
        let Some(index) = self.by_id.get(&end.0).copied() else {
            return Ok(());
        };
        let Some((stream, speaker)) = &mut self.conns[index].first else {
            return Ok(());
        };
        if *stream != end.1 {
            return Ok(());
        }
        chunks.into_iter().for_each(|chunk| speaker.push(chunk));
        while let Some((_, speaker)) = &mut self.conns[index].first {
            match speaker.hear() {
                None => break,
                Some(Heard::Ready) => self.on_first_ready(index)?,
                Some(Heard::Accepted { .. }) => {}
                Some(Heard::Refused { refusal, .. }) => {
                    return Err(LoadError::Refused(refusal.message.to_string()))
                }
                Some(Heard::Broken(why)) => return Err(LoadError::Refused(why)),
            }
        }
        Ok(())
    }

    /// The answer to the token on a further stream.
    fn on_greeted(&mut self, end: End) -> Result<(), LoadError> {
        let event = self.greeting.get_mut(&end).and_then(FrameReader::next);
        let Some(event) = event else {
            return Ok(());
        };
        self.greeting.remove(&end);
        match event {
            ReadEvent::Frame(frame) => match ToClient::decode(frame) {
                Ok(ToClient::Answer(Answer::AuthOk(_))) => {}
                other => return Err(LoadError::Refused(format!("{other:?}"))),
            },
            other => return Err(LoadError::Setup(format!("{other:?}"))),
        }
        if let Some(index) = self.by_id.get(&end.0).copied() {
            self.conns[index].greeting -= 1;
            if self.conns[index].greeting == 0 {
                self.on_conn_ready(index);
            }
        }
        Ok(())
    }

    /// The answers on a subscribe request's stream: to the token, then to the request.
    fn on_answers(&mut self, end: End) -> Result<(), LoadError> {
        let Some(answers) = self.asked.get_mut(&end) else {
            return Ok(());
        };
        while let Some(event) = answers.next() {
            let ReadEvent::Frame(frame) = event else {
                return Err(LoadError::Setup("an answer is no frame".into()));
            };
            match ToClient::decode(frame) {
                Ok(ToClient::Answer(Answer::AuthOk(_))) => {}
                Ok(ToClient::Answer(Answer::Subscribed(_))) => {
                    self.asked.remove(&end);
                    self.answered += 1;
                    return Ok(());
                }
                Ok(other) => return Err(LoadError::Refused(format!("{other:?}"))),
                Err(error) => return Err(LoadError::Setup(error.to_string())),
            }
        }
        Ok(())
    }

    fn on_events(&mut self, end: End, chunks: Vec<Bytes>, now: Instant) -> Result<(), LoadError> {
        let Some((listener, follower)) = self.listeners.get_mut(&end) else {
            return Ok(());
        };
        chunks.into_iter().for_each(|chunk| listener.push(chunk));
        let batch = u64::from(self.spec.batch);
        let had = follower.position();
        let mut came = 0;
        while let Some(told) = listener.hear() {
            match told {
                Told::Ready => self.begun += 1,
                Told::Records { offset, payloads } => {
                    came += payloads.len() as u64;
                    let payloads = payloads.iter().map(|payload| &payload[..]);
                    follower.on_records(self.spec.run, offset, payloads, &mut self.report.verify);
                }
                Told::Broken(why) => return Err(LoadError::Refused(why)),
            }
        }
        let has = follower.position();
        let is_measured = match self.stage {
            Stage::Running { since } => {
                let (from, to) = self.window(since);
                (from..to).contains(&now)
            }
            _ => false,
        };
        if is_measured {
            self.report.deliveries += came;
        }
        for whole in had / batch..has / batch {
            let at = whole.checked_sub(self.first_lacking);
            let Some(of) = at.and_then(|at| self.on_their_way.get_mut(at as usize)) else {
                continue;
            };
            of.lacking -= 1;
            if is_measured || self.spec.duration.is_zero() {
                let took = now.duration_since(of.sent);
                self.report.latency.record(took.as_nanos() as u64);
            }
        }
        while self.on_their_way.front().is_some_and(|of| of.lacking == 0) {
            self.on_their_way.pop_front();
            self.first_lacking += 1;
        }
        Ok(())
    }
}
