//! Stores: from a URL prefix to a store that can be read.
//!
//! | prefix | store | credentials, from the environment |
//! |---|---|---|
//! | `s3://bucket` | S3, or what speaks its protocol at an endpoint | `AWS_*` |
//! | `gs://bucket` | Google Cloud Storage | `GOOGLE_*` |
//! | `az://container` | Azure Blob Storage | `AZURE_*` |
//! | `http://host/..`, `https://host/..` | a web server | none |
//!
//! A local file needs no store: clients open it themselves, with their own rights.
//!
//! A path after the bucket in a prefix is a folder there, outside which clients cannot read.

use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{Certificate, ClientOptions, ObjectStore, ObjectStoreScheme};
use quinion_object::internals::shown;
use quinion_object::{Options, RetryAfterConnector};
use reqwest::Url;

use crate::config::{StoreConfig, read_file};
use crate::credentials;
use crate::kept_headers::Connector;

/// The error of an Azure store's builder that has no account.
const NO_ACCOUNT: &str = "Account must be specified";

/// The variable of the address of an emulator of Azure's.
const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";

/// A prefix with its store and how that is read.
pub type Opened = (String, (Arc<dyn ObjectStore>, Options));

/// Opens all stores, with the credentials of this process's environment.
///
/// # Errors
/// Those of [`open`], of the first that has one.
pub fn open_all(configs: &[StoreConfig]) -> Result<Vec<Opened>, String> {
    let environment = environment();
    let open = |config: &StoreConfig| Ok((config.prefix.clone(), open(config, &environment)?));
    configs.iter().map(open).collect()
}

/// The environment of this process, without variables that are not UTF-8.
pub fn environment() -> Vec<(String, String)> {
    let pairs = std::env::vars_os();
    pairs.filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?))).collect()
}

/// A prefix in the form in which two are compared.
pub fn trimmed(prefix: &str) -> &str {
    prefix.trim_end_matches('/')
}

/// Checks that each store has a prefix of its own, and one without secrets: events and monitors show it.
///
/// # Errors
/// A prefix has what may be secret, which is not in the error; the prefix that two have.
pub fn check_prefixes(configs: &[StoreConfig]) -> Result<(), String> {
    for StoreConfig { prefix, .. } in configs {
        let is_plain = !prefix.chars().any(|c| c.is_control() || "\"\\?#@".contains(c));
        if !is_plain {
            let text =
                "a store's prefix has a user, a password, a query or a character that is none of a URL's";
            return Err(format!("{text}; leave it out, and give credentials by the environment"));
        }
    }
    let mut prefixes: Vec<_> = configs.iter().map(|config| trimmed(&config.prefix)).collect();
    prefixes.sort_unstable();
    match prefixes.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("there are two stores for {}; give each a prefix of its own", pair[0])),
        None => Ok(()),
    }
}

/// The store, and how it is read.
///
/// # Errors
/// The prefix is no URL of a store, or what is told of the store is not enough.
pub fn open(
    config: &StoreConfig,
    environment: &[(String, String)],
) -> Result<(Arc<dyn ObjectStore>, Options), String> {
    let prefix = &config.prefix;
    let failed = |error: &dyn std::fmt::Display| {
        format!("cannot use the store {prefix}: {}", shown(&error.to_string()))
    };
    let no_store = || {
        failed(
            &"it is no URL of a store; write it as s3://BUCKET, gs://BUCKET, az://CONTAINER or https://HOST/PATH",
        )
    };
    let url = Url::parse(prefix).map_err(|_| no_store())?;
    let (scheme, folder) = ObjectStoreScheme::parse(&url).map_err(|_| no_store())?;
    let folder = Path::parse(folder).map_err(|error| failed(&error))?;
    if matches!(scheme, ObjectStoreScheme::Local | ObjectStoreScheme::Memory) {
        return Err(failed(&"local files need no store, clients open them themselves; remove it"));
    }
    let options = options_of(&scheme, config, environment).map_err(|error| failed(&error))?;
    let name = name_of(prefix, &options);
    let client = client_options(config)?;
    let described = StoreDescription { prefix, scheme: &scheme, url: &url, options: &options };
    let store = built(&described, client).map_err(|error| {
        let is_account = error.to_string().contains(NO_ACCOUNT);
        if is_account {
            failed(&format_args!("{error}; set AZURE_STORAGE_ACCOUNT_NAME"))
        } else {
            failed(&error)
        }
    })?;
    let store: Arc<dyn ObjectStore> =
        if folder == Path::default() { store } else { Arc::new(PrefixStore::new(store, folder)) };
    let freshness = config.freshness.unwrap_or_default().0;
    let options = Options::new().store_name(name).freshness(freshness);
    // Those of nginx and Apache are of a file's time and size.
    let options = if scheme == ObjectStoreScheme::Http { options.etags_are_times() } else { options };
    Ok((store, fetched_as(config, options)))
}

