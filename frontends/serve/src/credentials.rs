//! Credentials: where those of a store are looked for, and an error of its own where there are none.
//!
//! ```text
//!   environment --names--> keys, a role's token, ..      the first that is there is used    -> "those of NAMES failed"
//!                  none--> the machine's metadata service, for so long as `MACHINE_MAX`     -> "there are none"
//! ```
//!
//! The crate `object_store` has no error for a lack of credentials: it asks the metadata service, and its error is that
//! of a connection to 169.254.169.254, after a minute of attempts on a machine without one. So a store's provider of
//! credentials is wrapped: its error says which names were looked for in the environment, and what to do.
//!
//! A service that has given credentials once is asked without that bound, and its errors pass, as those of a store do.
//!
//! Not an invariant: that the list of names is all that a store's builder takes. Aliases are looked for, and not told.

use std::fmt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::azure::{MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder};
use object_store::{CredentialProvider, Error as StoreError, Result as StoreResult};
use quinion_object::internals::shown;

/// How long a metadata service that has given no credentials yet is asked. One that is there answers in milliseconds.
const MACHINE_MAX: Duration = Duration::from_secs(5);

/// Where the credentials of one kind of store are looked for.
#[derive(Debug)]
struct CredentialChain {
    /// Variables of the environment: those of a row together are credentials. Each has its name, and aliases.
    sources: &'static [&'static [&'static [&'static str]]],
    /// The variable by which requests are not signed.
    unsigned: &'static str,
    /// The file that is read where no variable is there, in the user's home.
    file: Option<&'static str>,
    /// The part of the remedy that is this provider's own.
    remedy: &'static str,
}

