//! Retry after: how long a store asks to be left alone, and which of its refusals are for good.
//!
//! An error of the crate `object_store` (0.14) has none of the answer's headers. But the extensions of a request reach
//! its HTTP client: so each fetch puts a [`RetryAdvice`] among them, and an HTTP client that knows of it notes there
//! how the answer refuses. [`RetryAfterConnector`] makes such a client of any other.
//!
//! ```text
//!   Fetcher --GetOptions with a RetryAdvice--> AmazonS3, .. --HttpRequest--> RetryAfterConnector's client --> store
//!      ^                                           |                              |    503, Retry-After: 3
//!      |                                           +<-- an error, not tried again-+<--------'
//!      +-- the pause: 3 s and a random part -- RetryAdvice <-- noted -------------'
//! ```
//!
//! A client that does not know of it notes nothing: then the pauses are those of the backoff alone.
//!
//! Invariant: nothing that a store says makes a fetch outlast its deadline. A pause that would is half of the time that
//! is left, so that there is another attempt.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Longer pauses are taken for mistakes, and not heard.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Codes of answers with status 400 that say that the same request may succeed later.
const TRANSIENT_CODES: [&str; 10] = [
    "RequestTimeout",
    "ExpiredToken",
    "TokenRefreshRequired",
    "InternalError",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "TooManyRequests",
];

/// Where an HTTP client notes how a store's answer refuses a request, found among the request's extensions.
///
/// `RetryAfterConnector` does that (feature `http`); another `HttpService` may call [`RetryAdvice::note`] itself.
#[derive(Clone, Debug, Default)]
pub struct RetryAdvice(Arc<Mutex<Advice>>);

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Advice {
    status: u16,
    pub(crate) after: Option<Duration>,
}

impl RetryAdvice {
    /// Notes an answer's status, and its headers `Retry-After` and `Date`, if it has them. Returns for how long the
    /// store asks to be left alone: only answers of status 429 and 503 do. A value that cannot be understood, or is
    /// more than a day, is as none.
    pub fn note(&self, status: u16, retry_after: Option<&str>, date: Option<&str>) -> Option<Duration> {
        let is_busy = matches!(status, 429 | 503);
        let after = retry_after.filter(|_| is_busy).and_then(|text| pause_of(text, date));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Advice { status, after };
        after
    }