/// `options`, with what the store's configuration says of how it is fetched.
pub fn fetched_as(config: &StoreConfig, options: Options) -> Options {
    let options = config.hedge.into_iter().fold(options, |options, hedge| hedge.of(options));
    let options = config.deadline.into_iter().fold(options, |options, deadline| deadline.of(options));
    let options = config.gets_in_flight.into_iter().fold(options, |options, gets| gets.of(options));
    config.bytes_in_flight.into_iter().fold(options, |options, bytes| bytes.of(options))
}

/// Options of the HTTP client that no option of a store can give: further trusted authorities.
///
/// # Errors
/// The file of certificates cannot be read, or has none.
pub fn client_options(config: &StoreConfig) -> Result<ClientOptions, String> {
    let Some(pem) = ca_certificates(config)? else { return Ok(ClientOptions::new()) };
    let certificates = Certificate::from_pem_bundle(&pem).unwrap_or_default();
    if certificates.is_empty() {
        let path = config.ca_certificates.as_deref().unwrap_or(std::path::Path::new("")).display();
        return Err(format!("the file of CA certificates {path} has none in PEM; name one that has"));
    }
    Ok(certificates.into_iter().fold(ClientOptions::new(), ClientOptions::with_root_certificate))
}

/// The file of certificates that a store has, if it has one.
///
/// # Errors
/// It cannot be read.
pub fn ca_certificates(config: &StoreConfig) -> Result<Option<Vec<u8>>, String> {
    let Some(path) = &config.ca_certificates else { return Ok(None) };
    let failed = |error| format!("cannot read the file of CA certificates {}: {error}", path.display());
    read_file(path).map(Some).map_err(failed)
}

/// The settings of a store.
struct StoreDescription<'d> {
    prefix: &'d str,
    scheme: &'d ObjectStoreScheme,
    url: &'d Url,
    options: &'d [(String, String)],
}

/// A store by its builder, which takes no option of another kind of store.
fn built(
    described: &StoreDescription<'_>,
    client: ClientOptions,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let StoreDescription { prefix, scheme, url, options } = *described;
    macro_rules! by {
        ($builder:ty, $url:expr, $connector:expr) => {{
            let builder = <$builder>::new().with_url($url).with_client_options(client);
            let builder = builder.with_http_connector(RetryAfterConnector($connector));
            let told = options.iter().filter_map(|(key, value)| Some((key.parse().ok()?, value)));
            told.fold(builder, |builder, (key, value)| builder.with_config(key, value))
        }};
    }
    let store: Arc<dyn ObjectStore> = match scheme {
        ObjectStoreScheme::AmazonS3 => {
            let builder = by!(AmazonS3Builder, url.as_str(), Connector::Keeping);
            Arc::new(credentials::s3(builder, prefix, options)?)
        }
        ObjectStoreScheme::GoogleCloudStorage => {
            let builder = by!(GoogleCloudStorageBuilder, url.as_str(), Connector::LeavingOut);
            Arc::new(credentials::google(builder, prefix, options)?)
        }
        ObjectStoreScheme::MicrosoftAzure => {
            let builder = by!(MicrosoftAzureBuilder, url.as_str(), Connector::LeavingOut);
            Arc::new(credentials::azure(builder, prefix, options)?)
        }
        _ => Arc::new(by!(HttpBuilder, url.origin().ascii_serialization(), Connector::LeavingOut).build()?),
    };
    Ok(store)
}

