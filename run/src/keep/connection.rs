//! Connection: a connection to the owner of a kept cache, as a runner has it.
//!
//! ```text
//!   connect --no listener--> None             the caller looks at the lock, and starts one or waits
//!      |     --another user's--> error
//!      v
//!   ask --> answer
//!       --> None: it has ended                the caller begins anew
//!       --> error: it does not answer         stopped, or hung: reported with a remedy
//! ```
//!
//! Every wait here has an end, so that a stopped owner blocks no command. When it continues it answers the questions
//! that were given up: answers come in the order of the questions, and the late ones are skipped.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use quinion::internals::sys::peer;

use super::message::{LINE_MAX, Message};
use super::{Name, silent};
use crate::user_folder::Folder;

/// After this silence an owner counts as hung.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Connection {
    name: Name,
    /// The owner's process number here; 0 if it has none.
    process: u32,
    stream: BufReader<UnixStream>,
    late: u32,
}

impl Connection {
    /// Connects to the owner of `name`; `None` if there is no listener.
    ///
    /// # Errors
    /// The process that listens is another user's, or has answered no process for long.
    pub fn to(folder: &Folder, name: &Name) -> io::Result<Option<Self>> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // Even connecting may wait, when many processes wait for an owner that hangs.
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_TIMEOUT))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_TIMEOUT))?;
        match connect(&socket, &SocketAddrUnix::new(folder.socket(name))?) {
            Ok(()) => {}
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::CONNRESET) => return Ok(None),
            Err(Errno::WOULDBLOCK) => return Err(silent(name)),
            Err(error) => return Err(error.into()),
        }
        let user = peer::user(socket.as_fd()).ok_or_else(io::Error::last_os_error)?;
        if user != rustix::process::geteuid().as_raw() {
            return Err(io::Error::other(format!(
                "the cache `{name}` in {} belongs to user {user}, and what it serves is for that user's programs; \
                 remove that folder, or set XDG_RUNTIME_DIR to a folder of your own",
                folder.path().display()
            )));
        }
        let process = peer::process(socket.as_fd()).map_or(0, |process| process as u32);
        let stream = BufReader::new(UnixStream::from(socket));
        Ok(Some(Self { name: name.clone(), process, stream, late: 0 }))
    }

    /// The owner's process number here; 0 if it has none.
    pub fn process(&self) -> u32 {
        self.process
    }

    /// Sets the longest wait for answers from now on.
    pub fn give_up_after(&self, time: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(time))
    }

    /// Asks, and waits for an answer; `None` if the owner has ended.
    ///
    /// # Errors
    /// It says nothing, or nothing that can be understood.
    pub fn ask(&mut self, question: &Message) -> io::Result<Option<Message>> {
        // An owner that has ended may have sent something before, without being asked.
        let sent = self.stream.get_mut().write_all(question.line().as_bytes());
        if let Err(error) = sent
            && !is_disconnected(&error)
        {
            return Err(self.named_if_silent(error));
        }
        let mut answer = self.receive_or_note_late()?;
        while self.late > 0 && answer.is_some() {
            let Some(next) = self.receive_or_note_late()? else { break }; // it has ended, and that was its last word
            answer = Some(next);
            self.late -= 1;
        }
        Ok(answer)
    }

    fn receive_or_note_late(&mut self) -> io::Result<Option<Message>> {
        self.receive().inspect_err(|_| self.late += 1)
    }

    pub fn receive(&mut self) -> io::Result<Option<Message>> {
        let mut line = String::new();
        match (&mut self.stream).take(LINE_MAX as u64).read_line(&mut line) {
            Ok(_) if !line.ends_with('\n') => Ok(None), // all that it could say before it ended
            Ok(_) => Message::parse(&line).map(Some).ok_or_else(|| self.not_understood()),
            Err(error) if is_disconnected(&error) => Ok(None),
            Err(error) => Err(self.named_if_silent(error)),
        }
    }

    /// The error of an owner whose message this version does not understand.
    pub fn not_understood(&self) -> io::Error {
        let Self { name, process, .. } = self;
        io::Error::other(format!(
            "the cache `{name}` (process {process}) is of another version, and its answer is not understood; \
             end it by `quinion stop {name}`, or use another by --keep=OTHER"
        ))
    }

    /// The error of a call to the owner; one that names the cache if the owner did not answer.
    fn named_if_silent(&self, error: io::Error) -> io::Error {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => silent(&self.name),
            _ => error,
        }
    }
}

fn is_disconnected(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1. An owner stands still, and a question is given up.
    /// 2. It goes on, and answers that question and the next.
    /// 3. The first answer is not the second's.
    #[test]
    fn a_late_answer_is_dropped() {
        let (ours, mut owners) = UnixStream::pair().expect("a pair");
        let mut line =
            Connection { name: Name::default(), process: 1, stream: BufReader::new(ours), late: 0 };
        line.give_up_after(Duration::from_millis(1)).expect("it is a socket");
        for _ in 0..2 {
            assert!(
                line.ask(&Message::ask("numbers")).is_err_and(|why| why.to_string().contains("quinion stop"))
            );
        }
        line.give_up_after(ANSWER_TIMEOUT).expect("it is a socket");
        for number in 0..4 {
            owners
                .write_all(Message::answer("numbers").number("n", number).line().as_bytes())
                .expect("it fits");
        }
        let mut number =
            || line.ask(&Message::ask("numbers")).unwrap().and_then(|answer| answer.number_of("n"));
        assert_eq!((number(), number()), (Some(2), Some(3)));
        owners.write_all(Message::answer("stopped").number("n", 4).line().as_bytes()).expect("it fits");
        drop(owners);
        assert_eq!((number(), number()), (Some(4), None), "what it said before it ended");
    }
}
