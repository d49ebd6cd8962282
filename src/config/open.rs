//! The whole check: values, their relations, and the files they name. Opens files for reading
//! and nothing else.

use crate::catalog::{Catalog, CatalogFile};
use crate::tls::{ClientCertSource, ClientTls, PeerTls, TlsFault};

use super::args::ServeArgs;
use super::cross;
use super::error::{from_catalog, from_tls, shown, ConfigError, ConfigErrors};
use super::gather::gather;
use super::model::Config;
use super::read::{read_config, Draft, ValueReader};

/// A configuration that passed every check, with what was read on the way.
#[derive(Debug)]
pub struct Loaded {
    /// The values.
    pub config: Config,
    /// The catalog, ready to be watched.
    pub catalog: CatalogFile,
    /// TLS between brokers.
    pub peer_tls: PeerTls,
    /// TLS for clients.
    pub client_tls: ClientTls,
    /// What works and should not stay so.
    pub warnings: Vec<String>,
}

impl Config {
    /// Finds and judges every value without opening the files they name; for printing. The
    /// configuration file itself is read.
    pub fn resolve(
        args: &ServeArgs,
        environment: &[(String, String)],
    ) -> Result<Self, ConfigErrors> {
        let mut errors = Vec::new();
        let draft = resolve(args, environment, &mut errors);
        if errors.is_empty() {
            Ok(draft.config)
        } else {
            Err(ConfigErrors(errors))
        }
    }

    /// The `FELIX_` variables of this process.
    pub fn process_environment() -> Vec<(String, String)> {
        let variables = std::env::vars_os();
        let text = variables.map(|(key, value)| {
            let key = key.to_string_lossy().into_owned();
            (key, value.to_string_lossy().into_owned())
        });
        text.filter(|(key, _)| key.starts_with("FELIX_")).collect()
    }
}

fn resolve(
    args: &ServeArgs,
    environment: &[(String, String)],
    errors: &mut Vec<ConfigError>,
) -> Draft {
    let values = gather(args, environment, errors);
    let reader = ValueReader::new(&values);
    let draft = read_config(&reader, &values);
    errors.extend(reader.errors.into_inner());
    errors.extend(cross::check(&draft.config));
    draft
}

/// The full check, the same for `--check-config` and for a start. `now_s` is the wall clock in
/// seconds since the epoch. Creates no file and opens no socket.
pub fn load(
    args: &ServeArgs,
    environment: &[(String, String)],
    now_s: u64,
) -> Result<Loaded, ConfigErrors> {
    let mut errors = Vec::new();
    let mut warnings = Vec::new();
    let draft = resolve(args, environment, &mut errors);
    warnings.extend(cross::warnings(&draft.config));
    let catalog = draft
        .has_catalog
        .then(|| CatalogFile::load(&draft.config.catalog));
    let catalog = match catalog {
        None => None,
        Some(Ok(file)) => {
            check_against_catalog(&draft, &file.catalog, &mut errors, &mut warnings);
            Some(file)
        }
        Some(Err(faults)) => {
            errors.extend(from_catalog(faults));
            None
        }
    };
    let peer_tls = if draft.has_node_id {
        load_peer_tls(&draft.config, now_s, &mut errors, &mut warnings)
    } else {
        None
    };
    let config = draft.config;
    let node_catalog = catalog.as_ref().map(|file| &*file.catalog);
    let client_tls = load_client_tls(&config, node_catalog, now_s, &mut errors, &mut warnings);
    match (catalog, peer_tls, client_tls) {
        (Some(catalog), Some(peer_tls), Some(client_tls)) if errors.is_empty() => Ok(Loaded {
            config,
            catalog,
            peer_tls,
            client_tls,
            warnings,
        }),
        _ => Err(ConfigErrors(errors)),
    }
}

fn about(key: &str, config: &Config, rule: String, remedy: &str) -> ConfigError {
    let found = config.values.get(key);
    ConfigError {
        key: key.to_string(),
        value: found.map_or_else(|| "(unset)".to_string(), |found| shown(&found.text)),
        origin: found.map_or_else(String::new, |found| found.origin.to_string()),
        rule,
        remedy: remedy.to_string(),
    }
}

