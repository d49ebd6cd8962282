//! A member of a consumer group: one stream a request, as the protocol wants it.

use std::time::Duration;

use felix_uring::cluster::{NAMESPACE, TENANT};
use felix_uring::wire::client::messages::{
    GroupAck, GroupDeadLetter, GroupDeadLetters, GroupDelete, GroupDescribe, GroupDiscard,
    GroupExtend, GroupInfo, GroupNack, GroupPoll, GroupRecord, GroupRedrive, GroupSeek, Message,
    StartAt,
};
use felix_uring::wire::client::{encode_message, Answer, RetryClass};

use super::brokers::Brokers;
use super::client::{Client, Stream};
use super::within;

/// A refusal's code and class.
pub type Refused = (String, RetryClass);

/// Past every wait a poll may ask for.
const ANSWERED: Duration = Duration::from_secs(45);

/// A connection that speaks for one group.
pub struct GroupClient {
    pub client: Client,
    token: String,
    pub stream: &'static str,
    pub shard: u32,
    pub group: &'static str,
    next_request: u64,
}

/// Fields every group request has, and those of its own.
macro_rules! request {
    ($self:ident, $name:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        $self.next_request += 1;
        $name {
            tenant_id: TENANT.into(),
            namespace: NAMESPACE.into(),
            stream: $self.stream.into(),
            shard: $self.shard,
            group: $self.group.into(),
            request_id: $self.next_request,
            $($field: $value,)*
        }
    }};
}

impl GroupClient {
    /// A member with a token that allows everything.
    pub async fn connect(brokers: &Brokers, node: usize, stream: &'static str) -> Self {
        Self::connect_with(brokers, node, stream, brokers.token()).await
    }

    /// A member with this token.
    pub async fn connect_with(
        brokers: &Brokers,
        node: usize,
        stream: &'static str,
        token: String,
    ) -> Self {
        Self {
            client: Client::connect(brokers, node).await,
            token,
            stream,
            shard: 0,
            group: "workers",
            next_request: 0,
        }
    }

    async fn start<M: Message>(&self, message: &M) -> Stream {
        let mut stream = self.client.stream(&self.token).await;
        stream.send(encode_message(message).expect("a frame")).await;
        stream
    }

    /// Asks on a stream of its own; what came back.
    pub async fn ask<M: Message>(&self, message: &M) -> Answer {
        let mut stream = self.start(message).await;
        within(ANSWERED, "a group's answer", stream.answers.answer()).await
    }

    /// Sends a poll and does not wait.
    pub async fn start_poll(&mut self, max_records: u32, wait_ms: u64) -> Stream {
        let poll = self.poll_request(max_records, wait_ms, 0, None);
        self.start(&poll).await
    }

    fn poll_request(
        &mut self,
        max_records: u32,
        wait_ms: u64,
        visibility_ms: u64,
        consumer: Option<&str>,
    ) -> GroupPoll {
        request!(
            self,
            GroupPoll {
                max_records: max_records,
                wait_ms: wait_ms,
                consumer: consumer.map(str::to_owned),
                reclaim: consumer.is_some(),
                visibility_ms: visibility_ms,
            }
        )
    }

    /// The records of an answer to a poll.
    pub fn records(answer: Answer) -> Result<Vec<GroupRecord>, Refused> {
        match answer {
            Answer::GroupRecords(records) => Ok(records.records),
            other => Err(refusal(other)),
        }
    }

    /// Polls, or says why not.
    pub async fn try_poll(&mut self, max: u32, wait_ms: u64) -> Result<Vec<GroupRecord>, Refused> {
        let poll = self.poll_request(max, wait_ms, 0, None);
        Self::records(self.ask(&poll).await)
    }

    /// Offsets and attempts of a poll.
    pub async fn poll(&mut self, max_records: u32, wait_ms: u64) -> Vec<(u64, u32)> {
        pairs(self.try_poll(max_records, wait_ms).await.expect("a poll"))
    }

    /// A poll whose claims stand for `visibility_ms`.
    pub async fn poll_for(&mut self, max_records: u32, visibility_ms: u64) -> Vec<(u64, u32)> {
        let poll = self.poll_request(max_records, 10_000, visibility_ms, None);
        pairs(Self::records(self.ask(&poll).await).expect("a poll"))
    }