    /// The last answer that was noted since this was called last.
    pub(crate) fn take(&self) -> Advice {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Advice {
    /// The pause before the next attempt, of which there is one in any case if the store asks to be left alone: at
    /// least as long as it asks, if the time that is `left` allows that.
    pub(crate) fn pause(self, backoff: Duration, left: Duration) -> Duration {
        match self.after.map(|after| after + backoff) {
            Some(wanted) if wanted >= left => backoff.max(left / 2),
            Some(wanted) => wanted,
            None => backoff,
        }
    }

    /// Whether the store says that the request itself is wrong: the same again cannot succeed.
    pub(crate) fn is_for_good(self, error: &object_store::Error) -> bool {
        // `object_store` tells what an answer said in the error's text alone.
        self.status == 400
            && code_of(&error.to_string()).is_some_and(|code| !TRANSIENT_CODES.contains(&&*code))
    }
}

/// The code that an answer of S3, of Azure, or of GCS in XML names.
fn code_of(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("<Code>")?;
    rest.split_once("</Code>").map(|(code, _)| code.trim().to_owned()).filter(|code| !code.is_empty())
}

/// The pause in a `Retry-After`: a number of seconds, or a date, which is beside the answer's own `date`, or now.
fn pause_of(text: &str, date: Option<&str>) -> Option<Duration> {
    let text = text.trim();
    let pause = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Duration::from_secs(text.parse().ok()?)
    } else {
        let until = date_of(text)?;
        let now = date
            .and_then(|date| date_of(date.trim()))
            .or_else(|| SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok())?;
        until.saturating_sub(now) // it is over: no more than the backoff
    };
    Some(pause).filter(|pause| *pause <= PAUSE_MAX)
}

/// The time since 1970 of a date such as `Sun, 06 Nov 1994 08:49:37 GMT`, the form that HTTP has servers send.
fn date_of(text: &str) -> Option<Duration> {
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (_, rest) = text.split_once(", ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    let [day, month, year, clock, "GMT"] = words[..] else { return None };
    let number = |text: &str, len: usize| -> Option<u64> {
        let is_number = text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| is_number)
    };
    let (day, year) = (number(day, 2)?, number(year, 4)?);
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let clock: Vec<&str> = clock.split(':').collect();
    let [hour, minute, second] = clock[..] else { return None };
    let (hour, minute, second) = (number(hour, 2)?, number(minute, 2)?, number(second, 2)?);
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Years that begin in March, so that a leap day is the last of its year.
    let (march_year, march_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = march_year * 365 + march_year / 4 - march_year / 100 + march_year / 400;
    let days = days + (153 * march_month + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?; // from the first of March of the year 0 to 1970
    Some(Duration::from_secs(((days * 24 + hour) * 60 + minute) * 60 + second))
}

#[cfg(feature = "http")]
mod connector {
    use std::time::Duration;

    use object_store::ClientOptions;
    use object_store::client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    };

    use super::RetryAdvice;
    use crate::store_text::reason_of;

    /// The HTTP clients of another connector, which also hear what a store says of the next attempt.
    ///
    /// ```no_run
    /// # use object_store::{aws::AmazonS3Builder, client::HttpConnector};
    /// # fn store(connector: impl HttpConnector) -> object_store::Result<object_store::aws::AmazonS3> {
    /// AmazonS3Builder::from_env()
    ///     .with_http_connector(quinion_object::RetryAfterConnector(connector))
    ///     .build()
    /// # }
    /// ```
    #[derive(Clone, Copy, Debug, Default)]
    pub struct RetryAfterConnector<C>(pub C);

    impl<C: HttpConnector> HttpConnector for RetryAfterConnector<C> {
        fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
            Ok(HttpClient::new(AdvisedClient(self.0.connect(options)?)))
        }
    }

    #[derive(Debug)]
    struct AdvisedClient(HttpClient);

    /// An answer after which the store is not to be asked for a while, also not by `object_store` itself.
    #[derive(Debug, thiserror::Error)]
    #[error("status {status}, to be asked again after {} s: {reason}", .after.as_secs())]
    struct BusyAnswer {
        status: u16,
        after: Duration,
        /// The reason in the body, and no more of it: `shown` would not find it in this text.
        reason: String,
    }

    #[async_trait::async_trait]
    impl HttpService for AdvisedClient {
        async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let advice = request.extensions().get::<RetryAdvice>().cloned();
            let answer = self.0.execute(request).await?;
            let Some(advice) = advice.filter(|_| answer.status().as_u16() >= 400) else { return Ok(answer) };
            let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
            let status = answer.status().as_u16();
            let Some(after) = advice.note(status, header("retry-after"), header("date")) else {
                return Ok(answer);
            };
            let body = answer.into_body().bytes().await.unwrap_or_default();
            let reason = reason_of(&String::from_utf8_lossy(&body));
            // Of a kind that `object_store` does not try again by itself.
            Err(HttpError::new(HttpErrorKind::Unknown, BusyAnswer { status, after, reason }))
        }
    }

    #[cfg(test)]
    mod tests {
        use object_store::client::{HttpRequestBody, HttpResponseBody};

        use super::*;

        #[derive(Debug)]
        struct BusyStore(&'static str);

        #[async_trait::async_trait]
        impl HttpService for BusyStore {
            async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
                let mut answer = HttpResponse::new(HttpResponseBody::from(self.0.to_owned()));
                *answer.status_mut() = 503_u16.try_into().unwrap();
                answer.headers_mut().insert("retry-after", "3".parse().unwrap());
                Ok(answer)
            }
        }

        /// 1. A busy store, or a program before it, answers with a text that repeats the request.
        /// 2. Errors and events had all of that text, with what had signed the request.
        #[tokio::test]
        async fn the_error_of_a_busy_store_has_the_reason_and_no_key() {
            for (body, reason) in [
                ("token AKIA", "a document without a code"),
                ("<Error><Code>SlowDown</Code><Key>AKIA</Key></Error>", "SlowDown"),
                ("", ""),
            ] {
                let mut request = HttpRequest::new(HttpRequestBody::empty());
                request.extensions_mut().insert(RetryAdvice::default());
                let error = AdvisedClient(HttpClient::new(BusyStore(body))).call(request).await.unwrap_err();
                let told = format!("HTTP error: status 503, to be asked again after 3 s: {reason}");
                assert_eq!(error.to_string(), told);
                assert!(!format!("{error:?}").contains("AKIA"), "{error:?}");
            }
        }
    }
}

