//! A client of caches and counters that checks what every answer must repeat.

use bytes::Bytes;
use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::wire::client::messages::{
    CacheDelete, CacheGet, CachePut, CounterAdd, CounterGet,
};
use felix_uring::wire::client::{encode_message, Answer, Blob, RetryClass};

use super::brokers::Brokers;
use super::client::{Client, Stream};

/// The cache a client asks unless told otherwise.
pub const CACHE: &str = "first";

/// One stream of cache requests.
pub struct CacheClient {
    _client: Client,
    stream: Stream,
    next_request: u64,
    pub cache: &'static str,
}

/// A refusal's code and class.
pub type Refused = (String, RetryClass);

impl CacheClient {
    /// A stream with a token that allows everything.
    pub async fn connect(brokers: &Brokers, node: usize) -> Self {
        Self::connect_with(brokers, node, &brokers.token()).await
    }

    /// A stream with this token.
    pub async fn connect_with(brokers: &Brokers, node: usize, token: &str) -> Self {
        let client = Client::connect(brokers, node).await;
        let stream = client.stream(token).await;
        Self {
            _client: client,
            stream,
            next_request: 1,
            cache: CACHE,
        }
    }

    async fn write(&mut self, frame: Bytes) {
        self.stream.send(frame).await;
    }

    /// The next answer.
    pub async fn answer(&mut self) -> Answer {
        self.stream.answers.answer().await
    }

    fn id(&mut self) -> u64 {
        self.next_request += 1;
        self.next_request
    }

    /// Sends a put and does not wait; the request id tells its answer.
    pub async fn start_put(&mut self, key: &str, value: &[u8], ttl_ms: Option<u64>) -> u64 {
        let request_id = self.id();
        let put = CachePut {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            value: Blob(Bytes::copy_from_slice(value)),
            request_id: Some(request_id),
            ttl_ms,
        };
        self.write(encode_message(&put).expect("a frame")).await;
        request_id
    }

    /// Puts with a time to live in milliseconds.
    pub async fn put_for(
        &mut self,
        key: &str,
        value: &[u8],
        ttl: Option<u64>,
    ) -> Result<(), Refused> {
        let id = self.start_put(key, value, ttl).await;
        match self.answer().await {
            Answer::CacheOk(ok) => {
                assert_eq!(ok.request_id, id);
                Ok(())
            }
            other => Err(refusal(other)),
        }
    }

    /// Puts what must be taken.
    pub async fn put(&mut self, key: &str, value: &[u8]) {
        self.put_for(key, value, None).await.expect("a put");
    }

    /// The value of an answer that must repeat what was asked.
    fn value(&self, answer: Answer, key: &str, id: u64) -> Result<Option<Vec<u8>>, Refused> {
        match answer {
            Answer::CacheValue(value) => {
                assert_eq!(value.request_id, Some(id));
                let scope = (&*value.tenant_id, &*value.namespace, &*value.cache);
                assert_eq!(scope, (TENANT, NAMESPACE, self.cache));
                assert_eq!(value.key, key);
                Ok(value.value.map(|blob| blob.0.to_vec()))
            }
            other => Err(refusal(other)),
        }
    }

    /// Gets, or says why not.
    pub async fn try_get(&mut self, key: &str) -> Result<Option<Vec<u8>>, Refused> {
        let id = self.id();
        let get = CacheGet {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id: Some(id),
        };
        self.write(encode_message(&get).expect("a frame")).await;
        let answer = self.answer().await;
        self.value(answer, key, id)
    }

    /// Gets what must be answered.
    pub async fn get(&mut self, key: &str) -> Option<Vec<u8>> {
        self.try_get(key).await.expect("a get")
    }

    /// Deletes, or says why not.
    pub async fn try_delete(&mut self, key: &str) -> Result<Option<Vec<u8>>, Refused> {
        let id = self.id();
        let delete = CacheDelete {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id: Some(id),
        };
        self.write(encode_message(&delete).expect("a frame")).await;
        let answer = self.answer().await;
        self.value(answer, key, id)
    }

    /// Deletes what must be answered.
    pub async fn delete(&mut self, key: &str) -> Option<Vec<u8>> {
        self.try_delete(key).await.expect("a delete")
    }

    /// Adds to a counter, or says why not.
    pub async fn try_add(&mut self, key: &str, delta: i64) -> Result<i64, Refused> {
        let request_id = self.id();
        let add = CounterAdd {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            delta,
            request_id,
        };
        self.write(encode_message(&add).expect("a frame")).await;
        match self.answer().await {
            Answer::CounterValue(sum) => {
                assert_eq!(sum.request_id, request_id);
                Ok(sum.value.expect("the sum of an add"))
            }
            other => Err(refusal(other)),
        }
    }

    /// Adds what must be taken.
    pub async fn add(&mut self, key: &str, delta: i64) -> i64 {
        self.try_add(key, delta).await.expect("an add")
    }

    /// Reads a counter that must be answered.
    pub async fn sum(&mut self, key: &str) -> Option<i64> {
        self.try_sum(key).await.expect("a sum")
    }

    /// Reads a counter, or says why not.
    pub async fn try_sum(&mut self, key: &str) -> Result<Option<i64>, Refused> {
        let request_id = self.id();
        let get = CounterGet {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            cache: self.cache.into(),
            key: key.into(),
            request_id,
        };
        self.write(encode_message(&get).expect("a frame")).await;
        match self.answer().await {
            Answer::CounterValue(sum) => {
                assert_eq!(sum.request_id, request_id);
                Ok(sum.value)
            }
            other => Err(refusal(other)),
        }
    }
}

fn refusal(answer: Answer) -> Refused {
    match answer {
        Answer::ErrorAnswer(error) => {
            let code = error.code.expect("a refusal has a code");
            (code.name().to_string(), error.retry.expect("and a class"))
        }
        other => panic!("neither an answer nor a refusal: {other:?}"),
    }
}
