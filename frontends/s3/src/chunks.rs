//! Chunks: a body in the framing `aws-chunked`, brought to chunks that fit into memory before s3s decodes it.
//!
//! ```text
//!   10000000 CRLF 256 MiB CRLF 0 CRLF trailer       100000 CRLF 1 MiB CRLF, 256 times, then 0 CRLF trailer
//!   8000;chunk-signature=.. CRLF 32 KiB CRLF        the same
//!   4000000;chunk-signature=.. CRLF                 an error: its signature is of all its bytes
//! ```
//!
//! s3s collects a chunk, of up to 4 GiB, before it gives a byte of it. Here a chunk without a signature becomes
//! several, which the client's signature allows: it covers no framing. One with a signature is taken up to a length.
//!
//! Invariants:
//!  1. s3s sees lengths that are written here alone: it reads eight digits, and leaves out what follows them.
//!  2. All chunks together have no more bytes than the request says that their content has.

use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::StreamBody;
use hyper::body::Frame;
use hyper::header::HeaderMap;
use s3s::{Body, StdError};

/// Part of the error of a signed chunk that is too long.
pub const SIGNED_TOO_LONG: &str = "a signed chunk has more than 16 MiB";
/// Part of the error of framing that is none.
const NO_CHUNKS: &str = "the body is not in chunks as it was announced";
/// A chunk's length in hexadecimal digits and its signature are shorter.
const LINE_BYTES_MAX: usize = 256;
/// Bytes of a chunk that are gathered before they are handed on.
const GATHERED_MAX: usize = 64 << 10;
const LIMITS: Limits = Limits { piece: 1 << 20, signed: 16 << 20 };

/// The most bytes of a chunk, without a signature and with one.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The most of one that s3s sees without a signature.
    piece: u64,
    /// The most of one with a signature.
    signed: u64,
}

/// How many bytes the chunks of a body have, if its headers say that it comes in chunks.
pub fn announced(headers: &HeaderMap) -> Option<u64> {
    let digests = headers.get_all("x-amz-content-sha256");
    if !digests.iter().any(|digest| digest.as_bytes().starts_with(b"STREAMING-")) {
        return None;
    }
    let len = headers.get("x-amz-decoded-content-length").and_then(|len| len.to_str().ok()?.parse().ok());
    Some(len.unwrap_or(0)) // s3s refuses it without one
}

/// The body with shorter chunks, of `len` bytes together.
pub fn bounded(body: Body, len: u64) -> Body {
    let chunker =
        Chunker { limits: LIMITS, left: len, state: State::Length(Vec::new()), gathered: Vec::new() };
    let frames = stream::unfold(Some((body, chunker)), |state| async move {
        let (mut body, mut chunker) = state?;
        let mut out = Vec::new();
        let taken = match body.next().await? {
            Ok(bytes) => chunker.take(bytes, &mut out).map_err(StdError::from),
            Err(error) => Err(error),
        };
        let goes_on = taken.is_ok();
        let frames = out.into_iter().map(Ok).chain(taken.err().map(Err));
        let frames = frames.map(|bytes: Result<Bytes, StdError>| bytes.map(Frame::data));
        Some((stream::iter(frames.collect::<Vec<_>>()), goes_on.then_some((body, chunker))))
    });
    Body::http_body_unsync(StreamBody::new(frames.flatten()))
}

#[derive(Debug)]
struct Chunker {
    limits: Limits,
    /// Bytes that further chunks may have.
    left: u64,
    state: State,
    /// Bytes of a chunk that s3s is to see. Those that came keep the buffer that they came in, and a client may send
    /// them one by one.
    gathered: Vec<u8>,
}

