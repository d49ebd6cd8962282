//! The catalog file on disk: read once at start, then looked at every second.
//!
//! Runs on a control thread; it blocks on the disk. A file that is bad, half written or would
//! break a rule of [`check_transition`] leaves the running catalog in force and is reported
//! once.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fault::{CatalogError, CatalogErrors};
use super::model::Catalog;
use super::parse::parse_catalog;
use super::transition::check_transition;

/// How often the file is looked at.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Longest catalog or key-set file: what is larger is surely the wrong file.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// A catalog file and the content it was last read with.
#[derive(Debug, Clone)]
pub struct CatalogFile {
    /// What the file says.
    pub catalog: Arc<Catalog>,
    content: Content,
}

/// The bytes a catalog was made from: the file itself and the key sets it names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Content {
    text: String,
    key_sets: Vec<(PathBuf, String)>,
}

fn read_text(path: &Path) -> io::Result<String> {
    let size = std::fs::metadata(path)?.len();
    if size > MAX_FILE_BYTES {
        let why = format!("{size} bytes are more than {MAX_FILE_BYTES}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    std::fs::read_to_string(path)
}

fn unreadable(path: &Path, error: &io::Error) -> CatalogErrors {
    CatalogErrors(vec![CatalogError {
        file: path.to_path_buf(),
        line: None,
        cause: format!("the catalog cannot be read: {error}"),
        remedy: "name a readable catalog file with --catalog".to_string(),
    }])
}

fn read_and_parse(path: &Path) -> (Content, Result<Catalog, CatalogErrors>) {
    let mut content = Content::default();
    match read_text(path) {
        Ok(text) => content.text = text,
        Err(error) => return (content, Err(unreadable(path, &error))),
    }
    let mut key_sets = Vec::new();
    let parsed = parse_catalog(path, &content.text, &mut |file| {
        let json = read_text(file)?;
        key_sets.push((file.to_path_buf(), json.clone()));
        Ok(json)
    });
    content.key_sets = key_sets;
    (content, parsed)
}

impl CatalogFile {
    /// Reads and validates the file, or names everything that is wrong with it.
    pub fn load(path: &Path) -> Result<Self, CatalogErrors> {
        let (content, parsed) = read_and_parse(path);
        Ok(Self {
            catalog: Arc::new(parsed?),
            content,
        })
    }

    /// Starts looking for changes.
    pub fn watch(self, now: Instant) -> CatalogWatch {
        CatalogWatch {
            running: self.catalog,
            seen: self.content,
            due: now + POLL_INTERVAL,
            unreadable_since: None,
        }
    }
}

/// Notices changes of a catalog file.
#[derive(Debug)]
pub struct CatalogWatch {
    running: Arc<Catalog>,
    /// The content that was judged last, good or bad: the same bytes are not judged twice.
    seen: Content,
    due: Instant,
    /// The error already reported while the file cannot be read.
    unreadable_since: Option<io::ErrorKind>,
}

impl CatalogWatch {
    /// The catalog in force.
    pub fn running(&self) -> &Arc<Catalog> {
        &self.running
    }

    /// When [`CatalogWatch::poll`] will next look at the disk.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Looks at the file when a second has passed. `None`: nothing changed. `Some(Ok)`: a new
    /// catalog is in force. `Some(Err)`: the file changed into something that is refused, and
    /// the old one stays in force.
    ///
    /// `judge` may refuse a file that is right in itself.
    pub fn poll(
        &mut self,
        now: Instant,
        judge: &dyn Fn(&Catalog) -> Result<(), CatalogErrors>,
    ) -> Option<Result<Arc<Catalog>, CatalogErrors>> {
        if now < self.due {
            return None;
        }
        self.due = now + POLL_INTERVAL;
        self.look(judge)
    }

    /// Makes the next [`CatalogWatch::poll`] look at the file whatever the time.
    pub fn look_soon(&mut self, now: Instant) {
        self.due = self.due.min(now);
    }

    fn look(
        &mut self,
        judge: &dyn Fn(&Catalog) -> Result<(), CatalogErrors>,
    ) -> Option<Result<Arc<Catalog>, CatalogErrors>> {
        let path = self.running.source().to_path_buf();
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) => {
                let known = self.unreadable_since.replace(error.kind());
                return (known != Some(error.kind())).then(|| Err(unreadable(&path, &error)));
            }
        };
        let was_unreadable = self.unreadable_since.take().is_some();
        if !was_unreadable && text == self.seen.text && self.key_sets_unchanged() {
            return None;
        }
        let (content, parsed) = read_and_parse(&path);
        if content == self.seen {
            return None;
        }
        self.seen = content;
        let judged = parsed.and_then(|next| {
            check_transition(&self.running, &next)?;
            judge(&next)?;
            Ok(Arc::new(next))
        });
        if let Ok(next) = &judged {
            self.running = Arc::clone(next);
        }
        Some(judged)
    }

    fn key_sets_unchanged(&self) -> bool {
        let mut sets = self.seen.key_sets.iter();
        sets.all(|(file, json)| read_text(file).is_ok_and(|now| now == *json))
    }
}
