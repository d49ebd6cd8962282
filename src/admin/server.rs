//! The listener: a few worker threads, one request a connection, only GET.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{bounded, Receiver, TrySendError};
use serde_json::json;

use super::{ProcessUsage, Readiness, SharedState};

/// Longest request line and headers, in bytes.
pub const MAX_HEAD_BYTES: usize = 8 << 10;
/// A request that is not read and answered within this time is cut.
pub const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
const WORKERS: usize = 3;
/// Connections accepted and not yet taken by a worker; more are answered 503 at once.
const MAX_WAITING: usize = 16;
/// How long the accepting thread sleeps before it looks at the stop flag.
const STOP_POLL_MS: i32 = 100;

/// A running admin listener; stops when dropped.
pub struct AdminServer {
    local_addr: SocketAddr,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl AdminServer {
    /// Binds `addr` and serves `state` on threads of its own.
    pub fn start(addr: SocketAddr, state: Arc<SharedState>) -> std::io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let local_addr = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let (to_workers, waiting) = bounded::<TcpStream>(MAX_WAITING);
        // Built first: if a later thread cannot start, dropping it ends the earlier ones.
        let mut server = Self {
            local_addr,
            stop: Arc::clone(&stop),
            threads: Vec::new(),
        };
        for index in 0..WORKERS {
            let (state, waiting) = (Arc::clone(&state), waiting.clone());
            server.threads.push(
                std::thread::Builder::new()
                    .name(format!("admin-{index}"))
                    .spawn(move || serve_waiting(&waiting, &state))?,
            );
        }
        server.threads.push(
            std::thread::Builder::new()
                .name("admin-accept".into())
                .spawn(move || {
                    while !stop.load(Ordering::Acquire) {
                        let Some(stream) = accept(&listener) else {
                            continue;
                        };
                        match to_workers.try_send(stream) {
                            Ok(()) => {}
                            Err(TrySendError::Full(stream)) => {
                                refuse(&state, stream, Answer::busy());
                            }
                            Err(TrySendError::Disconnected(_)) => return,
                        }
                    }
                })?,
        );
        Ok(server)
    }