static S3: CredentialChain = CredentialChain {
    sources: &[
        &[&["AWS_ACCESS_KEY_ID"], &["AWS_SECRET_ACCESS_KEY"]],
        &[&["AWS_WEB_IDENTITY_TOKEN_FILE"], &["AWS_ROLE_ARN"]],
        &[&["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"]],
        &[&["AWS_CONTAINER_CREDENTIALS_FULL_URI"], &["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]],
    ],
    unsigned: "AWS_SKIP_SIGNATURE",
    file: None,
    remedy: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (~/.aws is not read), or give the machine a role",
};

static GOOGLE: CredentialChain = CredentialChain {
    sources: &[
        &[&["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"]],
        &[&["GOOGLE_SERVICE_ACCOUNT_KEY"]],
        &[&["GOOGLE_APPLICATION_CREDENTIALS"]],
        &[&["GOOGLE_BEARER_TOKEN"]],
    ],
    unsigned: "GOOGLE_SKIP_SIGNATURE",
    file: Some(".config/gcloud/application_default_credentials.json"),
    remedy: "name a service account's file in GOOGLE_SERVICE_ACCOUNT, or log in by `gcloud auth application-default \
             login`",
};

static AZURE: CredentialChain = CredentialChain {
    sources: &[
        &[&["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"]],
        &[&["AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"]],
        &[&["AZURE_STORAGE_TOKEN"]],
        &[
            &["AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID"],
            &[
                "AZURE_TENANT_ID",
                "AZURE_STORAGE_TENANT_ID",
                "AZURE_AUTHORITY_ID",
                "AZURE_STORAGE_AUTHORITY_ID",
            ],
            &["AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET"],
        ],
        &[
            &["AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID"],
            &[
                "AZURE_TENANT_ID",
                "AZURE_STORAGE_TENANT_ID",
                "AZURE_AUTHORITY_ID",
                "AZURE_STORAGE_AUTHORITY_ID",
            ],
            &["AZURE_FEDERATED_TOKEN_FILE"],
        ],
        &[&["AZURE_USE_AZURE_CLI"]],
        // A token service of a container or a host, which is the machine's own in all but the address.
        &[&["AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT"]],
    ],
    unsigned: "AZURE_SKIP_SIGNATURE",
    file: None,
    remedy: "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or give the machine a managed identity",
};

/// The origin of a store's credentials.
#[derive(Clone, PartialEq, Eq, Debug)]
enum CredentialSource {
    /// Variables, by their names.
    Named(String),
    File(&'static str),
    /// The metadata service of the machine.
    Machine,
}

impl CredentialChain {
    /// `None`: requests are not signed.
    fn origin(&self, options: &[(String, String)], home: Option<&Path>) -> Option<CredentialSource> {
        let value = |name: &str| {
            let found = options.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_ascii_lowercase())
        };
        if value(self.unsigned).is_some_and(|value| ["1", "true", "on", "yes", "y"].contains(&&*value)) {
            return None;
        }
        let is_there = |names: &&&[&str]| names.iter().any(|name| value(name).is_some());
        let source = self.sources.iter().find(|row| row.iter().filter(is_there).count() == row.len());
        let file = self.file.filter(|file| home.is_some_and(|home| home.join(file).exists()));
        Some(match (source, file) {
            (Some(row), _) => CredentialSource::Named(names_of(row, " and ")),
            (None, Some(file)) => CredentialSource::File(file),
            (None, None) => CredentialSource::Machine,
        })
    }

    /// The complaint about a first source of which a part is missing, which a builder refuses.
    fn half(&self, options: &[(String, String)]) -> Option<String> {
        let is_there = |names: &&[&str]| {
            options.iter().any(|(key, _)| names.iter().any(|name| key.eq_ignore_ascii_case(name)))
        };
        let (found, missing): (Vec<&[&str]>, Vec<&[&str]>) =
            self.sources[0].iter().copied().partition(is_there);
        let (found, missing) = (found.first()?.first()?, missing.first()?.first()?);
        Some(format!("{found} is set and {missing} is not; set both, or neither"))
    }

    /// The names that were looked for in vain.
    fn names(&self) -> String {
        let rows: Vec<_> = self.sources.iter().map(|row| names_of(row, " with ")).collect();
        rows.join(", ")
    }
}

fn names_of(row: &[&[&str]], between: &str) -> String {
    row.iter().filter_map(|names| names.first().copied()).collect::<Vec<_>>().join(between)
}

/// A provider whose errors say where credentials were looked for.
struct ExplainedProvider<C> {
    inner: Arc<dyn CredentialProvider<Credential = C>>,
    chain: &'static CredentialChain,
    prefix: String,
    origin: CredentialSource,
    /// How long the machine is asked that has given none yet.
    machine_max: Duration,
    /// Whether the machine has given credentials. A hint: another thread may learn of it a little later.
    has_given: AtomicBool,
}

impl<C> fmt::Debug for ExplainedProvider<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the provider's: it has the keys.
        f.debug_struct("ExplainedProvider").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl<C> ExplainedProvider<C> {
    /// Reading again is of no use before an operator has done something.
    fn none(&self, why: &str) -> StoreError {
        let CredentialChain { unsigned, remedy, .. } = self.chain;
        let (names, prefix) = (self.chain.names(), &self.prefix);
        let file = self.chain.file.map_or(String::new(), |file| format!("there is no ~/{file}, "));
        let source = format!(
            "there are no credentials: the environment has none of {names}, {file}and this machine's metadata service \
             gives none ({why}); {remedy}, or set {unsigned}=true for a public bucket"
        );
        StoreError::Unauthenticated { path: prefix.clone(), source: source.into() }
    }

    fn failed(&self, why: &str) -> StoreError {
        let origin = match &self.origin {
            CredentialSource::Named(names) => names.clone(),
            CredentialSource::File(file) => format!("~/{file}"),
            CredentialSource::Machine => "this machine's metadata service".into(),
        };
        let source =
            format!("cannot have the credentials of {origin} for {}: {why}; correct these", self.prefix);
        StoreError::Generic { store: "credentials", source: source.into() }
    }
}

type Given<C> = StoreResult<Arc<C>>;

impl<C: Send + Sync> CredentialProvider for ExplainedProvider<C> {
    type Credential = C;

    fn get_credential<'s, 'f>(&'s self) -> Pin<Box<dyn Future<Output = Given<C>> + Send + 'f>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            let given = self.inner.get_credential();
            if self.origin != CredentialSource::Machine || self.has_given.load(Ordering::Relaxed) {
                return given.await.map_err(|error| self.failed(&shown(&error.to_string())));
            }
            match tokio::time::timeout(self.machine_max, given).await {
                Ok(Ok(credential)) => {
                    self.has_given.store(true, Ordering::Relaxed);
                    Ok(credential)
                }
                Ok(Err(error)) => Err(self.none(&shown(&error.to_string()))),
                Err(_) => Err(self.none("it has not answered in time")),
            }
        })
    }
}

