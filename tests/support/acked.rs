//! A publisher that writes down what was acknowledged.

use std::collections::BTreeMap;
use std::time::Duration;

use felix_uring::wire::client::{PublishOutcome, RetryClass};

use super::client::{code_and_class, Stream};

/// What was acknowledged, by offset.
pub type Acked = BTreeMap<u64, String>;

/// Publishes to a stream, again and again whatever the answer, until told to stop.
pub async fn keep_publishing(
    mut stream: Stream,
    name: &str,
    prefix: &str,
    mut stop: tokio::sync::watch::Receiver<bool>,
) -> Acked {
    let mut acked = Acked::new();
    for nth in 0.. {
        let record = format!("{prefix}-{nth}");
        let outcome = tokio::select! {
            outcome = stream.publish(name, &record) => outcome,
            _ = stop.changed() => break,
        };
        match outcome {
            PublishOutcome::Accepted { offset } => {
                acked.insert(offset.expect("an offset"), record);
            }
            PublishOutcome::Failed(refusal) => {
                // A record may be unknown to have been stored; none may be called wrong.
                let (code, class) = code_and_class(&refusal);
                assert_ne!(class, RetryClass::Fatal, "{code}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    acked
}