    /// The address bound, with the port the system chose when 0 was asked for.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops accepting, lets requests in progress end and joins the threads.
    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A worker that panicked has already said so; there is nothing left to stop.
            let _ = thread.join();
        }
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Waits a short while for a connection.
fn accept(listener: &TcpListener) -> Option<TcpStream> {
    let mut poll = libc::pollfd {
        fd: listener.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd, which lives through the call.
    let ready = unsafe { libc::poll(&mut poll, 1, STOP_POLL_MS) };
    if ready <= 0 {
        return None;
    }
    match listener.accept() {
        Ok((stream, _)) => stream.set_nonblocking(false).ok().map(|()| stream),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => {
            tracing::warn!(%error, "the admin listener could not accept a connection");
            // Out of file descriptors does not pass by itself; do not spin on it.
            std::thread::sleep(Duration::from_millis(50));
            None
        }
    }
}

fn serve_waiting(waiting: &Receiver<TcpStream>, state: &SharedState) {
    while let Ok(mut stream) = waiting.recv() {
        let deadline = Instant::now() + REQUEST_DEADLINE;
        match read_target(&mut stream, deadline) {
            Ok(path) => {
                state.metrics().control().admin_requests.add_shared(1);
                write_answer(&mut stream, deadline, &answer(&path, state));
            }
            Err(Some(answer)) => refuse(state, stream, answer),
            Err(None) => count_refused(state),
        }
    }
}

fn refuse(state: &SharedState, mut stream: TcpStream, answer: Answer) {
    count_refused(state);
    write_answer(
        &mut stream,
        Instant::now() + Duration::from_millis(200),
        &answer,
    );
}

fn count_refused(state: &SharedState) {
    state
        .metrics()
        .control()
        .admin_requests_refused
        .add_shared(1);
}

struct Answer {
    status: &'static str,
    content_type: &'static str,
    /// Whole header lines beyond the usual ones.
    more_headers: &'static str,
    body: String,
}

impl Answer {
    fn text(status: &'static str, body: impl Into<String>) -> Self {
        Self {
            status,
            content_type: "text/plain; charset=utf-8",
            more_headers: "",
            body: body.into(),
        }
    }

    fn json(status: &'static str, value: &serde_json::Value) -> Self {
        Self {
            status,
            content_type: "application/json",
            more_headers: "",
            body: format!("{value}\n"),
        }
    }

    fn busy() -> Self {
        Self::text("503 Service Unavailable", "too many requests are waiting\n")
    }
}

fn answer(path: &str, state: &SharedState) -> Answer {
    match path {
        "/live" => live(state),
        "/ready" => ready(state),
        "/status" => Answer::json("200 OK", &state.status()),
        "/replication/halted" => Answer::json("200 OK", &state.halted_replicas()),
        "/metrics" => Answer {
            status: "200 OK",
            content_type: "text/plain; version=0.0.4; charset=utf-8",
            more_headers: "",
            body: metrics_text(state),
        },
        _ => Answer::text(
            "404 Not Found",
            "not found; there is /live, /ready, /status, /replication/halted and /metrics\n",
        ),
    }
}

fn live(state: &SharedState) -> Answer {
    let silent = state.silent_cores(Instant::now());
    if silent.is_empty() {
        return Answer::text("200 OK", "live\n");
    }
    let lines: Vec<String> = silent
        .iter()
        .map(|(core, silence)| {
            format!("core {core} has not reported for {} s\n", silence.as_secs())
        })
        .collect();
    Answer::text("503 Service Unavailable", lines.concat())
}

fn ready(state: &SharedState) -> Answer {
    match state.readiness() {
        Readiness::Ready => Answer::json(
            "200 OK",
            &json!({ "ready": true, "reasons": [], "log_failures": state.log_failures() }),
        ),
        Readiness::NotReady(reasons) => Answer::json(
            "503 Service Unavailable",
            &json!({ "ready": false, "reasons": reasons }),
        ),
        Readiness::Draining => Answer::json(
            "503 Service Unavailable",
            &json!({ "ready": false, "reasons": ["draining"] }),
        ),
    }
}

fn metrics_text(state: &SharedState) -> String {
    let info = state.info();
    let ready = u8::from(state.readiness() == Readiness::Ready);
    let mut text = format!(
        "# HELP felix_build_info The running program.\n\
         # TYPE felix_build_info gauge\n\
         felix_build_info{{node_id=\"{}\",version=\"{}\"}} 1\n\
         # HELP felix_ready 1 while the broker takes work.\n\
         # TYPE felix_ready gauge\n\
         felix_ready {ready}\n",
        info.node_id, info.version
    );
    text.push_str(&ProcessUsage::read().render());
    text.push_str(&state.metrics().render());
    text
}

/// Reads one request head and gives its path; `Err(None)` when there is nobody to answer.
fn read_target(stream: &mut TcpStream, deadline: Instant) -> Result<String, Option<Answer>> {
    let mut head = Vec::with_capacity(1024);
    let mut chunk = [0u8; 1024];
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        if head.len() >= MAX_HEAD_BYTES {
            return Err(Some(Answer::text(
                "431 Request Header Fields Too Large",
                "the request is too long\n",
            )));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            return Err(Some(Answer::text(
                "408 Request Timeout",
                "the request took too long\n",
            )));
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Err(None),
            Ok(n) => head.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => return Err(None),
        }
    }
    parse_target(&head).map_err(Some)
}

fn parse_target(head: &[u8]) -> Result<String, Answer> {
    let bad = || Answer::text("400 Bad Request", "this is not an HTTP request\n");
    let line = head.split(|b| *b == b'\r').next().unwrap_or_default();
    let line = std::str::from_utf8(line).map_err(|_| bad())?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(bad());
    };
    if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return Err(bad());
    }
    if method != "GET" {
        return Err(Answer {
            more_headers: "Allow: GET\r\n",
            ..Answer::text("405 Method Not Allowed", "only GET is served here\n")
        });
    }
    Ok(target.split('?').next().unwrap_or_default().to_string())
}