#[derive(Debug)]
enum State {
    /// In the line before a chunk, with as much of it as came.
    Length(Vec<u8>),
    /// In a chunk with that many bytes to come, and that many until s3s sees the end of one.
    Data { left: u64, piece: u64 },
    /// Behind a chunk, with as many bytes of CRLF to come.
    End(&'static [u8]),
    /// Behind the last chunk, which is empty: s3s bounds what comes there.
    Trailer,
}

impl Chunker {
    /// Takes the next bytes, and adds those that s3s is to see.
    fn take(&mut self, mut bytes: Bytes, out: &mut Vec<Bytes>) -> Result<(), &'static str> {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Length(line) => {
                    let end = bytes.iter().position(|&byte| byte == b'\n');
                    let part = bytes.split_to(end.map_or(bytes.len(), |end| end + 1));
                    if line.len() + part.len() > LINE_BYTES_MAX {
                        return Err(NO_CHUNKS);
                    }
                    line.extend_from_slice(&part);
                    if end.is_some() {
                        let line = std::mem::take(line);
                        self.begin(&line, out)?;
                    }
                }
                State::Data { left, piece } => {
                    let part = bytes.split_to(usize::try_from(*piece).unwrap_or(usize::MAX).min(bytes.len()));
                    (*left, *piece) = (*left - part.len() as u64, *piece - part.len() as u64);
                    self.gathered.extend_from_slice(&part);
                    if *piece == 0 || self.gathered.len() >= GATHERED_MAX {
                        out.push(std::mem::take(&mut self.gathered).into());
                    }
                    if *piece == 0 {
                        out.push(Bytes::from_static(b"\r\n"));
                        let left = *left;
                        self.state = if left > 0 { self.piece(left, out) } else { State::End(b"\r\n") };
                    }
                }
                State::End(wanted) => {
                    let part = bytes.split_to(bytes.len().min(wanted.len()));
                    *wanted = wanted.strip_prefix(&*part).ok_or(NO_CHUNKS)?;
                    if wanted.is_empty() {
                        self.state = State::Length(Vec::new());
                    }
                }
                State::Trailer => out.push(std::mem::take(&mut bytes)),
            }
        }
        Ok(())
    }

    /// Begins a chunk after its line.
    fn begin(&mut self, line: &[u8], out: &mut Vec<Bytes>) -> Result<(), &'static str> {
        let line =
            line.strip_suffix(b"\r\n").and_then(|line| std::str::from_utf8(line).ok()).ok_or(NO_CHUNKS)?;
        let (digits, signature) = line.split_once(';').map_or((line, None), |(len, rest)| (len, Some(rest)));
        let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let len = u64::from_str_radix(digits, 16).ok().filter(|_| is_number).ok_or(NO_CHUNKS)?;
        self.left = self.left.checked_sub(len).ok_or(NO_CHUNKS)?;
        let is_signature =
            |text: &str| text.strip_prefix("chunk-signature=").is_some_and(|text| text.len() == 64);
        self.state = match signature {
            Some(text) if !is_signature(text) => return Err(NO_CHUNKS),
            Some(_) if len > self.limits.signed => return Err(SIGNED_TOO_LONG),
            None if len > 0 => self.piece(len, out),
            signature => {
                let signature = signature.map_or(String::new(), |text| format!(";{text}"));
                out.push(format!("{len:x}{signature}\r\n").into());
                if len == 0 { State::Trailer } else { State::Data { left: len, piece: len } }
            }
        };
        Ok(())
    }

    /// Begins a piece of a chunk without a signature that has `left` bytes to come.
    fn piece(&self, left: u64, out: &mut Vec<Bytes>) -> State {
        let piece = left.min(self.limits.piece);
        out.push(format!("{piece:x}\r\n").into());
        State::Data { left, piece }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const SIGNATURE: &str = ";chunk-signature=";

    /// The body that s3s sees of one of `len` bytes in chunks, which comes in pieces of these lengths, over and over.
    fn seen(body: &[u8], len: u64, pieces: &[usize]) -> Result<Vec<u8>, &'static str> {
        let limits = Limits { piece: 4, signed: 8 };
        let mut chunker =
            Chunker { limits, left: len, state: State::Length(Vec::new()), gathered: Vec::new() };
        let (mut rest, mut out) = (body, Vec::new());
        for &piece in pieces.iter().cycle() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            chunker.take(Bytes::copy_from_slice(now), &mut out)?;
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        Ok(out.concat())
    }

    /// A body of chunks of that content, of which some have a signature, and a trailer.
    fn framed(chunks: &[(Vec<u8>, bool)]) -> Vec<u8> {
        let mut body = Vec::new();
        for (content, is_signed) in chunks.iter().chain([&(Vec::new(), false)]) {
            let signature = if *is_signed { format!("{SIGNATURE}{}", "5".repeat(64)) } else { String::new() };
            body.extend(format!("{:X}{signature}\r\n", content.len()).bytes());
            body.extend(content);
            body.extend(if content.is_empty() { &b"a:b\r\n\r\n"[..] } else { b"\r\n" });
        }
        body
    }

    proptest! {
        #[test]
        fn chunks_without_a_signature_become_short_ones_of_the_same_content(
            chunks in vec((vec(any::<u8>(), 1..40), any::<bool>()), 0..8),
            pieces in vec(1_usize..30, 1..6),
        ) {
            let chunks: Vec<_> = chunks.into_iter().map(|(content, is_signed)| {
                let is_signed = is_signed && content.len() <= 8;
                (content, is_signed)
            }).collect();
            let len = chunks.iter().map(|(content, _)| content.len() as u64).sum();
            let short = chunks.iter().flat_map(|(content, is_signed)| {
                content.chunks(if *is_signed { 8 } else { 4 }).map(|part| (part.to_vec(), *is_signed))
            });
            let wanted = framed(&short.collect::<Vec<_>>()).to_ascii_lowercase();
            let seen = seen(&framed(&chunks), len, &pieces).unwrap();
            prop_assert_eq!(seen.to_ascii_lowercase(), wanted);
        }
    }

    #[test]
    fn lengths_that_are_none_or_too_great_are_refused() {
        let signed = |len: &str| format!("{len}{SIGNATURE}{}\r\n", "5".repeat(64));
        for (body, len, why) in [
            (signed("9"), 100, Err(SIGNED_TOO_LONG)),
            (signed("8"), 100, Ok(())),
            ("9\r\n".into(), 8, Err(NO_CHUNKS)),
            ("9\r\n".into(), 9, Ok(())),
            ("5\r\nabcde\r\n5\r\n".into(), 9, Err(NO_CHUNKS)),
            // s3s reads eight digits of it: 1 byte.
            ("000000010\r\n".into(), 15, Err(NO_CHUNKS)),
            ("ffffffffffffffff1\r\n".into(), u64::MAX, Err(NO_CHUNKS)),
            ("+5\r\n".into(), 9, Err(NO_CHUNKS)),
            ("\r\n".into(), 9, Err(NO_CHUNKS)),
            ("5\n".into(), 9, Err(NO_CHUNKS)),
            ("5;other=a\r\n".into(), 9, Err(NO_CHUNKS)),
            ("1\r\nabc".into(), 9, Err(NO_CHUNKS)),
            ("5".repeat(300), u64::MAX, Err(NO_CHUNKS)),
        ] {
            for pieces in [&[1][..], &[1000]] {
                assert_eq!(seen(body.as_bytes(), len, pieces).map(drop), why, "{body}");
            }
        }
    }

    #[test]
    fn only_a_body_that_is_announced_in_chunks_is_looked_at() {
        let with = |pairs: &[(&'static str, &'static str)]| {
            let pairs = pairs.iter().map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            announced(&pairs.collect::<HeaderMap>())
        };
        let digest = ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER");
        assert_eq!(with(&[digest, ("x-amz-decoded-content-length", "7")]), Some(7));
        assert_eq!(with(&[digest, ("x-amz-decoded-content-length", "+-7")]), Some(0));
        assert_eq!(with(&[("x-amz-content-sha256", "UNSIGNED-PAYLOAD")]), None);
    }
}