/// The options of a store's builder.
///
/// # Errors
/// The store's configuration has what is for `s3://` alone, or an endpoint that is none.
pub fn options_of(
    scheme: &ObjectStoreScheme,
    config: &StoreConfig,
    environment: &[(String, String)],
) -> Result<Vec<(String, String)>, &'static str> {
    let is_of_http =
        |endpoint: &String| Url::parse(endpoint).is_ok_and(|url| ["http", "https"].contains(&url.scheme()));
    if !config.endpoint.as_ref().is_none_or(is_of_http) {
        return Err("`endpoint` is no URL of HTTP; write it as https://host or http://host:port");
    }
    let (family, own_keys) = match scheme {
        ObjectStoreScheme::AmazonS3 => ("aws_", Some(("aws_endpoint", "aws_region"))),
        ObjectStoreScheme::GoogleCloudStorage => ("google_", None),
        ObjectStoreScheme::MicrosoftAzure => ("azure_", None),
        _ => ("http_", None),
    };
    let lower = environment.iter().map(|(key, value)| (key.to_ascii_lowercase(), value.clone()));
    let mut options: Vec<_> = lower.filter(|(key, _)| key.starts_with(family) && family != "http_").collect();
    // The AWS tools' name of the endpoint of S3 alone, which wins over that of all services.
    let of_s3 = options.iter().find(|(key, _)| key == "aws_endpoint_url_s3").cloned();
    if let Some((_, endpoint)) = of_s3 {
        options.retain(|(key, _)| !key.starts_with("aws_endpoint"));
        options.push(("aws_endpoint".into(), endpoint));
    }
    match (own_keys, &config.endpoint, &config.region) {
        (Some((endpoint_key, region_key)), endpoint, region) => {
            if let Some(endpoint) = endpoint {
                options.retain(|(key, _)| !key.starts_with("aws_endpoint"));
                options.push((endpoint_key.into(), endpoint.clone()));
            }
            options.extend(region.iter().map(|region| (region_key.into(), region.clone())));
        }
        (None, None, None) => {}
        (None, ..) => return Err("`endpoint` and `region` are for s3:// alone; remove them"),
    }
    // The builder reads the emulator's address from the environment itself; here it tells one from another.
    let is_emulated = |(key, value): &(String, String)| {
        let is_true = ["1", "true", "on", "yes", "y"].contains(&&*value.to_ascii_lowercase());
        key == "azure_storage_use_emulator" && is_true
    };
    if options.iter().any(is_emulated) {
        let told = environment.iter().find(|(key, _)| key == EMULATOR_URL);
        let url = told.map_or("http://127.0.0.1:10000", |(_, url)| url);
        options.push((EMULATOR_URL.to_ascii_lowercase(), url.to_owned()));
    }
    let is_http = |(key, value): &(String, String)| is_endpoint(key) && value.starts_with("http://");
    let is_plain = options.iter().any(is_http)
        || *scheme == ObjectStoreScheme::Http && config.prefix.starts_with("http://");
    if is_plain {
        options.push(("allow_http".into(), "true".into()));
    }
    Ok(options)
}

/// The name by which a disk tier knows the store: so it never serves another's bytes.
pub fn name_of(prefix: &str, options: &[(String, String)]) -> String {
    let endpoint = options.iter().rev().find(|(key, _)| is_endpoint(key)).map_or("", |(_, value)| value);
    format!("{prefix} at [{endpoint}] as {:?}", identity(options))
}

/// Whether an option says where the store answers; other services' endpoints are in the environment as well.
fn is_endpoint(key: &str) -> bool {
    let all =
        ["aws_endpoint", "aws_endpoint_url", "azure_storage_endpoint", "azure_endpoint", "google_base_url"];
    all.contains(&key) || key.eq_ignore_ascii_case(EMULATOR_URL)
}

