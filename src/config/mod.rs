//! Flags, environment and file become one validated configuration.
//!
//! Duty: find the value of every setting (flag over environment over file over default), refuse
//! what cannot work, alone or together, and say everything that is wrong in one run. One table,
//! [`SETTINGS`], feeds the help, the names, the defaults and the ranges.
//!
//! Not its duty: opening sockets or writing files. [`load`] reads the catalog and the
//! certificates, because most mistakes are there, and creates nothing.
//!
//! Invariants:
//! * A setting is declared once; a setting nobody reads fails a test.
//! * An unknown key or `FELIX_` variable is an error, never ignored.
//! * What [`Config::print`] writes can be fed back in and holds no secret.

mod args;
mod cores;
mod cross;
mod error;
mod gather;
mod model;
mod open;
mod print;
mod read;
mod settings;

pub use args::ServeArgs;
pub use cores::{CoreSelection, CoreSelectionError};
pub use error::{ConfigError, ConfigErrors};
pub use gather::{Origin, FAULTS_VARIABLE};
pub use model::{
    ClientSettings, Config, ExecutorSettings, ForwardSettings, PeerSettings, StorageSettings,
    SyncMethod,
};
pub use open::{load, Loaded};
pub use print::reference;
pub use settings::{Kind, Setting, SETTINGS};