fn write_answer(stream: &mut TcpStream, deadline: Instant, answer: &Answer) {
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(100));
    let text = format!(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\nConnection: close\r\n{}\r\n{}",
        answer.status,
        answer.content_type,
        answer.body.len(),
        answer.more_headers,
        answer.body
    );
    // A client that does not read its answer has lost it; that is all there is to do.
    let _ = stream.set_write_timeout(Some(left));
    if stream.write_all(text.as_bytes()).is_ok() {
        let _ = stream.shutdown(std::net::Shutdown::Write);
        discard_rest(stream);
    }
}

/// Reads away a little of what is still coming: closing on unread bytes would reset the
/// connection and could take the answer with it.
fn discard_rest(stream: &mut TcpStream) {
    let _ = stream.set_read_timeout(Some(Duration::from_millis(100)));
    let mut sink = [0u8; 4096];
    for _ in 0..16 {
        match stream.read(&mut sink) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{get, CoreSnapshot, NodeInfo};
    use super::*;
    use crate::metrics::MetricsHub;

    fn start() -> (AdminServer, Arc<SharedState>) {
        let info = NodeInfo {
            node_id: "n1".into(),
            version: "0.0.0-test".into(),
            cores: 1,
            ..NodeInfo::default()
        };
        let state = SharedState::new(info, MetricsHub::with_cores(1));
        let server = AdminServer::start(([127, 0, 0, 1], 0).into(), Arc::clone(&state)).unwrap();
        (server, state)
    }

    fn fetch(server: &AdminServer, path: &str) -> (u16, String) {
        let answer = get(server.local_addr(), path, Duration::from_secs(5)).unwrap();
        (answer.status, answer.body)
    }

    fn raw(server: &AdminServer, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.write_all(bytes).unwrap();
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    #[test]
    fn endpoints_follow_the_state() {
        let (server, state) = start();
        assert_eq!(fetch(&server, "/live").0, 200);
        let (status, body) = fetch(&server, "/ready");
        assert_eq!(status, 503);
        assert!(body.contains("the broker is starting"), "{body}");

        state.release_start();
        state.publish_core(
            0,
            CoreSnapshot {
                phase: "serving".into(),
                ..CoreSnapshot::default()
            },
        );
        assert_eq!(fetch(&server, "/ready?verbose").0, 200);
        let (_, body) = fetch(&server, "/status");
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(status["node_id"], "n1");
        assert_eq!(status["cores"][0]["phase"], "serving");

        state.metrics().core(0).unwrap().stalls.inc();
        let (_, text) = fetch(&server, "/metrics");
        assert!(text.contains("felix_stalls_total 1\n"), "{text}");
        assert!(text.contains("felix_ready 1\n"));
        assert!(text.contains("felix_build_info{node_id=\"n1\",version=\"0.0.0-test\"} 1\n"));

        state.start_draining();
        let (status, body) = fetch(&server, "/ready");
        assert_eq!(status, 503);
        assert!(body.contains("draining"));
        assert_eq!(fetch(&server, "/nothing").0, 404);
        server.stop();
    }

    #[test]
    fn only_get_only_http_and_only_short_heads() {
        let (server, _state) = start();
        let refused = raw(&server, b"POST /ready HTTP/1.1\r\n\r\n");
        assert!(refused.starts_with("HTTP/1.1 405"), "{refused}");
        assert!(refused.contains("\r\nAllow: GET\r\n"), "{refused}");
        assert!(raw(&server, b"hello\r\n\r\n").starts_with("HTTP/1.1 400"));
        let mut long = b"GET /live HTTP/1.1\r\nX: ".to_vec();
        long.resize(MAX_HEAD_BYTES + 64, b'a');
        assert!(raw(&server, &long).starts_with("HTTP/1.1 431"));
    }

    #[test]
    fn a_client_that_says_nothing_does_not_block_the_others() {
        let (server, _state) = start();
        let _idle: Vec<TcpStream> = (0..WORKERS - 1)
            .map(|_| TcpStream::connect(server.local_addr()).unwrap())
            .collect();
        assert_eq!(fetch(&server, "/live").0, 200);
    }

    #[test]
    fn stopping_frees_the_port() {
        let (server, _state) = start();
        let addr = server.local_addr();
        server.stop();
        TcpListener::bind(addr).unwrap();
    }
}
