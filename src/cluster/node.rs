//! One broker process of a local cluster.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::error::ClusterError;
use super::process::{describe_exit, ChildProcess, ChildSpec};
use super::spec::{ClusterSpec, NodePlan};
use crate::admin;

/// How often a starting broker is asked whether it is ready.
const READY_STEP: Duration = Duration::from_millis(20);
/// How long one question to an admin listener may take.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How one broker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeExit {
    pub node_id: String,
    /// `None` when it had already been stopped before.
    pub status: Option<ExitStatus>,
    /// It did not stop in time and was killed.
    pub killed: bool,
}

impl NodeExit {
    /// It stopped by itself with status 0, or was not running.
    pub fn is_clean(&self) -> bool {
        !self.killed && self.status.is_none_or(|status| status.success())
    }
}

impl fmt::Display for NodeExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            None => write!(f, "{}: was not running", self.node_id),
            Some(status) => {
                let how = if self.killed {
                    ", killed at the deadline"
                } else {
                    ""
                };
                write!(f, "{}: {}{how}", self.node_id, describe_exit(status))
            }
        }
    }
}

/// One broker process and where it is.
#[derive(Debug)]
pub struct BrokerNode {
    plan: NodePlan,
    child_spec: ChildSpec,
    child: Option<ChildProcess>,
    ready_timeout: Duration,
    stop_timeout: Duration,
}

impl BrokerNode {
    /// A broker that is not started.
    pub(super) fn new(plan: NodePlan, child_spec: ChildSpec, spec: &ClusterSpec) -> Self {
        Self {
            plan,
            child_spec,
            child: None,
            ready_timeout: spec.ready_timeout,
            stop_timeout: spec.stop_timeout,
        }
    }

    pub fn node_id(&self) -> &str {
        self.plan.node_id.as_str()
    }

    pub fn client_addr(&self) -> SocketAddr {
        self.plan.client_addr
    }

    pub fn internal_addr(&self) -> SocketAddr {
        self.plan.internal_addr
    }

    pub fn admin_addr(&self) -> SocketAddr {
        self.plan.admin_addr
    }

    pub fn data_dir(&self) -> &Path {
        &self.plan.data_dir
    }

    pub fn log_path(&self) -> &Path {
        &self.plan.log
    }

