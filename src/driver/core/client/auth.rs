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
        let verdict = self
            .verifier
            .verify(&auth.token, &auth.tenant_id, now_s)
            .map_err(|error| {
                tracing::debug!(%error, "a token was refused");
                error.client_text()
            })
            .and_then(|grant| match Credential::new(&auth.token) {
                Ok(credential) => Ok(Rc::new(Identity { grant, credential })),
                Err(_) => Err("the token does not verify"),
            });
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
                state.identity = Some(identity);
                Ok(())
            }
            Err(why) => Err(Refusal::new(ErrorCode::Unauthenticated, why)),
        };
        state.session.on_verified(&self.server_offer, outcome);
    }
}
