//! The control thread of a broker that runs: new catalogs, certificates and addresses, and the orderly stop.

use std::collections::BTreeSet;
use std::net::ToSocketAddrs;
use std::sync::mpsc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shard_executor::rt::CoreHandle;

use super::core::Control;
use super::serve::{catalog_snapshot, Broker, ServeError, ServeSummary};
use super::signals::Signals;
use crate::catalog::{check_accepted, Catalog};
use crate::tls::CertEvent;

/// How often the control thread looks around.
const CONTROL_PERIOD: Duration = Duration::from_millis(50);
/// How often names of peers are resolved anew.
const RESOLVE_PERIOD: Duration = Duration::from_secs(30);
/// How long a cut core may take to end.
const CUT_LINGER: Duration = Duration::from_secs(2);

impl Broker {
    pub(super) fn watch_until_stopped(
        mut self,
        signals: &Signals,
    ) -> Result<ServeSummary, ServeError> {
        let mut version = 1;
        loop {
            if signals.received() > 0 {
                break;
            }
            if let Ok(core) = self.ended.try_recv() {
                return Err(ServeError::Start(format!("core {core} ended by itself")));
            }
            signals.discard_set_aside();
            let now = Instant::now();
            self.watch_catalog(now, &mut version);
            self.watch_certificates(now);
            self.watch_data_dir(now);
            self.resolve_peers(now);
            std::thread::sleep(CONTROL_PERIOD);
        }
        let served_for = self.ready_since.elapsed();
        tracing::info!("stop signal: no new work is taken, what was accepted is finished");
        self.stop(signals).map(|()| ServeSummary { served_for })
    }

    fn watch_catalog(&mut self, now: Instant, version: &mut u64) {
        if self.state.take_catalog_request() {
            self.catalog.look_soon(now);
        }
        let state = Arc::clone(&self.state);
        let judge = |next: &Catalog| check_accepted(next, &|shard| state.accepted(shard));
        match self.catalog.poll(now, &judge) {
            None => {}
            Some(Ok(catalog)) => {
                *version += 1;
                self.state.metrics().control().catalog_reloads.add_shared(1);
                self.state
                    .publish_catalog(catalog_snapshot(&catalog, &self.node_id, *version));
                tracing::info!(version = *version, "catalog reloaded");
                self.resolve_at = now;
                self.tell_all(|| Control::Catalog(Arc::clone(&catalog)));
            }
            Some(Err(errors)) => {
                self.state
                    .metrics()
                    .control()
                    .catalog_reload_errors
                    .add_shared(1);
                tracing::error!(
                    "the changed catalog is not taken, the running one stays:\n{errors}"
                );
                let mut snapshot =
                    catalog_snapshot(self.catalog.running(), &self.node_id, *version);
                snapshot.error = Some(errors.to_string());
                self.state.publish_catalog(snapshot);
            }
        }
    }

    fn watch_certificates(&mut self, now: Instant) {
        let now_s = super::core::wall_us() / 1_000_000;
        for watch in &mut self.certificates {
            let control = self.state.metrics().control();
            match watch.poll(now, now_s) {
                None => {}
                Some(CertEvent::Replaced { warnings, .. }) => {
                    control.tls_reloads.add_shared(1);
                    tracing::info!("a renewed certificate is used from the next handshake on");
                    for warning in warnings {
                        tracing::warn!("{warning}");
                    }
                }
                Some(CertEvent::Kept(faults)) => {
                    control.tls_reload_errors.add_shared(1);
                    for fault in faults {
                        tracing::warn!("changed certificate files are not used: {fault}");
                    }
                }
            }
        }
    }

    /// A directory that is gone ends every core's log, as a failed flush does: nothing is acknowledged that no
    /// start would find.
    fn watch_data_dir(&mut self, now: Instant) {
        let Some(cause) = self.data_dir.poll(now) else {
            return;
        };
        if self.data_dir_lost.is_none() {
            let why = format!("the data directory is gone: {cause}");
            tracing::error!(
                "{why}; writes are refused until a restart. Put the directory back under its name, or restore a \
                 backup there, and restart the broker"
            );
            self.state.hold("data-directory", &why);
            self.state.metrics().control().data_dir_lost.set(1);
            self.data_dir_lost = Some(why);
        }
        // Every time: a core whose inbox was full must be told, too.
        if let Some(why) = self.data_dir_lost.clone() {
            self.tell_all(|| Control::EndLog(why.clone()));
        }
    }

    /// Peers given by name: resolving blocks, so it happens here and not on a core.
    fn resolve_peers(&mut self, now: Instant) {
        if now < self.resolve_at {
            return;
        }
        self.resolve_at = now + RESOLVE_PERIOD;
        let catalog = Arc::clone(self.catalog.running());
        for node in catalog.nodes() {
            if node.internal_addr.as_socket_addr().is_some() || node.node_id == self.node_id {
                continue;
            }
            let target = (node.internal_addr.host(), node.internal_addr.port());
            let found = target
                .to_socket_addrs()
                .ok()
                .and_then(|mut found| found.next());
            let Some(addr) = found else {
                tracing::warn!(peer = %node.node_id, addr = %node.internal_addr, "the name cannot be resolved");
                continue;
            };
            if self.resolved.insert(node.node_id.clone(), addr) != Some(addr) {
                self.tell_all(|| Control::Resolved {
                    node: node.node_id.clone(),
                    addr,
                });
            }
        }
    }

    fn tell_all(&self, message: impl Fn() -> Control) {
        for sender in &self.senders {
            if sender.try_send(message()).is_err() {
                tracing::error!("a core does not take control messages");
            }
        }
    }

    fn stop(self, signals: &Signals) -> Result<(), ServeError> {
        self.state.start_draining();
        self.tell_all(|| Control::Drain);
        let deadline = Instant::now() + self.shutdown_deadline;
        let mut running: BTreeSet<usize> = self.cores.iter().map(CoreHandle::core_index).collect();
        let mut cut_at = None;
        while !running.is_empty() {
            match self.ended.recv_timeout(CONTROL_PERIOD) {
                Ok(core) => drop(running.remove(&core)),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
            let now = Instant::now();
            match cut_at {
                None if now >= deadline || signals.received() > 1 => {
                    tracing::error!("the wait for unfinished work is over; it is cut");
                    self.tell_all(|| Control::Cut);
                    cut_at = Some(now);
                }
                Some(since) if now.duration_since(since) >= CUT_LINGER => break,
                None | Some(_) => {}
            }
        }
        let mut unfinished: Vec<String> = self.cut.try_iter().collect();
        unfinished.extend(self.data_dir_lost);
        unfinished.extend(running.iter().map(|core| {
            format!("core {core}: has not ended; its disk may have stopped answering")
        }));
        if running.is_empty() {
            for core in self.cores {
                let index = core.core_index();
                match core.join() {
                    Ok(Ok(end)) => unfinished.extend(end.storage_error),
                    Ok(Err(why)) => unfinished.push(why),
                    Err(error) => unfinished.push(format!("core {index}: {error}")),
                }
            }
        }
        drop(self.stalls);
        self.admin.stop();
        match unfinished.is_empty() {
            true => Ok(()),
            false => Err(ServeError::Unfinished(unfinished)),
        }
    }
}