    /// The process id, unless it is not running.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(ChildProcess::pid)
    }

    /// The last lines the broker logged.
    pub fn log_tail(&self) -> String {
        super::process::tail(&self.plan.log, 4 << 10)
    }

    /// Starts the broker if it is not running; it may not be ready yet.
    pub fn start(&mut self) -> Result<(), ClusterError> {
        if self.child.is_none() {
            let child =
                ChildProcess::start(&self.child_spec).map_err(|source| ClusterError::Spawn {
                    node: self.node_id().to_string(),
                    source,
                })?;
            self.child = Some(child);
        }
        Ok(())
    }

    /// SIGKILL: what is not on disk is lost, as in a crash of the process.
    pub fn kill(&mut self) -> Result<(), ClusterError> {
        let node = self.node_id().to_string();
        if let Some(mut child) = self.child.take() {
            child
                .kill()
                .map_err(|source| ClusterError::Signal { node, source })?;
        }
        Ok(())
    }

    /// Freezes the process.
    pub fn sigstop(&mut self) -> Result<(), ClusterError> {
        self.signal(libc::SIGSTOP)
    }

    /// Lets a frozen process go on.
    pub fn sigcont(&mut self) -> Result<(), ClusterError> {
        self.signal(libc::SIGCONT)
    }

    /// Sends any signal.
    pub fn signal(&mut self, signal: i32) -> Result<(), ClusterError> {
        let node = self.node_id().to_string();
        match &mut self.child {
            None => Err(ClusterError::NotRunning { node }),
            Some(child) => child
                .signal(signal)
                .map_err(|source| ClusterError::Signal { node, source }),
        }
    }

    /// SIGTERM, and SIGKILL when the broker has not stopped within the cluster's stop timeout.
    pub fn stop(&mut self) -> Result<NodeExit, ClusterError> {
        self.ask_to_stop()?;
        self.finish_stop(Instant::now() + self.stop_timeout, &|| false)
    }

    /// Starts again with the same addresses and data, after a stop if it was running, and waits
    /// until it is ready.
    pub fn restart(&mut self) -> Result<(), ClusterError> {
        self.stop()?;
        self.start()?;
        self.wait_ready()
    }

    /// Waits until the broker takes work; an early end of the process is an error at once.
    pub fn wait_ready(&mut self) -> Result<(), ClusterError> {
        self.wait_ready_until(Instant::now() + self.ready_timeout)
    }

    /// What `/status` answers.
    pub fn status(&self) -> Result<Value, ClusterError> {
        let text = self.fetch("/status")?;
        serde_json::from_str(&text).map_err(|_| {
            self.admin_error(admin::HttpError::NotHttp {
                addr: self.plan.admin_addr,
                why: "the status is not JSON",
            })
        })
    }

    /// What `/metrics` answers.
    pub fn metrics(&self) -> Result<String, ClusterError> {
        self.fetch("/metrics")
    }

    fn fetch(&self, path: &str) -> Result<String, ClusterError> {
        admin::get(self.plan.admin_addr, path, ADMIN_TIMEOUT)
            .map(|answer| answer.body)
            .map_err(|source| self.admin_error(source))
    }

    fn admin_error(&self, source: admin::HttpError) -> ClusterError {
        ClusterError::Admin {
            node: self.node_id().to_string(),
            source,
        }
    }

    pub(super) fn wait_ready_until(&mut self, deadline: Instant) -> Result<(), ClusterError> {
        let started = Instant::now();
        loop {
            self.check_alive()?;
            let reasons = match admin::get(self.plan.admin_addr, "/ready", ADMIN_TIMEOUT) {
                Ok(answer) if answer.status == 200 => return Ok(()),
                Ok(answer) => answer.body.trim().to_string(),
                Err(error) => error.to_string(),
            };
            if Instant::now() >= deadline {
                return Err(ClusterError::NotReady {
                    node: self.node_id().to_string(),
                    waited_s: started.elapsed().as_secs(),
                    reasons,
                    log: self.log_tail(),
                });
            }
            std::thread::sleep(READY_STEP);
        }
    }

    /// An error when the process is not there any more.
    pub fn check_alive(&mut self) -> Result<(), ClusterError> {
        let node = self.node_id().to_string();
        let Some(child) = &mut self.child else {
            return Err(ClusterError::NotRunning { node });
        };
        let ended = child.poll_exit().map_err(|source| ClusterError::Signal {
            node: node.clone(),
            source,
        })?;
        match ended {
            None => Ok(()),
            Some(status) => {
                let log = child.log_tail();
                self.child = None;
                Err(ClusterError::Died {
                    node,
                    exit: describe_exit(status),
                    log,
                })
            }
        }
    }

    pub(super) fn ask_to_stop(&mut self) -> Result<(), ClusterError> {
        if self.child.is_some() {
            // A frozen process would not see the request.
            self.signal(libc::SIGCONT)?;
            self.signal(libc::SIGTERM)?;
        }
        Ok(())
    }

    pub(super) fn finish_stop(
        &mut self,
        deadline: Instant,
        hurry: &dyn Fn() -> bool,
    ) -> Result<NodeExit, ClusterError> {
        let node_id = self.node_id().to_string();
        let failed = |source| ClusterError::Signal {
            node: node_id.clone(),
            source,
        };
        let Some(mut child) = self.child.take() else {
            return Ok(NodeExit {
                node_id,
                status: None,
                killed: false,
            });
        };
        let (status, killed) = match child.wait_until(deadline, hurry).map_err(failed)? {
            Some(status) => (status, false),
            None => (child.kill().map_err(failed)?, true),
        };
        Ok(NodeExit {
            node_id,
            status: Some(status),
            killed,
        })
    }
}
