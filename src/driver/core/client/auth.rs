//! The authentication of one stream.

use std::rc::Rc;
use std::sync::Arc;

use crate::auth::Grant;
use crate::wire::client::{ErrorCode, Features, Flags, Refusal, Request, ServerOffer};
use crate::wire::internal::Credential;

use super::Core;
use crate::driver::quic::{ConnId, StreamId};

/// Who a stream authenticated as.
pub(super) struct Identity {
    pub grant: Arc<Grant>,
    /// Goes along with everything forwarded; the owner verifies it again.
    pub credential: Credential,
}

/// What this broker serves. A bit stands here only if all it promises works.
pub(in crate::driver::core) fn server_offer() -> ServerOffer {
    let flags = Flags::PUBLISH_BATCH
        | Flags::EVENT_BATCH_SHARED
        | Flags::PUBLISH_ACKED
        | Flags::PUBLISH_ACK
        | Flags::EVENT_OFFSETS
        | Flags::PUBLISH_KEYED
        | Flags::ACK_OWNER
        | Flags::ACK_CODE
        | Flags::ACK_DETAIL
        | Flags::ACK_OFFSET;
    let features = Features::TOPOLOGY
        | Features::REDIRECT
        | Features::CACHE_DELETE
        | Features::CONSUMER_GROUP
        | Features::GROUP_DEAD_LETTERS
        | Features::STREAM_SHARDS
        | Features::COUNTERS
        | Features::CACHE_SHARDS
        | Features::ERROR_CODES
        | Features::SHARD_MOVED
        | Features::UNSUPPORTED
        | Features::SHARD_OWNERS
        | Features::ACK_ON_COMMIT
        | Features::GROUP_CONSUMER
        | Features::SUBSCRIPTION_LAGGED
        | Features::GROUP_SKIPPED
        | Features::GROUP_ADMIN
        | Features::GROUP_CLAIM_CONTROL
        | Features::STREAM_DELETED
        | Features::PUBLISH_WIDTH
        | Features::EXPLICIT_SHARD;
    ServerOffer {
        flags: flags.bits(),
        features,
        listener_ports: Vec::new(),
        publish_window: None,
    }
}

impl Core {
    pub(super) fn authenticate(&mut self, conn: ConnId, stream: StreamId, request: &Request) {
        let Request::Auth(auth) = request else {
            return self.metrics.internal_faults.inc();
        };
        let now_s = self.wall_us / 1_000_000;
        let last = self
            .clients
            .get(&conn)
            .and_then(|c| c.last_identity.clone());
        let verdict = self
            .verifier
            .verify(&auth.token, &auth.tenant_id, now_s)
            .map_err(|error| {
                tracing::debug!(%error, "a token was refused");
                error.client_text()
            })
            .and_then(|grant| identity_of(grant, &auth.token, last));
        match &verdict {
            Ok(_) => self.metrics.auth_accepted.inc(),
            Err(_) => self.metrics.auth_refused.inc(),
        }
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let Some(state) = client.streams.get_mut(&stream) else {
            return;
        };
        let outcome = match verdict {
            Ok(identity) => {
                client.session.on_authenticated();
                client.last_identity = Some(Rc::clone(&identity));
                state.identity = Some(identity);
                Ok(())
            }
            Err(why) => Err(Refusal::new(ErrorCode::Unauthenticated, why)),
        };
        state.session.on_verified(&self.server_offer, outcome);
    }
}

/// The identity of a verified token: that of the stream before when it is the same.
fn identity_of(
    grant: Arc<Grant>,
    token: &str,
    last: Option<Rc<Identity>>,
) -> Result<Rc<Identity>, &'static str> {
    let is_same =
        |last: &Rc<Identity>| Arc::ptr_eq(&last.grant, &grant) && last.credential.as_str() == token;
    if let Some(last) = last.filter(is_same) {
        return Ok(last);
    }
    match Credential::new(token) {
        Ok(credential) => Ok(Rc::new(Identity { grant, credential })),
        Err(_) => Err("the token does not verify"),
    }
}