    /// A named member's first poll of this connection.
    pub async fn poll_as(&mut self, consumer: &str, max_records: u32) -> Vec<(u64, u32)> {
        let poll = self.poll_request(max_records, 0, 0, Some(consumer));
        pairs(Self::records(self.ask(&poll).await).expect("a poll"))
    }

    /// Finishes a record, or says why not.
    pub async fn ack(&mut self, offset: u64) -> Result<(), Refused> {
        let ack = request!(self, GroupAck { offset: offset });
        settled(self.ask(&ack).await)
    }

    /// Owes a record again.
    pub async fn nack(&mut self, offset: u64, attempts: u32) -> Result<(), Refused> {
        let nack = request!(
            self,
            GroupNack {
                offset: offset,
                delay_ms: 0,
                attempts: attempts,
            }
        );
        settled(self.ask(&nack).await)
    }

    /// Prolongs a claim; for how long it stands.
    pub async fn extend(&mut self, offset: u64, attempts: u32, by: u64) -> Result<u64, Refused> {
        let extend = request!(
            self,
            GroupExtend {
                offset: offset,
                attempts: attempts,
                extend_ms: by,
            }
        );
        match self.ask(&extend).await {
            Answer::GroupExtended(extended) => Ok(extended.visible_ms),
            other => Err(refusal(other)),
        }
    }

    /// Gives up on a record.
    pub async fn dead_letter(&mut self, offset: u64) -> Result<(), Refused> {
        let request = request!(self, GroupDeadLetter { offset: offset });
        settled(self.ask(&request).await)
    }

    /// The dead letters.
    pub async fn dead_letters(&mut self) -> Vec<u64> {
        let request = request!(self, GroupDeadLetters {});
        match self.ask(&request).await {
            Answer::GroupDeadLetterList(list) => list.offsets,
            other => panic!("not a list: {other:?}"),
        }
    }

    /// Owes a dead letter again.
    pub async fn redrive(&mut self, offset: u64) -> Result<(), Refused> {
        let request = request!(self, GroupRedrive { offset: offset });
        settled(self.ask(&request).await)
    }

    /// Takes a dead letter off the list.
    pub async fn discard(&mut self, offset: u64) -> Result<(), Refused> {
        let request = request!(self, GroupDiscard { offset: offset });
        settled(self.ask(&request).await)
    }

    /// Moves the group; where it stands and whether it moved.
    pub async fn seek(&mut self, start: StartAt, if_new: bool) -> Result<(u64, bool), Refused> {
        let seek = request!(
            self,
            GroupSeek {
                start: start,
                if_new: if_new,
            }
        );
        match self.ask(&seek).await {
            Answer::GroupPosition(position) => Ok((position.offset, position.moved)),
            other => Err(refusal(other)),
        }
    }

    /// Where the group stands.
    pub async fn describe(&mut self) -> GroupInfo {
        let request = request!(self, GroupDescribe {});
        match self.ask(&request).await {
            Answer::GroupInfo(info) => info,
            other => panic!("not a description: {other:?}"),
        }
    }

    /// Forgets the group; whether there was one.
    pub async fn delete(&mut self) -> Result<bool, Refused> {
        let request = request!(self, GroupDelete {});
        match self.ask(&request).await {
            Answer::GroupDeleted(deleted) => Ok(deleted.existed),
            other => Err(refusal(other)),
        }
    }
}

fn pairs(records: Vec<GroupRecord>) -> Vec<(u64, u32)> {
    let records = records.into_iter();
    records
        .map(|record| {
            assert_eq!(record.payload.0, format!("r{}", record.offset));
            (record.offset, record.attempts)
        })
        .collect()
}

fn settled(answer: Answer) -> Result<(), Refused> {
    match answer {
        Answer::CacheOk(_) => Ok(()),
        other => Err(refusal(other)),
    }
}

fn refusal(answer: Answer) -> Refused {
    match answer {
        Answer::ErrorAnswer(error) => {
            let code = error.code.expect("a refusal has a code");
            (code.name().to_string(), error.retry.expect("and a class"))
        }
        Answer::NotLeader(other) => (
            format!("not_leader {}", other.node_id),
            RetryClass::Redirect,
        ),
        other => panic!("neither an answer nor a refusal: {other:?}"),
    }
}