#[cfg(feature = "http")]
pub use connector::RetryAfterConnector;

#[cfg(test)]
mod tests {
    use super::*;

    const NOON: Option<&str> = Some("Sun, 29 Nov 2026 12:00:00 GMT");

    fn noted(status: u16, retry_after: &str) -> Option<Duration> {
        RetryAdvice::default().note(status, Some(retry_after), NOON)
    }

    #[test]
    fn a_pause_is_given_in_seconds_or_as_a_date() {
        for (text, seconds) in [
            ("0", 0),
            ("3", 3),
            (" 120 ", 120),
            ("86400", 86_400),
            ("Sun, 29 Nov 2026 12:00:05 GMT", 5),
            ("Mon, 30 Nov 2026 12:00:00 GMT", 86_400),
            ("Sun, 29 Nov 2026 11:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 0),
        ] {
            assert_eq!(noted(503, text), Some(Duration::from_secs(seconds)), "{text:?}");
        }
        assert_eq!((noted(429, "3"), noted(500, "3")), (Some(Duration::from_secs(3)), None));
        assert_eq!((noted(302, "3"), noted(404, "3")), (None, None));
    }

    #[test]
    fn an_absurd_pause_is_as_none() {
        for text in [
            "",
            "-1",
            "+3",
            "3.5",
            "1e3",
            "soon",
            "86401",
            "99999999999999999999999999",
            "Sun, 29 Nov 2036 12:00:00 GMT",
            "Sun, 29 Nov 2026 12:00:05",
            "Sun, 29 Nov 2026 25:00:05 GMT",
            "Sun, 00 Nov 2026 12:00:05 GMT",
            "Sun, 29 Now 2026 12:00:05 GMT",
            "Sunday, 29-Nov-26 12:00:05 GMT",
            "Sun, 29 Nov 0000 12:00:05 GMT",
            "\u{661}",
        ] {
            assert_eq!(noted(503, text), None, "{text:?}");
        }
        // The store's clock may be wrong: a date is beside its own.
        let slow = RetryAdvice::default().note(
            503,
            Some("Thu, 01 Jan 1970 00:00:07 GMT"),
            Some("Thu, 01 Jan 1970 00:00:00 GMT"),
        );
        assert_eq!(slow, Some(Duration::from_secs(7)));
    }

    #[test]
    fn dates_are_counted_with_their_leap_days() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Tue, 29 Feb 2000 23:59:59 GMT", 951_868_799),
            ("Wed, 01 Mar 2000 00:00:00 GMT", 951_868_800),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
        ] {
            assert_eq!(date_of(text), Some(Duration::from_secs(seconds)), "{text}");
        }
    }

    #[test]
    fn a_pause_leaves_time_for_another_attempt() {
        let seconds = Duration::from_secs;
        let advice = |after| Advice { status: 503, after: Some(seconds(after)) };
        assert_eq!(advice(3).pause(seconds(1), seconds(60)), seconds(4));
        assert_eq!(advice(600).pause(seconds(1), seconds(60)), seconds(30));
        assert_eq!(
            advice(600).pause(seconds(1), Duration::from_millis(100)),
            seconds(1),
            "and it is the last"
        );
        assert_eq!(advice(0).pause(seconds(1), seconds(60)), seconds(1));
        assert_eq!(Advice::default().pause(seconds(1), seconds(60)), seconds(1));
    }

    #[test]
    fn only_a_bad_request_whose_code_says_so_is_refused_for_good() {
        let is_for_good = |status, text: &str| {
            let source = text.to_owned().into();
            Advice { status, after: None }.is_for_good(&object_store::Error::Generic { store: "S3", source })
        };
        let body = |code: &str| format!("400 Bad Request: <Error><Code>{code}</Code></Error>");
        assert!(is_for_good(400, &body("InvalidArgument")) && is_for_good(400, &body("KeyTooLongError")));
        for code in TRANSIENT_CODES.into_iter().chain(["", " "]) {
            assert!(!is_for_good(400, &body(code)), "{code:?}");
        }
        for code in ["TokenRefreshRequired", "Throttling", "RequestLimitExceeded", "TooManyRequests"] {
            assert!(!is_for_good(400, &body(code)), "{code:?}");
        }
        assert!(!is_for_good(400, "400 Bad Request") && !is_for_good(500, &body("InvalidArgument")));
        assert!(!is_for_good(0, &body("InvalidArgument")), "no client has noted the status");
    }
}
