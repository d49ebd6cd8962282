//! A stream of cache requests: what is asked, and what a request came to.
//!
//! quinn on tokio, one thread: not the driver under test on both ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use bytes::Bytes;
use felix_uring::wire::client::messages::{
    Answer, CacheDelete, CacheGet, CachePut, CounterAdd, CounterGet, Message,
};
use felix_uring::wire::client::{
    encode_message, Blob, Features, FrameReader, ReadEvent, ReadLimits, ToClient,
};
use quinn::crypto::rustls::QuicClientConfig;

use crate::client::{auth_message, FelixNames};

/// An answer that takes longer is given up, and with it the worker's stream.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where to ask and as whom.
#[derive(Clone)]
pub struct CachePlan {
    pub addr: SocketAddr,
    pub tls: Arc<rustls::ClientConfig>,
    pub names: FelixNames,
    pub cache: String,
}

/// A stream of cache requests.
pub struct Session {
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    reader: FrameReader,
    plan: CachePlan,
    next_request: u64,
}

/// What a request came to.
pub enum Told {
    Done,
    Value(Option<Bytes>),
    Sum(Option<i64>),
    Refused(String),
}

pub async fn connect(plan: &CachePlan) -> Result<(quinn::Endpoint, quinn::Connection)> {
    let crypto = QuicClientConfig::try_from(plan.tls.as_ref().clone())?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    let mut transport = quinn::TransportConfig::default();
    transport.keep_alive_interval(Some(Duration::from_secs(2)));
    config.transport_config(Arc::new(transport));
    let endpoint = quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let connection = endpoint
        .connect_with(config, plan.addr, "localhost")?
        .await
        .with_context(|| format!("cannot connect to {}", plan.addr))?;
    Ok((endpoint, connection))
}

macro_rules! request {
    ($self:ident, $name:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $name {
            tenant_id: $self.plan.names.tenant.clone(),
            namespace: $self.plan.names.namespace.clone(),
            cache: $self.plan.cache.clone(),
            $($field: $value,)*
        }
    };
}

impl Session {
    pub async fn open(plan: &CachePlan, connection: &quinn::Connection) -> Result<Self> {
        let (send, recv) = connection.open_bi().await?;
        let mut session = Self {
            send,
            recv,
            reader: FrameReader::new(ReadLimits::AUTHENTICATED),
            plan: plan.clone(),
            next_request: 0,
        };
        match session
            .ask(&auth_message(&plan.names, Features::ERROR_CODES))
            .await?
        {
            Answer::AuthOk(_) | Answer::PlainOk(_) => Ok(session),
            other => bail!("the token was not taken: {other:?}"),
        }
    }

    async fn ask<M: Message>(&mut self, message: &M) -> Result<Answer> {
        let frame = encode_message(message).context("a request cannot be encoded")?;
        self.send.write_chunk(frame).await?;
        tokio::time::timeout(PATIENCE, self.answer())
            .await
            .context("no answer in time")?
    }

    async fn answer(&mut self) -> Result<Answer> {
        loop {
            match self.reader.next() {
                Some(ReadEvent::Frame(frame)) => match ToClient::decode(frame)? {
                    ToClient::Answer(answer) => return Ok(answer),
                    other => bail!("not an answer: {other:?}"),
                },
                Some(other) => bail!("not a frame: {other:?}"),
                None => {}
            }
            let chunk = self.recv.read_chunk(1 << 20, true).await?;
            self.reader.push(chunk.context("the stream ended")?.bytes);
        }
    }

    async fn told<M: Message>(&mut self, message: &M) -> Result<Told> {
        Ok(match self.ask(message).await? {
            Answer::CacheOk(_) | Answer::PlainOk(_) => Told::Done,
            Answer::CacheValue(value) => Told::Value(value.value.map(|blob| blob.0)),
            Answer::CounterValue(sum) => Told::Sum(sum.value),
            Answer::ErrorAnswer(error) => {
                let code = error.code.as_ref().map_or("no code", |code| code.name());
                Told::Refused(format!("{code}: {}", error.message))
            }
            other => bail!("an unexpected answer: {other:?}"),
        })
    }

    fn id(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    pub async fn get(&mut self, key: u64) -> Result<Told> {
        let request_id = Some(self.id());
        let get = request!(
            self,
            CacheGet {
                key: name_of(key),
                request_id: request_id
            }
        );
        self.told(&get).await
    }

    /// What a key holds; an error when that is refused.
    pub async fn value_of(&mut self, key: &str) -> Result<Option<Bytes>> {
        let request_id = Some(self.id());
        let get = request!(
            self,
            CacheGet {
                key: key.to_owned(),
                request_id: request_id
            }
        );
        match self.told(&get).await? {
            Told::Value(value) => Ok(value),
            Told::Refused(why) => bail!("{key} cannot be read: {why}"),
            Told::Done | Told::Sum(_) => bail!("the answer to something else"),
        }
    }

    pub async fn sum(&mut self, key: u64) -> Result<Told> {
        let request_id = self.id();
        let get = request!(
            self,
            CounterGet {
                key: name_of(key),
                request_id: request_id
            }
        );
        self.told(&get).await
    }

    pub async fn put(&mut self, key: u64, value: Bytes) -> Result<Told> {
        let request_id = Some(self.id());
        let put = request!(
            self,
            CachePut {
                key: name_of(key),
                value: Blob(value),
                request_id: request_id,
                ttl_ms: None,
            }
        );
        self.told(&put).await
    }

    pub async fn delete(&mut self, key: u64) -> Result<Told> {
        let request_id = Some(self.id());
        let delete = request!(
            self,
            CacheDelete {
                key: name_of(key),
                request_id: request_id
            }
        );
        self.told(&delete).await
    }

    pub async fn add(&mut self, key: u64, delta: i64) -> Result<Told> {
        let request_id = self.id();
        let add = request!(
            self,
            CounterAdd {
                key: name_of(key),
                delta: delta,
                request_id: request_id,
            }
        );
        self.told(&add).await
    }
}

pub fn name_of(key: u64) -> String {
    format!("key-{key:08}")
}
