//! Who a certificate says its holder is.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

use crate::ids::NodeId;

/// The DNS names of the first certificate of a chain; none when it cannot be read. The common
/// name does not count.
pub fn peer_names(chain: &[CertificateDer<'_>]) -> Vec<String> {
    let Some(leaf) = chain.first() else {
        return Vec::new();
    };
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(leaf) else {
        return Vec::new();
    };
    dns_names(&parsed)
}

pub(super) fn dns_names(parsed: &x509_parser::certificate::X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = parsed.subject_alternative_name() else {
        return Vec::new();
    };
    let names = extension.value.general_names.iter();
    names
        .filter_map(|name| match name {
            GeneralName::DNSName(dns) => Some((*dns).to_string()),
            GeneralName::OtherName(..)
            | GeneralName::RFC822Name(_)
            | GeneralName::X400Address(_)
            | GeneralName::DirectoryName(_)
            | GeneralName::EDIPartyName(_)
            | GeneralName::URI(_)
            | GeneralName::IPAddress(_)
            | GeneralName::RegisteredID(_) => None,
        })
        .collect()
}

/// Whether a verified chain lets its holder speak as `node`: one DNS name is exactly the node
/// id (DNS names know no case). A wildcard would let one broker speak as another.
pub fn certificate_names_node(chain: &[CertificateDer<'_>], node: &NodeId) -> bool {
    names_include(&peer_names(chain), node.as_str())
}

pub(super) fn names_include(names: &[String], wanted: &str) -> bool {
    names.iter().any(|name| name.eq_ignore_ascii_case(wanted))
}