fn check_against_catalog(
    draft: &Draft,
    catalog: &Catalog,
    errors: &mut Vec<ConfigError>,
    warnings: &mut Vec<String>,
) {
    let config = &draft.config;
    match catalog.node_by_id(config.node_id.as_str()) {
        None if !draft.has_node_id => {}
        None => {
            let file = config.catalog.display();
            let rule = format!("must be a [[node]] of {file}");
            let remedy = "add it to the catalog, or correct the name";
            errors.push(about("node-id", config, rule, remedy));
        }
        Some(index) => {
            let declared = catalog.node(index).internal_addr.as_socket_addr();
            let listen = config.internal_listen;
            if declared.is_some_and(|addr| listen.port() != 0 && addr.port() != listen.port()) {
                warnings.push(format!(
                    "internal-listen = {listen} has another port than the catalog's internal address {} of {}; peers dial the catalog's",
                    catalog.node(index).internal_addr,
                    config.node_id
                ));
            }
        }
    }
    let peer_files = ["internal-tls-cert", "internal-tls-key", "internal-tls-ca"];
    if peer_files.iter().any(|key| config.values.contains_key(key)) {
        // Given; what is wrong with them is reported where they are read.
        return;
    }
    if catalog.max_replicas() > 1 {
        let many = catalog.sharded().iter().find(|spec| spec.replicas > 1);
        let title = many.map_or_else(String::new, |spec| spec.title());
        errors.push(about(
            "internal-tls-cert",
            config,
            format!("must be set for replication, and {title} has replicas"),
            "set internal-tls-cert, internal-tls-key and internal-tls-ca, or use replicas = 1: without them whoever reaches the internal port can rewrite the logs",
        ));
    } else {
        warnings.push(format!(
            "brokers do not authenticate each other: whoever reaches {} is a peer; set internal-tls-cert, internal-tls-key and internal-tls-ca",
            config.internal_listen
        ));
    }
}

/// The setting that names the file of a fault.
fn key_of(
    fault: &TlsFault,
    named: &[(&'static str, &std::path::Path)],
    default: &'static str,
) -> &'static str {
    let hit = named.iter().find(|(_, path)| *path == fault.file);
    hit.map_or(default, |(key, _)| key)
}

fn load_peer_tls(
    config: &Config,
    now_s: u64,
    errors: &mut Vec<ConfigError>,
    warnings: &mut Vec<String>,
) -> Option<PeerTls> {
    let Some(paths) = &config.peer.tls else {
        return match PeerTls::unauthenticated(&config.node_id) {
            Ok(tls) => Some(tls),
            Err(faults) => {
                errors.extend(faults.into_iter().map(|fault| from_tls("node-id", fault)));
                None
            }
        };
    };
    let named = [
        ("internal-tls-cert", paths.cert.as_path()),
        ("internal-tls-key", paths.key.as_path()),
        ("internal-tls-ca", paths.ca.as_path()),
    ];
    match PeerTls::load(paths, &config.node_id, now_s) {
        Ok(tls) => {
            warnings.extend(tls.warnings().iter().map(ToString::to_string));
            Some(tls)
        }
        Err(faults) => {
            for fault in faults {
                if fault.is_warning() {
                    warnings.push(fault.to_string());
                } else {
                    let key = key_of(&fault, &named, "internal-tls-cert");
                    errors.push(from_tls(key, fault));
                }
            }
            None
        }
    }
}

fn load_client_tls(
    config: &Config,
    catalog: Option<&Catalog>,
    now_s: u64,
    errors: &mut Vec<ConfigError>,
    warnings: &mut Vec<String>,
) -> Option<ClientTls> {
    let source = match &config.client.cert_and_key {
        Some((cert, key)) => ClientCertSource::Files {
            cert: cert.clone(),
            key: key.clone(),
        },
        None => ClientCertSource::SelfSigned {
            names: own_names(config, catalog),
        },
    };
    let files = config.client.cert_and_key.as_ref();
    let named: Vec<(&'static str, &std::path::Path)> = files
        .map(|(cert, key)| {
            vec![
                ("client-cert", cert.as_path()),
                ("client-key", key.as_path()),
            ]
        })
        .unwrap_or_default();
    match ClientTls::load(&source, now_s) {
        Ok(tls) => {
            warnings.extend(tls.warnings().iter().map(ToString::to_string));
            Some(tls)
        }
        Err(faults) => {
            for fault in faults {
                let key = key_of(&fault, &named, "client-cert");
                errors.push(from_tls(key, fault));
            }
            None
        }
    }
}

/// The names clients may know this broker by.
fn own_names(config: &Config, catalog: Option<&Catalog>) -> Vec<String> {
    let mut names = vec![config.node_id.as_str().to_string()];
    let node = catalog.and_then(|catalog| {
        let index = catalog.node_by_id(config.node_id.as_str())?;
        Some(catalog.node(index))
    });
    if let Some(node) = node {
        let host = node.client_addr.rsplit_once(':').map(|(host, _)| host);
        names.extend(host.map(|host| host.trim_matches(['[', ']']).to_string()));
    }
    if !config.client_listen.ip().is_unspecified() {
        names.push(config.client_listen.ip().to_string());
    }
    names.sort();
    names.dedup();
    names
}
