//! Certificates: an authority that no system trusts, and a certificate by it for a server on loopback.
//!
//! Two packages have servers behind TLS, so their test programs share it.

use std::path::{Path, PathBuf};

/// Files in PEM.
pub struct Certificates {
    /// Path of the authority's certificate.
    pub authority: PathBuf,
    server: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// New ones, in `folder`.
    pub fn within(folder: &Path) -> Self {
        let mut authority = rcgen::CertificateParams::new(Vec::new()).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let authority = rcgen::CertifiedIssuer::self_signed(authority, key).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let server = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let server = server.signed_by(&key, &authority).unwrap();
        let file = |name: &str, text: String| {
            std::fs::write(folder.join(name), text).unwrap();
            folder.join(name)
        };
        Self {
            authority: file("authority.pem", authority.pem()),
            server: file("server.pem", server.pem()),
            key: file("key.pem", key.serialize_pem()),
        }
    }

    /// versitygw's options to serve by it.
    pub fn of_versitygw(&self) -> [&str; 4] {
        ["--cert", self.server.to_str().unwrap(), "--key", self.key.to_str().unwrap()]
    }
}