/// The provider that explains; `None` if requests are not signed.
fn explained<C: Send + Sync + 'static>(
    chain: &'static CredentialChain,
    inner: &Arc<dyn CredentialProvider<Credential = C>>,
    prefix: &str,
    options: &[(String, String)],
) -> Option<Arc<dyn CredentialProvider<Credential = C>>> {
    let home = std::env::var_os("HOME");
    let origin = chain.origin(options, home.as_deref().map(Path::new))?;
    let (inner, prefix) = (Arc::clone(inner), prefix.to_owned());
    let (machine_max, has_given) = (MACHINE_MAX, AtomicBool::new(false));
    Some(Arc::new(ExplainedProvider { inner, chain, prefix, origin, machine_max, has_given }))
}

macro_rules! builds {
    ($(#[$doc:meta])* $name:ident, $builder:ty, $store:ty, $chain:expr) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// What is told of the store is not enough.
        pub fn $name(builder: $builder, prefix: &str, options: &[(String, String)]) -> StoreResult<$store> {
            if let Some(half) = $chain.half(options) {
                return Err(StoreError::Generic { store: "credentials", source: half.into() });
            }
            let store = builder.clone().build()?;
            match explained(&$chain, store.credentials(), prefix, options) {
                Some(provider) => builder.with_credentials(provider).build(),
                None => Ok(store),
            }
        }
    };
}

builds!(
    /// A store of S3, whose lack of credentials is an error that says so. The options are the builder's.
    s3, AmazonS3Builder, AmazonS3, S3
);
builds!(
    /// As [`s3`], of Google.
    google, GoogleCloudStorageBuilder, GoogleCloudStorage, GOOGLE
);
builds!(
    /// As [`s3`], of Azure.
    azure, MicrosoftAzureBuilder, MicrosoftAzure, AZURE
);

#[cfg(test)]
mod tests {
    use super::*;

    fn options(names: &[&str]) -> Vec<(String, String)> {
        names.iter().map(|name| (name.to_ascii_lowercase(), "true".to_owned())).collect()
    }

    #[test]
    fn the_first_names_that_are_all_there_are_the_origin() {
        let of = |names: &[&str]| S3.origin(&options(names), None);
        let named = |names: &str| Some(CredentialSource::Named(names.to_owned()));
        assert_eq!(of(&[]), Some(CredentialSource::Machine));
        assert_eq!(
            of(&["AWS_SECRET_ACCESS_KEY", "AWS_ROLE_ARN", "AWS_REGION"]),
            Some(CredentialSource::Machine)
        );
        let both =
            ["AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"];
        assert_eq!(of(&both), named("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"));
        assert_eq!(of(&both[..3]), named("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN"));
        assert_eq!(of(&["AWS_SKIP_SIGNATURE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]), None);
        let half = |names: &[&str]| S3.half(&options(names));
        let words = "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not; set both, or neither";
        assert_eq!(half(&["AWS_ACCESS_KEY_ID"]).as_deref(), Some(words));
        assert_eq!((half(&[]), half(&both), half(&["AWS_ROLE_ARN"])), (None, None, None));
        let token = AZURE.origin(&options(&["AZURE_STORAGE_SAS_TOKEN"]), None);
        assert_eq!(token, named("AZURE_STORAGE_SAS_KEY"));
    }

    #[test]
    fn a_file_in_the_home_is_an_origin_as_well() {
        let home = tempfile::tempdir().unwrap();
        assert_eq!(GOOGLE.origin(&[], Some(home.path())), Some(CredentialSource::Machine));
        let path = home.path().join(GOOGLE.file.unwrap());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, "{}").unwrap();
        assert_eq!(GOOGLE.origin(&[], Some(home.path())), Some(CredentialSource::File(GOOGLE.file.unwrap())));
        assert_eq!(S3.origin(&[], Some(home.path())), Some(CredentialSource::Machine));
    }

    /// A provider that gives what it is made of: credentials, an error, or nothing at all.
    #[derive(Debug)]
    struct FakeProvider(Option<Result<u32, &'static str>>);

    impl CredentialProvider for FakeProvider {
        type Credential = u32;

        fn get_credential<'s, 'f>(&'s self) -> Pin<Box<dyn Future<Output = Given<u32>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            Box::pin(async move {
                match self.0 {
                    Some(Ok(number)) => Ok(Arc::new(number)),
                    Some(Err(why)) => Err(StoreError::Generic { store: "S3", source: why.into() }),
                    None => std::future::pending().await,
                }
            })
        }
    }

    fn asked(chain: &'static CredentialChain, gives: FakeProvider, names: &[&str]) -> Given<u32> {
        let inner = Arc::new(gives) as Arc<dyn CredentialProvider<Credential = u32>>;
        let origin = chain.origin(&options(names), None).unwrap();
        let (machine_max, has_given) = (Duration::from_millis(20), AtomicBool::new(false));
        let prefix = "s3://b".into();
        let provider = ExplainedProvider { inner, chain, prefix, origin, machine_max, has_given };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(provider.get_credential())
    }

    /// 1. A user has no credentials, and reads an object.
    /// 2. The error was that of a connection to an address of a metadata service.
    #[test]
    fn a_lack_of_credentials_is_told_with_their_names_and_a_remedy() {
        let refused = "Error performing PUT http://169.254.169.254/latest/api/token in 1s";
        for (chain, remedy, unsigned) in [
            (&S3, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_SKIP_SIGNATURE=true"),
            (&GOOGLE, "GOOGLE_SERVICE_ACCOUNT,", "GOOGLE_SKIP_SIGNATURE=true"),
            (&AZURE, "set AZURE_STORAGE_ACCOUNT_KEY", "AZURE_SKIP_SIGNATURE=true"),
        ] {
            let error = asked(chain, FakeProvider(Some(Err(refused))), &[]).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, StoreError::Unauthenticated { .. }), "it is tried again: {text}");
            for part in ["s3://b", "there are no credentials", &chain.names(), remedy, unsigned, "metadata"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let silent = asked(&S3, FakeProvider(None), &[]).unwrap_err().to_string();
        assert!(silent.contains("not answered in time"), "{silent}");
        assert_eq!(asked(&S3, FakeProvider(Some(Ok(7))), &[]).unwrap(), Arc::new(7));
    }

    #[test]
    fn credentials_that_are_named_and_fail_are_told_by_their_names_and_without_the_answer() {
        let answer =
            "Server returned non-2xx status code: 403 Forbidden: <E><Code>No</Code><Token>T0</Token></E>";
        let names = ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"];
        let error = asked(&S3, FakeProvider(Some(Err(answer))), &names).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, StoreError::Generic { .. }), "it may be well in a moment: {text}");
        assert!(text.contains("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN for s3://b"), "{text}");
        assert!(text.contains("403 Forbidden: No; correct these") && !text.contains("T0"), "{text}");
    }
}
