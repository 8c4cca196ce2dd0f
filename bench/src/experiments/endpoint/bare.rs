//! Bare: GETs of signed URLs over connections that are kept, with as little as a client can do.
//!
//! The client parses the status and length in an answer's head. It reads the body into memory that is used again, and
//! compares only its first and last bytes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::Instant;

use super::servers::{At, OBJECT_BYTES, Servers};
use super::{Gets, Measured, boto};
use crate::harness::Unmeasured;

/// The longest head of an answer by these servers, in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    fn new(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; HEAD_BYTES_MAX + OBJECT_BYTES as usize] })
    }

    fn get(&mut self, request: &[u8], number: usize) -> Result<(), Unmeasured> {
        let failed = |why: String| Err(Unmeasured::Failed(format!("object {number}: {why}")));
        self.stream.write_all(request)?;
        let (mut filled, mut whole) = (0, None);
        let (head, all) = loop {
            if let Some((head, all)) = whole.filter(|(_, all)| *all <= filled) {
                break (head, all);
            }
            let bytes = self.stream.read(&mut self.buffer[filled..])?;
            if bytes == 0 {
                return failed("the server has closed the connection".into());
            }
            filled += bytes;
            if whole.is_none() {
                whole = head_of(&self.buffer[..filled]).map(|(head, body)| (head, head + body));
            }
        };
        let (body, line) = (&self.buffer[head..all], format!("{number:015}\n"));
        let is_right = self.buffer.starts_with(b"HTTP/1.1 200")
            && body.len() as u64 == OBJECT_BYTES
            && body.starts_with(line.as_bytes())
            && body.ends_with(line.as_bytes());
        if is_right {
            Ok(())
        } else {
            failed(String::from_utf8_lossy(&self.buffer[..all.min(512)]).into_owned())
        }
    }
}

/// The lengths of an answer's head and body, once the head is complete.
fn head_of(bytes: &[u8]) -> Option<(usize, usize)> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let len = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    Some((end, len.unwrap_or(0)))
}

pub fn read(servers: &Servers, at: At, gets: Gets) -> Result<Measured, Unmeasured> {
    let address = servers.address(at);
    let requests: Vec<_> = boto::urls(&servers.python, address)?
        .iter()
        .map(|url| {
            let target = url.splitn(4, '/').nth(3).unwrap_or_default();
            format!("GET /{target} HTTP/1.1\r\nHost: {address}\r\n\r\n").into_bytes()
        })
        .collect();
    let begins = Barrier::new(gets.connections + 1);
    let work = |first: usize| {
        let ready = Connection::new(address).map_err(Unmeasured::from).and_then(|mut connection| {
            requests.iter().enumerate().try_for_each(|(number, request)| connection.get(request, number))?;
            Ok(connection)
        });
        begins.wait();
        let mut connection = ready?;
        (first..gets.gets).step_by(gets.connections).try_for_each(|number| {
            let number = number % requests.len();
            connection.get(&requests[number], number)
        })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..gets.connections).map(|first| scope.spawn(move || work(first))).collect();
        begins.wait();
        let (begun, before) = (Instant::now(), servers.cpu_seconds());
        let ended: Vec<_> =
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect();
        let (seconds, cpu_seconds) = (begun.elapsed().as_secs_f64(), servers.cpu_seconds() - before);
        ended.into_iter().collect::<Result<(), _>>()?;
        Ok(Measured { seconds, cpu_seconds })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_tells_where_the_body_begins_and_ends() {
        assert_eq!(head_of(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nabc"), Some((38, 7)));
        assert_eq!(head_of(b"HTTP/1.1 200 OK\r\nConte"), None);
        assert_eq!(head_of(b"HTTP/1.1 204 No\r\n\r\n"), Some((19, 0)));
    }
}
