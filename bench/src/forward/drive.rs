//! Running one load while watching it: the progress line, and what is to be read at both ends of the
//! measured time.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::client::{run_load, LoadError, LoadReport, LoadSpec, Progress};
use crate::report::count;

const STEP: Duration = Duration::from_millis(2);
const REDRAW: Duration = Duration::from_millis(200);

/// One end of the measured time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// The warm-up is over.
    Start,
    /// The measured time is over.
    End,
}

/// Runs a load to its end. `at_edge` is called on this thread at both ends of the measured time;
/// `watch` now and then, and an error of it stops the run.
pub fn drive(
    label: &str,
    spec: LoadSpec,
    mut at_edge: impl FnMut(Edge) -> anyhow::Result<()>,
    mut watch: impl FnMut() -> anyhow::Result<()>,
) -> Result<LoadReport, LoadError> {
    let progress = Arc::new(Progress::default());
    let stop = Arc::new(AtomicBool::new(false));
    let (warmup, duration) = (spec.warmup, spec.duration);
    let load = {
        let (progress, stop) = (Arc::clone(&progress), Arc::clone(&stop));
        std::thread::Builder::new()
            .name("load-control".into())
            .spawn(move || run_load(spec, progress, stop))
            .map_err(|error| LoadError::Setup(error.to_string()))?
    };
    let bar = Line::new(label, warmup + duration);
    let mut edges = [(Edge::Start, warmup), (Edge::End, warmup + duration)]
        .into_iter()
        .peekable();
    let mut failed = None;
    let mut redraw_at = Instant::now();
    while !load.is_finished() {
        std::thread::sleep(STEP);
        if let Some(started) = progress.started() {
            let gone = started.elapsed();
            if let Some((edge, _)) = edges.next_if(|(_, at)| *at <= gone) {
                failed = failed.or(at_edge(edge).err());
            }
        }
        if Instant::now() >= redraw_at {
            redraw_at = Instant::now() + REDRAW;
            bar.draw(&progress);
            failed = failed.or(watch().err());
        }
        if failed.is_some() {
            stop.store(true, Ordering::Relaxed);
        }
    }
    bar.clear();
    let outcome = load
        .join()
        .unwrap_or_else(|_| Err(LoadError::Setup("the load generator panicked".into())));
    match failed {
        Some(error) => Err(LoadError::Setup(format!("{error:#}"))),
        None => outcome,
    }
}

/// The progress line; nothing when nobody watches.
struct Line {
    bar: Option<ProgressBar>,
    total: Duration,
    last: std::cell::Cell<(Instant, u64)>,
}

impl Line {
    fn new(label: &str, total: Duration) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total.as_millis() as u64);
            let style = ProgressStyle::with_template("{prefix:14} [{bar:30}] {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(label.to_string());
            bar
        });
        Self {
            bar,
            total,
            last: std::cell::Cell::new((Instant::now(), 0)),
        }
    }

    fn draw(&self, progress: &Progress) {
        let Some(bar) = &self.bar else { return };
        let (then, before) = self.last.get();
        let records = progress.records();
        let rate = (records - before) as f64 / then.elapsed().as_secs_f64().max(1e-3);
        self.last.set((Instant::now(), records));
        let gone = progress.started().map_or(Duration::ZERO, |s| s.elapsed());
        bar.set_position(gone.min(self.total).as_millis() as u64);
        let mut message = format!("{} records/s", count(rate));
        if progress.unknown() + progress.failed() > 0 {
            message += &format!(
                ", {} batches unknown, {} failed",
                progress.unknown(),
                progress.failed()
            );
        }
        bar.set_message(message);
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