/// The account that asks the store: the disk tier does not give one account's bytes to another. None of it is a secret.
fn identity(options: &[(String, String)]) -> Vec<&(String, String)> {
    const ENDS: [&str; 6] = [
        "access_key_id",
        "account_name",
        "client_id",
        "tenant_id",
        "service_account",
        "application_credentials",
    ];
    let mut found: Vec<_> =
        options.iter().filter(|(key, _)| ENDS.iter().any(|end| key.ends_with(end))).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(config: &StoreConfig, environment: &[(&str, &str)]) -> Vec<(String, String)> {
        let environment: Vec<_> = environment.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        let (scheme, _) = ObjectStoreScheme::parse(&Url::parse(&config.prefix).unwrap()).unwrap();
        options_of(&scheme, config, &environment).unwrap()
    }

    fn pair(key: &str, value: &str) -> (String, String) {
        (key.into(), value.into())
    }

    /// 1. A file behind a web server is replaced by one with the same size and time, as tools do that keep times.
    /// 2. Its ETag is made of these, so the disk tier gave the old bytes, for ever.
    #[test]
    fn etags_of_web_servers_name_no_bytes_for_ever() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let environment = [pair("AWS_REGION", "r"), pair("AWS_SKIP_SIGNATURE", "true")];
        for (prefix, are_times) in [("https://h/x", true), ("http://h", true), ("s3://b", false)] {
            let config = StoreConfig { prefix: prefix.into(), ..Default::default() };
            let (_, options) = open(&config, &environment).unwrap();
            let text = format!("etags_are_times: {are_times}");
            assert!(format!("{options:?}").contains(&text), "{prefix}: {options:?}");
        }
    }

    #[test]
    fn the_nearest_endpoint_wins_and_a_plain_one_is_allowed() {
        let mut config = StoreConfig { prefix: "s3://b".into(), ..Default::default() };
        let environment =
            [("AWS_ENDPOINT_URL", "https://all"), ("AWS_ENDPOINT_URL_S3", "http://s3"), ("AZURE_X", "1")];
        let of_others = [("AWS_ENDPOINT_URL_SQS", "http://sqs")];
        assert_eq!(options(&config, &of_others), [pair("aws_endpoint_url_sqs", "http://sqs")]);
        let found = options(&config, &environment);
        assert_eq!(found, [pair("aws_endpoint", "http://s3"), pair("allow_http", "true")]);
        config.endpoint = Some("https://own".into());
        assert_eq!(options(&config, &environment), [pair("aws_endpoint", "https://own")]);
    }

    #[test]
    fn plain_endpoints_of_google_and_of_azure_are_allowed_and_tell_stores_apart() {
        let of = |prefix: &str, environment: &[(&str, &str)]| {
            let config = StoreConfig { prefix: prefix.into(), ..Default::default() };
            let options = options(&config, environment);
            (options.contains(&pair("allow_http", "true")), name_of(prefix, &options))
        };
        let google = |url| of("gs://b", &[("GOOGLE_BASE_URL", url)]);
        let azure = |name, url| of("az://c", &[("AZURE_STORAGE_ACCOUNT_NAME", "one"), (name, url)]);
        let emulator = |url| {
            let account = ("AZURE_STORAGE_ACCOUNT_NAME", "one");
            of(
                "az://c",
                &[account, ("AZURE_STORAGE_USE_EMULATOR", "True"), ("AZURITE_BLOB_STORAGE_URL", url)],
            )
        };
        let all = [
            google("http://h:1"),
            google("http://h:2"),
            of("gs://b", &[]),
            azure("AZURE_ENDPOINT", "http://h:1/one"),
            azure("AZURE_STORAGE_ENDPOINT", "http://h:2/one"),
            emulator("http://h:1"),
            emulator("http://h:2"),
            of("az://c", &[("AZURE_STORAGE_ACCOUNT_NAME", "one"), ("AZURE_STORAGE_USE_EMULATOR", "1")]),
            of("az://c", &[("AZURE_STORAGE_ACCOUNT_NAME", "one"), ("AZURE_STORAGE_USE_EMULATOR", "false")]),
        ];
        assert_eq!(
            all.each_ref().map(|(is_plain, _)| *is_plain),
            [true, true, false, true, true, true, true, true, false]
        );
        for (at, (_, name)) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|(_, other)| other != name), "{name}");
        }
        assert!(!google("https://h").0);
    }

    #[test]
    fn a_store_of_one_provider_is_not_shown_the_credentials_of_another() {
        let environment = [("AWS_SECRET_ACCESS_KEY", "s"), ("GOOGLE_X", "g")];
        for (prefix, keys) in [("gs://b", vec!["google_x"]), ("https://h/x", vec![])] {
            let config = StoreConfig { prefix: prefix.into(), ..Default::default() };
            let found = options(&config, &environment);
            assert_eq!(found.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), keys, "{prefix}");
        }
    }

    #[test]
    fn an_endpoint_that_is_no_url_is_refused_at_the_start() {
        for endpoint in ["", "host:9000", "not a url", "ftp://host", "/path", "http://"] {
            let config = StoreConfig {
                prefix: "s3://b".into(),
                endpoint: Some(endpoint.into()),
                ..Default::default()
            };
            let error = open(&config, &[]).map(drop).unwrap_err();
            assert!(error.contains("`endpoint`") && error.contains("s3://b"), "{endpoint}: {error}");
        }
    }

    #[test]
    fn the_account_is_part_of_the_identity_and_secrets_are_not() {
        let environment = [("AZURE_STORAGE_ACCOUNT_NAME", "one"), ("AZURE_STORAGE_ACCOUNT_KEY", "secret")];
        let config = StoreConfig { prefix: "az://c".into(), ..Default::default() };
        let options = options(&config, &environment);
        assert_eq!(identity(&options), [&pair("azure_storage_account_name", "one")]);
    }

    #[test]
    fn a_store_with_half_of_its_settings_is_refused_with_the_name_of_the_other_half() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        for (prefix, environment, words) in [
            ("az://c", &[][..], "set AZURE_STORAGE_ACCOUNT_NAME"),
            ("s3://b", &[("AWS_SECRET_ACCESS_KEY", "x")][..], "AWS_ACCESS_KEY_ID is not; set both"),
        ] {
            let config = StoreConfig { prefix: prefix.into(), ..Default::default() };
            let environment: Vec<_> = environment.iter().map(|(key, value)| pair(key, value)).collect();
            let error = open(&config, &environment).map(drop).unwrap_err();
            assert!(error.starts_with(&format!("cannot use the store {prefix}: ")), "{error}");
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn a_url_that_is_no_store_is_an_error_with_its_prefix() {
        for prefix in ["bucket", "ftp://h/x", "file:///x", "memory:///x"] {
            let config = StoreConfig { prefix: prefix.into(), ..Default::default() };
            let error = open(&config, &[]).map(drop).unwrap_err();
            assert!(error.contains(prefix), "{error}");
        }
    }
}
